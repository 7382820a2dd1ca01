"""How many turns an episode may take, as training goes on.

Source: ScalingInter-RL, AgentGym-RL, arXiv 2509.08755. The paper gives no
numbers; 10, 20 and 30 turns for 100 steps each are those of its code for
ScienceWorld (preset `scaling_inter`).
"""

from __future__ import annotations

from collections.abc import Sequence


def at(
  step: int, *, horizons: Sequence[int], horizon_steps: int, max_turns: int
) -> int:
  """Returns h(k) = horizons[min((k - 1) // horizon_steps, last)].

  Args:
    step: k - 1, steps done before this one.
    horizons: turns of each phase; empty: `max_turns` throughout.
    horizon_steps: steps of a phase; the last one lasts to the end.
    max_turns: turns where there are no phases.
  """
  if not horizons:
    return max_turns
  return horizons[min(step // horizon_steps, len(horizons) - 1)]
