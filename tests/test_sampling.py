"""Sampling draws from the filtered distribution, as defined by sorting."""

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

# Log-probabilities this much below the cut of top-p may count as tied.
RESOLUTION = 0.004

FILTERS = (
  {'top_k': 3},
  {'top_k': 40},
  {'top_k': 100},
  {'top_p': 0.5},
  {'top_p': 0.95},
  {'min_p': 0.1},
  {'top_k': 20, 'top_p': 0.8},
  {'top_k': 100, 'top_p': 0.3},
  {'top_k': 90, 'top_p': 0.95, 'min_p': 0.02},
  {'top_p': 0.97, 'min_p': 0.05},
)
TEMPERED = (
  {},
  {'temperature': 0.1},
  {'temperature': 5.0},
  {'temperature': 0.6, 'top_p': 0.9},
  {'temperature': 5.0, 'top_k': 70, 'min_p': 0.3},
)

_sample = jax.jit(sampling.sample)


def _named(values):
  return '-'.join(f'{k}={v}' for k, v in values.items()) or 'plain'


def _logits(vocab, spread, seed):
  """Random logits; peaked ones have a few ids far above the others."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=vocab) * 1.5
  if spread == 'peaked':
    few = rng.permutation(vocab)[: min(8, vocab // 2)]
    logits[few] += rng.uniform(5, 16, size=len(few))
  return logits.astype(np.float32)


def _scaled(logits, settings):
  return logits.astype(np.float64) / settings.temperature


def _kept(logits, settings):
  """The definition, by sorting, in float64: which ids are kept, [V] bool."""
  scaled = _scaled(logits, settings)
  probs = np.exp(scaled - scaled.max())
  kept = probs > 0
  if settings.top_k:
    best_first = np.sort(probs)[::-1]
    kept &= probs >= best_first[min(settings.top_k, probs.size) - 1]
  if settings.top_p < 1:
    probs = np.where(kept, probs, 0) / probs[kept].sum()
    order = np.argsort(-probs, kind='stable')
    before = np.cumsum(probs[order]) - probs[order]
    kept &= probs >= probs[order][before < settings.top_p].min()
  return kept & (probs >= settings.min_p * probs.max())


def _choices(logits, settings):
  """What may be kept: the definition, then with ids tied to the cut added."""
  kept = _kept(logits, settings)
  choices = [kept]
  if settings.top_p < 1:
    scaled = _scaled(logits, settings)
    cut = scaled[kept].min()
    tied = np.flatnonzero((scaled < cut) & (scaled > cut - RESOLUTION))
    for id_ in tied[np.argsort(-scaled[tied])]:
      choices.append(choices[-1].copy())
      choices[-1][id_] = True
  return choices


def _log_probs(logits, settings, kept):
  scaled = np.where(kept, _scaled(logits, settings), -np.inf)
  return scaled - np.logaddexp.reduce(scaled)


def _matching(logits, settings, ids, logps):
  """The choice that explains the draws; fails if there is none."""
  for kept in _choices(logits, settings):
    expected = _log_probs(logits, settings, kept)[ids]
    if np.allclose(logps, expected, rtol=0, atol=1e-5):
      return kept
  kept = _kept(logits, settings)
  np.testing.assert_allclose(
    logps, _log_probs(logits, settings, kept)[ids], rtol=0, atol=1e-5
  )


@pytest.mark.parametrize('values', FILTERS + TEMPERED, ids=_named)
@pytest.mark.parametrize(
  'vocab, spread, draws',
  [
    (5, 'flat', 40_000),
    (128, 'flat', 40_000),
    (300, 'flat', 40_000),
    (300, 'peaked', 40_000),
    (5000, 'flat', 1000),
  ],
)
def test_draws_follow_the_filtered_distribution(vocab, spread, draws, values):
  settings = sampling.Settings(**values)
  logits = _logits(vocab, spread, seed=vocab)
  logits[[1, vocab - 1]] = NEVER
  tiled = jnp.broadcast_to(logits, (draws, vocab))
  ids, logps = _sample(tiled, jax.random.uniform(KEY, (draws,)), settings)
  kept = _matching(logits, settings, np.asarray(ids), logps)
  assert not kept[1] and not kept[vocab - 1]

  probs = np.exp(_log_probs(logits, settings, kept))
  counts = np.bincount(ids, minlength=vocab)
  assert counts[~kept].sum() == 0
  # Neighbours are taken together until about 20 draws are due to them.
  groups = (np.cumsum(probs) * draws / 20).astype(int)
  means = np.bincount(groups, probs * draws)
  seen = np.bincount(groups, counts)
  rare = means < 5
  means = np.append(means[~rare], means[rare].sum())
  seen = np.append(seen[~rare], seen[rare].sum())
  chi2 = np.sum((seen - means)[means > 0] ** 2 / means[means > 0])
  # Mean degrees, deviation sqrt(2 x degrees): five deviations.
  degrees = np.sum(means > 0) - 1
  assert chi2 < 1e-6 + degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize('values', FILTERS, ids=_named)
@pytest.mark.parametrize('spread', ['flat', 'peaked'])
def test_exactly_the_right_ids_are_kept(spread, values):
  """The log-probability tells the set: it holds the weight of all kept ids."""
  settings = sampling.Settings(**values)
  rows = np.stack([_logits(700, spread, seed) for seed in range(100)])
  uniform = np.linspace(0, 0.999, 100).astype(np.float32)
  ids, logps = _sample(rows, uniform, settings)
  for row, id_, logp in zip(rows, ids, logps, strict=True):
    assert _matching(row, settings, id_, logp)[id_]


@pytest.mark.parametrize('values', FILTERS, ids=_named)
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
    theirs = np.flatnonzero(torch.isfinite(scores)[0].numpy())
    # As many draws as find every id: each has 1/1000 at least.
    draws = 2000
    uniform = (np.arange(draws, dtype=np.float32) + 0.5) / draws
    ids, logps = _sample(jnp.tile(row, (draws, 1)), uniform, settings)
    kept = _matching(row, settings, np.asarray(ids), logps)
    likely = np.exp(_log_probs(row, settings, kept)) > 1e-3
    assert set(np.flatnonzero(kept & likely)) <= set(ids.tolist())
    extra = set(np.flatnonzero(kept)) ^ set(theirs)
    assert extra <= set(np.flatnonzero(kept & ~_kept(row, settings)))


@pytest.mark.parametrize('values', [{}, {'min_p': 0.5}, {'top_k': 9}])
def test_the_cdf_is_inverted_at_its_edges(values):
  ids = [2, 140, 141, 260]
  logits = np.full(300, NEVER)
  logits[ids] = np.log(0.25)
  below_one = np.nextafter(np.float32(1), np.float32(0))
  # 1 itself is never drawn, but a target may be rounded up to the total.
  uniform = np.asarray([0, 0.3, 0.6, below_one, 1], np.float32)
  drawn, logps = _sample(
    np.tile(logits, (5, 1)), uniform, sampling.Settings(**values)
  )
  assert sorted(drawn[:4].tolist()) == ids and drawn[4] == drawn[3]
  np.testing.assert_allclose(logps, np.log(0.25), atol=1e-6)


@pytest.mark.parametrize('vocab', [5, 300, 5000])
@pytest.mark.parametrize(
  'values', [{'top_k': 3}, {'top_p': 0.4}, {'min_p': 1.0}], ids=_named
)
def test_equal_logits_are_all_kept(vocab, values):
  logits = np.zeros((50, vocab), np.float32)
  uniform = np.linspace(0, 0.999, 50).astype(np.float32)
  ids, logps = _sample(logits, uniform, sampling.Settings(**values))
  np.testing.assert_allclose(logps, -np.log(vocab), atol=1e-5)
  assert len(set(ids.tolist())) == min(vocab, 50)


def test_ties_with_the_cut_are_kept():
  """Three logits of 2, a hundred of 1: a cut among the ones keeps them all."""
  logits = np.full((1, 900), NEVER)
  logits[0, :3] = 2
  logits[0, 400:500] = 1
  probs = np.exp(logits[0] - 2.0)
  for values in ({'top_k': 4}, {'top_p': 3.5 / probs.sum()}):
    _, logp = _sample(
      logits, np.zeros(1, np.float32), sampling.Settings(**values)
    )
    np.testing.assert_allclose(logp, -np.log(probs.sum()), atol=1e-5)
  # Top-p is of what top-k left, its ties included: the twos just suffice.
  both = sampling.Settings(top_k=4, top_p=2.99 / probs.sum())
  ids, logp = _sample(logits, np.zeros(1, np.float32), both)
  np.testing.assert_allclose(logp, -np.log(3), atol=1e-5)
  assert ids[0] < 3


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


@pytest.mark.parametrize('vocab', [5, 128, 3000])
def test_greedy_takes_the_first_best_id_and_reports_it_unfiltered(vocab):
  settings = sampling.Settings(temperature=0, top_k=2, top_p=0.1, min_p=0.5)
  rows = np.stack([_logits(vocab, 'flat', seed) for seed in range(20)])
  rows[10:] = np.round(rows[10:])
  ids, logps = _sample(rows, np.full(20, 0.7, np.float32), settings)
  np.testing.assert_array_equal(ids, rows.argmax(axis=-1))
  expected = jax.nn.log_softmax(rows)[np.arange(20), ids]
  np.testing.assert_allclose(logps, expected, atol=1e-5)


@pytest.mark.parametrize(
  'values', [*FILTERS, {}, {'temperature': 0.0}], ids=_named
)
def test_a_row_does_not_depend_on_its_neighbours(values):
  """Peaked and flat rows take different paths; together they stay the same."""
  settings = sampling.Settings(**values)
  rows = np.stack(
    [_logits(700, ('flat', 'peaked')[seed % 2], seed) for seed in range(8)]
  )
  rows[6] = 0
  uniform = np.asarray(jax.random.uniform(KEY, (8,)))
  ids, logps = _sample(rows, uniform, settings)
  for row in range(8):
    others = np.tile(rows[row], (8, 1))
    alone = _sample(others, np.full(8, uniform[row]), settings)
    assert alone[0].tolist() == [ids[row]] * 8
    assert alone[1].tolist() == [logps[row]] * 8


def test_settings_change_without_compiling():
  traces = []

  @jax.jit
  def draw(logits, uniform, settings):
    traces.append(settings)
    return sampling.sample(logits, uniform, settings)

  row = _logits(300, 'flat', 0)[None]
  for values in FILTERS + TEMPERED + ({'temperature': 0.0},):
    draw(row, np.float32([0.5]), sampling.Settings(**values))
  assert len(traces) == 1


def test_settings_out_of_range_are_named():
  sampling.Settings().check()
  sampling.Settings(temperature=0, top_p=0.1, top_k=5, min_p=1.0).check()
  nan = float('nan')
  for name, bad, rule in (
    ('temperature', (-0.1, 1e-9, float('inf'), nan), 'must be 0 or finite'),
    ('top_p', (0, -0.5, 1.01, nan), 'must be above 0 and at most 1'),
    ('top_k', (-1, 2.5), 'must be a whole number, at least 0'),
    ('min_p', (-0.1, 1.5, nan), 'must be in 0..1'),
  ):
    for value in bad:
      settings = sampling.Settings(**{name: value})
      with pytest.raises(ValueError, match=f'sampler.{name}={value} {rule}'):
        settings.check('sampler.')
