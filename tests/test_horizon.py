"""The horizon schedule of ScalingInter."""

import json
import pathlib

import pytest

from planpo_jax import horizon

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / 'golden/advantages.json').read_text()
)['scaling_rounds']


def at(step, horizons=(10, 20, 30)):
  return horizon.at(step, horizons=horizons, horizon_steps=100, max_turns=7)


@pytest.mark.parametrize('k,turns', GOLDEN.items())
def test_golden_rounds(k, turns):
  assert at(int(k) - 1) == turns


def test_without_phases_it_is_the_limit_of_turns():
  assert {at(step, ()) for step in (0, 99, 100, 10_000)} == {7}


def test_one_phase_lasts_to_the_end():
  assert {at(step, (4,)) for step in (0, 99, 100, 10_000)} == {4}
