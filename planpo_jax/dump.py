"""Episodes on disk: what a run sampled, to read and to train from again.

A dump is a folder with one file a collection of episodes: `train_000003` of
training step 3, `eval_before` of an evaluation, each `NAME.jsonl.gz`:
gzip-compressed JSON lines in ASCII, one JSON object a line, made to be read
with `zcat` and `jq`. The first line is the header:

  {"format": "planpo_jax.episodes", "version": 1, "step": 3, "episodes": 128,
   "context": "conversation", "temperature": 1.0, "staleness": 0}

and each further line is one episode, in the order played:

  task       {env, split, index, name, seed, options: [[key, value], ...]}
  member     index within the group of episodes of this task, from 0
  goal       the task statement as the policy read it
  score      the environment's final score
  success    true or false
  ending     terminated, truncated, deadline or fault
  fault      cause of a fault, '' otherwise
  start_s    seconds into the collection at which the episode got a slot
  reset_s    seconds that the environment took to begin
  recoveries how often its environment was lost and brought back
  dropped_pairs  pairs of history left out of prompts that were too long
  turns      a list of
    observation    text that the policy saw before it responded; a list of
                   admissible actions below it is in prompt_ids alone
    prompt_ids     token ids put before the response
    response_ids   token ids exactly as sampled, end token included
    response_logps log-probability (nats) of each, finite
    response       the response decoded
    action         what was sent to the environment
    valid          the response had the required format
    reward         change of the score by the action (score points)
    state_key      anchor of the state seen, an integer of up to 64 bits
    truncated      the response hit the cap of tokens
    respond_s      seconds from the request of the response to its last token
    env_s          seconds that the environment took to answer the action

Each key is a field of `episodes.Task`, `Turn` or `Episode`, where it is
described in full. Numbers have as many digits as it takes to come back equal
to the bit. A number that JSON cannot hold, as the score of an environment may
be, is one of the strings "nan", "inf" and "-inf". For example, the mean
probability that a file's tokens were sampled with:

  zcat train_000003.jsonl.gz |
    jq -s '[.[1:][].turns[].response_logps[] | exp] | add / length'

Readers ignore keys that they do not know; all of the above must be there.
`jq` rounds integers beyond 2^53, so it may change `state_key` if its output is
written back.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import operator
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planpo_jax import episodes

FORMAT = 'planpo_jax.episodes'
VERSION = 1
SUFFIX = '.jsonl.gz'

# Level 1 is several times as fast as the default and a fifth larger.
_LEVEL = 1
_UNBOUNDED = {'nan': math.nan, 'inf': math.inf, '-inf': -math.inf}
_RECIPE = (
  'A dump is a folder of train_*.jsonl.gz, or one such file, that a run with '
  '--config.rollout.dump=FOLDER wrote.'
)
_REPAIR = 'take the file from a copy, or move it away and do without its step.'


class DumpError(ValueError):
  """A dump cannot be read or written; the message says where and why."""


def write(
  folder: pathlib.Path,
  name: str,
  step: int,
  played: Sequence[episodes.Episode],
  *,
  context: str,
  temperature: float,
  staleness: int = 0,
) -> pathlib.Path:
  """Writes `folder/NAME.jsonl.gz` in the format above.

  The file appears whole or not at all: it is written beside its place under
  the ending `.part` and renamed, over an older one if there is one.

  Args:
    folder: made when it is not there.
    name: e.g. `train_000003`; only names that begin with `train_` are offered
      as steps to train from.
    step: training step that the episodes belong to.
    played: episodes, faults among them or not.
    context: `conversation` or `window`: what `prompt_ids` hold (see
      `episodes.Turn`).
    temperature: of sampling.
    staleness: steps that the policy had learnt since when they were learnt
      from.

  Returns:
    The path of the file.

  Raises:
    DumpError: a log-probability is not finite.
    OSError: the folder cannot be written to.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / (name + SUFFIX)
  part = path.with_name(path.name + '.part')
  header = {
    'format': FORMAT,
    'version': VERSION,
    'step': step,
    'episodes': len(played),
    'context': context,
    'temperature': float(temperature),
    'staleness': staleness,
  }
  try:
    # Neither name nor time goes in, so equal episodes make equal files.
    with (
      part.open('wb') as file,
      gzip.GzipFile('', 'wb', _LEVEL, file, mtime=0) as packed,
    ):
      packed.write(_line(header))
      for index, episode in enumerate(played):
        try:
          line = _line(_to_json(episode, _EPISODE))
        except ValueError as error:
          raise DumpError(
            f'{path}: episode {index} ({episode.task.name}, member '
            f'{episode.member}) holds response_logps that are not finite '
            f'({error}); a sampled token has a finite log-probability: look '
            'at the parameters and the sampler.'
          ) from error
        packed.write(line)
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise
  return path


