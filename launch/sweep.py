"""Runs every row of a sweep, or prints their command lines.

  python launch/sweep.py --sweep=configs/sweeps/ablations.py \
    --workdir=runs/ablations --config.model.checkpoint=FOLDER

Each run goes to WORKDIR/NAME, one after another, and with seed N > 0 to
WORKDIR/NAME_seedN after all runs of the seeds before it; launch/report.py
averages over the seeds. The same command skips what is finished and goes on
with what was interrupted. With --print the commands of
launch/train.py are printed, a line a run, for a cluster's own launcher.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Sequence

_ROOT = pathlib.Path(__file__).absolute().parent.parent
sys.path.insert(0, str(_ROOT))

from planpo_jax import sweep as sweep_lib

_TRAIN = (sys.executable, str(_ROOT / 'launch' / 'train.py'))

# As of launch/train.py, for what the user can mend.
_MISTAKE = 2


def _flags(
  arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[str]]:
  """The flags, and the overrides that every run gets."""
  parser = argparse.ArgumentParser(
    prog='launch/sweep.py',
    description=__doc__.splitlines()[0],
    epilog='Further --config.KEY=VALUE are passed on to every run, last.',
    allow_abbrev=False,
  )
  parser.add_argument(
    '--sweep', metavar='FILE', required=True, help='FILE or FILE:part'
  )
  parser.add_argument(
    '--workdir',
    metavar='DIR',
    required=True,
    type=pathlib.Path,
    help='each run goes to DIR/NAME',
  )
  parser.add_argument(
    '--base', metavar='FILE', help="configuration instead of the sweep's"
  )
  parser.add_argument(
    '--only',
    metavar='NAME,NAME',
    help='these runs of the sweep, with all their seeds; NAME_seed1 for one',
  )
  parser.add_argument(
    '--seeds',
    metavar='N',
    type=int,
    help="each run with seeds 0 to N - 1, instead of the sweep's",
  )
  parser.add_argument(
    '--print', action='store_true', help='print the commands, run nothing'
  )
  parser.add_argument(
    '--smoke', action='store_true', help='the tiny form of each run'
  )
  return parser.parse_known_args(arguments)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _all_jobs(
  flags: argparse.Namespace, overrides: Sequence[str]
) -> list[sweep_lib.Job]:
  sweep = sweep_lib.load(flags.sweep)
  if flags.seeds is not None:
    if flags.seeds < 1:
      raise sweep_lib.SweepError(f'--seeds={flags.seeds} must be at least 1.')
    sweep = dataclasses.replace(sweep, seeds=tuple(range(flags.seeds)))
  base = flags.base
  if base is None:
    # The sweep's own is relative to the repository.
    base = sweep.base if os.path.exists(sweep.base) else str(_ROOT / sweep.base)
  return sweep_lib.jobs(
    sweep,
    flags.workdir.expanduser(),
    base=base,
    presets=('smoke',) if flags.smoke else (),
    overrides=overrides,
  )


def _results(made: Sequence[sweep_lib.Job]) -> str:
  """The rows after training of all runs that are finished; '' without any."""
  from planpo_jax import evaluate

  rows = {}
  for job in made:
    row = ((sweep_lib.summary(job.workdir) or {}).get('rows') or {}).get(
      'after'
    )
    if row:
      rows[job.name] = evaluate.Summary.from_json(row)
  return evaluate.table(rows) if rows else ''


def main(
  arguments: Sequence[str] | None = None, train: Sequence[str] = _TRAIN
) -> int:
  """Runs or prints the sweep; `train` is what the arguments of a run follow."""
  flags, overrides = _flags(arguments)
  try:
    everything = _all_jobs(flags, overrides)
    made = everything
    if flags.only is not None:
      made = sweep_lib.only(everything, flags.only.split(','))
    configs = sweep_lib.check_apart(made, here=not flags.print)
  except sweep_lib.SweepError as error:
    _say('\n'.join(f'error: {line}' for line in str(error).splitlines()))
    return _MISTAKE
  same = sweep_lib.distinct(made, configs)
  for name, first in same.items():
    _say(
      f'{name} is left out: with this base it is the same training as {first}'
    )
  kept = [
    (job, config)
    for job, config in zip(made, configs, strict=True)
    if job.name not in same
  ]
  made, configs = [list(part) for part in zip(*kept, strict=True)]

  if flags.print:
    for job in made:
      print(shlex.join(['python', 'launch/train.py', *job.arguments]))
    return 0

  root = flags.workdir.expanduser()
  try:
    lock = sweep_lib.claim(root)
  except sweep_lib.SweepError as error:
    _say(f'error: {error}')
    return _MISTAKE
  with lock:
    sweep_lib.write_record(root, everything, same)
    outcomes, code = sweep_lib.train_all(made, configs, command=train, say=_say)
  print(sweep_lib.outcome_table(outcomes))
  results = _results(made)
  if results:
    print(f'\nheld-out tasks after training:\n{results}')
  print(
    f'\n{shlex.join(["python", "launch/report.py", str(root)])}', flush=True
  )
  if code > 128:
    _say('stopped; the same command goes on from there')
  return code


if __name__ == '__main__':
  try:
    sys.exit(main())
  except KeyboardInterrupt:  # While runs were checked.
    _say('stopped before anything was trained')
    sys.exit(128 + signal.SIGINT)
