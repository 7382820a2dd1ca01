"""Checks of a whole configuration, before anything slow starts."""

from __future__ import annotations

import difflib
import fcntl
import json
import math
import os
import pathlib
import re
import shlex
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import ml_collections
import numpy as np

from envs_server import access, env
from planpo_jax import advantages, chat, losses, prompts, sampling
from planpo_jax.models import qwen2

# Keys that change where and how fast a run goes, not what it computes: a run
# may resume with others.
_FREE = (
  'env.address',
  'env.tls',
  'env.tls_ca',
  'env.tls_cert',
  'env.tls_key',
  'env.token_file',
  'env.workers',
  'env.server_flags',
  'env.step_timeout_s',
  'eval.splits',
  'mesh.data',
  'mesh.fsdp',
  'mesh.tensor',
  'sampler.slots',
  'learner.micro_rows',
  'checkpoint.every',
  'checkpoint.keep',
  'report.transcripts',
  'rollout.dump',
)

# An IPv6 address stands in brackets: it has colons of its own.
_ADDRESS = re.compile(
  r'(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})'
)

# Of the local service, which the run sets by itself.
_OWN_FLAGS = (
  *('--env', '--workers', '--port', '--host', '--step-deadline-s'),
  *('--exit-with-parent', '--insecure', '--help', '-h', '--token-file'),
  *('--tls-cert', '--tls-key', '--tls-client-ca'),
)

_LOCK = '.lock'


class ConfigError(ValueError):
  """The configuration, or what it names, cannot work."""


def check(
  config: ml_collections.ConfigDict,
  num_devices: int,
  *,
  checkpoint_needed: bool = True,
  training: bool = True,
) -> None:
  """Raises ConfigError for the first rule that `config` breaks.

  Args:
    config: the whole configuration.
    num_devices: that jax sees.
    checkpoint_needed: sizes other than nano must start from a checkpoint.
    training: a method is going to learn; else what it asks for is nobody's.
  """
  if not config.env.address:
    _known('env.name', config.env.name, env.known())
  _known('advantage.name', config.advantage.name, advantages.names())
  _known('loss.name', config.loss.name, losses.names())
  _known('chat.context', config.chat.context, chat.CONTEXTS)
  _known('chat.prompt', config.chat.prompt, prompts.names())
  _known('model.dtype', config.model.dtype, qwen2.DTYPES)
  _known('model.param_dtype', config.model.param_dtype, qwen2.DTYPES)
  if not config.model.checkpoint:
    _known('model.size', config.model.size, tuple(qwen2.SIZES))
    if config.model.size != 'nano' and checkpoint_needed:
      raise ConfigError(
        f'model.size={config.model.size!r} without model.checkpoint would '
        'train random weights; give the folder of a checkpoint, e.g. '
        '--config.model.checkpoint=/path/to/Qwen2.5-1.5B-Instruct.'
      )
  slots = config.sampler.slots
  if slots is not None and slots < 1:
    raise ConfigError(
      f'sampler.slots={slots} must be at least 1; leave it unset to have it '
      'chosen.'
    )
  _check_access(config.env)
  if not 0 < config.env.step_timeout_s < math.inf:
    raise ConfigError(
      f'env.step_timeout_s={config.env.step_timeout_s} must be above 0 '
      'seconds; try 60.'
    )
  for key in _POSITIVE:
    if _get(config, key) < 1:
      raise ConfigError(f'{key}={_get(config, key)} must be at least 1.')
  if config.eval.episodes < 0:
    raise ConfigError(
      f'eval.episodes={config.eval.episodes} must be at least 1, or 0 for '
      'every task of a split once.'
    )
  if training:
    _check_group(config)
    _check_method(config)
    _check_optimizer(config, 'optimizer')
    if advantages.traits(config.advantage.name).values:
      _check_optimizer(config, 'critic')
  _check_lengths(config)
  _check_rollout(config, num_devices)
  _check_devices(config, num_devices)


