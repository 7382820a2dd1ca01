"""The mesh, where each array lies on it, and moves from host to mesh.

The only file that names mesh axes: `data` and `fsdp` split the rows of a
batch, `fsdp` and `tensor` split the params, `tensor` splits the heads of the
cache. Maths elsewhere is written for one device; the compiler partitions it
after these placements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')

# By name of the param, an axis (or None) for each of its dimensions; a leading
# dimension of layers is never split. A name without a rule (norms, which are
# small) is replicated.
_PARAM_RULES = {
  'embedding_VD': ('tensor', 'fsdp'),
  'head_VD': ('tensor', 'fsdp'),
  'w_q_NHD': ('tensor', None, 'fsdp'),
  'w_k_KHD': ('tensor', None, 'fsdp'),
  'w_v_KHD': ('tensor', None, 'fsdp'),
  'b_q_NH': ('tensor', None),
  'b_k_KH': ('tensor', None),
  'b_v_KH': ('tensor', None),
  'w_o_DNH': ('fsdp', 'tensor', None),
  'w_gate_FD': ('tensor', 'fsdp'),
  'w_up_FD': ('tensor', 'fsdp'),
  'w_down_DF': ('fsdp', 'tensor'),
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


def check_heads(mesh: Mesh, num_heads: int) -> None:
  """Raises ValueError if the query heads cannot be split over `tensor`.

  Key/value heads may be fewer than its devices: they are then replicated.
  """
  tensor = mesh.shape['tensor']
  if num_heads % tensor:
    works = [
      str(size)
      for size in range(1, mesh.size + 1)
      if mesh.size % size == 0 and num_heads % size == 0
    ]
    raise ValueError(
      f'mesh.tensor={tensor} must divide the {num_heads} query heads of the '
      f'model; on {mesh.size} devices mesh.tensor may be {", ".join(works)} '
      '(and mesh.fsdp=-1 takes the rest).'
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows (the leading dimension) split over `data` and `fsdp`."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def slot_groups(mesh: Mesh) -> int:
  """Groups of devices that sample in slots of their own."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def cache_shardings(mesh: Mesh, cache: Any) -> Any:
  """Splits the slots over their groups, and K over `tensor` if it divides.

  They are the fourth and the third dimension from the end.
  """

  def place(leaf):
    heads = _divisible(mesh, ('tensor',), leaf.shape[-3:])
    rows = (None,) * (leaf.ndim - 4) + (('data', 'fsdp'),)
    return NamedSharding(mesh, PartitionSpec(*rows, *heads))

  return jax.tree.map(place, cache)


def map_slots(
  mesh: Mesh | None,
  function: Callable[..., Any],
  inputs: Sequence[str],
  outputs: Sequence[str],
  cache: Any,
) -> Callable[..., Any]:
  """`function` on each group of devices, over its own slots.

  What it computes for a slot must not depend on other slots, but through
  `any_slot`. Left to itself the compiler would gather the cache where rows are
  picked from it. Within a group `tensor` is the compiler's business as ever.

  Args:
    mesh: None or a mesh of one group returns `function` itself.
    function: takes and returns arrays, or trees of them.
    inputs: for each argument `whole`, `rows` (a leading dimension of slots),
      or `cache`.
    outputs: the same for each result.
    cache: a cache, or its shapes.
  """
  if mesh is None or slot_groups(mesh) == 1:
    return function
  rows = ('data', 'fsdp')
  stacked = (None,) * (jax.tree.leaves(cache)[0].ndim - 4)
  specs = {
    'whole': PartitionSpec(),
    'rows': PartitionSpec(rows),
    'cache': PartitionSpec(*stacked, rows),
  }
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=tuple(specs[kind] for kind in inputs),
    out_specs=tuple(specs[kind] for kind in outputs),
    axis_names=set(rows),
    check_vma=False,
  )


def any_slot(mesh: Mesh | None, flag: jax.Array) -> jax.Array:
  """Whether the scalar is true in any group; within `map_slots`."""
  if mesh is None or slot_groups(mesh) == 1:
    return flag
  return jax.lax.pmax(flag.astype(jnp.int32), ('data', 'fsdp')) > 0


