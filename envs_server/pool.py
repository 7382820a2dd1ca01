"""Lends workers to episodes, and replaces those that die, hang or swell."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import os

import psutil

from envs_server import telemetry, worker

_log = logging.getLogger(__name__)

# Those that we may use, where the system tells.
_CORES = (
  len(os.sched_getaffinity(0))
  if hasattr(os, 'sched_getaffinity')
  else os.cpu_count() or 1
)
# Processes started at a time: more would only slow each other down.
_BUILDS = max(4, 2 * _CORES)
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 10.0
# Builds in a row that fail before those who wait are told.
_HOPELESS = 3
_ROUND_S = 1.0
_PING_EVERY_S = 10.0
_PING_DEADLINE_S = 5.0
_MEASURE_EVERY_S = 5.0
# Seven beats of a worker. Its process is stopped, or starved beyond use.
_SILENCE_S = 15.0


class QueueFullError(Exception):
  """No more episodes may wait; says how many do."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What the pool keeps within bounds.

  Attributes:
    queue: episodes that may wait.
    client: workers that one client may have at a time; 0: all.
    episodes: a worker is replaced after so many at most; 0: never.
    memory_bytes: resident memory of a worker with its children above which it
      is replaced after its episode; at twice that at once. 0: none.
    message_bytes: of an observation with all that comes with it.
  """

  queue: int
  client: int
  episodes: int
  memory_bytes: int
  message_bytes: int


class Pool:
  """Workers and the queue before them.

  Clients take turns; within a client, first come, first served. So one that
  asks for a thousand episodes keeps nobody else waiting for them.
  """

  def __init__(
    self,
    env_name: str,
    size: int,
    limits: Limits,
    meter: telemetry.Telemetry,
  ):
    """Starts nothing yet.

    Args:
      env_name: a known environment.
      size: number of worker processes, at least 1.
      limits: see there.
      meter: is told of every worker that is replaced.
    """
    self.size = size
    self._env_name = env_name
    self._limits = limits
    self._meter = meter
    self._alive: set[worker.Worker] = set()
    self._idle: collections.deque[worker.Worker] = collections.deque()
    self._lent: dict[worker.Worker, str] = {}  # To whom.
    self._settling: set[worker.Worker] = set()  # Given back, still in a call.
    self._checking = 0  # Idle workers that are asked whether they are well.
    self._playing: collections.Counter[str] = collections.Counter()
    # Who waits, by client; the client whose turn is next comes first.
    self._lanes: collections.OrderedDict[
      str, collections.deque[asyncio.Future]
    ] = collections.OrderedDict()
    self._chores: set[asyncio.Task] = set()
    self._builds = asyncio.Semaphore(_BUILDS)
    self._closing = False
    self._built = 0  # Workers so far.
    # Workers that were of no use, since the last that was.
    self._failures = 0

  @property
  def ready(self) -> int:
    """Workers whose environment is built."""
    return sum(w.ready for w in self._alive)

  @property
  def busy(self) -> int:
    """Workers that play an episode."""
    return len(self._lent)

  @property
  def waiting(self) -> int:
    """Episodes that wait for a worker."""
    return sum(map(len, self._lanes.values()))

  @property
  def clients(self) -> int:
    """Clients that play or wait."""
    return len(self._playing.keys() | self._lanes.keys())

  @property
  def memory_bytes(self) -> list[int]:
    """Resident memory of each worker with its children, when last measured."""
    return [w.memory_bytes for w in self._alive if w.memory_bytes]

  def start(self) -> None:
    """Starts all workers; `acquire` waits for the first that is built."""
    for _ in range(self.size):
      self._chore(self._build())
    self._chore(self._look_after())

  async def acquire(
    self, client: str, *, bounded: bool = True
  ) -> worker.Worker:
    """Waits for a free worker in the queue of `client`.

    Args:
      client: who asks.
      bounded: the queue may turn it away.

    Raises:
      QueueFullError: too many wait already.
      worker.WorkerLostError: no worker can be built.
    """
    future = asyncio.get_running_loop().create_future()
    self._lanes.setdefault(client, collections.deque()).append(future)
    self._serve()
    # Those that are being checked will be free in a moment.
    room = self._limits.queue + self._checking
    if bounded and not future.done() and self.waiting > room:
      self._turn_one_away(client)
    try:
      return await future
    except asyncio.CancelledError:
      if not future.done() or future.cancelled():
        self._leave(client, future)
      elif not future.exception():
        # Cancelled in the moment in which it was served.
        self.release(future.result(), played=False)
      raise

  def release(self, lent: worker.Worker, *, played: bool = True) -> None:
    """Takes a worker back, even one that is still in a call."""
    if lent not in self._lent or lent in self._settling:
      return  # It is lost, or comes back already.
    self._settling.add(lent)
    lent.episodes += played
    self._chore(self._take_back(lent))

  async def close(self) -> None:
    """Ends all workers."""
    self._closing = True
    for chore in self._chores:
      chore.cancel()
    await asyncio.gather(*self._chores, return_exceptions=True)
    await asyncio.gather(*(w.close() for w in list(self._alive)))

  # -- The queue ---------------------------------------------------------------

  def _serve(self) -> None:
    """Gives idle workers to those who wait."""
    while self._idle and (client := self._next_client()) is not None:
      future = self._lanes[client].popleft()
      if future.done():  # It is leaving, but has not come to it yet.
        self._drop_lane(client)
        continue
      self._lanes.move_to_end(client)
      self._drop_lane(client)
      lent = self._idle.popleft()
      self._lent[lent] = client
      self._playing[client] += 1
      future.set_result(lent)

  def _next_client(self) -> str | None:
    """Whose turn it is; None if nobody may be served."""
    limit = self._limits.client
    for client in self._lanes:
      if not limit or self._playing[client] < limit:
        return client
    return None

  def _turn_one_away(self, newcomer: str) -> None:
    """Makes room: the last of those goes of whom most wait."""
    lane = max(self._lanes.values(), key=len)
    if len(lane) == len(self._lanes[newcomer]):
      lane = self._lanes[newcomer]
    future = lane.pop()
    if not future.done():
      future.set_exception(
        QueueFullError(
          f'{self._limits.queue} episodes wait for one of {self.size} workers '
          'already, and no more may (--queue)'
        )
      )
    for client in [c for c, waiting in self._lanes.items() if not waiting]:
      del self._lanes[client]

  def _returned(self, lent: worker.Worker) -> bool:
    """Gives the place of a worker back to its client; False if it has none."""
    self._settling.discard(lent)
    if lent not in self._lent:
      return False
    client = self._lent.pop(lent)
    self._playing[client] -= 1
    if not self._playing[client]:
      del self._playing[client]
    return True

  def _leave(self, client: str, future: asyncio.Future) -> None:
    if future in self._lanes.get(client, ()):
      self._lanes[client].remove(future)
      self._drop_lane(client)

  def _drop_lane(self, client: str) -> None:
    if not self._lanes[client]:
      del self._lanes[client]

  def _deny(self, why: str) -> None:
    for lane in self._lanes.values():
      for future in lane:
        if not future.done():
          future.set_exception(worker.WorkerLostError('error', why))
    self._lanes.clear()

  # -- Workers -----------------------------------------------------------------

  def _chore(self, work) -> None:
    # The event loop itself holds tasks only weakly.
    chore = asyncio.ensure_future(work)
    self._chores.add(chore)
    chore.add_done_callback(self._done)

  def _done(self, chore: asyncio.Task) -> None:
    self._chores.discard(chore)
    if not chore.cancelled() and chore.exception():
      _log.error('a chore of the pool failed', exc_info=chore.exception())

  async def _build(self) -> None:
    while True:
      if self._failures:
        backoff_s = _FIRST_BACKOFF_S * 2 ** min(self._failures - 1, 10)
        await asyncio.sleep(min(backoff_s, _LONGEST_BACKOFF_S))
      async with self._builds:
        made = worker.Worker(
          self._env_name, self._limits.message_bytes, self._lost
        )
        self._alive.add(made)
        try:
          await made.build()
          break
        # Whatever it is: nothing may make the pool smaller in silence.
        except Exception as error:
          self._alive.discard(made)
          self._failures += 1
          _log.warning('%s cannot be built: %s', self._env_name, error)
          if self._failures >= min(_HOPELESS, self.size) and not self.ready:
            self._deny(str(error))
    made.last_episode = self._limits.episodes
    if self._built < self.size:
      # Those of the start shall not all reach their last episode together.
      share = self._built / (2 * self.size)
      made.last_episode -= int(self._limits.episodes * share)
    self._built += 1
    self._free(made)

  def _free(self, free: worker.Worker) -> None:
    if not free.lost:
      self._idle.append(free)
      self._serve()

  async def _take_back(self, lent: worker.Worker) -> None:
    await lent.settle()
    if not self._returned(lent):
      return  # Lost meanwhile.
    if lent.useful:
      self._failures = 0
    cap = self._limits.memory_bytes
    if self._limits.episodes and lent.episodes >= lent.last_episode:
      await self._retire(lent, 'episodes')
    elif cap and lent.memory_bytes > cap:
      await self._retire(lent, 'memory')
    else:
      self._free(lent)

  async def _retire(self, old: worker.Worker, reason: str) -> None:
    """Replaces a worker that has done nothing wrong."""
    self._meter.restart(reason)
    _log.info(
      'replacing a %s worker after %d episodes (%s)',
      self._env_name,
      old.episodes,
      reason,
    )
    await old.close()

  def _lost(self, gone: worker.Worker) -> None:
    self._alive.discard(gone)
    if gone in self._idle:
      self._idle.remove(gone)
    self._returned(gone)
    self._serve()
    # One that dies unbuilt is seen to by `_build`.
    if not gone.ready or self._closing:
      return
    gone.ready = False
    # One that was built to die must not be built for ever without a pause.
    self._failures += not gone.useful
    if gone.kind != 'closed':
      self._meter.restart(gone.kind)
      _log.warning('replacing a %s worker: %s', self._env_name, gone.lost)
    self._chore(self._build())

  # -- Health ------------------------------------------------------------------

  async def _look_after(self) -> None:
    """Finds workers that hang or swell, for ever."""
    loop = asyncio.get_running_loop()
    measured_s = 0.0
    while True:
      before_s = loop.time()
      await asyncio.sleep(_ROUND_S)
      now = loop.time()
      self._find_silent(now - before_s > 3 * _ROUND_S)
      for one in list(self._idle):
        if now - one.checked_s > _PING_EVERY_S:
          self._idle.remove(one)
          self._checking += 1
          self._chore(self._check(one))
      if now - measured_s > _MEASURE_EVERY_S:
        measured_s = now
        try:
          await self._measure()
        except OSError as error:  # Such as: no more files may be opened.
          _log.warning('the memory of workers cannot be measured: %s', error)

  def _find_silent(self, stopped: bool) -> None:
    for one in [w for w in self._alive if w.ready]:
      if stopped:  # We were, and with the whole machine so were they.
        one.pardon()
      if one.silent_s > _SILENCE_S:
        one.kill('hung', f'no sign of life for {_SILENCE_S:g} s')

  async def _check(self, idle: worker.Worker) -> None:
    try:
      await idle.ping(_PING_DEADLINE_S)
    except worker.WorkerLostError:
      return  # It is being replaced.
    finally:
      self._checking -= 1
    self._free(idle)

  async def _measure(self) -> None:
    by_pid = {w.pid: w for w in self._alive if w.ready}
    # In a thread: with a thousand processes it takes a while.
    used = await asyncio.to_thread(_resident_bytes, set(by_pid))
    cap = self._limits.memory_bytes
    for pid, one in by_pid.items():
      one.memory_bytes = used.get(pid, 0)
      if cap and one.memory_bytes > 2 * cap:
        one.kill(
          'memory',
          f'it held {one.memory_bytes >> 20} MB, over twice --memory-mb='
          f'{cap >> 20}',
        )


def _resident_bytes(groups: set[int]) -> dict[int, int]:
  """Resident memory of each of the process groups, bytes."""
  used: collections.Counter[int] = collections.Counter()
  for pid in psutil.pids():
    try:
      group = os.getpgid(pid)
      if group in groups:
        used[group] += psutil.Process(pid).memory_info().rss
    except (OSError, psutil.Error):
      continue  # It has just ended, or is none of ours.
  return used
