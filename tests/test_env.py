"""Catalogs: what may be in them, and how they go through a pipe."""

import json

import pytest

from envs_server import child, env

MILLIONS = env.Numbers(range(1500, 9_000_000), (1500, 2000, 8_999_999))


def catalog(**indices):
  return env.Catalog(
    version='1', action_format='any', indices={'train': indices}
  )


def sent(whole):
  return json.loads(child._line({'value': child._plain(whole)}))['value']


@pytest.mark.parametrize(
  'found',
  [range(0), (), range(5), (0, 7), env.Numbers(range(9), (0, 3)), MILLIONS],
)
def test_a_catalog_comes_back_as_it_was(found):
  whole = catalog(any=found, none=range(0))
  whole.check_itself()
  again = child.catalog(sent(whole))
  assert again.indices['train']['any'] == found
  assert again.indices['train']['none'] == range(0)


class Unwalked(env.Numbers):
  def __iter__(self):
    raise AssertionError('somebody walks over all of them')


def test_millions_of_numbers_are_neither_walked_nor_written_out():
  whole = catalog(any=Unwalked(MILLIONS.whole, MILLIONS.without))
  whole.check_itself()
  assert len(child._line({'value': child._plain(whole)})) < 1000
  assert whole.split_sizes == {'train': 8_998_497}
  tasks, count = whole.page('x', 'train', first=8_000_000, count=2)
  assert [task.index for task in tasks] == [8_001_502, 8_001_503]
  assert count == 8_998_497
  whole.check(tasks[1])
  for index in (2000, 9_000_000):
    with pytest.raises(env.TaskError, match='it has 1501 to 8999998.'):
      whole.check(env.Task('x', 'train', index, 'any'))


@pytest.mark.parametrize(
  'found, index',
  [
    (range(-1, 5), -1),
    ((0, 2**31), 2**31),
    (env.Numbers(range(-2, 5), (0,)), -2),
    (range(2**31 - 1, 2**31 + 1), 2**31),
  ],
)
def test_an_index_out_of_range_is_named(found, index):
  with pytest.raises(ValueError, match=f'has the index {index};'):
    catalog(any=found).check_itself()
