"""Continuous batching over a fixed number of slots with a KV cache.

A slot holds one growing token sequence. `submit` prefills what its cache does
not hold yet and arms it; `decode` advances all armed slots together until one
of them finishes; that one can be armed again while the others go on.

What a slot computes depends on its own sequence and key only: each prefill
runs alone, in chunks chosen from its own lengths, every decode step has the
same compiled shape, and attention over the cache gives the same bits however
far the longest neighbour makes it read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from planpo_jax import sharding
from planpo_jax.models import qwen2

# Lengths in which context is prefilled; each one used is compiled once.
PREFILL_CHUNKS = (16, 64, 256)

# Ids per block of the two-level search for the sampled id.
_SEARCH_BLOCK = 128

# One entry per compilation of the functions below.
_compiled: list[str] = []


@dataclasses.dataclass(frozen=True)
class Response:
  """What one armed slot produced.

  Attributes:
    slot: which slot.
    ids: int32 token ids as sampled, the stop id included.
    logps: float32 nats, log-probability of each at sampling temperature.
    truncated: it ended without a stop id, by a cap or a full cache.
  """

  slot: int
  ids: np.ndarray
  logps: np.ndarray
  truncated: bool


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    'token_B',
    'length_B',
    'armed_B',
    'made_B',
    'budget_B',
    'key_B2',
    'ids_BM',
    'logps_BM',
  ],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Slots:
  """State of all slots; host arrays between calls of `decode`.

  Attributes:
    token_B: int32, the last token of the sequence, not yet in the cache.
    length_B: int32, positions of the cache that are filled.
    armed_B: bool, a response is being sampled.
    made_B: int32, tokens of the response so far.
    budget_B: int32, most tokens the response may have.
    key_B2: uint32, key data of the response.
    ids_BM: int32, the response so far.
    logps_BM: float32 nats, of `ids_BM`.
  """

  token_B: np.ndarray
  length_B: np.ndarray
  armed_B: np.ndarray
  made_B: np.ndarray
  budget_B: np.ndarray
  key_B2: np.ndarray
  ids_BM: np.ndarray
  logps_BM: np.ndarray


def sample(
  logits_BV: jax.Array, uniform_B: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Ids drawn from softmax(logits) by inverse CDF; argmax at temperature 0.

  One uniform number a row and a search in two levels: over sums of blocks,
  then inside one block. An id of probability 0 is never returned.

  Args:
    logits_BV: float32, already divided by the temperature.
    uniform_B: float32 in [0, 1).
    temperature: scalar; only whether it is 0 matters here.

  Returns:
    id_B, int32, and its log-probability logp_B, float32 nats.
  """
  rows, vocab = logits_BV.shape
  blocks = -(-vocab // _SEARCH_BLOCK)
  max_B = logits_BV.max(axis=-1)
  # One pass of exponentials serves the search and the log-probability.
  weights_BV = jnp.exp(logits_BV - max_B[:, None])
  weights_BJI = jnp.pad(
    weights_BV, ((0, 0), (0, blocks * _SEARCH_BLOCK - vocab))
  ).reshape(rows, blocks, _SEARCH_BLOCK)
  sums_BJ = weights_BJI.sum(axis=-1)
  total_B = sums_BJ.sum(axis=-1)

  def search(weights_BX, target_B):
    """First index whose cumulative weight exceeds the target, and before."""
    cdf_BX = jnp.cumsum(weights_BX, axis=-1)
    index_B = jnp.sum(cdf_BX <= target_B[:, None], axis=-1)
    # Rounding may put the target at or past the total: the last real entry.
    size = weights_BX.shape[-1]
    last_B = size - 1 - jnp.argmax(weights_BX[:, ::-1] > 0, axis=-1)
    index_B = jnp.minimum(index_B, last_B)
    before_BX = jnp.pad(cdf_BX[:, :-1], ((0, 0), (1, 0)))
    return index_B, jnp.take_along_axis(before_BX, index_B[:, None], 1)[:, 0]

  def draw():
    target_B = uniform_B * total_B
    block_B, before_B = search(sums_BJ, target_B)
    weights_BI = jnp.take_along_axis(weights_BJI, block_B[:, None, None], 1)[
      :, 0
    ]
    inside_B, _ = search(weights_BI, target_B - before_B)
    return (block_B * _SEARCH_BLOCK + inside_B).astype(jnp.int32)

  def best():
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

  # A branch, because argmax over the vocabulary costs more than the search.
  id_B = jax.lax.cond(temperature > 0, draw, best)
  logit_B = jnp.take_along_axis(logits_BV, id_B[:, None], axis=-1)[:, 0]
  return id_B, logit_B - max_B - jnp.log(total_B)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(policy, params, cache, tokens_T, start, count, slot):
  _compiled.append(f'prefill {tokens_T.shape[0]}')
  _, cache = policy.extend(
    params, cache, tokens_T[None], start[None], count[None], slot
  )
  return cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(policy, params, cache, slots, stop_V, temperature, max_steps):
  _compiled.append(f'decode {slots.token_B.shape[0]}')
  rows_B = jnp.arange(slots.token_B.shape[0])
  armed_before_B = slots.armed_B

  def going(carry):
    step, _, slots = carry
    none_finished = jnp.all(slots.armed_B == armed_before_B)
    return (step < max_steps) & none_finished & jnp.any(slots.armed_B)

  def advance(carry):
    step, cache, slots = carry
    armed_B = slots.armed_B
    count_B = armed_B.astype(jnp.int32)
    hidden_B1D, cache = policy.extend(
      params, cache, slots.token_B[:, None], slots.length_B, count_B, 0
    )
    logits_BV = policy.scaled_logits(params, hidden_B1D[:, 0], temperature)
    uniform_B = jax.vmap(
      lambda key, i: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(key), i)
      )
    )(slots.key_B2, slots.made_B)
    id_B, logp_B = sample(logits_BV, uniform_B, temperature)
    made_B = slots.made_B + count_B
    # Rows that are not armed get values too; `submit` replaces them.
    slots = _Slots(
      token_B=id_B,
      length_B=slots.length_B + count_B,
      armed_B=armed_B & ~stop_V[id_B] & (made_B < slots.budget_B),
      made_B=made_B,
      budget_B=slots.budget_B,
      key_B2=slots.key_B2,
      ids_BM=slots.ids_BM.at[rows_B, slots.made_B].set(id_B, mode='drop'),
      logps_BM=slots.logps_BM.at[rows_B, slots.made_B].set(logp_B, mode='drop'),
    )
    return step + 1, cache, slots

  _, cache, slots = jax.lax.while_loop(
    going, advance, (jnp.int32(0), cache, slots)
  )
  return cache, slots


