"""Compiles the update and the sampler for TPUs, without one.

  python benchmarks/tpu_compile.py [--size=qwen2.5-7b] [--layers=2]
    [--topology=v5e:2x2] [--mesh=1,2,2] [--rows=4] [--micro-rows=2]
    [--parts=update,sampler]

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
SLOTS, CACHE, MAX_RESPONSE = 8, 4096, 200
# One of sampler.PREFILL_CHUNKS.
CHUNK = 64


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
  parser.add_argument('--parts', default='update,sampler')
  args = parser.parse_args()
  parts = args.parts.split(',')
  if not set(parts) <= {'update', 'sampler'}:
    parser.error(f'--parts={args.parts}: use update, sampler or both.')
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

  from planpo_jax import (
    batch,
    decoding,
    losses,
    optimizer,
    sampler,
    sampling,
    sharding,
    update,
  )
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
  by_row = sharding.batch_sharding(mesh)
  rows = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row),
    batch.shapes(args.rows, LENGTH),
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

  no_slots = jax.eval_shape(lambda: decoding.no_slots(SLOTS, MAX_RESPONSE))
  slots = placed(
    no_slots,
    jax.tree.map(lambda _: sharding.batch_sharding(mesh), no_slots),
  )
  params = jax.eval_shape(
    functools.partial(qwen2.compute_params, config), state.params
  )
  params = placed(params, sharding.sampling_shardings(mesh, params))

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=sharding.replicated(mesh)
    )

  rows_per_call = sharding.slot_groups(mesh) * (sampler.GROUP_TOKENS // CHUNK)

  with jax.set_mesh(mesh):
    start = time.perf_counter()
    if 'update' in parts:
      compiled = step.lower(state, rows).compile()
      report(f'update of {args.rows} x {LENGTH} tokens', start, compiled)
    if 'sampler' not in parts:
      return
    start = time.perf_counter()
    compiled = decoding.decode_steps.lower(
      policy,
      mesh,
      params,
      cache,
      slots,
      array(jnp.int32, SLOTS, 6),
      array(jnp.bool_, config.embedding_rows),
      sampling.Settings(),
      array(jnp.int32),
    ).compile()
    report(f'decoding steps of {SLOTS} slots x {CACHE}', start, compiled)
    start = time.perf_counter()
    compiled = decoding.prefill_chunks.lower(
      policy,
      mesh,
      params,
      cache,
      array(jnp.int32, rows_per_call, CHUNK),
      *3 * [array(jnp.int32, rows_per_call)],
    ).compile()
    report(f'prefilling {rows_per_call} rows x {CHUNK}', start, compiled)


if __name__ == '__main__':
  main()
