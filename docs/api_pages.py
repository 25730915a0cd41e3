"""Pages of the API in Markdown: a page per public module, made of signatures and docstrings.

A class or function that several modules offer is described on the page of the module that is closest to its definition.
Annotations, and defaults that are not plain values, are shown as the source has them, so that pages do not depend on
the versions of Python and JAX. Classes and functions of other packages have no text; optax's optimizers have a link to
its documentation.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import enum
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
import textwrap
from typing import Any, NamedTuple

import flax.linen as nn

# Public modules by subject, in the order of the reference.
MODULES = {
  'Commands as functions': [
    't5x_lite.apps.train',
    't5x_lite.apps.evaluate',
    't5x_lite.apps.infer',
    't5x_lite.apps.convert',
    't5x_lite.apps.export',
    't5x_lite.apps.precompile',
    't5x_lite.apps.vocab',
    't5x_lite.apps.plot',
    't5x_lite.apps.report',
    't5x_lite.apps.track',
    't5x_lite.apps.explain_sharding',
    't5x_lite.apps.chat',
    't5x_lite.notebook',
    't5x_lite.interactive',
    't5x_lite.interactive_model',
    't5x_lite.gin_utils',
  ],
  'Training': [
    't5x_lite.trainer',
    't5x_lite.trainer.train_step',
    't5x_lite.train_state',
    't5x_lite.trainer.state_init',
    't5x_lite.trainer.step_params',
    't5x_lite.trainer.averaging',
    't5x_lite.trainer.actions',
    't5x_lite.trainer.non_finite',
    't5x_lite.losses',
    't5x_lite.metrics',
    't5x_lite.schedules',
    't5x_lite.trainer.summaries',
    't5x_lite.runtime',
    't5x_lite.trackers',
  ],
  'Models': [
    't5x_lite.models',
    't5x_lite.networks',
    't5x_lite.networks.t5',
    't5x_lite.networks.scalable_t5',
    't5x_lite.networks.decoder_only',
    't5x_lite.layers',
    't5x_lite.layers.nd',
    't5x_lite.adapters',
    't5x_lite.decoding',
  ],
  'Optimizers': ['t5x_lite.optimizers', 't5x_lite.adafactor'],
  'Data and evaluation': [
    't5x_lite.data',
    't5x_lite.data.builtin_tasks',
    't5x_lite.data.batches.positions',
    't5x_lite.data.vocabularies',
    't5x_lite.data.tokenizer_folders',
    't5x_lite.data.files.grain_records',
    't5x_lite.evaluation',
  ],
  'Devices and checkpoints': [
    't5x_lite.partitioning',
    't5x_lite.checkpoints',
    't5x_lite.checkpoints.builders',
    't5x_lite.checkpoints.sources',
    't5x_lite.checkpoints.hugging_face',
    't5x_lite.checkpoints.hugging_face.network',
    't5x_lite.errors',
  ],
  'Mixture of Experts': [
    'moe',
    'moe.routing',
    'moe.dispatch',
    'moe.metrics',
    'moe.models',
    'moe.networks',
    'moe.partitioner',
    'moe.recording',
    'moe.tools.planner',
    'moe.tools.surgery',
    'moe.tools.report',
  ],
}
_MODULE_NAMES = [module for modules in MODULES.values() for module in modules]
# Longest signature on one line.
_WIDTH = 88
_OPTAX = 'https://optax.readthedocs.io/en/latest/api'
# Packages whose docstrings are on the pages.
_OURS = ('t5x_lite', 'moe')
# A section of a docstring in Google style, up to the next line that is not indented.
_SECTION = re.compile(
  r'^(Args|Attributes|Returns|Yields|Raises):\n((?:[ \t].*\n|\n)*)', re.MULTILINE
)
_ENTRY = re.compile(r'^  (\*{0,2}\w+(?:, \w+)*): (.*(?:\n(?:    .*|(?=\n)))*)', re.MULTILINE)
# A docstring that only refers to another one.
_INHERITED = re.compile(r'See (base class|the class|`[\w.]+`\.$)')
_CODE = re.compile(r'(`[^`]*`|https?://[^\s)]+)')
# Signs of Markdown: emphasis, tags, entities, and each underscore at an end of a word. Links are kept.
_MARK = re.compile(r'[<*\\]|(?<![^\W_])_|_(?![^\W_])|(?<=\S)~|&(?=#?\w+;)')
# Signs at the beginning of a line that make a heading, a quotation or a list. Lists of `-` and numbers are kept.
_LINE_MARK = re.compile(r'^( *)(?=[#>+]|=+$)', re.MULTILINE)
_NAME = re.compile(r'`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`')


class Parameter(NamedTuple):
  """A row in a table of parameters.

  Attributes:
    name: name of the parameter.
    default: the default as Python has it; None if the parameter is required.
    meaning: description on one line; empty if the docstrings have none.
  """

  name: str
  default: str | None
  meaning: str


class Place(NamedTuple):
  """Where an object is described.

  Attributes:
    page: module of the page.
    name: name of the object on the page, which is its heading.
  """

  page: str
  name: str

  def link(self) -> str:
    """Return the address of the description, relative to the folder of the pages."""
    return f'{self.page}.md#{_anchors(self.page)[self.name]}'


def pages() -> dict[str, str]:
  """Return the pages in Markdown by name of the module."""
  return {module: _page(module) for module in _MODULE_NAMES}


def index() -> str:
  """Return the list of the pages by subject, with links that are relative to the folder above theirs."""
  lines = []
  for subject, modules in MODULES.items():
    lines += [f'### {subject}', '', '| module | content |', '|---|---|']
    for module in modules:
      doc = inspect.getdoc(importlib.import_module(module)) or ''
      content = in_cell(one_line(doc.partition('\n\n')[0]))
      lines.append(f'| [`{module}`](api/{module}.md) | {content} |')
    lines.append('')
  return '\n'.join(lines)


def home(described: Any) -> Place | None:
  """Return where a class, function or method is described, or None."""
  return _places().get(id(described))


def described(module: str) -> dict[str, Any]:
  """Return the classes and functions by name that the page of a module describes."""
  return {
    name: value
    for name, value in _public(module).items()
    if _is_described(value) and home(value) == Place(module, name)
  }


def anchors(headings: Iterable[str]) -> dict[str, str]:
  """Return the anchors of a page's headings, as GitHub and MyST make them."""
  found: dict[str, str] = {}
  counts: dict[str, int] = {}
  for heading in headings:
    anchor = re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
    count = counts.setdefault(anchor, 0)
    counts[anchor] += 1
    found[heading] = f'{anchor}-{count}' if count else anchor
  return found


