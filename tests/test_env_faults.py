"""Faults thrown at real services: nothing is lost, and all is well after.

The faults and what counts as lost are those of benchmarks/faults.py, in small
numbers. A peaceful run tells what every observation must be.
"""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys

import env_processes
import grpc
import grpc.aio
import pytest

from benchmarks import faults
from envs_server import text_env_pb2, text_env_pb2_grpc
from planpo_jax import env_client, env_service


@pytest.fixture(autouse=True)
def _more_envs(monkeypatch):
  monkeypatch.setenv('PYTHONPATH', faults.MORE_ENVS)


def run(body, limit_s=120.0):
  return asyncio.run(asyncio.wait_for(body, limit_s))


def channel_to(address):
  """A channel with a connection of its own."""
  return grpc.aio.insecure_channel(
    address, (('grpc.use_local_subchannel_pool', 1),)
  )


async def until(condition, limit_s=30.0):
  """Waits until `await condition()` is true."""
  async with asyncio.timeout(limit_s):
    while not await condition():
      await asyncio.sleep(0.05)


# -- Every kind of fault -------------------------------------------------------


@pytest.mark.parametrize(
  'kind, times, recoveries',
  [
    ('worker-kill', 6, 2),
    ('worker-stop', 1, 1),
    ('jvm-kill', 1, 1),
    ('jvm-stop', 1, 1),
    # All that play there; three do.
    ('service-kill', 1, 3),
    ('external-kill', 1, 3),
    ('service-stop', 1, 1),
    ('cut', 4, 4),
    ('half-close', 4, 4),
    ('stall', 1, 0),
    ('queue', 2, 0),
    ('flood', 50, 0),
    ('client-kill', 2, 0),
    ('client-stop', 1, 0),
    ('idle', 2, 2),
  ],
)
def test_nothing_is_lost(kind, times, recoveries):
  outcome = faults.KINDS[kind][0](times)
  assert outcome.lost == []
  assert outcome.episodes >= 1
  # The fault was one: it struck, and clients had to recover from it.
  assert outcome.injected >= times
  assert outcome.recovered >= recoveries
  assert all(stood_s < 40.0 for stood_s in outcome.stood_s)


def test_slow_environment_keeps_nobody_else_waiting():
  slow_s = 6.0
  outcome = faults.slow(1, step_s=slow_s)
  assert outcome.lost == [] and outcome.recovered == 0
  # Two others acted on and on; none of their steps took as long as the slow
  # one, on however busy a machine.
  assert len(outcome.stood_s) > 100
  assert max(outcome.stood_s) < slow_s / 2


def test_service_that_stands_still_for_a_moment_loses_nobody():
  async def body(alone):
    async def blow(_):
      os.kill(alone.pid, signal.SIGSTOP)
      await asyncio.sleep(2.0)
      os.kill(alone.pid, signal.SIGCONT)

    async with faults.connected(alone.address) as client:
      return await faults.again_and_again(
        client,
        faults.scripts(),
        lambda: faults.strike(2, 0.5, blow),
        slots=3,
      )

  with faults.Service('faulty', 3) as alone:
    before = env_processes.workers_of(alone.pid)
    outcome = run(body(alone))
    assert outcome.lost == [] and outcome.recovered == 0
    # It blames none of its workers for the time it lost.
    assert env_processes.workers_of(alone.pid) == before


def test_an_episode_that_goes_another_way_counts_as_lost():
  """The suite can tell: a service that forgets is told from one that does not.

  The client is made to send the last action twice, as two turns.
  """

  async def body(running):
    async with faults.connected(running.address) as client:
      script = faults.scripts()[0]
      sent = []

      class Stutters(env_client.Session):
        async def step(self, action):
          seen = await super().step(action)
          if sent:
            seen = await super().step(action)
          return seen

      client.session = lambda task, step_limit: Stutters(
        client, faults.start_message(task.index).start
      )

      async def inject():
        await asyncio.sleep(0.1)
        sent.append(True)
        return 1

      return await faults.again_and_again(client, [script], inject, slots=1)

  with env_service.LocalService('faulty', 1) as running:
    outcome = run(body(running))
  assert len(outcome.lost) == 1
  assert 'differs at turn' in outcome.lost[0]


# -- One port for two ----------------------------------------------------------


