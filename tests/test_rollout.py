"""Playing episodes: order, keys, faults, and processes that die."""

import asyncio
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


def make_sampler(slots=4, temperature=1.0):
  return sampler.Sampler(
    POLICY,
    qwen2.init_params(POLICY, jax.random.key(0)),
    slots=slots,
    cache_len=512,
    max_new_tokens=8,
    settings=sampling.Settings(temperature),
    stop_ids=TOK.stop_ids,
  )


class ScriptedSession:
  """Ends by itself after as many turns as the task's index, plus one."""

  def __init__(self, task, fault_at):
    self._task, self._fault_at, self._turn = task, fault_at, 0
    self.closed = False

  async def reset(self):
    return episodes.Observation('start', goal=f'Goal {self._task.index}.')

  async def step(self, action):
    self._turn += 1
    if self._turn == self._fault_at:
      raise env_client.EnvFault('the host is gone')
    over = self._turn > self._task.index
    return episodes.Observation(
      f'seen {self._turn}',
      reward=10.0,
      score=10.0 * self._turn,
      success=over,
      ending=episodes.Ending.TERMINATED if over else None,
    )

  async def close(self):
    self.closed = True


class ScriptedClient:
  """Serves scripted sessions; those of `faulty` tasks break at turn 1."""

  def __init__(self, faulty=()):
    self._faulty = faulty
    self.sessions = []

  def session(self, task, *, step_limit):
    fault_at = 1 if task.index in self._faulty else None
    self.sessions.append(ScriptedSession(task, fault_at))
    return self.sessions[-1]


def play(client, jobs, made=None, **kwargs):
  collected = asyncio.run(
    rollout.collect(
      client,
      made or make_sampler(),
      FORMAT,
      jobs,
      seed=(0, 0, 0),
      max_turns=6,
      **kwargs,
    )
  )
  return collected.episodes


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
  assert episodes.without_faults(played) == whole[:2] + whole[4:]


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


@pytest.mark.parametrize('victim', ['worker', 'service'])
def test_killed_processes_change_nothing(victim):
  """kill -9 in mid-rollout: every episode ends as it would have."""
  jobs = rollout.group_jobs(TASKS, 8)
  results = []
  for kill in (False, True):
    service = env_service.LocalService(
      'toy', 3, options=('--latency-ms=20,40',)
    )
    with service:

      async def work(address=service.address):
        client = env_client.EnvClient(address)
        await client.connect()
        try:
          return await rollout.collect(
            client, make_sampler(), FORMAT, jobs, seed=(1,), max_turns=6
          )
        finally:
          await client.close()

      if kill:

        def strike(pid=service.pid):
          time.sleep(1.0)
          target = (
            pid if victim == 'service' else (env_processes.workers_of(pid)[0])
          )
          os.kill(target, signal.SIGKILL)

        threading.Thread(target=strike).start()
      results.append(asyncio.run(work()).episodes)
  calm, struck = results
  assert struck == calm
  assert not any(e.ending is episodes.Ending.FAULT for e in struck)
