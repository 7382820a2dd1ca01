"""Bad configurations are refused with the value, the rule and a fix."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import trustme
from absl import flags
from ml_collections import config_flags

from configs import base, quickstart, sciworld_7b
from planpo_jax import advantages, losses
from planpo_jax import config as config_lib
from planpo_jax.models import qwen2

ROOT = pathlib.Path(__file__).parent.parent
EXPERIMENTS = sorted(
  path.stem
  for path in (ROOT / 'configs').glob('*.py')
  if path.stem not in ('__init__', 'base')
)


def smoke():
  return quickstart.get_config('smoke')


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_experiment_and_its_smoke_form_pass(name):
  module = importlib.import_module(f'configs.{name}')
  full = module.get_config()
  full.model.checkpoint = full.model.checkpoint or 'given on the command line'
  config_lib.check(full, 1 if full.model.size == 'nano' else 4)
  tiny = module.get_config('smoke')
  config_lib.check(tiny, 1)
  assert (tiny.model.size, tiny.env.name) == ('nano', 'toy')
  assert tiny.train.steps == 3


@pytest.mark.parametrize('preset', sorted(base.presets()))
@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_preset_passes_on_every_experiment(name, preset):
  module = importlib.import_module(f'configs.{name}')
  full = module.get_config(preset)
  full.model.checkpoint = full.model.checkpoint or 'given on the command line'
  config_lib.check(full, 1 if full.model.size == 'nano' else 4)
  config_lib.check(module.get_config(f'{preset},smoke'), 1)
  chosen = base.presets()[preset]
  method = chosen.get('advantage.name', 'planpo')
  assert full.advantage.name == method
  # Their values are accepted, and they are not the defaults under a new name.
  advantages.get(method, **full.advantage[method])
  losses.get(full.loss.name, **full.loss[full.loss.name])
  plain = module.get_config(method)
  plain.model.checkpoint = full.model.checkpoint
  same = full.to_json() == plain.to_json()
  # `planpo_paper` sets what these have; the others have ScienceWorld's.
  paper = ('alfworld_1_5b', 'alfworld_7b', 'webshop_1_5b', 'webshop_7b')
  is_paper = preset == 'planpo_paper' and name in paper
  assert same == (preset == method or is_paper)


def test_presets_apply_in_order_and_smoke_last():
  config = quickstart.get_config('smoke, scaling_inter ,grpo')
  assert config.advantage.name == 'grpo'
  assert config.env.horizons == (2, 4, 6) and config.train.steps == 3
  assert sciworld_7b.get_config('scaling_inter').env.horizons == (10, 20, 30)
  with pytest.raises(ValueError, match="'gspo' and 'ppo' choose two methods"):
    sciworld_7b.get_config('gspo,ppo')
  assert sciworld_7b.get_config('dapo,gspo').loss.name == 'gspo'


def parsed(monkeypatch, *arguments):
  """The configuration as an entry point sees it."""
  values = flags.FlagValues()
  monkeypatch.setattr(sys, 'argv', ['program', *arguments])
  holder = config_flags.DEFINE_config_file('config', flag_values=values)
  values(sys.argv)
  return holder.value.copy_and_resolve_references()


def test_values_that_follow_others_follow_the_command_line_too(monkeypatch):
  """Half a preset, half a flag: the limit is the cap, the buffer a fifth."""
  dapo = parsed(
    monkeypatch,
    '--config=configs/sciworld_1_5b.py:dapo',
    '--config.chat.max_response=1000',
  ).advantage.grpo
  assert (dapo.overlong_limit, dapo.overlong_buffer) == (1000, 200)
  own = parsed(
    monkeypatch,
    '--config=configs/sciworld_1_5b.py:dapo',
    '--config.advantage.grpo.overlong_limit=300',
  )
  assert own.advantage.grpo.overlong_limit == 300
  assert own.chat.max_response == 200
  gspo = parsed(
    monkeypatch,
    '--config=configs/sciworld_1_5b.py:gspo',
    '--config.loss.ppo_clip.kl_coef=0.05',
    '--config.loss.ppo_clip.sampler_cap=2.0',
  ).loss.gspo
  assert (gspo.kl_coef, gspo.sampler_cap) == (0.05, 2.0)
  assert (gspo.ratio, gspo.clip_low) == ('turn', 3e-4)
  tiny = quickstart.get_config('dr_grpo,smoke').copy_and_resolve_references()
  assert tiny.loss.ppo_clip.length == 6 * 12


def test_gspo_keeps_what_the_experiment_sets_for_the_usual_loss():
  assert sciworld_7b.get_config('gspo').loss.gspo.kl_coef == 1e-3
  assert (
    sciworld_7b.get_config('dapo_verl_parity').loss.ppo_clip.kl_coef == 1e-3
  )


def test_a_baseline_of_the_group_needs_a_group():
  config = smoke()
  config.advantage.name = 'reinforce_pp'
  config.train.group_size = 1
  config_lib.check(config, 1)
  config.advantage.reinforce_pp.baseline = 'group'
  with pytest.raises(config_lib.ConfigError, match='group_size=1'):
    config_lib.check(config, 1)


def test_an_evaluation_asks_nothing_of_the_method():
  config = quickstart.get_config('hiper,smoke')
  config.chat.prompt = 'react'
  with pytest.raises(config_lib.ConfigError, match='chat.prompt=hiper'):
    config_lib.check(config, 1)
  config_lib.check(config, 1, training=False)


def test_kl_in_the_reward_needs_a_method_that_reads_it():
  config = smoke()
  config.loss.ppo_clip.kl_in_reward = True
  with pytest.raises(config_lib.ConfigError, match='planpo.*grpo'):
    config_lib.check(config, 1)
  config.advantage.name = 'grpo'
  config_lib.check(config, 1)


def test_the_optimizer_of_a_critic_is_checked_where_there_is_one():
  config = smoke()
  config.critic.weight_decay = float('nan')
  config_lib.check(config, 1)
  config.advantage.name = 'ppo'
  with pytest.raises(config_lib.ConfigError, match='critic.weight_decay=nan'):
    config_lib.check(config, 1)


@pytest.mark.parametrize(
  'changes, told',
  [
    ({'server_flags': "'x"}, 'No closing quotation'),
    ({'server_flags': '--idle-s=9 --port=5'}, '--port=5 is set by the run'),
    ({'server_flags': '--env sciworld'}, '--env is set by the run'),
    ({'token_file': '/etc/hostname'}, 'wants no token; leave it empty'),
  ],
)
def test_flags_of_a_service_of_our_own_are_checked(changes, told):
  config = smoke()
  config.env.update(changes)
  with pytest.raises(config_lib.ConfigError, match=told):
    config_lib.check(config, 1)
  config = smoke()
  config.env.server_flags = '--idle-s=9 "--max-episodes=3"'
  config_lib.check(config, 1)
  assert config_lib.server_flags(config.env.server_flags) == [
    '--idle-s=9',
    '--max-episodes=3',
  ]


def test_an_evaluation_of_everything_is_asked_for_by_0():
  config = smoke()
  config.eval.episodes = 0
  config_lib.check(config, 1)
  config.eval.episodes = -1
  with pytest.raises(config_lib.ConfigError, match='eval.episodes=-1.*or 0'):
    config_lib.check(config, 1)


def test_refills_need_a_method_that_tells_what_teaches():
  config = quickstart.get_config('ppo,smoke')
  config.train.max_refills = 2
  with pytest.raises(config_lib.ConfigError, match="max_refills=2.*'ppo'"):
    config_lib.check(config, 1)


def test_a_run_that_did_not_know_a_key_had_its_default(tmp_path):
  config = smoke()
  older = json.loads(config.to_json())
  del older['train']['max_refills'], older['env']['horizons']
  (tmp_path / 'config.json').write_text(json.dumps(older))
  (tmp_path / 'eval_before.json').write_text('{}')
  config_lib.check_workdir(tmp_path, config)
  config.train.max_refills = 3
  with pytest.raises(config_lib.ConfigError, match='max_refills: 0 there, 3'):
    config_lib.check_workdir(tmp_path, config)


def test_a_run_resumes_with_styles_that_a_config_file_chose(tmp_path):
  config = smoke()
  config.warmstart.styles = {'gold': 0.5, 'search': 0.5}
  (tmp_path / 'config.json').write_text(config.to_json())
  (tmp_path / 'eval_before.json').write_text('{}')
  config_lib.check_workdir(tmp_path, config)
  with pytest.raises(
    config_lib.ConfigError, match='styles.search: 0.5 there, None now'
  ):
    config_lib.check_workdir(tmp_path, smoke())


def test_bad_presets_are_told(monkeypatch):
  with pytest.raises(ValueError, match="'grop' is unknown.*mean 'grpo'"):
    quickstart.get_config('grop')
  monkeypatch.setitem(base.PRESETS, 'odd', {'train.no_such': 1})
  with pytest.raises(ValueError, match="'odd' sets train.no_such=1"):
    quickstart.get_config('odd')


@pytest.mark.parametrize(
  'name,size,billions',
  [
    ('sciworld_1_5b', 'qwen2.5-1.5b', 1.54),
    ('sciworld_7b', 'qwen2.5-7b', 7.62),
  ],
)
def test_paper_experiments(name, size, billions):
  config = importlib.import_module(f'configs.{name}').get_config()
  assert config.model.size == size
  assert config.train.group_size == 8 and config.train.tasks_per_step == 16
  assert config.optimizer.learning_rate == 1e-6
  assert config.loss.ppo_clip.kl_coef == 1e-3
  assert config.advantage.planpo.alpha_init == 0.05
  assert (config.env.max_turns, config.train.steps) == (20, 200)
  policy = qwen2.create(qwen2.SIZES[size], 151665)
  shapes = jax.tree.leaves(qwen2.abstract_params(policy))
  assert sum(x.size for x in shapes) / 1e9 == pytest.approx(billions, abs=0.01)


PAPER = {
  # Prompt tokens, turns, evaluated splits and episodes of each.
  'alfworld': (2048, 50, ('valid_seen', 'valid_unseen'), 0),
  'webshop': (4096, 15, (), 256),
}


@pytest.mark.parametrize('size', ['1_5b', '7b'])
@pytest.mark.parametrize('name', PAPER)
def test_paper_experiments_of_table_1(name, size):
  config = importlib.import_module(f'configs.{name}_{size}').get_config()
  prompt, turns, splits, played = PAPER[name]
  assert (config.env.name, config.env.train_split) == (name, 'train')
  assert config.model.size == f'qwen2.5-{size.replace("_", ".")}'
  chat = config.chat
  assert (chat.context, chat.history, chat.prompt) == ('window', 2, 'full')
  assert chat.admissible
  assert (chat.max_context - chat.max_response, chat.max_response) == (
    prompt,
    512,
  )
  assert config.learner.row_len == chat.max_context
  assert (config.env.max_turns, config.eval.max_turns) == (turns, turns)
  assert config.train.success_return == 10.0
  assert (config.train.tasks_per_step, config.train.group_size) == (16, 8)
  assert config.train.steps == 150
  planpo = config.advantage.planpo
  assert planpo.invalid_penalty == 0.1
  assert (planpo.alpha_init, planpo.alpha_final) == (0.1, 0.05)
  assert config.optimizer.learning_rate == 1e-6
  assert config.loss.ppo_clip.kl_coef == 0.01
  assert config.eval.splits == splits
  assert (config.eval.episodes, config.eval.temperature) == (played, 0.4)


def test_webshop_plays_synthetic_goals_of_the_held_out_split():
  config = importlib.import_module('configs.webshop_7b').get_config()
  assert tuple(config.env.task_types) == ('synthetic',)
  assert config.env.eval_split == 'test' and config.mesh.tensor == 4


@pytest.mark.parametrize(
  'key,value,words',
  [
    ('train.group_size', 1, ('train.group_size=1', 'at least 2', 'try 8')),
    ('train.tasks_per_step', 0, ('train.tasks_per_step=0', 'at least 1')),
    ('advantage.name', 'hiper', ("chat.prompt='brief'", 'chat.prompt=hiper')),
    ('train.outcome', 'grade', ("'grade'", 'binary, graded')),
    ('chat.history', -1, ('chat.history=-1', 'at least 0')),
    ('optimizer.learning_rate', float('nan'), ('learning_rate=nan', 'finite')),
    ('optimizer.b2', 1.0, ('optimizer.b2=1.0', 'below 1')),
    ('optimizer.max_grad_norm', -1.0, ('max_grad_norm=-1.0', 'above 0')),
    ('train.score_floor', 500.0, ('score_floor=500.0', 'below')),
    ('train.success_threshold', -1.0, ('success_threshold=-1.0', 'above 0')),
    ('env.horizons', (True,), ('env.horizons=(True,)',)),
    ('train.success_return', 0.0, ('success_return=0.0', 'above 0', 'try 10')),
    ('train.max_refills', -1, ('max_refills=-1', 'at least 0')),
    ('env.horizons', (10, 0), ('env.horizons=(10, 0)', 'try (10, 20, 30)')),
    ('env.horizon_steps', 0, ('env.horizon_steps=0', 'at least 1')),
    ('learner.minibatches', 3, ('minibatches=3', '2 x 4 = 8', 'try 2')),
    ('advantage.name', 'planpoo', ("'planpoo'", 'grpo, hgpo', "'planpo'?")),
    ('env.name', 'alfword', ("'alfword'", 'sciworld, toy')),
    ('loss.name', 'ppo', ("'ppo'", 'ppo_clip')),
    ('chat.context', 'chat', ("'chat'", 'conversation, window')),
    ('model.size', 'qwen', ("'qwen'", 'nano', 'qwen2.5-7b')),
    ('learner.row_len', 100, ('row_len=100', 'max_context=512', 'row_len=512')),
    ('chat.max_response', 512, ('max_response=512', 'max_context=512')),
    ('sampler.temperature', 0.0, ('temperature=0.0', 'try 1.0')),
    ('sampler.slots', 0, ('sampler.slots=0', 'leave it unset')),
    ('sampler.top_p', 0.0, ('sampler.top_p=0', 'above 0')),
    ('eval.min_p', 1.5, ('eval.min_p=1.5', '0..1')),
    ('rollout.deadline_s', -1.0, ('deadline_s=-1.0', '0 sets no')),
    ('rollout.overlap', True, ('overlap=True', 'ppo_clip.sampler_cap=2.0')),
    ('env.step_timeout_s', 0.0, ('step_timeout_s=0.0', 'try 60')),
    ('env.address', 'nonsense', ("'nonsense'", 'host:port')),
    ('env.address', 'a:1,b', ("'a:1,b'", "'b' is not", 'host:port')),
    ('env.address', 'a:1,', ("'' is not", 'host:port')),
    ('env.address', 'a:1, a:1', ("names 'a:1' twice",)),
    ('env.address', 'a:0', ("'a:0' is not",)),
    ('env.address', 'a:65536', ("'a:65536' is not",)),
    ('env.address', '::1:7777', ("'::1:7777' is not", '[::1]:7777')),
    ('env.address', 'http://a:1', ("'http://a:1' is not",)),
    ('env.tls', True, ('env.tls=True without env.address', 'env.tls=False')),
    ('env.tls_ca', '/no/such', ("env.tls_ca='/no/such'", 'PEM')),
    ('env.tls_ca', __file__, ('holds no certificate in PEM',)),
    ('env.tls_key', __file__, ('go together', "env.tls_cert=''")),
    ('env.token_file', '/no/such', ("'/no/such' without env.address",)),
    ('mesh.data', 3, ('mesh.data=3', '1', 'mesh.fsdp=1')),
  ],
)
def test_refused(key, value, words):
  config = smoke()
  node, _, leaf = key.rpartition('.')
  section = config
  for part in node.split('.'):
    section = section[part]
  section[leaf] = value
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.check(config, 1)
  for word in words:
    assert word in str(error.value)


def test_real_sizes_do_not_start_from_random_weights():
  config = importlib.import_module('configs.sciworld_7b').get_config()
  with pytest.raises(config_lib.ConfigError, match='model.checkpoint'):
    config_lib.check(config, 4)


def test_a_misspelt_key_in_a_file_is_an_error(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(
    'from configs import base\n'
    'def get_config():\n'
    '  config = base.get_config()\n'
    '  config.train.group_sise = 4\n'
    '  return config\n'
  )
  done = subprocess.run(
    [sys.executable, 'launch/train.py', f'--config={path}', '--workdir=x'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert 'group_sise' in done.stderr and 'group_size' in done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(
  ('script', 'says'),
  [
    (
      'train',
      ('Trains a policy', '--workdir\n', '--config\n', 'configs/base.py lists'),
    ),
    ('convert', ('launch/convert.py export --workdir=', '--max-shard-gb\n')),
    ('doctor', ('launch/doctor.py --config=', '--deadline', 'Exit code 0')),
  ],
)
def test_help_tells_the_flags(script, says):
  done = subprocess.run(
    [sys.executable, f'launch/{script}.py', '--help'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')
  for text in says:
    assert text in done.stdout, text


def test_rows_must_divide_over_devices():
  config = smoke()
  config.mesh.fsdp = 8
  config.learner.micro_rows = 12
  with pytest.raises(config_lib.ConfigError, match='micro_rows=12 .* try 8'):
    config_lib.check(config, 8)


def test_claim_keeps_a_workdir_to_one_configuration(tmp_path):
  config_lib.claim(tmp_path / 'run', smoke()).close()
  (tmp_path / 'run' / 'eval_before.json').write_text('{}')
  config_lib.claim(tmp_path / 'run', smoke()).close()
  other = smoke()
  other.optimizer.learning_rate = 0.5
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.claim(tmp_path / 'run', other)
  assert 'optimizer.learning_rate' in str(error.value)
  assert '0.5 now' in str(error.value)


def test_a_run_that_never_played_leaves_its_workdir_free(tmp_path):
  config_lib.claim(tmp_path / 'run', smoke()).close()
  other = smoke()
  other.optimizer.learning_rate = 0.5
  config_lib.claim(tmp_path / 'run', other)


def test_one_process_at_a_time_trains_in_a_workdir(tmp_path):
  lock = config_lib.claim(tmp_path / 'run', smoke())
  with pytest.raises(config_lib.ConfigError, match='another process'):
    config_lib.claim(tmp_path / 'run', smoke())
  lock.close()
  config_lib.claim(tmp_path / 'run', smoke()).close()


@pytest.mark.parametrize('content', ['{"a": ', '[1]', '{}'])
def test_a_damaged_config_is_named(tmp_path, content):
  config_lib.claim(tmp_path / 'run', smoke()).close()
  (tmp_path / 'run' / 'eval_before.json').write_text('{}')
  (tmp_path / 'run' / 'config.json').write_text(content)
  with pytest.raises(config_lib.ConfigError, match='config.json is damaged'):
    config_lib.check_workdir(tmp_path / 'run', smoke())


def written(folder, name, text):
  (folder / name).write_text(text)
  (folder / name).chmod(0o600)
  return str(folder / name)


def test_addresses():
  assert config_lib.addresses('') == []
  assert config_lib.addresses('a.b-c:1, [::1]:65535,10.0.0.1:7777') == [
    'a.b-c:1',
    '[::1]:65535',
    '10.0.0.1:7777',
  ]


@pytest.mark.parametrize(
  'text, token',
  [
    ('secret-of-16-chars\n', 'secret-of-16-chars'),
    ('# ours\n\n  trainer  secret\nother secret2\n', 'secret'),
    ('', None),
    ('# secret\n', None),
    ('a secret too-many', None),
    ('sécret', None),
    ('sec\x07ret', None),
  ],
)
def test_token_files(tmp_path, text, token):
  name = written(tmp_path, 'tokens', text)
  if token is not None:
    assert config_lib.token(name) == token
    return
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.token(name)
  assert name in str(error.value)
  assert 'cret' not in str(error.value).replace(name, '')


@pytest.mark.parametrize('mode', [0o640, 0o604, 0o620, 0o644])
def test_a_token_file_that_others_may_use_is_refused(tmp_path, mode):
  config = smoke()
  config.env.address = 'localhost:1'
  config.env.token_file = str(tmp_path / 'tokens')
  with pytest.raises(config_lib.ConfigError, match='No such file'):
    config_lib.check(config, 1)
  written(tmp_path, 'tokens', 'secret')
  (tmp_path / 'tokens').chmod(mode)
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.check(config, 1)
  assert f'has mode {mode:04o}' in str(error.value)
  assert f"'chmod 600 {tmp_path}/tokens'" in str(error.value)
  assert 'secret' not in str(error.value)
  (tmp_path / 'tokens').chmod(0o400)
  config_lib.check(config, 1)


def test_secrets_need_tls_beyond_this_machine(tmp_path):
  authority = trustme.CA()
  issued = authority.issue_cert('a')
  config = smoke()
  config.env.token_file = written(tmp_path, 'tokens', 'secret')
  for address in ('localhost:1', '127.0.0.2:1,[::1]:1'):
    config.env.address = address
    config_lib.check(config, 1)
  config.env.address = 'localhost:1,10.0.0.1:1'
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.check(config, 1)
  for word in ('env.token_file', '10.0.0.1:1', 'env.tls=True'):
    assert word in str(error.value)
  config.env.tls = True
  config_lib.check(config, 1)

  authority.cert_pem.write_to_path(tmp_path / 'ca')
  issued.cert_chain_pems[0].write_to_path(tmp_path / 'cert')
  issued.private_key_pem.write_to_path(tmp_path / 'key')
  authority.issue_cert('b').private_key_pem.write_to_path(tmp_path / 'other')
  for key in ('ca', 'cert', 'key'):
    config.env[f'tls_{key}'] = str(tmp_path / key)
  config_lib.check(config, 1)
  config.env.tls_key = str(tmp_path / 'other')
  with pytest.raises(config_lib.ConfigError, match='a certificate and its key'):
    config_lib.check(config, 1)
  config.env.tls_key = str(tmp_path / 'key')
  config.env.token_file = ''
  config.env.tls = False
  with pytest.raises(config_lib.ConfigError, match='env.tls_ca is set'):
    config_lib.check(config, 1)


def test_claim_lets_a_run_move(tmp_path):
  config_lib.claim(tmp_path / 'run', smoke()).close()
  (tmp_path / 'run' / 'eval_before.json').write_text('{}')
  moved = smoke()
  moved.env.workers = 9
  moved.mesh.fsdp = 1
  moved.env.address = 'localhost:1'
  moved.env.tls = True
  for key in ('tls_ca', 'tls_cert', 'tls_key', 'token_file'):
    moved.env[key] = 'elsewhere'
  config_lib.claim(tmp_path / 'run', moved)


def test_claim_leaves_foreign_folders_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('precious')
  with pytest.raises(config_lib.ConfigError, match='is not empty'):
    config_lib.claim(tmp_path, smoke())


def test_options():
  assert config_lib.options('b=2; a=x=y') == (('a', 'x=y'), ('b', '2'))
  assert config_lib.options('') == ()
  with pytest.raises(config_lib.ConfigError, match='key=value'):
    config_lib.options('easy')


def test_an_environment_that_is_broken_leaves_the_others(tmp_path):
  (tmp_path / 'envs_server').mkdir()
  for name, text in (
    ('broken', "raise RuntimeError('half written')\n"),
    ('torn', 'def make_env(:\n'),
    ('well', 'def make_env():\n  pass\n'),
  ):
    (tmp_path / 'envs_server' / f'{name}.py').write_text(text)
  done = subprocess.run(
    [sys.executable, '-m', 'envs_server', '--env=broken'],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2 and 'Traceback' not in done.stderr
  told = 'envs_server.broken is left out: it cannot be imported (RuntimeError: '
  assert done.stderr.count(f'{told}half written)') == 1
  assert done.stderr.count('envs_server.torn is left out') == 1
  last = done.stderr.splitlines()[-1]
  assert last.endswith(
    "unknown environment 'broken'; known: alfworld, sciworld, toy, webshop, "
    'well.'
  )


def test_an_option_that_is_off_can_be_set():
  config = base.get_config()
  assert config.loss.ppo_clip.dual_clip is None
  config.update_from_flattened_dict({'loss.ppo_clip.dual_clip': 3.0})
  assert config.loss.ppo_clip.dual_clip == 3.0


def test_base_lists_hyperparameters_of_every_method():
  config = base.get_config()
  assert config.advantage.planpo.alpha_init == 0.1
  assert 'eps' in config.advantage.grpo
  assert config.loss.ppo_clip.clip_low == 0.2


@pytest.mark.parametrize(
  'given,words',
  [
    (['--config.train.stepz=3'], ('config.train.stepz', 'config.train.steps')),
    (
      ['--config.learning_rate=3'],
      ('config.learning_rate', 'config.optimizer.learning_rate'),
    ),
    (
      ['--config.advantage.planpo.alpha_int=1'],
      ('config.advantage.planpo.alpha_init',),
    ),
    (['--config.train.steps=abc'], ("'abc'", 'config.train.steps')),
    (['--config=configs/quickstart.py:smok'], ("'smok'", 'known are smoke')),
    (['--config=configs/nowhere.py'], ('configs/nowhere.py', 'cannot')),
    (['--confgi=3'], ("'confgi'",)),
    ([], ('--workdir is missing',)),
  ],
)
def test_flags_are_refused_with_code_2(given, words):
  done = subprocess.run(
    [
      sys.executable,
      'launch/train.py',
      '--config=configs/quickstart.py:smoke',
      *given,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('error: ') and 'Traceback' not in done.stderr
  for word in words:
    assert word in done.stderr
