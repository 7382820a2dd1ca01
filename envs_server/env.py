"""What an environment is to the service.

An environment is a module of this package that defines `make_env() -> TextEnv`
and, where something must be installed or prepared, `check()`, which the service
calls before it starts any worker. Importing the module must be cheap: what is
heavy is imported by these functions.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib
import logging
import pkgutil
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

# A line on stderr that begins so tells that `check` gets on with something that
# takes long; whoever waits for the service has patience anew.
PREPARING = 'preparing: '
# Indices that an error lists; of more it says the first and the last.
_FEW = 100


_log = logging.getLogger(__name__)


class TaskError(ValueError):
  """The caller asked for something that cannot exist; says what can."""


class BrokenTaskError(Exception):
  """A task of the catalog that no worker can play, whose data are broken.

  The episode is lost for good; the environment that says so is well.
  """


@dataclasses.dataclass(frozen=True)
class Task:
  """Names one initial state: the same Task gives the same state anywhere.

  Attributes:
    env: name of the environment.
    split: a split of its catalog.
    index: one of the indices that the catalog lists for `split` and `name`.
    name: task type.
    seed: seed of whatever the environment draws at random.
    options: what changes the environment, by name.
  """

  env: str
  split: str
  index: int
  name: str
  seed: int = 0
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Observation:
  """What an environment answers to a reset or to an action.

  Attributes:
    text: what the policy reads.
    score: the environment's own score, in its own range.
    success: the goal is reached.
    terminated: the environment ended the episode: goal reached or lost.
    goal: the task in words; set on reset.
    expert_actions: a solution; set on reset when it was asked for.
    admissible: actions that can be taken now, when they were asked for.
    info: whatever else may interest people who debug.
  """

  text: str
  score: float = 0.0
  success: bool = False
  terminated: bool = False
  goal: str = ''
  expert_actions: tuple[str, ...] = ()
  admissible: tuple[str, ...] = ()
  info: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Numbers(Sequence[int]):
  """Consecutive numbers, but for a few.

  Attributes:
    whole: all of them.
    without: those that are left out; sorted.
  """

  whole: range
  without: tuple[int, ...]

  def __len__(self) -> int:
    return len(self.whole) - len(self.without)

  def __contains__(self, number: object) -> bool:
    if number not in self.whole:
      return False
    place = bisect.bisect_left(self.without, number)
    return place == len(self.without) or self.without[place] != number

  def __getitem__(self, place):
    if isinstance(place, slice):
      return [self[i] for i in range(*place.indices(len(self)))]
    place = range(len(self))[place]
    # How many that are left out come before it.
    first = self.whole.start
    before = bisect.bisect_right(
      range(len(self.without)), place, key=lambda i: self.without[i] - first - i
    )
    return self.whole[place + before]

  def __iter__(self) -> Iterator[int]:
    start = self.whole.start
    for number in (*self.without, self.whole.stop):
      yield from range(start, number)
      start = number + 1


@dataclasses.dataclass(frozen=True)
class Catalog:
  """Everything that can be asked of an environment.

  Attributes:
    version: version of the environment and what else decides its behaviour.
    action_format: one paragraph for the policy: what an action looks like.
    indices: {split: {task type: indices}}; every split has the same types in
      the same order.
    options: {option: values it may have}. Values may be joined by commas.
    sets: {name: task types}, names for several types at once. No set is called
      as a type is.
  """

  version: str
  action_format: str
  indices: Mapping[str, Mapping[str, Sequence[int]]]
  options: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  sets: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  @property
  def task_names(self) -> tuple[str, ...]:
    return tuple(next(iter(self.indices.values())))

  @property
  def split_sizes(self) -> dict[str, int]:
    return {
      split: sum(len(indices) for indices in by_name.values())
      for split, by_name in self.indices.items()
    }

  def tasks(
    self, env: str, split: str, names: Sequence[str] = ()
  ) -> list[Task]:
    """Tasks of a split, by type (in catalog order) and then by index.

    Args:
      env: name of the environment, for the tasks to carry.
      split: a split.
      names: task types, and sets of them, to list; none lists all. A type
        that is named twice is listed once.

    Raises:
      TaskError: unknown split, task type or set; the known ones are listed.
    """
    return self.page(env, split, names)[0]

  def page(
    self,
    env: str,
    split: str,
    names: Sequence[str] = (),
    *,
    first: int = 0,
    count: int | None = None,
  ) -> tuple[list[Task], int]:
    """A part of what `tasks` lists, and how many that are.

    Args:
      env: see `tasks`, likewise the next two.
      split: a split.
      names: task types and sets.
      first: number of the first task, from 0.
      count: number of tasks; None for all that remain.
    """
    _known('split', split, self.indices)
    types = set()
    for name in dict.fromkeys(names):
      if name not in self.sets and name not in self.indices[split]:
        raise TaskError(
          f'unknown task type or set {name!r}; sets: {_listed(self.sets)}; '
          f'types: {_listed(self.task_names)}.'
        )
      types.update(self.sets.get(name, (name,)))
    found: list[Task] = []
    before = 0
    for name, indices in self.indices[split].items():
      if names and name not in types:
        continue
      start = max(0, first - before)
      stop = None if count is None else start + count - len(found)
      found += [Task(env, split, i, name) for i in indices[start:stop]]
      before += len(indices)
    return found, before

  def check_itself(self) -> None:
    """Raises ValueError if this is no catalog."""
    if not self.indices:
      raise ValueError('it has no split; `indices` needs one at least.')
    for split, by_name in self.indices.items():
      if tuple(by_name) != self.task_names:
        raise ValueError(
          f'the split {split!r} has the types {tuple(by_name)}, another one '
          f'{self.task_names}; every split needs the same in the same order '
          '(with no indices where it has none).'
        )
      for name, found in by_name.items():
        ends = found
        if isinstance(found, range | Numbers) and len(found):
          ends = (found[0], found[-1])
        for index in ends:
          if not (isinstance(index, int) and 0 <= index < 2**31):
            raise ValueError(
              f'{name} of split {split!r} has the index {index!r}; indices are '
              'whole numbers from 0 to 2147483647.'
            )
    for name, members in self.sets.items():
      if name in self.task_names or not set(members) <= set(self.task_names):
        raise ValueError(
          f'the set {name!r} of {tuple(members)} must hold types, and be none.'
        )

  def check(self, task: Task) -> None:
    """Raises TaskError, listing what is known, if `task` cannot exist."""
    _known('split', task.split, self.indices)
    _known('task type', task.name, self.task_names)
    indices = self.indices[task.split][task.name]
    if task.index not in indices:
      raise TaskError(
        f'{task.name} has no index {task.index} in split {task.split!r}; it '
        f'has {_span(indices)}.'
      )
    for option, value in task.options.items():
      _known('option', option, self.options)
      parts = [part for part in value.split(',') if part]
      if len(parts) > len(self.options[option]):
        raise TaskError(
          f'option {option!r} has {len(parts)} values, more than there are; '
          'name each once.'
        )
      for part in parts:
        _known(f'value of option {option!r}', part, self.options[option])


class TextEnv(Protocol):
  """One environment; it lives in a process of its own and plays one task.

  What it starts must end with it: processes stay in its group, and are started
  with `preexec_fn=lifetime.die_with_parent`, for the whole service may be
  killed.
  """

  def catalog(self) -> Catalog:
    """Returns what can be asked of this environment. Forgets the episode."""

  def reset(
    self, task: Task, *, expert: bool = False, admissible: bool = False
  ) -> Observation:
    """Begins an episode, whatever became of the one before.

    Args:
      task: a task that passes `Catalog.check`.
      expert: whether to answer with a solution.
      admissible: whether this and later answers list admissible actions.

    Raises:
      TaskError: the task cannot exist.
      BrokenTaskError: it exists and cannot be played; `step` may say so too.
    """

  def step(self, action: str) -> Observation:
    """Takes one action; never called after `terminated`."""

  def ping(self) -> None:
    """Raises if the environment is of no use any more; between episodes."""

  def close(self) -> None:
    """Ends what the environment started."""


def known() -> tuple[str, ...]:
  """Names of the environments in this package, sorted."""
  return tuple(name for name in _modules() if _makes_env(name))


def broken() -> tuple[str, ...]:
  """Names of modules in this package that cannot be imported, sorted."""
  return tuple(name for name in _modules() if _makes_env(name) is None)


def _modules() -> list[str]:
  package = importlib.import_module('envs_server').__path__
  names = {info.name for info in pkgutil.iter_modules(package)}
  return sorted(name for name in names if not name.startswith('_'))


@functools.cache  # A module that is broken is told of once.
def _makes_env(name: str) -> bool | None:
  """None if the module cannot be imported."""
  try:
    return hasattr(module(name), 'make_env')
  except Exception as error:
    # It shall not stop the others, which may have nothing to do with it.
    _log.warning(
      'envs_server.%s is left out: it cannot be imported (%s: %s)',
      name,
      type(error).__name__,
      error,
    )
    return None


def module(name: str) -> types.ModuleType:
  """Returns the module of a known environment."""
  return importlib.import_module(f'envs_server.{name}')


def _known(what: str, value: str, values) -> None:
  if value not in values:
    raise TaskError(f'unknown {what} {value!r}; known: {_listed(values)}.')


def _listed(values) -> str:
  return ', '.join(repr(v) for v in values) or 'none'


def _span(indices: Sequence[int]) -> str:
  if not indices:
    return 'none'
  if len(indices) > _FEW or list(indices) == list(
    range(indices[0], indices[-1] + 1)
  ):
    return f'{indices[0]} to {indices[-1]}'
  return ', '.join(map(str, indices))
