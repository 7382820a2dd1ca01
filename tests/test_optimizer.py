"""The optax chain and its learning rate."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planpo_jax import optimizer


def rates(counts, **chosen):
  rate = optimizer.learning_rate_schedule(2.0, **chosen)
  return [float(rate(jnp.int32(c))) for c in counts]


def test_schedules():
  np.testing.assert_allclose(rates([0, 9]), [2, 2])
  np.testing.assert_allclose(
    rates([0, 1, 3, 4, 9], warmup_steps=4), [0.5, 1, 2, 2, 2]
  )
  np.testing.assert_allclose(
    rates([0, 1, 2, 4, 6, 9], schedule='cosine', warmup_steps=2, total_steps=6),
    [1, 2, 2, 1, 0, 0],
    atol=1e-6,
  )


def steps(tx, grads, params):
  state = tx.init(params)
  for grad in grads:
    deltas, state = tx.update(grad, state, params)
    params = optax.apply_updates(params, deltas)
  return params


def test_first_adamw_step_by_hand():
  """m / (1-b1) = g, sqrt(v / (1-b2)) = |g|: w - lr (sign(g) + wd w)."""
  tx = optimizer.make(0.1, weight_decay=0.01, max_grad_norm=100.0)
  w = steps(tx, [jnp.array([3.0, -4.0])], jnp.array([1.0, 2.0]))
  wanted = [1 - 0.1 * (1 + 0.01), 2 - 0.1 * (-1 + 0.02)]
  np.testing.assert_allclose(w, wanted, rtol=1e-5)


def test_gradients_are_clipped_by_their_joint_norm():
  """A second gradient of norm 50 acts like the one of norm 1 it is cut to."""
  small = {'a': jnp.array([0.6]), 'b': jnp.array([0.8])}
  large = {'a': jnp.array([30.0]), 'b': jnp.array([40.0])}
  params = {'a': jnp.array([1.0]), 'b': jnp.array([1.0])}
  first = {'a': jnp.array([0.1]), 'b': jnp.array([-0.3])}
  tx = optimizer.make(0.1, max_grad_norm=1.0)
  clipped = steps(tx, [first, large], params)
  wanted = steps(tx, [first, small], params)
  for key in params:
    np.testing.assert_allclose(clipped[key], wanted[key], rtol=1e-6)
  loose = steps(
    optimizer.make(0.1, max_grad_norm=100.0), [first, large], params
  )
  assert abs(float((loose['b'] - wanted['b'])[0])) > 1e-3


@pytest.mark.parametrize(
  'chosen, match',
  [
    ({'schedule': 'linear'}, 'constant or cosine'),
    ({'schedule': 'cosine'}, 'total_steps=None'),
    (
      {'schedule': 'cosine', 'warmup_steps': 5, 'total_steps': 5},
      'above warmup_steps=5',
    ),
    ({'max_grad_norm': 0.0}, 'max_grad_norm=0.0'),
    ({'warmup_steps': -1}, 'warmup_steps=-1'),
    ({'learning_rate': -1.0}, 'learning_rate=-1.0'),
  ],
)
def test_refused(chosen, match):
  with pytest.raises(ValueError, match=match):
    optimizer.make(**{'learning_rate': 1.0} | chosen)
