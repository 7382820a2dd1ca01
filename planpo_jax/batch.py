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
    turn_BT: [B, T] int32, turn that the token is a response of, counted from 1
      in each row; 0 outside of responses.
    flat_BT: [B, T] int32, place of the token on axis R of `episodes.tabulate`;
      0 outside of responses.
    adv_BT: [B, T] float32, advantage of sampled tokens; 0 until filled in, see
      `with_advantages`.
    sampler_logp_BT: [B, T] float32, nats, as reported when sampling.
    old_logp_BT: [B, T] float32, nats, before the first update; 0 until scored.
    ref_logp_BT: [B, T] float32, nats, of the reference; 0 until scored.
    value_BTC: [B, T, C] float32, what the critic expects before the token, a
      column a head; None without a critic, as are the next two.
    target_BTC: [B, T, C] float32, what it is to learn.
    target_mask_BTC: [B, T, C] bool, where.
  """

  tokens_BT: np.ndarray | jax.Array
  positions_BT: np.ndarray | jax.Array
  segment_ids_BT: np.ndarray | jax.Array
  loss_mask_BT: np.ndarray | jax.Array
  turn_BT: np.ndarray | jax.Array
  flat_BT: np.ndarray | jax.Array
  adv_BT: np.ndarray | jax.Array
  sampler_logp_BT: np.ndarray | jax.Array
  old_logp_BT: np.ndarray | jax.Array
  ref_logp_BT: np.ndarray | jax.Array
  value_BTC: np.ndarray | jax.Array | None = None
  target_BTC: np.ndarray | jax.Array | None = None
  target_mask_BTC: np.ndarray | jax.Array | None = None


def shapes(num_rows: int, row_len: int) -> Batch:
  """A batch without a critic, as shapes and types."""
  whole, real = (
    jax.ShapeDtypeStruct((num_rows, row_len), dtype)
    for dtype in (np.int32, np.float32)
  )
  return Batch(
    tokens_BT=whole,
    positions_BT=whole,
    segment_ids_BT=whole,
    loss_mask_BT=jax.ShapeDtypeStruct((num_rows, row_len), np.bool_),
    turn_BT=whole,
    flat_BT=whole,
    adv_BT=real,
    sampler_logp_BT=real,
    old_logp_BT=real,
    ref_logp_BT=real,
  )


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """One segment before packing; arrays over its tokens."""

  tokens: np.ndarray
  loss_mask: np.ndarray
  turn: np.ndarray
  flat: np.ndarray
  sampler_logp: np.ndarray


def _sequence(turns: Sequence[episodes.Turn], first: int) -> _Sequence:
  """Joins prompts and responses of consecutive turns.

  `first` is the place of the first response token on axis R.
  """
  tokens, turn_ids, logps = [], [], []
  count = 0
  for turn in turns:
    tokens += [*turn.prompt_ids, *turn.response_ids]
    length = len(turn.response_ids)
    count += length > 0
    turn_ids += [0] * len(turn.prompt_ids) + [count] * length
    logps += [0.0] * len(turn.prompt_ids) + list(turn.response_logps)
  loss_mask = np.array(turn_ids, np.int32) > 0
  flat = np.zeros(len(tokens), np.int32)
  flat[loss_mask] = first + np.arange(loss_mask.sum())
  return _Sequence(
    tokens=np.array(tokens, np.int32),
    loss_mask=loss_mask,
    turn=np.array(turn_ids, np.int32),
    flat=flat,
    sampler_logp=np.array(logps, np.float32),
  )


def _sequences(
  batch_episodes: Sequence[episodes.Episode], context: str
) -> list[_Sequence]:
  """Cuts episodes into sequences; those without a sampled token are left out.

  Tokens are counted in the order in which `episodes.tabulate` lays them out.
  """
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
      sequences.append(_sequence(turns, start))
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
    ValueError: unknown context, a sequence longer than row_len, or sizes below
      1.
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
  sequences = _sequences(batch_episodes, context)
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

  out = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    shapes(minibatches * num_rows, row_len),
  )
  for m, rows in enumerate(packed):
    for r, row in enumerate(rows):
      b, start, turns = m * num_rows + r, 0, 0
      for segment, i in enumerate(row, start=1):
        sequence = sequences[i]
        span = slice(start, start + len(sequence.tokens))
        out.tokens_BT[b, span] = sequence.tokens
        out.positions_BT[b, span] = np.arange(len(sequence.tokens))
        out.segment_ids_BT[b, span] = segment
        out.loss_mask_BT[b, span] = sequence.loss_mask
        out.turn_BT[b, span] = np.where(
          sequence.turn > 0, sequence.turn + turns, 0
        )
        turns += int(sequence.turn.max())
        out.flat_BT[b, span] = sequence.flat
        out.sampler_logp_BT[b, span] = sequence.sampler_logp
        start = span.stop
  return out


def with_advantages(
  batch: Batch,
  adv_R: np.ndarray | jax.Array,
  trained_R: np.ndarray | None = None,
) -> Batch:
  """Fills advantages in; host arrays, as `pack` made them.

  Args:
    batch: of the episodes that the advantages were computed from.
    adv_R: [R] from an estimator.
    trained_R: [R] bool, tokens that are trained; the others leave the loss
      mask. None: all.

  Raises:
    ValueError: the advantages are fewer than the response tokens.
  """
  mask_BT = batch.loss_mask_BT
  if trained_R is not None:
    mask_BT = mask_BT & to_rows(batch, trained_R)
  return dataclasses.replace(
    batch,
    adv_BT=to_rows(batch, np.asarray(adv_R, np.float32)),
    loss_mask_BT=mask_BT,
  )


def with_targets(
  batch: Batch, target_RC: np.ndarray, mask_RC: np.ndarray
) -> Batch:
  """Fills in what the critic is to learn; host arrays.

  Args:
    batch: of the episodes that the targets were computed from.
    target_RC: [R, C] float32 values, a column a head.
    mask_RC: [R, C] bool, where they are learnt.
  """
  return dataclasses.replace(
    batch,
    target_BTC=to_rows(batch, np.asarray(target_RC, np.float32)),
    target_mask_BTC=to_rows(batch, np.asarray(mask_RC, np.bool_)),
  )


def to_rows(batch: Batch, x_R: np.ndarray) -> np.ndarray:
  """Returns [B, T, ...] what each response token has in x_R; 0 elsewhere.

  Raises:
    ValueError: x_R is shorter than there are response tokens.
  """
  x_R = np.asarray(x_R)
  response_BT = batch.turn_BT > 0
  needed = int(batch.flat_BT.max(initial=-1, where=response_BT)) + 1
  if needed > len(x_R):
    raise ValueError(
      f'{len(x_R)} values for the {needed} response tokens of the batch; give '
      'the values of the episodes that were packed.'
    )
  rows = np.zeros((*response_BT.shape, *x_R.shape[1:]), x_R.dtype)
  rows[response_BT] = x_R[batch.flat_BT[response_BT]]
  return rows


def to_flat(batch: Batch, x_BT: np.ndarray, num_R: int) -> np.ndarray:
  """Returns [R, ...] what each response token has in [B, T, ...]; 0 on padding.

  The inverse of `to_rows`.
  """
  x_BT = np.asarray(x_BT)
  response_BT = batch.turn_BT > 0
  flat = np.zeros((num_R, *x_BT.shape[2:]), x_BT.dtype)
  flat[batch.flat_BT[response_BT]] = x_BT[response_BT]
  return flat


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