_POSITIVE = (
  'env.workers',
  'env.max_turns',
  'env.horizon_steps',
  'chat.max_response',
  'train.steps',
  'train.tasks_per_step',
  'train.group_size',
  'learner.minibatches',
  'learner.micro_rows',
  'eval.max_turns',
  'checkpoint.every',
  'checkpoint.keep',
)


def addresses(text: str) -> list[str]:
  """Parses `host:port,host:port`; empty holds none.

  Raises:
    ConfigError: a part is no address, or is there twice.
  """
  found: list[str] = []
  for part in text.split(',') if text else ():
    address = part.strip()
    match = _ADDRESS.fullmatch(address)
    if not match or not 0 < int(match['port']) < 65536:
      raise ConfigError(
        f'env.address={text!r}: {address!r} is not `host:port`; try '
        'localhost:7777, or [::1]:7777 for an IPv6 address.'
      )
    if address in found:
      raise ConfigError(
        f'env.address={text!r} names {address!r} twice; name each service once.'
      )
    found.append(address)
  return found


def token(name: str) -> str:
  """Reads the token in the first line of a file that holds one.

  Raises:
    ConfigError: the file cannot be read, holds no token, or is open to others.
      Never names what it holds.
  """
  try:
    with open(os.path.expanduser(name), encoding='ascii') as file:
      mode = os.fstat(file.fileno()).st_mode
      lines = file.read().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    why = error.strerror if isinstance(error, OSError) else 'not ASCII text'
    raise ConfigError(
      f'env.token_file={name!r} cannot be read ({why}).'
    ) from None
  if mode & 0o077:
    raise ConfigError(
      f'env.token_file={name!r} has mode {mode & 0o777:04o}, so others may use '
      f"the token; run 'chmod 600 {name}'."
    )
  lines = [line for line in map(str.strip, lines) if line and line[0] != '#']
  words = lines[0].split() if lines else []
  if len(words) not in (1, 2) or not words[-1].isprintable():
    raise ConfigError(
      f'env.token_file={name!r} must hold `TOKEN` or `NAME TOKEN` in its first '
      'line that is no comment.'
    )
  return words[-1]


def server_flags(text: str) -> list[str]:
  """Splits `env.server_flags` as a shell does.

  Raises:
    ConfigError: quotes do not match, or a flag is one that the run itself sets.
  """
  try:
    found = shlex.split(text)
  except ValueError as error:
    raise ConfigError(f'env.server_flags={text!r}: {error}.') from None
  for flag in found:
    if flag.partition('=')[0] in _OWN_FLAGS:
      raise ConfigError(
        f'env.server_flags={text!r}: {flag} is set by the run; it follows '
        'env.name, env.workers and env.step_timeout_s, on a loopback address. '
        'Start a service of your own and name it in env.address for another.'
      )
  return found


def _check_access(env_config: ml_collections.ConfigDict) -> None:
  """Where the services are, and what they are shown."""
  services = addresses(env_config.address)
  server_flags(env_config.server_flags)
  if env_config.token_file and not services:
    raise ConfigError(
      f'env.token_file={env_config.token_file!r} without env.address: the '
      'service that is started on this machine wants no token; leave it empty, '
      'or name a service.'
    )
  if env_config.token_file:
    token(env_config.token_file)
  files = tls_files(env_config)
  for key, name in files.items():
    if name and not (os.path.isfile(name) and os.access(name, os.R_OK)):
      raise ConfigError(
        f'env.{key}={name!r} cannot be read; name a file of PEM.'
      )
  if bool(env_config.tls_cert) != bool(env_config.tls_key):
    raise ConfigError(
      f'env.tls_cert={env_config.tls_cert!r} and '
      f'env.tls_key={env_config.tls_key!r} go together; give both or neither.'
    )
  _check_pem(files)
  if env_config.tls:
    if not services:
      raise ConfigError(
        'env.tls=True without env.address: the service that is started on this '
        'machine speaks plain text; set env.tls=False, or name a service.'
      )
    return
  shown = [key for key in (*files, 'token_file') if env_config[key]]
  for address in services:
    host = _ADDRESS.fullmatch(address)['host']
    if shown and not access.is_loopback(host):
      raise ConfigError(
        f'env.tls=False, but env.{shown[0]} is set and {address} is not on '
        'this machine: all would cross the network in plain text; set '
        f'env.tls=True, or leave env.{shown[0]} empty.'
      )


