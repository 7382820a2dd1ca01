"""WebShop as an environment of the service, on a generated catalogue."""

import asyncio
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import env_processes
import pytest

from envs_server import env, webshop
from envs_server.webshop import catalogue, environment, files, nouns, store
from planpo_jax import env_client, env_service, episodes
from planpo_jax.prompts import actions


@pytest.fixture(scope='module')
def shop(webshop_folder):
  return webshop.make_env()


@pytest.fixture(scope='module')
def opened(shop, webshop_folder):
  return store.Store.open(store.find_or_build(files.locate(webshop_folder)))


def task(index=1500, name='human', split='train', **fields):
  return env.Task('webshop', split, index, name, **fields)


def test_the_catalog(shop, opened):
  catalog = shop.catalog()
  catalog.check_itself()
  assert catalog.version == (
    f'webshop 1, {len(opened)} generated products {opened.digest}, nouns by '
    f'{nouns.load().name}'
  )
  assert list(catalog.indices) == ['train', 'dev', 'test']
  assert catalog.task_names == ('human', 'synthetic')
  for name in catalog.task_names:
    splits = catalog.indices.values()
    numbers = {i for by_type in splits for i in by_type[name]}
    assert numbers <= set(range(len(opened.goals[name])))
    assert max(catalog.indices['test'][name]) == 499
    assert max(catalog.indices['dev'][name]) == 1499
    assert min(catalog.indices['train'][name]) >= 1500
  assert catalog.options == {
    'observation': ('text', 'text_rich'),
    'attributes': ('hidden', 'shown'),
  }


def test_types_without_goals_have_no_indices(
  webshop_folder, tmp_path, monkeypatch
):
  for path in webshop_folder.glob('items_[!h]*.json'):
    shutil.copy(path, tmp_path)
  monkeypatch.setenv(files.FOLDER, str(tmp_path))
  catalog = webshop.make_env().catalog()
  splits = catalog.indices.values()
  assert [len(by_type['human']) for by_type in splits] == [0, 0, 0]
  assert len(catalog.indices['test']['synthetic']) == 500
  catalog.check_itself()


def test_an_episode_begins_with_the_goal(shop, opened):
  goal = opened.goals['human'][1500]
  seen = shop.reset(task())
  assert seen == env.Observation(
    text='WebShop [SEP] Instruction: [SEP] '
    f'{goal.instruction.strip()} [SEP] Search',
    goal=goal.instruction,
    info={'page': 'search'},
  )


def solvable(shop, opened, *, choices=1):
  """The first goal with as many options that has a solution, and that."""
  for index in range(1500, 1600):
    if len(opened.goals['human'][index].options) >= choices:
      seen = shop.reset(task(index), True)
      if seen.expert_actions:
        return index, seen.expert_actions
  raise AssertionError('no goal has a solution')


def test_a_purchase_ends_the_episode(shop, opened):
  index, solution = solvable(shop, opened)
  goal = opened.goals['human'][index]
  shop.reset(task(index))
  seen = [shop.step(action) for action in solution]
  *before, last = [(o.score, o.success, o.terminated) for o in seen]
  assert before == [(0.0, False, False)] * (len(solution) - 1)
  assert last == (100.0, True, True)
  info = seen[-1].info
  assert info['asin'] == opened.product(goal.row).asin
  assert len(json.loads(info['chosen'])) == len(goal.options)
  parts = ('type', 'attributes', 'options')
  assert [info[f'reward_{part}'] for part in parts] == ['1.0'] * 3
  assert info['reward_price'] == 'True'


def test_a_part_of_the_reward_is_no_success(shop, opened):
  """Without its options, of attributes + options + 1 the options are lost."""
  index, solution = solvable(shop, opened)
  goal = opened.goals['human'][index]
  shop.reset(task(index))
  code = opened.product(goal.row).asin.lower()
  for action in solution[: solution.index(f'click[{code}]') + 1]:
    shop.step(action)
  seen = shop.step('click[buy now]')
  got, lost = len(goal.attributes) + 1, len(goal.options)
  assert seen.score == pytest.approx(100 * got / (got + lost))
  assert (seen.success, seen.terminated) == (False, True)
  assert seen.info['chosen'] == '{}'


