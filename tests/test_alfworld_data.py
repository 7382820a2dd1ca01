"""Which games are found on disk, and what is said of those that are not."""

import json
import os
import subprocess
import sys

import pytest

from envs_server import alfworld_data

PICK, LOOK = 'pick_and_place_simple', 'look_at_obj_in_light'
GRAMMAR = (
  'grammar :: """{"task": [{"rhs": "Your task is to: put a mug in shelf."}]}'
  '""";\n\naction PutObject {{\n    template :: "{} {{o}} to {{r}}";\n}}'
)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def grammar(word='move'):
  return GRAMMAR.replace('{}', word).replace('{{', '{').replace('}}', '}')


def game(**changed):
  return {
    'pddl_domain': '(define (domain alfred))',
    'grammar': grammar(),
    'pddl_problem': '(define (problem p) (:goal ()))',
    'solvable': True,
    'walkthrough': ['look'],
  } | changed


def put(data, trial, content=None, *, kind=PICK, split='train'):
  folder = data / 'json_2.1.1' / split / f'{kind}-Mug-None-Shelf-1' / trial
  folder.mkdir(parents=True)
  text = content if isinstance(content, str) else json.dumps(content or game())
  (folder / 'game.tw-pddl').write_text(text)
  (folder / 'traj_data.json').write_text(json.dumps({'task_type': kind}))
  return folder


def found_indices(found, split='train', kind=PICK):
  return {i: g.path.split('/')[-1] for i, g in found.games[split][kind].items()}


def test_games_are_counted_by_split_and_type(tmp_path):
  put(tmp_path, 'trial_b')
  put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_a', kind=LOOK)
  put(tmp_path, 'trial_a', split='valid_unseen')
  found = alfworld_data.find(tmp_path)
  assert found.counts('train') == (2, 1, 0, 0, 0, 0)
  assert found.counts('valid_seen') == (0,) * 6
  assert found.counts('valid_unseen') == (1, 0, 0, 0, 0, 0)
  assert found_indices(found) == {0: 'trial_a', 1: 'trial_b'}
  assert not found.skipped and not found.generated and found.syntax == 'move'
  assert found.version.startswith('3/0/1 games ')
  table = found.table()
  assert 'train: 3 (Pick 2 of 790, Look 1 of 308, Clean 0 of 650' in table
  assert f'alfworld-download --data-dir={tmp_path}` fetches them' in table


def test_generated_games_are_told_from_the_official_ones(tmp_path):
  put(tmp_path, 'trial_a')
  (tmp_path / 'GENERATED.json').write_text('{}')
  found = alfworld_data.find(tmp_path)
  assert '1/0/0 generated games' in found.version
  assert 'not the benchmark' in found.table()
  assert 'of 790' not in found.table()
  assert 'alfworld-download' not in found.table()


