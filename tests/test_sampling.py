"""Sampling draws from the filtered distribution, by an independent count."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from planpo_jax import sampling

KEY = jax.random.key(5)
NEVER = np.float32(-1e30)

_sample = jax.jit(sampling.sample)

FILTERS = (
  {},
  {'top_k': 3},
  {'top_k': 40},
  {'top_k': 100},
  {'top_p': 0.5},
  {'top_p': 0.9},
  {'min_p': 0.1},
  {'top_k': 20, 'top_p': 0.8},
  {'top_k': 90, 'top_p': 0.95, 'min_p': 0.02},
  {'top_p': 0.97, 'min_p': 0.05},
)
TEMPERED = (
  *FILTERS,
  {'temperature': 0.6, 'top_p': 0.9},
  {'temperature': 5.0},
  {'temperature': 2.0, 'top_k': 70, 'min_p': 0.3},
)


def _named(values):
  return '-'.join(f'{k}={v}' for k, v in values.items()) or 'plain'


def _logits(vocab, spread, seed=0):
  """Random logits; peaked ones have a few ids far above the others."""
  rng = np.random.default_rng(seed)
  if spread == 'flat':
    logits = rng.normal(size=vocab) * 1.5
  else:
    logits = rng.normal(size=vocab) * 2
    few = rng.permutation(vocab)[: min(8, vocab // 2)]
    logits[few] += rng.uniform(5, 16, size=len(few))
  return logits.astype(np.float32)


def _kept(logits, settings, top_p=None):
  """Definition by sorting, float64: (kept [V] bool, log-probability [V])."""
  scaled = logits.astype(np.float64) / settings.temperature
  probs = np.exp(scaled - scaled.max())
  kept = probs > 0
  if settings.top_k:
    kth = np.sort(probs)[::-1][min(settings.top_k, probs.size) - 1]
    kept &= probs >= kth
  probs = np.where(kept, probs, 0) / probs[kept].sum()
  top_p = settings.top_p if top_p is None else top_p
  if top_p < 1:
    best_first = np.argsort(-probs, kind='stable')
    before = np.cumsum(probs[best_first]) - probs[best_first]
    last = probs[best_first][np.flatnonzero(before < top_p)[-1]]
    kept &= probs >= last
  kept &= probs >= settings.min_p * probs.max()
  total = np.exp(scaled[kept] - scaled.max()).sum()
  return kept, np.where(kept, scaled - scaled.max() - np.log(total), -np.inf)


def _draw_all(logits, settings, draws=4000):
  """Ids and log-probabilities at evenly spaced numbers."""
  uniform = (np.arange(draws, dtype=np.float32) + 0.5) / draws
  ids, logps = _sample(
    jnp.broadcast_to(logits, (draws, logits.size)), uniform, settings
  )
  return np.asarray(ids), np.asarray(logps)


@pytest.mark.parametrize('values', TEMPERED, ids=_named)
@pytest.mark.parametrize(
  'vocab, spread',
  [*itertools.product([5, 128, 300], ['flat', 'peaked']), (5000, 'flat')],
)
def test_draws_follow_the_filtered_distribution(vocab, spread, values):
  settings = sampling.Settings(**values)
  logits = _logits(vocab, spread, seed=vocab)
  logits[[1, vocab - 1]] = NEVER
  draws = 40_000
  uniform = np.asarray(jax.random.uniform(KEY, (draws,)))
  # In chunks, so that the large vocabulary fits in the cache.
  size = draws if vocab < 5000 else 2000
  tiled = jnp.broadcast_to(logits, (size, vocab))
  parts = [
    _sample(tiled, uniform[at : at + size], settings)
    for at in range(0, draws, size)
  ]
  ids = np.concatenate([part[0] for part in parts])
  logps = np.concatenate([part[1] for part in parts])

  kept, expected = _kept(logits, settings)
  counts = np.bincount(ids, minlength=vocab)
  # Ids tied with the cut of top-p, by the stated resolution, may stay.
  tied = expected.min(initial=0, where=kept) - 0.002
  scaled = logits.astype(np.float64) / settings.temperature
  scaled -= scaled.max()
  normaliser = (scaled - expected)[kept][0]
  assert (scaled[np.flatnonzero(counts)] - normaliser >= tied).all()
  assert counts[1] == 0 and counts[vocab - 1] == 0
  np.testing.assert_allclose(
    logps, scaled[ids] - normaliser, atol=1e-5 if settings.top_p == 1 else 1e-3
  )
  means = np.where(kept, np.exp(expected), 0) * draws
  likely = means >= 5
  chi2 = np.sum((counts - means)[likely] ** 2 / means[likely])
  # Mean likely.sum() - 1, deviation sqrt(2 x mean): five deviations.
  degrees = likely.sum() - 1
  assert chi2 <= degrees + 5 * np.sqrt(2 * degrees)


def _set_of(logits, settings):
  """Ids that are ever drawn, and the total their log-probabilities imply."""
  ids, logps = _draw_all(logits, settings)
  scaled = logits.astype(np.float64) / settings.temperature
  return set(ids.tolist()), scaled[ids] - logps


@pytest.mark.parametrize('values', FILTERS[1:], ids=_named)
@pytest.mark.parametrize('spread', ['flat', 'peaked'])
def test_exactly_the_right_ids_are_kept(spread, values):
  """The log-probability tells which ids were kept, drawn or not.

  Kept sets are compared by their total weight, which one id more or less
  changes by far more than the tolerance.
  """
  settings = sampling.Settings(**values)
  rows = np.stack([_logits(700, spread, seed) for seed in range(60)])
  uniform = np.linspace(0, 0.999, 60).astype(np.float32)
  ids, logps = _sample(rows, uniform, settings)
  for row, id_, logp in zip(rows, ids, logps, strict=True):
    kept, expected = _kept(row, settings)
    scaled = row.astype(np.float64)
    cut = scaled[kept].min()
    # Ids within the resolution of top-p below the cut may be kept too.
    close = (scaled < cut) & (scaled > cut - 0.002) & (settings.top_p < 1)
    totals = [np.log(np.exp(scaled[kept]).sum())]
    for order in np.argsort(-scaled[close]):
      more = np.exp(scaled[close][: order + 1]).sum()
      totals.append(np.logaddexp(totals[0], np.log(more)))
    assert min(abs(scaled[id_] - logp - t) for t in totals) < 1e-5
    assert (kept | close)[id_]
    if not close.any():
      np.testing.assert_allclose(logp, expected[id_], atol=1e-5)


@pytest.mark.parametrize('values', FILTERS[1:], ids=_named)
def test_the_kept_ids_are_those_of_transformers(values):
  settings = sampling.Settings(**values)
  warpers = []
  if settings.top_k:
    warpers.append(transformers.TopKLogitsWarper(settings.top_k))
  if settings.top_p < 1:
    warpers.append(transformers.TopPLogitsWarper(settings.top_p))
  if settings.min_p:
    warpers.append(transformers.MinPLogitsWarper(settings.min_p))
  for seed, spread in itertools.product(range(10), ['flat', 'peaked']):
    row = _logits(300, spread, seed)
    scores = torch.from_numpy(row)[None]
    for warper in warpers:
      scores = warper(None, scores)
    expected = torch.log_softmax(scores.double(), dim=-1)[0].numpy()
    ids, logps = _draw_all(row, settings, draws=64)
    near = 1e-5 if settings.top_p == 1 else 3e-4
    np.testing.assert_allclose(logps, expected[ids], atol=near)


@pytest.mark.parametrize('values', FILTERS, ids=_named)
def test_the_cdf_is_inverted_at_its_edges(values):
  settings = sampling.Settings(**values)
  ids = [2, 140, 141, 260]
  logits = np.full(300, NEVER)
  logits[ids] = np.log(0.25)
  below_one = np.nextafter(np.float32(1), np.float32(0))
  # 1 itself is never drawn, but a target may be rounded up to the total.
  uniform = np.asarray([0, 0.3, 0.6, below_one, 1], np.float32)
  drawn, logps = _sample(np.tile(logits, (5, 1)), uniform, settings)
  drawn = drawn.tolist()
  # All four tie, so no filter can part them, except the top half of them.
  kept = 2 if settings.top_p == 0.5 else 4
  assert sorted(set(drawn)) == ids
  assert len(set(drawn[:4])) == 4 and drawn[3] == drawn[4]
  np.testing.assert_allclose(logps, np.log(0.25), atol=1e-6)
  assert kept


@pytest.mark.parametrize('temperature', [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
  'values', [{'top_k': 1}, {'top_p': 1e-6}, {'min_p': 1.0}], ids=_named
)
def test_the_tightest_filters_take_the_best_id(values, temperature):
  settings = sampling.Settings(temperature=temperature, **values)
  rows = np.stack([_logits(300, 'flat', seed) for seed in range(20)])
  uniform = np.linspace(0, 1, 20).astype(np.float32)
  ids, logps = _sample(rows, uniform, settings)
  np.testing.assert_array_equal(ids, rows.argmax(axis=-1))
  np.testing.assert_allclose(logps, 0, atol=1e-6)
