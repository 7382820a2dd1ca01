"""What the formats share: the action that a response holds, and its tags."""

from __future__ import annotations

import dataclasses
import re

# Sent in place of an action that could not be read. No environment knows it,
# so each answers with its own "not understood" text, which the policy reads.
NO_ACTION = 'invalid'

# Bytes of UTF-8 that an action may have. What is longer is no action, so that a
# policy cannot have its episode refused by the length of what it writes.
MAX_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class ParsedAction:
  """The action a response holds.

  Attributes:
    text: what is sent to the environment; `NO_ACTION` when none was found.
    valid: the response had the form that its format asks for.
  """

  text: str
  valid: bool


_THOUGHT = re.compile(r'<think>.*?(</think>|$)', re.IGNORECASE | re.DOTALL)
_ACTION = re.compile(
  r'<action>((?:(?!<action>).)*?)</action>', re.IGNORECASE | re.DOTALL
)


def fold(text: str) -> str:
  """Returns an action as it is sent: lower-case, with white space folded.

  It is empty if it would have more than `MAX_BYTES`.
  """
  # Lone surrogates, which Python allows, have no UTF-8.
  action = ' '.join(text.lower().split()).encode(errors='replace')
  return action.decode() if len(action) <= MAX_BYTES else ''


def read_tags(response: str, *, require_thought: bool) -> ParsedAction:
  """Reads `<think>..</think><action>..</action>`; never raises.

  Thoughts are cut first, so nothing inside them runs; an unclosed thought
  reaches to the end. The first whole action is sent. Two actions, or missing
  thoughts where they are required, run but are invalid.
  """
  thoughts = list(_THOUGHT.finditer(response))
  outside = _THOUGHT.sub(' ', response)
  found = [fold(action) for action in _ACTION.findall(outside)]
  if not found or not found[0]:
    return ParsedAction(NO_ACTION, False)
  thought_ok = not require_thought or any(m.group(1) for m in thoughts)
  return ParsedAction(found[0], len(found) == 1 and thought_ok)


def ends_in_tag(response: str) -> bool:
  """Whether the last thing in a response is the end of an action."""
  return response.rstrip().lower().endswith('</action>')
