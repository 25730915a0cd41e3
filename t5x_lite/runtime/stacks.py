"""Stacks of all threads, for reports about a process that makes no progress."""

import contextlib
import sys
import threading
import traceback

# A pipe that nobody reads blocks whoever writes to it; the caller must not hang because of that.
_WRITE_SECONDS = 10.0


def format_stacks() -> str:
  """Returns the Python stacks of all threads, the innermost frame first.

  Source files are not read: they may be on a file system that hangs.
  """
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  lines = []
  # A copy: other threads run on, and may start or end threads.
  for ident, frame in list(sys._current_frames().items()):
    lines.append(f'Thread {names.get(ident, ident)!r}, innermost frame first:')
    lines += [f'  File "{f.f_code.co_filename}", line {line} in {f.f_code.co_name}'
              for f, line in traceback.walk_stack(frame)]
  return '\n'.join(lines)


def print_stacks(message: str) -> None:
  """Writes a message and the stacks of all threads to stderr. Never raises, and returns within about ten seconds.

  Args:
    message: says what makes no progress.
  """
  text = f'\n{message}\nStacks of all threads:\n{format_stacks()}'

  def write() -> None:
    # What cannot be written is lost; see `standard_streams`.
    with contextlib.suppress(Exception):
      print(text, file=sys.stderr, flush=True)

  # In a thread, since another one may hold the lock of the stream while it waits for the reader.
  writer = threading.Thread(target=write, name='print_stacks', daemon=True)
  try:
    writer.start()
  except RuntimeError:  # there are too many threads, or the interpreter is ending
    write()
  else:
    writer.join(_WRITE_SECONDS)
