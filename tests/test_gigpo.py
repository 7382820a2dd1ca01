"""GiGPO against golden, hand-worked and identity cases."""

import dataclasses
import difflib

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from tests import make_episodes, test_advantages

CASES = list(test_advantages.GOLDEN['cases'])
HALL, KITCHEN, BATHROOM = 0, 1, 2


def golden_batch(case):
  group = test_advantages.GOLDEN['cases'][case]['group']
  return [
    make_episodes.episode(
      m['L'],
      success=m['success'],
      member=i,
      states=[ord(anchor) for anchor in m['anchor']],
    )
    for i, m in enumerate(group)
  ]


def random_batch(seed, num_states, group_size=4):
  """Two groups of episodes of 1 to 5 turns; states are drawn, or all apart."""
  rng = np.random.default_rng(seed)
  batch = []
  for g in range(2):
    for i in range(group_size):
      turns = int(rng.integers(1, 6))
      states = rng.integers(0, num_states or 1, turns)
      if num_states is None:
        states = np.arange(turns) + 100 * i
      batch.append(
        make_episodes.episode(
          [3] * turns,
          success=bool(rng.integers(2)),
          group=g,
          member=i,
          valid=rng.random(turns) < 0.8,
          states=states,
        )
      )
  return batch


def estimate(batch, name='gigpo', **chosen):
  return test_advantages.estimate(batch, name, **chosen)


def flat(per_member):
  return np.concatenate(per_member)


@pytest.mark.parametrize('use_std', [True, False])
@pytest.mark.parametrize('case', CASES)
def test_golden(case, use_std):
  """`all_success` has A^E = 0: discounting tells fast from slow turns."""
  batch = golden_batch(case)
  golden = test_advantages.GOLDEN['cases'][case]['expected']
  golden = golden['gigpo_std' if use_std else 'gigpo_nostd']
  expect = test_advantages.expect
  expect(estimate(batch, use_std=use_std), batch, golden['A'])
  expect(
    estimate(batch, use_std=use_std, step_weight=0.0), batch, golden['A_E']
  )


def test_equal_states_of_one_task_only():
  """States at one place differ, other tasks have the same states.

  The hall of task 0: G = .95 x 10 and 0, so +-.7071; the kitchen and bathroom
  were seen once. A^E = +-.7071. In task 1 the hall has G = 0 three times, and
  the kitchen 0 twice: nothing; a leak would compare them with 9.5 and 10.
  """
  batch = [
    make_episodes.episode([2, 2], success=True, states=[HALL, KITCHEN]),
    make_episodes.episode([2, 2], member=1, states=[HALL, BATHROOM]),
    make_episodes.episode([2, 2], group=1, states=[HALL, KITCHEN]),
    make_episodes.episode([2, 2], group=1, member=1, states=[HALL, KITCHEN]),
    make_episodes.episode([2], group=1, member=2, states=[HALL]),
  ]
  z = 0.70710678
  wanted = [[2 * z, z], [-2 * z, -z], 0, 0, 0]
  test_advantages.expect(estimate(batch), batch, wanted)


def test_weight_scales_the_part_of_the_turn():
  batch = golden_batch('mixed')
  none, one, half = (
    flat(estimate(batch, step_weight=w)) for w in (0.0, 1.0, 0.5)
  )
  np.testing.assert_allclose(half, (none + one) / 2, atol=1e-6)
  assert np.abs(one - none).max() > 1


@pytest.mark.parametrize(
  'chosen',
  [
    {},
    {'use_std': False},
    {'ddof': 0},
    {'stat': 'turn'},
    {'penalty': 'pre'},
    {'single': 'raw'},
  ],
)
def test_without_the_part_of_the_turn_it_is_grpo(chosen):
  batch = random_batch(0, num_states=3)
  actual = flat(estimate(batch, step_weight=0.0, **chosen))
  np.testing.assert_array_equal(actual, flat(estimate(batch, 'grpo', **chosen)))


@pytest.mark.parametrize('seed', range(3))
def test_where_no_state_recurs_it_is_grpo(seed):
  batch = random_batch(seed, num_states=None)
  np.testing.assert_array_equal(
    flat(estimate(batch)), flat(estimate(batch, 'grpo'))
  )


