"""A nano policy in a small shop, on a laptop's CPU.

  python -m envs_server.webshop.catalogue data/shop --plain --products 300 \
    --goals 6000
  export WEBSHOP_DATA=$PWD/data/shop
  python launch/train.py --config=configs/webshop_nano.py --workdir=runs/shop

A quarter of an hour on 2 cores. It shows the whole way; what it learns does
not carry to goals that are held out (docs/webshop.md). The catalogue is
synthetic: real pages, search and rewards, not the benchmark. The policy it
starts from (2.1 M parameters, `planpo_jax/assets/nano_webshop`) imitates a
shopper that knows the goal and often reads pages of the product that it need
not. The command that made it, stopped by Ctrl-C after the third of its four
passes:

  python launch/warmstart.py --config=configs/webshop_nano.py \
    --workdir=runs/warmstart --output=planpo_jax/assets/nano_webshop
"""

import ml_collections

from configs import base, quickstart


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = quickstart.get_config()
  config.env.name = 'webshop'
  config.env.options = ''
  config.env.task_types = ('human',)
  config.env.eval_split = 'test'
  config.env.max_turns = 12
  # The whole conversation, as in the quickstart.
  config.chat.max_context = 1280
  config.chat.max_response = 64
  config.learner.row_len = 1280
  config.model.checkpoint = 'nano_webshop'
  # As in configs/alfworld_nano.py.
  config.train.steps = 7
  config.train.tasks_per_step = 16
  config.learner.minibatches = 4
  config.optimizer.learning_rate = 7e-5
  config.optimizer.warmup_steps = 2
  config.eval.episodes = 120
  config.eval.max_turns = 12

  config.warmstart.styles = ml_collections.ConfigDict(
    {'gold': 0.4, 'browse': 0.6}
  )
  config.warmstart.max_turns = 12
  config.warmstart.detour_rate = 0.0
  config.warmstart.repeats = 1
  config.warmstart.epochs = 4
  config.warmstart.minibatches = 120
  return base.variant(config, variant)
