"""PlanPO: fewer turns and shorter responses, rewarded only on success.

Source: PlanPO, arXiv 2608.17289, equations 2 to 8. The paper is silent on
numerics; ddof = 1 and eps = 1e-6 outside the root are verl-agent's.

Departures from the paper: tied values give exactly 0 where float32 would leave
a residue; responses without the required format lose `invalid_penalty`. The
paper's text takes A^S over the responses of successful episodes (the default
here), its equations 4 and 5 over all of them (`as_group='flat_all'`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True)


def alpha(
  progress: jax.Array | float,
  *,
  alpha_init: float = 0.1,
  alpha_final: float = 0.05,
  alpha_schedule: str = 'decay',
) -> jax.Array | float:
  """Returns the weight of A^S at progress k/K.

  alpha(k) = alpha_init + (alpha_final - alpha_init) min(k, K)/K    (8)

  Args:
    progress: k/K; k counts the current step from 1.
    alpha_init: value towards k = 0.
    alpha_final: value from k = K on.
    alpha_schedule: `decay` as above; `constant` stays at alpha_init;
      `increase` runs from alpha_final to alpha_init.

  Raises:
    ValueError: unknown `alpha_schedule`.
  """
  segments.check_choice(
    'alpha_schedule', alpha_schedule, ('decay', 'constant', 'increase')
  )
  if alpha_schedule == 'constant':
    return alpha_init
  first, last = alpha_init, alpha_final
  if alpha_schedule == 'increase':
    first, last = alpha_final, alpha_init
  return first + (last - first) * jnp.minimum(progress, 1.0)


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  alpha_init: float = 0.1,
  alpha_final: float = 0.05,
  alpha_schedule: str = 'decay',
  ae_weight: float = 1.0,
  ae_mode: str = 'paper',
  as_group: str = 'flat_success',
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  invalid_penalty: float = 0.1,
) -> jax.Array:
  """Returns A_it = A^E_i + alpha(k) A^S_it on every token of response (i, t).

    R^E_i  = s_i R_i / T_i     A^E_i  = (R^E_i - mean_N) / F         (2)(3)
    R^S_it = s_i R_i / L_it    A^S_it = (R^S_it - mean_G) / F        (5)(6)
    F = std + eps, or 1                                              (7)(8)

  with s success, R return, T turns of the episode, L tokens of the response. A
  failure counts as 0 in the group of N. An empty response leaves G.

  Args:
    table: the turns of all groups.
    progress: k/K, see `alpha`.
    alpha_init: see `alpha`.
    alpha_final: see `alpha`.
    alpha_schedule: see `alpha`.
    ae_weight: weight of A^E; 0 leaves A = alpha A^S.
    ae_mode: `paper`: equations 2 and 3. `stratified`: GRPO on R over all
      episodes plus R/T normalised over the successes, so that no success is
      ranked below a failure for its turns.
    as_group: G, the responses that A^S compares: `flat_success` those of
      successes; `flat_all` all, failures as 0; `turn_success` and `turn_all`
      the same, but only responses at an equal place in their episodes.
    use_std: divide by the standard deviation, in A^E and A^S.
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: what the statistics of A^E are taken over, `trajectory` or `turn`
      (an episode counts as often as it has turns).
    invalid_penalty: taken off the advantage of a turn without the required
      format, after normalising.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown schedule, `ae_mode`, `as_group` or `stat`.
  """
  segments.check_choice('ae_mode', ae_mode, ('paper', 'stratified'))
  segments.check_choice(
    'as_group',
    as_group,
    ('flat_success', 'flat_all', 'turn_success', 'turn_all'),
  )
  segments.check_choice('stat', stat, ('trajectory', 'turn'))
  num_E = table.episode_group_E.shape[0]
  num_U = table.turn_episode_U.shape[0]
  normalise = functools.partial(
    segments.normalise, use_std=use_std, ddof=ddof, eps=eps
  )

  group_E = jnp.asarray(table.episode_group_E)
  success_E = jnp.asarray(table.episode_success_E)
  turns_E = segments.episode_turns(table)
  weight_E = turns_E if stat == 'turn' else jnp.ones_like(turns_E)
  success_return_E = jnp.where(success_E, table.episode_return_E, 0.0)
  per_turn_E = success_return_E / jnp.maximum(turns_E, 1)  # R^E, (2)
  if ae_mode == 'paper':
    ae_E = normalise(
      per_turn_E, group_E, num_segments=num_E, weight_N=weight_E
    )  # (3)
  else:
    ae_E = normalise(
      table.episode_return_E, group_E, num_segments=num_E, weight_N=weight_E
    ) + normalise(
      per_turn_E, group_E, num_segments=num_E, weight_N=weight_E * success_E
    )

  group_U = segments.turn_group(table)
  length_U = jnp.asarray(table.turn_tokens_U)
  compared_U = length_U > 0
  if as_group.endswith('success'):
    compared_U &= segments.lookup(success_E, table.turn_episode_U)
  cell_U, num_cells = group_U, num_E
  if as_group.startswith('turn'):
    cell_U = segments.compact(group_U * num_U + table.turn_index_U)
    num_cells = num_U
  per_token_U = segments.lookup(
    success_return_E, table.turn_episode_U
  ) / jnp.maximum(length_U, 1)  # R^S, (5)
  as_U = normalise(
    per_token_U,
    jnp.where(group_U < num_E, cell_U, num_cells),
    num_segments=num_cells,
    weight_N=compared_U,
  )  # (6)

  weight = alpha(
    progress,
    alpha_init=alpha_init,
    alpha_final=alpha_final,
    alpha_schedule=alpha_schedule,
  )
  adv_U = (
    ae_weight * segments.lookup(ae_E, table.turn_episode_U) + weight * as_U
  )  # (7)
  return segments.finish(table, adv_U, invalid_penalty=invalid_penalty)
