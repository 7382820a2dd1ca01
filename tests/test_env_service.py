"""The environment service and its client, with real processes."""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import env_processes
import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from envs_server import env, serve, text_env_pb2, text_env_pb2_grpc, toy
from planpo_jax import env_client, env_service, episodes

TASK = episodes.Task('toy', 'train', 1, 'deliver')


@pytest.fixture(scope='module')
def service():
  with env_service.LocalService('toy', 2) as running:
    yield running


@pytest.fixture
def single():
  """A service with one worker, which the test may break."""
  with env_service.LocalService('toy', 1) as running:
    yield running


def with_client(address, body, **options):
  """Runs `await body(client)`."""

  async def run():
    client = env_client.EnvClient(address, **options)
    await client.connect()
    try:
      return await body(client)
    finally:
      await client.close()

  return asyncio.run(run())


def raw(address, requests):
  """Replies to the given messages of Play, and the status code and details."""

  def feed():
    yield from requests

  replies = []
  with grpc.insecure_channel(address) as channel:
    call = text_env_pb2_grpc.TextEnvStub(channel).Play(feed())
    try:
      for reply in call:
        replies.append(reply)
    except grpc.RpcError:
      pass
    return replies, call.code(), call.details()


def start(step_limit=0, **changes):
  fields = {'env': 'toy', 'split': 'train', 'index': 1, 'name': 'deliver'}
  task = text_env_pb2.Task(**fields | changes)
  return text_env_pb2.PlayRequest(
    start=text_env_pb2.Start(task=task, step_limit=step_limit, want_expert=True)
  )


def act(turn, action):
  return text_env_pb2.PlayRequest(
    act=text_env_pb2.Act(turn=turn, action=action)
  )


def solution():
  return direct()[0].expert_actions


def direct():
  """Observations of TASK without any service."""
  game = toy.make_env()
  task = env.Task(TASK.env, TASK.split, TASK.index, TASK.name)
  seen = [game.reset(task, expert=True)]
  return seen + [game.step(action) for action in seen[0].expert_actions]


async def play(client, task=TASK, *, step_limit=60, between=None):
  """Plays the expert's actions; returns observations and the session.

  `between` is awaited with the number of actions taken, before each action.
  """
  session = client.session(task, step_limit=step_limit, expert=True)
  try:
    seen = [await session.reset()]
    for count, action in enumerate(seen[0].expert_actions):
      if between is not None:
        await between(count)
      seen.append(await session.step(action))
      if seen[-1].ending is not None:
        break
  finally:
    await session.close()
  return seen, session


# -- The wire ------------------------------------------------------------------


def test_round_trip_equals_the_environment(service):
  seen, session = with_client(service.address, play)
  expected = direct()
  assert [o.text for o in seen] == [o.text for o in expected]
  assert [o.score for o in seen] == [o.score for o in expected]
  assert seen[0].goal == expected[0].goal
  assert seen[0].expert_actions == expected[0].expert_actions
  assert seen[0].reward == 0.0
  assert sum(o.reward for o in seen) == 100.0
  assert [o.success for o in seen] == [False] * (len(seen) - 1) + [True]
  assert [o.ending for o in seen[:-1]] == [None] * (len(seen) - 1)
  assert seen[-1].ending is episodes.Ending.TERMINATED
  assert session.faults == 0
  assert not any(o.admissible for o in seen)


def test_admissible_actions_only_when_asked_for(service):
  async def body(client):
    session = client.session(TASK, step_limit=9, admissible=True)
    seen = [await session.reset(), await session.step('look')]
    await session.close()
    return seen

  for seen in with_client(service.address, body):
    assert 'look' in seen.admissible
    assert not seen.expert_actions


def test_describe_and_list(service):
  async def body(client):
    return (
      await client.describe(),
      await client.list_tasks('train'),
      await client.list_tasks('test', ('deliver', 'fetch')),
    )

  described, train, test = with_client(service.address, body)
  assert described.name == 'toy'
  assert described.splits == {'train': 192, 'dev': 96, 'test': 96}
  assert described.task_names == ('fetch', 'unlock', 'deliver')
  assert 'take THING' in described.action_format
  assert described.workers == 2
  assert train[65] == episodes.Task('toy', 'train', 1, 'unlock')
  assert len(train) == len(set(train)) == 192
  assert [t.name for t in test] == ['fetch'] * 32 + ['deliver'] * 32


