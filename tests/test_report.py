"""The report: what it reads, what it concludes, and that no text can act."""

import base64
import dataclasses
import gzip
import hashlib
import html.parser
import json
import math
import pathlib
import re
import subprocess
import sys

import make_episodes
import pytest

from launch import report
from planpo_jax import dump, episodes, sweep
from planpo_jax.report import charts, page, seeds, verdict
from planpo_jax.report import runs as runs_lib

HOSTILE = (
  '</script><img src=x onerror=alert(1)><!--<script>\u2028\u2029\udfff\ud800'
  '"\'&lt; $title ${style} \x00\u202e'
)
# What a reader sees: hidden characters are spelt out, the rest is unchanged.
HOSTILE_SHOWN = (
  '</script><img src=x onerror=alert(1)><!--<script>\u2028\u2029\\udfff\\ud800'
  '"\'&lt; $title ${style} \\u0000\\u202e'
)


def write_lines(path: pathlib.Path, records, ending: str = '') -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(record) + '\n' for record in records]
  path.write_text(''.join(lines) + ending)


def row(success=0.4, low=0.3, high=0.5, **more):
  return {
    'episodes': 120,
    'success': success,
    'success_ci': [low, high],
    'score': 55.14,
    'score_ci': [50.0, 60.0],
    'turns': 8.0,
    'turns_ci': [7.5, 8.5],
    'turns_success': 6.0,
    'turns_success_ci': [5.5, 6.5],
    'response_tokens': 20.0,
    'response_tokens_ci': [19.0, 21.0],
    'faults': 0,
    **more,
  }


def episode(index=0, text='look', success=True, turns=1, task_type='boil'):
  return {
    'step': 3,
    'split': 'train',
    'task': {'env': 'toy', 'split': 'train', 'index': index, 'name': task_type},
    'member': 0,
    'goal': text,
    'score': 100.0,
    'success': success,
    'ending': 'terminated',
    'return': 10.0,
    'turns': [
      {
        'observation': text,
        'response': text,
        'action': text,
        'valid': True,
        'reward': 1.0,
        'tokens': 7,
        'truncated': False,
      }
    ]
    * turns,
  }


def make_run(path: pathlib.Path, *, name='planpo', before=None, after=None):
  """A small finished run."""
  path.mkdir(parents=True)
  config = {
    'seed': 0,
    'train': {'steps': 2, 'group_size': 8},
    'advantage': {'name': name, 'planpo': {'alpha': 0.5}, 'grpo': {'eps': 1}},
  }
  (path / 'config.json').write_text(json.dumps(config))
  write_lines(
    path / 'metrics.jsonl',
    [
      {'step': 0, 'kind': 'eval', 'eval/success': 0.25},
      {'step': 1, 'kind': 'train', 'time': 9.0, 'rollout/success': 0.25},
      {'step': 1, 'kind': 'progress', 'episodes': 12},
      {'step': 2, 'kind': 'train', 'rollout/success': 0.5, 'odd/key': 7.0},
    ],
  )
  rows = {'before': before or row(), 'after': after or row(0.8, 0.7, 0.9)}
  (path / 'summary.json').write_text(
    json.dumps({'split': 'test', 'rows': rows})
  )
  write_lines(path / 'transcripts' / 'eval_after.jsonl', [episode()])
  return path


def load(path: pathlib.Path, *, episodes_per_file=40, budget=10**7):
  (run,) = runs_lib.load_all(
    [path], episodes_per_file=episodes_per_file, transcript_bytes=budget
  )
  return run


class Page(html.parser.HTMLParser):
  """What a browser's parser would make of a page."""

  def __init__(self, source: str):
    super().__init__()
    self.elements = []  # (tag, attributes)
    self.scripts = {}  # id -> text
    self.text = ''
    self._raw = None
    self.feed(source)
    self.close()

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    if tag in ('script', 'style'):
      self._raw = dict(attributes).get('id', tag)

  def handle_endtag(self, tag):
    if tag in ('script', 'style'):
      self._raw = None

  def handle_data(self, data):
    if self._raw:
      self.scripts[self._raw] = self.scripts.get(self._raw, '') + data
    else:
      self.text += data

  def tags(self, name):
    return [attributes for tag, attributes in self.elements if tag == name]

  def json(self, name):
    return json.loads(self.scripts[name])


def render(*paths: pathlib.Path) -> Page:
  runs = runs_lib.load_all(paths, episodes_per_file=40, transcript_bytes=10**7)
  return Page(page.render(runs, written='today'))


@pytest.fixture(name='hostile')
def hostile_run(tmp_path):
  """A run in which every text, name and key attacks the page."""
  path = tmp_path / 'h<img src=x onerror=alert(2)>'
  attack = row(by_type={HOSTILE: row()})
  make_run(path, before=attack, after=attack)
  config = {
    'seed': HOSTILE,
    'env': {'name': HOSTILE, HOSTILE: HOSTILE},
    'rollout': {'dump': HOSTILE, 'replay': HOSTILE},
  }
  (path / 'config.json').write_text(json.dumps(config))
  rows = {'before': attack, 'after': attack, HOSTILE: attack}
  (path / 'summary.json').write_text(
    json.dumps({'split': HOSTILE, 'rows': rows})
  )
  write_lines(
    path / 'metrics.jsonl',
    [{'step': 1, 'kind': kind, HOSTILE: 1.0} for kind in ('train', HOSTILE)],
  )
  write_lines(
    path / 'transcripts' / 'train_<b>.jsonl',
    [episode(text=HOSTILE, task_type=HOSTILE)],
  )
  return path


class TestNothingActs:
  def test_hostile_text_makes_no_element(self, hostile):
    one, two = (make_run(hostile.parent / name) for name in ('one', 'two'))
    seen, plain = render(hostile, two), render(one, two)
    assert not seen.tags('img')
    assert len(seen.tags('script')) == len(plain.tags('script')) == 3
    assert {tag for tag, _ in seen.elements} <= {
      tag for tag, _ in plain.elements
    }
    handlers = [
      key
      for _, attributes in seen.elements
      for key in attributes
      if key.startswith('on')
    ]
    assert not handlers

  def test_hostile_text_arrives_unchanged(self, hostile):
    seen = render(hostile)
    files = seen.json('transcripts-data')['files']
    (shown,) = (
      file['episodes'][0] for file in files if file['name'] == 'train_<b>'
    )
    turn = shown['turns'][0]
    for text in (
      shown['goal'],
      shown['type'],
      *map(turn.get, ('observation', 'response', 'action')),
    ):
      assert text == HOSTILE_SHOWN
    assert HOSTILE_SHOWN in seen.text  # Split, task type and settings.

  def test_embedded_json_is_ascii_without_angle_brackets(self):
    encoded = runs_lib.embed_json({'a': HOSTILE})
    assert encoded.isascii() and '<' not in encoded
    assert json.loads(encoded) == {'a': HOSTILE}

  def test_page_with_lone_surrogates_can_be_written(self, hostile):
    page.write([hostile])
    assert (hostile / 'report.html').read_text('utf-8')

  def test_policy_allows_this_style_and_script_only(self, hostile):
    seen = render(hostile)
    (policy,) = (
      attributes['content']
      for attributes in seen.tags('meta')
      if attributes.get('http-equiv') == 'Content-Security-Policy'
    )
    assert "default-src 'none'" in policy and 'unsafe' not in policy
    for source in (seen.scripts['script'], seen.scripts['style']):
      digest = hashlib.sha256(source.encode()).digest()
      assert base64.b64encode(digest).decode() in policy

  def test_page_loads_nothing(self, hostile):
    seen = render(hostile)
    links = [
      attributes[key]
      for _, attributes in seen.elements
      for key in ('src', 'href', 'action', 'data', 'srcset')
      if key in attributes
    ]
    assert links == ['#transcripts']
    assert 'url(' not in seen.scripts['style']
    assert '@import' not in seen.scripts['style']

  def test_script_writes_text_only(self):
    script = (pathlib.Path(page.__file__).parent / 'page.js').read_text()
    for sink in (
      'innerHTML',
      'outerHTML',
      'insertAdjacent',
      'document.write',
      'eval',
      'fetch',
      'import',
    ):
      assert sink not in script.replace('evaluat', '')


