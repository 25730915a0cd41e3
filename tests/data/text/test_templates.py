"""Templates of texts: values, lists of texts, and wrong templates."""

import pytest

from t5x_lite.data.text.templates import parse_template
from t5x_lite.errors import ConfigError, DataError


@pytest.mark.parametrize(
  'template, record, text',
  [
    ('a', {'a': 'x'}, 'x'),
    ('a b', {'a b': 'x'}, 'x'),
    ('{a}', {'a': 'x'}, 'x'),
    ('sum: {a}. {b}', {'a': 'x', 'b': 'y'}, 'sum: x. y'),
    ('{a}{a}', {'a': 'x'}, 'xx'),
    ('{{{a}}}', {'a': 'x'}, '{x}'),
    ('{{a}} {b}', {'b': 'x'}, '{a} x'),
    ('{a:b!r}', {'a:b!r': 'x'}, 'x'),
    ('{a}', {'a': '{b}'}, '{b}'),  # a value is no template
    ('{a} {b} {c} {d}', {'a': 1, 'b': 0.5, 'c': True, 'd': -2}, '1 0.5 true -2'),
    ('{a}', {'a': ''}, ''),
  ],
)
def test_values(template, record, text):
  assert parse_template(template, 'x', 'inputs').render(record) == text


def test_lists_of_texts_are_references_of_a_column_alone():
  template = parse_template('a', 'x', 'targets')
  assert template.references({'a': ['x', 'y']}) == ['x', 'y']
  assert template.references({'a': 'x'}) is None
  assert parse_template('see {a}', 'x', 'targets').references({'a': ['x']}) is None


@pytest.mark.parametrize(
  'template, message',
  [
    ('', 'x.inputs. must be the name of a column, or a text such as .*, got'),
    ('{a', 'the brace at character 1'),
    ('a}', 'the brace at character 2'),
    ('x {} y', 'the brace at character 3'),
    ('{a{b}', 'the brace at character 1'),
    ('{{a}}', r'a text with the name of a column in braces, got .*Write \{name\}'),
    (3, 'got 3'),
  ],
)
def test_wrong_templates(template, message):
  with pytest.raises(ConfigError, match=message):
    parse_template(template, 'x', 'inputs')


@pytest.mark.parametrize(
  'value, message',
  [
    (None, "the column 'a' has no value"),
    (float('nan'), "the column 'a' has no value"),
    ({'b': 1}, "the column 'a' must have a text, a number or a truth value, got {'b': 1}"),
    ([1, 2], r'got \[1, 2\]'),
    ('\ud800', 'half of a surrogate pair'),
  ],
)
def test_values_that_are_no_texts(value, message):
  with pytest.raises(DataError, match=message):
    parse_template('{a} b', 'x', 'inputs').render({'a': value})


def test_a_missing_column_and_an_empty_list():
  with pytest.raises(DataError, match=r"no column 'colour'. Did you mean 'color'\?"):
    parse_template('colour', 'x', 'inputs').render({'color': 'x'})
  with pytest.raises(DataError, match='at least one text'):
    parse_template('a', 'x', 'targets').references({'a': []})
