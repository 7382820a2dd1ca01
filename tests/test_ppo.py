"""PPO's advantages: hand-worked, identities, and a loop that knows nothing.

The episode of the hand-worked cases has responses of 2, 1 and 3 tokens, return
10 and values 1, 2 | 3 | 4, 5, 6; gamma = lam = 1/2, so gamma lam = 1/4.

All tables are of one shape and most calls are not compiled whole, for a program
a setting would take seconds; the contract tests run what is compiled.
"""

import dataclasses

import numpy as np
import pytest

from planpo_jax import advantages, batch, episodes, losses
from planpo_jax.advantages import ppo
from tests import make_episodes

MODES = ('turn_bandit', 'turn', 'token', 'bilevel')
LENGTHS = (2, 1, 3)
VALUES = (1, 2, 3, 4, 5, 6)
HALF = {'gamma': 0.5, 'lam': 0.5}
WORKED = {
  'turn_bandit': HALF,
  'turn': HALF,
  'token': HALF,
  'bilevel': HALF | {'token_gamma': 0.5},
}


def tabulate(played, values, rewards=None, **outcome):
  """Tokens beyond the last are padding, with values that nobody may read."""
  table = episodes.tabulate(played, **outcome)
  value_RC = np.full((len(table.token_turn_R), 1), 77, np.float32)
  value_RC[: len(values), 0] = values
  table = dataclasses.replace(table, value_RC=value_RC)
  if rewards is not None:
    reward_R = np.full(len(value_RC), 99, np.float32)
    reward_R[: len(rewards)] = rewards
    table = dataclasses.replace(table, token_reward_R=reward_R)
  return table


def estimate(table, gae, *, whiten=False, **chosen):
  """Advantages of the response tokens."""
  adv_R = np.asarray(
    ppo.estimate(table, progress=0.5, gae=gae, whiten=whiten, **chosen)
  )
  assert adv_R.shape == (256,)
  count = int(np.asarray(table.turn_tokens_U).sum())
  assert adv_R.dtype == np.float32 and not adv_R[count:].any()
  return adv_R[:count]


def targets(table, gae, **chosen):
  """What the critic learns of the response tokens, and where."""
  target_RC, mask_RC = map(
    np.asarray, ppo.targets(table, progress=0.5, gae=gae, **chosen)
  )
  count = int(np.asarray(table.turn_tokens_U).sum())
  assert target_RC.shape == mask_RC.shape == (len(table.token_turn_R), 1)
  assert not mask_RC[count:].any() and not target_RC[count:].any()
  return target_RC[:count, 0], mask_RC[:count, 0]


def expect(actual, wanted):
  np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_turn_bandit():
  """Every response ends with 10 and knows of no other.

  Last tokens: 10 - 2, 10 - 3, 10 - 6. Before: A_5 = (6/2 - 5) + 4/4 = -1,
  A_4 = (5/2 - 4) - 1/4 = -1.75, A_1 = (2/2 - 1) + 8/4 = 2.
  """
  table = tabulate([make_episodes.episode(LENGTHS, success=True)], VALUES)
  wanted = [2, 8, 7, -1.75, -1, 4]
  expect(estimate(table, 'turn_bandit', **HALF), wanted)
  target, mask = targets(table, 'turn_bandit', **HALF)
  expect(target, np.add(wanted, VALUES))
  assert mask.all()


def test_turn():
  """V_t = 1, 3, 4: A_3 = 10 - 4, A_2 = (4/2 - 3) + 6/4 = 1/2,
  A_1 = (3/2 - 1) + 1/8 = 5/8. Only first tokens are learnt.
  """
  table = tabulate([make_episodes.episode(LENGTHS, success=True)], VALUES)
  expect(estimate(table, 'turn', **HALF), [0.625, 0.625, 0.5, 6, 6, 6])
  target, mask = targets(table, 'turn', **HALF)
  assert mask.tolist() == [True, False, True, True, False, False]
  expect(target, [1.625, 0, 3.5, 10, 0, 0])


