"""HGPO against hand-worked and identity cases."""

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from planpo_jax.advantages import hgpo
from tests import make_episodes, test_advantages, test_gigpo

A, B, C, D = range(4)
NO_STD = {'gamma': 0.5, 'use_std': False}


def three():
  """Success A B C, success D B C, failure A B C."""
  return [
    make_episodes.episode(
      [2, 3, 1], success=success, member=i, states=[first, B, C]
    )
    for i, (success, first) in enumerate([(True, A), (True, D), (False, A)])
  ]


def check(wanted, batch=None, **chosen):
  batch = batch or three()
  actual = test_advantages.estimate(batch, 'hgpo', **chosen)
  test_advantages.expect(actual, batch, wanted)


def test_levels_by_hand():
  """gamma = .5: G = 2.5, 5, 10 of a success, 0 of a failure.

  Level 0: A holds 2.5 and 0, so +-1.25; D one turn; B holds 5, 5, 0 and C 10,
  10, 0: 1.666667 twice and -3.333333; double for C.
  Level 1: A B holds 5 and 0: +-2.5; D B one turn; B C as C alone.
  Level 2: A B C holds 10 and 0: +-5; D B C one turn.
  Weights 1, 2, 3 over the levels that a turn shares:
    success A B C: 1.25; (1.666667 + 2 x 2.5)/3;
                   (3.333333 + 2 x 3.333333 + 3 x 5)/6
    success D B C: 0; 1.666667; (3.333333 + 2 x 3.333333)/3
    failure A B C: -1.25; (-3.333333 - 2 x 2.5)/3;
                   (-6.666667 - 2 x 6.666667 - 3 x 5)/6
  """
  check(
    [
      [1.25, 2.222222, 4.166667],
      [0.0, 1.666667, 3.333333],
      [-1.25, -2.777778, -5.833333],
    ],
    **NO_STD,
  )


def test_levels_by_hand_with_deviation():
  """Population deviations: +-1 of two values; of three .707107 twice and
  -1.414214. So (.707107 + 2)/3, (3 x .707107 + 3)/6 and their likes."""
  z = 0.70710678
  check(
    [
      [1.0, (z + 2) / 3, (3 * z + 3) / 6],
      [0.0, z, z],
      [-1.0, (-2 * z - 2) / 3, (-6 * z - 3) / 6],
    ],
    gamma=0.5,
  )


def test_sample_deviation():
  """ddof = 1: two values give +-.707107, three .577350 and -1.154701."""
  z, y = 0.70710678, 0.57735027
  check(
    [
      [z, (y + 2 * z) / 3, (3 * y + 3 * z) / 6],
      [0.0, y, y],
      [-z, (-2 * y - 2 * z) / 3, (-6 * y - 3 * z) / 6],
    ],
    gamma=0.5,
    ddof=1,
  )


@pytest.mark.parametrize(
  ('chosen', 'second', 'third'),
  [
    ({'alpha': 0.0}, (1.666667 + 2.5) / 2, (3.333333 * 2 + 5) / 3),
    ({'alpha': 2.0}, (1.666667 + 4 * 2.5) / 5, (3.333333 * 5 + 9 * 5) / 14),
    (
      {'weight_offset': 2.0},
      (2 * 1.666667 + 3 * 2.5) / 5,
      (3.333333 * 5 + 4 * 5) / 9,
    ),
    ({'history': 1}, (1.666667 + 2 * 2.5) / 3, 3.333333),
    ({'history': 0}, 1.666667, 3.333333),
  ],
)
def test_weights(chosen, second, third):
  """The levels of `test_levels_by_hand`, weighed otherwise."""
  actual = test_advantages.estimate(three(), 'hgpo', **NO_STD, **chosen)
  np.testing.assert_allclose(actual[0], [1.25, second, third], atol=1e-5)


def test_weights_over_all_levels():
  """The sums of `test_levels_by_hand`, all over 6."""
  check(
    [
      [1.25 / 6, 6.666667 / 6, 25 / 6],
      [0.0, 1.666667 / 6, 10 / 6],
      [-1.25 / 6, -8.333333 / 6, -35 / 6],
    ],
    weights_over='all',
    **NO_STD,
  )


