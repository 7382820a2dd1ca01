"""How the entry points read flags and report a user's mistake."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

import jax
from absl import flags
from ml_collections import config_flags

from planpo_jax import config as config_lib

# Without this gRPC tells of every reconnection on stderr.
os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')

# Exit code for what the user can mend: flags, configuration, files, addresses.
MISTAKE = 2

_config_required = False

_OVERRIDE = re.compile(r'--?config\.([\w.]+)')


def define_config(*, required: bool = True) -> flags.FlagHolder:
  """Defines --config; `run` refuses to go on without one if it is required."""
  global _config_required
  _config_required = required
  return config_flags.DEFINE_config_file(
    'config',
    None,
    'Configuration file, e.g. configs/quickstart.py or '
    'configs/quickstart.py:smoke; --config.KEY=VALUE overrides a key.',
    lock_config=True,
  )


def run(
  main: Callable[[], int | None], *, commands: Sequence[str] = ()
) -> None:
  """Parses the flags, runs `main` and exits with its code.

  With `commands` the first argument must be one of them. --help prints what
  the entry point's docstring and its flags say, and ends with code 0.

  Mistakes of the user end with one sentence and code 2. Whatever else goes
  wrong keeps its traceback; PLANPO_TRACEBACK=1 keeps it for mistakes too.
  """
  logging.basicConfig(
    level=logging.WARNING, format='%(levelname)s %(name)s: %(message)s'
  )
  if {'--help', '-help', '-h'} & set(sys.argv[1:]):
    print(_help())
    sys.exit(0)
  try:
    rest = flags.FLAGS(sys.argv)
    # An entry point need not define it.
    config = flags.FLAGS['config'].value if 'config' in flags.FLAGS else None
    if config is not None:
      # A file that is missing shows only when the value is used.
      _ = config.is_locked
    elif _config_required:
      raise config_lib.ConfigError(
        '--config is missing; name a file, e.g. --config=configs/quickstart.py.'
      )
  except (flags.Error, KeyError, AttributeError, ValueError, OSError) as error:
    _fail(error, _flag_mistake(error))
  keep_compilations()
  try:
    if commands and (not rest[1:] or rest.pop(1) not in commands):
      raise config_lib.ConfigError(
        f'the first argument must be a command: {", ".join(commands)}.'
      )
    if rest[1:]:
      raise config_lib.ConfigError(
        f'{rest[1]!r} is not a flag; flags start with --.'
      )
    code = main()
  except (ValueError, TypeError, OSError) as error:
    if not _is_mistake(error):
      raise
    _fail(error, str(error))
  sys.exit(code)


def _help() -> str:
  """The docstring of the entry point and its flags.

  absl's own help ends with code 1 and has the flags of one module alone.
  """
  defined = flags.FLAGS.flags_by_module_dict()
  # absl knows the entry point's module as the script's path.
  own = [*defined.get(__name__, ()), *defined.get(sys.argv[0], ())]
  lines = [sys.modules['__main__'].__doc__.strip(), '', 'Flags:']
  for flag in own:
    lines.append(f'  --{flag.name}')
    lines.append(textwrap.indent(textwrap.fill(flag.help, 74), '      '))
  if 'config' in flags.FLAGS:
    lines += ['', 'configs/base.py lists the keys of --config.']
  return '\n'.join(lines)


def _is_mistake(error: Exception) -> bool:
  """Whether it was raised by this project's own checks, not inside a library.

  A ValueError of jax in mid-training is a bug, and needs its traceback.
  """
  if isinstance(error, OSError):
    return True
  frame = error.__traceback__
  while frame.tb_next:
    frame = frame.tb_next
  module = frame.tb_frame.f_globals.get('__name__', '')
  return module == '__main__' or module.startswith('planpo_jax')


def keep_compilations() -> None:
  """A second start reads what the first one compiled."""
  if not jax.config.jax_compilation_cache_dir:
    folder = pathlib.Path.home() / '.cache' / 'planpo_jax'
    jax.config.update('jax_compilation_cache_dir', str(folder))
    # There are many short ones before the first token.
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def _flag_mistake(error: Exception) -> str:
  """The sentence for flags that could not be parsed."""
  chosen = [a for a in sys.argv if a.startswith(('--config=', '-config='))]
  if isinstance(error, KeyError | AttributeError) and chosen:
    try:
      config = _load(chosen[-1].split('=', 1)[1])
    except Exception as own:  # Whatever a user's file may raise.
      return f'{chosen[-1]}: {" ".join(str(own.args[0]).split())}'
    for match in filter(None, map(_OVERRIDE.match, sys.argv)):
      if not config_lib.has_key(config, match.group(1)):
        return config_lib.unknown_key(match.group(1), config)
  text = str(error)
  if 'Traceback' in text:  # Of the configuration file's own error.
    text = text.strip().splitlines()[-1].partition(': ')[2]
  text = ' '.join(text.split())
  if isinstance(error, OSError) and chosen:
    return f'{chosen[-1]} cannot be loaded: {text}'
  return text


def _load(name: str):
  path, _, variant = name.partition(':')
  space: dict = {}
  with open(path) as f:
    exec(compile(f.read(), path, 'exec'), space)  # As config_flags does.
  return space['get_config'](*filter(None, [variant]))


def _fail(error: Exception, sentence: str) -> None:
  if os.environ.get('PLANPO_TRACEBACK'):
    raise error
  print(f'error: {sentence}', file=sys.stderr)
  sys.exit(MISTAKE)
