"""GRPO against PlanPO with three seeds each, on a laptop.

  python launch/sweep.py --sweep=configs/sweeps/nano.py --workdir=runs/nano
  python launch/report.py runs/nano

Six runs of configs/alfworld_nano.py, which the second command averages over the
seeds. --base=configs/webshop_nano.py or configs/quickstart.py is the same
comparison on WebShop or ScienceWorld; --seeds=N plays other seeds than these, 0
to N - 1.
"""

from planpo_jax import sweep

RUNS = (
  sweep.Run(
    name='grpo',
    presets=('grpo',),
    reason='outcomes compared within the group',
  ),
  sweep.Run(
    name='planpo',
    presets=('planpo',),
    reason='turns and tokens of successes, compared within the group',
  ),
)


def get_sweep(variant: str = '') -> sweep.Sweep:
  return sweep.Sweep(
    base='configs/alfworld_nano.py',
    runs=sweep.choose(variant, {'methods': RUNS}),
    seeds=(0, 1, 2),
  )
