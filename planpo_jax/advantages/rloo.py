"""RLOO: the return of an episode against the mean of the others in its group.

Source: arXiv 2402.14740. There the objective is REINFORCE and the KL is in the
reward (preset `rloo_reinforce`). By default the loss is clipped and the KL is
in it, as in verl-agent, whose RLOO the papers compare with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True, outcome=True, token_rewards=True)

PRESETS = {
  'rloo_reinforce': {
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.clip': False,
    'loss.ppo_clip.kl_in_reward': True,
    'loss.ppo_clip.kl_kind': 'k1',
  },
  'rloo_verl_parity': advantages.verl_parity('rloo'),
}


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  stat: str = 'trajectory',
  single: str = 'zero',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
) -> jax.Array:
  """Returns A_i = R_i - mean of the other returns, on every token of episode i.

  Of n returns that is (R_i - mean) n / (n - 1).

  Args:
    table: the turns of all groups. Rewards of single tokens are part of R.
    progress: k/K; RLOO does not read it.
    stat: what is left out and averaged: `trajectory`, episodes; `turn`, turns,
      so long episodes weigh more (verl-agent).
    single: what a group of one gives: `zero`, or `raw`, its return.
    penalty: where a turn without the required format loses `invalid_penalty`:
      `post`, off its advantage; `pre`, off its return (verl-agent).
    invalid_penalty: see `penalty`.

  Returns:
    adv_R: [R] float32, units of the return, 0 on padding.

  Raises:
    ValueError: unknown `stat`, `single` or `penalty`.
  """
  del progress
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  adv_U = segments.normalise_episodes(
    table,
    segments.episode_return(table),
    stat=stat,
    penalty_U=before_U,
    single=single,
    use_std=False,
  )
  count_E = segments.episode_turns(table)
  if stat == 'trajectory':
    count_E = jnp.ones_like(count_E)
  count_E = segments.group_sum(table, count_E)
  factor_E = jnp.where(count_E > 1, count_E / jnp.maximum(count_E - 1, 1), 1.0)
  adv_U = adv_U * segments.lookup(factor_E, table.turn_episode_U)
  return segments.finish(table, adv_U, penalty_U=after_U, single=single)
