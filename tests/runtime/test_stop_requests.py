"""Which signals are further requests to stop."""

import signal

import pytest

from t5x_lite.runtime.stop_requests import StopRequests


@pytest.mark.parametrize(
  'signals, expected',
  [
    ([('SIGTERM', 0), ('SIGTERM', 1.5)], [False, True]),
    ([('SIGTERM', 0), ('SIGTERM', 0.5), ('SIGTERM', 2)], [False, False, True]),
    ([('SIGTERM', 0), ('SIGTERM', 0.5), ('SIGTERM', 1)], [False, False, False]),
    ([('SIGINT', 0), ('SIGINT', 0.1)], [False, True]),
    ([('SIGTERM', 0), ('SIGINT', 0.1)], [False, True]),
    ([('SIGINT', 0), ('SIGTERM', 0.1), ('SIGTERM', 0.2)], [False, True, False]),
    ([('SIGHUP', 0), ('SIGHUP', 5), ('SIGTERM', 6), ('SIGHUP', 9)], [False] * 4),
  ],
)
def test_a_repeated_sigterm_is_one_request_and_sighup_none(signals, expected):
  now = [0.0]
  requests = StopRequests(lambda: now[0])
  found = []
  for name, at in signals:
    now[0] = at
    found.append(requests.add(signal.Signals[name]))
  assert found == expected
