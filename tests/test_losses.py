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
from tests import eight_devices, make_episodes

PLAIN = {'kl_coef': 0.0, 'entropy_coef': 0.0}


def make_batch(adv, mask=None, turn=None, segment=None, **fields):
  """A row of tokens, or several, whose logps are 0 unless given.

  They are one turn of one sequence unless `turn` and `segment` tell.
  """
  adv = np.atleast_2d(np.asarray(adv, np.float32))
  ones = np.ones_like(adv, np.int32)
  mask = ones > 0 if mask is None else np.atleast_2d(np.array(mask, bool))
  zeros = np.zeros_like(adv)
  turn = ones if turn is None else np.atleast_2d(np.array(turn, np.int32))
  batch = batch_lib.Batch(
    tokens_BT=zeros.astype(np.int32),
    positions_BT=zeros.astype(np.int32),
    segment_ids_BT=ones if segment is None else np.array(segment, np.int32),
    loss_mask_BT=mask,
    turn_BT=turn,
    flat_BT=zeros.astype(np.int32),
    adv_BT=adv,
    sampler_logp_BT=zeros,
    old_logp_BT=zeros,
    ref_logp_BT=zeros,
  )
  fields = {
    k: np.atleast_2d(np.asarray(v, np.float32)) for k, v in fields.items()
  }
  return dataclasses.replace(batch, **fields)


def packed(context='conversation', rows=4, untrained=0.2):
  """Episodes of 1 to 4 turns in rows of 24 tokens, with random numbers."""
  rng = np.random.default_rng(0)
  batch_episodes = [
    make_episodes.episode(rng.integers(1, 5, rng.integers(1, 5)), prompt=1)
    for _ in range(2 * rows)
  ]
  batch = batch_lib.pack(
    batch_episodes, context=context, row_len=24, row_multiple=rows
  )
  assert batch.tokens_BT.shape == (rows, 24)
  num_R = batch.flat_BT.max() + 1
  trained_R = rng.random(num_R) >= untrained
  batch = batch_lib.with_advantages(batch, np.zeros(num_R), trained_R)
  drift_BT = rng.normal(0, 0.3, (3, rows, 24)).astype(np.float32)
  return dataclasses.replace(
    batch,
    adv_BT=rng.normal(size=(rows, 24)).astype(np.float32),
    old_logp_BT=drift_BT[0] - 2,
    ref_logp_BT=drift_BT[1] - 2,
    sampler_logp_BT=drift_BT[2] - 2,
  )


@functools.cache
def jitted(chosen, denominator):
  loss = losses.get('ppo_clip', **dict(chosen))
  return jax.jit(functools.partial(loss, denominator=denominator))


def run(ratios, batch, denominator=None, **chosen):
  """At new/old probability ratios, and an entropy of 2."""
  logp_BT = np.log(np.atleast_2d(np.array(ratios, np.float32)))
  logp_BT = logp_BT + batch.old_logp_BT
  loss = jitted(tuple(sorted((PLAIN | chosen).items())), denominator)
  entropy_BT = np.full_like(logp_BT, 2.0)
  value, metrics = loss(logp_BT, batch, entropy_BT=entropy_BT)
  return float(value), jax.device_get(metrics)


@functools.cache
def _value_and_grad(argnums, chosen):
  def value(logp_BT, entropy_BT, batch):
    return ppo_clip.loss(
      logp_BT, batch, entropy_BT=entropy_BT, denominator=None, **dict(chosen)
    )[0]

  return jax.jit(jax.value_and_grad(value, argnums))


def value_and_grad(batch, argnums=0, **chosen):
  """Of the loss in (logp_BT, entropy_BT)."""
  step = _value_and_grad(argnums, tuple(sorted(chosen.items())))
  return lambda logp_BT, entropy_BT: step(logp_BT, entropy_BT, batch)


