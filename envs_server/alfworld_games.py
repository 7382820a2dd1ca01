"""Makes games for ALFWorld without its data: all six types, official format.

  python -m envs_server.alfworld_games DIR --per-type 20 --split all

writes DIR/json_2.1.1/<split>/<task>/trial_*/ with what the stock environment
reads. These games are not the benchmark: rooms, rules and texts are those of
the wheel of ALFWorld, where things lie is drawn by chance, nobody described the
tasks in words of their own, and a room holds fewer things than a simulated one.
Scores on them compare with nothing published.

Splits differ as the official ones do: `train` and `valid_seen` play in the same
rooms with no (type, object, receptacle, room) in common, whatever their seeds;
`valid_unseen` plays in rooms of its own. The same arguments give the same bytes
on every machine with the same versions of the packages, and more games per type
begin with the games of fewer.

Every walkthrough is what ALFWorld's planner finds, played in the engine to the
end. It is as short as the task allows, as it knows where everything lies.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from envs_server import alfworld_data, alfworld_problem, lifetime

# Of the games; raised when the same arguments give others.
VERSION = 1
SPLITS = alfworld_data.SPLITS
TYPES = alfworld_data.TYPES
# The benchmark's limit.
MAX_ACTIONS = 50
NOTE = (
  'Made by envs_server/alfworld_games.py of planpo_jax. These games are not '
  'the ALFWorld benchmark, and scores on them compare with nothing published.'
)
_PACKAGES = ('alfworld', 'textworld', 'fast-downward-textworld')
# One in so many tasks of the rooms seen in training is kept for valid_seen.
_HELD_OUT = 6
# Games of a type and split; above it they would be the same tasks many times.
_MOST = 10_000
# Draws of one game before giving up; more than one is rare.
_DRAWS = 20
_ASIDE = '.generating-'


class Refusal(ValueError):
  """The folder holds something that must not be touched or mixed."""


def generate(
  folder: pathlib.Path | str,
  *,
  per_type: int,
  split: str,
  seed: int = 0,
  types: Sequence[str] = TYPES,
  scenes: Sequence[str] = (),
  jobs: int = 0,
  force: bool = False,
) -> dict[str, dict]:
  """Makes games; each split is written whole or not at all.

  Args:
    folder: to become $ALFWORLD_DATA.
    per_type: games of each type and split.
    split: one of `SPLITS`, or `all`.
    seed: other games for another.
    types: which of `TYPES`.
    scenes: kinds of room (Kitchen, ...); empty: all.
    jobs: processes; 0: one a core. The games do not depend on it.
    force: replaces generated games that were made with other arguments.

  Returns:
    By split: `games` (type -> number), `lengths` (type -> actions of each
    walkthrough) and `redrawn`, the draws that were thrown away. A split that
    is there already is read, not made.

  Raises:
    ValueError: an argument is out of range.
    Refusal: `folder` holds games of somebody else, or other ones of a split.
    RuntimeError: a package is missing, or a game found no solution.
  """
  if not str(folder).strip():
    raise ValueError(f'folder={str(folder)!r} names no folder.')
  folder = pathlib.Path(os.path.expanduser(folder))
  splits = SPLITS if split == 'all' else (split,)
  _check_arguments(per_type, split, seed, types, scenes, jobs, folder)
  types = tuple(name for name in TYPES if name in types)
  wanted = {
    name: {
      'note': NOTE,
      'generator': VERSION,
      'split': name,
      'per_type': per_type,
      'seed': seed,
      'types': list(types),
      'scenes': sorted(set(scenes)),
      'packages': _packages(),
    }
    for name in splits
  }
  with _alone(folder):
    there = {
      name: found
      for name, arguments in wanted.items()
      if (found := _standing(folder, name, arguments, force)) is not None
    }
    plans = {
      name: [
        job
        for kind in types
        for job in _jobs(kind, name, per_type, seed, scenes)
      ]
      for name in splits
      if name not in there
    }
    with _workers(jobs) as pool:
      return {
        name: there[name]['made']
        if name in there
        else _write_split(folder, pool, plans[name], wanted[name])
        for name in splits
      }


def combinations(
  kind: str, split: str, scenes: Sequence[str] = ()
) -> list[alfworld_problem.Task]:
  """All tasks of a type that a split may hold, sorted."""
  return [
    task
    for number in alfworld_problem.rooms(split)
    if not scenes or alfworld_problem.room(number).kind in scenes
    for task in alfworld_problem.tasks(kind, number)
    if split == 'valid_unseen' or _held_out(task) == (split == 'valid_seen')
  ]


def _held_out(task: alfworld_problem.Task) -> bool:
  digest = hashlib.sha256(task.folder.encode()).digest()
  return int.from_bytes(digest[:4], 'big') % _HELD_OUT == 0


def _check_arguments(per_type, split, seed, types, scenes, jobs, folder):
  if not 1 <= per_type <= _MOST:
    raise ValueError(f'per_type={per_type} must be from 1 to {_MOST}.')
  if seed < 0:
    raise ValueError(f'seed={seed} must be at least 0.')
  if jobs < 0:
    raise ValueError(f'jobs={jobs} must be at least 1, or 0 for one a core.')
  if split not in (*SPLITS, 'all'):
    raise ValueError(f'split={split!r} must be one of {[*SPLITS, "all"]}.')
  if not types:
    raise ValueError(f'types is empty; name some of {list(TYPES)}.')
  for name in types:
    if name not in TYPES:
      raise ValueError(f'types has {name!r}; the types are {list(TYPES)}.')
  kinds = list(alfworld_problem.kinds())
  for name in scenes:
    if name not in kinds:
      raise ValueError(f'scenes has {name!r}; the kinds of room are {kinds}.')
  for word in ('movable', 'Sliced'):
    if word in str(folder.absolute()):
      raise ValueError(
        f'folder={str(folder)!r} has {word!r} in its path, and the stock '
        'environment skips all games in such a folder; choose another.'
      )


def _packages() -> dict[str, str]:
  """Versions of what decides on the games.

  Raises:
    RuntimeError: one is missing.
  """
  try:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}
  except importlib.metadata.PackageNotFoundError as error:
    raise RuntimeError(
      f'the package {error.name} is not installed: {alfworld_data.INSTALL}'
    ) from None


def _standing(
  folder: pathlib.Path, split: str, arguments: Mapping, force: bool
) -> dict | None:
  """The marker of the split as it stands, if it is what is wanted.

  Raises:
    Refusal: what stands there may not be replaced.
  """
  root = folder / alfworld_data.FOLDER
  others = sorted(path for path in root.glob('*') if path.is_dir())
  for path in others:
    if not (path / alfworld_data.MARKER).is_file():
      raise Refusal(
        f'{path} holds games that were not generated here: it has no '
        f'{alfworld_data.MARKER}. Generated games are never mixed with others; '
        'choose an empty folder.'
      )
  path = root / split
  if not path.exists():
    return None
  marker = path / alfworld_data.MARKER
  try:
    found = json.loads(marker.read_text())
    found['made']
  except (ValueError, TypeError, LookupError) as error:
    raise Refusal(
      f'{marker} is damaged ({error}), so it is not known how the games beside '
      'it were made; remove that folder, or choose another one.'
    ) from None
  if {key: found.get(key) for key in arguments} == arguments:
    return found
  if force:
    return None
  changed = {
    key: found.get(key) for key in arguments if found.get(key) != arguments[key]
  }
  raise Refusal(
    f'{path} holds games that were made with other arguments ({changed}). '
    'Choose another folder, or replace them with --force.'
  )


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Keeps other runs out of a folder, and clears what killed ones left.

  Raises:
    Refusal: another run is there.
  """
  fresh = not folder.exists()
  folder.mkdir(parents=True, exist_ok=True)
  handle = os.open(folder, os.O_RDONLY)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise Refusal(
        f'another run makes games in {folder}; wait for its end, or choose '
        'another folder.'
      ) from None
    for left in folder.glob(f'{_ASIDE}*'):
      shutil.rmtree(left, ignore_errors=True)
    yield
  finally:
    os.close(handle)
    if fresh:  # Left empty by a run that was stopped.
      with contextlib.suppress(OSError):
        folder.rmdir()


