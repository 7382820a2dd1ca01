"""The synthetic catalogue: its format, its oddities and its plain kind."""

import collections
import fcntl
import gzip
import hashlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from envs_server.webshop import (
  catalogue,
  catalogue_words,
  files,
  goals,
  products,
  reward,
)

REPOSITORY = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope='module')
def rich(tmp_path_factory):
  target = tmp_path_factory.mktemp('rich')
  catalogue.generate(target, products=1200, seed=3, goals=1800)
  return target


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  target = tmp_path_factory.mktemp('plain')
  catalogue.generate(target, products=400, plain=True)
  return target


def read(target):
  return [json.loads((target / name).read_text()) for name in catalogue.FILES]


def odd(name, items):
  return [items[number] for number in catalogue.odd_numbers(name, len(items))]


def values(item, group):
  return [one['value'] for one in item['customization_options'][group]]


def words(text):
  return len(text.split())


def load(target):
  """Products by asin, and goals, as the environment reads them."""
  sources = files.locate(target)
  entries = dict(files.entries(sources.attributes))
  found = {}
  for number, record in files.records(sources.items):
    where = f'items_shuffle.json, record {number}'
    product = products.parse(record, entries.get(record['asin']), where)
    if product is not None and product.asin not in found:
      found[product.asin] = product
  rows = {asin: row for row, asin in enumerate(found)}
  human = [
    goal
    for asin, told in files.entries(sources.human)
    if asin in found
    for goal in goals.human(found[asin], rows[asin], told, asin)
  ]
  return found, human


def command(*arguments, **environment):
  return subprocess.run(
    [sys.executable, '-m', 'envs_server.webshop.catalogue', *arguments],
    cwd=REPOSITORY,
    env=os.environ | environment,
    capture_output=True,
    text=True,
  )


# --- The same bytes for the same arguments.


@pytest.mark.parametrize('kind', [(), ('--plain',)])
def test_bytes_are_the_same_whatever_the_hash_seed(tmp_path, kind):
  for seed in ('1', '2'):
    done = command(
      str(tmp_path / seed), '--products', '250', *kind, PYTHONHASHSEED=seed
    )
    assert done.returncode == 0, done.stderr
  for name in (*catalogue.FILES, catalogue.GENERATED):
    one = (tmp_path / '1' / name).read_bytes()
    assert one == (tmp_path / '2' / name).read_bytes()


def test_the_bytes_are_those_of_this_version(tmp_path):
  # Of Python's generator, nothing but random() may decide on them. Raise
  # catalogue.VERSION when they change on purpose, and note the new ones here.
  catalogue.generate(tmp_path / 'rich', products=1000)
  catalogue.generate(tmp_path / 'plain', products=1000, plain=True)
  assert [digest(tmp_path / 'rich'), digest(tmp_path / 'plain')] == [
    'c99b0728eb42d55f',
    '3cd5571864f76e2a',
  ]


def digest(target):
  whole = hashlib.sha256()
  for name in catalogue.FILES:
    whole.update((target / name).read_bytes())
  return whole.hexdigest()[:16]


def test_more_products_begin_with_the_products_of_fewer(rich, tmp_path):
  catalogue.generate(tmp_path, products=300, seed=3)
  items, attributes, _ = read(rich)
  fewer, entries, _ = read(tmp_path)
  assert items[:300] == fewer
  assert list(attributes.items())[: len(entries)] == list(entries.items())


def test_another_seed_makes_other_products(rich, tmp_path):
  catalogue.generate(tmp_path, products=1200, seed=4)
  ours, others = ({i['asin'] for i in read(t)[0]} for t in (rich, tmp_path))
  assert ours & others == {'nan'}


def test_gzip_holds_the_same_texts_and_neither_name_nor_time(rich, tmp_path):
  catalogue.generate(tmp_path, products=1200, seed=3, goals=1800, gzip=True)
  for name in catalogue.FILES:
    packed = (tmp_path / f'{name}.gz').read_bytes()
    assert gzip.decompress(packed) == (rich / name).read_bytes()
    # Flags (a name would be one), then the time.
    assert packed[3:8] == bytes(5)
  plain_names = [path.name for path in tmp_path.glob('*.json')]
  assert plain_names == [catalogue.GENERATED]


