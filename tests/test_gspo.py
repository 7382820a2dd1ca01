"""GSPO against its equations, and what it shares with the clipped objective."""

import dataclasses

import jax
import numpy as np
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from tests import make_episodes

PLAIN = {'kl_coef': 0.0, 'entropy_coef': 0.0}


def test_defaults_are_those_of_the_clipped_objective_but_for_four():
  defaults = losses.hyperparameters('gspo')
  plain = losses.hyperparameters('ppo_clip')
  assert list(defaults) == list(plain)
  assert {k: v for k, v in defaults.items() if v != plain[k]} == {
    'ratio': 'turn',
    'clip_low': 3e-4,
    'clip_high': 4e-4,
    'aggregation': 'turn_mean',
  }


def test_typos_and_bad_values_are_refused():
  with pytest.raises(TypeError, match='gspo .*clip_hi; .*clip_high'):
    losses.get('gspo', clip_hi=4e-4)
  with pytest.raises(ValueError, match='clip_low=-0.0003 .*above 0'):
    losses.get('gspo', clip_low=-3e-4)


def turns_batch():
  """Three rows of turns of 1 to 5 tokens; a turn has one advantage."""
  rng = np.random.default_rng(0)
  batch = batch_lib.pack(
    [make_episodes.episode(rng.integers(1, 6, 3)) for _ in range(3)],
    context='conversation',
    row_len=24,
    row_multiple=3,
  )
  adv_BU = rng.normal(size=(3, 25)).astype(np.float32)
  return dataclasses.replace(
    batch,
    adv_BT=np.take_along_axis(adv_BU, batch.turn_BT, axis=1),
    old_logp_BT=rng.normal(-2, 0.1, (3, 24)).astype(np.float32),
  )


def by_equations(logp_BT, batch):
  """-1/G sum_i min(s_i A_i, clip(s_i) A_i), turn by turn: equations 5 and 7.

  d s_i / d logp of a token = s_i / L_i, so the gradient is -s_i A_i / L_i / G
  where the free term is the lower one, else 0 (equation 10).
  """
  objectives, ratios, grad_BT = [], [], np.zeros((3, 24))
  for b in range(3):
    for turn in range(1, batch.turn_BT[b].max() + 1):
      places = np.flatnonzero(batch.turn_BT[b] == turn)
      ratio = np.exp(np.mean((logp_BT - batch.old_logp_BT)[b, places]))
      adv = batch.adv_BT[b, places[0]]
      bounded = np.clip(ratio, 1 - 3e-4, 1 + 4e-4)
      objectives.append(min(ratio * adv, bounded * adv))
      ratios.append(ratio)
      if ratio * adv <= bounded * adv:
        grad_BT[b, places] = -ratio * adv / len(places)
  return -np.mean(objectives), grad_BT / len(ratios), ratios


def test_value_and_gradient_are_those_of_the_equations():
  """With one advantage a turn, the token form (equation 13) is equation 5."""
  batch = turns_batch()
  noise_BT = np.random.default_rng(1).normal(0, 1e-3, (3, 24))
  logp_BT = np.float32(batch.old_logp_BT + noise_BT)
  loss = losses.get('gspo', **PLAIN)

  def value(logp_BT):
    return loss(logp_BT, batch, entropy_BT=logp_BT, denominator=None)

  (got, metrics), grad = jax.jit(jax.value_and_grad(value, has_aux=True))(
    logp_BT
  )
  wanted, wanted_grad, ratios = by_equations(logp_BT, batch)
  assert metrics.weight == pytest.approx(9) == len(ratios)
  np.testing.assert_allclose(got, wanted, rtol=2e-6)
  np.testing.assert_allclose(grad, wanted_grad, atol=1e-6)
  # Some turns are clipped and some are not, and on both sides.
  assert 0 < metrics.clip_frac < 1
  assert min(ratios) < 1 - 3e-4 and max(ratios) > 1 + 4e-4
  np.testing.assert_allclose(
    [metrics.ratio_min, metrics.ratio_max],
    [min(ratios), max(ratios)],
    rtol=1e-6,
  )


def test_first_ratio_is_one():
  """No turn is clipped however tight the bounds are."""
  batch = turns_batch()
  _, metrics = jax.jit(losses.get('gspo'), static_argnames='denominator')(
    batch.old_logp_BT, batch, entropy_BT=batch.adv_BT, denominator=None
  )
  assert metrics.ratio_min == metrics.ratio_max == 1
  assert metrics.clip_frac == 0
