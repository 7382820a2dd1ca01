"""Faults thrown at the environment service, and what became of the episodes.

  python benchmarks/faults.py [--scale=1] [--kinds=worker-kill,cut]

Each kind starts services and clients as processes of their own, plays episodes
once in peace, and then again and again while it breaks things. An episode is
lost if it fails, or if any observation differs from those of the peaceful run.
Every second action asks the environment how many it has taken (but those of
ScienceWorld), so an action taken twice shows. A worker that is not given back
is lost as well.

Prints a table; exits with 1 if anything was lost. The last two columns are
seconds for which an episode stood still while it recovered (`idle`,
`worker-kill`, ...), waited for a worker (`queue`, `flood`), acted beside a slow
one (`slow`), or for which a client that was gone kept a worker (`client-...`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio
import psutil

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from envs_server import text_env_pb2, text_env_pb2_grpc
from planpo_jax import env_client, env_service, episodes

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Where the environment `faulty` lives; it belongs on PYTHONPATH.
MORE_ENVS = str(_ROOT / 'tests' / 'more_envs')
_KIND_DEADLINE_S = 300.0
# To be whole again once nothing is broken any more. A worker with a JVM takes
# seconds to build, and longer on a busy machine.
_WHOLE_S = 60.0
# Between two actions, as a policy takes its time: faults shall find episodes
# under way.
_PACE_S = 0.05
# For a client process that plays one action and then does nothing.
_GUEST = """
import sys, time, grpc
from envs_server import text_env_pb2, text_env_pb2_grpc
def messages():
  for line in sys.argv[2:]:
    yield text_env_pb2.PlayRequest.FromString(bytes.fromhex(line))
  time.sleep(1e6)
channel = grpc.insecure_channel(sys.argv[1])
replies = text_env_pb2_grpc.TextEnvStub(channel).Play(messages())
for line in sys.argv[2:]:
  next(replies)