def tls_files(env_config: ml_collections.ConfigDict) -> dict[str, str]:
  """{key of `config.env`: the file it names}, for what TLS shows and trusts."""
  return {
    key: os.path.expanduser(env_config[key])
    for key in ('tls_ca', 'tls_cert', 'tls_key')
  }


def _check_pem(files: Mapping[str, str]) -> None:
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  try:
    if files['tls_ca']:
      context.load_verify_locations(files['tls_ca'])
  except ssl.SSLError as error:
    raise ConfigError(
      f'env.tls_ca={files["tls_ca"]!r} holds no certificate in PEM '
      f'({error.reason or error}).'
    ) from None
  try:
    if files['tls_cert']:
      # A key with a passphrase would ask for it on the terminal.
      context.load_cert_chain(
        files['tls_cert'], files['tls_key'], password=lambda: ''
      )
  except ssl.SSLError as error:
    raise ConfigError(
      f'env.tls_cert={files["tls_cert"]!r} and '
      f'env.tls_key={files["tls_key"]!r} must be a certificate and its key in '
      f'PEM, the key without a passphrase ({error.reason or error}).'
    ) from None


def _check_group(config: ml_collections.ConfigDict) -> None:
  size, method = config.train.group_size, config.advantage.name
  traits = advantages.traits(method, **config.advantage[method])
  if size < 2 and traits.group:
    raise ConfigError(
      f'train.group_size={size}, but advantage.name={method} compares the '
      'members of a group, which takes at least 2; try 8.'
    )
  episodes = config.train.tasks_per_step * size
  count = config.learner.minibatches
  if episodes % count:
    raise ConfigError(
      f'learner.minibatches={count} must divide the '
      f'{config.train.tasks_per_step} x {size} = {episodes} episodes of a '
      f'step; try {nearest_divisor(episodes, count)}.'
    )


def _check_optimizer(config: ml_collections.ConfigDict, name: str) -> None:
  for key, lowest, highest, wanted in (
    ('learning_rate', 0, math.inf, 'a finite number of at least 0'),
    ('warmup_steps', 0, math.inf, 'a finite number of at least 0'),
    ('weight_decay', 0, math.inf, 'a finite number of at least 0'),
    ('b1', 0, 1, 'at least 0 and below 1'),
    ('b2', 0, 1, 'at least 0 and below 1'),
  ):
    value = config[name][key]
    if not lowest <= value < highest:  # Turned round, NaN would pass.
      raise ConfigError(f'{name}.{key}={value} must be {wanted}.')
  if not config[name].max_grad_norm > 0:
    raise ConfigError(
      f'{name}.max_grad_norm={config[name].max_grad_norm} must be above 0; inf '
      'never clips.'
    )


