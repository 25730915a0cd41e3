"""Tracker that writes TensorBoard events to another folder than that of the run, such as one that a team shares."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.common import run_files
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import format_cell
from t5x_lite.storage import files
from t5x_lite.trackers import base
from t5x_lite.trainer import summaries


@dataclasses.dataclass(kw_only=True, eq=False)
class TensorBoard(base.Tracker):
  """Writes a run to TensorBoard events, as they come: those of steps that are repeated are purged.

  Attributes:
    log_dir: folder of several runs; each has a folder with the name of its directory there. None for the folder of the
      position.
  """

  log_dir: str | None = None

  name = 'tensorboard'
  can_overwrite = True

  def __post_init__(self):
    checks.check(
      'TensorBoard', vars(self), log_dir=checks.instance(str, 'the path of a folder').or_none()
    )
    self._writer: Any = None
    self._folder: Any = None
    self._texts: dict[str, str] = {}

  def start(self, run_info: base.RunInfo) -> None:
    """See base class."""
    root = self.log_dir or run_info.folder
    if root is None:
      raise ConfigError(
        '`TensorBoard.log_dir` must be a folder if the run is in an object store, got None. Set '
        '--gin.trackers.TensorBoard.log_dir.'
      )
    self._close()
    self._folder = files.path(root) / run_info.name
    lines = [f'    {name} = {value}' for name, value in run_info.configuration.items()]
    facts = [f'    {name}: {value}' for name, value in run_info.facts.items()]
    self._texts = {'configuration': '\n'.join(lines), 'facts': '\n'.join(facts)}

  def _open(self) -> summaries.SummaryWriter:
    if self._writer is None:
      self._writer = summaries.SummaryWriter(self._folder)
      self._writer.write_text(0, self._texts)  # again, since they may be purged
    return self._writer

  def _close(self) -> None:
    if self._writer is not None:
      self._writer.close()
      self._writer = None

  def log(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
    """See base class."""
    self._open().write_scalars(step, values)

  def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """See base class."""
    lines = ['|'.join(rows[0]), '|'.join('---' for _ in rows[0])]
    for row in rows:
      lines.append('|'.join(format_cell(value).replace('|', '\\|') for value in row.values()))
    self._open().write_text(step, {f'{name}/predictions': '\n'.join(lines)})

  def flush(self) -> None:
    """See base class."""
    self._open().flush()

  def discard_after(self, step: int) -> None:
    """See base class."""
    self._close()
    path = self._folder / summaries.METRICS_FILE
    if path.is_file():
      summaries.keep_lines(path, lambda found: found <= step)

  def finish(self, status: run_files.Status) -> None:
    """See base class."""
    self._close()
