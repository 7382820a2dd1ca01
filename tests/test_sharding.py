"""Eight simulated devices compute what one does.

The devices have to exist before jax starts, hence the process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = """
import functools
import json

import jax
import numpy as np

from planpo_jax import sampler, sharding
from planpo_jax.models import qwen2

config = qwen2.Qwen2Config(
  vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1,
  num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=False,
)
policy = qwen2.create(config, 60)
params = jax.device_get(jax.jit(qwen2.init_params, static_argnums=0)(
  policy, jax.random.key(0)))
params = jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, params)
rng = np.random.default_rng(0)
batch = {
  'tokens': rng.integers(0, 60, (8, 20)).astype(np.int32),
  'positions': np.broadcast_to(np.arange(20, dtype=np.int32), (8, 20)),
  'segments': np.ones((8, 20), np.int32),
}


@jax.jit
def forward(params, batch):
  return qwen2.token_logps(
    policy, params, batch['tokens'], batch['positions'], batch['segments'],
    1.0)[0]


@jax.jit
def backward(params, batch):
  return jax.grad(lambda params: forward(params, batch).mean())(params)


def respond(params, mesh):
  one = sampler.Sampler(
    policy, params, slots=2, cache_len=40, max_new_tokens=8, temperature=1.0,
    stop_ids=[], mesh=mesh)
  one.submit(1, batch['tokens'][0, :9], jax.random.key(1))
  first = one.decode()[0]
  compiled = one.compilations
  one.submit(0, batch['tokens'][0, :9], jax.random.key(1))
  second = one.decode()[0]
  assert one.compilations == compiled
  assert first.ids.tolist() == second.ids.tolist()
  return first


def difference(one, other):
  return max(
    float(np.abs(np.asarray(x) - np.asarray(y)).max())
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


logp = forward(params, batch)
response = respond(params, None)
report = {'meshes': {}}
for shape in ((8, 1, 1), (1, 2, 4), (2, 2, 2)):
  mesh = sharding.make_mesh(*shape)
  placed = sharding.shard_params(mesh, params)
  rows = sharding.put_batch(mesh, batch)
  w_k = placed['blocks']['00']['attention']['w_k_DKH']
  report['meshes'][str(shape)] = {
    'logp': difference(logp, forward(placed, rows)),
    'w_k_shard': w_k.addressable_shards[0].data.shape,
    'head_shard': placed['head_DV'].addressable_shards[0].data.shape,
    'norm_shard': placed['final_norm_D'].addressable_shards[0].data.shape,
    'row_shard': rows['tokens'].addressable_shards[0].data.shape,
  }

report['grads'] = difference(
  backward(params, batch), backward(placed, rows))
on_mesh = respond(placed, mesh)
report['ids'] = on_mesh.ids.tolist() == response.ids.tolist()
report['logps'] = difference(response.logps, on_mesh.logps)


def error(function, *args):
  try:
    function(*args)
  except ValueError as e:
    return str(e)

report['bad_mesh'] = error(sharding.make_mesh, 2, 2, 4)
report['bad_tensor'] = error(sharding.make_mesh, 1, 1, 3)
report['bad_rows'] = error(
  sharding.put_batch, mesh, jax.tree.map(lambda x: x[:6], batch))
report['replicated'] = sharding.replicated(mesh).is_fully_replicated
print(json.dumps(report))
"""


@pytest.fixture(scope='module')
def report():
  root = pathlib.Path(__file__).parents[1]
  done = subprocess.run(
    [sys.executable, '-c', _SCRIPT],
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': '8',
      'PYTHONPATH': str(root),
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('shape', ['(8, 1, 1)', '(1, 2, 4)', '(2, 2, 2)'])
def test_eight_devices_equal_one(report, shape):
  mesh = report['meshes'][shape]
  assert mesh['logp'] < 1e-5


def test_gradients_and_responses_on_a_mesh_equal_those_of_one_device(report):
  assert report['grads'] < 1e-5
  assert report['ids']
  assert report['logps'] < 1e-5


def test_params_and_rows_are_split_where_they_divide(report):
  data, many_heads, mixed = report['meshes'].values()
  assert data['w_k_shard'] == [32, 2, 8] and data['row_shard'] == [1, 20]
  # Two key/value heads do not divide over four devices: whole on each.
  assert many_heads['w_k_shard'] == [16, 2, 8]
  assert many_heads['head_shard'] == [16, 16]
  assert many_heads['row_shard'] == [4, 20]
  assert mixed['w_k_shard'] == [16, 1, 8] and mixed['row_shard'] == [2, 20]
  assert mixed['norm_shard'] == [32]
  assert report['replicated']


def test_impossible_meshes_and_batches_name_one_that_works(report):
  assert 'devices, 8; try data=1, fsdp=2, tensor=4' in report['bad_mesh']
  assert 'try data=1, fsdp=8, tensor=1' in report['bad_tensor']
  assert '6 rows must divide' in report['bad_rows']
  assert 'try 8 rows' in report['bad_rows']
