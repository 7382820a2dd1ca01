"""The pool of workers, driven without gRPC, with real processes."""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
import time

import env_processes
import pytest

from envs_server import env, pool, telemetry, worker

LIMITS = pool.Limits(
  queue=100,
  client=0,
  episodes=0,
  memory_bytes=0,
  message_bytes=1 << 20,
)
TASK = env.Task('faulty', 'train', 2, 'any')


@pytest.fixture(autouse=True)
def _more_envs(monkeypatch):
  """The faulty environment, as a folder outside of the package."""
  more = str(pathlib.Path(__file__).parent / 'more_envs')
  monkeypatch.setenv('PYTHONPATH', more)


class Meter(telemetry.Telemetry):
  """Also keeps what it is told."""

  def __init__(self):
    super().__init__('faulty')
    self.restarts = []

  def restart(self, reason):
    self.restarts.append(reason)
    super().restart(reason)


@contextlib.asynccontextmanager
async def started(size, **changes):
  """A pool whose workers are all built, and its meter."""
  fields = {f: getattr(LIMITS, f) for f in LIMITS.__dataclass_fields__}
  meter = Meter()
  made = pool.Pool('faulty', size, pool.Limits(**fields | changes), meter)
  made.start()
  try:
    await until(lambda: made.ready == size)
    yield made, meter
  finally:
    await made.close()
    assert not env_processes.workers_of(os.getpid())


async def until(condition, limit_s=30.0):
  async with asyncio.timeout(limit_s):
    while not condition():
      await asyncio.sleep(0.01)


async def play(made, *actions, client='one'):
  """Plays the actions; returns the last answer and the worker's pid."""
  lent = await made.acquire(client)
  try:
    seen = await lent.reset(TASK, False, False, deadline_s=5.0)
    for action in actions:
      seen = await lent.step(action, deadline_s=5.0)
  finally:
    made.release(lent)
  await until(lambda: lent not in made._lent)
  return seen.text, lent.pid


def resident(pid):
  """Resident memory of one process, bytes."""
  pages = pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE')


def run(body):
  return asyncio.run(asyncio.wait_for(body, 120.0))


# -- The queue -----------------------------------------------------------------


def test_clients_take_turns_and_each_client_is_served_in_order():
  async def body():
    async with started(1) as (made, _):
      holding = await made.acquire('one')
      order = []

      async def ask(client, name):
        lent = await made.acquire(client)
        order.append(name)
        made.release(lent)

      asked = []
      for client, name in (
        *(('one', f'one {i}') for i in range(3)),
        *(('two', f'two {i}') for i in range(2)),
      ):
        asked.append(asyncio.ensure_future(ask(client, name)))
        await until(lambda: made.waiting == len(asked))
      assert made.clients == 2 and made.busy == 1
      made.release(holding)
      await asyncio.gather(*asked)
      await until(lambda: made.busy == 0)
      assert made.waiting == made.clients == 0
      return order

  assert run(body()) == ['one 0', 'two 0', 'one 1', 'two 1', 'one 2']


def test_queue_is_bounded():
  async def body():
    async with started(1, queue=2) as (made, _):
      holding = await made.acquire('one')
      waiting = [asyncio.ensure_future(made.acquire('one')) for _ in '12']
      await until(lambda: made.waiting == 2)
      with pytest.raises(pool.QueueFullError, match='2 episodes wait for one'):
        await made.acquire('one')
      # One that leaves makes room.
      waiting[0].cancel()
      await until(lambda: made.waiting == 1)
      other = asyncio.ensure_future(made.acquire('two'))
      await until(lambda: made.waiting == 2)
      with pytest.raises(pool.QueueFullError):
        await made.acquire('two')
      made.release(holding)
      made.release(await waiting[1])
      made.release(await other)

  run(body())


def test_full_queue_turns_away_the_client_of_whom_most_wait():
  async def body():
    async with started(1, queue=3) as (made, _):
      holding = await made.acquire('one')
      many = []
      for count in range(1, 4):
        many.append(asyncio.ensure_future(made.acquire('one')))
        await until(lambda: made.waiting == count)  # noqa: B023
      other = asyncio.ensure_future(made.acquire('two'))
      # The last of the many makes room.
      with pytest.raises(pool.QueueFullError):
        await many[2]
      assert made.waiting == 3 and not other.done()
      made.release(holding)
      for future in (many[0], other, many[1]):
        made.release(await asyncio.wait_for(future, 5.0))

  run(body())


