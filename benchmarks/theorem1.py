"""Theorem 1 of PlanPO (arXiv 2608.17289): bias and variance over alpha.

  python benchmarks/theorem1.py [--groups=12000] [--seed=0]

A response is kept fixed and the other rollouts of its group are drawn again.
With E = A^E and S = A^S of that response, b = mean S, vE and vS the variances
and c the covariance, A_alpha = E + alpha S has, towards the target A_1,

  1. bias (alpha - 1) b,   2. variance vE + alpha^2 vS + 2 alpha c,

the variance grows with alpha throughout [0, 1] only where c >= 0, and the mean
squared error is least at alpha* = clip((b^2 - c) / (b^2 + vS), 0, 1).

The world is a walk of three steps: a turn makes a step with probability .18,
12 turns are the limit, and a response takes 11, 13, ... or 23 tokens, whatever
it does. The response looked at has 13 tokens and is the first of a rollout that
succeeds in its 7th turn; 7 more make the group of 8.

E, S and A come from the kernel itself (float32) on two samples: one predicts,
the other, independent, is measured. Lines 1 and 2 are identities of a sample
too; those are checked in float64 with the loops of tests/oracle.py.
"""

import argparse
import dataclasses
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np

from planpo_jax import advantages, episodes
from tests import oracle

ALPHAS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
AS_GROUPS = ('flat_success', 'flat_all')
MEMBERS = 8
STEPS = 3
LIMIT = 12
FIXED_TOKENS = (13, 21, 21, 11, 17, 17, 21)
# Probability of a step, and tokens of a response.
WORLD = (0.18, (11, 13, 15, 17, 19, 21, 23))
# Here a group is either quick and wordy or slow and terse: what makes the fixed
# response look slow makes it look short, so c < 0.
QUICK_OR_TERSE = ((0.6, (40, 44, 48)), (0.2, (11, 13, 15)))


@dataclasses.dataclass(frozen=True)
class Sample:
  """Rollouts of G groups of N; the fixed one is the first of each.

  Attributes:
    success_GN: bool.
    turns_GN: int.
    tokens_GNU: int, of each response; of use up to `turns_GN`.
  """

  success_GN: np.ndarray
  turns_GN: np.ndarray
  tokens_GNU: np.ndarray


@dataclasses.dataclass(frozen=True)
class Moments:
  """Of E and S over the groups of a sample."""

  var_e: float
  var_s: float
  cov: float
  bias: float

  def variance(self, alpha: float) -> float:
    return self.var_e + alpha**2 * self.var_s + 2 * alpha * self.cov

  def error(self, alpha: float) -> float:
    return (1 - alpha) ** 2 * self.bias**2 + self.variance(alpha)

  def steadiest_alpha(self) -> float:
    """Where the variance is least: 0 unless c < 0."""
    return float(np.clip(-self.cov / self.var_s, 0, 1))

  def best_alpha(self) -> float:
    square = self.bias**2
    return float(np.clip((square - self.cov) / (square + self.var_s), 0, 1))


def moments(e_G: np.ndarray, s_G: np.ndarray) -> Moments:
  (var_e, cov), (_, var_s) = np.cov(e_G, s_G, ddof=0)
  return Moments(var_e, var_s, cov, s_G.mean())


def simulate(rng, groups: int, worlds=(WORLD,)) -> Sample:
  """Draws groups, each in one of `worlds`."""
  shape = groups, MEMBERS, LIMIT
  world_G = rng.integers(len(worlds), size=groups)
  chance_G = np.array([chance for chance, _ in worlds])[world_G]
  place_GNU = np.cumsum(rng.random(shape) < chance_G[:, None, None], axis=-1)
  success_GN = place_GNU[..., -1] >= STEPS
  arrival_GN = 1 + np.argmax(place_GNU >= STEPS, axis=-1)
  turns_GN = np.where(success_GN, arrival_GN, LIMIT)
  tokens_GNU = np.empty(shape, np.int64)
  for world, (_, lengths) in enumerate(worlds):
    inside_G = world_G == world
    tokens_GNU[inside_G] = rng.choice(lengths, (inside_G.sum(), *shape[1:]))
  success_GN[:, 0] = True
  turns_GN[:, 0] = len(FIXED_TOKENS)
  tokens_GNU[:, 0, : len(FIXED_TOKENS)] = FIXED_TOKENS
  return Sample(success_GN, turns_GN, tokens_GNU)


