"""Speed of advantages: the kernels beside loops over groups, in one run.

  python benchmarks/advantages.py [--scale=100] [--repeats=21] [--methods=...]

A step of 128 episodes of 50 turns, 6,400 turns and some 640,000 response tokens
of at most 512 a turn, and --scale times as many. Medians, in milliseconds:

  turns   one advantage a turn: the estimator on a table with one token a turn,
          so what it does with tokens hardly counts;
  tokens  that of every token: the estimator on the whole table;
  loops   the same two for the usual code, which gets rewards and mask as
          matrices of [turns, 512] and labels a row: sums along the rows, a dict
          of lists for the groups, a Python loop over rows, NumPy for each
          group, and rows times mask for the tokens. Written for three methods.

Both sides must agree before they are timed. The kernels get a table that is on
the device already; `tabulate`, which lays it out, is timed apart, on up to ten
times the step, for more episodes do not fit as Python objects.
"""

import argparse
import collections
import dataclasses
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import numpy as np

from planpo_jax import advantages, episodes

GROUPS, MEMBERS, TURNS, CAP = 16, 8, 50, 512
STATES = 200
EPS = 1e-6
GAMMA = 0.95
ALPHA = 0.05
PENALTY = 0.1


def draw_lengths(rng, turns: int) -> np.ndarray:
  return np.minimum(rng.geometric(0.01, turns), CAP)


def make_episodes(rng, groups: int) -> list[episodes.Episode]:
  """Plays groups out; the token ids, the same for all, take no memory."""
  ids, logps = (0,) * CAP, (0.0,) * CAP
  result = []
  for group in range(groups):
    task = episodes.Task('toy', 'train', group, 'walk')
    for member in range(MEMBERS):
      lengths = draw_lengths(rng, TURNS).tolist()
      states = rng.integers(0, STATES, TURNS).tolist()
      valid = (rng.random(TURNS) < 0.95).tolist()
      turns = tuple(
        episodes.Turn((), ids[:n], logps[:n], '', '', '', 0.0, v, state)
        for n, v, state in zip(lengths, valid, states, strict=True)
      )
      success = bool(rng.random() < 0.5)
      result.append(
        episodes.Episode(
          task, member, turns, 0.0, success, episodes.Ending.TERMINATED
        )
      )
  return result


def repeat(table: episodes.TurnTable, times: int) -> episodes.TurnTable:
  """Lays the same step out many times, as groups of their own."""
  num_E, num_U = len(table.episode_group_E), len(table.turn_tokens_U)
  real = {
    'E': table.episode_group_E < num_E,
    'U': table.turn_episode_U < num_E,
    'R': table.token_turn_R < num_U,
  }
  count = {axis: int(kept.sum()) for axis, kept in real.items()}
  new = {axis: episodes.bucket(times * n) for axis, n in count.items()}
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
    value = value[real[axis]]
    tiled = np.empty(new[axis], value.dtype)
    tiled[: times * count[axis]] = np.tile(value, times)
    tiled[times * count[axis] :] = 0
    if target := points_to.get(name):
      # No step has more groups than episodes, nor more states than turns.
      first = np.arange(times, dtype=value.dtype) * count[target]
      tiled[: times * count[axis]] += np.repeat(first, count[axis])
      tiled[times * count[axis] :] = new[target]
    fields[name] = tiled
  return episodes.TurnTable(**fields)


def one_token_a_turn(table: episodes.TurnTable) -> episodes.TurnTable:
  num_E, num_U = len(table.episode_group_E), len(table.turn_tokens_U)
  turn_U = np.arange(num_U, dtype=np.int32)
  return dataclasses.replace(
    table,
    token_turn_R=np.where(table.turn_episode_U < num_E, turn_U, num_U),
    token_role_R=np.zeros(num_U, np.int32),
  )


