"""The weight of A^S: five initial values, each decaying to half of itself.

  python launch/sweep.py --sweep=configs/sweeps/alpha.py --workdir=runs/alpha \
    --config.model.checkpoint=FOLDER

PlanPO, arXiv 2608.17289, Figs. 3 and 4, has them for Qwen2.5-7B on ALFWorld and
WebShop (success, read by eye). The paper's value is 0.1, and 0.05 on
ScienceWorld.
"""

from planpo_jax import sweep

# (alpha_init, success on ALFWorld, on WebShop)
_PUBLISHED = (
  (0.5, 0.87, 0.69),
  (0.2, 0.93, 0.75),
  (0.1, 0.94, 0.81),
  (0.05, 0.91, 0.76),
  (0.0, 0.90, 0.73),
)

RUNS = tuple(
  sweep.Run(
    name=f'alpha_{alpha:g}',
    presets=('planpo',),
    overrides={
      'advantage.planpo.alpha_init': alpha,
      'advantage.planpo.alpha_final': alpha / 2,
    },
    reason=f'alpha decays from {alpha:g} to {alpha / 2:g}'
    if alpha
    else 'alpha 0: A^E alone',
    published=f'7B ALFWorld {alfworld:.2f}, WebShop {webshop:.2f} (PlanPO,'
    ' arXiv 2608.17289, Figs. 3-4, read by eye)',
  )
  for alpha, alfworld, webshop in _PUBLISHED
)


def get_sweep(variant: str = '') -> sweep.Sweep:
  return sweep.Sweep(
    base='configs/sciworld_1_5b.py',
    runs=sweep.choose(variant, {'alpha': RUNS}),
  )
