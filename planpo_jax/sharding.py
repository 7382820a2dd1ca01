"""The mesh, where each array lies on it, and moves from host to mesh.

The only file that names mesh axes: `data` and `fsdp` split the rows of a
batch, `fsdp` and `tensor` split the params, `tensor` splits the heads of the
cache. Maths elsewhere is written for one device; the compiler partitions it
after these placements.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')

# By name of the param, an axis (or None) for each of its dimensions. A name
# without a rule (norms, which are small) is replicated.
_PARAM_RULES = {
  'embedding_VD': ('tensor', 'fsdp'),
  'head_DV': ('fsdp', 'tensor'),
  'w_q_DNH': ('fsdp', 'tensor', None),
  'w_k_DKH': ('fsdp', 'tensor', None),
  'w_v_DKH': ('fsdp', 'tensor', None),
  'b_q_NH': ('tensor', None),
  'b_k_KH': ('tensor', None),
  'b_v_KH': ('tensor', None),
  'w_o_NHD': ('tensor', None, 'fsdp'),
  'w_gate_DF': ('fsdp', 'tensor'),
  'w_up_DF': ('fsdp', 'tensor'),
  'w_down_FD': ('tensor', 'fsdp'),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """A mesh over all devices.

  Args:
    data: groups of devices that hold the same params and split the batch.
    fsdp: devices that split both the params and the batch.
    tensor: devices that split heads, feed-forward and vocabulary.

  Raises:
    ValueError: the product is not the number of devices.
  """
  shape = (data, fsdp, tensor)
  devices = jax.device_count()
  if min(shape) < 1 or math.prod(shape) != devices:
    keep = math.gcd(max(tensor, 1), devices)
    raise ValueError(
      f'mesh data={data} x fsdp={fsdp} x tensor={tensor} must have as many '
      f'places as there are devices, {devices}; '
      f'try data=1, fsdp={devices // keep}, tensor={keep}.'
    )
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows (the leading dimension) split over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def cache_sharding(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
  """Splits the second dimension, K, over `tensor` where it divides."""
  spec = _divisible(mesh, (None, 'tensor'), (1, num_kv_heads))
  return NamedSharding(mesh, spec)


def param_shardings(mesh: Mesh, params: Any) -> Any:
  """The placement of every param, by its name.

  An axis that does not divide its dimension is left out there, so key/value
  heads fewer than `tensor` are replicated.

  Args:
    mesh: from `make_mesh`.
    params: params or their shapes (`jax.eval_shape`). Trees that hold params
      under the same names, such as optimizer moments, work too.

  Returns:
    A tree of NamedSharding of the same structure.
  """

  def place(path, leaf):
    name = path[-1].key if hasattr(path[-1], 'key') else None
    rule = _PARAM_RULES.get(name, ())
    return NamedSharding(mesh, _divisible(mesh, rule, leaf.shape))

  return jax.tree_util.tree_map_with_path(place, params)


def _divisible(mesh, rule, shape):
  """The rule with axes dropped where they do not divide the dimension."""
  return PartitionSpec(
    *(
      axis if axis and size % mesh.shape[axis] == 0 else None
      for axis, size in zip(rule, shape, strict=False)
    )
  )


def shard_params(mesh: Mesh, params: Any) -> Any:
  """Params moved to their places."""
  return jax.device_put(params, param_shardings(mesh, params))


def put_batch(mesh: Mesh, batch: Any) -> Any:
  """Host arrays of a batch as arrays on the mesh, rows split.

  Each host passes its own rows; together they are the global batch.

  Raises:
    ValueError: the rows do not divide among the devices.
  """
  places = mesh.shape['data'] * mesh.shape['fsdp']
  sharding = batch_sharding(mesh)

  def put(x):
    rows = x.shape[0] * jax.process_count()
    if rows % places:
      raise ValueError(
        f'batch of {rows} rows must divide over data x fsdp = {places} '
        f'devices; try {-(-rows // places) * places} rows.'
      )
    return jax.make_array_from_process_local_data(sharding, x)

  return jax.tree.map(put, batch)


def micro_sharding(mesh: Mesh) -> NamedSharding:
  """For [blocks, rows, T]: the rows of each block split."""
  return NamedSharding(mesh, PartitionSpec(None, ('data', 'fsdp')))
