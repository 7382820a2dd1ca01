"""Sweeps: their command lines, what is skipped, resumed, refused and told."""

import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from configs.sweeps import alpha
from launch import sweep as launch_sweep
from planpo_jax import evaluate, sweep

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = str(ROOT / 'configs' / 'quickstart.py')

PLANPO = '--config=B.py:planpo'
ALPHA = '--config.advantage.planpo.alpha'

# Run -> its command after launch/train.py, without --workdir.
ABLATIONS = {
  'full': f'{PLANPO}',
  'no_as': f'{PLANPO}_no_as',
  'no_ae_flat_success': f'{PLANPO}_no_ae',
  'no_ae_flat_all': f'{PLANPO}_no_ae_flat_all',
  'constant_alpha': f'{PLANPO}_constant',
  'alpha_0.5': f'{PLANPO} {ALPHA}_init=0.5 {ALPHA}_final=0.25',
  'alpha_0.2': f'{PLANPO} {ALPHA}_init=0.2 {ALPHA}_final=0.1',
  'alpha_0.1': f'{PLANPO} {ALPHA}_init=0.1 {ALPHA}_final=0.05',
  'alpha_0.05': f'{PLANPO} {ALPHA}_init=0.05 {ALPHA}_final=0.025',
  'alpha_0': f'{PLANPO} {ALPHA}_init=0.0 {ALPHA}_final=0.0',
  'ppo': '--config=B.py:ppo',
  'ppo_success': '--config=B.py:ppo_success',
  'ppo_unconditional': '--config=B.py:ppo_unconditional',
  'grpo': '--config=B.py:grpo',
  'uncond_group': '--config=B.py:planpo_unconditional',
}

METHODS = (
  'planpo grpo dr_grpo rloo reinforce_pp reinforce_pp_baseline dapo gspo gigpo'
  ' gigpo_nostd ppo hiper empg hgpo scaling_inter'
).split()


def load(name: str, part: str = '') -> sweep.Sweep:
  return sweep.load(f'{ROOT}/configs/sweeps/{name}.py' + part)


def lines(made) -> dict[str, str]:
  """Command of each job without its workdir."""
  found = {}
  for job in made:
    config, workdir, *rest = job.arguments
    assert workdir == f'--workdir=R/{job.name}'
    found[job.name] = ' '.join([config, *rest])
  return found