print('playing', flush=True)
time.sleep(1e6)
"""


@dataclasses.dataclass
class Outcome:
  """What became of the episodes of one kind of fault.

  Attributes:
    injected: faults thrown.
    episodes: played to their end, or lost.
    lost: why, for each episode or worker that was lost.
    recovered: recoveries that the clients counted.
    stood_s: see the head of this file.
  """

  injected: int = 0
  episodes: int = 0
  lost: list[str] = dataclasses.field(default_factory=list)
  recovered: int = 0
  stood_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Script:
  """One episode to play."""

  task: episodes.Task
  actions: tuple[str, ...]


def scripts(count: int = 8, length: int = 16) -> list[Script]:
  """Episodes of `faulty` in which it answers how often it was asked."""
  return [
    Script(
      episodes.Task('faulty', 'train', index, 'any'),
      tuple(
        'count' if turn % 2 else f'go {index}.{turn}' for turn in range(length)
      ),
    )
    for index in range(2, 2 + count)
  ]


# An episode of ScienceWorld.
_HOUSE = Script(
  episodes.Task('sciworld', 'train', 0, 'find-living-thing'),
  (
    *('look around', 'inventory', 'open door to kitchen', 'go to kitchen'),
    *('look around', 'open cupboard', 'look in cupboard', 'wait1'),
    *('open door to outside', 'go to outside', 'look around', 'inventory'),
  ),
)


# -- Services ------------------------------------------------------------------


class Service:
  """A service that nobody looks after; a context manager.

  It has the same address every time it is started.
  """

  def __init__(
    self, env: str, workers: int, *flags: str, log: int = subprocess.DEVNULL
  ):
    self._flags = (f'--env={env}', f'--workers={workers}', *flags)
    self._port = '0'
    self._log = log
    self.address = ''

  @property
  def pid(self) -> int:
    return self._process.pid

  def start(self) -> None:
    """Returns once it can be used.

    Raises:
      RuntimeError: it did not start.
    """
    self._process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'envs_server', *self._flags),
        f'--port={self._port}',
      ],
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      env=environment(),
    )
    line = self._process.stdout.readline()
    if not line.startswith('listening on '):
      raise RuntimeError(f'{self._flags} exited with {self._process.wait()}')
    self.address = line.split()[-1]
    self._port = self.address.rpartition(':')[2]

  def kill(self) -> None:
    self._process.kill()
    self._process.wait()

  def __enter__(self) -> Service:
    self.start()
    return self

  def __exit__(self, *unused) -> None:
    self._process.send_signal(signal.SIGCONT)
    self._process.terminate()
    self._process.wait()
    self._process.stdout.close()


def environment() -> dict[str, str]:
  paths = (str(_ROOT), os.environ.get('PYTHONPATH', ''))
  return os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))}


def pids_of(pid: int, word: str) -> list[int]:
  """Processes below `pid` that have `word` in their command line."""
  found = []
  try:
    below = psutil.Process(pid).children(recursive=True)
  except psutil.NoSuchProcess:
    return found
  for process in below:
    with contextlib.suppress(psutil.Error):
      if word in ' '.join(process.cmdline()):
        found.append(process.pid)
  return sorted(found)


def workers_of(pid: int) -> list[int]:
  return pids_of(pid, 'envs_server.child')


def javas_of(pid: int) -> list[int]:
  return pids_of(pid, 'GatewayServer')


async def describe(
  address: str, timeout_s: float = 5.0
) -> text_env_pb2.Description:
  """Asks over a connection of its own; raises what gRPC raises."""
  options = (('grpc.use_local_subchannel_pool', 1),)
  async with grpc.aio.insecure_channel(address, options) as channel:
    return await text_env_pb2_grpc.TextEnvStub(channel).Describe(
      text_env_pb2.DescribeRequest(), timeout=timeout_s, wait_for_ready=True
    )


async def idle_again(address: str, within_s: float) -> float:
  """Seconds until no episode plays or waits; infinite if that takes longer."""
  began_s = time.monotonic()
  while time.monotonic() - began_s < within_s:
    with contextlib.suppress(grpc.aio.AioRpcError):
      seen = await describe(address)
      if not seen.busy and not seen.waiting:
        return time.monotonic() - began_s
    await asyncio.sleep(0.05)
  return float('inf')


class Proxy:
  """Passes bytes between clients and a service, until told to harm them.

  An asynchronous context manager. It harms the connections there are; those
  made later are well.
  """

  def __init__(self, address: str):
    self._host, _, port = address.rpartition(':')
    self._port = int(port)
    self._links: set[_Link] = set()
    self._carrying: set[asyncio.Task] = set()

  async def __aenter__(self) -> Proxy:
    self._server = await asyncio.start_server(self._accept, '127.0.0.1', 0)
    host, port = self._server.sockets[0].getsockname()
    self.address = f'{host}:{port}'
    return self

  async def __aexit__(self, *unused) -> None:
    self._server.close()
    self.cut()
    await asyncio.gather(*self._carrying, return_exceptions=True)

  def cut(self) -> None:
    """Resets all connections."""
    for link in self._links:
      link.abort()

  def tear(self) -> None:
    """Resets each connection in the middle of what it carries next."""
    for link in self._links:
      link.torn = True

  def half_close(self, *, client: bool) -> None:
    """Ends all connections in one direction: that of the client, or to it."""
    for link in self._links:
      with contextlib.suppress(OSError, RuntimeError):
        (link.to_service if client else link.to_client).write_eof()

  def stall(self) -> None:
    """Passes nothing more; the connections stay open."""
    for link in self._links:
      link.flows.clear()

  def flow(self) -> None:
    """Passes what was held up."""
    for link in self._links:
      link.flows.set()

  async def _accept(self, from_client, to_client) -> None:
    self._carrying.add(asyncio.current_task())
    try:
      from_service, to_service = await asyncio.open_connection(
        self._host, self._port
      )
    except OSError:
      to_client.transport.abort()
      return
    link = _Link(to_client, to_service)
    self._links.add(link)
    try:
      await asyncio.gather(
        link.carry(from_client, to_service), link.carry(from_service, to_client)
      )
    finally:
      self._links.discard(link)
      link.abort()


class _Link:
  """One connection through the proxy."""

  def __init__(self, to_client, to_service):
    self.to_client, self.to_service = to_client, to_service
    self.torn = False
    self.flows = asyncio.Event()
    self.flows.set()

  def abort(self) -> None:
    self.flows.set()
    self.to_client.transport.abort()
    self.to_service.transport.abort()

  async def carry(self, source, sink) -> None:
    with contextlib.suppress(OSError, RuntimeError):
      while some := await source.read(1 << 16):
        await self.flows.wait()
        if self.torn:
          sink.write(some[: len(some) // 2])
          await sink.drain()
          break
        sink.write(some)
        await sink.drain()
      else:
        sink.write_eof()
        return
    self.abort()


# -- Episodes ------------------------------------------------------------------


async def play(
  client: env_client.EnvClient,
  script: Script,
  outcome: Outcome,
  *,
  pace_s: float = 0.0,
) -> list[episodes.Observation]:
  """Plays one episode; returns its observations.

  Raises:
    env_client.EnvFault: it is lost.
  """
  session = client.session(script.task, step_limit=0)

  async def stand(call: Awaitable) -> episodes.Observation:
    faults, began_s = session.faults, time.monotonic()
    seen = await call
    if session.faults > faults:
      outcome.stood_s.append(time.monotonic() - began_s)
    return seen

  try:
    seen = [await stand(session.reset())]
    for action in script.actions:
      await asyncio.sleep(pace_s)
      seen.append(await stand(session.step(action)))
  finally:
    outcome.recovered += session.faults
    await session.close()
  return seen


async def again_and_again(
  client: env_client.EnvClient,
  chosen: Sequence[Script],
  inject: Callable[[], Awaitable[int]],
  *,
  slots: int,
  pace_s: float = _PACE_S,
) -> Outcome:
  """Plays the episodes in peace and then in `slots` while `inject` goes on."""
  calm = Outcome()
  expected = [await play(client, script, calm) for script in chosen]
  if calm.recovered:
    raise RuntimeError(f'{calm.recovered} faults before any was injected')
  outcome = Outcome()
  over = asyncio.Event()

  async def fill(first: int) -> None:
    for number in itertools.count(first):
      which = number % len(chosen)
      outcome.episodes += 1
      try:
        seen = await play(client, chosen[which], outcome, pace_s=pace_s)
      except env_client.EnvFault as error:
        outcome.lost.append(f'failed: {error}')
      else:
        if seen != expected[which]:
          outcome.lost.append(_difference(seen, expected[which]))
      if over.is_set():
        return

  async with asyncio.TaskGroup() as group:
    for first in range(slots):
      group.create_task(fill(first))
    try:
      outcome.injected = await inject()
    finally:
      over.set()
  return outcome


def _difference(seen: list, expected: list) -> str:
  for turn, (one, other) in enumerate(zip(seen, expected, strict=True)):
    if one != other:
      return f'differs at turn {turn}: {one} where it was {other}'
  raise AssertionError('they are the same')


@contextlib.asynccontextmanager
async def connected(
  address: str | Sequence[str], **options
) -> AsyncIterator[env_client.EnvClient]:
  client = env_client.EnvClient(address, **options)
  await client.connect()
  try:
    yield client
  finally:
    await client.close()


async def _storm(
  address: str | Sequence[str],
  inject: Callable[[], Awaitable[int]],
  *,
  slots: int,
  chosen: Sequence[Script] = (),
) -> Outcome:
  """`again_and_again` with a client of its own, by default of `faulty`."""
  async with connected(address) as client:
    return await again_and_again(
      client, chosen or scripts(), inject, slots=slots
    )


async def _whole(outcome: Outcome, address: str, pid: int, size: int) -> None:
  """Makes sure that all workers are there and free."""
  if await idle_again(address, _WHOLE_S) == float('inf'):
    outcome.lost.append(f'{address} is not idle {_WHOLE_S:g} s after the end')
  deadline = time.monotonic() + _WHOLE_S
  while len(there := workers_of(pid)) != size:
    if time.monotonic() > deadline:
      outcome.lost.append(f'{len(there)} of {size} workers are there')
      return
    await asyncio.sleep(0.05)


async def strike(
  times: int, every_s: float, blow: Callable[[int], Awaitable[None] | None]
) -> int:
  """Strikes `times` times; returns that."""
  for number in range(times):
    await asyncio.sleep(every_s)
    wait = blow(number)
    if wait is not None:
      await wait
  # For whoever was between two episodes to notice it in his next one.
  await asyncio.sleep(min(every_s, 1.0))
  return times


def _run(body: Awaitable[Outcome]) -> Outcome:
  return asyncio.run(asyncio.wait_for(body, _KIND_DEADLINE_S))


# -- Kinds ---------------------------------------------------------------------


def _strike_processes(
  times: int,
  *,
  env: str = 'faulty',
  size: int,
  flags: Sequence[str] = (),
  every_s: float,
  sent: int,
  find: Callable[[int], list[int]],
) -> Outcome:
  """Sends a signal to processes of a service, one at a time."""
  draw = random.Random(env)

  async def body(running):
    async def blow(_):
      while not (there := find(running.pid)):
        await asyncio.sleep(0.05)
      os.kill(draw.choice(there), sent)

    outcome = await _storm(
      running.address,
      lambda: strike(times, every_s, blow),
      slots=size,
      chosen=(_HOUSE,) if env == 'sciworld' else (),
    )
    await _whole(outcome, running.address, running.pid, size)
    return outcome

  with env_service.LocalService(env, size, options=flags) as running:
    return _run(body(running))


def worker_kill(times: int) -> Outcome:
  """kill -9 of workers."""
  return _strike_processes(
    times, size=4, every_s=0.4, sent=signal.SIGKILL, find=workers_of
  )


def worker_stop(times: int) -> Outcome:
  """Workers that are stopped; their step is given up after its deadline."""
  return _strike_processes(
    times,
    size=3,
    flags=('--step-deadline-s=2', '--reset-deadline-s=2'),
    every_s=3.0,
    sent=signal.SIGSTOP,
    find=workers_of,
  )


def jvm_kill(times: int) -> Outcome:
  """kill -9 of JVMs."""
  return _strike_processes(
    times,
    env='sciworld',
    size=1,
    every_s=4.0,
    sent=signal.SIGKILL,
    find=javas_of,
  )


def jvm_stop(times: int) -> Outcome:
  """JVMs that are stopped, while their worker goes on beating."""
  return _strike_processes(
    times,
    env='sciworld',
    size=1,
    flags=('--step-deadline-s=4', '--reset-deadline-s=15'),
    every_s=6.0,
    sent=signal.SIGSTOP,
    find=javas_of,
  )


def _strike_local_service(times: int, sent: int, back_s: float) -> Outcome:
  async def body(running):
    async def blow(number):
      if number and number % 4 == 0:
        # One that dies early five times in a row is given up.
        await asyncio.sleep(11.0)
      gone = running.pid
      os.kill(gone, sent)
      deadline = time.monotonic() + back_s
      while running.pid == gone and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
      await _answers(running.address)

    outcome = await _storm(
      running.address, lambda: strike(times, 1.0, blow), slots=3
    )
    await _whole(outcome, running.address, running.pid, 3)
    return outcome

  with env_service.LocalService('faulty', 3) as running:
    return _run(body(running))


async def _answers(address: str) -> None:
  """Waits until the service answers, but not for ever."""
  deadline = time.monotonic() + _WHOLE_S
  while time.monotonic() < deadline:
    with contextlib.suppress(grpc.aio.AioRpcError):
      await describe(address)
      return


def service_kill(times: int) -> Outcome:
  """kill -9 of a service that a LocalService looks after."""
  return _strike_local_service(times, signal.SIGKILL, 30.0)


def service_hang(times: int) -> Outcome:
  """A service that is stopped for good, which its LocalService finds out."""
  return _strike_local_service(times, signal.SIGSTOP, 60.0)


def external_kill(times: int) -> Outcome:
  """kill -9 of a service of its own, started again at its port by somebody."""

  async def body(alone):
    async def blow(_):
      alone.kill()
      await asyncio.sleep(0.5)
      await asyncio.to_thread(alone.start)

    outcome = await _storm(
      alone.address, lambda: strike(times, 1.0, blow), slots=3
    )
    await _whole(outcome, alone.address, alone.pid, 3)
    return outcome

  with Service('faulty', 3) as alone:
    return _run(body(alone))


def service_stop(times: int) -> Outcome:
  """One of two services is stopped for a while, by turns."""

  async def body(pair):
    async def blow(number):
      victim = pair[number % 2]
      os.kill(victim.pid, signal.SIGSTOP)
      # Longer than it takes a client to find out.
      await asyncio.sleep(9.0)
      os.kill(victim.pid, signal.SIGCONT)

    outcome = await _storm(
      [one.address for one in pair], lambda: strike(times, 1.0, blow), slots=4
    )
    for one in pair:
      await _whole(outcome, one.address, one.pid, 4)
    return outcome

  with Service('faulty', 4) as one, Service('faulty', 4) as other:
    return _run(body((one, other)))


def _strike_connections(
  times: int, every_s: float, blow: Callable[[Proxy, int], Awaitable | None]
) -> Outcome:
  async def body(running):
    async with Proxy(running.address) as proxy:
      outcome = await _storm(
        proxy.address,
        lambda: strike(times, every_s, lambda n: blow(proxy, n)),
        slots=4,
      )
    await _whole(outcome, running.address, running.pid, 4)
    return outcome

  with env_service.LocalService('faulty', 4) as running:
    return _run(body(running))


def cut(times: int) -> Outcome:
  """Connections are reset, every second time in the middle of a message."""

  def blow(proxy, number):
    (proxy.tear if number % 2 else proxy.cut)()

  return _strike_connections(times, 0.5, blow)


def half_close(times: int) -> Outcome:
  """Connections end in one direction."""
  return _strike_connections(
    times, 0.5, lambda proxy, number: proxy.half_close(client=number % 2 == 0)
  )


def stall(times: int) -> Outcome:
  """Connections carry nothing for a while, then everything."""

  async def blow(proxy, _):
    proxy.stall()
    await asyncio.sleep(2.0)
    proxy.flow()

  return _strike_connections(times, 0.5, blow)


def stall_for_good(times: int) -> Outcome:
  """Connections carry nothing any more and never close."""

  async def blow(proxy, _):
    proxy.stall()
    await asyncio.sleep(40.0)

  return _strike_connections(times, 0.5, blow)


def queue(times: int) -> Outcome:
  """Episodes, `times` each of 12 clients, ask a queue that has few places."""

  async def body(running, metrics_port):
    outcome = Outcome()
    chosen = scripts(count=1, length=4)[0]

    async def visit():
      async with connected(running.address) as client:
        for _ in range(times):
          outcome.episodes += 1
          session = client.session(chosen.task, step_limit=0)
          began_s = time.monotonic()
          try:
            seen = [await session.reset()]
            outcome.stood_s.append(time.monotonic() - began_s)
            for action in chosen.actions:
              await asyncio.sleep(_PACE_S)
              seen.append(await session.step(action))
            if [o.text for o in seen] != ['2', 'go 2.0', '2', 'go 2.2', '4']:
              outcome.lost.append(f'differs: {seen}')
          except env_client.EnvFault as error:
            outcome.lost.append(f'failed: {error}')
          finally:
            outcome.recovered += session.faults
            await session.close()

    await asyncio.gather(*(visit() for _ in range(12)))
    outcome.injected = await asyncio.to_thread(_refused, metrics_port)
    await _whole(outcome, running.address, running.pid, 2)
    return outcome

  port = _free_port()
  flags = ('--queue=3', f'--metrics=127.0.0.1:{port}')
  with env_service.LocalService('faulty', 2, options=flags) as running:
    return _run(body(running, port))


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _refused(metrics_port: int) -> int:
  """Episodes that the service has refused, by its own account."""
  url = f'http://127.0.0.1:{metrics_port}/metrics'
  with urllib.request.urlopen(url, timeout=10.0) as page:
    lines = page.read().decode().splitlines()
  return sum(
    int(float(line.split()[-1]))
    for line in lines
    if line.startswith('planpo_env_episodes_total') and 'refused' in line
  )


def slow(times: int, *, step_s: float = 60.0) -> Outcome:
  """A step that takes `step_s` beside others; those must not feel it."""

  async def body(running):
    outcome = Outcome()
    chosen = scripts()
    sluggish = Script(chosen[0].task, ('count', f'sleep {step_s}', 'count'))
    async with connected(running.address, step_deadline_s=2 * step_s) as client:
      # A client of its own, for the latency of a step.
      async def act():
        session = client.session(chosen[1].task, step_limit=0)
        await session.reset()
        turn = 0
        while not over.is_set():
          began_s, turn = time.monotonic(), turn + 1
          seen = await session.step('count')
          outcome.stood_s.append(time.monotonic() - began_s)
          if seen.text != str(turn):
            outcome.lost.append(f'counted {seen.text} at turn {turn}')
          await asyncio.sleep(0.01)
        outcome.recovered += session.faults
        await session.close()

      over = asyncio.Event()
      fast = asyncio.gather(*(act() for _ in range(2)))
      for _ in range(times):
        seen = await play(client, sluggish, outcome)
        if [o.text for o in seen[1:]] != ['1', sluggish.actions[1], '3']:
          outcome.lost.append(f'the slow episode differs: {seen}')
        outcome.injected += 1
      over.set()
      await fast
    outcome.episodes = times + 2
    await _whole(outcome, running.address, running.pid, 3)
    return outcome

  flags = (f'--step-deadline-s={2 * step_s}',)
  with env_service.LocalService('faulty', 3, options=flags) as running:
    return _run(body(running))


def flood(times: int) -> Outcome:
  """One client opens `times` streams at once while another plays on."""
  greedy, modest = (f'{name}-{"x" * 20}' for name in ('greedy', 'modest'))

  async def body(running):
    async with grpc.aio.insecure_channel(running.address) as channel:
      stub = text_env_pb2_grpc.TextEnvStub(channel)

      async def take():
        # Again and again: whoever is refused comes back at once.
        while True:
          stream = stub.Play(metadata=(('authorization', f'Bearer {greedy}'),))
          with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError
          ):
            await stream.write(start_message())
            while await stream.read() is not grpc.aio.EOF:
              pass
          await asyncio.sleep(0.05)

      takers = [asyncio.ensure_future(take()) for _ in range(times)]
      await asyncio.sleep(1.0)
      try:
        async with connected(
          running.address,
          credentials=env_client.Credentials(token=modest),
          queue_deadline_s=30.0,
        ) as client:
          return await visit(client)
      finally:
        for taker in takers:
          taker.cancel()
        await asyncio.gather(*takers, return_exceptions=True)

  async def visit(client):
    outcome = Outcome(injected=times)
    for script in scripts(length=4):
      outcome.episodes += 1
      session = client.session(script.task, step_limit=0)
      began_s = time.monotonic()
      try:
        await session.reset()
        outcome.stood_s.append(time.monotonic() - began_s)
        for turn, action in enumerate(script.actions, 1):
          seen = await session.step(action)
          if action == 'count' and seen.text != str(turn):
            outcome.lost.append(f'counted {seen.text} at turn {turn}')
      except env_client.EnvFault as error:
        outcome.lost.append(f'failed: {error}')
        break
      finally:
        outcome.recovered += session.faults
        await session.close()
    return outcome

  async def whole(running):
    outcome = await body(running)
    # Its answer wants a token, so that of the processes has to do.
    if len(workers_of(running.pid)) != 3:
      outcome.lost.append('a worker is missing')
    return outcome

  with tempfile.TemporaryDirectory() as folder:
    tokens = pathlib.Path(folder) / 'tokens'
    tokens.touch(mode=0o600)
    tokens.write_text(f'greedy {greedy}\nmodest {modest}\n')
    flags = ('--client-limit=2', '--queue=20', f'--token-file={tokens}')
    with Service('faulty', 3, *flags) as running:
      return _run(whole(running))


def start_message(index: int = 2) -> text_env_pb2.PlayRequest:
  """Begins an episode of `faulty`."""
  task = text_env_pb2.Task(env='faulty', split='train', index=index, name='any')
  return text_env_pb2.PlayRequest(start=text_env_pb2.Start(task=task))


def act_message(turn: int, action: str) -> text_env_pb2.PlayRequest:
  return text_env_pb2.PlayRequest(
    act=text_env_pb2.Act(turn=turn, action=action)
  )


@contextlib.contextmanager
def guest(address: str):
  """A client in a process of its own, in the middle of an episode."""
  messages = (start_message(), act_message(1, 'count'))
  process = subprocess.Popen(
    [
      *(sys.executable, '-c', _GUEST, address),
      *(message.SerializeToString().hex() for message in messages),
    ],
    stdout=subprocess.PIPE,
    text=True,
    env=environment(),
  )
  try:
    if process.stdout.readline() != 'playing\n':
      raise RuntimeError(f'the client exited with {process.wait()}')
    yield process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def _strike_clients(times: int, sent: int, flags: Sequence[str]) -> Outcome:
  outcome = Outcome(injected=times, episodes=times)

  async def body(running):
    for _ in range(times):
      with guest(running.address) as process:
        if (await describe(running.address)).busy != 1:
          raise RuntimeError('the client does not play')
        process.send_signal(sent)
        took_s = await idle_again(running.address, 45.0)
      outcome.stood_s.append(took_s)
      if took_s == float('inf'):
        outcome.lost.append('a client that is gone keeps its worker')
        return outcome  # The next one would wait for it.
    await _whole(outcome, running.address, running.pid, 1)
    return outcome

  with env_service.LocalService('faulty', 1, options=flags) as running:
    return _run(body(running))


def client_kill(times: int) -> Outcome:
  """kill -9 of a client in the middle of an episode."""
  return _strike_clients(times, signal.SIGKILL, ())


def client_stop(times: int) -> Outcome:
  """A client that is stopped loses its worker after --idle-s."""
  return _strike_clients(times, signal.SIGSTOP, ('--idle-s=2',))


def client_freeze(times: int) -> Outcome:
  """A client that is stopped is found by keepalive, long before --idle-s."""
  return _strike_clients(times, signal.SIGSTOP, ())


def idle(times: int) -> Outcome:
  """A client that thinks longer than --idle-s goes on where it was."""

  async def body(running):
    outcome = Outcome(injected=times, episodes=1)
    # As many pauses as faults; the actions between them go fast.
    async with connected(running.address) as client:
      session = client.session(scripts()[0].task, step_limit=0)
      await session.reset()
      for turn in range(1, 2 * times + 1):
        if turn % 2 == 0:
          await asyncio.sleep(2.0)
        began_s, faults = time.monotonic(), session.faults
        seen = await session.step('count')
        if seen.text != str(turn):
          outcome.lost.append(f'counted {seen.text} at turn {turn}')
        if session.faults > faults:
          outcome.stood_s.append(time.monotonic() - began_s)
      outcome.recovered = session.faults
      await session.close()
    await _whole(outcome, running.address, running.pid, 1)
    return outcome

  with env_service.LocalService(
    'faulty', 1, options=('--idle-s=1',)
  ) as running:
    return _run(body(running))


async def shout(address: str, garbage: bytes) -> None:
  """Sends bytes to the port of a service, whatever it makes of them."""
  host, _, port = address.rpartition(':')
  with contextlib.suppress(OSError):
    _, writer = await asyncio.open_connection(host, int(port))
    try:
      writer.write(garbage)
      await writer.drain()
      await asyncio.sleep(0.02)
    finally:
      writer.transport.abort()


def mutter(
  address: str, messages: Sequence[bytes], method: str = 'Play'
) -> tuple[int, grpc.StatusCode, str]:
  """Sends bytes as messages; returns replies, status code and details."""
  # The asynchronous client takes a call that ends while it sends for an
  # internal error, and never sees the status.
  with grpc.insecure_channel(
    address, (('grpc.use_local_subchannel_pool', 1),)
  ) as channel:
    method_of = channel.stream_stream(f'/planpo.TextEnv/{method}')
    call = method_of(iter(messages), timeout=30.0)
    replies = 0
    with contextlib.suppress(grpc.RpcError):
      for _ in call:
        replies += 1
    return replies, call.code(), call.details()


def garbage(times: int) -> Outcome:
  """Nonsense is sent to the port and to the methods, beside episodes."""
  draw = random.Random(0)
  begin = start_message().SerializeToString()

  async def body(running):
    async def blow(number):
      nonsense = draw.randbytes(draw.randrange(1, 5000))
      if number % 3 == 0:
        await shout(running.address, nonsense)
      elif number % 3 == 1:
        head = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
        await shout(running.address, head + nonsense)
      else:
        await asyncio.to_thread(mutter, running.address, [begin, nonsense])
      await describe(running.address)

    outcome = await _storm(
      running.address, lambda: strike(times, 0.1, blow), slots=3
    )
    if outcome.recovered:
      outcome.lost.append(f'{outcome.recovered} workers, by nonsense')
    await _whole(outcome, running.address, running.pid, 4)
    return outcome

  with env_service.LocalService('faulty', 4) as running:
    return _run(body(running))


# Name: (what to call, with how many faults at scale 1).
KINDS: dict[str, tuple[Callable[[int], Outcome], int]] = {
  'worker-kill': (worker_kill, 40),
  'worker-stop': (worker_stop, 6),
  'jvm-kill': (jvm_kill, 6),
  'jvm-stop': (jvm_stop, 3),
  'service-kill': (service_kill, 5),
  'service-hang': (service_hang, 1),
  'external-kill': (external_kill, 5),
  'service-stop': (service_stop, 2),
  'cut': (cut, 40),
  'half-close': (half_close, 20),
  'stall': (stall, 4),
  'stall-for-good': (stall_for_good, 1),
  'queue': (queue, 4),
  'slow': (slow, 1),
  'flood': (flood, 100),
  'client-kill': (client_kill, 10),
  'client-stop': (client_stop, 3),
  'client-freeze': (client_freeze, 1),
  'idle': (idle, 4),
  'garbage': (garbage, 60),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--scale', type=float, default=1.0)
  parser.add_argument('--kinds', default=','.join(KINDS), help='%(default)s')
  args = parser.parse_args()
  chosen = args.kinds.split(',')
  if unknown := [kind for kind in chosen if kind not in KINDS]:
    parser.error(f'unknown kinds {unknown}; known: {", ".join(KINDS)}.')
  # What the clients say of every recovery would fill the screen.
  logging.basicConfig(level=logging.ERROR)
  paths = (MORE_ENVS, os.environ.get('PYTHONPATH', ''))
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
  print(
    f'{"kind":<15}{"injected":>9}{"episodes":>9}{"lost":>6}{"recovered":>10}'
    f'{"median s":>10}{"max s":>8}',
    flush=True,
  )
  lost = []
  for kind in chosen:
    throw, times = KINDS[kind]
    outcome = throw(max(1, round(times * args.scale)))
    median = longest = '-'
    if outcome.stood_s:
      median = f'{statistics.median(outcome.stood_s):.3f}'
      longest = f'{max(outcome.stood_s):.3f}'
    print(
      f'{kind:<15}{outcome.injected:>9}{outcome.episodes:>9}'
      f'{len(outcome.lost):>6}{outcome.recovered:>10}{median:>10}{longest:>8}',
      flush=True,
    )
    lost += [f'{kind}: {why}' for why in outcome.lost]
  for why in lost:
    print(why, file=sys.stderr)
  sys.exit(bool(lost))


if __name__ == '__main__':
  main()
