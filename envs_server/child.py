"""The worker process: builds one environment and answers the pool's calls.

  python -m envs_server.child ENV FD PARENT MAX_BYTES

Started by `worker.Worker` only. Messages are JSON, one a line, over a socket:
a call is `{"method", "args"}`, an answer `{"kind", "value"}`, and a beat `{}`
comes every two seconds from a thread of its own, so that a process that is
stopped, starved or deadlocked can be told from an environment that is slow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from envs_server import env, lifetime

BEAT_S = 2.0


def main(argv: list[str]) -> None:
  name, fd, parent, max_bytes = argv[1], *map(int, argv[2:])
  lifetime.die_with_parent()
  if os.getppid() != parent:
    return
  pipe = _Pipe(socket.socket(fileno=fd), max_bytes)
  threading.Thread(target=pipe.beat, daemon=True).start()
  try:
    made = env.module(name).make_env()
  except Exception as error:
    pipe.answer('error', _describe(error))
    return
  pipe.answer('ok', None)
  for method, args in pipe.calls():
    if not _answer(pipe, made, method, args):
      return
  made.close()


def _answer(pipe: _Pipe, made: env.TextEnv, method: str, args: list) -> bool:
  """Calls `method`; returns whether the environment can go on."""
  if method == 'reset':
    args = [env.Task(**args[0]), *args[1:]]
  try:
    value = getattr(made, method)(*args)
    if method in ('reset', 'step'):
      _check(method, value)
    elif method == 'catalog' and not isinstance(value, env.Catalog):
      raise TypeError(
        f'catalog returned {type(value).__name__}, not an env.Catalog'
      )
    pipe.answer('ok', _plain(value))
  except env.TaskError as error:
    pipe.answer('task', str(error))
  except env.BrokenTaskError as error:
    pipe.answer('broken', str(error))
  except Exception as error:
    pipe.answer('error', _describe(error))
    return False
  return method != 'close'


def _check(method: str, seen: Any) -> None:
  """Raises TypeError or ValueError if `seen` is no observation.

  An environment may be anybody's, and the service must not stumble over it.
  """
  if not isinstance(seen, env.Observation):
    raise TypeError(
      f'{method} returned {type(seen).__name__}, not an env.Observation'
    )
  texts = (seen.text, seen.goal, *seen.expert_actions, *seen.admissible)
  for text in (*texts, *seen.info, *seen.info.values()):
    if not isinstance(text, str):
      raise TypeError(f'{method} returned {text!r} where a str must be')
  if not math.isfinite(seen.score):
    raise ValueError(f'{method} returned the score {seen.score}')


class _Pipe:
  """Our end of the socket to the pool."""

  def __init__(self, connection: socket.socket, max_bytes: int):
    self._connection = connection
    self._max_bytes = max_bytes
    self._lock = threading.Lock()

  def calls(self):
    """Yields (method, arguments) until the pool is gone."""
    with self._connection.makefile('rb') as lines:
      for line in lines:
        call = json.loads(line)
        yield call['method'], call['args']

  def answer(self, kind: str, value: Any) -> None:
    line = _line({'kind': kind, 'value': value})
    if kind == 'ok' and 'text' in (value or ()) and len(line) > self._max_bytes:
      told = (
        f'the environment answered with {len(line)} bytes, more than '
        f'--max-message-bytes={self._max_bytes} of the service allows'
      )
      line = _line({'kind': 'large', 'value': told})
    self._send(line)

  def beat(self) -> None:
    over = threading.Event()
    while not over.wait(BEAT_S):
      self._send(b'{}\n')

  def _send(self, line: bytes) -> None:
    try:
      with self._lock:
        self._connection.sendall(line)
    except OSError:
      # The server is gone; nothing that we started may outlive it. Where the
      # kernel does not see to that, we do.
      os.killpg(0, signal.SIGKILL)


def _line(message: dict) -> bytes:
  text = json.dumps(message, ensure_ascii=False)
  return text.encode(errors='replace') + b'\n'


def _plain(value: Any) -> Any:
  """An answer of an environment as JSON has it."""
  if not dataclasses.is_dataclass(value):
    return value
  fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, env.Catalog):
    fields['indices'] = {
      split: {name: _indices(found) for name, found in by_name.items()}
      for split, by_name in value.indices.items()
    }
    fields['options'] = {k: list(v) for k, v in value.options.items()}
    return fields
  plain = {name: _text(field) for name, field in fields.items()}
  # Numbers of NumPy are no numbers of JSON.
  return plain | {
    'score': float(value.score),
    'success': bool(value.success),
    'terminated': bool(value.terminated),
  }


def _indices(found) -> dict | list:
  """A million consecutive indices need not be written out."""
  if isinstance(found, range) and found.step == 1:
    return {'from': found.start, 'to': found.stop}
  if isinstance(found, env.Numbers):
    return _indices(found.whole) | {'without': list(found.without)}
  return list(found)


def catalog(value: dict) -> env.Catalog:
  """The catalog that `_plain` wrote."""
  indices = {
    split: {name: _read_indices(found) for name, found in by_name.items()}
    for split, by_name in value['indices'].items()
  }
  return env.Catalog(**value | {'indices': indices})


def _read_indices(found: dict | list) -> Sequence[int]:
  """The indices that `_indices` wrote."""
  if isinstance(found, list):
    return tuple(found)
  whole = range(found['from'], found['to'])
  without = tuple(found.get('without', ()))
  return env.Numbers(whole, without) if without else whole


def observation(value: dict) -> env.Observation:
  """The observation that `_plain` wrote."""
  lists = {k: tuple(value[k]) for k in ('expert_actions', 'admissible')}
  return env.Observation(**value | lists)


def _text(value: Any) -> Any:
  """`value` with what is no UTF-8 replaced: a message could not carry it."""
  if isinstance(value, str):
    return value.encode(errors='replace').decode()
  if isinstance(value, dict):
    return {_text(k): _text(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_text(v) for v in value]
  return value


def _describe(error: Exception) -> str:
  lines = str(error).strip().splitlines() or ['']
  return f'{type(error).__name__}: {lines[0]}'


if __name__ == '__main__':
  main(sys.argv)
