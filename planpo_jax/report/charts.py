"""Draws curves and intervals as SVG, without a library.

Colours, dashes and marker shapes come from the page's style sheet by class:
`s0`, `s1`, ... for the first run, the second, and so on, until colours are used
up; `r0`, `r1`, ... tells the run itself.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

# Number of colours in the style sheet; further runs reuse them, dashed.
COLOURS = 8
# Number of dashes in the style sheet, an unbroken line among them.
DASHES = 4
# Longest label of an interval, in characters.
_MAX_LABEL = 26
# Most runs whose single steps are drawn behind the smoothed curve.
_MAX_RAW = 4
# Most points drawn of one curve; more are averaged in buckets.
MAX_POINTS = 500

_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 26


@dataclasses.dataclass(frozen=True)
class Curve:
  """One line of a chart.

  Attributes:
    run: position of the run, which picks colour and marker.
    name: what the legend and the readout call it.
    points: (step, value) in order of steps.
    markers: draw the points only (evaluations), not a line.
    band: (lowest, highest) of each point, where it is a mean of several; ()
      without.
  """

  run: int
  name: str
  points: Sequence[tuple[float, float]]
  markers: bool = False
  band: Sequence[tuple[float, float]] = ()

  @property
  def limits(self) -> list[list[tuple[float, float]]]:
    """The lower and the upper edge of the band as curves; [] without."""
    return [
      [(step, v) for (step, _), v in zip(self.points, edge, strict=True)]
      for edge in zip(*self.band, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Chart:
  """A figure with its data, for drawing and for the page's readout.

  Attributes:
    title: heading.
    caption: what is shown, in one sentence; may be ''.
    curves: at least one, each with at least one point.
    unit: `share` (0..1, shown in percent), `seconds` or ''.
    from_zero: the vertical axis includes 0.
    axis: what the points are ordered by, `step` or `turn`.
  """

  title: str
  caption: str
  curves: Sequence[Curve]
  unit: str = ''
  from_zero: bool = True
  axis: str = 'step'


def style(run: int) -> str:
  """Classes that give a run its colour and dashes, and tell which it is."""
  cycle = run // COLOURS % DASHES
  return f's{run % COLOURS} r{run}' + (f' dash{cycle}' if cycle else '')


def thin(
  points: Sequence[tuple[float, float]], count: int = MAX_POINTS
) -> list[tuple[float, float]]:
  """At most `count` points, each the mean of neighbours."""
  if len(points) <= count:
    return list(points)
  buckets = []
  for i in range(count):
    bucket = points[i * len(points) // count : (i + 1) * len(points) // count]
    buckets.append(
      (
        bucket[len(bucket) // 2][0],
        sum(value for _, value in bucket) / len(bucket),
      )
    )
  return buckets


def smooth(
  points: Sequence[tuple[float, float]], window: int
) -> list[tuple[float, float]]:
  """Mean over `window` neighbours of each point, fewer at the ends."""
  half = window // 2
  smoothed = []
  for i, (step, _) in enumerate(points):
    # The same reach on both sides, so that the ends do not lean inwards.
    reach = min(half, i, len(points) - 1 - i)
    near = points[i - reach : i + reach + 1]
    smoothed.append((step, sum(value for _, value in near) / len(near)))
  return smoothed


def smoothing_window(points: Sequence[tuple[float, float]]) -> int:
  """Points a smoothed curve averages; 1 (none) for short curves."""
  return 1 if len(points) < 30 else 2 * (len(points) // 24) + 1


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """About `count` round numbers that span `low` to `high`, both covered."""
  # Also where only rounding errors, as of a mean of equal values, differ.
  if high - low <= 1e-9 * max(abs(low), abs(high)):
    margin = abs(low) * 0.1 or 1.0
    low, high = low - margin, high + margin
  rough = (high - low) / count
  power = 10.0 ** math.floor(math.log10(rough))
  # A little slack, so that rounding errors add no step and no mark.
  step = next(
    power * factor
    for factor in (1, 2, 2.5, 5, 10)
    if power * factor >= rough * (1 - 1e-9)
  )
  first = math.floor(low / step + 1e-9)
  last = math.ceil(high / step - 1e-9)
  return [step * i for i in range(first, last + 1)]


def format_number(value: float, unit: str = '') -> str:
  """Short text of a value: `42%`, `1.5 s`, `0.0031`, `12,000`."""
  if unit == 'share':
    return f'{format_number(100 * value)}%'
  if unit == 'seconds':
    return f'{format_number(value)} s'
  if value == 0:
    return '0'
  size = abs(value)
  if size >= 1e7 or size < 1e-4:
    return f'{value:.2g}'.replace('-', '−')
  if size >= 1000:
    return f'{value:,.0f}'.replace('-', '−')
  return f'{float(f"{value:.3g}"):g}'.replace('-', '−')


def domain(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
  """(first, last) of the steps and (lowest, highest) of the vertical axis."""
  steps = [step for curve in chart.curves for step, _ in curve.points]
  values = [value for curve in chart.curves for _, value in curve.points]
  values += [v for curve in chart.curves for edge in curve.band for v in edge]
  low, high = min(values), max(values)
  if chart.from_zero:
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
      high = 1.0
  marks = ticks(low, high)
  first, last = min(steps), max(steps)
  if first == last:
    first, last = first - 1, last + 1
  return (first, last), (marks[0], marks[-1])


def draw(chart: Chart) -> str:
  """The chart as an SVG element."""
  (first, last), (low, high) = domain(chart)

  def x(step: float) -> float:
    return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

  def y(value: float) -> float:
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

  parts = []
  for mark in ticks(low, high):
    parts.append(
      f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}"'
      f' y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
      f'<text class="tick" text-anchor="end" x="{_LEFT - 7}"'
      f' y="{y(mark) + 4:.1f}">{format_number(mark, chart.unit)}</text>'
    )
  for mark in ticks(first, last, 5):
    if first <= mark <= last and mark == round(mark):
      parts.append(
        f'<text class="tick" text-anchor="middle" x="{x(mark):.1f}"'
        f' y="{_HEIGHT - 7}">{format_number(mark)}</text>'
      )
  many = len({curve.run for curve in chart.curves}) > _MAX_RAW

  def path(line: Sequence[tuple[float, float]]) -> str:
    return ' '.join(f'{x(step):.1f},{y(value):.1f}' for step, value in line)

  # Below all lines, which would be hard to see behind the band of another.
  for curve in chart.curves:
    look, limits = style(curve.run), [thin(edge) for edge in curve.limits]
    if curve.markers or len(curve.points) == 1:
      parts += [
        f'<line class="reach {look}" x1="{x(step):.1f}" x2="{x(step):.1f}"'
        f' y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
        for (step, low), (_, high) in zip(*limits, strict=True)
      ]
    elif limits:
      window = smoothing_window(limits[0])
      lower, upper = (smooth(edge, window) for edge in limits)
      parts.append(
        f'<polygon class="band {look}" points="{path(lower + upper[::-1])}"/>'
      )
  for curve in chart.curves:
    points, look = thin(curve.points), style(curve.run)
    if curve.markers:
      parts += [marker(curve.run, x(step), y(value)) for step, value in points]
      continue
    window = smoothing_window(points)
    lines = [('', smooth(points, window))]
    if window > 1 and not many and not curve.band:
      lines.insert(0, (' raw', points))
    for weight, line in lines:
      if len(line) == 1:
        parts.append(
          f'<circle class="dot {look}" r="3" cx="{x(line[0][0]):.1f}"'
          f' cy="{y(line[0][1]):.1f}"/>'
        )
      else:
        parts.append(
          f'<polyline class="curve {look}{weight}" points="{path(line)}"/>'
        )
  label = html.escape(describe(chart))
  return (
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
    f'{"".join(parts)}'
    f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    '</svg>'
  )


def plot_area() -> dict[str, float]:
  """Where the data lies within the drawing, for the page's script."""
  return {
    'width': _WIDTH,
    'height': _HEIGHT,
    'left': _LEFT,
    'right': _WIDTH - _RIGHT,
    'top': _TOP,
    'bottom': _HEIGHT - _BOTTOM,
  }