def parameters(described: Any) -> list[Parameter]:
  """Return the parameters of a function, or of the constructor of a class.

  Args:
    described: function or class; empty for a class that is not called, such as an enumeration.
  """
  meanings = _meanings(described)
  defaults = _sources(described)
  rows = []
  for name, parameter in _signature(described).items():
    default = None
    if parameter.default is not parameter.empty:
      default = _as_written(parameter.default, defaults.get(name, ('', ''))[1])
    rows.append(Parameter(name, default, meanings.get(name, '')))
  return rows


def package(described: Any) -> str:
  """Return the package that documents a class or function: optax for constructors of its optimizers."""
  return _unwrapped(described).__module__.partition('.')[0]


def in_cell(text: str) -> str:
  """Return a text in which signs of Markdown and tables outside backquotes are only signs."""
  return _escaped(text).replace('|', r'\|')


def one_line(text: str) -> str:
  """Return a text without line breaks."""
  return re.sub(r'\s+', ' ', text).strip()


# ----------------------------------------------------------------------------------------------------------------------
# Objects and places


@functools.cache
def _public(module: str) -> dict[str, Any]:
  """Return the public objects of a module by name: those in `__all__`, or what is defined in it."""
  found = importlib.import_module(module)
  if hasattr(found, '__all__'):
    return {name: getattr(found, name) for name in sorted(found.__all__)}
  return {
    name: value
    for name, value in sorted(vars(found).items())
    if not name.startswith('_') and getattr(value, '__module__', None) == module
  }


def _is_described(value: Any) -> bool:
  """Return True for a class or function, False for a constant or an alias of a type."""
  return inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, '__wrapped__')


