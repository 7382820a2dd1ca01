"""The environment service: its speed, a crowd of episodes, and its memory.

  python benchmarks/env_service.py [--parts=sciworld,toy,crowd,soak]
    [--scale=1.0] [--repeats=5]

Both sides of every comparison are taken in one run. The client is this process,
the service one of its own, as in training. `--scale` shrinks counts and times,
for a try; figures are those of 1. Parts:

- sciworld: steps/s of ScienceWorld behind gRPC against the same engine called
  in this process: the same tasks, without simplifications and with `easy`, and
  the same gold actions, which end each episode won. Blocks alternate
  (here, 1 worker, 4 workers, here, ...) after a warm-up for the compiler of the
  JVMs; medians. `steps` leaves resets out. With CPU time a step by process, and
  that of the compiler and the collector of the JVMs apart.
- toy: what the service adds to a step: round trips less the environment's own
  time, which is taken in this process. One episode; 64, each acting 1 or 4
  times a second at a phase of its own, as policies do; and 64 without pause,
  where throughput is what there is to see: 64 wait for 2 cores.
- crowd: 1,000 episodes in 1,000 workers, all begun before the first acts; then
  1,000 streams opened at once over 64 workers. Each is played until it is won.
- soak: 20,000 toy episodes and 300 of ScienceWorld, workers never replaced;
  then with replacement. Resident memory, open files and processes are sampled
  all along. The first fifth is warm-up. Of the rest, the last fifth is held
  against the first: flat is what grew by no more than 3 % (JVMs, which collect
  when they like: 10 %), and files and processes by no more than one. Of workers
  that were replaced the memory is shown and not judged.

Exit code 1: an episode failed or had to be played again, or something was not
flat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psutil

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from envs_server import env as env_lib
from envs_server import sciworld as sciworld_env
from envs_server import toy as toy_env
from planpo_jax import env_client, env_service, episodes

PARTS = ('sciworld', 'toy', 'crowd', 'soak')
# One of most kinds of tasks; the engine finds their gold paths in a second.
GAMES = (
  'boil',
  'chemistry-mix',
  'find-living-thing',
  'find-plant',
  'identify-life-stages-1',
  'inclined-plane-determine-angle',
  'lifespan-longest-lived',
  'measure-melting-point-known-substance',
  'power-component',
  'test-conductivity',
  'use-thermometer',
)
OPTIONS = ((), (('simplifications', 'easy'),))
WORKERS = 4
# Blocks before the first that counts: the JVMs compile for that long.
WARM_UP = 10
EPISODES = 64
# Acts a second of each episode; 0: the next one at once.
LOADS = ((1, 0.0), (EPISODES, 1.0), (EPISODES, 4.0), (EPISODES, 0.0))
LOAD_S = 10.0
CROWD = 1000
TOY_SOAK, TOY_WORKERS = 20_000, 8
SCIWORLD_SOAK = 300
SAMPLE_S = 0.5
# How many times as much, at most, is flat.
FLAT = {'service': 1.03, 'workers': 1.03, 'JVMs': 1.10}
# Threads of a JVM that are not the engine, by what their names begin with.
JVM_CHORES = {
  'compiler': ('C1 Comp', 'C2 Comp'),
  'collector': ('VM Thread', 'GC ', 'G1 '),
}


@dataclasses.dataclass(frozen=True)
class Game:
  """A task and the actions that win it."""

  task: episodes.Task
  actions: tuple[str, ...]


# -- Processes -----------------------------------------------------------------


class Processes:
  """A service and what it has started."""

  def __init__(self, service: env_service.LocalService):
    self.service = psutil.Process(service.pid)

  def by_kind(self) -> dict[str, list[psutil.Process]]:
    """Every process, as one of the service, the workers and the JVMs."""
    found = {'service': [self.service], 'workers': [], 'JVMs': []}
    for process in self.service.children(recursive=True):
      with contextlib.suppress(psutil.NoSuchProcess):
        is_java = 'java' in process.name()
        found['JVMs' if is_java else 'workers'].append(process)
    return found

  def cpu_s(self) -> dict[str, float]:
    """CPU seconds so far: the client's, by kind, and of chores of the JVMs."""
    seconds = {'client': _cpu_s(psutil.Process())}
    by_kind = self.by_kind()
    for kind, processes in by_kind.items():
      seconds[kind] = sum(map(_cpu_s, processes))
    for chore in JVM_CHORES:
      seconds[chore] = sum(_chore_s(p.pid, chore) for p in by_kind['JVMs'])
    return seconds

  def sample(self) -> dict[str, float]:
    """Bytes resident by kind, open files of the service, processes."""
    found, count = {}, 0
    for kind, processes in self.by_kind().items():
      count += len(processes)
      found[kind] = 0.0
      for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
          found[kind] += process.memory_info().rss
    return found | {'files': self.service.num_fds(), 'processes': count}

  def proportional_bytes(self) -> float:
    """Bytes of the service and workers, shared pages counted once."""
    return sum(
      process.memory_full_info().pss
      for processes in self.by_kind().values()
      for process in processes
    )