@pytest.mark.parametrize(
  ('weights_over', 'share'), [('shared', 1 / 3), ('nonzero', 1.0)]
)
def test_tied_level(weights_over, share):
  """Successes A C twice, failure D C: level 0 of C gives 3.333333 twice and
  -6.666667; level 1 ties the successes at 0, which is a level of weight 2 or
  none; the failure is alone on it. A ties, D is alone.
  """
  batch = [
    make_episodes.episode([1, 1], success=True, states=[A, C]),
    make_episodes.episode([1, 1], success=True, member=1, states=[A, C]),
    make_episodes.episode([1, 1], member=2, states=[D, C]),
  ]
  success = [0.0, 3.333333 * share]
  check(
    [success, success, [0.0, -6.666667]],
    batch,
    weights_over=weights_over,
    **NO_STD,
  )


def test_episode_as_one_more_level():
  """R = 10, 10, 0: A^E = 3.333333 twice and -6.666667, of weight 1."""
  e = 3.333333
  check(
    [
      [(1.25 + e) / 2, (6.666667 + e) / 4, (25 + e) / 7],
      [e, (1.666667 + e) / 2, (10 + e) / 4],
      [(-1.25 - 2 * e) / 2, (-8.333333 - 2 * e) / 4, (-35 - 2 * e) / 7],
    ],
    base_group=True,
    **NO_STD,
  )


def test_base_group_keeps_the_deviation_of_grpo():
  """No state recurs: only the episode is left, with ddof = 1."""
  batch = test_gigpo.random_batch(2, num_states=None)
  actual = test_advantages.estimate(batch, 'hgpo', base_group=True)
  wanted = test_advantages.estimate(batch, 'grpo')
  np.testing.assert_allclose(
    np.concatenate(actual), np.concatenate(wanted), atol=1e-6
  )


def test_preset_of_verl_agent():
  """`test_levels_by_hand_with_deviation` with weights 2, 3, 4."""
  preset = advantages.presets()['hgpo_verl_parity']
  chosen = {
    key.removeprefix('advantage.hgpo.'): value
    for key, value in preset.items()
    if key != 'advantage.name'
  }
  z = 0.70710678
  check(
    [
      [1.0, (2 * z + 3) / 5, (5 * z + 4) / 9],
      [0.0, z, z],
      [-1.0, (-4 * z - 3) / 5, (-10 * z - 4) / 9],
    ],
    gamma=0.5,
    **chosen,
  )


def test_penalty_inside_the_return():
  """Two failures in one state, one invalid: G = -.1, 0 gives -+.05."""
  batch = [
    make_episodes.episode([3], valid=[False], states=[A]),
    make_episodes.episode([3], member=1, states=[A]),
  ]
  check([-0.05, 0.05], batch, penalty='pre', use_std=False)
  check([-0.1, 0.0], batch, use_std=False)


def test_group_of_one_raw_compares_its_visits():
  """A B A B, gamma = .5: G = 1.25, 2.5, 5, 10. Level 0: A -+1.875, B -+3.75;
  level 1: A B holds 2.5 and 10, -+3.75; B A is seen once, as is level 2."""
  batch = [
    make_episodes.episode([1] * 4, success=True, states=[A, B, A, B]),
  ]
  check([[-1.875, -3.75, 1.875, 3.75]], batch, single='raw', **NO_STD)
  check([0.0], batch, **NO_STD)


def test_history_ends_where_the_episode_begins():
  """Groups by hand: turns without k turns before them have no level k.

  The B that opens the second episode follows the first one's B in the table.
  A B is a group wherever it stands, but not in the other task.
  """
  batch = [
    make_episodes.episode([1, 1], states=[A, B]),
    make_episodes.episode([1, 1], member=1, states=[B, B]),
    make_episodes.episode([1, 1, 1], member=2, states=[C, A, B]),
    make_episodes.episode([1, 1, 1], member=3, states=[A, A, A]),
    make_episodes.episode([1, 1], group=1, states=[A, B]),
  ]
  table = episodes.tabulate(batch)
  num_U = len(table.turn_tokens_U)
  level = np.asarray(hgpo.history_groups(table, 2)[1])
  ab, bb, ca, ab_later, aa, aa_again, ab_elsewhere = level[
    [1, 3, 5, 6, 8, 9, 11]
  ]
  assert ab == ab_later and aa == aa_again
  assert len({ab, bb, ca, aa, ab_elsewhere}) == 5
  assert max(ab, bb, ca, aa, ab_elsewhere) < num_U
  assert (level[[0, 2, 4, 7, 10]] == num_U).all()
  assert (level[12:] == num_U).all()


