"""Success, score, turns and tokens of a policy, with their uncertainty."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planpo_jax import env_client, episodes, rollout, tasks

# First number of the random seed after the run's own: rollouts and evaluations
# never share one, and every evaluation draws with the same.
TRAIN_SEED, SEED = 0, 1

# Two-sided 95% quantile of the standard normal distribution.
_Z = 1.959964


@dataclasses.dataclass(frozen=True)
class Layout:
  """The row that publications print for an environment.

  Attributes:
    columns: {title: set of task types, or type}, in the order of print.
    whole: title of the column of all episodes, which comes last.
    score: a cell has the mean score beside the success.
    notes: {split: what it is, where its name does not say so}.
  """

  columns: Mapping[str, str]
  whole: str = 'All'
  score: bool = False
  notes: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Tables 1 to 3 of PlanPO, arXiv 2608.17289; other publications print the same.
LAYOUTS: Mapping[str, Layout] = {
  'alfworld': Layout(
    {name: name for name in ('Pick', 'Look', 'Clean', 'Heat', 'Cool', 'Pick2')},
    notes={
      'valid_seen': 'in distribution',
      'valid_unseen': 'out of distribution',
    },
  ),
  'sciworld': Layout(
    {
      'Measure': 'measure',
      'Test-Cond': 'test-cond',
      'Find': 'find',
      'Chem-Mix': 'chem-mix',
      'Lifespan': 'lifespan',
    },
    whole='Overall',
    score=True,
  ),
  'webshop': Layout(
    {'Human': 'human', 'Synthetic': 'synthetic'},
    score=True,
    notes={'test': 'goals 0 to 499', 'dev': 'goals 500 to 1,499'},
  ),
}


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean with its 95% interval."""

  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Summary:
  """What the closing table says of one policy.

  Attributes:
    episodes: number of episodes behind the means (faults are not among them).
    faults: episodes lost to their environment.
    success: share of episodes that reached the goal (Wilson interval).
    score: the environment's own score, failures included.
    turns: turns an episode, all episodes.
    turns_success: turns of the successful episodes.
    response_tokens: tokens a response, mean over episodes of their mean.
    by_type: the same for each task type; empty inside itself.
    by_set: the same for sets of task types, see `summarize`; likewise.
  """

  episodes: int
  faults: int
  success: Estimate
  score: Estimate
  turns: Estimate
  turns_success: Estimate
  response_tokens: Estimate
  by_type: Mapping[str, Summary] = dataclasses.field(default_factory=dict)
  by_set: Mapping[str, Summary] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    return (
      f'success {_cell(_percent(self.success))} %, score {_cell(self.score)}, '
      f'turns {_cell(self.turns)}, tokens a response '
      f'{_cell(self.response_tokens)} ({self.episodes} episodes)'
    )

  def to_json(self) -> dict:
    """Plain values; the interval of `x` is `x_ci`."""
    values: dict = {'episodes': self.episodes, 'faults': self.faults}
    for name in MEASURES:
      estimate = getattr(self, name)
      values[name] = _finite(estimate.mean)
      values[f'{name}_ci'] = [_finite(estimate.low), _finite(estimate.high)]
    values['by_type'] = {k: s.to_json() for k, s in self.by_type.items()}
    values['by_set'] = {k: s.to_json() for k, s in self.by_set.items()}
    return values

  @classmethod
  def from_json(cls, values: Mapping) -> Summary:
    return cls(
      episodes=values['episodes'],
      faults=values['faults'],
      by_type={k: cls.from_json(v) for k, v in values['by_type'].items()},
      # Older files have none.
      by_set={k: cls.from_json(v) for k, v in values.get('by_set', {}).items()},
      **{
        name: Estimate(
          *(
            math.nan if v is None else v
            for v in (values[name], *values[f'{name}_ci'])
          )
        )
        for name in MEASURES
      },
    )

  def scalars(self) -> dict[str, float]:
    scalars = {
      'eval/episodes': float(self.episodes),
      'eval/faults': float(self.faults),
    }
    for name in MEASURES:
      scalars[f'eval/{name}'] = getattr(self, name).mean
    for kind, summary in self.by_type.items():
      scalars[f'eval_success/{kind}'] = summary.success.mean
    return scalars


# Those that publications have for all episodes together.
_MEANS = ('turns', 'turns_success', 'response_tokens')
MEASURES = ('success', 'score', *_MEANS)


