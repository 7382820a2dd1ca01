"""weights.py against checkpoints written by hand and a numpy reference.

Files that were written are compared with those of transformers, byte by byte.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from planpo_jax import tokenizer, weights
from planpo_jax.models import qwen2

# Heads, kv heads, head size, width and rows all differ, and heads x head size
# is not the width: no transposed or swapped axis can go unnoticed.
UNTIED = qwen2.Qwen2Config(
  vocab_size=50,
  hidden_size=24,
  intermediate_size=40,
  num_layers=3,
  num_heads=6,
  num_kv_heads=2,
  head_dim=8,
  tie_word_embeddings=False,
  rope_theta=5e3,
  rms_norm_eps=1e-5,
  max_positions=777,
)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)

# config.json of Qwen/Qwen2.5-7B-Instruct, as published.
CONFIG_7B = {
  'architectures': ['Qwen2ForCausalLM'],
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'hidden_act': 'silu',
  'hidden_size': 3584,
  'initializer_range': 0.02,
  'intermediate_size': 18944,
  'max_position_embeddings': 32768,
  'max_window_layers': 28,
  'model_type': 'qwen2',
  'num_attention_heads': 28,
  'num_hidden_layers': 28,
  'num_key_value_heads': 4,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 131072,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.43.1',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 152064,
}


@functools.cache
def policy_of(config):
  return qwen2.create(config, num_tokens=config.vocab_size - 5)


@functools.cache
def abstract_params(config):
  return jax.eval_shape(
    lambda: qwen2.init_params(policy_of(config), jax.random.key(0))
  )


def params_of(config, dtype='float32'):
  """Random everywhere: biases and norms too; 0 past the vocabulary."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    value = rng.normal(0.5, 0.3, leaf.shape)
    if leaf.shape[0] == config.embedding_rows:
      value[config.vocab_size :] = 0
    return jnp.array(value.astype(dtype))

  return jax.tree.map(draw, abstract_params(config))


def assert_equal(actual, expected):
  """Structure, types and bits."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def stored_tensors(config, seed=1):
  """A checkpoint in the naming and shapes of transformers' Qwen2."""
  width, ffn, rows = (
    config.hidden_size,
    config.intermediate_size,
    config.vocab_size,
  )
  q_size = config.num_heads * config.head_dim
  kv_size = config.num_kv_heads * config.head_dim
  shapes = {'model.embed_tokens.weight': (rows, width)}
  for i in range(config.num_layers):
    layer = f'model.layers.{i}'
    shapes |= {
      f'{layer}.input_layernorm.weight': (width,),
      f'{layer}.mlp.down_proj.weight': (width, ffn),
      f'{layer}.mlp.gate_proj.weight': (ffn, width),
      f'{layer}.mlp.up_proj.weight': (ffn, width),
      f'{layer}.post_attention_layernorm.weight': (width,),
      f'{layer}.self_attn.k_proj.bias': (kv_size,),
      f'{layer}.self_attn.k_proj.weight': (kv_size, width),
      f'{layer}.self_attn.o_proj.weight': (width, q_size),
      f'{layer}.self_attn.q_proj.bias': (q_size,),
      f'{layer}.self_attn.q_proj.weight': (q_size, width),
      f'{layer}.self_attn.v_proj.bias': (kv_size,),
      f'{layer}.self_attn.v_proj.weight': (kv_size, width),
    }
  shapes['model.norm.weight'] = (width,)
  if not config.tie_word_embeddings:
    shapes['lm_head.weight'] = (rows, width)
  rng = np.random.default_rng(seed)
  tensors = {}
  for name, shape in shapes.items():
    noise = rng.normal(0, 0.2, shape)
    # Biases of 0.5, so that a forgotten one cannot hide.
    centre = 0.5 if name.endswith('bias') else float('norm' in name)
    tensors[name] = (centre + noise).astype(np.float32)
  return tensors


def hf_config(config):
  return {
    'model_type': 'qwen2',
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'rms_norm_eps': config.rms_norm_eps,
    'max_position_embeddings': config.max_positions,
    'rope_theta': config.rope_theta,
    'tie_word_embeddings': config.tie_word_embeddings,
  }


def write_single(folder, config, tensors):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(hf_config(config)))
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
  return folder


SHARDS = (
  'model-00001-of-00002.safetensors',
  'model-00002-of-00002.safetensors',
)


