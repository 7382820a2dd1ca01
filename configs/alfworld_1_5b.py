"""PlanPO on ALFWorld with Qwen2.5-1.5B-Instruct, the paper's settings.

  export ALFWORLD_DATA=DIR; alfworld-download
  python launch/train.py --config=configs/alfworld_1_5b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

Tables 1 and 3 of PlanPO, arXiv 2608.17289: 91.3 of 100 games won in
distribution (GiGPO 86.7, GRPO 72.8) and 87.1 out of it (82.4, 70.1), over three
seeds. Settings as its Appendix and verl-agent's ALFWorld scripts have them: 16
games x 8 rollouts, 150 steps, 50 turns, 10 for a game won, 0.1 less for a
response without its tags, lr 1e-6, KL 0.01, alpha 0.1 -> 0.05.
"""

import ml_collections

from configs import base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.model.size = 'qwen2.5-1.5b'

  config.env.name = 'alfworld'
  config.env.train_split = 'train'
  config.env.eval_split = 'valid_seen'
  config.env.max_turns = 50
  config.env.workers = 72  # Of which a ninth resets ahead.

  # A fresh prompt a turn: the task, the last two observations and actions, the
  # observation and the actions that it admits, in 2,048 tokens.
  config.chat.context = 'window'
  config.chat.history = 2
  config.chat.admissible = True
  config.chat.max_response = 512
  config.chat.max_context = 2048 + 512

  config.advantage.planpo.alpha_init = 0.1
  config.advantage.planpo.alpha_final = 0.05
  config.loss.ppo_clip.kl_coef = 0.01
  config.optimizer.learning_rate = 1e-6
  config.train.steps = 150
  config.train.tasks_per_step = 16
  config.train.group_size = 8
  # About 256 turns each, as published: 128 episodes have 2,000 to 6,400.
  config.learner.minibatches = 16
  config.learner.row_len = config.chat.max_context
  config.learner.micro_rows = 16

  config.eval.splits = ('valid_seen', 'valid_unseen')
  # Every game once: 140 and 134. Fewer would be spread evenly over the types,
  # which the splits are not, and `All` would be another number.
  config.eval.episodes = 0
  config.eval.temperature = 0.4
  config.eval.max_turns = 50

  config.warmstart.styles = ml_collections.ConfigDict({'gold': 1.0})
  config.warmstart.max_turns = 50
  return base.variant(config, variant)
