"""Writes an HTML report of training runs or of dumped episodes.

  python launch/report.py DIR [DIR...] [--output=FILE]

DIR is the --workdir of launch/train.py; the run may still be going. That of
launch/sweep.py stands for all its runs; those that differ in their seed alone
are averaged, also in two tables to quote, NAME_table.md and NAME_table.json
beside the page NAME.html. A folder of dumped episodes, or one file
NAME.jsonl.gz of it, makes a page of just these episodes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from planpo_jax.report import page, runs


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the page and prints the paths; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='launch/report.py', description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    'paths',
    metavar='DIR',
    nargs='+',
    type=pathlib.Path,
    help='--workdir of a training run or of a sweep, or a dump (a folder or '
    'NAME.jsonl.gz)',
  )
  parser.add_argument(
    '--output',
    metavar='FILE',
    type=pathlib.Path,
    help='page to write (default: report.html in the first DIR, or NAME.html '
    'beside NAME.jsonl.gz)',
  )
  flags = parser.parse_args(arguments)
  try:
    for path in page.write(flags.paths, flags.output):
      print(path)
  except runs.RunError as error:
    print(f'launch/report.py: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
