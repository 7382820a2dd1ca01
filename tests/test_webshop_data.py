"""How the data files of WebShop become products, prices, goals and splits."""

import gzip
import json
import math
import random
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from envs_server.webshop import files, goals, products

WHERE = 'items_shuffle.json, record 17'


def record(**changed):
  return {
    'asin': 'B000000001',
    'name': 'Soft Towel, Blue',
    'full_description': 'Dries Well',
    'small_description': ['100% Cotton', 'Washable'],
    'pricing': '$9.99',
    'images': ['https://example.com/a.jpg'],
    'product_category': 'Home › Bath › Towels',
    'customization_options': '',
    'category': 'garden',
    'query': ' Bath Towels ',
  } | changed


def options(**groups):
  return {
    name: values and [{'value': v, 'image': None} for v in values]
    for name, values in groups.items()
  }


def parse(attributes=None, **changed):
  return products.parse(record(**changed), attributes, WHERE)


def product(**changed):
  return products.Product(asin='B000000001', title='Towel', **changed)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
  monkeypatch.delenv('WEBSHOP_DATA', raising=False)
  monkeypatch.delenv('WEBSHOP_PRODUCTS', raising=False)


def put(folder, *names, content='[]'):
  for name in names:
    (folder / name).write_text(content)


# Which files are read.

FULL = ('items_shuffle.json', 'items_ins_v2.json')
SMALL = ('items_shuffle_1000.json', 'items_ins_v2_1000.json')
HUMAN = 'items_human_ins.json'


def located(root):
  found = files.locate(root)
  return tuple(
    path and path.name for path in (found.items, found.attributes, found.human)
  )


def test_the_folder_is_the_one_that_the_variable_names(tmp_path, monkeypatch):
  monkeypatch.setenv('WEBSHOP_DATA', str(tmp_path))
  assert files.folder() == tmp_path


@pytest.mark.parametrize('value', ['', '/nowhere/at/all'])
def test_without_a_folder_one_is_told_how_to_get_the_files(value, monkeypatch):
  monkeypatch.setenv('WEBSHOP_DATA', value)
  with pytest.raises(FileNotFoundError) as error:
    files.folder()
  place = value or 'DIR'
  for part in (
    *FULL,
    *SMALL,
    HUMAN,
    'Google Drive',
    'setup.sh -d small',
    f'gdown ID -O {place}/NAME',
    f'python -m envs_server.webshop.catalogue {place} --products 1000',
  ):
    assert part in str(error.value)


def test_the_whole_catalogue_comes_first(tmp_path):
  put(tmp_path, *SMALL, HUMAN)
  assert located(tmp_path) == (*SMALL, HUMAN)
  put(tmp_path, FULL[0])
  assert located(tmp_path) == (*SMALL, HUMAN)
  put(tmp_path, FULL[1])
  assert located(tmp_path) == (*FULL, HUMAN)


def test_compressed_files_are_found_and_plain_ones_preferred(tmp_path):
  put(tmp_path, *SMALL, *(f'{name}.gz' for name in (*SMALL, HUMAN)))
  assert located(tmp_path) == (*SMALL, HUMAN + '.gz')
  (tmp_path / SMALL[0]).unlink()
  assert located(tmp_path) == (SMALL[0] + '.gz', SMALL[1], HUMAN + '.gz')


def test_instructions_of_people_may_be_missing(tmp_path):
  put(tmp_path, *SMALL)
  assert located(tmp_path) == (*SMALL, None)


@pytest.mark.parametrize('there', ['', FULL[0], SMALL[1]])
def test_what_is_missing_is_named(tmp_path, there):
  pair = SMALL if there in SMALL else FULL
  if there:
    put(tmp_path, there)
  missing = [name for name in (*pair, HUMAN) if name != there]
  with pytest.raises(FileNotFoundError) as error:
    files.locate(tmp_path)
  said = f'{tmp_path} has no {" and no ".join(missing)}. '
  assert str(error.value).startswith(said)
  assert 'Google Drive' in str(error.value)


@pytest.mark.parametrize(
  ('most', 'found'), [('1', SMALL), ('1000', SMALL), ('1001', FULL)]
)
def test_few_products_come_from_the_small_catalogue(
  tmp_path, monkeypatch, most, found
):
  monkeypatch.setenv('WEBSHOP_PRODUCTS', most)
  put(tmp_path, *FULL)
  assert located(tmp_path) == (*FULL, None)
  put(tmp_path, *SMALL)
  assert located(tmp_path) == (*found, None)
  assert files.limit() == int(most)


def test_without_a_limit_all_products_count(monkeypatch):
  assert files.limit() is None
  monkeypatch.setenv('WEBSHOP_PRODUCTS', '')
  assert files.limit() is None


@pytest.mark.parametrize(
  'text', ['0', '-1', '1.5', 'all', '1_000', '٣', ' ', '1\n', '1' * 19]
)
def test_a_limit_that_is_no_number_is_refused(monkeypatch, tmp_path, text):
  monkeypatch.setenv('WEBSHOP_PRODUCTS', text)
  put(tmp_path, *SMALL)
  for call in (files.limit, lambda: files.locate(tmp_path)):
    with pytest.raises(ValueError, match='whole number from 1') as error:
      call()
    assert repr(text) in str(error.value)