class TestReading:
  def test_run_in_progress(self, tmp_path):
    path = make_run(tmp_path / 'run')
    (path / 'summary.json').write_text('{"split": "te')
    with (path / 'metrics.jsonl').open('a') as file:
      file.write('{"step": 3, "kind": "tr')
    with (path / 'transcripts' / 'eval_after.jsonl').open('a') as file:
      file.write('{"step": 3, "tur')
    run = load(path)
    assert run.last_step == 2
    assert run.rows == {}
    assert run.transcripts[0].total == 1
    # The cut last lines are no news; the cut summary and the state are.
    assert len(run.notes) == 2
    assert 'summary.json does not hold' in run.notes[0]
    assert 'in progress' in run.notes[1]
    seen = render(path)
    assert '2 steps so far, no closing evaluation yet' in seen.text
    assert '38% of the episodes succeeded' in seen.text

  def test_run_before_its_first_step(self, tmp_path):
    path = tmp_path / 'run'
    path.mkdir()
    (path / 'config.json').write_text('{"seed": 0}')
    seen = render(path)
    assert 'Training has not begun' in seen.text
    assert 'No transcripts were written yet' in seen.text

  def test_unreadable_lines_are_counted_and_skipped(self, tmp_path):
    path = make_run(tmp_path / 'run')
    (path / 'metrics.jsonl').write_bytes(
      b'{"step": 1, "kind": "train", "a": 1}\n'
      b'\xff\xfe\n[1]\n{"a": 3}\n'
      b'{"step": 2, "kind": "train", "a": 2}\n'
    )
    run = load(path)
    assert run.metrics == {('train', 'a'): [(1.0, 1.0), (2.0, 2.0)]}
    assert run.notes == (
      'metrics.jsonl: 3 unreadable of 5 lines were skipped.',
    )

  def test_only_finite_numbers_are_metrics(self, tmp_path):
    path = make_run(tmp_path / 'run')
    (path / 'metrics.jsonl').write_text(
      '{"step": 1, "kind": "train", "a": NaN, "b": null, "c": true,'
      ' "d": "x", "e": Infinity, "f": 2, "g": 1' + '0' * 400 + '}\n'
    )
    assert load(path).metrics == {('train', 'f'): [(1.0, 2.0)]}

  def test_steps_repeated_after_a_resume_take_the_later_line(self, tmp_path):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'metrics.jsonl',
      [
        {'step': step, 'kind': 'train', 'a': value}
        for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7), (3, 0.8))
      ],
    )
    points = load(path).metrics['train', 'a']
    assert points == [(1, 0.1), (2, 0.7), (3, 0.8)]

  def test_names_are_the_shortest_that_differ(self, tmp_path):
    paths = [tmp_path / name for name in ('a/x', 'b/x', 'b/y')]
    for path in paths:
      make_run(path)
    runs = runs_lib.load_all(paths, episodes_per_file=1, transcript_bytes=10**6)
    assert [run.name for run in runs] == ['a/x', 'b/x', 'y']

  def test_episodes_with_wrong_types_are_shown_as_far_as_they_go(
    self, tmp_path
  ):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'transcripts' / 'train_000001.jsonl',
      [{'task': 7, 'turns': [3, {'response': ['x'], 'reward': 'y'}]}, {}],
    )
    first, second = map(json.loads, load(path).transcripts[1].episodes)
    assert first['total_turns'] == 1
    assert first['turns'][0]['response'] == '["x"]'
    assert first['turns'][0]['reward'] is None
    assert second['turns'] == [] and second['success'] is False


class TestTranscriptsKept:
  def test_long_files_are_sampled_evenly(self, tmp_path):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'transcripts' / 'eval_after.jsonl',
      [episode(index=i) for i in range(100)],
    )
    (file,) = load(path, episodes_per_file=4).transcripts
    kept = [json.loads(text)['index'] for text in file.episodes]
    assert (file.total, kept) == (100, [0, 25, 50, 75])
    runs = [load(path, episodes_per_file=4)]
    assert '4 of 100 episodes' in Page(page.render(runs, written='')).text

  @pytest.mark.parametrize('budget', [20_000, 3_000, 100])
  def test_budget_holds_and_evaluations_stay_longest(self, tmp_path, budget):
    path = make_run(tmp_path / 'run')
    for step in range(12):
      write_lines(
        path / 'transcripts' / f'train_{step:06d}.jsonl',
        [episode(index=i) for i in range(20)],
      )
    run = load(path, budget=budget)
    size = sum(len(e) for file in run.transcripts for e in file.episodes)
    assert size <= budget
    if budget == 100:  # Less than one episode.
      assert run.transcripts == []
    else:
      assert run.transcripts[0].name == 'eval_after'
      assert size > budget / 3
    assert any('left out' in note for note in run.notes) == (budget < 20_000)

  def test_runs_share_the_budget(self, tmp_path):
    paths = [make_run(tmp_path / name) for name in ('one', 'two')]
    for path in paths:
      write_lines(
        path / 'transcripts' / 'eval_after.jsonl',
        [episode(index=i) for i in range(40)],
      )
    runs = runs_lib.load_all(
      paths, episodes_per_file=40, transcript_bytes=10_000
    )
    kept = [sum(map(len, run.transcripts[0].episodes)) for run in runs]
    assert kept[0] == kept[1] and 5_000 < sum(kept) <= 10_000

  def test_long_texts_and_episodes_are_cut(self, tmp_path):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'transcripts' / 'eval_after.jsonl',
      [episode(text='x' * 5000, turns=200)],
    )
    shown = json.loads(load(path).transcripts[0].episodes[0])
    assert shown['total_turns'] == 200
    assert len(shown['turns']) == runs_lib.MAX_TURNS
    assert shown['tokens'] == 200 * 7
    assert shown['goal'] == 'x' * 4000 + ' [… 1,000 more characters]'


def played(text='look', **changes) -> episodes.Episode:
  """An episode as a dump holds it: two turns, one without tokens."""
  turn = episodes.Turn(
    prompt_ids=tuple(range(30)),
    response_ids=(900, 901, 902),
    response_logps=(-0.5, -1.0, -1.23456),
    observation=text,
    response=text,
    action=text,
    reward=2.5,
    valid=False,
    state_key=2**62,
    truncated=True,
    respond_s=0.123456,
    env_s=0.25,
  )
  bare = dataclasses.replace(turn, response_ids=(), response_logps=())
  whole = episodes.Episode(
    task=make_episodes.task(7),
    member=3,
    turns=(turn, bare),
    score=50.0,
    success=False,
    ending=episodes.Ending.DEADLINE,
    goal=text,
    start_s=1.5,
    reset_s=0.75,
  )
  return dataclasses.replace(whole, **changes)


def write_dump(folder, name, step, played) -> pathlib.Path:
  return dump.write(
    folder, name, step, played, context='window', temperature=1.0
  )


def configure_dump(run: pathlib.Path, folder: str) -> None:
  config = json.loads((run / 'config.json').read_text())
  config['rollout'] = {'dump': folder}
  (run / 'config.json').write_text(json.dumps(config))


def names(run: runs_lib.Run) -> list[str]:
  return [file.name for file in run.transcripts]


