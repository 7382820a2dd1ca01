"""PlanPO, GRPO and the shared kernels: golden, hand-worked, identity cases."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax import advantages, episodes
from planpo_jax.advantages import grpo, planpo, segments
from tests import make_episodes

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden/advantages.json').read_text()
)
CASES = list(GOLDEN['cases'])


@pytest.fixture(autouse=True)
def roomy_buckets(monkeypatch):
  """One size for nearly all tables here, for each size is compiled anew."""
  bucket = episodes.bucket
  monkeypatch.setattr(
    episodes, 'bucket', lambda count, minimum=1: bucket(count, 2 * minimum)
  )


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
  'A_E_unconditional': E_ONLY | {'conditional': False},
  'A_S_unconditional': S_ONLY | {'conditional': False},
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
  """Scores -100, 0, 8, 50: mean -10.5, std 63.5689."""
  batch = [
    make_episodes.episode([1], score=s, member=i)
    for i, s in enumerate((-100.0, 0.0, 8.0, 50.0))
  ]
  outcome = {'outcome': 'graded', 'score_floor': -100.0}
  wanted = [-1.407922, 0.165175, 0.291023, 0.951723]
  expect(estimate(batch, 'grpo', outcome=outcome), batch, wanted)


@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo'])
@pytest.mark.parametrize('count', [3, 5, 6, 7, 8])
def test_tied_group_is_exactly_zero(name, count):
  """Equal values that float32 cannot hold leave no residue.

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


@pytest.mark.parametrize('stat', ['trajectory', 'turn'])
@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo'])
def test_tied_group_without_eps_is_exactly_zero(name, stat):
  """Nothing but the guard is between a residue and a full size.

  Returns 1, 0 and -100.
  """
  settings = {'stat': stat} if name == 'rloo' else {'stat': stat, 'eps': 0.0}
  method = advantages.get(name, **settings).estimate
  for count, score in ((8, 10.0), (8, 0.0), (4, -100.0)):
    batch = [
      make_episodes.episode([7, 7, 7], score=score, member=i)
      for i in range(count)
    ]
    table = episodes.tabulate(batch, outcome='graded', score_floor=-100.0)
    assert not np.any(method(table, progress=0.3))


@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo'])
def test_group_shrunk_to_one_gives_zero(name):
  """Never NaN, never the raw return, nor the penalty."""
  batch = [make_episodes.episode([3, 9], success=True, valid=[True, False])]
  assert estimate(batch, name) == [[0.0, 0.0]]
  assert estimate(batch, name, penalty='pre') == [[0.0, 0.0]]


@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo'])
def test_return_of_an_empty_response_goes_nowhere(name):
  """A success without a token leaves peers at 0 and padding too."""
  batch = make_episodes.group([(True, [0]), (False, [3]), (False, [3])])
  assert estimate(batch, name) == [[], [0.0], [0.0]]


def test_rejected_member_leaves_the_baseline():
  """Returns 1, 0 and an empty 10: .7071, -.7071."""
  batch = [
    make_episodes.episode([4], score=10.0, member=0),
    make_episodes.episode([4], score=0.0, member=1),
    make_episodes.episode([0], score=100.0, member=2),
  ]
  outcome = {'outcome': 'graded'}
  actual = estimate(batch, 'grpo', outcome=outcome)
  expect(actual, batch, [0.707106, -0.707106, 0.0])
  actual = estimate(batch, 'rloo', outcome=outcome)
  expect(actual, batch, [1.0, -1.0, 0.0])


def test_missing_member_leaves_the_baseline():
  """Three of four members are left, returns 1, 0, 1."""
  batch = make_episodes.group([(True, [2]), (False, [2]), (True, [2])])
  wanted = [0.57735, -1.154699, 0.57735]
  expect(estimate(batch, 'grpo'), batch, wanted)


