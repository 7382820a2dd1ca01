"""GRPO: the return of an episode against its group.

Source: DeepSeekMath, arXiv 2402.03300; numerics as in verl-agent.
"""

from __future__ import annotations

import jax

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True)


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  invalid_penalty: float = 0.1,
) -> jax.Array:
  """Returns A_i = (R_i - mean) / (std + eps) on every token of episode i.

  Args:
    table: the turns of all groups.
    progress: k/K; GRPO does not read it.
    use_std: divide by the standard deviation; False is Dr. GRPO's advantage
      (arXiv 2503.20783).
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: what the mean and deviation are taken over: `trajectory`, one number
      an episode; `turn`, one a turn, so long episodes weigh more (verl-agent).
    invalid_penalty: taken off the advantage of a turn without the required
      format, after normalising.

  Returns:
    adv_R: [R] float32, 0 on padding, 0 before the penalty in groups
      with one outcome.

  Raises:
    ValueError: unknown `stat`.
  """
  del progress
  segments.check_choice('stat', stat, ('trajectory', 'turn'))
  adv_E = segments.normalise(
    table.episode_return_E,
    table.episode_group_E,
    num_segments=table.episode_group_E.shape[0],
    weight_N=segments.episode_turns(table) if stat == 'turn' else 1.0,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )
  return segments.finish(
    table,
    segments.lookup(adv_E, table.turn_episode_U),
    invalid_penalty=invalid_penalty,
  )
