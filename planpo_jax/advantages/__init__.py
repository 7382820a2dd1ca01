"""Advantage estimators, one file a method; the file tree is the registry.

A method is a module here with `TRAITS` and `estimate(table, *, progress, ...)
-> adv_R`, pure and jit-able. Its keyword arguments are its hyperparameters. It
may define besides:

  PRESETS: {name: {configuration key: value}}, ways to run it, see `presets`;
    a function of the configuration may stand for a value, see `same_as`;
  annotate(table, batch_episodes, *, decode, ...) -> table: what it needs to be
    read out of the episodes, on the host; its keyword arguments are some of the
    hyperparameters;
  traits(**hyperparameters): its traits, where they depend on these;
  targets(table, *, progress, ...) -> (target_RC, mask_RC): what its critic is
    to learn and where, with the hyperparameters of `estimate`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from planpo_jax import episodes, registry

# Turns of one span share a column in the metrics: 1, 2, 3-4, 5-8, ...
_TURN_SPANS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))


@dataclasses.dataclass(frozen=True)
class Traits:
  """What a method asks of the rest.

  Attributes:
    group: compares the members of a group, which takes at least two.
    outcome: compares their returns and nothing else, so there is something to
      learn exactly where these differ.
    values: heads of the critic it needs; 0 for none.
    entropy: reads `token_entropy_R`.
    roles: reads `token_role_R`, `turn_switch_U` and `turn_drift_U`, and trains
      only the tokens that have a role.
    prompt: `chat.prompt` whose responses have the parts it reads; None: any.
    token_rewards: reads `token_reward_R`, so the KL may be in the reward.
    batch_wide: normalises over the whole batch, so groups are not apart.
  """

  group: bool
  outcome: bool = False
  values: int = 0
  entropy: bool = False
  roles: bool = False
  prompt: str | None = None
  token_rewards: bool = False
  batch_wide: bool = False


@dataclasses.dataclass(frozen=True)
class Method:
  """A method with its hyperparameters bound.

  Attributes:
    traits: see `Traits`.
    signal: (table, *, progress) -> [E] bool, episodes of which the method
      learns something. Format penalties are no comparison and left out.
    estimate: (table, *, progress) -> adv_R, jitted; progress = k/K is traced.
    annotate: (table, batch_episodes, decode) -> table.
    targets: (table, *, progress) -> (target_RC, mask_RC), jitted; only for
      methods with `traits.values`.
  """

  traits: Traits
  signal: Callable[..., np.ndarray]
  estimate: Callable[..., jax.Array]
  annotate: Callable[..., episodes.TurnTable]
  targets: Callable[..., tuple[jax.Array, jax.Array]] | None


def names() -> list[str]:
  """Returns the methods found, sorted."""
  return list(registry.find(__name__, 'estimate'))


def _module(name: str) -> ModuleType:
  return sys.modules[registry.entry_of(__name__, 'estimate', name).__module__]


def traits(name: str, **chosen: Any) -> Traits:
  """What a method needs, with the hyperparameters chosen.

  Raises:
    ValueError: unknown method.
  """
  module = _module(name)
  return module.traits(**chosen) if hasattr(module, 'traits') else module.TRAITS


# One rollout of each of many tasks: a critic needs no group.
SINGLES = {'train.tasks_per_step': 128, 'train.group_size': 1}


def verl_parity(name: str) -> dict[str, Any]:
  """The habits of verl-agent, as settings of a preset.

  Statistics over turns, penalties inside the return, a group of one as it is.
  """
  return {
    f'advantage.{name}.stat': 'turn',
    f'advantage.{name}.penalty': 'pre',
    f'advantage.{name}.single': 'raw',
  }


def same_as(key: str) -> Callable[[Any], Any]:
  """For presets: the value that another key has in the end."""
  *sections, last = key.split('.')

  def follow(config):
    for section in sections:
      config = config[section]
    return config.get_oneway_ref(last)

  return follow


def presets() -> dict[str, dict[str, Any]]:
  """Every way to run a method: its name, and what its file adds.

  Returns:
    {preset: {configuration key: value}}. A preset chooses the method too.

  Raises:
    ValueError: two files define the same preset.
  """
  found: dict[str, dict[str, Any]] = {}
  for name in names():
    own = {name: {}} | getattr(_module(name), 'PRESETS', {})
    for preset, values in own.items():
      if preset in found:
        raise ValueError(
          f'advantages/{name}.py defines the preset {preset!r}, which '
          f'{found[preset]["advantage.name"]} has already; rename one.'
        )
      found[preset] = {'advantage.name': name} | values
  return found


def hyperparameters(name: str) -> dict[str, Any]:
  """Returns the hyperparameters of a method and their defaults.

  Raises:
    ValueError: unknown method.
  """
  return registry.hyperparameters(_module(name).estimate)


def get(name: str, **chosen: Any) -> Method:
  """Binds hyperparameters to a method.

  Args:
    name: method, one of `names()`.
    **chosen: hyperparameters other than their defaults.

  Raises:
    ValueError: unknown method, or a value that the method does not know.
    TypeError: unknown hyperparameter.
  """
  registry.check(name, _module(name).estimate, chosen)
  _check_numbers(name, chosen)
  return _bind(name, tuple(sorted(chosen.items())))


# What hyperparameters of these names mean is the same in every method.
_SHARES = ('gamma', 'lam', 'lam_segment', 'token_gamma', 'token_lam')
_NOT_NEGATIVE = (
  'eps',
  'ddof',
  'invalid_penalty',
  'overlong_penalty',
  'full_return',
)


def _check_numbers(name: str, chosen: Mapping[str, Any]) -> None:
  for key, value in chosen.items():
    if not isinstance(value, int | float):
      continue
    if not math.isfinite(value):
      rule = 'a finite number'
    elif key in _SHARES and not 0 <= value <= 1:
      rule = 'in [0, 1]'
    elif key in _NOT_NEGATIVE and value < 0:
      rule = 'at least 0'
    else:
      continue
    default = hyperparameters(name)[key]
    raise ValueError(
      f'advantage.{name}.{key}={value} must be {rule}; the default is '
      f'{default}.'
    )


# Cached, so that asking for the same method again does not compile it again.
@functools.cache
def _bind(name: str, chosen: tuple[tuple[str, Any], ...]) -> Method:
  module, values = _module(name), dict(chosen)
  estimate = jax.jit(functools.partial(module.estimate, **values))
  own_traits = traits(name, **values)
  targets = None
  if own_traits.values:
    targets = jax.jit(functools.partial(module.targets, **values))
  # Traced once on a table of one turn, so that a bad value is found before the
  # first rollout.
  for function in filter(None, (estimate, targets)):
    jax.eval_shape(
      function, _smallest_table(own_traits), progress=np.float32(1)
    )
  return Method(
    own_traits,
    functools.partial(_signal, estimate, own_traits),
    estimate,
    functools.partial(_annotate, getattr(module, 'annotate', None), values),
    targets,
  )


def _annotate(
  function: Callable[..., episodes.TurnTable] | None,
  values: Mapping[str, Any],
  table: episodes.TurnTable,
  batch_episodes: Sequence[episodes.Episode],
  decode: Callable[[Sequence[int]], str],
) -> episodes.TurnTable:
  if function is None:
    return table
  wanted = inspect.signature(function).parameters
  return function(
    table,
    batch_episodes,
    decode=decode,
    **{k: v for k, v in values.items() if k in wanted},
  )


def _smallest_table(needs: Traits) -> episodes.TurnTable:
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
  num_R, num_U = len(table.token_turn_R), len(table.turn_tokens_U)
  added: dict[str, np.ndarray] = {}
  if needs.values:
    added['value_RC'] = np.zeros((num_R, needs.values), np.float32)
  if needs.entropy:
    added['token_entropy_R'] = np.zeros(num_R, np.float32)
  if needs.roles:
    added['turn_switch_U'] = np.zeros(num_U, np.bool_)
    added['turn_drift_U'] = np.zeros(num_U, np.bool_)
  return dataclasses.replace(table, **added)


def _signal(
  estimate: Callable[..., jax.Array],
  own_traits: Traits,
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
) -> np.ndarray:
  """See `Method.signal`."""
  if own_traits.outcome:
    signal_E = np.zeros(len(table.episode_group_E), bool)
    for members_E in _groups(table):
      signal_E |= members_E & (np.ptp(table.episode_return_E[members_E]) > 0)
    return signal_E
  whole = dataclasses.replace(
    table, turn_valid_U=np.ones_like(table.turn_valid_U)
  )
  moved_R = np.asarray(estimate(whole, progress=progress)) != 0
  moved_R &= np.asarray(table.token_turn_R) < len(table.turn_episode_U)
  turn_R = np.asarray(table.token_turn_R)[moved_R]
  signal_E = np.zeros(len(table.episode_group_E), bool)
  signal_E[np.asarray(table.turn_episode_U)[turn_R]] = True
  return signal_E


def _groups(table: episodes.TurnTable) -> list[np.ndarray]:
  """[E] bool of each group with at least two members."""
  group_E = np.asarray(table.episode_group_E)
  numbers, sizes = np.unique(
    group_E[group_E < len(group_E)], return_counts=True
  )
  return [group_E == number for number in numbers[sizes > 1]]


def group_diagnostics(
  table: episodes.TurnTable, signal_E: np.ndarray
) -> dict[str, float]:
  """Says what the groups of a step have to teach.

  Args:
    table: of all episodes that were played.
    signal_E: [E] bool, see `Method.signal`.

  Returns:
    Scalars under `advantage/`.
    groups_without_outcome_variance: share of the groups of two or more whose
      members all have the same return, which GRPO learns nothing from.
    signal_without_outcome_variance: of those, the share that the method gives
      a signal.
    A share of nothing is 0.
  """
  groups = _groups(table)
  tied = [g for g in groups if np.ptp(table.episode_return_E[g]) == 0]
  taught = [g for g in tied if signal_E[g].any()]
  return {
    'advantage/groups_without_outcome_variance': len(tied)
    / max(len(groups), 1),
    'advantage/signal_without_outcome_variance': len(taught)
    / max(len(tied), 1),
  }


def diagnostics(
  table: episodes.TurnTable, adv_R: jax.Array | np.ndarray
) -> dict[str, float]:
  """Says what a method makes of a step.

  Args:
    table: as given to the estimator.
    adv_R: [R] as the estimator returned it.

  Returns:
    Scalars under `advantage/`.
    successes_with_negative_efficiency: share of successes whose A^E of PlanPO
      (arXiv 2608.17289, equation 3) is negative: slower than their group by so
      much that a success counts as bad.
    successes_with_negative_advantage: share of successes whose turns have a
      negative mean advantage.
    mean_abs: over response tokens.
    std_turn_A_B: deviation over the turns A to B of their episodes, of the
      mean advantage of each turn; absent where there are no two.
    A share of nothing is 0.
  """
  adv_R = np.asarray(adv_R, np.float64)
  token_turn_R = np.asarray(table.token_turn_R)
  num_U, num_E = len(table.turn_episode_U), len(table.episode_group_E)
  real_R = token_turn_R < num_U
  adv_R, token_turn_R = adv_R[real_R], token_turn_R[real_R]
  tokens_U = np.asarray(table.turn_tokens_U)
  adv_U = np.bincount(token_turn_R, weights=adv_R, minlength=num_U)
  adv_U /= np.maximum(tokens_U, 1)
  trained_U = tokens_U > 0
  turn_episode_U = np.asarray(table.turn_episode_U)
  grouped_E = np.asarray(table.episode_group_E) < num_E
  turn_sum_E = np.bincount(
    turn_episode_U[trained_U], weights=adv_U[trained_U], minlength=num_E
  )
  success_E = np.asarray(table.episode_success_E) & grouped_E
  turns_E = np.bincount(turn_episode_U, minlength=num_E + 1)[:num_E]
  efficiency_E = (
    np.asarray(table.episode_return_E, np.float64)
    / np.maximum(turns_E, 1)
    * success_E
  )
  slow_E = np.zeros(num_E, bool)
  for g in _groups(table):
    # Equal ones may differ from their own mean by rounding.
    slow_E |= g & (efficiency_E < efficiency_E[g].mean() * (1 - 1e-9))

  def share(values):
    return float(np.mean(values)) if np.size(values) else 0.0

  scalars = {
    'successes_with_negative_efficiency': share(slow_E[success_E]),
    'successes_with_negative_advantage': share(turn_sum_E[success_E] < 0),
    'mean_abs': share(np.abs(adv_R)),
  }
  place_U = np.asarray(table.turn_index_U) + 1
  for first, last in _TURN_SPANS:
    span_U = trained_U & (place_U >= first)
    if last is not None:
      span_U &= place_U <= last
    if span_U.sum() > 1:
      name = f'std_turn_{first:02d}'
      if last != first:
        name += f'_{last:02d}' if last else '_on'
      scalars[name] = float(np.std(adv_U[span_U]))
  return {f'advantage/{name}': value for name, value in scalars.items()}
