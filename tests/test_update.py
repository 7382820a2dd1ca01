"""score and update on a tiny Qwen2: where model, loss and optimizer meet."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import checkpoint, episodes, losses, optimizer, update
from planpo_jax.losses import value as value_lib
from planpo_jax.models import qwen2
from tests import make_episodes

CONFIG = qwen2.Qwen2Config(
  vocab_size=48,
  hidden_size=16,
  intermediate_size=32,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tie_word_embeddings=True,
  rope_theta=1e4,
)
POLICY = qwen2.create(CONFIG, 40)
LOGPS = functools.partial(qwen2.token_logps, POLICY, temperature=0.7)
LOSS = losses.get('ppo_clip', kl_coef=0.1)
OPTIMIZER = optimizer.make(1e-2)


def bigram_logps(params, tokens_BT, positions_BT, segment_ids_BT):
  """Compiles fast, where what is tested is the sum, not the network."""
  del positions_BT, segment_ids_BT
  hidden_BTD = params['embedding_VD'][jnp.roll(tokens_BT, 1, 1)]
  all_BTV = jax.nn.log_softmax(hidden_BTD @ params['head_VD'].T)
  logp_BT = jnp.take_along_axis(all_BTV, tokens_BT[..., None], 2)[..., 0]
  return logp_BT, -(jnp.exp(all_BTV) * all_BTV).sum(-1)


def run_bigram(batch, micro_rows, place=lambda params: params, **micro):
  step = update.make_update(
    bigram_logps, LOSS, OPTIMIZER, micro_rows=micro_rows, **micro
  )
  return step(update.create(place(bigram_params()), OPTIMIZER), batch)


def bigram_params():
  rng = np.random.default_rng(0)
  return {
    'embedding_VD': rng.normal(size=(40, 8)).astype(np.float32),
    'head_VD': rng.normal(size=(40, 8)).astype(np.float32),
  }


@functools.cache
def make_score(micro_rows):
  score = update.make_score(LOGPS, micro_rows=micro_rows)
  return lambda params, batch: score(params, batch)[0]


@functools.cache
def make_update(micro_rows):
  return update.make_update(LOGPS, LOSS, OPTIMIZER, micro_rows=micro_rows)


@functools.cache
def params():
  """The weights are scaled up, so that the policy is far from uniform."""
  fresh = jax.jit(functools.partial(qwen2.init_params, POLICY))(
    jax.random.key(0)
  )
  return jax.tree.map(lambda x: 4 * x, fresh)


def make_batch(*, count=6, row_len=16, row_multiple=1, minibatches=1, seed=0):
  """Episodes of one turn: at most 3 + 5 tokens, advantages of both signs."""
  rng = np.random.default_rng(seed)
  batch_episodes = []
  for i in range(count):
    episode = make_episodes.episode(
      [int(rng.integers(2, 6))], member=i, prompt=3
    )
    (turn,) = episode.turns
    turn = dataclasses.replace(
      turn,
      prompt_ids=tuple(rng.integers(0, 40, 3).tolist()),
      response_ids=tuple(rng.integers(0, 40, len(turn.response_ids)).tolist()),
    )
    batch_episodes.append(dataclasses.replace(episode, turns=(turn,)))
  table = episodes.tabulate(batch_episodes)
  packed = batch_lib.pack(
    batch_episodes,
    context='conversation',
    row_len=row_len,
    row_multiple=row_multiple,
    minibatches=minibatches,
  )
  return batch_lib.with_advantages(
    packed, rng.normal(size=table.token_turn_R.shape)
  )


def scored(batch, micro_rows):
  logp_BT = make_score(micro_rows)(params(), batch)
  return dataclasses.replace(batch, old_logp_BT=logp_BT, ref_logp_BT=logp_BT)


def run(batch, micro_rows):
  state = update.create(params(), OPTIMIZER)
  return make_update(micro_rows)(state, batch)


def assert_trees_close(a, b, **tolerance):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def test_first_ratio_is_one():
  """Score and update run the same forward pass."""
  batch = scored(make_batch(row_multiple=2), 2)
  _, metrics = run(batch, 2)
  np.testing.assert_allclose(metrics['ratio_min'], 1, atol=1e-6)
  np.testing.assert_allclose(metrics['ratio_max'], 1, atol=1e-6)
  assert metrics['clip_frac'] == 0
  assert abs(metrics['approx_kl']) < 1e-6 and abs(metrics['kl_ref']) < 1e-6
  assert metrics['skipped'] == metrics['nonfinite'] == 0


def test_second_update_has_moved():
  batch = scored(make_batch(row_multiple=2), 2)
  state, _ = run(batch, 2)
  state, metrics = make_update(2)(state, batch)
  assert metrics['ratio_max'] > 1.01 > 0.99 > metrics['ratio_min']
  assert metrics['kl_ref'] > 1e-5
  assert state.step == 2


def test_score_is_the_policy_on_sampled_tokens():
  batch = make_batch(row_multiple=2)
  logp_BT, _ = jax.jit(LOGPS)(
    params(), batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT
  )
  wanted = np.where(batch.loss_mask_BT, logp_BT, 0)
  actual = make_score(2)(params(), batch)
  np.testing.assert_allclose(actual, wanted, atol=1e-5)
  assert np.abs(wanted).max() > 1


def test_update_raises_what_was_better_and_lowers_what_was_worse():
  batch = scored(make_batch(row_multiple=2), 2)
  state, _ = run(batch, 2)
  change_BT = np.asarray(make_score(2)(state.params, batch)) - batch.old_logp_BT
  gain_BT = change_BT * batch.adv_BT
  assert gain_BT[batch.loss_mask_BT].mean() > 0.01


def assert_same_update(a, b):
  """Compares states and metrics.

  Adam's first update is the sign of the gradient, which hides its size; its
  moments, in opt_state, do not.
  """
  for name, value in a[1].items():
    np.testing.assert_allclose(
      b[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name
    )
  assert_trees_close(
    jax.device_get(a[0].opt_state), jax.device_get(b[0].opt_state), atol=1e-6
  )


@pytest.mark.parametrize('micro_rows', [1, 2])
def test_number_of_micro_batches_does_not_matter(micro_rows):
  """4 rows, one of them padding, as 1, 2 or 4 blocks."""
  batch = make_batch(row_multiple=4)
  assert batch.tokens_BT.shape[0] == 4
  whole = run_bigram(batch, 4)
  assert_same_update(whole, run_bigram(batch, micro_rows))

  def loss(params):
    logp_BT, entropy_BT = bigram_logps(params, batch.tokens_BT, None, None)
    return LOSS(logp_BT, batch, entropy_BT=entropy_BT, denominator=None)[0]

  value, grads = jax.value_and_grad(loss)(bigram_params())
  np.testing.assert_allclose(whole[1]['loss'], value, rtol=1e-5)
  norm = optax.tree.norm(grads)
  np.testing.assert_allclose(whole[1]['grad_norm'], norm, rtol=1e-5)


def test_what_stands_on_padding_does_not_matter():
  """Not even infinity, in rows without tokens or outside of responses."""
  batch = scored(make_batch(row_multiple=2), 2)
  assert not batch.loss_mask_BT[-1].any()
  mask = batch.loss_mask_BT
  spoilt = dataclasses.replace(
    batch,
    adv_BT=np.where(mask, batch.adv_BT, np.inf),
    old_logp_BT=np.where(mask, batch.old_logp_BT, -np.inf),
    ref_logp_BT=np.where(mask, batch.ref_logp_BT, -np.inf),
  )
  clean, _ = run(batch, 2)
  same, metrics = run(spoilt, 2)
  assert_trees_close(same.opt_state, clean.opt_state, atol=0)
  assert metrics['weight'] == mask.sum()
  assert all(np.isfinite(value) for value in metrics.values())


def test_packing_does_not_matter():
  """Rows of 8 hold one sequence, rows of 16 two or three and padding."""
  narrow = scored(make_batch(row_len=8, row_multiple=2), 2)
  wide = scored(make_batch(row_len=16, row_multiple=2), 2)
  assert wide.segment_ids_BT.max() > narrow.segment_ids_BT.max() == 1
  assert_same_update(run(narrow, 2), run(wide, 2))


def test_without_a_response_token_nothing_changes():
  """Skipped and counted; Adam does not count it."""
  batch = jax.tree.map(np.zeros_like, make_batch(row_multiple=2))
  before = update.create(params(), OPTIMIZER)
  state, metrics = run(batch, 2)
  assert metrics['skipped'] == 1 and metrics['nonfinite'] == 0
  assert metrics['loss'] == 0 and metrics['grad_norm'] == 0
  assert_trees_close(state.params, before.params, atol=0)
  assert_trees_close(state.opt_state, before.opt_state, atol=0)
  assert state.step == 1
  assert all(np.isfinite(value) for value in metrics.values())


def test_gradient_that_is_not_finite_is_skipped_and_training_goes_on():
  batch = scored(make_batch(row_multiple=2), 2)
  adv_BT = batch.adv_BT.copy()
  adv_BT[tuple(np.argwhere(batch.loss_mask_BT)[0])] = np.nan
  before = update.create(params(), OPTIMIZER)
  state, metrics = run(dataclasses.replace(batch, adv_BT=adv_BT), 2)
  assert metrics['skipped'] == metrics['nonfinite'] == 1
  assert_trees_close(state.params, before.params, atol=0)
  assert_trees_close(state.opt_state, before.opt_state, atol=0)
  state, metrics = make_update(2)(state, batch)
  assert metrics['skipped'] == 0 and metrics['grad_norm'] > 0


def test_a_step_that_is_not_finite_is_not_taken():
  """Gradients are, but the optimizer makes NaN of them."""
  spoilt = optimizer.make(1e-3, weight_decay=float('nan'))
  step = update.make_update(LOGPS, LOSS, spoilt, micro_rows=2)
  batch = scored(make_batch(row_multiple=2), 2)
  before = jax.device_get(params())
  state, metrics = step(update.create(params(), spoilt), batch)
  assert metrics['nonfinite'] == metrics['skipped'] == 1
  assert np.isfinite(metrics['grad_norm'])
  jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_reference_outlives_donated_states():
  """The state is consumed, what it was made from is not."""
  batch = scored(make_batch(row_multiple=2), 2)
  reference = params()
  before = np.asarray(make_score(2)(reference, batch))
  first = update.create(reference, OPTIMIZER)
  leaf = jax.tree.leaves(first.params)[0]
  state, _ = make_update(2)(first, batch)
  state, _ = make_update(2)(state, batch)
  assert leaf.is_deleted()
  np.testing.assert_array_equal(make_score(2)(reference, batch), before)


def test_equal_shapes_compile_once():
  state, _ = run(make_batch(row_multiple=2), 2)
  compiled = make_update(2)._cache_size()
  for seed in (1, 2):
    state, _ = make_update(2)(state, make_batch(row_multiple=2, seed=seed))
  assert make_update(2)._cache_size() == compiled


def test_rows_must_divide():
  with pytest.raises(ValueError, match='micro_rows=3 must divide the 4 rows'):
    run(make_batch(row_multiple=4), 3)


def test_scalars_weigh_minibatches_by_their_tokens():
  """Two of 3 and 1 tokens, an empty one and one that is not finite."""
  fields = [f.name for f in dataclasses.fields(losses.LossMetrics)]
  extra = ['loss', 'grad_norm', 'skipped', 'nonfinite']
  empty = dict.fromkeys([*fields, *extra], 0.0)
  reports = [
    empty | {'weight': 3.0, 'loss': 1.0, 'ratio_min': 0.9, 'ratio_max': 1.1,
             'grad_norm': 2.0, 'sampler_gap': 0.1},
    empty | {'weight': 1.0, 'loss': 5.0, 'ratio_min': 0.8, 'ratio_max': 1.0,
             'grad_norm': 4.0, 'clip_frac': 0.4},
    empty | {'skipped': 1.0, 'ratio_min': 1.0, 'ratio_max': 1.0},
  ]  # fmt: skip
  values = update.scalars(reports)
  assert values['loss/total'] == pytest.approx(2.0)
  assert values['loss/clip_frac'] == pytest.approx(0.1)
  assert values['loss/ratio_min'] == 0.8 and values['loss/ratio_max'] == 1.1
  assert values['loss/sampler_gap'] == 0.1 and values['loss/weight'] == 4
  assert values['loss/grad_norm'] == 3.0
  assert values['loss/first_ratio_max'] == 1.1
  assert values['loss/skipped_updates'] == 1
  assert values['loss/nonfinite_updates'] == 0
  values = update.scalars(reports[2:])
  assert values['loss/ratio_max'] == 1 and values['loss/total'] == 0


# The critic.


def bigram_values(params, tokens_BT, positions_BT, segment_ids_BT):
  del positions_BT, segment_ids_BT
  hidden_BTD = params['embedding_VD'][jnp.roll(tokens_BT, 1, 1)]
  return hidden_BTD @ params['w_value_DC']


def critic_params():
  rng = np.random.default_rng(1)
  return {
    'embedding_VD': rng.normal(size=(40, 8)).astype(np.float32),
    'w_value_DC': rng.normal(size=(8, 2)).astype(np.float32),
  }


def make_lesson(**sizes):
  """Two heads; the second learns half of what the first does."""
  batch = make_batch(**sizes)
  rng = np.random.default_rng(2)
  shape = (*batch.tokens_BT.shape, 2)
  mask = batch.loss_mask_BT[..., None] & (rng.random(shape) < [1.0, 0.5])
  return dataclasses.replace(
    batch,
    value_BTC=rng.normal(size=shape).astype(np.float32),
    target_BTC=5 + 3 * rng.normal(size=shape).astype(np.float32),
    target_mask_BTC=mask,
  )


@functools.cache
def make_critic_update(micro_rows):
  return update.make_critic_update(
    bigram_values,
    functools.partial(value_lib.value_loss, clip=2.0),
    OPTIMIZER,
    micro_rows=micro_rows,
  )


def run_critic(batch, micro_rows):
  state = update.create(critic_params(), OPTIMIZER)
  return make_critic_update(micro_rows)(state, batch)


@pytest.mark.parametrize('micro_rows', [1, 2])
def test_number_of_micro_batches_does_not_matter_to_the_critic(micro_rows):
  """As `test_number_of_micro_batches_does_not_matter`."""
  batch = make_lesson(row_multiple=4)
  whole, blocks = run_critic(batch, 4), run_critic(batch, micro_rows)
  assert whole[1]['weight'] == batch.target_mask_BTC.sum()
  assert whole[1]['grad_norm'] > 1
  assert_same_update(whole, blocks)

  def loss(params):
    value_BTC = bigram_values(params, batch.tokens_BT, None, None)
    chosen = {'clip': 2.0, 'denominator': None}  # A mean for each head.
    return value_lib.value_loss(value_BTC, batch, **chosen)[0]

  value, grads = jax.value_and_grad(loss)(critic_params())
  np.testing.assert_allclose(whole[1]['loss'], value, rtol=1e-5)
  norm = optax.tree.norm(grads)
  np.testing.assert_allclose(whole[1]['grad_norm'], norm, rtol=1e-5)


def test_critic_learns_where_the_policy_does_not():
  """Tokens without a role leave the loss mask and may have targets."""
  batch = make_lesson(row_multiple=2)
  without = dataclasses.replace(
    batch, loss_mask_BT=np.zeros_like(batch.loss_mask_BT)
  )
  assert_same_update(run_critic(batch, 2), run_critic(without, 2))


def test_critic_without_targets_or_with_one_that_is_not_finite_stays():
  batch = make_lesson(row_multiple=2)
  none = dataclasses.replace(
    batch, target_mask_BTC=np.zeros_like(batch.target_mask_BTC)
  )
  target_BTC = batch.target_BTC.copy()
  target_BTC[tuple(np.argwhere(batch.target_mask_BTC)[0])] = np.inf
  spoilt = dataclasses.replace(batch, target_BTC=target_BTC)
  before = update.create(critic_params(), OPTIMIZER)
  for changed, nonfinite in ((none, 0), (spoilt, 1)):
    state, metrics = run_critic(changed, 2)
    assert metrics['skipped'] == 1 and metrics['nonfinite'] == nonfinite
    assert_trees_close(state.params, before.params, atol=0)
    assert_trees_close(state.opt_state, before.opt_state, atol=0)
  state, metrics = make_critic_update(2)(state, batch)
  assert metrics['skipped'] == 0 and state.step == 2


def test_critic_scalars_are_of_the_whole_step():
  """Two minibatches, of whose means and variances each has its own."""
  batch = make_lesson(count=9, row_multiple=1, minibatches=2)
  first, second = batch_lib.split(batch, 2)
  second = dataclasses.replace(second, target_BTC=second.target_BTC + 40)
  params, reports, parts = critic_params(), [], []
  for part in (first, second):
    reports.append(run_critic(part, 1)[1])
    value_BTC = bigram_values(params, part.tokens_BT, None, None)
    parts.append((np.asarray(value_BTC), part.target_BTC, part.target_mask_BTC))
  value, target, mask = (
    np.concatenate([part[i] for part in parts]) for i in range(3)
  )
  found = update.critic_scalars(reports)
  assert found['critic/weight'] == mask.sum()
  for c in range(2):
    v, g = value[..., c][mask[..., c]], target[..., c][mask[..., c]]
    np.testing.assert_allclose(
      found[f'critic/explained_variance_{c}'],
      1 - np.var(g - v) / np.var(g),
      rtol=1e-4,
    )
  np.testing.assert_allclose(found['critic/value'], value[mask].mean(), 1e-4)
  np.testing.assert_allclose(found['critic/target'], target[mask].mean(), 1e-4)
  losses_ = [float(r['loss']) * float(r['weight']) for r in reports]
  total = sum(losses_) / mask.sum()
  np.testing.assert_allclose(found['critic/total'], total, 1e-5)
  np.testing.assert_allclose(found['critic/value_loss'], total, 1e-5)
  assert found['critic/skipped_updates'] == 0
  assert all(isinstance(value, float) for value in found.values())


def test_policy_and_critic_resume_bit_for_bit(tmp_path):
  """Both are in the checkpoint, and updates of the one keep the other."""
  batch = make_lesson(row_multiple=2)
  start = update.with_critic(
    update.create(bigram_params(), OPTIMIZER),
    update.create(critic_params(), OPTIMIZER),
  )
  update_policy = update.make_update(
    bigram_logps, LOSS, OPTIMIZER, micro_rows=2
  )

  def step(state):
    critic, _ = make_critic_update(2)(state.critic, batch)
    before = jax.device_get(critic)
    state = dataclasses.replace(state, critic=critic)
    state, _ = update_policy(state, batch)
    assert_trees_close(jax.device_get(state.critic), before, atol=0)
    return state

  shapes = jax.eval_shape(lambda: start)
  state = step(start)
  assert state.step == state.critic.step == 1
  kept = checkpoint.Checkpoints(tmp_path, keep=2)
  kept.save(1, state)
  policy = kept.restore_params(1, jax.device_get(state.params))
  assert_trees_close(policy, state.params, atol=0)
  resumed = kept.restore(shapes)
  kept.close()
  assert isinstance(resumed, update.ActorCriticState)
  assert_trees_close(step(resumed), step(state), atol=0)


def test_a_run_without_critic_goes_on_from_a_checkpoint_of_old(tmp_path):
  """Its tree has three branches and nothing that stands for a critic."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Old:
    params: dict
    opt_state: tuple
    step: jax.Array

  state, _ = run(make_batch(row_multiple=2), 2)
  kept = checkpoint.Checkpoints(tmp_path, keep=2)
  kept.save(1, Old(state.params, state.opt_state, state.step))
  resumed = kept.restore(jax.eval_shape(lambda: state))
  kept.close()
  assert type(resumed) is update.TrainState
  assert_trees_close(resumed, state, atol=0)
  saved = checkpoint.Checkpoints(tmp_path / 'new', keep=2)
  saved.save(1, state)
  saved.close()
  old, new = (
    json.loads(next(folder.glob('1/**/_METADATA')).read_text())
    for folder in (tmp_path, tmp_path / 'new')
  )
  assert new['tree_metadata'] == old['tree_metadata']


def test_eight_devices_equal_one():
  """The same update on a simulated mesh."""
  root = pathlib.Path(__file__).resolve().parent.parent
  env = os.environ | {
    'PYTHONPATH': str(root),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '8',
  }
  ran = subprocess.run(
    [sys.executable, '-c', _ON_EIGHT],
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert ran.returncode == 0, ran.stderr


_ON_EIGHT = """
import functools
from planpo_jax import sharding
from tests import test_update as t

batch = t.make_batch(count=12, row_len=8, row_multiple=4)
assert batch.tokens_BT.shape[0] >= 8, batch.tokens_BT.shape
mesh = sharding.make_mesh(2, 2, 2)
many = t.run_bigram(
  sharding.put_batch(mesh, batch),
  4,
  functools.partial(sharding.shard_params, mesh),
  micro_sharding=sharding.micro_sharding(mesh),
)
assert len(many[0].params['head_VD'].sharding.device_set) == 8
t.assert_same_update(t.run_bigram(batch, 4), many)
"""