@functools.cache
def _places() -> dict[int, Place]:
  """Return where objects are described, by their id; methods too."""
  offers: dict[int, list[Place]] = {}
  values = {}
  for module in _MODULE_NAMES:
    for name, value in _public(module).items():
      if _is_described(value):
        values[id(value)] = value
        offers.setdefault(id(value), []).append(Place(module, name))
  places = {}
  for key, offered in offers.items():
    defined = getattr(values[key], '__module__', '')
    # The longest prefix that the path of the definition shares with an offering module, then the first in the list.
    home = max(offered, key=lambda each: len(os.path.commonprefix([each.page, defined])))
    places[key] = home
    if inspect.isclass(values[key]):
      for name, member in _members(values[key]):
        places.setdefault(id(_function(member)), Place(home.page, f'{home.name}.{name}'))
  return places


@functools.cache
def _anchors(module: str) -> dict[str, str]:
  """Return the anchors of the page of a module by heading, in the order of the page."""
  headings = [module]
  for name, value in described(module).items():
    headings.append(name)
    if inspect.isclass(value):
      headings += [f'{name}.{key}' for key, _ in _members(value)]
  return anchors(headings)


@functools.cache
def _unique_classes() -> dict[str, Any]:
  """Return the public classes by name, if it is the name of one only."""
  found: dict[str, set[Any]] = {}
  for module in _MODULE_NAMES:
    for name, value in _public(module).items():
      if inspect.isclass(value):
        found.setdefault(name, set()).add(value)
  return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _members(cls: type) -> list[tuple[str, Any]]:
  """Return the methods and properties that a class describes, by name, in the order of the source."""
  return [
    (name, member)
    for name, member in vars(cls).items()
    if (name == '__call__' or not name.startswith('_'))
    and (inspect.isfunction(_function(member)) or isinstance(member, property))
    and _function(member).__doc__
    and not _INHERITED.match(_function(member).__doc__)
  ]


def _unwrapped(function: Any) -> Any:
  """Return the function that wrappers and partial applications call in the end."""
  function = inspect.unwrap(function)
  while isinstance(function, functools.partial):
    function = function.func
  return function


def _function(member: Any) -> Any:
  """Return the function of a method, and anything else unchanged."""
  if isinstance(member, functools.cached_property):
    return member.func
  return getattr(member, '__func__', member)


# ----------------------------------------------------------------------------------------------------------------------
# Signatures


def _is_called(cls: type) -> bool:
  """Return True if a class has a constructor of its own, so that its parameters say something."""
  return not issubclass(cls, enum.Enum) and any(
    '__init__' in vars(base) or '__new__' in vars(base) and issubclass(base, tuple)
    for base in cls.__mro__
    if base.__module__ not in ('builtins', 'typing', 'abc')
    and not getattr(base, '_is_protocol', False)
  )


def _signature(described: Any) -> dict[str, inspect.Parameter]:
  """Return the parameters by name, without `self`, `cls` and those that Flax adds to modules."""
  if inspect.isclass(described) and not _is_called(described):
    return {}
  found = dict(inspect.signature(described).parameters)
  if inspect.isclass(described) and issubclass(described, nn.Module):
    del found['parent'], found['name']
  return {name: parameter for name, parameter in found.items() if name not in ('self', 'cls')}


@functools.cache
def _sources(described: Any) -> dict[str, tuple[str, str]]:
  """Return (annotation, default) of parameters by name, as the source has them; '' for what it does not have.

  The result of a function has the name `return`.
  """
  if package(described) not in _OURS:
    return {}
  if not inspect.isclass(described):
    # A function of the fields of a dataclass (`apps.common.options`).
    closure = inspect.getclosurevars(_unwrapped(described)).nonlocals
    if 'config_cls' in closure:
      return _sources(closure['config_cls']) | _of_function(_tree(closure['function']))
    return _of_function(_tree(_unwrapped(described)))
  found = {}
  for cls in reversed(described.__mro__):
    tree = _tree(cls)
    for node in getattr(tree, 'body', ()):
      if isinstance(node, ast.AnnAssign):
        default = '' if node.value is None else ast.unparse(node.value)
        found[ast.unparse(node.target)] = ast.unparse(node.annotation), default
    for node in getattr(tree, 'body', ()):
      if isinstance(node, ast.FunctionDef) and node.name in ('__init__', '__new__'):
        found |= _of_function(node)
  found.pop('return', None)
  return found


