"""What a generated ALFWorld game is about, and its text as a planning problem.

The wheel of ALFWorld knows 120 rooms: the receptacles of each with the place
one stands at to use them, the types of object found there, and which object
may lie in which receptacle. From these this module lists the tasks that a room
allows (`tasks`) and draws where everything lies (`draw`). The games of the
benchmark come from a simulator with bodies and physics; here things are put
into receptacles by chance alone.

Departures from the benchmark's problems: fixtures of which the wheel tells no
place (stove burners, coffee machines, holders) stand at a place drawn once for
each room; no fact tells distances, as no action reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import random
import re
import types as python_types
from collections.abc import Collection, Mapping, Sequence

from envs_server import alfworld_data

# What an object must be for a type, where it must be something.
_ABILITIES = {
  'pick_clean_then_place_in_recep': 'Cleanable',
  'pick_heat_then_place_in_recep': 'Heatable',
  'pick_cool_then_place_in_recep': 'Coolable',
}
# What cleans, heats and cools. The object neither starts there nor ends there:
# what lies in a fridge should be cool already.
_TOOLS = {
  'Cleanable': 'SinkBasin',
  'Heatable': 'Microwave',
  'Coolable': 'Fridge',
}
LAMP = 'DeskLamp'
# Things that nobody can take, and what they stand on. Floor lamps stand in no
# receptacle and so satisfy no goal.
_SCENERY = {
  LAMP: ('Desk', 'SideTable', 'Dresser', 'CoffeeTable', 'DiningTable', 'Shelf'),
  'HousePlant': ('SideTable', 'CounterTop', 'DiningTable', 'Dresser', 'Desk'),
  'Television': ('TVStand', 'Dresser', 'SideTable', 'CoffeeTable', 'Desk'),
}
# Receptacles with room for one thing.
_NARROW = (
  'CoffeeMachine',
  'HandTowelHolder',
  'StoveBurner',
  'Toaster',
  'ToiletPaperHanger',
  'TowelHolder',
)
# Fixtures that a room holds several of.
_COPIES = {'StoveBurner': 4}
_GRID = 0.25  # Metres between two places to stand.
_MANGLE = {'-': '_minus_', '|': '_bar_', '+': '_plus_', '.': '_dot_'}


@dataclasses.dataclass(frozen=True)
class Room:
  """One of the wheel's floor plans.

  Attributes:
    number: of the floor plan, 1 to 430.
    kind: Kitchen, LivingRoom, Bedroom or Bathroom.
    receptacles: place to stand, (x, z, quarter turns, degrees down) with x and
      z in steps of a quarter of a metre, by receptacle (`Desk|-01.29|...`).
    things: types found there, sorted.
    free: places to stand at which no receptacle is.
  """

  number: int
  kind: str
  receptacles: Mapping[str, tuple[int, int, int, int]]
  things: Sequence[str]
  free: Sequence[tuple[int, int, int, int]]

  @functools.cached_property
  def kinds(self) -> Mapping[str, Sequence[str]]:
    """Receptacles by their type, both sorted."""
    kinds: dict[str, list[str]] = {}
    for receptacle in sorted(self.receptacles, key=lambda r: (type_of(r), r)):
      kinds.setdefault(type_of(receptacle), []).append(receptacle)
    return kinds


@dataclasses.dataclass(frozen=True, order=True)
class Task:
  """What the player is told to do, and where.

  Attributes:
    type: one of `alfworld_data.TYPES`.
    thing: type of the object to take.
    target: type of the receptacle it goes to, or the lamp to look at it by.
    room: number of the floor plan.
  """

  type: str
  thing: str
  target: str
  room: int

  @property
  def folder(self) -> str:
    """Its folder's name in the official layout."""
    return f'{self.type}-{self.thing}-None-{self.target}-{self.room}'


@dataclasses.dataclass(frozen=True)
class Problem:
  """A task with all that it takes to play it.

  Attributes:
    task: what to do.
    sentence: the task in words.
    pddl: the problem for the engine.
    core: the same without what one short way to win leaves alone: an easier
      one for the planner, with the same names for what is left.
    least: number of actions of that way.
  """

  task: Task
  sentence: str
  pddl: str
  core: str
  least: int


