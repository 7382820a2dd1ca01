"""Plays episodes: joins sampler slots and environment sessions.

Every episode is a coroutine of its own. While one waits for its environment,
the sampler goes on decoding the others: there is no lock-step over turns, and
the slot of an episode that ended is taken by the next one at once. What is
sampled depends on (seed, step, task, member, turn) alone, so timing never shows
in the result, unless a deadline cuts episodes off.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planpo_jax import chat, env_client, episodes, sampler

_log = logging.getLogger(__name__)

Job = tuple[episodes.Task, int]  # A task and the member of its group.

# Share of the episodes after which the tail begins.
_TAIL = 0.9

# Times that an episode lost to a fault is played again from its start.
_REFILLS = 2

# Stats that add up; the others are means over time.
_SUMS = ('wall_s', 'tail_s', 'prefilled_tokens', 'refills', 'cut_lists')

# Kinds of spans in which an episode waits for its environment.
_ELSEWHERE = ('reset', 'env')

# Seconds of decoding at a stretch while some slot may come back from its
# environment, and while none can.
_BURST_S = 0.03
_LONG_BURST_S = 1.0


class StoppedError(Exception):
  """The run was asked to stop; episodes in flight were given up."""


@dataclasses.dataclass(frozen=True)
class Stats:
  """Where the time of one collection went.

  The shares are of slot time (slots x seconds) before the tail: the time after
  90 % of the episodes ended, when there is nothing left to fill slots with.

  Attributes:
    wall_s: seconds of the whole collection.
    tail_s: seconds of the tail.
    occupancy: share in which a slot holds an episode. It is the sum of the
      next three and of what lies between them.
    decode_share: share in which a response is being sampled.
    prefill_share: share in which a context is read, or waits to be.
    env_wait_share: share in which the environment takes its step.
    batch_fill: share of the rows of decoding steps that were sampling.
    tokens_per_s: tokens sampled.
    prefilled_tokens: tokens of contexts that were computed.
    overhead_share: share of `wall_s` outside of compiled calls and of waits
      for environments with nothing to compute.
    refills: times that an episode was played again from its start, because a
      fault had ended it.
    cut_lists: prompts that had no room for all of the admissible actions.
  """

  wall_s: float
  tail_s: float
  occupancy: float
  decode_share: float
  prefill_share: float
  env_wait_share: float
  batch_fill: float
  tokens_per_s: float
  prefilled_tokens: int
  overhead_share: float
  refills: int = 0
  cut_lists: int = 0

  def scalars(self) -> dict[str, float]:
    return {
      f'rollout/{name}': float(value)
      for name, value in dataclasses.asdict(self).items()
    }


@dataclasses.dataclass(frozen=True)
class Collected:
  """What `collect` returns.

  Attributes:
    episodes: one a job, in the order of the jobs.
    stats: where the time went.
  """

  episodes: list[episodes.Episode]
  stats: Stats


def joined(parts: Sequence[Collected]) -> Collected:
  """Collections of one step, one after the other, as one."""
  if len(parts) == 1:
    return parts[0]
  stats = [part.stats for part in parts]
  total_s = sum(s.wall_s for s in stats)

  def combine(name: str) -> float:
    values = [getattr(s, name) for s in stats]
    if name in _SUMS:
      return sum(values)
    return (
      sum(v * s.wall_s for v, s in zip(values, stats, strict=True)) / total_s
    )

  return Collected(
    [episode for part in parts for episode in part.episodes],
    Stats(**{f.name: combine(f.name) for f in dataclasses.fields(Stats)}),
  )


class Lengths:
  """Tokens of past episodes, to tell which jobs to start first.

  The longest should not be started last: all slots but one would idle.
  """

  def __init__(self):
    self._by_task: dict[episodes.Task, float] = {}
    self._by_type: dict[str, float] = {}

  def observe(self, played: Sequence[episodes.Episode]) -> None:
    found = collections.defaultdict(list)
    for episode in played:
      if episode.ending is episodes.Ending.FAULT:
        continue
      tokens = sum(
        len(turn.prompt_ids) + len(turn.response_ids) for turn in episode.turns
      )
      if episode.ending is episodes.Ending.DEADLINE:
        # It would have gone on.
        tokens = max(tokens, self._by_task.get(episode.task, tokens))
      found[episode.task].append(tokens)
      found[episode.task.name].append(tokens)
    for key, tokens in found.items():
      known = self._by_type if isinstance(key, str) else self._by_task
      mean = float(np.mean(tokens))
      known[key] = (mean + known.get(key, mean)) / 2  # Recent ones count most.

  def expected(self, task: episodes.Task) -> float:
    """Tokens of an episode of `task`; infinite if nothing is known of it."""
    by_type = self._by_type.get(task.name, math.inf)
    return self._by_task.get(task, by_type)


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
  prefaces: Sequence[str] = (),
  sessions: int = 0,
  deadline_s: float = 0.0,
  expected: Callable[[episodes.Task], float] = lambda task: 0.0,
  on_progress: Callable[[int, int], None] = lambda episodes, turns: None,
  should_stop: Callable[[], bool] = lambda: False,
) -> Collected:
  """Plays every job once, and again from its start after a fault.

  What is played again draws the same tokens, so faults do not show in the
  result and groups stay whole.

  Args:
    client: a connected client.
    policy_sampler: its settings and params are used as they are.
    fmt: how conversations become tokens.
    jobs: what to play; the result keeps this order.
    seed: integers that name this collection, e.g. (seed, step).
    max_turns: turns after which an episode is truncated.
    prefaces: text put before the goal of each job; none if empty.
    sessions: environments to use at a time; 0 for as many as slots. More of
      them are reset ahead, so that a slot that becomes free finds an episode
      that has begun; with fewer, some slots stay empty.
    deadline_s: seconds after which an episode that holds a slot is cut off
      with the turns that it has; 0 for none. They count from its first slot,
      also where it is played again.
    expected: length of an episode of a task in any unit; longer ones start
      first.
    on_progress: called with (episodes done, turns played) so far.
    should_stop: polled several times a second.

  Returns:
    One episode a job. `Ending.FAULT` marks those whose environment failed in
    every try, or whose services are all away; they hold no outcome and must not
    be trained on.

  Raises:
    StoppedError: `should_stop` became true.
    chat.PromptTooLongError: a task does not fit the context at all.
  """
  slots: asyncio.Queue[int] = asyncio.Queue()
  for slot in policy_sampler.free[: len(jobs)]:
    slots.put_nowait(slot)
  ledger = _Ledger(policy_sampler, slots.qsize(), len(jobs))
  decoder = _Decoder(policy_sampler, ledger)
  permits = asyncio.Semaphore(sessions or max(1, slots.qsize()))
  counts = [0, 0]

  def count_turn() -> None:
    counts[1] += 1
    on_progress(*counts)

  async def attempt(
    task: episodes.Task, member: int, preface: str, until_s: float
  ) -> _Game:
    """Plays once, until `ledger.now()` is `until_s`; 0: `deadline_s` on."""
    session = client.session(
      task, step_limit=max_turns, admissible=fmt.admissible
    )
    game = _Game(session, fmt, task, member, seed, preface)
    try:
      with ledger.span('reset'):
        await game.begin()
      slot = await slots.get()
      try:
        game.start_s = ledger.now()
        if deadline_s:
          game.until_s = until_s or game.start_s + deadline_s
          if game.start_s >= game.until_s:
            raise env_client.EnvFault(
              f'rollout.deadline_s={deadline_s:g} was over before it could be '
              'played again',
              final=True,
            )
        with ledger.span('held'):
          await game.play(decoder, slot, count_turn)
      finally:
        slots.put_nowait(slot)
    except env_client.EnvFault as fault:
      game.fault = fault
    finally:
      await session.close()
    return game

  async def play(
    task: episodes.Task, member: int, preface: str
  ) -> episodes.Episode:
    async with permits:
      recoveries, until_s, diverged = 0, 0.0, False
      for left in range(_REFILLS, -1, -1):
        game = await attempt(task, member, preface, until_s)
        played, fault = game.episode(), game.fault
        recoveries += played.recoveries
        if fault is None:
          break
        until_s = game.until_s or until_s
        # Twice, and the environment is one that does what it likes.
        hopeless = fault.final or (fault.diverged and diverged)
        diverged = fault.diverged
        if not left or hopeless or not client.up:
          _log.warning('episode of %s dropped: %s', task, fault)
          break
        _log.warning('episode of %s is played again: %s', task, fault)
        ledger.refills += 1
      counts[0] += 1
      ledger.ended()
      on_progress(*counts)
      return dataclasses.replace(played, recoveries=recoveries)

  async def watch() -> None:
    while not should_stop():
      await asyncio.sleep(0.2)
    raise StoppedError

  on_progress(*counts)
  order = sorted(range(len(jobs)), key=lambda i: -expected(jobs[i][0]))
  before = prefaces or [''] * len(jobs)
  games = [asyncio.ensure_future(play(*jobs[i], before[i])) for i in order]
  playing = asyncio.gather(*games)
  others = [asyncio.ensure_future(work) for work in (decoder.run(), watch())]
  try:
    done, _ = await asyncio.wait(
      [playing, *others], return_when=asyncio.FIRST_COMPLETED
    )
    for future in done:
      future.result()  # Raises what stopped us, if anything did.
    played = dict(zip(order, playing.result(), strict=True))
    return Collected([played[i] for i in range(len(jobs))], ledger.stats())
  finally:
    # Each by itself: what gathers them is done as soon as one has failed.
    for future in (*games, playing, *others):
      future.cancel()
    await asyncio.gather(*games, playing, *others, return_exceptions=True)
    for slot in policy_sampler.active:
      policy_sampler.reset(slot)


class _Game:
  """One episode while it is played.

  Attributes:
    fault: the failure of the environment; None if there was none.
    start_s: seconds into the collection at which it got its slot.
    until_s: seconds into the collection at which it is cut off; 0: never.
  """

  def __init__(
    self,
    session: env_client.Session,
    fmt: chat.Format,
    task: episodes.Task,
    member: int,
    seed: tuple[int, ...],
    preface: str,
  ):
    self._session = session
    self._fmt = fmt
    self._task = task
    self._member = member
    self._seed = seed
    self._preface = preface
    self._turns: list[episodes.Turn] = []
    self._seen = episodes.Observation('')
    self._ending: episodes.Ending | None = None
    self._goal = ''
    self._reset_s = 0.0
    self._dropped_pairs = 0
    self.fault: env_client.EnvFault | None = None
    self.start_s = 0.0
    self.until_s = 0.0

  async def begin(self) -> None:
    """Resets the environment."""
    start = time.perf_counter()
    self._seen = await self._session.reset()
    self._reset_s = time.perf_counter() - start
    self._goal = self._seen.goal

  async def play(
    self,
    decoder: _Decoder,
    slot: int,
    on_turn: Callable[[], None],
  ) -> None:
    """Plays to the end, or to the deadline."""
    left_s = self.until_s - self.start_s if self.until_s else None
    try:
      async with asyncio.timeout(left_s):
        await self._play(decoder, slot, on_turn)
    except TimeoutError:
      self._ending = episodes.Ending.DEADLINE

  async def _play(self, decoder, slot, on_turn) -> None:
    talk = self._fmt.begin(self._preface + self._goal)
    while self._seen.ending is None:
      seen, turn = self._seen, len(self._turns)
      try:
        cut_lists = talk.cut_lists
        context, prompt_ids = talk.prompt(seen.text, seen.admissible)
        decoder.ledger.cut_lists += talk.cut_lists - cut_lists
      except chat.PromptTooLongError as error:
        if not turn:
          raise chat.PromptTooLongError(f'{self._task}: {error}') from error
        # The context is used up: as with the limit of turns, the outcome so
        # far stands.
        self._ending = episodes.Ending.TRUNCATED
        return
      key = turn_key(self._seed, self._task, self._member, turn)
      start = time.perf_counter()
      response = await decoder.respond(slot, context, key, fresh=not turn)
      answered = time.perf_counter()
      text, action, cut = self._fmt.parse(response.ids, response.truncated)
      with decoder.ledger.span('env'):
        after = await self._session.step(action.text)
      self._turns.append(
        episodes.Turn(
          prompt_ids=tuple(prompt_ids),
          response_ids=tuple(response.ids.tolist()),
          response_logps=tuple(response.logps.tolist()),
          observation=seen.text,
          response=text,
          action=action.text,
          reward=after.reward,
          valid=action.valid,
          state_key=state_key(seen.text),
          truncated=cut,
          respond_s=answered - start,
          env_s=time.perf_counter() - answered,
        )
      )
      talk.respond(
        context, self._turns[-1].response_ids, seen.text, action.text
      )
      on_turn()
      self._seen, self._dropped_pairs = after, talk.dropped_pairs
    self._ending = self._seen.ending

  def episode(self) -> episodes.Episode:
    if self.fault:
      return episodes.Episode(
        self._task,
        self._member,
        (),
        0.0,
        False,
        episodes.Ending.FAULT,
        str(self.fault),
        recoveries=self._session.faults,
      )
    return episodes.Episode(
      self._task,
      self._member,
      tuple(self._turns),
      self._seen.score,
      self._seen.success,
      self._ending,
      goal=self._goal,
      dropped_pairs=self._dropped_pairs,
      start_s=self.start_s,
      reset_s=self._reset_s,
      recoveries=self._session.faults,
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

  def __init__(self, policy_sampler: sampler.Sampler, ledger: _Ledger):
    self.ledger = ledger
    self._sampler = policy_sampler
    # Requests that the sampler does not know yet.
    self._orders: list[tuple[int, list[int], np.ndarray, bool]] = []
    self._asked: dict[int, asyncio.Future] = {}
    self._running: dict[int, asyncio.Future] = {}
    self._wake = asyncio.Event()

  async def respond(
    self, slot: int, context: list[int], key: np.ndarray, *, fresh: bool
  ) -> sampler.Response:
    """Samples a response; `fresh` forgets what the slot holds.

    Not even a prefix of another episode is kept: in how many pieces a context
    is read would depend on who had the slot before, and with it the last bit.
    """
    future = asyncio.get_running_loop().create_future()
    self._asked[slot] = future
    self._orders.append((slot, context, key, fresh))
    self._wake.set()
    start = time.perf_counter()
    try:
      response = await future
    except asyncio.CancelledError:
      # Its slot decodes on, for nobody, until the next episode makes it fresh.
      for futures in (self._asked, self._running):
        if futures.get(slot) is future:
          del futures[slot]
      raise
    self.ledger.add('prefill', start, response.first_step)
    self.ledger.add('decode', response.first_step, time.perf_counter())
    return response

  async def run(self) -> None:
    while True:
      if not self._asked and not self._running:
        with self.ledger.span('idle'):
          self._wake.clear()
          await self._wake.wait()
      orders, self._orders = self._orders, []
      self._running |= self._asked
      self._asked = {}
      # Who waits for an environment may come back any time.
      alone = not self.ledger.elsewhere
      # Shielded, because a thread cannot be cancelled: the cache is in its
      # hands until it returns.
      advance = asyncio.ensure_future(
        asyncio.to_thread(self._advance, orders, alone)
      )
      try:
        responses = await asyncio.shield(advance)
      except asyncio.CancelledError:
        await asyncio.wait([advance])
        raise
      for response in responses:
        # Nobody waits for one that was dropped while it was decoded.
        if future := self._running.pop(response.slot, None):
          future.set_result(response)

  def _advance(self, orders, alone: bool) -> list[sampler.Response]:
    for slot, context, key, fresh in orders:
      if fresh:
        self._sampler.reset(slot)
      self._sampler.submit(slot, context, key)
    burst_s = _LONG_BURST_S if alone else _BURST_S
    # Nothing is known of the first step, which compiles.
    step_s = self._sampler.step_s or burst_s
    return self._sampler.decode(max(1, int(burst_s / step_s)))


class _Ledger:
  """Books how the time of a collection is spent.

  Attributes:
    elsewhere: episodes that wait for their environment now.
    refills: episodes that were begun again.
    cut_lists: see `Stats`.
  """

  def __init__(self, policy_sampler: sampler.Sampler, slots: int, jobs: int):
    self._sampler = policy_sampler
    self._before = dataclasses.replace(policy_sampler.counters)
    self._slots = slots
    self._jobs = jobs
    self._start = time.perf_counter()
    self._ended: list[float] = []
    self._spans: list[tuple[str, float, float]] = []
    self.elsewhere = 0
    self.refills = 0
    self.cut_lists = 0

  def now(self) -> float:
    """Seconds since the collection began."""
    return time.perf_counter() - self._start

  def add(self, kind: str, start: float, end: float) -> None:
    """Books a span between two times of `time.perf_counter`."""
    self._spans.append((kind, start - self._start, end - self._start))

  @contextlib.contextmanager
  def span(self, kind: str) -> Iterator[None]:
    start = time.perf_counter()
    self.elsewhere += kind in _ELSEWHERE
    try:
      yield
    finally:
      self.elsewhere -= kind in _ELSEWHERE
      self.add(kind, start, time.perf_counter())

  def ended(self) -> None:
    """An episode ended now."""
    self._ended.append(self.now())

  def stats(self) -> Stats:
    wall_s = self.now()
    before_tail = math.ceil(_TAIL * self._jobs)
    tail = sorted(self._ended)[before_tail - 1] if self._jobs else wall_s
    whole = max(self._slots * tail, 1e-9)

    def share(kind: str) -> float:
      return (
        sum(
          max(0.0, min(end, tail) - min(start, tail))
          for name, start, end in self._spans
          if name == kind
        )
        / whole
      )

    done = self._sampler.counters - self._before
    rows = done.steps * self._sampler.slots
    busy_s = done.prefill_s + done.decode_s + self._waited_s()
    return Stats(
      wall_s=wall_s,
      tail_s=wall_s - tail,
      occupancy=share('held'),
      decode_share=share('decode'),
      prefill_share=share('prefill'),
      env_wait_share=share('env'),
      batch_fill=done.decoded_tokens / rows if rows else 0.0,
      tokens_per_s=done.decoded_tokens / wall_s,
      prefilled_tokens=done.prefilled_tokens,
      overhead_share=max(0.0, 1 - busy_s / wall_s),
      refills=self.refills,
      cut_lists=self.cut_lists,
    )

  def _waited_s(self) -> float:
    """Seconds with nothing to compute while an environment was at work.

    The time in which what came back is read and written is not among them.
    """
    # +1 and -1 where a span begins and ends.
    edges = sorted(
      (time_s, kind, step)
      for kind, start, end in self._spans
      if kind in ('idle', *_ELSEWHERE)
      for time_s, step in ((start, 1), (end, -1))
    )
    waited_s, last, idle, elsewhere = 0.0, 0.0, 0, 0
    for time_s, kind, step in edges:
      if idle and elsewhere:
        waited_s += time_s - last
      last = time_s
      if kind == 'idle':
        idle += step
      else:
        elsewhere += step
    return waited_s
