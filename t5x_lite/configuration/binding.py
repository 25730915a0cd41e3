"""Binding of gin statements: imports modules, resolves names in a table, and hands the table to gin.

gin's parser is not used for this, since it does not keep the locations of statements and cannot suggest names. A few
private names of gin-config 0.5, the last release, are used.
"""

from collections.abc import Collection, Iterable, Sequence
import copy
import dataclasses
import importlib
import inspect
import logging
import pkgutil
import re
import sys
import types
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

import t5x_lite
from t5x_lite.compat import forks as t5x_forks
from t5x_lite.compat import names as t5x_names
from t5x_lite.compat import views as t5x_views
from t5x_lite.configuration import inheritance
from t5x_lite.configuration import module_imports
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration import table as gin_table
from t5x_lite.configuration import validation as gin_check
from t5x_lite.configuration.table import Inherited
from t5x_lite.configuration.table import Row
from t5x_lite.configuration.table import Table
from t5x_lite.errors import ConfigError, did_you_mean, install_command

_logger = logging.getLogger(__name__)

# Packages that extras of t5x_lite install.
_EXTRAS = {
  'seqio': 'seqio',
  'tensorflow': 'seqio',
  'tensorflow_datasets': 'seqio',
  'tensorflow_text': 'seqio',
  'grain': 'grain',
  'matplotlib': 'plot',
}
# Section of a class in gin's text none of whose values has a form in it.
_WITHOUT_VALUES = re.compile(r'\n# Parameters for .*:\n# =+\n# None\.\n')
# Modules of T5X with its networks.
_NETWORKS = 't5x.examples.'
# Names that gin files give to the programs, and their modules in t5x_lite.apps.
_PROGRAMS = {
  'train_script': 'train',
  'eval_script': 'evaluate',
  'infer_script': 'infer',
  'precompile_script': 'precompile',
}