# --- The official format.


def test_items_have_the_official_fields_and_types(rich):
  kinds = collections.Counter()
  for item in read(rich)[0]:
    kinds[item['category']] += 1
    for name in (
      'name asin pricing full_description product_category category query'
    ).split():
      assert isinstance(item[name], str)
    assert item['images'] and all(isinstance(i, str) for i in item['images'])
    assert isinstance(item['small_description'], (list, str))
    assert item['product_category'].count(' › ') == 2
    assert item['query'] == item['query'].lower().strip() != ''
    assert re.fullmatch(
      r'|\$[\d,]+\.\d\d|\$[\d,]+\.\d\d to \$[\d,]+\.\d\d', item['pricing']
    )
    options = item['customization_options']
    assert options == '' or options and isinstance(options, dict)
    for group in (options or {}).values():
      for value in group or []:
        assert isinstance(value['value'], str)
        assert set(value) == {'is_selected', 'is_available', 'value', 'image'}
  assert sorted(kinds) == 'beauty electronics fashion garden grocery'.split()
  assert min(kinds.values()) > 200


def test_attributes_and_instructions_have_the_official_form(rich):
  items, attributes, _ = read(rich)
  nouns = {item['asin']: item['query'] for item in reversed(items)}
  bare = 0
  for asin, entry in attributes.items():
    assert len(entry['attributes']) >= 2
    bare += 'instruction' not in entry
    if 'instruction' in entry:
      assert set(entry['instruction_attributes']) <= set(entry['attributes'])
      assert entry['instruction'] == entry['instruction'].lower()
      for text in (*entry['instruction_attributes'], nouns[asin][:-3]):
        assert text in entry['instruction']
  assert 0.05 < bare / len(attributes) < 0.15
  assert 0 < len({i['asin'] for i in items} - set(attributes)) < 60


def test_the_words_of_a_synthetic_instruction():
  draft = catalogue._draft(
    catalogue._Plan(1, 0, 1, False), 0, catalogue._Dice('any')
  )
  draft.category, draft.noun = 'beauty', 'lipstick'
  said = catalogue._thing(
    draft,
    ['long lasting', 'easy to use', 'alcohol free', 'dry skin', 'green tea'],
  )
  assert said == (
    'a long lasting, alcohol free lipstick that is easy to use for dry skin '
    'with green tea'
  )
  draft.noun = 'hair extensions'
  assert catalogue._thing(draft, ['dry hair']) == 'hair extensions for dry hair'


def test_human_instructions_name_options_as_pages_show_them(rich):
  items, _, human = read(rich)
  by_asin = {item['asin']: item for item in reversed(items)}
  many = 0
  for asin, entries in human.items():
    many += len(entries) > 1
    options = by_asin[asin]['customization_options'] or {}
    shown = {
      (name.lower(), one['value'].strip().replace('/', ' | ').lower())
      for name, group in options.items()
      for one in group or []
    }
    for entry in entries:
      assert sorted(entry) == sorted(
        'asin instruction attributes options instruction_attributes '
        'instruction_options assignment_id worker_id'.split()
      )
      assert entry['asin'] == asin
      named = [tuple(text.split(': ', 1)) for text in entry['options']]
      assert set(named) <= shown
      assert [value for _, value in named] == entry['instruction_options']
      for text in (
        *entry['instruction_attributes'],
        *entry['instruction_options'],
      ):
        assert text in entry['instruction']
  assert many > 300


def test_titles_differ_and_have_8_to_20_words(rich):
  items = read(rich)[0]
  titles = [item['name'] for item in items]
  assert len(set(titles)) == 1200
  # By brand and type.
  for item in items:
    brand = item['name'].split()[0]
    assert item['brand'] == f'Visit the {brand} Store'
    assert item['query'][:-3] in item['name'].lower()
  longer = {
    number
    for name in ('accents', 'cjk', 'emoji', 'long_title', 'quotes', 'html')
    for number in catalogue.odd_numbers(name, 1200)
  }
  counts = [words(t) for i, t in enumerate(titles) if i not in longer]
  assert 8 <= min(counts) and max(counts) <= 20


