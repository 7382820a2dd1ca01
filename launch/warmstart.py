r"""Warm starts a policy on expert episodes of the train split.

  python launch/warmstart.py --config=configs/quickstart.py \
    --workdir=runs/warmstart --output=planpo_jax/assets/nano_sciworld

makes the policy that the quickstart starts from. Expert episodes are recorded
through the environment service once and kept in WORKDIR/demonstrations.
"""

import contextlib
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import flags

from planpo_jax import cli

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where demonstrations go.')
_OUTPUT = flags.DEFINE_string(
  'output', None, 'Checkpoint folder to write; default WORKDIR/checkpoint.'
)


def main() -> int:
  if not _WORKDIR.value:
    raise ValueError('--workdir is missing; try --workdir=runs/warmstart.')
  import pathlib

  import jax

  from planpo_jax import (
    build,
    capacity,
    demonstrations,
    evaluate,
    imitation,
    metrics,
    tokenizer,
    weights,
  )
  from planpo_jax import config as config_lib

  config = _CONFIG.value
  config_lib.check(config, jax.device_count(), checkpoint_needed=False)
  settings = config.warmstart
  if not 0 < settings.temperature < math.inf:
    raise config_lib.ConfigError(
      f'warmstart.temperature={settings.temperature} must be above 0; 1 writes '
      'what was learnt as it is.'
    )
  terminal = metrics.Terminal()
  workdir = pathlib.Path(_WORKDIR.value).expanduser().absolute()
  output = pathlib.Path(_OUTPUT.value or workdir / 'checkpoint')
  weights.check_target(output)
  workdir.mkdir(parents=True, exist_ok=True)

  with contextlib.ExitStack() as stack:
    env = stack.enter_context(build.Environment(config))
    folder = workdir / 'demonstrations'
    try:
      shown = demonstrations.read(folder)
      terminal.say(
        f'imitating the {len(shown)} demonstrations kept in {folder}; remove '
        'that folder to record new ones'
      )
      lists = any(step.admissible for d in shown for step in d.steps)
      if config.chat.admissible and not lists:
        terminal.say(
          'warning: chat.admissible=True, but those demonstrations hold no '
          'lists of actions; remove that folder to record them with lists'
        )
    except FileNotFoundError:
      tasks = env.tasks(config.env.train_split) * settings.repeats
      terminal.say(f'recording {len(tasks)} expert episodes')
      recorded = env.run(
        demonstrations.record(
          env.client,
          tasks,
          seed=config.seed,
          step_limit=settings.max_turns,
          styles=settings.styles.to_dict(),
          detour_rate=settings.detour_rate,
          concurrency=env.client.workers,
          admissible=config.chat.admissible,
          progress=lambda done, count: terminal.progress(
            f'recording: {done}/{count} expert episodes'
          ),
        )
      )
      if len(recorded) < len(tasks):
        terminal.say(
          f'kept {len(recorded)} of {len(tasks)} expert episodes; the others '
          'had no solution, or did not win by it within warmstart.max_turns='
          f'{settings.max_turns}'
        )
      demonstrations.write(folder, recorded)
      # What was stored is what is imitated.
      shown = demonstrations.read(folder)

    if settings.vocab_size:
      tokenizer.train(
        demonstrations.corpus(shown),
        settings.vocab_size,
        str(workdir / 'tokenizer'),
      )
    config = config.copy_and_resolve_references()
    if settings.vocab_size:
      # Another vocabulary makes the weights of a checkpoint meaningless.
      config.model.checkpoint = ''
      config.model.tokenizer = str(workdir / 'tokenizer')
    network = build.network(config)
    mesh = build.mesh(config, network)
    stack.enter_context(jax.set_mesh(mesh))
    model = build.model(config, network, mesh)
    config.sampler.slots = capacity.slots(config, network.policy, mesh)
    player = build.Player(config, model, mesh, env, terminal)
    episodes = [imitation.to_episode(d, player.format) for d in shown]
    fitting = [e for e in episodes if e is not None]
    if not fitting:
      raise config_lib.ConfigError(
        f'none of the {len(shown)} demonstrations in {folder} fits '
        f'chat.max_context={config.chat.max_context} and '
        f'chat.max_response={config.chat.max_response}; raise them.'
      )
    terminal.say(
      f'imitating {len(fitting)} of {len(shown)} demonstrations (the others '
      'do not fit chat.max_context or chat.max_response)'
    )

    def save(done: int, nats: float, params) -> None:
      # Every epoch, so that Ctrl-C loses one at most.
      weights.save(
        output,
        model.policy,
        imitation.sharpen(params, settings.temperature),
        eos_ids=model.tokenizer.stop_ids,
        tokenizer_files=model.tokenizer.files,
      )
      terminal.say(
        f'epoch {done}/{settings.epochs}: {nats:.3f} nats a response token; '
        f'wrote {output}'
      )

    imitation.fit(
      model.policy,
      model.params,
      fitting,
      mesh=mesh,
      epochs=settings.epochs,
      minibatches=settings.minibatches,
      learning_rate=settings.learning_rate,
      context=config.chat.context,
      row_len=config.learner.row_len,
      micro_rows=config.learner.micro_rows,
      prompt_weight=settings.prompt_weight,
      on_epoch=save,
    )

    # What was written is what is measured: bfloat16 weights, read back.
    params = weights.load(
      output,
      model.policy,
      param_dtype=config.model.param_dtype,
      shardings=jax.tree.map(lambda x: x.sharding, model.params),
    )
    player.set_params(params)
    played = player.play(
      'evaluation',
      evaluate.jobs(env.tasks(config.env.eval_split), config.eval.episodes),
      seed=(config.seed, evaluate.SEED),
      max_turns=config.eval.max_turns,
      settings=config_lib.settings(config.eval),
    )
    rows = {'warm start': evaluate.summarize(played.episodes)}
    terminal.say(
      f'held-out tasks ({config.env.eval_split} split):\n{evaluate.table(rows)}'
    )
  return 0


if __name__ == '__main__':
  cli.run(main)
