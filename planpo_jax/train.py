"""The training loop: every stage once, in order, each one call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np

from planpo_jax import (
  advantages,
  batch,
  build,
  capacity,
  checkpoint,
  compilations,
  dump,
  environment_record,
  episodes,
  evaluate,
  experience,
  learner,
  losses,
  metrics,
  rollout,
  schedules,
  scores,
  selection,
  sharding,
  tasks,
  update,
)
from planpo_jax import config as config_lib
from planpo_jax.losses import kl


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What a configuration asks for, found to be possible.

  `config.sampler.slots` is set; `replay` for a run that plays nothing.
  """

  config: ml_collections.ConfigDict
  network: build.Network
  mesh: jax.sharding.Mesh
  method: advantages.Method
  loss: update.LossFn
  kl_reward: Callable[..., jax.Array] | None
  replay: experience.Replay | None


def train(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  terminal: metrics.Terminal,
) -> int:
  """Trains a policy, or goes on with the run in `workdir`.

  Args:
    config: see configs/base.py.
    workdir: where everything the run writes goes.
    terminal: where progress is told.

  Returns:
    Exit code: 0 after the last step, 128 + signal number if stopped early.

  Raises:
    config_lib.ConfigError: the configuration cannot work.
    checkpoint.CheckpointError: the newest checkpoint cannot be read.
    ValueError, ConnectionError: model, dump, task types or service are not
      there.
  """
  plan = _plan(config, workdir)
  config = plan.config
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(checkpoint.StopSignal())
    env = None
    if plan.replay is None:
      terminal.say(
        f'starting {config.env.workers} workers of {config.env.name}'
        if not config.env.address
        else f'connecting to {config.env.address}'
      )
      env = stack.enter_context(build.Environment(config))
    stack.enter_context(jax.set_mesh(plan.mesh))
    return _train(plan, workdir, terminal, stop, env)