@pytest.mark.parametrize(
  'ratio, adv, wanted, clipped',
  [
    (1.0, 2.0, -2.0, 0),
    (1.1, 2.0, -2.2, 0),
    (1.5, 2.0, -2.4, 1),  # Cut at 1.2.
    (0.5, 2.0, -1.0, 0),  # The lower of the two is the free one.
    (0.5, -2.0, 1.6, 1),  # Cut at 0.8.
    (1.5, -2.0, 3.0, 0),
    (50.0, -1.0, 50.0, 0),  # Not bounded from this side.
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


@pytest.mark.parametrize('aggregation', ppo_clip.AGGREGATIONS)
def test_masked_tokens_are_left_out_of_both_parts(aggregation):
  """A sequence that is masked as a whole changes nothing.

  The other has 6 tokens of loss 1, so 6/8 with a constant length of 8.
  """
  row = np.ones(6)
  batch = make_batch([-row, 9 * row], mask=[row, 0 * row])
  chosen = {'aggregation': aggregation, 'length': 8}
  value, metrics = run([row, 7 * row], batch, **chosen)
  assert value == (0.75 if aggregation == 'constant_length' else 1)
  assert metrics.ratio_max == 1


# Two rows. Sequence 1 of row 1 has a turn of 1 token and one of 3, sequence 2 a
# turn of 1 (its second token is not trained); row 2 has one turn of 2 tokens.
LAYOUT = {
  'turn': [[1, 2, 2, 2, 3, 3], [1, 1, 0, 0, 0, 0]],
  'segment': [[1, 1, 1, 1, 2, 2], [1, 1, 0, 0, 0, 0]],
  'mask': [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]],
}
LAYOUT_LOSS = np.array([[1, 2, 3, 4, 10, 99], [20, 40, 99, 99, 99, 99]])
AGGREGATED = [
  # (1 + 2 + 3 + 4 + 10 + 20 + 40) / 7.
  ('token_mean', 80 / 7, 7),
  # (1 + 3 + 10 + 30) / 4.
  ('turn_mean', 11, 4),
  # ((1 + 2 + 3 + 4) / 4 + 10 + 30) / 3.
  ('sequence_mean', 42.5 / 3, 3),
  # ((1 + 2 + 3 + 4) / 8 + 10 / 8 + 60 / 8) / 3.
  ('constant_length', 10 / 3, 3),
]


@pytest.mark.parametrize('aggregation, wanted, weight', AGGREGATED)
def test_aggregation(aggregation, wanted, weight):
  batch = make_batch(-LAYOUT_LOSS, **LAYOUT)
  chosen = {'aggregation': aggregation, 'length': 8}
  value, metrics = run(np.ones((2, 6)), batch, **chosen)
  assert value == pytest.approx(wanted)
  assert metrics.policy_loss == pytest.approx(wanted)
  assert metrics.weight == pytest.approx(weight)


@pytest.mark.parametrize(
  'aggregation, half',
  [
    ('token_mean', 1 / 7),
    ('turn_mean', 1 / 2 / 4),
    ('sequence_mean', 1 / 2 / 3),
    ('constant_length', 1 / 2 / 3),
  ],
)
def test_shares_and_nats_do_not_depend_on_the_length(aggregation, half):
  """All tokens clipped is 1, and one token of row 2 is its share.

  KL .306853 (k3 at ratio ref/new 2) and entropy 2 are the same on every token.
  """
  batch = make_batch(np.ones((2, 6)), ref_logp_BT=np.log(np.full((2, 6), 4.0)),
                     **LAYOUT)  # fmt: skip
  chosen = {'aggregation': aggregation, 'length': 8}
  _, metrics = run(np.full((2, 6), 2.0), batch, **chosen)
  assert metrics.clip_frac == pytest.approx(1)
  assert metrics.kl_ref == pytest.approx(0.306853, rel=1e-5)
  assert metrics.entropy == pytest.approx(2)
  ratio = np.ones((2, 6))
  ratio[1, 1] = 2
  _, metrics = run(ratio, batch, **chosen)
  assert metrics.clip_frac == pytest.approx(half)


def test_constant_length_weighs_kl_and_entropy_as_the_rest():
  """.1 x .306853 - .01 x 2, of 7 tokens over 8, of 3 sequences."""
  batch = make_batch(np.zeros((2, 6)), ref_logp_BT=np.log(np.full((2, 6), 2.0)),
                     **LAYOUT)  # fmt: skip
  value, _ = run(
    np.ones((2, 6)),
    batch,
    aggregation='constant_length',
    length=8,
    kl_coef=0.1,
    entropy_coef=0.01,
  )
  assert value == pytest.approx((0.0306853 - 0.02) * 7 / 8 / 3, rel=1e-5)


def test_aggregations_are_one_where_lengths_are_alike():
  """Turns of 3, one a sequence, with losses 0 to 11; a constant of 8 is 3/8."""
  halves = [[1, 1, 1, 2, 2, 2]] * 2
  batch = make_batch(-np.arange(12).reshape(2, 6), turn=halves, segment=halves)
  values = [
    run(np.ones((2, 6)), batch, aggregation=aggregation, length=8)[0]
    for aggregation in ppo_clip.AGGREGATIONS
  ]
  wanted = [5.5, 5.5, 5.5, 5.5 * 3 / 8]
  np.testing.assert_allclose(values, wanted, rtol=1e-6)


@functools.cache
def _with_grad(chosen, denominator):
  loss = losses.get('ppo_clip', **dict(chosen))

  def value(logp_BT, batch):
    entropy_BT = logp_BT**2
    return loss(logp_BT, batch, entropy_BT=entropy_BT, denominator=denominator)

  return jax.jit(jax.value_and_grad(value, has_aux=True))


def with_grad(logp_BT, batch, denominator=None, **chosen):
  """Returns ((value, metrics), gradient)."""
  step = _with_grad(tuple(sorted(chosen.items())), denominator)
  return jax.device_get(step(logp_BT, batch))


def near(batch):
  """Log-probabilities of a policy that has moved from the old one."""
  noise_BT = np.random.default_rng(1).normal(0, 0.3, batch.adv_BT.shape)
  return (batch.old_logp_BT + noise_BT).astype(np.float32)


# Each aggregation, each ratio, and every term.
ALL_TERMS = [
  {
    'ratio': ratio,
    'aggregation': aggregation,
    'length': 5,
    'kl_coef': 0.1,
    'entropy_coef': 0.01,
    'sampler_cap': 1.05,
  }
  for ratio, aggregation in zip(
    ('token', 'turn', 'turn', 'turn'), ppo_clip.AGGREGATIONS, strict=True
  )
]


@pytest.mark.parametrize('chosen', ALL_TERMS, ids=ppo_clip.AGGREGATIONS)
def test_parts_add_up_to_the_whole(chosen):
  """Parts with denominator 1, merged and divided once."""
  batch = packed()
  logp_BT = near(batch)
  (whole, whole_metrics), whole_grad = with_grad(logp_BT, batch, **chosen)
  # A sum of zeros would prove nothing.
  assert whole_metrics.sampler_capped > 0 and whole_metrics.clip_frac > 0
  for parts in (2, 4):
    value, metrics, grads = 0.0, losses.no_metrics(), []
    for logp, block in zip(
      np.split(logp_BT, parts), batch_lib.split(batch, parts), strict=True
    ):
      (part, part_metrics), grad = with_grad(logp, block, 1.0, **chosen)
      value += part
      metrics = losses.merge(metrics, part_metrics)
      grads.append(grad)
    np.testing.assert_allclose(value / metrics.weight, whole, rtol=1e-6)
    np.testing.assert_allclose(
      np.concatenate(grads) / metrics.weight, whole_grad, atol=1e-6
    )
    metrics = losses.mean(metrics)
    for field in dataclasses.fields(metrics):
      np.testing.assert_allclose(
        getattr(metrics, field.name),
        getattr(whole_metrics, field.name),
        rtol=1e-5,
        err_msg=field.name,
      )


def test_sequence_of_a_window_is_a_turn():
  """In a conversation it is not."""
  for context, same in (('window', True), ('conversation', False)):
    batch = packed(context)
    by_turn, by_sequence = (
      with_grad(near(batch), batch, **ALL_TERMS[i])[0][0] for i in (1, 2)
    )
    assert (by_turn == pytest.approx(by_sequence, rel=1e-5)) is same


_DEVICES = """
import json

import jax
import numpy as np

from planpo_jax import losses
from tests import test_losses

batch = test_losses.packed(rows=8)
logp_BT = test_losses.near(batch)
mesh = jax.make_mesh((8,), ('rows',))
rows = jax.NamedSharding(mesh, jax.P('rows'))
worst, moved = 0.0, []
for aggregation in ('turn_mean', 'constant_length'):
  step = jax.jit(jax.value_and_grad(lambda logp_BT, batch: losses.get(
    'ppo_clip', ratio='turn', aggregation=aggregation)(
      logp_BT, batch, entropy_BT=logp_BT, denominator=None), has_aux=True))
  one = step(logp_BT, batch)
  placed = jax.device_put((logp_BT, batch), rows)
  program = step.lower(*placed).compile()
  moved += [kind for kind in ('all-gather', 'all-to-all', 'collective-permute')
            if kind in program.as_text()]
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(program(*placed))):
    apart = np.abs(np.asarray(x) - np.asarray(y)) / np.maximum(1, np.abs(x))
    worst = max(worst, float(apart.max()))
print(json.dumps({'worst': worst, 'moved': moved}))
"""


def test_eight_devices_compute_the_same_and_exchange_only_sums():
  report = eight_devices.report_of(_DEVICES)
  assert report['worst'] < 1e-6 and not report['moved'], report


# Row 1: two turns; the third token of the first is not trained. Row 2 has a
# turn of the same number.
TURNS = {
  'turn': [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]],
  'mask': [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]],
}
# Geometric means 2, .5 and 1: sqrt(4 x 1), sqrt(.25 x 1), sqrt(10 x .1).
TURN_RATIO = [[4, 1, 100, 0.25, 1], [10, 0.1, 9, 9, 9]]


