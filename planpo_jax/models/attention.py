"""Grouped-query attention: over packed rows, and over a cache.

Queries come as [B, T, N, H] with N = K x G: query head n reads key/value head
n // G, the order of Hugging Face's `repeat_kv`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planpo_jax import sharding
from planpo_jax.models import splash

# By platform: any, TPU, NVIDIA GPU.
KERNELS = ('xla', 'splash', 'cudnn')

# Keys [rows, K, H, S] and values [rows, K, S, H] of adjacent positions: both
# are then read as plain matrix products, without a transposed copy.
CachePiece = tuple[jax.Array, jax.Array]
# The cache of one layer: pieces that follow one another.
LayerCache = tuple[CachePiece, ...]

# Positions of the first piece of a cache; all pieces are multiples of it.
_FIRST_PIECE = 128

# Queries per block of the packed form, unless that makes too many blocks.
_QUERY_BLOCK = 128
_MAX_QUERY_BLOCKS = 8

# Finite, so that a row with nothing to attend to (padding) gives no NaN.
_MASKED = -1e30


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_ids_BT: jax.Array,
  *,
  kernel: str = 'xla',
) -> jax.Array:
  """Causal attention within equal segment ids of packed rows.

  Under a mesh (`jax.set_mesh`) the kernels other than 'xla' run on each
  device over its own rows and heads; 'xla' is partitioned by the compiler.

  Args:
    q_BTNH: queries, rotary applied.
    k_BTKH: keys, rotary applied; K divides N.
    v_BTKH: values.
    segment_ids_BT: int32; positions of different ids never see each other.
      Id 0 is padding: finite, without meaning.
    kernel: one of `KERNELS`: 'xla' runs everywhere, 'splash' on TPU, 'cudnn'
      on NVIDIA GPUs and in 16 bits only.

  Returns:
    [B, T, N, H] in the type of `v_BTKH`.

  Raises:
    ValueError: unknown kernel, or inputs that it does not take.
  """
  if kernel not in KERNELS:
    raise ValueError(
      f'attention kernel {kernel!r} is unknown; use one of '
      f'{", ".join(KERNELS)}.'
    )
  if kernel == 'xla':
    return _attend_xla(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
  return sharding.map_heads(
    splash.attend if kernel == 'splash' else _attend_cudnn,
    q_BTNH,
    k_BTKH,
    v_BTKH,
    segment_ids_BT,
  )


def _attend_cudnn(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
  """Flash attention of cuDNN; the segments become a mask [B, 1, T, T]."""
  if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"attention kernel 'cudnn' takes bfloat16 or float16, not "
      f"{q_BTNH.dtype}; compute in bfloat16 or use the kernel 'xla'."
    )
  length = q_BTNH.shape[1]
  # Its backward pass with a mask needs an even length.
  tail = (0, length % 2)
  q_BTNH, k_BTKH, v_BTKH = (
    jnp.pad(x, ((0, 0), tail, (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH)
  )
  ids_BT = jnp.pad(segment_ids_BT, ((0, 0), tail))
  out_BTNH = jax.nn.dot_product_attention(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    mask=(ids_BT[:, :, None] == ids_BT[:, None, :])[:, None],
    is_causal=True,
    implementation='cudnn',
  )
  return out_BTNH[:, :length]


def _attend_xla(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
  batch, length, heads, head_dim = q_BTNH.shape
  kv_heads = k_BTKH.shape[2]
  q_BKGTH = q_BTNH.reshape(batch, length, kv_heads, -1, head_dim).transpose(
    0, 2, 3, 1, 4
  )
  k_BKSH = k_BTKH.transpose(0, 2, 1, 3)
  v_BKSH = v_BTKH.transpose(0, 2, 1, 3)
  # Unrolled: later keys are cut off statically, which saves almost half of the
  # work; the number of blocks is bounded because each one is compiled.
  block = max(_QUERY_BLOCK, -(-length // _MAX_QUERY_BLOCKS))
  outs = []
  for start in range(0, length, block):
    end = min(start + block, length)
    outs.append(
      _attend_block(
        q_BKGTH[:, :, :, start:end],
        k_BKSH[:, :, :end],
        v_BKSH[:, :, :end],
        segment_ids_BT[:, start:end],
        segment_ids_BT[:, :end],
      )
    )
  return (
    jnp.concatenate(outs, axis=3)
    .transpose(0, 3, 1, 2, 4)
    .reshape(batch, length, heads, head_dim)
  )


def _attend_block(q_BKGTH, k_BKSH, v_BKSH, segment_ids_BT, segment_ids_BS):
  """The last T of S positions against all S, causally, within segments."""
  batch, kv_heads, groups, queries, head_dim = q_BKGTH.shape
  keys = k_BKSH.shape[2]
  # One matrix product per row and key/value head, groups side by side.
  scores = jnp.einsum(
    'BKQH,BKSH->BKQS',
    q_BKGTH.reshape(batch, kv_heads, groups * queries, head_dim),
    k_BKSH,
    preferred_element_type=jnp.float32,
  ) * (head_dim**-0.5)
  scores_BKGTS = scores.reshape(batch, kv_heads, groups, queries, keys)
  index_T = jnp.arange(keys - queries, keys)
  mask_BTS = (index_T[:, None] >= jnp.arange(keys)) & (
    segment_ids_BT[:, :, None] == segment_ids_BS[:, None, :]
  )
  scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
  probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BKSH.dtype)
  probs_BKQS = probs_BKGTS.reshape(batch, kv_heads, groups * queries, keys)
  out = jnp.einsum('BKQS,BKSH->BKQH', probs_BKQS, v_BKSH)
  return out.reshape(q_BKGTH.shape)


def init_cache(
  rows: int,
  length: int,
  num_kv_heads: int,
  head_dim: int,
  dtype: str,
  layers: int | None = None,
) -> LayerCache:
  """An empty cache of at least `length` positions, for one layer.

  With `layers`, for so many: every array gets a leading axis L, and the
  functions below take the index of the layer they work on.

  `dtype` may be uint16: the cache then holds the bits of bfloat16, because
  XLA's CPU compiler writes into an array of bfloat16 by converting all of it
  to float32 and back.

  Each piece is as long as all before it, so that a few pieces cover any
  length and reading stops within twice what is filled. Pieces are arrays of
  their own because slicing one large array would copy what is read.
  """
  stack = () if layers is None else (layers,)
  pieces = []
  start = 0
  while start < length:
    size = min(max(start, _FIRST_PIECE), length - start)
    size = -(-size // _FIRST_PIECE) * _FIRST_PIECE
    pieces.append(
      (
        jnp.zeros((*stack, rows, num_kv_heads, head_dim, size), dtype),
        jnp.zeros((*stack, rows, num_kv_heads, size, head_dim), dtype),
      )
    )
    start += size
  return tuple(pieces)


def write_cache(
  cache: LayerCache,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  row_B: jax.Array | None,
  positions_BT: jax.Array,
  layer: jax.Array | None = None,
) -> LayerCache:
  """Stores keys and values; positions below 0 are dropped.

  `row_B` names the row of the cache of each row given; None: all, in order.
  """
  if cache[0][0].dtype == jnp.uint16:
    k_BTKH, v_BTKH = (
      jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (k_BTKH, v_BTKH)
    )
  if row_B is None:
    row_B = jnp.arange(positions_BT.shape[0])
  rows_B1 = row_B[:, None]
  where = (rows_B1,) if layer is None else (layer, rows_B1)
  start = 0
  written = []
  for k_cache, v_cache in cache:
    size = v_cache.shape[-2]
    inside_BT = (positions_BT >= start) & (positions_BT < start + size)
    index_BT = jnp.where(inside_BT, positions_BT - start, size)
    written.append(
      (
        k_cache.at[*where, :, :, index_BT].set(k_BTKH, mode='drop'),
        v_cache.at[*where, :, index_BT].set(v_BTKH, mode='drop'),
      )
    )
    start += size
  return tuple(written)


def attend_cache(
  q_BTNH: jax.Array,
  cache: LayerCache,
  positions_BT: jax.Array,
  row_B: jax.Array | None,
  filled: jax.Array,
  layer: jax.Array | None = None,
) -> jax.Array:
  """Attention of new tokens over cached ones, themselves included.

  The cache is read piece by piece with a running softmax. A piece beyond the
  length of a row changes nothing in that row, not even the last bit (its
  weights are exactly 0 and the running maximum stays), so skipping pieces by
  the longest row does not make any row depend on the others.

  Args:
    q_BTNH: queries, rotary applied.
    cache: keys and values, those of the new tokens written already.
    positions_BT: cache position of each query; it sees positions up to its
      own.
    row_B: int32, the row of the cache of each row; None: all, in order.
    filled: int32; pieces that start there or later are not read.
    layer: which one, if the cache holds several.

  Returns:
    [B, T, N, H] in the type of the queries.
  """
  batch, queries, heads, head_dim = q_BTNH.shape
  kv_heads = cache[0][0].shape[-3]
  groups = heads // kv_heads
  # [B, K, Q, H] with Q = T x G: one matrix product per row and K/V head.
  q_BKQH = (
    (q_BTNH * jnp.asarray(head_dim**-0.5, q_BTNH.dtype))
    .reshape(batch, queries, kv_heads, groups, head_dim)
    .transpose(0, 2, 1, 3, 4)
    .reshape(batch, kv_heads, queries * groups, head_dim)
  )
  positions_BQ = jnp.repeat(positions_BT, groups, axis=1)

  def read(carry, piece, start):
    max_BKQ, sum_BKQ, out_BKQH = carry
    k_BKHS, v_BKSH = (_rows_of(x, layer, row_B) for x in piece)
    scores_BKQS = jnp.einsum(
      'BKQH,BKHS->BKQS', q_BKQH, k_BKHS, preferred_element_type=jnp.float32
    )
    index_S = start + jnp.arange(v_BKSH.shape[2])
    mask_BQS = positions_BQ[:, :, None] >= index_S
    scores_BKQS = jnp.where(mask_BQS[:, None], scores_BKQS, _MASKED)
    new_max_BKQ = jnp.maximum(max_BKQ, scores_BKQS.max(axis=-1))
    keep_BKQ = jnp.exp(max_BKQ - new_max_BKQ)
    probs_BKQS = jnp.exp(scores_BKQS - new_max_BKQ[..., None])
    values_BKQH = jnp.einsum(
      'BKQS,BKSH->BKQH',
      probs_BKQS.astype(v_BKSH.dtype),
      v_BKSH,
      preferred_element_type=jnp.float32,
    )
    return (
      new_max_BKQ,
      sum_BKQ * keep_BKQ + probs_BKQS.sum(axis=-1),
      out_BKQH * keep_BKQ[..., None] + values_BKQH,
    )

  shape = (batch, kv_heads, queries * groups)
  carry = (
    jnp.full(shape, _MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, head_dim), jnp.float32),
  )
  # Every query sees position 0, so the first piece makes the maximum real;
  # from there on a masked score weighs exp(-1e30 - max) = 0.
  carry = read(carry, cache[0], 0)
  start = cache[0][1].shape[-2]
  for piece in cache[1:]:
    carry = jax.lax.cond(
      start < filled,
      lambda carry, piece, start=start: read(carry, piece, start),
      lambda carry, _: carry,
      carry,
      piece,
    )
    start += piece[1].shape[-2]
  _, sum_BKQ, out_BKQH = carry
  out_BKQH = (out_BKQH / sum_BKQ[..., None]).astype(q_BTNH.dtype)
  return (
    out_BKQH.reshape(batch, kv_heads, queries, groups, head_dim)
    .transpose(0, 2, 1, 3, 4)
    .reshape(batch, queries, heads, head_dim)
  )


def _rows_of(x, layer, row_B):
  """Some rows (None: all) of an array of the cache, or of one layer of it."""
  if row_B is not None and row_B.shape[0] == 1:
    # A slice, which costs less than a gather.
    x = jax.lax.dynamic_slice_in_dim(x, row_B[0], 1, axis=x.ndim - 4)
  if layer is not None:
    x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
  if row_B is not None and row_B.shape[0] > 1:
    x = jnp.take(x, row_B, axis=0)
  if x.dtype == jnp.uint16:
    x = jax.lax.bitcast_convert_type(x, jnp.bfloat16)
  return x
