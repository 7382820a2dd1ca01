"""Hugging Face safetensors folders <-> params.

A folder holds `config.json` and either `model.safetensors` or the shards that
`model.safetensors.index.json` lists, under the tensor names of transformers'
`Qwen2ForCausalLM`. Everything that can be refused (names, shapes, types, a cut
file) is refused from the headers, before the first tensor is read. No second
framework is needed, and bfloat16 goes both ways without a change of bits.

Files are read and written in pieces, never mapped: pages of a mapped file
count as memory of the process, so a large checkpoint would fill it twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from planpo_jax import sharding, tokenizer
from planpo_jax.models import qwen2

_CONFIG = 'config.json'
_GENERATION_CONFIG = 'generation_config.json'
_WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_SHARD = re.compile(r'model-\d{5}-of-\d{5}\.safetensors')
_ARCHITECTURE = 'Qwen2ForCausalLM'
# What is fetched for a hub name.
_PATTERNS = (
  _CONFIG,
  _GENERATION_CONFIG,
  _INDEX,
  'model*.safetensors',
  *tokenizer.FILES,
)
_HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')

# Types by their name in a safetensors header, wider ones first.
_STORED_DTYPES = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
_TYPES = {dtype.name: name for name, dtype in _STORED_DTYPES.items()}
DTYPES = tuple(_TYPES)

# Bytes of a file that are held at a time.
_PIECE_BYTES = 1 << 22
# As transformers writes them: more is split into several files.
_DEFAULT_SHARD_BYTES = 5e9

# What our parameter is called in a checkpoint. There it has the same axes in
# the same order, with heads and head size as one.
_TOP_NAMES = {
  'embedding_VD': 'model.embed_tokens.weight',
  'final_norm_D': 'model.norm.weight',
  'head_VD': 'lm_head.weight',
}
# In transformers' order, in which files are filled.
_BLOCK_NAMES = {
  'attention.w_q_NHD': 'self_attn.q_proj.weight',
  'attention.b_q_NH': 'self_attn.q_proj.bias',
  'attention.w_k_KHD': 'self_attn.k_proj.weight',
  'attention.b_k_KH': 'self_attn.k_proj.bias',
  'attention.w_v_KHD': 'self_attn.v_proj.weight',
  'attention.b_v_KH': 'self_attn.v_proj.bias',
  'attention.w_o_DNH': 'self_attn.o_proj.weight',
  'feed_forward.w_gate_FD': 'mlp.gate_proj.weight',
  'feed_forward.w_up_FD': 'mlp.up_proj.weight',
  'feed_forward.w_down_DF': 'mlp.down_proj.weight',
  'attention_norm_D': 'input_layernorm.weight',
  'feed_forward_norm_D': 'post_attention_layernorm.weight',
}
_EMBEDDING = _TOP_NAMES['embedding_VD']
_HEAD = _TOP_NAMES['head_VD']

# transformers' Qwen2Config leaves out of the file what equals its defaults.
_CONFIG_DEFAULTS = {
  'vocab_size': 151936,
  'hidden_size': 4096,
  'intermediate_size': 22016,
  'num_hidden_layers': 32,
  'num_attention_heads': 32,
  'num_key_value_heads': 32,
  'max_position_embeddings': 32768,
}

# Fields of Qwen2Config that say how to compute, not what the network is.
_NUMERIC_FIELDS = (
  'dtype',
  'param_dtype',
  'remat',
  'scan_layers',
  'on_cpu',
  'attention',
)


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """One parameter, and the tensor of a checkpoint that fills it.

  Both hold the same numbers in the same order, but for the rows of an
  embedding past the vocabulary, which a checkpoint lacks.

  Attributes:
    names: its name in a checkpoint; of each layer if layers are stacked.
    shape: its shape in params.
    stacked: its first axis counts layers.
    stored_shape: in a checkpoint, of one layer.
  """

  names: tuple[str, ...]
  shape: tuple[int, ...]
  stacked: bool
  stored_shape: tuple[int, ...]

  @property
  def layer_shape(self) -> tuple[int, ...]:
    return self.shape[1:] if self.stacked else self.shape


@functools.lru_cache(maxsize=8)
def _tensors(policy: qwen2.Policy) -> qwen2.Params:
  """Params with a `_Tensor` in the place of every array."""
  config = policy.config

  def describe(path, leaf):
    keys = [key.key for key in path]
    if keys[0] != 'blocks':
      name = _TOP_NAMES['.'.join(keys)]
      rows = (config.vocab_size,) if leaf.ndim == 2 else leaf.shape[:1]
      return _Tensor((name,), leaf.shape, False, rows + leaf.shape[1:])
    stacked = config.scan_layers
    name = _BLOCK_NAMES['.'.join(keys[1 if stacked else 2 :])]
    layers = range(config.num_layers) if stacked else [int(keys[1])]
    names = tuple(f'model.layers.{i}.{name}' for i in layers)
    shape = leaf.shape[1:] if stacked else leaf.shape
    if name.endswith('bias') or len(shape) == 1:
      stored_shape = (math.prod(shape),)
    elif name.startswith('self_attn.o_proj'):
      stored_shape = (shape[0], math.prod(shape[1:]))
    else:
      stored_shape = (math.prod(shape[:-1]), shape[-1])
    return _Tensor(names, leaf.shape, stacked, stored_shape)

  return jax.tree_util.tree_map_with_path(
    describe, qwen2.abstract_params(policy)
  )


def tensor_shapes(policy: qwen2.Policy) -> dict[str, tuple[int, ...]]:
  """Name and stored shape of every tensor in a checkpoint of this policy."""
  return {
    name: tensor.stored_shape
    for tensor in jax.tree.leaves(_tensors(policy))
    for name in tensor.names
  }


def resolve(name: str | os.PathLike[str]) -> pathlib.Path:
  """The folder of a checkpoint, fetched from the Hugging Face hub if need be.

  Args:
    name: a local folder; the name of a checkpoint that is shipped with the
      package; or a hub name such as `Qwen/Qwen2.5-1.5B-Instruct`. A hub name
      is looked up as huggingface_hub does it: its cache, HF_HOME, HF_TOKEN and
      HF_HUB_OFFLINE apply. Only safetensors, configuration and tokenizer files
      are fetched.

  Raises:
    FileNotFoundError: `name` is no folder and no hub name either.
    ValueError: the hub cannot be reached, or has no such model.
  """
  folder = pathlib.Path(name).expanduser()
  if str(name) and folder.is_dir():
    return folder
  if re.fullmatch(r'\w+', str(name)) and (tokenizer.ASSETS / name).is_dir():
    return tokenizer.ASSETS / name
  if not _HUB_NAME.fullmatch(str(name)):
    return _existing_folder(name)
  import huggingface_hub  # Slow to import: only hub names need it.

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        str(name), allow_patterns=list(_PATTERNS)
      )
    )
  except Exception as error:  # Its own types, and those of the network client.
    reason = (str(error).strip().splitlines() or ['no message'])[0].rstrip('.')
    raise ValueError(
      f'{name} is no folder on this machine, and the Hugging Face hub gave no '
      f'model of that name ({type(error).__name__}: {reason}). Where there is '
      f'a network, run `hf download {name} --local-dir DIR`, and give DIR.'
    ) from error


def read_config(folder: str | os.PathLike[str]) -> qwen2.Qwen2Config:
  """Shapes of the network in a checkpoint folder.

  The types in the file are ignored: `dtype` and `param_dtype` of the result
  are the defaults, for the caller to replace.

  Args:
    folder: holds `config.json` with model_type qwen2.

  Raises:
    FileNotFoundError: no such folder, or no `config.json` in it.
    ValueError: another architecture, or a feature that is not implemented
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
  model_type = values.get('model_type')
  architectures = values.get('architectures') or [_ARCHITECTURE]
  if model_type != 'qwen2' or _ARCHITECTURE not in architectures:
    found = f'{", ".join(map(str, architectures))}, ' * (
      'architectures' in values
    )
    raise ValueError(
      f'{path} is of another architecture ({found}model_type {model_type!r}): '
      f"only {_ARCHITECTURE}, model_type 'qwen2' (Qwen2 and Qwen2.5), can be "
      'loaded; give a folder of that kind.'
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
      max_positions=count('max_position_embeddings'),
    )
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path}: {error}') from error


