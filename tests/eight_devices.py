"""Runs a script on eight simulated devices, in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any


def report_of(script: str, *arguments: str) -> Any:
  """What the last line that `script` prints says, in JSON."""
  done = subprocess.run(
    [sys.executable, '-c', script, *arguments],
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': '8',
      'PYTHONPATH': str(pathlib.Path(__file__).parents[1]),
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])
