"""What a run writes about itself."""

import io
import json
import math

from planpo_jax import episodes, metrics


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
  writer = metrics.Writer(tmp_path, 0)
  for step in range(4):
    writer.write(step, 'train', {'a': step})
  writer.close()
  with (tmp_path / 'metrics.jsonl').open('a') as f:
    f.write('[1]\n{"a": 1}\n')  # Not ours.
    f.write('{"step": 1, "cut')  # Killed while writing.
  writer = metrics.Writer(tmp_path, 2)
  writer.write(3, 'train', {'a': 30})
  writer.close()
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['a'] for line in lines] == [0, 1, 2, 30]


def test_not_a_number_becomes_null(tmp_path):
  writer = metrics.Writer(tmp_path, 0)
  writer.write(1, 'train', {'a': math.nan, 'b': math.inf, 'c': 1})
  writer.close()
  line = json.loads((tmp_path / 'metrics.jsonl').read_text())
  assert (line['a'], line['b'], line['c']) == (None, None, 1.0)


def test_tensorboard_reads_the_scalars(tmp_path):
  from tensorboard.backend.event_processing import event_accumulator

  writer = metrics.Writer(tmp_path, 0)
  writer.write(1, 'train', {'rollout/success': 0.25})
  writer.write(2, 'train', {'rollout/success': 0.5})
  writer.close()
  events = event_accumulator.EventAccumulator(str(tmp_path / 'tb'))
  events.Reload()
  read = [(e.step, e.value) for e in events.Scalars('rollout/success')]
  assert read == [(1, 0.25), (2, 0.5)]


def test_rollout_scalars_leave_faults_out():
  turn = episodes.Turn((), (1, 2), (0.0, 0.0), '', '', '', 0.0, True, 0)
  task = episodes.Task('toy', 'train', 0, 'fetch')
  ending = episodes.Ending
  scalars = metrics.rollout_scalars(
    [
      episodes.Episode(task, 0, (turn,) * 2, 100.0, True, ending.TERMINATED),
      episodes.Episode(task, 1, (turn,) * 4, 0.0, False, ending.TRUNCATED),
      episodes.Episode(task, 2, (), 0.0, False, ending.FAULT),
    ]
  )
  assert scalars['rollout/success'] == 0.5
  assert scalars['rollout/turns'] == 3.0
  assert scalars['rollout/turns_success'] == 2.0
  assert scalars['rollout/truncated_episodes'] == 0.5
  assert (scalars['rollout/episodes'], scalars['rollout/faults']) == (2, 1)


def test_a_plain_stream_gets_whole_lines():
  stream = io.StringIO()
  terminal = metrics.Terminal(stream)
  terminal.say('one')
  terminal.progress('two')
  terminal.progress('too soon after two')
  assert '\r' not in stream.getvalue()
  assert stream.getvalue().count('\n') == 2


def test_duration():
  assert metrics.duration(61.9) == '1:01'
  assert metrics.duration(3661) == '1:01:01'


def test_warnings_name_what_needs_attention():
  calm = {
    'advantage/groups_without_outcome_variance': 0.3,
    'advantage/signal_without_outcome_variance': 0.0,
    'loss/nonfinite_updates': 0.0,
    'loss/skipped_updates': 0.0,
    'loss/sampler_gap': 1e-5,
    'rollout/faults': 0,
    'rollout/staleness': 0.0,
    'rollout/deadline_episodes': 0.0,
  }
  assert metrics.warnings(calm, 'float32') == []
  for key, value, word in (
    ('advantage/groups_without_outcome_variance', 0.9, '90%'),
    ('loss/skipped_updates', 1.0, 'nothing to learn'),
    ('loss/sampler_gap', 0.5, '0.500'),
    ('rollout/faults', 3, 'faults'),
    ('rollout/deadline_episodes', 0.25, '25% of the episodes'),
  ):
    (said,) = metrics.warnings(calm | {key: value}, 'float32')
    assert word in said
  lost = {'skipped_updates': 2.0, 'nonfinite_updates': 2.0}
  for section, network in (('loss', 'policy'), ('critic', 'critic')):
    spoilt = {f'{section}/{key}': value for key, value in lost.items()}
    (said,) = metrics.warnings(calm | spoilt, 'float32')
    assert f'2 updates of the {network}' in said and 'learning rate' in said
  # Where the method learns from half of them, 45 % of the groups are idle.
  tied = {'advantage/groups_without_outcome_variance': 0.9}
  taught = {'advantage/signal_without_outcome_variance': 0.5}
  assert metrics.warnings(calm | tied | taught, 'float32') == []
  # Episodes of an older policy differ by rights.
  stale = {'rollout/staleness': 1.0, 'loss/sampler_gap': 0.5}
  assert metrics.warnings(calm | stale, 'float32') == []
  # Rounding makes as much of it in 16 bits.
  rounded = calm | {'loss/sampler_gap': 0.2}
  assert metrics.warnings(rounded, 'bfloat16') == []
  assert len(metrics.warnings(rounded, 'float32')) == 1
