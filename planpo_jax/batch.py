"""Batch: episodes packed into rows, the form that the network reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from planpo_jax import episodes

CONTEXTS = ('conversation', 'window')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows; a row holds whole sequences one after the other.

  A log-probability at [b, t] is that of tokens_BT[b, t] given what precedes it
  in its segment.

  Attributes:
    tokens_BT: [B, T] int32, 0 on padding.
    positions_BT: [B, T] int32, from 0 in each segment.
    segment_ids_BT: [B, T] int32, from 1 in each row; 0 is padding.
    loss_mask_BT: [B, T] bool, true exactly on tokens that the policy sampled.
    turn_tokens_BT: [B, T] int32, L_it of the response the token belongs to, 0
      outside of responses.
    adv_BT: [B, T] float32, advantage of sampled tokens.
    sampler_logp_BT: [B, T] float32, nats, as reported when sampling.
    old_logp_BT: [B, T] float32, nats, before the first update; 0 until scored.
    ref_logp_BT: [B, T] float32, nats, of the reference; 0 until scored.
  """

  tokens_BT: np.ndarray | jax.Array
  positions_BT: np.ndarray | jax.Array
  segment_ids_BT: np.ndarray | jax.Array
  loss_mask_BT: np.ndarray | jax.Array
  turn_tokens_BT: np.ndarray | jax.Array
  adv_BT: np.ndarray | jax.Array
  sampler_logp_BT: np.ndarray | jax.Array
  old_logp_BT: np.ndarray | jax.Array
  ref_logp_BT: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """One segment before packing; arrays over its tokens."""

  tokens: np.ndarray
  loss_mask: np.ndarray
  turn_tokens: np.ndarray
  adv: np.ndarray
  sampler_logp: np.ndarray


def _sequence(turns: Sequence[episodes.Turn], adv: np.ndarray) -> _Sequence:
  """Joins prompts and responses of consecutive turns."""
  tokens, turn_tokens, logps = [], [], []
  for turn in turns:
    tokens += [*turn.prompt_ids, *turn.response_ids]
    length = len(turn.response_ids)
    turn_tokens += [0] * len(turn.prompt_ids) + [length] * length
    logps += [0.0] * len(turn.prompt_ids) + list(turn.response_logps)
  turn_tokens = np.array(turn_tokens, np.int32)
  adv_full = np.zeros(len(tokens), np.float32)
  adv_full[turn_tokens > 0] = adv
  return _Sequence(
    tokens=np.array(tokens, np.int32),
    loss_mask=turn_tokens > 0,
    turn_tokens=turn_tokens,
    adv=adv_full,
    sampler_logp=np.array(logps, np.float32),
  )


def _sequences(
  batch_episodes: Sequence[episodes.Episode], adv_R: np.ndarray, context: str
) -> list[_Sequence]:
  """Cuts episodes into sequences; those without a sampled token are left out.

  Reads `adv_R` in the order in which `episodes.tabulate` lays tokens out.
  """
  adv_R = np.asarray(adv_R, np.float32)
  sequences, start = [], 0
  for episode in batch_episodes:
    pieces = (
      [episode.turns]
      if context == 'conversation'
      else [(turn,) for turn in episode.turns]
    )
    for turns in pieces:
      length = sum(len(turn.response_ids) for turn in turns)
      if not length:
        continue
      if start + length > len(adv_R):
        raise ValueError(
          f'adv_R has {len(adv_R)} entries but the episodes have more response '
          'tokens; give the episodes that the advantages were computed from.'
        )
      sequences.append(_sequence(turns, adv_R[start : start + length]))
      start += length
  return sequences


def _fill_rows(lengths: Sequence[int], row_len: int) -> list[list[int]]:
  """First-fit decreasing: returns the indices that share each row."""
  rows: list[list[int]] = []
  free: list[int] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    row = next((r for r, room in enumerate(free) if room >= lengths[i]), None)
    if row is None:
      row = len(rows)
      rows.append([])
      free.append(row_len)
    rows[row].append(i)
    free[row] -= lengths[i]
  return rows