def write_sharded(folder, config, tensors):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(hf_config(config)))
  # Every other tensor, so that layers span both shards.
  weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
  for shard in SHARDS:
    part = {n: t for n, t in tensors.items() if weight_map[n] == shard}
    safetensors.numpy.save_file(part, folder / shard)
  index = {'metadata': {'total_size': 0}, 'weight_map': weight_map}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
  return folder


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_python(program, devices=1, **variables):
  root = pathlib.Path(__file__).resolve().parents[1]
  done = subprocess.run(
    [sys.executable, '-c', program],
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(devices),
      'PYTHONPATH': str(root),
      **variables,
    },
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def reference_logits(config, tensors, ids):
  """Qwen2 as transformers computes it, one sequence, in float64 numpy."""

  def norm(x, name):
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
    return x * scale * tensors[name].astype(np.float64)

  def linear(x, name):
    y = x @ tensors[f'{name}.weight'].astype(np.float64).T
    return y + tensors[f'{name}.bias'] if f'{name}.bias' in tensors else y

  size = config.head_dim
  inverse = config.rope_theta ** -(np.arange(0, size, 2) / size)
  angles = np.arange(len(ids))[:, None] * np.concatenate([inverse, inverse])

  def rotate(x):
    half = np.concatenate([-x[:, size // 2 :], x[:, : size // 2]], axis=-1)
    return x * np.cos(angles) + half * np.sin(angles)

  causal = np.tril(np.ones((len(ids), len(ids)), bool))
  x = tensors['model.embed_tokens.weight'][ids].astype(np.float64)
  for i in range(config.num_layers):
    layer = f'model.layers.{i}'
    y = norm(x, f'{layer}.input_layernorm.weight')
    q, k, v = (linear(y, f'{layer}.self_attn.{c}_proj') for c in 'qkv')
    heads = []
    for n in range(config.num_heads):
      kv = n // (config.num_heads // config.num_kv_heads)
      query = rotate(q[:, n * size : (n + 1) * size])
      key = rotate(k[:, kv * size : (kv + 1) * size])
      scores = np.where(causal, query @ key.T / np.sqrt(size), -np.inf)
      probs = np.exp(scores - scores.max(-1, keepdims=True))
      probs /= probs.sum(-1, keepdims=True)
      heads.append(probs @ v[:, kv * size : (kv + 1) * size])
    x = x + linear(np.concatenate(heads, -1), f'{layer}.self_attn.o_proj')
    y = norm(x, f'{layer}.post_attention_layernorm.weight')
    gate = linear(y, f'{layer}.mlp.gate_proj')
    up = linear(y, f'{layer}.mlp.up_proj')
    x = x + linear(gate / (1 + np.exp(-gate)) * up, f'{layer}.mlp.down_proj')
  x = norm(x, 'model.norm.weight')
  head = 'lm_head' if 'lm_head.weight' in tensors else 'model.embed_tokens'
  return linear(x, head)


@pytest.mark.parametrize('write', [write_single, write_sharded])
@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_logits_match_reference(tmp_path, config, write):
  tensors = stored_tensors(config)
  folder = write(tmp_path / 'hf', config, tensors)
  found = weights.read_config(folder)
  assert found == config
  policy = policy_of(found)
  params = weights.load(folder, policy)
  ids = np.array([3, 1, 4, 1, 5, 9, 2, 6])
  ones = jnp.ones((1, len(ids)), jnp.int32)
  hidden = policy.hidden(
    params, jnp.asarray(ids)[None], jnp.arange(len(ids))[None], ones
  )
  logits = np.asarray(policy.logits(params, hidden))[0]
  expected = reference_logits(config, tensors, ids)
  real = policy.num_tokens
  np.testing.assert_allclose(
    logits[:, :real], expected[:, :real], atol=1e-4, rtol=0
  )


@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_names_and_shapes_are_those_of_transformers(config):
  expected = {n: t.shape for n, t in stored_tensors(config).items()}
  assert weights.tensor_shapes(policy_of(config)) == expected


@pytest.mark.parametrize(
  ('size', 'tensors', 'parameters'),
  [
    # Numbers of the published checkpoints.
    ('qwen2.5-1.5b', 338, 1_543_714_304),
    ('qwen2.5-7b', 339, 7_615_616_512),
  ],
)
def test_published_sizes(size, tensors, parameters):
  shapes = weights.tensor_shapes(qwen2.create(qwen2.SIZES[size], 151665))
  assert len(shapes) == tensors
  assert sum(int(np.prod(s)) for s in shapes.values()) == parameters


def test_read_config_of_published_folder(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG_7B))
  assert weights.read_config(tmp_path) == qwen2.SIZES['qwen2.5-7b']


def test_read_config_written_by_transformers_5(tmp_path):
  values = {k: v for k, v in CONFIG_7B.items() if k != 'rope_theta'}
  values |= {
    'rope_parameters': {'rope_theta': 250000.0, 'rope_type': 'default'},
    'layer_types': ['full_attention'] * 28,
    'rms_norm_eps': 1e-5,
    'tie_word_embeddings': True,
  }
  (tmp_path / 'config.json').write_text(json.dumps(values))
  assert weights.read_config(tmp_path) == dataclasses.replace(
    qwen2.SIZES['qwen2.5-7b'],
    rope_theta=250000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
  )


def test_read_config_defaults_are_those_of_transformers(tmp_path):
  (tmp_path / 'config.json').write_text('{"model_type": "qwen2"}')
  assert weights.read_config(tmp_path) == qwen2.Qwen2Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    tie_word_embeddings=False,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
  )


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'model_type': 'llama', 'architectures': ['LlamaForCausalLM']},
      "LlamaForCausalLM, model_type 'llama'",
    ),
    (
      {'architectures': ['Qwen2ForSequenceClassification']},
      'another architecture .Qwen2ForSequenceClassification',
    ),
    ({'max_position_embeddings': '32k'}, "max_position_embeddings is '32k'"),
    ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, "type 'yarn'"),
    (
      {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e6}},
      "type 'linear'",
    ),
    ({'use_sliding_window': True}, 'sliding-window'),
    ({'layer_types': ['sliding_attention']}, 'sliding-window'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'quantization_config': {'bits': 4}}, 'quantized weights'),
    ({'vocab_size': 'many'}, "vocab_size is 'many'"),
    ({'num_hidden_layers': 0}, 'num_hidden_layers is 0'),
    ({'num_key_value_heads': 3}, 'config.json: num_kv_heads=3'),
  ],
)
def test_read_config_refuses(tmp_path, change, message):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG_7B | change))
  with pytest.raises(ValueError, match=message):
    weights.read_config(tmp_path)


