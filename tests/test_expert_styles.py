"""Ways to play a solution that one environment alone has."""

import numpy as np
import pytest

from planpo_jax import episodes, expert_styles

GOLD = (
  'search[red cotton shirt]',
  'click[next >]',
  'click[b0042]',
  'click[large]',
  'click[buy now]',
)


def browsed(seed):
  moves = expert_styles.rewrite(GOLD, 'browse', np.random.default_rng(seed))
  return tuple(move.action for move in moves)


def test_browse_adds_only_pages_and_ways_back():
  seen = set()
  for seed in range(40):
    actions = browsed(seed)
    added = []
    left = list(GOLD)
    for action in actions:
      if action == left[0]:
        left.pop(0)
      else:
        added.append(action)
    assert not left
    assert added[1::2] == ['click[< prev]'] * (len(added) // 2)
    seen |= set(added[::2])
    # Pages of a product are read where one is open: after its click.
    for page in ('click[description]', 'click[features]'):
      if page in actions:
        assert actions.index('click[b0042]') < actions.index(page)
        assert actions.index(page) < actions.index('click[large]')
  assert seen == {'click[description]', 'click[features]'}


def test_browse_varies_in_turns():
  lengths = {len(browsed(seed)) for seed in range(40)}
  assert lengths == {5, 7, 9}


@pytest.mark.parametrize(
  'env, style, played',
  [
    ('webshop', 'browse', 'browse'),
    ('webshop', 'search', 'gold'),
    ('alfworld', 'browse', 'gold'),
    ('alfworld', 'search', 'search'),
    ('toy', 'browse', 'gold'),
    ('sciworld', 'browse', 'gold'),
  ],
)
def test_a_style_is_played_where_its_commands_are(env, style, played):
  task = episodes.Task(env, 'train', 0, 'any')
  assert expert_styles.playable(style, task) == played


def test_thoughts_of_a_shopper_leave_the_price_out():
  goal = 'i want a red cotton shirt, and price lower than 40.00 dollars'
  thought = expert_styles.think(
    goal,
    'search[red shirt]',
    'webshop',
    wordy=True,
    first=True,
    rng=np.random.default_rng(1),
  )
  assert 'i want a red cotton shirt' in thought
  assert 'search for red shirt' in thought
  assert '40' not in thought


@pytest.mark.parametrize(
  'action, plan',
  [
    ('search[red shirt]', 'search for red shirt'),
    ('click[buy now]', 'buy it'),
    ('click[next >]', 'see more results'),
    ('click[< prev]', 'go back'),
    ('click[features]', 'read the features'),
    ('click[x-large]', 'choose x-large'),
  ],
)
def test_what_a_shopper_does_has_words(action, plan):
  thought = expert_styles.think(
    'buy it',
    action,
    'webshop',
    wordy=True,
    first=False,
    rng=np.random.default_rng(1),
  )
  assert plan in thought
