"""Counts what XLA compiles in this process."""

from __future__ import annotations

import dataclasses

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
_READ = '/jax/compilation_cache/cache_hits'


@dataclasses.dataclass
class Compilations:
  """Totals of this process since `watch` was first called.

  Attributes:
    programs: compiled, or read from the persistent cache instead.
    read: of these, read from the persistent cache.
    seconds: spent on both.
  """

  programs: int = 0
  read: int = 0
  seconds: float = 0.0

  def __str__(self) -> str:
    return (
      f'{self.programs} programs were compiled in {self.seconds:.0f} s, '
      f'{self.read} of them read from the persistent cache'
    )

  def scalars(self) -> dict[str, float]:
    return {
      'compile/programs': float(self.programs),
      'compile/read_from_cache': float(self.read),
      'compile/seconds': self.seconds,
    }


_total: Compilations | None = None


def watch() -> Compilations:
  """The totals; they grow by themselves."""
  global _total
  if _total is None:
    _total = Compilations()
    jax.monitoring.register_event_duration_secs_listener(_add)
    jax.monitoring.register_event_listener(_add_read)
  return _total


def _add(event: str, seconds: float, **unused) -> None:
  if event == _COMPILED:
    _total.programs += 1
    _total.seconds += seconds


def _add_read(event: str, **unused) -> None:
  if event == _READ:
    _total.read += 1
