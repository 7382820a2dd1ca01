"""WebShop's pages as published, and what actions do on them."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from envs_server.webshop import pages, products, session, shopper
from planpo_jax.prompts import actions

ASKED = 'i want red running shoes in size 4 | 6'
SHOE = products.Product(
  asin='B00SHOE001',
  title='Runner <b>Red</b> & "Blue" Shoe',
  description='Soft.\nAnd light.',
  features=('Light weight ', '', 'Washable'),
  category='fashion',
  query='running shoe',
  product_category='Shoes › Running',
  pricing=(19.5,),
  options={
    'size': ('4 | 6', '4 oz  |  2 pack', 'size [xl]', 'a]b'),
    'color': ('red', 'dark blue', 'é漢'),
  },
  attributes=('light weight', 'washable'),
)
# Two groups share a value, and others are called as buttons are.
ODD = products.Product(
  asin='B00ODD0002',
  title=' ',
  description='\n',
  features=('\n', ' \t', '\u00a0\n'),
  query='odd thing',
  pricing=(5.0, 7.25),
  options={
    'top': ('plain', 'buy now', 'search', 'attributes', '< prev'),
    'bottom': ('next >', 'plain', 'x'),
    'empty': (),
  },
)
PLAIN = [
  products.Product(
    asin=f'B00PLAIN{i:02}',
    title=f'Plain Shoe {i}',
    query='shoe',
    pricing=(float(i),),
  )
  for i in range(11)
]
GOAL = products.Goal(0, ASKED, ('light weight',), ('4 | 6', 'red'), 30.0)


class Shop:
  """The products above; a product is found by any word of its title."""

  def __init__(self, stock=(SHOE, ODD, *PLAIN)):
    self.stock = stock
    self.searched = []

  def product(self, row):
    return self.stock[row]

  def search(self, text, k):
    self.searched.append(text)
    words = set(text.split())
    return [
      row
      for row, product in enumerate(self.stock)
      if words & {*product.title.lower().split(), product.asin.lower()}
    ][:k]


class Words:
  """A tagger to which every word is a noun."""

  name = 'words'

  def nouns(self, title):
    return title.lower().split()


def opened(*taken, attributes=False, shop=None, goal=GOAL):
  """A session in which actions were taken."""
  found = session.Session(shop or Shop(), goal, Words(), attributes=attributes)
  for action in taken:
    found.step(action)
  return found


def at_shoe(*taken, **options):
  return opened('search[shoe]', 'click[b00shoe001]', *taken, **options)


def at_odd(*taken, **options):
  return opened('search[b00odd0002]', 'click[b00odd0002]', *taken, **options)


HEAD = f'Instruction: [SEP] {ASKED} [SEP] Back to Search'
FIRST = f'WebShop [SEP] Instruction: [SEP] {ASKED} [SEP] Search'
RESULTS = (
  f'{HEAD} [SEP] Page 1 (Total results: 12) [SEP] Next > [SEP] B00SHOE001 [SEP]'
  ' Runner <b>Red</b> & "Blue" Shoe [SEP] $19.5 [SEP] '
  + ' [SEP] '.join(
    f'B00PLAIN0{i} [SEP] Plain Shoe {i} [SEP] ${i}.0' for i in range(9)
  )
)
RESULTS_2 = (
  f'{HEAD} [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] Next > [SEP] '
  'B00PLAIN09 [SEP] Plain Shoe 9 [SEP] $9.0 [SEP] '
  'B00PLAIN10 [SEP] Plain Shoe 10 [SEP] $10.0'
)
RESULTS_3 = f'{HEAD} [SEP] Page 3 (Total results: 12) [SEP] < Prev [SEP] Next >'
ITEM = (
  f'{HEAD} [SEP] < Prev [SEP] size [SEP] 4 | 6 [SEP] 4 oz  |  2 pack [SEP] '
  'size [xl] [SEP] a]b [SEP] color [SEP] red [SEP] dark blue [SEP] é漢 [SEP] '
  'Runner <b>Red</b> & "Blue" Shoe [SEP] Price: $19.5 [SEP] Rating: N.A. [SEP] '
  'Description [SEP] Features [SEP] Reviews [SEP] Buy Now'
)
DESCRIPTION = f'{HEAD} [SEP] < Prev [SEP] Soft.\nAnd light.'
FEATURES = f'{HEAD} [SEP] < Prev [SEP] Light weight [SEP]  [SEP] Washable'
REVIEWS = f'{HEAD} [SEP] < Prev'
DONE = (
  'Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it '
  'in your MTurk interface.) [SEP] Purchased [SEP] asin [SEP] B00SHOE001 [SEP] '
  'options [SEP] {"color": "red", "size": "4 | 6"} [SEP] attrs [SEP] None [SEP]'
  ' category [SEP] None [SEP] query [SEP] None [SEP] product category [SEP] '
  'None [SEP] Target [SEP] asin [SEP] options [SEP] attrs [SEP] price upper '
  '[SEP] instuction text [SEP] category [SEP] product category [SEP] query '
  '[SEP] Goal [SEP] None [SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP]'
  ' 1.0 [SEP] Reward Details [SEP] None'
)


def test_a_whole_session_in_the_published_words():
  """The words are those of the published templates and of their conversion."""
  walk = [
    ('search[shoe]', RESULTS),
    ('click[next >]', RESULTS_2),
    ('click[next >]', RESULTS_3),  # Past the last page, as published.
    ('click[< prev]', RESULTS_2),
    ('click[< prev]', RESULTS),
    ('click[b00shoe001]', ITEM),
    ('click[4 | 6]', ITEM),
    ('click[description]', DESCRIPTION),
    ('click[< prev]', ITEM),
    ('click[features]', FEATURES),
    ('click[< prev]', ITEM),
    ('click[reviews]', REVIEWS),
    ('click[back to search]', FIRST),  # The goal stays.
    ('search[shoe]', RESULTS),
    ('click[b00shoe001]', ITEM),
    ('click[4 | 6]', ITEM),
    ('click[red]', ITEM),
    ('click[buy now]', DONE),
  ]
  played = opened()
  assert pages.text(played.page) == FIRST
  for action, text in walk:
    assert played.outcome is None
    played.step(action)
    assert pages.text(played.page) == text, action
  assert played.outcome.total == 1.0


@pytest.mark.parametrize(
  'action', ['search[shoe]', 'click[back to search]', 'click[buy now]', '']
)
def test_nothing_changes_after_the_purchase(action):
  shop = Shop()
  played = opened(
    'search[shoe]', 'click[b00shoe001]', 'click[buy now]', shop=shop
  )
  page, outcome = played.page, played.outcome
  played.step(action)
  assert played.page is page and played.outcome is outcome
  assert shop.searched == ['shoe']


def test_previous_of_a_product_is_its_page_of_results():
  played = opened('search[shoe]', 'click[next >]', 'click[b00plain10]')
  assert 'Plain Shoe 10 [SEP] Price' in pages.text(played.page)
  played.step('click[< prev]')
  assert pages.text(played.page) == RESULTS_2


def test_a_search_begins_at_its_first_page():
  played = opened('search[shoe]', 'click[next >]', 'search[shoe]')
  assert pages.text(played.page) == RESULTS


@pytest.mark.parametrize(
  'away', ['search[shoe]', 'click[< prev]', 'click[back to search]']
)
def test_what_is_chosen_is_forgotten_with_the_product(away):
  played = at_shoe('click[red]', 'click[4 | 6]')
  assert played.chosen == {'color': 'red', 'size': '4 | 6'}
  played.step(away)
  assert played.chosen == {} and played.row is None
  for action in ('search[shoe]', 'click[b00shoe001]'):
    played.step(action)
  assert played.chosen == {}


def test_choices_stay_on_the_pages_of_a_product_and_the_last_counts():
  played = at_shoe('click[red]', 'click[features]', 'click[< prev]')
  assert played.chosen == {'color': 'red'}
  played.step('click[dark blue]')
  assert played.chosen == {'color': 'dark blue'}


def test_products_seen_are_marked_until_the_way_back_to_the_search():
  seen = '\n\n[clicked button] B00SHOE001 [clicked button_]\n'
  played = at_shoe('search[shoe]')
  assert seen in pages.text_rich(played.page)
  for action in ('click[back to search]', 'search[shoe]'):
    played.step(action)
  assert '\n\n[button] B00SHOE001 [button_]\n' in pages.text_rich(played.page)


def test_the_first_page_in_rich_text():
  assert pages.text_rich(opened().page) == (
    f'WebShop\nInstruction: \n{ASKED}\n[button] Search [button_]\n'
  )


def test_results_in_rich_text():
  page = opened('search[9]').page
  assert pages.text_rich(page) == (
    f'Instruction:\n{ASKED}\n[button] Back to Search [button_]\n'
    'Page 1 (Total results: 1)\n[button] Next > [button_]\n'
    '\n[button] B00PLAIN09 [button_]\nPlain Shoe 9\n$9.0\n'
  )


def test_a_product_in_rich_text():
  """Choices are told of at the top, the last one first."""
  page = at_shoe('click[red]', 'click[4 | 6]', 'click[é漢]').page
  assert pages.text_rich(page) == (
    'You have clicked é漢.\nYou have clicked 4 | 6.\n'
    f'Instruction:\n{ASKED}\n[button] Back to Search [button_]\n'
    '[button] < Prev [button_]\n'
    'size\n  [clicked button] 4 | 6 [clicked button_]\n'
    '  [button] 4 oz  |  2 pack [button_]\n  [button] size [xl] [button_]\n'
    '  [button] a]b [button_]\n'
    'color\n  [button] red [button_]\n  [button] dark blue [button_]\n'
    '  [clicked button] é漢 [clicked button_]\n'
    'Runner <b>Red</b> & "Blue" Shoe\nPrice: $19.5\nRating: N.A.\n'
    '[button] Description [button_]\n[button] Features [button_]\n'
    '[button] Reviews [button_]\n[button] Buy Now [button_]\n'
  )


def test_blanks_keep_a_place_unless_they_break_the_line():
  """HTML folds blanks to one, which stays, or to a line break, which goes."""
  assert pages.text(at_odd().page) == (
    f'{HEAD} [SEP] < Prev [SEP] top [SEP] plain [SEP] buy now [SEP] search '
    '[SEP] attributes [SEP] < prev [SEP] bottom [SEP] next > [SEP] plain [SEP] '
    'x [SEP] empty [SEP]  [SEP] Price: $5.0 to $7.25 [SEP] Rating: N.A. [SEP] '
    'Description [SEP] Features [SEP] Reviews [SEP] Buy Now'
  )
  assert pages.text(at_odd('click[description]').page) == f'{HEAD} [SEP] < Prev'
  # All features follow a blank. One of them breaks the line; what no HTML
  # folds, such as U+00A0, is a text like others.
  assert pages.text(at_odd('click[features]').page) == (
    f'{HEAD} [SEP] < Prev [SEP]  [SEP] '
  )


def test_attributes_have_a_page_where_they_are_shown():
  assert 'attributes' not in at_shoe().page.clickables
  before = at_shoe().page
  assert at_shoe('click[attributes]').page == before
  played = at_shoe(attributes=True)
  assert '[SEP] Reviews [SEP] Attributes [SEP] Buy Now' in pages.text(
    played.page
  )
  played.step('click[attributes]')
  assert pages.text(played.page) == (
    f'{HEAD} [SEP] < Prev [SEP] light weight [SEP] washable [SEP] fashion '
    '[SEP] running shoe [SEP] Shoes › Running'
  )
  played.step('click[< prev]')
  assert played.page.name == 'item'


def test_the_last_page_writes_options_as_json_within_html():
  page = pages.done('B1', {'b': "it's <é>", 'a': '&"'}, 0.5)
  assert (
    'options [SEP] {"a": "\\u0026\\"", "b": "it\\u0027s \\u003c\\u00e9\\u003e"}'
    ' [SEP] attrs'
  ) in pages.text(page)
  assert '[SEP] Your score (min 0.0, max 1.0) [SEP] 0.5 [SEP]' in pages.text(
    page
  )


# What each chooses or does on the page of the shoe.
ACTIONS = {
  'click[4 | 6]': {'size': '4 | 6'},
  'click[4 oz  |  2 pack]': {'size': '4 oz  |  2 pack'},
  'click[4 oz | 2 pack]': {'size': '4 oz  |  2 pack'},
  'click[size [xl]]': {'size': 'size [xl]'},
  'click[ Size  [XL] ]': {'size': 'size [xl]'},
  'click[a]b]': {'size': 'a]b'},
  'click[É漢]': {'color': 'é漢'},
  ' CLICK [Red]\n': {'color': 'red'},
  'click[dark\n\tblue]': {'color': 'dark blue'},
  'Click[Buy Now]': 'done',
  'click[ buy now ]': 'done',
  'click[<\u00a0Prev]': 'results',
  'search[blue shoe]': 'results',
  'SEARCH[size [xl]]': 'results',
  # What the data say is not what is shown.
  'click[4/6]': None,
  'click[buy now] because [best]': None,
  'click[buy now] because': None,
  'search[a] because [b]': None,
  'search[a [b]': None,
  'i click[buy now]': None,
  'click[[buy now]]': None,
  'click[buy now': None,
  'click buy now': None,
  'click[buy\0now]': None,
  'click[next >]': None,
  'click[search]': None,
  'click[b00shoe001]': None,
  'click[size]': None,
  'click[]': None,
  'click[ ]': None,
  'search[]': None,
  'search[ \n ]': None,
  'buy[red]': None,
  '[red]': None,
  ']click[': None,
  '': None,
  'click[' * 2000 + ']' * 2000: None,
  'click[' + '漢' * 100_000 + ']': None,
}


@pytest.mark.parametrize('action', ACTIONS, ids=lambda action: action[:40])
def test_what_is_an_action(action):
  played = at_shoe()
  before = played.page
  played.step(action)
  done = ACTIONS[action]
  if done is None:
    assert played.page is before
    assert (played.chosen, played.outcome) == ({}, None)
  elif isinstance(done, str):
    assert played.page.name == done
  else:
    assert played.chosen == done


def test_names_that_differ_in_blanks_alone_are_told_apart():
  product = products.Product('B1', 'T', options={'n': ('a b', 'a  b')})
  for name in ('a b', 'a  b'):
    played = opened(
      'search[t]', 'click[b1]', f'click[{name}]', shop=Shop((product,))
    )
    assert played.chosen == {'n': name}


def test_a_button_is_meant_before_a_value_that_differs_in_blanks_alone():
  shop = Shop((products.Product('B1', 'T', options={'n': ('buy  now',)}),))
  played = opened('search[t]', 'click[b1]', 'click[ buy now ]', shop=shop)
  assert played.outcome
  played = opened('search[t]', 'click[b1]', 'click[buy  now]', shop=shop)
  assert played.chosen == {'n': 'buy  now'}


def test_words_are_searched_in_lower_case_and_none_has_a_meaning():
  """The published shop answers `<r>` with products drawn at random."""
  shop = Shop()
  opened('search[<r> Red  Shoe]', shop=shop)
  assert shop.searched == ['<r> red  shoe']


def test_pages_of_results_need_no_further_search():
  shop = Shop()
  opened('search[shoe]', 'click[next >]', 'click[< prev]', shop=shop)
  assert shop.searched == ['shoe']


def test_a_value_of_two_groups_is_of_the_last_one_and_shown_in_both():
  played = at_odd('click[plain]')
  assert played.chosen == {'bottom': 'plain'}
  rich = pages.text_rich(played.page)
  assert rich.count('[clicked button] plain [clicked button_]') == 2
  assert rich.count('You have clicked plain.\n') == 2


def test_a_button_is_meant_before_a_value_of_the_same_name():
  assert at_odd('click[buy now]').outcome is not None
  assert at_odd('click[< prev]').page.name == 'results'
  played = at_odd('click[attributes]', attributes=True)
  assert played.page.name == 'Attributes'


def test_a_value_called_as_a_button_that_is_not_here_is_chosen():
  for name, group in [
    ('next >', 'bottom'),
    ('search', 'top'),
    ('attributes', 'top'),
  ]:
    assert at_odd(f'click[{name}]').chosen == {group: name}


def test_actions_are_listed_in_the_published_order():
  played = opened()
  assert played.actions() == ('search[<keywords>]',)
  played.step('search[plain]')
  played.step('click[next >]')
  assert played.actions() == (
    'click[back to search]',
    'click[< prev]',
    'click[next >]',
    'click[b00plain10]',
  )
  assert at_odd(attributes=True).actions() == (
    'click[back to search]',
    'click[< prev]',
    'click[description]',
    'click[features]',
    'click[reviews]',
    'click[attributes]',
    'click[buy now]',
    'click[plain]',
    'click[search]',
    'click[next >]',
    'click[x]',
  )
  assert at_shoe('click[buy now]').actions() == ()


def test_the_reward_is_of_what_was_chosen():
  """Of attribute, two options and price: 3 of 4 without the size."""
  assert at_shoe('click[red]', 'click[buy now]').outcome.total == 0.75
  assert at_shoe('click[buy now]').outcome.total == 0.5


NAMES = st.one_of(
  st.sampled_from([*at_odd().page.clickables, *at_shoe().page.clickables]),
  st.sampled_from(['b00plain01', 'next >', 'shoe', '4/6', 'size', '']),
  st.text(max_size=20),
)
AROUND = st.sampled_from(['', ' ', '\n', '[', ']', '[]', '\0', '\u3000', 'x'])
VERBS = st.sampled_from(['search', 'click', 'Click', 'SEARCH ', 'buy', ''])
ACTION = st.one_of(
  st.text(max_size=40),
  st.builds(
    '{}{}[{}{}{}]{}'.format, AROUND, VERBS, AROUND, NAMES, AROUND, AROUND
  ),
)
FUZZ = hypothesis.settings(
  max_examples=120, derandomize=True, database=None, deadline=None
)


def folded(text):
  return ' '.join(text.lower().split())


def is_action(action, page):
  """Whether it is one; written anew, that both must agree."""
  found = re.fullmatch(r'(\w+)\s*\[(.*)\]', action.strip().lower(), re.DOTALL)
  if not found:
    return False
  if found[1] == 'click':
    names = {folded(name) for name in page.clickables}
    return folded(found[2]) in names - {''}
  words = found[2]
  while re.search(r'\[[^][]*\]', words):
    words = re.sub(r'\[[^][]*\]', '', words)
  return (
    found[1] == 'search'
    and found[2].strip() != ''
    and not (set(words) & {'[', ']'})
  )


@FUZZ
@hypothesis.given(taken=st.lists(ACTION, max_size=12), odd=st.booleans())
def test_no_text_breaks_a_session(taken, odd):
  played = at_odd() if odd else at_shoe()
  for action in taken:
    before = played.page
    played.step(action)
    assert isinstance(pages.text(played.page), str)
    assert isinstance(pages.text_rich(played.page), str)
    if played.outcome:
      break
    changed = played.page is not before
    assert changed == is_action(action, before), action


VALUE = st.one_of(
  st.text(max_size=12),
  st.text('a/ []|\u00a0\n', max_size=8),
  st.sampled_from(['4/6', 'Buy Now', 'İ', 'ΑΣ', 'straße', 'ﬁ']),
)


@FUZZ
@hypothesis.given(
  values=st.lists(VALUE, min_size=1, max_size=4), form=st.data()
)
def test_every_name_that_is_shown_can_be_clicked(values, form):
  record = {
    'asin': 'B1',
    'name': 'T',
    'full_description': '',
    'small_description': [],
    'category': '',
    'query': '',
    'product_category': '',
    'customization_options': {'N': [{'value': value} for value in values]},
  }
  product = products.parse(record, None, 'record 0')
  page = opened('search[t]', 'click[b1]', shop=Shop((product,))).page
  for node in [node for node in page.nodes if node.kind == 'label']:
    again = opened('search[t]', 'click[b1]', shop=Shop((product,)))
    button = folded(node.text) in {
      folded(n.text) for n in again.page.nodes if n.kind == 'button'
    }
    if button or not node.text.strip():
      continue
    shown = f'click[{node.text.strip()}]'
    again.step(form.draw(st.sampled_from([shown, actions.fold(shown)])))
    assert folded(again.chosen['n']) == folded(node.text)


def test_a_customer_who_knows_the_product_gets_it():
  """Words of the instruction find it first: `shoes` are no `shoe`, `red` is
  in no title, but `in` and `size` are."""
  shop = Shop((*PLAIN, SHOE, ODD))
  goal = products.Goal(11, ASKED, ('washable',), ('4 | 6', 'Red'), 30.0)
  assert shopper.solve(shop, goal, Words()) == (
    'search[runner <b>red</b> & "blue" shoe]',
    'click[next >]',
    'click[b00shoe001]',
    'click[4 | 6]',
    'click[red]',
    'click[buy now]',
  )


def test_a_customer_chooses_what_is_most_like_what_was_asked_for():
  asked = ('dark blue colour', 'Size: 4|6')
  goal = products.Goal(0, ASKED, ('washable',), asked, 30.0)
  assert shopper.solve(Shop(), goal, Words())[1:] == (
    'click[b00shoe001]',
    'click[dark blue]',
    'click[4 | 6]',
    'click[buy now]',
  )


def test_the_instruction_is_searched_without_its_price():
  goal = products.Goal(
    4, 'a plain [shoe], and price lower than 20.00 dollars', ('plain',)
  )
  assert shopper.solve(Shop(), goal, Words()) == (
    'search[a plain shoe]',
    'click[b00plain02]',
    'click[buy now]',
  )


def test_what_cannot_be_bought_has_no_solution():
  shop = Shop()
  # It has no such attribute; no search finds it; its value is a button.
  for goal in (
    products.Goal(0, 'shoe', ('waterproof',)),
    products.Goal(1, 'nothing', ('dummy_attr',)),
    products.Goal(1, 'b00odd0002', ('DUMMY_ATTR',), ('buy now',)),
  ):
    assert shopper.solve(shop, goal, Words()) == ()