def test_second_service_at_a_port_gives_up_and_the_first_goes_on():
  async def body(first):
    async with faults.connected(first.address) as client:
      script = faults.scripts()[0]
      seen = faults.Outcome()
      before = await faults.play(client, script, seen)
      port = first.address.rpartition(':')[2]
      second = await asyncio.to_thread(
        subprocess.run,
        [
          *(sys.executable, '-m', 'envs_server', '--env=faulty'),
          f'--port={port}',
        ],
        capture_output=True,
        text=True,
        env=faults.environment(),
        timeout=60.0,
      )
      assert await faults.play(client, script, seen) == before
      assert seen.recovered == 0
      return port, second

  with faults.Service('faulty', 1) as first:
    port, second = run(body(first))
    assert len(env_processes.workers_of(first.pid)) == 1
  assert second.returncode == 1
  assert second.stdout == ''
  (line,) = second.stderr.splitlines()
  assert line.startswith(f'envs_server: cannot listen on 127.0.0.1:{port} (')
  assert line.endswith('--port=0 for a free port.')


# -- A machine that is short of something --------------------------------------


@pytest.mark.parametrize('spare', [1, 3])
def test_service_that_was_out_of_files_builds_its_workers_again(spare):
  """With 1 file left it can make no socket for a worker, with 3 no pipe."""

  async def body(alone):
    async with faults.connected(alone.address) as client:
      script = faults.scripts()[0]
      before = await faults.play(client, script, faults.Outcome())
      limits = resource.prlimit(alone.pid, resource.RLIMIT_NOFILE)
      files = len(os.listdir(f'/proc/{alone.pid}/fd'))
      (victim,) = env_processes.workers_of(alone.pid)
      resource.prlimit(
        # The death of the worker gives one back.
        alone.pid,
        resource.RLIMIT_NOFILE,
        (files + spare - 1, limits[1]),
      )
      os.kill(victim, signal.SIGKILL)
      await asyncio.sleep(1.5)
      assert not env_processes.workers_of(alone.pid)
      resource.prlimit(alone.pid, resource.RLIMIT_NOFILE, limits)
      async with asyncio.timeout(30.0):
        assert await faults.play(client, script, faults.Outcome()) == before

  with faults.Service('faulty', 1) as alone:
    run(body(alone))


# -- Clients that misbehave ----------------------------------------------------


def test_client_that_never_acts_is_told_so_and_loses_its_worker():
  async def body(running):
    async with channel_to(running.address) as channel:
      stream = text_env_pb2_grpc.TextEnvStub(channel).Play()
      await stream.write(faults.start_message())
      assert (await stream.read()).turn == 0
      assert (await faults.describe(running.address)).busy == 1
      assert await faults.idle_again(running.address, 20.0) < 20.0
      return await stream.code(), await stream.details()

  flags = ('--idle-s=1',)
  with env_service.LocalService('faulty', 1, options=flags) as running:
    code, details = run(body(running))
  assert code == grpc.StatusCode.ABORTED
  assert 'no act came for 1 s' in details


def test_client_that_never_reads_loses_its_worker():
  async def body(running):
    async with channel_to(running.address) as channel:
      stream = text_env_pb2_grpc.TextEnvStub(channel).Play()
      await stream.write(faults.start_message())

      async def write_on():
        # More than any buffer between us holds.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
          for turn in range(1, 100):
            await stream.write(faults.act_message(turn, 'say 900000'))

      writing = asyncio.ensure_future(write_on())
      await asyncio.sleep(1.0)
      assert (await faults.describe(running.address)).busy == 1
      assert await faults.idle_again(running.address, 20.0) < 20.0
      stream.cancel()
      await asyncio.gather(writing, return_exceptions=True)

  flags = ('--idle-s=2',)
  with env_service.LocalService('faulty', 1, options=flags) as running:
    run(body(running))


def test_streams_that_never_start_take_no_worker():
  async def body(running):
    async with channel_to(running.address) as channel:
      stub = text_env_pb2_grpc.TextEnvStub(channel)
      streams = [stub.Play() for _ in range(300)]
      await asyncio.gather(*(s.wait_for_connection() for s in streams))
      seen = await faults.describe(running.address)
      assert (seen.busy, seen.waiting) == (0, 0)
      async with faults.connected(running.address) as client:
        (script,) = faults.scripts(count=1)
        outcome = faults.Outcome()
        assert len(await faults.play(client, script, outcome)) == 17
        assert outcome.recovered == 0

  with env_service.LocalService('faulty', 1) as running:
    run(body(running))