def test_a_limit_of_very_many_digits_is_refused_in_few_words(monkeypatch):
  monkeypatch.setenv('WEBSHOP_PRODUCTS', '1' * 5000)
  with pytest.raises(ValueError, match='whole number from 1') as error:
    files.limit()
  assert len(str(error.value)) < 250


# How they are read.


def test_records_come_in_order_with_their_numbers(tmp_path):
  path = tmp_path / 'items.json'
  path.write_text(' \n[{"a": 1.5, "item": [{"item": 2}]}, {"b": "Ж😀›"}, {}]')
  assert list(files.records(path)) == [
    (0, {'a': 1.5, 'item': [{'item': 2}]}),
    (1, {'b': 'Ж😀›'}),
    (2, {}),
  ]


def test_numbers_with_a_point_are_floats(tmp_path):
  path = tmp_path / 'items.json'
  path.write_text('[{"a": 1.5}]')
  assert type(next(files.records(path))[1]['a']) is float


def test_entries_come_by_key_whatever_they_are(tmp_path):
  path = tmp_path / 'attributes.json'
  path.write_text('{"A": {"x": [1]}, "": {"y": {"": 2}}, "B": null, "A": []}')
  assert list(files.entries(path)) == [
    ('A', {'x': [1]}),
    ('', {'y': {'': 2}}),
    ('B', None),
    ('A', []),
  ]


def test_compression_is_told_by_content_and_not_by_name(tmp_path):
  compressed, plain = tmp_path / 'a.json', tmp_path / 'b.json.gz'
  compressed.write_bytes(gzip.compress(b'[{"a": 1}]'))
  plain.write_text('{"a": 1}')
  assert list(files.records(compressed)) == [(0, {'a': 1})]
  assert list(files.entries(plain)) == [('a', 1)]


# So that what is cut off of a compressed file is not the sum alone.
NOISE = random.Random(0).randbytes(999).hex()
READERS = {
  files.records: f'[{{"a": "{NOISE}"}}]',
  files.entries: f'{{"a": "{NOISE}"}}',
}
BAD_FILES = {
  'empty': (lambda text: b'', 'is empty, and should be a JSON'),
  'blank': (lambda text: b' \n ', 'is empty'),
  'a page of the download': (lambda text: b'<!DOCTYPE', "begins with '<'"),
  'a text': (lambda text: b'"abc"', "begins with '\"'"),
  'not UTF-8': (
    lambda text: text[:20] + b'\xff' + text[20:],
    'invalid start byte',
  ),
  'cut off': (lambda text: text[:-9], 'it is cut off or no JSON'),
  'compressed, cut off': (
    lambda text: gzip.compress(text)[:500],
    'cannot be decompressed',
  ),
  'compressed, cut off at once': (
    lambda text: gzip.compress(text)[:5],
    'cannot be decompressed',
  ),
  'compressed, damaged': (
    lambda text: gzip.compress(text)[:10] + b'\xff' * 500,
    'cannot be decompressed',
  ),
  'compressed, with a wrong sum': (
    lambda text: gzip.compress(text)[:-8] + bytes(8),
    'cannot be decompressed',
  ),
}


@pytest.mark.parametrize('reader', READERS)
@pytest.mark.parametrize('case', BAD_FILES)
def test_a_file_that_cannot_be_read_is_named(tmp_path, reader, case):
  path = tmp_path / 'items.json'
  spoil, said = BAD_FILES[case]
  path.write_bytes(spoil(READERS[reader].encode()))
  with pytest.raises(files.DataError) as error:
    list(reader(path))
  assert str(error.value).startswith(str(path))
  assert said in str(error.value)


@pytest.mark.parametrize(
  ('reader', 'other', 'kind'),
  [
    (files.records, files.entries, 'array'),
    (files.entries, files.records, 'object'),
  ],
)
def test_arrays_and_objects_are_told_apart(tmp_path, reader, other, kind):
  path = tmp_path / 'items.json'
  path.write_text(READERS[other])
  with pytest.raises(files.DataError, match=f'should be a JSON {kind}; fetch'):
    list(reader(path))


BAD_RECORDS = {
  'cut off in a record': ('[{"a": 1}, {"b": "x', 'cut off or no JSON'),
  'cut off after a record': ('[{"a": 1}', 'cut off or no JSON'),
  'cut off after a comma': ('[{"a": 1},', 'cut off or no JSON'),
  'goes on after its end': (
    '[{"a": 1}] x',
    "the end of the file should stand where 'x' is",
  ),
  'no value': ('[{"a": 1}, {"asin": what}]', 'Expecting value'),
  'a comma too many': ('[{"a": 1},]', "a value should stand where ']' is"),
  'nested too deep': (f'[{{"a": 1}}, {"[" * 10**5}', 'recursion'),
  'no comma': ('[{"a": 1} {"b": 2}]', "',' should stand where '{' is"),
  'a list': ('[{"a": 1}, [{"b": 2}]]', 'is a list of 1, and should be an obj'),
  'a text': ('[{"a": 1}, "abc"]', "is 'abc', and should be an object"),
  'null': ('[{"a": 1}, null]', 'is null, and should be an object'),
}


