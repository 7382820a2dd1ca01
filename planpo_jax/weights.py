"""Hugging Face safetensors folders <-> params.

A folder holds `config.json` and either `model.safetensors` or the shards that
`model.safetensors.index.json` lists, under the tensor names of transformers'
`Qwen2ForCausalLM`. Everything that can be refused (names, shapes, types, a cut
file) is refused from the headers, before the first tensor is read. No second
framework is needed, and bfloat16 goes both ways without a change of bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from planpo_jax.models import qwen2

_CONFIG = 'config.json'
_GENERATION_CONFIG = 'generation_config.json'
_WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'

_DTYPES = {
  'bfloat16': ml_dtypes.bfloat16,
  'float16': np.float16,
  'float32': np.float32,
}
# Names of the same types in a safetensors header.
_STORED_DTYPES = ('BF16', 'F16', 'F32')

# What our parameter is called in a checkpoint, and how many of its leading
# axes are inputs of a linear layer (stored there as [outputs, inputs]); 0 for
# what is not a linear layer.
_TOP_NAMES = {
  'embedding_VD': ('model.embed_tokens.weight', 0),
  'final_norm_D': ('model.norm.weight', 0),
  'head_DV': ('lm_head.weight', 1),
}
_BLOCK_NAMES = {
  'attention_norm_D': ('input_layernorm.weight', 0),
  'attention.w_q_DNH': ('self_attn.q_proj.weight', 1),
  'attention.b_q_NH': ('self_attn.q_proj.bias', 0),
  'attention.w_k_DKH': ('self_attn.k_proj.weight', 1),
  'attention.b_k_KH': ('self_attn.k_proj.bias', 0),
  'attention.w_v_DKH': ('self_attn.v_proj.weight', 1),
  'attention.b_v_KH': ('self_attn.v_proj.bias', 0),
  'attention.w_o_NHD': ('self_attn.o_proj.weight', 2),
  'feed_forward_norm_D': ('post_attention_layernorm.weight', 0),
  'feed_forward.w_gate_DF': ('mlp.gate_proj.weight', 1),
  'feed_forward.w_up_DF': ('mlp.up_proj.weight', 1),
  'feed_forward.w_down_FD': ('mlp.down_proj.weight', 1),
}
_EMBEDDING = _TOP_NAMES['embedding_VD'][0]
_HEAD = _TOP_NAMES['head_DV'][0]

# transformers' Qwen2Config leaves out of the file what equals its defaults.
_CONFIG_DEFAULTS = {
  'vocab_size': 151936,
  'hidden_size': 4096,
  'intermediate_size': 22016,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
  'num_key_value_heads': 32,
}

# Fields of Qwen2Config that say how to compute, not what the network is.
_NUMERIC_FIELDS = ('dtype', 'param_dtype', 'remat')


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """One parameter here and in a checkpoint.

  Attributes:
    name: its name in a checkpoint.
    shape: its shape in params.
    inputs: leading axes that a linear layer sums over; 0 if it is none.
  """

  name: str
  shape: tuple[int, ...]
  inputs: int

  @property
  def stored_shape(self) -> tuple[int, ...]:
    if self.inputs:
      return (
        math.prod(self.shape[self.inputs :]),
        math.prod(self.shape[: self.inputs]),
      )
    return self.shape if self.name == _EMBEDDING else (math.prod(self.shape),)

  def from_stored(self, array: np.ndarray) -> np.ndarray:
    return (array.T if self.inputs else array).reshape(self.shape)

  def to_stored(self, array: np.ndarray) -> np.ndarray:
    if self.inputs:
      return array.reshape(self.stored_shape[::-1]).T
    return array.reshape(self.stored_shape)


@functools.lru_cache(maxsize=8)
def _tensors(policy: qwen2.Policy) -> qwen2.Params:
  """Params with a `_Tensor` in the place of every array."""

  def describe(path, leaf):
    keys = [key.key for key in path]
    if keys[0] == 'blocks':
      name, inputs = _BLOCK_NAMES['.'.join(keys[2:])]
      name = f'model.layers.{int(keys[1])}.{name}'
    else:
      name, inputs = _TOP_NAMES['.'.join(keys)]
    return _Tensor(name, leaf.shape, inputs)

  abstract = jax.eval_shape(
    lambda: qwen2.init_params(policy, jax.random.key(0))
  )
  return jax.tree_util.tree_map_with_path(describe, abstract)


def tensor_shapes(policy: qwen2.Policy) -> dict[str, tuple[int, ...]]:
  """Name and stored shape of every tensor in a checkpoint of this policy."""
  return {
    tensor.name: tensor.stored_shape
    for tensor in jax.tree.leaves(_tensors(policy))
  }


def read_config(folder: str | os.PathLike[str]) -> qwen2.Qwen2Config:
  """Shapes of the network in a checkpoint folder.

  The types in the file are ignored: `dtype` and `param_dtype` of the result
  are the defaults, for the caller to replace.

  Args:
    folder: holds `config.json` with model_type qwen2.

  Raises:
    FileNotFoundError: no such folder, or no `config.json` in it.
    ValueError: another model type, or a feature that is not implemented
      (scaled rotary positions, sliding windows, quantization).
  """
  folder = _existing_folder(folder)
  path = folder / _CONFIG
  if not path.is_file():
    raise FileNotFoundError(
      f'{path} is missing, so {folder} is not a checkpoint folder; give the '
      f'folder that holds {_CONFIG} and {_WEIGHTS} (found: {_listing(folder)}).'
    )
  values = _read_json(path)
  if values.get('model_type') != 'qwen2':
    raise ValueError(
      f'{path}: model_type is {values.get("model_type")!r}, but only '
      "'qwen2' (Qwen2 and Qwen2.5) can be loaded; give a folder of that kind."
    )
  rope = values.get('rope_parameters') or values.get('rope_scaling') or {}
  rope_type = rope.get('rope_type', rope.get('type', 'default'))
  sliding = values.get('use_sliding_window', False) or any(
    kind != 'full_attention' for kind in values.get('layer_types') or ()
  )
  for refused, found in (
    (rope_type != 'default', f'rotary positions of type {rope_type!r}'),
    (sliding, 'sliding-window attention'),
    (
      values.get('hidden_act', 'silu') != 'silu',
      f'hidden_act {values.get("hidden_act")!r}',
    ),
    ('quantization_config' in values, 'quantized weights'),
  ):
    if refused:
      raise ValueError(
        f'{path} asks for {found}, which is not implemented; give the '
        'checkpoint without it.'
      )

  def count(key, default=None):
    value = values.get(key)
    value = _CONFIG_DEFAULTS.get(key, default) if value is None else value
    if not isinstance(value, int) or value < 1:
      raise ValueError(f'{path}: {key} is {value!r}, must be an integer >= 1.')
    return value

  hidden_size = count('hidden_size')
  num_heads = count('num_attention_heads')
  theta = rope.get('rope_theta') or values.get('rope_theta') or 10000.0
  try:
    return qwen2.Qwen2Config(
      vocab_size=count('vocab_size'),
      hidden_size=hidden_size,
      intermediate_size=count('intermediate_size'),
      num_layers=count('num_hidden_layers'),
      num_heads=num_heads,
      num_kv_heads=count('num_key_value_heads'),
      head_dim=count('head_dim', hidden_size // num_heads),
      tie_word_embeddings=bool(values.get('tie_word_embeddings', False)),
      rope_theta=float(theta),
      rms_norm_eps=float(values.get('rms_norm_eps', 1e-6)),
    )
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path}: {error}') from error


def load(
  folder: str | os.PathLike[str],
  policy: qwen2.Policy,
  *,
  param_dtype: str = 'float32',
  shardings: Any = None,
) -> qwen2.Params:
  """Params of a checkpoint folder.

  With an index, exactly the shards it lists are read; other files in the
  folder are ignored. Tensors are read and placed one by one, so the host
  never holds more than one of them beside the params themselves.

  Args:
    folder: as for `read_config`.
    policy: its config must describe the same network as the folder's
      `config.json`.
    param_dtype: bfloat16, float16 or float32; type of the result, whatever
      the type in the file.
    shardings: a `jax.sharding.Sharding` for every array, in the structure of
      params; None puts all on the default device. May span hosts, which all
      need the folder.

  Returns:
    Params in the structure of `qwen2.init_params`.

  Raises:
    FileNotFoundError: the folder, its weights or a listed shard is missing.
    ValueError: the folder is of another network than `policy`; a file is cut
      or damaged; tensors are missing, unexpected, misshapen or of a type that
      is not floating point; a value is out of range of `param_dtype`.
  """
  dtype = _dtype('param_dtype', param_dtype)
  folder = _existing_folder(folder)
  _check_same_network(folder, policy.config)
  tensors = _tensors(policy)
  if shardings is None:
    shardings = jax.tree.map(lambda _: None, tensors)
  with contextlib.ExitStack() as stack:
    files = _open_files(folder, stack)
    _check_tensors(folder, files, tensors, policy.config)

    def read(tensor, sharding):
      array = tensor.from_stored(files[tensor.name].get_tensor(tensor.name))
      array = _convert(array, dtype, f'{folder}: tensor {tensor.name}')
      if sharding is None:
        # A copy: params are donated by the update, files[...] may be a view.
        return jnp.array(array)
      return jax.make_array_from_callback(
        tensor.shape, sharding, lambda index: np.array(array[index])
      )

    return jax.tree.map(read, tensors, shardings)


def save(
  folder: str | os.PathLike[str],
  policy: qwen2.Policy,
  params: qwen2.Params,
  *,
  dtype: str = 'bfloat16',
  eos_ids: Sequence[int] = (),
  tokenizer_files: Sequence[str | os.PathLike[str]] = (),
) -> None:
  """Writes a folder that `load` and transformers can read.

  All files are written beside the folder and moved into place by a rename, so
  the folder never holds half a checkpoint. An earlier one is replaced. All
  rows of the embedding are written, spare ones included.

  Args:
    folder: made if need be; see `check_target` for when it is refused.
    policy: the network.
    params: its params, all of them on devices of this process.
    dtype: bfloat16, float16 or float32; type in the file.
    eos_ids: ids that end a turn, for both configuration files.
    tokenizer_files: copied into the folder under their own names.

  Raises:
    FileExistsError: see `check_target`.
    FileNotFoundError: a tokenizer file is missing.
    ValueError: params are not those of `policy`; a value is not finite in
      `dtype`; an end id is not a token.
  """
  file_dtype = _dtype('dtype', dtype)
  folder = pathlib.Path(folder).resolve()
  check_target(folder, tokenizer_files)
  for eos_id in eos_ids:
    if not 0 <= eos_id < policy.num_tokens:
      raise ValueError(
        f'eos_ids: {eos_id} is not a token id; ids must be in '
        f'0..{policy.num_tokens - 1}.'
      )
  tensors = _tensors(policy)
  _check_params(params, tensors)
  arrays = {}

  def write(tensor, value):
    array = _convert(np.asarray(value), file_dtype, f'param {tensor.name}')
    arrays[tensor.name] = np.ascontiguousarray(tensor.to_stored(array))

  jax.tree.map(write, tensors, params)
  eos = {'eos_token_id': [int(i) for i in eos_ids]} if eos_ids else {}
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = folder.with_name(f'.{folder.name}.partial-{os.getpid()}')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir()
  try:
    _write_json(partial / _CONFIG, _hf_config(policy.config, dtype) | eos)
    _write_json(partial / _GENERATION_CONFIG, eos)
    for path in tokenizer_files:
      shutil.copyfile(path, partial / pathlib.Path(path).name)
    # transformers reads the format from the metadata.
    safetensors.numpy.save_file(
      arrays, partial / _WEIGHTS, metadata={'format': 'pt'}
    )
    # It comes out readable by its owner only.
    shutil.copymode(partial / _CONFIG, partial / _WEIGHTS)
    _move_into_place(partial, folder)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def check_target(
  folder: str | os.PathLike[str],
  tokenizer_files: Sequence[str | os.PathLike[str]] = (),
) -> None:
  """Says early whether `save` would refuse these paths.

  Args:
    folder: where to save.
    tokenizer_files: as for `save`.

  Raises:
    FileExistsError: the folder holds files that `save` does not write (and
      so would delete), or is a file.
    FileNotFoundError: a tokenizer file is missing.
    ValueError: two files would get the same name.
  """
  folder = pathlib.Path(folder)
  written = {_CONFIG, _GENERATION_CONFIG, _WEIGHTS}
  for path in map(pathlib.Path, tokenizer_files):
    if not path.is_file():
      raise FileNotFoundError(
        f'tokenizer file {path} is missing; give paths of existing files.'
      )
    if path.name in written:
      raise ValueError(
        f'tokenizer file {path} would overwrite {path.name} of the '
        'checkpoint; file names must differ.'
      )
    written.add(path.name)
  if folder.exists() and not folder.is_dir():
    raise FileExistsError(f'{folder} is a file; give the path of a folder.')
  extra = {path.name for path in folder.glob('*')} - written
  if extra:
    raise FileExistsError(
      f'{folder} holds {_enumerate(extra)}, which saving would delete; give '
      'another folder, or empty this one.'
    )


def _hf_config(config: qwen2.Qwen2Config, dtype: str) -> dict[str, Any]:
  return {
    'architectures': ['Qwen2ForCausalLM'],
    'model_type': 'qwen2',
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.rms_norm_eps,
    # transformers 5 nests theta in rope_parameters but still reads this form,
    # which is the only one that older readers know.
    'rope_theta': config.rope_theta,
    'max_position_embeddings': 32768,
    'tie_word_embeddings': config.tie_word_embeddings,
    'use_sliding_window': False,
    'attention_dropout': 0.0,
    'torch_dtype': dtype,
  }


def _existing_folder(folder) -> pathlib.Path:
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise FileNotFoundError(
      f'{folder} is not a folder on this machine; models are not fetched: '
      'download the checkpoint first, e.g. with '
      '`hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir DIR`, and give DIR.'
    )
  return folder


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(
      f'{path} is not valid JSON ({error}); download it again.'
    ) from error
  if not isinstance(values, dict):
    raise ValueError(f'{path} must hold a JSON object; download it again.')
  return values


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')


def _open_files(
  folder: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
  """The open file of every tensor name."""
  index = folder / _INDEX
  if index.is_file():
    weight_map = _read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise ValueError(f'{index} has no weight_map; download it again.')
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
      raise FileNotFoundError(
        f'{folder}: {index.name} lists {_enumerate(missing)}, not found in '
        'the folder; the download is incomplete, fetch what is missing.'
      )
  elif (folder / _WEIGHTS).is_file():
    weight_map, shards = None, [_WEIGHTS]
  else:
    raise FileNotFoundError(
      f'{folder} holds neither {_WEIGHTS} nor {_INDEX}; give a folder with '
      f'safetensors weights (found: {_listing(folder)}).'
    )
  files = {}
  for shard in shards:
    file = stack.enter_context(_open_file(folder / shard))
    for name in file.keys():
      if weight_map and weight_map.get(name) != shard:
        raise ValueError(
          f'{folder / shard} holds tensor {name}, but {index.name} places it '
          f'in {weight_map.get(name)}; the files are of different '
          'checkpoints, download them again.'
        )
      files[name] = file
  lost = set(weight_map or ()) - set(files)
  if lost:
    raise ValueError(
      f'{folder}: {index.name} lists {_enumerate(lost)}, not in the '
      f'shard it names ({weight_map[min(lost)]}); download it again.'
    )
  return files


def _open_file(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, framework='numpy')
  except safetensors.SafetensorError as error:
    with path.open('rb') as file:
      is_pointer = file.read(23) == b'version https://git-lfs'
    fix = (
      'it is a Git LFS pointer, run `git lfs pull` in its folder'
      if is_pointer
      else 'it is cut or damaged, download it again'
    )
    raise ValueError(
      f'{path} ({path.stat().st_size} bytes) cannot be read as safetensors: '
      f'{error}; {fix}.'
    ) from error


def _check_same_network(folder, config: qwen2.Qwen2Config) -> None:
  found = read_config(folder)
  differing = [
    f'{field.name} {getattr(found, field.name)} in the folder, '
    f'{getattr(config, field.name)} in the policy'
    for field in dataclasses.fields(config)
    if field.name not in _NUMERIC_FIELDS
    and getattr(found, field.name) != getattr(config, field.name)
  ]
  if differing:
    raise ValueError(
      f'{folder} is of another network than the policy: '
      f'{"; ".join(differing)}; make the policy from weights.read_config.'
    )


def _check_tensors(folder, files, tensors, config) -> None:
  """Names, types and shapes, from the headers alone."""
  expected = {t.name: t.stored_shape for t in jax.tree.leaves(tensors)}
  unexpected = set(files) - set(expected)
  if config.tie_word_embeddings and _HEAD in unexpected:
    # Some exports repeat the tied embedding. Harmless if it is the same.
    head, embedding = (
      files[name].get_tensor(name) if name in files else None
      for name in (_HEAD, _EMBEDDING)
    )
    if not np.array_equal(head, embedding):
      raise ValueError(
        f'{folder}: {_HEAD} differs from {_EMBEDDING}, but {_CONFIG} says '
        'tie_word_embeddings; set it to false there if the head is meant.'
      )
    unexpected.discard(_HEAD)
  missing = set(expected) - set(files)
  if missing:
    raise ValueError(
      f'{folder}: missing {_enumerate(missing)}; the checkpoint is '
      'incomplete, download it again.'
    )
  if unexpected:
    raise ValueError(
      f'{folder}: unexpected {_enumerate(unexpected)}; a network of this '
      f'{_CONFIG} has no such parameters, give the matching pair.'
    )
  for name, shape in expected.items():
    header = files[name].get_slice(name)
    if tuple(header.get_shape()) != shape:
      raise ValueError(
        f'{folder}: tensor {name} has shape {tuple(header.get_shape())}, '
        f'{_CONFIG} makes it {shape}; the two are of different checkpoints.'
      )
    if header.get_dtype() not in _STORED_DTYPES:
      raise ValueError(
        f'{folder}: tensor {name} has type {header.get_dtype()}, must be one '
        f'of {", ".join(_STORED_DTYPES)}; give the unquantized checkpoint.'
      )


def _check_params(params, tensors) -> None:
  """Structure, shapes and place of the params of a policy."""
  flat = jax.tree_util.tree_flatten_with_path

  def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat(tree)[0]}

  expected, found = by_path(tensors), by_path(params)
  if differing := set(expected) ^ set(found):
    raise ValueError(
      f'params are not those of the policy: {_enumerate(differing)} in only '
      'one of the two; give the policy that the params were made with.'
    )
  for path, tensor in expected.items():
    if found[path].shape != tensor.shape:
      raise ValueError(
        f'params{path} has shape {found[path].shape}, the policy has '
        f'{tensor.shape}; give the policy that the params were made with.'
      )
    if not getattr(found[path], 'is_fully_addressable', True):
      raise ValueError(
        f'params{path} is spread over several hosts and saving is done by '
        'one; restore the training checkpoint on a single host and save there.'
      )


def _dtype(argument: str, name: str):
  if name not in _DTYPES:
    raise ValueError(
      f'{argument}={name!r} must be one of {", ".join(_DTYPES)}.'
    )
  return _DTYPES[name]


def _convert(array: np.ndarray, dtype, what: str) -> np.ndarray:
  # Said below in our own words, with the name of the tensor.
  with np.errstate(over='ignore', invalid='ignore'):
    array = array.astype(dtype, copy=False)
    finite = np.isfinite(array).all()
  if not finite:
    raise ValueError(
      f'{what} has values that are not finite in {np.dtype(dtype).name}; '
      'take a wider type, or weights from before they diverged.'
    )
  return array


def _move_into_place(partial: pathlib.Path, folder: pathlib.Path) -> None:
  for path in partial.iterdir():
    with path.open('rb') as file:
      os.fsync(file.fileno())
  if not folder.exists():
    partial.rename(folder)
    return
  # A folder that is not empty cannot be renamed over.
  old = folder.with_name(f'.{folder.name}.old-{os.getpid()}')
  folder.rename(old)
  try:
    partial.rename(folder)
  except BaseException:
    old.rename(folder)
    raise
  shutil.rmtree(old)


def _listing(folder: pathlib.Path) -> str:
  return _enumerate(path.name for path in folder.iterdir()) or 'nothing'


def _enumerate(names, limit: int = 5) -> str:
  names = sorted(names)
  rest = f' and {len(names) - limit} more' if len(names) > limit else ''
  return ', '.join(names[:limit]) + rest
