"""Several services at once, with real processes: spreading, loss, return."""

import asyncio
import collections
import contextlib
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import env_processes
import grpc
import pytest
import trustme

from configs import quickstart
from envs_server import env, toy
from planpo_jax import (
  build,
  env_client,
  env_fleet,
  env_service,
  episodes,
  prompts,
)
from planpo_jax import config as config_lib
from planpo_jax.prompts import actions

ROOT = pathlib.Path(__file__).parent.parent
TASK = episodes.Task('toy', 'train', 1, 'deliver')
FAULTY = pathlib.Path(__file__).parent / 'more_envs'
TOKEN = 'correct-horse-battery-staple'


class Served:
  """A service that nobody looks after; it can be started at its port again."""

  def __init__(self, *flags, name='toy', path=FAULTY):
    self.process = None
    self.address = '127.0.0.1:0'
    self.start(*flags, name=name, path=path)

  def start(self, *flags, name='toy', path=FAULTY):
    port = self.address.rpartition(':')[2]
    self.process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'envs_server'),
        *(f'--env={name}', f'--port={port}', *flags),
      ],
      stdout=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(path)},
    )
    line = self.process.stdout.readline()
    assert line.startswith('listening on 127.0.0.1:'), line
    self.address = line.split()[-1]

  def signal(self, number):
    self.process.send_signal(number)

  def kill(self):
    self.process.kill()
    self.process.wait()
    self.process.stdout.close()


@pytest.fixture
def serve():
  """Starts services that end with the test."""
  started = []

  def start(*flags, **kwargs):
    started.append(Served(*flags, **kwargs))
    return started[-1]

  yield start
  for served in started:
    served.kill()


def with_client(addresses, body, **options):
  """Runs `await body(client)`."""

  async def run():
    client = env_client.EnvClient(addresses, **options)
    await client.connect(20.0)
    try:
      await built(client)
      return await body(client)
    finally:
      await client.close()

  return asyncio.run(run())


async def built(client):
  """Waits until the services that are up have all their workers."""
  async with asyncio.timeout(60):
    while (seen := await client.describe()).ready < seen.workers:
      await asyncio.sleep(0.05)


async def alone(served, **options):
  """What a service says of itself to another client."""
  client = env_client.EnvClient(served.address, **options)
  await client.connect()
  try:
    return await client.describe()
  finally:
    await client.close()


async def until(condition, limit_s=20.0):
  """Waits until `condition` comes true; fails if it does not."""
  async with asyncio.timeout(limit_s):
    while not condition():
      await asyncio.sleep(0.02)


def direct(task=TASK):
  """Texts of `task` without any service."""
  game = toy.make_env()
  first = game.reset(
    env.Task(task.env, task.split, task.index, task.name), expert=True
  )
  return [
    first.text,
    *(game.step(action).text for action in first.expert_actions),
  ]


async def play(client, task=TASK, between=None):
  """Plays the expert's actions; returns the texts and the session.

  `between` is awaited with the number of actions taken, before each action.
  """
  session = client.session(task, step_limit=60, expert=True)
  try:
    seen = [await session.reset()]
    for count, action in enumerate(seen[0].expert_actions):
      if between is not None:
        await between(count)
      seen.append(await session.step(action))
  finally:
    await session.close()
  return [o.text for o in seen], session


def told(caplog):
  """What our own modules logged."""
  return [r.getMessage() for r in caplog.records if 'planpo_jax' in r.name]


def faulty(index=2):
  return episodes.Task('faulty', 'train', index, 'any')


async def begun(client, task=TASK):
  session = client.session(task, step_limit=0)
  await session.reset()
  return session


# -- Spreading -----------------------------------------------------------------


def test_episodes_go_where_most_workers_are_free(serve):
  large, small = serve('--workers=3'), serve('--workers=1')

  async def body(client):
    assert client.up == 2 and client.workers == 4
    sessions, taken = [], []
    for _ in range(4):
      sessions.append(await begun(client))
      taken.append(((await alone(large)).busy, (await alone(small)).busy))
    together = await client.describe()
    for session in sessions:
      await session.close()
    return taken, together

  taken, together = with_client(f'{small.address},{large.address}', body)
  # 3 and 1 free, 2 and 1, 1 and 1 with a lower load there, 1 and 0.
  assert taken == [(1, 0), (2, 0), (2, 1), (3, 1)]
  assert (together.workers, together.busy, together.waiting) == (4, 4, 0)
  assert together.name == 'toy' and together.max_action_bytes == 16384


def test_what_others_play_counts(serve):
  first, second = serve('--workers=3'), serve('--workers=2')

  async def body(client):
    async def others(other):
      held = [await begun(other) for _ in range(2)]
      await client.refresh()
      ours = await begun(client)
      busy = (await alone(second)).busy
      for session in (ours, *held):
        await session.close()
      return busy

    other = env_client.EnvClient(first.address)
    await other.connect()
    try:
      return await others(other)
    finally:
      await other.close()

  assert with_client([first.address, second.address], body) == 1


