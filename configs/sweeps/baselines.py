"""Every method on one experiment, each with the settings of its preset.

  python launch/sweep.py --sweep=configs/sweeps/baselines.py \
    --workdir=runs/baselines --config.model.checkpoint=FOLDER

Presets differ in more than the advantage: PPO and HiPER play 128 tasks once,
DAPO has no KL, REINFORCE++ has it in the reward. ScalingInter reaches its third
horizon after 200 steps, which is where these experiments end.

Published values are success on ALFWorld (all tasks, seen split) and WebShop.
Table 1 of PlanPO copies most of them from GiGPO, arXiv 2505.10978.
"""

from planpo_jax import sweep


def _method(name: str, reason: str, published: str = '') -> sweep.Run:
  return sweep.Run(
    name=name, presets=(name,), reason=reason, published=published
  )


_TABLE_1 = '% at 1.5B / 7B (PlanPO, arXiv 2608.17289, Table 1)'

RUNS = (
  _method(
    'planpo',
    'turns and tokens of successes, compared within the group',
    f'ALFWorld 91.3 / 94.4, WebShop 77.2 / 80.6{_TABLE_1}',
  ),
  _method(
    'grpo',
    'outcomes compared within the group',
    f'ALFWorld 72.8 / 77.6, WebShop 56.8 / 66.1{_TABLE_1}',
  ),
  _method('dr_grpo', 'GRPO without the standard deviation'),
  _method(
    'rloo',
    'outcomes against the mean of the others',
    f'ALFWorld 69.7 / 75.5, WebShop 52.1 / 65.7{_TABLE_1}',
  ),
  _method('reinforce_pp', 'returns whitened over the batch, no group'),
  _method(
    'reinforce_pp_baseline', 'REINFORCE++ after subtracting the group mean'
  ),
  _method(
    'dapo',
    'GRPO, tied groups sampled anew, a higher upper clip',
    'WebShop 66.1% at 1.5B (GiGPO, arXiv 2505.10978)',
  ),
  _method('gspo', 'GRPO, one ratio a response'),
  _method(
    'gigpo',
    'GRPO, and steps compared at equal observations',
    f'ALFWorld 86.7 / 90.8, WebShop 65.0 / 72.8{_TABLE_1}',
  ),
  _method(
    'gigpo_nostd',
    'GiGPO without the standard deviation',
    f'ALFWorld 86.1 / 90.2, WebShop 67.4 / 75.2{_TABLE_1}',
  ),
  _method(
    'ppo',
    'a critic instead of a group',
    f'ALFWorld 54.4 / 80.4, WebShop 51.5 / 68.7{_TABLE_1}',
  ),
  _method(
    'hiper',
    'critics of subgoals and of the actions under them',
    'ALFWorld 95.3 / 97.4, WebShop 71.4 / 83.3% at 1.5B / 7B (HiPER, arXiv'
    ' 2602.16165)',
  ),
  _method('empg', 'GRPO, modulated by the entropy of each step'),
  _method(
    'hgpo',
    'GiGPO, with groups of steps by shared history',
    'ALFWorld 92.8 seen, 90.2% unseen at 1.5B (HGPO, arXiv 2602.22817)',
  ),
  sweep.Run(
    name='scaling_inter',
    presets=('grpo', 'scaling_inter'),
    reason='GRPO, more turns as training goes on',
    published='ScienceWorld 57.0% at 7B (AgentGym-RL, arXiv 2509.08755)',
  ),
)


def get_sweep(variant: str = '') -> sweep.Sweep:
  return sweep.Sweep(
    base='configs/sciworld_1_5b.py',
    runs=sweep.choose(variant, {'methods': RUNS}),
  )
