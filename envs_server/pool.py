"""Worker processes: one environment each, replaced when they die or hang.

Environments leak, crash and are not thread-safe, so each has a process of its
own. Processes are spawned, never forked: gRPC threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable
from typing import Any

from envs_server import env, lifetime

_log = logging.getLogger(__name__)

_BUILD_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 2.0
_LONGEST_BACKOFF_S = 10.0


class WorkerLostError(Exception):
  """The process that played the episode is gone; says why."""


class Worker:
  """The pool's end of one worker process. Answers one call at a time."""

  def __init__(self, env_name: str, on_lost: Callable[[Worker], None]):
    """Starts the process; `call` may be used once `built` has returned.

    Args:
      env_name: a known environment.
      on_lost: called once, on the event loop, when the process is gone.
    """
    self.lost = ''  # Why the process is gone; empty while it lives.
    self.ready = False  # Its environment is built.
    self._on_lost = on_lost
    self._loop = asyncio.get_running_loop()
    context = multiprocessing.get_context('spawn')
    self._connection, theirs = context.Pipe()
    self._process = context.Process(
      target=_work, args=(env_name, theirs, os.getpid()), daemon=True
    )
    self._process.start()
    # With our copy closed, the death of the process reads as end of file.
    theirs.close()
    self._reply: asyncio.Future = self._loop.create_future()
    self._loop.add_reader(self._connection.fileno(), self._readable)

  @property
  def pid(self) -> int:
    return self._process.pid

  async def built(self) -> None:
    """Waits until the environment is built.

    Raises:
      WorkerLostError: it cannot be built.
    """
    await self._answer('start', _BUILD_DEADLINE_S)
    self.ready = True

  async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
    """Calls a method of the environment.

    Raises:
      env.TaskError: as the environment raised it.
      WorkerLostError: it failed, died, or did not answer in time; in each
        case the process is gone.
    """
    if self.lost:
      raise WorkerLostError(self.lost)
    self._reply = self._loop.create_future()
    try:
      self._connection.send((method, args))
    except OSError as error:
      self.kill(f'the worker process cannot be reached ({error})')
    return await self._answer(method, deadline_s)

  async def settle(self, deadline_s: float) -> None:
    """Waits out a call whose caller gave up."""
    done, _ = await asyncio.wait([self._reply], timeout=deadline_s)
    if not done:
      self.kill(f'an abandoned call took over {deadline_s:g} s')
    elif self._reply.result()[0] == 'failed':
      self.kill(self._reply.result()[1])

  async def close(self) -> None:
    """Ends the environment and the process, by force if need be."""
    try:
      await self.call('close', deadline_s=_CLOSE_DEADLINE_S)
    except WorkerLostError:
      return
    self.kill('closed')

  def kill(self, cause: str) -> None:
    """Ends the process at once."""
    if self.lost:
      return
    self.lost = cause
    self._loop.remove_reader(self._connection.fileno())
    self._process.kill()
    self._process.join()
    self._connection.close()
    if not self._reply.done():
      self._reply.set_result(('lost', cause))
    self._on_lost(self)

  async def _answer(self, method: str, deadline_s: float) -> Any:
    try:
      async with asyncio.timeout(deadline_s):
        # The answer outlives a caller who is cancelled: see `settle`.
        kind, value = await asyncio.shield(self._reply)
    except TimeoutError:
      self.kill(f'{method} took over {deadline_s:g} s')
      raise WorkerLostError(self.lost) from None
    if kind == 'task':
      raise env.TaskError(value)
    if kind == 'failed':
      self.kill(value)
    if kind != 'ok':
      raise WorkerLostError(value)
    return value

  def _readable(self) -> None:
    try:
      answer = self._connection.recv()
    except (EOFError, OSError):
      self._process.join(1.0)
      code = self._process.exitcode
      how = 'closed its pipe'
      if code is not None:
        how = (
          f'was ended by {signal.Signals(-code).name}'
          if code < 0
          else f'exited with code {code}'
        )
      self.kill(f'the worker process {how}')
      return
    if not self._reply.done():
      self._reply.set_result(answer)


