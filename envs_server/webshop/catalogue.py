"""Makes a catalogue for WebShop without its data, in the official file format.

  python -m envs_server.webshop.catalogue DIR --products 1000 --seed 0

writes items_shuffle.json, items_ins_v2.json and items_human_ins.json into DIR,
which can then be $WEBSHOP_DATA. No product exists, no person wrote an
instruction, and scores on them compare with nothing published.

The same arguments give the same bytes on every machine (with --gzip the same
texts, as the bytes then depend on zlib too), and more products begin with the
products of fewer. No two titles are equal.

Of every `PERIOD` records, one has each of the oddities in `ODD`, always at the
same place, so a catalogue of 200 products has them all. A goal gives the full
reward for its own product with its own options, except where `ODD` says that
it may not.

With --plain, nothing is odd and everything is short: titles of four or five
words out of some 200, at most two groups of two to four options, ASCII only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import gzip
import hashlib
import io
import json
import math
import os
import pathlib
import random
import shutil
import signal
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from envs_server.webshop import catalogue_words as words
from envs_server.webshop import files

# Of the files; raised when the same arguments give others.
VERSION = 1
FILES = (*files.FULL, files.HUMAN)
# Lies beside them and says how they were made.
GENERATED = 'GENERATED.json'
NOTE = (
  'Made by envs_server/webshop/catalogue.py of planpo_jax. These products and '
  'goals are not the WebShop benchmark, and scores on them compare with '
  'nothing published.'
)
# Records from one oddity to the next of its sort.
PERIOD = 200
# So many goals leave 1000 to train, as test and dev take the first 1500.
FEWEST_GOALS = 2500
# About as many goals as people wrote for the published catalogue.
MOST_GOALS = 12_000
# Fewer than brands times types, and than plain titles: all titles differ.
MOST_PRODUCTS = 10_000_000
MOST_PLAIN = 100_000
_ASIDE = '.generating'
_SYLLABLES = words.SYLLABLES[:40]
_BRANDS = len(_SYLLABLES) ** 3
_TYPES = tuple(
  (name, *kind) for name, one in words.KINDS.items() for kind in one.types
)
_PLAIN_TYPES = tuple(
  (name, kind) for name, one in words.PLAIN_KINDS.items() for kind in one[3]
)
_DIGITS = string.digits + string.ascii_uppercase
# Of the kinds: the cheapest and the dearest price, cents.
_CENTS = {
  'beauty': (399, 9_999),
  'electronics': (599, 249_999),
  'fashion': (899, 29_999),
  'garden': (799, 189_999),
  'grocery': (249, 8_999),
}


class Refusal(ValueError):
  """The folder holds something that must not be touched."""


class _Dice:
  """Draws from `random()` alone, which no version of Python changes."""

  def __init__(self, key: str):
    self.random = random.Random(key).random

  def below(self, count: int) -> int:
    return int(self.random() * count)

  def pick(self, values: Sequence):
    return values[int(self.random() * len(values))]

  def some(self, values: Sequence, count: int) -> list:
    """Distinct values, in their own order's rotation; all if too few."""
    size = len(values)
    start = int(self.random() * size)
    # A step that shares no factor with the size meets no value twice.
    step = 1 + int(self.random() * size)
    while math.gcd(step, size) > 1:
      step += 1
    return [values[(start + step * i) % size] for i in range(min(count, size))]


@dataclasses.dataclass
class _Draft:
  """A product before it is written.

  Attributes:
    options: {name: values, or None for a null group}; None is written as "".
    attributes: of its entry in the attributes file.
    titled: attributes that its title holds.
    has_entry: whether the attributes file names it.
    has_instruction: whether that entry has an instruction.
    blank_goal: whether a person wrote it an instruction without attributes.
    between: what stands between the adjectives of an instruction.
  """

  asin: str
  title: str
  brand: str
  noun: str
  category: str
  query: str
  product_category: str
  pricing: str
  description: str
  features: list[str] | str
  options: dict[str, list[str] | None] | None
  attributes: list[str]
  titled: list[str]
  has_entry: bool = True
  has_instruction: bool = True
  blank_goal: bool = False
  between: str = ', '