@pytest.mark.parametrize('case', BAD_RECORDS)
def test_a_record_that_cannot_be_read_is_named(tmp_path, case):
  path = tmp_path / 'items.json'
  content, said = BAD_RECORDS[case]
  path.write_text(content)
  found = files.records(path)
  assert next(found) == (0, {'a': 1})
  with pytest.raises(files.DataError) as error:
    next(found)
  assert f'{path}, ' in str(error.value) and 'record 1: ' in str(error.value)
  assert said in str(error.value)


@pytest.mark.parametrize(
  ('content', 'place'),
  [
    ('{"A": 1, "B": ', "the entry after 'A'"),
    ('{"A": 1, "B": {"attributes": ["x', "the entry after 'A'"),
    ('{"A', 'the first entry'),
  ],
)
def test_an_entry_that_cannot_be_read_is_named(tmp_path, content, place):
  path = tmp_path / 'attributes.json'
  path.write_text(content)
  with pytest.raises(files.DataError) as error:
    list(files.entries(path))
  assert f'{path}, at {place}: it is cut off' in str(error.value)


def test_what_python_writes_is_read(tmp_path):
  """Numbers that are none, lone surrogates, and a mark of the encoding."""
  path = tmp_path / 'items.json'
  path.write_bytes(
    b'\xef\xbb\xbf[{"a": NaN, "b": -Infinity, "c": 1e999, "d": "\\ud83d"}]'
  )
  ((number, found),) = files.records(path)
  assert number == 0 and math.isnan(found['a'])
  assert found['b'] == -math.inf and found['c'] == math.inf
  assert files.text(found['d'], 'd', 'here') == '?'


@hypothesis.given(
  content=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  ),
  chunk=st.integers(1, 40),
  indent=st.sampled_from([None, 1]),
)
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
  deadline=None,
)
def test_values_are_read_wherever_a_chunk_ends(
  tmp_path, monkeypatch, content, chunk, indent
):
  monkeypatch.setattr(files, '_CHUNK', chunk)
  path = tmp_path / 'values.json'
  wanted = {'x': content, 'y': [content, 12.5], 'z': 12}
  path.write_text(json.dumps(wanted, indent=indent))
  assert repr(dict(files.entries(path))) == repr(wanted)
  path.write_text(json.dumps([wanted, {'n': 7}], indent=indent))
  assert repr(list(files.records(path))) == repr(
    list(enumerate([wanted, {'n': 7}]))
  )


def test_a_value_that_never_ends_is_given_up(tmp_path, monkeypatch):
  monkeypatch.setattr(files, '_LONGEST', 10**6)
  path = tmp_path / 'items.json'
  path.write_text('[{"a": 1}, {"b": "' + 'x' * 10**7)
  with pytest.raises(files.DataError, match='record 1: .*more than 1000000 ch'):
    list(files.records(path))


def test_a_value_that_an_error_shows_is_cut():
  error = files.wrong('x' * 200, 'name', WHERE, 'short')
  assert str(error) == f"{WHERE}: name is '{'x' * 79}..., and should be short."


@pytest.mark.parametrize(
  ('reader', 'packed'),
  [(files.records, False), (files.records, True), (files.entries, False)],
)
def test_large_files_are_never_held_in_memory(tmp_path, reader, packed):
  """30 MB: 7,500 records of 4 kB; 1.5 MB are enough at any time."""
  path = tmp_path / 'large.json'
  line = json.dumps(record(full_description='x' * 3700))
  ends = '[]' if reader is files.records else '{}'
  with (
    gzip.open(path, 'wt', compresslevel=1)
    if packed
    else open(path, 'w') as file
  ):
    file.write(ends[0])
    for i in range(7500):
      key = '' if reader is files.records else f'"{i}": '
      file.write(f'{", " if i else ""}{key}{line}')
    file.write(ends[1])
  next(reader(path))  # What is imported does not count.
  tracemalloc.start()
  try:
    count = sum(1 for _ in reader(path))
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert count == 7500
  assert peak < 1.5e6


# What a record becomes.


def test_a_record_becomes_a_product():
  found = parse(
    {
      'attributes': ['soft', 'quick drying'],
      'instruction': 'i want a towel',
      'instruction_attributes': ['soft'],
    },
    customization_options=options(Color=['Blue']),
  )
  assert found == products.Product(
    asin='B000000001',
    title='Soft Towel, Blue',
    description='Dries Well',
    features=('100% Cotton', 'Washable'),
    category='garden',
    query='bath towels',
    product_category='Home › Bath › Towels',
    pricing=(9.99,),
    options={'color': ('blue',)},
    attributes=('soft', 'quick drying'),
    instruction='i want a towel',
    instruction_attributes=('soft',),
  )


@pytest.mark.parametrize('asin', ['nan', 'B0000000001', 'https://example.com'])
def test_records_without_a_proper_asin_do_not_count(asin):
  # Nor does it matter what else they hold.
  assert products.parse({'asin': asin}, None, WHERE) is None
  assert products.parse(record(asin=asin), None, WHERE) is None


