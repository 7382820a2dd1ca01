"""Hostile messages: a service answers as its protocol says, and goes on.

No client can make it lose a worker, read a file, fail in a way of its own
(UNKNOWN, INTERNAL), write a traceback, or stop answering.
"""

import asyncio
import contextlib
import errno
import os
import socket
import struct

import env_processes
import grpc
import hypothesis
import pytest
from hypothesis import strategies as st

from benchmarks import faults
from envs_server import env, text_env_pb2, text_env_pb2_grpc, toy

CODES = grpc.StatusCode
MAX_ACTION = 1000
MAX_MESSAGE = 20_000
# Generous, for a busy machine.
ANSWER_S = 10.0
FUZZ = hypothesis.settings(
  max_examples=200,
  deadline=None,
  derandomize=True,
  # Without the last phase, which takes minutes with texts as long as ours.
  phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.explain],
  database=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture(scope='module')
def bait(tmp_path_factory):
  """A path that says whether anybody has opened it to read: a pipe."""
  path = tmp_path_factory.mktemp('bait') / 'passwd'
  os.mkfifo(path)
  yield str(path)
  # Nobody reads a pipe: the writer is told so.
  with pytest.raises(OSError) as caught:
    os.open(path, os.O_WRONLY | os.O_NONBLOCK)
  assert caught.value.errno == errno.ENXIO


@pytest.fixture(scope='module')
def service(bait, tmp_path_factory):
  """A service that has to be as it was when all tests are over."""
  log = tmp_path_factory.mktemp('log') / 'stderr'
  with (
    open(log, 'w') as file,
    faults.Service(
      'toy',
      2,
      f'--max-action-bytes={MAX_ACTION}',
      f'--max-message-bytes={MAX_MESSAGE}',
      log=file,
    ) as running,
  ):
    before = env_processes.workers_of(running.pid)
    yield running
    assert asyncio.run(faults.idle_again(running.address, 30.0)) < 30.0
    assert env_processes.workers_of(running.pid) == before
    files = os.listdir(f'/proc/{running.pid}/fd')
    assert len(files) < 100  # No connection was kept.
  assert 'Traceback' not in log.read_text()


@pytest.fixture(scope='module')
def stub(service):
  with grpc.insecure_channel(service.address) as channel:
    yield text_env_pb2_grpc.TextEnvStub(channel)


def ask(stub):
  """Asks what is served, as a sign of life."""
  assert stub.Describe(text_env_pb2.DescribeRequest(), timeout=ANSWER_S).workers


def send(stub, messages):
  """Replies to messages of Play, and the status code and details."""
  call = stub.Play(iter(messages), timeout=30.0)
  replies = []
  with contextlib.suppress(grpc.RpcError):
    replies.extend(call)
  return replies, call.code(), call.details()


# -- What is sent --------------------------------------------------------------

HOSTILE = (
  '',
  '\0',
  '../../etc/passwd',
  '/etc/passwd\0.txt',
  'file:///etc/passwd',
  '$(touch /tmp/x)`id`; --help',
  "'; DROP TABLE tasks; --",
  '%s%n{0.__class__}{{7*7}}',
  '\x1b]0;title\x07\r\n{}\n',
  '\u202e\ufeff\U0001f600\U0010ffff',
  '\U0001f600' * 240,
  'x' * (MAX_ACTION + 1),
  '\u20ac' * (MAX_MESSAGE // 4),
  '9' * 5000,
)
TEXTS = st.sampled_from(HOSTILE) | st.text(
  st.characters(exclude_categories=['Cs']), max_size=40
)
INT32 = st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]) | st.integers(
  -(2**31), 2**31 - 1
)
INT64 = st.sampled_from([-(2**63), -1, 0, 2**63 - 1]) | st.integers(
  -(2**63), 2**63 - 1
)


def mostly(good, bad):
  """Draws what is well 15 times in 16, or no sequence would get far."""
  return st.sampled_from([good] * 15 + [bad]).flatmap(lambda chosen: chosen)