BAD = {
  'cut off': (json.dumps(game())[:-20], 'is no JSON'),
  'empty': ('', 'is no JSON'),
  'too deep': ('[' * 100000, 'is no JSON (maximum recursion'),
  'a list': ('[]', 'holds no JSON object'),
  'no problem': (game(pddl_problem=''), "has no text 'pddl_problem'"),
  'no grammar': (
    {k: v for k, v in game().items() if k != 'grammar'},
    "has no text 'grammar'",
  ),
  'a cut problem': (
    game(pddl_problem='(define (:goal ('),
    "'pddl_problem' with unequal parentheses",
  ),
  'no goal': (game(pddl_problem='(define)'), 'without :goal'),
  'no task': (
    game(grammar=grammar().replace('Your task is to', 'Do')),
    "'grammar' without task",
  ),
  'a text as walkthrough': (game(walkthrough='look'), 'a walkthrough that'),
  'unsolvable': (game(solvable=False), 'not marked as solvable'),
  'never solved': (game(solvable=None), 'not marked as solvable'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_games_are_left_out_by_name_and_reason(tmp_path, name):
  content, why = BAD[name]
  put(tmp_path, 'trial_a', content)
  put(tmp_path, 'trial_b')
  found = alfworld_data.find(tmp_path)
  # The other one keeps the index it has where nothing is broken.
  assert found_indices(found) == {1: 'trial_b'}
  path = f'train/{PICK}-Mug-None-Shelf-1/trial_a'
  assert list(found.skipped) == [path]
  assert why in found.skipped[path]
  assert f'{path}: game.tw-pddl' in found.table(10)


@pytest.mark.parametrize(
  'broken, why',
  [
    (None, 'traj_data.json is missing'),
    ('[' * 100000, 'traj_data.json has no task_type (RecursionError'),
    ('{"task_ty', 'traj_data.json has no task_type'),
    ('{}', 'traj_data.json has no task_type (KeyError'),
    ('[1]', 'traj_data.json has no task_type (TypeError'),
    ('{"task_type": "look_at_obj_in_light"}', "'look_at_obj_in_light', not"),
  ],
)
def test_bad_trajectories_are_left_out(tmp_path, broken, why):
  folder = put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_b')
  (folder / 'traj_data.json').unlink()
  if broken is not None:
    (folder / 'traj_data.json').write_text(broken)
  found = alfworld_data.find(tmp_path)
  assert found_indices(found) == {1: 'trial_b'}
  (reason,) = found.skipped.values()
  assert why in reason


def test_a_missing_game_file_is_left_out(tmp_path):
  (put(tmp_path, 'trial_a') / 'game.tw-pddl').unlink()
  put(tmp_path, 'trial_b')
  found = alfworld_data.find(tmp_path)
  assert found_indices(found) == {1: 'trial_b'}
  assert list(found.skipped.values()) == ['game.tw-pddl is missing']


def test_what_alfworld_never_plays_is_no_fault(tmp_path):
  put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_a', kind='pick_and_place_with_movable_recep')
  sliced = tmp_path / 'json_2.1.1' / 'train' / f'{PICK}-AppleSliced-None-Pan-2'
  (sliced / 'trial_a').mkdir(parents=True)
  loop = sliced.parent / f'{LOOK}-Pen-None-DeskLamp-1'
  loop.symlink_to(loop)
  (tmp_path / 'json_2.1.1' / 'train' / 'notes.txt').write_text('')
  found = alfworld_data.find(tmp_path)
  assert found.counts('train') == (1, 0, 0, 0, 0, 0)
  assert found.others == 2 and not found.skipped


def test_syntax_of_each_game_and_of_all(tmp_path):
  put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_b', game(grammar=grammar('put')))
  found = alfworld_data.find(tmp_path)
  assert [g.syntax for g in found.games['train'][PICK].values()] == [
    'move',
    'put',
  ]
  assert found.syntax == 'mixed' and found.version.endswith('mixed syntax')


def test_digest_follows_what_is_played(tmp_path):
  folder = put(tmp_path, 'trial_a')
  first = alfworld_data.find(tmp_path).digest
  (folder / 'game.tw-pddl').write_text(json.dumps(game(), indent=2))
  assert alfworld_data.find(tmp_path).digest == first
  (folder / 'game.tw-pddl').write_text(
    json.dumps(game(pddl_problem='(define (problem q) (:goal ()))'))
  )
  second = alfworld_data.find(tmp_path).digest
  put(tmp_path, 'trial_b')
  assert len({first, second, alfworld_data.find(tmp_path).digest}) == 3


def test_what_was_read_is_remembered_until_it_changes(tmp_path, monkeypatch):
  folder = put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_b', 'cut off')
  first = alfworld_data.find(tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(alfworld_data, 'read_game', None)  # Not to be called.
    assert alfworld_data.find(tmp_path) == first
  (folder / 'game.tw-pddl').write_text('{')
  with pytest.raises(FileNotFoundError, match='2 folders are left out, the '):
    alfworld_data.find(tmp_path)


def test_what_cannot_be_read_now_is_read_again(tmp_path, monkeypatch):
  put(tmp_path, 'trial_a')
  put(tmp_path, 'trial_b')
  whole = alfworld_data.find(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))
  with monkeypatch.context() as patch:

    def fails(path):
      raise OSError(5, 'Input/output error', str(path))

    patch.setattr(alfworld_data, 'read_game', fails)
    with pytest.raises(FileNotFoundError, match='read .Input/output error'):
      alfworld_data.find(tmp_path)
  assert alfworld_data.find(tmp_path) == whole


def test_generated_games_are_known_without_the_folder_above(tmp_path):
  put(tmp_path, 'trial_a')
  (tmp_path / 'json_2.1.1' / 'train' / 'GENERATED.json').write_text('{}')
  assert alfworld_data.find(tmp_path).generated


def test_damage_is_named_before_what_is_missing(tmp_path):
  for i in range(12):
    (put(tmp_path, f'trial_{i:02d}') / 'game.tw-pddl').unlink()
  put(tmp_path, 'trial_x', '{')
  put(tmp_path, 'trial_y')
  table = alfworld_data.find(tmp_path).table(10)
  assert '13 folders, 12 of them without a game.tw-pddl' in table
  assert 'trial_x: game.tw-pddl is no JSON' in table
  # What is there would not be fetched again.
  assert f'alfworld-download --data-dir={tmp_path} --force`' in table


@pytest.mark.parametrize(
  'content',
  [
    *('{', '[]', '{"judge": 0, "games": {}}', '{"judge": 2, "games": []}'),
    '{"judge": 2, "games": {"a": 1, "b": {}}}',
  ],
)
def test_a_damaged_memory_is_made_anew(tmp_path, content):
  put(tmp_path, 'trial_a')
  first = alfworld_data.find(tmp_path)
  (memory,) = (tmp_path / 'cache' / 'planpo_jax').iterdir()
  whole = memory.read_text()
  memory.write_text(content)
  assert alfworld_data.find(tmp_path) == first
  assert memory.read_text() == whole


def test_what_an_older_version_judged_is_judged_anew(tmp_path):
  put(tmp_path, 'trial_a')
  first = alfworld_data.find(tmp_path)
  (memory,) = (tmp_path / 'cache' / 'planpo_jax').iterdir()
  older = json.loads(memory.read_text())
  older['judge'] -= 1
  for verdict in older['games'].values():
    verdict['why'] = 'judged by other rules'
  memory.write_text(json.dumps(older))
  assert alfworld_data.find(tmp_path) == first


def test_no_place_to_remember_is_no_error(tmp_path, monkeypatch):
  put(tmp_path, 'trial_a')
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  assert alfworld_data.find(tmp_path).counts('train')[0] == 1


def test_no_games_says_how_to_get_some(tmp_path):
  with pytest.raises(FileNotFoundError) as raised:
    alfworld_data.find(tmp_path / 'nowhere')
  for part in ('nowhere', 'alfworld-download', 'alfworld_games', 'not the'):
    assert part in str(raised.value)


def test_the_command_lists_everything_left_out(tmp_path):
  put(tmp_path, 'trial_a')
  for i in range(12):
    put(tmp_path, f'trial_x{i:02d}', 'cut')
  command = [sys.executable, '-m', 'envs_server.alfworld_data']
  environ = os.environ | {'ALFWORLD_DATA': str(tmp_path)}
  said = subprocess.run(command, capture_output=True, text=True, env=environ)
  assert said.returncode == 0
  assert said.stdout.count('is no JSON') == 12
  assert '    and 2 more' in alfworld_data.find(tmp_path).table(10)
  said = subprocess.run(
    [*command, str(tmp_path / 'none')], capture_output=True, text=True
  )
  assert said.returncode == 1 and 'there is no ALFWorld game' in said.stderr