class TestDumps:
  def test_dumped_episodes_stand_in_for_transcripts(self, tmp_path):
    """Of the names that both have; the rest of the transcripts stays."""
    path = make_run(tmp_path / 'run')
    write_lines(path / 'transcripts' / 'eval_before.jsonl', [episode()])
    folder = tmp_path / 'episodes'
    configure_dump(path, str(folder))
    write_dump(folder, 'train_000002', 2, [played()] * 3)
    write_dump(folder, 'eval_after', 2, [played()] * 2)
    (folder / 'train_000003.jsonl.gz.part').write_bytes(b'half')
    run = load(path)
    assert run.notes == () and not run.only_episodes
    assert names(run) == ['eval_after', 'eval_before', 'train_000002']
    assert [file.total for file in run.transcripts] == [2, 1, 3]
    seen = render(path)
    assert '6 episodes.' in seen.text and 'Before and after' in seen.text
    plain = seen.json('transcripts-data')['files'][1]['episodes'][0]
    assert plain['turns'][0]['sampled'] is None
    assert plain['turns'][0]['tokens'] == 7

  def test_how_a_turn_was_sampled(self, tmp_path):
    """Mean of -0.5, -1.0 and -1.23456: -0.912; three digits are kept."""
    path = write_dump(tmp_path, 'train_000002', 2, [played()])
    (shown,) = render(path).json('transcripts-data')['files'][0]['episodes']
    turn, bare = shown.pop('turns')
    assert shown == {
      'step': 2,
      'split': 'train',
      'env': 'toy',
      'type': 'walk',
      'index': 7,
      'seed': 0,
      'member': 3,
      'goal': 'look',
      'score': 50,
      'success': False,
      'ending': 'deadline',
      'fault': '',
      'return': None,
      'start_s': 1.5,
      'reset_s': 0.75,
      'tokens': 3,
      'total_turns': 2,
    }
    assert turn.pop('sampled') == {
      'prompt_tokens': 30,
      'mean_logp': -0.912,
      'respond_s': 0.123,
      'env_s': 0.25,
      'ids': [900, 901, 902],
      'logps': [-0.5, -1.0, -1.23],
    }
    assert turn == {
      'observation': 'look',
      'response': 'look',
      'action': 'look',
      'valid': False,
      'truncated': True,
      'reward': 2.5,
      'tokens': 3,
      'advantage': None,
    }
    assert bare['tokens'] == 0 and bare['sampled']['mean_logp'] is None

  def test_tokens_of_the_wrong_kind_are_shown_as_far_as_they_go(self, tmp_path):
    path = tmp_path / 'train_000001.jsonl.gz'
    header = {'format': 'planpo_jax.episodes', 'version': 1, 'step': 1}
    turn = {
      'response_ids': ['<b>', 1.5, True, -1, 10**400, 5],
      'response_logps': ['x', None, -1.0, 1e999],
      'prompt_ids': 3,
      'respond_s': 'soon',
    }
    records = [header, {'turns': [turn, {'response_ids': [1]}]}]
    lines = '\n'.join(map(json.dumps, records)).encode()
    path.write_bytes(gzip.compress(lines))
    (shown,) = map(json.loads, load(path).transcripts[0].episodes)
    assert shown['turns'][0]['sampled'] == {
      'prompt_tokens': None,
      'mean_logp': -1.0,
      'respond_s': None,
      'env_s': None,
      'ids': [None] * 5 + [5],
      'logps': [None, None, -1.0, None],
    }
    assert shown['turns'][1]['sampled'] is None and shown['tokens'] == 7

  def test_long_responses_are_cut(self, tmp_path):
    turn = dataclasses.replace(
      played().turns[0],
      response_ids=tuple(range(1000)),
      response_logps=(-1.0,) * 500 + (-2.0,) * 500,
    )
    path = write_dump(tmp_path, 'train_000001', 1, [played(turns=(turn,))])
    (shown,) = map(json.loads, load(path).transcripts[0].episodes)
    sampled = shown['turns'][0]['sampled']
    assert sampled['ids'] == list(range(runs_lib.MAX_TOKENS))
    assert len(sampled['logps']) == runs_lib.MAX_TOKENS
    assert sampled['mean_logp'] == -1.5 and shown['turns'][0]['tokens'] == 1000

  @pytest.mark.parametrize(
    'setting, folder',
    [
      ('b/episodes', 'here/b/episodes'),  # From where training was started,
      ('b/episodes', 'elsewhere/b/episodes'),  # which was around the run.
      ('/gone/episodes', 'elsewhere/a/runs/one/episodes'),  # Moved, within it
      ('/gone/episodes', 'elsewhere/a/runs/episodes'),  # or beside it.
    ],
  )
  def test_a_dump_is_found(self, tmp_path, monkeypatch, setting, folder):
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    path = make_run(tmp_path / 'elsewhere' / 'a' / 'runs' / 'one')
    configure_dump(path, setting)
    write_dump(tmp_path / folder, 'train_000002', 2, [played()])
    run = load(path)
    assert names(run) == ['eval_after', 'train_000002'] and run.notes == ()

  def test_a_dump_that_is_gone_is_told(self, tmp_path):
    path = make_run(tmp_path / 'run')
    configure_dump(path, 'gone\x00<b>')
    run = load(path)
    assert names(run) == ['eval_after']
    assert run.notes == (
      'rollout.dump=gone\\u0000<b>: no episodes were found there; those of'
      ' transcripts/ are shown.',
    )

  @pytest.mark.parametrize('kind', ['file', 'folder'])
  def test_a_page_of_just_a_dump(self, tmp_path, capsys, kind):
    folder = tmp_path / 'episodes'
    write_dump(folder, 'eval_before', 0, [played(success=True)])
    path = write_dump(folder, 'train_000002', 2, [played()] * 3)
    given, output, count, files = {
      'file': (path, folder / 'train_000002.html', 3, '1 file'),
      'folder': (folder, folder / 'report.html', 4, '2 files'),
    }[kind]
    assert report.main([str(given)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    seen = Page(output.read_text())
    assert f'{count} episodes of a dump' in seen.text
    assert f'{given.name} holds {count} dumped episodes in {files}' in seen.text
    sections = [attributes['id'] for attributes in seen.tags('section')]
    assert sections == ['transcripts']
    assert not seen.tags('figure') and 'not finished' not in seen.text
    assert len(seen.tags('ul')) == 1  # The legend, and no notes.

  def test_a_dump_beside_a_run(self, tmp_path):
    run = make_run(tmp_path / 'run')
    path = write_dump(tmp_path, 'train_000002', 2, [played()] * 3)
    seen = render(run, path)
    assert 'train_000002.jsonl.gz holds 3 dumped episodes in 1 file' in (
      seen.text
    )
    assert 'Where the runs differ' not in seen.text
    assert 'run: on 120 test episodes' in ' '.join(seen.text.split())

  def test_a_run_that_trains_from_a_dump(self, tmp_path):
    path = make_run(tmp_path / 'run')
    (path / 'summary.json').unlink()
    config = {'train': {'steps': 2}, 'rollout': {'replay': '<b>', 'dump': ''}}
    (path / 'config.json').write_text(json.dumps(config))
    (note,) = load(path).notes
    assert note == (
      'Trained from the dump rollout.replay=<b>, without environments: nothing'
      ' is evaluated.'
    )
    seen = render(path)
    assert '2 steps from a dump, nothing evaluated' in seen.text
    assert 'No evaluation; over the last 2 training steps 38%' in seen.text
    assert 'not finished' not in seen.text and not seen.tags('b')[1:]

  def test_hostile_text_stays_text(self, tmp_path):
    plain = write_dump(tmp_path / 'plain', 'train_000001', 1, [played()])
    path = write_dump(tmp_path, 'train_<b>', 1, [played(HOSTILE)])
    seen = render(path)
    assert len(seen.elements) == len(render(plain).elements)
    (shown,) = seen.json('transcripts-data')['files'][0]['episodes']
    assert shown['turns'][0]['observation'] == HOSTILE_SHOWN
    assert shown['goal'] == HOSTILE_SHOWN

  def test_long_dumps_are_sampled_within_the_budget(self, tmp_path):
    for step in range(6):
      write_dump(
        tmp_path,
        f'train_{step:06d}',
        step,
        [played(member=i) for i in range(9)],
      )
    run = load(tmp_path, episodes_per_file=3)
    kept = [
      [json.loads(text)['member'] for text in file.episodes]
      for file in run.transcripts
    ]
    assert kept == [[0, 3, 6]] * 6
    assert [file.total for file in run.transcripts] == [9] * 6
    run = load(tmp_path, budget=5_000)
    size = sum(len(text) for file in run.transcripts for text in file.episodes)
    assert 2_000 < size <= 5_000

  def test_damage_is_told_and_the_rest_shown(self, tmp_path):
    for step in (1, 2, 3, 4):
      write_dump(tmp_path, f'train_{step:06d}', step, [played()] * 2)
    cut, later, broken = (
      tmp_path / f'train_{step:06d}.jsonl.gz' for step in (2, 3, 4)
    )
    cut.write_bytes(cut.read_bytes()[:-4])
    lines = gzip.decompress(later.read_bytes())
    later.write_bytes(
      gzip.compress(lines.replace(b'"version":1', b'"version":2'))
    )
    broken.write_bytes(gzip.compress(lines + b'{"task":\n'))
    run = load(tmp_path)
    assert [(file.name, file.total) for file in run.transcripts] == [
      ('train_000001', 2),
      ('train_000002', 2),
      ('train_000004', 3),
    ]
    assert run.notes == (
      'train_000002.jsonl.gz: the file is cut or damaged; what came before is'
      ' shown.',
      'train_000003.jsonl.gz: not a dump of episodes of version 1; left out.',
      'train_000004.jsonl.gz: 1 unreadable of 3 lines were skipped.',
    )
    assert len(run.transcripts[2].episodes) == 2

  def test_format_is_that_of_the_writer(self):
    assert runs_lib.DUMP_FORMAT == (dump.FORMAT, dump.VERSION)
    assert runs_lib.DUMP_SUFFIX == dump.SUFFIX

  def test_script_reads_every_key(self, tmp_path):
    seen = render(write_dump(tmp_path, 'train_000002', 2, [played()]))
    (shown,) = seen.json('transcripts-data')['files'][0]['episodes']
    script = seen.scripts['script']
    for key in ('start_s', 'reset_s', 'ending'):
      assert f'episode.{key}' in script
    keys = list(shown['turns'][0]['sampled'])
    assert keys[-2:] == ['ids', 'logps'] and '{ids, logps}' in script
    for key in keys[:-2]:
      assert f'sampled.{key}' in script


class TestVerdict:
  def test_difference_is_method_10_of_newcombe(self):
    """56/70 against 48/80: 0.2, 95% interval 0.0524 to 0.3339.

    Newcombe (1998), Statistics in Medicine 17:873-890, table II, contrast (a).
    """

    def wilson(successes, n, z=1.959964):
      share = successes / n
      middle = (share + z * z / (2 * n)) / (1 + z * z / n)
      half = (
        z
        * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        / (1 + z * z / n)
      )
      return verdict.Estimate(share, middle - half, middle + half)

    change = verdict.difference(wilson(48, 80), wilson(56, 70))
    assert change.value == pytest.approx(0.2)
    assert change.low == pytest.approx(0.0524, abs=5e-5)
    assert change.high == pytest.approx(0.3339, abs=5e-5)

  @pytest.mark.parametrize(
    'after, headline',
    [
      (row(0.8, 0.7, 0.9), 'Training clearly raised success'),
      (row(0.1, 0.05, 0.15), 'Training clearly lowered success'),
      (row(0.45, 0.35, 0.55), 'No clear change in success'),
      (
        row(0.45, 0.35, 0.55, turns_success=4.0, turns_success_ci=[3.8, 4.2]),
        'As often successful, with clearly less effort',
      ),
      (
        row(0.45, 0.35, 0.55, turns_success=9.0, turns_success_ci=[8.8, 9.2]),
        'No clear change in success',
      ),
      (row(0.45, None, None), 'Success changed by +5 points'),
    ],
  )
  def test_headline(self, tmp_path, after, headline):
    run = load(make_run(tmp_path / 'run', after=after))
    assert verdict.judge([run]).headline == headline

  def test_paragraph_states_both_rates_with_intervals(self, tmp_path):
    run = load(make_run(tmp_path / 'run'))
    (paragraph,) = verdict.judge([run]).paragraphs
    # Square and add: 40 - sqrt(10² + 10²) = 25.9 and 40 + 14.1 = 54.1.
    assert paragraph.startswith(
      'On 120 test episodes the policy succeeded in 40% (30 to 50) before'
      ' training and 80% (70 to 90) after: +40 points (+26 to +54), a clear'
      ' gain.'
    )

  def test_missing_values_are_left_out(self, tmp_path):
    after = row(0.8, 0.7, 0.9, turns_success=None, turns_success_ci=None)
    run = load(make_run(tmp_path / 'run', after=after))
    (paragraph,) = verdict.judge([run]).paragraphs
    assert 'turns 8.0 → 8.0' in paragraph
    assert 'turns when successful' not in paragraph

  def test_faults_and_unequal_counts_are_told(self, tmp_path):
    after = row(0.8, 0.7, 0.9, faults=2, episodes=118)
    run = load(make_run(tmp_path / 'run', after=after))
    (paragraph,) = verdict.judge([run]).paragraphs
    assert 'On 120 (before) and 118 (after) test episodes' in paragraph
    assert 'not counted: 2 episodes.' in paragraph

  def test_runs_are_compared_with_the_first(self, tmp_path):
    runs = [
      load(make_run(tmp_path / 'one')),
      load(make_run(tmp_path / 'two', after=row(0.5, 0.4, 0.6))),
    ]
    assert any(
      'two against one: success −30 points (−44 to −16), clearly less often'
      in paragraph
      for paragraph in verdict.judge(runs).paragraphs
    )


class TestCharts:
  @pytest.mark.parametrize(
    'low, high, expected',
    [
      (0, 1, [0, 0.25, 0.5, 0.75, 1]),
      (0, 37, [0, 10, 20, 30, 40]),
      (-3, 5, [-4, -2, 0, 2, 4, 6]),
      (2, 2, [1.8, 1.9, 2.0, 2.1, 2.2]),
      (2, 2 + 5e-16, [1.8, 1.9, 2.0, 2.1, 2.2]),
      (0, 0, [-1, -0.5, 0, 0.5, 1]),
      (0.3, 0.7, [0.3, 0.4, 0.5, 0.6, 0.7]),
      (0, 0.003, [0, 0.001, 0.002, 0.003]),
    ],
  )
  def test_ticks(self, low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)

  def test_thin_takes_means_of_neighbours(self):
    points = [(float(i), float(i % 2)) for i in range(1000)]
    thinned = charts.thin(points, 100)
    assert len(thinned) == 100
    assert {value for _, value in thinned} == {0.5}
    assert charts.thin(points[:100], 100) == points[:100]

  def test_smoothing_keeps_a_straight_line_straight(self):
    points = [(float(i), 2.0 * i) for i in range(50)]
    assert charts.smooth(points, 7) == pytest.approx(points)

  @pytest.mark.parametrize(
    'value, unit, expected',
    [
      (0.4166, 'share', '41.7%'),
      (0.0, '', '0'),
      (-0.00314159, '', '−0.00314'),
      (12345.6, '', '12,346'),
      (1e-6, '', '1e−06'),
      (1.5, 'seconds', '1.5 s'),
    ],
  )
  def test_format_number(self, value, unit, expected):
    assert charts.format_number(value, unit) == expected

  def test_points_lie_where_the_axes_say(self):
    """Steps 0 to 10 and values 0 to 1 span the plot, corner to corner."""
    curve = charts.Curve(0, 'run', [(0, 0.0), (10, 1.0)])
    area = charts.plot_area()
    seen = Page(charts.draw(charts.Chart('t', '', [curve])))
    (line,) = seen.tags('polyline')
    (x0, y0), (x1, y1) = (
      map(float, point.split(',')) for point in line['points'].split()
    )
    assert (x0, y0) == (area['left'], area['bottom'])
    assert (x1, y1) == (area['right'], area['top'])

  def test_vertical_axis_of_nothing_but_zeros(self):
    chart = charts.Chart('t', '', [charts.Curve(0, 'run', [(1, 0), (3, 0)])])
    assert charts.domain(chart) == ((1, 3), (0, 1))

  @pytest.mark.parametrize('value', [0.0, -2.0, 3.0])
  def test_a_single_point_is_drawn(self, value):
    chart = charts.Chart('t', '', [charts.Curve(0, 'run', [(5, value)])])
    (dot,) = Page(charts.draw(chart)).tags('circle')
    area = charts.plot_area()
    assert area['left'] < float(dot['cx']) < area['right']
    assert area['top'] <= float(dot['cy']) <= area['bottom']


class TestPage:
  def test_table_holds_values_intervals_and_change(self, tmp_path):
    seen = render(make_run(tmp_path / 'run'))
    for shown in (
      '40%30 to 50',
      '80%70 to 90',
      '+40 points+26 to +54',
      '55.150.0 to 60.0',
      '120',
    ):
      assert shown in seen.text
    assert all('scope' in th for th in seen.tags('th'))

  def test_charts_and_their_data(self, tmp_path):
    seen = render(make_run(tmp_path / 'one'), make_run(tmp_path / 'two'))
    data = seen.json('curves-data')['charts']
    assert len(seen.tags('figure')) == len(data) + 4  # and the intervals
    success, odd = data
    assert success['steps'] == [0, 2]
    assert [curve['name'] for curve in success['curves']] == [
      'one',
      'two',
      'one evaluation',
      'two evaluation',
    ]
    assert success['curves'][0]['points'] == [[1, 0.25], [2, 0.5]]
    assert success['curves'][3]['points'] == [[0, 0.25]]
    assert 'All other metrics (1)' in seen.text and 'odd/key' in seen.text
    assert [curve['points'] for curve in odd['curves']] == [[[2, 7]]] * 2
    assert not any(
      'episodes' in curve['name'] for c in data for curve in c['curves']
    )
    labels = [svg.get('aria-label', '') for svg in seen.tags('svg')]
    assert any(
      label.startswith('Success. one: 25% at step 1, 50% at step 2;')
      for label in labels
    )

  def test_measures_of_the_rollout_have_charts(self, tmp_path):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'metrics.jsonl',
      [
        {
          'step': 1,
          'kind': 'train',
          'rollout/occupancy': 0.93,
          'rollout/tail_s': 1.5,
          'loss/sampler_gap': 0.0002,
        }
      ],
    )
    seen = render(path)
    assert 'All other metrics' not in seen.text
    assert [
      svg['aria-label'] for svg in seen.tags('svg') if 'aria-label' in svg
    ][-3:] == [
      'Slot occupancy. run: 93% at step 1.',
      'Tail. run: 1.5 s at step 1.',
      'Gap between sampler and learner. run: 0.0002 at step 1.',
    ]
    for title in ('Decoding', 'Prefill', 'Waiting for environments'):
      assert title not in seen.text  # Not logged.

  @pytest.mark.parametrize(
    'key, unit',
    [
      ('rollout/occupancy', 'share'),
      ('rollout/decode_share', 'share'),
      ('rollout/prefill_share', 'share'),
      ('rollout/env_wait_share', 'share'),
      ('rollout/tokens_per_s', ''),
      ('rollout/tail_s', 'seconds'),
      ('loss/sampler_gap', ''),
      ('loss/sampler_kl', ''),
      ('loss/ratio_min', ''),
      ('loss/ratio_max', ''),
      ('critic/explained_variance', ''),
      ('advantage/mean_abs', ''),
      ('advantage/signal_without_outcome_variance', 'share'),
      ('advantage/successes_with_negative_advantage', 'share'),
      ('advantage/successes_with_negative_efficiency', 'share'),
    ],
  )
  def test_unit_of_a_measure(self, tmp_path, key, unit):
    path = make_run(tmp_path / 'run')
    write_lines(
      path / 'metrics.jsonl', [{'step': 1, 'kind': 'train', key: 0.5}]
    )
    seen = render(path)
    (chart,) = seen.json('curves-data')['charts']
    assert chart['unit'] == unit and 'All other metrics' not in seen.text

  def test_settings_that_differ(self, tmp_path):
    one = make_run(tmp_path / 'one')
    two = make_run(tmp_path / 'two', name='grpo')
    text = render(one, two).text
    differing = text[text.index('Where the runs differ') :]
    differing = differing[: differing.index('Main settings')]
    assert 'advantage.nameplanpogrpo' in differing
    assert 'seed' not in differing
    text = render(one).text
    main = text[text.index('Main settings') : text.index('All settings')]
    assert 'advantage.planpo.alpha' in main and 'group_size' in main
    assert 'advantage.grpo.eps' not in main  # The method that was not chosen.

  def test_success_by_task_type(self, tmp_path):
    after = row(by_type={'boil': row(0.9, 0.8, 1.0, episodes=11)})
    text = render(make_run(tmp_path / 'run', after=after)).text
    assert 'boil90%of 11, 6.0 turns' in text

  def test_few_signals_are_explained(self, tmp_path):
    path = make_run(tmp_path / 'run')
    key = 'advantage/groups_without_outcome_variance'
    write_lines(
      path / 'metrics.jsonl', [{'step': 1, 'kind': 'train', key: 0.82}]
    )
    assert 'In 82% (run) of the groups all episodes ended alike' in (
      render(path).text
    )

  def test_advantages_by_turn_are_of_the_last_steps(self, tmp_path):
    """The last quarter of 8 steps is steps 7 and 8.

    Turn 1: (3 + 5) / 2 = 4. Turns 3 and 4 were last seen in step 7: 2. The
    span from turn 17 on was not reached so late, and is left out.
    """
    path = make_run(tmp_path / 'run')
    one, three, on = (
      f'advantage/std_turn_{span}' for span in ('01', '03_04', '17_on')
    )
    lines = [
      {one: 9.0, three: 9.0, on: 9.0},
      *[{one: 9.0}] * 5,
      {one: 3.0, three: 2.0},
      {one: 5.0, 'advantage/mean_abs': 1.0},
    ]
    write_lines(
      path / 'metrics.jsonl',
      [
        {'step': step, 'kind': 'train', **line}
        for step, line in enumerate(lines, 1)
      ],
    )
    seen = render(path)
    by_turn = seen.json('curves-data')['charts'][1]
    assert by_turn['axis'] == 'turn'
    assert by_turn['curves'][0]['points'] == [[1, 4], [3, 2]]
    labels = [svg.get('aria-label', '') for svg in seen.tags('svg')]
    assert (
      'Spread of the advantages by turn. run: 4 at turn 1, 2 at turn 3.'
    ) in labels
    # By step they are among the others.
    assert 'All other metrics (3)' in seen.text

  def test_each_head_of_a_critic_has_its_chart(self, tmp_path):
    path = make_run(tmp_path / 'run')
    heads = {f'critic/explained_variance_{head}': 0.5 for head in range(2)}
    write_lines(path / 'metrics.jsonl', [{'step': 1, 'kind': 'train', **heads}])
    seen = render(path)
    for head in range(2):
      assert f'Explained variance, head {head}' in seen.text
    assert 'All other metrics' not in seen.text

  def test_only_several_runs_can_be_switched_off(self, tmp_path):
    one, two = (make_run(tmp_path / name) for name in ('one', 'two'))
    boxes = [
      box
      for box in render(one, two).tags('input')
      if box.get('type') == 'checkbox'
    ]
    assert [box['data-run'] for box in boxes] == ['0', '1']
    assert all('checked' in box for box in boxes)
    assert 'checkbox' not in str(render(one).tags('input'))


def record(folder: pathlib.Path, *entries) -> None:
  (folder / sweep.RECORD).write_text(json.dumps({'runs': entries}))


class TestSweep:
  def test_its_folder_stands_for_its_runs_in_its_order(self, tmp_path, capsys):
    for name in ('a', 'b', 'c'):
      make_run(tmp_path / name)
    (tmp_path / 'empty').mkdir()
    record(tmp_path, {'name': 'c'}, {'name': 'not begun'}, {'name': 'b'})
    assert report.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / 'report.html')
    page_text = (tmp_path / 'report.html').read_text()
    assert 'Runs side by side: c, b, a' in page_text
    (tmp_path / sweep.RECORD).write_text('{"runs": [')
    assert report.main([str(tmp_path)]) == 0
    page_text = (tmp_path / 'report.html').read_text()
    assert 'Runs side by side: a, b, c' in page_text

  def test_a_run_of_it_is_still_a_run(self, tmp_path):
    record(tmp_path, {'name': 'a'})
    path = make_run(tmp_path / 'a')
    make_run(path / 'inside', after=row(0.1, 0.05, 0.15))
    assert 'Training clearly raised success' in render(path).text

  def test_it_may_not_be_given_with_one_of_its_runs(self, tmp_path):
    path = make_run(tmp_path / 'a')
    with pytest.raises(runs_lib.RunError, match='given twice'):
      render(tmp_path, path)

  @pytest.mark.parametrize('count', [2, 5])
  def test_what_it_says_of_a_run_stands_beside_it(self, tmp_path, count):
    for i in range(count):
      make_run(tmp_path / f'run{i}')
    record(
      tmp_path,
      {'name': 'run0', 'reason': HOSTILE, 'published': '0.9 (somebody)'},
      7,
    )
    # As `launch/report.py ROOT/*` gives it.
    seen = render(*sorted(tmp_path.glob('[!.]*')))
    assert HOSTILE_SHOWN in seen.text and '0.9 (somebody)' in seen.text
    assert not seen.tags('img')
    assert len(seen.tags('script')) == 3


