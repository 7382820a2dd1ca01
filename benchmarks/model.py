"""The network at Qwen2.5-0.5B shape: this code against transformers on a CPU.

  python benchmarks/model.py [--dtypes=float32,bfloat16] [--repeats=3]
    [--parts=prefill,decode,train,products,bandwidth,memory,start]
    [--batches=1,8,32]

Both sides run in one call, each in a process of its own, on the same random
weights, in turn (A B A B ...); medians are printed, then the ratio. Needs
requirements-dev.txt (torch). Parts:

- prefill: 8 x 512 tokens into a cache, logits of the last position.
- decode: 64 tokens after a context of 65, sampled at temperature 1.
- train: forward and backward of the clipped objective on 4 x 512 tokens, all
  of them response; nothing is recomputed but the head's logits.
- products: bare matrix products at the shapes of prefill and training.
- bandwidth: what one step of decoding at batch 1 must read, against what the
  machine reads; printed after that part.
- memory: of the update on 8,192 tokens, from the compiler.
- start: from a started process to its first sampled token, twice.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SIZE = 'qwen2.5-0.5b'
IDS = 151665
CONTEXT, NEW = 65, 64
PREFILL, TRAIN = (8, 512), (4, 512)
CLIP = 0.2
# Outputs and inputs of the products of a layer.
SHAPES = ((4864, 896), (896, 4864), (896, 896))


class Jax:
  """This code."""

  name = 'planpo_jax'

  def __init__(self, folder, dtype):
    import jax

    from planpo_jax import weights
    from planpo_jax.models import qwen2

    config = dataclasses.replace(
      weights.read_config(folder), dtype=dtype, param_dtype=dtype
    )
    config = qwen2.for_platform(config, jax.default_backend())
    self.policy = qwen2.create(config, IDS)
    self.params = weights.load(folder, self.policy, param_dtype=dtype)
    self._made = {}

  def _once(self, key, make):
    if key not in self._made:
      self._made.clear()  # Of the part before, with its memory.
      self._made[key] = make()
    return self._made[key]

  def prefill(self):
    import jax
    import jax.numpy as jnp

    rows, length = PREFILL
    chunk = 64

    def make():
      def extend(params, cache, tokens, start):
        hidden, cache = self.policy.extend(
          params, cache, tokens, start, jnp.full(rows, chunk, jnp.int32)
        )
        return self.policy.logits(params, hidden[:, -1]), cache

      return jax.jit(extend, donate_argnums=1), [
        self.policy.init_cache(rows, length)
      ]

    extend, held = self._once('prefill', make)
    tokens = token_ids(rows, length)
    cache = held.pop()
    start = time.perf_counter()
    for first in range(0, length, chunk):
      logits, cache = extend(
        self.params,
        cache,
        tokens[:, first : first + chunk],
        jnp.full(rows, first, jnp.int32),
      )
    logits.block_until_ready()
    spent = time.perf_counter() - start
    held.append(cache)
    return spent, float(jnp.mean(jnp.abs(logits[:, :IDS])))

  def decode(self, batch):
    import jax

    from planpo_jax import sampler, sampling

    one = self._once(
      ('decode', batch),
      lambda: sampler.Sampler(
        self.policy,
        self.params,
        slots=batch,
        cache_len=CONTEXT + NEW + 1,
        max_new_tokens=NEW,
        settings=sampling.Settings(),
        stop_ids=(),
      ),
    )
    context = token_ids(1, CONTEXT)[0]
    for slot in range(batch):
      one.submit(slot, context, jax.random.key(slot))
    one.prefill()
    start = time.perf_counter()
    responses = one.decode()
    spent = (time.perf_counter() - start) / NEW
    if len(responses) != batch:
      raise RuntimeError(f'{len(responses)} of {batch} rows reached {NEW}.')
    return spent, statistics.mean(float(r.logps.mean()) for r in responses)

  def train(self):
    import jax
    import jax.numpy as jnp

    from planpo_jax import batch, losses
    from planpo_jax.models import qwen2

    rows, length = TRAIN
    tokens = token_ids(rows, length)
    old, adv = old_logps()
    mask = jnp.broadcast_to(jnp.arange(length) > 0, tokens.shape)
    block = batch.Batch(
      tokens_BT=tokens,
      positions_BT=jnp.broadcast_to(jnp.arange(length), tokens.shape),
      segment_ids_BT=jnp.ones_like(tokens),
      loss_mask_BT=mask,
      turn_BT=mask.astype(jnp.int32),
      flat_BT=jnp.where(mask, jnp.arange(tokens.size).reshape(tokens.shape), 0),
      adv_BT=jnp.asarray(adv),
      sampler_logp_BT=jnp.asarray(old),
      old_logp_BT=jnp.asarray(old),
      ref_logp_BT=jnp.asarray(old),
    )
    loss_fn = losses.get('ppo_clip', kl_coef=0.0, entropy_coef=0.0)

    def objective(params, block):
      logp, entropy = qwen2.token_logps(
        self.policy,
        params,
        block.tokens_BT,
        block.positions_BT,
        block.segment_ids_BT,
        1.0,
      )
      loss, _ = loss_fn(
        logp, block, entropy_BT=entropy, denominator=rows * (length - 1.0)
      )
      return loss

    step = self._once('train', lambda: jax.jit(jax.value_and_grad(objective)))
    start = time.perf_counter()
    loss, grads = jax.block_until_ready(step(self.params, block))
    spent = time.perf_counter() - start
    del grads
    return spent, float(loss)

  def products(self, rows, outputs, inputs, kind):
    import jax
    import jax.numpy as jnp

    from planpo_jax.models import linear

    dtype = self.policy.config.dtype
    x = jnp.ones((rows, inputs), dtype)
    w = jnp.ones((outputs, inputs), dtype)

    def forward(x, w):
      return linear.linear(x, w, 1, dtype=dtype, on_cpu=True)

    def make():
      if kind == 'forward':
        return jax.jit(forward)
      dy = jnp.ones((rows, outputs), dtype)
      which = 0 if kind == 'dx' else 1
      return jax.jit(lambda x, w: jax.vjp(forward, x, w)[1](dy)[which])

    product = self._once((rows, outputs, inputs, kind), make)
    return timed(lambda: product(x, w).block_until_ready())


class Torch:
  """transformers on torch."""

  name = 'transformers'

  def __init__(self, folder, dtype):
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    self.dtype = getattr(torch, dtype)
    self.model = transformers.Qwen2ForCausalLM.from_pretrained(
      folder, dtype=self.dtype
    )

  def prefill(self):
    import torch

    tokens = torch.from_numpy(token_ids(*PREFILL)).long()
    start = time.perf_counter()
    with torch.inference_mode():
      logits = self.model(tokens, use_cache=True, logits_to_keep=1).logits
    spent = time.perf_counter() - start
    return spent, float(logits[:, 0, :IDS].float().abs().mean())

  def decode(self, batch):
    import torch

    torch.manual_seed(0)
    context = torch.from_numpy(token_ids(1, CONTEXT)).long().repeat(batch, 1)
    logps = []
    with torch.inference_mode():
      found = self.model(context[:, :-1], use_cache=True, logits_to_keep=1)
      token, cache = context[:, -1:], found.past_key_values
      start = time.perf_counter()
      for _ in range(NEW):
        found = self.model(token, past_key_values=cache, use_cache=True)
        logits = found.logits[:, -1, :IDS].float()
        token = torch.multinomial(torch.softmax(logits, dim=-1), 1)
        logps.append((logits, token))
      spent = (time.perf_counter() - start) / NEW
      mean = statistics.mean(
        float(logits.log_softmax(-1).gather(1, token).mean())
        for logits, token in logps
      )
    return spent, mean

  def train(self):
    import torch

    tokens = torch.from_numpy(token_ids(*TRAIN)).long()
    old, adv = (torch.from_numpy(x[:, 1:].copy()) for x in old_logps())
    self.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    logits = self.model(tokens, use_cache=False).logits[:, :-1].float()
    logp = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    ratio = (logp - old).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * adv, bounded * adv).mean()
    loss.backward()
    spent = time.perf_counter() - start
    self.model.zero_grad(set_to_none=True)
    return spent, float(loss.detach())

  def products(self, rows, outputs, inputs, kind):
    import torch

    x = torch.ones((rows, inputs), dtype=self.dtype)
    w = torch.ones((outputs, inputs), dtype=self.dtype)
    dy = torch.ones((rows, outputs), dtype=self.dtype)
    product = {
      'forward': lambda: x @ w.T,
      'dx': lambda: dy @ w,
      'dw': lambda: dy.T @ x,
    }[kind]
    with torch.inference_mode():
      return timed(product)


def timed(call):
  call()
  times = []
  for _ in range(3):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return min(times), 0.0


def token_ids(rows, length):
  import numpy as np

  rng = np.random.default_rng(0)
  return rng.integers(0, IDS, (rows, length)).astype(np.int32)


def old_logps():
  """Old log-probabilities near those of random weights, and advantages."""
  import numpy as np

  rng = np.random.default_rng(1)
  old = rng.normal(-12, 0.1, TRAIN).astype(np.float32)
  return old, rng.normal(size=TRAIN).astype(np.float32)


def _serve(side, folder, dtype, pipe):
  made = side(folder, dtype)
  pipe.send('ready')
  while (order := pipe.recv()) is not None:
    part, args = order
    pipe.send(getattr(made, part)(*args))


class Side:
  """A side in its own process: their threads and memory stay apart."""

  def __init__(self, kind, folder, dtype):
    self.name = kind.name
    context = multiprocessing.get_context('spawn')
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(
      target=_serve, args=(kind, folder, dtype, theirs)
    )
    self._process.start()
    theirs.close()
    self._pipe.recv()

  def ask(self, part, *args):
    self._pipe.send((part, args))
    return self._pipe.recv()

  def close(self):
    self._pipe.send(None)
    self._process.join()


def compare(sides, repeats, part, *args):
  """Median seconds of each side; both report a number that must agree."""
  times = {side.name: [] for side in sides}
  values = {}
  for side in sides:
    if side.name == Jax.name:
      side.ask(part, *args)  # Compiles.
  for _ in range(repeats):
    for side in sides:
      spent, values[side.name] = side.ask(part, *args)
      times[side.name].append(spent)
  return {n: statistics.median(t) for n, t in times.items()}, values


def line(label, times, values, unit, scale, digits=1):
  ours, theirs = (times[kind.name] for kind in (Jax, Torch))
  print(
    f'{label:28s} {Jax.name} {ours * scale:8.{digits}f} {unit}  '
    f'{Torch.name} {theirs * scale:8.{digits}f} {unit}  '
    f'ahead {theirs / ours:5.2f} x   '
    f'[{values[Jax.name]:.4f} {values[Torch.name]:.4f}]',
    flush=True,
  )


def compare_sides(folder, dtype, parts, batches, repeats):
  sides = [Side(kind, folder, dtype) for kind in (Jax, Torch)]
  try:
    if 'decode' in parts:
      for batch in batches:
        times, values = compare(sides, repeats, 'decode', batch)
        line(f'{dtype} decode batch {batch}', times, values, 'ms/step', 1e3)
        if batch == 1 and 'bandwidth' in parts:
          bandwidth(folder, dtype, times[Jax.name])
    if 'prefill' in parts:
      times, values = compare(sides, repeats, 'prefill')
      line(f'{dtype} prefill 8 x 512', times, values, 's', 1, 2)
    if 'train' in parts:
      times, values = compare(sides, repeats, 'train')
      line(f'{dtype} train 4 x 512', times, values, 's', 1, 2)
    if 'products' in parts:
      rows = TRAIN[0] * TRAIN[1]
      for outputs, inputs in SHAPES:
        for kind in ('forward', 'dx', 'dw'):
          times, _ = compare(
            sides, repeats, 'products', rows, outputs, inputs, kind
          )
          rates = {
            n: 2e-9 * rows * outputs * inputs / t for n, t in times.items()
          }
          print(
            f'{dtype} product {rows} x {inputs} to {outputs}, {kind:7s}  '
            + '  '.join(f'{n} {r:6.0f} GF/s' for n, r in rates.items()),
            flush=True,
          )
  finally:
    for side in sides:
      side.close()


def _read(array, threads):
  """Bytes a second at which so many threads read an array."""
  import concurrent.futures

  import numpy as np

  parts = np.array_split(array, threads)
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    best = 0.0
    for _ in range(7):
      start = time.perf_counter()
      list(pool.map(np.max, parts))
      best = max(best, array.nbytes / (time.perf_counter() - start))
  return best


def bandwidth(folder, dtype, step_s):
  import numpy as np

  from planpo_jax import weights
  from planpo_jax.models import qwen2

  policy = qwen2.create(weights.read_config(folder), IDS)
  size = sum(
    np.prod(shape) for shape in weights.tensor_shapes(policy).values()
  ) * (4 if dtype == 'float32' else 2)
  # Much larger than any cache; its maximum is taken in vector registers.
  machine = _read(np.ones(2**29, np.float32), os.cpu_count())
  print(
    f'{dtype} weights {size / 1e9:.2f} GB a step: {size / step_s / 1e9:.1f} '
    f'GB/s of the {machine / 1e9:.1f} GB/s that {os.cpu_count()} threads read '
    f'({size / step_s / machine:.0%})',
    flush=True,
  )


def memory():
  """Temporaries of one update on 8,192 tokens, as the compiler plans them."""
  import jax
  import jax.numpy as jnp

  from planpo_jax import batch, losses, optimizer, update
  from planpo_jax.models import qwen2

  rows, length = 2, 4096
  optim = optimizer.make(1e-6)
  block = batch.shapes(rows, length)

  def measure(label, head_chunk, **changes):
    config = dataclasses.replace(qwen2.SIZES[SIZE], dtype='bfloat16', **changes)
    policy = qwen2.create(config, IDS)

    def whole_logits(params, tokens, positions, segments):
      hidden = policy.hidden(params, tokens, positions, segments)
      logps = jax.nn.log_softmax(policy.logits(params, hidden))
      logp = jnp.take_along_axis(logps, tokens[..., None], -1)[..., 0]
      return logp, -jnp.sum(jnp.exp(logps) * logps, axis=-1)

    chunked = functools.partial(
      qwen2.token_logps, policy, temperature=1.0, head_chunk=head_chunk
    )
    state = jax.eval_shape(
      lambda key: update.create(qwen2.init_params(policy, key), optim),
      jax.random.key(0),
    )
    step = update.make_update(
      chunked if head_chunk else whole_logits,
      losses.get('ppo_clip'),
      optim,
      micro_rows=rows,
    )
    found = step.lower(state, block).compile().memory_analysis()
    print(
      f'update of 8,192 tokens, {label:44s} '
      f'{found.temp_size_in_bytes / 2**30:6.2f} GiB of temporaries beside '
      f'{found.argument_size_in_bytes / 2**30:.2f} of params and moments',
      flush=True,
    )

  scanned = {'scan_layers': True}
  measure('chunked head, layers recomputed', 128, remat=True, **scanned)
  measure('chunked head, layers kept', 128, **scanned)
  measure('whole logits, layers recomputed', 0, remat=True, **scanned)
  measure('whole logits, layers kept', 0, **scanned)


_START = """
import os, sys, time
started = float(sys.argv[2])
import jax
os.environ['HOME'] = sys.argv[3]
sys.path.insert(0, os.getcwd())
from benchmarks import model
from planpo_jax import cli
cli.keep_compilations()
import numpy as np
from planpo_jax import sampler, sampling
side = model.Jax(sys.argv[1], 'float32')
ready = time.time()
one = sampler.Sampler(
  side.policy, side.params, slots=8, cache_len=512, max_new_tokens=64,
  settings=sampling.Settings(), stop_ids=())
