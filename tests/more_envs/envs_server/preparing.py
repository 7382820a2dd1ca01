"""An environment whose start takes long; the toy's games.

`check` tells every 0.2 s for $PREPARING_S that it is preparing something, and
then is silent for $SILENT_S.
"""

import os
import sys
import time

from envs_server import env, toy


def check():
  end = time.monotonic() + float(os.environ['PREPARING_S'])
  while time.monotonic() < end:
    print(f'{env.PREPARING}an index', file=sys.stderr, flush=True)
    time.sleep(0.2)
  time.sleep(float(os.environ['SILENT_S']))


def make_env():
  return toy.make_env()
