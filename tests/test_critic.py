"""The critic: the backbone of the policy and a head of one number.

Tiny networks in the forms that platforms differ in, and a critic that learns,
on one device and on eight.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import optimizer, sharding, update
from planpo_jax.losses import value as value_lib
from planpo_jax.models import critic, qwen2
from tests import eight_devices

CONFIG = qwen2.Qwen2Config(
  vocab_size=48,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tie_word_embeddings=True,
  rope_theta=1e4,
)
FORMS = {
  'unrolled': {},
  'untied': {'tie_word_embeddings': False},
  'scanned': {'scan_layers': True, 'remat': True},
  'bfloat16': {'dtype': 'bfloat16', 'scan_layers': True},
}
HEADS = 2

# Plain steps: Adam would turn rounding of a gradient near 0 into a step.
SGD = optax.sgd(0.05, momentum=0.9)


@functools.cache
def network(form):
  """The policy, its params, and those of a critic whose heads are not 0."""
  config = dataclasses.replace(CONFIG, **FORMS[form])
  policy = qwen2.create(config, 40)
  params = jax.jit(functools.partial(qwen2.init_params, policy))(
    jax.random.key(0)
  )
  made = critic.init_params(policy, params, HEADS)
  rng = np.random.default_rng(0)
  w_DC = rng.normal(size=made['w_value_DC'].shape).astype(np.float32)
  return policy, params, made | {'w_value_DC': jnp.asarray(w_DC)}


def rows(seed=0):
  """Segments of 5 and 4 tokens and padding, and one of 9 and padding."""
  rng = np.random.default_rng(seed)
  segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 9 + [0] * 3])
  positions = [[*range(5), *range(4), 0, 0, 0], [*range(9), 0, 0, 0]]
  return (
    rng.integers(0, 40, (2, 12)).astype(np.int32),
    np.array(positions, np.int32),
    segments.astype(np.int32),
  )


@functools.cache
def values_of(form):
  policy, _, _ = network(form)
  return jax.jit(functools.partial(critic.values, policy))


@pytest.mark.parametrize('form', FORMS)
def test_value_is_the_head_on_the_state_before_the_token(form):
  """Hidden state at t - 1; 0 at the first token and on padding."""
  policy, params, made = network(form)
  tokens, positions, segments = rows()
  value_BTC = np.asarray(values_of(form)(made, tokens, positions, segments))
  assert value_BTC.shape == (2, 12, HEADS) and value_BTC.dtype == np.float32
  hidden = jax.jit(policy.hidden)(params, tokens, positions, segments)
  hidden = np.asarray(hidden.astype(jnp.float32))
  wanted = np.zeros_like(value_BTC)
  for b, t in [(0, t) for t in (1, 2, 3, 4, 6, 7, 8)] + [
    (1, t) for t in range(1, 9)
  ]:
    wanted[b, t] = hidden[b, t - 1] @ np.asarray(made['w_value_DC'])
  np.testing.assert_allclose(
    value_BTC, wanted, atol=1e-5 if form != 'bfloat16' else 0.1
  )
  assert np.abs(value_BTC).max() > 1


@pytest.mark.parametrize('form', ['unrolled', 'scanned'])
def test_value_knows_what_precedes_the_token_and_nothing_else(form):
  """Neither the token itself, nor later ones, nor another segment."""
  _, _, made = network(form)
  tokens, positions, segments = rows()
  changed = tokens.copy()
  changed[0, 6] = (changed[0, 6] + 1) % 40
  one, two = (
    np.asarray(values_of(form)(made, ids, positions, segments))
    for ids in (tokens, changed)
  )
  differs = (np.abs(one - two) > 1e-6).any(-1)
  assert np.argwhere(differs).tolist() == [[0, 7], [0, 8]]


@pytest.mark.parametrize('form', FORMS)
def test_params_are_the_backbone_and_a_head_of_zeros(form):
  policy, params, _ = network(form)
  made = critic.init_params(policy, params, 3)
  assert made.keys() == params.keys() - {'head_VD'} | {'w_value_DC'}
  assert made['w_value_DC'].shape == (16, 3)
  assert made['w_value_DC'].dtype == np.float32
  assert made['blocks'] is params['blocks']
  assert not critic.values(policy, made, *rows()).any()


def test_training_it_leaves_the_policy_as_it_is():
  """`update.create` copies what `init_params` shares."""
  policy, params, _ = network('unrolled')
  made = critic.init_params(policy, params, 1)
  state = update.create(made, SGD)
  mine = {id(x) for x in jax.tree.leaves(params)}
  assert not mine & {id(x) for x in jax.tree.leaves(state.params)}


def test_heads_are_counted():
  policy, params, _ = network('unrolled')
  with pytest.raises(ValueError, match='heads=0 must be at least 1'):
    critic.init_params(policy, params, 0)


def lesson(num_rows=8, heads=1, seed=0):
  """Rows of two segments; a value is 10 or 0, as the first token is odd or not.

  Head c is to learn (c + 1) times that, but only on every (c + 1)th row.
  """
  rng = np.random.default_rng(seed)
  shape = (num_rows, 12)
  tokens = rng.integers(0, 40, shape).astype(np.int32)
  segments = np.tile([1] * 6 + [2] * 5 + [0], (num_rows, 1)).astype(np.int32)
  positions = np.tile([*range(6), *range(5), 0], (num_rows, 1))
  mask = (positions > 1) & (segments > 0)
  first = np.where(segments == 1, tokens[:, :1], tokens[:, 6:7])
  target = np.where(first % 2 == 1, 10, 0)[..., None] * (1 + np.arange(heads))
  zeros = np.zeros(shape, np.float32)
  row_head = np.arange(num_rows)[:, None, None] % (1 + np.arange(heads)) == 0
  return batch_lib.Batch(
    tokens_BT=tokens,
    positions_BT=positions.astype(np.int32),
    segment_ids_BT=segments,
    loss_mask_BT=mask,
    turn_BT=mask.astype(np.int32),
    flat_BT=np.zeros(shape, np.int32),
    adv_BT=zeros,
    sampler_logp_BT=zeros,
    old_logp_BT=zeros,
    ref_logp_BT=zeros,
    value_BTC=np.zeros((*shape, heads), np.float32),
    target_BTC=target.astype(np.float32),
    target_mask_BTC=mask[..., None] & row_head,
  )


def learn(form, batch, optim, steps, *, mesh=None, micro_rows=4, **chosen):
  """Scores, then updates; returns the critic, the reports and values."""
  policy, _, made = network(form)
  heads = batch.target_BTC.shape[-1]
  made = made | {'w_value_DC': made['w_value_DC'][:, :heads] / 10}
  micro = {'micro_rows': micro_rows}
  state, shardings = update.create(made, optim), None
  if mesh is not None:
    micro['micro_sharding'] = sharding.micro_sharding(mesh)
    shardings = sharding.param_shardings(mesh, state)
    state = sharding.shard_params(mesh, state)
    batch = sharding.put_batch(mesh, batch)
  values = functools.partial(critic.values, policy)
  score = update.make_score(values, **micro)
  step = update.make_critic_update(
    values,
    functools.partial(value_lib.value_loss, **chosen),
    optim,
    state_shardings=shardings,
    **micro,
  )
  reports = []
  for _ in range(steps):
    value_BTC = score(state.params, batch)
    batch = dataclasses.replace(batch, value_BTC=value_BTC)
    state, report = step(state, batch)
    reports.append(report)
  return state, reports, value_BTC


def test_it_learns():
  """From explaining nothing to most of it, one clipped step after the other."""
  batch = lesson()
  optim = optimizer.make(1e-2, weight_decay=0.0)
  state, reports, _ = learn('unrolled', batch, optim, 60)
  before, after = (update.critic_scalars([reports[i]]) for i in (0, -1))
  assert before['critic/explained_variance'] < 0.2
  assert after['critic/explained_variance'] > 0.8
  assert after['critic/value_loss'] < 0.3 * before['critic/value_loss']
  assert after['critic/skipped_updates'] == 0
  assert state.step == 60


def compare_devices():
  """What `test_eight_devices_equal_one` asks for, on eight devices."""
  batch = lesson(heads=HEADS)
  state, reports, value_BTC = learn('scanned', batch, SGD, 2)
  start = network('scanned')[2]['w_value_DC'] / 10
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    many = learn('scanned', batch, SGD, 2, mesh=mesh, micro_rows=8)
  one = (state, reports, value_BTC)
  difference = jax.tree.map(
    lambda x, y: np.max(np.abs(np.asarray(x) - y) / (1 + np.abs(x))),
    *jax.device_get((one, many)),
  )
  embedding_VD = many[0].params['embedding_VD']
  return {
    'value': float(jnp.abs(value_BTC).max()),
    'moved': float(jnp.abs(state.params['w_value_DC'] - start).max()),
    'difference': float(max(jax.tree.leaves(difference))),
    'devices': len(embedding_VD.sharding.device_set),
    'whole': embedding_VD.is_fully_replicated,
  }


def test_eight_devices_equal_one():
  """And blocks of 8 rows those of 4, over two updates of two heads."""
  found = eight_devices.report_of(
    """
import json
import jax
from tests import test_critic
jax.config.update('jax_default_matmul_precision', 'highest')
print(json.dumps(test_critic.compare_devices()))
"""
  )
  assert found['value'] > 1 and found['moved'] > 0.01
  assert found['difference'] < 1e-4
  assert found['devices'] == 8 and not found['whole']
