"""Who may come in: TLS, tokens, and the name under which a client plays.

On a loopback address nothing is asked for. On any other one a service speaks
TLS and knows its clients, by their certificates or by their tokens, unless it
is told to do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import ipaddress
import logging
import os
import pathlib
import re
import ssl
import types
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping

import grpc
import grpc.aio
from grpc_health.v1 import health

_SHORTEST_TOKEN = 16
_TOKEN_LINE = re.compile(rb'(?:([!-~]+)\s+)?([!-~]+)')  # NAME TOKEN
# Seconds that a refused call has for its first message.
_FIRST_MESSAGE_S = 5.0
_HEALTH = f'/{health.SERVICE_NAME}/'
_HEADER = "metadata 'authorization: Bearer TOKEN'"
_LOOPBACK = (
  ipaddress.ip_network('127.0.0.0/8'),
  ipaddress.ip_network('::1/128'),
)


class AccessError(ValueError):
  """Flags that do not go together, or a file that is no use; says the fix."""


@dataclasses.dataclass(frozen=True)
class Access:
  """What a client needs to come in.

  Attributes:
    credentials: of the service, for its secure port; None: plain text.
    tokens: SHA-256 of a token -> name of the client that holds it; empty: no
      token is wanted.
  """

  credentials: grpc.ServerCredentials | None
  tokens: Mapping[bytes, str] = dataclasses.field(repr=False)


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach `host`; asks no name server."""
  if host.lower() == 'localhost':
    return True
  if host.startswith('[') and host.endswith(']'):
    host = host[1:-1]
  try:
    address = ipaddress.ip_address(host)
  except ValueError:
    return False
  return any(address in network for network in _LOOPBACK)


def grant(
  host: str,
  *,
  tls_cert: str = '',
  tls_key: str = '',
  tls_client_ca: str = '',
  token_file: str = '',
  insecure: bool = False,
) -> Access:
  """Decides from the flags what a client needs.

  Args:
    host: address to listen on, without its port.
    tls_cert: PEM file, certificate of the service, then those between it and
      its authority. This and the other files: empty for none.
    tls_key: PEM file, private key of `tls_cert`, without a passphrase.
    tls_client_ca: PEM file, authorities of which a client needs a certificate.
    token_file: `TOKEN` or `NAME TOKEN` on each line, but blank ones and those
      that begin with #; of visible ASCII, a token at least 16 characters long
      and a name shorter than that.
    insecure: serve in plain text whoever can reach `host`.

  Raises:
    AccessError: the flags do not go together, or a file is no use.
  """
  if insecure and token_file:
    raise AccessError(
      '--insecure and --token-file exclude each other: the token would cross '
      'the network in clear; give --tls-cert and --tls-key instead of '
      '--insecure.'
    )
  if insecure and (tls_cert or tls_key or tls_client_ca):
    raise AccessError(
      '--insecure excludes --tls-cert, --tls-key and --tls-client-ca; drop it '
      'to serve over TLS.'
    )
  if bool(tls_cert) != bool(tls_key):
    given, other = '--tls-cert', '--tls-key'
    if tls_key:
      given, other = other, given
    raise AccessError(f'{given} needs {other}; give both.')
  if tls_client_ca and not tls_cert:
    raise AccessError(
      '--tls-client-ca needs TLS; give --tls-cert and --tls-key too.'
    )
  if not is_loopback(host) and not insecure:
    if not tls_cert:
      raise AccessError(
        f'--host={host} is open to other machines; give --tls-cert and '
        '--tls-key with --tls-client-ca or --token-file, or --insecure to '
        'serve whoever can reach it, or --host=127.0.0.1 behind a tunnel.'
      )
    if not tls_client_ca and not token_file:
      raise AccessError(
        f'--host={host} is open to other machines, and TLS alone keeps none '
        'of them out; give --tls-client-ca or --token-file too.'
      )
  return Access(
    credentials=_credentials(tls_cert, tls_key, tls_client_ca)
    if tls_cert
    else None,
    tokens=_tokens(token_file) if token_file else types.MappingProxyType({}),
  )


class Guard(grpc.aio.ServerInterceptor):
  """Answers UNAUTHENTICATED to a call without a known token.

  Only the health service is open to all, so that whatever watches over a
  service needs no token.
  """

  def __init__(self, access: Access):
    self._tokens = access.tokens
    # gRPC logs headers that are no UTF-8, a token among them.
    logging.getLogger('grpc._cython.cygrpc').addFilter(_holds_no_header)

  async def intercept_service(
    self,
    continuation: Callable[
      [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]
    ],
    handler_call_details: grpc.HandlerCallDetails,
  ) -> grpc.RpcMethodHandler:
    metadata = handler_call_details.invocation_metadata
    if (
      not self._tokens
      or handler_call_details.method.startswith(_HEALTH)
      or _holder(metadata, self._tokens) is not None
    ):
      return await continuation(handler_call_details)
    if not any(key == 'authorization' for key, _ in metadata):
      return _refusal(f'no token came; send {_HEADER}.')
    return _refusal(
      f'the token is not known here; send {_HEADER} with one from the token '
      'file of the service.'
    )


def client_of(context: grpc.aio.ServicerContext, access: Access) -> str:
  """Name of the client that calls.

  The name of its token, else the common name of its certificate, else the
  first alternative name there, else its address without the port.
  """
  holder = _holder(context.invocation_metadata(), access.tokens)
  if holder is not None:
    return holder
  # Certificates that no authority vouches for never come this far: they are
  # asked for only together with an authority.
  identity = context.auth_context()
  for key in ('x509_common_name', 'x509_subject_alternative_name'):
    for name in identity.get(key, ()):
      # A subject without a common name has an empty one here.
      if name:
        return name.decode(errors='replace')
  scheme, _, where = context.peer().partition(':')
  if scheme not in ('ipv4', 'ipv6'):
    return scheme
  return urllib.parse.unquote(where).rpartition(':')[0].strip('[]')


