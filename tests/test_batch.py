"""pack: every sampled token in exactly one place, and nothing else trained."""

import jax
import numpy as np
import pytest

from planpo_jax import batch as batch_lib
from planpo_jax import episodes
from tests import make_episodes


def random_episodes(seed=0, count=9):
  """Token ids are unique over the batch, so provenance can be told."""
  rng = np.random.default_rng(seed)
  result, first_id = [], 1
  for i in range(count):
    lengths = [int(n) for n in rng.integers(0, 7, rng.integers(1, 5))]
    lengths[0] += 1
    episode = make_episodes.episode(
      lengths, member=i, prompt=int(rng.integers(1, 5)), first_id=first_id
    )
    first_id += 200
    result.append(episode)
  return result


def adv_of(batch_episodes):
  """Advantage of a token = its id / 1000, in the order of the table."""
  ids = [
    i
    for episode in batch_episodes
    for turn in episode.turns
    for i in turn.response_ids
  ]
  table = episodes.tabulate(batch_episodes)
  adv_R = np.zeros(table.token_turn_R.shape, np.float32)
  adv_R[: len(ids)] = np.array(ids) / 1000
  return adv_R


def pack(batch_episodes, **chosen):
  options = {'context': 'conversation', 'row_len': 64} | chosen
  batch = batch_lib.pack(batch_episodes, **options)
  return batch_lib.with_advantages(batch, adv_of(batch_episodes))


@pytest.mark.parametrize('minibatches', [1, 3])
@pytest.mark.parametrize('context', batch_lib.CONTEXTS)
def test_provenance(context, minibatches):
  """Each sampled id is trained once, with its own advantage and logp."""
  batch_episodes = random_episodes()
  batch = pack(batch_episodes, context=context, minibatches=minibatches)
  sampled = {
    i: logp
    for episode in batch_episodes
    for turn in episode.turns
    for i, logp in zip(turn.response_ids, turn.response_logps, strict=True)
  }
  mask = batch.loss_mask_BT
  assert sorted(batch.tokens_BT[mask].tolist()) == sorted(sampled)
  np.testing.assert_allclose(
    batch.adv_BT[mask], batch.tokens_BT[mask] / 1000, rtol=1e-6
  )
  for token, logp in zip(
    batch.tokens_BT[mask], batch.sampler_logp_BT[mask], strict=True
  ):
    assert logp == pytest.approx(sampled[int(token)])
  for field in (
    batch.adv_BT,
    batch.sampler_logp_BT,
    batch.turn_BT,
    batch.flat_BT,
  ):
    assert not field[~mask].any()


@pytest.mark.parametrize('context', batch_lib.CONTEXTS)
def test_turns_are_told_apart_within_a_row(context):
  """Each number in a row is one response, whole and in its order."""
  batch_episodes = random_episodes(2)
  batch = pack(batch_episodes, context=context)
  responses = {
    turn.response_ids
    for episode in batch_episodes
    for turn in episode.turns
    if turn.response_ids
  }
  found = []
  for tokens_T, turn_T in zip(batch.tokens_BT, batch.turn_BT, strict=True):
    numbers = np.unique(turn_T[turn_T > 0])
    assert numbers.tolist() == list(range(1, len(numbers) + 1))
    found += [tuple(tokens_T[turn_T == t].tolist()) for t in numbers]
  assert len(found) == len(responses) and set(found) == responses


def test_flat_values_come_back_from_their_rows():
  batch_episodes = random_episodes(3)
  batch = pack(batch_episodes, minibatches=2)
  table = episodes.tabulate(batch_episodes)
  num_R = len(table.token_turn_R)
  count = int(table.turn_tokens_U.sum())
  x_RC = np.zeros((num_R, 2), np.float32)
  x_RC[:count] = np.random.default_rng(0).normal(size=(count, 2))
  x_BTC = batch_lib.to_rows(batch, x_RC)
  assert not x_BTC[~batch.loss_mask_BT].any()
  np.testing.assert_array_equal(batch_lib.to_flat(batch, x_BTC, num_R), x_RC)


