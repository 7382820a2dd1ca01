"""Sampling speed: milliseconds a step, beside torch with its usual sort.

  python benchmarks/sampling.py [--vocab=151936] [--repeats=9]

Both sides draw from the same logits, in turn, in one run; medians. Flat
logits keep tens of thousands of ids under top-p, peaked ones a few, as a
trained model does. Ours runs several steps in one compiled loop, as decoding
does.
"""

import argparse
import functools
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np
import torch

from planpo_jax import sampling

SETTINGS = {
  'greedy': {'temperature': 0.0},
  'plain': {},
  'min_p=0.05': {'min_p': 0.05},
  'top_k=50': {'top_k': 50},
  'top_p=0.9': {'top_p': 0.9},
  'top_k=500': {'top_k': 500},
  'all': {'top_k': 50, 'top_p': 0.9, 'min_p': 0.05},
}
STEPS = 4


@functools.partial(jax.jit, donate_argnums=0)
def _ours(logits_BV, uniform_B, settings):
  def step(_, carry):
    logits_BV, _, logp_B = carry
    # Ids of the next step hang on this one, so that no work is shared.
    logits_BV = logits_BV.at[0, 0].add(1e-6 * logp_B[0])
    return logits_BV, *sampling.sample(logits_BV, uniform_B, settings)

  rows = logits_BV.shape[0]
  start = logits_BV, jnp.zeros(rows, jnp.int32), jnp.zeros(rows)
  return jax.lax.fori_loop(0, STEPS, step, start)


@torch.inference_mode()
def _torch(logits_BV, values):
  temperature = values.get('temperature', 1.0)
  if temperature == 0:
    id_B = logits_BV.argmax(dim=-1, keepdim=True)
    return id_B, torch.log_softmax(logits_BV, dim=-1).gather(1, id_B)
  logits_BV = logits_BV / temperature
  if top_k := values.get('top_k'):
    kth_B1 = logits_BV.topk(top_k).values[:, -1:]
    logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
  if top_p := values.get('top_p'):
    sorted_BV, order_BV = logits_BV.sort(dim=-1)
    out_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    out_BV[:, -1] = False
    out_BV = out_BV.scatter(1, order_BV, out_BV)
    logits_BV = logits_BV.masked_fill(out_BV, -torch.inf)
  if min_p := values.get('min_p'):
    probs_BV = logits_BV.softmax(dim=-1)
    least_B1 = min_p * probs_BV.amax(dim=-1, keepdim=True)
    logits_BV = logits_BV.masked_fill(probs_BV < least_B1, -torch.inf)
  probs_BV = logits_BV.softmax(dim=-1)
  id_B = torch.multinomial(probs_BV, 1)
  return id_B, probs_BV.gather(1, id_B).log()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--vocab', type=int, default=151_936)
  parser.add_argument('--repeats', type=int, default=9)
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  print('rows logits settings      ours ms  torch ms')
  for rows in (1, 8, 32):
    flat = rng.normal(size=(rows, args.vocab)).astype(np.float32) * 2
    peaked = flat.copy()
    peaked[:, rng.permutation(args.vocab)[:20]] += np.linspace(0, 24, 20)
    uniform = rng.uniform(size=rows).astype(np.float32)
    for kind, logits in (('flat', flat), ('peaked', peaked)):
      theirs = torch.from_numpy(logits)
      for name, values in SETTINGS.items():
        settings = sampling.Settings(**values)
        ours = jnp.array(logits)
        ours = jax.block_until_ready(_ours(ours, uniform, settings))[0]
        times = [], []
        # Sorting large batches takes long: fewer runs tell as much.
        for _ in range(args.repeats if rows < 32 else args.repeats // 2 + 1):
          start = time.perf_counter()
          ours = jax.block_until_ready(_ours(ours, uniform, settings))[0]
          middle = time.perf_counter()
          _torch(theirs, values)
          times[0].append((middle - start) / STEPS * 1e3)
          times[1].append((time.perf_counter() - middle) * 1e3)
        medians = [statistics.median(side) for side in times]
        print(
          f'{rows:4d} {kind:6s} {name:12s} {medians[0]:8.2f} {medians[1]:9.2f}',
          flush=True,
        )


if __name__ == '__main__':
  main()
