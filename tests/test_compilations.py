"""Programs that XLA compiles are counted, and those read from the cache."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from planpo_jax import compilations


def test_a_program_is_counted_once():
  watched = compilations.watch()
  before = watched.programs, watched.seconds
  double = jax.jit(lambda x: 2 * x + 1)
  double(np.zeros(3, np.float32))
  assert watched.programs == before[0] + 1
  assert watched.seconds > before[1]
  # The same shapes need none; others do.
  after = watched.programs, watched.seconds
  double(np.ones(3, np.float32))
  assert (watched.programs, watched.seconds) == after
  double(np.zeros(4, np.float32))
  assert watched.programs == before[0] + 2


def test_watching_twice_counts_once():
  watched = compilations.watch()
  assert compilations.watch() is watched
  before = watched.programs
  jax.jit(lambda x: 3 * x - 2)(np.zeros(5, np.float32))
  assert watched.programs == before + 1


def test_totals_in_words_and_as_scalars():
  total = compilations.Compilations(programs=7, read=3, seconds=12.4)
  assert str(total) == (
    '7 programs were compiled in 12 s, 3 of them read from the persistent cache'
  )
  assert total.scalars() == {
    'compile/programs': 7.0,
    'compile/read_from_cache': 3.0,
    'compile/seconds': 12.4,
  }


_SCRIPT = """
import jax
import numpy as np

from planpo_jax import compilations

watched = compilations.watch()
for size in (3, 4):
  jax.jit(lambda x: 2 * x + 1)(np.zeros(size, np.float32))
print(watched.programs, watched.read)
"""


def test_programs_read_from_the_persistent_cache_are_told(tmp_path):
  """The second process reads what the first one compiled."""

  def run():
    done = subprocess.run(
      [sys.executable, '-c', _SCRIPT],
      env={
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(tmp_path),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'PYTHONPATH': str(pathlib.Path(__file__).parents[1]),
      },
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(count) for count in done.stdout.split()]

  assert run() == [2, 0]
  assert run() == [2, 2]
