"""REINFORCE++: returns to go of tokens, whitened over the whole batch.

Source: arXiv 2501.03262; numerics as in verl-agent. The paper takes the KL (k1)
to the reference off the reward of each token, its variant with a baseline has
it in the loss (k2): presets `reinforce_pp` and `reinforce_pp_baseline`.

Departures: an episode has many responses. Each of them ends with the return of
the episode, undiscounted, and rewards of single tokens do not reach beyond
their response, as in verl-agent. Equal values everywhere give exactly 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(
  group=False, outcome=True, token_rewards=True, batch_wide=True
)

PRESETS = {
  'reinforce_pp': {
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.kl_in_reward': True,
    'loss.ppo_clip.kl_kind': 'k1',
  },
  'reinforce_pp_baseline': {
    'advantage.reinforce_pp.baseline': 'group',
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.kl_kind': 'k2',
  },
  'reinforce_pp_verl_parity': {'advantage.reinforce_pp.penalty': 'pre'},
}


def traits(*, baseline: str = 'none', **others: Any) -> advantages.Traits:
  """With a baseline the members of a group are compared."""
  del others
  return dataclasses.replace(TRAITS, group=baseline == 'group')


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  baseline: str = 'none',
  stat: str = 'trajectory',
  eps: float = 1e-8,
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
) -> jax.Array:
  """Returns the whitened return from each token on.

    G_r = R_i + sum of the rewards of single tokens from r to the response's end
    A_r = (G_r - mean) / sqrt(variance + eps)    over all response tokens

  Args:
    table: the turns of all episodes.
    progress: k/K; REINFORCE++ does not read it.
    baseline: `none`, or `group`: the mean of the group is first taken off R_i,
      so that hard and easy tasks compare. Rewards of single tokens have no
      baseline. An episode that is alone in its group then compares with none:
      it takes no part in the statistics and gets 0.
    stat: what the mean of a group is taken over, `trajectory` or `turn`, see
      `segments.normalise_episodes`.
    eps: added to the variance (ddof 1), inside the root.
    penalty: where a turn without the required format loses `invalid_penalty`:
      `post`, off its advantage; `pre`, off its return (verl-agent).
    invalid_penalty: see `penalty`.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown `baseline`, `stat` or `penalty`.
  """
  del progress
  segments.check_choice('baseline', baseline, ('none', 'group'))
  segments.check_choice('stat', stat, ('trajectory', 'turn'))
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  if baseline == 'group':
    return_U = segments.normalise_episodes(
      table,
      table.episode_return_E,
      stat=stat,
      penalty_U=before_U,
      use_std=False,
    )
    taken_U = segments.compared(table)
  else:
    return_U = segments.lookup(
      jnp.asarray(table.episode_return_E, jnp.float32), table.turn_episode_U
    )
    if before_U is not None:
      return_U -= before_U
    taken_U = segments.compared(table, 'raw')

  to_go_R = segments.spread(table, return_U)
  if table.token_reward_R is not None:
    to_go_R += segments.reversed_sum(
      jnp.asarray(table.token_reward_R),
      jnp.where(segments.is_last_token(table), 0.0, 1.0),
    )
  taken_R = segments.lookup(taken_U, table.token_turn_R)
  adv_R = segments.whiten(to_go_R, taken_R, eps=eps)
  if after_U is not None:
    adv_R -= segments.spread(table, jnp.where(taken_U, after_U, 0.0))
  return adv_R
