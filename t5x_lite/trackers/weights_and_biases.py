"""Tracker for Weights & Biases. Everything that wandb collects by itself is off: code, git, console, the machine."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import time
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.common import run_files
from t5x_lite.trackers import base

_TEXT = checks.instance(str, 'a string').or_none()
_STEP = 'step'
_DATA_DIR = 'WANDB_DATA_DIR'
# wandb's process writes its file this often, and the largest time that is waited for it.
_FLUSH_SECONDS = 0.5
_MAX_FLUSH_SECONDS = 60.0
# What stands for the name of the machine, which wandb always records.
_HOST = 't5x_lite'
_COLLECTS_NOTHING = {
  'console': 'off',
  'disable_code': True,
  'disable_git': True,
  'disable_job_creation': True,
  'host': _HOST,
  'program': _HOST,
  'save_code': False,
  'silent': True,
  'x_disable_machine_info': True,
  'x_disable_meta': True,
  'x_disable_stats': True,
  'x_save_requirements': False,
  'x_transaction_log_flush_interval': _FLUSH_SECONDS,
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Wandb(base.Tracker):
  """Sends a run to Weights & Biases, or with `WANDB_MODE=offline` to files for `wandb sync`.

  wandb's own variables apply, such as WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY and WANDB_DIR.

  Attributes:
    project: project; None for `WANDB_PROJECT`, or else 't5x_lite'.
    entity: user or team; None for `WANDB_ENTITY`, or else the default of the key.
    run_name: name of the run; None for `WANDB_NAME`, or else the name of the run directory.
    tags: tags of the run.

  Raises:
    ConfigError: wandb is not installed, or an option has the wrong type.
  """

  project: str | None = None
  entity: str | None = None
  run_name: str | None = None
  tags: Sequence[str] = ()

  name = 'wandb'

  def __post_init__(self):
    checks.check(
      'Wandb',
      vars(self),
      project=_TEXT,
      entity=_TEXT,
      run_name=_TEXT,
      tags=checks.Expectation(
        'a list of strings',
        lambda tags: not isinstance(tags, str) and all(isinstance(tag, str) for tag in tags),
      ),
    )
    base.check_installed('`Wandb`', 'wandb', 'wandb')
    self._run: Any = None
    self._written_bytes = 0
    self._has_new = False
    self._has_set_data_dir = False

  def start(self, run_info: base.RunInfo) -> None:
    """See base class."""
    import wandb

    config = {**run_info.configuration, **run_info.facts}
    if self._run is not None:
      self._run.config.update(config, allow_val_change=True)
      return
    folder = None
    if run_info.folder is not None and 'WANDB_DIR' not in os.environ:
      run_info.folder.mkdir(parents=True, exist_ok=True)
      folder = run_info.folder
    if run_info.folder is not None and _DATA_DIR not in os.environ:
      # wandb keeps copies of tables until they are uploaded, by default in the home folder.
      os.environ[_DATA_DIR] = str(run_info.folder / 'wandb')
      self._has_set_data_dir = True
    self._run = wandb.init(
      project=self.project or os.environ.get('WANDB_PROJECT') or 't5x_lite',
      entity=self.entity,
      name=self.run_name or os.environ.get('WANDB_NAME') or run_info.name,
      tags=list(self.tags) or None,
      id=run_info.run_id,
      resume='allow',
      reinit='create_new',
      dir=folder,
      config=config,
      settings=wandb.Settings(**_COLLECTS_NOTHING),
    )
    # wandb drops a value with an explicit step that is lower than the one before, so the step is a metric.
    self._run.define_metric(_STEP)
    self._run.define_metric('*', step_metric=_STEP)
    self._written_bytes = 0
    self._has_new = False

  def last_step(self) -> int | None:
    """See base class; unknown if wandb is offline."""
    if self._run.offline or self._run.disabled:
      return None
    if not self._run.resumed:
      return -1
    return int(self._run.summary.get(_STEP, -1))

  def log(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
    """See base class."""
    self._log({**values, _STEP: step, 'wall_time': wall_time})

  def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """See base class."""
    import wandb

    columns: list[Any] = list(rows[0])
    data: list[Any] = [list(row.values()) for row in rows]
    self._log({f'{name}/predictions': wandb.Table(columns=columns, data=data), _STEP: step})

  def _log(self, values: Mapping[str, Any]) -> None:
    self._has_new = True
    self._run.log(dict(values))

  def flush(self) -> None:
    """See base class: wait until wandb's process, which ends with this one, has written its file.

    Raises:
      TimeoutError: it has not.
    """
    if self._run is None or self._run.disabled or not self._has_new:
      return
    path = self._run.settings.sync_file
    deadline = time.monotonic() + _MAX_FLUSH_SECONDS
    size = -1
    changed_at = time.monotonic()
    while size <= self._written_bytes or time.monotonic() - changed_at < 2.5 * _FLUSH_SECONDS:
      if time.monotonic() > deadline:
        raise TimeoutError(f'wandb has not written {path} within {_MAX_FLUSH_SECONDS:g} s')
      time.sleep(_FLUSH_SECONDS / 5)
      now = os.path.getsize(path)
      if now != size:
        size = now
        changed_at = time.monotonic()
    self._written_bytes = size
    self._has_new = False

  def finish(self, status: run_files.Status) -> None:
    """See base class."""
    run = self._run
    self._run = None
    if run is None:
      return
    if status not in ('finished', 'failed'):
      run.mark_preempting()  # wandb then shows that the run can continue
    run.finish(exit_code=int(status != 'finished'))
    if self._has_set_data_dir:
      os.environ.pop(_DATA_DIR, None)
      self._has_set_data_dir = False
