"""WebShop's reward, rule by rule, and the nouns of titles that it rests on."""

import json
import pathlib
import subprocess
import sys

import pytest

from envs_server.webshop import nouns, products, reward

# The published tests of the reward compare these titles (wanted, bought).
SNEAKERS = (
  'Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White',
  'PEAK High Top Mens Basketball Shoes Lou Williams Streetball Master '
  'Breathable Non Slip Outdoor Sneakers',
)
CORD = (
  'Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K '
  'Ultra HD Soundbar Home Theater System Subwoofer',
  'BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V '
  'DVD/VCR Combo Home Theater System',
)
SHORT_CORD = (CORD[0].removesuffix(' Home Theater System Subwoofer'), CORD[1])
KNOB = (
  'Rusticware 921ORB Kitchen and Bath Cabinet Knob',
  'Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover '
  'Portable Makeup Tweezers (Silver)',
)
TEA = ('tea tree', 'essential oils', 'natural ingredients')
RULES = nouns.Rules()


class EveryWord:
  """Takes each word for a noun, so that scores can be read off titles."""

  name = 'every word'

  def nouns(self, title):
    return title.lower().split()


def product(title='Name 1', **fields):
  fields = {
    'asin': 'B000000001',
    'query': 'query 1',
    'product_category': 'a › b › c',
    'attributes': ('cheap',),
    **fields,
  }
  return products.Product(title=title, **fields)


def judge(
  bought=None, wanted=None, *, price=35.0, chosen=(), tagger=RULES, **goal
):
  goal = {'attributes': ('cheap',), 'price_upper': 40.0, **goal}
  return reward.reward(
    bought or product(),
    wanted or product(),
    products.Goal(row=0, instruction='', **goal),
    price=price,
    options=chosen,
    tagger=tagger,
  )


# The kind of product.


def test_a_product_is_of_its_own_kind():
  judged = judge()
  assert (judged.type, judged.title_score) == (1.0, 1.0)
  assert judged.query_match and judged.category_match


def test_another_query_does_not_match():
  judged = judge(product(query='query 2'))
  assert not judged.query_match
  assert judged.category_match


@pytest.mark.parametrize(
  ('categories', 'match'),
  [
    ('b › c › a', True),
    ('a › d › b', True),
    ('a › a › b', True),
    ('a›b', True),
    ('a › a › d', False),
    ('d › e › f', False),
    ('a', False),
    ('', False),
  ],
)
def test_two_different_shared_categories_match(categories, match):
  assert judge(product(product_category=categories)).category_match == match


@pytest.mark.parametrize(
  ('wanted', 'bought', 'score'),
  [
    ('red shoe', 'shoe red', 1.0),
    ('red shoe shoe rack', 'shoe shoe', 1 / 4),
    ('shoe shoe', 'shoe shoe', 1 / 2),
    ('a b c d e f', 'f b', 1 / 3),
    ('shoe', 'sock', 0.0),
    ('shoe', '', 0.0),
    ('', 'shoe', 0.2),
    ('', '', 0.2),
  ],
)
def test_title_score_is_the_share_of_the_wanted_nouns(wanted, bought, score):
  judged = judge(product(bought), product(wanted), tagger=EveryWord())
  assert judged.title_score == pytest.approx(score)


# Titles of ten nouns, so many of them shared.
@pytest.mark.parametrize(
  ('shared', 'query', 'category', 'kind'),
  [
    (0, 'query 1', 'a › b', 0.0),
    (0, 'query 2', 'd', 0.0),
    (1, 'query 1', 'd', 1.0),
    (1, 'query 2', 'a › b', 1.0),
    (1, 'query 2', 'd', 0.5),
    (2, 'query 2', 'd', 0.5),
    (3, 'query 2', 'd', 1.0),
  ],
)
def test_the_kind_by_query_category_and_title(shared, query, category, kind):
  judged = judge(
    product(
      'a b c d e f g h i j'[: 2 * shared] + 'other',
      query=query,
      product_category=category,
    ),
    product('a b c d e f g h i j'),
    tagger=EveryWord(),
  )
  assert judged.title_score == pytest.approx(shared / 10)
  assert judged.type == kind


@pytest.mark.parametrize('query', ['query 1', 'query 2'])
def test_less_than_a_tenth_of_a_title_overrides_a_match(query):
  judged = judge(
    product('a', query=query),
    product('a b c d e f g h i j k'),
    tagger=EveryWord(),
  )
  assert judged.type == 0.1


def test_a_title_without_nouns_is_no_match_by_itself():
  alone = {'query': 'query 2', 'product_category': 'd'}
  assert judge(product('Name'), product('2021')).type == 1.0
  assert judge(product('Name', **alone), product('2021')).type == 0.5