@functools.cache
def _ring(size: int) -> int:
  """A step through `size` numbers that meets each once, evenly spread."""
  step = size * 618_034 // 1_000_000
  while math.gcd(step, size) > 1:
    step += 1
  return step


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is to be made."""

  products: int
  seed: int
  goals: int
  plain: bool

  @functools.cached_property
  def offset(self) -> int:
    digest = hashlib.sha256(f'{VERSION}/{self.plain}/{self.seed}'.encode())
    return int.from_bytes(digest.digest()[:12], 'big')

  def place(self, number: int, size: int) -> int:
    """A number below `size`, another for each of `size` products."""
    return (_ring(size) * number + self.offset) % size

  def asin(self, number: int) -> str:
    if self.plain:
      letter, rest = divmod(self.place(number, 26 * 10**4), 10**4)
      return f'{string.ascii_uppercase[letter]}{rest:04d}'
    rest = self.place(number, 36**8)
    digits = []
    for _ in range(8):
      rest, digit = divmod(rest, 36)
      digits.append(_DIGITS[digit])
    return 'B0' + ''.join(digits)

  def odd(self, number: int) -> str | None:
    return None if self.plain else _AT.get(number % PERIOD)

  def kept(self, number: int) -> int:
    """How many of the first `number` records are not dropped by a loader."""
    if self.plain:
      return number
    rounds, rest = divmod(number, PERIOD)
    return (
      number
      - rounds * len(_DROPPED)
      - sum(place < rest for place, name in _AT.items() if name in _DROPPED)
    )

  def goals_of(self, number: int) -> int:
    """How many goals with attributes a record has.

    Those of records that are kept sum to `goals`.
    """
    before, total = self.kept(number), self.kept(self.products)
    return (before + 1) * self.goals // total - before * self.goals // total


def generate(
  target: pathlib.Path | str,
  *,
  products: int,
  seed: int = 0,
  goals: int | None = None,
  gzip: bool = False,
  force: bool = False,
  plain: bool = False,
) -> None:
  """Makes a catalogue; its files appear whole or not at all.

  What is there already with the same arguments is left as it is.

  Args:
    target: to become $WEBSHOP_DATA.
    products: records of the items file.
    seed: other products for another.
    goals: with attributes, of the human file; by default one a product, but
      2500 at least and 12,000 at most.
    gzip: compresses the files and names them .json.gz.
    force: replaces generated files that were made with other arguments.
    plain: a small, easy catalogue, without oddities.

  Raises:
    ValueError: an argument is out of range.
    Refusal: `target` holds files of somebody else, or other generated ones.
    OSError: the files could not be written.
  """
  target = _check_arguments(target, products, seed, goals, plain)
  if goals is None:
    goals = default_goals(products)
  plan = _Plan(products, seed, goals, plain)
  wanted = {
    'note': NOTE,
    'generator': VERSION,
    **dataclasses.asdict(plan),
    'gzip': gzip,
  }
  with _alone(target) as aside:
    old = _standing(target, wanted, force)
    if old is None:
      return
    names = [f'{name}.gz' if gzip else name for name in FILES]
    _write(plan, [aside / name for name in names], gzip)
    sizes = {name: (aside / name).stat().st_size for name in names}
    marker = json.dumps({**wanted, 'files': sizes}, indent=2) + '\n'
    (aside / GENERATED).write_text(marker, encoding='utf-8', newline='\n')
    for name in old:
      (target / name).unlink()
    # The marker first, so that no moment shows files that nothing marks.
    for name in (GENERATED, *names):
      (aside / name).replace(target / name)


def default_goals(products: int) -> int:
  """How many goals the human file of so many products has."""
  return min(max(FEWEST_GOALS, products), MOST_GOALS)


def _check_arguments(target, products, seed, goals, plain) -> pathlib.Path:
  if not str(target).strip():
    raise ValueError(
      f'target={str(target)!r} names no folder; name one that is empty or new.'
    )
  numbers = {'products': products, 'seed': seed}
  if goals is not None:
    numbers['goals'] = goals
  for name, value in numbers.items():
    if type(value) is not int:
      raise ValueError(
        f'{name}={value!r} must be a whole number, such as 1000.'
      )
  most = MOST_PLAIN if plain else MOST_PRODUCTS
  if not 1 <= products <= most:
    raise ValueError(
      f'products={products} must be from 1 to {most}'
      f'{" for a plain catalogue" if plain else ""}; try '
      f'{min(max(products, 1), most)}.'
    )
  if seed < 0:
    raise ValueError(f'seed={seed} must be at least 0; try {-seed}.')
  if goals is not None and goals < 1:
    raise ValueError(
      f'goals={goals} must be at least 1; leave it out for {FEWEST_GOALS} or '
      'more.'
    )
  target = pathlib.Path(os.path.expanduser(target))
  if target.exists() and not target.is_dir():
    raise ValueError(f'target={str(target)!r} is a file; name a folder.')
  return target


@contextlib.contextmanager
def _alone(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder for unfinished files, which no other run uses meanwhile.

  Raises:
    Refusal: another run is there.
  """
  fresh = not target.exists()
  target.mkdir(parents=True, exist_ok=True)
  aside = target / _ASIDE
  handle = os.open(target, os.O_RDONLY)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise Refusal(
        f'another run makes a catalogue in {target}; wait for its end, or '
        'choose another folder.'
      ) from None
    try:
      aside.mkdir(exist_ok=True)
      yield aside
    finally:
      shutil.rmtree(aside, ignore_errors=True)
      if fresh:  # Left empty by a run that was stopped.
        with contextlib.suppress(OSError):
          target.rmdir()
  finally:
    os.close(handle)


