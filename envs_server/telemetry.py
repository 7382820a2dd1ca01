"""What a service counts, for Prometheus.

One object counts for one service, in a registry of its own, so that services
of one process (of a test, say) do not mix. Times are in seconds.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import prometheus_client
from prometheus_client import metrics_core
from prometheus_client import registry as registry_lib

T = TypeVar('T')

_log = logging.getLogger(__name__)

ENDINGS = ('terminated', 'truncated', 'abandoned', 'fault', 'refused')
# Counters of these begin at 0. One that first appears as 1 would hide its
# first loss from rate() and increase().
_LOSSES = ('died', 'hung', 'deadline', 'memory', 'error')
_REPLACEMENTS = (*_LOSSES, 'episodes')
_FAULTS = (*_LOSSES, 'idle', 'large', 'broken')
# From a step of the toy game to the longest reset that is waited for.
_BUCKETS = (
  *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
  *(1.0, 3.0, 10.0, 30.0, 60.0, 120.0),
)
# Seconds that a scraper may be silent for.
_SILENCE_S = 10.0
_TRIES = 100


class Pool(Protocol):
  """What `Telemetry.watch` reads.

  Attributes:
    size: workers that there shall be.
    ready: workers that are built.
    busy: episodes that are played now.
    waiting: episodes that wait for a worker now.
    clients: clients that play or wait now.
    memory_bytes: resident memory of each worker, as last measured.
  """

  size: int
  ready: int
  busy: int
  waiting: int
  clients: int
  memory_bytes: list[int]


class Telemetry:
  """Counts, and answers a scraper over HTTP if asked to.

  Attributes:
    registry: holds every metric.
  """

  def __init__(self, env_name: str):
    # When a counter began is of no use to anybody, and half of the page.
    prometheus_client.disable_created_metrics()
    self.registry = prometheus_client.CollectorRegistry()
    self._env = env_name
    self._episodes = self._counter(
      'episodes', 'Episodes by how they ended.', 'ending', ENDINGS
    )
    self._faults = self._counter(
      'faults', 'Episodes that the service lost, by why.', 'kind', _FAULTS
    )
    self._restarts = self._counter(
      'worker_restarts', 'Workers replaced, by why.', 'reason', _REPLACEMENTS
    )
    self._steps = prometheus_client.Counter(
      'planpo_env_steps', 'Actions taken.', ['env'], registry=self.registry
    ).labels(env=env_name)
    self._step_s = self._histogram('step', 'Time the environment took to act.')
    self._reset_s = self._histogram(
      'reset', 'Time the environment took to begin an episode.'
    )
    self._queue_s = self._histogram(
      'queue_wait', 'Time an episode waited for a worker.'
    )

  def watch(self, pool: Pool) -> None:
    """Shows the state of `pool` at each scrape; call it once."""
    self.registry.register(_PoolCollector(pool))

  def episode(self, ending: str) -> None:
    """Counts an episode that has ended, by one of `ENDINGS`.

    Raises:
      ValueError: unknown ending.
    """
    if ending not in ENDINGS:
      raise ValueError(
        f'ending {ending!r} is unknown; known: {", ".join(ENDINGS)}.'
      )
    self._episodes.labels(env=self._env, ending=ending).inc()

  def reset(self, seconds: float) -> None:
    """Records how long the environment took to begin an episode."""
    self._reset_s.observe(seconds)

  def step(self, seconds: float) -> None:
    """Counts an action and records how long the environment took."""
    self._steps.inc()
    self._step_s.observe(seconds)

  def queued(self, seconds: float) -> None:
    """Records how long an episode waited until it had a worker."""
    self._queue_s.observe(seconds)

  def fault(self, kind: str) -> None:
    """Counts an episode that the service could not go on with.

    Args:
      kind: of the loss of its worker (`WorkerLostError.kind`), or another
        single word for why.
    """
    self._faults.labels(env=self._env, kind=kind).inc()

  def restart(self, reason: str) -> None:
    """Counts a worker that is replaced.

    Args:
      reason: kind of its loss; or `episodes` or `memory`, of which it had
        enough.
    """
    self._restarts.labels(env=self._env, reason=reason).inc()

  def expose(
    self,
    host: str,
    port: int,
    *,
    tls_cert: str = '',
    tls_key: str = '',
    tls_client_ca: str = '',
  ) -> int:
    """Serves /metrics from a daemon thread until the process ends.

    Args:
      host: address to listen on; IPv6 with or without brackets.
      port: 0 picks a free one.
      tls_cert: PEM file of the server's certificate chain; empty: plain HTTP.
      tls_key: PEM file of its private key.
      tls_client_ca: PEM file; a scraper must show a certificate of this CA.

    Returns:
      The port.

    Raises:
      RuntimeError: the address cannot be used, or a file cannot be read.
    """
    context = None
    if tls_cert:
      try:
        context = _tls(tls_cert, tls_key, tls_client_ca)
      except OSError as error:  # ssl.SSLError is one.
        raise RuntimeError(
          f'--metrics cannot use --tls-cert={tls_cert}, --tls-key={tls_key}, '
          f'--tls-client-ca={tls_client_ca} ({error}); give PEM files that '
          'belong together.'
        ) from error
    try:
      server = _Server(host.strip('[]'), port, self.registry, context)
    except (OSError, OverflowError) as error:
      raise RuntimeError(
        f'--metrics={host}:{port} cannot be listened on ({error}); give an '
        'address of this machine, and port 0 for a free one.'
      ) from error
    threading.Thread(
      target=server.serve_forever, name='metrics', daemon=True
    ).start()
    return server.server_address[1]

  def _counter(
    self, name: str, what: str, label: str, known: Sequence[str]
  ) -> prometheus_client.Counter:
    counter = prometheus_client.Counter(
      f'planpo_env_{name}', what, ['env', label], registry=self.registry
    )
    for value in known:
      counter.labels(**{'env': self._env, label: value})
    return counter

  def _histogram(self, name: str, what: str) -> prometheus_client.Histogram:
    return prometheus_client.Histogram(
      f'planpo_env_{name}_seconds',
      what,
      buckets=_BUCKETS,
      registry=self.registry,
    )


class _PoolCollector(registry_lib.Collector):
  """Reads a pool when it is asked to."""

  def __init__(self, pool: Pool):
    self._pool = pool

  def collect(self) -> Iterator[metrics_core.Metric]:
    """One family a gauge; called by the registry at each scrape."""
    for name, what, read in (
      ('workers', 'Workers that there shall be.', lambda p: p.size),
      ('workers_ready', 'Workers that are built.', lambda p: p.ready),
      ('episodes_playing', 'Episodes that are played.', lambda p: p.busy),
      (
        'episodes_waiting',
        'Episodes that wait for a worker.',
        lambda p: p.waiting,
      ),
      ('clients', 'Clients that play or wait.', lambda p: p.clients),
    ):
      yield metrics_core.GaugeMetricFamily(
        f'planpo_env_{name}', what, value=_steady(read, self._pool)
      )
    measured = _steady(lambda p: list(p.memory_bytes), self._pool)
    memory = metrics_core.GaugeMetricFamily(
      'planpo_env_worker_memory_bytes',
      'Resident memory of workers with their children, as last measured.',
      labels=['stat'],
    )
    memory.add_metric(['max'], max(measured, default=0))
    memory.add_metric(['sum'], sum(measured))
    yield memory


def _steady(read: Callable[[Pool], T], pool: Pool) -> T:
  """Reads the pool, whose event loop may change it under our eyes.

  We are on another thread: what the pool counts over may grow meanwhile, which
  Python tells by RuntimeError.
  """
  for _ in range(_TRIES - 1):
    try:
      return read(pool)
    except RuntimeError:
      continue
  return read(pool)


def _tls(cert: str, key: str, client_ca: str) -> ssl.SSLContext:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.minimum_version = ssl.TLSVersion.TLSv1_2
  # With a password given, a key that needs one is refused and not asked for.
  context.load_cert_chain(cert, key, password='')
  if client_ca:
    context.load_verify_locations(client_ca)
    context.verify_mode = ssl.CERT_REQUIRED
  return context


class _Handler(prometheus_client.MetricsHandler):
  """Answers one scraper; says nothing."""

  timeout = _SILENCE_S  # Of each read, the handshake included.

  def do_GET(self) -> None:
    """Answers with the metrics, and elsewhere with 404."""
    if self.path.partition('?')[0] != '/metrics':
      self.send_error(404, 'only /metrics is served')
      return
    super().do_GET()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
  """One thread a scraper, so that one that is slow stops no other."""

  allow_reuse_address = True
  daemon_threads = True

  def __init__(
    self,
    host: str,
    port: int,
    registry: prometheus_client.CollectorRegistry,
    context: ssl.SSLContext | None,
  ):
    """Listens.

    Raises:
      OSError, OverflowError: the address cannot be used.
    """
    self.address_family = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0][0]
    self._context = context
    super().__init__((host, port), _Handler.factory(registry))

  def get_request(self) -> tuple[socket.socket, tuple]:
    """Accepts a scraper; its handshake is left to its own thread."""
    connection, address = super().get_request()
    if self._context is not None:
      connection = self._context.wrap_socket(
        connection, server_side=True, do_handshake_on_connect=False
      )
    return connection, address

  def handle_error(self, request, client_address) -> None:
    """A scraper that is refused or goes away is no error of the service."""
    _log.debug('a scraper of %s: %s', client_address, sys.exc_info()[1])
