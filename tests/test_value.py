"""The loss of the critic and what it reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from planpo_jax.losses import value as value_lib


def make_batch(target, old, mask=None):
  """One row; [T] for one head, [T, C] for several."""
  target = np.atleast_2d(np.asarray(target, np.float32).T).T
  old = np.asarray(old, np.float32).reshape(target.shape)
  if mask is None:
    mask = np.ones(target.shape, bool)
  blank = batch_lib.pack([], context='window', row_len=len(target))
  return dataclasses.replace(
    blank,
    value_BTC=old[None],
    target_BTC=target[None],
    target_mask_BTC=np.asarray(mask, bool).reshape(target.shape)[None],
  )


def run(value, batch, denominator=None, **chosen):
  value_BTC = np.asarray(value, np.float32).reshape(batch.target_BTC.shape)
  loss = functools.partial(
    value_lib.value_loss, batch=batch, denominator=denominator, **chosen
  )
  (scalar, metrics), grad = jax.value_and_grad(loss, has_aux=True)(value_BTC)
  return scalar, metrics, grad


# Old value 1. Values 2 and 0 are cut to 1.5 and .5, .8 is not.
#   V 2, G 3:  (2 - 3)^2 = 1, (1.5 - 3)^2 = 2.25: cut, no gradient.
#   V 2, G 0:  4, 2.25: 4, gradient 2 (2 - 0) = 4.
#   V 0, G -1: 1, (.5 + 1)^2 = 2.25: cut.
#   V .8, G 0: .64, gradient 1.6.
VALUE = [2, 2, 0, 0.8]
TARGET = [3, 0, -1, 0]
OLD = [1, 1, 1, 1]
LOSS = [2.25, 4, 2.25, 0.64]
GRAD = [0, 4, 0, 1.6]


@pytest.mark.parametrize('scale', [1.0, 0.5])
def test_clipped_loss(scale):
  scalar, metrics, grad = run(VALUE, make_batch(TARGET, OLD), scale=scale)
  np.testing.assert_allclose(scalar, scale * np.mean(LOSS), rtol=1e-6)
  np.testing.assert_allclose(
    grad[0, :, 0], scale * np.array(GRAD) / 4, rtol=1e-6
  )
  assert metrics.value_loss == scalar and metrics.weight == 4
  means = value_lib.mean(metrics)
  assert means.value_clip_frac == 0.5
  np.testing.assert_allclose(means.value, 1.2)
  np.testing.assert_allclose(means.target, 0.5)


def test_without_clipping():
  """1 + 4 + 1 + .64, gradients 2 (V - G)."""
  scalar, metrics, grad = run(VALUE, make_batch(TARGET, OLD), clip=None)
  np.testing.assert_allclose(scalar, 6.64 / 4, rtol=1e-6)
  np.testing.assert_allclose(grad[0, :, 0], [-0.5, 1, 0.5, 0.4], rtol=1e-6)
  assert metrics.value_clip_frac == 0


def test_only_targets_count_whatever_stands_beside_them():
  """Infinity and NaN included."""
  wild = np.array([np.inf, np.nan, -np.inf], np.float32)
  mask = [1, 0, 1, 0, 0, 1, 1]

  def fill(values):
    row = np.zeros(7, np.float32)
    row[np.array(mask) == 1] = values
    row[np.array(mask) == 0] = wild
    return row

  batch = make_batch(fill(TARGET), fill(OLD), mask)
  scalar, metrics, grad = run(fill(VALUE), batch)
  np.testing.assert_allclose(scalar, np.mean(LOSS), rtol=1e-6)
  np.testing.assert_allclose(grad[0, :, 0][np.array(mask) == 1] * 4, GRAD)
  assert not grad[0, :, 0][np.array(mask) == 0].any()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
  plain = run(VALUE, make_batch(TARGET, OLD))[1]
  for one, two in zip(*map(jax.tree.leaves, (metrics, plain)), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_without_targets_nothing_is_learnt():
  batch = make_batch(TARGET, OLD, [0] * 4)
  scalar, metrics, grad = run(VALUE, batch)
  assert scalar == 0 and not grad.any()
  for one, two in zip(
    *map(jax.tree.leaves, (metrics, value_lib.no_metrics(1))), strict=True
  ):
    np.testing.assert_array_equal(one, two)


def test_heads_have_a_mean_each():
  """(1 + 4) / 2 and 9 / 1, not 14 / 3; gradients 2 (V - G) over 2 and 1."""
  mask = [[1, 0], [1, 1]]
  batch = make_batch(np.zeros((2, 2)), np.zeros((2, 2)), mask)
  value = [[1, 5], [2, 3]]
  scalar, metrics, grad = run(value, batch, clip=None)
  np.testing.assert_allclose(scalar, 11.5)
  np.testing.assert_allclose(grad[0], [[1, 0], [2, 6]])
  assert metrics.weight == 3 and value_lib.mean(metrics).value == 2


def test_explained_variance_of_each_head():
  """Targets 0, 2 and 4, 8, 12 with squared deviations 2 and 32.

  Errors 1, 1: no deviation, all explained. Errors 4, 0, 8: mean 4, 32, none.
  """
  batch = make_batch(
    [[0, 4], [2, 8], [9, 12]], np.zeros((3, 2)), [[1, 1], [1, 1], [0, 1]]
  )
  _, metrics, _ = run([[-1, 0], [1, 8], [5, 4]], batch)
  np.testing.assert_allclose(metrics.count_C, [2, 3])
  np.testing.assert_allclose(metrics.target_mean_C, [1, 8])
  np.testing.assert_allclose(metrics.target_spread_C, [2, 32])
  np.testing.assert_allclose(metrics.error_mean_C, [1, 4])
  np.testing.assert_allclose(metrics.error_spread_C, [0, 32])
  np.testing.assert_allclose(value_lib.explained_variance(metrics), [1, 0])


def random_batch(rows=8, length=5, heads=2):
  """Targets far from 0, where sums of squares would lose all digits."""
  rng = np.random.default_rng(0)
  shape = (rows, length, heads)
  mask = rng.random(shape) < 0.6
  mask[3], mask[5, :, 0] = False, False  # A row, and a row of one head.
  blank = batch_lib.pack(
    [], context='window', row_len=length, row_multiple=rows
  )
  value = 1000 + rng.normal(size=shape)
  batch = dataclasses.replace(
    blank,
    value_BTC=(value + 0.4 * rng.normal(size=shape)).astype(np.float32),
    target_BTC=(value + 0.3 * rng.normal(size=shape)).astype(np.float32),
    target_mask_BTC=mask,
  )
  return value.astype(np.float32), batch


@pytest.mark.parametrize('parts', [2, 4, 8])
def test_parts_give_the_whole(parts):
  """Loss and metrics of blocks of rows, as `update` adds them."""
  value, batch = random_batch()
  whole, _, grad = run(value, batch)
  count_C = batch.target_mask_BTC.sum((0, 1)).astype(np.float32)
  share_C = count_C / count_C.sum()
  _, wanted, _ = run(value, batch, share_C)
  total, metrics, grads = 0.0, value_lib.no_metrics(2), []
  for block, values in zip(
    batch_lib.split(batch, parts), np.split(value, parts), strict=True
  ):
    scalar, own, block_grad = run(values, block, share_C)
    total += scalar
    metrics = value_lib.merge(metrics, own)
    grads.append(block_grad)
  np.testing.assert_allclose(total / metrics.weight, whole, rtol=1e-5)
  np.testing.assert_allclose(
    np.concatenate(grads) / metrics.weight, grad, atol=1e-6
  )
  for name, value in vars(metrics).items():
    np.testing.assert_allclose(
      value, getattr(wanted, name), rtol=1e-4, err_msg=name
    )
  np.testing.assert_allclose(value_lib.mean(metrics).value_loss, whole, 1e-5)


def test_explained_variance_far_from_zero():
  value, batch = random_batch()
  value_loss = jax.jit(
    functools.partial(value_lib.value_loss, denominator=None)
  )
  _, metrics = value_loss(value, batch)
  wanted = []
  for c in range(2):
    own = batch.target_mask_BTC[..., c]
    target = batch.target_BTC[..., c][own].astype(np.float64)
    wanted.append(1 - np.var(target - value[..., c][own]) / np.var(target))
  assert 0.5 < min(wanted) < 0.99
  np.testing.assert_allclose(
    value_lib.explained_variance(metrics), wanted, rtol=1e-3
  )


@pytest.mark.parametrize('target', [0.0, 0.1, 10.0])
def test_equal_targets_leave_nothing_to_explain(target):
  """Up to rounding: the mean of seven times .1 is not .1 in float32."""
  batch = make_batch([target] * 7, [0] * 7)
  metrics = run(np.arange(7) / 10, batch)[1]
  assert value_lib.explained_variance(metrics) == 0
  assert value_lib.explained_variance(value_lib.no_metrics(1)) == 0


@pytest.mark.parametrize(
  'chosen, match',
  [
    ({'clip': 0.0}, 'clip=0.0 must be above 0'),
    ({'clip': float('nan')}, 'clip=nan'),
    ({'scale': -1.0}, 'scale=-1.0 must be above 0'),
  ],
)
def test_bad_values_are_refused(chosen, match):
  with pytest.raises(ValueError, match=match):
    run(VALUE, make_batch(TARGET, OLD), **chosen)


def test_it_is_no_loss_of_a_policy():
  assert 'value' not in losses.names()
  assert jnp.shape(value_lib.no_metrics(3).count_C) == (3,)
