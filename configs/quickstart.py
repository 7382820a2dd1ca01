"""A nano policy learns two ScienceWorld task types on a laptop's CPU.

  make quickstart

The policy (`planpo_jax/assets/nano_sciworld`, 3.4 M parameters) was warm
started on expert episodes of the train split; see `launch/warmstart.py`.
"""

import ml_collections

from configs import base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'sciworld'
  config.env.options = 'simplifications=easy'
  config.env.task_types = (
    'lifespan-longest-lived',
    'lifespan-shortest-lived',
  )
  config.env.workers = 6
  config.env.max_turns = 12
  config.chat.prompt = 'brief'
  config.chat.max_context = 768
  config.chat.max_response = 64
  config.model.checkpoint = 'planpo_jax/assets/nano_sciworld'
  config.model.size = 'nano'
  config.model.dtype = 'float32'
  config.model.remat = False
  config.sampler.slots = 6
  config.train.steps = 20
  config.train.tasks_per_step = 8
  config.train.group_size = 8
  # The paper's values for ScienceWorld.
  config.advantage.planpo.alpha_init = 0.05
  config.advantage.planpo.alpha_final = 0.025
  config.loss.ppo_clip.kl_coef = 1e-3
  config.optimizer.learning_rate = 2e-4
  config.learner.minibatches = 2
  config.learner.row_len = 768
  config.learner.micro_rows = 2
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
