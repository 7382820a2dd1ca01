"""Sets of ScienceWorld's task types, and the 200 tasks that stand in."""

import asyncio
import collections
import json

import grpc
import pytest

from envs_server import (
  env,
  sciworld,
  sciworld_sets,
  text_env_pb2,
  text_env_pb2_grpc,
)
from planpo_jax import env_client, env_service, tasks

SPLITS = ('train', 'dev', 'test', 'agentgym_standin')
COLUMNS = {
  'measure': 53,
  'test-cond': 83,
  'find': 44,
  'chem-mix': 5,
  'lifespan': 15,
}


@pytest.fixture(scope='module')
def service():
  with env_service.LocalService('sciworld', 1) as running:
    yield running


def ask(service, body):
  """Runs `await body(client)`."""

  async def run():
    client = env_client.EnvClient(service.address)
    await client.connect()
    try:
      return await body(client)
    finally:
      await client.close()

  return asyncio.run(run())


def test_sets_are_described_and_listed(service):
  async def body(client):
    described = await client.describe()
    listed = {
      name: await client.list_tasks('train', (name,)) for name in described.sets
    }
    return described, listed, await client.list_tasks('train')

  described, listed, everything = ask(service, body)
  assert set(described.sets) == {'all30', 'agentgym23', *COLUMNS}
  for name, types in described.sets.items():
    assert len(set(types)) == len(types)
    # Every task of these types and no other, in the order of the catalog.
    assert listed[name] == [t for t in everything if t.name in types]
  assert listed['all30'] == everything
  assert len(set(described.task_names)) == 30


def test_agentgym23_leaves_out_plants_planes_and_genetics(service):
  described = ask(service, lambda client: client.describe())
  played = described.sets['agentgym23']
  assert len(played) == 23
  left = set(described.task_names) - set(played)
  assert left == {
    name
    for name in described.task_names
    if name.startswith(('grow-', 'inclined-plane-', 'mendelian-'))
  }
  assert len(left) == 7
  of_columns = [t for name in COLUMNS for t in described.sets[name]]
  assert len(set(of_columns)) == len(of_columns) == 15
  assert set(of_columns) < set(played)


def test_types_and_sets_mix_without_duplicates(service):
  names = ('find-plant', 'lifespan', 'find', 'boil', 'boil')

  async def body(client):
    return await client.list_tasks('dev', names), await client.list_tasks('dev')

  mixed, everything = ask(service, body)
  wanted = {'boil', *sciworld_sets.COLUMNS['find']}
  wanted |= set(sciworld_sets.COLUMNS['lifespan'])
  assert mixed == [t for t in everything if t.name in wanted]
  assert len(set(mixed)) == len(mixed)


def test_unknown_name_lists_sets_and_types(service):
  for names in (('meassure',), ('measure', 'boyl')):
    with pytest.raises(ValueError, match=names[-1]) as caught:
      ask(service, lambda client, names=names: client.list_tasks('dev', names))
    told = str(caught.value)
    for known in (*COLUMNS, 'all30', 'agentgym23', *sciworld_sets.AGENTGYM23):
      assert repr(known) in told


def test_a_catalog_without_sets_knows_its_types_alone():
  catalog = env.Catalog('1', '', {'train': {'a': range(2), 'b': range(1)}})
  assert [t.name for t in catalog.tasks('x', 'train', ['b', 'a'])] == [
    'a',
    'a',
    'b',
  ]
  with pytest.raises(env.TaskError, match="'c'; sets: none; types: 'a', 'b'"):
    catalog.tasks('x', 'train', ['a', 'c'])


def test_stand_in_has_the_proportions_of_the_published_table(service):
  async def body(client):
    names = [*COLUMNS, 'agentgym23']
    listed = {
      n: await client.list_tasks('agentgym_standin', (n,)) for n in names
    }
    test = {(t.name, t.index) for t in await client.list_tasks('test')}
    return await client.describe(), listed, test

  described, listed, test = ask(service, body)
  assert described.splits['agentgym_standin'] == 200
  assert {n: len(listed[n]) for n in COLUMNS} == COLUMNS
  drawn = listed['agentgym23']
  assert len({(t.name, t.index) for t in drawn}) == 200
  assert {(t.name, t.index) for t in drawn} <= test
  # Even over the types of a column.
  counts = collections.Counter(t.name for t in drawn)
  for column in COLUMNS:
    shares = [counts[name] for name in sciworld_sets.COLUMNS[column]]
    assert max(shares) - min(shares) <= 1
  # The same tasks each time, even over the variations 93 to 124.
  assert [t.index for t in drawn if t.name == 'lifespan-longest-lived'] == [
    93,
    99,
    105,
    112,
    118,
  ]


