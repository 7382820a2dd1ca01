"""Qwen2.5 in flax NNX (arXiv 2412.15115), as a function of its params.

RMSNorm before each sublayer, rotary positions in half-split order, grouped
query attention with biases on q, k and v only, SwiGLU, tied or untied head.
Norms, rotary, softmax and everything after the head are float32 whatever the
compute type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from planpo_jax import sharding
from planpo_jax.models import attention, linear

# A nested dict of arrays, named as the attributes of the modules below.
Params = dict[str, Any]
# One entry a layer, or one for all with a leading axis L if they are scanned.
Cache = tuple[attention.LayerCache, ...] | attention.LayerCache

# Rows of the embedding are a multiple of this.
_ROW_MULTIPLE = 128

# Logit of an id that must never be sampled; finite, so that p * logp is 0.
_NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
  """Shapes and numerics of one Qwen2.5 network.

  Attributes:
    vocab_size: rows of the embedding in a checkpoint, spare rows included.
    hidden_size: width of the residual stream (D).
    intermediate_size: width of the feed-forward layer (F).
    num_layers: number of blocks (L).
    num_heads: query heads (N).
    num_kv_heads: key/value heads (K); divides `num_heads`.
    head_dim: width of a head (H), even.
    tie_word_embeddings: the head is the transposed embedding.
    rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square.
    max_positions: longest context the network was made for, tokens.
    dtype: type of the matrix products and of the cache.
    param_dtype: type in which params are kept.
    remat: recompute each block in the backward pass (less memory).
    scan_layers: True for TPU and GPU: the params of all blocks are stacked and
      one block is compiled and scanned. False for CPU: the blocks are
      unrolled, each with its own arrays.
    on_cpu: products and caches take the form that is native to CPUs (see
      linear.py).
    attention: kernel of the packed form, one of `attention.KERNELS`.

  The last three are chosen by `for_platform`.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  tie_word_embeddings: bool
  rope_theta: float = 1e6
  rms_norm_eps: float = 1e-6
  max_positions: int = 32768
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  remat: bool = False
  scan_layers: bool = False
  on_cpu: bool = True
  attention: str = 'xla'

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads={self.num_kv_heads} must divide '
        f'num_heads={self.num_heads}; try num_kv_heads=1.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim} must be even, rotary positions turn pairs; '
        f'try {self.head_dim + 1}.'
      )

  @property
  def embedding_rows(self) -> int:
    """`vocab_size` rounded up, so that rows divide over powers of two.

    The same on every mesh, so a training checkpoint fits all of them.
    """
    return -(-self.vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE


def for_platform(config: Qwen2Config, platform: str) -> Qwen2Config:
  """The same network in the form that suits `cpu`, `gpu` or `tpu`."""
  kernels = {'cpu': 'xla', 'gpu': 'cudnn', 'tpu': 'splash'}
  if platform not in kernels:
    raise ValueError(
      f'platform {platform!r} is unknown; known: {", ".join(kernels)}.'
    )
  kernel = kernels[platform]
  if platform == 'gpu' and config.dtype == 'float32':
    kernel = 'xla'  # cuDNN has attention in 16 bits only.
  return dataclasses.replace(
    config,
    scan_layers=platform != 'cpu',
    on_cpu=platform == 'cpu',
    attention=kernel,
  )


# Types of the products and of the params.
DTYPES = ('float32', 'bfloat16')

SIZES: dict[str, Qwen2Config] = {
  'nano': Qwen2Config(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=640,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    tie_word_embeddings=True,
    rope_theta=1e4,
  ),
  'qwen2.5-0.5b': Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
  ),
  'qwen2.5-1.5b': Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    tie_word_embeddings=True,
  ),
  'qwen2.5-3b': Qwen2Config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    tie_word_embeddings=True,
  ),
  'qwen2.5-7b': Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
  ),
}