def _cpu_s(process: psutil.Process) -> float:
  return sum(process.cpu_times()[:2])


def _chore_s(pid: int, chore: str) -> float:
  """CPU seconds of the threads of a JVM that do a chore."""
  ticks = 0
  for thread in os.listdir(f'/proc/{pid}/task'):
    with open(f'/proc/{pid}/task/{thread}/stat') as file:
      head, _, rest = file.read().rpartition(') ')
    if head.partition('(')[2].startswith(JVM_CHORES[chore]):
      ticks += sum(map(int, rest.split()[11:13]))
  return ticks / os.sysconf('SC_CLK_TCK')


@contextlib.asynccontextmanager
async def served(env: str, workers: int, *options: str):
  """A service with all its worker processes, its client, and what runs."""
  with env_service.LocalService(env, workers, options=options) as service:
    processes = Processes(service)
    client = env_client.EnvClient(service.address)
    await client.connect()
    try:
      while len(processes.by_kind()['workers']) < workers:
        await asyncio.sleep(0.05)
      yield client, processes
    finally:
      await client.close()


# -- Games ---------------------------------------------------------------------


def solve(made: env_lib.TextEnv, tasks: Iterable[episodes.Task]) -> list[Game]:
  """Has an environment tell how the tasks are won.

  Raises:
    RuntimeError: one of them is not.
  """
  games = []
  for task in tasks:
    found = made.reset(_task(task), expert=True).expert_actions
    taken = []
    for action in found:
      seen = made.step(action)
      taken.append(action)
      if seen.terminated:
        break  # Some gold paths go on after the goal.
    if not seen.success:
      raise RuntimeError(f'{task} is not won by its own solution.')
    games.append(Game(task, tuple(taken)))
  return games


def sciworld_games(made: sciworld_env.ScienceWorld) -> list[Game]:
  return solve(
    made,
    [
      episodes.Task('sciworld', 'train', 1, name, options=options)
      for options in OPTIONS
      for name in GAMES
    ],
  )


def toy_games() -> list[Game]:
  return solve(
    toy_env.make_env(),
    [
      episodes.Task('toy', 'train', index, name)
      for index in range(64)
      for name in ('fetch', 'unlock', 'deliver')
    ],
  )


def _task(task: episodes.Task) -> env_lib.Task:
  return env_lib.Task(**vars(task) | {'options': dict(task.options)})


class Here:
  """An environment of this process, as `env_client.Session` is used."""

  def __init__(self, made: env_lib.TextEnv, task: episodes.Task):
    self._made = made
    self._task = _task(task)

  async def reset(self):
    return self._made.reset(self._task)

  async def step(self, action):
    return self._made.step(action)

  async def close(self):
    pass


@dataclasses.dataclass
class Tally:
  """How episodes went.

  Attributes:
    won: as they should.
    failed: and why.
    recoveries: times that one was played again by the client.
  """

  won: int = 0
  failed: list[str] = dataclasses.field(default_factory=list)
  recoveries: int = 0

  @property
  def good(self) -> bool:
    return not (self.failed or self.recoveries)

  def __str__(self) -> str:
    text = (
      f'{self.won} won, {len(self.failed)} failed, {self.recoveries} played '
      'again'
    )
    return f'{text}; first failure: {self.failed[0]}' if self.failed else text


async def play(
  client: env_client.EnvClient,
  game: Game,
  tally: Tally,
  begun: asyncio.Barrier | None = None,
) -> None:
  """Plays an episode to its end, from `begun` on if that is given."""
  session = client.session(game.task, step_limit=0)
  try:
    seen = await session.reset()
    if begun is not None:
      await begun.wait()
    for action in game.actions:
      seen = await session.step(action)
    if seen.ending is episodes.Ending.TERMINATED and seen.success:
      tally.won += 1
    else:
      tally.failed.append(f'{game.task} was not won: {seen}')
  except Exception as error:
    tally.failed.append(f'{game.task}: {error!r}')
    if begun is not None:
      await begun.abort()
  finally:
    tally.recoveries += session.faults
    await session.close()


# -- ScienceWorld --------------------------------------------------------------


