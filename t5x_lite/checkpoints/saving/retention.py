"""Deletion of checkpoints by retention policies, and the record of metrics for these policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import logging

from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.saving import policies
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_logger = logging.getLogger(__name__)


def record_metrics(
  checkpoints_dir: discovery.PathLike, step: int, metrics: Mapping[str, float]
) -> None:
  """Add metrics of the checkpoint of `step` to the directory's record; only in the lead process."""
  recorded = _recorded_metrics(checkpoints_dir)
  recorded.setdefault(step, {}).update({name: float(value) for name, value in metrics.items()})
  _write_record(checkpoints_dir, recorded)


def forget_metrics(checkpoints_dir: discovery.PathLike, step: int) -> None:
  """Remove metrics of `step`, and of deleted checkpoints, from the record.

  The lead process calls this before it saves `step`: recorded metrics belong to an earlier state of that step.
  """
  recorded = _recorded_metrics(checkpoints_dir)
  kept = {
    s: recorded[s] for s in recorded if s != step and s in discovery.all_steps(checkpoints_dir)
  }
  if kept != recorded:
    _write_record(checkpoints_dir, kept)


def metrics_by_step(
  checkpoints_dir: discovery.PathLike, steps: Sequence[int]
) -> dict[int, dict[str, float]]:
  """Return the metrics of each checkpoint; metrics recorded later override those saved with the checkpoint."""
  recorded = _recorded_metrics(checkpoints_dir)
  result = {}
  for step in steps:
    try:
      stored = manifest.read(discovery.get_checkpoint_dir(checkpoints_dir, step))
    except errors.CheckpointError:
      stored = None  # the metrics are unknown; a restore reports the damage
    result[step] = dict(stored.metrics if stored else {}) | recorded.get(step, {})
  return result


def apply(
  checkpoints_dir: discovery.PathLike,
  retention: Sequence[policies.RetentionPolicy],
  newest_step: int,
  *,
  with_metrics: bool,
  keep_dataset_checkpoints: int | None,
) -> None:
  """Delete the checkpoints that no policy keeps; only in the lead process, after a commit.

  Checkpoints that are marked unsound or of later steps than the committed one are ignored: the run replaces them later.

  Args:
    checkpoints_dir: the model directory.
    retention: a checkpoint is kept if any of these policies selects it.
    newest_step: the committed step.
    with_metrics: whether a policy needs metrics; otherwise no manifest is read.
    keep_dataset_checkpoints: number of newest checkpoints that keep their dataset state; None for all.
  """
  steps = [
    step
    for step in discovery.all_steps(checkpoints_dir)
    if step <= newest_step
    and not discovery.is_marked_unsound(discovery.get_checkpoint_dir(checkpoints_dir, step))
  ]
  path = {step: discovery.get_checkpoint_dir(checkpoints_dir, step) for step in steps}
  pinned = [step for step in steps if discovery.is_pinned_checkpoint(path[step])]
  if with_metrics:
    metrics = metrics_by_step(checkpoints_dir, steps)
  else:
    metrics = {}
  for policy in retention:
    if isinstance(policy, policies.KeepBest):
      _warn_of_unknown_metric(policy.metric_name, metrics)
  for step in policies.steps_to_delete(retention, steps, metrics, pinned):
    folders.remove_checkpoint_dir(path[step])
  if keep_dataset_checkpoints is not None:
    with_data = [
      step for step in discovery.all_dataset_checkpoint_steps(checkpoints_dir) if step in path
    ]
    for step in with_data[:-keep_dataset_checkpoints]:
      folders.remove_dataset_checkpoint(path[step])


def _warn_of_unknown_metric(name: str, metrics: Mapping[int, Mapping[str, float]]) -> None:
  kind = name.partition('/')[0]  # an evaluation of another kind may have come first
  known = {
    other for of_step in metrics.values() for other in of_step if other.partition('/')[0] == kind
  }
  if known and name not in known:
    _logger.warning(
      'SaveCheckpointConfig.metric_name_to_monitor is %r, and no checkpoint has a metric of that name.%s',
      name,
      errors.did_you_mean(name, known),
    )


def _write_record(
  checkpoints_dir: discovery.PathLike, recorded: Mapping[int, Mapping[str, float]]
) -> None:
  path = files.path(checkpoints_dir) / discovery.METRICS_FILENAME
  files.write(path, json.dumps({str(s): recorded[s] for s in sorted(recorded)}, indent=1))


def _recorded_metrics(checkpoints_dir: discovery.PathLike) -> dict[int, dict[str, float]]:
  path = files.path(checkpoints_dir) / discovery.METRICS_FILENAME
  try:
    return {
      int(step): dict(values) for step, values in json.loads(untrusted.read_regular(path)).items()
    }
  except FileNotFoundError:
    return {}
  except (ValueError, TypeError, AttributeError) as e:
    _logger.warning('%s cannot be read (%s): the recorded metrics are lost.', path, e)
    return {}
