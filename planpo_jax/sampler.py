"""Continuous batching over a fixed number of slots with a KV cache.

A slot holds one growing token sequence. `submit` says what its context is;
`decode` prefills what the cache of the slot does not hold yet, a chunk at a
time between steps of the other slots, and advances all that are ready together
until one of them finishes; that one can be given a new context while the others
go on.

What a slot computes depends on its own sequence and key only: the chunks of a
context follow from its own lengths, each chunk length and each decoding step
has one compiled shape whatever the neighbours do, and attention over the cache
gives the same bits however far the longest neighbour makes it read.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from planpo_jax import decoding, sampling, sharding
from planpo_jax.models import qwen2

# Lengths in which context is prefilled; each one used is compiled once.
PREFILL_CHUNKS = (16, 32, 64, 128, 256)

# Tokens that are prefilled at most before other slots take their next step.
PREFILL_BUDGET = 256

# Tokens of one call of prefilling where a weight that is read serves many rows
# (TPU, GPU). A CPU is busy with one chunk, and rows that pad would cost as
# much as real ones.
GROUP_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Response:
  """What one slot produced.

  Attributes:
    slot: which slot.
    ids: int32 token ids as sampled, the stop id included.
    logps: float32 nats, log-probability of each under the distribution that
      it was drawn from.
    truncated: it ended without a stop id, by a cap or a full cache.
    first_step: time (`time.perf_counter`) of the first decoding step.
  """

  slot: int
  ids: np.ndarray
  logps: np.ndarray
  truncated: bool
  first_step: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass
class Counters:
  """What a sampler has done so far.

  Attributes:
    prefilled_tokens: context tokens computed outside of decoding steps.
    decoded_tokens: response tokens sampled.
    steps: decoding steps, of all slots together.
    prefill_s: seconds in compiled prefilling.
    decode_s: seconds in compiled decoding.
  """

  prefilled_tokens: int = 0
  decoded_tokens: int = 0
  steps: int = 0
  prefill_s: float = 0.0
  decode_s: float = 0.0

  def __sub__(self, before: Counters) -> Counters:
    names = (field.name for field in dataclasses.fields(self))
    return Counters(
      **{name: getattr(self, name) - getattr(before, name) for name in names}
    )


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


@dataclasses.dataclass
class _Request:
  """A context on its way into the cache.

  Attributes:
    context: the whole sequence before the response.
    filled: positions of it that are in the cache.
    chunks: (length, real tokens) of the chunks still to come.
    key: uint32 [2].
    budget: most tokens of the response.
    first_step: see `Response`; None before it.
  """

  context: list[int]
  filled: int
  chunks: collections.deque[tuple[int, int]]
  key: np.ndarray
  budget: int
  first_step: float | None = None


class Sampler:
  """Samples responses in a fixed number of slots.

  Attributes:
    settings: of sampling; may be replaced between calls, which compiles
      nothing.
    counters: what was done so far.
    step_s: seconds of a decoding step, lately; 0 before the first.
  """

  def __init__(
    self,
    policy: qwen2.Policy,
    params: qwen2.Params,
    *,
    slots: int,
    cache_len: int,
    max_new_tokens: int,
    settings: sampling.Settings,
    stop_ids: Iterable[int],
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Allocates the cache.

    Args:
      policy: the network.
      params: its params, see `set_params`.
      slots: sequences held at a time.
      cache_len: most tokens of a sequence, context and response together.
      max_new_tokens: most tokens of a response.
      settings: of sampling.
      stop_ids: ids that end a response; they are part of it.
      mesh: where the cache lives; None for the default device.

    Raises:
      ValueError: a size below 1, settings out of range, or a stop id that can
        never be sampled.
    """
    for name, value, least in (
      ('slots', slots, 1),
      ('cache_len', cache_len, 2),
      ('max_new_tokens', max_new_tokens, 1),
    ):
      if value < least:
        raise ValueError(f'{name}={value} must be at least {least}; raise it.')
    settings.check()
    self._stop_V = np.zeros(policy.config.embedding_rows, bool)
    for stop_id in stop_ids:
      if not 0 <= stop_id < policy.num_tokens:
        raise ValueError(
          f'stop id {stop_id} can never be sampled: ids are 0..'
          f'{policy.num_tokens - 1}; pass stop ids of this tokenizer.'
        )
      self._stop_V[stop_id] = True
    self._groups = 1 if mesh is None else sharding.slot_groups(mesh)
    if slots % self._groups:
      raise ValueError(
        f'slots={slots} must divide over the {self._groups} groups of devices '
        f'(data x fsdp); try {-(-slots // self._groups) * self._groups}.'
      )
    self._policy = policy
    self._mesh = mesh
    self._cache_len = cache_len
    self._max_new_tokens = max_new_tokens
    self.settings = settings
    self.counters = Counters()
    self.step_s = 0.0
    self._held: list[list[int]] = [[] for _ in range(slots)]
    # By slot; in the order of submission.
    self._pending: dict[int, _Request] = {}
    self._sampling: dict[int, _Request] = {}
    self._made_B = np.zeros(slots, np.int64)
    self._orders_B6 = np.zeros((slots, 6), np.int32)

    def empty():
      return (
        policy.init_cache(slots, cache_len),
        decoding.no_slots(slots, max_new_tokens),
      )

    if mesh is not None:
      # Made in its places: whole it may not fit on one device.
      cache, state = jax.eval_shape(empty)
      shardings = (
        sharding.cache_shardings(mesh, cache),
        jax.tree.map(lambda _: sharding.batch_sharding(mesh), state),
      )
      empty = jax.jit(empty, out_shardings=shardings)
    self._cache, self._slots = empty()
    self.set_params(params)

  @property
  def active(self) -> tuple[int, ...]:
    """Slots with a response in the making."""
    return tuple(sorted(self._pending | self._sampling))

  @property
  def slots(self) -> int:
    """How many there are."""
    return len(self._held)

  @property
  def free(self) -> tuple[int, ...]:
    """Slots without one, in the order in which to use them.

    They may still hold a sequence. Neighbours belong to different groups of
    devices, so that a few busy slots keep many devices busy.
    """
    busy = self._pending | self._sampling
    slots = np.arange(self.slots).reshape(self._groups, -1).T.ravel()
    return tuple(slot for slot in slots.tolist() if slot not in busy)

  def set_params(self, params: qwen2.Params, *, copy: bool = False):
    """Replaces the params; every slot forgets what it holds.

    Nothing is compiled if shapes, types and placement are as before.

    Args:
      params: of the policy; see `decoding.for_sampling`.
      copy: keeps none of the arrays given, so they may be donated at any time;
        else not before the last response.

    Raises:
      RuntimeError: a response is in the making.
    """
    if self.active:
      raise RuntimeError(
        f'slots {self.active} are sampling under the old params; decode them '
        'to their end or reset them first.'
      )
    self._params = None  # Or two copies would be held for a while.
    self._params = decoding.for_sampling(
      self._policy, params, self._mesh, copy=copy
    )
    self._held = [[] for _ in self._held]

  def reset(self, slot: int):
    """Empties a slot for a new episode; drops a response in the making."""
    self._check(slot)
    self._held[slot] = []
    self._pending.pop(slot, None)
    if self._sampling.pop(slot, None):
      self._orders_B6[slot, 0] = decoding.DROP

  def submit(
    self,
    slot: int,
    context_ids: Sequence[int],
    key: jax.Array | np.ndarray,
    max_new_tokens: int | None = None,
  ):
    """Asks a slot to respond to a context; `decode` does the work.

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
    if slot in self._pending or slot in self._sampling:
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
    kept = 0
    # The last token is left for `decode`, which needs its output.
    for old, new in zip(self._held[slot], context[:-1], strict=False):
      if old != new:
        break
      kept += 1
    self._pending[slot] = _Request(
      context=context,
      filled=kept,
      chunks=collections.deque(_chunks(len(context) - 1 - kept)),
      key=key_data,
      budget=min(cap, self._cache_len - len(context)),
    )
    self._held[slot] = context[:kept]

  def decode(self, max_steps: int | None = None) -> list[Response]:
    """Advances until at least one slot finishes.

    Contexts that were submitted are prefilled first, `PREFILL_BUDGET` tokens
    at a time; in between the slots that are ready take a step, so a long
    context does not hold them up.

    Args:
      max_steps: most decoding steps of this call, a token a slot each; None
        for no limit. The result is then empty when nothing finished.

    Returns:
      The responses that finished, by slot; empty if no slot is active.
    """
    while self._pending or self._sampling:
      self._fill(PREFILL_BUDGET)
      steps = np.iinfo(np.int32).max if max_steps is None else max_steps
      if self._pending:
        steps = 1
      responses = self._step(steps)
      if responses or max_steps is not None:
        return responses
    return []

  def compile(self):
    """Compiles, or reads from the cache, all that sampling may need.

    Else each program is compiled when it is first used, in the time of whoever
    waits for it.
    """
    for size in PREFILL_CHUNKS:
      rows = self._groups * self._rows(size)
      nothing_G = np.zeros(rows, np.int32)
      self._cache, _ = decoding.prefill_chunks(
        self._policy,
        self._mesh,
        self._params,
        self._cache,
        np.zeros((rows, size), np.int32),
        nothing_G,
        nothing_G,
        nothing_G,
      )
    self._step(0)

  def prefill(self):
    """Prefills all that was submitted, whatever it holds up.

    `decode` does so by itself; this is for those who want it done before.
    """
    self._fill(math.inf)

  def _fill(self, budget: float):
    """Prefills `budget` tokens, or until a first slot is ready."""
    last = None
    self._arm_ready()
    while self._pending and (budget > 0 or not self._sampling):
      tokens, last = self._prefill_group()
      budget -= tokens
      self._arm_ready()
    if last is not None:
      start = time.perf_counter()
      last.block_until_ready()  # So that the counters tell the truth.
      self.counters.prefill_s += time.perf_counter() - start

  def _prefill_group(self):
    """One chunk of the request nearest to its end, and of others of its length.

    So a long context does not hold up the short ones that came after it.
    Returns the tokens computed in a group of devices, and an array to wait for.
    """
    first = min(self._pending.values(), key=lambda r: len(r.chunks))
    size = first.chunks[0][0]
    rows = self._rows(size)
    per_group = self.slots // self._groups
    tokens_GT = np.zeros((self._groups * rows, size), np.int32)
    start_G, count_G, row_G = np.zeros((3, self._groups * rows), np.int32)
    used = [0] * self._groups
    for slot, request in self._pending.items():
      group, row = divmod(slot, per_group)
      if request.chunks[0][0] != size or used[group] == rows:
        continue
      i = group * rows + used[group]
      used[group] += 1
      _, count = request.chunks.popleft()
      end = request.filled + count
      tokens_GT[i, :count] = request.context[request.filled : end]
      start_G[i], count_G[i], row_G[i] = request.filled, count, row
      self._held[slot] = request.context[:end]
      request.filled = end
      self.counters.prefilled_tokens += count
    start = time.perf_counter()
    self._cache, last = decoding.prefill_chunks(
      self._policy,
      self._mesh,
      self._params,
      self._cache,
      tokens_GT,
      start_G,
      count_G,
      row_G,
    )
    self.counters.prefill_s += time.perf_counter() - start
    return rows * size, last

  def _rows(self, size: int) -> int:
    """Chunks of one length in a call, for each group of devices."""
    return 1 if self._policy.config.on_cpu else GROUP_TOKENS // size

  def _arm_ready(self):
    """Orders steps for the slots whose context is in the cache."""
    for slot in [s for s, r in self._pending.items() if not r.chunks]:
      request = self._pending.pop(slot)
      self._sampling[slot] = request
      self._made_B[slot] = 0
      self._orders_B6[slot, :4] = (
        decoding.ARM,
        request.context[-1],
        len(request.context) - 1,
        request.budget,
      )
      self._orders_B6[slot, 4:] = request.key.view(np.int32)

  def _step(self, max_steps: int) -> list[Response]:
    start = time.perf_counter()
    for request in self._sampling.values():
      if request.first_step is None:
        request.first_step = start
    self._cache, self._slots, report_B2 = decoding.decode_steps(
      self._policy,
      self._mesh,
      self._params,
      self._cache,
      self._slots,
      self._orders_B6,
      self._stop_V,
      self.settings,
      np.int32(max_steps),
    )
    armed_B, made_B = np.asarray(report_B2).T
    spent_s = time.perf_counter() - start
    # A new array: the call may still be reading the old one.
    self._orders_B6 = np.zeros_like(self._orders_B6)
    slots = sorted(self._sampling)
    news = made_B[slots] - self._made_B[slots]
    self._made_B[slots] = made_B[slots]
    steps = int(news.max(initial=0))
    self.counters.decode_s += spent_s
    self.counters.decoded_tokens += int(news.sum())
    self.counters.steps += steps
    if steps:
      self.step_s = spent_s / steps
    finished = [slot for slot in slots if not armed_B[slot]]
    if not finished:
      return []
    ids_BM = np.asarray(self._slots.ids_BM)
    logps_BM = np.asarray(self._slots.logps_BM)
    responses = []
    for slot in finished:
      request = self._sampling.pop(slot)
      # Copies: the next call consumes what these are views of.
      ids = ids_BM[slot, : made_B[slot]].copy()
      # The last token was sampled but not fed, so the cache lacks it.
      self._held[slot] = request.context + ids[:-1].tolist()
      responses.append(
        Response(
          slot=slot,
          ids=ids,
          logps=logps_BM[slot, : made_B[slot]].copy(),
          truncated=not self._stop_V[ids[-1]],
          first_step=request.first_step,
        )
      )
    return responses

  def _check(self, slot):
    if not 0 <= slot < len(self._held):
      raise ValueError(
        f'slot {slot} does not exist; slots are 0..{self.slots - 1}.'
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