def test_no_two_products_share_brand_and_type_or_an_asin():
  """Steps of s through n numbers meet each once if s and n share no factor.

  So up to `MOST_PRODUCTS` titles differ, each with its brand and type, and up
  to `MOST_PLAIN` plain ones, each with its brand, adjective and type.
  """
  rich = catalogue._BRANDS * len(catalogue._TYPES)
  plain = (
    len(catalogue_words.PLAIN_BRANDS)
    * len(catalogue_words.PLAIN_WORDS)
    * len(catalogue._PLAIN_TYPES)
  )
  for size, most in (
    (rich, catalogue.MOST_PRODUCTS),
    (36**8, catalogue.MOST_PRODUCTS),
    (plain, catalogue.MOST_PLAIN),
    (26 * 10**4, catalogue.MOST_PLAIN),
  ):
    assert size >= most
    assert math.gcd(catalogue._ring(size), size) == 1
  brands = {catalogue._brand(place).lower() for place in range(64_000)}
  assert len(brands) == catalogue._BRANDS == 64_000
  plan = catalogue._Plan(60_000, 0, 1, False)
  assert len({plan.asin(number) for number in range(60_000)}) == 60_000


# --- Oddities.


def test_from_200_products_up_every_oddity_is_there_once(tmp_path):
  catalogue.generate(tmp_path, products=200)
  items, attributes, human = read(tmp_path)
  for name in catalogue.ODD:
    assert len(catalogue.odd_numbers(name, 200)) == 1
  whole = json.dumps(items, ensure_ascii=False)
  for text in (
    '4/6',
    '4 oz / 2 pack',
    'size [xl]',
    '"Red/Black"',
    'Café',
    '黒色',
    '★★',
    '😀',
    r'12\" x 16\"',
    '<dark>',
    '&amp;',
    '"Buy Now"',
    '"  Red "',
  ):
    assert text in whole
  assert human and attributes


def test_oddities_of_options(rich):
  items = read(rich)[0]
  for item in odd('slash', items):
    assert '4/6' in values(item, 'Size')
  for item in odd('spaced_slash', items):
    assert '4 oz / 2 pack' in values(item, 'Size')
  for item in odd('bracket', items):
    assert 'size [xl]' in values(item, 'Size')
  for item in odd('shared', items):
    assert set(values(item, 'Color')) & set(values(item, 'Style'))
  for item in odd('button', items):
    assert {'Buy Now', 'Description'} < set(values(item, 'Style'))
  for item in odd('null_group', items):
    assert item['customization_options']['Color'] is None
    assert values(item, 'Size')
  for item in odd('only_null', items):
    assert item['customization_options'] == {'Size': None}
  for item in odd('no_options', items):
    assert item['customization_options'] == ''
  for item in odd('blanks', items):
    assert '  Red ' in values(item, 'Color')
  for item in odd('repeated', items):
    assert values(item, 'Color') == ['Red', 'Blue', 'RED']


def test_oddities_of_prices(rich):
  items = read(rich)[0]
  for name, pricing in (
    ('no_price', ''),
    ('range', '$9.99 to $19.99'),
    ('thousands', '$1,299.00 to $2,450.50'),
  ):
    assert [item['pricing'] for item in odd(name, items)] == [pricing] * 6


def test_oddities_of_texts(rich):
  items = read(rich)[0]
  for name, letters in (
    ('accents', 'éû'),
    ('cjk', '保国'),
    ('emoji', '🎁😀'),
    ('quotes', '"\'\\'),
    ('html', '<&>'),
  ):
    for item in odd(name, items):
      text = item['name'] + item['full_description']
      assert any(letter in text for letter in letters)
      assert any(letter in item['name'] for letter in letters + 'É')
  assert all(i['small_description'] == [] for i in odd('no_features', items))
  for item in odd('text_features', items):
    assert isinstance(item['small_description'], str)
  assert all(len(i['name']) > 300 for i in odd('long_title', items))
  assert all(i['full_description'] == '' for i in odd('no_description', items))


