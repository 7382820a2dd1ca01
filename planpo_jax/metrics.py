"""Scalars out: terminal, metrics.jsonl, TensorBoard files, transcripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer import event_file_writer

from planpo_jax import episodes

# Seconds between progress lines where the output is not a terminal.
_PLAIN_INTERVAL_S = 10.0


class Writer:
  """Appends scalars of a run to its workdir.

  A run that resumes at `first_step` drops the lines of later steps first: an
  interrupted run wrote them, and they are about to be written again.
  """

  def __init__(self, workdir: pathlib.Path, first_step: int):
    self._path = workdir / 'metrics.jsonl'
    self._keep(first_step)
    self._events = event_file_writer.EventFileWriter(str(workdir / 'tb'))
    # TensorBoard drops what an earlier file says of this step and later ones.
    self._events.add_event(
      event_pb2.Event(
        step=first_step + 1,
        wall_time=time.time(),
        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
      )
    )

  def _keep(self, first_step: int) -> None:
    if not self._path.exists():
      return
    kept = []
    for line in self._path.read_text(errors='replace').splitlines():
      # A line that was half written, or is not ours, goes.
      with contextlib.suppress(ValueError, KeyError, TypeError):
        if json.loads(line)['step'] <= first_step:
          kept.append(line + '\n')
    part = self._path.with_suffix('.part')
    part.write_text(''.join(kept))
    part.rename(self._path)

  def write(self, step: int, kind: str, scalars: Mapping[str, float]) -> None:
    """One line for step `step` (steps done); `kind` is train or eval."""
    values = {k: float(v) for k, v in scalars.items()}
    record = {'step': step, 'time': time.time(), 'kind': kind} | {
      k: v if math.isfinite(v) else None for k, v in values.items()
    }
    with self._path.open('a') as f:
      f.write(json.dumps(record) + '\n')
    self._events.add_event(
      event_pb2.Event(
        step=step,
        wall_time=record['time'],
        summary=summary_pb2.Summary(
          value=[
            summary_pb2.Summary.Value(tag=k, simple_value=v)
            for k, v in values.items()
          ]
        ),
      )
    )
    self._events.flush()

  def close(self) -> None:
    self._events.close()


class Terminal:
  """What the run is doing now, for the person who waits for it."""

  def __init__(self, stream=sys.stderr):
    self._stream = stream
    self._live = stream.isatty()
    self._start = time.monotonic()
    self._last = 0.0
    self._open = False
    # Rollouts may run in a thread beside the update.
    self._lock = threading.Lock()

  def say(self, text: str) -> None:
    """A line that stays."""
    elapsed = time.monotonic() - self._start
    with self._lock:
      if self._open:
        self._stream.write('\r\033[K')
        self._open = False
      self._stream.write(f'[{duration(elapsed)}] {text}\n')
      self._stream.flush()

  def progress(self, text: str) -> None:
    """A line that the next one replaces; every 10 s where lines stay."""
    now = time.monotonic()
    if self._live:
      with self._lock:
        if now - self._last > 0.1:
          self._stream.write(f'\r\033[K{text}')
          self._stream.flush()
          self._last, self._open = now, True
    elif now - self._last > _PLAIN_INTERVAL_S:
      self._last = now
      self.say(text)


def duration(seconds: float) -> str:
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02d}:{seconds:02d}'
  return f'{minutes:d}:{seconds:02d}'


@dataclasses.dataclass
class Timers:
  """Seconds spent in each named part of a step."""

  seconds: dict[str, float] = dataclasses.field(default_factory=dict)

  @contextlib.contextmanager
  def measure(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      spent = time.perf_counter() - start
      self.seconds[name] = self.seconds.get(name, 0.0) + spent

  def scalars(self) -> dict[str, float]:
    scalars = {f'time/{name}_s': s for name, s in self.seconds.items()}
    return scalars | {'time/step_s': sum(self.seconds.values())}


# Groups whose members all did alike: GRPO learns nothing from them; and of
# those the share from which the method of the run learns something.
_TIED = 'advantage/groups_without_outcome_variance'
_TAUGHT = 'advantage/signal_without_outcome_variance'


# From this share of groups that teach nothing on, a flat curve says little
# about the method.
_TIED_WARNING = 0.8
# Nats between the sampler's and the learner's log-probability of one token, by
# the type of the products. Rounding makes 1e-6 to 1e-4 of it in float32 on a
# CPU, and 0.13 to 0.17 in bfloat16.
_GAP_WARNING = {'float32': 1e-3, 'bfloat16': 0.5}


def warnings(
  scalars: Mapping[str, float], dtype: str, filtered: bool = False
) -> list[str]:
  """Sentences about a step that need somebody's attention.

  Args:
    scalars: of the step.
    dtype: `model.dtype`.
    filtered: sampling leaves out ids that the learner scores.
  """
  found = []
  idle = scalars[_TIED] * (1 - scalars[_TAUGHT])
  if idle >= _TIED_WARNING:
    found.append(
      f'in {idle:.0%} of the groups all members did alike, and nothing is '
      'learnt from them; tasks of middling difficulty or a larger group_size '
      'teach more'
    )
  for network, section in (('policy', 'loss'), ('critic', 'critic')):
    nonfinite = scalars.get(f'{section}/nonfinite_updates', 0)
    idle = scalars.get(f'{section}/skipped_updates', 0) - nonfinite
    if nonfinite:
      found.append(
        f'{nonfinite:.0f} updates of the {network} were skipped because a '
        'gradient or a step was not finite; try a lower learning rate'
      )
    if idle:
      found.append(
        f'{idle:.0f} updates of the {network} had nothing to learn from and '
        'were skipped'
      )
  # An older policy disagrees by rights, and so does a filtered one.
  alike = not scalars['rollout/staleness'] and not filtered
  # Turned round, so that NaN warns too.
  if alike and not scalars['loss/sampler_gap'] <= _GAP_WARNING[dtype]:
    found.append(
      'sampler and learner disagree on a token by '
      f'{scalars["loss/sampler_gap"]:.3f} nats, above {_GAP_WARNING[dtype]}; '
      'loss.ppo_clip.sampler_cap weighs it'
    )
  if scalars['rollout/deadline_episodes']:
    found.append(
      f'{scalars["rollout/deadline_episodes"]:.0%} of the episodes were cut '
      'off by rollout.deadline_s; metrics.jsonl tells of which task types'
    )
  if scalars['rollout/faults']:
    found.append(
      f'{scalars["rollout/faults"]:.0f} episodes were lost to faults of the '
      'environment and left out'
    )
  return found


class Clock:
  """Tells at each step how long the steps that remain will take."""

  def __init__(self):
    self._seconds: list[float] = []

  def line(
    self,
    done: int,
    steps: int,
    scalars: Mapping[str, float],
    timers: Timers,
  ) -> str:
    """One line for a finished step."""
    self._seconds.append(sum(timers.seconds.values()))
    # The median: the first step holds the compilations.
    left = float(np.median(self._seconds)) * (steps - done)
    parts = ', '.join(f'{k} {s:.0f}' for k, s in timers.seconds.items())
    return (
      f'step {done}/{steps}: success {scalars["rollout/success"]:.0%}, '
      f'score {scalars["rollout/score"]:.0f}, '
      f'turns {scalars["rollout/turns"]:.1f}, '
      f'tokens a response {scalars["rollout/response_tokens"]:.1f}, '
      f'groups tied {scalars[_TIED]:.0%}, KL {scalars["loss/kl_ref"]:.4f}, '
      f'clipped {scalars["loss/clip_frac"]:.1%}, '
      f'{self._seconds[-1]:.0f} s ({parts}), {duration(left)} left'
    )


def rollout_scalars(played: Sequence[episodes.Episode]) -> dict[str, float]:
  """Means over the episodes that are not faults."""
  whole = [e for e in played if e.ending is not episodes.Ending.FAULT]
  turns = [turn for e in whole for turn in e.turns]

  def mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else math.nan

  return {
    'rollout/episodes': len(whole),
    'rollout/faults': len(played) - len(whole),
    'rollout/recoveries': sum(e.recoveries for e in played),
    'rollout/success': mean(e.success for e in whole),
    'rollout/score': mean(e.score for e in whole),
    'rollout/turns': mean(len(e.turns) for e in whole),
    'rollout/turns_success': mean(len(e.turns) for e in whole if e.success),
    'rollout/response_tokens': mean(len(t.response_ids) for t in turns),
    'rollout/truncated_episodes': mean(
      e.ending is episodes.Ending.TRUNCATED for e in whole
    ),
    'rollout/deadline_episodes': mean(
      e.ending is episodes.Ending.DEADLINE for e in whole
    ),
    'rollout/dropped_pairs': mean(e.dropped_pairs for e in whole),
    'rollout/truncated_responses': mean(t.truncated for t in turns),
    'rollout/valid_actions': mean(t.valid for t in turns),
  } | _cut_scalars(whole)


def _cut_scalars(whole: Sequence[episodes.Episode]) -> dict[str, float]:
  """Whom the deadline cut off: a set that is skewed skews what is learnt."""
  cut = [e for e in whole if e.ending is episodes.Ending.DEADLINE]
  if not cut:
    return {}
  turns = [len(e.turns) for e in cut]
  scalars = {'rollout/deadline_turns': float(np.mean(turns))}
  for name in sorted({e.task.name for e in cut}):
    played = sum(e.task.name == name for e in whole)
    share = sum(e.task.name == name for e in cut) / played
    scalars[f'rollout_deadline/{name}'] = share
  return scalars


def write_transcripts(
  path: pathlib.Path, step: int, played: Sequence[episodes.Episode]
) -> None:
  """Episodes as JSON lines, for people to read."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('w') as f:
    for e in played:
      f.write(json.dumps(_transcript(step, e)) + '\n')


def _transcript(step: int, e: episodes.Episode) -> dict:
  return {
    'step': step,
    'split': e.task.split,
    'task': dataclasses.asdict(e.task),
    'member': e.member,
    'goal': e.goal,
    'score': e.score,
    'success': e.success,
    'ending': e.ending.value,
    'fault': e.fault,
    'turns': [
      {
        'observation': t.observation,
        'response': t.response,
        'action': t.action,
        'valid': t.valid,
        'reward': t.reward,
        'tokens': len(t.response_ids),
        'truncated': t.truncated,
      }
      for t in e.turns
    ],
  }