def test_pages_join_to_the_whole_list(service):
  with grpc.insecure_channel(service.address) as channel:
    stub = text_env_pb2_grpc.TextEnvStub(channel)
    request = text_env_pb2.ListTasksRequest(split='dev', page_size=50)
    first = stub.ListTasks(request)
    assert len(first.tasks) == 50 and first.next_page_token
    request.page_token = first.next_page_token
    second = stub.ListTasks(request)
    assert len(second.tasks) == 46 and not second.next_page_token
    whole = stub.ListTasks(text_env_pb2.ListTasksRequest(split='dev'))
    assert [*first.tasks, *second.tasks] == list(whole.tasks)
    request.page_token = 'next'
    with pytest.raises(grpc.RpcError) as caught:
      stub.ListTasks(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'next'" in caught.value.details()


def test_repeated_turn_does_not_act_twice(service):
  thing = next(a for a in solution() if a.startswith('take '))
  way = solution()[: solution().index(thing)]
  forth = [act(turn + 1, action) for turn, action in enumerate(way)]
  turn = len(way) + 1
  replies, code, _ = raw(
    service.address,
    [start(), *forth, act(turn, thing), act(turn, thing), act(1, 'enter well')],
  )
  assert code == grpc.StatusCode.OK
  assert (
    replies[turn].observation == f'You {thing.replace("take", "take the")}.'
  )
  # Taken twice, the second would read "You cannot do that here."
  assert replies[turn + 1] == replies[turn]
  assert replies[turn + 2] == replies[1]


def test_end_is_answered_again_but_not_passed(service):
  acts = [act(turn + 1, a) for turn, a in enumerate(solution())]
  last = len(acts)
  replies, code, details = raw(
    service.address,
    [start(), *acts, acts[-1], act(last + 1, 'look')],
  )
  assert code == grpc.StatusCode.FAILED_PRECONDITION
  assert 'has ended' in details
  assert len(replies) == last + 2
  assert replies[-1] == replies[-2]
  assert replies[-1].ending == text_env_pb2.TERMINATED


@pytest.mark.parametrize(
  'requests, code, told',
  [
    ([act(1, 'look')], 'INVALID_ARGUMENT', 'must be a Start'),
    ([start(), start()], 'INVALID_ARGUMENT', 'must be an Act'),
    ([start(), act(0, 'look')], 'INVALID_ARGUMENT', 'of turn 1 or more'),
    ([start(), act(2, 'look')], 'FAILED_PRECONDITION', 'turns go one by one'),
    ([start(step_limit=-1)], 'INVALID_ARGUMENT', 'step_limit is -1'),
    ([start(env='sciworld')], 'INVALID_ARGUMENT', "service plays 'toy'"),
    ([start(split='x')], 'INVALID_ARGUMENT', "known: 'train', 'dev', 'test'"),
    ([start(name='x')], 'INVALID_ARGUMENT', "'fetch', 'unlock', 'deliver'"),
    ([start(index=64)], 'INVALID_ARGUMENT', 'it has 0 to 63'),
    ([start(options={'a': 'b'})], 'INVALID_ARGUMENT', "unknown option 'a'"),
  ],
)
def test_bad_messages_are_named(service, requests, code, told):
  _, got, details = raw(service.address, requests)
  assert got == grpc.StatusCode[code]
  assert told in details


def test_step_limit_truncates_and_is_no_success(service):
  async def body(client):
    seen, session = await play(client, step_limit=2)
    with pytest.raises(RuntimeError, match='ended after 2 actions'):
      await session.step('look')
    return seen

  seen = with_client(service.address, body)
  assert [o.ending for o in seen] == [
    None,
    None,
    episodes.Ending.TRUNCATED,
  ]
  assert not seen[-1].success


def test_winning_with_the_last_step_is_a_win(service):
  limit = len(solution())
  seen, _ = with_client(
    service.address, lambda client: play(client, step_limit=limit)
  )
  assert seen[-1].ending is episodes.Ending.TERMINATED
  assert seen[-1].success


def test_health_and_reflection(service):
  with grpc.insecure_channel(service.address) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ('', 'planpo.TextEnv'):
      answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
      assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services='')
    answer = next(stub.ServerReflectionInfo(iter([request])))
    names = {s.name for s in answer.list_services_response.service}
  assert {'planpo.TextEnv', health.SERVICE_NAME} <= names


