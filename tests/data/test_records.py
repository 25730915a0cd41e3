"""Records of tab-separated files: values, and the line of an error."""

import pytest

from t5x_lite import data
from t5x_lite import errors


@pytest.mark.parametrize('content, message', [
    (b'a\tb\nc\td\te\n', r'a\.tsv, line 2 must have 2 fields separated by tabs, got 3'),
    (b'a\tb\n\xff\tb\n', r'a\.tsv, line 2 must be UTF-8, got invalid start byte at byte 1')])
def test_read_tsv_names_the_line(tmp_path, content, message):
  path = tmp_path / 'a.tsv'
  path.write_bytes(content)
  with pytest.raises(errors.DataError, match=message):
    data.read_tsv(path)


def test_read_tsv(tmp_path):
  path = tmp_path / 'a.tsv'
  path.write_bytes('\ufeffé\tb\r\n\n"c\td\u2028\n'.encode())
  assert data.read_tsv(path) == [('é', 'b'), ('"c', 'd\u2028')]
  assert data.read_tsv(path, num_fields=2) == data.read_tsv(str(path))
  with pytest.raises(errors.DataError, match="Cannot read '.*none'"):
    data.read_tsv(tmp_path / 'none')
