"""Demonstrations: what is played, what is kept, what comes back from disk."""

import asyncio
import collections
import dataclasses
import logging
import re
import subprocess
import sys

import numpy as np
import pytest

from planpo_jax import (
  demonstrations,
  env_client,
  env_service,
  episodes,
  expert_styles,
)

# The solution that ScienceWorld gives for find-non-living-thing 77 (easy).
GOLD = (
  'open door to hallway',
  'go to hallway',
  'open door to living room',
  'go to living room',
  'look around',
  'focus on book shelf',
  'move book shelf to purple box',
)
GOAL = (
  'Your task is to find a(n) non-living thing. First, focus on the thing.'
  ' Then, move it to the purple box in the living room.'
)
EASY = (('simplifications', 'easy'),)
TASK = episodes.Task(
  'sciworld', 'test', 77, 'find-non-living-thing', options=EASY
)
SETTINGS = {
  'seed': 3,
  'step_limit': 40,
  'styles': {'gold': 1.0},
  'detour_rate': 0.0,
  'concurrency': 2,
}


class FakeSession:
  """Answers from `answers` (action to text); wins on the last gold action."""

  def __init__(self, client, task):
    self.client = client
    self.task = task
    self.played = []
    self.closed = False

  async def reset(self):
    await asyncio.sleep(self.client.delays.get(self.task.index, 0))
    if self.task.index in self.client.faults:
      raise env_client.EnvFault('the worker died')
    return episodes.Observation(
      'start', goal=GOAL, expert_actions=self.client.solution
    )

  async def step(self, action):
    self.played.append(action)
    won = action == GOLD[-1] and self.task.index not in self.client.losing
    return episodes.Observation(
      self.client.answers.get(action, f'{action} {len(self.played)}'),
      score=100.0 if won else 8.0,
      success=won,
      ending=episodes.Ending.TERMINATED if action == GOLD[-1] else None,
    )

  async def close(self):
    self.closed = True


class FakeClient:
  def __init__(
    self, solution=GOLD, answers=(), delays=(), faults=(), losing=()
  ):
    self.solution = solution
    self.answers = dict(answers)
    self.delays = dict(delays)
    self.faults = faults
    self.losing = losing
    self.sessions = []

  def session(self, task, *, step_limit, expert, admissible):
    assert expert
    assert step_limit == SETTINGS['step_limit']
    self.sessions.append(FakeSession(self, task))
    return self.sessions[-1]


def record(client, tasks, **changes):
  return asyncio.run(
    demonstrations.record(client, tasks, **(SETTINGS | changes))
  )


def actions_of(demonstration):
  return [step.action for step in demonstration.steps]


def plays(style, actions, seed=0):
  moves = expert_styles.rewrite(actions, style, np.random.default_rng(seed))
  return [move.action for move in moves]


def numbered(*indices):
  return [dataclasses.replace(TASK, index=index) for index in indices]


# --- Styles.


def test_gold_plays_the_solution_unchanged():
  assert plays('gold', GOLD) == list(GOLD)


def test_brisk_leaves_out_doors_and_looks():
  assert plays('brisk', GOLD) == [
    'go to hallway',
    'go to living room',
    'focus on book shelf',
    'move book shelf to purple box',
  ]


def test_brisk_keeps_what_it_left_out_as_fallback():
  moves = expert_styles.rewrite(GOLD, 'brisk', np.random.default_rng(0))
  assert [move.fallback for move in moves] == [
    ('open door to hallway', 'go to hallway'),
    ('open door to living room', 'go to living room'),
    ('look around', 'focus on book shelf'),
    (),
  ]


def test_brisk_keeps_a_tail_of_looks():
  # The end of the solution of power-component 0.
  tail = ['wait1', 'wait1', 'look around']
  assert plays('brisk', tail) == tail


def test_teleport_joins_a_walk_and_drops_half_of_the_looks():
  without = [
    'teleport to living room',
    'focus on book shelf',
    'move book shelf to purple box',
  ]
  looking = [without[0], 'look around', *without[1:]]
  played = [plays('teleport', GOLD, seed) for seed in range(200)]
  assert all(actions in (without, looking) for actions in played)
  assert 70 < sum(actions == without for actions in played) < 130


