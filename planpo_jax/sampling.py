"""Drawing ids from logits: temperature, top-k, top-p and min-p.

Every filter keeps the ids whose probability reaches a threshold, so filters
combine by the largest threshold, and nothing is sorted: the few best ids are
enough for peaked distributions, a search for the threshold serves the others.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

# Ids per block. Blocks are strided, block j holds ids j, j + J, j + 2J, ...,
# because reductions over a middle axis vectorise.
_BLOCK = 128

# Distributions whose kept ids are among this many best are drawn from these.
_BEST = 64

# Thresholds of top-p are found up to this many steps between neighbouring
# float32: a relative difference of 2^-10 to 2^-9.
_TOP_P_STEPS = 2**14


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['temperature', 'top_p', 'top_k', 'min_p'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Settings:
  """How a distribution is drawn from; traced, so changes compile nothing.

  The filters act one after the other in this order: temperature, top-k, top-p
  of what top-k left, min-p. At least one id always stays.

  Attributes:
    temperature: >= 0; 0 takes the best id, unfiltered, and reports its
      log-probability at temperature 1.
    top_p: in (0, 1]; keeps the fewest best ids that hold this share of the
      probability, and those tied with the last of them; 1 keeps all.
    top_k: >= 0; keeps this many best ids, and those tied with the last of
      them; 0 keeps all.
    min_p: in [0, 1]; keeps ids at least this share as probable as the best;
      0 keeps all.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0

  def check(self, prefix: str = ''):
    """Raises ValueError if a value is out of its range.

    Args:
      prefix: put before the names in messages, such as 'config.sampler.'.
    """
    for name, value, right, rule, fix in (
      (
        'temperature',
        self.temperature,
        0 <= self.temperature < float('inf'),
        'must be at least 0 and finite',
        '1 samples the policy itself, 0 is greedy',
      ),
      (
        'top_p',
        self.top_p,
        0 < self.top_p <= 1,
        'must be above 0 and at most 1',
        '1 turns it off',
      ),
      (
        'top_k',
        self.top_k,
        self.top_k >= 0 and self.top_k == int(self.top_k),
        'must be a whole number, at least 0',
        '0 turns it off',
      ),
      (
        'min_p',
        self.min_p,
        0 <= self.min_p <= 1,
        'must be in 0..1',
        '0 turns it off',
      ),
    ):
      if not right:
        raise ValueError(f'{prefix}{name}={value} {rule}; {fix}.')