NO_ACTIONS = ('', 'buy it', 'search[]', 'click[b000000000]', 'click[buy now')


@pytest.mark.parametrize('attributes', ['hidden', 'shown'])
def test_what_is_no_action_is_answered_and_changes_nothing(
  shop, opened, attributes
):
  """On every page, and the solution wins none the less."""
  index, solution = solvable(shop, opened)
  looks = ['description', 'features', 'reviews']
  looks += ['attributes'] if attributes == 'shown' else []
  around = [[f'click[{name}]', 'click[< prev]'] for name in looks]
  options = {'attributes': attributes}
  before = shop.reset(task(index, options=options), admissible=True)
  visited = set()
  for action in (*solution[:-1], *sum(around, []), solution[-1]):
    for text in NO_ACTIONS:
      seen = shop.step(text)
      assert seen == dataclasses.replace(before, goal='')
      assert (seen.score, seen.success, seen.terminated) == (0.0, False, False)
    visited.add(seen.info['page'])
    before = shop.step(action)
  assert visited == {
    *('search', 'results', 'item'),
    *(look.capitalize() for look in looks),
  }
  assert (before.score, before.terminated) == (100.0, True)


@pytest.mark.parametrize('name', ['human', 'synthetic'])
def test_the_expert_wins(shop, name):
  won = 0
  catalog = shop.catalog()
  tasks = sum(
    (catalog.tasks('webshop', split, [name]) for split in catalog.indices), []
  )
  for goal in random.Random(0).sample(tasks, 100):
    solution = shop.reset(goal, True).expert_actions
    assert len(solution) <= 15
    # It says nothing where it would not win.
    wins = [shop.step(action).success for action in solution]
    assert wins == [False] * (len(wins) - 1) + [True] * bool(wins)
    won += bool(wins)
  assert won >= 95


def test_admissible_actions_can_be_taken_as_they_are(shop):
  """Each leads to another page, or shows this one anew."""
  draw = random.Random(1)
  names = set()
  for index in range(1500, 1515):
    seen = shop.reset(task(index), admissible=True)
    assert seen.admissible == ('search[<keywords>]',)
    seen = shop.step(f'search[{seen.goal}]')
    for _ in range(14):
      before = shop._session.page
      seen = shop.step(draw.choice(seen.admissible))
      assert shop._session.page is not before
      names.add(seen.info['page'])
      if seen.terminated:
        assert seen.admissible == ()
        break
  assert names >= {'search', 'results', 'item', 'Features', 'done'}
  assert shop.reset(task()).admissible == ()


def test_the_seed_of_a_task_changes_nothing(shop, opened):
  index, solution = solvable(shop, opened)
  played = []
  for seed in (0, 7, -1):
    seen = [shop.reset(task(index, seed=seed), True, True)]
    played.append(seen + [shop.step(action) for action in solution])
  assert played[0] == played[1] == played[2]


def test_a_reset_forgets_the_episode_before(shop, opened):
  index, solution = solvable(shop, opened)
  fresh = shop.reset(task(index), True)
  for action in solution[:-1]:
    shop.step(action)
  assert shop.reset(task(index), True) == fresh
  # Nothing stays chosen or marked.
  last = [shop.step(action) for action in solution[:2]]
  shop.reset(task(index))
  assert [shop.step(action) for action in solution[:2]] == last


