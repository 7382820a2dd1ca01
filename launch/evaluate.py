"""Evaluates a policy on a split.

  python launch/evaluate.py --workdir=runs/quickstart --split=test
  python launch/evaluate.py --config=configs/quickstart.py --split=dev

With --workdir: the newest checkpoint of that run, under its own configuration,
on whatever devices there are. With --config: the weights that training would
start from.
"""

import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import ml_collections
from absl import flags

from configs import base
from planpo_jax import cli
from planpo_jax import config as config_lib

_CONFIG = cli.define_config(required=False)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a training run.')
_SPLIT = flags.DEFINE_string('split', None, 'Default: config.eval_split.')
_EPISODES = flags.DEFINE_integer(
  'episodes', None, 'Default: config.eval.episodes.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the table.')


def _config(workdir) -> ml_collections.ConfigDict:
  if (workdir is None) == (_CONFIG.value is None):
    raise ValueError('give either --workdir=DIR of a run or --config=FILE.')
  if workdir is None:
    return _CONFIG.value
  path = workdir / 'config.json'
  if not path.is_file():
    raise FileNotFoundError(
      f'{workdir} holds no run: there is no config.json. Give the folder that '
      'launch/train.py was given as --workdir.'
    )
  config = base.get_config()
  with config.unlocked():  # An older run lacks some keys, and may have others.
    config.update(config_lib.read(path))
  # What does not fit one device is kept split as far as these devices go.
  tensor = math.gcd(max(config.mesh.tensor, 1), jax.device_count())
  config.mesh.update({'data': 1, 'fsdp': -1, 'tensor': tensor})
  # Rows of an update, of which an evaluation has none.
  config.learner.micro_rows = jax.device_count()
  if (config.sampler.slots or 0) % (jax.device_count() // tensor):
    config.sampler.slots = None  # Of a mesh that divided otherwise.
  return config


def main() -> int:
  import pathlib

  from planpo_jax import (
    build,
    capacity,
    checkpoint,
    evaluate,
    metrics,
    sharding,
  )
  from planpo_jax.models import qwen2

  workdir = None
  if _WORKDIR.value:
    workdir = pathlib.Path(_WORKDIR.value).expanduser().absolute()
  config = _config(workdir)
  config_lib.check(config, jax.device_count())
  if _OUTPUT.value and not pathlib.Path(_OUTPUT.value).parent.is_dir():
    raise FileNotFoundError(
      f'--output={_OUTPUT.value}: there is no folder to write it to.'
    )
  split = _SPLIT.value or config.env.eval_split
  count = _EPISODES.value or config.eval.episodes
  terminal = metrics.Terminal()

  stacked = None
  if workdir is not None:
    stacked = checkpoint.stacked_layers(workdir / 'checkpoints')
    if stacked is None:
      raise FileNotFoundError(
        f'{workdir} holds no checkpoint yet; give --config alone to evaluate '
        'the weights that training starts from.'
      )
  network = build.network(config, stacked)
  mesh = build.mesh(config, network)
  config = config.copy_and_resolve_references()
  config.sampler.slots = capacity.slots(
    config, network.policy, mesh, training=False
  )
  if workdir is None:
    model, name = build.model(config, network, mesh), 'initial'
  else:
    checkpoints = checkpoint.Checkpoints(workdir / 'checkpoints', keep=None)
    step = checkpoints.latest_step()
    shapes = qwen2.abstract_params(network.policy)
    params = checkpoints.restore_params(step, sharding.abstract(mesh, shapes))
    model = build.Model(network.policy, params, network.tokenizer)
    name = f'step {step}'

  with build.Environment(config) as env:
    player = build.Player(config, model, mesh, env, terminal)
    played = player.play(
      f'evaluation on {split}',
      evaluate.jobs(env.tasks(split), count),
      seed=(config.seed, evaluate.SEED),
      max_turns=config.eval.max_turns,
      settings=config_lib.settings(config.eval),
    ).episodes
  result = evaluate.summarize(played)
  kinds = {f'  {k}': summary for k, summary in result.by_type.items()}
  print(f'{split} split\n{evaluate.table({name: result} | kinds)}')
  if _OUTPUT.value:
    evaluate.write_summary(pathlib.Path(_OUTPUT.value), split, {name: result})
  return 0


if __name__ == '__main__':
  cli.run(main)