@dataclasses.dataclass
class Rates:
  """Of a block: what was seen, and how fast.

  Attributes:
    steps: taken by all players together.
    step_s: seconds in which players took steps, together.
    reset_s: seconds in which they were reset, together.
    seen: texts, by game and player and turn.
  """

  steps: int = 0
  step_s: float = 0.0
  reset_s: float = 0.0
  seen: list[list[list[str]]] = dataclasses.field(default_factory=list)

  @property
  def per_s(self) -> float:
    return self.steps / self.step_s

  @property
  def per_s_with_resets(self) -> float:
    return self.steps / (self.step_s + self.reset_s)


async def block(
  games: Sequence[Game], players: int, sit: Callable[[Game], object]
) -> Rates:
  """Plays every game by so many players side by side."""
  rates = Rates()
  for game in games:
    sessions = [sit(game) for _ in range(players)]
    start_s = time.perf_counter()
    await asyncio.gather(*(session.reset() for session in sessions))
    begun_s = time.perf_counter()
    seen = await asyncio.gather(
      *(_steps(session, game.actions) for session in sessions)
    )
    rates.step_s += time.perf_counter() - begun_s
    rates.reset_s += begun_s - start_s
    rates.steps += players * len(game.actions)
    rates.seen.append(seen)
    for session in sessions:
      await session.close()
  return rates


async def _steps(session, actions: Sequence[str]) -> list[str]:
  return [(await session.step(action)).text for action in actions]


async def sciworld(scale: float, repeats: int) -> bool:
  made = sciworld_env.make_env()
  games = sciworld_games(made)
  lengths = sum(len(game.actions) for game in games)
  print(f'sciworld: {len(games)} episodes, {lengths} steps a block and worker')
  try:
    async with (
      served('sciworld', 1) as (one, processes),
      served('sciworld', WORKERS) as (several, all_processes),
    ):
      sides = {
        'here': (1, lambda game: Here(made, game.task), None),
        'gRPC, 1': (1, _sit(one), processes),
        f'gRPC, {WORKERS}': (WORKERS, _sit(several), all_processes),
      }
      await _sciworld_blocks(games, sides, scale, repeats)
  finally:
    made.close()
  return True


def _sit(client: env_client.EnvClient) -> Callable[[Game], env_client.Session]:
  return lambda game: client.session(game.task, step_limit=0)


async def _sciworld_blocks(games, sides, scale, repeats) -> None:
  blocks = {name: [] for name in sides}
  spent = {name: {} for name in sides}
  warm_up = max(1, round(WARM_UP * scale))
  for repeat in range(warm_up + repeats):
    for name, (players, sit, processes) in sides.items():
      before = processes.cpu_s() if processes else {}
      rates = await block(games, players, sit)
      first = blocks['here'][0] if blocks['here'] else rates
      for game, alone, seen in zip(games, first.seen, rates.seen, strict=True):
        if any(texts != alone[0] for texts in seen):
          raise RuntimeError(f'{name}: {game.task} went another way.')
      blocks[name].append(rates)
      if processes and repeat >= warm_up:
        for kind, seconds in processes.cpu_s().items():
          spent[name][kind] = (
            spent[name].get(kind, 0.0) + seconds - before[kind]
          )
  medians = {}
  for name, done in blocks.items():
    done = done[warm_up:]
    medians[name] = steps, whole = (
      statistics.median(rates.per_s for rates in done),
      statistics.median(rates.per_s_with_resets for rates in done),
    )
    players = sides[name][0]
    print(
      f'{name:8s} {steps:7.1f} steps/s ({1e3 * players / steps:6.3f} ms a '
      f'step), with resets {whole:6.1f}'
    )
    if spent[name]:
      _show_cpu(spent[name], sum(rates.steps for rates in done))
  alone, single, many = medians.values()
  for label, i in (('steps', 0), ('with resets', 1)):
    print(
      f'{label}: gRPC gives {single[i] / alone[i]:.1%} of the engine (asked: '
      f'90 %); {WORKERS} workers give {many[i] / single[i]:.2f} x 1 (asked: '
      f'1.8)',
      flush=True,
    )


def _show_cpu(spent: dict[str, float], steps: int) -> None:
  cpu = {kind: 1e3 * seconds / steps for kind, seconds in spent.items()}
  chores = ', '.join(f'{name} {cpu.pop(name):.3f}' for name in JVM_CHORES)
  kinds = ', '.join(f'{kind} {each:.3f}' for kind, each in cpu.items())
  print(
    f'         CPU ms a step, resets included: {sum(cpu.values()):.3f} = '
    f'{kinds} (of which {chores})'
  )


