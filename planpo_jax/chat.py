"""Turns <-> ChatML token ids.

The only file that knows how `window` and `conversation` contexts differ.
Sampled ids are kept as they are: nothing is decoded and encoded again.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from planpo_jax import prompts
from planpo_jax import tokenizer as tokenizer_lib
from planpo_jax.prompts import actions

CONTEXTS = ('conversation', 'window')

# In place of the actions that a list has no room for.
_MORE = '...'

# Actions of a list that are encoded together before it is known how many fit.
_FIRST_TRY = 64


class PromptTooLongError(ValueError):
  """The prompt does not fit although everything optional was dropped."""


@dataclasses.dataclass(frozen=True)
class Format:
  """How episodes are written as tokens.

  Attributes:
    tokenizer: text <-> ids.
    context: `conversation` (one growing chat) or `window` (a fresh prompt a
      turn with the last `history` (observation, action) pairs).
    prompt: name of a response format in `planpo_jax/prompts`.
    action_format: the environment's description of its actions.
    history: pairs kept in `window` context, turns.
    max_context: tokens a context and its response may fill.
    max_response: cap of a response, tokens.
    admissible: prompts list the actions that can be taken now.
  """

  tokenizer: tokenizer_lib.Tokenizer
  context: str
  prompt: str
  action_format: str
  history: int
  max_context: int
  max_response: int
  admissible: bool = False

  def begin(self, goal: str) -> Chat:
    return Chat(self, goal)

  def message(self, role: str, text: str) -> list[int]:
    # Role, newline and text are one string to the template, so they are
    # encoded as one: a merge may span the newline.
    tok = self.tokenizer
    return [tok.im_start, *tok.encode(f'{role}\n{text}'), *self.end()]

  def system(self, text: str) -> list[int]:
    """The system message `text`; if empty, that of the checkpoint, if any.

    The template of the checkpoint would put its own there, and the model was
    tuned with it.
    """
    chosen = text or self.tokenizer.system
    return [] if chosen is None else self.message('system', chosen)

  def end(self) -> list[int]:
    return [self.tokenizer.im_end, *self.tokenizer.encode('\n')]

  def answer(self) -> list[int]:
    return [self.tokenizer.im_start, *self.tokenizer.encode('assistant\n')]

  def parse(
    self, response_ids: Sequence[int], capped: bool = False
  ) -> tuple[str, actions.ParsedAction, bool]:
    """Decodes a response and reads its action.

    Args:
      response_ids: as sampled.
      capped: the response ended without an end token, at a limit of tokens.

    Returns:
      (text, action, truncated). A capped response whose action is whole is
      not truncated; any other one is, and holds no action.
    """
    text = self.tokenizer.decode(response_ids)
    form = prompts.get(self.prompt)
    if capped and not form.whole(text):
      return text, actions.ParsedAction(actions.NO_ACTION, False), True
    return text, form.parse(text), False


class Chat:
  """The token side of one episode: prompts out, sampled responses in."""

  def __init__(self, fmt: Format, goal: str):
    self._fmt = fmt
    self._goal = goal
    self._ids: list[int] = []  # The conversation so far, exactly as sampled.
    self._turns: list[tuple[str, str]] = []  # (observation, action)
    self._closed = True  # The last message ended with <|im_end|>.
    self._carried = ''  # What the format shows again in `window` context.
    self.dropped_pairs = 0
    self.cut_lists = 0  # Prompts whose list of actions is not whole.

  def prompt(
    self, observation: str, admissible: Sequence[str] = ()
  ) -> tuple[list[int], list[int]]:
    """Ids for the next response.

    In `window` context a list stands below the current observation alone; in
    `conversation`, where nothing said is taken back, it stays and takes up
    context for good. What is too long loses history first, then the end of the
    list, so that `max_response` tokens remain.

    Args:
      observation: what is seen now.
      admissible: actions that can be taken now, in any order; listed, sorted,
        if the format lists them and there are some.

    Returns:
      (context, prompt): all ids that precede the response, and the part of
      them that is new this turn (`Turn.prompt_ids`).

    Raises:
      PromptTooLongError: context and one token of response do not fit
        `max_context`, even without history.
    """
    # Environments promise no order, and the same state shall read the same.
    able = sorted(set(admissible)) if self._fmt.admissible else []
    shown = self._count_fitting(observation, able)
    text = _listed(observation, able, shown)
    kept = 0
    if self._fmt.context == 'window':
      kept = min(self._fmt.history, len(self._turns))
    if shown < len(able):
      self.cut_lists += 1
      self.dropped_pairs += kept
      kept = 0
    new = self._new(text, kept)
    while kept and not self._roomy(new):
      kept -= 1
      self.dropped_pairs += 1
      new = self._new(text, kept)
    context = new
    if self._fmt.context == 'conversation':
      context = self._ids + new
    self._check(context)
    return context, new

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
    if self._fmt.context == 'window':
      self._carried = prompts.get(self._fmt.prompt).carry(
        self._fmt.tokenizer.decode(response_ids), self._carried
      )

  def _check(self, context: Sequence[int]) -> None:
    if len(context) >= self._fmt.max_context:
      raise PromptTooLongError(
        f'a prompt of {len(context)} tokens leaves no room for a response in '
        f'chat.max_context={self._fmt.max_context}; raise it, or shorten the '
        'task.'
      )

  def _count_fitting(self, observation: str, able: Sequence[str]) -> int:
    """How many actions of a list there is room for, without history.

    A list may have thousands, which take a second to encode; so nothing is
    tried that is more than twice as long as what fits.
    """

    def too_long(count: int) -> bool:
      return not self._roomy(self._new(_listed(observation, able, count), 0))

    fitting, tried = 0, min(_FIRST_TRY, len(able))
    while fitting < len(able) and not too_long(tried):
      fitting, tried = tried, min(2 * tried, len(able))
    between = range(fitting + 1, tried)
    return fitting + bisect.bisect_left(between, True, key=too_long)

  def _roomy(self, new: Sequence[int]) -> bool:
    """Whether a whole response fits after a prompt that ends in `new`."""
    before = len(self._ids) if self._fmt.context == 'conversation' else 0
    taken = before + len(new) + self._fmt.max_response
    return taken <= self._fmt.max_context

  def _new(self, text: str, kept: int) -> list[int]:
    """What the prompt of this turn adds, with `kept` pairs of history."""
    if self._fmt.context == 'conversation':
      return self._appended(text)
    return self._windowed(text, kept)

  def _head(self) -> list[int]:
    system = prompts.get(self._fmt.prompt).system
    return self._fmt.system(
      system.format(action_format=self._fmt.action_format)
    )

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
    if self._carried:
      lines.append(self._carried)
    lines.append(f'[{len(self._turns) + 1}] {observation}')
    return [
      *self._head(),
      *self._fmt.message('user', '\n'.join(lines)),
      *self._fmt.answer(),
    ]


def _listed(observation: str, able: Sequence[str], count: int) -> str:
  """An observation and, if `count` is not 0, a list of actions below it."""
  return f'{observation}\n{list_actions(able, count)}' if count else observation


def list_actions(able: Sequence[str], count: int | None = None) -> str:
  """The line that lists actions, or the first `count` of them."""
  shown = list(able[:count])
  if len(shown) < len(able):
    shown.append(_MORE)
  return f'Actions you can take now: {"; ".join(shown)}'
