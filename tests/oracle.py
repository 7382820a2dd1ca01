"""Advantages in float64 by plain loops over groups, episodes and turns.

Written from the equations of the papers and from nothing else, to check the
kernels of planpo_jax/advantages. What the papers leave open is settled as the
docstrings there say. Nothing here is meant to be fast.

Every method takes finished episodes and gives [episode][turn] a number, or a
list of one number for each response token.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from planpo_jax import episodes

Batch = Sequence[episodes.Episode]
PerTurn = list[list[float]]
# [episode][turn][token], e.g. rewards of single tokens.
PerToken = Sequence[Sequence[Sequence[float]]]


def spread(batch: Batch, advantages: Sequence[Sequence]) -> np.ndarray:
  """Lays [episode][turn] out as one float64 for each response token."""
  return np.concatenate(
    [
      np.broadcast_to(np.float64(value), len(turn.response_ids))
      for episode, values in zip(batch, advantages, strict=True)
      for turn, value in zip(episode.turns, values, strict=True)
    ]
  )


def outcomes(
  batch: Batch,
  *,
  outcome: str = 'binary',
  success_return: float = 10.0,
  success_threshold: float = 100.0,
  score_floor: float = 0.0,
  score_max: float = 100.0,
) -> tuple[list[float], list[bool]]:
  """Returns R_i and s_i of every episode."""
  if outcome == 'binary':
    success = [episode.success for episode in batch]
    return [success_return * s for s in success], success
  return (
    [success_return * max(e.score, score_floor) / score_max for e in batch],
    [e.score >= success_threshold for e in batch],
  )


def _trained(episode: episodes.Episode) -> bool:
  return any(turn.response_ids for turn in episode.turns)


def _groups(keys: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
  """Returns the places with equal keys, from (place, key)."""
  found: dict[Hashable, list[int]] = {}
  for place, key in keys:
    found.setdefault(key, []).append(place)
  return list(found.values())


def _tasks(batch: Batch) -> list[list[int]]:
  return _groups((i, e.task) for i, e in enumerate(batch) if _trained(e))


def _compared(batch: Batch, single: str) -> list[int]:
  """Returns the episodes with something to learn, none alone if `zero`."""
  return [
    i
    for members in _tasks(batch)
    if len(members) > 1 or single == 'raw'
    for i in members
  ]


def standardise(
  values: Sequence[float],
  weights: Sequence[float] | None = None,
  *,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> list[float]:
  """(x - mean) / (std + eps), or x - mean; exactly 0 where all are equal."""
  if max(values) == min(values):
    return [0.0] * len(values)
  weights = [1.0] * len(values) if weights is None else weights
  total = sum(weights)
  mean = sum(w * x for w, x in zip(weights, values, strict=True)) / total
  if not use_std:
    return [x - mean for x in values]
  squares = sum(
    w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)
  )
  deviation = math.sqrt(squares / (total - ddof))
  return [(x - mean) / (deviation + eps) for x in values]


def _of_rows(
  batch: Batch,
  value: Sequence[Sequence[float]],
  *,
  stat: str,
  single: str,
  use_std: bool,
  ddof: int,
  eps: float,
) -> PerTurn:
  """Compares the turns of a task, each with the value of its row.

  `trajectory` counts every episode once, so its T_i rows weigh 1/T_i each;
  `turn` counts every row once. `raw` has mean 0 and deviation 1 where there is
  one to count.
  """
  result = [[0.0] * len(e.turns) for e in batch]
  for members in _tasks(batch):
    rows = [(i, t) for i in members for t in range(len(batch[i].turns))]
    x = [value[i][t] for i, t in rows]
    if len(rows if stat == 'turn' else members) > 1:
      weights = [
        1.0 if stat == 'turn' else 1.0 / len(batch[i].turns) for i, _ in rows
      ]
      x = standardise(x, weights, use_std=use_std, ddof=ddof, eps=eps)
    elif single == 'raw':
      x = [v / (1.0 + eps) if use_std else v for v in x]
    else:
      x = [0.0] * len(x)
    for (i, t), v in zip(rows, x, strict=True):
      result[i][t] = v
  return result


def _penalties(batch: Batch, size: float) -> PerTurn:
  return [[0.0 if turn.valid else size for turn in e.turns] for e in batch]


def _add(a: PerTurn, b: PerTurn, weight: float = 1.0) -> PerTurn:
  return [
    [x + weight * y for x, y in zip(*rows, strict=True)]
    for rows in zip(a, b, strict=True)
  ]


def _finish(
  batch: Batch, total: PerTurn, lost: PerTurn | None, single: str
) -> PerTurn:
  """Takes the penalties off; an episode alone in its group gets 0."""
  kept = set(_compared(batch, single))
  if lost is not None:
    total = _add(total, lost, -1.0)
  return [
    values if i in kept else [0.0] * len(values)
    for i, values in enumerate(total)
  ]


def _rows(batch: Batch, value: Sequence[float]) -> PerTurn:
  return [[v] * len(e.turns) for e, v in zip(batch, value, strict=True)]


def alpha(
  progress: float, alpha_init: float, alpha_final: float, schedule: str
) -> float:
  """Equation 8 of PlanPO at k = progress K, and its two ablations."""
  progress = min(max(progress, 0.0), 1.0)
  if schedule == 'constant':
    return alpha_init
  first, last = alpha_init, alpha_final
  if schedule == 'increase':
    first, last = last, first
  return first + (last - first) * progress


def planpo(
  batch: Batch,
  *,
  progress: float,
  outcome: dict | None = None,
  ae_mode: str = 'paper',
  ae_weight: float = 1.0,
  as_group: str = 'flat_success',
  alpha_init: float = 0.1,
  alpha_final: float = 0.05,
  alpha_schedule: str = 'decay',
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  invalid_penalty: float = 0.1,
  penalty: str = 'post',
  single: str = 'zero',
  turns: str = 'active',
  drop_truncated: bool = False,
  len_floor: int = 0,
  conditional: bool = True,
  full_return: float = 10.0,
) -> PerTurn:
  """Equations 2 to 8 of arXiv 2608.17289."""
  returns, success = outcomes(batch, **(outcome or {}))
  if not conditional:
    returns, success = [full_return] * len(batch), [True] * len(batch)
  numerics = {'use_std': use_std, 'ddof': ddof, 'eps': eps}
  lost = _penalties(batch, invalid_penalty)

  efficiency = []  # R^E_i, equation 2
  for e, r, s in zip(batch, returns, success, strict=True):
    length = len(e.turns)
    if turns == 'valid_action':
      length = max(1, sum(turn.valid for turn in e.turns))
    efficiency.append(r / length if s else 0.0)
  compared = efficiency if ae_mode == 'paper' else returns
  value = _rows(batch, compared)
  if penalty == 'pre':
    value = _add(value, lost, -1.0)
  by_episode = _of_rows(batch, value, stat=stat, single=single, **numerics)
  if ae_mode == 'stratified':
    winners = [e for e, s in zip(batch, success, strict=True) if s]
    faster = iter(
      _of_rows(
        winners,
        _rows(
          winners, [x for x, s in zip(efficiency, success, strict=True) if s]
        ),
        stat=stat,
        single='zero',
        **numerics,
      )
    )
    by_episode = _add(
      by_episode,
      [
        next(faster) if s else [0.0] * len(e.turns)
        for e, s in zip(batch, success, strict=True)
      ],
    )

  rows, shortness = [], []  # R^S_it, equation 5
  for i in _compared(batch, single):
    for t, turn in enumerate(batch[i].turns):
      length = max(len(turn.response_ids), len_floor)
      left_out = (
        not length
        or (drop_truncated and turn.truncated)
        or (as_group.endswith('success') and not success[i])
      )
      if not left_out:
        rows.append((i, t))
        shortness.append(returns[i] / length if success[i] else 0.0)
  by_turn = [[0.0] * len(e.turns) for e in batch]
  places = [
    (n, (batch[i].task, t if as_group.startswith('turn') else None))
    for n, (i, t) in enumerate(rows)
  ]
  for members in _groups(places):
    if len(members) > 1:
      z = standardise([shortness[n] for n in members], **numerics)
      for n, v in zip(members, z, strict=True):
        i, t = rows[n]
        by_turn[i][t] = v

  weight = alpha(progress, alpha_init, alpha_final, alpha_schedule)
  total = [[ae_weight * x for x in values] for values in by_episode]
  total = _add(total, by_turn, weight)
  return _finish(batch, total, lost if penalty == 'post' else None, single)


def _returns(
  batch: Batch, outcome: dict | None, token_rewards: PerToken | None
) -> list[float]:
  returns, _ = outcomes(batch, **(outcome or {}))
  if token_rewards is not None:
    returns = [
      r + sum(sum(rewards) for rewards in episode_rewards)
      for r, episode_rewards in zip(returns, token_rewards, strict=True)
    ]
  return returns


def overlong(length: int, limit: int, buffer: int, worst: float) -> float:
  """Equation 13 of DAPO, arXiv 2503.14476, as a loss >= 0."""
  if not limit or length <= limit - buffer:
    return 0.0
  if length > limit:
    return worst
  return worst * (length - (limit - buffer)) / buffer


def grpo(
  batch: Batch,
  *,
  outcome: dict | None = None,
  token_rewards: PerToken | None = None,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  invalid_penalty: float = 0.1,
  penalty: str = 'post',
  single: str = 'zero',
  overlong_limit: int = 0,
  overlong_buffer: int = 0,
  overlong_penalty: float = 1.0,
) -> PerTurn:
  """arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783, is use_std=False."""
  value = _rows(batch, _returns(batch, outcome, token_rewards))
  too_long = [
    [
      overlong(
        len(turn.response_ids),
        overlong_limit,
        overlong_buffer,
        overlong_penalty,
      )
      for turn in e.turns
    ]
    for e in batch
  ]
  value = _add(value, too_long, -1.0)
  lost = _penalties(batch, invalid_penalty)
  if penalty == 'pre':
    value = _add(value, lost, -1.0)
  total = _of_rows(
    batch,
    value,
    stat=stat,
    single=single,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
  )
  return _finish(batch, total, lost if penalty == 'post' else None, single)


def gigpo(
  batch: Batch,
  *,
  outcome: dict | None = None,
  gamma: float = 0.95,
  step_weight: float = 1.0,
  similarity: float = 1.0,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  invalid_penalty: float = 0.1,
  penalty: str = 'post',
  single: str = 'zero',
) -> PerTurn:
  """arXiv 2505.10978: GRPO, and the returns from equal states compared."""
  numerics = {'use_std': use_std, 'ddof': ddof, 'eps': eps}
  by_episode = grpo(
    batch,
    outcome=outcome,
    stat=stat,
    invalid_penalty=invalid_penalty if penalty == 'pre' else 0.0,
    penalty=penalty,
    single=single,
    **numerics,
  )
  togo = _returns_to_go(
    batch, outcome, gamma, invalid_penalty if penalty == 'pre' else 0.0
  )
  states = [[turn.state_key for turn in e.turns] for e in batch]
  if similarity < 1:
    states = _similar(batch, similarity)
  rows = [
    (i, t) for i in _compared(batch, single) for t in range(len(batch[i].turns))
  ]
  by_state = [[0.0] * len(e.turns) for e in batch]
  keys = [(batch[i].task, states[i][t]) for i, t in rows]
  for members in _groups(enumerate(keys)):
    if len(members) > 1:
      places = [rows[n] for n in members]
      z = standardise([togo[i][t] for i, t in places], **numerics)
      for (i, t), v in zip(places, z, strict=True):
        by_state[i][t] = v
  total = _add(by_episode, by_state, step_weight)
  lost = _penalties(batch, invalid_penalty)
  return _finish(batch, total, lost if penalty == 'post' else None, single)


def _returns_to_go(
  batch: Batch, outcome: dict | None, gamma: float, penalty: float
) -> PerTurn:
  """G_it, R_i coming with the last turn, less the penalty of turn t itself."""
  returns, _ = outcomes(batch, **(outcome or {}))
  togo = []
  for e, r, lost in zip(
    batch, returns, _penalties(batch, penalty), strict=True
  ):
    values = [r]
    for _ in e.turns[1:]:
      values.append(gamma * values[-1])
    togo.append([g - x for g, x in zip(reversed(values), lost, strict=True)])
  return togo


def _similar(batch: Batch, similarity: float) -> list[list[str]]:
  """Names a state by the first text of its task that is similar enough."""
  seen: dict[episodes.Task, list[str]] = {}
  names = []
  for e in batch:
    texts = seen.setdefault(e.task, [])
    names.append([])
    for turn in e.turns:
      text = turn.observation
      for known in texts:
        matcher = difflib.SequenceMatcher(None, known, text)
        if matcher.ratio() >= similarity:
          text = known
          break
      else:
        texts.append(text)
      names[-1].append(text)
  return names


def hgpo(
  batch: Batch,
  *,
  outcome: dict | None = None,
  history: int = 2,
  alpha: float = 1.0,
  gamma: float = 0.95,
  weight_offset: float = 1.0,
  weights_over: str = 'shared',
  base_group: bool = False,
  use_std: bool = True,
  ddof: int = 0,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  single: str = 'zero',
) -> PerTurn:
  """arXiv 2602.22817: returns compared at every length of equal history."""
  lost_before = invalid_penalty if penalty == 'pre' else 0.0
  togo = _returns_to_go(batch, outcome, gamma, lost_before)
  compared = _compared(batch, single)
  # [level][(episode, turn)]: its advantage there, and whether others share it.
  levels: list[dict[tuple[int, int], tuple[float, bool]]] = []
  weights = [(k + weight_offset) ** alpha for k in range(history + 1)]
  for k in range(history + 1):
    rows, keys = [], []
    for i in compared:
      states = [turn.state_key for turn in batch[i].turns]
      for t in range(k, len(states)):
        rows.append((i, t))
        keys.append((batch[i].task, tuple(states[t - k : t + 1])))
    level = {}
    for members in _groups(enumerate(keys)):
      places = [rows[n] for n in members]
      z = standardise(
        [togo[i][t] for i, t in places], use_std=use_std, ddof=ddof, eps=eps
      )
      for place, v in zip(places, z, strict=True):
        level[place] = v, len(places) > 1
    levels.append(level)
  if base_group:
    base = grpo(
      batch,
      outcome=outcome,
      use_std=use_std,
      eps=eps,
      stat=stat,
      penalty=penalty,
      invalid_penalty=lost_before,
      single=single,
    )
    levels.append(
      {(i, t): (v, True) for i in compared for t, v in enumerate(base[i])}
    )
    weights.append(1.0)

  result = []
  for i, e in enumerate(batch):
    result.append([])
    for t in range(len(e.turns)):
      total = norm = 0.0
      for level, weight in zip(levels, weights, strict=True):
        value, shared = level.get((i, t), (0.0, False))
        if weights_over == 'all' or (
          shared if weights_over == 'shared' else value
        ):
          total += weight * value
          norm += weight
      result[i].append(total / norm if norm else 0.0)
  lost = _penalties(batch, invalid_penalty)
  return _finish(batch, result, lost if penalty == 'post' else None, single)


def empg(
  batch: Batch,
  *,
  entropies: PerToken,
  outcome: dict | None = None,
  k: float = 1.0,
  k_future: float = 1.0,
  zeta: float = 0.1,
  use_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
  stat: str = 'trajectory',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
  single: str = 'zero',
) -> PerTurn:
  """arXiv 2509.09265, over all turns of a step."""
  base = grpo(
    batch,
    outcome=outcome,
    use_std=use_std,
    ddof=ddof,
    eps=eps,
    stat=stat,
    penalty=penalty,
    invalid_penalty=invalid_penalty if penalty == 'pre' else 0.0,
    single=single,
  )
  entropy = {
    (i, t): sum(tokens) / len(tokens)
    for i in _compared(batch, single)
    for t, tokens in enumerate(entropies[i])
    if len(tokens)
  }
  least = min(entropy.values(), default=0.0)
  span = max(entropy.values(), default=0.0) - least
  # Means of equal entropies may differ in the last digit.
  tied = span <= 1e-9 * least
  h = {
    place: 0.0 if tied else (value - least) / span
    for place, value in entropy.items()
  }
  mean_scale = sum(math.exp(-k * x) for x in h.values()) / max(len(h), 1)
  moved = {}
  for (i, t), x in h.items():
    moved[i, t] = base[i][t] * math.exp(-k * x) / mean_scale
    if (i, t + 1) in h:
      moved[i, t] += zeta * math.exp(-k_future * h[i, t + 1])
  mean = sum(moved.values()) / max(len(moved), 1)
  total = [
    [
      moved[i, t] - mean if (i, t) in moved else 0.0
      for t in range(len(e.turns))
    ]
    for i, e in enumerate(batch)
  ]
  lost = _penalties(batch, invalid_penalty)
  return _finish(batch, total, lost if penalty == 'post' else None, single)


def rloo(
  batch: Batch,
  *,
  outcome: dict | None = None,
  token_rewards: PerToken | None = None,
  stat: str = 'trajectory',
  single: str = 'zero',
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
) -> PerTurn:
  """arXiv 2402.14740: a return less the mean of the others of its group."""
  lost = _penalties(batch, invalid_penalty)
  value = _rows(batch, _returns(batch, outcome, token_rewards))
  if penalty == 'pre':
    value = _add(value, lost, -1.0)
  result = [[0.0] * len(e.turns) for e in batch]
  for members in _tasks(batch):
    # A turn stands for its whole episode, or for itself.
    share = {i: 1.0 / len(batch[i].turns) for i in members}
    if stat == 'turn':
      share = dict.fromkeys(members, 1.0)
    total = sum(share[i] * sum(value[i]) for i in members)
    count = sum(share[i] * len(value[i]) for i in members)
    for i in members:
      for t, x in enumerate(value[i]):
        if round(count) > 1:
          result[i][t] = x - (total - x) / (round(count) - 1)
        elif single == 'raw':
          result[i][t] = x
  return _finish(batch, result, lost if penalty == 'post' else None, single)


def reinforce_pp(
  batch: Batch,
  *,
  outcome: dict | None = None,
  token_rewards: PerToken | None = None,
  baseline: str = 'none',
  stat: str = 'trajectory',
  eps: float = 1e-8,
  penalty: str = 'post',
  invalid_penalty: float = 0.1,
) -> PerToken:
  """arXiv 2501.03262: reward to go of a token in its turn, whitened.

  A turn is a row that ends with R_i of its episode.
  """
  returns, _ = outcomes(batch, **(outcome or {}))
  lost = _penalties(batch, invalid_penalty)
  value = _rows(batch, returns)
  if penalty == 'pre':
    value = _add(value, lost, -1.0)
  kept = list(range(len(batch)))
  if baseline == 'group':
    kept = sorted(_compared(batch, 'zero'))
    value = _of_rows(
      batch, value, stat=stat, single='zero', use_std=False, ddof=1, eps=0.0
    )
  togo = []
  for i in kept:
    for t, turn in enumerate(batch[i].turns):
      after, values = value[i][t], []
      for j in reversed(range(len(turn.response_ids))):
        after += token_rewards[i][t][j] if token_rewards else 0.0
        values.append(after)
      togo += reversed(values)
  white = iter(_whiten(togo, eps))
  result = []
  for i, e in enumerate(batch):
    result.append([])
    for t, turn in enumerate(e.turns):
      off = lost[i][t] if penalty == 'post' else 0.0
      result[i].append(
        [next(white) - off if i in kept else 0.0 for _ in turn.response_ids]
      )
  return result


def _whiten(values: Sequence[float], eps: float) -> list[float]:
  """(x - mean) / sqrt(var + eps), var with ddof 1; 0 where all are equal."""
  if not values or max(values) == min(values):
    return [0.0] * len(values)
  mean = math.fsum(values) / len(values)
  squares = math.fsum((x - mean) ** 2 for x in values)
  deviation = math.sqrt(squares / (len(values) - 1) + eps)
  return [(x - mean) / deviation for x in values]
