"""Plays episodes: joins sampler slots and environment sessions.

Every episode is a coroutine of its own. While one waits for its environment,
the sampler goes on decoding the others: there is no lock-step over turns.
What is sampled depends on (seed, step, task, member, turn) alone, so timing
never shows in the result.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from planpo_jax import chat, env_client, episodes, sampler

Job = tuple[episodes.Task, int]  # A task and the member of its group.


class StoppedError(Exception):
  """The run was asked to stop; episodes in flight were given up."""


def group_jobs(tasks: Sequence[episodes.Task], group_size: int) -> list[Job]:
  """`group_size` jobs a task; a task given twice is one group, twice as large.

  Members are numbered on, since the same member would draw the same tokens.
  """
  seen: collections.Counter[episodes.Task] = collections.Counter()
  jobs = []
  for task in tasks:
    jobs += [(task, seen[task] + i) for i in range(group_size)]
    seen[task] += group_size
  return jobs


async def collect(
  client: env_client.EnvClient,
  policy_sampler: sampler.Sampler,
  fmt: chat.Format,
  jobs: Sequence[Job],
  *,
  seed: tuple[int, ...],
  max_turns: int,
  on_progress: Callable[[int, int], None] = lambda episodes, turns: None,
  should_stop: Callable[[], bool] = lambda: False,
) -> list[episodes.Episode]:
  """Plays every job once.

  Args:
    client: a connected client.
    policy_sampler: its temperature and params are used as they are.
    fmt: how conversations become tokens.
    jobs: what to play; the result keeps this order.
    seed: integers that name this collection, e.g. (seed, step).
    max_turns: turns after which an episode is truncated.
    on_progress: called with (episodes done, turns played) so far.
    should_stop: polled several times a second.

  Returns:
    One episode a job. `Ending.FAULT` marks those whose environment failed for
    good; they hold no outcome and must not be trained on.

  Raises:
    StoppedError: `should_stop` became true.
    chat.PromptTooLongError: a task does not fit the context at all.
  """
  decoder = _Decoder(policy_sampler)
  slots: asyncio.Queue[int] = asyncio.Queue()
  for slot in policy_sampler.free:
    slots.put_nowait(slot)
  counts = [0, 0]

  def count_turn() -> None:
    counts[1] += 1
    on_progress(*counts)

  async def play(task: episodes.Task, member: int) -> episodes.Episode:
    slot = await slots.get()
    try:
      policy_sampler.reset(slot)
      session = client.session(task, step_limit=max_turns)
      try:
        return await _play_one(
          session, decoder, slot, fmt, task, member, seed, count_turn
        )
      except env_client.EnvFault as fault:
        logging.warning('episode of %s dropped: %s', task, fault)
        return episodes.Episode(
          task, member, (), 0.0, False, episodes.Ending.FAULT, str(fault)
        )
      finally:
        await session.close()
        counts[0] += 1
        on_progress(*counts)
    finally:
      slots.put_nowait(slot)

  async def watch() -> None:
    while not should_stop():
      await asyncio.sleep(0.2)
    raise StoppedError

  on_progress(*counts)
  playing = asyncio.gather(*(play(task, member) for task, member in jobs))
  others = [asyncio.ensure_future(work) for work in (decoder.run(), watch())]
  try:
    done, _ = await asyncio.wait(
      [playing, *others], return_when=asyncio.FIRST_COMPLETED
    )
    for future in done:
      future.result()  # Raises what stopped us, if anything did.
    return playing.result()
  finally:
    for future in (playing, *others):
      future.cancel()
    await asyncio.gather(playing, *others, return_exceptions=True)
    for slot in policy_sampler.active:
      policy_sampler.reset(slot)


async def _play_one(
  session: env_client.Session,
  decoder: _Decoder,
  slot: int,
  fmt: chat.Format,
  task: episodes.Task,
  member: int,
  seed: tuple[int, ...],
  on_turn: Callable[[], None],
) -> episodes.Episode:
  seen = await session.reset()
  goal = seen.goal
  talk = fmt.begin(goal)
  turns: list[episodes.Turn] = []
  while seen.ending is None:
    try:
      context, prompt_ids = talk.prompt(seen.text)
    except chat.PromptTooLongError as error:
      if not turns:
        raise chat.PromptTooLongError(f'{task}: {error}') from error
      # The context is used up: as with the limit of turns, the outcome so
      # far stands.
      ending = episodes.Ending.TRUNCATED
      break
    key = turn_key(seed, task, member, len(turns))
    response = await decoder.respond(slot, context, key)
    text, action, cut = fmt.parse(response.ids, response.truncated)
    after = await session.step(action.text)
    turns.append(
      episodes.Turn(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(int(i) for i in response.ids),
        response_logps=tuple(float(p) for p in response.logps),
        observation=seen.text,
        response=text,
        action=action.text,
        reward=after.reward,
        valid=action.valid,
        state_key=state_key(seen.text),
        truncated=cut,
      )
    )
    talk.respond(context, turns[-1].response_ids, seen.text, action.text)
    on_turn()
    seen = after
  else:
    ending = seen.ending
  return episodes.Episode(
    task,
    member,
    tuple(turns),
    seen.score,
    seen.success,
    ending,
    goal=goal,
  )


def turn_key(
  seed: tuple[int, ...], task: episodes.Task, member: int, turn: int
) -> np.ndarray:
  """Raw random key [2] uint32 of one response."""
  name = hashlib.blake2b(repr(task).encode(), digest_size=8).digest()
  entropy = (*seed, int.from_bytes(name, 'little'), member, turn)
  return np.random.SeedSequence(entropy).generate_state(2, np.uint32)


def state_key(observation: str) -> int:
  """Anchor of a state: 63-bit hash of the observation text (GiGPO)."""
  digest = hashlib.blake2b(observation.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


class _Decoder:
  """Runs the sampler in a thread while environments step on the event loop."""

  def __init__(self, policy_sampler: sampler.Sampler):
    self._sampler = policy_sampler
    self._new: list[tuple[int, list[int], np.ndarray]] = []
    self._waiting: dict[int, asyncio.Future] = {}
    self._wake = asyncio.Event()

  async def respond(
    self, slot: int, context: list[int], key: np.ndarray
  ) -> sampler.Response:
    future = asyncio.get_running_loop().create_future()
    self._waiting[slot] = future
    self._new.append((slot, context, key))
    self._wake.set()
    return await future

  async def run(self) -> None:
    while True:
      if not self._waiting:
        self._wake.clear()
        await self._wake.wait()
      new, self._new = self._new, []
      # Shielded, because a thread cannot be cancelled: the cache is in its
      # hands until it returns.
      advance = asyncio.ensure_future(asyncio.to_thread(self._advance, new))
      try:
        responses = await asyncio.shield(advance)
      except asyncio.CancelledError:
        await asyncio.wait([advance])
        raise
      for response in responses:
        self._waiting.pop(response.slot).set_result(response)

  def _advance(
    self, new: list[tuple[int, list[int], np.ndarray]]
  ) -> list[sampler.Response]:
    for slot, context, key in new:
      self._sampler.submit(slot, context, key)
    return self._sampler.decode()