def test_client_that_leaves_while_it_plays_and_waits_wastes_no_worker():
  async def body(running):
    for _ in range(3):
      channel = channel_to(running.address)
      stub = text_env_pb2_grpc.TextEnvStub(channel)
      # One plays, for no client may play more, and five wait.
      streams = [stub.Play() for _ in range(6)]
      for stream in streams:
        await stream.write(faults.start_message())

      async def all_there():
        seen = await faults.describe(running.address)
        return (seen.busy, seen.waiting) == (1, 5)

      await until(all_there)
      await channel.close()
      assert await faults.idle_again(running.address, 10.0) < 10.0
    async with faults.connected(running.address) as client:
      (script,) = faults.scripts(count=1)
      await faults.play(client, script, faults.Outcome())

  flags = ('--client-limit=1',)
  with env_service.LocalService('faulty', 3, options=flags) as running:
    run(body(running))


def test_client_that_fills_the_queue_locks_nobody_out(tmp_path):
  greedy, modest = 'greedy' * 4, 'modest' * 4
  tokens = tmp_path / 'tokens'
  tokens.touch(mode=0o600)
  tokens.write_text(f'greedy {greedy}\nmodest {modest}\n')

  async def body(alone):
    async with channel_to(alone.address) as channel:
      stub = text_env_pb2_grpc.TextEnvStub(channel)

      def shown(token):
        return (('authorization', f'Bearer {token}'),)

      async def ask(token):
        stream = stub.Play(metadata=shown(token))
        await stream.write(faults.start_message())
        return stream

      async def waiting():
        request = text_env_pb2.DescribeRequest()
        seen = await stub.Describe(request, metadata=shown(modest))
        return seen.waiting

      # One plays, and four wait, as many as may.
      first = await ask(greedy)
      assert (await first.read()).turn == 0
      others = []
      for count in range(1, 5):
        others.append(await ask(greedy))
        while await waiting() != count:
          await asyncio.sleep(0.01)
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (await ask(greedy)).read()
      assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
      # The other one gets the place of one of them, and is next but one.
      patient = await ask(modest)
      with pytest.raises(grpc.aio.AioRpcError) as caught:
        await others.pop().read()
      assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
      first.cancel()
      assert (await others[0].read()).turn == 0
      others[0].cancel()
      assert (await patient.read()).turn == 0

  with faults.Service(
    'faulty', 1, '--queue=4', f'--token-file={tokens}'
  ) as alone:
    run(body(alone), 30.0)


def test_an_act_that_is_sent_twice_is_acted_once():
  async def body(running):
    async with channel_to(running.address) as channel:
      stream = text_env_pb2_grpc.TextEnvStub(channel).Play()
      await stream.write(faults.start_message())
      assert (await stream.read()).turn == 0
      counts = []
      # Before its reply comes, and after it.
      for turn in (1, 1, 2, 1, 2, 3):
        await stream.write(faults.act_message(turn, 'count'))
      for _ in range(6):
        counts.append((await stream.read()).observation)
      await stream.write(faults.act_message(3, 'raise havoc'))
      counts.append((await stream.read()).observation)
      stream.cancel()
      return counts

  with env_service.LocalService('faulty', 1) as running:
    assert run(body(running)) == ['1', '1', '2', '1', '2', '3', '3']


def test_service_that_prepares_something_is_waited_for(monkeypatch):
  # Longer than its own start, shorter than what it prepares.
  monkeypatch.setattr(env_service, '_START_DEADLINE_S', 10.0)
  monkeypatch.setenv('PREPARING_S', '11')
  monkeypatch.setenv('SILENT_S', '0')
  with env_service.LocalService('preparing', 1) as running:
    assert running.address


def test_service_that_is_silent_is_given_up(monkeypatch):
  monkeypatch.setattr(env_service, '_START_DEADLINE_S', 4.0)
  monkeypatch.setenv('PREPARING_S', '0.5')
  monkeypatch.setenv('SILENT_S', '60')
  with pytest.raises(RuntimeError, match='not ready after 4 s'):
    env_service.LocalService('preparing', 1).start()
