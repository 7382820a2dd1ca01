"""PlanPO on WebShop with Qwen2.5-1.5B-Instruct, the paper's settings.

  export WEBSHOP_DATA=DIR
  python launch/train.py --config=configs/webshop_1_5b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

Table 1 of PlanPO, arXiv 2608.17289: score 86.8, success 77.2 (GiGPO 83.5 and
67.4, GRPO 75.8 and 56.8). Settings as verl-agent's WebShop scripts have them:
16 goals x 8 rollouts, 150 steps, 15 turns, 10 for a purchase that satisfies the
goal wholly, 0.1 less for a response without its tags, lr 1e-6, KL 0.01, alpha
0.1 -> 0.05.

Logs of those scripts show 6,910 goals, which are the synthetic ones of 1,000
products, where the papers speak of 1.1 million products; they train on goals
500 and up, which here are `train` and, below 1,500, `dev`. Which products are
played is what WEBSHOP_DATA holds, and is kept in environment.json of the run;
--config.env.task_types="('human',)" plays what people wrote.
"""

import ml_collections

from configs import alfworld_1_5b, base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = alfworld_1_5b.get_config()
  config.env.name = 'webshop'
  config.env.task_types = ('synthetic',)
  config.env.eval_split = 'test'
  config.env.max_turns = 15

  # Pages are long.
  config.chat.max_context = 4096 + 512
  config.learner.row_len = config.chat.max_context
  # About 64 turns each, as published: 128 episodes have 600 to 1,900.
  config.learner.minibatches = 16

  # Of the first 500 goals, which are held out.
  config.eval.splits = ()
  config.eval.episodes = 256
  config.eval.max_turns = 15

  config.warmstart.max_turns = 15
  return base.variant(config, variant)
