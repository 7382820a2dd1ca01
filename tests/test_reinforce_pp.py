"""REINFORCE++ against hand-worked and identity cases."""

import dataclasses

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from tests import make_episodes, test_advantages

estimate, expect = test_advantages.estimate, test_advantages.expect
roomy_buckets = test_advantages.roomy_buckets


def with_rewards(batch, rewards):
  table = episodes.tabulate(batch)
  reward_R = np.zeros(len(table.token_turn_R), np.float32)
  reward_R[: len(rewards)] = rewards
  return dataclasses.replace(table, token_reward_R=reward_R)


def tokens(table, **chosen):
  """Returns the advantages of all real tokens."""
  method = advantages.get('reinforce_pp', **chosen).estimate
  return np.asarray(method(table, progress=1.0))[: table.turn_tokens_U.sum()]


def test_whitened_over_tokens():
  """10 on one token, 0 on two and one: mean 2.5, std 5 (ddof 1).

  Long responses weigh more, and other tasks are compared too.
  """
  batch = [
    make_episodes.episode([1], success=True, group=0),
    make_episodes.episode([2], group=0, member=1),
    make_episodes.episode([1], group=1),
  ]
  expect(estimate(batch, 'reinforce_pp'), batch, [1.5, -0.5, -0.5])


def test_one_token_an_episode_gives_whitened_returns():
  scores = np.array([100.0, 30.0, 0.0, 55.0])
  batch = [
    make_episodes.episode([1], score=score, group=i)
    for i, score in enumerate(scores)
  ]
  returns = scores / 10
  wanted = (returns - returns.mean()) / returns.std(ddof=1)
  outcome = {'outcome': 'graded'}
  expect(estimate(batch, 'reinforce_pp', outcome=outcome), batch, wanted)


def test_rewards_of_tokens_are_summed_to_the_end_of_their_response():
  """To go: 10 + 1 + 2, 10 + 2 | 10 + 4 in the first episode, 0 - 3 in another.

  Mean 36 / 4 = 9, squares 16 + 9 + 25 + 144 = 194.
  """
  batch = make_episodes.group([(True, [2, 1]), (False, [1])])
  table = with_rewards(batch, [1.0, 2.0, 4.0, -3.0])
  wanted = np.array([4.0, 3.0, 5.0, -12.0]) / np.sqrt(194 / 3)
  np.testing.assert_allclose(tokens(table), wanted, rtol=1e-5)


def test_rewards_on_padding_change_nothing():
  table = with_rewards(
    make_episodes.group([(True, [2]), (False, [3])]), [0.1, 0.2, 0.3, 0.4, 0.5]
  )
  wanted = tokens(table)
  reward_R = np.array(table.token_reward_R)
  reward_R[5:] = 7.0
  table = dataclasses.replace(table, token_reward_R=reward_R)
  np.testing.assert_array_equal(tokens(table), wanted)


def test_baseline_of_the_group():
  """Returns 10, 0 | 10, 10, 0: 5, -5 | 3.333 x 2, -6.667, a token each.

  Their mean is 0, squares 25 x 2 + 11.111 x 2 + 44.444 = 116.667, over 4.
  """
  batch = make_episodes.group([(True, [1]), (False, [1])])
  batch += make_episodes.group([(True, [1]), (True, [1]), (False, [1])], 1)
  wanted = np.array([5, -5, 10 / 3, 10 / 3, -20 / 3]) / np.sqrt(350 / 12)
  actual = estimate(batch, 'reinforce_pp', baseline='group')
  expect(actual, batch, wanted)


def test_baseline_is_of_returns_and_not_of_token_rewards():
  """Returns 10 - 5, 0 - 5 and 1, 3 more to go: 6, -2, mean 2, std sqrt(32)."""
  table = with_rewards(
    make_episodes.group([(True, [1]), (False, [1])]), [1.0, 3.0]
  )
  wanted = np.array([4.0, -4.0]) / np.sqrt(32)
  np.testing.assert_allclose(tokens(table, baseline='group'), wanted, rtol=1e-5)


def test_alone_in_its_group_there_is_no_baseline():
  """It gets 0, penalty included, and the others what they get without it.

  5, -5 on one and three tokens: mean -2.5, squares 56.25 + 3 * 6.25, std 5.
  """
  batch = make_episodes.group([(True, [1]), (False, [3])])
  batch += [make_episodes.episode([7], success=True, group=1, valid=[False])]
  actual = estimate(batch, 'reinforce_pp', baseline='group')
  expect(actual, batch, [1.5, -0.5, 0.0])
  # Without a baseline it is compared: 10 on 8 tokens, 0 on 3.
  ((first,), (second,), (last,)) = estimate(batch, 'reinforce_pp')
  np.testing.assert_allclose(
    first, (10 - 80 / 11) / np.sqrt(100 * 8 * 3 / 11 / 10), atol=1e-5
  )
  assert second < 0 and last == pytest.approx(first - 0.1, abs=1e-6)


def test_penalties():
  """Rows 10 | -.1, 0, a token each: mean 3.3, std 5.802586, see GRPO's."""
  batch = [
    make_episodes.episode([1], success=True),
    make_episodes.episode([1, 1], valid=[False, True], member=1),
  ]
  actual = estimate(batch, 'reinforce_pp', penalty='pre')
  expect(actual, batch, [[1.154657], [-0.585946, -0.568712]])
  # After: mean 10/3, std sqrt(100/3).
  actual = estimate(batch, 'reinforce_pp')
  expect(actual, batch, [[1.154701], [-0.677350, -0.577350]])
  # Before it with the baseline: 5.025 | -5.075, -4.975, centred on the tokens:
  # mean -1.675, squares 44.89 + 11.56 + 10.89.
  actual = estimate(batch, 'reinforce_pp', penalty='pre', baseline='group')
  expect(actual, batch, [[1.154657], [-0.585946, -0.568712]])


@pytest.mark.parametrize('baseline', ['none', 'group'])
def test_equal_returns_are_exactly_zero(baseline):
  """Whatever float32 makes of r: no residue is scaled up."""
  method = advantages.get('reinforce_pp', baseline=baseline, eps=0.0).estimate
  for r in (0.1, 0.3, 0.7, 10.0):
    for success in (True, False):
      batch = make_episodes.group([(success, [7, 7, 7])] * 7)
      table = episodes.tabulate(batch, success_return=r)
      assert not np.any(method(table, progress=1.0)), r


def test_one_token_in_all_is_zero():
  batch = [make_episodes.episode([1], success=True)]
  assert estimate(batch, 'reinforce_pp') == [[0.0]]


def test_unknown_baseline_is_refused():
  with pytest.raises(ValueError, match='mean.*none, group'):
    advantages.get('reinforce_pp', baseline='mean')