def _check_method(config: ml_collections.ConfigDict) -> None:
  """What the method and the rest ask of each other."""
  name, train = config.advantage.name, config.train
  traits = advantages.traits(name, **config.advantage[name])
  loss = config.loss[config.loss.name]
  _known('train.outcome', train.outcome, ('binary', 'graded'))
  for key in ('success_return', 'score_max'):
    if not 0 < train[key] < math.inf:
      raise ConfigError(
        f'train.{key}={train[key]} must be above 0; try '
        f'{10.0 if key == "success_return" else 100.0}.'
      )
  if not -math.inf < train.score_floor < train.score_max:
    raise ConfigError(
      f'train.score_floor={train.score_floor} must be below train.score_max='
      f'{train.score_max}, the score of a full success; try 0.'
    )
  if not 0 < train.success_threshold < math.inf:
    raise ConfigError(
      f'train.success_threshold={train.success_threshold} must be above 0 '
      'score points; try 100.'
    )
  if train.max_refills < 0:
    raise ConfigError(
      f'train.max_refills={train.max_refills} must be at least 0; 0 plays no '
      'more tasks than train.tasks_per_step.'
    )
  selects = train.max_refills or train.drop_zero_groups
  asks = (traits.values or traits.entropy) and not traits.outcome
  if selects and (asks or not traits.group):
    key = 'max_refills' if train.max_refills else 'drop_zero_groups'
    raise ConfigError(
      f'train.{key}={train[key]} selects the groups that have something to '
      f'teach, which advantage.name={name!r} does not tell before the networks '
      f'are asked; set train.{key} to {type(train[key])(0)}, or take a method '
      'that compares a group, such as grpo.'
    )
  if loss.get('kl_in_reward') and not traits.token_rewards:
    able = [n for n in advantages.names() if advantages.traits(n).token_rewards]
    raise ConfigError(
      f'loss.{config.loss.name}.kl_in_reward=True, but advantage.name={name!r} '
      'reads no rewards of single tokens; keep the KL in the loss '
      f'(kl_in_reward=False), or take one of {", ".join(able)}.'
    )
  if traits.prompt and config.chat.prompt != traits.prompt:
    raise ConfigError(
      f'chat.prompt={config.chat.prompt!r} asks for other responses than '
      f'advantage.name={name!r} reads; set chat.prompt={traits.prompt}.'
    )
  horizons = config.env.horizons
  if not all(type(h) is int and h >= 1 for h in horizons):
    raise ConfigError(
      f'env.horizons={tuple(horizons)} must be turns, each at least 1; try '
      '(10, 20, 30), or () for env.max_turns throughout.'
    )
  if traits.values:
    for key, most in (('learning_rate', 1), ('clip', math.inf), ('scale', 1e6)):
      if not 0 < config.critic[key] <= most:
        raise ConfigError(
          f'critic.{key}={config.critic[key]} must be above 0 and at most '
          f'{most} for advantage.name={name!r}, which learns values.'
        )


def _check_lengths(config: ml_collections.ConfigDict) -> None:
  if config.chat.history < 0:
    raise ConfigError(
      f'chat.history={config.chat.history} must be at least 0 turns; try 2.'
    )
  context, response = config.chat.max_context, config.chat.max_response
  if response >= context:
    raise ConfigError(
      f'chat.max_response={response} must be below '
      f'chat.max_context={context}, which holds prompt and response; try '
      f'chat.max_response={max(context // 8, 1)}.'
    )
  if config.learner.row_len < context:
    raise ConfigError(
      f'learner.row_len={config.learner.row_len} is shorter than '
      f'chat.max_context={context}: the longest episode would fit no row; try '
      f'learner.row_len={context}.'
    )


def settings(section: ml_collections.ConfigDict) -> sampling.Settings:
  """How to sample, from `config.sampler` or `config.eval`."""
  return sampling.Settings(
    temperature=float(section.temperature),
    top_p=float(section.top_p),
    top_k=min(int(section.top_k), np.iinfo(np.int32).max),
    min_p=float(section.min_p),
  )


def _check_rollout(config: ml_collections.ConfigDict, num_devices: int) -> None:
  for name in ('sampler', 'eval'):
    try:
      settings(config[name]).check(f'{name}.')
    except ValueError as error:
      raise ConfigError(str(error)) from error
  if config.sampler.temperature == 0:
    raise ConfigError(
      f'sampler.temperature={config.sampler.temperature} must be above 0: '
      'greedy rollouts have no log-probabilities to learn from; try 1.0.'
    )
  rollout = config.rollout
  if not 0 <= rollout.deadline_s < math.inf:
    raise ConfigError(
      f'rollout.deadline_s={rollout.deadline_s} must be at least 0 seconds; 0 '
      'sets no deadline.'
    )
  for key in ('overlap', 'dump', 'deadline_s'):
    if rollout.replay and rollout[key]:
      raise ConfigError(
        f'rollout.replay={rollout.replay!r} plays nothing, so '
        f'rollout.{key}={rollout[key]!r} has no meaning; set one of them only.'
      )
  loss = config.loss[config.loss.name]
  if rollout.overlap and num_devices > 1:
    raise ConfigError(
      f'rollout.overlap=True on {num_devices} devices: sampling and learning '
      'would start programs on all of them in two orders, which can block both '
      'for good; it is for one device.'
    )
  if rollout.overlap and loss.get('sampler_cap') is None:
    raise ConfigError(
      'rollout.overlap=True learns from episodes that an older policy sampled; '
      f'correct for it by --config.loss.{config.loss.name}.sampler_cap=2.0 '
      '(or another cap of the importance weights).'
      if 'sampler_cap' in loss
      else f'rollout.overlap=True needs a loss that corrects for episodes of '
      f'an older policy, which loss.name={config.loss.name!r} does not; try '
      'loss.name=ppo_clip.'
    )


