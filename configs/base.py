"""Every knob once, with its unit. Experiments are this plus differences.

Hyperparameters of an advantage method or loss are the keyword arguments of its
function; they appear here under `advantage.<name>` and `loss.<name>` without
being listed, so a new method adds no line to this file.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
from ml_collections import config_dict

from planpo_jax import advantages, losses


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.seed = 0

  config.env = ml_collections.ConfigDict()
  config.env.name = 'sciworld'  # sciworld | alfworld | webshop | toy
  # Services already running, `host:port` or `host:port,host:port`; empty starts
  # one on this machine.
  config.env.address = ''
  config.env.tls = False  # Speak TLS with the services.
  # Files (PEM): of the authorities that vouch for the services, empty for those
  # that gRPC ships; of this client's own certificate and its key, if they ask.
  config.env.tls_ca = ''
  config.env.tls_cert = ''
  config.env.tls_key = ''
  # File with the token that the services want, `TOKEN` or `NAME TOKEN`.
  config.env.token_file = ''
  config.env.workers = 8  # Environment processes of the local service.
  config.env.options = ''  # Task options, `key=value;key=value`.
  # Extra flags of the local service, `--flag=value --flag=value`.
  config.env.server_flags = ''
  # Names of types, or of sets of them; empty takes every type.
  config.env.task_types = ()
  config.env.train_split = 'train'
  config.env.eval_split = 'test'
  config.env.max_turns = 20  # Turns an episode in training.
  # Turns instead of `max_turns`, each for `horizon_steps` steps, the last one
  # to the end (schedules.horizon); empty: `max_turns` throughout.
  config.env.horizons = ()
  config.env.horizon_steps = 100
  config.env.step_timeout_s = 60.0  # Deadline of one step, seconds.

  config.chat = ml_collections.ConfigDict()
  config.chat.context = 'conversation'  # conversation | window
  config.chat.prompt = 'full'  # A file of planpo_jax/prompts.
  config.chat.history = 2  # (observation, action) pairs kept by `window`.
  # List the actions that the environment admits below each observation.
  config.chat.admissible = False
  config.chat.max_context = 4096  # Tokens of a context with its response.
  config.chat.max_response = 200  # Tokens of one response.

  config.model = ml_collections.ConfigDict()
  # Folder with config.json and safetensors, the name of a shipped one
  # (planpo_jax/assets), or a hub name such as Qwen/Qwen2.5-1.5B-Instruct;
  # empty starts from random weights, which makes sense for nano only and is
  # refused for other sizes.
  config.model.checkpoint = ''
  config.model.size = 'qwen2.5-1.5b'  # Shape when there is no checkpoint.
  # `nano`, a folder, or a hub name; empty takes the checkpoint's.
  config.model.tokenizer = ''
  config.model.dtype = 'bfloat16'  # Of activations and matrix products.
  config.model.param_dtype = 'float32'  # Of weights and optimizer state.
  config.model.remat = True  # Recompute layers in the backward pass.

  config.mesh = ml_collections.ConfigDict()
  config.mesh.data = 1  # Devices over rows.
  config.mesh.fsdp = -1  # Devices over rows and weights; -1: all that remain.
  config.mesh.tensor = 1  # Devices over heads and features.

  config.sampler = ml_collections.ConfigDict()
  # Conversations decoded together; unset: as many as episodes, environment
  # workers and the memory of the devices allow.
  config.sampler.slots = config_dict.placeholder(int)
  config.sampler.temperature = 1.0
  # Filters of what may be sampled, off by default. The learner scores the
  # whole distribution; loss.ppo_clip.sampler_cap weighs the difference.
  config.sampler.top_p = 1.0  # Share of the probability that is kept.
  config.sampler.top_k = 0  # Best ids that are kept; 0: all.
  config.sampler.min_p = 0.0  # Least probability, as a share of the best id's.

  config.rollout = ml_collections.ConfigDict()
  # Seconds after which an episode is cut off; 0: none. What is cut depends on
  # the clock, so such a run is not reproducible.
  config.rollout.deadline_s = 0.0
  # Sample the next step's episodes while this step's are learnt from: they are
  # one step old, which loss.ppo_clip.sampler_cap corrects.
  config.rollout.overlap = False
  config.rollout.dump = ''  # Folder for every episode, token by token.
  # Folder or file of a dump: train from it, without environments or sampling.
  config.rollout.replay = ''

  config.train = ml_collections.ConfigDict()
  config.train.steps = 200
  config.train.tasks_per_step = 16
  config.train.group_size = 8  # Rollouts a task.
  config.train.success_return = 10.0  # Return of a success; a failure gets 0.
  # binary: the environment's success | graded: the return is the score's share
  # of `score_max`, success a score of `success_threshold`.
  config.train.outcome = 'binary'
  config.train.success_threshold = 100.0  # Score points.
  config.train.score_floor = 0.0  # Score points below which no return falls.
  config.train.score_max = 100.0  # Score points of a full success.
  # Times that up to `tasks_per_step` other tasks are played while fewer groups
  # give the method something to learn from; 0: never. DAPO's dynamic sampling.
  config.train.max_refills = 0
  # Leave out groups that give the method nothing to learn from, KL included.
  config.train.drop_zero_groups = False

  config.advantage = ml_collections.ConfigDict()
  config.advantage.name = 'planpo'
  for name in advantages.names():
    config.advantage[name] = _settable(advantages.hyperparameters(name))

  config.loss = ml_collections.ConfigDict()
  config.loss.name = 'ppo_clip'
  for name in losses.names():
    config.loss[name] = _settable(losses.hyperparameters(name))

  config.optimizer = ml_collections.ConfigDict()
  config.optimizer.learning_rate = 1e-6
  config.optimizer.warmup_steps = 0  # Updates.
  config.optimizer.weight_decay = 0.01
  config.optimizer.max_grad_norm = 1.0
  config.optimizer.b1 = 0.9
  config.optimizer.b2 = 0.999

  # Of methods that learn values; its forward pass is the learner's.
  config.critic = ml_collections.ConfigDict()
  config.critic.learning_rate = 1e-5
  config.critic.warmup_steps = 0  # Updates.
  config.critic.weight_decay = 0.01
  config.critic.max_grad_norm = 1.0
  config.critic.b1 = 0.9
  config.critic.b2 = 0.999
  # How far a value may move in an update, units of the return; inf: freely.
  config.critic.clip = 0.5
  config.critic.scale = 1.0  # Of the squared error; 0.5 in AgentGym-RL.

  config.learner = ml_collections.ConfigDict()
  config.learner.minibatches = 2  # Optimizer updates a step.
  config.learner.row_len = 4096  # Tokens of a packed row.
  config.learner.micro_rows = 8  # Rows held at once; more are accumulated.

  config.eval = ml_collections.ConfigDict()
  # Splits that launch/evaluate.py plays; empty: `env.eval_split` alone.
  config.eval.splits = ()
  config.eval.episodes = 200  # 0: every task of a split once.
  config.eval.every = 5  # Steps; 0 evaluates before and after only.
  config.eval.temperature = 1.0
  config.eval.top_p = 1.0
  config.eval.top_k = 0
  config.eval.min_p = 0.0
  config.eval.max_turns = 30  # Turns an episode in evaluation.

  config.checkpoint = ml_collections.ConfigDict()
  config.checkpoint.every = 5  # Steps.
  config.checkpoint.keep = 2  # Newest kept.

  # launch/warmstart.py: imitation of expert episodes before training.
  config.warmstart = ml_collections.ConfigDict()
  config.warmstart.repeats = 2  # Demonstrations a task of the train split.
  # Share of demonstrations in each style (demonstrations.STYLES).
  config.warmstart.styles = ml_collections.ConfigDict(
    {'gold': 0.5, 'brisk': 0.3, 'teleport': 0.2}
  )
  config.warmstart.detour_rate = 0.1  # Chance of a needless action a turn.
  config.warmstart.max_turns = 30  # Turns a demonstration.
  # Ids of a vocabulary trained on the demonstrations; 0 keeps the tokenizer.
  config.warmstart.vocab_size = 0
  config.warmstart.epochs = 6
  config.warmstart.minibatches = 20  # Updates an epoch.
  config.warmstart.learning_rate = 1e-3
  # At which what was learnt is written: below 1 the policy is surer of itself.
  config.warmstart.temperature = 1.0
  config.warmstart.prompt_weight = 0.3  # Of a prompt token; a response's is 1.

  config.report = ml_collections.ConfigDict()
  config.report.transcripts = 32  # Episodes written out each step.
  # Locked, so that a misspelt key in an experiment file is an error too.
  return config.lock()


def _settable(defaults: Mapping[str, Any]) -> dict[str, Any]:
  """The defaults; None takes a number, which the flags would refuse else."""
  return {
    key: config_dict.placeholder(float) if value is None else value
    for key, value in defaults.items()
  }


def smoke(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The same experiment, tiny: random nano policy, toy game, three steps."""
  config.env.name = 'toy'
  config.env.workers = 4
  config.env.options = ''
  config.env.task_types = ()
  config.env.train_split = 'train'
  config.env.eval_split = 'test'
  config.env.max_turns = 6
  if config.env.horizons:
    config.env.horizons = (2, 4, 6)
    config.env.horizon_steps = 1
  if config.chat.prompt == 'full':  # Another one belongs to its method.
    config.chat.prompt = 'brief'
  config.chat.max_context = 512
  config.chat.max_response = 12
  config.model.checkpoint = ''
  config.model.size = 'nano'
  config.model.tokenizer = 'nano'
  config.model.dtype = 'float32'
  config.model.remat = False
  config.mesh.fsdp = -1
  config.mesh.tensor = 1
  config.sampler.slots = None
  config.train.steps = 3
  config.train.tasks_per_step = 2
  config.train.group_size = 4
  config.train.max_refills = min(config.train.max_refills, 1)
  config.learner.minibatches = min(config.learner.minibatches, 2)
  config.learner.row_len = 512
  # Rows must divide over the devices, whatever this machine has.
  config.learner.micro_rows = max(4, jax.device_count())
  config.eval.splits = ()
  config.eval.episodes = 8
  config.eval.every = 0
  config.eval.max_turns = 6
  config.checkpoint.every = 1
  return config