def test_teleport_joins_each_walk_on_its_own():
  # The solution of find-living-thing 230, up to its move.
  solution = [
    'open door to outside',
    'go to outside',
    'focus on egg turtle',
    'pick up egg turtle',
    'open door to greenhouse',
    'go to greenhouse',
    'open door to hallway',
    'go to hallway',
    'open door to bedroom',
    'go to bedroom',
    'move egg turtle egg in inventory to blue box',
  ]
  assert plays('teleport', solution) == [
    'teleport to outside',
    'focus on egg turtle',
    'pick up egg turtle',
    'teleport to bedroom',
    'move egg turtle egg in inventory to blue box',
  ]
  moves = expert_styles.rewrite(solution, 'teleport', np.random.default_rng(0))
  assert moves[3].fallback == tuple(solution[4:10])


def test_teleport_keeps_a_door_that_is_not_walked_through():
  solution = ['open door to kitchen', 'focus on dove', 'wait1']
  assert plays('teleport', solution) == solution


@pytest.mark.parametrize(
  'env, simplifications, style, expected',
  [
    ('sciworld', 'easy', 'teleport', 'teleport'),
    ('sciworld', 'easy', 'brisk', 'brisk'),
    ('sciworld', 'openDoors,teleportAction', 'teleport', 'teleport'),
    ('sciworld', 'openDoors', 'teleport', 'gold'),
    ('sciworld', 'openDoors', 'brisk', 'brisk'),
    ('sciworld', '', 'brisk', 'gold'),
    ('other', 'easy', 'teleport', 'gold'),
    ('sciworld', 'easy', 'search', 'gold'),
    ('alfworld', 'easy', 'teleport', 'gold'),
  ],
)
def test_a_style_without_its_commands_falls_back_to_gold(
  env, simplifications, style, expected
):
  options = (('simplifications', simplifications),) if simplifications else ()
  task = dataclasses.replace(TASK, env=env, options=options)
  (demonstration,) = record(FakeClient(), [task], styles={style: 1})
  assert demonstration.style == expected
  if expected == 'gold':
    assert actions_of(demonstration) == list(GOLD)
  else:
    assert 'open door to hallway' not in actions_of(demonstration)


# --- Searching.

HOUSE = {
  'shelf 1': 'On the shelf 1, you see a mug 3.',
  'desk 1': 'On the desk 1, you see a pen 1.',
  'drawer 1': 'The drawer 1 is open. In it, you see a pencil 2, and a pen 4.',
  'drawer 2': 'The drawer 2 is open. In it, you see a mug 2.',
  'drawer 3': 'The drawer 3 is open. In it, you see nothing.',
  'bed 1': 'On the bed 1, you see a pillow 1.',
}
START = (
  'You are in the middle of a room. Looking quickly around you, you see a bed'
  ' 1, a desk 1, a drawer 3, a drawer 2, a drawer 1, and a shelf 1.\n\nYour'
  ' task is to: put a pen in bed.'
)
PLAN = (
  *('go to drawer 1', 'open drawer 1', 'take pencil 2 from drawer 1'),
  *('go to bed 1', 'move pencil 2 to bed 1'),
)
ROOM = episodes.Task('alfworld', 'train', 0, 'pick_and_place_simple')


