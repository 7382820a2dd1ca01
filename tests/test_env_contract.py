"""What every environment found in envs_server must do, in this process."""

import itertools
import json

import pytest

from envs_server import child, env

ODD = ('', 'xyzzy', '7', 'look\naround', 'é 漢', '\0', 'x' * 5000, '../../etc')


@pytest.fixture(scope='module', params=env.known())
def made(request):
  if request.param in ('alfworld', 'webshop'):
    request.getfixturevalue(f'{request.param}_folder')
  game = env.module(request.param).make_env()
  yield request.param, game
  game.close()


def some_tasks(name, game):
  """A task of every split that has any, and of another type."""
  catalog = game.catalog()
  for split in catalog.indices:
    found = catalog.tasks(name, split)
    if found:
      yield found[0]
  yield found[-1]


def test_names_are_those_of_the_package():
  assert {'toy', 'sciworld', 'alfworld', 'webshop'} <= set(env.known())


def test_catalog_is_whole(made):
  _, game = made
  catalog = game.catalog()
  assert catalog.version and catalog.action_format
  types = catalog.task_names
  assert types and len(set(types)) == len(types)
  for by_name in catalog.indices.values():
    assert tuple(by_name) == types
    for indices in by_name.values():
      assert len(set(indices)) == len(indices)
      assert all(type(i) is int for i in itertools.islice(indices, 1000))
  for name, members in catalog.sets.items():
    assert name not in types
    assert members and set(members) <= set(types)


def test_splits_to_learn_and_to_be_judged_on_share_nothing(made):
  name, game = made
  catalog = game.catalog()
  train = {(t.name, t.index) for t in catalog.tasks(name, 'train')}
  assert train
  if name in ('toy', 'alfworld'):
    return  # Their indices count within a split.
  for split in set(catalog.indices) - {'train'}:
    held = {(t.name, t.index) for t in catalog.tasks(name, split)}
    assert not train & held, split


def test_catalog_and_observations_survive_the_pipe(made):
  name, game = made

  def sent(value):
    return json.loads(child._line({'value': child._plain(value)}))['value']

  catalog = game.catalog()
  again = child.catalog(sent(catalog))
  assert again.tasks(name, 'train') == catalog.tasks(name, 'train')
  assert again.split_sizes == catalog.split_sizes
  assert again.version == catalog.version
  assert {k: list(v) for k, v in again.options.items()} == {
    k: list(v) for k, v in catalog.options.items()
  }
  task = next(some_tasks(name, game))
  seen = game.reset(task, True, True)
  assert child.observation(sent(seen)) == seen


def test_same_task_is_the_same_whatever_came_before(made):
  name, game = made
  for task in some_tasks(name, game):
    first = game.reset(task, True, False)
    assert first.text and first.goal and not first.success
    actions = first.expert_actions[:6]
    assert actions
    seen = [game.step(action) for action in actions[:-1]]
    game.reset(next(some_tasks(name, game)), False, True)
    game.step('look around')
    assert game.reset(task, True, False) == first
    assert [game.step(action) for action in actions[:-1]] == seen
    plain = game.reset(task, False, False)
    assert (plain.text, plain.goal, plain.score) == (
      (first.text, first.goal, first.score)
    )
    assert not plain.expert_actions and not plain.admissible


def test_odd_actions_are_answered_and_change_no_score(made):
  name, game = made
  task = next(some_tasks(name, game))
  score = game.reset(task, False, False).score
  for action in ODD:
    seen = game.step(action)
    assert seen.text and not seen.terminated and seen.score == score, action


def test_admissible_actions_come_when_asked_for(made):
  name, game = made
  task = next(some_tasks(name, game))
  seen = game.reset(task, False, True)
  assert seen.admissible and all(seen.admissible)
  assert game.step(seen.admissible[0]).admissible
  assert not game.reset(task, False, False).admissible
  assert not game.step('look around').admissible


def test_it_can_be_asked_whether_it_is_well(made):
  name, game = made
  assert game.ping() is None
  first = game.reset(next(some_tasks(name, game)), False, False)
  assert first.text
  assert game.ping() is None