def test_episodes_that_wait_move_to_workers_that_are_free(serve, caplog):
  """A service that is late takes what has queued at the other meanwhile."""
  early, late = serve('--workers=1'), serve('--workers=2')
  late.kill()

  async def body(client):
    assert client.up == 1 and client.workers == 1
    held = await begun(client)
    waiting = [asyncio.ensure_future(play(client)) for _ in range(2)]
    while (await alone(early)).waiting != 2:
      await asyncio.sleep(0.05)
    await asyncio.to_thread(late.start, '--workers=2')
    played = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert (await alone(early)).busy == 1
    await held.close()
    assert client.workers == 3
    return played

  for texts, session in with_client([early.address, late.address], body):
    assert texts == direct() and session.faults == 0
  lines = told(caplog)
  assert f'no environment service at {late.address}' in lines[0]
  assert lines[1:] == [
    f'the environment service at {late.address} is up; 2 of 2 are'
  ]


def test_who_may_have_no_more_workers_goes_elsewhere(serve, monkeypatch):
  """The service says that it has free ones; this client gets only one."""
  monkeypatch.setattr(env_fleet, '_PATIENCE_S', 1.0)
  narrow, small = serve('--workers=4', '--client-limit=1'), serve()

  async def body(client):
    held = await begun(client)
    assert (await alone(narrow)).busy == 1
    moved = await asyncio.wait_for(begun(client), 60)
    assert (await alone(small)).busy == 1
    stuck = asyncio.ensure_future(begun(client))
    while not (await alone(narrow)).waiting:
      await asyncio.sleep(0.05)
    # Nobody calls it away from now on.
    monkeypatch.setattr(env_fleet, '_WATCH_S', 600.0)
    await asyncio.sleep(5)
    await moved.close()
    # A new one does not queue behind it where there seem to be more workers.
    other = await asyncio.wait_for(begun(client), 60)
    assert not stuck.done()
    await held.close()
    sessions = [moved, other, await asyncio.wait_for(stuck, 60)]
    for session in sessions:
      await session.close()
    return [session.faults for session in sessions]

  assert with_client([narrow.address, small.address], body) == [0, 0, 0]


# -- Services that can build no worker -----------------------------------------


@pytest.fixture
def twins(serve, tmp_path):
  """Two services of one environment; the first one can lose its workers.

  Its environment cannot be built while the file returned exists.
  """
  jam = tmp_path / 'jam'
  source = (FAULTY / 'envs_server' / 'faulty.py').read_text()
  for folder, condition in (('1', f'os.path.exists({str(jam)!r})'), ('2', '0')):
    (tmp_path / folder / 'envs_server').mkdir(parents=True)
    (tmp_path / folder / 'envs_server' / 'twin.py').write_text(
      source.replace(
        'def make_env():\n',
        f"def make_env():\n  if {condition}:\n    raise OSError('no room')\n",
      )
    )

  def start(*flags):
    first = serve(*flags[:1], name='twin', path=tmp_path / '1')
    second = serve(*flags[1:], name='twin', path=tmp_path / '2')
    return first, second, jam

  return start


def twin(index=2):
  return episodes.Task('twin', 'train', index, 'any')


def bar(served, jam):
  """Ends the workers of a service, for good."""
  jam.touch()
  for pid in env_processes.workers_of(served.process.pid):
    os.kill(pid, signal.SIGKILL)


async def count(client, task):
  """Plays three actions; returns what the last one brings, and the session."""
  session = await begun(client, task)
  try:
    seen = [(await session.step('count')).text for _ in range(3)]
  finally:
    await session.close()
  return seen, session


def test_a_service_without_workers_gets_no_episodes(twins, caplog):
  """It looks emptiest, and is the first in the list."""
  barren, well, jam = twins('--workers=3', '--workers=1')

  async def body(client):
    bar(barren, jam)
    while (await client.describe()).ready != 1:
      await asyncio.sleep(0.05)
    assert client.up == 2
    played = await asyncio.wait_for(
      asyncio.gather(*(count(client, twin(i)) for i in range(2, 10))), 60
    )
    jam.unlink()
    await built(client)
    session = await begun(client, twin())
    busy = (await alone(barren)).busy
    await session.close()
    return played, busy

  played, busy = with_client([barren.address, well.address], body, retries=0)
  for seen, session in played:
    assert seen == ['1', '2', '3'] and session.faults == 0
  # Nobody had to find out for himself.
  assert not any('elsewhere' in line for line in told(caplog))
  assert busy == 1  # It is used again.


def test_who_finds_no_worker_goes_elsewhere_and_has_lost_nothing(
  twins, monkeypatch, caplog
):
  """Nobody has asked the service since it lost its workers."""
  monkeypatch.setattr(env_fleet, '_WATCH_S', 600.0)
  barren, well, jam = twins('--workers=2', '--workers=1')

  async def body(client):
    bar(barren, jam)
    while (await alone(barren)).ready:
      await asyncio.sleep(0.05)
    return await asyncio.wait_for(count(client, twin()), 60)

  addresses = [barren.address, well.address]
  seen, session = with_client(addresses, body, retries=0)
  assert seen == ['1', '2', '3'] and session.faults == 0
  assert any(
    'UNAVAILABLE: no twin worker: ' in line and 'going elsewhere' in line
    for line in told(caplog)
  )


def test_no_worker_anywhere_is_a_fault(twins):
  barren, well, jam = twins('--workers=2', '--workers=1')
  well.kill()

  async def body(client):
    bar(barren, jam)
    with pytest.raises(env_client.EnvFault, match='no twin worker') as caught:
      await asyncio.wait_for(count(client, twin()), 90)
    return caught.value

  addresses = [barren.address, well.address]
  fault = with_client(addresses, body, retries=1)
  assert 'after 1 retries' in str(fault) and not fault.final