@pytest.fixture(name='many', scope='module')
def sixteen_runs(tmp_path_factory):
  """Run i succeeds in 80 - 4 i percent, 10 points up or down; two go on."""
  root = tmp_path_factory.mktemp('many')
  for i in range(16):
    share = 0.8 - 0.04 * i
    after = row(share, share - 0.1, share + 0.1, by_type={'boil': row()})
    path = make_run(root / f'run{i:02d}', after=after)
    lines = [
      {'step': step, 'kind': 'train', 'rollout/success': 0.5}
      for step in range(40)
    ]
    write_lines(path / 'metrics.jsonl', lines)
  for going in (root / 'run14', path):
    (going / 'summary.json').unlink()
  config = json.loads((path / 'config.json').read_text())
  config['train']['group_size'] = 4
  (path / 'config.json').write_text(json.dumps(config))
  return render(root)


class TestManyRuns:
  def test_opens_with_an_overview(self, many):
    """Intervals of 10 points each: a difference is clear above 14.1 points."""
    (title,) = [
      part for part in many.text.splitlines() if 'runs side by side' in part
    ]
    assert title == '16 runs side by side'
    assert (
      '14 of 16 runs have a closing evaluation. run00 succeeded most often'
      ' after training: in 80% (70 to 90).'
    ) in many.text
    clear = ', '.join(f'run{i:02d}' for i in range(4, 14))
    assert (
      f'Against run00, clearly less often successful: {clear}; no clear'
      ' difference: run01, run02, run03.'
    ) in many.text
    # Word for word, but folded away.
    assert len(many.tags('details')) == 4
    words = many.text[many.text.index('Each run in words') :]
    assert 'run13: on 120 test episodes the policy succeeded in 40%' in words

  def test_a_line_a_run(self, many):
    """Run 1: 76 - 80 points, 10 points each: -4 -+ 14.1."""
    table = many.text[many.text.index('Against run00') :]
    for line in (
      'run0039 training steps120–80%70 to 90',
      'run0139 training steps120−4 points−18 to +1076%66 to 86',
      'run0439 training steps120−16 points−30 to −264%54 to 74',
      'run1539 training steps, not finished–––––––',
    ):
      assert line in table

  def test_what_all_share_is_said_once(self, many):
    assert many.text.count('No closing evaluation yet') == 1
    assert 'run14, run15: No closing evaluation yet' in many.text
    text = many.text[many.text.index('Main settings') :]
    main = text[: text.index('All settings')]
    assert 'All runs' in main and 'advantage.nameplanpoadvantage' in main
    differing = many.text[many.text.index('Where the runs differ') :]
    differing = differing[: differing.index('Main settings')]
    assert f'train.group_size{"8" * 15}4' in differing
    assert 'group_size' not in main

  def test_smoothed_curves_only(self, many):
    lines = [line['class'] for line in many.tags('polyline')]
    assert not [name for name in lines if 'raw' in name]

  def test_no_two_runs_look_alike(self):
    """Neither by their lines nor by their marks, which are drawn apart."""
    runs = range(charts.COLOURS * charts.DASHES)
    lines, marks = set(), set()
    for run in runs:
      # But for the class that tells the run, which has no style.
      look = charts.swatch(run).replace(f' r{run}', '')
      line, mark = look.split('/>')[:2]
      lines.add(line)
      # Marks are not dashed.
      marks.add(re.sub(' dash[0-9]', '', mark))
    assert len(runs) == len(lines) == len(marks) == 32

  def test_every_look_has_its_style(self):
    style = (pathlib.Path(page.__file__).parent / 'page.css').read_text()
    for colour in range(charts.COLOURS):
      assert style.count(f'--c{colour}: #') == 2  # Light and dark.
      for kind in (
        *('.curve', '.whisker', '.hollow', '.mark', '.dot', 'i'),
        *('.band', '.reach'),
      ):
        assert f'{kind}.s{colour}' in style
    for dash in range(1, charts.DASHES):
      assert f'.curve.dash{dash} ' in style

  def test_long_names_of_runs_keep_both_ends(self):
    name = 'reinforce_pp_baseline_of_another_kind_seed12'
    entry = charts.Interval(0, name, 0.5, 0.4, 0.6, hollow=False)
    drawn = Page(charts.draw_intervals('t', [entry], 'share'))
    assert 'reinforce_pp…r_kind_seed12' in drawn.text
    (label,) = (x for x in drawn.tags('text') if x['class'] == 'label')
    assert float(label['x']) > 26 * 6.5  # Wide enough for what is kept.