class Binder:
  """Makes the table of the bindings of statements.

  Attributes:
    table: the bindings.
    imports: import statements by the names that they define.
    import_statements: the first import of each module in each form, which gin prints.
    not_inherited: bindings of base classes that do not apply to a subclass, see `inherit`.
    t5x_sources: names of the files and flags that import modules of T5X.
    former_names: names of earlier versions of T5X that are used, and those that they have now.
  """

  def __init__(
    self,
    main_is_t5x: bool = True,
    skip_unknown: bool | Collection[str] = False,
    clears: bool = True,
  ):
    """Clear gin's configuration, if `clears`.

    Args:
      main_is_t5x: whether `import __main__` means T5X's programs; False for the program of this process.
      skip_unknown: True to skip imports of modules that do not exist and bindings of unknown functions and classes;
        names of functions and classes to skip these bindings only, and the imports. False raises.
      clears: False to keep the bindings of gin's configuration.
    """
    if clears:
      gin.clear_config()
      _forget_methods()
    self._main_is_t5x = main_is_t5x
    self._skip_unknown = skip_unknown
    self._used: set[str] = set()
    self.t5x_sources: dict[str, None] = {}
    self.former_names: dict[str, str] = {}
    self.table = Table()
    self.imports: dict[str, gin_syntax.Import] = {}
    self.import_statements: dict[tuple[str, bool], config_parser.ImportStatement] = {}
    self.not_inherited: list[inheritance.Missing] = []

  def resolve(self, texts: Sequence[gin_syntax.Text]) -> None:
    """Add the bindings of all statements to the table, after those of earlier calls.

    Args:
      texts: texts in the order of application.

    Raises:
      ConfigError: a module or name does not exist.
    """
    for text in texts:
      on_command_line = all(statement.location.on_command_line for statement in text.walk())
      if on_command_line:  # A flag may use every name that files have imported.
        self._resolve_text(text, tuple(self.imports.values()))
      else:
        self._resolve_text(text, ())

  def inherit(self, is_for_t5x: bool) -> None:
    """Add the bindings that code has made, and those of base classes, after all statements are resolved.

    Args:
      is_for_t5x: see `inheritance.inherit`.
    """
    for (scope, selector), bound in gin_config._CONFIG.items():  # pylint: disable=protected-access
      for parameter, value in bound.items():
        key = (scope, selector, parameter)
        if key not in self.table and not isinstance(value, Inherited):
          self.table.add(Row(key, value))
    names = self._names('inherited bindings')
    self.not_inherited = inheritance.inherit(self.table, set(self._used), names.method, is_for_t5x)

  def _names(self, source: str) -> '_Names':
    return _Names(source, self._main_is_t5x, self._used, self.table, self.former_names)

  def _resolve_text(self, text: gin_syntax.Text, preamble: Sequence[gin_syntax.Import]) -> None:
    names = self._names(text.source)
    if preamble:
      names.enable_dynamic_registration()
      for statement in preamble:
        names.add_import(statement)
    for statement in text.statements:
      match statement:
        case gin_syntax.Text():
          self._resolve_text(statement, ())
        case _ if self._skips(names, statement):
          _logger.info(
            '%s: skipped, because a name in it is unknown (skip_unknown).', statement.location
          )
        case gin_syntax.Import():
          names.add_import(statement)
          if not statement.statement.module.startswith('__gin__'):
            self.imports[statement.statement.bound_name()] = statement
        case gin_syntax.Block():
          names.configurable(statement.selector, statement.location)
        case gin_syntax.Binding():
          key, value = names.resolve(statement)
          self._check_has_one_name(statement, key)
          self.table.add(Row(key, value, statement, text))
    if names.uses_t5x and not preamble:
      self.t5x_sources[text.source] = None
    for each in names.imports:
      self.import_statements.setdefault((each.module, each.is_from), each)

  def _check_has_one_name(self, binding: gin_syntax.Binding, key: gin_table.Key) -> None:
    """Raise if the user has bound a parameter by the name that it has and by that of an earlier T5X.

    Raises:
      ConfigError: the message has both lines.
    """
    other = self.table.get(key)
    if other is None or other.statement is None or other.text.is_packaged():
      return
    names = [each.selector.rpartition('.')[2] for each in (other.statement, binding)]
    former = {*t5x_names.FORMER_CLASSES, *t5x_names.FORMER_PARAMETERS}
    if names[0] != names[1] and former & set(names):
      raise ConfigError(
        f'{binding.location}: {binding.key} is bound by another name too, in {other.location}: '
        f'{other.statement.key}. Remove one of them.'
      )

  def _skips(self, names: '_Names', statement: gin_syntax.Statement) -> bool:
    """Return True for a statement that `skip_unknown` allows to skip and whose module or configurable is unknown."""
    if not self._skip_unknown:
      return False
    match statement:
      case gin_syntax.Import():
        if statement.statement.module.startswith('__gin__'):
          return False
        try:
          names.add_import(statement)
        except ConfigError as error:
          return isinstance(error.__cause__, ImportError)
        return False
      case gin_syntax.Binding() if statement.macro_name is not None:
        return False
    if self._skip_unknown is not True and statement.selector not in self._skip_unknown:
      return False
    try:
      names.configurable(statement.selector, statement.location)
    except ConfigError:
      return True
    return False


def _forget_methods() -> None:
  """Remove methods from gin's registry, since an earlier configuration has registered them."""
  # pylint: disable=protected-access
  for selector, configurable in list(gin_config._REGISTRY.items()):
    if configurable.is_method and configurable.import_source is not None:
      gin_config._REGISTRY.pop(selector)
      gin_config._INVERSE_REGISTRY.pop(
        configurable.wrapped, None
      )  # of several classes, the same method


def bind(rows: Iterable[Row], imports: Iterable[config_parser.ImportStatement]) -> None:
  """Hand rows to gin, which has those that code has made already.

  Args:
    rows: the rows.
    imports: the import statements that gin prints with them, in one form for each module: of several, gin would choose
      one at random.
  """
  for row in rows:
    if row.base is not None:
      gin.bind_parameter(row.key, Inherited(row.base.key))
    elif row.statement is not None:
      gin.bind_parameter(row.key, row.value)
  gin_config._IMPORTS.update(imports)  # pylint: disable=protected-access


