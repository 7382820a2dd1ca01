"""The sampler agrees with the full forward pass, whatever the timing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax import compilations, decoding, sampling, sharding
from planpo_jax import sampler as sampler_lib
from planpo_jax.models import qwen2

CONFIG = qwen2.Qwen2Config(
  vocab_size=160,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  tie_word_embeddings=True,
  rope_theta=1e4,
)
NUM_TOKENS = 150
STOP = 7
KEY = jax.random.key(11)

_init_params = jax.jit(qwen2.init_params, static_argnums=0)


@functools.cache
def _policy():
  policy = qwen2.create(CONFIG, NUM_TOKENS)
  params = jax.device_get(_init_params(policy, jax.random.key(0)))
  # Larger weights than fresh ones: the distribution must not be flat.
  return policy, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


def _sampler(policy=None, params=None, **changes):
  arguments = {
    'slots': 4,
    'cache_len': 300,
    'max_new_tokens': 12,
    'settings': sampling.Settings(),
    'stop_ids': [STOP],
  }
  return sampler_lib.Sampler(
    policy or _policy()[0],
    _policy()[1] if params is None else params,
    **arguments | changes,
  )


def _context(seed, length):
  ids = np.random.default_rng(seed).integers(8, NUM_TOKENS, length)
  return ids.tolist()


def _finish(sampler, slot, max_steps=None):
  """Decodes until this slot has its response; others go on or finish."""
  while True:
    for response in sampler.decode(max_steps):
      if response.slot == slot:
        return response


def _respond(sampler, slot, context, key, cap=None):
  sampler.submit(slot, context, key, cap)
  return _finish(sampler, slot)


@functools.partial(jax.jit, static_argnums=0)
def _scores(policy, params, tokens, segments, temperature):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return qwen2.token_logps(
    policy, params, tokens, positions, segments, temperature
  )[0]


def _full_logps(ids, temperature=1.0, width=320):
  """Log-probabilities of a sequence by one full forward pass."""
  policy, params = _policy()
  tokens = np.zeros((1, width), np.int32)
  tokens[0, : len(ids)] = ids
  segments = (np.arange(width) < len(ids)).astype(np.int32)[None]
  logps = _scores(policy, params, tokens, segments, temperature)
  return np.asarray(logps)[0, : len(ids)]


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_logps_of_a_conversation_equal_the_full_forward_pass(temperature):
  sampler = _sampler(settings=sampling.Settings(temperature))
  ids, sampled, logps = _context(1, 150), [], []
  for turn in range(4):
    response = _respond(sampler, 2, ids, jax.random.fold_in(KEY, turn))
    sampled += range(len(ids), len(ids) + len(response.ids))
    logps += response.logps.tolist()
    ids = ids + response.ids.tolist() + _context(turn, 9 + 8 * turn)
  expected = _full_logps(ids, temperature)[sampled]
  assert len(logps) > 20
  np.testing.assert_allclose(logps, expected, atol=1e-4)


def test_greedy_takes_the_best_id_and_reports_the_unscaled_logp():
  context = _context(2, 20)
  response = _respond(
    _sampler(settings=sampling.Settings(0.0)), 0, context, KEY
  )
  ids = context + response.ids.tolist()
  # The temperature near 0 of the same logits puts all weight on the best id.
  cold = _full_logps(ids, temperature=1e-3)[len(context) :]
  np.testing.assert_allclose(cold, 0, atol=1e-3)
  np.testing.assert_allclose(
    response.logps, _full_logps(ids)[len(context) :], atol=1e-4
  )
  assert response.logps.max() < -1e-3


def test_a_response_is_the_same_alone_in_any_slot_and_among_neighbours():
  context, key = _context(3, 140), jax.random.fold_in(KEY, 5)
  more = _context(4, 21)

  def play(sampler, slot, interrupt):
    """Two turns; `interrupt` runs between steps of the first one."""
    sampler.submit(slot, context, key)
    interrupt()
    first = _finish(sampler, slot)
    grown = context + first.ids.tolist() + more
    second = _respond(sampler, slot, grown, jax.random.fold_in(key, 1))
    return first, second

  alone = play(_sampler(), 0, lambda: None)
  assert alone[0].ids.tolist() != alone[1].ids.tolist()
  for slot in range(4):
    sampler = _sampler()
    neighbours = [other for other in range(4) if other != slot]

    def interrupt(sampler=sampler, neighbours=neighbours):
      sampler.submit(neighbours[0], _context(6, 260), KEY)
      sampler.decode(max_steps=1)
      sampler.submit(neighbours[1], _context(7, 17), KEY)
      sampler.decode(max_steps=1)
      sampler.reset(neighbours[1])

    crowded = play(sampler, slot, interrupt)
    for one, other in zip(alone, crowded, strict=True):
      np.testing.assert_array_equal(one.ids, other.ids)
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-6)


def test_only_new_tokens_of_a_growing_conversation_are_prefilled():
  sampler = _sampler()
  ids = _context(8, 40)
  response = _respond(sampler, 0, ids, KEY)
  # The last context token is fed by decode.
  assert sampler.counters.prefilled_tokens == 39
  for length in (5, 33):
    before = sampler.counters.prefilled_tokens
    ids = ids + response.ids.tolist() + _context(length, length)
    response = _respond(sampler, 0, ids, KEY)
    # The last response token in, the last context token out.
    assert sampler.counters.prefilled_tokens - before == length
  decoded = sampler.counters.decoded_tokens
  response = _respond(sampler, 0, ids, KEY)
  assert sampler.counters.decoded_tokens - decoded == len(response.ids)


def test_a_changed_context_keeps_the_common_prefix_and_gives_the_same():
  shared = _context(9, 60)
  first, second = shared + _context(10, 30), shared + _context(11, 25)
  sampler = _sampler()
  _respond(sampler, 1, first, KEY)
  before = sampler.counters.prefilled_tokens
  reused = _respond(sampler, 1, second, KEY)
  assert sampler.counters.prefilled_tokens - before == len(second) - 1 - len(
    shared
  )
  fresh = _respond(_sampler(), 1, second, KEY)
  np.testing.assert_array_equal(reused.ids, fresh.ids)
  np.testing.assert_allclose(reused.logps, fresh.logps, atol=1e-5)


def test_reset_forgets_and_drops_a_response_in_the_making():
  sampler = _sampler(stop_ids=[])
  context = _context(12, 30)
  sampler.submit(0, context, KEY)
  assert sampler.active == (0,) and sampler.free == (1, 2, 3)
  assert sampler.decode(max_steps=3) == []
  sampler.reset(0)
  assert sampler.active == () and sampler.decode() == []
  # Nor does it go on beside the others.
  sampler.submit(2, context, KEY)
  sampler.decode(max_steps=1)
  assert np.flatnonzero(sampler._slots.armed_B).tolist() == [2]
  sampler.reset(2)
  before = sampler.counters.prefilled_tokens
  sampler.submit(0, context, KEY)
  sampler.decode(max_steps=1)
  assert sampler.counters.prefilled_tokens - before == len(context) - 1


def test_caps_end_a_response_as_truncated():
  sampler = _sampler(stop_ids=[])
  full = _respond(sampler, 0, _context(13, 10), KEY)
  assert len(full.ids) == 12 and full.truncated
  short = _respond(sampler, 1, _context(13, 10), KEY, cap=5)
  assert short.truncated
  np.testing.assert_array_equal(short.ids, full.ids[:5])


def test_a_stop_id_ends_a_response_and_belongs_to_it():
  context = _context(13, 10)
  unstopped = _respond(_sampler(stop_ids=[]), 0, context, KEY).ids.tolist()
  stop = unstopped[4]
  at = unstopped.index(stop)
  stopped = _respond(_sampler(stop_ids=[NUM_TOKENS - 1, stop]), 0, context, KEY)
  assert stopped.ids.tolist() == unstopped[: at + 1]
  assert not stopped.truncated
  # At the cap too: it stopped by itself.
  capped = _respond(_sampler(stop_ids=[stop]), 0, context, KEY, cap=at + 1)
  assert capped.ids.tolist() == unstopped[: at + 1] and not capped.truncated


@pytest.mark.parametrize('cache_len', [128, 300])
def test_the_budget_is_clipped_to_what_the_cache_holds(cache_len):
  sampler = _sampler(cache_len=cache_len, stop_ids=[])
  context = _context(14, cache_len - 4)
  for slot in (3, 0):
    response = _respond(sampler, slot, context, KEY)
    assert len(response.ids) == 4 and response.truncated
    np.testing.assert_allclose(
      response.logps,
      _full_logps(context + response.ids.tolist())[cache_len - 4 :],
      atol=1e-4,
    )


def test_a_full_slot_does_not_disturb_the_others():
  context = _context(15, 20)
  alone = _respond(_sampler(cache_len=128, stop_ids=[]), 1, context, KEY)
  sampler = _sampler(cache_len=128, stop_ids=[])
  sampler.submit(1, context, KEY)
  full = _respond(sampler, 0, _context(16, 127), KEY)
  assert len(full.ids) == 1
  other = _finish(sampler, 1)
  np.testing.assert_array_equal(alone.ids, other.ids)


def test_bad_requests_name_the_numbers():
  sampler = _sampler()
  with pytest.raises(ValueError, match='300 tokens must have 1..299'):
    sampler.submit(0, _context(0, 300), KEY)
  with pytest.raises(ValueError, match='context of 0 tokens'):
    sampler.submit(0, [], KEY)
  with pytest.raises(ValueError, match='span 3..150, must be in 0..149'):
    sampler.submit(0, [3, 150], KEY)
  with pytest.raises(ValueError, match='max_new_tokens=13 must be in 1..12'):
    sampler.submit(0, [3], KEY, 13)
  with pytest.raises(ValueError, match='slot 4 does not exist'):
    sampler.submit(4, [3], KEY)
  with pytest.raises(ValueError, match='threefry'):
    sampler.submit(0, [3], np.zeros(3, np.uint32))
  assert sampler.active == ()
  sampler.submit(0, [3], KEY)
  with pytest.raises(RuntimeError, match='slot 0 is sampling already'):
    sampler.submit(0, [3], KEY)
  with pytest.raises(RuntimeError, match='old params'):
    sampler.set_params(_policy()[1])
  with pytest.raises(ValueError, match='stop id 150 can never be sampled'):
    _sampler(stop_ids=[150])
  with pytest.raises(ValueError, match='slots=0 must be at least 1'):
    _sampler(slots=0)


def test_members_of_a_group_differ_and_raw_keys_equal_typed_ones():
  sampler = _sampler(stop_ids=[])
  context = _context(17, 16)
  keys = [jax.random.fold_in(KEY, member) for member in range(4)]
  for slot, key in enumerate(keys):
    sampler.submit(slot, context, key)
  responses = sampler.decode()
  assert [r.slot for r in responses] == [0, 1, 2, 3]
  assert len({tuple(r.ids.tolist()) for r in responses}) == 4
  raw = np.asarray(jax.random.key_data(keys[2]))
  again = _respond(sampler, 0, context, raw)
  np.testing.assert_array_equal(again.ids, responses[2].ids)


def test_token_i_is_drawn_with_the_key_folded_by_i():
  context = _context(21, 16)
  response = _respond(_sampler(stop_ids=[]), 3, context, KEY)
  ids = context + response.ids.tolist()
  tokens = np.zeros((1, 32), np.int32)
  tokens[0, : len(ids)] = ids
  policy, params = _policy()

  @jax.jit
  def redraw(params):
    index = jnp.arange(32)[None]
    hidden = policy.hidden(params, tokens, index, jnp.ones_like(tokens))
    made = jnp.arange(12)
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(made)
    uniform = jax.vmap(jax.random.uniform)(keys)
    logits = policy.logits(params, hidden)[0, 15 + made]
    return sampling.sample(logits, uniform, sampling.Settings())[0]

  np.testing.assert_array_equal(response.ids, redraw(params))


def test_new_params_and_temperatures_act_without_compiling():
  sampler = _sampler(stop_ids=[])
  context = _context(18, 200)
  first = _respond(sampler, 0, context, KEY)
  for length in (10, 20, 40, 80):
    _respond(sampler, 1, _context(0, length), KEY)
  compiled = compilations.watch().programs
  sampler.set_params(jax.tree.map(lambda x: x * np.float32(1.1), _policy()[1]))
  before = sampler.counters.prefilled_tokens
  second = _respond(sampler, 0, context, KEY)
  # What was cached under the old params is gone.
  assert sampler.counters.prefilled_tokens - before == len(context) - 1
  assert not np.allclose(first.logps, second.logps, atol=1e-3)
  sampler.settings = sampling.Settings(0.5)
  for length in (7, 19, 55, 90, 290):
    _respond(sampler, 2, _context(1, length), KEY, cap=3)
  assert compilations.watch().programs == compiled


@pytest.mark.parametrize('count', [1, 16, 17, 30, 100, 130, 256, 300, 1000])
def test_chunks_cover_the_count_with_little_padding(count):
  chunks = sampler_lib._chunks(count)
  assert sum(real for _, real in chunks) == count
  assert all(real == size for size, real in chunks[:-1])
  assert all(size in sampler_lib.PREFILL_CHUNKS for size, _ in chunks)
  assert sum(size for size, _ in chunks) <= max(16, count * 2)


def test_spare_ids_are_never_sampled():
  policy, params = _policy()
  # Spare rows with by far the largest logits, were they not masked.
  spoilt = dict(params, embedding_VD=params['embedding_VD'].copy())
  spoilt['embedding_VD'][NUM_TOKENS:] *= 100
  sampler = _sampler(
    policy, params=spoilt, settings=sampling.Settings(5.0), stop_ids=[]
  )
  responses = []
  for turn in range(5):
    for slot in range(4):
      key = jax.random.fold_in(KEY, 4 * turn + slot)
      sampler.submit(slot, _context(19, 5), key)
    responses += sampler.decode()
  assert len(responses) == 20
  assert max(r.ids.max() for r in responses) < NUM_TOKENS
  assert min(r.logps.min() for r in responses) > -100


def test_untied_heads_and_one_kv_head_agree_as_well():
  config = dataclasses.replace(
    CONFIG, tie_word_embeddings=False, num_kv_heads=1, num_layers=1
  )
  policy = qwen2.create(config, NUM_TOKENS)
  params = _init_params(policy, jax.random.key(1))
  sampler = _sampler(
    policy, params=params, slots=2, cache_len=64, max_new_tokens=8, stop_ids=[]
  )
  context = _context(20, 24)
  response = _respond(sampler, 1, context, KEY)
  ids = context + response.ids.tolist()
  segments = np.ones((1, len(ids)), np.int32)
  logps = _scores(policy, params, np.asarray([ids]), segments, 1.0)
  np.testing.assert_allclose(response.logps, logps[0, 24:], atol=1e-4)


def test_a_long_context_does_not_hold_up_the_others():
  sampler = _sampler(cache_len=1100, stop_ids=[])
  key = jax.random.fold_in(KEY, 3)
  sampler.submit(0, _context(1, 20), key, 8)
  sampler.decode(max_steps=1)
  decoded, filled = (
    sampler.counters.decoded_tokens,
    sampler.counters.prefilled_tokens,
  )
  sampler.submit(1, _context(2, 801), KEY)
  made = []
  for _ in range(4):
    assert sampler.decode(max_steps=1) == []
    made.append(
      (
        sampler.counters.prefilled_tokens - filled,
        sampler.counters.decoded_tokens - decoded,
      )
    )
  # 256 tokens, then a step of the other slot; both step once 800 are in.
  assert made == [(256, 1), (512, 2), (768, 3), (800, 5)]
  # Without a limit too: the other one ends before a second context is in.
  sampler.submit(2, _context(3, 1000), KEY)
  first = sampler.decode()
  assert [r.slot for r in first] == [0]
  # A step of it a chunk, three in all.
  assert sampler.counters.prefilled_tokens - filled == 800 + 3 * 256
  assert first[0].ids.tolist() == (
    _respond(_sampler(stop_ids=[]), 3, _context(1, 20), key, 8).ids.tolist()
  )
  rest = {r.slot: r for r in (*sampler.decode(), *sampler.decode())}
  alone = _respond(
    _sampler(cache_len=1100, stop_ids=[]), 0, _context(3, 1000), KEY
  )
  np.testing.assert_array_equal(rest[2].ids, alone.ids)
  np.testing.assert_array_equal(rest[2].logps, alone.logps)


def test_contexts_are_read_together_where_weights_serve_many_rows(monkeypatch):
  """As on TPU and GPU; there is one call for four contexts of a length."""
  policy = qwen2.create(dataclasses.replace(CONFIG, on_cpu=False), NUM_TOKENS)
  calls = []
  prefill = decoding.prefill_chunks

  def counted(*arguments):
    calls.append(arguments[4].shape)
    return prefill(*arguments)

  monkeypatch.setattr(decoding, 'prefill_chunks', counted)
  sampler = _sampler(policy, slots=5, stop_ids=[])
  contexts = [_context(40 + slot, 50 + slot) for slot in range(4)]
  for slot, context in enumerate(contexts):
    sampler.submit(slot + 1, context, jax.random.fold_in(KEY, slot))
  responses = sampler.decode()
  assert [r.slot for r in responses] == [1, 2, 3, 4]
  assert calls == [(8, 64)]
  for response, context in zip(responses, contexts, strict=True):
    ids = context + response.ids.tolist()
    np.testing.assert_allclose(
      response.logps, _full_logps(ids)[len(context) :], atol=1e-4
    )


def test_matrices_are_cast_once_and_results_stay_the_same():
  policy = qwen2.create(
    dataclasses.replace(CONFIG, dtype='bfloat16'), NUM_TOKENS
  )
  params = jax.tree.map(jnp.asarray, _policy()[1])
  cast = decoding.for_sampling(policy, params, None)
  types = {
    path[-1].key: x.dtype
    for path, x in jax.tree_util.tree_leaves_with_path(cast)
  }
  assert types['w_q_NHD'] == types['embedding_VD'] == jnp.bfloat16
  assert types['final_norm_D'] == types['attention_norm_D'] == jnp.float32
  tokens = np.asarray([_context(5, 40)])
  index = np.arange(40)[None]

  @jax.jit
  def logits(params):
    hidden = policy.hidden(params, tokens, index, np.ones_like(tokens))
    return policy.logits(params, hidden)

  np.testing.assert_array_equal(logits(params), logits(cast))
  # Nothing to cast: the same arrays, unless they must not be.
  same = decoding.for_sampling(_policy()[0], params, None)
  assert same['final_norm_D'] is params['final_norm_D']


def test_params_that_were_copied_may_be_donated():
  policy, params = _policy()
  context = _context(6, 30)
  expected = _respond(_sampler(), 0, context, KEY)
  mesh = sharding.make_mesh()
  for place in (None, mesh):
    given = jax.tree.map(jnp.asarray, params)
    if place is not None:
      given = sharding.shard_params(place, given)
    sampler = sampler_lib.Sampler(
      policy,
      params,
      slots=4,
      cache_len=300,
      max_new_tokens=12,
      settings=sampling.Settings(),
      stop_ids=[STOP],
      mesh=place,
    )
    sampler.set_params(given, copy=True)
    for x in jax.tree.leaves(given):
      x.delete()
    response = _respond(sampler, 0, context, KEY)
    np.testing.assert_array_equal(response.ids, expected.ids)


def test_filters_act_and_logps_are_those_of_what_they_leave():
  """Top 5 at temperature 0.7, against a sort of the full forward pass."""
  settings = sampling.Settings(temperature=0.7, top_k=5)
  context = _context(22, 30)
  response = _respond(_sampler(stop_ids=[], settings=settings), 1, context, KEY)
  ids = context + response.ids.tolist()
  policy, params = _policy()
  tokens = np.zeros((1, 64), np.int32)
  tokens[0, : len(ids)] = ids
  index = np.arange(64)[None]

  @jax.jit
  def logits(params):
    hidden = policy.hidden(params, tokens, index, np.ones_like(tokens))
    return policy.logits(params, hidden)[0]

  rows_RV = np.asarray(logits(params))[len(context) - 1 : len(ids) - 1] / 0.7
  for i, (row_V, logp) in enumerate(zip(rows_RV, response.logps, strict=True)):
    best = np.argsort(-row_V)[:5]
    assert response.ids[i] in best
    expected = row_V[response.ids[i]] - np.log(np.exp(row_V[best]).sum())
    np.testing.assert_allclose(logp, expected, atol=1e-4)


def test_contexts_of_all_lengths_take_a_program_a_chunk_length():
  """Lengths 5 to 60 need chunks of 16, 32 and 64, and one decoding program."""
  # Shapes of this test's own, so that nothing is compiled yet.
  sampler = _sampler(slots=3, cache_len=200)
  before = compilations.watch().programs
  lengths = np.random.default_rng(0).permutation(np.arange(5, 61))
  for i, length in enumerate(lengths.tolist()):
    slot = i % 3
    sampler.reset(slot)
    _respond(sampler, slot, _context(i, length), KEY, cap=2)
    if i == 20:
      warm = compilations.watch().programs
  assert compilations.watch().programs - before == 4
  assert compilations.watch().programs == warm


def test_bfloat16_samples_near_what_the_learner_scores():
  """The bound is that of the warning, the rest is what rounding makes."""
  policy = qwen2.create(
    dataclasses.replace(CONFIG, dtype='bfloat16'), NUM_TOKENS
  )
  params = _policy()[1]
  sampler = _sampler(policy, params=params, stop_ids=[])
  gaps = []
  for turn in range(4):
    context = _context(60 + turn, 50)
    response = _respond(sampler, turn, context, jax.random.fold_in(KEY, turn))
    ids = context + response.ids.tolist()
    tokens = np.asarray([ids], np.int32)
    scores = _scores(policy, params, tokens, np.ones_like(tokens), 1.0)[0]
    gaps += np.abs(response.logps - scores[len(context) :]).tolist()
  assert 1e-4 < max(gaps) < 0.5
  assert np.mean(gaps) < 0.05


def test_what_is_compiled_ahead_is_not_compiled_again_and_changes_nothing():
  context = _context(70, 300)
  sampler = _sampler(slots=2, cache_len=700)
  sampler.submit(0, context, KEY)
  sampler.decode(max_steps=3)
  sampler.compile()
  compiled = compilations.watch().programs
  response = _finish(sampler, 0)
  for length in (3, 20, 40, 100, 200, 600):
    _respond(sampler, 1, _context(length, length), KEY, cap=2)
  assert compilations.watch().programs == compiled
  expected = _respond(_sampler(slots=2, cache_len=700), 0, context, KEY)
  np.testing.assert_array_equal(response.ids, expected.ids)
  np.testing.assert_array_equal(response.logps, expected.logps)