def test_tokens_that_are_not_trained_leave_the_mask():
  batch_episodes = random_episodes(4)
  adv_R = adv_of(batch_episodes)
  trained_R = np.arange(len(adv_R)) % 3 == 0
  packed = batch_lib.pack(batch_episodes, context='window', row_len=64)
  batch = batch_lib.with_advantages(packed, adv_R, trained_R)
  kept = packed.loss_mask_BT & (packed.flat_BT % 3 == 0)
  np.testing.assert_array_equal(batch.loss_mask_BT, kept)
  assert 0 < kept.sum() < packed.loss_mask_BT.sum()


@pytest.mark.parametrize('context', batch_lib.CONTEXTS)
def test_segments_are_the_sequences(context):
  """A segment reads as its turns do, positions from 0; the rest is 0."""
  batch_episodes = random_episodes(1)
  batch = pack(batch_episodes, context=context, minibatches=2)
  wanted = []
  for episode in batch_episodes:
    turns = [[*t.prompt_ids, *t.response_ids] for t in episode.turns]
    if context == 'conversation':
      wanted.append(sum(turns, []))
    else:
      wanted += [
        ids
        for ids, t in zip(turns, episode.turns, strict=True)
        if t.response_ids
      ]
  found = []
  for tokens, segments, positions in zip(
    batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT, strict=True
  ):
    assert not tokens[segments == 0].any()
    assert not positions[segments == 0].any()
    # Segments are contiguous and count up from 1; padding comes last.
    changes = segments[np.flatnonzero(np.diff(segments)) + 1]
    assert [s for s in changes if s] == list(range(2, segments.max() + 1))
    for s in range(1, segments.max() + 1):
      found.append(tokens[segments == s].tolist())
      assert positions[segments == s].tolist() == list(range(len(found[-1])))
  assert sorted(found) == sorted(wanted)


def test_mask_of_one_conversation():
  """Responses of 5, 7 and 4 tokens: 16 trained, at their places."""
  batch = pack([make_episodes.episode([5, 7, 4], prompt=2)])
  wanted = [0, 0] + [1] * 5 + [0, 0] + [1] * 7 + [0, 0] + [1] * 4
  assert batch.loss_mask_BT.shape == (1, 64)
  assert batch.loss_mask_BT[0].tolist() == [bool(w) for w in wanted] + [
    False
  ] * (64 - len(wanted))


def test_minibatches_hold_about_the_same_number_of_tokens():
  batch_episodes = random_episodes(2, count=40)
  longest = max(
    sum(len(t.response_ids) for t in e.turns) for e in batch_episodes
  )
  batch = pack(batch_episodes, minibatches=4)
  tokens = [int(b.loss_mask_BT.sum()) for b in batch_lib.split(batch, 4)]
  assert max(tokens) - min(tokens) <= longest


@pytest.mark.parametrize('minibatches, row_multiple', [(1, 1), (2, 4), (3, 2)])
def test_rows_come_in_buckets(minibatches, row_multiple):
  shapes = set()
  for count in range(10, 40):
    batch = pack(
      random_episodes(3, count),
      minibatches=minibatches,
      row_multiple=row_multiple,
    )
    rows, remainder = divmod(batch.tokens_BT.shape[0], minibatches)
    assert not remainder and not rows % row_multiple
    assert rows // row_multiple == episodes.bucket(rows // row_multiple)
    shapes.add(rows)
  assert len(shapes) <= 5


def test_rows_are_filled():
  """Lengths 6, 5, 5, 4, 4 fit three rows of 10, where one a row takes five."""
  batch_episodes = [
    make_episodes.episode([n - 2], member=i, first_id=1 + 100 * i)
    for i, n in enumerate((4, 5, 6, 5, 4))
  ]
  batch = pack(batch_episodes, row_len=10)
  used = (batch.segment_ids_BT > 0).sum(axis=1)
  assert sorted(used[used > 0].tolist()) == [4, 10, 10]