def test_token():
  """From the end 4, -1, -1.75 as in the bandit, then on over the turns.

  A_3 = (4/2 - 3) - 1.75/4 = -1.4375, A_2 = (3/2 - 2) - 1.4375/4 = -.859375,
  A_1 = (2/2 - 1) - .859375/4 = -.21484375.
  """
  table = tabulate([make_episodes.episode(LENGTHS, success=True)], VALUES)
  wanted = [-0.21484375, -0.859375, -1.4375, -1.75, -1, 4]
  expect(estimate(table, 'token', **HALF), wanted)
  target, mask = targets(table, 'token', **HALF)
  expect(target, np.add(wanted, VALUES))
  assert mask.all()


def test_bilevel():
  """Turns by V = 2, 3, 6 at last tokens, then tokens with 1/2 and lam 1.

  Turns: 10 - 6 = 4, (6/2 - 3) + 4/4 = 1, (3/2 - 2) + 1/4 = -1/4. Tokens:
  A_5 = (6/2 - 5) + 4/2 = 0, A_4 = (5/2 - 4) + 0 = -1.5,
  A_1 = (2/2 - 1) - 1/8 = -1/8.
  """
  table = tabulate([make_episodes.episode(LENGTHS, success=True)], VALUES)
  wanted = [-0.125, -0.25, 1, -1.5, 0, 4]
  expect(estimate(table, 'bilevel', **WORKED['bilevel']), wanted)
  target, mask = targets(table, 'bilevel', **WORKED['bilevel'])
  expect(target, np.add(wanted, VALUES))
  assert mask.all()


@pytest.mark.parametrize(
  'gae, wanted',
  [
    # 12.25, 23, 36 within the last turn: 16 + 3 - 5 + 36/4 = 23, and so on.
    ('turn_bandit', [3.5, 10, 11, 12.25, 23, 36]),
    ('token', [1.75390625, 3.015625, 6.0625, 12.25, 23, 36]),
    # Rewards of turns 3, 4, 66: 66 - 4 = 62, (4 + 2 - 3) + 62/4 = 18.5,
    # (3 + 1.5 - 1) + 18.5/4 = 8.125.
    ('turn', [8.125, 8.125, 18.5, 62, 62, 62]),
    # A turn is worth what it has earned before its last token and V there:
    # 1 + 2, 3, 24 + 6. 66 - 30 = 36, (4 + 15 - 3) + 36/4 = 25,
    # (3 + 1.5 - 3) + 25/4 = 7.75; then 16 + 6/2 - 5 + 36/2 = 32,
    # 8 + 5/2 - 4 + 32/2 = 22.5, 1 + 2/2 - 1 + 7.75/2 = 4.875.
    ('bilevel', [4.875, 7.75, 25, 22.5, 32, 36]),
  ],
)
def test_rewards_of_single_tokens(gae, wanted):
  """1, 2 | 4 | 8, 16, 32 beside the return."""
  played = [make_episodes.episode(LENGTHS, success=True)]
  table = tabulate(played, VALUES, rewards=[1, 2, 4, 8, 16, 32])
  expect(estimate(table, gae, **WORKED[gae]), wanted)


@pytest.mark.parametrize(
  'gae, wanted',
  [
    ('turn_bandit', [2, 8, 6, -1.75, -1, 4]),
    ('token', [-0.27734375, -1.109375, -2.4375, -1.75, -1, 4]),
    ('turn', [0.375, 0.375, -0.5, 6, 6, 6]),
    ('bilevel', [-0.25, -0.5, 0, -1.5, 0, 4]),
  ],
)
def test_invalid_turn_loses_its_own_reward(gae, wanted):
  """The second loses 1, a quarter of which reaches the step before it."""
  valid = [True, False, True]
  played = [make_episodes.episode(LENGTHS, success=True, valid=valid)]
  table = tabulate(played, VALUES)
  expect(estimate(table, gae, invalid_penalty=1.0, **WORKED[gae]), wanted)


