"""The networks that learn: the policy, and a critic for methods with one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import ml_collections

from planpo_jax import advantages, optimizer, scores, sharding, update
from planpo_jax import batch as batch_lib
from planpo_jax.losses import value
from planpo_jax.models import critic, qwen2


@dataclasses.dataclass(frozen=True)
class Learner:
  """What the loop calls.

  Attributes:
    create: params of the policy -> the state before the first update, on the
      mesh; the params are copied.
    shapes: of the state, with the place of each array.
    score: (state, ref_params, rows) -> `scores.Scores`.
    update: (state, minibatch) -> (state, reports); consumes the state. Each
      network learns from the minibatch; the critic from its targets.
  """

  create: Callable[[update.Params], update.TrainState]
  shapes: update.TrainState
  score: Callable[..., scores.Scores]
  update: Callable[
    [update.TrainState, batch_lib.Batch],
    tuple[update.TrainState, dict[str, dict[str, jax.Array]]],
  ]


def make(
  config: ml_collections.ConfigDict,
  traits: advantages.Traits,
  loss: update.LossFn,
  policy: qwen2.Policy,
  mesh: jax.sharding.Mesh,
) -> Learner:
  """Builds the jitted functions; `config` is the whole configuration."""
  micro = {
    'micro_rows': config.learner.micro_rows,
    'micro_sharding': sharding.micro_sharding(mesh),
  }
  logps = functools.partial(
    qwen2.token_logps, policy, temperature=config.sampler.temperature
  )
  values = functools.partial(critic.values, policy)
  policy_optimizer = optimizer.make(**config.optimizer)
  critic_optimizer = optimizer.make(
    **{key: config.critic[key] for key in config.optimizer}
  )

  def start(params):
    state = update.create(params, policy_optimizer)
    if not traits.values:
      return state
    fresh = critic.init_params(policy, params, traits.values)
    return update.with_critic(state, update.create(fresh, critic_optimizer))

  shapes = sharding.abstract(
    mesh, jax.eval_shape(start, qwen2.abstract_params(policy))
  )
  places = jax.tree.map(lambda x: x.sharding, shapes)

  score_policy = update.make_score(
    logps if traits.entropy else lambda *rows: (logps(*rows)[0], None), **micro
  )
  score_reference = update.make_score(lambda *rows: logps(*rows)[0], **micro)
  score_values = update.make_score(values, **micro)

  def score(state, ref_params, rows):
    old_logp_BT, entropy_BT = score_policy(state.params, rows)
    value_BTC = None
    if traits.values:
      value_BTC = score_values(state.critic.params, rows)
    return scores.Scores(
      old_logp_BT=old_logp_BT,
      ref_logp_BT=score_reference(ref_params, rows),
      entropy_BT=entropy_BT,
      value_BTC=value_BTC,
    )

  update_policy = update.make_update(
    logps, loss, policy_optimizer, state_shardings=places, **micro
  )
  if traits.values:
    update_critic = update.make_critic_update(
      values,
      functools.partial(
        value.value_loss, clip=config.critic.clip, scale=config.critic.scale
      ),
      critic_optimizer,
      state_shardings=places.critic,
      **micro,
    )

  def update_all(state, minibatch):
    state, report = update_policy(state, minibatch)
    reports = {'policy': report}
    if traits.values:
      value_state, reports['critic'] = update_critic(state.critic, minibatch)
      state = dataclasses.replace(state, critic=value_state)
    return state, reports

  return Learner(
    create=jax.jit(start, out_shardings=places),
    shapes=shapes,
    score=score,
    update=update_all,
  )


def scalars(
  reports: Sequence[dict[str, dict[str, jax.Array]]],
) -> dict[str, float]:
  """Joins the reports of the minibatches of one step; waits for the updates."""
  joined = update.scalars([report['policy'] for report in reports])
  if 'critic' in reports[0]:
    joined |= update.critic_scalars([report['critic'] for report in reports])
  return joined