def _jobs(
  kind: str, split: str, count: int, seed: int, scenes: Sequence[str]
) -> Iterator[tuple]:
  """What to make: task, number in the type, split and seed."""
  tasks = combinations(kind, split, scenes)
  if not tasks:
    raise ValueError(
      f'scenes={list(scenes)} allow no {kind} in {split}; name other kinds of '
      'room, or leave this type out.'
    )
  random.Random(f'{VERSION}/{split}/{seed}/{kind}').shuffle(tasks)
  # Every room before any room twice, so that few games see many rooms.
  seen: collections.Counter[int] = collections.Counter()
  turns = []
  for task in tasks:
    turns.append(seen[task.room])
    seen[task.room] += 1
  order = sorted(range(len(tasks)), key=turns.__getitem__)
  for index in range(count):
    yield tasks[order[index % len(order)]], index, split, seed


def _begin() -> None:
  """Leaves it to the first process to say when one of the others ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  lifetime.die_with_parent()


def _make(job: tuple) -> tuple[str, dict[str, str], int, int]:
  """Makes one game, in a process of its own.

  Returns:
    Its folder below the split, its files' texts by name, the length of its
    walkthrough and the number of draws before it that were thrown away.
  """
  task, index, split, seed = job
  name = f'trial_G{seed}_{index:05d}'
  for draw in range(_DRAWS):
    rng = random.Random(
      f'{VERSION}/{split}/{seed}/{task.folder}/{index}/{draw}'
    )
    problem = alfworld_problem.draw(task, rng, f'plan_{name}')
    game = {
      'pddl_domain': _logic('alfred.pddl'),
      'grammar': _logic('alfred.twl2').replace(
        'UNKNOWN GOAL', problem.sentence
      ),
      'pddl_problem': problem.pddl,
    }
    walkthrough, why = _solve(game, problem)
    if walkthrough is None:
      continue
    game |= {'solvable': True, 'walkthrough': walkthrough}
    files = {
      alfworld_data.GAME: json.dumps(game),
      alfworld_data.TRAJECTORY: json.dumps(
        _trajectory(problem, name, split, seed, index), indent=2
      ),
      'initial_state.pddl': problem.pddl,
    }
    return f'{task.folder}/{name}', files, len(walkthrough), draw
  raise RuntimeError(
    f'{task.folder}: {_DRAWS} draws gave no game ({why}); '
    'this is a bug of the generator. Another --seed may avoid it.'
  )


def _logic(name: str) -> str:
  return (alfworld_problem.wheel() / 'data' / name).read_text()


def _solve(
  game: dict, problem: alfworld_problem.Problem
) -> tuple[list[str] | None, str]:
  """The planner's walkthrough if it is as it should be; otherwise why not."""
  # Here, as only the processes that make games need the packages.
  from envs_server import alfworld_engine

  global _ENGINE
  if _ENGINE is None:
    _ENGINE = alfworld_engine.Engine()
  _ENGINE.load({**game, 'pddl_problem': problem.core})
  plan = _ENGINE.plan()
  if not plan:
    return None, 'the planner found no solution'
  if len(plan) > min(problem.least, MAX_ACTIONS):
    return None, f'{len(plan)} actions where {problem.least} do'
  _ENGINE.load(game)
  for action in plan:
    if _ENGINE.won or action not in _ENGINE.admissible():
      return None, f'{action!r} is not admissible, or comes after the end'
    _ENGINE.step(action)
  if not _ENGINE.won:
    return None, 'the plan does not win'
  return list(plan), ''