def test_packing_is_deterministic_and_the_seed_deals_anew():
  batch_episodes = random_episodes(4, count=30)
  first = pack(batch_episodes, minibatches=2, seed=5)
  for a, b in zip(
    jax.tree.leaves(first),
    jax.tree.leaves(pack(batch_episodes, minibatches=2, seed=5)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  other = pack(batch_episodes, minibatches=2, seed=6)
  half = set(batch_lib.split(first, 2)[0].tokens_BT.ravel().tolist())
  assert half != set(batch_lib.split(other, 2)[0].tokens_BT.ravel().tolist())


def test_more_minibatches_than_sequences_leaves_some_empty():
  batch = pack([make_episodes.episode([3])], minibatches=3)
  parts = batch_lib.split(batch, 3)
  assert sorted(int(p.loss_mask_BT.sum()) for p in parts) == [0, 0, 3]
  assert len({p.tokens_BT.shape for p in parts}) == 1


def test_episode_without_a_sampled_token_is_left_out():
  batch_episodes = [
    make_episodes.episode([0, 0], first_id=500),
    make_episodes.episode([2], member=1, first_id=1),
  ]
  for context in batch_lib.CONTEXTS:
    batch = pack(batch_episodes, context=context)
    assert (batch.tokens_BT < 500).all()
    assert batch.loss_mask_BT.sum() == 2


def test_types():
  batch = pack(random_episodes())
  kinds = {name: x.dtype for name, x in vars(batch).items() if x is not None}
  assert kinds == {
    'tokens_BT': np.int32,
    'positions_BT': np.int32,
    'segment_ids_BT': np.int32,
    'loss_mask_BT': np.bool_,
    'turn_BT': np.int32,
    'flat_BT': np.int32,
    'adv_BT': np.float32,
    'sampler_logp_BT': np.float32,
    'old_logp_BT': np.float32,
    'ref_logp_BT': np.float32,
  }


def test_errors_name_the_numbers():
  episode = make_episodes.episode([20])
  with pytest.raises(ValueError, match='22 tokens.*row_len=16'):
    pack([episode], row_len=16)
  with pytest.raises(ValueError, match="'chat'.*conversation, window"):
    pack([episode], context='chat')
  with pytest.raises(ValueError, match='minibatches=0'):
    pack([episode], minibatches=0)
  with pytest.raises(ValueError, match='3 values for the 20 response tokens'):
    batch_lib.with_advantages(pack([episode]), np.zeros(3))
  with pytest.raises(ValueError, match='minibatches=2 must divide the 1 rows'):
    batch_lib.split(pack([episode]), 2)


def test_steps_of_all_sizes_meet_few_shapes():
  """What is compiled once a shape: the estimators, the score, the update.

  8 episodes of 1 to 6 turns of 5 to 60 tokens have 40 to 2880 response tokens,
  hence 8 buckets from 256 on, and 8 to 48 turns, hence 2 from 32 on.
  """
  rng = np.random.default_rng(0)
  tables, rows = set(), set()
  for _ in range(300):
    top = rng.integers(5, 61)
    step = [
      make_episodes.episode(
        rng.integers(5, top + 1, rng.integers(1, 7)).tolist(), member=member
      )
      for member in range(8)
    ]
    table = episodes.tabulate(step)
    tables.add((len(table.turn_index_U), len(table.token_turn_R)))
    packed = batch_lib.pack(
      step,
      context='conversation',
      row_len=512,
      minibatches=2,
      row_multiple=2,
    )
    rows.add(packed.tokens_BT.shape)
  assert len({turns for turns, _ in tables}) == 2
  assert 5 <= len({tokens for _, tokens in tables}) <= 8
  assert len(rows) <= 3
