"""Looks into the shop of $WEBSHOP_DATA.

  python -m envs_server.webshop                        # builds the index
  python -m envs_server.webshop --goal=1500            # one action a line
  python -m envs_server.webshop --goal=1500 --expert   # shows a solution

The first command prints what is there, and is worth a wait before a service is
started on the whole catalogue.
"""

from __future__ import annotations

import argparse
import sys

from envs_server import env
from envs_server import webshop as package


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
    prog='python -m envs_server.webshop', description=__doc__.split('\n')[0]
  )
  parser.add_argument('--goal', type=int, help='its number')
  parser.add_argument('--type', default='human', help='human or synthetic')
  parser.add_argument('--expert', action='store_true', help='plays a solution')
  parser.add_argument(
    '--rich', action='store_true', help='observation=text_rich'
  )
  args = parser.parse_args()
  try:
    package.check()
    if args.goal is not None:
      _play(args)
  except (RuntimeError, env.TaskError) as error:
    sys.exit(str(error))


def _play(args: argparse.Namespace) -> None:
  shop = package.make_env()
  catalog = shop.catalog()
  holding = [
    split
    for split, by_type in catalog.indices.items()
    if args.goal in by_type.get(args.type, ())
  ]
  options = {'observation': 'text_rich'} if args.rich else {}
  # Of a goal of no split `check` says which there are.
  split = holding[0] if holding else 'train'
  task = env.Task('webshop', split, args.goal, args.type, options=options)
  catalog.check(task)
  seen = shop.reset(task, args.expert)
  if args.expert and not seen.expert_actions:
    raise env.TaskError(
      f'the expert has no solution of {args.type} goal {args.goal}; leave '
      '--expert out, or name another goal.'
    )
  print(seen.text)
  for action in seen.expert_actions or sys.stdin:
    if args.expert:
      print(f'\n> {action}')
    seen = shop.step(action)
    print(seen.text)
    if seen.terminated:
      print(f'\nscore {seen.score:g}, success {seen.success}')
      break


if __name__ == '__main__':
  main()