class _Initializer:
  """Makes params; the weights are cut from one pool of normal numbers.

  One draw for several weights, because each draw is compiled on its own and
  takes XLA's CPU compiler half a second.
  """

  def __init__(
    self, config: Qwen2Config, key: jax.Array, size: int, layers: int | None
  ):
    """`layers` params of each shape are stacked; None makes one, unstacked."""
    self._dtype = config.param_dtype
    self._stack = () if layers is None else (layers,)
    self._pool = 0.02 * jax.random.normal(
      key, (*self._stack, size), self._dtype
    )
    self._used = 0

  def normal(self, *shape: int) -> nnx.Param:
    start, self._used = self._used, self._used + math.prod(shape)
    cut = self._pool[..., start : self._used]
    return nnx.Param(cut.reshape(*self._stack, *shape))

  def zeros(self, *shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros((*self._stack, *shape), self._dtype))

  def ones(self, *shape: int) -> nnx.Param:
    return nnx.Param(jnp.ones((*self._stack, *shape), self._dtype))


def _layer_names(num_layers: int) -> list[str]:
  return [f'{i:02d}' for i in range(num_layers)]


def _linear(config: Qwen2Config):
  """linear.linear with the compute type and the form of `config`."""
  return functools.partial(
    linear.linear, dtype=config.dtype, on_cpu=config.on_cpu
  )


def _rms_norm(x_BTD, scale_D, eps):
  x32_BTD = x_BTD.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32_BTD), axis=-1, keepdims=True)
  normed_BTD = x32_BTD * jax.lax.rsqrt(mean_square + eps)
  return (normed_BTD * scale_D.astype(jnp.float32)).astype(x_BTD.dtype)