def test_ratio_of_a_turn():
  """A = 1: min(2, 1.2), .5 and 1, twice each; A = -1: 2, .8 and 1 of cost."""
  for sign, wanted, clipped in (
    (1, -(1.2 + 0.5 + 1) / 3, 1 / 3),
    (-1, (2 + 0.8 + 1) / 3, 1 / 3),
  ):
    batch = make_batch(np.full((2, 5), sign), **TURNS)
    value, metrics = run(TURN_RATIO, batch, ratio='turn')
    assert value == pytest.approx(wanted, rel=1e-5)
    assert metrics.clip_frac == pytest.approx(clipped)
    assert metrics.ratio_max == pytest.approx(2, rel=1e-5)
    assert metrics.ratio_min == pytest.approx(0.5, rel=1e-5)
  # Single tokens: 1.2 + 1 + .25 + 1 + 1.2 + .1.
  value, metrics = run(TURN_RATIO, make_batch(np.ones((2, 5)), **TURNS))
  assert value == pytest.approx(-4.75 / 6, rel=1e-5)
  assert metrics.ratio_max == pytest.approx(10, rel=1e-5)


def test_gradient_of_the_ratio_of_a_turn():
  """Each token: -A of its own x ratio of the turn / 6, or 0 where clipped.

  The turns have ratios 2, .5 and 1. The first is above 1.2, so its token with
  A = 3 is cut, that with A = -1 is not. In the second, below .8, A = -4 is cut.
  """
  batch = make_batch([[3, -1, 9, 2, -4], [5, -7, 9, 9, 9]], **TURNS)
  logp_BT = np.log(np.array(TURN_RATIO, np.float32))
  _, grad = value_and_grad(batch, **PLAIN, ratio='turn')(
    logp_BT, np.zeros_like(logp_BT)
  )
  wanted = np.array([[0, 2, 0, -1, 0], [-5, 7, 0, 0, 0]]) / 6
  np.testing.assert_allclose(grad, wanted, atol=1e-6)


