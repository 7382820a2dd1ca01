"""PPO's advantages: generalised advantage estimation against a critic.

Sources: GAE, arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equations
11 and 12. What a step is, `gae` says:

  turn_bandit  a token; each response is an episode of its own that earns the
               return of the whole: verl-agent's, of published PPO rows;
  turn         a response, arXiv 2512.17008;
  token        a token; the responses of an episode follow one another:
               AgentGym-RL's;
  bilevel      a response, then each token within it, arXiv 2510.16907.

Tokens of the environment are no steps: they neither decay nor carry credit.
What a limit cut off counts as ended: nothing is expected after the last
response, as in both code bases.

Settled here: a response without the required format loses `invalid_penalty`
from its own reward, which verl-agent does in its one mode; rewards of single
tokens belong to the turn of the token when turns are the steps; advantages
that are tied over the batch become exactly 0. The shaping is that of the PPO
runs in Figure 4 of PlanPO, arXiv 2608.17289, which does not state its weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes, schedules
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(
  group=False, values=1, token_rewards=True, batch_wide=True
)

_SHAPED = advantages.SINGLES | {
  'advantage.ppo.full_return': advantages.same_as('train.success_return')
}

PRESETS = {
  'ppo': advantages.SINGLES,
  'ppo_agentgym': advantages.SINGLES
  | {'advantage.ppo.gae': 'token', 'critic.scale': 0.5},
  'ppo_turn': advantages.SINGLES
  | {
    'advantage.ppo.gae': 'turn',
    'advantage.ppo.gamma': 0.99,
    'advantage.ppo.lam': 0.9,
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.ratio': 'turn',
  },
  'ppo_bilevel': advantages.SINGLES
  | {'advantage.ppo.gae': 'bilevel', 'advantage.ppo.gamma': 0.95},
  'ppo_success': _SHAPED | {'advantage.ppo.shaping': 'success'},
  'ppo_unconditional': _SHAPED | {'advantage.ppo.shaping': 'unconditional'},
}


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  gae: str = 'turn_bandit',
  gamma: float = 1.0,
  lam: float = 1.0,
  token_gamma: float = 1.0,
  token_lam: float = 1.0,
  whiten: bool = True,
  invalid_penalty: float = 0.1,
  shaping: str = 'none',
  shaping_weight: float = 1.0,
  shaping_final: float = 0.5,
  shaping_schedule: str = 'constant',
  full_return: float = 10.0,
) -> jax.Array:
  """Returns A_n of each response token, against the first head of the critic.

    delta_n = r_n + gamma V_{n+1} - V_n,  A_n = delta_n + gamma lam A_{n+1}

  over the steps n of an episode; V and A are 0 after the last. With `turn`, V_t
  is read at the first token of response t, and A_t goes to all of its tokens.
  With `bilevel`, V_t is read at the last token, which gets A_t; from there the
  recursion runs with `token_gamma` and `token_lam` to the first token.

  Args:
    table: the turns, with `value_RC`, and `token_reward_R` if there is any.
    progress: k/K, read by the schedule of the shaping only.
    gae: `turn_bandit`, `turn`, `token` or `bilevel`, see above.
    gamma: discount a step, in [0, 1].
    lam: in [0, 1]; at 0 the critic is believed after one step, at 1 never.
    token_gamma: discount a token; only read by `bilevel`.
    token_lam: lam between tokens; only read by `bilevel`.
    whiten: centre and scale over all response tokens of the batch, see
      `segments.whiten`.
    invalid_penalty: taken off the reward of a turn without the required format.
    shaping: what is earned. `none`: the return, at the last token of the
      episode, with `turn_bandit` at that of every turn. `success`: at the last
      token of turn t of episode i c_i (full_return / T_i + shaping_weight
      full_return / L_it), for T_i turns and L_it tokens, c_i = 1 on success and
      0 else. `unconditional`: the same with c_i = 1.
    shaping_weight: weight of short responses; only read by the shaping, as the
      next two.
    shaping_final: the other end of the schedule, see `schedules.ramp`.
    shaping_schedule: `constant`, `decay` or `increase`.
    full_return: return of a success; only read by the shaping.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown `gae`, `shaping` or `shaping_schedule`, or a discount
      outside of [0, 1].
  """
  segments.check_choice('gae', gae, ('turn_bandit', 'turn', 'token', 'bilevel'))
  segments.check_choice(
    'shaping', shaping, ('none', 'success', 'unconditional')
  )
  segments.check_choice('shaping_schedule', shaping_schedule, schedules.RAMPS)
  weight = schedules.ramp(
    progress,
    initial=shaping_weight,
    final=shaping_final,
    schedule=shaping_schedule,
  )
  for name, factor in (
    ('gamma', gamma),
    ('lam', lam),
    ('token_gamma', token_gamma),
    ('token_lam', token_lam),
  ):
    if not 0 <= factor <= 1:
      raise ValueError(f'{name}={factor} must be in [0, 1]; try 1.')
  real_R = segments.is_token(table)
  last_R = segments.is_last_token(table)
  ends_R = segments.is_last_token_of_episode(table)
  value_R = _value(table)

  def at_last(reward_U):
    return jnp.where(last_R, segments.spread(table, reward_U), 0.0)

  if shaping == 'none':
    earned_R = jnp.where(
      last_R if gae == 'turn_bandit' else ends_R,
      segments.lookup(table.episode_return_E, segments.token_episode(table)),
      0.0,
    )
  else:
    earned_R = at_last(full_return * _shape(table, shaping, weight))
  valid_U = jnp.asarray(table.turn_valid_U)
  reward_R = earned_R - at_last(jnp.where(valid_U, 0.0, invalid_penalty))
  if table.token_reward_R is not None:
    reward_R += jnp.where(real_R, table.token_reward_R, 0.0)

  def over_turns(value_U):
    return recursion(
      segments.turn_sum(table, reward_R),
      value_U,
      real_N=jnp.asarray(table.turn_tokens_U) > 0,
      last_N=segments.is_last_turn(table),
      gamma=gamma,
      lam=lam,
    )

  if gae == 'turn':
    first_R = segments.is_first_token(table)
    adv_U = over_turns(
      segments.turn_sum(table, jnp.where(first_R, value_R, 0.0))
    )
    adv_R = segments.spread(table, adv_U)
  elif gae == 'bilevel':
    # What the whole turn is worth, as known before its last token.
    worth_U = segments.turn_sum(table, jnp.where(last_R, value_R, reward_R))
    adv_R = segments.spread(table, over_turns(worth_U))
    adv_R = recursion(
      jnp.where(last_R, adv_R + value_R, reward_R),
      value_R,
      last_N=last_R,
      gamma=token_gamma,
      lam=token_lam,
    )
  else:
    adv_R = recursion(
      reward_R,
      value_R,
      last_N=last_R if gae == 'turn_bandit' else ends_R,
      gamma=gamma,
      lam=lam,
    )
  return segments.whiten(adv_R, real_R) if whiten else adv_R


def targets(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  gae: str = 'turn_bandit',
  **others: Any,
) -> tuple[jax.Array, jax.Array]:
  """Returns what the critic is to learn: V + A, A before whitening.

  Args:
    table: as for `estimate`.
    progress: as there.
    gae: as there. With `turn` only the first token of a response is learnt.
    **others: as there.

  Returns:
    target_RC: [R, 1] float32.
    mask_RC: [R, 1] bool, where it is learnt.
  """
  settings = {**others, 'gae': gae, 'whiten': False}
  adv_R = estimate(table, progress=progress, **settings)
  learnt_R = segments.is_token(table)
  if gae == 'turn':
    learnt_R = segments.is_first_token(table)
  target_R = jnp.where(learnt_R, adv_R + _value(table), 0.0)
  return target_R[:, None], learnt_R[:, None]


def recursion(
  reward_N: jax.Array,
  value_N: jax.Array,
  *,
  last_N: jax.Array,
  gamma: float,
  lam: float,
  real_N: jax.Array | None = None,
) -> jax.Array:
  """Returns A_n = delta_n + gamma lam A_{n+1}, see `estimate`.

  Args:
    reward_N: [N] float32, r_n; 0 on padding.
    value_N: [N] float32, V_n, before r_n; 0 on padding.
    last_N: [N] bool, the last element of each episode.
    gamma: discount a step.
    lam: see `estimate`.
    real_N: [N] bool, the steps: others are passed over and get the advantage of
      the step that follows. None: every element is one.
  """
  onward_N = 1.0 - last_N
  delta_N, ahead_N, decay_N = reward_N - value_N, value_N, gamma * lam
  if real_N is not None:
    ahead_N = segments.reversed_sum(
      jnp.where(real_N, value_N, 0.0), jnp.where(real_N, 0.0, onward_N)
    )
    decay_N = jnp.where(real_N, decay_N, 1.0)
  delta_N += gamma * onward_N * jnp.append(ahead_N[1:], 0.0)
  if real_N is not None:
    delta_N = jnp.where(real_N, delta_N, 0.0)
  return segments.reversed_sum(delta_N, onward_N * decay_N)


def _value(table: episodes.TurnTable) -> jax.Array:
  """[R] float32, 0 on padding."""
  real_R = segments.is_token(table)
  return jnp.where(real_R, jnp.asarray(table.value_RC)[:, 0], 0.0)


def _shape(
  table: episodes.TurnTable, shaping: str, weight: jax.Array | float
) -> jax.Array:
  """[U] c_i (1 / T_i + weight / L_it)."""
  turns_E = jnp.maximum(segments.episode_turns(table), 1)
  tokens_U = jnp.maximum(jnp.asarray(table.turn_tokens_U), 1)
  counts_E = jnp.ones_like(turns_E)
  if shaping == 'success':
    counts_E *= jnp.asarray(table.episode_success_E)
  episode_U = table.turn_episode_U
  return (
    segments.lookup(counts_E / turns_E, episode_U)
    + weight * segments.lookup(counts_E, episode_U) / tokens_U
  )
