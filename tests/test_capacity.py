"""How many slots fit, against numbers worked by hand.

Of the nano shape (L 4, N 4, K 2, H 48, D 192, F 640, 1024 rows, tied): a
context of 300 tokens lies in three pieces of 128 positions, so a slot takes

  keys and values  4 L x 2 x 2 K x 48 H x 384 = 294912 numbers
  sampling         3 x 1024 float32 = 12288 bytes

and the params are

  block  384 norms, 36864 + 192 q, 2 x (18432 + 96) k and v, 36864 o,
         3 x 122880 feed-forward = 480000
  all    4 x 480000 + 196608 embedding + 192 norm = 2116800
"""

import dataclasses
import re
import types

import jax
import psutil
import pytest

from configs import base
from planpo_jax import capacity, compilations, sharding
from planpo_jax import config as config_lib
from planpo_jax.models import qwen2
from tests import eight_devices

GIB = 2**30

CACHE = 294912
LOGITS = 12288
SLOT = 4 * CACHE + LOGITS

PARAMS = 2116800
NORMS = 4 * 384 + 192
# Training in float32: params, reference, two moments, gradient.
FIXED = 5 * 4 * PARAMS


def make_policy(size='nano', **changes):
  shape = dataclasses.replace(qwen2.SIZES[size], **changes)
  return qwen2.create(shape, shape.vocab_size)


@pytest.fixture(scope='module')
def nano():
  return make_policy()


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh()


@pytest.fixture
def config():
  """16 x 8 episodes a step, 200 of an evaluation, as many workers as wanted."""
  config = base.get_config()
  config.chat.max_context = 300
  config.env.workers = 1000
  return config


@pytest.fixture
def device(monkeypatch):
  """Sets the memory of a device."""

  def set_bytes(count):
    monkeypatch.setattr(capacity, 'device_bytes', lambda device: count)

  set_bytes(1000 * GIB)
  return set_bytes