def tabulate(sample: Sample) -> episodes.TurnTable:
  """Lays a sample out; the one token of a group is of its fixed response."""
  turns_E = sample.turns_GN.ravel()
  num_E = len(turns_E)
  real_U = (np.arange(LIMIT) < sample.turns_GN[..., None]).ravel()
  count = real_U.sum()
  num_U = episodes.bucket(count)

  def pad(values_U, fill, dtype):
    return np.pad(
      values_U.astype(dtype), (0, num_U - count), constant_values=fill
    )

  place_U = np.tile(np.arange(LIMIT), num_E)[real_U]
  groups = np.arange(len(sample.success_GN), dtype=np.int32)
  success_E = sample.success_GN.ravel()
  first_E = np.cumsum(turns_E) - turns_E
  return episodes.TurnTable(
    turn_episode_U=pad(np.repeat(np.arange(num_E), turns_E), num_E, np.int32),
    turn_index_U=pad(place_U, 0, np.int32),
    turn_tokens_U=pad(sample.tokens_GNU.ravel()[real_U], 0, np.int32),
    turn_reward_U=np.zeros(num_U, np.float32),
    turn_valid_U=np.ones(num_U, bool),
    turn_truncated_U=np.zeros(num_U, bool),
    turn_state_U=pad(place_U, num_U, np.int32),
    episode_group_E=np.repeat(groups, MEMBERS),
    episode_return_E=np.float32(10) * success_E,
    episode_score_E=np.float32(100) * success_E,
    episode_success_E=success_E,
    episode_truncated_E=~success_E,
    token_turn_R=first_E[::MEMBERS].astype(np.int32),
    token_role_R=np.zeros(len(groups), np.int32),
  )


def advantage(
  table: episodes.TurnTable,
  *,
  as_group: str,
  alpha: float,
  ae_weight: float = 1.0,
) -> np.ndarray:
  """Returns [G] float64 of A_alpha of the fixed response, by the kernel."""
  method = advantages.get(
    'planpo',
    as_group=as_group,
    ae_weight=ae_weight,
    alpha_init=0.0,
    alpha_final=1.0,
  )
  # alpha runs from 0 to 1 with the progress, so no value is compiled anew.
  return np.asarray(
    method.estimate(table, progress=np.float32(alpha)), np.float64
  )


