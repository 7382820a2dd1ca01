"""GiGPO: the episode against its group, each turn against its state.

Source: GiGPO, arXiv 2505.10978; equation 3 is the part of the episode, 6 the
groups of equal states, 7 the part of the turn, 8 their sum. The paper leaves
numerics open; ddof = 1, eps = 1e-6 outside the root, 0 for a state seen once,
repeated visits that each count, and the rule of similar states are those of
verl-agent, whose code was read in the copy that ARLArena keeps.

Departures from verl-agent, each with its switch: statistics of the episode
part weigh episodes alike (`stat`), a turn of invalid format loses its penalty
after normalising (`penalty`), a group of one gives 0 (`single`). Tied values
give exactly 0 where float32 would leave a residue.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from planpo_jax import advantages, episodes
from planpo_jax.advantages import segments

TRAITS = advantages.Traits(group=True)

PRESETS = {
  'gigpo_nostd': {'advantage.gigpo.use_std': False},
  'gigpo_similar': {'advantage.gigpo.similarity': 0.95},
  'gigpo_dynamic': {'train.max_refills': 10},
  'gigpo_verl_parity': advantages.verl_parity('gigpo'),
}


def estimate(
  table: episodes.TurnTable,
  *,
  progress: jax.Array | float,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  similarity: float = 1.0,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  single: str = 'zero',
) -> jax.Array:
  """Returns A_it = A^E_i + step_weight A^S_it on every token of turn (i, t).

    A^E_i  = (R_i - mean_N) / F                                          (3)
    G_it   = sum_{u >= t} gamma^(u - t) r_iu, r = R_i at the last turn, else 0
    A^S_it = (G_it - mean over the turns of its task in its state) / F  (6)(7)
    F = std + eps, or 1                                                  (8)

  A state seen once in a task gives A^S = 0.

  Args:
    table: the turns of all groups.
    progress: k/K; GiGPO does not read it.
    gamma: discount a turn, in [0, 1].
    step_weight: omega, weight of A^S; 0 leaves GRPO.
    similarity: read by `annotate`: the least similarity of the texts of two
      states that count as one, in (0, 1].
    use_std: divide by the standard deviation, in A^E and A^S.
    ddof: subtracted from the count in the variance.
    eps: added to the standard deviation.
    stat: what the statistics of A^E are taken over, `trajectory` or `turn`
      (an episode counts as often as it has turns).
    penalty: where a turn of invalid format loses `invalid_penalty`: `post`,
      off its advantage; `pre`, off its R and its G before normalising.
    invalid_penalty: units of the advantage (`post`) or of the return (`pre`).
    single: A^E in a group of one: `zero`, or `raw`, its return (and then A^S
      compares the visits of the one episode to a state).

  Returns:
    adv_R: [R] float32, 0 on padding.

  Raises:
    ValueError: unknown `stat`, `penalty` or `single`, or `similarity` outside
      (0, 1].
  """
  del progress
  _check_similarity(similarity)
  before_U, after_U = segments.split_penalty(
    table, penalty=penalty, invalid_penalty=invalid_penalty
  )
  episode_U = segments.normalise_episodes(
    table,
    table.episode_return_E,
    stat=stat,
    penalty_U=before_U,
    single=single,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )  # (3)
  return_U = segments.turn_return(table, gamma)
  if before_U is not None:
    return_U -= before_U
  num_U = table.turn_episode_U.shape[0]
  num_E = table.episode_group_E.shape[0]
  step_U = segments.normalise(
    return_U,
    jnp.where(segments.turn_group(table) < num_E, table.turn_state_U, num_U),
    num_segments=num_U,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )  # (6)(7)
  return segments.finish(
    table,
    episode_U + step_weight * step_U,  # (8)
    penalty_U=after_U,
    single=single,
  )


def annotate(
  table: episodes.TurnTable,
  batch_episodes: Sequence[episodes.Episode],
  *,
  decode: Callable[[Sequence[int]], str],
  similarity: float = 1.0,
) -> episodes.TurnTable:
  """Joins states of a task whose texts are nearly the same.

  verl-agent's rule: in the order of the table, a text joins the first state of
  its task whose first text is at least as similar as asked for by the ratio of
  `difflib.SequenceMatcher`, or else starts a state. So the order of episodes
  can matter. At 1 nothing changes: states are joined by their keys.

  Args:
    table: of `batch_episodes`.
    batch_episodes: as given to `episodes.tabulate`.
    decode: not read, the texts are those of the turns.
    similarity: in (0, 1].

  Returns:
    The table with other `turn_state_U`.

  Raises:
    ValueError: `similarity` outside (0, 1].
  """
  del decode
  _check_similarity(similarity)
  if similarity == 1:
    return table
  texts: dict[episodes.Task, list[str]] = {}
  for episode in batch_episodes:
    texts.setdefault(episode.task, []).extend(
      turn.observation for turn in episode.turns
    )
  ids: dict[tuple[episodes.Task, str], int] = {}
  for task, seen in texts.items():
    first = len(ids)
    for text, cluster in _clusters(seen, similarity).items():
      ids[task, text] = first + cluster
  state_U = np.array(table.turn_state_U)
  turns = [
    (episode.task, turn.observation)
    for episode in batch_episodes
    for turn in episode.turns
  ]
  state_U[: len(turns)] = [ids[turn] for turn in turns]
  return dataclasses.replace(table, turn_state_U=state_U)


def _clusters(texts: Sequence[str], similarity: float) -> dict[str, int]:
  """Returns {text: cluster}; clusters count from 0, below the texts."""
  unique = list(dict.fromkeys(texts))
  letters = {c: i for i, c in enumerate(sorted(set(''.join(unique))))}
  count_NV = np.zeros((len(unique), max(len(letters), 1)), np.int32)
  for n, text in enumerate(unique):
    np.add.at(count_NV[n], [letters[c] for c in text], 1)
  length_N = count_NV.sum(1)
  firsts: list[int] = []
  matchers: list[difflib.SequenceMatcher[str]] = []
  cluster_of: dict[str, int] = {}
  for n, text in enumerate(unique):
    # Common letters in any order bound the ratio from above, for all clusters
    # at once; the ratio itself is slow.
    common = np.minimum(count_NV[firsts], count_NV[n]).sum(1)
    bound = 2 * common / (length_N[firsts] + length_N[n])
    for cluster in np.flatnonzero(bound >= similarity):
      matchers[cluster].set_seq1(text)
      if matchers[cluster].ratio() >= similarity:
        cluster_of[text] = int(cluster)
        break
    else:
      cluster_of[text] = len(firsts)
      firsts.append(n)
      matchers.append(difflib.SequenceMatcher(None, '', text))
  return cluster_of


def _check_similarity(similarity: float) -> None:
  if not 0 < similarity <= 1:
    raise ValueError(
      f'similarity={similarity} must be above 0 and at most 1; 1 joins equal '
      'states only, try 0.95.'
    )