@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo'])
def test_invalid_turn_loses_the_penalty_after_normalising(name):
  """A group of failures: 0 everywhere, -0.1 on the invalid turn only."""
  batch = [
    make_episodes.episode([2, 3], valid=[True, False], member=0),
    make_episodes.episode([2, 3], member=1),
  ]
  wanted = [[0.0, -0.1], [0.0, 0.0]]
  expect(estimate(batch, name), batch, wanted)
  expect(estimate(batch, name, invalid_penalty=0.0), batch, [0.0, 0.0])


def invalid_batch():
  """One turn and a success; two turns and a failure, the first invalid."""
  return [
    make_episodes.episode([4], success=True, member=0),
    make_episodes.episode([4, 4], valid=[False, True], member=1),
  ]


@pytest.mark.parametrize('name', ['planpo', 'grpo'])
def test_penalty_before_normalising(name):
  """Rows 10 | -.1, 0. T = 1 and R/T = R in the success, so PlanPO is GRPO.

  trajectory: weights 1 | 1/2, 1/2. Mean (10 - .05) / 2 = 4.975, squares
  25.250625 + (25.755625 + 24.750625) / 2 = 50.50375 = std^2 (ddof 1), std
  7.106599: .707089 | -.714125, -.700053.
  turn: mean 3.3, squares 44.89 + 11.56 + 10.89 = 67.34, std sqrt(33.67) =
  5.802586: 1.154657 | -.585946, -.568712.
  """
  batch = invalid_batch()
  wanted = [[0.707089], [-0.714125, -0.700053]]
  expect(estimate(batch, name, penalty='pre'), batch, wanted)
  wanted = [[1.154657], [-0.585946, -0.568712]]
  expect(estimate(batch, name, penalty='pre', stat='turn'), batch, wanted)
  wanted = [[5.025], [-5.075, -4.975]]
  actual = estimate(batch, name, penalty='pre', use_std=False)
  expect(actual, batch, wanted)


@pytest.mark.parametrize('name', ['planpo', 'grpo'])
def test_penalty_before_normalising_blows_up_among_failures(name):
  """One of ten turns is invalid, nothing succeeds.

  turn: mean -.01, squares 9 * .0001 + .0081 = .009; ddof 0: std .03, so .333
  and -3. trajectory: every weight 1/5, squares .0018, two episodes; ddof 1:
  std .042426, so .235702 and -2.121320.
  """
  batch = [
    make_episodes.episode([2] * 5, valid=[True] * 4 + [False], member=0),
    make_episodes.episode([2] * 5, member=1),
  ]
  settings = {'penalty': 'pre', 'eps': 0.0}
  wanted = [[1 / 3] * 4 + [-3.0], 1 / 3]
  actual = estimate(batch, name, stat='turn', ddof=0, **settings)
  expect(actual, batch, wanted)
  wanted = [[0.235702] * 4 + [-2.121320], 0.235702]
  expect(estimate(batch, name, **settings), batch, wanted)


@pytest.mark.parametrize('stat', ['trajectory', 'turn'])
@pytest.mark.parametrize('name', ['planpo', 'grpo', 'rloo', 'reinforce_pp'])
def test_where_the_penalty_comes_is_nothing_to_valid_turns(name, stat):
  batch = golden_batch('mixed')
  before = estimate(batch, name, stat=stat, penalty='pre')
  expect(estimate(batch, name, stat=stat), batch, before)


def test_raw_group_of_one():
  """A return of 10, R/T = 5, over 1 + eps; the second turn is invalid."""
  batch = [make_episodes.episode([3, 9], success=True, valid=[True, False])]
  raw = {'single': 'raw', 'eps': 0.25}
  expect(estimate(batch, 'grpo', **raw), batch, [[8.0, 7.9]])
  expect(estimate(batch, 'grpo', penalty='pre', **raw), batch, [[8.0, 7.92]])
  actual = estimate(batch, 'grpo', use_std=False, **raw)
  expect(actual, batch, [[10.0, 9.9]])
  expect(estimate(batch, 'planpo', **raw, **E_ONLY), batch, [[4.0, 3.9]])