def test_those_who_leave_together_cost_no_worker():
  """A client that plays one and waits for more drops its connection."""

  async def body():
    async with started(2, client=1) as (made, _):
      holding = await made.acquire('one')
      waiting = [asyncio.ensure_future(made.acquire('one')) for _ in '123']
      await until(lambda: made.waiting == 3)
      for future in waiting:
        future.cancel()
      made.release(holding)  # Before they have come to leave the queue.
      await asyncio.gather(*waiting, return_exceptions=True)
      assert (await play(made, 'hello'))[0] == 'hello'
      assert made.waiting == made.clients == 0

  run(body())


def test_place_of_a_client_is_not_free_before_its_worker_is():
  """Else one could take all workers by giving up what it began."""

  async def body():
    async with started(2, client=1) as (made, _):
      lent = await made.acquire('one')
      await lent.reset(TASK, False, False, deadline_s=5.0)
      step = asyncio.ensure_future(lent.step('sleep 2', deadline_s=60.0))
      await asyncio.sleep(0.2)
      waiting = asyncio.ensure_future(made.acquire('one'))
      await until(lambda: made.waiting == 1)
      step.cancel()
      made.release(lent)
      made.release(lent)  # Twice is once.
      await asyncio.sleep(0.5)
      assert not waiting.done() and made.busy == 1
      made.release(await asyncio.wait_for(waiting, 10.0))
      await until(lambda: made.clients == made.busy == 0)

  run(body())


def test_place_of_a_client_is_free_when_its_worker_is_lost():
  async def body():
    async with started(2, client=1) as (made, _):
      lent = await made.acquire('one')
      waiting = asyncio.ensure_future(made.acquire('one'))
      await until(lambda: made.waiting == 1)
      made._build = lambda: asyncio.sleep(60)  # No help is in sight.
      os.kill(lent.pid, signal.SIGKILL)
      other = await asyncio.wait_for(waiting, 5.0)
      made.release(lent)  # As the service does, of a worker that is gone.
      assert made.clients == made.busy == 1
      made.release(other)
      await until(lambda: made.clients == made.busy == 0)

  run(body())


def test_no_queue_at_all_still_serves_who_finds_a_worker_free():
  async def body():
    async with started(1, queue=0) as (made, _):
      assert (await play(made, 'hello'))[0] == 'hello'
      lent = await made.acquire('one')
      with pytest.raises(pool.QueueFullError):
        await made.acquire('one')
      made.release(lent)

  run(body())


def test_a_client_may_not_take_all_workers():
  async def body():
    async with started(3, client=2) as (made, _):
      held = [await made.acquire('greedy') for _ in '12']
      third = asyncio.ensure_future(made.acquire('greedy'))
      await until(lambda: made.waiting == 1)
      # The third worker is free for somebody else, who is served at once.
      other = await asyncio.wait_for(made.acquire('modest'), 5.0)
      assert not third.done()
      made.release(held[0])
      made.release(await asyncio.wait_for(third, 5.0))
      made.release(held[1])
      made.release(other)

  run(body())


def test_who_leaves_the_queue_as_he_is_served_wastes_no_worker():
  async def body():
    async with started(1) as (made, _):
      holding = await made.acquire('one')
      asked = asyncio.ensure_future(made.acquire('one'))
      await until(lambda: made.waiting == 1)
      made._returned(holding)  # As after `release`, but in this very moment.
      made._free(holding)
      asked.cancel()
      with pytest.raises(asyncio.CancelledError):
        await asked
      assert (await play(made, 'hello'))[0] == 'hello'
      assert holding.episodes == 1  # The one left was not played.

  run(body())


# -- Replacing workers ---------------------------------------------------------


def test_worker_is_replaced_after_its_last_episode():
  async def body():
    async with started(1, episodes=3) as (made, meter):
      pids = [(await play(made))[1] for _ in range(7)]
      assert meter.restarts == ['episodes', 'episodes']
      return pids

  a, b, c, d, e, f, g = run(body())
  assert a == b == c != d == e == f != g