def test_begun_episodes_do_not_wait_for_others_at_another_service(
  serve, monkeypatch
):
  """The only worker of the one is a stranger's; at the other one is spare."""
  monkeypatch.setattr(env_fleet, '_PATIENCE_S', 1.0)
  lost, other = serve('--workers=1'), serve('--workers=1')

  async def body(client):
    stranger = env_client.EnvClient(other.address)
    await stranger.connect()
    held = await begun(stranger)
    await client.refresh()
    began = await begun(client)
    ahead = asyncio.ensure_future(begun(client))
    while not (await alone(lost)).waiting:
      await asyncio.sleep(0.05)
    late = asyncio.ensure_future(begun(client))
    while not (await alone(other)).waiting:
      await asyncio.sleep(0.05)
    await began.step('look')
    (worker,) = env_processes.workers_of(lost.process.pid)
    os.kill(worker, signal.SIGKILL)
    seen = [await asyncio.wait_for(began.step('inventory'), 60)]
    # It has waited for longer, but nobody waits for it.
    assert not late.done()
    await began.close()
    spare = await ahead
    seen.append(await asyncio.wait_for(spare.step('inventory'), 60))
    await spare.close()
    for session in (await asyncio.wait_for(late, 60), held):
      await session.close()
    await stranger.close()
    return [o.text for o in seen], spare.faults

  (first, second), faults = with_client([lost.address, other.address], body)
  assert first == second and faults == 0


# -- Loss and return -----------------------------------------------------------


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_service_changes_nothing_and_is_taken_back(
  serve, caplog, number
):
  lost, other = serve('--workers=2'), serve('--workers=2')
  tasks = [episodes.Task('toy', 'dev', i, 'deliver') for i in range(4)]

  async def body(client):
    halfway = asyncio.Barrier(len(tasks))

    async def strike(count):
      if count == 2:
        if await halfway.wait() == 0:
          lost.signal(number)
        await halfway.wait()

    began_s = time.monotonic()
    playing = asyncio.gather(*(play(client, t, strike) for t in tasks))
    played = await asyncio.wait_for(playing, 90)
    spent_s = time.monotonic() - began_s
    # The next ones do not go there at all.
    texts, session = await asyncio.wait_for(play(client), 60)
    assert texts == direct() and session.faults == 0
    assert client.up == 1 and client.workers == 2
    if number == signal.SIGSTOP:
      lost.signal(signal.SIGCONT)
    else:
      lost.kill()
      await asyncio.to_thread(lost.start, '--workers=2')
    await until(lambda: client.up == 2)
    await built(client)
    sessions = [await begun(client) for _ in range(4)]
    busy = (await alone(lost)).busy
    for session in sessions:
      await session.close()
    return played, spent_s, busy

  caplog.set_level(logging.WARNING)
  played, spent_s, busy = with_client([lost.address, other.address], body)
  assert [texts for texts, _ in played] == [direct(task) for task in tasks]
  assert sum(session.faults > 0 for _, session in played) == 2
  assert spent_s < 55  # The deadline of a step alone is 60 s.
  assert busy == 2
  lines = told(caplog)
  away = f'the environment service at {lost.address} is away'
  assert sum(away in line for line in lines) == 1
  up = f'the environment service at {lost.address} is up; 2 of 2 are'
  assert sum(up in line for line in lines) == 1


def test_who_waits_in_the_queue_of_a_service_that_hangs_goes_elsewhere(serve):
  hung, other = serve('--workers=1'), serve('--workers=1')

  async def body(client):
    held = [await begun(client), await begun(client)]
    waiting = [asyncio.ensure_future(play(client)) for _ in range(2)]
    while not all([(await alone(s)).waiting for s in (hung, other)]):
      await asyncio.sleep(0.05)
    hung.signal(signal.SIGSTOP)
    for session in held:
      await session.close()
    played = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    hung.signal(signal.SIGCONT)
    return played

  for texts, _ in with_client([hung.address, other.address], body):
    assert texts == direct()


def test_a_retry_goes_to_another_service(serve):
  first, second = serve('--workers=1'), serve('--workers=1')

  async def body(client):
    session = await begun(client)
    struck, other = first, second
    if (await alone(second)).busy:
      struck, other = second, first
    (worker,) = env_processes.workers_of(struck.process.pid)
    os.kill(worker, signal.SIGKILL)
    await session.step('look')
    there = (await alone(other)).busy
    await session.close()
    return there, session.faults

  assert with_client([first.address, second.address], body) == (1, 1)


def test_begun_episodes_do_not_wait_for_those_that_wait_for_them(serve):
  """One has a slot and no worker, the other a worker and no slot."""
  lost, other = serve('--workers=1'), serve('--workers=1')

  async def body(client):
    began = await begun(client)
    if not (await alone(lost)).busy:
      began, ahead = await begun(client), began
    else:
      ahead = await begun(client)
    await began.step('look')
    lost.kill()
    seen = [await asyncio.wait_for(began.step('inventory'), 30)]
    await began.close()
    seen.append(await ahead.step('inventory'))
    await ahead.close()
    return [o.text for o in seen], ahead.faults

  (first, second), faults = with_client([lost.address, other.address], body)
  assert first == second and faults == 0