def stored_dtype(folder: str | os.PathLike[str]) -> str:
  """The narrowest `param_dtype` that holds every weight of a folder exactly.

  Raises:
    FileNotFoundError, ValueError: as for `load`.
  """
  files = _read_headers(_existing_folder(folder))
  types = {stored.type for stored in files.values()}
  # What is not known here is refused by `load`.
  only = _STORED_DTYPES.get(types.pop()) if len(types) == 1 else None
  return only.name if only else 'float32'


def load(
  folder: str | os.PathLike[str],
  policy: qwen2.Policy,
  *,
  param_dtype: str = 'float32',
  shardings: Any = None,
) -> qwen2.Params:
  """Params of a checkpoint folder.

  With an index, exactly the shards it lists are read; other files in the
  folder are ignored. Tensors are read one by one, each process only the rows
  that its devices need, and placed before the next one is read: beside the
  params themselves the host holds one tensor (in stacked params, of one
  layer) and a piece of a file.

  Args:
    folder: as for `read_config`.
    policy: its config must describe the same network as the folder's
      `config.json`.
    param_dtype: bfloat16, float16 or float32; type of the result, whatever
      the type in the file.
    shardings: a `jax.sharding.Sharding` for every array, in the structure of
      params; None puts all on the default device. May span hosts, which all
      need the folder. An axis of layers must not be split.

  Returns:
    Params in the structure of `qwen2.init_params`; rows of embeddings past
    the vocabulary are zero.

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
  files = _read_headers(folder)
  _check_tensors(folder, files, tensors, policy.config)
  if shardings is None:
    shardings = jax.tree.map(lambda _: None, tensors)

  def read(tensor, sharding):
    def layer(name):
      return _read_tensor(
        files[name], tensor, dtype, sharding, f'{folder}: tensor {name}'
      )

    if not tensor.stacked:
      return layer(tensor.names[0])
    stack, set_layer = _stacking(tensor.shape, dtype, sharding)
    for i, name in enumerate(tensor.names):
      # Waits, else layers would pile up on the host.
      stack = set_layer(stack, layer(name), i).block_until_ready()
    return stack

  return jax.tree.map(read, tensors, shardings)


def _stacking(shape, dtype, sharding):
  """Zeros of stacked params, and `(stack, layer [1, ...], i) -> stack`."""

  def set_layer(stack, layer, i):
    return jax.lax.dynamic_update_slice_in_dim(stack, layer, i, axis=0)

  zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
  return zeros(), jax.jit(set_layer, donate_argnums=0, out_shardings=sharding)


def _read_tensor(
  stored: _Stored,
  tensor: _Tensor,
  dtype: Any,
  sharding: jax.sharding.Sharding | None,
  what: str,
) -> jax.Array:
  """A tensor of a file on the devices, [1, ...] if it is one of a stack."""
  lead = (1,) if tensor.stacked else ()
  shape = (*lead, *tensor.layer_shape)
  if sharding is None:
    places = {None: (slice(None),) * len(shape)}
  else:
    places = sharding.addressable_devices_indices_map(shape)
  # Devices that hold the same part share what is read.
  parts, hosts = {}, {}
  for place, index in places.items():
    bounds = tuple(
      s.indices(size)[:2] for s, size in zip(index, shape, strict=True)
    )[len(lead) :]
    parts[place] = bounds
    if bounds not in hosts:
      hosts[bounds] = _zeros([b - a for a, b in bounds], dtype)
  _read_parts(stored, tensor.layer_shape, hosts, what)

  def put(place):
    # On CPU the result is this very memory, also on several devices. Nothing
    # else refers to it, and jax does not write to it when it is donated.
    host = hosts[parts[place]]
    return jax.device_put(host.reshape(*lead, *host.shape), place)

  arrays = [put(place) for place in places]
  if sharding is None:
    return arrays[0].block_until_ready()
  return jax.make_array_from_single_device_arrays(
    shape, sharding, arrays
  ).block_until_ready()


def _zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  """An array whose memory goes back to the system as soon as it is freed.

  That of np.zeros may stay with the allocator, between arrays that live on.
  """
  size = math.prod(shape) * dtype.itemsize
  memory = mmap.mmap(-1, max(size, 1))
  return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def _read_parts(
  stored: _Stored,
  shape: tuple[int, ...],
  parts: Mapping[tuple[tuple[int, int], ...], np.ndarray],
  what: str,
) -> None:
  """Fills the parts of a tensor, each given by its bounds in `shape`.

  Rows that no part needs are not read, and rows past those stored are left.
  """
  row = math.prod(shape[1:])
  rows = math.prod(stored.shape) // row
  step = max(1, _PIECE_BYTES // (row * stored.dtype.itemsize))
  first = min(bounds[0][0] for bounds in parts)
  last = min(rows, max(bounds[0][1] for bounds in parts))
  with stored.path.open('rb') as file:
    for start in range(first, last, step):
      stop = min(start + step, last)
      wanted = [
        (bounds, max(start, bounds[0][0]), min(stop, bounds[0][1]))
        for bounds in parts
      ]
      wanted = [part for part in wanted if part[1] < part[2]]
      if not wanted:
        continue
      piece = _read(file, stored, start * row, stop * row)
      piece = piece.reshape(-1, *shape[1:])
      for bounds, a, b in wanted:
        rest = tuple(slice(*bound) for bound in bounds[1:])
        part = parts[bounds][a - bounds[0][0] : b - bounds[0][0]]
        _convert(piece[(slice(a - start, b - start), *rest)], part, what)


def _read(file, stored: _Stored, start: int, stop: int) -> np.ndarray:
  """Elements start..stop of a tensor, flat."""
  elements = _zeros((stop - start,), stored.dtype)
  file.seek(stored.offset + start * stored.dtype.itemsize)
  # bfloat16 arrays have no buffer of their own type.
  if file.readinto(elements.view(np.uint8)) != elements.nbytes:
    raise ValueError(
      f'{stored.path} was cut while it was read; load it again when it is '
      'no longer being written.'
    )
  return elements


def save(
  folder: str | os.PathLike[str],
  policy: qwen2.Policy,
  params: qwen2.Params,
  *,
  dtype: str | None = None,
  eos_ids: Sequence[int] = (),
  tokenizer_files: Sequence[str | os.PathLike[str]] = (),
  like: str | os.PathLike[str] | None = None,
  max_shard_bytes: float | None = None,
) -> list[pathlib.Path]:
  """Writes a folder that `load` and transformers can read.

  All files are written beside the folder and moved into place by a rename, so
  the folder never holds half a checkpoint. An earlier one is replaced. All
  rows of the vocabulary are written, spare ones included. The host holds one
  tensor at a time.

  With `like` the folder becomes what that one would be with these weights:
  its configuration, tokenizer and chat template are copied. If neither type
  nor size of the files is to change, its files are laid out in the same way,
  so that weights which did not change give the same bytes.

  Args:
    folder: made if need be; see `check_target` for when it is refused.
    policy: the network.
    params: its params, all of them on devices of this process.
    dtype: bfloat16, float16 or float32; type in the file. None keeps the type
      that each tensor has in `like`; without `like` it means bfloat16.
    eos_ids: ids that end a turn, for both configuration files. None given
      keeps those of `like`.
    tokenizer_files: copied into the folder under their own names, instead of
      those of `like`.
    like: checkpoint folder of the same network.
    max_shard_bytes: weights of more bytes are split into several files with an
      index, each up to this size or of a single tensor. None keeps the files
      of `like`; otherwise it means 5e9.

  Returns:
    Paths of the files.

  Raises:
    FileExistsError: see `check_target`.
    FileNotFoundError: a tokenizer file, or `like`, is missing.
    ValueError: params are not those of `policy`; a value is not finite in
      `dtype`; an end id is not a token; `like` cannot be read, is of another
      network, or is the folder itself.
  """
  if dtype is not None:
    _dtype('dtype', dtype)
  if max_shard_bytes is not None and not max_shard_bytes > 0:
    raise ValueError(
      f'max_shard_bytes={max_shard_bytes} must be greater than 0; try 5e9.'
    )
  folder = pathlib.Path(folder).resolve()
  check_target(folder, tokenizer_files, like)
  for eos_id in eos_ids:
    if not 0 <= eos_id < policy.num_tokens:
      raise ValueError(
        f'eos_ids: {eos_id} is not a token id; ids must be in '
        f'0..{policy.num_tokens - 1}.'
      )
  tensors = _tensors(policy)
  _check_params(params, tensors)
  if like is None:
    types = dict.fromkeys(tensor_shapes(policy), _TYPES[dtype or 'bfloat16'])
    layout = None
  else:
    like = pathlib.Path(like)
    _check_same_network(like, policy.config)
    files = _read_headers(like)
    _check_tensors(like, files, tensors, policy.config)
    types = {name: stored.type for name, stored in files.items()}
    if dtype is None or set(types.values()) == {_TYPES[dtype]}:
      dtype = None
      layout = _layout_of(like, files) if max_shard_bytes is None else None
    else:
      types = dict.fromkeys(types, _TYPES[dtype])
      layout = None
  if layout is None:
    layout = _new_layout(policy, types, max_shard_bytes or _DEFAULT_SHARD_BYTES)
  files, others = layout
  others |= _configurations(policy.config, dtype, eos_ids, like)
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = folder.with_name(f'.{folder.name}.partial-{os.getpid()}')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir()
  try:
    for name, content in others.items():
      (partial / name).write_bytes(content)
    for path in _tokenizer_files(tokenizer_files, like):
      shutil.copyfile(path, partial / path.name)
    origins = _origins(params, tensors, policy.config)
    for name, file in files.items():
      _write_weights(partial / name, file, origins)
    _move_into_place(partial, folder)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  return sorted(folder.iterdir())


def check_target(
  folder: str | os.PathLike[str],
  tokenizer_files: Sequence[str | os.PathLike[str]] = (),
  like: str | os.PathLike[str] | None = None,
) -> None:
  """Says early whether `save` would refuse these paths.

  Args:
    folder: where to save.
    tokenizer_files: as for `save`.
    like: as for `save`.

  Raises:
    FileExistsError: the folder holds files that `save` does not write (and
      so would delete), or is a file.
    FileNotFoundError: a tokenizer file or `like` is missing.
    ValueError: two files would get the same name; `like` is the folder.
  """
  folder = pathlib.Path(folder)
  written = {_CONFIG, _GENERATION_CONFIG, _WEIGHTS, _INDEX}
  if like is not None:
    like = _existing_folder(like)
    if folder.exists() and folder.samefile(like):
      raise ValueError(
        f'{folder} is the checkpoint that the new one is made like, and would '
        'be replaced; give another folder to save to.'
      )
    written |= {stored.path.name for stored in _read_headers(like).values()}
  for path in _tokenizer_files(tokenizer_files, like):
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
  extra = {name for name in extra if not _SHARD.fullmatch(name)}
  if extra:
    raise FileExistsError(
      f'{folder} holds {_enumerate(extra)}, which saving would delete; give '
      'another folder, or empty this one.'
    )


def _tokenizer_files(given, like) -> list[pathlib.Path]:
  if given or like is None:
    return [pathlib.Path(path) for path in given]
  paths = (pathlib.Path(like) / name for name in tokenizer.FILES)
  return [path for path in paths if path.is_file()]


@dataclasses.dataclass(frozen=True)
class _File:
  """A file of weights to write.

  Attributes:
    header: its bytes up to the first tensor.
    types: name and type of its tensors, in the order of the file.
  """

  header: bytes
  types: dict[str, str]


# Files of weights by name, and contents of the other files that tell of them.
_Layout = tuple[dict[str, _File], dict[str, bytes]]


def _layout_of(folder: pathlib.Path, files: Mapping[str, _Stored]) -> _Layout:
  """As the files of a folder are, to the byte."""
  layout = {}
  for path in sorted({stored.path for stored in files.values()}):
    inside = {n: stored for n, stored in files.items() if stored.path == path}
    order = sorted(inside, key=lambda name: inside[name].offset)
    with path.open('rb') as file:
      header = file.read(inside[order[0]].offset)
    layout[path.name] = _File(header, {n: inside[n].type for n in order})
  index = folder / _INDEX
  return layout, {_INDEX: index.read_bytes()} if index.is_file() else {}


def _new_layout(
  policy: qwen2.Policy, types: Mapping[str, str], max_shard_bytes: float
) -> _Layout:
  """As transformers writes them: files filled in the order of its modules."""
  shapes = tensor_shapes(policy)

  def size(name):
    return math.prod(shapes[name]) * _STORED_DTYPES[types[name]].itemsize

  def order(name):
    if name == _EMBEDDING:
      return (-1,)
    if not name.startswith('model.layers.'):
      return (policy.config.num_layers, name != 'model.norm.weight')
    _, _, layer, rest = name.split('.', 3)
    return int(layer), list(_BLOCK_NAMES.values()).index(rest)

  shards, filled = [[]], 0
  for name in sorted(shapes, key=order):
    if shards[-1] and filled + size(name) > max_shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(name)
    filled += size(name)
  files, weight_map = {}, {}
  for i, names in enumerate(shards, 1):
    path = _WEIGHTS
    if len(shards) > 1:
      path = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    weight_map |= dict.fromkeys(names, path)
    # safetensors puts wider types first, then goes by name.
    by_type = list(_STORED_DTYPES).index
    names = sorted(names, key=lambda name: (by_type(types[name]), name))
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    for name in names:
      start, end = end, end + size(name)
      header[name] = {
        'dtype': types[name],
        'shape': shapes[name],
        'data_offsets': [start, end],
      }
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    length = len(text).to_bytes(8, 'little')
    files[path] = _File(length + text, {n: types[n] for n in names})
  if len(shards) == 1:
    return files, {}
  metadata = {
    'total_parameters': sum(map(math.prod, shapes.values())),
    'total_size': sum(map(size, shapes)),
  }
  index = {'metadata': metadata, 'weight_map': dict(sorted(weight_map.items()))}
  return files, {_INDEX: _json_bytes(index)}


def _configurations(config, dtype, eos_ids, like) -> dict[str, bytes]:
  """Configuration files by name; those of `like` change as little as can be."""
  eos = {'eos_token_id': [int(i) for i in eos_ids]} if eos_ids else {}
  if like is None:
    return {
      _CONFIG: _json_bytes(_hf_config(config, dtype or 'bfloat16') | eos),
      _GENERATION_CONFIG: _json_bytes(eos),
    }
  contents = {}
  for name in (_CONFIG, _GENERATION_CONFIG):
    path = like / name
    values = _read_json(path) if path.is_file() else {}
    changed = values | eos
    if dtype and name == _CONFIG:
      changed['dtype' if 'dtype' in values else 'torch_dtype'] = dtype
    if changed != values:
      contents[name] = _json_bytes(changed)
    elif path.is_file():
      contents[name] = path.read_bytes()
  return contents


# By name in a checkpoint: the array that holds a tensor, what it is there, and
# which layer it is of those stacked.
_Origins = dict[str, tuple[jax.Array, _Tensor, int]]


def _origins(params, tensors, config: qwen2.Qwen2Config) -> _Origins:
  origins = {
    name: (value, tensor, layer)
    for value, tensor in zip(
      jax.tree.leaves(params), jax.tree.leaves(tensors), strict=True
    )
    for layer, name in enumerate(tensor.names)
  }
  if config.tie_word_embeddings:
    origins[_HEAD] = origins[_EMBEDDING]  # Some folders repeat it.
  return origins


def _write_weights(path: pathlib.Path, file: _File, origins: _Origins) -> None:
  with path.open('wb') as out:
    out.write(file.header)
    for name, stored_type in file.types.items():
      value, tensor, layer = origins[name]
      # The rows past the vocabulary come last.
      flat = _fetch(value, tensor, layer).reshape(-1)
      flat = flat[: math.prod(tensor.stored_shape)]
      dtype = _STORED_DTYPES[stored_type]
      step = _PIECE_BYTES // dtype.itemsize
      for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        converted = np.empty(piece.shape, dtype)
        _convert(piece, converted, f'param {name}')
        out.write(converted.view(np.uint8))


def _fetch(value: jax.Array, tensor: _Tensor, layer: int) -> np.ndarray:
  """A param on the host, of one layer if layers are stacked."""
  host = np.empty(tensor.layer_shape, value.dtype)
  for shard in value.addressable_shards:
    if shard.replica_id:
      continue
    # A new array, unless the host has it already: jax keeps the host copy of
    # an array as long as the array, so the host would in the end hold all.
    if tensor.stacked:
      start, stop, _ = shard.index[0].indices(tensor.shape[0])
      if start <= layer < stop:
        with sharding.only(shard.device):
          host[shard.index[1:]] = _layer(shard.data, layer - start)
    elif shard.device.platform == 'cpu':
      host[shard.index] = shard.data
    else:
      with sharding.only(shard.device):
        host[shard.index] = jnp.copy(shard.data)
  return host


@jax.jit
def _layer(stack, layer):
  return jax.lax.dynamic_index_in_dim(stack, layer, axis=0, keepdims=False)


def _hf_config(config: qwen2.Qwen2Config, dtype: str) -> dict[str, Any]:
  return {
    'architectures': [_ARCHITECTURE],
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
    'max_position_embeddings': config.max_positions,
    'tie_word_embeddings': config.tie_word_embeddings,
    'use_sliding_window': False,
    'attention_dropout': 0.0,
    'torch_dtype': dtype,
  }


def _existing_folder(folder) -> pathlib.Path:
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise FileNotFoundError(
      f'{folder} is not a folder on this machine; give the folder of a '
      'checkpoint, e.g. DIR after '
      '`hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir DIR`.'
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


def _json_bytes(values: Mapping[str, Any]) -> bytes:
  return (json.dumps(values, indent=2, ensure_ascii=False) + '\n').encode()


@dataclasses.dataclass(frozen=True)
class _Stored:
  """Where a tensor lies.

  Attributes:
    path: its file.
    type: its type as the header names it.
    shape: its shape there.
    offset: of its first byte in the file.
  """

  path: pathlib.Path
  type: str
  shape: tuple[int, ...]
  offset: int

  @property
  def dtype(self) -> np.dtype:
    return _STORED_DTYPES[self.type]


def _read_headers(folder: pathlib.Path) -> dict[str, _Stored]:
  """Every tensor of a folder by name."""
  index = folder / _INDEX
  if index.is_file():
    weight_map = _read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise ValueError(f'{index} has no weight_map; download it again.')
    shards = sorted(set(map(str, weight_map.values())))
    outside = [shard for shard in shards if pathlib.Path(shard).name != shard]
    if outside:
      raise ValueError(
        f'{index} lists {_enumerate(outside)}, but shards must lie beside it; '
        'download it again.'
      )
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
    for name, stored in _read_header(folder / shard).items():
      if weight_map and weight_map.get(name) != shard:
        raise ValueError(
          f'{folder / shard} holds tensor {name}, but {index.name} places it '
          f'in {weight_map.get(name)}; the files are of different '
          'checkpoints, download them again.'
        )
      files[name] = stored
  lost = set(weight_map or ()) - set(files)
  if lost:
    raise ValueError(
      f'{folder}: {index.name} lists {_enumerate(lost)}, not in the '
      f'shard it names ({weight_map[min(lost)]}); download it again.'
    )
  return files


def _read_header(path: pathlib.Path) -> dict[str, _Stored]:
  try:
    # Checks that the header is sound and the file as long as it says.
    with safetensors.safe_open(path, framework='numpy'):
      pass
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
  with path.open('rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    header = json.loads(file.read(length))
  header.pop('__metadata__', None)
  return {
    name: _Stored(
      path,
      entry['dtype'],
      tuple(entry['shape']),
      8 + length + entry['data_offsets'][0],
    )
    for name, entry in header.items()
  }


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


def _check_tensors(
  folder: pathlib.Path,
  files: Mapping[str, _Stored],
  tensors: Any,
  config: qwen2.Qwen2Config,
) -> None:
  """Names, types and shapes, from the headers alone."""
  expected = {
    name: tensor.stored_shape
    for tensor in jax.tree.leaves(tensors)
    for name in tensor.names
  }
  if config.tie_word_embeddings and _HEAD in files:
    # Some exports repeat the tied embedding. Harmless if it is the same.
    expected[_HEAD] = expected[_EMBEDDING]
  missing = set(expected) - set(files)
  if missing:
    raise ValueError(
      f'{folder}: missing {_enumerate(missing)}; the checkpoint is '
      'incomplete, download it again.'
    )
  unexpected = set(files) - set(expected)
  if unexpected:
    raise ValueError(
      f'{folder}: unexpected {_enumerate(unexpected)}; a network of this '
      f'{_CONFIG} has no such parameters, give the matching pair.'
    )
  for name, shape in expected.items():
    stored = files[name]
    if stored.shape != shape:
      raise ValueError(
        f'{folder}: tensor {name} has shape {stored.shape}, '
        f'{_CONFIG} makes it {shape}; the two are of different checkpoints.'
      )
    if stored.type not in _STORED_DTYPES:
      raise ValueError(
        f'{folder}: tensor {name} has type {stored.type}, must be one '
        f'of {", ".join(_STORED_DTYPES)}; give the unquantized checkpoint.'
      )
  if config.tie_word_embeddings and _HEAD in files:
    pieces = zip(_pieces(files[_HEAD]), _pieces(files[_EMBEDDING]), strict=True)
    if not all(np.array_equal(head, rows) for head, rows in pieces):
      raise ValueError(
        f'{folder}: {_HEAD} differs from {_EMBEDDING}, but {_CONFIG} says '
        'tie_word_embeddings; set it to false there if the head is meant.'
      )


def _pieces(stored: _Stored) -> Iterator[np.ndarray]:
  """The elements of a tensor, some at a time."""
  count, step = math.prod(stored.shape), _PIECE_BYTES // 4
  with stored.path.open('rb') as file:
    for start in range(0, count, step):
      yield _read(file, stored, start, min(start + step, count))


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


def _dtype(argument: str, name: str) -> np.dtype:
  if name not in _TYPES:
    raise ValueError(f'{argument}={name!r} must be one of {", ".join(_TYPES)}.')
  return _STORED_DTYPES[_TYPES[name]]


def _convert(array: np.ndarray, out: np.ndarray, what: str) -> None:
  """Copies into `out`, in its type."""
  # Said below in our own words, with the name of the tensor.
  with np.errstate(over='ignore', invalid='ignore'):
    np.copyto(out, array, casting='unsafe')
    finite = np.isfinite(out).all()
  if not finite:
    raise ValueError(
      f'{what} has values that are not finite in {out.dtype.name}; '
      'take a wider type, or weights from before they diverged.'
    )


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
  shutil.rmtree(old, ignore_errors=True)  # The new one is in place already.


def _listing(folder: pathlib.Path) -> str:
  return _enumerate(path.name for path in folder.iterdir()) or 'nothing'


def _enumerate(names, limit: int = 5) -> str:
  names = sorted(names)
  rest = f' and {len(names) - limit} more' if len(names) > limit else ''
  return ', '.join(names[:limit]) + rest