@pytest.mark.parametrize('gae', MODES)
def test_turns_without_tokens_are_passed_over(gae):
  """First, between, twice in a row, and last, where the return is earned."""
  other = make_episodes.episode([1], member=1)
  plain = [make_episodes.episode(LENGTHS, success=True), other]
  holes = [make_episodes.episode((0, 2, 0, 0, 1, 3, 0), success=True), other]
  values = [*VALUES, -3]
  first, second = tabulate(plain, values), tabulate(holes, values)
  chosen = WORKED[gae]
  wanted = estimate(first, gae, **chosen)
  assert wanted[-1] == 3
  expect(estimate(second, gae, **chosen), wanted)
  for one, two in zip(
    targets(first, gae, **chosen), targets(second, gae, **chosen), strict=True
  ):
    expect(two, one)


@pytest.mark.parametrize('gae', MODES)
def test_a_truncated_episode_expects_nothing_more(gae):
  table, cut = (
    tabulate([make_episodes.episode(LENGTHS, ending=ending)], VALUES)
    for ending in (episodes.Ending.TERMINATED, episodes.Ending.TRUNCATED)
  )
  assert cut.episode_truncated_E[0] and not table.episode_truncated_E[0]
  adv = estimate(cut, gae, **WORKED[gae])
  assert adv[-1] == (-4 if gae == 'turn' else -6)
  np.testing.assert_array_equal(adv, estimate(table, gae, **WORKED[gae]))


@pytest.mark.parametrize('gae', MODES)
def test_one_token_is_return_minus_value(gae):
  table = tabulate([make_episodes.episode([1], success=True)], [4])
  expect(estimate(table, gae, **WORKED[gae]), [6])
  target, mask = targets(table, gae, **WORKED[gae])
  assert target.tolist() == [10] and mask.all()


# Between the network's rows and the axis of response tokens.


def spoken(*turns):
  """An episode from (prompt, response) lengths."""
  played = make_episodes.episode([r for _, r in turns], success=True)
  return dataclasses.replace(
    played,
    turns=tuple(
      dataclasses.replace(turn, prompt_ids=(7,) * prompt)
      for turn, (prompt, _) in zip(played.turns, turns, strict=True)
    ),
  )


def on_rows(played, gae, **chosen):
  """(loss mask, advantages) of the one row; values are huge on no response."""
  rows = batch.pack([played], context='conversation', row_len=64)
  value_BTC = np.where(rows.loss_mask_BT, 0.0, 1e3)[..., None]
  table = episodes.tabulate([played], success_return=1.0)
  table = dataclasses.replace(
    table, value_RC=batch.to_flat(rows, value_BTC, len(table.token_turn_R))
  )
  adv_R = ppo.estimate(table, progress=0.5, gae=gae, whiten=False, **chosen)
  rows = batch.with_advantages(rows, adv_R)
  return rows.loss_mask_BT[0], rows.adv_BT[0]


@pytest.mark.parametrize('observed', [2, 52])
def test_observations_neither_decay_nor_carry_credit(observed):
  """Mask 1 1 0 0 1, or 50 zeros more; reward 1 at the end."""
  mask, adv = on_rows(spoken((0, 2), (observed, 1)), 'token', lam=0.95)
  wanted = np.zeros(64, bool)
  wanted[[0, 1, observed + 2]] = True
  np.testing.assert_array_equal(mask, wanted)
  expect(adv[mask], [0.9025, 0.95, 1.0])
  assert not adv[~mask].any()


@pytest.mark.parametrize('gamma', [1.0, 0.0])
def test_the_reward_is_earned_by_the_last_token_that_was_sampled(gamma):
  """Mask 1 1 0 0: the episode ends with an observation."""
  chosen = {'gamma': gamma, 'lam': 0.95}
  mask, adv = on_rows(spoken((0, 2), (2, 0)), 'token', **chosen)
  assert np.flatnonzero(mask).tolist() == [0, 1]
  expect(adv[:4], [0.95 * gamma, 1.0, 0, 0])


# Identities.


def random_table(seed, *, longest=5, holes=True, rewards=True, values=True):
  rng = np.random.default_rng(seed)
  played = []
  for i in range(8):
    lengths = rng.integers(0 if holes else 1, longest + 1, rng.integers(1, 5))
    played.append(
      make_episodes.episode(
        lengths,
        success=bool(rng.integers(2)),
        member=i,
        valid=rng.random(len(lengths)) < 0.7,
      )
    )
  count = sum(len(turn.response_ids) for e in played for turn in e.turns)
  value = 3 * rng.normal(size=count) if values else np.zeros(count)
  reward = 0.3 * rng.normal(size=count) if rewards else None
  return played, tabulate(played, value, reward)