def _of_function(tree: ast.AST | None) -> dict[str, tuple[str, str]]:
  if not isinstance(tree, ast.FunctionDef):
    return {}
  given = tree.args
  positional = [*given.posonlyargs, *given.args]
  defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults + given.kw_defaults
  found = {}
  for argument, default in zip([*positional, *given.kwonlyargs], defaults, strict=True):
    found[argument.arg] = _unparsed(argument.annotation), _unparsed(default)
  for argument in (given.vararg, given.kwarg):
    if argument is not None:
      found[argument.arg] = _unparsed(argument.annotation), ''
  return found | {'return': (_unparsed(tree.returns), '')}


def _unparsed(node: ast.AST | None) -> str:
  return '' if node is None else ast.unparse(node).strip('\'"')


def _tree(described: Any) -> ast.AST | None:
  """Return the syntax tree of a class or function, or None for one without source, such as those of C."""
  path = getattr(sys.modules.get(described.__module__), '__file__', None) or ''
  return _trees(path).get(described.__qualname__) if path.endswith('.py') else None


@functools.cache
def _trees(path: str) -> dict[str, ast.AST]:
  """Return the syntax trees of the classes and functions of a file by qualified name, without those of functions."""
  found = {}

  def add(body: list[ast.stmt], prefix: str) -> None:
    for node in body:
      if isinstance(node, ast.ClassDef | ast.FunctionDef):
        found[prefix + node.name] = node
        if isinstance(node, ast.ClassDef):
          add(node.body, f'{prefix}{node.name}.')

  add(ast.parse(pathlib.Path(path).read_text(encoding='utf-8')).body, '')
  return found


def _as_written(value: Any, source: str) -> str:
  """Return a default: plain values by value, other objects by name or as the source has them."""
  if isinstance(value, enum.Enum):
    return f'{type(value).__name__}.{value.name}'
  name = getattr(value, '__qualname__', '<')
  if '<' not in name:
    return name
  shown = repr(value)
  if '<' in shown or dataclasses.is_dataclass(value):
    factory = re.fullmatch(r'.*\bfield\(default_factory=(.*)\)', source)
    return f'{factory[1]}()' if factory else source or '...'
  return shown


def _signature_text(described: Any, name: str) -> str:
  """Return the signature of a function or class in Python's form."""
  sources = _sources(described)
  shown = []
  previous = None
  for key, parameter in _signature(described).items():
    if parameter.kind is parameter.KEYWORD_ONLY and previous not in (
      parameter.KEYWORD_ONLY,
      parameter.VAR_POSITIONAL,
    ):
      shown.append('*')
    previous = parameter.kind
    prefix = {parameter.VAR_POSITIONAL: '*', parameter.VAR_KEYWORD: '**'}.get(parameter.kind, '')
    annotation, source = sources.get(key, ('', ''))
    text = prefix + key
    if annotation:
      text += f': {annotation}'
    if parameter.default is not parameter.empty:
      equals = ' = ' if annotation else '='
      text += equals + _as_written(parameter.default, source)
    shown.append(text)
  result = sources.get('return', ('', ''))[0]
  end = f' -> {result}' if result else ''
  line = f'{name}({", ".join(shown)}){end}'
  if len(line) <= _WIDTH:
    return line
  return '\n'.join([f'{name}(', *(f'  {each},' for each in shown), f'){end}'])


# ----------------------------------------------------------------------------------------------------------------------
# Docstrings


def _doc(described: Any) -> str:
  return inspect.cleandoc(described.__doc__ or '') + '\n'


def _entries(text: str) -> dict[str, str]:
  """Return the descriptions of a section by name."""
  return {
    name: one_line(meaning)
    for names, meaning in _ENTRY.findall(text)
    for name in names.lstrip('*').split(', ')
  }


def _meanings(described: Any) -> dict[str, str]:
  """Return the descriptions of parameters by name, from the docstrings of a class, its `__init__` and its bases."""
  meanings: dict[str, str] = {}
  owners = inspect.getmro(described) if inspect.isclass(described) else (described,)
  for owner in owners:
    for each in (owner, vars(owner).get('__init__') if inspect.isclass(owner) else None):
      for kind, text in _SECTION.findall(_doc(each)) if each is not None else ():
        for name, meaning in _entries(text).items():
          # A base class may describe it.
          if kind in ('Args', 'Attributes') and meanings.get(name, 'see `').startswith('see `'):
            meanings[name] = meaning
  return meanings


