"""Checkpoints of a run: save, restore, and what to do when asked to stop."""

from __future__ import annotations

import pathlib
import signal
import sys
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar('State')


class CheckpointError(ValueError):
  """A checkpoint is there and cannot be used."""


class Checkpoints:
  """The newest training states of a run, each in a folder named by its step.

  A state is whole on disk before an older one goes, and `save` returns only
  then, so a kill at any moment leaves one to resume from.
  """

  def __init__(self, folder: pathlib.Path, keep: int | None):
    self._folder = folder
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      # Without it the tree of a checkpoint is known only after a save.
      item_handlers=ocp.StandardCheckpointHandler(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=True,
      ),
    )

  def latest_step(self) -> int | None:
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: State) -> None:
    """Writes `state` as step `step`, unless that step is there already."""
    if self._manager.latest_step() == step:
      return
    self._manager.save(step, args=ocp.args.StandardSave(state))
    self._manager.wait_until_finished()

  def restore(self, like: State) -> State:
    """The newest state, with the tree, types and shardings of `like`.

    Raises:
      CheckpointError: the newest checkpoint is damaged or of another shape.
    """
    step = self._manager.latest_step()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      return self._manager.restore(
        step, args=ocp.args.StandardRestore(abstract)
      )
    except Exception as error:
      raise self._unreadable(step, error) from error

  def _unreadable(self, step: int, error: Exception) -> CheckpointError:
    # orbax and tensorstore raise many types for a damaged file.
    reason = str(error).strip().splitlines()
    return CheckpointError(
      f'the checkpoint {self._folder / str(step)} cannot be read '
      f'({type(error).__name__}: {reason[0] if reason else "no message"}). '
      'Remove that folder to go on from the step before it, or choose '
      'another --workdir.'
    )

  def param_names(self, step: int) -> frozenset[str]:
    """Paths of the params of a step, such as `blocks/00/attention/w_q_NHD`.

    Raises:
      CheckpointError: as for `restore_params`.
    """
    try:
      params = self._manager.item_metadata(step).tree['params']
      paths = jax.tree_util.tree_flatten_with_path(params)[0]
      return frozenset('/'.join(key.key for key in path) for path, _ in paths)
    except Exception as error:
      raise self._unreadable(step, error) from error

  def restore_params(self, step: int, like: Any) -> Any:
    """The params of a step without the state of the optimizer.

    Args:
      step: one of `steps`.
      like: arrays, or their shapes with shardings, in the tree of the params.

    Raises:
      CheckpointError: the checkpoint is damaged or of another shape.
    """
    item = {'params': jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    try:
      return ocp.PyTreeCheckpointer().restore(
        self._item(step),
        ocp.args.PyTreeRestore(
          item,
          restore_args=ocp.checkpoint_utils.construct_restore_args(item),
          partial_restore=True,
        ),
      )['params']
    except Exception as error:
      raise self._unreadable(step, error) from error

  def _item(self, step: int) -> pathlib.Path:
    return self._folder.absolute() / str(step) / 'default'

  def close(self) -> None:
    self._manager.close()


def stacked_layers(folder: pathlib.Path) -> bool | None:
  """Whether the newest checkpoint in `folder` holds layers stacked.

  A run keeps the form it began with, wherever it goes on; None if there is no
  checkpoint yet.

  Raises:
    CheckpointError: the checkpoint is damaged.
  """
  if not folder.is_dir():
    return None
  checkpoints = Checkpoints(folder, keep=None)
  step = checkpoints.latest_step()
  names = None if step is None else checkpoints.param_names(step)
  checkpoints.close()
  return None if names is None else 'blocks/attention_norm_D' in names


class StopSignal:
  """Remembers Ctrl-C and SIGTERM, so that the run can save before it ends.

  Attributes:
    number: the signal that came first, or None.
  """

  def __init__(self):
    self.number: int | None = None
    self._nothing_to_save = True
    self._previous: dict[int, object] = {}

  def __enter__(self) -> StopSignal:
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._remember)
    return self

  def save_first(self) -> None:
    """From here on a signal waits for the state to be saved.

    Until then it interrupts at once whatever is being waited for.
    """
    self._nothing_to_save = False

  def __exit__(self, *unused) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _remember(self, number: int, unused_frame) -> None:
    if self._nothing_to_save:
      raise SystemExit(128 + number)
    # A second signal changes nothing: the save under way is short, and an
    # operator who cannot wait has kill -9, which loses no saved step.
    if self.number is None:
      self.number = number
      print(
        f'\n{signal.Signals(number).name}: stopping as soon as the state can '
        'be saved',
        file=sys.stderr,
        flush=True,
      )

  def requested(self) -> bool:
    return self.number is not None
