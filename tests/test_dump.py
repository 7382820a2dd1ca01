"""Dumps: what was written comes back to the bit, or an error says why not."""

import dataclasses
import gzip
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import make_episodes
import numpy as np
import pytest

from planpo_jax import dump, episodes

ODD = (
  'a\n"quoted"\\ \r\n\t\u2028\u2029\x00\x1f </script> é 火 \U0001f525 \ud83d'
)


def played() -> list[episodes.Episode]:
  """One episode of every ending, each field off its default."""
  rng = np.random.default_rng(0)
  turns = tuple(
    episodes.Turn(
      prompt_ids=(1, 2, 151_935),
      response_ids=(7, 8),
      response_logps=(
        float(np.float32(0.1) * np.float32(-1)),
        float(np.float32(-rng.exponential())),
      ),
      observation=ODD,
      response=f'{ODD} {t}',
      action='open door',
      reward=float(np.float32(1 / 3)),
      valid=t == 1,
      state_key=2**63 - 1 - t,
      truncated=t == 0,
      respond_s=0.25 + t,
      env_s=1 / 3,
    )
    for t in range(2)
  )
  task = episodes.Task('toy', 'train', 4, 'walk', 9, (('b', 'x'), ('c', 'y')))
  whole = [
    episodes.Episode(
      task=task,
      member=member,
      turns=turns,
      score=float(np.float32(16.7)),
      success=member == 0,
      ending=ending,
      goal=ODD,
      start_s=1.5,
      reset_s=0.1,
      dropped_pairs=2,
      recoveries=1,
    )
    for member, ending in enumerate(episodes.Ending)
    if ending is not episodes.Ending.FAULT
  ]
  fault = episodes.Episode(
    task, 5, (), 0.0, False, episodes.Ending.FAULT, 'the worker died'
  )
  return [*whole, fault]


def write(folder, name, step, played, context='conversation', **changes):
  header = {'context': context, 'temperature': 1.0} | changes
  return dump.write(folder, name, step, played, **header)


def fields(value):
  """Every field, those that equality leaves out among them."""
  return dataclasses.asdict(value)


def edit(path: pathlib.Path, change) -> None:
  """Writes a dump again after `change` of the list of its lines."""
  lines = gzip.decompress(path.read_bytes()).splitlines()
  records = [json.loads(line) for line in lines]
  change(records)
  text = ''.join(json.dumps(record) + '\n' for record in records)
  path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture(name='path')
def dump_path(tmp_path):
  return write(tmp_path / 'dump', 'train_000003', 3, played())


