"""tabulate: the flat form of episodes."""

import dataclasses

import jax
import numpy as np
import pytest

from planpo_jax import episodes
from tests import make_episodes


def test_layout_of_two_groups():
  """Ids, order and padding of 3 episodes, 4 turns, 2 + 1 + 3 + 1 tokens."""
  batch = [
    make_episodes.episode([2, 1], success=True, states=[7, 7]),
    make_episodes.episode([3], group=1, states=[7], valid=[False]),
    make_episodes.episode([1], member=1, states=[7], score=-100.0),
  ]
  table = episodes.tabulate(batch)
  num_E, num_U, num_R = 8, 32, 256
  assert table.episode_group_E.tolist() == [0, 1, 0] + [num_E] * 5
  assert table.episode_return_E[:3].tolist() == [10.0, 0.0, 0.0]
  assert table.episode_success_E.tolist() == [True] + [False] * 7
  assert table.episode_score_E[:3].tolist() == [100.0, 0.0, -100.0]
  assert table.turn_episode_U.tolist() == [0, 0, 1, 2] + [num_E] * 28
  assert table.turn_index_U[:4].tolist() == [0, 1, 0, 0]
  assert table.turn_tokens_U.tolist() == [2, 1, 3, 1] + [0] * 28
  assert table.turn_valid_U[:4].tolist() == [True, True, False, True]
  # The same observation in another task is another state.
  assert table.turn_state_U.tolist() == [0, 0, 1, 0] + [num_U] * 28
  assert table.token_turn_R[:8].tolist() == [0, 0, 1, 2, 2, 2, 3, num_U]
  assert table.token_turn_R.shape == table.token_role_R.shape == (num_R,)
  assert (table.token_turn_R[7:] == num_U).all()
  assert table.value_RC is table.token_reward_R is table.turn_switch_U is None


@pytest.mark.parametrize('ending', ['TERMINATED', 'TRUNCATED', 'DEADLINE'])
def test_what_a_limit_ended_is_marked(ending):
  """Turns, context or time; not the environment."""
  ending = episodes.Ending[ending]
  batch = [
    make_episodes.episode([1]),
    make_episodes.episode([1], member=1, ending=ending),
  ]
  table = episodes.tabulate(batch)
  ended = ending is episodes.Ending.TERMINATED
  assert table.episode_truncated_E.tolist() == [False, not ended] + [False] * 6


def test_truncated_turn_is_marked():
  episode = make_episodes.episode([2, 1])
  cut = dataclasses.replace(episode.turns[1], truncated=True)
  episode = dataclasses.replace(episode, turns=(episode.turns[0], cut))
  table = episodes.tabulate([episode])
  assert np.flatnonzero(table.turn_truncated_U).tolist() == [1]


def test_graded_outcome():
  """Score 60 of 100 with threshold 50 is a success worth 6; -100 is worth 0."""
  batch = [
    make_episodes.episode([1], score=s, success=s == 100)
    for s in (100.0, 60.0, -100.0, 30.0)
  ]
  table = episodes.tabulate(batch, outcome='graded', success_threshold=50)
  np.testing.assert_allclose(table.episode_return_E[:4], [10, 6, 0, 3])
  assert table.episode_success_E[:4].tolist() == [True, True, False, False]
  table = episodes.tabulate(batch, outcome='graded', score_floor=-100)
  np.testing.assert_allclose(table.episode_return_E[:4], [10, 6, -10, 3])
  assert table.episode_success_E[:4].tolist() == [True, False, False, False]


def test_partial_credit_is_no_success_by_default():
  table = episodes.tabulate([make_episodes.episode([1], score=30.0)])
  assert not table.episode_success_E[0] and table.episode_return_E[0] == 0


def test_episode_without_tokens_belongs_to_no_group():
  batch = make_episodes.group([(True, [2]), (False, [1]), (True, [0, 0])])
  table = episodes.tabulate(batch)
  assert table.episode_group_E[:3].tolist() == [0, 0, 8]


@pytest.mark.parametrize(
  'batch, match',
  [
    ([], 'no episodes'),
    ([make_episodes.episode([1], ending=episodes.Ending.FAULT)], 'fault'),
    ([make_episodes.episode([])], 'no turns'),
  ],
)
def test_refused(batch, match):
  with pytest.raises(ValueError, match=match):
    episodes.tabulate(batch)


def test_refuses_missing_logps_and_unknown_outcome():
  episode = make_episodes.episode([2])
  turn = dataclasses.replace(episode.turns[0], response_logps=(0.0,))
  with pytest.raises(ValueError, match='2 response_ids but 1'):
    episodes.tabulate([dataclasses.replace(episode, turns=(turn,))])
  with pytest.raises(ValueError, match='binary or graded'):
    episodes.tabulate([episode], outcome='score')


def test_bucket_sizes():
  assert [episodes.bucket(n) for n in range(1, 14)] == [
    1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16,
  ]  # fmt: skip
  assert episodes.bucket(3, 8) == 8
  assert len({episodes.bucket(n, 256) for n in range(1, 100_000)}) <= 19


def test_table_is_a_pytree():
  table = episodes.tabulate([make_episodes.episode([1])])
  assert len(jax.tree.leaves(table)) == 14
  assert jax.tree.map(lambda x: x, table).token_turn_R[0] == 0
