"""Where a step's episodes come from: in which order, with which params."""

import dataclasses
import re
import threading

import make_episodes
import pytest

from planpo_jax import dump, experience, rollout

# Far longer than anything here takes; a bug fails instead of hanging.
PATIENCE_S = 10.0


class Player:
  """Records what is set and played; episodes tell step and params.

  Attributes:
    log: ('set', params, copy) and ('play', step, params), in order.
    threads: of each entry of the log.
    gates: step -> event that its play waits for.
    started: step -> event that its play sets when it begins.
    errors: step -> what its play raises.
    faults: what must never happen.
    playing: a play is under way.
  """

  def __init__(self, hold=(), errors=None):
    self.log, self.threads, self.faults = [], [], []
    self.gates = {step: threading.Event() for step in hold}
    self.started = {step: threading.Event() for step in range(10)}
    self.errors = errors or {}
    self._params, self.playing = None, False

  def set_params(self, params, *, copy=False):
    if self.playing:
      self.faults.append(f'params {params} were set amid a play')
    self._record('set', params, copy)
    self._params = params

  def play(self, step):
    if self.playing:
      self.faults.append(f'step {step} was played beside another')
    self.playing = True
    params = self._params
    self._record('play', step, params)
    self.started[step].set()
    if step in self.gates and not self.gates[step].wait(PATIENCE_S):
      self.faults.append(f'step {step} was never let go')
    self.playing = False
    if step in self.errors:
      raise self.errors[step]
    return collected(step, params)

  def _record(self, *entry):
    self.log.append(entry)
    self.threads.append(threading.get_ident())


def collected(step, params):
  """Episodes and stats that tell the step and the params."""
  played = [make_episodes.episode([step + 1, params], group=step)]
  zeros = dict.fromkeys(
    (field.name for field in dataclasses.fields(rollout.Stats)), 0.0
  )
  return rollout.Collected(played, rollout.Stats(**zeros | {'wall_s': step}))


@pytest.fixture
def closing():
  """Closes sources at the end, whatever the test came to."""
  sources = []
  yield sources.append
  for source, player in sources:
    for gate in player.gates.values():
      gate.set()
    source.close()


def ahead(player, steps, closing):
  source = experience.Ahead(player.set_params, player.play, steps)
  closing((source, player))
  return source


def assert_taken(taken, step, params, staleness):
  wanted = collected(step, params)
  assert taken.episodes == wanted.episodes
  assert taken.stats == wanted.stats
  assert taken.staleness == staleness


# Params of step s are 10 + s below.


def test_live_plays_every_step_with_its_own_params():
  player = Player()
  source = experience.Live(player.set_params, player.play)
  for step in (0, 1, 2):
    assert_taken(source.take(step, 10 + step), step, 10 + step, 0)
  source.wait()
  source.close()
  # Nothing is copied: the params are not donated before the play is over.
  assert player.log == [
    ('set', 10, False),
    ('play', 0, 10),
    ('set', 11, False),
    ('play', 1, 11),
    ('set', 12, False),
    ('play', 2, 12),
  ]
  assert set(player.threads) == {threading.get_ident()}


def test_live_raises_what_the_play_raises():
  player = Player(errors={1: rollout.StoppedError()})
  source = experience.Live(player.set_params, player.play)
  source.take(0, 10)
  with pytest.raises(rollout.StoppedError):
    source.take(1, 11)


def test_ahead_plays_one_step_before_its_turn(closing):
  """The order of all calls, and params one step old from the second on."""
  player = Player()
  source = ahead(player, 3, closing)
  assert_taken(source.take(0, 10), 0, 10, staleness=0)
  assert_taken(source.take(1, 11), 1, 10, staleness=1)
  assert_taken(source.take(2, 12), 2, 11, staleness=1)
  source.wait()
  source.close()
  assert player.log == [
    ('set', 10, False),
    ('play', 0, 10),
    ('set', 10, True),  # The update is about to donate them.
    ('play', 1, 10),
    ('set', 11, True),
    ('play', 2, 11),
    # None of step 3, for which there is no use.
  ]
  assert player.faults == []


def test_ahead_copies_params_before_the_caller_goes_on(closing):
  """The caller sets them; only plays ahead are in the thread."""
  player = Player(hold=[1])
  source = ahead(player, 2, closing)
  source.take(0, 10)
  assert ('set', 10, True) in player.log
  player.gates[1].set()
  source.take(1, 11)
  me = threading.get_ident()
  by_caller = [
    entry
    for entry, thread in zip(player.log, player.threads, strict=True)
    if thread == me
  ]
  assert by_caller == [('set', 10, False), ('play', 0, 10), ('set', 10, True)]
  assert player.log[3:] == [('play', 1, 10)]


