"""Reflexion: who plays again, what is remembered, what counts."""

import asyncio
import dataclasses
import types

import jax
import numpy as np
import pytest

from configs import quickstart
from planpo_jax import (
  build,
  chat,
  episodes,
  metrics,
  prompting,
  rollout,
  sampling,
  sharding,
  tokenizer,
)
from planpo_jax.models import qwen2

TOK = tokenizer.load('nano')
WIN, LOSS, FAULT = 'win', 'loss', 'fault'
START = 'You are in a hall.'


def fmt(**changes):
  return chat.Format(
    **{
      'tokenizer': TOK,
      'context': 'conversation',
      'prompt': 'brief',
      'action_format': '',
      'history': 2,
      'max_context': 1024,
      'max_response': 16,
      **changes,
    }
  )


def task(index):
  return episodes.Task('toy', 'test', index, 'fetch')


def job(index):
  return task(index), 0


def episode(index, outcome=LOSS, *, trial=1, turns=2):
  """`trial` is told by its score."""
  ending = episodes.Ending.TERMINATED
  if outcome == FAULT:
    ending, turns = episodes.Ending.FAULT, 0
  played = (
    episodes.Turn((1,), (2,), (0.0,), START, ' go on\n', 'a', 0.0, True, 0),
  )
  return episodes.Episode(
    task(index),
    0,
    played * turns,
    float(trial),
    outcome == WIN,
    ending,
    goal=f'Goal {index}.',
  )


class ScriptedPlayer:
  """Plays by a script, `index -> outcome of each trial`; numbers its notes.

  Attributes:
    plays: (indices of the tasks, prefaces, seed) of each call.
    writes: (prompts, keys) of each call.
  """

  def __init__(self, script, format=None, notes=None):
    self.format = format or fmt()
    self._script = {i: list(outcomes) for i, outcomes in script.items()}
    self._notes = notes
    self.plays = []
    self.writes = []

  def play(self, label, jobs, *, seed, max_turns, settings, prefaces):
    indices = [t.index for t, _ in jobs]
    self.plays.append((indices, prefaces, seed))
    trial = len(self.plays)
    played = [
      episode(i, self._script[i][trial - 1], trial=trial) for i in indices
    ]
    return rollout.Collected(played, stats=None)

  def write(self, label, prompts, keys, *, settings):
    self.writes.append(([TOK.decode(p) for p in prompts], keys))
    note = self._notes or ' note\n {} '
    return [note.format(len(self.writes)) for _ in prompts]


def reflexion(player, indices, **chosen):
  return prompting.reflexion(
    player,
    [job(i) for i in indices],
    seed=(7, 1),
    max_turns=5,
    settings=sampling.Settings(),
    **chosen,
  )


def test_only_what_is_unsolved_is_played_again():
  player = ScriptedPlayer({0: [WIN], 1: [LOSS, WIN], 2: [LOSS] * 3})
  history = reflexion(player, [0, 1, 2])
  assert [indices for indices, _, _ in player.plays] == [[0, 1, 2], [1, 2], [2]]
  # The first success stays, and the last failure counts.
  assert [[(e.score, e.success) for e in row] for row in history] == [
    [(1.0, True), (1.0, False), (1.0, False)],
    [(1.0, True), (2.0, True), (2.0, False)],
    [(1.0, True), (2.0, True), (3.0, False)],
  ]
  # Nobody would read a reflection on the last trial.
  assert [len(prompts) for prompts, _ in player.writes] == [2, 1]


def test_nothing_is_played_once_all_is_solved():
  player = ScriptedPlayer({0: [WIN], 1: [WIN]})
  history = reflexion(player, [0, 1], trials=4)
  assert len(player.plays) == 1 and not player.writes
  assert [[e.score for e in row] for row in history] == [[1.0, 1.0]] * 4


def test_memory_holds_the_last_reflections_in_order():
  player = ScriptedPlayer({0: [LOSS] * 5})
  reflexion(player, [0], trials=5, memory=2)
  head = 'You attempted this task before and failed. What you noted then:\n'
  assert [prefaces for _, prefaces, _ in player.plays] == [
    [''],
    [f'{head}- note 1\n'],
    [f'{head}- note 1\n- note 2\n'],
    [f'{head}- note 2\n- note 3\n'],
    [f'{head}- note 3\n- note 4\n'],
  ]
  # Who reflects reads what it noted before.
  shown = [[f'note {n}' in p[0] for n in (1, 2, 3)] for p, _ in player.writes]
  assert shown == [
    [False, False, False],
    [True, False, False],
    [True, True, False],
    [False, True, True],
  ]