@dataclasses.dataclass(frozen=True)
class Results:
  """What some policies did on one split.

  Attributes:
    split: its name.
    rows: {policy: summary}.
    cells: {policy: {title: summary}}, every column of the layout and the whole,
      those that no episode falls into included.
  """

  split: str
  rows: Mapping[str, Summary]
  cells: Mapping[str, Mapping[str, Summary]]


def environment(description: env_client.Description) -> dict:
  """What decides which games an environment plays, as plain values."""
  return {
    'name': description.name,
    'version': description.version,
    'split_sizes': dict(sorted(description.splits.items())),
  }


def plan(
  splits: Sequence[str],
  count: int,
  description: env_client.Description,
  tasks_of: Callable[[str], Sequence[episodes.Task]],
) -> dict[str, list[rollout.Job]]:
  """The jobs of each of `splits`, see `jobs`.

  Args:
    splits: names.
    count: episodes of each split; 0: every task once.
    description: of the environment.
    tasks_of: gives the tasks of a split that the configuration asks for.

  Raises:
    ValueError: a split is unknown, or has no such task.
  """
  sizes = ', '.join(f'{k} {n}' for k, n in sorted(description.splits.items()))
  planned = {}
  for split in splits:
    if split not in description.splits:
      raise ValueError(
        f'split {split!r} is unknown; {description.name} has, with their '
        f'numbers of tasks, {sizes}.'
      )
    pool = tasks_of(split)
    if not pool:
      raise ValueError(
        f'split {split!r} has no tasks of the types of env.task_types; '
        f'{description.name} has, of all types, {sizes}. Name other types, or '
        'leave the split out.'
      )
    planned[split] = jobs(pool, count)
  return planned


def jobs(pool: Sequence[episodes.Task], count: int) -> list[rollout.Job]:
  """`count` evaluation jobs, even over task types and their variations.

  A `count` of 0 stands for every task of the pool once. Repeats of a task are
  members of its group, so each draws its own responses.
  """
  seen: collections.Counter[episodes.Task] = collections.Counter()
  chosen = []
  for task in tasks.spread(pool, count or len(pool)):
    chosen.append((task, seen[task]))
    seen[task] += 1
  return chosen


def summarize(
  played: Sequence[episodes.Episode],
  sets: Mapping[str, Sequence[str]] | None = None,
) -> Summary:
  """Means and intervals over `played`; faults are counted apart.

  Args:
    played: episodes of one policy.
    sets: {name: task types} to summarize besides, as the service describes
      them. Left out are sets that no episode falls into, and those that all
      fall into: they are the whole again.

  Raises:
    ConnectionError: every episode was lost to a fault.
  """
  if played and all(e.ending is episodes.Ending.FAULT for e in played):
    raise ConnectionError(
      f'all {len(played)} episodes were lost to faults of the environment; the '
      f'last: {played[-1].fault}'
    )
  by_type = collections.defaultdict(list)
  for episode in played:
    by_type[episode.task.name].append(episode)
  by_set = {
    name: [e for e in played if e.task.name in types]
    for name, types in (sets or {}).items()
  }
  return dataclasses.replace(
    _summarize(played),
    by_type={k: _summarize(v) for k, v in sorted(by_type.items())},
    by_set={
      k: _summarize(v)
      for k, v in sorted(by_set.items())
      if 0 < len(v) < len(played)
    },
  )


def layout(description: env_client.Description) -> Layout:
  """The columns for an environment; its task types if none are published."""
  found = LAYOUTS.get(description.name, Layout({}))
  known = {*description.sets, *description.task_names}
  if found.columns and known.issuperset(found.columns.values()):
    return found
  types = {name: name for name in description.task_names}
  return dataclasses.replace(found, columns=types)


def results(
  split: str,
  played: Mapping[str, Sequence[episodes.Episode]],
  description: env_client.Description,
) -> Results:
  """Summarizes {policy: its episodes} on `split`, also as publications do.

  Raises:
    ConnectionError: see `summarize`.
  """
  shape, sets = layout(description), description.sets
  cells = {}
  for policy, mine in played.items():
    cells[policy] = {
      title: _summarize([e for e in mine if e.task.name in sets.get(n, (n,))])
      for title, n in shape.columns.items()
    } | {shape.whole: _summarize(mine)}
  rows = {policy: summarize(mine, sets) for policy, mine in played.items()}
  return Results(split, rows, cells)