def _standing(
  target: pathlib.Path, wanted: dict, force: bool
) -> list[str] | None:
  """The names of the files to be replaced; None if nothing is to be done.

  Raises:
    Refusal: what stands there may not be replaced.
  """
  marker = target / GENERATED
  found = {}
  if marker.exists():
    try:
      found = json.loads(marker.read_text(encoding='utf-8'))
      sizes = dict(found['files'])
    except (ValueError, TypeError, LookupError) as error:
      raise Refusal(
        f'{marker} is damaged ({error!r}), so it is not known how the files '
        'beside it were made; remove them, or choose another folder.'
      ) from None
  else:
    sizes = {}
  there = [
    path
    for path in sorted(target.glob('items_*.json*'))
    if path.name.removesuffix('.gz') in (*FILES, *files.SMALL)
  ]
  for path in there:
    if sizes.get(path.name) != path.stat().st_size:
      raise Refusal(
        f'{path} was not made here: {GENERATED} beside it does not name '
        'it with its size. Files of others are never replaced; choose an empty '
        'folder.'
      )
  if not there:
    return []
  changed = {
    key: found.get(key) for key in wanted if found.get(key) != wanted[key]
  }
  if not changed:
    whole = {path.name for path in there} == set(sizes)
    return None if whole else [path.name for path in there]
  if not force:
    raise Refusal(
      f'{target} holds a catalogue that was made with other arguments '
      f'({changed}). Choose another folder, or replace it with --force.'
    )
  return [path.name for path in there]


@contextlib.contextmanager
def _open(path: pathlib.Path, packed: bool) -> Iterator[TextIO]:
  """Opens a new text file, compressed if it is to be `packed`."""
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(path.open('wb'))
    if packed:
      # Neither its name nor the time, which would make the bytes differ.
      file = stack.enter_context(gzip.GzipFile('', 'wb', 6, file, mtime=0))
    yield stack.enter_context(
      io.TextIOWrapper(file, encoding='utf-8', newline='\n')
    )


