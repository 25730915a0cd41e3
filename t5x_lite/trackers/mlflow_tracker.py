"""Tracker for MLflow; `mlflow-skinny` is enough. `MLFLOW_TRACKING_URI` says where its server or folder is."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
import re
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.common import run_files
from t5x_lite.errors import ConfigError
from t5x_lite.trackers import base

_TEXT = checks.instance(str, 'a string').or_none()
# Tag by which a run is found again.
_RUN_ID = 't5x_lite.run_id'
# Metric whose newest value is the newest step, the last one of each step.
_STEP = 'step'
# Limits of a request, and of the length of a parameter.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_VALUE = 6000
_INVALID = re.compile(r'[^\w\-. :/]')
_STATUSES = {'finished': 'FINISHED', 'failed': 'FAILED', 'interrupted': 'KILLED'}


@dataclasses.dataclass(kw_only=True, eq=False)
class Mlflow(base.Tracker):
  """Sends a run to MLflow.

  Parameters of MLflow cannot change: those of a resumed run keep their first values.

  Attributes:
    experiment: name of the experiment; None for `MLFLOW_EXPERIMENT_NAME`, or else 't5x_lite'.
    run_name: name of the run; None for the name of the run directory.

  Raises:
    ConfigError: mlflow is not installed, or an option is not a string.
  """

  experiment: str | None = None
  run_name: str | None = None

  name = 'mlflow'

  def __post_init__(self):
    checks.check('Mlflow', vars(self), experiment=_TEXT, run_name=_TEXT)
    base.check_installed('`Mlflow`', 'mlflow', 'mlflow')
    self._client: Any = None
    self._run = ''
    self._metrics: list[Any] = []

  def start(self, run_info: base.RunInfo) -> None:
    """See base class."""
    # MLflow reports the use of its functions to its authors unless this is set.
    os.environ.setdefault('MLFLOW_DISABLE_TELEMETRY', 'true')
    import mlflow
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    self._metrics = []
    try:
      self._client = mlflow.MlflowClient()
      experiment = self._experiment()
    except MlflowException as error:
      if mlflow.is_tracking_uri_set():
        raise
      raise ConfigError(
        f'MLFLOW_TRACKING_URI must say where MLflow keeps its runs, got nothing, and its default fails: {error}. '
        'Set MLFLOW_TRACKING_URI=https://SERVER, or for a folder MLFLOW_TRACKING_URI=$PWD/mlruns and '
        'MLFLOW_ALLOW_FILE_STORE=true.'
      ) from error
    found = self._client.search_runs([experiment], f"tags.`{_RUN_ID}` = '{run_info.run_id}'")
    if found:
      self._run = found[0].info.run_id
      known = found[0].data.params
      self._client.update_run(self._run, status='RUNNING')
    else:
      name = self.run_name or run_info.name
      created = self._client.create_run(experiment, run_name=name, tags={_RUN_ID: run_info.run_id})
      self._run = created.info.run_id
      known = {}
    params = []
    for name, value in {**run_info.configuration, **run_info.facts}.items():
      key = _INVALID.sub('_', name)
      if key not in known:
        params.append(Param(key, str(value)[:_MAX_VALUE]))
    for first in range(0, len(params), _MAX_PARAMS):
      self._client.log_batch(self._run, params=params[first : first + _MAX_PARAMS])

  def _experiment(self) -> str:
    """Return the id of the experiment, which is created if it is missing."""
    name = self.experiment or os.environ.get('MLFLOW_EXPERIMENT_NAME') or 't5x_lite'
    found = self._client.get_experiment_by_name(name)
    if found is not None:
      return found.experiment_id
    return self._client.create_experiment(name)

  def last_step(self) -> int:
    """See base class."""
    metrics = self._client.get_run(self._run).data.metrics
    return int(metrics.get(_STEP, -1))

  def log(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
    """See base class. Requests have up to 1,000 numbers."""
    from mlflow.entities import Metric

    milliseconds = math.floor(1000 * wall_time)
    for name, value in {**values, _STEP: step}.items():
      self._metrics.append(Metric(_metric_name(name), float(value), milliseconds, step))
    while len(self._metrics) >= _MAX_METRICS:
      self._send()

  def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """See base class."""
    data = [list(row.values()) for row in rows]
    path = f'predictions/{_INVALID.sub("_", name.partition("/")[2])}-{step}.json'
    self._client.log_dict(self._run, {'columns': list(rows[0]), 'data': data}, path)

  def flush(self) -> None:
    """See base class."""
    while self._metrics:
      self._send()

  def _send(self) -> None:
    self._client.log_batch(self._run, metrics=self._metrics[:_MAX_METRICS])
    del self._metrics[:_MAX_METRICS]

  def finish(self, status: run_files.Status) -> None:
    """See base class."""
    self.flush()
    if status in _STATUSES:
      self._client.set_terminated(self._run, _STATUSES[status])


def _metric_name(name: str) -> str:
  """Return the name of a metric for MLflow, whose folders cannot hold both `a` and `a/b`.

  >>> _metric_name('train/gradient_norm/clipped_share'), _metric_name('inference_eval/my_task/bleu')
  ('train/gradient_norm.clipped_share', 'inference_eval/my_task/bleu')
  """
  parts = _INVALID.sub('_', name).split('/')
  num_parts = 2 if parts[0] == 'train' else 3
  return '/'.join([*parts[: num_parts - 1], '.'.join(parts[num_parts - 1 :])]).rstrip('/')
