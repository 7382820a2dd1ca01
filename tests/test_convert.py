"""launch/convert.py: what it writes is read by transformers."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from configs import base
from planpo_jax import (
  build,
  checkpoint,
  optimizer,
  sharding,
  tokenizer,
  update,
  weights,
)
from planpo_jax import config as config_lib
from planpo_jax.models import qwen2

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHATML = (
  '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n'
  '{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
MESSAGES = [{'role': 'user', 'content': 'look around'}]


def export(*arguments, **variables):
  return subprocess.run(
    [sys.executable, 'launch/convert.py', *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', **variables},
    capture_output=True,
    text=True,
  )


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """A small checkpoint with all that a published one has beside weights."""
  folder = tmp_path_factory.mktemp('source') / 'hf'
  torch.manual_seed(0)
  model = transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      vocab_size=1030,  # More than the tokenizer has ids.
      hidden_size=32,
      intermediate_size=48,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=600,
      tie_word_embeddings=False,
    )
  )
  for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.0, 0.3)
  model.generation_config.eos_token_id = [868, 866]
  model.generation_config.temperature = 0.7
  model.generation_config.do_sample = True
  model.to(torch.bfloat16).save_pretrained(folder, max_shard_size='100KB')
  shipped = tokenizer.ASSETS / 'nano_sciworld'
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (folder / name).write_bytes((shipped / name).read_bytes())
  (folder / 'chat_template.jinja').write_text(CHATML)
  return folder


def settings(**changes):
  config = base.smoke(base.get_config())
  config.update_from_flattened_dict(changes)
  return config


def write_run(workdir, config, *, scan):
  """A run of two steps, as training leaves it; returns policy and params."""
  found = build.network(config)
  mesh = build.mesh(config, found)
  shape = dataclasses.replace(found.policy.config, scan_layers=scan)
  policy = qwen2.create(shape, found.policy.num_tokens)
  if found.folder:
    params = weights.load(found.folder, policy)
  else:
    params = qwen2.init_params(policy, jax.random.key(0))
  lock = config_lib.claim(workdir, config)
  checkpoints = checkpoint.Checkpoints(workdir / 'checkpoints', keep=None)
  stepped = []
  for step in (1, 2):
    params = jax.tree.map(lambda x: x * 1.25, params)
    stepped.append(params)
    state = update.create(params, optimizer.make(**config.optimizer))
    checkpoints.save(step, sharding.shard_params(mesh, state))
  checkpoints.close()
  lock.close()
  return policy, stepped


def logits(policy, params, ids):
  ids = jnp.asarray([ids])
  positions = jnp.arange(ids.shape[1])[None]
  hidden = policy.hidden(params, ids, positions, jnp.ones_like(ids))
  return np.asarray(policy.logits(params, hidden))[0, :, : policy.num_tokens]


@pytest.mark.parametrize('scan', [False, True])
def test_transformers_reads_what_a_run_exports(source, tmp_path, scan):
  config = settings(**{'model.checkpoint': str(source), 'model.tokenizer': ''})
  policy, (first, second) = write_run(tmp_path / 'run', config, scan=scan)
  out = tmp_path / 'out'
  done = export(
    'export',
    f'--workdir={tmp_path / "run"}',
    f'--output={out}',
    '--dtype=float32',
  )
  assert done.returncode == 0, done.stderr
  assert f'wrote step 2 of {tmp_path / "run"} to {out}' in done.stdout
  for path in out.iterdir():
    assert f'{path.name}  {path.stat().st_size:,} bytes' in done.stdout
  oracle = transformers.AutoTokenizer.from_pretrained(out)
  ids = oracle.apply_chat_template(
    MESSAGES, add_generation_prompt=True, return_dict=False
  )
  assert oracle.decode(ids) == (
    '<|im_start|>user\nlook around<|im_end|>\n<|im_start|>assistant\n'
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert model.dtype == torch.float32
  assert model.config.vocab_size == 1030
  assert model.config.max_position_embeddings == 600
  assert model.generation_config.eos_token_id == [868, 866]
  assert model.generation_config.temperature == 0.7
  with torch.no_grad():
    expected = model(torch.tensor([ids])).logits[0].numpy()
  np.testing.assert_allclose(
    logits(policy, second, ids),
    expected[:, : policy.num_tokens],
    atol=1e-4,
    rtol=1e-4,
  )
  # An earlier step, in the type and the files of the checkpoint it began from.
  done = export(
    'export', f'--workdir={tmp_path / "run"}', f'--output={out}', '--step=1'
  )
  assert done.returncode == 0, done.stderr
  before, after = contents(source), contents(out)
  assert set(after) == set(before)
  for name in before:
    same_header = before[name][:8] == after[name][:8]
    assert same_header and len(before[name]) == len(after[name])
    if not name.startswith('model-'):
      assert after[name] == before[name]
  again = weights.load(out, policy)
  assert again['final_norm_D'].tolist() == [
    float(x) for x in first['final_norm_D'].astype(jnp.bfloat16)
  ]


def test_a_run_without_a_checkpoint_exports_its_tokenizer(tmp_path):
  policy, (_, second) = write_run(tmp_path / 'run', settings(), scan=False)
  out = tmp_path / 'out'
  done = export('export', f'--workdir={tmp_path / "run"}', f'--output={out}')
  assert done.returncode == 0, done.stderr
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert model.dtype == torch.bfloat16
  assert model.generation_config.eos_token_id == [866, 868]
  ids = transformers.AutoTokenizer.from_pretrained(out)('look around').input_ids
  assert len(ids) > 1
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), second
  )
  with torch.no_grad():
    expected = model.float()(torch.tensor([ids])).logits[0].numpy()
  np.testing.assert_allclose(
    logits(policy, rounded, ids),
    expected[:, : policy.num_tokens],
    atol=1e-4,
  )


def test_a_checkpoint_is_exported_byte_for_byte(source, tmp_path):
  out = tmp_path / 'out'
  done = export('export', f'--checkpoint={source}', f'--output={out}')
  assert done.returncode == 0, done.stderr
  assert contents(out) == contents(source)
  # In one file, and in another type.
  done = export(
    'export',
    f'--checkpoint={source}',
    f'--output={out}',
    '--max-shard-gb=1',
    '--dtype=float32',
  )
  assert done.returncode == 0, done.stderr
  assert {name for name in contents(out) if 'safetensors' in name} == {
    'model.safetensors'
  }
  wide = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert wide.dtype == torch.float32
  model = transformers.AutoModelForCausalLM.from_pretrained(source)
  for name, value in model.state_dict().items():
    assert torch.equal(wide.state_dict()[name], value.float())


def test_mistakes_end_with_one_sentence(source, tmp_path):
  run = tmp_path / 'run'
  write_run(run, settings(), scan=False)
  bare = tmp_path / 'bare'
  bare.mkdir()
  (bare / 'config.json').write_bytes((run / 'config.json').read_bytes())
  full = tmp_path / 'full'
  full.mkdir()
  (full / 'thesis.tex').write_text('years of work')
  out = f'--output={tmp_path / "out"}'
  for message, *arguments in (
    ('must be a command: export',),
    ('must be a command: export', 'import', out),
    ("'more' is not a flag", 'export', 'more', out),
    ('give either --workdir', 'export', out),
    ('--output is missing', 'export', f'--workdir={run}'),
    ('holds no run', 'export', f'--workdir={tmp_path / "gone"}', out),
    ('holds no checkpoint yet', 'export', f'--workdir={bare}', out),
    ('it holds 1, 2', 'export', f'--workdir={run}', '--step=7', out),
    ('--step is of a run', 'export', f'--checkpoint={source}', '--step=1', out),
    ('--dtype=int4 must be', 'export', f'--workdir={run}', '--dtype=int4', out),
    (
      '--max-shard-gb=-1.0 must be above 0',
      'export',
      f'--workdir={run}',
      '--max-shard-gb=-1',
      out,
    ),
    ('give the folder of a checkpoint', 'export', '--checkpoint=gone', out),
    (
      'hf download some-one/gone --local-dir DIR',
      'export',
      '--checkpoint=some-one/gone',
      out,
    ),
    (
      'thesis.tex, which saving would delete',
      'export',
      f'--workdir={run}',
      f'--output={full}',
    ),
    (
      'is the checkpoint that the new one',
      'export',
      f'--checkpoint={source}',
      f'--output={source}',
    ),
  ):
    done = export(
      *arguments, HF_HUB_OFFLINE='1', HF_HOME=str(tmp_path / 'home')
    )
    assert done.returncode == 2, (message, done.stderr)
    assert done.stderr.startswith('error: '), (message, done.stderr)
    assert message in done.stderr
    assert done.stderr.count('\n') == 1
  assert not (tmp_path / 'out').exists()
  assert not (bare / 'checkpoints').exists()


def test_a_damaged_run_is_named(tmp_path):
  write_run(tmp_path / 'run', settings(), scan=False)
  for path in (tmp_path / 'run' / 'checkpoints' / '2').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  done = export(
    'export', f'--workdir={tmp_path / "run"}', f'--output={tmp_path / "out"}'
  )
  assert done.returncode == 2, done.stderr
  assert (
    f'{tmp_path / "run" / "checkpoints" / "2"} cannot be read' in done.stderr
  )


@pytest.mark.parametrize(
  ('changes', 'error', 'message'),
  [
    (
      {'chat.max_context': 601},
      config_lib.ConfigError,
      'chat.max_context=601 must not exceed the 600 positions',
    ),
    (
      {'model.dtype': 'float8'},
      config_lib.ConfigError,
      "model.dtype='float8' must be one of float32, bfloat16",
    ),
    (
      {'model.param_dtype': 'int8'},
      config_lib.ConfigError,
      "model.param_dtype='int8' must be one of",
    ),
    (
      {'model.checkpoint': 'gone'},
      FileNotFoundError,
      'gone is not a folder on this machine',
    ),
  ],
)
def test_what_a_checkpoint_cannot_do_is_refused(
  source, changes, error, message
):
  given = {'model.checkpoint': str(source), 'model.tokenizer': ''}
  with pytest.raises(error, match=message):
    build.network(settings(**(given | changes)))


def test_a_checkpoint_without_tokenizer_is_refused(source, tmp_path):
  (tmp_path / 'config.json').write_bytes((source / 'config.json').read_bytes())
  config = settings(
    **{'model.checkpoint': str(tmp_path), 'model.tokenizer': ''}
  )
  with pytest.raises(ValueError, match=f'no tokenizer.json in {tmp_path}'):
    build.network(config)


def test_weights_and_tokenizer_come_from_one_hub_name(
  source, tmp_path, monkeypatch
):
  config = settings(**{'model.checkpoint': 'a/b', 'model.tokenizer': ''})
  monkeypatch.setattr(weights, 'resolve', lambda name: {'a/b': source}[name])
  network = build.network(config)
  model = build.model(config, network, build.mesh(config, network))
  assert model.policy.config.vocab_size == 1030
  assert model.tokenizer.num_tokens == 873
  assert model.tokenizer.files[0].parent == source
