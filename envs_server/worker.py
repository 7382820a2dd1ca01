"""The pool's end of a worker process.

Environments leak, crash and are not thread-safe, so each has a process of its
own, started afresh: gRPC threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from envs_server import child, env

# Catalogs are the longest answers.
_LONGEST_LINE = 64 << 20
_BUILD_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 2.0
_EXIT_DEADLINE_S = 10.0


class WorkerLostError(Exception):
  """The process that played the episode is gone; says why.

  Attributes:
    kind: `died` | `hung` (no sign of life) | `deadline` (a call took too
      long) | `memory` | `error` (the environment failed) | `closed`.
  """

  def __init__(self, kind: str, why: str):
    super().__init__(why)
    self.kind = kind


class TooLargeError(Exception):
  """The environment answered with more than a message may hold."""


class Worker:
  """One worker process. Answers one call at a time.

  Attributes:
    lost: why the process is gone; empty while it lives.
    kind: the kind of that, see `WorkerLostError`.
    ready: its environment is built.
    useful: it has begun an episode.
    episodes: that it has played.
    last_episode: number of episodes after which it is replaced; 0: never.
    checked_s: time of the event loop at which it last answered a call.
    memory_bytes: resident memory with its children, when last measured.
  """

  def __init__(
    self, env_name: str, max_bytes: int, on_lost: Callable[[Worker], None]
  ):
    """Starts nothing yet.

    Args:
      env_name: a known environment.
      max_bytes: of an observation with all that comes with it.
      on_lost: called once, on the event loop, when the process is gone.
    """
    self.lost = ''
    self.kind = ''
    self.ready = False
    self.useful = False
    self.episodes = 0
    self.last_episode = 0
    self.checked_s = 0.0
    self.memory_bytes = 0
    self._command = (env_name, max_bytes)
    self._on_lost = on_lost
    self._loop = asyncio.get_running_loop()
    self._reply: asyncio.Future = self._loop.create_future()
    self._heard_s = 0.0  # 0: nothing was heard yet.
    self._until_s = 0.0  # Time of the loop until which the call may take.
    self._retiring = False
    self._process: subprocess.Popen | None = None
    self._pipe: asyncio.Transport | None = None

  @property
  def pid(self) -> int:
    return self._process.pid

  @property
  def silent_s(self) -> float:
    """Seconds without a sign of life; 0 before the first."""
    return self._loop.time() - self._heard_s if self._heard_s else 0.0

  def pardon(self) -> None:
    """Counts silence from now on."""
    self._heard_s = self._loop.time()

  async def build(self) -> None:
    """Starts the process and waits until its environment is built.

    Raises:
      WorkerLostError: it cannot be built.
    """
    name, max_bytes = self._command
    ours: socket.socket | None = None
    try:
      ours, theirs = socket.socketpair()
      # With our copy of their end closed, the death of the process reads as
      # end of file.
      with theirs:
        self._process = subprocess.Popen(
          [
            *(sys.executable, '-m', 'envs_server.child', name),
            *map(str, (theirs.fileno(), os.getpid(), max_bytes)),
          ],
          pass_fds=(theirs.fileno(),),
          stdin=subprocess.DEVNULL,
          # Our standard output is read by whoever started us.
          stdout=sys.__stderr__.fileno(),
          env=os.environ | {'PYTHONPATH': python_path()},
          # A group, so that what an environment starts ends with it, and a
          # Ctrl-C in the terminal is for the service to answer.
          process_group=0,
        )
      self._pipe, _ = await self._loop.create_connection(
        lambda: _Lines(self._hear, self._end), sock=ours
      )
      await self._answer('start', _BUILD_DEADLINE_S, 'deadline')
    except OSError as error:
      if ours is not None:
        ours.close()
      self.kill('error', f'no process can be started ({error})')
      raise WorkerLostError(self.kind, self.lost) from error
    except asyncio.CancelledError:
      self.kill('closed', 'the service ends')
      raise
    if self.lost:  # Since it said so.
      raise WorkerLostError(self.kind, self.lost)
    self.ready = True

  async def catalog(self, deadline_s: float) -> env.Catalog:
    """See `env.TextEnv`; raises as `step` does."""
    return child.catalog(await self._call('catalog', deadline_s=deadline_s))

  async def reset(
    self, task: env.Task, expert: bool, admissible: bool, *, deadline_s: float
  ) -> env.Observation:
    """See `env.TextEnv`.

    Raises:
      env.TaskError, env.BrokenTaskError: as the environment raised it.
      TooLargeError: the answer is too large.
      WorkerLostError: the environment failed, died, or did not answer in time;
        in each case the process is gone.
    """
    fields = vars(task) | {'options': dict(task.options)}
    seen = await self._call(
      'reset', fields, expert, admissible, deadline_s=deadline_s
    )
    self.useful = True
    return child.observation(seen)

  async def step(self, action: str, *, deadline_s: float) -> env.Observation:
    """See `env.TextEnv`; raises as `reset` does."""
    return child.observation(
      await self._call('step', action, deadline_s=deadline_s)
    )

  async def ping(self, deadline_s: float) -> None:
    """Asks the environment whether it is well.

    Raises:
      WorkerLostError: it is not.
    """
    await self._call('ping', deadline_s=deadline_s, late='hung')

  async def settle(self) -> None:
    """Waits out a call whose caller gave up, as long as he might have."""
    left_s = max(0.0, self._until_s - self._loop.time())
    done, _ = await asyncio.wait([self._reply], timeout=left_s)
    if not done:
      self.kill('deadline', 'a call that was abandoned took too long')
    elif self._reply.result()[0] == 'error':
      self.kill(*self._reply.result())

  async def close(self) -> None:
    """Ends the environment and the process, by force if need be."""
    self._retiring = True
    try:
      if self.ready:
        await self._call('close', deadline_s=_CLOSE_DEADLINE_S)
    except (WorkerLostError, env.TaskError):
      pass
    self.kill('closed', 'closed')
    if self._process is not None:
      await self._reaping

  def kill(self, kind: str, why: str) -> None:
    """Ends the process, and what it started, at once."""
    if self.lost:
      return
    # What fails at the end was not lost by it.
    self.kind, self.lost = 'closed' if self._retiring else kind, why
    if self._process is not None:
      try:
        os.killpg(self._process.pid, signal.SIGKILL)
      except ProcessLookupError:
        pass  # It ended by itself and took everything with it.
      self._reaping = asyncio.ensure_future(self._exited(_EXIT_DEADLINE_S))
    if self._pipe is not None:
      self._pipe.abort()
    if not self._reply.done():
      self._reply.set_result((kind, why))
    self._on_lost(self)

  async def _call(
    self, method: str, *args: Any, deadline_s: float, late: str = 'deadline'
  ) -> Any:
    if self.lost:
      raise WorkerLostError(self.kind, self.lost)
    self._reply = self._loop.create_future()
    self._until_s = self._loop.time() + deadline_s
    call = {'method': method, 'args': args}
    # Calls are short and one at a time, so they never pile up in the buffer.
    self._pipe.write(json.dumps(call).encode() + b'\n')
    return await self._answer(method, deadline_s, late)

  async def _answer(self, method: str, deadline_s: float, late: str) -> Any:
    try:
      async with asyncio.timeout(deadline_s):
        kind, value = await self._reply
    except TimeoutError:
      self.kill(late, f'{method} took over {deadline_s:g} s')
      raise WorkerLostError(self.kind, self.lost) from None
    finally:
      self._renew()
    if kind == 'task':
      raise env.TaskError(value)
    if kind == 'broken':
      raise env.BrokenTaskError(value)
    if kind == 'large':
      raise TooLargeError(value)
    if kind == 'error':
      self.kill(kind, value)
    if kind != 'ok':
      raise WorkerLostError(kind, value)
    self.checked_s = self._loop.time()
    return value

  def _hear(self, line: bytes) -> None:
    """Takes one thing that the process says."""
    self.pardon()
    try:
      message = json.loads(line)
      said = (message['kind'], message['value']) if message else None
    except (ValueError, KeyError, TypeError) as error:
      self.kill('error', f'the worker process wrote nonsense ({error})')
      return
    self._renew()
    if said and not self._reply.done():
      self._reply.set_result(said)

  def _renew(self) -> None:
    """The answer outlives a caller who is cancelled: see `settle`."""
    if self._reply.cancelled():
      self._reply = self._loop.create_future()

  def _end(self) -> None:
    """The process has closed its end of the pipe."""
    if not self.lost:
      self._ending = asyncio.ensure_future(self._tell_end())

  async def _tell_end(self) -> None:
    await self._exited(1.0)
    code = self._process.poll()
    how = 'closed its pipe'
    if code is not None:
      how = (
        f'was ended by {signal.Signals(-code).name}'
        if code < 0
        else f'exited with code {code}'
      )
    self.kill('died', f'the worker process {how}')

  async def _exited(self, within_s: float) -> None:
    """Waits for the end of the process, which is taken note of."""
    deadline = self._loop.time() + within_s
    while self._process.poll() is None and self._loop.time() < deadline:
      await asyncio.sleep(0.01)


class _Lines(asyncio.Protocol):
  """Passes on what comes line by line.

  A stream with a task that reads it would cost the task's turn of the event
  loop for every line.
  """

  def __init__(
    self, on_line: Callable[[bytes], None], on_end: Callable[[], None]
  ):
    self._on_line = on_line
    self._on_end = on_end
    self._parts: list[bytes] = []
    self._size = 0

  def data_received(self, data: bytes) -> None:
    *lines, rest = data.split(b'\n')
    self._size = len(rest) if lines else self._size + len(rest)
    if self._size > _LONGEST_LINE:
      self._on_line(b'an endless line')  # Which is nonsense.
      return
    if lines:
      lines[0] = b''.join((*self._parts, lines[0]))
      self._parts.clear()
    if rest:
      self._parts.append(rest)
    for line in lines:
      self._on_line(line)

  def connection_lost(self, error: Exception | None) -> None:
    self._on_end()


def python_path() -> str:
  """Where a process finds this package, wherever it is started."""
  root = pathlib.Path(__file__).parents[1]
  paths = (str(root), os.environ.get('PYTHONPATH', ''))
  return os.pathsep.join(path for path in paths if path)