def test_bfloat16_is_exact(tmp_path):
  # Values that bfloat16 holds, and every bit pattern that is finite.
  assert np.float32(3.140625) == ml_dtypes.bfloat16(3.140625)
  every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  with np.errstate(invalid='ignore'):
    every = every[np.isfinite(every)]
  tensors = {
    name: np.resize(every, tensor.shape)
    for name, tensor in stored_tensors(UNTIED).items()
  }
  tensors['model.norm.weight'][:3] = [1.0, -2.5, 3.140625]
  folder = write_single(tmp_path / 'hf', UNTIED, tensors)
  policy = policy_of(UNTIED)
  for dtype in ('bfloat16', 'float32'):
    params = weights.load(folder, policy, param_dtype=dtype)
    assert params['final_norm_D'].dtype == dtype
    assert params['final_norm_D'][:3].tolist() == [1.0, -2.5, 3.140625]
    up = np.asarray(params['blocks']['01']['feed_forward']['w_up_FD'])
    stored = tensors['model.layers.1.mlp.up_proj.weight']
    assert up.tobytes() == stored.astype(up.dtype).tobytes()


def test_no_second_framework_is_imported(tmp_path):
  folder = tmp_path / 'hf'
  weights.save(folder, policy_of(TIED), params_of(TIED))
  program = (
    'import sys\n'
    'from planpo_jax import weights\n'
    'from planpo_jax.models import qwen2\n'
    f'folder = {str(folder)!r}\n'
    'config = weights.read_config(folder)\n'
    'weights.load(folder, qwen2.create(config, 40))\n'
    'print(sorted({"torch", "tensorflow", "transformers"} & set(sys.modules)))'
  )
  assert run_python(program).strip() == '[]'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_round_trip(tmp_path, config, dtype):
  policy, params = policy_of(config), params_of(config, dtype)
  weights.save(tmp_path / 'deep' / 'out', policy, params, dtype=dtype)
  assert weights.read_config(tmp_path / 'deep' / 'out') == config
  again = weights.load(tmp_path / 'deep' / 'out', policy, param_dtype=dtype)
  assert_equal(again, params)
  stored = safetensors.numpy.load_file(
    tmp_path / 'deep' / 'out' / 'model.safetensors'
  )
  # All rows are exported, the spare ones too.
  assert {n: t.shape for n, t in stored.items()} == {
    n: t.shape for n, t in stored_tensors(config).items()
  }
  assert {str(t.dtype) for t in stored.values()} == {dtype}


def test_save_rounds_float32_to_nearest_bfloat16(tmp_path):
  policy, params = policy_of(TIED), params_of(TIED)
  weights.save(tmp_path / 'out', policy, params)
  again = weights.load(tmp_path / 'out', policy)
  expected = jax.tree.map(
    lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32),
    params,
  )
  assert_equal(again, expected)


def test_saved_files(tmp_path):
  tokenizer = tmp_path / 'tokenizer.json'
  tokenizer.write_text('{"a": 1}')
  folder = tmp_path / 'out'
  weights.save(
    folder,
    policy_of(TIED),
    params_of(TIED),
    eos_ids=(7, 3),
    tokenizer_files=[tokenizer],
  )
  assert {p.name for p in folder.iterdir()} == {
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'tokenizer.json',
  }
  assert [p.name for p in tmp_path.glob('.*')] == []
  assert (folder / 'tokenizer.json').read_text() == '{"a": 1}'
  generation = json.loads((folder / 'generation_config.json').read_text())
  assert generation == {'eos_token_id': [7, 3]}
  config = json.loads((folder / 'config.json').read_text())
  assert config['architectures'] == ['Qwen2ForCausalLM']
  assert config['eos_token_id'] == [7, 3]
  assert config['torch_dtype'] == 'bfloat16'
  with safetensors.safe_open(
    folder / 'model.safetensors', framework='numpy'
  ) as file:
    assert file.metadata() == {'format': 'pt'}
  modes = {p.stat().st_mode & 0o777 for p in folder.iterdir()}
  assert len(modes) == 1


def test_save_replaces_an_earlier_checkpoint(tmp_path):
  folder = tmp_path / 'out'
  first, second = params_of(UNTIED), params_of(TIED)
  tokenizer = folder / 'tokenizer.json'
  weights.save(folder, policy_of(UNTIED), first, dtype='float32')
  tokenizer.write_text('{}')
  # From the very folder that is replaced.
  weights.save(
    folder,
    policy_of(TIED),
    second,
    dtype='float32',
    tokenizer_files=[tokenizer],
  )
  assert_equal(weights.load(folder, policy_of(TIED)), second)
  assert tokenizer.read_text() == '{}'
  assert [p.name for p in tmp_path.iterdir()] == ['out']