# -- The pool ------------------------------------------------------------------


def test_more_episodes_than_workers_wait_their_turn(single):
  async def body(client):
    holding = client.session(TASK, step_limit=0)
    await holding.reset()
    order = []

    async def queued(index):
      await play(client)
      order.append(index)

    waiting = []
    for index in range(4):
      waiting.append(asyncio.ensure_future(queued(index)))
      while (await client.describe()).waiting != index + 1:
        await asyncio.sleep(0.01)
    assert (await client.describe()).busy == 1
    await holding.close()
    await asyncio.gather(*waiting)
    return order

  assert with_client(single.address, body) == [0, 1, 2, 3]


def test_worker_is_free_once_a_stream_breaks_or_an_episode_ends(service):
  async def idle(client):
    for _ in range(200):
      if (await client.describe()).busy == 0:
        return True
      await asyncio.sleep(0.01)
    return False

  async def body(client):
    broken = client.session(TASK, step_limit=0)
    await broken.reset()
    assert (await client.describe()).busy == 1
    await broken.close()
    assert await idle(client)
    ended = client.session(TASK, step_limit=1)
    await ended.reset()
    await ended.step('look')
    assert await idle(client)
    await ended.close()

  with_client(service.address, body)


def test_worker_has_neither_grpc_nor_jax(service):
  workers = env_processes.workers_of(service.pid)
  assert len(workers) == 2
  for pid in workers:
    loaded = pathlib.Path(f'/proc/{pid}/maps').read_text()
    assert 'cygrpc' not in loaded and 'jaxlib' not in loaded


def test_idle_worker_that_is_killed_is_replaced(single):
  (victim,) = env_processes.workers_of(single.pid)
  os.kill(victim, signal.SIGKILL)
  seen, _ = with_client(single.address, play)
  assert seen[-1].success
  assert env_processes.workers_of(single.pid) != [victim]


# -- Bounds --------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch):
  """Starts a service of the faulty environment with the given flags."""
  more = str(pathlib.Path(__file__).parent / 'more_envs')
  monkeypatch.setenv('PYTHONPATH', more)
  with contextlib.ExitStack() as stack:
    yield lambda workers, *options: stack.enter_context(
      env_service.LocalService('faulty', workers, options=options)
    ).address


def begin(index=2):
  task = text_env_pb2.Task(env='faulty', split='train', index=index, name='any')
  return text_env_pb2.PlayRequest(start=text_env_pb2.Start(task=task))


def test_action_that_is_too_long_is_refused_and_not_acted(faulty):
  address = faulty(1, '--max-action-bytes=10')
  replies, code, details = raw(address, [begin(), act(1, 'é' * 5)])
  assert code == grpc.StatusCode.OK and replies[1].observation == 'é' * 5
  replies, code, details = raw(
    address, [begin(), act(1, 'count'), act(2, 'é' * 5 + 'x'), act(2, 'count')]
  )
  assert len(replies) == 2
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert 'turn 2 has 11 bytes; at most 10 are taken (--max-action' in details


def test_observation_that_is_too_long_is_final(faulty):
  address = faulty(1, '--max-message-bytes=20000')
  replies, code, details = raw(address, [begin(), act(1, 'say 30000')])
  assert len(replies) == 1
  assert code == grpc.StatusCode.OUT_OF_RANGE
  assert 'more than --max-message-bytes=20000' in details
  # The worker is well.
  replies, code, _ = raw(address, [begin(), act(1, 'say 15000')])
  assert len(replies[1].observation) == 15000


def test_message_that_is_too_long_is_refused_unread(faulty):
  address = faulty(1)
  _, code, details = raw(address, [begin(), act(1, 'x' * (2 << 20))])
  assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
  assert '1048576' in details
  _, code, _ = raw(address, [begin(), act(1, 'well')])
  assert code == grpc.StatusCode.OK