@pytest.mark.parametrize('seed', range(3))
def test_one_state_without_discount_is_grpo_twice(seed):
  """G = R on every turn, and the step group is every turn of the task."""
  batch = random_batch(seed, num_states=1)
  chosen = {'stat': 'turn', 'invalid_penalty': 0.0}
  actual = flat(estimate(batch, gamma=1.0, **chosen))
  grpo = flat(estimate(batch, 'grpo', **chosen))
  np.testing.assert_allclose(actual, 2 * grpo, atol=1e-5)
  assert np.abs(grpo).max() > 0.5


def test_discounted_returns_tie_wherever_they_stand():
  """States tell the turns left, so each holds one value; R = .3 is inexact."""
  batch = [
    make_episodes.episode(
      [1] * turns, success=True, member=i, states=range(turns, 0, -1)
    )
    for i, turns in enumerate((3, 7, 5, 6, 4))
  ]
  outcome = {'success_return': 0.3}
  assert not np.any(flat(estimate(batch, outcome=outcome)))


def test_penalty_inside_the_return():
  """Two failures of one turn in one state, one of them invalid.

  Rows -.1 and 0 in both parts: mean -.05, std .0707107, and eps takes 1e-5 of
  it off: -+.707097 twice. After normalising there is only the penalty.
  """
  batch = [
    make_episodes.episode([3], valid=[False], states=[HALL]),
    make_episodes.episode([3], member=1, states=[HALL]),
  ]
  before = estimate(batch, penalty='pre')
  test_advantages.expect(before, batch, [-1.414194, 1.414194])
  test_advantages.expect(estimate(batch), batch, [-0.1, 0.0])


def test_group_of_one_raw_keeps_its_return_and_compares_its_visits():
  """A^E: 3 rows of 10 have no spread under `turn`, and are one episode of
  10 / (1 + eps) under `trajectory`. G of the hall: 9.025 and 10, +-.7071.
  """
  batch = [
    make_episodes.episode([2] * 3, success=True, states=[HALL, KITCHEN, HALL])
  ]
  z = 0.7071057
  actual = estimate(batch, single='raw')
  test_advantages.expect(actual, batch, [[9.99999 - z, 9.99999, 9.99999 + z]])
  actual = estimate(batch, single='raw', stat='turn')
  test_advantages.expect(actual, batch, [[-z, 0.0, z]])
  test_advantages.expect(estimate(batch), batch, [0.0])


def test_preset_of_verl_agent():
  """Rows of the group: 10, 9.9 of a success; 0 of a failure, all in one state.

  A^E and A^S over three rows, invalid by .1 before normalising. R: mean
  19.9/3 = 6.633333, squares 11.334444 + 10.671111 + 44.001111 = 66.006667,
  std 5.744852: .586032, .568625, -1.154657. G = 9.5, 9.9, 0: mean 6.466667,
  squares 9.201111 + 11.787778 + 41.817778 = 62.806667, std 5.603868: .541293,
  .612672, -1.153965.
  """
  batch = [
    make_episodes.episode(
      [4, 4], success=True, valid=[True, False], states=[HALL, HALL]
    ),
    make_episodes.episode([4], member=1, states=[HALL]),
  ]
  preset = advantages.presets()['gigpo_verl_parity']
  chosen = {
    key.removeprefix('advantage.gigpo.'): value
    for key, value in preset.items()
    if key != 'advantage.name'
  }
  wanted = [[1.127325, 1.181297], [-2.308622]]
  test_advantages.expect(estimate(batch, **chosen), batch, wanted)


def with_texts(texts, group=0, member=0):
  """An episode of a turn a text; its keys are all different."""
  episode = make_episodes.episode([1] * len(texts), group=group, member=member)
  turns = [
    dataclasses.replace(turn, observation=text, state_key=1000 * member + t)
    for t, (turn, text) in enumerate(zip(episode.turns, texts, strict=True))
  ]
  return dataclasses.replace(episode, turns=tuple(turns))