def test_an_asin_may_have_ten_characters_or_fewer():
  assert parse(asin='1234567890').asin == '1234567890'
  assert parse(asin='1').asin == '1'


def test_one_text_of_bullets_is_one_bullet():
  assert parse(small_description='Soft').features == ('Soft',)
  assert parse(small_description='').features == ('',)
  assert parse(small_description=[]).features == ()


def test_halves_of_characters_are_replaced_wherever_they_stand():
  half = '\ud800'
  found = parse(
    {
      'attributes': [f'a{half}'],
      'instruction': half,
      'instruction_attributes': [half],
    },
    **{
      field: f'x{half}'
      for field in (
        'asin name full_description small_description product_category category'
        ' query'
      ).split()
    },
    customization_options=options(**{f'Size{half}': [f'S{half}']}),
  )
  assert found.features == ('x?',) and found.options == {'size?': ('s?',)}
  # Nothing is left that UTF-8 cannot hold.
  assert products.from_json(products.to_json(found)) == found
  assert '\\u' not in products.to_json(found).decode()


def test_categories_may_be_unknown():
  found = parse(category=None, product_category=None)
  assert (found.category, found.product_category) == ('', '')


@pytest.mark.parametrize(
  ('pricing', 'found', 'tag'),
  [
    ('$9.99', (9.99,), '$9.99'),
    ('$9.99 to $12', (9.99, 12.0), '$9.99 to $12.0'),
    ('$1,234.50 to $9', (1234.5, 9.0), '$1234.5 to $9.0'),
    ('$1 to $2 to $3', (1.0, 2.0), '$1.0 to $2.0'),
    ('US$ 7 each', (7.0,), '$7.0'),
    ('$٣', (3.0,), '$3.0'),
    ('', (100.0,), '$100.0'),
    (None, (100.0,), '$100.0'),
  ],
)
def test_prices_are_read(pricing, found, tag):
  cleaned = parse(pricing=pricing)
  assert (cleaned.pricing, cleaned.price_tag) == (found, tag)


def test_no_price_is_a_price_of_100():
  without = record()
  del without['pricing']
  assert products.parse(without, None, WHERE).pricing == (100.0,)


def test_options_are_as_pages_show_them():
  found = parse(
    customization_options=options(
      **{
        'Size': [' 4/6 ', '4 oz / 2 pack', ' /XL'],
        'Flavor Name': ['Salt', 'Pepper', 'salt'],
        'Style': None,
        'Pattern': [],
      }
    )
  )
  assert list(found.options.items()) == [
    ('size', ('4 | 6', '4 oz  |  2 pack', ' | xl')),
    ('flavor name', ('salt', 'pepper', 'salt')),
    ('pattern', ()),
  ]


def test_of_option_groups_that_differ_by_case_the_last_one_counts():
  groups = options(Size=['S'], Color=['Red'], SIZE=['L'])
  found = parse(customization_options=groups).options
  assert list(found.items()) == [('size', ('l',)), ('color', ('red',))]


@pytest.mark.parametrize('nothing', ['', None, {}, []])
def test_there_may_be_no_options(nothing):
  assert parse(customization_options=nothing).options == {}


@pytest.mark.parametrize(
  ('entry', 'found'),
  [
    (None, ('DUMMY_ATTR',)),
    ({}, ('DUMMY_ATTR',)),
    ({'instruction': None}, ('DUMMY_ATTR',)),
    ({'attributes': []}, ()),
    ({'attributes': ['soft']}, ('soft',)),
  ],
)
def test_attributes_may_be_unknown(entry, found):
  cleaned = parse(entry)
  assert cleaned.attributes == found
  assert (cleaned.instruction, cleaned.instruction_attributes) == ('', ())


NAN = float('nan')
BAD_FIELDS = {
  'asin': [
    (None, 'null, and should be a text'),
    (NAN, 'nan, and should be a text'),
    (17, '17, and should be a text'),
    ('', "'', and should be of 1 to 10 characters"),
  ],
  'name': [
    (None, 'null, and should be a text'),
    (3, '3'),
    (['x'], 'a list of'),
  ],
  'full_description': [(None, 'null, and should be a text'), ({}, 'an object')],
  'small_description': [
    (None, 'null, and should be a list of texts'),
    ({'a': 1}, 'an object, and should be a list of texts'),
    (4, '4, and should be a list of texts'),
  ],
  'pricing': [
    ('9.99', "'9.99', and should be as `$9.99` or `$9.99 to $12`, or empty"),
    ('$', "'$', and should be as"),
    ('$5 to $', "'$5 to $', and should be as"),
    ('$1.2.3', "'$1.2.3', and should be as"),
    ('$' + '9' * 400, "'$9999"),
    (9.99, '9.99, and should be'),
    (['$9'], 'a list of 1, and should be'),
    (True, 'True, and should be'),
  ],
  'product_category': [(['a', 'b'], 'a list of 2, and should be a text')],
  'category': [(1.5, '1.5, and should be a text')],
  'query': [(None, 'null, and should be a text'), (False, 'False')],
  'customization_options': [
    ('red', "'red', and should be an object, or empty"),
    ([{'value': 'a'}], 'a list of 1, and should be an object, or empty'),
    (0, '0, and should be an object, or empty'),
    (False, 'False, and should be an object, or empty'),
  ],
}


