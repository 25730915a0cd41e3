"""Templates of texts with the names of columns in braces, such as `summarize: {title}. {body}`."""

from collections.abc import Mapping
import json
import math
import re
from typing import Any, NamedTuple

from t5x_lite import checks
from t5x_lite.errors import DataError, did_you_mean
from t5x_lite.formatting import short_repr

_PARTS = re.compile(r'\{\{|\}\}|\{([^{}]*)\}|[{}]')


class Template(NamedTuple):
  """Text with places for the values of a record.

  Attributes:
    text: the template with braces.
    literals: the texts around the columns, one more than `columns`.
    columns: names of the columns in the order of their places; a name may occur twice.
  """

  text: str
  literals: tuple[str, ...]
  columns: tuple[str, ...]

  def render(self, record: Mapping[str, Any]) -> str:
    """Return the text for a record. Numbers and truth values are written as JSON writes them.

    Raises:
      DataError: the record lacks a column, or its value is null or no text, number or truth value.
    """
    parts = [self.literals[0]]
    for column, literal in zip(self.columns, self.literals[1:], strict=True):
      parts.append(_text(_value(record, column), column))
      parts.append(literal)
    return ''.join(parts)

  def references(self, record: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a record whose only column has a list of texts, e.g. several translations; None for others.

    Raises:
      DataError: the list is empty, or has other values than texts.
    """
    if self.literals != ('', '') or not isinstance(found := record.get(self.columns[0]), list):
      return None
    if not found:
      raise DataError(
        f'the column {self.columns[0]!r} must have at least one text, got an empty list. Correct it.'
      )
    for each in found:
      if not isinstance(each, str):
        raise DataError(
          f'the column {self.columns[0]!r} must have a list of texts, got {short_repr(each)} in it. Correct it.'
        )
    return [_text(each, self.columns[0]) for each in found]


def parse_template(text: str, owner: str, option: str) -> Template:
  """Return the template of a text: the name of a column, or a text with names of columns in braces.

  Two braces `{{` or `}}` are one brace of the text.

  >>> parse_template('answer', 'x', 'targets').columns
  ('answer',)
  >>> parse_template('{{{a}}}: {b}', 'x', 'inputs').render({'a': 1.5, 'b': True})
  '{1.5}: true'

  Args:
    text: the template.
    owner: owner of the option, for messages.
    option: name of the option.

  Raises:
    ConfigError: a brace has no counterpart, there is no name in it, or the text has no columns.
  """
  if not isinstance(text, str) or not text:
    raise checks.invalid(
      owner, option, "the name of a column, or a text such as 'summarize: {title}'", text
    )
  if '{' not in text and '}' not in text:
    return Template(f'{{{text}}}', ('', ''), (text,))
  literals = ['']
  columns = []
  end = 0
  for found in _PARTS.finditer(text):
    literals[-1] += text[end : found.start()]
    end = found.end()
    if found[0] in ('{{', '}}'):
      literals[-1] += found[0][0]
    elif found[1]:
      columns.append(found[1])
      literals.append('')
    else:
      raise checks.invalid(
        owner,
        option,
        'a text whose braces enclose names of columns',
        text,
        f'Correct the brace at character {found.start() + 1}. A brace of the text itself is written twice.',
      )
  literals[-1] += text[end:]
  if not columns:
    raise checks.invalid(
      owner,
      option,
      'a text with the name of a column in braces',
      text,
      'Write {name}; two braces are one brace of the text.',
    )
  return Template(text, tuple(literals), tuple(columns))


def _value(record: Mapping[str, Any], column: str) -> Any:
  if column not in record:
    raise DataError(f'the record has no column {column!r}.{did_you_mean(column, record)}')
  return record[column]


def _text(value: Any, column: str) -> str:
  if isinstance(value, str):
    try:
      value.encode('utf-8')
    except UnicodeEncodeError as error:
      raise DataError(
        f'the column {column!r} holds half of a surrogate pair. Correct it.'
      ) from error
    return value
  if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
    return json.dumps(value)
  if value is None or isinstance(value, float):
    shown = 'null' if value is None else value
    raise DataError(
      f'the column {column!r} has no value ({shown}). Write one, or remove the record.'
    )
  raise DataError(
    f'the column {column!r} must have a text, a number or a truth value, got {short_repr(value)}. Correct it.'
  )