def states(batch, similarity):
  """Returns the states of all turns after `annotate`, numbered as they come."""
  table = episodes.tabulate(batch)
  table = advantages.get('gigpo', similarity=similarity).annotate(
    table, batch, lambda ids: ''
  )
  num_U = len(table.turn_tokens_U)
  real_U = table.turn_episode_U < len(table.episode_group_E)
  assert (table.turn_state_U[~real_U] == num_U).all()
  assert (table.turn_state_U[real_U] < num_U).all()
  ids = table.turn_state_U[real_U].tolist()
  seen = list(dict.fromkeys(ids))
  return [seen.index(i) for i in ids]


def test_similar_texts_join_the_first_that_is_near_enough():
  """Of 20 letters, 19 in order are shared: ratio 38/40 = .95; 18: .9.

  b differs from a by one letter, c from b by one and from a by two: c is not
  near a, the first text of b's state. d has c's letters in another order.
  Another task has states of its own.
  """
  a = 'abcdefghijklmnopqrst'
  b = 'Xbcdefghijklmnopqrst'
  c = 'XYcdefghijklmnopqrst'
  d = 'tsrqponmlkjihgfedcYX'
  batch = [
    with_texts([a, b, c, d]),
    with_texts([b, d, a], member=1),
    with_texts([a, b], group=1),
  ]
  assert states(batch, 0.95) == [0, 0, 1, 2, 0, 2, 0, 3, 3]
  assert states(batch, 0.951) == [0, 1, 2, 3, 1, 3, 0, 4, 5]
  assert states(batch, 0.9) == [0, 0, 0, 1, 0, 1, 0, 2, 2]


def test_similarity_changes_advantages():
  """A success and a failure in nearly one state: A^S = +-.7071 comes in."""
  batch = [
    dataclasses.replace(with_texts(['a' * 19 + 'b']), success=True),
    with_texts(['a' * 19 + 'c'], member=1),
  ]
  method = advantages.get('gigpo', similarity=0.95)
  table = episodes.tabulate(batch)
  z = 0.70710678
  for annotated, wanted in (
    (table, z),
    (method.annotate(table, batch, None), 2 * z),
  ):
    adv_R = method.estimate(annotated, progress=0.5)
    np.testing.assert_allclose(adv_R[:2], [wanted, -wanted], atol=1e-5)


def test_similar_texts_are_those_of_the_plain_rule():
  """Texts past 200 letters too, where difflib leaves out frequent letters, and
  so the ratio depends on which text is the first."""
  rng = np.random.default_rng(0)
  words = ['door ', 'table ', 'kitchen ', 'a lamp ', 'sink, ', 'on it: ', '7']
  batch = []
  for member in range(4):
    texts = []
    for _ in range(12):
      drawn = list(rng.choice(words, 6)) * int(rng.choice([1, 8]))
      drawn[int(rng.integers(len(drawn)))] = str(rng.choice(words))
      texts.append(''.join(drawn))
    batch.append(with_texts([*texts, ''], member=member))
  firsts, wanted = [], []
  for episode in batch:
    for turn in episode.turns:
      for state, first in enumerate(firsts):
        ratio = difflib.SequenceMatcher(None, turn.observation, first).ratio()
        if ratio >= 0.6:
          wanted.append(state)
          break
      else:
        wanted.append(len(firsts))
        firsts.append(turn.observation)
  assert states(batch, 0.6) == wanted
  assert 5 < len(firsts) < 40


def test_without_similarity_states_keep_their_keys():
  batch = golden_batch('mixed')
  table = episodes.tabulate(batch)
  assert advantages.get('gigpo').annotate(table, batch, None) is table


@pytest.mark.parametrize(
  'chosen',
  [
    {'similarity': 0.0},
    {'similarity': 1.01},
    {'stat': 'episode'},
    {'penalty': 'before'},
    {'single': 'none'},
  ],
)
def test_bad_value_is_refused_before_the_first_rollout(chosen):
  ((name, value),) = chosen.items()
  with pytest.raises(ValueError, match=f'{name}=.?{value}'):
    advantages.get('gigpo', **chosen)
