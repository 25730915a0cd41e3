"""Thread pool that raises the errors of its tasks in the thread that submits them."""

import concurrent.futures
from typing import Any


class FailFastThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
  """Thread pool whose `submit` and `shutdown` raise the error of a finished task; for use in one thread.

  A task whose result the caller reads itself raises there too.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    """See `concurrent.futures.ThreadPoolExecutor`."""
    super().__init__(*args, **kwargs)
    self._unchecked: list[concurrent.futures.Future] = []

  def check_for_exceptions(self, wait: bool = False) -> None:
    """Raise the error of the first failed task.

    Args:
      wait: whether to wait for all tasks; otherwise only finished ones are checked.
    """
    if wait:
      concurrent.futures.wait(self._unchecked)
    finished = [future for future in self._unchecked if future.done()]
    self._unchecked = [future for future in self._unchecked if future not in finished]
    for future in finished:
      if not future.cancelled():
        future.result()

  def submit(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
    """Submit a task; then raise the error of a task that has failed.

    Args:
      *args: the function of the task and its arguments.
      **kwargs: arguments of the function.
    """
    future = super().submit(*args, **kwargs)
    self._unchecked.append(future)
    self.check_for_exceptions()
    return future

  def shutdown(self, *args: Any, wait: bool = False, **kwargs: Any) -> None:
    """End the threads.

    Args:
      *args: none; T5X has them in its signature.
      wait: whether to wait for all tasks and raise the error of the first failed one; otherwise only finished tasks are
        checked.
      **kwargs: `cancel_futures` of the base class.
    """
    super().shutdown(*args, wait=wait, **kwargs)
    self.check_for_exceptions(wait)