def _write(plan: _Plan, paths: Sequence[pathlib.Path], packed: bool) -> None:
  """Streams the three files; holds one product at a time."""
  ascii_json = json.JSONEncoder().encode
  # Both ways of writing a letter beyond ASCII are valid, and both are met.
  utf8_json = json.JSONEncoder(ensure_ascii=False).encode
  draft_of = _plain_draft if plan.plain else _draft
  with contextlib.ExitStack() as stack:
    items, attributes, human = (
      stack.enter_context(_open(path, packed)) for path in paths
    )
    items.write('[')
    attributes.write('{')
    human.write('{')
    between = entry_between = human_between = '\n'
    for number in range(plan.products):
      dice = _Dice(f'{VERSION}/{plan.plain}/{plan.seed}/{number}')
      draft = draft_of(plan, number, dice)
      odd = plan.odd(number)
      if odd is not None:
        ODD[odd].change(draft)
      if odd == 'duplicate':
        draft.asin = plan.asin(number - 1)
      items.write(between + ascii_json(_item(draft, dice)))
      between = ',\n'
      if odd in ('duplicate', 'nan'):
        continue
      key = ascii_json(draft.asin)
      if draft.has_entry:
        attributes.write(
          f'{entry_between}{key}: {ascii_json(_entry(draft, dice))}'
        )
        entry_between = ',\n'
      goals = _goals(draft, dice, plan.goals_of(number), plan.plain)
      if goals:
        human.write(f'{human_between}{key}: {utf8_json(goals)}')
        human_between = ',\n'
    items.write('\n]\n')
    attributes.write('\n}\n')
    human.write('\n}\n')


@functools.cache
def _title_case(text: str) -> str:
  return string.capwords(text)


@functools.cache
def _plural(noun: str) -> str:
  if noun.endswith('s') and not noun.endswith('ss'):
    return noun
  if noun.endswith(('ss', 'x', 'ch', 'sh')):
    return f'{noun}es'
  if noun.endswith('y') and noun[-2] not in 'aeiou':
    return f'{noun[:-1]}ies'
  return f'{noun}s'


def _brand(place: int) -> str:
  rest, third = divmod(place, len(_SYLLABLES))
  first, second = divmod(rest, len(_SYLLABLES))
  end = words.ENDINGS[(first + second + third) % len(words.ENDINGS)]
  name = f'{_SYLLABLES[first]}{_SYLLABLES[second]}{_SYLLABLES[third]}{end}'
  return name.upper() if (first + 3 * third) % 4 == 0 else name.capitalize()


def _draft(plan: _Plan, number: int, dice: _Dice) -> _Draft:
  """A product as the published ones look."""
  # No two products share both brand and type, so no two titles are equal.
  place = plan.place(number, _BRANDS * len(_TYPES))
  which, maker = divmod(place, _BRANDS)
  category, noun, group, profile = _TYPES[which]
  kind = words.KINDS[category]
  brand = _brand(maker)
  chance = dice.random

  is_ = dice.some(kind.is_, 3)
  easy = dice.pick(kind.easy)
  use = dice.some(kind.use, 2)
  has = dice.some(kind.has, 2)
  material = dice.pick(kind.materials)
  options: dict[str, list[str] | None] | None = {}
  for name, values in words.PROFILES[profile]:
    if chance() < 0.8:
      # Sizes stand in their order, colours in any.
      count = 2 + dice.below(4)
      if name == 'Size':
        start = dice.below(len(values) - 1)
        options[name] = list(values[start : start + count])
      else:
        options[name] = dice.some(values, count)
    elif chance() < 0.1:
      options[name] = None
  tail = next((values[0] for values in options.values() if values), 'New')
  if not options:
    options = None

  model = (
    f'{_DIGITS[10 + dice.below(26)]}{_DIGITS[10 + dice.below(26)]}'
    f'{1000 + dice.below(9000)}'
  )
  title = _title_case(is_[0])
  if category == 'electronics' or chance() < 0.25:
    title = f'{model} {title}'
  title = f'{brand} {title} {material} {_title_case(noun)}'
  title += f' for {_title_case(use[0])}, {_title_case(is_[1])}'
  titled = [is_[0], use[0], is_[1]]
  if chance() < 0.5 and title.count(' ') < 10:
    title += f' with {_title_case(has[0])}'
    titled.append(has[0])
  title += f', {tail}' if chance() < 0.7 else f' ({tail})'

  features = [
    f'{is_[1].upper()} - This {noun} is {is_[0]} and {is_[1]}.',
    f'Made with {has[0]} and {material.lower()}, it is {easy}.',
    f'Great for {use[0]} and {use[1]}.',
    f'{brand} gives you {has[1]} in every {noun} we sell.',
    f'Model {model}. What you get: 1 x {noun}, {1 + dice.below(3)} year of '
    'friendly service.',
  ][: 2 + dice.below(4)]
  first = (
    f'The {brand} {noun} is {is_[2]} and comes with {has[1]}.',
    f'Looking for {_article(is_[2])} {is_[2]} {noun}? {brand} made it {easy}.',
    f'Product name: {noun}. Material: {material}. Model: {model}.',
  )
  second = (
    f'Whether you need it for {use[1]} or {use[0]}, it will not let you down.',
    f'It is {is_[0]}, {is_[1]} and always {easy}.',
    f'Please allow 1-3 mm error due to measurement. It suits {use[1]} best.',
  )
  description = '' if chance() < 0.1 else f'{dice.pick(first)} '
  if description:
    description += dice.pick(second)

  attributes = [is_[0], is_[1], use[0], easy, has[1], is_[2]]
  attributes = attributes[: 3 + dice.below(4)]
  if chance() < 0.1:  # Only the title says it.
    attributes.remove(is_[0])
  return _Draft(
    asin=plan.asin(number),
    title=title,
    brand=brand,
    noun=noun,
    category=category,
    query=_plural(noun),
    product_category=(f'{kind.root} › {group} › {_title_case(_plural(noun))}'),
    pricing=_pricing(dice, *_CENTS[category]),
    description=description,
    features=features,
    options=options,
    attributes=attributes,
    titled=titled,
    has_entry=chance() >= 0.02,
    has_instruction=chance() >= 0.1,
    blank_goal=chance() < 0.02,
  )


