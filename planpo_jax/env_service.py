"""Starts an environment service on this machine and keeps it alive and well."""

from __future__ import annotations

import collections
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envs_server import env, worker

_log = logging.getLogger(__name__)

# Without a line that says that it is preparing something.
_START_DEADLINE_S = 120.0
_STOP_DEADLINE_S = 8.0
_READY = 'listening on '
# A service that dies this early this often in a row will not get better.
_EARLY_S = 10.0
_EARLY_DEATHS = 5
# A service is asked so often whether it is well. One that is alive but does
# not answer so many times in a row hangs, or has closed its port and does not
# end; a machine under load makes a few times of it.
_HEALTH_EVERY_S = 2.0
_HEALTH_DEADLINE_S = 1.5
_HEALTH_MISSES = 5
# Seconds that may pass until a service that hung or died is back.
RECOVERY_S = (
  _HEALTH_MISSES * (_HEALTH_EVERY_S + _HEALTH_DEADLINE_S) + _START_DEADLINE_S
)


class LocalService:
  """A service of this process's own, on a free loopback port.

  It is started again, on the same port, should it die or hang, and ends with
  this process however that ends. A context manager.
  """

  def __init__(self, env: str, workers: int, *, options: Sequence[str] = ()):
    """Starts nothing yet.

    Args:
      env: name of the environment.
      workers: episodes at a time.
      options: further flags of `python -m envs_server`.
    """
    self.address = ''
    self._command = (
      *(sys.executable, '-m', 'envs_server'),
      *(f'--env={env}', f'--workers={workers}', '--exit-with-parent'),
      *options,
    )
    self._stopping = threading.Event()
    self._process: subprocess.Popen | None = None
    self._supervisor: threading.Thread | None = None

  @property
  def pid(self) -> int:
    return self._process.pid

  def __enter__(self) -> LocalService:
    self.start()
    return self

  def __exit__(self, *unused) -> None:
    self.stop()

  def start(self) -> None:
    """Starts the service and waits until it can be used.

    Raises:
      RuntimeError: it did not start; says what it said.
    """
    self._stopping.clear()
    self.address = self._launch(0)
    self._supervisor = threading.Thread(target=self._supervise, daemon=True)
    self._supervisor.start()

  def stop(self) -> None:
    """Ends the service with all it started. Harmless when repeated."""
    self._stopping.set()
    # The supervisor may be launching another process as we come.
    while self._supervisor is not None and self._supervisor.is_alive():
      _end(self._process)
      self._supervisor.join(0.1)
    if self._process is not None:
      _end(self._process)

  def _launch(self, port: int) -> str:
    """Starts one process; returns its address once it serves."""
    process = subprocess.Popen(
      [*self._command, f'--port={port}'],
      # It reads the end of this pipe when we are gone, even by kill -9.
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      encoding='utf-8',
      errors='replace',
      env=os.environ | {'PYTHONPATH': worker.python_path()},
      # Ctrl-C in the terminal shall not reach it before we have saved.
      start_new_session=True,
    )
    self._process = process
    said: collections.deque[str] = collections.deque(maxlen=20)
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    heard = collections.deque([time.monotonic()], maxlen=1)
    listener = threading.Thread(
      target=_listen, args=(process.stderr, said, heard), daemon=True
    )
    listener.start()
    threading.Thread(
      target=_pass_on, args=(process.stdout, ready), daemon=True
    ).start()
    line = _first_line(ready, heard)
    if line is None:
      line = ''
      said.append(f'not ready after {_START_DEADLINE_S:g} s')
    if not line.startswith(_READY):
      _end(process)
      listener.join(_STOP_DEADLINE_S)
      raise RuntimeError(
        'the environment service did not start: '
        + (' '.join(said) or f'exit code {process.returncode}')
      )
    return line.removeprefix(_READY).strip()

  def _outlive(self, process: subprocess.Popen) -> int:
    """Waits until a process that serves dies; kills it should it hang.

    Returns:
      Its exit code.
    """
    misses = 0
    options = (
      ('grpc.use_local_subchannel_pool', 1),
      ('grpc.enable_http_proxy', 0),
    )
    with grpc.insecure_channel(self.address, options) as channel:
      stub = health_pb2_grpc.HealthStub(channel)
      while True:
        try:
          return process.wait(_HEALTH_EVERY_S)
        except subprocess.TimeoutExpired:
          misses = 0 if _answers(stub) else misses + 1
        if misses >= _HEALTH_MISSES:
          _log.warning(
            'the environment service hangs: it left %d health checks in a row '
            'unanswered; ending it',
            misses,
          )
          process.kill()  # It would not hear a request to end.
          misses = 0

  def _supervise(self) -> None:
    port = int(self.address.rpartition(':')[2])
    early = 0
    while True:
      began = time.monotonic()
      code = self._outlive(self._process)
      if self._stopping.is_set():
        return
      early = early + 1 if time.monotonic() - began < _EARLY_S else 0
      if early >= _EARLY_DEATHS:
        _log.error(
          'the environment service died %d times in a row; giving it up', early
        )
        return
      _log.warning(
        'the environment service died (exit code %s); starting it again at %s',
        code,
        self.address,
      )
      try:
        self._launch(port)
      except RuntimeError as error:
        # The next round finds it dead and tries again.
        if not self._stopping.is_set():
          _log.error('%s', error)


def _answers(stub: health_pb2_grpc.HealthStub) -> bool:
  """Whether a service answers in time, whatever the answer."""
  try:
    stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_DEADLINE_S)
  except grpc.RpcError as error:
    return error.code() not in (
      grpc.StatusCode.DEADLINE_EXCEEDED,
      grpc.StatusCode.UNAVAILABLE,
    )
  return True


def _end(process: subprocess.Popen) -> None:
  if process.poll() is None:
    process.terminate()
    try:
      process.wait(_STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _first_line(
  ready: queue.SimpleQueue[str], heard: collections.deque[float]
) -> str | None:
  """None if the service is not ready, and prepares nothing, for too long."""
  while (left := heard[0] + _START_DEADLINE_S - time.monotonic()) > 0:
    try:
      return ready.get(timeout=left)
    except queue.Empty:
      pass  # It may have said since then that it is preparing something.
  return None


def _listen(
  stream, said: collections.deque[str], heard: collections.deque[float]
) -> None:
  """Keeps the last lines of a stream and passes them to our log.

  `heard` holds when one last told that something is being prepared.
  """
  for line in stream:
    if line.startswith(env.PREPARING):
      heard.append(time.monotonic())
    said.append(line.rstrip())
    _log.warning('%s', line.rstrip())


def _pass_on(stream, lines: queue.SimpleQueue[str]) -> None:
  """Passes the lines of a stream to a queue, and '' at its end."""
  for line in stream:
    lines.put(line)
  lines.put('')
