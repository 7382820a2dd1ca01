"""A nano policy in ALFWorld's bathrooms, on a laptop's CPU.

  for split in train:600 valid_seen:40 valid_unseen:40; do
    python -m envs_server.alfworld_games data/alfworld --scenes Bathroom \
      --types pick_and_place_simple pick_clean_then_place_in_recep \
      --split "${split%:*}" --per-type "${split#*:}"
  done
  export ALFWORLD_DATA=$PWD/data/alfworld
  python launch/train.py --config=configs/alfworld_nano.py --workdir=runs/alf

Less than twenty minutes on 2 cores; success on held-out games goes from 30 to
40 % (three seeds, docs/alfworld.md). The games are generated: real rules and
rooms, not the benchmark. The policy it starts from (2.1 M parameters, in
`planpo_jax/assets/nano_alfworld`) imitates expert episodes of the train split,
most of which search where things are. The command that made it, stopped by
Ctrl-C after the fourth of its six passes:

  python launch/warmstart.py --config=configs/alfworld_nano.py \
    --workdir=runs/warmstart --output=planpo_jax/assets/nano_alfworld
"""

import ml_collections

from configs import base, quickstart


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = quickstart.get_config()
  config.env.name = 'alfworld'
  config.env.options = ''
  config.env.task_types = ('Pick', 'Clean')
  config.env.eval_split = 'valid_seen'
  config.env.max_turns = 16
  # As in the quickstart the context is the whole conversation: only its first
  # text names every place.
  config.chat.max_response = 48
  config.model.checkpoint = 'nano_alfworld'
  # More rollouts a step and shorter strides than the quickstart's: this policy
  # wins less often, and forgets more easily how.
  config.train.steps = 10
  config.train.tasks_per_step = 16
  config.learner.minibatches = 4
  config.optimizer.learning_rate = 7e-5
  config.optimizer.warmup_steps = 2
  config.eval.episodes = 80
  config.eval.splits = ('valid_seen', 'valid_unseen')
  config.eval.max_turns = 16

  config.warmstart.styles = ml_collections.ConfigDict(
    {'gold': 0.4, 'search': 0.6}
  )
  config.warmstart.max_turns = 20
  config.warmstart.repeats = 3
  config.warmstart.epochs = 6
  config.warmstart.minibatches = 150
  return base.variant(config, variant)