class TestCommands:
  def test_ablations(self):
    made = sweep.jobs(load('ablations'), pathlib.Path('R'), base='B.py')
    # The order too: it is that of the report.
    assert list(lines(made).items()) == list(ABLATIONS.items())
    assert all(job.run.reason for job in made)
    unpublished = [job.name for job in made if not job.run.published]
    assert unpublished == ['uncond_group']
    for job in made:
      if job.run.published:
        assert 'arXiv 2608.17289' in job.run.published

  def test_parts_of_the_ablations(self):
    names = {
      part: [run.name for run in load('ablations', f':{part}').runs]
      for part in ('components', 'alpha', 'shaping')
    }
    assert [len(part) for part in names.values()] == [5, 5, 5]
    assert sum(names.values(), []) == list(ABLATIONS)
    with pytest.raises(sweep.SweepError, match="'alhpa'.*components, alpha"):
      load('ablations', ':alhpa')

  def test_alpha(self):
    made = sweep.jobs(load('alpha'), pathlib.Path('R'), base='B.py')
    assert list(lines(made).items()) == list(ABLATIONS.items())[5:10]
    assert [run.published.split(' (')[0] for run in alpha.RUNS] == [
      '7B ALFWorld 0.87, WebShop 0.69',
      '7B ALFWorld 0.93, WebShop 0.75',
      '7B ALFWorld 0.94, WebShop 0.81',
      '7B ALFWorld 0.91, WebShop 0.76',
      '7B ALFWorld 0.90, WebShop 0.73',
    ]

  def test_baselines(self):
    made = sweep.jobs(load('baselines'), pathlib.Path('R'), base='B.py')
    expected = {name: f'--config=B.py:{name}' for name in METHODS}
    # Longer and longer episodes are a setting of GRPO, not a method.
    expected['scaling_inter'] = '--config=B.py:grpo,scaling_inter'
    assert lines(made) == expected

  def test_nano(self):
    made = sweep.jobs(load('nano'), pathlib.Path('R'), base='B.py')
    assert list(lines(made).items()) == [
      ('grpo', '--config=B.py:grpo --config.seed=0'),
      ('planpo', '--config=B.py:planpo --config.seed=0'),
      ('grpo_seed1', '--config=B.py:grpo --config.seed=1'),
      ('planpo_seed1', '--config=B.py:planpo --config.seed=1'),
      ('grpo_seed2', '--config=B.py:grpo --config.seed=2'),
      ('planpo_seed2', '--config=B.py:planpo --config.seed=2'),
    ]

  def test_seeds_presets_and_overrides_come_in_this_order(self):
    """All runs of a seed, then the next; what the user gives is last."""
    two = sweep.Sweep(
      base='',
      runs=(
        sweep.Run('a', presets=('p', 'q'), overrides={'x.y': True}),
        sweep.Run('b'),
      ),
      seeds=(0, 1),
    )
    made = sweep.jobs(
      two,
      pathlib.Path('R'),
      base='B.py:first',
      presets=('smoke',),
      overrides=['--config.x.y=False', "--config.t=('u',)"],
    )
    given = "--config.x.y=False --config.t=('u',)"
    run_a, run_b = '--config=B.py:first,p,q,smoke', '--config=B.py:first,smoke'
    assert list(lines(made).items()) == [
      ('a', f'{run_a} --config.seed=0 --config.x.y=True {given}'),
      ('b', f'{run_b} --config.seed=0 {given}'),
      ('a_seed1', f'{run_a} --config.seed=1 --config.x.y=True {given}'),
      ('b_seed1', f'{run_b} --config.seed=1 {given}'),
    ]

  @pytest.mark.parametrize(
    'override, words',
    [
      ('--config.seed=4', 'all seeds'),
      ('--confg.seed=4', 'is not a flag'),
      ('--config=C.py', 'is not a flag'),
      ('5', 'is not a flag'),
    ],
  )
  def test_what_cannot_be_passed_on(self, override, words):
    two = dataclasses.replace(load('alpha'), seeds=(0, 1))
    with pytest.raises(sweep.SweepError, match=words):
      sweep.jobs(two, pathlib.Path('R'), base='B', overrides=[override])

  def test_only_keeps_the_order_and_names_the_known(self):
    made = sweep.jobs(load('alpha'), pathlib.Path('R'), base='B.py')
    kept = sweep.only(made, ['alpha_0', 'alpha_0.2'])
    assert [job.name for job in kept] == ['alpha_0.2', 'alpha_0']
    with pytest.raises(sweep.SweepError, match='alpha_1: unknown.*alpha_0.05'):
      sweep.only(made, ['alpha_0.2', 'alpha_1'])

  @pytest.mark.parametrize(
    'runs, seeds, words',
    [
      ((), (), 'at least one run'),
      ((sweep.Run('a/b'),), (), "'a/b'.*folder"),
      ((sweep.Run('..'),), (), 'folder'),
      ((sweep.Run('a'), sweep.Run('a')), (), 'two runs are called a;'),
      ((sweep.Run('a'), sweep.Run('a_seed1')), (0, 1), 'called a_seed1'),
      ((sweep.Run('a'),), (2, 2), 'called a_seed2'),
      ((sweep.Run('a'),), (-1,), 'at least 0'),
      ((sweep.Run('a', overrides={'seed': 3}),), (), r'seeds=\(3,\)'),
      ((sweep.Run('a', overrides={'x=y': 3}),), (), "overrides 'x=y'"),
    ],
  )
  def test_sweeps_that_make_no_sense(self, runs, seeds, words):
    with pytest.raises(sweep.SweepError, match=words):
      sweep.Sweep(base='B.py', runs=runs, seeds=seeds)

  @pytest.mark.parametrize(
    'text, words',
    [
      (None, 'No such file'),
      ('x = 1', "KeyError 'get_sweep'"),
      ('def get_sweep(variant): raise OSError("mine")', 'mine'),
      ('def get_sweep(variant): return [1]', 'returned list'),
    ],
  )
  def test_files_that_are_no_sweep(self, tmp_path, text, words):
    path = tmp_path / 'mine.py'
    if text is not None:
      path.write_text(text)
    with pytest.raises(sweep.SweepError, match=words):
      sweep.load(str(path))


