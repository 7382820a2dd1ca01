"""A real pretrained model: SmolLM2-135M-Instruct, as a Qwen2 checkpoint."""

import dataclasses
import functools
import pathlib
import tempfile

import gguf
import jax
import pytest
import qwen_material
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from planpo_jax import chat, sampler, sampling, tokenizer, weights
from planpo_jax.models import qwen2

NEW_TOKENS = 64
# (system or none, what was said so far, the user first). All are 33 to 65
# tokens long, so that the prefill is compiled once.
CONVERSATIONS = (
  (None, ('What is the capital of France?',)),
  (None, ('Write a short story about a robot who finds a garden.',)),
  (
    'You answer in one word.',
    ('Is water wet? Think of a river, a lake and the sea before you answer.',),
  ),
  (
    'You remember numbers.',
    ('I have 12 apples.', 'Hello! 12 apples, noted.', 'How many do I have?'),
  ),
  (
    'You are an agent in a text environment. Answer with one action.',
    ('You are in a kitchen. There is a stove and a sink. Task: boil water.',),
  ),
)


@pytest.fixture(scope='module')
def folder():
  # Half a gigabyte, so it goes as soon as it can.
  with tempfile.TemporaryDirectory(prefix='smollm2_') as path:
    yield qwen_material.write_smollm2(pathlib.Path(path))


@pytest.fixture(scope='module')
def tok(folder):
  return tokenizer.load(str(folder))


def prompt_ids(tok, system, said):
  """What an episode would have as context of the next response."""
  if system is not None:
    tok = dataclasses.replace(tok, system=system)
  fmt = chat.Format(
    tokenizer=tok,
    context='conversation',
    prompt='brief',
    action_format='',
    history=0,
    max_context=512,
    max_response=NEW_TOKENS,
  )
  goal, first = said[0].split(' ', 1)
  talk = fmt.begin(goal)
  context, _ = talk.prompt(first)
  for answer, seen in zip(said[1::2], said[2::2], strict=True):
    talk.respond(context, [*tok.encode(answer), tok.im_end], '', '')
    context, _ = talk.prompt(seen)
  return context


def llama(monkeypatch):
  """The GGUF file itself as transformers reads it: a float32 Llama."""
  # What `from_pretrained(gguf_file=...)` does, but for its need of accelerate,
  # for reading the file twice, and for a table made anew for every tensor.
  names = functools.cache(gguf.get_tensor_name_map)
  monkeypatch.setattr(gguf, 'get_tensor_name_map', names)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**qwen_material.gguf_config())
  )
  tensors = modeling_gguf_pytorch_utils.load_gguf_checkpoint(
    qwen_material.gguf_path(), return_tensors=True, model_to_load=model
  )['tensors']
  missing, unexpected = model.load_state_dict(tensors, strict=False)
  assert missing == ['lm_head.weight'] and not unexpected
  model.tie_weights()
  return model.eval()


def test_its_vocabulary_has_its_own_ids_and_ends(tok):
  # Unlike Qwen2.5, the controls come first and in another order.
  assert (tok.im_start, tok.im_end) == (1, 2)
  assert tok.stop_ids == (0, 2)
  assert tok.num_tokens == 49152
  assert tok.system == (
    'You are a helpful AI assistant named SmolLM, trained by Hugging Face'
  )


def test_prompts_equal_its_own_template(tok, folder):
  oracle = transformers.AutoTokenizer.from_pretrained(
    folder, local_files_only=True
  )
  for system, said in CONVERSATIONS:
    roles = ('user', 'assistant') * len(said)
    goal, first = said[0].split(' ', 1)
    texts = [f'{goal}\n{first}', *said[1:]]
    told = [] if system is None else [('system', system)]
    messages = [*told, *zip(roles, texts, strict=False)]
    assert prompt_ids(tok, system, said) == oracle.apply_chat_template(
      [{'role': role, 'content': text} for role, text in messages],
      add_generation_prompt=True,
      return_dict=False,
    )


def test_greedy_tokens_equal_those_of_transformers(tok, folder, monkeypatch):
  """64 tokens on 5 prompts, sampled in slots side by side.

  transformers reads the GGUF file itself, as a Llama, so the conversion to a
  Qwen2 checkpoint is compared as well.
  """
  prompts = [prompt_ids(tok, *conversation) for conversation in CONVERSATIONS]
  shape = dataclasses.replace(
    weights.read_config(folder), dtype='float32', param_dtype='float32'
  )
  policy = qwen2.create(shape, tok.num_tokens)
  greedy = sampler.Sampler(
    policy,
    weights.load(folder, policy, param_dtype='float32'),
    slots=len(prompts),
    cache_len=256,
    max_new_tokens=NEW_TOKENS,
    settings=sampling.Settings(0.0),
    stop_ids=(),  # Past the end too: every row compares all tokens.
  )
  for slot, context in enumerate(prompts):
    greedy.submit(slot, context, jax.random.key(0))
  ours = {}
  while len(ours) < len(prompts):
    ours |= {response.slot: response.ids for response in greedy.decode()}

  oracle = llama(monkeypatch)
  for slot, context in enumerate(prompts):
    # The best id after every prefix is the next one: the same as decoding
    # greedily, in one pass.
    ids = torch.tensor([[*context, *ours[slot]]])
    with torch.inference_mode():
      logits = oracle(ids[:, :-1]).logits[0, len(context) - 1 :]
    assert len(logits) == NEW_TOKENS
    assert list(ours[slot]) == logits.argmax(-1).tolist()
  assert tok.decode(ours[0]).startswith('The capital of France is Paris.')
