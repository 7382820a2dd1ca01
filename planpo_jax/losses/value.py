"""The loss of the critic: squared error, clipped as PPO's code does.

The form is that of openai/baselines; PPO, arXiv 1707.06347, equation 9, leaves
out the clipping. verl-agent scales by 1, AgentGym-RL by 1/2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from planpo_jax import batch as batch_lib

# Targets that deviate by less than this share of their mean are tied.
_TIE_RTOL = 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueMetrics:
  """What the loss reports; float32.

  The first five are scalars: sums over targets until `mean` divides them. The
  others are statistics over the targets of each head, which `merge` joins
  without a loss, so that parts of any size give the explained variance of the
  whole.

  Attributes:
    weight: number of targets, never divided.
    value_loss: the loss, divided by its denominator.
    value_clip_frac: share of values where clipping cut the gradient.
    value: of the critic (units of the return).
    target: what it is to learn.
    count_C: targets of each head.
    target_mean_C: their mean.
    target_spread_C: sum of their squared deviations from it.
    error_mean_C: mean of target - value.
    error_spread_C: sum of the squared deviations from that.
  """

  weight: jax.Array
  value_loss: jax.Array
  value_clip_frac: jax.Array
  value: jax.Array
  target: jax.Array
  count_C: jax.Array
  target_mean_C: jax.Array
  target_spread_C: jax.Array
  error_mean_C: jax.Array
  error_spread_C: jax.Array


_SUMS = ('value_loss', 'value_clip_frac', 'value', 'target')


def no_metrics(heads: int) -> ValueMetrics:
  """Returns the metrics of a batch without targets."""
  return ValueMetrics(
    **{
      field.name: jnp.zeros(
        heads if field.name.endswith('_C') else (), jnp.float32
      )
      for field in dataclasses.fields(ValueMetrics)
    }
  )


def merge(a: ValueMetrics, b: ValueMetrics) -> ValueMetrics:
  """Joins the metrics of two parts that were given the same denominator.

  Means and squared deviations join as in Chan, Golub and LeVeque, "Updating
  formulae" (1979), which loses no digits where sums of squares would.
  """
  count_C = a.count_C + b.count_C
  share_C = b.count_C / jnp.maximum(count_C, 1)
  moments = {}
  for name in ('target', 'error'):
    mean_C, spread_C = f'{name}_mean_C', f'{name}_spread_C'
    shift_C = getattr(b, mean_C) - getattr(a, mean_C)
    moments[mean_C] = getattr(a, mean_C) + share_C * shift_C
    moments[spread_C] = (
      getattr(a, spread_C)
      + getattr(b, spread_C)
      + a.count_C * share_C * shift_C**2
    )
  return ValueMetrics(
    weight=a.weight + b.weight,
    count_C=count_C,
    **{name: getattr(a, name) + getattr(b, name) for name in _SUMS},
    **moments,
  )


def mean(metrics: ValueMetrics) -> ValueMetrics:
  """Turns sums into means over all targets; without any they stay 0."""
  denominator = jnp.where(metrics.weight > 0, metrics.weight, 1.0)
  return dataclasses.replace(
    metrics, **{name: getattr(metrics, name) / denominator for name in _SUMS}
  )


def explained_variance(metrics: ValueMetrics) -> jax.Array:
  """Returns [C] 1 - Var(target - value) / Var(target).

  1 for a perfect critic, 0 for one that says a constant, and 0 where the
  targets are all equal up to rounding: there is nothing to explain.
  """
  count_C = jnp.maximum(metrics.count_C, 1)
  rounding_C = count_C * (_TIE_RTOL * metrics.target_mean_C) ** 2
  apart_C = metrics.target_spread_C > rounding_C
  share_C = metrics.error_spread_C / jnp.where(
    apart_C, metrics.target_spread_C, 1.0
  )
  return jnp.where(apart_C, 1.0 - share_C, 0.0)


def value_loss(
  value_BTC: jax.Array,
  batch: batch_lib.Batch,
  *,
  denominator: jax.Array | float | None,
  clip: float | None = 0.5,
  scale: float = 1.0,
) -> tuple[jax.Array, ValueMetrics]:
  """Returns the loss to minimise and its metrics.

  loss = scale sum_c mean(max((V - G)^2, (clip(V, V_old - clip, V_old + clip)
  - G)^2)), the mean over the targets G that `target_mask_BTC` gives head c.

  Args:
    value_BTC: [B, T, C] by the critic being trained.
    batch: `value_BTC` (V_old), `target_BTC` and `target_mask_BTC`.
    denominator: divides the sum over the targets of each head, [C] or one for
      all; None: the number of targets that the head has in this batch.
    clip: how far a value may move from the old one, in units of the return;
      None: as far as it likes.
    scale: factor.

  Returns:
    Scalar, and metrics. Without a single target the scalar and its gradient
    are 0.

  Raises:
    ValueError: clip or scale not above 0.
  """
  for name, given in (('clip', clip), ('scale', scale)):
    if given is not None and not given > 0:
      raise ValueError(f'{name}={given} must be above 0; try 0.5.')
  mask_BTC = jnp.asarray(batch.target_mask_BTC)
  count_C = mask_BTC.sum((0, 1), dtype=jnp.float32)
  if denominator is None:
    denominator = jnp.maximum(count_C, 1)

  def on_targets(x_BTC):
    # Where, not a product: what stands on padding may be infinite.
    return jnp.where(mask_BTC, x_BTC, 0.0)

  # Masked before the square, lest padding turn the gradient to NaN.
  value_BTC, old_BTC, target_BTC = map(
    on_targets, (value_BTC, batch.value_BTC, batch.target_BTC)
  )
  loss_BTC = jnp.square(value_BTC - target_BTC)
  clipped_BTC = jnp.zeros_like(mask_BTC)
  if clip is not None:
    near_BTC = jnp.clip(value_BTC, old_BTC - clip, old_BTC + clip)
    far_BTC = jnp.square(near_BTC - target_BTC)
    clipped_BTC = far_BTC > loss_BTC
    loss_BTC = jnp.maximum(loss_BTC, far_BTC)

  def moments(x_BTC):
    x_BTC = jax.lax.stop_gradient(x_BTC)
    mean_C = x_BTC.sum((0, 1)) / jnp.maximum(count_C, 1)
    return mean_C, jnp.square(on_targets(x_BTC - mean_C)).sum((0, 1))

  target_mean_C, target_spread_C = moments(target_BTC)
  error_mean_C, error_spread_C = moments(target_BTC - value_BTC)
  loss = scale * (loss_BTC.sum((0, 1)) / denominator).sum()
  metrics = ValueMetrics(
    weight=count_C.sum(),
    value_loss=loss,
    value_clip_frac=clipped_BTC.sum(dtype=jnp.float32),
    value=value_BTC.sum(),
    target=target_BTC.sum(),
    count_C=count_C,
    target_mean_C=target_mean_C,
    target_spread_C=target_spread_C,
    error_mean_C=error_mean_C,
    error_spread_C=error_spread_C,
  )
  return loss, metrics