def test_raw_group_of_one_that_is_two_turns():
  """Under `turn` they are two observations, and tied; one turn is raw."""
  raw = {'single': 'raw', 'stat': 'turn', 'use_std': False}
  batch = make_episodes.group([(True, [3, 9])])
  assert estimate(batch, 'grpo', **raw) == [[0.0, 0.0]]
  batch = make_episodes.group([(True, [3])])
  assert estimate(batch, 'grpo', **raw) == [[10.0]]


def test_turns_of_valid_actions():
  """T of 2 (of 4), 4 and at least 1 (of 2 invalid): R/T = 5, 2.5, 10.

  Mean 5.833333, squares .694444 + 11.111111 + 17.361111, std 3.818813.
  """
  batch = [
    make_episodes.episode([3] * len(valid), success=True, valid=valid, member=i)
    for i, valid in enumerate(
      ([True, False, False, True], [True] * 4, [False, False])
    )
  ]
  settings = E_ONLY | {'turns': 'valid_action', 'invalid_penalty': 0.0}
  wanted = [-0.218218, -0.872872, 1.091089]
  expect(estimate(batch, 'planpo', **settings), batch, wanted)


def test_floor_of_lengths():
  """L = 20, 20 (of none), 40 with a floor of 20: R^S = .5, .5, .25.

  Mean .416667, squares 2 * .006944 + .027778 = .041667, std .144338. A second
  member has failed.
  """
  batch = make_episodes.group([(True, [10, 0, 40]), (False, [5])])
  wanted = [[0.577350, 0.577350, -1.154700], 0.0]
  actual = estimate(batch, 'planpo', len_floor=20, eps=0.0, **S_ONLY)
  expect(actual, batch, wanted)
  with pytest.raises(ValueError, match='len_floor=-1'):
    advantages.get('planpo', len_floor=-1)


def test_truncated_responses_leave_the_comparison():
  """R^S = 1 and .5 are left of 1, .5, .25; the last was cut off at 40."""
  batch = make_episodes.group([(True, [10, 20, 40]), (False, [5])])
  turns = list(batch[0].turns)
  turns[2] = dataclasses.replace(turns[2], truncated=True)
  batch[0] = dataclasses.replace(batch[0], turns=tuple(turns))
  settings = S_ONLY | {'eps': 0.0}
  wanted = [[0.707107, -0.707107, 0.0], 0.0]
  actual = estimate(batch, 'planpo', drop_truncated=True, **settings)
  expect(actual, batch, wanted)
  # Mean .583333, std .381881: by default it stays, as the longest.
  wanted = [[1.091089, -0.218218, -0.872872], 0.0]
  expect(estimate(batch, 'planpo', **settings), batch, wanted)


def test_unconditional_shaping_reads_the_full_return():
  """T = 1 (failure) and 2: 4/1 and 4/2 without std: 1 and -1."""
  batch = make_episodes.group([(False, [3]), (True, [3, 3])])
  settings = E_ONLY | {'conditional': False, 'use_std': False}
  actual = estimate(batch, 'planpo', full_return=4.0, **settings)
  expect(actual, batch, [1.0, -1.0])


def test_overlong_penalty():
  """A limit of 10 with a buffer of 4: from 6 on (DAPO, equation 13)."""
  lengths = np.array([0, 6, 7, 8, 10, 11, 500])
  np.testing.assert_allclose(
    grpo.overlong(lengths, limit=10, buffer=4, penalty=2.0),
    [0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 2.0],
  )
  np.testing.assert_allclose(
    grpo.overlong(lengths, limit=10, buffer=0, penalty=2.0), [0.0] * 5 + [2] * 2
  )
  for buffer in (-1, 11):
    with pytest.raises(ValueError, match=f'overlong_buffer={buffer}'):
      advantages.get('grpo', overlong_limit=10, overlong_buffer=buffer)