def test_full_queue_is_told(faulty):
  address = faulty(1, '--queue=0')
  with grpc.insecure_channel(address) as channel:
    stub = text_env_pb2_grpc.TextEnvStub(channel)
    over = threading.Event()

    def hold():
      yield begin()
      over.wait(30)

    held = stub.Play(hold())
    next(held)
    _, code, details = raw(address, [begin()])
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 'no more may (--queue)' in details
    over.set()
    assert not list(held)
  _, code, _ = raw(address, [begin()])
  assert code == grpc.StatusCode.OK


def test_episode_that_idles_loses_its_worker(faulty):
  address = faulty(1, '--idle-s=0.5')
  with grpc.insecure_channel(address) as channel:
    stub = text_env_pb2_grpc.TextEnvStub(channel)
    over = threading.Event()

    def hold():
      yield begin()
      over.wait(30)

    held = stub.Play(hold())
    next(held)
    with pytest.raises(grpc.RpcError) as caught:
      next(held)
    over.set()
  assert caught.value.code() == grpc.StatusCode.ABORTED
  assert 'no act came for 0.5 s' in caught.value.details()
  # Time that the environment takes does not count.
  replies, code, _ = raw(address, [begin(), act(1, 'sleep 1.5')])
  assert code == grpc.StatusCode.OK and len(replies) == 2


def test_only_the_last_replies_are_given_again(faulty):
  address = faulty(1)
  acts = [act(turn, 'count') for turn in range(1, 21)]
  replies, code, details = raw(
    address, [begin(), *acts, act(5, 'count'), act(4, 'count')]
  )
  assert [r.observation for r in replies[1:21]] == [
    str(i) for i in range(1, 21)
  ]
  assert len(replies) == 22 and replies[21] == replies[5]
  assert code == grpc.StatusCode.FAILED_PRECONDITION
  assert 'only the last 16 replies are kept' in details


def test_what_no_message_can_hold_is_replaced(faulty):
  replies, code, _ = raw(faulty(1), [begin(), act(1, 'odd'), act(2, 'x')])
  assert code == grpc.StatusCode.OK and len(replies) == 3
  assert replies[1].observation == '? \0 é'
  assert dict(replies[1].info) == {'?': 'x'}


def test_flags_of_the_pool_reach_it(faulty):
  address = faulty(1, '--max-episodes=2', '--memory-mb=150')

  def pid(*actions):
    replies, code, _ = raw(
      address, [begin(), *(act(i + 1, a) for i, a in enumerate(actions))]
    )
    assert code == grpc.StatusCode.OK
    return replies[-1].observation

  first, second, third = (pid('pid') for _ in range(3))
  assert first == second != third
  # Seen by the next measurement, which is due every few seconds.
  _, code, details = raw(
    address, [begin(), act(1, 'hold 400'), act(2, 'sleep 20')]
  )
  assert code == grpc.StatusCode.ABORTED
  assert '(memory): it held 4' in details


@pytest.mark.parametrize(
  'kind, told',
  [
    ('none', 'step returned NoneType, not an env.Observation'),
    ('bytes', "step returned b'x' where a str must be"),
    ('nan', 'step returned the score nan'),
    ('info', 'step returned 1 where a str must be'),
  ],
)
def test_answer_that_is_none_is_the_fault_of_its_environment(
  faulty, kind, told
):
  _, code, details = raw(faulty(1), [begin(), act(1, f'answer {kind}')])
  assert code == grpc.StatusCode.ABORTED
  assert '(error): ' in details and told in details


def test_numbers_of_numpy_are_numbers(faulty):
  replies, code, _ = raw(faulty(1), [begin(), act(1, 'answer numpy')])
  assert code == grpc.StatusCode.OK
  assert (replies[1].score, replies[1].success) == (2.5, True)


@pytest.mark.parametrize(
  'body, told',
  [
    ('return None', 'catalog returned NoneType, not an env.Catalog'),
    ("return env.Catalog('1', '', {})", 'it has no split'),
    (
      "return env.Catalog('1', '', {'a': {'t': [0]}, 'b': {'u': [0]}})",
      "the split 'b' has the types ('u',), another one ('t',)",
    ),
    (
      "return env.Catalog('1', '', {'a': {'t': [0, 2**40]}})",
      "t of split 'a' has the index 1099511627776",
    ),
    (
      "return env.Catalog('1', '', {'a': {'t': [0]}}, sets={'s': ('v',)})",
      "the set 's' of ('v',) must hold types",
    ),
    ("raise OSError('no data')", 'broken: OSError: no data'),
  ],
)
def test_catalog_that_is_none_is_told_at_the_start(
  tmp_path, monkeypatch, body, told
):
  folder = tmp_path / 'envs_server'
  folder.mkdir()
  (folder / 'broken.py').write_text(
    'from envs_server import env\n'
    'class Broken:\n'
    f'  def catalog(self):\n    {body}\n'
    '  def close(self): pass\n'
    'def make_env(): return Broken()\n'
  )
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  with pytest.raises(RuntimeError) as caught:
    env_service.LocalService('broken', 1).start()
  assert told in str(caught.value)


