"""Which environment a run played in: `environment.json` in its folder.

The file is a list: what the run began with, and what it went on with, each with
the number of steps that were done then.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

_NAME = 'environment.json'


def keep(workdir: pathlib.Path, done: int, played: Mapping[str, Any]) -> str:
  """Writes what is played from now on.

  Args:
    workdir: of the run.
    done: steps that were done before.
    played: see `evaluate.environment`.

  Returns:
    A warning if it was another one before; empty if not.

  Raises:
    ValueError: the file is damaged.
  """
  path = workdir / _NAME
  # What was tried there before anything was played may have been another run.
  has_played = done or (workdir / 'eval_before.json').exists()
  kept = _read(path, played) if has_played else []
  said = ''
  if kept:
    last = {key: kept[-1][key] for key in played}
    if last == played:
      return ''
    said = (
      f'warning: up to step {done} this run played in {_served(last)}; the '
      f'service now has {_served(played)}: what follows may not compare with '
      'what came before'
    )
  # Renamed into place: a kill here must not leave half of it behind.
  part = path.with_suffix('.part')
  part.write_text(json.dumps([*kept, {'step': done, **played}], indent=1))
  part.rename(path)
  return said


def compare(workdir: pathlib.Path, played: Mapping[str, Any]) -> str:
  """A warning if a run was trained in another environment; empty if not.

  Args:
    workdir: of the run; nothing in it is changed.
    played: what is played now, see `evaluate.environment`.

  Raises:
    ValueError: the file is damaged.
  """
  kept = _read(workdir / _NAME, played)
  last = {key: kept[-1][key] for key in played} if kept else played
  if last == played:
    return ''
  return (
    f'warning: this run was trained in {_served(last)}; the service now has '
    f'{_served(played)}: what follows may not compare with it'
  )


def _read(path: pathlib.Path, played: Mapping[str, Any]) -> list[dict]:
  """The entries of a file; none if there is no file."""
  if not path.exists():
    return []
  try:
    kept = json.loads(path.read_text())
    # The last one is what is compared with.
    _ = [kept[-1][key] for key in played]
  except (ValueError, LookupError, TypeError) as error:
    raise ValueError(
      f'{path} is damaged; remove it to go on: it only says which '
      'environment this run played in before.'
    ) from error
  return kept


def _served(played: Mapping[str, Any]) -> str:
  sizes = ', '.join(f'{k} {n}' for k, n in played['split_sizes'].items())
  return f'{played["name"]} version {played["version"]!r} (tasks: {sizes})'