def make_seeds(root, name, after, *, before=(0.4, 0.3, 0.5), **more):
  """Runs of one method, seed i ending with the success `after[i]`.

  Args:
    root: folder of the sweep.
    name: of the method.
    after: success after training; None for a run that is not finished.
    before: success before it.
    **more: measures after training, a value a seed.
  """
  root.mkdir(exist_ok=True)
  path = root / sweep.RECORD
  known = json.loads(path.read_text())['runs'] if path.exists() else []
  made = []
  for i, share in enumerate(after):
    folder = root / (f'{name}_seed{i}' if i else name)
    rows = [row(before[i]), row(share, **{k: v[i] for k, v in more.items()})]
    made.append(make_run(folder, name=name, before=rows[0], after=rows[1]))
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'seed': i}))
    if share is None:
      (folder / 'summary.json').unlink()
    known.append({'name': folder.name, 'run': name, 'reason': f'why {name}'})
  record(root, *known)
  return made


def set_success(run: pathlib.Path, *values: float) -> None:
  write_lines(
    run / 'metrics.jsonl',
    [
      {'step': step, 'kind': 'train', 'rollout/success': value}
      for step, value in enumerate(values, 1)
    ],
  )


def tables(root: pathlib.Path) -> tuple[str, dict[str, dict]]:
  """The Markdown, and by name the methods of the JSON, of a sweep's report."""
  page.write([root])
  found = json.loads((root / 'report_table.json').read_text())['methods']
  return (
    (root / 'report_table.md').read_text(),
    {method['method']: method for method in found},
  )


