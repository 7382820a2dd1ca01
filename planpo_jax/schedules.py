"""What changes as training goes on, besides the learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

RAMPS = ('constant', 'decay', 'increase')


def ramp(
  progress: jax.Array | float,
  *,
  initial: float,
  final: float,
  schedule: str,
) -> jax.Array | float:
  """Returns a weight at progress k/K, straight between two values.

  Args:
    progress: k/K; k counts the current step from 1.
    initial: `constant`: the value; `decay`: that towards k = 0; `increase`:
      that from k = K on.
    final: `decay`: from k = K on; `increase`: towards k = 0.
    schedule: one of `RAMPS`.

  Raises:
    ValueError: unknown `schedule`.
  """
  if schedule not in RAMPS:
    raise ValueError(
      f'schedule={schedule!r} is unknown; use one of {", ".join(RAMPS)}.'
    )
  if schedule == 'constant':
    return initial
  first, last = (initial, final) if schedule == 'decay' else (final, initial)
  return first + (last - first) * jnp.minimum(progress, 1.0)


def horizon(
  step: int, *, horizons: Sequence[int], horizon_steps: int, max_turns: int
) -> int:
  """Returns the turns that an episode may take.

  h(k) = horizons[min((k - 1) // horizon_steps, last)]

  Source: ScalingInter-RL, AgentGym-RL, arXiv 2509.08755. The paper gives no
  numbers; 10, 20 and 30 turns for 100 steps each are those of its code for
  ScienceWorld (preset `scaling_inter`).

  Args:
    step: k - 1, steps done before this one.
    horizons: turns of each phase; empty: `max_turns` throughout.
    horizon_steps: steps of a phase; the last one lasts to the end.
    max_turns: turns where there are no phases.
  """
  if not horizons:
    return max_turns
  return horizons[min(step // horizon_steps, len(horizons) - 1)]