# Of a process that makes games: its library has one state.
_ENGINE = None


def _trajectory(
  problem: alfworld_problem.Problem,
  name: str,
  split: str,
  seed: int,
  index: int,
) -> dict:
  task = problem.task
  look = task.target == alfworld_problem.LAMP
  return {
    'task_id': name,
    'task_type': task.type,
    'pddl_params': {
      'mrecep_target': '',
      'object_sliced': False,
      'object_target': task.thing,
      'parent_target': '' if look else task.target,
      'toggle_target': task.target if look else '',
    },
    'scene': {
      'floor_plan': f'FloorPlan{task.room}',
      'scene_num': task.room,
    },
    'turk_annotations': {
      'anns': [
        {
          'assignment_id': 'generated, written by no person',
          'high_descs': [],
          'task_desc': problem.sentence,
        }
      ]
    },
    'generated': {
      'note': NOTE,
      'generator': VERSION,
      'split': split,
      'seed': seed,
      'index': index,
      'packages': _packages(),
    },
  }


def _write_split(
  folder: pathlib.Path,
  pool: concurrent.futures.Executor,
  plan: Sequence[tuple],
  arguments: dict,
) -> dict:
  """Makes the games of a split aside, then puts them in their place."""
  root = folder / alfworld_data.FOLDER
  root.mkdir(exist_ok=True)
  place = root / arguments['split']
  made: dict = {'games': {}, 'lengths': {}, 'redrawn': 0}
  # Beside the place, so that a rename puts it there; the stock environment
  # looks into the folder of a split only.
  aside = pathlib.Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder))
  try:
    new = aside / 'new'
    for job, (path, files, length, redrawn) in zip(
      plan, pool.map(_make, plan), strict=True
    ):
      game = new / path
      game.mkdir(parents=True)
      for name, text in files.items():
        (game / name).write_text(text, encoding='utf-8', newline='\n')
      kind = job[0].type
      made['games'][kind] = made['games'].get(kind, 0) + 1
      made['lengths'].setdefault(kind, []).append(length)
      made['redrawn'] += redrawn
    _write_json(new / alfworld_data.MARKER, {**arguments, 'made': made})
    # First, so that no moment shows games that nothing marks.
    _write_json(folder / alfworld_data.MARKER, {'note': NOTE})
    if place.exists():
      place.rename(aside / 'old')
    new.rename(place)
  finally:
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # Empty after a run that was stopped.
      root.rmdir()
  return made


