"""Linear layers: one result in every form, and no hidden float32 copies."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax.models import linear, qwen2


def _inputs(rows, outputs, inputs, dtype):
  rng = np.random.default_rng(rows)
  x = rng.normal(size=(rows, *inputs)).astype(np.float32)
  w = rng.normal(size=(*outputs, *inputs)).astype(np.float32)
  return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


# Rows on both sides of every limit of linear.py; the last shape is wide.
@pytest.mark.parametrize('rows', [1, 2, 15, 16, 64, 65])
@pytest.mark.parametrize(
  'outputs, inputs',
  [((24,), (16,)), ((4, 6), (16,)), ((16,), (4, 6)), ((400,), (16,))],
)
@pytest.mark.parametrize('on_cpu', [True, False], ids=['cpu', 'accelerator'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_every_form_is_the_same_product(rows, outputs, inputs, on_cpu, dtype):
  x, w = _inputs(rows, outputs, inputs, dtype)

  @jax.jit
  def run(x, w):
    return linear.linear(x, w, len(inputs), dtype=dtype, on_cpu=on_cpu)

  got = run(x, w)
  assert got.shape == (rows, *outputs) and got.dtype == dtype
  expected = np.tensordot(
    np.asarray(x, np.float64),
    np.asarray(w, np.float64),
    (
      tuple(range(-len(inputs), 0)),
      tuple(range(-len(inputs), 0)),
    ),
  )
  # Operands are the same; the result is rounded to its type once.
  bound = 1e-5 if dtype == 'float32' else 2**-8
  np.testing.assert_allclose(
    np.asarray(got, np.float64), expected, rtol=bound, atol=30 * bound**1.5
  )


@pytest.mark.parametrize('rows', [1, 5, 40, 100])
def test_gradients_of_the_bfloat16_form_are_those_of_the_product(rows):
  x, w = _inputs(rows, (24,), (16,), 'bfloat16')
  weight = np.random.default_rng(1).normal(size=(rows, 24)).astype(np.float32)

  @functools.partial(jax.jit, static_argnums=2)
  def grads(x, w, dtype):
    def total(x, w):
      y = linear.linear(x, w, 1, 'float32', dtype=dtype, on_cpu=True)
      return jnp.sum(y * weight)

    return jax.grad(total, (0, 1))(x, w)

  got = grads(x, w, 'bfloat16')
  expected = grads(x.astype('float32'), w.astype('float32'), 'float32')
  for one, other in zip(got, expected, strict=True):
    assert one.dtype == jnp.bfloat16
    scale = np.abs(np.asarray(other)).max()
    np.testing.assert_allclose(
      np.asarray(one, np.float32), other, atol=2**-7 * scale
    )


SHAPE = qwen2.Qwen2Config(
  vocab_size=32768,
  hidden_size=512,
  intermediate_size=2048,
  num_layers=4,
  num_heads=8,
  num_kv_heads=2,
  head_dim=64,
  tie_word_embeddings=True,
  dtype='bfloat16',
  param_dtype='bfloat16',
)


@pytest.mark.parametrize('batch', [1, 8, 32])
def test_decoding_in_bfloat16_makes_no_float32_copy_of_weights(batch):
  policy = qwen2.create(SHAPE, 32768)

  def step(params, cache, tokens, start):
    hidden, cache = policy.extend(
      params, cache, tokens, start, jnp.ones_like(start)
    )
    return policy.logits(params, hidden[:, 0]).argmax(-1), cache

  def temporaries(policy, step):
    compiled = (
      jax.jit(step, donate_argnums=1)
      .lower(
        qwen2.abstract_params(policy),
        jax.eval_shape(lambda: policy.init_cache(batch, 256)),
        jax.ShapeDtypeStruct((batch, 1), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
      )
      .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes

  # One feed-forward weight in float32 would be 4 MiB, the embedding 64, the
  # cache of one layer 8 x batch / 8; the logits are what is needed.
  logits = 4 * batch * SHAPE.vocab_size
  assert temporaries(policy, step) < 3 * logits + 2**21


def test_the_forward_pass_in_bfloat16_makes_none_either():
  policy = qwen2.create(SHAPE, 32768)
  tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

  def hidden(params, tokens):
    return policy.hidden(params, tokens, tokens, jnp.ones_like(tokens))

  compiled = (
    jax.jit(hidden).lower(qwen2.abstract_params(policy), tokens).compile()
  )
  one_weight = 4 * SHAPE.hidden_size * SHAPE.intermediate_size
  assert compiled.memory_analysis().temp_size_in_bytes < one_weight


@pytest.mark.parametrize('scan', [False, True])
def test_gradients_on_accelerators_keep_16_bits(scan):
  config = dataclasses.replace(
    SHAPE, num_layers=2, scan_layers=scan, on_cpu=False
  )
  policy = qwen2.create(config, 32768)
  tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

  def total(params, tokens):
    hidden = policy.hidden(params, tokens, tokens, jnp.ones_like(tokens))
    return policy.logits(params, hidden).sum()

  lowered = jax.jit(jax.grad(total)).lower(
    qwen2.abstract_params(policy), tokens
  )
  products = re.findall(
    r'stablehlo.dot_general .*: \(tensor<([^>]*)>, tensor<([^>]*)>\)',
    lowered.as_text(),
  )
  # Those of attention have heads: four axes. All others read weights.
  with_weights = [
    pair for pair in products if not all(t.count('x') > 3 for t in pair)
  ]
  assert len(with_weights) > 8
  for pair in with_weights:
    assert all(t.endswith('bf16') for t in pair), pair
