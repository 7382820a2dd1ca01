r"""Writes a folder that transformers loads, from a run or another checkpoint.

  python launch/convert.py export --workdir=runs/sciworld --output=out
  python launch/convert.py export --checkpoint=Qwen/Qwen2.5-1.5B-Instruct \
    --output=out --dtype=float32

With --workdir: the weights of a training checkpoint of that run, with the
configuration, tokenizer, chat template and file layout of the checkpoint that
the run started from. With --checkpoint: what is in a local folder or on the
Hugging Face hub, in another type or in files of another size; as neither is
given, byte for byte.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import flags

from planpo_jax import cli

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a training run.')
_STEP = flags.DEFINE_integer(
  'step', None, 'Step of the run; default: its newest checkpoint.'
)
_CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'Checkpoint folder or hub name, instead of a run.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder to write.')
_DTYPE = flags.DEFINE_string(
  'dtype',
  None,
  'bfloat16, float16 or float32; default: as in the checkpoint that the run '
  'started from, or bfloat16.',
)
_MAX_SHARD_GB = flags.DEFINE_float(
  'max-shard-gb',
  None,
  'Larger weights are split into files of up to 1e9 times this many bytes; '
  'default: the files of that checkpoint, or 5.',
)


def _from_run(output, save):
  """Exports a training checkpoint; returns what to say of it."""
  import pathlib

  import jax
  import ml_collections

  from planpo_jax import build, checkpoint, weights
  from planpo_jax import config as config_lib
  from planpo_jax.models import qwen2

  workdir = pathlib.Path(_WORKDIR.value).expanduser().absolute()
  path = workdir / 'config.json'
  if not path.is_file():
    raise FileNotFoundError(
      f'{workdir} holds no run: there is no config.json. Give the folder that '
      'launch/train.py was given as --workdir.'
    )
  config = ml_collections.ConfigDict(config_lib.read(path))
  folder = workdir / 'checkpoints'
  found = build.network(config, checkpoint.stacked_layers(folder))
  # Another tokenizer than the checkpoint's comes with its own end ids.
  own = found.folder is None or bool(config.model.tokenizer)
  text = {
    'tokenizer_files': found.tokenizer.files if own else (),
    'eos_ids': found.tokenizer.stop_ids if own else (),
  }
  weights.check_target(output, text['tokenizer_files'], found.folder)
  steps = []
  if folder.is_dir():
    checkpoints = checkpoint.Checkpoints(folder, keep=None)
    steps = checkpoints.steps()
  if not steps:
    raise FileNotFoundError(
      f'{workdir} holds no checkpoint yet; let the run go on to its first '
      f'one, after {config.checkpoint.every} steps.'
    )
  step = steps[-1] if _STEP.value is None else _STEP.value
  if step not in steps:
    raise ValueError(
      f'--step={step}: the run holds no checkpoint of that step; it holds '
      f'{", ".join(map(str, steps))}.'
    )
  policy = found.policy
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
    qwen2.abstract_params(policy),
  )
  params = checkpoints.restore_params(step, like)
  checkpoints.close()
  files = save(policy, params, like=found.folder, **text)
  return files, f'step {step} of {workdir}'


def _from_checkpoint(output, save):
  """Exports another checkpoint; returns what to say of it."""
  import dataclasses

  from planpo_jax import weights
  from planpo_jax.models import qwen2

  folder = weights.resolve(_CHECKPOINT.value)
  config = weights.read_config(folder)
  weights.check_target(output, (), folder)
  # Wide enough for every bit.
  dtype = weights.stored_dtype(folder)
  policy = qwen2.create(
    dataclasses.replace(config, param_dtype=dtype), config.vocab_size
  )
  params = weights.load(folder, policy, param_dtype=dtype)
  return save(policy, params, like=folder), _CHECKPOINT.value


def main() -> int:
  if bool(_WORKDIR.value) == bool(_CHECKPOINT.value):
    raise ValueError(
      'give either --workdir=DIR of a run or --checkpoint=FOLDER_OR_HUB_NAME.'
    )
  if not _OUTPUT.value:
    raise ValueError('--output is missing; try --output=export.')
  if _STEP.value is not None and not _WORKDIR.value:
    raise ValueError('--step is of a run; leave it out with --checkpoint.')
  import functools
  import pathlib

  import jax

  from planpo_jax import weights

  # Nothing is computed, and the host may hold what no single device does.
  jax.config.update('jax_platforms', 'cpu')

  if _DTYPE.value is not None and _DTYPE.value not in weights.DTYPES:
    raise ValueError(
      f'--dtype={_DTYPE.value} must be one of {", ".join(weights.DTYPES)}.'
    )
  size = _MAX_SHARD_GB.value
  if size is not None and not size > 0:
    raise ValueError(f'--max-shard-gb={size} must be above 0; try 5.')
  output = pathlib.Path(_OUTPUT.value).expanduser().absolute()
  save = functools.partial(
    weights.save,
    output,
    dtype=_DTYPE.value,
    max_shard_bytes=size and size * 1e9,
  )
  export = _from_run if _WORKDIR.value else _from_checkpoint
  files, what = export(output, save)
  print(f'wrote {what} to {output}:')
  for path in files:
    print(f'  {path.name}  {path.stat().st_size:,} bytes')
  return 0


if __name__ == '__main__':
  cli.run(main, commands=('export',))