def smoke_jobs(tmp_path, *runs, base=QUICKSTART, overrides=()):
  return sweep.jobs(
    sweep.Sweep(base='', runs=runs),
    tmp_path / 'root',
    base=base,
    presets=('smoke',) if base == QUICKSTART else (),
    overrides=overrides,
  )


class TestChecks:
  @pytest.mark.parametrize('name', ['ablations', 'alpha', 'baselines', 'nano'])
  def test_shipped_sweeps_can_be_started(self, name, tmp_path):
    made = smoke_jobs(tmp_path, *load(name).runs)
    configs = sweep.check(made, here=True)
    assert len(configs) == len(made)
    for job, config in zip(made, configs, strict=True):
      assert config['train']['steps'] == 3
      for key, value in job.run.overrides.items():
        section, method, leaf = key.split('.')
        assert config[section][method][leaf] == value

  def test_values_have_the_types_of_the_command_line(self, tmp_path):
    run = sweep.Run(
      'a',
      overrides={
        'optimizer.learning_rate': 1,
        'loss.ppo_clip.sampler_cap': 2,
        'env.task_types': ('boil', 'melt'),
        'model.remat': True,
      },
    )
    (config,) = sweep.check(smoke_jobs(tmp_path, run), here=True)
    assert repr(config['optimizer']['learning_rate']) == '1.0'
    assert repr(config['loss']['ppo_clip']['sampler_cap']) == '2.0'
    assert config['env']['task_types'] == ['boil', 'melt']
    assert config['model']['remat'] is True

  def test_every_mistake_is_told_at_once(self, tmp_path):
    made = smoke_jobs(
      tmp_path,
      sweep.Run('good'),
      sweep.Run('preset', presets=('grpoo',)),
      sweep.Run('key', overrides={'train.group_sise': 4}),
      sweep.Run('type', overrides={'train.steps': 'many'}),
      sweep.Run('rule', overrides={'train.group_size': 0}),
      sweep.Run('value', overrides={'advantage.planpo.as_group': 'flat'}),
    )
    with pytest.raises(sweep.SweepError) as error:
      sweep.check(made, here=True)
    told = dict(line.split(': ', 1) for line in str(error.value).splitlines())
    assert list(told) == ['preset', 'key', 'type', 'rule', 'value']
    for name, words in (
      ('preset', "'grpoo'"),
      ('key', 'config.train.group_size'),
      ('type', "'many'"),
      ('rule', 'train.group_size=0'),
      ('value', 'flat_success'),
    ):
      assert words in told[name]

  def test_one_mistake_of_all_runs_is_told_once(self, tmp_path):
    made = smoke_jobs(
      tmp_path,
      *(sweep.Run(name) for name in 'abcde'),
      overrides=['--config.train.steps=0'],
    )
    with pytest.raises(sweep.SweepError) as error:
      sweep.check(made, here=True)
    (line,) = str(error.value).splitlines()
    assert line.startswith('a, b, c and 2 more: train.steps=0')

  def test_a_pod_is_not_this_machine(self, tmp_path):
    """Commands that are printed may need more devices than there are here."""
    made = smoke_jobs(
      tmp_path,
      sweep.Run('a'),
      base=str(ROOT / 'configs' / 'sciworld_7b.py'),
      overrides=['--config.model.checkpoint=given'],
    )
    (config,) = sweep.check(made, here=False)
    assert config['mesh']['tensor'] == 4
    with pytest.raises(sweep.SweepError, match='mesh.tensor=4'):
      sweep.check(made, here=True)

  def test_a_finished_run_of_another_configuration_is_refused(self, tmp_path):
    made = smoke_jobs(tmp_path, sweep.Run('a'))
    (config,) = sweep.check(made, here=True)
    workdir = made[0].workdir
    workdir.mkdir(parents=True)
    config['train']['steps'] = 18
    for name, content in (
      ('config', config),
      ('eval_before', {}),
      ('summary', {}),
    ):
      (workdir / f'{name}.json').write_text(json.dumps(content))
    with pytest.raises(sweep.SweepError, match='train.steps: 18 there, 3 now'):
      sweep.check(made, here=True)

  def test_runs_do_not_share_a_dump(self, tmp_path):
    made = smoke_jobs(
      tmp_path,
      sweep.Run('a'),
      sweep.Run('b'),
      overrides=[f'--config.rollout.dump={tmp_path}/dump'],
    )
    with pytest.raises(sweep.SweepError, match='b: rollout.dump.*that of a'):
      sweep.check(made, here=True)

  def test_the_same_training_is_named(self):
    made = sweep.jobs(load('alpha'), pathlib.Path('R'), base='B.py')[:4]
    configs = [{'x': 1}, {'x': 2}, {'x': 1}, {'x': 1}]
    assert sweep.distinct(made, configs) == {
      'alpha_0.1': 'alpha_0.5',
      'alpha_0.05': 'alpha_0.5',
    }