def test_options_change_what_is_shown(shop, opened):
  index, solution = solvable(shop, opened)
  options = {'observation': 'text_rich', 'attributes': 'shown'}
  seen = shop.reset(task(index, options=options))
  assert seen.text == (
    f'WebShop\nInstruction: \n{seen.goal}\n[button] Search [button_]\n'
  )
  for action in solution[:-1]:
    seen = shop.step(action)
  assert seen.text.startswith('You have clicked ')
  assert '\n[button] Attributes [button_]\n' in seen.text
  wanted = opened.product(opened.goals['human'][index].row)
  text = shop.step('click[attributes]').text
  assert f'\n {wanted.attributes[0]}\n' in text
  # Neither stays for the next episode.
  assert ' [SEP] ' in shop.reset(task(index)).text
  for action in solution[:-1]:
    seen = shop.step(action)
  assert 'Attributes' not in seen.text
  assert shop.reset(task(options={'observation': ''})).text == (
    shop.reset(task()).text
  )


def test_an_option_has_one_value(shop):
  with pytest.raises(env.TaskError) as caught:
    shop.reset(task(options={'observation': 'text,text_rich'}))
  assert str(caught.value) == (
    "option 'observation' has one value, not 'text,text_rich'; name one of "
    'text, text_rich.'
  )


# Plays forty tasks at random and prints a digest of all that is answered.
TRANSCRIPT = """
import hashlib, random
from envs_server import env, webshop
shop, draw, digest = webshop.make_env(), random.Random(3), hashlib.sha256()
for index in range(1500, 1520):
  for name in ('human', 'synthetic'):
    seen = shop.reset(env.Task('webshop', 'train', index, name), True, True)
    digest.update(repr(seen).encode())
    known = list(seen.expert_actions[:2])
    for _ in range(10):
      if seen.terminated:
        break
      seen = shop.step(known.pop(0) if known else draw.choice(seen.admissible))
      digest.update(repr(seen).encode())
print(shop.catalog().version, digest.hexdigest())
"""


def python(code, **variables):
  return subprocess.run(
    [sys.executable, '-c', code],
    env=os.environ | variables,
    capture_output=True,
    text=True,
  )


def test_two_processes_play_the_same(webshop_folder, shop):
  first, second = (
    python(TRANSCRIPT, PYTHONHASHSEED=seed) for seed in ('1', '2')
  )
  assert first.returncode == 0, first.stderr
  assert first.stdout == second.stdout
  assert first.stdout.startswith(shop.catalog().version)
  assert len(first.stdout.split()[-1]) == hashlib.sha256().digest_size * 2


def test_odd_values_reach_the_policy_and_come_back(shop, opened):
  """Those with slashes, brackets and letters of other scripts, as the service
  sends actions: in lower case, and with blanks folded."""
  chosen = []
  for row in range(len(opened)):
    product = opened.product(row)
    odd = [
      value
      for values in product.options.values()
      for value in values
      if set(value) & set('[|') or not value.isascii()
    ]
    if not odd:
      continue
    shop.reset(task(options={'observation': 'text_rich'}))
    words = re.sub(r'\W', ' ', product.title)
    shop.step(actions.fold(f'search[{words}]'))
    seen = shop.step(actions.fold(f'click[{product.asin}]'))
    for value in odd:
      assert f'  [button] {value} [button_]\n' in seen.text
      now = shop.step(actions.fold(f'click[{value}]'))
      assert now.text.startswith(f'You have clicked {value}.\n')
      shop.step('click[< prev]')
      shop.step(f'click[{product.asin}]')
    chosen += odd
  assert {'4 oz  |  2 pack', 'size [xl]', '黒色', 'green 🌿'} <= set(chosen)


@pytest.fixture
def checked(webshop_folder, monkeypatch):
  """The folder that a service settles on; its workers open it."""
  # Put back afterwards, whatever the check sets.
  monkeypatch.setenv(environment._INDEX, '')
  webshop.check()
  return pathlib.Path(os.environ[environment._INDEX])


