"""Theorem 1 of PlanPO as identities and against an independent sample."""

import functools

import numpy as np
import pytest

from benchmarks import theorem1

GROUPS = 4000


@functools.cache
def sample(worlds, seed, groups=GROUPS):
  return theorem1.simulate(np.random.default_rng(seed), groups, worlds)


@functools.cache
def table(worlds, seed):
  return theorem1.tabulate(sample(worlds, seed))


@functools.cache
def episodes_of_a_few():
  return theorem1.as_episodes(sample((theorem1.WORLD,), 2, 60))


@pytest.mark.parametrize('as_group', theorem1.AS_GROUPS)
@pytest.mark.parametrize('alpha', [0.05, 0.1, 0.7])
def test_bias_and_variance_are_identities_of_a_sample(as_group, alpha):
  gaps = theorem1.identity_gaps(episodes_of_a_few(), as_group, alpha)
  assert max(gaps) < 1e-12


@pytest.mark.parametrize('as_group', theorem1.AS_GROUPS)
def test_kernel_is_the_loops(as_group):
  few = sample((theorem1.WORLD,), 2, 60)
  exact_G = theorem1.exact_advantage(
    episodes_of_a_few(), as_group=as_group, alpha=0.3
  )
  kernel_G = theorem1.advantage(
    theorem1.tabulate(few), as_group=as_group, alpha=0.3
  )
  assert np.std(exact_G) > 0.1
  np.testing.assert_allclose(kernel_G, exact_G, rtol=0, atol=1e-5)


@pytest.mark.parametrize('as_group', theorem1.AS_GROUPS)
def test_moments_of_one_sample_predict_another(as_group):
  """Bias, variance and mean squared error within 6%, alpha* within .05."""
  worlds = (theorem1.WORLD,)
  known = theorem1.moments(*theorem1.parts(table(worlds, 0), as_group))
  fresh = table(worlds, 1)
  target = theorem1.advantage(fresh, as_group=as_group, alpha=1.0).mean()
  error = {}
  for alpha in np.linspace(0, 1, 21):
    a_G = theorem1.advantage(fresh, as_group=as_group, alpha=alpha)
    error[alpha] = np.mean((a_G - target) ** 2)
    np.testing.assert_allclose(
      [a_G.var(), error[alpha], a_G.mean() - target],
      [
        known.variance(alpha),
        known.error(alpha),
        (alpha - 1) * known.bias,
      ],
      rtol=0.06,
      atol=1e-6,
    )
  assert min(error, key=error.get) == pytest.approx(
    known.best_alpha(), abs=0.051
  )


def test_variance_grows_with_alpha_only_while_c_allows():
  """c >= 0: throughout. c < -alpha vS: it falls, below that of A^E alone."""

  def variances(worlds, as_group):
    return [
      theorem1.advantage(table(worlds, 1), as_group=as_group, alpha=alpha).var()
      for alpha in np.linspace(0, 1, 11)
    ]

  plain = (theorem1.WORLD,)
  known = theorem1.moments(*theorem1.parts(table(plain, 0), 'flat_all'))
  assert known.cov > 0
  assert (np.diff(variances(plain, 'flat_all')) > 0).all()

  opposed = theorem1.QUICK_OR_TERSE
  known = theorem1.moments(*theorem1.parts(table(opposed, 0), 'flat_success'))
  turning = known.steadiest_alpha()
  assert 0.5 < turning < 1
  values = variances(opposed, 'flat_success')
  assert (np.diff(values[:6]) < 0).all()
  assert values[1] < 0.9 * values[0]
  assert values[10] > values[8]
