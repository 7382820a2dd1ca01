"""The paper's ablations: components, alpha, and how length is rewarded.

  python launch/sweep.py --sweep=configs/sweeps/ablations.py \
    --workdir=runs/ablations --config.model.checkpoint=FOLDER

`:components`, `:alpha` or `:shaping` after the file takes that part alone. Two
rows that are the same under the base chosen (on ScienceWorld `alpha_0.05` is
`full`, and `alpha_0` is `no_as`) are trained once.

A laptop runs it with --base=configs/quickstart.py. Published values are success
on ALFWorld, read by eye from Figs. 3 and 4 of PlanPO, arXiv 2608.17289.
"""

from configs.sweeps import alpha
from planpo_jax import sweep

_FIG_3 = '(PlanPO, arXiv 2608.17289, Fig. 3, read by eye)'
_FIG_4 = 'after 60 steps (PlanPO, arXiv 2608.17289, Fig. 4, read by eye)'


def _only_as(name: str, preset: str, reading: str) -> sweep.Run:
  """A = A^S; the paper does not say which responses A^S compares."""
  return sweep.Run(
    name=name,
    presets=(preset,),
    reason=f'A = A^S alone, over {reading}',
    published=f'ALFWorld 1.5B 0.79, 7B 0.83 {_FIG_3}; not said which responses'
    ' A^S compares',
  )


COMPONENTS = (
  sweep.Run(
    name='full',
    presets=('planpo',),
    reason='PlanPO, A = A^E + alpha A^S',
    published=f'ALFWorld 1.5B 0.91, 7B 0.94 {_FIG_3}',
  ),
  sweep.Run(
    name='no_as',
    presets=('planpo_no_as',),
    reason='A = A^E alone: turns, not tokens',
    published=f'ALFWorld 1.5B 0.83, 7B 0.90 {_FIG_3}',
  ),
  _only_as('no_ae_flat_success', 'planpo_no_ae', 'the responses of successes'),
  _only_as(
    'no_ae_flat_all',
    'planpo_no_ae_flat_all',
    'all responses, those of failures as 0',
  ),
  sweep.Run(
    name='constant_alpha',
    presets=('planpo_constant',),
    reason='alpha stays where the experiment begins it (0.1 in the paper)',
    published=f'ALFWorld 1.5B 0.84, 7B 0.86 {_FIG_3}',
  ),
)

SHAPING = (
  sweep.Run(
    name='ppo',
    presets=('ppo',),
    reason='PPO with a critic, rewarded for success only',
    published=f'about 0.29 {_FIG_4}',
  ),
  sweep.Run(
    name='ppo_success',
    presets=('ppo_success',),
    reason='PPO, few turns and tokens rewarded on success',
    published=f'about 0.27 {_FIG_4}',
  ),
  sweep.Run(
    name='ppo_unconditional',
    presets=('ppo_unconditional',),
    reason='PPO, few turns and tokens rewarded always',
    published='falls to 0 by step 27 or so (PlanPO, arXiv 2608.17289, Fig. 4,'
    ' read by eye)',
  ),
  sweep.Run(
    name='grpo',
    presets=('grpo',),
    reason='GRPO: the outcome alone, compared within the group',
    published=f'about 0.31, PlanPO about 0.55 {_FIG_4}',
  ),
  sweep.Run(
    name='uncond_group',
    presets=('planpo_unconditional',),
    reason='the rewards of ppo_unconditional, compared within the group: '
    'tells the condition on success from the group',
    published='',
  ),
)


def get_sweep(variant: str = '') -> sweep.Sweep:
  return sweep.Sweep(
    base='configs/sciworld_1_5b.py',
    runs=sweep.choose(
      variant,
      {'components': COMPONENTS, 'alpha': alpha.RUNS, 'shaping': SHAPING},
    ),
  )