@pytest.mark.parametrize('seed', range(3))
def test_groups_are_equal_runs_of_states(seed):
  """Against tuples of states; an episode without tokens is in none."""
  batch = test_gigpo.random_batch(seed, num_states=2)
  batch.append(make_episodes.episode([0, 0], member=9, states=[0, 1]))
  table = episodes.tabulate(batch)
  num_U = len(table.turn_tokens_U)
  for k, group_U in enumerate(hgpo.history_groups(table, 4)):
    runs = [
      (episode.task, *(turn.state_key for turn in episode.turns[t - k : t + 1]))
      if t >= k and episode.member != 9
      else None
      for episode in batch
      for t in range(len(episode.turns))
    ]
    ids = np.asarray(group_U)[: len(runs)].tolist()
    assert [i == num_U for i in ids] == [run is None for run in runs]
    assert len(set(zip(ids, runs, strict=True))) == len(set(runs))
    assert len(set(ids)) == len(set(runs))


@pytest.mark.parametrize('ddof', [0, 1])
@pytest.mark.parametrize('seed', range(2))
def test_without_history_it_is_the_part_of_the_turn_of_gigpo(seed, ddof):
  batch = test_gigpo.random_batch(seed, num_states=3)
  actual = test_advantages.estimate(batch, 'hgpo', history=0, ddof=ddof)
  both, episode = (
    test_advantages.estimate(
      batch, 'gigpo', step_weight=w, ddof=ddof, invalid_penalty=0.0
    )
    for w in (1.0, 0.0)
  )
  penalty = np.concatenate([[t.valid for t in e.turns] for e in batch]) - 1
  wanted = np.concatenate(both) - np.concatenate(episode) + 0.1 * penalty
  np.testing.assert_allclose(np.concatenate(actual), wanted, atol=1e-5)


def test_a_large_alpha_leaves_the_deepest_shared_level():
  """Levels of `test_levels_by_hand`; the success D B C has none of level 2."""
  actual = test_advantages.estimate(three(), 'hgpo', alpha=40.0, **NO_STD)
  wanted = [[1.25, 2.5, 5], [0, 1.666667, 3.333333], [-1.25, -2.5, -5]]
  np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_where_no_state_recurs_there_is_nothing():
  batch = test_gigpo.random_batch(0, num_states=None)
  actual = test_advantages.estimate(batch, 'hgpo', invalid_penalty=0.0)
  assert not np.any(np.concatenate(actual))


def test_history_past_the_longest_episode_adds_nothing():
  """Successes of 3 and 2 turns and a failure of 3, in one state: level 2 holds
  10 and 0, level 3 no turn."""
  batch = [
    make_episodes.episode(
      [1] * turns, success=success, member=i, states=[A] * turns
    )
    for i, (success, turns) in enumerate([(True, 3), (True, 2), (False, 3)])
  ]
  one, two, six = (
    np.concatenate(test_advantages.estimate(batch, 'hgpo', history=k))
    for k in (1, 2, 6)
  )
  np.testing.assert_allclose(two, six, atol=1e-6)
  assert np.abs(one - two).max() > 0.01


@pytest.mark.parametrize(
  'chosen',
  [{'history': -1}, {'weight_offset': 0.0}, {'weights_over': 'some'}],
)
def test_bad_value_is_refused_before_the_first_rollout(chosen):
  ((name, value),) = chosen.items()
  with pytest.raises(ValueError, match=f'{name}=.?{value}'):
    advantages.get('hgpo', **chosen)
