"""One compilation cache for the whole session, its subprocesses included."""

import gc
import os
import tempfile

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix='planpo-xla-')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.5'


@pytest.fixture(autouse=True, scope='module')
def _let_programs_go():
  """Forgets what a file compiled.

  On a CPU each program takes about a dozen memory maps, of which Linux allows
  a process 65,530; the tests of all files together would need more, and XLA
  aborts the process.
  """
  yield
  import jax

  jax.clear_caches()
  gc.collect()
