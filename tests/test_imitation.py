"""Warm starts."""

import jax
import pytest

from planpo_jax import (
  chat,
  demonstrations,
  episodes,
  imitation,
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
