"""Sizes as people read them."""

import pytest

from t5x_lite import formatting


@pytest.mark.parametrize(
  'num_bytes,text',
  [
    (0, '0 B'),
    (1023, '1023 B'),
    (1024, '1.00 KiB'),
    (10 * 1024, '10.0 KiB'),
    (1000 * 1024, '0.98 MiB'),
    (123 * 2**20, '123 MiB'),
    (5 * 2**50, '5120 TiB'),
  ],
)
def test_format_bytes(num_bytes, text):
  assert formatting.format_bytes(num_bytes) == text
