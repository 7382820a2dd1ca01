"""A customer who knows which product is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thefuzz import fuzz

from envs_server.webshop import goals, nouns, pages, products, session

_MOST_ACTIONS = 15  # What published agents may take.
# Words and characters of a query. What comes later in a long title tells
# little, and an action may not have any length.
_WORDS, _CHARACTERS = 20, 400


def solve(
  shop: session.Shop, goal: products.Goal, tagger: nouns.Tagger
) -> tuple[str, ...]:
  """Returns actions that earn the full reward of a goal.

  Of several queries the one is taken that shows the product on the earliest
  page; of those alike, the first of `_queries`.

  Args:
    shop: to buy in.
    goal: what is wanted.
    tagger: for the judgement.

  Returns:
    At most 15 actions; none if they would not earn it, as where the product
    itself lacks what is asked for.
  """
  wanted = shop.product(goal.row)
  end = (wanted.asin, *_choices(wanted, goal.options), pages.BUY)
  plans = []
  for query in dict.fromkeys(map(_clean, _queries(wanted, goal))):
    found = shop.search(query, session.FOUND) if query else []
    if goal.row in found:
      turned = found.index(goal.row) // pages.PAGE_SIZE
      clicks = (pages.NEXT,) * turned + end
      plans.append(
        (f'search[{query}]', *(f'click[{name.lower()}]' for name in clicks))
      )
  plan = min(plans, key=len, default=())
  if plan and len(plan) <= _MOST_ACTIONS and _wins(plan, shop, goal, tagger):
    return plan
  return ()


def _queries(wanted: products.Product, goal: products.Goal) -> Iterator[str]:
  # First, for it is all that others have to go by. No product is found by what
  # it says of the price.
  yield goal.instruction.rpartition(goals.PRICE)[0] or goal.instruction
  yield wanted.title
  # Where many have the same title.
  yield f'{" ".join(goal.options)} {wanted.title}'
  yield products.search_text(wanted)


def _clean(query: str) -> str:
  """A query as an action may hold it: brackets would end the action."""
  words = query.lower().replace('[', ' ').replace(']', ' ').split()
  return ' '.join(words[:_WORDS])[:_CHARACTERS].strip()


def _choices(wanted: products.Product, asked: Sequence[str]) -> list[str]:
  """Values to choose, one of a group at most: those most like what is asked."""
  free = dict(wanted.options)
  chosen: list[str] = []

  def offered(option: str) -> bool:
    return any(option in values for values in free.values())

  # First those that are there as they were asked for.
  for option in sorted(asked, key=lambda option: not offered(option)):
    if not free or option in chosen:
      continue
    name, value = max(
      ((name, value) for name, values in free.items() for value in values),
      key=lambda pair: (
        pair[1] == option,
        fuzz.token_set_ratio(pair[1], option),
      ),
      default=('', ''),
    )
    if value:
      chosen.append(value)
      del free[name]
  return chosen


def _wins(
  plan: Sequence[str],
  shop: session.Shop,
  goal: products.Goal,
  tagger: nouns.Tagger,
) -> bool:
  played = session.Session(shop, goal, tagger)
  for action in plan:
    played.step(action)
  return played.outcome is not None and played.outcome.total == 1.0
