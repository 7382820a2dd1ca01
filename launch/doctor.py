r"""Tells whether this machine has what a configuration needs.

  python launch/doctor.py
  python launch/doctor.py --config=configs/sciworld_7b.py:grpo \
    --config.env.address=HOST:PORT --deadline=120

Without --config it looks at configs/quickstart.py; --deadline is the seconds
that each check may take (60). Prints one line a check: `ok`, `warn`, or
`missing` with what mends it. Exit code 0: nothing needed is missing; 1:
something is; 2: a mistake in the flags.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from planpo_jax import doctor


def read_flags() -> None:
  """Called in a process of its own: what reads the flags may be missing."""
  from absl import flags

  from planpo_jax import cli

  config = cli.define_config()
  deadline_s = flags.DEFINE_float(
    'deadline', 60.0, 'Seconds that each check may take.', lower_bound=1.0
  )
  cli.run(lambda: doctor.pass_on(config.value, deadline_s.value))


if __name__ == '__main__':
  sys.exit(doctor.main(sys.argv, read_flags))