# Published with the spaCy of 2022: 0.333, 0.3, 0.15, less than 0.05. spaCy
# 3.8 gives 0.4, 0.313, 0.167, 0; all give the same factors.
@pytest.mark.parametrize(
  ('titles', 'score', 'published', 'kind'),
  [
    (SNEAKERS, 4 / 9, 0.333, 1.0),
    (CORD, 5 / 17, 0.3, 1.0),
    (SHORT_CORD, 2 / 13, 0.15, 0.5),
    (KNOB, 0.0, 0.0, 0.0),
  ],
)
def test_the_rules_judge_the_published_titles_alike(
  titles, score, published, kind
):
  wanted, bought = titles
  judged = judge(
    product(bought, query='query 2', product_category='a › a › d'),
    product(wanted),
  )
  assert judged.title_score == pytest.approx(score)
  assert judged.title_score == pytest.approx(published, abs=0.12)
  assert judged.type == kind == reward.type_factor(False, published)


# Attributes.


@pytest.mark.parametrize(
  ('fields', 'share'),
  [
    ({'attributes': ('tea tree', 'essential oil', 'natural ingredients')}, 1.0),
    ({'attributes': ('essential oil', 'natural ingredients')}, 2 / 3),
    (
      {
        'features': ('Smells of lemons, with Essential Oils',),
        'description': 'The best shampoo, of NATURAL INGREDIENTS',
      },
      2 / 3,
    ),
    ({'features': ('Grown as tea', 'tree of the south')}, 1 / 3),
    ({'title': 'Shampoo with Tea Tree'}, 1 / 3),
    (
      {
        'attributes': ('tea bag', 'earl gray', 'lipton'),
        'title': 'English tea for breakfast',
        'features': ('Soothing aroma', 'Calming, great feeling'),
        'description': 'The best tea of Lipton, for your breakfast',
      },
      0.0,
    ),
  ],
)
def test_attributes_are_looked_for_in_attributes_and_texts(fields, share):
  judged = judge(product(**fields), attributes=TEA)
  assert judged.attributes == pytest.approx(share)


@pytest.mark.parametrize(
  ('attribute', 'own', 'has'),
  [
    # token_set_ratio is 85, then 86.
    ('abcdefghijklmnopqrst', 'abcdefghijklmnopqxyz', 0.0),
    ('leather', 'leathes', 1.0),
    ('wash machine', 'Machine-Wash only', 1.0),
  ],
)
def test_attributes_match_above_85(attribute, own, has):
  judged = judge(product(attributes=(own,)), attributes=(attribute,))
  assert judged.attributes == has


def test_the_wanted_attribute_is_looked_for_in_texts_as_it_is_written():
  bought = product('the LED Lamp', attributes=('none',))
  assert judge(bought, attributes=('led lamp',)).attributes == 1.0
  assert judge(bought, attributes=('he l',)).attributes == 1.0
  assert judge(bought, attributes=('HE L',)).attributes == 0.0


# Options.


@pytest.mark.parametrize(
  ('wanted', 'chosen', 'share'),
  [
    (('grey', 'XL', 'pack of 12'), ('pack of 12', 'grey', 'XL'), 1.0),
    (('grey', 'XL', 'pack of 12'), ('pack of 12', 'blue', 'XL'), 2 / 3),
    (('cool powder snow', 'XL'), ('XL', 'powder snow'), 1.0),
    ((), ('grey', 'XL'), None),
    (('grey', 'XL'), (), 0.0),
    # One choice can do for two.
    (('grey', 'light grey'), ('grey',), 1.0),
  ],
)
def test_options_are_compared_by_value(wanted, chosen, share):
  judged = judge(options=wanted, chosen=chosen)
  assert judged.options == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
  ('wanted', 'chosen', 'match'),
  [
    ('dark blue', 'light blue', True),
    # `dark` comes before both `green` and `red`, `light` after `green`.
    ('dark red', 'dark green', True),
    ('light red', 'light green', False),
    # `ash` is a part of both.
    ('washed', 'stonewash', True),
    ('titanium', 'tan', True),
    # Case counts.
    ('Navy', 'navy', True),
    ('redwood', 'red', True),
    ('Redwood', 'red', False),
    ('size 7', 'size 8', False),
  ],
)
def test_options_stand_for_the_first_colour_in_them(wanted, chosen, match):
  assert judge(options=(wanted,), chosen=(chosen,)).options == match


def test_the_order_of_the_colours():
  assert len(reward.COLOURS) == 102
  assert list(reward.COLOURS) == sorted(reward.COLOURS)


# Price and total.


@pytest.mark.parametrize(
  ('price', 'bound', 'within'),
  [
    (40.0, 40.0, True),
    (40.01, 40.0, False),
    (5e5, products.NO_BOUND, True),
  ],
)
def test_the_bound_on_the_price_is_inclusive(price, bound, within):
  judged = judge(price=price, price_upper=bound)
  assert judged.price is within
  assert judged.total == (1.0 if within else 0.5)


