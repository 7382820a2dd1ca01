"""Playing episodes: order, keys, faults, and processes that die."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from planpo_jax import (
  chat,
  env_client,
  env_service,
  episodes,
  metrics,
  rollout,
  sampler,
  sampling,
  tokenizer,
)
from planpo_jax.models import qwen2
from tests import env_processes

TOK = tokenizer.load('nano')
POLICY = qwen2.create(
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
FORMAT = chat.Format(TOK, 'conversation', 'brief', '', 2, 512, 8)
TASKS = [episodes.Task('toy', 'train', i, 'fetch') for i in range(3)]


def make_sampler(slots=4, kind=sampler.Sampler, **changes):
  arguments = {'max_new_tokens': 8, 'stop_ids': TOK.stop_ids} | changes
  return kind(
    POLICY,
    qwen2.init_params(POLICY, jax.random.key(0)),
    slots=slots,
    cache_len=512,
    settings=sampling.Settings(),
    **arguments,
  )


def make_sampler_of_long_responses(kind, slots):
  """No response ends before 400 tokens; the format that goes with it, too."""
  fmt = chat.Format(TOK, 'conversation', 'brief', '', 2, 512, 400)
  return make_sampler(slots, kind, max_new_tokens=400, stop_ids=[]), fmt


class ScriptedSession:
  """Ends by itself after as many turns as the task's index, plus one.

  Lists `b TURN`, `a` and `a`, if asked for them.
  """

  def __init__(self, task, fault_at, latency, kind, lists=False):
    self._task, self._fault_at, self._turn = task, fault_at, 0
    self._latency, self._kind, self._lists = latency, kind, lists
    self.faults = 0
    self.closed = False

  async def reset(self):
    await asyncio.sleep(self._latency(self._task, 0))
    return episodes.Observation(
      'start', goal=f'Goal {self._task.index}.', admissible=self._able()
    )

  async def step(self, action):
    self._turn += 1
    await asyncio.sleep(self._latency(self._task, self._turn))
    if self._turn == self._fault_at:
      self.faults += 1
      raise env_client.EnvFault('the host is gone', **self._kind)
    over = self._turn > self._task.index
    return episodes.Observation(
      f'seen {self._turn}',
      reward=10.0,
      score=10.0 * self._turn,
      success=over,
      ending=episodes.Ending.TERMINATED if over else None,
      admissible=self._able(),
    )

  def _able(self):
    return (f'b {self._turn}', 'a', 'a') if self._lists else ()

  async def close(self):
    self.closed = True


class ScriptedClient:
  """Serves scripted sessions; those of `faulty` tasks break at their end.

  `latency(task, turn)` is the seconds that an answer takes, a reset's is that
  of turn 0. Only the first `faults` sessions of a faulty task break, with
  faults of such a `kind`; `up` services are up.
  """

  def __init__(
    self,
    faulty=(),
    latency=lambda task, turn: 0.0,
    faults=10**9,
    up=1,
    **kind,
  ):
    self._kind = kind
    self._faulty = dict.fromkeys(faulty, faults)
    self._latency = latency
    self.up = up
    self.sessions = []
    self.begun = []

  @property
  def playing(self):
    return sum(not s.closed for s in self.sessions)

  def session(self, task, *, step_limit, admissible):
    self.begun.append((task.index, self.playing))
    fault_at = None
    if self._faulty.get(task.index, 0):
      self._faulty[task.index] -= 1
      fault_at = task.index + 1
    self.sessions.append(
      ScriptedSession(task, fault_at, self._latency, self._kind, admissible)
    )
    return self.sessions[-1]


def collect(client, jobs, made=None, fmt=FORMAT, **kwargs):
  return asyncio.run(
    rollout.collect(
      client,
      made or make_sampler(),
      fmt,
      jobs,
      seed=(0, 0, 0),
      max_turns=6,
      **kwargs,
    )
  )


def play(*args, **kwargs):
  return collect(*args, **kwargs).episodes


def test_episodes_come_in_the_order_of_the_jobs():
  client = ScriptedClient()
  played = play(client, rollout.group_jobs(TASKS, 2))
  assert [(e.task.index, e.member) for e in played] == [
    (0, 0),
    (0, 1),
    (1, 0),
    (1, 1),
    (2, 0),
    (2, 1),
  ]
  assert [len(e.turns) for e in played] == [1, 1, 2, 2, 3, 3]
  assert played[-1].score == 30.0 and played[-1].success
  assert played[0].goal == 'Goal 0.'
  assert all(s.closed for s in client.sessions)


def test_tokens_do_not_depend_on_slots_or_neighbours():
  jobs = rollout.group_jobs(TASKS, 2)
  together = play(ScriptedClient(), jobs)
  alone = play(ScriptedClient(), jobs[-1:])[0]
  assert alone.turns == together[-1].turns
  reverse = play(ScriptedClient(), jobs[::-1])
  assert reverse[::-1] == together


def test_members_of_a_group_draw_their_own_tokens():
  played = play(ScriptedClient(), rollout.group_jobs(TASKS[:1], 4))
  assert len({e.turns[0].response_ids for e in played}) == 4
  again = play(ScriptedClient(), rollout.group_jobs(TASKS[:1], 4))
  assert again == played


def test_a_task_given_twice_is_one_group_of_other_members():
  jobs = rollout.group_jobs([TASKS[0], TASKS[1], TASKS[0]], 2)
  assert [m for t, m in jobs if t == TASKS[0]] == [0, 1, 2, 3]
  assert len(set(jobs)) == 6


def test_keys_name_seed_task_member_and_turn():
  task, other = TASKS[:2]
  keys = {
    tuple(rollout.turn_key(*args))
    for args in (
      ((0, 0), task, 0, 0),
      ((0, 1), task, 0, 0),
      ((0, 0), other, 0, 0),
      ((0, 0), task, 1, 0),
      ((0, 0), task, 0, 1),
    )
  }
  assert len(keys) == 5


@pytest.mark.parametrize('context', chat.CONTEXTS)
def test_admissible_actions_are_asked_for_and_shown(context):
  """Without them in what is kept as seen, which anchors the state."""
  fmt = dataclasses.replace(FORMAT, context=context, admissible=True)
  (played,) = play(ScriptedClient(), [(TASKS[2], 0)], None, fmt)
  assert [turn.observation for turn in played.turns] == [
    'start',
    'seen 1',
    'seen 2',
  ]
  for i, turn in enumerate(played.turns):
    assert turn.state_key == rollout.state_key(turn.observation)
    lines = TOK.decode(turn.prompt_ids).splitlines()
    lists = [line for line in lines if line.startswith('Actions')]
    assert lists == [f'Actions you can take now: a; b {i}']
    assert lines[-2:] == [*lists, 'assistant']
    assert lines[-3].endswith(turn.observation)
  (plain,) = play(
    ScriptedClient(),
    [(TASKS[2], 0)],
    None,
    dataclasses.replace(fmt, admissible=False),
  )
  assert not any('Act' in TOK.decode(turn.prompt_ids) for turn in plain.turns)


def test_lists_that_had_no_room_are_counted():
  """A context in which `a; b 0` does not fit below its observation."""
  fmt = dataclasses.replace(FORMAT, context='window', admissible=True)
  jobs = rollout.group_jobs(TASKS, 2)
  roomy = collect(ScriptedClient(), jobs, None, fmt)
  assert roomy.stats.cut_lists == 0
  size = len(roomy.episodes[0].turns[0].prompt_ids) + fmt.max_response
  tight = dataclasses.replace(fmt, max_context=size - 5, history=0)
  cut = collect(ScriptedClient(), jobs, None, tight)
  turns = sum(len(episode.turns) for episode in cut.episodes)
  assert cut.stats.scalars()['rollout/cut_lists'] == turns == 12
  assert rollout.joined([cut, roomy, cut]).stats.cut_lists == 24


def test_turns_hold_what_was_sampled_and_shown():
  made = make_sampler()
  episode = play(ScriptedClient(), [(TASKS[2], 0)], made)[0]
  whole = [i for t in episode.turns for i in (*t.prompt_ids, *t.response_ids)]
  logp_BT, _ = qwen2.token_logps(
    POLICY,
    qwen2.init_params(POLICY, jax.random.key(0)),
    np.array([whole]),
    np.arange(len(whole))[None],
    np.ones((1, len(whole)), np.int32),
    1.0,
  )
  start = 0
  for turn in episode.turns:
    start += len(turn.prompt_ids)
    end = start + len(turn.response_ids)
    np.testing.assert_allclose(
      turn.response_logps, logp_BT[0, start:end], atol=1e-4
    )
    start = end
  # Each id was computed once: only what was new was prefilled. The last id
  # of a context is fed by the first decoding step.
  sampled = sum(len(t.response_ids) for t in episode.turns)
  assert made.counters.decoded_tokens == sampled
  assert made.counters.prefilled_tokens == len(whole) - sampled - 1


def test_a_fault_is_no_failure_and_takes_nobody_with_it():
  jobs = rollout.group_jobs(TASKS, 2)
  played = play(ScriptedClient(faulty=(1,)), jobs)
  assert [e.ending is episodes.Ending.FAULT for e in played] == [
    False,
    False,
    True,
    True,
    False,
    False,
  ]
  assert 'the host is gone' in played[2].fault
  whole = play(ScriptedClient(), jobs)
  assert played[4:] == whole[4:]
  assert episodes.learnable(played) == whole[:2] + whole[4:]


def test_an_episode_lost_to_a_fault_is_played_again():
  """Same member, same keys: its tokens are those of a run without faults."""
  jobs = rollout.group_jobs(TASKS, 4)
  calm = collect(ScriptedClient(), jobs)
  client = ScriptedClient(faulty=(2,), faults=5)
  struck = collect(client, jobs)
  assert struck.episodes == calm.episodes
  assert [e.turns for e in struck.episodes] == [e.turns for e in calm.episodes]
  assert not any(e.ending is episodes.Ending.FAULT for e in struck.episodes)
  assert struck.stats.refills == 5 and calm.stats.refills == 0
  assert sum(e.recoveries for e in struck.episodes) == 5
  assert len(client.sessions) == len(jobs) + 5
  assert all(session.closed for session in client.sessions)
  assert struck.stats.scalars()['rollout/refills'] == 5.0


def test_refills_have_an_end():
  jobs = rollout.group_jobs(TASKS[:1], 2)
  client = ScriptedClient(faulty=(0,))
  struck = collect(client, jobs)
  assert [e.ending for e in struck.episodes] == [episodes.Ending.FAULT] * 2
  assert [e.recoveries for e in struck.episodes] == [3, 3]
  assert len(client.sessions) == 6 and struck.stats.refills == 4


@pytest.mark.parametrize('kind, tries', [('final', 1), ('diverged', 2)])
def test_what_would_fail_again_is_not_played_again(kind, tries):
  client = ScriptedClient(faulty=(1,), **{kind: True})
  struck = collect(client, rollout.group_jobs(TASKS, 1))
  assert [e.ending is episodes.Ending.FAULT for e in struck.episodes] == [
    False,
    True,
    False,
  ]
  assert struck.episodes[1].recoveries == tries
  assert struck.stats.refills == tries - 1
  assert len(client.sessions) == 2 + tries


def test_what_went_another_way_once_is_played_again():
  client = ScriptedClient(faulty=(1,), faults=1, diverged=True)
  struck = collect(client, rollout.group_jobs(TASKS, 1))
  assert not any(e.ending is episodes.Ending.FAULT for e in struck.episodes)
  assert struck.stats.refills == 1


def test_the_deadline_counts_from_the_first_slot():
  """The last act takes 5 s and breaks; then 3 of 8 s are left."""
  task, made = TASKS[1], make_sampler()
  play(ScriptedClient(), [(task, 0)], made)  # Compiles.
  client = ScriptedClient(
    faulty=(1,), faults=1, latency=lambda task, turn: 5.0 * (turn == 2)
  )
  struck = collect(client, [(task, 0)], made, deadline_s=8.0)
  (played,) = struck.episodes
  assert struck.stats.refills == 1
  assert played.ending is episodes.Ending.DEADLINE and len(played.turns) == 1


def test_an_episode_that_cannot_be_played_again_in_time_is_a_fault():
  """No failure of the policy, which had no turn."""
  resets = []

  def latency(task, turn):
    if turn == 0:
      resets.append(task)
    return 4.0 * (turn == 0 and len(resets) == 2)

  client = ScriptedClient(faulty=(1,), faults=1, latency=latency)
  made = make_sampler()
  play(ScriptedClient(), [(TASKS[1], 0)], made)  # Compiles.
  struck = collect(client, [(TASKS[1], 0)], made, deadline_s=3.0)
  (played,) = struck.episodes
  assert played.ending is episodes.Ending.FAULT
  assert 'rollout.deadline_s=3 was over' in played.fault
  assert struck.stats.refills == 1 and len(client.sessions) == 2


def test_nothing_is_played_again_while_no_service_is_up():
  jobs = rollout.group_jobs(TASKS, 1)
  client = ScriptedClient(faulty=(1,), faults=1, up=0)
  struck = collect(client, jobs)
  assert struck.episodes[1].ending is episodes.Ending.FAULT
  assert struck.stats.refills == 0 and len(client.sessions) == 3


def test_refills_of_several_collections_add_up():
  parts = [
    collect(ScriptedClient(faulty=(1,), faults=count), jobs)
    for count, jobs in ((1, [(TASKS[1], 0)]), (2, [(TASKS[1], 1)]))
  ]
  assert rollout.joined(parts).stats.refills == 3


def test_an_episode_that_fills_its_context_is_truncated():
  tight = chat.Format(TOK, 'conversation', 'brief', '', 2, 64, 8)
  long = episodes.Task('toy', 'train', 100, 'fetch')
  played = asyncio.run(
    rollout.collect(
      ScriptedClient(),
      make_sampler(),
      tight,
      [(long, 0)],
      seed=(0,),
      max_turns=200,
    )
  ).episodes
  assert played[0].ending is episodes.Ending.TRUNCATED
  assert not played[0].success
  tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in played[0].turns)
  assert 40 < tokens <= 64


def test_a_task_that_does_not_fit_at_all_is_named():
  tight = chat.Format(TOK, 'conversation', 'brief', '', 2, 12, 8)
  with pytest.raises(chat.PromptTooLongError, match="index=2, name='fetch'"):
    asyncio.run(
      rollout.collect(
        ScriptedClient(),
        make_sampler(),
        tight,
        [(TASKS[2], 0)],
        seed=(0,),
        max_turns=6,
      )
    )


def test_what_stops_one_episode_leaves_none_of_the_others_running():
  class Refusing(ScriptedSession):
    async def reset(self):
      await asyncio.sleep(0.05)
      raise ValueError('no such task')

  async def body():
    client = ScriptedClient(latency=lambda task, turn: 30.0)
    first = client.session

    def session(task, **how):
      if client.sessions:
        return first(task, **how)
      client.sessions.append(Refusing(task, None, None, {}))
      return client.sessions[-1]

    client.session = session
    with pytest.raises(ValueError, match='no such task'):
      await rollout.collect(
        client,
        make_sampler(),
        FORMAT,
        rollout.group_jobs(TASKS, 2),
        seed=(0, 0, 0),
        max_turns=6,
      )
    assert len(client.sessions) > 2
    assert client.playing == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}

  asyncio.run(body())


def test_stop_gives_up_and_leaves_the_sampler_usable():
  made = make_sampler()
  with pytest.raises(rollout.StoppedError):
    play(
      ScriptedClient(),
      rollout.group_jobs(TASKS, 40),
      made,
      should_stop=lambda: True,
    )
  assert len(made.free) == 4
  assert play(ScriptedClient(), [(TASKS[0], 0)], made)[0].success


def test_latency_sessions_and_order_never_show_in_the_episodes():
  jobs = rollout.group_jobs(TASKS, 4)
  calm = play(ScriptedClient(), jobs, make_sampler(slots=8))
  for seed, sessions in ((1, 0), (2, 1), (3, 3), (4, 20)):
    draw = np.random.default_rng(seed)
    client = ScriptedClient(latency=lambda t, u, d=draw: d.uniform(0, 0.02))
    shaken = play(
      client,
      jobs,
      make_sampler(slots=8),
      sessions=sessions,
      expected=lambda task, d=draw: d.uniform(),
    )
    # Turns compare by everything but the seconds they took: ids, texts, and
    # log-probabilities to the last bit.
    assert shaken == calm
    assert max(playing for _, playing in client.begun) < (
      min(sessions, len(jobs)) or 8
    )


def test_a_slow_environment_holds_nobody_up():
  """One answers after 2 s; the other eleven are long done by then."""
  slow, quick = TASKS[2], TASKS[1]
  client = ScriptedClient(latency=lambda task, turn: 2.0 * (task is slow))
  made = make_sampler(slots=2)
  play(ScriptedClient(), [(quick, 0)], made)  # Compiles.
  played = play(client, [(slow, 0)] + [(quick, i) for i in range(11)], made)
  ends = [
    e.start_s + sum(t.respond_s + t.env_s for t in e.turns) for e in played
  ]
  assert max(ends[1:]) < 2.0 < ends[0]
  assert [len(e.turns) for e in played] == [3] + 11 * [2]


def test_sessions_beyond_the_slots_are_reset_ahead():
  """A slot is given to an episode that has begun: its reset costs no slot."""
  jobs = rollout.group_jobs(TASKS[:1], 6)
  latency = lambda task, turn: 0.3 if turn == 0 else 0.0  # noqa: E731
  made = make_sampler(slots=1)
  play(ScriptedClient(), jobs[:1], made)
  client = ScriptedClient(latency=latency)
  ahead = collect(client, jobs, made, sessions=6)
  assert max(playing for _, playing in client.begun) == 5
  assert all(e.reset_s >= 0.3 for e in ahead.episodes)
  alone = collect(ScriptedClient(latency=latency), jobs, made, sessions=1)
  assert alone.episodes == ahead.episodes
  # Six resets one after the other, or all at once.
  assert alone.stats.wall_s > 1.8 > ahead.stats.wall_s
  assert alone.stats.occupancy < 0.5


def test_the_longest_start_first():
  jobs = [(task, 0) for task in TASKS]
  client = ScriptedClient()
  play(client, jobs, expected=lambda task: task.index)
  assert [index for index, _ in client.begun] == [2, 1, 0]


def test_lengths_are_those_of_the_task_or_else_of_its_type():
  lengths = rollout.Lengths()
  assert lengths.expected(TASKS[0]) == np.inf
  lengths.observe(play(ScriptedClient(), rollout.group_jobs(TASKS[:2], 2)))
  short, long = (lengths.expected(task) for task in TASKS[:2])
  assert short < long
  assert lengths.expected(TASKS[2]) == pytest.approx((short + long) / 2)
  other = episodes.Task('toy', 'train', 0, 'unlock')
  assert lengths.expected(other) == np.inf
  played = play(ScriptedClient(), [(TASKS[0], 0)])
  (turn,) = played[0].turns
  lengths = rollout.Lengths()
  lengths.observe(played)
  whole = len(turn.prompt_ids + turn.response_ids)
  assert lengths.expected(TASKS[0]) == whole
  # A fault tells nothing; one that was cut off would have gone on.
  fault = dataclasses.replace(
    played[0], turns=(), ending=episodes.Ending.FAULT, fault='gone'
  )
  cut = dataclasses.replace(
    played[0], turns=(), ending=episodes.Ending.DEADLINE
  )
  lengths.observe([fault, cut])
  assert lengths.expected(TASKS[0]) == whole


def test_a_deadline_cuts_one_off_and_leaves_the_others_alone():
  slow = TASKS[2]
  jobs = [(slow, 0)] + rollout.group_jobs(TASKS[:2], 4)

  def latency(task, turn):
    return 30.0 if task is slow and turn == 2 else 0.0

  made = make_sampler(slots=3)
  whole = play(ScriptedClient(), jobs, made)
  client = ScriptedClient(latency=latency)
  start = time.monotonic()
  cut = play(client, jobs, made, deadline_s=1.0)
  assert time.monotonic() - start < 10
  assert cut[1:] == whole[1:]
  assert cut[0].ending is episodes.Ending.DEADLINE
  # What was played stands: the first turn, and the score it brought.
  assert cut[0].turns == whole[0].turns[:1]
  assert cut[0].score == 10.0 and not cut[0].success
  assert all(s.closed for s in client.sessions)
  scalars = metrics.rollout_scalars(cut)
  assert scalars['rollout/deadline_episodes'] == pytest.approx(1 / 9)
  assert scalars['rollout_deadline/fetch'] == pytest.approx(1 / 9)
  assert scalars['rollout/deadline_turns'] == 1.0
  assert len(episodes.learnable(cut)) == 9


def test_a_deadline_before_the_first_turn_leaves_nothing_to_learn():
  client = ScriptedClient(latency=lambda task, turn: 30.0 * (turn == 1))
  (played,) = play(client, [(TASKS[1], 0)], deadline_s=0.5)
  assert played.ending is episodes.Ending.DEADLINE
  assert played.turns == () and not played.fault
  assert episodes.learnable([played]) == []
  # It is counted where it belongs all the same.
  scalars = metrics.rollout_scalars([played])
  assert scalars['rollout/deadline_episodes'] == 1.0
  assert scalars['rollout_deadline/fetch'] == 1.0
  assert scalars['rollout/faults'] == 0


def test_a_deadline_in_mid_response_frees_the_slot():
  """The response is dropped; who has the slot next gets only its own."""

  class Slowed(sampler.Sampler):
    def decode(self, max_steps=None):
      time.sleep(0.02)
      return super().decode(1 if slow else max_steps)

  made, endless = make_sampler_of_long_responses(Slowed, slots=1)
  slow = False
  jobs = [(TASKS[0], i) for i in range(3)]
  whole = play(ScriptedClient(), jobs[2:], made, endless)
  slow = True
  cut = play(ScriptedClient(), jobs[:2], made, endless, deadline_s=0.5)
  assert [e.ending for e in cut] == 2 * [episodes.Ending.DEADLINE]
  assert made.free == (0,)
  slow = False
  assert play(ScriptedClient(), jobs[2:], made, endless) == whole


def test_a_response_that_ends_after_its_deadline_is_nobodys():
  """20 tokens of 20 ms, cut off after 0.3 s; the other episode came later."""

  class Slowed(sampler.Sampler):
    def decode(self, max_steps=None):
      time.sleep(0.02)
      return super().decode(1)

  made = make_sampler(2, Slowed, max_new_tokens=20, stop_ids=[])
  fmt = chat.Format(TOK, 'conversation', 'brief', '', 2, 512, 20)
  late = TASKS[1]
  play(ScriptedClient(), [(late, 0)], made, fmt)  # Compiles.
  client = ScriptedClient(latency=lambda task, turn: 0.2 * (task is late))
  cut = play(client, [(TASKS[0], 0), (late, 0)], made, fmt, deadline_s=0.3)
  assert [e.ending for e in cut] == 2 * [episodes.Ending.DEADLINE]


def test_window_context_keeps_the_longest_common_prefix():
  window = chat.Format(TOK, 'window', 'brief', '', 1, 512, 8)
  made = make_sampler(slots=1)
  (played,) = play(ScriptedClient(), [(TASKS[2], 0)], made, window)
  expected, held = 0, ()
  for turn in played.turns:
    kept = 0
    for old, new in zip(held, turn.prompt_ids[:-1], strict=False):
      if old != new:
        break
      kept += 1
    expected += len(turn.prompt_ids) - 1 - kept
    # What the cache holds after the response, whose last id was not fed.
    held = turn.prompt_ids + turn.response_ids[:-1]
  assert made.counters.prefilled_tokens == expected
  task = TOK.encode('user\nGoal 2.')
  assert expected <= sum(len(t.prompt_ids) - 1 for t in played.turns) - 2 * len(
    task
  )


def test_pairs_left_out_of_a_long_prompt_are_counted():
  """Room for a prompt and a pair or two, not for six."""
  tight = chat.Format(TOK, 'window', 'brief', '', 6, 96, 8)
  task = episodes.Task('toy', 'train', 5, 'fetch')
  (played,) = play(ScriptedClient(), [(task, 0)], None, tight)
  assert len(played.turns) == 6
  assert all(len(t.prompt_ids) + 8 <= 96 for t in played.turns)
  roomy = dataclasses.replace(tight, max_context=512)
  (other,) = play(ScriptedClient(), [(task, 0)], None, roomy)
  assert other.dropped_pairs == 0 < played.dropped_pairs
  scalars = metrics.rollout_scalars([played, other])
  assert scalars['rollout/dropped_pairs'] == played.dropped_pairs / 2


def test_an_episode_begins_with_an_empty_cache():
  """Else how its context is cut, and the last bit, hung on its forerunner."""
  made = make_sampler(slots=1)
  jobs = rollout.group_jobs(TASKS[:1], 3)
  played = play(ScriptedClient(), jobs, made)
  unique = sum(len(e.turns[0].prompt_ids) - 1 for e in played)
  assert made.counters.prefilled_tokens == unique


def test_reading_a_context_is_not_booked_as_decoding():
  """A prefill that is made slow shows in its share, and in no other."""

  class Slowed(sampler.Sampler):
    def _prefill_group(self):
      time.sleep(0.1)
      return super()._prefill_group()

  made = make_sampler(slots=2)
  jobs = rollout.group_jobs(TASKS[1:2], 4)
  play(ScriptedClient(), jobs, made)
  made.__class__ = Slowed
  stats = collect(ScriptedClient(), jobs, made).stats
  assert stats.prefill_share > 0.6 > 0.3 > stats.decode_share


def test_work_between_calls_is_overhead_and_waiting_is_not():
  """50 ms of reading a response, then 100 ms of the environment, six times."""

  class Slow(chat.Format):
    def parse(self, response_ids, capped=False):
      time.sleep(0.05)
      return super().parse(response_ids, capped)

  slow = Slow(
    **{f.name: getattr(FORMAT, f.name) for f in dataclasses.fields(FORMAT)}
  )
  made = make_sampler(slots=1)
  jobs = rollout.group_jobs(TASKS[2:], 2)
  play(ScriptedClient(), jobs, made)
  client = ScriptedClient(latency=lambda task, turn: 0.1 * (turn > 0))
  stats = collect(client, jobs, made, slow).stats
  overhead = stats.overhead_share * stats.wall_s
  assert 6 * 0.05 <= overhead < 6 * 0.05 + 0.25
  assert stats.env_wait_share * stats.wall_s > 0.4


def test_a_reset_that_returns_is_served_within_a_burst():
  """The other slot decodes long responses, in short bursts meanwhile."""

  class Slowed(sampler.Sampler):
    def decode(self, max_steps=None):
      asked.append(max_steps)
      responses = []
      for _ in range(max_steps):
        time.sleep(0.005)
        responses = super().decode(1)
        if responses:
          break
      self.step_s = 0.005
      return responses

  asked = []
  made, endless = make_sampler_of_long_responses(Slowed, slots=2)
  late = TASKS[1]
  play(ScriptedClient(), [(late, 0)], made, endless)  # Compiles.
  made.step_s = 0.0
  asked.clear()
  client = ScriptedClient(latency=lambda task, turn: 0.4 * (task is late))
  play(client, [(TASKS[0], 0), (late, 0)], made, endless)
  # One step at first, then 30 ms of them; a second of them only when nobody
  # is away.
  assert asked[0] == 1
  assert asked[2] == 6
  assert max(asked) == 200


def test_stats_account_for_the_time_of_the_slots():
  jobs = rollout.group_jobs(TASKS[1:], 10)
  made = make_sampler(slots=4)
  play(ScriptedClient(), jobs[:4], made)
  client = ScriptedClient(latency=lambda task, turn: 0.05)
  before = made.counters.decoded_tokens
  stats = collect(client, jobs, made, sessions=8).stats
  tokens = made.counters.decoded_tokens - before
  assert stats.tokens_per_s == pytest.approx(tokens / stats.wall_s)
  parts = stats.decode_share + stats.prefill_share + stats.env_wait_share
  assert 0.9 * stats.occupancy < parts <= stats.occupancy + 1e-9 <= 1 + 2e-9
  assert stats.occupancy > 0.8
  # 2 and 3 turns of 50 ms each, one slot in four: 50 turns before the tail.
  waited = stats.env_wait_share * 4 * (stats.wall_s - stats.tail_s)
  assert 0.8 * 45 * 0.05 < waited < 2 * 50 * 0.05
  assert 0 < stats.batch_fill <= 1
  assert 0 <= stats.overhead_share < 1
  assert stats.scalars()['rollout/occupancy'] == stats.occupancy


@pytest.mark.parametrize(
  'victim, services', [('worker', 1), ('service', 1), ('service', 2)]
)
def test_killed_processes_change_nothing(victim, services):
  """kill -9 in mid-rollout: every episode ends as it would have.

  Nor are lists of admissible actions lost, of which every turn has one.
  """
  listing = dataclasses.replace(FORMAT, admissible=True)
  jobs = rollout.group_jobs(TASKS, 8)
  results = []
  for kill in (False, True):
    with contextlib.ExitStack() as stack:
      running = [
        stack.enter_context(
          env_service.LocalService(
            'toy', 4 - services, options=('--latency-ms=20,40',)
          )
        )
        for _ in range(services)
      ]

      begun = threading.Event()

      async def work(addresses=tuple(s.address for s in running), begun=begun):
        client = env_client.EnvClient(addresses)
        await client.connect()
        try:
          return await rollout.collect(
            client,
            make_sampler(),
            listing,
            jobs,
            seed=(1,),
            max_turns=6,
            on_progress=lambda _, turns: turns and begun.set(),
          )
        finally:
          await client.close()

      if kill:

        def strike(pid=running[0].pid, begun=begun):
          begun.wait(60)
          target = (
            pid if victim == 'service' else (env_processes.workers_of(pid)[0])
          )
          os.kill(target, signal.SIGKILL)

        threading.Thread(target=strike).start()
      results.append(asyncio.run(work()).episodes)
  calm, struck = results
  assert struck == calm
  assert all(
    'now: go east; ' in TOK.decode(turn.prompt_ids)
    or 'now: go west; ' in TOK.decode(turn.prompt_ids)
    for episode in struck
    for turn in episode.turns
  )
  assert not any(e.recoveries for e in calm)
  assert any(e.recoveries for e in struck)
  assert not any(e.ending is episodes.Ending.FAULT for e in struck)
