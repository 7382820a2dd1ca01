"""Products and goals of WebShop (Yao et al. 2022, arXiv 2207.01206)."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Mapping

from envs_server.webshop import files

# Of the order of goals, as in the published environment, and of all draws.
SEED = 233
# A bound that is none.
NO_BOUND = 1_000_000.0
# Characters of an asin.
_LONGEST = 10
_NO_DIGIT = re.compile(r'[^\d.]')


@dataclasses.dataclass(frozen=True)
class Product:
  """One record of the items file, cleaned, with its attributes.

  Attributes:
    asin: its key, at most 10 characters.
    title: as pages show it.
    description: likewise.
    features: bullet points.
    category: coarse, such as `beauty`.
    query: what it was found by when it was collected; lower case.
    product_category: `A › B › C`.
    pricing: dollars: the price, or the ends of a range.
    options: {name: values}, both as pages show them.
    attributes: what is said of it beyond its texts.
    instruction: of its synthetic goals; empty if it has none.
    instruction_attributes: that the synthetic goals ask for.
  """

  asin: str
  title: str
  description: str = ''
  features: tuple[str, ...] = ()
  category: str = ''
  query: str = ''
  product_category: str = ''
  pricing: tuple[float, ...] = (100.0,)
  options: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  attributes: tuple[str, ...] = ('DUMMY_ATTR',)
  instruction: str = ''
  instruction_attributes: tuple[str, ...] = ()

  @property
  def price_tag(self) -> str:
    """As pages show it: `$9.99`, or `$9.99 to $12.0`."""
    return ' to '.join(f'${price}' for price in self.pricing)


@dataclasses.dataclass(frozen=True)
class Goal:
  """What a customer wants.

  Attributes:
    row: of the product that satisfies it, in the store.
    instruction: the goal in words, with the bound on the price.
    attributes: that are asked for; one at least.
    options: values that are asked for, as the data have them.
    price_upper: dollars; `NO_BOUND` for none.
  """

  row: int
  instruction: str
  attributes: tuple[str, ...]
  options: tuple[str, ...] = ()
  price_upper: float = NO_BOUND


_FIELDS = tuple(field.name for field in dataclasses.fields(Product))


def parse(
  record: Mapping[str, object],
  attributes: object,
  where: str,
  entry_where: str = '',
) -> Product | None:
  """Cleans one record of the items file.

  Args:
    record: as it is in the file.
    attributes: its entry in the attributes file; None if it has none.
    where: the record is, for errors: `items_shuffle.json, record 17`.
    entry_where: the entry is, likewise: `items_ins_v2.json, B09QKP7XQL`.

  Returns:
    The product; None for a record that does not count, whose asin is `nan` or
    too long. Whether an asin was there before is the caller's business.

  Raises:
    DataError: a field is missing or is not what it should be.
  """
  asin = _text(record, 'asin', where)
  if not asin:
    raise files.wrong(asin, 'asin', where, f'of 1 to {_LONGEST} characters')
  if asin == 'nan' or len(asin) > _LONGEST:
    return None
  bullets = _get(record, 'small_description', where)
  return Product(
    asin=asin,
    title=_text(record, 'name', where),
    description=_text(record, 'full_description', where),
    features=(files.text(bullets, 'small_description', where),)
    if isinstance(bullets, str)
    else files.texts(bullets, 'small_description', where),
    category=_text(record, 'category', where, null=True),
    query=_text(record, 'query', where).lower().strip(),
    product_category=_text(record, 'product_category', where, null=True),
    pricing=_pricing(record.get('pricing'), where),
    options=_options(_get(record, 'customization_options', where), where),
    **_attributes(attributes, entry_where),
  )


def price(product: Product, seed: int = SEED) -> float:
  """Returns what a product costs, in dollars.

  Of a range it is drawn, from the seed and the asin alone: neither the other
  products nor their order change it.
  """
  if len(product.pricing) == 1:
    return product.pricing[0]
  # Seeded by a text, which is hashed in the same way everywhere.
  draw = random.Random(f'{seed}/price/{product.asin}')
  return draw.uniform(*product.pricing[:2])


def search_text(product: Product) -> str:
  """Returns what a product is found by: title, description, first bullet and
  options, in lower case."""
  options = ', and '.join(
    f'{name}: {", ".join(values)}' for name, values in product.options.items()
  )
  parts = (
    product.title,
    product.description,
    product.features[0] if product.features else '',
    options,
  )
  return ' '.join(parts).lower()


def to_json(product: Product) -> bytes:
  """Returns a product as `from_json` reads it: its fields in their order."""
  fields = [getattr(product, name) for name in _FIELDS]
  text = json.dumps(fields, ensure_ascii=False, separators=(',', ':'))
  return text.encode()


def from_json(line: bytes) -> Product:
  """Returns the product that `to_json` wrote."""
  fields = dict(zip(_FIELDS, json.loads(line), strict=True))
  options = {name: tuple(v) for name, v in fields.pop('options').items()}
  return Product(
    options=options,
    **{
      name: tuple(value) if isinstance(value, list) else value
      for name, value in fields.items()
    },
  )


def _get(record: Mapping[str, object], field: str, where: str) -> object:
  if field not in record:
    raise files.DataError(f'{where}: it has no {field}, and should have one.')
  return record[field]


def _text(
  record: Mapping[str, object], field: str, where: str, *, null: bool = False
) -> str:
  value = _get(record, field, where)
  if null and value is None:
    return ''
  return files.text(value, field, where)


def _pricing(value: object, where: str) -> tuple[float, ...]:
  """Reads `$9.99`, and `$9.99 to $12` as the two ends."""
  if value is None or value == '':
    return (100.0,)
  rule = 'as `$9.99` or `$9.99 to $12`, or empty'
  try:
    amounts = tuple(
      float(_NO_DIGIT.sub('', part))
      for part in files.text(value, 'pricing', where).split('$')[1:]
    )
  except ValueError as error:
    raise files.wrong(value, 'pricing', where, rule) from error
  if not amounts or not all(map(math.isfinite, amounts)):
    raise files.wrong(value, 'pricing', where, rule)
  return amounts[:2]


def _options(value: object, where: str) -> dict[str, tuple[str, ...]]:
  """Reads {name: [{value: text}] or null}; a null is no group."""
  if value in (None, '', []):
    return {}
  if not isinstance(value, dict):
    raise files.wrong(
      value, 'customization_options', where, 'an object, or empty'
    )
  options = {}
  for name, values in value.items():
    if values is None:
      continue
    field = f'customization_options[{name!r}]'
    if not isinstance(values, list):
      raise files.wrong(values, field, where, 'a list, or null')
    # A slash in a value would end the address of its page.
    options[files.text(name, field, where).lower()] = tuple(
      _option(part, f'{field}[{i}]', where).strip().replace('/', ' | ').lower()
      for i, part in enumerate(values)
    )
  return options


def _option(part: object, field: str, where: str) -> str:
  if not isinstance(part, dict) or 'value' not in part:
    raise files.wrong(part, field, where, 'an object with a value')
  return files.text(part['value'], f'{field}.value', where)


def _attributes(entry: object, where: str) -> dict[str, object]:
  """Reads an entry of the attributes file into the fields of a product."""
  if entry is None:
    return {}
  if not isinstance(entry, dict):
    raise files.DataError(
      f'{where}: it is {files.said(entry)}, and should be an object.'
    )
  found = {}
  if 'attributes' in entry:
    found['attributes'] = files.texts(entry['attributes'], 'attributes', where)
  for field, read in (
    ('instruction', files.text),
    ('instruction_attributes', files.texts),
  ):
    if entry.get(field) is not None:
      found[field] = read(entry[field], field, where)
  if found.get('instruction') and not found.get('instruction_attributes'):
    raise files.wrong(
      entry.get('instruction_attributes'),
      'instruction_attributes',
      where,
      'a list of one text at least, for there is an instruction',
    )
  return found
