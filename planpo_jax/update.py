"""The only place where model, loss and optimizer meet."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from planpo_jax import batch as batch_lib
from planpo_jax import losses
from planpo_jax.losses import value as value_lib

Params = Any
# (params, tokens_BT, positions_BT, segment_ids_BT) -> (logp_BT, entropy_BT):
# log-probabilities and entropies (nats) at the sampling temperature.
LogpsFn = Callable[
  [Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]
# loss(logp_BT, batch, *, entropy_BT, denominator), hyperparameters bound.
LossFn = Callable[..., tuple[jax.Array, losses.LossMetrics]]
# (params, tokens_BT, positions_BT, segment_ids_BT) -> value_BTC.
ValuesFn = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
# value_loss(value_BTC, batch, *, denominator), hyperparameters bound.
ValueLossFn = Callable[..., tuple[jax.Array, value_lib.ValueMetrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What a checkpoint saves.

  Attributes:
    params: of the policy.
    opt_state: of the optimizer; its count leaves out skipped updates.
    step: int32 scalar, calls of `update`, skipped ones included.
  """

  params: Params
  opt_state: optax.OptState
  step: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActorCriticState(TrainState):
  """The same for a method with a critic.

  A class of its own, for an empty field would be part of every checkpoint.

  Attributes:
    critic: the same as of the policy; updates of the policy hand it on.
  """

  critic: TrainState