def parts(
  table: episodes.TurnTable, as_group: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns E and S [G] of the fixed response."""
  return (
    advantage(table, as_group=as_group, alpha=0.0),
    advantage(table, as_group=as_group, alpha=1.0, ae_weight=0.0),
  )


def as_episodes(sample: Sample) -> list[episodes.Episode]:
  batch = []
  for g, turns_N in enumerate(sample.turns_GN):
    for n, turns in enumerate(turns_N):
      batch.append(
        episodes.Episode(
          task=episodes.Task('walk', 'train', g, 'walk'),
          member=n,
          turns=tuple(
            episodes.Turn(
              (), (0,) * length, (0.0,) * length, '', '', '', 0.0, True, 0
            )
            for length in sample.tokens_GNU[g, n, :turns].tolist()
          ),
          score=0.0,
          success=bool(sample.success_GN[g, n]),
          ending=episodes.Ending.TERMINATED,
        )
      )
  return batch


def exact_advantage(
  batch: list[episodes.Episode],
  *,
  as_group: str,
  alpha: float,
  ae_weight: float = 1.0,
) -> np.ndarray:
  """`advantage` in float64, by loops."""
  values = oracle.planpo(
    batch,
    progress=1.0,
    as_group=as_group,
    ae_weight=ae_weight,
    alpha_init=alpha,
    alpha_schedule='constant',
  )
  return np.array([turns[0] for turns in values[::MEMBERS]])


def identity_gaps(
  batch: list[episodes.Episode], as_group: str, alpha: float
) -> tuple[float, float]:
  """Returns how far lines 1 and 2 are from holding within a sample."""
  e_G = exact_advantage(batch, as_group=as_group, alpha=0.0)
  s_G = exact_advantage(batch, as_group=as_group, alpha=1.0, ae_weight=0.0)
  a_G = exact_advantage(batch, as_group=as_group, alpha=alpha)
  predicted = moments(e_G, s_G)
  target = e_G.mean() + predicted.bias
  return (
    abs(a_G.mean() - target - (alpha - 1) * predicted.bias),
    abs(a_G.var() - predicted.variance(alpha)),
  )


def _report(name, worlds, as_groups, rng, groups):
  samples = [simulate(rng, groups, worlds) for _ in range(2)]
  first, second = (tabulate(sample) for sample in samples)
  others = samples[0].success_GN[:, 1:]
  print(f'\n{name}: {groups:,} groups, others succeed {others.mean():.2f}')
  exact = as_episodes(
    Sample(*(values[:200] for values in dataclasses.astuple(samples[0])))
  )
  for as_group in as_groups:
    e_G, s_G = parts(first, as_group)
    known = moments(e_G, s_G)
    products_G = (e_G - e_G.mean()) * (s_G - s_G.mean())
    cov_error = products_G.std() / groups**0.5
    print(
      f'\n{as_group}: vE {known.var_e:.3f}, vS {known.var_s:.3f}, '
      f'c {known.cov:+.4f} (standard error {cov_error:.4f}), '
      f'b {known.bias:.3f}'
    )
    gaps = [identity_gaps(exact, as_group, alpha) for alpha in ALPHAS]
    print(
      'identities in float64, 200 groups: line 1 within '
      f'{max(gap for gap, _ in gaps):.1e}, line 2 within '
      f'{max(gap for _, gap in gaps):.1e}'
    )
    target = advantage(second, as_group=as_group, alpha=1.0).mean()
    print(
      '       ------ bias ------  -------- variance --------  ---- MSE ----'
    )
    print(
      'alpha  predicted measured  predicted measured      gap  pred.  meas.'
    )
    for alpha in ALPHAS:
      a_G = advantage(second, as_group=as_group, alpha=alpha)
      error = np.mean((a_G - target) ** 2)
      variance = known.variance(alpha)
      print(
        f'{alpha:5.2f}  {(alpha - 1) * known.bias:9.4f} '
        f'{a_G.mean() - target:8.4f}  {variance:9.4f} {a_G.var():8.4f} '
        f'{a_G.var() / variance - 1:+8.1%}  {known.error(alpha):.4f} '
        f'{error:.4f}'
      )
    fine = np.linspace(0, 1, 101)
    drawn = [advantage(second, as_group=as_group, alpha=x) for x in fine]
    nearest = fine[np.argmin([np.mean((a_G - target) ** 2) for a_G in drawn])]
    steadiest = fine[np.argmin([a_G.var() for a_G in drawn])]
    print(
      f'MSE is least at alpha {known.best_alpha():.2f} predicted, '
      f'{nearest:.2f} measured; variance is least at '
      f'{known.steadiest_alpha():.2f} predicted, {steadiest:.2f} measured'
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--groups', type=int, default=12_000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  rng = np.random.default_rng(args.seed)
  _report('walk', (WORLD,), AS_GROUPS, rng, args.groups)
  _report(
    'quick and wordy, or slow and terse',
    QUICK_OR_TERSE,
    AS_GROUPS,
    rng,
    args.groups,
  )


if __name__ == '__main__':
  main()
