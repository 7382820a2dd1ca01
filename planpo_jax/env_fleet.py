"""Several services that serve the same: which are up, and who plays where.

Every service is watched. One that does not answer is left, with all who play
there, and taken back once it answers again and serves the same as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from envs_server import text_env_pb2, text_env_pb2_grpc

_log = logging.getLogger(__name__)

_OPTIONS = (
  # A service that restarts is back in a second or two: try often.
  ('grpc.initial_reconnect_backoff_ms', 100),
  ('grpc.min_reconnect_backoff_ms', 100),
  ('grpc.max_reconnect_backoff_ms', 1_000),
  # Notices a host that vanished without closing its connections.
  ('grpc.keepalive_time_ms', 20_000),
  ('grpc.keepalive_timeout_ms', 10_000),
  # A minute by default, and the longer of the two counts.
  ('grpc.http2.ping_timeout_ms', 10_000),
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
_KNOCK_EVERY_S = 0.1
# Questions in a row that the last service which is up may leave unanswered. To
# drop it would help nobody, and a machine under load leaves one at times.
_LAST_MISSES = 2
_PATIENCE_S = 5.0
_QUEUE_NOTICE_S = 20.0
_QUEUE_NOTICE_EVERY_S = 60.0
# Statuses by which a service says that it does not know us.
STRANGERS = (
  grpc.StatusCode.UNAUTHENTICATED,
  grpc.StatusCode.PERMISSION_DENIED,
)
# Statuses after which asking again does not help.
FINAL = (
  grpc.StatusCode.DATA_LOSS,
  grpc.StatusCode.FAILED_PRECONDITION,
  grpc.StatusCode.INVALID_ARGUMENT,
  grpc.StatusCode.OUT_OF_RANGE,
  grpc.StatusCode.UNIMPLEMENTED,
  *STRANGERS,
)


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
    max_action_bytes: bytes of UTF-8 that an action may have; 0: no limit is
      known.
    ready: of the workers, those that are built.
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
  ready: int = 0

  @property
  def served(self) -> str:
    """What must be the same for an episode to be the same."""
    splits = ', '.join(f'{k} {v}' for k, v in sorted(self.splits.items()))
    return f'{self.name} version {self.version!r} with tasks {splits}'


class LostError(Exception):
  """The stream is of no use any more, but another one may be."""


class MovedError(Exception):
  """The episode waits in a queue, and another service has a free worker."""


class Guest(Protocol):
  """Who plays at a service.

  Attributes:
    turns: replies that it has had, that to the reset among them.
    waiting_since_s: time of the loop since which it waits in the queue of the
      service; None if it does not.
    spare_since_s: time of the loop since which it has a worker that was reset
      and has not been used; None if it has none, or uses it.
  """

  turns: int
  waiting_since_s: float | None
  spare_since_s: float | None

  def give_way(self) -> None:
    """Gives a spare worker back; another one is reset once it is needed."""

  def interrupt(self, error: Exception) -> None:
    """Makes what it waits for, or else what it does next, raise `error`."""


class Service:
  """One service: its channel, whether it is up, and who plays there.

  Attributes:
    address: `host:port`.
    channel: to it; None while it is closed.
    up: it answers, and serves what the others serve.
    why: what was wrong when it was asked last.
    final: asking again will hardly help.
    seen: its last answer; None before the first.
    asked_s: time of the loop at which it was asked last.
    misses: questions in a row that it left unanswered; such as were asked at
      one time are one.
    missed_s: time of the loop at which the last of them was given up.
    sessions: this client's that play or wait there.
    alarm: set to have it asked at once.
  """

  def __init__(self, address: str, credentials: Credentials):
    self.address = address
    self.channel: grpc.aio.Channel | None = None
    self.up = False
    self.why = 'no answer'
    self.final = False
    self.seen: Description | None = None
    self.asked_s = float('-inf')
    self.misses = 0
    self.missed_s = float('-inf')
    self.sessions: set[Guest] = set()
    self.alarm = asyncio.Event()
    self._others = 0
    self._credentials = credentials
    self._metadata = ()
    if credentials.token:
      self._metadata = (('authorization', f'Bearer {credentials.token}'),)

  @property
  def free(self) -> int:
    """Workers left, as far as is known; below 0 some wait."""
    left = self.seen.ready - len(self.sessions) - self._others
    # Whatever it says of its workers, such as where a client may have so many,
    # they are not for us.
    stuck = any(_long(session.waiting_since_s) for session in self.sessions)
    return min(left, 0) if stuck else left

  @property
  def load(self) -> float:
    """Episodes a worker."""
    taken = len(self.sessions) + self._others
    return taken / max(1, self.seen.ready)

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

  async def close(self) -> None:
    self.up = False
    if self.channel is not None:
      await self.channel.close()
      self.channel = None

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
    self.misses = 0
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
      ready=reply.ready,
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

  def failed(self, error: grpc.aio.AioRpcError) -> None:
    """Notes what went wrong and, where it can be told, what to do."""
    code, details = error.code(), error.details() or ''
    handshake = 'handshak' in details or 'Hostname Verification' in details
    self.final = code in FINAL or handshake
    hint = ''
    if code in STRANGERS:
      hint = 'env.token_file must name a file with a token that it knows'
    elif handshake:
      hint = (
        'env.tls_ca must name the authority that vouches for it, env.address '
        'use a name in its certificate, and env.tls be False if it speaks '
        'plain text'
      )
    elif 'Socket closed' in details and self.seen is None:
      hint = (
        'it may want a certificate: env.tls_cert and env.tls_key'
        if self._credentials.tls
        else 'it may speak TLS: env.tls=True'
      )
    self.why = status(code, details)
    if hint:
      self.why = f'{self.why.rstrip(".")}; {hint}'


class Fleet:
  """Services that serve the same. Belongs to one event loop.

  While the loop runs, each service is watched: one that does not answer is
  left until it does again.
  """

  def __init__(
    self,
    addresses: Sequence[str] | str,
    *,
    credentials: Credentials | None,
    away_deadline_s: float,
  ):
    """Connects to nothing yet.

    Args:
      addresses: `host:port` of each service; a string may hold several, with
        commas between them.
      credentials: what the services want to see; None for nothing.
      away_deadline_s: seconds to wait once no service is up.

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
    self.away_deadline_s = away_deadline_s
    shown = credentials or Credentials()
    self._services = [Service(address, shown) for address in addresses]
    self._some_up = asyncio.Event()
    self._away_since_s = float('-inf')
    self._served = ''  # What the services must serve.
    self._refused: dict[str, str] = {}  # Address -> what it served instead.
    self._asking: dict[Service, asyncio.Task] = {}
    self._watchers: list[asyncio.Task] = []
    self._looks: set[asyncio.Task] = set()
    self._noticed_s = float('-inf')
    # Sessions that a full queue has turned away: where, and since when.
    self.turned_away: dict[Guest, tuple[str, float]] = {}

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
      self._check_first_answers()
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

    async def look(service: Service) -> None:
      if not service.up:
        await service.wait_connected()
      await self._ask(service)

    looks = [asyncio.ensure_future(look(s)) for s in self._services]
    # The event loop itself holds tasks only weakly.
    self._looks.update(looks)
    for each in looks:
      each.add_done_callback(self._looks.discard)
    await asyncio.wait(looks, timeout=timeout_s)

  async def describe(self) -> Description:
    """Asks what the services serve and how busy they are together.

    Raises:
      ConnectionError: no service answers.
    """
    while True:
      asked = [service for service in self._services if service.up]
      await asyncio.gather(*(self._judge(service) for service in asked))
      # One that left the question unanswered would be quoted from before.
      seen = [s.seen for s in asked if s.up and not s.misses]
      if seen:
        limits = [one.max_action_bytes for one in seen if one.max_action_bytes]
        return dataclasses.replace(
          seen[0],
          **{
            name: sum(getattr(one, name) for one in seen)
            for name in ('workers', 'busy', 'waiting', 'ready')
          },
          max_action_bytes=min(limits, default=0),
        )
      await self._wait_until_up()

  async def close(self) -> None:
    """Closes the connections, and with them every session."""
    chores = [*self._watchers, *self._looks, *self._asking.values()]
    self._watchers, self._asking = [], {}
    for chore in chores:
      chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    for service in self._services:
      await service.close()
    # Whoever asks for a place yet is told at once that there is none.
    self._some_up.clear()
    self._away_since_s = float('-inf')

  async def place(self, failed: Service | None) -> Service:
    """Finds the service for an episode, another than `failed` if there is one.

    One that has no worker at all is taken only where none has.

    Raises:
      ConnectionError: no service is up, and has not been for too long.
    """
    while True:
      best = self._best(failed)
      if best is not None and best is failed:
        await self._ask(best)
        best = self._best(failed)
      if best is not None:
        return best
      await self._wait_until_up()

  def able(self) -> list[Service]:
    """Services that are up and have workers."""
    return [s for s in self._services if s.up and s.seen.ready]

  def _best(self, failed: Service | None) -> Service | None:
    able = self.able() or [s for s in self._services if s.up]
    return _freest([s for s in able if s is not failed] or able)

  # -- Watching ----------------------------------------------------------------

  async def _watch(self, service: Service) -> None:
    while True:
      if service.up:
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_WATCH_S):
            await service.alarm.wait()
      else:
        await service.wait_connected()
      service.alarm.clear()
      try:
        await self._ask(service)
        self._serve_begun()
        self._move_waiting()
        self._notice_waiting()
      except Exception:
        # Who watches no more would never take the service back.
        _log.exception('watching %s failed; it goes on', service.address)
        await asyncio.sleep(_WATCH_S)

  async def _ask(self, service: Service) -> None:
    """Asks a service, once for all who want to know at the same time."""
    asking = self._asking.get(service)
    if asking is None or asking.done():
      asking = asyncio.ensure_future(self._judge(service))
      self._asking[service] = asking
    await asyncio.shield(asking)

  async def _judge(self, service: Service) -> None:
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
        service.failed(error)
        if began_s >= service.missed_s:
          service.misses += 1
          service.missed_s = loop.time()
        silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if self.up > 1 or not silent or service.misses >= _LAST_MISSES:
          self._drop(service)
        return
      break
    if service.seen.served == self._served:
      self._take(service)
      return
    service.why = f'it serves {service.seen.served}, not {self._served}'
    self._drop(service)
    if self._refused.get(service.address) != service.seen.served:
      self._refused[service.address] = service.seen.served
      _log.warning(
        'the environment service at %s is left out: %s',
        service.address,
        service.why,
      )

  def _drop(self, service: Service) -> None:
    if not service.up:
      return
    service.up = False
    _log.warning(
      'the environment service at %s is away (%s); %d of %d are up',
      service.address,
      service.why,
      self.up,
      len(self._services),
    )
    for session in list(service.sessions):
      session.interrupt(LostError(f'{service.address} is away ({service.why})'))
    if not self.up:
      self._some_up.clear()
      self._away_since_s = asyncio.get_running_loop().time()

  def _take(self, service: Service) -> None:
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
    """Calls episodes from queues to workers that are free elsewhere.

    Those that were begun go first: others may wait for what they hold.
    """
    room = {service: service.free for service in self.able()}
    for service in [s for s in self._services if s.up]:
      waiting = sorted(
        (s for s in service.sessions if s.waiting_since_s is not None),
        key=lambda session: (not session.turns, session.waiting_since_s),
      )
      late = sum(_long(session.waiting_since_s) for session in waiting)
      others = [other for other in room if other is not service]
      for session in waiting[: max(late, -service.free)]:
        best = max(others, key=room.get, default=None)
        if best is None or room[best] < 1:
          break
        session.interrupt(MovedError())
        room[best] -= 1

  def _serve_begun(self) -> None:
    """Lets episodes that were begun go before those that were only reset.

    Else the two may wait for each other, once workers are lost: one holds a
    slot of the sampler and wants a worker, the other one the reverse. A worker
    of the service at which it waits serves it best, but any does.
    """
    wanting = 0
    left: list[Guest] = []
    for service in self._services:
      here = service.sessions
      begun = [s for s in here if s.turns and _long(s.waiting_since_s)]
      spare = [s for s in here if _long(s.spare_since_s)]
      for session in spare[: len(begun)]:
        session.give_way()
      wanting += max(0, len(begun) - len(spare))
      left += spare[len(begun) :]
    for session in left[:wanting]:
      session.give_way()

  def _notice_waiting(self) -> None:
    now_s = asyncio.get_running_loop().time()
    slow = [
      service.address
      for service in self._services
      for session in service.sessions
      if session.waiting_since_s is not None
      and now_s - session.waiting_since_s > _QUEUE_NOTICE_S
    ]
    slow += [
      address
      for address, since_s in self.turned_away.values()
      if now_s - since_s > _QUEUE_NOTICE_S
    ]
    if slow and now_s - self._noticed_s > _QUEUE_NOTICE_EVERY_S:
      self._noticed_s = now_s
      _log.warning(
        '%d episodes have waited over %g s for a free worker at %s (its '
        '--workers or its --client-limit are below the number of episodes '
        'played at once, or others play there)',
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

  async def _knock(self, service: Service) -> None:
    """Asks a service until it answers, or refuses for good."""
    while True:
      try:
        await service.describe()
      except grpc.aio.AioRpcError as error:
        service.failed(error)
        if service.final:
          return
      else:
        service.up = True
        self._some_up.set()
        return
      await asyncio.sleep(_KNOCK_EVERY_S)

  def _check_first_answers(self) -> None:
    up = [service for service in self._services if service.up]
    if not up:
      whys = ', '.join(f'{s.address!r} ({s.why})' for s in self._services)
      advice = ''
      if not all(service.final for service in self._services):
        advice = (
          ' Start one there with `python -m envs_server --env=NAME '
          '--port=PORT`, or leave the address empty to have one started on '
          'this machine.'
        )
      raise ConnectionError(f'No environment service at {whys}.{advice}')
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


def _long(since_s: float | None) -> bool:
  """Whether somebody has waited since then for longer than is fair."""
  if since_s is None:
    return False
  return asyncio.get_running_loop().time() - since_s > _PATIENCE_S


def _freest(services: Iterable[Service]) -> Service | None:
  """The service with most free workers, the least loaded of several."""
  return max(services, key=lambda s: (s.free, -s.load), default=None)


def status(code: grpc.StatusCode, details: str) -> str:
  return f'{code.name}: {details}'