def test_check_says_what_was_found(checked, capsys):
  webshop.check()
  told = capsys.readouterr()
  assert told.out == ''
  head, *table = told.err.splitlines()[-4:]
  opened = store.Store.open(checked)
  assert head == (
    f'WebShop: {len(opened)} generated products {opened.digest} in {checked}, '
    f'nouns by {nouns.load().name}'
  )
  assert table[0].split() == ['goals', 'train', 'dev', 'test']
  for line, name in zip(table[1:], ('human', 'synthetic'), strict=True):
    found = opened.goals[name].splits
    sizes = [str(len(found[split])) for split in ('train', 'dev', 'test')]
    assert line.split() == [name, *sizes]
  assert 'warning' not in told.err


def test_check_builds_with_word_of_it_and_warns_of_no_goal_to_train_on(
  tmp_path, monkeypatch, capsys
):
  catalogue.generate(tmp_path, products=10, plain=True)
  (tmp_path / files.HUMAN).unlink()
  monkeypatch.setenv(files.FOLDER, str(tmp_path))
  monkeypatch.setenv(environment._INDEX, '')
  webshop.check()
  told = capsys.readouterr().err
  assert '10 products read; making the search index\n' in told
  assert told.endswith(
    'warning: there is no goal to train on: the first 1500 of each type are of '
    'test and dev; give more products.\n'
  )


def test_check_says_that_it_gets_on(checked, tmp_path, monkeypatch, capsys):
  """Else a service is given up while something in it takes long."""
  monkeypatch.setattr(environment, '_BEAT_S', 0.02)
  find = store.find_or_build

  def slowly(*args, **options):
    time.sleep(0.3)
    return find(*args, **options)

  monkeypatch.setattr(store, 'find_or_build', slowly)
  threads = threading.active_count()
  webshop.check()
  told = capsys.readouterr().err.splitlines()
  beats = [line for line in told if line.startswith(env.PREPARING + 'WebShop')]
  assert len(beats) >= 3
  # It ends with the check, also with one that fails.
  assert threading.active_count() == threads
  monkeypatch.setenv(files.FOLDER, str(tmp_path))
  with pytest.raises(RuntimeError):
    webshop.check()
  assert threading.active_count() == threads


def test_workers_open_what_the_service_settled_on(
  checked, shop, tmp_path, monkeypatch
):
  """Also when the data change, for tasks must stay what they were."""
  catalogue.generate(tmp_path, products=10, plain=True)
  monkeypatch.setenv(files.FOLDER, str(tmp_path))
  assert webshop.make_env().catalog() == shop.catalog()
  monkeypatch.delenv(environment._INDEX)
  assert webshop.make_env().catalog() != shop.catalog()


def test_check_without_data_says_where_they_come_from(monkeypatch):
  monkeypatch.setenv(environment._INDEX, '')
  monkeypatch.delenv(files.FOLDER, raising=False)
  with pytest.raises(RuntimeError, match=r'WEBSHOP_DATA is not set.*gdown'):
    webshop.check()
  assert os.environ[environment._INDEX] == ''


def test_check_names_data_that_are_broken(tmp_path, monkeypatch):
  monkeypatch.setenv(environment._INDEX, '')
  catalogue.generate(tmp_path, products=10, plain=True)
  (tmp_path / files.FULL[0]).write_text('[{"asin": "B1"')
  monkeypatch.setenv(files.FOLDER, str(tmp_path))
  with pytest.raises(RuntimeError, match='items_shuffle.json, at record 0'):
    webshop.check()


def test_check_without_a_package_says_how_to_install_it(webshop_folder):
  code = (
    'import sys; sys.modules["Stemmer"] = None\n'
    'from envs_server import webshop\n'
    'webshop.check()'
  )
  done = python(code)
  assert done.returncode == 1
  last = done.stderr.splitlines()[-1]
  assert last.startswith('RuntimeError: WebShop is not installed (')
  assert 'Stemmer' in last
  assert last.endswith('; run `pip install -r envs_server/requirements.txt`.')


def broken_model(folder):
  """PYTHONPATH with a model of spaCy that cannot be imported."""
  (folder / 'spacy.py').write_text('')
  (folder / f'{nouns.MODEL}.py').write_text(
    'raise ImportError("no such symbol\\nin spacy.so")'
  )
  return f'{pathlib.Path(__file__).parents[1]}:{folder}'


