"""ALFWorld: our engine against the stock one, on the same games and actions.

  python benchmarks/alfworld_steps.py --episodes=60 --resets=200

Both play every episode action by action; the texts, the admissible commands and
the outcomes are compared, then the times are. The stock environment is
`alfworld.agents.environment.AlfredTWEnv` as its users make it, which steps a
process of its own over a pipe; a pipe adds less than a millisecond. Games are
those below $ALFWORLD_DATA, or generated ones without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import psutil

from envs_server import alfworld_data, alfworld_engine

# Sent besides admissible commands: unknown, of another state, oddly spelt.
_ODD = ('xyzzy', 'open fridge 9', 'take mug 1 from desk 7', 'LOOK', '')
_MOST = 12  # Actions of an episode that follows no walkthrough.

# A game with the actions played in it.
Episode = tuple[str, list[str]]


def listed(data: pathlib.Path) -> list[str]:
  """Paths of all games, split by split and type by type in turn."""
  found = alfworld_data.find(data)
  columns = [
    [str(found.root / game.path / alfworld_data.GAME) for game in games]
    for split in alfworld_data.SPLITS
    for name in alfworld_data.TYPES
    if (games := list(found.games[split][name].values()))
  ]
  longest = max(map(len, columns))
  return [
    column[i] for i in range(longest) for column in columns if i < len(column)
  ]


def play(
  paths: Sequence[str], episodes: int
) -> tuple[list[Episode], list[list], dict[str, list[float]]]:
  """Plays with our engine: walkthroughs first, then at random.

  Returns:
    (episodes, seen, seconds): what was played; for each episode and turn
    [text, admissible commands, won]; seconds of each reset and step.
  """
  engine = alfworld_engine.Engine()
  played, seen = [], []
  seconds: dict[str, list[float]] = {'reset': [], 'step': []}
  for number in range(episodes):
    path = paths[number % len(paths)]
    game = alfworld_data.read_game(pathlib.Path(path))
    draw = random.Random(number)
    plan = alfworld_data.solution(game) if number < len(paths) else ()
    start = time.perf_counter()
    text = engine.load(game)
    seconds['reset'].append(time.perf_counter() - start)
    turns = [[text, list(engine.admissible()), engine.won]]
    actions = []
    while not engine.won and len(actions) < len(plan or range(_MOST)):
      if plan:
        action = plan[len(actions)]
      else:
        action = draw.choice([*turns[-1][1], *_ODD])
        before = actions[-1] if actions else ''
        if before.startswith('open ') and draw.random() < 0.5:
          action = before.replace('open', 'close', 1)
      start = time.perf_counter()
      text = engine.step(action)
      turns.append([text, list(engine.admissible()), engine.won])
      seconds['step'].append(time.perf_counter() - start)
      actions.append(action)
    played.append((path, actions))
    seen.append(turns)
  return played, seen, seconds


def play_stock(
  played: Sequence[Episode],
) -> tuple[list[list], dict[str, list[float]], float]:
  """Plays the same with the stock environment, in a process of its own.

  Returns:
    (seen, seconds, megabytes): as `play`, and the resident memory of the
    process that held the game.
  """
  child = subprocess.run(
    [sys.executable, os.path.abspath(__file__), '--stock'],
    input=json.dumps(played),
    capture_output=True,
    text=True,
    check=True,
  )
  return tuple(json.loads(child.stdout.splitlines()[-1]))


def _stock() -> None:
  """The child of `play_stock`."""
  from alfworld.agents.environment import alfred_tw_env

  config = {
    'dataset': {'data_path': os.devnull, 'num_train_games': 0},
    'env': {
      'goal_desc_human_anns_prob': 0,
      'task_types': [1, 2, 3, 4, 5, 6],
      'domain_randomization': False,
      'expert_type': 'handcoded',
    },
    # Without an expert, who would plan at every step.
    'general': {'training_method': 'dqn'},
    'rl': {'training': {'max_nb_steps_per_episode': 1000}},
  }
  seen, seconds = [], {'reset': [], 'step': []}
  with contextlib.redirect_stdout(sys.stderr):
    stock = alfred_tw_env.AlfredTWEnv(config, train_eval='train')
    for path, actions in json.load(sys.stdin):
      stock.game_files = [path]
      game = stock.init_env(batch_size=1)
      start = time.perf_counter()
      (text,), info = game.reset()
      seconds['reset'].append(time.perf_counter() - start)
      turns = [[text, info['admissible_commands'][0], info['won'][0]]]
      for action in actions:
        start = time.perf_counter()
        (text,), _, _, info = game.step([action])
        seconds['step'].append(time.perf_counter() - start)
        turns.append([text, info['admissible_commands'][0], info['won'][0]])
      seen.append(turns)
      me = psutil.Process()
      held = [me, *me.children(recursive=True)]
      megabytes = max(process.memory_info().rss for process in held) / 1e6
      game.close()
  print(json.dumps([seen, seconds, megabytes]))


def memory_over(paths: Sequence[str], resets: int) -> list[float]:
  """Megabytes resident after each of `resets` games, three actions each."""
  engine, me, found = alfworld_engine.Engine(), psutil.Process(), []
  for number in range(resets):
    game = alfworld_data.read_game(pathlib.Path(paths[number % len(paths)]))
    engine.load(game)
    for action in engine.admissible()[:3]:
      engine.step(action)
    found.append(me.memory_info().rss / 1e6)
  return found


def _row(name: str, stock: list[float], ours: list[float]) -> str:
  cells = []
  for values in (stock, ours):
    ordered = sorted(1e3 * value for value in values)
    cells += [statistics.median(ordered), ordered[int(0.95 * len(ordered))]]
  ratio = cells[0] / cells[2]
  return (
    f'{name:>6}  {cells[0]:9.1f} {cells[1]:9.1f}  {cells[2]:9.2f} '
    f'{cells[3]:9.2f}  {ratio:8.1f}'
  )


def _data(scratch: str) -> pathlib.Path:
  if 'ALFWORLD_DATA' in os.environ:
    return alfworld_data.folder()
  from envs_server import alfworld_games

  data = pathlib.Path(scratch)
  for split in alfworld_data.SPLITS:
    alfworld_games.generate(data, per_type=2, split=split, seed=0)
  return data


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument('--episodes', type=int, default=60)
  parser.add_argument('--resets', type=int, default=200)
  parser.add_argument('--stock', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.stock:
    _stock()
    return 0
  with tempfile.TemporaryDirectory() as scratch:
    paths = listed(_data(scratch))
    played, seen, ours = play(paths, args.episodes)
    own = psutil.Process().memory_info().rss / 1e6
    same, stock, megabytes = play_stock(played)
    turns = sum(map(len, seen))
    differ = [
      (path, turn)
      for (path, _), left, right in zip(played, seen, same, strict=True)
      for turn, pair in enumerate(zip(left, right, strict=True))
      if pair[0] != pair[1]
    ]
    # The first episode of each game follows its walkthrough.
    lost = [
      path
      for (path, _), episode in zip(played[: len(paths)], seen, strict=False)
      if not episode[-1][2]
    ]
    print(
      f'{len(played)} episodes of {len(set(p for p, _ in played))} games, '
      f'{turns} observations: {turns - len(differ)} equal'
    )
    for what, found in (('differ', differ), ('are not won', lost)):
      print(f'{len(found)} {what} {found[:3] or ""}')
    print('          stock ms       p95    ours ms       p95   quicker')
    print(_row('reset', stock['reset'], ours['reset']))
    print(_row('step', stock['step'], ours['step']))
    print(f'memory of a process: stock {megabytes:.0f} MB, ours {own:.0f} MB')
    held = memory_over(paths, args.resets)
    tenth = max(1, args.resets // 10)
    print(
      f'{args.resets} resets: {held[tenth - 1]:.1f} MB after {tenth}, '
      f'{held[-1]:.1f} MB after all'
    )
  return 1 if differ or lost else 0


if __name__ == '__main__':
  sys.exit(main())
