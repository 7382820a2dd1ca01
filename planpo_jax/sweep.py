"""Sweeps: an ordered list of runs over one experiment file.

A sweep file has `get_sweep(variant='') -> Sweep`; `variant` is what follows the
colon of `--sweep=FILE:variant`. Each run is a command line of launch/train.py.

This process starts no accelerator, whose memory the runs need: what looks at
devices is done by `check` in a process that ends before the first run begins.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import math
import multiprocessing
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

# Order, reasons and published results of a sweep's runs, and which of them
# differ in their seed alone, in the folder that holds theirs. Hidden, so that
# `launch/report.py ROOT/*` names runs only.
RECORD = '.sweep.json'

_ROOT = pathlib.Path(__file__).parent.parent
# Becomes the command after it, which saves and ends if this process is killed.
_ENDS_WITH_PARENT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from envs_server import lifetime
lifetime.signal_with_parent(signal.SIGTERM)
os.execvp(sys.argv[2], sys.argv[2:])
"""

_FOLDER = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')
_OVERRIDE = re.compile(r'--(?:no)?config\.([\w.]+)(?:=.*)?', re.DOTALL)


class SweepError(ValueError):
  """A sweep, or what was asked of it, cannot work."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One row of a sweep.

  Attributes:
    name: folder of the run; letters, digits, `.`, `_` and `-`.
    presets: what follows the colon of --config, in order.
    overrides: full key -> value, applied after the presets.
    reason: one line, what the run is for.
    published: what a paper reports for it, with the source; '' for nothing.
  """

  name: str
  presets: tuple[str, ...] = ()
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reason: str = ''
  published: str = ''


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Runs over one experiment file.

  Attributes:
    base: configuration file, relative to the repository.
    runs: in order; names are unique.
    seeds: each run is trained once with each; () leaves the base's seed. The
      name of a run with seed N > 0 gets the ending `_seedN`, so that a sweep
      that was begun without seeds goes on with them.

  Raises:
    SweepError: a name, key or seed is unfit or comes twice, or a run sets the
      seed.
  """

  base: str
  runs: tuple[Run, ...]
  seeds: tuple[int, ...] = ()

  def __post_init__(self):
    if not self.runs:
      raise SweepError('a sweep needs at least one run.')
    for run in self.runs:
      if not _FOLDER.fullmatch(run.name):
        raise SweepError(
          f'run {run.name!r}: the name is a folder; use letters, digits, '
          '`.`, `_` and `-`, first a letter or digit.'
        )
      for key in run.overrides:
        if not re.fullmatch(r'[\w.]+', key):
          raise SweepError(f'run {run.name!r} overrides {key!r}, no key.')
      if 'seed' in run.overrides:
        raise SweepError(
          f'run {run.name!r} sets the seed; give seeds=({run.overrides["seed"]}'
          ',) to the sweep.'
        )
    if any(seed < 0 for seed in self.seeds):
      raise SweepError(f'seeds={self.seeds} must be at least 0.')
    seeds = self.seeds or (0,)
    names = [_name(run, seed) for seed in seeds for run in self.runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      raise SweepError(f'two runs are called {", ".join(twice)}; rename one.')


@dataclasses.dataclass(frozen=True)
class Job:
  """One training of a sweep.

  Attributes:
    name: of the run, with its seed.
    run: what it trains.
    workdir: where it writes.
    arguments: of launch/train.py.
  """

  name: str
  run: Run
  workdir: pathlib.Path
  arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a job.

  Attributes:
    name: of the job.
    text: `finished`, `finished before`, `failed (exit code 3)`, ...
    seconds: that it took in this session.
    failed: it ended by itself, without success.
  """

  name: str
  text: str
  seconds: float = 0.0
  failed: bool = False


def choose(variant: str, parts: Mapping[str, Sequence[Run]]) -> tuple[Run, ...]:
  """The runs of one part of a sweep, or of all parts in order for ''.

  Raises:
    SweepError: there is no such part.
  """
  if variant and variant not in parts:
    raise SweepError(
      f'part {variant!r} is unknown; use one of {", ".join(parts)}, or no '
      'colon for all.'
    )
  chosen = [parts[variant]] if variant else parts.values()
  return tuple(run for part in chosen for run in part)