def _check_devices(config: ml_collections.ConfigDict, num_devices: int) -> None:
  if jax.process_count() > 1:
    raise ConfigError(
      f'{jax.process_count()} jax processes: training over several hosts is '
      'not supported yet; start one process on one host.'
    )
  mesh = config.mesh
  sizes = {'data': mesh.data, 'fsdp': mesh.fsdp, 'tensor': mesh.tensor}
  free = [name for name, size in sizes.items() if size == -1]
  fixed = 1
  for size in sizes.values():
    fixed *= size if size != -1 else 1
  shown = ', '.join(f'mesh.{k}={v}' for k, v in sizes.items())
  if len(free) > 1 or fixed < 1 or num_devices % fixed:
    raise ConfigError(
      f'{shown} does not divide {num_devices} device(s); at most one may be '
      f'-1 (all that remain); try mesh.data=1, mesh.fsdp={num_devices}, '
      'mesh.tensor=1.'
    )
  if not free and fixed != num_devices:
    raise ConfigError(
      f'{shown} is {fixed} device(s), but there are {num_devices}; try '
      f'mesh.fsdp={num_devices // (fixed // mesh.fsdp) or 1}, or -1.'
    )
  tensor = num_devices // fixed if mesh.tensor == -1 else mesh.tensor
  rows = num_devices // tensor
  if config.learner.micro_rows % rows:
    raise ConfigError(
      f'learner.micro_rows={config.learner.micro_rows} rows do not divide over '
      f'the {rows} devices of data x fsdp ({shown}); try {rows}.'
    )


def nearest_divisor(number: int, wanted: int) -> int:
  """The divisor of `number` nearest to `wanted`."""
  divisors = [d for d in range(1, number + 1) if number % d == 0]
  return min(divisors, key=lambda d: (abs(d - wanted), d))