class TestRoundTrip:
  def test_every_field_comes_back(self, path):
    assert path.name == 'train_000003.jsonl.gz'
    found = dump.Dump(path.parent).episodes(3)
    assert found == played()
    assert list(map(fields, found)) == list(map(fields, played()))
    assert hash(found[0]) == hash(played()[0])

  def test_floats_are_equal_to_the_bit(self, tmp_path):
    logps = np.random.default_rng(1).normal(size=500).astype(np.float32)
    logps[:3] = [-0.0, np.finfo(np.float32).smallest_subnormal, 0.1]
    (turn,) = make_episodes.episode([1]).turns
    turn = dataclasses.replace(
      turn,
      response_ids=tuple(range(500)),
      response_logps=tuple(map(float, logps)),
    )
    episode = dataclasses.replace(make_episodes.episode([1]), turns=(turn,))
    write(tmp_path, 'train_000001', 1, [episode])
    (found,) = dump.Dump(tmp_path).episodes(1)
    got = np.array(found.turns[0].response_logps, np.float32)
    assert got.tobytes() == logps.tobytes()

  def test_numpy_scalars_are_numbers(self, tmp_path):
    (turn,) = make_episodes.episode([1]).turns
    turn = dataclasses.replace(
      turn,
      response_ids=(np.int32(7),),
      response_logps=(np.float32(-0.1),),
      reward=np.float32(0.1),
      valid=np.bool_(True),
    )
    episode = dataclasses.replace(make_episodes.episode([1]), turns=(turn,))
    write(tmp_path, 'train_000001', 1, [episode])
    (found,) = dump.Dump(tmp_path).episodes(1)
    assert found.turns[0] == turn
    assert type(found.turns[0].response_logps[0]) is float

  @pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
  def test_unbounded_scores_are_kept_as_strings(self, tmp_path, value):
    episode = make_episodes.episode([1], score=value)
    path = write(tmp_path, 'train_000001', 1, [episode])
    (found,) = dump.Dump(tmp_path).episodes(1)
    assert repr(found.score) == repr(value)
    line = gzip.decompress(path.read_bytes()).splitlines()[1]
    assert json.loads(line)['score'] == repr(value)

  @pytest.mark.parametrize('value', [math.nan, -math.inf])
  def test_unbounded_log_probability_is_refused(self, path, value):
    (turn,) = make_episodes.episode([1]).turns
    turn = dataclasses.replace(turn, response_logps=(value,))
    episode = dataclasses.replace(make_episodes.episode([1]), turns=(turn,))
    with pytest.raises(dump.DumpError, match='episode 1 .walk, member 0.'):
      write(path.parent, 'train_000003', 3, [played()[0], episode])
    assert os.listdir(path.parent) == [path.name]
    assert dump.Dump(path).episodes(3) == played()

  def test_no_episodes(self, tmp_path):
    write(tmp_path, 'train_000001', 1, [])
    assert dump.Dump(tmp_path).episodes(1) == []

  def test_equal_episodes_make_equal_files(self, tmp_path, path):
    again = write(tmp_path / 'other', 'train_000007', 3, played())
    assert again.read_bytes() == path.read_bytes()
    assert path.read_bytes()[4:8] == bytes(4)  # Where gzip puts the time.


class TestFormat:
  def test_lines_are_ascii_with_plain_keys(self, path):
    lines = gzip.decompress(path.read_bytes()).split(b'\n')
    assert all(line.isascii() for line in lines) and lines.pop() == b''
    header, first, *_ = map(json.loads, lines)
    assert header == {
      'format': 'planpo_jax.episodes',
      'version': 1,
      'step': 3,
      'episodes': 4,
      'context': 'conversation',
      'temperature': 1.0,
      'staleness': 0,
    }
    assert len(lines) == 5
    assert first['task']['options'] == [['b', 'x'], ['c', 'y']]
    assert first['turns'][0]['state_key'] == 2**63 - 1
    assert first['ending'] == 'terminated'

  @pytest.mark.parametrize('kind', [episodes.Episode, episodes.Turn])
  def test_docstring_and_files_hold_every_field(self, path, kind):
    names = {field.name for field in dataclasses.fields(kind)}
    record = json.loads(gzip.decompress(path.read_bytes()).splitlines()[1])
    if kind is episodes.Turn:
      record = record['turns'][0]
    assert set(record) == names
    assert names <= set(dump.__doc__.split())

  def test_unknown_keys_are_ignored(self, path):
    def change(records):
      records[0]['host'] = 'x'
      records[1]['later'] = [1]
      records[1]['task']['later'] = 1
      records[1]['turns'][0]['later'] = None

    edit(path, change)
    assert dump.Dump(path).episodes(3) == played()


