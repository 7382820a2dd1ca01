"""ALFWorld's engine, TextWorld's interpreter of PDDL games, without its waste.

TextWorld parses the same templates and copies the same contexts at every step,
to write every admissible command and the answer anew, and it translates the
problem of a game four times before its first text. Here each is done once, and
what is read is the same to the byte.

The quicker functions take the place of TextWorld's own in the whole process,
which a worker has for itself.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
import types
from collections.abc import Mapping
from typing import Any

# Translated problems that are kept; one takes a few MB.
_KEPT = 2
# Parsed templates that are kept: all of a grammar, and tasks of many games.
_TEXTS = 1024
_NOTHING = 'Nothing happens.'
_PREDICATE = re.compile(r'(\w+)\(')


class Engine:
  """Plays one game at a time. One a process: its library has one state.

  Attributes:
    won: the goal of the game is reached.
  """

  def __init__(self):
    self._logic = _quick_logic()
    self._misc = importlib.import_module('alfworld.agents.utils.misc')
    self._library = self._logic.fast_downward.load_lib()
    self._state = None
    self._actions: dict[str, Any] = {}
    self.won = False

  def load(self, game: Mapping[str, str]) -> str:
    """Begins a game, whatever was played before.

    Args:
      game: the texts `pddl_domain`, `pddl_problem` and `grammar`.

    Returns:
      The first text.

    Raises:
      Exception: of any kind, and SystemExit: the texts are no game.
    """
    rules = self._logic.GameLogic(game['pddl_domain'], game['grammar'])
    self._problem = game['pddl_domain'], game['pddl_problem']
    self._state = self._logic.PddlState(
      _WithoutPlanner(self._library), game['pddl_problem'], rules
    )
    self._entities = self._named_entities()
    self._names = {key: info.name for key, info in self._entities.items()}
    self._grammar, self._templates = rules.grammar, rules.actions
    self._commands: dict[str, str] = {}  # Name of an operator -> command.
    self._changing = {
      effect.literal.predicate
      for action in self._state.task.actions
      for effect in action.effects
    }
    text = self._grammar.derive('#intro#', self._context({}))
    self._look_ahead()
    return text

  def step(self, command: str) -> str:
    """Carries out a command, if it is admissible; returns the answer."""
    action = self._actions.get(command)
    if action is None:
      return _NOTHING
    self._state.apply(action)
    text = self._grammar.derive(
      action.feedback_rule, self._context(action.mapping)
    )
    self._look_ahead()
    return text

  def admissible(self) -> tuple[str, ...]:
    """Commands that can be carried out now, sorted."""
    return tuple(sorted(self._actions))

  def plan(self) -> tuple[str, ...]:
    """Commands that win a game just loaded; empty if the planner finds none.

    Takes as long as loading, and more.
    """
    downward = importlib.import_module('fast_downward')
    _, sas = downward.pddl2sas(*self._problem, optimize=True)
    self._library.load_sas_replan(sas.encode())
    return tuple(self._state.replan(self._entities))

  def ping(self) -> None:
    """Raises if the library is of no use."""
    if self._state is not None:  # It would crash before the first game.
      self._library.check_goal()

  def _look_ahead(self) -> None:
    self.won = self._state.check_goal()
    self._actions = {}
    for action in self._state.all_applicable_actions():
      # Of several that read alike the first is carried out.
      self._actions.setdefault(self._command(action), action)

  def _command(self, action) -> str:
    name = self._state._operators[action.id].name
    command = self._commands.get(name)
    if command is None:
      template = self._grammar.derive(
        action.command_template, self._context(action.mapping)
      )
      action.command_template = template
      command = action.format_command(self._names)
      if self._is_fixed(self._templates[action.name].template):
        self._commands[name] = command
    return command

  def _is_fixed(self, template: str) -> bool:
    """Whether no action changes what a command of this template reads."""
    return '#' not in template and not self._changing.intersection(
      _PREDICATE.findall(template)
    )

  def _context(self, mapping: Mapping) -> dict[str, Any]:
    return {
      'state': self._state,
      'facts': (),  # No grammar rule reads them.
      'variables': {
        key.name: self._entities[value.name] for key, value in mapping.items()
      },
      'mapping': mapping,
      'entity_infos': self._entities,
    }

  def _named_entities(self) -> dict[str, Any]:
    info = importlib.import_module('textworld.generator.game').EntityInfo
    found = {
      variable.name: info(variable.name, variable.type)
      for fact in self._state.facts
      for variable in fact.arguments
    }
    names = self._misc.Demangler(game_infos=found)
    for entity in found.values():
      entity.name = names.demangle_alfred_name(entity.id)
      entity.definite, entity.indefinite = 'the', 'a'
    return found


class _WithoutPlanner:
  """The library but for the second problem, which only planning needs."""

  def __init__(self, library):
    self._library = library

  def __getattr__(self, name: str):
    return getattr(self._library, name)

  def load_sas_replan(self, sas: bytes) -> None:
    """Leaves it unloaded."""


@functools.cache
def _quick_logic() -> types.ModuleType:
  """TextWorld's module of PDDL games, with the slow functions replaced."""
  logic = importlib.import_module('textworld.envs.pddl.logic')
  textgen = importlib.import_module('textworld.envs.pddl.textgen')
  rule = importlib.import_module('textworld.logic').Rule
  downward = importlib.import_module('fast_downward')
  parse = functools.lru_cache(_TEXTS)(textgen._parse_and_convert)
  # Those who derive write into what they are given.
  textgen._parse_and_convert = lambda *a, **k: copy.deepcopy(parse(*a, **k))
  # The names in a context change with no derivation: no need to copy them.
  textgen.copy_context = lambda context: context | {
    'variables': dict(context['variables']),
    'mapping': dict(context['mapping']),
  }
  rule.parse_conjunctive_query = functools.cache(rule.parse_conjunctive_query)
  translate = functools.lru_cache(_KEPT)(downward.pddl2sas)

  def pddl2sas(domain, problem, verbose=False, optimize=False):
    # The problem that is optimized is for the planner; see `Engine.plan`.
    return (None, '') if optimize else translate(domain, problem)

  logic.fast_downward = types.SimpleNamespace(
    **vars(downward) | {'pddl2sas': pddl2sas}
  )
  return logic
