"""HiPER: parts of a response, hand-worked credit, identities, an oracle."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from planpo_jax import advantages, episodes, tokenizer
from planpo_jax.advantages import hiper
from planpo_jax.prompts import actions
from planpo_jax.prompts import hiper as prompt
from tests import make_episodes

TERMINATED = episodes.Ending.TERMINATED
TRUNCATED = episodes.Ending.TRUNCATED
DEADLINE = episodes.Ending.DEADLINE
FREE = {'keep_penalty': 0.0, 'drift_penalty': 0.0, 'invalid_penalty': 0.0}
PLAIN = FREE | {'whiten': False}
# One token a part, then the end token.
PARTS = (1, 2, 3, 0)


@dataclasses.dataclass
class Played:
  """One episode as the estimator sees it; values as read, one a turn."""

  switch: list[bool]
  high: list[float] = dataclasses.field(default_factory=list)
  low: list[float] = dataclasses.field(default_factory=list)
  term: list[float] = dataclasses.field(default_factory=list)
  drift: list[bool] = dataclasses.field(default_factory=list)
  valid: list[bool] = dataclasses.field(default_factory=list)
  roles: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
  success: bool = False
  ending: episodes.Ending = TERMINATED

  def __post_init__(self):
    count = len(self.switch)
    self.high = self.high or [0.0] * count
    self.low = self.low or [0.0] * count
    self.term = self.term or [0.0] * count
    self.drift = self.drift or [False] * count
    self.valid = self.valid or [True] * count
    self.roles = self.roles or [PARTS] * count


def tabulate(*batch, success_return=10.0, elsewhere=np.nan):
  """Values are `elsewhere` wherever the method has no business to read.

  V_high and V_term stand at the first token, V_low at the first action token,
  or at the last token where there is none.
  """
  table = episodes.tabulate(
    [
      make_episodes.episode(
        [len(roles) for roles in played.roles],
        success=played.success,
        group=i,
        valid=played.valid,
        ending=played.ending,
      )
      for i, played in enumerate(batch)
    ],
    success_return=success_return,
  )
  value_RC = np.full((len(table.token_turn_R), 3), elsewhere, np.float32)
  role_R = np.zeros_like(table.token_role_R)
  switch_U = np.zeros(len(table.turn_tokens_U), bool)
  drift_U = np.zeros(len(table.turn_tokens_U), bool)
  u = r = 0
  for played in batch:
    for t, roles in enumerate(played.roles):
      if t == 0 or played.switch[t]:
        value_RC[r, 0] = played.high[t]
      at = roles.index(3) if 3 in roles else len(roles) - 1
      value_RC[r + at, 1] = played.low[t]
      value_RC[r, 2] = played.term[t]
      role_R[r : r + len(roles)] = roles
      switch_U[u], drift_U[u] = played.switch[t], played.drift[t]
      u, r = u + 1, r + len(roles)
  return dataclasses.replace(
    table,
    value_RC=value_RC,
    token_role_R=role_R,
    turn_switch_U=switch_U,
    turn_drift_U=drift_U,
  )


@functools.cache
def compiled(function, static):
  return jax.jit(functools.partial(function, progress=0.5, **dict(static)))


def run(function, table, **hyperparameters):
  """All numbers are traced, so that other ones do not compile again."""
  chosen = advantages.hyperparameters('hiper') | hyperparameters
  static = {k: v for k, v in chosen.items() if isinstance(v, (bool, str))}
  numbers = {k: np.float32(v) for k, v in chosen.items() if k not in static}
  if function is hiper.targets:
    del static['whiten']  # It makes no difference to them.
  method = compiled(function, tuple(sorted(static.items())))
  return jax.tree.map(np.asarray, method(table, **numbers))


def estimate(table, **hyperparameters):
  return run(hiper.estimate, table, **hyperparameters)


def by_part(table, adv_R, role):
  """Advantage of the tokens of one part, turn by turn."""
  return adv_R[np.asarray(table.token_role_R) == role]


def six_turns(**kwargs):
  """Three segments: turns 0 and 1; 2; 3 to 5. The first turn says KEEP."""
  return Played(
    switch=[False, False, True, True, False, False],
    high=[4.0, 0.0, 2.0, 10.0, 0.0, 0.0],
    low=[2.0, 4.0, 2.0, 4.0, 8.0, 4.0],
    term=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
    roles=[PARTS, (1, 0, 3, 0), PARTS, PARTS, (1, 0, 3, 0), (1, 0, 3, 0)],
    **kwargs,
  )


HALVES = {'gamma': 0.5, 'lam': 0.5, 'lam_segment': 0.5}
BOOTSTRAP = {'bootstrap_truncated': True}
# The mode without a penalty makes no difference, but saves a compilation.
NO_BOOTSTRAP = {'bootstrap_truncated': False, 'keep_penalty_mode': 'fixed'}


@pytest.mark.parametrize(
  'success,ending,choice,low,high,term',
  [
    (
      True,
      TERMINATED,
      BOOTSTRAP,
      [-0.75, -3.0, 3.0, -1.25, -5.0, 4.0],
      [-3.375, 1.0, -8.0],
      [-0.5, -1.0, 4.0, 0.0, 3.0, 6.0],
    ),
    (
      False,
      TRUNCATED,
      BOOTSTRAP,
      [-0.75, -3.0, 3.0, -1.625, -6.5, -2.0],
      [-3.3984375, 0.8125, -8.75],
      [-0.5, -1.0, 4.0, -0.75, 1.5, 3.0],
    ),
    (
      False,
      DEADLINE,
      NO_BOOTSTRAP,
      [-0.75, -3.0, 3.0, -1.75, -7.0, -4.0],
      [-3.4375, 0.5, -10.0],
      [-0.5, -1.0, 4.0, -2.0, -1.0, -2.0],
    ),
    # The environment ended it: nothing follows, whatever is said of limits.
    (
      False,
      TERMINATED,
      BOOTSTRAP,
      [-0.75, -3.0, 3.0, -1.75, -7.0, -4.0],
      [-3.4375, 0.5, -10.0],
      [-0.5, -1.0, 4.0, -2.0, -1.0, -2.0],
    ),
  ],
)
def test_hand_worked_episode(success, ending, choice, low, high, term):
  """g = lam = lam_segment = 1/2, the reward of the last turn is R.

  low, with x the worth of what follows turn 5:
    d_1 = 2/2 - 4 = -3, for V_high(2) = 2 follows     A_1 = -3
    d_0 = 4/2 - 2 = 0                                 A_0 = 0 - 3/4
    d_2 = 10/2 - 2 = 3                                A_2 = 3
    d_5 = R + x/2 - 4                                 A_5 = d_5
    d_4 = 4/2 - 8 = -6                                A_4 = -6 + A_5/4
    d_3 = 8/2 - 4 = 0                                 A_3 = A_4/4
  R = 8, x = 0: 4, -5, -5/4. R = 0, x = V_low(5) = 4: -2, -13/2, -13/8. R = 0,
  x = 0: -4, -7, -7/4.

  To the end of the segment, with y the worth of what follows turn 5: 2/4, 2/2;
  10/2; then z/4, z/2, z for z = R + y/2, which is 8; 5 with y = V_high(3) = 10;
  0. term takes V_term = 1, 2, 1, 2, 1, 2 off.

  high: D_3 = z/4 - 10, D_2 = 5 - 2 = 3, D_0 = 1/2 - 4 = -7/2; A_3 = D_3,
  A_2 = 3 + A_3/4, A_0 = -7/2 + A_2/8, for segment 0 has two turns.
  z = 8: -8, 1, -27/8. z = 5: -35/4, 13/16, -7/2 + 13/128. z = 0: -10, 1/2,
  -55/16.
  """
  table = tabulate(
    six_turns(success=success, ending=ending), success_return=8.0
  )
  adv_R = estimate(table, **PLAIN, **HALVES, **choice)
  np.testing.assert_allclose(by_part(table, adv_R, 3), low, atol=1e-6)
  np.testing.assert_allclose(by_part(table, adv_R, 2), high, atol=1e-6)
  np.testing.assert_allclose(by_part(table, adv_R, 1), term, atol=1e-6)
  assert not by_part(table, adv_R, 0).any()


def test_targets_are_advantages_above_values_where_those_were_read():
  """Advantages of the first case above plus its values.

  V_high at token 0 of turns 0, 2, 3: -27/8 + 4, 1 + 2, -8 + 10. V_low at token
  2 of each turn. V_term: 1/2, 1, 5, 2, 4, 8 at token 0.
  """
  table = tabulate(six_turns(success=True), success_return=8.0)
  target_RC, mask_RC = run(hiper.targets, table, **PLAIN, **HALVES)
  assert target_RC.dtype == np.float32 and mask_RC.dtype == bool
  first = 4 * np.arange(6)
  for head, at, expected in (
    (0, first[[0, 2, 3]], [0.625, 3.0, 2.0]),
    (1, first + 2, [1.25, 1.0, 5.0, 2.75, 3.0, 8.0]),
    (2, first, [0.5, 1.0, 5.0, 2.0, 4.0, 8.0]),
  ):
    assert np.flatnonzero(mask_RC[:, head]).tolist() == at.tolist()
    np.testing.assert_allclose(target_RC[at, head], expected, atol=1e-6)
  assert not target_RC[~mask_RC].any()


def test_targets_take_the_hyperparameters_of_the_estimator():
  """g = 0: the targets are the rewards, here -1 at each turn that keeps."""
  method = advantages.get(
    'hiper', gamma=0.0, keep_penalty=-1.0, keep_penalty_mode='fixed'
  )
  table = tabulate(Played([True, False]), elsewhere=0.0)
  target_RC, mask_RC = map(np.asarray, method.targets(table, progress=0.5))
  np.testing.assert_allclose(target_RC[mask_RC[:, 1], 1], [0.0, -1.0])
  with pytest.raises(TypeError, match='gama'):
    hiper.targets(table, progress=0.5, gama=0.0)


def test_rewards_of_keeping_drifting_and_of_invalid_turns():
  """g = 0 and V = 0, so that A_low is the reward of the turn.

  -0.4 times 3 kept of 4 turns is -0.3, in three parts. An episode of one turn
  does not pay in this form, nor one that always switches.
  """
  table = tabulate(
    Played(
      [False, True, False, False],
      drift=[False, False, True, False],
      valid=[True, False, True, True],
      success=True,
    ),
    Played([False], valid=[False]),
    Played([True, True]),
    Played([False, False]),
  )

  def low(**hyperparameters):
    adv_R = estimate(table, whiten=False, gamma=0.0, **hyperparameters)
    return by_part(table, adv_R, 3)

  np.testing.assert_allclose(
    low(keep_penalty=-0.4, drift_penalty=-0.3, invalid_penalty=0.1),
    [-0.1, -0.1, -0.4, 9.9, -0.1, 0, 0, -0.2, -0.2],
    atol=1e-6,
  )
  np.testing.assert_allclose(
    low(
      keep_penalty=-0.4,
      **NO_BOOTSTRAP,
      drift_penalty=0.0,
      invalid_penalty=0.0,
    ),
    [-0.4, 0, -0.4, 9.6, -0.4, 0, 0, -0.4, -0.4],
    atol=1e-6,
  )
  with pytest.raises(ValueError, match="keep_penalty_mode='share'"):
    advantages.get('hiper', keep_penalty_mode='share')


def test_defaults_are_those_of_the_authors():
  assert advantages.hyperparameters('hiper') == {
    'gamma': 1.0,
    'lam': 1.0,
    'lam_segment': 0.95,
    'bootstrap_truncated': True,
    'keep_penalty': -0.3,
    'keep_penalty_mode': 'normalized',
    'drift_penalty': -0.3,
    'invalid_penalty': 0.1,
    'whiten': True,
  }
  shop = advantages.presets()['hiper_webshop']
  assert shop['advantage.hiper.keep_penalty'] == -3.5
  assert shop['advantage.hiper.bootstrap_truncated'] is False
  assert shop['chat.prompt'] == 'hiper'


def test_each_kind_is_whitened_over_the_turns_that_have_it():
  """g = 0, V = 0: the rewards are 0, 0, 3; 0 and 3 in two episodes.

  low: turn 1 has no action, so 0, 3, 0, 3: mean 3/2, deviation 3/2: -1, 1, -1,
  1. high: turn 2 keeps and the last names no subgoal, so 0, 0, 0: tied. term:
  0, 0, 3, 0, 3: mean 6/5, variance (3 (6/5)^2 + 2 (9/5)^2)/5 = 54/25. How many
  tokens a part has does not count.
  """
  table = tabulate(
    Played(
      [True, True, False],
      roles=[(1, 1, 2, 3, 3, 3), (1, 2, 2, 2), (1, 0, 3)],
      success=True,
    ),
    Played([True], roles=[(1, 2, 3, 0)]),
    Played([True], roles=[(1, 3, 3)], success=True),
    success_return=3.0,
  )
  adv_R = estimate(table, **FREE, gamma=0.0)
  root = np.sqrt(54 / 25)
  few, many = -6 / 5 / root, 9 / 5 / root
  np.testing.assert_allclose(
    by_part(table, adv_R, 3), [-1, -1, -1, 1, -1, 1, 1], atol=1e-5
  )
  assert not by_part(table, adv_R, 2).any()
  np.testing.assert_allclose(
    by_part(table, adv_R, 1), [few, few, few, many, few, many], atol=1e-5
  )


def test_a_kept_subgoal_has_no_advantage_even_if_it_has_a_role():
  table = tabulate(
    Played([True, False, True], success=True, roles=[(1, 2, 3, 0)] * 3)
  )
  high = by_part(table, estimate(table, **FREE, gamma=0.0), 2)
  # Of rewards 0 and 10, without the kept turn between them.
  np.testing.assert_allclose(high, [-1, 0, 1], atol=1e-5)


def test_one_segment_and_no_values_gives_every_action_the_return():
  table = tabulate(
    Played([True, False, False, False], success=True),
    Played([True, False], ending=TRUNCATED),
  )
  adv_R = estimate(table, **PLAIN)
  np.testing.assert_allclose(by_part(table, adv_R, 3), [10] * 4 + [0] * 2)


def test_switching_at_every_turn_makes_high_turn_level_gae():
  rng = np.random.default_rng(0)
  high = rng.normal(size=7)
  gamma, lam_segment = 0.9, 0.7
  table = tabulate(
    Played([True] * 7, high=high.tolist(), success=True), elsewhere=3.0
  )
  adv_R = estimate(table, **PLAIN, gamma=gamma, lam_segment=lam_segment)
  expected, following = np.zeros(7), 0.0
  for t in reversed(range(7)):
    delta = (10 if t == 6 else gamma * high[t + 1]) - high[t]
    expected[t] = following = delta + gamma * lam_segment * following
  np.testing.assert_allclose(by_part(table, adv_R, 2), expected, rtol=1e-5)


def test_values_outside_the_places_read_change_nothing():
  played = [
    six_turns(ending=TRUNCATED),
    Played([True, False], roles=[(1,)] * 2),
  ]
  for function in (hiper.estimate, hiper.targets):
    first, second = (
      run(function, tabulate(*played, elsewhere=elsewhere))
      for elsewhere in (np.nan, 7.0)
    )
    for a, b in zip(
      jax.tree.leaves(first), jax.tree.leaves(second), strict=True
    ):
      assert np.isfinite(a).all()
      np.testing.assert_array_equal(a, b)


def oracle(batch, success_return, **h):
  """The definitions, segment by segment, in float64.

  Returns (adv, target, mask), token by token.
  """
  credit, values = [], []
  for played in batch:
    count = len(played.switch)
    kept = sum(not s for s in played.switch)
    r = [0.0] * count
    r[-1] += success_return * played.success
    for t in range(count):
      if not played.switch[t]:
        if h['keep_penalty_mode'] == 'fixed':
          r[t] += h['keep_penalty']
        elif count > 1:
          r[t] += h['keep_penalty'] * (kept / count) / kept
        r[t] += h['drift_penalty'] * played.drift[t]
      r[t] -= h['invalid_penalty'] * (not played.valid[t])
    starts = [t for t in range(count) if t == 0 or played.switch[t]]
    cut = played.ending is not TERMINATED and h['bootstrap_truncated']
    rows = [({}, {}) for _ in range(count)]
    following_high = 0.0
    for k in reversed(range(len(starts))):
      b = starts[k]
      final = k + 1 == len(starts)
      e = count - 1 if final else starts[k + 1] - 1
      if not final:
        beyond_high = beyond_low = played.high[e + 1]
      elif cut:
        beyond_high, beyond_low = played.high[b], played.low[e]
      else:
        beyond_high = beyond_low = 0.0
      for t in range(b, e + 1):
        low = 0.0
        for u in range(t, e + 1):
          after = beyond_low if u == e else played.low[u + 1]
          delta = r[u] + h['gamma'] * after - played.low[u]
          low += (h['gamma'] * h['lam']) ** (u - t) * delta
        to_end = sum(h['gamma'] ** (u - t) * r[u] for u in range(t, e + 1))
        to_end += h['gamma'] ** (e - t + 1) * beyond_high
        rows[t][0][3], rows[t][1][1] = low, low + played.low[t]
        rows[t][0][1], rows[t][1][2] = to_end - played.term[t], to_end
        if t == b:
          one_step = to_end - played.high[b]
      factor = h['gamma'] ** (e - b + 1) * h['lam_segment']
      following_high = one_step + factor * following_high
      rows[b][0][2] = following_high
      rows[b][1][0] = following_high + played.high[b]
    for t, (turn, target) in enumerate(rows):
      credit.append({k: x for k, x in turn.items() if k in played.roles[t]})
      values.append(target)
  if h['whiten']:
    for role in (1, 2, 3):
      x = np.array([turn[role] for turn in credit if role in turn])
      for turn in credit:
        if role in turn:
          turn[role] = (turn[role] - x.mean()) / (x.std() + 1e-8)
  turns = itertools.chain.from_iterable(played.roles for played in batch)
  adv, target, mask = [], [], []
  for roles, turn, aims in zip(turns, credit, values, strict=True):
    adv += [turn.get(role, 0.0) for role in roles]
    at = roles.index(3) if 3 in roles else len(roles) - 1
    for i in range(len(roles)):
      here = [0 in aims and i == 0, i == at, i == 0]
      mask.append(here)
      target.append([aims[c] if here[c] else 0.0 for c in range(3)])
  return np.array(adv), np.array(target), np.array(mask)


def random_played(rng):
  count = int(rng.integers(1, 6))
  switch = (rng.random(count) < 0.4).tolist()
  roles = []
  for t in range(count):
    chosen = switch[t] or t == 0
    parts = [1, 2 if chosen else 0, 3]
    kept = [part for part in parts if rng.random() < 0.85] or [0]
    lengths = rng.integers(1, 3, len(kept))
    roles.append(tuple(int(x) for x in np.repeat(kept, lengths)))
  success = bool(rng.integers(2))
  return Played(
    switch=switch,
    high=rng.normal(5, 3, count).tolist(),
    low=rng.normal(5, 3, count).tolist(),
    term=rng.normal(5, 3, count).tolist(),
    drift=[not s and bool(rng.integers(2)) for s in switch],
    valid=(rng.random(count) < 0.8).tolist(),
    roles=roles,
    success=success,
    ending=TERMINATED if success else rng.choice(list(episodes.Ending)[:3]),
  )


@pytest.mark.parametrize(
  'static',
  [
    {
      'bootstrap_truncated': True,
      'keep_penalty_mode': 'normalized',
      'whiten': True,
    },
    {
      'bootstrap_truncated': False,
      'keep_penalty_mode': 'fixed',
      'whiten': False,
    },
  ],
)
def test_agrees_with_the_definitions_on_random_episodes(static):
  rng = np.random.default_rng(0)
  for _ in range(30):
    batch = [random_played(rng) for _ in range(6)]
    chosen = static | {
      'gamma': rng.choice([0.0, 0.6, 0.95, 1.0]),
      'lam': rng.choice([0.0, 0.9, 1.0]),
      'lam_segment': rng.choice([0.0, 0.95, 1.0]),
      'keep_penalty': -rng.random(),
      'drift_penalty': -rng.random(),
      'invalid_penalty': rng.random(),
    }
    table = tabulate(*batch)
    adv_R = estimate(table, **chosen)
    target_RC, mask_RC = run(hiper.targets, table, **chosen)
    adv, target, mask = oracle(batch, 10.0, **chosen)
    count = len(adv)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    close(adv_R[:count], adv)
    close(target_RC[:count], target)
    assert (mask_RC[:count] == mask).all()
    assert not mask_RC[count:].any() and not adv_R[count:].any()


SAID = '<switch>SWITCH</switch><subgoal>get it</subgoal><action>sit</action>'


@pytest.mark.parametrize(
  'response,text,valid',
  [
    (SAID, 'sit', True),
    (SAID.replace('SWITCH<', ' keep\n<').replace('><', '>\n <'), 'sit', True),
    (SAID.replace('action', 'ACTION'), 'sit', True),
    (SAID.replace('sit', ' Sit\n DOWN '), 'sit down', True),
    (f'Well: {SAID}.', 'sit', True),
    (f'<think>{SAID}</think>{SAID}', 'sit', True),
    (f'<think>{SAID}</think>', actions.NO_ACTION, False),
    (f'<think>{SAID}', actions.NO_ACTION, False),
    (SAID.replace('SWITCH', 'perhaps'), 'sit', False),
    (SAID.replace('SWITCH', ''), 'sit', False),
    (SAID.replace('get it', ' '), 'sit', False),
    (SAID.replace('sit', ' '), actions.NO_ACTION, False),
    (SAID.replace('</action>', ''), actions.NO_ACTION, False),
    (SAID.replace('</subgoal>', ''), 'sit', False),
    (SAID + '<action>stay</action>', 'sit', False),
    ('<switch>KEEP</switch>' + SAID, 'sit', False),
    (
      '<action>sit</action><switch>KEEP</switch><subgoal>a</subgoal>',
      'sit',
      False,
    ),
    (
      '<switch>KEEP</switch><subgoal>a<action>sit</action></subgoal>',
      'sit',
      False,
    ),
    ('', actions.NO_ACTION, False),
  ],
)
def test_parse(response, text, valid):
  assert prompt.parse(response) == actions.ParsedAction(text, valid)


def test_spans_are_places_in_the_response_itself():
  response = f'猫<think>{SAID}</think>\n{SAID} end'
  spans = prompt.read(response).spans
  assert [response[slice(*spans[part])] for part in prompt.PARTS] == [
    '<switch>SWITCH</switch>',
    '<subgoal>get it</subgoal>',
    '<action>sit</action>',
  ]
  assert spans['switch'][0] > response.index('</think>')


def test_the_subgoal_is_carried_until_another_is_named():
  line = prompt.carry(SAID, '')
  assert line == 'Your current subgoal: get it'
  assert prompt.carry('<action>go</action>', line) == line
  assert prompt.carry(SAID.replace('get it', ''), line) == line
  other = SAID.replace('SWITCH', 'KEEP').replace('get', 'get \n to')
  assert prompt.carry(other, line) == 'Your current subgoal: get to it'
  assert prompt.carry('', '') == ''


class Bytes:
  """Tokens that are any bytes at all; the empty one stands for the end."""

  def __init__(self, tokens):
    self._tokens = tokens
    self.ids = tuple(range(len(tokens)))

  def decode(self, ids):
    whole = b''.join(self._tokens[i] for i in ids)
    return whole.decode(errors='replace')


@pytest.mark.parametrize(
  'pieces,boundary',
  [
    (
      [
        (0, '🧪 é'),
        (1, '<switch>SWITCH</switch>'),
        (0, '\n猫'),
        (2, '<subgoal>find 猫👩‍🔬</subgoal>'),
        (0, ' '),
        (3, '<action>take ü</action>'),
        (0, '猫.'),
      ],
      True,
    ),
    # A kept subgoal is not trained.
    (
      [
        (1, '<switch>KEEP</switch>'),
        (0, '<subgoal>find 猫</subgoal>'),
        (3, '<action>go</action>'),
        (0, ''),
      ],
      False,
    ),
    # Without an action, what comes after the last part is one.
    (
      [
        (0, '猫'),
        (1, '<switch>SWITCH</switch>'),
        (0, 'é'),
        (2, '<subgoal>ü</subgoal>'),
        (3, '猫<action>go'),
      ],
      True,
    ),
    ([(1, '<switch>KEEP</switch>'), (3, '猫 <subgoal>a')], True),
    ([(3, 'no tags, 猫')], False),
    ([(3, '')], True),
    (
      [
        (0, '<think>猫<switch>KEEP</switch></think>'),
        (3, '<action>a</action>'),
      ],
      True,
    ),
  ],
)
def test_a_token_belongs_where_its_first_character_lies(pieces, boundary):
  """Cut anywhere, between the bytes of a character too."""
  rng = np.random.default_rng(0)
  role_of_byte = [
    role for role, text in pieces for _ in range(len(text.encode()))
  ]
  whole = ''.join(text for _, text in pieces).encode()
  for _ in range(20):
    cuts = np.flatnonzero(rng.random(max(len(whole) - 1, 0)) < rng.random()) + 1
    edges = [0, *cuts.tolist(), len(whole)]
    tokens = [whole[a:b] for a, b in itertools.pairwise(edges) if b > a]
    # A token that starts amid a character starts where that one does; the end
    # token starts where the text ends.
    expected = [role_of_byte[a] for a in edges[:-1] if a < len(whole)]
    expected.append(3 if pieces[-1][0] == 3 and b'</act' not in whole else 0)
    made = Bytes([*tokens, b''])
    roles = hiper.token_roles(made.ids, boundary=boundary, decode=made.decode)
    assert roles.dtype == np.int32
    assert roles.tolist() == expected


@functools.cache
def nano():
  return tokenizer.load('nano')


def response(text):
  """A turn that says `text` in tokens of the shipped vocabulary."""
  ids = (*nano().encode(text), nano().im_end)
  return episodes.Turn((1,), ids, (0.0,) * len(ids), '', text, '', 0.0, True, 0)


def annotated(*texts_by_episode):
  batch = [
    episodes.Episode(
      task=make_episodes.task(i),
      member=0,
      turns=tuple(response(text) for text in texts),
      score=0.0,
      success=False,
      ending=TERMINATED,
    )
    for i, texts in enumerate(texts_by_episode)
  ]
  method = advantages.get('hiper')
  return method.annotate(episodes.tabulate(batch), batch, nano().decode)


def said(switch, subgoal):
  return (
    f'<switch>{switch}</switch><subgoal>{subgoal}</subgoal>'
    '<action>look at 猫</action>'
  )


def test_roles_on_a_real_vocabulary():
  """`<switch>` is five tokens there, `<action>` is one, 猫 is three."""
  table = annotated([said('KEEP', '找 猫'), said('KEEP', '找 猫')])
  ids = nano().encode(said('KEEP', '找 猫'))
  pieces = [nano().decode([i]) for i in ids]
  assert pieces[:5] == ['<', 's', 'witc', 'h', '>'] and '�' in pieces
  second = len(ids) + 1
  role_R = table.token_role_R
  assert not role_R[2 * second :].any()
  counts = [
    len(nano().encode(part))
    for part in (
      '<switch>KEEP</switch>',
      '<subgoal>找 猫</subgoal>',
      '<action>look at 猫</action>',
    )
  ]
  # The first turn starts a segment whatever it says.
  assert (
    role_R[:second].tolist() == np.repeat([1, 2, 3, 0], [*counts, 1]).tolist()
  )
  assert role_R[second : 2 * second].tolist() == (
    np.repeat([1, 0, 3, 0], [*counts, 1]).tolist()
  )


def test_what_switches_and_what_drifts():
  table = annotated(
    [
      said('KEEP', 'one'),
      said('KEEP', ' one\n'),
      said('KEEP', 'two'),  # Drifts.
      said('KEEP', 'two'),
      said('SWITCH', 'three'),
      'no parts at all',  # Names nothing, so three stands.
      said('KEEP', 'three'),
      said('keep', 'Three'),  # Drifts.
      said('perhaps', 'four'),  # Keeps, and drifts.
      '<switch>KEEP</switch>',  # Names nothing, so four stands.
      said('KEEP', 'five'),  # Drifts.
    ],
    [said('switch', 'one'), said('KEEP', '')],
    [said('KEEP', 'two')],
  )
  switch = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
  drift = [0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0]
  assert table.turn_switch_U.dtype == table.turn_drift_U.dtype == np.bool_
  assert table.turn_switch_U[:14].astype(int).tolist() == switch
  assert table.turn_drift_U[:14].astype(int).tolist() == drift
  assert not table.turn_switch_U[14:].any()
  assert not table.turn_drift_U[14:].any()