def test_ended_episode_keeps_its_last_reply_alone(service):
  acts = [act(turn + 1, a) for turn, a in enumerate(solution())]
  replies, code, details = raw(
    service.address, [start(), *acts, acts[-1], acts[-2]]
  )
  assert replies[-1] == replies[-2] and len(replies) == len(acts) + 2
  assert code == grpc.StatusCode.FAILED_PRECONDITION
  assert 'are kept' in details


def test_stream_that_never_starts_is_ended(faulty):
  address = faulty(1, '--reset-deadline-s=0.5')
  with grpc.insecure_channel(address) as channel:
    over = threading.Event()

    def nothing():
      over.wait(30)
      yield from ()

    with pytest.raises(grpc.RpcError) as caught:
      next(text_env_pb2_grpc.TextEnvStub(channel).Play(nothing()))
    over.set()
  assert caught.value.code() == grpc.StatusCode.ABORTED
  assert 'no message came for 0.5 s' in caught.value.details()


def test_names_and_options_may_be_given_once_only(service):
  _, code, details = raw(
    service.address, [start(options={'a': 'b,' * 100_000})]
  )
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  catalog = env.Catalog(
    '1', '', {'train': {'a': range(3)}}, options={'o': ('x', 'y')}
  )
  catalog.check(env.Task('e', 'train', 0, 'a', options={'o': 'y,x'}))
  with pytest.raises(env.TaskError, match="'o' has 3 values"):
    catalog.check(env.Task('e', 'train', 0, 'a', options={'o': 'x,x,x'}))


def test_health_tells_of_a_service_without_workers_and_of_its_end(
  tmp_path, monkeypatch
):
  """An environment that can be built as long as a file is there."""
  folder = tmp_path / 'envs_server'
  folder.mkdir()
  (folder / 'fragile.py').write_text(
    'import pathlib\n'
    'from envs_server.toy import Toy\n'
    'def make_env():\n'
    f'  pathlib.Path({str(tmp_path)!r}, "data").read_text()\n'
    '  return Toy()\n'
  )
  (tmp_path / 'data').touch()
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  with env_service.LocalService('fragile', 1) as running:
    with grpc.insecure_channel(running.address) as channel:
      stub = health_pb2_grpc.HealthStub(channel)
      request = health_pb2.HealthCheckRequest(service='planpo.TextEnv')
      status = health_pb2.HealthCheckResponse
      assert stub.Check(request).status == status.SERVING
      (tmp_path / 'data').unlink()
      (victim,) = env_processes.workers_of(running.pid)
      os.kill(victim, signal.SIGKILL)
      assert env_processes.wait_for(
        lambda: stub.Check(request).status == status.NOT_SERVING
      )
      described = text_env_pb2_grpc.TextEnvStub(channel).Describe(
        text_env_pb2.DescribeRequest()
      )
      assert (described.workers, described.ready) == (1, 0)
      (tmp_path / 'data').touch()
      assert env_processes.wait_for(
        lambda: stub.Check(request).status == status.SERVING, 30.0
      )


def test_long_words_are_cut_in_errors(service):
  _, code, details = raw(service.address, [start(split='x' * 5000)])
  assert code == grpc.StatusCode.INVALID_ARGUMENT
  assert details.startswith("unknown split 'xxx")
  assert details.endswith('[cut]') and len(details) < 1100


def test_a_page_has_its_limit(faulty):
  with grpc.insecure_channel(faulty(1)) as channel:
    stub = text_env_pb2_grpc.TextEnvStub(channel)
    request = text_env_pb2.ListTasksRequest(split='train', page_size=1 << 30)
    reply = stub.ListTasks(request)
  assert len(reply.tasks) == 1000 and not reply.next_page_token


