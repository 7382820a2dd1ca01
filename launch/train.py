"""Trains a policy: --config=configs/quickstart.py --workdir=DIR."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import flags

from planpo_jax import cli

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; an interrupted run goes on there.'
)


def main() -> int:
  if not _WORKDIR.value:
    raise ValueError('--workdir is missing; try --workdir=runs/my_run.')
  # Imported here, so that a mistake in the flags is told at once.
  import pathlib

  from planpo_jax import metrics, train

  workdir = pathlib.Path(_WORKDIR.value).expanduser().absolute()
  return train.train(_CONFIG.value, workdir, metrics.Terminal())


if __name__ == '__main__':
  cli.run(main)
