"""HGPO: each turn against turns of ever longer equal history.

Source: HGPO, arXiv 2602.22817. What was available: the abstract and reviews of
the paper, its equations as other texts restate them, and the authors' code for
advantages (recipe/hgpo of verl-agent), whole, in a copy elsewhere; not the text
of the paper. The reviews number the weights as equation 7.

Open points, each with its switch:
- Weights. The equation is w_k = (k + 1)^alpha for k = 0 .. K states before the
  present one. The code counts the present state as 1, so its weights are
  (k + 2)^alpha and leave 1 to the episode (`weight_offset`).
- What the weights add up over. The equation does not say what a turn alone in
  its group adds. Here such levels drop out (`weights_over='shared'`); the code
  also drops levels whose advantage is 0 (`nonzero`); `all` is the letter of the
  equation.
- The episode. The code can take its advantage as one more level, off by default
  (`base_group`); so HGPO alone does not compare episodes.
- A turn with fewer than k turns before it is in no group of level k, as in the
  code.

ddof = 0, eps = 1e-6 outside the root, gamma, and repeated visits that each
count are the code's. Departures from the code: tied values give exactly 0 where
float32 would leave a residue; weights add up to 1 without an eps; `penalty` and
`single` as in GiGPO.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True)

PRESETS = {
  'hgpo_k4': {'advantage.hgpo.history': 4, 'chat.history': 4},
  'hgpo_nostd': {'advantage.hgpo.use_std': False},
  'hgpo_base': {'advantage.hgpo.base_group': True},
  'hgpo_verl_parity': advantages.verl_parity('hgpo')
  | {
    'advantage.hgpo.weight_offset': 2.0,
    'advantage.hgpo.weights_over': 'nonzero',
  },
}


def history_groups(table: episodes.TurnTable, history: int) -> jax.Array:
  """Groups turns by their state and the k states before it, k = 0 .. history.

  Turns (i, t) and (j, n) of a task share a group of level k where their states
  s_{t-k} .. s_t and s_{n-k} .. s_n are equal one by one, wherever t and n lie.
  So groups of a level split those of the level below.

  Args:
    table: the turns of all groups.
    history: K, at least 0.

  Returns:
    [K + 1, U] int32, equal below U for the turns of one group of a level; U for
    turns with fewer than k turns before them, without a group of episodes, or
    of padding.
  """
  num_U = table.turn_episode_U.shape[0]
  num_E = table.episode_group_E.shape[0]
  in_group_U = segments.turn_group(table) < num_E
  state_U = jnp.where(in_group_U, table.turn_state_U, num_U)

  def deepen(group_U, k):
    reaches_U = in_group_U & (jnp.asarray(table.turn_index_U) >= k)
    pair_U = segments.pairs(jnp.roll(group_U, 1), state_U)
    group_U = jnp.where(reaches_U, pair_U, num_U)
    return group_U, group_U

  # A scan compiles the sort once, however many levels there are.
  deeper_KU = jax.lax.scan(deepen, state_U, jnp.arange(1, history + 1))[1]
  return jnp.concatenate([state_U[None], deeper_KU])


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  history: int = 2,
  alpha: float = 1.0,
  gamma: float = 0.95,
  weight_offset: float = 1.0,
  weights_over: str = 'shared',
  base_group: bool = False,
  use_std: bool = True,
  ddof: int = 0,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  single: str = 'zero',
) -> jax.Array:
  """Returns A_it = sum_k w_k A^k_it on every token of turn (i, t).

    G_it   = sum_{u >= t} gamma^(u - t) r_iu, r = R_i at the last turn, else 0
    A^k_it = (G_it - mean over its group of level k) / F, see `history_groups`
    F      = std + eps, or 1
    w_k    = (k + weight_offset)^alpha / sum over levels                  (7)

  A turn that is alone on every level gets 0.

  Args:
    table: the turns of all groups.
    progress: k/K; HGPO does not read it.
    history: K, turns before the present one that groups look back; as many as
      the prompt shows (`chat.history`) in the paper, 2 or 4.
    alpha: 0 weighs all levels alike; the higher, the more the deepest counts.
    gamma: discount a turn, in [0, 1].
    weight_offset: weight of level 0 before alpha, above 0: 1 in the equation,
      2 in the code.
    weights_over: levels that the weights of a turn add up to 1 over: `shared`,
      where another turn is in its group; `nonzero`, where its advantage is not
      0; `all`, even those that it has no group on.
    base_group: take GRPO's advantage (ddof = 1) as one more level, of weight 1.
    use_std: divide by the standard deviation.
    ddof: subtracted from the count in the variance of the groups of turns.
    eps: added to the standard deviation.
    stat: of the base group: see `segments.normalise_episodes`.
    penalty: where a turn of invalid format loses `invalid_penalty`: `post`,
      off its advantage; `pre`, off its R and its G before normalising.
    invalid_penalty: units of the advantage (`post`) or of the return (`pre`).
    single: a group of one episode: `zero`, no advantage; `raw`, its visits to a
      state are compared, and the base group gives its return.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown `weights_over`, `stat`, `penalty` or `single`, negative
      `history`, or `weight_offset` not above 0.
  """
  del progress
  segments.check_choice(
    'weights_over', weights_over, ('shared', 'nonzero', 'all')
  )
  segments.check_choice('stat', stat, ('trajectory', 'turn'))
  if history < 0:
    raise ValueError(f'history={history} must be at least 0 turns; try 2.')
  if weight_offset <= 0:
    raise ValueError(
      f'weight_offset={weight_offset} must be above 0; 1 is the paper and 2 '
      'the code of its authors.'
    )
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  return_U = segments.turn_return(table, gamma)
  if before_U is not None:
    return_U -= before_U
  group_KU = history_groups(table, history)
  num_U = group_KU.shape[1]
  # All levels at once, as if their groups were apart.
  size = group_KU.size
  segment_KU = jnp.where(
    group_KU < num_U,
    group_KU + num_U * jnp.arange(history + 1)[:, None],
    size,
  )
  adv_KU = segments.normalise(
    jnp.broadcast_to(return_U, group_KU.shape).ravel(),
    segment_KU.ravel(),
    num_segments=size,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  ).reshape(group_KU.shape)
  count_S = jax.ops.segment_sum(
    jnp.ones(size, jnp.int32), segment_KU.ravel(), size
  )
  shared_KU = segments.lookup(count_S, segment_KU) > 1
  weight_K = (jnp.arange(history + 1) + weight_offset) ** alpha
  if base_group:
    base_U = segments.normalise_episodes(
      table,
      table.episode_return_E,
      stat=stat,
      penalty_U=before_U,
      single=single,
      use_std=use_std,
      eps=eps,
    )
    adv_KU = jnp.concatenate([adv_KU, base_U[None]])
    shared_KU = jnp.concatenate([shared_KU, jnp.ones((1, num_U), bool)])
    weight_K = jnp.append(weight_K, 1.0)
  counted_KU = {
    'shared': shared_KU,
    'nonzero': adv_KU != 0,
    'all': jnp.ones_like(shared_KU),
  }[weights_over]
  sum_U = jnp.sum(weight_K[:, None] * adv_KU, axis=0)
  total_U = jnp.sum(weight_K[:, None] * counted_KU, axis=0)
  adv_U = sum_U / jnp.where(total_U > 0, total_U, 1.0)  # (7)
  return segments.finish(table, adv_U, penalty_U=after_U, single=single)
