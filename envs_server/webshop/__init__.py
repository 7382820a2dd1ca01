"""WebShop in text mode (Yao et al. 2022, arXiv 2207.01206)."""

from __future__ import annotations

import importlib

# Of a worker process, for those who plan; a model of spaCy comes on top.
MEMORY_MB = 60
_INSTALL = 'pip install -r envs_server/requirements.txt'


def check() -> None:
  """Prints which products and goals were found.

  Raises:
    RuntimeError: a package or the data are missing or broken.
  """
  try:
    _environment().check()
  except ImportError as error:
    raise RuntimeError(
      f'WebShop is not installed ({error}); run `{_INSTALL}`.'
    ) from error


def make_env():
  """Returns the environment, an `env.TextEnv`."""
  return _environment().WebShop()


def _environment():
  # Imports what is heavy.
  return importlib.import_module('envs_server.webshop.environment')
