"""Runs of one method with several seeds: their means and how far they differ.

Means and standard deviations only. Whether two methods differ by more than
chance is not judged.
"""

from __future__ import annotations

import dataclasses
import html
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planpo_jax.report import runs as runs_lib
from planpo_jax.report import verdict

# Evaluations of a run that are averaged.
ROWS = ('before', 'after')

_EXPLAINED = 'mean ± standard deviation (n − 1) over seeds'


@dataclasses.dataclass(frozen=True)
class Method:
  """The runs that differ in their seed alone.

  Attributes:
    name: of the method in its sweep; that of its run if there is only one.
    runs: at least one, a seed each.
  """

  name: str
  runs: tuple[runs_lib.Run, ...]

  @property
  def counted(self) -> tuple[runs_lib.Run, ...]:
    """Those in its means: the finished ones, or all while none is finished."""
    return tuple(run for run in self.runs if run.is_finished) or self.runs

  @property
  def left_out(self) -> tuple[runs_lib.Run, ...]:
    return tuple(run for run in self.runs if run not in self.counted)

  @property
  def only_episodes(self) -> bool:
    return all(run.only_episodes for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Statistic:
  """A measure over the seeds of a method.

  Attributes:
    values: one a seed, in their order; None where it was not measured.
    mean: of the values that were.
    std: their standard deviation with n - 1; None below two of them.
    low: the lowest.
    high: the highest.
  """

  values: tuple[float | None, ...]
  mean: float
  std: float | None
  low: float
  high: float


def methods(runs: Sequence[runs_lib.Run]) -> list[Method]:
  """The runs of a page by method, in the order of the first run of each."""
  found: dict[str, list[runs_lib.Run]] = {}
  for run in runs:
    found.setdefault(run.method, []).append(run)
  return [
    Method(name if len(same) > 1 else same[0].name, tuple(same))
    for name, same in found.items()
  ]


def have_several(found: Sequence[Method]) -> bool:
  """Whether there is anything to average."""
  return any(
    len(method.runs) > 1 for method in found if not method.only_episodes
  )


def seed(run: runs_lib.Run) -> str:
  """The seed of a run, for people; `?` where its configuration is lost."""
  value = runs_lib.number(run.config.get('seed'))
  return '?' if value is None else f'{value:.0f}'


def statistic(values: Sequence[float | None]) -> Statistic | None:
  """Over the values that are not None; None if all are."""
  known = [value for value in values if value is not None]
  if not known:
    return None
  return Statistic(
    values=tuple(values),
    mean=statistics.fmean(known),
    std=statistics.stdev(known) if len(known) > 1 else None,
    low=min(known),
    high=max(known),
  )


def evaluated(
  method: Method, row: str, measure: verdict.Measure, task_type: str = ''
) -> Statistic | None:
  """A measure of one of `ROWS`, of one type of tasks or of all for ''."""
  return statistic(_values(method, row, measure, task_type))


def change(method: Method, measure: verdict.Measure) -> Statistic | None:
  """After less before, seed by seed."""
  ends = zip(
    *(_values(method, row, measure) for row in ROWS),
    strict=True,
  )
  return statistic(
    [
      None if before is None or after is None else after - before
      for before, after in ends
    ]
  )


def _values(
  method: Method, row: str, measure: verdict.Measure, task_type: str = ''
) -> list[float | None]:
  values = []
  for run in method.counted:
    entry = run.rows.get(row, {})
    if task_type:
      entry = types(run, row).get(task_type, {})
    found = verdict.estimate(entry, measure.key)
    values.append(found.value if found else None)
  return values


def types(run: runs_lib.Run, row: str) -> dict[str, Mapping[str, Any]]:
  """What one evaluation of a run says of each type of tasks."""
  by_type = run.rows.get(row, {}).get('by_type')
  return {
    runs_lib.clean(name): entry
    for name, entry in (by_type if isinstance(by_type, dict) else {}).items()
    if isinstance(entry, dict)
  }


def curve(
  method: Method, kind: str, key: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
  """The mean of a logged metric, and its lowest and highest seed, by step.

  A step counts the seeds that logged a value there. While no seed is finished,
  steps that some have not reached are left out.

  Returns:
    (step, mean), and (lowest, highest) of each; the latter is empty for a
    method of a single run. Both are empty for a metric that is not logged.
  """
  points, band = average(
    [run.metrics.get((kind, key), ()) for run in method.counted]
  )
  if len(method.runs) == 1:
    return points, []
  if not any(run.is_finished for run in method.counted):
    reached = min(run.last_step or 0 for run in method.counted)
    kept = sum(step <= reached for step, _ in points)
    points, band = points[:kept], band[:kept]
  return points, band


def average(
  curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
  """(x, mean) and (lowest, highest) of the values that they have at each x."""
  found: dict[float, list[float]] = {}
  for points in curves:
    for x, value in points:
      found.setdefault(x, []).append(value)
  ordered = sorted(found.items())
  return (
    [(x, statistics.fmean(values)) for x, values in ordered],
    [(min(values), max(values)) for _, values in ordered],
  )


def format_mean(
  entry: Statistic | None, measure: verdict.Measure, *, signed: bool = False
) -> str:
  """E.g. `42.3 ± 5.1%`, `−1.9 ± 0.2`, `8.0 (1 of 3 seeds)`.

  Args:
    entry: what to show; `–` for None.
    measure: what it is of.
    signed: it is a difference.
  """
  if entry is None:
    return '–'
  scale = 100 if measure.share else 1
  shown = verdict.signed(scale * entry.mean, 1) if signed else None
  shown = shown or f'{scale * entry.mean:.1f}'
  if entry.std is not None:
    shown += f' ± {scale * entry.std:.1f}'
  if measure.share:
    shown += ' points' if signed else '%'
  known = sum(value is not None for value in entry.values)
  if known < len(entry.values):
    shown += f' ({known} of {len(entry.values)} seeds)'
  return shown


def format_values(
  entry: Statistic | None, measure: verdict.Measure, *, signed: bool = False
) -> str:
  """Each seed's own, e.g. `41.0, –, 44.2`; '' for a single one."""
  if entry is None or len(entry.values) < 2:
    return ''
  scale = 100 if measure.share else 1
  return ', '.join(
    '–'
    if value is None
    else verdict.signed(scale * value, 1)
    if signed
    else f'{scale * value:.1f}'
    for value in entry.values
  )


def episodes(method: Method) -> str:
  """Episodes of an evaluation, e.g. `120`, `118 to 120`; `–` without any."""
  counts = [
    count
    for run in method.counted
    for row in ROWS
    if (count := runs_lib.number(run.rows.get(row, {}).get('episodes')))
    is not None
  ]
  if not counts:
    return '–'
  low, high = min(counts), max(counts)
  return f'{low:,.0f}' if low == high else f'{low:,.0f} to {high:,.0f}'


def notes(found: Sequence[Method]) -> list[str]:
  """What to know before methods are compared by their means."""
  said = []
  left_out = [run.name for method in found for run in method.left_out]
  if left_out:
    said.append(
      f'{", ".join(left_out)}: not finished, and not in the means over seeds.'
    )
  counts = {method.name: len(method.counted) for method in found}
  if len(set(counts.values())) > 1:
    shown = ', '.join(f'{name} {count}' for name, count in counts.items())
    said.append(f'Methods differ in the number of seeds: {shown}.')
  begun = [
    method.name
    for method in found
    if len(method.runs) > 1 and not any(r.is_finished for r in method.runs)
  ]
  if begun:
    said.append(
      f'{", ".join(begun)}: no seed is finished; the curves end where the'
      ' slowest is.'
    )
  splits: dict[str, list[str]] = {}
  for method in found:
    for run in method.counted:
      if run.rows:
        splits.setdefault(run.split or 'unnamed', []).append(run.name)
  if len(splits) > 1:
    shown = '; '.join(f'{k}: {", ".join(v)}' for k, v in splits.items())
    said.append(
      f'Evaluated on different splits, and not to be compared: {shown}.'
    )
  return said


def judge(found: Sequence[Method]) -> verdict.Verdict:
  """What the page opens with: the means of each method, and no ranking."""
  counts = sorted(len(method.counted) for method in found)
  if len(found) == 1:
    headline = f'{found[0].name} over {verdict.count(counts[0], "seed")}'
  elif counts[0] == counts[-1]:
    seeds = verdict.count(counts[0], 'seed')
    headline = f'{len(found)} methods, {seeds} each'
  else:
    headline = f'{len(found)} methods, {counts[0]} to {counts[-1]} seeds'
  sentences = [_in_words(method) for method in found]
  details = [
    verdict.in_words(run, named=True) for method in found for run in method.runs
  ]
  caution = (
    f'Before → after training, {_EXPLAINED}. Whether methods differ by more'
    ' than chance is not judged.'
  )
  if len(found) >= verdict.MANY:
    return verdict.Verdict(headline, (caution,), (*sentences, *details))
  return verdict.Verdict(headline, (*sentences, caution), tuple(details))


def _in_words(method: Method) -> str:
  opening = f'{method.name}, {verdict.count(len(method.counted), "seed")}: '
  parts = [
    f'{measure.title.lower()} {_ends(method, measure)}'
    for measure in verdict.MEASURES
    if any(evaluated(method, row, measure) for row in ROWS)
  ]
  return opening + ('; '.join(parts) or 'nothing was evaluated yet') + '.'


def _ends(method: Method, measure: verdict.Measure) -> str:
  return ' → '.join(
    format_mean(evaluated(method, row, measure), measure) for row in ROWS
  )


def as_markdown(found: Sequence[Method]) -> str:
  """Two tables for a README: the means, then each run."""
  splits = dict.fromkeys(
    run.split for method in found for run in method.counted if run.split
  )
  on = f' on the {", ".join(splits)} split' if splits else ''
  titles = [measure.title for measure in verdict.MEASURES]
  means = [
    [
      method.name,
      str(len(method.counted)),
      episodes(method),
      *(_ends(method, measure) for measure in verdict.MEASURES),
    ]
    for method in found
  ]
  single = [
    [
      run.name,
      seed(run),
      *(_ends(Method(run.name, (run,)), m) for m in verdict.MEASURES),
    ]
    for method in found
    for run in method.runs
  ]
  return '\n'.join(
    [
      f'Before → after training{on}, {_EXPLAINED}.',
      *map(html.escape, notes(found)),
      '',
      *_table(['Method', 'Seeds', 'Episodes', *titles], means),
      '',
      'Each run:',
      '',
      *_table(['Run', 'Seed', *titles], single),
      '',
    ]
  )


def _table(
  titles: Sequence[str], lines: Sequence[Sequence[str]]
) -> Iterator[str]:
  rule = ['---', *['---:'] * (len(titles) - 1)]
  for line in (titles, rule, *lines):
    # A name is that of a folder, which may hold what ends a cell.
    cells = (
      html.escape(' '.join(cell.split())).replace('|', '\\|') for cell in line
    )
    yield f'| {" | ".join(cells)} |'


def as_json(found: Sequence[Method]) -> str:
  """The same as plain numbers, shares as 0..1; success by task type besides."""
  content = []
  for method in found:
    rows: dict[str, Any] = {
      row: {m.key: _plain(evaluated(method, row, m)) for m in verdict.MEASURES}
      for row in ROWS
    }
    rows['change'] = {
      m.key: _plain(change(method, m)) for m in verdict.MEASURES
    }
    success, *_ = verdict.MEASURES
    for row in ROWS:
      names = {n for run in method.counted for n in types(run, row)}
      rows[row]['success_by_type'] = {
        name: _plain(evaluated(method, row, success, name))
        for name in sorted(names)
      }
    content.append(
      {
        'method': method.name,
        'runs': [run.name for run in method.counted],
        'seeds': [run.config.get('seed') for run in method.counted],
        'splits': [run.split for run in method.counted],
        'left_out': [run.name for run in method.left_out],
        **rows,
      }
    )
  return json.dumps({'methods': content}, indent=1) + '\n'


def _plain(entry: Statistic | None) -> dict[str, Any] | None:
  return entry and {
    'mean': entry.mean,
    'std': entry.std,
    'values': list(entry.values),
  }
