"""Why all processes of a run end: the failure of one of them."""

from collections.abc import Mapping
import dataclasses
import traceback
from typing import Any

from t5x_lite.errors import Ending, ExitCode
from t5x_lite.formatting import printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """Reason for the end of all processes of a run.

  Attributes:
    process: the process that failed first.
    status: exit status of all processes.
    error: type and first line of the exception; empty for a process that is silent.
    step: number of completed steps of the process; None if unknown.
    phase: what it did, e.g. 'data'; empty if unknown.
    seconds: how long it has been silent.
  """

  process: int
  status: int
  error: str = ''
  step: int | None = None
  phase: str = ''
  seconds: float = 0.0

  @classmethod
  def from_message(cls, message: Mapping[str, Any]) -> 'Failure':
    """Return the failure that another process has sent; a failed run never has the status 0.

    Raises:
      KeyError, TypeError, ValueError: the message is not one.
    """
    step = message.get('step')
    if step is not None:
      step = int(step)
    return cls(
      process=int(message['process']),
      status=int(message['status']) or int(ExitCode.ERROR),
      error=printable(str(message.get('error', ''))),
      step=step,
      phase=printable(str(message.get('phase', ''))),
      seconds=float(message.get('seconds', 0.0)),
    )

  def __str__(self) -> str:
    """Return a sentence without a full stop."""
    last = ''
    if self.step is not None:
      last += f' after step {self.step:,}'
    if self.error:
      return f'process {self.process} failed{last}: {self.error}'
    if self.phase:
      last += f' in the phase {self.phase!r}'
    if last:
      last = f', the last{last}'
    return (
      f'process {self.process} has given no sign of life for {self.seconds:.0f} s{last}: it was killed, or its '
      'machine or network has failed'
    )


def describe_error(error: BaseException) -> Ending:
  """Return how an error ends a program that is not a command: with its traceback."""
  if isinstance(error, SystemExit):
    status = int(ExitCode.ERROR)
    if isinstance(error.code, int) and error.code:
      status = error.code
    return Ending(f'sys.exit({error.code!r})', status)
  text = ''.join(traceback.format_exception(error)).rstrip()
  return Ending(text, int(getattr(error, 'exit_code', ExitCode.ERROR)))
