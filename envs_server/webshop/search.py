"""Search: words as Lucene's English analyzer finds them, ranked by BM25.

The published environment searches with Lucene. Departures from it: lengths of
documents are exact, where Lucene rounds those above 40 words; equal scores are
ordered by row; emoji are no words. The stems are Porter's as he published
them; Lucene's treat a few endings (`-bly`, `-logy`) otherwise.
"""

from __future__ import annotations

import bisect
import functools
import re
import sys
import types
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
import Stemmer

# As Anserini has them, through which the published environment searches.
K1, B = 0.9, 0.4
# Lucene's list.
_STOP = frozenset(
  'a an and are as at be but by for if in into is it no not of on or such that '
  'the their then there these they this to was will with'.split()
)
# What stands for other characters of a kind when words are found.
_EXTEND, _IDEOGRAPH, _KATAKANA, _COMPLEX = '\x01\x02\x03\x04'
# Word breaks of Unicode (annex 29) over ASCII and these four: letters, digits
# and `_` cling together; so do letters around `:`, `.` and `'`, and digits
# around `.`, `,`, `;` and `'`. At 255 characters a word is cut.
_WORD = re.compile(
  rf'(?<!_)_*[A-Za-z0-9](?:[A-Za-z0-9_{_EXTEND}]'
  r"|(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9])){0,254}"
  rf'|{_IDEOGRAPH}{_EXTEND}*'
  rf'|{_KATAKANA}[{_KATAKANA}{_EXTEND}]*'
  rf'|{_COMPLEX}[{_COMPLEX}{_EXTEND}]*'
)
_POSSESSIVE = re.compile("['\u2019\uff07][sS]$")
# Documents whose words are sorted at once when an index is made.
_CHUNK = 20_000
# Scores that are looked at together when the best are sought.
_BLOCK = 512


class _Shapes(dict):
  """Character outside ASCII -> one that word breaks treat alike."""

  _GIVEN = {
    **dict.fromkeys('\u2018\u2019\uff07', "'"),
    **dict.fromkeys('\u2024\ufe52\uff0e', '.'),
    **dict.fromkeys('\u00b7\u0387\u055f\u05f4\u2027\ufe13\ufe55\uff1a', ':'),
    **dict.fromkeys('\u060c\u066c\ufe50\ufe54\uff0c\uff1b', ','),
    **dict.fromkeys('\u309b\u309c\u30a0\u30fc\uff70', _KATAKANA),
    **dict.fromkeys('\u3005\u3007', _IDEOGRAPH),
    '\u200b': ' ',
  }
  # First words of the names of letters that are no part of longer words.
  _SCRIPTS = {
    'CJK': _IDEOGRAPH,
    'HIRAGANA': _IDEOGRAPH,
    'KATAKANA': _KATAKANA,
    'THAI': _COMPLEX,
    'LAO': _COMPLEX,
    'MYANMAR': _COMPLEX,
    'KHMER': _COMPLEX,
  }

  def __missing__(self, code: int) -> str:
    char = chr(code)
    self[code] = shape = self._GIVEN.get(char) or self._shape(char)
    return shape

  def _shape(self, char: str) -> str:
    kind = unicodedata.category(char)
    if kind[0] == 'L' or kind == 'Nl':
      name = unicodedata.name(char, '').removeprefix('HALFWIDTH ')
      return self._SCRIPTS.get(name.partition(' ')[0], 'a')
    if kind == 'Nd':
      return '0'
    if kind == 'Pc':
      return '_'
    return _EXTEND if kind[0] == 'M' or kind == 'Cf' else ' '


_SHAPES = _Shapes({code: chr(code) for code in range(128)})


def analyze(text: str) -> list[str]:
  """Words that are searched for, in order, with repeats.

  Possessive endings and stop words are gone, the rest is lower case and
  reduced to its Porter stem.
  """
  return [word for found in _split(text) if (word := _reduced(found))]


