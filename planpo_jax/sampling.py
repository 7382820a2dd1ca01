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

# Weights below this are 0, which no sum can tell.
_TINY = 1e-37

# Thresholds of top-p are found up to this many steps between neighbouring
# float32: a relative difference of 2^-9 to 2^-8.
_TOP_P_STEPS = 2**15


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
  """How a distribution is drawn from; traced, so changes compile nothing.

  The filters act one after the other in this order: temperature, top-k, top-p
  of what top-k left, min-p. At least one id always stays.

  Attributes:
    temperature: 0, or at least 1e-6; 0 takes the best id, the first of equals,
      and reports its log-probability at temperature 1, unfiltered.
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

  @property
  def filters(self) -> bool:
    """Whether some ids may be left out."""
    return bool(self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

  def check(self, prefix: str = ''):
    """Raises ValueError if a value is out of its range.

    Args:
      prefix: put before the names in messages, such as 'config.sampler.'.
    """
    for name, value, right, rule, fix in (
      (
        'temperature',
        self.temperature,
        self.temperature == 0 or 1e-6 <= self.temperature < float('inf'),
        'must be 0 or finite and at least 1e-6',
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
  probability 0 is never returned. Where top-p keeps many ids, those less than
  0.4 % below the least probable one may count as tied with it.

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
    kind, (_greedy, _sample_all, _sample_top), logits_BV, uniform_B, settings
  )


def _greedy(logits_BV, uniform_B, settings):
  del uniform_B, settings
  logits_BIJ = _blocks(logits_BV)
  # In two levels, because argmax over a vocabulary does not vectorise.
  max_BI = logits_BIJ.max(axis=-1)
  first_B = jnp.argmax(max_BI, axis=-1)
  logits_BJ = jnp.take_along_axis(logits_BIJ, first_B[:, None, None], axis=1)
  inside_B = jnp.argmax(logits_BJ[:, 0], axis=-1)
  id_B = first_B * logits_BIJ.shape[-1] + inside_B
  weights_BIJ = _weights(logits_BIJ, max_BI.max(axis=-1), 1.0)
  return id_B.astype(jnp.int32), -jnp.log(_total(weights_BIJ))


def _blocks(logits_BV):
  """Logits as [B, I, J]: block j is [:, :, j], its i-th id is i * J + j."""
  rows, vocab = logits_BV.shape
  blocks = -(-vocab // _BLOCK)
  return jnp.pad(
    logits_BV,
    ((0, 0), (0, blocks * _BLOCK - vocab)),
    constant_values=-jnp.inf,
  ).reshape(rows, _BLOCK, blocks)


def _weights(logits_BIJ, max_B, temperature, least=_TINY):
  """Probabilities relative to the best id's, 0 where below the least."""
  # A comparison keeps XLA from fusing the exponential into reductions, where
  # it does not vectorise.
  scaled_BIJ = (logits_BIJ - max_B[:, None, None]) / temperature
  return _keep(jnp.exp(scaled_BIJ), least)


def _keep(weights, least):
  return jnp.where(weights >= least, weights, 0)


def _total(weights_BIJ):
  return weights_BIJ.sum(axis=1).sum(axis=-1)


def _take(x_BX, index_B):
  return jnp.take_along_axis(x_BX, index_B[:, None], axis=-1)[:, 0]


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


def _draw(logits_BV, max_B, weights_BIJ, uniform_B, temperature):
  """Id and log-probability; searches sums of blocks, then inside a block."""
  sums_BJ = weights_BIJ.sum(axis=1)
  total_B = sums_BJ.sum(axis=-1)
  target_B = uniform_B * total_B
  block_B, before_B = _invert(sums_BJ, target_B)
  weights_BI1 = jnp.take_along_axis(weights_BIJ, block_B[:, None, None], 2)
  inside_B, _ = _invert(weights_BI1[:, :, 0], target_B - before_B)
  id_B = (inside_B * sums_BJ.shape[-1] + block_B).astype(jnp.int32)
  scaled_B = (_take(logits_BV, id_B) - max_B) / temperature
  return id_B, scaled_B - jnp.log(total_B)


def _sample_all(logits_BV, uniform_B, settings):
  """Without top-k and top-p: the threshold is known."""
  logits_BIJ = _blocks(logits_BV)
  max_B = logits_BIJ.max(axis=1).max(axis=-1)
  weights_BIJ = _weights(
    logits_BIJ, max_B, settings.temperature, settings.min_p
  )
  return _draw(logits_BV, max_B, weights_BIJ, uniform_B, settings.temperature)


