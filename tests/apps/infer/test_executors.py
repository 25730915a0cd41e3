"""The thread pool raises errors where tasks are submitted."""

import threading

import pytest

from t5x_lite.apps.infer import FailFastThreadPoolExecutor


def test_a_later_call_raises_the_error_of_a_task_once():
  begin, done = threading.Event(), threading.Event()

  def fail(error):
    begin.wait()
    raise error

  pool = FailFastThreadPoolExecutor(max_workers=1)
  failed = pool.submit(fail, KeyError('first'))  # does not block
  begin.set()
  with pytest.raises(KeyError, match='first'):
    pool.check_for_exceptions(wait=True)
  assert failed.done()
  waiting = pool.submit(done.wait)
  pool.check_for_exceptions()
  done.set()
  assert waiting.result()
  begin.clear()
  pool.submit(fail, KeyError('second'))
  threading.Timer(0.05, begin.set).start()
  with pytest.raises(KeyError, match='second'):
    pool.shutdown(wait=True)