def _write_json(path: pathlib.Path, content: dict) -> None:
  path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


@contextlib.contextmanager
def _workers(jobs: int) -> Iterator[concurrent.futures.Executor]:
  """Processes that make games; what they have not begun is dropped at the end.

  They have an empty $ALFWORLD_DATA, as importing ALFWorld makes that folder.
  """
  before = os.environ.get('ALFWORLD_DATA')
  with tempfile.TemporaryDirectory() as empty:
    os.environ['ALFWORLD_DATA'] = empty
    pool = concurrent.futures.ProcessPoolExecutor(
      jobs or os.cpu_count(),
      mp_context=multiprocessing.get_context('spawn'),
      initializer=_begin,
    )
    try:
      yield pool
    finally:
      pool.shutdown(cancel_futures=True)
      if before is None:
        del os.environ['ALFWORLD_DATA']
      else:
        os.environ['ALFWORLD_DATA'] = before


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m envs_server.alfworld_games',
    description='Makes ALFWorld games that are not the benchmark.',
  )
  parser.add_argument('folder', metavar='DIR')
  parser.add_argument('--per-type', type=int, default=20, metavar='N')
  parser.add_argument('--split', default='all', help=f'{SPLITS}, or all')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--types', nargs='+', default=list(TYPES))
  parser.add_argument(
    '--scenes', nargs='+', default=[], help='kinds of room; all of them'
  )
  parser.add_argument('--jobs', type=int, default=0, help='one a core')
  parser.add_argument(
    '--force', action='store_true', help='replaces other generated games'
  )
  arguments = vars(parser.parse_args(argv))
  folder = pathlib.Path(os.path.expanduser(arguments['folder']))
  try:
    made = generate(**arguments)
  except (ValueError, RuntimeError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('stopped; the split under way was not written', file=sys.stderr)
    return 130
  for split, told in made.items():
    print(f'{folder / alfworld_data.FOLDER / split}:')
    for kind, count in told['games'].items():
      lengths = told['lengths'][kind]
      print(f'  {kind}: {count} ({min(lengths)}-{max(lengths)} actions)')
    if told['redrawn']:
      print(f'  {told["redrawn"]} draws without a good walkthrough, drawn anew')
  print('These games are not the ALFWorld benchmark.')
  print(f'export ALFWORLD_DATA={folder.absolute()}')
  return 0


if __name__ == '__main__':
  # Stops as Ctrl-C does, which leaves no half game.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main())