def test_oddities_of_asins_and_entries(rich):
  items, attributes, human = read(rich)
  for number in catalogue.odd_numbers('duplicate', 1200):
    assert items[number]['asin'] == items[number - 1]['asin']
    assert items[number]['name'] != items[number - 1]['name']
  assert all(item['asin'] == 'nan' for item in odd('nan', items))
  assert 'nan' not in attributes and 'nan' not in human
  for item in odd('long_asin', items):
    assert len(item['asin']) == 12
    assert item['asin'] in attributes and item['asin'] in human
  for item in odd('no_entry', items):
    assert item['asin'] not in attributes
  for item in odd('no_instruction', items):
    assert list(attributes[item['asin']]) == ['attributes']
  for item in odd('blank_goal', items):
    assert human[item['asin']][0]['instruction_attributes'] == []


def test_oddities_change_only_their_own_records(rich):
  # Without them, each record looks as one that no rule touches.
  items = read(rich)[0]
  places = {catalogue.odd_numbers(name, 1200).start for name in catalogue.ODD}
  for number, item in enumerate(items):
    if number % catalogue.PERIOD not in places:
      assert re.fullmatch('B0[0-9A-Z]{8}', item['asin'])
      assert (item['name'] + item['full_description']).isascii()
      assert len(item['small_description']) in range(2, 6)


# --- Goals.


def test_what_must_be_dropped_is_dropped_and_nothing_else(rich):
  found, human = load(rich)
  # Three of every 200 records.
  assert len(found) == 1200 - 18
  assert len(human) == 1800
  assert all(goal.attributes for goal in human)
  duplicates = catalogue.odd_numbers('duplicate', 1200)
  items = read(rich)[0]
  for number in duplicates:
    kept = found[items[number]['asin']]
    assert kept.title == items[number - 1]['name']


@pytest.mark.parametrize('count', [1, 5, 64, 200, 264])
def test_the_number_of_goals_is_exact(tmp_path, count):
  catalogue.generate(tmp_path, products=count, goals=77)
  assert len(load(tmp_path)[1]) == 77


def test_the_default_number_of_goals(tmp_path):
  numbers = (1, 2500, 2501, 12_000, 12_001, 1_000_000)
  assert [catalogue.default_goals(number) for number in numbers] == [
    2500,
    2500,
    2501,
    12_000,
    12_000,
    12_000,
  ]
  catalogue.generate(tmp_path, products=100)
  assert len(load(tmp_path)[1]) == 2500


def test_goals_of_few_products_differ(tmp_path):
  catalogue.generate(tmp_path, products=200)
  keys = [goals.key(goal) for goal in load(tmp_path)[1]]
  # A product without options has few.
  assert len(set(keys)) > 2450
  kept = goals.unlike(keys, goals.splits(len(keys)))
  assert len(kept['train']) > 800


class Words:
  """Takes every word of a title for a noun."""

  name = 'words'

  def nouns(self, title):
    return title.lower().split()


def rewards(target):
  """Of each goal's own product with the goal's own options, by asin."""
  found, human = load(target)
  rows = list(found.values())
  every = human + [
    goals.synthetic(product, row, number)
    for row, product in enumerate(rows)
    for number in range(goals.synthetic_count(product))
  ]
  for goal in every:
    product = rows[goal.row]
    # What pages offer, in whatever group.
    offered = {v for group in product.options.values() for v in group}
    got = reward.reward(
      product,
      product,
      goal,
      price=products.price(product),
      options=[value for value in goal.options if value in offered],
      tagger=Words(),
    )
    yield product.asin, got.total


def test_goals_give_the_full_reward_except_where_said(rich):
  items = read(rich)[0]
  unsure = {
    item['asin']
    for name, one in catalogue.ODD.items()
    if one.unsure
    for item in odd(name, items)
  }
  beyond = {item['asin'] for item in odd('symbols', items)}
  count, short = 0, set()
  for asin, total in rewards(rich):
    count += 1
    if total < 1:
      short.add(asin)
  assert count > 5000
  assert short == beyond < unsure


def test_every_plain_goal_gives_the_full_reward(plain):
  totals = [total for _, total in rewards(plain)]
  assert len(totals) > 2500 + 400
  assert set(totals) == {1.0}


# --- Plain catalogues.


