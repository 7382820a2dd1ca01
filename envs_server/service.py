"""Answers the calls of text_env.proto from a pool of workers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import message

from envs_server import (
  access,
  env,
  pool,
  telemetry,
  text_env_pb2,
  text_env_pb2_grpc,
  worker,
)

T = TypeVar('T')

SERVICE = text_env_pb2.DESCRIPTOR.services_by_name['TextEnv'].full_name

_PAGE_SIZE = 1000
# Replies of an episode that are kept to be given again. A client that repeats
# a message repeats its last one; more is kindness, all of them would be a way
# to fill our memory.
_KEPT = 16
# Bytes of an error; it travels in a header, which is small, and in which a
# byte may take three.
_LONGEST_ERROR = 1000


@dataclasses.dataclass(frozen=True)
class Limits:
  """What an episode may take.

  Attributes:
    reset_s: seconds of a reset.
    step_s: seconds of a step; then its worker is killed.
    idle_s: seconds without an act after which the worker is taken back.
    action_bytes: of an action in UTF-8.
    latency_ms: bounds of a random delay before each reply, for tests that
      results do not depend on timing.
  """

  reset_s: float
  step_s: float
  idle_s: float
  action_bytes: int
  latency_ms: tuple[float, float]


class Servicer(text_env_pb2_grpc.TextEnvServicer):
  """Serves one environment."""

  def __init__(
    self,
    name: str,
    catalog: env.Catalog,
    workers: pool.Pool,
    limits: Limits,
    granted: access.Access,
    meter: telemetry.Telemetry,
  ):
    """Serves at once.

    Args:
      name: name of the environment.
      catalog: what can be asked of it.
      workers: started.
      limits: of every episode.
      granted: tells clients apart.
      meter: is told of every episode.
    """
    self._name = name
    self._catalog = catalog
    self._pool = workers
    self._limits = limits
    self._access = granted
    self._meter = meter
    # Of the operating system: no seed may make the delays repeat.
    self._random = random.SystemRandom()

  async def Describe(
    self,
    request: text_env_pb2.DescribeRequest,
    context: grpc.aio.ServicerContext,
  ) -> text_env_pb2.Description:
    return text_env_pb2.Description(
      name=self._name,
      version=self._catalog.version,
      splits=self._catalog.split_sizes,
      task_names=self._catalog.task_names,
      action_format=self._catalog.action_format,
      workers=self._pool.size,
      busy=self._pool.busy,
      waiting=self._pool.waiting,
      sets={
        name: text_env_pb2.TaskSet(task_names=names)
        for name, names in self._catalog.sets.items()
      },
      max_action_bytes=self._limits.action_bytes,
      ready=self._pool.ready,
    )

  async def ListTasks(
    self,
    request: text_env_pb2.ListTasksRequest,
    context: grpc.aio.ServicerContext,
  ) -> text_env_pb2.ListTasksReply:
    try:
      first = _page_start(request.page_token)
      if request.page_size < 0:
        raise env.TaskError(
          f'page_size is {request.page_size}; give 0 or more.'
        )
      count = min(request.page_size or _PAGE_SIZE, _PAGE_SIZE)
      tasks, total = self._catalog.page(
        self._name, request.split, request.names, first=first, count=count
      )
      if first and not tasks:
        raise _unknown_page(request.page_token)
    except env.TaskError as error:
      await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    end = first + count
    return text_env_pb2.ListTasksReply(
      tasks=[_task_message(task) for task in tasks],
      next_page_token=str(end) if end < total else '',
    )

  async def Play(
    self,
    requests: AsyncIterator[text_env_pb2.PlayRequest],
    context: grpc.aio.ServicerContext,
  ) -> None:
    record = _Record()
    lent: worker.Worker | None = None
    try:
      first = await self._soon(
        anext(requests, None), 'no message came', self._limits.reset_s
      )
      if first is None:
        return
      start, task = self._check_start(first)
      with _clocked(self._meter.queued):
        lent = await self._pool.acquire(access.client_of(context, self._access))
      record.outcome = 'abandoned'
      await context.send_initial_metadata(())
      with _clocked(self._meter.reset):
        observation = await lent.reset(
          task,
          start.want_expert,
          start.want_admissible,
          deadline_s=self._limits.reset_s,
        )
      while True:
        reply = record.add(observation, start.step_limit)
        if lent is not None and reply.ending != text_env_pb2.NONE:
          self._pool.release(lent)
          lent = None
        await self._delay()
        await self._write(context, reply)
        act = await self._next_act(requests, record)
        while act is not None and act.turn <= record.turn:
          await self._write(context, record.again(act.turn))
          act = await self._next_act(requests, record)
        if act is None:
          return
        with _clocked(self._meter.step):
          observation = await lent.step(
            act.action, deadline_s=self._limits.step_s
          )
    except asyncio.CancelledError:
      if record.outcome == 'refused':  # It had not, in the queue.
        record.outcome = 'abandoned'
      raise
    except grpc.aio.InternalError:
      return  # The client went away while we wrote to it.
    except _ENDS as error:
      code, told = self._explain(error, lent, record)
      if lent is not None:  # No worker waits until the client has read it.
        self._pool.release(lent)
        lent = None
      with contextlib.suppress(grpc.aio.InternalError):
        await _refuse(context, code, told)
    finally:
      if lent is not None:
        self._pool.release(lent)
      self._meter.episode(record.outcome)

  def _check_start(
    self, request: text_env_pb2.PlayRequest
  ) -> tuple[text_env_pb2.Start, env.Task]:
    if request.WhichOneof('message') != 'start':
      raise env.TaskError('the first message of Play must be a Start.')
    start = request.start
    if start.step_limit < 0:
      raise env.TaskError(
        f'step_limit is {start.step_limit}; give 1 or more, or 0 for none.'
      )
    task = env.Task(
      env=start.task.env,
      split=start.task.split,
      index=start.task.index,
      name=start.task.name,
      seed=start.task.seed,
      options=dict(start.task.options),
    )
    if task.env != self._name:
      raise env.TaskError(
        f'unknown environment {task.env!r}; this service plays {self._name!r}.'
      )
    self._catalog.check(task)
    return start, task

  async def _next_act(
    self,
    requests: AsyncIterator[text_env_pb2.PlayRequest],
    record: _Record,
  ) -> text_env_pb2.Act | None:
    """Returns the next act, maybe one played already; None at the end.

    Raises:
      env.TaskError: the message breaks a rule that none may break.
      _OrderError: no act of that turn can be taken now.
      _IdleError: none came for too long.
    """
    request = await self._soon(
      anext(requests, None), 'no act came', self._limits.idle_s
    )
    if request is None:
      return None
    if request.WhichOneof('message') != 'act' or request.act.turn < 1:
      raise env.TaskError(
        'after the Start every message of Play must be an Act of turn 1 or '
        'more.'
      )
    act = request.act
    record.check(act.turn)
    size = len(act.action.encode())
    if size > self._limits.action_bytes:
      raise env.TaskError(
        f'the action of turn {act.turn} has {size} bytes; at most '
        f'{self._limits.action_bytes} are taken (--max-action-bytes).'
      )
    return act

  async def _write(
    self, context: grpc.aio.ServicerContext, reply: text_env_pb2.Reply
  ) -> None:
    await self._soon(
      context.write(reply), 'no reply was read', self._limits.idle_s
    )

  async def _soon(self, work: Awaitable[T], what: str, limit_s: float) -> T:
    """Waits for the client.

    Raises:
      _IdleError: it lets us wait for too long.
    """
    try:
      async with asyncio.timeout(limit_s):
        return await work
    except TimeoutError:
      raise _IdleError(f'{what} for {limit_s:g} s') from None

  async def _delay(self) -> None:
    if self._limits.latency_ms[1]:
      await asyncio.sleep(self._random.uniform(*self._limits.latency_ms) / 1000)

  def _explain(
    self, error: Exception, lent: worker.Worker | None, record: _Record
  ) -> tuple[grpc.StatusCode, str]:
    """The status of an episode that cannot go on, and why in words."""
    code, told = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, (env.TaskError, message.DecodeError, _OrderError)):
      record.refuse()
    if isinstance(error, _OrderError):
      code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(error, message.DecodeError):
      told = 'that is no message of text_env.proto.'
    elif isinstance(error, pool.QueueFullError):
      code = grpc.StatusCode.RESOURCE_EXHAUSTED
    elif isinstance(error, worker.TooLargeError):
      record.fault('large', self._meter)
      code = grpc.StatusCode.OUT_OF_RANGE
    elif isinstance(error, env.BrokenTaskError):
      record.fault('broken', self._meter)
      code = grpc.StatusCode.DATA_LOSS
    elif isinstance(error, _IdleError):
      record.fault('idle', self._meter)
      code = grpc.StatusCode.ABORTED
    elif isinstance(error, worker.WorkerLostError):
      record.fault(error.kind, self._meter)
      code = grpc.StatusCode.ABORTED
      told = (
        f'{self._name} worker lost at turn {record.turn + 1} ({error.kind}): '
        f'{error}'
      )
      if lent is None:
        code = grpc.StatusCode.UNAVAILABLE
        told = f'no {self._name} worker: {error}'
    return code, told


class _OrderError(Exception):
  """An act of this turn cannot be taken now."""


class _IdleError(Exception):
  """The client has not acted for too long."""


_ENDS = (
  env.TaskError,
  env.BrokenTaskError,
  message.DecodeError,
  pool.QueueFullError,
  worker.TooLargeError,
  worker.WorkerLostError,
  _OrderError,
  _IdleError,
)


class _Record:
  """What an episode has come to.

  Attributes:
    turn: the last one played; -1 before the reset.
    outcome: of the episode so far, as `telemetry.Telemetry.episode` has it.
  """

  def __init__(self):
    self.turn = -1
    self.outcome = 'refused'
    self._score = 0.0
    self._ended = False
    self._replies: collections.deque[text_env_pb2.Reply] = collections.deque(
      maxlen=_KEPT
    )

  def add(
    self, observation: env.Observation, step_limit: int
  ) -> text_env_pb2.Reply:
    """The reply of the next turn."""
    self.turn += 1
    # What a reset scores already was not earned by an action.
    reward = observation.score - self._score if self.turn else 0.0
    self._score = observation.score
    ending = text_env_pb2.NONE
    if observation.terminated:
      ending, self.outcome = text_env_pb2.TERMINATED, 'terminated'
    elif 0 < step_limit <= self.turn:
      ending, self.outcome = text_env_pb2.TRUNCATED, 'truncated'
    self._ended = ending != text_env_pb2.NONE
    if self._ended:  # The stream may last, so keep no more than it needs.
      self._replies.clear()
    reply = text_env_pb2.Reply(
      turn=self.turn,
      observation=observation.text,
      reward=reward,
      score=observation.score,
      success=observation.success,
      ending=ending,
      goal=observation.goal,
      expert_actions=observation.expert_actions,
      admissible=observation.admissible,
      info=observation.info,
    )
    self._replies.append(reply)
    return reply

  def again(self, turn: int) -> text_env_pb2.Reply:
    """The reply of a turn that `check` has passed."""
    return self._replies[turn - self.turn - 1]

  def check(self, turn: int) -> None:
    """Raises _OrderError unless an act of `turn` can be answered."""
    why = ''
    if turn > self.turn + 1:
      why = 'turns go one by one'
    elif turn == self.turn + 1 and self._ended:
      why = 'the episode has ended'
    elif turn <= self.turn - len(self._replies):
      why = f'only the last {_KEPT} replies are kept'
    if why:
      raise _OrderError(f'turn {turn} cannot follow turn {self.turn}: {why}.')

  def refuse(self) -> None:
    """The client asked for what cannot be."""
    if not self._ended:
      self.outcome = 'refused'

  def fault(self, kind: str, meter: telemetry.Telemetry) -> None:
    """The episode cannot go on.

    One that has ended already, or never had a worker, has lost nothing.
    """
    if not self._ended and self.outcome != 'refused':
      self.outcome = 'fault'
      meter.fault(kind)


@contextlib.contextmanager
def _clocked(tell: Callable[[float], None]) -> Iterator[None]:
  """Tells how many seconds it took, if it came to an end."""
  start_s = time.perf_counter()
  yield
  tell(time.perf_counter() - start_s)


async def _refuse(
  context: grpc.aio.ServicerContext, code: grpc.StatusCode, told: str
) -> NoReturn:
  if len(told.encode()) > _LONGEST_ERROR:
    told = told.encode()[:_LONGEST_ERROR].decode(errors='ignore') + ' [cut]'
  await context.abort(code, told)


def _page_start(token: str) -> int:
  # What int() takes beyond ASCII, or at a length that takes it a while, is no
  # token of ours.
  if token and not re.fullmatch(r'[0-9]{1,9}', token):
    raise _unknown_page(token)
  return int(token or 0)


def _unknown_page(token: str) -> env.TaskError:
  return env.TaskError(
    f'unknown page_token {token!r}; give the next_page_token of the page '
    'before.'
  )


def _task_message(task: env.Task) -> text_env_pb2.Task:
  return text_env_pb2.Task(
    env=task.env,
    split=task.split,
    index=task.index,
    name=task.name,
    seed=task.seed,
    options=task.options,
  )