@pytest.mark.parametrize('token', ['-1', '١', '9' * 5000, '1000', ' 1'])
def test_odd_page_tokens_are_refused(service, token):
  with grpc.insecure_channel(service.address) as channel:
    stub = text_env_pb2_grpc.TextEnvStub(channel)
    request = text_env_pb2.ListTasksRequest(split='train', page_token=token)
    with pytest.raises(grpc.RpcError) as caught:
      stub.ListTasks(request)
  assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_reset_that_hangs_costs_the_worker_and_says_so(faulty):
  address = faulty(1, '--reset-deadline-s=1')
  _, code, details = raw(address, [begin(1)])
  assert code == grpc.StatusCode.ABORTED
  assert 'lost at turn 0 (deadline): reset took over 1 s' in details
  _, code, _ = raw(address, [begin(2)])
  assert code == grpc.StatusCode.OK


def test_turn_of_a_lost_worker_is_named(faulty):
  _, code, details = raw(faulty(1), [begin(), act(1, 'a'), act(2, 'exit 3')])
  assert code == grpc.StatusCode.ABORTED
  assert 'lost at turn 2 (died): the worker process exited with' in details


# -- Recovery ------------------------------------------------------------------


def test_killed_worker_changes_nothing(single):
  async def murder(count):
    if count == 2:
      (victim,) = env_processes.workers_of(single.pid)
      os.kill(victim, signal.SIGKILL)

  async def body(client):
    return await play(client), await play(client, between=murder)

  (unbroken, _), (broken, session) = with_client(single.address, body)
  assert broken == unbroken
  assert session.faults == 1


def test_killed_service_is_back_at_its_address_and_changes_nothing():
  with env_service.LocalService('toy', 2) as running:
    address, first = running.address, running.pid

    async def murder(count):
      if count == 2:
        os.kill(running.pid, signal.SIGKILL)

    async def body(client):
      return await play(client), await play(client, between=murder)

    orphans = env_processes.descendants(first)
    (unbroken, _), (broken, session) = with_client(address, body)
    assert broken == unbroken
    assert session.faults >= 1
    assert running.address == address
    assert running.pid != first
    assert env_processes.all_gone(orphans)
    last = env_processes.descendants(running.pid) | {running.pid}
  assert env_processes.all_gone(last)


def test_hung_worker_is_killed_by_the_service():
  with env_service.LocalService(
    'toy', 1, options=('--step-deadline-s=0.5',)
  ) as running:

    async def stall(count):
      if count == 2:
        (victim,) = env_processes.workers_of(running.pid)
        os.kill(victim, signal.SIGSTOP)

    (victim,) = env_processes.workers_of(running.pid)
    seen, session = with_client(
      running.address, lambda client: play(client, between=stall)
    )
    assert not env_processes.alive(victim)
  assert [o.text for o in seen] == [o.text for o in direct()]
  assert session.faults == 1


def test_client_does_not_wait_past_its_deadline(service):
  stopped = []

  async def stall(count):
    if count == 2:
      for pid in env_processes.workers_of(service.pid)[:1]:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

  async def body(client):
    # Two at a time, so that one of them has the worker that stalls.
    return await asyncio.gather(play(client, between=stall), play(client))

  try:
    results = with_client(service.address, body, step_deadline_s=0.5)
  finally:
    for pid in stopped:
      os.kill(pid, signal.SIGCONT)
  for seen, _ in results:
    assert [o.text for o in seen] == [o.text for o in direct()]


def test_another_way_on_replay_is_a_fault(single):
  async def body(client):
    session = client.session(TASK, step_limit=0)
    await session.reset()
    await session.step('look')
    session._replies[1].observation = 'You are somewhere else.'
    (victim,) = env_processes.workers_of(single.pid)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(env_client.EnvFault) as caught:
      await session.step('look')
    await session.close()
    return str(caught.value)

  told = with_client(single.address, body)
  assert 'another way at turn 1' in told
  assert 'You are somewhere else.' in told


def test_service_that_stays_away_is_a_fault():
  server, address = serve_alone()

  async def body(client):
    session = client.session(TASK, step_limit=0)
    await session.reset()
    server.kill()
    server.wait()
    with pytest.raises(env_client.EnvFault) as caught:
      await session.step('look')
    with pytest.raises(ConnectionError, match=address):
      await client.describe()
    return str(caught.value)

  told = with_client(address, body, away_deadline_s=1.0)
  assert 'toy deliver train/1 at turn 1' in told
  assert f'no environment service at {address}' in told


