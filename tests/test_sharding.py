"""Eight simulated devices compute what one does.

The devices have to exist before jax starts, hence the process of its own.
"""

import json

import pytest

from tests import eight_devices

_SCRIPT = """
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from planpo_jax import (
  batch, compilations, losses, sampler, sampling, sharding, update)
from planpo_jax.models import qwen2

jax.config.update('jax_default_matmul_precision', 'highest')
# Two key/value heads, as all Qwen2.5 but the 7B have; an odd vocabulary.
config = qwen2.Qwen2Config(
  vocab_size=1003, hidden_size=32, intermediate_size=48, num_layers=2,
  num_heads=8, num_kv_heads=2, head_dim=8, tie_word_embeddings=False,
  scan_layers=sys.argv[1] == 'scanned', remat=sys.argv[1] == 'scanned',
)
policy = qwen2.create(config, 1000)
rng = np.random.default_rng(0)
params = jax.tree.map(
  lambda x: (x + 0.2 * rng.normal(size=x.shape)).astype(np.float32),
  jax.device_get(jax.jit(qwen2.init_params, static_argnums=0)(
    policy, jax.random.key(0))))
segments = np.ones((8, 20), np.int32)
segments[:, 12:] = 2
segments[:, 18:] = 0
positions = np.concatenate([np.arange(12), np.arange(6), [0, 0]])
mask = rng.random((8, 20)) < 0.5
rows = batch.Batch(
  tokens_BT=rng.integers(0, 1000, (8, 20)).astype(np.int32),
  positions_BT=np.broadcast_to(positions, (8, 20)).astype(np.int32),
  segment_ids_BT=segments,
  loss_mask_BT=mask & (segments > 0) & (positions > 0),
  adv_BT=rng.normal(size=(8, 20)).astype(np.float32),
  turn_BT=np.ones((8, 20), np.int32),
  flat_BT=np.zeros((8, 20), np.int32),
  **{name: rng.normal(-7, 0.1, (8, 20)).astype(np.float32)
     for name in ('old_logp_BT', 'ref_logp_BT', 'sampler_logp_BT')},
)
logps = functools.partial(qwen2.token_logps, policy, temperature=1.0)
loss = losses.get('ppo_clip')
# Plain steps: Adam would turn rounding of a gradient near 0 into a step.
optimizer = optax.sgd(0.1, momentum=0.9)


@jax.jit
def backward(params, rows):
  def total(params):
    logp, entropy = logps(
      params, rows.tokens_BT, rows.positions_BT, rows.segment_ids_BT)
    return loss(
      logp, rows, entropy_BT=entropy, denominator=rows.loss_mask_BT.sum())[0]
  return jax.grad(total)(params)


def run(mesh):
  if mesh is None:
    placed, placed_rows, micro = jax.tree.map(jnp.asarray, params), rows, None
    shardings = None
  else:
    placed = sharding.shard_params(mesh, params)
    placed_rows = sharding.put_batch(mesh, rows)
    micro = sharding.micro_sharding(mesh)
    shardings = sharding.param_shardings(
      mesh, update.create(placed, optimizer))
  score = update.make_score(
    lambda *rows: logps(*rows)[0], micro_rows=8, micro_sharding=micro)
  step = update.make_update(
    logps, loss, optimizer, micro_rows=8, micro_sharding=micro,
    state_shardings=shardings)
  scored = score(placed, placed_rows)
  grads = backward(placed, placed_rows)
  state = update.create(placed, optimizer)
  if mesh is not None:
    state = sharding.shard_params(mesh, state)
  state, _ = step(state, placed_rows)
  return placed, placed_rows, scored, grads, state


# A uniform number that falls within rounding of a border between two ids would
# give another id on another mesh (about 1 token in 500 here); none does.
KEY = jax.random.key(2)


def respond(params, mesh):
  one = sampler.Sampler(
    policy, params, slots=16, cache_len=40, max_new_tokens=8,
    settings=sampling.Settings(), stop_ids=[], mesh=mesh)
  one.submit(1, rows.tokens_BT[0, :9], KEY)
  first = one.decode()[0]
  compiled = compilations.watch().programs
  # Slots of several groups of devices; one ends before the others.
  one.submit(15, rows.tokens_BT[0, :9], KEY)
  one.submit(6, rows.tokens_BT[0, :9], KEY, 3)
  short, = one.decode()
  second, = one.decode()
  assert compilations.watch().programs == compiled
  assert (short.slot, second.slot) == (6, 15)
  assert first.ids.tolist() == second.ids.tolist()
  assert first.ids[:3].tolist() == short.ids.tolist()
  return first


def difference(one, other):
  return max(
    float(np.abs(np.asarray(x) - np.asarray(y)).max())
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def shard_of(x):
  return x.addressable_shards[0].data.shape


def largest(tree):
  return max(float(np.abs(np.asarray(x)).max()) for x in jax.tree.leaves(tree))


_, _, logp, grads, state = run(None)
moved = largest(jax.tree.map(lambda a, b: a - b, state.params, params))
response = respond(jax.tree.map(jnp.asarray, params), None)
report = {
  'meshes': {}, 'logp': largest(logp), 'grads': largest(grads), 'moved': moved}
for shape in ((8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)):
  mesh = sharding.make_mesh(*shape)
  with jax.set_mesh(mesh):
    placed, placed_rows, other_logp, other_grads, other_state = run(mesh)
  # Sampling runs in a thread of its own, where no mesh is set.
  on_mesh = respond(placed, mesh)
  leaves = jax.tree_util.tree_leaves_with_path(placed)
  block = placed['blocks'] if config.scan_layers else placed['blocks']['00']
  report['meshes'][str(shape)] = {
    'logp': difference(logp, other_logp),
    'grads': difference(grads, other_grads),
    'state': difference(state, other_state),
    'ids': on_mesh.ids.tolist() == response.ids.tolist(),
    'logps': difference(response.logps, on_mesh.logps),
    'bytes': sum(
      x.addressable_shards[0].data.nbytes for _, x in leaves),
    'sizes': {
      name: sum(x.size for path, x in leaves if path[-1].key == name)
      for name in {path[-1].key for path, _ in leaves}},
    'w_k_shard': shard_of(block['attention']['w_k_KHD'])[-3:],
    'head_shard': shard_of(placed['head_VD']),
    'norm_shard': shard_of(placed['final_norm_D']),
    'row_shard': shard_of(placed_rows.tokens_BT),
  }


def error(function, *args):
  try:
    function(*args)
  except ValueError as e:
    return str(e)

report['bad_mesh'] = error(sharding.make_mesh, 2, 2, 4)
report['bad_tensor'] = error(sharding.make_mesh, 1, 1, 3)
report['bad_rows'] = error(
  sharding.put_batch, mesh, jax.tree.map(lambda x: x[:6], rows))
report['bad_heads'] = error(sharding.check_heads, mesh, 7)
report['replicated'] = sharding.replicated(mesh).is_fully_replicated
print(json.dumps(report))
"""

