"""Means and intervals of an evaluation."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import pytest

from planpo_jax import episodes, evaluate

ROOT = pathlib.Path(__file__).parent.parent


def episode(success, turns, tokens, name='a', ending=None):
  turn = episodes.Turn(
    (1,), (2,) * tokens, (0.0,) * tokens, 'o', 'r', 'a', 0.0, True, 0
  )
  return episodes.Episode(
    episodes.Task('toy', 'test', 0, name),
    0,
    (turn,) * turns,
    100.0 if success else 30.0,
    success,
    ending or episodes.Ending.TERMINATED,
  )


def test_wilson_interval_of_a_published_example():
  # Newcombe 1998, table I: 81 of 263, score method: 0.2553 to 0.3662.
  e = evaluate.wilson(81, 263)
  assert e.mean == pytest.approx(0.3080, abs=1e-4)
  assert e.low == pytest.approx(0.2553, abs=1e-4)
  assert e.high == pytest.approx(0.3662, abs=1e-4)


def test_wilson_stays_inside_the_unit_interval():
  assert evaluate.wilson(0, 20).low == pytest.approx(0.0, abs=1e-12)
  assert 0 < evaluate.wilson(0, 20).high < 0.2
  assert math.isnan(evaluate.wilson(0, 0).mean)


def test_normal_interval():
  e = evaluate.normal([1.0, 2.0, 3.0, 4.0])
  # sd 1.290994, /sqrt(4), times 1.959964.
  assert (e.mean, e.high - e.mean) == pytest.approx((2.5, 1.265151), abs=1e-5)


def test_summary_counts_faults_apart():
  played = [
    episode(True, 2, 5),
    episode(False, 6, 15),
    episode(True, 4, 10, name='b'),
    episode(False, 1, 1, ending=episodes.Ending.FAULT),
  ]
  s = evaluate.summarize(played)
  assert (s.episodes, s.faults) == (3, 1)
  assert s.success.mean == pytest.approx(2 / 3)
  assert s.score.mean == pytest.approx(230 / 3)
  assert s.turns.mean == 4.0
  assert s.turns_success.mean == 3.0
  assert s.response_tokens.mean == 10.0
  assert s.by_type['b'].episodes == 1
  assert s.by_type['a'].faults == 1


def test_summary_survives_json():
  s = evaluate.summarize([episode(True, 2, 5)])
  again = evaluate.Summary.from_json(json.loads(json.dumps(s.to_json())))
  assert str(again) == str(s)
  assert evaluate.table({'x': again}) == evaluate.table({'x': s})


def test_remember_makes_once(tmp_path):
  made = []

  def make():
    made.append(1)
    return evaluate.summarize([episode(True, 2, 5)])

  first = evaluate.remember(tmp_path / 'x.json', make)
  second = evaluate.remember(tmp_path / 'x.json', make)
  assert len(made) == 1 and str(first) == str(second)


def test_repeats_of_a_task_are_members_of_a_group():
  pool = [episodes.Task('toy', 'test', i, 'a') for i in range(2)]
  jobs = evaluate.jobs(pool, 5)
  assert len(set(jobs)) == 5


def test_no_count_is_every_task_once():
  pool = [
    episodes.Task('toy', 'test', i, name)
    for name, size in (('a', 18), ('b', 2), ('c', 5))
    for i in range(size)
  ]
  assert evaluate.jobs(pool, 0) == [(task, 0) for task in pool]
  assert len(evaluate.jobs(pool, 200)) == 200


def test_a_lost_episode_is_logged_with_its_own_score():
  """-100 as it is: what a return makes of it is not the evaluation's."""
  lost = dataclasses.replace(episode(False, 2, 5), score=-100.0)
  s = evaluate.summarize([lost, episode(True, 2, 5), episode(False, 2, 5)])
  assert s.score.mean == pytest.approx(10.0)
  assert s.success.mean == pytest.approx(1 / 3)
  assert s.scalars()['eval/score'] == pytest.approx(10.0)


SETS = {
  'measure': ('a', 'b'),
  'find': ('c',),
  'lifespan': ('d', 'e'),
  'none': ('x',),
  'whole': ('a', 'b', 'c', 'd', 'e', 'f'),
}


def by_sets():
  """Successes by type: a 1 of 2, b 1 of 1, c 0 of 1, d lost, e none."""
  return evaluate.summarize(
    [
      episode(True, 2, 5, name='a'),
      episode(False, 4, 5, name='a'),
      episode(True, 3, 5, name='b'),
      episode(False, 1, 5, name='c'),
      episode(False, 1, 1, name='d', ending=episodes.Ending.FAULT),
    ],
    SETS,
  )