class TestFolder:
  def test_steps_are_those_of_training(self, path):
    folder = path.parent
    write(folder, 'train_000001', 1, played()[:1])
    write(folder, 'eval_before', 0, played())
    (folder / 'train_000009.jsonl.gz.part').write_bytes(b'half')
    (folder / 'notes.txt').write_text('mine')
    found = dump.Dump(folder)
    assert found.steps == (1, 3)
    assert found.episodes(1) == played()[:1]

  def test_steps_ascend_whatever_the_names(self, tmp_path):
    for step in (1_000_000, 999_999):
      write(tmp_path, f'train_{step:06d}', step, [])
    assert dump.Dump(tmp_path).steps == (999_999, 1_000_000)

  @pytest.mark.parametrize('context', ['conversation', 'window'])
  def test_context(self, tmp_path, context):
    for step in (1, 2):
      write(tmp_path, f'train_{step:06d}', step, played(), context)
    assert dump.Dump(tmp_path).context == context

  def test_temperature_and_staleness(self, tmp_path):
    for step in (1, 2):
      name = f'train_{step:06d}'
      write(tmp_path, name, step, [], temperature=0.7, staleness=step - 1)
    found = dump.Dump(tmp_path)
    assert found.temperature == 0.7
    assert [found.staleness(step) for step in (1, 2)] == [0, 1]
    write(tmp_path, 'train_000003', 3, [])
    with pytest.raises(dump.DumpError, match='context or temperature'):
      dump.Dump(tmp_path)

  def test_one_file(self, path):
    write(path.parent, 'train_000001', 1, played())
    assert dump.Dump(path).steps == (3,)

  def test_files_are_read_when_asked_for(self, path):
    other = write(path.parent, 'train_000004', 4, played() * 50)
    whole = other.read_bytes()
    other.write_bytes(whole[: len(whole) // 2])
    found = dump.Dump(path.parent)
    assert found.steps == (3, 4) and found.episodes(3) == played()
    with pytest.raises(
      dump.DumpError, match='000004.jsonl.gz: the file is cut'
    ):
      found.episodes(4)

  def test_an_older_file_is_replaced(self, path):
    (path.parent / 'train_000003.jsonl.gz.part').write_bytes(b'half')
    write(path.parent, 'train_000003', 3, played()[:1])
    assert os.listdir(path.parent) == [path.name]
    assert dump.Dump(path.parent).episodes(3) == played()[:1]


class TestErrors:
  def test_nothing_there(self, tmp_path):
    with pytest.raises(dump.DumpError, match='none: no such file or folder'):
      dump.Dump(tmp_path / 'none')
    with pytest.raises(
      dump.DumpError, match=r'no train_\*.jsonl.gz. A dump is'
    ):
      dump.Dump(tmp_path)

  @pytest.mark.parametrize('kept', [0, 5, 30, -1, -9])
  def test_a_cut_file(self, path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(dump.DumpError, match=path.name):
      dump.Dump(path).episodes(3)

  def test_damage(self, path):
    content = bytearray(path.read_bytes())
    content[-8] ^= 1  # Of the checksum.
    path.write_bytes(content)
    with pytest.raises(dump.DumpError, match='cut or damaged'):
      dump.Dump(path).episodes(3)

  def test_not_compressed(self, path):
    path.write_bytes(gzip.decompress(path.read_bytes()))
    with pytest.raises(dump.DumpError, match='cut or damaged'):
      dump.Dump(path)

  @pytest.mark.parametrize(
    'key, value, message',
    [
      ('format', 'other', 'not the header of a dump'),
      ('version', 2, 'version 2 of the format, and version 1 is what is read'),
      ('step', '3', "line 1: step is '3'"),
      ('context', None, 'line 1: context is None'),
      ('temperature', 'x', "line 1: temperature is 'x'"),
      ('staleness', None, 'line 1: staleness is None'),
      ('episodes', 5, 'tells of 5 episodes and there are 4'),
    ],
  )
  def test_header(self, path, key, value, message):
    edit(path, lambda records: records[0].update({key: value}))
    with pytest.raises(dump.DumpError, match=message):
      dump.Dump(path).episodes(3)

  def test_no_header(self, path):
    edit(path, lambda records: records.pop(0))
    with pytest.raises(dump.DumpError, match='not the header of a dump'):
      dump.Dump(path)

  def test_a_step_twice(self, path):
    write(path.parent, 'train_000004', 3, played())
    with pytest.raises(
      dump.DumpError,
      match='3.jsonl.gz and train_000004.jsonl.gz are both of step 3',
    ):
      dump.Dump(path.parent)

  def test_two_contexts(self, path):
    write(path.parent, 'train_000004', 4, played(), 'window')
    with pytest.raises(
      dump.DumpError,
      match='3.jsonl.gz: conversation, 1.0, train_000004.jsonl.gz: window',
    ):
      dump.Dump(path.parent)

  def test_a_step_it_lacks(self, path):
    for step in (1, 2, 7):
      write(path.parent, f'train_{step:06d}', step, [])
    with pytest.raises(dump.DumpError, match='of step 4, only of 1 to 3, 7;'):
      dump.Dump(path.parent).episodes(4)

  @pytest.mark.parametrize(
    'place, key',
    [((), key) for key in dump._EPISODE]
    + [(('task',), key) for key in dump._TASK]
    + [(('turns', 1), key) for key in dump._TURN],
  )
  def test_a_missing_key_is_named_with_its_line(self, path, place, key):
    def change(records):
      at = records[2]
      for part in place:
        at = at[part]
      del at[key]

    edit(path, change)
    with pytest.raises(dump.DumpError) as caught:
      dump.Dump(path).episodes(3)
    assert f'{path}: line 3: ' in str(caught.value)
    assert f'the key {key!r} is missing' in str(caught.value)

  @pytest.mark.parametrize(
    'key, value, message',
    [
      ('ending', 'lost', "ending: 'lost' is none of terminated, tr"),
      ('success', 1, 'success: 1 is not true or false'),
      ('score', 'high', "score: 'high' is not a number"),
      ('goal', None, 'goal: None is not a string'),
      ('member', 1.5, 'member: 1.5 is not an integer'),
      ('turns', {}, 'turns: {} is not a list'),
      ('turns', [3], 'turns: turn 0: 3 stands where an object should'),
      ('task', [], 'task: .. stands where an object should'),
    ],
  )
  def test_a_value_of_the_wrong_kind(self, path, key, value, message):
    edit(path, lambda records: records[1].update({key: value}))
    with pytest.raises(dump.DumpError, match=f'line 2: {message}'):
      dump.Dump(path).episodes(3)

  @pytest.mark.parametrize(
    'key, value',
    [
      ('response_ids', [1.5]),
      ('prompt_ids', [3, -1]),
      ('response_logps', [math.nan]),
      ('response_logps', [None]),
    ],
  )
  def test_tokens_of_the_wrong_kind(self, path, key, value):
    edit(path, lambda records: records[1]['turns'][0].update({key: value}))
    with pytest.raises(dump.DumpError, match=f'turns: turn 0: {key}: '):
      dump.Dump(path).episodes(3)

  def test_a_line_that_is_no_json(self, path):
    content = gzip.decompress(path.read_bytes()) + b'{"task":\n'
    path.write_bytes(gzip.compress(content))
    with pytest.raises(dump.DumpError, match='line 6: Expecting value'):
      dump.Dump(path).episodes(3)


class TestKill:
  def test_a_killed_writer_leaves_a_whole_file(self, path):
    """Killed in the middle of a file, the old one stays and can be replaced."""
    code = textwrap.dedent(f"""
      import pathlib, sys
      sys.path[:0] = {[str(p) for p in ('.', 'tests')]!r}
      import make_episodes
      from planpo_jax import dump
      class Endless(list):
        def __iter__(self):
          while True:
            yield from super().__iter__()
      dump.write(pathlib.Path({str(path.parent)!r}), 'train_000003', 3,
                 Endless([make_episodes.episode([40] * 10)]),
                 context='window', temperature=1.0)
    """)
    root = pathlib.Path(__file__).parent.parent
    part = path.with_name(path.name + '.part')
    process = subprocess.Popen([sys.executable, '-c', code], cwd=root)
    try:
      while not (part.exists() and part.stat().st_size > 50_000):
        assert process.poll() is None
        time.sleep(0.01)
    finally:
      process.send_signal(signal.SIGKILL)
      process.wait()
    assert sorted(os.listdir(path.parent)) == [path.name, part.name]
    assert dump.Dump(path.parent).steps == (3,)
    assert dump.Dump(path.parent).episodes(3) == played()
    write(path.parent, 'train_000003', 3, played()[:1])
    assert os.listdir(path.parent) == [path.name]
    assert dump.Dump(path.parent).episodes(3) == played()[:1]