one.submit(0, np.arange(model.CONTEXT), jax.random.key(0))
one.prefill()
prefilled = time.time()
one.decode(max_steps=1)
end = time.time()
print(f'{ready - started:.1f} {prefilled - ready:.1f} {end - prefilled:.1f} '
      f'{end - started:.1f}')
"""


def start(folder):
  """Time to the first token, without and with a filled compilation cache."""
  compiling, totals = [], []
  with tempfile.TemporaryDirectory() as cache:
    for label in ('first start', 'second start'):
      done = subprocess.run(
        [sys.executable, '-c', _START, folder, str(time.time()), cache],
        cwd=pathlib.Path(__file__).parents[1],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={
          k: v for k, v in os.environ.items() if 'COMPILATION_CACHE' not in k
        },
      )
      loaded, prefill, step, total = done.stdout.split()
      compiling.append(float(prefill) + float(step))
      totals.append(float(total))
      print(
        f'{label}: imports and weights {loaded} s, prefill {prefill} s, '
        f'first step {step} s; first token after {total} s',
        flush=True,
      )
  print(
    f'second start: {compiling[1] / compiling[0]:.2f} of the first after the '
    f'weights are there, {totals[1] / totals[0]:.2f} of it in all'
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--dtypes', default='float32,bfloat16')
  parser.add_argument(
    '--parts', default='decode,bandwidth,prefill,train,products,memory,start'
  )
  parser.add_argument('--batches', default='1,8,32')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  parts = args.parts.split(',')
  known = {
    'parts': 'decode bandwidth prefill train products memory start'.split(),
    'dtypes': ['float32', 'bfloat16'],
  }
  for flag, names in known.items():
    for name in getattr(args, flag).split(','):
      if name not in names:
        parser.error(f'--{flag}: {name!r} is none of {", ".join(names)}')
  import jax

  from planpo_jax import weights
  from planpo_jax.models import qwen2

  with tempfile.TemporaryDirectory() as folder:
    if set(parts) - {'memory'}:
      policy = qwen2.create(qwen2.SIZES[SIZE], IDS)
      init = jax.jit(qwen2.init_params, static_argnums=0)
      weights.save(
        folder + '/model',
        policy,
        init(policy, jax.random.key(0)),
        dtype='float32',
      )
    compared = set(parts) & {'prefill', 'decode', 'train', 'products'}
    for dtype in args.dtypes.split(',') if compared else ():
      compare_sides(
        folder + '/model',
        dtype,
        parts,
        [int(b) for b in args.batches.split(',')],
        args.repeats,
      )
    if 'memory' in parts:
      memory()
    if 'start' in parts:
      start(folder + '/model')


if __name__ == '__main__':
  main()
