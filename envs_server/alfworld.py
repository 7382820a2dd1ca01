"""ALFWorld (Shridhar et al. 2021, arXiv 2010.03768) on its own engine.

The games are those below $ALFWORLD_DATA; see `alfworld_data`. A task is a game:
its index is the place of the game in the sorted list of its split and type.
What is read is the engine's own text, the same as in the package's
`AlfredTWEnv`. A game file holds rules that the engine evaluates as Python, so
only files from a source that is trusted may be played.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import re
import sys

from envs_server import alfworld_data, alfworld_engine, env

# Of a worker process, for those who plan.
MEMORY_MB = 130
# Environment variable with the file by which a service tells its workers what
# it found.
_SNAPSHOT = 'PLANPO_ALFWORLD_GAMES'
_SHOWN = 10  # Folders left out that are named at the start.
_FULL_SCORE = 100.0
_TASK = re.compile(r'Your task is to: .*')
_ACTION_FORMAT = (
  'One command a turn. Commands: go to X, open X, close X, take X from Y, '
  '{put}, clean X with Y, heat X with Y, cool X with Y, use X, examine X, '
  'look, inventory. Things are named with their number, such as mug 1. What '
  'is impossible is answered with "Nothing happens."'
)


def check() -> None:
  """Prints which games were found.

  Raises:
    RuntimeError: the engine or every game is missing.
  """
  try:
    importlib.import_module('textworld.envs.pddl.logic')
    # Not imported before the games are found: it makes the folder that
    # $ALFWORLD_DATA names.
    importlib.metadata.version('alfworld')
    importlib.import_module('fast_downward').load_lib()
  except (ImportError, OSError) as error:
    raise RuntimeError(
      f'ALFWorld is not installed ({error}); run `{alfworld_data.INSTALL}`, '
      'which needs g++ and make.'
    ) from error
  try:
    found = alfworld_data.find(alfworld_data.folder())
  except OSError as error:
    raise RuntimeError(str(error)) from None
  # Workers read this instead of looking for themselves: those that are built
  # later must not take another game for a task. It is on no disk, and lasts as
  # long as this process.
  snapshot = os.memfd_create('alfworld-games')
  with open(snapshot, 'w', closefd=False) as file:
    file.write(found.to_json())
  os.environ[_SNAPSHOT] = f'/proc/{os.getpid()}/fd/{snapshot}'
  print(found.table(_SHOWN), file=sys.stderr, flush=True)


def make_env() -> AlfWorld:
  return AlfWorld()


class AlfWorld:
  """One engine, which plays one game after the other.

  Score is 100 when the goal is reached, else 0. Nothing else ends an episode.
  """

  def __init__(self):
    # The package makes the folder that the variable names, `~` and all.
    os.environ['ALFWORLD_DATA'] = str(alfworld_data.folder())
    snapshot = os.environ.get(_SNAPSHOT)
    self._found = (
      alfworld_data.Games.from_json(pathlib.Path(snapshot).read_text())
      if snapshot
      else alfworld_data.find(alfworld_data.folder())
    )
    self._engine = alfworld_engine.Engine()
    self._admissible = False

  def catalog(self) -> env.Catalog:
    """See `env.TextEnv`."""
    found = self._found
    versions = ', '.join(
      f'{name} {importlib.metadata.version(name)}'
      for name in ('alfworld', 'textworld', 'fast-downward-textworld')
    )
    syntax = found.syntax
    return env.Catalog(
      version=f'{versions}, {found.version}',
      action_format=_ACTION_FORMAT.format(
        put=alfworld_data.PUT.get(
          syntax, ' or '.join(alfworld_data.PUT.values())
        )
      ),
      indices={
        split: {
          name: tuple(found.games[split][name]) for name in alfworld_data.TYPES
        }
        for split in alfworld_data.SPLITS
      },
      sets={column: (name,) for name, column in alfworld_data.COLUMNS.items()},
    )

  def reset(
    self, task: env.Task, expert: bool = False, admissible: bool = False
  ) -> env.Observation:
    """See `env.TextEnv`. Takes 0.2 to 0.5 s."""
    # Also one that broke since the service started: the error says why.
    found = self._found.folders[task.split][task.name][task.index]
    self._path = self._found.root / found
    try:
      game = alfworld_data.read_game(self._path / alfworld_data.GAME)
      listed = self._found.games[task.split][task.name].get(task.index)
      if listed and listed.digest != alfworld_data.digest(game):
        raise ValueError('it is another game than when the service started')
      text = self._engine.load(game)
      if self._engine.won:
        raise ValueError('its goal is reached before the first action')
    except (Exception, SystemExit) as error:
      # The translator gives up with SystemExit.
      raise self._unplayable(error) from error
    goal = _TASK.search(text)
    self._admissible = admissible
    return self._observe(
      text,
      goal=goal[0] if goal else '',
      expert_actions=alfworld_data.solution(game) if expert else (),
      info={'game': found, 'syntax': alfworld_data.syntax(game)},
    )

  def step(self, action: str) -> env.Observation:
    """See `env.TextEnv`."""
    try:
      text = self._engine.step(action.strip())
    except Exception as error:
      raise self._unplayable(error) from error
    return self._observe(text)

  def ping(self) -> None:
    """See `env.TextEnv`."""
    self._engine.ping()

  def close(self) -> None:
    """See `env.TextEnv`."""

  def _unplayable(self, error: BaseException) -> env.BrokenTaskError:
    return env.BrokenTaskError(
      f'{self._path} cannot be played ({type(error).__name__}: {error}); '
      'restore its files.'
    )

  def _observe(self, text: str, **fields) -> env.Observation:
    won = self._engine.won
    return env.Observation(
      text=text,
      score=_FULL_SCORE if won else 0.0,
      success=won,
      terminated=won,
      admissible=self._listed() if self._admissible else (),
      **fields,
    )

  def _listed(self) -> tuple[str, ...]:
    # Without `help`, which is no help and is not shown to published agents.
    return tuple(a for a in self._engine.admissible() if a != 'help')