class Pool:
  """Lends workers to episodes: first come, first served."""

  def __init__(self, env_name: str, size: int, *, deadline_s: float):
    """Starts nothing yet.

    Args:
      env_name: a known environment.
      size: number of worker processes, at least 1.
      deadline_s: seconds after which an abandoned call is given up.
    """
    self.size = size
    self._env_name = env_name
    self._deadline_s = deadline_s
    self._alive: set[Worker] = set()
    self._idle: collections.deque[Worker] = collections.deque()
    self._waiting: collections.deque[asyncio.Future] = collections.deque()
    self._chores: set[asyncio.Task] = set()
    self._closing = False
    self._failures = 0  # Builds that failed since the last that did not.

  @property
  def busy(self) -> int:
    return sum(worker.ready for worker in self._alive) - len(self._idle)

  @property
  def waiting(self) -> int:
    return sum(not future.done() for future in self._waiting)

  def start(self) -> None:
    """Starts all workers; `acquire` waits for the first that is built."""
    for _ in range(self.size):
      self._chore(self._build())

  async def acquire(self) -> Worker:
    """Waits for a free worker, behind those who asked before.

    Raises:
      WorkerLostError: no worker can be built.
    """
    if self._idle:
      return self._idle.popleft()
    future = asyncio.get_running_loop().create_future()
    self._waiting.append(future)
    try:
      return await future
    except asyncio.CancelledError:
      # Cancelled in the moment in which it was served.
      if future.done() and not future.cancelled() and not future.exception():
        self._lend(future.result())
      raise

  def release(self, worker: Worker) -> None:
    """Takes a worker back, even one that is still in a call."""
    if not worker.lost:
      self._chore(self._take_back(worker))

  async def close(self) -> None:
    """Ends all workers."""
    self._closing = True
    for chore in self._chores:
      chore.cancel()
    await asyncio.gather(*self._chores, return_exceptions=True)
    await asyncio.gather(*(worker.close() for worker in list(self._alive)))

  def _chore(self, work) -> None:
    # The event loop itself holds tasks only weakly.
    chore = asyncio.ensure_future(work)
    self._chores.add(chore)
    chore.add_done_callback(self._chores.discard)

  async def _build(self) -> None:
    backoff_s = 0.1
    while True:
      worker = Worker(self._env_name, self._lost)
      self._alive.add(worker)
      try:
        await worker.built()
      except WorkerLostError as error:
        self._failures += 1
        _log.warning('%s cannot be built: %s', self._env_name, error)
        if self._failures >= self.size and not self._alive:
          self._deny(error)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        continue
      self._failures = 0
      self._lend(worker)
      return

  async def _take_back(self, worker: Worker) -> None:
    await worker.settle(self._deadline_s)
    if not worker.lost:
      self._lend(worker)

  def _lend(self, worker: Worker) -> None:
    while self._waiting:
      future = self._waiting.popleft()
      if not future.done():
        future.set_result(worker)
        return
    self._idle.append(worker)

  def _deny(self, error: WorkerLostError) -> None:
    while self._waiting:
      future = self._waiting.popleft()
      if not future.done():
        future.set_exception(WorkerLostError(str(error)))

  def _lost(self, worker: Worker) -> None:
    self._alive.discard(worker)
    if worker in self._idle:
      self._idle.remove(worker)
    # One that dies unbuilt is seen to by `_build`.
    if worker.ready and not self._closing:
      _log.warning('replacing a %s worker: %s', self._env_name, worker.lost)
      self._chore(self._build())


def _work(
  env_name: str, connection: multiprocessing.connection.Connection, parent: int
) -> None:
  """Body of the worker process: answers calls until the pipe closes."""
  # A Ctrl-C in the terminal reaches every process; the server decides.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  lifetime.die_with_parent()
  if os.getppid() != parent:
    return
  try:
    made = env.module(env_name).make_env()
  except Exception as error:
    connection.send(('failed', _describe(error)))
    return
  connection.send(('ok', None))
  while True:
    try:
      method, args = connection.recv()
    except (EOFError, OSError):
      made.close()
      return
    try:
      answer = ('ok', getattr(made, method)(*args))
    except env.TaskError as error:
      answer = ('task', str(error))
    except Exception as error:
      answer = ('failed', _describe(error))
    connection.send(answer)
    if method == 'close' or answer[0] == 'failed':
      return


def _describe(error: Exception) -> str:
  lines = str(error).strip().splitlines() or ['']
  return f'{type(error).__name__}: {lines[0]}'
