"""Serves text environments over gRPC, each in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from envs_server import env, pool, text_env_pb2, text_env_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE = text_env_pb2.DESCRIPTOR.services_by_name['TextEnv'].full_name

_OPTIONS = (
  # Without it a second server on the port would share its calls unnoticed.
  ('grpc.so_reuseport', 0),
  # Finds clients that vanished without a word, so that their workers are free.
  ('grpc.keepalive_time_ms', 20_000),
  ('grpc.keepalive_timeout_ms', 10_000),
  ('grpc.keepalive_permit_without_calls', 1),
  ('grpc.http2.min_ping_interval_without_data_ms', 5_000),
  ('grpc.http2.max_ping_strikes', 0),
)
_PAGE_SIZE = 1000
_RESET_DEADLINE_S = 120.0
_GRACE_S = 1.0
# Seconds for an orderly end once the parent is gone; then a hard one.
_LAST_GRACE_S = 7.0
_BIND_DEADLINE_S = 5.0


class Servicer(text_env_pb2_grpc.TextEnvServicer):
  """Answers the calls of text_env.proto from a pool of workers."""

  def __init__(
    self,
    name: str,
    catalog: env.Catalog,
    workers: pool.Pool,
    *,
    step_deadline_s: float,
    latency_ms: tuple[float, float],
  ):
    """Serves one environment.

    Args:
      name: name of the environment.
      catalog: what can be asked of it.
      workers: started.
      step_deadline_s: seconds an action may take before its worker is killed.
      latency_ms: bounds of a random delay before each reply, for tests that
        results do not depend on timing.
    """
    self._name = name
    self._catalog = catalog
    self._pool = workers
    self._step_deadline_s = step_deadline_s
    self._latency_ms = latency_ms
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
    )

  async def ListTasks(
    self,
    request: text_env_pb2.ListTasksRequest,
    context: grpc.aio.ServicerContext,
  ) -> text_env_pb2.ListTasksReply:
    try:
      tasks = self._catalog.tasks(self._name, request.split, request.names)
      first = _page_start(request.page_token, len(tasks))
      if request.page_size < 0:
        raise env.TaskError(
          f'page_size is {request.page_size}; give 0 or more.'
        )
    except env.TaskError as error:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    end = first + (request.page_size or _PAGE_SIZE)
    return text_env_pb2.ListTasksReply(
      tasks=[_task_message(task) for task in tasks[first:end]],
      next_page_token=str(end) if end < len(tasks) else '',
    )

  async def Play(
    self,
    requests: AsyncIterator[text_env_pb2.PlayRequest],
    context: grpc.aio.ServicerContext,
  ) -> AsyncIterator[text_env_pb2.Reply]:
    first = await anext(requests, None)
    if first is None:
      return
    try:
      start, task = self._check_start(first)
      worker = await self._pool.acquire()
    except env.TaskError as error:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except pool.WorkerLostError as error:
      await context.abort(
        grpc.StatusCode.UNAVAILABLE, f'no {self._name} worker: {error}'
      )
    replies: list[text_env_pb2.Reply] = []
    held = True
    try:
      await context.send_initial_metadata(())
      observation = await worker.call(
        'reset',
        task,
        start.want_expert,
        start.want_admissible,
        deadline_s=_RESET_DEADLINE_S,
      )
      while True:
        replies.append(_reply(observation, replies, start.step_limit))
        if held and replies[-1].ending != text_env_pb2.NONE:
          held = False
          self._pool.release(worker)
        await asyncio.sleep(self._random.uniform(*self._latency_ms) / 1000)
        yield replies[-1]
        act = await self._next_act(requests, replies, context)
        while act is not None and act.turn < len(replies):
          yield replies[act.turn]
          act = await self._next_act(requests, replies, context)
        if act is None:
          return
        observation = await worker.call(
          'step', act.action, deadline_s=self._step_deadline_s
        )
    except env.TaskError as error:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except pool.WorkerLostError as error:
      await context.abort(
        grpc.StatusCode.ABORTED,
        f'{self._name} worker lost at turn {len(replies)}: {error}',
      )
    finally:
      if held:
        self._pool.release(worker)

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
    replies: Sequence[text_env_pb2.Reply],
    context: grpc.aio.ServicerContext,
  ) -> text_env_pb2.Act | None:
    """Returns the next act, maybe one played already; None at the end."""
    request = await anext(requests, None)
    if request is None:
      return None
    if request.WhichOneof('message') != 'act' or request.act.turn < 1:
      await context.abort(
        grpc.StatusCode.INVALID_ARGUMENT,
        'after the Start every message of Play must be an Act of turn 1 or '
        'more.',
      )
    turn = request.act.turn
    ended = replies[-1].ending != text_env_pb2.NONE
    if turn > len(replies) or (ended and turn == len(replies)):
      why = 'the episode has ended' if ended else 'turns go one by one'
      await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f'turn {turn} cannot follow turn {len(replies) - 1}: {why}.',
      )
    return request.act


def _page_start(token: str, size: int) -> int:
  if not token:
    return 0
  if not token.isdecimal() or int(token) >= size:
    raise env.TaskError(
      f'unknown page_token {token!r}; give the next_page_token of the page '
      'before.'
    )
  return int(token)


def _task_message(task: env.Task) -> text_env_pb2.Task:
  return text_env_pb2.Task(
    env=task.env,
    split=task.split,
    index=task.index,
    name=task.name,
    seed=task.seed,
    options=task.options,
  )


def _reply(
  observation: env.Observation,
  before: Sequence[text_env_pb2.Reply],
  step_limit: int,
) -> text_env_pb2.Reply:
  """The reply of turn `len(before)`."""
  turn = len(before)
  # What a reset scores already was not earned by an action.
  reward = observation.score - before[-1].score if before else 0.0
  ending = text_env_pb2.NONE
  if observation.terminated:
    ending = text_env_pb2.TERMINATED
  elif 0 < step_limit <= turn:
    ending = text_env_pb2.TRUNCATED
  return text_env_pb2.Reply(
    turn=turn,
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


def main(argv: Sequence[str] | None = None) -> None:
  """Serves until SIGTERM or SIGINT; exits with 1 if it cannot."""
  args = _parse(argv)
  logging.basicConfig(
    level=logging.WARNING, format='envs_server: %(levelname)s %(message)s'
  )
  check = getattr(env.module(args.env), 'check', None)
  try:
    if check is not None:
      check()
    asyncio.run(_serve(args))
  except (RuntimeError, pool.WorkerLostError) as error:
    print(f'envs_server: {error}', file=sys.stderr, flush=True)
    sys.exit(1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='envs_server',
    usage='python -m envs_server --env=NAME [flags]',
    description=__doc__,
    allow_abbrev=False,
  )
  parser.add_argument('--env', required=True, help=', '.join(env.known()))
  parser.add_argument(
    '--workers', type=int, default=1, help='episodes at a time (%(default)s)'
  )
  parser.add_argument('--host', default='127.0.0.1', help='(%(default)s)')
  parser.add_argument(
    '--port', type=int, default=0, help='0 picks a free one (%(default)s)'
  )
  parser.add_argument(
    '--exit-with-parent',
    action='store_true',
    help='end when the parent process dies or closes our standard input',
  )
  parser.add_argument(
    '--step-deadline-s',
    type=float,
    default=60.0,
    help='seconds after which a step counts as hung (%(default)s)',
  )
  parser.add_argument(
    '--latency-ms',
    type=_bounds,
    default=(0.0, 0.0),
    metavar='LO,HI',
    help='random delay of each reply, for tests of timing',
  )
  args = parser.parse_args(argv)
  if args.env not in env.known():
    parser.error(
      f'unknown environment {args.env!r}; known: {", ".join(env.known())}.'
    )
  if args.workers < 1:
    parser.error(f'--workers={args.workers} must be at least 1.')
  if not 0 <= args.port < 65536:
    parser.error(f'--port={args.port} must be from 0 to 65535.')
  if args.step_deadline_s <= 0:
    parser.error(f'--step-deadline-s={args.step_deadline_s} must be above 0.')
  return args


def _bounds(text: str) -> tuple[float, float]:
  low, separator, high = text.partition(',')
  try:
    bounds = float(low), float(high)
  except ValueError:
    bounds = None
  if not separator or bounds is None or not 0 <= bounds[0] <= bounds[1]:
    raise argparse.ArgumentTypeError(
      f'{text!r} must be LO,HI in milliseconds with 0 <= LO <= HI.'
    )
  return bounds


async def _serve(args: argparse.Namespace) -> None:
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
  workers = pool.Pool(args.env, args.workers, deadline_s=args.step_deadline_s)
  server = grpc.aio.server(options=_OPTIONS)
  up = asyncio.ensure_future(_bring_up(args, workers, server))
  stopped = asyncio.ensure_future(stop.wait())
  try:
    await asyncio.wait([up, stopped], return_when=asyncio.FIRST_COMPLETED)
    if up.done():
      print(f'listening on {args.host}:{up.result()}', flush=True)
      await stopped
  finally:
    for task in (up, stopped):
      task.cancel()
    await asyncio.gather(up, stopped, return_exceptions=True)
    await server.stop(_GRACE_S)
    await workers.close()


async def _bring_up(
  args: argparse.Namespace, workers: pool.Pool, server: grpc.aio.Server
) -> int:
  """Starts workers and service; returns the port.

  Raises:
    WorkerLostError: no worker can be built.
    RuntimeError: the port is taken.
  """
  workers.start()
  worker = await workers.acquire()
  try:
    catalog = await worker.call('catalog', deadline_s=_RESET_DEADLINE_S)
  finally:
    workers.release(worker)
  servicer = Servicer(
    args.env,
    catalog,
    workers,
    step_deadline_s=args.step_deadline_s,
    latency_ms=args.latency_ms,
  )
  text_env_pb2_grpc.add_TextEnvServicer_to_server(servicer, server)
  health_servicer = health.aio.HealthServicer()
  health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
  await health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
  reflection.enable_server_reflection(
    (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
  )
  port = await _bind(server, args.host, args.port)
  await server.start()
  return port


async def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
  # A server that took over from one just killed may find its port still held.
  deadline = time.monotonic() + (_BIND_DEADLINE_S if port else 0)
  while True:
    try:
      return server.add_insecure_port(f'{host}:{port}')
    except RuntimeError as error:
      if time.monotonic() >= deadline:
        raise RuntimeError(
          f'cannot listen on {host}:{port} ({error}); give --port=0 for a free '
          'one.'
        ) from error
    await asyncio.sleep(0.2)


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
