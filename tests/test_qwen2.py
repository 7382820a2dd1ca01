"""The network and the log-probabilities taken from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax.models import attention, qwen2

CONFIG = qwen2.Qwen2Config(
  vocab_size=40,
  hidden_size=24,
  intermediate_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  tie_word_embeddings=True,
  rope_theta=1e4,
)
KEY = jax.random.key(3)

# Compiled as a whole: op by op, the same tests take minutes.
init_params = jax.jit(qwen2.init_params, static_argnums=0)
token_logps = jax.jit(
  qwen2.token_logps, static_argnums=0, static_argnames='head_chunk'
)
extend = jax.jit(qwen2.Policy.extend, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(policy, params, tokens, positions, segments):
  return policy.hidden(params, tokens, positions, segments)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(policy, params, tokens, positions, segments):
  hidden = policy.hidden(params, tokens, positions, segments)
  return policy.logits(params, hidden)


@functools.cache
def _policy(num_tokens=37, **changes):
  policy = qwen2.create(dataclasses.replace(CONFIG, **changes), num_tokens)
  rng = np.random.default_rng(0)
  # Nothing may be at its neutral value: biases and norms have to matter.
  return policy, jax.tree.map(
    lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32),
    jax.device_get(init_params(policy, KEY)),
  )


def _tokens(rows, length, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 37, (rows, length)).astype(np.int32)


def _whole_rows(tokens):
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return positions.astype(np.int32), np.ones_like(tokens)


def _reference_logits(config, params, tokens):
  """One sequence in plain numpy, head by head, from the published formulas."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  length, half = len(tokens), config.head_dim // 2

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

  def rotate(x):
    out = np.empty_like(x)
    for t in range(length):
      for i in range(half):
        angle = t / config.rope_theta ** (2 * i / config.head_dim)
        a, b = x[t, i], x[t, i + half]
        out[t, i] = a * np.cos(angle) - b * np.sin(angle)
        out[t, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out

  x = p['embedding_VD'][tokens]
  for i in range(config.num_layers):
    block = (
      jax.tree.map(lambda x, i=i: x[i], p['blocks'])
      if config.scan_layers
      else p['blocks'][f'{i:02d}']
    )
    w, ff = block['attention'], block['feed_forward']
    y = norm(x, block['attention_norm_D'])
    out = np.zeros_like(x)
    for n in range(config.num_heads):
      kv = n // (config.num_heads // config.num_kv_heads)
      q = rotate(y @ w['w_q_NHD'][n].T + w['b_q_NH'][n])
      k = rotate(y @ w['w_k_KHD'][kv].T + w['b_k_KH'][kv])
      v = y @ w['w_v_KHD'][kv].T + w['b_v_KH'][kv]
      scores = q @ k.T / np.sqrt(config.head_dim)
      scores[np.triu_indices(length, 1)] = -np.inf
      probs = np.exp(scores - scores.max(-1, keepdims=True))
      out += probs / probs.sum(-1, keepdims=True) @ v @ w['w_o_DNH'][:, n].T
    x = x + out
    y = norm(x, block['feed_forward_norm_D'])
    gate = y @ ff['w_gate_FD'].T
    up = y @ ff['w_up_FD'].T
    x = x + gate / (1 + np.exp(-gate)) * up @ ff['w_down_DF'].T
  x = norm(x, p['final_norm_D'])
  tied = config.tie_word_embeddings
  return x @ p['embedding_VD' if tied else 'head_VD'].T


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'num_kv_heads': 1, 'tie_word_embeddings': False},
    {'num_kv_heads': 4, 'remat': True},
    {'scan_layers': True},
    {'scan_layers': True, 'remat': True, 'tie_word_embeddings': False},
  ],
  ids=[
    'grouped-tied',
    'one-kv-head-untied',
    'all-kv-heads-remat',
    'scanned',
    'scanned-untied-remat',
  ],
)
def test_logits_equal_a_plain_implementation(changes):
  policy, params = _policy(num_tokens=40, **changes)
  tokens = _tokens(2, 9)
  logits = logits_of(policy, params, tokens, *_whole_rows(tokens))
  for row in range(2):
    expected = _reference_logits(policy.config, params, tokens[row])
    # The rows that fill up the embedding are no ids.
    np.testing.assert_allclose(
      logits[row, :, :40], expected[:, :40], atol=1e-4, rtol=1e-4
    )
    assert np.all(logits[row, :, 40:] < -1e20)


