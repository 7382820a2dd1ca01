"""Whole runs on the toy game: real service, real processes, nano policy."""

import collections
import io
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import quickstart
from planpo_jax import (
  checkpoint,
  dump,
  environment_record,
  metrics,
  optimizer,
  train,
  update,
)
from planpo_jax import config as config_lib
from planpo_jax.models import qwen2

ROOT = pathlib.Path(__file__).parent.parent


def smoke(**changes):
  config = quickstart.get_config('smoke')
  config.update_from_flattened_dict(changes)
  return config


def run(config, workdir):
  return train.train(config, workdir, metrics.Terminal(open(os.devnull, 'w')))


def final_state(config, workdir):
  shape = qwen2.SIZES['nano']
  policy = qwen2.create(shape, shape.vocab_size)
  like = update.create(
    qwen2.init_params(policy, jax.random.key(0)),
    optimizer.make(**config.optimizer),
  )
  kept = checkpoint.Checkpoints(workdir / 'checkpoints', keep=None)
  assert kept.latest_step() == config.train.steps
  return kept.restore(like)


def transcripts(workdir, name):
  return (workdir / 'transcripts' / name).read_text()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """An uninterrupted run, and a dump of what it played."""
  workdir = tmp_path_factory.mktemp('runs') / 'whole'
  config = smoke(**{'rollout.dump': str(workdir.parent / 'dump')})
  assert run(config, workdir) == 0
  return config, workdir


