"""Games made by envs_server/alfworld_games.py, played in the stock ALFWorld."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from envs_server import alfworld_data, alfworld_games, alfworld_problem

pytestmark = pytest.mark.usefixtures('alfworld_engine')

_REPOSITORY = pathlib.Path(__file__).parent.parent
_SPLITS = alfworld_data.SPLITS
# Plays every game of a split by its walkthrough in ALFWorld's own environment;
# in a process of its own, as this one may hold the quicker engine.
_STOCK = """
import json, pathlib, sys
from alfworld.agents.environment import alfred_tw_env
root, split = sys.argv[1:]
kinds = {
  'train': 'train',
  'valid_seen': 'eval_in_distribution',
  'valid_unseen': 'eval_out_of_distribution',
}
path = root + '/json_2.1.1/' + split
config = {
  'dataset': {
    'data_path': path, 'eval_id_data_path': path, 'eval_ood_data_path': path,
    'num_train_games': -1, 'num_eval_games': -1,
  },
  'env': {
    'goal_desc_human_anns_prob': 0, 'task_types': [1, 2, 3, 4, 5, 6],
    'domain_randomization': False, 'expert_type': 'handcoded',
  },
  'general': {'training_method': 'dqn'},
  'rl': {'training': {'max_nb_steps_per_episode': 50}},
}
games = alfred_tw_env.AlfredTWEnv(config, train_eval=kinds[split])
env = games.init_env(batch_size=1)
told = {}
for _ in games.game_files:
  (text,), infos = env.reset()
  file = infos['extra.gamefile'][0]
  steps = []
  for command in json.loads(pathlib.Path(file).read_text())['walkthrough']:
    listed = command in infos['admissible_commands'][0]
    (answer,), (reward,), (done,), infos = env.step([command])
    steps.append([listed, reward, bool(done), bool(infos['won'][0])])
  told[file] = [text, steps]