def _page(module: str) -> str:
  """Return the page of a module."""
  found = importlib.import_module(module)
  text = _Text(module, None)
  lines = [f'# {module}', '', text.body(_doc(found)), '']
  elsewhere = []
  constants = []
  for name, value in _public(module).items():
    where = _places().get(id(value)) if _is_described(value) else None
    if inspect.ismodule(value):
      if value.__name__ in _MODULE_NAMES:
        elsewhere.append(f'[`{name}`]({value.__name__}.md)')
    elif where is None:
      constants += _constant(module, name, value)
    elif where != Place(module, name):
      elsewhere.append(f'[`{name}`]({where.link()})')
    else:
      lines += _object(module, name, value)
  if constants:
    lines += ['## Constants and types', '', *constants]
  if elsewhere:
    lines += ['## Described elsewhere', '', ', '.join(elsewhere) + '.', '']
  return re.sub(r'\n{3,}', '\n\n', '\n'.join(lines)).strip() + '\n'


def _object(module: str, name: str, value: Any) -> Iterator[str]:
  """Yield the lines of a class or function."""
  yield from (f'## {name}', '')
  text = _Text(module, value)
  if not inspect.isclass(value):
    yield from text.of_function(value, name)
    return
  if package(value) not in _OURS:
    yield from (_foreign(value, name), '')
    return
  if _is_called(value):
    yield from ('```python', f'class {_signature_text(value, name)}', '```', '')
  bases = [
    text.link(f'`{base.__name__}`', base) for base in value.__bases__ if id(base) in _places()
  ]
  if bases:
    yield from (f'Bases: {", ".join(bases)}.', '')
  yield from (text.body(_doc(value)), '')
  yield from text.table(value)
  if issubclass(value, enum.Enum):
    yield from ('| member | value |', '|---|---|')
    for member, each in value.__members__.items():
      yield f'| `{member}` | `{each.value!r}` |'
    yield ''
  for key, member in _members(value):
    heading = f'{name}.{key}'.replace('__', r'\_\_')  # not bold
    yield from (f'### {heading}', '')
    if isinstance(member, property | functools.cached_property):
      yield from (text.body(_doc(_function(member))), '')
    else:
      yield from text.of_function(_function(member), key)


def _constant(module: str, name: str, value: Any) -> Iterator[str]:
  """Yield the lines of a constant or an alias of a type: its assignment and the comment above it."""
  loaded = [key for key in sorted(sys.modules) if key.partition('.')[0] in _OURS]
  for holder in [module, *loaded]:
    if vars(sys.modules[holder]).get(name) is value:
      path = pathlib.Path(sys.modules[holder].__file__ or '')
      lines = path.read_text(encoding='utf-8').splitlines()
      for node in _assignments(path).get(name, ()):
        comment: list[str] = []
        while (above := lines[node.lineno - 2 - len(comment)]).startswith('# '):
          comment.insert(0, above[2:])
        shown = textwrap.shorten(ast.unparse(node), 200)
        yield from (_escaped(' '.join(comment)), '', '```python', shown, '```', '')
        return


@functools.cache
def _assignments(path: pathlib.Path) -> dict[str, list[ast.stmt]]:
  """Return the assignments of a module by name."""
  found: dict[str, list[ast.stmt]] = {}
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      for target in targets:
        found.setdefault(ast.unparse(target), []).append(node)
  return found


