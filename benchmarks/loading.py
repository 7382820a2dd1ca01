"""Peak host memory of reading a checkpoint, against what it must hold.

  python benchmarks/loading.py [--size=qwen2.5-1.5b]

Writes weights of that size in bfloat16 to a temporary folder, then
reads them in a process for each case. The rule is 1.1 x the params this
process holds plus the largest tensor; all is over what the process held
before.
"""

import argparse
import ctypes
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# Type of the params, layers stacked, devices.
CASES = (
  ('bfloat16', False, 1),
  ('float32', False, 1),
  ('bfloat16', True, 8),
  ('float32', True, 8),
)


def _memory(key: str) -> int:
  """Bytes, of a line of the process's status."""
  with open('/proc/self/status') as status:
    for line in status:
      if line.startswith(key):
        return int(line.split()[1]) * 1024
  raise KeyError(key)


def write(folder: str, size: str, num_layers: int | None) -> None:
  import jax
  import jax.numpy as jnp

  from planpo_jax import weights
  from planpo_jax.models import qwen2

  config = dataclasses.replace(
    qwen2.SIZES[size], param_dtype='bfloat16', scan_layers=True
  )
  if num_layers:
    config = dataclasses.replace(config, num_layers=num_layers)
  policy = qwen2.create(config, config.vocab_size)
  # Any numbers do; drawing random ones would take several times the memory.
  params = jax.tree.map(
    lambda x: jnp.full(x.shape, 0.5, x.dtype), qwen2.abstract_params(policy)
  )
  weights.save(folder, policy, params)


def measure(folders: list[str], dtype: str, stacked: bool) -> None:
  """Reads both folders; prints figures of the second."""
  import jax

  from planpo_jax import sharding, weights
  from planpo_jax.models import qwen2

  for folder in folders:
    config = dataclasses.replace(
      weights.read_config(folder), param_dtype=dtype, scan_layers=stacked
    )
    policy = qwen2.create(config, config.vocab_size)
    mesh = sharding.make_mesh(1, jax.device_count(), 1)
    places = sharding.param_shardings(mesh, qwen2.abstract_params(policy))
    # What the compiler took for the first folder is not the reader's.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _memory('VmRSS')
    params = weights.load(folder, policy, param_dtype=dtype, shardings=places)
    peak = _memory('VmHWM') - before
  share = sum(
    shard.data.nbytes
    for param in jax.tree.leaves(params)
    for shard in param.addressable_shards
  )
  largest = params['embedding_VD'].nbytes
  rule = 1.1 * share + largest
  print(
    f'{dtype:8s} {"stacked" if stacked else "unrolled":8s} '
    f'{jax.device_count()} device(s): peak {peak / 1e9:5.2f} GB, '
    f'params {share / 1e9:5.2f} GB, rule {rule / 1e9:5.2f} GB',
    flush=True,
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--size', default='qwen2.5-1.5b')
  parser.add_argument('--case', nargs=4, help=argparse.SUPPRESS)
  parser.add_argument('--write', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.write:
    folder, layers = args.write
    write(folder, args.size, int(layers))
    return
  if args.case:
    small, folder, dtype, stacked = args.case
    measure([small, folder], dtype, stacked == 'True')
    return
  with tempfile.TemporaryDirectory() as folder:
    small, whole = (os.path.join(folder, name) for name in ('small', 'whole'))

    def run(*more: str, devices: int = 1) -> None:
      subprocess.run(
        [sys.executable, __file__, f'--size={args.size}', *more],
        check=True,
        env=os.environ
        | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices)},
      )

    run('--write', small, '1')
    run('--write', whole, '0')
    for dtype, stacked, devices in CASES:
      run('--case', small, whole, dtype, str(stacked), devices=devices)


if __name__ == '__main__':
  main()
