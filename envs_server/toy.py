"""A small text game in pure Python, for tests and first steps.

Rooms lie in a row. Some can also be reached by a shortcut, so there is a
longer way to the same success; `look` and `inventory` are detours; one room
has a well that ends the game. Scores go from 0 to 100 in parts.

Task types, by length: `fetch` (take a thing), `unlock` (take a key, open a
door elsewhere), `deliver` (take a parcel, give it to somebody elsewhere).
"""

from __future__ import annotations

import random

from envs_server import env

# Of a worker process, for those who plan.
MEMORY_MB = 20
_SIZES = {'train': 64, 'dev': 32, 'test': 32}
_ROOMS = (
  'attic',
  'cellar',
  'chapel',
  'garden',
  'hall',
  'kitchen',
  'library',
  'pantry',
  'stable',
  'studio',
  'tower',
  'workshop',
)
_THINGS = {
  'fetch': ('lamp', 'book', 'apple', 'coin', 'rope', 'bell'),
  'unlock': ('brass key', 'iron key', 'silver key', 'bone key'),
  'deliver': ('parcel', 'letter', 'basket', 'hat'),
}
_PEOPLE = ('cook', 'gardener', 'smith', 'librarian')
# Rooms from the start to the thing, and from the thing to the target.
_DISTANCES = {
  'fetch': ((2, 3), (0,)),
  'unlock': ((0, 1), (2, 3)),
  'deliver': ((1, 2), (3, 4)),
}
_UNKNOWN_ACTION = 'No known action matches that input.'
_IMPOSSIBLE = 'You cannot do that here.'
_ACTION_FORMAT = (
  'One command a turn: look, inventory, go east, go west, take shortcut, '
  'take THING, open door, give THING to PERSON, enter well (deadly).'
)


def make_env() -> Toy:
  return Toy()


