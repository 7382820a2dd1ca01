"""PlanPO and GRPO against golden, hand-worked and identity cases."""

import json
import pathlib

import jax
import numpy as np
import pytest

from planpo_jax import advantages, episodes
from planpo_jax.advantages import planpo
from tests import make_episodes

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden/advantages.json').read_text()
)
CASES = list(GOLDEN['cases'])


def estimate(batch, name, *, progress=1.0, outcome=None, **chosen):
  """Returns one list a member of the advantages of its non-empty turns."""
  table = episodes.tabulate(batch, **(outcome or {}))
  adv_R = np.asarray(
    advantages.get(name, **chosen).estimate(table, progress=progress)
  )
  assert adv_R.dtype == np.float32
  result, start = [], 0
  for episode in batch:
    turns = []
    for turn in episode.turns:
      tokens = adv_R[start : start + len(turn.response_ids)]
      start += len(tokens)
      if len(tokens):
        assert (tokens == tokens[0]).all()
        turns.append(float(tokens[0]))
    result.append(turns)
  assert not adv_R[start:].any()
  return result


def golden_batch(case):
  group = GOLDEN['cases'][case]['group']
  return make_episodes.group([(m['success'], m['L']) for m in group])


def expect(actual, batch, wanted):
  """Compares with `wanted`, a number or a list a turn for each member."""
  for episode, turns, value in zip(batch, actual, wanted, strict=True):
    values = np.broadcast_to(value, len(episode.turns))
    kept = [
      v
      for v, turn in zip(values, episode.turns, strict=True)
      if turn.response_ids
    ]
    np.testing.assert_allclose(turns, kept, atol=1e-5)


E_ONLY = {'alpha_init': 0.0, 'alpha_schedule': 'constant'}
S_ONLY = {'ae_weight': 0.0, 'alpha_init': 1.0, 'alpha_schedule': 'constant'}
BOTH = {'alpha_init': 0.1, 'alpha_schedule': 'constant'}
PLANPO = {
  'A': BOTH,
  'A_E': E_ONLY,
  'A_S': S_ONLY,
  'A_S_flat_all': S_ONLY | {'as_group': 'flat_all'},
  'A_S_turn_all': S_ONLY | {'as_group': 'turn_all'},
  'A_S_turn_success': S_ONLY | {'as_group': 'turn_success'},
  'A_flat_all': BOTH | {'as_group': 'flat_all'},
  'A_no_AE': S_ONLY | {'as_group': 'flat_all'},
  'A_no_AS': E_ONLY,
  'A_E_ddof0': E_ONLY | {'ddof': 0},
  'A_E_no_std': E_ONLY | {'use_std': False},
  'A_E_turn_stat': E_ONLY | {'stat': 'turn'},
  'A_E_stratified': E_ONLY | {'ae_mode': 'stratified'},
}
GRPO = {
  'A': {},
  'A_ddof0': {'ddof': 0},
  'A_dr_grpo': {'use_std': False},
  'A_turn_stat': {'stat': 'turn'},
}


@pytest.mark.parametrize('quantity', PLANPO)
@pytest.mark.parametrize('case', CASES)
def test_golden_planpo(case, quantity):
  batch = golden_batch(case)
  expected = GOLDEN['cases'][case]['expected']
  wanted = (expected['planpo'] | expected['planpo_variants'])[quantity]
  expect(estimate(batch, 'planpo', **PLANPO[quantity]), batch, wanted)


@pytest.mark.parametrize('quantity', GRPO)
@pytest.mark.parametrize('case', CASES)
def test_golden_grpo(case, quantity):
  batch = golden_batch(case)
  wanted = GOLDEN['cases'][case]['expected']['grpo'][quantity]
  expect(estimate(batch, 'grpo', **GRPO[quantity]), batch, wanted)


