"""Segment kernels that the advantage estimators share.

A segment id past the end marks an element that takes no part: sums drop it,
look-ups give 0 for it. Statistics are taken over turns and episodes; tokens
only look their turn up (`spread`), for there are a hundred times as many.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from planpo_jax import episodes

# A segment whose values span less than this share of their size is tied. Values
# that are equal on paper can be some float32 ulps (1.2e-7) apart; divided by
# their own tiny deviation that residue would become a full-size advantage.
TIE_RTOL = 1e-5

# Weights such as 1/3 need not add up to whole observations.
_COUNT_ATOL = 1e-3


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
  single: str = 'zero',
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> jax.Array:
  """Centres values on the mean of their segment and scales by its spread.

  z = (x - mean) / F with F = std + eps, or F = 1 without `use_std`. A segment
  of tied values (`TIE_RTOL`), or of no more observations than `ddof`, gives
  exactly 0.

  Args:
    value_N: [N] float.
    segment_N: [N] int, past the end for elements that take no part.
    num_segments: S.
    weight_N: [N] or scalar, how many observations an element stands for; 0
      takes it out of the segment. The observations of a segment add up to a
      whole number.
    single: what a segment of one observation gives. `zero`: 0. `raw`: mean 0
      and deviation 1 are taken, so x / (1 + eps), or x without `use_std`.
    use_std: divide by the standard deviation.
    ddof: subtracted from the number of observations in the variance.
    eps: added to the standard deviation, outside the root; may be 0.

  Returns:
    [N] float32, 0 for elements that take no part.

  Raises:
    ValueError: unknown `single`.
  """
  check_choice('single', single, ('zero', 'raw'))
  value_N = jnp.asarray(value_N, jnp.float32)
  weight_N = jnp.broadcast_to(jnp.asarray(weight_N, jnp.float32), value_N.shape)
  segment_N = jnp.where(weight_N > 0, segment_N, num_segments)

  def total(x_N):
    return jax.ops.segment_sum(x_N, segment_N, num_segments)

  count_S = total(weight_N)
  highest_S = jax.ops.segment_max(value_N, segment_N, num_segments)
  lowest_S = jax.ops.segment_min(value_N, segment_N, num_segments)
  size_S = jnp.maximum(jnp.abs(highest_S), jnp.abs(lowest_S))
  # Empty segments hold -inf and inf, so they are tied. Turned round, NaN is
  # not, and shows in the result.
  apart_S = ~(highest_S - lowest_S <= TIE_RTOL * size_S) & (
    count_S > max(ddof, 1) + _COUNT_ATOL
  )
  # On a scale from 0 to 1 the sums lose no digits, however large the values and
  # small their differences, and squares neither overflow nor vanish.
  span_S = jnp.where(apart_S, highest_S - lowest_S, 1.0)
  scaled_N = (value_N - lookup(lowest_S, segment_N)) / lookup(span_S, segment_N)
  mean_S = total(weight_N * scaled_N) / jnp.maximum(count_S, 1)
  z_N = scaled_N - lookup(mean_S, segment_N)
  factor_S = span_S
  if use_std:
    variance_S = total(weight_N * z_N**2) / jnp.where(
      apart_S, count_S - ddof, 1.0
    )
    factor_S = 1 / (jnp.sqrt(variance_S) + eps / span_S)
  z_N = jnp.where(
    lookup(apart_S, segment_N), z_N * lookup(factor_S, segment_N), 0.0
  )
  if single == 'raw':
    one_S = (count_S > 0) & (count_S <= 1 + _COUNT_ATOL)
    raw_N = value_N / (1 + eps) if use_std else value_N
    z_N = jnp.where(lookup(one_S, segment_N), raw_N, z_N)
  return z_N


def normalise_episodes(
  table: episodes.TurnTable,
  value_E: jax.Array,
  *,
  stat: str = 'trajectory',
  penalty_U: jax.Array | None = None,
  single: str = 'zero',
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> jax.Array:
  """Compares the values of episodes within their groups, see `normalise`.

  Args:
    table: the turns of all groups.
    value_E: [E] float, one value an episode.
    stat: what the mean and deviation are taken over: `trajectory`, one
      observation an episode; `turn`, one a turn, so that long episodes weigh
      more (verl-agent).
    penalty_U: [U] float, taken off the episode's value turn by turn before
      normalising; a turn then weighs 1/T_i under `trajectory`. None: nothing.
    single: see `normalise`: `zero` or `raw`. Under `turn` an episode of several
      turns is more than one observation.
    use_std: see `normalise`.
    ddof: see `normalise`.
    eps: see `normalise`.

  Returns:
    [U] float32, 0 for turns without a group.

  Raises:
    ValueError: unknown `stat` or `single`.
  """
  check_choice('stat', stat, ('trajectory', 'turn'))
  num_E = table.episode_group_E.shape[0]
  turns_E = episode_turns(table)
  settings = {
    'num_segments': num_E,
    'single': single,
    'use_std': use_std,
    'ddof': ddof,
    'eps': eps,
  }
  if penalty_U is None:
    adv_E = normalise(
      value_E,
      table.episode_group_E,
      weight_N=turns_E if stat == 'turn' else 1.0,
      **settings,
    )
    return lookup(adv_E, table.turn_episode_U)
  value_U = lookup(jnp.asarray(value_E, jnp.float32), table.turn_episode_U)
  weight_E = jnp.ones_like(turns_E)
  if stat == 'trajectory':
    weight_E = 1 / jnp.maximum(turns_E, 1)
  return normalise(
    value_U - penalty_U,
    turn_group(table),
    weight_N=lookup(weight_E, table.turn_episode_U),
    **settings,
  )


def whiten(
  value_N: jax.Array,
  taken_N: jax.Array,
  *,
  ddof: int = 1,
  eps: float = 1e-8,
) -> jax.Array:
  """Brings all elements that take part to mean 0 and deviation 1.

  z = (x - mean) / sqrt(variance + eps); exactly 0 where values are tied
  (`TIE_RTOL`) or there are no more of them than `ddof`.

  Args:
    value_N: [N] float.
    taken_N: [N] bool, elements that take part.
    ddof: subtracted from the count in the variance.
    eps: added to the variance, inside the root.

  Returns:
    [N] float32, 0 for elements that take no part.
  """
  value_N = jnp.asarray(value_N, jnp.float32)
  count = taken_N.sum()
  highest = jnp.max(value_N, where=taken_N, initial=-jnp.inf)
  lowest = jnp.min(value_N, where=taken_N, initial=jnp.inf)
  size = jnp.maximum(jnp.abs(highest), jnp.abs(lowest))
  apart = ~(highest - lowest <= TIE_RTOL * size) & (count > max(ddof, 1))
  # A scale from 0 to 1, as in `normalise`.
  span = jnp.where(apart, highest - lowest, 1.0)
  used_N = taken_N & apart
  scaled_N = jnp.where(used_N, (value_N - lowest) / span, 0.0)
  mean = scaled_N.sum() / jnp.maximum(count, 1)
  z_N = jnp.where(used_N, scaled_N - mean, 0.0)
  variance = (z_N**2).sum() / jnp.where(apart, count - ddof, 1)
  z_N = z_N / jnp.sqrt(jnp.where(apart, variance + eps / span**2, 1.0))
  return jnp.where(used_N, z_N, 0.0)  # Where values are NaN, 0 / NaN is too.


def reversed_sum(x_N: jax.Array, decay_N: jax.Array) -> jax.Array:
  """Returns y_n = x_n + decay_n y_{n+1} along the first axis.

  A decay of 0 at the last element of a segment starts anew there. Everything
  must be finite, padding too: 0 times infinity would leak.

  Args:
    x_N: [N, ...] float.
    decay_N: [N, ...] float, of the same shape.

  Returns:
    [N, ...] as `x_N`.
  """

  def join(later, earlier):
    later_decay_N, later_N = later
    decay_N, x_N = earlier
    return decay_N * later_decay_N, x_N + decay_N * later_N

  return jax.lax.associative_scan(join, (decay_N, x_N), reverse=True)[1]


def pairs(a_U: jax.Array, b_U: jax.Array) -> jax.Array:
  """Returns [U] int32 ids below U that are equal where both keys are."""
  # Sorted rather than packed into one integer: U^2 would not fit int32.
  order_U = jnp.lexsort((b_U, a_U))
  a_U, b_U = a_U[order_U], b_U[order_U]
  new_U = (a_U[1:] != a_U[:-1]) | (b_U[1:] != b_U[:-1])
  rank_U = jnp.concatenate(
    [jnp.zeros(1, jnp.int32), jnp.cumsum(new_U, dtype=jnp.int32)]
  )
  return jnp.zeros_like(rank_U).at[order_U].set(rank_U)


def turn_group(table: episodes.TurnTable) -> jax.Array:
  """Returns [U] int32 group of each turn, E where there is none."""
  num_E = table.episode_group_E.shape[0]
  return (
    jnp.asarray(table.episode_group_E)
    .at[table.turn_episode_U]
    .get(mode='fill', fill_value=num_E)
  )


def token_episode(table: episodes.TurnTable) -> jax.Array:
  """Returns [R] int32 episode of each token, E on padding."""
  num_E = table.episode_group_E.shape[0]
  return (
    jnp.asarray(table.turn_episode_U)
    .at[table.token_turn_R]
    .get(mode='fill', fill_value=num_E)
  )


def _is_last(segment_N: jax.Array, num_segments: int) -> jax.Array:
  segment_N = jnp.asarray(segment_N)
  return segment_N != jnp.append(segment_N[1:], num_segments)


def is_last_turn(table: episodes.TurnTable) -> jax.Array:
  """Returns [U] bool, the last turn of its episode, with tokens or without.

  False on padding.
  """
  return _is_last(table.turn_episode_U, table.episode_group_E.shape[0])


def is_token(table: episodes.TurnTable) -> jax.Array:
  """Returns [R] bool, False on padding."""
  return jnp.asarray(table.token_turn_R) < table.turn_episode_U.shape[0]


def is_last_token(table: episodes.TurnTable) -> jax.Array:
  """Returns [R] bool, the last token of its turn; False on padding."""
  return _is_last(table.token_turn_R, table.turn_episode_U.shape[0])


def is_first_token(table: episodes.TurnTable) -> jax.Array:
  """Returns [R] bool, the first token of its turn; False on padding."""
  token_turn_R = jnp.asarray(table.token_turn_R)
  previous_R = jnp.concatenate([jnp.full(1, -1, jnp.int32), token_turn_R[:-1]])
  return (token_turn_R != previous_R) & is_token(table)


def is_last_token_of_episode(table: episodes.TurnTable) -> jax.Array:
  """Returns [R] bool, the last token of its episode, in whichever turn.

  False on padding.
  """
  return _is_last(token_episode(table), table.episode_group_E.shape[0])


def episode_turns(table: episodes.TurnTable) -> jax.Array:
  """Returns [E] float32 number of turns T_i, 0 on padding."""
  return episode_sum(table, jnp.ones(table.turn_episode_U.shape, jnp.float32))


def episode_sum(table: episodes.TurnTable, value_U: jax.Array) -> jax.Array:
  """Returns [E] sum over the turns of each episode."""
  return jax.ops.segment_sum(
    jnp.asarray(value_U),
    table.turn_episode_U,
    table.episode_group_E.shape[0],
    indices_are_sorted=True,
  )


def turn_sum(table: episodes.TurnTable, value_R: jax.Array) -> jax.Array:
  """Returns [U] sum over the tokens of each turn."""
  return jax.ops.segment_sum(
    jnp.asarray(value_R),
    table.token_turn_R,
    table.turn_episode_U.shape[0],
    indices_are_sorted=True,
  )


def group_sum(table: episodes.TurnTable, value_E: jax.Array) -> jax.Array:
  """Returns [E] sum over the group of each episode, 0 without a group."""
  num_E = table.episode_group_E.shape[0]
  sum_P = jax.ops.segment_sum(
    jnp.asarray(value_E), table.episode_group_E, num_E
  )
  return lookup(sum_P, table.episode_group_E)


def episode_return(table: episodes.TurnTable) -> jax.Array:
  """Returns [E] float32, the return and all rewards of single tokens."""
  return_E = jnp.asarray(table.episode_return_E, jnp.float32)
  if table.token_reward_R is None:
    return return_E
  return return_E + episode_sum(table, turn_sum(table, table.token_reward_R))


def turn_return(table: episodes.TurnTable, gamma: float) -> jax.Array:
  """Returns the discounted return from each turn on.

  G_t = gamma^(T-1-t) R, for the return R is earned at the last turn (t from 0).
  Written as a power, equal distances from the end give equal numbers.

  Args:
    table: the turns.
    gamma: discount a turn, in [0, 1].

  Returns:
    [U] float32, 0 on padding.
  """
  turns_U = lookup(episode_turns(table), table.turn_episode_U)
  return_U = lookup(
    jnp.asarray(table.episode_return_E, jnp.float32), table.turn_episode_U
  )
  to_go_U = jnp.maximum(turns_U - 1 - table.turn_index_U, 0)
  return return_U * jnp.power(jnp.float32(gamma), to_go_U)


def split_penalty(
  table: episodes.TurnTable, *, penalty: str, invalid_penalty: float
) -> tuple[jax.Array | None, jax.Array | None]:
  """Says where turns without the required format lose `invalid_penalty`.

  `post` takes it off the advantage, after normalising. `pre` takes it off the
  return of the turn, as verl-agent does; a group of failures with few invalid
  turns then blows the small penalty up to several standard deviations.

  Args:
    table: the turns.
    penalty: `post` or `pre`.
    invalid_penalty: units of the advantage (`post`) or the return (`pre`), at
      least 0.

  Returns:
    (before, after): [U] float32 for `normalise_episodes` and for `finish`; one
    of them is None.

  Raises:
    ValueError: unknown `penalty`.
  """
  check_choice('penalty', penalty, ('post', 'pre'))
  penalty_U = jnp.where(jnp.asarray(table.turn_valid_U), 0.0, invalid_penalty)
  penalty_U = penalty_U.astype(jnp.float32)
  return (None, penalty_U) if penalty == 'post' else (penalty_U, None)


def compared(table: episodes.TurnTable, single: str = 'zero') -> jax.Array:
  """Says which turns are compared with others.

  Args:
    table: the turns.
    single: `zero`: a group that has shrunk to one member compares nothing.
      `raw`: it is kept.

  Returns:
    [U] bool, False for turns without a group.

  Raises:
    ValueError: unknown `single`.
  """
  check_choice('single', single, ('zero', 'raw'))
  members_E = group_sum(table, jnp.ones(table.episode_group_E.shape, jnp.int32))
  needed = 2 if single == 'zero' else 1
  return lookup(members_E, table.turn_episode_U) >= needed


def finish(
  table: episodes.TurnTable,
  adv_U: jax.Array,
  *,
  penalty_U: jax.Array | None = None,
  single: str = 'zero',
) -> jax.Array:
  """Spreads one advantage a turn over its tokens, after the common rules.

  Args:
    table: the turns.
    adv_U: [U] float, advantage of each turn.
    penalty_U: [U] float, taken off it, see `split_penalty`; None: nothing.
    single: see `compared`. What is not compared gets 0, the penalty included.

  Returns:
    [R] float32, 0 on padding and for episodes without a group.

  Raises:
    ValueError: unknown `single`.
  """
  if penalty_U is not None:
    adv_U = adv_U - penalty_U
  return spread(table, jnp.where(compared(table, single), adv_U, 0.0))


def spread(table: episodes.TurnTable, value_U: jax.Array) -> jax.Array:
  """Returns [R] float32, the value of each token's turn, 0 on padding."""
  # A sum of one element each: XLA fuses no scatter into its readers. Fused, the
  # value of the turn would be worked out anew for every token.
  num_U = table.turn_episode_U.shape[0]
  value_U = jnp.asarray(value_U, jnp.float32)
  value_U = jax.ops.segment_sum(value_U, jnp.arange(num_U), num_U)
  return lookup(value_U, table.token_turn_R)
