"""RLOO against golden, hand-worked and identity cases."""

import dataclasses

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from tests import make_episodes, test_advantages

estimate, expect = test_advantages.estimate, test_advantages.expect
roomy_buckets = test_advantages.roomy_buckets


@pytest.mark.parametrize('case', test_advantages.CASES)
def test_golden(case):
  batch = test_advantages.golden_batch(case)
  wanted = test_advantages.GOLDEN['cases'][case]['expected']['grpo']['A_rloo']
  expect(estimate(batch, 'rloo'), batch, wanted)


def test_leaves_one_out():
  """Returns 8, 2, 5 less the means of the others, 3.5, 6.5 and 5."""
  batch = [
    make_episodes.episode([2] * (i + 1), score=score, member=i)
    for i, score in enumerate((80.0, 20.0, 50.0))
  ]
  actual = estimate(batch, 'rloo', outcome={'outcome': 'graded'})
  expect(actual, batch, [4.5, -4.5, 0.0])


def test_leaves_one_turn_out():
  """Rows 8 | 2, 2 less the means of the others: 2 | 5, 5 (verl-agent)."""
  batch = [
    make_episodes.episode([2], score=80.0, member=0),
    make_episodes.episode([2, 2], score=20.0, member=1),
  ]
  outcome = {'outcome': 'graded'}
  actual = estimate(batch, 'rloo', outcome=outcome, stat='turn')
  expect(actual, batch, [6.0, -3.0])


def test_penalty_before_the_baseline():
  """Rows 10 | -.1, 0 of one and two turns.

  trajectory: mean (10 - .05) / 2 = 4.975, times 2 / (2 - 1): 10.05 | -10.15,
  -9.95. turn: less the means of the others: 10 + .05 | -.1 - 5, 0 - 4.95.
  """
  batch = test_advantages.invalid_batch()
  actual = estimate(batch, 'rloo', penalty='pre')
  expect(actual, batch, [[10.05], [-10.15, -9.95]])
  actual = estimate(batch, 'rloo', penalty='pre', stat='turn')
  expect(actual, batch, [[10.05], [-5.1, -4.95]])
  # After it: 10 | -10 - .1, -10.
  expect(estimate(batch, 'rloo'), batch, [[10.0], [-10.1, -10.0]])


def test_raw_group_of_one_keeps_its_return():
  batch = [make_episodes.episode([3, 9], success=True, valid=[True, False])]
  expect(estimate(batch, 'rloo', single='raw'), batch, [[10.0, 9.9]])
  actual = estimate(batch, 'rloo', single='raw', penalty='pre')
  expect(actual, batch, [[10.0, 9.9]])


def test_rewards_of_tokens_are_part_of_the_return():
  """The KL of an episode: 10 - 1 - 2 against 0 - .5: 7.5 and -7.5."""
  table = episodes.tabulate(make_episodes.group([(True, [1, 1]), (False, [2])]))
  reward_R = np.zeros(len(table.token_turn_R), np.float32)
  reward_R[:4] = [-1.0, -2.0, -0.5, 0.0]
  table = dataclasses.replace(table, token_reward_R=reward_R)
  adv_R = advantages.get('rloo').estimate(table, progress=1.0)
  np.testing.assert_allclose(adv_R[:4], [7.5, 7.5, -7.5, -7.5])


@pytest.mark.parametrize('size', [2, 3, 8])
def test_is_dr_grpo_times_n_over_n_less_one(size):
  rng = np.random.default_rng(size)
  batch = make_episodes.group(
    [(bool(i % 2), rng.integers(1, 9, 1 + i % 3)) for i in range(size)]
  )
  dr_grpo = estimate(batch, 'grpo', use_std=False, invalid_penalty=0.0)
  wanted = [np.array(turns) * size / (size - 1) for turns in dr_grpo]
  expect(estimate(batch, 'rloo', invalid_penalty=0.0), batch, wanted)