def _rotary_angles(positions_BT, head_dim, theta):
  """cos and sin [B, T, 1, H/2] in float32."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angles = positions_BT.astype(jnp.float32)[..., None] / theta**exponent
  return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def _rotate(x_BTNH, rotary):
  cos, sin = rotary
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_BTNH.dtype)


class Attention(nnx.Module):
  """Projections around grouped-query attention."""

  def __init__(self, config: Qwen2Config, init: _Initializer):
    D, N, K, H = (
      config.hidden_size,
      config.num_heads,
      config.num_kv_heads,
      config.head_dim,
    )
    self.linear = _linear(config)
    self.w_q_NHD = init.normal(N, H, D)
    self.b_q_NH = init.zeros(N, H)
    self.w_k_KHD = init.normal(K, H, D)
    self.b_k_KH = init.zeros(K, H)
    self.w_v_KHD = init.normal(K, H, D)
    self.b_v_KH = init.zeros(K, H)
    self.w_o_DNH = init.normal(D, N, H)

  def project(self, x_BTD, rotary):
    """Queries, keys and values; rotary applied to the first two."""

    def heads(w_NHD, b_NH):
      y_BTNH = self.linear(x_BTD, w_NHD[...], 1)
      return y_BTNH + b_NH[...].astype(y_BTNH.dtype)

    q_BTNH = _rotate(heads(self.w_q_NHD, self.b_q_NH), rotary)
    k_BTKH = _rotate(heads(self.w_k_KHD, self.b_k_KH), rotary)
    return q_BTNH, k_BTKH, heads(self.w_v_KHD, self.b_v_KH)

  def output(self, x_BTNH):
    return self.linear(x_BTNH, self.w_o_DNH[...], 2)


class FeedForward(nnx.Module):
  """SwiGLU."""

  def __init__(self, config: Qwen2Config, init: _Initializer):
    D, F = config.hidden_size, config.intermediate_size
    self.linear = _linear(config)
    self.w_gate_FD = init.normal(F, D)
    self.w_up_FD = init.normal(F, D)
    self.w_down_DF = init.normal(D, F)

  def __call__(self, x_BTD):
    gate_BTF = self.linear(x_BTD, self.w_gate_FD[...], 1)
    up_BTF = self.linear(x_BTD, self.w_up_FD[...], 1)
    return self.linear(jax.nn.silu(gate_BTF) * up_BTF, self.w_down_DF[...], 1)


class Block(nnx.Module):
  """One layer; `attend` decides what the queries see."""

  def __init__(self, config: Qwen2Config, init: _Initializer):
    self.eps = config.rms_norm_eps
    self.attention_norm_D = init.ones(config.hidden_size)
    self.attention = Attention(config, init)
    self.feed_forward_norm_D = init.ones(config.hidden_size)
    self.feed_forward = FeedForward(config, init)

  def __call__(self, x_BTD, rotary, attend):
    normed_BTD = _rms_norm(x_BTD, self.attention_norm_D[...], self.eps)
    out_BTNH = attend(*self.attention.project(normed_BTD, rotary))
    x_BTD = x_BTD + self.attention.output(out_BTNH)
    normed_BTD = _rms_norm(x_BTD, self.feed_forward_norm_D[...], self.eps)
    return x_BTD + self.feed_forward(normed_BTD)


class Qwen2(nnx.Module):
  """The network. `Policy` is the form the rest of the code uses."""

  def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
    D, V = config.hidden_size, config.embedding_rows
    init = _Initializer(
      config,
      rngs.params(),
      (1 if config.tie_word_embeddings else 2) * V * D,
      None,
    )
    self.config = config
    self.embedding_VD = init.normal(V, D)
    heads = 2 * (config.num_heads + config.num_kv_heads)
    block_size = D * (heads * config.head_dim + 3 * config.intermediate_size)

    def block(layers=None):
      return Block(
        config, _Initializer(config, rngs.params(), block_size, layers)
      )

    if config.scan_layers:
      self.blocks = block(config.num_layers)
    else:
      self.blocks = nnx.Dict(
        {name: block() for name in _layer_names(config.num_layers)}
      )
    self.final_norm_D = init.ones(config.hidden_size)
    if not config.tie_word_embeddings:
      self.head_VD = init.normal(V, D)

  def _split_blocks(self):
    """The graph of one block, and the params of all: stacked, or a list."""
    if self.config.scan_layers:
      return nnx.split(self.blocks)
    split = [
      nnx.split(self.blocks[name])
      for name in _layer_names(self.config.num_layers)
    ]
    return split[0][0], [params for _, params in split]

  def _embed(self, tokens_BT):
    return self.embedding_VD[...][tokens_BT].astype(self.config.dtype)

  def _rotary(self, positions_BT):
    return _rotary_angles(
      positions_BT, self.config.head_dim, self.config.rope_theta
    )

  def _final_norm(self, x_BTD):
    return _rms_norm(x_BTD, self.final_norm_D[...], self.config.rms_norm_eps)

  def hidden(self, tokens_BT, positions_BT, segment_ids_BT):
    rotary = self._rotary(positions_BT)

    def attend(q_BTNH, k_BTKH, v_BTKH):
      return attention.attend(
        q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, kernel=self.config.attention
      )

    graphdef, blocks = self._split_blocks()

    def step(x_BTD, params):
      block = nnx.merge(graphdef, params)
      return sharding.constrain_rows(block(x_BTD, rotary, attend)), None

    x_BTD = sharding.constrain_rows(self._embed(tokens_BT))

    if self.config.remat:
      # In a scan nothing can be shared between the two passes anyway.
      step = jax.checkpoint(step, prevent_cse=not self.config.scan_layers)
    if self.config.scan_layers:
      x_BTD, _ = jax.lax.scan(step, x_BTD, blocks)
    else:
      step = jax.jit(step)  # Traced once, not once a layer.
      for params in blocks:
        x_BTD, _ = step(x_BTD, params)
    return self._final_norm(x_BTD)

  def extend(self, cache, tokens_BT, start_B, count_B, row_B):
    index_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = start_B[:, None] + index_T
    real_BT = index_T < count_B[:, None]
    write_BT = jnp.where(real_BT, positions_BT, -1)
    filled = jnp.max(jnp.where(count_B > 0, start_B + count_B, 0))
    rotary = self._rotary(positions_BT)

    graphdef, blocks = self._split_blocks()

    def layer(x_BTD, cache, params, index):
      """`cache` is of this layer, or of all with `index` telling which."""
      written = []

      def attend(q_BTNH, k_BTKH, v_BTKH):
        written.append(
          attention.write_cache(cache, k_BTKH, v_BTKH, row_B, write_BT, index)
        )
        return attention.attend_cache(
          q_BTNH, written[0], positions_BT, row_B, filled, index
        )

      x_BTD = nnx.merge(graphdef, params)(x_BTD, rotary, attend)
      return x_BTD, written[0]

    x_BTD = self._embed(tokens_BT)
    if self.config.scan_layers:
      # The cache is carried whole, so that it is written in place; as input
      # and output of the scan it would be copied every step.
      def step(carry, inputs):
        params, index = inputs
        return layer(*carry, params, index), None

      indices = jnp.arange(self.config.num_layers)
      (x_BTD, cache), _ = jax.lax.scan(step, (x_BTD, cache), (blocks, indices))
    else:
      layer = jax.jit(layer)  # Traced once, not once a layer.
      new_cache = []
      for params, layer_cache in zip(blocks, cache, strict=True):
        x_BTD, layer_cache = layer(x_BTD, layer_cache, params, None)
        new_cache.append(layer_cache)
      cache = tuple(new_cache)
    return self._final_norm(x_BTD), cache

  def logits(self, hidden):
    tied = self.config.tie_word_embeddings
    w_VD = (self.embedding_VD if tied else self.head_VD)[...]
    return _linear(self.config)(hidden, w_VD, 1, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Policy:
  """The network without its params: hashable, so a static argument of jit.

  Attributes:
    config: shapes and numerics.
    num_tokens: ids from here on are spare rows and have probability 0.
    graphdef: NNX graph definition; follows from `config`.
  """

  config: Qwen2Config
  num_tokens: int
  graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)

  def _module(self, params: Params) -> Qwen2:
    return nnx.merge(self.graphdef, nnx.State(params))

  def hidden(
    self,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
  ) -> jax.Array:
    """Full forward pass over packed rows, up to and with the final norm.

    Args:
      params: as from `init_params`.
      tokens_BT: int32 ids.
      positions_BT: int32, from 0 within each segment.
      segment_ids_BT: int32; attention is causal within equal ids; 0 is
        padding, whose output means nothing.

    Returns:
      hidden_BTD in the compute type.
    """
    return self._module(params).hidden(tokens_BT, positions_BT, segment_ids_BT)

  def init_cache(self, rows: int, length: int) -> Cache:
    """An empty cache of at least `length` positions a row."""
    config = self.config
    as_bits = config.dtype == 'bfloat16' and config.on_cpu
    layer = functools.partial(
      attention.init_cache,
      rows,
      length,
      config.num_kv_heads,
      config.head_dim,
      'uint16' if as_bits else config.dtype,
    )
    if config.scan_layers:
      return layer(config.num_layers)
    return tuple(layer() for _ in range(config.num_layers))

  def extend(
    self,
    params: Params,
    cache: Cache,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    row_B: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Appends tokens to cached sequences.

    Args:
      params: as from `init_params`.
      cache: as from `init_cache`; donate it to have it updated in place.
      tokens_BT: int32 ids; row b holds `count_B[b]` real ones, then padding.
      start_B: int32, cache positions already filled; later ones are ignored
        and overwritten.
      count_B: int32, 0 for a row to leave alone. `start + count` must not
        exceed the cache: what lies beyond is dropped.
      row_B: int32, the cache row of each row, none twice unless its count is
        0; None: all rows of the cache, in order.

    Returns:
      hidden_BTD of the new tokens (padding means nothing), and the cache.
    """
    return self._module(params).extend(
      cache, tokens_BT, start_B, count_B, row_B
    )

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V]; spare ids get a large negative one."""
    logits = self._module(params).logits(hidden)
    if self.num_tokens == self.config.embedding_rows:
      return logits
    real_V = jnp.arange(self.config.embedding_rows) < self.num_tokens
    return jnp.where(real_V, logits, _NEVER)

  def scaled_logits(
    self, params: Params, hidden: jax.Array, temperature: float | jax.Array
  ) -> jax.Array:
    """Logits of the distribution that is sampled and trained.

    Temperature 0 means the greedy policy, whose log-probabilities are given
    at temperature 1.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    return self.logits(params, hidden) / jnp.where(
      temperature > 0, temperature, 1.0
    )


