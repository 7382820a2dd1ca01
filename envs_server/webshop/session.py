"""One customer in the shop: from the first page to what was bought."""

from __future__ import annotations

from typing import Protocol

from envs_server.webshop import nouns, pages, products, reward

FOUND = 50  # Products that a search finds at most.
_ABOUT = (pages.DESCRIPTION, pages.FEATURES, pages.REVIEWS, pages.ATTRIBUTES)


class Shop(Protocol):
  """Where products are found."""

  def product(self, row: int) -> products.Product:
    """Returns a product."""

  def search(self, text: str, k: int) -> list[int]:
    """Returns rows of at most `k` products, the best first."""


class Session:
  """What a customer sees, and what became of it.

  Attributes:
    page: that is shown.
    row: of the product that is shown or was bought; None before there is one.
    chosen: {option: value} of that product.
    outcome: set when it is bought, which ends the session.
  """

  def __init__(
    self,
    shop: Shop,
    goal: products.Goal,
    tagger: nouns.Tagger,
    *,
    attributes: bool = False,
  ):
    """Opens the first page.

    Args:
      shop: to buy in.
      goal: that is judged.
      tagger: for the judgement.
      attributes: whether products have the page of that name.
    """
    self._shop = shop
    self._goal = goal
    self._tagger = tagger
    self._attributes = attributes
    self._found: list[int] = []
    self._number = 1  # Of the page of results.
    self.outcome: reward.Reward | None = None
    self._start()

  def step(self, action: str) -> None:
    """Takes an action; text that is no action leaves the page as it is.

    Actions are `search[words]` on any page and `click[name]` of something that
    can be clicked on this one. The brackets are the outermost; case does not
    matter, and blanks count only between names that differ in nothing else.
    After the purchase there is no action.
    """
    if self.outcome:
      return
    verb, _, rest = action.strip().partition('[')
    if not rest.endswith(']'):
      return
    verb, argument = verb.strip().lower(), rest[:-1].lower()
    if verb == 'search' and argument.strip() and _balanced(argument):
      self._found = self._shop.search(argument, FOUND)
      self._show_results(1)
    elif verb == 'click':
      self._click(argument)

  def actions(self) -> tuple[str, ...]:
    """Returns every click; on the first page one search that stands for all."""
    if self.page.name == 'search':
      return ('search[<keywords>]',)
    return tuple(f'click[{name}]' for name in self.page.clickables)

  def _click(self, name: str) -> None:
    clickables = self.page.clickables
    by_fold = {_fold(n): node for n, node in reversed(clickables.items())}
    node = clickables.get(name) or by_fold.get(_fold(name))
    if node is None:
      return
    if node.kind == 'link':
      self.row = node.target
      self._seen.add(node.target)
      self._show_item()
    elif node.kind == 'label':
      self.chosen[node.target] = node.text
      self._show_item()
    elif node.text == pages.BACK:
      self._start()
    elif node.text == pages.NEXT:
      self._show_results(self._number + 1)
    elif node.text == pages.BUY:
      self._buy()
    elif node.text in _ABOUT:
      self.page = pages.about(
        self._goal.instruction, node.text, self._product()
      )
    elif self.page.name == 'results':
      self._show_results(self._number - 1)
    elif self.page.name == 'item':
      self._show_results(self._number)
    else:
      self._show_item()

  def _start(self) -> None:
    self._seen: set[int] = set()
    self._leave()
    self.page = pages.search(self._goal.instruction)

  def _leave(self) -> None:
    """Puts the product back."""
    self.row: int | None = None
    self.chosen: dict[str, str] = {}

  def _show_results(self, number: int) -> None:
    self._leave()
    self._number = number
    first = (number - 1) * pages.PAGE_SIZE
    rows = self._found[first : first + pages.PAGE_SIZE]
    self.page = pages.results(
      self._goal.instruction,
      number,
      len(self._found),
      [(row, self._shop.product(row)) for row in rows],
      self._seen,
    )

  def _show_item(self) -> None:
    self.page = pages.item(
      self._goal.instruction,
      self._product(),
      self.chosen,
      attributes=self._attributes,
    )

  def _buy(self) -> None:
    bought = self._product()
    self.outcome = reward.reward(
      bought,
      self._shop.product(self._goal.row),
      self._goal,
      price=products.price(bought),
      options=tuple(self.chosen.values()),
      tagger=self._tagger,
    )
    self.page = pages.done(bought.asin, self.chosen, self.outcome.total)

  def _product(self) -> products.Product:
    return self._shop.product(self.row)


def _fold(name: str) -> str:
  return ' '.join(name.split())


def _balanced(text: str) -> bool:
  """Whether every bracket in `text` has its other one."""
  depth = 0
  for char in text:
    depth += (char == '[') - (char == ']')
    if depth < 0:
      return False
  return depth == 0
