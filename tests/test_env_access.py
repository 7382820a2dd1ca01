"""Who may come in, with real servers, sockets, certificates and log lines."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import re
import socket
import ssl
import struct
import subprocess
import sys

import env_processes
import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from envs_server import access, text_env_pb2, text_env_pb2_grpc

ALICE = 'Zq7-alice-0123456789abcdef'
BOB = 'Zq7-bob-fedcba9876543210'
STRANGER = 'Zq7-stranger-0123456789'
DEADLINE_S = 20.0


@dataclasses.dataclass(frozen=True)
class Files:
  """Paths of what a service and its clients hold."""

  ca: str
  cert: str
  key: str
  client_cert: str
  client_key: str
  # Another authority, and a client of it.
  other_ca: str
  other_cert: str
  other_key: str
  tokens: str


def write(path, content, mode=0o600):
  path.write_bytes(content)
  path.chmod(mode)
  return str(path)


def write_pair(folder, name, issued):
  cert = b''.join(blob.bytes() for blob in issued.cert_chain_pems)
  return (
    write(folder / f'{name}.pem', cert),
    write(folder / f'{name}.key', issued.private_key_pem.bytes()),
  )


@pytest.fixture(scope='module')
def authority():
  return trustme.CA()


@pytest.fixture(scope='module')
def files(tmp_path_factory, authority):
  folder = tmp_path_factory.mktemp('access')
  other = trustme.CA()
  server = authority.issue_cert('localhost', '127.0.0.1', '::1')
  cert, key = write_pair(folder, 'server', server)
  client = authority.issue_cert('client.test', common_name='trainer')
  client_cert, client_key = write_pair(folder, 'client', client)
  stranger = other.issue_cert('client.test', common_name='trainer')
  other_cert, other_key = write_pair(folder, 'other', stranger)
  return Files(
    ca=write(folder / 'ca.pem', authority.cert_pem.bytes()),
    cert=cert,
    key=key,
    client_cert=client_cert,
    client_key=client_key,
    other_ca=write(folder / 'other_ca.pem', other.cert_pem.bytes()),
    other_cert=other_cert,
    other_key=other_key,
    tokens=write(
      folder / 'tokens', f'# clients\n\nalice {ALICE}\n{BOB}\n'.encode()
    ),
  )


# -- Which flags go together ---------------------------------------------------


@pytest.mark.parametrize(
  ('host', 'loopback'),
  [
    ('127.0.0.1', True),
    ('127.8.9.10', True),
    ('::1', True),
    ('[::1]', True),
    ('localhost', True),
    ('LocalHost', True),
    ('unix:/run/envs.sock', False),
    ('', False),
    ('0.0.0.0', False),
    ('::', False),
    ('[::]', False),
    ('10.0.0.1', False),
    ('126.0.0.1', False),
    ('128.0.0.1', False),
    ('::2', False),
    ('::ffff:127.0.0.1', False),
    ('localhost.example.com', False),
    ('127.0.0.1.example.com', False),
    ('127.0.0.1 ', False),
    ('envs', False),
  ],
)
def test_loopback_is_told_without_resolving(host, loopback, monkeypatch):
  def resolve(*_):
    raise AssertionError(f'{host} was resolved')

  for name in ('getaddrinfo', 'gethostbyname', 'gethostbyname_ex'):
    monkeypatch.setattr(socket, name, resolve)
  assert access.is_loopback(host) == loopback


# Flags given -> what is granted on a loopback address, and elsewhere; text with
# '--' is in the error instead.
_FLAGS = {
  '': ('plain', '--tls-cert and --tls-key with --tls-client-ca or'),
  'tls': ('tls', 'give --tls-client-ca or --token-file too'),
  'ca': ('--tls-client-ca needs TLS', '--tls-client-ca needs TLS'),
  'token': ('token', '--tls-cert and --tls-key with'),
  'insecure': ('plain', 'plain'),
  'tls ca': ('tls', 'tls'),
  'tls token': ('tls token', 'tls token'),
  'tls insecure': ('--insecure excludes --tls', '--insecure excludes --tls'),
  'ca token': ('--tls-client-ca needs TLS', '--tls-client-ca needs TLS'),
  'ca insecure': ('--insecure excludes --tls', '--insecure excludes --tls'),
  'token insecure': (
    '--insecure and --token-file exclude',
    '--insecure and --token-file exclude',
  ),
  'tls ca token': ('tls token', 'tls token'),
  'tls ca insecure': ('--insecure excludes --tls', '--insecure excludes --tls'),
  'tls token insecure': (
    '--insecure and --token-file exclude',
    '--insecure and --token-file exclude',
  ),
  'ca token insecure': (
    '--insecure and --token-file exclude',
    '--insecure and --token-file exclude',
  ),
  'tls ca token insecure': (
    '--insecure and --token-file exclude',
    '--insecure and --token-file exclude',
  ),
}


@pytest.mark.parametrize('given', _FLAGS)
@pytest.mark.parametrize('host', ['127.0.0.1', '0.0.0.0'])
def test_flags_that_go_together(host, given, files):
  assert len(_FLAGS) == 2**4
  flags = {}
  if 'tls' in given.split():
    flags |= {'tls_cert': files.cert, 'tls_key': files.key}
  if 'ca' in given.split():
    flags['tls_client_ca'] = files.ca
  if 'token' in given.split():
    flags['token_file'] = files.tokens
  if 'insecure' in given.split():
    flags['insecure'] = True
  expected = _FLAGS[given][host != '127.0.0.1']
  if '--' in expected:
    with pytest.raises(access.AccessError) as caught:
      access.grant(host, **flags)
    assert expected in str(caught.value)
    assert '\n' not in str(caught.value)
    return
  granted = access.grant(host, **flags)
  assert (granted.credentials is not None) == ('tls' in expected.split())
  assert sorted(granted.tokens.values()) == (
    ['alice', 'line 4'] if 'token' in expected.split() else []
  )


@pytest.mark.parametrize('host', ['127.0.0.1', '0.0.0.0'])
def test_certificate_and_key_come_together(host, files):
  with pytest.raises(access.AccessError, match='--tls-cert needs --tls-key'):
    access.grant(host, tls_cert=files.cert, token_file=files.tokens)
  with pytest.raises(access.AccessError, match='--tls-key needs --tls-cert'):
    access.grant(host, tls_key=files.key, token_file=files.tokens)


def test_access_cannot_be_changed_and_shows_no_digest(files):
  granted = access.grant('localhost', token_file=files.tokens)
  with pytest.raises(dataclasses.FrozenInstanceError):
    granted.tokens = {}
  with pytest.raises(TypeError):
    granted.tokens[b'x' * 32] = 'mallory'
  assert dict(granted.tokens) == {
    hashlib.sha256(ALICE.encode()).digest(): 'alice',
    hashlib.sha256(BOB.encode()).digest(): 'line 4',
  }
  assert 'alice' not in repr(granted)


# -- Certificate files ---------------------------------------------------------


def test_files_that_are_no_certificates_are_refused(files, tmp_path):
  text = write(tmp_path / 'text', b'no certificate')
  der = write(
    tmp_path / 'der',
    ssl.PEM_cert_to_DER_cert(pathlib.Path(files.ca).read_text()),
  )
  # Base64 that is nothing, between the right lines.
  broken = write(
    tmp_path / 'broken',
    b'-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n',
  )
  missing = str(tmp_path / 'missing')
  for changes, sentence in (
    ({'tls_cert': missing}, f'--tls-cert={missing} cannot be read (No such'),
    ({'tls_key': missing}, f'--tls-key={missing} cannot be read (No such'),
    (
      {'tls_client_ca': missing},
      f'--tls-client-ca={missing} cannot be read (No such',
    ),
    ({'tls_cert': str(tmp_path)}, 'cannot be read (Is a directory)'),
    ({'tls_cert': text}, f"--tls-cert={text} has no block 'BEGIN CERTIFICATE'"),
    ({'tls_key': text}, f"--tls-key={text} has no block 'BEGIN PRIVATE KEY'"),
    (
      {'tls_client_ca': der},
      f"--tls-client-ca={der} has no block 'BEGIN CERTIFICATE'",
    ),
    (
      {'tls_cert': files.key, 'tls_key': files.cert},
      f"--tls-cert={files.key} has no block 'BEGIN CERTIFICATE'",
    ),
    (
      {'tls_cert': broken},
      f'--tls-cert={broken} and --tls-key={files.key} cannot be used',
    ),
    (
      {'tls_client_ca': broken},
      f'--tls-client-ca={broken} cannot be used',
    ),
    (
      {'tls_key': files.client_key},
      f'--tls-cert={files.cert} and --tls-key={files.client_key} do not belong '
      'together',
    ),
  ):
    flags = {'tls_cert': files.cert, 'tls_key': files.key} | changes
    with pytest.raises(access.AccessError) as caught:
      access.grant('localhost', **flags)
    assert sentence in str(caught.value)


def test_a_key_with_a_passphrase_is_refused_without_asking(
  files, tmp_path, capfd
):
  from cryptography.hazmat.primitives import serialization

  plain = serialization.load_pem_private_key(
    pathlib.Path(files.key).read_bytes(), None
  )
  locked = write(
    tmp_path / 'locked',
    plain.private_bytes(
      serialization.Encoding.PEM,
      serialization.PrivateFormat.PKCS8,
      serialization.BestAvailableEncryption(b'passphrase'),
    ),
  )
  with pytest.raises(access.AccessError, match='wants a passphrase'):
    access.grant('localhost', tls_cert=files.cert, tls_key=locked)
  assert capfd.readouterr() == ('', '')


# -- The token file ------------------------------------------------------------


def tokens_of(path):
  return access.grant('localhost', token_file=path).tokens


def test_lines_of_a_token_file(tmp_path):
  path = write(
    tmp_path / 'tokens',
    b'# one comment\r\n'
    b'\r\n'
    b'  # another\n'
    b'alice  \t' + ALICE.encode() + b' \r\n'
    b'exactly16chars__\n'
    b'alice renewed-token-of-alice',
  )
  assert dict(tokens_of(path)) == {
    hashlib.sha256(ALICE.encode()).digest(): 'alice',
    hashlib.sha256(b'exactly16chars__').digest(): 'line 5',
    hashlib.sha256(b'renewed-token-of-alice').digest(): 'alice',
  }


@pytest.mark.parametrize('mode', [0o640, 0o604, 0o620, 0o610, 0o644, 0o777])
def test_a_token_file_of_others_is_refused(mode, tmp_path):
  path = write(tmp_path / 'tokens', ALICE.encode(), mode)
  with pytest.raises(access.AccessError) as caught:
    tokens_of(path)
  assert f'has mode {mode:04o}' in str(caught.value)
  assert f'chmod 600 {path}' in str(caught.value)


@pytest.mark.parametrize(
  ('content', 'sentence'),
  [
    ('', 'holds no token'),
    ('# SecretSecretSecret\n\n', 'holds no token'),
    ('# x\nSecretSecret123', 'line 2, has a token of 15 characters'),
    ('alice SecretSecret123', 'line 1, has a token of 15 characters'),
    ('SecretSecretSecret alice', 'line 1, has a token of 5 characters'),
    # The two in the wrong order: the secret would be shown as a name.
    (
      'SecretSecretSecret trainer-of-the-lab',
      'line 1, has a name of 18 characters',
    ),
    ('alice of SecretSecretSecret', 'line 1, must be TOKEN or NAME TOKEN'),
    ('alice SecretSecretSecret # her', 'line 1, must be TOKEN or NAME TOKEN'),
    ('SecretSecretSecret\u00e9', 'line 1, must be TOKEN or NAME TOKEN'),
    ('\ufeffSecretSecretSecret', 'line 1, must be TOKEN or NAME TOKEN'),
    ('al\u00efce SecretSecretSecret', 'line 1, must be TOKEN or NAME TOKEN'),
    ('Secret\0SecretSecretSecret', 'line 1, must be TOKEN or NAME TOKEN'),
    (
      'a SecretSecretSecret\n\nb SecretSecretSecret',
      'line 3, repeats the token of line 1',
    ),
  ],
)
def test_token_files_that_are_no_use(content, sentence, tmp_path):
  path = write(tmp_path / 'tokens', content.encode())
  with pytest.raises(access.AccessError) as caught:
    tokens_of(path)
  assert f'--token-file={path}' in str(caught.value)
  assert sentence in str(caught.value)
  assert 'Secret' not in str(caught.value)
  # Nor in a traceback, which shows the causes too.
  assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_token_file_that_cannot_be_read(tmp_path):
  missing = str(tmp_path / 'missing')
  with pytest.raises(access.AccessError) as caught:
    tokens_of(missing)
  assert f'--token-file={missing} cannot be read (No such' in str(caught.value)
  with pytest.raises(access.AccessError, match='Is a directory'):
    tokens_of(str(tmp_path))


def test_tokens_and_traces_of_grpc_exclude_each_other(files, monkeypatch):
  monkeypatch.setenv('GRPC_TRACE', 'chttp2_hpack_parser')
  with pytest.raises(access.AccessError, match='GRPC_TRACE=chttp2_hpack_parse'):
    tokens_of(files.tokens)
  assert access.grant('localhost').tokens == {}
  monkeypatch.setenv('GRPC_TRACE', '')
  assert len(tokens_of(files.tokens)) == 2


# -- Calls ---------------------------------------------------------------------


class Recorder(text_env_pb2_grpc.TextEnvServicer):
  """Answers with the name of the client and remembers who was let in."""

  def __init__(self, granted):
    self._granted = granted
    self.seen = []

  async def Describe(self, request, context):
    self.seen.append(access.client_of(context, self._granted))
    return text_env_pb2.Description(name=self.seen[-1])

  async def Play(self, requests, context):
    self.seen.append(access.client_of(context, self._granted))
    async for request in requests:
      yield text_env_pb2.Reply(turn=request.act.turn, observation=self.seen[-1])


@contextlib.asynccontextmanager
async def serving(granted, address='127.0.0.1:0'):
  """Yields the address and the recorder of a running server."""
  server = grpc.aio.server(interceptors=[access.Guard(granted)])
  recorder = Recorder(granted)
  text_env_pb2_grpc.add_TextEnvServicer_to_server(recorder, server)
  health_servicer = health.aio.HealthServicer()
  health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
  await health_servicer.set('', health_pb2.HealthCheckResponse.SERVING)
  if granted.credentials is None:
    port = server.add_insecure_port(address)
  else:
    port = server.add_secure_port(address, granted.credentials)
  await server.start()
  try:
    yield f'{address.rpartition(":")[0]}:{port}', recorder
  finally:
    await server.stop(0)


def channel_to(address, *, ca='', cert='', key=''):
  if not ca:
    return grpc.aio.insecure_channel(address)
  credentials = grpc.ssl_channel_credentials(
    *(
      pathlib.Path(path).read_bytes() if path else None
      for path in (ca, key, cert)
    )
  )
  return grpc.aio.secure_channel(address, credentials)


def bearer(token):
  return (('authorization', f'Bearer {token}'),)


async def outcome(call):
  """The reply of a call, or its status code and what it said."""
  try:
    return await call
  except grpc.aio.AioRpcError as error:
    return error.code(), error.details()


async def describe(channel, metadata=None):
  """Name under which a unary call came in, or code and details."""
  stub = text_env_pb2_grpc.TextEnvStub(channel)
  got = await outcome(
    stub.Describe(
      text_env_pb2.DescribeRequest(), metadata=metadata, timeout=DEADLINE_S
    )
  )
  return got.name if isinstance(got, text_env_pb2.Description) else got


async def play(channel, metadata=None, turns=3):
  """Name under which a stream came in, or code and details."""
  stub = text_env_pb2_grpc.TextEnvStub(channel)

  async def acts():
    for turn in range(1, turns + 1):
      yield text_env_pb2.PlayRequest(act=text_env_pb2.Act(turn=turn))

  async def replies():
    call = stub.Play(acts(), metadata=metadata, timeout=DEADLINE_S)
    return [reply async for reply in call]

  got = await outcome(replies())
  if not isinstance(got, list):
    return got
  assert [reply.turn for reply in got] == list(range(1, turns + 1))
  (name,) = {reply.observation for reply in got}
  return name


async def serves(channel):
  """Whether the health service answers and says so, without a token."""
  stub = health_pb2_grpc.HealthStub(channel)
  request = health_pb2.HealthCheckRequest()
  checked = await stub.Check(request, timeout=DEADLINE_S)
  watch = stub.Watch(request, timeout=DEADLINE_S)
  watched = await watch.read()
  watch.cancel()
  serving = health_pb2.HealthCheckResponse.SERVING
  return checked.status == serving and watched.status == serving


def run(body):
  return asyncio.run(asyncio.wait_for(body, 3 * DEADLINE_S))


def secrets_of(token):
  """What must not be shown of a token: itself, its parts, its digest."""
  return token, token[:12], hashlib.sha256(token.encode()).hexdigest()[:8]


def test_tokens_open_unary_calls_and_streams(files, caplog, capfd):
  caplog.set_level(logging.DEBUG)
  granted = access.grant('localhost', token_file=files.tokens)

  async def body():
    async with serving(granted) as (address, recorder):
      async with channel_to(address) as channel:
        for call in (describe, play):
          assert await call(channel, bearer(ALICE)) == 'alice'
          assert await call(channel, bearer(BOB)) == 'line 4'
          # The scheme is no matter of case.
          lower = (('authorization', f'bearer {ALICE}'),)
          assert await call(channel, lower) == 'alice'
        assert recorder.seen == ['alice', 'line 4', 'alice'] * 2
        for metadata, why in (
          (None, 'no token came'),
          ((('x-token', ALICE),), 'no token came'),
          (bearer(STRANGER), 'the token is not known here'),
          (bearer(ALICE[:-1]), 'the token is not known here'),
          (bearer(ALICE + 'x'), 'the token is not known here'),
          (bearer(''), 'the token is not known here'),
          (bearer('alice'), 'the token is not known here'),
          (bearer(f'alice {ALICE}'), 'the token is not known here'),
          ((('authorization', ALICE),), 'the token is not known here'),
          ((('authorization', f'Basic {ALICE}'),), 'the token is not known'),
          (bearer(STRANGER) + bearer(ALICE), 'the token is not known here'),
          (bearer(ALICE) + bearer(STRANGER), 'the token is not known here'),
        ):
          # A client that goes on sending takes the end for an internal error;
          # that of training sends one message, and waits.
          for call in (describe, functools.partial(play, turns=1)):
            code, said = await call(channel, metadata)
            assert code == grpc.StatusCode.UNAUTHENTICATED, metadata
            assert said.startswith(why)
            assert 'authorization: Bearer TOKEN' in said
            for token in (ALICE, STRANGER):
              assert not any(part in said for part in secrets_of(token))
        assert len(recorder.seen) == 6
        assert await serves(channel)

  run(body())
  shown = caplog.text + ''.join(capfd.readouterr())
  for token in (ALICE, BOB, STRANGER):
    assert not any(part in shown for part in secrets_of(token))
  assert 'Bearer' not in shown


def test_a_stream_that_sends_nothing_is_refused_too(files):
  granted = access.grant('localhost', token_file=files.tokens)

  async def body():
    async with serving(granted) as (address, recorder):
      async with channel_to(address) as channel:
        call = text_env_pb2_grpc.TextEnvStub(channel).Play(timeout=DEADLINE_S)
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
        assert recorder.seen == []

  run(body())


def test_unknown_methods_are_hidden_from_who_has_no_token(files):
  granted = access.grant('localhost', token_file=files.tokens)

  async def body():
    async with serving(granted) as (address, _):
      async with channel_to(address) as channel:
        # Names that only look like the health service are not open.
        for method in ('/grpc.health.v1.HealthX/Check', '/planpo.X/Y'):
          call = channel.unary_unary(method)
          code, _ = await outcome(call(b'', timeout=DEADLINE_S))
          assert code == grpc.StatusCode.UNAUTHENTICATED
          code, _ = await outcome(
            call(b'', metadata=bearer(ALICE), timeout=DEADLINE_S)
          )
          assert code == grpc.StatusCode.UNIMPLEMENTED

  run(body())


def test_without_flags_all_come_in_by_their_address():
  granted = access.grant('localhost')

  async def name_at(address):
    async with serving(granted, address) as (target, _):
      async with channel_to(target) as channel:
        # A token that nobody asked for changes nothing.
        assert await describe(channel, bearer(ALICE)) == await describe(channel)
        return await play(channel)

  assert run(name_at('127.0.0.1:0')) == '127.0.0.1'
  assert run(name_at('[::1]:0')) == '::1'


def test_tls_with_a_token(files):
  granted = access.grant(
    '0.0.0.0',
    tls_cert=files.cert,
    tls_key=files.key,
    token_file=files.tokens,
  )

  async def body():
    async with serving(granted) as (address, recorder):
      async with channel_to(address, ca=files.ca) as channel:
        for call in (describe, play):
          assert await call(channel, bearer(BOB)) == 'line 4'
          for metadata in (None, bearer(STRANGER)):
            code, _ = await call(channel, metadata)
            assert code == grpc.StatusCode.UNAUTHENTICATED
        assert await serves(channel)
      # A certificate is not asked for, so it gives no name; nor does it do
      # instead of a token.
      async with channel_to(
        address, ca=files.ca, cert=files.client_cert, key=files.client_key
      ) as channel:
        assert await describe(channel, bearer(ALICE)) == 'alice'
        code, _ = await describe(channel)
        assert code == grpc.StatusCode.UNAUTHENTICATED
      assert recorder.seen == ['line 4', 'line 4', 'alice']
      for ca in ('', files.other_ca):
        async with channel_to(address, ca=ca) as channel:
          code, _ = await describe(channel, bearer(ALICE))
          assert code == grpc.StatusCode.UNAVAILABLE
      assert len(recorder.seen) == 3

  run(body())


def test_tls_with_certificates_of_clients(files, authority, tmp_path):
  granted = access.grant(
    '0.0.0.0',
    tls_cert=files.cert,
    tls_key=files.key,
    tls_client_ca=files.ca,
  )
  unnamed = authority.issue_cert('first.test', 'second.test')
  unnamed_cert, unnamed_key = write_pair(tmp_path, 'unnamed', unnamed)

  async def body():
    async with serving(granted) as (address, recorder):
      async with channel_to(
        address, ca=files.ca, cert=files.client_cert, key=files.client_key
      ) as channel:
        for call in (describe, play):
          assert await call(channel) == 'trainer'
          assert await call(channel, bearer(ALICE)) == 'trainer'
        assert await serves(channel)
      async with channel_to(
        address, ca=files.ca, cert=unnamed_cert, key=unnamed_key
      ) as channel:
        assert await describe(channel) == 'first.test'
      assert len(recorder.seen) == 5
      for wrong in (
        {},
        {'ca': files.ca},
        {'ca': files.ca, 'cert': files.other_cert, 'key': files.other_key},
      ):
        async with channel_to(address, **wrong) as channel:
          for call in (describe, play):
            code, _ = await call(channel)
            assert code == grpc.StatusCode.UNAVAILABLE, wrong
          with pytest.raises(grpc.aio.AioRpcError):
            await serves(channel)
      assert len(recorder.seen) == 5

  run(body())


def test_a_certificate_and_a_token_are_both_wanted(files):
  granted = access.grant(
    '0.0.0.0',
    tls_cert=files.cert,
    tls_key=files.key,
    tls_client_ca=files.ca,
    token_file=files.tokens,
  )

  async def body():
    async with serving(granted) as (address, recorder):
      async with channel_to(
        address, ca=files.ca, cert=files.client_cert, key=files.client_key
      ) as channel:
        for call in (describe, play):
          assert await call(channel, bearer(ALICE)) == 'alice'
          code, _ = await call(channel)
          assert code == grpc.StatusCode.UNAUTHENTICATED
      async with channel_to(address, ca=files.ca) as channel:
        code, _ = await describe(channel, bearer(ALICE))
        assert code == grpc.StatusCode.UNAVAILABLE
      assert recorder.seen == ['alice', 'alice']

  run(body())


def send_raw(port, authorization):
  """Calls Describe by hand and returns all bytes that come back.

  gRPC's own client sends no header that is not ASCII.
  """

  def frame(kind, flags, stream, payload):
    length = struct.pack('>I', len(payload))[1:]
    return length + struct.pack('>BBI', kind, flags, stream) + payload

  headers = b''.join(
    b'\0%c%b%c%b' % (len(key), key, len(value), value)
    for key, value in (
      (b':method', b'POST'),
      (b':scheme', b'http'),
      (b':path', b'/planpo.TextEnv/Describe'),
      (b':authority', b'envs'),
      (b'content-type', b'application/grpc'),
      (b'te', b'trailers'),
      (b'authorization', authorization),
    )
  )
  with socket.create_connection(('127.0.0.1', port), DEADLINE_S) as connection:
    connection.sendall(
      b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
      + frame(4, 0, 0, b'')
      + frame(1, 4, 1, headers)
      + frame(0, 1, 1, b'\0\0\0\0\0')
    )
    answer = b''
    while b'grpc-status' not in answer:
      part = connection.recv(4096)
      assert part, answer
      answer += part
  return answer


def test_headers_that_are_no_text_stay_out_of_the_log(files, caplog, capfd):
  caplog.set_level(logging.DEBUG)
  granted = access.grant('localhost', token_file=files.tokens)

  async def body():
    async with serving(granted) as (address, recorder):
      port = int(address.rpartition(':')[2])
      right = b'Bearer ' + ALICE.encode()
      answer = await asyncio.to_thread(send_raw, port, right)
      assert b'grpc-status\x010' in answer
      for wrong in (right + b'\xff', right + b'\0', b'\xff\xfe' + right):
        answer = await asyncio.to_thread(send_raw, port, wrong)
        assert b'grpc-status\x0216' in answer  # UNAUTHENTICATED
      assert recorder.seen == ['alice']

  run(body())
  shown = caplog.text + ''.join(capfd.readouterr())
  assert not any(part in shown for part in secrets_of(ALICE))


# -- The service itself --------------------------------------------------------


def command(*flags):
  return [sys.executable, '-m', 'envs_server', '--env=toy', '--port=0', *flags]


@contextlib.contextmanager
def service(folder, *flags, **variables):
  """Yields the port of a running service, and what it has written so far."""
  log = folder / 'log'
  with log.open('wb') as writer:
    process = subprocess.Popen(
      [*command(*flags), '--exit-with-parent'],
      stdin=subprocess.PIPE,
      stdout=writer,
      stderr=writer,
      env=os.environ | variables,
    )
  try:
    up = re.compile(r'listening on \S+:(\d+)\n')
    assert env_processes.wait_for(
      lambda: up.search(log.read_text()) or process.poll() is not None, 60
    )
    assert process.poll() is None, log.read_text()
    yield int(up.search(log.read_text())[1]), log.read_text
  finally:
    process.terminate()
    process.communicate(timeout=30)


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    ((), '--host=0.0.0.0 is open to other machines; give --tls-cert'),
    (('--token-file={tokens}',), '--host=0.0.0.0 is open to other machines'),
    (
      ('--tls-cert={cert}', '--tls-key={key}'),
      '--host=0.0.0.0 is open to other machines, and TLS alone',
    ),
    (
      ('--insecure', '--token-file={tokens}'),
      '--insecure and --token-file exclude each other',
    ),
    (
      ('--tls-cert={cert}', '--tls-key={other_key}', '--token-file={tokens}'),
      'do not belong together',
    ),
  ],
)
def test_a_service_that_may_not_start_says_so(flags, sentence, files):
  named = dataclasses.asdict(files)
  ended = subprocess.run(
    command('--host=0.0.0.0', *(flag.format(**named) for flag in flags)),
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert ended.returncode == 1
  assert ended.stdout == ''
  (line,) = ended.stderr.splitlines()
  assert line.startswith('envs_server: ')
  assert sentence in line


def test_a_service_told_to_be_insecure_takes_all(tmp_path):
  async def body(port):
    async with channel_to(f'127.0.0.1:{port}') as channel:
      return await describe(channel)

  with service(tmp_path, '--host=0.0.0.0', '--insecure') as (port, _):
    assert run(body(port)) == 'toy'


def test_a_service_with_tls_and_tokens(files, tmp_path):
  async def start(channel, metadata):
    """First reply of an episode, or code and details."""
    task = text_env_pb2.Task(env='toy', split='train', index=1, name='deliver')
    request = text_env_pb2.PlayRequest(start=text_env_pb2.Start(task=task))
    call = text_env_pb2_grpc.TextEnvStub(channel).Play(
      iter([request]), metadata=metadata, timeout=DEADLINE_S
    )
    return await outcome(anext(aiter(call)))

  async def body(port):
    address = f'127.0.0.1:{port}'
    async with channel_to(address, ca=files.ca) as channel:
      assert await describe(channel, bearer(ALICE)) == 'toy'
      assert (await start(channel, bearer(BOB))).goal
      for metadata in (None, bearer(STRANGER)):
        for call in (describe, start):
          code, _ = await call(channel, metadata)
          assert code == grpc.StatusCode.UNAUTHENTICATED
      assert await serves(channel)
      reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
      ask = reflection_pb2.ServerReflectionRequest(list_services='')

      async def names(metadata):
        call = reflect.ServerReflectionInfo(
          iter([ask]), metadata=metadata, timeout=DEADLINE_S
        )
        return [reply async for reply in call]

      assert await names(bearer(ALICE))
      code, _ = await outcome(names(None))
      assert code == grpc.StatusCode.UNAUTHENTICATED
    for ca in ('', files.other_ca):
      async with channel_to(address, ca=ca) as channel:
        code, _ = await describe(channel, bearer(ALICE))
        assert code == grpc.StatusCode.UNAVAILABLE

  flags = (
    '--host=0.0.0.0',
    f'--tls-cert={files.cert}',
    f'--tls-key={files.key}',
    f'--token-file={files.tokens}',
  )
  with service(tmp_path, *flags, GRPC_VERBOSITY='debug') as (port, log):
    run(body(port))
  # It told of failed handshakes, and kept the tokens to itself.
  assert 'SSL_ERROR_SSL' in log()
  for token in (ALICE, BOB, STRANGER):
    assert not any(part in log() for part in secrets_of(token))
  assert 'Bearer' not in log()


def test_a_service_that_clients_enter_with_certificates(files, tmp_path):
  async def body(port):
    address = f'127.0.0.1:{port}'
    async with channel_to(
      address, ca=files.ca, cert=files.client_cert, key=files.client_key
    ) as channel:
      assert await describe(channel) == 'toy'
    async with channel_to(address, ca=files.ca) as channel:
      code, _ = await describe(channel)
      assert code == grpc.StatusCode.UNAVAILABLE

  flags = (
    '--host=0.0.0.0',
    f'--tls-cert={files.cert}',
    f'--tls-key={files.key}',
    f'--tls-client-ca={files.ca}',
  )
  with service(tmp_path, *flags) as (port, _):
    run(body(port))