def test_failed_save_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
  folder = tmp_path / 'out'
  policy, params = policy_of(TIED), params_of(TIED)
  weights.save(folder, policy, params, dtype='float32')

  def fail(descriptor):
    raise OSError('disk is full')

  monkeypatch.setattr(os, 'fsync', fail)
  for target in (folder, tmp_path / 'new'):
    with pytest.raises(OSError, match='disk is full'):
      weights.save(target, policy, jax.tree.map(jnp.zeros_like, params))
  assert [p.name for p in tmp_path.iterdir()] == ['out']
  assert_equal(weights.load(folder, policy), params)


def test_save_refuses_a_folder_with_other_files(tmp_path):
  folder = tmp_path / 'out'
  folder.mkdir()
  (folder / 'thesis.tex').write_text('years of work')
  for call in (
    lambda: weights.check_target(folder),
    lambda: weights.save(folder, policy_of(TIED), params_of(TIED)),
  ):
    with pytest.raises(FileExistsError, match='thesis.tex'):
      call()
  assert [p.name for p in folder.iterdir()] == ['thesis.tex']
  with pytest.raises(FileExistsError, match='is a file'):
    weights.check_target(folder / 'thesis.tex')


def test_save_refuses_bad_arguments(tmp_path):
  policy, params = policy_of(TIED), params_of(TIED)
  folder = tmp_path / 'out'
  clash = tmp_path / 'config.json'
  clash.write_text('{}')
  wide = {**params, 'final_norm_D': params['final_norm_D'] * 1e6}
  nan = {**params, 'final_norm_D': params['final_norm_D'] * np.nan}
  short = {**params, 'final_norm_D': params['final_norm_D'][:-1]}
  for error, message, arguments, given in (
    (ValueError, "dtype='int8'", {'dtype': 'int8'}, params),
    (ValueError, 'eos_ids: 45', {'eos_ids': [45]}, params),
    (
      FileNotFoundError,
      'tokenizer file gone.json',
      {'tokenizer_files': ['gone.json']},
      params,
    ),
    (ValueError, 'config.json', {'tokenizer_files': [clash]}, params),
    (ValueError, 'not finite in float16', {'dtype': 'float16'}, wide),
    (ValueError, 'model.norm.weight', {}, nan),
    (ValueError, r'final_norm_D.*\(23,\).*\(24,\)', {}, short),
    (ValueError, 'head_VD.* in only one', {}, params_of(UNTIED)),
  ):
    with pytest.raises(error, match=message):
      weights.save(folder, policy, given, **arguments)
    assert not folder.exists()


def test_stray_files_are_ignored(tmp_path):
  # An extra model.safetensors beside the index.
  tensors = stored_tensors(TIED)
  folder = write_sharded(tmp_path / 'hf', TIED, tensors)
  expected = weights.load(folder, policy_of(TIED))
  other = stored_tensors(TIED, seed=2)
  safetensors.numpy.save_file(other, folder / 'model.safetensors')
  safetensors.numpy.save_file(other, folder / 'extra.safetensors')
  (folder / 'pytorch_model.bin').write_bytes(b'junk')
  assert_equal(weights.load(folder, policy_of(TIED)), expected)


def test_missing_shard(tmp_path):
  folder = write_sharded(tmp_path / 'hf', TIED, stored_tensors(TIED))
  (folder / SHARDS[1]).unlink()
  with pytest.raises(FileNotFoundError, match=f'index.json lists {SHARDS[1]}'):
    weights.load(folder, policy_of(TIED))


def test_cut_file(tmp_path):
  # Also with a cut that leaves the header whole, and nothing.
  tensors = stored_tensors(TIED)
  sharded = write_sharded(tmp_path / 'sharded', TIED, tensors)
  single = write_single(tmp_path / 'single', TIED, tensors)
  for path in (sharded / SHARDS[1], single / 'model.safetensors'):
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 2, 40, 0):
      path.write_bytes(whole[:length])
      with pytest.raises(ValueError, match=f'{path.name}.*cut or damaged'):
        weights.load(path.parent, policy_of(TIED))


def test_lfs_pointer(tmp_path):
  folder = write_single(tmp_path / 'hf', TIED, stored_tensors(TIED))
  (folder / 'model.safetensors').write_text(
    'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'
  )
  with pytest.raises(ValueError, match='git lfs pull'):
    weights.load(folder, policy_of(TIED))


def test_index_and_shards_disagree(tmp_path):
  folder = write_sharded(tmp_path / 'hf', TIED, stored_tensors(TIED))
  path = folder / 'model.safetensors.index.json'
  index = json.loads(path.read_text())
  norm = index['weight_map'].pop('model.norm.weight')
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match='model.norm.weight.*None'):
    weights.load(folder, policy_of(TIED))
  index['weight_map'] |= {'model.norm.weight': norm, 'ghost': norm}
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f'ghost.*{norm}'):
    weights.load(folder, policy_of(TIED))
  for text, message in (('{', 'not valid JSON'), ('{}', 'no weight_map')):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      weights.load(folder, policy_of(TIED))