def pack(
  batch_episodes: Sequence[episodes.Episode],
  adv_R: np.ndarray | jax.Array,
  *,
  context: str,
  row_len: int,
  minibatches: int = 1,
  row_multiple: int = 1,
  seed: int = 0,
) -> Batch:
  """Packs episodes into a Batch of host arrays.

  Sequences are shuffled, dealt to minibatches so that these have about the same
  number of response tokens (they differ by less than the longest sequence), and
  packed there. Minibatch i is the i-th contiguous block of B / minibatches
  rows, see `split`; its padding rows come last.

  Args:
    batch_episodes: the episodes that were tabulated, in the same order.
    adv_R: [R] advantages from an estimator.
    context: `conversation`, a sequence an episode: its turns joined; `window`,
      a sequence a turn.
    row_len: T, tokens.
    minibatches: contiguous blocks to split into.
    row_multiple: rows of a minibatch are a multiple of it: rows of a
      micro-batch, hence of the devices.
    seed: of the shuffle.

  Returns:
    B is `minibatches * row_multiple` times a bucket, so that shapes recur.

  Raises:
    ValueError: unknown context, a sequence longer than row_len, advantages that
      are fewer than the response tokens, or sizes below 1.
  """
  if context not in CONTEXTS:
    raise ValueError(
      f'context={context!r} is unknown; use one of {", ".join(CONTEXTS)}.'
    )
  for name, size in (
    ('row_len', row_len),
    ('minibatches', minibatches),
    ('row_multiple', row_multiple),
  ):
    if size < 1:
      raise ValueError(f'{name}={size} must be at least 1.')
  sequences = _sequences(batch_episodes, np.asarray(adv_R), context)
  longest = max((len(s.tokens) for s in sequences), default=0)
  if longest > row_len:
    raise ValueError(
      f'A sequence has {longest} tokens, more than row_len={row_len}; raise '
      'row_len or lower the limit of tokens of a rollout.'
    )

  dealt: list[list[int]] = [[] for _ in range(minibatches)]
  load = [0] * minibatches
  for i in np.random.default_rng(seed).permutation(len(sequences)):
    lightest = load.index(min(load))
    dealt[lightest].append(int(i))
    load[lightest] += int(sequences[i].loss_mask.sum())
  packed = []
  for indices in dealt:
    rows = _fill_rows([len(sequences[i].tokens) for i in indices], row_len)
    packed.append([[indices[j] for j in row] for row in rows])
  blocks = -(-max(len(rows) for rows in packed) // row_multiple)
  num_rows = row_multiple * episodes.bucket(blocks)

  shape = (minibatches * num_rows, row_len)
  out = Batch(
    tokens_BT=np.zeros(shape, np.int32),
    positions_BT=np.zeros(shape, np.int32),
    segment_ids_BT=np.zeros(shape, np.int32),
    loss_mask_BT=np.zeros(shape, np.bool_),
    turn_tokens_BT=np.zeros(shape, np.int32),
    adv_BT=np.zeros(shape, np.float32),
    sampler_logp_BT=np.zeros(shape, np.float32),
    old_logp_BT=np.zeros(shape, np.float32),
    ref_logp_BT=np.zeros(shape, np.float32),
  )
  for m, rows in enumerate(packed):
    for r, row in enumerate(rows):
      b, start = m * num_rows + r, 0
      for segment, i in enumerate(row, start=1):
        sequence = sequences[i]
        span = slice(start, start + len(sequence.tokens))
        out.tokens_BT[b, span] = sequence.tokens
        out.positions_BT[b, span] = np.arange(len(sequence.tokens))
        out.segment_ids_BT[b, span] = segment
        out.loss_mask_BT[b, span] = sequence.loss_mask
        out.turn_tokens_BT[b, span] = sequence.turn_tokens
        out.adv_BT[b, span] = sequence.adv
        out.sampler_logp_BT[b, span] = sequence.sampler_logp
        start = span.stop
  return out


def split(batch: Batch, minibatches: int) -> list[Batch]:
  """Returns the contiguous blocks of rows that `pack` prepared.

  Raises:
    ValueError: the rows do not divide into so many blocks.
  """
  num_rows = batch.tokens_BT.shape[0]
  if num_rows % minibatches:
    raise ValueError(
      f'minibatches={minibatches} must divide the {num_rows} rows; pack with '
      'the same number.'
    )
  size = num_rows // minibatches
  return [
    jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
    for i in range(minibatches)
  ]