def test_overlong_turn_loses_of_its_own_return():
  """Rows 10, 8 | 0, weights 1/2, 1/2 | 1: mean 4.5, and no std."""
  batch = make_episodes.group([(True, [6, 12]), (False, [6])])
  settings = {'overlong_limit': 10, 'overlong_buffer': 4, 'use_std': False}
  actual = estimate(batch, 'grpo', overlong_penalty=2.0, **settings)
  expect(actual, batch, [[5.5, 3.5], -4.5])
  # With the penalty of the format, before it: 10, 7.9 | 0, mean 4.475.
  turns = list(batch[0].turns)
  turns[1] = dataclasses.replace(turns[1], valid=False)
  batch[0] = dataclasses.replace(batch[0], turns=tuple(turns))
  actual = estimate(
    batch, 'grpo', overlong_penalty=2.0, penalty='pre', **settings
  )
  expect(actual, batch, [[5.525, 3.425], -4.475])


def test_rewards_of_tokens_are_part_of_the_return():
  """10 - .5 - .25 against 0 + .5 in two turns each: 4.375 from the mean."""
  batch = make_episodes.group([(True, [2, 1]), (False, [1, 2])])
  table = episodes.tabulate(batch)
  reward_R = np.zeros(len(table.token_turn_R), np.float32)
  reward_R[:6] = [-0.5, 0.0, -0.25, 0.5, 0.25, -0.25]
  table = dataclasses.replace(table, token_reward_R=reward_R)
  np.testing.assert_allclose(segments.episode_return(table)[:2], [9.25, 0.5])
  adv_R = advantages.get('grpo', use_std=False).estimate(table, progress=1.0)
  np.testing.assert_allclose(adv_R[:6], [4.375] * 3 + [-4.375] * 3)
  assert not advantages.traits('planpo').token_rewards


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


@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'use_std': False},
    {'stat': 'turn', 'ddof': 0},
    {'penalty': 'pre', 'single': 'raw'},
  ],
)
def test_planpo_is_grpo_on_returns_a_turn_up_to_lengths(settings):
  """A^E is GRPO of s R / T exactly, whatever the turns.

  A^S is 0 where all responses of successes are equally long, so then all of A.
  """
  rng = np.random.default_rng(1)
  batch = [
    make_episodes.episode(
      [4] * count,
      success=success,
      member=i,
      valid=rng.random(count) < 0.7,
    )
    for i, (success, count) in enumerate(
      zip(rng.random(8) < 0.6, rng.integers(1, 6, 8), strict=True)
    )
  ]
  table = episodes.tabulate(batch)
  turns_E = np.maximum(np.asarray(segments.episode_turns(table)), 1)
  per_turn = dataclasses.replace(
    table, episode_return_E=table.episode_return_E / turns_E
  )
  wanted = advantages.get('grpo', **settings).estimate(per_turn, progress=1.0)
  actual = advantages.get('planpo', **settings).estimate(table, progress=1.0)
  np.testing.assert_array_equal(actual, wanted)
  assert np.any(actual)