def load(source: str) -> Sweep:
  """Reads `FILE` or `FILE:variant`.

  Raises:
    SweepError: the file is missing, raises, or makes no sweep.
  """
  file, _, variant = source.partition(':')
  try:
    sweep = runpy.run_path(file)['get_sweep'](variant)
  except SweepError as error:
    raise SweepError(f'{source}: {error}') from error
  except Exception as error:  # Whatever a user's file may raise.
    raise SweepError(
      f'{source} cannot be read as a sweep: {_sentence(error)}'
    ) from error
  if not isinstance(sweep, Sweep):
    raise SweepError(
      f'{source}: get_sweep returned {type(sweep).__name__}; return a '
      'planpo_jax.sweep.Sweep.'
    )
  return sweep


def jobs(
  sweep: Sweep,
  root: pathlib.Path,
  *,
  base: str,
  presets: Sequence[str] = (),
  overrides: Sequence[str] = (),
) -> list[Job]:
  """The trainings of a sweep: all runs of the first seed, then of the next.

  Args:
    sweep: see `Sweep`.
    root: folder of all workdirs.
    base: `FILE` or `FILE:presets`, instead of `sweep.base`.
    presets: put after those of each run.
    overrides: `--config.KEY=VALUE`, put after those of each run.

  Raises:
    SweepError: one of `overrides` is none, or sets what the sweep sets apart.
  """
  for text in overrides:
    match = _OVERRIDE.fullmatch(text)
    if not match:
      raise SweepError(
        f'{text!r} is not a flag; an override is one word, --config.KEY=VALUE.'
      )
    if match[1] == 'seed' and sweep.seeds:
      raise SweepError(
        f'{text} would give all seeds {sweep.seeds} of the sweep the same '
        'value; leave it out.'
      )
  file, _, first = base.partition(':')
  made = []
  for seed in sweep.seeds or (None,):
    for run in sweep.runs:
      name = _name(run, seed or 0)
      chosen = ','.join([*filter(None, [first]), *run.presets, *presets])
      own = (
        dict(run.overrides) if seed is None else {'seed': seed, **run.overrides}
      )
      made.append(
        Job(
          name=name,
          run=run,
          workdir=root / name,
          arguments=(
            f'--config={file}:{chosen}' if chosen else f'--config={file}',
            f'--workdir={root / name}',
            *(f'--config.{key}={value}' for key, value in own.items()),
            *overrides,
          ),
        )
      )
  return made


def _name(run: Run, seed: int) -> str:
  return f'{run.name}_seed{seed}' if seed else run.name


def only(made: Sequence[Job], names: Sequence[str]) -> list[Job]:
  """The jobs that `names` are for, in the order of the sweep.

  Args:
    made: the jobs.
    names: of runs, for all their seeds; or of single jobs such as `grpo_seed1`.

  Raises:
    SweepError: a name is unknown.
  """
  known = {name: None for job in made for name in (job.run.name, job.name)}
  unknown = [name for name in names if name not in known]
  if unknown:
    raise SweepError(
      f'--only={",".join(unknown)}: unknown; known: {", ".join(known)}.'
    )
  return [job for job in made if job.run.name in names or job.name in names]


def check(made: Sequence[Job], *, here: bool) -> list[dict[str, Any]]:
  """Builds and checks the configuration of every job.

  Args:
    made: the jobs.
    here: they run on the devices of this machine; otherwise the mesh is
      checked against as few devices as it allows.

  Returns:
    The configurations, as plain values.

  Raises:
    SweepError: names every job that cannot work, with the reason.
  """
  problems: dict[str, list[str]] = {}
  configs, dumps = [], {}
  for job in made:
    try:
      config = _checked(job, here)
      folder = config['rollout']['dump']
      if folder and folder in dumps:
        raise SweepError(
          f'rollout.dump={folder!r} is that of {dumps[folder]} too, and a dump '
          'holds one run; set it in the sweep file, another for each run.'
        )
      dumps[folder] = job.name
      configs.append(config)
    except SweepError as error:
      problems.setdefault(str(error), []).append(job.name)
  if problems:
    raise SweepError(
      '\n'.join(f'{_some(names)}: {text}' for text, names in problems.items())
    )
  return configs


def check_apart(made: Sequence[Job], *, here: bool) -> list[dict[str, Any]]:
  """`check` in another process, which lets go of the devices at its end."""
  with concurrent.futures.ProcessPoolExecutor(
    1, mp_context=multiprocessing.get_context('spawn')
  ) as pool:
    return pool.submit(check, made, here=here).result()