def test_refused_task_is_an_error_at_once(service):
  async def body(client):
    session = client.session(
      episodes.Task('toy', 'train', 999, 'fetch'), step_limit=0
    )
    with pytest.raises(ValueError, match='it has 0 to 63'):
      await session.reset()
    assert session.faults == 0
    with pytest.raises(ValueError, match="known: 'train', 'dev', 'test'"):
      await client.list_tasks('valid')
    with pytest.raises(ValueError, match="types: 'fetch', 'unlock', 'deliver'"):
      await client.list_tasks('train', ('fetsch',))

  with_client(service.address, body)


def test_session_is_used_in_order(service):
  async def body(client):
    session = client.session(TASK, step_limit=0)
    with pytest.raises(RuntimeError, match='reset the session'):
      await session.step('look')
    await session.reset()
    with pytest.raises(RuntimeError, match='plays one episode'):
      await session.reset()
    await session.close()
    await session.close()

  with_client(service.address, body)


# -- Addresses and ends --------------------------------------------------------


def serve_alone(*flags):
  """Starts a service that nobody looks after; returns it and its address."""
  server = subprocess.Popen(
    [sys.executable, '-m', 'envs_server', '--env=toy', *flags],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(serve.__file__).parents[1],
  )
  line = server.stdout.readline()
  assert line.startswith('listening on 127.0.0.1:'), line
  return server, line.split()[-1]


def test_unreachable_address_is_named_in_time():
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))  # Bound but not listening: always refused.
    address = f'127.0.0.1:{taken.getsockname()[1]}'
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=address) as caught:
      asyncio.run(env_client.EnvClient(address).connect(timeout_s=1.0))
    assert time.monotonic() - began < 10.0
  assert 'python -m envs_server' in str(caught.value)


def test_service_of_another_kind_is_told_apart():
  async def body():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(
      health.aio.HealthServicer(), server
    )
    port = server.add_insecure_port('127.0.0.1:0')
    await server.start()
    with pytest.raises(ConnectionError, match='UNIMPLEMENTED'):
      await env_client.EnvClient(f'127.0.0.1:{port}').connect(5.0)
    await server.stop(None)

  asyncio.run(body())


def test_taken_port_is_named(monkeypatch, capfd):
  monkeypatch.setattr(serve, '_BIND_DEADLINE_S', 0.1)

  async def body():
    first, second = (grpc.aio.server(options=serve._OPTIONS) for _ in '12')
    port = await serve._bind(first, '127.0.0.1', 0, None)
    with pytest.raises(RuntimeError, match=f'127.0.0.1:{port} .*--port=0'):
      await serve._bind(second, '127.0.0.1', port, None)

  asyncio.run(body())
  # gRPC itself would fill the screen.
  assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_everything_in_order(number):
  server, address = serve_alone('--workers=2')
  everyone = env_processes.descendants(server.pid)

  async def body(client):
    session = client.session(TASK, step_limit=0)
    await session.reset()
    server.send_signal(number)
    assert await asyncio.to_thread(server.wait, 10.0) == 0
    await session.close()

  with_client(address, body)
  assert env_processes.all_gone(everyone, 2.0)


def test_killed_service_leaves_no_worker():
  server, _ = serve_alone('--workers=2')
  everyone = env_processes.descendants(server.pid)
  workers = env_processes.workers_of(server.pid)
  assert len(workers) == 2
  os.kill(workers[0], signal.SIGSTOP)  # Not even a hung one.
  server.kill()
  server.wait()
  assert env_processes.all_gone(everyone)


def test_killed_holder_of_a_local_service_leaves_nothing():
  holder = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import time\n'
      'from planpo_jax import env_service\n'
      "service = env_service.LocalService('toy', 2)\n"
      'service.start()\n'
      'print(service.pid, flush=True)\n'
      'time.sleep(600)\n',
    ],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(serve.__file__).parents[1],
  )
  server = int(holder.stdout.readline())
  everyone = env_processes.descendants(holder.pid)
  assert server in everyone and len(everyone) >= 3
  # Ctrl-C in the terminal of the holder must not reach the service.
  assert os.getpgid(server) != os.getpgid(holder.pid)
  holder.kill()
  holder.wait()
  assert env_processes.all_gone(everyone)