def test_golden_alpha():
  golden = GOLDEN['alpha']
  for k, value in golden['values'].items():
    np.testing.assert_allclose(
      planpo.alpha(
        int(k) / golden['K'],
        alpha_init=golden['a_init'],
        alpha_final=golden['a_final'],
      ),
      value,
      atol=1e-7,
    )


def test_alpha_schedules():
  values = {
    schedule: [
      float(planpo.alpha(p, alpha_schedule=schedule)) for p in (0.0, 0.5, 1.0)
    ]
    for schedule in ('decay', 'constant', 'increase')
  }
  np.testing.assert_allclose(values['decay'], [0.1, 0.075, 0.05], rtol=1e-6)
  np.testing.assert_allclose(values['constant'], [0.1] * 3)
  np.testing.assert_allclose(values['increase'], [0.05, 0.075, 0.1], rtol=1e-6)


def test_planpo_reads_progress_without_compiling_again():
  """A = A^E + alpha A^S is linear in progress; all_success has A^S != 0."""
  table = episodes.tabulate(golden_batch('all_success'))
  method = advantages.get('planpo', eps=2e-6).estimate
  first = method(table, progress=0.0)
  half = method(table, progress=0.5)
  last = method(table, progress=1.0)
  np.testing.assert_allclose(half, (first + last) / 2, atol=1e-6)
  assert np.abs(first - last).max() > 0.05
  assert method._cache_size() == 1


def test_graded_with_threshold_50():
  """R 10, 6, 0, 3 with two successes, T = 2, 3, 1, 4.

  R^E = 5, 2, 0, 0: mean 1.75, std sqrt(16.75 / 3) = 2.362908, so A^E =
  1.375423, .105802, -.740613 twice. R^S over the successes = .5, .5 and
  6/36, 6/9, 6/36: mean .4, std sqrt(.2 / 4) = .223607.
  """
  lengths = ([20, 20], [36, 9, 36], [5], [7, 7, 7, 7])
  batch = [
    make_episodes.episode(turns, score=score, member=i)
    for i, (turns, score) in enumerate(
      zip(lengths, (100.0, 60.0, -100.0, 30.0), strict=True)
    )
  ]
  outcome = {'outcome': 'graded', 'success_threshold': 50.0}
  wanted = [
    [1.420144, 1.420144],
    [0.001453, 0.225057, 0.001453],
    -0.740613,
    -0.740613,
  ]
  expect(estimate(batch, 'planpo', outcome=outcome, **BOTH), batch, wanted)


def test_grpo_on_scores_that_reach_below_zero():
  """Scores -100, 0, 8, 50: mean -10.5, std 63.5689 (ENV-01)."""
  batch = [
    make_episodes.episode([1], score=s, member=i)
    for i, s in enumerate((-100.0, 0.0, 8.0, 50.0))
  ]
  outcome = {'outcome': 'graded', 'score_floor': -100.0}
  wanted = [-1.407922, 0.165175, 0.291023, 0.951723]
  expect(estimate(batch, 'grpo', outcome=outcome), batch, wanted)


@pytest.mark.parametrize('name', ['planpo', 'grpo'])
@pytest.mark.parametrize('count', [3, 5, 6, 7, 8])
def test_tied_group_is_exactly_zero(name, count):
  """Equal values that float32 cannot hold leave no residue (ALG-01, ALG-02).

  R/T = r/3 and R/L = r/7 are inexact too.
  """
  method = advantages.get(name).estimate
  for r in (0.1, 0.3, 0.35, 0.4, 0.6, 0.7, 0.9, 1.0, 10.0):
    batch = make_episodes.group([(True, [7, 7, 7])] * count)
    table = episodes.tabulate(batch, success_return=r)
    assert not np.any(method(table, progress=0.3)), r
  batch = make_episodes.group([(False, [7, 7, 7])] * count)
  assert not np.any(method(episodes.tabulate(batch), progress=0.3))


