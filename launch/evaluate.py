r"""Evaluates a policy on one split or several.

  python launch/evaluate.py --workdir=runs/quickstart --split=test
  python launch/evaluate.py --config=configs/quickstart.py --split=dev,test
  python launch/evaluate.py --workdir=runs/alfworld_7b --episodes=0 \
    --split=valid_seen,valid_unseen --output=alfworld_7b.json

With --workdir: the newest checkpoint of that run, under its own configuration,
on whatever devices there are. With --config: the weights that training would
start from. The last table printed has the columns that publications have;
--output=FILE.json keeps everything, and that table in FILE.md beside it.
--agent prompts in another way than the weights were trained with:

  python launch/evaluate.py --config=configs/sciworld_7b.py --agent=react \
    --config.model.checkpoint=FOLDER
  python launch/evaluate.py --config=configs/sciworld_7b.py --agent=reflexion \
    --config.model.checkpoint=FOLDER --trials=3
"""

import dataclasses
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

from configs import base
from planpo_jax import cli
from planpo_jax import config as config_lib

_CONFIG = cli.define_config(required=False)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a training run.')
_SPLIT = flags.DEFINE_list(
  'split',
  None,
  'One or several. Default: config.eval.splits, or else config.env.eval_split.',
)
_EPISODES = flags.DEFINE_integer(
  'episodes',
  None,
  'Of each split. Default: config.eval.episodes; 0: every task once.',
  lower_bound=0,
)
_AGENT = flags.DEFINE_enum(
  'agent',
  'plain',
  ['plain', 'react', 'reflexion'],
  'plain: config.chat.prompt. react: a thought and an action line. reflexion: '
  'react, and failed episodes are tried again after a reflection.',
)
_TRIALS = flags.DEFINE_integer(
  'trials', None, 'Of reflexion; default: 3.', lower_bound=1
)
_MEMORY = flags.DEFINE_integer(
  'memory', None, 'Reflections shown by reflexion; default: 3.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'File for everything, NAME.json; NAME.md gets the table.'
)


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


def _reflexion_flags() -> dict[str, int]:
  """Those given, as arguments of `prompting.reflexion`."""
  given = {
    flag.name: flag.value
    for flag in (_TRIALS, _MEMORY)
    if flag.value is not None
  }
  if given and _AGENT.value != 'reflexion':
    name, value = next(iter(given.items()))
    raise ValueError(
      f'--{name}={value} is for --agent=reflexion, not {_AGENT.value}; leave '
      'it out, or name that agent.'
    )
  return given


def _splits(config: ml_collections.ConfigDict) -> list[str]:
  """The splits to play, each once."""
  named = _SPLIT.value or config.eval.splits or (config.env.eval_split,)
  return list(dict.fromkeys(named))


def _config_name() -> str:
  """FILE:PRESET as it was given."""
  return config_flags.get_config_filename(flags.FLAGS['config'])


def main() -> int:
  import pathlib

  from planpo_jax import (
    build,
    capacity,
    checkpoint,
    environment_record,
    evaluate,
    metrics,
    prompting,
    sharding,
  )
  from planpo_jax.models import qwen2

  reflexion_flags = _reflexion_flags()
  workdir = None
  if _WORKDIR.value:
    workdir = pathlib.Path(_WORKDIR.value).expanduser().absolute()
  output = None
  if _OUTPUT.value is not None:
    output = pathlib.Path(_OUTPUT.value).expanduser()
    evaluate.check_output(output)
  config = _config(workdir)
  if _AGENT.value != 'plain':
    config.chat.prompt = 'react'
  config_lib.check(config, jax.device_count(), training=False)
  splits = _splits(config)
  count = config.eval.episodes if _EPISODES.value is None else _EPISODES.value
  terminal = metrics.Terminal()

  stacked = step = None
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
  with build.Environment(config) as env:
    # Before any weight is read.
    jobs = evaluate.plan(splits, count, env.description, env.tasks)
    if workdir is None:
      model, name = build.model(config, network, mesh), 'initial'
    else:
      checkpoints = checkpoint.Checkpoints(workdir / 'checkpoints', keep=None)
      step = checkpoints.latest_step()
      shapes = qwen2.abstract_params(network.policy)
      params = checkpoints.restore_params(step, sharding.abstract(mesh, shapes))
      model = build.Model(network.policy, params, network.tokenizer)
      name = f'step {step}'
    player = build.Player(config, model, mesh, env, terminal)
    how = {
      'seed': (config.seed, evaluate.SEED),
      'max_turns': config.eval.max_turns,
      'settings': config_lib.settings(config.eval),
    }
    shape = evaluate.layout(env.description)
    played = evaluate.environment(env.description)
    if workdir and (warning := environment_record.compare(workdir, played)):
      terminal.say(warning)
    evaluated = {
      'config': None if workdir else _config_name(),
      'workdir': workdir and str(workdir),
      'step': step,
      'model': config.model.checkpoint or config.model.size,
      'environment': played,
      'task_types': list(config.env.task_types) or None,
      'options': config.env.options or None,
      'agent': {'name': _AGENT.value} | reflexion_flags,
      'chat': config.chat.to_dict(),
      'episodes': {'asked': count} | {k: len(v) for k, v in jobs.items()},
      'max_turns': config.eval.max_turns,
      'sampling': dataclasses.asdict(how['settings']),
      'seed': config.seed,
    }
    found = []
    for split in splits:
      if _AGENT.value == 'reflexion':
        history = prompting.reflexion(
          player, jobs[split], **how, **reflexion_flags
        )
        played = {
          f'{name}, reflexion trial {trial}': standing
          for trial, standing in enumerate(history, 1)
        }
      else:
        policy = name + (', react' if _AGENT.value == 'react' else '')
        label = f'evaluation on {split}'
        played = {policy: player.play(label, jobs[split], **how).episodes}
      found.append(evaluate.results(split, played, env.description))
      print(evaluate.closing(found[-1], env.description.sets), flush=True)
      # Each time, so that a later split that fails costs no earlier one.
      if output:
        evaluate.write_results(output, evaluated, found, shape)
    print(f'{env.description.name}: {env.description.version}')
  print(evaluate.markdown(found, shape))
  return 0


if __name__ == '__main__':
  cli.run(main)
