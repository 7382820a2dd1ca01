"""Client of the environment services: deadlines, recovery, faults.

Episodes spread over the services by their free workers. A session survives the
loss of its worker, of the stream and of the whole service: it plays the same
actions again on a new stream, at another service where there is one, checks
that they bring the same observations, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from envs_server import text_env_pb2
from planpo_jax import env_fleet, episodes

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
_FIRST_FULL_BACKOFF_S = 0.5
_LONGEST_FULL_BACKOFF_S = 5.0
_ENDINGS = {
  text_env_pb2.NONE: None,
  text_env_pb2.TERMINATED: episodes.Ending.TERMINATED,
  text_env_pb2.TRUNCATED: episodes.Ending.TRUNCATED,
}
_FAREWELL_S = 1.0
# How a service begins that has no worker and can build none.
_NO_WORKER = re.compile(r'no \S+ worker: ')
# Of the operating system: clients with one seed must not come back together.
_random = random.SystemRandom()

# What callers of a client need of its fleet.
Credentials = env_fleet.Credentials
Description = env_fleet.Description


class EnvFault(Exception):  # noqa: N818  A fault is this project's word.
  """An episode cannot go on, after all retries; says why.

  Attributes:
    final: the same would come of it if the episode were played again.
    diverged: its actions, played again, brought something else than before.
  """

  def __init__(self, why: str, *, final: bool = False, diverged: bool = False):
    super().__init__(why)
    self.final = final
    self.diverged = diverged


class _TurnedAwayError(Exception):
  """The service gave no worker, but it may later, or another one may."""


class EnvClient(env_fleet.Fleet):
  """Plays episodes at the services of a fleet. Belongs to one event loop."""

  def __init__(
    self,
    addresses: Sequence[str] | str,
    *,
    credentials: Credentials | None = None,
    step_deadline_s: float = 60.0,
    reset_deadline_s: float = 120.0,
    queue_deadline_s: float = 1800.0,
    away_deadline_s: float = 60.0,
    retries: int = 3,
  ):
    """Connects to nothing yet.

    Args:
      addresses: `host:port` of each service; a string may hold several, with
        commas between them.
      credentials: what the services want to see; None for nothing.
      step_deadline_s: seconds an action may take.
      reset_deadline_s: seconds a reset may take once it has a worker.
      queue_deadline_s: seconds to wait for a free worker.
      away_deadline_s: seconds to wait once no service is up.
      retries: recoveries in a row without progress before a fault.

    Raises:
      ValueError: there is no address.
    """
    super().__init__(
      addresses, credentials=credentials, away_deadline_s=away_deadline_s
    )
    self.step_deadline_s = step_deadline_s
    self.reset_deadline_s = reset_deadline_s
    self.queue_deadline_s = queue_deadline_s
    self.retries = retries

  async def list_tasks(
    self, split: str, names: Sequence[str] = ()
  ) -> list[episodes.Task]:
    """Lists tasks by type and then by index.

    Args:
      split: a split of the environment.
      names: task types, or sets of them, to list; none lists all.

    Raises:
      ValueError: unknown split or task type; the known ones are listed.
      ConnectionError: no service answers.
    """
    tasks = []
    request = text_env_pb2.ListTasksRequest(split=split, names=names)
    while True:
      reply = await self._call('ListTasks', request)
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

  async def _call(self, method: str, request):
    """One call without side effects: repeated while services are away."""
    failed = None
    for attempt in range(self.retries + 1):
      service = await self.place(failed)
      try:
        return await service.call(method, request, self.reset_deadline_s)
      except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
          raise ValueError(error.details()) from error
        if error.code() in env_fleet.FINAL or attempt == self.retries:
          raise ConnectionError(
            f'the environment service at {service.address} does not answer: '
            f'{env_fleet.status(error.code(), error.details())}'
          ) from error
      failed = service
      failed.alarm.set()
      await asyncio.sleep(_backoff_s(attempt))


class Session:
  """One episode, from `EnvClient.session`.

  Attributes:
    faults: recoveries so far.
    waiting_since_s: time of the loop since which it waits in the queue of a
      service; None if it does not.
    spare_since_s: time of the loop since which it has a worker that was reset
      and has not been used; None if it has none, or uses it.
  """

  def __init__(self, client: EnvClient, start: text_env_pb2.Start):
    self.faults = 0
    self.waiting_since_s: float | None = None
    self.spare_since_s: float | None = None
    self._client = client
    self._sent = [text_env_pb2.PlayRequest(start=start)]
    self._replies: list[text_env_pb2.Reply] = []
    self._call: grpc.aio.StreamStreamCall | None = None
    self._service: env_fleet.Service | None = None
    self._failed: env_fleet.Service | None = None  # Where it was lost last.
    self._scope: asyncio.Timeout | None = None
    self._interruption: Exception | None = None

  @property
  def turns(self) -> int:
    """Replies so far, that to the reset among them."""
    return len(self._replies)

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
    if self._ended:
      raise RuntimeError(
        f'the episode has ended after {len(self._replies) - 1} actions.'
      )
    if len(self._sent) > len(self._replies):
      raise RuntimeError('the session failed; ask the client for another one.')
    # Lone surrogates, which Python allows, have no UTF-8.
    action = action.encode(errors='replace').decode()
    act = text_env_pb2.Act(turn=len(self._sent), action=action)
    self._sent.append(text_env_pb2.PlayRequest(act=act))
    return await self._advance()

  async def close(self) -> None:
    """Frees the worker. Harmless when repeated."""
    try:
      if self._call is not None and self._ended:
        # A stream that is cancelled costs gRPC's server a hundred bytes for
        # ever; this one can end in good order.
        with contextlib.suppress(Exception):
          async with asyncio.timeout(_FAREWELL_S):
            await self._call.done_writing()
            await self._call.code()
    finally:  # Also if we are cancelled as we wait.
      self._leave()

  @property
  def _ended(self) -> bool:
    return bool(self._replies) and (
      self._replies[-1].ending != text_env_pb2.NONE
    )

  def give_way(self) -> None:
    """Gives a spare worker back; another one is reset once it is needed."""
    if self.spare_since_s is not None:
      self._leave()

  def interrupt(self, error: Exception) -> None:
    """Makes what it waits for, or else what it does next, raise `error`."""
    self._interruption = self._interruption or error
    if self._scope is not None and not self._scope.expired():
      self._scope.reschedule(asyncio.get_running_loop().time())

  def _leave(self) -> None:
    if self._call is not None:
      self._call.cancel()
      self._call = None
    if self._service is not None:
      self._service.sessions.discard(self)
      self._service = None
    self._interruption = None
    self.spare_since_s = None

  async def _advance(self) -> episodes.Observation:
    """Gets the reply to the last message sent."""
    self.spare_since_s = None
    try:
      reply = await self._persist()
    except ConnectionError as error:
      self._leave()
      raise EnvFault(f'{self._where()}: {error}') from error
    except BaseException:
      self._leave()
      raise
    finally:
      self._client.turned_away.pop(self, None)
    self._replies.append(reply)
    # A replay needs no second solution, which may take seconds to find.
    self._sent[0].start.want_expert = False
    if len(self._replies) == 1:
      self.spare_since_s = asyncio.get_running_loop().time()
    return _observation(reply)

  async def _persist(self) -> text_env_pb2.Reply:
    """Tries to get the reply, at one service or another, as often as is due.

    Raises:
      ValueError, EnvFault: there will be none.
      ConnectionError: no service is up.
    """
    client, loop = self._client, asyncio.get_running_loop()
    queue_until_s = loop.time() + client.queue_deadline_s
    losses = refusals = 0
    while True:
      try:
        if self._call is None:
          await self._replay(queue_until_s)
        return await self._exchange(len(self._replies), queue_until_s)
      except env_fleet.MovedError:
        # Where it was lost last may have the worker; where it waits has none.
        self._failed = self._service
        self._leave()
        continue
      except _TurnedAwayError as error:
        pause_s = _full_backoff_s(refusals)
        refusals += 1
        where = self._service.address, loop.time()
        client.turned_away.setdefault(self, where)
        if loop.time() + pause_s > queue_until_s:
          raise EnvFault(
            f'{self._where()}: no worker was to be had for '
            f'{client.queue_deadline_s:g} s: {error}'
          ) from None
      except env_fleet.LostError as error:
        pause_s = _backoff_s(losses)
        losses += 1
        self.faults += 1
        if self._service is not None:
          self._service.alarm.set()
        if losses > client.retries:
          raise EnvFault(
            f'{self._where()}, after {client.retries} retries: {error}'
          ) from None
        _log.warning('%s: %s; recovering', self._where(), error)
      self._failed = self._service
      self._leave()
      await asyncio.sleep(pause_s)

  async def _replay(self, queue_until_s: float) -> None:
    """Opens a stream and brings it to where the last one broke."""
    self._service = await self._client.place(self._failed)
    self._service.sessions.add(self)
    self._call = self._service.play()
    for turn, before in enumerate(self._replies):
      reply = await self._exchange(turn, queue_until_s)
      if _outcome(reply) != _outcome(before):
        raise EnvFault(
          f'{_name(self._sent[0].start.task)} played again went another way '
          f'at turn {turn}: {reply.observation!r} where it was '
          f'{before.observation!r}',
          diverged=True,
        )

  async def _exchange(
    self, turn: int, queue_until_s: float
  ) -> text_env_pb2.Reply:
    """Sends the message of a turn and awaits its reply.

    Raises:
      env_fleet.LostError: the stream broke or took too long.
      _TurnedAwayError, env_fleet.MovedError: it got no worker.
      ValueError: the service refused the task for good.
      EnvFault: the service refused the message for good, or had no worker.
    """
    client = self._client
    deadline_s = client.step_deadline_s if turn else client.reset_deadline_s
    try:
      if turn == 0:
        async with self._within(deadline_s):
          await self._call.write(self._sent[0])
        await self._wait_for_worker(queue_until_s)
      async with self._within(deadline_s):
        if turn:
          await self._call.write(self._sent[turn])
        reply = await self._call.read()
      if reply is grpc.aio.EOF:
        raise grpc.aio.UsageError
    # What writing to a stream that is done raises depends on how it ended.
    except (
      grpc.aio.AioRpcError,
      grpc.aio.UsageError,
      asyncio.InvalidStateError,
    ) as error:
      async with self._within(deadline_s):
        code, details = await self._call.code(), await self._call.details()
      raise self._refusal(turn, code, details or '') from error
    if reply.turn != turn:
      raise env_fleet.LostError(
        f'the reply is to turn {reply.turn}, not to {turn}'
      )
    return reply

  def _refusal(
    self, turn: int, code: grpc.StatusCode, details: str
  ) -> Exception:
    """What a status means for the episode."""
    cause = env_fleet.status(code, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
      # gRPC itself says the same of other things.
      if turn == 0 and '--queue' in details:
        return _TurnedAwayError(cause)
      if 'larger than max' in details:
        return EnvFault(f'{self._where()}: {cause}', final=True)
    if code is grpc.StatusCode.UNAVAILABLE and _NO_WORKER.match(details):
      self._service.alarm.set()
      if set(self._client.able()) - {self._service}:
        _log.warning('%s: %s; going elsewhere', self._where(), cause)
        return _TurnedAwayError(cause)
    # Once it was begun it was no mistake of the caller's.
    if code is grpc.StatusCode.INVALID_ARGUMENT and not self._replies:
      return ValueError(f'{_name(self._sent[0].start.task)}: {details}')
    if code not in env_fleet.FINAL:
      return env_fleet.LostError(cause)
    if code in env_fleet.STRANGERS:
      self._service.alarm.set()
    # The same actions will be as long again, and so will be their answers; what
    # is broken on disk is broken for every worker.
    final = code in (
      grpc.StatusCode.OUT_OF_RANGE,
      grpc.StatusCode.DATA_LOSS,
    ) or (code is grpc.StatusCode.INVALID_ARGUMENT and turn > 0)
    return EnvFault(f'{self._where()}: {cause}', final=final)

  async def _wait_for_worker(self, until_s: float) -> None:
    """Waits in the queue of the service, which may be long and is no fault.

    Raises:
      EnvFault: no worker became free in time.
    """
    self.waiting_since_s = now_s = asyncio.get_running_loop().time()
    late = EnvFault(
      f'{self._where()}: no free worker at {self._service.address} within '
      f'{self._client.queue_deadline_s:g} s'
    )
    try:
      async with self._within(until_s - now_s, late):
        await self._call.initial_metadata()
    finally:
      self.waiting_since_s = None

  @contextlib.asynccontextmanager
  async def _within(
    self, deadline_s: float, late: Exception | None = None
  ) -> AsyncIterator[None]:
    """Bounds a wait by a deadline and by `interrupt`.

    Raises:
      env_fleet.LostError: the deadline has passed; or `late`, if it is given.
      Exception: as given to `interrupt`.
    """
    if self._interruption is not None:
      raise self._interruption
    try:
      async with asyncio.timeout(deadline_s) as self._scope:
        yield
    except TimeoutError:
      raise (
        self._interruption
        or late
        or env_fleet.LostError(f'no reply within {deadline_s:g} s')
      ) from None
    finally:
      self._scope = None

  def _where(self) -> str:
    return f'{_name(self._sent[0].start.task)} at turn {len(self._replies)}'


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


def _backoff_s(attempt: int) -> float:
  return min(_FIRST_BACKOFF_S * 4**attempt, _LONGEST_BACKOFF_S)


def _full_backoff_s(attempt: int) -> float:
  longest_s = min(_FIRST_FULL_BACKOFF_S * 2**attempt, _LONGEST_FULL_BACKOFF_S)
  return longest_s * _random.uniform(0.5, 1)
