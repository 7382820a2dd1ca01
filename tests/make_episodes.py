"""Episodes for tests, told by the success and the lengths of each member."""

from __future__ import annotations

from collections.abc import Sequence

from planpo_jax import episodes


def task(index: int = 0) -> episodes.Task:
  return episodes.Task('toy', 'train', index, 'walk')


def episode(
  lengths: Sequence[int],
  *,
  success: bool = False,
  score: float | None = None,
  group: int = 0,
  member: int = 0,
  valid: Sequence[bool] | None = None,
  states: Sequence[int] | None = None,
  prompt: int = 2,
  ending: episodes.Ending = episodes.Ending.TERMINATED,
  first_id: int = 100,
) -> episodes.Episode:
  """Builds an episode; token ids count up from first_id, so each is told."""
  turns = []
  next_id = first_id
  for t, length in enumerate(lengths):
    prompt_ids = tuple(range(next_id, next_id + prompt))
    response_ids = tuple(range(next_id + prompt, next_id + prompt + length))
    next_id += prompt + length
    turns.append(
      episodes.Turn(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_logps=tuple(-0.001 * i for i in response_ids),
        observation='',
        response='',
        action='',
        reward=0.0,
        valid=True if valid is None else valid[t],
        state_key=t if states is None else states[t],
      )
    )
  return episodes.Episode(
    task=task(group),
    member=member,
    turns=tuple(turns),
    score=(100.0 if success else 0.0) if score is None else score,
    success=success,
    ending=ending,
  )


def group(
  members: Sequence[tuple[bool, Sequence[int]]], index: int = 0
) -> list[episodes.Episode]:
  """Builds a group from (success, response lengths) of each member."""
  return [
    episode(lengths, success=success, group=index, member=i)
    for i, (success, lengths) in enumerate(members)
  ]