@pytest.mark.parametrize('attributes', range(1, 8))
@pytest.mark.parametrize('options', range(6))
def test_all_that_was_asked_for_is_exactly_one(attributes, options):
  names = tuple(f'attribute {chr(97 + number)}' for number in range(attributes))
  values = tuple(f'value {chr(97 + number)}' for number in range(options))
  judged = judge(
    product(attributes=names),
    attributes=names,
    options=values,
    chosen=values[::-1],
  )
  assert judged.total == 1.0


def test_the_total_of_partial_matches():
  shampoo = {
    'attributes': ('none',),
    'description': 'The best shampoo, made with natural ingredients',
  }
  name = SNEAKERS[0]
  chosen = ('grey', 'XL')
  judged = judge(
    product(name, attributes=TEA),
    product(name),
    attributes=TEA,
    options=chosen,
    chosen=chosen,
  )
  assert judged.total == 1.0
  # 1 of 3 attributes, 2 of 2 options, the price.
  judged = judge(
    product(name, **shampoo),
    product(name),
    attributes=TEA,
    options=chosen,
    chosen=chosen,
  )
  assert judged.total == pytest.approx(4 / 6)
  more = (*chosen, 'pack of 12')
  judged = judge(
    product(name, **shampoo),
    product(name),
    attributes=TEA,
    options=more,
    chosen=chosen,
  )
  assert judged.total == pytest.approx(4 / 7)
  # Another kind of product.
  judged = judge(
    product(
      SHORT_CORD[1],
      query='query 2',
      product_category='a › d › e',
      **shampoo,
    ),
    product(SHORT_CORD[0]),
    attributes=TEA,
    options=more,
    chosen=chosen,
  )
  assert judged.total == pytest.approx(2 / 7)


def test_nothing_right_is_zero():
  assert judge(product(KNOB[1]), product(KNOB[0])).total == 0.0


# Nouns.


@pytest.mark.parametrize(
  ('title', 'tokens'),
  [
    ("Women's T-Shirts (Black)", "Women 's T - Shirts ( Black )"),
    ('Mount, 8.5oz/250ml [2 Pack]', 'Mount , 8.5oz/250ml [ 2 Pack ]'),
    ('12x16 Inch, 7mm', '12x16 Inch , 7 mm'),
    ('Ready-to-Eat Salt,Kosher', 'Ready - to - Eat Salt , Kosher'),
    ('Lid w/ Straw 100% A/B 4-Seat', 'Lid w/ Straw 100 % A / B 4 - Seat'),
    (
      '"Best" Men’s 14” TV... Rugs.com',
      '" Best " Men ’s 14 ” TV ... Rugs.com',
    ),
    (
      'Hat\u2122,\u3000Nice+Warm UPF50+ USA.',
      'Hat \u2122 , Nice+Warm UPF50 + USA .',
    ),
    ('', ''),
  ],
)
def test_titles_are_split_as_by_the_model(title, tokens):
  assert nouns.tokens(title) == tokens.split()


# The model's nouns (spaCy 3.8.18, en_core_web_sm 3.8.0) of titles made up here.
MODEL_NOUNS = {
  "Women's Casual Loose Fit Long Sleeve Button Down Shirt, Cotton Linen Blouse "
  'with Pockets': 'women casual loose fit long sleeve button down shirt cotton '
  'linen blouse pockets',
  'KALORIK Wireless Bluetooth Headphones with Noise Cancelling Microphone '
  '(Black, 2 Pack)': 'kalorik wireless bluetooth headphones noise cancelling '
  'microphone black pack',
  'Gluten Free Protein Bars, Dark Chocolate and Sea Salt, 1.5oz (Pack of 12)': (
    'gluten free protein bars dark chocolate sea salt pack'
  ),
  'Modern 3-Seat Sofa for Living Room | Velvet Upholstered Couch with Wooden '
  'Legs, 72" Grey': 'seat sofa living room | velvet upholstered couch wooden '
  'legs grey',
  'Long lasting waterproof eyeliner pen for sensitive eyes, easily removed '
  'with warm water': 'eyeliner pen eyes water',
  "Men's Slip-On Loafers Made of Real Leather - Comfortable Walking Shoes, US "
  '9.5': 'men slip on loafers leather walking shoes us',
  '6 ft HDMI Cable 4K@60Hz, Gold Plated, Compatible with PS4/TV/Laptop': (
    'ft hdmi cable 4k@60hz gold plated ps4 tv laptop'
  ),
  'Natural Coconut Oil Shampoo & Conditioner Set, Sulfate-Free, 16.9 Fl Oz '
  'Each': 'natural coconut oil shampoo conditioner set sulfate fl oz',
}
# Where the rules differ: what they lack, and what they add.
DIFFERENCES = [
  ('down', ''),
  ('', ''),
  ('', 'oz'),
  ('', 'modern'),
  ('', 'long'),
  ('on', ''),
  ('4k@60hz plated', ''),
  ('', 'free'),
]


