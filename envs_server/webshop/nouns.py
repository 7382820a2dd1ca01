"""Nouns of product titles, on which the kind of a product is judged.

The published environment asks spaCy's `en_core_web_sm`. `load` takes that model
where it is installed, and otherwise rules that need no model: a title's words
are nouns (titles are written with capitals, so the model calls most of their
adjectives proper nouns too) but for numbers, function words, some words that
the model does not call nouns, and, if they are in lower case, words that are
or look like adjectives, verbs or adverbs.

How the lists of the rules were made: spaCy 3.8.18 with `en_core_web_sm` 3.8.0
tagged 762 product titles and 2,134 queries (with capitals, at 0.3 of the weight
of titles), all of WebShop, and a word that was no noun more often than it was
one, and at least 1.5 times, is in `_NEVER`. The words in lower case of those
titles and of 12,087 instructions that were seen ten times gave `_LOWER` and
`_KEEP`. A few words were taken out by hand, and function words were written
down. `benchmarks/webshop_nouns.py` measures how well rules and model agree.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import types
from typing import Protocol

MODEL = 'en_core_web_sm'

# Function words and number words.
_CLOSED = frozenset(
  """
  a about above after against all along also although am among an and any
  are around as at be because been before behind being below beneath beside
  between beyond both but by can could did do does down during each eight
  either eleven every few fifty five for forty four from had has have he her
  here his how hundred i if in into is it its just many me more most much
  must my near neither nine no nor not of off on one onto or other our out
  over same seven shall she should since six so some such ten than that the
  their them then there these they thirty this those thousand three through
  throughout to too toward towards twelve twenty two under until up upon
  very via was we were what when where which while who whose why will with
  within without would you your
  """.split()
)
# Words that are no nouns even with a capital.
_NEVER = frozenset(
  """
  angled based braided breastfeeding built comfortable compatible
  contemporary damaged darkening diabetic eat favors filled fixed flossing
  full fully go hanging highly included individually italian japanese large
  led less listed made make mixed officially original padded parting plated
  play pull push real reduce running see sized stained striped sure
  sweetened traveling turn wide wrapped
  """.split()
)
# Words that are no nouns in lower case, besides those that end like one of
# `_ENDINGS`.
_LOWER = frozenset(
  """
  able add android anti antique arch artificial assemble back bad beige best
  big black blonde blue brown burgundy buy carry casual caught choose clean
  clear coaxial cold come comes compact contain contains cool coral
  cranberry creamy cute dark dead decor deep dental digital double dry dual
  easy everyday extra facial false fast fat faux features female find fine
  fit fits flat floral fluid fluoride free freeze french fresh frozen get
  give gives gluten golden good gray great green grey handmade hang happy
  hard healthy heather heavy hello help helps herbal high hot human include
  includes indoor install instant keto know laundry lead least let light
  lightweight like liquid long look loose low manual medium mid mini modern
  monocular narrow natural needs new nice non oatmeal offers old open
  optical oral orange order outdoor outside pendant perfect permanent
  personal pick pink please plus plush prefer prepare pro professional
  proven purchase pure purple put quick ready rectangular red regular
  remote remove resistant rich rose round royal savory search select
  shades short show simple single slim slip small smart soft solid sour
  special spicy square standard straight sulfate super supports sweet take
  tall tattoo teenage temporary think treat triple tropical tummy twin ultra
  unique universal use uses vintage want warm waterproof well white whole
  wild wooden works yellow zero
  """.split()
)
# Words that end like one of `_ENDINGS` and are nouns.
_KEEP = frozenset(
  """
  assembly carrying ceiling cleansing clothing dining drawstring drive
  fabric folding gaming garlic hiking jelly lifting lighting living plastic
  running seasoning seed speed spring standing string styling toed tunic
  walking
  """.split()
)
_ENDINGS = (
  'ed',
  'ing',
  'ly',
  'able',
  'ible',
  'ful',
  'ous',
  'ive',
  'less',
  'ic',
)
# Marks that the model takes for nouns, as they stand between or after nouns.
_MARK_NOUNS = frozenset('|%°®')
_QUANTITY = re.compile(r'[\d.,]+[a-z]+')

# Where the model's tokenizer splits English (its rules, less rare symbols and
# abbreviations): marks at both ends of what stands between blanks, possessives,
# units after digits, and inside of words at hyphens, slashes and the like.
_SYMBOLS = '\u00a6\u00a9\u00ae\u00b0\u2100-\u214f\u2195-\u2bff\u3200-\u33ff'
_QUOTES = '\'"”“`‘´’‚„»«'
_MARKS = (
  _SYMBOLS + _QUOTES + '…,:;!?¿¡()\\[\\]{}<>_#*&。？！，、；：～·（）【】《》'
)
_UNITS = (
  'km|m|dm|cm|mm|ha|nm|yd|in|ft|kg|g|mg|t|lb|oz|kmh|mph|mb|MB|kb|KB|gb|GB|tb|'
  'TB|T|G|M|K|%'
)
_FIRST = re.compile(f'[{_MARKS}§%=—–$£€]|\\+(?![0-9])|\\.\\.+')
_LAST = re.compile(
  f"(?:[{_MARKS}—–]|\\.\\.+|['’][sS]|(?<=[0-9])(?:\\+|[$£€]|{_UNITS})|"
  f'(?<=[0-9a-z%²+{_MARKS}-])\\.|(?<=[A-Z][A-Z])\\.)$'
)
# So many characters are looked at, which keeps long titles fast.
_LONGEST_LAST = 8
_INSIDE = re.compile(
  f'\\.\\.+|[…{_SYMBOLS}]|(?<=[0-9])[+*^-](?=[0-9-])|'
  f'(?<=[a-z{_QUOTES}])\\.(?=[A-Z{_QUOTES}])|'
  '(?<=[^\\W\\d_]),(?=[^\\W\\d_])|'
  '(?<=[^\\W_])(?:--+|[-–—~]|[:<>=/])(?=[^\\W\\d_])'
)


class BrokenModelError(RuntimeError):
  """spaCy and its model are installed and do not work; says what to do."""

  def __init__(self, error: Exception):
    # A service passes one line on.
    text = ' '.join(str(error).split())
    super().__init__(
      f'spaCy and its model {MODEL} are installed and do not work '
      f'({type(error).__name__}: {text}); install both anew (`pip install '
      f'--force-reinstall spacy && python -m spacy download {MODEL}`), or run '
      '`pip uninstall spacy`: without it nouns are found by rules.'
    )


class Tagger(Protocol):
  """Finds nouns in titles."""

  name: str

  def nouns(self, title: str) -> list[str]:
    """Nouns of a title in its order, lower case, repeats included."""
    ...


def load() -> Tagger:
  """spaCy's model if it and spaCy are installed, otherwise the rules.

  Which one it is changes rewards, so record its name. An installation that
  does not work raises `BrokenModelError`, here or when it is first used, rather
  than giving way to the rules.
  """
  if all(importlib.util.find_spec(name) for name in ('spacy', MODEL)):
    return _Model()
  return Rules()


class Rules:
  """See the head of this file."""

  name = 'rules 1'

  def nouns(self, title: str) -> list[str]:
    """See `Tagger`."""
    return [word.lower() for word in tokens(title) if _is_noun(word)]


class _Model:
  """spaCy with its small English model, read when first needed."""

  @functools.cached_property
  def name(self) -> str:
    try:
      version = importlib.metadata.version(MODEL)
    except importlib.metadata.PackageNotFoundError:
      version = self._module.__version__
    return f'spaCy {MODEL} {version}'

  def nouns(self, title: str) -> list[str]:
    """See `Tagger`."""
    return [
      token.text.lower()
      for token in self._tag(title)
      if token.pos_ in ('NOUN', 'PROPN')
    ]

  @functools.cached_property
  def _tag(self):
    module = self._module
    try:
      # What is left out changes no nouns and takes most of the time.
      return module.load(disable=['parser', 'ner', 'lemmatizer'])
    except Exception as error:
      raise BrokenModelError(error) from error

  @functools.cached_property
  def _module(self) -> types.ModuleType:
    try:
      return importlib.import_module(MODEL)
    except Exception as error:
      raise BrokenModelError(error) from error


def tokens(title: str) -> list[str]:
  """Words and marks of a title, nearly as the model splits it."""
  found = []
  for chunk in title.split():
    tail = []
    while chunk:
      if first := _FIRST.match(chunk):
        found.append(first.group())
        chunk = chunk[first.end() :]
      elif last := _LAST.search(chunk, max(0, len(chunk) - _LONGEST_LAST)):
        tail.append(last.group())
        chunk = chunk[: last.start()]
      else:
        break
    start = 0
    for inside in _INSIDE.finditer(chunk):
      found += [chunk[start : inside.start()], inside.group()]
      start = inside.end()
    found += [chunk[start:], *reversed(tail)]
  return [token for token in found if token]


def _is_noun(token: str) -> bool:
  word = token.lower()
  if word in _MARK_NOUNS:
    return True
  if word[0].isdigit():
    return _QUANTITY.fullmatch(word) is not None
  if word[0] in _QUOTES or not any(map(str.isalpha, word)):
    return False
  if word in _CLOSED or word in _NEVER:
    return False
  if not token.islower() or word in _KEEP:
    return True
  return word not in _LOWER and not word.endswith(_ENDINGS)