def _split(text: str) -> list[str]:
  if text.isascii():
    return _WORD.findall(text)
  shape = text.translate(_SHAPES)
  return [text[slice(*found.span())] for found in _WORD.finditer(shape)]


@functools.cache
def _stem():
  return Stemmer.Stemmer('porter').stemWord


def _reduced(word: str) -> str:
  """A word as it is searched for; empty for a stop word."""
  word = _POSSESSIVE.sub('', word).lower()
  if word in _STOP:
    return ''
  # Shorter ones are left alone, as Porter's own program does; others make `u`
  # of `us` and nothing of `s`.
  return _stem()(word) if len(word) > 2 else word


class Texts(Sequence[bytes]):
  """Many texts that are read where they lie, in two arrays."""

  def __init__(self, text: np.ndarray, ends: np.ndarray):
    """Reads `text`, uint8; the i-th part of it ends at `ends[i]`, int64."""
    self._text, self._ends = text, ends

  def __len__(self) -> int:
    return len(self._ends)

  def __getitem__(self, place: int) -> bytes:
    if not 0 <= place < len(self._ends):
      raise IndexError(f'there are {len(self._ends)}, none of number {place}.')
    start = self._ends[place - 1] if place else 0
    return self._text[start : self._ends[place]].tobytes()


class Words(Texts):
  """Sorted texts, to look them up."""

  @staticmethod
  def pack(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts `words`.

    Returns:
      (text, ends, order): what `Words` reads; and int64, the place that each
      of the sorted ones has in `words`.
    """
    coded = [_coded(word) for word in words]
    order = sorted(range(len(coded)), key=coded.__getitem__)
    lengths = np.fromiter(map(len, coded), np.int64, len(coded))
    text = np.frombuffer(b''.join(coded[i] for i in order), np.uint8)
    order = np.array(order, np.int64)
    return text, np.cumsum(lengths[order]), order

  def find(self, word: str) -> int | None:
    """Place of a word; None if it is not there."""
    coded = _coded(word)
    place = bisect.bisect_left(self, coded)
    return place if place < len(self) and self[place] == coded else None


def _coded(word: str) -> bytes:
  # JSON can spell halves of characters.
  return word.encode(errors='surrogatepass')


class _Numbers(dict):
  """Word as it is found in a text -> number of its stem; -1 if it has none."""

  def __init__(self):
    self.stems: dict[str, int] = {}

  def __missing__(self, found: str) -> int:
    word = _reduced(found)
    number = self.stems.setdefault(word, len(self.stems)) if word else -1
    self[found] = number
    return number


class Builder:
  """Collects documents, and makes the arrays of an `Index` of them.

  These are the arrays that `bm25s` makes, to the bit. Its own construction
  holds every document as a list of Python numbers, which is too much memory
  for a million of them.
  """

  def __init__(self):
    self._numbers = _Numbers()
    self._chunk: list[np.ndarray] = []
    self._lengths: list[int] = []
    # (numbers of the words, how many rows each has, rows, occurrences in them)
    self._sorted: list[tuple[np.ndarray, ...]] = []

  def add(self, text: str) -> None:
    """Adds the document of the next row."""
    numbers = self._numbers
    found = np.array([numbers[word] for word in _split(text)], np.int32)
    found = found[found >= 0]
    self._chunk.append(found)
    self._lengths.append(len(found))
    if len(self._chunk) == _CHUNK:
      self._sort()

  def _sort(self) -> None:
    first = len(self._lengths) - len(self._chunk)
    rows = np.arange(first, len(self._lengths), dtype=np.int64)
    keys = np.concatenate(self._chunk).astype(np.int64) << 32
    keys |= np.repeat(rows, self._lengths[first:])
    keys, times = np.unique(keys, return_counts=True)
    words, counts = np.unique(keys >> 32, return_counts=True)
    rows = (keys & 0xFFFFFFFF).astype(np.int32)
    self._sorted.append((words, counts, rows, times.astype(np.int32)))
    self._chunk.clear()

  def arrays(self) -> dict[str, np.ndarray]:
    """Makes the arrays; no document can be added afterwards.

    Returns:
      {name: array}; for each word, in sorted order, `rows` and `scores` (its
      BM25 scores in them) between two of `starts`.
    """
    if self._chunk:
      self._sort()
    text, ends, order = Words.pack(list(self._numbers.stems))
    self._numbers.clear()
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    frequency = np.zeros(len(order), np.int64)
    for words, counts, _, _ in self._sorted:
      frequency[place[words]] += counts
    starts = np.concatenate([[0], np.cumsum(frequency)])
    lengths = np.array(self._lengths, np.int64)
    idf = np.log(1 + (len(lengths) - frequency + 0.5) / (frequency + 0.5))
    idf = idf.astype(np.float32)
    norms = K1 * ((1 - B) + B * lengths / (lengths.mean() or 1.0))
    rows = np.empty(starts[-1], np.int32)
    scores = np.empty(starts[-1], np.float32)
    free = starts[:-1].copy()
    for words, counts, found, times in self._sorted:
      words = place[words]
      # Of each word its rows lie side by side, here and there.
      before = np.cumsum(counts) - counts
      to = np.repeat(free[words] - before, counts) + np.arange(len(found))
      free[words] += counts
      rows[to] = found
      scores[to] = np.repeat(idf[words], counts) * (
        times / (norms[found] + times)
      )
    self._sorted.clear()
    return {
      'word_text': text,
      'word_ends': ends,
      'starts': starts,
      'rows': rows,
      'scores': scores,
    }


class Index:
  """Ranks documents; its arrays are read where they lie."""

  def __init__(self, arrays: Mapping[str, np.ndarray], documents: int):
    """See `Builder.arrays`."""
    self._words = Words(arrays['word_text'], arrays['word_ends'])
    self._ranker = _bm25s().BM25(k1=K1, b=B, method='lucene')
    self._ranker.nonoccurrence_array = None
    self._ranker.scores = {
      'indptr': arrays['starts'],
      'indices': arrays['rows'],
      'data': arrays['scores'],
      'num_docs': documents,
    }

  def search(self, text: str, k: int = 50) -> list[int]:
    """Rows of the best documents.

    Args:
      text: words to search for; one that occurs twice counts twice.
      k: how many rows at most.

    Returns:
      Rows by falling score, then by row; only of documents with a word of the
      text.
    """
    found = [self._words.find(word) for word in analyze(text)]
    known = [number for number in found if number is not None]
    if not known:
      return []
    return top(self._ranker.get_scores_from_ids(known), k)


def top(scores: np.ndarray, k: int) -> list[int]:
  """Places of the `k` highest scores above 0: by falling score, then by place.

  As a stable sort would find them, without sorting: the k-th best maximum of
  blocks of scores is a bound that the best ones reach.
  """
  whole = len(scores) // _BLOCK
  bound = 0.0
  if whole >= k:
    highest = scores[: whole * _BLOCK].reshape(whole, _BLOCK).max(axis=1)
    bound = np.partition(highest, whole - k)[whole - k]
  places = np.flatnonzero(scores >= bound if bound > 0 else scores > 0)
  left = scores[places]
  if len(left) > k:
    least = np.partition(left, len(left) - k)[len(left) - k]
    above = places[left > least]
    equal = places[left == least][: k - len(above)]
    places = np.sort(np.concatenate([above, equal]))
    left = scores[places]
  return places[np.argsort(-left, kind='stable')].tolist()


def _bm25s() -> types.ModuleType:
  """Imports `bm25s` without what it would use if it could.

  On import it starts jax, which would take the accelerator from whoever trains
  on this machine. That and the others cost more memory than all the rest.
  """
  hidden = ('jax', 'jax.lax', 'numba', 'scipy', 'scipy.sparse')
  before = {name: sys.modules[name] for name in hidden if name in sys.modules}
  sys.modules.update(dict.fromkeys(hidden))
  try:
    import bm25s
  finally:
    for name in hidden:
      del sys.modules[name]
    sys.modules.update(before)
  return bm25s