class Room:
  """A part of ALFWorld: places, some of them closed, and things on them.

  Won by the last action of `plan`. Things that are moved show nowhere.
  """

  def __init__(self, plan, house):
    self._plan, self._house = plan, dict(house)
    self._closed = {place for place in house if place.startswith('drawer')}
    self._at = ''
    self.played = []

  async def reset(self):
    return episodes.Observation(
      START,
      goal='Your task is to: put a pen in bed.',
      expert_actions=self._plan,
    )

  async def step(self, action):
    self.played.append(action)
    verb, _, rest = action.partition(' ')
    text = 'Nothing happens.'
    if verb == 'go' and rest != f'to {self._at}':
      self._at = rest.removeprefix('to ')
      seen = self._house[self._at]
      if self._at in self._closed:
        seen = f'The {self._at} is closed.'
      text = f'You arrive at {self._at}. {seen}'
    elif verb == 'open' and rest == self._at and self._at in self._closed:
      self._closed.remove(self._at)
      text = f'You open the {self._at}. {self._house[self._at]}'
    elif verb == 'take':
      thing = rest.partition(' from ')[0]
      if self._at not in self._closed and thing in self._house[self._at]:
        self._house[self._at] = f'On the {self._at}, you see nothing.'
        text = f'You pick up the {thing} from the {self._at}.'
    elif verb == 'move':
      text = f'You move the {rest.replace(" to ", " to the ")}.'
    elif action in ('look', 'inventory'):
      text = f'You do {action}.'
    won = action == self._plan[-1]
    return episodes.Observation(
      text,
      score=100.0 * won,
      success=won,
      ending=episodes.Ending.TERMINATED if won else None,
    )

  async def close(self):
    pass


class House:
  def __init__(self, plan=PLAN, house=HOUSE):
    self._plan, self._house = plan, house
    self.rooms = []

  def session(self, task, **how):
    self.rooms.append(Room(self._plan, self._house))
    return self.rooms[-1]


def search(client, count=300, **changes):
  return record(client, [ROOM] * count, styles={'search': 1}, **changes)


def seen_at(demonstration):
  """{place: what was seen there last}, in order, up to what is taken."""
  found, at = {}, ''
  steps = demonstration.steps
  for step, after in zip(steps, steps[1:], strict=False):
    if step.action.startswith('take '):
      return found
    if step.action.startswith('go to '):
      at = step.action.removeprefix('go to ')
      assert at not in found
    if at and step.action.split()[0] in ('go', 'open'):
      found[at] = after.observation
  raise AssertionError('nothing was taken')


def test_search_looks_into_other_places_first_each_once():
  kept = search(House())
  assert len(kept) == 300
  visits = []
  for one in kept:
    assert one.style == 'search' and one.score == 100.0
    assert 'Nothing happens.' not in [step.observation for step in one.steps]
    places = seen_at(one)
    # What is closed is opened, and gone on from.
    assert not any('closed' in text for text in places.values())
    *before, last = places
    assert last == 'drawer 1'
    visits.append(before)
    # Then as the solution goes on.
    assert actions_of(one)[-3:] == list(PLAN[-3:])
  counts = [sum(len(v) == n for v in visits) for n in range(4)]
  assert sum(counts) == 300 and min(counts) > 40
  others = {'bed 1', 'desk 1', 'drawer 2', 'drawer 3', 'shelf 1'}
  assert {place for before in visits for place in before} == others


def test_nobody_searches_on_past_what_is_wanted():
  """A pencil lies on the desk as well, and one in a closed drawer."""
  other = HOUSE | {
    'desk 1': 'On the desk 1, you see a pencil 1.',
    'drawer 3': 'The drawer 3 is open. In it, you see a pencil 7.',
  }
  client = House(house=other)
  kept = search(client)
  # They were gone to, but such an episode is begun again without.
  assert len(client.rooms) > len(kept) == 300
  assert any('go to drawer 3' in room.played for room in client.rooms)
  for one in kept:
    assert not {'desk 1', 'drawer 3'} & seen_at(one).keys()
    first = [s.observation for s in one.steps].index(
      'You open the drawer 1. ' + other['drawer 1']
    )
    assert not any('pencil' in s.observation for s in one.steps[:first])


def test_what_was_seen_before_is_not_searched_for():
  """Two pencils: the second was seen as the first was taken."""
  plan = (
    *PLAN[:-1],
    'move pencil 2 to bed 1',
    'go to desk 1',
    'take pencil 1 from desk 1',
    'go to bed 1',
    'move pencil 1 to bed 1',
  )
  both = HOUSE | {
    'drawer 1': 'The drawer 1 is open. In it, you see a pencil 1, a pencil 2.',
    'desk 1': 'On the desk 1, you see a pencil 1.',
  }
  for one in search(House(plan, both), 60):
    actions = actions_of(one)
    second = actions[actions.index('move pencil 2 to bed 1') + 1 :]
    assert second == list(plan[5:])
  apart = both | {'drawer 1': HOUSE['drawer 1']}
  later = []
  for one in search(House(plan, apart), 60):
    actions = actions_of(one)
    later.append(actions[actions.index('move pencil 2 to bed 1') + 1 :])
    # Nor is a place looked into twice, or again after it was taken from.
    times = collections.Counter(actions)
    assert times['go to drawer 1'] == times['go to desk 1'] == 1
    for place in ('drawer 2', 'drawer 3', 'shelf 1'):
      assert times[f'go to {place}'] <= 1
  assert any(len(actions) > 4 for actions in later)


