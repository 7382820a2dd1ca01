"""How many slots fit: memory of the cache, planned before anything compiles."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import psutil

from planpo_jax import config as config_lib
from planpo_jax import sharding
from planpo_jax.models import qwen2

# Share of a device that params, optimizer and cache may take; the rest is for
# activations, which depend on the compiler.
_USABLE = 0.8

# Float32 arrays of one row of the vocabulary that sampling holds for a slot.
_LOGITS = 3

# Derived numbers of slots above this are multiples of it.
_MULTIPLE = 8

_GIB = 2**30


def slots(
  config: ml_collections.ConfigDict,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  *,
  training: bool = True,
) -> int:
  """`sampler.slots`, or as many as are of use and fit if it is unset.

  Args:
    config: the whole configuration.
    policy: the network.
    mesh: from `build.mesh`.
    training: room for the optimizer and the reference policy is needed too.

  Raises:
    config_lib.ConfigError: the cache does not fit on a device.
  """
  limit = device_bytes(jax.local_devices()[0])
  fixed = fixed_bytes(config, policy, mesh, training)
  room = int(_USABLE * limit) - fixed

  def needed(count: int) -> int:
    return slot_bytes(config, policy, mesh, count)

  # Both grow by the same for each slot.
  fit = max(0, room // needed(1))
  if config.sampler.slots is not None:
    if config.sampler.slots > fit:
      raise config_lib.ConfigError(
        _message(config, config.sampler.slots, needed, room, limit, fixed)
        + (f'; try --config.sampler.slots={_round(fit)}.' if fit else '.')
      )
    return config.sampler.slots
  if not fit:
    raise config_lib.ConfigError(
      _message(config, 1, needed, room, limit, fixed)
      + '; lower chat.max_context, or split the model over more devices '
      '(mesh.tensor, mesh.fsdp).'
    )
  wanted = config.eval.episodes
  if training:
    episodes = config.train.tasks_per_step * config.train.group_size
    wanted = max(wanted, episodes)
  if not config.env.address:
    wanted = min(wanted, config.env.workers)
  return _round(min(wanted, fit))


def _round(count: int) -> int:
  return count if count < _MULTIPLE else count - count % _MULTIPLE


def _message(config, count, needed, room, limit, fixed) -> str:
  return (
    f'the cache of sampler.slots={count} x '
    f'chat.max_context={config.chat.max_context} tokens takes '
    f'{needed(count) / _GIB:.2f} GiB a device, but of {limit / _GIB:.2f} GiB '
    f'only {max(room, 0) / _GIB:.2f} are left for it (weights and optimizer '
    f'take {fixed / _GIB:.2f}, {1 - _USABLE:.0%} are kept for activations)'
  )


def slot_bytes(
  config: ml_collections.ConfigDict,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  count: int,
) -> int:
  """Bytes a device of the cache and the logits of `count` slots."""
  cache = jax.eval_shape(
    lambda: policy.init_cache(count, config.chat.max_context)
  )
  held = _bytes(cache, sharding.cache_shardings(mesh, cache))
  logits = jax.ShapeDtypeStruct((policy.config.embedding_rows,), jnp.float32)
  return held + count * _LOGITS * logits.size * logits.dtype.itemsize


def fixed_bytes(
  config: ml_collections.ConfigDict,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  training: bool,
) -> int:
  """Bytes a device of everything that does not grow with the slots."""
  params = qwen2.abstract_params(policy)
  trained = _bytes(params, sharding.param_shardings(mesh, params))
  casts = jax.eval_shape(
    lambda p: qwen2.compute_params(policy.config, p), params
  )
  sampled = _bytes(casts, sharding.sampling_shardings(mesh, params))
  same = sampled == trained and not config.rollout.overlap
  # Params, the reference, two moments and the gradient.
  return (5 if training else 1) * trained + (0 if same else sampled)


def _bytes(shapes: Any, shardings: Any) -> int:
  """Bytes on one device."""
  return sum(
    math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize
    for x, where in zip(
      jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
    )
  )


def device_bytes(device: jax.Device) -> int:
  """Memory of a device; of a CPU, its share of what the host has free."""
  stats = device.memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  return psutil.virtual_memory().available // jax.local_device_count()
