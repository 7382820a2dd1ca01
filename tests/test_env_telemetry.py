"""What the service counts, as a scraper reads it."""

import contextlib
import os
import queue
import signal
import socket
import ssl
import types
import urllib.error
import urllib.request

import env_processes
import grpc
import prometheus_client
import pytest
import trustme
from prometheus_client import parser

from envs_server import telemetry, text_env_pb2, text_env_pb2_grpc
from planpo_jax import env_service

# Samples that tell when a counter was made.
_TIMES = '_created'


def read(text):
  """{(name, (label, value), ...): value} of every sample."""
  return {
    (sample.name, *sorted(sample.labels.items())): sample.value
    for family in parser.text_string_to_metric_families(text)
    for sample in family.samples
    if not sample.name.endswith(_TIMES)
  }


def samples(meter):
  return read(prometheus_client.generate_latest(meter.registry).decode())


def nonzero(meter, name):
  """{label values without the environment: value} of one metric."""
  return {
    tuple(value for label, value in labels if label != 'env'): number
    for (sample, *labels), number in samples(meter).items()
    if sample == name and number
  }


def get(url, context=None):
  opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=context),
  )
  with opener.open(url, timeout=20) as reply:
    return reply.read().decode()


def loopbacks():
  """Addresses of this machine; not every one has IPv6."""
  try:
    with socket.create_server(('::1', 0), family=socket.AF_INET6):
      return ['127.0.0.1', 'localhost', '[::1]', '::1']
  except OSError:
    return ['127.0.0.1', 'localhost']


# -- Counting ------------------------------------------------------------------


def test_every_event_is_counted_under_its_name():
  meter = telemetry.Telemetry('toy')
  for ending, times in (('terminated', 3), ('truncated', 2), ('refused', 1)):
    for _ in range(times):
      meter.episode(ending)
  for kind in ('died', 'deadline', 'died', 'idle'):
    meter.fault(kind)
  for reason in ('episodes', 'memory', 'episodes', 'hung'):
    meter.restart(reason)
  assert nonzero(meter, 'planpo_env_episodes_total') == {
    ('terminated',): 3.0,
    ('truncated',): 2.0,
    ('refused',): 1.0,
  }
  assert nonzero(meter, 'planpo_env_faults_total') == {
    ('died',): 2.0,
    ('deadline',): 1.0,
    ('idle',): 1.0,
  }
  assert nonzero(meter, 'planpo_env_worker_restarts_total') == {
    ('episodes',): 2.0,
    ('memory',): 1.0,
    ('hung',): 1.0,
  }
  # Nothing of the environment's name is lost on the way.
  assert all(
    ('env', 'toy') in key for key in samples(meter) if key[0].endswith('_total')
  )


def test_counters_begin_at_zero():
  """So that the rate of the first loss is seen."""
  found = samples(telemetry.Telemetry('toy'))
  env = ('env', 'toy')
  for ending in ('terminated', 'truncated', 'abandoned', 'fault', 'refused'):
    key = ('planpo_env_episodes_total', ('ending', ending), env)
    assert found[key] == 0.0
  for kind in ('died', 'hung', 'deadline', 'memory', 'error'):
    assert found[('planpo_env_faults_total', env, ('kind', kind))] == 0.0
    key = ('planpo_env_worker_restarts_total', env, ('reason', kind))
    assert found[key] == 0.0
  assert found[('planpo_env_steps_total', env)] == 0.0


def test_times_fall_into_their_buckets():
  meter = telemetry.Telemetry('toy')
  for seconds in (0.0001, 0.0002, 0.5, 119.0, 121.0):
    meter.step(seconds)
  meter.reset(2.5)
  meter.queued(0.0)
  meter.queued(45.0)
  found = samples(meter)

  def below(name, bound):
    return found[(f'planpo_env_{name}_seconds_bucket', ('le', bound))]

  assert [
    below('step', bound) for bound in ('0.0001', '0.0003', '1.0', '120.0')
  ] == [1.0, 2.0, 3.0, 4.0]
  assert below('step', '+Inf') == 5.0
  assert found[('planpo_env_step_seconds_sum',)] == pytest.approx(240.5003)
  assert found[('planpo_env_step_seconds_count',)] == 5.0
  assert found[('planpo_env_steps_total', ('env', 'toy'))] == 5.0
  assert (below('reset', '1.0'), below('reset', '3.0')) == (0.0, 1.0)
  assert found[('planpo_env_reset_seconds_sum',)] == 2.5
  assert (below('queue_wait', '0.0001'), below('queue_wait', '60.0')) == (1, 2)
  assert found[('planpo_env_queue_wait_seconds_count',)] == 2.0