TASKS = st.builds(
  text_env_pb2.Task,
  env=mostly(st.just('toy'), TEXTS),
  split=mostly(st.sampled_from(['train', 'dev', 'test']), TEXTS),
  index=mostly(st.integers(0, 31), INT32),
  name=mostly(st.sampled_from(['fetch', 'unlock', 'deliver']), TEXTS),
  seed=INT64,
  options=mostly(
    st.just({}), st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3)
  ),
)
STARTS = st.builds(
  lambda **fields: text_env_pb2.PlayRequest(start=text_env_pb2.Start(**fields)),
  task=mostly(TASKS, st.none()),
  step_limit=mostly(st.integers(0, 6), INT32),
  want_expert=st.booleans(),
  want_admissible=st.booleans(),
)
COMMANDS = st.sampled_from(
  ['look', 'inventory', 'go east', 'go west', 'take shortcut', 'enter well']
)
# Any text is an action, so these need not be rare.
ACTIONS = COMMANDS | TEXTS
# A relative turn: 1 is the next one.
STEPS = mostly(st.just(1), st.integers(-3, 3)), ACTIONS


@st.composite
def plays(draw):
  """Messages of one stream, mostly in order."""
  messages = [draw(mostly(STARTS, st.just(text_env_pb2.PlayRequest())))]
  turn = 0
  for _ in range(draw(st.integers(0, 6))):
    kind = draw(st.sampled_from(['act'] * 20 + ['empty', 'start', 'extreme']))
    if kind == 'empty':
      messages.append(text_env_pb2.PlayRequest())
    elif kind == 'start':
      messages.append(draw(STARTS))
    elif kind == 'extreme':
      messages.append(faults.act_message(draw(INT32), draw(ACTIONS)))
    else:
      offset, action = (draw(one) for one in STEPS)
      turn += offset
      messages.append(faults.act_message(turn, action))
  return messages


# -- What must come back -------------------------------------------------------


def known(task):
  """Whether the toy has the task."""
  catalog = toy.make_env().catalog()
  return (
    task.env == 'toy'
    and task.split in catalog.indices
    and task.name in catalog.task_names
    and task.index in catalog.indices[task.split][task.name]
    and not task.options
  )


def expect(messages):
  """Observations, and the status codes of which one must end the stream."""
  first = messages[0]
  start = first.start
  if first.ByteSize() > MAX_MESSAGE:
    return [], {CODES.RESOURCE_EXHAUSTED}
  if (
    first.WhichOneof('message') != 'start'
    or not known(start.task)
    or start.step_limit < 0
  ):
    return [], {CODES.INVALID_ARGUMENT}
  game = toy.make_env()
  task = env.Task(
    'toy', start.task.split, start.task.index, start.task.name, start.task.seed
  )
  seen = [game.reset(task, expert=start.want_expert)]
  said = [seen[0].text]
  for message in messages[1:]:
    codes = set()
    act, last = message.act, len(seen) - 1
    if message.ByteSize() > MAX_MESSAGE:
      return said, {CODES.RESOURCE_EXHAUSTED}
    if message.WhichOneof('message') != 'act' or act.turn < 1:
      return said, {CODES.INVALID_ARGUMENT}
    over = seen[-1].terminated or 0 < start.step_limit <= last
    if act.turn > last + 1 or (over and act.turn == last + 1):
      codes.add(CODES.FAILED_PRECONDITION)
    if len(act.action.encode()) > MAX_ACTION:
      codes.add(CODES.INVALID_ARGUMENT)
    if codes:
      return said, codes
    if act.turn == last + 1:
      seen.append(game.step(act.action))
    said.append(seen[act.turn].text)
  return said, {CODES.OK}


@FUZZ
@hypothesis.given(messages=plays())
def test_any_messages_get_what_the_protocol_says(stub, messages):
  replies, code, details = send(stub, messages)
  said, codes = expect(messages)
  assert code in codes, details
  assert [reply.observation for reply in replies] == said
  # An error says what is wrong, and not at a length that no header holds.
  assert bool(details) == (code != CODES.OK)
  assert len(details) < 1200
  ask(stub)


@FUZZ
@hypothesis.given(
  split=mostly(st.just('dev'), TEXTS),
  names=st.lists(mostly(st.just('fetch'), TEXTS), max_size=3),
  page_size=mostly(st.integers(0, 40), INT32),
  page_token=st.sampled_from(['', '0', '7', '\u0661']) | TEXTS,
)
def test_any_question_for_tasks_is_answered(
  stub, split, names, page_size, page_token
):
  request = text_env_pb2.ListTasksRequest(
    split=split, names=names, page_size=page_size, page_token=page_token
  )
  well = (
    split in ('train', 'dev', 'test')
    and set(names) <= {'fetch', 'unlock', 'deliver'}
    and page_size >= 0
    and page_token in ('', '0', '7')
  )
  code = CODES.INVALID_ARGUMENT
  if request.ByteSize() > MAX_MESSAGE:
    code = CODES.RESOURCE_EXHAUSTED
  try:
    reply = stub.ListTasks(request, timeout=ANSWER_S)
  except grpc.RpcError as error:
    assert not well
    assert error.code() == code
    assert 0 < len(error.details()) < 1200
  else:
    assert well and 0 < len(reply.tasks) <= (page_size or 1000)
  ask(stub)


