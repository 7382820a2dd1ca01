"""Typed values that pass between the stages of training.

`Task`, `Turn` and `Episode` are ragged host data; `TurnTable` is their flat
array form, which the advantage estimators read.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
  """Names one initial state: the same Task gives the same state anywhere.

  Attributes:
    env: name of the environment, e.g. `sciworld`.
    split: split of that environment, e.g. `train`.
    index: which task of its type; in ScienceWorld the variation number.
    name: task type, e.g. `find-plant`.
    seed: seed of whatever the environment draws at random.
    options: sorted (key, value) pairs that change the environment, e.g.
      `(('simplifications', 'easy'),)`.
  """

  env: str
  split: str
  index: int
  name: str
  seed: int = 0
  options: tuple[tuple[str, str], ...] = ()


class Ending(enum.Enum):
  """Why an episode stopped."""

  TERMINATED = 'terminated'  # The environment ended it: goal reached or lost.
  TRUNCATED = 'truncated'  # A limit of turns or of context ended it.
  DEADLINE = 'deadline'  # The run's limit of time ended it.
  FAULT = 'fault'  # Environment, network or host failed. Never trained on.


@dataclasses.dataclass(frozen=True)
class Observation:
  """What an environment answers to a reset or to an action.

  Attributes:
    text: what the policy reads.
    reward: change of the score since the last observation (score points).
    score: the environment's own score, its own range (ScienceWorld -100..100).
    success: the goal is reached.
    ending: None while the episode goes on.
    goal: the task statement; set on reset only.
    expert_actions: a solution; set on reset only, when it was asked for.
    admissible: actions that can be taken now; only when asked for.
  """

  text: str
  reward: float = 0.0
  score: float = 0.0
  success: bool = False
  ending: Ending | None = None
  goal: str = ''
  expert_actions: tuple[str, ...] = ()
  admissible: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Turn:
  """One response of the policy and what the environment made of it.

  Attributes:
    prompt_ids: token ids that were put before the response. `window` context:
      the whole prompt of this turn; `conversation`: only what was appended
      since the last response.
    response_ids: token ids exactly as sampled, end token included.
    response_logps: log-probability (nats) of each, at sampling temperature.
    observation: text the policy saw before it responded.
    response: the response decoded, for people to read.
    action: the action as it was sent to the environment.
    reward: change of the score by this action (score points).
    valid: the response had the required format.
    state_key: anchor of the state seen (hash of the observation text).
    truncated: the response hit the cap of tokens without an end token.
    respond_s: seconds from the request of the response to its last token.
    env_s: seconds that the environment took to answer the action.

  The seconds are of the clock, so they do not count when turns are compared.
  """

  prompt_ids: tuple[int, ...]
  response_ids: tuple[int, ...]
  response_logps: tuple[float, ...]
  observation: str
  response: str
  action: str
  reward: float
  valid: bool
  state_key: int
  truncated: bool = False
  respond_s: float = dataclasses.field(default=0.0, compare=False)
  env_s: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Episode:
  """One rollout of a task.

  Attributes:
    task: what was played.
    member: index within the group, from 0.
    turns: at least one, unless the episode is a fault or met its deadline.
    score: the environment's final score, its own range.
    success: the environment's goal was reached.
    ending: why it stopped.
    fault: cause of a fault, for people to read; empty otherwise.
    goal: the task statement as the policy read it.
    dropped_pairs: (observation, action) pairs of the history, over all turns,
      that `window` context left out because a prompt was too long.
    start_s: seconds into the collection at which it got a slot; never
      compared, nor are the next.
    reset_s: seconds that the environment took to begin.
    recoveries: times that the environment was lost and brought back by playing
      the same actions again.
  """

  task: Task
  member: int
  turns: tuple[Turn, ...]
  score: float
  success: bool
  ending: Ending
  fault: str = ''
  goal: str = ''
  dropped_pairs: int = 0
  start_s: float = dataclasses.field(default=0.0, compare=False)
  reset_s: float = dataclasses.field(default=0.0, compare=False)
  recoveries: int = dataclasses.field(default=0, compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnTable:
  """All turns of one training step as flat arrays with segment ids.

  Axes: U turns, E episodes, R response tokens, each padded to a bucket. An id
  that points past the end of its axis marks padding, so segment sums drop it:
  `turn_episode_U` pads with E, `token_turn_R` with U, `episode_group_E` with E
  (there are never more groups than episodes). Tokens lie in the order of
  episodes, of turns, of sampling.

  Attributes:
    turn_episode_U: int32, episode of the turn.
    turn_index_U: int32, place of the turn in its episode, from 0.
    turn_tokens_U: int32, response tokens of the turn, end token included.
    turn_reward_U: float32, change of the score by the turn (score points).
    turn_valid_U: bool, the response had the required format.
    turn_truncated_U: bool, the response hit the cap of tokens.
    turn_state_U: int32, equal exactly where task and state seen are equal;
      padding points to U.
    episode_group_E: int32, group of the episode. An episode without a single
      response token has nothing to train and belongs to no group (points to
      E), so that it does not move the baseline of the others.
    episode_return_E: float32, what the learner sees (10 on success by default).
    episode_score_E: float32, the environment's own score.
    episode_success_E: bool, goal reached.
    episode_truncated_E: bool, a limit of turns, context or time ended the
      episode, not the environment.
    token_turn_R: int32, turn of the token.
    token_role_R: int32, part of the response for methods that split it; 0 is
      no part of any.

  What only some methods read is None for the others:

  Attributes:
    turn_switch_U: bool, the turn chose a new subgoal.
    turn_drift_U: bool, the turn kept its subgoal, but in other words.
    token_reward_R: float32, reward of the single token, in units of the return.
    token_entropy_R: float32, nats, of the distribution the token was drawn
      from.
    value_RC: float32, what a critic expects before the token, in units of the
      return; a column a head.
  """

  turn_episode_U: np.ndarray | jax.Array
  turn_index_U: np.ndarray | jax.Array
  turn_tokens_U: np.ndarray | jax.Array
  turn_reward_U: np.ndarray | jax.Array
  turn_valid_U: np.ndarray | jax.Array
  turn_truncated_U: np.ndarray | jax.Array
  turn_state_U: np.ndarray | jax.Array
  episode_group_E: np.ndarray | jax.Array
  episode_return_E: np.ndarray | jax.Array
  episode_score_E: np.ndarray | jax.Array
  episode_success_E: np.ndarray | jax.Array
  episode_truncated_E: np.ndarray | jax.Array
  token_turn_R: np.ndarray | jax.Array
  token_role_R: np.ndarray | jax.Array
  turn_switch_U: np.ndarray | jax.Array | None = None
  turn_drift_U: np.ndarray | jax.Array | None = None
  token_reward_R: np.ndarray | jax.Array | None = None
  token_entropy_R: np.ndarray | jax.Array | None = None
  value_RC: np.ndarray | jax.Array | None = None


def bucket(count: int, minimum: int = 1) -> int:
  """Returns the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds both.

  At most a third of the result is padding, and any range of counts meets few
  distinct sizes, hence few compilations.
  """
  power = 1
  while power < max(count, minimum):
    if power > 1 and power * 3 // 2 >= max(count, minimum):
      return power * 3 // 2
    power *= 2
  return power


def tabulate(
  episodes: Sequence[Episode],
  *,
  outcome: str = 'binary',
  success_return: float = 10.0,
  success_threshold: float = 100.0,
  score_floor: float = 0.0,
  score_max: float = 100.0,
) -> TurnTable:
  """Lays episodes out as a TurnTable of host arrays.

  Episodes of equal Task form a group.

  Args:
    episodes: finished episodes, none of them a fault.
    outcome: `binary`: return is `success_return` on the environment's success,
      else 0. `graded`: return is `success_return * max(score, score_floor) /
      score_max` and success is `score >= success_threshold`.
    success_return: return of a full success.
    success_threshold: score points; only read when `graded`.
    score_floor: score points below which the return does not fall; only read
      when `graded`. ScienceWorld's lowest score is -100.
    score_max: score points of a full success; only read when `graded`.

  Returns:
    A table of numpy arrays, padded with `bucket`.

  Raises:
    ValueError: no episodes, a fault, an episode without turns, a turn whose
      log-probabilities do not match its tokens, or an unknown outcome.
  """
  if outcome not in ('binary', 'graded'):
    raise ValueError(f'outcome={outcome!r} is unknown; use binary or graded.')
  if not episodes:
    raise ValueError(
      'tabulate got no episodes; every rollout of this step was dropped as a '
      'fault, so skip the step.'
    )
  for i, episode in enumerate(episodes):
    if episode.ending is Ending.FAULT:
      raise ValueError(
        f'Episode {i} ({episode.task.name}, member {episode.member}) is a '
        f'fault ({episode.fault!r}); faults are never trained on: drop them '
        'before tabulate.'
      )
    if not episode.turns:
      raise ValueError(
        f'Episode {i} ({episode.task.name}, member {episode.member}) has no '
        'turns; an episode that ended before the first response must be '
        'dropped.'
      )
    for t, turn in enumerate(episode.turns):
      if len(turn.response_ids) != len(turn.response_logps):
        raise ValueError(
          f'Episode {i}, turn {t}: {len(turn.response_ids)} response_ids but '
          f'{len(turn.response_logps)} response_logps; there must be one for '
          'each sampled token.'
        )

  turns = [turn for episode in episodes for turn in episode.turns]
  length_U = np.array([len(turn.response_ids) for turn in turns], np.int32)
  count_E = np.array([len(episode.turns) for episode in episodes], np.int32)
  episode_U = np.repeat(np.arange(len(episodes), dtype=np.int32), count_E)
  num_E = bucket(len(episodes), 8)
  num_U = bucket(len(turns), 32)
  num_R = bucket(int(length_U.sum()), 256)

  groups: dict[Task, int] = {}
  group_E = [groups.setdefault(e.task, len(groups)) for e in episodes]
  states: dict[tuple[int, int], int] = {}
  state_U = [
    states.setdefault((group_E[e], turn.state_key), len(states))
    for e, turn in zip(episode_U, turns, strict=True)
  ]
  has_tokens_E = np.bincount(episode_U, weights=length_U) > 0
  score_E = np.array([episode.score for episode in episodes], np.float32)
  if outcome == 'binary':
    success_E = np.array([episode.success for episode in episodes])
    return_E = success_return * success_E
  else:
    success_E = score_E >= success_threshold
    return_E = success_return * np.maximum(score_E, score_floor) / score_max

  def pad(values, size, fill, dtype):
    values = np.asarray(values, dtype)
    return np.pad(values, (0, size - len(values)), constant_values=fill)

  return TurnTable(
    turn_episode_U=pad(episode_U, num_U, num_E, np.int32),
    turn_index_U=pad(
      np.concatenate([np.arange(n) for n in count_E]), num_U, 0, np.int32
    ),
    turn_tokens_U=pad(length_U, num_U, 0, np.int32),
    turn_reward_U=pad([t.reward for t in turns], num_U, 0, np.float32),
    turn_valid_U=pad([t.valid for t in turns], num_U, True, np.bool_),
    turn_truncated_U=pad([t.truncated for t in turns], num_U, False, np.bool_),
    turn_state_U=pad(state_U, num_U, num_U, np.int32),
    episode_group_E=pad(
      np.where(has_tokens_E, group_E, num_E), num_E, num_E, np.int32
    ),
    episode_return_E=pad(return_E, num_E, 0, np.float32),
    episode_score_E=pad(score_E, num_E, 0, np.float32),
    episode_success_E=pad(success_E, num_E, False, np.bool_),
    episode_truncated_E=pad(
      [e.ending is not Ending.TERMINATED for e in episodes],
      num_E,
      False,
      np.bool_,
    ),
    token_turn_R=pad(
      np.repeat(np.arange(len(turns)), length_U), num_R, num_U, np.int32
    ),
    token_role_R=np.zeros(num_R, np.int32),
  )


def learnable(played: Sequence[Episode]) -> list[Episode]:
  """The episodes with an outcome and a turn to learn from."""
  return [e for e in played if e.ending is not Ending.FAULT and e.turns]