@functools.cache
def wheel() -> pathlib.Path:
  """Folder of the installed ALFWorld.

  Found without importing it, as the import makes a folder in the user's home.

  Raises:
    RuntimeError: it is not installed.
  """
  spec = importlib.util.find_spec('alfworld')
  if spec is None or not spec.submodule_search_locations:
    raise RuntimeError(f'ALFWorld is not installed: {alfworld_data.INSTALL}')
  return pathlib.Path(spec.submodule_search_locations[0])


@functools.cache
def _module(name: str) -> python_types.ModuleType:
  """A module of the wheel that holds tables only."""
  path = wheel() / 'gen' / f'{name}.py'
  spec = importlib.util.spec_from_file_location(f'_alfworld_{name}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def type_of(identifier: str) -> str:
  """`Desk` of `Desk|...`, `SinkBasin` of `Sink|...|SinkBasin`."""
  parts = identifier.split('|')
  return parts[4] if len(parts) == 5 else parts[0]


@functools.cache
def _fixed() -> frozenset[str]:
  """Types of receptacle that nobody can carry."""
  constants = _module('constants')
  return frozenset(constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET)


@functools.cache
def _homes(thing: str) -> tuple[str, ...]:
  """Types of fixed receptacle that a thing may lie in, sorted."""
  holds = _module('constants').VAL_RECEPTACLE_OBJECTS
  return tuple(sorted(r for r in _fixed() if thing in holds.get(r, ())))


def rooms(split: str) -> tuple[int, ...]:
  """Numbers of the floor plans that a split plays in."""
  constants = _module('constants')
  if split == 'valid_unseen':
    return tuple(constants.TEST_SCENE_NUMBERS)
  return tuple(constants.TRAIN_SCENE_NUMBERS)


def kinds() -> tuple[str, ...]:
  """Names of the kinds of room."""
  return tuple(_module('constants').SCENE_TYPE)


@functools.cache
def room(number: int) -> Room:
  """Reads a floor plan."""
  import numpy as np

  layouts = wheel() / 'gen' / 'layouts'
  stem = f'FloorPlan{number}'
  standing = json.loads((layouts / f'{stem}-openable.json').read_text())
  things = json.loads((layouts / f'{stem}-objects.json').read_text())
  points = sorted(
    (round(x / _GRID), round(z / _GRID))
    for x, z in np.load(layouts / f'{stem}-layout.npy').tolist()
  )
  receptacles: dict[str, tuple[int, int, int, int]] = {}
  for name, (x, z, turn, tilt) in sorted(standing.items()):
    place = (round(x / _GRID), round(z / _GRID), round(turn / 90), round(tilt))
    # A player who stands before two would be told of one of them only.
    while place in receptacles.values():
      place = (*place[:3], place[3] + 15)
    if type_of(name) in _fixed():
      receptacles[name] = place
  # The same for every game in this room, whatever its seed.
  rng = random.Random(stem)
  told = {type_of(name) for name in receptacles}
  taken = {place[:2] for place in receptacles.values()}
  open_points = [p for p in points if p not in taken]
  rng.shuffle(open_points)
  for kind in sorted((set(things) & _fixed()) - told):
    for copy in range(_COPIES.get(kind, 1)):
      x, z = open_points.pop()
      # A hand's breadth to the side, so that no two names are equal.
      name = _identifier(kind, x * _GRID + 0.4, 0.9 + copy / 10, z * _GRID)
      receptacles[_basin(name)] = (x, z, 1, 30)
  kind = next(
    k for k, r in _module('constants').SCENE_TYPE.items() if number in r
  )
  return Room(
    number,
    kind,
    receptacles,
    tuple(sorted(set(things))),
    tuple((x, z, turn, 30) for x, z in open_points for turn in range(4)),
  )


def _identifier(kind: str, x: float, y: float, z: float) -> str:
  return f'{kind}|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}'


def _basin(name: str) -> str:
  """The engine counts basins by this form of their names only."""
  kind = type_of(name)
  if kind.endswith('Basin'):
    return name.replace(kind, kind.removesuffix('Basin')) + f'|{kind}'
  return name


@functools.cache
def tasks(kind: str, number: int) -> tuple[Task, ...]:
  """All tasks of one type that a room allows, sorted.

  Each thing has a place to start that is not of the target's type, and a
  target is a receptacle that can hold as many as the task wants.
  """
  constants = _module('constants')
  here = room(number)
  if here.kind not in constants.GOALS_VALID[kind]:
    return ()
  ability = _ABILITIES.get(kind)
  tool = _TOOLS.get(ability)
  if tool and tool not in here.kinds:
    return ()
  found = []
  for thing in here.things:
    if ability and thing not in constants.VAL_ACTION_OBJECTS[ability]:
      continue
    homes = [h for h in _homes(thing) if h in here.kinds and h != tool]
    if kind == 'look_at_obj_in_light':
      lamp = any(s in here.kinds for s in _SCENERY[LAMP])
      if homes and lamp and LAMP in here.things:
        found.append(Task(kind, thing, LAMP, number))
      continue
    for target in homes:
      if kind == 'pick_two_obj_and_place' and target in _NARROW:
        continue
      if _start_homes(here, thing, target, tool):
        found.append(Task(kind, thing, target, number))
  return tuple(sorted(found))


def _start_homes(
  here: Room, thing: str, target: str, tool: str | None
) -> list[str]:
  """Types of receptacle that copies of the target's type may start in.

  Those with room for one only are left out: a task may want three copies.
  """
  banned = (target, tool, *_NARROW)
  return [h for h in _homes(thing) if h in here.kinds and h not in banned]


def draw(task: Task, rng: random.Random, name: str) -> Problem:
  """Draws where everything lies at the start of a game.

  Args:
    task: what to do.
    rng: decides all that is left to chance.
    name: of the problem.
  """
  here = room(task.room)
  tool = _TOOLS.get(_ABILITIES.get(task.type))
  lies: dict[str, str] = {}
  room_for = {
    r: 1 if type_of(r) in _NARROW else len(here.things) * 3
    for r in here.receptacles
  }

  def put(thing: str, homes: Sequence[str]) -> None:
    """A type of receptacle first, so that many drawers draw no more."""
    wide = [h for h in homes if any(room_for[r] for r in here.kinds.get(h, ()))]
    if not wide:
      return
    home = rng.choice([r for r in here.kinds[rng.choice(wide)] if room_for[r]])
    room_for[home] -= 1
    x, z, turn, _ = here.receptacles[home]
    # In front of the one who stands there, somewhere on the surface.
    east, north = ((0, 1), (1, 0), (0, -1), (-1, 0))[turn % 4]
    while True:
      spot = _identifier(
        thing,
        x * _GRID + 0.6 * east + rng.uniform(-0.3, 0.3),
        rng.uniform(0.4, 1.2),
        z * _GRID + 0.6 * north + rng.uniform(-0.3, 0.3),
      )
      if spot not in lies:
        lies[spot] = home
        return

  most = (2, 3) if task.type == 'pick_two_obj_and_place' else (1, 3)
  homes = _start_homes(here, task.thing, task.target, tool)
  for _ in range(rng.randint(*most)):
    put(task.thing, homes)
  for thing in here.things:
    if thing in _SCENERY:
      put(thing, _SCENERY[thing])
    elif thing != task.thing and _homes(thing) and rng.random() < 0.7:
      for _ in range(rng.choice((1, 1, 2, 3))):
        put(thing, _homes(thing))
  library = _module('goal_library').gdict[task.type]
  template = rng.choice(library['templates'])
  words = {'obj': task.thing, 'recep': task.target, 'toggle': task.target}
  sentence = template.format(**{k: v.lower() for k, v in words.items()})
  goal = library['pddl'].format(**words)
  agent = rng.choice(here.free)
  # What a short way to win needs; the player is free to take others.
  moved, least = _short_way(task, lies)
  used = {*moved, *(lies[spot] for spot in moved)}
  for kind in (task.target, tool):
    if kind in here.kinds:
      used.add(rng.choice(here.kinds[kind]))
  hidden = {*lies, *here.receptacles} - used
  kept = {s: h for s, h in lies.items() if type_of(s) in (task.thing, LAMP)}
  return Problem(
    task,
    sentence,
    _pddl(task, here, lies, (), agent, goal, name),
    _pddl(task, here, kept, hidden, agent, goal, name),
    least,
  )


def _short_way(
  task: Task, lies: Mapping[str, str]
) -> tuple[tuple[str, ...], int]:
  """The things that a shortest way to win uses, and its number of actions."""
  openable = _module('constants').OPENABLE_CLASS_SET
  copies = sorted(spot for spot in lies if type_of(spot) == task.thing)
  # Go there, open it, take the thing.
  fetch = {c: 2 + (type_of(lies[c]) in openable) for c in copies}
  if task.target == LAMP:
    lamp = next(spot for spot in lies if type_of(spot) == LAMP)
    # Go there, use it.
    cost = {c: n + 1 + (lies[c] != lies[lamp]) for c, n in fetch.items()}
    best = min(cost, key=cost.__getitem__)
    return (best, lamp), cost[best]
  # Go there, open it, move the thing.
  bring = 2 + (task.target in openable)
  if task.type == 'pick_two_obj_and_place':
    # A second way to the same receptacle finds it open.
    pairs = {
      (a, b): fetch[a] + (2 if lies[a] == lies[b] else fetch[b])
      for a, b in itertools.combinations(copies, 2)
    }
    pair = min(pairs, key=pairs.__getitem__)
    return pair, pairs[pair] + bring + 2
  best = min(fetch, key=fetch.__getitem__)
  # Go to the tool, use it.
  return (best,), fetch[best] + bring + 2 * (task.type in _ABILITIES)


def _pddl(
  task: Task,
  here: Room,
  lies: Mapping[str, str],
  hidden: Collection[str],
  agent: tuple[int, int, int, int],
  goal: str,
  name: str,
) -> str:
  """The problem's text; every list in it is sorted.

  Args:
    task: what to do.
    here: where.
    lies: receptacle by thing.
    hidden: receptacles and things that are nowhere and count for the names.
    agent: where the player stands.
    goal: end of the text.
    name: of the problem.
  """
  constants = _module('constants')
  abilities = constants.VAL_ACTION_OBJECTS

  def location(place: tuple[int, int, int, int]) -> str:
    return 'loc|' + '|'.join(str(part) for part in place)

  things = sorted(lies)
  receptacles = sorted(here.receptacles)
  places = {*here.receptacles.values(), agent}
  # The domain names types that a room need not hold.
  otypes = sorted(constants.OBJECTS_SET - _fixed())
  objects = [
    'agent1 # agent',
    *(f'{kind}Type # otype' for kind in otypes),
    *(f'{kind}Type # rtype' for kind in sorted(_fixed())),
    *(f'{thing} # object' for thing in things),
    *(f'{receptacle} # receptacle' for receptacle in receptacles),
    *(f'{location(place)} # location' for place in sorted(places)),
  ]
  facts = [f'(atLocation agent1 {location(agent)})']
  for receptacle in receptacles:
    kind = type_of(receptacle)
    facts.append(f'(receptacleType {receptacle} {kind}Type)')
    if receptacle not in hidden:
      where = location(here.receptacles[receptacle])
      facts.append(f'(receptacleAtLocation {receptacle} {where})')
    if kind in constants.OPENABLE_CLASS_SET:
      facts.append(f'(openable {receptacle})')
  for kind in sorted(here.kinds):
    holds = constants.VAL_RECEPTACLE_OBJECTS.get(kind, ())
    for thing in sorted(set(here.things).intersection(holds)):
      facts.append(f'(canContain {kind}Type {thing}Type)')
  for thing in things:
    kind = type_of(thing)
    home = lies[thing]
    facts.append(f'(objectType {thing} {kind}Type)')
    if thing not in hidden:
      where = location(here.receptacles[home])
      facts.append(f'(inReceptacle {thing} {home})')
      facts.append(f'(objectAtLocation {thing} {where})')
    if kind not in _SCENERY:
      facts.append(f'(pickupable {thing})')
    for ability in ('Cleanable', 'Heatable', 'Coolable', 'Sliceable'):
      if kind in abilities[ability]:
        facts.append(f'({ability.lower()} {thing})')
    if kind == LAMP and task.target == LAMP:
      facts.append(f'(toggleable {thing})')
    if kind in constants.MOVABLE_RECEPTACLES_SET:
      facts.append(f'(isReceptacleObject {thing})')
  text = '\n'.join(
    (
      '(:objects',
      *(f'    {line}' for line in objects),
      '  )',
      '  (:init',
      *(f'    {line}' for line in facts),
      '  )',
    )
  )
  text = re.sub('[-|+.]', lambda match: _MANGLE[match[0]], text)
  # The library's goals end the whole definition.
  text += re.sub(r'\n\s*', '\n  ', goal).rstrip() + '\n'
  head = f'(define (problem {name})\n  (:domain alfred)\n  '
  return head + text.replace(' # ', ' - ')
