"""Ties a process to the life of its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
  """Has the kernel kill this process when its parent dies, see below."""
  signal_with_parent(signal.SIGKILL)


def signal_with_parent(number: int) -> None:
  """Has the kernel send this process a signal when its parent dies.

  Linux only. The parent is the thread that started this process, so call it
  only where that thread lives as long as its process. A parent that died before
  the call is not noticed.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
