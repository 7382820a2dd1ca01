"""ScienceWorld (Wang et al. 2022, arXiv 2203.07540) on its own engine.

Of the Python package only the engine's jar is used: its wrapper lists the
valid actions, the room and the inventory at every step, which costs thirty
times the step itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import logging
import os
import pathlib
import re
import subprocess
import tempfile
import threading

from envs_server import env, java, lifetime, sciworld_sets

# A constant hash puts objects into every hash table of the engine in the
# order in which it made them. With Java's random hashes the order of objects
# in a room, the gold path and even scores differ between two loads of the same
# variation. The cap keeps a process at a third of its default memory.
_JAVA_OPTIONS = (
  '-XX:+UnlockExperimentalVMOptions',
  '-XX:hashCode=2',
  '-Xmx256m',
  '-XX:+UseSerialGC',
)
# Of a worker process and its JVM, for those who plan.
MEMORY_MB = 350
_SPLITS = {
  'train': 'getVariationsTrain',
  'dev': 'getVariationsDev',
  'test': 'getVariationsTest',
}
# Not the tasks that publications call test; see `sciworld_sets`.
_STAND_IN = 'agentgym_standin'
# Environment variable with the path of AgentGym's own list, if one has it.
_LIST = 'AGENTGYM_SCIWORLD_TEST'
_OPTION = 'simplifications'
_ELECTRICAL = ('power-component', 'conductivity')
_NO_ELECTRICAL = 'noElectricalAction'
# What the engine makes of `easy`; `noElectricalAction` where a task allows it.
_EASY = ('teleportAction', 'openDoors', 'selfWateringFlowerPots')
_UNKNOWN_ACTION = 'No known action matches that input.'
_ACTION_FORMAT = (
  'One command a turn. Commands: look around, inventory, look at X, look in X, '
  'examine X, go to LOCATION, teleport to LOCATION, open X, close X, '
  'pick up X, put down X, move X to Y, pour X into Y, dunk X into Y, mix X, '
  'use X on Y, read X, eat X, activate X, deactivate X, connect X to Y, '
  'disconnect X, focus on X, wait, wait1. An answer that lists numbered '
  'choices is answered with the number alone.'
)
_FULL_SCORE = 100.0


def check() -> None:
  """Raises RuntimeError if Java or the engine is missing."""
  java.find()
  try:
    importlib.import_module('scienceworld.constants')
  except ImportError as error:
    raise RuntimeError(
      f'ScienceWorld is not installed ({error}); run '
      '`pip install scienceworld`.'
    ) from error
  path = os.environ.get(_LIST)
  if path and not os.path.isfile(path):
    raise RuntimeError(
      f"{_LIST}={path!r} names no file; give the path of AgentGym's "
      'sciworld_test.json, or leave it unset.'
    )


def make_env() -> ScienceWorld:
  return ScienceWorld()


class ScienceWorld:
  """One engine in one JVM, kept over episodes.

  Task index is the engine's variation number. Score is -100..100; success is
  100 and nothing less. A wrong `focus on` ends the episode with -100.
  """

  def __init__(self):
    """Starts the JVM.

    Raises:
      RuntimeError: there is no Java, or it does not start.
    """
    self._jvm, self._gateway = _start_jvm()
    self._engine = (
      self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
    )
    self._admissible = False

  @property
  def jvm_pid(self) -> int:
    return self._jvm.pid

  def catalog(self) -> env.Catalog:
    """See `env.TextEnv`."""
    indices: dict[str, dict[str, tuple[int, ...]]] = {s: {} for s in _SPLITS}
    for name in self._engine.getTaskNames():
      # The lists depend on the name alone; loading the task takes 0.1 s.
      getattr(self._engine, 'taskStr_$eq')(name)
      for split, getter in _SPLITS.items():
        listed = getattr(self._engine, getter)().toString()
        indices[split][name] = tuple(map(int, re.findall(r'\d+', listed)))
    indices[_STAND_IN] = sciworld_sets.stand_in(indices['test'])
    version = f'scienceworld {importlib.metadata.version("scienceworld")}'
    if path := os.environ.get(_LIST):
      counts = {
        name: sum(len(indices[split][name]) for split in _SPLITS)
        for name in indices['test']
      }
      listed, left = sciworld_sets.read_list(pathlib.Path(path), counts)
      indices |= {'agentgym_test': listed, 'agentgym_train': left}
      # Two services with two lists do not serve the same.
      digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
      version += f', list {digest[:8]}'
    simplifications = self._engine.getPossibleSimplifications().split(', ')
    return env.Catalog(
      version=version,
      action_format=_ACTION_FORMAT,
      indices=indices,
      options={_OPTION: ('easy', *simplifications)},
      sets=sciworld_sets.sets(tuple(indices['test'])),
    )

  def reset(
    self, task: env.Task, expert: bool = False, admissible: bool = False
  ) -> env.Observation:
    """See `env.TextEnv`. Takes 0.1 s; with the expert up to 10 s."""
    # Loading alone gives a fresh state; the engine's own reset() gives the
    # same one at four times the cost.
    error = self._engine.load(
      task.name, task.index, _simplifications(task), expert
    )
    if error:
      raise RuntimeError(f'{task} does not load: {error}')
    solution = ()
    if expert:
      solution = tuple(self._engine.getGoldActionSequence())
      if not solution or solution[0].startswith('ERROR'):
        raise RuntimeError(f'{task} has no solution: {solution}')
    self._admissible = admissible
    self._over = False
    return self._observe(
      self._engine.step('look around'),
      goal=self._engine.getTaskDescription(),
      expert_actions=solution,
    )

  def step(self, action: str) -> env.Observation:
    """See `env.TextEnv`."""
    assert not self._over, 'The engine plays on after the end, and scores.'
    py4j = importlib.import_module('py4j.protocol')
    try:
      text = self._engine.step(' '.join(action.split()))
    except py4j.Py4JJavaError as error:
      # The engine stumbled over the wording. Errors of the JVM itself, such
      # as a full memory, end the worker instead.
      name = error.java_exception.getClass().getName()
      if 'Exception' not in name and not name.startswith('scala.'):
        raise
      return self._observe(_UNKNOWN_ACTION, info={'exception': name})
    return self._observe(text)

  def ping(self) -> None:
    """See `env.TextEnv`. Takes 0.1 ms; hangs if the JVM does."""
    self._engine.getScore()

  def close(self) -> None:
    """See `env.TextEnv`."""
    self._jvm.kill()
    self._jvm.wait()

  def _observe(self, text: str, **fields) -> env.Observation:
    # Finer than any step of the score, and free of noise such as 8.3333333.
    score = round(100.0 * self._engine.getScore(), 2)
    if score < 0:
      interface = self._engine.agentInterface().get()
      if interface.isInErrorState():
        # Its own fault, for which it gives -100 as for a lost episode.
        raise RuntimeError(f'the engine failed: {text.strip()}')
    # The engine's getCompleted would be one more round trip to learn that the
    # score is full, which it is with the last part of the task and not before.
    success = score >= _FULL_SCORE
    self._over = success or score < 0
    return env.Observation(
      text=text.strip(),
      score=score,
      success=success,
      terminated=self._over,
      admissible=self._list_admissible() if self._admissible else (),
      **fields,
    )

  def _list_admissible(self) -> tuple[str, ...]:
    joined = self._gateway.jvm.java.lang.String.join(
      '\n', self._engine.getValidActionObjectCombinations()
    )
    return tuple(joined.split('\n'))


def _simplifications(task: env.Task) -> str:
  """The simplifications of a task as the engine takes them.

  It knows `easy` only alone, and takes a list that has it for an error of the
  whole episode; so it is written out here.

  Raises:
    TaskError: the task cannot be done with them.
  """
  given = task.options.get(_OPTION, '')
  names = [name for name in given.split(',') if name]
  electrical = any(word in task.name for word in _ELECTRICAL)
  if electrical and _NO_ELECTRICAL in names:
    raise env.TaskError(
      f'{task.name} needs electrical actions; leave {_NO_ELECTRICAL} out of '
      f'{_OPTION} {given!r}.'
    )
  if 'easy' in names:
    names += _EASY if electrical else (*_EASY, _NO_ELECTRICAL)
  return ','.join(dict.fromkeys(name for name in names if name != 'easy'))


def _start_jvm():
  """Starts the engine's JVM; returns its process and a gateway to it."""
  py4j = importlib.import_module('py4j.java_gateway')
  constants = importlib.import_module('scienceworld.constants')
  stderr = tempfile.TemporaryFile()
  process = subprocess.Popen(
    [
      java.find(),
      *_JAVA_OPTIONS,
      '-classpath',
      os.pathsep.join((py4j.find_jar_path(), constants.JAR_PATH)),
      'py4j.GatewayServer',
      '--die-on-broken-pipe',
      '--enable-auth',
      '0',  # Any free port.
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=stderr,
    cwd=constants.BASEPATH,
    preexec_fn=lifetime.die_with_parent,
  )
  port = process.stdout.readline().strip()
  token = process.stdout.readline().strip()
  if not (token and port.isdigit()):
    process.kill()
    process.wait()
    stderr.seek(0)
    told = stderr.read().decode(errors='replace').strip().replace('\n', ' ')
    raise RuntimeError(
      f'the Java process of ScienceWorld did not start: {port.decode()} {told}'
    )
  threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
  # A JVM that is gone is told of once, by the call that fails; py4j would
  # print a traceback for every object that it still holds as well.
  logging.getLogger('py4j').setLevel(logging.CRITICAL)
  gateway = py4j.JavaGateway(
    gateway_parameters=py4j.GatewayParameters(
      port=int(port), auth_token=token.decode(), auto_field=True
    )
  )
  return process, gateway


def _drain(stream) -> None:
  """Reads what the engine prints at every step, lest it block."""
  while os.read(stream.fileno(), 1 << 16):
    pass