@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scanned'])
def test_cached_forward_equals_the_full_one_across_pieces(scan):
  policy, params = _policy(scan_layers=scan)
  tokens = _tokens(3, 400)
  full = hidden_of(policy, params, tokens, *_whole_rows(tokens))
  cache = policy.init_cache(5, 400)
  # Per layer, or the pieces of all layers stacked.
  if scan:
    assert len(cache) == 3 and cache[0][0].shape == (2, 5, 2, 6, 128)
  else:
    assert len(cache) == 2 and len(cache[0]) == 3
  for row, cache_row in ((2, 1), (0, 3), (1, 0)):
    start = 0
    # Uneven calls, padded to one length, across the borders at 128 and 256.
    for count in (100, 100, 1, 99, 100):
      chunk = np.full((1, 100), 36, np.int32)
      chunk[0, :count] = tokens[row, start : start + count]
      hidden, cache = extend(
        policy,
        params,
        cache,
        chunk,
        np.asarray([start]),
        np.asarray([count]),
        np.asarray([cache_row]),
      )
      np.testing.assert_allclose(
        hidden[0, :count],
        full[row, start : start + count],
        atol=1e-4,
        rtol=1e-4,
      )
      start += count


def test_rows_of_count_zero_leave_the_cache_alone():
  policy, params = _policy()
  cache = jax.tree.map(lambda x: x + 1.0, policy.init_cache(3, 128))
  _, after = extend(
    policy,
    params,
    cache,
    np.zeros((3, 1), np.int32),
    np.asarray([4, 127, 128]),
    np.asarray([1, 0, 0]),
    None,
  )
  for (k_old, v_old), (k_new, v_new) in (
    jax.device_get((old[0], new[0]))
    for old, new in zip(cache, after, strict=True)
  ):
    np.testing.assert_array_equal(k_old[1:], k_new[1:])
    np.testing.assert_array_equal(v_old[1:], v_new[1:])
    changed = np.flatnonzero(np.any(k_old[0] != k_new[0], axis=(0, 1)))
    assert changed.tolist() == [4]
    changed = np.flatnonzero(np.any(v_old[0] != v_new[0], axis=(0, 2)))
    assert changed.tolist() == [4]


@pytest.mark.parametrize('length', [300, 1100])
def test_packed_attention_in_blocks_equals_one_softmax(length):
  rng = np.random.default_rng(length)
  q = rng.normal(size=(1, length, 4, 6)).astype(np.float32)
  k, v = rng.normal(size=(2, 1, length, 2, 6)).astype(np.float32)
  # Three segments and padding, with borders inside blocks.
  segments = np.repeat([1, 2, 3, 0], [100, 105, 80, length - 285])[None]
  out = jax.jit(attention.attend)(q, k, v, segments)
  index = np.arange(length)
  mask = (index[:, None] >= index) & (segments[0][:, None] == segments[0])
  for n in range(4):
    scores = q[0, :, n] @ k[0, :, n // 2].T / np.sqrt(6)
    weights = np.where(mask, np.exp(scores), 0)
    expected = weights @ v[0, :, n // 2] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(
      out[0, :285, n], expected[:285], atol=1e-5, rtol=1e-5
    )


def test_logps_and_entropies_equal_log_softmax_of_the_step_before():
  policy, params = _policy()
  tokens = _tokens(2, 11)
  positions, segments = _whole_rows(tokens)
  logits = np.asarray(logits_of(policy, params, tokens, positions, segments))
  assert np.all(logits[..., 37:] < -1e20)
  for temperature in (1.0, 0.5):
    logp, entropy = token_logps(
      policy, params, tokens, positions, segments, temperature, head_chunk=4
    )
    weights = np.exp(logits[..., :37].astype(np.float64) / temperature)
    probs = weights / weights.sum(-1, keepdims=True)
    for row in range(2):
      assert logp[row, 0] == 0 and entropy[row, 0] == 0
      for t in range(1, 11):
        before = probs[row, t - 1]
        np.testing.assert_allclose(
          logp[row, t], np.log(before[tokens[row, t]]), atol=1e-5
        )
        np.testing.assert_allclose(
          entropy[row, t], -np.sum(before * np.log(before)), atol=1e-5
        )


def test_segments_packed_in_a_row_equal_each_alone():
  policy, params = _policy()
  first, second = _tokens(1, 150, 1)[0], _tokens(1, 60, 2)[0]
  pad = np.zeros(14, np.int32)
  packed = np.concatenate([first, second, pad])[None]
  segments = np.repeat([1, 2, 0], [150, 60, 14])[None].astype(np.int32)
  positions = np.concatenate([np.arange(150), np.arange(60), pad])[None]
  together = token_logps(policy, params, packed, positions, segments, 1.0)
  for start, ids in ((0, first), (150, second)):
    size = len(ids)
    # Alone at the start of a row of the same length.
    row = np.zeros((1, 224), np.int32)
    row[0, :size] = ids
    inside = (np.arange(224) < size).astype(np.int32)[None]
    alone = token_logps(
      policy, params, row, np.arange(224)[None] * inside, inside, 1.0
    )
    for x, y in jax.device_get(list(zip(together, alone, strict=True))):
      np.testing.assert_allclose(
        x[0, start : start + size], y[0, :size], atol=1e-5, rtol=1e-5
      )
  for x in jax.device_get(together):
    assert x[0, 0] == 0 and x[0, 150] == 0 and not np.any(x[0, 210:])


def test_spare_ids_have_probability_zero_and_finite_gradients():
  policy, params = _policy(num_tokens=30)
  # A row of the head that would win everywhere, were it not masked.
  params = dict(params, embedding_VD=params['embedding_VD'].copy())
  params['embedding_VD'][35] *= 50
  tokens = _tokens(1, 8) % 30

  def loss(params):
    logp, entropy = qwen2.token_logps(
      policy, params, tokens, *_whole_rows(tokens), 0.3
    )
    return jnp.sum(logp) + jnp.sum(entropy)

  value, grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(params))
  assert np.isfinite(value) and value > -1000
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
  assert not np.any(grads['embedding_VD'][30:])


