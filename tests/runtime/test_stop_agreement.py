"""The point at which all processes stop."""

import random

import pytest

from t5x_lite.runtime.stop_agreement import StopAgreement


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
