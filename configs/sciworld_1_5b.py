"""PlanPO on ScienceWorld with Qwen2.5-1.5B-Instruct, the paper's settings.

  python launch/train.py --config=configs/sciworld_1_5b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

PlanPO, arXiv 2608.17289: 16 tasks x 8 rollouts, lr 1e-6, KL 1e-3, 200 steps,
20 turns, alpha 0.05 -> 0.025. The paper shows this size as a curve only
(about 80 after 200 steps, GRPO about 54; its metric is not defined there).
"""

import ml_collections

from configs import base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.model.size = 'qwen2.5-1.5b'

  # AgentGym-RL's ScienceWorld: 23 task types, no simplification, the whole
  # conversation as context, 200 tokens a response.
  config.env.task_types = ('agentgym23',)
  # 200 tasks in the proportions of the paper's table; not the same tasks.
  config.env.eval_split = 'agentgym_standin'
  config.env.max_turns = 20
  config.env.workers = 36  # Of which a ninth resets ahead.
  config.chat.context = 'conversation'
  config.chat.max_context = 8192
  config.chat.max_response = 200

  config.advantage.planpo.alpha_init = 0.05
  config.advantage.planpo.alpha_final = 0.025
  config.loss.ppo_clip.kl_coef = 1e-3
  config.optimizer.learning_rate = 1e-6
  config.train.steps = 200
  config.train.tasks_per_step = 16
  config.train.group_size = 8
  config.learner.minibatches = 2  # 64 of 128 trajectories each.
  config.learner.row_len = 8192
  config.eval.episodes = 200  # Each task of the split once.
  config.eval.max_turns = 30
  return base.variant(config, variant)