def configuration_text() -> str:
  """Return gin's configuration as text, without inherited values, since reading the text gives them again."""
  return _WITHOUT_VALUES.sub('', gin.config_str())


class _Names(gin_config.ParseContext):
  """Names that one file can use: its imports, or gin's registry without dynamic registration."""

  def __init__(
    self,
    source: str,
    main_is_t5x: bool,
    used: set[str],
    table: Table,
    former_names: dict[str, str],
  ):
    super().__init__()
    self._former_names = former_names
    self._source = source
    self._main_is_t5x = main_is_t5x
    self._used = used  # Complete names that this configuration has used; gin's registry has those of earlier ones too.
    self._table = table

  @property
  def uses_t5x(self) -> bool:
    """True if the file imports modules of T5X."""
    return any(isinstance(module, t5x_views.View) for module in self._symbol_table.values())

  def enable_dynamic_registration(self) -> None:
    """Enable dynamic registration, like the statement `from __gin__ import dynamic_registration`."""
    self._enable_dynamic_registration()

  def add_import(self, statement: gin_syntax.Import) -> None:
    """Import a module on behalf of the file.

    Raises:
      ConfigError: the module does not exist or is not supported in gin files.
    """
    statement = _of_its_own_package(statement)
    module = statement.statement.module
    root = module.partition('.')[0]
    problem = ''
    is_view = t5x_names.is_t5x(module) and not t5x_forks.has_module(module)
    if is_view and (self._main_is_t5x or root != '__main__'):
      self._add_view(statement)
      return
    if root == '__gin__' and module != '__gin__.dynamic_registration':
      problem = (
        f'gin has no {module.partition(".")[2]!r}. Write `from __gin__ import dynamic_registration`'
      )
    elif root == '__gin__' and self.imports:
      if statement.location.on_command_line:
        remedy = 'Remove it: flags may use all imports of the files'
      else:
        remedy = 'Move it before all other imports'
      problem = f'`from __gin__ import dynamic_registration` must be the first import. {remedy}'
    if problem:
      raise ConfigError(f'{statement.location}: {problem}.')
    if root != '__gin__':
      module_imports.check_import(module, str(statement.location))
      module_imports.import_triton_first(module)
    try:
      self.process_import(statement.statement)
    except ModuleNotFoundError as error:
      raise ConfigError(f'{statement.location}: {_import_message(module, error)}') from error
    except (ImportError, AttributeError) as error:
      why = module_imports.why_import_fails(error)
      raise ConfigError(f'{statement.location}: importing {module} failed: {why}') from error

  def _add_view(self, statement: gin_syntax.Import) -> None:
    """Import a module of T5X on behalf of the file: a view of our objects, even if T5X is installed."""
    module = statement.statement.module
    name = statement.statement.bound_name()
    try:
      view = t5x_views.module(module)
    except ConfigError as error:
      raise ConfigError(f'{statement.location}: {error}') from None
    root = module.partition('.')[0]
    if name == root and not statement.statement.alias:
      view = t5x_views.module(root)
    self._symbol_table[name] = view

  def configurable(
    self, selector: str, location: gin_syntax.Location, *, is_called: bool = False
  ) -> gin_config.Configurable:
    """Return the configurable of `selector`, as written in the file; register it at its first use.

    Args:
      selector: the name.
      location: location of the name.
      is_called: whether the file calls it to make a value.

    Raises:
      ConfigError: the name is unknown, ambiguous, not a function or class, or not allowed.
    """
    symbols = self._symbol_table
    root = selector.partition('.')[0]
    place = None
    find = self._registered
    if location.on_command_line and not self._registry_problem(selector, location):
      problem = ''  # Two files may import two modules by the same name: a flag means what they use, as in T5X.
    elif isinstance(symbols.get(root), t5x_views.View):
      place, problem = t5x_views.resolve(symbols[root], selector.split('.')[1:])
    elif root in symbols or (self._dynamic_registration and not location.on_command_line):
      problem = self._import_problem(selector)
      find = self._imported
    else:
      problem = self._registry_problem(selector, location)
      if problem:
        place = self._place_by_t5x_name(selector)
    if problem and place is None:
      raise ConfigError(f'{location}: {problem}')
    if place is None:
      found = find(selector)
    else:
      found = self._at(place)
      module, _, name = selector.rpartition('.')
      if name in t5x_names.FORMER_CLASSES:
        self._former_names[selector] = f'{module}.{place.name}'
    self._used.add(found.selector)
    module_imports.check_configurable(found.wrapped, selector, str(location), is_called=is_called)
    return found

  def _imported(self, selector: str) -> gin_config.Configurable:
    """Return the configurable of a function or class of an imported module."""
    names, values = self._resolve_selector(selector)
    return self._of_class(values) or self._register(names, values)

  @staticmethod
  def _of_class(values: Sequence[Any]) -> gin_config.Configurable | None:
    """Return the configurable of an object; of a method, only that of the class by which it is named.

    Args:
      values: the object after those that have it as an attribute.
    """
    found = _configurable_of(values[-1])
    owner = values[-2] if len(values) > 1 else None
    if (
      found is None
      or not found.is_method
      or found.import_source is None
      or not inspect.isclass(owner)
    ):
      return found
    known = _configurable_of(owner)
    if known is None:
      return None
    return gin_table.configurables().get(f'{known.selector}.{found.name}')

  def method(self, cls: type, name: str) -> gin_config.Configurable | None:
    """Return the configurable of a method of a registered class, registered at its first use.

    Args:
      cls: class.
      name: name of the method.

    Returns:
      The configurable; None if gin cannot bind this attribute of the class, since it is not a method of one.
    """
    values = (cls, getattr(cls, name, None))
    if not inspect.isfunction(values[-1]):
      return None
    found = self._of_class(values) or self._register(['', cls.__name__, name], values)
    self._used.add(found.selector)
    return found if found.is_method else None

  def _at(self, place: t5x_names.Place) -> gin_config.Configurable:
    """Return the configurable of an object of this package; the configuration's text imports its module."""
    location = config_parser.Location(self._source, 0, None, '')
    source = config_parser.ImportStatement(place.module, '.' in place.module, None, location)
    values = _objects(place)
    found = self._of_class(values)
    if found is None:
      self._symbol_source[place.module] = source
      found = self._register([place.module, *place.name.split('.')], values)
    return found

  def _register(
    self, attr_names: Sequence[str], attr_values: Sequence[Any]
  ) -> gin_config.Configurable:
    """Register an object; the class of a method keeps the name under which it is registered.

    gin would register the class again with the name of this file's import, and references to its other name would give
    the class without the method's bindings.
    """
    owner = attr_values[-2] if len(attr_values) > 1 else None
    known = _configurable_of(owner) if inspect.isclass(owner) else None
    if known is None or known.import_source is None:
      try:
        return self._register_alone(attr_names, attr_values)
      except ValueError:  # Another file has imported another module by the same name.
        name = attr_names[0]
        source = self._symbol_source[name]._replace(alias=None)
        return self._with_source(name, source)._register_alone(attr_names, attr_values)
    source, path = known.import_source
    root = [source.bound_name()]
    if not source.is_from and not source.alias:
      root = source.module.split('.')
    names = [*root, *path.split('.'), attr_names[-1]]
    return self._with_source(root[0], source)._register_alone(names, attr_values)

  def _register_alone(
    self, attr_names: Sequence[str], attr_values: Sequence[Any]
  ) -> gin_config.Configurable:
    """Register an object; a class has the methods that are bound by its name, and not those of its base classes.

    gin has one configurable for each function, so that it registers no class that inherits a bound method.
    """
    cls = attr_values[-1]
    if not inspect.isclass(cls):
      return super()._register(attr_names, attr_values)
    # pylint: disable=protected-access
    root, *inner, name = attr_names
    selector = '.'.join([self._symbol_source[root].partial_path(), *inner, name])
    own = {}
    for each in gin_table.configurables().values():
      if each.is_method and each.module == selector:
        own[each.wrapped] = each
    others = {}
    for function, each in list(gin_config._INVERSE_REGISTRY.items()):
      if each.is_method and each.import_source is not None and each.module != selector:
        others[function] = gin_config._INVERSE_REGISTRY.pop(function)
    gin_config._INVERSE_REGISTRY.update(own)
    try:
      found = super()._register(attr_names, attr_values)
    finally:
      for function, each in others.items():
        gin_config._INVERSE_REGISTRY.setdefault(function, each)
    # A class that is registered again has bound methods, which its references must call.
    for row in self._table.values():
      for reference in gin_table.references(row.value):
        if gin_table.configurable_of(reference).wrapped is cls:
          reference.initialize()
    return found

  def _with_source(self, symbol: str, source: config_parser.ImportStatement) -> '_Names':
    """Return the same names with another import statement of a symbol."""
    names = copy.copy(self)
    names._symbol_source = {**self._symbol_source, symbol: source}
    return names

  def _import_problem(self, selector: str) -> str:
    """Return why `selector` is not a function or class of an imported module, or ''."""
    root, *attributes = selector.split('.')
    if root not in self._symbol_table:
      known = [name for name in self._symbol_table if name != 'gin']
      return (
        f'{root!r} in {selector!r} is not imported by this file.{did_you_mean(root, known)} Add '
        f'{" or ".join(self._imports_of(selector))}.'
      )
    found = root
    owner = self._symbol_table[root]
    for attribute in attributes:
      if not hasattr(owner, attribute):
        return f'{found} has no {attribute!r}.{did_you_mean(attribute, _public_names(owner))}'
      found = f'{found}.{attribute}'
      owner = getattr(owner, attribute)
    if callable(owner) and attributes:
      return ''
    remedy = ''
    if inspect.ismodule(owner):
      remedy = '. Name a function or class in it'
    return f'{selector} must be a function or a class, got a {type(owner).__name__}{remedy}.'

  def _imports_of(self, selector: str) -> list[str]:
    """Return the statements that import the root of a selector: T5X's unless the file only has names of t5x_lite."""
    root, *attributes = selector.split('.')
    ours = []
    if root in _PROGRAMS:
      program = _PROGRAMS[root]
      if attributes == ['precompile']:  # T5X's is in its train
        program = 'precompile'
      theirs = [f'`import __main__ as {root}`']
      ours.append(f'`from t5x_lite.apps import {program} as {root}`')
    else:
      theirs = _imports_of_t5x(root, attributes)
      if any(found.name == root for found in pkgutil.iter_modules(t5x_lite.__path__)):
        ours.append(f'`from t5x_lite import {root}`')
    if theirs or ours:
      if self._imports_ours() and not self.uses_t5x:
        return ours or theirs
      return theirs or ours
    if module_imports.exists(root):
      return [f'`import {root}`']
    return [f'`from PACKAGE import {root}`']

  def _imports_ours(self) -> bool:
    """Return whether the file imports a module of t5x_lite."""
    names = [getattr(module, '__name__', '') for module in self._symbol_table.values()]
    return any(name.split('.')[0] == 't5x_lite' for name in names)

  def _matches(self, selector: str) -> list[str]:
    """Return the registered names that end with `selector`; only `selector` if it is a complete name."""
    known = self._known()
    if selector in known:
      return [selector]
    return [name for name in known if name.endswith('.' + selector)]

  def _known(self) -> dict[str, gin_config.Configurable]:
    """Return what this configuration has used and what Python has registered, by complete name."""
    return {
      name: each
      for name, each in gin_table.configurables().items()
      if each.import_source is None or name in self._used
    }

  def _place_by_t5x_name(self, selector: str) -> t5x_names.Place | None:
    """Return the place of the end of a name of T5X, e.g. utils.DatasetConfig, which gin accepts in T5X.

    Several modules of T5X have the same last name, e.g. `network`; the one whose object is configured is meant. A
    network of T5X's examples must be one that the configuration uses: the binding would have no effect.
    """
    used = {self._known()[selector].import_source for selector in self._used}
    used_modules = {source[0].module for source in used if source is not None}
    parts = selector.split('.')
    found = {}
    for length in range(1, len(parts)):
      for module in t5x_names.modules_ending_with('.'.join(parts[:length])):
        place, _ = t5x_views.resolve(t5x_views.module(module), parts[length:])
        is_of_network = place is not None and module.startswith(_NETWORKS)
        if place is not None and (not is_of_network or place.module in used_modules):
          found[_objects(place)[-1]] = place
    configured = []
    for each, place in found.items():
      known = _configurable_of(each)
      if known is not None and known.selector in self._used:
        configured.append(place)
    places = configured or list(found.values())
    if len(places) == 1:
      return places[0]
    return None

  def _registered(self, selector: str) -> gin_config.Configurable:
    return gin_table.configurables()[self._matches(selector)[0]]

  def _registry_problem(self, selector: str, location: gin_syntax.Location) -> str:
    """Return why `selector` is not the name of one registered configurable, or ''."""
    matches = self._matches(selector)
    if len(matches) == 1:
      return ''
    if matches:
      return f'{selector!r} is ambiguous: {", ".join(sorted(matches))}. Write more of the name.'
    known = [gin_table.short_name(configurable) for configurable in self._known().values()]
    problem = f'nothing is called {selector!r}.{did_you_mean(selector, known)}'
    if not self._symbol_table and not location.on_command_line:
      problem += ' Files start with `from __gin__ import dynamic_registration` and import the modules they use.'
    return problem

  def resolve(self, binding: gin_syntax.Binding) -> tuple[gin_table.Key, Any]:
    """Return the key and the value of one statement."""
    value = self._value(binding.value, binding.location)
    if binding.macro_name is not None:
      return (binding.macro_name, gin_table.MACRO, 'value'), value
    configurable = self._with_parameter(binding)
    key = (binding.scope, configurable.selector, binding.arg_name)
    try:
      gin_config.ParsedBindingKey.parse(key)
    except ValueError:
      raise ConfigError(
        f'{binding.location}: {self._why_no_parameter(configurable, binding)}'
      ) from None
    return key, value

  def _with_parameter(self, binding: gin_syntax.Binding) -> gin_config.Configurable:
    """Return the configurable of a binding: of a class, for a parameter that its method had in an earlier T5X."""
    owner, _, method = binding.selector.rpartition('.')
    configurable = self.configurable(binding.selector, binding.location)
    is_former = binding.arg_name in t5x_names.FORMER_PARAMETERS.get(method, ())
    if not is_former or binding.arg_name in gin_check.parameter_names(configurable.wrapped):
      return configurable
    found = self.configurable(owner, binding.location)
    self._former_names[binding.key] = f'{gin_table.short_name(found)}.{binding.arg_name}'
    return found

  def _why_no_parameter(
    self, configurable: gin_config.Configurable, binding: gin_syntax.Binding
  ) -> str:
    name = binding.selector
    parameter = binding.arg_name
    if configurable.import_source is not None:
      statement, path = configurable.import_source
      sentence = t5x_names.parameter_sentence(t5x_names.Place(statement.module, path), parameter)
      if sentence:
        return f'{name}.{parameter} of T5X has no equivalent in t5x_lite. {sentence}'
    known = gin_check.parameter_names(configurable.wrapped)
    return f'{name} has no parameter {parameter!r}.{did_you_mean(parameter, known)}'

  def _value(self, value: Any, location: gin_syntax.Location) -> Any:
    """Return `value` with placeholders replaced by gin's references."""
    if isinstance(value, dict):
      return {
        self._value(key, location): self._value(item, location) for key, item in value.items()
      }
    if isinstance(value, (list, tuple)):
      return type(value)(self._value(item, location) for item in value)
    if isinstance(value, gin_syntax.Macro):
      return gin_config.ParserDelegate().macro(value.name)
    if isinstance(value, gin_syntax.Reference):
      *scopes, selector = value.scoped_selector.split('/')
      configurable = self.configurable(selector, location, is_called=value.evaluate)
      return gin_config.ConfigurableReference(
        '/'.join((*scopes, configurable.selector)), value.evaluate
      )
    return value