@pytest.mark.parametrize('stat', ['trajectory', 'turn'])
def test_nearly_tied_values_are_told_apart(stat):
  """The guard against ties keeps a true difference of one in 500 tokens.

  R^S = .02 and .01996: eps takes a little off the .7071.
  """
  batch = make_episodes.group([(True, [500]), (True, [501])])
  (shorter,), (longer,) = estimate(batch, 'planpo', stat=stat, **S_ONLY)
  assert shorter > 0.6 and longer < -0.6


@pytest.mark.parametrize('name', ['planpo', 'grpo'])
def test_group_shrunk_to_one_gives_zero(name):
  """Never NaN, never the raw return (ALG-05)."""
  batch = make_episodes.group([(True, [3, 9])])
  assert estimate(batch, name) == [[0.0, 0.0]]


def test_rejected_member_leaves_the_baseline():
  """Returns 1, 0 and an empty 10: .7071, -.7071 (ALG-06, ALG-07)."""
  batch = [
    make_episodes.episode([4], score=10.0, member=0),
    make_episodes.episode([4], score=0.0, member=1),
    make_episodes.episode([0], score=100.0, member=2),
  ]
  actual = estimate(batch, 'grpo', outcome={'outcome': 'graded'})
  expect(actual, batch, [0.707106, -0.707106, 0.0])


def test_missing_member_leaves_the_baseline():
  """Three of four members are left, returns 1, 0, 1 (ROL-15)."""
  batch = make_episodes.group([(True, [2]), (False, [2]), (True, [2])])
  wanted = [0.57735, -1.154699, 0.57735]
  expect(estimate(batch, 'grpo'), batch, wanted)


@pytest.mark.parametrize('name', ['planpo', 'grpo'])
def test_invalid_turn_loses_the_penalty_after_normalising(name):
  """A group of failures: 0 everywhere, -0.1 on the invalid turn only."""
  batch = [
    make_episodes.episode([2, 3], valid=[True, False], member=0),
    make_episodes.episode([2, 3], member=1),
  ]
  wanted = [[0.0, -0.1], [0.0, 0.0]]
  expect(estimate(batch, name), batch, wanted)
  expect(estimate(batch, name, invalid_penalty=0.0), batch, [0.0, 0.0])


def test_success_can_rank_below_the_mean_and_stratified_mends_it():
  """T = 5 and 40 among 6 failures: A^E 2.455465, -.044645, -.401803 x 6."""
  members = [(True, [1] * 5), (True, [1] * 40)] + [(False, [1])] * 6
  batch = make_episodes.group(members)
  wanted = [2.455465, -0.044645] + [-0.401803] * 6
  expect(estimate(batch, 'planpo', **E_ONLY), batch, wanted)
  mended = estimate(batch, 'planpo', ae_mode='stratified', **E_ONLY)
  assert min(mended[1]) > 0 > max(mended[2])


def test_no_outcome_variance_is_where_planpo_differs():
  """GRPO is blind to T and L; PlanPO ranks fewer turns first, then tokens."""
  batch = make_episodes.group([(True, [4]), (True, [8]), (True, [4, 4])])
  assert estimate(batch, 'grpo') == [[0.0], [0.0], [0.0, 0.0]]
  (short,), (wordy,), (detour, _) = estimate(batch, 'planpo')
  assert short > wordy > detour


@pytest.mark.parametrize('seed', range(3))
def test_planpo_is_grpo_when_turns_and_lengths_are_equal(seed):
  """R/T is proportional to R, and A^S compares equal responses."""
  rng = np.random.default_rng(seed)
  members = [(bool(s), [6, 6, 6]) for s in rng.integers(0, 2, 8)]
  batch = make_episodes.group(members)
  np.testing.assert_allclose(
    estimate(batch, 'planpo'), estimate(batch, 'grpo'), atol=1e-5
  )


def test_flat_success_is_flat_all_when_all_succeed():
  batch = golden_batch('all_success')
  a = estimate(batch, 'planpo', as_group='flat_success')
  b = estimate(batch, 'planpo', as_group='flat_all')
  expect(a, batch, b)


