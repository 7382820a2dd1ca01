"""HiPER: credit for keeping a subgoal, for choosing it and for acting on it.

Source: HiPER, arXiv 2602.16165, hierarchical advantage estimation; the authors'
code (HiPER-agent) where the paper is silent. A response says KEEP or SWITCH,
names the subgoal and acts, see `planpo_jax/prompts/hiper.py`.

An episode falls into segments, one a subgoal: segment k runs from turn b_k to
turn e_k, and starts at the first turn of the episode or at one that says
SWITCH. A critic with three heads expects the return from a boundary on
(V_high), from the choice of the action on (V_low), and from the decision to
keep or to switch on (V_term):

  low:  d_t = r_t + g V_low(t+1) - V_low(t)
        A_t = d_t + g lam A_t+1
        with V_high(b_k+1) for V_low(t+1), and without A_t+1, at e_k
  high: D_k = sum_t g^(t-b_k) r_t + g^n V_high(b_k+1) - V_high(b_k), n turns
        A_k = D_k + g^n lam_segment A_k+1
  term: A_t = sum_{u=t..e_k} g^(u-t) r_u + g^(e_k-t+1) V_high(b_k+1) - V_term(t)

What follows the last turn is worth 0 if the environment ended the episode or
`bootstrap_truncated` is off. Where a limit cut the episode off, it is worth
V_low(e_k) to low and V_high(b_k) to high and term.

The reward r_t is the return of the episode at its last turn, and at any turn
the penalties of `estimate`. A_high is for the subgoal of turns that start a
segment, A_low for the action, A_term for the switch; each is whitened over the
turns that have it. All other tokens are not trained.

Settled as in the code:
  term has a head of its own; the paper has (q - beta) (V_high - V_low), with q
    whether the turn switches and beta how likely it was to;
  a first turn that says KEEP starts a segment and pays for keeping; with
    `normalized` the only turn of an episode does not pay;
  tags belong to their parts, and the end token to none.
Settled otherwise:
  a response without an action is an action from the end of its other parts on,
    end token included, so that it can be unlearnt (the code: all of it is, on
    top of its other parts);
  a token belongs to the part in which its first character lies, so that no
    token has two advantages;
  a switch part that says neither KEEP nor SWITCH keeps (the code: switches),
    as a missing one does;
  a subgoal has changed if it differs from the last one named, in its text with
    white space folded (the code: from that of the turn before, in tokens);
  V_low is read at the first token of the action (the code: at the first after
    the subgoal, white space included), at the last token where there is none.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planpo_jax import advantages, episodes, registry
from planpo_jax.advantages import segments
from planpo_jax.prompts import hiper as prompt

TRAITS = advantages.Traits(
  group=False, values=3, roles=True, prompt='hiper', batch_wide=True
)

_PRESET = advantages.SINGLES | {'chat.prompt': 'hiper'}
PRESETS: dict[str, dict[str, Any]] = {
  'hiper': _PRESET,
  'hiper_webshop': _PRESET
  | {
    'advantage.hiper.keep_penalty': -3.5,
    'advantage.hiper.bootstrap_truncated': False,
  },
}

# Of tokens, the place of their part in `prompt.PARTS` counted from 1.
SWITCH, SUBGOAL, ACTION = 1, 2, 3
# Of the critic.
_HIGH, _LOW, _TERM = 0, 1, 2


def token_roles(
  response_ids: Sequence[int],
  *,
  boundary: bool,
  decode: Callable[[Sequence[int]], str],
) -> np.ndarray:
  """Says which part of its response each token belongs to.

  Args:
    response_ids: tokens of one response.
    boundary: the turn starts a segment; otherwise the subgoal is not trained.
    decode: ids -> text. A character whose bytes are not complete may come out
      as anything that is no part of the whole text.

  Returns:
    [L] int32 of SWITCH, SUBGOAL, ACTION and 0.
  """
  text = decode(response_ids)
  spans = prompt.read(text).spans
  if spans['action'] is None:
    rest = max((span[1] for span in spans.values() if span), default=0)
    spans = spans | {'action': (rest, len(text) + 1)}  # The end token too.

  def start(i: int) -> int:
    """Place of the first character of token i."""
    before = decode(response_ids[:i])
    # Half a character at the end is none.
    while not text.startswith(before):
      before = before[:-1]
    return len(before)

  def first_from(character: int) -> int:
    return bisect.bisect_left(range(len(response_ids)), character, key=start)

  roles = np.zeros(len(response_ids), np.int32)
  for role, part in enumerate(prompt.PARTS, start=1):
    if spans[part] and (boundary or role != SUBGOAL):
      first, stop = map(first_from, spans[part])
      roles[first:stop] = role
  return roles


def annotate(
  table: episodes.TurnTable,
  batch_episodes: Sequence[episodes.Episode],
  *,
  decode: Callable[[Sequence[int]], str],
) -> episodes.TurnTable:
  """Reads the responses.

  Args:
    table: of `batch_episodes`.
    batch_episodes: in the order in which they were tabulated.
    decode: see `token_roles`.

  Returns:
    The table with `token_role_R` (SWITCH, SUBGOAL, ACTION; 0: not trained),
    `turn_switch_U` (the response says SWITCH) and `turn_drift_U` (it does not,
    and names another subgoal than the last one named).
  """
  role_R = np.zeros_like(table.token_role_R)
  switch_U = np.zeros(len(table.turn_tokens_U), np.bool_)
  drift_U = np.zeros(len(table.turn_tokens_U), np.bool_)
  u = r = 0
  for episode in batch_episodes:
    subgoal = ''
    for t, turn in enumerate(episode.turns):
      reading = prompt.read(decode(turn.response_ids))
      switch_U[u] = reading.switch
      named = reading.subgoal or subgoal
      drift_U[u] = not reading.switch and named != subgoal and subgoal != ''
      subgoal = named
      stop = r + len(turn.response_ids)
      role_R[r:stop] = token_roles(
        turn.response_ids, boundary=reading.switch or t == 0, decode=decode
      )
      u, r = u + 1, stop
  return dataclasses.replace(
    table, token_role_R=role_R, turn_switch_U=switch_U, turn_drift_U=drift_U
  )


@dataclasses.dataclass(frozen=True)
class _Credit:
  """What both sides learn from, a row a turn; columns are the critic's heads.

  Attributes:
    adv_UC: [U, 3] float32, not whitened; high only where a segment starts.
    value_UC: [U, 3] float32, as read from the critic.
    place_UC: [U, 3] int32, token it was read at; R where there is none.
    boundary_U: [U] bool, the turn starts a segment.
  """

  adv_UC: jax.Array
  value_UC: jax.Array
  place_UC: jax.Array
  boundary_U: jax.Array


def _next(x_U: jax.Array) -> jax.Array:
  return jnp.append(x_U[1:], jnp.zeros(1, x_U.dtype))


def _places(table: episodes.TurnTable) -> jax.Array:
  """Returns [U, 3] int32 tokens at which the heads are read, R for none."""
  num_U, num_R = table.turn_tokens_U.shape[0], table.token_turn_R.shape[0]
  tokens_U = jnp.asarray(table.turn_tokens_U)
  first_U = jnp.cumsum(tokens_U) - tokens_U
  action_U = jax.ops.segment_min(
    jnp.where(
      jnp.asarray(table.token_role_R) == ACTION, jnp.arange(num_R), num_R
    ),
    table.token_turn_R,
    num_U,
    indices_are_sorted=True,
  )
  last_U = first_U + tokens_U - 1
  low_U = jnp.where(action_U < num_R, action_U, last_U)
  place_UC = jnp.stack([first_U, low_U, first_U], axis=1)
  return jnp.where(tokens_U[:, None] > 0, place_UC, num_R)


def _rewards(
  table: episodes.TurnTable,
  *,
  keep_penalty: float,
  keep_penalty_mode: str,
  drift_penalty: float,
  invalid_penalty: float,
) -> jax.Array:
  """Returns [U] float32 r_t."""
  segments.check_choice(
    'keep_penalty_mode', keep_penalty_mode, ('normalized', 'fixed')
  )
  reward_U = jnp.where(
    segments.is_last_turn(table),
    segments.lookup(
      jnp.asarray(table.episode_return_E, jnp.float32), table.turn_episode_U
    ),
    0.0,
  )
  if keep_penalty_mode == 'normalized':
    # penalty * (kept / T), spread over the kept turns: it does not depend on
    # how many they are.
    turns_U = segments.lookup(
      segments.episode_turns(table), table.turn_episode_U
    )
    keep_penalty = jnp.where(
      turns_U > 1, keep_penalty / jnp.maximum(turns_U, 1), 0.0
    )
  reward_U += keep_penalty * ~jnp.asarray(table.turn_switch_U)
  reward_U += drift_penalty * jnp.asarray(table.turn_drift_U)
  return reward_U - invalid_penalty * ~jnp.asarray(table.turn_valid_U)


def _credit(
  table: episodes.TurnTable,
  *,
  gamma: float,
  lam: float,
  lam_segment: float,
  bootstrap_truncated: bool,
  **penalties: Any,
) -> _Credit:
  reward_U = _rewards(table, **penalties)
  place_UC = _places(table)
  value_UC = jnp.take_along_axis(
    jnp.asarray(table.value_RC, jnp.float32),
    place_UC,
    axis=0,
    mode='fill',
    fill_value=0,
  )
  v_high_U, v_low_U = value_UC[:, _HIGH], value_UC[:, _LOW]

  boundary_U = jnp.asarray(table.turn_switch_U) | (table.turn_index_U == 0)
  last_U = segments.is_last_turn(table)
  end_U = last_U | _next(boundary_U)
  follows_U = jnp.where(last_U, 0.0, _next(v_high_U))
  low_follows_U = jnp.where(end_U, follows_U, _next(v_low_U))
  if bootstrap_truncated:
    cut_U = last_U & segments.lookup(
      jnp.asarray(table.episode_truncated_E), table.turn_episode_U
    )
    start_U = jax.lax.cummax(
      jnp.where(boundary_U, jnp.arange(len(boundary_U)), 0)
    )
    follows_U = jnp.where(cut_U, v_high_U[start_U], follows_U)
    low_follows_U = jnp.where(cut_U, v_low_U, low_follows_U)

  low_U = segments.reversed_sum(
    reward_U + gamma * low_follows_U - v_low_U,
    jnp.where(end_U, 0.0, gamma * lam),
  )
  # From each turn to the end of its segment. At b_k, D_k = this - V_high(b_k).
  to_end_U = segments.reversed_sum(
    reward_U + jnp.where(end_U, gamma * follows_U, 0.0),
    jnp.where(end_U, 0.0, gamma),
  )
  # Turn by turn, g^n lam_segment is a factor g each, and lam_segment at e_k.
  high_U = segments.reversed_sum(
    jnp.where(boundary_U, to_end_U - v_high_U, 0.0),
    jnp.where(last_U, 0.0, jnp.where(end_U, gamma * lam_segment, gamma)),
  )
  return _Credit(
    adv_UC=jnp.stack(
      [
        jnp.where(boundary_U, high_U, 0.0),
        low_U,
        to_end_U - value_UC[:, _TERM],
      ],
      axis=1,
    ),
    value_UC=value_UC,
    place_UC=place_UC,
    boundary_U=boundary_U,
  )


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  gamma: float = 1.0,
  lam: float = 1.0,
  lam_segment: float = 0.95,
  bootstrap_truncated: bool = True,
  keep_penalty: float = -0.3,
  keep_penalty_mode: str = 'normalized',
  drift_penalty: float = -0.3,
  invalid_penalty: float = 0.1,
  whiten: bool = True,
) -> jax.Array:
  """Returns the advantage of each part of each response, see above.

  Args:
    table: the turns, annotated, with the values of three heads: V_high, V_low,
      V_term.
    progress: k/K; HiPER does not read it.
    gamma: g, discount a turn, in [0, 1].
    lam: lambda of low, a turn, in [0, 1].
    lam_segment: lambda of high, a segment, in [0, 1].
    bootstrap_truncated: an episode that a limit cut off is worth something from
      there on. The authors: on ALFWorld; not on WebShop, where an agent must
      learn to stop by itself.
    keep_penalty: reward for keeping the subgoal, units of the return. The
      authors: -0.3 on ALFWorld, -3.5 on WebShop.
    keep_penalty_mode: `normalized`: the penalty times the share of turns that
      keep is what an episode pays in all, in equal parts at the turns that
      keep. `fixed`: each of them pays the penalty.
    drift_penalty: reward of a turn that keeps the subgoal but changes its text,
      units of the return.
    invalid_penalty: taken off the reward of a turn without the required format,
      units of the return.
    whiten: bring each kind of advantage to mean 0 and deviation 1 (ddof 0, eps
      1e-8) over the turns that have tokens for it.

  Returns:
    adv_R: [R] float32, 0 on tokens without a part and on padding.

  Raises:
    ValueError: unknown `keep_penalty_mode`.
  """
  del progress
  credit = _credit(
    table,
    gamma=gamma,
    lam=lam,
    lam_segment=lam_segment,
    bootstrap_truncated=bootstrap_truncated,
    keep_penalty=keep_penalty,
    keep_penalty_mode=keep_penalty_mode,
    drift_penalty=drift_penalty,
    invalid_penalty=invalid_penalty,
  )
  # Columns by role, 0 first; no turn has what is no part.
  token_turn_R = jnp.asarray(table.token_turn_R)
  role_R = jnp.asarray(table.token_role_R)
  none_U = jnp.zeros_like(credit.boundary_U)
  adv_UK = jnp.stack(
    [none_U, *(credit.adv_UC[:, c] for c in (_TERM, _HIGH, _LOW))], axis=1
  )
  has_UK = jnp.zeros(adv_UK.shape, jnp.bool_)
  has_UK = has_UK.at[token_turn_R, role_R].set(True, mode='drop')
  has_UK &= jnp.stack(
    [none_U, ~none_U, credit.boundary_U, ~none_U], axis=1
  )  # A kept subgoal was not chosen.
  if whiten:
    num_U, num_K = adv_UK.shape
    adv_UK = segments.normalise(
      adv_UK.ravel(),
      jnp.tile(jnp.arange(num_K), num_U),
      num_segments=num_K,
      weight_N=has_UK.ravel(),
      ddof=0,
      eps=1e-8,
    ).reshape(adv_UK.shape)
  adv_UK = jnp.where(has_UK, adv_UK, 0.0)
  return adv_UK.at[token_turn_R, role_R].get(mode='fill', fill_value=0.0)


def targets(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  **hyperparameters: Any,
) -> tuple[jax.Array, jax.Array]:
  """Returns what the heads are to learn, and where.

  The target is the advantage before whitening plus the value it was taken
  against, at the token at which the head was read: V_high at the first token of
  turns that start a segment, V_low at the first of every action, V_term at the
  first of every turn.

  Args:
    table: see `estimate`.
    progress: see `estimate`.
    **hyperparameters: see `estimate`; the others have its defaults.

  Returns:
    target_RC: [R, 3] float32, 0 where the mask is False.
    mask_RC: [R, 3] bool.

  Raises:
    ValueError: see `estimate`.
  """
  del progress
  values = registry.hyperparameters(estimate) | hyperparameters
  del values['whiten']
  credit = _credit(table, **values)
  shape = jnp.shape(table.value_RC)
  place_UC = credit.place_UC.at[:, _HIGH].set(
    jnp.where(credit.boundary_U, credit.place_UC[:, _HIGH], shape[0])
  )
  at = (place_UC, jnp.arange(shape[1]))
  target_RC = jnp.zeros(shape, jnp.float32)
  target_RC = target_RC.at[at].set(credit.adv_UC + credit.value_UC, mode='drop')
  return target_RC, jnp.zeros(shape, jnp.bool_).at[at].set(True, mode='drop')
