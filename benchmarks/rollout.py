"""Rollout speed: kept caches against re-reading the history every turn.

  python benchmarks/rollout.py [--episodes=64] [--repeats=3]

Both sides play the same toy episodes with the same nano policy and the same
random keys, in turn, in one run; the medians and their ratio are printed.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configs import quickstart
from planpo_jax import build, evaluate, rollout, sampler


class Rereading(sampler.Sampler):
  """Forgets a slot before each response, as stateless servers do."""

  def submit(self, slot, context_ids, key, max_new_tokens=None):
    self.reset(slot)
    super().submit(slot, context_ids, key, max_new_tokens)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--episodes', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  config = quickstart.get_config('smoke')
  config.chat.max_context = 1024
  config.chat.max_response = 40
  config.env.max_turns = 10
  config.sampler.slots = 16
  config.env.workers = 16
  network = build.network(config)
  model = build.model(config, network, build.mesh(config, network))
  with build.Environment(config) as env:
    jobs = evaluate.jobs(env.tasks('train'), args.episodes)
    fmt = build.chat_format(config, model.tokenizer, env.description)
    sides = {
      name: kind(
        model.policy,
        model.params,
        slots=config.sampler.slots,
        cache_len=config.chat.max_context,
        max_new_tokens=config.chat.max_response,
        temperature=1.0,
        stop_ids=model.tokenizer.stop_ids,
      )
      for name, kind in (
        ('kept caches', sampler.Sampler),
        ('re-reading', Rereading),
      )
    }

    def play(side: sampler.Sampler) -> tuple[float, int, int]:
      start = time.perf_counter()
      tokens, read = side.decoded_tokens, side.prefilled_tokens
      env.run(
        rollout.collect(
          env.client,
          side,
          fmt,
          jobs,
          seed=(0,),
          max_turns=config.env.max_turns,
        )
      )
      return (
        time.perf_counter() - start,
        side.decoded_tokens - tokens,
        side.prefilled_tokens - read,
      )

    runs = {name: [] for name in sides}
    for side in sides.values():
      play(side)  # Compiles.
    for _ in range(args.repeats):
      for name, side in sides.items():
        runs[name].append(play(side))
  medians = {}
  for name, results in runs.items():
    medians[name] = statistics.median(r[0] for r in results)
    _, decoded, prefilled = results[0]
    print(
      f'{name:12s} {medians[name]:6.2f} s  '
      f'{args.episodes / medians[name]:6.1f} episodes/s  '
      f'{decoded} tokens sampled  {prefilled} tokens prefilled'
    )
  print(f'ratio {medians["re-reading"] / medians["kept caches"]:.2f}')


if __name__ == '__main__':
  main()