def test_plain_texts_are_short_and_of_few_words(plain):
  items, attributes, human = read(plain)
  known = set()
  assert len({item['name'] for item in items}) == 400
  assert len({item['asin'] for item in items}) == 400
  for item in items:
    known.update(item['name'].lower().split())
    assert words(item['name']) in (4, 5)
    assert re.fullmatch(r'[A-Z]\d{4}', item['asin'])
    assert re.fullmatch(r'\$\d{1,2}\.99', item['pricing'])
    assert words(item['full_description']) <= 8
    assert [words(text) for text in item['small_description']] == [3]
    assert 1 <= len(item['customization_options']) <= 2
    for group in item['customization_options'].values():
      assert 2 <= len(group) <= 4
      assert all(words(one['value']) <= 2 for one in group)
  assert len(known) < 300
  assert len(attributes) == 400
  assert all('instruction' in entry for entry in attributes.values())
  for entries in human.values():
    for entry in entries:
      assert entry['instruction'].startswith('i want ')
      assert ',' not in entry['instruction']
      assert words(entry['instruction']) <= 18
      assert entry['instruction_attributes']
  whole = ''.join((plain / name).read_text() for name in catalogue.FILES)
  assert whole.replace('›', '>').isascii()


def test_plain_pages_are_short(plain):
  # What pages say beside the products: some 30 words.
  found, human = load(plain)
  longest = max(words(goal.instruction) for goal in human)
  assert longest <= 23
  rows = list(found.values())
  results = max(
    sum(words(f'{p.asin} {p.title} {p.price_tag}') for p in rows[i : i + 10])
    for i in range(0, len(rows), 10)
  )
  assert results + longest + 30 < 150
  for product in rows:
    shown = [product.title, product.price_tag, *product.options]
    shown += [v for group in product.options.values() for v in group]
    buttons = 'Back to Search < Prev Description Features Reviews Buy Now'
    shown += [buttons, 'Instruction: Price: Rating: N.A.']
    assert words(' '.join(shown)) + longest < 73
  middle = sorted(words(goal.instruction) for goal in human)[len(human) // 2]
  assert middle <= 16


# --- Files of others.


def test_a_file_of_somebody_else_is_never_touched(tmp_path):
  for name in (
    'items_human_ins.json',
    'items_ins_v2_1000.json',
    'items_shuffle.json.gz',
  ):
    target = tmp_path / name.replace('.', '_')
    target.mkdir()
    (target / name).write_text('{}')
    for force in (False, True):
      with pytest.raises(catalogue.Refusal, match=f'{name} was not made here'):
        catalogue.generate(target, products=3, goals=5, force=force)
    assert [path.name for path in target.iterdir()] == [name]
    assert (target / name).read_text() == '{}'


def test_a_generated_file_that_was_replaced_is_not_touched(tmp_path):
  catalogue.generate(tmp_path, products=3, goals=5)
  (tmp_path / 'items_human_ins.json').write_text('{}')
  with pytest.raises(catalogue.Refusal, match='items_human_ins.json was not'):
    catalogue.generate(tmp_path, products=4, goals=5, force=True)
  assert (tmp_path / 'items_human_ins.json').read_text() == '{}'


def test_other_files_in_the_folder_stay(tmp_path):
  (tmp_path / 'notes.txt').write_text('mine')
  catalogue.generate(tmp_path, products=3, goals=5)
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
    (*catalogue.FILES, catalogue.GENERATED, 'notes.txt')
  )


def test_the_same_arguments_write_nothing_again(tmp_path):
  catalogue.generate(tmp_path, products=3, goals=5)
  before = [(tmp_path / n).stat().st_mtime_ns for n in catalogue.FILES]
  catalogue.generate(tmp_path, products=3, goals=5)
  catalogue.generate(tmp_path, products=3, goals=5, force=True)
  assert before == [(tmp_path / n).stat().st_mtime_ns for n in catalogue.FILES]


def test_a_missing_file_is_made_again(tmp_path):
  catalogue.generate(tmp_path, products=3, goals=5)
  before = read(tmp_path)
  (tmp_path / 'items_ins_v2.json').unlink()
  catalogue.generate(tmp_path, products=3, goals=5)
  assert read(tmp_path) == before