def test_turn_bandit_is_return_minus_value():
  """gamma = lam = 1, as published."""
  _, table = random_table(0, rewards=False)
  real_R = table.token_turn_R < len(table.turn_tokens_U)
  turn_R = table.token_turn_R[real_R]
  score_R = table.episode_return_E[table.turn_episode_U[turn_R]]
  score_R = score_R - 0.1 * ~table.turn_valid_U[turn_R]
  expect(estimate(table, 'turn_bandit'), score_R - table.value_RC[real_R, 0])


@pytest.mark.parametrize('gamma', [1.0, 0.9])
def test_turn_without_values_at_lam_1_is_the_return_to_go(gamma):
  played, table = random_table(1, holes=False, rewards=False, values=False)
  wanted = [
    episode.success * 10 * gamma ** (len(episode.turns) - 1 - t)
    for episode in played
    for t, turn in enumerate(episode.turns)
    for _ in turn.response_ids
  ]
  chosen = {'gamma': gamma, 'invalid_penalty': 0.0}
  expect(estimate(table, 'turn', **chosen), wanted)


def test_lam_0_is_one_step():
  """r + gamma V' - V of the hand-worked episode, at gamma 1/2."""
  table = tabulate([make_episodes.episode(LENGTHS, success=True)], VALUES)
  chosen = {'gamma': 0.5, 'lam': 0.0}
  expect(estimate(table, 'turn', **chosen), [0.5, 0.5, -1, 6, 6, 6])
  expect(estimate(table, 'token', **chosen), [0, -0.5, -1, -1.5, -2, 4])


@pytest.mark.parametrize('gae', ['token', 'bilevel'])
def test_with_one_token_a_turn_all_are_the_same(gae):
  _, table = random_table(2, longest=1)
  chosen = {'gamma': 0.9, 'lam': 0.8}
  wanted = estimate(table, 'turn', **chosen)
  assert np.ptp(wanted) > 5
  expect(estimate(table, gae, **chosen), wanted)
  for one, two in zip(
    targets(table, 'turn', **chosen), targets(table, gae, **chosen), strict=True
  ):
    expect(two, one)


def test_undiscounted_and_without_bootstrap_two_levels_are_one():
  """Both are what is earned from the token on, minus V."""
  _, table = random_table(3)
  expect(estimate(table, 'bilevel'), estimate(table, 'token'))


def loop(played, table, gae, *, gamma, lam, token_gamma=1.0, token_lam=1.0):
  """The definitions, with lists and float64."""
  values = table.value_RC[:, 0].astype(float).tolist()
  rewards = table.token_reward_R.astype(float).tolist()

  def backward(steps, gamma, lam):
    """`steps` of (reward, value)."""
    result, carry = [], 0.0
    for n in reversed(range(len(steps))):
      following = steps[n + 1][1] if n + 1 < len(steps) else 0.0
      delta = steps[n][0] + gamma * following - steps[n][1]
      carry = delta + gamma * lam * carry
      result.insert(0, carry)
    return result

  result, start = [], 0
  for episode in played:
    turns = []  # Each a list of [reward, value].
    for turn in episode.turns:
      stop = start + len(turn.response_ids)
      steps = [[rewards[n], values[n]] for n in range(start, stop)]
      start = stop
      if not steps:
        continue
      steps[-1][0] -= 0.0 if turn.valid else 0.1
      steps[-1][0] += 10.0 * episode.success * (gae == 'turn_bandit')
      turns.append(steps)
    if not turns:
      continue
    if gae == 'turn_bandit':
      for steps in turns:
        result += backward(steps, gamma, lam)
      continue
    turns[-1][-1][0] += 10.0 * episode.success
    if gae == 'token':
      result += backward(sum(turns, []), gamma, lam)
    elif gae == 'turn':
      wide = [(sum(r for r, _ in steps), steps[0][1]) for steps in turns]
      for adv, steps in zip(backward(wide, gamma, lam), turns, strict=True):
        result += [adv] * len(steps)
    else:
      # From last token to last token: what lies between is earned later.
      wide = []
      for steps in turns:
        before = sum(r for r, _ in steps[:-1])
        wide.append((before + steps[-1][0], before + steps[-1][1]))
      for adv, steps in zip(backward(wide, gamma, lam), turns, strict=True):
        inner = [adv]
        for n in reversed(range(len(steps) - 1)):
          delta = steps[n][0] + token_gamma * steps[n + 1][1] - steps[n][1]
          inner.insert(0, delta + token_gamma * token_lam * inner[0])
        result += inner
  return result


