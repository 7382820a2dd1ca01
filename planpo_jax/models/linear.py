"""Linear layers, in the form that the platform computes without conversions.

Weights are [outputs..., inputs...], as in checkpoints.

XLA's CPU compiler has one fast product of bfloat16, rows by rows with a
float32 result; operands in any other order are first converted to float32,
without a word. And with few rows its float32 product reads weights at full
bandwidth only if they are the left operand. TPU and GPU need none of this, but
a backward pass that keeps the type of the operands.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

# With so many rows, the product that has the weights on the left is faster;
# below and above, or when the transposed result is as wide as a vocabulary, it
# is not.
_FEW_ROWS = {'float32': 2, 'bfloat16': 16}
_MOST_ROWS = 64
_MANY_OUTPUTS = 16

# Keeps a transposed copy from being folded into the product that reads it.
_barrier = jax.lax.optimization_barrier


def linear(
  x: jax.Array,
  w: jax.Array,
  num_inputs: int,
  out_dtype: str | None = None,
  *,
  dtype: str,
  on_cpu: bool,
) -> jax.Array:
  """x times w, summed over the inputs.

  Args:
    x: [..., inputs...].
    w: [outputs..., inputs...].
    num_inputs: number of input axes, the last ones of both.
    out_dtype: of the result; None for `dtype`. Sums are float32 in any case.
    dtype: type of the operands.
    on_cpu: use the forms that suit XLA's CPU compiler.

  Returns:
    [..., outputs...].
  """
  outputs, inputs = w.shape[:-num_inputs], w.shape[-num_inputs:]
  leading = x.shape[: x.ndim - num_inputs]
  out_dtype = jnp.dtype(out_dtype or dtype)
  x, w = x.astype(dtype), w.astype(dtype)
  if not on_cpu:
    return _contract(x, w, num_inputs).astype(out_dtype)
  x_RD = x.reshape(math.prod(leading), math.prod(inputs))
  w_ND = w.reshape(math.prod(outputs), math.prod(inputs))
  if x.dtype == jnp.float32:
    y_RN = _product(x_RD, w_ND)
  else:
    y_RN = _bfloat16(x_RD, w_ND)
  return y_RN.astype(out_dtype).reshape(*leading, *outputs)


def _dot(x, w, num_inputs, out_dtype):
  axes = tuple(tuple(range(a.ndim - num_inputs, a.ndim)) for a in (x, w))
  return jax.lax.dot_general(
    x, w, (axes, ((), ())), preferred_element_type=out_dtype
  )


# Left to itself the backward pass multiplies a float32 cotangent with operands
# of 16 bits, which a GPU does by converting those to float32.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _contract(x, w, num_inputs):
  return _dot(x, w, num_inputs, jnp.float32)


def _contract_forward(x, w, num_inputs):
  return _contract(x, w, num_inputs), (x, w)


def _contract_backward(num_inputs, operands, dy):
  dtype = operands[0].dtype
  _, transpose = jax.vjp(lambda x, w: _dot(x, w, num_inputs, dtype), *operands)
  return transpose(dy.astype(dtype))


_contract.defvjp(_contract_forward, _contract_backward)


def _product(x_RD, w_ND):
  """float32 sums [R, N]; the order of the operands decides the speed."""
  rows, (outputs, inputs) = x_RD.shape[0], w_ND.shape
  least = _FEW_ROWS[x_RD.dtype.name]
  wide = outputs > _MANY_OUTPUTS * inputs
  if least <= rows <= _MOST_ROWS and not wide:
    y_NR = jnp.einsum(
      'ND,RD->NR', w_ND, x_RD, preferred_element_type=jnp.float32
    )
    return _barrier(y_NR).T
  return jnp.einsum('RD,ND->RN', x_RD, w_ND, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _bfloat16(x_RD, w_ND):
  rows = x_RD.shape[0]
  if rows == 1:
    # A product of one row is another, slow one.
    x_RD = jnp.pad(x_RD, ((0, 1), (0, 0)))
  return _product(x_RD, w_ND)[:rows]


def _bfloat16_forward(x_RD, w_ND):
  return _bfloat16(x_RD, w_ND), (x_RD, w_ND)


def _bfloat16_backward(operands, dy_RN):
  x_RD, w_ND = operands
  dy_RN = dy_RN.astype(x_RD.dtype)
  dx_RD = _product(dy_RN, _barrier(w_ND.T))
  dw_ND = _product(_barrier(dy_RN.T), _barrier(x_RD.T))
  return dx_RD.astype(x_RD.dtype), dw_ND.astype(w_ND.dtype)


_bfloat16.defvjp(_bfloat16_forward, _bfloat16_backward)