# What a protobuf reader refuses. The last is groups in groups without an end.
UNDECODABLE = (
  b'\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff',
  b'\x0a\xff\xff\xff\xff\x0f',
  b'\x12\x05\x12\x03a\xed\xa0',
  b'\x12\x07\x08\x01\x12\x03\xed\xa0\x80',
  b'\x0a\x06\x0a\x04\x0a\x02\xc0\x80',
  b'\x0b' * 10_000,
)


def mutter(service, *messages, method='Play'):
  return faults.mutter(service.address, messages, method)


@pytest.mark.parametrize(
  'nonsense', UNDECODABLE, ids=lambda nonsense: nonsense[:6].hex()
)
def test_undecodable_messages_are_refused(service, stub, nonsense):
  begin = start().SerializeToString()
  _, code, _ = mutter(service, nonsense)
  assert code == CODES.INVALID_ARGUMENT
  replies, code, _ = mutter(service, begin, nonsense)
  assert (replies, code) == (1, CODES.INVALID_ARGUMENT)
  ask(stub)


@FUZZ
@hypothesis.given(messages=st.lists(st.binary(max_size=300), max_size=4))
def test_random_bytes_as_messages(service, stub, messages):
  _, code, _ = mutter(service, *messages)
  assert code in (CODES.OK, CODES.INVALID_ARGUMENT, CODES.FAILED_PRECONDITION)
  ask(stub)


@FUZZ
@hypothesis.given(
  place=st.integers(0, 10**6), byte=st.integers(0, 255), longer=st.binary()
)
def test_messages_with_a_wrong_byte(service, stub, place, byte, longer):
  good = bytearray(start().SerializeToString())
  good[place % len(good)] = byte
  _, code, _ = mutter(service, bytes(good) + longer)
  assert code in (CODES.OK, CODES.INVALID_ARGUMENT)
  ask(stub)


@pytest.mark.parametrize('method', ['Describe', 'ListTasks', 'Nothing'])
def test_nonsense_for_other_methods(service, stub, method):
  for nonsense in UNDECODABLE:
    _, code, _ = mutter(service, nonsense, method=method)
    # gRPC itself reads these messages, and has no better word for what it
    # cannot read. What it can is unknown fields.
    assert code in (CODES.UNKNOWN, CODES.OK, CODES.UNIMPLEMENTED)
    ask(stub)


def start(**changes):
  fields = {'env': 'toy', 'split': 'train', 'index': 1, 'name': 'fetch'}
  task = text_env_pb2.Task(**fields | changes)
  return text_env_pb2.PlayRequest(start=text_env_pb2.Start(task=task))


def test_unknown_fields_are_ignored(service):
  # Field 99, a varint, as a later version of the protocol might have.
  later = b'\x98\x06\x01'
  act = faults.act_message(1, 'look').SerializeToString()
  replies, code, _ = mutter(
    service, start().SerializeToString() + later, act + later
  )
  assert (replies, code) == (2, CODES.OK)


