"""Reads what a training run left in its directory, and dumps of episodes.

A run may still be going: a last line cut in half, a summary without its
`after` row or a file that is not there yet are normal, and each is told to the
reader of the page through `Run.notes`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import pathlib
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from planpo_jax import sweep

FILES = ('config.json', 'metrics.jsonl', 'summary.json', 'transcripts/')

# Longest text kept of one observation, response or action, in characters.
MAX_CHARACTERS = 4000
# Most turns kept of one episode.
MAX_TURNS = 150
# Most tokens kept of one response.
MAX_TOKENS = 256

# What a dump is: planpo_jax/dump.py, not read through it because the report
# needs neither JAX nor numpy.
DUMP_FORMAT = ('planpo_jax.episodes', 1)
DUMP_SUFFIX = '.jsonl.gz'

_HIDDEN = re.compile(
  '[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)


class RunError(Exception):
  """A directory cannot be read as a run; the message says what to give."""


@dataclasses.dataclass(frozen=True)
class TranscriptFile:
  """Episodes of one file of transcripts.

  Attributes:
    name: file name without its ending, e.g. `train_000003`.
    total: episodes in the file.
    episodes: those kept, each a JSON object, already encoded.
  """

  name: str
  total: int
  episodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Run:
  """Everything the page shows about one run.

  Attributes:
    name: shortest end of the directory's path that no other run shares.
    method: the same for all runs of a sweep that differ in their seed alone;
      unique to a run of its own.
    path: the directory.
    config: flat configuration, e.g. `{'advantage.name': 'planpo'}`.
    metrics: by (kind, key), e.g. `('train', 'rollout/success')`, the
      (step, value) pairs in order of steps; finite values only.
    last_step: highest training step seen; None before the first.
    split: split that `rows` were measured on.
    rows: by name (`before`, `after`), the row of the closing table.
    transcripts: files of transcripts, evaluations first.
    notes: sentences about what was missing or unreadable.
    only_episodes: `path` is a dump, or a file of one, and not a run: there
      are transcripts and nothing else.
    reason: what its sweep has the run for; '' without a sweep.
    published: what its sweep says a paper reports for it.
  """

  name: str
  method: str
  path: pathlib.Path
  config: Mapping[str, Any]
  metrics: Mapping[tuple[str, str], Sequence[tuple[float, float]]]
  last_step: int | None
  split: str
  rows: Mapping[str, Mapping[str, Any]]
  transcripts: Sequence[TranscriptFile]
  notes: Sequence[str]
  only_episodes: bool = False
  reason: str = ''
  published: str = ''

  @property
  def replays(self) -> bool:
    """It trains from a dump, without environments to be evaluated in."""
    return bool(self.config.get('rollout.replay'))

  @property
  def is_finished(self) -> bool:
    """Its last evaluation is there, or its last step if none will come."""
    if self.replays:
      planned = number(self.config.get('train.steps'))
      return planned is not None and (self.last_step or 0) >= planned
    return 'after' in self.rows


def load_all(
  paths: Sequence[pathlib.Path],
  *,
  episodes_per_file: int,
  transcript_bytes: int,
) -> list[Run]:
  """Reads several runs.

  Args:
    paths: one a run, as given to `launch/train.py --workdir`; or the folder of
      a sweep, which stands for all its runs; or a folder of dumped episodes, or
      one file of it.
    episodes_per_file: most episodes kept of one file of transcripts.
    transcript_bytes: most bytes of encoded transcripts, over all runs.

  Returns:
    The runs, in the order given; those of a sweep in its order.

  Raises:
    RunError: a path is given twice, is missing or holds neither a run nor a
      dump.
  """
  resolved = [run for path in paths for run in _runs_at(path.resolve())]
  for index, path in enumerate(resolved):
    if path in resolved[:index]:
      raise RunError(f'{path} is given twice; give each run once.')
  methods = [_method(path) for path in resolved]
  distinct = set(methods)
  return [
    _load(
      path,
      name=_name(path, resolved),
      method=_name(method, distinct),
      episodes_per_file=episodes_per_file,
      transcript_bytes=transcript_bytes // len(resolved),
    )
    for path, method in zip(resolved, methods, strict=True)
  ]


def _is_run(path: pathlib.Path) -> bool:
  return any((path / file).exists() for file in FILES)


def _runs_at(path: pathlib.Path) -> list[pathlib.Path]:
  """The runs in a folder of a sweep; else the path itself."""
  if not path.is_dir() or _is_run(path) or _dump_files(path):
    return [path]
  order = {name: i for i, name in enumerate(_sweep_entries(path))}
  found = [folder for folder in path.iterdir() if _is_run(folder)]
  # A run that the sweep does not know comes after those that it does.
  return sorted(
    found, key=lambda run: (order.get(run.name, len(order)), run.name)
  ) or [path]


def _sweep_entries(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """What a sweep wrote about the runs in its folder, by name, in order."""
  runs = _read_object(folder / sweep.RECORD, []).get('runs')
  return {
    text(entry.get('name')): entry
    for entry in (runs if isinstance(runs, list) else ())
    if isinstance(entry, dict)
  }


def _method(path: pathlib.Path) -> pathlib.Path:
  """One path for the runs of a sweep that differ in their seed alone."""
  entry = _sweep_entries(path.parent).get(path.name, {})
  return path.parent / (text(entry.get('run')) or path.name)


def _name(path: pathlib.Path, others: Collection[pathlib.Path]) -> str:
  """Shortest end of `path` that no other of `others` ends with."""
  for length in range(1, len(path.parts) + 1):
    tail = path.parts[-length:]
    if sum(other.parts[-length:] == tail for other in others) == 1:
      break
  return clean('/'.join(tail))


def _load(
  path: pathlib.Path,
  *,
  name: str,
  method: str,
  episodes_per_file: int,
  transcript_bytes: int,
) -> Run:
  expected = (
    f'A run is the --workdir of launch/train.py and holds {", ".join(FILES)};'
    ' the --workdir of launch/sweep.py holds folders of runs;'
    f' a dump of episodes is a folder of *{DUMP_SUFFIX} or one such file.'
  )
  if not path.exists():
    raise RunError(f'{path}: no such directory or file. {expected}')
  if not path.is_dir() and not path.name.endswith(DUMP_SUFFIX):
    raise RunError(f'{path}: a file that is no dump of episodes. {expected}')
  is_run = _is_run(path)
  dumped = [path] if path.is_file() else _dump_files(path)
  if not is_run and not dumped:
    raise RunError(f'{path}: holds none of the files of a run. {expected}')
  notes: list[str] = []
  config, summary, metrics = {}, {}, {}
  try:
    if is_run:
      config = dict(_flatten(_read_object(path / 'config.json', notes)))
      config |= _environment(path / 'environment.json', notes)
      summary = _read_object(path / 'summary.json', notes)
      metrics = _read_metrics(path / 'metrics.jsonl', notes)
      dumped = _dump_of_run(path, config.get('rollout.dump'), notes)
    names = {_file_name(file) for file in dumped}
    plain = [
      file
      for file in (path / 'transcripts').glob('*.jsonl')
      if _file_name(file) not in names
    ]
    transcripts = _read_transcripts(
      [*dumped, *plain],
      notes,
      episodes_per_file=episodes_per_file,
      budget=transcript_bytes,
    )
  except OSError as error:
    raise RunError(
      f'{error.filename or path}: cannot be read ({error.strerror}). {expected}'
    ) from error
  if not is_run and not transcripts:
    raise RunError(
      f'{path}: holds no episodes that can be read. {" ".join(notes)} '
      f'{expected}'
    )
  rows = summary.get('rows')
  rows = rows if isinstance(rows, dict) else {}
  rows = {clean(key): row for key, row in rows.items() if isinstance(row, dict)}
  if config.get('rollout.replay'):
    notes.append(
      'Trained from the dump rollout.replay='
      f'{text(config["rollout.replay"])}, without environments: nothing is'
      ' evaluated.'
    )
  elif is_run and 'after' not in rows:
    notes.append(
      'No closing evaluation yet: the run is in progress or was stopped.'
    )
  steps = [
    points[-1][0] for (kind, _), points in metrics.items() if kind == 'train'
  ]
  entry = _sweep_entries(path.parent).get(path.name, {})
  return Run(
    name=name,
    method=method,
    path=path,
    config=config,
    metrics=metrics,
    last_step=int(max(steps)) if steps else None,
    split=text(summary.get('split')),
    rows=rows,
    transcripts=transcripts,
    notes=tuple(notes),
    only_episodes=not is_run,
    reason=text(entry.get('reason')),
    published=text(entry.get('published')),
  )


def clean(value: str) -> str:
  """Makes hidden characters visible, as escapes such as `\\u202e`.

  These are lone surrogates, which UTF-8 cannot hold, controls other than tab
  and line ends, and marks that reorder the text around them.
  """
  return _HIDDEN.sub(lambda match: f'\\u{ord(match[0]):04x}', value)


def text(value: Any) -> str:
  """Text of any JSON value; '' for null."""
  if value is None:
    return ''
  return clean(value if isinstance(value, str) else json.dumps(value))


def number(value: Any) -> float | None:
  """A finite float, or None for whatever is not one (booleans too)."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    value = float(value)
  except OverflowError:
    return None
  return value if math.isfinite(value) else None


