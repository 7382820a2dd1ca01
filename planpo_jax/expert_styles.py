"""How the solution of a task is played and worded for others to imitate.

A solution is rewritten in one of these styles, and every action gets a thought,
so that episodes succeed in ways that differ in turns and in tokens: what PlanPO
then tells apart. An environment that lacks the commands plays `gold`.

  gold: the solution as the environment gives it.
  brisk: without needless `open door to X` and without `look around`.
  teleport: each walk through rooms becomes one `teleport to X`, and the `look
    around` after it is left out half of the time.
  search: the solution goes straight to what it takes; here some other places
    are looked into first, as by somebody who does not know where things are.
  browse: the solution buys at once; here other pages of the product are read
    first.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from planpo_jax import episodes

STYLES = ('browse', 'brisk', 'gold', 'search', 'teleport')

# Commands that change nothing that a task asks for, by environment.
DETOURS = {
  'alfworld': ('look', 'inventory'),
  'sciworld': ('look around', 'inventory', 'wait1'),
  'toy': ('look',),
}
# Styles of one environment alone.
_STYLE_OF = {'browse': 'webshop', 'search': 'alfworld'}
# ScienceWorld simplifications without which a style has no commands to use.
_STYLE_NEEDS = {'brisk': 'openDoors', 'teleport': 'teleportAction'}

# Share of the steps whose thought is in the other manner than its episode.
_MANNER_NOISE = 0.15
_OBJECTIVE_WORDS = 40

# Most places that `search` looks into before one thing is taken.
_SEARCHES = 3
# Chance of each page that `browse` may read.
_BROWSES = 0.5

_OPEN_DOOR = re.compile(r'open door to (.+)')
_GO = re.compile(r'go to (.+)')
# Of ALFWorld: a place in its first text, and a thing that is taken.
_PLACE = re.compile(r'\ban? ([a-z]+ \d+)')
_TAKE = re.compile(r'take ((.+?)(?: \d+)?) from .+')
# Of WebShop: the end of each goal, which no choice of words can depend on.
_PRICE = re.compile(r', and price lower than [\d.]+ dollars$')


@dataclasses.dataclass(frozen=True)
class Move:
  """One action of a rewritten solution.

  Attributes:
    action: what to play.
    fallback: the part of the solution it stands for, played when the
      environment refuses the action; empty where both are the same.
    place: where the action leads, if it shall be opened next where it is
      closed; empty otherwise.
    kind: of the thing that is looked for there; empty for a move that is part
      of the solution.
  """

  action: str
  fallback: tuple[str, ...] = ()
  place: str = ''
  kind: str = ''


def rewrite(
  actions: Sequence[str],
  style: str,
  rng: np.random.Generator,
  places: Sequence[str] = (),
) -> tuple[Move, ...]:
  """Returns a solution in another style.

  Args:
    actions: the solution as the environment gives it.
    style: one of `STYLES`.
    rng: drawn from for `browse`, `search` and `teleport` only.
    places: that `search` may look into.

  Raises:
    ValueError: unknown style.
  """
  if style == 'gold':
    return tuple(Move(action) for action in actions)
  if style == 'brisk':
    return _rewrite_brisk(actions)
  if style == 'teleport':
    return _rewrite_teleport(actions, rng)
  if style == 'search':
    return _rewrite_search(actions, rng, places)
  if style == 'browse':
    return _rewrite_browse(actions, rng)
  raise ValueError(f'Unknown style {style!r}; the styles are {STYLES}.')


def _rewrite_brisk(actions: Sequence[str]) -> tuple[Move, ...]:
  moves = []
  skipped: list[str] = []
  for action in actions:
    if action == 'look around' or _OPEN_DOOR.fullmatch(action):
      skipped.append(action)
      continue
    moves.append(Move(action, (*skipped, action) if skipped else ()))
    skipped = []
  # A tail has no action to fall back from, and may be what time is won with.
  moves.extend(Move(action) for action in skipped)
  return tuple(moves)


def _rewrite_teleport(
  actions: Sequence[str], rng: np.random.Generator
) -> tuple[Move, ...]:
  moves = []
  start = 0
  while start < len(actions):
    stop, place = start, None
    while stop < len(actions):
      go = _GO.fullmatch(actions[stop])
      if not go and not _OPEN_DOOR.fullmatch(actions[stop]):
        break
      place = go[1] if go else place
      stop += 1
    if place is None:
      stop = start + 1
      moves.append(Move(actions[start]))
    else:
      walk = tuple(actions[start:stop])
      moves.append(Move(f'teleport to {place}', walk))
      looks = stop < len(actions) and actions[stop] == 'look around'
      if looks and rng.random() < 0.5:
        stop += 1
    start = stop
  return tuple(moves)


def _rewrite_search(
  actions: Sequence[str], rng: np.random.Generator, places: Sequence[str]
) -> tuple[Move, ...]:
  moves: list[Move] = []
  unseen = [places[i] for i in rng.permutation(len(places))]
  left = collections.deque(actions)
  while left:
    action = left.popleft()
    place = ''
    if go := _GO.fullmatch(action):
      unseen = [other for other in unseen if other != go[1]]
      if kind := _taken_there(left):
        count = int(rng.integers(_SEARCHES + 1))
        visits, unseen = unseen[:count], unseen[count:]
        moves += [Move(f'go to {visit}', (), visit, kind) for visit in visits]
      if left and left[0] == f'open {go[1]}':
        # It is open already, if somebody looked into it before.
        left.popleft()
        place = go[1]
    moves.append(Move(action, (), place))
  return tuple(moves)


def _taken_there(actions: Iterable[str]) -> str:
  """The kind of thing that is taken before one goes on; empty if none is."""
  for action in actions:
    if take := _TAKE.fullmatch(action):
      return take[2]
    if _GO.fullmatch(action):
      break
  return ''


def _rewrite_browse(
  actions: Sequence[str], rng: np.random.Generator
) -> tuple[Move, ...]:
  moves: list[Move] = []
  for before, action in zip(('', *actions), actions, strict=False):
    moves.append(Move(action))
    found = before.startswith('search[') or before == 'click[next >]'
    if found and action != 'click[next >]':  # It opened the product.
      for page in ('description', 'features'):
        if rng.random() < _BROWSES:
          moves += [Move(f'click[{page}]'), Move('click[< prev]')]
  return tuple(moves)


def places(text: str) -> list[str]:
  """Places that a text names, in its order, for `rewrite`."""
  return _PLACE.findall(text)


def shown(kind: str, text: str) -> set[str]:
  """Things of a kind that a text names, such as `mug 2`."""
  return set(re.findall(rf'\b{re.escape(kind)} \d+\b', text))


def known(kind: str, actions: Iterable[str], texts: Iterable[str]) -> bool:
  """Whether the texts show a thing of this kind that no action took."""
  taken = {take[1] for action in actions if (take := _TAKE.fullmatch(action))}
  return any(shown(kind, text) - taken for text in texts)


def playable(style: str, task: episodes.Task) -> str:
  """Returns `style`, or `gold` where the task has no commands for it."""
  if style == 'gold' or _STYLE_OF.get(style) == task.env:
    return style
  if style in _STYLE_OF or task.env != 'sciworld':
    return 'gold'
  given = dict(task.options).get('simplifications', '').split(',')
  allowed = {name.strip() for name in given}
  return style if allowed & {'easy', _STYLE_NEEDS[style]} else 'gold'


@dataclasses.dataclass(frozen=True)
class _Phrase:
  """How a thought words the actions that `pattern` matches wholly.

  `{0}`, `{1}` stand for the groups of the pattern; `plan` follows "to".
  """

  pattern: re.Pattern[str]
  plan: str
  terse: tuple[str, ...]


def _phrases(
  *rows: tuple[str, str, tuple[str, ...]],
) -> tuple[_Phrase, ...]:
  return tuple(_Phrase(re.compile(row[0]), *row[1:]) for row in rows)


# By environment; before those of all.
_OWN_PHRASES = {
  'alfworld': _phrases(
    (r'open (.+)', 'open the {0}', ('Open it.', 'What is in it?')),
    (r'close (.+)', 'close the {0}', ('Close it.', 'Shut it again.')),
    (
      r'take (.+) from (.+)',
      'take the {0} from the {1}',
      ('Take it.', 'Take the {0}.'),
    ),
    (
      r'(?:move|put) (.+) (?:to|in|on|in/on|into) (.+)',
      'put the {0} in or on the {1}',
      ('Put it there.', 'It belongs here.'),
    ),
    (r'use (.+)', 'turn on the {0}', ('Turn it on.', 'Use the {0}.')),
    (
      r'(clean|heat|cool) (.+) with (.+)',
      '{0} the {1} with the {2}',
      ('Now {0} it.', 'Use the {2}.'),
    ),
    (
      r'examine (.+)',
      'look closely at the {0}',
      ('Look closely.', 'Examine it.'),
    ),
  ),
  'webshop': _phrases(
    (r'search\[(.+)\]', 'search for {0}', ('Search for it.', 'Find {0}.')),
    (r'click\[buy now\]', 'buy it', ('Buy it.', 'This is it.')),
    (r'click\[next >\]', 'see more results', ('More.', 'See more results.')),
    (r'click\[< prev\]', 'go back', ('Back.', 'Go back.')),
    (
      r'click\[(description|features)\]',
      'read the {0}',
      ('Read the {0}.', 'What are its {0}?'),
    ),
    (r'click\[(.+)\]', 'choose {0}', ('Choose {0}.', 'Take {0}.')),
  ),
}
_PHRASES = _phrases(
  (
    r'(?:go|teleport) to (.+)',
    'go to the {0}',
    ('To the {0}.', 'Now the {0}.'),
  ),
  (_OPEN_DOOR.pattern, 'open the door to the {0}', ('Open the door.',)),
  (r'focus on (.+)', 'focus on the {0}', ('Now focus.', 'Focus on it.')),
  (
    r'move (.+) to (.+)',
    'move the {0} to the {1}',
    ('Move it.', 'Now move it.'),
  ),
  (
    r'(?:pick up|take) (.+)',
    'pick up the {0}',
    ('Pick it up.', 'Take it.'),
  ),
  (r'look(?: around)?', 'look around', ('Look around.', 'What is here?')),
  (r'inventory', 'check the inventory', ('Check the inventory.',)),
  (r'wait\d*', 'wait a moment', ('Wait a bit.', 'Just wait.')),
)


def _word_action(action: str, env: str) -> tuple[str, tuple[str, ...]]:
  """Returns the plan (an infinitive) and the terse thoughts of an action."""
  for phrase in (*_OWN_PHRASES.get(env, ()), *_PHRASES):
    if match := phrase.pattern.fullmatch(action):
      groups = match.groups()
      terse = tuple(text.format(*groups) for text in phrase.terse)
      return phrase.plan.format(*groups), terse
  head = ' '.join(action.split()[:2])
  return action, (f'Now {head}.', f'Next: {head}.')


def _objective(goal: str) -> str:
  """Returns a goal as an infinitive: 'find a plant, then move it to ...'."""
  goal = _PRICE.sub('', goal)
  sentences = re.split(r'(?<=\.)\s+', goal.strip())
  first = sentences[0].rstrip('.')
  if task := re.fullmatch(r'Your task is to:? (.+)', first, re.DOTALL):
    first = task[1]
  else:
    first = f'reach this goal: {first}'
  more = [
    match[1].lower() + match[2].rstrip('.')
    for text in sentences[1:]
    if (match := re.fullmatch(r'(First|Then),?( .+)', text))
  ]
  whole = ', '.join([first, *more])
  text = whole if len(whole.split()) <= _OBJECTIVE_WORDS else first
  text = re.sub(r'\ba\(n\) (?=[aeiou])', 'an ', text)
  return text.replace('a(n) ', 'a ')


def think(
  goal: str,
  action: str,
  env: str,
  *,
  wordy: bool,
  first: bool,
  rng: np.random.Generator,
) -> str:
  """Words why `action` comes next, from the goal and the action alone."""
  plan, terse = _word_action(action, env)
  if rng.random() < _MANNER_NOISE:
    wordy = not wordy
  if not wordy:
    return terse[rng.integers(len(terse))]
  objective = _objective(goal)
  order = 'first' if first else 'now'
  templates = (
    f'My task is to {objective}. I should {order} {plan}.',
    f'I have to {objective}. The {"first" if first else "next"} step is to'
    f' {plan}.',
    f'I should {order} {plan}, because my task is to {objective}.',
  )
  return templates[rng.integers(len(templates))]