# Presets that go with any method; those of a method are in its own file.
PRESETS: dict[str, dict[str, Any]] = {
  # AgentGym-RL, arXiv 2509.08755: the horizon grows in three phases.
  'scaling_inter': {
    'env.horizons': (10, 20, 30),
    'env.horizon_steps': 100,
  },
}


def presets() -> dict[str, dict[str, Any]]:
  """What may follow the colon of `--config`, but for `smoke`."""
  return advantages.presets() | PRESETS


def variant(
  config: ml_collections.ConfigDict, text: str
) -> ml_collections.ConfigDict:
  """Applies the part after the colon of `--config=FILE.py:PRESET,PRESET`.

  In the order given, but `smoke` last: it makes small what the others set. A
  function that a preset gives for a value is called with the configuration; it
  may return a reference to another key, which flags still reach.

  Raises:
    ValueError: unknown preset, one that sets a key which does not exist, or two
      that choose different methods.
  """
  names = [name.strip() for name in text.split(',') if name.strip()]
  known = presets()
  methods: dict[str, str] = {}  # Method -> the preset that chose it.
  for name in names:
    if name != 'smoke' and name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      raise ValueError(
        f'config preset {name!r} is unknown; known are smoke, '
        f'{", ".join(sorted(known))}.'
        + (f' Did you mean {near[0]!r}?' if near else '')
      )
    values = known.get(name, {})  # `smoke` comes below.
    if 'advantage.name' in values:
      methods.setdefault(values['advantage.name'], name)
    if len(methods) > 1:
      first, second = methods
      raise ValueError(
        f'the presets {methods[first]!r} and {methods[second]!r} choose two '
        f'methods, {first} and {second}, and would be mixed; give one of them.'
      )
    for key, value in values.items():
      _set(config, name, key, value(config) if callable(value) else value)
  return smoke(config) if 'smoke' in names else config


def _set(
  config: ml_collections.ConfigDict, preset: str, key: str, value: Any
) -> None:
  *sections, last = key.split('.')
  section = config
  try:
    for part in sections:
      section = section[part]
    section[last] = value
  except (KeyError, TypeError) as error:
    raise ValueError(
      f'the preset {preset!r} sets {key}={value!r}, which the configuration '
      f'does not take ({error}); configs/base.py lists every key.'
    ) from error