def _dollars(cents: int) -> str:
  return f'${cents // 100:,}.{cents % 100:02d}'


def _pricing(dice: _Dice, low: int, high: int) -> str:
  draw = dice.random()
  # Most are cheap.
  cents = low + int((high - low) * draw * draw * draw)
  sort = dice.random()
  if sort < 0.03:
    return ''
  if sort < 0.12:
    return f'{_dollars(cents)} to {_dollars(cents + 100 + cents // 2)}'
  return _dollars(cents)


def _plain_draft(plan: _Plan, number: int, dice: _Dice) -> _Draft:
  """A product that a small model can read and find."""
  brands, adjectives = words.PLAIN_BRANDS, words.PLAIN_WORDS
  place = plan.place(number, len(brands) * len(adjectives) * len(_PLAIN_TYPES))
  place, which = divmod(place, len(brands))
  brand = brands[which]
  which, adjective = divmod(place, len(adjectives))
  adjective = adjectives[adjective]
  category, noun = _PLAIN_TYPES[which]
  materials, groups, uses, _ = words.PLAIN_KINDS[category]
  material, use = dice.pick(materials), dice.pick(uses)
  if dice.random() < 0.5:
    second, title = material, f'{brand} {adjective} {material} {noun}'
  else:
    second, title = use, f'{brand} {adjective} {noun} for {use}'
  options = {}
  for group in groups[: 1 + dice.below(2)]:
    name, values = words.PLAIN_OPTIONS[group]
    options[name] = dice.some(values, 2 + dice.below(3))
  return _Draft(
    asin=plan.asin(number),
    title=_title_case(title).replace(' For ', ' for '),
    brand=brand,
    noun=noun,
    category=category,
    query=noun,
    product_category=f'{category} › {noun}',
    pricing=_dollars(500 + 100 * dice.below(90) + 99),
    description=f'A {adjective} {noun} made of {material} parts.',
    features=[f'Good for {use}.'],
    options=options,
    attributes=[adjective, second],
    titled=[adjective, second],
    between=' ',
  )


def _image(dice: _Dice) -> str:
  return f'{files.GENERATED_IMAGES}{dice.below(16**8):08x}.jpg'