def test_a_spacy_that_does_not_work_is_told_from_a_missing_package(
  webshop_folder, tmp_path
):
  path = broken_model(tmp_path)
  done = python(
    'from envs_server import webshop; webshop.check()', PYTHONPATH=path
  )
  assert done.returncode == 1
  last = done.stderr.splitlines()[-1]
  assert f'spaCy and its model {nouns.MODEL} are installed and do not' in last
  assert '(ImportError: no such symbol in spacy.so)' in last
  assert '`pip uninstall spacy`' in last
  assert 'WebShop is not installed' not in done.stderr


def test_a_worker_reads_the_model_before_its_first_episode(
  webshop_folder, tmp_path
):
  """The service, which needs its version alone, does without."""
  path = broken_model(tmp_path)
  about = tmp_path / f'{nouns.MODEL}-9.8.7.dist-info'
  about.mkdir()
  (about / 'METADATA').write_text(f'Name: {nouns.MODEL}\nVersion: 9.8.7\n')
  code = 'from envs_server import webshop; webshop.check(); webshop.make_env()'
  done = python(code, PYTHONPATH=path)
  assert done.returncode == 1
  assert f', nouns by spaCy {nouns.MODEL} 9.8.7\n' in done.stderr
  assert '(ImportError: no such symbol in spacy.so)' in done.stderr


def test_importing_is_cheap_and_playing_needs_no_jax(webshop_folder):
  code = (
    'import sys\n'
    'from envs_server import webshop\n'
    'print([m for m in ("numpy", "thefuzz", "Stemmer") if m in sys.modules])\n'
    'webshop.make_env()\n'
    'print("jax" in sys.modules, "numpy" in sys.modules)'
  )
  assert python(code).stdout.split('\n')[:2] == ['[]', 'False True']


@pytest.fixture
def copied(checked, tmp_path, monkeypatch):
  """A copy of the folder that a service settles on; its workers open it."""
  copy = tmp_path / 'index'
  shutil.copytree(checked, copy)
  monkeypatch.setenv(environment._INDEX, str(copy))
  return copy


def test_a_damaged_index_breaks_the_task_and_not_the_environment(
  copied, opened
):
  """Bytes of a product are overwritten, after a worker has opened it."""
  worker = webshop.make_env()
  index, solution = solvable(worker, opened)
  goal = opened.goals['human'][index]
  with open(copied / 'products', 'r+b') as file:
    place = file.read().index(b'"' + opened.product(goal.row).asin.encode())
    file.seek(place)
    file.write(b'\xff' * 8)
  with pytest.raises(env.BrokenTaskError) as caught:
    worker.reset(task(index), True)
  assert str(caught.value).startswith(
    f'human {index} cannot be played, for the index is damaged (Unicode'
  )
  worker.reset(task(index))
  with pytest.raises(env.BrokenTaskError):
    for action in solution:
      worker.step(action)
  other = next(
    i for i in range(1500, 1600) if opened.goals['human'][i].row != goal.row
  )
  assert (
    worker.reset(task(other)).goal == opened.goals['human'][other].instruction
  )


@pytest.mark.parametrize(
  'name, error', [('human', 'JSONDecodeError'), ('rows', 'IndexError')]
)
def test_damaged_goals_and_searches_break_the_task(copied, name, error):
  worker = webshop.make_env()
  with open(copied / name, 'r+b') as file:
    file.write(b'\x7f' * os.path.getsize(copied / name))
  with pytest.raises(
    env.BrokenTaskError, match=rf'^human 1500 .* is damaged \({error}: '
  ):
    seen = worker.reset(task())
    worker.step(f'search[{seen.goal}]')


def test_a_fault_of_the_program_is_not_laid_on_the_index(shop, monkeypatch):
  def wrong(*unused):
    raise ValueError('a fault of ours')

  shop.reset(task())
  monkeypatch.setattr(environment.session.Session, '_show_results', wrong)
  with pytest.raises(ValueError, match='a fault of ours'):
    shop.step('search[soap]')


