"""Finds the methods of a package by its files and binds hyperparameters.

A method is a module that defines the entry function of its package, such as
`estimate` in `advantages`. Its hyperparameters are the keyword arguments of
that function that have a default.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any


def find(package: str, entry: str) -> dict[str, Callable[..., Any]]:
  """Returns the entry function of every method in a package, sorted by name."""
  path = importlib.import_module(package).__path__
  found = {}
  for name in sorted(info.name for info in pkgutil.iter_modules(path)):
    module = importlib.import_module(f'{package}.{name}')
    if hasattr(module, entry):
      found[name] = getattr(module, entry)
  return found


def entry_of(package: str, entry: str, name: str) -> Callable[..., Any]:
  """Returns the entry function of one method.

  Raises:
    ValueError: unknown method.
  """
  found = find(package, entry)
  if name not in found:
    kind = package.rsplit('.', 1)[-1]
    raise ValueError(
      f'{name!r} is not among the {kind}; known are {", ".join(found)}.'
    )
  return found[name]


def hyperparameters(function: Callable[..., Any]) -> dict[str, Any]:
  """Returns the keyword arguments that have a default, and their defaults."""
  return {
    parameter.name: parameter.default
    for parameter in inspect.signature(function).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
    and parameter.default is not parameter.empty
  }


def check(
  name: str, function: Callable[..., Any], chosen: Mapping[str, Any]
) -> None:
  """Raises TypeError if a chosen hyperparameter does not exist."""
  known = hyperparameters(function)
  unknown = sorted(set(chosen) - set(known))
  if unknown:
    raise TypeError(
      f'{name} has no hyperparameter {", ".join(unknown)}; it has '
      f'{", ".join(known)}.'
    )
