"""Puts the page together.

Everything that a policy or an environment said is data: it travels as JSON in
a script element that is not executed, and the page's script shows it as plain
text. The page's content security policy names the hashes of its one style
sheet and its one script, so the browser runs and loads nothing else.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import os
import pathlib
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planpo_jax.report import charts, seeds, verdict
from planpo_jax.report import runs as runs_lib

TITLE = 'planpo_jax training report'

# Most episodes shown of one file of transcripts.
EPISODES_PER_FILE = 40
# Most bytes of transcripts in a page, over all runs.
TRANSCRIPT_BYTES = 7_000_000
# What of the run the chart by turn shows: this share of its steps, the last.
_LAST_STEPS = 0.25
_STD_TURN = re.compile(r'advantage/std_turn_(\d+)')
# Above this share of groups without a signal, the page says what it means.
_FEW_SIGNALS = 0.5

_HERE = pathlib.Path(__file__).parent
_SUCCESS, *_OTHER_MEASURES = verdict.MEASURES

# (key of metrics.jsonl, title, unit, caption)
_CURVES = (
  (
    'rollout/success',
    'Success',
    'share',
    'Share of episodes that reached the goal.',
  ),
  ('rollout/turns', 'Turns', '', 'Mean turns an episode.'),
  (
    'rollout/turns_success',
    'Turns when successful',
    '',
    'Mean turns of the episodes that reached the goal.',
  ),
  ('rollout/response_tokens', 'Tokens a response', '', 'Mean, end included.'),
  (
    'advantage/groups_without_outcome_variance',
    'Groups without a GRPO signal',
    'share',
    'All episodes of the group ended alike, so their outcomes teach nothing.',
  ),
  (
    'advantage/signal_without_outcome_variance',
    'Signal in such groups',
    'share',
    'Of the groups that ended alike, those in which this method still tells'
    ' episodes apart.',
  ),
  (
    'advantage/mean_abs',
    'Size of the advantages',
    '',
    'Mean absolute value over response tokens.',
  ),
  (
    'advantage/successes_with_negative_advantage',
    'Successes that are discouraged',
    'share',
    'Share of successes whose turns have a negative mean advantage.',
  ),
  (
    'advantage/successes_with_negative_efficiency',
    'Successes slower than their group',
    'share',
    "Share of successes whose A^E, PlanPO's advantage for turns, is negative.",
  ),
  (
    'loss/kl_ref',
    'KL to the initial policy',
    '',
    'Mean k3 estimate a response token, in nats.',
  ),
  (
    'loss/clip_frac',
    'Clip fraction',
    'share',
    'Share of response tokens whose ratio was clipped.',
  ),
  (
    'loss/ratio_max',
    'Largest probability ratio',
    '',
    'New over old, of any response token.',
  ),
  (
    'loss/ratio_min',
    'Smallest probability ratio',
    '',
    'New over old, of any response token.',
  ),
  (
    'critic/explained_variance',
    'Explained variance',
    '',
    'Of the returns by the critic; 1 is all, 0 none.',
  ),
  (
    'rollout/score',
    'Score',
    '',
    "Mean of the environment's own score.",
  ),
  ('loss/grad_norm', 'Gradient norm', '', 'Global norm before clipping.'),
  ('loss/entropy', 'Entropy', '', 'Mean a response token, in nats.'),
  ('time/step_s', 'Time a step', 'seconds', 'Rollout, update and the rest.'),
  (
    'rollout/tokens_per_s',
    'Tokens a second',
    '',
    'Response tokens sampled a second of the rollout.',
  ),
  (
    'rollout/occupancy',
    'Slot occupancy',
    'share',
    'Share of slot time before the tail in which a slot held an episode.',
  ),
  (
    'rollout/decode_share',
    'Decoding',
    'share',
    'Share of slot time in which a response was being sampled.',
  ),
  (
    'rollout/prefill_share',
    'Prefill',
    'share',
    'Share of slot time in which a context was read, or waited to be.',
  ),
  (
    'rollout/env_wait_share',
    'Waiting for environments',
    'share',
    'Share of slot time in which the environment took its step.',
  ),
  (
    'rollout/tail_s',
    'Tail',
    'seconds',
    'Time of the rollout after 90% of its episodes had ended.',
  ),
  (
    'loss/sampler_gap',
    'Gap between sampler and learner',
    '',
    "Largest difference of a token's log-probabilities, in nats, before the"
    ' update.',
  ),
  (
    'loss/sampler_kl',
    'KL between sampler and learner',
    '',
    'Mean k3 estimate a response token, in nats, before the update.',
  ),
)

# Settings that tell a reader what was run, besides those of the method chosen.
_MAIN_SETTINGS = frozenset(
  'seed env.name env.options env.task_types env.max_turns chat.context'
  ' chat.prompt chat.history chat.max_response model.checkpoint model.size'
  ' sampler.temperature train.steps train.tasks_per_step train.group_size'
  ' train.success_return advantage.name loss.name optimizer.learning_rate'
  ' learner.minibatches eval.episodes eval.temperature eval.max_turns'.split()
)


def write(
  paths: Sequence[pathlib.Path], output: pathlib.Path | None = None
) -> list[pathlib.Path]:
  """Reads runs and writes their page, and tables of means over seeds.

  Args:
    paths: at least one: the directory of a run, the folder of a sweep, a folder
      of dumped episodes or one file of it.
    output: file to write. By default `report.html` in the first path, or
      `NAME.html` beside it when it is a file `NAME.jsonl.gz`.

  Returns:
    The path of the page. Where runs differ in their seed alone, also those of
    `NAME_table.md` and `NAME_table.json` beside a page `NAME.html`.

  Raises:
    runs.RunError: a path can be read neither as a run nor as a dump, or the
      page cannot be written where asked.
  """
  runs = runs_lib.load_all(
    paths,
    episodes_per_file=EPISODES_PER_FILE,
    transcript_bytes=TRANSCRIPT_BYTES,
  )
  first = paths[0]
  if output is None and first.is_dir():
    output = first / 'report.html'
  elif output is None:
    name = first.name.removesuffix(runs_lib.DUMP_SUFFIX)
    output = first.with_name(name + '.html')
  written = datetime.datetime.now().strftime('%Y-%m-%d %H:%M')
  texts = {output: render(runs, written=written)}
  methods = seeds.methods(runs)
  if seeds.have_several(methods):
    name = output.name.removesuffix('.html')
    texts[output.with_name(f'{name}_table.md')] = seeds.as_markdown(methods)
    texts[output.with_name(f'{name}_table.json')] = seeds.as_json(methods)
  for path, text in texts.items():
    _replace(path, text)
  return list(texts)


def _replace(path: pathlib.Path, text: str) -> None:
  # Renamed into place, so that a browser never loads half a page.
  part = path.with_name(path.name + '.part')
  try:
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)
  except OSError as error:
    part.unlink(missing_ok=True)
    raise runs_lib.RunError(
      f'{path}: the page cannot be written there ({error.strerror}); give'
      ' --output=FILE in a folder that exists and can be written to.'
    ) from error


def render(runs: Sequence[runs_lib.Run], *, written: str) -> str:
  """The whole page as one HTML document.

  Args:
    runs: at least one.
    written: when the page was made, for people to read.
  """
  style = (_HERE / 'page.css').read_text('utf-8')
  script = (_HERE / 'page.js').read_text('utf-8')
  methods = seeds.methods(runs)
  several = seeds.have_several(methods)
  compared = [method for method in methods if not method.only_episodes]
  judged = seeds.judge(compared) if several else verdict.judge(runs)
  main, other = _charts(methods)
  trained = [run for run in runs if not run.only_episodes]
  return string.Template((_HERE / 'page.html').read_text('utf-8')).substitute(
    policy=(
      f"default-src 'none'; style-src {_hash(style)}; script-src"
      f" {_hash(script)}; base-uri 'none'; form-action 'none'"
    ),
    title=html.escape(TITLE),
    style=style,
    script=script,
    headline=html.escape(judged.headline),
    verdict='\n'.join(
      f'<p class="verdict">{html.escape(sentence)}</p>'
      for sentence in judged.paragraphs
    )
    + _in_words(judged.details),
    legend='' if _are_many(methods) else _legend(methods),
    notes=_notes(runs, seeds.notes(compared) if several else ()),
    results=('' if several else _side_by_side(runs)) + _results(runs, methods),
    curves=_curves(main, other, methods) if trained else '',
    transcripts=_transcripts(runs),
    configuration=_configuration(trained) if trained else '',
    written=html.escape(written),
    curves_json=_curves_json([*main, *other]),
    transcripts_json=_transcripts_json(runs),
  )


def _hash(source: str) -> str:
  """The source expression that allows exactly this inline text."""
  digest = hashlib.sha256(source.encode('utf-8')).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def _are_many(entries: Sequence[runs_lib.Run] | Sequence[seeds.Method]) -> bool:
  return len(entries) >= verdict.MANY


def _in_words(sentences: Sequence[str]) -> str:
  if not sentences:
    return ''
  shown = ''.join(f'<p>{html.escape(sentence)}</p>' for sentence in sentences)
  return f'<details><summary>Each run in words</summary>{shown}</details>'


def _state(run: runs_lib.Run) -> str:
  planned = runs_lib.number(run.config.get('train.steps')) or 0
  if run.only_episodes:
    state = 'dumped episodes'
  elif run.last_step is None:
    state = 'no training step yet'
  elif planned > run.last_step:
    state = f'step {run.last_step} of {planned:.0f}'
  else:
    state = verdict.count(run.last_step, 'training step')
  if not (run.only_episodes or run.replays or 'after' in run.rows):
    state += ', not finished'
  return state


def _purpose(run: runs_lib.Run) -> str:
  """What the sweep of the run says of it; '' without a sweep."""
  published = f'Published: {run.published}' if run.published else ''
  return ''.join(
    f'<small>{html.escape(said)}</small>'
    for said in (run.reason, published)
    if said
  )


def _method_state(method: seeds.Method) -> str:
  if len(method.runs) == 1:
    return _state(method.runs[0])
  numbers = ', '.join(seeds.seed(run) for run in method.counted)
  return f'mean of {verdict.count(len(method.counted), "seed")} ({numbers})'


def _legend(methods: Sequence[seeds.Method]) -> str:
  items = [
    f'<li>{charts.swatch(i)}<b>{html.escape(method.name)}</b>'
    f' <span>{_method_state(method)}{_purpose(method.runs[0])}</span></li>'
    for i, method in enumerate(methods)
  ]
  return f'<ul class="runs" aria-label="Runs">{"".join(items)}</ul>'


def _notes(runs: Sequence[runs_lib.Run], on_seeds: Sequence[str]) -> str:
  concerned: dict[str, list[str]] = {}
  for run in runs:
    for note in run.notes:
      concerned.setdefault(note, []).append(run.name)
  notes = [
    *on_seeds,
    *(f'{", ".join(names)}: {note}' for note, names in concerned.items()),
  ]
  few_signals = {}
  for run in runs:
    points = run.metrics.get(
      ('train', 'advantage/groups_without_outcome_variance'), ()
    )
    taught = dict(
      run.metrics.get(
        ('train', 'advantage/signal_without_outcome_variance'), ()
      )
    )
    idle = [value * (1 - taught.get(step, 0.0)) for step, value in points]
    share = sum(idle) / max(1, len(idle))
    if share > _FEW_SIGNALS:
      few_signals[run.name] = f'{100 * share:.0f}%'
  if few_signals:
    if _are_many(runs):
      where = f'more than {100 * _FEW_SIGNALS:.0f}% ({", ".join(few_signals)})'
    else:
      where = ', '.join(f'{few_signals[name]} ({name})' for name in few_signals)
    notes.append(
      f'In {where} of the groups all episodes ended alike, and nothing was'
      ' learnt from them: a flat curve may mean tasks that are too hard or too'
      ' easy, or groups that are too small.'
    )
  if not notes:
    return ''
  items = ''.join(f'<li>{html.escape(note)}</li>' for note in notes)
  return f'<ul class="notes" aria-label="Notes">{items}</ul>'


def _section(name: str, title: str, *parts: str) -> str:
  return (
    f'<section id="{name}" aria-labelledby="{name}-title">'
    f'<h2 id="{name}-title">{title}</h2>\n' + '\n'.join(parts) + '</section>'
  )


def _table(title: str, body: str, *, style: str = '') -> str:
  """A table that scrolls sideways by itself on a narrow screen."""
  label = html.escape(title)
  return (
    f'<div class="sheet"><p class="caption" aria-hidden="true">{label}</p>'
    f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
    f'<table class="{style}" aria-label="{label}">{body}</table></div></div>'
  )


def _columns(*titles: str) -> str:
  cells = ''.join(
    f'<th scope="col">{html.escape(title)}</th>' for title in titles
  )
  return f'<thead><tr>{cells}</tr></thead>'


def _cell(shown: str, interval: str, style: str = '') -> str:
  style = f' class="{style}"' if style else ''
  small = f'<small>{html.escape(interval)}</small>' if interval else ''
  return f'<td{style}>{html.escape(shown)}{small}</td>'


def _value_cells(row: Mapping[str, Any]) -> str:
  cells = []
  for measure in verdict.MEASURES:
    entry = verdict.estimate(row, measure.key)
    cells.append(
      _cell(
        verdict.format_value(entry.value, measure),
        verdict.format_interval(entry, measure),
      )
      if entry
      else _cell('–', '')
    )
  return ''.join(cells)


def _change_cells(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
  cells = []
  for measure in verdict.MEASURES:
    change = verdict.difference(
      verdict.estimate(before, measure.key),
      verdict.estimate(after, measure.key),
    )
    if change is None:
      cells.append(_cell('–', ''))
      continue
    side = verdict.direction(change) * (-1 if measure.fewer else 1)
    cells.append(
      _cell(
        verdict.format_change(change, measure),
        verdict.format_change_interval(change, measure),
        {1: 'good', -1: 'bad'}.get(side, ''),
      )
    )
  return ''.join(cells)


def _count(row: Mapping[str, Any], key: str) -> str:
  count = runs_lib.number(row.get(key))
  return '–' if count is None else f'{count:,.0f}'


def _side_by_side(runs: Sequence[runs_lib.Run]) -> str:
  """A line a run; '' for a few runs, whose results fit in full."""
  if not _are_many(runs):
    return ''
  lines = []
  for i, run in enumerate(runs):
    row = run.rows.get('after', {})
    change = verdict.success_against(runs[0], run) if i else None
    against = _cell('–', '')
    if change is not None:
      against = _cell(
        verdict.format_change(change, _SUCCESS),
        verdict.format_change_interval(change, _SUCCESS),
        {1: 'good', -1: 'bad'}.get(verdict.direction(change), ''),
      )
    lines.append(
      f'<tr><th scope="row">{charts.swatch(i)} {html.escape(run.name)}'
      f'<small>{_state(run)}</small></th><td>{_count(row, "episodes")}</td>'
      f'{against}{_value_cells(row)}</tr>'
    )
  table = _table(
    'After training; below each value its 95% interval. Success is set against'
    f' that of {runs[0].name}: a coloured difference is clear, its interval'
    ' leaves out 0.',
    _columns(
      'Run',
      'Episodes',
      f'Against {runs[0].name}',
      *(measure.title for measure in verdict.MEASURES),
    )
    + f'<tbody>{"".join(lines)}</tbody>',
    style='pinned',
  )
  return _section('runs', 'Runs', table, _purposes(seeds.methods(runs)))


def _purposes(methods: Sequence[seeds.Method]) -> str:
  """What the sweep says of its runs; '' without a sweep."""
  lines = [
    f'<tr><th scope="row">{charts.swatch(i)} {html.escape(method.name)}</th>'
    f'<td>{html.escape(run.reason)}</td><td>{html.escape(run.published)}</td>'
    '</tr>'
    for i, method in enumerate(methods)
    if (run := method.runs[0]).reason or run.published
  ]
  if not lines:
    return ''
  return _table(
    'What each run is for, and what is published about it.',
    _columns('Run', 'What it is', 'Published')
    + f'<tbody>{"".join(lines)}</tbody>',
    style='texts',
  )


def _results(
  runs: Sequence[runs_lib.Run], methods: Sequence[seeds.Method]
) -> str:
  if not any(run.rows for run in runs):
    return ''
  several = seeds.have_several(methods)
  bodies = []
  for run in runs:
    lines = []
    for name, row in run.rows.items():
      label = name if len(runs) == 1 else f'{run.name}, {name}'
      lines.append(
        f'<tr><th scope="row">{html.escape(label)}</th>'
        f'<td>{_count(row, "episodes")}</td>{_value_cells(row)}'
        f'<td>{_count(row, "faults")}</td></tr>'
      )
    if 'before' in run.rows and 'after' in run.rows:
      lines.append(
        '<tr class="change"><th scope="row">change</th><td></td>'
        f'{_change_cells(run.rows["before"], run.rows["after"])}<td></td></tr>'
      )
    bodies.append(f'<tbody class="run">{"".join(lines)}</tbody>')
  splits = ', '.join(sorted({run.split for run in runs if run.split}))
  where = f' on the {splits} split' if splits else ''
  table = _table(
    f'Evaluation{where}; below each'
    ' value its 95% interval. Coloured changes are clear: their interval'
    ' leaves out 0.',
    _columns(
      'Policy',
      'Episodes',
      *(measure.title for measure in verdict.MEASURES),
      'Faults',
    )
    + ''.join(bodies),
    style='pinned',
  )
  if several or _are_many(runs):
    table = f'<details><summary>Each evaluation</summary>{table}</details>'
  return _section(
    'results',
    'Before and after',
    _over_seeds(methods, where) if several else '',
    table,
    _by_type(methods),
    _interval_cards(methods),
  )


def _over_seeds(methods: Sequence[seeds.Method], where: str) -> str:
  """Three lines a method: before, after, and the change."""
  bodies = []
  for i, method in enumerate(methods):
    if method.only_episodes:
      continue
    numbers = ', '.join(seeds.seed(run) for run in method.counted)
    lines = []
    for row in (*seeds.ROWS, 'change'):
      change = row == 'change'
      cells = []
      for measure in verdict.MEASURES:
        entry = (
          seeds.change(method, measure)
          if change
          else seeds.evaluated(method, row, measure)
        )
        cells.append(
          _cell(
            seeds.format_mean(entry, measure, signed=change),
            seeds.format_values(entry, measure, signed=change),
          )
        )
      facts = (
        '<td></td><td></td>'
        if change
        else _cell(str(len(method.counted)), numbers)
        + _cell(seeds.episodes(method), '')
      )
      name = (
        row
        if change
        else f'{charts.swatch(i)} {html.escape(method.name)}'
        f'<small>{row}</small>'
      )
      lines.append(
        f'<tr{" class=change" if change else ""}><th scope="row">{name}</th>'
        f'{facts}{"".join(cells)}</tr>'
      )
    bodies.append(f'<tbody class="run">{"".join(lines)}</tbody>')
  table = _table(
    f'Evaluation{where}: mean ± standard deviation (n − 1) over seeds; below'
    ' it the value of each seed, in the order of the seeds.',
    _columns(
      'Method',
      'Seeds',
      'Episodes',
      *(measure.title for measure in verdict.MEASURES),
    )
    + ''.join(bodies),
    style='pinned',
  )
  return table + (_purposes(methods) if _are_many(methods) else '')


def _shown_rows(methods: Sequence[seeds.Method]) -> tuple[str, ...]:
  """Evaluations with a place of their own in each table and drawing."""
  return ('after',) if _are_many(methods) else seeds.ROWS


def _interval_cards(methods: Sequence[seeds.Method]) -> str:
  several = seeds.have_several(methods)
  cards = []
  for measure in verdict.MEASURES:
    if measure.key == 'turns':
      continue  # Mixes in failures, which mostly last to the limit.
    intervals = []
    for i, method in enumerate(methods):
      for name in _shown_rows(methods):
        label, hollow = _label(method, name, methods), name == 'before'
        if several:
          over = seeds.evaluated(method, name, measure)
          if over:
            intervals.append(
              charts.Interval(
                run=i,
                label=label,
                value=over.mean,
                low=over.low,
                high=over.high,
                hollow=hollow,
                dots=[value for value in over.values if value is not None],
              )
            )
          continue
        entry = verdict.estimate(method.runs[0].rows.get(name), measure.key)
        if entry:
          intervals.append(
            charts.Interval(
              run=i,
              label=label,
              value=entry.value,
              low=entry.low,
              high=entry.high,
              hollow=hollow,
            )
          )
    if intervals:
      drawing = charts.draw_intervals(
        measure.title, intervals, 'share' if measure.share else ''
      )
      cards.append(
        f'<figure class="card"><figcaption><h3>{measure.title}</h3>'
        f'</figcaption>{drawing}</figure>'
      )
  marks = (
    'After training.'
    if _are_many(methods)
    else 'Open marks: before training. Filled marks: after.'
  )
  bars = (
    'Marks are means over seeds, dots the seeds; bars reach from the lowest to'
    ' the highest.'
    if several
    else 'Bars: 95% intervals.'
  )
  return (
    f'<p class="caption spaced">{marks} {bars}</p>'
    + f'<div class="grid-cards wide">{"".join(cards)}</div>'
  )


def _label(
  method: seeds.Method, row: str, methods: Sequence[seeds.Method]
) -> str:
  """Names one evaluation of one of the methods of a page."""
  if len(methods) == 1:
    return row
  return method.name if _are_many(methods) else f'{method.name} {row}'


def _by_type(methods: Sequence[seeds.Method]) -> str:
  """Success by task type, folded away; '' where it was not measured."""
  several = seeds.have_several(methods)
  columns = [
    (_label(method, name, methods), method, name)
    for method in methods
    for name in dict.fromkeys(n for run in method.counted for n in run.rows)
    if not _are_many(methods) or name in _shown_rows(methods)
    if any(seeds.types(run, name) for run in method.counted)
  ]
  if not columns:
    return ''
  names = sorted(
    {
      task_type
      for _, method, name in columns
      for run in method.counted
      for task_type in seeds.types(run, name)
    }
  )
  lines = []
  for task_type in names:
    cells = []
    for _, method, name in columns:
      over = seeds.evaluated(method, name, _SUCCESS, task_type)
      if several or over is None:
        cells.append(
          _cell(
            seeds.format_mean(over, _SUCCESS),
            seeds.format_values(over, _SUCCESS),
          )
        )
        continue
      row = seeds.types(method.runs[0], name)[task_type]
      turns = verdict.estimate(row, 'turns_success')
      details = f'of {_count(row, "episodes")}'
      if turns:
        details += f', {turns.value:.1f} turns'
      cells.append(_cell(verdict.format_value(over.mean, _SUCCESS), details))
    lines.append(
      f'<tr><th scope="row">{html.escape(task_type)}</th>{"".join(cells)}</tr>'
    )
  what = (
    'mean ± standard deviation (n − 1) over seeds, below it each seed'
    if several
    else 'below it the number of episodes and the mean turns of the successful'
    ' ones'
  )
  table = _table(
    f'Success by task type; {what}.',
    _columns('Task type', *(label for label, _, _ in columns))
    + f'<tbody>{"".join(lines)}</tbody>',
    style='pinned',
  )
  return f'<details><summary>By task type</summary>{table}</details>'


def _charts(
  methods: Sequence[seeds.Method],
) -> tuple[list[charts.Chart], list[charts.Chart]]:
  """The main charts, and one for every metric that they do not show."""
  used: set[tuple[str, str]] = set()

  def curves(kind: str, key: str) -> list[charts.Curve]:
    used.add((kind, key))
    found = []
    for i, method in enumerate(methods):
      points, band = seeds.curve(method, kind, key)
      if not points:
        continue
      name = method.name
      found.append(
        charts.Curve(
          run=i,
          name=f'{name} evaluation' if kind == 'eval' else name,
          points=points,
          markers=kind == 'eval',
          band=band,
        )
      )
    return found

  runs = [run for method in methods for run in method.counted]
  main = []
  for key, title, unit, caption in _numbered(_CURVES, runs):
    found = curves('train', key)
    area, _, measure = key.partition('/')
    if area == 'rollout':
      found += curves('eval', f'eval/{measure}')
    if found:
      main.append(charts.Chart(title, caption, found, unit))
    if key == 'advantage/mean_abs':
      by_turn = _advantage_by_turn(methods)
      main += [by_turn] if by_turn else []
  other = []
  for kind, key in sorted({k for run in runs for k in run.metrics} - used):
    unit = 'seconds' if key.startswith('time/') else ''
    title = key if kind in ('train', 'eval') else f'{kind} {key}'
    found = curves(kind, key)
    if found:
      other.append(charts.Chart(title, '', found, unit, from_zero=False))
  return main, other


def _numbered(
  listed: Sequence[tuple[str, str, str, str]], runs: Sequence[runs_lib.Run]
) -> Iterator[tuple[str, str, str, str]]:
  """Each of `listed`, and after it `key_0` and so on, as far as logged.

  A critic with several heads logs a value for each.
  """
  logged = sorted({key for run in runs for _, key in run.metrics})
  for key, title, unit, caption in listed:
    yield key, title, unit, caption
    for other in logged:
      number = other.removeprefix(f'{key}_')
      if number != other and number.isdecimal():
        yield other, f'{title}, head {number}', unit, caption


def _advantage_by_turn(
  methods: Sequence[seeds.Method],
) -> charts.Chart | None:
  """How far the advantages of turns of one place differ, near the end."""
  curves = []
  for i, method in enumerate(methods):
    points, band = seeds.average([_late_by_turn(run) for run in method.counted])
    if points:
      band = band if len(method.runs) > 1 else ()
      curves.append(charts.Curve(i, method.name, points, band=band))
  if not curves:
    return None
  return charts.Chart(
    'Spread of the advantages by turn',
    'Standard deviation over the turns of one span, drawn at its first turn;'
    f' mean of the last {100 * _LAST_STEPS:.0f}% of the steps.',
    curves,
    axis='turn',
  )


def _late_by_turn(run: runs_lib.Run) -> list[tuple[float, float]]:
  points = []
  for (kind, key), values in run.metrics.items():
    match = _STD_TURN.match(key)
    if kind == 'train' and match:
      since = (1 - _LAST_STEPS) * (run.last_step or 0)
      late = [value for step, value in values if step > since]
      if late:
        points.append((float(match[1]), sum(late) / len(late)))
  return points


def _figures(drawn: Sequence[charts.Chart], first: int) -> str:
  figures = []
  for i, chart in enumerate(drawn, start=first):
    caption = html.escape(chart.caption)
    caption = f'<p class="caption">{caption}</p>' if caption else ''
    figures.append(
      f'<figure class="card" data-chart="{i}"><figcaption>'
      f'<h3>{html.escape(chart.title)}</h3>{caption}</figcaption>'
      f'<div class="plot" tabindex="0" role="group" aria-label='
      f'"{html.escape(chart.title)}: left and right arrows read out values">'
      f'{charts.draw(chart)}'
      '<div class="tip" role="status" hidden></div></div></figure>'
    )
  return f'<div class="grid-cards">{"".join(figures)}</div>'


def _switches(methods: Sequence[seeds.Method]) -> str:
  """A legend that stays in sight, whose entries switch curves off."""
  items = ''.join(
    f'<label><input type="checkbox" checked data-run="{i}">'
    f'{charts.swatch(i)}{html.escape(method.name)}</label>'
    for i, method in enumerate(methods)
    if not method.only_episodes
  )
  return f'<fieldset class="switches" aria-label="Curves">{items}</fieldset>'


def _curves(
  main: Sequence[charts.Chart],
  other: Sequence[charts.Chart],
  methods: Sequence[seeds.Method],
) -> str:
  if not main and not other:
    return _section(
      'curves', 'Training', '<p class="empty">No metrics were logged yet.</p>'
    )
  means = (
    ' Where a method has several seeds, lines and marks are their means; bands'
    ' and bars reach from the lowest to the highest seed.'
    if seeds.have_several(methods)
    else ''
  )
  parts = [
    '<p class="caption">By training step. Lines: training episodes, in long'
    ' runs smoothed over neighbouring steps; a thin line, where there are few'
    ' runs, shows each step. Marks: evaluations. Point at a chart, or focus it'
    f' and use the arrow keys, to read values.{means}</p>'
  ]
  if len(methods) > 1:
    parts.append(_switches(methods))
  if main:
    parts.append(_figures(main, 0))
  if other:
    parts.append(
      f'<details><summary>All other metrics ({len(other)})</summary>'
      f'{_figures(other, len(main))}</details>'
    )
  return _section('curves', 'Training', *parts)


def _curves_json(drawn: Sequence[charts.Chart]) -> str:
  return runs_lib.embed_json(
    {
      'plot': charts.plot_area(),
      'colours': charts.COLOURS,
      'charts': [
        {
          'unit': chart.unit,
          'axis': chart.axis,
          'steps': charts.domain(chart)[0],
          'curves': [
            {
              'run': curve.run,
              'name': curve.name,
              # (step, value), and of a mean the lowest and the highest.
              'points': [
                (line[0][0], *(float(f'{value:.5g}') for _, value in line))
                for line in zip(
                  *map(charts.thin, [curve.points, *curve.limits]), strict=True
                )
              ],
            }
            for curve in chart.curves
          ],
        }
        for chart in drawn
      ],
    }
  )


def _transcripts(runs: Sequence[runs_lib.Run]) -> str:
  files = [file for run in runs for file in run.transcripts]
  kept = sum(len(file.episodes) for file in files)
  if not kept:
    return _section(
      'transcripts',
      'Transcripts',
      '<p class="empty">No transcripts were written yet.</p>',
    )
  total = sum(file.total for file in files)
  caption = f'{kept:,} episodes.'
  if kept < total:
    caption = (
      f'{kept:,} of {total:,} episodes, evenly spaced within each file; the'
      ' other'
      f' {total - kept:,} are left out to keep the page small.'
    )
  filters = ''.join(
    f'<label>{label}<select id="filter-{name}"></select></label>'
    for name, label in (
      ('run', 'Run'),
      ('file', 'File'),
      ('outcome', 'Outcome'),
      ('type', 'Task type'),
    )
  )
  return _section(
    'transcripts',
    'Transcripts',
    f'<p class="caption">{caption}</p>',
    '<noscript><p>Paging through the transcripts needs JavaScript.</p>'
    '</noscript>',
    f'<fieldset class="filters" aria-label="Filters">{filters}</fieldset>',
    '<nav class="pager" aria-label="Episodes">'
    '<button type="button" id="previous">← Previous</button>'
    '<button type="button" id="next">Next →</button>'
    '<label>Episode <input id="position" type="number" min="1"'
    ' inputmode="numeric"></label> <span id="count" role="status"></span>'
    '<span class="hint">or <kbd>←</kbd> <kbd>→</kbd></span></nav>',
    '<div id="episode"></div>',
  )


def _transcripts_json(runs: Sequence[runs_lib.Run]) -> str:
  # Episodes are encoded already: joined here rather than parsed again.
  files = []
  for i, run in enumerate(runs):
    for file in run.transcripts:
      head = runs_lib.embed_json(
        {'run': i, 'name': file.name, 'total': file.total}
      )
      files.append(f'{head[:-1]},"episodes":[{",".join(file.episodes)}]}}')
  names = runs_lib.embed_json([run.name for run in runs])
  return f'{{"runs":{names},"files":[{",".join(files)}]}}'


def _setting(value: Any) -> str:
  shown = value if isinstance(value, str) else json.dumps(value)
  shown = runs_lib.clean(shown)
  return shown if len(shown) <= 200 else shown[:200] + '…'


def _is_main_setting(key: str, config: Mapping[str, Any]) -> bool:
  area, _, rest = key.partition('.')
  if f'{area}.name' in config and rest.count('.') == 1:
    # The choice `area.name` has its own settings; those of the other
    # choices do not act.
    return rest.startswith(f'{config[f"{area}.name"]}.')
  return key in _MAIN_SETTINGS


def _settings_table(
  title: str,
  keys: Sequence[str],
  runs: Sequence[runs_lib.Run],
  names: Sequence[str] = (),
) -> str:
  lines = []
  for key in keys:
    cells = ''.join(
      f'<td>{html.escape(_setting(run.config[key]))}</td>'
      if key in run.config
      else '<td>–</td>'
      for run in runs
    )
    style = ' class="differs"' if _differs(key, runs) else ''
    lines.append(
      f'<tr{style}><th scope="row">{html.escape(key)}</th>{cells}</tr>'
    )
  return _table(
    title,
    _columns('Setting', *(names or (run.name for run in runs)))
    + f'<tbody>{"".join(lines)}</tbody>',
    style='words pinned' + (' many' if _are_many(runs) else ''),
  )


def _differs(key: str, runs: Sequence[runs_lib.Run]) -> bool:
  first = runs[0].config
  return any(
    (key in run.config, run.config.get(key)) != (key in first, first.get(key))
    for run in runs[1:]
  )


def _configuration(runs: Sequence[runs_lib.Run]) -> str:
  keys = list(dict.fromkeys(key for run in runs for key in run.config))
  if not keys:
    return _section(
      'configuration',
      'Configuration',
      '<p class="empty">No configuration was found.</p>',
    )
  parts = []
  if len(runs) > 1:
    differing = [key for key in keys if _differs(key, runs)]
    parts.append(
      _settings_table('Where the runs differ', differing, runs)
      if differing
      else '<p>All settings of these runs are the same.</p>'
    )
  main = [
    key
    for key in keys
    if any(_is_main_setting(key, run.config) for run in runs)
  ]
  if _are_many(runs):
    # Those that differ stand above; a column a run would only repeat.
    shared = [key for key in main if not _differs(key, runs)]
    if shared:
      parts.append(
        _settings_table('Main settings', shared, runs[:1], ['All runs'])
      )
  elif main:
    parts.append(_settings_table('Main settings', main, runs))
  parts.append(
    f'<details><summary>All settings ({len(keys)})</summary>'
    f'{_settings_table("All settings", keys, runs)}</details>'
  )
  return _section('configuration', 'Configuration', *parts)