@dataclasses.dataclass(frozen=True)
class Recorder:
  """Writes what one run plays.

  Attributes:
    folder: of the dump; None writes nothing.
    context: see `write`.
  """

  folder: pathlib.Path | None
  context: str

  def write(
    self,
    name: str,
    step: int,
    played: Sequence[episodes.Episode],
    *,
    temperature: float,
    staleness: int = 0,
  ) -> None:
    """See the function of this name."""
    if self.folder is not None:
      write(
        self.folder,
        name,
        step,
        played,
        context=self.context,
        temperature=temperature,
        staleness=staleness,
      )


class Dump:
  """The training episodes that a dump holds, read when they are asked for.

  Attributes:
    steps: training steps that it has episodes of, ascending.
    context: `conversation` or `window`, see `write`.
    temperature: of sampling.
  """

  steps: tuple[int, ...]
  context: str
  temperature: float

  def __init__(self, path: pathlib.Path):
    """Reads the headers.

    Args:
      path: a folder, whose `train_*.jsonl.gz` are taken, or one file of any
        name.

    Raises:
      DumpError: there is no dump at `path`, the head of a file is damaged or of
        another format or version, two files are of the same step, or their
        contexts or temperatures differ.
    """
    self._path = path
    if path.is_dir():
      files = sorted(path.glob('train_*' + SUFFIX))
      if not files:
        raise DumpError(
          f'{path}: the folder holds no train_*{SUFFIX}. {_RECIPE}'
        )
    elif path.exists():
      files = [path]
    else:
      raise DumpError(f'{path}: no such file or folder. {_RECIPE}')
    self._files: dict[int, pathlib.Path] = {}
    self._staleness: dict[int, int] = {}
    kinds: dict[tuple[str, float], pathlib.Path] = {}
    for file in files:
      header = _header(file, next(_lines(file), b''))
      step = header['step']
      kinds.setdefault((header['context'], header['temperature']), file)
      if step in self._files:
        raise DumpError(
          f'{path}: {self._files[step].name} and {file.name} are both of step '
          f'{step}, and a step is trained on once; move one of them away.'
        )
      self._files[step] = file
      self._staleness[step] = header['staleness']
    if len(kinds) > 1:
      found = ', '.join(
        f'{file.name}: {context}, {temperature}'
        for (context, temperature), file in kinds.items()
      )
      raise DumpError(
        f'{path}: its files differ in their context or temperature ({found}), '
        'so they are of several runs; move those of one of them away.'
      )
    ((self.context, self.temperature),) = kinds
    self.steps = tuple(sorted(self._files))

  def staleness(self, step: int) -> int:
    """How old the policy was, see `write`; `step` is one of `steps`."""
    return self._staleness[step]

  def episodes(self, step: int) -> list[episodes.Episode]:
    """The episodes of a step, in the order written.

    Args:
      step: one of `steps`.

    Raises:
      DumpError: there are none of this step, or their file is damaged or lacks
        a key.
    """
    if step not in self._files:
      raise DumpError(
        f'{self._path}: holds no episodes of step {step}, only of '
        f'{ranges(self.steps)}; train no further than these, or give the '
        'whole dump.'
      )
    file = self._files[step]
    lines = _lines(file)
    count = _header(file, next(lines, b''))['episodes']
    found = [
      _episode(file, number, line) for number, line in enumerate(lines, 2)
    ]
    if len(found) != count:
      raise DumpError(
        f'{file}: the header tells of {count} episodes and there are '
        f'{len(found)}; {_REPAIR}'
      )
    return found


def ranges(steps: Sequence[int]) -> str:
  """E.g. `1 to 40, 42`."""
  spans: list[list[int]] = []
  for step in steps:
    if spans and step == spans[-1][1] + 1:
      spans[-1][1] = step
    else:
      spans.append([step, step])
  return ', '.join(
    f'{first}' if first == last else f'{first} to {last}'
    for first, last in spans
  )


def _lines(path: pathlib.Path) -> Iterator[bytes]:
  """The lines of a compressed file, unpacked as they are taken."""
  try:
    with gzip.open(path, 'rb') as file:
      yield from file
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise DumpError(
      f'{path}: the file is cut or damaged ({error}), and only whole gzip '
      f'files can be trusted; {_REPAIR}'
    ) from error
  except OSError as error:
    raise DumpError(
      f'{path}: cannot be read ({error.strerror}). {_RECIPE}'
    ) from error


