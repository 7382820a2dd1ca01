"""The reward of a purchase (Yao et al. 2022, section 3 and appendix A.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thefuzz import fuzz

from envs_server.webshop import nouns, products

# Words that count as colours. An option stands for the first of these that is
# a part of it, so the order matters: `dark blue` is blue, `washed` is ash.
COLOURS = tuple(
  """
  alabaster apricot aqua ash asphalt azure banana beige black blue blush
  bordeaux bronze brown burgundy camel camo caramel champagne charcoal cheetah
  chestnut chocolate christmas coffee cognac copper coral cranberry cream
  crystal dark denim eggplant elephant espresso fuchsia gold granite grape
  graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
  leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
  multicolor mushroom mustard natural navy nude olive orange peach pewter pink
  plum purple rainbow red rose royal rust sand sapphire seashell silver skull
  slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet
  walnut wheat white wine yellow
  """.split()
)
# Of 100; what is above it is a match.
_ALIKE = 85
# A title without nouns tells nothing: neither enough for a match by itself,
# nor so little that it overrides another.
_NO_NOUNS = 0.2


@dataclasses.dataclass(frozen=True)
class Reward:
  """What a purchase earns, and why.

  Attributes:
    total: 0 to 1; exactly 1.0 if all that was asked for is there.
    type: factor for the kind of product: 1.0, 0.5, 0.1 or 0.0.
    attributes: share of the wanted attributes that the product has.
    options: share of the wanted options that were chosen; None if none was
      asked for.
    price: whether it is within the bound.
    query_match: whether both products were found by the same query.
    category_match: whether they share two categories or more.
    title_score: share of the nouns in the wanted title that are in the other.
  """

  total: float
  type: float
  attributes: float
  options: float | None
  price: bool
  query_match: bool
  category_match: bool
  title_score: float


def reward(
  bought: products.Product,
  wanted: products.Product,
  goal: products.Goal,
  *,
  price: float,
  options: Sequence[str],
  tagger: nouns.Tagger,
) -> Reward:
  """Judges a purchase.

  Args:
    bought: the product.
    wanted: the product that `goal` was written for.
    goal: what was asked for.
    price: of the product, in dollars.
    options: values that were chosen, in any order.
    tagger: finds nouns in titles.

  Returns:
    The reward.
  """
  has = sum(_has(bought, attribute) for attribute in goal.attributes)
  chosen = [_colour(option) for option in options]
  asked = [_colour(option) for option in goal.options]
  got = sum(any(_alike(one, other) for one in chosen) for other in asked)
  affordable = price <= goal.price_upper
  query_match = bought.query == wanted.query
  category_match = len(_categories(bought) & _categories(wanted)) >= 2
  score = title_score(tagger.nouns(bought.title), tagger.nouns(wanted.title))
  factor = type_factor(query_match or category_match, score)
  return Reward(
    total=(has + got + affordable)
    / (len(goal.attributes) + len(asked) + 1)
    * factor,
    type=factor,
    attributes=has / len(goal.attributes),
    options=got / len(asked) if asked else None,
    price=affordable,
    query_match=query_match,
    category_match=category_match,
    title_score=score,
  )


def title_score(bought: Sequence[str], wanted: Sequence[str]) -> float:
  """Share of `wanted` that `bought` has; 0.2 if nothing is wanted.

  Repeats count in the whole alone: a title that says a noun twice has less
  than 1.0 in common with itself.
  """
  if not wanted:
    return _NO_NOUNS
  return len(set(bought) & set(wanted)) / len(wanted)


def type_factor(match: bool, score: float) -> float:
  """The factor for the kind of product.

  Args:
    match: whether query or categories match.
    score: of the titles. With (almost) nothing in common, they override.
  """
  if score == 0.0:
    return 0.0
  if score < 0.1:
    return 0.1
  return 1.0 if match or score > 0.2 else 0.5


def _categories(product: products.Product) -> set[str]:
  return {part.strip() for part in product.product_category.split('›')}


def _has(product: products.Product, attribute: str) -> bool:
  """Whether it is among the attributes, or a part of a text as it is."""
  return any(_alike(own, attribute) for own in product.attributes) or any(
    attribute in text.lower()
    for text in (
      product.title,
      ' '.join(product.features),
      product.description,
    )
  )


def _colour(option: str) -> str:
  return next((colour for colour in COLOURS if colour in option), option)


def _alike(one: str, other: str) -> bool:
  return fuzz.token_set_ratio(one, other) > _ALIKE
