"""The engine's own solution of each of ScienceWorld's 30 tasks wins."""

import asyncio

import pytest

from envs_server import env, sciworld
from planpo_jax import env_client, env_service, episodes

# Variation 0 of every type is one that its solution wins.
VARIATION = 0
# Of the solutions, unsimplified; two kinds of task take 145 actions and more.
SHORTEST, LONGEST = 5, 178


@pytest.fixture(scope='module')
def played():
  """{task type: (solution, observations of an episode it was played in)}.

  The episode's step limit is the length of the solution.
  """

  async def play(client, free, task):
    async with free:
      session = client.session(task, step_limit=0, expert=True)
      try:
        gold = (await session.reset()).expert_actions
      finally:
        await session.close()
      session = client.session(task, step_limit=len(gold))
      try:
        seen = [await session.reset()]
        for action in gold:
          if seen[-1].ending is not None:
            break
          seen.append(await session.step(action))
      finally:
        await session.close()
      return gold, seen

  async def run(address):
    client = env_client.EnvClient(address)
    await client.connect()
    try:
      described = await client.describe()
      tasks = [
        t
        for t in await client.list_tasks('train')
        if t.index == VARIATION and t.name in described.task_names
      ]
      free = asyncio.Semaphore(2)
      found = await asyncio.gather(*(play(client, free, t) for t in tasks))
      assert [t.name for t in tasks] == list(described.task_names)
      return {t.name: one for t, one in zip(tasks, found, strict=True)}
    finally:
      await client.close()

  with env_service.LocalService('sciworld', 2) as service:
    return asyncio.run(run(service.address))


def test_all_thirty_are_won_with_100_points(played):
  assert len(played) == 30
  results = {
    name: (seen[-1].score, seen[-1].success, seen[-1].ending)
    for name, (_, seen) in played.items()
  }
  won = (100.0, True, episodes.Ending.TERMINATED)
  assert results == dict.fromkeys(played, won)


def test_success_comes_with_the_last_step_and_within_the_limit(played):
  for name, (gold, seen) in played.items():
    assert [o.success for o in seen[:-1]] == [False] * (len(seen) - 1), name
    assert all(0.0 <= o.score < 100.0 for o in seen[:-1]), name
    assert len(seen) - 1 <= len(gold), name
    rewards = sum(o.reward for o in seen)
    assert rewards == pytest.approx(100.0 - seen[0].score), name
  lengths = [len(gold) for gold, _ in played.values()]
  assert (min(lengths), max(lengths)) == (SHORTEST, LONGEST)
  # Some solutions go on after the end, some end with their last action: the
  # limit takes no win away.
  over = [len(gold) - (len(seen) - 1) for gold, seen in played.values()]
  assert min(over) == 0 < max(over)


def test_the_score_alone_tells_the_end(played):
  """The engine's own word for "completed" says nothing else, at no step."""
  game = sciworld.make_env()
  checked = 0
  try:
    for name, (gold, seen) in played.items():
      if len(seen) > 13:
        continue
      game.reset(env.Task('sciworld', 'train', VARIATION, name))
      for action, before in zip(gold, seen[1:], strict=False):
        observation = game.step(action)
        assert observation.text == before.text
        assert observation.terminated == game._engine.getCompleted(), name
        checked += 1
      assert observation.terminated, name
      # The engine itself would play on, and score.
      with pytest.raises(AssertionError, match='after the end'):
        game.step('look around')
  finally:
    game.close()
  assert checked > 50
