"""Words about the failure of a process."""

import pytest

from t5x_lite.errors import DataStalledError
from t5x_lite.runtime.failure import Failure
from t5x_lite.runtime.failure import describe_error


@pytest.mark.parametrize(
  'failure, text',
  [
    (
      Failure(process=1, status=1, error='ValueError: x', step=1041),
      'process 1 failed after step 1,041: ValueError: x',
    ),
    (
      Failure(process=0, status=2, error='ConfigError: x', phase='starting'),
      'process 0 failed: ConfigError: x',
    ),
    (
      Failure(process=3, status=75, step=7, phase='data', seconds=30.4),
      "process 3 has given no sign of life for 30 s, the last after step 7 in the phase 'data': it was killed, or its "
      'machine or network has failed',
    ),
    (
      Failure(process=0, status=75, seconds=3.0),
      'process 0 has given no sign of life for 3 s: it was killed, or its '
      'machine or network has failed',
    ),
  ],
)
def test_sentences(failure, text):
  assert str(failure) == text


@pytest.mark.parametrize(
  'error, status',
  [
    (ValueError('x'), 1),
    (DataStalledError('x'), 4),
    (SystemExit(3), 3),
    (SystemExit(None), 1),
    (SystemExit('x'), 1),
    (SystemExit(0), 1),
  ],
)
def test_statuses(error, status):
  ending = describe_error(error)
  assert ending.status == status
  assert ('sys.exit' if isinstance(error, SystemExit) else type(error).__name__) in ending.text