def test_other_arguments_need_force_and_leave_no_old_file(tmp_path):
  catalogue.generate(tmp_path, products=3, goals=5)
  with pytest.raises(catalogue.Refusal, match="'products': 3.*--force"):
    catalogue.generate(tmp_path, products=4, goals=5)
  assert len(read(tmp_path)[0]) == 3
  catalogue.generate(tmp_path, products=4, goals=5, gzip=True, force=True)
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
    (*(f'{name}.gz' for name in catalogue.FILES), catalogue.GENERATED)
  )


@pytest.mark.parametrize('text', ['', '{', '[]', '{"note": "games"}'])
def test_a_damaged_marker_is_refused(tmp_path, text):
  (tmp_path / catalogue.GENERATED).write_text(text)
  with pytest.raises(catalogue.Refusal, match='GENERATED.json is damaged'):
    catalogue.generate(tmp_path, products=3, goals=5, force=True)
  assert [path.name for path in tmp_path.iterdir()] == [catalogue.GENERATED]


def test_two_runs_in_one_folder_do_not_mix(tmp_path):
  handle = os.open(tmp_path, os.O_RDONLY)
  fcntl.flock(handle, fcntl.LOCK_EX)
  try:
    with pytest.raises(catalogue.Refusal, match='another run'):
      catalogue.generate(tmp_path, products=3, goals=5)
  finally:
    os.close(handle)
  assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed(tmp_path):
  (tmp_path / '.generating').mkdir()
  (tmp_path / '.generating' / 'items_shuffle.json').write_text('[half')
  catalogue.generate(tmp_path, products=3, goals=5)
  assert len(read(tmp_path)[0]) == 3
  assert not (tmp_path / '.generating').exists()


def test_a_stopped_run_leaves_nothing(tmp_path):
  target = tmp_path / 'new'
  run = subprocess.Popen(
    [sys.executable, '-m', 'envs_server.webshop.catalogue', str(target)]
    + ['--products', '1000000'],
    cwd=REPOSITORY,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    unfinished = target / '.generating' / 'items_shuffle.json'
    end = time.monotonic() + 60
    while not (unfinished.exists() and unfinished.stat().st_size):
      assert run.poll() is None and time.monotonic() < end
      time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, told = run.communicate(timeout=60)
  finally:
    run.kill()
    run.wait()
  assert run.returncode == 130 and 'nothing was written' in told
  assert not target.exists()


# --- Errors.


@pytest.mark.parametrize(
  'arguments, words',
  [
    ({'products': 0}, 'products=0 must be from 1 to 10000000; try 1'),
    ({'products': -4}, 'products=-4 must be from 1'),
    ({'products': 10_000_001}, 'products=10000001 must be .* try 10000000'),
    ({'products': 2.5}, 'products=2.5 must be a whole number'),
    ({'products': True}, 'products=True must be a whole number'),
    (
      {'products': 100_001, 'plain': True},
      'products=100001 must be from 1 to 100000 for a plain',
    ),
    ({'products': 3, 'seed': -7}, 'seed=-7 must be at least 0; try 7'),
    ({'products': 3, 'goals': 0}, 'goals=0 must be at least 1; leave it out'),
    ({'products': 3, 'goals': '9'}, "goals='9' must be a whole number"),
  ],
)
def test_a_bad_argument_is_named_before_anything_is_written(
  tmp_path, arguments, words
):
  with pytest.raises(ValueError, match=words):
    catalogue.generate(tmp_path / 'new', **arguments)
  assert not list(tmp_path.iterdir())


def test_a_target_that_is_no_folder_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='is a file; name a folder'):
    catalogue.generate(tmp_path / 'file', products=3, goals=5)
  with pytest.raises(ValueError, match="target='' names no folder"):
    catalogue.generate('', products=3, goals=5)


def test_the_command_says_what_it_made_or_why_not(tmp_path):
  done = command(str(tmp_path), '--products', '5', '--goals', '7', '--gzip')
  assert done.returncode == 0
  assert '5 records, 7 human goals' in done.stdout
  assert f'export WEBSHOP_DATA={tmp_path}' in done.stdout
  again = command(str(tmp_path), '--products', '6')
  assert again.returncode == 1
  assert again.stderr.startswith('error: ') and '--force' in again.stderr
  assert 'Traceback' not in again.stderr