def create(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns the state before the first update.

  `params` are copied, since `update` consumes its state: the caller's arrays
  stay valid, for instance as the reference policy.
  """
  params = jax.tree.map(jnp.copy, params)
  return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def with_critic(policy: TrainState, critic: TrainState) -> ActorCriticState:
  """Joins two states, which are not copied."""
  return ActorCriticState(policy.params, policy.opt_state, policy.step, critic)


def _blocks(
  batch: batch_lib.Batch,
  micro_rows: int,
  micro_sharding: jax.sharding.Sharding | None,
) -> batch_lib.Batch:
  """Reshapes [B, T] to [B / micro_rows, micro_rows, T]."""
  num_rows = batch.tokens_BT.shape[0]
  if micro_rows < 1 or num_rows % micro_rows:
    raise ValueError(
      f'micro_rows={micro_rows} must divide the {num_rows} rows given; pack '
      'with row_multiple=micro_rows.'
    )

  def block(x_BT):
    x = jnp.reshape(x_BT, (num_rows // micro_rows, micro_rows, *x_BT.shape[1:]))
    if micro_sharding is not None:
      x = jax.lax.with_sharding_constraint(x, micro_sharding)
    return x

  return jax.tree.map(block, batch)


def make_score(
  forward: Callable[..., Any],
  *,
  micro_rows: int,
  micro_sharding: jax.sharding.Sharding | None = None,
) -> Callable[[Params, batch_lib.Batch], Any]:
  """Makes `score(params, batch)`, jitted: what a network says of a batch.

  It runs the forward pass that `update` runs, on blocks of the same shape, so
  that the ratio of the first update is 1.

  Args:
    forward: (params, tokens_BT, positions_BT, segment_ids_BT) -> an array
      [B, T, ...], or a tree of them, such as `LogpsFn`.
    micro_rows: rows a forward pass; must divide the rows of the batch. Use the
      same as for `make_update`.
    micro_sharding: placement of [blocks, micro_rows, T] arrays; None leaves it
      to the compiler.

  Returns:
    The function; its result is float32, and 0 outside of responses. Raises
    ValueError when micro_rows does not divide the rows.
  """

  def score(params, batch):
    def micro(_, block):
      def read():
        return forward(
          params, block.tokens_BT, block.positions_BT, block.segment_ids_BT
        )

      def on_responses(x):
        mask = block.loss_mask_BT.reshape(
          block.loss_mask_BT.shape + (1,) * (x.ndim - 2)
        )
        return jnp.where(mask, x.astype(jnp.float32), 0.0)

      return None, jax.lax.cond(
        block.loss_mask_BT.any(),
        lambda: jax.tree.map(on_responses, read()),
        lambda: jax.tree.map(
          lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(read)
        ),
      )

    blocks = _blocks(batch, micro_rows, micro_sharding)
    _, scores = jax.lax.scan(micro, None, blocks)
    return jax.tree.map(
      lambda x: x.reshape(batch.tokens_BT.shape + x.shape[3:]), scores
    )

  return jax.jit(score)


def make_update(
  logps_fn: LogpsFn,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  *,
  micro_rows: int,
  micro_sharding: jax.sharding.Sharding | None = None,
  state_shardings: TrainState | None = None,
) -> Callable[
  [TrainState, batch_lib.Batch], tuple[TrainState, dict[str, jax.Array]]
]:
  """Makes `update(state, minibatch) -> (state, metrics)`, jitted.

  Gradients are summed over blocks of rows and divided once by the loss weight
  of the whole minibatch, so the number of blocks does not change the result.
  Blocks without response tokens (padding rows) cost nothing.

  The update is skipped, and params and opt_state stay as they are, when the
  minibatch has no response token or when a gradient or a step is not finite;
  the metrics `skipped` and `nonfinite` tell. `step` counts on.

  Args:
    logps_fn: the policy.
    loss_fn: a loss, its hyperparameters bound.
    optimizer: see `optimizer.make`.
    micro_rows: rows a forward and backward pass; must divide the rows of the
      minibatch.
    micro_sharding: placement of [blocks, micro_rows, T] arrays; None leaves it
      to the compiler.
    state_shardings: placement of the new state, of which the old one should
      be too: then the second update is not compiled anew. None leaves it to
      the compiler.

  Returns:
    The function. It consumes (donates) the state. Its metrics are float32
    scalars: `loss`, `grad_norm` (before clipping), `skipped`, `nonfinite`, and
    the fields of `losses.LossMetrics`. Raises ValueError when micro_rows does
    not divide the rows.
  """

  def loss(params, block, denominator):
    logp_BT, entropy_BT = logps_fn(
      params, block.tokens_BT, block.positions_BT, block.segment_ids_BT
    )
    return loss_fn(
      logp_BT, block, entropy_BT=entropy_BT, denominator=denominator
    )

  objective = _Objective(
    loss,
    lambda minibatch: 1.0,
    lambda block: block.loss_mask_BT,
    lambda minibatch: losses.no_metrics(),
    losses.merge,
    losses.mean,
  )
  return _make(
    objective, optimizer, micro_rows, micro_sharding, state_shardings
  )


def make_critic_update(
  values_fn: ValuesFn,
  loss_fn: ValueLossFn,
  optimizer: optax.GradientTransformation,
  *,
  micro_rows: int,
  micro_sharding: jax.sharding.Sharding | None = None,
  state_shardings: TrainState | None = None,
) -> Callable[
  [TrainState, batch_lib.Batch], tuple[TrainState, dict[str, jax.Array]]
]:
  """Makes `update(critic, minibatch) -> (critic, metrics)`, jitted.

  By the rules of `make_update`; what counts are the targets that
  `target_mask_BTC` names. Each head has the mean over its own; they add up.

  Args:
    values_fn: the critic, see `models.critic`.
    loss_fn: `losses.value.value_loss`, its hyperparameters bound.
    optimizer: see `make_update`, as the rest.
    micro_rows: see there.
    micro_sharding: see there.
    state_shardings: see there.

  Returns:
    The function. It consumes (donates) the critic. Its metrics are those of
    `make_update` with the fields of `losses.value.ValueMetrics`.
  """

  def loss(params, block, denominator):
    value_BTC = values_fn(
      params, block.tokens_BT, block.positions_BT, block.segment_ids_BT
    )
    return loss_fn(value_BTC, block, denominator=denominator)

  def denominator(minibatch):
    """So that, divided by all targets, it is the number of those of a head."""
    count_C = minibatch.target_mask_BTC.sum((0, 1), dtype=jnp.float32)
    return jnp.maximum(count_C, 1) / jnp.maximum(count_C.sum(), 1)

  objective = _Objective(
    loss,
    denominator,
    lambda block: block.target_mask_BTC,
    lambda minibatch: value_lib.no_metrics(minibatch.target_BTC.shape[-1]),
    value_lib.merge,
    value_lib.mean,
  )
  return _make(
    objective, optimizer, micro_rows, micro_sharding, state_shardings
  )


@dataclasses.dataclass(frozen=True)
class _Objective:
  """What an update minimises.

  Attributes:
    loss: (params, block, denominator) -> (weighted sum, metrics).
    denominator: minibatch -> what the weighted sum of a block is divided by,
      before the sum of all is divided by `weight` of the merged metrics.
    mask: block -> bool array, true where there is something to learn.
    no_metrics: minibatch -> metrics of a block with nothing to learn.
    merge: joins the metrics of two blocks.
    mean: sums to means.
  """

  loss: Callable[[Params, batch_lib.Batch, Any], tuple[jax.Array, Any]]
  denominator: Callable[[batch_lib.Batch], Any]
  mask: Callable[[batch_lib.Batch], jax.Array]
  no_metrics: Callable[[batch_lib.Batch], Any]
  merge: Callable[[Any, Any], Any]
  mean: Callable[[Any], Any]


def _make(objective, optimizer, micro_rows, micro_sharding, state_shardings):
  """See `make_update`."""

  def update(state, minibatch):
    params = state.params
    denominator = objective.denominator(minibatch)
    nothing = (
      jax.tree.map(jnp.zeros_like, params),
      jnp.zeros((), jnp.float32),
      objective.no_metrics(minibatch),
    )

    def micro(total, block):
      def add():
        (loss, metrics), grads = jax.value_and_grad(
          objective.loss, has_aux=True
        )(params, block, denominator)
        return (
          jax.tree.map(jnp.add, total[0], grads),
          total[1] + loss,
          objective.merge(total[2], metrics),
        )

      return jax.lax.cond(objective.mask(block).any(), add, lambda: total), None

    blocks = _blocks(minibatch, micro_rows, micro_sharding)
    (grads, loss, loss_metrics), _ = jax.lax.scan(micro, nothing, blocks)
    weight = jnp.where(loss_metrics.weight > 0, loss_metrics.weight, 1.0)
    grads = jax.tree.map(lambda g: g / weight, grads)
    grad_norm = optax.tree.norm(grads)

    deltas, opt_state = optimizer.update(grads, state.opt_state, params)
    # The step too: what the optimizer adds may overflow where gradients do not.
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(deltas))
    applied = finite & (loss_metrics.weight > 0)
    updated = (optax.apply_updates(params, deltas), opt_state)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(applied, new, old),
      updated,
      (params, state.opt_state),
    )
    metrics = {
      'loss': loss / weight,
      'grad_norm': grad_norm,
      'skipped': 1.0 - applied,
      'nonfinite': 1.0 - finite,
    }
    means = objective.mean(loss_metrics)
    metrics |= {
      field.name: getattr(means, field.name)
      for field in dataclasses.fields(means)
    }
    state = dataclasses.replace(
      state, params=params, opt_state=opt_state, step=state.step + 1
    )
    return state, metrics

  return jax.jit(
    update, donate_argnums=0, out_shardings=(state_shardings, None)
  )


def scalars(reports: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
  """Joins the metrics of the minibatches of one step.

  Args:
    reports: metrics as `update` returned them, at least one.

  Returns:
    Scalars under `loss/`: `total` and the fields of `losses.LossMetrics`, as
    means over the tokens, turns or sequences of all minibatches or as extremes;
    `weight`, summed; `grad_norm`, the mean over applied updates (0 without
    any); `skipped_updates` and `nonfinite_updates`, counts; and
    `first_ratio_max`, of the first minibatch, when the policy is still the one
    that was scored.
  """
  columns, joined = _join(reports)
  some = joined['weight'] > 0
  joined['first_ratio_max'] = columns['ratio_max'][0]
  for name, join, empty in (
    ('ratio_min', np.min, 1.0),
    ('ratio_max', np.max, 1.0),
    ('sampler_gap', np.max, 0.0),
  ):
    values = columns.pop(name)[columns['weight'] > 0]
    joined[name] = join(values) if some else empty
  joined |= _means(columns)
  return {f'loss/{name}': float(value) for name, value in joined.items()}


def critic_scalars(reports: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
  """Joins the metrics of the minibatches of one step, for the critic.

  Args:
    reports: metrics as the update of the critic returned them, at least one.

  Returns:
    Scalars under `critic/`, as in `scalars`: `total`, `value_loss`,
    `value_clip_frac`, `value` and `target`, means over the targets; `weight`,
    `grad_norm`, `skipped_updates` and `nonfinite_updates`; and
    `explained_variance` over all of the step, with several heads
    `explained_variance_0` and so on.
  """
  columns, joined = _join(reports)
  moments = functools.reduce(
    value_lib.merge,
    (
      value_lib.ValueMetrics(
        **{
          field.name: columns[field.name][i]
          for field in dataclasses.fields(value_lib.ValueMetrics)
        }
      )
      for i in range(len(reports))
    ),
  )
  explained_C = np.asarray(value_lib.explained_variance(moments))
  for head, value in enumerate(explained_C):
    suffix = f'_{head}' if len(explained_C) > 1 else ''
    joined[f'explained_variance{suffix}'] = value
  columns = {k: v for k, v in columns.items() if not k.endswith('_C')}
  joined |= _means(columns)
  return {f'critic/{name}': float(value) for name, value in joined.items()}


def _join(
  reports: Sequence[dict[str, jax.Array]],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
  """What each metric was in each report, and what any two updates share."""
  host = jax.device_get(reports)
  columns = {
    name: np.array([report[name] for report in host], np.float64)
    for name in reports[0]
  }
  skipped, nonfinite = columns.pop('skipped'), columns.pop('nonfinite')
  grad_norm, applied = columns.pop('grad_norm'), skipped == 0
  columns['total'] = columns.pop('loss')
  joined = {
    'weight': columns['weight'].sum(),
    'skipped_updates': skipped.sum(),
    'nonfinite_updates': nonfinite.sum(),
    'grad_norm': grad_norm[applied].mean() if applied.any() else 0.0,
  }
  return columns, joined


def _means(columns: dict[str, np.ndarray]) -> dict[str, float]:
  """Means over whatever the losses of all reports were means over."""
  weight = columns['weight']
  return {
    name: np.average(values, weights=weight) if weight.any() else 0.0
    for name, values in columns.items()
    if name != 'weight'
  }