def test_a_search_is_decided_by_the_seed():
  kept = search(House(), 20, detour_rate=0.3)
  assert search(House(), 20, detour_rate=0.3, concurrency=5) == kept
  assert search(House(), 20, detour_rate=0.3, seed=4) != kept
  assert {'look', 'inventory'} <= {a for one in kept for a in actions_of(one)}


def test_search_opens_only_what_the_solution_opens():
  """A place that the solution uses closed stays closed."""
  plan = (*PLAN[:3], 'go to drawer 2', 'go to bed 1', 'move pencil 2 to bed 1')
  rng = np.random.default_rng(0)
  moves = expert_styles.rewrite(plan, 'search', rng)
  assert [move.action for move in moves] == [
    *('go to drawer 1', 'take pencil 2 from drawer 1'),
    *('go to drawer 2', 'go to bed 1', 'move pencil 2 to bed 1'),
  ]
  assert [move.place for move in moves] == ['drawer 1', '', '', '', '']


def test_thoughts_on_the_commands_of_alfworld():
  kept = search(House(), 100, detour_rate=0.2)
  thoughts = {step.thought for one in kept for step in one.steps}
  for plan in (
    'go to the drawer 1',
    'open the drawer 1',
    'take the pencil 2 from the drawer 1',
    'put the pencil 2 in or on the bed 1',
    'look around',
    'check the inventory',
  ):
    assert f'My task is to put a pen in bed. I should now {plan}.' in thoughts
  assert {'Open it.', 'What is in it?', 'Put it there.'} <= thoughts


@pytest.mark.parametrize(
  'action, plan',
  [
    ('put mug 1 in/on shelf 2', 'put the mug 1 in or on the shelf 2'),
    ('use desklamp 1', 'turn on the desklamp 1'),
    ('clean mug 1 with sinkbasin 1', 'clean the mug 1 with the sinkbasin 1'),
    ('cool mug 1 with fridge 1', 'cool the mug 1 with the fridge 1'),
    ('close fridge 1', 'close the fridge 1'),
    ('examine mug 1', 'look closely at the mug 1'),
  ],
)
def test_plans_of_single_commands(action, plan):
  class Open(Room):
    async def step(self, action):
      after = await super().step(action)
      return dataclasses.replace(after, text='You do something.')

  class OpenHouse(House):
    def session(self, task, **how):
      return Open(self._plan, HOUSE)

  kept = record(OpenHouse((action,)), [ROOM] * 20)
  wordy = [one.steps[0].thought for one in kept]
  assert any(plan in thought for thought in wordy)


# --- Recording.


def test_steps_hold_what_was_seen_before_the_action():
  client = FakeClient()
  (demonstration,) = record(client, [TASK])
  assert demonstration.task == TASK
  assert demonstration.goal == GOAL
  assert demonstration.score == 100.0
  assert actions_of(demonstration) == list(GOLD) == client.sessions[0].played
  assert [step.observation for step in demonstration.steps] == [
    'start',
    *(f'{action} {turn}' for turn, action in enumerate(GOLD[:-1], 1)),
  ]
  assert client.sessions[0].closed


def test_stops_where_the_environment_ends_the_episode():
  client = FakeClient(solution=(*GOLD, 'wait1', 'wait1'))
  (demonstration,) = record(client, [TASK])
  assert actions_of(demonstration) == list(GOLD)


