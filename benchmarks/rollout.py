"""Rollout speed: this code against transformers and against lock-step.

  python benchmarks/rollout.py [--parts=speed,occupancy,overhead]
    [--shape=nano|qwen2.5-0.5b|both] [--conversations=16] [--turns=10]
    [--slots=16] [--repeats=3] [--latency-ms=1,20] [--episodes=48]

All in float32 on all cores, with the same random weights, conversations and
latencies on every side. A turn is a prompt of 100 tokens, chat pieces included,
and a response of exactly 40: nothing stops one earlier. Environments are
scripted; an answer takes a time drawn for its conversation and turn. Text is in
the shipped vocabulary, responses are drawn from all ids of the model. Needs
requirements-dev.txt (torch). Parts:

- speed: medians of repetitions in turn (A B C A B C ...), then the ratios.
  `planpo_jax` is `rollout.collect`. `lock-step, re-reading` uses its sampler in
  batches of as many conversations as there are slots: at each turn all wait for
  the slowest, and every slot reads its whole history again, all of them before
  the first token, so that they decode together. `transformers.generate` does
  the same with left-padded batches, in a process of its own; its prefilled
  tokens are counted without the padding.
- occupancy: nano; --episodes of 3 to 30 turns of 30 + 40 tokens, answers after
  1 to 200 ms, resets 300 ms. With 4 sessions more than slots, to reset ahead,
  and with as many; the longest episodes first, and in any order.
- overhead: nano, the conversations of `speed`, answers after 0 to 5 ms.

The defaults are sized for five minutes on 2 quiet cores; 64 conversations, 128
episodes tell more. At 0.5B they are 8 conversations, 8 slots and one
repetition, which takes minutes, most of them in re-reading.
"""

import argparse
import asyncio
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time

import jax
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import model
from planpo_jax import (
  chat,
  episodes,
  rollout,
  sampler,
  sampling,
  tokenizer,
  weights,
)
from planpo_jax.models import qwen2

NEW = 40  # Tokens of a response.
SEED = (0,)
TOK = tokenizer.load('nano')
IDS = {'nano': TOK.num_tokens, model.SIZE: model.IDS}
SIZES = ('conversations', 'slots', 'repeats')
DEFAULTS = {'nano': (16, 16, 3), model.SIZE: (8, 8, 1)}
PARTS = ('speed', 'occupancy', 'overhead')


@dataclasses.dataclass(frozen=True)
class Work:
  """What is played, the same on every side.

  Attributes:
    conversations: how many.
    turns: fewest and most of a conversation.
    prompt: tokens put before each response.
    slots: conversations at a time.
    latency_ms: least and most of an environment's step.
    reset_ms: of an environment's reset.
  """

  conversations: int
  turns: tuple[int, int]
  prompt: int
  slots: int
  latency_ms: tuple[float, float]
  reset_ms: float = 0.0

  @property
  def positions(self) -> int:
    return self.turns[1] * (self.prompt + NEW) + 1

  @property
  def jobs(self) -> list[rollout.Job]:
    return [
      (episodes.Task('scripted', 'train', i, 'talk'), 0)
      for i in range(self.conversations)
    ]

  @property
  def format(self) -> chat.Format:
    return chat.Format(TOK, 'conversation', 'brief', '', 0, self.positions, NEW)


@dataclasses.dataclass(frozen=True)
class Played:
  """Seconds, context tokens read, and ids by conversation and turn."""

  seconds: float
  prefilled: int
  responses: list[tuple[int, ...]]
  stats: rollout.Stats | None = None

  @property
  def tokens(self) -> int:
    return sum(len(ids) for ids in self.responses)


class Client:
  """Environments that answer a text of one length in tokens, after a while."""

  def __init__(self, work: Work):
    rng = np.random.default_rng(0)
    low, high = work.turns
    self.reset_s = work.reset_ms / 1e3
    self.turns = rng.integers(low, high, work.conversations, endpoint=True)
    latency_ms = rng.uniform(*work.latency_ms, (work.conversations, high))
    self.latency_s = latency_ms / 1e3
    talk = work.format.begin('')
    self.first = _text(talk, work.prompt)
    talk.respond((), (0,) * NEW, '', '')
    self.later = _text(talk, work.prompt)

  def session(self, task, *, step_limit, admissible=False):
    return Session(self, task.index)


@dataclasses.dataclass
class Session:
  """One environment, at `turn` of conversation `index`."""

  client: Client
  index: int
  turn: int = 0
  faults: int = 0

  async def reset(self):
    await asyncio.sleep(self.client.reset_s)
    return episodes.Observation(self.client.first)

  async def step(self, action):
    await asyncio.sleep(self.client.latency_s[self.index, self.turn])
    self.turn += 1
    over = self.turn == self.client.turns[self.index]
    ending = episodes.Ending.TERMINATED if over else None
    return episodes.Observation(self.client.later, ending=ending)

  async def close(self):
    pass


def _text(talk: chat.Chat, length: int) -> str:
  """Makes the next prompt of `talk` so many tokens long."""
  text = 'You see'
  while (found := len(talk.prompt(text)[1])) < length:
    text += ' a'
  if found > length:
    raise ValueError(f'no prompt has {length} tokens: the least is {found}.')
  return text


