"""EMPG against hand-worked and identity cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax import advantages, episodes
from planpo_jax.advantages import empg
from tests import make_episodes, test_gigpo

# A of a group with one success in two is then +-1.
PLAIN = {'use_std': False}
RETURN = 2.0


def estimate(batch, entropies, name='empg', **chosen):
  """Returns the advantage of each turn with tokens.

  Args:
    entropies: of the turns in the order of the batch, a number for all tokens
      of a turn or one for each.
  """
  table = episodes.tabulate(batch, success_return=RETURN)
  entropy_R = np.full(len(table.token_turn_R), 99.0, np.float32)
  turns = [turn for episode in batch for turn in episode.turns]
  stop = 0
  firsts = []
  for turn, entropy in zip(turns, entropies, strict=True):
    start, stop = stop, stop + len(turn.response_ids)
    entropy_R[start:stop] = entropy
    if stop > start:
      firsts.append(start)
  adv_R = advantages.get(name, **chosen).estimate(
    dataclasses.replace(table, token_entropy_R=entropy_R), progress=0.5
  )
  assert not np.any(adv_R[stop:])
  return np.asarray(adv_R)[firsts]


def pair():
  """A success and a failure of two turns each."""
  return make_episodes.group([(True, [2, 1]), (False, [3, 2])])


PAIR = [[0.0, 0.2], 0.5, [0.2, 0.3, 0.4], 0.1]


def test_by_hand():
  """H = .1, .5; .3, .1: h = 0, 1; .5, 0; exp(-h) = 1, .367879; .606531, 1.

  Their mean is .743603: g = 1.344804, .494726; .815665, 1.344804. The bonus,
  .1 f of the next turn: .036788, none; .1, none. A = 1 and -1, so A' =
  1.381592, .494726; -.715665, -1.344804; less the mean of -.046038.
  """
  np.testing.assert_allclose(
    estimate(pair(), PAIR, **PLAIN),
    [1.427630, 0.540764, -0.669627, -1.298766],
    atol=1e-5,
  )


def test_each_sharpness_acts_on_its_own_part():
  """h = 0, 1. A = 1, 1 with k = ln 4: g = 1.6, .4 (mean of 1 and 1/4 is .625).
  The bonus with k' = ln 2: f of the second turn is 1/2, twice zeta = 2."""
  actual = empg.modulate(
    jnp.ones(2),
    jnp.array([0.3, 0.7]),
    counted_U=jnp.array([True, True]),
    followed_U=jnp.array([True, False]),
    k=np.log(4),
    k_future=np.log(2),
    zeta=2.0,
  )
  # 1.6 + 1 and .4, less their mean of 1.5.
  np.testing.assert_allclose(actual, [1.1, -1.1], atol=1e-6)


def test_nothing_counted_gives_zero():
  """On the way there, too, nothing is divided by 0."""
  nobody = jnp.zeros(3, bool)
  with jax.debug_nans(True):
    actual = empg.modulate(
      jnp.zeros(3), jnp.ones(3), counted_U=nobody, followed_U=nobody
    )
  np.testing.assert_array_equal(actual, np.zeros(3))


@pytest.mark.parametrize('entropy', [0.0, 0.1, 0.3, 0.7])
def test_equal_entropies_leave_grpo_and_a_bonus_on_what_goes_on(entropy):
  """Means of 7, 3 and 11 equal float32 numbers differ by rounding only.

  A' = 1; -1 + .1, -1: mean -.3.
  """
  batch = make_episodes.group([(True, [7]), (False, [3, 11])])
  actual = estimate(batch, [entropy] * 3, **PLAIN)
  np.testing.assert_allclose(actual, [1.3, -0.6, -0.7], atol=1e-5)


def test_group_without_variance_learns_from_the_bonus_only():
  """Successes alike: A' = .1 f, so .1 and 0, .1 exp(-1) and 0; mean .034197.
  Without the bonus there is nothing."""
  batch = make_episodes.group([(True, [2, 2]), (True, [2, 2])])
  entropies = [0.4, 0.2, 0.2, 0.6]
  # h = .5, 0; 0, 1.
  np.testing.assert_allclose(
    estimate(batch, entropies),
    [0.065803, -0.034197, 0.002591, -0.034197],
    atol=1e-5,
  )
  assert not np.any(estimate(batch, entropies, zeta=0.0))


