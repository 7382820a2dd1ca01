"""An environment that does on command what environments should not.

Actions: `sleep S`, `hold MB` (memory), `say N` (characters), `exit CODE`,
`odd` (characters that no message may hold), `raise WORDS`, `start` (a child
process that would sleep for ever), `pid` (answers with our process id), `count`
(answers how many actions this episode has taken), anything else (answers with
the action). `reset` of index 1 sleeps for ever; the tasks of index 2 and more
are well.
"""

import os
import subprocess
import time

import numpy as np

from envs_server import env


def make_env():
  return Faulty()


class Faulty:
  def __init__(self):
    self._held = []

  def catalog(self):
    return env.Catalog(
      version='faulty 1',
      action_format='Anything.',
      indices={'train': {'any': range(1000)}},
    )

  def reset(self, task, expert=False, admissible=False):
    if task.index == 1:
      time.sleep(1e6)
    self._count = 0
    return env.Observation(f'{task.index}', goal='none')

  def step(self, action):
    self._count += 1
    word, _, rest = action.partition(' ')
    if word == 'sleep':
      time.sleep(float(rest))
    elif word == 'hold':
      self._held.append(b'x' * (int(rest) << 20))
    elif word == 'say':
      return env.Observation('x' * int(rest))
    elif word == 'exit':
      os._exit(int(rest))
    elif word == 'odd':
      return env.Observation('\ud800 \0 é', info={'\udfff': 'x'})
    elif word == 'raise':
      raise RuntimeError(rest)
    elif word == 'start':
      child = subprocess.Popen(['sleep', '1000000'])
      return env.Observation(str(child.pid))
    elif word == 'answer':
      return {
        'none': None,
        'bytes': env.Observation(b'x'),
        'nan': env.Observation('x', score=float('nan')),
        'info': env.Observation('x', info={'x': 1}),
        'numpy': env.Observation('x', score=np.float32(2.5), success=np.True_),
      }[rest]
    elif word == 'pid':
      return env.Observation(str(os.getpid()))
    elif word == 'count':
      return env.Observation(str(self._count))
    return env.Observation(action, score=float(self._count))

  def ping(self):
    pass

  def close(self):
    pass
