"""The data files of WebShop on this machine, and how they are read.

Three JSON files: the items, an array of records; their attributes, an object
by asin; and the instructions that people wrote, likewise. The whole catalogue
holds gigabytes, so all of them are streamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

# Of the variables of the environment that say what is read.
FOLDER, LIMIT = 'WEBSHOP_DATA', 'WEBSHOP_PRODUCTS'
# Items and attributes: of the whole catalogue, and of its first products.
FULL = ('items_shuffle.json', 'items_ins_v2.json')
SMALL = ('items_shuffle_1000.json', 'items_ins_v2_1000.json')
SMALL_SIZE = 1000
HUMAN = 'items_human_ins.json'
# Begins the addresses of images in products that `catalogue` made: a domain
# that is reserved, so that no real product has them.
GENERATED_IMAGES = 'https://images.example/'
# On Google Drive, as the WebShop project publishes them.
_DRIVE = {
  SMALL[0]: '1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib',
  SMALL[1]: '1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu',
  FULL[0]: '1A2whVgOO0euk5O13n2iYDM0bQRkkRduB',
  FULL[1]: '1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi',
  HUMAN: '14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O',
}
_GZIP = b'\x1f\x8b'
_LIMIT_FORM = re.compile('[0-9]{1,18}')
_BLANK = re.compile(r'[ \t\r\n]*')
_DECODER = json.JSONDecoder()
# Characters that are read at once.
_CHUNK = 2**16
# Of the longest value.
_LONGEST = 2**26
# From an error back to the place that it is told of, at most.
_TOKEN = 16
# Characters of a value that an error repeats.
_SHOWN = 80


class DataError(ValueError):
  """A data file is not as it should be; says which, where and how."""


@dataclasses.dataclass(frozen=True)
class Sources:
  """The files of one catalogue.

  Attributes:
    items: the products.
    attributes: of the products, with the instructions of synthetic goals.
    human: instructions that people wrote; None where there is no such file,
      and then there are synthetic goals only.
  """

  items: pathlib.Path
  attributes: pathlib.Path
  human: pathlib.Path | None


def folder() -> pathlib.Path:
  """Returns $WEBSHOP_DATA.

  Raises:
    FileNotFoundError: it is not set, or is no folder; says how to get one.
  """
  name = os.environ.get(FOLDER)
  if not name:
    raise FileNotFoundError(f'${FOLDER} is not set. {_how(pathlib.Path())}')
  root = pathlib.Path(name).expanduser()
  if not root.is_dir():
    raise FileNotFoundError(f'${FOLDER}={name} is no folder. {_how(root)}')
  return root


def limit() -> int | None:
  """Returns $WEBSHOP_PRODUCTS, how many records of the items count; None: all.

  Raises:
    ValueError: it is no whole number from 1.
  """
  text = os.environ.get(LIMIT)
  if not text:
    return None
  if not (_LIMIT_FORM.fullmatch(text) and int(text)):
    raise ValueError(
      f'${LIMIT}={said(text)} must be a whole number from 1, of 18 digits at '
      'most; unset it to read all products.'
    )
  return int(text)


def locate(root: pathlib.Path) -> Sources:
  """Finds the files of a catalogue in `root`, plain or compressed by gzip.

  The whole catalogue comes before the small one, unless $WEBSHOP_PRODUCTS asks
  for no more than the small one has. Of a file and its `.gz` the plain one
  counts.

  Raises:
    FileNotFoundError: neither catalogue is complete; says what is missing and
      how to get it.
    ValueError: see `limit`.
  """
  most = limit()
  pairs = [FULL, SMALL]
  if most is not None and most <= SMALL_SIZE:
    pairs.reverse()
  for pair in pairs:
    items, attributes = (_find(root, name) for name in pair)
    if items and attributes:
      return Sources(items, attributes, _find(root, HUMAN))
  # With one file of a pair there, the other is what is missing.
  pair = max(pairs, key=lambda pair: any(_find(root, name) for name in pair))
  missing = [name for name in (*pair, HUMAN) if not _find(root, name)]
  raise FileNotFoundError(
    f'{root} has no {" and no ".join(missing)}. {_how(root)}'
  )


def records(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
  """Streams the records of a JSON array, with their numbers from 0.

  Raises:
    DataError: the file is no such array or ends too early, or a record is no
      object.
  """
  number = -1
  with _reading(path, '[]', lambda: f'record {number + 1}') as values:
    for number, record in enumerate(values.items()):
      if not isinstance(record, dict):
        raise DataError(
          f'{path}, record {number}: it is {said(record)}, and should be an '
          'object.'
        )
      yield number, record


def entries(path: pathlib.Path) -> Iterator[tuple[str, object]]:
  """Streams the entries of a JSON object; a repeated key comes twice.

  Raises:
    DataError: the file is no such object or ends too early.
  """
  key = None
  with _reading(
    path,
    '{}',
    lambda: 'the first entry' if key is None else f'the entry after {key!r}',
  ) as values:
    for key, value in values.pairs():
      yield key, value


def text(value: object, field: str, where: str) -> str:
  """Returns `value` if it is a text.

  Raises:
    DataError: it is not; names the place and the field.
  """
  if not isinstance(value, str):
    raise wrong(value, field, where, 'a text')
  return _valid(value)


def texts(value: object, field: str, where: str) -> tuple[str, ...]:
  """Returns a list of texts as a tuple; see `text`."""
  if not isinstance(value, list):
    raise wrong(value, field, where, 'a list of texts')
  return tuple(
    text(part, f'{field}[{i}]', where) for i, part in enumerate(value)
  )


def wrong(value: object, field: str, where: str, rule: str) -> DataError:
  """Returns the error that `field` is `value` and not as `rule` says."""
  return DataError(f'{where}: {field} is {said(value)}, and should be {rule}.')


def said(value: object) -> str:
  """Returns a JSON value as errors show it: long ones cut, nested ones named.

  Nothing nested is written out, for it may be of any size and depth.
  """
  if isinstance(value, dict):
    return 'an object'
  if isinstance(value, list):
    return f'a list of {len(value)}'
  if value is None:
    return 'null'
  shown = repr(value)
  return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'


def _find(root: pathlib.Path, name: str) -> pathlib.Path | None:
  for path in (root / name, root / f'{name}.gz'):
    if path.is_file():
      return path
  return None


def _how(root: pathlib.Path) -> str:
  """Says where the files come from."""
  ids = '; '.join(f'{name}: {id_}' for name, id_ in _DRIVE.items())
  place = 'DIR' if root == pathlib.Path() else root
  return (
    f'${FOLDER} names the folder of three files: {SMALL[0]}, {SMALL[1]} '
    f'(or {FULL[0]}, {FULL[1]} of all products) and {HUMAN}, each as it is or '
    'with .gz. They come from the Google Drive of the WebShop project: '
    '`setup.sh -d small` (or `all`) of github.com/princeton-nlp/WebShop '
    f'fetches them, or `gdown ID -O {place}/NAME` one by one ({ids}). Without '
    'a network, `python -m envs_server.webshop.catalogue '
    f'{place} --products {SMALL_SIZE}` writes a synthetic catalogue in the '
    'same format.'
  )


class _Values:
  """Reads a JSON array or object value by value, however long it is.

  As `json.load`, which the published environment uses, it takes `NaN` and the
  like, which stricter readers refuse.
  """

  def __init__(self, file: BinaryIO, brackets: str):
    self._text = io.TextIOWrapper(file, encoding='utf-8-sig', newline='')
    self._brackets = brackets
    self._buffer = ''
    self._at = 0  # In the buffer; what is before it was read.
    self._whole = False  # The buffer reaches to the end of the file.

  def peek(self) -> str:
    """The next character that is no blank; empty at the end."""
    while True:
      self._at = _BLANK.match(self._buffer, self._at).end()
      if self._at < len(self._buffer):
        return self._buffer[self._at]
      if self._whole:
        return ''
      self._read()

  def items(self) -> Iterator[object]:
    """The values of an array."""
    self._take(self._brackets[0])
    while self.peek() != self._brackets[1]:
      yield self._value()
      self._separate()
    self._end()

  def pairs(self) -> Iterator[tuple[str, object]]:
    """The keys and values of an object."""
    self._take(self._brackets[0])
    while self.peek() != self._brackets[1]:
      if self.peek() != '"':
        raise self._unlike('a key')
      key = _valid(self._value())
      self._take(':')
      yield key, self._value()
      self._separate()
    self._end()

  def _value(self) -> object:
    self.peek()
    while True:
      try:
        value, end = _DECODER.raw_decode(self._buffer, self._at)
      except json.JSONDecodeError as error:
        # What was read may end in the midst of it. A text is told to lack its
        # end where it begins, all else where it goes wrong.
        goes_on = error.msg.startswith('Unterminated string')
        near_end = error.pos + _TOKEN > len(self._buffer)
        if self._whole or not (goes_on or near_end):
          raise
        if len(self._buffer) - self._at > _LONGEST:
          raise ValueError(
            f'a value of more than {_LONGEST} characters'
          ) from error
      else:
        # A number may go on.
        if end < len(self._buffer) or self._whole:
          self._at = end
          return value
      self._read()

  def _separate(self) -> None:
    """Goes past a comma, behind which there is another value."""
    if self.peek() != self._brackets[1]:
      self._take(',')
      if self.peek() == self._brackets[1]:
        raise self._unlike('a value')

  def _end(self) -> None:
    self._take(self._brackets[1])
    if self.peek():
      raise self._unlike('the end of the file')

  def _take(self, char: str) -> None:
    if self.peek() != char:
      raise self._unlike(repr(char))
    self._at += 1

  def _unlike(self, wanted: str) -> ValueError:
    return ValueError(f'{wanted} should stand where {self.peek()!r} is')

  def _read(self) -> None:
    left = self._buffer[self._at :]
    # As much again, so that a long value is not begun too often.
    more = self._text.read(max(_CHUNK, len(left)))
    self._whole = not more
    self._buffer, self._at = left + more, 0


def _valid(text: str) -> str:
  """A text without lone surrogates, which JSON may hold and UTF-8 may not."""
  return text if text.isascii() else text.encode(errors='replace').decode()


@contextlib.contextmanager
def _reading(
  path: pathlib.Path, brackets: str, at: Callable[[], str]
) -> Iterator[_Values]:
  """Opens a JSON file whose top level is within `brackets`, `[]` or `{}`.

  What goes wrong while it is read becomes a DataError, which says that it
  happened at `at()`.
  """
  try:
    with _open(path) as file:
      values = _Values(file, brackets)
      first = values.peek()
      if first != brackets[0]:
        begins = f'begins with {first!r}' if first else 'is empty'
        kind = {'[]': 'array', '{}': 'object'}[brackets]
        raise DataError(
          f'{path} {begins}, and should be a JSON {kind}; fetch it again.'
        )
      yield values
  except DataError:
    raise
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise DataError(
      f'{path}, at {at()}: it cannot be decompressed ({error}); fetch it again.'
    ) from error
  except (ValueError, RecursionError) as error:
    reason = getattr(error, 'msg', error)  # Without the place in the buffer.
    raise DataError(
      f'{path}, at {at()}: it is cut off or no JSON ({reason}); fetch it again.'
    ) from error


def _open(path: pathlib.Path) -> BinaryIO:
  """Opens a file, compressed or not: names change, first bytes do not."""
  with open(path, 'rb') as file:
    compressed = file.read(len(_GZIP)) == _GZIP
  return gzip.open(path) if compressed else open(path, 'rb')
