"""Stacks of all threads, with names and functions."""

import sys
import threading
import time
import traceback

from t5x_lite import runtime


def test_stacks_name_threads_and_functions(capsys):
  release = threading.Event()

  def hangs_here():
    release.wait()

  thread = threading.Thread(target=hangs_here, name='a thread that hangs')
  thread.start()
  try:
    while not any(
      f.name == 'wait' for f in traceback.extract_stack(sys._current_frames()[thread.ident])
    ):
      time.sleep(0.01)
    runtime.print_stacks('Nothing happens.')
  finally:
    release.set()
    thread.join()
  err = capsys.readouterr().err
  assert err.startswith('\nNothing happens.\nStacks of all threads:\n')
  stack = err.partition("Thread 'a thread that hangs'")[2].partition('Thread ')[0].splitlines()
  places = [line.rpartition(' in ')[2] for line in stack[1:]]
  assert (
    places.index('wait') < places.index('hangs_here')
    and f'"{__file__}"' in stack[1 + places.index('hangs_here')]
  )
  assert "Thread 'MainThread'" in err and ' in test_stacks_name_threads_and_functions' in err
