"""Serves text environments over gRPC, each in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from envs_server import (
  access,
  env,
  pool,
  service,
  telemetry,
  text_env_pb2_grpc,
  worker,
)

_OPTIONS = (
  # Without it a second server on the port would share its calls unnoticed.
  ('grpc.so_reuseport', 0),
  # Finds clients that vanished without a word, so that their workers are free.
  ('grpc.keepalive_time_ms', 20_000),
  ('grpc.keepalive_timeout_ms', 10_000),
  # A minute by default, and the longer of the two counts.
  ('grpc.http2.ping_timeout_ms', 10_000),
  ('grpc.keepalive_permit_without_calls', 1),
  ('grpc.http2.min_ping_interval_without_data_ms', 5_000),
  ('grpc.http2.max_ping_strikes', 0),
)
_CONDITION_EVERY_S = 2.0
_GRACE_S = 1.0
# Seconds for an orderly end once the parent is gone; then a hard one.
_LAST_GRACE_S = 7.0
_BIND_DEADLINE_S = 5.0
# Bytes of a message besides its action.
_ROOM = 1024
# Open files of the service itself, and of each worker and episode.
_OWN_FILES, _FILES_EACH = 100, 4


def main(argv: Sequence[str] | None = None) -> None:
  """Serves until SIGTERM or SIGINT; exits with 1 if it cannot."""
  args = _parse(argv)
  logging.basicConfig(
    level=logging.WARNING, format='envs_server: %(levelname)s %(message)s'
  )
  logging.getLogger('grpc._cython.cygrpc').addFilter(_is_ours)
  check = getattr(env.module(args.env), 'check', None)
  try:
    granted = access.grant(
      args.host,
      tls_cert=args.tls_cert,
      tls_key=args.tls_key,
      tls_client_ca=args.tls_client_ca,
      token_file=args.token_file,
      insecure=args.insecure,
    )
    _check_metrics(args)
    _allow_files(args.workers + args.queue)
    if check is not None:
      check()
    asyncio.run(_serve(args, granted))
  except worker.WorkerLostError as error:
    print(f'envs_server: {args.env}: {error}', file=sys.stderr, flush=True)
    sys.exit(1)
  except (OSError, RuntimeError, access.AccessError) as error:
    print(f'envs_server: {error}', file=sys.stderr, flush=True)
    sys.exit(1)


def _is_ours(record: logging.LogRecord) -> bool:
  """Keeps out of the log what any client can put there, as often as it likes.

  gRPC tells of every message that is nonsense, with a traceback.
  """
  return not (
    record.exc_info and isinstance(record.exc_info[1], message.DecodeError)
  )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='envs_server',
    usage='python -m envs_server --env=NAME [flags]',
    description=__doc__,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('--env', required=True, help=', '.join(env.known()))
  add(
    '--workers', type=_count, default=1, help='episodes at a time (%(default)s)'
  )
  add('--host', default='127.0.0.1', help='(%(default)s)')
  add('--port', type=int, default=0, help='0 picks a free one (%(default)s)')
  add(
    '--exit-with-parent',
    action='store_true',
    help='end when the parent process dies or closes our standard input',
  )

  limits = parser.add_argument_group('limits')
  add = limits.add_argument
  add(
    '--reset-deadline-s',
    type=_seconds,
    default=120.0,
    help='seconds after which a reset counts as hung (%(default)s)',
  )
  add(
    '--step-deadline-s',
    type=_seconds,
    default=60.0,
    help='seconds after which a step counts as hung (%(default)s)',
  )
  add(
    '--idle-s',
    type=_seconds,
    default=1800.0,
    help='an episode without an act for so long loses its worker (%(default)s)',
  )
  add(
    '--queue',
    type=_number,
    default=1024,
    help='episodes that may wait for a worker (%(default)s)',
  )
  add(
    '--client-limit',
    type=_number,
    default=0,
    help='episodes that one client may play at a time; 0: all (%(default)s)',
  )
  add(
    '--max-episodes',
    type=_number,
    default=500,
    help='a worker is replaced after so many; 0: never (%(default)s)',
  )
  add(
    '--memory-mb',
    type=_number,
    default=2048,
    help='resident memory of a worker with its children above which it is '
    'replaced after its episode, at twice that at once; 0: none (%(default)s)',
  )
  add(
    '--max-action-bytes',
    type=_count,
    default=16 << 10,
    help='of an action in UTF-8 (%(default)s)',
  )
  add(
    '--max-message-bytes',
    type=_count,
    default=1 << 20,
    help='of a message, observations among them (%(default)s)',
  )
  add(
    '--latency-ms',
    type=_bounds,
    default=(0.0, 0.0),
    metavar='LO,HI',
    help='random delay of each reply, for tests of timing',
  )

  security = parser.add_argument_group(
    'security', 'A host other than loopback needs TLS, or --insecure.'
  )
  add = security.add_argument
  add('--tls-cert', default='', help='our certificate with its chain, PEM')
  add('--tls-key', default='', help='the key of it, PEM')
  add(
    '--tls-client-ca',
    default='',
    help='clients must have a certificate that one of these signed, PEM',
  )
  add(
    '--token-file',
    default='',
    help='clients must know one of these; `TOKEN` or `NAME TOKEN` a line',
  )
  add('--insecure', action='store_true', help='plain text, to whoever asks')
  add(
    '--metrics',
    type=_address,
    default=None,
    metavar='HOST:PORT',
    help='serve metrics for Prometheus there; on a loopback address in plain '
    'text, elsewhere with our TLS files',
  )
  args = parser.parse_args(argv)
  if args.env not in env.known():
    parser.error(
      f'unknown environment {args.env!r}; known: {", ".join(env.known())}.'
    )
  if not 0 <= args.port < 65536:
    parser.error(f'--port={args.port} must be from 0 to 65535.')
  if not args.max_action_bytes + _ROOM <= args.max_message_bytes < 2**31:
    parser.error(
      f'--max-message-bytes={args.max_message_bytes} must be below 2147483648, '
      f'and {_ROOM} more than --max-action-bytes={args.max_action_bytes}, '
      'which travels in a message.'
    )
  args.host = args.host.strip('[]')
  return args


def _number(text: str) -> int:
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f'{text!r} must be 0 or a whole number.')
  return int(text)


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} must be at least 1.')
  return int(text)


def _seconds(text: str) -> float:
  try:
    seconds = float(text)
  except ValueError:
    seconds = math.nan
  if not 0 < seconds < math.inf:
    raise argparse.ArgumentTypeError(f'{text!r} must be seconds above 0.')
  return seconds


def _address(text: str) -> tuple[str, int]:
  host, separator, port = text.rpartition(':')
  if not (separator and host and port.isdecimal() and int(port) < 65536):
    raise argparse.ArgumentTypeError(
      f'{text!r} must be HOST:PORT, e.g. 127.0.0.1:9090.'
    )
  return host.strip('[]'), int(port)


def _bounds(text: str) -> tuple[float, float]:
  low, _, high = text.partition(',')
  try:
    bounds = float(low), float(high)
  except ValueError:
    bounds = None
  if bounds is None or not 0 <= bounds[0] <= bounds[1] < math.inf:
    raise argparse.ArgumentTypeError(
      f'{text!r} must be LO,HI in milliseconds with 0 <= LO <= HI.'
    )
  return bounds


def _check_metrics(args: argparse.Namespace) -> None:
  """Metrics tell who plays how much; strangers shall not read them."""
  if args.metrics is None or access.is_loopback(args.metrics[0]):
    return
  if not (args.tls_client_ca or args.insecure):
    raise access.AccessError(
      f'--metrics={args.metrics[0]}:{args.metrics[1]} is not a loopback '
      'address, and metrics ask for no token; give --tls-client-ca, or '
      '--metrics=127.0.0.1:PORT.'
    )


def _allow_files(episodes: int) -> None:
  """Raises the limit of open files to what `episodes` need.

  Raises:
    RuntimeError: the system does not allow that many.
  """
  needed = _OWN_FILES + _FILES_EACH * episodes
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= needed:
    return
  if hard != resource.RLIM_INFINITY and hard < needed:
    raise RuntimeError(
      f'--workers and --queue make {episodes} episodes, which need {needed} '
      f'open files, and this system allows {hard}; raise `ulimit -n`, or lower '
      'them.'
    )
  resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _serve(args: argparse.Namespace, granted: access.Access) -> None:
  loop = asyncio.get_running_loop()
  stop = asyncio.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, stop.set)
  if args.exit_with_parent:
    threading.Thread(
      target=_watch_parent,
      args=(os.getppid(), lambda: loop.call_soon_threadsafe(stop.set)),
      daemon=True,
    ).start()
  meter = telemetry.Telemetry(args.env)
  limits = pool.Limits(
    queue=args.queue,
    client=args.client_limit,
    episodes=args.max_episodes,
    memory_bytes=args.memory_mb << 20,
    message_bytes=args.max_message_bytes,
  )
  workers = pool.Pool(args.env, args.workers, limits, meter)
  server = grpc.aio.server(
    interceptors=(access.Guard(granted),),
    options=(
      *_OPTIONS,
      ('grpc.max_receive_message_length', args.max_message_bytes),
      # Of a connection: what it may play and wait for, and some other calls.
      ('grpc.max_concurrent_streams', args.workers + args.queue + 100),
    ),
  )
  condition = health.aio.HealthServicer()
  up = asyncio.ensure_future(
    _bring_up(args, granted, workers, meter, server, condition)
  )
  stopped = asyncio.ensure_future(stop.wait())
  try:
    await asyncio.wait([up, stopped], return_when=asyncio.FIRST_COMPLETED)
    if up.done():
      port, metrics_port = up.result()
      print(f'listening on {_joined(args.host, port)}', flush=True)
      if metrics_port is not None:
        print(
          f'metrics on {_joined(args.metrics[0], metrics_port)}', flush=True
        )
      while not stop.is_set():
        await _tell_condition(condition, workers)
        await asyncio.wait([stopped], timeout=_CONDITION_EVERY_S)
  finally:
    await condition.enter_graceful_shutdown()
    for task in (up, stopped):
      task.cancel()
    await asyncio.gather(up, stopped, return_exceptions=True)
    await server.stop(_GRACE_S)
    await workers.close()


async def _bring_up(
  args: argparse.Namespace,
  granted: access.Access,
  workers: pool.Pool,
  meter: telemetry.Telemetry,
  server: grpc.aio.Server,
  condition: health.aio.HealthServicer,
) -> tuple[int, int | None]:
  """Starts workers and service; returns their port and that of the metrics.

  Raises:
    worker.WorkerLostError: no worker can be built.
    RuntimeError: a port is taken.
  """
  metrics_port = None
  if args.metrics is not None:
    meter.watch(workers)
    files = {}
    if not access.is_loopback(args.metrics[0]):
      files = {
        'tls_cert': args.tls_cert,
        'tls_key': args.tls_key,
        'tls_client_ca': args.tls_client_ca,
      }
    metrics_port = meter.expose(*args.metrics, **files)
  workers.start()
  lent = await workers.acquire('the service', bounded=False)
  try:
    catalog = await lent.catalog(args.reset_deadline_s)
    try:
      catalog.check_itself()
    except ValueError as error:
      raise RuntimeError(f'the catalog of {args.env}: {error}') from error
  finally:
    workers.release(lent, played=False)
  servicer = service.Servicer(
    args.env,
    catalog,
    workers,
    service.Limits(
      reset_s=args.reset_deadline_s,
      step_s=args.step_deadline_s,
      idle_s=args.idle_s,
      action_bytes=args.max_action_bytes,
      latency_ms=args.latency_ms,
    ),
    granted,
    meter,
  )
  text_env_pb2_grpc.add_TextEnvServicer_to_server(servicer, server)
  health_pb2_grpc.add_HealthServicer_to_server(condition, server)
  await _tell_condition(condition, workers)
  reflection.enable_server_reflection(
    (service.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
  )
  port = await _bind(server, args.host, args.port, granted.credentials)
  await server.start()
  return port, metrics_port


async def _tell_condition(
  condition: health.aio.HealthServicer, workers: pool.Pool
) -> None:
  status = health_pb2.HealthCheckResponse
  await condition.set(
    service.SERVICE, status.SERVING if workers.ready else status.NOT_SERVING
  )


async def _bind(
  server: grpc.aio.Server,
  host: str,
  port: int,
  credentials: grpc.ServerCredentials | None,
) -> int:
  # A server that took over from one just killed may find its port still held.
  deadline = time.monotonic() + (_BIND_DEADLINE_S if port else 0)
  address = _joined(host, port)
  while True:
    try:
      _probe(host, port)  # Which says it in a sentence, unlike gRPC.
      if credentials is None:
        return server.add_insecure_port(address)
      return server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
      if time.monotonic() >= deadline:
        raise RuntimeError(
          f'cannot listen on {address} ({error}); give --host an address of '
          'this machine, and --port=0 for a free port.'
        ) from error
    await asyncio.sleep(0.2)


def _probe(host: str, port: int) -> None:
  """Raises OSError if nobody may listen there now."""
  family, *_, address = socket.getaddrinfo(
    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
  )[0]
  with socket.socket(family, socket.SOCK_STREAM) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(address)


def _joined(host: str, port: int) -> str:
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _watch_parent(parent: int, stop) -> None:
  """Calls `stop` once the parent is gone; then sees that we really end.

  The parent holds the other end of our standard input and never writes, so
  however it dies, we read the end of file.
  """
  while os.getppid() == parent:
    ready, _, _ = select.select([sys.stdin], [], [], 1.0)
    if ready and not os.read(sys.stdin.fileno(), 4096):
      break
  stop()
  time.sleep(_LAST_GRACE_S)
  os._exit(1)