def _summarize(played: Sequence[episodes.Episode]) -> Summary:
  whole = [e for e in played if e.ending is not episodes.Ending.FAULT]
  wins = [e for e in whole if e.success]
  return Summary(
    episodes=len(whole),
    faults=len(played) - len(whole),
    success=wilson(len(wins), len(whole)),
    score=normal([e.score for e in whole]),
    turns=normal([len(e.turns) for e in whole]),
    turns_success=normal([len(e.turns) for e in wins]),
    response_tokens=normal(
      [
        np.mean([len(t.response_ids) for t in e.turns])
        for e in whole
        if e.turns
      ]
    ),
  )


def remember(path: pathlib.Path, make: Callable[[], Summary]) -> Summary:
  """The summary kept at `path`, or made now and kept for a resumed run."""
  if path.exists():
    try:
      return Summary.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f'{path} is damaged; an evaluation before training cannot be made up '
        'for, so choose another --workdir, or restore the file.'
      ) from error
  made = make()
  part = path.with_suffix('.part')
  part.write_text(json.dumps(made.to_json()))
  part.rename(path)
  return made


def write_summary(
  path: pathlib.Path, split: str, rows: Mapping[str, Summary]
) -> None:
  """The closing table as JSON, for the report."""
  content = {
    'split': split,
    'rows': {name: row.to_json() for name, row in rows.items()},
  }
  path.write_text(json.dumps(content, indent=1) + '\n')


def write_results(
  path: pathlib.Path,
  evaluated: Mapping,
  found: Sequence[Results],
  shape: Layout,
) -> None:
  """Writes `path` (JSON) and, ending in .md, the table of publications.

  Args:
    path: ends in .json, see `check_output`.
    evaluated: what was played and how, plain values.
    found: a split each.
    shape: columns of the table.
  """
  content = {
    'evaluated': evaluated,
    'splits': {
      one.split: {
        'label': _label(one.split, shape),
        'rows': {name: row.to_json() for name, row in one.rows.items()},
        'paper_row': {
          policy: _paper_row(cells, shape)
          for policy, cells in one.cells.items()
        },
      }
      for one in found
    },
  }
  path.write_text(json.dumps(content, indent=1) + '\n')
  said = [f'- {k}: {_words(v)}' for k, v in evaluated.items() if v is not None]
  lines = ['# Evaluation', '', *said, '', markdown(found, shape), '']
  path.with_suffix('.md').write_text('\n'.join(lines))