@pytest.mark.parametrize(
  'refusal',
  [
    'The door is not open.',
    'No known action matches that input.',
    'Nothing happens.',
  ],
)
def test_a_refused_action_is_followed_by_the_solution(refusal):
  client = FakeClient(answers={'go to hallway': refusal})
  (demonstration,) = record(client, [TASK], styles={'brisk': 1})
  assert actions_of(demonstration) == [
    'go to hallway',
    'open door to hallway',
    'go to hallway',
    'go to living room',
    'focus on book shelf',
    'move book shelf to purple box',
  ]
  assert demonstration.steps[1].observation == refusal


def test_keeps_successes_only_and_logs_the_others(caplog):
  client = FakeClient(faults=(2,), losing=(1, 4))
  with caplog.at_level(logging.INFO, demonstrations.__name__):
    kept = record(client, numbered(0, 1, 2, 3, 4))
  assert [demonstration.task.index for demonstration in kept] == [0, 3]
  (summary,) = [text for text in caplog.messages if 'Recorded' in text]
  assert summary == (
    'Recorded 2 demonstrations of 5 episodes; refused 3, 1 faults, 2 without'
    ' success.'
  )
  assert any('the worker died' in text for text in caplog.messages)
  assert all(session.closed for session in client.sessions)


def test_a_task_without_a_solution_is_refused(caplog):
  with caplog.at_level(logging.INFO, demonstrations.__name__):
    assert record(FakeClient(solution=()), [TASK]) == []
  assert 'refused 1, 1 without a solution' in caplog.text


def test_neither_timing_nor_concurrency_nor_neighbours_change_a_recording():
  mixed = {
    'styles': {'gold': 1, 'brisk': 1, 'teleport': 2},
    'detour_rate': 0.3,
  }
  tasks = numbered(*range(12))
  expected = record(FakeClient(), tasks, **mixed)
  assert [kept.task.index for kept in expected] == list(range(12))
  slow = FakeClient(delays={0: 0.05, 5: 0.02, 7: 0.03})
  assert record(slow, tasks, **mixed, concurrency=5) == expected
  backwards = record(FakeClient(), tasks[::-1], **mixed)
  assert backwards == expected[::-1]
  flipped = mixed | {'styles': {'teleport': 2, 'brisk': 1, 'gold': 1}}
  assert record(FakeClient(), tasks, **flipped) == expected
  assert record(FakeClient(), tasks, **mixed, seed=4) != expected


def test_no_more_episodes_at_once_than_asked_for():
  open_now, most = set(), 0

  class Counting(FakeSession):
    async def reset(self):
      nonlocal most
      open_now.add(self)
      most = max(most, len(open_now))
      await asyncio.sleep(0.005)
      return await super().reset()

    async def close(self):
      open_now.discard(self)

  class CountingClient(FakeClient):
    def session(self, task, **how):
      return Counting(self, task)

  record(CountingClient(), numbered(*range(9)), concurrency=3)
  assert most == 3


def test_a_repeated_task_is_played_differently():
  repeats = record(FakeClient(), [TASK] * 8, detour_rate=0.3)
  assert len({tuple(actions_of(kept)) for kept in repeats}) > 4
  again = record(FakeClient(), [TASK] * 3, detour_rate=0.3)
  assert again == repeats[:3]


def test_styles_are_drawn_by_weight():
  weights = {'gold': 1, 'brisk': 0, 'teleport': 3}
  kept = record(FakeClient(), numbered(*range(200)), styles=weights)
  styles = [demonstration.style for demonstration in kept]
  assert styles.count('brisk') == 0
  assert 125 < styles.count('teleport') < 175


def test_detours_are_harmless_and_come_at_their_rate():
  kept = record(FakeClient(), numbered(*range(100)), detour_rate=0.25)
  extra = []
  for demonstration in kept:
    left = list(GOLD)
    for action in actions_of(demonstration):
      if left and action == left[0]:
        left.pop(0)
      else:
        extra.append(action)
    assert not left
  assert set(extra) == {'look around', 'inventory', 'wait1'}
  assert 130 < len(extra) < 220  # 700 actions, each with chance 0.25.
  always = record(FakeClient(), [TASK], detour_rate=1.0)
  assert len(always[0].steps) == 2 * len(GOLD)
  elsewhere = dataclasses.replace(TASK, env='other')
  (plain,) = record(FakeClient(), [elsewhere], detour_rate=1.0)
  assert actions_of(plain) == list(GOLD)