def _holder(
  metadata: Iterable[tuple[str, str | bytes]] | None,
  tokens: Mapping[bytes, str],
) -> str | None:
  """Name that belongs to the token of a call; None without a known one."""
  given = [value for key, value in metadata or () if key == 'authorization']
  if len(given) != 1:
    return None
  scheme, _, token = given[0].partition(' ')
  if scheme.lower() != 'bearer':
    return None
  digest = hashlib.sha256(token.encode()).digest()
  holder = None
  # To the end in any case: the time taken must not tell which token fits.
  for known, name in tokens.items():
    if hmac.compare_digest(known, digest):
      holder = name
  return holder


def _holds_no_header(record: logging.LogRecord) -> bool:
  return not record.getMessage().startswith('Invalid encoding')


def _refusal(why: str) -> grpc.RpcMethodHandler:
  async def refuse(requests, context):
    # A client in Python takes a call that ends while it sends for an internal
    # error and never sees the status.
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(anext(requests, None), _FIRST_MESSAGE_S)
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

  # Fits calls of every kind.
  return grpc.stream_stream_rpc_method_handler(refuse)


def _credentials(
  tls_cert: str, tls_key: str, tls_client_ca: str
) -> grpc.ServerCredentials:
  cert = _read_pem('--tls-cert', tls_cert, 'CERTIFICATE')
  key = _read_pem('--tls-key', tls_key, 'PRIVATE KEY')
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

  def passphrase():
    raise AccessError(
      f'--tls-key={tls_key} wants a passphrase; give a key without one '
      "('openssl pkey' takes it off)."
    )

  try:
    context.load_cert_chain(tls_cert, tls_key, passphrase)
  except ssl.SSLError as error:
    why = f'cannot be used ({error.reason})'
    if error.reason == 'KEY_VALUES_MISMATCH':
      why = 'do not belong together'
    raise AccessError(
      f'--tls-cert={tls_cert} and --tls-key={tls_key} {why}; give the '
      'certificate of the service, in PEM and first in its file, and its key.'
    ) from error
  authorities = None
  if tls_client_ca:
    authorities = _read_pem('--tls-client-ca', tls_client_ca, 'CERTIFICATE')
    try:
      context.load_verify_locations(tls_client_ca)
    except ssl.SSLError as error:
      raise AccessError(
        f'--tls-client-ca={tls_client_ca} cannot be used ({error.reason}); '
        'give certificates of authorities in PEM.'
      ) from error
  return grpc.ssl_server_credentials(
    [(key, cert)],
    root_certificates=authorities,
    require_client_auth=authorities is not None,
  )


def _read_pem(flag: str, path: str, kind: str) -> bytes:
  try:
    content = pathlib.Path(path).read_bytes()
  except OSError as error:
    raise AccessError(_unreadable(flag, path, error)) from error
  if f'{kind}-----'.encode() not in content:
    raise AccessError(
      f"{flag}={path} has no block 'BEGIN {kind}'; give a file in PEM."
    )
  return content


def _unreadable(flag: str, path: str, error: OSError) -> str:
  return (
    f'{flag}={path} cannot be read ({error.strerror}); give a file that this '
    'user may read.'
  )


def _tokens(path: str) -> Mapping[bytes, str]:
  """Reads a token file. What it raises holds nothing of any line."""
  flag = f'--token-file={path}'
  trace = os.environ.get('GRPC_TRACE')
  if trace:
    raise AccessError(
      f'{flag} and GRPC_TRACE={trace} exclude each other: gRPC would log the '
      'headers of calls, tokens among them; unset GRPC_TRACE.'
    )
  try:
    with open(path, 'rb') as file:
      mode = os.fstat(file.fileno()).st_mode
      content = file.read()
  except OSError as error:
    raise AccessError(_unreadable('--token-file', path, error)) from error
  if mode & 0o077:
    raise AccessError(
      f'{flag} has mode {mode & 0o777:04o}, so others may use it; run '
      f"'chmod 600 {path}'."
    )
  tokens: dict[bytes, str] = {}
  lines: dict[bytes, int] = {}
  for number, line in enumerate(content.splitlines(), 1):
    line = line.strip()
    if not line or line.startswith(b'#'):
      continue
    found = _TOKEN_LINE.fullmatch(line)
    if not found:
      raise AccessError(
        f'{flag}, line {number}, must be TOKEN or NAME TOKEN, each of visible '
        'ASCII characters without a blank.'
      )
    name, token = found.groups()
    if len(token) < _SHORTEST_TOKEN:
      raise AccessError(
        f'{flag}, line {number}, has a token of {len(token)} characters; '
        f"give at least {_SHORTEST_TOKEN} ('openssl rand -hex 32' makes one)."
      )
    # Names are shown in logs. As short ones they can be no token whose place
    # was mistaken.
    if name and len(name) >= _SHORTEST_TOKEN:
      raise AccessError(
        f'{flag}, line {number}, has a name of {len(name)} characters; '
        f'give fewer than {_SHORTEST_TOKEN}, and the name before the token.'
      )
    digest = hashlib.sha256(token).digest()
    if digest in tokens:
      raise AccessError(
        f'{flag}, line {number}, repeats the token of line {lines[digest]}; '
        'give each client one of its own.'
      )
    lines[digest] = number
    tokens[digest] = name.decode() if name else f'line {number}'
  if not tokens:
    raise AccessError(
      f'{flag} holds no token; write one a line, TOKEN or NAME TOKEN.'
    )
  return types.MappingProxyType(tokens)
