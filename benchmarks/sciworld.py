"""Rollouts on the real ScienceWorld, calm and with workers killed.

  python benchmarks/sciworld.py [--tasks=16] [--group-size=8] [--kill-every-s=5]

Plays the quickstart's tasks with its nano policy twice: once calm, once with
one of the environment's worker processes ended by SIGKILL every few seconds.
Prints where the time of the slots went, and whether both gave the same.
"""

import argparse
import os
import signal
import sys
import threading
import time

import psutil

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configs import quickstart
from planpo_jax import build, capacity, evaluate, metrics, rollout, tasks
from planpo_jax import config as config_lib


def workers() -> list[psutil.Process]:
  """Worker processes of the service that this process started."""
  return [
    process
    for process in psutil.Process().children(recursive=True)
    if 'envs_server.child' in process.cmdline()
  ]


def kill_workers(every_s: float, over: threading.Event, killed: list) -> None:
  while not over.wait(every_s):
    alive = workers()
    if alive:
      alive[len(killed) % len(alive)].send_signal(signal.SIGKILL)
      killed.append(time.monotonic())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--tasks', type=int, default=16)
  parser.add_argument('--group-size', type=int, default=8)
  parser.add_argument('--kill-every-s', type=float, default=5.0)
  args = parser.parse_args()
  config = quickstart.get_config()
  network = build.network(config)
  mesh = build.mesh(config, network)
  config.sampler.slots = capacity.slots(config, network.policy, mesh)
  model = build.model(config, network, mesh)
  results = {}
  for name in ('calm', 'killed'):
    with build.Environment(config) as env:
      player = build.Player(config, model, mesh, env, metrics.Terminal())
      chosen = tasks.at(
        env.tasks('train'), 0, count=args.tasks, seed=config.seed
      )
      over, killed = threading.Event(), []
      killer = threading.Thread(
        target=kill_workers, args=(args.kill_every_s, over, killed)
      )
      if name == 'killed':
        killer.start()
      try:
        results[name] = collected = player.play(
          name,
          rollout.group_jobs(chosen, args.group_size),
          seed=(config.seed, evaluate.TRAIN_SEED, 0),
          max_turns=config.env.max_turns,
          settings=config_lib.settings(config.sampler),
        )
      finally:
        over.set()
    scalars = metrics.rollout_scalars(collected.episodes)
    scalars |= collected.stats.scalars()
    print(f'{name}: {len(collected.episodes)} episodes, {len(killed)} kills')
    for key, value in scalars.items():
      print(f'  {key.removeprefix("rollout/"):20s} {value:.4g}')
  same = results['calm'].episodes == results['killed'].episodes
  print(f'the episodes are {"the same" if same else "NOT the same"}')


if __name__ == '__main__':
  main()