@pytest.mark.parametrize(
  ('title', 'lacking', 'added'),
  [
    (title, lacking.split(), added.split())
    for title, (lacking, added) in zip(MODEL_NOUNS, DIFFERENCES, strict=True)
  ],
)
def test_the_rules_find_nearly_the_nouns_of_the_model(title, lacking, added):
  model, rules = MODEL_NOUNS[title].split(), RULES.nouns(title)
  assert [noun for noun in model if noun not in rules] == lacking
  assert [noun for noun in rules if noun not in model] == added


def test_repeats_and_the_order_of_a_title_are_kept():
  assert RULES.nouns('Lid for Pot, Pot with Lid | 2 Pot') == [
    'lid',
    'pot',
    'pot',
    'lid',
    '|',
    'pot',
  ]


def test_numbers_marks_and_function_words_are_no_nouns():
  assert RULES.nouns('With the 2 x (3/4) & 12x16 - 9.5" of Your Two!') == ['x']
  assert RULES.nouns('100ml M2 1080P') == ['100ml', 'm2', '1080p']


# A spaCy that says of each word what the word says of itself.
FAKE_SPACY = """
import types
__version__ = '9.8.7'
def load(disable):
  assert sorted(disable) == ['lemmatizer', 'ner', 'parser']
  print('loaded')
  return lambda title: [
    types.SimpleNamespace(text=word, pos_=word.split('_')[0])
    for word in title.split()
  ]
"""
ASK = """
import json
from envs_server.webshop import nouns
tagger = nouns.load()
print(tagger.name)
print(json.dumps(tagger.nouns('NOUN_One ADJ_two PROPN_x NOUN_One PNOUN VERB')))
"""


def ask(folder):
  """Runs ASK with the modules in `folder` importable."""
  root = pathlib.Path(__file__).parent.parent
  return subprocess.run(
    [sys.executable, '-c', ASK],
    env={'PYTHONPATH': f'{root}:{folder}'},
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_model_is_taken_where_it_is_installed(tmp_path):
  (tmp_path / 'spacy.py').write_text('')
  (tmp_path / 'en_core_web_sm.py').write_text(FAKE_SPACY)
  name, loaded, found = ask(tmp_path).stdout.splitlines()
  assert (name, loaded) == ('spaCy en_core_web_sm 9.8.7', 'loaded')
  assert json.loads(found) == ['noun_one', 'propn_x', 'noun_one']


@pytest.mark.parametrize(
  'module', ['import no_such_module', 'def load(disable): no_such_module']
)
def test_a_broken_model_does_not_give_way_to_the_rules(tmp_path, module):
  (tmp_path / 'spacy.py').write_text('')
  (tmp_path / 'en_core_web_sm.py').write_text(
    f'__version__ = "9.8.7"\n{module}'
  )
  answer = ask(tmp_path)
  assert answer.returncode != 0
  last = answer.stderr.splitlines()[-1]
  assert 'BrokenModelError: spaCy and its model en_core_web_sm are' in last
  assert last.count('no_such_module') == 1
  assert 'pip install --force-reinstall spacy' in last


def test_the_version_of_the_model_is_known_without_loading_it(tmp_path):
  (tmp_path / 'spacy.py').write_text('')
  (tmp_path / 'en_core_web_sm.py').write_text('import no_such_module')
  about = tmp_path / 'en_core_web_sm-3.8.0.dist-info'
  about.mkdir()
  (about / 'METADATA').write_text('Name: en_core_web_sm\nVersion: 3.8.0\n')
  answer = ask(tmp_path)
  assert answer.stdout == 'spaCy en_core_web_sm 3.8.0\n'
  last = answer.stderr.splitlines()[-1]
  assert last.count('BrokenModelError') == last.count('no_such_module') == 1


@pytest.mark.parametrize('missing', ['spacy', nouns.MODEL])
def test_the_rules_are_taken_where_a_part_is_missing(tmp_path, missing):
  (tmp_path / 'spacy.py').write_text('')
  (tmp_path / 'en_core_web_sm.py').write_text(FAKE_SPACY)
  # Hidden rather than not written, so that this holds where spaCy is installed.
  (tmp_path / 'sitecustomize.py').write_text(
    'import importlib.util\n'
    'find = importlib.util.find_spec\n'
    'importlib.util.find_spec = lambda name, *rest: (\n'
    f'  None if name == {missing!r} else find(name, *rest)\n'
    ')\n'
  )
  assert ask(tmp_path).stdout.splitlines()[0] == 'rules 1'