def test_sizes_are_bounded(stub):
  for action, code in (
    ('x' * MAX_ACTION, CODES.OK),
    ('x' * (MAX_ACTION + 1), CODES.INVALID_ARGUMENT),
    # Bytes count, not characters.
    ('\u20ac' * (MAX_ACTION // 3), CODES.OK),
    ('\u20ac' * (MAX_ACTION // 3 + 1), CODES.INVALID_ARGUMENT),
    # gRPC itself does not let it in.
    ('x' * MAX_MESSAGE, CODES.RESOURCE_EXHAUSTED),
  ):
    replies, got, details = send(stub, [start(), faults.act_message(1, action)])
    assert got == code, details
    assert len(replies) == 1 + (code == CODES.OK)
  assert 'larger than max' in details
  ask(stub)


@pytest.mark.parametrize(
  'field', ['env', 'split', 'name', 'option', 'value', 'action', 'page']
)
def test_paths_open_nothing(stub, bait, field):
  """That the bait was left alone is seen when all tests are over."""
  for path in (bait, f'file://{bait}', f'../../../../../../..{bait}'):
    if field == 'page':
      request = text_env_pb2.ListTasksRequest(split='dev', page_token=path)
      with pytest.raises(grpc.RpcError) as caught:
        stub.ListTasks(request)
      code = caught.value.code()
    elif field == 'action':
      replies, code, _ = send(stub, [start(), faults.act_message(1, path)])
      assert replies[1].observation == 'No known action matches that input.'
    elif field in ('option', 'value'):
      pair = (path, 'x') if field == 'option' else ('simplifications', path)
      _, code, _ = send(stub, [start(options=dict([pair]))])
    else:
      _, code, _ = send(stub, [start(**{field: path})])
    assert code == (CODES.OK if field == 'action' else CODES.INVALID_ARGUMENT)


# -- What is no gRPC at all ----------------------------------------------------


def frame(kind, flags=0, stream=0, payload=b''):
  """A frame of HTTP/2."""
  head = struct.pack('>I', len(payload))[1:] + bytes((kind, flags))
  return head + struct.pack('>I', stream) + payload


PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
SETTINGS = PREFACE + frame(4)
SPEECHES = {
  'http 1.1': b'GET /etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n',
  'post': b'POST /planpo.TextEnv/Play HTTP/1.1\r\nContent-Length: 9\r\n\r\nx',
  'tls': bytes.fromhex('16030100850100008103035f') + b'\0' * 120,
  'half a preface': PREFACE[:10],
  'nothing but the preface': PREFACE,
  'a flood of settings': SETTINGS + frame(4, payload=b'\0' * 6) * 5000,
  'a flood of pings': SETTINGS + frame(6, payload=b'x' * 8) * 5000,
  'resets of nothing': SETTINGS + frame(3, stream=1, payload=b'\0' * 4) * 5000,
  'headers without an end': SETTINGS
  + frame(1, stream=1, payload=b'\x82')
  + frame(9, stream=1, payload=b'\x40\x01a\x01b') * 5000,
  'a frame that is too long': SETTINGS + b'\xff\xff\xff\0\0' + b'\0' * 4,
  'a compressed bomb': SETTINGS
  + frame(1, 4, 1, b'\x40\x01a\x7f\x81\x7f' + b'b' * 255 + b'\xbe' * 10_000),
  'zeros': b'\0' * 100_000,
}


def shout(service, words):
  """Says it, and listens until the other end hangs up or says no more."""
  host, _, port = service.address.rpartition(':')
  with socket.create_connection((host, int(port)), 10.0) as connection:
    connection.settimeout(0.2)
    with contextlib.suppress(OSError):
      connection.sendall(words)
      while connection.recv(1 << 16):
        pass


@pytest.mark.parametrize('speech', SPEECHES)
def test_other_languages(service, stub, speech):
  for _ in range(3):
    shout(service, SPEECHES[speech])
    ask(stub)


@FUZZ
@hypothesis.given(
  head=st.sampled_from([b'', PREFACE, SETTINGS]), words=st.binary(max_size=2000)
)
def test_random_bytes_at_the_port(service, stub, head, words):
  asyncio.run(faults.shout(service.address, head + words))
  ask(stub)


# -- An engine of others -------------------------------------------------------


@pytest.mark.parametrize(
  'action',
  [
    'look around ' * 1000,
    'pour x into ' * 1200,
    '(' * 16_000,
    '[a-z]*' * 2500,
    '\U0001f600' * 4000,
    '\\' * 16_000,
    '\n{}\nreset\0',
    '9' * 22,
  ],
  ids=lambda action: ascii(action[:12]),
)
def test_scienceworld_outlives_odd_actions(sciworld, action):
  begin = text_env_pb2.Start(
    task=text_env_pb2.Task(
      env='sciworld', split='train', name='find-living-thing'
    )
  )
  with grpc.insecure_channel(sciworld.address) as channel:
    replies, code, details = send(
      text_env_pb2_grpc.TextEnvStub(channel),
      [
        text_env_pb2.PlayRequest(start=begin),
        faults.act_message(1, action),
        faults.act_message(2, 'look around'),
      ],
    )
  assert code == CODES.OK, details
  assert replies[2].observation == replies[0].observation


@pytest.fixture(scope='module')
def sciworld():
  with faults.Service('sciworld', 1) as running:
    before = env_processes.workers_of(running.pid)
    yield running
    assert env_processes.workers_of(running.pid) == before
