"""One compilation cache for the whole session, its subprocesses included."""

import gc
import importlib.metadata
import os
import tempfile

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix='planpo-xla-')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.5'


@pytest.fixture(scope='session')
def alfworld_engine():
  """Skips what needs ALFWorld's engine where it could not be compiled."""
  try:
    importlib.metadata.version('fast-downward-textworld')
  except importlib.metadata.PackageNotFoundError:
    if 'PLANPO_TEST_ALL' in os.environ:
      raise
    pytest.skip('ALFWorld is not installed, as there was no g++')


@pytest.fixture(scope='session')
def alfworld_folder(alfworld_engine, tmp_path_factory):
  """Generated ALFWorld games of every type and split; $ALFWORLD_DATA."""
  from envs_server import alfworld_games

  folder = tmp_path_factory.mktemp('alfworld')
  for split in alfworld_games.SPLITS:
    # Two of a type in one split, that an index may name the wrong one.
    count = 2 if split == 'valid_seen' else 1
    alfworld_games.generate(folder, per_type=count, split=split, seed=0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('ALFWORLD_DATA', str(folder))
    yield folder


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


@pytest.fixture(scope='session')
def webshop_folder(tmp_path_factory):
  """A generated catalogue; $WEBSHOP_DATA.

  Of 300 products: some goals of either type are left to train on, and every
  oddity is there.
  """
  from envs_server.webshop import catalogue

  folder = tmp_path_factory.mktemp('webshop')
  catalogue.generate(folder, products=300)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('WEBSHOP_DATA', str(folder))
    patch.delenv('WEBSHOP_PRODUCTS', raising=False)
    yield folder
