"""Registry of the formats that `t5x_lite convert` writes."""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeVar

from t5x_lite import checks
from t5x_lite.apps.convert import targets
from t5x_lite.lazy_names import LazyClasses

BUILT_IN = {
  't5x_lite': 't5x_lite.apps.convert.targets.OwnTarget',
  't5x': 't5x_lite.apps.convert.targets.T5xTarget',
  'hugging_face': 't5x_lite.apps.convert.hugging_face.HuggingFaceTarget',
  'peft': 't5x_lite.apps.convert.peft.PeftTarget',
}
FORMATS = tuple(BUILT_IN)
_TARGETS: LazyClasses[type[targets.Target]] = LazyClasses(BUILT_IN)
_Target = TypeVar('_Target', bound=type[targets.Target])


def register_target(cls: _Target) -> _Target:
  """Register a subclass of `Target`, as a decorator: `convert --to=FORMAT` then writes its format.

  Raises:
    ConfigError: see `LazyClasses.register`.
  """
  _TARGETS.register('register_target', getattr(cls, 'format', None), cls, targets.Target)
  return cls


def target_class(name: str) -> type[targets.Target]:
  """Return the class that writes a format."""
  return _TARGETS[name]


def other_names() -> dict[str, str]:
  """Return the format of each name that users give to a format, in lower case."""
  return {name: target.format for target in _TARGETS.values() for name in target.other_names}


def make_target(to: str, options: Mapping[str, Any]) -> targets.Target:
  """Return the target of a format.

  Args:
    to: name of the format.
    options: options by name; those that are None are not set.

  Raises:
    ConfigError: the format is unknown, or does not support an option.
  """
  names = checks.one_of(tuple(_TARGETS), synonyms=other_names())
  checks.check('', {'--to': to}, **{'--to': names})
  cls = _TARGETS[to]
  supported = {}
  for name, value in options.items():
    if value is None or cls.without_effect.get(name) == value:
      continue
    if name not in _options_of(cls):
      raise checks.invalid(
        '', f'--{name}', f'absent with --to={to}', value, f'{_formats_with(name)}: remove the flag.'
      )
    supported[name] = value
  return cls(**supported)


def _options_of(target: type[targets.Target]) -> set[str]:
  return {field.name for field in dataclasses.fields(target)}


def _formats_with(option: str) -> str:
  """Return a sentence without its end that names the formats that have an option."""
  flags = [f'--to={each.format}' for each in _TARGETS.values() if option in _options_of(each)]
  if not flags:
    return 'No format has this option'
  return f'It requires {" or ".join(flags)}'