@pytest.mark.parametrize(
  ('field', 'value', 'said'),
  [(field, *case) for field, cases in BAD_FIELDS.items() for case in cases],
)
def test_a_field_of_a_wrong_type_is_named(field, value, said):
  with pytest.raises(files.DataError) as error:
    parse(**{field: value})
  assert str(error.value).startswith(f'{WHERE}: {field} is {said}')


@pytest.mark.parametrize(
  ('value', 'said'),
  [
    ({'Size': 'S'}, "['Size'] is 'S', and should be a list, or null"),
    ({'Size': ['S']}, "['Size'][0] is 'S', and should be an object with a va"),
    ({'Size': [{}]}, "['Size'][0] is an object, and should be an object with"),
    ({'Size': [{'value': 4}]}, "['Size'][0].value is 4, and should be a text"),
    (
      options(Size=['S', None]),
      "['Size'][1].value is null, and should be a text",
    ),
  ],
)
def test_an_option_of_a_wrong_type_is_named(value, said):
  with pytest.raises(files.DataError) as error:
    parse(customization_options=value)
  assert f'{WHERE}: customization_options{said}' in str(error.value)


def test_a_bullet_of_a_wrong_type_is_named():
  with pytest.raises(files.DataError) as error:
    parse(small_description=['Soft', None])
  said = f'{WHERE}: small_description[1] is null, and should be a text.'
  assert str(error.value) == said


@pytest.mark.parametrize(
  'field',
  [
    'asin',
    'name',
    'full_description',
    'small_description',
    'product_category',
    'customization_options',
    'category',
    'query',
  ],
)
def test_a_field_that_is_missing_is_named(field):
  without = record()
  del without[field]
  with pytest.raises(files.DataError) as error:
    products.parse(without, None, WHERE)
  assert str(error.value).startswith(f'{WHERE}: it has no {field}, ')


ASKED = {'instruction': 'i want a towel'}
BAD_ATTRIBUTES = [
  (['soft'], ': it is a list of 1, and should be an object'),
  ('soft', ": it is 'soft', and should be an object"),
  ({'attributes': None}, ': attributes is null, and should be a list of texts'),
  ({'attributes': 'soft'}, ": attributes is 'soft', and should be a list of"),
  ({'attributes': ['soft', 1]}, ': attributes[1] is 1, and should be a text'),
  ({'instruction': 5}, ': instruction is 5, and should be a text'),
  (ASKED, ': instruction_attributes is null, and should be a list of one text'),
  (
    ASKED | {'instruction_attributes': []},
    ': instruction_attributes is a list of 0, and should be a list of one text',
  ),
  (
    ASKED | {'instruction_attributes': 'soft'},
    ": instruction_attributes is 'soft', and should be a list of texts",
  ),
  (
    ASKED | {'instruction_attributes': [{}]},
    ': instruction_attributes[0] is an object, and should be a text',
  ),
]


@pytest.mark.parametrize(('entry', 'said'), BAD_ATTRIBUTES)
def test_an_entry_of_the_attributes_of_a_wrong_type_is_named(entry, said):
  where = 'items_ins_v2.json, B000000001'
  with pytest.raises(files.DataError) as error:
    products.parse(record(), entry, WHERE, where)
  assert str(error.value).startswith(where + said)


# What a product costs and is found by, and how it is stored.


def test_a_price_is_what_the_record_says():
  assert products.price(product(pricing=(9.99,))) == 9.99


def test_a_price_of_a_range_is_drawn_from_the_seed_and_the_asin():
  """The same on every machine, whatever else the product is."""

  def price(asin, seed=products.SEED, **fields):
    one = products.Product(asin, pricing=(10.0, 20.0), **fields)
    return products.price(one, seed)

  of_a = 16.37685867509943
  assert price('A', title='one') == of_a
  assert price('A', title='two', options={'size': ('s',)}) == of_a
  assert price('A', 234, title='one') != of_a
  assert price('B', title='one') != of_a


def test_prices_fill_their_range_evenly():
  """The mean of 2,000 draws is within 4 standard errors of the middle."""
  drawn = [
    products.price(products.Product(str(i), '', pricing=(30.0, 10.0)))
    for i in range(2000)
  ]
  assert 10 <= min(drawn) < 10.2 and 29.8 < max(drawn) <= 30
  assert abs(sum(drawn) / 2000 - 20) < 4 * (20 / 12**0.5) / 2000**0.5


def test_a_product_is_found_by_its_words():
  found = parse(
    {'attributes': ['quick drying']},
    customization_options=options(Color=['Blue', 'Red'], Size=['S/M']),
  )
  assert products.search_text(found) == (
    'soft towel, blue dries well 100% cotton color: blue, red, and size: s | m'
  )
  assert products.search_text(parse(small_description=[])) == (
    'soft towel, blue dries well  '
  )


