"""Which groups are learnt from, and how refills are played."""

import dataclasses

import numpy as np
import pytest

from planpo_jax import advantages, episodes, experience, rollout, selection
from tests import make_episodes

STATS = rollout.Stats(
  wall_s=1.0,
  tail_s=0.25,
  occupancy=0.5,
  decode_share=0.25,
  prefill_share=0.25,
  env_wait_share=0.0,
  batch_fill=1.0,
  tokens_per_s=100.0,
  prefilled_tokens=10,
  overhead_share=0.0,
)


def outcomes(index, *successes):
  """A group whose members differ in their success alone."""
  return make_episodes.group([(s, [3, 3]) for s in successes], index)


MIXED, LOST, WON = (
  outcomes(0, True, False),
  outcomes(1, False, False),
  outcomes(2, True, True),
)


def signal(batch, name='grpo', progress=1.0, **chosen):
  method = advantages.get(name, **chosen)
  return method.signal(episodes.tabulate(batch), progress=progress)


def groups(batch):
  return list(dict.fromkeys(e.task.index for e in batch))


def test_signal_is_an_advantage_of_a_turn_in_the_right_format():
  """A penalty on a bad format alone teaches nothing about the task."""
  invalid = [
    make_episodes.episode([3], group=3, member=i, valid=[i == 0])
    for i in range(2)
  ]
  batch = [*MIXED, *LOST, *invalid]
  for name in ('grpo', 'planpo', 'gigpo', 'rloo', 'empg'):
    for penalty in ('post', 'pre'):
      found = signal(batch, name, penalty=penalty)
      assert found[: len(batch)].tolist() == [True, True] + [False] * 4, name
      assert not found[len(batch) :].any()


def test_a_long_response_is_no_signal_either():
  """DAPO takes 5 off the one of 9 tokens, but all of them failed."""
  batch = make_episodes.group([(False, [9]), (False, [2]), (False, [2])])
  chosen = {'overlong_limit': 10, 'overlong_buffer': 5, 'overlong_penalty': 5.0}
  table = episodes.tabulate(batch)
  assert advantages.get('grpo', **chosen).estimate(table, progress=1.0).any()
  assert not signal(batch, 'grpo', **chosen).any()


def test_the_signal_is_that_of_the_step():
  """Alpha ends at 0, so that A^S teaches halfway and not at the end."""
  batch = make_episodes.group([(True, [3]), (True, [9])])
  chosen = {'alpha_final': 0.0}
  assert signal(batch, 'planpo', 0.5, **chosen)[:2].all()
  assert not signal(batch, 'planpo', 1.0, **chosen).any()


def test_what_teaches_depends_on_the_method():
  """Two successes, one of them in fewer turns: PlanPO learns, GRPO does not."""
  batch = make_episodes.group([(True, [3]), (True, [3, 3])])
  assert not signal(batch, 'grpo').any()
  assert signal(batch, 'planpo')[:2].all()


@pytest.mark.parametrize(
  'count,drop,wanted',
  [
    (1, False, [0]),
    (2, False, [0, 1]),  # The one that teaches, filled up in order.
    (3, False, [1, 0, 2]),
    (3, True, [0]),
  ],
)
def test_choose(count, drop, wanted):
  batch = [*LOST, *MIXED, *WON]
  kept = selection.choose(batch, signal(batch), groups=count, drop=drop)
  assert sorted(groups(kept)) == sorted(wanted)
  assert kept == [e for e in batch if e.task.index in wanted]  # Their order.


def test_nothing_is_dropped_when_nothing_teaches():
  batch = [*LOST, *WON]
  kept = selection.choose(batch, signal(batch), groups=2, drop=True)
  assert kept == batch


def test_groups_that_teach_come_before_those_played_earlier():
  later = outcomes(3, False, True)
  batch = [*LOST, *WON, *MIXED, *later]
  kept = selection.choose(batch, signal(batch), groups=2, drop=False)
  assert groups(kept) == [0, 3]


@pytest.mark.parametrize('lots,plays', [(1, 1), (2, 2), (4, 3)])
def test_refills_until_enough_or_nothing_is_left(lots, plays):
  """Of step 4 nothing teaches, then one group, then another."""
  rounds = [[*LOST], [*MIXED], outcomes(3, True, False), [*WON]]
  calls = []

  def play(step, tasks):
    calls.append((step, tasks))
    return rollout.Collected(rounds[tasks[0].index], STATS)

  def enough(step, played):
    assert step == 4
    return len(selection.teaching_groups(played, signal(played))) >= 2

  chosen = [[make_episodes.task(i)] for i in range(lots)]
  collected = experience.refilling(play, lambda step: chosen, enough)(4)
  assert calls == [(4, lot) for lot in chosen[:plays]]
  assert collected.episodes == [e for r in rounds[:plays] for e in r]
  assert collected.stats.wall_s == plays


def test_joined_statistics_weigh_by_time():
  """3 s at 0.5 and 1 s at 0.9 occupancy: 0.6 of 4 s."""
  long = dataclasses.replace(STATS, wall_s=3.0)
  short = dataclasses.replace(STATS, occupancy=0.9, prefilled_tokens=5)
  joined = rollout.joined(
    [rollout.Collected([*MIXED], long), rollout.Collected([*WON], short)]
  )
  assert joined.episodes == [*MIXED, *WON]
  assert joined.stats.occupancy == pytest.approx(0.6)
  assert joined.stats.wall_s == 4 and joined.stats.tail_s == 0.5
  assert joined.stats.prefilled_tokens == 15
  assert joined.stats.tokens_per_s == pytest.approx(100)


def test_dropping_a_group_leaves_the_advantages_of_the_others():
  """Groups are apart, so what is chosen may be decided before or after."""
  batch = [*LOST, *MIXED, *outcomes(4, True, True, False)]
  kept = selection.choose(batch, signal(batch), groups=9, drop=True)
  assert groups(kept) == [0, 4]

  def values(chosen):
    table = episodes.tabulate(chosen)
    adv_R = np.asarray(advantages.get('grpo').estimate(table, progress=1.0))
    return adv_R[: int(table.turn_tokens_U.sum())]

  first = sum(len(t.response_ids) for e in LOST for t in e.turns)
  np.testing.assert_allclose(values(kept), values(batch)[first:], rtol=1e-6)