def test_wrong_folders(tmp_path):
  policy = policy_of(TIED)
  for call in (weights.read_config, lambda f: weights.load(f, policy)):
    with pytest.raises(FileNotFoundError, match='Qwen/Qwen2.5-7B.*download'):
      call('Qwen/Qwen2.5-7B')
    with pytest.raises(FileNotFoundError, match='config.json is missing'):
      call(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(hf_config(TIED)))
  (tmp_path / 'pytorch_model.bin').write_bytes(b'junk')
  with pytest.raises(
    FileNotFoundError, match='neither model.safetensors.*pytorch_model.bin'
  ):
    weights.load(tmp_path, policy)


def test_tensors_that_do_not_fit(tmp_path):
  folder, policy = tmp_path / 'hf', policy_of(UNTIED)
  bias = 'model.layers.1.self_attn.k_proj.bias'
  tensors = stored_tensors(UNTIED)
  # A missing bias is an error, and so is one on o, which has none.
  extra = 'model.layers.2.self_attn.o_proj.bias'
  weight = tensors['model.layers.0.mlp.up_proj.weight']
  for changed, message in (
    ({bias: None}, f'missing {bias}'),
    ({'lm_head.weight': None}, 'missing lm_head.weight'),
    ({extra: np.zeros(24, np.float32)}, f'unexpected {extra}'),
    (
      {'model.layers.0.mlp.up_proj.weight': np.ascontiguousarray(weight.T)},
      r'up_proj.weight has shape \(24, 40\).*\(40, 24\)',
    ),
    # Rows trimmed to the tokenizer.
    (
      {'model.embed_tokens.weight': tensors['model.embed_tokens.weight'][:45]},
      r'embed_tokens.weight has shape \(45, 24\).*\(50, 24\)',
    ),
    ({bias: np.zeros(16, np.int8)}, f'{bias} has type I8'),
    ({bias: np.full(16, np.nan, np.float32)}, f'{bias} .*not finite'),
  ):
    new = {k: v for k, v in (tensors | changed).items() if v is not None}
    write_single(folder, UNTIED, new)
    with pytest.raises(ValueError, match=message):
      weights.load(folder, policy)


def test_load_checks_range_and_name_of_type(tmp_path):
  tensors = stored_tensors(TIED)
  tensors['model.norm.weight'][0] = 1e5
  folder = write_single(tmp_path / 'hf', TIED, tensors)
  with pytest.raises(ValueError, match='model.norm.weight.*float16'):
    weights.load(folder, policy_of(TIED), param_dtype='float16')
  with pytest.raises(ValueError, match="param_dtype='float64'"):
    weights.load(folder, policy_of(TIED), param_dtype='float64')


def test_tied_checkpoint_with_a_head(tmp_path):
  tensors = stored_tensors(TIED)
  expected = weights.load(
    write_single(tmp_path / 'hf', TIED, tensors), policy_of(TIED)
  )
  head = tensors['model.embed_tokens.weight'].copy()
  folder = write_single(
    tmp_path / 'hf', TIED, tensors | {'lm_head.weight': head}
  )
  assert_equal(weights.load(folder, policy_of(TIED)), expected)
  head[2, 3] += 1
  write_single(folder, TIED, tensors | {'lm_head.weight': head})
  with pytest.raises(ValueError, match='lm_head.weight differs'):
    weights.load(folder, policy_of(TIED))


def test_policy_of_another_network(tmp_path):
  folder = write_single(tmp_path / 'hf', TIED, stored_tensors(TIED))
  # rope_theta and eps change no shape: only this check can notice.
  other = dataclasses.replace(TIED, rope_theta=1e6, rms_norm_eps=1e-6)
  with pytest.raises(
    ValueError, match='rope_theta 5000.0 in the folder, 1000000.0 in the policy'
  ):
    weights.load(folder, policy_of(other))
  numeric = dataclasses.replace(TIED, dtype='bfloat16', remat=True)
  assert_equal(
    weights.load(folder, policy_of(numeric)),
    weights.load(folder, policy_of(TIED)),
  )


def test_shardings_are_used(tmp_path):
  """On four devices: values equal, placement as asked, also saved again."""
  folder = write_single(tmp_path / 'hf', UNTIED, stored_tensors(UNTIED))
  program = f"""
import dataclasses, jax, numpy as np
from planpo_jax import weights
from planpo_jax.models import qwen2
P = jax.sharding.PartitionSpec
folder = {str(folder)!r}
policy = qwen2.create(weights.read_config(folder), 45)
whole = weights.load(folder, policy)
mesh = jax.make_mesh((2, 2), ('a', 'b'),
                     axis_types=(jax.sharding.AxisType.Auto,) * 2)
shardings = jax.tree.map(
  lambda x: jax.sharding.NamedSharding(
    mesh, P('a', 'b') if x.ndim == 2 else P()), whole)
parts = weights.load(folder, policy, shardings=shardings)
for x, y, s in zip(*map(jax.tree.leaves, (whole, parts, shardings))):
  assert y.sharding == s
  np.testing.assert_array_equal(x, y)
assert parts['head_VD'].addressable_shards[0].data.shape == (64, 12)
weights.save(folder + '2', policy, parts, dtype='float32')
again = weights.load(folder + '2', policy)
jax.tree.map(np.testing.assert_array_equal, whole, again)
# Donated by an update; the originals of the reference stay.
step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
new = step(parts)
jax.tree.map(lambda x, y: np.testing.assert_array_equal(x + 1, y), whole, new)
"""
  run_python(program, devices=4)


