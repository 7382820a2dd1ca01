"""GRPO: the return of an episode against its group.

Sources: DeepSeekMath, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783; DAPO, arXiv
2503.14476; numerics as in verl-agent.

Departures: a penalty of DAPO for long responses is taken off the return of the
one turn that was long, for an episode has many responses.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from planpo_jax import advantages, episodes, losses
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True, outcome=True, token_rewards=True)


def _sequence_tokens(config: ml_collections.ConfigDict) -> Any:
  """Response tokens of the longest training sequence, an episode or a turn."""
  tokens = config.chat.get_oneway_ref('max_response')
  if config.chat.context == 'window':
    return tokens
  return tokens * config.env.get_oneway_ref('max_turns')


# Of DAPO: all but the shaping of long responses and the KL.
_DAPO = {
  'loss.name': 'ppo_clip',
  'loss.ppo_clip.clip_low': 0.2,
  'loss.ppo_clip.clip_high': 0.28,
  'loss.ppo_clip.aggregation': 'token_mean',
  'train.max_refills': 10,
}

PRESETS = {
  'dr_grpo': {
    'advantage.grpo.use_std': False,
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.aggregation': 'constant_length',
    'loss.ppo_clip.length': _sequence_tokens,
  },
  'grpo_verl_parity': advantages.verl_parity('grpo'),
  # The paper's rewards are 1 and -1, so that the longest response loses half of
  # what success is worth.
  'dapo': _DAPO
  | {
    'loss.ppo_clip.kl_coef': 0.0,
    'advantage.grpo.overlong_limit': advantages.same_as('chat.max_response'),
    # Of 20,480 tokens the paper's buffer takes 4,096.
    'advantage.grpo.overlong_buffer': (
      lambda config: config.chat.get_oneway_ref('max_response') // 5
    ),
    'advantage.grpo.overlong_penalty': 5.0,
  },
  # verl-agent's script keeps the KL and does not shape lengths.
  'dapo_verl_parity': _DAPO | advantages.verl_parity('grpo'),
  # What the experiment sets for the usual loss holds for this one too.
  'gspo': {'loss.name': 'gspo'}
  | {
    f'loss.gspo.{key}': advantages.same_as(f'loss.ppo_clip.{key}')
    for key, value in losses.hyperparameters('gspo').items()
    if losses.hyperparameters('ppo_clip')[key] == value
  },
}


def overlong(
  tokens_U: jax.Array, *, limit: int, buffer: int, penalty: float
) -> jax.Array:
  """Returns what responses lose for their length.

  With L tokens, at most L_max, and L_cache of them as the buffer (DAPO,
  equation 13, times `-penalty`):

    0                                        L <= L_max - L_cache
    penalty (L - (L_max - L_cache))/L_cache  up to L_max
    penalty                                  beyond

  Args:
    tokens_U: [U] int, L.
    limit: L_max, tokens.
    buffer: L_cache, tokens; 0 makes a step at the limit.
    penalty: at the worst, at least 0.

  Returns:
    [U] float32.

  Raises:
    ValueError: the buffer is negative or longer than the limit.
  """
  if not 0 <= buffer <= limit:
    raise ValueError(
      f'overlong_buffer={buffer} must be between 0 and overlong_limit={limit} '
      f'tokens; try {limit // 4}.'
    )
  over_U = jnp.asarray(tokens_U, jnp.float32) - (limit - buffer)
  # Lengths are whole, so that a buffer of 1 is the step.
  return penalty * jnp.clip(over_U / max(buffer, 1), 0.0, 1.0)


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  single: str = 'zero',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  overlong_limit: int = 0,
  overlong_buffer: int = 0,
  overlong_penalty: float = 1.0,
) -> jax.Array:
  """Returns A_i = (R_i - mean) / (std + eps) on every token of episode i.

  Args:
    table: the turns of all groups. Rewards of single tokens are part of R.
    progress: k/K; GRPO does not read it.
    use_std: divide by the standard deviation; False is Dr. GRPO's advantage
      (arXiv 2503.20783).
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: what the mean and deviation are taken over: `trajectory`, one number
      an episode; `turn`, one a turn, so long episodes weigh more (verl-agent).
    single: what a group of one gives: `zero`, or `raw`, its return over
      1 + eps (verl-agent), see `segments.normalise`.
    penalty: where a turn without the required format loses `invalid_penalty`:
      `post`, off its advantage; `pre`, off its return (verl-agent).
    invalid_penalty: see `penalty`.
    overlong_limit: longest response in tokens, best `chat.max_response`, see
      `overlong`; 0: lengths cost nothing.
    overlong_buffer: tokens before the limit over which the penalty grows.
    overlong_penalty: units of the return, off the return of the turn.

  Returns:
    adv_R: [R] float32, 0 on padding, 0 before the penalty in groups
      with one outcome.

  Raises:
    ValueError: unknown `stat`, `single` or `penalty`, or see `overlong`.
  """
  del progress
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  if overlong_limit:
    overlong_U = overlong(
      table.turn_tokens_U,
      limit=overlong_limit,
      buffer=overlong_buffer,
      penalty=overlong_penalty,
    )
    before_U = overlong_U if before_U is None else before_U + overlong_U
  adv_U = segments.normalise_episodes(
    table,
    segments.episode_return(table),
    stat=stat,
    penalty_U=before_U,
    single=single,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )
  return segments.finish(table, adv_U, penalty_U=after_U, single=single)