def _new_module(config: Qwen2Config, key: jax.Array) -> Qwen2:
  return Qwen2(config, nnx.Rngs(params=key))


def create(config: Qwen2Config, num_tokens: int) -> Policy:
  """The policy for a tokenizer of `num_tokens` ids; allocates nothing.

  Raises:
    ValueError: the tokenizer has more ids than the embedding has rows.
  """
  if not 0 < num_tokens <= config.vocab_size:
    raise ValueError(
      f'num_tokens={num_tokens} must be in 1..vocab_size='
      f'{config.vocab_size}: every id needs an embedding row; raise '
      'vocab_size or use the tokenizer of this model.'
    )
  abstract = nnx.eval_shape(lambda: _new_module(config, jax.random.key(0)))
  return Policy(config, num_tokens, nnx.graphdef(abstract))


def init_params(policy: Policy, key: jax.Array) -> Params:
  """Fresh params: normal(0.02) weights, zero biases, unit norms.

  Pure in `key`; works under `jax.jit` and `jax.eval_shape`.
  """
  return nnx.to_pure_dict(nnx.state(_new_module(policy.config, key)))


def token_logps(
  policy: Policy,
  params: Params,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  segment_ids_BT: jax.Array,
  temperature: float | jax.Array,
  *,
  head_chunk: int = 128,
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of every token given what precedes it in its segment.

  Args:
    policy: the network.
    params: its params.
    tokens_BT: int32 ids.
    positions_BT: int32, from 0 within each segment.
    segment_ids_BT: int32, 0 on padding.
    temperature: as in sampling (see `Policy.scaled_logits`).
    head_chunk: positions whose logits [B, head_chunk, V] exist at a time, in
      the forward and in the backward pass.

  Returns:
    logp_BT: float32 nats; 0 at the first token of a segment and on padding.
    entropy_BT: float32 nats, of the distribution `tokens_BT[b, t]` was drawn
      from; 0 where `logp_BT` is.
  """
  hidden_BTD = policy.hidden(params, tokens_BT, positions_BT, segment_ids_BT)
  batch, length, width = hidden_BTD.shape
  chunks = -(-length // head_chunk)
  # The token at t + 1 is predicted at t; the last position predicts nothing.
  target_BT = jnp.roll(tokens_BT, -1, axis=1)
  pad = chunks * head_chunk - length

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, chunks, head_chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  @jax.checkpoint
  def head(chunk):
    hidden_BCD, target_BC = chunk
    logits_BCV = policy.scaled_logits(params, hidden_BCD, temperature)
    log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    # A masked sum instead of a gather: it stays local when V is sharded.
    hit_BCV = jnp.arange(logits_BCV.shape[-1]) == target_BC[..., None]
    logit_BC = jnp.sum(jnp.where(hit_BCV, logits_BCV, 0.0), axis=-1)
    probs_BCV = jnp.exp(logits_BCV - log_z_BC[..., None])
    entropy_BC = log_z_BC - jnp.sum(probs_BCV * logits_BCV, axis=-1)
    return logit_BC - log_z_BC, entropy_BC

  def join(x_nBC):
    x_BT = jnp.moveaxis(x_nBC, 0, 1).reshape(batch, -1)[:, :length]
    return jnp.roll(x_BT, 1, axis=1)

  logp_nBC, entropy_nBC = jax.lax.map(
    head, (split(hidden_BTD), split(target_BT))
  )
  previous_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
  known_BT = (segment_ids_BT > 0) & (segment_ids_BT == previous_BT)
  return (
    jnp.where(known_BT, join(logp_nBC), 0.0),
    jnp.where(known_BT, join(entropy_nBC), 0.0),
  )


def compute_params(config: Qwen2Config, params: Params) -> Params:
  """Params with the matrices in the compute type.

  Every product casts its matrix to that type, so results are the same; norms
  are computed in float32 and stay as they are.
  """

  def cast(path, x):
    return x if path[-1].key.endswith('norm_D') else x.astype(config.dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def abstract_params(policy: Policy) -> Params:
  """Shapes and types of the params, without a single weight."""
  return jax.eval_shape(lambda: init_params(policy, jax.random.key(0)))
