"""Which groups of a step are learnt from.

Source: dynamic sampling of DAPO, arXiv 2503.14476, equation 11: tasks are
played until enough groups have something to teach.

Departures: a group teaches when the method learns something from one of its
members (`advantages.Method.signal`). For methods that compare outcomes that is
DAPO's rule, returns that differ; PlanPO learns from groups that all succeed
too. Groups that teach nothing fill up a step that is still short at the last
refill, as in verl-agent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planpo_jax import episodes


def teaching_groups(
  batch_episodes: Sequence[episodes.Episode], signal_E: np.ndarray
) -> set[episodes.Task]:
  """Tasks of which some episode has a signal.

  Args:
    batch_episodes: as tabulated.
    signal_E: [E] bool, padding behind.
  """
  return {e.task for e, s in zip(batch_episodes, signal_E, strict=False) if s}


def choose(
  batch_episodes: Sequence[episodes.Episode],
  signal_E: np.ndarray,
  *,
  groups: int,
  drop: bool,
) -> list[episodes.Episode]:
  """The episodes of at most `groups` groups, those that teach first.

  Args:
    batch_episodes: as tabulated.
    signal_E: [E] bool, padding behind.
    groups: most groups kept; those played first are preferred.
    drop: leave groups that teach nothing out even if fewer remain, unless none
      teaches: then all stay as they are.

  Returns:
    The episodes kept, in their order.
  """
  order = list(dict.fromkeys(e.task for e in batch_episodes))
  teaching = teaching_groups(batch_episodes, signal_E)
  kept = [task for task in order if task in teaching]
  if not (drop and kept):
    kept += [task for task in order if task not in teaching]
  chosen = set(kept[:groups])
  return [e for e in batch_episodes if e.task in chosen]