def _some(names: Sequence[str], shown: int = 3) -> str:
  if len(names) <= shown:
    return ', '.join(names)
  return f'{", ".join(names[:shown])} and {len(names) - shown} more'


def _checked(job: Job, here: bool) -> dict[str, Any]:
  """The configuration that launch/train.py makes of the job's arguments."""
  # Imported here: the process that drives the runs needs none of them.
  import jax
  from absl import flags
  from ml_collections import config_flags

  from planpo_jax import advantages, losses
  from planpo_jax import config as config_lib

  source, _, *overrides = job.arguments
  file, _, presets = source.removeprefix('--config=').partition(':')
  try:
    get_config = runpy.run_path(file)['get_config']
    config = get_config(*filter(None, [presets]))
  except Exception as error:  # Whatever a user's file may raise.
    raise SweepError(
      f'{source} cannot be loaded: {_sentence(error)}'
    ) from error
  for text in overrides:
    key = _OVERRIDE.fullmatch(text)[1]
    if not config_lib.has_key(config, key):
      raise SweepError(config_lib.unknown_key(key, config))
  values = flags.FlagValues()
  argv = ['sweep', *overrides]
  try:
    config_flags.DEFINE_config_dict(
      'config', config, flag_values=values, sys_argv=argv
    )
    values(argv)
    mesh = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    fewest = math.prod(max(size, 1) for size in mesh)
    config_lib.check(config, jax.device_count() if here else fewest)
    method, loss = config.advantage.name, config.loss.name
    advantages.get(method, **config.advantage[method])
    losses.get(loss, **config.loss[loss])
    # As launch/train.py keeps it.
    if config.rollout.replay:
      path = pathlib.Path(config.rollout.replay).expanduser().absolute()
      config.rollout.replay = str(path)
    # Here too, for a finished run of another configuration would be skipped.
    config_lib.check_workdir(job.workdir, config)
  except (ValueError, TypeError, OSError, flags.Error) as error:
    raise SweepError(_sentence(error)) from error
  return json.loads(config.to_json())


def _sentence(error: Exception) -> str:
  text = ' '.join(str(error).split())
  # Which alone say nothing but a name.
  return (
    f'{type(error).__name__} {text}'
    if (isinstance(error, KeyError | AttributeError) or not text)
    else text
  )