def test_progress_counts_every_episode():
  calls = []
  client = FakeClient(faults=(0,), losing=(1,))
  record(
    client, numbered(0, 1, 2), progress=lambda *counts: calls.append(counts)
  )
  assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'styles': {'brisck': 1}}, r"\['brisck'\].*'brisk'.*'teleport'"),
    ({'styles': {'gold': 0}}, r"\{'gold': 0\}.*above 0"),
    ({'styles': {}}, r'above 0'),
    ({'styles': {'gold': -1, 'brisk': 2}}, r'-1.*0 or more'),
    ({'styles': {'gold': float('nan')}}, r'nan.*finite'),
    ({'styles': {'gold': float('inf')}}, r'inf.*finite'),
    ({'detour_rate': 1.5}, r'detour_rate=1.5 must be a probability'),
    ({'concurrency': 0}, r'concurrency=0 must be at least 1'),
  ],
)
def test_bad_settings_are_named_before_anything_is_played(changes, message):
  client = FakeClient()
  with pytest.raises(ValueError, match=message):
    record(client, [TASK], **changes)
  assert not client.sessions


def test_a_refused_task_ends_the_recording_with_its_own_error():
  class Refusing(FakeClient):
    def session(self, task, **how):
      if task.index == 1:
        raise ValueError('index 1 is not in split test')
      return super().session(task, **how)

  client = Refusing(delays={0: 30})
  with pytest.raises(ValueError, match='index 1 is not in split test'):
    record(client, numbered(0, 1, 2))
  assert all(session.closed for session in client.sessions)


# --- Thoughts.


def test_terse_and_wordy_thoughts():
  kept = record(FakeClient(), numbered(*range(100)))
  thoughts = [step.thought for one in kept for step in one.steps]
  words = [len(thought.split()) for thought in thoughts]
  terse = [count <= 5 for count in words]
  assert 0.35 < sum(terse) / len(terse) < 0.65
  # The manner belongs to the episode, with noise in single steps.
  shares = [
    np.mean([len(step.thought.split()) <= 5 for step in one.steps])
    for one in kept
  ]
  assert sum(share <= 0.45 or share >= 0.55 for share in shares) > 90
  assert sum(0 < share < 1 for share in shares) > 30
  wordy = [
    thought for thought, short in zip(thoughts, terse, strict=True) if not short
  ]
  objective = (
    'find a non-living thing, first focus on the thing, then move it to the'
    ' purple box in the living room'
  )
  assert all(objective in thought for thought in wordy)
  assert all(thought.count('. ') <= 1 for thought in wordy)
  assert (
    f'My task is to {objective}. I should now focus on the book shelf.' in wordy
  )
  assert {'To the hallway.', 'Now focus.', 'Move it.'} <= set(thoughts)


def test_only_the_first_step_is_called_the_first():
  kept = record(FakeClient(), numbered(*range(40)))
  plan = re.compile(r'should first|first step')
  assert any(plan.search(one.steps[0].thought) for one in kept)
  later = [step.thought for one in kept for step in one.steps[1:]]
  assert not any(plan.search(thought) for thought in later)


@pytest.mark.parametrize(
  'goal, objective',
  [
    (
      'Your task is to find a(n) animal. First, focus on the thing.',
      'find an animal, first focus on the thing',
    ),
    (
      'Your task is to find the animal with the longest life span.  The'
      " animals are in the 'outside' location.  Focus on it.",
      'find the animal with the longest life span',
    ),
    ('Win.', 'reach this goal: Win'),
    (
      'Your task is to: put a clean mug in shelf.',
      'put a clean mug in shelf',
    ),
    (
      f'Your task is to boil water. Then, {"wait " * 40}here.',
      'boil water',
    ),
  ],
)
def test_objective_of_a_goal(goal, objective):
  class Elsewhere(FakeSession):
    async def reset(self):
      return dataclasses.replace(await super().reset(), goal=goal)

  class ElsewhereClient(FakeClient):
    def session(self, task, **how):
      return Elsewhere(self, task)

  kept = record(ElsewhereClient(), numbered(*range(10)))
  wordy = [
    step.thought
    for one in kept
    for step in one.steps
    if len(step.thought.split()) > 5
  ]
  assert wordy
  ends = re.escape(objective) + r'(\. |\.$)'
  assert all(re.search(ends, thought) for thought in wordy)


