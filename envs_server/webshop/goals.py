"""What customers want: goals that people wrote, and goals made of options.

The order of goals is the published one. Bounds on prices are drawn from the
seed, the product and the number of the goal alone, so that a larger catalogue
leaves them as they are.
"""

from __future__ import annotations

import array
import hashlib
import math
import random
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from envs_server.webshop import files, products

# What an instruction says of its bound, before the dollars.
PRICE = ', and price lower than '
# Dollars that a bound may be.
_BOUNDS = range(10, 1000, 10)
# Of those above the price, how many are drawn from.
_NEAREST = 4
# Goals of the test and the dev split, from the first on.
_TEST, _DEV = 500, 1000


def bound(
  product: products.Product, seed: int = products.SEED, number: int = 0
) -> tuple[float, str]:
  """Draws how much a customer would pay at most.

  Of the four multiples of 10 next above the price two are drawn, and the larger
  one counts. Where there are fewer than two below 1000, there is no bound.

  Args:
    product: that satisfies the goal.
    seed: of the draw.
    number: of the goal, among those of the product.

  Returns:
    Dollars, and the words that the instruction ends with.
  """
  price = products.price(product, seed)
  nearest = [float(b) for b in _BOUNDS if b > price][:_NEAREST]
  if len(nearest) < 2:
    return products.NO_BOUND, ''
  draw = random.Random(f'{seed}/bound/{product.asin}/{number}')
  upper = max(draw.sample(nearest, 2))
  return upper, f'{PRICE}{upper:.2f} dollars'


def human(
  product: products.Product,
  row: int,
  entries: object,
  where: str,
  seed: int = products.SEED,
) -> list[products.Goal]:
  """Returns the goals that people wrote for a product.

  Args:
    product: the product.
    row: its row in the store.
    entries: of the product in the file of these goals. Those that ask for no
      attribute are left out.
    where: they are, for errors: `items_human_ins.json, B09QKP7XQL`.
    seed: of the bounds.

  Raises:
    DataError: an entry is not what it should be.
  """
  if not isinstance(entries, list):
    raise files.DataError(
      f'{where}: it is {files.said(entries)}, and should be a list of objects.'
    )
  goals = []
  for number, entry in enumerate(entries):
    at = f'{where}, entry {number}'
    if not isinstance(entry, dict):
      raise files.DataError(
        f'{at}: it is {files.said(entry)}, and should be an object.'
      )
    attributes = files.texts(
      entry.get('instruction_attributes'), 'instruction_attributes', at
    )
    if not attributes:
      continue
    options = entry.get('instruction_options')
    if isinstance(options, dict):
      options = list(options.values())
    instruction = files.text(entry.get('instruction'), 'instruction', at)
    upper, words = bound(product, seed, number)
    goals.append(
      products.Goal(
        row=row,
        instruction=instruction.strip('.') + words,
        attributes=attributes,
        options=files.texts(options, 'instruction_options', at),
        price_upper=upper,
      )
    )
  return goals


def synthetic_count(product: products.Product) -> int:
  """Returns how many goals `synthetic` can make of a product."""
  if not product.instruction:
    return 0
  return math.prod(len(values) for values in product.options.values())


def synthetic(
  product: products.Product, row: int, number: int, seed: int = products.SEED
) -> products.Goal:
  """Returns one goal of a product, which asks for one value of each option.

  The last option, by name, changes first; a value that an option has twice
  counts twice, so that goals have the published numbers. All goals of a product
  have the same bound, as published.

  Args:
    product: the product.
    row: its row in the store.
    number: of the goal, from 0 and below `synthetic_count`.
    seed: of the bound.

  Raises:
    IndexError: there is no goal of this number.
  """
  count = synthetic_count(product)
  if not 0 <= number < count:
    raise IndexError(
      f'{product.asin} has {count} synthetic goals, none of number {number}.'
    )
  chosen = []
  for name, values in sorted(product.options.items(), reverse=True):
    number, place = divmod(number, len(values))
    chosen.insert(0, (name, values[place]))
  asked = ', and '.join(f'{name}: {value}' for name, value in chosen)
  upper, words = bound(product, seed)
  return products.Goal(
    row=row,
    instruction=product.instruction
    + (f' with {asked}' if asked else '')
    + words,
    attributes=product.instruction_attributes,
    options=tuple(value for _, value in chosen),
    price_upper=upper,
  )


def alike(product: products.Product) -> bool:
  """Whether two synthetic goals of a product may have one `key`.

  Not where each value is there once, for then the values tell the options.
  """
  values = [value for group in product.options.values() for value in group]
  return len(set(values)) < len(values)


def synthetic_keys(
  product: products.Product, numbers: np.ndarray
) -> np.ndarray:
  """Returns what synthetic goals of one product share that ask for the same.

  As `key` of them, without making them. Each is a sum of hashes of the values:
  goals that ask for different things share one with a chance of 2**-64.

  Args:
    product: the product.
    numbers: [N] int64, of its goals, as `synthetic` takes them.

  Returns:
    [N] uint64.
  """
  sums = np.zeros(len(numbers), np.uint64)
  for _, values in sorted(product.options.items(), reverse=True):
    numbers, places = np.divmod(numbers, len(values))
    hashes = [hashlib.sha256(value.encode()).digest()[:8] for value in values]
    sums += np.frombuffer(b''.join(hashes), np.dtype('<u8'))[places]
  return sums


def order(count: int, seed: int = products.SEED) -> array.array[int]:
  """Returns the places, in order of the data, of goals 0, 1, 2 and so on.

  They are int32: a list would take nine times as much memory.
  """
  places = array.array('i', range(count))
  random.Random(seed).shuffle(places)
  return places


def splits(count: int) -> dict[str, range]:
  """Returns the numbers of the goals in each split, of `count` goals.

  These may ask for the same in two splits; see `unlike`.
  """
  test, dev = min(_TEST, count), min(_TEST + _DEV, count)
  return {
    'train': range(dev, count),
    'dev': range(test, dev),
    'test': range(test),
  }


def key(goal: products.Goal) -> Hashable:
  """Returns what two goals share that ask for the same, in whatever words."""
  return goal.row, tuple(sorted(goal.attributes)), tuple(sorted(goal.options))


def unlike(
  keys: Sequence[Hashable] | Mapping[int, Hashable],
  splits: Mapping[str, Sequence[int]],
) -> dict[str, Sequence[int]]:
  """Returns the splits without goals that are held out elsewhere.

  Several people wrote goals for one product, so that the published splits
  overlap. Left out are goals of train that are also in dev or test, and goals
  of dev that are also in test; the others keep their numbers.

  Args:
    keys: by number, of all goals of the splits; equal ones ask for the same.
    splits: numbers of the goals of `train`, `dev` and `test`. One that nothing
      is left out of stays the object it is.
  """
  held: set[Hashable] = set()
  kept = {}
  for split in ('test', 'dev', 'train'):
    numbers = splits[split]
    found = [number for number in numbers if keys[number] not in held]
    kept[split] = numbers if len(found) == len(numbers) else found
    if split != 'train':
      held.update(keys[number] for number in numbers)
  return {split: kept[split] for split in splits}