def describe(chart: Chart) -> str:
  """The chart in words, for people who do not see it."""
  parts = []
  for curve in chart.curves:
    told = []
    # The first and the last point, once if they are the same.
    for i in range(0, len(curve.points), max(1, len(curve.points) - 1)):
      step, value = curve.points[i]
      reach = ''
      if curve.band:
        low, high = (format_number(v, chart.unit) for v in curve.band[i])
        reach = f' ({low} to {high})'
      told.append(
        f'{format_number(value, chart.unit)}{reach} at {chart.axis} {step:g}'
      )
    parts.append(f'{curve.name}: {", ".join(told)}')
  return f'{chart.title}. ' + '; '.join(parts) + '.'


def marker(run: int, x: float, y: float, size: float = 4.5) -> str:
  """A mark whose shape and colour tell the run."""
  # A run that shares its colour with another has another shape.
  shape = (run + run // COLOURS) % 4
  if shape == 0:
    return (
      f'<circle class="mark {style(run)}" cx="{x:.1f}" cy="{y:.1f}"'
      f' r="{size}"/>'
    )
  corners = {
    1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    2: ((0, -1.3), (1.2, 1), (-1.2, 1)),
    3: ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
  }[shape]
  points = ' '.join(
    f'{x + size * dx:.1f},{y + size * dy:.1f}' for dx, dy in corners
  )
  return f'<polygon class="mark {style(run)}" points="{points}"/>'


def swatch(run: int) -> str:
  """Line and mark of a run, for the legend."""
  return (
    '<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true">'
    f'<polyline class="curve {style(run)}" points="1,7 33,7"/>'
    f'{marker(run, 17, 7)}</svg>'
  )


@dataclasses.dataclass(frozen=True)
class Interval:
  """One line of a drawing of intervals.

  Attributes:
    run: position of the run, which picks the colour.
    label: what stands before the line.
    value: the mean.
    low: lower limit; None without an interval.
    high: upper limit.
    hollow: an open mark (before training) instead of a filled one.
    dots: values that `value` is the mean of, drawn small.
  """

  run: int
  label: str
  value: float
  low: float | None
  high: float | None
  hollow: bool
  dots: Sequence[float] = ()


def draw_intervals(title: str, intervals: Sequence[Interval], unit: str) -> str:
  """Means with their intervals, one below the other, as an SVG element."""
  values = [
    value
    for entry in intervals
    for value in (entry.value, entry.low, entry.high)
    if value is not None
  ]
  low, high = min(values), max(values)
  if unit == 'share':
    low, high = min(low, 0.0), max(high, 0.0) or 1.0
  marks = ticks(low, high)
  low, high = marks[0], marks[-1]
  longest = max(len(entry.label) for entry in intervals)
  left, row = 7 * max(min(longest, _MAX_LABEL), 14) + 20, 26
  height = len(intervals) * row + 34
  bottom = height - 26

  def x(value: float) -> float:
    return left + (value - low) / (high - low) * (_WIDTH - left - 22)

  parts = []
  for mark in marks:
    parts.append(
      f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="4"'
      f' y2="{bottom}"/><text class="tick" text-anchor="middle"'
      f' x="{x(mark):.1f}" y="{height - 8}">'
      f'{format_number(mark, unit)}</text>'
    )
  words = []
  for i, entry in enumerate(intervals):
    y = 4 + row * (i + 0.5)
    colour = style(entry.run)
    label = entry.label
    if len(label) > _MAX_LABEL:
      # The end tells before from after, and one seed from another.
      label = label[: _MAX_LABEL - 14] + '…' + label[-13:]
    parts.append(
      f'<text class="label" text-anchor="end" x="{left - 12}" y="{y + 4:.1f}">'
      f'{html.escape(label)}</text>'
    )
    if entry.low is not None and entry.high is not None:
      parts.append(
        f'<line class="whisker {colour}" x1="{x(entry.low):.1f}"'
        f' x2="{x(entry.high):.1f}" y1="{y}" y2="{y}"/>'
      )
    # Below the bar, where the mark of the mean hides none.
    parts += [
      f'<circle class="dot {colour}" cx="{x(dot):.1f}" cy="{y + 8}" r="2.2"/>'
      for dot in entry.dots
    ]
    mark_class = 'hollow' if entry.hollow else 'mark'
    parts.append(
      f'<circle class="{mark_class} {colour}" cx="{x(entry.value):.1f}"'
      f' cy="{y}" r="5"/>'
    )
    words.append(f'{entry.label} {format_number(entry.value, unit)}')
  label = html.escape(f'{title}: {"; ".join(words)}.')
  return (
    f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
    f'{"".join(parts)}</svg>'
  )
