"""PlanPO: fewer turns and shorter responses, rewarded only on success.

Source: PlanPO, arXiv 2608.17289, equations 2 to 8. The paper is silent on
numerics; ddof = 1 and eps = 1e-6 outside the root are verl-agent's.

Departures from the paper: tied values give exactly 0 where float32 would leave
a residue; responses without the required format lose `invalid_penalty`. The
paper's text takes A^S over the responses of successful episodes (the default
here), its equations 4 and 5 over all of them (`as_group='flat_all'`).

The KL cannot be in the reward: R/T and R/L of a return that has lost the KL of
its tokens mean nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes, schedules
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True)

_NO_AE = {
  'advantage.planpo.ae_weight': 0.0,
  'advantage.planpo.alpha_init': 1.0,
  'advantage.planpo.alpha_schedule': 'constant',
}

PRESETS = {
  # The paper's settings for ALFWorld and WebShop, whatever the experiment has.
  'planpo_paper': {
    'advantage.planpo.alpha_init': 0.1,
    'advantage.planpo.alpha_final': 0.05,
  },
  'planpo_verl_parity': advantages.verl_parity('planpo'),
  'planpo_no_as': {
    'advantage.planpo.alpha_init': 0.0,
    'advantage.planpo.alpha_final': 0.0,
  },
  'planpo_no_ae': _NO_AE,
  'planpo_no_ae_flat_all': _NO_AE | {'advantage.planpo.as_group': 'flat_all'},
  'planpo_constant': {'advantage.planpo.alpha_schedule': 'constant'},
  'planpo_flat_all': {'advantage.planpo.as_group': 'flat_all'},
  'planpo_stratified': {'advantage.planpo.ae_mode': 'stratified'},
  'planpo_unconditional': {
    'advantage.planpo.conditional': False,
    'advantage.planpo.full_return': advantages.same_as('train.success_return'),
  },
}


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
  segments.check_choice('alpha_schedule', alpha_schedule, schedules.RAMPS)
  return schedules.ramp(
    progress, initial=alpha_init, final=alpha_final, schedule=alpha_schedule
  )


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
  turns: str = 'active',
  len_floor: int = 0,
  drop_truncated: bool = False,
  conditional: bool = True,
  full_return: float = 10.0,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  single: str = 'zero',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
) -> jax.Array:
  """Returns A_it = A^E_i + alpha(k) A^S_it on every token of response (i, t).

    R^E_i  = s_i R_i / T_i     A^E_i  = (R^E_i - mean_N) / F         (2)(3)
    R^S_it = s_i R_i / L_it    A^S_it = (R^S_it - mean_G) / F        (5)(6)
    F = std + eps, or 1                                              (7)(8)

  with s success, R return, T turns of the episode, L tokens of the response. A
  failure counts as 0 in the group of N.

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
    turns: T: `active`, all turns; `valid_action`, those with the required
      format, but at least 1.
    len_floor: tokens; shorter responses count as this long, empty ones too. 0:
      as long as they are, and an empty response leaves G.
    drop_truncated: responses that hit the cap of tokens leave G, A^S = 0.
    conditional: False shapes whether or not the episode succeeded: s = 1 and
      R = full_return for all, but for R itself where `ae_mode` is `stratified`.
    full_return: return of a success; only read without `conditional`.
    use_std: divide by the standard deviation, in A^E and A^S.
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: what the statistics of A^E are taken over, `trajectory` or `turn`
      (an episode counts as often as it has turns).
    single: what A^E is in a group of one: `zero`, or `raw`, its R^E over
      1 + eps, see `segments.normalise`.
    penalty: where a turn without the required format loses `invalid_penalty`:
      `post`, off its advantage; `pre`, off its R^E (R where `ae_mode` is
      `stratified`), before normalising.
    invalid_penalty: see `penalty`.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown value of a switch, or a negative `len_floor`.
  """
  segments.check_choice('ae_mode', ae_mode, ('paper', 'stratified'))
  segments.check_choice(
    'as_group',
    as_group,
    ('flat_success', 'flat_all', 'turn_success', 'turn_all'),
  )
  segments.check_choice('turns', turns, ('active', 'valid_action'))
  if len_floor < 0:
    raise ValueError(
      f'len_floor={len_floor} must be at least 0 tokens; 0 sets no floor.'
    )
  scaling = {'use_std': use_std, 'ddof': ddof, 'eps': eps}
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  all_turns_E = segments.episode_turns(table)
  turns_E = all_turns_E
  if turns == 'valid_action':
    turns_E = segments.episode_sum(
      table, jnp.asarray(table.turn_valid_U, jnp.float32)
    )
  return_E = jnp.asarray(table.episode_return_E, jnp.float32)
  success_E = jnp.asarray(table.episode_success_E)
  shaped_E = jnp.where(success_E, return_E, 0.0)
  if not conditional:
    success_E = jnp.ones_like(success_E)
    shaped_E = jnp.full_like(return_E, full_return)
  per_turn_E = shaped_E / jnp.maximum(turns_E, 1)  # R^E, (2)

  ae_U = segments.normalise_episodes(
    table,
    per_turn_E if ae_mode == 'paper' else return_E,
    stat=stat,
    penalty_U=before_U,
    single=single,
    **scaling,
  )  # (3)
  if ae_mode == 'stratified':
    efficiency_E = segments.normalise(
      per_turn_E,
      table.episode_group_E,
      num_segments=success_E.shape[0],
      weight_N=success_E * (all_turns_E if stat == 'turn' else 1.0),
      **scaling,
    )
    ae_U += segments.lookup(efficiency_E, table.turn_episode_U)

  as_U = _response_advantage(
    table,
    shaped_E,
    success_E,
    as_group=as_group,
    len_floor=len_floor,
    drop_truncated=drop_truncated,
    **scaling,
  )
  weight = alpha(
    progress,
    alpha_init=alpha_init,
    alpha_final=alpha_final,
    alpha_schedule=alpha_schedule,
  )
  adv_U = ae_weight * ae_U + weight * as_U  # (7)
  return segments.finish(table, adv_U, penalty_U=after_U, single=single)


def _response_advantage(
  table: episodes.TurnTable,
  shaped_E: jax.Array,
  success_E: jax.Array,
  *,
  as_group: str,
  len_floor: int,
  drop_truncated: bool,
  **scaling: Any,
) -> jax.Array:
  """Returns [U] A^S of equations 5 and 6, 0 outside of G."""
  num_E, num_U = success_E.shape[0], table.turn_episode_U.shape[0]
  group_U = segments.turn_group(table)
  length_U = jnp.maximum(jnp.asarray(table.turn_tokens_U), len_floor)
  in_group_U = (group_U < num_E) & (length_U > 0)
  if as_group.endswith('success'):
    in_group_U &= segments.lookup(success_E, table.turn_episode_U)
  if drop_truncated:
    in_group_U &= ~jnp.asarray(table.turn_truncated_U)
  cell_U, num_cells = group_U, num_E
  if as_group.startswith('turn'):
    cell_U = segments.pairs(group_U, jnp.asarray(table.turn_index_U))
    num_cells = num_U
  per_token_U = segments.lookup(shaped_E, table.turn_episode_U) / jnp.maximum(
    length_U, 1
  )  # R^S, (5)
  return segments.normalise(
    per_token_U,
    jnp.where(in_group_U, cell_U, num_cells),
    num_segments=num_cells,
    **scaling,
  )  # (6)
