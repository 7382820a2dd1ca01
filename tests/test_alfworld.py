"""ALFWorld's games through gRPC, and what broken files do to a service."""

import asyncio
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import env_processes
import numpy as np
import pytest

from benchmarks import alfworld_steps
from envs_server import alfworld, alfworld_data, alfworld_engine, env
from planpo_jax import env_client, env_service, episodes

PICK = 'pick_and_place_simple'
WON = (100.0, True, episodes.Ending.TERMINATED)


# Some tests need no game.
pytestmark = pytest.mark.usefixtures('alfworld_engine')


async def follow(client, task, actions=None):
  """Observations of an episode; of the walkthrough, if no actions are given."""
  session = client.session(task, step_limit=50, expert=True, admissible=True)
  try:
    seen = [await session.reset()]
    for action in seen[0].expert_actions if actions is None else actions:
      seen.append(await session.step(action))
  finally:
    await session.close()
  return seen


def with_client(address, work):
  async def run():
    client = env_client.EnvClient(address)
    await client.connect()
    try:
      return await work(client)
    finally:
      await client.close()

  return asyncio.run(run())


@pytest.fixture(scope='module')
def service(alfworld_folder):
  with env_service.LocalService('alfworld', 2) as running:
    yield running


@pytest.fixture(scope='module')
def played(service):
  """{(split, type, index): observations of the game, by its walkthrough}."""

  async def work(client):
    found = {}
    for split in alfworld_data.SPLITS:
      for task in await client.list_tasks(split):
        found[split, task.name, task.index] = await follow(client, task)
    return found

  return with_client(service.address, work)


def test_every_type_of_every_split_is_won_by_its_walkthrough(played):
  assert set(played) == {
    (split, name, index)
    for split in alfworld_data.SPLITS
    for name in alfworld_data.TYPES
    for index in range(2 if split == 'valid_seen' else 1)
  }
  # No two tasks are the same game.
  assert len({seen[0].text for seen in played.values()}) == 24
  for key, seen in played.items():
    last = seen[-1]
    assert (last.score, last.success, last.ending) == WON, key
    assert [o.success for o in seen[:-1]] == [False] * (len(seen) - 1), key
    assert {o.score for o in seen[:-1]} == {0.0}, key
    assert sum(o.reward for o in seen) == 100.0, key


def test_the_first_text_names_places_and_task(played):
  for (_, name, _), seen in played.items():
    first = seen[0]
    assert first.text.startswith('-= Welcome to TextWorld, ALFRED! =-\n\nYou')
    assert 'Looking quickly around you, you see' in first.text
    assert first.text.endswith(first.goal)
    assert first.goal.startswith('Your task is to: ')
    word = {'pick_two_obj_and_place': 'two', 'look_at_obj_in_light': 'lamp'}
    assert word.get(name, 'Your') in first.goal


def test_walkthroughs_use_admissible_commands(played):
  for key, seen in played.items():
    assert seen[0].expert_actions
    pairs = zip(seen[0].expert_actions, seen[:-1], strict=True)
    assert all(action in before.admissible for action, before in pairs), key
    assert list(seen[0].admissible) == sorted(seen[0].admissible)


def test_the_service_describes_splits_columns_and_versions(service):
  found = with_client(service.address, lambda client: client.describe())
  assert found.task_names == alfworld_data.TYPES
  assert found.splits == {'train': 6, 'valid_seen': 12, 'valid_unseen': 6}
  assert {name: tuple(types) for name, types in found.sets.items()} == {
    column: (name,) for name, column in alfworld_data.COLUMNS.items()
  }
  for part in (
    'alfworld 0.',
    'textworld 1.',
    '6/12/6 generated',
    'move syntax',
  ):
    assert part in found.version
  assert 'move X to Y' in found.action_format
  assert 'put X' not in found.action_format


def test_impossible_actions_are_answered_and_change_nothing(service):
  odd = ['go to drawer 99', 'put mug 1 in/on desk 1', 'xyzzy', '', 'look\x00']

  async def work(client):
    task = (await client.list_tasks('train'))[0]
    return await follow(client, task, [*odd, 'look'])

  first, *others, looked = with_client(service.address, work)
  assert [o.text for o in others] == ['Nothing happens.'] * len(odd)
  assert all(o.admissible == first.admissible for o in others)
  assert not any(o.success or o.ending for o in others)
  # The engine's own: only its first text lists the room.
  assert looked.text == (
    'You are in the middle of a room. Looking quickly around you, you see '
    'nothing.'
  )


def test_groups_share_their_game_in_any_order_and_process(service):
  """Members of a group see the same, whatever a worker played before."""

  async def work(client):
    tasks = await client.list_tasks('valid_seen')
    # 2 and 3 are of one type.
    jobs = [tasks[i] for i in (3, 0, 3, 2, 3, 0, 3)]
    return await asyncio.gather(*(follow(client, task) for task in jobs))

  found = with_client(service.address, work)
  assert found[0] == found[2] == found[4] == found[6]
  assert found[1] == found[5]
  assert len({found[i][0].text for i in (0, 1, 3)}) == 3