SHAPES = ['(8, 1, 1)', '(1, 8, 1)', '(1, 2, 4)', '(2, 2, 2)']


@pytest.fixture(scope='module', params=['unrolled', 'scanned'])
def report(request):
  return eight_devices.report_of(_SCRIPT, request.param)


@pytest.mark.parametrize('shape', SHAPES)
def test_eight_devices_equal_one(report, shape):
  mesh = report['meshes'][shape]
  # What is compared is far from 0.
  assert report['logp'] > 1 and report['grads'] > 0.1
  assert report['moved'] > 1e-3
  assert mesh['logp'] < 1e-5
  assert mesh['grads'] < 1e-5
  assert mesh['state'] < 1e-5
  assert mesh['ids']
  assert mesh['logps'] < 1e-5


@pytest.mark.parametrize('shape', SHAPES)
def test_a_device_holds_its_share_and_what_is_replicated(report, shape):
  mesh = report['meshes'][shape]
  _, fsdp, tensor = json.loads(shape.replace('(', '[').replace(')', ']'))
  # By hand: which axes split which params. With 2 key/value heads, tensor=4
  # leaves those whole.
  kv = tensor if tensor <= 2 else 1
  split = {
    'embedding_VD': fsdp * tensor,
    'head_VD': fsdp * tensor,
    'w_q_NHD': fsdp * tensor,
    'w_o_DNH': fsdp * tensor,
    'w_gate_FD': fsdp * tensor,
    'w_up_FD': fsdp * tensor,
    'w_down_DF': fsdp * tensor,
    'w_k_KHD': fsdp * kv,
    'w_v_KHD': fsdp * kv,
    'b_q_NH': tensor,
    'b_k_KH': kv,
    'b_v_KH': kv,
    'attention_norm_D': 1,
    'feed_forward_norm_D': 1,
    'final_norm_D': 1,
  }
  assert mesh['sizes'].keys() == split.keys()
  expected = sum(4 * size / split[n] for n, size in mesh['sizes'].items())
  assert mesh['bytes'] == expected


def test_params_and_rows_are_split_where_they_divide(report):
  data, fsdp, many_heads, mixed = report['meshes'].values()
  assert data['w_k_shard'] == [2, 8, 32] and data['row_shard'] == [1, 20]
  assert fsdp['w_k_shard'] == [2, 8, 4] and fsdp['row_shard'] == [1, 20]
  # Two key/value heads do not divide over four devices: whole on each.
  assert many_heads['w_k_shard'] == [2, 8, 16]
  # 1003 ids are kept in 1024 rows, which divide.
  assert many_heads['head_shard'] == [256, 16]
  assert many_heads['row_shard'] == [4, 20]
  assert mixed['w_k_shard'] == [1, 8, 16] and mixed['row_shard'] == [2, 20]
  assert mixed['norm_shard'] == [32]
  assert report['replicated']


def test_impossible_meshes_and_batches_name_one_that_works(report):
  assert 'devices, 8; try data=1, fsdp=2, tensor=4' in report['bad_mesh']
  assert 'try data=1, fsdp=8, tensor=1' in report['bad_tensor']
  assert '6 rows must divide' in report['bad_rows']
  assert 'try 8 rows' in report['bad_rows']
  assert 'mesh.tensor=2 must divide the 7 query heads' in report['bad_heads']
  assert 'mesh.tensor may be 1 ' in report['bad_heads']