def test_ratio_of_turns_of_one_token_is_that_of_the_token():
  batch = packed()
  single = np.broadcast_to(np.arange(1, 25), (4, 24))
  batch = dataclasses.replace(batch, turn_BT=single * (batch.turn_BT > 0))
  by_token, by_turn = (
    with_grad(near(batch), batch, ratio=ratio) for ratio in ppo_clip.RATIOS
  )
  assert by_token[0][1].clip_frac > 0
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), by_turn, by_token
  )


def test_first_ratio_is_one():
  """Exactly; and both kinds have one gradient there."""
  batch, grads = packed(), []
  for ratio in ppo_clip.RATIOS:
    (_, metrics), grad = with_grad(batch.old_logp_BT, batch, ratio=ratio)
    assert metrics.ratio_min == metrics.ratio_max == 1
    assert metrics.clip_frac == metrics.approx_kl == 0
    grads.append(grad)
  np.testing.assert_array_equal(*grads)
  assert np.any(grads[0])


def test_without_clipping_the_ratio_is_free():
  """-(2 x 2 + .5 x -4) / 2, which clipping at .2 makes -(1.2 x 2 - .8 x 4) / 2.

  The gradient, -A ratio / 2, is that of REINFORCE at ratio 1.
  """
  batch = make_batch([2.0, -4.0])
  value, metrics = run([2.0, 0.5], batch, clip=False)
  assert value == pytest.approx(-1.0, rel=1e-5) and metrics.clip_frac == 0
  value, metrics = run([2.0, 0.5], batch)
  assert value == pytest.approx(0.4, rel=1e-5) and metrics.clip_frac == 1
  gradient = value_and_grad(batch, **PLAIN, clip=False)
  for ratio, wanted in (([2.0, 0.5], [-2, 1]), ([1.0, 1.0], [-1, 2])):
    logp_BT = np.log(np.array([ratio], np.float32))
    _, grad = gradient(logp_BT, np.zeros_like(logp_BT))
    np.testing.assert_allclose(grad, [wanted], rtol=1e-5)


