"""Expert episodes: recorded through the service, stored as a TFDS dataset.

A recorder plays the environment's own solution of a task in a style of
`expert_styles`, with harmless detours and with a thought before every action.
The dataset is written and read by tensorflow-datasets, without TensorFlow.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import (
  Callable,
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from planpo_jax import chat, env_client, episodes, expert_styles

_log = logging.getLogger(__name__)

_NAME = 'planpo_demonstrations'
_VERSION = '2.0.0'
_RECIPE = (
  'Record them with `python launch/warmstart.py --config=configs/quickstart.py'
  ' --workdir=WORKDIR`, which keeps them in WORKDIR/demonstrations.'
)

# How environments answer an action that they did not carry out.
_REFUSALS = (
  'Nothing happens.',
  'No known action matches that input',
  'Ambiguous request',
  'The door is not open',
)


@dataclasses.dataclass(frozen=True)
class Step:
  """What was seen, and the thought and the action that followed.

  Attributes:
    observation: the text alone.
    thought: in words.
    action: as it was sent.
    admissible: actions that could be taken then; empty if not asked for.
  """

  observation: str
  thought: str
  action: str
  admissible: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """One episode that reached the goal.

  Attributes:
    task: what was played.
    goal: the task statement.
    style: the style that was played, one of `STYLES`.
    steps: in the order played; the observation after the last is not kept.
    score: the environment's final score, its own range.
  """

  task: episodes.Task
  goal: str
  style: str
  steps: tuple[Step, ...]
  score: float


def _rng(seed: int, task: episodes.Task, repeat: int) -> np.random.Generator:
  """Returns a generator that depends on nothing else, so order is free."""
  name = json.dumps([seed, dataclasses.astuple(task), repeat])
  digest = hashlib.sha256(name.encode()).digest()
  return np.random.default_rng(int.from_bytes(digest, 'little'))


def _check_recording(
  styles: Mapping[str, float], detour_rate: float, concurrency: int
) -> None:
  unknown = sorted(set(styles) - set(expert_styles.STYLES))
  if unknown:
    raise ValueError(
      f'Unknown styles {unknown}; the styles are {expert_styles.STYLES}.'
    )
  weights = list(styles.values())
  if not all(0 <= weight < float('inf') for weight in weights) or not any(
    weights
  ):
    raise ValueError(
      f'styles={dict(styles)} must give finite weights of 0 or more, one of'
      " them above 0; try {'gold': 1.0}."
    )
  if not 0 <= detour_rate <= 1:
    raise ValueError(
      f'detour_rate={detour_rate} must be a probability; try 0.1.'
    )
  if concurrency < 1:
    raise ValueError(f'concurrency={concurrency} must be at least 1; try 2.')


async def record(
  client: env_client.EnvClient,
  tasks: Sequence[episodes.Task],
  *,
  seed: int,
  step_limit: int,
  styles: Mapping[str, float],
  detour_rate: float,
  concurrency: int,
  admissible: bool = False,
  progress: Callable[[int, int], None] | None = None,
) -> list[Demonstration]:
  """Plays an expert episode of each task and keeps those that reach the goal.

  How a solution is played depends on the seed, the task and how often the
  task came before it in `tasks`; not on timing, on concurrency or on the other
  tasks. ScienceWorld draws the solution itself anew each time, unseeded: two
  recordings of it differ, so what is to be repeated is the dataset on disk.

  Args:
    client: connected to the service.
    tasks: what to play; a task named twice is played twice, differently.
    seed: of styles, detours and thoughts.
    step_limit: turns after which an episode is cut off, and refused.
    styles: weight of each style in the draw, one draw an episode.
    detour_rate: probability of one harmless action before each action.
    concurrency: episodes played at once.
    admissible: whether steps keep the actions that could be taken.
    progress: called with (episodes done, episodes in all) after each.

  Returns:
    The successful demonstrations, in the order of `tasks`. The others are
    counted, by cause, in one logged line.

  Raises:
    ValueError: an argument out of its range, or a task the service refuses.
  """
  _check_recording(styles, detour_rate, concurrency)
  names = sorted(styles)
  weights = np.array([styles[name] for name in names])
  seen: collections.Counter[episodes.Task] = collections.Counter()
  jobs = []
  for index, task in enumerate(tasks):
    jobs.append((index, task, _rng(seed, task, seen[task])))
    seen[task] += 1
  kept: dict[int, Demonstration] = {}
  refused: collections.Counter[str] = collections.Counter()
  waiting = iter(jobs)

  async def play_waiting() -> None:
    for index, task, rng in waiting:
      style = str(rng.choice(names, p=weights / weights.sum()))
      try:
        played = await _play(
          client,
          task,
          style=expert_styles.playable(style, task),
          step_limit=step_limit,
          detour_rate=detour_rate,
          admissible=admissible,
          rng=rng,
        )
      except env_client.EnvFault as error:
        _log.warning('No demonstration of %s: %s', task, error)
        refused['faults'] += 1
      else:
        if isinstance(played, Demonstration):
          kept[index] = played
        else:
          refused[played] += 1
      if progress:
        progress(len(kept) + refused.total(), len(jobs))

  players = [
    asyncio.create_task(play_waiting())
    for _ in range(min(concurrency, len(jobs)))
  ]
  try:
    await asyncio.gather(*players)
  finally:
    for player in players:
      player.cancel()
    await asyncio.gather(*players, return_exceptions=True)
  _log.info(
    'Recorded %d demonstrations of %d episodes; refused %d%s.',
    len(kept),
    len(jobs),
    refused.total(),
    ''.join(f', {count} {cause}' for cause, count in sorted(refused.items())),
  )
  return [kept[index] for index in sorted(kept)]


class _FoundError(Exception):
  """What is looked for is at a place that the solution does not go to."""


async def _play(
  client: env_client.EnvClient, task: episodes.Task, **how: Any
) -> Demonstration | str:
  """Plays one episode; returns it, or the cause for which it is refused."""
  avoided: set[str] = set()
  while True:
    try:
      # From its start, and without the place: nobody would go on past what he
      # looks for.
      return await _play_once(client, task, avoided=avoided, **how)
    except _FoundError as error:
      avoided.add(str(error))


async def _play_once(
  client: env_client.EnvClient,
  task: episodes.Task,
  *,
  style: str,
  step_limit: int,
  detour_rate: float,
  admissible: bool,
  avoided: Collection[str],
  rng: np.random.Generator,
) -> Demonstration | str:
  """As `_play`, with no search at the places in `avoided`.

  Raises:
    _FoundError: names another place not to search.
  """
  session = client.session(
    task, step_limit=step_limit, expert=True, admissible=admissible
  )
  try:
    seen = await session.reset()
    goal = seen.goal
    if not seen.expert_actions:
      return 'without a solution'
    places = [p for p in expert_styles.places(seen.text) if p not in avoided]
    moves = collections.deque(
      expert_styles.rewrite(seen.expert_actions, style, rng, places)
    )
    detours = expert_styles.DETOURS.get(task.env, ())
    wordy = bool(rng.random() < 0.5)
    steps: list[Step] = []

    async def act(action: str) -> episodes.Observation:
      thought = expert_styles.think(
        goal, action, task.env, wordy=wordy, first=not steps, rng=rng
      )
      steps.append(Step(seen.text, thought, action, seen.admissible))
      return await session.step(action)

    while moves and seen.ending is None:
      if moves[0].kind and expert_styles.known(
        moves[0].kind,
        [step.action for step in steps],
        [*(step.observation for step in steps), seen.text],
      ):
        moves.popleft()  # Nobody looks for what he has seen.
        continue
      if detours and rng.random() < detour_rate:
        seen = await act(detours[rng.integers(len(detours))])
        if seen.ending is not None:
          break
      move = moves.popleft()
      seen = await act(move.action)
      if seen.text.startswith(_REFUSALS):
        moves.extendleft(map(expert_styles.Move, reversed(move.fallback)))
      elif move.kind and expert_styles.shown(move.kind, seen.text):
        raise _FoundError(move.place)
      elif move.place and f'The {move.place} is closed.' in seen.text:
        moves.appendleft(dataclasses.replace(move, action=f'open {move.place}'))
  finally:
    await session.close()
  if not seen.success:
    return 'without success'
  return Demonstration(task, goal, style, tuple(steps), seen.score)


class PlanpoDemonstrations(tfds.core.GeneratorBasedBuilder):
  """Builder of the dataset; examples come from memory."""

  VERSION = tfds.core.Version(_VERSION)

  def __init__(self, *, demonstrations: Sequence[Demonstration], **kwargs):
    self._demonstrations = demonstrations
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text()
    return tfds.core.DatasetInfo(
      builder=self,
      description='Successful expert episodes of a text environment.',
      features=tfds.features.FeaturesDict(
        {
          # TFDS shuffles on writing; the index brings the order back.
          'index': np.int64,
          'env': text,
          'split': text,
          'task_index': np.int64,
          'task_name': text,
          'task_seed': np.int64,
          'options': tfds.features.Sequence({'key': text, 'value': text}),
          'goal': text,
          'style': text,
          'steps': tfds.features.Sequence(
            {
              'observation': text,
              'thought': text,
              'action': text,
              # A list of JSON: lists within lists are not for TFDS to read
              # without TensorFlow.
              'admissible': text,
            }
          ),
          # Floats are stored in 32 bits; their text keeps all 64.
          'score': text,
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    for index, demonstration in enumerate(self._demonstrations):
      task = demonstration.task
      yield (
        index,
        {
          'index': index,
          'env': task.env,
          'split': task.split,
          'task_index': task.index,
          'task_name': task.name,
          'task_seed': task.seed,
          'options': [
            {'key': key, 'value': value} for key, value in task.options
          ],
          'goal': demonstration.goal,
          'style': demonstration.style,
          'steps': [
            dataclasses.asdict(step)
            | {'admissible': json.dumps(step.admissible)}
            for step in demonstration.steps
          ],
          'score': repr(float(demonstration.score)),
        },
      )


def write(
  data_dir: str | os.PathLike[str],
  demonstrations: Sequence[Demonstration],
  *,
  overwrite: bool = False,
) -> None:
  """Stores demonstrations under `data_dir`, wholly or not at all.

  Args:
    data_dir: made if it is missing. Only the folder of the dataset in it is
      ever replaced; other files there are left alone.
    demonstrations: at least one.
    overwrite: replace the demonstrations that are there already.

  Raises:
    ValueError: no demonstrations.
    FileExistsError: there are some already, and `overwrite` is False.
  """
  if not demonstrations:
    raise ValueError(
      'No demonstrations to write: at least one is needed. Record more tasks,'
      ' or raise step_limit if the episodes were cut off.'
    )
  root = pathlib.Path(data_dir)
  target = root / _NAME
  if target.exists() and not overwrite:
    raise FileExistsError(
      f'{target} holds demonstrations already; pass overwrite=True to replace'
      ' them, or name another data_dir.'
    )
  root.mkdir(parents=True, exist_ok=True)
  # On the same file system as the target, so that the moves are renames.
  scratch = pathlib.Path(tempfile.mkdtemp(prefix='.incomplete-', dir=root))
  try:
    builder = PlanpoDemonstrations(
      demonstrations=demonstrations,
      data_dir=scratch,
      file_format='array_record',
    )
    # TFDS announces a download on the terminal; there is none.
    with contextlib.redirect_stdout(io.StringIO()):
      tfds.disable_progress_bar()
      builder.download_and_prepare()
    if target.exists():
      target.rename(scratch / 'replaced')
    (scratch / _NAME).rename(target)
  finally:
    shutil.rmtree(scratch)


def read(data_dir: str | os.PathLike[str]) -> list[Demonstration]:
  """Returns the demonstrations under `data_dir`, in the order written.

  Raises:
    FileNotFoundError: there are none.
    ValueError: they are damaged, or were written in another format.
  """
  root = pathlib.Path(data_dir) / _NAME
  folder = root / _VERSION
  if not folder.is_dir():
    if other := sorted(path.name for path in root.glob('*.*.*')):
      raise ValueError(
        f'The demonstrations in {root} are of version {", ".join(other)}, and'
        f' version {_VERSION} is what is read here. Delete that folder.'
        f' {_RECIPE}'
      )
    raise FileNotFoundError(
      f'No demonstrations (version {_VERSION}) in {os.fspath(data_dir)!r}.'
      f' {_RECIPE}'
    )
  try:
    builder = tfds.builder_from_directory(folder)
    rows = list(builder.as_data_source(split='train'))
    rows.sort(key=lambda row: row['index'])
    demonstrations = [_parse(row) for row in rows]
  except Exception as error:  # Each layer below raises kinds of its own.
    raise ValueError(
      f'The demonstrations in {folder} cannot be read ({error}). Delete that'
      f' folder. {_RECIPE}'
    ) from error
  if [row['index'] for row in rows] != list(range(len(rows))):
    raise ValueError(
      f'The demonstrations in {folder} are not complete. Delete that folder.'
      f' {_RECIPE}'
    )
  return demonstrations


def _parse(row: Mapping[str, object]) -> Demonstration:
  """Turns one stored example, whose texts are bytes, into its value."""
  options, steps = row['options'], row['steps']
  return Demonstration(
    task=episodes.Task(
      env=row['env'].decode(),
      split=row['split'].decode(),
      index=int(row['task_index']),
      name=row['task_name'].decode(),
      seed=int(row['task_seed']),
      options=tuple(
        (key.decode(), value.decode())
        for key, value in zip(options['key'], options['value'], strict=True)
      ),
    ),
    goal=row['goal'].decode(),
    style=row['style'].decode(),
    steps=tuple(
      Step(
        observation.decode(),
        thought.decode(),
        action.decode(),
        tuple(json.loads(admissible)),
      )
      for observation, thought, action, admissible in zip(
        steps['observation'],
        steps['thought'],
        steps['action'],
        steps['admissible'],
        strict=True,
      )
    ),
    score=float(row['score']),
  )


def corpus(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
  """Yields every text a policy reads or writes, for training a vocabulary."""
  for demonstration in demonstrations:
    yield demonstration.goal
    for step in demonstration.steps:
      yield from (step.observation, step.thought, step.action)
      if step.admissible:
        yield chat.list_actions(sorted(set(step.admissible)))
