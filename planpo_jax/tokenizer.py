"""Token ids of text, with the ChatML control tokens kept apart from it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

import tokenizers

ASSETS = pathlib.Path(__file__).parent / 'assets'
# The order gives the ids, as in Qwen2.5: after all merges come the controls.
CONTROL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
# One token each in the nano vocabulary: they occur in every response.
TAG_TOKENS = ('<think>', '</think>', '<action>', '</action>')


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A byte-level BPE whose text can never turn into a control token.

  Attributes:
    backend: the `tokenizers` object. Control tokens inside text are encoded
      as plain characters, so an observation cannot forge a turn.
    im_start: id that opens a ChatML message.
    im_end: id that closes one.
    stop_ids: ids that end a response: `<|im_end|>` and `<|endoftext|>`.
    num_tokens: number of ids the tokenizer knows; model rows past it are
      padding and are never sampled.
    files: files to copy beside an exported checkpoint.
  """

  backend: tokenizers.Tokenizer
  im_start: int
  im_end: int
  stop_ids: tuple[int, ...]
  num_tokens: int
  files: tuple[pathlib.Path, ...] = ()

  def encode(self, text: str) -> list[int]:
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of `ids` for people and for parsing; control tokens are left out."""
    return self.backend.decode(list(ids), skip_special_tokens=True)


def load(name: str) -> Tokenizer:
  """Loads `nano` (shipped), a local folder, or a Hugging Face hub name.

  Raises:
    ValueError: the folder holds no tokenizer, or the vocabulary lacks one of
      the ChatML control tokens.
  """
  if name == 'nano':
    return load(str(ASSETS / 'nano_sciworld'))
  folder = pathlib.Path(name)
  if folder.is_dir():
    path = folder / 'tokenizer.json'
    if not path.is_file():
      raise ValueError(
        f'no tokenizer.json in {folder}; a checkpoint folder holds one beside '
        'config.json: copy it there, or name another model.tokenizer.'
      )
    try:
      backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more specific.
      raise ValueError(
        f'{path} cannot be read as a tokenizer ({error}); copy it anew.'
      ) from error
    known = ('tokenizer.json', 'tokenizer_config.json')
    files = tuple(folder / f for f in known if (folder / f).is_file())
    return _wrap(backend, name, files)
  return _wrap(_from_hub(name), name, ())


@functools.cache
def _from_hub(name: str) -> tokenizers.Tokenizer:
  # transformers takes two seconds to import: only hub names need it.
  import transformers

  try:
    return transformers.AutoTokenizer.from_pretrained(name).backend_tokenizer
  except (OSError, ValueError) as error:
    raise ValueError(
      f'model.tokenizer={name!r} is neither a local folder nor a tokenizer '
      'that could be fetched from the Hugging Face hub '
      f'({str(error).splitlines()[0]}). Give a folder with tokenizer.json, or '
      'nano.'
    ) from error


def _wrap(
  backend: tokenizers.Tokenizer, name: str, files: tuple[pathlib.Path, ...]
) -> Tokenizer:
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
  return Tokenizer(
    backend=backend,
    im_start=ids['<|im_start|>'],
    im_end=ids['<|im_end|>'],
    stop_ids=tuple(sorted((ids['<|im_end|>'], ids['<|endoftext|>']))),
    num_tokens=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
    files=files,
  )


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