async def lock_step(client: Client, work: Work, respond):
  """Plays batch after batch; every turn waits for the slowest of its batch.

  Args:
    client: of the environments.
    work: what to play; all conversations have the same number of turns.
    respond: from whole contexts and keys to the ids of the responses.

  Returns:
    The responses, and how many tokens the contexts had in all.
  """
  fmt, jobs, responses, read = work.format, work.jobs, [], 0
  for first in range(0, len(jobs), work.slots):
    batch = jobs[first : first + work.slots]
    sessions = [client.session(task, step_limit=0) for task, _ in batch]
    seen = await asyncio.gather(*(session.reset() for session in sessions))
    talks = [fmt.begin(observation.goal) for observation in seen]
    made = [[] for _ in batch]
    while seen[0].ending is None:
      contexts = [t.prompt(o.text)[0] for t, o in zip(talks, seen, strict=True)]
      read += sum(len(context) for context in contexts)
      keys = [rollout.turn_key(SEED, *job, len(made[0])) for job in batch]
      actions = []
      for i, ids in enumerate(respond(contexts, keys)):
        made[i].append(tuple(ids.tolist()))
        actions.append(fmt.parse(ids, True)[1].text)
        talks[i].respond(contexts[i], made[i][-1], seen[i].text, actions[i])
      seen = await asyncio.gather(
        *(s.step(action) for s, action in zip(sessions, actions, strict=True))
      )
    responses += itertools.chain(*made)
  return responses, read


class Ours:
  """This code: both ways to use its sampler."""

  name = 'planpo_jax'

  def __init__(self, folder, dtype):
    config = dataclasses.replace(
      weights.read_config(folder), dtype=dtype, param_dtype=dtype
    )
    config = qwen2.for_platform(config, jax.default_backend())
    self._policy = qwen2.create(config, IDS[os.path.basename(folder)])
    self._params = weights.load(folder, self._policy, param_dtype=dtype)
    self._sampler = None

  def warm_up(self, work):
    self._sampler = None  # Its memory goes before the next is made.
    self._sampler = one = sampler.Sampler(
      self._policy,
      self._params,
      slots=work.slots,
      cache_len=work.positions,
      max_new_tokens=NEW,
      settings=sampling.Settings(),
      stop_ids=(),
    )
    for chunk in sampler.PREFILL_CHUNKS:
      if chunk + 1 < work.positions:
        one.reset(0)
        one.submit(0, [0] * (chunk + 1), np.zeros(2, np.uint32), 2)
        one.decode()
    one.reset(0)

  def collect(self, work, sessions=0, longest_first=False):
    client = Client(work)
    start = time.perf_counter()
    collected = asyncio.run(
      rollout.collect(
        client,
        self._sampler,
        work.format,
        work.jobs,
        seed=SEED,
        max_turns=work.turns[1],
        sessions=sessions,
        expected=lambda t: float(longest_first and client.turns[t.index]),
      )
    )
    return Played(
      time.perf_counter() - start,
      collected.stats.prefilled_tokens,
      [t.response_ids for e in collected.episodes for t in e.turns],
      collected.stats,
    )

  def lock_step(self, work):
    one = self._sampler

    def respond(contexts, keys):
      for slot, (context, key) in enumerate(zip(contexts, keys, strict=True)):
        one.reset(slot)
        one.submit(slot, context, key)
      # Starting some rows of a batch early would only add steps.
      one.prefill()
      found = {}
      while one.active:
        found |= {r.slot: r.ids for r in one.decode()}
      return [found[slot] for slot in range(len(contexts))]

    client = Client(work)
    read = one.counters.prefilled_tokens
    start = time.perf_counter()
    responses, _ = asyncio.run(lock_step(client, work, respond))
    spent = time.perf_counter() - start
    return Played(spent, one.counters.prefilled_tokens - read, responses)