def limit_of(count, each=SLOT, fixed=FIXED):
  """The least memory of which four fifths hold so many slots."""
  return -(-(fixed + count * each) * 5 // 4)


# What a slot takes.


@pytest.mark.parametrize(
  'max_context, positions',
  [
    (1, 128),
    (128, 128),
    (129, 256),
    (256, 256),
    (300, 384),
    (512, 512),
    (513, 640),
    (1000, 1024),
    (4096, 4096),
  ],
)
@pytest.mark.parametrize('dtype, itemsize', [('float32', 4), ('bfloat16', 2)])
def test_slot_bytes(config, mesh, max_context, positions, dtype, itemsize):
  """L x (keys and values) x K x H x positions, and float32 logits."""
  config.chat.max_context = max_context
  cache = 4 * 2 * 2 * 48 * positions * itemsize
  policy = make_policy(dtype=dtype)
  for count in (1, 5):
    found = capacity.slot_bytes(config, policy, mesh, count)
    assert found == count * (cache + 3 * 1024 * 4)


def test_slot_bytes_do_not_depend_on_how_layers_are_kept(config, mesh):
  stacked = make_policy(scan_layers=True, on_cpu=False)
  assert capacity.slot_bytes(config, stacked, mesh, 5) == 5 * SLOT


def test_slot_bytes_count_the_spare_rows_of_the_vocabulary(config, mesh):
  """1003 ids are kept in 1024 rows."""
  policy = make_policy(vocab_size=1003)
  assert capacity.slot_bytes(config, policy, mesh, 1) == SLOT


# What does not grow with the slots.


@pytest.mark.parametrize(
  'dtype, param_dtype, overlap, training, copies, cast',
  [
    # The params are sampled from as they are.
    ('float32', 'float32', False, True, 5 * 4, None),
    ('float32', 'float32', False, False, 1 * 4, None),
    ('bfloat16', 'bfloat16', False, True, 5 * 2, None),
    # All but the norms are cast for sampling.
    ('bfloat16', 'float32', False, True, 5 * 4, (2, 4)),
    ('bfloat16', 'float32', False, False, 1 * 4, (2, 4)),
    ('float32', 'bfloat16', False, True, 5 * 2, (4, 2)),
    # The update must not take them from under the sampler.
    ('float32', 'float32', True, True, 5 * 4, (4, 4)),
    ('bfloat16', 'float32', True, True, 5 * 4, (2, 4)),
  ],
)
def test_fixed_bytes(
  config, mesh, dtype, param_dtype, overlap, training, copies, cast
):
  config.rollout.overlap = overlap
  policy = make_policy(dtype=dtype, param_dtype=param_dtype)
  wanted = copies * PARAMS
  if cast:
    matrix, norm = cast
    # Norms stay as they are, so the same arrays serve both.
    wanted += (PARAMS - NORMS) * matrix + NORMS * norm * overlap
  assert capacity.fixed_bytes(config, policy, mesh, training) == wanted


@pytest.mark.parametrize('tied', [True, False])
def test_fixed_bytes_of_a_critic(config, mesh, tied):
  """Params, two moments and gradient of the backbone and one head of width 192.

  No reference, and no head over the vocabulary, be there one or not. Nothing of
  it is sampled from, nor needed to evaluate.
  """
  policy = make_policy(tie_word_embeddings=tied)
  plain, evaluated = (
    capacity.fixed_bytes(config, policy, mesh, training)
    for training in (True, False)
  )
  config.advantage.name = 'ppo'
  found = capacity.fixed_bytes(config, policy, mesh, True)
  assert found - plain == 4 * 4 * (PARAMS + 192)
  assert capacity.fixed_bytes(config, policy, mesh, False) == evaluated


# Slots, unset.


@pytest.mark.parametrize(
  'workers, tasks, evaluated, training, wanted',
  [
    (1, 16, 200, True, 1),
    (7, 16, 200, True, 7),  # Below 8 nothing is rounded.
    (8, 16, 200, True, 8),
    (12, 16, 200, True, 8),
    (9, 16, 200, True, 8),  # A ninth of the workers resets ahead.
    (40, 16, 200, True, 32),
    (72, 16, 200, True, 64),
    (1000, 16, 200, True, 200),  # Evaluation has the most episodes.
    (1000, 16, 100, True, 128),  # Training has.
    (1000, 2, 9, True, 16),
    (1000, 16, 100, False, 96),  # There is evaluation only.
    (1000, 16, 3, False, 3),
    (9, 2, 0, False, 8),  # All of a split: as many as the workers allow.
  ],
)
def test_as_many_slots_as_there_is_to_play(
  config, nano, mesh, device, workers, tasks, evaluated, training, wanted
):
  config.env.workers = workers
  config.train.tasks_per_step = tasks
  config.eval.episodes = evaluated
  assert capacity.slots(config, nano, mesh, training=training) == wanted


def test_workers_of_a_service_elsewhere_are_not_counted(
  config, nano, mesh, device
):
  config.env.workers = 4
  assert capacity.slots(config, nano, mesh) == 4
  config.env.address = 'localhost:7777'
  assert capacity.slots(config, nano, mesh) == 200


@pytest.mark.parametrize(
  'fit, wanted', [(1, 1), (5, 5), (7, 7), (8, 8), (9, 8), (31, 24), (32, 32)]
)
def test_as_many_slots_as_fit(config, nano, mesh, device, fit, wanted):
  device(limit_of(fit))
  assert capacity.slots(config, nano, mesh) == wanted


def test_a_byte_less_than_a_slot_takes_is_a_slot_less(
  config, nano, mesh, device
):
  # Two of the memory, of which four fifths are used.
  for less, wanted in ((0, 5), (2, 4)):
    device(limit_of(5) - less)
    assert capacity.slots(config, nano, mesh) == wanted


def test_evaluation_has_the_room_of_the_optimizer(config, nano, mesh, device):
  """4 copies of the params, 4 x 8467200 bytes, make room for 28.4 slots."""
  device(limit_of(2))
  assert capacity.slots(config, nano, mesh, training=True) == 2
  assert capacity.slots(config, nano, mesh, training=False) == 24
  config.sampler.slots = 30
  assert capacity.slots(config, nano, mesh, training=False) == 30
  config.sampler.slots = 31
  with pytest.raises(config_lib.ConfigError):
    capacity.slots(config, nano, mesh, training=False)


# Slots, given.


@pytest.mark.parametrize('chosen', [1, 3, 13, 19])
def test_given_slots_are_kept(config, nano, mesh, device, chosen):
  """Whatever else is of use, and not rounded."""
  device(limit_of(19))
  config.sampler.slots = chosen
  config.eval.episodes = config.train.tasks_per_step = 1
  assert capacity.slots(config, nano, mesh) == chosen


@pytest.mark.parametrize('fit, fix', [(19, 16), (8, 8), (5, 5), (1, 1)])
def test_too_many_slots_are_refused_with_a_number_that_fits(
  config, nano, mesh, device, fit, fix
):
  device(limit_of(fit))
  config.sampler.slots = fit + 1
  with pytest.raises(config_lib.ConfigError) as error:
    capacity.slots(config, nano, mesh)
  message = str(error.value)
  assert f'sampler.slots={fit + 1} x chat.max_context=300 tokens' in message
  found = int(re.search(r'try --config.sampler.slots=(\d+)\.$', message)[1])
  assert found == fix
  config.sampler.slots = found
  assert capacity.slots(config, nano, mesh) == found


@pytest.mark.parametrize('chosen', [None, 6])
def test_not_even_one_slot_fits(config, nano, mesh, device, chosen):
  """A context of 128 tokens takes a third, which does fit."""
  device(limit_of(1) - 2)
  config.sampler.slots = chosen
  with pytest.raises(config_lib.ConfigError) as error:
    capacity.slots(config, nano, mesh)
  message = str(error.value)
  assert f'sampler.slots={chosen or 1} x chat.max_context=300' in message
  assert 'lower chat.max_context' in message
  assert 'mesh.tensor' in message and 'mesh.fsdp' in message
  assert 'try --config.sampler.slots' not in message
  config.chat.max_context = 128
  config.sampler.slots = None
  assert capacity.slots(config, nano, mesh) == 2


@pytest.mark.parametrize('chosen', [None, 1])
def test_not_even_the_params_fit(config, nano, mesh, device, chosen):
  """Less than nothing is left, which is told as nothing."""
  device(FIXED // 2)
  config.sampler.slots = chosen
  with pytest.raises(config_lib.ConfigError, match=r'only 0\.00 are left'):
    capacity.slots(config, nano, mesh)


def test_7b_on_a_device_of_95_gib(mesh, device):
  """Evaluation in bfloat16 of params in float32, contexts of 4096 tokens.

  Params: a block of D 3584, N 28, K 4, H 128, F 18944 has 25690112 in q and o,
  3670016 in k and v, 4608 biases, 203685888 in feed-forward, 7168 norms:
  233057792; 28 blocks, 2 x 152064 x 3584 at both ends and 3584 norms make
  7615616512, of which 204288 are norms. In float32 30462466048 bytes, all but
  the norms cast 15230824448: together 45693290496, 42.56 GiB.

  Left of 76 GiB: 35910270976 bytes, 33.44 GiB. A slot takes 28 x 2 x 4 x 128 x
  4096 x 2 = 234881024 bytes and 3 x 152064 x 4 = 1824768: 236705792. So 151
  fit, or 144 rounded; 200 would take 44.09 GiB.
  """
  programs = compilations.watch().programs
  arrays = len(jax.live_arrays())
  policy = make_policy('qwen2.5-7b', dtype='bfloat16')
  config = base.get_config()
  config.chat.max_context = 4096
  config.env.address = 'localhost:7777'
  device(95 * GIB)
  assert capacity.fixed_bytes(config, policy, mesh, False) == 45693290496
  assert capacity.slot_bytes(config, policy, mesh, 1) == 236705792
  assert capacity.slots(config, policy, mesh, training=False) == 144
  config.sampler.slots = 151
  assert capacity.slots(config, policy, mesh, training=False) == 151
  config.sampler.slots = 200
  with pytest.raises(config_lib.ConfigError) as error:
    capacity.slots(config, policy, mesh, training=False)
  message = str(error.value)
  for part in (
    'sampler.slots=200 x chat.max_context=4096 tokens takes 44.09 GiB',
    'of 95.00 GiB only 33.44 are left',
    'take 42.56, 20% are kept',
    'try --config.sampler.slots=144.',
  ):
    assert part in message
  # Training takes 5 x 28.37 GiB for the params alone.
  config.sampler.slots = None
  with pytest.raises(config_lib.ConfigError, match='mesh.fsdp'):
    capacity.slots(config, policy, mesh)
  # All of this was reckoned; no weight was made.
  assert compilations.watch().programs == programs
  assert len(jax.live_arrays()) == arrays


# The memory of a device.


def test_device_bytes_are_what_the_device_says():
  device = types.SimpleNamespace(memory_stats=lambda: {'bytes_limit': 12345})
  assert capacity.device_bytes(device) == 12345


@pytest.mark.parametrize('stats', [None, {}, {'bytes_in_use': 5}])
def test_devices_that_do_not_tell_share_the_host(monkeypatch, stats):
  """What it has, not what is free at the moment."""
  host = types.SimpleNamespace(total=1001, available=7)
  monkeypatch.setattr(psutil, 'virtual_memory', lambda: host)
  monkeypatch.setattr(jax, 'local_device_count', lambda: 4)
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  assert capacity.device_bytes(device) == 250


# Several devices, which have to exist before jax starts.

_SCRIPT = """
import dataclasses
import json

import jax

from configs import base
from planpo_jax import capacity, compilations, sharding
from planpo_jax import config as config_lib
from planpo_jax.models import qwen2


def make_policy(size, **changes):
  shape = dataclasses.replace(qwen2.SIZES[size], **changes)
  return qwen2.create(shape, shape.vocab_size)


def slots(limit, chosen, policy, mesh, training=True):
  capacity.device_bytes = lambda device: limit
  with config.unlocked():
    config.sampler.slots = chosen
  try:
    return capacity.slots(config, policy, mesh, training=training)
  except config_lib.ConfigError as error:
    return str(error)


programs = compilations.watch().programs
config = base.get_config()
config.chat.max_context = 300
config.eval.episodes = 60
config.train.tasks_per_step = 5
policy = make_policy('nano')
report = {'meshes': {}}
for shape in ((8, 1, 1), (1, 8, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2)):
  mesh = sharding.make_mesh(*shape)
  groups = shape[0] * shape[1]
  each = capacity.slot_bytes(config, policy, mesh, groups)
  fixed = capacity.fixed_bytes(config, policy, mesh, True)
  small = -(-(fixed + 3 * each) * 5 // 4)  # Three slots a group.
  found = {
    'slot_bytes': [
      capacity.slot_bytes(config, policy, mesh, n * groups) for n in (1, 5)],
    'fixed': fixed,
    'fixed_eval': capacity.fixed_bytes(config, policy, mesh, False),
  }
  for workers in (1, 5, 8, 13, 23, 1000):
    config.env.workers = workers
    found[f'workers_{workers}'] = slots(2**40, None, policy, mesh)
  found |= {
    'small': slots(small, None, policy, mesh),
    'smaller': slots(small - 2, None, policy, mesh),
    'most': slots(small, 3 * groups, policy, mesh),
    'too_many': slots(small, 4 * groups, policy, mesh),
    'uneven': slots(2**40, 3 * groups - 1, policy, mesh),
    'none': slots(fixed * 5 // 4, None, policy, mesh),
  }
  report['meshes'][str(shape)] = found

mesh = sharding.make_mesh(4, 2, 1)
report['cast'] = capacity.fixed_bytes(
  config, make_policy('nano', dtype='bfloat16'), mesh, True)
big = make_policy('qwen2.5-7b', dtype='bfloat16')
mesh = sharding.make_mesh(1, 2, 4)
config.chat.max_context = 4096
config.eval.episodes = 200
report['7b'] = {
  'fixed': capacity.fixed_bytes(config, big, mesh, True),
  'slots': slots(32 * 2**30, None, big, mesh),
  'most': slots(32 * 2**30, 152, big, mesh),
  'too_many': slots(32 * 2**30, 154, big, mesh),
}
report['programs'] = compilations.watch().programs - programs
report['arrays'] = len(jax.live_arrays())
print(json.dumps(report))
"""

# Groups of devices with slots of their own, and ways that K = 2 is split.
SHAPES = {
  '(8, 1, 1)': (8, 1),
  '(1, 8, 1)': (8, 1),
  '(4, 2, 1)': (8, 1),
  '(1, 2, 4)': (2, 1),  # 2 heads do not divide over 4 devices.
  '(2, 2, 2)': (4, 2),
}


@pytest.fixture(scope='module')
def report():
  return eight_devices.report_of(_SCRIPT)


@pytest.mark.parametrize('shape', SHAPES)
def test_slot_bytes_of_a_device_of_eight(report, shape):
  """n slots are n / groups of a device; `tensor` splits K where it divides."""
  _, split = SHAPES[shape]
  one, five = report['meshes'][shape]['slot_bytes']
  assert one == 4 * CACHE // split + LOGITS
  assert five == 5 * one


@pytest.mark.parametrize(
  'shape, trained, sampled',
  [
    # Params are whole on each device and sampled from as they are.
    ('(8, 1, 1)', (1, 1, 1, 1), None),
    # Split over fsdp in training, gathered for sampling; biases are whole.
    ('(1, 8, 1)', (8, 8, 1, 1), (1, 1, 1, 1)),
    ('(4, 2, 1)', (2, 2, 1, 1), (1, 1, 1, 1)),
    # tensor = 4 divides neither the heads of k and v nor their biases.
    ('(1, 2, 4)', (8, 2, 4, 1), (4, 1, 4, 1)),
    ('(2, 2, 2)', (4, 4, 2, 2), (2, 2, 2, 2)),
  ],
)
def test_fixed_bytes_of_a_device_of_eight(report, shape, trained, sampled):
  kinds = (
    4 * (2 * 36864 + 3 * 122880) + 196608,
    4 * 2 * 18432,
    4 * 192,
    4 * 2 * 96,
  )

  def held(*ways):
    """Bytes, from the ways in which each kind of param is split."""
    sizes = zip(kinds, ways, strict=True)
    return 4 * (sum(size // way for size, way in sizes) + NORMS)

  # What is split alike for both is held once.
  extra = 4 * sum(
    size // way
    for size, way, before in zip(
      kinds, sampled or trained, trained, strict=True
    )
    if way != before
  )
  found = report['meshes'][shape]
  assert found['fixed'] == 5 * held(*trained) + extra
  assert found['fixed_eval'] == held(*trained) + extra


def test_a_cast_copy_as_large_as_a_half_of_the_params_counts(report):
  """Half of the float32 matrices over fsdp=2, all of them in bfloat16.

  Only the biases, 4 x 384, tell the sizes apart: they are whole on each. Norms
  are not cast.
  """
  matrices, biases = PARAMS - NORMS - 4 * 384, 4 * 384
  trained = 4 * (matrices // 2 + biases + NORMS)
  sampled = 2 * (matrices + biases)
  assert report['cast'] == 5 * trained + sampled


@pytest.mark.parametrize('shape', SHAPES)
def test_slots_divide_over_the_groups(report, shape):
  """The most that is of use, down to a multiple of the groups and of 8."""
  groups, _ = SHAPES[shape]
  found = report['meshes'][shape]
  wanted = {
    # At least one a group, be there fewer workers.
    8: {1: 8, 5: 8, 8: 8, 13: 8, 23: 16, 1000: 56},
    4: {1: 4, 5: 4, 8: 8, 13: 8, 23: 16, 1000: 56},
    2: {1: 2, 5: 4, 8: 8, 13: 8, 23: 16, 1000: 56},
  }[groups]
  assert {n: found[f'workers_{n}'] for n in wanted} == wanted


@pytest.mark.parametrize('shape', SHAPES)
def test_slots_of_all_groups_are_counted(report, shape):
  """Three a group fit; a byte less and it is two a group."""
  groups, _ = SHAPES[shape]
  found = report['meshes'][shape]
  assert found['most'] == 3 * groups
  assert found['small'] == {8: 24, 4: 8, 2: 6}[groups]
  assert found['smaller'] == {8: 16, 4: 8, 2: 4}[groups]
  fix = {8: 24, 4: 8, 2: 6}[groups]
  assert f'sampler.slots={4 * groups} x ' in found['too_many']
  assert f'try --config.sampler.slots={fix}.' in found['too_many']


@pytest.mark.parametrize('shape', SHAPES)
def test_slots_that_do_not_divide_are_refused(report, shape):
  groups, _ = SHAPES[shape]
  message = report['meshes'][shape]['uneven']
  assert f'sampler.slots={3 * groups - 1} must divide over' in message
  assert f'data x fsdp = {groups} ' in message
  assert f'try --config.sampler.slots={3 * groups}.' in message


@pytest.mark.parametrize('shape', SHAPES)
def test_not_even_one_slot_a_group_fits(report, shape):
  groups, _ = SHAPES[shape]
  message = report['meshes'][shape]['none']
  assert f'sampler.slots={groups} x ' in message
  assert 'lower chat.max_context' in message


def test_7b_in_training_on_eight_devices_of_32_gib(report):
  """fsdp=2 x tensor=4: params in float32, cast to bfloat16 for sampling.

  Of 7615616512 params 204288 norms are whole, 129024 biases are split by 4,
  the rest by 8: 952146944 a device, 5 x 4 bytes each. The cast copy is split
  by 4: 1903853056 x 2 bytes, 3807706112; the norms are not copied.

  Left of 25.6 GiB: 27487790694 - 22850644992 = 4637145702 bytes. One slot a
  group takes 234881024 / 4 + 1824768 = 60545024, so there is room for 76 in
  each of 2 groups.
  """
  found = report['7b']
  assert found['fixed'] == 22850644992
  assert found['slots'] == found['most'] == 152
  assert 'try --config.sampler.slots=152.' in found['too_many']


def test_nothing_is_allocated_or_compiled_on_eight_devices(report):
  assert report['programs'] == 0 and report['arrays'] == 0
