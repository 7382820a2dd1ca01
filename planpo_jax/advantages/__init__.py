"""Advantage estimators, one file a method; the file tree is the registry.

A method is a module here with `estimate(table, *, progress, ...) -> adv_R`,
pure and jit-able, and `NEEDS_GROUP`, which says whether a group must have at
least two members. Its keyword arguments are its hyperparameters.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from planpo_jax import episodes, registry


def names() -> list[str]:
  """Returns the methods found, sorted."""
  return list(registry.find(__name__, 'estimate'))


def _estimate(name: str) -> Callable[..., jax.Array]:
  return registry.entry_of(__name__, 'estimate', name)


def needs_group(name: str) -> bool:
  """Whether the method compares the members of a group (group_size >= 2)."""
  return sys.modules[_estimate(name).__module__].NEEDS_GROUP


def hyperparameters(name: str) -> dict[str, Any]:
  """Returns the hyperparameters of a method and their defaults.

  Raises:
    ValueError: unknown method.
  """
  return registry.hyperparameters(_estimate(name))


def get(name: str, **chosen: Any) -> Callable[..., jax.Array]:
  """Binds hyperparameters to a method.

  Args:
    name: method, one of `names()`.
    **chosen: hyperparameters other than their defaults.

  Returns:
    A jitted `(table, *, progress) -> adv_R`; progress = k/K is traced.

  Raises:
    ValueError: unknown method, or a value that the method does not know.
    TypeError: unknown hyperparameter.
  """
  registry.check(name, _estimate(name), chosen)
  return _bind(name, tuple(sorted(chosen.items())))


# Cached, so that asking for the same method again does not compile it again.
@functools.cache
def _bind(
  name: str, chosen: tuple[tuple[str, Any], ...]
) -> Callable[..., jax.Array]:
  estimate = jax.jit(functools.partial(_estimate(name), **dict(chosen)))
  # Traced once on a table of one turn, so that a bad value is found before the
  # first rollout.
  jax.eval_shape(estimate, _smallest_table(), progress=np.float32(1))
  return estimate


def _smallest_table() -> episodes.TurnTable:
  turn = episodes.Turn((), (0,), (0.0,), '', '', '', 0.0, True, 0)
  table = episodes.tabulate(
    [
      episodes.Episode(
        task=episodes.Task('', '', 0, ''),
        member=0,
        turns=(turn,),
        score=0.0,
        success=False,
        ending=episodes.Ending.TERMINATED,
      )
    ]
  )
  return dataclasses.replace(
    table, value_R=np.zeros(table.token_turn_R.shape, np.float32)
  )


def diagnostics(
  table: episodes.TurnTable, adv_R: jax.Array | np.ndarray
) -> dict[str, float]:
  """Says how much of a step carries a learning signal.

  Args:
    table: as given to the estimator.
    adv_R: [R] as the estimator returned it.

  Returns:
    Scalars under `advantage/`.
    groups_without_outcome_variance: share of groups whose members all have the
      same return, which GRPO learns nothing from.
    signal_without_outcome_variance: of those, the share in which this method
      gives some token an advantage. Turns of invalid format are left out, for
      a format penalty is no comparison.
    successes_with_negative_advantage: share of successes whose turns have a
      negative mean advantage.
    mean_abs: over response tokens.
    A share of nothing is 0.
  """
  adv_R = np.asarray(adv_R, np.float64)
  token_turn_R = np.asarray(table.token_turn_R)
  num_U, num_E = len(table.turn_episode_U), len(table.episode_group_E)
  real_R = token_turn_R < num_U
  adv_R, token_turn_R = adv_R[real_R], token_turn_R[real_R]
  token_episode_R = np.asarray(table.turn_episode_U)[token_turn_R]
  group_E = np.asarray(table.episode_group_E)
  valid_R = np.asarray(table.turn_valid_U)[token_turn_R]
  signal_E = np.zeros(num_E, bool)
  signal_E[token_episode_R[valid_R & (adv_R != 0)]] = True

  return_E = np.asarray(table.episode_return_E)
  groups = [group_E == g for g in np.unique(group_E[group_E < num_E])]
  tied = [g for g in groups if np.ptp(return_E[g]) == 0]

  turn_weight_R = 1.0 / np.asarray(table.turn_tokens_U)[token_turn_R]
  turn_sum_E = np.bincount(
    token_episode_R, weights=adv_R * turn_weight_R, minlength=num_E
  )
  success_E = np.asarray(table.episode_success_E) & (group_E < num_E)

  def share(values):
    return float(np.mean(values)) if np.size(values) else 0.0

  return {
    'advantage/groups_without_outcome_variance': len(tied)
    / max(len(groups), 1),
    'advantage/signal_without_outcome_variance': share(
      [signal_E[g].any() for g in tied]
    ),
    'advantage/successes_with_negative_advantage': share(
      turn_sum_E[success_E] < 0
    ),
    'advantage/mean_abs': share(np.abs(adv_R)),
  }
