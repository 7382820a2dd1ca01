"""Success, score, turns and tokens of a policy, with their uncertainty."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planpo_jax import episodes, rollout, tasks

# First number of the random seed after the run's own: rollouts and evaluations
# never share one, and every evaluation draws with the same.
TRAIN_SEED, SEED = 0, 1

# Two-sided 95% quantile of the standard normal distribution.
_Z = 1.959964


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


MEASURES = ('success', 'score', 'turns', 'turns_success', 'response_tokens')


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
  return Estimate(share, (middle - spread) / scale, (middle + spread) / scale)


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


def table(rows: Mapping[str, Summary]) -> str:
  """The closing table as text, a row a policy."""
  head = (
    'policy',
    'episodes',
    'success %',
    'mean score',
    'turns',
    'turns (successes)',
    'tokens a response',
  )
  lines = [head]
  for name, row in rows.items():
    lines.append(
      (
        name,
        str(row.episodes) + (f' + {row.faults} lost' if row.faults else ''),
        _cell(_percent(row.success)),
        _cell(row.score),
        _cell(row.turns, 2),
        _cell(row.turns_success, 2),
        _cell(row.response_tokens),
      )
    )
  widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
  text = [
    '  '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
    for line in lines
  ]
  text.insert(1, '  '.join('-' * w for w in widths))
  return '\n'.join(line.rstrip() for line in text)


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
