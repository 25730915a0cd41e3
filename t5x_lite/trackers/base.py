"""The interface of trackers, and the trackers by name."""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import importlib.util
import pathlib
import re
from typing import Any, ClassVar

from t5x_lite import checks
from t5x_lite.apps.common import run_files
from t5x_lite.errors import needs_packages
from t5x_lite.trackers import TRACKERS

# Names that are also parts of names of files.
NAME = re.compile(r'[A-Za-z0-9_-]+')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
  """Facts about a run that a tracker gets before the metrics.

  Attributes:
    name: name of the run directory.
    run_id: text of letters and digits, the same whenever the run is followed: a tracker continues the run of this id.
    folder: local folder for files of the tracker; None if the position is in an object store.
    configuration: values of the configuration, see `run_files.configuration`.
    facts: facts about the run, see `run_files.facts`; more are known after its first checkpoint.
  """

  name: str
  run_id: str
  folder: pathlib.Path | None
  configuration: Mapping[str, str]
  facts: Mapping[str, Any]


class Tracker(abc.ABC):
  """Receives the metrics of a run, in the order of their steps, from one thread.

  Any method may raise: the follower warns once, waits, and begins again with `start`.

  Attributes:
    name: name in messages, and of the file of the position; letters, digits, '-' and '_'.
    can_overwrite: whether `discard_after` works. A tracker without it gets the lines of a step when they are final.
  """

  name: ClassVar[str]
  can_overwrite: ClassVar[bool] = False

  @abc.abstractmethod
  def start(self, run_info: RunInfo) -> None:
    """Begin or continue the run `run_info.run_id`; called again after an error, and when more facts are known."""

  @abc.abstractmethod
  def log(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
    """Take the metrics of a step.

    Args:
      step: training step.
      values: '<writer>/<metric>' to number, which may be NaN or infinite, such as 'train/loss' or
        'training_eval/<task>/loss'.
      wall_time: time when they were written, in seconds since 1970, UTC.
    """

  @abc.abstractmethod
  def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Take examples of an evaluation.

    Args:
      step: training step.
      name: writer, 'inference_eval/<task>'.
      rows: 'index', 'inputs', 'targets' and 'prediction' of each example, at least one. All rows have the same
        keys, and the values of a key are all numbers or all texts, lists as JSON.
    """

  @abc.abstractmethod
  def finish(self, status: run_files.Status) -> None:
    """End the connection.

    Args:
      status: status of the run; 'running' if only the follower ends.
    """

  @abc.abstractmethod
  def flush(self) -> None:
    """Return when everything so far would survive the end of this process."""

  def last_step(self) -> int | None:
    """Return the newest step that the tracker has of the run, -1 for none; None if that is unknown."""
    return None

  def discard_after(self, step: int) -> None:
    """Forget everything of later steps, which follows again; only called if `can_overwrite`."""
    raise NotImplementedError(f'{type(self).__name__} cannot overwrite.')


def make_tracker(tracker: str | Tracker) -> Tracker:
  """Return a tracker, or the one of a name in `TRACKERS` with its default options.

  Raises:
    ConfigError: the name is unknown, or the tracker's package is missing.
  """
  if isinstance(tracker, Tracker):
    check_name(tracker)
    return tracker
  checks.check('', {'tracker': tracker}, tracker=checks.one_of(tuple(TRACKERS)))
  return getattr(importlib.import_module('t5x_lite.trackers'), TRACKERS[tracker])()


def check_name(tracker: Tracker) -> None:
  """Raise ConfigError if the name of a tracker cannot be that of a file."""
  checks.check(
    type(tracker).__name__,
    {'name': getattr(tracker, 'name', None)},
    name=checks.Expectation(
      "letters, digits, '-' and '_'",
      lambda name: isinstance(name, str) and NAME.fullmatch(name) is not None,
    ),
  )


def check_installed(owner: str, package: str, extra: str) -> None:
  """Raise ConfigError, which names the extra, if a package is missing; it is not imported, which takes seconds."""
  with needs_packages(owner, package, extra=extra):
    if importlib.util.find_spec(package) is None:
      raise ImportError(f'No module named {package!r}')