def test_what_serves_something_else_is_left_out(serve, tmp_path, caplog):
  """Another version, another environment; then the right one again."""
  for version in ('1', '2'):
    (tmp_path / version / 'envs_server').mkdir(parents=True)
    text = (FAULTY / 'envs_server' / 'faulty.py').read_text()
    (tmp_path / version / 'envs_server' / 'twin.py').write_text(
      text.replace("'faulty 1'", f"'twin {version}'")
    )
  changing = serve(name='twin', path=tmp_path / '1')
  steady = serve(name='twin', path=tmp_path / '1')

  async def body(client):
    said = []
    for name, path in (
      ('twin', tmp_path / '2'),
      ('faulty', FAULTY),
      ('twin', tmp_path / '1'),
    ):
      caplog.clear()
      changing.kill()
      await until(lambda: client.up == 1)
      await asyncio.to_thread(changing.start, name=name, path=path)
      if path == tmp_path / '1':
        await until(lambda: client.up == 2)
      else:
        await until(lambda: 'left out' in caplog.text)
        await asyncio.sleep(3)  # Asked again meanwhile, told no more.
        assert client.up == 1
      said.append(told(caplog))
    return said

  said = with_client([changing.address, steady.address], body)
  for lines, other in zip(
    said, ("twin version 'twin 2'", "faulty version 'faulty 1'"), strict=False
  ):
    (left_out,) = (line for line in lines if 'left out' in line)
    assert changing.address in left_out
    assert f'it serves {other} with tasks train 1000' in left_out
    assert "not twin version 'twin 1' with tasks train 1000" in left_out
  assert 'is up; 2 of 2 are' in said[2][-1]


def test_a_single_service_that_returns_as_another_plays_nothing(serve):
  served = serve(name='faulty')

  async def body(client):
    session = await begun(client, faulty())
    served.kill()
    await asyncio.to_thread(served.start)
    with pytest.raises(env_client.EnvFault) as caught:
      await session.step('count')
    return str(caught.value)

  told = with_client(served.address, body, away_deadline_s=2.0)
  assert "it serves toy version 'toy 1'" in told
  assert "not faulty version 'faulty 1'" in told


def test_all_give_up_together_when_every_service_is_away(serve):
  both = [serve('--workers=2'), serve('--workers=2')]

  async def body(client):
    sessions = [await begun(client) for _ in range(4)]
    for served in both:
      served.kill()
    began_s = time.monotonic()
    told, spent_s = [], []
    for result in await asyncio.gather(
      *(timed(session.step('look')) for session in sessions)
    ):
      told.append(str(result[0]))
      spent_s.append(result[1] - began_s)
    # Nobody waits anew.
    with pytest.raises(env_client.EnvFault):
      await asyncio.wait_for(begun(client), 5)
    with pytest.raises(ConnectionError, match=both[0].address):
      await client.describe()
    assert client.up == 0 and client.workers == 1
    return told, spent_s

  async def timed(work):
    try:
      return await work, time.monotonic()
    except env_client.EnvFault as fault:
      return fault, time.monotonic()

  told, spent_s = with_client(
    [served.address for served in both], body, away_deadline_s=8.0
  )
  assert all(7.9 < s < 15.9 for s in spent_s)
  assert max(spent_s) - min(spent_s) < 5
  for line in told:
    assert 'toy deliver train/1 at turn 1: no environment service at' in line
    assert both[0].address in line and both[1].address in line
    assert line.endswith('for 8 s')


def test_a_loop_that_stood_still_proves_nothing(serve, monkeypatch, caplog):
  """Between collections the loop does not run; answers wait to be read."""
  monkeypatch.setattr(env_fleet, '_WATCH_DEADLINE_S', 0.5)
  served = serve()
  with asyncio.Runner() as runner:
    client = env_client.EnvClient(served.address)
    runner.run(client.connect())

    async def ask_and_stop():
      # The loop stops with the question written and not sent.
      return asyncio.ensure_future(client._judge(client._services[0]))

    for _ in range(3):
      asking = runner.run(ask_and_stop())
      time.sleep(1.2)
      assert runner.run(play(client))[0] == direct()
      assert asking.done() and client.up == 1
    runner.run(client.close())
  assert not told(caplog)


def test_the_last_service_may_miss_a_question(serve, monkeypatch):
  """One of several is dropped at once; the others play on."""
  monkeypatch.setattr(env_fleet, '_WATCH_S', 600.0)
  monkeypatch.setattr(env_fleet, '_WATCH_DEADLINE_S', 2.0)
  first, second = serve(), serve()

  async def body(client):
    up = []

    async def ask(number):
      first.signal(number)
      await client._ask(client._services[0])
      up.append(client.up)

    for number in (signal.SIGSTOP, signal.SIGCONT):
      await ask(number)
    second.kill()
    await client._ask(client._services[1])
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
      await ask(number)
    first.signal(signal.SIGCONT)
    await ask(signal.SIGCONT)
    # Whoever asks what is served is not told what was.
    first.signal(signal.SIGSTOP)
    asking = asyncio.ensure_future(client.describe())
    await until(lambda: client._services[0].misses == 1)
    first.signal(signal.SIGCONT)
    await asking
    assert client._services[0].misses == 0
    # Many questions at one time are one.
    first.signal(signal.SIGSTOP)
    await asyncio.gather(
      *(client._judge(client._services[0]) for _ in range(3))
    )
    up.append(client.up)
    for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGSTOP):
      await ask(number)
    return up

  assert with_client([first.address, second.address], body) == [
    *(1, 2),
    *(1, 1, 1, 1),
    *(1, 1, 1, 0),
  ]


