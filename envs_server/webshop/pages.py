"""The pages of WebShop as a policy reads them.

The published environment renders HTML and reads the texts back out of it, with
all that this does to white space. Here a page is the list of those texts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterable, Mapping

from envs_server.webshop import products

PAGE_SIZE = 10  # Products on a page of results.
# Buttons.
SEARCH = 'Search'
BACK = 'Back to Search'
PREVIOUS = '< Prev'
NEXT = 'Next >'
DESCRIPTION = 'Description'
FEATURES = 'Features'
REVIEWS = 'Reviews'
ATTRIBUTES = 'Attributes'
BUY = 'Buy Now'
# White space that HTML folds. Other blanks, such as U+00A0, stay.
_BLANK = ' \t\n\f\r'
_SEPARATOR = ' [SEP] '
# What JSON within HTML must not hold.
_ESCAPED = str.maketrans(
  {char: f'\\u{ord(char):04x}' for char in ('<', '>', '&', "'")}
)


@dataclasses.dataclass(frozen=True)
class Node:
  """A text on a page.

  Attributes:
    kind: `text` | `button` | `link` (to a product) | `label` (of an option).
    text: as the page has it, blanks at its ends included.
    target: row of the product of a link; name of the option of a label.
    clicked: the product was seen before; the value is chosen.
  """

  kind: str
  text: str
  target: int | str | None = None
  clicked: bool = False


@dataclasses.dataclass(frozen=True)
class Page:
  """What the shop shows.

  Attributes:
    name: `search` | `results` | `item` | `done`, or the name of the button
      that leads to it, such as `Description`.
    nodes: its texts, in their order.
  """

  name: str
  nodes: tuple[Node, ...]

  @property
  def clickables(self) -> dict[str, Node]:
    """What can be clicked, by name in lower case, in the published order.

    Where names are equal, a button counts before a value, and the last value
    before earlier ones. The button `Search` is none: it takes words.
    """
    if self.name == 'search':
      return {}
    named: dict[str, dict[str, Node]] = {'button': {}, 'link': {}, 'label': {}}
    for node in self.nodes:
      if node.kind in named:
        named[node.kind][node.text.lower()] = node
    buttons = named['button']
    return buttons | named['link'] | named['label'] | buttons


def text(page: Page) -> str:
  """Returns the texts of a page in one line."""
  return _SEPARATOR.join(node.text.strip() for node in page.nodes)


def text_rich(page: Page) -> str:
  """Returns the texts of a page, one a line, with marks of what is clickable.

  The published environment looks for a chosen value in the address of the
  page, and so misses one that is not plain ASCII. Here every one is marked.
  """
  lines = []
  choices = []
  for node in page.nodes:
    mark = 'clicked button' if node.clicked else 'button'
    line = node.text
    if node.kind != 'text':
      line = f'[{mark}] {line} [{mark}_]'
    if node.kind == 'link':
      line = '\n' + line
    if node.kind == 'label':
      line = '  ' + line
      if node.clicked:
        choices.insert(0, f'You have clicked {node.text}.')
    lines.append(line)
  return '\n'.join([*choices, *lines, ''])


def search(instruction: str) -> Page:
  """Returns the first page."""
  return _page(
    'search',
    [
      Node('text', 'WebShop'),
      Node('text', 'Instruction: '),
      Node('text', instruction),
      Node('button', SEARCH),
    ],
  )


def results(
  instruction: str,
  number: int,
  total: int,
  shown: Iterable[tuple[int, products.Product]],
  seen: Container[int],
) -> Page:
  """Returns a page of what was found.

  Args:
    instruction: of the goal.
    number: of the page, from 1.
    total: products found.
    shown: those on this page, each with its row.
    seen: rows of those whose pages were opened before.
  """
  nodes = _head(instruction)
  nodes.append(Node('text', f'Page {number} (Total results: {total})'))
  if number > 1:
    nodes.append(Node('button', PREVIOUS))
  nodes.append(Node('button', NEXT))
  for row, product in shown:
    nodes += [
      Node('link', product.asin, row, row in seen),
      Node('text', product.title),
      Node('text', product.price_tag),
    ]
  return _page('results', nodes)


def item(
  instruction: str,
  product: products.Product,
  chosen: Mapping[str, str],
  *,
  attributes: bool,
) -> Page:
  """Returns the page of a product.

  Args:
    instruction: of the goal.
    product: that is shown.
    chosen: {option: value}.
    attributes: whether it has the button of that name.
  """
  nodes = [*_head(instruction), Node('button', PREVIOUS)]
  values = set(chosen.values())
  for name, offered in product.options.items():
    nodes.append(Node('text', name))
    nodes += [Node('label', value, name, value in values) for value in offered]
  nodes += [
    Node('text', product.title),
    Node('text', f'Price: {product.price_tag}'),
    Node('text', 'Rating: N.A.'),
    Node('button', DESCRIPTION),
    Node('button', FEATURES),
    Node('button', REVIEWS),
  ]
  if attributes:
    nodes.append(Node('button', ATTRIBUTES))
  nodes.append(Node('button', BUY))
  return _page('item', nodes)


def about(instruction: str, name: str, product: products.Product) -> Page:
  """Returns what a button of a product's page leads to.

  Args:
    instruction: of the goal.
    name: of the button. Of `REVIEWS` the data have none.
    product: that it is about.
  """
  told = {
    DESCRIPTION: [product.description],
    FEATURES: [f' {feature}' for feature in product.features],
    REVIEWS: [],
    ATTRIBUTES: [
      *(f' {attribute}' for attribute in product.attributes),
      product.category,
      product.query,
      product.product_category,
    ],
  }[name]
  nodes = [*_head(instruction), Node('button', PREVIOUS)]
  return _page(name, nodes + [Node('text', line) for line in told])


def done(asin: str, chosen: Mapping[str, str], reward: float) -> Page:
  """Returns the last page. What it has of the goal is left empty, as published.

  Args:
    asin: of the product that was bought.
    chosen: {option: value}.
    reward: 0 to 1.
  """
  options = json.dumps(dict(chosen), sort_keys=True).translate(_ESCAPED)
  bought = {'asin': asin, 'options': options} | dict.fromkeys(
    ('attrs', 'category', 'query', 'product category'), 'None'
  )
  lines = [
    'Thank you for shopping with us!',
    'Your code: ',
    'None',
    ' (Paste it in your MTurk interface.)',
    'Purchased',
    *(line for pair in bought.items() for line in pair),
    'Target',
    'asin',
    'options',
    'attrs',
    'price upper',
    'instuction text',
    'category',
    'product category',
    'query',
    'Goal ',
    'None',
    'Reward',
    'Your score (min 0.0, max 1.0)',
    str(reward),
    'Reward Details ',
    'None',
  ]
  return _page('done', [Node('text', line) for line in lines])


def _head(instruction: str) -> list[Node]:
  """What every page but the first and the last begins with."""
  return [
    Node('text', 'Instruction:'),
    Node('text', instruction),
    Node('button', BACK),
  ]


def _page(name: str, nodes: Iterable[Node]) -> Page:
  """Returns a page without what HTML shows nothing of."""
  kept = []
  for node in nodes:
    if node.text.strip(_BLANK):
      kept.append(node)
    elif node.text and '\n' not in node.text:
      # Blanks alone become one, which is still a text between two others.
      kept.append(dataclasses.replace(node, text=' '))
  return Page(name, tuple(kept))
