"""Packed attention by the splash kernel of TPUs.

The kernel walks over blocks of keys with a running softmax, forward and
backward, so nothing of size [T, T] is ever stored; blocks above the diagonal
are skipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Positions: the width of a vector register, of which blocks are multiples.
_LANES = 128
# The block sizes that public training code settled on for both directions.
_MAX_BLOCK = 512


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_ids_BT: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Causal attention within equal segment ids, on one device.

  Args:
    q_BTNH: queries, rotary applied.
    k_BTKH: keys, rotary applied; K divides N.
    v_BTKH: values.
    segment_ids_BT: int32; positions of different ids never see each other.
    interpret: run the kernel step by step on any platform, for tests.

  Returns:
    [B, T, N, H] in the type of `q_BTNH`.
  """
  # Here because it takes long and only TPUs need it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  length, heads, head_dim = q_BTNH.shape[1:]
  # As few and as equal blocks as possible.
  blocks = -(-length // _MAX_BLOCK)
  block = -(-length // (blocks * _LANES)) * _LANES
  padded = blocks * block
  # The kernel does not scale. Rounded once: the product is taken in float32.
  q_BTNH = (q_BTNH.astype(jnp.float32) * head_dim**-0.5).astype(q_BTNH.dtype)

  def prepare(x_BTNH):
    tail = (0, padded - length)
    return jnp.pad(x_BTNH, ((0, 0), tail, (0, 0), (0, 0))).swapaxes(1, 2)

  # Later positions are never seen by earlier ones, whatever their id.
  ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, padded - length)))
  causal = splash_attention.CausalMask((padded, padded))
  kernel = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([causal] * heads),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )

  def attend_row(q_NTH, k_KTH, v_KTH, ids_T):
    ids = splash_attention.SegmentIds(q=ids_T, kv=ids_T)
    return kernel(q_NTH, k_KTH, v_KTH, segment_ids=ids)

  out_BNTH = jax.vmap(attend_row)(
    prepare(q_BTNH), prepare(k_BTKH), prepare(v_BTKH), ids_BT
  )
  return out_BNTH.swapaxes(1, 2)[:, :length]