def sample(
  logits_BV: jax.Array, uniform_B: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
  """Draws one id a row by inverting the CDF of the filtered distribution.

  A row's result depends on its own logits and number only. An id of
  probability 0 is never returned. For top-p, ids count as tied if their
  probabilities differ by less than 0.2 %, unless the kept ids are few.

  Args:
    logits_BV: float32, not divided by the temperature.
    uniform_B: float32 in [0, 1).
    settings: temperature and filters.

  Returns:
    id_B, int32, and logp_B, float32 nats: its log-probability under the
    distribution drawn from, tempered, filtered and renormalised.
  """
  top = (settings.top_k > 0) | (settings.top_p < 1)
  kind = jnp.where(settings.temperature > 0, 1 + top, 0)
  return jax.lax.switch(
    kind, (_greedy, _sample_above, _sample_top), logits_BV, uniform_B, settings
  )


def _greedy(logits_BV, uniform_B, settings):
  del uniform_B, settings
  logits_BIJ = _blocks(logits_BV)
  _, inside, blocks = logits_BIJ.shape
  max_B = logits_BIJ.max(axis=1).max(axis=-1)
  # The first of equals; argmax over the vocabulary does not vectorise.
  ids_IJ = jnp.arange(inside * blocks, dtype=jnp.int32).reshape(inside, blocks)
  best_BIJ = logits_BIJ == max_B[:, None, None]
  id_B = jnp.where(best_BIJ, ids_IJ, ids_IJ.size).min(axis=1).min(axis=-1)
  weights_BIJ = _weights(logits_BIJ, max_B, 1.0)
  return id_B, -jnp.log(_total(weights_BIJ))


def _blocks(logits_BV):
  """Logits as [B, I, J]: block j is [:, :, j], its i-th id is i * J + j."""
  rows, vocab = logits_BV.shape
  blocks = -(-vocab // _BLOCK)
  return jnp.pad(
    logits_BV,
    ((0, 0), (0, blocks * _BLOCK - vocab)),
    constant_values=-jnp.inf,
  ).reshape(rows, _BLOCK, blocks)


def _weights(logits_BIJ, max_B, temperature):
  # Written out: exponentials fused into a reduction do not vectorise.
  return jax.lax.optimization_barrier(
    jnp.exp((logits_BIJ - max_B[:, None, None]) / temperature)
  )


def _total(weights_BIJ):
  return weights_BIJ.sum(axis=1).sum(axis=-1)


def _invert(weights_BX, target_B):
  """First index whose cumulative weight exceeds the target, and before."""
  cdf_BX = jnp.cumsum(weights_BX, axis=-1)
  index_B = jnp.sum(cdf_BX <= target_B[:, None], axis=-1)
  # Rounding may put the target at or past the total: the last real entry.
  last_B = (
    weights_BX.shape[-1] - 1 - jnp.argmax(weights_BX[:, ::-1] > 0, axis=-1)
  )
  index_B = jnp.minimum(index_B, last_B)
  before_BX = jnp.pad(cdf_BX[:, :-1], ((0, 0), (1, 0)))
  return index_B, _take(before_BX, index_B)


def _take(x_BX, index_B):
  return jnp.take_along_axis(x_BX, index_B[:, None], axis=-1)[:, 0]


def _keep(weights, least):
  return jnp.where(weights >= least, weights, 0)


def _sample_above(logits_BV, uniform_B, settings, threshold_B=None):
  """Draws from the ids of at least a share of the best one's probability."""
  logits_BIJ = _blocks(logits_BV)
  max_B = logits_BIJ.max(axis=1).max(axis=-1)
  least_B = jnp.full_like(max_B, settings.min_p)
  if threshold_B is not None:
    least_B = jnp.maximum(least_B, threshold_B)
  weights_BIJ = jax.lax.optimization_barrier(_keep(
    jnp.exp((logits_BIJ - max_B[:, None, None]) / settings.temperature),
    least_B[:, None, None],
  ))
  sums_BJ = weights_BIJ.sum(axis=1)
  total_B = sums_BJ.sum(axis=-1)
  target_B = uniform_B * total_B
  block_B, before_B = _invert(sums_BJ, target_B)
  weights_BI = jnp.take_along_axis(weights_BIJ, block_B[:, None, None], 2)
  inside_B, _ = _invert(weights_BI[:, :, 0], target_B - before_B)
  id_B = (inside_B * sums_BJ.shape[-1] + block_B).astype(jnp.int32)
  scaled_B = (_take(logits_BV, id_B) - max_B) / settings.temperature
  return id_B, scaled_B - jnp.log(total_B)


def _sample_top(logits_BV, uniform_B, settings):
  """Draws after top-k or top-p, from the few best ids if these hold all."""
  best_BK, ids_BK = _best(logits_BV)
  max_B = best_BK[:, 0]
  weights_BK = jnp.exp((best_BK - max_B[:, None]) / settings.temperature)
  floor_B = weights_BK[:, -1]
  width = weights_BK.shape[-1]

  top_k = jnp.where(settings.top_k > 0, settings.top_k, width)
  kth_B = weights_BK[:, jnp.minimum(top_k, width) - 1]
  weights_BK = _keep(weights_BK, kth_B[:, None])

  def whole():
    blocks_BIJ = _blocks(logits_BV)
    return _total(_weights(blocks_BIJ, max_B, settings.temperature))

  total_B = jax.lax.cond(
    (settings.top_k > 0) | (settings.top_p == 1),
    lambda: weights_BK.sum(axis=-1),
    whole,
  )
  cdf_BK = jnp.cumsum(weights_BK, axis=-1)
  before_BK = jnp.pad(cdf_BK[:, :-1], ((0, 0), (1, 0)))
  needed_BK = before_BK < (settings.top_p * total_B)[:, None]
  needed_BK = (needed_BK | (settings.top_p == 1)) & (weights_BK > 0)
  least_B = jnp.where(needed_BK, weights_BK, jnp.inf).min(axis=-1)
  least_B = jnp.maximum(least_B, settings.min_p)
  weights_BK = _keep(weights_BK, least_B[:, None])

  # Else ids outside may belong to the top k or be tied with those kept.
  few_B = (floor_B == 0) | ((least_B > floor_B))
  few_B &= (settings.top_k == 0) | (kth_B > floor_B) | (floor_B == 0)

  kept_B = weights_BK.sum(axis=-1)
  index_B, _ = _invert(weights_BK, uniform_B * kept_B)
  scaled_B = (_take(best_BK, index_B) - max_B) / settings.temperature
  id_B, logp_B = _take(ids_BK, index_B), scaled_B - jnp.log(kept_B)

  def search():
    threshold_B = _threshold(logits_BV, max_B, few_B, settings)
    other_B, other_logp_B = _sample_above(
      logits_BV, uniform_B, settings, threshold_B
    )
    return (
      jnp.where(few_B, id_B, other_B),
      jnp.where(few_B, logp_B, other_logp_B),
    )

  return jax.lax.cond(jnp.all(few_B), lambda: (id_B, logp_B), search)


def _best(logits_BV):
  """The best ids, best first: their logits and ids, both [B, K]."""
  logits_BIJ = _blocks(logits_BV)
  blocks = logits_BIJ.shape[-1]
  # The best K ids lie in the K blocks with the largest maxima.
  _, block_BC = jax.lax.top_k(logits_BIJ.max(axis=1), min(_BEST, blocks))
  inside_BIC = jnp.take_along_axis(logits_BIJ, block_BC[:, None, :], axis=2)
  id_BIC = jnp.arange(_BLOCK)[:, None] * blocks + block_BC[:, None, :]
  rows = logits_BV.shape[0]
  # Slices merged into the top-k would make XLA sort everything instead.
  best_BK, at_BK = jax.lax.optimization_barrier(
    jax.lax.top_k(inside_BIC.reshape(rows, -1), _BEST)
  )
  ids_BK = jnp.take_along_axis(id_BIC.reshape(rows, -1), at_BK, axis=-1)
  return best_BK, ids_BK.astype(jnp.int32)


def _threshold(logits_BV, max_B, known_B, settings):
  """Least weight, relative to the best id's, that top-k and top-p keep."""
  weights_BIJ = _weights(_blocks(logits_BV), max_B, settings.temperature)

  def count(least_B):
    kept_BIJ = weights_BIJ >= least_B[:, None, None]
    return jnp.where(kept_BIJ, 1.0, 0.0).sum(axis=1).sum(axis=-1)

  def mass(least_B):
    return _keep(weights_BIJ, least_B[:, None, None]).sum(axis=1).sum(axis=-1)

  none_B = jnp.zeros_like(max_B)
  kth_B = jax.lax.cond(
    settings.top_k > 0,
    lambda: _bisect(
      count, jnp.full_like(max_B, settings.top_k), none_B, known_B, 1
    ),
    lambda: none_B,
  )
  return jax.lax.cond(
    settings.top_p < 1,
    lambda: _bisect(
      mass, settings.top_p * mass(kth_B), kth_B, known_B, _TOP_P_STEPS
    ),
    lambda: kth_B,
  )


def _bisect(measure, target_B, low_B, known_B, steps):
  """Largest threshold in [low, 1] whose measure reaches the target.

  Works on the bits of float32, whose order is that of the numbers above 0.
  """

  def bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.int32)

  def open_rows(carry):
    low_B, high_B, reached_B = carry
    return ~known_B & (high_B - low_B > steps) & (reached_B != target_B)

  def halve(carry):
    low_B, high_B, reached_B = carry
    middle_B = low_B + (high_B - low_B) // 2
    value_B = measure(jax.lax.bitcast_convert_type(middle_B, jnp.float32))
    enough_B = value_B >= target_B
    open_B = open_rows(carry)
    return (
      jnp.where(open_B & enough_B, middle_B, low_B),
      jnp.where(open_B & ~enough_B, middle_B, high_B),
      jnp.where(open_B & enough_B, value_B, reached_B),
    )

  low_B, _, _ = jax.lax.while_loop(
    lambda carry: jnp.any(open_rows(carry)),
    halve,
    (bits(low_B), bits(jnp.ones_like(low_B)) + 1, jnp.full_like(low_B, -1)),
  )
  return jax.lax.bitcast_convert_type(low_B, jnp.float32)