# A training that writes what a sweep looks for, or does what its name says.
STUB = """
import json, os, pathlib, signal, sys, time
flags = dict(a.removeprefix('--').split('=', 1) for a in sys.argv[1:])
workdir = pathlib.Path(flags['workdir'])
with open(workdir.parent.parent / 'log', 'a') as log:
  log.write(workdir.name + '\\n')
workdir.mkdir(exist_ok=True)
(workdir / 'config.json').write_text('{"train": {}}')
if workdir.name == 'fails' and not (workdir / 'again').exists():
  (workdir / 'again').touch()
  sys.exit(3)
if workdir.name == 'killed':
  os.kill(os.getpid(), signal.SIGKILL)
if workdir.name == 'waits':
  got = []
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
  (workdir / 'ready').touch()
  while not got:
    time.sleep(0.01)
  time.sleep(0.5)  # For a second one to come.
  own_group = os.getpgrp() == os.getpid()
  (workdir / 'got').write_text(json.dumps([*got, own_group]))
  sys.exit(128 + got[0])
if 'config.rollout.replay' in flags:
  (workdir / 'checkpoints' / '3').mkdir(parents=True, exist_ok=True)
else:
  (workdir / 'summary.json').write_text(os.environ.get('STUB_SUMMARY', '{}'))
"""

SWEEP = """
from planpo_jax import sweep
def get_sweep(variant=''):
  runs = [sweep.Run(name, reason='why ' + name) for name in {names}]
  return sweep.Sweep(base='configs/quickstart.py', runs=tuple(runs))
"""


@pytest.fixture(name='stub')
def stub_training(tmp_path, monkeypatch):
  """Runs a sweep of the names given with stub trainings: (code, log)."""
  (tmp_path / 'stub.py').write_text(STUB)
  # Here, where jax is loaded; the last test has the process of its own.
  monkeypatch.setattr(sweep, 'check_apart', sweep.check)

  def start(names, *flags):
    (tmp_path / 'mine.py').write_text(SWEEP.format(names=names))
    (tmp_path / 'log').write_text('')
    code = launch_sweep.main(
      [
        f'--sweep={tmp_path}/mine.py',
        f'--workdir={tmp_path}/root',
        '--smoke',
        *flags,
      ],
      train=[sys.executable, str(tmp_path / 'stub.py')],
    )
    return code, (tmp_path / 'log').read_text().split()

  return start


def estimate(mean):
  return evaluate.Estimate(mean, mean, mean)