def _imports_of_t5x(root: str, attributes: Sequence[str]) -> list[str]:
  """Return the statements that import a module of T5X by its last name: t5x.trainer, not t5x.contrib.moe.trainer."""
  modules = t5x_names.modules_ending_with(root)
  having = []
  for module in modules:
    place, _ = t5x_views.resolve(t5x_views.module(module), attributes)
    if place is not None:
      having.append(module)
  candidates = having or modules
  depth = min((module.count('.') for module in candidates), default=0)
  parents = [module.rpartition('.')[0] for module in candidates if module.count('.') == depth]
  return [f'`from {parent} import {root}`' for parent in parents]


def _objects(place: t5x_names.Place) -> list[Any]:
  """Return the module of a place and the objects on the path to its end."""
  values = [importlib.import_module(place.module)]
  for attribute in place.name.split('.'):
    values.append(getattr(values[-1], attribute))
  return values


def _configurable_of(fn_or_cls: Any) -> gin_config.Configurable | None:
  return gin_config._inverse_lookup(fn_or_cls)  # pylint: disable=protected-access


def _of_its_own_package(statement: gin_syntax.Import) -> gin_syntax.Import:
  """Return the import by the full name of the module, if `t5x_lite` exports a module of one of its packages."""
  imported = statement.statement
  package, _, name = imported.module.rpartition('.')
  if package != t5x_lite.__name__:
    return statement
  exported = getattr(t5x_lite, name, None)
  if not isinstance(exported, types.ModuleType):
    return statement
  return dataclasses.replace(statement, statement=imported._replace(module=exported.__name__))


