"""Compares evaluations and says in plain words what came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planpo_jax.report import runs as runs_lib

# From so many runs on a page gives an overview before each run's sentences.
MANY = 5


@dataclasses.dataclass(frozen=True)
class Measure:
  """A column of the closing table.

  Attributes:
    key: name in a row of `summary.json`; its interval is `<key>_ci`.
    title: what people read.
    share: the value is a share (0..1), shown as a percentage.
    fewer: word for a drop that is good, e.g. `fewer`; '' when more is better.
  """

  key: str
  title: str
  share: bool = False
  fewer: str = ''


MEASURES = (
  Measure('success', 'Success', share=True),
  Measure('score', 'Score'),
  Measure('turns', 'Turns', fewer='fewer'),
  Measure('turns_success', 'Turns when successful', fewer='fewer'),
  Measure('response_tokens', 'Tokens a response', fewer='shorter'),
)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A value with its 95% interval; `low` and `high` are None without one."""

  value: float
  low: float | None = None
  high: float | None = None

  @property
  def has_interval(self) -> bool:
    return self.low is not None and self.high is not None


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the page opens with.

  Attributes:
    headline: one short sentence.
    paragraphs: what follows it; for a single run one paragraph.
    details: sentences about each run, where `paragraphs` is an overview.
  """

  headline: str
  paragraphs: tuple[str, ...]
  details: tuple[str, ...] = ()


def estimate(row: Mapping[str, Any] | None, key: str) -> Estimate | None:
  """The value and interval of a row; None where it was not measured."""
  value = runs_lib.number(row.get(key)) if row else None
  if value is None:
    return None
  interval = row.get(f'{key}_ci')
  if not isinstance(interval, list) or len(interval) != 2:
    return Estimate(value)
  low, high = map(runs_lib.number, interval)
  if low is None or high is None:
    return Estimate(value)
  return Estimate(value, low, high)


def difference(
  before: Estimate | None, after: Estimate | None
) -> Estimate | None:
  """`after - before` with the 95% interval that follows from both intervals.

  Square-and-add of the distances to the limits (MOVER: Zou and Donner 2008;
  for shares with Wilson intervals it is method 10 of Newcombe 1998). It takes
  the two samples as independent, which is cautious when both played the same
  tasks.

  Args:
    before: the reference.
    after: what is compared with it.

  Returns:
    The difference, without an interval where one of the two has none; None
    where one of the two is missing.
  """
  if before is None or after is None:
    return None
  change = after.value - before.value
  if not before.has_interval or not after.has_interval:
    return Estimate(change)
  return Estimate(
    change,
    change - math.hypot(after.value - after.low, before.high - before.value),
    change + math.hypot(after.high - after.value, before.value - before.low),
  )


def direction(change: Estimate | None) -> int:
  """1 or -1 when the interval lies wholly on that side of 0; 0 otherwise."""
  if change is None or not change.has_interval:
    return 0
  return (change.low > 0) - (change.high < 0)


def format_value(value: float, measure: Measure) -> str:
  """E.g. `42%`, `8.1`."""
  return f'{100 * value:.0f}%' if measure.share else f'{value:.1f}'


def format_interval(entry: Estimate, measure: Measure) -> str:
  """E.g. `33–51`; '' without an interval."""
  if not entry.has_interval:
    return ''
  scale, digits = (100, 0) if measure.share else (1, 1)
  return f'{scale * entry.low:.{digits}f} to {scale * entry.high:.{digits}f}'


def format_change(change: Estimate, measure: Measure) -> str:
  """E.g. `+19 points`, `−1.9`."""
  scale, digits = (100, 0) if measure.share else (1, 1)
  return signed(scale * change.value, digits) + (
    ' points' if measure.share else ''
  )


def format_change_interval(change: Estimate, measure: Measure) -> str:
  """E.g. `+6 to +31`; '' without an interval."""
  if not change.has_interval:
    return ''
  scale, digits = (100, 0) if measure.share else (1, 1)
  low, high = (
    signed(scale * limit, digits) for limit in (change.low, change.high)
  )
  return f'{low} to {high}'


def count(number: float, noun: str) -> str:
  """E.g. `1 step`, `12 steps`."""
  return f'{number:,.0f} {noun}{"" if number == 1 else "s"}'


def signed(value: float, digits: int) -> str:
  """E.g. `+1.5`, `−3`; no sign where all digits are 0."""
  shown = f'{value:+.{digits}f}'
  if float(shown) == 0:
    return shown[1:]
  return shown.replace('-', '−')


def _with_interval(
  entry: Estimate,
  measure: Measure,
  value_format: Callable[[Estimate, Measure], str],
  interval_format: Callable[[Estimate, Measure], str],
) -> str:
  interval = interval_format(entry, measure)
  shown = value_format(entry, measure)
  return f'{shown} ({interval})' if interval else shown


def _value(entry: Estimate, measure: Measure) -> str:
  return _with_interval(
    entry,
    measure,
    lambda entry, measure: format_value(entry.value, measure),
    format_interval,
  )


def _change(change: Estimate, measure: Measure) -> str:
  return _with_interval(change, measure, format_change, format_change_interval)


def judge(runs: Sequence[runs_lib.Run]) -> Verdict:
  """The headline and the paragraph for the runs of a page."""
  sentences = []
  for run in runs:
    sentences.append(in_words(run, named=len(runs) > 1))
  for run in runs[1:]:
    sentence = _comparison(runs[0], run)
    if sentence:
      sentences.append(sentence)
  caution = ()
  if any(run.rows for run in runs):
    caution = (
      'Brackets: 95% intervals over evaluation episodes, which do not cover'
      ' how much another seed of the same training would differ.',
    )
  if len(runs) >= MANY:
    return Verdict(
      f'{len(runs)} runs side by side',
      (*_overview(runs), *caution),
      tuple(sentences),
    )
  sentences += caution
  if len(runs) == 1:
    return Verdict(_headline(runs[0]), (' '.join(sentences),))
  return Verdict(
    'Runs side by side: ' + ', '.join(run.name for run in runs),
    tuple(sentences),
  )


def _overview(runs: Sequence[runs_lib.Run]) -> list[str]:
  """Which run ended best, and how all stand to the first."""
  ends = [
    (run, estimate(run.rows.get('after'), 'success'))
    for run in runs
    if not run.only_episodes
  ]
  ended = [(run, success) for run, success in ends if success]
  if not ended:
    return ['None of the runs has a closing evaluation yet.']
  best, success = max(ended, key=lambda end: end[1].value)
  sentence = (
    f'{best.name} succeeded most often after training: in'
    f' {_value(success, MEASURES[0])}.'
  )
  if len(ended) < len(ends):
    sentence = (
      f'{len(ended)} of {len(ends)} runs have a closing evaluation. {sentence}'
    )
  sides: dict[int, list[str]] = {1: [], -1: [], 0: []}
  for run in runs[1:]:
    change = success_against(runs[0], run)
    if change is not None:
      sides[direction(change)].append(run.name)
  groups = [
    f'{words}: {", ".join(sides[side])}'
    for side, words in (
      (1, 'clearly more often successful'),
      (-1, 'clearly less often successful'),
      (0, 'no clear difference'),
    )
    if sides[side]
  ]
  if not groups:
    return [sentence]
  return [sentence, f'Against {runs[0].name}, {"; ".join(groups)}.']


def success_against(
  reference: runs_lib.Run, run: runs_lib.Run
) -> Estimate | None:
  """Success of `run` less that of `reference`, after training.

  None where one was not evaluated, or on another split.
  """
  if reference.split != run.split:
    return None
  rows = reference.rows.get('after'), run.rows.get('after')
  return difference(*(estimate(row, 'success') for row in rows))


def _success_change(run: runs_lib.Run) -> Estimate | None:
  return difference(
    estimate(run.rows.get('before'), 'success'),
    estimate(run.rows.get('after'), 'success'),
  )


def _headline(run: runs_lib.Run) -> str:
  if run.only_episodes:
    return count(_dumped(run), 'episode') + ' of a dump'
  if 'after' not in run.rows:
    if run.last_step is None:
      return 'Training has not begun'
    if run.replays:
      return f'{count(run.last_step, "step")} from a dump, nothing evaluated'
    return f'{count(run.last_step, "step")} so far, no closing evaluation yet'
  change = _success_change(run)
  if change is None:
    return 'Only one of the two evaluations is there'
  if not change.has_interval:
    return 'Success changed by ' + format_change(change, MEASURES[0])
  if direction(change) > 0:
    return 'Training clearly raised success'
  if direction(change) < 0:
    return 'Training clearly lowered success'
  if _clear_savings(run):
    return 'As often successful, with clearly less effort'
  return 'No clear change in success'


def _clear_savings(run: runs_lib.Run) -> list[tuple[Measure, Estimate]]:
  """Measures of effort that clearly fell."""
  savings = []
  for measure in MEASURES:
    change = difference(
      estimate(run.rows.get('before'), measure.key),
      estimate(run.rows.get('after'), measure.key),
    )
    if measure.fewer and direction(change) < 0:
      savings.append((measure, change))
  return savings


def in_words(run: runs_lib.Run, *, named: bool) -> str:
  """What came of a run, one evaluation against the other."""
  if run.only_episodes:
    return (
      f'{run.name} holds {count(_dumped(run), "dumped episode")} in'
      f' {count(len(run.transcripts), "file")}, and no results of training.'
    )
  opening, on = (f'{run.name}: ', 'on') if named else ('', 'On')
  before, after = run.rows.get('before'), run.rows.get('after')
  success = MEASURES[0]
  first, last = estimate(before, 'success'), estimate(after, 'success')
  split = f'{run.split} ' if run.split else ''
  if first is None and last is None:
    sentence = _training_sentence(run)
    return opening + sentence if named else sentence.capitalize()
  if first is None or last is None:
    row, entry, when = (
      (before, first, 'before') if last is None else (after, last, 'after')
    )
    sentence = (
      f'{opening}{on} {_episodes(row)} {split}episodes the policy succeeded in'
      f' {_value(entry, success)} {when} training;'
    )
    other = 'after' if last is None else 'before'
    return f'{sentence} it was not evaluated {other} training.'
  change = difference(first, last)
  judged = {1: ', a clear gain', -1: ', a clear loss'}.get(
    direction(change),
    ', no clear difference' if change.has_interval else '',
  )
  counts = _episodes(before)
  if counts != _episodes(after):
    counts = f'{counts} (before) and {_episodes(after)} (after)'
  sentence = (
    f'{opening}{on} {counts} {split}episodes the policy succeeded in'
    f' {_value(first, success)} before training and {_value(last, success)}'
    f' after: {_change(change, success)}{judged}.'
  )
  details = []
  for measure in MEASURES[1:]:
    ends = estimate(before, measure.key), estimate(after, measure.key)
    change = difference(*ends)
    if change is None:
      continue
    clear = direction(change)
    word = (
      f', clearly {measure.fewer if clear < 0 else "more"}'
      if measure.fewer and clear
      else ', clearly ' + ('higher' if clear > 0 else 'lower')
      if clear
      else ''
    )
    details.append(
      f'{measure.title.lower()} {format_value(ends[0].value, measure)} →'
      f' {format_value(ends[1].value, measure)}{word}'
    )
  if details:
    sentence += ' Means: ' + '; '.join(details) + '.'
  faults = sum(
    int(runs_lib.number(r.get('faults')) or 0) for r in (before, after)
  )
  if faults:
    sentence += f' Lost to faults and not counted: {count(faults, "episode")}.'
  return sentence


def _dumped(run: runs_lib.Run) -> int:
  return sum(file.total for file in run.transcripts)


def _training_sentence(run: runs_lib.Run) -> str:
  points = run.metrics.get(('train', 'rollout/success'), ())
  if not points:
    return 'nothing has been measured yet.'
  recent = [value for _, value in points[-5:]]
  opening = 'no evaluation' if run.replays else 'no evaluation yet'
  return (
    f'{opening}; over the last {count(len(recent), "training step")}'
    f' {100 * sum(recent) / len(recent):.0f}% of the episodes succeeded.'
  )


def _comparison(reference: runs_lib.Run, run: runs_lib.Run) -> str:
  """How `run` stands to `reference` after training; '' where unknown."""
  rows = reference.rows.get('after'), run.rows.get('after')
  change = difference(*(estimate(row, 'success') for row in rows))
  if change is None:
    return ''
  if reference.split != run.split:
    return (
      f'{run.name} and {reference.name} were evaluated on different splits'
      f' ({run.split or "unnamed"}, {reference.split or "unnamed"}) and'
      ' cannot be compared.'
    )
  judged = {1: ', clearly more often', -1: ', clearly less often'}.get(
    direction(change),
    ', no clear difference' if change.has_interval else '',
  )
  return (
    f'After training, {run.name} against {reference.name}: success'
    f' {_change(change, MEASURES[0])}{judged}.'
  )


def _episodes(row: Mapping[str, Any]) -> str:
  count = runs_lib.number(row.get('episodes'))
  return 'an unknown number of' if count is None else f'{count:.0f}'
