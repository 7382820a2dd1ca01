"""A nano policy learns one ScienceWorld task type on a laptop's CPU.

  make quickstart

About eight minutes on 2 cores. The policy it starts from (2.1 M parameters, in
`planpo_jax/assets/nano_sciworld`) imitates expert episodes of the train split,
needless steps and wordy thoughts included. The command that made it, with two
task types more than are trained here:

  python launch/warmstart.py --config=configs/quickstart.py \
    --workdir=runs/warmstart --output=planpo_jax/assets/nano_sciworld \
    --config.env.task_types="('lifespan-longest-lived',\
    'lifespan-shortest-lived','lifespan-longest-lived-then-shortest-lived')"
"""

import jax
import ml_collections

from configs import base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'sciworld'
  config.env.options = 'simplifications=easy'
  config.env.task_types = ('lifespan-longest-lived',)
  config.env.workers = 6
  config.env.max_turns = 12
  config.chat.prompt = 'brief'
  config.chat.max_context = 768
  config.chat.max_response = 64
  config.model.checkpoint = 'nano_sciworld'
  config.model.size = 'nano'
  config.model.dtype = 'float32'
  config.model.remat = False
  config.sampler.slots = 6
  config.train.steps = 18
  config.train.tasks_per_step = 8
  config.train.group_size = 8
  # The paper's alpha for ScienceWorld.
  config.advantage.planpo.alpha_init = 0.05
  config.advantage.planpo.alpha_final = 0.025
  # A larger step than a pretrained model takes, held back by a larger penalty.
  config.loss.ppo_clip.kl_coef = 1e-2
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.warmup_steps = 4
  config.learner.minibatches = 2
  config.learner.row_len = 768
  config.learner.micro_rows = max(2, jax.device_count())
  config.eval.episodes = 120
  config.eval.every = 0
  config.eval.max_turns = 12
  config.checkpoint.every = 5

  config.warmstart.repeats = 3
  config.warmstart.vocab_size = 1024
  config.warmstart.epochs = 10
  config.warmstart.minibatches = 50
  config.warmstart.learning_rate = 2e-3
  return base.variant(config, variant)