def test_unknown_ending_is_refused():
  with pytest.raises(ValueError, match="'won' is unknown; known: terminated,"):
    telemetry.Telemetry('toy').episode('won')


def test_two_services_of_a_process_do_not_mix():
  ours, theirs = telemetry.Telemetry('toy'), telemetry.Telemetry('sciworld')
  ours.episode('terminated')
  ours.step(0.1)
  assert not nonzero(theirs, 'planpo_env_episodes_total')
  assert not nonzero(theirs, 'planpo_env_step_seconds_count')


# -- The state of the pool -----------------------------------------------------


def test_gauges_tell_the_moment_of_the_scrape():
  meter = telemetry.Telemetry('toy')
  pool = types.SimpleNamespace(
    size=8, ready=7, busy=5, waiting=3, clients=2, memory_bytes=[10, 30, 20]
  )
  meter.watch(pool)
  expected = {
    ('planpo_env_workers',): 8.0,
    ('planpo_env_workers_ready',): 7.0,
    ('planpo_env_episodes_playing',): 5.0,
    ('planpo_env_episodes_waiting',): 3.0,
    ('planpo_env_clients',): 2.0,
    ('planpo_env_worker_memory_bytes', ('stat', 'max')): 30.0,
    ('planpo_env_worker_memory_bytes', ('stat', 'sum')): 60.0,
  }
  assert samples(meter).items() >= expected.items()
  pool.ready, pool.waiting, pool.memory_bytes = 0, 0, []
  expected |= {
    ('planpo_env_workers_ready',): 0.0,
    ('planpo_env_episodes_waiting',): 0.0,
    ('planpo_env_worker_memory_bytes', ('stat', 'max')): 0.0,
    ('planpo_env_worker_memory_bytes', ('stat', 'sum')): 0.0,
  }
  assert samples(meter).items() >= expected.items()


def test_pool_that_changes_while_it_is_read_is_read_again():
  class Restless:
    size, ready, busy, clients, memory_bytes = 2, 2, 2, 1, [5]
    asked = 0

    @property
    def waiting(self):
      self.asked += 1
      queue = {1: None, 2: None}
      if self.asked < 4:
        # As when the event loop appends between two items.
        return sum(queue.update({one + 9: None}) or 1 for one in queue)
      return len(queue)

  meter = telemetry.Telemetry('toy')
  meter.watch(Restless())
  assert samples(meter)[('planpo_env_episodes_waiting',)] == 2.0


# -- For a scraper -------------------------------------------------------------


@pytest.fixture(scope='module')
def authority():
  return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
  """Paths of the server's certificate, its key, and the CA of scrapers."""
  certificate = authority.issue_cert('127.0.0.1')
  paths = [tmp_path / name for name in ('cert.pem', 'key.pem', 'ca.pem')]
  certificate.private_key_pem.write_to_path(paths[1])
  for number, blob in enumerate(certificate.cert_chain_pems):
    blob.write_to_path(paths[0], append=number > 0)
  authority.cert_pem.write_to_path(paths[2])
  return [str(path) for path in paths]


@pytest.fixture
def secured(files):
  """Port of a service that asks scrapers for a certificate."""
  meter = telemetry.Telemetry('toy')
  meter.episode('abandoned')
  cert, key, ca = files
  return meter.expose(
    '127.0.0.1', 0, tls_cert=cert, tls_key=key, tls_client_ca=ca
  )


def trusting(authority, issuer=None):
  """TLS of a scraper that has a certificate of `issuer`, or else none."""
  context = ssl.create_default_context()
  authority.configure_trust(context)
  if issuer is not None:
    issuer.issue_cert('scraper').configure_cert(context)
  return context


@pytest.mark.parametrize('host', loopbacks())
def test_metrics_are_served_as_they_are_at_each_scrape(host):
  meter = telemetry.Telemetry('toy')
  port = meter.expose(host, 0)
  shown = f'[{host.strip("[]")}]' if ':' in host else host
  key = ('planpo_env_steps_total', ('env', 'toy'))
  for expected in (0.0, 1.0, 2.0):
    assert read(get(f'http://{shown}:{port}/metrics'))[key] == expected
    meter.step(0.01)