def _chunks(count: int) -> list[tuple[int, int]]:
  """Splits `count` tokens into (chunk length, real tokens), by count only."""
  out = []
  while count > 0:
    fits = [size for size in PREFILL_CHUNKS if size >= count]
    # Padding is cheaper than more calls while it is less than the tokens.
    if fits and (fits[0] < 2 * count or fits[0] == PREFILL_CHUNKS[0]):
      size = fits[0]
    else:
      size = max(size for size in PREFILL_CHUNKS if size <= count)
    out.append((size, min(size, count)))
    count -= size
  return out


class Sampler:
  """Samples responses in a fixed number of slots.

  Attributes:
    temperature: of sampling, >= 0; may be set between calls. 0 is greedy.
    prefilled_tokens: context tokens computed outside `decode` so far.
    decoded_tokens: response tokens sampled so far.
  """

  def __init__(
    self,
    policy: qwen2.Policy,
    params: qwen2.Params,
    *,
    slots: int,
    cache_len: int,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Iterable[int],
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Allocates the cache.

    Args:
      policy: the network.
      params: its params; on `mesh` already, if one is given.
      slots: sequences held at a time.
      cache_len: most tokens of a sequence, context and response together.
      max_new_tokens: most tokens of a response.
      temperature: of sampling.
      stop_ids: ids that end a response; they are part of it.
      mesh: where the cache lives; None for the default device.

    Raises:
      ValueError: a size below 1, a negative temperature, or a stop id that
        can never be sampled.
    """
    for name, value, least in (
      ('slots', slots, 1),
      ('cache_len', cache_len, 2),
      ('max_new_tokens', max_new_tokens, 1),
      ('temperature', temperature, 0),
    ):
      if value < least:
        raise ValueError(f'{name}={value} must be at least {least}; raise it.')
    self._stop_V = np.zeros(policy.config.vocab_size, bool)
    for stop_id in stop_ids:
      if not 0 <= stop_id < policy.num_tokens:
        raise ValueError(
          f'stop id {stop_id} can never be sampled: ids are 0..'
          f'{policy.num_tokens - 1}; pass stop ids of this tokenizer.'
        )
      self._stop_V[stop_id] = True
    self._policy = policy
    self._params = params
    self._cache_len = cache_len
    self._max_new_tokens = max_new_tokens
    self.temperature = temperature
    self.prefilled_tokens = 0
    self.decoded_tokens = 0
    self._held: list[list[int]] = [[] for _ in range(slots)]
    empty = functools.partial(policy.init_cache, slots, cache_len)
    if mesh is not None:
      # Made in its places: whole it may not fit on one device.
      shardings = sharding.cache_shardings(mesh, jax.eval_shape(empty))
      empty = jax.jit(empty, out_shardings=shardings)
    self._cache = empty()
    self._slots = _Slots(
      token_B=np.zeros(slots, np.int32),
      length_B=np.zeros(slots, np.int32),
      armed_B=np.zeros(slots, bool),
      made_B=np.zeros(slots, np.int32),
      budget_B=np.zeros(slots, np.int32),
      key_B2=np.zeros((slots, 2), np.uint32),
      ids_BM=np.zeros((slots, max_new_tokens), np.int32),
      logps_BM=np.zeros((slots, max_new_tokens), np.float32),
    )

  @property
  def active(self) -> tuple[int, ...]:
    """Slots with a response in the making."""
    return tuple(int(slot) for slot in np.flatnonzero(self._slots.armed_B))

  @property
  def free(self) -> tuple[int, ...]:
    """Slots without one; they may still hold a sequence."""
    return tuple(int(slot) for slot in np.flatnonzero(~self._slots.armed_B))

  @property
  def compilations(self) -> int:
    """Functions this process has compiled for sampling, all samplers."""
    return len(_compiled)

  def set_params(self, params: qwen2.Params):
    """Replaces the params; every slot forgets what it holds.

    Nothing is compiled if shapes, types and placement are as before.

    Raises:
      RuntimeError: a response is in the making.
    """
    if self.active:
      raise RuntimeError(
        f'slots {self.active} are sampling under the old params; decode them '
        'to their end or reset them first.'
      )
    self._params = params
    self._held = [[] for _ in self._held]

  def reset(self, slot: int):
    """Empties a slot for a new episode; drops a response in the making."""
    self._check(slot)
    self._held[slot] = []
    self._slots.armed_B[slot] = False

  def submit(
    self,
    slot: int,
    context_ids: Sequence[int],
    key: jax.Array | np.ndarray,
    max_new_tokens: int | None = None,
  ):
    """Arms a slot to respond to a context.

    The longest common prefix with what the slot holds is kept, the rest is
    prefilled: for a growing conversation that is what was appended.

    Args:
      slot: which slot.
      context_ids: the whole sequence before the response.
      key: typed key or its uint32[2] data, for this response only; token i is
        drawn with fold_in(key, i).
      max_new_tokens: a lower cap than the sampler's. The cap is clipped to
        what the cache can hold.

    Raises:
      ValueError: an unknown slot, an empty context, one that fills the cache,
        an id out of range, or a cap out of range.
      RuntimeError: the slot is sampling already.
    """
    self._check(slot)
    if self._slots.armed_B[slot]:
      raise RuntimeError(
        f'slot {slot} is sampling already; decode it to its end or reset it.'
      )
    context = [int(i) for i in context_ids]
    if not 0 < len(context) < self._cache_len:
      raise ValueError(
        f'context of {len(context)} tokens must have 1..{self._cache_len - 1} '
        f'to leave room for a response in cache_len={self._cache_len}; end the '
        'episode, cut the context or raise cache_len.'
      )
    if not 0 <= min(context) <= max(context) < self._policy.num_tokens:
      raise ValueError(
        f'context ids span {min(context)}..{max(context)}, must be in 0..'
        f'{self._policy.num_tokens - 1}; encode with the tokenizer of this '
        'policy.'
      )
    cap = self._max_new_tokens if max_new_tokens is None else max_new_tokens
    if not 0 < cap <= self._max_new_tokens:
      raise ValueError(
        f'max_new_tokens={cap} must be in 1..{self._max_new_tokens}, the '
        'width of the sampler; raise it there.'
      )
    key_data = _key_data(key)
    held = self._held[slot]
    kept = 0
    # The last token is left for `decode`, which needs its output.
    for old, new in zip(held, context[:-1], strict=False):
      if old != new:
        break
      kept += 1
    start = kept
    for size, count in _chunks(len(context) - 1 - kept):
      tokens_T = np.zeros(size, np.int32)
      tokens_T[:count] = context[start : start + count]
      self._cache = _prefill(
        self._policy,
        self._params,
        self._cache,
        tokens_T,
        np.int32(start),
        np.int32(count),
        np.int32(slot),
      )
      start += count
    self.prefilled_tokens += start - kept
    self._held[slot] = context
    slots = self._slots
    slots.key_B2[slot] = key_data
    slots.token_B[slot] = context[-1]
    slots.length_B[slot] = len(context) - 1
    slots.armed_B[slot] = True
    slots.made_B[slot] = 0
    slots.budget_B[slot] = min(cap, self._cache_len - len(context))

  def decode(self, max_steps: int | None = None) -> list[Response]:
    """Advances all armed slots until at least one finishes.

    Args:
      max_steps: most steps of this call, a token a slot each; None for no
        limit. The result is then empty when nothing finished.

    Returns:
      The responses that finished, by slot; empty if no slot is armed.
    """
    before = self._slots
    if not before.armed_B.any():
      return []
    self._cache, slots = _decode(
      self._policy,
      self._params,
      self._cache,
      before,
      self._stop_V,
      np.float32(self.temperature),
      np.int32(np.iinfo(np.int32).max if max_steps is None else max_steps),
    )
    # Copies: what comes back is read-only, and `submit` writes.
    self._slots = slots = jax.tree.map(np.array, slots)
    self.decoded_tokens += int(np.sum(slots.made_B - before.made_B))
    responses = []
    for slot in np.flatnonzero(before.armed_B & ~slots.armed_B):
      made = slots.made_B[slot]
      ids = slots.ids_BM[slot, :made].copy()
      # The last token was sampled but not fed, so the cache lacks it.
      self._held[slot] = self._held[slot] + ids[:-1].tolist()
      responses.append(
        Response(
          slot=int(slot),
          ids=ids,
          logps=slots.logps_BM[slot, :made].copy(),
          truncated=not self._stop_V[ids[-1]],
        )
      )
    return responses

  def _check(self, slot):
    if not 0 <= slot < len(self._held):
      raise ValueError(
        f'slot {slot} does not exist; slots are 0..{len(self._held) - 1}.'
      )


def _key_data(key: jax.Array | np.ndarray) -> np.ndarray:
  if isinstance(key, jax.Array) and jnp.issubdtype(
    key.dtype, jax.dtypes.prng_key
  ):
    key = jax.random.key_data(key)
  data = np.asarray(key)
  if data.shape != (2,) or data.dtype != np.uint32:
    raise ValueError(
      f'key of shape {data.shape} and type {data.dtype} must be one threefry '
      'key: pass a jax.random.key or its uint32[2] data.'
    )
  return data