def test_stratified_is_grpo_when_successes_take_equal_turns():
  batch = make_episodes.group([(True, [4, 9])] * 3 + [(False, [4] * 5)] * 2)
  actual = estimate(batch, 'planpo', ae_mode='stratified', **E_ONLY)
  expect(actual, batch, estimate(batch, 'grpo'))


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
  """Four groups: mixed, successes, failures with an invalid turn, one alone.

  PlanPO tells the successes apart; the format penalty on the failure is no
  signal, and the last has nobody to be like. Of 6 successes, those of 40 and of
  2 turns are slow for their group; the first has a negative advantage.
  """
  batch = make_episodes.group(
    [(True, [2] * 5), (True, [2] * 40)] + [(False, [2])] * 6, 0
  )
  batch += make_episodes.group([(True, [2]), (True, [2]), (True, [2, 2])], 1)
  batch += [
    make_episodes.episode([2], group=2),
    make_episodes.episode([2], group=2, member=1, valid=[False]),
    make_episodes.episode([2], group=3, success=True),
  ]
  table = episodes.tabulate(batch)
  planpo_R, grpo_R = (
    advantages.get(name).estimate(table, progress=1.0)
    for name in ('planpo', 'grpo')
  )
  tied = 'advantage/groups_without_outcome_variance'
  taught = 'advantage/signal_without_outcome_variance'
  values = {
    name: advantages.group_diagnostics(
      table, advantages.get(name).signal(table, progress=1.0)
    )
    for name in ('planpo', 'grpo')
  }
  assert values['planpo'] == {tied: pytest.approx(2 / 3), taught: 1 / 2}
  assert values['grpo'] == {tied: pytest.approx(2 / 3), taught: 0}
  values = advantages.diagnostics(table, planpo_R)
  negative = 'advantage/successes_with_negative'
  assert values[f'{negative}_efficiency'] == pytest.approx(2 / 6)
  assert values[f'{negative}_advantage'] == pytest.approx(2 / 6)
  values = advantages.diagnostics(table, grpo_R)
  assert values[f'{negative}_efficiency'] == pytest.approx(2 / 6)
  assert values[f'{negative}_advantage'] == 0
  real_R = np.asarray(grpo_R)[: table.turn_tokens_U.sum()]
  assert values['advantage/mean_abs'] == pytest.approx(
    np.abs(real_R).mean(), rel=1e-5
  )


def test_spread_by_turn():
  """Turn means 1, 2, 3, 4 and 3, 6, 9: the fourth turn joins the third's span.

  Deviations 1 and 2, then that of 3, 9 and 4: sqrt(62/9) = 2.624669.
  """
  batch = make_episodes.group([(True, [1, 2, 1, 1]), (False, [1, 1, 2])])
  table = episodes.tabulate(batch)
  adv_R = np.zeros(len(table.token_turn_R), np.float32)
  adv_R[:9] = [1, 1, 3, 3, 4, 3, 6, 8, 10]
  values = advantages.diagnostics(table, adv_R)
  spread = {k: v for k, v in values.items() if 'std_turn' in k}
  assert spread == {
    'advantage/std_turn_01': pytest.approx(1.0),
    'advantage/std_turn_02': pytest.approx(2.0),
    'advantage/std_turn_03_04': pytest.approx(2.624669),
  }


def test_diagnostics_of_a_failing_step_are_finite():
  table = episodes.tabulate(make_episodes.group([(False, [1]), (False, [1])]))
  method = advantages.get('planpo')
  values = advantages.diagnostics(table, method.estimate(table, progress=1.0))
  values |= advantages.group_diagnostics(
    table, method.signal(table, progress=1.0)
  )
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
    {'turns': 'valid'},
    {'penalty': 'before'},
    {'single': 'one'},
  ],
)
def test_bad_value_is_refused_before_the_first_rollout(chosen):
  (value,) = chosen.values()
  with pytest.raises(ValueError, match=value):
    advantages.get('planpo', **chosen)


@pytest.mark.parametrize(
  'name,chosen,words',
  [
    ('gigpo', {'gamma': 95.0}, 'gigpo.gamma=95.0.*0, 1.*0.95'),
    ('hiper', {'lam_segment': -0.1}, 'lam_segment=-0.1'),
    ('planpo', {'eps': -6.0}, 'eps=-6.0 must be at least 0'),
    ('planpo', {'alpha_init': float('nan')}, 'alpha_init=nan.*finite'),
    ('grpo', {'invalid_penalty': float('inf')}, 'invalid_penalty=inf'),
    ('hgpo', {'stat': 'episode'}, "stat='episode'"),
  ],
)
def test_numbers_that_make_no_sense_are_refused(name, chosen, words):
  with pytest.raises(ValueError, match=words):
    advantages.get(name, **chosen)


