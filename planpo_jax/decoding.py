"""The compiled programs of sampling, and their state on the devices.

`sampler.py` decides what they do; here is what they compute. On a mesh each
group of devices works on slots of its own, see `sharding.map_slots`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from planpo_jax import sampling, sharding
from planpo_jax.models import qwen2

# First column of the orders to `decode_steps`.
KEEP, ARM, DROP = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """State of all slots on the device.

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

  token_B: jax.Array
  length_B: jax.Array
  armed_B: jax.Array
  made_B: jax.Array
  budget_B: jax.Array
  key_B2: jax.Array
  ids_BM: jax.Array
  logps_BM: jax.Array


def no_slots(rows: int, width: int) -> Slots:
  """Slots that hold nothing, for responses of up to `width` tokens."""

  def zeros(dtype, *shape):
    return jnp.zeros((rows, *shape), dtype)

  return Slots(
    token_B=zeros(jnp.int32),
    length_B=zeros(jnp.int32),
    armed_B=zeros(bool),
    made_B=zeros(jnp.int32),
    budget_B=zeros(jnp.int32),
    key_B2=zeros(jnp.uint32, 2),
    ids_BM=zeros(jnp.int32, width),
    logps_BM=zeros(jnp.float32, width),
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def prefill_chunks(
  policy, mesh, params, cache, tokens_GT, start_G, count_G, row_G
):
  """Appends a chunk to each of some rows, compiled once a chunk length.

  Args:
    policy: static.
    mesh: static; None for one device.
    params: see `for_sampling`.
    cache: consumed.
    tokens_GT: int32; G rows are the same number for each group of devices.
    start_G: int32, positions that are filled.
    count_G: int32, tokens to append, 0 for a row of padding.
    row_G: int32, row of the cache within the group of devices.

  Returns:
    The cache, and an array to wait for.
  """

  def prefill(params, cache, *chunks):
    hidden_GTD, cache = policy.extend(params, cache, *chunks)
    return cache, hidden_GTD[:, 0, 0]

  return sharding.map_slots(
    mesh, prefill, ('whole', 'cache', *4 * ['rows']), ('cache', 'rows'), cache
  )(params, cache, tokens_GT, start_G, count_G, row_G)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def decode_steps(policy, mesh, params, cache, slots, orders_B6, *whole):
  """Follows orders, then decodes until a slot finishes.

  Args:
    policy: static.
    mesh: static; None for one device.
    params: see `for_sampling`.
    cache: consumed.
    slots: consumed.
    orders_B6: int32 columns: what to do (keep, arm, drop); then token, length,
      budget and the two words of the key of a slot to arm.
    *whole: bool stop_V, ids that end a response; `sampling.Settings`; int32,
      most steps.

  Returns:
    The cache, the slots, and [B, 2] int32: armed or not, tokens made.
  """
  return sharding.map_slots(
    mesh,
    functools.partial(_steps, policy, mesh),
    ('whole', 'cache', 'rows', 'rows', *len(whole) * ['whole']),
    ('cache', 'rows', 'rows'),
    cache,
  )(params, cache, slots, orders_B6, *whole)


def _steps(
  policy, mesh, params, cache, slots, orders_B6, stop_V, settings, max_steps
):
  """`decode_steps` on one group of devices."""
  order_B, token_B, length_B, budget_B = orders_B6[:, :4].T
  arm_B = order_B == ARM
  key_B2 = jax.lax.bitcast_convert_type(orders_B6[:, 4:], jnp.uint32)
  slots = dataclasses.replace(
    slots,
    token_B=jnp.where(arm_B, token_B, slots.token_B),
    length_B=jnp.where(arm_B, length_B, slots.length_B),
    armed_B=arm_B | (slots.armed_B & (order_B == KEEP)),
    made_B=jnp.where(arm_B, 0, slots.made_B),
    budget_B=jnp.where(arm_B, budget_B, slots.budget_B),
    key_B2=jnp.where(arm_B[:, None], key_B2, slots.key_B2),
  )
  rows_B = jnp.arange(slots.token_B.shape[0])
  armed_before_B = slots.armed_B

  def any_slot(flag_B):
    return sharding.any_slot(mesh, jnp.any(flag_B))

  def advance(carry):
    step, _, cache, slots = carry
    armed_B = slots.armed_B
    count_B = armed_B.astype(jnp.int32)
    hidden_B1D, cache = policy.extend(
      params, cache, slots.token_B[:, None], slots.length_B, count_B
    )
    logits_BV = policy.logits(params, hidden_B1D[:, 0])
    uniform_B = jax.vmap(
      lambda key, i: jax.random.uniform(
        jax.random.fold_in(jax.random.wrap_key_data(key), i)
      )
    )(slots.key_B2, slots.made_B)
    id_B, logp_B = sampling.sample(logits_BV, uniform_B, settings)
    made_B = slots.made_B + count_B
    # Rows that are not armed get values too; arming replaces them.
    slots = dataclasses.replace(
      slots,
      token_B=id_B,
      length_B=slots.length_B + count_B,
      armed_B=armed_B & ~stop_V[id_B] & (made_B < slots.budget_B),
      made_B=made_B,
      ids_BM=slots.ids_BM.at[rows_B, slots.made_B].set(id_B, mode='drop'),
      logps_BM=slots.logps_BM.at[rows_B, slots.made_B].set(logp_B, mode='drop'),
    )
    done = any_slot(slots.armed_B != armed_before_B)
    return step + 1, done, cache, slots

  _, _, cache, slots = jax.lax.while_loop(
    lambda carry: (carry[0] < max_steps) & ~carry[1],
    advance,
    (jnp.int32(0), ~any_slot(slots.armed_B), cache, slots),
  )
  report_B2 = jnp.stack([slots.armed_B.astype(jnp.int32), slots.made_B], -1)
  return cache, slots, report_B2


def for_sampling(
  policy: qwen2.Policy,
  params: qwen2.Params,
  mesh: jax.sharding.Mesh | None,
  *,
  copy: bool = False,
) -> qwen2.Params:
  """Params as decoding wants them; arrays that are so already are kept.

  Matrices are in the compute type, because casting them costs more than the
  step that reads them; results are the same, since they are cast in any case.
  On a mesh they are split over `tensor` only, see
  `sharding.sampling_shardings`. With `copy` none of the arrays is kept.
  """

  def place(x, target, where):
    if x.dtype != target.dtype:
      x = x.astype(target.dtype)
    elif copy:
      x = jnp.copy(x)  # Moving it may give the same buffer another name.
    return x if mesh is None else jax.device_put(x, where)

  wanted = jax.eval_shape(
    functools.partial(qwen2.compute_params, policy.config), params
  )
  places = wanted if mesh is None else sharding.sampling_shardings(mesh, wanted)
  return jax.tree.map(place, params, wanted, places)