def test_stop_ends_everything_and_may_be_repeated():
  running = env_service.LocalService('toy', 2)
  running.start()
  everyone = env_processes.descendants(running.pid) | {running.pid}
  running.stop()
  assert env_processes.all_gone(everyone, 2.0)
  running.stop()


@pytest.mark.parametrize(
  'env_name, options, told',
  [
    ('alfword', (), "unknown environment 'alfword'; known: .*sciworld, .*toy"),
    ('toy', ('--workers=0',), "--workers: '0' must be at least 1"),
    ('toy', ('--step-deadline-s=nan',), "'nan' must be seconds above 0"),
    ('toy', ('--idle-s=inf',), "--idle-s: 'inf' must be seconds above 0"),
    ('toy', ('--queue=-1',), "--queue: '-1' must be 0 or a whole number"),
    ('toy', ('--metrics=9090',), "'9090' must be HOST:PORT"),
    (
      'toy',
      ('--max-action-bytes=1048000',),
      '--max-message-bytes=1048576 must',
    ),
    ('toy', ('--max-message-bytes=99999999999',), 'must be below 2147483648'),
    ('toy', ('--latency-ms=0,inf',), "'0,inf' must be LO,HI"),
    ('toy', ('--host=10.99.99.99', '--insecure'), 'give --host an address of'),
    ('toy', ('--latency-ms=5',), "'5' must be LO,HI in milliseconds"),
    ('toy', ('--latency-ms=9,5',), "'9,5' must be LO,HI"),
    ('toy', ('--prot=1',), 'unrecognized arguments: --prot=1'),
  ],
)
def test_bad_flags_are_named(env_name, options, told):
  with pytest.raises(RuntimeError, match=told):
    env_service.LocalService(env_name, 1, options=options).start()


def test_port_that_is_none_is_named(capsys):
  with pytest.raises(SystemExit):
    serve.main(['--env=toy', '--port=70000'])
  assert '--port=70000 must be from 0 to 65535' in capsys.readouterr().err


def test_latency_changes_nothing_but_time():
  tasks = [episodes.Task('toy', 'dev', i, 'unlock') for i in range(6)]

  async def body(client):
    return await asyncio.gather(*(play(client, task) for task in tasks))

  with (
    env_service.LocalService('toy', 3, options=('--latency-ms=0,20',)) as slow,
    env_service.LocalService('toy', 3) as fast,
  ):
    slowly = with_client(slow.address, body)
    quickly = with_client(fast.address, body)
  assert [seen for seen, _ in slowly] == [seen for seen, _ in quickly]


def test_metrics_on_loopback_are_plain_text_whatever_the_service_speaks(
  tmp_path,
):
  authority = trustme.CA()
  issued = authority.issue_cert('localhost')
  issued.private_key_pem.write_to_path(tmp_path / 'key.pem')
  issued.cert_chain_pems[0].write_to_path(tmp_path / 'cert.pem')
  server = subprocess.Popen(
    [sys.executable, '-m', 'envs_server', '--env=toy', '--metrics=127.0.0.1:0']
    + [f'--tls-cert={tmp_path}/cert.pem', f'--tls-key={tmp_path}/key.pem'],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(serve.__file__).parents[1],
  )
  try:
    assert server.stdout.readline().startswith('listening on 127.0.0.1:')
    address = server.stdout.readline().removeprefix('metrics on ').strip()
    with urllib.request.urlopen(
      f'http://{address}/metrics', timeout=10
    ) as page:
      text = page.read().decode()
  finally:
    server.terminate()
    server.wait()
  assert 'planpo_env_workers 1.0' in text
  assert 'planpo_env_faults_total{env="toy",kind="idle"} 0.0' in text
  assert '_created' not in text


def test_service_by_itself_has_the_versions_of_the_whole():
  root = pathlib.Path(serve.__file__).parents[1]
  whole = (root / 'requirements.txt').read_text().splitlines()
  alone = (root / 'envs_server/requirements.txt').read_text().splitlines()
  pins = [line for line in alone if not line.startswith('#')]
  assert len(pins) == 13
  assert set(pins) <= set(whole)
