"""Which signals are further requests to stop, and the point at which all processes stop."""

import random
import signal

import pytest

from t5x_lite.runtime.stop_requests import StopAgreement
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


def test_without_a_request_nothing_stops():
  stops = StopAgreement()
  assert not any(stops.is_due() for _ in range(10))
  assert not stops.is_pending and not stops.has_agreed


@pytest.mark.parametrize('seed', range(20))
def test_all_stop_at_the_largest_limit(seed):
  """Processes that come to points in any order, while a thread of each notes the request at any time."""
  draw = random.Random(seed)
  processes = [StopAgreement() for _ in range(4)]
  points, stopped = [0] * 4, {}
  while len(stopped) < 4:
    if all(stops.limit is not None for stops in processes):
      for stops in processes:
        stops.agree(max(stops.limit for stops in processes))
    i = draw.choice([i for i in range(4) if i not in stopped])
    if points[i] > 3 and draw.random() < 0.2:
      processes[i].begin('SIGTERM to process 0')
      assert processes[i].limit <= points[i] + 1
    if (
      processes[i].limit is not None
      and points[i] + 1 >= processes[i].limit
      and processes[i].is_pending
    ):
      continue  # `is_due` would wait
    points[i] += 1
    if processes[i].is_due():
      stopped[i] = points[i]
  assert len(set(stopped.values())) == 1
  assert stopped[0] == max(stops.limit for stops in processes)
  assert all(stops.has_agreed for stops in processes)


def test_the_first_request_counts():
  stops = StopAgreement()
  stops.begin('SIGTERM to process 1')
  limit = stops.limit
  stops.begin('SIGINT to process 0')
  assert (stops.request, stops.limit) == ('SIGTERM to process 1', limit)
