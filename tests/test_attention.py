"""Every kernel of packed attention against plain numpy in float64.

The splash kernel runs step by step here; that of cuDNN cannot run without a
GPU, so it is read in the lowered program, and what is passed to it is run by
jax's own implementation of the same function.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from planpo_jax import sharding
from planpo_jax.models import attention, splash
from tests import eight_devices

# rows, length, query heads, key/value heads, head size. The lengths end inside
# a block of every kernel; splash sees two by two blocks of 384 at 530.
SHAPES = {
  'group-1': (2, 130, 2, 2, 64),
  'group-6': (1, 530, 12, 2, 128),
  'group-7': (2, 200, 7, 1, 64),
}


def _interpreted(*args):
  return splash.attend(*args, interpret=True)


RUNNABLE = {'xla': attention.attend, 'splash': _interpreted}


def _segments(rows, length):
  """Uneven segments, one of one token, then padding; a last row of padding."""
  ids_BT = np.zeros((rows, length), np.int32)
  for row in range(max(rows - 1, 1)):
    cuts = [0, 37 + row, 38 + row, length // 2 + 3, length - 9 * (row + 1)]
    for i, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
      ids_BT[row, start:end] = i + 1
  return ids_BT


def _inputs(shape, dtype='float32'):
  """Queries, keys, values, the gradient of the output, and segment ids."""
  rows, length, heads, kv_heads, head_dim = SHAPES[shape]
  rng = np.random.default_rng(0)
  arrays = [
    rng.normal(size=(rows, length, n, head_dim)).astype(np.float32)
    for n in (heads, kv_heads, kv_heads, heads)
  ]
  return [jnp.asarray(x, dtype) for x in arrays], _segments(rows, length)


def _reference(q, k, v, grad, ids):
  """Output and gradients by queries, keys and values, head by head."""
  q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  rows, length, heads, head_dim = q.shape
  scale = head_dim**-0.5
  for b in range(rows):
    mask = np.tril(ids[b][:, None] == ids[b])
    for n in range(heads):
      m = n // (heads // k.shape[2])
      scores = np.where(mask, q[b, :, n] @ k[b, :, m].T * scale, -np.inf)
      probs = np.exp(scores - scores.max(-1, keepdims=True))
      probs /= probs.sum(-1, keepdims=True)
      out[b, :, n] = probs @ v[b, :, m]
      dprobs = grad[b, :, n] @ v[b, :, m].T
      dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True))
      dq[b, :, n] = dscores @ k[b, :, m] * scale
      dk[b, :, m] += dscores.T @ q[b, :, n] * scale
      dv[b, :, m] += probs.T @ grad[b, :, n]
  return out, dq, dk, dv


def _run(attend, q, k, v, grad, ids):
  """What `_reference` returns, by `attend`."""

  @jax.jit
  def forward_and_backward(q, k, v, grad):
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
    return out, *vjp(grad)

  return forward_and_backward(q, k, v, grad)


def _assert_near_reference(results, arrays, ids):
  """To 1e-5 in float32; in bfloat16 to 1 % of the norm of each result.

  Products of bfloat16 keep 8 bits: 0.4 % a factor.
  """
  real = ids > 0
  for name, x, y in zip(
    ('out', 'dq', 'dk', 'dv'), results, _reference(*arrays, ids), strict=True
  ):
    assert x.dtype == arrays[0].dtype, name
    x = np.asarray(x, np.float64)
    assert np.isfinite(x).all(), name
    x, y = x[real], y[real]
    if arrays[0].dtype == jnp.float32:
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)
    else:
      assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y), name


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('kernel', RUNNABLE)
def test_output_and_gradients_equal_a_plain_implementation(
  kernel, shape, dtype
):
  arrays, ids = _inputs(shape, dtype)
  results = _run(RUNNABLE[kernel], *arrays, ids)
  _assert_near_reference(results, arrays, ids)


@pytest.mark.parametrize(
  'length, padded, blocks', [(1, 128, 1), (640, 768, 2), (2048, 2048, 4)]
)
def test_splash_pads_to_a_few_equal_blocks(length, padded, blocks):
  x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
  program = str(jax.make_jaxpr(splash.attend)(x, x, x, ids))
  assert f'bf16[1,2,{padded},64]' in program
  assert f'grid=(2, {blocks}, {blocks})' in program


def test_unknown_kernels_are_refused_with_the_known():
  arrays, ids = _inputs('group-1')
  with pytest.raises(ValueError, match="'flash' is unknown; use one of xla, "):
    attention.attend(*arrays[:3], ids, kernel='flash')


def test_cudnn_refuses_float32():
  arrays, ids = _inputs('group-1')
  with pytest.raises(ValueError, match='not float32; compute in bfloat16'):
    attention.attend(*arrays[:3], ids, kernel='cudnn')


def test_one_device_calls_the_kernel_of_tpus_without_a_mesh():
  arrays, ids = _inputs('group-1')
  with jax.set_mesh(sharding.make_mesh()):
    program = str(
      jax.make_jaxpr(lambda *x: attention.attend(*x, ids, kernel='splash'))(
        *arrays[:3]
      )
    )
  assert 'splash_mha_fwd_segmented' in program
  assert 'shard_map' not in program


@pytest.mark.parametrize('shape', SHAPES)
def test_what_cudnn_is_given_computes_the_reference(monkeypatch, shape):
  dot_product_attention = jax.nn.dot_product_attention

  def by_xla(*args, implementation, **kwargs):
    assert implementation == 'cudnn' and args[0].shape[1] % 2 == 0
    return dot_product_attention(*args, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', by_xla)
  arrays, ids = _inputs(shape, 'bfloat16')
  # An odd length.
  arrays, ids = [x[:, 1:] for x in arrays], ids[:, 1:]
  results = _run(lambda *x: attention.attend(*x, kernel='cudnn'), *arrays, ids)
  _assert_near_reference(results, arrays, ids)


@pytest.mark.parametrize(
  'heads, kv_heads, head_dim', [(14, 2, 64), (12, 2, 128), (28, 4, 128)]
)
def test_cudnn_lowers_to_its_flash_kernels(
  monkeypatch, heads, kv_heads, head_dim
):
  # The version of the library, which is not there without a GPU.
  monkeypatch.setattr(
    fused_attention_stablehlo, 'check_cudnn_version', lambda: 91100
  )
  q, k = (
    jax.ShapeDtypeStruct((2, 1024, n, head_dim), jnp.bfloat16)
    for n in (heads, kv_heads)
  )
  ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

  def backward(q, k, v, ids):
    def total(q, k, v):
      out = attention.attend(q, k, v, ids, kernel='cudnn')
      return out.astype(jnp.float32).sum()

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

  program = (
    jax.jit(backward)
    .trace(q, k, k, ids)
    .lower(lowering_platforms=('cuda',))
    .as_text()
  )
  assert re.findall(r'custom_call @__cudnn\$(\w+)\(', program) == [
    'fmhaScaleBiasSoftmax',
    'fmhaScaleBiasSoftmaxBackward',
  ]
  assert program.count('is_flash_attention\\22: true') == 2
  # Scores are never stored: of this size there is one mask for all heads.
  squares = set(re.findall(r'tensor<([\dx]*1024x1024x\w+)>', program))
  assert not [x for x in squares if f'x{heads}x' in x or x.endswith('f32')]


_SCRIPT = """
import contextlib
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo

from planpo_jax import sharding
from planpo_jax.models import attention, splash

interpreted = functools.partial(splash.attend, interpret=True)
ids = np.repeat([[1, 2, 3, 0]], 4, axis=0).repeat([40, 1, 80, 9], axis=1)
ids[1] = np.roll(ids[1], 20)
ids = ids.astype(np.int32)


def inputs(heads, kv_heads):
  rng = np.random.default_rng(0)
  return [
    rng.normal(size=(4, 130, n, 64)).astype(np.float32)
    for n in (heads, kv_heads, kv_heads)
  ]


def run(attend, mesh, q, k, v):
  def total(q, k, v):
    def layer(q, _):
      return attend(q, k, v, ids), None
    out, _ = jax.lax.scan(jax.checkpoint(layer), q, None, length=2)
    return jnp.sin(out).sum(), out

  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
      q, k, v)
  return jax.device_get((out, *grads))


def on_mesh(*args):
  return sharding.map_heads(interpreted, *args)


report = {}
for heads, kv_heads, shapes in (
    (8, 2, [(1, 2, 4), (2, 2, 2)]), (12, 3, [(1, 2, 4)])):
  arrays = inputs(heads, kv_heads)
  expected = run(attention.attend, None, *arrays)
  for shape in shapes:
    mesh = sharding.make_mesh(*shape)
    report[f'{heads}/{kv_heads} {shape}'] = [
      float(np.abs(x - y).max()) for x, y in zip(
        expected, run(on_mesh, mesh, *arrays))]


fused_attention_stablehlo.check_cudnn_version = lambda: 91100
q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(12, 2))
with jax.set_mesh(sharding.make_mesh(1, 2, 4)):
  program = jax.jit(functools.partial(attention.attend, kernel='cudnn')).trace(
    q, k, v, ids).lower(lowering_platforms=('cuda',)).as_text()
report['cudnn'] = re.findall(r'custom_call @__cudnn.* : \\((.*)\\) ->', program)


def error(q, k, v):
  with jax.set_mesh(sharding.make_mesh(1, 2, 4)):
    try:
      attention.attend(q, k, v, ids[:len(q)], kernel='splash')
    except ValueError as e:
      return str(e)

report['bad_rows'] = error(q[:3], k[:3], v[:3])
report['bad_heads'] = error(q[:, :, :6], k, v)
print(json.dumps(report))
"""


@pytest.fixture(scope='module')
def report():
  return eight_devices.report_of(_SCRIPT)


# Two key/value heads over four devices: one each. Three over four, with three
# query heads a device: the query heads of one device read two of them.
@pytest.mark.parametrize(
  'case', ['8/2 (1, 2, 4)', '8/2 (2, 2, 2)', '12/3 (1, 2, 4)']
)
def test_kernels_on_eight_devices_equal_one(report, case):
  assert max(report[case]) < 1e-5


def test_cudnn_sees_the_rows_and_heads_of_its_device(report):
  assert [x.split(', ') for x in report['cudnn']] == [
    [
      'tensor<2x130x3x64xbf16>',
      'tensor<2x130x1x64xbf16>',
      'tensor<2x130x1x64xbf16>',
      'tensor<2x1x130x130xbf16>',
    ]
  ]


def test_rows_and_heads_that_do_not_divide_name_what_would(report):
  assert '3 rows must divide over data x fsdp = 2' in report['bad_rows']
  assert 'try 4 rows' in report['bad_rows']
  assert '6 query heads must divide over tensor=4' in report['bad_heads']
  assert 'try tensor=2' in report['bad_heads']
