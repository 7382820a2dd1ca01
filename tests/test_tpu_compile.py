"""Attention compiled ahead of time for TPUs, without one.

In a process of its own: the compiler for TPUs takes its settings from the
environment when it is loaded.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

# By model: query heads, key/value heads, head size, and a mesh of four devices
# (data, fsdp, tensor). Over the second, the two key/value heads do not divide.
SHAPES = {
  '0.5B': (14, 2, 64, (1, 2, 2)),
  '1.5B': (12, 2, 128, (1, 1, 4)),
  '7B': (28, 4, 128, (1, 1, 4)),
}
ROWS = 4
LENGTH = 2048

_SCRIPT = """
import json
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from planpo_jax import sharding
from planpo_jax.models import attention

topology, rows, length, shapes = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(
  platform='tpu', topology_name=topology).devices


def forward(q, k, v, ids):
  return attention.attend(q, k, v, ids, kernel='splash')


def backward(q, k, v, ids):
  # Two layers of it, as a policy has it: scanned and computed again.
  def total(q, k, v):
    def layer(q, _):
      return forward(q, k, v, ids), None
    q, _ = jax.lax.scan(jax.checkpoint(layer), q, None, length=2)
    return q.astype(jnp.float32).sum()
  return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


report = {}
for model, (heads, kv_heads, head_dim, mesh_shape) in shapes.items():
  mesh = Mesh(
    np.array(devices[:4]).reshape(mesh_shape), sharding.AXES,
    axis_types=(AxisType.Auto,) * 3)
  by_row = sharding.batch_sharding(mesh)
  by_head = NamedSharding(
    mesh, PartitionSpec(('data', 'fsdp'), None, 'tensor'))

  def heads_of(number):
    return jax.ShapeDtypeStruct(
      (rows, length, number, head_dim), jnp.bfloat16,
      sharding=by_row if number % mesh.shape['tensor'] else by_head)

  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=by_row)
  for function in (forward, backward):
    start = time.perf_counter()
    with jax.set_mesh(mesh):
      compiled = jax.jit(function).trace(
        heads_of(heads), heads_of(kv_heads), heads_of(kv_heads), ids,
      ).lower(lowering_platforms=('tpu',)).compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    report[f'{model} {function.__name__}'] = {
      'seconds': time.perf_counter() - start,
      'peak_bytes': memory.peak_memory_in_bytes,
      'temp_bytes': memory.temp_size_in_bytes,
      'calls': text.count('custom_call_target="tpu_custom_call"'),
      'kernels': sorted(set(re.findall(r'splash_mha_[a-z]+_segmented', text))),
    }
print(json.dumps(report))
"""


@pytest.fixture(scope='module', params=['v5e:2x2', 'v5p:2x2x1'])
def report(request, tmp_path_factory):
  root = pathlib.Path(__file__).parents[1]
  # Without a device, what is compiled for TPUs cannot be read back.
  env = {k: v for k, v in os.environ.items() if 'COMPILATION_CACHE' not in k}
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      _SCRIPT,
      json.dumps([request.param, ROWS, LENGTH, SHAPES]),
    ],
    env={
      **env,
      'JAX_PLATFORMS': 'cpu',
      'TPU_SKIP_MDS_QUERY': '1',
      'TPU_WORKER_HOSTNAMES': 'localhost',
      'TPU_WORKER_ID': '0',
      'TPU_LOG_DIR': str(tmp_path_factory.mktemp('tpu')),
      # Nothing is run on a device, so several processes may compile at once.
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
      'PYTHONPATH': os.pathsep.join(
        (str(root), os.path.join(sys.prefix, 'tpu-compiler'))
      ),
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('model', SHAPES)
def test_attention_compiles_to_the_splash_kernels(report, model):
  forward, backward = (report[f'{model} {x}'] for x in ('forward', 'backward'))
  assert forward['kernels'] == ['splash_mha_fwd_segmented']
  assert forward['calls'] == 1
  assert backward['kernels'] == [
    f'splash_mha_{phase}_segmented' for phase in ('dkv', 'dq', 'fwd')
  ]
  assert backward['calls'] == 4


@pytest.mark.parametrize('direction', ['forward', 'backward'])
@pytest.mark.parametrize('model', SHAPES)
def test_scores_are_never_stored(report, model, direction):
  heads, _, _, (data, fsdp, tensor) = SHAPES[model]
  scores = ROWS // (data * fsdp) * (heads // tensor) * LENGTH**2
  # In float32 they alone would take more than all there is.
  assert report[f'{model} {direction}']['peak_bytes'] < 4 * scores