def test_a_watcher_outlives_what_nobody_expects(serve, monkeypatch, caplog):
  first, second = serve(), serve()

  async def body(client):
    broken = asyncio.Event()

    def surprise():
      broken.set()
      monkeypatch.undo()
      raise TypeError('a surprise')

    monkeypatch.setattr(client, '_notice_waiting', surprise)
    await asyncio.wait_for(broken.wait(), 20)
    for served in (first, second):
      served.kill()
    await until(lambda: client.up == 0, 60)

  with_client([first.address, second.address], body)
  assert 'a surprise' in caplog.text


def test_an_error_may_come_without_words():
  service = env_fleet.Service('somewhere:1', env_fleet.Credentials())
  service.failed(
    grpc.aio.AioRpcError(
      grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata()
    )
  )
  assert service.why == 'UNKNOWN: '


def test_nothing_is_left_running_after_the_end(serve):
  first, second = serve(), serve()
  with asyncio.Runner() as runner:
    client = env_client.EnvClient([first.address, second.address])
    runner.run(client.connect())
    second.kill()

    async def end():
      await until(lambda: client.up == 1)
      # Too short for the one that is away.
      await client.refresh(0.01)
      await client.close()
      return [t.get_coro().__qualname__ for t in asyncio.all_tasks()]

    (only,) = runner.run(end())
    assert only.endswith('.end')


def test_the_lowest_limit_of_all_that_have_one_counts(serve):
  served = [
    serve('--max-action-bytes=5000'),
    serve('--max-action-bytes=6000'),
    serve(),
  ]

  async def body(client):
    limits = [(await client.describe()).max_action_bytes]
    whole = env_fleet.Service.describe
    for silent in (client._services[:1], client._services):

      async def describe(service, silent=silent):
        """As a service of an older version, which tells of no limit."""
        await whole(service)
        if service in silent:
          object.__setattr__(service.seen, 'max_action_bytes', 0)
        return service.seen

      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_fleet.Service, 'describe', describe)
        limits.append((await client.describe()).max_action_bytes)
    return limits

  addresses = [one.address for one in served]
  assert with_client(addresses, body) == [5000, 6000, 0]


def test_refresh_finds_what_happened_while_the_loop_stood_still(serve):
  first, second = serve(), serve('--workers=2')
  second.kill()
  with asyncio.Runner() as runner:
    client = env_client.EnvClient([first.address, second.address])
    runner.run(client.connect())
    assert client.workers == 1
    second.start('--workers=2')
    runner.run(client.refresh(5.0))
    assert client.workers == 3
    first.kill()
    runner.run(client.refresh(5.0))
    assert client.workers == 2
    runner.run(client.close())


def test_what_goes_another_way_is_told(serve):
  served = serve(name='faulty')

  async def body(client):
    session = await begun(client, faulty())
    pid = (await session.step('pid')).text
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(env_client.EnvFault, match='another way') as caught:
      await session.step('count')
    return pid, caught.value

  pid, fault = with_client(served.address, body)
  assert f"where it was '{pid}'" in str(fault)
  assert fault.diverged and not fault.final


def test_an_action_is_taken_once_though_its_reply_is_late(serve):
  served = serve('--workers=2', name='faulty')

  async def body(client):
    session = await begun(client, faulty())
    assert (await session.step('count')).text == '1'
    pid = int((await session.step('pid')).text)
    os.kill(pid, signal.SIGSTOP)
    try:
      seen = [await session.step('count')]
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    seen.append(await session.step('count'))
    await session.close()
    return [o.text for o in seen], session.faults

  # That the pid is another one is not what this is about.
  def outcome(reply, whole=env_client._outcome):
    return whole(reply)[1:]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(env_client, '_outcome', outcome)
    assert with_client(served.address, body, step_deadline_s=1.0) == (
      ['3', '4'],
      1,
    )


# -- Queues and refusals -------------------------------------------------------


def test_a_full_queue_is_waited_out(serve):
  served = serve('--workers=1', '--queue=0')

  async def body(client):
    held = await begun(client)
    playing = asyncio.ensure_future(play(client))
    await asyncio.sleep(2)
    assert not playing.done()
    await held.close()
    texts, session = await asyncio.wait_for(playing, 20)
    return texts, session.faults

  assert with_client(served.address, body) == (direct(), 0)


def test_a_full_queue_sends_to_another_service(serve):
  """Its one worker is another client's, which is not known yet."""
  full, free = serve('--workers=1', '--queue=0'), serve('--workers=1')

  async def body(client):
    other = env_client.EnvClient(full.address)
    await other.connect()
    held = await begun(other)
    began_s = time.monotonic()
    sessions = [await begun(client)]
    spent_s = time.monotonic() - began_s
    assert (await alone(free)).busy == 1
    for session in (held, *sessions):
      await session.close()
    await other.close()
    return spent_s, sessions[0].faults

  spent_s, faults = with_client([full.address, free.address], body)
  assert spent_s < 30 and faults == 0


