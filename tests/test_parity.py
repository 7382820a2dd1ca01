"""The same logits as transformers' Qwen2ForCausalLM, read from its files."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
import transformers

from planpo_jax import weights
from planpo_jax.models import qwen2

NANO = {
  'vocab_size': 131,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 512,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e6,
  'tie_word_embeddings': True,
}
KINDS = {
  'tied, 2 kv heads': {},
  'untied, 1 kv head': {'tie_word_embeddings': False, 'num_key_value_heads': 1},
  'tied, 4 kv heads': {'num_key_value_heads': 4},
  'untied, theta 1e4': {'tie_word_embeddings': False, 'rope_theta': 1e4},
  'rows of the vocabulary divide': {'vocab_size': 256, 'rms_norm_eps': 1e-5},
  'wide heads': {'hidden_size': 64, 'num_attention_heads': 2},
}


def make_oracle(folder, seed=0, **changes):
  """A random Qwen2ForCausalLM, written to `folder`."""
  torch.manual_seed(seed)
  config = transformers.Qwen2Config(**(NANO | changes))
  oracle = transformers.Qwen2ForCausalLM(config).eval()
  with torch.no_grad():
    for name, param in oracle.named_parameters():
      # Biases and norms have to matter, and logits to be far from 0.
      if name.endswith('bias'):
        param.normal_(0, 0.3)
      elif 'norm' in name:
        param.normal_(1, 0.3)
  oracle.save_pretrained(folder)
  return oracle


def load(folder, **changes):
  config = dataclasses.replace(weights.read_config(folder), **changes)
  policy = qwen2.create(config, config.vocab_size)
  dtype = config.param_dtype
  return policy, weights.load(folder, policy, param_dtype=dtype)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(policy, params, tokens, positions, segments):
  hidden = policy.hidden(params, tokens, positions, segments)
  return policy.logits(params, hidden)[..., : policy.config.vocab_size]


def whole_rows(tokens):
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return positions.astype(np.int32), np.ones_like(tokens)


def random_tokens(vocab, rows, length, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab, (rows, length)).astype(np.int32)


def ask(oracle, tokens, **more):
  with torch.no_grad():
    found = oracle(torch.tensor(tokens, dtype=torch.long), **more)
  return found.logits.float().numpy()


@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scanned'])
@pytest.mark.parametrize('kind', KINDS)
def test_logits_at_nano_shapes(tmp_path, kind, scan):
  oracle = make_oracle(tmp_path, **KINDS[kind])
  policy, params = load(tmp_path, scan_layers=scan)
  tokens = random_tokens(oracle.config.vocab_size, 2, 37)
  expected = ask(oracle, tokens)
  got = logits_of(policy, params, tokens, *whole_rows(tokens))
  # What a missing bias, norm or rotation would change is far larger.
  assert np.std(expected) > 0.1
  np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_changes_nothing(tmp_path, side):
  oracle = make_oracle(tmp_path)
  policy, params = load(tmp_path)
  tokens = random_tokens(131, 3, 20, seed=1)
  lengths = (20, 13, 1)
  kept = np.stack(
    [
      np.arange(20) >= 20 - n if side == 'left' else np.arange(20) < n
      for n in lengths
    ]
  )
  positions = np.maximum(np.cumsum(kept, axis=1) - 1, 0).astype(np.int32)
  got = logits_of(
    policy, params, tokens * kept, positions, kept.astype(np.int32)
  )
  # transformers, padded in the same way, and each row by itself.
  padded = ask(
    oracle,
    tokens * kept,
    attention_mask=torch.tensor(kept.astype(int)),
    position_ids=torch.tensor(positions, dtype=torch.long),
  )
  for row in range(3):
    alone = ask(oracle, tokens[row][kept[row]][None])[0]
    for expected in (padded[row][kept[row]], alone):
      np.testing.assert_allclose(
        got[row][kept[row]], expected, atol=1e-4, rtol=1e-4
      )
  assert np.all(np.isfinite(got))


def test_packing_changes_nothing(tmp_path):
  oracle = make_oracle(tmp_path)
  policy, params = load(tmp_path)
  lengths = (150, 1, 60, 9)
  pieces = [random_tokens(131, 1, n, seed=n)[0] for n in lengths]
  packed = np.concatenate([*pieces, np.zeros(12, np.int32)])[None]
  segments = np.repeat([1, 2, 3, 4, 0], [*lengths, 12])[None].astype(np.int32)
  positions = np.concatenate(
    [*(np.arange(n) for n in lengths), np.zeros(12)]
  ).astype(np.int32)[None]
  got = logits_of(policy, params, packed, positions, segments)[0]
  start = 0
  for piece in pieces:
    expected = ask(oracle, piece[None])[0]
    np.testing.assert_allclose(
      got[start : start + len(piece)], expected, atol=1e-4, rtol=1e-4
    )
    start += len(piece)


def test_cached_decoding_follows_transformers_cache(tmp_path):
  oracle = make_oracle(tmp_path)
  policy, params = load(tmp_path)
  tokens = random_tokens(131, 2, 30, seed=2)

  @jax.jit
  def extend(cache, tokens, start):
    counts = np.full(2, tokens.shape[1], np.int32)
    hidden, cache = policy.extend(params, cache, tokens, start, counts)
    return policy.logits(params, hidden)[..., :131], cache

  cache, past = policy.init_cache(2, 30), None
  for start, stop in ((0, 17), (17, 18), (18, 30)):
    got, cache = extend(
      cache, tokens[:, start:stop], np.full(2, start, np.int32)
    )
    with torch.no_grad():
      found = oracle(
        torch.tensor(tokens[:, start:stop], dtype=torch.long),
        past_key_values=past,
        use_cache=True,
      )
    past = found.past_key_values
    np.testing.assert_allclose(got, found.logits.numpy(), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope='module')
def half_billion(tmp_path_factory):
  """The 0.5B shape with random weights."""
  folder = tmp_path_factory.mktemp('half_billion')
  shape = qwen2.SIZES['qwen2.5-0.5b']
  oracle = make_oracle(
    folder,
    vocab_size=shape.vocab_size,
    hidden_size=shape.hidden_size,
    intermediate_size=shape.intermediate_size,
    num_hidden_layers=shape.num_layers,
    num_attention_heads=shape.num_heads,
    num_key_value_heads=shape.num_kv_heads,
    max_position_embeddings=shape.max_positions,
  )
  found = weights.read_config(folder)
  assert found == shape
  yield folder, oracle
  (folder / 'model.safetensors').unlink()  # Two gigabytes.


def test_logits_at_the_full_half_billion_shape(half_billion):
  folder, oracle = half_billion
  tokens = random_tokens(151936, 1, 64)
  exact = ask(oracle, tokens)
  assert np.std(exact) > 0.1
  policy, params = load(folder)
  got = logits_of(policy, params, tokens, *whole_rows(tokens))
  np.testing.assert_allclose(got, exact, atol=1e-4, rtol=1e-4)
  del params, got

  # In bfloat16 both round, each in its own order: ours may be no further from
  # the float32 logits than 1.2 times what transformers' own are, and within 3%
  # of their spread.
  policy, params = load(folder, dtype='bfloat16', param_dtype='bfloat16')
  got = logits_of(policy, params, tokens, *whole_rows(tokens))
  theirs = ask(oracle.to(torch.bfloat16), tokens)

  def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))

  ours, other = rms(np.asarray(got) - exact), rms(theirs - exact)
  print(f'bfloat16: rms error {ours:.5f}, transformers {other:.5f}')
  assert 0 < ours < 1.2 * other
  assert ours < 0.03 * np.std(exact)