# --- The dataset.


@pytest.fixture(scope='module')
def stored():
  """Demonstrations with every kind of text that could be changed on disk."""
  odd = [
    'plain',
    '',
    'tab\tline\nreturn\r\n',
    'ends with nul\0',
    'ÅngströmÅ 日本語 🧪',
    ' spaces around ',
    '"quotes" \\ <|im_end|>',
  ]
  steps = tuple(
    demonstrations.Step(text, text[::-1], f'act {text}') for text in odd
  )
  varied = [
    demonstrations.Demonstration(
      dataclasses.replace(TASK, index=index, seed=-index * 2**40),
      goal=odd[index % len(odd)],
      style=expert_styles.STYLES[index % 5],
      steps=steps[: 1 + index % len(steps)],
      score=100 / (3 + index),
    )
    for index in range(40)
  ]
  options = (('a', 'é'), ('b', ''))
  varied[7] = dataclasses.replace(
    varied[7], task=episodes.Task('toy', 'dev', 3, 'fetch', options=options)
  )
  varied[8] = dataclasses.replace(
    varied[8], task=episodes.Task('toy', 'dev', 3, 'fetch')
  )
  return varied


def test_reads_back_exactly_what_was_written_in_order(tmp_path, stored):
  demonstrations.write(tmp_path / 'new' / 'folder', stored)
  back = demonstrations.read(tmp_path / 'new' / 'folder')
  assert back == stored
  step = back[6].steps[0]
  assert isinstance(step.observation, str) and isinstance(back[0].score, float)