def distinct(
  made: Sequence[Job], configs: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
  """By name, the jobs that train the same as an earlier one: its name."""
  same = {}
  for i, job in enumerate(made):
    first = configs.index(configs[i])
    if first < i:
      same[job.name] = made[first].name
  return same


def summary(workdir: pathlib.Path) -> dict[str, Any] | None:
  """The closing table of a run; None before it is whole."""
  try:
    return json.loads((workdir / 'summary.json').read_text())
  except (OSError, ValueError):
    return None


def is_finished(job: Job, config: Mapping[str, Any]) -> bool:
  """Whether the run in the job's workdir needs nothing more.

  A run that trains from a dump evaluates nothing: its last checkpoint tells.
  """
  if config['rollout']['replay']:
    steps = config['train']['steps']
    return (job.workdir / 'checkpoints' / str(steps)).is_dir()
  return summary(job.workdir) is not None


def claim(root: pathlib.Path) -> BinaryIO:
  """Makes `root` the folder of a sweep that runs here and now.

  Returns:
    A lock, held until it is closed or this process ends, however it ends.

  Raises:
    SweepError: the folder cannot be made, is that of a single run, or another
      sweep runs in it.
  """
  try:
    root.mkdir(parents=True, exist_ok=True)
    lock = (root / '.sweep.lock').open('wb')
  except OSError as error:
    raise SweepError(
      f'--workdir={root} cannot be used as a folder ({error.strerror}); name '
      'another one.'
    ) from error
  if (root / 'config.json').exists():
    lock.close()
    raise SweepError(
      f'--workdir={root} is the folder of a single run; name another one.'
    )
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.close()
    raise SweepError(
      f'another sweep is running in {root}; wait for it, stop it, or choose '
      'another --workdir.'
    ) from error
  return lock


def write_record(
  root: pathlib.Path, made: Sequence[Job], same: Mapping[str, str]
) -> None:
  """Keeps what the report tells of the runs below `root`.

  Runs of another sweep that are known there stay, after these.

  Args:
    root: folder of all workdirs.
    made: all jobs of the sweep.
    same: see `distinct`; what is left out is told with what it equals.
  """
  path = root / RECORD
  entries = {
    job.name: {
      'name': job.name,
      'run': job.run.name,
      'reason': job.run.reason,
      'published': job.run.published,
    }
    for job in made
    if job.name not in same
  }
  for job in made:
    if job.name in same:
      entry = entries[same[job.name]]
      entry['reason'] += f'; {job.name} is the same'
      if job.run.published:
        entry['published'] += f'; of {job.name}: {job.run.published}'
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    for entry in json.loads(path.read_text())['runs']:
      entries.setdefault(entry['name'], entry)
  part = path.with_suffix('.part')
  part.write_text(json.dumps({'runs': list(entries.values())}, indent=1) + '\n')
  part.rename(path)


class _Child:
  """One training at a time, which gets the signals sent to this process."""

  def __init__(self):
    self.signal: int | None = None  # That came first.
    self._process: subprocess.Popen | None = None

  @contextlib.contextmanager
  def relaying(self) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What nohup or a script has this process ignore stays ignored.
    previous = {
      number: signal.signal(number, self._relay)
      for number in numbers
      if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
      yield
    finally:
      for number, handler in previous.items():
        signal.signal(number, handler)

  def _relay(self, number: int, unused_frame) -> None:
    self.signal = self.signal or number
    if self._process is not None:
      # Training saves on these two; a terminal that goes counts as the latter.
      self._process.send_signal(
        signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
      )

  def run(self, command: Sequence[str]) -> int:
    """Runs a command to its end and returns its exit code."""
    # A group of its own, or Ctrl-C at a terminal would reach it twice.
    self._process = subprocess.Popen(
      [sys.executable, '-c', _ENDS_WITH_PARENT, str(_ROOT), *command],
      stdin=subprocess.DEVNULL,
      process_group=0,
    )
    if self.signal is not None:  # It came while the process was started.
      self._relay(self.signal, None)
    code = self._process.wait()
    self._process = None
    return code


def train_all(
  made: Sequence[Job],
  configs: Sequence[Mapping[str, Any]],
  *,
  command: Sequence[str],
  say: Callable[[str], None],
) -> tuple[list[Outcome], int]:
  """Runs the jobs one after another; a finished one is skipped.

  A job that fails does not keep the others from being run. After Ctrl-C or
  SIGTERM, which the running job gets too, no other is started.

  Args:
    made: the jobs.
    configs: of each, from `check`.
    command: what the arguments of a job are put after.
    say: takes a line for whoever waits.

  Returns:
    An outcome a job, and the exit code: 0, 1 after a failure, 128 + signal
    number if stopped.
  """
  outcomes = []
  child = _Child()
  with child.relaying():
    for i, (job, config) in enumerate(zip(made, configs, strict=True), 1):
      place = f'[{i}/{len(made)}] {job.name}'
      if is_finished(job, config):
        say(f'{place}: finished before')
        outcomes.append(Outcome(job.name, 'finished before'))
        continue
      if child.signal is not None:
        outcomes.append(Outcome(job.name, 'not started'))
        continue
      published = (
        f' Published: {job.run.published}' if job.run.published else ''
      )
      say(f'{place}: {job.run.reason}{published}')
      begun = time.monotonic()
      code = child.run([*command, *job.arguments])
      seconds = time.monotonic() - begun
      if not code:
        outcomes.append(Outcome(job.name, 'finished', seconds))
      elif child.signal is not None:
        outcomes.append(Outcome(job.name, 'stopped', seconds))
      else:
        why = f'exit code {code}' if code > 0 else signal.Signals(-code).name
        say(f'{place}: failed ({why})')
        outcomes.append(Outcome(job.name, f'failed ({why})', seconds, True))
  if child.signal is not None:
    return outcomes, 128 + child.signal
  return outcomes, int(any(outcome.failed for outcome in outcomes))


def outcome_table(outcomes: Sequence[Outcome]) -> str:
  """Name, outcome and seconds, a line a job."""
  lines = [('run', 'outcome', 'seconds')]
  lines += [(o.name, o.text, f'{o.seconds:.0f}') for o in outcomes]
  widths = [max(len(line[i]) for line in lines) for i in range(3)]
  return '\n'.join(
    '  '.join(
      cell.ljust(w) for cell, w in zip(line, widths, strict=True)
    ).rstrip()
    for line in lines
  )
