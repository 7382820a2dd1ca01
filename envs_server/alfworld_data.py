"""The ALFWorld games on this machine: which are there, and what is wrong.

  python -m envs_server.alfworld_data [DIR]

prints how many games each split and type has below DIR (default:
$ALFWORLD_DATA), and what was left out and why. A game is a folder

  DIR/json_2.1.1/<split>/<task>-<Obj>-<MRecep>-<Recep>-<scene>/trial_*/

with `game.tw-pddl` and `traj_data.json`; `alfworld-download` writes the
official ones, `python -m envs_server.alfworld_games` makes others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence

# Official task types -> their columns in publications.
COLUMNS = {
  'pick_and_place_simple': 'Pick',
  'look_at_obj_in_light': 'Look',
  'pick_clean_then_place_in_recep': 'Clean',
  'pick_heat_then_place_in_recep': 'Heat',
  'pick_cool_then_place_in_recep': 'Cool',
  'pick_two_obj_and_place': 'Pick2',
}
TYPES = tuple(COLUMNS)
# Official numbers of games, of the types above.
OFFICIAL = {
  'train': (790, 308, 650, 459, 533, 813),
  'valid_seen': (35, 13, 27, 16, 25, 24),
  'valid_unseen': (24, 18, 31, 23, 21, 17),
}
SPLITS = tuple(OFFICIAL)
FOLDER = 'json_2.1.1'
GAME, TRAJECTORY = 'game.tw-pddl', 'traj_data.json'
# What the generator leaves beside its games.
MARKER = 'GENERATED.json'
INSTALL = 'pip install --no-deps -r envs_server/requirements-alfworld.txt'

_SYNTAX = re.compile(r'action PutObject \{\s*template :: "(put|move) ')
_TASK = 'Your task is to:'
# How a thing is put down, by syntax.
PUT = {'move': 'move X to Y', 'put': 'put X in/on Y'}
_PUT = re.compile(r'(?:put|move) (.+?) (?:in/on|to) (.+)')
_NO_GAME = f'{GAME} is missing'
# Of a cache file; raised when a judgement of the same file may change.
_JUDGE = 2


@dataclasses.dataclass(frozen=True)
class Game:
  """A game that can be played.

  Attributes:
    path: of its folder, relative to the folder of all splits.
    syntax: how things are put down: `move X to Y` or the older `put X in/on Y`.
    digest: of its text.
  """

  path: str
  syntax: str
  digest: str


@dataclasses.dataclass(frozen=True)
class Games:
  """What is below a folder.

  Attributes:
    root: the folder that holds the splits.
    folders: split -> type -> paths, sorted, of all that could hold a game.
    games: split -> type -> index -> game. The index is the place in `folders`,
      so that one that cannot be played leaves the others as they are on other
      machines.
    skipped: path -> why it was left out.
    others: folders that ALFWorld does not play by design: of other task types,
      with sliced or movable things.
    generated: the games are not the official ones.
  """

  root: pathlib.Path
  folders: Mapping[str, Mapping[str, Sequence[str]]]
  games: Mapping[str, Mapping[str, Mapping[int, Game]]]
  skipped: Mapping[str, str]
  others: int
  generated: bool

  def counts(self, split: str) -> tuple[int, ...]:
    """Number of games of each of `TYPES`."""
    return tuple(len(self.games[split][name]) for name in TYPES)

  @property
  def syntax(self) -> str:
    """`move`, `put`, or `mixed`."""
    found = {game.syntax for game in self._all()}
    return found.pop() if len(found) == 1 else 'mixed'

  @property
  def digest(self) -> str:
    """Of all games: two services with the same one serve the same."""
    listed = [[game.path, game.digest] for game in self._all()]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:8]

  @property
  def version(self) -> str:
    """What decides which tasks there are, in a line."""
    sizes = '/'.join(str(sum(self.counts(split))) for split in SPLITS)
    kind = 'generated games' if self.generated else 'games'
    return f'{sizes} {kind} {self.digest}, {self.syntax} syntax'

  def _all(self):
    return (
      game
      for split in SPLITS
      for name in TYPES
      for game in self.games[split][name].values()
    )

  def table(self, most: int | None = None) -> str:
    """What was found, and what was left out: the first `most`, or all."""
    kind = 'generated, not the benchmark; ' if self.generated else ''
    lines = [f'ALFWorld games in {self.root} ({kind}{self.syntax} syntax):']
    for split in SPLITS:
      counts = self.counts(split)
      cells = [
        f'{COLUMNS[name]} {count}'
        + ('' if self.generated or count == whole else f' of {whole}')
        for name, count, whole in zip(
          TYPES, counts, OFFICIAL[split], strict=True
        )
      ]
      lines.append(f'  {split}: {sum(counts)} ({", ".join(cells)})')
    without = sum(why == _NO_GAME for why in self.skipped.values())
    if self.skipped:
      lines.append(
        f'  left out: {len(self.skipped)} folders, {without} of them without a '
        f'{GAME}, as some official ones are'
      )
    # What is damaged first: of the others there may be hundreds.
    ordered = sorted(self.skipped.items(), key=lambda item: item[1] == _NO_GAME)
    for path, why in ordered[:most]:
      lines.append(f'    {path}: {why}')
    if most is not None and len(self.skipped) > most:
      lines.append(
        f'    and {len(self.skipped) - most} more; `python -m '
        'envs_server.alfworld_data` lists all'
      )
    if not self.generated and any(
      count < whole
      for split in SPLITS
      for count, whole in zip(self.counts(split), OFFICIAL[split], strict=True)
    ):
      # It leaves alone what is there, unless it is told not to.
      over = ' --force' if len(self.skipped) > without else ''
      place = shlex.quote(str(self.root.parent))
      lines.append(
        f'  official games are missing; `alfworld-download --data-dir={place}'
        f'{over}` fetches them'
      )
    return '\n'.join(lines)

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self) | {'root': str(self.root)})

  @classmethod
  def from_json(cls, text: str) -> Games:
    values = json.loads(text)
    games = {
      split: {
        name: {int(index): Game(**game) for index, game in listed.items()}
        for name, listed in by_name.items()
      }
      for split, by_name in values['games'].items()
    }
    root = pathlib.Path(values['root'])
    return cls(**values | {'root': root, 'games': games})


def folder() -> pathlib.Path:
  """$ALFWORLD_DATA, or where `alfworld-download` writes without it."""
  name = os.environ.get('ALFWORLD_DATA') or '~/.cache/alfworld'
  return pathlib.Path(os.path.expanduser(name))


def find(data: pathlib.Path) -> Games:
  """Finds the games below `data`, as the splits are laid out there.

  What was read before is known from a cache by size and time of the files.

  Raises:
    FileNotFoundError: there are none; says how to get some.
  """
  root = data / FOLDER
  known = _read_cache(root)
  folders: dict[str, dict[str, list[str]]] = {
    split: {name: [] for name in TYPES} for split in SPLITS
  }
  games: dict[str, dict[str, dict[int, Game]]] = {
    split: {name: {} for name in TYPES} for split in SPLITS
  }
  skipped, fresh, others = {}, {}, 0
  for split in SPLITS:
    trials, unread = _trials(root, split)
    skipped |= unread
    for path in trials:
      name = path.split('/')[1].split('-')[0]
      if name not in TYPES or 'movable' in path or 'Sliced' in path:
        others += 1
        continue
      folders[split][name].append(path)
      try:
        stamp = _stamp(root / path)
        verdict = known.get(path)
        if not verdict or verdict['stamp'] != stamp:
          verdict = {'stamp': stamp, **_judge(root / path, name)}
      except OSError as error:
        # Not to be remembered: it may be over the next time.
        skipped[path] = _unreadable(error)
        continue
      fresh[path] = verdict
      if 'why' in verdict:
        skipped[path] = verdict['why']
      else:
        games[split][name][len(folders[split][name]) - 1] = Game(
          path, verdict['syntax'], verdict['digest']
        )
  generated = any(
    os.path.isfile(place / MARKER)
    for place in (data, *(root / split for split in SPLITS))
  )
  found = Games(root, folders, games, skipped, others, generated)
  if fresh != known:
    _write_cache(root, fresh)
  if not any(any(found.counts(split)) for split in SPLITS):
    left = ''
    if FOLDER in data.parts:
      left = f'; name the folder that holds {FOLDER}'
    elif skipped:
      path, why = next(iter(skipped.items()))
      left = f' ({len(skipped)} folders are left out, the first {path}: {why})'
    raise FileNotFoundError(
      f'there is no ALFWorld game in {root}{left}. `export '
      'ALFWORLD_DATA=DIR; alfworld-download` fetches the official games; '
      '`python -m envs_server.alfworld_games DIR --per-type 20 --split all` '
      'makes others without a network, which are not the benchmark. Then set '
      'ALFWORLD_DATA=DIR.'
    )
  return found


def read_game(path: pathlib.Path) -> dict:
  """Reads a `game.tw-pddl`.

  Raises:
    OSError: it cannot be read.
    ValueError: it is no such file; says why.
  """
  try:
    game = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{path.name} is no JSON ({error}); it may be cut off'
    ) from None
  if not isinstance(game, dict):
    raise ValueError(f'{path.name} holds no JSON object')
  for key in ('pddl_domain', 'grammar', 'pddl_problem'):
    if not (isinstance(game.get(key), str) and game[key].strip()):
      raise ValueError(f'{path.name} has no text {key!r}')
  walkthrough = game.get('walkthrough')
  if walkthrough is not None and not (
    isinstance(walkthrough, list)
    and all(isinstance(action, str) for action in walkthrough)
  ):
    raise ValueError(f'{path.name} has a walkthrough that is no list of texts')
  for key in ('pddl_domain', 'pddl_problem'):
    # Comments may hold any number of them.
    text = re.sub(r';.*', '', game[key])
    if text.count('(') != text.count(')'):
      raise ValueError(f'{path.name} has a {key!r} with unequal parentheses')
  if ':goal' not in game['pddl_problem']:
    raise ValueError(f"{path.name} has a 'pddl_problem' without :goal")
  if _TASK not in game['grammar'] or not _SYNTAX.search(game['grammar']):
    raise ValueError(f"{path.name} has a 'grammar' without task or PutObject")
  if game.get('solvable') is not True:
    raise ValueError(f'{path.name} is not marked as solvable')
  return game


def syntax(game: Mapping[str, str]) -> str:
  """`move` or `put`; see `Game`."""
  return _SYNTAX.search(game['grammar'])[1]


def digest(game: Mapping[str, str]) -> str:
  """Of everything that is played."""
  texts = [game['pddl_domain'], game['grammar'], game['pddl_problem']]
  return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def solution(game: Mapping) -> tuple[str, ...]:
  """The stored walkthrough in the words of the game; empty without one."""
  form = PUT[syntax(game)].replace('X', r'\1').replace('Y', r'\2')
  # Walkthroughs of older data say `put`, in games that know `move` alone.
  return tuple(
    _PUT.sub(form, action) if _PUT.fullmatch(action) else action
    for action in game.get('walkthrough') or ()
  )


def _trials(root: pathlib.Path, split: str) -> tuple[list[str], dict[str, str]]:
  """Folders of trials, relative to `root`, sorted as on every machine.

  Returns:
    (trials, unread): also folders that cannot be looked into, and why.
  """
  found, unread = [], {}
  try:
    tasks = [task.name for task in os.scandir(root / split) if _is_dir(task)]
  except (FileNotFoundError, NotADirectoryError):
    tasks = []
  except OSError as error:
    tasks, unread[split] = [], _unreadable(error)
  for task in tasks:
    try:
      found += [
        f'{split}/{task}/{trial.name}'
        for trial in os.scandir(root / split / task)
        if _is_dir(trial)
      ]
    except OSError as error:
      unread[f'{split}/{task}'] = _unreadable(error)
  return sorted(found), unread


def _is_dir(entry: os.DirEntry) -> bool:
  try:
    return entry.is_dir()
  except OSError:  # Such as a link to itself.
    return False


def _unreadable(error: OSError) -> str:
  return f'{os.path.basename(error.filename)} cannot be read ({error.strerror})'


def _stamp(path: pathlib.Path) -> list[int]:
  """Sizes and times of the files of a game; 0 for one that is missing."""
  stamp = []
  for name in (GAME, TRAJECTORY):
    try:
      stat = os.stat(path / name)
    except FileNotFoundError:
      stamp += [0, 0, 0]
    else:
      # The last also changes with permissions.
      stamp += [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
  return stamp


def _judge(path: pathlib.Path, kind: str) -> dict[str, str]:
  """Why a folder holds no game of its type, or what it holds."""
  if not (path / GAME).exists():
    return {'why': _NO_GAME}
  if not (path / TRAJECTORY).exists():
    return {'why': f'{TRAJECTORY} is missing'}
  text = (path / TRAJECTORY).read_bytes()
  try:
    named = json.loads(text)['task_type']
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    return {
      'why': f'{TRAJECTORY} has no task_type ({type(error).__name__}: {error})'
    }
  if named != kind:
    return {'why': f'{TRAJECTORY} has the task_type {named!r}, not {kind!r}'}
  try:
    game = read_game(path / GAME)
  except ValueError as error:
    return {'why': str(error)}
  return {'syntax': syntax(game), 'digest': digest(game)}


def _cache(root: pathlib.Path) -> pathlib.Path:
  home = os.path.expanduser(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
  name = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:16]
  return pathlib.Path(home) / 'planpo_jax' / f'alfworld-{name}.json'


def _read_cache(root: pathlib.Path) -> dict[str, dict]:
  try:
    content = json.loads(_cache(root).read_text())
    if content['judge'] != _JUDGE:
      return {}
    return {
      path: verdict
      for path, verdict in content['games'].items()
      if 'stamp' in verdict
      and ('why' in verdict or {'syntax', 'digest'} <= verdict.keys())
    }
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return {}  # What it holds can be found out again.


def _write_cache(root: pathlib.Path, games: dict[str, dict]) -> None:
  path = _cache(root)
  with contextlib.suppress(OSError):  # It saves seconds, no more.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
      part = pathlib.Path(scratch) / 'part'
      part.write_text(json.dumps({'judge': _JUDGE, 'games': games}))
      os.replace(part, path)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m envs_server.alfworld_data',
    description='Lists the ALFWorld games below a folder.',
  )
  parser.add_argument('data', nargs='?', type=pathlib.Path, default=folder())
  data = parser.parse_args(argv).data.expanduser()
  try:
    print(find(data).table())
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
