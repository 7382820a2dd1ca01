"""Client of the environment services: deadlines, recovery, faults.

Episodes spread over the services by their free workers. A session survives the
loss of its worker, of the stream and of the whole service: it plays the same
actions again on a new stream, at another service where there is one, checks
that they bring the same observations, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence

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
  # The service bounds its messages and says so; ours would look like a queue
  # that is full.
  ('grpc.max_receive_message_length', -1),
)
# Every service is asked so often what it serves and how busy it is, and is
# away if it does not answer in time.
_WATCH_S = 2.0
_WATCH_DEADLINE_S = 5.0
# An answer so late was not waited for: the event loop stood still.
_STILL_S = 0.5
# Nobody watched for longer than any round of watching takes.
_STALE_S = 2 * (_WATCH_S + _WATCH_DEADLINE_S)
# Seconds for the other services to answer once one has.
_CONNECT_GRACE_S = 3.0
_QUEUE_NOTICE_S = 20.0
_QUEUE_NOTICE_EVERY_S = 60.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
_FIRST_FULL_BACKOFF_S = 0.5
_LONGEST_FULL_BACKOFF_S = 5.0
_STRANGERS = (
  grpc.StatusCode.UNAUTHENTICATED,
  grpc.StatusCode.PERMISSION_DENIED,
)
# Asking again does not help.
_FINAL = (
  grpc.StatusCode.FAILED_PRECONDITION,
  grpc.StatusCode.INVALID_ARGUMENT,
  grpc.StatusCode.OUT_OF_RANGE,
  grpc.StatusCode.UNIMPLEMENTED,
  *_STRANGERS,
)
_ENDINGS = {
  text_env_pb2.NONE: None,
  text_env_pb2.TERMINATED: episodes.Ending.TERMINATED,
  text_env_pb2.TRUNCATED: episodes.Ending.TRUNCATED,
}
# Of the operating system: clients with one seed must not come back together.
_random = random.SystemRandom()


class EnvFault(Exception):  # noqa: N818  A fault is this project's word.
  """An episode cannot go on, after all retries; says why."""


@dataclasses.dataclass(frozen=True)
class Credentials:
  """What a client shows to its services.

  Attributes:
    tls: whether to speak TLS.
    ca: file (PEM) of the authorities that vouch for the services; empty takes
      those that gRPC ships.
    cert: file (PEM) of the client's own certificate; empty shows none.
    key: file (PEM) of the key of `cert`.
    token: sent with every call; empty sends none.
  """

  tls: bool = False
  ca: str = ''
  cert: str = ''
  key: str = ''
  token: str = dataclasses.field(default='', repr=False)

  def __post_init__(self):
    # gRPC would name the value in its error.
    if not all('!' <= character <= '~' for character in self.token):
      raise ValueError(
        'the token holds a character other than visible ASCII; make one with '
        '`openssl rand -hex 32`.'
      )


@dataclasses.dataclass(frozen=True)
class Description:
  """What a service serves, or several that serve the same.

  Attributes:
    name: name of the environment.
    version: version of the environment and what else decides its behaviour.
    splits: {split: number of tasks}.
    task_names: task types, in the order of `list_tasks`.
    action_format: one paragraph for the policy: what an action looks like.
    workers: episodes that can be played at once.
    busy: episodes that are played now.
    waiting: episodes that wait for a worker now.
    sets: {name for several task types at once: those types}.
    max_action_bytes: bytes of UTF-8 that an action may have.
  """

  name: str
  version: str
  splits: dict[str, int]
  task_names: tuple[str, ...]
  action_format: str
  workers: int
  busy: int
  waiting: int
  sets: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  max_action_bytes: int = 0

  @property
  def served(self) -> str:
    """What must be the same for an episode to be the same."""
    splits = ', '.join(f'{k} {v}' for k, v in sorted(self.splits.items()))
    return f'{self.name} version {self.version!r} with tasks {splits}'


class _LostError(Exception):
  """The stream is of no use any more, but another one may be."""


class _FullError(Exception):
  """The queue of the service is full; no worker was had."""


class _MovedError(Exception):
  """The episode waits in a queue, and another service has a free worker."""


class _Service:
  """One service: its channel, whether it is up, and who plays there.

  Attributes:
    address: `host:port`.
    up: it answers, and serves what the others serve.
    why: what was wrong when it was asked last.
    seen: its last answer; None before the first.
    asked_s: time of the loop at which it was asked last.
    sessions: this client's that play or wait there.
    alarm: set to have it asked at once.
  """

  def __init__(self, address: str, credentials: Credentials):
    self.address = address
    self.up = False
    self.why = 'not asked yet'
    self.seen: Description | None = None
    self.asked_s = float('-inf')
    self.sessions: set[Session] = set()
    self.alarm = asyncio.Event()
    self._others = 0
    self._credentials = credentials
    self._metadata = ()
    if credentials.token:
      self._metadata = (('authorization', f'Bearer {credentials.token}'),)

  @property
  def free(self) -> int:
    """Workers left, as far as is known; below 0 some wait."""
    return self.seen.workers - len(self.sessions) - self._others

  @property
  def load(self) -> float:
    """Episodes a worker."""
    taken = len(self.sessions) + self._others
    return taken / max(1, self.seen.workers)

  def open(self) -> None:
    shown = self._credentials
    if not shown.tls:
      self.channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
    else:
      files = (
        pathlib.Path(name).read_bytes() if name else None
        for name in (shown.ca, shown.key, shown.cert)
      )
      self.channel = grpc.aio.secure_channel(
        self.address, grpc.ssl_channel_credentials(*files), _OPTIONS
      )
    self._stub = text_env_pb2_grpc.TextEnvStub(self.channel)

  async def call(self, method: str, request, timeout_s: float):
    """One call with one reply; raises what gRPC raises."""
    return await getattr(self._stub, method)(
      request, timeout=timeout_s, metadata=self._metadata
    )

  def play(self) -> grpc.aio.StreamStreamCall:
    return self._stub.Play(metadata=self._metadata)

  async def describe(self) -> Description:
    """Asks what it serves; raises what gRPC raises."""
    began_s = asyncio.get_running_loop().time()
    reply = await self.call(
      'Describe', text_env_pb2.DescribeRequest(), _WATCH_DEADLINE_S
    )
    self.asked_s = began_s
    self._others = max(0, reply.busy + reply.waiting - len(self.sessions))
    self.seen = Description(
      name=reply.name,
      version=reply.version,
      splits=dict(reply.splits),
      task_names=tuple(reply.task_names),
      action_format=reply.action_format,
      workers=reply.workers,
      busy=reply.busy,
      waiting=reply.waiting,
      sets={k: tuple(v.task_names) for k, v in reply.sets.items()},
      max_action_bytes=reply.max_action_bytes,
    )
    return self.seen

  async def wait_connected(self) -> None:
    """Waits for a connection, `_WATCH_S` at most."""
    ready = grpc.ChannelConnectivity.READY
    if self.channel.get_state(try_to_connect=True) is ready:
      # Connected, yet it does not answer as it should.
      await asyncio.sleep(_WATCH_S)
      return
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_WATCH_S):
        await self.channel.channel_ready()

  def explain(self, error: grpc.aio.AioRpcError) -> str:
    """Says what went wrong and, where it can be told, what to do."""
    shown, code, details = self._credentials, error.code(), error.details()
    cause, hint = f'{code.name}: {details}', ''
    if code in _STRANGERS:
      hint = 'env.token_file must name a file with a token that it knows'
    elif code is grpc.StatusCode.UNAVAILABLE and 'andshak' in details:
      hint = (
        'env.tls_ca must name the authority that vouches for it, and env.tls '
        'be False if it speaks plain text'
      )
    elif 'Socket closed' in details:
      hint = (
        'it may want a certificate: env.tls_cert and env.tls_key'
        if shown.tls
        else 'it may speak TLS: env.tls=True'
      )
    return f'{cause}; {hint}' if hint else cause


class EnvClient:
  """Talks to services that serve the same. Belongs to one event loop.

  While the loop runs, each service is watched: one that does not answer is
  left until it does again.
  """

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
    if isinstance(addresses, str):
      addresses = [part.strip() for part in addresses.split(',')]
    if not addresses or not all(addresses):
      raise ValueError(
        f'addresses={list(addresses)} must name at least one service, each as '
        'host:port.'
      )
    self.step_deadline_s = step_deadline_s
    self.reset_deadline_s = reset_deadline_s
    self.queue_deadline_s = queue_deadline_s
    self.away_deadline_s = away_deadline_s
    self.retries = retries
    shown = credentials or Credentials()
    self._services = [_Service(address, shown) for address in addresses]
    self._some_up = asyncio.Event()
    self._away_since_s = float('-inf')
    self._served = ''  # What the services must serve.
    self._refused: dict[str, str] = {}  # Address -> what it served instead.
    self._asking: dict[_Service, asyncio.Task] = {}
    self._watchers: list[asyncio.Task] = []
    self._noticed_s = float('-inf')

  @property
  def up(self) -> int:
    """Services that are up."""
    return sum(service.up for service in self._services)

  @property
  def workers(self) -> int:
    """Workers of the services that are up; at least 1."""
    return max(1, sum(s.seen.workers for s in self._services if s.up))

  async def connect(self, timeout_s: float = 30.0) -> None:
    """Connects and makes sure that text environments answer.

    A service that does not is used once it does.

    Raises:
      ConnectionError: nothing, or something else, answers at any address; or
        two services serve different things.
    """
    for service in self._services:
      service.open()
    everyone = asyncio.gather(*(self._knock(s) for s in self._services))
    someone = asyncio.ensure_future(self._some_up.wait())
    try:
      await asyncio.wait(
        [everyone, someone],
        timeout=timeout_s,
        return_when=asyncio.FIRST_COMPLETED,
      )
      if someone.done():
        await asyncio.wait([everyone], timeout=_CONNECT_GRACE_S)
      self._check_first_answers(timeout_s)
    except BaseException:
      await self.close()
      raise
    finally:
      for future in (everyone, someone):
        future.cancel()
      await asyncio.gather(everyone, someone, return_exceptions=True)
    self._watchers = [
      asyncio.ensure_future(self._watch(s)) for s in self._services
    ]

  async def refresh(self, timeout_s: float = 1.0) -> None:
    """Asks all services anew, for nobody watched while the loop stood still.

    Those that do not answer in time answer later.
    """
    asked = [asyncio.ensure_future(self._ask(s)) for s in self._services]
    await asyncio.wait(asked, timeout=timeout_s)

  async def describe(self) -> Description:
    """Asks what the services serve and how busy they are together.

    Raises:
      ConnectionError: no service answers.
    """
    while True:
      asked = [service for service in self._services if service.up]
      await asyncio.gather(*(self._judge(service) for service in asked))
      seen = [service.seen for service in asked if service.up]
      if seen:
        return dataclasses.replace(
          seen[0],
          **{
            name: sum(getattr(one, name) for one in seen)
            for name in ('workers', 'busy', 'waiting')
          },
          max_action_bytes=min(one.max_action_bytes for one in seen),
        )
      await self._wait_until_up()

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

  async def close(self) -> None:
    """Closes the connections, and with them every session."""
    chores = [*self._watchers, *self._asking.values()]
    self._watchers, self._asking = [], {}
    for chore in chores:
      chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    for service in self._services:
      await service.channel.close()

  # -- For sessions ------------------------------------------------------------

  async def place(self, failed: _Service | None) -> _Service:
    """Finds the service for an episode, another than `failed` if there is one.

    Raises:
      ConnectionError: no service is up, and has not been for too long.
    """
    while True:
      up = [service for service in self._services if service.up]
      best = _freest([s for s in up if s is not failed] or up)
      if best is not None and best is failed:
        await self._ask(best)
        if not best.up:
          best = None
      if best is not None:
        return best
      await self._wait_until_up()

  # -- Watching ----------------------------------------------------------------

  async def _watch(self, service: _Service) -> None:
    while True:
      if service.up:
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_WATCH_S):
            await service.alarm.wait()
      else:
        await service.wait_connected()
      service.alarm.clear()
      await self._ask(service)
      self._move_waiting()
      self._notice_waiting()

  async def _ask(self, service: _Service) -> None:
    """Asks a service, once for all who want to know at the same time."""
    asking = self._asking.get(service)
    if asking is None or asking.done():
      asking = asyncio.ensure_future(self._judge(service))
      self._asking[service] = asking
    await asyncio.shield(asking)

  async def _judge(self, service: _Service) -> None:
    """Asks a service; drops it or takes it back as it answers."""
    loop = asyncio.get_running_loop()
    while True:
      began_s = loop.time()
      try:
        await service.describe()
      except grpc.aio.AioRpcError as error:
        if loop.time() - began_s > _WATCH_DEADLINE_S + _STILL_S:
          continue
        service.asked_s = began_s
        self._drop(service, service.explain(error))
        return
      break
    if service.seen.served == self._served:
      self._take(service)
      return
    self._drop(
      service, f'it serves {service.seen.served}, not {self._served}'
    )
    if self._refused.get(service.address) != service.seen.served:
      self._refused[service.address] = service.seen.served
      _log.warning(
        'the environment service at %s is left out: %s',
        service.address,
        service.why,
      )

  def _drop(self, service: _Service, why: str) -> None:
    service.why = why
    if not service.up:
      return
    service.up = False
    _log.warning(
      'the environment service at %s is away (%s); %s',
      service.address,
      why,
      f'{self.up} others are up' if self.up else 'no other is up',
    )
    for session in list(service.sessions):
      session.interrupt(_LostError(f'{service.address} is away ({why})'))
    if not self.up:
      self._some_up.clear()
      self._away_since_s = asyncio.get_running_loop().time()

  def _take(self, service: _Service) -> None:
    if service.up:
      return
    service.up = True
    self._refused.pop(service.address, None)
    self._some_up.set()
    _log.warning(
      'the environment service at %s is up; %d of %d are',
      service.address,
      self.up,
      len(self._services),
    )

  def _move_waiting(self) -> None:
    """Calls episodes from queues to workers that are free elsewhere."""
    up = [service for service in self._services if service.up]
    best = _freest(up)
    if best is None:
      return
    free = best.free
    for service in up:
      waiting = [s for s in service.sessions if s.waiting_since_s is not None]
      for session in waiting[: max(0, min(free, -service.free))]:
        session.interrupt(_MovedError())
        free -= 1

  def _notice_waiting(self) -> None:
    now_s = asyncio.get_running_loop().time()
    slow = [
      service.address
      for service in self._services
      for session in service.sessions
      if session.waiting_since_s is not None
      and now_s - session.waiting_since_s > _QUEUE_NOTICE_S
    ]
    if slow and now_s - self._noticed_s > _QUEUE_NOTICE_EVERY_S:
      self._noticed_s = now_s
      _log.warning(
        '%d episodes have waited over %g s for a free worker at %s (there are '
        'fewer --workers than episodes played at once)',
        len(slow),
        _QUEUE_NOTICE_S,
        ', '.join(sorted(set(slow))),
      )

  async def _wait_until_up(self) -> None:
    """Returns once a service is up.

    Raises:
      ConnectionError: `away_deadline_s` after the last one was lost.
    """
    now_s = asyncio.get_running_loop().time()
    if now_s - max(s.asked_s for s in self._services) > _STALE_S:
      await asyncio.gather(*(self._ask(s) for s in self._services))
    try:
      async with asyncio.timeout_at(self._away_since_s + self.away_deadline_s):
        await self._some_up.wait()
    except TimeoutError:
      whys = ', '.join(f'{s.address} ({s.why})' for s in self._services)
      raise ConnectionError(
        f'no environment service at {whys} for {self.away_deadline_s:g} s'
      ) from None

  # -- Connecting and calling --------------------------------------------------

  async def _knock(self, service: _Service) -> None:
    """Asks a service until it answers, or refuses for good."""
    while True:
      try:
        await service.describe()
      except grpc.aio.AioRpcError as error:
        service.why = service.explain(error)
        if error.code() in _FINAL or 'env.tls_ca' in service.why:
          return
      else:
        service.up = True
        self._some_up.set()
        return
      await asyncio.sleep(_FIRST_BACKOFF_S)

  def _check_first_answers(self, timeout_s: float) -> None:
    up = [service for service in self._services if service.up]
    if not up:
      whys = ', '.join(f'{s.address!r} ({s.why})' for s in self._services)
      raise ConnectionError(
        f'No environment service at {whys} within {timeout_s:g} s. Start one '
        'there with `python -m envs_server --env=NAME --port=PORT`, or leave '
        'the address empty to have one started on this machine.'
      )
    self._served = up[0].seen.served
    for service in up[1:]:
      if service.seen.served != self._served:
        raise ConnectionError(
          f'the environment services differ: {up[0].address} serves '
          f'{self._served}, {service.address} serves {service.seen.served}; '
          'name services of one version, each with the same tasks.'
        )
    for service in self._services:
      if not service.up:
        _log.warning(
          'no environment service at %s (%s); it is used once it answers',
          service.address,
          service.why,
        )

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
        if error.code() in _FINAL or attempt == self.retries:
          raise ConnectionError(
            f'the environment service at {service.address} does not answer: '
            f'{service.explain(error)}'
          ) from error
      failed = service
      await asyncio.sleep(_backoff_s(attempt))


class Session:
  """One episode, from `EnvClient.session`.

  Attributes:
    faults: recoveries so far.
    waiting_since_s: time of the loop since which it waits in the queue of a
      service; None if it does not.
  """

  def __init__(self, client: EnvClient, start: text_env_pb2.Start):
    self.faults = 0
    self.waiting_since_s: float | None = None
    self._client = client
    self._sent = [text_env_pb2.PlayRequest(start=start)]
    self._replies: list[text_env_pb2.Reply] = []
    self._call: grpc.aio.StreamStreamCall | None = None
    self._service: _Service | None = None
    self._failed: _Service | None = None  # Where it was lost last.
    self._scope: asyncio.Timeout | None = None
    self._interruption: Exception | None = None

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
    # Lone surrogates, which Python allows, have no UTF-8.
    action = action.encode(errors='replace').decode()
    act = text_env_pb2.Act(turn=len(self._sent), action=action)
    self._sent.append(text_env_pb2.PlayRequest(act=act))
    return await self._advance()

  async def close(self) -> None:
    """Frees the worker. Harmless when repeated."""
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

  async def _advance(self) -> episodes.Observation:
    """Gets the reply to the last message sent."""
    try:
      reply = await self._persist()
    except ConnectionError as error:
      self._leave()
      raise EnvFault(f'{self._where()}: {error}') from error
    except BaseException:
      self._leave()
      raise
    self._replies.append(reply)
    # A replay needs no second solution, which may take seconds to find.
    self._sent[0].start.want_expert = False
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
      except _MovedError:
        self._leave()
        continue
      except _FullError as error:
        pause_s = _full_backoff_s(refusals)
        refusals += 1
        if loop.time() + pause_s > queue_until_s:
          raise EnvFault(
            f'{self._where()}: the queue was full for '
            f'{client.queue_deadline_s:g} s: {error}'
          ) from None
      except _LostError as error:
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
          f'{before.observation!r}'
        )

  async def _exchange(
    self, turn: int, queue_until_s: float
  ) -> text_env_pb2.Reply:
    """Sends the message of a turn and awaits its reply.

    Raises:
      _LostError: the stream broke or took too long.
      _FullError, _MovedError: it got no worker.
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
      raise self._refusal(turn, code, details) from error
    if reply.turn != turn:
      raise _LostError(f'the reply is to turn {reply.turn}, not to {turn}')
    return reply

  def _refusal(
    self, turn: int, code: grpc.StatusCode, details: str
  ) -> Exception:
    """What a status means for the episode."""
    cause = f'{code.name}: {details}'
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and turn == 0:
      return _FullError(cause)
    # Once it was begun it was no mistake of the caller's.
    if code is grpc.StatusCode.INVALID_ARGUMENT and not self._replies:
      return ValueError(details)
    if code not in _FINAL:
      return _LostError(cause)
    if code in _STRANGERS:
      self._service.alarm.set()
    return EnvFault(f'{self._where()}: {cause}')

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
      _LostError: the deadline has passed; or `late`, if it is given.
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
        or _LostError(f'no reply within {deadline_s:g} s')
      ) from None
    finally:
      self._scope = None

  def _where(self) -> str:
    return f'{_name(self._sent[0].start.task)} at turn {len(self._replies)}'


def _freest(services: Iterable[_Service]) -> _Service | None:
  """The service with most free workers, the least loaded of several."""
  return max(services, key=lambda s: (s.free, -s.load), default=None)


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