class _Text:
  """Conversion of docstrings to Markdown, with links for the names of a module and a class or function."""

  def __init__(self, module: str, owner: Any):
    self._module = module
    self._owner = owner

  def of_function(self, function: Any, name: str) -> Iterator[str]:
    """Yield the lines of a function or method: signature, text and tables."""
    yield from ('```python', f'def {_signature_text(function, name)}', '```', '')
    if package(function) not in _OURS:
      yield from (_foreign(function, name), '')
      return
    yield from (self.body(_doc(function)), '')
    yield from self.table(function)
    for kind, text in _SECTION.findall(_doc(function)):
      if kind in ('Returns', 'Yields'):
        yield from (f'{kind}: {self.escaped(inspect.cleandoc(text))}', '')
      elif kind == 'Raises':
        yield from ('Raises:', '')
        for each, meaning in _entries(text).items():
          yield f'- {self.escaped(f"`{each}`")}: {self.escaped(meaning)}'
        yield ''

  def table(self, described: Any) -> Iterator[str]:
    """Yield the table of parameters, and that of further attributes."""
    rows = parameters(described)
    if any(row.meaning for row in rows):
      yield from ('| parameter | default | meaning |', '|---|---|---|')
      for row in rows:
        default = 'required' if row.default is None else f'`{row.default}`'
        meaning = self.escaped(row.meaning, known=rows).replace('|', r'\|')
        yield f'| `{row.name}` | {in_cell(default)} | {meaning} |'
      yield ''
    if inspect.isclass(described):
      names = {row.name for row in rows}
      sections = [text for kind, text in _SECTION.findall(_doc(described)) if kind == 'Attributes']
      further = {
        name: meaning
        for text in sections
        for name, meaning in _entries(text).items()
        if name not in names
      }
      if further:
        yield from ('| attribute | meaning |', '|---|---|')
        for name, meaning in further.items():
          shown = self.escaped(meaning).replace('|', r'\|')
          yield f'| `{name}` | {shown} |'
        yield ''

  def body(self, doc: str) -> str:
    """Return the text of a docstring without its sections; doctests and code become blocks.

    Raises:
      ValueError: the docstring has a fence, in which signs would be escaped.
    """
    if '```' in doc:
      raise ValueError(
        f'Docstrings must show code as doctests, or indented by four spaces, got in {self._module}: {doc}'
      )
    blocks = []
    for block in re.split(r'\n\n+(?=\S)|\n\n+(?=    )', _SECTION.sub('', doc).strip()):
      if block.lstrip().startswith('>>>'):
        blocks.append(f'```pycon\n{block}\n```')
      elif block.startswith('    '):
        blocks.append(f'```text\n{textwrap.dedent(block)}\n```')
      elif block.startswith('|'):
        blocks.append(block)
      else:
        block = self.escaped(re.sub(r'(?m)^( *)\* ', r'\1- ', block))
        blocks.append(_LINE_MARK.sub(r'\1\\', block))
    return '\n\n'.join(blocks)

  def escaped(self, text: str, known: list[Parameter] | None = None) -> str:
    """Return a text in which signs of Markdown are only signs, and names are links to what they name."""
    names = {row.name for row in known or ()}

    def linked(code: str) -> str:
      name = _NAME.fullmatch(code)
      if name is None or name[1] in names:
        return code
      if name[1] in _MODULE_NAMES and name[1] != self._module:
        return f'[{code}]({name[1]}.md)'
      return self.link(code, self._resolve(name[1]))

    return _escaped(text, linked)

  def link(self, code: str, target: Any) -> str:
    """Return a name in backquotes as link to its description, if it has one that is not here."""
    where = _places().get(id(_function(target)))
    if target is None or where is None or target is self._owner:
      return code
    address = where.link()
    if where.page == self._module:
      address = address.removeprefix(f'{where.page}.md')
    return f'[{code}]({address})'

  def _resolve(self, name: str) -> Any:
    """Return the object of a name that is relative to the class, its module, or the module of the page, or None."""
    spaces = [importlib.import_module(self._module)]
    defined = sys.modules.get(getattr(self._owner, '__module__', '') or '')
    if defined is not None:
      spaces.insert(0, defined)
    if inspect.isclass(self._owner):
      spaces.insert(0, self._owner)
    first, *rest = name.split('.')
    for space in spaces:
      found = inspect.getattr_static(space, first, None)
      for part in rest:
        found = inspect.getattr_static(found, part, None)
      if found is not None:
        return found
    if name[0].isupper() or '.' in name and rest[-1][0].isupper():
      return _unique_classes().get(name.rpartition('.')[2])
    return None


def _escaped(text: str, linked: Callable[[str], str] = str) -> str:
  """Return a text in which signs of Markdown outside backquotes and addresses are only signs.

  Args:
    text: the text.
    linked: replaces a text in backquotes.
  """
  parts = _CODE.split(text)
  parts[::2] = [_MARK.sub(r'\\\g<0>', part) for part in parts[::2]]
  parts[1::2] = [linked(part) if part.startswith('`') else part for part in parts[1::2]]
  return ''.join(parts)


def _foreign(described: Any, name: str) -> str:
  """Return the sentence about a class or function of another package."""
  if package(described) != 'optax':
    return f'Of {package(described)}.'
  module, page = 'optax', 'optimizers'
  if _unwrapped(described).__module__.startswith('optax.contrib'):
    module, page = 'optax.contrib', 'contrib'
  return f'[`{module}.{name}`]({_OPTAX}/{page}.html#{module}.{name}) as `OptaxWrapper`, with its arguments.'
