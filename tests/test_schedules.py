"""Weights and horizons over the steps of a run."""

import json
import pathlib

import pytest

from planpo_jax import schedules

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden/advantages.json').read_text()
)['scaling_rounds']


def at(step, horizons=(10, 20, 30)):
  return schedules.horizon(
    step, horizons=horizons, horizon_steps=100, max_turns=7
  )


@pytest.mark.parametrize('k,turns', GOLDEN.items())
def test_golden_rounds(k, turns):
  assert at(int(k) - 1) == turns


def test_without_phases_it_is_the_limit_of_turns():
  assert {at(step, ()) for step in (0, 99, 100, 10_000)} == {7}


def test_one_phase_lasts_to_the_end():
  assert {at(step, (4,)) for step in (0, 99, 100, 10_000)} == {4}


@pytest.mark.parametrize(
  'schedule,wanted',
  [
    ('constant', [2.0, 2.0, 2.0, 2.0]),
    ('decay', [2.0, 1.5, 1.0, 1.0]),
    ('increase', [1.0, 1.5, 2.0, 2.0]),
  ],
)
def test_ramps_end_where_the_run_does(schedule, wanted):
  values = [
    float(schedules.ramp(p, initial=2.0, final=1.0, schedule=schedule))
    for p in (0.0, 0.5, 1.0, 1.5)
  ]
  assert values == pytest.approx(wanted)


def test_unknown_ramp():
  with pytest.raises(ValueError, match="'linear'.*constant, decay, increase"):
    schedules.ramp(0.0, initial=1.0, final=0.0, schedule='linear')