@pytest.mark.parametrize('gae', MODES)
def test_a_loop_over_random_episodes_agrees(gae):
  chosen = {'gamma': 0.9, 'lam': 0.8}
  if gae == 'bilevel':
    chosen |= {'token_gamma': 0.7, 'token_lam': 0.6}
  for seed in range(20):
    played, table = random_table(10 + seed)
    expect(estimate(table, gae, **chosen), loop(played, table, gae, **chosen))


def test_what_is_bound_and_compiled_is_the_same():
  _, table = random_table(6)
  method = advantages.get('ppo', gae='bilevel', gamma=0.9)
  chosen = {'gae': 'bilevel', 'gamma': 0.9}
  adv_R = method.estimate(table, progress=0.5)
  wanted = estimate(table, whiten=True, **chosen)
  expect(adv_R[: len(wanted)], wanted)
  target_RC, mask_RC = method.targets(table, progress=0.5)
  target, mask = targets(table, **chosen)
  expect(target_RC[: len(target), 0], target)
  np.testing.assert_array_equal(mask_RC[: len(mask), 0], mask)


@pytest.mark.parametrize('gae', MODES)
def test_nothing_passes_between_episodes(gae):
  played, table = random_table(4)
  wanted = estimate(table, gae, **WORKED[gae])
  value_RC, start = table.value_RC.copy(), 0
  for i, episode in enumerate(played):
    count = sum(len(turn.response_ids) for turn in episode.turns)
    value_RC[start : start + count] += 5.0 * (i == 4)
    if i == 4:
      own = slice(start, start + count)
    start += count
  table = dataclasses.replace(table, value_RC=value_RC)
  changed = estimate(table, gae, **WORKED[gae]) != wanted
  assert changed[own].any()
  changed[own] = False
  assert not changed.any()


# Whitening.


def test_whitening_divides_by_the_root_of_variance_and_a_little():
  """10 and 0: mean 5, variance 50 with ddof 1, so 5 / sqrt(50)."""
  played = make_episodes.group([(True, [1]), (False, [1])])
  table = tabulate(played, [0, 0])
  root = 0.70710678
  expect(estimate(table, 'turn_bandit', whiten=True), [root, -root])
  # -1e-4 and 0: variance 5e-9, and 5e-5 / sqrt(1.5e-8) = .408248.
  played = make_episodes.group([(False, [1]), (False, [1])])
  table = tabulate(played, [1e-4, 0])
  expect(estimate(table, 'turn_bandit', whiten=True), [-0.408248, 0.408248])


@pytest.mark.parametrize('gae', MODES)
def test_whitening_is_over_response_tokens(gae):
  """And leaves what the critic learns as it is."""
  _, table = random_table(5)
  raw = estimate(table, gae, **WORKED[gae])
  adv = estimate(table, gae, whiten=True, **WORKED[gae])
  expect(adv, (raw - raw.mean()) / raw.std(ddof=1))
  for one, two in zip(
    targets(table, gae, whiten=True, **WORKED[gae]),
    targets(table, gae, whiten=False, **WORKED[gae]),
    strict=True,
  ):
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize('count', [1, 3, 7])
def test_what_is_tied_over_the_batch_is_exactly_zero(count):
  """R - V = 9.9, 10.3 and so on, which float32 does not hold."""
  for value in (0.1, -0.3, 0.35, 0.7):
    played = make_episodes.group([(True, [1, 2, 1])] * count)
    table = tabulate(played, [value] * 4 * count)
    assert not estimate(table, 'turn_bandit', whiten=True).any()


