"""Tells nothing: for a policy that learnt the game from demonstrations.

Thoughts are not asked for, so they are the policy's own choice.
"""

from __future__ import annotations

from planpo_jax.prompts import actions

SYSTEM = ''


def parse(response: str) -> actions.ParsedAction:
  """Valid: exactly one non-empty action outside the thoughts."""
  return actions.read_tags(response, require_thought=False)