@pytest.mark.parametrize('steps', [1, 4])
def test_ahead_never_plays_beyond_the_last_step(steps, closing):
  player = Player()
  source = ahead(player, steps, closing)
  for step in range(steps):
    source.take(step, 10 + step)
  source.wait()
  source.close()
  played = [entry[1] for entry in player.log if entry[0] == 'play']
  assert played == list(range(steps))
  assert player.log[-1][0] == 'play'


def test_ahead_plays_while_the_caller_goes_on(closing):
  """Step 1 is in the middle of its play when the caller is back from step 0."""
  player = Player(hold=[1])
  source = ahead(player, 2, closing)
  source.take(0, 10)
  assert player.started[1].wait(PATIENCE_S)
  # The play waits for what the caller only now does.
  assert player.playing
  player.gates[1].set()
  assert_taken(source.take(1, 11), 1, 10, staleness=1)
  assert player.faults == []


def test_ahead_plays_another_step_than_foreseen_afresh(closing):
  """A run that goes back or forth gets that step, with the params of now.

  They are not set before the play that nobody wants is over.
  """
  player = Player(hold=[1])
  source = ahead(player, 8, closing)
  source.take(0, 10)
  assert player.started[1].wait(PATIENCE_S)
  release = threading.Timer(0.05, player.gates[1].set)
  release.start()
  assert_taken(source.take(5, 15), 5, 15, staleness=0)
  release.join()
  assert_taken(source.take(6, 16), 6, 15, staleness=1)
  source.wait()
  assert player.log[3:] == [
    ('play', 1, 10),
    ('set', 15, False),
    ('play', 5, 15),
    ('set', 15, True),
    ('play', 6, 15),
    ('set', 16, True),
    ('play', 7, 16),
  ]
  assert player.faults == []


def test_ahead_starts_at_the_step_a_run_resumes_at(closing):
  player = Player()
  source = ahead(player, 8, closing)
  assert_taken(source.take(6, 16), 6, 16, staleness=0)
  assert_taken(source.take(7, 17), 7, 16, staleness=1)


@pytest.mark.parametrize('error', [rollout.StoppedError(), KeyError('lost')])
def test_ahead_raises_in_the_next_take_what_the_thread_raised(error, closing):
  player = Player(errors={1: error})
  source = ahead(player, 3, closing)
  assert_taken(source.take(0, 10), 0, 10, staleness=0)
  source.wait()  # Waits only; whoever takes the step has to know.
  with pytest.raises(type(error)) as raised:
    source.take(1, 11)
  assert raised.value is error
  # It was not played again, nor was the step after it begun.
  assert player.log[3:] == [('play', 1, 10)]
  source.close()


def test_ahead_waits_until_nothing_is_played(closing):
  player = Player(hold=[1])
  source = ahead(player, 2, closing)
  source.wait()  # Nothing has been asked for.
  source.take(0, 10)
  assert player.started[1].wait(PATIENCE_S)
  waited = threading.Event()

  def wait():
    source.wait()
    waited.set()

  waiter = threading.Thread(target=wait)
  waiter.start()
  assert not waited.wait(0.1)
  player.gates[1].set()
  waiter.join(PATIENCE_S)
  assert waited.is_set() and not player.playing
  # What was waited for is still there to take.
  assert_taken(source.take(1, 11), 1, 10, staleness=1)


def test_ahead_closes_when_the_play_is_over():
  """No thread is left behind, and a second time does no harm."""
  before = set(threading.enumerate())
  player = Player(hold=[1])
  source = experience.Ahead(player.set_params, player.play, 3)
  source.take(0, 10)
  assert player.started[1].wait(PATIENCE_S)
  closer = threading.Thread(target=source.close)
  closer.start()
  closer.join(0.1)
  assert closer.is_alive()
  player.gates[1].set()
  closer.join(PATIENCE_S)
  assert not closer.is_alive()
  source.close()
  assert set(threading.enumerate()) <= before
  assert player.log[-1] == ('play', 1, 10) and player.faults == []


def test_ahead_closes_before_anything_is_taken():
  player = Player()
  experience.Ahead(player.set_params, player.play, 3).close()
  assert player.log == []


@pytest.mark.parametrize('staleness', [0, 1])
def test_scalars_tell_the_staleness_and_how_it_was_played(staleness):
  stats = collected(4, 1).stats
  scalars = experience.Experience([], staleness, stats).scalars()
  assert scalars == stats.scalars() | {'rollout/staleness': float(staleness)}
  assert scalars['rollout/wall_s'] == 4
  scalars = experience.Experience([], staleness, None).scalars()
  assert scalars == {'rollout/staleness': float(staleness)}