def check_output(path: pathlib.Path) -> None:
  """Raises ValueError or OSError if `write_results` could not write there."""
  if path.suffix != '.json':
    raise ValueError(
      f'--output={path} must end in .json; the table goes beside it, to the '
      'same name ending in .md.'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(
      f'--output={path}: there is no folder to write it to; make '
      f'{path.parent} first.'
    )
  for file in (path, path.with_suffix('.md')):
    if file.is_dir() or not os.access(
      file if file.exists() else path.parent, os.W_OK
    ):
      raise PermissionError(
        f'--output={path}: {file} cannot be written; name another file.'
      )


def _paper_row(cells: Mapping[str, Summary], shape: Layout) -> dict:
  """The row of publications as plain values; success in percent."""
  whole = cells[shape.whole]
  values: dict = {
    'columns': {
      title: {
        'success_percent': _finite(100 * cell.success.mean),
        'score': _finite(cell.score.mean),
        'episodes': cell.episodes,
        'faults': cell.faults,
      }
      for title, cell in cells.items()
    }
  }
  for name in _MEANS:
    values[name] = _finite(getattr(whole, name).mean)
  return values


def _label(split: str, shape: Layout) -> str:
  note = shape.notes.get(split)
  return f'{split} ({note})' if note else split


def _words(value) -> str:
  """Plain values as text: `a 1, b 2`."""
  if isinstance(value, Mapping):
    return ', '.join(f'{k} {_words(v)}' for k, v in value.items())
  if isinstance(value, list | tuple):
    return ', '.join(map(_words, value))
  return str(value)


def wilson(successes: int, trials: int) -> Estimate:
  """Share of successes with its Wilson score interval (95%)."""
  if not trials:
    return Estimate(math.nan, math.nan, math.nan)
  share = successes / trials
  spread = _Z * math.sqrt(
    share * (1 - share) / trials + _Z**2 / (4 * trials**2)
  )
  middle = share + _Z**2 / (2 * trials)
  scale = 1 + _Z**2 / trials
  low, high = (middle - spread) / scale, (middle + spread) / scale
  return Estimate(share, max(0.0, low), min(1.0, high))


def normal(values: Sequence[float]) -> Estimate:
  """Mean with a normal interval (95%); no interval below two values."""
  if not values:
    return Estimate(math.nan, math.nan, math.nan)
  mean = float(np.mean(values))
  if len(values) < 2:
    return Estimate(mean, math.nan, math.nan)
  half = _Z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
  return Estimate(mean, mean - half, mean + half)


def columns(rows: Mapping[str, Summary]) -> dict[str, Summary]:
  """Rows to put below `rows` in the table: a set of task types each.

  Publications have them as columns, which beside our own would be too many.
  With several policies, each set has a row of each.
  """
  names = dict.fromkeys(name for row in rows.values() for name in row.by_set)
  return {
    f'  {name}' + (f', {policy}' if len(rows) > 1 else ''): row.by_set[name]
    for name in names
    for policy, row in rows.items()
    if name in row.by_set
  }


def closing(found: Results, sets: Mapping[str, Sequence[str]]) -> str:
  """The closing table of a split; below, what the last policy did by type."""
  policy, last = list(found.rows.items())[-1]
  # A set of one type is that type again.
  single = {types[0] for types in sets.values() if len(types) == 1}
  kinds = {f'  {k}': s for k, s in last.by_type.items() if k not in single}
  rows = found.rows | columns({policy: last}) | kinds
  return f'{found.split} split\n{table(rows)}\n'


def markdown(found: Sequence[Results], shape: Layout) -> str:
  """The table of publications, a row a policy and split."""
  head = ['policy', 'split', *shape.columns, shape.whole]
  lines = [[*head, 'turns', 'turns (successes)', 'tokens a response']]
  for one in found:
    for policy, cells in one.cells.items():
      means = [getattr(cells[shape.whole], name) for name in _MEANS]
      lines.append(
        [
          policy,
          _label(one.split, shape),
          *(_brief(cell, shape) for cell in cells.values()),
          *(_number(estimate.mean) for estimate in means),
        ]
      )
  rows, widths = _aligned(lines)
  text = [f'| {" | ".join(row)} |' for row in rows]
  text.insert(1, f'|{"|".join("-" * (w + 2) for w in widths)}|')
  said = 'success in %' + (' / mean score' if shape.score else '')
  return '\n'.join(
    [f'In a cell: {said} (episodes). {shape.whole}: all that were played.', '']
    + text
  )


def table(rows: Mapping[str, Summary]) -> str:
  """The closing table as text, a row a policy."""
  lines = [
    [
      'policy',
      'episodes',
      'success %',
      'mean score',
      'turns',
      'turns (successes)',
      'tokens a response',
    ]
  ]
  for name, row in rows.items():
    lines.append(
      [
        name,
        _count(row),
        _cell(_percent(row.success)),
        _cell(row.score),
        _cell(row.turns, 2),
        _cell(row.turns_success, 2),
        _cell(row.response_tokens),
      ]
    )
  aligned, widths = _aligned(lines)
  text = ['  '.join(line) for line in aligned]
  text.insert(1, '  '.join('-' * w for w in widths))
  return '\n'.join(line.rstrip() for line in text)


def _aligned(
  lines: Sequence[Sequence[str]],
) -> tuple[list[list[str]], list[int]]:
  """The cells filled up with blanks, and the width of each column."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return [
    [cell.ljust(w) for cell, w in zip(line, widths, strict=True)]
    for line in lines
  ], widths


def _count(row: Summary) -> str:
  return str(row.episodes) + (f' + {row.faults} lost' if row.faults else '')


def _brief(cell: Summary, shape: Layout) -> str:
  """A cell of publications, such as `66.7 (3)`; `-` without episodes."""
  if not (cell.episodes or cell.faults):
    return '-'
  score = f' / {_number(cell.score.mean)}' if shape.score else ''
  return f'{_number(100 * cell.success.mean)}{score} ({_count(cell)})'


def _number(value: float) -> str:
  return '-' if math.isnan(value) else f'{value:.1f}'


def _percent(share: Estimate) -> Estimate:
  return Estimate(100 * share.mean, 100 * share.low, 100 * share.high)


def _cell(estimate: Estimate, digits: int = 1) -> str:
  if math.isnan(estimate.mean):
    return '-'
  text = f'{estimate.mean:.{digits}f}'
  if math.isnan(estimate.low):
    return text
  return f'{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]'


def _finite(value: float) -> float | None:
  return value if math.isfinite(value) else None
