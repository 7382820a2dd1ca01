"""Estimators of the KL divergence to the reference policy.

Source: http://joschu.net/blog/kl-approx.html; bounds as in verl.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def estimate(
  logp_BT: jax.Array, ref_logp_BT: jax.Array, kind: str = 'k3'
) -> jax.Array:
  """Returns per-token estimates of KL(policy || reference) in nats.

  With d = ref_logp - logp of tokens that the policy sampled:
    k1 = -d (unbiased, may be negative), k2 = d^2 / 2 (never negative),
    k3 = exp(d) - d - 1 (unbiased, never negative).

  Args:
    logp_BT: [B, T] log-probability under the policy.
    ref_logp_BT: [B, T] under the reference.
    kind: `k1`, `k2` or `k3`. In a loss, the gradient of k1 has expectation 0:
      it belongs into rewards.

  Returns:
    [B, T]. d is bounded to [-20, 20] and k3 to 10 from above, beyond which
    it passes no gradient.

  Raises:
    ValueError: unknown kind.
  """
  if kind not in ('k1', 'k2', 'k3'):
    raise ValueError(f'kl_kind={kind!r} is unknown; use k1, k2 or k3.')
  d_BT = jnp.clip(ref_logp_BT - logp_BT, -20.0, 20.0)
  if kind == 'k1':
    return -d_BT
  if kind == 'k2':
    return 0.5 * d_BT**2
  # expm1 keeps k3 from rounding below 0 where d is small.
  return jnp.clip(jnp.expm1(d_BT) - d_BT, 0.0, 10.0)


def token_reward(
  logp_BT: jax.Array,
  ref_logp_BT: jax.Array,
  *,
  coef: float,
  kind: str = 'k1',
) -> jax.Array:
  """Returns what the KL to the reference takes off the reward of each token.

  r = -coef KL, with the estimate and the sign of `estimate`: a token that the
  policy makes likelier than the reference does costs under k1.

  Args:
    logp_BT: [B, T] log-probability under the policy that sampled.
    ref_logp_BT: [B, T] under the reference.
    coef: weight of the KL, in units of the return a nat.
    kind: `k1`, `k2` or `k3`. The sum of k1 over a response estimates the KL of
      whole responses without bias.

  Returns:
    [B, T], 0 where both log-probabilities are 0, as outside of responses.

  Raises:
    ValueError: unknown kind.
  """
  return -coef * estimate(logp_BT, ref_logp_BT, kind)
