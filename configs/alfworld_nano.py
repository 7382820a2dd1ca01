"""A nano policy learns ALFWorld's bathrooms on a laptop's CPU.

  python -m envs_server.alfworld_games data/alfworld --per-type 150 \
    --split all --scenes Bathroom \
    --types pick_and_place_simple pick_clean_then_place_in_recep
  export ALFWORLD_DATA=$PWD/data/alfworld
  python launch/train.py --config=configs/alfworld_nano.py --workdir=runs/alf

The games are generated: real rules and rooms, not the benchmark. The policy it
starts from (2.1 M parameters, in `planpo_jax/assets/nano_alfworld`) imitates
expert episodes of the train split, most of which search where things are. The
command that made it:

  python launch/warmstart.py --config=configs/alfworld_nano.py \
    --workdir=runs/warmstart --output=planpo_jax/assets/nano_alfworld
"""

import jax
import ml_collections

from configs import base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.env.name = 'alfworld'
  config.env.task_types = ('Pick', 'Clean')
  config.env.workers = 6
  config.env.eval_split = 'valid_seen'
  config.env.max_turns = 16
  # The whole conversation: only the first text names every place.
  config.chat.prompt = 'brief'
  config.chat.max_context = 768
  config.chat.max_response = 48
  config.model.checkpoint = 'nano_alfworld'
  config.model.size = 'nano'
  config.model.dtype = 'float32'
  config.model.remat = False
  config.sampler.slots = 6
  config.train.steps = 16
  config.train.tasks_per_step = 4
  config.train.group_size = 8
  config.advantage.planpo.alpha_init = 0.1
  config.advantage.planpo.alpha_final = 0.05
  # A larger step than a pretrained model takes, held back by a larger penalty.
  config.loss.ppo_clip.kl_coef = 1e-2
  config.optimizer.learning_rate = 1.5e-4
  config.optimizer.warmup_steps = 4
  config.learner.minibatches = 2
  config.learner.row_len = 768
  config.learner.micro_rows = max(2, jax.device_count())
  config.eval.splits = ('valid_seen', 'valid_unseen')
  config.eval.episodes = 80
  config.eval.every = 0
  config.eval.max_turns = 16
  config.checkpoint.every = 8

  config.warmstart.styles = ml_collections.ConfigDict(
    {'gold': 0.4, 'search': 0.6}
  )
  config.warmstart.repeats = 4
  config.warmstart.max_turns = 20
  config.warmstart.vocab_size = 1024
  config.warmstart.epochs = 8
  config.warmstart.minibatches = 50
  config.warmstart.learning_rate = 2e-3
  return base.variant(config, variant)
