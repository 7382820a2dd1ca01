"""Compiles the update and a decoding step for TPUs, without one.

  python benchmarks/tpu_compile.py [--size=qwen2.5-7b] [--layers=2]
    [--topology=v5e:2x2] [--mesh=1,2,2] [--rows=4] [--micro-rows=2]

Prints seconds to compile and peak bytes a device, as the compiler plans them.
Layers are scanned, so their number changes the bytes and not the seconds.
Needs requirements-tpu-compiler.txt (`make test` and `make bench` install it).
"""

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(sys.prefix, 'tpu-compiler')]

LENGTH = 2048
SLOTS, CACHE = 8, 4096


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--size', default='qwen2.5-7b')
  parser.add_argument('--layers', type=int, default=2)
  parser.add_argument('--topology', default='v5e:2x2')
  parser.add_argument('--mesh', default='1,2,2', help='data,fsdp,tensor')
  parser.add_argument('--rows', type=int, default=4)
  parser.add_argument('--micro-rows', type=int, default=2)
  args = parser.parse_args()
  # The compiler reads these when it is loaded, and else looks for a TPU.
  os.environ |= {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_LOG_DIR': tempfile.mkdtemp(),
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  }
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.experimental import topologies
  from jax.sharding import AxisType, Mesh

  from planpo_jax import batch, losses, optimizer, sharding, update
  from planpo_jax.models import qwen2

  topology = topologies.get_topology_desc(
    platform='tpu', topology_name=args.topology
  )
  shape = [int(size) for size in args.mesh.split(',')]
  mesh = Mesh(
    np.asarray(topology.devices).reshape(shape),
    sharding.AXES,
    axis_types=(AxisType.Auto,) * len(shape),
  )
  config = dataclasses.replace(
    qwen2.SIZES[args.size],
    num_layers=args.layers,
    dtype='bfloat16',
    remat=True,
  )
  sharding.check_heads(mesh, config.num_heads)
  policy = qwen2.create(qwen2.for_platform(config, 'tpu'), 151665)

  def placed(tree, shardings):
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      tree,
      shardings,
    )

  def report(what, start, compiled):
    found = compiled.memory_analysis()
    print(
      f'{args.size}, {args.layers} layers, {args.topology} as {args.mesh}: '
      f'{what} compiled in {time.perf_counter() - start:.0f} s, '
      f'{found.peak_memory_in_bytes / 2**30:.2f} GiB a device at peak, '
      f'{compiled.as_text().count("tpu_custom_call")} kernel calls',
      flush=True,
    )

  optim = optimizer.make(1e-6)
  state = jax.eval_shape(
    lambda: update.create(qwen2.init_params(policy, jax.random.key(0)), optim)
  )
  shardings = sharding.param_shardings(mesh, state)
  state = placed(state, shardings)
  kinds = {'loss_mask_BT': jnp.bool_} | dict.fromkeys(
    ('adv_BT', 'sampler_logp_BT', 'old_logp_BT', 'ref_logp_BT'), jnp.float32
  )
  by_row = sharding.batch_sharding(mesh)
  rows = batch.Batch(
    **{
      field.name: jax.ShapeDtypeStruct(
        (args.rows, LENGTH), kinds.get(field.name, jnp.int32), sharding=by_row
      )
      for field in dataclasses.fields(batch.Batch)
    }
  )
  step = update.make_update(
    functools.partial(qwen2.token_logps, policy, temperature=1.0),
    losses.get('ppo_clip'),
    optim,
    micro_rows=args.micro_rows,
    micro_sharding=sharding.micro_sharding(mesh),
    state_shardings=shardings,
  )
  cache = jax.eval_shape(lambda: policy.init_cache(SLOTS, CACHE))
  cache = placed(cache, sharding.cache_shardings(mesh, cache))

  def extend(params, cache, tokens, start, count):
    hidden, cache = policy.extend(params, cache, tokens, start, count)
    return policy.scaled_logits(params, hidden[:, -1], 1.0), cache

  def ids(*shape):
    return jax.ShapeDtypeStruct(
      shape, jnp.int32, sharding=sharding.replicated(mesh)
    )

  with jax.set_mesh(mesh):
    start = time.perf_counter()
    compiled = step.lower(state, rows).compile()
    report(f'update of {args.rows} x {LENGTH} tokens', start, compiled)
    start = time.perf_counter()
    compiled = (
      jax.jit(extend, donate_argnums=1)
      .lower(state.params, cache, ids(SLOTS, 1), ids(SLOTS), ids(SLOTS))
      .compile()
    )
    report(f'decoding step of {SLOTS} slots x {CACHE}', start, compiled)


if __name__ == '__main__':
  main()
