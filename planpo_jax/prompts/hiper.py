"""HiPER (arXiv 2602.16165): keep or switch the subgoal, name it, then act.

A response has three parts, each in its tags and in this order:
`<switch>KEEP|SWITCH</switch><subgoal>..</subgoal><action>..</action>`.

Departures from the authors' code: tags may be in any case; nothing inside
thoughts is read, as in the other formats; a part said twice or out of order
makes a response invalid (there, only missing parts and some scripts do); a
response without a subgoal leaves the last one standing.
"""

from __future__ import annotations

import dataclasses
import re

from planpo_jax.prompts import actions

PARTS = ('switch', 'subgoal', 'action')
SYSTEM = (
  'You are an agent in a text environment. You work towards the task one '
  'subgoal at a time, each a small aim that takes a few actions. Each turn you '
  'read an observation, decide whether to keep your current subgoal or to '
  'switch to a new one, and take one action. Answer with these three parts and '
  'nothing else:\n'
  '<switch>KEEP or SWITCH</switch><subgoal>your subgoal</subgoal>'
  '<action>your action</action>\n'
  'After KEEP repeat the current subgoal word for word; after SWITCH write a '
  'new one. At first there is no subgoal, so begin with SWITCH.\n'
  'Actions: {action_format}'
)

_THOUGHT = re.compile(r'<think>.*?(?:</think>|$)', re.IGNORECASE | re.DOTALL)
_TAGGED = {
  part: re.compile(
    rf'<{part}>((?:(?!<{part}>).)*?)</{part}>', re.IGNORECASE | re.DOTALL
  )
  for part in PARTS
}


@dataclasses.dataclass(frozen=True)
class Reading:
  """What a response says.

  Attributes:
    switch: it says SWITCH. Anything else keeps the subgoal.
    subgoal: with white space folded; empty if it names none.
    action: as it is sent to the environment; empty if it names none, or one
      that is too long.
    spans: part -> (first, stop) of the part in the response, tags included,
      in characters; None if it is missing. The first whole one counts.
    valid: each part is there once, in order and not empty, and the first says
      KEEP or SWITCH. Text around them does no harm.
  """

  switch: bool
  subgoal: str
  action: str
  spans: dict[str, tuple[int, int] | None]
  valid: bool


def read(response: str) -> Reading:
  """Reads the three parts; never raises."""
  # Blanked instead of cut, so that places stay what they are.
  outside = _THOUGHT.sub(lambda thought: ' ' * len(thought[0]), response)
  found = {part: list(_TAGGED[part].finditer(outside)) for part in PARTS}
  inside = {
    part: ' '.join(found[part][0][1].split()) if found[part] else ''
    for part in PARTS
  }
  spans = {
    part: found[part][0].span() if found[part] else None for part in PARTS
  }
  action = actions.fold(inside['action'])
  once = all(len(matches) == 1 for matches in found.values())
  borders = [border for part in PARTS for border in spans[part] or ()]
  return Reading(
    switch=inside['switch'].upper() == 'SWITCH',
    subgoal=inside['subgoal'],
    action=action,
    spans=spans,
    valid=(
      once
      and borders == sorted(borders)
      and inside['switch'].upper() in ('KEEP', 'SWITCH')
      and bool(inside['subgoal'] and action)
    ),
  )


def parse(response: str) -> actions.ParsedAction:
  """Sends the first action; see `Reading.valid`."""
  reading = read(response)
  return actions.ParsedAction(
    reading.action or actions.NO_ACTION, reading.valid
  )


def carry(response: str, carried: str) -> str:
  """The subgoal in force: the last one named, whatever was said of it."""
  subgoal = read(response).subgoal
  return f'Your current subgoal: {subgoal}' if subgoal else carried