# Ids of the episodes of step s go from 100 s up; the last one has none.
def played(step):
  return [
    *make_episodes.group([(True, [3, 2]), (False, [4])], index=step),
    make_episodes.episode([2], first_id=100 * step, member=2),
    make_episodes.episode([], member=3),
  ]


def write(folder, step, episodes, **changes):
  header = {'context': 'window', 'temperature': 1.0} | changes
  dump.write(folder, f'train_{step:06d}', step, episodes, **header)


@pytest.fixture
def folder(tmp_path):
  """A dump of steps 1 to 3, and an evaluation that is not trained from."""
  for step in (1, 2, 3):
    write(tmp_path, step, played(step), staleness=int(step > 1))
  dump.write(
    tmp_path, 'eval_before', 0, played(9), context='window', temperature=0.5
  )
  return tmp_path


def replay(
  path,
  steps=3,
  context='window',
  temperature=1.0,
  split='train',
  num_tokens=1024,
):
  return experience.Replay(
    path,
    steps=steps,
    context=context,
    temperature=temperature,
    split=split,
    num_tokens=num_tokens,
  )


def test_replay_gives_step_0_what_was_dumped_as_step_1(folder):
  source = replay(folder)
  for step in (0, 2, 1):
    taken = source.take(step, params=None)
    assert taken.episodes == played(step + 1)
    assert taken.staleness == int(step > 0) and taken.stats is None
  source.wait()
  source.close()


def test_replay_takes_a_run_shorter_than_the_dump_or_one_file(folder):
  assert replay(folder, steps=2).take(1, None).episodes == played(2)
  file = folder / 'train_000001.jsonl.gz'
  assert replay(file, steps=1).take(0, None).episodes == played(1)


@pytest.mark.parametrize('steps', [4, 6])
def test_replay_refuses_more_steps_than_there_are(folder, steps):
  with pytest.raises(dump.DumpError) as error:
    replay(folder, steps=steps)
  message = str(error.value)
  assert f'rollout.replay={str(folder)!r} lacks step 4' in message
  assert f'train.steps={steps}' in message
  assert re.search(r'holds the steps 1\D+3\.', message)
  assert 'Lower train.steps' in message


def test_replay_refuses_a_gap(folder):
  (folder / 'train_000002.jsonl.gz').unlink()
  with pytest.raises(dump.DumpError, match='lacks step 2 of train.steps=3'):
    replay(folder)
  assert replay(folder, steps=1).take(0, None).episodes == played(1)


def test_replay_refuses_another_context(folder):
  with pytest.raises(dump.DumpError) as error:
    replay(folder, context='conversation')
  message = str(error.value)
  assert f'rollout.replay={str(folder)!r}' in message
  assert "chat.context='window', not 'conversation'" in message
  fix = re.search(r'set chat.context=(\w+)\.', message)[1]
  replay(folder, context=fix)


def test_replay_refuses_another_temperature(folder):
  with pytest.raises(dump.DumpError) as error:
    replay(folder, temperature=0.7)
  message = str(error.value)
  assert 'sampled at temperature 1.0' in message
  assert 'sampler.temperature=0.7' in message
  fix = re.search(r'set sampler.temperature=([\d.]+)\.', message)[1]
  replay(folder, temperature=float(fix))


def test_replay_refuses_tasks_of_another_split(folder):
  source = replay(folder, split='dev')
  with pytest.raises(dump.DumpError, match="split 'train', not of .*'dev'"):
    source.take(0, None)


@pytest.mark.parametrize('field', ['prompt_ids', 'response_ids'])
def test_replay_refuses_ids_that_the_tokenizer_lacks(tmp_path, field):
  """The largest id may be the last of the tokenizer, wherever it stands."""
  episode = make_episodes.episode([3, 2])
  largest = dataclasses.replace(episode.turns[0], **{field: (5, 700, 6)})
  if field == 'response_ids':
    largest = dataclasses.replace(largest, response_logps=(-1.0, -2.0, -3.0))
  odd = dataclasses.replace(episode, turns=(largest, episode.turns[1]))
  write(tmp_path, 1, [episode])
  write(tmp_path, 2, [episode, odd])
  assert replay(tmp_path, 2, num_tokens=701).take(1, None).episodes[1] == odd
  source = replay(tmp_path, 2, num_tokens=700)
  source.take(0, None)
  with pytest.raises(dump.DumpError) as error:
    source.take(1, None)
  message = str(error.value)
  assert f'step 2 of rollout.replay={str(tmp_path)!r}' in message
  assert 'the id 700' in message and 'has 700 ids' in message
  assert 'give the model that the dump was recorded with' in message


def test_replay_refuses_a_place_without_a_dump(tmp_path):
  with pytest.raises(dump.DumpError, match='rollout.dump=FOLDER'):
    replay(tmp_path / 'nowhere')
