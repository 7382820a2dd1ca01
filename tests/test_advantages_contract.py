"""What every file in advantages/ must keep to."""

import dataclasses

import numpy as np
import pytest

from configs import quickstart
from planpo_jax import advantages, episodes, losses
from tests import make_episodes, test_advantages

NAMES = advantages.names()
TRAITS = {name: advantages.traits(name) for name in NAMES}
# Those of which each group is a world of its own.
APART = [n for n in NAMES if TRAITS[n].group and not TRAITS[n].batch_wide]
GROUPED = [n for n in NAMES if TRAITS[n].group]
# Those of which each episode is, but for the whitening.
ALONE = [
  n
  for n in NAMES
  if not TRAITS[n].group and 'whiten' in advantages.hyperparameters(n)
]
roomy_buckets = test_advantages.roomy_buckets


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


def by_member(batch, name, table=None):
  """Returns {(task, member): advantages of its response tokens}."""
  table = tabulate(batch) if table is None else table
  adv_R = np.asarray(advantages.get(name).estimate(table, progress=0.4))
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


@pytest.mark.parametrize('name', ALONE)
def test_episodes_do_not_leak_before_whitening(name):
  """Another episode changes nothing in this one's."""
  batch = random_batch(4)
  method = advantages.get(name, whiten=False)

  def first_episode(batch):
    adv_R = np.asarray(method.estimate(tabulate(batch), progress=0.4))
    return adv_R[: sum(len(turn.response_ids) for turn in batch[0].turns)]

  alone = first_episode(batch[:1])
  assert alone.any()
  np.testing.assert_allclose(first_episode(batch), alone, atol=1e-6)


@pytest.mark.parametrize('name', APART)
def test_groups_do_not_leak(name):
  """Another group's episodes change nothing in this one's."""
  batch = random_batch(4)
  alone = by_member(batch[:4], name)
  beside = by_member(batch, name)
  for key, value in alone.items():
    np.testing.assert_allclose(beside[key], value, atol=1e-6)


@pytest.mark.parametrize('name', APART)
def test_the_same_groups_again_change_nothing(name):
  """Other tasks, played exactly alike: no statistic may be shared."""
  batch = random_batch(9, num_groups=2)
  again = [
    dataclasses.replace(e, task=make_episodes.task(e.task.index + 2))
    for e in batch
  ]
  once, twice = by_member(batch, name), by_member([*batch, *again], name)
  for (task, member), value in once.items():
    np.testing.assert_allclose(twice[task, member], value, atol=1e-6)
    other = make_episodes.task(task.index + 2)
    np.testing.assert_allclose(twice[other, member], value, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_size_of_the_bucket_is_irrelevant(name, monkeypatch):
  batch = random_batch(10)
  first, size = by_member(batch, name), len(tabulate(batch).turn_tokens_U)
  bucket = episodes.bucket
  monkeypatch.setattr(
    episodes, 'bucket', lambda count, minimum=1: 2 * bucket(count, minimum)
  )
  table = tabulate(batch)
  assert len(table.turn_tokens_U) == 2 * size
  second = by_member(batch, name, table)
  for key, value in first.items():
    np.testing.assert_allclose(second[key], value, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_fields_that_were_not_asked_for_may_be_missing(name):
  """They are None for methods whose traits do not name them."""
  traits = advantages.traits(name)
  batch = random_batch(11)
  table = tabulate(batch)
  asked = {
    'value_RC': traits.values > 0,
    'token_entropy_R': traits.entropy,
    'turn_switch_U': traits.roles,
    'turn_drift_U': traits.roles,
    'token_reward_R': False,
  }
  missing = {field: None for field, needed in asked.items() if not needed}
  if not traits.roles:
    missing['token_role_R'] = np.zeros_like(table.token_role_R)
  if traits.values:
    missing['value_RC'] = table.value_RC[:, : traits.values]
  bare = dataclasses.replace(table, **missing)
  if not traits.token_rewards:
    # Nor do they read what is there unasked.
    for key, value in by_member(batch, name).items():
      np.testing.assert_array_equal(by_member(batch, name, bare)[key], value)
  else:
    adv_R = np.asarray(advantages.get(name).estimate(bare, progress=0.4))
    assert np.isfinite(adv_R).all() and adv_R.any()


@pytest.mark.parametrize('name', NAMES)
def test_rewards_of_tokens_are_read_if_traits_say_so(name):
  """A reward on one token of one member moves something, or nothing."""
  batch = random_batch(12)
  table = tabulate(batch)
  reward_R = np.array(table.token_reward_R)
  reward_R[0] += 3.0
  moved = dataclasses.replace(table, token_reward_R=reward_R)
  first, second = by_member(batch, name), by_member(batch, name, moved)
  same = all(np.array_equal(first[key], second[key]) for key in first)
  assert same != advantages.traits(name).token_rewards


@pytest.mark.parametrize('success', [True, False])
@pytest.mark.parametrize('name', APART)
def test_identical_members_give_exactly_zero(name, success):
  """Their turns are alike too: nothing can be compared."""
  batch = make_episodes.group([(success, [5, 5, 5])] * 7)
  for value in by_member(batch, name).values():
    assert not value.any()


@pytest.mark.parametrize('name', GROUPED)
def test_group_of_one_gives_zero(name):
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


@pytest.mark.parametrize('preset', advantages.presets())
def test_presets_name_what_exists(preset):
  """Each key belongs to the method of its file, to a loss or to the rest."""
  config = quickstart.get_config(preset)
  name = config.advantage.name
  for key in advantages.presets()[preset]:
    section, *path = key.split('.')
    if section == 'advantage' and len(path) == 2:
      assert path[0] == name, key
    if section == 'loss' and len(path) == 2:
      assert path[0] == config.loss.name, key
  advantages.get(name, **config.advantage[name])
  losses.get(config.loss.name, **config.loss[config.loss.name])