# Shaping.


def test_shaping():
  """c (10 / T + w 10 / L) at the last token of each turn, V = 0.

  A success of 2 turns, 4 and 5 tokens, w = 2: 5 + 5 and 5 + 4; a failure of
  one turn and 2 tokens: 10 + 10 if failures count.
  """
  played = make_episodes.group([(True, [4, 5]), (False, [2])])
  table = tabulate(played, [0] * 11)
  chosen = {'shaping_weight': 2.0}
  adv = estimate(table, 'turn_bandit', shaping='success', **chosen)
  expect(adv, [10] * 4 + [9] * 5 + [0] * 2)
  adv = estimate(table, 'turn_bandit', shaping='unconditional', **chosen)
  expect(adv, [10] * 4 + [9] * 5 + [20] * 2)
  chosen |= {'full_return': 1.0, 'shaping': 'success'}
  expect(
    estimate(table, 'turn_bandit', **chosen), [1] * 4 + [0.9] * 5 + [0] * 2
  )
  # As a reward of the turn in the others: 10 + 9 at the first.
  adv = estimate(table, 'turn', shaping='success', shaping_weight=2.0)
  expect(adv, [19] * 4 + [9] * 5 + [0] * 2)


def test_the_weight_of_short_responses_may_follow_a_schedule():
  """10/1 + w 10/5: w = 2 at first, 1.5 halfway to 1; or from 1 up to 2."""
  played = [make_episodes.episode([5], success=True)]
  table = tabulate(played, [0] * 5)

  def earned(progress, schedule):
    method = advantages.get(
      'ppo',
      whiten=False,
      shaping='success',
      shaping_weight=2.0,
      shaping_final=1.0,
      shaping_schedule=schedule,
    )
    return float(method.estimate(table, progress=progress)[0])

  assert earned(0.5, 'constant') == pytest.approx(14.0)
  assert earned(0.5, 'decay') == pytest.approx(13.0)
  assert earned(1.0, 'decay') == pytest.approx(12.0)
  assert earned(1.0, 'increase') == pytest.approx(14.0)


def test_shaping_counts_turns_without_tokens():
  """T = 4: 10/4 + 10/2 and 10/4 + 10/1; an empty turn earns nothing."""
  played = [make_episodes.episode([2, 0, 1, 0], success=True)]
  table = tabulate(played, [0] * 3)
  adv = estimate(table, 'turn_bandit', shaping='success')
  expect(adv, [7.5, 7.5, 12.5])


def test_shaped_turns_lose_the_penalty_too():
  played = [make_episodes.episode([1], success=True, valid=[False])]
  adv = estimate(tabulate(played, [0]), 'turn_bandit', shaping='success')
  expect(adv, [19.9])


# What may be chosen.


@pytest.mark.parametrize(
  'chosen, match',
  [
    ({'gae': 'step'}, 'turn_bandit, turn, token, bilevel'),
    ({'shaping': 'failure'}, 'none, success, unconditional'),
    ({'gamma': 1.01}, r'gamma=1.01 must be in \[0, 1\]'),
    ({'lam': -0.1}, 'lam=-0.1 must be'),
    ({'token_lam': float('nan')}, 'token_lam=nan must be'),
  ],
)
def test_bad_values_are_refused(chosen, match):
  with pytest.raises(ValueError, match=match):
    advantages.get('ppo', **chosen)


@pytest.mark.parametrize('name', ppo.PRESETS)
def test_presets_are_made_of_what_there_is(name):
  preset = advantages.presets()[name]
  assert preset['advantage.name'] == 'ppo'
  assert preset['train.group_size'] == 1
  for prefix, known in (
    ('advantage.ppo.', advantages.hyperparameters('ppo')),
    ('loss.ppo_clip.', losses.hyperparameters('ppo_clip')),
  ):
    own = {k for k in preset if k.startswith(prefix)}
    assert {k.removeprefix(prefix) for k in own} <= known.keys()