def test_sets_of_types_are_summarized_besides():
  s = by_sets()
  # Neither what nothing falls into nor what everything does.
  assert list(s.by_set) == ['find', 'lifespan', 'measure']
  measure = s.by_set['measure']
  assert (measure.episodes, measure.faults) == (3, 0)
  assert measure.success.mean == pytest.approx(2 / 3)
  assert measure.success == evaluate.wilson(2, 3)
  assert measure.score.mean == pytest.approx(230 / 3)
  assert measure.turns.mean == 3.0
  assert s.by_set['find'].success.mean == 0.0
  assert (s.by_set['lifespan'].episodes, s.by_set['lifespan'].faults) == (0, 1)
  assert not evaluate.summarize([episode(True, 2, 5)]).by_set


def test_sets_survive_json_and_older_files_have_none():
  s = by_sets()
  values = json.loads(json.dumps(s.to_json()))
  again = evaluate.Summary.from_json(values)
  assert evaluate.table(evaluate.columns({'x': again})) == evaluate.table(
    evaluate.columns({'x': s})
  )
  assert again.by_set['measure'] == s.by_set['measure']
  for kind in (values, *values['by_type'].values(), *values['by_set'].values()):
    kind.pop('by_set', None)
  older = evaluate.Summary.from_json(values)
  assert older.by_set == {} and older.success == s.success


def test_columns_are_rows_below_the_policies():
  one = evaluate.columns({'step 5': by_sets()})
  assert list(one) == ['  find', '  lifespan', '  measure']
  rows = {'before': by_sets(), 'after': by_sets()}
  two = evaluate.columns(rows)
  assert list(two)[-2:] == ['  measure, before', '  measure, after']
  lines = evaluate.table(rows | two).splitlines()
  assert [line.split()[0] for line in lines[2:]] == [
    'before',
    'after',
    *['find,'] * 2,
    *['lifespan,'] * 2,
    *['measure,'] * 2,
  ]
  # Success and score of the column.
  assert '66.7 [' in lines[-1] and '76.7 [' in lines[-1]


def test_an_evaluation_of_faults_alone_is_no_result():
  lost = episode(False, 1, 1, ending=episodes.Ending.FAULT)
  with pytest.raises(ConnectionError, match='all 2 episodes'):
    evaluate.summarize([lost, lost])


def test_a_damaged_summary_is_named(tmp_path):
  path = tmp_path / 'eval_before.json'
  path.write_text('{"episodes": 12')
  with pytest.raises(ValueError, match='eval_before.json is damaged'):
    evaluate.remember(path, lambda: None)


def launch(*flags):
  return subprocess.run(
    [sys.executable, 'launch/evaluate.py', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_columns_of_sets_are_printed_and_kept(tmp_path):
  """All 20 tasks of two sets, each once."""
  output = tmp_path / 'table.json'
  done = launch(
    '--config=configs/quickstart.py',
    "--config.env.task_types=('chem-mix', 'lifespan')",
    '--config.env.workers=2',
    '--config.sampler.slots=2',
    '--config.eval.max_turns=1',
    '--split=agentgym_standin',
    '--episodes=0',
    f'--output={output}',
  )
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(output.read_text())['rows'].values()
  assert row['episodes'] == 20
  assert {k: s['episodes'] for k, s in row['by_set'].items()} == {
    'chem-mix': 5,
    'lifespan': 15,
  }
  assert sum(kind['episodes'] for kind in row['by_type'].values()) == 20
  shown = [line.split()[:2] for line in done.stdout.splitlines()]
  assert shown.index(['chem-mix', '5']) == shown.index(['initial', '20']) + 1
  assert ['lifespan', '15'] in shown


def test_reflexion_prints_a_row_a_trial(tmp_path):
  output = tmp_path / 'table.json'
  done = launch(
    '--config=configs/quickstart.py:smoke',
    '--agent=reflexion',
    '--trials=2',
    '--episodes=3',
    f'--output={output}',
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads(output.read_text())['rows']
  names = ['initial, reflexion trial 1', 'initial, reflexion trial 2']
  assert list(rows) == names
  assert all(name in done.stdout for name in names)
  assert all(row['episodes'] + row['faults'] == 3 for row in rows.values())
  # A random policy plays all six turns, but the system message of ReAct takes
  # half of the context, and reflections take some of what is left.
  assert 6 > rows[names[0]]['turns'] > rows[names[1]]['turns']


@pytest.mark.parametrize(
  'flags,text',
  [
    (['--agent=react', '--trials=2'], '--trials=2 is for --agent=reflexion'),
    (['--memory=1'], '--memory=1 is for --agent=reflexion, not plain'),
    (['--agent=reflexive'], 'plain|react|reflexion'),
    (['--agent=reflexion', '--trials=0'], 'trials'),
  ],
)
def test_flags_of_agents_are_checked(flags, text):
  done = launch('--config=configs/quickstart.py:smoke', *flags)
  assert done.returncode == 2
  assert text in done.stderr and done.stderr.startswith('error: ')