def test_what_is_not_finite_shows():
  """A tie guard must not turn NaN into 0, which would look like no signal."""
  z_N = segments.normalise(
    np.array([1.0, np.nan, 2.0, 5.0, 6.0]),
    np.array([0, 0, 0, 1, 1]),
    num_segments=3,
  )
  assert np.isnan(z_N[:3]).any() and np.isfinite(z_N[3:]).all()
  taken_N = np.array([True, True, True, False])
  z_N = segments.whiten(np.array([1.0, np.nan, 2.0, 0.0]), taken_N)
  assert np.isnan(z_N[:3]).any() and z_N[3] == 0
  z_N = segments.whiten(np.array([1.0, 3.0, 2.0, np.nan]), taken_N)
  assert np.isfinite(z_N).all()


def test_estimate_traces_without_the_registry():
  table = episodes.tabulate(golden_batch('mixed'))
  direct = jax.jit(planpo.estimate)(table, progress=0.2)
  bound = advantages.get('planpo').estimate(table, progress=0.2)
  np.testing.assert_array_equal(direct, bound)


# Shared kernels.


def ragged_table():
  """Responses of 2, 0 | 0, 3 | 1 tokens: empty ones last and first."""
  return episodes.tabulate(
    make_episodes.group([(True, [2, 0]), (False, [0, 3]), (True, [1])])
  )


def test_ends_of_turns_and_episodes():
  table = ragged_table()
  rows = {
    'is_last_turn': (segments.is_last_turn, [0, 1, 0, 1, 1]),
    'is_first_token': (segments.is_first_token, [1, 0, 1, 0, 0, 1]),
    'is_last_token': (segments.is_last_token, [0, 1, 0, 0, 1, 1]),
    'of_episode': (segments.is_last_token_of_episode, [0, 1, 0, 0, 1, 1]),
  }
  for name, (function, wanted) in rows.items():
    actual = np.asarray(function(table)).astype(int)
    assert actual[: len(wanted)].tolist() == wanted, name
    assert not actual[len(wanted) :].any(), name
  episode_R = np.asarray(segments.token_episode(table))
  assert episode_R[:6].tolist() == [0, 0, 1, 1, 1, 2]
  assert (episode_R[6:] == len(table.episode_group_E)).all()


def test_ends_of_a_table_without_padding():
  """Two turns an episode, two tokens a turn, up to the end of the arrays."""
  table = ragged_table()
  table = dataclasses.replace(
    table,
    turn_episode_U=np.arange(32, dtype=np.int32) // 4,
    token_turn_R=np.arange(64, dtype=np.int32) // 2,
  )
  assert np.asarray(segments.is_last_turn(table)).tolist() == [0, 0, 0, 1] * 8
  assert np.asarray(segments.is_last_token(table)).tolist() == [0, 1] * 32
  ends = np.asarray(segments.is_last_token_of_episode(table))
  assert ends.tolist() == [0, 0, 0, 0, 0, 0, 0, 1] * 8


def test_sums_over_turns_and_episodes():
  table = ragged_table()
  value_R = np.ones(len(table.token_turn_R), np.float32)
  tokens_U = segments.turn_sum(table, value_R)
  assert np.asarray(tokens_U)[:6].tolist() == [2, 0, 0, 3, 1, 0]
  sums_E = np.asarray(segments.episode_sum(table, tokens_U))
  assert sums_E.tolist() == [2, 3, 1] + [0] * 13
  sums_E = np.asarray(segments.group_sum(table, np.arange(16)))
  assert sums_E.tolist() == [3, 3, 3] + [0] * 13


