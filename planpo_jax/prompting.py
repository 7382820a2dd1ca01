"""Reflexion: a policy that is not trained retries what it failed at.

Shinn et al., arXiv 2303.11366, algorithm 1. A trial is a whole episode. The
actor plays; of an episode that failed it writes a reflection in words; the
last Ω reflections stand before the goal of its next trial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from planpo_jax import chat, episodes, rollout, sampling

_TRANSCRIPT = 'Here is how you attempted a task in a text environment.\n'
_REQUEST = (
  'The attempt failed. Do not retell it. Say in a few sentences which of your '
  'decisions were wrong, and which actions you will take instead when you '
  'attempt the same task again.'
)
_MEMORY = 'You attempted this task before and failed. What you noted then:\n'


class Player(Protocol):
  """What is needed of `build.Player`."""

  format: chat.Format

  def play(
    self,
    label: str,
    jobs: Sequence[rollout.Job],
    *,
    seed: tuple[int, ...],
    max_turns: int,
    settings: sampling.Settings,
    prefaces: Sequence[str],
  ) -> rollout.Collected: ...

  def write(
    self,
    label: str,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[np.ndarray],
    *,
    settings: sampling.Settings,
  ) -> list[str]: ...


@dataclasses.dataclass
class _Attempts:
  """What happened to one job so far.

  Attributes:
    episode: the first success, or the last failure; a fault only if nothing
      else was played.
    reflections: the last of them, oldest first.
  """

  episode: episodes.Episode | None = None
  reflections: tuple[str, ...] = ()

  @property
  def solved(self) -> bool:
    return self.episode is not None and self.episode.success


def reflexion(
  player: Player,
  jobs: Sequence[rollout.Job],
  *,
  seed: tuple[int, ...],
  max_turns: int,
  settings: sampling.Settings,
  trials: int = 3,
  memory: int = 3,
) -> list[list[episodes.Episode]]:
  """Plays every job until it succeeds, at most `trials` times.

  All jobs that are still unsolved are played together, and their reflections
  written together. What is sampled depends on (seed, trial, task, member)
  alone; the first trial is what `player.play` gives without reflections.

  Departures from the paper: success is told by the environment, where the
  paper's ALFWorld agent judges by a heuristic, which also stops an episode
  that repeats itself; no examples of reflections are given; the same policy
  acts and reflects. A trial that an environment's fault ended is no attempt:
  it leaves nothing to reflect on, and the episode before it stands. Where the
  reflections do not fit before the goal, the oldest are dropped.

  Args:
    player: plays episodes and writes texts.
    jobs: what to play; the result keeps this order.
    seed: integers that name this evaluation.
    max_turns: turns after which an episode is truncated.
    settings: of sampling, for actions and for reflections.
    trials: most episodes a job.
    memory: Ω of the paper, reflections shown at most (1 to 3 there).

  Returns:
    For each trial, the episode of every job that counts after it: its first
    success, else its last failure.

  Raises:
    ValueError: trials or memory below 1, or `chat.max_context` has no room for
      the request of a reflection.
  """
  for name, value in (('trials', trials), ('memory', memory)):
    if value < 1:
      raise ValueError(f'{name}={value} must be at least 1; raise it.')
  _room(player.format)
  attempts = [_Attempts() for _ in jobs]
  history = []
  for trial in range(trials):
    left = [i for i, attempt in enumerate(attempts) if not attempt.solved]
    failed = []
    if left:
      played = player.play(
        f'trial {trial + 1} of {trials}',
        [jobs[i] for i in left],
        seed=(*seed, trial) if trial else seed,
        max_turns=max_turns,
        settings=settings,
        prefaces=[preface(attempts[i].reflections) for i in left],
      ).episodes
      for i, episode in zip(left, played, strict=True):
        fault = episode.ending is episodes.Ending.FAULT
        if attempts[i].episode is None or not fault:
          attempts[i].episode = episode
        if not fault and not episode.success:
          failed.append(i)
    history.append([attempt.episode for attempt in attempts])
    if failed and trial + 1 < trials:
      texts = player.write(
        f'reflections on trial {trial + 1}',
        [
          reflection_prompt(
            player.format, attempts[i].episode, attempts[i].reflections
          )
          for i in failed
        ],
        # One number longer than any seed of a trial.
        [rollout.turn_key((*seed, trial, 0), *jobs[i], 0) for i in failed],
        settings=settings,
      )
      for i, text in zip(failed, texts, strict=True):
        new = tuple(filter(None, [' '.join(text.split())]))
        kept = (*attempts[i].reflections, *new)[-memory:]
        while kept and not _fits(player.format, attempts[i].episode, kept):
          kept = kept[1:]
        attempts[i].reflections = kept
  return history


def preface(reflections: Sequence[str]) -> str:
  """What stands before the goal, oldest reflection first."""
  if not reflections:
    return ''
  return _MEMORY + ''.join(f'- {text}\n' for text in reflections)


def reflection_prompt(
  fmt: chat.Format, episode: episodes.Episode, reflections: Sequence[str]
) -> list[int]:
  """Ids of the prompt that asks for a reflection on a failed episode.

  The system message is the checkpoint's own, because that of the format asks
  for an action. The goal and the request stand behind the transcript, which is
  cut from its front to leave room for `chat.max_response` tokens.
  """
  lines = [preface(reflections)]
  for i, turn in enumerate(episode.turns, 1):
    lines.append(f'[{i}] {turn.observation}\n> {turn.response.strip()}\n')
  lines.append(f'Task: {episode.goal}\n')
  transcript = fmt.tokenizer.encode(''.join(lines))
  return _request(fmt, transcript[-_room(fmt) :])


def _request(fmt: chat.Format, transcript: Sequence[int]) -> list[int]:
  # Encoded in pieces, so that a cut leaves an exact number of tokens.
  tok = fmt.tokenizer
  return [
    *fmt.system(''),
    tok.im_start,
    *tok.encode(f'user\n{_TRANSCRIPT}'),
    *transcript,
    *tok.encode(_REQUEST),
    *fmt.end(),
    *fmt.answer(),
  ]


def _room(fmt: chat.Format) -> int:
  """Tokens left for the transcript in the prompt of a reflection.

  Raises:
    ValueError: there are none.
  """
  needed = len(_request(fmt, ())) + fmt.max_response
  if needed >= fmt.max_context:
    raise ValueError(
      f'chat.max_context={fmt.max_context} must exceed {needed}, the tokens '
      'that a request of a reflection and chat.max_response='
      f'{fmt.max_response} take; raise it.'
    )
  return fmt.max_context - needed


def _fits(
  fmt: chat.Format, episode: episodes.Episode, reflections: Sequence[str]
) -> bool:
  """Whether the first turn of the next trial has room for a whole response."""
  talk = fmt.begin(preface(reflections) + episode.goal)
  try:
    # The same task begins with the same observation.
    context, _ = talk.prompt(episode.turns[0].observation)
  except chat.PromptTooLongError:
    return False
  return len(context) + fmt.max_response <= fmt.max_context
