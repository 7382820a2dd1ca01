"""Every kind of method through the whole loop, from episodes to checkpoint.

From a dump, so that there are successes to learn from; the policy is nano.
"""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from configs import quickstart
from planpo_jax import checkpoint, dump, episodes, metrics, tokenizer, train
from tests import make_episodes

STEPS = 3
TOKENIZER = tokenizer.load('nano')
TEXTS = (
  '<switch>SWITCH</switch><subgoal>find it</subgoal><action>look</action>',
  '<switch>KEEP</switch><subgoal>find it</subgoal><action>go</action>',
)


def turn(rng, index):
  text = TEXTS[min(index, 1)]
  ids = (*TOKENIZER.encode(text), TOKENIZER.im_end)
  return episodes.Turn(
    prompt_ids=tuple(rng.integers(0, 200, 6).tolist()),
    response_ids=ids,
    response_logps=(-5.0,) * len(ids),
    observation=f'room {rng.integers(3)}',
    response=text,
    action='look',
    reward=0.0,
    valid=True,
    state_key=int(rng.integers(3)),
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Three steps of two groups of four, of equal sizes: half of them succeed."""
  path = tmp_path_factory.mktemp('dump')
  for step in range(1, STEPS + 1):
    rng = np.random.default_rng(step)
    played = []
    for group in range(2):
      for member in range(4):
        count = 1 + (member + group) % 3
        made = make_episodes.episode(
          [1] * count, success=member % 2 == 0, group=group, member=member
        )
        turns = tuple(turn(rng, t) for t in range(count))
        played.append(dataclasses.replace(made, turns=turns))
    dump.write(
      path,
      f'train_{step:06d}',
      step,
      played,
      context='window',
      temperature=1.0,
    )
  return path


def config_of(presets, folder, **changes):
  config = quickstart.get_config(f'{presets},smoke')
  config.update_from_flattened_dict(
    {
      'rollout.replay': str(folder),
      'chat.context': 'window',
      'chat.max_context': 128,
      'learner.row_len': 128,
      'train.steps': STEPS,
      # Presets with one member a group play as many tasks.
      'train.tasks_per_step': 2,
      'train.group_size': 4,
    }
    | changes
  )
  return config


def run(config, workdir):
  silent = metrics.Terminal(open(os.devnull, 'w'))
  assert train.train(config, workdir, silent) == 0
  return [
    json.loads(line)
    for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]


def checkpointed(workdir, step):
  """Every array of a checkpoint, by its path."""
  kept = checkpoint.Checkpoints(workdir / 'checkpoints', keep=None)
  assert kept.latest_step() == step
  state = kept._manager.restore(step)
  return {
    jax.tree_util.keystr(path): np.asarray(x)
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
  }


@pytest.mark.parametrize(
  'preset',
  ['dapo', 'empg', 'gspo', 'hiper', 'ppo_turn', 'rloo_reinforce'],
)
def test_every_kind_of_method_learns_from_a_dump(preset, folder, tmp_path):
  """One of each: penalties for length, entropies, turn ratios, roles, a critic,
  KL in the reward.

  Steps of one size compile in the first one only.
  """
  lines = run(config_of(preset, folder), tmp_path)
  assert [line['step'] for line in lines] == [1, 2, 3]
  for line in lines:
    for key in ('loss/total', 'loss/entropy', 'loss/kl_ref', 'loss/clip_frac'):
      assert line[key] is not None, key
    assert line['advantage/mean_abs'] > 0
    assert line['loss/grad_norm'] > 0
    assert line['loss/skipped_updates'] == 0
    assert line['loss/first_ratio_max'] == pytest.approx(1.0, abs=1e-5)
    assert line['compile/programs'] == lines[0]['compile/programs']
  assert any(key.startswith('critic/') for key in lines[0]) == (
    preset in ('hiper', 'ppo_turn')
  )


def test_hiper_trains_the_parts_and_nothing_else(folder, tmp_path):
  """The end token of a response has no part, nor has a subgoal that is kept."""
  plain = run(config_of('grpo', folder, **{'train.steps': 1}), tmp_path / 'a')
  parts = run(config_of('hiper', folder, **{'train.steps': 1}), tmp_path / 'b')
  played = dump.Dump(folder).episodes(1)
  lengths = {
    text: len(TOKENIZER.encode(text))
    for text in (*TEXTS, '<subgoal>find it</subgoal>')
  }
  whole = sum(len(t.response_ids) for e in played for t in e.turns)
  assert plain[0]['loss/weight'] == whole
  kept = sum(len(e.turns) - 1 for e in played)
  left_out = sum(len(e.turns) for e in played)
  left_out += kept * lengths['<subgoal>find it</subgoal>']
  # Merges across the borders of the parts may move a token or two each.
  assert parts[0]['loss/weight'] == pytest.approx(
    whole - left_out, abs=2 * kept
  )
  assert parts[0]['loss/weight'] < whole


def test_a_critic_is_saved_and_goes_on_as_it_was(folder, tmp_path):
  """Two steps and then the third equal three in one go, to the bit."""
  whole = run(config_of('ppo', folder), tmp_path / 'whole')
  first = config_of('ppo', folder, **{'train.steps': 2})
  run(first, tmp_path / 'parts')
  # `progress` is a share of the steps, which PPO does not read.
  path = tmp_path / 'parts' / 'config.json'
  path.write_text(path.read_text().replace('"steps": 2', '"steps": 3'))
  run(config_of('ppo', folder), tmp_path / 'parts')
  a = checkpointed(tmp_path / 'whole', STEPS)
  b = checkpointed(tmp_path / 'parts', STEPS)
  assert a.keys() == b.keys()
  assert any('critic' in name and 'w_value' in name for name in a)
  for name, x in a.items():
    np.testing.assert_array_equal(x, b[name], err_msg=name)
  value = next(x for name, x in a.items() if 'w_value_DC' in name)
  assert np.abs(value).max() > 0
  # It says 0 at first, which explains nothing.
  assert abs(whole[0]['critic/explained_variance']) < 0.01
  assert all(0 < line['critic/value_loss'] < 200 for line in whole)


def test_groups_that_teach_nothing_are_left_out(folder, tmp_path):
  """Group 1 of the dump made all failures: GRPO trains half of the tokens."""
  changed = tmp_path / 'dump'
  played = [
    dataclasses.replace(e, success=False, score=0.0) if e.task.index else e
    for e in dump.Dump(folder).episodes(1)
  ]
  dump.write(
    changed, 'train_000001', 1, played, context='window', temperature=1.0
  )

  def weight(**changes):
    config = config_of('grpo', changed, **{'train.steps': 1}, **changes)
    name = f'run{len(changes)}'
    (line,) = run(config, tmp_path / name)
    assert line['rollout/episodes'] == 8
    return line['loss/weight']

  kept = sum(
    len(t.response_ids) for e in played if not e.task.index for t in e.turns
  )
  assert weight(**{'train.drop_zero_groups': True}) == kept
  assert weight() > kept
