"""Which tasks are played at which step: pure functions of (seed, step)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from planpo_jax import episodes


def at(
  tasks: Sequence[episodes.Task], step: int, *, count: int, seed: int
) -> list[episodes.Task]:
  """The `count` tasks of training step `step`, from 0.

  Every epoch visits each task once in an order of its own. Nothing is
  remembered between steps, so a resumed run needs no cursor.
  """
  chosen = []
  for position in range(step * count, (step + 1) * count):
    epoch, offset = divmod(position, len(tasks))
    order = np.random.default_rng((seed, epoch)).permutation(len(tasks))
    chosen.append(tasks[order[offset]])
  return chosen


def refills(
  tasks: Sequence[episodes.Task], step: int, *, count: int, seed: int
) -> list[list[episodes.Task]]:
  """What a step may play besides, in lots of `count` tasks, the last smaller.

  No task of the step, none twice, all others once, in an order of the step's.
  """
  played = set(at(tasks, step, count=count, seed=seed))
  others = [task for task in dict.fromkeys(tasks) if task not in played]
  # A third number keeps it apart from the orders of epochs.
  order = np.random.default_rng((seed, step, 1)).permutation(len(others))
  return [
    [others[i] for i in order[first : first + count]]
    for first in range(0, len(others), count)
  ]


def spread(tasks: Sequence[episodes.Task], count: int) -> list[episodes.Task]:
  """`count` tasks for evaluation: even over types and over their variations.

  As many as there are: each task once, however uneven that is over types. With
  more asked for than there are, of a type or of all, tasks come round again
  (each repeat is another episode of the same task).

  Raises:
    ValueError: there are no tasks.
  """
  if not tasks:
    raise ValueError(
      'there are no tasks to evaluate on: the types of env.task_types have '
      'none in this split; name others, or another split.'
    )
  if count == len(tasks):
    return list(tasks)
  by_type: dict[str, list[episodes.Task]] = collections.defaultdict(list)
  for task in tasks:
    by_type[task.name].append(task)
  share, rest = divmod(count, len(by_type))
  chosen = []
  for i, members in enumerate(by_type.values()):
    wanted = share + (i < rest)
    if wanted <= len(members):
      picks = (np.arange(wanted) * len(members)) // max(wanted, 1)
    else:
      picks = np.arange(wanted) % len(members)
    chosen.extend(members[p] for p in picks)
  return chosen
