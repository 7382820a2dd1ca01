"""PlanPO on ScienceWorld with Qwen2.5-7B-Instruct, the paper's settings.

  python launch/train.py --config=configs/sciworld_7b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

Table 2 of PlanPO, arXiv 2608.17289: 68.46 overall (ScalingInter-7B 57.00,
AgentGym-RL-7B 50.50), on AgentGym's 200 test tasks. They are not shipped here:
the 200 of `agentgym_standin` are others (envs_server/sciworld_sets.py). Same
settings as the 1.5B model.
"""

import ml_collections

from configs import base, sciworld_1_5b


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = sciworld_1_5b.get_config()
  config.model.size = 'qwen2.5-7b'
  config.mesh.tensor = 4  # 7B has four key/value heads.
  config.env.workers = 72  # Of which a ninth resets ahead.
  return base.variant(config, variant)