def test_a_run_leaves_what_the_report_reads(whole):
  config, workdir = whole
  lines = [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [(x['step'], x['kind']) for x in lines] == [
    (0, 'eval'),
    (1, 'train'),
    (2, 'train'),
    (3, 'train'),
    (3, 'eval'),
  ]
  for line in lines:
    if line['kind'] == 'train':
      assert line['rollout/episodes'] == 8
      assert line['rollout/faults'] == 0
      # The policy that is updated first is the one that sampled.
      assert line['loss/first_ratio_max'] == pytest.approx(1.0, abs=1e-5)
      assert line['loss/sampler_gap'] < 1e-4
      assert line['rollout/staleness'] == 0
      assert 0 < line['rollout/occupancy'] <= 1 + 1e-6
  summary = json.loads((workdir / 'summary.json').read_text())
  for row in summary['rows'].values():
    assert row['episodes'] == config.eval.episodes
  assert list((workdir / 'tb').glob('events*'))
  assert len(transcripts(workdir, 'train_000002.jsonl').splitlines()) == 8


@pytest.mark.parametrize('workers', [3, 7])
def test_timing_changes_nothing(whole, tmp_path, workers):
  """Random latency, other workers and slots used: the same run, bit for bit."""
  config, workdir = whole
  changes = {'env.workers': workers, 'env.server_flags': '--latency-ms=0,30'}
  # Which is what the other run chose.
  slow = smoke(**changes, **{'sampler.slots': 4})
  assert run(slow, tmp_path / 'slow') == 0
  for name in ('train_000001', 'train_000002', 'train_000003', 'eval_after'):
    name = f'{name}.jsonl'
    assert transcripts(tmp_path / 'slow', name) == transcripts(workdir, name)
  a, b = final_state(config, workdir), final_state(slow, tmp_path / 'slow')
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_dump_replayed_learns_the_same_to_the_bit(whole, tmp_path):
  """Without environments: there is no service, and no port to ask for one."""
  config, workdir = whole
  replayed = smoke(**{'rollout.replay': config.rollout.dump})
  assert run(replayed, tmp_path / 'replayed') == 0
  a, b = (
    final_state(config, workdir),
    final_state(config, tmp_path / 'replayed'),
  )
  jax.tree.map(np.testing.assert_array_equal, a, b)
  train_lines, replay_lines = (
    [
      json.loads(line)
      for line in (folder / 'metrics.jsonl').read_text().splitlines()
      if '"train"' in line
    ]
    for folder in (workdir, tmp_path / 'replayed')
  )
  for line, other in zip(train_lines, replay_lines, strict=True):
    for key in ('loss/total', 'loss/sampler_gap', 'rollout/turns'):
      assert line[key] == other[key]
  assert not (tmp_path / 'replayed' / 'summary.json').exists()
  # One file is a dump of one step.
  first = pathlib.Path(config.rollout.dump) / 'train_000001.jsonl.gz'
  one = smoke(**{'rollout.replay': str(first), 'train.steps': 1})
  assert run(one, tmp_path / 'one') == 0


def test_a_dump_that_does_not_fit_is_refused_before_anything_starts(
  whole, tmp_path
):
  config, _ = whole
  for changes, words in (
    ({'train.steps': 4}, 'lacks step 4'),
    ({'chat.context': 'window'}, "chat.context='conversation'"),
    ({'rollout.replay': str(tmp_path / 'none')}, 'no such file or folder'),
    ({'rollout.dump': 'x'}, 'plays nothing'),
  ):
    bad = smoke(**{'rollout.replay': config.rollout.dump} | changes)
    with pytest.raises(ValueError, match=words):
      run(bad, tmp_path / 'bad')
  assert not (tmp_path / 'bad').exists()


def test_a_dump_is_of_one_run_and_refused_before_anything_starts(
  whole, tmp_path
):
  config, workdir = whole
  (tmp_path / 'file').write_text('')
  for folder, words in (
    (config.rollout.dump, 'is not empty, and a dump holds one run'),
    (tmp_path / 'file', 'cannot be made'),
  ):
    with pytest.raises(config_lib.ConfigError, match=words):
      run(smoke(**{'rollout.dump': str(folder)}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  # The run that wrote it may go on.
  assert run(config, workdir) == 0


def test_programs_are_compiled_in_the_first_step_only(whole):
  """Lengths, numbers of turns and of rows differ from step to step."""
  _, workdir = whole
  lines = [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  counts = [x['compile/programs'] for x in lines if x['kind'] == 'train']
  assert len(counts) == 3 and counts[0] == counts[-1]
  assert (
    json.loads((workdir / 'config.json').read_text())['sampler']['slots'] == 4
  )


def test_the_next_rollouts_may_overlap_the_update(whole, tmp_path):
  """They are one step old, which is measured and weighed."""
  changes = {
    'rollout.overlap': True,
    'loss.ppo_clip.sampler_cap': 2.0,
    'eval.every': 2,
    # Large, so that one step changes the policy measurably.
    'optimizer.learning_rate': 1e-3,
    'optimizer.warmup_steps': 0,
  }
  folder = tmp_path / 'dump'
  ahead = smoke(**changes, **{'rollout.dump': str(folder)})
  assert run(ahead, tmp_path / 'ahead') == 0
  recorded = dump.Dump(folder)
  assert [recorded.staleness(step) for step in (1, 2, 3)] == [0, 1, 1]
  lines = [
    json.loads(line)
    for line in (tmp_path / 'ahead' / 'metrics.jsonl').read_text().splitlines()
  ]
  trained = [x for x in lines if x['kind'] == 'train']
  assert [x['rollout/staleness'] for x in trained] == [0, 1, 1]
  assert trained[0]['loss/sampler_gap'] < 1e-4
  for line in trained[1:]:
    assert line['loss/sampler_gap'] > 1e-2
    assert line['loss/sampler_kl'] > 1e-4
    # What is learnt from is still the policy's own score.
    assert line['loss/first_ratio_max'] == pytest.approx(1.0, abs=1e-5)
  # The first step is that of a run on-policy with the same settings.
  on_policy = {k: v for k, v in changes.items() if k != 'rollout.overlap'}
  assert run(smoke(**on_policy, **{'train.steps': 1}), tmp_path / 'on') == 0
  name = 'train_000001.jsonl'
  assert transcripts(tmp_path / 'ahead', name) == transcripts(
    tmp_path / 'on', name
  )


def test_a_deadline_cuts_episodes_off_and_the_run_goes_on(tmp_path):
  config = smoke(
    **{
      'rollout.deadline_s': 1.0,
      'env.server_flags': '--latency-ms=400,400',
      'train.steps': 1,
      'eval.episodes': 2,
    }
  )
  assert run(config, tmp_path / 'cut') == 0
  line = next(
    json.loads(line)
    for line in (tmp_path / 'cut' / 'metrics.jsonl').read_text().splitlines()
    if '"train"' in line
  )
  # Six turns of 0.4 s do not fit a second, one or two do.
  assert line['rollout/deadline_episodes'] == 1.0
  assert 1 <= line['rollout/deadline_turns'] <= 2
  assert line['rollout/faults'] == 0


def test_refills_and_horizons_in_a_live_run(tmp_path):
  """A random policy fails everywhere: each step plays all that is left.

  Of the 5 tasks of its type, 2 a step: 2, then lots of 2 and 1 more. Two turns
  in the first step, three later.
  """
  config = quickstart.get_config('grpo,smoke')
  config.update_from_flattened_dict(
    {
      'train.steps': 2,
      'train.max_refills': 5,
      'train.group_size': 2,
      'env.horizons': (2, 3),
      'env.horizon_steps': 1,
      'rollout.dump': str(tmp_path / 'dump'),
    }
  )
  assert run(config, tmp_path / 'run') == 0
  read = dump.Dump(tmp_path / 'dump')
  lines = [
    json.loads(line)
    for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    if '"train"' in line
  ]
  for step, turns, line in zip((1, 2), (2, 3), lines, strict=True):
    played = read.episodes(step)
    members = collections.Counter(e.task for e in played)
    assert set(members.values()) == {2}
    assert {e.member for e in played} == {0, 1}
    assert {len(e.turns) for e in played} == {turns}
    assert line['rollout/groups'] == len(members) > 2
    assert line['rollout/groups_learnt'] == 2
    assert line['advantage/groups_without_outcome_variance'] == 1.0
  # Replayed without refills, the step is as large as it was.
  again = config.copy_and_resolve_references()
  again.update_from_flattened_dict(
    {
      'train.max_refills': 0,
      'rollout.dump': '',
      'rollout.replay': str(tmp_path / 'dump'),
    }
  )
  assert run(again, tmp_path / 'again') == 0
  a, b = (final_state(config, tmp_path / name) for name in ('run', 'again'))
  jax.tree.map(np.testing.assert_array_equal, a, b)


def start(workdir, *overrides):
  return subprocess.Popen(
    [
      sys.executable,
      'launch/train.py',
      '--config=configs/quickstart.py:smoke',
      f'--workdir={workdir}',
      *overrides,
    ],
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
  )


def wait_for_step(workdir, step, process, timeout_s=120):
  """Returns when `step` is in metrics.jsonl."""
  deadline = time.monotonic() + timeout_s
  path = workdir / 'metrics.jsonl'
  while time.monotonic() < deadline:
    assert process.poll() is None, process.stderr.read()
    if path.exists() and f'"step": {step},' in path.read_text().replace(
      '"step": 0,', ''
    ):
      return
    time.sleep(0.05)
  raise AssertionError(f'step {step} did not come')


def processes(marker):
  """Command lines of living processes that contain `marker`."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
    try:
      if marker in path.read_bytes().decode(errors='replace'):
        found.append((path.parent / 'cmdline').read_text())
    except OSError:
      pass
  return found


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_interrupted_and_resumed_equals_uninterrupted(whole, tmp_path, number):
  config, workdir = whole
  cut = tmp_path / 'cut'
  process = start(cut)
  wait_for_step(cut, 1, process)
  process.send_signal(number)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 128 + number, errors
  assert 'stopped and saved after step' in errors
  assert 'Traceback' not in errors
  assert run(config, cut) == 0
  for name in ('train_000003.jsonl', 'eval_after.jsonl'):
    assert transcripts(cut, name) == transcripts(workdir, name)
  a, b = final_state(config, workdir), final_state(config, cut)
  jax.tree.map(np.testing.assert_array_equal, a, b)
  steps = [
    json.loads(line)['step']
    for line in (cut / 'metrics.jsonl').read_text().splitlines()
  ]
  assert steps == [0, 1, 2, 3, 3]


def test_kill_9_leaves_no_process_and_the_run_resumes(whole, tmp_path):
  config, workdir = whole
  cut = tmp_path / 'cut'
  os.environ['PLANPO_TEST_MARKER'] = marker = f'marker-{cut}'
  try:
    process = start(cut)
  finally:
    del os.environ['PLANPO_TEST_MARKER']
  wait_for_step(cut, 1, process)
  assert len(processes(marker)) >= 1 + config.env.workers
  process.kill()
  process.wait()
  deadline = time.monotonic() + 10
  while processes(marker) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not processes(marker)
  assert run(config, cut) == 0
  a, b = final_state(config, workdir), final_state(config, cut)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_finished_run_says_so_again(whole):
  config, workdir = whole
  before = transcripts(workdir, 'eval_after.jsonl')
  assert run(config, workdir) == 0
  assert transcripts(workdir, 'eval_after.jsonl') == before


def test_a_run_records_its_environment_and_warns_of_another(whole, tmp_path):
  config, workdir = whole
  played = {
    'name': 'toy',
    'version': 'toy 1',
    'split_sizes': {'dev': 96, 'test': 96, 'train': 192},
  }
  recorded = json.loads((workdir / 'environment.json').read_text())
  assert recorded == [{'step': 0, **played}]

  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  path = copy / 'environment.json'
  older = {'step': 0, **played, 'version': 'toy 0'}
  path.write_text(json.dumps([older]))
  warnings = []
  for _ in range(2):
    said = io.StringIO()
    assert train.train(config, copy, metrics.Terminal(said)) == 0
    lines = said.getvalue().splitlines()
    warnings.append([line for line in lines if 'warning' in line])
    # Known from now on, and no reason to warn again.
    assert json.loads(path.read_text()) == [older, {'step': 3, **played}]
  assert len(warnings[0]) == 1 and not warnings[1]
  for text in ("toy version 'toy 0'", "toy version 'toy 1'", 'step 3'):
    assert text in warnings[0][0]
  # Who evaluates it is told the same, and changes nothing.
  assert not environment_record.compare(copy, played)
  found = environment_record.compare(copy, played | {'version': 'toy 2'})
  assert found.startswith(
    "warning: this run was trained in toy version 'toy 1'"
  )
  assert "the service now has toy version 'toy 2'" in found
  assert len(json.loads(path.read_text())) == 2
  assert not environment_record.compare(tmp_path, played)

  path.write_text('[]')
  with pytest.raises(ValueError, match='environment.json is damaged'):
    run(config, copy)


def test_grpo_runs_by_its_name(tmp_path):
  config = smoke(**{'advantage.name': 'grpo', 'train.steps': 1})
  assert run(config, tmp_path / 'grpo') == 0


def test_window_context_runs(tmp_path):
  config = smoke(**{'chat.context': 'window', 'train.steps': 1})
  assert run(config, tmp_path / 'window') == 0


def test_another_configuration_is_refused(whole):
  _, workdir = whole
  with pytest.raises(config_lib.ConfigError, match='train.group_size: 4 there'):
    run(smoke(**{'train.group_size': 8}), workdir)


def test_a_damaged_checkpoint_is_named(whole, tmp_path):
  config, workdir = whole
  copy = tmp_path / 'copy'
  subprocess.run(['cp', '-r', workdir, copy], check=True)
  for path in (copy / 'checkpoints' / '3').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  with pytest.raises(checkpoint.CheckpointError) as error:
    run(config, copy)
  assert str(copy / 'checkpoints' / '3') in str(error.value)
  assert 'Remove that folder' in str(error.value)


def test_the_same_command_corrected_starts_after_a_bad_option(tmp_path):
  bad = smoke(**{'env.options': 'colour=red', 'train.steps': 1})
  with pytest.raises(ValueError, match='colour'):
    run(bad, tmp_path / 'run')
  # Nothing was played, so this is not the environment that the run began with.
  path = tmp_path / 'run' / 'environment.json'
  path.write_text('[{"step": 0, "name": "other"}]')
  config, said = smoke(**{'train.steps': 1}), io.StringIO()
  assert train.train(config, path.parent, metrics.Terminal(said)) == 0
  assert 'warning: up to' not in said.getvalue()
  assert [x['name'] for x in json.loads(path.read_text())] == ['toy']


def test_unknown_task_type_lists_the_known(tmp_path):
  config = smoke(**{'env.task_types': ('fetchh',)})
  with pytest.raises(ValueError, match='fetchh.*fetch'):
    run(config, tmp_path / 'run')


def test_unreachable_service_is_named(tmp_path):
  config = smoke(**{'env.address': '127.0.0.1:9'})
  with pytest.raises(ConnectionError, match='127.0.0.1:9'):
    run(config, tmp_path / 'run')


def launch(name, *flags):
  return subprocess.run(
    [sys.executable, f'launch/{name}.py', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_evaluate_reads_the_newest_checkpoint(whole, tmp_path):
  config, workdir = whole
  output = tmp_path / 'table.json'
  done = launch(
    'evaluate',
    f'--workdir={workdir}',
    '--split=dev,test',
    f'--output={output}',
  )
  assert done.returncode == 0, done.stderr
  assert 'step 3' in done.stdout and 'fetch' in done.stdout
  content = json.loads(output.read_text())
  assert content['evaluated']['step'] == 3
  assert content['evaluated']['workdir'] == str(workdir)
  row = content['splits']['test']['rows']['step 3']
  after = json.loads((workdir / 'summary.json').read_text())['rows']['after']
  # The same tasks with the same random keys and the same weights, whatever was
  # played before them.
  assert row == after


def test_evaluate_says_what_is_missing(tmp_path):
  done = launch('evaluate', f'--workdir={tmp_path}')
  assert done.returncode == 2
  assert 'no config.json' in done.stderr


def test_report_of_a_real_run(whole, tmp_path):
  _, workdir = whole
  page = tmp_path / 'page.html'
  done = launch('report', str(workdir), f'--output={page}')
  assert done.returncode == 0, done.stderr
  text = page.read_text()
  transcript = json.loads(
    transcripts(workdir, 'eval_after.jsonl').splitlines()[0]
  )
  assert transcript['goal'] in text
  assert 'http://' not in text.replace('http://www.w3.org', '')


def test_warm_start_writes_a_checkpoint_that_training_starts_from(tmp_path):
  output = tmp_path / 'policy'
  done = launch(
    'warmstart',
    '--config=configs/quickstart.py:smoke',
    f'--workdir={tmp_path / "warm"}',
    f'--output={output}',
    '--config.warmstart.repeats=1',
    '--config.warmstart.epochs=1',
    '--config.warmstart.minibatches=2',
    '--config.env.task_types=fetch',
  )
  assert done.returncode == 0, done.stderr
  assert {p.name for p in output.iterdir()} >= {
    'config.json',
    'model.safetensors',
    'tokenizer.json',
  }
  config = smoke(
    **{'model.checkpoint': str(output), 'model.tokenizer': '', 'train.steps': 1}
  )
  assert run(config, tmp_path / 'run') == 0


def test_a_damaged_model_checkpoint_is_named(tmp_path):
  config = smoke(**{'model.checkpoint': str(tmp_path / 'nowhere')})
  with pytest.raises(FileNotFoundError, match='nowhere'):
    run(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_signal_before_there_is_anything_to_save_ends_at_once(tmp_path):
  server = socket.create_server(('127.0.0.1', 0))  # Listens, never answers.
  address = f'127.0.0.1:{server.getsockname()[1]}'
  process = start(tmp_path / 'run', f'--config.env.address={address}')
  while 'connecting' not in process.stderr.readline():
    assert process.poll() is None
  time.sleep(0.5)
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=10)
  assert process.returncode == 130
  assert 'Traceback' not in errors
  assert not (tmp_path / 'run').exists()
  server.close()
