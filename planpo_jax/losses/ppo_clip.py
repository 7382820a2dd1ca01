"""The clipped objective of PPO with a KL penalty.

Sources: PPO, arXiv 1707.06347, equation 7; PlanPO, arXiv 2608.17289, equations
9 and 10; dual clip, arXiv 1912.09729, equation 5; truncated importance
sampling, IMPALA, arXiv 1802.01561, section 4.1, here a weight a token without
products over time.

Departures from PlanPO: equation 9 averages over turns
(`aggregation='turn_mean'`); the default weighs every token alike, as the code
bases that the paper compares with do. The entropy bonus is theirs too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from planpo_jax.losses import kl


def loss(
  logp_BT: jax.Array,
  batch: batch_lib.Batch,
  *,
  entropy_BT: jax.Array,
  denominator: jax.Array | float | None,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.01,
  kl_kind: str = 'k3',
  entropy_coef: float = 0.001,
  aggregation: str = 'token_mean',
  sampler_cap: float | None = None,
) -> tuple[jax.Array, losses.LossMetrics]:
  """Returns the loss to minimise and its metrics.

  l = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
  loss = mean(-w l + kl_coef KL - entropy_coef H), ratio = exp(logp - old_logp)
  w = min(exp(old_logp - sampler_logp), sampler_cap), or 1 without a cap

  Args:
    logp_BT: [B, T] under the policy being trained.
    batch: mask, advantages, old_logp and ref_logp.
    entropy_BT: [B, T] nats, of the policy being trained.
    denominator: divides the weighted sum; None: the weight of this batch.
    clip_low: how far below 1 the ratio may fall.
    clip_high: how far above 1 it may rise.
    dual_clip: bound, above 1, on the ratio where the advantage is negative;
      None: unbounded.
    kl_coef: weight of the KL to the reference.
    kl_kind: see `kl.estimate`.
    entropy_coef: weight of the entropy bonus.
    aggregation: `token_mean` weighs every response token 1; `turn_mean` weighs
      it 1/L_it, so that every turn counts alike.
    sampler_cap: cap, at least 1, on the importance weight of tokens that were
      sampled by another policy than the one scored: an older one, one in
      another precision, or a filtered one; None: they are taken as its own.

  Returns:
    Scalar, and metrics. Without a single response token the scalar and its
    gradient are 0, and the metrics those of `losses.no_metrics`.

  Raises:
    ValueError: unknown aggregation or kl_kind, dual_clip not above 1, or
      sampler_cap below 1.
  """
  if aggregation not in ('token_mean', 'turn_mean'):
    raise ValueError(
      f'aggregation={aggregation!r} is unknown; use token_mean or turn_mean.'
    )
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(
      f'dual_clip={dual_clip} must be above 1, or None for no bound; try 3.'
    )
  if sampler_cap is not None and sampler_cap < 1:
    raise ValueError(
      f'sampler_cap={sampler_cap} must be at least 1, or None for no '
      'correction; try 2.'
    )
  mask_BT = batch.loss_mask_BT
  weight_BT = mask_BT.astype(jnp.float32)
  if aggregation == 'turn_mean':
    weight_BT = weight_BT / jnp.maximum(batch.turn_tokens_BT, 1)
  weight = weight_BT.sum()
  if denominator is None:
    denominator = jnp.where(weight > 0, weight, 1.0)

  def total(x_BT):
    # Where, not a product: what stands on padding may be infinite.
    return jnp.where(mask_BT, weight_BT * x_BT, 0.0).sum() / denominator

  # Masked before exp, lest padding overflow and turn the gradient to NaN.
  log_ratio_BT = jnp.where(mask_BT, logp_BT - batch.old_logp_BT, 0.0)
  ratio_BT = jnp.exp(jnp.clip(log_ratio_BT, -20.0, 20.0))
  adv_BT = batch.adv_BT
  free_BT = -adv_BT * ratio_BT
  clipped_BT = -adv_BT * jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
  policy_BT = jnp.maximum(free_BT, clipped_BT)
  dual_BT = jnp.zeros_like(mask_BT)
  if dual_clip is not None:
    dual_BT = (adv_BT < 0) & (policy_BT > -dual_clip * adv_BT)
    policy_BT = jnp.where(dual_BT, -dual_clip * adv_BT, policy_BT)
  log_drift_BT = jnp.where(
    mask_BT, batch.old_logp_BT - batch.sampler_logp_BT, 0.0
  )
  drift_BT = jnp.exp(jnp.clip(log_drift_BT, -20.0, 20.0))
  capped_BT = jnp.zeros_like(mask_BT)
  if sampler_cap is not None:
    capped_BT = drift_BT > sampler_cap
    policy_BT = policy_BT * jnp.minimum(drift_BT, sampler_cap)
  kl_BT = kl.estimate(
    jnp.where(mask_BT, logp_BT, 0.0),
    jnp.where(mask_BT, batch.ref_logp_BT, 0.0),
    kl_kind,
  )

  policy_loss, kl_ref = total(policy_BT), total(kl_BT)
  entropy = total(entropy_BT)
  value = policy_loss
  # A coefficient of 0 takes the term's backward pass out of the program.
  if kl_coef:
    value = value + kl_coef * kl_ref
  if entropy_coef:
    value = value - entropy_coef * entropy
  metrics = losses.LossMetrics(
    weight=weight,
    policy_loss=policy_loss,
    kl_ref=kl_ref,
    approx_kl=total(jnp.expm1(log_ratio_BT) - log_ratio_BT),
    clip_frac=total(clipped_BT > free_BT),
    dual_clip_frac=total(dual_BT),
    entropy=entropy,
    ratio_min=jnp.min(ratio_BT, initial=jnp.inf, where=mask_BT),
    ratio_max=jnp.max(ratio_BT, initial=0.0, where=mask_BT),
    sampler_gap=jnp.max(jnp.abs(log_drift_BT)),
    sampler_kl=total(jnp.expm1(log_drift_BT) - log_drift_BT),
    sampler_capped=total(capped_BT),
  )
  return value, metrics