def test_memories_belong_to_their_job():
  player = ScriptedPlayer({0: [LOSS, WIN], 1: [FAULT, LOSS, LOSS]})
  reflexion(player, [0, 1])
  notes = [
    [p.count('- note') for p in prefaces] for _, prefaces, _ in player.plays
  ]
  assert notes == [[0, 0], [1, 0], [1]]


def test_a_fault_is_no_attempt():
  player = ScriptedPlayer({0: [FAULT, LOSS, FAULT], 1: [FAULT, FAULT, WIN]})
  history = reflexion(player, [0, 1])
  fault, ended = episodes.Ending.FAULT, episodes.Ending.TERMINATED
  assert [[e.ending for e in row] for row in history] == [
    [fault, fault],
    [ended, fault],
    [ended, ended],
  ]
  # The failure of the second trial stands.
  assert history[2][0].score == 2.0 and history[2][1].success
  assert [len(prompts) for prompts, _ in player.writes] == [1]


def test_an_empty_reflection_is_not_remembered():
  player = ScriptedPlayer({0: [LOSS] * 3}, notes=' \n')
  reflexion(player, [0])
  assert [prefaces for _, prefaces, _ in player.plays] == [['']] * 3


def test_random_keys_follow_from_seed_trial_and_job():
  together = ScriptedPlayer({0: [LOSS] * 3, 1: [LOSS, WIN]})
  reflexion(together, [0, 1])
  # The first trial draws as an evaluation without reflections does.
  assert [seed for _, _, seed in together.plays] == [
    (7, 1),
    (7, 1, 1),
    (7, 1, 2),
  ]
  alone = ScriptedPlayer({0: [LOSS] * 3})
  reflexion(alone, [0])
  for (_, ours), (_, theirs) in zip(together.writes, alone.writes, strict=True):
    np.testing.assert_array_equal(ours[0], theirs[0])
  written = [tuple(key) for _, keys in together.writes for key in keys]
  acted = [
    tuple(rollout.turn_key(seed, *job(i), turn))
    for indices, _, seed in together.plays
    for i in indices
    for turn in range(5)
  ]
  assert len({*written, *acted}) == len(written) + len(acted)


def test_prompt_of_a_reflection():
  made = fmt(prompt='react')
  ids = prompting.reflection_prompt(made, episode(4), ['one', 'two'])
  # The system message is that of the tokenizer, if any: that of ReAct would
  # ask for an action.
  assert TOK.decode(ids) == (
    'user\nHere is how you attempted a task in a text environment.\n'
    'You attempted this task before and failed. What you noted then:\n'
    '- one\n- two\n'
    '[1] You are in a hall.\n> go on\n'
    '[2] You are in a hall.\n> go on\n'
    'Task: Goal 4.\n'
    'The attempt failed. Do not retell it. Say in a few sentences which of '
    'your decisions were wrong, and which actions you will take instead when '
    'you attempt the same task again.\nassistant\n'
  )
  assert ids[0] == TOK.im_start and ids.count(TOK.im_end) == 1
  ruled = fmt(prompt='react', tokenizer=dataclasses.replace(TOK, system='R.'))
  assert prompting.reflection_prompt(ruled, episode(4), ['one', 'two']) == [
    *ruled.message('system', 'R.'),
    *ids,
  ]


def test_a_long_transcript_is_cut_from_its_front():
  made = fmt(max_context=256, max_response=40)
  ids = prompting.reflection_prompt(made, episode(4, turns=30), ['one'])
  assert len(ids) == 256 - 40
  text = TOK.decode(ids)
  assert text.startswith('user\nHere is how you attempted')
  assert 'one' not in text and '[1]' not in text
  assert '[30] You are in a hall.\n> go on\nTask: Goal 4.\nThe attempt' in text


def first_prompt(made, reflections):
  talk = made.begin(prompting.preface(reflections) + 'Goal 0.')
  return talk.prompt(START)[0]


@pytest.mark.parametrize('spare,kept', [(0, 2), (-1, 1)])
def test_reflections_that_do_not_fit_are_dropped_oldest_first(spare, kept):
  """Room for exactly two before the goal, or for a token less."""
  notes = 'x' * 60 + ' {}'
  two = [notes.format(1), notes.format(2)]
  needed = len(first_prompt(fmt(), two))
  made = fmt(max_context=needed + 16 + spare)
  player = ScriptedPlayer({0: [LOSS] * 3}, made, notes)
  reflexion(player, [0])
  assert player.plays[2][1] == [prompting.preface(two[-kept:])]