def constrain_rows(x: jax.Array) -> jax.Array:
  """Keeps the rows (leading dimension) split over `data` and `fsdp`.

  Without it the compiler may gather activations where it should gather
  weights. No effect without a mesh (`jax.set_mesh`), or when rows are too few.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or x.shape[0] % (mesh.shape['data'] * mesh.shape['fsdp']):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(('data', 'fsdp')))


def param_shardings(mesh: Mesh, params: Any) -> Any:
  """The placement of every param in training, by its name.

  An axis that does not divide its dimension is left out there, so key/value
  heads fewer than `tensor` are replicated.

  Args:
    mesh: from `make_mesh`.
    params: params or their shapes (`jax.eval_shape`). Trees that hold params
      under the same names, such as optimizer moments, work too.

  Returns:
    A tree of NamedSharding of the same structure.
  """
  return _shardings(mesh, params, AXES)


def sampling_shardings(mesh: Mesh, params: Any) -> Any:
  """The placement of every param while sampling: split over `tensor` only.

  A step of decoding reads every weight once; those split over `fsdp` would
  have to be gathered at each step.
  """
  return _shardings(mesh, params, ('tensor',))


def _shardings(mesh, params, axes):
  """The rules of the params, with no other axes than `axes`."""

  def place(path, leaf):
    name = path[-1].key if hasattr(path[-1], 'key') else None
    rule = _PARAM_RULES.get(name, ())
    rule = tuple(axis if axis in axes else None for axis in rule)
    stacked = (None,) * (leaf.ndim - len(rule)) if rule else ()
    return NamedSharding(mesh, _divisible(mesh, stacked + rule, leaf.shape))

  return jax.tree_util.tree_map_with_path(place, params)


def _divisible(mesh, rule, shape):
  """The rule with axes dropped where they do not divide the dimension."""
  return PartitionSpec(
    *(
      axis if axis and size % mesh.shape[axis] == 0 else None
      for axis, size in zip(rule, shape, strict=False)
    )
  )


def abstract(mesh: Mesh, shapes: Any) -> Any:
  """Shapes of params, or of a tree that holds some, with their places."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    param_shardings(mesh, shapes),
  )


@contextlib.contextmanager
def only(device: jax.Device) -> Iterator[None]:
  """Computes on arrays of one device, whatever mesh is set around."""
  alone = Mesh(np.array([device]), ('device',), axis_types=(AxisType.Auto,))
  with jax.set_mesh(alone):
    yield


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


def map_heads(
  attend: Callable[..., jax.Array],
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_ids_BT: jax.Array,
) -> jax.Array:
  """Attention on each device over its own rows and query heads.

  For kernels that the compiler cannot partition. Rows are split over `data`
  and `fsdp`, query heads over `tensor`, and key/value heads as well where
  they divide; else each device takes those that its query heads read.

  Args:
    attend: maps the arguments below to [B, T, N, H] on one device; query head
      n reads key/value head n // (N / K) of those it is given.
    q_BTNH: queries.
    k_BTKH: keys.
    v_BTKH: values.
    segment_ids_BT: int32.

  Returns:
    [B, T, N, H]. Without a mesh (`jax.set_mesh`) or on one device, `attend`
    of the whole.

  Raises:
    ValueError: rows or query heads do not divide among the devices.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
  rows, _, heads, _ = q_BTNH.shape
  kv_heads = k_BTKH.shape[2]
  places = mesh.shape['data'] * mesh.shape['fsdp']
  tensor = mesh.shape['tensor']
  if rows % places:
    raise ValueError(
      f'attention over {rows} rows must divide over data x fsdp = {places} '
      f'devices; try {-(-rows // places) * places} rows.'
    )
  if heads % tensor:
    raise ValueError(
      f'{heads} query heads must divide over tensor={tensor} devices; '
      f'try tensor={math.gcd(heads, tensor)}.'
    )
  split = kv_heads % tensor == 0
  local = heads // tensor
  group = heads // kv_heads
  # Query heads that lie on one device and read one key/value head.
  run = math.gcd(local, group)

  def attend_local(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
    if not split:
      first = jax.lax.axis_index('tensor') * local
      index = (first + jnp.arange(0, local, run)) // group
      k_BTKH, v_BTKH = (jnp.take(x, index, axis=2) for x in (k_BTKH, v_BTKH))
    return attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)

  rows_spec = PartitionSpec(('data', 'fsdp'))
  q_spec = PartitionSpec(('data', 'fsdp'), None, 'tensor')
  kv_spec = q_spec if split else rows_spec
  return jax.shard_map(
    attend_local,
    in_specs=(q_spec, kv_spec, kv_spec, rows_spec),
    out_specs=q_spec,
    # Kernels do not tell over which axes their outputs vary.
    check_vma=False,
  )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
