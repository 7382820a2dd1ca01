"""Looks after real processes in tests of the environment service (Linux)."""

import pathlib
import time


def descendants(pid):
  """Process ids of all children of `pid` and of their children."""
  parents = {}
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      parents[int(stat.parent.name)] = int(
        stat.read_text().rpartition(')')[2].split()[1]
      )
    except (FileNotFoundError, ProcessLookupError):
      continue
  found, new = set(), {pid}
  while new:
    new = {child for child, parent in parents.items() if parent in new}
    found |= new
  return found


def command(pid):
  try:
    raw = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
  except (FileNotFoundError, ProcessLookupError):
    return ''
  return raw.replace(b'\0', b' ').decode()


def workers_of(pid):
  """Process ids of the workers of a service."""
  return sorted(
    p for p in descendants(pid) if 'envs_server.child' in command(p)
  )


def javas_of(pid):
  """Process ids of the JVMs of a service."""
  return sorted(p for p in descendants(pid) if 'GatewayServer' in command(p))


def alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def wait_for(condition, limit_s=10.0):
  """Whether `condition` comes true within the limit."""
  deadline = time.monotonic() + limit_s
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.02)
  return True


def all_gone(pids, limit_s=10.0):
  return wait_for(lambda: not any(map(alive, pids)), limit_s)