def scanned(config):
  return dataclasses.replace(config, scan_layers=True)


@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_stacked_layers_hold_the_same(tmp_path, config):
  folder = write_sharded(tmp_path / 'hf', config, stored_tensors(config))
  params = weights.load(folder, policy_of(config))
  stacked = weights.load(folder, policy_of(scanned(config)))
  layers = [params['blocks'][f'{i:02d}'] for i in range(config.num_layers)]
  expected = {
    **params,
    'blocks': jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
  }
  assert_equal(stacked, expected)
  names = weights.tensor_shapes(policy_of(config))
  assert weights.tensor_shapes(policy_of(scanned(config))) == names
  for dtype in ('float32', 'bfloat16'):
    for name, kind, value in (
      ('a', config, params),
      ('b', scanned(config), stacked),
    ):
      weights.save(tmp_path / name, policy_of(kind), value, dtype=dtype)
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b')


def test_spare_rows_are_zero_and_are_not_saved(tmp_path):
  # 50 rows in the checkpoint, 45 ids, 128 rows in params.
  tensors = stored_tensors(UNTIED)
  folder = write_single(tmp_path / 'hf', UNTIED, tensors)
  params = weights.load(folder, policy_of(UNTIED))
  for name, stored in (
    ('embedding_VD', 'model.embed_tokens.weight'),
    ('head_VD', 'lm_head.weight'),
  ):
    value = np.asarray(params[name])
    assert value.shape == (128, 24)
    np.testing.assert_array_equal(value[:50], tensors[stored])
    assert not value[50:].any()
    params[name] = params[name].at[50:].set(7.0)
  weights.save(tmp_path / 'out', policy_of(UNTIED), params, dtype='float32')
  saved = safetensors.numpy.load_file(tmp_path / 'out' / 'model.safetensors')
  assert (
    saved['lm_head.weight'].tobytes() == tensors['lm_head.weight'].tobytes()
  )


def test_pieces_make_no_difference(tmp_path, monkeypatch):
  tensors = stored_tensors(TIED)
  head = {'lm_head.weight': tensors['model.embed_tokens.weight'].copy()}
  folder = write_single(tmp_path / 'hf', TIED, tensors | head)
  policy = policy_of(TIED)
  whole = weights.load(folder, policy, param_dtype='bfloat16')
  weights.save(tmp_path / 'whole', policy, whole, dtype='float16')
  # Some rows, not even one row, and a last piece that is shorter.
  monkeypatch.setattr(weights, '_PIECE_BYTES', 700)
  pieces = weights.load(folder, policy, param_dtype='bfloat16')
  assert_equal(pieces, whole)
  weights.save(tmp_path / 'pieces', policy, pieces, dtype='float16')
  assert contents(tmp_path / 'pieces') == contents(tmp_path / 'whole')
  head['lm_head.weight'][-1, -1] += 1
  write_single(folder, TIED, tensors | head)
  with pytest.raises(ValueError, match='lm_head.weight differs'):
    weights.load(folder, policy)


def write_by_transformers(folder, config, dtype, max_shard_size):
  """Random weights, with files that stand beside them on the hub."""
  torch.manual_seed(0)
  model = transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(**(hf_config(config) | {'dtype': dtype}))
  )
  for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.5, 0.3)
  model.to(getattr(torch, dtype))
  model.generation_config.eos_token_id = [7, 3]
  model.generation_config.repetition_penalty = 1.05
  model.save_pretrained(folder, max_shard_size=max_shard_size)
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    content = (tokenizer.ASSETS / 'nano_sciworld' / name).read_bytes()
    (folder / name).write_bytes(content)
  (folder / 'chat_template.jinja').write_text('{{ messages }}')
  return folder


@pytest.mark.parametrize('max_shard_size', ['5GB', '20KB'])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_import_then_export_keeps_every_byte(
  tmp_path, config, dtype, max_shard_size
):
  folder = write_by_transformers(tmp_path / 'hf', config, dtype, max_shard_size)
  expected = contents(folder)
  assert ('model.safetensors' in expected) == (max_shard_size == '5GB')
  assert weights.stored_dtype(folder) == dtype
  for kind, param_dtype in (
    (config, dtype),
    (config, 'float32'),
    (scanned(config), dtype),
  ):
    params = weights.load(folder, policy_of(kind), param_dtype=param_dtype)
    for given in (None, dtype):
      written = weights.save(
        tmp_path / 'out', policy_of(kind), params, dtype=given, like=folder
      )
      assert contents(tmp_path / 'out') == expected
      assert {path.name for path in written} == set(expected)
  # Without the folder to go by, the weights are laid out the same.
  size = {'5GB': 5e9, '20KB': 20e3}[max_shard_size]
  weights.save(
    tmp_path / 'new',
    policy_of(config),
    weights.load(folder, policy_of(config), param_dtype=dtype),
    dtype=dtype,
    max_shard_bytes=size,
  )
  for name, content in contents(tmp_path / 'new').items():
    if 'safetensors' in name:
      assert content == expected[name]
  assert len(contents(tmp_path / 'new')) == len(expected) - 3


