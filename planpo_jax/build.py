"""From a configuration to the objects a run works with."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import jax
import ml_collections
import numpy as np

from planpo_jax import (
  chat,
  env_client,
  env_service,
  episodes,
  metrics,
  rollout,
  sampler,
  sampling,
  sharding,
  weights,
)
from planpo_jax import config as config_lib
from planpo_jax import tokenizer as tokenizer_lib
from planpo_jax.models import qwen2
from planpo_jax.prompts import actions

T = TypeVar('T')

# A service that is there answers at once; who mistyped waits no longer.
_CONNECT_TIMEOUT_S = 15.0
# Seconds that a client waits for a step beyond the time that it may take. The
# service sees first that its environment hangs, replaces it and says so, and
# whoever gives up before that leaves a worker behind that nobody has judged.
_STEP_MARGIN_S = 5.0
# Seconds to wait for a service of somebody else's, once none is up. One of our
# own is certain to be started again.
_AWAY_DEADLINE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Model:
  """A policy network with its weights and its tokenizer.

  Attributes:
    policy: graph definition and shapes.
    params: the weights the run starts from, on the mesh.
    tokenizer: text <-> ids.
  """

  policy: qwen2.Policy
  params: qwen2.Params
  tokenizer: tokenizer_lib.Tokenizer


@dataclasses.dataclass(frozen=True)
class Network:
  """What a configuration says of the model, before any weight is read.

  Attributes:
    policy: graph definition and shapes.
    tokenizer: text <-> ids.
    folder: of the checkpoint; None if there is none.
  """

  policy: qwen2.Policy
  tokenizer: tokenizer_lib.Tokenizer
  folder: pathlib.Path | None


def network(
  config: ml_collections.ConfigDict, stacked: bool | None = None
) -> Network:
  """Finds `model.checkpoint`, or takes the shape `model.size`.

  Args:
    config: the whole configuration.
    stacked: layers are stacked or not; None for what suits the platform.

  Raises:
    config_lib.ConfigError: a type is unknown; the tokenizer has more ids than
      the model has rows; contexts are longer than the model allows.
    FileNotFoundError, ValueError: the checkpoint or tokenizer is missing or
      damaged, or the hub does not give it.
  """
  for key in ('dtype', 'param_dtype'):
    if config.model[key] not in qwen2.DTYPES:
      raise config_lib.ConfigError(
        f'model.{key}={config.model[key]!r} must be one of '
        f'{", ".join(qwen2.DTYPES)}.'
      )
  folder, name = None, config.model.tokenizer
  if config.model.checkpoint:
    folder = weights.resolve(config.model.checkpoint)
    shape = weights.read_config(folder)
    name = name or str(folder)
  else:
    shape = qwen2.SIZES[config.model.size]
  if config.chat.max_context > shape.max_positions:
    raise config_lib.ConfigError(
      f'chat.max_context={config.chat.max_context} must not exceed the '
      f'{shape.max_positions} positions that the model allows; try '
      f'--config.chat.max_context={shape.max_positions}.'
    )
  shape = dataclasses.replace(
    shape,
    dtype=config.model.dtype,
    param_dtype=config.model.param_dtype,
    remat=config.model.remat,
  )
  shape = qwen2.for_platform(shape, jax.default_backend())
  if stacked is not None:
    shape = dataclasses.replace(shape, scan_layers=stacked)
  if not name:
    raise config_lib.ConfigError(
      'model.tokenizer is empty and there is no model.checkpoint to take it '
      'from; try model.tokenizer=nano.'
    )
  tokenizer = tokenizer_lib.load(name)
  if tokenizer.num_tokens > shape.vocab_size:
    raise config_lib.ConfigError(
      f'the tokenizer {name!r} has {tokenizer.num_tokens} ids but the model '
      f'only {shape.vocab_size} embedding rows; use the tokenizer of the '
      'checkpoint.'
    )
  return Network(qwen2.create(shape, tokenizer.num_tokens), tokenizer, folder)


def model(
  config: ml_collections.ConfigDict, found: Network, mesh: jax.sharding.Mesh
) -> Model:
  """Reads the weights of `found`, or draws them from the seed.

  Raises:
    FileNotFoundError, ValueError: the checkpoint is damaged.
  """
  policy = found.policy
  shardings = sharding.param_shardings(mesh, qwen2.abstract_params(policy))
  if found.folder:
    params = weights.load(
      found.folder,
      policy,
      param_dtype=config.model.param_dtype,
      shardings=shardings,
    )
  else:
    key = jax.random.key(config.seed)
    init = jax.jit(
      lambda key: qwen2.init_params(policy, key), out_shardings=shardings
    )
    params = init(key)
  return Model(policy, params, found.tokenizer)


class Environment:
  """The environments of a run: a local service if need be, and its client.

  A context manager. Coroutines that use the client run by `run`.
  """

  def __init__(self, config: ml_collections.ConfigDict):
    self._config = config.env
    self._service: env_service.LocalService | None = None
    self._options = config_lib.options(config.env.options)

  def __enter__(self) -> Environment:
    addresses = self._config.address
    away_s = _AWAY_DEADLINE_S
    self._runner = asyncio.Runner()
    try:
      if not addresses:
        self._service = env_service.LocalService(
          self._config.name,
          self._config.workers,
          options=(
            f'--step-deadline-s={self._config.step_timeout_s}',
            *config_lib.server_flags(self._config.server_flags),
          ),
        )
        try:
          self._service.start()
        except RuntimeError as error:  # Such as: there is no Java.
          raise config_lib.ConfigError(str(error)) from error
        addresses, away_s = self._service.address, env_service.RECOVERY_S
      self.client = env_client.EnvClient(
        addresses,
        credentials=_credentials(self._config),
        step_deadline_s=self._config.step_timeout_s + _STEP_MARGIN_S,
        away_deadline_s=away_s,
      )
      self.run(self.client.connect(_CONNECT_TIMEOUT_S))
      self.description = self.run(self.client.describe())
      self._check(addresses)
    except BaseException:
      self.__exit__()
      raise
    return self

  def _check(self, addresses: str) -> None:
    found = self.description
    if found.name != self._config.name:
      raise config_lib.ConfigError(
        f'env.name={self._config.name!r}, but the service at {addresses} '
        f'serves {found.name!r}; set env.name to that, or env.address to '
        'another service.'
      )
    # 0: a service that tells of no limit has none.
    if 0 < found.max_action_bytes < actions.MAX_BYTES:
      raise config_lib.ConfigError(
        f'the service at {addresses} takes actions of '
        f'{found.max_action_bytes} bytes, and a policy may write '
        f'{actions.MAX_BYTES}; start it with --max-action-bytes='
        f'{actions.MAX_BYTES} or more.'
      )

  def __exit__(self, *unused) -> None:
    if hasattr(self, 'client'):
      self.run(self.client.close())
    self._runner.close()
    if self._service is not None:
      self._service.stop()

  def run(self, work: Awaitable[T]) -> T:
    return self._runner.run(work)

  def tasks(self, split: str) -> list[episodes.Task]:
    """Tasks of `split` that the configuration asks for.

    Raises:
      ValueError: unknown split or task type; the known ones are listed.
    """
    found = self.run(
      self.client.list_tasks(split, tuple(self._config.task_types))
    )
    return [dataclasses.replace(t, options=self._options) for t in found]


def _credentials(env: ml_collections.ConfigDict) -> env_client.Credentials:
  """What `config.env` says that a client shows.

  Raises:
    config_lib.ConfigError: the file with the token is no use.
  """
  files = config_lib.tls_files(env)
  return env_client.Credentials(
    tls=env.tls,
    ca=files['tls_ca'],
    cert=files['tls_cert'],
    key=files['tls_key'],
    token=config_lib.token(env.token_file) if env.token_file else '',
  )


def mesh(
  config: ml_collections.ConfigDict, found: Network
) -> jax.sharding.Mesh:
  """The mesh of the configuration; the axis given as -1 takes what remains.

  Raises:
    config_lib.ConfigError: the heads of the model do not divide over it.
  """
  sizes = dict(config.mesh)
  fixed = math.prod(size for size in sizes.values() if size != -1)
  made = sharding.make_mesh(
    **{
      name: jax.device_count() // fixed if size == -1 else size
      for name, size in sizes.items()
    }
  )
  try:
    sharding.check_heads(made, found.policy.config.num_heads)
  except ValueError as error:
    raise config_lib.ConfigError(str(error)) from error
  return made


def chat_format(
  config: ml_collections.ConfigDict,
  tokenizer: tokenizer_lib.Tokenizer,
  description: env_client.Description,
) -> chat.Format:
  return chat.Format(
    tokenizer=tokenizer,
    context=config.chat.context,
    prompt=config.chat.prompt,
    action_format=description.action_format,
    history=config.chat.history,
    max_context=config.chat.max_context,
    max_response=config.chat.max_response,
    admissible=config.chat.admissible,
  )


class Player:
  """Plays jobs with the weights given and tells how far it is."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    made: Model,
    on_mesh: jax.sharding.Mesh,
    env: Environment,
    terminal: metrics.Terminal,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Allocates the cache; `sampler.slots` is set, see `capacity.slots`."""
    self._env = env
    self._terminal = terminal
    self._should_stop = should_stop
    self._lengths = rollout.Lengths()
    self._compiled = False
    workers = env.description.workers
    if workers < config.sampler.slots:
      terminal.say(
        f'warning: sampler.slots={config.sampler.slots}, but the service has '
        f'{workers} workers, so the other slots stay empty; give it more ('
        + ('its --workers)' if config.env.address else 'env.workers)')
      )
    self.format = chat_format(config, made.tokenizer, env.description)
    self._sampler = sampler.Sampler(
      made.policy,
      made.params,
      slots=config.sampler.slots,
      cache_len=config.chat.max_context,
      max_new_tokens=config.chat.max_response,
      settings=config_lib.settings(config.sampler),
      stop_ids=made.tokenizer.stop_ids,
      mesh=on_mesh,
    )

  def set_params(self, params: qwen2.Params, *, copy: bool = False) -> None:
    """See `sampler.Sampler.set_params`."""
    self._sampler.set_params(params, copy=copy)

  def play(
    self,
    label: str,
    jobs: Sequence[rollout.Job],
    *,
    seed: tuple[int, ...],
    max_turns: int,
    settings: sampling.Settings,
    deadline_s: float = 0.0,
    prefaces: Sequence[str] = (),
  ) -> rollout.Collected:
    """Plays `jobs`; see `rollout.collect`."""
    if deadline_s and not self._compiled:
      self._sampler.compile()  # Not in the time of the first episodes.
      self._compiled = True
    self._sampler.settings = settings
    start = time.perf_counter()
    before = self._sampler.counters.decoded_tokens

    def tell(done: int, turns: int) -> None:
      spent = time.perf_counter() - start
      rate = (self._sampler.counters.decoded_tokens - before) / spent
      text = f'{label}: {done}/{len(jobs)} episodes, {turns} turns'
      if done:
        left = metrics.duration(spent / done * (len(jobs) - done))
        text += f', {rate:.0f} tokens/s, {left} left'
      self._terminal.progress(text)

    client = self._env.client
    self._env.run(client.refresh())
    collected = self._env.run(
      rollout.collect(
        client,
        self._sampler,
        self.format,
        jobs,
        seed=seed,
        max_turns=max_turns,
        prefaces=prefaces,
        sessions=client.workers,
        deadline_s=deadline_s,
        expected=self._lengths.expected,
        on_progress=tell,
        should_stop=self._should_stop,
      )
    )
    self._lengths.observe(collected.episodes)
    return collected

  def write(
    self,
    label: str,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[np.ndarray],
    *,
    settings: sampling.Settings,
  ) -> list[str]:
    """Writes on after each of `prompts`, without an environment.

    Args:
      label: of the progress that is shown.
      prompts: ids; each leaves room for a response in `chat.max_context`.
      keys: raw random key [2] uint32 of each.
      settings: of sampling.

    Returns:
      The texts, each of `chat.max_response` tokens at most.
    """
    self._sampler.settings = settings
    texts = [''] * len(prompts)
    waiting = collections.deque(range(len(prompts)))
    writing: dict[int, int] = {}
    while waiting or writing:
      for slot in self._sampler.free[: len(waiting)]:
        writing[slot] = i = waiting.popleft()
        # As with episodes, nothing depends on who had the slot before.
        self._sampler.reset(slot)
        self._sampler.submit(slot, prompts[i], keys[i])
      for response in self._sampler.decode():
        i = writing.pop(response.slot)
        texts[i] = self.format.tokenizer.decode(response.ids)
      left = len(waiting) + len(writing)
      self._terminal.progress(
        f'{label}: {len(prompts) - left}/{len(prompts)} texts'
      )
    return texts