def _plan(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> _Plan:
  """Refuses what cannot work before anything slow starts."""
  config_lib.check(config, jax.device_count())
  name = config.advantage.name
  method = advantages.get(name, **config.advantage[name])
  terms = config.loss[config.loss.name]
  loss = losses.get(config.loss.name, **terms)
  kl_reward = None
  if terms.get('kl_in_reward'):
    kl_reward = functools.partial(
      kl.token_reward, kind=terms.kl_kind, coef=terms.kl_coef
    )
  config_lib.check_workdir(workdir, config)
  config = config.copy_and_resolve_references()
  for key in ('dump', 'replay'):
    if config.rollout[key]:
      path = pathlib.Path(config.rollout[key]).expanduser().absolute()
      config.rollout[key] = str(path)
  network = build.network(
    config, checkpoint.stacked_layers(workdir / 'checkpoints')
  )
  mesh = build.mesh(config, network)
  replay = None
  if config.rollout.replay:
    replay = experience.Replay(
      pathlib.Path(config.rollout.replay),
      steps=config.train.steps,
      context=config.chat.context,
      temperature=config.sampler.temperature,
      split=config.env.train_split,
      num_tokens=network.policy.num_tokens,
    )
  else:
    kept = config_lib.slots_of(workdir)
    if config.sampler.slots is None and kept is not None:
      if kept % sharding.slot_groups(mesh) == 0:  # Else another mesh's.
        config.sampler.slots = kept
    config.sampler.slots = capacity.slots(config, network.policy, mesh)
  if config.rollout.dump:
    config_lib.check_dump(workdir, pathlib.Path(config.rollout.dump))
  return _Plan(config, network, mesh, method, loss, kl_reward, replay)


def _train(
  plan: _Plan,
  workdir: pathlib.Path,
  terminal: metrics.Terminal,
  stop: checkpoint.StopSignal,
  env: build.Environment | None,
) -> int:
  config, mesh = plan.config, plan.mesh
  steps, seed = config.train.steps, config.seed
  compiled = compilations.watch()
  if env is not None:
    train_tasks = env.tasks(config.env.train_split)
    eval_jobs = evaluate.jobs(
      env.tasks(config.env.eval_split), config.eval.episodes
    )
  model = build.model(config, plan.network, mesh)
  leaving = threading.Event()
  if env is not None:
    player = build.Player(
      config,
      model,
      mesh,
      env,
      terminal,
      lambda: stop.requested() or leaving.is_set(),
    )
  method = plan.method
  learn = learner.make(config, method.traits, plan.loss, model.policy, mesh)
  ref_params = model.params  # Never donated: `create` copies them.

  # Claimed only now: a run that could not start leaves no trace.
  lock = config_lib.claim(workdir, config)
  stop.save_first()
  terminal.say(
    f'writing to {workdir}; responses end at ids {model.tokenizer.stop_ids}'
  )
  # Resuming, in this order: the state, then what was written after it goes.
  checkpoints = checkpoint.Checkpoints(
    workdir / 'checkpoints', config.checkpoint.keep
  )
  done = checkpoints.latest_step() or 0
  if done:
    state = checkpoints.restore(learn.shapes)
    terminal.say(f'resuming after step {done} of {steps}')
  else:
    state = learn.create(ref_params)
  if env is not None:
    played = evaluate.environment(env.description)
    if warning := environment_record.keep(workdir, done, played):
      terminal.say(warning)
  writer = metrics.Writer(workdir, done)
  folder = config.rollout.dump and pathlib.Path(config.rollout.dump)
  recorder = dump.Recorder(folder or None, config.chat.context)
  clock = metrics.Clock()

  count = config.train.tasks_per_step

  def lots(step: int) -> list[list[episodes.Task]]:
    """The tasks of step `step`, from 0, and those of its refills."""
    chosen = tasks.at(train_tasks, step, count=count, seed=seed)
    if not config.train.max_refills:
      return [chosen]
    others = tasks.refills(train_tasks, step, count=count, seed=seed)
    return [chosen, *others[: config.train.max_refills]]

  def play(step: int, chosen: Sequence[episodes.Task]) -> rollout.Collected:
    return player.play(
      f'step {step + 1}/{steps}',
      rollout.group_jobs(chosen, config.train.group_size),
      seed=(seed, evaluate.TRAIN_SEED, step),
      max_turns=schedules.horizon(
        step,
        horizons=config.env.horizons,
        horizon_steps=config.env.horizon_steps,
        max_turns=config.env.max_turns,
      ),
      settings=config_lib.settings(config.sampler),
      deadline_s=config.rollout.deadline_s,
    )

  def tabulate(learnt: list[episodes.Episode]) -> episodes.TurnTable:
    table = episodes.tabulate(
      learnt,
      outcome=config.train.outcome,
      success_return=config.train.success_return,
      success_threshold=config.train.success_threshold,
      score_floor=config.train.score_floor,
      score_max=config.train.score_max,
    )
    return method.annotate(table, learnt, model.tokenizer.decode)

  def enough(step: int, played: list[episodes.Episode]) -> bool:
    learnt = episodes.learnable(played)
    if not learnt:
      return False
    signal_E = method.signal(tabulate(learnt), progress=(step + 1) / steps)
    teaching = selection.teaching_groups(learnt, signal_E)
    return len(teaching) >= len(set(lots(step)[0]))

  play_step = experience.refilling(play, lots, enough)
  source: experience.Source
  if plan.replay is not None:
    source = plan.replay
  elif config.rollout.overlap:
    source = experience.Ahead(player.set_params, play_step, steps)
  else:
    source = experience.Live(player.set_params, play_step)

  def evaluation(name: str, step: int) -> evaluate.Summary | None:
    """Plays held-out tasks, always the same with the same random keys.

    None if there are no environments to play in.
    """
    if env is None:
      return None

    def measure() -> evaluate.Summary:
      source.wait()
      player.set_params(state.params)
      collected = player.play(
        f'evaluation {name}',
        eval_jobs,
        seed=(seed, evaluate.SEED),
        max_turns=config.eval.max_turns,
        settings=config_lib.settings(config.eval),
      )
      played = collected.episodes
      result = evaluate.summarize(played, env.description.sets)
      writer.write(step, 'eval', result.scalars() | collected.stats.scalars())
      metrics.write_transcripts(
        workdir / 'transcripts' / f'eval_{name}.jsonl', step, played
      )
      recorder.write(
        f'eval_{name}', step, played, temperature=config.eval.temperature
      )
      terminal.say(f'evaluation {name}: {result}')
      return result

    return evaluate.remember(workdir / f'eval_{name}.json', measure)

  try:
    before = evaluation('before', 0)
    for step in range(done, steps):
      # At the head of the loop, so that one that was interrupted is made up
      # for when the run resumes.
      if config.eval.every and step and step % config.eval.every == 0:
        evaluation(f'{step:06d}', step)
      timers = metrics.Timers()

      with timers.measure('rollout'):
        taken = source.take(step, state.params)
        played = taken.episodes
      # At once: they are wanted most if the step fails.
      recorder.write(
        f'train_{step + 1:06d}',
        step + 1,
        played,
        temperature=config.sampler.temperature,
        staleness=taken.staleness,
      )
      learnt = episodes.learnable(played)
      if not learnt:
        raise ConnectionError(
          f'none of the {len(played)} episodes of step {step + 1} can be '
          'learnt from: they were lost to faults of the environment or met '
          f'their deadline before a turn; the last: {played[-1].ending.value} '
          f'{played[-1].fault}'
        )

      progress = (step + 1) / steps
      with timers.measure('tabulate'):
        table, taught = tabulate(learnt), None
        groups = len({episode.task for episode in learnt})
        # More groups come from refills, or the dump of a run that had some.
        if groups > count or config.train.drop_zero_groups:
          signal_E = method.signal(table, progress=progress)
          taught = advantages.group_diagnostics(table, signal_E)
          learnt = selection.choose(
            learnt, signal_E, groups=count, drop=config.train.drop_zero_groups
          )
          table = tabulate(learnt)
        rows = batch.pack(
          learnt,
          context=config.chat.context,
          row_len=config.learner.row_len,
          minibatches=config.learner.minibatches,
          row_multiple=config.learner.micro_rows,
          seed=step,
        )

      with timers.measure('score'):
        scored = learn.score(state, ref_params, sharding.put_batch(mesh, rows))
        jax.block_until_ready(scored)  # So that the timers tell the truth.

      with timers.measure('advantage'):
        table = scores.to_table(table, rows, scored, plan.kl_reward)
        if taught is None:
          signal_E = method.signal(table, progress=progress)
          taught = advantages.group_diagnostics(table, signal_E)
        adv_R = np.asarray(method.estimate(table, progress=progress))
        rows = batch.with_advantages(
          rows, adv_R, table.token_role_R > 0 if method.traits.roles else None
        )
        if method.targets is not None:
          rows = batch.with_targets(
            rows, *method.targets(table, progress=progress)
          )
        rows = scores.to_batch(sharding.put_batch(mesh, rows), scored)

      with timers.measure('update'):
        reports = []
        for minibatch in batch.split(rows, config.learner.minibatches):
          state, report = learn.update(state, minibatch)
          reports.append(report)
        learning = learner.scalars(reports)  # Waits for the updates.
      done = step + 1

      scalars = {
        **metrics.rollout_scalars(played),
        **taken.scalars(),
        'rollout/groups': groups,
        'rollout/groups_learnt': len({episode.task for episode in learnt}),
        **taught,
        **advantages.diagnostics(table, adv_R),
        **learning,
        **timers.scalars(),
        **compiled.scalars(),
      }
      if done % config.checkpoint.every == 0 or done == steps:
        checkpoints.save(done, state)
      writer.write(done, 'train', scalars)
      metrics.write_transcripts(
        workdir / 'transcripts' / f'train_{done:06d}.jsonl',
        done,
        played[: config.report.transcripts],
      )
      terminal.say(clock.line(done, steps, scalars, timers))
      for warning in metrics.warnings(
        scalars, config.model.dtype, config_lib.settings(config.sampler).filters
      ):
        terminal.say(f'warning: {warning}')
      if stop.requested():
        raise rollout.StoppedError
    after = evaluation('after', steps)
  except rollout.StoppedError:
    if done:
      checkpoints.save(done, state)
    terminal.say(
      f'stopped and saved after step {done} of {steps}; the same command goes '
      'on from there'
      if done
      else 'stopped before the first step was done; there is nothing to save'
    )
    return 128 + stop.number
  except (OSError, ValueError):
    # Between updates the state is whole: what was learnt is worth keeping.
    if done:
      checkpoints.save(done, state)
    raise
  finally:
    leaving.set()
    source.close()
    writer.close()
    checkpoints.close()
    lock.close()
    terminal.say(str(compiled))

  if before is not None:
    summary = {'before': before, 'after': after}
    split = config.env.eval_split
    evaluate.write_summary(workdir / 'summary.json', split, summary)
    rows = summary | evaluate.columns(summary)
    terminal.say(f'held-out tasks ({split} split):\n{evaluate.table(rows)}')
  return 0
