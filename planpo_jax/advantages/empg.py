"""EMPG: GRPO scaled by the certainty of a turn, and a bonus for the next's.

Source: EMPG, arXiv 2509.09265. Available were the abstract, the first half of
the pseudocode of the project page (empgseed-seed.github.io), the second half as
ARLArena's code keeps it, and the equations as ARLArena (arXiv 2602.21534, S20
to S23) restates them; not the text of the paper, so its equations are named as
the pseudocode numbers them. Defaults are the pseudocode's: k = k' = 1, zeta =
0.1; ARLArena takes zeta = 0.05.

Open points: the pseudocode normalises over what it is given; here that is all
turns of the step, before minibatches. The base is GRPO per episode. The last
turn has no next and gets no bonus, nor does a turn before an empty response,
which has no entropy. The last step takes only the mean over turns off, as the
pseudocode does. So with equal entropies EMPG is GRPO plus zeta on every turn
but the last of an episode, less the mean of that.

Consequences by definition: groups are not apart (`batch_wide`), and a group
without variance, even one of identical members, still learns from the bonus.
The penalty on invalid format comes after the mean, so the mean of a step with
such turns is below 0 (`penalty='pre'`: inside the return, as verl-agent).

Departures: entropies that differ by rounding only count as equal, where the
pseudocode would stretch them over 0 to 1; the pseudocode's 1e-8 in the two
denominators is left out, for they cannot vanish.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(
  group=True, outcome=True, entropy=True, batch_wide=True
)

PRESETS = {
  'empg_dapo': {
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.clip_high': 0.28,
    'train.max_refills': 10,
  },
}


def modulate(
  adv_U: jax.Array,
  entropy_U: jax.Array,
  *,
  counted_U: jax.Array,
  followed_U: jax.Array,
  k: float = 1.0,
  k_future: float = 1.0,
  zeta: float = 0.1,
) -> jax.Array:
  """Scales advantages by certainty and adds the bonus for future clarity.

    h_u   = (H_u - min H) / (max H - min H)                              (12)
    g_u   = exp(-k h_u) / mean exp(-k h)                                 (10)
    f_u   = exp(-k' h_u)                                                 (11)
    A'_u  = A_u g_u + zeta f_{u+1}, without the bonus where nothing follows (8)
    A''_u = A'_u - mean A'                                               (7)

  Args:
    adv_U: [U] float, advantage of the episode of each turn.
    entropy_U: [U] float, nats, at least 0.
    counted_U: [U] bool, turns that take part; extremes and means are theirs.
    followed_U: [U] bool, element u + 1 is the next turn of the same episode
      and takes part.
    k: k, sharpness of the scale; 0 leaves advantages as they are.
    k_future: k', sharpness of the bonus.
    zeta: weight of the bonus.

  Returns:
    [U] float32, 0 where `counted_U` is False.
  """
  highest = jnp.max(entropy_U, where=counted_U, initial=0.0)
  lowest = jnp.min(entropy_U, where=counted_U, initial=jnp.inf)
  # Else equal entropies that float32 cannot hold would span all of 0 to 1.
  apart = highest - lowest > segments.TIE_RTOL * highest
  h_U = jnp.where(
    counted_U & apart,
    (entropy_U - lowest) / jnp.where(apart, highest - lowest, 1.0),
    0.0,
  )
  count = jnp.maximum(jnp.sum(counted_U), 1)

  def mean(x_U):
    return jnp.sum(x_U, where=counted_U) / count

  g_U = jnp.exp(-k * h_U)
  g_U /= jnp.where(counted_U.any(), mean(g_U), 1.0)
  f_U = jnp.exp(-k_future * h_U)
  bonus_U = jnp.where(followed_U, jnp.roll(f_U, -1), 0.0)
  adv_U = adv_U * g_U + zeta * bonus_U
  return jnp.where(counted_U, adv_U - mean(adv_U), 0.0)


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  k: float = 1.0,
  k_future: float = 1.0,
  zeta: float = 0.1,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  single: str = 'zero',
) -> jax.Array:
  """Returns GRPO's advantages after `modulate`, on every token of a turn.

  H is the mean entropy of the tokens of the turn.

  Args:
    table: the turns of all groups, with `token_entropy_R`.
    progress: k/K; EMPG does not read it.
    k: see `modulate`.
    k_future: see `modulate`.
    zeta: see `modulate`.
    use_std: divide GRPO's advantage by the standard deviation.
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: of GRPO's mean and deviation, see `segments.normalise_episodes`.
    penalty: where a turn of invalid format loses `invalid_penalty`: `post`,
      off the result; `pre`, off its return before all else.
    invalid_penalty: units of the advantage (`post`) or of the return (`pre`).
    single: a group of one: `zero`, no part in anything and 0; `raw`, its
      return is its advantage.

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown `stat`, `penalty` or `single`.
  """
  del progress
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  adv_U = segments.normalise_episodes(
    table,
    table.episode_return_E,
    stat=stat,
    penalty_U=before_U,
    single=single,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )
  tokens_U = jnp.asarray(table.turn_tokens_U)
  entropy_U = segments.turn_sum(table, table.token_entropy_R) / jnp.maximum(
    tokens_U, 1
  )
  counted_U = segments.compared(table, single) & (tokens_U > 0)
  followed_U = ~segments.is_last_turn(table) & jnp.roll(counted_U, -1)
  adv_U = modulate(
    adv_U,
    entropy_U,
    counted_U=counted_U,
    followed_U=followed_U,
    k=k,
    k_future=k_future,
    zeta=zeta,
  )
  return segments.finish(table, adv_U, penalty_U=after_U, single=single)