class Toy:
  """The game; see the head of this file."""

  def catalog(self) -> env.Catalog:
    """See `env.TextEnv`."""
    return env.Catalog(
      version='toy 1',
      action_format=_ACTION_FORMAT,
      indices={
        split: {name: range(size) for name in _THINGS}
        for split, size in _SIZES.items()
      },
    )

  def reset(
    self, task: env.Task, expert: bool = False, admissible: bool = False
  ) -> env.Observation:
    """See `env.TextEnv`."""
    draw = random.Random(f'{task.name}/{task.split}/{task.index}/{task.seed}')
    to_thing, to_target = map(draw.choice, _DISTANCES[task.name])
    self._name = task.name
    self._thing = draw.choice(_THINGS[task.name])
    self._person = draw.choice(_PEOPLE)
    self._rooms = draw.sample(_ROOMS, to_thing + to_target + 2)
    # Positions in the row; it is mirrored in half of the tasks.
    self._at, self._thing_at = 0, to_thing
    self._target_at = to_thing + to_target
    self._well_at = self._target_at + 1
    ends = (0, to_thing)
    if task.name != 'fetch':
      ends = (to_thing, self._target_at)
    self._shortcut = {ends[0]: ends[1], ends[1]: ends[0]}
    self._mirrored = draw.random() < 0.5
    self._holding = False
    self._score = 0.0
    self._over = False
    self._admissible = admissible
    # Every second expert walks, so that imitation leaves something to shorten.
    solution = self._solve(by_shortcut=task.index % 2 == 0) if expert else ()
    return self._observe(
      self._look(), goal=self._goal(), expert_actions=solution
    )

  def step(self, action: str) -> env.Observation:
    """See `env.TextEnv`."""
    action = ' '.join(action.lower().split())
    if action not in self._actions():
      text = _IMPOSSIBLE if action in self._commands() else _UNKNOWN_ACTION
    elif action == 'look':
      text = self._look()
    elif action == 'inventory':
      carried = f'the {self._thing}' if self._holding else 'nothing'
      text = f'You carry {carried}.'
    elif action == f'take {self._thing}':
      self._holding = True
      self._gain(100.0 if self._name == 'fetch' else 50.0)
      text = f'You take the {self._thing}.'
    elif action == 'enter well':
      self._over = True
      text = 'You fall into the well. You have lost.'
    elif action == 'open door':
      self._gain(100.0)
      text = f'You open the door with the {self._thing}. You have won.'
    elif action.startswith('give '):
      self._gain(100.0)
      text = f'The {self._person} thanks you. You have won.'
    else:
      self._at = self._moves()[action]
      if self._name == 'fetch' and self._at == self._thing_at:
        self._gain(50.0)
      if self._name == 'deliver' and self._holding:
        if self._at == self._target_at:
          self._gain(75.0)
      text = self._look()
    return self._observe(text)

  def ping(self) -> None:
    """See `env.TextEnv`."""

  def close(self) -> None:
    """See `env.TextEnv`."""

  def _observe(self, text: str, **fields) -> env.Observation:
    won = self._score == 100.0
    return env.Observation(
      text=text,
      score=self._score,
      success=won,
      terminated=won or self._over,
      admissible=tuple(self._actions()) if self._admissible else (),
      info={'room': self._rooms[self._at]},
      **fields,
    )

  def _gain(self, score: float) -> None:
    self._score = max(self._score, score)

  def _goal(self) -> str:
    if self._name == 'fetch':
      return f'Find and take the {self._thing}.'
    if self._name == 'unlock':
      return f'Take the {self._thing} and open the locked door with it.'
    return f'Take the {self._thing} and give it to the {self._person}.'

  def _look(self) -> str:
    seen = []
    if self._at == self._thing_at and not self._holding:
      seen.append(f'the {self._thing}')
    if self._at == self._target_at and self._name == 'unlock':
      seen.append('a locked door')
    if self._at == self._target_at and self._name == 'deliver':
      seen.append(f'the {self._person}')
    if self._at == self._well_at:
      seen.append('a deep well')
    exits = [move.removeprefix('go ') for move in self._moves()]
    exits = [exit_.removeprefix('take ') for exit_ in exits]
    return (
      f'You are in the {self._rooms[self._at]}. '
      f'You see {" and ".join(seen) or "nothing of use"}. '
      f'Exits: {", ".join(exits)}.'
    )

  def _moves(self) -> dict[str, int]:
    """The moves open here and where they lead."""
    forth, back = 'go east', 'go west'
    if self._mirrored:
      forth, back = back, forth
    moves = {}
    if self._at + 1 < len(self._rooms):
      moves[forth] = self._at + 1
    if self._at > 0:
      moves[back] = self._at - 1
    if self._at in self._shortcut:
      moves['take shortcut'] = self._shortcut[self._at]
    return moves

  def _actions(self) -> list[str]:
    """What can be done now."""
    actions = ['look', 'inventory', *self._moves()]
    if self._at == self._thing_at and not self._holding:
      actions.append(f'take {self._thing}')
    if self._at == self._target_at and self._holding:
      if self._name == 'unlock':
        actions.append('open door')
      if self._name == 'deliver':
        actions.append(f'give {self._thing} to {self._person}')
    if self._at == self._well_at:
      actions.append('enter well')
    return actions

  def _commands(self) -> set[str]:
    """Everything that is a command somewhere in some task."""
    things = [thing for group in _THINGS.values() for thing in group]
    return {
      'go east',
      'go west',
      'take shortcut',
      'open door',
      'enter well',
      *(f'take {thing}' for thing in things),
      *(f'give {thing} to {who}' for thing in things for who in _PEOPLE),
    }

  def _solve(self, *, by_shortcut: bool) -> tuple[str, ...]:
    """The way that goes forth alone, or by the shortcut where there is one."""
    forth = 'go west' if self._mirrored else 'go east'

    def way(start: int, end: int) -> list[str]:
      if by_shortcut and self._shortcut.get(start) == end:
        return ['take shortcut']
      return [forth] * (end - start)

    actions = [*way(0, self._thing_at), f'take {self._thing}']
    if self._name == 'fetch':
      return tuple(actions)
    actions += way(self._thing_at, self._target_at)
    if self._name == 'unlock':
      return (*actions, 'open door')
    return (*actions, f'give {self._thing} to {self._person}')