def _import_message(module: str, error: ModuleNotFoundError) -> str:
  """Return the message of a failed import: the module is misspelt, or one of its requirements is missing."""
  missing = error.name or ''
  if module_imports.is_other_version(module, error):
    return f'importing {module} failed: {module_imports.why_import_fails(error)}'
  if not (module == missing or module.startswith(missing + '.')):
    return f'importing {module} failed: it requires {missing!r}, which is not installed.{_extra(missing, error)}'
  parent, _, leaf = missing.rpartition('.')
  if not parent:
    near = did_you_mean(
      missing, ('t5x_lite', 'seqio', 'moe', 'optax', 'jax', 'flax'), lists_all=False
    )
    if missing in _EXTRAS:
      return f'no module {missing!r}.{_extra(missing, error)}'
    return (
      f'no module {missing!r}. Install it, run the command in its folder, or add the folder to '
      f'PYTHONPATH.{near}'
    )
  folders = getattr(sys.modules.get(parent), '__path__', [])
  names = [found.name for found in pkgutil.iter_modules(folders)]
  public = [name for name in names if not name.startswith('_')]
  return f'no module {leaf!r} in {parent}.{did_you_mean(leaf, public)}'


def _extra(package: str, error: ModuleNotFoundError) -> str:
  extra = _EXTRAS.get(package.split('.')[0])
  if extra:
    return f' Install it with `{install_command(extra)}`.'
  return module_imports.remedy_for(package, error)


def _public_names(owner: Any) -> list[str]:
  """Return the names of functions and classes in a module or class, for suggestions."""
  names = [name for name in dir(owner) if not name.startswith('_')]
  return [name for name in names if callable(getattr(owner, name, None))]