class TestSeeds:
  def test_means_and_deviations_by_hand(self, tmp_path):
    """Success 40, 30, 50 before and 50, 60, 70 after; turns 8, 8, 11 after.

    Deviations with n - 1: of 30, 40, 50 sqrt((100 + 0 + 100) / 2) = 10, of the
    changes 10, 30, 20 the same; of 8, 8, 11 sqrt((1 + 1 + 4) / 2) = 1.73.
    """
    make_seeds(tmp_path, 'grpo', (0.5, 0.6, 0.7), turns=(8, 8, 11))
    text, found = tables(tmp_path)
    grpo = found['grpo']
    assert grpo['seeds'] == [0, 1, 2]
    assert grpo['runs'] == ['grpo', 'grpo_seed1', 'grpo_seed2']
    for part, mean in (('before', 0.4), ('after', 0.6), ('change', 0.2)):
      success = grpo[part]['success']
      assert success['mean'] == pytest.approx(mean)
      assert success['std'] == pytest.approx(0.1)
    assert grpo['after']['success']['values'] == [0.5, 0.6, 0.7]
    assert grpo['change']['success']['values'] == pytest.approx([0.1, 0.3, 0.2])
    assert grpo['after']['turns']['mean'] == pytest.approx(9)
    assert grpo['after']['turns']['std'] == pytest.approx(math.sqrt(3))
    assert text.splitlines()[:5] == [
      'Before → after training on the test split, mean ± standard deviation'
      ' (n − 1) over seeds.',
      '',
      '| Method | Seeds | Episodes | Success | Score | Turns |'
      ' Turns when successful | Tokens a response |',
      '| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |',
      '| grpo | 3 | 120 | 40.0 ± 10.0% → 60.0 ± 10.0% |'
      ' 55.1 ± 0.0 → 55.1 ± 0.0 | 8.0 ± 0.0 → 9.0 ± 1.7 |'
      ' 6.0 ± 0.0 → 6.0 ± 0.0 | 20.0 ± 0.0 → 20.0 ± 0.0 |',
    ]
    assert '| grpo_seed1 | 1 | 30.0% → 60.0% | 55.1 → 55.1 |' in text
    seen = render(tmp_path)
    assert 'grpo over 3 seeds' in seen.text
    for shown in (
      '30, 1, 2120',
      '60.0 ± 10.0%50.0, 60.0, 70.0',
      '+20.0 ± 10.0 points+10.0, +30.0, +20.0',
      '9.0 ± 1.78.0, 8.0, 11.0',
    ):
      assert shown in seen.text

  def test_methods_are_laid_side_by_side_without_a_ranking(self, tmp_path):
    make_seeds(tmp_path, 'grpo', (0.5, 0.6, 0.7))
    make_seeds(tmp_path, 'planpo', (0.9, 0.9, 0.6))
    seen = render(tmp_path)
    assert '2 methods, 3 seeds each' in seen.text
    assert 'Methods differ in the number' not in seen.text
    assert (
      'grpo, 3 seeds: success 40.0 ± 10.0% → 60.0 ± 10.0%; score' in seen.text
    )
    # Mean 80, deviations 10, 10 and -20: sqrt(600 / 2) = 17.3.
    assert (
      'planpo, 3 seeds: success 40.0 ± 10.0% → 80.0 ± 17.3%; score' in seen.text
    )
    assert 'why grpo' in seen.text and 'why planpo' in seen.text
    # Each run in words, but none against another of another seed.
    assert 'planpo_seed1: on 120 test episodes' in ' '.join(seen.text.split())
    for word in ('against', 'Against', 'succeeded most often', 'signific'):
      assert word not in seen.text

  def test_curves_are_means_with_a_band(self, tmp_path):
    runs = make_seeds(tmp_path, 'grpo', (0.5, 0.6, 0.7))
    for run, values in zip(
      runs, ((0.1, 0.3), (0.5, 0.9), (0.0, 0.3)), strict=True
    ):
      set_success(run, *values)
    (alone,) = make_seeds(tmp_path, 'planpo', (0.5,))
    set_success(alone, 0.25, 0.75)
    seen = render(tmp_path)
    (chart,) = seen.json('curves-data')['charts']
    assert [curve['name'] for curve in chart['curves']] == ['grpo', 'planpo']
    # Means (0.1 + 0.5 + 0) / 3 and (0.3 + 0.9 + 0.3) / 3, lowest and highest.
    assert chart['curves'][0]['points'] == [
      [1, 0.2, 0.0, 0.5],
      [2, 0.5, 0.3, 0.9],
    ]
    assert chart['curves'][1]['points'] == [[1, 0.25], [2, 0.75]]
    (band,) = (
      shape for shape in seen.tags('polygon') if 'band' in shape['class']
    )
    assert band['class'] == 'band s0 r0'
    label = next(
      svg['aria-label']
      for svg in seen.tags('svg')
      if svg.get('aria-label', '').startswith('Success. ')
    )
    assert label == (
      'Success. grpo: 20% (0% to 50%) at step 1, 50% (30% to 90%) at step 2;'
      ' planpo: 25% at step 1, 75% at step 2.'
    )
    boxes = [box for box in seen.tags('input') if box.get('type') == 'checkbox']
    assert [box['data-run'] for box in boxes] == ['0', '1']

  def test_unequal_numbers_of_seeds_are_told(self, tmp_path):
    make_seeds(tmp_path, 'grpo', (0.5, 0.6, 0.7))
    make_seeds(tmp_path, 'rloo', (0.3,))
    text, found = tables(tmp_path)
    told = 'Methods differ in the number of seeds: grpo 3, rloo 1.'
    seen = render(tmp_path)
    assert told in text.splitlines() and told in seen.text
    assert '2 methods, 1 to 3 seeds' in seen.text
    assert found['rloo']['after']['success'] == {
      'mean': 0.3,
      'std': None,
      'values': [0.3],
    }
    assert '| rloo | 1 | 120 | 40.0% → 30.0% |' in text

  def test_a_seed_that_is_not_finished_is_left_out(self, tmp_path):
    runs = make_seeds(tmp_path, 'grpo', (0.5, 0.6, None))
    set_success(runs[0], 0.2, 0.4)
    set_success(runs[1], 0.4, 0.6)
    set_success(runs[2], 1.0)
    text, found = tables(tmp_path)
    grpo = found['grpo']
    assert (grpo['seeds'], grpo['left_out']) == ([0, 1], ['grpo_seed2'])
    assert grpo['after']['success']['mean'] == pytest.approx(0.55)
    told = 'grpo_seed2: not finished, and not in the means over seeds.'
    seen = render(tmp_path)
    assert told in text and told in seen.text
    (chart,) = seen.json('curves-data')['charts']
    assert chart['curves'][0]['points'] == [
      [1, 0.3, 0.2, 0.4],
      [2, 0.5, 0.4, 0.6],
    ]

  def test_before_a_seed_is_finished_curves_end_at_the_slowest(self, tmp_path):
    one, two = make_seeds(tmp_path, 'grpo', (None, None))
    set_success(one, 0.2, 0.4, 0.9)
    set_success(two, 0.4, 0.6)
    seen = render(tmp_path)
    (chart,) = seen.json('curves-data')['charts']
    assert [point[:2] for point in chart['curves'][0]['points']] == [
      [1, 0.3],
      [2, 0.5],
    ]
    assert 'grpo: no seed is finished; the curves end where' in seen.text
    assert 'grpo, 2 seeds: nothing was evaluated yet.' in seen.text

  def test_runs_from_a_dump_are_finished_at_their_last_step(self, tmp_path):
    one, two = make_seeds(tmp_path, 'grpo', (None, None))
    for run, last in ((one, 2), (two, 1)):
      config = json.loads((run / 'config.json').read_text())
      config['rollout'] = {'replay': 'dump'}
      (run / 'config.json').write_text(json.dumps(config))
      set_success(run, *[0.5] * last)
    assert [load(run).is_finished for run in (one, two)] == [True, False]

  def test_a_value_that_a_seed_lacks_is_told(self, tmp_path):
    """Without a success there are no turns of successes."""
    make_seeds(
      tmp_path, 'grpo', (0.5, 0.0, 0.7), turns_success=(6.0, None, 8.0)
    )
    text, found = tables(tmp_path)
    assert found['grpo']['after']['turns_success']['values'] == [6.0, None, 8.0]
    assert '6.0 ± 0.0 → 7.0 ± 1.4 (2 of 3 seeds) |' in text
    seen = render(tmp_path)
    assert '7.0 ± 1.4 (2 of 3 seeds)6.0, –, 8.0' in seen.text
    assert '+1.0 ± 1.4 (2 of 3 seeds)0.0, –, +2.0' in seen.text

  def test_success_by_task_type(self, tmp_path):
    types = [{'boil': row(0.2)}, {'boil': row(0.4), 'melt': row(0.9)}]
    make_seeds(tmp_path, 'grpo', (0.5, 0.6), by_type=types)
    _, found = tables(tmp_path)
    by_type = found['grpo']['after']['success_by_type']
    assert by_type['boil']['mean'] == pytest.approx(0.3)
    assert by_type['melt']['values'] == [None, 0.9]
    # Deviations of 10 points each: sqrt(200 / 1) = 14.1.
    assert 'boil30.0 ± 14.1%20.0, 40.0' in render(tmp_path).text

  def test_other_splits_are_told(self, tmp_path):
    make_seeds(tmp_path, 'grpo', (0.5, 0.6))
    (other,) = make_seeds(tmp_path, 'planpo', (0.5,))
    summary = (other / 'summary.json').read_text()
    (other / 'summary.json').write_text(summary.replace('"test"', '"dev"'))
    assert (
      'Evaluated on different splits, and not to be compared: test: grpo,'
      ' grpo_seed1; dev: planpo.'
    ) in render(tmp_path).text

  @pytest.mark.parametrize('count', [1, 2, 5])
  def test_one_seed_a_method_is_a_page_as_of_single_runs(self, tmp_path, count):
    for i in range(count):
      make_seeds(tmp_path, f'method{i}', (0.5,))
    with_methods = page.render(
      runs_lib.load_all([tmp_path], episodes_per_file=9, transcript_bytes=9999),
      written='',
    )
    known = json.loads((tmp_path / sweep.RECORD).read_text())['runs']
    for entry in known:
      del entry['run']
    record(tmp_path, *known)
    single = page.render(
      runs_lib.load_all([tmp_path], episodes_per_file=9, transcript_bytes=9999),
      written='',
    )
    assert with_methods == single
    assert page.write([tmp_path]) == [tmp_path / 'report.html']
    assert not list(tmp_path.glob('*_table.*'))

  def test_a_single_run_keeps_its_name(self, tmp_path):
    first, _ = make_seeds(tmp_path, 'grpo', (0.5, 0.6))
    first.rename(tmp_path.parent / 'elsewhere')
    seen = render(tmp_path)
    (chart, _) = seen.json('curves-data')['charts']
    assert [curve['name'] for curve in chart['curves']] == [
      'grpo_seed1',
      'grpo_seed1 evaluation',
    ]

  def test_methods_of_two_sweeps_are_kept_apart(self, tmp_path):
    for name in ('x', 'y'):
      make_seeds(tmp_path / name, 'grpo', (0.5, 0.6))
    runs = runs_lib.load_all(
      [tmp_path / 'x', tmp_path / 'y'],
      episodes_per_file=9,
      transcript_bytes=9999,
    )
    found = seeds.methods(runs)
    assert [(method.name, len(method.runs)) for method in found] == [
      ('x/grpo', 2),
      ('y/grpo', 2),
    ]

  def test_names_cannot_break_out_of_a_table(self, tmp_path):
    make_seeds(tmp_path, 'a|b<img src=x>', (0.5, 0.6))
    text, _ = tables(tmp_path)
    assert '| a\\|b&lt;img src=x&gt; | 2 | 120 |' in text
    assert not render(tmp_path).tags('img')

  def test_bands_lie_where_the_axes_say_and_below_the_lines(self):
    """Lower edge from the left, then the upper one back."""
    area = charts.plot_area()
    curve = charts.Curve(
      0, 'run', [(0, 0.5), (10, 0.5)], band=[(0.0, 0.5), (0.5, 1.0)]
    )
    seen = Page(charts.draw(charts.Chart('t', '', [curve])))
    (band,) = seen.tags('polygon')
    left, right = area['left'], area['right']
    middle = (area['top'] + area['bottom']) / 2
    assert [
      tuple(map(float, point.split(','))) for point in band['points'].split()
    ] == [
      (left, area['bottom']),
      (right, middle),
      (right, area['top']),
      (left, middle),
    ]
    order = [tag for tag, _ in seen.elements]
    assert order.index('polygon') < order.index('polyline')

  def test_marks_of_several_seeds_have_their_reach(self):
    area = charts.plot_area()
    curve = charts.Curve(0, 'run', [(5, 0.5)], markers=True, band=[(0.0, 1.0)])
    seen = Page(charts.draw(charts.Chart('t', '', [curve])))
    (bar,) = (x for x in seen.tags('line') if 'reach' in x['class'])
    assert (float(bar['y1']), float(bar['y2'])) == (
      area['bottom'],
      area['top'],
    )

  def test_bands_are_thinned_and_smoothed_as_their_curve(self):
    """A curve in the middle of its band stays there."""
    points = [(float(i), float(i % 7)) for i in range(700)]
    curve = charts.Curve(
      0, 'r', points, band=[(v - 1, v + 1) for _, v in points]
    )
    seen = Page(charts.draw(charts.Chart('t', '', [curve])))
    (line,) = seen.tags('polyline')
    (band,) = seen.tags('polygon')
    heights = [
      [float(point.split(',')[1]) for point in shape['points'].split()]
      for shape in (line, band)
    ]
    count = len(heights[0])
    lower, upper = heights[1][:count], heights[1][count:][::-1]
    assert [(a + b) / 2 for a, b in zip(lower, upper, strict=True)] == (
      pytest.approx(heights[0], abs=0.1)
    )


