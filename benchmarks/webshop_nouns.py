"""How well WebShop's rules for nouns agree with spaCy's model.

  python benchmarks/webshop_nouns.py --titles FILE_OR_FOLDER [--limit=5000]
      [--pairs=20000] [--seed=0]

FILE has one title a line; those between two blank lines were found by one
query. FOLDER holds WebShop's data, or a catalogue in their format.

Prints how alike the nouns of a title are, and for how many pairs of titles the
factor for the kind of product is the same: pairs that share their query, and
any pairs; taken as products that do not match by query or category (the titles
decide alone), and as products that do (the titles can only override). Needs
spaCy and its model `en_core_web_sm`, of any version.
"""

import argparse
import collections
import itertools
import os
import pathlib
import random
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from envs_server.webshop import files, nouns, reward


def groups(path: pathlib.Path, limit: int) -> list[list[str]]:
  """Titles that share a query, of the first `limit` records or lines."""
  found = collections.defaultdict(dict)
  if path.is_dir():
    records = files.records(files.locate(path).items)
    for _, record in itertools.islice(records, limit):
      found[record['query'].lower().strip()][record['name']] = None
  else:
    query, lines = 0, path.read_text('utf-8').splitlines()
    for line in lines[:limit]:
      query += not line.strip()
      if line.strip():
        found[query][line.strip()] = None
  return [list(titles) for titles in found.values()]


def tag(
  tagger: nouns.Tagger, titles: Sequence[str]
) -> tuple[dict[str, list[str]], float]:
  """{title: its nouns}, and milliseconds a title."""
  # Loads the model.
  tagger.nouns('')
  start = time.perf_counter()
  found = {title: tagger.nouns(title) for title in titles}
  return found, (time.perf_counter() - start) * 1000 / len(titles)


def agreement(
  pairs: Sequence[tuple[str, str]],
  model: dict[str, list[str]],
  rules: dict[str, list[str]],
) -> str:
  """Shares of pairs with equal factors; the mean difference of scores."""
  scores = [
    [reward.title_score(said[one], said[other]) for said in (model, rules)]
    for one, other in pairs
  ]
  shares = [
    sum(
      reward.type_factor(match, first) == reward.type_factor(match, second)
      for first, second in scores
    )
    / len(pairs)
    for match in (False, True)
  ]
  difference = sum(abs(one - other) for one, other in scores) / len(pairs)
  return (
    f'{len(pairs):6d} pairs: equal factors {shares[0]:.1%} (no match), '
    f'{shares[1]:.1%} (match); scores differ by {difference:.3f}'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--titles', type=pathlib.Path, required=True)
  parser.add_argument('--limit', type=int, default=5000)
  parser.add_argument('--pairs', type=int, default=20000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  taggers = (nouns.load(), nouns.Rules())
  if isinstance(taggers[0], nouns.Rules):
    sys.exit(
      'Nothing to compare the rules with: `pip install spacy`, then '
      f'`python -m spacy download {nouns.MODEL}`.'
    )
  found = groups(args.titles, args.limit)
  titles = sorted(set(itertools.chain.from_iterable(found)))
  (model, model_ms), (rules, rules_ms) = (
    tag(tagger, titles) for tagger in taggers
  )
  print(f'{len(titles)} titles of {args.titles}')
  print(f'{taggers[0].name}: {model_ms:.2f} ms a title')
  print(f'{taggers[1].name}: {rules_ms:.2f} ms a title')
  sets = [(set(model[title]), set(rules[title])) for title in titles]
  common = sum(len(one & other) for one, other in sets)
  precision = common / sum(len(other) for _, other in sets)
  recall = common / sum(len(one) for one, _ in sets)
  print(
    f'nouns of a title: precision {precision:.3f}, recall {recall:.3f}, '
    f'F1 {2 * precision * recall / (precision + recall):.3f}; '
    f'{sum(one == other for one, other in sets) / len(sets):.1%} equal'
  )
  draw = random.Random(args.seed)
  near = [
    pair for titles in found for pair in itertools.permutations(titles, 2)
  ]
  near = draw.sample(near, min(args.pairs, len(near)))
  if near:
    print('same query ', agreement(near, model, rules))
  any_two = [tuple(draw.sample(titles, 2)) for _ in range(args.pairs)]
  print('any        ', agreement(any_two, model, rules))


if __name__ == '__main__':
  main()
