"""Segment kernels that the advantage estimators share.

A segment id past the end marks an element that takes no part: sums drop it,
look-ups give 0 for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from planpo_jax import episodes

# A segment whose values span less than this share of their size is tied. The
# mean of equal float32 values can be off by an ulp (1.2e-7); divided by its own
# tiny deviation that residue would become a full-size advantage.
TIE_RTOL = 1e-5


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
  """Raises ValueError unless `value` is one of `known`."""
  if value not in known:
    raise ValueError(
      f'{name}={value!r} is unknown; use one of {", ".join(known)}.'
    )


def lookup(value_S: jax.Array, segment_N: jax.Array) -> jax.Array:
  """Returns [N] the value of each element's segment, 0 past the end."""
  return jnp.asarray(value_S).at[segment_N].get(mode='fill', fill_value=0)


def normalise(
  value_N: jax.Array,
  segment_N: jax.Array,
  *,
  num_segments: int,
  weight_N: jax.Array | float = 1.0,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> jax.Array:
  """Centres values on the mean of their segment and scales by its spread.

  z = (x - mean) / F with F = std + eps, or F = 1 without `use_std`. A segment
  of one element, of total weight not above `ddof`, or of tied values
  (`TIE_RTOL`) gives exactly 0.

  Args:
    value_N: [N] float.
    segment_N: [N] int, past the end for elements that take no part.
    num_segments: S.
    weight_N: [N] or scalar, how many observations an element stands for; 0
      takes it out of the segment.
    use_std: divide by the standard deviation.
    ddof: subtracted from the total weight in the variance.
    eps: added to the standard deviation, outside the root.

  Returns:
    [N] float32, 0 for elements that take no part.
  """
  value_N = jnp.asarray(value_N, jnp.float32)
  weight_N = jnp.broadcast_to(jnp.asarray(weight_N, jnp.float32), value_N.shape)
  segment_N = jnp.where(weight_N > 0, segment_N, num_segments)

  def total(x_N):
    return jax.ops.segment_sum(x_N, segment_N, num_segments)

  weight_S = total(weight_N)
  mean_S = total(weight_N * value_N) / jnp.maximum(weight_S, 1)
  centred_N = value_N - lookup(mean_S, segment_N)
  highest_S = jax.ops.segment_max(value_N, segment_N, num_segments)
  lowest_S = jax.ops.segment_min(value_N, segment_N, num_segments)
  size_S = jnp.maximum(jnp.abs(highest_S), jnp.abs(lowest_S))
  # Empty segments hold -inf and inf: the comparison is false, and no element
  # looks them up.
  spread_S = (highest_S - lowest_S > TIE_RTOL * size_S) & (weight_S > ddof)
  z_N = centred_N
  if use_std:
    variance_S = total(weight_N * centred_N**2) / jnp.maximum(
      weight_S - ddof, 1e-6
    )
    z_N = centred_N / (lookup(jnp.sqrt(variance_S), segment_N) + eps)
  return jnp.where(lookup(spread_S, segment_N), z_N, 0.0)


def compact(key_U: jax.Array) -> jax.Array:
  """Returns [U] int32 ids below U that are equal where the keys are."""
  size = key_U.shape[0]
  return jnp.unique(key_U, return_inverse=True, size=size)[1].astype(jnp.int32)


def turn_group(table: episodes.TurnTable) -> jax.Array:
  """Returns [U] int32 group of each turn, E where there is none."""
  num_E = table.episode_group_E.shape[0]
  return (
    jnp.asarray(table.episode_group_E)
    .at[table.turn_episode_U]
    .get(mode='fill', fill_value=num_E)
  )


def episode_turns(table: episodes.TurnTable) -> jax.Array:
  """Returns [E] float32 number of turns T_i, 0 on padding."""
  turn_episode_U = jnp.asarray(table.turn_episode_U)
  return jax.ops.segment_sum(
    jnp.ones(turn_episode_U.shape, jnp.float32),
    turn_episode_U,
    table.episode_group_E.shape[0],
  )


def finish(
  table: episodes.TurnTable, adv_U: jax.Array, *, invalid_penalty: float
) -> jax.Array:
  """Spreads one advantage a turn over its tokens, after the common rules.

  A turn without the required format loses `invalid_penalty`. This comes after
  normalising: before it, a group of failures with few invalid turns would blow
  the small penalty up to several standard deviations. A group that has shrunk
  to one member compares nothing and gets 0, the penalty included.

  Args:
    table: the turns.
    adv_U: [U] float32, advantage of each turn.
    invalid_penalty: units of the advantage, at least 0.

  Returns:
    [R] float32, 0 on padding.
  """
  group_U = turn_group(table)
  num_E = table.episode_group_E.shape[0]
  group_E = jnp.asarray(table.episode_group_E)
  members_P = jax.ops.segment_sum(jnp.ones_like(group_E), group_E, num_E)
  adv_U = adv_U - invalid_penalty * ~jnp.asarray(table.turn_valid_U)
  adv_U = jnp.where(lookup(members_P, group_U) >= 2, adv_U, 0.0)
  return lookup(adv_U.astype(jnp.float32), table.token_turn_R)
