"""What the networks say of the tokens of a step, and where it goes.

An estimator reads flat tables, the update reads packed rows; scores come in
rows and are wanted in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from planpo_jax import batch as batch_lib
from planpo_jax import episodes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
  """Of each response token, before the first update of the step.

  Attributes:
    old_logp_BT: [B, T] float32 nats, under the policy.
    ref_logp_BT: [B, T] float32 nats, under the reference.
    entropy_BT: [B, T] float32 nats, of the policy; None if nobody asks.
    value_BTC: [B, T, C] float32, of the critic; None without one.
  """

  old_logp_BT: jax.Array
  ref_logp_BT: jax.Array
  entropy_BT: jax.Array | None = None
  value_BTC: jax.Array | None = None


def to_batch(rows: batch_lib.Batch, scores: Scores) -> batch_lib.Batch:
  """Rows with their scores, both on the mesh."""
  return dataclasses.replace(
    rows,
    old_logp_BT=scores.old_logp_BT,
    ref_logp_BT=scores.ref_logp_BT,
    value_BTC=scores.value_BTC,
  )


def to_table(
  table: episodes.TurnTable,
  rows: batch_lib.Batch,
  scores: Scores,
  kl_reward: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> episodes.TurnTable:
  """Lays scores out for the estimator.

  Args:
    table: of the episodes that `rows` holds.
    rows: as packed, on the host.
    scores: of `rows`.
    kl_reward: (old_logp, ref_logp) -> reward of each token; None for no KL in
      the reward.
  """
  num_R = len(table.token_turn_R)

  def flat(x):
    return batch_lib.to_flat(rows, np.asarray(x), num_R)

  added = {}
  if scores.entropy_BT is not None:
    added['token_entropy_R'] = flat(scores.entropy_BT)
  if scores.value_BTC is not None:
    added['value_RC'] = flat(scores.value_BTC)
  if kl_reward is not None:
    added['token_reward_R'] = flat(
      kl_reward(scores.old_logp_BT, scores.ref_logp_BT)
    )
  return dataclasses.replace(table, **added)
