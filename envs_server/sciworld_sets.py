"""Which of ScienceWorld's task types publications put together.

AgentGym (arXiv 2406.04151) and AgentGym-RL (arXiv 2509.08755) play 23 of the 30
types: all but growing plants, inclined planes and genetics. AgentGym-RL reports
200 test tasks in five columns; PlanPO (arXiv 2608.17289) uses the same table.

What is published of these columns are their names and sizes. `Measure` is known
to hold three types: a public reader of AgentGym's list (trace2env on GitHub,
scripts/collect_scienceworld_measurement.py) finds exactly 53 of the 200 in
them. The types of the other four are told by their names alone.

The list itself, `sciworld_test.json` of AgentGym's data (AgentEval), is
licensed for non-commercial use and is not part of this package. Who has it gets
its tasks by `read_list`. For everybody else `stand_in` draws as many tasks for
each column from the engine's test variations. They are other tasks: a score on
them has the weights of the published table, not its tasks.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence

# In the order of the engine's task numbers.
AGENTGYM23 = (
  'boil',
  'melt',
  'freeze',
  'change-the-state-of-matter-of',
  'use-thermometer',
  'measure-melting-point-known-substance',
  'measure-melting-point-unknown-substance',
  'power-component',
  'power-component-renewable-vs-nonrenewable-energy',
  'test-conductivity',
  'test-conductivity-of-unknown-substances',
  'find-living-thing',
  'find-non-living-thing',
  'find-plant',
  'find-animal',
  'chemistry-mix',
  'chemistry-mix-paint-secondary-color',
  'chemistry-mix-paint-tertiary-color',
  'lifespan-longest-lived',
  'lifespan-shortest-lived',
  'lifespan-longest-lived-then-shortest-lived',
  'identify-life-stages-1',
  'identify-life-stages-2',
)
COLUMNS: Mapping[str, Sequence[str]] = {
  'measure': (
    'use-thermometer',
    'measure-melting-point-known-substance',
    'measure-melting-point-unknown-substance',
  ),
  'test-cond': (
    'test-conductivity',
    'test-conductivity-of-unknown-substances',
  ),
  'find': (
    'find-living-thing',
    'find-non-living-thing',
    'find-plant',
    'find-animal',
  ),
  'chem-mix': (
    'chemistry-mix',
    'chemistry-mix-paint-secondary-color',
    'chemistry-mix-paint-tertiary-color',
  ),
  'lifespan': (
    'lifespan-longest-lived',
    'lifespan-shortest-lived',
    'lifespan-longest-lived-then-shortest-lived',
  ),
}
# Test tasks of AgentGym-RL in each column.
COLUMN_SIZES: Mapping[str, int] = {
  'measure': 53,
  'test-cond': 83,
  'find': 44,
  'chem-mix': 5,
  'lifespan': 15,
}


def sets(task_names: Sequence[str]) -> dict[str, tuple[str, ...]]:
  """{name of a set: its task types}, for `env.Catalog`.

  Args:
    task_names: all types of the engine.
  """
  found = {'all30': task_names, 'agentgym23': AGENTGYM23} | dict(COLUMNS)
  return {name: tuple(types) for name, types in found.items()}


def stand_in(test: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
  """200 test tasks in the proportions of AgentGym-RL's; not the same tasks.

  A column's number is shared evenly among its types, the first of them taking
  what remains over, and a type's share is spread evenly over its variations.

  Args:
    test: {task type: test variations} of the engine.

  Returns:
    {task type: variations}, with every type of `test` in the same order; empty
    for the types of no column.
  """
  shares: dict[str, int] = {}
  for column, names in COLUMNS.items():
    share, rest = divmod(COLUMN_SIZES[column], len(names))
    shares |= {name: share + (i < rest) for i, name in enumerate(names)}
  drawn = {}
  for name, variations in test.items():
    count = shares.get(name, 0)
    drawn[name] = tuple(
      variations[k * len(variations) // count] for k in range(count)
    )
  return drawn


def read_list(
  path: pathlib.Path, variations: Mapping[str, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
  """AgentGym's own tasks, from its list.

  AgentGym numbers the variations of its 23 types one after the other, in the
  order of `AGENTGYM23`; an item of the list is `{"item_id": "sciworld_606"}`.

  Args:
    path: the list, JSON.
    variations: {task type: number of variations} of the engine.

  Returns:
    {task type: variations} of the list, and of all tasks of the 23 types that
    it leaves to learn from. Both have every type of `variations`.

  Raises:
    RuntimeError: the file cannot be read, or an item names no task.
  """
  try:
    ids = [item['item_id'] for item in json.loads(path.read_text())]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise RuntimeError(
      f'{path} is not a list of {{"item_id": "sciworld_606"}} in JSON '
      f'({error!r})'
    ) from error
  numbered = [
    (name, index) for name in AGENTGYM23 for index in range(variations[name])
  ]
  listed = set()
  for item in ids:
    match = re.fullmatch(r'sciworld_([0-9]{1,9})', str(item))
    if not match or int(match[1]) >= len(numbered):
      raise RuntimeError(
        f'{path} names the item {item!r}; items are sciworld_0 to '
        f'sciworld_{len(numbered) - 1}'
      )
    listed.add(numbered[int(match[1])])
  in_list: dict[str, list[int]] = {name: [] for name in variations}
  left: dict[str, list[int]] = {name: [] for name in variations}
  for name, index in numbered:
    (in_list if (name, index) in listed else left)[name].append(index)
  return (
    {name: tuple(found) for name, found in in_list.items()},
    {name: tuple(found) for name, found in left.items()},
  )
