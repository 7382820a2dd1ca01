"""Where the episodes of a training step come from.

`Live` plays them with the policy as it is, `Ahead` plays those of the next step
while this one is learnt from, `Replay` reads what another run played. The loop
takes from each in the same way.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

from planpo_jax import dump, episodes, rollout
from planpo_jax.models import qwen2


@dataclasses.dataclass(frozen=True)
class Experience:
  """The episodes of one step.

  Attributes:
    episodes: faults among them.
    staleness: steps that the policy has learnt since it sampled them.
    stats: how they were played; None if they were not.
  """

  episodes: list[episodes.Episode]
  staleness: int
  stats: rollout.Stats | None

  def scalars(self) -> dict[str, float]:
    stats = {} if self.stats is None else self.stats.scalars()
    return stats | {'rollout/staleness': float(self.staleness)}


class Source(abc.ABC):
  """What the loop needs."""

  @abc.abstractmethod
  def take(self, step: int, params: qwen2.Params) -> Experience:
    """The episodes of step `step`, from 0; `params` are the policy's now.

    Raises:
      rollout.StoppedError: the run was asked to stop.
    """

  def wait(self) -> None:
    """Returns when nothing is being played."""
    return  # Nothing ever is between calls of `take`, but for `Ahead`.

  def close(self) -> None:
    """Returns when nothing is being played, which the caller has stopped."""
    self.wait()


# Plays a step's episodes with the params that were set last.
Play = Callable[[int], rollout.Collected]


def refilling(
  play: Callable[[int, Sequence[episodes.Task]], rollout.Collected],
  lots: Callable[[int], Sequence[Sequence[episodes.Task]]],
  enough: Callable[[int, list[episodes.Episode]], bool],
) -> Play:
  """Plays on until a step has enough, or nothing is left to play.

  Args:
    play: (step, tasks) plays a group of each task.
    lots: step -> its tasks, and those of its refills.
    enough: (step, episodes) -> whether the episodes so far suffice.
  """

  def play_enough(step: int) -> rollout.Collected:
    parts: list[rollout.Collected] = []
    for lot in lots(step):
      played = [episode for part in parts for episode in part.episodes]
      if parts and enough(step, played):
        break
      parts.append(play(step, lot))
    return rollout.joined(parts)

  return play_enough


class SetParams(Protocol):
  """Sets the params to play with."""

  def __call__(self, params: qwen2.Params, *, copy: bool = False) -> None:
    """With `copy` they may be donated before all is played."""


class Live(Source):
  """Plays each step's episodes with the policy as it is: strictly on-policy."""

  def __init__(self, set_params: SetParams, play: Play):
    self._set_params = set_params
    self._play = play

  def take(self, step: int, params: qwen2.Params) -> Experience:
    self._set_params(params)
    played = self._play(step)
    return Experience(played.episodes, 0, played.stats)


class Ahead(Source):
  """Plays the next step's episodes while this step's are learnt from.

  They are one step old when their turn comes, all but the first. A run that
  resumes plays its first step with the newest policy, so it is not the same to
  the bit as one that was never interrupted.
  """

  def __init__(self, set_params: SetParams, play: Play, steps: int):
    """`play` is called from another thread, for no step beyond `steps`."""
    self._set_params = set_params
    self._play = play
    self._steps = steps
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._next: tuple[int, concurrent.futures.Future] | None = None

  def take(self, step: int, params: qwen2.Params) -> Experience:
    if self._next is not None and self._next[0] == step:
      played, staleness = self._next[1].result(), 1
    else:
      self.wait()
      self._set_params(params)
      played, staleness = self._play(step), 0
    self._next = None
    if step + 1 < self._steps:
      # Here, not in the thread: the update is about to consume them.
      self._set_params(params, copy=True)
      self._next = step + 1, self._thread.submit(self._play, step + 1)
    return Experience(played.episodes, staleness, played.stats)

  def wait(self) -> None:
    if self._next is not None:
      concurrent.futures.wait([self._next[1]])

  def close(self) -> None:
    self._thread.shutdown(wait=True, cancel_futures=True)


class Replay(Source):
  """Reads each step's episodes from the dump of another run."""

  def __init__(
    self,
    path: pathlib.Path,
    *,
    steps: int,
    context: str,
    temperature: float,
    split: str,
    num_tokens: int,
  ):
    """Opens a dump.

    Args:
      path: folder or file, see `dump.Dump`.
      steps: of the run; the dump must hold 1..steps.
      context: `chat.context` of the run, which must be that of the dump.
      temperature: `sampler.temperature` of the run, likewise.
      split: `env.train_split` of the run, of which its tasks must be.
      num_tokens: ids of its tokenizer.

    Raises:
      dump.DumpError: there is no such dump, or it lacks a step.
    """
    self._num_tokens = num_tokens
    self._split = split
    self._path = path
    self._dump = dump.Dump(path)
    missing = sorted(set(range(1, steps + 1)) - set(self._dump.steps))
    if missing:
      raise dump.DumpError(
        f'rollout.replay={str(path)!r} lacks step {missing[0]} of '
        f'train.steps={steps}; it holds the steps '
        f'{dump.ranges(self._dump.steps)}. Lower train.steps, or give the '
        'folder with all of them.'
      )
    if self._dump.context != context:
      raise dump.DumpError(
        f'rollout.replay={str(path)!r} was recorded with chat.context='
        f'{self._dump.context!r}, not {context!r}: its prompts would be joined '
        f'wrongly; set chat.context={self._dump.context}.'
      )
    if self._dump.temperature != temperature:
      raise dump.DumpError(
        f'rollout.replay={str(path)!r} was sampled at temperature '
        f'{self._dump.temperature}, and the learner scores at '
        f'sampler.temperature={temperature}; set sampler.temperature='
        f'{self._dump.temperature}.'
      )

  def take(self, step: int, params: qwen2.Params) -> Experience:
    del params  # What was sampled is given.
    played = self._dump.episodes(step + 1)
    for episode in played:
      if episode.task.split != self._split:
        raise dump.DumpError(
          f'step {step + 1} of rollout.replay={str(self._path)!r} holds tasks '
          f'of the split {episode.task.split!r}, not of env.train_split='
          f'{self._split!r}: an evaluation is not to be trained on; give the '
          'folder of the dump, or set env.train_split.'
        )
    largest = max(
      (
        max((*turn.prompt_ids, *turn.response_ids), default=0)
        for episode in played
        for turn in episode.turns
      ),
      default=0,
    )
    if largest >= self._num_tokens:
      raise dump.DumpError(
        f'step {step + 1} of rollout.replay={str(self._path)!r} holds the id '
        f'{largest}, but the tokenizer of this run has {self._num_tokens} ids; '
        'give the model that the dump was recorded with.'
      )
    return Experience(played, self._dump.staleness(step + 1), None)