def check_workdir(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Raises ConfigError if `workdir` holds another run, or no run at all."""
  path = workdir / 'config.json'
  if workdir.exists() and not workdir.is_dir():
    raise ConfigError(f'--workdir={workdir} is a file; name a folder.')
  if not path.exists():
    foreign = workdir.exists() and {p.name for p in workdir.iterdir()}
    if foreign and not foreign <= {'config.json.part', _LOCK}:
      raise ConfigError(
        f'{workdir} is not empty and holds no run (no config.json); choose '
        'another --workdir.'
      )
    return
  if not _has_results(workdir):
    return  # Whatever was tried there ended before it played anything.
  # Of keys that an older version did not know it had the defaults. Imported
  # here: experiments import this package.
  from configs import base

  ours = _flatten(json.loads(config.to_json()))
  defaults = _flatten(json.loads(base.get_config().to_json()))
  # A key that ours does not have either, such as a style left out, has none.
  theirs = {key: defaults[key] for key in defaults.keys() & ours.keys()}
  theirs |= _flatten(read(path))
  differing = [
    f'{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now'
    for key in sorted(theirs.keys() | ours.keys())
    if theirs.get(key) != ours.get(key) and key not in _FREE
  ]
  if differing:
    raise ConfigError(
      f'{workdir} holds a run with another configuration '
      f'({"; ".join(differing[:5])}). Choose another --workdir, or start with '
      f'the configuration of {path} to resume it.'
    )


def _has_results(workdir: pathlib.Path) -> bool:
  checkpoints = workdir / 'checkpoints'
  return (workdir / 'eval_before.json').exists() or (
    checkpoints.exists() and any(checkpoints.iterdir())
  )


def slots_of(workdir: pathlib.Path) -> int | None:
  """The `sampler.slots` of the run in `workdir`, if there is one.

  How many rows are decoded together shows in the last bit, so a run that goes
  on keeps its number whatever workers and memory there are now.
  """
  path = workdir / 'config.json'
  if not path.exists() or not _has_results(workdir):
    return None
  return read(path).get('sampler', {}).get('slots')


def check_dump(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Raises ConfigError if `folder` cannot take the dump of this run.

  Makes the folder.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f'rollout.dump={str(folder)!r} cannot be made ({error.strerror}); name '
      'a folder that can be written to.'
    ) from error
  if not os.access(folder, os.W_OK):
    raise ConfigError(
      f'rollout.dump={str(folder)!r} cannot be written to; name another folder.'
    )
  if any(folder.iterdir()) and not _has_results(workdir):
    raise ConfigError(
      f'rollout.dump={str(folder)!r} is not empty, and a dump holds one run; '
      'name another folder, or empty it.'
    )


def read(path: pathlib.Path) -> dict[str, Any]:
  """The configuration that a run keeps in its workdir.

  Raises:
    ConfigError: the file is damaged.
  """
  try:
    content = json.loads(path.read_text())
  except ValueError as error:
    raise ConfigError(f'{path} is damaged ({error}).') from error
  if not isinstance(content, dict) or 'train' not in content:
    raise ConfigError(f'{path} is damaged: it holds no configuration.')
  return content


def claim(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> BinaryIO:
  """Makes `workdir` the folder of this run, if it is not already.

  Returns:
    A lock, held until it is closed or this process ends, however it ends.

  Raises:
    ConfigError: see `check_workdir`; or another process trains there.
  """
  check_workdir(workdir, config)
  workdir.mkdir(parents=True, exist_ok=True)
  lock = (workdir / _LOCK).open('wb')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.close()
    raise ConfigError(
      f'another process is training in {workdir}; wait for it, stop it, or '
      'choose another --workdir.'
    ) from error
  # Renamed into place: a kill here must not leave half a config behind.
  part = workdir / 'config.json.part'
  part.write_text(config.to_json(indent=1, sort_keys=True) + '\n')
  part.rename(workdir / 'config.json')
  return lock


def options(text: str) -> tuple[tuple[str, str], ...]:
  """Parses `key=value;key=value` into sorted pairs."""
  pairs = []
  for part in filter(None, text.split(';')):
    key, sign, value = part.partition('=')
    if not sign or not key.strip():
      raise ConfigError(
        f'env.options={text!r}: {part!r} is not `key=value`; separate several '
        'with `;`.'
      )
    pairs.append((key.strip(), value.strip()))
  return tuple(sorted(pairs))


def has_key(config: ml_collections.ConfigDict, key: str) -> bool:
  flat = _flatten(json.loads(config.to_json()))
  return any(k == key or k.startswith(f'{key}.') for k in flat)


def unknown_key(key: str, config: ml_collections.ConfigDict) -> str:
  """The sentence for a key that `config` does not have."""
  known = list(_flatten(json.loads(config.to_json())))
  near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
  last = [k for k in known if k.rsplit('.', 1)[-1] == key.rsplit('.', 1)[-1]]
  return (
    f'config.{key} is unknown; the nearest is '
    f'config.{(last or near)[0]}. configs/base.py lists every key.'
  )


def _known(key: str, value: str, known: Sequence[str]) -> None:
  if value not in known:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f' Did you mean {near[0]!r}?' if near else ''
    raise ConfigError(
      f'{key}={value!r} is unknown; known: {", ".join(known)}.{hint}'
    )


def _get(config: ml_collections.ConfigDict, key: str):
  for part in key.split('.'):
    config = config[part]
  return config


def _flatten(tree: Mapping, prefix: str = '') -> dict:
  flat = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    if isinstance(value, Mapping):
      flat |= _flatten(value, f'{name}.')
    else:
      flat[name] = value
  return flat