def _read_object(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
  """The JSON object in a file; {} with a note when there is none."""
  if not path.exists():
    if path.name != 'summary.json':
      notes.append(f'{path.name} is missing.')
    return {}
  try:
    value = json.loads(path.read_text('utf-8', errors='replace'))
  except (ValueError, RecursionError):
    value = None
  if not isinstance(value, dict):
    notes.append(f'{path.name} does not hold a whole JSON object; left out.')
    return {}
  return value


def _environment(path: pathlib.Path, notes: list[str]) -> dict[str, str]:
  """What was played last, as a setting; older and replayed runs have none."""
  if not path.exists():
    return {}
  try:
    versions = [text(one['version']) for one in json.loads(path.read_text())]
    last = {'environment.version': versions[-1]}
  except (ValueError, LookupError, TypeError, RecursionError):
    notes.append(f'{path.name} is damaged; left out.')
    return {}
  if len(versions) > 1:
    notes.append(f'The environment changed in the run: {", ".join(versions)}.')
  return last


def _flatten(
  config: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  for key, value in config.items():
    key = clean(prefix + key)
    if isinstance(value, dict) and value:
      yield from _flatten(value, key + '.')
    else:
      yield key, value


def _read_lines(path: pathlib.Path) -> list[bytes]:
  return [line for line in path.read_bytes().splitlines() if line.strip()]


def _parse(line: bytes) -> dict[str, Any] | None:
  """The JSON object of a line, or None."""
  try:
    value = json.loads(line.decode('utf-8', errors='replace'))
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _note_unreadable(
  name: str, bad: Sequence[int], lines: int, notes: list[str]
) -> None:
  """Notes lines that were skipped; a cut last line alone is no news."""
  count = len([index for index in bad if index != lines - 1])
  if count:
    notes.append(f'{name}: {count} unreadable of {lines} lines were skipped.')


def _read_metrics(
  path: pathlib.Path, notes: list[str]
) -> dict[tuple[str, str], list[tuple[float, float]]]:
  if not path.exists():
    notes.append(f'{path.name} is missing.')
    return {}
  lines = _read_lines(path)
  bad = []
  # A resumed run writes again the steps after its checkpoint: the later line
  # is the one whose parameters live on.
  values: dict[tuple[str, str], dict[float, float]] = {}
  for index, line in enumerate(lines):
    record = _parse(line)
    step = number(record.get('step')) if record else None
    if step is None:
      bad.append(index)
      continue
    kind = text(record.get('kind'))
    if kind == 'progress':
      continue
    for key, value in record.items():
      value = number(value)
      if value is not None and key not in ('step', 'time'):
        values.setdefault((kind, clean(key)), {})[step] = value
  _note_unreadable(path.name, bad, len(lines), notes)
  return {key: sorted(points.items()) for key, points in values.items()}


def spread(items: Sequence[Any], count: int) -> Sequence[Any]:
  """At most `count` of `items`, evenly spaced, the first among them."""
  if len(items) <= count:
    return items
  return [items[i * len(items) // count] for i in range(count)]


def _file_name(path: pathlib.Path) -> str:
  """Name of a file of transcripts without its ending, packed or not."""
  return path.name.removesuffix('.gz').removesuffix('.jsonl')


def _dump_files(folder: pathlib.Path) -> list[pathlib.Path]:
  return list(folder.glob('*' + DUMP_SUFFIX))


def _dump_of_run(
  path: pathlib.Path, setting: Any, notes: list[str]
) -> list[pathlib.Path]:
  """Files of the dump that a run was configured to write; [] without one."""
  if not isinstance(setting, str) or not setting:
    return []
  given = pathlib.Path(setting)
  # A relative path starts where training was started: here, or at a folder
  # around the run. A run that was moved may have its dump in or beside it.
  for folder in (
    given,
    *(parent / given for parent in (path, *path.parents)),
    path / given.name,
    path.parent / given.name,
  ):
    files = _dump_files(folder)
    if files:
      return files
  notes.append(
    f'rollout.dump={clean(setting)}: no episodes were found there; those of'
    ' transcripts/ are shown.'
  )
  return []


def _transcript_order(path: pathlib.Path) -> tuple[bool, str]:
  return path.name.startswith('train'), path.name


def _read_transcripts(
  paths: Sequence[pathlib.Path],
  notes: list[str],
  *,
  episodes_per_file: int,
  budget: int,
) -> list[TranscriptFile]:
  """Reads transcripts; what is kept stays below `budget` bytes.

  When it would not, the same smaller number is kept of every file; below one
  episode a file, every other file is left out, evaluations last.
  """
  kept: list[TranscriptFile] = []
  cap = episodes_per_file
  dropped = 0
  for path in sorted(paths, key=_transcript_order):
    if path.name.endswith(DUMP_SUFFIX):
      kept += _read_dump(path, cap, notes)
    else:
      kept.append(_read_episodes(path, cap, notes))
    while _size(kept) > budget:
      if cap > 1:
        cap = max(1, cap // 2)
        kept = [
          dataclasses.replace(file, episodes=tuple(spread(file.episodes, cap)))
          for file in kept
        ]
        continue
      train = [file for file in kept if file.name.startswith('train')]
      remove = train[1::2] or train or kept[-1:]
      kept = [file for file in kept if file not in remove]
      dropped += len(remove)
  if dropped:
    notes.append(
      f'{dropped} files of transcripts are left out, to keep the page small.'
    )
  return kept


def _size(files: Sequence[TranscriptFile]) -> int:
  return sum(len(episode) for file in files for episode in file.episodes)


def _read_episodes(
  path: pathlib.Path, cap: int, notes: list[str]
) -> TranscriptFile:
  lines = _read_lines(path)
  bad = []
  episodes = []
  for index, line in enumerate(lines):
    record = _parse(line)
    if record is None:
      bad.append(index)
    else:
      episodes.append(record)
  _note_unreadable(path.name, bad, len(lines), notes)
  return TranscriptFile(
    name=clean(_file_name(path)),
    total=len(episodes),
    episodes=tuple(
      embed_json(_episode(record)) for record in spread(episodes, cap)
    ),
  )


def _read_dump(
  path: pathlib.Path, cap: int, notes: list[str]
) -> list[TranscriptFile]:
  """The episodes of a file of a dump; [] with a note when it is none."""
  name = clean(path.name)
  lines: list[bytes] = []
  try:
    with gzip.open(path, 'rb') as file:
      lines.extend(file)
  except (EOFError, zlib.error, gzip.BadGzipFile):
    notes.append(
      f'{name}: the file is cut or damaged; what came before is shown.'
    )
  header = (_parse(lines[0]) if lines else None) or {}
  if (header.get('format'), header.get('version')) != DUMP_FORMAT:
    notes.append(
      f'{name}: not a dump of episodes of version {DUMP_FORMAT[1]}; left out.'
    )
    return []
  # Only those shown are parsed, for a dump holds every episode of a run.
  records = [_parse(line) for line in spread(lines[1:], cap)]
  unreadable = records.count(None)
  if unreadable:
    notes.append(
      f'{name}: {unreadable} unreadable of {len(records)} lines were skipped.'
    )
  step = {'step': header.get('step')}
  return [
    TranscriptFile(
      name=clean(_file_name(path)),
      total=len(lines) - 1,
      episodes=tuple(
        embed_json(_episode(step | record))
        for record in records
        if record is not None
      ),
    )
  ]


def embed_json(value: Any) -> str:
  """JSON that is safe inside an HTML script element.

  Plain ASCII, so that neither the page's encoding nor a lone surrogate can
  break it; no `<`, so that no text in it ends the element or opens a comment.

  Args:
    value: anything JSON can hold; NaN and infinities raise ValueError.
  """
  encoded = json.dumps(value, allow_nan=False, separators=(',', ':'))
  return encoded.replace('<', '\\u003c')


def _cut(value: Any) -> str:
  value = text(value)
  left_out = len(value) - MAX_CHARACTERS
  if left_out <= 0:
    return value
  return f'{value[:MAX_CHARACTERS]} [… {left_out:,} more characters]'


def _episode(record: Mapping[str, Any]) -> dict[str, Any]:
  """An episode with every field of the type that the page's script expects."""
  task = record.get('task')
  task = task if isinstance(task, dict) else {}
  turns = record.get('turns')
  turns = turns if isinstance(turns, list) else []
  turns = [turn for turn in turns if isinstance(turn, dict)]
  tokens = [_tokens(turn) for turn in turns]
  return {
    'step': number(record.get('step')),
    'split': _cut(record.get('split', task.get('split'))),
    'env': _cut(task.get('env')),
    'type': _cut(task.get('name')),
    'index': number(task.get('index')),
    'seed': number(task.get('seed')),
    'member': number(record.get('member')),
    'goal': _cut(record.get('goal')),
    'score': number(record.get('score')),
    'success': record.get('success') is True,
    'ending': _cut(record.get('ending')),
    'fault': _cut(record.get('fault')),
    'return': number(record.get('return')),
    'start_s': _short(number(record.get('start_s'))),
    'reset_s': _short(number(record.get('reset_s'))),
    'tokens': sum(count or 0 for count in tokens),
    'total_turns': len(turns),
    'turns': [
      {
        'observation': _cut(turn.get('observation')),
        'response': _cut(turn.get('response')),
        'action': _cut(turn.get('action')),
        'valid': turn.get('valid') is not False,
        'truncated': turn.get('truncated') is True,
        'reward': number(turn.get('reward')),
        'tokens': count,
        'advantage': number(turn.get('advantage')),
        'sampled': _sampled(turn),
      }
      for turn, count in zip(turns[:MAX_TURNS], tokens, strict=False)
    ],
  }


def _tokens(turn: Mapping[str, Any]) -> float | None:
  """Number of tokens of a response, given or counted."""
  ids = turn.get('response_ids')
  return len(ids) if isinstance(ids, list) else number(turn.get('tokens'))


def _sampled(turn: Mapping[str, Any]) -> dict[str, Any] | None:
  """What a dump tells of how a turn was sampled; None without it."""
  ids, logps = turn.get('response_ids'), turn.get('response_logps')
  if not isinstance(ids, list) or not isinstance(logps, list):
    return None
  prompt_ids = turn.get('prompt_ids')
  logps = [number(logp) for logp in logps]
  known = [logp for logp in logps if logp is not None]
  return {
    'prompt_tokens': len(prompt_ids) if isinstance(prompt_ids, list) else None,
    'mean_logp': _short(sum(known) / len(known)) if known else None,
    'respond_s': _short(number(turn.get('respond_s'))),
    'env_s': _short(number(turn.get('env_s'))),
    'ids': [
      value if type(value) is int and 0 <= value < 2**53 else None
      for value in ids[:MAX_TOKENS]
    ],
    'logps': [_short(logp) for logp in logps[:MAX_TOKENS]],
  }


def _short(value: float | None) -> float | None:
  """Three digits of a number: what the page shows of it."""
  return None if value is None else float(f'{value:.3g}')
