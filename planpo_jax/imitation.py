"""Warm start: a policy learns to answer as the demonstrations do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from planpo_jax import (
  batch,
  chat,
  demonstrations,
  episodes,
  losses,
  optimizer,
  rollout,
  sharding,
  update,
)
from planpo_jax.models import qwen2


def to_episode(
  demonstration: demonstrations.Demonstration, fmt: chat.Format
) -> episodes.Episode | None:
  """The demonstration as if the policy had sampled it; None if too long.

  Each response is `<think>thought</think><action>action</action>` and the end
  token, cut to no length: a demonstration that does not fit the context or
  the cap of a response is left out whole.
  """
  talk = fmt.begin(demonstration.goal)
  turns = []
  for step in demonstration.steps:
    text = f'<think>{step.thought}</think><action>{step.action}</action>'
    response_ids = [*fmt.tokenizer.encode(text), fmt.tokenizer.im_end]
    try:
      context, prompt_ids = talk.prompt(step.observation, step.admissible)
    except chat.PromptTooLongError:
      return None
    if (
      len(response_ids) > fmt.max_response
      or len(context) + len(response_ids) > fmt.max_context
    ):
      return None
    turns.append(
      episodes.Turn(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        response_logps=(0.0,) * len(response_ids),
        observation=step.observation,
        response=text,
        action=step.action,
        reward=0.0,
        valid=True,
        state_key=rollout.state_key(step.observation),
      )
    )
    talk.respond(context, response_ids, step.observation, step.action)
  return episodes.Episode(
    demonstration.task,
    0,
    tuple(turns),
    demonstration.score,
    True,
    episodes.Ending.TERMINATED,
    goal=demonstration.goal,
  )


def _negative_log_likelihood(
  logp_BT, rows, *, entropy_BT, denominator, prompt_weight
) -> tuple[jax.Array, losses.LossMetrics]:
  """Weighted sum of -logp, and only those metrics that `update` needs."""
  weight_BT = jnp.where(
    rows.loss_mask_BT, 1.0, jnp.where(rows.positions_BT > 0, prompt_weight, 0.0)
  )
  total = -(weight_BT * logp_BT).sum() / denominator
  metrics = dataclasses.replace(
    losses.no_metrics(),
    weight=weight_BT.sum(),
    policy_loss=-jnp.where(rows.loss_mask_BT, logp_BT, 0.0).sum() / denominator,
  )
  return total, metrics


def sharpen(params: qwen2.Params, temperature: float) -> qwen2.Params:
  """Params that sample at temperature 1 as `params` do at `temperature`.

  A policy that imitated few episodes spreads over much that is wrong; below 1
  it starts out surer of itself. The logits are linear in the last norm's scale.
  """

  def scale(path, leaf):
    return (
      leaf / temperature
      if 'final_norm_D' in jax.tree_util.keystr(path)
      else leaf
    )

  return jax.tree_util.tree_map_with_path(scale, params)


def fit(
  policy: qwen2.Policy,
  params: qwen2.Params,
  shown: Sequence[episodes.Episode],
  *,
  mesh: jax.sharding.Mesh,
  epochs: int,
  minibatches: int,
  learning_rate: float,
  context: str,
  row_len: int,
  micro_rows: int,
  prompt_weight: float,
  on_epoch: Callable[[int, float, qwen2.Params], None],
) -> qwen2.Params:
  """Maximises the likelihood of the responses in `shown`.

  Prompts may count too, for less: they are most of the tokens, and a policy
  that starts from nothing learns to read and to copy from them.

  Args:
    policy: the network.
    params: where to start.
    shown: from `to_episode`.
    mesh: where `params` are.
    epochs: passes over them.
    minibatches: updates an epoch.
    learning_rate: peak; warmed up over the first tenth, then cosine to 0.
    context: `conversation` or `window`.
    row_len: tokens of a packed row.
    micro_rows: rows of one forward pass.
    prompt_weight: weight of a prompt token; a response token weighs 1.
    on_epoch: called with (epochs done, mean nats a response token, params).

  Returns:
    The params after the last epoch.
  """
  optim = optimizer.make(
    learning_rate,
    schedule='cosine',
    warmup_steps=epochs * minibatches // 10,
    total_steps=epochs * minibatches,
  )
  logps = functools.partial(qwen2.token_logps, policy, temperature=1.0)
  loss = functools.partial(
    _negative_log_likelihood, prompt_weight=prompt_weight
  )
  state = sharding.shard_params(mesh, update.create(params, optim))
  step = update.make_update(
    logps,
    loss,
    optim,
    micro_rows=micro_rows,
    micro_sharding=sharding.micro_sharding(mesh),
    state_shardings=sharding.param_shardings(mesh, state),
  )
  tokens = sum(len(t.response_ids) for e in shown for t in e.turns)
  for epoch in range(epochs):
    rows = batch.pack(
      shown,
      context=context,
      row_len=row_len,
      minibatches=minibatches,
      row_multiple=micro_rows,
      seed=epoch,
    )
    nats = 0.0
    rows = sharding.put_batch(mesh, rows)
    for minibatch in batch.split(rows, minibatches):
      state, report = step(state, minibatch)
      nats += float(report['policy_loss'] * report['weight'])
    on_epoch(epoch + 1, nats / tokens, state.params)
  return state.params