@pytest.mark.parametrize('as_group', ['flat_all', 'turn_success', 'turn_all'])
def test_groups_do_not_leak_under_any_switch(as_group):
  """Another task's turns at the same place are not compared with these."""
  batch = golden_batch('mixed')
  beside = [*batch, *make_episodes.group([(True, [3, 5]), (True, [9])], 1)]
  alone = estimate(batch, 'planpo', as_group=as_group)
  expect(estimate(beside, 'planpo', as_group=as_group)[:4], batch, alone)


def test_diagnostics():
  """Three groups: mixed, all successes, all failures with an invalid turn.

  PlanPO tells the successes apart; the format penalty on the failure is no
  signal. One of 5 successes (40 turns) has a negative advantage.
  """
  batch = make_episodes.group(
    [(True, [2] * 5), (True, [2] * 40)] + [(False, [2])] * 6, 0
  )
  batch += make_episodes.group([(True, [2]), (True, [2]), (True, [2, 2])], 1)
  batch += [
    make_episodes.episode([2], group=2),
    make_episodes.episode([2], group=2, member=1, valid=[False]),
  ]
  table = episodes.tabulate(batch)
  values = advantages.diagnostics(
    table, advantages.get('planpo').estimate(table, progress=1.0)
  )
  assert values['advantage/groups_without_outcome_variance'] == pytest.approx(
    2 / 3
  )
  assert values['advantage/signal_without_outcome_variance'] == pytest.approx(
    1 / 2
  )
  assert values['advantage/successes_with_negative_advantage'] == pytest.approx(
    2 / 5
  )
  grpo_R = advantages.get('grpo').estimate(table, progress=1.0)
  values = advantages.diagnostics(table, grpo_R)
  assert values['advantage/signal_without_outcome_variance'] == 0
  real_R = np.asarray(grpo_R)[: table.turn_tokens_U.sum()]
  assert values['advantage/mean_abs'] == pytest.approx(
    np.abs(real_R).mean(), rel=1e-5
  )


def test_diagnostics_of_a_failing_step_are_finite():
  table = episodes.tabulate(make_episodes.group([(False, [1]), (False, [1])]))
  adv_R = advantages.get('planpo').estimate(table, progress=1.0)
  values = advantages.diagnostics(table, adv_R)
  assert values == {
    'advantage/groups_without_outcome_variance': 1.0,
    'advantage/signal_without_outcome_variance': 0.0,
    'advantage/successes_with_negative_efficiency': 0.0,
    'advantage/successes_with_negative_advantage': 0.0,
    'advantage/mean_abs': 0.0,
    'advantage/std_turn_01': 0.0,
  }


def test_registry_names_what_it_knows():
  assert {'grpo', 'planpo'} <= set(advantages.names())
  assert 'segments' not in advantages.names()
  assert advantages.traits('planpo').group
  defaults = advantages.hyperparameters('planpo')
  assert defaults['alpha_init'] == 0.1 and 'progress' not in defaults
  with pytest.raises(ValueError, match='gripo.*grpo, .*planpo'):
    advantages.get('gripo')
  with pytest.raises(TypeError, match='alpha_int.*alpha_init'):
    advantages.get('planpo', alpha_int=0.1)


@pytest.mark.parametrize(
  'chosen',
  [
    {'as_group': 'flat'},
    {'ae_mode': 'papers'},
    {'alpha_schedule': 'linear'},
    {'stat': 'episode'},
  ],
)
def test_bad_value_is_refused_before_the_first_rollout(chosen):
  (value,) = chosen.values()
  with pytest.raises(ValueError, match=value):
    advantages.get('planpo', **chosen)


def test_estimate_traces_without_the_registry():
  table = episodes.tabulate(golden_batch('mixed'))
  direct = jax.jit(planpo.estimate)(table, progress=0.2)
  bound = advantages.get('planpo').estimate(table, progress=0.2)
  np.testing.assert_array_equal(direct, bound)