def test_one_turn_an_episode_gets_no_bonus():
  """h = 0, 1: g = 1.462117, .537883; A' = +-g, less the mean .462117."""
  batch = make_episodes.group([(True, [2]), (False, [2])])
  for zeta in (0.1, 5.0):
    np.testing.assert_allclose(
      estimate(batch, [0.1, 0.2], zeta=zeta, **PLAIN), [1.0, -1.0], atol=1e-5
    )


@pytest.mark.parametrize('seed', range(2))
def test_without_sharpness_and_bonus_it_is_grpo_less_its_mean(seed):
  batch = test_gigpo.random_batch(seed, num_states=3)
  turns = sum(len(episode.turns) for episode in batch)
  entropies = np.random.default_rng(seed).random(turns)
  actual = estimate(batch, entropies, k=0.0, zeta=0.0, invalid_penalty=0.0)
  grpo = estimate(batch, entropies, 'grpo', invalid_penalty=0.0)
  np.testing.assert_allclose(actual, grpo - grpo.mean(), atol=1e-5)


def test_extremes_and_means_are_those_of_all_groups():
  """Beside a group of A = 0 and H = .1, .9 the pair has h = 0, .5; .25, 0.

  exp(-h) = 1, .606531; .778801, 1 and 1, .367879 of the other group; their
  mean is .792202. The success's turns: 1.262304 + .060653, .765625; the
  failure's: -.983084 + .1, -1.262304; the others 0. Mean of all six: -.009468.
  """
  beside = make_episodes.group([(False, [2]), (False, [2])], 1)
  actual = estimate([*pair(), *beside], [*PAIR, 0.1, 0.9], **PLAIN)
  np.testing.assert_allclose(
    actual,
    [1.332425, 0.775093, -0.873616, -1.252836, 0.009468, 0.009468],
    atol=1e-5,
  )


def test_group_of_one_takes_no_part():
  """Raw, it does: A = 2 / (1 + eps), and its entropy is the highest."""
  lone = make_episodes.episode([2], success=True, group=1)
  alone = estimate(pair(), PAIR, **PLAIN)
  beside = estimate([*pair(), lone], [*PAIR, 9.0], **PLAIN)
  np.testing.assert_allclose(beside, [*alone, 0.0], atol=1e-6)
  raw = estimate([*pair(), lone], [*PAIR, 9.0], single='raw', **PLAIN)
  assert raw[4] > 0.1 and abs(raw[0] - alone[0]) > 0.1
  np.testing.assert_allclose(raw.mean(), 0, atol=1e-6)


def test_empty_response_takes_no_part():
  """Neither its entropy of no tokens, nor a bonus for leading to it.

  Otherwise as `test_by_hand`, but the success's first turn lacks .036788, so
  the mean is (-.184151 - .036788) / 4 = -.055235.
  """
  batch = make_episodes.group([(True, [2, 0, 1]), (False, [3, 2])])
  actual = estimate(batch, [PAIR[0], 0.0, *PAIR[1:]], **PLAIN)
  np.testing.assert_allclose(
    actual, [1.400039, 0.549961, -0.660430, -1.289569], atol=1e-5
  )


def test_penalty_after_the_mean_and_inside_the_return():
  """Failures, one invalid, equal entropies: R = -.1, 0 gives -+.05."""
  batch = [
    make_episodes.episode([3], valid=[False]),
    make_episodes.episode([3], member=1),
  ]
  after = estimate(batch, [0.2, 0.2], **PLAIN)
  np.testing.assert_allclose(after, [-0.1, 0.0], atol=1e-6)
  before = estimate(batch, [0.2, 0.2], penalty='pre', **PLAIN)
  np.testing.assert_allclose(before, [-0.05, 0.05], atol=1e-6)


def test_traits_and_presets():
  assert advantages.traits('empg') == advantages.Traits(
    group=True, outcome=True, entropy=True, batch_wide=True
  )
  presets = advantages.presets()
  assert presets['empg'] == {'advantage.name': 'empg'}
  assert presets['empg_dapo'] == {
    'advantage.name': 'empg',
    'loss.name': 'ppo_clip',
    'loss.ppo_clip.clip_high': 0.28,
    'train.max_refills': 10,
  }


@pytest.mark.parametrize(
  'chosen', [{'stat': 'episode'}, {'penalty': 'before'}, {'single': 'none'}]
)
def test_bad_value_is_refused_before_the_first_rollout(chosen):
  ((name, value),) = chosen.items()
  with pytest.raises(ValueError, match=f'{name}={value!r}'):
    advantages.get('empg', **chosen)