@dataclasses.dataclass(frozen=True)
class Rows:
  """A step as the usual code has it: a row a turn.

  Attributes:
    group, episode, state: one label a row.
    invalid: bool.
    turns: turns of the episode, float64.
    rewards: [rows, 512] float32, the return of the episode at the last token.
    mask: [rows, 512] float32.
  """

  group: list[int]
  episode: list[int]
  state: list[int]
  invalid: np.ndarray
  turns: np.ndarray
  rewards: np.ndarray
  mask: np.ndarray

  def score(self) -> np.ndarray:
    return self.rewards.sum(axis=-1)

  def length(self) -> np.ndarray:
    return self.mask.sum(axis=-1)


def as_rows(table: episodes.TurnTable) -> Rows:
  real_U = table.turn_episode_U < len(table.episode_group_E)
  episode_U = table.turn_episode_U[real_U]
  length_U = table.turn_tokens_U[real_U]
  rewards = np.zeros((len(length_U), CAP), np.float32)
  rewards[np.arange(len(length_U)), length_U - 1] = table.episode_return_E[
    episode_U
  ]
  return Rows(
    group=table.episode_group_E[episode_U].tolist(),
    episode=episode_U.tolist(),
    state=table.turn_state_U[real_U].tolist(),
    invalid=~table.turn_valid_U[real_U],
    turns=np.bincount(episode_U)[episode_U].astype(np.float64),
    rewards=rewards,
    mask=(np.arange(CAP) < length_U[:, None]).astype(np.float32),
  )


def _standard(values):
  mean, std = np.mean(values), np.std(values, ddof=1)
  return (mean, 1.0) if np.ptp(values) == 0 else (mean, std + EPS)


def _per_episode(rows: Rows, values: np.ndarray) -> np.ndarray:
  """Standardises over the episodes of each group, each counted once."""
  members, seen = collections.defaultdict(list), set()
  for group, episode, value in zip(
    rows.group, rows.episode, values, strict=True
  ):
    if episode not in seen:
      seen.add(episode)
      members[group].append(value)
  known = {group: _standard(values) for group, values in members.items()}
  result = np.empty(len(values))
  for i, group in enumerate(rows.group):
    mean, scale = known[group]
    result[i] = (values[i] - mean) / scale
  return result


def loop_grpo(rows: Rows) -> np.ndarray:
  return _per_episode(rows, rows.score()) - PENALTY * rows.invalid


def loop_planpo(rows: Rows) -> np.ndarray:
  score = rows.score()
  by_episode = _per_episode(rows, score / rows.turns)
  shortness = score / rows.length()
  members = collections.defaultdict(list)
  for i, group in enumerate(rows.group):
    if score[i] > 0:
      members[group].append(i)
  by_turn = np.zeros(len(shortness))
  for places in members.values():
    mean, scale = _standard(shortness[places])
    by_turn[places] = (shortness[places] - mean) / scale
  return by_episode + ALPHA * by_turn - PENALTY * rows.invalid


def loop_gigpo(rows: Rows) -> np.ndarray:
  score = rows.score()
  total = _per_episode(rows, score)
  played = collections.defaultdict(list)
  for i, episode in enumerate(rows.episode):
    played[episode].append(i)
  togo = np.empty(len(total))
  for places in played.values():
    value = score[places[-1]]
    for i in reversed(places):
      togo[i] = value
      value *= GAMMA
  members = collections.defaultdict(list)
  for i, key in enumerate(zip(rows.group, rows.state, strict=True)):
    members[key].append(i)
  for places in members.values():
    if len(places) > 1:
      mean, scale = _standard(togo[places])
      total[places] += (togo[places] - mean) / scale
  return total - PENALTY * rows.invalid


LOOPS = {'planpo': loop_planpo, 'grpo': loop_grpo, 'gigpo': loop_gigpo}


def median_ms(function, repeats: int) -> float:
  jax.block_until_ready(function())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(function())
    times.append((time.perf_counter() - start) * 1e3)
  return statistics.median(times)