def test_a_service_plays_on_when_its_workers_are_killed(shop, opened):
  index, solution = solvable(shop, opened)
  wanted = episodes.Task('webshop', 'train', index, 'human')

  async def play(client, kill=lambda: None):
    session = client.session(wanted, step_limit=15, expert=True)
    try:
      seen = [await session.reset()]
      for action in seen[0].expert_actions:
        if len(seen) == len(solution):
          kill()
        seen.append(await session.step(action))
    finally:
      await session.close()
    return seen, session.faults

  async def work(service):
    client = env_client.EnvClient(service.address)
    await client.connect()
    try:
      description = await client.describe()
      whole = await play(client)

      def kill():
        for pid in env_processes.workers_of(service.pid):
          os.kill(pid, signal.SIGKILL)

      return description, whole, await play(client, kill)
    finally:
      await client.close()

  with env_service.LocalService('webshop', 2) as service:
    description, whole, broken = asyncio.run(work(service))
  assert description.version == shop.catalog().version
  assert description.splits == shop.catalog().split_sizes
  seen, faults = whole
  assert seen[0].expert_actions == solution and faults == 0
  assert (seen[-1].score, seen[-1].success) == (100.0, True)
  assert seen[-1].ending is episodes.Ending.TERMINATED
  seen_again, faults = broken
  assert seen_again == seen and faults >= 1


def looked_into(*flags, data, actions=''):
  """What `python -m envs_server.webshop` does in a process of its own."""
  return subprocess.run(
    [sys.executable, '-m', 'envs_server.webshop', *flags],
    input=actions,
    env=os.environ | {files.FOLDER: str(data), environment._INDEX: ''},
    capture_output=True,
    text=True,
  )


def test_an_expert_can_be_watched(shop, opened, webshop_folder):
  number, solution = solvable(shop, opened)
  done = looked_into(f'--goal={number}', '--expert', data=webshop_folder)
  assert done.returncode == 0, done.stderr
  shown = [line[2:] for line in done.stdout.splitlines() if line[:2] == '> ']
  assert tuple(shown) == solution
  assert done.stdout.endswith('\nscore 100, success True\n')


def test_one_can_shop_by_hand(webshop_folder):
  done = looked_into(
    '--goal=1500', data=webshop_folder, actions='search[soap]\nclick[next >]\n'
  )
  assert done.returncode == 0, done.stderr
  pages = re.findall(r'WebShop \[SEP\]|Page (\d+) \(Total', done.stdout)
  assert pages == ['', '1', '2']


def test_a_goal_that_there_is_not_is_named(webshop_folder):
  done = looked_into('--goal=123456', data=webshop_folder)
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.splitlines()[-1].startswith(
    'there is no human goal 123456; there are train 1500 to 2499, dev 500 to '
    '1499, test 0 to 499.'
  )


def test_files_that_are_read_are_named_and_a_missing_one_too(
  webshop_folder, tmp_path
):
  said = looked_into(data=webshop_folder).stderr
  assert 'items_shuffle.json, items_ins_v2.json, items_human_ins.json' in said
  assert 'warning' not in said
  for path in webshop_folder.glob('items_[!h]*.json'):
    shutil.copy(path, tmp_path)
  said = looked_into(data=tmp_path).stderr
  assert 'items_ins_v2.json, no items_human_ins.json' in said
  assert 'warning: there is no human goal; items_human_ins.json is' in said


def test_an_expert_needs_a_goal(webshop_folder):
  done = looked_into('--expert', data=webshop_folder)
  assert done.returncode == 2 and '--expert needs --goal=N' in done.stderr


def test_a_shop_without_data_cannot_be_looked_into(tmp_path):
  done = looked_into(data=tmp_path / 'none')
  assert done.returncode == 1
  assert done.stderr.startswith('$WEBSHOP_DATA=')
  assert 'setup.sh -d small' in done.stderr