def test_workers_do_not_all_reach_their_last_episode_together():
  async def body():
    async with started(4, episodes=8) as (made, meter):
      assert {w.episodes for w in made._alive} == {0}
      first = sorted(w.last_episode for w in made._alive)
      for one in list(made._alive):
        os.kill(one.pid, signal.SIGKILL)
      await until(lambda: len(meter.restarts) == 4 and made.ready == 4)
      # Those that come later have all that they may have.
      return first, {w.last_episode for w in made._alive}

  assert run(body()) == ([5, 6, 7, 8], {8})


def test_worker_above_the_memory_cap_is_replaced_after_its_episode(
  monkeypatch,
):
  monkeypatch.setattr(pool, '_ROUND_S', 0.05)
  monkeypatch.setattr(pool, '_MEASURE_EVERY_S', 0.05)

  async def body():
    async with started(1, memory_bytes=200 << 20) as (made, meter):
      _, small = await play(made)
      lent = await made.acquire('one')
      assert lent.pid == small
      await lent.reset(TASK, False, False, deadline_s=5.0)
      await lent.step('hold 250', deadline_s=10.0)
      await until(lambda: lent.memory_bytes > 250 << 20)
      # It may finish.
      assert (await lent.step('count', deadline_s=5.0)).text == '2'
      assert made.memory_bytes == [lent.memory_bytes]
      made.release(lent)
      await until(lambda: meter.restarts == ['memory'])
      assert (await play(made, 'hello'))[1] != small
      assert not env_processes.alive(small)

  run(body())


def test_worker_at_twice_the_memory_cap_is_ended_at_once(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.05)
  monkeypatch.setattr(pool, '_MEASURE_EVERY_S', 0.05)

  async def body():
    async with started(1, memory_bytes=100 << 20) as (made, meter):
      with pytest.raises(
        worker.WorkerLostError, match='over twice --memory-mb=100'
      ) as caught:
        await play(made, 'hold 250', 'sleep 4')
      assert caught.value.kind == 'memory'
      assert meter.restarts == ['memory']
      assert (await play(made, 'hello'))[0] == 'hello'

  run(body())


def test_memory_of_what_a_worker_started_counts(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.05)
  monkeypatch.setattr(pool, '_MEASURE_EVERY_S', 0.05)

  async def body():
    async with started(2) as (made, _):
      lent, other = [await made.acquire('one') for _ in '12']
      await lent.reset(TASK, False, False, deadline_s=5.0)
      child = (await lent.step('start', deadline_s=5.0)).text
      await until(lambda: resident(child) > 1 << 20)
      await until(
        lambda: (
          abs(lent.memory_bytes - resident(lent.pid) - resident(child))
          < 1 << 19
        )
      )
      made.release(lent)
      made.release(other)
      return int(child)

  assert env_processes.all_gone([run(body())])


@pytest.mark.parametrize(
  'action, kind, told',
  [
    ('exit 3', 'died', 'exited with code 3'),
    ('raise no such room', 'error', 'RuntimeError: no such room'),
    ('sleep 60', 'deadline', 'step took over 5 s'),
  ],
)
def test_lost_worker_says_why_and_is_replaced(action, kind, told):
  async def body():
    async with started(1) as (made, meter):
      with pytest.raises(worker.WorkerLostError, match=told) as caught:
        await play(made, action)
      assert caught.value.kind == kind
      assert meter.restarts == [kind]
      assert (await play(made, 'hello'))[0] == 'hello'

  run(body())


def test_what_a_worker_started_ends_with_it():
  async def body():
    async with started(1) as (made, _):
      child, pid = await play(made, 'start')
      os.kill(pid, signal.SIGKILL)
      await until(lambda: not env_processes.alive(int(child)))
      child, _ = await play(made, 'start')
      return int(child)

  assert env_processes.all_gone([run(body())])


def test_answer_that_is_too_large_is_refused_and_the_worker_lives_on():
  async def body():
    async with started(1) as (made, meter):
      text, pid = await play(made, 'say 1000000')
      assert len(text) == 1000000
      with pytest.raises(worker.TooLargeError, match='--max-message-bytes'):
        await play(made, 'say 2000000')
      assert (await play(made, 'hello')) == ('hello', pid)
      assert not meter.restarts

  run(body())