class TestRunning:
  # Each trains another task, or the second would be left out as the same.
  @pytest.fixture(autouse=True)
  def all_differ(self, monkeypatch):
    monkeypatch.setattr(sweep, 'distinct', lambda made, configs: {})

  def test_failures_are_told_and_the_rest_goes_on(self, stub, capsys):
    names = ['good', 'fails', 'killed', 'last']
    assert stub(names) == (1, names)
    captured = capsys.readouterr()
    table = [line.split(None, 1) for line in captured.out.splitlines()[:5]]
    assert [(row[0], row[1].rsplit(None, 1)[0]) for row in table] == [
      ('run', 'outcome'),
      ('good', 'finished'),
      ('fails', 'failed (exit code 3)'),
      ('killed', 'failed (SIGKILL)'),
      ('last', 'finished'),
    ]
    assert '[2/4] fails: failed (exit code 3)' in captured.err
    assert '[4/4] last: why last' in captured.err

  def test_the_same_command_runs_what_is_not_finished(self, stub, capsys):
    names = ['good', 'fails', 'last']
    assert stub(names)[0] == 1
    assert stub(names) == (0, ['fails'])
    assert 'good   finished before' in capsys.readouterr().out
    assert stub(names) == (0, [])

  def test_seeds_that_were_interrupted_go_on_in_their_order(self, stub):
    """A seed of all runs first, so that they can be compared early."""
    seeds = ['fails', 'good', 'fails_seed1', 'good_seed1']
    assert stub(['fails', 'good'], '--seeds=2') == (1, seeds)
    assert stub(['fails', 'good'], '--seeds=3') == (
      0,
      ['fails', 'fails_seed2', 'good_seed2'],
    )
    assert stub(['fails', 'good'], '--seeds=3') == (0, [])

  def test_a_summary_cut_in_half_is_not_finished(self, stub, tmp_path):
    assert stub(['good', 'last'])[0] == 0
    (tmp_path / 'root' / 'good' / 'summary.json').write_text('{"rows')
    assert stub(['good', 'last']) == (0, ['good'])

  def test_a_replay_is_finished_at_its_last_checkpoint(self, stub, tmp_path):
    flag = f'--config.rollout.replay={tmp_path}/dump'
    assert stub(['good'], flag) == (0, ['good'])
    folder = tmp_path / 'root' / 'good' / 'checkpoints'
    # As launch/train.py keeps it: the folder holds results to compare with.
    config = sweep.check(
      smoke_jobs(tmp_path / 'other', sweep.Run('good'), overrides=[flag]),
      here=True,
    )[0]
    (folder.parent / 'config.json').write_text(json.dumps(config))
    assert stub(['good'], flag) == (0, [])
    (folder / '3').rename(folder / '2')
    assert stub(['good'], flag) == (0, ['good'])

  def test_a_folder_is_for_one_sweep_at_a_time(self, stub, tmp_path, capsys):
    root = tmp_path / 'root'
    with sweep.claim(root):
      assert stub(['good']) == (2, [])
    assert f'another sweep is running in {root}' in capsys.readouterr().err
    assert stub(['good']) == (0, ['good'])
    (root / 'config.json').touch()
    assert stub(['last']) == (2, [])
    assert 'the folder of a single run' in capsys.readouterr().err

  def test_a_training_ends_with_a_sweep_that_is_killed(self, tmp_path):
    # It says when it is asked to save and end.
    training = (
      'import pathlib, signal, sys, time\n'
      'def end(*unused):\n'
      '  pathlib.Path(sys.argv[1]).write_text("ended")\n'
      '  sys.exit()\n'
      'signal.signal(signal.SIGTERM, end)\n'
      'pathlib.Path(sys.argv[1]).write_text("begun")\n'
      'time.sleep(60)\n'
    )
    said = tmp_path / 'said'
    command = [sys.executable, '-c', training, str(said)]
    parent = subprocess.Popen(
      [
        sys.executable,
        '-c',
        f'from planpo_jax import sweep; sweep._Child().run({command!r})',
      ],
      cwd=ROOT,
    )
    while not said.exists() or said.read_text() != 'begun':
      assert parent.poll() is None
      time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while said.read_text() != 'ended' and time.monotonic() < deadline:
      time.sleep(0.05)
    assert said.read_text() == 'ended'

  def test_a_folder_that_cannot_be_made_is_told(self, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(sweep.SweepError, match='file cannot be used'):
      sweep.claim(tmp_path / 'file')

  def test_only_and_seeds(self, stub):
    assert stub(['a', 'b'], '--only=b') == (0, ['b'])
    assert stub(['a', 'b'], '--seeds=2', '--only=b') == (0, ['b_seed1'])
    assert stub(['a', 'b'], '--seeds=3', '--only=a_seed2') == (0, ['a_seed2'])
    assert stub(['a', 'b'], '--seeds=2') == (0, ['a', 'a_seed1'])
    assert stub(['a', 'b'], '--seeds=2', '--only=c')[0] == 2
    assert stub(['a', 'b'], '--seeds=0')[0] == 2

  def test_results_are_laid_side_by_side(self, stub, capsys, monkeypatch):
    row = evaluate.Summary(
      8, 0, estimate(0.625), *map(estimate, (50.0, 6.5, 4.25, 20.5))
    )
    monkeypatch.setenv(
      'STUB_SUMMARY', json.dumps({'rows': {'after': row.to_json()}})
    )
    assert stub(['one', 'two'])[0] == 0
    out = capsys.readouterr().out
    found = [line.split()[:3] for line in out.splitlines() if '62.5' in line]
    assert found == [['one', '8', '62.5'], ['two', '8', '62.5']]

  def test_the_record_is_of_the_whole_sweep_and_keeps_another(
    self, stub, tmp_path
  ):
    stub(['a', 'b'], '--only=b')
    stub(['c'])
    entries = json.loads((tmp_path / 'root' / sweep.RECORD).read_text())['runs']
    assert [entry['name'] for entry in entries] == ['c', 'a', 'b']
    assert entries[1] == {
      'name': 'a',
      'run': 'a',
      'reason': 'why a',
      'published': '',
    }

  def test_the_record_tells_what_differs_in_its_seed_alone(
    self, stub, tmp_path
  ):
    stub(['a', 'b'], '--seeds=2', '--only=a')
    entries = json.loads((tmp_path / 'root' / sweep.RECORD).read_text())['runs']
    assert [(entry['name'], entry['run']) for entry in entries] == [
      ('a', 'a'),
      ('b', 'b'),
      ('a_seed1', 'a'),
      ('b_seed1', 'b'),
    ]

  def test_nothing_starts_when_one_run_has_a_mistake(
    self, stub, tmp_path, capsys
  ):
    code, log = stub(['a', 'b'], '--config.train.group_sise=4')
    assert (code, log) == (2, [])
    assert 'error: a, b: config.train.group_sise' in capsys.readouterr().err
    assert not (tmp_path / 'root').exists()


def test_the_same_training_is_left_out(stub, tmp_path, capsys):
  assert stub(['a', 'b']) == (0, ['a'])
  assert 'b is left out' in capsys.readouterr().err
  entries = json.loads((tmp_path / 'root' / sweep.RECORD).read_text())['runs']
  assert [(entry['name'], entry['reason']) for entry in entries] == [
    ('a', 'why a; b is the same')
  ]


def test_what_is_published_of_a_run_left_out_is_kept(tmp_path):
  made = sweep.jobs(load('ablations'), tmp_path, base='B.py')
  same = {'alpha_0': 'no_as'}
  sweep.write_record(tmp_path, made, same)
  entries = json.loads((tmp_path / sweep.RECORD).read_text())['runs']
  assert [entry['name'] for entry in entries] == [
    name for name in ABLATIONS if name != 'alpha_0'
  ]
  assert entries[1]['reason'].endswith('; alpha_0 is the same')
  first, second = entries[1]['published'].split('; of alpha_0: ')
  assert 'ALFWorld 1.5B 0.83' in first
  assert second == alpha.RUNS[-1].published


def test_print_is_a_command_a_line_and_nothing_else(stub, tmp_path, capsys):
  base = f'--base={QUICKSTART}'
  flag = "--config.env.task_types=('a b',)"
  assert stub(['a', 'b'], base, '--seeds=2', '--print', flag) == (0, [])
  out = capsys.readouterr().out.splitlines()
  # Runs a and b differ in nothing here, so two of the four are left out.
  assert [shlex.split(line) for line in out] == [
    [
      'python',
      'launch/train.py',
      f'--config={QUICKSTART}:smoke',
      f'--workdir={tmp_path}/root/{name}',
      f'--config.seed={seed}',
      flag,
    ]
    for name, seed in (('a', 0), ('a_seed1', 1))
  ]
  assert not (tmp_path / 'root').exists()


@pytest.mark.parametrize(
  'number, got',
  [
    (signal.SIGINT, signal.SIGINT),
    (signal.SIGTERM, signal.SIGTERM),
    # Of a terminal that goes; launch/train.py does not know it.
    (signal.SIGHUP, signal.SIGTERM),
  ],
)
def test_a_signal_reaches_the_run_once_and_ends_the_sweep(
  tmp_path, number, got
):
  """Which it would twice if it were of the same group of processes."""
  (tmp_path / 'stub.py').write_text(STUB)
  (tmp_path / 'root').mkdir()
  driver = f"""
import pathlib, sys
from planpo_jax import sweep
runs = tuple(sweep.Run(name) for name in ('waits', 'next'))
made = sweep.jobs(
  sweep.Sweep('', runs), pathlib.Path({str(tmp_path / 'root')!r}), base='B')
outcomes, code = sweep.train_all(
  made, [{{'rollout': {{'replay': ''}}}}] * 2,
  command=[sys.executable, {str(tmp_path / 'stub.py')!r}],
  say=lambda text: None)
print([o.text for o in outcomes])
sys.exit(code)
"""
  process = subprocess.Popen(
    [sys.executable, '-c', driver],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  folder = tmp_path / 'root' / 'waits'
  try:
    wait_until((folder / 'ready').exists, process)
  finally:
    send(process, number)
  out, _ = process.communicate(timeout=90)
  assert process.returncode == 128 + number
  # Two signals that come close together may count as one, hence the group.
  assert json.loads((folder / 'got').read_text()) == [got, True]
  assert out.strip() == "['stopped', 'not started']"
  assert not (tmp_path / 'root' / 'next').exists()


def test_a_signal_that_is_ignored_stays_so(tmp_path):
  """As nohup has it."""
  previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    outcomes, code = sweep.train_all(
      smoke_jobs(tmp_path, sweep.Run('a')),
      [{'rollout': {'replay': ''}}],
      command=[
        sys.executable,
        '-c',
        'import os, signal; os.kill(os.getppid(), signal.SIGHUP)',
      ],
      say=lambda text: None,
    )
  finally:
    signal.signal(signal.SIGHUP, previous)
  assert (outcomes[0].text, code) == ('finished', 0)


def send(process, number):
  """To its whole group, as a terminal does on Ctrl-C."""
  if process.poll() is None:
    os.killpg(process.pid, number)


def wait_until(happened, process, timeout_s=300):
  deadline = time.monotonic() + timeout_s
  while not happened():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline, 'it did not come'
    time.sleep(0.02)


def test_a_sweep_that_was_interrupted_goes_on(tmp_path):
  """Two real trainings: one ends, one is stopped, the same command ends it."""
  root = tmp_path / 'root'
  (tmp_path / 'two.py').write_text(
    'from planpo_jax import sweep\n'
    'def get_sweep(variant=""):\n'
    '  return sweep.Sweep("configs/sciworld_7b.py", (\n'
    '    sweep.Run("full", ("planpo",)),\n'
    '    sweep.Run("flat", ("grpo",), reason="outcomes alone",\n'
    '      published="0.5 (nobody)")), seeds=(0, 1))\n'
  )
  command = [
    sys.executable,
    'launch/sweep.py',
    f'--sweep={tmp_path}/two.py',
    f'--workdir={root}',
    '--base=configs/quickstart.py',
    '--only=flat',
    '--smoke',
    '--config.eval.episodes=2',
  ]
  process = subprocess.Popen(
    command,
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  metrics = root / 'flat_seed1' / 'metrics.jsonl'
  try:
    wait_until(
      lambda: metrics.exists() and '"step": 1' in metrics.read_text(), process
    )
  finally:
    send(process, signal.SIGINT)
  out, errors = process.communicate(timeout=60)
  assert process.returncode == 130, errors
  assert [line.split()[:2] for line in out.splitlines()[:3]] == [
    ['run', 'outcome'],
    ['flat', 'finished'],
    ['flat_seed1', 'stopped'],
  ]
  assert 'stopped and saved after step' in errors
  assert 'Traceback' not in errors

  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert '[1/2] flat: finished before' in done.stderr
  assert 'resuming after step' in done.stderr
  after = []
  for seed, name in enumerate(('flat', 'flat_seed1')):
    config = json.loads((root / name / 'config.json').read_text())
    assert (config['advantage']['name'], config['seed']) == ('grpo', seed)
    steps = [
      json.loads(line)['step']
      for line in (root / name / 'metrics.jsonl').read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 3, 3]
    summary = json.loads((root / name / 'summary.json').read_text())
    after.append(summary['rows']['after']['turns'])
  page = shlex.split(done.stdout.splitlines()[-1])
  assert page == ['python', 'launch/report.py', str(root)]
  report = subprocess.run(
    [sys.executable, *page[1:]], cwd=ROOT, capture_output=True, text=True
  )
  assert report.stdout.splitlines() == [
    str(root / name)
    for name in ('report.html', 'report_table.md', 'report_table.json')
  ], report.stderr
  text = (root / 'report.html').read_text()
  assert 'flat over 2 seeds' in text
  assert 'outcomes alone' in text and 'Published: 0.5 (nobody)' in text
  (method,) = json.loads((root / 'report_table.json').read_text())['methods']
  assert (method['method'], method['seeds']) == ('flat', [0, 1])
  assert method['after']['turns']['values'] == after
  assert method['after']['turns']['mean'] == pytest.approx(sum(after) / 2)
