"""JSON lines come back one for each object."""

import pytest

from t5x_lite.storage import files
from t5x_lite.storage import json_lines


@pytest.mark.parametrize('text', ['a\u2028b\x85c\u2029d\x1ee\rf\ng', '\ud800', 'grün'])
def test_lines_come_back_one_for_each_object(tmp_path, text):
  path = tmp_path / 'lines'
  files.write(path, ''.join(map(json_lines.to_line, [{'text': text}, {'n': 2}])) + '[3]\n{"cut')
  lines, rows = zip(*json_lines.read(path), strict=True)
  assert rows == ({'text': text}, {'n': 2}, None, None)
  assert lines[1:] == ('{"n": 2}', '[3]', '{"cut') and len(lines[0].splitlines()) == 1
  assert ''.join(f'{line}\n' for line in lines) == path.read_text('utf-8') + '\n'
