"""Facts about the origin of weights: the tokenizer, and those in the model card of an exported folder."""

import ast
import re
from typing import Any

from t5x_lite import checkpoints
from t5x_lite.apps.convert import source_network
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face.model_card import README_FILE
from t5x_lite.checkpoints.hugging_face.model_card import Origin
from t5x_lite.errors import CheckpointError, ConfigError, T5xLiteError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_HUB = 'hf://'
# Metrics of evaluations that say something about the model; the others describe the batches.
_METRICS_RE = re.compile(r'inference_eval/.+|training_eval/.+/(loss|accuracy)')
# A run may start from a run that started from a run, and a macro may name a macro.
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
  return _text_of(_bound(_config_of_run(checkpoint), 'INITIAL_CHECKPOINT_PATH'))


def tokenizer_of_run(source: sources.StateSource) -> str | None:
  """Return the Hugging Face folder of the vocabulary of a checkpoint's run, by config.gin; None without one.

  Raises:
    ConfigError: the folder does not exist.
  """
  config = _config_of_run(source.path)
  vocabulary = _bound(config, 'output_vocabulary')
  folder = _text_of(_bound(config, 'hugging_face_vocabulary.folder'))
  if folder is None or not re.fullmatch(r'@[\w.]*hugging_face_vocabulary\(\)', vocabulary):
    return None
  reason = 'got none'
  try:
    if files.path(folder).is_dir():
      return folder
  except (
    T5xLiteError
  ) as error:  # A model of the hub that is not in the cache, or a store that cannot be reached.
    reason = str(error).rstrip('.')
  base = source_network.base_of(source)
  if isinstance(base, sources.HuggingFaceSource):  # the same folder, which has moved
    return base.path
  raise ConfigError(
    f'The folder of the tokenizer of the run of {source.path!r}, {folder!r} in its config.gin, must exist: {reason}. '
    'Name a copy: --tokenizer=PATH.'
  )


def _config_of_run(checkpoint: str) -> str:
  """Return the config.gin of the run of a checkpoint, or an empty text without one."""
  folder = files.path(checkpoint).parent
  if checkpoint.startswith(_HUB) or not (folder / 'config.gin').is_file():
    return ''
  return untrusted.read_limited(folder, 'config.gin').decode(errors='replace')


def _bound(config: str, name: str) -> str:
  """Return the text of the value that is bound to the end of a name, through macros; empty without one."""
  for _ in range(_MAX_RUNS):
    found = re.search(rf'^(?:[\w.]+\.)?{re.escape(name)} = (?:\\\n\s*)?(.+)$', config, re.MULTILINE)
    if found is None or not found[1].startswith('%'):
      return found[1] if found else ''
    name = found[1].removeprefix('%')
  return ''


def _text_of(value: str) -> str | None:
  """Return a text of gin from its literal; None for any other value."""
  try:
    text = ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return None
  return text if isinstance(text, str) else None


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