@pytest.mark.parametrize(
  'stored',
  [
    products.Product('B000000001', 'Towel'),
    products.Product(
      asin='B000000002',
      title='Ж😀 "quoted"\n\u2028 ›',
      description='a\tb',
      features=('', 'x'),
      category='c',
      query='q',
      product_category='A › B',
      pricing=(0.1 + 0.2, 1e6),
      options={'b': ('2', '1', '1'), 'a': ()},
      attributes=(),
      instruction='i',
      instruction_attributes=('y', 'z'),
    ),
  ],
)
def test_products_survive_being_stored(stored):
  line = products.to_json(stored)
  assert b'\n' not in line
  found = products.from_json(line)
  assert found == stored
  assert list(found.options) == list(stored.options)
  assert all(isinstance(values, tuple) for values in found.options.values())


def test_stored_products_are_short():
  """Neither names of fields, nor blanks, nor escapes."""
  line = products.to_json(products.Product('B1', '›'))
  expected = '["B1","›","",[],"","","",[100.0],{},["DUMMY_ATTR"],"",[]]'
  assert line == expected.encode()


# What customers pay at most.


@pytest.mark.parametrize(
  ('price', 'possible'),
  [
    (5.0, {20.0, 30.0, 40.0}),
    (10.0, {30.0, 40.0, 50.0}),
    (95.5, {110.0, 120.0, 130.0}),
    (955.0, {970.0, 980.0, 990.0}),
    (965.0, {980.0, 990.0}),
    (975.0, {990.0}),
  ],
)
def test_a_bound_is_the_larger_of_two_of_the_next_four_tens(price, possible):
  drawn = {goals.bound(product(pricing=(price,)), number=i) for i in range(99)}
  assert {upper for upper, _ in drawn} == possible
  assert all(
    text == f', and price lower than {upper:.0f}.00 dollars'
    for upper, text in drawn
  )


@pytest.mark.parametrize('price', [980.0, 985.0, 990.0, 12345.0])
def test_without_two_tens_to_draw_from_there_is_no_bound(price):
  found = goals.bound(product(pricing=(price,)))
  assert found == (products.NO_BOUND, '')


def test_the_larger_of_two_is_as_frequent_as_among_all_pairs():
  """Of the six pairs of 10, 20, 30, 40: one has 20 on top, two 30, three 40.

  Within 4 standard deviations in 3,000 draws.
  """
  drawn = [
    goals.bound(product(pricing=(5.0,)), number=i)[0] for i in range(3000)
  ]
  for upper, share in ((20.0, 1 / 6), (30.0, 2 / 6), (40.0, 3 / 6)):
    spread = (3000 * share * (1 - share)) ** 0.5
    assert abs(drawn.count(upper) - 3000 * share) < 4 * spread


def test_a_bound_is_drawn_from_seed_asin_and_number_alone():
  """The same on every machine, whatever else the product is."""
  of_a = [20.0, 40.0, 40.0, 30.0, 30.0, 40.0, 20.0, 40.0]

  def bounds(asin, seed=products.SEED, **fields):
    one = products.Product(asin, pricing=(5.0,), **fields)
    return [goals.bound(one, seed, number)[0] for number in range(8)]

  assert bounds('A', title='one') == of_a
  assert bounds('A', title='two', options={'a': ('1',)}) == of_a
  assert bounds('B', title='one') != of_a
  assert bounds('A', 234, title='one') != of_a


def test_a_bound_is_above_the_price_that_was_drawn():
  for i in range(200):
    one = products.Product(f'R{i}', '', pricing=(10.0, 200.0))
    upper, _ = goals.bound(one)
    price = products.price(one)
    assert 10 < upper - price <= 40


# Goals that people wrote.

HUMAN_AT = 'items_human_ins.json, B000000001'


def entry(**changed):
  return {
    'instruction': 'i want a towel.',
    'instruction_attributes': ['soft', 'blue'],
    'instruction_options': ['4/6'],
  } | changed


def test_a_goal_of_a_person_has_its_words_and_a_bound():
  one = product(pricing=(975.0,))
  assert goals.human(one, 5, [entry()], HUMAN_AT) == [
    products.Goal(
      row=5,
      instruction='i want a towel, and price lower than 990.00 dollars',
      attributes=('soft', 'blue'),
      options=('4/6',),
      price_upper=990.0,
    )
  ]


def test_a_goal_of_a_person_loses_its_full_stops_without_a_bound_too():
  one = product(pricing=(2000.0,))
  texts = ['...a towel. a soft one..', 'a towel. ']
  found = goals.human(
    one, 0, [entry(instruction=text) for text in texts], HUMAN_AT
  )
  assert [goal.instruction for goal in found] == [
    'a towel. a soft one',
    'a towel. ',
  ]
  assert {goal.price_upper for goal in found} == {1_000_000.0}


def test_goals_without_attributes_are_left_out_and_the_others_stay_alike():
  one = product(pricing=(5.0,))
  empty = {'instruction_attributes': [], 'instruction': None}
  all_ = goals.human(one, 3, [entry(), entry(), entry()], HUMAN_AT)
  some = goals.human(one, 3, [entry(), empty, entry()], HUMAN_AT)
  assert some == [all_[0], all_[2]]
  for number, goal in enumerate(all_):
    assert goal.price_upper == goals.bound(one, number=number)[0]