def test_gradients_equal_those_of_the_unchunked_head_and_no_remat():
  tokens = _tokens(2, 37)
  rows = _whole_rows(tokens)

  def direct(params, policy):
    logits = policy.logits(params, policy.hidden(params, tokens, *rows))
    logps = jax.nn.log_softmax(logits[:, :-1] / 0.7, axis=-1)
    logp = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
    return jnp.sum(logp) + 0.5 * jnp.sum(entropy)

  def chunked(params, policy):
    logp, entropy = qwen2.token_logps(
      policy, params, tokens, *rows, 0.7, head_chunk=16
    )
    return jnp.sum(logp) + 0.5 * jnp.sum(entropy)

  policy, params = _policy(num_layers=1)
  remat, _ = _policy(num_layers=1, remat=True)
  grad = functools.partial(jax.jit, static_argnums=1)
  expected = grad(jax.grad(direct))(params, policy)
  got = grad(jax.grad(chunked))(params, remat)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=1e-4),
    jax.device_get(got),
    jax.device_get(expected),
  )


def test_logits_of_a_whole_batch_are_never_held():
  policy, params = _policy(vocab_size=40_000, num_tokens=40_000, num_layers=1)
  tokens = _tokens(4, 128)

  def loss(params):
    logp, _ = qwen2.token_logps(
      policy, params, tokens, *_whole_rows(tokens), 1.0, head_chunk=16
    )
    return jnp.sum(logp)

  compiled = jax.jit(jax.grad(loss)).lower(params).compile()
  whole = 4 * 128 * 40_000 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < whole


def test_bfloat16_compute_is_close_and_gives_float32_logps():
  policy, params = _policy(dtype='bfloat16')
  exact, _ = _policy()
  tokens = _tokens(1, 20)
  rows = _whole_rows(tokens)
  hidden = jax.eval_shape(policy.hidden, params, tokens, *rows)
  assert hidden.dtype == jnp.bfloat16
  logp, _ = token_logps(policy, params, tokens, *rows, 1.0)
  expected, _ = token_logps(exact, params, tokens, *rows, 1.0)
  assert logp.dtype == jnp.float32
  assert 1e-5 < np.abs(logp - expected).mean() < 0.2


def test_init_follows_the_key_and_its_distribution():
  policy = qwen2.create(CONFIG, 37)
  one, same = (init_params(policy, KEY) for _ in range(2))
  other = init_params(policy, jax.random.key(4))
  jax.tree.map(np.testing.assert_array_equal, one, same)
  assert not np.allclose(one['embedding_VD'], other['embedding_VD'])
  block = one['blocks']['01']['attention']
  assert not np.allclose(
    block['w_q_NHD'], one['blocks']['00']['attention']['w_q_NHD']
  )
  assert abs(np.std(one['embedding_VD']) - 0.02) < 0.002
  assert not np.any(block['b_q_NH'])
  assert np.all(one['final_norm_D'] == 1)


# Counts as published on the model cards (with biases, tied heads once).
@pytest.mark.parametrize(
  'name, billions',
  [
    ('qwen2.5-0.5b', 0.494),
    ('qwen2.5-1.5b', 1.544),
    ('qwen2.5-3b', 3.086),
    ('qwen2.5-7b', 7.616),
  ],
)
def test_published_sizes_have_their_number_of_params(name, billions):
  policy = qwen2.create(qwen2.SIZES[name], 151665)
  shapes = jax.eval_shape(lambda key: qwen2.init_params(policy, key), KEY)
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert round(count / 1e9, 3) == billions
  assert ('head_VD' in shapes) == (name == 'qwen2.5-7b')


def test_policies_of_equal_shape_are_one_static_argument():
  assert qwen2.create(CONFIG, 37) == qwen2.create(CONFIG, 37)
  assert hash(qwen2.create(CONFIG, 37)) == hash(qwen2.create(CONFIG, 37))
  assert qwen2.create(CONFIG, 37) != qwen2.create(CONFIG, 36)


def test_impossible_shapes_are_refused():
  with pytest.raises(ValueError, match='num_kv_heads=3 must divide'):
    dataclasses.replace(CONFIG, num_kv_heads=3)
  with pytest.raises(ValueError, match='head_dim=7 must be even'):
    dataclasses.replace(CONFIG, head_dim=7)
  with pytest.raises(ValueError, match='num_tokens=41 must be in 1..vocab'):
    qwen2.create(CONFIG, 41)
