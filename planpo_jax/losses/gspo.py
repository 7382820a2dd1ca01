"""GSPO: the clipped objective with one ratio a turn.

Source: arXiv 2507.18071, equations 5, 7, 13 and 14, bounds of section 5.1; the
mean over turns as in verl-agent. All else is as in `ppo_clip`, whose keyword
arguments these are.

Departures from the paper: what it calls a sequence is the response of one turn,
also where an episode is one sequence. The KL and the entropy bonus stay, as for
all methods here.
"""

from __future__ import annotations

import functools

from planpo_jax.losses import ppo_clip

loss = functools.partial(
  ppo_clip.loss,
  ratio='turn',
  clip_low=3e-4,
  clip_high=4e-4,
  aggregation='turn_mean',
)