def time_tabulate(rng, scales, repeats: int) -> None:
  print('tabulate:')
  for scale in scales:
    batch = make_episodes(rng, GROUPS * scale)
    turns = sum(len(e.turns) for e in batch)
    took = median_ms(lambda batch=batch: episodes.tabulate(batch), repeats)
    print(
      f'  {len(batch):,} episodes, {turns:,} turns: {took:.1f} ms', flush=True
    )


def time_methods(
  table: episodes.TurnTable, names: list[str], repeats: int
) -> None:
  """Prints a line for each method, the two sides in turn."""
  num_U = len(table.turn_tokens_U)
  rows = as_rows(table)
  tokens_U = table.turn_tokens_U
  print(
    f'\n{len(rows.group):,} turns, {tokens_U.sum():,} tokens; tables of '
    f'{num_U:,} and {len(table.token_turn_R):,}'
  )
  print('              ----- turns, ms ------   ----- tokens, ms -----')
  print('method         kernel    loops  ratio    kernel    loops  ratio')
  whole = jax.device_put(table)
  small = jax.device_put(one_token_a_turn(table))
  for name in names:
    needs = advantages.traits(name)
    method = advantages.get(name)
    tables = whole, small
    if needs.entropy:
      tables = [
        dataclasses.replace(
          t, token_entropy_R=1.0 / (1.0 + t.token_turn_R.astype(np.float32))
        )
        for t in tables
      ]
    on_tokens, on_turns = (
      lambda t=t, method=method: method.estimate(t, progress=np.float32(1))
      for t in tables
    )
    kernel = median_ms(on_turns, repeats), median_ms(on_tokens, repeats)
    loop = LOOPS.get(name)
    if loop is None:
      print(
        f'{name:13s} {kernel[0]:7.2f} {"":15s} {kernel[1]:9.2f}', flush=True
      )
      continue
    wanted_U = loop(rows)
    np.testing.assert_allclose(
      np.asarray(on_turns())[: len(wanted_U)], wanted_U, atol=1e-4
    )
    wanted_R = np.repeat(wanted_U, tokens_U[: len(wanted_U)])
    np.testing.assert_allclose(
      np.asarray(on_tokens())[: len(wanted_R)], wanted_R, atol=1e-4
    )
    fewer = max(1, repeats // 4)
    loops = (
      median_ms(lambda loop=loop: loop(rows), fewer),
      median_ms(
        lambda loop=loop: (loop(rows).astype(np.float32)[:, None] * rows.mask),
        fewer,
      ),
    )
    ratio = [theirs / ours for theirs, ours in zip(loops, kernel, strict=True)]
    print(
      f'{name:13s} {kernel[0]:7.2f} {loops[0]:8.1f} {ratio[0]:6.0f} '
      f'{kernel[1]:9.2f} {loops[1]:8.1f} {ratio[1]:6.0f}',
      flush=True,
    )


def main() -> None:
  critic_free = [
    name for name in advantages.names() if not advantages.traits(name).values
  ]
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--scale', type=int, default=100)
  parser.add_argument('--repeats', type=int, default=21)
  parser.add_argument('--methods', default=','.join(critic_free))
  args = parser.parse_args()
  if unknown := set(args.methods.split(',')) - set(critic_free):
    parser.error(
      f'--methods={",".join(sorted(unknown))}: not among those without a '
      f'critic, {", ".join(critic_free)}'
    )
  rng = np.random.default_rng(0)
  load = ' '.join(f'{value:.1f}' for value in os.getloadavg())
  print(f'{os.cpu_count()} CPU cores, load {load}, {jax.default_backend()}')
  print(
    'Paper, an iteration of 16 x 8 episodes: rewards 2.05 s, advantages 1.25 s '
    '(arXiv 2608.17289).'
  )
  time_tabulate(rng, sorted({1, min(args.scale, 10)}), 5)
  table = episodes.tabulate(make_episodes(rng, GROUPS))
  for scale in sorted({1, args.scale}):
    time_methods(
      table if scale == 1 else repeat(table, scale),
      args.methods.split(','),
      args.repeats if scale == 1 else max(3, args.repeats // 7),
    )


if __name__ == '__main__':
  main()
