"""Client of the environment service: deadlines, recovery, faults.

A session survives the loss of its worker, of the stream and of the whole
service: it plays the same actions again on a new stream, checks that they
bring the same observations, and goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

import grpc
import grpc.aio

from envs_server import text_env_pb2, text_env_pb2_grpc
from planpo_jax import episodes

_log = logging.getLogger(__name__)

_OPTIONS = (
  # A service that restarts is back in a second or two: try often.
  ('grpc.initial_reconnect_backoff_ms', 100),
  ('grpc.min_reconnect_backoff_ms', 100),
  ('grpc.max_reconnect_backoff_ms', 1_000),
  # Notices a host that vanished without closing its connections.
  ('grpc.keepalive_time_ms', 20_000),
  ('grpc.keepalive_timeout_ms', 10_000),
  # Channels of one process would otherwise share connections and back-off.
  ('grpc.use_local_subchannel_pool', 1),
  ('grpc.enable_http_proxy', 0),
)
_RECONNECT_DEADLINE_S = 30.0
_QUEUE_NOTICE_S = 20.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
_ENDINGS = {
  text_env_pb2.NONE: None,
  text_env_pb2.TERMINATED: episodes.Ending.TERMINATED,
  text_env_pb2.TRUNCATED: episodes.Ending.TRUNCATED,
}


class EnvFault(Exception):  # noqa: N818  A fault is this project's word.
  """An episode cannot go on, after all retries; says why."""


@dataclasses.dataclass(frozen=True)
class Description:
  """What a service serves.

  Attributes:
    name: name of the environment.
    version: version of the environment and what else decides its behaviour.
    splits: {split: number of tasks}.
    task_names: task types, in the order of `list_tasks`.
    action_format: one paragraph for the policy: what an action looks like.
    workers: episodes that can be played at once.
    busy: episodes that are played now.
    waiting: episodes that wait for a worker now.
  """

  name: str
  version: str
  splits: dict[str, int]
  task_names: tuple[str, ...]
  action_format: str
  workers: int
  busy: int
  waiting: int


class _LostError(Exception):
  """The stream is of no use any more, but another one may be."""


class EnvClient:
  """Talks to one service. All its coroutines belong to one event loop."""

  def __init__(
    self,
    address: str,
    *,
    step_deadline_s: float = 60.0,
    reset_deadline_s: float = 120.0,
    queue_deadline_s: float = 1800.0,
    retries: int = 3,
  ):
    """Connects to nothing yet.

    Args:
      address: `host:port` of the service.
      step_deadline_s: seconds an action may take.
      reset_deadline_s: seconds a reset may take once it has a worker.
      queue_deadline_s: seconds to wait for a free worker.
      retries: recoveries in a row without progress before a fault.
    """
    self.address = address
    self.step_deadline_s = step_deadline_s
    self.reset_deadline_s = reset_deadline_s
    self.queue_deadline_s = queue_deadline_s
    self.retries = retries
    self._channel: grpc.aio.Channel | None = None

  async def connect(self, timeout_s: float = 30.0) -> None:
    """Connects and makes sure that a text environment answers.

    Raises:
      ConnectionError: nothing, or something else, answers at the address.
    """
    if self._channel is None:
      self._channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
      self.stub = text_env_pb2_grpc.TextEnvStub(self._channel)
    try:
      async with asyncio.timeout(timeout_s):
        await self._channel.channel_ready()
        await self.stub.Describe(text_env_pb2.DescribeRequest())
    except (TimeoutError, grpc.aio.AioRpcError) as error:
      cause = f'no answer within {timeout_s:g} s'
      if isinstance(error, grpc.aio.AioRpcError):
        cause = _explain(error)
      await self.close()
      raise ConnectionError(
        f'No environment service at {self.address!r} ({cause}). Start one '
        'there with `python -m envs_server --env=NAME --port=PORT`, or leave '
        'the address empty to have one started on this machine.'
      ) from error

  async def wait_connected(self) -> None:
    """Waits until the service is back.

    Raises:
      TimeoutError: it did not come back in time.
    """
    async with asyncio.timeout(_RECONNECT_DEADLINE_S):
      await self._channel.channel_ready()

  async def describe(self) -> Description:
    """Asks what the service serves and how busy it is.

    Raises:
      ConnectionError: the service does not answer.
    """
    reply = await self._ask(self.stub.Describe, text_env_pb2.DescribeRequest())
    return Description(
      name=reply.name,
      version=reply.version,
      splits=dict(reply.splits),
      task_names=tuple(reply.task_names),
      action_format=reply.action_format,
      workers=reply.workers,
      busy=reply.busy,
      waiting=reply.waiting,
    )

  async def list_tasks(
    self, split: str, names: Sequence[str] = ()
  ) -> list[episodes.Task]:
    """Lists tasks by type and then by index.

    Args:
      split: a split of the environment.
      names: task types to list; none lists all.

    Raises:
      ValueError: unknown split or task type; the known ones are listed.
      ConnectionError: the service does not answer.
    """
    tasks = []
    request = text_env_pb2.ListTasksRequest(split=split, names=names)
    while True:
      reply = await self._ask(self.stub.ListTasks, request)
      tasks.extend(
        episodes.Task(
          env=task.env,
          split=task.split,
          index=task.index,
          name=task.name,
          seed=task.seed,
          options=tuple(sorted(task.options.items())),
        )
        for task in reply.tasks
      )
      if not reply.next_page_token:
        return tasks
      request.page_token = reply.next_page_token

  def session(
    self,
    task: episodes.Task,
    *,
    step_limit: int,
    expert: bool = False,
    admissible: bool = False,
  ) -> Session:
    """An episode of `task` that has not begun; close it in any case.

    Args:
      task: what to play.
      step_limit: actions after which the episode is truncated; 0: never.
      expert: whether the reset shall come with a solution.
      admissible: whether observations shall list admissible actions.
    """
    start = text_env_pb2.Start(
      task=text_env_pb2.Task(
        env=task.env,
        split=task.split,
        index=task.index,
        name=task.name,
        seed=task.seed,
        options=dict(task.options),
      ),
      step_limit=step_limit,
      want_expert=expert,
      want_admissible=admissible,
    )
    return Session(self, start)

  async def close(self) -> None:
    """Closes the connection, and with it every session."""
    if self._channel is not None:
      await self._channel.close()
      self._channel = None

  async def _ask(self, method, request):
    """One call without side effects: repeated while the service is away."""
    for attempt in range(self.retries + 1):
      try:
        return await method(
          request, timeout=self.reset_deadline_s, wait_for_ready=attempt > 0
        )
      except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
          raise ValueError(error.details()) from error
        if error.code() in _FINAL or attempt == self.retries:
          raise ConnectionError(
            f'the environment service at {self.address} does not answer: '
            f'{_explain(error)}'
          ) from error
      await asyncio.sleep(_backoff_s(attempt))


class Session:
  """One episode, from `EnvClient.session`.

  Attributes:
    faults: recoveries so far.
  """

  def __init__(self, client: EnvClient, start: text_env_pb2.Start):
    self.faults = 0
    self._client = client
    self._sent = [text_env_pb2.PlayRequest(start=start)]
    self._replies: list[text_env_pb2.Reply] = []
    self._call: grpc.aio.StreamStreamCall | None = None

  async def reset(self) -> episodes.Observation:
    """Begins the episode; call it once.

    Raises:
      ValueError: the task cannot exist; says what can.
      EnvFault: the environment failed in all tries.
    """
    if self._replies:
      raise RuntimeError(
        'a session plays one episode; ask the client for another session.'
      )
    return await self._advance()

  async def step(self, action: str) -> episodes.Observation:
    """Takes one action, exactly once whatever breaks meanwhile.

    Raises:
      RuntimeError: before `reset` or after the end of the episode.
      EnvFault: the environment failed in all tries.
    """
    if not self._replies:
      raise RuntimeError('reset the session before its first step.')
    if self._replies[-1].ending != text_env_pb2.NONE:
      raise RuntimeError(
        f'the episode has ended after {len(self._replies) - 1} actions.'
      )
    if len(self._sent) > len(self._replies):
      raise RuntimeError('the session failed; ask the client for another one.')
    act = text_env_pb2.Act(turn=len(self._sent), action=action)
    self._sent.append(text_env_pb2.PlayRequest(act=act))
    return await self._advance()

  async def close(self) -> None:
    """Frees the worker. Harmless when repeated."""
    if self._call is not None:
      self._call.cancel()
      self._call = None

  async def _advance(self) -> episodes.Observation:
    """Gets the reply to the last message sent."""
    turn = len(self._replies)
    for attempt in range(self._client.retries + 1):
      try:
        if self._call is None:
          await self._replay()
        reply = await self._exchange(turn)
      except _LostError as error:
        await self.close()
        cause = str(error)
      except asyncio.CancelledError:
        await self.close()
        raise
      else:
        self._replies.append(reply)
        # A replay needs no second solution, which may take seconds to find.
        self._sent[0].start.want_expert = False
        return _observation(reply)
      self.faults += 1
      _log.warning(
        '%s at turn %d: %s%s',
        _name(self._sent[0].start.task),
        turn,
        cause,
        '' if attempt == self._client.retries else '; recovering',
      )
      if attempt < self._client.retries:
        await asyncio.sleep(_backoff_s(attempt))
    raise EnvFault(
      f'{_name(self._sent[0].start.task)} at turn {turn}, after '
      f'{self._client.retries} retries: {cause}'
    )

  async def _replay(self) -> None:
    """Opens a stream and brings it to where the last one broke."""
    try:
      await self._client.wait_connected()
    except TimeoutError:
      raise _LostError(
        f'no environment service at {self._client.address} for '
        f'{_RECONNECT_DEADLINE_S:g} s'
      ) from None
    self._call = self._client.stub.Play()
    for turn, before in enumerate(self._replies):
      reply = await self._exchange(turn)
      if _outcome(reply) != _outcome(before):
        await self.close()
        raise EnvFault(
          f'{_name(self._sent[0].start.task)} played again went another way '
          f'at turn {turn}: {reply.observation!r} where it was '
          f'{before.observation!r}'
        )

  async def _exchange(self, turn: int) -> text_env_pb2.Reply:
    """Sends the message of a turn and awaits its reply.

    Raises:
      _LostError: the stream broke or took too long.
      ValueError: the service refused the task for good.
      EnvFault: the service refused the message for good.
    """
    client = self._client
    deadline_s = client.step_deadline_s if turn else client.reset_deadline_s
    try:
      if turn == 0:
        await self._call.write(self._sent[0])
        await self._wait_for_worker()
      async with asyncio.timeout(deadline_s):
        if turn:
          await self._call.write(self._sent[turn])
        reply = await self._call.read()
      if reply is grpc.aio.EOF:
        raise grpc.aio.UsageError
    except TimeoutError:
      raise _LostError(f'no reply within {deadline_s:g} s') from None
    # What writing to a stream that is done raises depends on how it ended.
    except (
      grpc.aio.AioRpcError,
      grpc.aio.UsageError,
      asyncio.InvalidStateError,
    ) as error:
      code = await self._call.code()
      details = await self._call.details()
      if code == grpc.StatusCode.INVALID_ARGUMENT:
        raise ValueError(details) from error
      cause = f'{code.name}: {details}'
      if code in _FINAL:
        raise EnvFault(
          f'{_name(self._sent[0].start.task)} at turn {turn}: {cause}'
        ) from error
      raise _LostError(cause) from error
    if reply.turn != turn:
      raise _LostError(f'the reply is to turn {reply.turn}, not to {turn}')
    return reply

  async def _wait_for_worker(self) -> None:
    """Waits in the queue of the service, which may be long and is no fault.

    Raises:
      _LostError: no worker became free in time.
    """
    client = self._client
    served = asyncio.ensure_future(self._call.initial_metadata())
    try:
      for limit_s in (_QUEUE_NOTICE_S, client.queue_deadline_s):
        done, _ = await asyncio.wait([served], timeout=limit_s)
        if done:
          await served
          return
        _log.warning(
          'waiting for a free worker of the environment service at %s (its '
          '--workers is below the number of episodes played at once)',
          client.address,
        )
    finally:
      served.cancel()
    raise _LostError(
      f'no free worker at {client.address} within {client.queue_deadline_s:g} s'
    )


def _outcome(reply: text_env_pb2.Reply) -> tuple:
  """What must be the same when an action is played again."""
  return (reply.observation, reply.score, reply.success, reply.ending)


def _observation(reply: text_env_pb2.Reply) -> episodes.Observation:
  return episodes.Observation(
    text=reply.observation,
    reward=reply.reward,
    score=reply.score,
    success=reply.success,
    ending=_ENDINGS[reply.ending],
    goal=reply.goal,
    expert_actions=tuple(reply.expert_actions),
    admissible=tuple(reply.admissible),
  )


def _name(task: text_env_pb2.Task) -> str:
  return f'{task.env} {task.name} {task.split}/{task.index}'


def _explain(error: grpc.aio.AioRpcError) -> str:
  return f'{error.code().name}: {error.details()}'


def _backoff_s(attempt: int) -> float:
  return min(_FIRST_BACKOFF_S * 4**attempt, _LONGEST_BACKOFF_S)