def test_a_reflection_longer_than_the_context_is_dropped():
  made = fmt(max_context=256)
  player = ScriptedPlayer({0: [LOSS] * 2}, made, 'word ' * 400)
  reflexion(player, [0], trials=2)
  assert player.plays[1][1] == ['']


@pytest.mark.parametrize(
  'chosen,limits,text',
  [
    ({'trials': 0}, {}, 'trials=0 must be at least 1'),
    ({'memory': 0}, {}, 'memory=0 must be at least 1'),
    ({}, {'max_context': 100}, 'chat.max_context=100 must exceed'),
  ],
)
def test_what_cannot_work_is_refused_before_the_first_trial(
  chosen, limits, text
):
  player = ScriptedPlayer({0: [LOSS] * 3}, fmt(**limits))
  with pytest.raises(ValueError, match=text):
    reflexion(player, [0], **chosen)
  assert not player.plays


class Session:
  """Ends after two turns."""

  faults = 0

  def __init__(self, index):
    self._index, self._turn = index, 0

  async def reset(self):
    return episodes.Observation(START, goal=f'Goal {self._index}.')

  async def step(self, action):
    self._turn += 1
    over = self._turn == 2
    return episodes.Observation(
      'seen', ending=episodes.Ending.TERMINATED if over else None
    )

  async def close(self):
    pass


@pytest.fixture(scope='module')
def player():
  """A tiny random policy in two slots a device, and scripted sessions."""
  policy = qwen2.create(
    qwen2.Qwen2Config(
      vocab_size=1024,
      hidden_size=32,
      intermediate_size=48,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=16,
      tie_word_embeddings=True,
    ),
    TOK.num_tokens,
  )
  config = quickstart.get_config('smoke').copy_and_resolve_references()
  config.sampler.slots = 2 * jax.device_count()

  async def refresh():
    pass

  env = types.SimpleNamespace(
    description=types.SimpleNamespace(workers=16, action_format=''),
    client=types.SimpleNamespace(
      session=lambda task, **how: Session(task.index),
      refresh=refresh,
      workers=16,
      up=1,
    ),
    run=asyncio.run,
  )
  params = qwen2.init_params(policy, jax.random.key(0))
  # A fifth of all ids end a response, so that they end at different times.
  ends = dataclasses.replace(TOK, stop_ids=tuple(range(0, TOK.num_tokens, 5)))
  return build.Player(
    config,
    build.Model(policy, params, ends),
    sharding.make_mesh(fsdp=jax.device_count()),
    env,
    metrics.Terminal(),
  )


def test_a_preface_stands_before_the_goal_of_its_job_once(player):
  jobs, limits = [job(0), job(1)], {'seed': (0,), 'max_turns': 5}
  settings = sampling.Settings()
  plain = player.play('a', jobs, settings=settings, **limits).episodes
  noted = player.play(
    'b', jobs, settings=settings, prefaces=['', 'Note.\n'], **limits
  ).episodes
  assert noted[0] == plain[0]
  first, second = noted[1].turns
  text = TOK.decode(first.prompt_ids)
  assert f'Note.\nGoal 1.\n{START}' in text
  assert 'Note' not in TOK.decode(second.prompt_ids)
  # The goal is that of the task.
  assert noted[1].goal == 'Goal 1.'


def test_texts_come_in_the_order_of_their_prompts(player):
  """Five in two slots, against each alone."""
  contexts = [TOK.encode('word ' * n + 'end') for n in (1, 30, 3, 12, 7)]
  keys = [rollout.turn_key((n,), *job(n), 0) for n in range(5)]
  settings = sampling.Settings()
  texts = player.write('notes', contexts, keys, settings=settings)
  assert len({len(TOK.encode(text)) for text in texts}) > 2
  for i in range(5):
    one = slice(i, i + 1)
    assert player.write(
      'note', contexts[one], keys[one], settings=settings
    ) == [texts[i]]


def test_settings_of_writing_are_those_given(player):
  """With top_k = 1 the key does not matter."""
  ids, keys = [TOK.encode('one two')] * 2, [job(0), job(1)]
  keys = [rollout.turn_key((0,), *one, 0) for one in keys]
  drawn = player.write('notes', ids, keys, settings=sampling.Settings())
  best = player.write('notes', ids, keys, settings=sampling.Settings(top_k=1))
  assert drawn[0] != drawn[1] and best[0] == best[1]
