"""A critic: the backbone of the policy with heads of one number each.

It reads the rows that the policy reads and has params of its own, which start
from those of the policy.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from planpo_jax.models import qwen2


def init_params(
  policy: qwen2.Policy, backbone_params: qwen2.Params, heads: int
) -> qwen2.Params:
  """The params of the backbone and heads of zeros: every value is 0 at first.

  Args:
    policy: the network.
    backbone_params: params of `policy`. They are shared, not copied;
      `update.create` copies.
    heads: C.

  Returns:
    Params named as those of the policy; the head over the vocabulary, where it
    is not the embedding, has given way to `w_value_DC`, float32.

  Raises:
    ValueError: heads below 1.
  """
  if heads < 1:
    raise ValueError(f'heads={heads} must be at least 1.')
  backbone = {k: v for k, v in backbone_params.items() if k != 'head_VD'}
  width = policy.config.hidden_size
  return backbone | {'w_value_DC': jnp.zeros((width, heads), jnp.float32)}


def values(
  policy: qwen2.Policy,
  params: qwen2.Params,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  segment_ids_BT: jax.Array,
) -> jax.Array:
  """Value of the state before each token: of what precedes it in its segment.

  Args:
    policy: the network.
    params: from `init_params`.
    tokens_BT: int32 ids.
    positions_BT: int32, from 0 within each segment.
    segment_ids_BT: int32, 0 on padding.

  Returns:
    value_BTC: float32, in units of the return; 0 at the first token of a
    segment and on padding, as `qwen2.token_logps`.
  """
  backbone = {k: v for k, v in params.items() if k != 'w_value_DC'}
  hidden_BTD = _backbone(policy).hidden(
    backbone, tokens_BT, positions_BT, segment_ids_BT
  )
  value_BTC = jnp.einsum(
    'BTD,DC->BTC',
    hidden_BTD.astype(jnp.float32),
    params['w_value_DC'],
    # TPU and GPU would round what goes into the product to fewer bits.
    precision=jax.lax.Precision.HIGHEST,
  )
  previous_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
  known_BT = (segment_ids_BT > 0) & (segment_ids_BT == previous_BT)
  return jnp.where(known_BT[..., None], jnp.roll(value_BTC, 1, axis=1), 0.0)


@functools.cache
def _backbone(policy: qwen2.Policy) -> qwen2.Policy:
  """The network without a head over the vocabulary of its own."""
  tied = dataclasses.replace(policy.config, tie_word_embeddings=True)
  return qwen2.create(tied, policy.num_tokens)
