"""How many slots fit: memory of the cache, planned before anything compiles."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import psutil

from planpo_jax import advantages, sharding
from planpo_jax import config as config_lib
from planpo_jax.models import critic, qwen2

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
    training: room for the optimizer, the reference policy and the critic, if
      the method has one, is needed too.

  Raises:
    config_lib.ConfigError: the cache does not fit on a device.
  """
  groups = sharding.slot_groups(mesh)
  limit = device_bytes(jax.local_devices()[0])
  fixed = fixed_bytes(config, policy, mesh, training)
  room = max(0, int(_USABLE * limit) - fixed)
  each = slot_bytes(config, policy, mesh, groups)  # One slot a group.
  fit = groups * (room // each)
  chosen = config.sampler.slots
  if chosen is not None and chosen % groups:
    nearest = min((chosen + groups // 2) // groups * groups, fit)
    raise config_lib.ConfigError(
      f'sampler.slots={chosen} must divide over data x fsdp = {groups} groups '
      f'of devices; try --config.sampler.slots={max(nearest, groups)}.'
    )
  needed = chosen or groups
  if needed > fit:
    raise config_lib.ConfigError(
      f'the cache of sampler.slots={needed} x '
      f'chat.max_context={config.chat.max_context} tokens takes '
      f'{needed // groups * each / _GIB:.2f} GiB a device, but of '
      f'{limit / _GIB:.2f} GiB only {room / _GIB:.2f} are left for it (weights '
      f'and optimizer take {fixed / _GIB:.2f}, {1 - _USABLE:.0%} are kept for '
      'activations); '
      + (
        f'try --config.sampler.slots={_round(fit, groups)}.'
        if fit
        else 'lower chat.max_context, or split the model over more devices '
        '(mesh.tensor, mesh.fsdp).'
      )
    )
  if chosen is not None:
    return chosen
  wanted = config.eval.episodes or math.inf  # All of a split, it is not known.
  if training:
    episodes = config.train.tasks_per_step * config.train.group_size
    wanted = max(wanted, episodes)
  if not config.env.address:
    # A ninth of the workers resets the next environments meanwhile.
    workers = config.env.workers - config.env.workers // 9
    wanted = min(wanted, workers)
  return _round(min(wanted, fit), groups)


def _round(count: int, groups: int) -> int:
  """Down to a multiple of the groups, and of `_MULTIPLE` once it is reached."""
  multiple = groups
  if count >= math.lcm(groups, _MULTIPLE):
    multiple = math.lcm(groups, _MULTIPLE)
  return max(groups, count - count % multiple)


def slot_bytes(
  config: ml_collections.ConfigDict,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  count: int,
) -> int:
  """Bytes a device of the cache and the logits of `count` slots.

  `count` must divide over the groups of devices.
  """
  cache = jax.eval_shape(
    lambda: policy.init_cache(count, config.chat.max_context)
  )
  held = _bytes(cache, sharding.cache_shardings(mesh, cache))
  logits = jax.ShapeDtypeStruct((policy.config.embedding_rows,), jnp.float32)
  per_device = count // sharding.slot_groups(mesh)
  return held + per_device * _LOGITS * logits.size * logits.dtype.itemsize


def fixed_bytes(
  config: ml_collections.ConfigDict,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  training: bool,
) -> int:
  """Bytes a device of everything that does not grow with the slots."""
  params = qwen2.abstract_params(policy)
  places = sharding.param_shardings(mesh, params)
  trained = _bytes(params, places)
  casts = jax.eval_shape(
    lambda p: qwen2.compute_params(policy.config, p), params
  )
  sampling = sharding.sampling_shardings(mesh, params)
  # Arrays that are as sampling wants them are not copied, unless the update is
  # to consume them meanwhile.
  copied = [
    (cast, where)
    for x, cast, place, where in zip(
      *map(jax.tree.leaves, (params, casts, places, sampling)), strict=True
    )
    if (training and config.rollout.overlap)
    or x.dtype != cast.dtype
    or not where.is_equivalent_to(place, x.ndim)
  ]
  # Params, the reference, two moments and the gradient.
  kept = (5 if training else 1) * trained
  heads = advantages.traits(config.advantage.name).values
  if training and heads:
    kept += 4 * _critic_bytes(policy, mesh, params, heads)  # No reference.
  return kept + (_bytes(*zip(*copied, strict=True)) if copied else 0)


def _critic_bytes(
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
  backbone_params: qwen2.Params,
  heads: int,
) -> int:
  params = jax.eval_shape(
    lambda p: critic.init_params(policy, p, heads), backbone_params
  )
  return _bytes(params, sharding.param_shardings(mesh, params))


def _bytes(shapes: Any, shardings: Any) -> int:
  """Bytes on one device."""
  return sum(
    math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize
    for x, where in zip(
      jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
    )
  )


def device_bytes(device: jax.Device) -> int:
  """Memory of a device; of a CPU, its share of that of the host.

  Not of what is free now: a run should come out the same tomorrow.
  """
  stats = device.memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  total = psutil.virtual_memory().total
  container = pathlib.Path('/sys/fs/cgroup/memory.max')
  if container.exists() and (text := container.read_text().strip()) != 'max':
    total = min(total, int(text))
  return total // jax.local_device_count()