def _item(draft: _Draft, dice: _Dice) -> dict:
  """A record of the items file, with the official names."""
  options: dict | str = ''
  if draft.options is not None:
    options = {
      name: values
      and [
        {'is_selected': False, 'is_available': True, 'value': value}
        | {'image': _image(dice) if name == 'Color' else None}
        for value in values
      ]
      for name, values in draft.options.items()
    }
  return {
    'name': draft.title,
    'product_information': {},
    'brand': f'Visit the {draft.brand} Store',
    'full_description': draft.description,
    'pricing': draft.pricing,
    'list_price': '',
    'availability_status': 'In Stock.',
    'images': [_image(dice), _image(dice)],
    'product_category': draft.product_category,
    'average_rating': (30 + dice.below(21)) / 10,
    'small_description': draft.features,
    'total_reviews': 1 + dice.below(5000),
    'customization_options': options,
    'seller_name': draft.brand,
    'asin': draft.asin,
    'category': draft.category,
    'query': draft.query,
    'page': 1 + dice.below(20),
  }


def _entry(draft: _Draft, dice: _Dice) -> dict:
  """An entry of the attributes file."""
  entry: dict = {'attributes': draft.attributes}
  if draft.has_instruction:
    wanted = draft.attributes[: 1 + dice.below(3)]
    start = dice.pick(('i am looking for', "i'm looking for", 'i need'))
    entry['instruction'] = f'{start} {_thing(draft, wanted)}'
    entry['instruction_attributes'] = wanted
  return entry


def _article(text: str) -> str:
  return 'an' if text[0] in 'aeiou' else 'a'


@functools.cache
def _slots(category: str) -> dict[str, str]:
  """How an attribute is put in words; other ones stand before the noun."""
  kind = words.KINDS[category]
  return (
    dict.fromkeys(kind.use, 'for')
    | dict.fromkeys(words.PLAIN_KINDS[category][2], 'for')
    | dict.fromkeys(kind.has, 'with')
    | dict.fromkeys(kind.easy, 'that is')
  )


def _thing(
  draft: _Draft, attributes: Sequence[str], first: Sequence[str] = ()
) -> str:
  """Says `a long lasting, alcohol free lipstick that is easy to use`."""
  slots, noun = _slots(draft.category), draft.noun
  before = [*first, *(text for text in attributes if text not in slots)]
  text = f'{draft.between.join(before)} {noun}' if before else noun
  for slot in ('that is', 'for', 'with'):
    said = [text for text in attributes if slots.get(text) == slot]
    if said:
      text += f' {slot} {" and ".join(said)}'
  plural = noun == _plural(noun) and not before
  return text if plural else f'{_article(text)} {text}'


def _shown(value: str) -> str:
  """An option's value as pages show it."""
  return value.strip().replace('/', ' | ').lower()


_SAID = {
  'fit type': '{} fit',
  'flavor name': '{} flavor',
  'scent': '{} scent',
  'style': '{} style',
  'item package quantity': 'package quantity {}',
  'size': 'size {}',
}
# {thing} without the options, {front} with them before the noun.
_ASKED = (
  'i am looking for {front}',
  'i need {front}',
  'find me {front}',
  'i want {thing}. i would like it in {values}.',
  'i would like to buy {thing} in {values}',
  'can you find me {thing}? please choose {values}.',
  'im looking for {thing}, and pick the one in {values}',
  'get me {thing} that comes in {values}.',
)
_ASKED_BARE = (
  'i am looking for {thing}',
  'i need {thing}.',
  'im looking for {thing}',
  'can you find me {thing}',
  'i would like to buy {thing}.',
  'show me {thing}',
)


def _goals(draft: _Draft, dice: _Dice, count: int, plain: bool) -> list[dict]:
  """A product's entries in the human file, `count` of them with attributes."""
  goals = []
  met = set()
  for _ in range(count):
    for _ in range(8):  # A goal like an earlier one is drawn again.
      goal = _goal(draft, dice, plain)
      key = (
        tuple(sorted(goal['instruction_attributes'])),
        tuple(sorted(goal['instruction_options'])),
      )
      if key not in met:
        break
    met.add(key)
    goals.append(goal)
  if draft.blank_goal:
    goals.insert(
      0,
      _goal(draft, dice, plain)
      | {'attributes': [], 'instruction_attributes': []},
    )
  return goals