def test_nothing_but_metrics_is_served():
  port = telemetry.Telemetry('toy').expose('127.0.0.1', 0)
  with pytest.raises(urllib.error.HTTPError) as caught:
    get(f'http://127.0.0.1:{port}/metrics/../etc/passwd')
  assert caught.value.code == 404


def test_scraper_with_a_certificate_is_answered(authority, secured):
  url = f'https://127.0.0.1:{secured}/metrics'
  text = get(url, context=trusting(authority, authority))
  key = ('planpo_env_episodes_total', ('ending', 'abandoned'), ('env', 'toy'))
  assert read(text)[key] == 1.0


@pytest.mark.parametrize('stranger', [False, True])
def test_other_scrapers_are_refused(authority, secured, stranger, capfd):
  context = trusting(authority, trustme.CA() if stranger else None)
  with pytest.raises((urllib.error.URLError, OSError)):
    get(f'https://127.0.0.1:{secured}/metrics', context=context)
  with pytest.raises((urllib.error.URLError, OSError)):
    get(f'http://127.0.0.1:{secured}/metrics')
  # Nor do they fill the log of the service.
  assert capfd.readouterr() == ('', '')


def test_tls_without_client_ca_asks_for_no_certificate(authority, files):
  cert, key, _ = files
  port = telemetry.Telemetry('toy').expose(
    '127.0.0.1', 0, tls_cert=cert, tls_key=key
  )
  url = f'https://127.0.0.1:{port}/metrics'
  assert 'planpo_env_steps_total' in get(url, context=trusting(authority))


def test_scraper_that_says_nothing_stops_no_other(authority, secured):
  """It would hold up the thread that accepts if that shook hands itself."""
  with (
    socket.create_connection(('127.0.0.1', secured)),
    socket.create_connection(('127.0.0.1', secured)),
  ):
    test_scraper_with_a_certificate_is_answered(authority, secured)


def test_scraper_that_says_nothing_is_let_go(secured):
  """After ten seconds, or they would fill the process with threads."""
  with socket.create_connection(('127.0.0.1', secured), timeout=60) as silent:
    assert silent.recv(1) == b''


def test_port_that_is_taken_is_told():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(RuntimeError) as caught:
      telemetry.Telemetry('toy').expose('127.0.0.1', port)
  assert f'--metrics=127.0.0.1:{port} cannot be listened on' in str(
    caught.value
  )
  assert 'and port 0 for a free one' in str(caught.value)


def test_address_of_another_machine_is_told():
  with pytest.raises(RuntimeError, match='--metrics=192.0.2.1:0 cannot'):
    telemetry.Telemetry('toy').expose('192.0.2.1', 0)


def test_files_that_do_not_belong_together_are_told(files, tmp_path):
  cert, key, ca = files
  foreign = tmp_path / 'foreign.pem'
  trustme.CA().issue_cert('x').private_key_pem.write_to_path(foreign)
  for wrong in (
    {'tls_cert': cert, 'tls_key': str(foreign)},
    {'tls_cert': str(tmp_path / 'none.pem'), 'tls_key': key},
    {'tls_cert': cert, 'tls_key': key, 'tls_client_ca': key},
  ):
    with pytest.raises(RuntimeError, match='--metrics cannot use --tls-cert='):
      telemetry.Telemetry('toy').expose('127.0.0.1', 0, **wrong)
  assert telemetry.Telemetry('toy').expose(
    '127.0.0.1', 0, tls_cert=cert, tls_key=key, tls_client_ca=ca
  )


# -- Of a service that plays ---------------------------------------------------


class Episode:
  """One call of Play, message by message and without any recovery."""

  def __init__(self, stub, index, step_limit=0):
    self._sent = queue.SimpleQueue()
    self._call = stub.Play(iter(self._sent.get, None))
    self._turn = 0
    task = text_env_pb2.Task(
      env='toy', split='train', index=index, name='deliver'
    )
    start = text_env_pb2.Start(
      task=task, step_limit=step_limit, want_expert=True
    )
    self._sent.put(text_env_pb2.PlayRequest(start=start))

  def read(self):
    return next(self._call)

  def act(self, action):
    self._turn += 1
    act = text_env_pb2.Act(turn=self._turn, action=action)
    self._sent.put(text_env_pb2.PlayRequest(act=act))
    return self.read()

  def close(self):
    """Ends it in order; returns the status code."""
    self._sent.put(None)
    return self._call.code()