def test_a_message_that_is_too_long_is_no_full_queue(serve):
  """gRPC gives both the same status."""
  served = serve('--max-message-bytes=20000')
  long = episodes.Task(
    'toy', 'train', 1, 'deliver', options=(('size', 'x' * 30000),)
  )

  async def body(client):
    with pytest.raises(env_client.EnvFault, match='larger than max') as caught:
      await asyncio.wait_for(begun(client, long), 60)
    assert (await play(client))[0] == direct()
    return caught.value

  fault = with_client(served.address, body)
  assert 'RESOURCE_EXHAUSTED' in str(fault) and fault.final


def test_a_queue_that_stays_full_is_a_fault(serve):
  served = serve('--workers=1', '--queue=0')

  async def body(client):
    held = await begun(client)
    with pytest.raises(env_client.EnvFault) as caught:
      await begun(client)
    await held.close()
    return str(caught.value)

  told = with_client(served.address, body, queue_deadline_s=1.0)
  assert 'no worker was to be had for 1 s' in told and '--queue' in told


def test_a_worker_that_never_comes_free_is_a_fault(serve, monkeypatch, caplog):
  monkeypatch.setattr(env_fleet, '_QUEUE_NOTICE_S', 1.0)
  served = serve('--workers=1')

  async def body(client):
    held = await begun(client)
    with pytest.raises(env_client.EnvFault) as caught:
      await begun(client)
    await held.close()
    return str(caught.value)

  said = with_client(served.address, body, queue_deadline_s=6.0)
  assert f'no free worker at {served.address} within 6 s' in said
  assert told(caplog) == [
    '1 episodes have waited over 1 s for a free worker at '
    f'{served.address} (its --workers or its --client-limit are below the '
    'number of episodes played at once, or others play there)'
  ]


def test_who_is_turned_away_for_long_is_told_of(serve, monkeypatch, caplog):
  monkeypatch.setattr(env_fleet, '_QUEUE_NOTICE_S', 1.0)
  served = serve('--workers=1', '--queue=0')

  async def body(client):
    held = await begun(client)
    playing = asyncio.ensure_future(play(client))
    await asyncio.sleep(6)
    assert client.turned_away
    await held.close()
    await asyncio.wait_for(playing, 20)
    assert not client.turned_away

  with_client(served.address, body)
  (line,) = told(caplog)
  assert line.startswith('1 episodes have waited over 1 s for a free worker')


def test_stream_of_an_episode_that_ended_ends_in_good_order(serve):
  """One that is cancelled leaves something behind in gRPC's server."""
  served = serve('--workers=1')

  async def code(client, steps):
    session = client.session(TASK, step_limit=2)
    await session.reset()
    for _ in range(steps):
      await session.step('look')
    call = session._call
    await session.close()
    return await call.code()

  async def body(client):
    return [await code(client, steps) for steps in (1, 2)]

  assert with_client(served.address, body) == [
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.OK,
  ]


def test_who_asks_after_the_end_is_answered_at_once(serve):
  served = serve('--workers=1')

  async def body(client):
    session = client.session(TASK, step_limit=9)
    await client.close()
    async with asyncio.timeout(5):
      with pytest.raises(env_client.EnvFault, match='no environment service'):
        await session.reset()

  with_client(served.address, body)


def test_refused_task_names_itself(serve):
  served = serve('--workers=1')

  async def body(client):
    task = episodes.Task('toy', 'train', 999, 'fetch')
    with pytest.raises(ValueError, match='^toy fetch train/999: fetch has no'):
      await client.session(task, step_limit=9).reset()

  with_client(served.address, body)


@pytest.mark.parametrize(
  'action, told',
  [
    ('x' * 20000, 'INVALID_ARGUMENT'),
    ('say 30000', 'OUT_OF_RANGE'),
    ('x' * 30000, 'RESOURCE_EXHAUSTED'),
  ],
  ids=['long action', 'long observation', 'long message'],
)
def test_refused_acts_are_faults_at_once(serve, action, told):
  """Never a ValueError, which would end the run."""
  served = serve('--max-message-bytes=25000', name='faulty')

  async def body(client):
    session = await begun(client, faulty())
    with pytest.raises(env_client.EnvFault, match=told) as caught:
      await session.step(action)
    assert session.faults == 0 and caught.value.final
    # The service goes on.
    other = await begun(client, faulty(3))
    seen = await other.step('count')
    await other.close()
    return seen.text

  assert with_client(served.address, body) == '1'


@pytest.mark.parametrize(
  'action',
  ['\ud800', 'a\0b', '\x1b[2J', 'look\r\nlook', '\u2028', '', '\ufeff'],
)
def test_odd_characters_break_nothing(serve, action):
  served = serve(name='faulty')

  async def body(client):
    session = await begun(client, faulty())
    seen = [await session.step(action), await session.step('count')]
    await session.close()
    return [o.text for o in seen], session.faults

  (text, count), faults = with_client(served.address, body)
  assert text == action.replace('\ud800', '?')
  assert count == '2' and faults == 0