def test_unusual_files_are_kept_too(tmp_path):
  """Several types in a file, a repeated tied head, metadata, own names."""
  tensors = stored_tensors(TIED)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  for name, tensor in tensors.items():
    kind = np.float32 if 'norm' in name else ml_dtypes.bfloat16
    tensors[name] = tensor.astype(kind)
  folder = tmp_path / 'hf'
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(hf_config(TIED)))
  names = sorted(tensors)
  weight_map = {
    name: f'part_{i % 2}.safetensors' for i, name in enumerate(names)
  }
  for file in ('part_0.safetensors', 'part_1.safetensors'):
    part = {n: tensors[n] for n in names if weight_map[n] == file}
    safetensors.numpy.save_file(part, folder / file, {'made': 'by "hand"'})
  (folder / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map})
  )
  assert weights.stored_dtype(folder) == 'float32'
  policy = policy_of(TIED)
  params = weights.load(folder, policy)
  weights.save(tmp_path / 'out', policy, params, like=folder)
  assert contents(tmp_path / 'out') == contents(folder)
  # A second time over the first.
  weights.save(tmp_path / 'out', policy, params, like=folder)
  assert contents(tmp_path / 'out') == contents(folder)
  # In one file: the types stay, the repeated head goes.
  weights.save(
    tmp_path / 'one', policy, params, like=folder, max_shard_bytes=1e9
  )
  one = safetensors.numpy.load_file(tmp_path / 'one' / 'model.safetensors')
  tensors.pop('lm_head.weight')
  assert {n: (t.dtype, t.tobytes()) for n, t in one.items()} == {
    n: (t.dtype, t.tobytes()) for n, t in tensors.items()
  }


def test_like_in_another_type(tmp_path):
  folder = write_by_transformers(tmp_path / 'hf', TIED, 'bfloat16', '20KB')
  policy = policy_of(TIED)
  params = weights.load(folder, policy)
  weights.save(tmp_path / 'out', policy, params, dtype='float32', like=folder)
  before, after = contents(folder), contents(tmp_path / 'out')
  assert {n for n in after if n not in before} == {'model.safetensors'}
  for name in after:
    if name not in ('config.json', 'model.safetensors'):
      assert after[name] == before[name]
  assert after['config.json'] == before['config.json'].replace(
    b'bfloat16', b'float32'
  )
  assert_equal(weights.load(tmp_path / 'out', policy), params)
  # End ids and tokenizer files that are given take the place of those there.
  mine = tmp_path / 'tokenizer.json'
  mine.write_text('{}')
  weights.save(
    tmp_path / 'mine',
    policy,
    params,
    like=folder,
    eos_ids=[5],
    tokenizer_files=[mine],
  )
  after = contents(tmp_path / 'mine')
  generation = json.loads(after['generation_config.json'])
  assert generation['eos_token_id'] == [5]
  assert generation['repetition_penalty'] == 1.05
  assert json.loads(after['config.json'])['eos_token_id'] == [5]
  assert after['tokenizer.json'] == b'{}'
  assert 'chat_template.jinja' not in after


def test_like_is_refused(tmp_path):
  folder = write_single(tmp_path / 'hf', TIED, stored_tensors(TIED))
  before = contents(folder)
  params = params_of(TIED)
  policy = policy_of(TIED)
  for error, message, target, given in (
    (ValueError, 'is the checkpoint', folder, {'like': folder}),
    (FileNotFoundError, 'not a folder', tmp_path / 'x', {'like': 'gone'}),
    (ValueError, 'max_shard_bytes=0', tmp_path / 'x', {'max_shard_bytes': 0}),
  ):
    with pytest.raises(error, match=message):
      weights.save(target, policy, params, **given)
  with pytest.raises(ValueError, match='tie_word_embeddings True in the'):
    weights.save(
      tmp_path / 'x', policy_of(UNTIED), params_of(UNTIED), like=folder
    )
  assert contents(folder) == before
  assert [path.name for path in tmp_path.iterdir()] == ['hf']


def test_a_shard_outside_of_the_folder_is_refused(tmp_path):
  folder = write_sharded(tmp_path / 'hf', TIED, stored_tensors(TIED))
  path = folder / 'model.safetensors.index.json'
  path.write_text(path.read_text().replace(SHARDS[1], f'../{SHARDS[1]}'))
  (folder / SHARDS[1]).rename(tmp_path / SHARDS[1])
  with pytest.raises(ValueError, match=f'lists ../{SHARDS[1]}.*beside'):
    weights.load(folder, policy_of(TIED))


def test_on_eight_devices_every_byte_is_kept(tmp_path):
  folder = write_by_transformers(tmp_path / 'hf', UNTIED, 'bfloat16', '20KB')
  run_python(
    f"""
import dataclasses, pathlib, jax, numpy as np
from planpo_jax import sharding, weights
from planpo_jax.models import qwen2
folder = pathlib.Path({str(folder)!r})
for scan in (False, True):
  config = dataclasses.replace(weights.read_config(folder), scan_layers=scan)
  policy = qwen2.create(config, 45)
  whole = weights.load(folder, policy)
  for sizes in ((1, 2, 4),) if scan else ((1, 8, 1), (2, 2, 2)):
    mesh = sharding.make_mesh(*sizes)
    places = sharding.param_shardings(mesh, qwen2.abstract_params(policy))
    params = weights.load(folder, policy, shardings=places)
    for x, y, s in zip(*map(jax.tree.leaves, (whole, params, places))):
      assert y.sharding == s
      np.testing.assert_array_equal(x, y)
    out = folder.with_name(f'out_{{scan}}_{{sizes}}')
    with jax.set_mesh(mesh):  # As a warm start has it.
      weights.save(out, policy, params, like=folder)
    for path in folder.iterdir():
      assert (out / path.name).read_bytes() == path.read_bytes(), path
    assert len(list(out.iterdir())) == len(list(folder.iterdir()))
""",
    devices=8,
  )


