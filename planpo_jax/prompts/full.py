"""Explains the game: reasoning and one action, in tags."""

from __future__ import annotations

from planpo_jax.prompts import actions

SYSTEM = (
  'You are an agent in a text environment. Each turn you read an '
  'observation and answer with your reasoning and one action, in this form:\n'
  '<think>your reasoning</think><action>your action</action>\n'
  'Actions: {action_format}'
)


def parse(response: str) -> actions.ParsedAction:
  """Valid: exactly one non-empty action, and thoughts in tags."""
  return actions.read_tags(response, require_thought=True)