def test_abandoned_call_is_waited_for_before_the_worker_is_lent_again():
  async def body():
    async with started(1) as (made, meter):
      lent = await made.acquire('one')
      await lent.reset(TASK, False, False, deadline_s=5.0)
      step = asyncio.ensure_future(lent.step('sleep 1', deadline_s=5.0))
      await asyncio.sleep(0.2)
      step.cancel()
      made.release(lent)
      assert (await play(made, 'count'))[0] == '1'
      assert not meter.restarts

  run(body())


def test_abandoned_call_that_hangs_costs_the_worker():
  async def body():
    async with started(1) as (made, meter):
      lent = await made.acquire('one')
      await lent.reset(TASK, False, False, deadline_s=5.0)
      step = asyncio.ensure_future(lent.step('sleep 60', deadline_s=1.0))
      await asyncio.sleep(0.2)
      step.cancel()
      made.release(lent)
      # What was left to the call is left to it still, and not a second more.
      loop = asyncio.get_running_loop()
      start_s = loop.time()
      await until(lambda: meter.restarts)
      assert 0.5 < loop.time() - start_s < 10.0
      assert (await play(made, 'hello'))[0] == 'hello'
      assert meter.restarts == ['deadline']
      assert made.clients == 0

  run(body())


# -- Health --------------------------------------------------------------------


def test_stopped_worker_is_found_while_it_plays_and_while_it_idles(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.1)
  monkeypatch.setattr(pool, '_SILENCE_S', 5.0)
  monkeypatch.setattr(pool, '_PING_EVERY_S', 1e9)

  async def body():
    async with started(2) as (made, meter):
      lent = await made.acquire('one')
      await lent.reset(TASK, False, False, deadline_s=5.0)
      (idle,) = made._idle
      os.kill(lent.pid, signal.SIGSTOP)
      os.kill(idle.pid, signal.SIGSTOP)
      # Long before the deadline of the step.
      with pytest.raises(worker.WorkerLostError, match='no sign') as caught:
        await lent.step('hello', deadline_s=60.0)
      assert caught.value.kind == 'hung'
      made.release(lent)
      await until(lambda: made.ready == 2 and not made.busy)
      assert meter.restarts == ['hung', 'hung']
      assert env_processes.all_gone([lent.pid, idle.pid])

  run(body())


def test_slow_step_is_no_hang(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.1)
  monkeypatch.setattr(pool, '_SILENCE_S', 3.5)

  async def body():
    async with started(1) as (made, meter):
      lent = await made.acquire('one')
      await lent.reset(TASK, False, False, deadline_s=5.0)
      seen = await lent.step('sleep 6', deadline_s=60.0)
      assert seen.text == 'sleep 6'
      assert not meter.restarts
      made.release(lent)

  run(body())


def test_idle_worker_whose_environment_hangs_is_found_by_asking(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.1)
  monkeypatch.setattr(pool, '_PING_EVERY_S', 0.3)
  monkeypatch.setattr(pool, '_PING_DEADLINE_S', 1.0)
  monkeypatch.setattr(pool, '_SILENCE_S', 1e9)

  async def body():
    async with started(1) as (made, meter):
      (idle,) = made._idle
      await asyncio.sleep(1.0)
      assert not meter.restarts  # Asked a few times, and well.
      os.kill(idle.pid, signal.SIGSTOP)
      await until(lambda: meter.restarts == ['hung'])
      assert (await play(made, 'hello'))[0] == 'hello'

  run(body())


def test_idle_workers_are_asked_now_and_then_only(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.02)
  monkeypatch.setattr(pool, '_PING_EVERY_S', 0.5)
  asked = []
  ping = worker.Worker.ping

  async def counted(one, deadline_s):
    asked.append(one.pid)
    await ping(one, deadline_s)

  monkeypatch.setattr(worker.Worker, 'ping', counted)

  async def body():
    async with started(1):
      await asyncio.sleep(1.8)

  run(body())
  assert 1 <= len(asked) <= 4


def test_workers_that_stood_still_with_the_service_are_not_blamed(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.1)
  monkeypatch.setattr(pool, '_SILENCE_S', 4.0)

  async def body():
    async with started(1) as (made, meter):
      (idle,) = made._idle
      await asyncio.sleep(2.5)  # It has spoken.
      os.kill(idle.pid, signal.SIGSTOP)
      time.sleep(5.0)  # The service stands still as well.
      await asyncio.sleep(1.0)  # It may wake up first.
      os.kill(idle.pid, signal.SIGCONT)
      await asyncio.sleep(3.0)
      assert not meter.restarts
      assert await play(made, 'hello') == ('hello', idle.pid)

  run(body())