def _header(path: pathlib.Path, line: bytes) -> Mapping[str, Any]:
  try:
    header = json.loads(line)
  except (ValueError, RecursionError):
    header = None
  if not isinstance(header, dict) or header.get('format') != FORMAT:
    raise DumpError(
      f'{path}: the first line is not the header of a dump, which has '
      f'"format": "{FORMAT}". {_RECIPE}'
    )
  if header.get('version') != VERSION:
    raise DumpError(
      f'{path}: version {header.get("version")!r} of the format, and version '
      f'{VERSION} is what is read here; use the planpo_jax that wrote it.'
    )
  for key, kind, name in (
    ('step', int, 'an integer'),
    ('episodes', int, 'an integer'),
    ('staleness', int, 'an integer'),
    ('context', str, 'a string'),
    ('temperature', float, 'a number with a point'),
  ):
    if type(header.get(key)) is not kind:
      raise DumpError(
        f'{path}: line 1: {key} is {header.get(key)!r}, and the header needs '
        f'it as {name}; {_REPAIR}'
      )
  return header


def _line(record: Mapping[str, Any]) -> bytes:
  text = json.dumps(
    record, allow_nan=False, separators=(',', ':'), default=_scalar
  )
  return text.encode('ascii') + b'\n'


def _scalar(value: Any) -> Any:
  """The Python number of a numpy scalar."""
  return value.item()


def _to_json(
  value: Any, fields: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
  record = {}
  for key, read in fields.items():
    field = getattr(value, key)
    if read is _number and not math.isfinite(field):
      field = str(float(field))
    elif read is _ending:
      field = field.value
    elif read is _task:
      field = _to_json(field, _TASK)
    elif read is _turns:
      field = [_to_json(turn, _TURN) for turn in field]
    record[key] = field
  return record


def _episode(path: pathlib.Path, number: int, line: bytes) -> episodes.Episode:
  try:
    return episodes.Episode(**_from_json(json.loads(line), _EPISODE))
  except (ValueError, TypeError, RecursionError) as error:
    raise DumpError(f'{path}: line {number}: {error}; {_REPAIR}') from error


def _from_json(
  record: Any, fields: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
  if not isinstance(record, dict):
    raise ValueError(f'{_short(record)} stands where an object should')
  values = {}
  for key, read in fields.items():
    if key not in record:
      raise ValueError(f'the key {key!r} is missing')
    try:
      values[key] = read(record[key])
    except (ValueError, TypeError) as error:
      raise ValueError(f'{key}: {error}') from error
  return values


def _short(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 60 else shown[:60] + '...'


def _of(kind: type, name: str) -> Callable[[Any], Any]:
  """Passes values of exactly this type."""

  def read(value: Any) -> Any:
    if type(value) is not kind:
      raise ValueError(f'{_short(value)} is not {name}')
    return value

  return read


_text = _of(str, 'a string')
_truth = _of(bool, 'true or false')
_integer = _of(int, 'an integer')
_list = _of(list, 'a list')


def _number(value: Any) -> float:
  if type(value) is str and value in _UNBOUNDED:
    return _UNBOUNDED[value]
  if type(value) not in (int, float):
    raise ValueError(f'{_short(value)} is not a number')
  return float(value)


def _ids(value: Any) -> tuple[int, ...]:
  ids = tuple(map(operator.index, _list(value)))
  if ids and min(ids) < 0:
    raise ValueError(f'{min(ids)} is not a token id')
  return ids


def _logps(value: Any) -> tuple[float, ...]:
  logps = tuple(map(float, _list(value)))
  if not all(map(math.isfinite, logps)):
    raise ValueError('a log-probability is not finite')
  return logps


def _options(value: Any) -> tuple[tuple[str, str], ...]:
  return tuple((_text(key), _text(option)) for key, option in _list(value))


def _ending(value: Any) -> episodes.Ending:
  known = [ending.value for ending in episodes.Ending]
  if value not in known:
    raise ValueError(f'{_short(value)} is none of {", ".join(known)}')
  return episodes.Ending(value)


def _task(value: Any) -> episodes.Task:
  return episodes.Task(**_from_json(value, _TASK))


def _turns(value: Any) -> tuple[episodes.Turn, ...]:
  turns = []
  for index, turn in enumerate(_list(value)):
    try:
      turns.append(episodes.Turn(**_from_json(turn, _TURN)))
    except ValueError as error:
      raise ValueError(f'turn {index}: {error}') from error
  return tuple(turns)


# Keys in the order written, and what makes the value of each from JSON.
_TASK = {
  'env': _text,
  'split': _text,
  'index': _integer,
  'name': _text,
  'seed': _integer,
  'options': _options,
}
_TURN = {
  'observation': _text,
  'prompt_ids': _ids,
  'response_ids': _ids,
  'response_logps': _logps,
  'response': _text,
  'action': _text,
  'valid': _truth,
  'reward': _number,
  'state_key': _integer,
  'truncated': _truth,
  'respond_s': _number,
  'env_s': _number,
}
_EPISODE = {
  'task': _task,
  'member': _integer,
  'goal': _text,
  'score': _number,
  'success': _truth,
  'ending': _ending,
  'fault': _text,
  'start_s': _number,
  'reset_s': _number,
  'recoveries': _integer,
  'dropped_pairs': _integer,
  'turns': _turns,
}