def test_token_mean_of_uneven_parts():
  """2 tokens of loss 1 and 8 of loss 0 give 0.2, not 0.5."""
  parts = [run([1] * n, make_batch([a] * n), denominator=1.0)
           for n, a in ((2, -1.0), (8, 0.0))]  # fmt: skip
  weight = sum(float(metrics.weight) for _, metrics in parts)
  assert sum(value for value, _ in parts) / weight == pytest.approx(0.2)


def test_all_masked_gives_zero_loss_and_gradient():
  """Whatever stands on padding, infinities included."""
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


def test_sampler_cap_weighs_single_tokens_of_a_turn():
  """Ratio of the turn sqrt(4 x 1) = 2, cut at 1.2; weights .5 and 2 of 3."""
  batch = make_batch([1.0, 1.0], sampler_logp_BT=-np.log([0.5, 3.0]))
  value, metrics = run([4.0, 1.0], batch, ratio='turn', sampler_cap=2.0)
  assert value == pytest.approx(-1.2 * (0.5 + 2) / 2, rel=1e-5)
  assert metrics.sampler_capped == 0.5


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


@pytest.mark.parametrize(
  'ratio, aggregation',
  [('token', 'token_mean'), ('turn', 'turn_mean'), ('turn', 'constant_length')],
)
def test_what_stands_on_padding_changes_nothing(ratio, aggregation):
  """Infinities and NaN beside the tokens of a row."""
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
      [0, 1, 0, 1, 2, 0],
      sampler_logp_BT=fill([0.7, -1.1, -0.2]),
      old_logp_BT=fill([0.0, 0.0, 0.1]),
      ref_logp_BT=fill([0.2, 0.0, 0.0]),
    )
    batch = jax.tree.map(jnp.asarray, batch)  # numpy warns of inf - inf.
    chosen = {'sampler_cap': 2.0, 'ratio': ratio, 'aggregation': aggregation}
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


@pytest.mark.parametrize('ratio', ppo_clip.RATIOS)
def test_extreme_ratio_stays_finite(ratio):
  """exp would overflow in float32 beyond 88; the metrics count too."""
  batch = make_batch([0.0, -1.0], sampler_logp_BT=[-200.0, 200.0])
  logp_BT = np.array([[200.0, 200.0]], np.float32)
  (loss, metrics), grad = with_grad(logp_BT, batch, ratio=ratio)
  assert np.isfinite(loss) and np.isfinite(grad).all()
  assert np.isfinite(jax.tree.leaves(metrics)).all()


