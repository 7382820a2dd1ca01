"""The clipped objective of PPO with a KL penalty.

Sources: PPO, arXiv 1707.06347, equation 7; PlanPO, arXiv 2608.17289, equations
9 and 10; the ratio of a turn, GSPO, arXiv 2507.18071, equations 7 and 14; the
constant length, Dr. GRPO, arXiv 2503.20783; dual clip, arXiv 1912.09729,
equation 5; truncated importance sampling, IMPALA, arXiv 1802.01561, section
4.1, here a weight a token without products over time.

Departures from PlanPO: equation 9 averages over turns
(`aggregation='turn_mean'`); the default weighs every token alike, as the code
bases that the paper compares with do. The entropy bonus is theirs too.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from planpo_jax.losses import kl

RATIOS = ('token', 'turn')
AGGREGATIONS = ('token_mean', 'turn_mean', 'sequence_mean', 'constant_length')


def loss(
  logp_BT: jax.Array,
  batch: batch_lib.Batch,
  *,
  entropy_BT: jax.Array,
  denominator: jax.Array | float | None,
  ratio: str = 'token',
  clip: bool = True,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.01,
  kl_kind: str = 'k3',
  kl_in_reward: bool = False,
  entropy_coef: float = 0.001,
  aggregation: str = 'token_mean',
  length: int = 512,
  sampler_cap: float | None = None,
) -> tuple[jax.Array, losses.LossMetrics]:
  """Returns the loss to minimise and its metrics.

  l = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
  loss = mean(-w l + kl_coef KL - entropy_coef H)
  ratio = exp(logp - old_logp), or exp(mean of that over the tokens of a turn)
  w = min(exp(old_logp - sampler_logp), sampler_cap), or 1 without a cap

  Tokens outside of the loss mask take part in nothing, neither in the mean of
  a turn nor in its length.

  Args:
    logp_BT: [B, T] under the policy being trained.
    batch: mask, turns, segments, advantages, old_logp and ref_logp.
    entropy_BT: [B, T] nats, of the policy being trained.
    denominator: divides the weighted sum; None: the weight of this batch.
    ratio: `token`, each its own; `turn`, all tokens of a turn share the
      geometric mean of theirs, so that a turn is clipped as a whole. The
      gradient of a token is then that of its own log-probability times the
      shared ratio, hence advantages may differ within a turn.
    clip: False takes the bounds on the ratio away: l = ratio A, whose gradient
      at ratio 1 is that of REINFORCE.
    clip_low: how far below 1 the ratio may fall; 1 sets no lower bound.
    clip_high: how far above 1 it may rise.
    dual_clip: bound, above 1, on the ratio where the advantage is negative;
      None: unbounded.
    kl_coef: weight of the KL to the reference.
    kl_kind: see `kl.estimate`.
    kl_in_reward: the KL was taken off the rewards (`kl.token_reward`); it is
      reported here and otherwise left out.
    entropy_coef: weight of the entropy bonus.
    aggregation: what the mean is taken over. `token_mean`: tokens. `turn_mean`:
      turns, each the mean of its tokens. `sequence_mean`: sequences, each the
      mean of its tokens; a sequence is a segment of a row, so an episode in a
      `conversation` and a turn in a `window`. `constant_length`: sequences,
      each the sum of its tokens over `length`.
    length: tokens, for `constant_length`: what a sequence may have at most, so
      that the loss has about the size of the others.
    sampler_cap: cap, at least 1, on the importance weight of tokens that were
      sampled by another policy than the one scored: an older one, one in
      another precision, or a filtered one; None: they are taken as its own.
      The weight is of single tokens whatever `ratio` is: a mean over the turn
      would hide the few tokens on which the two policies differ.

  Returns:
    Scalar, and metrics. Without a single response token the scalar and its
    gradient are 0, and the metrics those of `losses.no_metrics`.

  Raises:
    ValueError: unknown ratio, aggregation or kl_kind, or a number out of its
      range.
  """
  _need(ratio in RATIOS, f'ratio={ratio!r} is unknown; use token or turn.')
  _need(
    aggregation in AGGREGATIONS,
    f'aggregation={aggregation!r} is unknown; use one of '
    f'{", ".join(AGGREGATIONS)}.',
  )
  _need(
    0 < clip_low <= 1,
    f'clip_low={clip_low} must be above 0 and at most 1; try 0.2.',
  )
  _need(clip_high > 0, f'clip_high={clip_high} must be above 0; try 0.2.')
  _need(
    dual_clip is None or dual_clip > 1,
    f'dual_clip={dual_clip} must be above 1, or None for no bound; try 3.',
  )
  _need(
    0 <= kl_coef < math.inf, f'kl_coef={kl_coef} must be at least 0; try 0.01.'
  )
  _need(
    0 <= entropy_coef < math.inf,
    f'entropy_coef={entropy_coef} must be at least 0; try 0.001.',
  )
  _need(length >= 1, f'length={length} must be at least 1 token; try 512.')
  _need(
    sampler_cap is None or sampler_cap >= 1,
    f'sampler_cap={sampler_cap} must be at least 1, or None for no '
    'correction; try 2.',
  )
  mask_BT = batch.loss_mask_BT
  weight_BT, share_BT = _weights(batch, aggregation, length)
  weight = share_BT.sum()
  if denominator is None:
    denominator = jnp.where(weight > 0, weight, 1.0)

  def total(x_BT, by_BT):
    # Where, not a product: what stands on padding may be infinite.
    return jnp.where(mask_BT, by_BT * x_BT, 0.0).sum() / denominator

  # Masked before exp, lest padding overflow and turn the gradient to NaN.
  log_ratio_BT = _bounded(jnp.where(mask_BT, logp_BT - batch.old_logp_BT, 0.0))
  ratio_BT = jnp.exp(
    log_ratio_BT if ratio == 'token' else _of_turn(log_ratio_BT, batch)
  )
  adv_BT = batch.adv_BT
  free_BT = -adv_BT * ratio_BT
  clipped_BT = free_BT
  if clip:
    clipped_BT = -adv_BT * jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
  policy_BT = jnp.maximum(free_BT, clipped_BT)
  dual_BT = jnp.zeros_like(mask_BT)
  if dual_clip is not None:
    dual_BT = (adv_BT < 0) & (policy_BT > -dual_clip * adv_BT)
    policy_BT = jnp.where(dual_BT, -dual_clip * adv_BT, policy_BT)
  gap_BT = jnp.where(mask_BT, batch.old_logp_BT - batch.sampler_logp_BT, 0.0)
  log_drift_BT = _bounded(gap_BT)
  drift_BT = jnp.exp(log_drift_BT)
  capped_BT = jnp.zeros_like(mask_BT)
  if sampler_cap is not None:
    capped_BT = drift_BT > sampler_cap
    policy_BT = policy_BT * jnp.minimum(drift_BT, sampler_cap)
  kl_BT = kl.estimate(
    jnp.where(mask_BT, logp_BT, 0.0),
    jnp.where(mask_BT, batch.ref_logp_BT, 0.0),
    kl_kind,
  )

  policy_loss = total(policy_BT, weight_BT)
  value = policy_loss
  # A coefficient of 0 takes the term's backward pass out of the program.
  if kl_coef and not kl_in_reward:
    value = value + kl_coef * total(kl_BT, weight_BT)
  if entropy_coef:
    value = value - entropy_coef * total(entropy_BT, weight_BT)
  metrics = losses.LossMetrics(
    weight=weight,
    policy_loss=policy_loss,
    kl_ref=total(kl_BT, share_BT),
    approx_kl=total(jnp.expm1(log_ratio_BT) - log_ratio_BT, share_BT),
    clip_frac=total(clipped_BT > free_BT, share_BT),
    dual_clip_frac=total(dual_BT, share_BT),
    entropy=total(entropy_BT, share_BT),
    ratio_min=jnp.min(ratio_BT, initial=jnp.inf, where=mask_BT),
    ratio_max=jnp.max(ratio_BT, initial=0.0, where=mask_BT),
    sampler_gap=jnp.max(jnp.abs(gap_BT)),
    sampler_kl=total(jnp.expm1(log_drift_BT) - log_drift_BT, share_BT),
    sampler_capped=total(capped_BT, share_BT),
  )
  return value, metrics


def _need(works: bool, message: str) -> None:
  if not works:
    raise ValueError(message)


def _weights(
  batch: batch_lib.Batch, aggregation: str, length: int
) -> tuple[jax.Array, jax.Array]:
  """Returns what each token weighs in the loss, and its share in the metrics.

  Both are [B, T] and 0 outside of the loss mask. Shares add up to the number of
  tokens, turns or sequences that the mean is over. They are the weights too,
  but for `constant_length`, whose weights do not add up to that.
  """
  mask_BT = batch.loss_mask_BT.astype(jnp.float32)
  if aggregation == 'token_mean':
    return mask_BT, mask_BT
  by_turn = aggregation == 'turn_mean'
  group_BT = batch.turn_BT if by_turn else batch.segment_ids_BT
  share_BT = mask_BT / jnp.maximum(_group_sum(mask_BT, group_BT), 1)
  if aggregation == 'constant_length':
    return mask_BT / length, share_BT
  return share_BT, share_BT


def _of_turn(log_ratio_BT: jax.Array, batch: batch_lib.Batch) -> jax.Array:
  """The mean over each turn, with the gradient of the token's own value."""
  tokens_BT = _group_sum(batch.loss_mask_BT.astype(jnp.float32), batch.turn_BT)
  mean_BT = _group_sum(log_ratio_BT, batch.turn_BT) / jnp.maximum(tokens_BT, 1)
  # The difference is exactly 0: all tokens of a turn get the same number.
  own_BT = log_ratio_BT - jax.lax.stop_gradient(log_ratio_BT)
  return jax.lax.stop_gradient(mean_BT) + own_BT


def _group_sum(x_BT: jax.Array, group_BT: jax.Array) -> jax.Array:
  """Returns [B, T] the sum over the tokens of the row in the same group.

  Groups are numbered from 0 to T at most, for each has a token. Row by row, so
  that rows stay on their devices.
  """

  def row(x_T, group_T):
    sums = jax.ops.segment_sum(x_T, group_T, num_segments=len(x_T) + 1)
    return sums[group_T]

  return jax.vmap(row)(x_BT, jnp.asarray(group_BT))


def _bounded(log_BT: jax.Array) -> jax.Array:
  """Keeps exp finite; no gradient passes beyond."""
  return jnp.clip(log_BT, -20.0, 20.0)