# 4 MB tensors: 407 MB in float32.
WIDE = qwen2.Qwen2Config(
  vocab_size=2048,
  hidden_size=512,
  intermediate_size=2048,
  num_layers=24,
  num_heads=8,
  num_kv_heads=8,
  head_dim=64,
  tie_word_embeddings=True,
)

MEASURE = """
import ctypes, dataclasses, gc, jax
from planpo_jax import sharding, weights
from planpo_jax.models import qwen2

def memory(key):
  for line in open('/proc/self/status'):
    if line.startswith(key):
      return int(line.split()[1]) * 1024

def prepare(folder):
  config = dataclasses.replace(weights.read_config(folder), scan_layers=SCAN)
  policy = qwen2.create(config, config.vocab_size)
  weights.tensor_shapes(policy)
  mesh = sharding.make_mesh(1, jax.device_count(), 1)
  places = sharding.param_shardings(mesh, qwen2.abstract_params(policy))
  return policy, places

policy, places = prepare(SMALL)
weights.load(SMALL, policy, shardings=places)
policy, places = prepare(FOLDER)
# Neither what stays allocated from the first time, by the compiler above all,
# nor what was freed and would be used again.
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = memory('VmRSS')
params = weights.load(FOLDER, policy, shardings=places)
peak = memory('VmHWM') - before
shards = [s.data for x in jax.tree.leaves(params) for s in x.addressable_shards]
share = sum(x.nbytes for x in shards)
largest = 4 * max(a * b for a, *b in
                  weights.tensor_shapes(policy).values() for b in b or [1])
print(peak, share, largest)
"""


@pytest.fixture(scope='module')
def wide(tmp_path_factory):
  folder = tmp_path_factory.mktemp('wide')
  for name, config in (
    ('small', dataclasses.replace(WIDE, num_layers=1)),
    ('wide', WIDE),
  ):
    shapes = weights.tensor_shapes(policy_of(config))
    tensors = {n: np.ones(s, ml_dtypes.bfloat16) for n, s in shapes.items()}
    write_single(folder / name, config, tensors)
  return folder


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('devices', [1, 8])
def test_peak_memory_of_loading(wide, devices, scan):
  """At most the params, a tenth of them and the largest tensor."""
  program = (
    MEASURE.replace('SCAN', str(scan))
    .replace('FOLDER', repr(str(wide / 'wide')))
    .replace('SMALL', repr(str(wide / 'small')))
  )
  peak, share, largest = map(int, run_python(program, devices).split())
  assert largest == 4 * 512 * 2048
  assert 407e6 < share < 440e6
  assert 0.95 * share < peak <= 1.1 * share + largest


def hub_cache(home, name, files):
  """A cache folder as huggingface_hub leaves it after a download."""
  model = home / 'hub' / f'models--{name.replace("/", "--")}'
  commit = '0123456789abcdef0123456789abcdef01234567'
  snapshot = model / 'snapshots' / commit
  for folder in (model / 'refs', model / 'blobs', snapshot):
    folder.mkdir(parents=True)
  (model / 'refs' / 'main').write_text(commit)
  for i, path in enumerate(files):
    (model / 'blobs' / str(i)).write_bytes(path.read_bytes())
    (snapshot / path.name).symlink_to(f'../../blobs/{i}')
  return snapshot


def test_hub_names(tmp_path):
  folder = write_sharded(tmp_path / 'hf', TIED, stored_tensors(TIED))
  snapshot = hub_cache(tmp_path / 'home', 'some-one/Tiny.1', folder.iterdir())
  program = """
import sys
from planpo_jax import weights
from planpo_jax.models import qwen2
found = weights.resolve('some-one/Tiny.1')
print(found)
weights.load(found, qwen2.create(weights.read_config(found), 45))
try:
  weights.resolve('some-one/Other')
except ValueError as error:
  print(error)
"""
  printed = run_python(
    program, HF_HOME=str(tmp_path / 'home'), HF_HUB_OFFLINE='1'
  ).splitlines()
  assert printed[0] == str(snapshot)
  assert len(printed) == 2
  assert printed[1].startswith('some-one/Other is no folder on this machine')
  assert 'hf download some-one/Other --local-dir DIR' in printed[1]


def test_names_that_need_no_hub(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'owner' / 'name').mkdir(parents=True)
  assert weights.resolve('owner/name') == pathlib.Path('owner/name')
  assert weights.resolve(tmp_path) == tmp_path
  shipped = weights.resolve('nano_sciworld')
  assert weights.read_config(shipped).vocab_size == 1024
  for name in ('gone', '/gone/away', './gone/away', 'a/b/c'):
    with pytest.raises(FileNotFoundError, match='give the folder of a'):
      weights.resolve(name)