def test_options_of_people_may_be_named():
  named = entry(instruction_options={'size': 'S', 'color': 'Red'})
  found = goals.human(product(), 0, [named], HUMAN_AT)
  assert found[0].options == ('S', 'Red')
  found = goals.human(product(), 0, [entry(instruction_options=[])], HUMAN_AT)
  assert found[0].options == ()


def test_a_product_may_have_no_goals_of_people():
  assert goals.human(product(), 0, [], HUMAN_AT) == []


@pytest.mark.parametrize(
  ('entries', 'said'),
  [
    (None, ': it is null, and should be a list of objects'),
    ({'instruction': 'x'}, ': it is an object, and should be a list of obj'),
    ([entry(), 'x'], ", entry 1: it is 'x', and should be an object"),
    ([[]], ', entry 0: it is a list of 0, and should be an object'),
    ([{}], ', entry 0: instruction_attributes is null, and should be a list'),
    (
      [entry(instruction_attributes='soft')],
      ", entry 0: instruction_attributes is 'soft', and should be a list of",
    ),
    (
      [entry(instruction_attributes=['a', 2])],
      ', entry 0: instruction_attributes[1] is 2, and should be a text',
    ),
    (
      [entry(instruction=None)],
      ', entry 0: instruction is null, and should be a text',
    ),
    (
      [entry(instruction_options=None)],
      ', entry 0: instruction_options is null, and should be a list of texts',
    ),
    (
      [entry(instruction_options={'size': 4})],
      ', entry 0: instruction_options[0] is 4, and should be a text',
    ),
  ],
)
def test_an_entry_of_a_person_of_a_wrong_type_is_named(entries, said):
  with pytest.raises(files.DataError) as error:
    goals.human(product(), 0, entries, HUMAN_AT)
  assert str(error.value).startswith(HUMAN_AT + said)


# Goals that are made.


def asked(**fields):
  fields = {
    'instruction': 'i want a towel',
    'instruction_attributes': ('soft',),
    'pricing': (975.0,),
  } | fields
  return product(**fields)


def made(one, row=0):
  count = goals.synthetic_count(one)
  return [goals.synthetic(one, row, number) for number in range(count)]


def test_one_goal_is_made_of_each_combination_of_options():
  """Options by name, values in order."""
  found = made(
    asked(options={'size': ('s', 'm'), 'color': ('red', 'blue')}), row=7
  )
  assert [goal.options for goal in found] == [
    ('red', 's'),
    ('red', 'm'),
    ('blue', 's'),
    ('blue', 'm'),
  ]
  assert found[2] == products.Goal(
    row=7,
    instruction='i want a towel with color: blue, and size: s, and price lower '
    'than 990.00 dollars',
    attributes=('soft',),
    options=('blue', 's'),
    price_upper=990.0,
  )


def test_a_value_that_comes_twice_counts_twice():
  """As published; else all goals of a catalogue had other numbers."""
  groups = {'size': ('s', 'm', 's'), 'color': ('red', 'red')}
  assert goals.synthetic_count(asked(options=groups)) == 6
  assert [goal.options for goal in made(asked(options=groups))] == [
    *(('red', 's'), ('red', 'm'), ('red', 's')),
    *(('red', 's'), ('red', 'm'), ('red', 's')),
  ]


@pytest.mark.parametrize(
  ('groups', 'alike'),
  [
    ({}, False),
    ({'a': ('1', '2'), 'b': ('3', '4')}, False),
    ({'a': ('1', '2'), 'b': ('3', '1')}, True),
    ({'a': ('1', '2', '1')}, True),
  ],
)
def test_goals_may_be_alike_where_a_value_is_there_twice(groups, alike):
  assert goals.alike(asked(options=groups)) is alike


@hypothesis.given(
  st.dictionaries(
    st.sampled_from('abcd'),
    st.lists(st.sampled_from(['1', '2', '3', 'é', 'x y']), max_size=4),
    max_size=4,
  )
)
@hypothesis.settings(deadline=None)
def test_keys_of_many_goals_differ_where_those_of_each_do(groups):
  one = asked(options={name: tuple(group) for name, group in groups.items()})
  each = [goals.key(goal) for goal in made(one)]
  many = goals.synthetic_keys(one, np.arange(len(each)))
  assert many.dtype == np.uint64 and len(many) == len(each)
  pairs = set(zip(each, many.tolist(), strict=True))
  assert len(pairs) == len(set(each)) == len(set(many.tolist()))
  if not goals.alike(one):
    assert len(set(each)) == len(each)


def test_combinations_of_groups_of_several_sizes_come_in_order():
  groups = {'c': ('1', '2', '3'), 'a': ('4',), 'b': ('5', '6')}
  assert [goal.options for goal in made(asked(options=groups))] == [
    ('4', '5', '1'),
    ('4', '5', '2'),
    ('4', '5', '3'),
    ('4', '6', '1'),
    ('4', '6', '2'),
    ('4', '6', '3'),
  ]