def test_the_order_of_things_does_not_hang_on_hashes(alfworld_folder):
  code = (
    'from envs_server import alfworld as a\n'
    'game = a.make_env(); tasks = game.catalog().tasks("alfworld", "train")\n'
    'for task in tasks:\n'
    '  seen = game.reset(task, True, True)\n'
    '  print(seen)\n'
    '  for action in seen.expert_actions: print(game.step(action))\n'
  )
  said = {
    subprocess.run(
      [sys.executable, '-c', code],
      capture_output=True,
      check=True,
      env=os.environ | {'PYTHONHASHSEED': seed},
    ).stdout
    for seed in ('1', '2')
  }
  assert len(said) == 1 and len(said.pop()) > 5000


def test_texts_equal_those_of_the_stock_environment(alfworld_folder):
  """60 episodes: texts, admissible commands and outcomes, step by step."""
  paths = alfworld_steps.listed(alfworld_folder)
  played, seen, _ = alfworld_steps.play(paths, 24)
  assert len(paths) == 24 and all(turns[-1][2] for turns in seen)
  # What is no walkthrough is played in small rooms, which load quickly.
  small = sorted(paths, key=os.path.getsize)[:6]
  more, seen_more, _ = alfworld_steps.play(small, 36)
  played, seen = played + more, seen + seen_more
  assert len(played) == 60
  actions = {action for _, actions in played for action in actions}
  assert {a.split(' ')[0] for a in actions} >= {
    *('go', 'open', 'close', 'take', 'move', 'examine', 'look', 'inventory'),
    *('clean', 'heat', 'cool', 'use', 'xyzzy'),
  }
  # Half by half, as each is one process and the machine has two cores.
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    halves = pool.map(alfworld_steps.play_stock, (played[::2], played[1::2]))
    (even, *_), (odd, *_) = halves
  assert seen[::2] == even and seen[1::2] == odd


def test_an_environment_is_well_before_its_first_game(alfworld_folder):
  code = (
    'from envs_server import alfworld as a; game = a.make_env()\n'
    'game.catalog(); game.ping(); print("well")'
  )
  said = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True
  )
  assert (said.returncode, said.stdout) == (0, 'well\n')


def test_memory_is_flat_over_200_resets(alfworld_folder):
  paths = alfworld_steps.listed(alfworld_folder)
  small = sorted(paths, key=os.path.getsize)[:4]  # They load in half the time.
  held = alfworld_steps.memory_over(small, 200)
  early, late = np.mean(held[40:60]), np.mean(held[-20:])
  assert late - early < 5, (early, late)  # Megabytes.


def test_the_planner_finds_what_was_not_stored(alfworld_folder):
  engine = alfworld_engine.Engine()
  for path in alfworld_steps.listed(alfworld_folder)[:6]:  # One a type.
    with open(path) as file:
      game = json.load(file)
    engine.load(game)
    plan = engine.plan()
    # Planning takes nothing from the game that is being played.
    assert not engine.won and engine.admissible()
    for action in plan:
      assert not engine.won and action in engine.admissible()
      engine.step(action)
    assert engine.won


def edited(folder, tmp_path, change):
  """A copy of a folder of games, with `change` made to each game file."""
  copy = tmp_path / 'games'
  shutil.copytree(folder, copy)
  for path in copy.rglob(alfworld_data.GAME):
    game = json.loads(path.read_text())
    change(game)
    path.write_text(json.dumps(game))
  return copy


def test_games_of_the_older_syntax_are_won_in_it(
  alfworld_folder, tmp_path, monkeypatch
):
  """Games say `put X in/on Y`; walkthroughs that say `move` are put right."""

  def older(game):
    new = '"move {o} to {r}"'
    assert game['grammar'].count(new) == 2
    game['grammar'] = game['grammar'].replace(new, '"put {o} in/on {r}"')

  data = edited(alfworld_folder, tmp_path, older)
  monkeypatch.setenv('ALFWORLD_DATA', str(data))
  game = alfworld.make_env()
  catalog = game.catalog()
  assert catalog.version.endswith('put syntax')
  assert 'put X in/on Y' in catalog.action_format
  assert 'move X' not in catalog.action_format
  for task in catalog.tasks('alfworld', 'train'):
    seen = game.reset(task, True, False)
    assert seen.info['syntax'] == 'put'
    assert not any(a.startswith('move ') for a in seen.expert_actions)
    for action in seen.expert_actions:
      seen = game.step(action)
    assert seen.success, task
  game.close()


def test_walkthroughs_of_the_older_syntax_are_put_right(
  alfworld_folder, tmp_path, monkeypatch
):
  def older(game):
    game['walkthrough'] = [
      action.replace('move ', 'put ').replace(' to ', ' in/on ')
      if action.startswith('move ')
      else action
      for action in game['walkthrough']
    ]

  data = edited(alfworld_folder, tmp_path, older)
  monkeypatch.setenv('ALFWORLD_DATA', str(data))
  game = alfworld.make_env()
  task = env.Task('alfworld', 'train', 0, PICK)
  seen = game.reset(task, True, False)
  assert seen.expert_actions[-1].startswith('move ')
  for action in seen.expert_actions:
    seen = game.step(action)
  assert seen.success
  game.close()