def test_reversed_sum():
  """y = 1 + .5 (2 + .5 * 3), 2 + .5 * 3, 3 + 0 * 4, 4: a cut after the 3."""
  x_N, decay_N = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, 0.5, 0, 0.5])
  actual = segments.reversed_sum(x_N, decay_N)
  np.testing.assert_allclose(actual, [2.75, 3.5, 3.0, 4.0])
  both_NC = segments.reversed_sum(
    jnp.stack([x_N, 2 * x_N], 1), jnp.stack([decay_N, 0 * decay_N], 1)
  )
  np.testing.assert_allclose(both_NC[:, 0], actual)
  np.testing.assert_allclose(both_NC[:, 1], 2 * x_N)


def test_return_of_turns():
  """Half of it is lost a turn: 2.5, 5, 10 and 0 for the failure."""
  batch = make_episodes.group([(True, [2, 3, 0]), (False, [2]), (True, [1])])
  actual = np.asarray(segments.turn_return(episodes.tabulate(batch), 0.5))
  assert actual[:5].tolist() == [2.5, 5.0, 10.0, 0.0, 10.0]
  assert not actual[5:].any()
  actual = np.asarray(segments.turn_return(episodes.tabulate(batch), 0.0))
  assert actual[:5].tolist() == [0.0, 0.0, 10.0, 0.0, 10.0]


def z(values, **settings):
  zeros = np.zeros(len(values), np.int32)
  settings = {'num_segments': 1, 'eps': 0.0} | settings
  return np.asarray(segments.normalise(np.array(values), zeros, **settings))


def test_normalise_survives_extremes():
  """1, 2, 3 give -1, 0, 1 at any scale and, evenly spaced, at any offset.

  Of 1e7 + 0, 200, 400, 600 a float32 sum is off by ones, squares of 1e-25
  vanish, those of 1e25 overflow.
  """
  for scale in (1e-25, 1.0, 1e25):
    np.testing.assert_allclose(
      z([scale, 2 * scale, 3 * scale]), [-1, 0, 1], atol=1e-6
    )
  wanted = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(5 / 3)
  values = 1e7 + np.array([0.0, 200.0, 400.0, 600.0])
  np.testing.assert_allclose(z(values), wanted, atol=1e-6)


def test_normalise_takes_ulps_for_a_tie():
  """An ulp apart, as equal values that were worked out in two ways."""
  values = np.full(7, 0.3, np.float32)
  values[3] = np.nextafter(values[3], np.float32(1))
  assert not z(values).any()
  assert not z(-values).any()


def test_normalise_needs_more_observations_than_ddof():
  assert z([1.0, 3.0], ddof=2).tolist() == [0.0, 0.0]
  np.testing.assert_allclose(z([1.0, 3.0], ddof=0), [-1.0, 1.0])
  # Three thirds are one observation, though float32 may add up to more.
  thirds = np.full(3, 1 / 3, np.float32)
  assert z([1.0, 2.0, 3.0], weight_N=thirds).tolist() == [0.0] * 3
  assert z([1.0, 2.0, 3.0], weight_N=thirds, ddof=0).tolist() == [0.0] * 3
  actual = z([1.0, 2.0, 4.0], weight_N=thirds, single='raw', eps=1.0)
  np.testing.assert_allclose(actual, [0.5, 1.0, 2.0])


def test_whiten():
  """1, 2, 6 of which padding takes no part: mean 3, std sqrt(7) (ddof 1)."""
  values = np.array([1.0, 99.0, 2.0, 6.0])
  taken = np.array([True, False, True, True])
  wanted = np.array([-2.0, 0.0, -1.0, 3.0])
  np.testing.assert_allclose(
    segments.whiten(values, taken), wanted / np.sqrt(7), rtol=1e-6
  )
  np.testing.assert_allclose(
    segments.whiten(values, taken, ddof=0, eps=2.0),
    wanted / np.sqrt(14 / 3 + 2),
    rtol=1e-6,
  )
  tied = np.full(4, 0.3, np.float32)
  tied[2] = np.nextafter(tied[2], np.float32(1))
  assert not np.any(segments.whiten(tied, taken, eps=0.0))
  assert not np.any(segments.whiten(values, values > 50))
  assert not np.any(segments.whiten(values, values > 100))