def _goal(draft: _Draft, dice: _Dice, plain: bool) -> dict:
  pool = list(draft.titled)
  if draft.has_entry:
    pool += [text for text in draft.attributes if text not in pool]
  wanted = dice.some(pool, 1 + dice.below(2 if plain else 3))
  chosen = [
    (name.lower(), _shown(dice.pick(values)))
    for name, values in (draft.options or {}).items()
    if values and (plain or dice.random() < 0.8)
  ]
  said = [_SAID.get(name, '{}').format(value) for name, value in chosen]
  if plain:
    form = 'i want {thing} in {values}'
  else:
    form = dice.pick(_ASKED if said else _ASKED_BARE)
  instruction = form.format(
    thing=_thing(draft, wanted),
    front=_thing(draft, wanted, said),
    values=' and '.join(said),
  )
  return {
    'asin': draft.asin,
    'instruction': instruction,
    'attributes': draft.attributes,
    'options': [f'{name}: {value}' for name, value in chosen],
    'instruction_attributes': wanted,
    'instruction_options': [value for _, value in chosen],
    'assignment_id': f'G{dice.below(36**8):012d}',
    'worker_id': f'generated{dice.below(100):02d}',
  }


@dataclasses.dataclass(frozen=True)
class Oddity:
  """Something that one in `PERIOD` products has.

  Attributes:
    what: it is.
    change: makes a product so.
    dropped: whether a loader must leave the record out.
    unsure: whether its goals may be beyond reach.
  """

  what: str
  change: Callable[[_Draft], None]
  dropped: bool = False
  unsure: bool = False


def _set(**changes) -> Callable[[_Draft], None]:
  def change(draft: _Draft) -> None:
    for name, value in changes.items():
      setattr(draft, name, value)

  return change


def _with(**changes: str) -> Callable[[_Draft], None]:
  """Appends to texts, as an oddity must not hide what a title says."""

  def change(draft: _Draft) -> None:
    for name, text in changes.items():
      if name == 'value':
        draft.options = {'Color': [text, 'Black'], 'Size': ['Small', 'Large']}
      else:
        setattr(draft, name, f'{getattr(draft, name)} {text}')

  return change


def _lengthen(draft: _Draft) -> None:
  draft.asin += draft.asin[-2:]