@pytest.mark.parametrize(
  'kind, wanted', [('k1', -0.693147), ('k2', 0.240227), ('k3', 0.306853)]
)
def test_kl_estimators(kind, wanted):
  """Policy ln .1, reference ln .2."""
  value = kl.estimate(jnp.log(0.1), jnp.log(0.2), kind)
  np.testing.assert_allclose(value, wanted, atol=1e-6)


@pytest.mark.parametrize(
  'kind, wanted', [('k1', 0.0693147), ('k2', -0.0240227), ('k3', -0.0306853)]
)
def test_kl_in_the_reward_has_the_sign_of_the_estimate(kind, wanted):
  """-.1 x the values above; k1 unless told, as what is unbiased in a sum."""
  logps = jnp.log(0.1), jnp.log(0.2)
  reward = kl.token_reward(*logps, coef=0.1, kind=kind)
  np.testing.assert_allclose(reward, wanted, atol=1e-7)
  assert kl.token_reward(*logps, coef=0.1) == pytest.approx(0.0693147)
  assert kl.token_reward(0.0, 0.0, coef=0.1, kind=kind) == 0


def test_kl_in_the_reward_is_reported_and_not_trained():
  """Ratio 1 and A 2 leave -2, and d/d logp = -2."""
  batch = make_batch([2.0], ref_logp_BT=[np.log(2.0)])
  chosen = {'kl_coef': 0.1, 'kl_in_reward': True, 'entropy_coef': 0.0}
  value, metrics = run([1.0], batch, kl_kind='k1', **chosen)
  assert value == pytest.approx(-2.0)
  assert metrics.kl_ref == pytest.approx(-0.693147, rel=1e-5)
  zeros_BT = np.zeros((1, 1), np.float32)
  _, grad = value_and_grad(batch, **chosen)(zeros_BT, zeros_BT)
  assert grad == pytest.approx(-2.0)


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
    ({'aggregation': 'mean'}, "'mean' .* token_mean, turn_mean, sequence_mean"),
    ({'ratio': 'sequence'}, "'sequence' .* token or turn"),
    ({'kl_kind': 'k4'}, 'k1, k2 or k3'),
    ({'dual_clip': 1.0}, r'dual_clip=1.0 .*above 1, or None .*try 3\.'),
    ({'clip_low': 0.0}, r'clip_low=0.0 .*above 0 and at most 1; try 0\.2'),
    ({'clip_low': -0.2}, 'clip_low=-0.2'),
    ({'clip_low': 1.5}, 'clip_low=1.5'),
    ({'clip_high': -0.2}, r'clip_high=-0.2 .*above 0; try 0\.2'),
    ({'clip_high': 0.0}, 'clip_high=0.0'),
    ({'kl_coef': -0.01}, r'kl_coef=-0.01 .*at least 0; try 0\.01'),
    ({'kl_coef': np.inf}, 'kl_coef=inf'),
    ({'entropy_coef': -1.0}, r'entropy_coef=-1.0 .*at least 0'),
    ({'length': 0}, 'length=0 .*at least 1 token'),
  ],
)
def test_bad_values_are_refused(chosen, match):
  with pytest.raises(ValueError, match=match):
    losses.get('ppo_clip', **chosen)


@pytest.mark.parametrize(
  'name',
  [name for name, default in losses.hyperparameters('ppo_clip').items()
   if isinstance(default, float) or default is None],
)  # fmt: skip
def test_nan_is_refused(name):
  with pytest.raises(ValueError, match=f'{name}=nan'):
    losses.get('ppo_clip', **{name: np.nan})


def test_least_values_work():
  losses.get('ppo_clip', clip_low=1.0, kl_coef=0.0, entropy_coef=0.0, length=1)


def test_registry_names_what_it_knows():
  assert losses.names() == ['gspo', 'ppo_clip']
  defaults = losses.hyperparameters('ppo_clip')
  assert defaults['clip_low'] == 0.2 and 'denominator' not in defaults
  with pytest.raises(ValueError, match='ppo.*losses.*gspo, ppo_clip'):
    losses.get('ppo')
  with pytest.raises(TypeError, match='clip_hi; .*clip_high'):
    losses.get('ppo_clip', clip_hi=0.3)
