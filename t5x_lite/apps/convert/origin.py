"""Facts about the origin of weights, for the model card of an exported folder."""

import ast
import re
from typing import Any

from t5x_lite import checkpoints
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face.model_card import README_FILE
from t5x_lite.checkpoints.hugging_face.model_card import Origin
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_HUB = 'hf://'
# Metrics of evaluations that say something about the model; the others describe the batches.
_METRICS_RE = re.compile(r'inference_eval/.+|training_eval/.+/(loss|accuracy)')
# A run may start from a run that started from a run.
_MAX_RUNS = 20


def origin_of(source: sources.StateSource) -> Origin:
  """Return the metrics and data of the run that made the weights, and the model of the hub that they started from.

  Args:
    source: the weights.
  """
  metadata = source.metadata
  data = metadata.get('run', {}).get('data', {})
  task = data.get('mixture_or_task_name')
  metrics = {}
  if source.manifest is not None:
    metrics = {
      name: value
      for name, value in source.manifest.metrics.items()
      if _METRICS_RE.fullmatch(name) and '/mean/' not in name
    }
  base_model, license_name = _base(source.path, metadata)
  return Origin(
    base_model=base_model,
    license=license_name,
    data=None if task is None else str(task),
    metrics=metrics,
  )


def _base(path: str, metadata: Any) -> tuple[str | None, str | None]:
  """Return (model of the hub, license) of the first weights of a chain of runs."""
  for _ in range(_MAX_RUNS):
    start = metadata.get('converted', {}).get('from') or _start_of_run(path)
    if start is None:
      return _base_of_folder(path)
    path = start
    if path.startswith(_HUB) or sources.detect_format(path) != 't5x_lite':
      return _base_of_folder(path)
    metadata = checkpoints.read_metadata(path)
  return None, None


def _start_of_run(checkpoint: str) -> str | None:
  """Return the path that the run of a checkpoint started from, or None if its config.gin has none."""
  folder = files.path(checkpoint).parent
  if checkpoint.startswith(_HUB) or not (folder / 'config.gin').is_file():
    return None
  text = untrusted.read_limited(folder, 'config.gin').decode(errors='replace')
  found = re.search(r"^INITIAL_CHECKPOINT_PATH = (?:\\\n\s*)?('.*'|\".*\")$", text, re.MULTILINE)
  if found is None:
    return None
  return ast.literal_eval(found[1])


def _base_of_folder(path: str) -> tuple[str | None, str | None]:
  """Return (model of the hub, license) of a Hugging Face folder, by its name and the head of its model card."""
  name = None
  if path.startswith(_HUB):
    name = path.removeprefix(_HUB).partition('@')[0].rstrip('/')
  try:
    text = untrusted.read_limited(files.path(path), README_FILE).decode(errors='replace')
  except (OSError, CheckpointError):  # No card, or the folder does not exist any more.
    return name, None
  head = re.match(r'---\n(.*?)\n---', text, re.DOTALL)
  keys = dict(re.findall(r'^(license|base_model): *([\w./-]+) *$', head[1] if head else '', re.M))
  return name or keys.get('base_model'), keys.get('license')