# Which record of every PERIOD an oddity befalls: those at 3, 9, 15 and so on.
ODD = {
  'slash': Oddity(
    'a slash in a value, shown as " | "',
    _set(
      options={'Size': ['2/4', '4/6', '8/10'], 'Color': ['Red/Black', 'Blue']}
    ),
  ),
  'spaced_slash': Oddity(
    'a slash between blanks, shown with two blanks on each side of the bar',
    _set(options={'Size': ['4 oz / 2 pack', '8 oz / 1 pack']}),
  ),
  'bracket': Oddity(
    'square brackets in values',
    _set(
      options={'Size': ['size [xl]', 'size [m]'], 'Style': ['[New] Set', 'Old']}
    ),
  ),
  'shared': Oddity(
    'one value in two groups, of which a page can click only one',
    _set(options={'Color': ['Natural', 'Black'], 'Style': ['Natural', 'Bold']}),
    unsure=True,
  ),
  'no_price': Oddity('an empty price', _set(pricing='')),
  'range': Oddity('a range of prices', _set(pricing='$9.99 to $19.99')),
  'thousands': Oddity(
    'commas in prices, which are above every bound',
    _set(pricing='$1,299.00 to $2,450.50'),
  ),
  'accents': Oddity(
    'accents in title, description and a value',
    _with(title='Café Édition', description='Crème brûlée.', value='Café Noir'),
  ),
  'cjk': Oddity(
    'ideographs in title, description and a value',
    _with(title='保湿クリーム', description='高品質 한국어.', value='黒色'),
  ),
  'emoji': Oddity(
    'emoji in title, description and a value',
    _with(title='🎁 Gift', description='Enjoy 😀!', value='Green 🌿'),
  ),
  'symbols': Oddity(
    'a value of symbols alone, which the fuzzy match of options never finds',
    _with(value='★★'),
    unsure=True,
  ),
  'duplicate': Oddity(
    'the asin of the record before it',
    _set(),
    dropped=True,
  ),
  'nan': Oddity('the asin `nan`', _set(asin='nan'), dropped=True),
  'long_asin': Oddity(
    'an asin of 12 characters, which the other files name too',
    _lengthen,
    dropped=True,
  ),
  'no_features': Oddity('no bullet points', _set(features=[])),
  'text_features': Oddity(
    'a string for bullet points', _set(features='One text instead of a list.')
  ),
  'long_title': Oddity(
    'a title of more than 300 characters',
    _with(title='and Many More Words That Nobody Reads to the End ' * 7),
  ),
  'quotes': Oddity(
    'quotes in title, description and a value',
    _with(
      title='"Best" \'N\' Co. 12" Set',
      description='It\'s "new" \\ said `they`.',
      value='12" x 16"',
    ),
  ),
  'html': Oddity(
    'characters and codes of HTML in title, description and a value',
    _with(
      title='<b>New</b> &amp; Fresh > Old',
      description='<br>Line & line.</br> &lt;5',
      value='Salt & Pepper <dark>',
    ),
  ),
  'button': Oddity(
    'values that are the names of buttons, which pages cannot tell apart',
    _set(options={'Style': ['Features', 'Description', 'Buy Now', '< Prev']}),
    unsure=True,
  ),
  'no_entry': Oddity('no entry in the attributes file', _set(has_entry=False)),
  'no_instruction': Oddity(
    'an entry without instruction',
    _set(has_entry=True, has_instruction=False),
  ),
  'null_group': Oddity(
    'a null group of options beside another',
    _set(options={'Color': None, 'Size': ['Small', 'Large']}),
  ),
  'only_null': Oddity(
    'null groups of options only', _set(options={'Size': None})
  ),
  'no_options': Oddity('"" for options', _set(options=None)),
  'blank_goal': Oddity(
    "a person's instruction without attributes, which makes no goal",
    _set(blank_goal=True),
  ),
  'blanks': Oddity(
    'blanks around a value',
    _set(options={'Color': ['  Red ', 'Blue'], 'Size': ['One Size']}),
  ),
  'repeated': Oddity(
    'a value twice in its group, once in capitals',
    _set(options={'Color': ['Red', 'Blue', 'RED']}),
  ),
  'no_description': Oddity('an empty description', _set(description='')),
}
_AT = {6 * place + 3: name for place, name in enumerate(ODD)}
_DROPPED = frozenset(name for name, odd in ODD.items() if odd.dropped)


def odd_numbers(name: str, products: int) -> range:
  """Records that have an oddity of `ODD`, counted from 0."""
  return range(6 * list(ODD).index(name) + 3, products, PERIOD)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m envs_server.webshop.catalogue',
    description='Makes a WebShop catalogue that is not the benchmark.',
  )
  parser.add_argument('target', metavar='DIR')
  parser.add_argument('--products', type=int, default=1000, metavar='N')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--goals', type=int, metavar='G', help='human goals; default: by products'
  )
  parser.add_argument(
    '--gzip', action='store_true', help='compresses the files'
  )
  parser.add_argument(
    '--force', action='store_true', help='replaces another generated catalogue'
  )
  parser.add_argument(
    '--plain', action='store_true', help='easy products, for a small model'
  )
  arguments = vars(parser.parse_args(argv))
  try:
    generate(**arguments)
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('stopped; nothing was written', file=sys.stderr)
    return 130
  target = pathlib.Path(os.path.expanduser(arguments['target']))
  found = json.loads((target / GENERATED).read_text(encoding='utf-8'))
  for name, size in found['files'].items():
    print(f'{target / name}: {size} bytes')
  print(f'{found["products"]} records, {found["goals"]} human goals')
  print('This catalogue is not the WebShop benchmark.')
  print(f'export WEBSHOP_DATA={target.absolute()}')
  return 0


if __name__ == '__main__':
  # Stops as Ctrl-C does, which leaves no half file.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main())
