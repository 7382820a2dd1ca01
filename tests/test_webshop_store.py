"""The catalogue of WebShop as it is laid out for workers, and its search."""

import fcntl
import gzip
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from envs_server import env
from envs_server.webshop import (
  catalogue,
  files,
  goals,
  products,
  search,
  store,
)

REPOSITORY = pathlib.Path(__file__).parent.parent
ADJECTIVES = ('red', 'blue', 'soft', 'long', 'small', 'warm')
ENTRY = {
  'attributes': ['soft'],
  'instruction': 'Find me something',
  'instruction_attributes': ['soft'],
}
NOUNS = ('shoe', 'hat', 'lamp', 'rug', 'chair')
# A machine that is busy with other things is no fault.
UNHURRIED = hypothesis.settings(
  deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """Where what cannot lie beside the data is put."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'planpo_jax' / 'webshop'


def item(number, **changes):
  draw = random.Random(number)
  return {
    'asin': f'B{number:09d}',
    'name': f'{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} {number}',
    'full_description': ' '.join(draw.choices(ADJECTIVES, k=3)),
    'small_description': ['first', 'second'],
    'pricing': '$10.0 to $90.0',
    'images': [''],
    'product_category': 'Home › Things',
    'customization_options': {
      'Size': [{'value': 'S'}, {'value': 'L'}],
      'Color': [{'value': 'Red'}],
    },
    'category': 'home',
    'query': 'things',
    **changes,
  }


def put(data, items, human=None, attributes=None):
  """Writes the files of a catalogue."""
  data.mkdir(exist_ok=True)
  if attributes is None:
    attributes = {record['asin']: ENTRY for record in items}
  for name, content in (
    ('items_shuffle.json', items),
    ('items_ins_v2.json', attributes),
    ('items_human_ins.json', human or {}),
  ):
    (data / name).write_text(json.dumps(content))
  return files.locate(data)


def wanted(text, attributes=('soft',), options=()):
  return {
    'instruction': text,
    'instruction_attributes': list(attributes),
    'instruction_options': list(options),
  }


def opened(sources, **options):
  return store.Store.open(store.find_or_build(sources, **options))


def ranked(texts):
  builder = search.Builder()
  for text in texts:
    builder.add(text)
  return search.Index(builder.arrays(), len(texts))


# Words.


@pytest.mark.parametrize(
  'text, words',
  [
    ("Women's", ['women']),
    ('women\u2019s WOMEN\uff07S', ['women', 'women']),
    ('T-Shirt', ['t', 'shirt']),
    ('6.76 fl oz', ['6.76', 'fl', 'oz']),
    ('1,000 a.b 3.5oz a.5', ['1,000', 'a.b', '3.5oz', '5']),
    ('size:large 4:5 x; y', ['size:larg', '4', '5', 'x', 'y']),
    ('foo_bar __ _x', ['foo_bar', '_x']),
    ('running runs', ['run', 'run']),
    # Porter's endings, and words too short for any.
    ('us is s ps caresses ponies', ['us', 's', 'ps', 'caress', 'poni']),
    ('the The THE and', []),
    ('$9.99 (100%) a/b', ['9.99', '100', 'b']),
    ('café Größe naïve', ['café', 'größe', 'naïv']),
    ('cafe\u0301s', ['cafe\u0301']),
    ('½ x² ™ ❤', ['x']),
    ('不锈钢 cup', ['不', '锈', '钢', 'cup']),
    ('ひらカタカナ', ['ひ', 'ら', 'カタカナ']),
    ('한국어 ไทยแลนด์', ['한국어', 'ไทยแลนด์']),
    ('zero\u200bwidth soft\u00adhyphen', ['zero', 'width', 'soft\u00adhyphen']),
    ('\ud800x', ['x']),
    ('x' * 300, ['x' * 255, 'x' * 45]),
    ('', []),
    (' \n', []),
  ],
)
def test_words_are_those_of_the_english_analyzer(text, words):
  assert search.analyze(text) == words


def test_all_stop_words_are_left_out():
  listed = (
    'a an and are as at be but by for if in into is it no not of on or such '
    'that the their then there these they this to was will with'
  )
  assert len(listed.split()) == 33
  assert search.analyze(listed) == []
  assert search.analyze('from you i') == ['from', 'you', 'i']


@UNHURRIED
@hypothesis.given(strategies.text(strategies.characters(max_codepoint=0x2FF)))
def test_words_outside_ascii_are_found_as_those_inside(text):
  """A letter that changes nothing but the path taken."""
  inside = [found for found in search.analyze(text) if found.isascii()]
  both = search.analyze(f'{text} é')
  assert both[-1] == 'é'
  assert [found for found in both if found.isascii()] == inside


@UNHURRIED
@hypothesis.given(strategies.sets(strategies.text(), max_size=40))
def test_words_are_looked_up(words):
  listed = sorted(words, reverse=True)
  text, ends, order = search.Words.pack(listed)
  found = search.Words(text, ends)
  for place, word in enumerate(listed):
    assert order[found.find(word)] == place
  for word in ('\ud800', 'zz', *(word + 'x' for word in words)):
    assert (found.find(word) is None) == (word not in words)


# Ranks.


def test_scores_are_those_of_the_formula():
  """Two documents, of 1 and 3 words, so 2 on average.

  red: idf ln(1 + 1.5 / 1.5) = 0.693147; twice among 3 words, where k1(1 - b +
  b 3/2) = 0.9 x 1.2 = 1.08: 0.693147 x 2 / 3.08 = 0.450096.
  shoe: idf ln(1 + 0.5 / 2.5) = 0.182322; among 1 word, 0.9 x 0.8 = 0.72:
  0.182322 / 1.72 = 0.106001; among 3 words: 0.182322 / 2.08 = 0.087655.
  """
  builder = search.Builder()
  for text in ('The shoe', 'Red red shoes'):
    builder.add(text)
  arrays = builder.arrays()
  assert arrays['word_text'].tobytes() == b'redshoe'
  assert arrays['starts'].tolist() == [0, 1, 3]
  assert arrays['rows'].tolist() == [1, 0, 1]
  np.testing.assert_allclose(
    arrays['scores'], [0.450096, 0.106001, 0.087655], atol=1e-6
  )


def test_scores_are_those_of_bm25s(monkeypatch):
  monkeypatch.setattr(search, '_CHUNK', 7)
  draw = random.Random(0)
  vocabulary = [f'w{i}' for i in range(60)]
  weights = [1 / (i + 1) for i in range(60)]
  texts = [
    ' '.join(draw.choices(vocabulary, weights, k=draw.randrange(30)))
    for _ in range(200)
  ]
  ours = ranked(texts)._ranker
  import bm25s

  listed = sorted({word for text in texts for word in text.split()})
  number = {word: i for i, word in enumerate(listed)}
  theirs = bm25s.BM25(k1=0.9, b=0.4, method='lucene')
  theirs.scores = theirs.build_index_from_ids(
    list(number.values()),
    [[number[word] for word in text.split()] for text in texts],
    show_progress=False,
  )
  for name in ('data', 'indices', 'indptr'):
    assert np.array_equal(ours.scores[name], theirs.scores[name]), name
  for _ in range(50):
    query = [number[word] for word in draw.choices(listed, k=5)]
    assert np.array_equal(
      ours.get_scores_from_ids(query), theirs.get_scores_from_ids(query)
    )


@UNHURRIED
@hypothesis.given(
  strategies.integers(0, 2**32 - 1),
  strategies.sampled_from([1, 49, 50, 51, 700, 26_000, 60_000]),
  strategies.sampled_from([0.0001, 0.01, 1.0]),
  strategies.sampled_from([1, 3, 1000]),
  strategies.sampled_from([1, 10, 50]),
)
def test_the_best_are_those_of_a_stable_sort(seed, size, share, values, k):
  draw = np.random.default_rng(seed)
  scores = draw.integers(1, values + 1, size).astype(np.float32)
  scores[draw.random(size) >= share] = 0
  order = np.argsort(-scores, kind='stable')
  expected = [int(i) for i in order[:k] if scores[i] > 0]
  assert search.top(scores, k) == expected


def test_a_search_ranks_by_score_then_row():
  index = ranked(['x', 'red hat', 'red shoe', 'shoe red', 'red', 'red shoe'])
  assert index.search('Shoes') == [2, 3, 5]
  assert index.search('red') == [4, 1, 2, 3, 5]
  assert index.search('red', 2) == [4, 1]
  assert index.search('a red, hat!') == [1, 4, 2, 3, 5]


def test_a_word_counts_as_often_as_it_is_said():
  index = ranked(['red', 'hat', 'red', 'x'])
  assert index.search('red hat') == [1, 0, 2]
  assert index.search('red hat red red') == [0, 2, 1]


@pytest.mark.parametrize('text', ['', 'the', 'unknown', '!?', '不', 'th'])
def test_a_search_for_nothing_known_finds_nothing(text):
  assert ranked(['red shoe', 'the hat']).search(text) == []


def test_fifty_are_found_at_most():
  index = ranked(['red'] * 60)
  assert index.search('red') == list(range(50))


def test_searching_starts_no_jax():
  """It would take the accelerator; and what was imported before stays."""
  code = (
    'import sys, types; kept = sys.modules["scipy"] = types.ModuleType("scipy")'
    '\nfrom envs_server.webshop import search'
    '\nb = search.Builder(); b.add("red")'
    '\nassert search.Index(b.arrays(), 1).search("red") == [0]'
    '\nassert sys.modules["scipy"] is kept'
    '\nprint([m for m in ("jax", "jaxlib", "numba", "scipy.sparse")'
    ' if m in sys.modules])'
  )
  said = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    cwd=REPOSITORY,
  )
  assert said.stdout == '[]\n', said.stderr


# What is stored.


def test_products_come_back(tmp_path):
  items = [item(i) for i in (3, 0, 4, 1, 2)]
  items[2] |= {'name': 'Größe 😀\t"x"\n', 'pricing': ''}
  found = opened(put(tmp_path / 'data', items))
  assert len(found) == 5
  for row, record in enumerate(items):
    assert found.product(row) == products.parse(record, ENTRY, '')
  for row in (-1, 5):
    with pytest.raises(IndexError):
      found.product(row)


def test_records_that_do_not_count_have_no_row(tmp_path):
  items = [
    *(item(0), item(1, asin='nan'), item(2, asin='B0123456789')),
    *(item(3, asin='B000000000', name='twice'), item(4)),
  ]
  found = opened(put(tmp_path / 'data', items))
  assert [found.product(row).asin for row in range(len(found))] == [
    'B000000000',
    'B000000004',
  ]
  assert found.product(0).title != 'twice' and found.search('twice') == []
  assert len(found.goals['human']) == 0
  assert len(found.goals['synthetic']) == 4


def test_products_are_found_by_their_texts(tmp_path):
  items = [
    item(0, name='Plain', full_description='', customization_options=''),
    item(1, name='Azure boots'),
    item(2, full_description='An azure thing'),
    item(3, small_description=['azure', 'cobalt']),
    item(4, customization_options={'Tone': [{'value': 'Azure/Teal'}]}),
  ]
  found = opened(put(tmp_path / 'data', items))
  assert sorted(found.search('AZURE')) == [1, 2, 3, 4]
  assert found.search('tone teal') == [4]
  # Bullets after the first, and attributes, are not searched.
  assert found.search('cobalt') == []
  assert found.search('azure', 1) == found.search('azure')[:1]


def test_goals_of_people_come_in_the_published_order(tmp_path):
  items = [item(i) for i in range(4)]
  human = {
    'B000000002': [wanted('c.', ['x', 'y'], ['s']), wanted('d', [])],
    'B000000000': [wanted('a'), wanted('b')],
    'B000000009': [wanted('of no product')],
  }
  found = opened(put(tmp_path / 'data', items, human))
  listed = [
    goal
    for row in (0, 2)
    for goal in goals.human(
      found.product(row), row, human[found.product(row).asin], ''
    )
  ]
  people = found.goals['human']
  assert len(listed) == 3
  assert list(people) == [listed[i] for i in goals.order(3)]
  assert people.rows().tolist() == [goal.row for goal in people]
  with pytest.raises(IndexError):
    people[3]


def test_goals_of_options_come_in_the_published_order(tmp_path):
  items = [item(i) for i in range(3)]
  items.insert(1, item(7, asin='B000000007', customization_options={}))
  sources = put(tmp_path / 'data', items)
  entries = json.loads(sources.attributes.read_text())
  del entries['B000000001']
  found = opened(put(tmp_path / 'data', items, attributes=entries))
  listed = [
    goals.synthetic(found.product(row), row, number)
    for row in range(4)
    for number in range(goals.synthetic_count(found.product(row)))
  ]
  made = found.goals['synthetic']
  assert [goal.row for goal in listed] == [0, 0, 1, 3, 3]
  assert list(made) == [listed[i] for i in goals.order(5)]
  assert made.rows().tolist() == [goal.row for goal in made]
  assert all(type(goal.row) is int for goal in made)
  for number in (-1, 5):
    with pytest.raises(IndexError):
      made[number]


def test_goals_of_one_split_are_not_in_another(tmp_path):
  items = [item(i, customization_options={}) for i in range(20)]
  values = [{'value': str(i)} for i in range(45)]
  # Two options with the same values: half of the goals ask for the same.
  items[3]['customization_options'] = {'in': values, 'out': values}
  human = {
    record['asin']: [wanted(f'g{i}', [f'{i % 90}']) for i in range(100)]
    for record in items
  }
  found = opened(put(tmp_path / 'data', items, human))
  for kind, count in (('human', 2000), ('synthetic', 45 * 45 + 19)):
    listed = found.goals[kind]
    assert len(listed) == count
    keys = [goals.key(goal) for goal in listed]
    expected = goals.unlike(keys, goals.splits(count))
    assert {s: list(n) for s, n in listed.splits.items()} == {
      split: list(numbers) for split, numbers in expected.items()
    }
    train, dev, test = (
      {keys[i] for i in listed.splits[split]}
      for split in ('train', 'dev', 'test')
    )
    assert not train & dev and not train & test and not dev & test
    assert len(listed.splits['train']) < count - 1500
    assert listed.splits['test'] == range(500)


def groups_of(*groups):
  return {
    f'group {i}': [{'value': value} for value in group]
    for i, group in enumerate(groups)
  }


@pytest.mark.parametrize('shared', [False, True])
def test_many_combinations_are_not_read_one_by_one(
  tmp_path, monkeypatch, shared
):
  """Two products of 90,000 goals each, all but sure to be in every split."""
  values = [str(i) for i in range(300)]
  others = values if shared else [f'other {i}' for i in range(300)]
  groups = groups_of(values, others)
  items = [item(i, customization_options=groups) for i in range(2)]
  read, from_json = [], products.from_json
  monkeypatch.setattr(
    products, 'from_json', lambda line: read.append(line) or from_json(line)
  )
  made = opened(put(tmp_path / 'data', items)).goals['synthetic']
  assert len(made) == 180_000 and len(read) == 2
  # Of 1,500 goals each has one other that is alike, or is its own.
  left = 178_500 - len(made.splits['train'])
  assert 1450 < left <= 1500 if shared else left == 0


def test_too_many_combinations_make_no_synthetic_goals(tmp_path):
  """100 ** 10, which no list and no number of 64 bits could hold."""
  groups = groups_of(*[[f'{i}/{j}' for j in range(100)] for i in range(10)])
  items = [item(0), item(1, customization_options=groups)]
  said = []
  found = opened(
    put(tmp_path / 'data', items, {'B000000001': [wanted('a')]}),
    progress=said.append,
  )
  assert len(found.goals['synthetic']) == 0
  assert set(found.goals['synthetic'].splits.values()) == {range(0)}
  assert len(found.goals['human']) == 1 and len(found) == 2
  (line,) = [line for line in said if 'no synthetic goals' in line]
  assert f'{10**20 + 2} combinations, more than {2**25};' in line
  assert 'WEBSHOP_PRODUCTS=N' in line


def test_as_many_synthetic_goals_as_may_be(tmp_path, monkeypatch):
  monkeypatch.setattr(store, '_MOST_SYNTHETIC', 6)
  items = [item(i) for i in range(4)]
  for count, made in ((3, 6), (4, 0)):
    found = opened(put(tmp_path / f'{count}', items[:count]))
    assert len(found.goals['synthetic']) == made


@UNHURRIED
@hypothesis.given(
  strategies.integers(0, 30),
  strategies.integers(0, 30),
  strategies.data(),
)
def test_numbers_are_those_of_a_list(start, length, data):
  whole = range(start, start + length)
  left = data.draw(
    strategies.sets(strategies.sampled_from(whole))
    if length
    else strategies.just(set())
  )
  found = env.Numbers(whole, tuple(sorted(left)))
  listed = [number for number in whole if number not in left]
  assert list(found) == listed and len(found) == len(listed)
  assert [found[i] for i in range(len(listed))] == listed
  assert found[2:-1] == listed[2:-1] and found[:] == listed
  assert [n for n in range(-1, 70) if n in found] == listed
  assert 'x' not in found
  if listed:
    assert found[-1] == listed[-1]
  with pytest.raises(IndexError):
    found[len(listed)]


def test_the_digest_is_of_the_content(tmp_path):
  items, human = [item(i) for i in range(5)], {'B000000001': [wanted('a')]}
  first = opened(put(tmp_path / 'one', items, human)).digest
  assert len(first) == 8 and int(first, 16) >= 0
  # Other spelling, other compression, what does not count: the same.
  sources = put(tmp_path / 'two', [*items, item(6, asin='nan')], human)
  packed = sources.items.with_suffix('.json.gz')
  packed.write_bytes(gzip.compress(sources.items.read_bytes()))
  sources.items.unlink()
  assert opened(files.locate(tmp_path / 'two')).digest == first
  human['B000000001'][0]['instruction'] = 'b'
  assert opened(put(tmp_path / 'three', items, human)).digest != first
  assert opened(put(tmp_path / 'four', items[:4], human)).digest != first


def test_a_catalogue_without_goals_of_people(tmp_path):
  sources = put(tmp_path / 'data', [item(0)])
  sources.human.unlink()
  found = opened(files.locate(tmp_path / 'data'))
  assert len(found.goals['human']) == 0
  assert set(found.goals['human'].splits.values()) == {range(0)}
  assert len(found.goals['synthetic']) == 2


def test_no_more_records_than_asked_for(tmp_path):
  sources = put(
    tmp_path / 'data',
    [item(i, asin='nan' if i == 1 else f'B{i}') for i in range(6)],
  )
  few, whole = opened(sources, limit=3), opened(sources)
  assert (len(few), len(whole)) == (2, 5)
  assert few.product(1) == whole.product(1)


def test_whether_products_are_generated_is_told_by_themselves(tmp_path):
  """Not by what lies beside the files, which may be moved."""
  made = tmp_path / 'made'
  catalogue.generate(made / 'rich', products=3, goals=5)
  catalogue.generate(made / 'plain', products=3, goals=5, plain=True)
  for kind in ('rich', 'plain'):
    (tmp_path / kind).mkdir()
    for name in catalogue.FILES:
      (tmp_path / kind / name).symlink_to(made / kind / name)
    assert opened(files.locate(tmp_path / kind)).generated is True
  real = tmp_path / 'real'
  images = ([''], [], None, ['https://m.media-amazon.com/a.jpg'], [3], 'x')
  for shown in images:
    sources = put(real, [item(0, images=shown)])
    (real / catalogue.GENERATED).write_text('{}')
    assert opened(sources).generated is False


def test_arrays_are_mapped_and_not_loaded(tmp_path):
  sources = put(tmp_path / 'data', [item(0)], {'B000000000': [wanted('a')]})
  path = store.find_or_build(sources)
  found = store.Store.open(path)
  maps = pathlib.Path('/proc/self/maps').read_text().splitlines()
  for name in store._ARRAYS:
    (line,) = [line for line in maps if line.endswith(f' {path / name}')]
    assert line.split()[1] == 'r--s'
  assert found.search('things') is not None


# Building.


def parts(folder):
  """What lies in a folder of indices, besides the lock."""
  return sorted(p.name for p in folder.iterdir() if p.name != 'lock')


def child(data, progress):
  """Starts a process that builds, and calls `progress(line)` as it does."""
  code = (
    'import pathlib, sys, time\n'
    'from envs_server.webshop import files, store\n'
    'here = pathlib.Path(sys.argv[1])\n'
    f'def progress(line):\n{progress}\n'
    'path = store.find_or_build(files.locate(here), progress=progress)\n'
    'print(path)\n'
  )
  return subprocess.Popen(
    [sys.executable, '-c', code, str(data)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=REPOSITORY,
  )


def wait_for(path):
  end = time.monotonic() + 30
  while not path.exists():
    assert time.monotonic() < end, f'{path} never came'
    time.sleep(0.01)


def test_what_was_built_is_found(tmp_path):
  sources, said = put(tmp_path / 'data', [item(0)]), []
  path = store.find_or_build(sources, progress=said.append)
  assert path.parent == tmp_path / 'data' / 'index' and said
  before = os.stat(path.parent).st_mtime_ns
  assert store.find_or_build(sources, progress=pytest.fail) == path
  store.build(sources, path, progress=pytest.fail)
  assert os.stat(path.parent).st_mtime_ns == before
  assert parts(path.parent) == [path.name]


def test_each_step_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(store, '_REPORT', 2)
  monkeypatch.setattr(store, '_REPORT_ENTRIES', 2)
  items, said = [item(i) for i in range(5)], []
  human = {record['asin']: [wanted('a')] for record in items[:3]}
  opened(put(tmp_path / 'data', items, human), progress=said.append)
  assert said == [
    '2 entries of items_ins_v2.json read',
    '4 entries of items_ins_v2.json read',
    'all 5 entries of items_ins_v2.json read',
    '2 entries of items_human_ins.json read',
    'all 3 entries of items_human_ins.json read',
    '2 products read',
    '4 products read',
    '5 products read; making the search index',
    'ordering 3 human and 10 synthetic goals',
    'writing the index',
    'comparing the goals of train, dev and test',
  ]


def test_who_waits_for_another_says_so_again(tmp_path, monkeypatch):
  monkeypatch.setattr(store, '_WAIT_REPORT', 0.05)
  monkeypatch.setattr(store, '_WAIT', 0.01)
  sources, said = put(tmp_path / 'data', [item(0)]), []
  (tmp_path / 'data' / 'index').mkdir()
  with open(tmp_path / 'data' / 'index' / 'lock', 'ab') as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    # Lets go also where nothing is said.
    timer = threading.Timer(10, fcntl.flock, (other, fcntl.LOCK_UN))
    timer.start()

    def progress(line):
      said.append((time.monotonic(), line))
      if len(said) == 3:
        fcntl.flock(other, fcntl.LOCK_UN)

    path = store.find_or_build(sources, progress=progress)
    timer.cancel()
  waiting = [when for when, line in said if 'waiting for it' in line]
  assert len(waiting) == 3 and len(said) > 3
  assert all(b - a >= 0.05 for a, b in zip(waiting, waiting[1:], strict=False))
  assert len(store.Store.open(path)) == 1


def test_of_two_that_build_at_once_one_waits(tmp_path):
  put(tmp_path / 'data', [item(i) for i in range(20)])
  first = child(
    tmp_path / 'data',
    '  (here / "building").touch()\n'
    '  while not (here / "waiting").exists(): time.sleep(0.01)\n',
  )
  wait_for(tmp_path / 'data' / 'building')
  second = child(
    tmp_path / 'data',
    '  print(line, flush=True)\n  (here / "waiting").touch()\n',
  )
  (path,) = first.communicate(timeout=30)[0].split()
  said = second.communicate(timeout=30)[0].splitlines()
  assert len(said) == 2 and 'another process builds' in said[0]
  assert said[1] == path
  assert parts(tmp_path / 'data' / 'index') == [pathlib.Path(path).name]
  assert len(store.Store.open(pathlib.Path(path))) == 20


def test_a_build_that_is_killed_leaves_nothing_that_counts(tmp_path):
  sources = put(tmp_path / 'data', [item(i) for i in range(20)])
  killed = child(
    tmp_path / 'data',
    '  if "making" in line: (here / "midway").touch(); time.sleep(60)\n',
  )
  wait_for(tmp_path / 'data' / 'midway')
  killed.send_signal(signal.SIGKILL)
  killed.communicate(timeout=30)
  (left,) = parts(tmp_path / 'data' / 'index')
  assert (tmp_path / 'data' / 'index' / left / 'products').exists()
  with pytest.raises(files.DataError, match='cannot be read'):
    store.Store.open(tmp_path / 'data' / 'index' / left)
  # Also what would be another name by now.
  os.utime(sources.items, ns=(1, 1))
  path = store.find_or_build(sources)
  assert parts(path.parent) == [path.name] != [left]
  assert len(store.Store.open(path)) == 20


@pytest.mark.parametrize('name', ['items', 'attributes', 'human'])
def test_a_changed_file_is_read_anew(tmp_path, name):
  sources = put(tmp_path / 'data', [item(i) for i in range(3)])
  path = store.find_or_build(sources)
  changed = getattr(sources, name)
  stat = changed.stat()
  os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
  touched = store.find_or_build(sources)
  changed.write_text(changed.read_text() + ' ')
  os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert len({path, touched, store.find_or_build(sources)}) == 3


def test_another_layout_is_not_read(tmp_path, monkeypatch):
  sources = put(tmp_path / 'data', [item(0)])
  path = store.find_or_build(sources)
  monkeypatch.setattr(store, '_LAYOUT', store._LAYOUT + 1)
  with pytest.raises(files.DataError, match='its layout is'):
    store.Store.open(path)
  assert store.find_or_build(sources) != path


def test_files_that_change_while_they_are_read_are_refused(tmp_path):
  sources = put(tmp_path / 'data', [item(0)])
  with pytest.raises(files.DataError, match='changed while they were read'):
    store.find_or_build(
      sources, progress=lambda line: os.utime(sources.items, ns=(1, 1))
    )
  assert parts(tmp_path / 'data' / 'index') == []


@pytest.mark.parametrize(
  'items, reason',
  [
    ([], 'has no product in 0 records'),
    ([{**item(0), 'asin': 'nan'}], 'has no product in 1 records'),
    ([item(0), {**item(1), 'name': 3}], 'record 1.*name is 3'),
    ([item(0), 'x'], 'record 1'),
  ],
)
def test_files_that_hold_no_catalogue_are_refused(tmp_path, items, reason):
  attributes = {'B000000000': {'attributes': ['soft']}}
  sources = put(tmp_path / 'data', items, attributes=attributes)
  with pytest.raises(files.DataError, match=reason):
    store.find_or_build(sources)
  assert parts(tmp_path / 'data' / 'index') == []


@pytest.mark.parametrize(
  'attributes, human, said',
  [
    (
      {'attributes': 'soft'},
      [],
      "items_ins_v2.json, B000000001: attributes is 'soft', and",
    ),
    (
      ENTRY,
      [wanted('a'), wanted(7)],
      'items_human_ins.json, B000000001, entry 1: instruction is 7, and',
    ),
  ],
)
def test_of_a_wrong_entry_the_file_is_named(tmp_path, attributes, human, said):
  sources = put(
    tmp_path / 'data',
    [item(0), item(1)],
    {'B000000001': human},
    {'B000000001': attributes},
  )
  with pytest.raises(files.DataError) as error:
    store.find_or_build(sources)
  assert str(error.value).startswith(said)


def test_a_full_disk_leaves_nothing_half(tmp_path):
  put(tmp_path / 'data', [item(i) for i in range(200)])
  code = (
    'import pathlib, resource, sys\n'
    'from envs_server.webshop import files, store\n'
    'resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))\n'
    'store.find_or_build(files.locate(pathlib.Path(sys.argv[1])))\n'
  )
  said = subprocess.run(
    [sys.executable, '-c', code, str(tmp_path / 'data')],
    stderr=subprocess.PIPE,
    text=True,
    cwd=REPOSITORY,
  )
  last = said.stderr.splitlines()[-1]
  assert 'File too large; the index takes about as much room' in last
  assert str(tmp_path / 'data' / 'index') in last
  assert parts(tmp_path / 'data' / 'index') == []


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path, cache):
  sources = put(tmp_path / 'data', [item(0)])
  # Root writes wherever a folder can be; here none can.
  (tmp_path / 'data' / 'index').write_text('')
  path = store.find_or_build(sources)
  assert path.parent.parent == cache
  assert store.find_or_build(sources, progress=pytest.fail) == path
  assert len(store.Store.open(path)) == 1
  # A copy elsewhere looks the same, and may not be.
  shutil.copytree(tmp_path / 'data', tmp_path / 'copy')
  copy = store.find_or_build(files.locate(tmp_path / 'copy'))
  assert copy.name == path.name and copy != path


def test_no_place_at_all_is_an_error(tmp_path):
  sources = put(tmp_path / 'data', [item(0)])
  (tmp_path / 'data' / 'index').write_text('')
  (tmp_path / 'cache').write_text('')
  with pytest.raises(OSError, match='cache'):
    store.find_or_build(sources)


def without(name):
  def damage(old):
    meta = json.loads(old)
    del meta[name]
    return json.dumps(meta).encode()

  return damage


@pytest.mark.parametrize(
  'name, damage, fault',
  [
    ('products', lambda old: old[:-1], 'products has'),
    ('scores', lambda old: b'', 'scores has 0 bytes, not'),
    ('rows', None, 'rows cannot be read'),
    ('meta.json', lambda old: old[:20], 'meta.json is damaged'),
    ('meta.json', lambda old: b'[]', 'meta.json is damaged'),
    ('meta.json', lambda old: b'{"layout": 0}', 'its layout is 0'),
    ('meta.json', None, 'meta.json cannot be read'),
    *(
      ('meta.json', without(name), f'meta.json is damaged .KeyError: {name!r}')
      for name in ('digest', 'generated', 'left_out', 'seed', 'sizes')
    ),
  ],
)
def test_what_is_damaged_is_refused_and_built_anew(
  tmp_path, name, damage, fault
):
  sources = put(tmp_path / 'data', [item(i) for i in range(3)])
  path = store.find_or_build(sources)
  whole = (path / name).read_bytes()
  if damage:
    (path / name).write_bytes(damage(whole))
  else:
    (path / name).unlink()
  with pytest.raises(files.DataError, match=fault):
    store.Store.open(path)
  assert store.find_or_build(sources) == path
  assert (path / name).read_bytes() == whole
  assert len(store.Store.open(path)) == 3


def test_an_index_of_other_files_is_replaced(tmp_path):
  one = put(tmp_path / 'one', [item(0)])
  two = put(tmp_path / 'two', [item(0), item(1)])
  store.build(one, tmp_path / 'built')
  store.build(two, tmp_path / 'built')
  assert len(store.Store.open(tmp_path / 'built')) == 2


def test_bytes_are_the_same_whatever_the_hash_seed(tmp_path):
  groups = groups_of('abcdefgh', 'hgfedcba', 'abcdefgh', 'xyz')
  items = [item(i) for i in range(30)]
  items[3]['customization_options'] = groups
  human = {
    record['asin']: [wanted('a', ['x', 'y'], ['s', 'm'])] * 60
    for record in items
  }
  put(tmp_path / 'data', items, human)
  code = (
    'import pathlib, sys\n'
    'from envs_server.webshop import files, store\n'
    'here, target = map(pathlib.Path, sys.argv[1:])\n'
    'store.build(files.locate(here), target)\n'
  )
  built = []
  for seed in ('1', '2'):
    target = tmp_path / 'built' / seed
    subprocess.run(
      [sys.executable, '-c', code, str(tmp_path / 'data'), str(target)],
      env=os.environ | {'PYTHONHASHSEED': seed},
      cwd=REPOSITORY,
      check=True,
    )
    built.append({path.name: path.read_bytes() for path in target.iterdir()})
  assert built[0] == built[1]
  assert len(built[0]) == len(store._ARRAYS) + 1
  left = json.loads(built[0]['meta.json'])['left_out']
  assert left['human']['train'] and left['synthetic']['dev']
