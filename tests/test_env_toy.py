"""The toy environment: its rules, and the contract of every environment."""

import dataclasses

import pytest

from envs_server import env, toy

NAMES = ('fetch', 'unlock', 'deliver')


def play(task, actions=None):
  """Observations of a task; the expert's actions unless others are given."""
  game = toy.make_env()
  seen = [game.reset(task, expert=True, admissible=True)]
  for action in seen[0].expert_actions if actions is None else actions:
    seen.append(game.step(action))
  return seen


def all_tasks():
  catalog = toy.make_env().catalog()
  return [t for split in catalog.indices for t in catalog.tasks('toy', split)]


def test_splits_and_types():
  catalog = toy.make_env().catalog()
  assert catalog.split_sizes == {'train': 192, 'dev': 96, 'test': 96}
  assert catalog.task_names == NAMES
  assert [t.name for t in catalog.tasks('toy', 'dev')] == [
    name for name in NAMES for _ in range(32)
  ]
  assert [t.index for t in catalog.tasks('toy', 'dev', ('unlock',))] == list(
    range(32)
  )


def test_expert_of_every_task_wins_with_its_last_action():
  lengths = {name: set() for name in NAMES}
  for task in all_tasks():
    seen = play(task)
    assert [o.success for o in seen] == [False] * (len(seen) - 1) + [True], task
    assert [o.terminated for o in seen] == [o.success for o in seen]
    assert seen[-1].score == 100.0
    scores = [o.score for o in seen]
    assert scores == sorted(scores) and scores[0] == 0.0
    lengths[task.name].add(len(seen) - 1)
  # By the shortcut; on foot.
  assert lengths['fetch'] == {2} | {3, 4}
  assert max(lengths['fetch']) < max(lengths['unlock'])
  assert max(lengths['unlock']) < max(lengths['deliver'])


def test_partial_scores():
  seen = play(env.Task('toy', 'train', 0, 'deliver'))
  assert sorted({o.score for o in seen}) == [0.0, 50.0, 75.0, 100.0]


def test_shortcut_and_long_way_reach_the_same_success():
  walk = play(env.Task('toy', 'train', 1, 'fetch'))
  assert 'take shortcut' not in walk[0].expert_actions
  take = walk[0].expert_actions[-1]
  quick = play(env.Task('toy', 'train', 1, 'fetch'), ['take shortcut', take])
  assert len(quick) < len(walk)
  assert quick[-1] == walk[-1]
  assert quick[-1].success
  by_shortcut = play(env.Task('toy', 'train', 0, 'fetch'))
  assert 'take shortcut' in by_shortcut[0].expert_actions


def test_detours_change_nothing():
  task = env.Task('toy', 'train', 3, 'unlock')
  straight = play(task)
  detoured = play(
    task,
    [x for a in straight[0].expert_actions for x in ('look', 'inventory', a)],
  )
  assert detoured[-1] == straight[-1]
  assert detoured[1].text == detoured[0].text


def test_entering_the_well_loses():
  task = env.Task('toy', 'train', 0, 'fetch')
  forth = next(
    a for a in play(task)[0].admissible if a in ('go east', 'go west')
  )
  game = toy.make_env()
  seen = game.reset(task, admissible=True)
  while 'enter well' not in seen.admissible:
    seen = game.step(forth)
  lost = game.step('enter well')
  assert lost.terminated
  assert not lost.success
  assert lost.score == 50.0  # The room of the thing was passed.


def test_unknown_and_impossible_actions():
  task = env.Task('toy', 'train', 0, 'deliver')
  seen = play(task, ['fly', '', 'open door', '  LOOK \n'])
  assert seen[1].text == seen[2].text
  assert seen[1].text == 'No known action matches that input.'
  assert seen[3].text == 'You cannot do that here.'
  assert seen[4].text == seen[0].text


def test_admissible_actions_are_understood():
  refused = ('No known action matches that input.', 'You cannot do that here.')
  for name in NAMES:
    for seen in play(env.Task('toy', 'dev', 5, name))[:-1]:
      assert 'look' in seen.admissible
  task = env.Task('toy', 'dev', 5, 'fetch')
  for action in play(task)[0].admissible:
    assert play(task, [action])[1].text not in refused


def test_same_task_same_game_other_seed_other_game():
  task = env.Task('toy', 'train', 7, 'deliver')
  assert play(task) == play(task)
  assert play(task) != play(dataclasses.replace(task, seed=1))
  assert play(task) != play(dataclasses.replace(task, split='test'))


def test_reset_forgets_the_episode_before():
  task = env.Task('toy', 'train', 7, 'deliver')
  game = toy.make_env()
  first = game.reset(task)
  for action in play(task)[0].expert_actions[:-1]:
    game.step(action)
  assert game.reset(task) == first
  again = [game.step(action) for action in play(task)[0].expert_actions]
  assert [o.text for o in again] == [o.text for o in play(task)[1:]]
  assert [o.score for o in again] == [o.score for o in play(task)[1:]]


def test_texts_are_short():
  for task in all_tasks()[::7]:
    for seen in play(task):
      assert len(seen.text.split()) <= 40


@pytest.mark.parametrize(
  'changes, told',
  [
    (
      {'split': 'trian'},
      "unknown split 'trian'; known: 'train', 'dev', 'test'",
    ),
    ({'name': 'fetsch'}, "known: 'fetch', 'unlock', 'deliver'"),
    ({'index': 64}, 'it has 0 to 63'),
    ({'index': -1}, 'it has 0 to 63'),
    ({'options': {'easy': '1'}}, "unknown option 'easy'; known: none"),
  ],
)
def test_catalog_names_what_is_known(changes, told):
  task = env.Task('toy', 'train', 0, 'fetch')
  catalog = toy.make_env().catalog()
  catalog.check(task)
  with pytest.raises(env.TaskError, match=told):
    catalog.check(dataclasses.replace(task, **changes))


def test_catalog_checks_each_value_of_an_option():
  catalog = env.Catalog(
    version='',
    action_format='',
    indices={'train': {'a': (2, 3, 5)}},
    options={'help': ('easy', 'doors')},
  )
  task = env.Task('x', 'train', 2, 'a', options={'help': 'doors,easy'})
  catalog.check(task)
  catalog.check(dataclasses.replace(task, options={'help': ''}))
  with pytest.raises(env.TaskError, match="'dors'; known: 'easy', 'doors'"):
    catalog.check(dataclasses.replace(task, options={'help': 'easy,dors'}))
  with pytest.raises(env.TaskError, match='it has 2, 3, 5'):
    catalog.check(dataclasses.replace(task, index=4))


def test_known_environments_are_the_files_of_the_folder():
  assert {'sciworld', 'toy'} <= set(env.known())
  assert not {'serve', 'pool', 'env', 'java'} & set(env.known())