def test_writes_nothing_but_the_dataset(tmp_path, stored, capfd, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  demonstrations.write(tmp_path / 'data', stored[:2])
  assert [path.name for path in tmp_path.iterdir()] == ['data']
  (dataset,) = (tmp_path / 'data').iterdir()
  assert [path.name for path in dataset.iterdir()] == ['2.0.0']
  assert capfd.readouterr() == ('', '')


def test_overwriting_is_asked_for(tmp_path, stored):
  demonstrations.write(tmp_path, stored)
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(FileExistsError, match='overwrite=True'):
    demonstrations.write(tmp_path, stored[:3])
  assert demonstrations.read(tmp_path) == stored
  demonstrations.write(tmp_path, stored[:3], overwrite=True)
  assert demonstrations.read(tmp_path) == stored[:3]
  assert (tmp_path / 'notes.txt').read_text() == 'mine'
  assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_the_old_dataset(tmp_path, stored):
  demonstrations.write(tmp_path, stored[:3])
  broken = dataclasses.replace(stored[1], goal=None)
  with pytest.raises(Exception, match='goal'):
    demonstrations.write(tmp_path, [stored[0], broken], overwrite=True)
  assert demonstrations.read(tmp_path) == stored[:3]
  assert len(list(tmp_path.iterdir())) == 1


def test_nothing_to_write(tmp_path):
  with pytest.raises(ValueError, match='at least one is needed'):
    demonstrations.write(tmp_path / 'data', [])
  assert not (tmp_path / 'data').exists()


def test_a_dataset_of_another_version_is_told_of(tmp_path, stored):
  demonstrations.write(tmp_path, stored[:2])
  (path,) = tmp_path.glob('*/2.0.0')
  path.rename(path.with_name('1.0.0'))
  with pytest.raises(
    ValueError, match=r'of version 1\.0\.0, and version 2\.0\.0.*Delete'
  ):
    demonstrations.read(tmp_path)


def test_lists_of_actions_come_back(tmp_path):
  lists = (('a', 'é "b"'), (), ('with\nline; and', ''), tuple('x' * 3000))
  steps = [demonstrations.Step('seen', 'hm', 'go', able) for able in lists]
  one = demonstrations.Demonstration(TASK, 'goal', 'gold', tuple(steps), 1.0)
  demonstrations.write(tmp_path, [one])
  assert demonstrations.read(tmp_path) == [one]


def test_a_missing_dataset_names_the_command_that_makes_it(tmp_path):
  with pytest.raises(FileNotFoundError, match='launch/warmstart.py') as error:
    demonstrations.read(tmp_path / 'nowhere')
  assert 'nowhere' in str(error.value)


def _cut(path):
  path.write_bytes(path.read_bytes()[:-200])


def _flip(path):
  content = bytearray(path.read_bytes())
  middle = len(content) // 2
  content[middle : middle + 8] = bytes(8)
  path.write_bytes(content)


def _empty(path):
  path.write_bytes(b'')


@pytest.mark.parametrize(
  'pattern, damage',
  [
    ('*array_record*', _cut),
    ('*array_record*', _flip),
    ('*array_record*', _empty),
    ('*array_record*', lambda path: path.unlink()),
    ('dataset_info.json', _cut),
    ('dataset_info.json', lambda path: path.unlink()),
    ('features.json', lambda path: path.unlink()),
    ('features.json', _empty),
  ],
)
def test_a_damaged_dataset_is_refused(tmp_path, stored, pattern, damage):
  demonstrations.write(tmp_path, stored)
  (path,) = tmp_path.rglob(pattern)
  damage(path)
  with pytest.raises(ValueError, match='launch/warmstart.py'):
    demonstrations.read(tmp_path)


def test_corpus_holds_every_text():
  first = demonstrations.Demonstration(
    TASK, 'goal', 'gold', (demonstrations.Step('seen', 'hm', 'go'),), 1.0
  )
  second = dataclasses.replace(first, goal='other')
  assert list(demonstrations.corpus([first, second])) == [
    *('goal', 'seen', 'hm', 'go'),
    *('other', 'seen', 'hm', 'go'),
  ]
  able = dataclasses.replace(first.steps[0], admissible=('b', 'a', 'b'))
  listing = dataclasses.replace(first, steps=(able,))
  assert list(demonstrations.corpus([listing]))[-1] == (
    'Actions you can take now: a; b'
  )


# --- All of it, through the real service.

_WITHOUT_TENSORFLOW = """
import sys
from planpo_jax import demonstrations
back = demonstrations.read(sys.argv[1])
demonstrations.write(sys.argv[2], back)
assert demonstrations.read(sys.argv[2]) == back
assert 'tensorflow' not in sys.modules
print(len(back))
"""


def test_toy_experts_through_the_service(tmp_path):
  async def record_toy(address):
    client = env_client.EnvClient(address)
    await client.connect()
    try:
      listed = await client.list_tasks('train')
      kept = await demonstrations.record(
        client,
        listed[::8],
        seed=0,
        step_limit=60,
        styles={'gold': 1, 'brisk': 1, 'teleport': 1},
        detour_rate=0.2,
        concurrency=2,
      )
      replayed = []
      for demonstration in kept[:3]:
        session = client.session(demonstration.task, step_limit=60)
        seen = await session.reset()
        for step in demonstration.steps:
          assert seen.ending is None
          assert seen.text == step.observation
          seen = await session.step(step.action)
        await session.close()
        replayed.append((seen.success, seen.score))
    finally:
      await client.close()
    return listed[::8], kept, replayed

  with env_service.LocalService('toy', 2) as service:
    tasks, kept, replayed = asyncio.run(record_toy(service.address))
  assert [demonstration.task for demonstration in kept] == tasks
  assert len({demonstration.task.name for demonstration in kept}) >= 3
  assert {demonstration.style for demonstration in kept} == {'gold'}
  assert any('look' in actions_of(demonstration) for demonstration in kept)
  assert replayed == [(True, one.score) for one in kept[:3]]
  demonstrations.write(tmp_path / 'a', kept)
  assert demonstrations.read(tmp_path / 'a') == kept
  done = subprocess.run(
    [sys.executable, '-c', _WITHOUT_TENSORFLOW, tmp_path / 'a', tmp_path / 'b'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) == len(kept)
