"""WebShop as an environment of the service.

A task is a goal: its index is the published number of the goal, after the
shuffle, among those that people wrote (`human`) or among those made of the
options of products (`synthetic`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator

from envs_server import env
from envs_server.webshop import (
  files,
  nouns,
  pages,
  products,
  session,
  shopper,
  store,
)

# Environment variable with the index by which a service tells its workers what
# it found.
_INDEX = 'PLANPO_WEBSHOP_INDEX'
_TYPES = ('human', 'synthetic')
_SPLITS = ('train', 'dev', 'test')
_OBSERVATION, _ATTRIBUTES = 'observation', 'attributes'
# The first value of each is what a task has that names none.
_OPTIONS = {
  _OBSERVATION: ('text', 'text_rich'),
  _ATTRIBUTES: ('hidden', 'shown'),
}
_FULL_SCORE = 100.0
# So often `check` says that it gets on. Whoever starts a service gives it up
# after 120 s without such a line.
_BEAT_S = 30.0
_ACTION_FORMAT = (
  'One action a turn: search[WORDS], which works on any page, or click[NAME] '
  'with the name of something that the page shows: the code of a product, such '
  'as click[b09qkp7xql]; a value of an option, such as click[red]; or a '
  'button, such as click[next >], click[< prev], click[back to search], '
  'click[description], click[features] and click[buy now], which ends the '
  'episode. Anything else changes nothing.'
)


def check() -> None:
  """Prints which products and goals were found; builds their index if needed.

  Raises:
    RuntimeError: the data are missing or damaged, or spaCy is.
  """
  with _beating():
    try:
      path = _find(lambda line: _say(env.PREPARING + line))
      opened = store.Store.open(path)
    except (OSError, ValueError) as error:
      raise RuntimeError(str(error)) from error
    table = _table(opened, path)
  # Workers open this instead of looking for themselves: those that are built
  # later must not take another goal for a task.
  os.environ[_INDEX] = str(path)
  _say(table)


class WebShop:
  """A shop, in which one customer after the other buys something.

  Score is 100 x the reward of the purchase, which ends the episode.
  """

  def __init__(self):
    path = os.environ.get(_INDEX)
    self._store = store.Store.open(pathlib.Path(path) if path else _find())
    self._tagger = nouns.load()
    self._tagger.nouns('')  # Reads a model now rather than in an episode.

  def catalog(self) -> env.Catalog:
    """See `env.TextEnv`."""
    return env.Catalog(
      version=f'webshop 1, {_data(self._store)}, nouns by {self._tagger.name}',
      action_format=_ACTION_FORMAT,
      indices={
        split: {name: self._store.goals[name].splits[split] for name in _TYPES}
        for split in _SPLITS
      },
      options=_OPTIONS,
    )

  def reset(
    self, task: env.Task, expert: bool = False, admissible: bool = False
  ) -> env.Observation:
    """See `env.TextEnv`. The seed of a task changes nothing."""
    values = {name: _value(task, name) for name in _OPTIONS}
    self._show = getattr(pages, values[_OBSERVATION])
    self._admissible = admissible
    self._shop = _Shop(self._store, task)
    goal = self._shop.goal()
    solution = ()
    if expert:
      solution = shopper.solve(self._shop, goal, self._tagger)
    self._session = session.Session(
      self._shop,
      goal,
      self._tagger,
      attributes=values[_ATTRIBUTES] == 'shown',
    )
    return self._observe(goal=goal.instruction, expert_actions=solution)

  def step(self, action: str) -> env.Observation:
    """See `env.TextEnv`."""
    self._session.step(action)
    return self._observe()

  def ping(self) -> None:
    """See `env.TextEnv`."""

  def close(self) -> None:
    """See `env.TextEnv`."""

  def _observe(self, **fields) -> env.Observation:
    played = self._session
    outcome = played.outcome
    info = {'page': played.page.name}
    if outcome:
      info |= {
        'asin': self._shop.product(played.row).asin,
        'chosen': json.dumps(played.chosen),
        'reward_type': str(outcome.type),
        'reward_attributes': str(outcome.attributes),
        'reward_options': str(outcome.options),
        'reward_price': str(outcome.price),
      }
    return env.Observation(
      text=self._show(played.page),
      score=_FULL_SCORE * outcome.total if outcome else 0.0,
      success=bool(outcome and outcome.total == 1.0),
      terminated=outcome is not None,
      admissible=played.actions() if self._admissible else (),
      info=info,
      **fields,
    )


class _Shop:
  """The store in an episode; what cannot be read there breaks the task."""

  def __init__(self, opened: store.Store, task: env.Task):
    self._store, self._task = opened, task

  def goal(self) -> products.Goal:
    """Returns the goal of the task."""
    with self._reading():
      return self._store.goals[self._task.name][self._task.index]

  def product(self, row: int) -> products.Product:
    """See `session.Shop`."""
    with self._reading():
      return self._store.product(row)

  def search(self, text: str, k: int) -> list[int]:
    """See `session.Shop`."""
    with self._reading():
      return self._store.search(text, k)

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    try:
      yield
    except (ValueError, IndexError) as error:
      # Of files that were changed after they had been opened.
      raise env.BrokenTaskError(
        f'{self._task.name} {self._task.index} cannot be played, for the index '
        f'is damaged ({type(error).__name__}: {error}); remove it and start '
        'again, which builds it anew.'
      ) from error


@contextlib.contextmanager
def _beating() -> Iterator[None]:
  """Says every `_BEAT_S` seconds that what is done within goes on."""
  began = time.monotonic()
  over = threading.Event()

  def beat():
    while not over.wait(_BEAT_S):
      _say(
        f'{env.PREPARING}WebShop, for {time.monotonic() - began:.0f} s so far'
      )

  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def _find(say: store.Progress | None = None) -> pathlib.Path:
  """Returns the folder of what was built of the data; builds it if needed."""
  sources = files.locate(files.folder())
  if say:
    # Of two sizes one is taken, and a file may be missing.
    people = sources.human.name if sources.human else f'no {files.HUMAN}'
    say(f'{sources.items.name}, {sources.attributes.name}, {people}')
  return store.find_or_build(sources, limit=files.limit(), progress=say)


def _say(line: str) -> None:
  # At once, that no two threads write into each other's lines.
  sys.stderr.write(f'{line}\n')
  sys.stderr.flush()


def _value(task: env.Task, option: str) -> str:
  """The value that a task gives to an option.

  Raises:
    TaskError: it gives several.
  """
  given = [part for part in task.options.get(option, '').split(',') if part]
  if len(given) > 1:
    raise env.TaskError(
      f'option {option!r} has one value, not {task.options[option]!r}; name '
      f'one of {", ".join(_OPTIONS[option])}.'
    )
  return given[0] if given else _OPTIONS[option][0]


def _data(opened: store.Store) -> str:
  """Which data they are."""
  kind = 'generated products' if opened.generated else 'products'
  return f'{len(opened)} {kind} {opened.digest}'


def _table(opened: store.Store, path: pathlib.Path) -> str:
  """What was found, for people who start a service."""
  lines = [
    f'WebShop: {_data(opened)} in {path}, nouns by {nouns.load().name}',
    f'{"goals":12}' + ''.join(f'{split:>10}' for split in _SPLITS),
  ]
  for name in _TYPES:
    sizes = [len(opened.goals[name].splits[split]) for split in _SPLITS]
    lines.append(f'{name:12}' + ''.join(f'{size:>10}' for size in sizes))
  if not len(opened.goals['human']):
    lines.append(
      f'warning: there is no human goal; {files.HUMAN} is missing, or is of '
      'other products.'
    )
  if not any(opened.goals[name].splits['train'] for name in _TYPES):
    lines.append(
      'warning: there is no goal to train on: the first 1500 of each type are '
      'of test and dev; give more products.'
    )
  return '\n'.join(lines)
