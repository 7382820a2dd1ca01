"""Response formats, one file a format; the file tree is the registry.

A format (`config.chat.prompt`) is a module here with

  SYSTEM: str, the system message, in which `{action_format}` stands for the
    environment's description of its actions; empty: that of the checkpoint.
  parse(response: str) -> actions.ParsedAction, which never raises.

and, where it needs them,

  carry(response: str, carried: str) -> str, the line that `window` context
    shows in the next prompt, given the line so far ('' at first); empty shows
    none. A format without it carries nothing.
  whole(response: str) -> bool, whether the action of a response that was cut
    off at a limit of tokens is complete none the less. A format without it
    asks for an `</action>` as the last thing in the response.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

from planpo_jax import registry
from planpo_jax.prompts import actions


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A format found; see the docstring of the package.

  Attributes:
    system: `SYSTEM`, with its place for the actions.
    parse: response -> action.
    carry: (response, carried) -> carried.
    whole: response -> bool.
  """

  system: str
  parse: Callable[[str], actions.ParsedAction]
  carry: Callable[[str, str], str]
  whole: Callable[[str], bool]


def names() -> list[str]:
  """Returns the formats found, sorted."""
  return list(registry.find(__name__, 'parse'))


# Cached, because a chat asks for its format every turn.
@functools.cache
def get(name: str) -> Prompt:
  """Returns a format.

  Raises:
    ValueError: unknown format.
  """
  parse = registry.entry_of(__name__, 'parse', name)
  module = sys.modules[f'{__name__}.{name}']
  return Prompt(
    system=module.SYSTEM,
    parse=parse,
    carry=getattr(module, 'carry', _carry_nothing),
    whole=getattr(module, 'whole', actions.ends_in_tag),
  )


def _carry_nothing(response: str, carried: str) -> str:
  del response, carried
  return ''
