"""Means and intervals of an evaluation."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import pytest

from envs_server import alfworld_data, sciworld_sets
from planpo_jax import env_client, episodes, evaluate

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
  # Not below by a rounding error, which would be printed as -0.0.
  assert min(evaluate.wilson(0, n).low for n in range(1, 50)) >= 0.0
  assert max(evaluate.wilson(n, n).high for n in range(1, 50)) <= 1.0
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


ALFWORLD_SETS = {
  column: (name,) for name, column in alfworld_data.COLUMNS.items()
}


def described(name, sets, types, splits=None):
  return env_client.Description(
    name=name,
    version=f'{name} 1, data 0a',
    splits=splits or {'valid_unseen': 134, 'valid_seen': 140},
    task_names=tuple(types),
    action_format='',
    workers=1,
    busy=0,
    waiting=0,
    sets=sets,
  )


def alfworld():
  types = [name for types in ALFWORLD_SETS.values() for name in types]
  return described('alfworld', ALFWORLD_SETS, types)


def of(column, *successes, lost=0, turns=4, tokens=10):
  """Episodes of the type of an ALFWorld column; a success takes half."""
  (name,) = ALFWORLD_SETS[column]
  fault = episodes.Ending.FAULT
  return [
    episode(won, turns // 2 if won else turns, tokens, name=name)
    for won in successes
  ] + [episode(False, 1, 1, name=name, ending=fault)] * lost


def alfworld_results():
  """Worked by hand.

  valid_seen: Pick 2 of 3; Look 0 of 1; Clean none; Heat 1 of 1, one lost; Cool
  one lost, no other; Pick2 1 of 2. All: 4 of 7. Turns: successes 2, 2, 2, 5,
  failures 4, 4, 10, so 29/7 and 11/4. Tokens: 10 five times, 20 twice: 90/7.
  valid_unseen: nothing but 0 of 1 of Pick.
  """
  seen = [
    *of('Pick', True, True, False),
    *of('Look', False),
    *of('Heat', True, lost=1),
    *of('Cool', lost=1),
    *of('Pick2', True, False, turns=10, tokens=20),
  ]
  unseen = of('Pick', False)
  return [
    evaluate.results(split, {'step 5': played}, alfworld())
    for split, played in (('valid_seen', seen), ('valid_unseen', unseen))
  ]


def squeezed(markdown):
  """A table without the blanks that line its cells up."""
  return [' '.join(line.split()) for line in markdown.splitlines()]


def test_the_row_of_publications_on_alfworld():
  found = alfworld_results()
  text = evaluate.markdown(found, evaluate.layout(alfworld()))
  lines = squeezed(text)
  assert lines[0] == (
    'In a cell: success in % (episodes). All: all that were played.'
  )
  assert lines[1] == ''
  assert lines[2] == (
    '| policy | split | Pick | Look | Clean | Heat | Cool | Pick2 | All '
    '| turns | turns (successes) | tokens a response |'
  )
  assert lines[4:] == [
    '| step 5 | valid_seen (in distribution) | 66.7 (3) | 0.0 (1) | - '
    '| 100.0 (1 + 1 lost) | - (0 + 1 lost) | 50.0 (2) | 57.1 (7 + 2 lost) '
    '| 4.1 | 2.8 | 12.9 |',
    '| step 5 | valid_unseen (out of distribution) | 0.0 (1) | - | - | - | - '
    '| - | 0.0 (1) | 4.0 | - | 10.0 |',
  ]


def test_the_row_of_publications_is_lined_up_markdown():
  description = described('other', {}, ['a', 'bb'], {'dev': 2})
  played = [episode(True, 2, 5), episode(False, 5, 5)]
  found = evaluate.results('dev', {'x': played}, description)
  # 1 of 2; turns 3.5 and, of the success, 2; tokens 5.
  assert evaluate.markdown([found], evaluate.layout(description)) == (
    'In a cell: success in % (episodes). All: all that were played.\n'
    '\n'
    '| policy | split | a        | bb | All      | turns | turns (successes) '
    '| tokens a response |\n'
    '|--------|-------|----------|----|----------|-------|-------------------'
    '|-------------------|\n'
    '| x      | dev   | 50.0 (2) | -  | 50.0 (2) | 3.5   | 2.0               '
    '| 5.0               |'
  )


def test_a_set_that_holds_every_episode_fills_its_column():
  """Where it is no row of its own: it would repeat the whole."""
  played = of('Cool', True, False)
  found = evaluate.results('valid_seen', {'x': played}, alfworld())
  assert not found.rows['x'].by_set
  assert found.cells['x']['Cool'] == found.cells['x']['All']
  assert found.cells['x']['Cool'].success == evaluate.wilson(1, 2)


def test_the_row_of_publications_on_sciworld_has_scores():
  shape = evaluate.LAYOUTS['sciworld']
  assert tuple(shape.columns.values()) == tuple(sciworld_sets.COLUMNS)
  types = [*sciworld_sets.AGENTGYM23, 'grow-fruit']
  description = described('sciworld', sciworld_sets.sets(types), types)
  names = ('find-plant', 'find-animal', 'use-thermometer', 'grow-fruit')
  played = [
    episode(won, 2, 5, name=name)
    for won, name in zip((True, False, False, True), names, strict=True)
  ]
  found = evaluate.results('test', {'x': played}, description)
  text = evaluate.markdown([found], evaluate.layout(description))
  # A failure scores 30, so find has 65; the type of no column counts overall.
  assert squeezed(text)[0] == (
    'In a cell: success in % / mean score (episodes). Overall: all that were '
    'played.'
  )
  assert squeezed(text)[2].startswith(
    '| policy | split | Measure | Test-Cond | Find | Chem-Mix | Lifespan '
    '| Overall | turns |'
  )
  assert squeezed(text)[4].startswith(
    '| x | test | 0.0 / 30.0 (1) | - | 50.0 / 65.0 (2) | - | - '
    '| 50.0 / 65.0 (4) | 2.0 |'
  )


def test_the_row_of_publications_on_webshop_has_score_and_success():
  sizes = {'train': 9, 'dev': 3, 'test': 3}
  description = described('webshop', {}, ['human', 'synthetic'], sizes)
  played = [episode(won, 4, 5, name='human') for won in (True, False, False)]
  found = evaluate.results('test', {'x': played}, description)
  lines = squeezed(evaluate.markdown([found], evaluate.layout(description)))
  assert lines[2].startswith('| policy | split | Human | Synthetic | All |')
  # Scores of 100, 30 and 30.
  assert lines[4].startswith(
    '| x | test (goals 0 to 499) | 33.3 / 53.3 (3) | - | 33.3 / 53.3 (3) |'
  )


def test_a_service_without_the_sets_has_its_types_for_columns():
  types = alfworld().task_names
  shape = evaluate.layout(described('alfworld', {}, types))
  assert list(shape.columns) == list(types)
  assert shape.notes['valid_seen'] == 'in distribution'


def test_results_are_kept_as_json_and_as_markdown(tmp_path):
  found, path = alfworld_results(), tmp_path / 'x.json'
  evaluated = {
    'config': None,
    'environment': evaluate.environment(alfworld()),
    'episodes': {'asked': 0, 'valid_seen': 9},
  }
  shape = evaluate.layout(alfworld())
  evaluate.write_results(path, evaluated, found, shape)
  content = json.loads(path.read_text())
  assert content['evaluated'] == evaluated
  assert list(content['splits']) == ['valid_seen', 'valid_unseen']
  for one in found:
    (values,) = content['splits'][one.split]['rows'].values()
    again = evaluate.Summary.from_json(values)
    row = one.rows['step 5']
    assert evaluate.table({'x': again}) == evaluate.table({'x': row})
    assert again.by_set.keys() == row.by_set.keys()
    assert again.by_type.keys() == row.by_type.keys()
  seen = content['splits']['valid_seen']
  assert seen['label'] == 'valid_seen (in distribution)'
  row = seen['paper_row']['step 5']
  assert list(row['columns']) == [*ALFWORLD_SETS, 'All']
  assert row['columns']['Heat'] == {
    'success_percent': 100.0,
    'score': 100.0,
    'episodes': 1,
    'faults': 1,
  }
  assert row['columns']['Clean'] == {
    'success_percent': None,
    'score': None,
    'episodes': 0,
    'faults': 0,
  }
  assert row['turns'] == pytest.approx(29 / 7)
  assert row['turns_success'] == pytest.approx(11 / 4)
  assert row['response_tokens'] == pytest.approx(90 / 7)
  assert (tmp_path / 'x.md').read_text() == (
    '# Evaluation\n'
    '\n'
    '- environment: name alfworld, version alfworld 1, data 0a, split_sizes '
    'valid_seen 140, valid_unseen 134\n'
    '- episodes: asked 0, valid_seen 9\n'
    '\n' + evaluate.markdown(found, shape) + '\n'
  )


def test_types_that_are_sets_are_shown_once():
  (seen, _) = alfworld_results()
  lines = evaluate.closing(seen, ALFWORLD_SETS).splitlines()
  assert lines[0] == 'valid_seen split'
  assert [line.split()[0] for line in lines[3:]] == [
    *('step', 'Cool', 'Heat', 'Look', 'Pick', 'Pick2')
  ]


def test_every_split_is_planned_or_none():
  description = described('toy', {}, ['a'], {'dev': 3, 'test': 2, 'train': 9})

  def tasks_of(split):
    count = {'dev': 3, 'test': 2, 'train': 0}[split]
    return [episodes.Task('toy', split, i, 'a') for i in range(count)]

  planned = evaluate.plan(['test', 'dev'], 0, description, tasks_of)
  assert {k: len(v) for k, v in planned.items()} == {'test': 2, 'dev': 3}
  planned = evaluate.plan(['test'], 5, description, tasks_of)
  assert len(set(planned['test'])) == 5
  with pytest.raises(ValueError, match="'tset' is unknown; toy has.* dev 3, t"):
    evaluate.plan(['dev', 'tset'], 0, description, tasks_of)
  with pytest.raises(ValueError, match="'train' has no tasks of the types"):
    evaluate.plan(['dev', 'train'], 0, description, tasks_of)


@pytest.mark.parametrize(
  'name,text',
  [
    ('x.md', 'must end in .json'),
    ('x', 'must end in .json'),
    ('no/x.json', 'no folder to write it to'),
    ('folder.json', 'cannot be written'),
    ('beside.json', 'beside.md cannot be written'),
  ],
)
def test_where_output_goes_is_checked(tmp_path, name, text):
  (tmp_path / 'folder.json').mkdir()
  (tmp_path / 'beside.md').mkdir()
  with pytest.raises((ValueError, OSError), match=text):
    evaluate.check_output(tmp_path / name)
  evaluate.check_output(tmp_path / 'fine.json')
  assert not (tmp_path / 'fine.json').exists()


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
  split = json.loads(output.read_text())['splits']['agentgym_standin']
  (row,) = split['rows'].values()
  assert row['episodes'] == 20
  assert {k: s['episodes'] for k, s in row['by_set'].items()} == {
    'chem-mix': 5,
    'lifespan': 15,
  }
  assert sum(kind['episodes'] for kind in row['by_type'].values()) == 20
  shown = [line.split()[:2] for line in done.stdout.splitlines()]
  assert shown.index(['chem-mix', '5']) == shown.index(['initial', '20']) + 1
  assert ['lifespan', '15'] in shown
  (paper,) = split['paper_row'].values()
  assert {k: c['episodes'] for k, c in paper['columns'].items()} == {
    'Measure': 0,
    'Test-Cond': 0,
    'Find': 0,
    'Chem-Mix': 5,
    'Lifespan': 15,
    'Overall': 20,
  }


def test_several_splits_are_played_in_one_go(tmp_path):
  output = tmp_path / 'table.json'
  done = launch(
    '--config=configs/quickstart.py:smoke',
    "--config.eval.splits=('dev','test')",
    '--episodes=4',
    f'--output={output}',
  )
  assert done.returncode == 0, done.stderr
  content = json.loads(output.read_text())
  assert list(content['splits']) == ['dev', 'test']
  evaluated = content['evaluated']
  assert evaluated['config'] == 'configs/quickstart.py:smoke'
  assert evaluated['environment']['version'] == 'toy 1'
  assert evaluated['environment']['split_sizes']['dev'] == 96
  assert evaluated['episodes'] == {'asked': 4, 'dev': 4, 'test': 4}
  assert evaluated['sampling']['temperature'] == 1.0
  for split in content['splits'].values():
    assert split['rows']['initial']['episodes'] == 4
    cells = split['paper_row']['initial']['columns']
    assert list(cells) == ['fetch', 'unlock', 'deliver', 'All']
  text = output.with_suffix('.md').read_text()
  assert '- environment: name toy, version toy 1, ' in text
  # What is printed last is what was written.
  table = done.stdout[done.stdout.index('In a cell') :]
  assert text.endswith(f'\n\n{table}')
  assert squeezed(table)[4].startswith('| initial | dev | ')
  assert squeezed(table)[5].startswith('| initial | test | ')


def test_a_split_is_unknown_before_another_is_played():
  done = launch('--config=configs/quickstart.py:smoke', '--split=test,tset')
  assert done.returncode == 2
  assert done.stderr == (
    "error: split 'tset' is unknown; toy has, with their numbers of tasks, dev "
    '96, test 96, train 192.\n'
  )
  assert not done.stdout


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
  rows = json.loads(output.read_text())['splits']['test']['rows']
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
    (['--output=table.md'], '--output=table.md must end in .json'),
  ],
)
def test_flags_of_agents_are_checked(flags, text):
  done = launch('--config=configs/quickstart.py:smoke', *flags)
  assert done.returncode == 2
  assert text in done.stderr and done.stderr.startswith('error: ')