class TestLaunch:
  def test_writes_and_prints_the_page(self, tmp_path, capsys):
    one, two = make_run(tmp_path / 'one'), make_run(tmp_path / 'two')
    assert report.main([str(one), str(two)]) == 0
    assert capsys.readouterr().out.strip() == str(one / 'report.html')
    output = tmp_path / 'both.html'
    assert report.main([str(one), str(two), f'--output={output}']) == 0
    assert 'Runs side by side: one, two' in output.read_text()
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ['both.html']

  @pytest.mark.parametrize(
    'arguments, message',
    [
      (['none'], 'none: no such directory or file. A run is the --workdir'),
      (['empty'], 'empty: holds none of the files of a run.'),
      (['run/config.json'], 'config.json: a file that is no dump of episodes.'),
      (
        ['other.jsonl.gz'],
        'holds no episodes that can be read. other.jsonl.gz',
      ),
      (['run', 'run/../run'], 'is given twice'),
      (['run', '--output=none/page.html'], 'give --output=FILE in a folder'),
      (['run', '--output=empty'], 'the page cannot be written there'),
      (['broken'], 'metrics.jsonl: cannot be read'),
    ],
  )
  def test_errors_name_the_cause(
    self, tmp_path, monkeypatch, capsys, arguments, message
  ):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / 'run')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'broken' / 'metrics.jsonl').mkdir(parents=True)
    (tmp_path / 'other.jsonl.gz').write_bytes(gzip.compress(b'{"step": 1}'))
    assert report.main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob('*.part'))

  def test_needs_no_jax(self):
    code = (
      'import sys; import launch.report; '
      'sys.exit(any(n in sys.modules for n in ("jax", "numpy", "flax")))'
    )
    root = pathlib.Path(__file__).parent.parent
    subprocess.run([sys.executable, '-c', code], cwd=root, check=True)


