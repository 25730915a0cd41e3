"""Waiting for data that other threads open or read: signals, warnings, and abandoned threads."""

import threading

import pytest

from t5x_lite import runtime
from t5x_lite.apps.common import waiting
from t5x_lite.errors import StoppedOnSignalError


class _Signals:
  ends_waits = False


def test_opening_that_stalls_is_reported_and_sees_signals(monkeypatch):
  signals, released = _Signals(), threading.Event()
  waits = waiting.DataWaits(
    signals, lambda doing: StoppedOnSignalError(f'while {doing}'), warning_seconds=0.1
  )
  printed = []

  def report(message):
    printed.append(message)
    signals.ends_waits = len(printed) == 2

  monkeypatch.setattr(runtime, 'print_stacks', report)
  monkeypatch.setattr(waiting, 'POLL_SECONDS', 0.01)
  with pytest.raises(StoppedOnSignalError, match='while opening it'):
    waits.call(released.wait, 'opening it')
  released.set()
  assert len(printed) == 2 and printed[0].startswith('warning: Opening it has taken 0 s.')
  signals.ends_waits = False
  assert waits.call(lambda: None, 'opening it') is None and list(
    waits.iterate(iter([0, None]), 'reading')
  ) == [0, None]
  with pytest.raises(KeyError, match='mine'):
    waits.call(lambda: {}['mine'], 'opening it')


@pytest.fixture
def waits(monkeypatch):
  monkeypatch.setattr(waiting, 'POLL_SECONDS', 0.01)
  signals = _Signals()
  return waiting.DataWaits(
    signals,
    lambda doing: StoppedOnSignalError(f'while {doing}'),
    on_wait=lambda: setattr(signals, 'ends_waits', True),
  )


def test_an_iteration_reads_in_one_thread_that_ends_with_it(waits):
  threads = []

  def elements():
    for number in range(5):
      threads.append(threading.current_thread())
      yield number

  assert list(waits.iterate(elements(), 'reading')) == list(range(5))
  assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()
  threads[0].join(60)
  assert not threads[0].is_alive()
  some = waits.iterate(elements(), 'reading')
  assert next(some) == 0
  some.close()
  threads[-1].join(60)
  assert not threads[-1].is_alive() and len(threads) == 6

  def fails():
    yield 0
    raise KeyError('mine')

  with pytest.raises(KeyError, match='mine'):
    list(waits.iterate(fails(), 'reading'))


@pytest.mark.parametrize('fails', [False, True])
def test_data_opened_after_a_stop_is_closed(waits, fails):
  released, closed, threads = threading.Event(), [], []

  def open_late():
    threads.append(threading.current_thread())
    assert released.wait(60)
    if fails:
      raise OSError('gone')
    return 'source'

  with pytest.raises(StoppedOnSignalError, match='while opening it'):
    waits.call(open_late, 'opening it', closed.append)
  assert not closed
  released.set()
  threads[0].join(60)
  assert not threads[0].is_alive() and closed == ([] if fails else ['source'])


def test_data_opened_in_time_stays_open(waits):
  closed = []
  assert waits.call(lambda: 'source', 'opening it', closed.append) == 'source' and not closed