@contextlib.contextmanager
def serving():
  """(process id, stub, function that scrapes) of a service of one worker."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  options = (f'--metrics=127.0.0.1:{port}',)
  with (
    env_service.LocalService('toy', 1, options=options) as running,
    grpc.insecure_channel(running.address) as channel,
  ):
    yield (
      running.pid,
      text_env_pb2_grpc.TextEnvStub(channel),
      lambda: read(get(f'http://127.0.0.1:{port}/metrics')),
    )


def test_service_counts_what_it_plays_exactly():
  with serving() as (pid, stub, scrape):
    steps = 0
    for _ in range(2):
      won = Episode(stub, 1)
      for action in won.read().expert_actions:
        reply = won.act(action)
        steps += 1
      assert reply.ending == text_env_pb2.TERMINATED
      assert won.close() == grpc.StatusCode.OK

    cut = Episode(stub, 2, step_limit=3)
    cut.read()
    for _ in range(3):
      reply = cut.act('look')
    assert reply.ending == text_env_pb2.TRUNCATED
    assert cut.close() == grpc.StatusCode.OK

    left = Episode(stub, 3)
    left.read()
    left.act('look')
    assert left.close() == grpc.StatusCode.OK

    refused = Episode(stub, 1_000_000)
    with pytest.raises(grpc.RpcError):
      refused.read()
    assert refused.close() == grpc.StatusCode.INVALID_ARGUMENT

    lost = Episode(stub, 4)
    lost.read()
    lost.act('look')
    (victim,) = env_processes.workers_of(pid)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(grpc.RpcError):
      lost.act('look')
    assert lost.close() == grpc.StatusCode.ABORTED

    gauge = ('planpo_env_workers_ready',)
    assert env_processes.wait_for(lambda: scrape()[gauge] == 1.0, 60.0)
    memory = ('planpo_env_worker_memory_bytes', ('stat', 'sum'))
    assert env_processes.wait_for(lambda: scrape()[memory] > 1e6, 60.0)
    found = scrape()

  env = ('env', 'toy')

  def total(name, label):
    return {
      key[1][1] if key[1][0] == label else key[2][1]: value
      for key, value in found.items()
      if key[0] == f'planpo_env_{name}_total' and value
    }

  assert total('episodes', 'ending') == {
    'terminated': 2.0,
    'truncated': 1.0,
    'abandoned': 1.0,
    'refused': 1.0,
    'fault': 1.0,
  }
  assert total('faults', 'kind') == {'died': 1.0}
  assert total('worker_restarts', 'reason') == {'died': 1.0}
  # The act that the killed worker did not answer is no step.
  steps += 3 + 1 + 1
  assert found[('planpo_env_steps_total', env)] == steps
  assert found[('planpo_env_step_seconds_count',)] == steps
  assert 0.0 < found[('planpo_env_step_seconds_sum',)] < 60.0
  # All but the one that was refused had a worker, and a reset.
  assert found[('planpo_env_queue_wait_seconds_count',)] == 5.0
  assert found[('planpo_env_reset_seconds_count',)] == 5.0
  for name in ('episodes_playing', 'episodes_waiting', 'clients'):
    assert found[(f'planpo_env_{name}',)] == 0.0
  assert found[('planpo_env_workers',)] == 1.0


def test_service_tells_who_plays_and_who_waits():
  def state(found):
    names = ('episodes_playing', 'episodes_waiting', 'clients')
    return [found[(f'planpo_env_{name}',)] for name in names]

  with serving() as (_, stub, scrape):
    playing = Episode(stub, 1)
    playing.read()
    waiting = [Episode(stub, 2), Episode(stub, 3)]
    assert env_processes.wait_for(
      lambda: state(scrape()) == [1.0, 2.0, 1.0], 30.0
    )
    playing.close()
    for one in waiting:
      one.read()
      one.close()
    assert env_processes.wait_for(
      lambda: state(scrape()) == [0.0, 0.0, 0.0], 30.0
    )
    assert scrape()[('planpo_env_queue_wait_seconds_count',)] == 3.0
