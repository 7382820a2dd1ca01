"""Which tasks are played at which step: pure functions of (seed, step)."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from planpo_jax import episodes


def at(
  tasks: Sequence[episodes.Task],
  step: int,
  *,
  count: int,
  seed: int,
  refill: int = 0,
) -> list[episodes.Task]:
  """The `count` tasks of training step `step`, from 0.

  Every epoch visits each task once in an order of its own; so do the refills
  of a step, which number from 1, each in other orders. Nothing is remembered
  between steps, so a resumed run needs no cursor.
  """
  chosen = []
  for position in range(step * count, (step + 1) * count):
    epoch, offset = divmod(position, len(tasks))
    key = (seed, epoch, refill) if refill else (seed, epoch)
    order = np.random.default_rng(key).permutation(len(tasks))
    chosen.append(tasks[order[offset]])
  return chosen


def spread(tasks: Sequence[episodes.Task], count: int) -> list[episodes.Task]:
  """`count` tasks for evaluation: even over types and over their variations.

  With more asked for than there are, tasks come round again (each repeat is
  another episode of the same task).
  """
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