def test_health_is_looked_after_whatever_cannot_be_measured(monkeypatch):
  monkeypatch.setattr(pool, '_ROUND_S', 0.05)
  monkeypatch.setattr(pool, '_MEASURE_EVERY_S', 0.0)
  monkeypatch.setattr(pool, '_SILENCE_S', 5.0)
  asked = []

  def no_files(groups):
    asked.append(groups)
    raise OSError(24, 'Too many open files')

  monkeypatch.setattr(pool, '_resident_bytes', no_files)

  async def body():
    async with started(1) as (made, meter):
      await until(lambda: len(asked) > 3)
      (idle,) = made._idle
      os.kill(idle.pid, signal.SIGSTOP)
      await until(lambda: meter.restarts == ['hung'])

  run(body())


def test_process_that_ends_while_it_is_measured_is_passed_over(monkeypatch):
  seen = pool.psutil.Process

  def gone(pid):
    if pid == 1:
      raise FileNotFoundError(2, 'No such file', f'/proc/{pid}/statm')
    return seen(pid)

  monkeypatch.setattr(pool.psutil, 'Process', gone)
  monkeypatch.setattr(pool.psutil, 'pids', lambda: [1, os.getpid()])
  groups = {os.getpgid(1), os.getpgid(0)}
  used = pool._resident_bytes(groups)
  assert used[os.getpgid(0)] > 1 << 20


def test_pool_does_not_shrink_when_no_process_can_be_started(monkeypatch):
  real = worker.subprocess.Popen
  failing = [OSError(24, 'Too many open files'), RuntimeError('anything')]

  def fail(*args, **options):
    if failing:
      raise failing.pop()
    return real(*args, **options)

  async def body():
    async with started(2) as (made, _):
      monkeypatch.setattr(worker.subprocess, 'Popen', fail)
      for one in list(made._alive):
        os.kill(one.pid, signal.SIGKILL)
      await until(lambda: not failing and made.ready == 2)
      assert len(made._alive) == 2

  run(body())


def test_worker_that_dies_before_it_was_of_use_is_not_built_in_a_hurry(
  monkeypatch,
):
  monkeypatch.setattr(pool, '_FIRST_BACKOFF_S', 0.4)

  async def body():
    async with started(1) as (made, meter):
      for count in (1, 2):
        (one,) = made._alive
        os.kill(one.pid, signal.SIGKILL)
        await until(lambda: len(meter.restarts) == count)  # noqa: B023
        start_s = time.monotonic()
        await until(lambda: made.ready)
        assert time.monotonic() - start_s > 0.4 * count
      await play(made, 'hello')
      assert made._failures == 0

  run(body())


# -- Starting and ending -------------------------------------------------------


def test_those_who_wait_for_a_worker_that_cannot_be_built_are_told(tmp_path):
  folder = tmp_path / 'envs_server'
  folder.mkdir()
  (folder / 'broken.py').write_text(
    'def make_env():\n  raise OSError("no data in /nowhere")\n'
  )
  os.environ['PYTHONPATH'] = str(tmp_path)  # The fixture restores it.

  async def body():
    made = pool.Pool('broken', 2, LIMITS, telemetry.Telemetry('broken'))
    made.start()
    try:
      with pytest.raises(worker.WorkerLostError, match='no data in /nowhere'):
        await made.acquire('one')
    finally:
      await made.close()

  run(body())


def test_worker_holds_nothing_of_the_service():
  async def body():
    async with started(1) as (made, _):
      _, pid = await play(made)
      open_files = [
        os.readlink(f'/proc/{pid}/fd/{fd}')
        for fd in os.listdir(f'/proc/{pid}/fd')
      ]
      assert sum('socket' in name for name in open_files) == 1
      assert os.getpgid(pid) == pid
      maps = pathlib.Path(f'/proc/{pid}/maps').read_text()
      assert 'cygrpc' not in maps and 'multiprocessing' not in maps
      assert sys.executable in env_processes.command(pid)

  run(body())
