"""PlanPO on ALFWorld with Qwen2.5-7B-Instruct, the paper's settings.

  export ALFWORLD_DATA=DIR; alfworld-download
  python launch/train.py --config=configs/alfworld_7b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

Table 1 of PlanPO, arXiv 2608.17289: 94.4 of 100 games won in distribution
(GiGPO 90.8, GRPO 77.6). Same settings as the 1.5B model.
"""

import ml_collections

from configs import alfworld_1_5b, base


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = alfworld_1_5b.get_config()
  config.model.size = 'qwen2.5-7b'
  config.mesh.tensor = 4  # 7B has four key/value heads.
  return base.variant(config, variant)