BROKEN = {
  'removed': lambda path: path.unlink(),
  'cut off': lambda path: path.write_text(path.read_text()[:500]),
  'no pddl': lambda path: rewrite(path, pddl_problem='(define (:goal x))'),
  'another one': lambda path: rewrite(path, pddl_problem=problem(path) + ';'),
  'already won': lambda path: rewrite(
    path,
    pddl_problem=re.sub(
      r'\(:goal.*', '(:goal (and )))', problem(path), flags=re.DOTALL
    ),
  ),
  'no grammar': lambda path: rewrite(
    path, grammar=json.loads(path.read_text())['grammar'].replace('{', '')
  ),
}


def problem(path):
  return json.loads(path.read_text())['pddl_problem']


def rewrite(path, **changed):
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize('name', BROKEN)
def test_a_file_that_breaks_later_costs_its_episodes_alone(
  alfworld_folder, tmp_path, monkeypatch, name
):
  data = edited(alfworld_folder, tmp_path, lambda game: None)
  monkeypatch.setenv('ALFWORLD_DATA', str(data))

  async def work(client):
    bad, good = (await client.list_tasks('train'))[:2]
    folder = next((data / 'json_2.1.1' / 'train').glob(f'{bad.name}-*/trial_*'))
    BROKEN[name](folder / alfworld_data.GAME)
    before = env_processes.workers_of(service.pid)
    with pytest.raises(env_client.EnvFault) as fault:
      await follow(client, bad)
    seen = await follow(client, good)
    # Nothing is tried again, and no worker is lost over it.
    assert env_processes.workers_of(service.pid) == before
    return fault.value, folder, seen[-1]

  with env_service.LocalService('alfworld', 1) as service:
    fault, folder, last = with_client(service.address, work)
  assert f'DATA_LOSS: {folder} cannot be played' in str(fault)
  assert fault.final
  assert (last.score, last.success, last.ending) == WON


def test_tasks_stay_what_they_were_when_folders_come_and_go(
  alfworld_folder, tmp_path, monkeypatch
):
  data = edited(alfworld_folder, tmp_path, lambda game: None)
  monkeypatch.setenv('ALFWORLD_DATA', str(data))

  async def work(client):
    task = (await client.list_tasks('train'))[0]
    before = await follow(client, task)
    trial = next((data / 'json_2.1.1' / 'train').glob(f'{task.name}-*/trial_*'))
    unlike = next(
      (data / 'json_2.1.1' / 'valid_seen').glob('pick_and*/trial_*')
    )
    shutil.copytree(unlike, trial.parent / 'trial_A')
    # A worker that is built now looks at other folders than the first did.
    for pid in env_processes.workers_of(service.pid):
      os.kill(pid, signal.SIGKILL)
    return before, await follow(client, task)

  with env_service.LocalService('alfworld', 1) as service:
    before, after = with_client(service.address, work)
  assert before == after
  # One that is started now counts the new folder.
  assert len(alfworld_data.find(data).folders['train'][PICK]) == 2


def test_files_that_are_bad_at_the_start_are_named_and_left_out(
  alfworld_folder, tmp_path, monkeypatch
):
  data = edited(alfworld_folder, tmp_path, lambda game: None)
  path = next((data / 'json_2.1.1' / 'train').glob('look_*/trial_*'))
  (path / alfworld_data.GAME).write_text('{"pddl_domain": "(de')
  monkeypatch.setenv('ALFWORLD_DATA', str(data))
  said = subprocess.run(
    [
      sys.executable,
      '-c',
      'from envs_server import alfworld; alfworld.check()',
    ],
    capture_output=True,
    text=True,
    check=True,
  ).stderr
  assert f'{path.relative_to(data / "json_2.1.1")}: game.tw-pddl is no' in said
  assert 'train: 5 (Pick 1, Look 0, Clean 1' in said
  game = alfworld.make_env()
  indices = game.catalog().indices
  assert indices['train']['look_at_obj_in_light'] == ()
  assert indices['valid_seen']['look_at_obj_in_light'] == (0, 1)
  game.close()


def test_no_games_are_told_before_anything_starts(tmp_path, monkeypatch):
  monkeypatch.setenv('ALFWORLD_DATA', str(tmp_path / 'nothing'))
  service = env_service.LocalService('alfworld', 1)
  with pytest.raises(RuntimeError, match='there is no ALFWorld game in'):
    service.start()
  service.stop()
  # Looking for games makes no folder.
  assert not (tmp_path / 'nothing').exists()


def test_neither_torch_nor_vision_is_loaded(alfworld_folder):
  code = (
    'import sys; from envs_server import alfworld as a; game = a.make_env()\n'
    'game.reset(game.catalog().tasks("alfworld", "train")[0])\n'
    'print({"torch", "cv2", "spacy", "ai2thor", "jax"} & set(sys.modules))'
  )
  said = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert said.stdout.strip() == 'set()'
