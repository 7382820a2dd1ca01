"""AdamW with clipping by global norm, and the learning-rate schedule."""

from __future__ import annotations

import jax.numpy as jnp
import optax


def learning_rate_schedule(
  learning_rate: float,
  *,
  schedule: str = 'constant',
  warmup_steps: int = 0,
  total_steps: int | None = None,
) -> optax.Schedule:
  """Returns the learning rate as a function of the updates made so far.

  The rate rises linearly and reaches `learning_rate` at update `warmup_steps`;
  the first update already has learning_rate / warmup_steps, for an update at
  rate 0 would be wasted.

  Args:
    learning_rate: highest rate.
    schedule: `constant`, or `cosine` down to 0 at `total_steps`.
    warmup_steps: updates.
    total_steps: updates, warm-up included; only read by `cosine`.

  Raises:
    ValueError: unknown schedule, a negative rate, or `total_steps` that are
      missing or no more than the warm-up.
  """
  if schedule not in ('constant', 'cosine'):
    raise ValueError(
      f'schedule={schedule!r} is unknown; use constant or cosine.'
    )
  if learning_rate < 0:
    raise ValueError(f'learning_rate={learning_rate} must not be negative.')
  if warmup_steps < 0:
    raise ValueError(f'warmup_steps={warmup_steps} must not be negative.')
  if schedule == 'cosine' and (total_steps or 0) <= warmup_steps:
    raise ValueError(
      f'total_steps={total_steps} must be above warmup_steps={warmup_steps} '
      'for the cosine schedule; give the number of updates of the whole run.'
    )

  def rate(count):
    warm = jnp.minimum((count + 1.0) / max(warmup_steps, 1), 1.0)
    if schedule == 'constant':
      return learning_rate * warm
    done = (count - warmup_steps) / (total_steps - warmup_steps)
    decay = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return learning_rate * warm * decay

  return rate


def make(
  learning_rate: float,
  *,
  schedule: str = 'constant',
  warmup_steps: int = 0,
  total_steps: int | None = None,
  weight_decay: float = 0.01,
  max_grad_norm: float = 1.0,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
) -> optax.GradientTransformation:
  """Returns clipping by global norm followed by AdamW.

  Args:
    learning_rate: see `learning_rate_schedule`, as the next three.
    schedule: see there.
    warmup_steps: see there.
    total_steps: see there.
    weight_decay: decoupled, on all parameters.
    max_grad_norm: gradients of a larger global norm are scaled down to it.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.

  Raises:
    ValueError: see `learning_rate_schedule`; or max_grad_norm not above 0.
  """
  if max_grad_norm <= 0:
    raise ValueError(
      f'max_grad_norm={max_grad_norm} must be above 0; give inf not to clip.'
    )
  rate = learning_rate_schedule(
    learning_rate,
    schedule=schedule,
    warmup_steps=warmup_steps,
    total_steps=total_steps,
  )
  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
  )