def test_types_of_no_column_are_empty_and_listed_as_such(service):
  async def body(client):
    empty = await client.list_tasks('agentgym_standin', ('boil', 'grow-plant'))
    partly = await client.list_tasks('agentgym_standin', ('boil', 'lifespan'))
    return empty, partly

  empty, partly = ask(service, body)
  assert empty == []
  assert len(partly) == 15
  chosen = collections.Counter(t.name for t in tasks.spread(partly, 7))
  assert sorted(chosen.values()) == [2, 2, 3]
  with pytest.raises(ValueError, match='no tasks to evaluate on'):
    tasks.spread(empty, 7)
  with grpc.insecure_channel(service.address) as channel:
    reply = text_env_pb2_grpc.TextEnvStub(channel).ListTasks(
      text_env_pb2.ListTasksRequest(
        split='agentgym_standin', names=['agentgym23'], page_size=7
      )
    )
  assert len(reply.tasks) == 7 and reply.next_page_token


def test_every_split_has_every_type_in_the_same_order(service):
  """A type whose list is empty is known all the same: it is told apart."""
  with pytest.raises(ValueError, match='boil has no index 0 in split'):
    task = env_client.episodes.Task('sciworld', 'agentgym_standin', 0, 'boil')

    async def body(client):
      session = client.session(task, step_limit=1)
      try:
        await session.reset()
      finally:
        await session.close()

    ask(service, body)
  described = ask(service, lambda client: client.describe())
  assert set(described.splits) == set(SPLITS)
  test = {name: range(4) for name in ('lifespan-longest-lived', 'x', 'boil')}
  drawn = sciworld_sets.stand_in(test)
  assert list(drawn) == list(test)
  assert drawn['x'] == drawn['boil'] == ()


def test_own_list_of_agentgym_becomes_two_splits(tmp_path, monkeypatch):
  path = tmp_path / 'sciworld_test.json'
  # boil has 30 variations, melt 30: 29 and 30 are the last and the first.
  ids = (0, 29, 30, 4638)
  path.write_text(json.dumps([{'item_id': f'sciworld_{i}'} for i in ids]))
  monkeypatch.setenv('AGENTGYM_SCIWORLD_TEST', str(path))

  async def body(client):
    described = await client.describe()
    listed = {
      split: [
        (t.name, t.index) for t in await client.list_tasks(split, ('all30',))
      ]
      for split in ('agentgym_test', 'agentgym_train')
    }
    return described.splits, listed

  with env_service.LocalService('sciworld', 1) as running:
    splits, listed = ask(running, body)
  assert sorted(listed['agentgym_test']) == [
    ('boil', 0),
    ('boil', 29),
    ('identify-life-stages-2', 9),
    ('melt', 0),
  ]
  # 4,639 variations of the 23 types.
  assert splits['agentgym_test'] == 4 and splits['agentgym_train'] == 4635
  left = set(listed['agentgym_train'])
  assert not left & set(listed['agentgym_test'])
  assert {name for name, _ in left} == set(sciworld_sets.AGENTGYM23)


@pytest.mark.parametrize(
  'text, told',
  [
    ('[', 'is not a list of'),
    ('[{"item": 1}]', 'is not a list of'),
    ('[{"item_id": "alfworld_1"}]', "the item 'alfworld_1'; items are"),
    ('[{"item_id": "sciworld_5"}]', 'sciworld_0 to sciworld_4'),
  ],
)
def test_list_that_is_none_is_named(tmp_path, text, told, monkeypatch):
  path = tmp_path / 'list.json'
  path.write_text(text)
  monkeypatch.setattr(sciworld_sets, 'AGENTGYM23', ('a', 'b'))
  with pytest.raises(RuntimeError, match=told):
    sciworld_sets.read_list(path, {'a': 2, 'b': 3})


def test_list_that_is_not_there_is_told_before_anything_starts(monkeypatch):
  monkeypatch.setenv('AGENTGYM_SCIWORLD_TEST', '/nowhere/list.json')
  with pytest.raises(RuntimeError, match='names no file'):
    sciworld.check()
