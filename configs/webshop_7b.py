"""PlanPO on WebShop with Qwen2.5-7B-Instruct, the paper's settings.

  export WEBSHOP_DATA=DIR
  python launch/train.py --config=configs/webshop_7b.py --workdir=DIR \
    --config.model.checkpoint=FOLDER

Table 1 of PlanPO, arXiv 2608.17289: score 88.5, success 80.6 (GiGPO 86.2 and
75.2, GRPO 79.3 and 66.1). Same settings as the 1.5B model.
"""

import ml_collections

from configs import base, webshop_1_5b


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  config = webshop_1_5b.get_config()
  config.model.size = 'qwen2.5-7b'
  config.mesh.tensor = 4  # 7B has four key/value heads.
  return base.variant(config, variant)