print(json.dumps(told))
"""


def _environment(hash_seed: str, data: pathlib.Path) -> dict[str, str]:
  return {
    **os.environ,
    'PYTHONHASHSEED': hash_seed,
    # Importing the stock environment makes this folder.
    'ALFWORLD_DATA': str(data),
  }


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """A folder with a game of each type in each split."""
  folder = tmp_path_factory.mktemp('alfworld') / 'games'
  told = alfworld_games.generate(folder, per_type=1, split='all', seed=3)
  return folder, told


def _games(folder, split):
  """Folder, trajectory and game of each game of a split."""
  for path in sorted((folder / 'json_2.1.1' / split).glob('*/trial_*')):
    yield (
      path,
      json.loads((path / 'traj_data.json').read_text()),
      json.loads((path / 'game.tw-pddl').read_text()),
    )


def _lies(game):
  """Type of each thing with that of its receptacle, as the problem tells."""
  text, _ = game['pddl_problem'].split('(:goal')
  found = re.findall(r'\(inReceptacle (\S+) (\S+)\)', text)
  kinds = dict(re.findall(r'\(receptacleType (\S+) (\w+)Type\)', text))
  return [(thing.split('_bar_')[0], kinds[home]) for thing, home in found]


def _bytes(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


def test_the_stock_environment_wins_each_game_with_its_last_action(made):
  folder, _ = made

  def play(split):
    done = subprocess.run(
      [sys.executable, '-c', _STOCK, folder, split],
      capture_output=True,
      text=True,
      timeout=300,
      env=_environment('0', folder),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    told = dict(zip(_SPLITS, pool.map(play, _SPLITS), strict=True))
  for split in _SPLITS:
    files = {str(p / 'game.tw-pddl') for p, _, _ in _games(folder, split)}
    assert set(told[split]) == files and len(files) == 6
    for text, steps in told[split].values():
      assert 'Your task is to: ' in text and 'UNKNOWN GOAL' not in text
      assert 'you see a ' in text  # The player stands before no receptacle.
      *before, last = steps
      assert before == [[True, 0, False, False]] * len(before)
      assert last == [True, 1, True, True]


def test_what_is_reported_and_what_the_files_tell(made):
  folder, told = made
  assert list(told) == list(_SPLITS)
  for split in _SPLITS:
    games = list(_games(folder, split))
    assert told[split]['games'] == dict.fromkeys(alfworld_data.TYPES, 1)
    for path, trajectory, game in games:
      kind = trajectory['task_type']
      params = trajectory['pddl_params']
      look = kind == 'look_at_obj_in_light'
      target = params['toggle_target' if look else 'parent_target']
      room = trajectory['scene']['scene_num']
      thing = params['object_target']
      assert path.parent.name == f'{kind}-{thing}-None-{target}-{room}'
      assert game['solvable'] is True
      assert game['pddl_problem'] == (path / 'initial_state.pddl').read_text()
      (annotation,) = trajectory['turk_annotations']['anns']
      sentence = annotation['task_desc']
      assert f'Your task is to: {sentence}.' in game['grammar']
      assert thing.lower() in sentence and target.lower() in sentence
      assert 'generated' in annotation['assignment_id']
      assert trajectory['generated']['seed'] == 3
      assert set(trajectory['generated']['packages']) >= {'alfworld'}
      assert told[split]['lengths'][kind] == [len(game['walkthrough'])]
      assert str(folder) not in json.dumps([trajectory, game])
    for place in (folder, folder / 'json_2.1.1' / split):
      note = json.loads((place / 'GENERATED.json').read_text())['note']
      assert 'not the ALFWorld benchmark' in note
  found = alfworld_data.find(folder)
  assert found.generated and not found.skipped
  assert [found.counts(split) for split in _SPLITS] == [(1,) * 6] * 3


def test_things_lie_where_they_may_and_the_goal_is_not_reached(made):
  folder, _ = made
  constants = alfworld_problem._module('constants')
  for split in _SPLITS:
    for _, trajectory, game in _games(folder, split):
      params = trajectory['pddl_params']
      thing, target = params['object_target'], params['parent_target']
      lies = _lies(game)
      here = alfworld_problem.room(trajectory['scene']['scene_num'])
      for kind, home in lies:
        assert kind in here.things
        if kind not in ('DeskLamp', 'HousePlant', 'Television'):
          assert kind in constants.VAL_RECEPTACLE_OBJECTS[home]
      copies = [home for kind, home in lies if kind == thing]
      least = 2 if trajectory['task_type'] == 'pick_two_obj_and_place' else 1
      assert least <= len(copies) <= 3 and target not in copies
      assert len({kind for kind, _ in lies}) >= 6
      assert ('DeskLamp' in {k for k, _ in lies}) or not params['toggle_target']
      assert '(pickupable DeskLamp' not in game['pddl_problem']
      for fact in ('opened', 'isClean', 'isHot', 'isCool', 'holds', 'isOn'):
        assert f'({fact} ' not in game['pddl_problem'].split('(:goal')[0]


def test_walkthroughs_have_no_needless_action(made):
  folder, _ = made
  take, move = 'go (open )?take', 'go (open )?move'
  patterns = {
    'pick_and_place_simple': f'{take} {move}',
    'look_at_obj_in_light': f'{take} (go )?use|go use take',
    'pick_clean_then_place_in_recep': f'{take} go clean {move}',
    'pick_heat_then_place_in_recep': f'{take} go heat {move}',
    'pick_cool_then_place_in_recep': f'{take} go cool {move}',
    'pick_two_obj_and_place': f'{take} {move} {take} go move',
  }
  for split in _SPLITS:
    for _, trajectory, game in _games(folder, split):
      verbs = ' '.join(action.split()[0] for action in game['walkthrough'])
      assert re.fullmatch(patterns[trajectory['task_type']], verbs), verbs


def test_each_receptacle_has_a_place_of_its_own():
  for split in ('train', 'valid_unseen'):
    for number in alfworld_problem.rooms(split):
      here = alfworld_problem.room(number)
      places = list(here.receptacles.values())
      assert len(set(places)) == len(places)
      assert here.free and not set(here.free) & set(places)


def test_splits_share_no_task_and_no_unseen_room():
  for kind in alfworld_data.TYPES:
    train, seen, unseen = (
      alfworld_games.combinations(kind, split) for split in _SPLITS
    )
    assert len(train) > 150 and len(seen) > 20 and len(unseen) > 50
    assert not set(train) & set(seen)
    assert {task.room for task in unseen}.isdisjoint(
      task.room for task in (*train, *seen)
    )
    numbers = {task.room % 100 for task in unseen}
    assert numbers <= set(range(1, 7))


def test_tasks_by_hand():
  # Bathroom 405 has a cloth, a soap bar and no dish sponge; a cloth may lie in
  # its bathtub, cabinets, counter, garbage can and on its toilet. It is cleaned
  # in the sink, where it must not end.
  found = alfworld_problem.tasks('pick_clean_then_place_in_recep', 405)
  cloth = [task.target for task in found if task.thing == 'Cloth']
  assert cloth == [
    'BathtubBasin',
    'Cabinet',
    'CounterTop',
    'GarbageCan',
    'Toilet',
  ]
  assert {task.thing for task in found} == {'Cloth', 'SoapBar'}
  assert not alfworld_problem.tasks('pick_heat_then_place_in_recep', 405)


def test_same_bytes_in_any_process_and_more_games_begin_with_fewer(
  made, tmp_path
):
  folder, _ = made
  types = ('look_at_obj_in_light', 'pick_two_obj_and_place')

  def make(hash_seed, count, jobs):
    place = tmp_path / hash_seed
    command = [sys.executable, '-m', 'envs_server.alfworld_games', place]
    command += ['--per-type', str(count), '--split', 'valid_unseen']
    command += ['--seed', '3', '--jobs', str(jobs), '--types', *types]
    done = subprocess.run(
      command,
      cwd=_REPOSITORY,
      capture_output=True,
      text=True,
      env=_environment(hash_seed, tmp_path / 'unused'),
    )
    assert done.returncode == 0, done.stderr
    assert 'not the ALFWorld benchmark' in done.stdout
    assert f'export ALFWORLD_DATA={place}' in done.stdout
    return _bytes(place)

  one, two = make('1', 2, 1), make('2', 2, 2)
  assert one == two and len(one) == 2 + 2 * 2 * 3
  assert not (tmp_path / 'unused').exists()
  fewer = {
    name: text
    for name, text in _bytes(folder).items()
    if 'valid_unseen/' in name and any(kind in name for kind in types)
  }
  assert len(fewer) == 2 * 3 and fewer.items() <= one.items()


def test_what_is_there_is_kept_or_refused(made, tmp_path):
  folder, told = made
  before = _bytes(folder)
  # The same arguments again: nothing is made.
  again = alfworld_games.generate(folder, per_type=1, split='train', seed=3)
  assert again == {'train': told['train']}
  with pytest.raises(
    alfworld_games.Refusal, match=r"train holds.*'seed': 3.*--force"
  ):
    alfworld_games.generate(folder, per_type=1, split='train', seed=4)
  official = tmp_path / 'official'
  shutil.copytree(folder, official)
  (official / 'json_2.1.1' / 'valid_seen' / 'GENERATED.json').unlink()
  for force in (False, True):
    with pytest.raises(
      alfworld_games.Refusal,
      match=r'valid_seen holds games that were not generated.*empty folder',
    ):
      alfworld_games.generate(official, per_type=1, split='train', force=force)
  assert _bytes(folder) == before
  assert not list(folder.glob('.generating-*'))


def test_force_replaces_a_generated_split_alone(made, tmp_path):
  folder = tmp_path / 'games'
  shutil.copytree(made[0], folder)
  before = _bytes(folder / 'json_2.1.1' / 'valid_seen')
  told = alfworld_games.generate(
    folder,
    per_type=1,
    split='train',
    seed=4,
    types=['look_at_obj_in_light'],
    scenes=['Bedroom'],
    force=True,
  )
  assert told['train']['games'] == {'look_at_obj_in_light': 1}
  ((_, trajectory, _),) = _games(folder, 'train')
  assert 307 <= trajectory['scene']['scene_num'] <= 330
  assert _bytes(folder / 'json_2.1.1' / 'valid_seen') == before


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'per_type': 0}, 'per_type=0 must be from 1 to 10000'),
    ({'seed': -1}, 'seed=-1 must be at least 0'),
    ({'jobs': -1}, 'jobs=-1 must be at least 1'),
    ({'split': 'test'}, "split='test' must be one of .*'valid_unseen', 'all'"),
    ({'types': ['Pick']}, "types has 'Pick'; the types are .*pick_and_place"),
    ({'types': []}, 'types is empty'),
    ({'scenes': ['Garage']}, "scenes has 'Garage'; the kinds .*Kitchen"),
    ({'scenes': ['Bedroom']}, r"\['Bedroom'\] allow no pick_clean"),
    ({'folder': 'movable'}, "has 'movable' in its path.*choose another"),
  ],
)
def test_refuses_arguments(arguments, message, tmp_path):
  wanted = {'per_type': 1, 'split': 'train', 'folder': 'games', **arguments}
  folder = tmp_path / wanted.pop('folder')
  with pytest.raises(ValueError, match=message):
    alfworld_games.generate(folder, **wanted)
  assert not folder.exists()


def test_the_command_tells_errors_in_a_line(tmp_path, capsys):
  assert alfworld_games.main([str(tmp_path / 'g'), '--per-type', '0']) == 1
  assert capsys.readouterr().err.startswith('error: per_type=0 must be')


def test_a_missing_package_is_named_with_the_command(tmp_path):
  code = (
    'import sys; sys.modules["alfworld"] = None\n'
    'from envs_server import alfworld_games as games\n'
    'assert "textworld" not in sys.modules and "numpy" not in sys.modules\n'
    'sys.exit(games.main(sys.argv[1:]))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, tmp_path / 'g'],
    cwd=_REPOSITORY,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert 'pip install --no-deps -r envs_server/requirements' in done.stderr


@pytest.mark.parametrize('way', [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_nothing(way, tmp_path):
  command = [sys.executable, '-m', 'envs_server.alfworld_games', tmp_path / 'g']
  with subprocess.Popen(
    [*command, '--per-type', '500'],
    cwd=_REPOSITORY,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  ) as process:
    try:
      for _ in range(600):
        if list(tmp_path.glob('g/.generating-*/new/*')):
          break  # A game is there.
        time.sleep(0.1)
      if way == signal.SIGINT:  # A terminal tells all processes.
        os.killpg(process.pid, way)
      else:
        process.send_signal(way)
      _, errors = process.communicate(timeout=60)
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
  if way == signal.SIGKILL:
    return  # Its other processes are gone: they held the pipe that was read.
  assert process.returncode == 130
  assert errors == 'stopped; the split under way was not written\n'
  assert not (tmp_path / 'g').exists()


def test_two_runs_in_one_folder_do_not_mix(tmp_path):
  with alfworld_games._alone(tmp_path):
    with pytest.raises(alfworld_games.Refusal, match='another run makes games'):
      alfworld_games.generate(tmp_path, per_type=1, split='train')
  assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_cleared(tmp_path):
  (tmp_path / '.generating-abc' / 'new').mkdir(parents=True)
  with alfworld_games._alone(tmp_path):
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('content', ['', '{', '[]', '[1]'])
def test_a_damaged_marker_is_named(tmp_path, content):
  marker = tmp_path / 'json_2.1.1' / 'train' / 'GENERATED.json'
  marker.parent.mkdir(parents=True)
  marker.write_text(content)
  with pytest.raises(alfworld_games.Refusal, match='train/GENERATED.json'):
    alfworld_games.generate(tmp_path, per_type=1, split='train')


@pytest.mark.parametrize('name', ['', ' '])
def test_no_folder_is_not_this_one(name):
  with pytest.raises(ValueError, match='names no folder'):
    alfworld_games.generate(name, per_type=1, split='train')