def _sample_top(logits_BV, uniform_B, settings):
  """With top-k or top-p: from the few best ids if these hold all kept."""
  best_BK, ids_BK = _best(logits_BV)
  max_B = best_BK[:, 0]
  weights_BK = jnp.exp((best_BK - max_B[:, None]) / settings.temperature)
  floor_B = weights_BK[:, -1]
  width = weights_BK.shape[-1]

  top_k = jnp.where(settings.top_k > 0, settings.top_k, width)
  kth_B = weights_BK[:, jnp.minimum(top_k, width) - 1]
  weights_BK = _keep(weights_BK, kth_B[:, None])
  cdf_BK = jnp.cumsum(weights_BK, axis=-1)

  def whole():
    weights_BIJ = _weights(_blocks(logits_BV), max_B, settings.temperature)
    return _total(weights_BIJ)

  total_B = jax.lax.cond(
    (settings.top_k > 0) | (settings.top_p == 1), lambda: cdf_BK[:, -1], whole
  )
  before_BK = jnp.pad(cdf_BK[:, :-1], ((0, 0), (1, 0)))
  needed_BK = before_BK < (settings.top_p * total_B)[:, None]
  needed_BK = (needed_BK | (settings.top_p == 1)) & (weights_BK > 0)
  least_B = jnp.where(needed_BK, weights_BK, jnp.inf).min(axis=-1)
  least_B = jnp.maximum(least_B, settings.min_p)
  weights_BK = _keep(weights_BK, least_B[:, None])

  # Else ids outside may be kept too, for top-k or as ties.
  top_k_inside_B = (settings.top_k == 0) | (kth_B > floor_B)
  few_B = (floor_B == 0) | (top_k_inside_B & (least_B > floor_B))

  kept_B = weights_BK.sum(axis=-1)
  index_B, _ = _invert(weights_BK, uniform_B * kept_B)
  scaled_B = (_take(best_BK, index_B) - max_B) / settings.temperature
  id_B, logp_B = _take(ids_BK, index_B), scaled_B - jnp.log(kept_B)

  def search():
    weights_BIJ = _weights(_blocks(logits_BV), max_B, settings.temperature)
    least_B = _threshold(weights_BIJ, floor_B, few_B, settings)
    other_B, other_logp_B = _draw(
      logits_BV,
      max_B,
      _keep(weights_BIJ, least_B[:, None, None]),
      uniform_B,
      settings.temperature,
    )
    return (
      jnp.where(few_B, id_B, other_B),
      jnp.where(few_B, logp_B, other_logp_B),
    )

  return jax.lax.cond(jnp.all(few_B), lambda: (id_B, logp_B), search)


def _best(logits_BV):
  """The best ids, best first: their logits and ids, both [B, K]."""
  logits_BIJ = _blocks(logits_BV)
  rows, _, blocks = logits_BIJ.shape
  # The best K ids lie in the K blocks with the largest maxima.
  _, block_BC = jax.lax.top_k(logits_BIJ.max(axis=1), min(_BEST, blocks))
  inside_BIC = jnp.take_along_axis(logits_BIJ, block_BC[:, None, :], axis=2)
  id_BIC = jnp.arange(_BLOCK)[:, None] * blocks + block_BC[:, None, :]
  # Slices merged into the top-k would make XLA sort everything instead.
  best_BK, at_BK = jax.lax.optimization_barrier(
    jax.lax.top_k(inside_BIC.reshape(rows, -1), _BEST)
  )
  ids_BK = jnp.take_along_axis(id_BIC.reshape(rows, -1), at_BK, axis=-1)
  return best_BK, ids_BK.astype(jnp.int32)


def _threshold(weights_BIJ, floor_B, known_B, settings):
  """Least weight that all filters keep, for rows not known yet."""

  def count(least_B):
    return _total(jnp.where(weights_BIJ >= least_B[:, None, None], 1.0, 0.0))

  def mass(least_B):
    return _total(_keep(weights_BIJ, least_B[:, None, None]))

  bisect = functools.partial(_bisect, first_B=floor_B, known_B=known_B)
  none_B = jnp.zeros_like(floor_B)

  def kth():
    count_B = jnp.full_like(floor_B, settings.top_k)
    return bisect(count, count_B, none_B, steps=1)

  def nucleus():
    total_B = mass(kth_B)
    # Ids below this one hold less than half of what is cut off together.
    low_B = 0.5 * (1 - settings.top_p) * total_B / count(none_B)
    return bisect(
      mass,
      settings.top_p * total_B,
      jnp.maximum(low_B, kth_B),
      steps=_TOP_P_STEPS,
    )

  kth_B = jax.lax.cond(settings.top_k > 0, kth, lambda: none_B)
  least_B = jax.lax.cond(settings.top_p < 1, nucleus, lambda: kth_B)
  return jnp.maximum(least_B, settings.min_p)


def _bisect(measure, target_B, low_B, *, first_B, known_B, steps):
  """Largest threshold from low to 1 whose measure reaches the target.

  Works on the bits of float32, whose order is that of the numbers above 0.

  Args:
    measure: of a threshold [B]; falls with it, reaches the target at low.
    target_B: what to reach.
    low_B: at least 0.
    first_B: what to try first; it lies near the threshold or above it.
    known_B: bool, rows to leave out.
    steps: how near is enough, counted in float32 numbers.
  """

  def bits(x_B):
    return jax.lax.bitcast_convert_type(x_B, jnp.int32)

  def value(bits_B):
    return jax.lax.bitcast_convert_type(bits_B, jnp.float32)

  def open_rows(low_B, high_B, reached_B):
    return ~known_B & (high_B - low_B > steps) & (reached_B != target_B)

  def narrow(carry):
    at_B, low_B, high_B, reached_B = carry
    measure_B = measure(value(at_B))
    open_B = open_rows(low_B, high_B, reached_B)
    up_B = open_B & (measure_B >= target_B)
    low_B = jnp.where(up_B, at_B, low_B)
    high_B = jnp.where(open_B & ~up_B, at_B, high_B)
    reached_B = jnp.where(up_B, measure_B, reached_B)
    return low_B + (high_B - low_B) // 2, low_B, high_B, reached_B

  low_B, high_B = bits(low_B), bits(jnp.ones_like(low_B)) + 1
  _, low_B, _, _ = jax.lax.while_loop(
    lambda carry: jnp.any(open_rows(*carry[1:])),
    narrow,
    (
      jnp.clip(bits(first_B), low_B, high_B),
      low_B,
      high_B,
      jnp.full_like(first_B, -1),
    ),
  )
  return value(low_B)
