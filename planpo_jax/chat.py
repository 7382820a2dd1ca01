"""Turns <-> ChatML token ids, and what action a response holds.

The only file that knows how `window` and `conversation` contexts differ.
Sampled ids are kept as they are: nothing is decoded and encoded again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from planpo_jax import tokenizer as tokenizer_lib

CONTEXTS = ('conversation', 'window')

# Sent in place of an action that could not be read. No environment knows it,
# so each answers with its own "not understood" text, which the policy reads.
NO_ACTION = 'invalid'

# What the policy is told, by name (`config.chat.prompt`). `brief` suits a
# policy that learnt the game from demonstrations; `full` explains it. Where
# nothing is told, the system message is that of the checkpoint's template.
PROMPTS = {
  'brief': '',
  'full': (
    'You are an agent in a text environment. Each turn you read an '
    'observation and answer with your reasoning and one action, in this form:\n'
    '<think>your reasoning</think><action>your action</action>\n'
    'Actions: {action_format}'
  ),
}


@dataclasses.dataclass(frozen=True)
class ParsedAction:
  """The action a response holds.

  Attributes:
    text: what is sent to the environment; `NO_ACTION` when none was found.
    valid: exactly one non-empty action outside the thoughts, and thoughts in
      tags where they are required.
  """

  text: str
  valid: bool


_THOUGHT = re.compile(r'<think>.*?(</think>|$)', re.IGNORECASE | re.DOTALL)
_ACTION = re.compile(
  r'<action>((?:(?!<action>).)*?)</action>', re.IGNORECASE | re.DOTALL
)


def parse_action(response: str, *, require_thought: bool) -> ParsedAction:
  """Reads the action out of a response; never raises.

  Thoughts are cut first, so nothing inside them runs; an unclosed thought
  reaches to the end. The first whole action is sent, lower-case and with white
  space folded. Two actions, or missing thoughts where they are required, run
  but are invalid.
  """
  thoughts = list(_THOUGHT.finditer(response))
  outside = _THOUGHT.sub(' ', response)
  actions = [' '.join(a.lower().split()) for a in _ACTION.findall(outside)]
  if not actions or not actions[0]:
    return ParsedAction(NO_ACTION, False)
  thought_ok = not require_thought or any(m.group(1) for m in thoughts)
  return ParsedAction(actions[0], len(actions) == 1 and thought_ok)


class PromptTooLongError(ValueError):
  """The prompt does not fit although everything optional was dropped."""


@dataclasses.dataclass(frozen=True)
class Format:
  """How episodes are written as tokens.

  Attributes:
    tokenizer: text <-> ids.
    context: `conversation` (one growing chat) or `window` (a fresh prompt a
      turn with the last `history` (observation, action) pairs).
    prompt: key of `PROMPTS`.
    action_format: the environment's description of its actions.
    history: pairs kept in `window` context, turns.
    max_context: tokens a context and its response may fill.
    max_response: cap of a response, tokens.
  """

  tokenizer: tokenizer_lib.Tokenizer
  context: str
  prompt: str
  action_format: str
  history: int
  max_context: int
  max_response: int

  def begin(self, goal: str) -> Chat:
    return Chat(self, goal)

  def message(self, role: str, text: str) -> list[int]:
    # Role, newline and text are one string to the template, so they are
    # encoded as one: a merge may span the newline.
    tok = self.tokenizer
    return [tok.im_start, *tok.encode(f'{role}\n{text}'), *self.end()]

  def end(self) -> list[int]:
    return [self.tokenizer.im_end, *self.tokenizer.encode('\n')]

  def answer(self) -> list[int]:
    return [self.tokenizer.im_start, *self.tokenizer.encode('assistant\n')]

  def parse(
    self, response_ids: Sequence[int], capped: bool = False
  ) -> tuple[str, ParsedAction, bool]:
    """Decodes a response and reads its action.

    Args:
      response_ids: as sampled.
      capped: the response ended without an end token, at a limit of tokens.

    Returns:
      (text, action, truncated). A capped response whose last token completed
      its action is whole; any other one is truncated and holds no action.
    """
    text = self.tokenizer.decode(response_ids)
    truncated = capped and not text.rstrip().lower().endswith('</action>')
    if truncated:
      return text, ParsedAction(NO_ACTION, False), True
    # The brief prompt does not ask for thoughts, so they are the policy's
    # own choice there.
    action = parse_action(text, require_thought=self.prompt == 'full')
    return text, action, False


class Chat:
  """The token side of one episode: prompts out, sampled responses in."""

  def __init__(self, fmt: Format, goal: str):
    self._fmt = fmt
    self._goal = goal
    self._ids: list[int] = []  # The conversation so far, exactly as sampled.
    self._turns: list[tuple[str, str]] = []  # (observation, action)
    self._closed = True  # The last message ended with <|im_end|>.
    self.dropped_pairs = 0

  def prompt(self, observation: str) -> tuple[list[int], list[int]]:
    """Ids for the next response.

    Returns:
      (context, prompt): all ids that precede the response, and the part of
      them that is new this turn (`Turn.prompt_ids`).

    Raises:
      PromptTooLongError: context and one token of response do not fit
        `max_context`, even without history.
    """
    if self._fmt.context == 'conversation':
      new = self._appended(observation)
      context = self._ids + new
      self._check(context)
      return context, new
    for kept in range(min(self._fmt.history, len(self._turns)), -1, -1):
      context = self._windowed(observation, kept)
      if len(context) + self._fmt.max_response <= self._fmt.max_context:
        break
      self.dropped_pairs += kept > 0
    self._check(context)
    return context, context

  def respond(
    self,
    context: Sequence[int],
    response_ids: Sequence[int],
    observation: str,
    action: str,
  ) -> None:
    """Records what was sampled after `context`."""
    self._ids = [*context, *response_ids]
    self._closed = bool(response_ids) and (
      response_ids[-1] == self._fmt.tokenizer.im_end
    )
    self._turns.append((observation, action))

  def _check(self, context: Sequence[int]) -> None:
    if len(context) >= self._fmt.max_context:
      raise PromptTooLongError(
        f'a prompt of {len(context)} tokens leaves no room for a response in '
        f'chat.max_context={self._fmt.max_context}; raise it, or shorten the '
        'task.'
      )

  def _head(self) -> list[int]:
    system = PROMPTS[self._fmt.prompt].format(
      action_format=self._fmt.action_format
    )
    if not system:
      # The template of the checkpoint would put its own here, and the model
      # was tuned with it.
      system = self._fmt.tokenizer.system
    return [] if system is None else self._fmt.message('system', system)

  def _appended(self, observation: str) -> list[int]:
    if not self._turns:
      first = f'{self._goal}\n{observation}'
      return [
        *self._head(),
        *self._fmt.message('user', first),
        *self._fmt.answer(),
      ]
    end = self._fmt.end()
    return [
      *(end[1:] if self._closed else end),
      *self._fmt.message('user', observation),
      *self._fmt.answer(),
    ]

  def _windowed(self, observation: str, kept: int) -> list[int]:
    # Task first and step count after it, so that turns share a long prefix.
    lines = [self._goal]
    if kept:
      first = len(self._turns) - kept
      lines.append(f'Your last {kept} observations and actions:')
      for i, (seen, action) in enumerate(self._turns[first:], first + 1):
        lines.append(f'[{i}] {seen}\n> {action}')
    lines.append(f'[{len(self._turns) + 1}] {observation}')
    return [
      *self._head(),
      *self._fmt.message('user', '\n'.join(lines)),
      *self._fmt.answer(),
    ]