LONG = 'ä' * (actions.MAX_BYTES // 2 + 1)


@pytest.mark.parametrize(
  'name, response',
  [
    ('brief', '<action>{}</action>'),
    ('full', '<think>t</think><action>{}</action>'),
    (
      'hiper',
      '<switch>SWITCH</switch><subgoal>s</subgoal><action>{}</action>',
    ),
    ('react', 'Thought: t\nAction: {}'),
  ],
)
def test_an_action_that_is_too_long_is_none(name, response):
  read = prompts.get(name).parse
  assert read(response.format(LONG)) == actions.ParsedAction(
    actions.NO_ACTION, False
  )
  assert read(response.format(LONG[1:])) == actions.ParsedAction(LONG[1:], True)
  # What comes out can be sent.
  assert read(response.format('go \ud800')).text == 'go ?'


def test_every_format_is_among_those():
  assert set(prompts.names()) == {'brief', 'full', 'hiper', 'react'}


# -- Connecting ----------------------------------------------------------------


@contextlib.contextmanager
def nobody():
  """An address at which every connection is refused."""
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    yield f'127.0.0.1:{taken.getsockname()[1]}'


def test_addresses_without_any_service_are_all_named():
  with nobody() as first, nobody() as second:
    with pytest.raises(ConnectionError) as caught:
      with_short_connect([first, second])
  told = str(caught.value)
  assert f"'{first}' (UNAVAILABLE: " in told
  assert f"'{second}' (UNAVAILABLE: " in told
  assert 'python -m envs_server' in told


def with_short_connect(addresses, **options):
  client = env_client.EnvClient(addresses, **options)
  asyncio.run(asyncio.wait_for(client.connect(3.0), 15))


def test_an_address_that_accepts_and_says_nothing_is_named():
  with socket.socket() as silent:
    silent.bind(('127.0.0.1', 0))
    silent.listen()
    address = f'127.0.0.1:{silent.getsockname()[1]}'
    with pytest.raises(ConnectionError, match=f"'{address}' "):
      with_short_connect(address)


def test_services_that_differ_from_the_start_are_refused(serve):
  first, second = serve(), serve(name='faulty')
  with pytest.raises(ConnectionError) as caught:
    with_short_connect([first.address, second.address])
  told = str(caught.value)
  assert f"{first.address} serves toy version 'toy 1'" in told
  assert f"{second.address} serves faulty version 'faulty 1'" in told


def test_no_address_is_refused():
  for addresses in ([], '', 'localhost:1,,localhost:2'):
    with pytest.raises(ValueError, match='at least one service'):
      env_client.EnvClient(addresses)


# -- TLS and tokens ------------------------------------------------------------


@pytest.fixture(scope='module')
def pem(tmp_path_factory):
  """Files of two authorities, a service and a client."""
  folder = tmp_path_factory.mktemp('pem')
  authority, stranger = trustme.CA(), trustme.CA()
  authority.cert_pem.write_to_path(folder / 'ca')
  stranger.cert_pem.write_to_path(folder / 'strange_ca')
  for name, issued in (
    ('service', authority.issue_cert('127.0.0.1', 'localhost')),
    ('client', authority.issue_cert('client.test')),
  ):
    issued.private_key_pem.write_to_path(folder / f'{name}_key')
    issued.cert_chain_pems[0].write_to_path(folder / f'{name}_cert')
  tokens = folder / 'tokens'
  tokens.write_text(f'trainer {TOKEN}\n')
  tokens.chmod(0o600)
  return lambda name: str(folder / name)


def own_flags(pem):
  return (
    f'--tls-cert={pem("service_cert")}',
    f'--tls-key={pem("service_key")}',
  )


def test_tls_and_token(serve, pem):
  served = serve(*own_flags(pem), f'--token-file={pem("tokens")}')

  def shown(**changes):
    fields = {'tls': True, 'ca': pem('ca'), 'token': TOKEN} | changes
    return {'credentials': env_client.Credentials(**fields)}

  async def body(client):
    assert len(await client.list_tasks('dev')) == 96
    return (await play(client))[0]

  assert with_client(served.address, body, **shown()) == direct()
  for changes, told in (
    ({'token': ''}, 'UNAUTHENTICATED.*env.token_file'),
    ({'token': 'wrong-horse-battery-staple'}, 'env.token_file'),
    ({'ca': pem('strange_ca')}, 'env.tls_ca'),
    ({'ca': ''}, 'env.tls_ca'),
    ({'tls': False}, 'env.tls=True'),
  ):
    with pytest.raises(ConnectionError, match=told) as caught:
      with_short_connect(served.address, **shown(**changes))
    assert TOKEN not in str(caught.value)
    assert 'horse' not in str(caught.value)


def test_a_service_that_wants_a_certificate(serve, pem):
  served = serve(*own_flags(pem), f'--tls-client-ca={pem("ca")}')
  shown = env_client.Credentials(
    True, pem('ca'), pem('client_cert'), pem('client_key')
  )
  assert with_client(served.address, play, credentials=shown)[0] == direct()
  with pytest.raises(ConnectionError, match='env.tls_cert'):
    with_short_connect(
      served.address, credentials=env_client.Credentials(True, pem('ca'))
    )


def test_tls_to_a_service_of_plain_text_is_named(serve, pem):
  served = serve()
  with pytest.raises(ConnectionError, match='env.tls be False'):
    with_short_connect(
      served.address, credentials=env_client.Credentials(True, pem('ca'))
    )


def test_no_token_is_shown():
  assert TOKEN not in repr(env_client.Credentials(token=TOKEN))
  for bad in ('two words', 'tab\t', 'line\n', 'ä'):
    with pytest.raises(ValueError, match='visible ASCII') as caught:
      env_client.Credentials(token=bad)
    assert bad not in str(caught.value)


# -- From a configuration ------------------------------------------------------


def configured(served, **changes):
  config = quickstart.get_config('smoke')
  config.env.address = served.address
  for key, value in changes.items():
    config.env[key] = value
  config_lib.check(config, 1)
  return build.Environment(config)


def test_a_configuration_names_the_files(serve, pem):
  served = serve(
    *own_flags(pem),
    f'--tls-client-ca={pem("ca")}',
    f'--token-file={pem("tokens")}',
  )
  files = {
    'tls': True,
    'tls_ca': pem('ca'),
    'tls_cert': pem('client_cert'),
    'tls_key': pem('client_key'),
    'token_file': pem('tokens'),
  }
  with configured(served, **files) as environment:
    assert len(environment.tasks('train')) == 192
    assert environment.description.max_action_bytes == 16384
  with pytest.raises(ConnectionError, match='env.token_file'):
    configured(served, **files | {'token_file': ''}).__enter__()


def test_a_service_that_takes_only_short_actions_is_refused(serve):
  served = serve('--max-action-bytes=1000')
  with pytest.raises(config_lib.ConfigError) as caught:
    configured(served).__enter__()
  assert 'takes actions of 1000 bytes' in str(caught.value)
  assert '--max-action-bytes=4096 or more' in str(caught.value)


def test_a_step_that_hangs_is_the_service_s_to_judge(monkeypatch):
  """It replaces the worker at its deadline, before the client gives up."""
  monkeypatch.setenv('PYTHONPATH', str(FAULTY))
  config = quickstart.get_config('smoke')
  config.env.name = 'faulty'
  config.env.workers = 1
  config.env.step_timeout_s = 2.0
  with build.Environment(config) as environment:
    client = environment.client
    client.retries = 0

    async def hang():
      session = await begun(client, faulty())
      pid = int((await session.step('pid')).text)
      with pytest.raises(env_client.EnvFault) as caught:
        await session.step('sleep 1000')
      gone = env_processes.all_gone([pid])
      return str(caught.value), gone

    told, gone = environment.run(hang())
  assert 'ABORTED' in told and 'step took over 2 s' in told
  assert gone


# -- A local service that hangs ------------------------------------------------


def test_a_local_service_that_hangs_is_started_again(monkeypatch, caplog):
  monkeypatch.setattr(env_service, '_HEALTH_EVERY_S', 0.2)
  monkeypatch.setattr(env_service, '_HEALTH_DEADLINE_S', 0.5)
  with env_service.LocalService('toy', 1) as running:
    first, address = running.pid, running.address

    async def stall(count):
      if count == 2:
        os.kill(first, signal.SIGSTOP)

    texts, session = with_client(
      address, lambda client: play(client, between=stall)
    )
    assert running.pid != first and running.address == address
    assert env_processes.all_gone([first])
  assert texts == direct() and session.faults >= 1
  assert 'left 5 health checks in a row unanswered' in caplog.text


def test_a_local_service_that_is_well_is_left_alone(monkeypatch, caplog):
  """It misses more checks than would be borne in a row, but not in a row."""
  monkeypatch.setattr(env_service, '_HEALTH_EVERY_S', 0.05)
  monkeypatch.setattr(env_service, '_HEALTH_DEADLINE_S', 0.2)
  monkeypatch.setattr(env_service, '_HEALTH_MISSES', 20)  # 5 s in a row.
  answers = collections.Counter()
  whole = env_service._answers

  def answered(stub):
    answer = whole(stub)
    answers[answer] += 1
    return answer

  monkeypatch.setattr(env_service, '_answers', answered)

  def wait_for(answer, more):
    enough = answers[answer] + more
    until_s = time.monotonic() + 60
    while answers[answer] < enough and time.monotonic() < until_s:
      time.sleep(0.01)

  with env_service.LocalService('toy', 1) as running:
    first = running.pid
    while answers[False] < 50:
      wait_for(True, 1)
      os.kill(first, signal.SIGSTOP)  # Not for long enough.
      wait_for(False, 5)
      os.kill(first, signal.SIGCONT)
    wait_for(True, 1)
    assert running.pid == first
  assert 'hangs' not in caplog.text and 'died' not in caplog.text


# Takes connections no more, and does not end; the next one is well.
DEAF = """
import os, socket, sys, time
from envs_server import serve
mark, *flags = sys.argv[1:]
if os.path.exists(mark):
  serve.main(flags)
open(mark, 'w').close()
with socket.socket() as listening:
  listening.bind(('127.0.0.1', 0))
  print('listening on 127.0.0.1:%d' % listening.getsockname()[1], flush=True)
time.sleep(1e6)
"""


def test_a_local_service_that_closed_its_port_is_started_again(
  monkeypatch, tmp_path, caplog
):
  monkeypatch.setattr(env_service, '_HEALTH_EVERY_S', 0.1)
  monkeypatch.setattr(env_service, '_HEALTH_DEADLINE_S', 0.5)
  running = env_service.LocalService('toy', 1)
  running._command = (
    *(sys.executable, '-c', DEAF, str(tmp_path / 'mark')),
    *('--env=toy', '--exit-with-parent'),
  )
  with running:
    first = running.pid
    texts, _ = with_client(running.address, play)
    assert running.pid != first and env_processes.all_gone([first])
  assert texts == direct()
  assert 'left 5 health checks in a row unanswered' in caplog.text
