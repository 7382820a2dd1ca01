"""Token ids of text, with the ChatML control tokens kept apart from it.

A checkpoint's own tokenizer comes with its chat template. The template is
never run during an episode: it is checked once, at load, to be the plain ChatML
that `chat` writes turn by turn.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

ASSETS = pathlib.Path(__file__).parent / 'assets'
# The order gives the ids, as in Qwen2.5: after all merges come the controls.
CONTROL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
# One token each in the nano vocabulary: they occur in every response.
TAG_TOKENS = ('<think>', '</think>', '<action>', '</action>')


# Everything about text that stands beside the weights of a checkpoint.
FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'vocab.json',
  'merges.txt',
  'added_tokens.json',
  'special_tokens_map.json',
  'chat_template.jinja',
  'chat_template.json',
)
# Each may name end tokens, and none is trusted to name them all.
_END_FILES = ('generation_config.json', 'config.json')

# What a template is asked to write: thoughts in earlier turns, and white space
# at the borders of messages, are what templates drop.
_PROBE = (
  ('user', ' A first\n\nobservation. '),
  ('assistant', '<think>a plan</think><action>look</action>'),
  ('user', '\nA second one.'),
  ('assistant', '<think>another</think>\n<action>go north</action>'),
  ('user', 'A third one.'),
)

Message = tuple[str, str]  # (role, text)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A byte-level BPE whose text can never turn into a control token.

  Attributes:
    backend: the `tokenizers` object. Control tokens inside text are encoded
      as plain characters, so an observation cannot forge a turn.
    im_start: id that opens a ChatML message.
    im_end: id that closes one.
    stop_ids: ids that end a response: `<|im_end|>`, `<|endoftext|>`, and those
      that the configuration files beside the tokenizer name.
    num_tokens: number of ids the tokenizer knows; model rows past it are
      padding and are never sampled.
    files: files to copy beside an exported checkpoint.
    system: the system message that the chat template adds to a conversation
      without one; None if it adds none.
  """

  backend: tokenizers.Tokenizer
  im_start: int
  im_end: int
  stop_ids: tuple[int, ...]
  num_tokens: int
  files: tuple[pathlib.Path, ...] = ()
  system: str | None = None

  def encode(self, text: str) -> list[int]:
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids` for people and for parsing; control tokens are left out."""
    return self.backend.decode(list(ids), skip_special_tokens=True)


def load(name: str) -> Tokenizer:
  """Loads `nano` (shipped), a local folder, or a Hugging Face hub name.

  Raises:
    ValueError: there is no tokenizer, its vocabulary lacks a ChatML control
      token, or its chat template writes something else than plain ChatML.
  """
  if name == 'nano':
    return load(str(ASSETS / 'nano_sciworld'))
  folder = pathlib.Path(name)
  if not folder.is_dir():
    folder = _from_hub(name)
  backend = _backend(folder, name)
  ids = {token: backend.token_to_id(token) for token in CONTROL_TOKENS}
  missing = [token for token, i in ids.items() if i is None]
  if missing:
    raise ValueError(
      f'tokenizer {name!r} lacks {", ".join(missing)}: ChatML needs '
      f'{", ".join(CONTROL_TOKENS)}; use a Qwen2.5 style tokenizer.'
    )
  backend.encode_special_tokens = True
  backend.no_padding()
  backend.no_truncation()
  forged = [t for t, i in ids.items() if i in backend.encode(t).ids]
  if forged:
    raise ValueError(
      f'tokenizer {name!r} does not mark {", ".join(forged)} as special, so an '
      'observation that spells it could forge a turn; set "special": true for '
      'it in tokenizer.json.'
    )
  num_tokens = max(backend.get_vocab(with_added_tokens=True).values()) + 1
  ends = {ids['<|im_end|>'], ids['<|endoftext|>']}
  for file in _END_FILES:
    ends |= _end_ids(folder / file, num_tokens)
  return Tokenizer(
    backend=backend,
    im_start=ids['<|im_start|>'],
    im_end=ids['<|im_end|>'],
    stop_ids=tuple(sorted(ends)),
    num_tokens=num_tokens,
    files=tuple(folder / f for f in FILES if (folder / f).is_file()),
    system=_system(folder, name),
  )


def _from_hub(name: str) -> pathlib.Path:
  import huggingface_hub  # Slow to import: only hub names need it.

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name, allow_patterns=[*FILES, *_END_FILES]
      )
    )
  except Exception as error:  # Its own types, and those of the network client.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ValueError(
      f'model.tokenizer={name!r} is neither a local folder nor a tokenizer '
      f'that could be fetched from the Hugging Face hub ({reason}). Give a '
      'folder with tokenizer.json, or nano.'
    ) from error


def _backend(folder: pathlib.Path, name: str) -> tokenizers.Tokenizer:
  path = folder / 'tokenizer.json'
  if path.is_file():
    try:
      return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more specific.
      raise ValueError(
        f'{path} cannot be read as a tokenizer ({error}); copy it anew.'
      ) from error
  if not all((folder / f).is_file() for f in ('vocab.json', 'merges.txt')):
    raise ValueError(
      f'no tokenizer.json in {name}, nor vocab.json with merges.txt; a '
      'checkpoint folder holds them beside config.json: copy them there, or '
      'name another model.tokenizer.'
    )
  # An older export. transformers takes two seconds to import: only they need
  # it.
  import transformers

  try:
    return transformers.AutoTokenizer.from_pretrained(
      folder, local_files_only=True
    ).backend_tokenizer
  except Exception as error:  # Whatever the files make it stumble over.
    raise ValueError(
      f'vocab.json and merges.txt in {name} cannot be read as a tokenizer '
      f'({error}); copy tokenizer.json and tokenizer_config.json there too.'
    ) from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """What the file holds; nothing if there is no such file."""
  if not path.is_file():
    return {}
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON ({error}); copy it anew.') from error
  if not isinstance(values, dict):
    raise ValueError(f'{path} holds no JSON object; copy it anew.')
  return values


def _end_ids(path: pathlib.Path, num_tokens: int) -> set[int]:
  ends = _read_json(path).get('eos_token_id')
  ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
  wrong = [i for i in ends if type(i) is not int or not 0 <= i < num_tokens]
  if wrong:
    raise ValueError(
      f'eos_token_id in {path} names {wrong[0]!r}, but the tokenizer has ids 0 '
      f'to {num_tokens - 1}; correct it, or use the tokenizer of this '
      'checkpoint.'
    )
  return set(ends)


def _chatml(messages: Iterable[Message]) -> str:
  """`messages` and the opening of the answer, as `chat` writes them."""
  return ''.join(
    [f'<|im_start|>{role}\n{text}<|im_end|>\n' for role, text in messages]
    + ['<|im_start|>assistant\n']
  )


def _system(folder: pathlib.Path, name: str) -> str | None:
  """The template's own system message; checks that it writes plain ChatML.

  Episodes only append to the tokens that were sampled. A template that drops
  or changes what an earlier turn said would have the policy trained on other
  text than it is served with, so it is refused.
  """
  settings = _read_json(folder / 'tokenizer_config.json')
  template = _template(folder, settings)
  if template is None:
    return None
  render = _renderer(template, settings, name)
  alone, rendered = _PROBE[:1], render(_PROBE[:1])
  head = rendered.removesuffix(_chatml(alone))
  opening = re.fullmatch(
    r'<\|im_start\|>system\n(.*?)<\|im_end\|>\n', head, re.DOTALL
  )
  system = opening[1] if opening else None
  start = [('system', system)] if opening else []
  for count in range(1, len(_PROBE) + 1, 2):
    turns = _PROBE[:count]
    _check(name, render(turns), _chatml([*start, *turns]))
    told = [('system', 'Some rules.'), *turns]
    _check(name, render(told), _chatml(told))
  return system


def _check(name: str, rendered: str, expected: str) -> None:
  if rendered == expected:
    return
  at = len(os.path.commonprefix([rendered, expected]))
  part = slice(max(at - 20, 0), at + 20)
  raise ValueError(
    f'the chat template of {name!r} does not write plain ChatML: it has '
    f'{rendered[part]!r} where {expected[part]!r} was expected. '
    'Earlier turns must stay as they were sampled, thoughts included. Use a '
    'template that keeps them, as that of Qwen2.5-Instruct does, or remove '
    'chat_template from a copy of the folder to train with plain ChatML.'
  )


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  # In the order in which transformers looks.
  path = folder / 'chat_template.jinja'
  if path.is_file():
    return path.read_text(encoding='utf-8')
  found = settings.get('chat_template')
  if found is None:
    found = _read_json(folder / 'chat_template.json').get('chat_template')
  if isinstance(found, list):  # Older form: several by name.
    named = {entry.get('name'): entry.get('template') for entry in found}
    return named.get('default')
  return found


def _renderer(
  template: str, settings: Mapping[str, Any], name: str
) -> Callable[[Iterable[Message]], str]:
  """Renders as transformers' `apply_chat_template` does, without importing it.

  Raises (also when called):
    ValueError: the template has an error or refuses the messages.
  """
  import jinja2.ext
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what is trained; it writes nothing itself."""

    tags = {'generation'}

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(['name:endgeneration'], drop_needle=True)

  def raise_exception(message: str):
    raise jinja2.TemplateError(message)

  # Templates come from strangers: hence the sandbox.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, jinja2.ext.loopcontrols],
  )
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: time.strftime(form)
  tokens = {
    key: token['content'] if isinstance(token, dict) else token
    for key, token in settings.items()
    if key in ('bos_token', 'eos_token', 'pad_token', 'unk_token') and token
  }

  def render(messages: Iterable[Message]) -> str:
    try:
      return environment.from_string(template).render(
        messages=[{'role': role, 'content': text} for role, text in messages],
        add_generation_prompt=True,
        # Templates ask whether these are none.
        tools=None,
        documents=None,
        **tokens,
      )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      raise ValueError(
        f'the chat template of {name!r} cannot be rendered ({error}); correct '
        'it, or remove chat_template from a copy of the folder to train with '
        'plain ChatML.'
      ) from error

  return render


def train(corpus: Iterable[str], vocab_size: int, folder: str) -> Tokenizer:
  """Trains a byte-level BPE and writes it to `folder`.

  Args:
    corpus: texts; the same texts in the same order give the same vocabulary.
    vocab_size: number of ids in all, control and tag tokens included.
    folder: where `tokenizer.json` and `tokenizer_config.json` go.
  """
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  extra = len(CONTROL_TOKENS) + len(TAG_TOKENS)
  backend.train_from_iterator(
    corpus,
    tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size - extra,
      initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    ),
  )
  backend.add_special_tokens(list(CONTROL_TOKENS))
  backend.add_tokens(
    [tokenizers.AddedToken(tag, normalized=False) for tag in TAG_TOKENS]
  )
  os.makedirs(folder, exist_ok=True)
  backend.save(os.path.join(folder, 'tokenizer.json'))
  with open(os.path.join(folder, 'tokenizer_config.json'), 'w') as f:
    json.dump(
      {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'eos_token': '<|im_end|>',
        'pad_token': '<|endoftext|>',
      },
      f,
      indent=1,
    )
  return load(folder)
