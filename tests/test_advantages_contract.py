"""What every file in advantages/ must keep to."""

import dataclasses

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from tests import make_episodes

NAMES = advantages.names()


def tabulate(batch):
  """Values are a function of each turn, so they move with their episode."""
  table = episodes.tabulate(batch)
  num_U = len(table.turn_tokens_U)
  value_U = np.append(0.01 * table.turn_tokens_U, 0.0)
  turn_R = np.minimum(table.token_turn_R, num_U)
  value_R = value_U[turn_R].astype(np.float32)
  places_R = np.arange(len(turn_R)) - np.searchsorted(turn_R, turn_R)
  role_R = np.where(turn_R < num_U, places_R % 4, 0)
  return dataclasses.replace(
    table,
    value_RC=value_R[:, None] * np.arange(1, 4, dtype=np.float32),
    token_entropy_R=value_R,
    token_reward_R=-0.1 * value_R,
    token_role_R=role_R.astype(np.int32),
    turn_switch_U=table.turn_index_U % 2 == 0,
    turn_drift_U=table.turn_index_U % 4 == 1,
  )


def by_member(batch, name):
  """Returns {(task, member): advantages of its response tokens}."""
  adv_R = np.asarray(
    advantages.get(name).estimate(tabulate(batch), progress=0.4)
  )
  result, start = {}, 0
  for episode in batch:
    stop = start + sum(len(turn.response_ids) for turn in episode.turns)
    result[episode.task, episode.member] = adv_R[start:stop]
    start = stop
  return result


def random_batch(seed, num_groups=3, group_size=4):
  rng = np.random.default_rng(seed)
  batch = []
  for g in range(num_groups):
    for i in range(group_size):
      lengths = rng.integers(1, 12, rng.integers(1, 6))
      batch.append(
        make_episodes.episode(
          lengths,
          success=bool(rng.integers(2)),
          group=g,
          member=i,
          valid=rng.random(len(lengths)) < 0.8,
          states=rng.integers(0, 3, len(lengths)),
        )
      )
  return batch


@pytest.mark.parametrize('name', NAMES)
def test_shape_type_finite_and_zero_on_padding(name):
  for seed in range(3):
    table = tabulate(random_batch(seed))
    adv_R = np.asarray(advantages.get(name).estimate(table, progress=0.4))
    assert adv_R.shape == table.token_turn_R.shape
    assert adv_R.dtype == np.float32
    assert np.isfinite(adv_R).all()
    assert adv_R.any()
    assert not adv_R[table.token_turn_R == len(table.turn_tokens_U)].any()


@pytest.mark.parametrize('name', NAMES)
def test_order_of_episodes_is_irrelevant(name):
  batch = random_batch(3)
  shuffled = [batch[i] for i in np.random.default_rng(0).permutation(12)]
  first, second = by_member(batch, name), by_member(shuffled, name)
  for key, value in first.items():
    np.testing.assert_allclose(second[key], value, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_groups_do_not_leak(name):
  """Another group's episodes change nothing in this one's."""
  if not advantages.traits(name).group:
    return
  batch = random_batch(4)
  alone = by_member(batch[:4], name)
  beside = by_member(batch, name)
  for key, value in alone.items():
    np.testing.assert_allclose(beside[key], value, atol=1e-6)


@pytest.mark.parametrize('success', [True, False])
@pytest.mark.parametrize('name', NAMES)
def test_identical_members_give_exactly_zero(name, success):
  """Their turns are alike too: nothing can be compared."""
  if not advantages.traits(name).group:
    return
  batch = make_episodes.group([(success, [5, 5, 5])] * 7)
  for value in by_member(batch, name).values():
    assert not value.any()


@pytest.mark.parametrize('name', NAMES)
def test_group_of_one_gives_zero(name):
  if not advantages.traits(name).group:
    return
  batch = random_batch(5, group_size=1)
  for value in by_member(batch, name).values():
    assert not value.any()


@pytest.mark.parametrize('name', NAMES)
def test_member_without_tokens_moves_nobody(name):
  batch = random_batch(6, num_groups=1)
  empty = make_episodes.episode([0, 0], success=True, member=9, states=[0, 1])
  first, second = by_member(batch, name), by_member([*batch, empty], name)
  for key, value in first.items():
    np.testing.assert_allclose(second[key], value, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_compiles_once_for_tables_of_one_bucket(name):
  method = advantages.get(name).estimate
  method(tabulate(random_batch(7)), progress=0.7)
  compiled = method._cache_size()
  method(tabulate(random_batch(8)), progress=0.8)
  assert method._cache_size() == compiled