def test_the_report_reads_the_format_that_is_written():
  assert runs_lib.DUMP_FORMAT == (dump.FORMAT, dump.VERSION)
  assert runs_lib.DUMP_SUFFIX == dump.SUFFIX


def test_what_was_played_is_a_setting_of_the_run(tmp_path):
  played = [{'step': 0, 'name': 'toy', 'version': 'toy 1', 'split_sizes': {}}]
  path = tmp_path / 'run'
  make_run(path)

  def loaded():
    return runs_lib.load_all(
      [path], episodes_per_file=1, transcript_bytes=1 << 20
    )[0]

  assert 'environment.version' not in loaded().config
  (path / 'environment.json').write_text(json.dumps(played))
  run = loaded()
  assert run.config['environment.version'] == 'toy 1'
  assert not any('environment' in note for note in run.notes)
  played.append(played[0] | {'step': 1, 'version': 'toy 2'})
  (path / 'environment.json').write_text(json.dumps(played))
  run = loaded()
  assert run.config['environment.version'] == 'toy 2'
  assert 'The environment changed in the run: toy 1, toy 2.' in run.notes
  for broken in ('{', '[]', '{}', '[1]', '[{}]'):
    (path / 'environment.json').write_text(broken)
    run = loaded()
    assert 'environment.json is damaged; left out.' in run.notes, broken
    assert run.config['seed'] == 0
