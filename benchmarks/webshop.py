"""WebShop by size of its catalogue: index, search, memory, episodes.

  python benchmarks/webshop.py --sizes 1000 100000 1000000

For each size a synthetic catalogue is made (below --folder, where it stays, or
in a temporary one) and its index is built. Searches are for instructions and
titles in turn, by one process and then by several at once, whose memory is
taken while all hold the catalogue open. Beside it `bm25s` does the same by
itself: its own construction, and its `retrieve` with numpy. Both must give the
same scores, rank by rank; the exit status is 1 if they do not.

Each part runs in a process of its own. Where others use the machine, seconds of
processor time say more than seconds passed; both are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import psutil

from envs_server import env
from envs_server.webshop import catalogue, files, search, store

_K = 50
# Seconds passed, and seconds of processor time.
Times = list[tuple[float, float]]


@contextlib.contextmanager
def _timed(times: Times) -> Iterator[None]:
  passed, used = time.perf_counter(), time.process_time()
  yield
  times.append((time.perf_counter() - passed, time.process_time() - used))


def _open(data: pathlib.Path) -> store.Store:
  return store.Store.open(store.find_or_build(files.locate(data)))


def queries(opened: store.Store, count: int) -> list[str]:
  """Instructions of goals and titles of products in turn."""
  draw = random.Random(0)
  people = opened.goals['human']
  found = []
  for number in range(count):
    if number % 2:
      found.append(opened.product(draw.randrange(len(opened))).title)
    else:
      found.append(people[draw.randrange(len(people))].instruction)
  return found


def build(data: pathlib.Path, count: int) -> dict:
  """Builds the index anew."""
  shutil.rmtree(data / 'index', ignore_errors=True)
  times: Times = []
  with _timed(times):
    path = store.find_or_build(files.locate(data))
  size = sum(part.stat().st_size for part in path.iterdir())
  return {'times': times, 'peak': _peak(), 'size': size}


def searches(data: pathlib.Path, count: int) -> dict:
  """Opens what is built and searches; the process stays until it is told."""
  times: Times = []
  opened, start = None, []
  with _timed(start):
    opened = _open(data)
  asked = queries(opened, count)
  # As of a service that has been used: what is searched lies in memory.
  for query in asked:
    opened.search(query, _K)
  for query in asked:
    with _timed(times):
      opened.search(query, _K)
  return {'times': times, 'open': start}


def episodes(data: pathlib.Path, count: int) -> dict:
  """Plays: search for the instruction, click what is first, buy it."""
  from envs_server.webshop import environment

  os.environ[files.FOLDER] = str(data)
  played = environment.WebShop()
  indices = played.catalog().indices['train']['human']
  draw = random.Random(0)
  resets: Times = []
  steps: Times = []
  for _ in range(count):
    task = env.Task('webshop', 'train', draw.choice(indices), 'human')
    with _timed(resets):
      seen = played.reset(task, admissible=True)
    with _timed(steps):
      seen = played.step(f'search[{seen.goal}]')
    links = [a for a in seen.admissible if a.startswith('click[b0')]
    for action in (links[0], 'click[buy now]') if links else ():
      with _timed(steps):
        seen = played.step(action)
    if not seen.terminated:
      raise RuntimeError(f'{task} did not end: {seen.text[:200]}')
  return {'resets': resets, 'steps': steps}


def plain(data: pathlib.Path, count: int) -> dict:
  """Lets bm25s build and search by itself, and compares."""
  opened = _open(data)
  opened.search('anything')  # Which imports bm25s as workers do.
  import bm25s

  from envs_server.webshop import products

  texts = [
    [
      sys.intern(word)
      for word in search.analyze(products.search_text(opened.product(row)))
    ]
    for row in range(len(opened))
  ]
  ranker = bm25s.BM25(k1=search.K1, b=search.B, method='lucene')
  built: Times = []
  with _timed(built):
    ranker.index(texts, show_progress=False)
  peak = _peak()
  times: Times = []
  ranks = same_score = same_row = 0
  for query in queries(opened, count):
    words = [w for w in search.analyze(query) if w in ranker.vocab_dict]
    if not words:
      continue
    with _timed(times):
      rows, scores = ranker.retrieve(
        [words],
        k=min(_K, len(opened)),
        show_progress=False,
        backend_selection='numpy',
      )
    ours = opened.search(query, _K)
    whole = ranker.get_scores(words)
    ranks += len(ours)
    same_score += int((whole[ours] == scores[0][: len(ours)]).sum())
    same_row += int((rows[0][: len(ours)] == ours).sum())
  return {
    'times': times,
    'built': built,
    'peak': peak,
    'ranks': [ranks, same_score, same_row],
  }


_PARTS: dict[str, Callable[[pathlib.Path, int], dict]] = {
  'build': build,
  'searches': searches,
  'episodes': episodes,
  'plain': plain,
}


def _peak() -> float:
  """Megabytes that this process held at most."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _child(part: str, data: pathlib.Path, count: int) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, os.path.abspath(__file__), '--part', part]
    + ['--folder', str(data), '--queries', str(count)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def _answers(
  part: str, data: pathlib.Path, count: int, processes: int = 1
) -> tuple[list[dict], list]:
  """Runs a part in several processes at once.

  Returns:
    (answers, memory): of each; memory is taken when all have answered.
  """
  children = [_child(part, data, count) for _ in range(processes)]
  answers, memory = [], []
  try:
    for child in children:
      line = child.stdout.readline()
      if not line:
        raise RuntimeError(f'{part} ended without an answer')
      answers.append(json.loads(line))
    memory = [psutil.Process(c.pid).memory_full_info() for c in children]
  finally:
    for child in children:
      child.communicate()
  return answers, memory


def _row(name: str, times: Times) -> str:
  cells = []
  for column in zip(*times, strict=True):
    ordered = sorted(1e3 * value for value in column)
    cells += [ordered[int(share * len(ordered))] for share in (0.5, 0.95)]
  return f'  {name:26}' + ''.join(f'{cell:10.2f}' for cell in cells)


def _total(times: Times) -> str:
  passed, used = (sum(column) for column in zip(*times, strict=True))
  return f'{passed:.1f} s ({used:.1f} s of processor time)'


def measure(size: int, folder: pathlib.Path, workers: int, count: int) -> bool:
  """Prints everything of a size; returns whether all scores were the same."""
  data = folder / str(size)
  made: Times = []
  with _timed(made):
    catalogue.generate(data, products=size)
  print(f'{size} records; catalogue made in {_total(made)}', flush=True)
  (built,), _ = _answers('build', data, count)
  print(
    f'  index built in {_total(built["times"])}, {built["peak"]:.0f} MB at '
    f'most, {built["size"] / 1e6:.1f} MB on disk',
    flush=True,
  )
  header = ('ms', 'p95', 'cpu ms', 'p95')
  print(' ' * 28 + ''.join(f'{cell:>10}' for cell in header))
  (one,), _ = _answers('searches', data, count)
  print(_row('search, one process', one['times']), flush=True)
  several, memory = _answers('searches', data, count, workers)
  together = [pair for answer in several for pair in answer['times']]
  print(_row(f'search, {workers} processes', together), flush=True)
  (theirs,), _ = _answers('plain', data, count)
  print(_row('bm25s by itself', theirs['times']), flush=True)
  (played,), _ = _answers('episodes', data, count)
  print(_row('reset', played['resets']))
  print(_row('step', played['steps']))
  steps = played['resets'] + played['steps']
  passed, used = (sum(column) for column in zip(*steps, strict=True))
  print(
    f'  episodes: {len(played["steps"]) / passed:.0f} steps/s, '
    f'{len(played["steps"]) / used:.0f} by processor time'
  )
  print(f'  opened in {_total(one["open"])}')
  for name in ('uss', 'pss'):
    listed = ', '.join(f'{getattr(m, name) / 1e6:.1f}' for m in memory)
    print(f'  {name.upper()} of {workers} workers: {listed} MB')
  ranks, score, row = theirs['ranks']
  print(
    f'  bm25s by itself: built in {_total(theirs["built"])} from words in '
    f'memory, {theirs["peak"]:.0f} MB at most; of {ranks} ranks {score} have '
    f'the same score, {row} the same product (equal scores may change places)',
    flush=True,
  )
  return score == ranks


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument('--sizes', type=int, nargs='+', default=[1000, 100_000])
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--queries', type=int, default=200)
  parser.add_argument('--folder', type=pathlib.Path)
  parser.add_argument('--part', choices=_PARTS, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.part:
    print(json.dumps(_PARTS[args.part](args.folder, args.queries)), flush=True)
    sys.stdin.read()
    return 0
  with tempfile.TemporaryDirectory() as scratch:
    folder = args.folder or pathlib.Path(scratch)
    same = [
      measure(size, folder, args.workers, args.queries) for size in args.sizes
    ]
  return 0 if all(same) else 1


if __name__ == '__main__':
  sys.exit(main())
