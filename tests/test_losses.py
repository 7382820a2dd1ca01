"""The clipped objective and the KL estimators, worked by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from planpo_jax.losses import kl, ppo_clip

PLAIN = {'kl_coef': 0.0, 'entropy_coef': 0.0}


def make_batch(adv, mask=None, turn_tokens=None, **fields):
  """One row of tokens whose logps are 0 unless given."""
  adv = np.asarray(adv, np.float32)[None]
  mask = np.ones_like(adv, bool) if mask is None else np.array([mask], bool)
  zeros = np.zeros_like(adv)
  batch = batch_lib.Batch(
    tokens_BT=zeros.astype(np.int32),
    positions_BT=zeros.astype(np.int32),
    segment_ids_BT=np.ones_like(adv, np.int32),
    loss_mask_BT=mask,
    turn_tokens_BT=mask * np.asarray(turn_tokens or [1], np.int32),
    turn_BT=mask.astype(np.int32),
    flat_BT=zeros.astype(np.int32),
    adv_BT=adv,
    sampler_logp_BT=zeros,
    old_logp_BT=zeros,
    ref_logp_BT=zeros,
  )
  fields = {k: np.asarray([v], np.float32) for k, v in fields.items()}
  return dataclasses.replace(batch, **fields)


@functools.cache
def jitted(chosen, denominator):
  loss = losses.get('ppo_clip', **dict(chosen))
  return jax.jit(functools.partial(loss, denominator=denominator))


def run(ratio, batch, denominator=None, **chosen):
  logp_BT = np.log(np.array([ratio], np.float32))
  loss = jitted(tuple(sorted((PLAIN | chosen).items())), denominator)
  entropy_BT = np.full_like(logp_BT, 2.0)
  value, metrics = loss(logp_BT, batch, entropy_BT=entropy_BT)
  return float(value), jax.device_get(metrics)


def value_and_grad(batch, argnums=0, **chosen):
  """Of the loss in (logp_BT, entropy_BT)."""

  def value(logp_BT, entropy_BT):
    return ppo_clip.loss(
      logp_BT, batch, entropy_BT=entropy_BT, denominator=None, **chosen
    )[0]

  return jax.jit(jax.value_and_grad(value, argnums))


@pytest.mark.parametrize(
  'ratio, adv, wanted, clipped',
  [
    (1.0, 2.0, -2.0, 0),
    (1.1, 2.0, -2.2, 0),
    (1.5, 2.0, -2.4, 1),  # Cut at 1.2.
    (0.5, 2.0, -1.0, 0),  # The lower of the two is the free one.
    (0.5, -2.0, 1.6, 1),  # Cut at 0.8.
    (1.5, -2.0, 3.0, 0),
    (50.0, -1.0, 50.0, 0),  # Not bounded from this side (ALG-19).
  ],
)
def test_clipping(ratio, adv, wanted, clipped):
  value, metrics = run([ratio], make_batch([adv]))
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  assert metrics.clip_frac == clipped and metrics.dual_clip_frac == 0
  np.testing.assert_allclose(metrics.ratio_max, ratio, rtol=1e-5)
  np.testing.assert_allclose(metrics.ratio_min, ratio, rtol=1e-5)


def test_clip_bounds_are_apart():
  value, _ = run([1.5], make_batch([1.0]), clip_high=0.28)
  np.testing.assert_allclose(value, -1.28, rtol=1e-5)
  value, _ = run([0.5], make_batch([-1.0]), clip_low=0.1)
  np.testing.assert_allclose(value, 0.9, rtol=1e-5)


def test_dual_clip_bounds_a_huge_ratio():
  value, metrics = run([50.0], make_batch([-1.0]), dual_clip=3.0)
  np.testing.assert_allclose(value, 3.0, rtol=1e-5)
  assert metrics.dual_clip_frac == 1
  value, metrics = run([2.0], make_batch([-1.0]), dual_clip=3.0)
  np.testing.assert_allclose(value, 2.0, rtol=1e-5)
  assert metrics.dual_clip_frac == 0


def test_gradient_is_zero_where_clipped_and_minus_advantage_at_ratio_one():
  logp_BT = np.log(np.array([[1.5, 1.0, 1.0, 0.5]], np.float32))
  batch = make_batch([2.0, 3.0, -1.0, -4.0])
  _, grad = value_and_grad(batch, **PLAIN)(logp_BT, np.zeros_like(logp_BT))
  np.testing.assert_allclose(grad, [[0, -3 / 4, 1 / 4, 0]], atol=1e-6)


def test_token_mean_leaves_masked_tokens_out_of_both_parts():
  """A second, masked half changes nothing (ALG-15)."""
  batch = make_batch([-1, -1, 9, 9], mask=[1, 1, 0, 0])
  assert run([1, 1, 7, 1e-9], batch)[0] == pytest.approx(1.0)


def test_turn_mean_weighs_turns_alike():
  """Turns of 1 and 3 tokens with losses 1 and 5: turn mean 3, token mean 4."""
  batch = make_batch([-1, -5, -5, -5], turn_tokens=[1, 3, 3, 3])
  assert run([1] * 4, batch)[0] == pytest.approx(4.0)
  value, metrics = run([1] * 4, batch, aggregation='turn_mean')
  assert value == pytest.approx(3.0)
  assert metrics.weight == pytest.approx(2.0)


@pytest.mark.parametrize('aggregation', ['token_mean', 'turn_mean'])
def test_parts_add_up_to_the_whole(aggregation):
  """Parts with denominator 1, merged and divided once (ALG-16)."""
  rng = np.random.default_rng(0)
  ratio = np.exp(rng.normal(0, 0.3, 12))
  mask = rng.random(12) < 0.7
  lengths = [2, 2, 3, 3, 3, 1, 4, 4, 4, 4, 2, 2]
  ref = rng.normal(0, 0.3, 12)
  sampler = rng.normal(0, 0.3, 12)
  chosen = {
    'aggregation': aggregation,
    'kl_coef': 0.1,
    'entropy_coef': 0.01,
    'sampler_cap': 1.05,
  }

  def part(span, **more):
    batch = make_batch(
      np.linspace(-2, 2, 12)[span],
      mask[span],
      lengths[span],
      ref_logp_BT=ref[span],
      sampler_logp_BT=sampler[span],
    )
    return run(ratio[span], batch, **chosen, **more)

  whole, whole_metrics = part(slice(0, 12))
  # A sum of zeros would prove nothing.
  assert whole_metrics.sampler_capped > 0 and whole_metrics.clip_frac > 0
  value, metrics = 0.0, losses.no_metrics()
  for span in (slice(0, 2), slice(2, 9), slice(9, 12)):
    part_value, part_metrics = part(span, denominator=1.0)
    value += part_value
    metrics = losses.merge(metrics, part_metrics)
  assert value / metrics.weight == pytest.approx(whole, rel=1e-5)
  metrics = losses.mean(metrics)
  for field in dataclasses.fields(metrics):
    np.testing.assert_allclose(
      getattr(metrics, field.name),
      getattr(whole_metrics, field.name),
      rtol=1e-5,
      err_msg=field.name,
    )


def test_token_mean_of_uneven_parts():
  """2 tokens of loss 1 and 8 of loss 0 give 0.2, not 0.5 (ALG-16)."""
  parts = [run([1] * n, make_batch([a] * n), denominator=1.0)
           for n, a in ((2, -1.0), (8, 0.0))]  # fmt: skip
  weight = sum(float(metrics.weight) for _, metrics in parts)
  assert sum(value for value, _ in parts) / weight == pytest.approx(0.2)


def test_all_masked_gives_zero_loss_and_gradient():
  """Whatever stands on padding, infinities included (ALG-13)."""
  batch = make_batch([1.0, 1.0], mask=[0, 0], old_logp_BT=[-np.inf, np.inf])

  logp_BT = np.array([[-1.0, np.inf]], np.float32)
  entropy_BT = np.array([[1.0, np.inf]], np.float32)
  loss, grads = value_and_grad(batch, (0, 1))(logp_BT, entropy_BT)
  assert loss == 0
  for grad in grads:
    np.testing.assert_array_equal(grad, 0)
  _, metrics = jitted((), None)(logp_BT, batch, entropy_BT=entropy_BT)
  assert metrics.weight == 0
  metrics = losses.mean(metrics)
  assert metrics.ratio_min == metrics.ratio_max == 1
  assert all(np.isfinite(jax.tree.leaves(metrics)))


def test_kl_and_entropy_terms():
  """ratio 1 and A 0 leave kl_coef k3 - entropy_coef H = .1 x .306853 - .02."""
  batch = make_batch([0.0], ref_logp_BT=[np.log(2.0)])
  value, metrics = run([1.0], batch, kl_coef=0.1, entropy_coef=0.01)
  assert value == pytest.approx(0.1 * 0.306853 - 0.02, rel=1e-5)
  assert metrics.kl_ref == pytest.approx(0.306853, rel=1e-5)
  assert metrics.entropy == pytest.approx(2.0)
  assert metrics.approx_kl == 0


def test_approx_kl_and_sampler_gap():
  """ratio 2: k3 = 2 - 1 - ln 2; gap is the largest on response tokens."""
  batch = make_batch(
    [0.0, 0.0, 0.0],
    mask=[1, 1, 0],
    old_logp_BT=[0.0, 0.0, 0.0],
    sampler_logp_BT=[0.25, -0.5, 3.0],
  )
  _, metrics = run([2.0, 2.0, 1.0], batch)
  assert metrics.approx_kl == pytest.approx(1 - np.log(2), rel=1e-5)
  assert metrics.sampler_gap == pytest.approx(0.5)


# Drift exp(old_logp - sampler_logp) with old_logp 0, so sampler_logp = -ln of
# it; capped at 2 the weights are .5, 1, 2, 2.
DRIFT = np.array([0.5, 1.0, 3.0, 3.0])
DRIFT_ADV = [2.0, -1.0, 1.0, -2.0]
DRIFT_RATIO = [1.5, 1.0, 1.1, 0.5]


def test_sampler_cap_weighs_the_policy_loss():
  """l = 1.2 x 2, -1, 1.1 and -2 x .8, of which the ends are clipped.

  With the weights: -(.5 x 2.4) + 1 - 2 x 1.1 + 2 x 1.6 = .8, over 4 tokens .2.
  Without: -2.4 + 1 - 1.1 + 1.6 = -.9, over 4 tokens -.225.
  """
  batch = make_batch(DRIFT_ADV, sampler_logp_BT=-np.log(DRIFT))
  value, metrics = run(DRIFT_RATIO, batch, sampler_cap=2.0)
  assert value == pytest.approx(0.2, rel=1e-5)
  assert metrics.policy_loss == pytest.approx(0.2, rel=1e-5)
  assert metrics.sampler_capped == 0.5
  # What is clipped follows from the ratio alone.
  assert metrics.clip_frac == 0.5
  value, metrics = run(DRIFT_RATIO, batch, sampler_cap=None)
  assert value == pytest.approx(-0.225, rel=1e-5)
  assert metrics.sampler_capped == 0 and metrics.clip_frac == 0.5


def test_sampler_cap_bounds_from_above_only():
  """1, the least cap, leaves .5 as it is: -(.5 x 2.4) + 1 - 1.1 + 1.6 = .3."""
  batch = make_batch(DRIFT_ADV, sampler_logp_BT=-np.log(DRIFT))
  value, metrics = run(DRIFT_RATIO, batch, sampler_cap=1.0)
  assert value == pytest.approx(0.3 / 4, rel=1e-5)
  # A weight at the cap is not above it.
  assert metrics.sampler_capped == 0.5
  # Nothing reaches 4: -1.2 + 1 - 3.3 + 4.8.
  value, metrics = run(DRIFT_RATIO, batch, sampler_cap=4.0)
  assert value == pytest.approx(1.3 / 4, rel=1e-5)
  assert metrics.sampler_capped == 0


def test_sampler_cap_weighs_what_the_dual_clip_left():
  """Ratio 50 at A = -1 is bounded to 3, which then weighs 2."""
  batch = make_batch([-1.0], sampler_logp_BT=[-np.log(5.0)])
  value, _ = run([50.0], batch, dual_clip=3.0, sampler_cap=2.0)
  assert value == pytest.approx(6.0, rel=1e-5)


def test_without_a_cap_sampler_logp_changes_nothing():
  tame = make_batch(DRIFT_ADV)
  drifted = make_batch(DRIFT_ADV, sampler_logp_BT=[-9.0, 5.0, 0.1, -2.0])
  logp_BT = np.log(np.array([DRIFT_RATIO], np.float32))
  entropy_BT = np.ones_like(logp_BT)
  value, grad = value_and_grad(tame)(logp_BT, entropy_BT)
  other_value, other_grad = value_and_grad(drifted)(logp_BT, entropy_BT)
  assert value == other_value
  np.testing.assert_array_equal(grad, other_grad)


@pytest.mark.parametrize('cap', [None, 2.0])
def test_sampler_kl(cap):
  """k3 of d = ln drift: .5 - 1 + ln 2, 0, and twice 3 - 1 - ln 3; no cap."""
  batch = make_batch(DRIFT_ADV, sampler_logp_BT=-np.log(DRIFT))
  _, metrics = run(DRIFT_RATIO, batch, sampler_cap=cap)
  wanted = (0.193147 + 0 + 2 * 0.901388) / 4
  assert metrics.sampler_kl == pytest.approx(wanted, rel=1e-5)
  assert metrics.sampler_gap == pytest.approx(np.log(3), rel=1e-5)


def test_sampler_weight_is_a_constant_of_the_gradient():
  """d loss / d logp = -w A ratio / 4 where not clipped, else 0.

  -(1 x -1 x 1) and -(2 x 1 x 1.1) over 4. A weight that took part in the
  gradient would double them.
  """
  batch = make_batch(DRIFT_ADV, sampler_logp_BT=-np.log(DRIFT))
  logp_BT = np.log(np.array([DRIFT_RATIO], np.float32))
  gradient = value_and_grad(batch, **PLAIN, sampler_cap=2.0)
  _, grad = gradient(logp_BT, np.zeros_like(logp_BT))
  np.testing.assert_allclose(grad, [[0, 1 / 4, -2.2 / 4, 0]], atol=1e-6)


def test_sampler_cap_leaves_kl_and_entropy_as_they_are():
  """As `test_kl_and_entropy_terms`, whatever the weight is."""
  batch = make_batch(
    [0.0, 0.0],
    ref_logp_BT=[np.log(2.0)] * 2,
    sampler_logp_BT=[-np.log(3.0), np.log(4.0)],
  )
  chosen = {'kl_coef': 0.1, 'entropy_coef': 0.01, 'sampler_cap': 2.0}
  value, metrics = run([1.0, 1.0], batch, **chosen)
  assert value == pytest.approx(0.1 * 0.306853 - 0.02, rel=1e-5)
  assert metrics.kl_ref == pytest.approx(0.306853, rel=1e-5)
  assert metrics.entropy == pytest.approx(2.0)
  # d k3 / d logp = 1 - 2 = -1 a token, d(-entropy) = -1, over 2 tokens.
  gradient = value_and_grad(batch, (0, 1), **chosen)
  zeros_BT = np.zeros((1, 2), np.float32)
  _, (grad, entropy_grad) = gradient(zeros_BT, zeros_BT)
  np.testing.assert_allclose(grad, [[-0.05, -0.05]], rtol=1e-5)
  np.testing.assert_allclose(entropy_grad, [[-0.005, -0.005]], rtol=1e-5)


@pytest.mark.parametrize('aggregation', ['token_mean', 'turn_mean'])
def test_sampler_weight_of_padding_changes_nothing(aggregation):
  """Infinities and NaN beside the tokens of a row (ALG-13)."""
  mask = [0, 1, 0, 1, 1, 0]
  wild = np.array([np.inf, np.nan, -np.inf], np.float32)

  def measure(padding):
    def fill(values):
      row = np.zeros(6, np.float32)
      row[np.array(mask) == 0] = padding
      row[np.array(mask) == 1] = values
      return row

    batch = make_batch(
      fill([2.0, 1.0, -2.0]),
      mask,
      [1, 2, 1, 2, 1, 1],
      sampler_logp_BT=fill([0.7, -1.1, -0.2]),
      old_logp_BT=fill([0.0, 0.0, 0.1]),
      ref_logp_BT=fill([0.2, 0.0, 0.0]),
    )
    batch = jax.tree.map(jnp.asarray, batch)  # numpy warns of inf - inf.
    chosen = {'sampler_cap': 2.0, 'aggregation': aggregation}
    logp_BT, entropy_BT = fill([0.1, 0.0, -0.1])[None], fill([1, 2, 3])[None]
    value, grads = value_and_grad(batch, (0, 1), **chosen)(logp_BT, entropy_BT)
    _, metrics = jitted(tuple(sorted(chosen.items())), None)(
      logp_BT, batch, entropy_BT=entropy_BT
    )
    return jax.device_get((value, grads, metrics))

  tame = measure(np.zeros(3, np.float32))
  assert tame[2].sampler_capped > 0 and tame[0] != 0
  for padding in (wild, wild[::-1], np.float32([1e30, -1e30, 99])):
    jax.tree.map(np.testing.assert_array_equal, measure(padding), tame)


@pytest.mark.parametrize('cap', [0.5, 0.0, -1.0])
def test_sampler_cap_below_one_is_refused(cap):
  with pytest.raises(
    ValueError, match=rf'sampler_cap={cap} .*at least 1, or None.*try 2\.'
  ):
    losses.get('ppo_clip', sampler_cap=cap)
  for works in (1.0, 2.0, None):
    losses.get('ppo_clip', sampler_cap=works)


def test_extreme_ratio_stays_finite():
  """exp would overflow in float32 beyond 88."""
  batch = make_batch([0.0, -1.0])

  logp_BT = np.array([[200.0, 200.0]], np.float32)
  loss, grad = value_and_grad(batch)(logp_BT, np.zeros_like(logp_BT))
  assert np.isfinite(loss) and np.isfinite(grad).all()


@pytest.mark.parametrize(
  'kind, wanted', [('k1', -0.693147), ('k2', 0.240227), ('k3', 0.306853)]
)
def test_kl_estimators(kind, wanted):
  """Policy ln .1, reference ln .2 (ALG-22)."""
  value = kl.estimate(jnp.log(0.1), jnp.log(0.2), kind)
  np.testing.assert_allclose(value, wanted, atol=1e-6)


def test_k3_is_never_negative_nor_above_ten():
  d = jnp.concatenate([jnp.linspace(-100, 100, 999), jnp.logspace(-9, -1, 99)])
  for sign in (-1, 1):
    value = kl.estimate(jnp.zeros_like(d), sign * d, 'k3')
    assert (value >= 0).all() and (value <= 10).all()


def test_k3_gradient_pulls_to_the_reference():
  """d k3 / d logp = 1 - exp(ref - logp)."""
  grad = jax.grad(lambda logp: kl.estimate(logp, jnp.log(0.2), 'k3'))
  np.testing.assert_allclose(grad(jnp.log(0.1)), 1 - 2.0, rtol=1e-5)


@pytest.mark.parametrize(
  'chosen, match',
  [
    ({'aggregation': 'mean'}, 'token_mean or turn_mean'),
    ({'kl_kind': 'k4'}, 'k1, k2 or k3'),
    ({'dual_clip': 1.0}, 'above 1'),
  ],
)
def test_bad_values_are_refused(chosen, match):
  with pytest.raises(ValueError, match=match):
    losses.get('ppo_clip', **chosen)


def test_registry_names_what_it_knows():
  assert losses.names() == ['ppo_clip']
  defaults = losses.hyperparameters('ppo_clip')
  assert defaults['clip_low'] == 0.2 and 'denominator' not in defaults
  with pytest.raises(ValueError, match='ppo.*losses.*ppo_clip'):
    losses.get('ppo')
  with pytest.raises(TypeError, match='clip_hi; .*clip_high'):
    losses.get('ppo_clip', clip_hi=0.3)
