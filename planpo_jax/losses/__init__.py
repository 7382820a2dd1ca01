"""Policy losses, one file a loss, and the metrics that all of them report.

A loss is a module here with `loss(logp_BT, batch, *, entropy_BT, denominator,
...) -> (scalar, LossMetrics)`; the keyword arguments with a default are its
hyperparameters. The scalar is a weighted sum over response tokens divided by
`denominator`; None stands for the weight of the batch itself: the number of
tokens, turns or sequences that the loss is a mean over. A caller that splits a
batch between rows gives 1 for each part, adds up, and divides once by the
weight of the whole; so the split never changes the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planpo_jax import batch as batch_lib
from planpo_jax import registry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossMetrics:
  """What a loss reports; float32 scalars.

  All but the weight and the extremes are sums over response tokens, divided by
  the denominator of the loss. Tokens are weighted as in the loss, but for
  `constant_length`, which weighs them in the policy loss alone: the others are
  means over the tokens of a sequence there, so that shares end at 1.

  Attributes:
    weight: number of tokens, turns or sequences, never divided.
    policy_loss: the clipped objective, negated, without KL and entropy.
    kl_ref: KL to the reference policy (nats, a token), by the estimator that
      `kl_kind` chose, whether it is trained in the loss or in the reward; only
      k1 may be negative.
    approx_kl: k3 estimate of KL(old || new) (nats, a token).
    clip_frac: share of tokens where clipping cut the gradient.
    dual_clip_frac: share of tokens bounded by the dual clip.
    entropy: of the policy (nats, a token).
    ratio_min: smallest new/old probability ratio, of a token or, where turns
      share theirs, of a turn; inf where there is none.
    ratio_max: largest; 0 where there is none.
    sampler_gap: largest |old_logp - sampler_logp| (nats): how far the policy
      that is trained from is from what was sampled.
    sampler_kl: k3 estimate of KL(sampler || old) (nats, a token): the same, on
      average.
    sampler_capped: share of tokens whose importance weight was capped.
  """

  weight: jax.Array
  policy_loss: jax.Array
  kl_ref: jax.Array
  approx_kl: jax.Array
  clip_frac: jax.Array
  dual_clip_frac: jax.Array
  entropy: jax.Array
  ratio_min: jax.Array
  ratio_max: jax.Array
  sampler_gap: jax.Array
  sampler_kl: jax.Array
  sampler_capped: jax.Array


_SUMS = (
  'policy_loss',
  'kl_ref',
  'approx_kl',
  'clip_frac',
  'dual_clip_frac',
  'entropy',
  'sampler_kl',
  'sampler_capped',
)


def no_metrics() -> LossMetrics:
  """Returns the metrics of a batch without response tokens."""
  zero = jnp.zeros((), jnp.float32)
  return LossMetrics(
    weight=zero,
    ratio_min=zero + jnp.inf,
    ratio_max=zero,
    sampler_gap=zero,
    **{name: zero for name in _SUMS},
  )


def merge(a: LossMetrics, b: LossMetrics) -> LossMetrics:
  """Joins the metrics of two parts that were given the same denominator."""
  return LossMetrics(
    weight=a.weight + b.weight,
    ratio_min=jnp.minimum(a.ratio_min, b.ratio_min),
    ratio_max=jnp.maximum(a.ratio_max, b.ratio_max),
    sampler_gap=jnp.maximum(a.sampler_gap, b.sampler_gap),
    **{name: getattr(a, name) + getattr(b, name) for name in _SUMS},
  )


def mean(metrics: LossMetrics) -> LossMetrics:
  """Turns sums (denominator 1) into means; all fields of the result are finite.

  Without response tokens the sums stay 0 and the ratios become 1.
  """
  some = metrics.weight > 0
  denominator = jnp.where(some, metrics.weight, 1.0)
  return dataclasses.replace(
    metrics,
    ratio_min=jnp.where(some, metrics.ratio_min, 1.0),
    ratio_max=jnp.where(some, metrics.ratio_max, 1.0),
    **{name: getattr(metrics, name) / denominator for name in _SUMS},
  )


def names() -> list[str]:
  """Returns the losses found, sorted."""
  return list(registry.find(__name__, 'loss'))


def hyperparameters(name: str) -> dict[str, Any]:
  """Returns the hyperparameters of a loss and their defaults.

  Raises:
    ValueError: unknown loss.
  """
  return registry.hyperparameters(registry.entry_of(__name__, 'loss', name))


def get(
  name: str, **chosen: Any
) -> Callable[..., tuple[jax.Array, LossMetrics]]:
  """Binds hyperparameters to a loss.

  Returns:
    `(logp_BT, batch, *, entropy_BT, denominator) -> (scalar, LossMetrics)`.

  Raises:
    ValueError: unknown loss, or a value that the loss does not know.
    TypeError: unknown hyperparameter.
  """
  loss = registry.entry_of(__name__, 'loss', name)
  registry.check(name, loss, chosen)
  bound = functools.partial(loss, **chosen)
  # Traced once on an empty batch, so that a bad value is found before the
  # first rollout.
  jax.eval_shape(
    functools.partial(bound, denominator=None),
    np.zeros((1, 1), np.float32),
    batch_lib.pack([], context='window', row_len=1),
    entropy_BT=np.zeros((1, 1), np.float32),
  )
  return bound
