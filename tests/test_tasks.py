"""Which tasks are played when."""

import collections

import pytest

from planpo_jax import episodes, tasks


def pool(count, name='a'):
  return [episodes.Task('toy', 'train', i, name) for i in range(count)]


def test_every_epoch_visits_each_task_once_in_its_own_order():
  some = pool(12)
  epochs = [
    [
      t
      for step in range(e * 3, e * 3 + 3)
      for t in tasks.at(some, step, count=4, seed=7)
    ]
    for e in range(2)
  ]
  for epoch in epochs:
    assert sorted(t.index for t in epoch) == list(range(12))
  assert epochs[0] != epochs[1]


def test_a_step_needs_no_memory_of_the_steps_before():
  some = pool(10)
  first = [tasks.at(some, step, count=3, seed=1) for step in range(9)]
  assert tasks.at(some, 8, count=3, seed=1) == first[8]
  assert tasks.at(some, 0, count=3, seed=2) != first[0]


def test_more_tasks_than_there_are_come_round_again():
  chosen = tasks.at(pool(3), 0, count=7, seed=0)
  assert max(collections.Counter(chosen).values()) == 3
  assert len(chosen) == 7


def test_spread_is_even_over_types_and_variations():
  some = pool(100, 'a') + pool(4, 'b')
  chosen = tasks.spread(some, 21)
  names = collections.Counter(t.name for t in chosen)
  assert names == {'a': 11, 'b': 10}
  a = [t.index for t in chosen if t.name == 'a']
  assert a == [100 * i // 11 for i in range(11)]
  # Ten of four: each comes two or three times.
  b = collections.Counter(t.index for t in chosen if t.name == 'b')
  assert sorted(b.values()) == [2, 2, 3, 3]


def test_as_many_as_there_are_is_each_once():
  some = pool(18, 'a') + pool(2, 'b') + pool(41, 'c')
  assert tasks.spread(some, 61) == some
  # One less is even over types again.
  names = collections.Counter(t.name for t in tasks.spread(some, 60))
  assert names == {'a': 20, 'b': 20, 'c': 20}


def test_spread_of_no_tasks_is_named():
  for count in (0, 5):
    with pytest.raises(ValueError, match='no tasks to evaluate on'):
      tasks.spread([], count)


def test_refills_are_all_tasks_that_the_step_does_not_play():
  some = pool(30)
  lots = tasks.refills(some, 5, count=8, seed=1)
  assert [len(lot) for lot in lots] == [8, 8, 6]
  chosen = tasks.at(some, 5, count=8, seed=1)
  assert sorted(t.index for lot in [chosen, *lots] for t in lot) == list(
    range(30)
  )
  assert tasks.refills(some, 5, count=8, seed=1) == lots
  assert tasks.refills(some, 6, count=8, seed=1) != lots
  assert tasks.refills(some, 5, count=8, seed=2) != lots


def test_no_refills_where_a_step_plays_every_task():
  assert tasks.refills(pool(8), 0, count=8, seed=1) == []
  assert tasks.refills(pool(5), 3, count=8, seed=1) == []
