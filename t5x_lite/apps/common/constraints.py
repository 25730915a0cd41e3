"""Flags of constraints on decoded texts, for the commands that decode."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from t5x_lite import gin_utils

# Name, type, metavar and help of each flag.
_FLAGS = (
  ('no_repeat_ngram_size', int, 'N', 'no N tokens occur twice in a text; 0 for no limit'),
  ('repetition_penalty', float, 'P', 'above 1, tokens that a text has become less probable'),
  ('min_decode_len', int, 'N', 'least number of tokens of a text, including the end token'),
  ('allowed_outputs', str, 'FILE', 'produce only texts of this file, which has one on each line'),
)


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the flags that `constrained_model` reads."""
  group = parser.add_argument_group("constraints on decoded texts; default: the model's")
  for name, kind, metavar, text in _FLAGS:
    group.add_argument(f'--{name}', type=kind, metavar=metavar, help=text)


def given_constraints(flags: Any) -> dict[str, Any]:
  """Return the values of the given flags by name."""
  values = {name: getattr(flags, name) for name, *_ in _FLAGS}
  return {name: value for name, value in values.items() if value is not None}


def constrained_model(configuration: 'gin_utils.Configuration', flags: Any) -> Any:
  """Return the model of a configuration, whose constraints are replaced by those of the given flags.

  Raises:
    ConfigError: a value or the file is invalid.
  """
  import dataclasses

  from t5x_lite import decoding

  model = configuration.argument('model')
  given = given_constraints(flags)
  if not given:
    return model
  current = model.constraints or decoding.Constraints()
  return model.with_constraints(dataclasses.replace(current, **given))