# -- Toy -----------------------------------------------------------------------


def step_here_s(game: Game) -> float:
  """Median seconds of a step of the toy environment in this process."""
  made = toy_env.make_env()
  made.reset(_task(game.task))
  spent = []
  for _ in range(2000):
    start_s = time.perf_counter()
    made.step('look')
    spent.append(time.perf_counter() - start_s)
  return statistics.median(spent)


async def act(session, per_s: float, until_s: float, spent: list) -> None:
  """Acts again and again; appends the seconds that each step took."""
  loop = asyncio.get_running_loop()
  next_s = loop.time() + (random.random() / per_s if per_s else 0.0)
  while max(next_s, loop.time()) < until_s:
    if per_s:
      await asyncio.sleep(next_s - loop.time())
      next_s += 1 / per_s
    start_s = time.perf_counter()
    await session.step('look')
    spent.append(time.perf_counter() - start_s)


async def toy(scale: float, repeats: int) -> bool:
  game = toy_games()[0]
  own_s = step_here_s(game)
  load_s = max(1.0, LOAD_S * scale)
  print(f"toy: the environment's own time is {1e6 * own_s:.1f} us a step")
  async with served('toy', EPISODES) as (client, processes):
    sessions = [
      client.session(game.task, step_limit=0) for _ in range(EPISODES)
    ]
    await asyncio.gather(*(session.reset() for session in sessions))
    rounds = {load: [] for load in LOADS}
    for repeat in range(1 + repeats):  # The first is warm-up.
      for (count, per_s), found in rounds.items():
        spent, before = [], processes.cpu_s()
        start_s = asyncio.get_running_loop().time()
        await asyncio.gather(
          *(
            act(session, per_s, start_s + load_s, spent)
            for session in sessions[:count]
          )
        )
        whole_s = asyncio.get_running_loop().time() - start_s
        after = processes.cpu_s()
        if repeat:
          spent = sorted(seconds - own_s for seconds in spent)
          found.append(
            {
              'p50': 1e3 * spent[len(spent) // 2],
              'p99': 1e3 * spent[len(spent) * 99 // 100],
              'rate': len(spent) / whole_s,
            }
            | {
              kind: 1e6 * (after[kind] - before[kind]) / len(spent)
              for kind in ('client', 'service', 'workers')
            }
          )
    for load, found in rounds.items():
      _show_load(*load, found)
    for session in sessions:
      await session.close()
  return True


def _show_load(count: int, per_s: float, found: list[dict[str, float]]) -> None:
  of = {k: statistics.median(one[k] for one in found) for k in found[0]}
  load = f'each {per_s:g} times a second' if per_s else 'without pause'
  asked = '  (asked: 1 and 5)' if per_s else ''
  print(
    f'{count:2d} episodes, {load:19s} {of["rate"]:5.0f} steps/s  overhead p50 '
    f'{of["p50"]:6.3f} ms  p99 {of["p99"]:6.3f} ms{asked}  CPU us a step: '
    f'client {of["client"]:.0f}, service {of["service"]:.0f}, workers '
    f'{of["workers"]:.0f}',
    flush=True,
  )


# -- Crowd ---------------------------------------------------------------------


async def crowd(scale: float, repeats: int) -> bool:
  count = max(EPISODES, round(CROWD * scale))
  good = True
  for workers in (count, EPISODES):
    start_s = time.perf_counter()
    async with served('toy', workers) as (client, processes):
      games = toy_games()
      tally = Tally()
      # Only with a worker for each can all of them begin before one ends.
      begun = asyncio.Barrier(count) if workers == count else None
      await asyncio.gather(
        *(play(client, games[i % len(games)], Tally()) for i in range(workers))
      )
      built_s = time.perf_counter() - start_s
      start_s = time.perf_counter()
      await asyncio.gather(
        *(
          play(client, games[i % len(games)], tally, begun)
          for i in range(count)
        )
      )
      spent_s = time.perf_counter() - start_s
      resident = processes.sample()
      shared_once = processes.proportional_bytes()
      print(
        f'crowd: {count} episodes at once over {workers} workers: {tally}; '
        f'{spent_s:.1f} s (workers built in {built_s:.1f} s); resident: '
        f'service {resident["service"] / 1e6:.0f} MB, a worker '
        f'{resident["workers"] / workers / 1e6:.1f} MB; all with shared pages '
        f'counted once {shared_once / 1e6:.0f} MB; {resident["files"]} open '
        'files',
        flush=True,
      )
      good = good and tally.good
  return good


# -- Soak ----------------------------------------------------------------------


@dataclasses.dataclass
class Soak:
  """Samples over a long run.

  Attributes:
    done: episodes at each sample.
    samples: see `Processes.sample`.
    pids: of every worker that was seen.
  """

  done: list[int] = dataclasses.field(default_factory=list)
  samples: list[dict[str, float]] = dataclasses.field(default_factory=list)
  pids: set[int] = dataclasses.field(default_factory=set)

  async def watch(self, processes: Processes, done: Callable[[], int]) -> None:
    while True:
      self.done.append(done())
      self.samples.append(processes.sample())
      self.pids.update(p.pid for p in processes.by_kind()['workers'])
      await asyncio.sleep(SAMPLE_S)

  def flat(self, replaced: bool) -> bool:
    """Prints how each measure went; whether none of them grew.

    Args:
      replaced: workers were, so their memory tells of their age alone.
    """
    total, good = self.done[-1], True
    rest = [
      (done, sample)
      for done, sample in zip(self.done, self.samples, strict=True)
      if done >= total / 5
    ]
    fifth = max(1, len(rest) // 5)
    ends = (rest[:fifth], rest[-fifth:])
    first_done, last_done = (
      statistics.mean(done for done, _ in part) for part in ends
    )
    for key in self.samples[0]:
      first, last = (
        statistics.mean(sample[key] for _, sample in part) for part in ends
      )
      if not last:
        continue
      flat = last <= (first * FLAT[key] if key in FLAT else first + 1)
      judged = not replaced or key not in ('workers', 'JVMs')
      good = good and (flat or not judged)
      verdict = ('flat' if flat else 'NOT FLAT') if judged else 'replaced'
      if key in FLAT:
        slope = (last - first) / max(1.0, last_done - first_done)
        amount = (
          f'{first / 1e6:8.2f} -> {last / 1e6:8.2f} MB, {slope:+7.0f} bytes an '
          'episode'
        )
      else:
        amount = f'{first:8.1f} -> {last:8.1f}'
      print(f'  {key:9s} {amount}: {verdict}')
    return good


async def soak(scale: float, repeats: int) -> bool:
  made = sciworld_env.make_env()
  hard = sciworld_games(made)
  made.close()
  good = True
  for env, games, workers, count, options in (
    ('toy', toy_games(), TOY_WORKERS, TOY_SOAK, ('--max-episodes=0',)),
    ('toy', toy_games(), TOY_WORKERS, TOY_SOAK, ()),
    ('sciworld', hard, WORKERS, SCIWORLD_SOAK, ('--max-episodes=0',)),
    ('sciworld', hard, WORKERS, SCIWORLD_SOAK, ('--max-episodes=25',)),
  ):
    good &= await _soak(
      env, games, workers, max(10, round(count * scale)), options
    )
  return good


async def _soak(
  env: str,
  games: Sequence[Game],
  workers: int,
  count: int,
  options: Sequence[str],
) -> bool:
  tally, soaked = Tally(), Soak()
  left = iter(range(count))

  async def go_on(client: env_client.EnvClient) -> None:
    for i in left:
      await play(client, games[i % len(games)], tally)

  start_s = time.perf_counter()
  async with served(env, workers, *options) as (client, processes):
    watching = asyncio.ensure_future(
      soaked.watch(processes, lambda: tally.won + len(tally.failed))
    )
    await asyncio.gather(*(go_on(client) for _ in range(workers)))
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await watching  # Had it failed, we would know nothing.
  how = ' '.join(options) or 'defaults'
  print(
    f'soak: {env}, {workers} workers, {how}: {tally}; '
    f'{time.perf_counter() - start_s:.0f} s, {len(soaked.pids)} worker '
    'processes in all'
  )
  flat = soaked.flat(len(soaked.pids) > workers)
  sys.stdout.flush()
  return flat and tally.good


RUN: dict[str, Callable[[float, int], Awaitable[bool]]] = {
  'sciworld': sciworld,
  'toy': toy,
  'crowd': crowd,
  'soak': soak,
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--parts', default=','.join(PARTS))
  parser.add_argument('--scale', type=float, default=1.0)
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  parts = args.parts.split(',')
  for part in parts:
    if part not in PARTS:
      parser.error(f'--parts: {part!r} is none of {", ".join(PARTS)}')
  if args.repeats < 1:
    parser.error(f'--repeats={args.repeats} must be at least 1.')
  if args.scale <= 0:
    parser.error(f'--scale={args.scale} must be above 0.')
  results = [asyncio.run(RUN[part](args.scale, args.repeats)) for part in parts]
  sys.exit(0 if all(results) else 1)


if __name__ == '__main__':
  main()
