"""ReAct (arXiv 2210.03629): a thought line and an action line a turn.

Departures from the paper: an instruction-tuned model is told the form and
shown one turn of no particular environment, where the paper gives one to six
whole trajectories of the environment at hand; a thought and its action come in
one response, where the paper's ALFWorld agent spends a step on a thought; lines
are not numbered, though numbers are read; a response is not stopped where it
invents an observation, so `conversation` context keeps what was sampled.
"""

from __future__ import annotations

import re

from planpo_jax.prompts import actions

SYSTEM = (
  'You are an agent in a text environment. Each turn you read an '
  'observation and answer with two lines, your reasoning and one action:\n'
  'Thought: your reasoning\n'
  'Action: your action\n'
  'Then stop; the next observation will be given to you.\n'
  'Actions: {action_format}\n'
  '\n'
  'One turn of another environment as an example. To the observation "You are '
  'at a bus stop. The timetable is behind a dirty pane." an answer is\n'
  'Thought: I cannot read the timetable before the pane is clean, so I wipe '
  'it first.\n'
  'Action: wipe pane'
)


def _line(word: str) -> re.Pattern[str]:
  return re.compile(
    rf'^[ \t]*{word}(?:[ \t]+\d+)?[ \t]*:(.*)', re.IGNORECASE | re.MULTILINE
  )


_THOUGHT, _ACTION, _OBSERVATION = map(
  _line, ('thought', 'action', 'observation')
)


def parse(response: str) -> actions.ParsedAction:
  """Reads the first `Action:` line before any `Observation:` line.

  Valid: exactly one action, a thought before it that is not empty, and no
  observation, which only the environment can tell. What stands after an
  invented observation is cut off; the action before it runs.
  """
  invented = _OBSERVATION.search(response)
  kept = response[: invented.start()] if invented else response
  found = list(_ACTION.finditer(kept))
  text = actions.fold(found[0].group(1)) if found else ''
  if not text:
    return actions.ParsedAction(actions.NO_ACTION, False)
  before = kept[: found[0].start()]
  thought = _THOUGHT.search(before)
  # It may go on over more lines than its first.
  thought_ok = thought and before[thought.start(1) :].strip()
  return actions.ParsedAction(
    text, bool(len(found) == 1 and thought_ok and not invented)
  )


def whole(response: str) -> bool:
  """An action line is whole once another line has begun.

  What follows it must be an invented observation or nothing at all: anything
  else was not finished.
  """
  if _OBSERVATION.search(response):
    return True
  last = [*_ACTION.finditer(response)][-1:]
  rest = response[last[0].end() :] if last else ''
  return '\n' in rest and not rest.strip()
