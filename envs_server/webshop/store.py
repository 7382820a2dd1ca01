"""The catalogue as workers read it: files that are mapped, not loaded.

`build` reads the data files once and lays out what episodes need in a folder:
products, the search index, and the goals in their published order. All workers
of a machine share the pages of these files, so that one more costs little.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import mmap
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import BinaryIO

import numpy as np

from envs_server import env
from envs_server.webshop import files, goals, products, search

# Raised when folders that were built before can no longer be read.
_LAYOUT = 2
_META = 'meta.json'
# What it says, besides what `_read_meta` compares.
_SAID = ('digest', 'generated', 'left_out', 'seed')
# What is in a folder besides.
_ARRAYS = {
  'products': np.uint8,
  'product_ends': np.int64,
  'word_text': np.uint8,
  'word_ends': np.int64,
  'starts': np.int64,
  'rows': np.int32,
  'scores': np.float32,
  'human': np.uint8,
  'human_ends': np.int64,
  'synthetic_ends': np.int64,
  'synthetic_order': np.int32,
}
# Products, and entries of the other files, between two reports of progress.
_REPORT, _REPORT_ENTRIES = 50_000, 200_000
# Seconds between two reports of a builder that waits for another, and between
# two attempts to go on.
_WAIT_REPORT, _WAIT = 30.0, 0.5
# Synthetic goals of a catalogue at most: the order of so many takes 128 MiB and
# a quarter of a minute. A single product can have more combinations than that.
_MOST_SYNTHETIC = 2**25

Progress = Callable[[str], None]


class Goals(abc.ABC, Sequence[products.Goal]):
  """Goals of a kind by their published numbers.

  Attributes:
    splits: {split: numbers}; train is without goals that ask for what one of
      test or dev asks for, and dev without those that one of test does.
  """

  splits: dict[str, Sequence[int]]

  @abc.abstractmethod
  def rows(self) -> np.ndarray:
    """int32, the row of each."""

  @abc.abstractmethod
  def keys(self, held: int) -> dict[int, Hashable]:
    """By number, what goals ask for; see `goals.key`.

    Of goals below `held`, and of all that ask for the same as one of them, as
    far as there are two that do; others may be there or not.
    """


class _Human(Goals):
  def __init__(self, lines: search.Texts):
    self._lines = lines

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, number: int) -> products.Goal:
    row, instruction, attributes, options, upper = json.loads(
      self._lines[number]
    )
    return products.Goal(
      row, instruction, tuple(attributes), tuple(options), upper
    )

  def rows(self) -> np.ndarray:
    """See `Goals`."""
    return np.array([json.loads(line)[0] for line in self._lines], np.int32)

  def keys(self, held: int) -> dict[int, Hashable]:
    """See `Goals`."""
    rows = self.rows()
    # Goals of other products ask for other things.
    near = np.flatnonzero(np.isin(rows, rows[:held])).tolist()
    return {number: goals.key(self[number]) for number in near}

  @staticmethod
  def line(goal: products.Goal) -> bytes:
    """A goal as it is stored."""
    return json.dumps(dataclasses.astuple(goal)).encode()


class _Synthetic(Goals):
  def __init__(
    self, lines: search.Texts, ends: np.ndarray, order: np.ndarray, seed: int
  ):
    """Reads goals of the products in `lines`.

    Args:
      lines: see `products.to_json`.
      ends: after each product, how many goals there are up to it.
      order: the place of each goal among those of all products.
      seed: of the bounds.
    """
    self._lines, self._ends, self._order = lines, ends, order
    self._seed = seed

  def __len__(self) -> int:
    return len(self._order)

  def __getitem__(self, number: int) -> products.Goal:
    if not 0 <= number < len(self):
      raise IndexError(f'there are {len(self)} goals, none of number {number}.')
    place = int(self._order[number])
    row = bisect.bisect_right(self._ends, place)
    first = int(self._ends[row - 1]) if row else 0
    product = products.from_json(self._lines[row])
    return goals.synthetic(product, row, place - first, self._seed)

  def rows(self) -> np.ndarray:
    """See `Goals`."""
    found = np.searchsorted(self._ends, self._order, side='right')
    return found.astype(np.int32)

  def keys(self, held: int) -> dict[int, Hashable]:
    """See `Goals`.

    A product is read once: it may have millions of goals.
    """
    alike = {}
    rows = self.rows()
    for row in np.unique(rows[:held]).tolist():
      product = products.from_json(self._lines[row])
      if goals.alike(product):
        alike[row] = product
    near = np.flatnonzero(np.isin(rows, list(alike)))
    near = near[np.argsort(rows[near], kind='stable')]
    rows = rows[near]
    found = {}
    for row, product in alike.items():
      numbers = near[slice(*np.searchsorted(rows, [row, row + 1]))]
      first = self._ends[row - 1] if row else 0
      keys = goals.synthetic_keys(product, self._order[numbers] - first)
      same = np.isin(keys, keys[numbers < held])
      for number, key in zip(numbers[same], keys[same], strict=True):
        found[int(number)] = row, int(key)
    return found


class Store:
  """What was built; read-only, and the same to all who open it.

  Attributes:
    digest: of the products and goals.
    generated: the products are those of `catalogue`, not the benchmark's.
    goals: by kind, `human` and `synthetic`.
  """

  def __init__(self, path: pathlib.Path, meta: dict):
    """See `open`."""
    arrays = {name: _map(path / name, kind) for name, kind in _ARRAYS.items()}
    self.digest: str = meta['digest']
    self.generated: bool = meta['generated']
    self._lines = search.Texts(arrays['products'], arrays['product_ends'])
    self._index = search.Index(arrays, len(self))
    self.goals: dict[str, Goals] = {
      'human': _Human(search.Texts(arrays['human'], arrays['human_ends'])),
      'synthetic': _Synthetic(
        self._lines,
        arrays['synthetic_ends'],
        arrays['synthetic_order'],
        meta['seed'],
      ),
    }
    for kind, found in self.goals.items():
      found.splits = {
        split: env.Numbers(numbers, tuple(without)) if without else numbers
        for split, numbers in goals.splits(len(found)).items()
        for without in [meta['left_out'][kind][split]]
      }

  @classmethod
  def open(cls, path: pathlib.Path) -> Store:
    """Maps what `build` made.

    Raises:
      files.DataError: it is damaged; says how, and what to do.
    """
    meta, fault = _read_meta(path)
    if fault:
      raise files.DataError(
        f'{path} is no index of WebShop: {fault}; remove the folder and start '
        'again, which builds it anew.'
      )
    return cls(path, meta)

  def __len__(self) -> int:
    return len(self._lines)

  def product(self, row: int) -> products.Product:
    """Reads a product; raises IndexError for a row that there is not."""
    return products.from_json(self._lines[row])

  def search(self, text: str, k: int = 50) -> list[int]:
    """Rows of the best products; see `search.Index.search`."""
    return self._index.search(text, k)


def find_or_build(
  sources: files.Sources,
  *,
  limit: int | None = None,
  progress: Progress | None = None,
) -> pathlib.Path:
  """Finds what was built of these files, or builds it.

  It lies beside the data, or in the user's cache where the folder of the data
  cannot be written. It is used only while names, sizes and times of the files
  are the same.

  Args:
    sources: the data files.
    limit: how many records of the items count; None for all.
    progress: told what is done, in lines of text.

  Returns:
    A folder for `Store.open`.

  Raises:
    files.DataError: see `build`, likewise the next.
    OSError: it cannot be written.
  """
  data = sources.items.parent
  home = os.path.expanduser(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
  # Copies keep names, sizes and times; here they could meet.
  place = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:16]
  cache = pathlib.Path(home) / 'planpo_jax' / 'webshop' / place
  key = _key(sources, limit, products.SEED)
  for folder in (data / 'index', cache):
    if not _read_meta(folder / key, key)[1]:
      return folder / key
  folder = data / 'index' if _can_build_in(data / 'index') else cache
  build(sources, folder / key, limit=limit, progress=progress)
  return folder / key


def build(
  sources: files.Sources,
  target: pathlib.Path,
  *,
  limit: int | None = None,
  seed: int = products.SEED,
  progress: Progress | None = None,
) -> None:
  """Builds what `Store.open` reads, at once or not at all.

  Of several processes that build below one folder the others wait. What is
  there already, from the same files, is left as it is.

  Args:
    sources: the data files.
    target: folder to make.
    limit: how many records of the items count; None for all.
    seed: of the order of goals and of all draws.
    progress: told what is done, in lines of text.

  Raises:
    files.DataError: a data file is not as it should be, holds no product, or
      changed while it was read.
    OSError: `target` cannot be written.
  """
  say = progress or (lambda line: None)
  key = _key(sources, limit, seed)
  target.parent.mkdir(parents=True, exist_ok=True)
  with _locked(target.parent, say):
    if not _read_meta(target, key)[1]:
      return
    # Nobody else builds here now: these are of builds that were killed.
    for left in target.parent.glob('*.part'):
      shutil.rmtree(left)
    part = target.with_name(f'{target.name}.part')
    part.mkdir()
    try:
      meta = _fill(part, sources, limit, seed, say)
      if _key(sources, limit, seed) != key:
        raise files.DataError(
          f'the files in {sources.items.parent} changed while they were read; '
          'start again when they are complete.'
        )
      meta |= {'layout': _LAYOUT, 'key': key, 'seed': seed}
      meta['sizes'] = {name: (part / name).stat().st_size for name in _ARRAYS}
      with _writing(part / _META) as file:
        file.write(json.dumps(meta, indent=2).encode())
      if target.exists():
        shutil.rmtree(target)
      part.rename(target)
    except BaseException as error:
      shutil.rmtree(part, ignore_errors=True)
      # Reads and writes do not say of which file.
      if isinstance(error, OSError) and not error.filename:
        raise OSError(
          error.errno,
          f'{error.strerror}; the index takes about as much room as the data '
          'files without compression',
          str(target),
        ) from error
      raise


def _fill(
  part: pathlib.Path,
  sources: files.Sources,
  limit: int | None,
  seed: int,
  say: Progress,
) -> dict:
  """Writes all files but the last; returns what that one says of them."""
  digest = hashlib.sha256(b'%d\n' % seed)
  # Kept as text, which takes a fifth of the memory.
  attributes = {
    asin: json.dumps(entry).encode()
    for asin, entry in _entries(sources.attributes, say)
  }
  wanted = dict(_entries(sources.human, say)) if sources.human else {}
  met: set[str] = set()
  ends, counts, human, number, generated = [], [], [], -1, False
  index = search.Builder()
  with _writing(part / 'products') as file:
    for number, record in files.records(sources.items):
      if number == limit:
        number -= 1
        break
      if number == 0:
        generated = _is_generated(record)
      where = f'{sources.items.name}, record {number}'
      asin = record.get('asin')
      entry = attributes.get(asin) if isinstance(asin, str) else None
      entry = None if entry is None else json.loads(entry)
      product = products.parse(
        record, entry, where, f'{sources.attributes.name}, {asin}'
      )
      if product is None or product.asin in met:
        continue
      met.add(product.asin)
      row = len(ends)
      line = products.to_json(product)
      digest.update(line + b'\n')
      file.write(line)
      ends.append(len(line))
      index.add(products.search_text(product))
      counts.append(goals.synthetic_count(product))
      if asin in wanted:
        place = f'{sources.human.name}, {asin}'
        human += goals.human(product, row, wanted[asin], place, seed)
      if len(ends) % _REPORT == 0:
        say(f'{len(ends)} products read')
  if not ends:
    raise files.DataError(
      f'{sources.items} has no product in {number + 1} records; fetch it again.'
    )
  del attributes, wanted, met
  if sum(counts) > _MOST_SYNTHETIC:
    say(
      f'no synthetic goals: the options have {sum(counts)} combinations, more '
      f'than {_MOST_SYNTHETIC}; {files.LIMIT}=N reads fewer products'
    )
    counts = [0] * len(counts)
  say(f'{len(ends)} products read; making the search index')
  arrays = index.arrays()
  say(f'ordering {len(human)} human and {sum(counts)} synthetic goals')
  lines = [_Human.line(human[i]) for i in goals.order(len(human), seed)]
  for line in lines:
    digest.update(line + b'\n')
  arrays |= {
    'product_ends': np.cumsum(ends),
    'human': np.frombuffer(b''.join(lines), np.uint8),
    'human_ends': np.cumsum([len(line) for line in lines]),
    'synthetic_ends': np.cumsum(counts),
    'synthetic_order': goals.order(sum(counts), seed),
  }
  say('writing the index')
  for name in list(arrays):
    # One by one, that no two copies of all are held.
    array = np.ascontiguousarray(arrays.pop(name), _ARRAYS[name])
    with _writing(part / name) as file:
      file.write(array.data)
  mapped = {name: _map(part / name, kind) for name, kind in _ARRAYS.items()}
  say('comparing the goals of train, dev and test')
  products_ = search.Texts(mapped['products'], mapped['product_ends'])
  left_out = {
    'human': _left_out(
      _Human(search.Texts(mapped['human'], mapped['human_ends']))
    ),
    'synthetic': _left_out(
      _Synthetic(
        products_, mapped['synthetic_ends'], mapped['synthetic_order'], seed
      )
    ),
  }
  return {
    'digest': digest.hexdigest()[:8],
    'generated': generated,
    'left_out': left_out,
  }


def _left_out(found: Goals) -> dict[str, list[int]]:
  """Numbers of each split that ask for what is held out elsewhere, sorted."""
  splits = goals.splits(len(found))
  keys = found.keys(splits['train'].start)
  listed = {
    split: [number for number in keys if number in numbers]
    for split, numbers in splits.items()
  }
  kept = goals.unlike(keys, listed)
  return {
    split: sorted(set(numbers).difference(kept[split]))
    for split, numbers in listed.items()
  }


def _entries(path: pathlib.Path, say: Progress) -> Iterator[tuple[str, object]]:
  """Reads entries, and says how many."""
  count = 0
  for count, pair in enumerate(files.entries(path), 1):
    yield pair
    if count % _REPORT_ENTRIES == 0:
      say(f'{count} entries of {path.name} read')
  say(f'all {count} entries of {path.name} read')


def _is_generated(record: dict) -> bool:
  images = record.get('images')
  first = images[0] if isinstance(images, list) and images else None
  return isinstance(first, str) and first.startswith(files.GENERATED_IMAGES)


def _key(sources: files.Sources, limit: int | None, seed: int) -> str:
  """Name of what is built of these files as they are now."""
  stamps = []
  for path in (sources.items, sources.attributes, sources.human):
    if path:
      stat = path.stat()
      stamps.append([path.name, stat.st_size, stat.st_mtime_ns])
  text = json.dumps([_LAYOUT, limit, seed, stamps])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_meta(path: pathlib.Path, key: str | None = None) -> tuple[dict, str]:
  """Reads what a folder says of itself.

  Returns:
    (meta, fault): why it cannot be used, or is not of this key; empty if it
    can.
  """
  try:
    meta = json.loads((path / _META).read_bytes())
    if meta['layout'] != _LAYOUT:
      return {}, f'its layout is {meta["layout"]!r}, not {_LAYOUT}'
    if key is not None and meta['key'] != key:
      return {}, 'it is of other files'
    for name in _SAID:
      meta[name]
    for name in _ARRAYS:
      size = (path / name).stat().st_size
      if size != meta['sizes'][name]:
        return {}, f'{name} has {size} bytes, not {meta["sizes"][name]}'
  except OSError as error:
    return {}, f'{error.filename} cannot be read ({error.strerror})'
  except (ValueError, TypeError, KeyError) as error:
    return {}, f'{_META} is damaged ({type(error).__name__}: {error})'
  return meta, ''


def _map(path: pathlib.Path, kind: type) -> np.ndarray:
  """Maps a file of numbers, read-only."""
  with open(path, 'rb') as file:
    # An empty file cannot be mapped.
    if not os.fstat(file.fileno()).st_size:
      return np.empty(0, kind)
    return np.frombuffer(
      mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind
    )


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a new file, which is on the disk afterwards."""
  with open(path, 'xb') as file:
    yield file
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(folder: pathlib.Path, say: Progress) -> Iterator[None]:
  """Holds the lock of a folder, which the kernel lets go of with the process.

  Its file stays: if it were removed, two processes could each hold a lock.
  """
  told = -math.inf
  with open(folder / 'lock', 'ab') as file:
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        # Who hears nothing for long takes this process for a dead one.
        if time.monotonic() - told >= _WAIT_REPORT:
          say(f'another process builds in {folder}; waiting for it')
          told = time.monotonic()
        time.sleep(_WAIT)
    yield


def _can_build_in(folder: pathlib.Path) -> bool:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
      # Some network file systems have no locks.
      fcntl.flock(file, fcntl.LOCK_EX)
  except OSError:
    return False
  return True
