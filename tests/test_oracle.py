"""Every critic-free kernel against the float64 loops of `tests.oracle`."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

from planpo_jax import advantages, episodes
from tests import make_episodes, oracle

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden/advantages.json').read_text()
)

E_ONLY = {'alpha_init': 0.0, 'alpha_schedule': 'constant'}
S_ONLY = {'ae_weight': 0.0, 'alpha_init': 1.0, 'alpha_schedule': 'constant'}
BOTH = {'alpha_init': 0.1, 'alpha_schedule': 'constant'}
GOLDEN_PLANPO = {
  'A': BOTH,
  'A_E': E_ONLY,
  'A_S': S_ONLY,
  'A_S_flat_all': S_ONLY | {'as_group': 'flat_all'},
  'A_S_turn_all': S_ONLY | {'as_group': 'turn_all'},
  'A_S_turn_success': S_ONLY | {'as_group': 'turn_success'},
  'A_flat_all': BOTH | {'as_group': 'flat_all'},
  'A_E_ddof0': E_ONLY | {'ddof': 0},
  'A_E_no_std': E_ONLY | {'use_std': False},
  'A_E_turn_stat': E_ONLY | {'stat': 'turn'},
  'A_E_stratified': E_ONLY | {'ae_mode': 'stratified'},
  'A_E_unconditional': E_ONLY | {'conditional': False},
  'A_S_unconditional': S_ONLY | {'conditional': False},
}
GOLDEN_GRPO = {
  'A': {},
  'A_ddof0': {'ddof': 0},
  'A_dr_grpo': {'use_std': False},
  'A_turn_stat': {'stat': 'turn'},
}


def test_oracle_gives_the_golden_alpha():
  golden = GOLDEN['alpha']
  ends = golden['a_init'], golden['a_final']
  for k, wanted in golden['values'].items():
    actual = oracle.alpha(int(k) / golden['K'], *ends, 'decay')
    assert actual == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize('case', list(GOLDEN['cases']))
def test_oracle_gives_the_golden_values(case):
  group, expected = (GOLDEN['cases'][case][k] for k in ('group', 'expected'))
  batch = [
    make_episodes.episode(
      m['L'],
      success=m['success'],
      member=i,
      states=[ord(a) for a in m['anchor']],
    )
    for i, m in enumerate(group)
  ]

  def compare(actual, wanted):
    for values, value in zip(actual, wanted, strict=True):
      wanted_turns = np.broadcast_to(value, len(values))
      np.testing.assert_allclose(values, wanted_turns, rtol=0, atol=1e-6)

  for name, chosen in GOLDEN_PLANPO.items():
    wanted = (expected['planpo'] | expected['planpo_variants'])[name]
    compare(oracle.planpo(batch, progress=1.0, **chosen), wanted)
  for name, chosen in GOLDEN_GRPO.items():
    compare(oracle.grpo(batch, **chosen), expected['grpo'][name])
  compare(oracle.rloo(batch), expected['grpo']['A_rloo'])
  compare(oracle.gigpo(batch), expected['gigpo_std']['A'])
  compare(oracle.gigpo(batch, use_std=False), expected['gigpo_nostd']['A'])


BATCHES = 200
SETTINGS = 6
IDS, LOGPS = (0,) * 512, (0.0,) * 512
# One size for every table, so that a setting is compiled once.
NUM_E, NUM_U, NUM_R = 48, 768, 24_576

COMMON = {
  'stat': ['trajectory', 'turn'],
  'use_std': [True, True, False],
  'ddof': [1, 0],
  'eps': [1e-6, 1e-3],
  'invalid_penalty': [0.1, 0.35],
  'penalty': ['post', 'pre'],
  'single': ['zero', 'raw'],
}
PENALTY = ('penalty', 'invalid_penalty')
# Values to draw from for every hyperparameter of every critic-free method.
CHOICES = {
  'planpo': COMMON
  | {
    'ae_mode': ['paper', 'paper', 'stratified'],
    'ae_weight': [1.0, 0.0, 0.7],
    'as_group': ['flat_success', 'flat_all', 'turn_all', 'turn_success'],
    'alpha_init': [0.1, 0.3],
    'alpha_final': [0.05, 1.0],
    'alpha_schedule': ['decay', 'constant', 'increase'],
    'turns': ['active', 'valid_action'],
    'drop_truncated': [False, True],
    'len_floor': [0, 0, 16],
    'conditional': [True, True, False],
    'full_return': [10.0, 0.3],
  },
  'grpo': COMMON
  | {
    'overlong_limit': [0, 256],
    'overlong_buffer': [128, 64],
    'overlong_penalty': [1.0, 3.0],
  },
  'rloo': {k: COMMON[k] for k in ('stat', 'single', *PENALTY)},
  'reinforce_pp': {k: COMMON[k] for k in ('stat', *PENALTY)}
  | {'baseline': ['none', 'group'], 'eps': [1e-8, 1e-3]},
  'gigpo': COMMON
  | {
    'gamma': [0.95, 1.0, 0.8],
    'step_weight': [1.0, 0.0, 2.0],
    'similarity': [1.0, 1.0, 0.85],
  },
  'hgpo': COMMON
  | {
    'history': [2, 0, 4],
    'alpha': [1.0, 0.0, 2.0],
    'gamma': [0.95, 1.0, 0.8],
    'weight_offset': [1.0, 2.0],
    'weights_over': ['shared', 'nonzero', 'all'],
    'base_group': [False, True],
  },
  'empg': COMMON
  | {'k': [1.0, 0.0, 2.0], 'k_future': [1.0, 0.5], 'zeta': [0.1, 0.05]},
}
# Texts of the states; the first two, and the next two, are nearly the same.
STATES = (
  'A hall with a door to the north.',
  'A hall with a door to the south.',
  'Kitchen: a stove, a cup of water.',
  'Kitchen: a stove, a cup of milk.',
  'You are outside.',
  'Nothing happens.',
)


def settings(name):
  """Draws hyperparameters so that every value of each comes up."""
  rng = np.random.default_rng(len(name))
  drawn = {
    key: [rng.permutation(np.arange(SETTINGS) % len(values)), values]
    for key, values in CHOICES[name].items()
  }
  return [
    {key: values[order[i]] for key, (order, values) in drawn.items()}
    for i in range(SETTINGS)
  ]


def random_episodes(rng):
  """Up to 5 groups of up to 16, ragged; some are all alike in every way."""
  played, room_U, room_R = [], NUM_U, NUM_R
  for group in range(rng.integers(1, 6)):
    kind = rng.choice(['mixed', 'mixed', 'failed', 'solved', 'tied'])
    lost = float(rng.choice([0.0, 0.1]))  # Faults, and as many without a turn.
    solved = rng.random() < 0.7
    same_lengths = [int(rng.integers(0, 513))] * int(rng.integers(1, 51))
    for member in range(min(rng.integers(1, 17), NUM_E - len(played))):
      lengths = rng.integers(
        0, rng.choice([2, 41, 41, 41, 513]), round(50 ** rng.random())
      ).tolist()
      if rng.random() < 0.3:
        lengths[rng.integers(len(lengths))] = int(rng.choice([0, 512]))
      success = {'failed': False, 'solved': True}.get(kind, rng.random() < 0.5)
      if kind == 'tied':
        lengths, success = same_lengths, solved
      if len(lengths) > room_U or sum(lengths) > room_R:
        continue
      room_U, room_R = room_U - len(lengths), room_R - sum(lengths)
      score = 100.0 if success else rng.choice([-70.0, 0.0, 37.0, 57.0])
      ending = rng.choice(
        list(episodes.Ending), p=[0.6 - lost, 0.4 - lost, lost, lost]
      )
      turns = tuple(
        episodes.Turn(
          prompt_ids=(),
          response_ids=IDS[:length],
          response_logps=LOGPS[:length],
          observation=STATES[state],
          response='',
          action='',
          reward=0.0,
          valid=bool(rng.random() < 0.9),
          state_key=int(state),
          truncated=bool(rng.random() < 0.1),
        )
        for length, state in zip(
          lengths, rng.integers(0, len(STATES), len(lengths)), strict=True
        )
      )
      if ending is episodes.Ending.DEADLINE:
        turns = ()
      played.append(
        episodes.Episode(
          task=make_episodes.task(group),
          member=member,
          turns=turns,
          score=float(score),
          success=bool(success),
          ending=ending,
        )
      )
  if rng.random() < 0.5:
    rng.shuffle(played)
  return played


def outcome_of(rng):
  """Returns that float32 cannot store, 0.3 and 10/3 among them."""
  return {
    'outcome': str(rng.choice(['binary', 'graded'])),
    'success_return': float(rng.choice([10.0, 1.0, 0.3, 10 / 3])),
    'success_threshold': float(rng.choice([57.0, 100.0])),
    'score_floor': float(rng.choice([0.0, -100.0])),
  }


@functools.cache
def batches():
  """Returns (episodes, outcome, rewards, entropies of tokens) of each seed."""
  found = []
  for seed in range(BATCHES):
    rng = np.random.default_rng(seed)
    batch = episodes.learnable(random_episodes(rng))
    if not batch:
      batch = make_episodes.group([(True, [3])])
    outcome = outcome_of(rng)

    def draw(low, high, batch=batch, rng=rng):
      return [
        [rng.uniform(low, high, len(turn.response_ids)) for turn in e.turns]
        for e in batch
      ]

    rewards = draw(-1.0, 1.0)
    entropies = draw(0.0, 2.0) if seed % 10 else draw(0.3, 0.3)
    found.append((batch, outcome, rewards, entropies))
  return found


def flat(per_token):
  values = np.concatenate([np.concatenate(turns) for turns in per_token])
  return np.pad(values.astype(np.float32), (0, NUM_R - len(values)))


def numbers(per_token):
  return [[tokens.tolist() for tokens in turns] for turns in per_token]


def resize(table):
  """Pads a table to NUM_E, NUM_U and NUM_R; ids of padding follow."""
  old = {'E': len(table.episode_group_E), 'U': len(table.turn_tokens_U)}
  old['R'] = len(table.token_turn_R)
  new = {'E': NUM_E, 'U': NUM_U, 'R': NUM_R}
  points_to = {
    'turn_episode_U': 'E',
    'turn_state_U': 'U',
    'episode_group_E': 'E',
    'token_turn_R': 'U',
  }
  fields = {}
  for name, value in vars(table).items():
    if value is None:
      continue
    axis = name[-1]
    value = np.pad(value, (0, new[axis] - old[axis]))
    if name in points_to:
      target = points_to[name]
      value[old[axis] :] = new[target]
      value[value == old[target]] = new[target]
    fields[name] = value
  return episodes.TurnTable(**fields)


def critic_free():
  return [n for n in advantages.names() if not advantages.traits(n).values]


@pytest.mark.parametrize('name', critic_free())
def test_kernel_is_the_loops(name):
  """On 200 ragged batches, each with hyperparameters drawn at random.

  float32 keeps a value to 6e-8 of itself, so a difference from the mean to 6e-8
  of the largest value. Divided by the deviation, here seldom below a hundredth
  of that, 1e-5 remains, in units of the largest advantage or 1. `pre` leaves
  returns of 10 that differ by .1 at most, hence fewer digits. A group that is
  tied throughout is exactly 0.
  """
  assert CHOICES[name].keys() == advantages.hyperparameters(name).keys()
  needs = advantages.traits(name)
  drawn = settings(name)
  zero_groups = 0
  for seed, (batch, outcome, rewards, entropies) in enumerate(batches()):
    chosen = drawn[seed % SETTINGS]
    progress = (seed % 7) / 6
    table = episodes.tabulate(batch, **outcome)
    method = advantages.get(name, **chosen)
    table = resize(method.annotate(table, batch, lambda ids: ''))
    arguments = {'outcome': outcome}
    if name == 'planpo':
      arguments['progress'] = progress
    if needs.token_rewards and seed % SETTINGS % 2:
      table = dataclasses.replace(table, token_reward_R=flat(rewards))
      arguments['token_rewards'] = numbers(rewards)
    if needs.entropy:
      table = dataclasses.replace(table, token_entropy_R=flat(entropies))
      arguments['entropies'] = numbers(entropies)
    wanted_R = oracle.spread(
      batch, getattr(oracle, name)(batch, **arguments, **chosen)
    )
    actual_R = np.asarray(method.estimate(table, progress=np.float32(progress)))
    assert not actual_R[len(wanted_R) :].any(), (seed, chosen)
    actual_R = actual_R[: len(wanted_R)]
    atol = 5e-5 if chosen.get('penalty') == 'pre' else 1e-5
    atol *= max(1.0, np.abs(wanted_R).max(initial=0.0))
    np.testing.assert_allclose(
      actual_R, wanted_R, rtol=0, atol=atol, err_msg=f'{seed} {chosen}'
    )
    tasks = {e.task: n for n, e in enumerate(batch)}
    group_R = oracle.spread(
      batch, [[tasks[e.task]] * len(e.turns) for e in batch]
    )
    for task in set(group_R):
      if not wanted_R[group_R == task].any():
        zero_groups += 1
        assert not actual_R[group_R == task].any(), (seed, chosen)
  assert zero_groups or needs.batch_wide


def test_batches_hold_every_degenerate_case():
  """Otherwise the test above would not say what it seems to say."""
  found = set()
  for batch, *_ in batches():
    groups = {}
    for e in batch:
      assert e.turns and e.ending is not episodes.Ending.FAULT
      groups.setdefault(e.task, []).append(e)
      found.add('50 turns' if len(e.turns) == 50 else '')
      for turn in e.turns:
        found.add({0: 'empty', 512: '512 tokens'}.get(len(turn.response_ids)))
      if not any(turn.response_ids for turn in e.turns):
        found.add('no token at all')
    for members in groups.values():
      found.add({1: 'one', 16: 'sixteen'}.get(len(members)))
      shapes = {tuple(len(t.response_ids) for t in e.turns) for e in members}
      wins = sum(e.success for e in members)
      if len(members) > 2:
        found.add({0: 'no success', 1: 'one success'}.get(wins))
        found.add('all succeed' if wins == len(members) else '')
        found.add('tied' if len(shapes) == 1 and wins == len(members) else '')
  assert found >= {
    '50 turns',
    'empty',
    '512 tokens',
    'no token at all',
    'one',
    'sixteen',
    'no success',
    'one success',
    'all succeed',
    'tied',
  }