def test_without_options_one_goal_is_made():
  (goal,) = made(asked(pricing=(2000.0,)))
  assert (goal.instruction, goal.options) == ('i want a towel', ())
  assert goal.price_upper == products.NO_BOUND


def test_no_goal_is_made_without_an_instruction_or_of_an_empty_group():
  assert goals.synthetic_count(product(options={'size': ('s', 'm')})) == 0
  empty = asked(options={'size': ('s', 'm'), 'color': ()})
  assert goals.synthetic_count(empty) == 0


def test_goals_made_of_one_product_have_one_bound():
  one = asked(pricing=(5.0,), options={'size': tuple('abcdefgh')})
  assert {goal.price_upper for goal in made(one)} == {goals.bound(one)[0]}


@pytest.mark.parametrize('number', [-1, 2])
def test_a_goal_that_is_not_there_is_refused(number):
  one = asked(options={'size': ('s', 'm')})
  with pytest.raises(IndexError, match=f'2 synthetic .* number {number}'):
    goals.synthetic(one, 0, number)


# Order and splits.


def test_goals_are_numbered_as_published():
  """`random.seed(233); random.shuffle(goals)`."""
  assert list(goals.order(10)) == [5, 9, 0, 1, 4, 7, 6, 3, 8, 2]
  assert list(goals.order(6910)[:6]) == [3963, 2638, 2193, 1856, 4358, 6149]
  published = [f'goal {i}' for i in range(1000)]
  state = random.getstate()
  random.seed(233)
  random.shuffle(published)
  random.setstate(state)
  assert [f'goal {place}' for place in goals.order(1000)] == published
  assert goals.order(10, seed=1) != goals.order(10)
  assert (list(goals.order(0)), list(goals.order(1))) == ([], [0])


def test_the_order_takes_four_bytes_a_goal():
  assert memoryview(goals.order(1000)).nbytes == 4000


def test_the_order_leaves_other_draws_alone():
  state = random.getstate()
  goals.order(100)
  goals.bound(product(pricing=(5.0,)))
  products.price(product(pricing=(5.0, 6.0)))
  assert random.getstate() == state


@pytest.mark.parametrize(
  ('count', 'train', 'dev', 'test'),
  [
    (12087, (1500, 12087), (500, 1500), (0, 500)),
    (1501, (1500, 1501), (500, 1500), (0, 500)),
    (1500, (1500, 1500), (500, 1500), (0, 500)),
    (700, (700, 700), (500, 700), (0, 500)),
    (3, (3, 3), (3, 3), (0, 3)),
    (0, (0, 0), (0, 0), (0, 0)),
  ],
)
def test_splits_are_the_published_ones(count, train, dev, test):
  found = goals.splits(count)
  ends = [(name, part.start, part.stop) for name, part in found.items()]
  assert ends == [('train', *train), ('dev', *dev), ('test', *test)]


def test_goals_that_ask_for_the_same_have_one_key():
  one = products.Goal(3, 'a', ('x', 'y'), ('s', 'red'), 20.0)
  same = products.Goal(3, 'b', ('y', 'x'), ('red', 's'), 40.0)
  assert goals.key(one) == goals.key(same)
  for other in (
    products.Goal(4, 'a', ('x', 'y'), ('s', 'red'), 20.0),
    products.Goal(3, 'a', ('x', 'z'), ('s', 'red'), 20.0),
    products.Goal(3, 'a', ('x', 'y'), ('s',), 20.0),
    products.Goal(3, 'a', ('x', 'y', 's'), ('red',), 20.0),
  ):
    assert goals.key(other) != goals.key(one)
  assert len({goals.key(one), goals.key(same)}) == 1


def test_splits_do_not_share_goals():
  """Test holds a and b, dev c and again b, train again a and c, and d twice."""
  numbers = {'train': range(5, 9), 'dev': range(2, 5), 'test': range(2)}
  found = goals.unlike(['a', 'b', 'c', 'b', 'e', 'a', 'd', 'c', 'd'], numbers)
  assert list(found) == ['train', 'dev', 'test']
  assert found == {'train': [6, 8], 'dev': [2, 4], 'test': range(2)}
  assert isinstance(found['test'], range)


def test_splits_that_share_nothing_stay_as_they_are():
  numbers = goals.splits(2000)
  found = goals.unlike(range(2000), numbers)
  assert all(found[name] is numbers[name] for name in numbers)


def test_one_instruction_given_twice_is_in_one_split_only():
  """4,000 goals of 800 products, five of each, alike but for their words."""
  asked_for = [
    goals.human(product(), i // 5, [entry(instruction=f'{i}')], HUMAN_AT)[0]
    for i in range(4000)
  ]
  keys = [goals.key(asked_for[place]) for place in goals.order(4000)]
  found = goals.unlike(keys, goals.splits(4000))
  held = {name: {keys[i] for i in found[name]} for name in found}
  assert not held['train'] & held['dev']
  assert not held['train'] & held['test']
  assert not held['dev'] & held['test']
  assert found['test'] == range(500)
  assert 0 < len(found['dev']) < 1000 and 0 < len(found['train']) < 2500
  assert set().union(*held.values()) == set(keys)
