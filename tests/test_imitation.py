"""Warm starts."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from planpo_jax import (
  chat,
  demonstrations,
  env_client,
  env_service,
  episodes,
  imitation,
  rollout,
  sampler,
  sharding,
  tokenizer,
)
from planpo_jax.models import qwen2
from planpo_jax.prompts import actions, full

TOK = tokenizer.load('nano')


def demonstration(*steps):
  return demonstrations.Demonstration(
    task=episodes.Task('toy', 'train', 0, 'fetch'),
    goal='Fetch the key.',
    style='gold',
    steps=tuple(demonstrations.Step(*step) for step in steps),
    score=100.0,
  )


def fmt(**changes):
  return chat.Format(
    **{
      'tokenizer': TOK,
      'context': 'conversation',
      'prompt': 'brief',
      'action_format': '',
      'history': 2,
      'max_context': 256,
      'max_response': 40,
      **changes,
    }
  )


TWO = demonstration(
  ('a hall', 'To the east.', 'go east'), ('a room', 'Take it.', 'take key')
)


def test_a_demonstration_is_what_the_policy_would_have_sampled():
  episode = imitation.to_episode(TWO, fmt())
  first, second = episode.turns
  text = '<think>To the east.</think><action>go east</action>'
  assert first.response_ids == (*TOK.encode(text), TOK.im_end)
  assert full.parse(second.response) == actions.ParsedAction('take key', True)
  # The second prompt is what the chat appends after the first response.
  talk = fmt().begin('Fetch the key.')
  context, _ = talk.prompt('a hall')
  talk.respond(context, first.response_ids, 'a hall', 'go east')
  assert second.prompt_ids == tuple(talk.prompt('a room')[1])


class Reciting:
  """In place of a policy: answers each prompt with the next of `responses`."""

  slots, step_s, active = 1, 1e-3, ()

  def __init__(self, responses):
    self.free = [0]
    self.counters = sampler.Counters()
    self._responses = list(responses)
    self._asked = False

  def reset(self, slot):
    pass

  def submit(self, slot, context, key):
    self._asked = True

  def decode(self, max_steps):
    if not self._asked:
      return []
    self._asked = False
    ids = np.array(self._responses.pop(0))
    return [
      sampler.Response(
        slot=0,
        ids=ids,
        logps=np.zeros(len(ids), np.float32),
        truncated=False,
        first_step=0.0,
      )
    ]


@pytest.fixture(scope='module')
def recorded():
  """Demonstrations of the toy game with lists, and the client they are of."""
  with (
    env_service.LocalService('toy', 1) as service,
    asyncio.Runner() as runner,
  ):
    client = env_client.EnvClient(service.address)
    runner.run(client.connect())
    tasks = runner.run(client.list_tasks('train'))[::24]
    shown = runner.run(
      demonstrations.record(
        client,
        tasks,
        seed=0,
        step_limit=20,
        styles={'gold': 1},
        detour_rate=0.3,
        concurrency=1,
        admissible=True,
      )
    )
    yield runner, client, shown
    runner.run(client.close())


@pytest.mark.parametrize('admissible', [False, True])
@pytest.mark.parametrize('context', chat.CONTEXTS)
def test_prompts_of_demonstrations_are_those_of_rollouts(
  recorded, tmp_path, context, admissible
):
  """A policy that recites a demonstration is asked the same, to the token."""
  runner, client, shown = recorded
  demonstrations.write(tmp_path, shown)
  # A window is tight enough that histories and lists lose a part.
  size = 210 if context == 'window' else 2048
  made = fmt(
    context=context, admissible=admissible, max_context=size, max_response=100
  )
  lists = cut = dropped = 0
  for demonstration in demonstrations.read(tmp_path):
    taught = imitation.to_episode(demonstration, made)
    (played,) = runner.run(
      rollout.collect(
        client,
        Reciting(turn.response_ids for turn in taught.turns),
        made,
        [(demonstration.task, 0)],
        seed=(0,),
        max_turns=20,
      )
    ).episodes
    assert played.success
    for ours, theirs in zip(taught.turns, played.turns, strict=True):
      assert ours.prompt_ids == theirs.prompt_ids
      assert ours.observation == theirs.observation
      assert ours.state_key == theirs.state_key
      text = TOK.decode(ours.prompt_ids)
      lists += 'can take now: ' in text
      cut += '; ...' in text
    dropped += played.dropped_pairs
  assert (lists > 20) == admissible
  assert (cut > 0) == (admissible and context == 'window')
  assert (dropped > 0) == (context == 'window')


@pytest.mark.parametrize('limit', [{'max_context': 40}, {'max_response': 8}])
def test_a_demonstration_that_does_not_fit_is_left_out_whole(limit):
  assert imitation.to_episode(TWO, fmt(**limit)) is None


def test_fitting_learns_the_responses():
  policy = qwen2.create(
    qwen2.Qwen2Config(
      vocab_size=1024,
      hidden_size=32,
      intermediate_size=48,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=16,
      tie_word_embeddings=True,
    ),
    TOK.num_tokens,
  )
  nats = []
  imitation.fit(
    policy,
    qwen2.init_params(policy, jax.random.key(0)),
    [imitation.to_episode(TWO, fmt())],
    mesh=sharding.make_mesh(),
    epochs=40,
    minibatches=1,
    learning_rate=2e-2,
    context='conversation',
    row_len=256,
    micro_rows=1,
    prompt_weight=0.1,
    on_epoch=lambda done, value, params: nats.append(value),
  )
  assert len(nats) == 40
  assert nats[0] > 5.0 and nats[-1] < 0.5


@pytest.mark.parametrize('stacked', [False, True])
def test_sharpened_params_sample_as_at_a_lower_temperature(stacked):
  shape = dataclasses.replace(qwen2.SIZES['nano'], scan_layers=stacked)
  policy = qwen2.create(shape, TOK.num_tokens)
  params = qwen2.init_params(policy, jax.random.key(0))
  tokens_BT = jax.random.randint(jax.random.key(1), (2, 9), 0, 200)
  where = dict(
    positions_BT=np.tile(np.arange(9), (2, 1)),
    segment_ids_BT=np.ones((2, 9), np.int32),
  )

  def logps(params, temperature):
    found, _ = qwen2.token_logps(
      policy, params, tokens_BT, temperature=temperature, **where
    )
    return np.asarray(found)

  sharp = logps(imitation.sharpen(params, 0.5), 1.0)
  np.testing.assert_allclose(sharp, logps(params, 0.5), atol=1e-5)
  assert np.abs(sharp - logps(params, 1.0)).max() > 1e-3
  same = imitation.sharpen(params, 1.0)
  jax.tree.map(np.testing.assert_array_equal, same, params)
