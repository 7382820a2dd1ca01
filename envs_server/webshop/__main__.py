"""Looks into the shop of $WEBSHOP_DATA.

  python -m envs_server.webshop                        # builds the index
  python -m envs_server.webshop --goal=1500            # you are the agent
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
  parser.add_argument('--goal', type=int, help='number of a goal to play')
  parser.add_argument(
    '--type',
    default='human',
    choices=('human', 'synthetic'),
    help='of the goal; default: human',
  )
  parser.add_argument('--expert', action='store_true', help='plays a solution')
  parser.add_argument(
    '--rich', action='store_true', help='observation=text_rich'
  )
  args = parser.parse_args()
  if args.expert and args.goal is None:
    parser.error('--expert needs --goal=N')
  try:
    package.check()
    if args.goal is not None:
      _play(args)
  except (RuntimeError, env.TaskError) as error:
    sys.exit(str(error))
  except KeyboardInterrupt:
    sys.exit(130)


def _play(args: argparse.Namespace) -> None:
  shop = package.make_env()
  catalog = shop.catalog()
  found = {name: of[args.type] for name, of in catalog.indices.items()}
  split = next((name for name, of in found.items() if args.goal in of), '')
  if not split:
    known = ', '.join(
      f'{name} {of[0]} to {of[-1]}' for name, of in found.items() if len(of)
    )
    raise env.TaskError(
      f'there is no {args.type} goal {args.goal}; there are {known or "none"}. '
      'Goals that ask for the same as a held-out one are left out.'
    )
  options = {'observation': 'text_rich'} if args.rich else {}
  task = env.Task('webshop', split, args.goal, args.type, options=options)
  seen = shop.reset(task, args.expert)
  if args.expert and not seen.expert_actions:
    raise env.TaskError(
      f'the expert has no solution of {args.type} goal {args.goal}; leave '
      '--expert out, or name another goal.'
    )
  print(f'{args.type} goal {args.goal} of {split}', file=sys.stderr)
  if not args.expert:
    print(
      'One action a line: search[WORDS] or click[NAME]; Ctrl-D ends.',
      file=sys.stderr,
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