class Torch(model.Torch):
  """transformers on torch."""

  def warm_up(self, work):
    self._generate([[0] * work.prompt] * work.slots, ())

  def lock_step(self, work):
    import torch

    torch.manual_seed(0)
    client = Client(work)
    start = time.perf_counter()
    responses, read = asyncio.run(lock_step(client, work, self._generate))
    return Played(time.perf_counter() - start, read, responses)

  def _generate(self, contexts, keys):
    import torch

    width = max(len(context) for context in contexts)
    ids = torch.zeros((len(contexts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, context in enumerate(contexts):
      ids[i, width - len(context) :] = torch.tensor(context)
      mask[i, width - len(context) :] = 1
    with torch.inference_mode():
      whole = self.model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        use_cache=True,
        pad_token_id=0,
      )
    return whole[:, width:].numpy()


def describe(shape, work, repeats):
  print(
    f'{shape} float32: {work.conversations} conversations of '
    f'{"-".join(map(str, sorted(set(work.turns))))} turns, '
    f'{work.prompt} + {NEW} tokens a turn, {work.slots} slots, environments '
    f'{work.latency_ms[0]:g}-{work.latency_ms[1]:g} ms, resets '
    f'{work.reset_ms:g} ms, repetitions {repeats}',
    flush=True,
  )


def speed(ours, theirs, work, repeats):
  sides = {
    'planpo_jax': (ours, 'collect'),
    'lock-step, re-reading': (ours, 'lock_step'),
    'transformers.generate': (theirs, 'lock_step'),
  }
  runs = {name: [] for name in sides}
  for side in (ours, theirs):
    side.ask('warm_up', work)
  for _ in range(repeats):
    for name, (side, part) in sides.items():
      runs[name].append(side.ask(part, work))
  medians = {}
  for name, played in runs.items():
    medians[name] = statistics.median(p.seconds for p in played)
    made, expected = played[0].tokens, work.conversations * work.turns[1] * NEW
    if made != expected:
      raise RuntimeError(f'{name} sampled {made} tokens instead of {expected}.')
    print(
      f'{name:22s} {medians[name]:8.2f} s  '
      f'{work.conversations / medians[name]:7.3f} episodes/s  '
      f'{made / medians[name]:7.1f} tokens/s  '
      f'{played[0].prefilled:7d} tokens prefilled'
    )
  kept, locked, generated = medians.values()
  both = (runs[name][0].responses for name in list(sides)[:2])
  same = statistics.mean(a == b for a, b in zip(*both, strict=True))
  print(
    f'ahead of (a) transformers.generate {generated / kept:5.2f} x, '
    f'of (b) lock-step, re-reading {locked / kept:5.2f} x   '
    f'[{same:.1%} of the responses of (b) are the same]',
    flush=True,
  )


def show(label, stats):
  print(
    f'{label}  occupancy {stats.occupancy:.1%} (decode '
    f'{stats.decode_share:.1%}, prefill {stats.prefill_share:.1%}, environment '
    f'{stats.env_wait_share:.1%})  batch fill {stats.batch_fill:.1%}  '
    f'wall {stats.wall_s:.1f} s  tail {stats.tail_s:.1f} s  '
    f'{stats.tokens_per_s:.0f} tokens/s  overhead {stats.overhead_share:.2%}',
    flush=True,
  )


def occupancy(ours, work):
  ours.ask('warm_up', work)
  for sessions in (work.slots + 4, work.slots):
    for longest_first in (True, False):
      order = 'longest first' if longest_first else 'any order    '
      played = ours.ask('collect', work, sessions, longest_first)
      show(f'{sessions} sessions, {order}', played.stats)


def overhead(ours, work, repeats):
  ours.ask('warm_up', work)
  found = [ours.ask('collect', work).stats for _ in range(repeats)]
  found.sort(key=lambda stats: stats.overhead_share)
  show('median of overhead', found[len(found) // 2])


def save(folder, shape):
  policy = qwen2.create(qwen2.SIZES[shape], IDS[shape])
  init = jax.jit(qwen2.init_params, static_argnums=0)
  params = init(policy, jax.random.key(0))
  weights.save(f'{folder}/{shape}', policy, params, dtype='float32')
  return f'{folder}/{shape}'


def pair(text):
  low, high = map(float, text.split(','))
  return low, high


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--parts', default=','.join(PARTS))
  parser.add_argument('--shape', default='nano', choices=[*DEFAULTS, 'both'])
  for flag in SIZES:
    parser.add_argument(f'--{flag}', type=int)
  parser.add_argument('--turns', type=int, default=10)
  parser.add_argument('--latency-ms', type=pair, default=(1, 20))
  parser.add_argument('--episodes', type=int, default=48)
  args = parser.parse_args()
  parts = args.parts.split(',')
  for part in parts:
    if part not in PARTS:
      parser.error(f'--parts: {part!r} is none of {", ".join(PARTS)}')
  for shape in DEFAULTS:
    here = parts if shape == 'nano' else ['speed']
    if args.shape not in (shape, 'both'):
      here = [part for part in here if part != 'speed']
    if set(here) & set(parts):
      measure(shape, here, args)


def measure(shape, parts, args):
  conversations, slots, repeats = (
    getattr(args, flag) or default
    for flag, default in zip(SIZES, DEFAULTS[shape], strict=True)
  )
  turns = (args.turns, args.turns)
  talks = Work(conversations, turns, 100, slots, args.latency_ms)
  with tempfile.TemporaryDirectory() as folder:
    path = save(folder, shape)
    sides = [model.Side(Ours, path, 'float32')]
    try:
      if 'speed' in parts:
        sides.append(model.Side(Torch, path, 'float32'))
        describe(shape, talks, repeats)
        speed(*sides, talks, repeats)
        sides.pop().close()
      if 'occupancy' in parts:
        work = Work(args.episodes, (3, 30), 30, slots, (1, 200), 300)
        describe(shape, work, 1)
        occupancy(sides[0], work)
      if 'overhead' in parts:
        work = dataclasses.replace(talks, latency_ms=(0, 5))
        describe(shape, work, repeats)
        overhead(sides[0], work, repeats)
    finally:
      for side in sides:
        side.close()


if __name__ == '__main__':
  main()
