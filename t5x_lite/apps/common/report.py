"""Text that a run prints about itself: before its start (`describe`) and after its end (`final_report`)."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import contextvars
import math
import os
import textwrap
import threading
from typing import Any, NamedTuple

import clu.values
import numpy as np

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import layers
from t5x_lite import metrics as metrics_lib
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import tree_utils
from t5x_lite.apps.common import metric_points
from t5x_lite.apps.common import starting_point
from t5x_lite.data.text.hugging_face import HuggingFaceVocabulary
from t5x_lite.formatting import format_bytes
from t5x_lite.formatting import format_cell
from t5x_lite.formatting import format_number
from t5x_lite.formatting import format_percent
from t5x_lite.formatting import format_table
from t5x_lite.formatting import printable
from t5x_lite.storage import files
from t5x_lite.storage import hub
from t5x_lite.storage import json_lines
from t5x_lite.trainer import non_finite
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from t5x_lite.types import PyTree

_NUM_PREDICTIONS = 10
# Characters of a metric that is a text, such as a signature of sacrebleu; longer ones are only in the files.
_MAX_TEXT = 100
# Limit for a source that stalls; otherwise the sample has its own, shorter limit.
_SAMPLE_SECONDS = 5.0


def describe(
  *,
  train_state_shape: PyTree,
  partitioner: partitioning.PjitPartitioner,
  specs: Mapping[str, Mapping[str, Any]],
  start: starting_point.StartingPoint,
  plan: str,
  num_microbatches: int,
  attention_kernels: Sequence[layers.KernelChoice] = (),
  fit: checkpoints.Fit | None = None,
  model: Any = None,
) -> str:
  """Return the description of a run before it starts: parameters, memory, batches and plan.

  Args:
    train_state_shape: shapes of the train state.
    partitioner: partitioner of the run.
    specs: shape and dtype of global batches, by dataset and feature name.
    start: starting point of the run.
    plan: plan of the run, see `plan.describe_plan`.
    num_microbatches: number of micro-batches per step.
    attention_kernels: kernels that `attention_kernel='auto'` takes.
    fit: arrays that will be new or not restored.
    model: model, whose vocabulary is described; None to leave it out.
  """
  report = partitioner.explain(train_state_shape)
  totals = report.totals()
  rows = [('dataset', 'feature', 'dtype', 'global batch', 'per device')]
  for name, spec in specs.items():
    for feature, leaf in spec.items():
      per_device = (leaf.shape[0] // partitioner.data_mesh_size, *leaf.shape[1:])
      rows.append(
        (name, feature, np.dtype(leaf.dtype).name, _shape(leaf.shape), _shape(per_device))
      )
  batches = f'Batches\n{format_table(rows)}'
  if num_microbatches > 1:
    batches += f'\nTraining batches are split into {num_microbatches} micro-batches.'
  parts = [
    report.to_text().rstrip(),
    f'Memory\nstate per device  {format_bytes(totals.bytes_per_device)} (plus activations and gradients)',
    batches,
  ]
  if model is not None:
    start_id = getattr(model, 'decoder_start_id', 0)
    parts.insert(2, f'Vocabulary  {describe_vocabulary(model.output_vocabulary, start_id)}')
    adapter = describe_adapter(model, train_state_shape)
    if adapter is not None:
      parts.insert(1, adapter)
  if attention_kernels:
    parts.append('\n'.join(['Attention kernels', *map(str, attention_kernels)]))
  parts.append('\n'.join([f'Plan\nstart        {start.description}', *_fit_lines(fit), plan]))
  return '\n\n'.join(parts)


def describe_adapter(model: Any, train_state_shape: PyTree) -> str | None:
  """Return one line about the adapter of a model and what it trains; None without an adapter.

  Args:
    model: the model.
    train_state_shape: shapes of the train state, with an optimizer.
  """
  adapter = state_init.adapter_of(model)
  if adapter is None:
    return None
  params = train_state_shape.params
  kernels = adapters.with_adapter(params, train_state_shape.params_axes)
  ranks = sorted({adapter.rank_of(kernel.path) for kernel in kernels})
  alphas = sorted({adapter.alpha_of(kernel.path) for kernel in kernels})
  names = ', '.join(dict.fromkeys(kernel.name for kernel in kernels))
  num_kernels = sum(kernel.size('s') for kernel in kernels)
  num_params = tree_utils.num_elements(params)
  num_trained = sum(
    leaf.size for path, leaf in tree_utils.named_leaves(params) if adapter.is_trained(path)
  )
  num_bytes = tree_utils.num_bytes(train_state_shape.param_states)
  return (
    f'Adapter  rank {_numbers(ranks)}, alpha {_numbers(alphas)}: {num_kernels:,} '
    f'kernels ({names}); trained {num_trained:,} of {num_params:,} parameters '
    f'({format_percent(num_trained / num_params)}), optimizer state {format_bytes(num_bytes)}'
  )


def _numbers(values: Sequence[float]) -> str:
  return ', '.join(f'{value:g}' for value in values)


def describe_vocabulary(vocabulary: Any, decoder_start_id: int) -> str:
  """Return one line about a vocabulary of any package: its origin, its number of ids, and its special ids."""
  origin = repr(vocabulary)
  if isinstance(vocabulary, HuggingFaceVocabulary):
    folder, name = os.path.split(vocabulary.path)
    origin = f'{name} of {hub.shown_name(folder)} ({vocabulary.kind})'
  return (
    f'{origin}: {vocabulary.vocab_size:,} ids, padding {vocabulary.pad_id}, end {vocabulary.eos_id}, '
    f'start {decoder_start_id}'
  )


def _fit_lines(fit: checkpoints.Fit | None) -> list[str]:
  """Return lines with the groups of arrays that will be new, and of stored ones that will not be restored."""
  lines = []
  for heading, names in (
    ('new', fit.new if fit else ()),
    ('not restored', fit.ignored if fit else ()),
  ):
    if names:
      lines.append(f'{heading:<13}{len(names)} arrays')
      lines += [f'               {text}' for text in checkpoints.describe_names(names)]
  return lines


def describe_devices(partitioner: partitioning.BasePartitioner) -> str:
  """Return number and kind of the devices, e.g. '4 cpu devices'."""
  mesh = partitioner.mesh
  devices = f'{mesh.size} {mesh.devices.ravel()[0].device_kind} device'
  if mesh.size > 1:
    devices += 's'
  return devices


def run_header(train_state_shape: PyTree, partitioner: partitioning.PjitPartitioner) -> str:
  """Return one line about the model and its devices."""
  num_params = tree_utils.num_elements(train_state_shape.params)
  axes = ' x '.join(f'{axis}={size}' for axis, size in partitioner.mesh.shape.items())
  return f'{num_params:,} parameters on {describe_devices(partitioner)} ({axes})'


class StateSize(NamedTuple):
  """Size of a train state.

  Attributes:
    num_params: number of elements of the parameters.
    num_arrays: number of arrays of the entire state.
    num_bytes: bytes of one copy of the state.
    bytes_per_device: bytes of the state on each device.
  """

  num_params: int
  num_arrays: int
  num_bytes: int
  bytes_per_device: int

  def describe(self) -> str:
    """Return a line for the log."""
    return (
      f'State: {self.num_arrays:,} arrays of {format_bytes(self.num_bytes)}, '
      f'{format_bytes(self.bytes_per_device)} on each device.'
    )

  def metrics(self) -> dict[str, float]:
    """Return the metrics of the first step of a run."""
    return {
      'state/num_params': float(self.num_params),
      'state/bytes': float(self.num_bytes),
      'state/bytes_per_device': float(self.bytes_per_device),
    }


def state_size(train_state_shape: PyTree, partitioner: partitioning.PjitPartitioner) -> StateSize:
  """Return the size of a train state of arrays or shapes."""
  totals = partitioner.explain(train_state_shape).totals()
  return StateSize(
    tree_utils.num_elements(train_state_shape.params),
    totals.num_arrays,
    totals.bytes_total,
    totals.bytes_per_device,
  )


def report_truncation(
  sample_fn: Callable[[], data.Truncation | None],
  log_fn: Callable[[str], None],
  manager: summaries.MetricsManager,
  events: runtime.EventLog,
  step: int,
) -> None:
  """Log and write the truncated share of the training examples if there are any; emit the event 'data_sampled'.

  Args:
    sample_fn: returns counts of a sample, or None. Errors and stalls are ignored here; the run itself reports them.
    log_fn: writes a line.
    manager: metrics manager of training.
    events: events of the run.
    step: step at which the metrics are written.
  """
  found = []

  def sample():
    with contextlib.suppress(Exception):
      found.append(sample_fn())

  context = contextvars.copy_context()  # of the configuration, see `checks.log_for_t5x`
  thread = threading.Thread(
    target=context.run, args=(sample,), name='t5x_lite-data-sample', daemon=True
  )
  thread.start()
  thread.join(_SAMPLE_SECONDS)
  if not found or found[0] is None:
    return
  events.emit('data_sampled', **found[0].details)
  if found[0].metrics:
    if line := found[0].describe():
      log_fn(line)
    manager.write_scalars(step, found[0].metrics)


def format_metrics(values: Mapping[str, Any]) -> str:
  """Return the most important metrics on one line, then those of `metrics.report_worst_layer`, then short texts.

  >>> format_metrics({'timing/seconds': 3.0, 'accuracy': 0.5, 'loss': 2.0, 'bleu': 31.25, 'bleu_signature': 'tok:13a'})
  'loss 2  accuracy 0.5  bleu 31.25  bleu_signature tok:13a'
  """
  plain = {}
  for name, value in values.items():
    if isinstance(value, clu.values.Summary):
      continue
    if isinstance(value, clu.values.Value):
      value = value.value
    plain[name] = value
  numbers = {}
  for name, number in plain.items():
    if not metric_points.is_hidden(name) and not isinstance(number, str):
      numbers[name] = float(np.asarray(number))
  names = metric_points.metrics_in_order(numbers)
  shown = {**{name: numbers[name] for name in names}, **metrics_lib.worst_of_layers(plain)}
  parts = [f'{name} {format_number(number)}' for name, number in shown.items()]
  for name, text in plain.items():
    if isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable():
      parts.append(f'{name} {text}')
  return '  '.join(parts)


def format_evaluations(
  results: Mapping[int, Mapping[str, float]], tasks: Mapping[str, Sequence[str]]
) -> str:
  """Return one table for each kind of evaluation, with a row for each checkpoint and task.

  Args:
    results: metrics by step and full name, `<kind>/<task>/<metric>`.
    tasks: names of the tasks, by kind.

  >>> print(format_evaluations({5: {'inference_eval/a/f1': 0.5, 'inference_eval/mean/f1': 0.5}},
  ...                          {'inference_eval': ['a']}))
  inference_eval
    step  task  f1
    ----  ----  ---
    5     a     0.5
  """
  parts = []
  for kind, names in tasks.items():
    rows: dict[tuple[int, str], dict[str, float]] = {}
    if len(names) > 1:
      names = [*names, evaluation.MEAN]
    for step, metrics in results.items():
      for task in names:
        prefix = f'{kind}/{task}/'
        found = {}
        for name, value in metrics.items():
          short_name = name.removeprefix(prefix)
          if name.startswith(prefix) and not metric_points.is_hidden(short_name):
            found[short_name] = value
        rows[step, task] = found
    columns = metric_points.metrics_in_order(set().union(*rows.values()))
    table = [('step', 'task', *columns)]
    for (step, task), metrics in rows.items():
      cells = [format_number(metrics[name]) if name in metrics else '' for name in columns]
      table.append((f'{step:,}', task, *cells))
    parts.append(f'{kind}\n{textwrap.indent(format_table(table), "  ")}')
  return '\n\n'.join(parts)


def final_report(model_dir: str, *, bad_steps_in_a_row: int = 0) -> str:
  """Return the output paths of a run, its last metrics, and some predictions with their targets.

  Everything is read from the run's files, so the report is also correct for a run that had ended before.

  Args:
    model_dir: the run directory.
    bad_steps_in_a_row: number of skipped steps at the end of the run.
  """
  root = files.path(model_dir)
  saved = checkpoints.all_steps(root)
  lines = [f'Outputs are in {model_dir}:']
  if saved:
    line = f'  checkpoints       {", ".join(map(str, saved[-5:]))}'
    if len(saved) > 5:
      line += f' (and {len(saved) - 5} older)'
    lines.append(line)
  metrics_files = summaries.metrics_files(root)
  if metrics_files:
    folders = ', '.join(f'{printable(name)}/' for name in metrics_files)
    lines.append(f'  metrics           {folders} (TensorBoard events and metrics.jsonl)')
  for name in ('config.gin', 'model-info.txt'):
    if (root / name).exists():
      kind = 'configuration' if name == 'config.gin' else 'parameters'
      lines.append(f'  {kind:<18}{name}')
  metrics = {}
  for name, path in metrics_files.items():
    rows = summaries.read_metrics(path)
    if rows:
      metrics[name] = rows
  num_skipped = int(
    sum(row.get(non_finite.NON_FINITE_STEPS, 0) for row in metrics.get('train', ()))
  )
  if num_skipped:
    if bad_steps_in_a_row:
      newest = f', including the last {bad_steps_in_a_row}'
    else:
      newest = ''
    lines.append(
      f'  skipped           {num_skipped:,} step(s) with a non-finite loss or gradient norm{newest}'
    )
  if metrics:
    lines += ['', 'Final metrics:']
    for name, rows in metrics.items():
      values = dict(rows[-1])
      values.pop('wall_time', None)
      step = values.pop('step')
      lines.append(f'  {name}, step {step:,}: {format_metrics(values)}')
  for task, step, predictions in _newest_predictions(root):
    lines += ['', f'Predictions of {task} at step {step:,}:', *prediction_table(predictions)]
  return '\n'.join(lines)


def _newest_predictions(root: files.Path) -> list[tuple[str, int, list[dict[str, Any]]]]:
  """Return (task, step, predictions) for each task that was evaluated by decoding."""
  newest: dict[files.Path, int] = {}
  prefix = evaluation.PREDICTIONS_PREFIX
  for path in sorted((root / 'inference_eval').rglob(f'{prefix}*.jsonl')):
    step = path.stem.removeprefix(prefix)
    if step.isdigit():
      newest[path.parent] = max(int(step), newest.get(path.parent, -1))
  found = []
  for folder, step in newest.items():
    rows = [row for _, row in json_lines.read(folder / f'{prefix}{step}.jsonl')]
    rows = [row for row in rows if row is not None]
    found.append((folder.relative_to(root / 'inference_eval').as_posix(), step, rows))
  return found


def prediction_table(predictions: Sequence[Mapping[str, Any]]) -> list[str]:
  """Return table lines of some predictions, evenly spaced among all."""
  count = min(_NUM_PREDICTIONS, len(predictions))
  positions = [math.floor(i * len(predictions) / count) for i in range(count)]
  chosen = [predictions[position] for position in positions]
  known = set().union(*chosen)
  columns = [name for name in ('targets', 'prediction', 'score', 'inputs') if name in known]
  titles = {'targets': 'target'}
  table = [tuple(titles.get(c, c) for c in columns)]
  for row in chosen:
    table.append(tuple(format_cell(row.get(name, '')) for name in columns))
  return textwrap.indent(format_table(table), '  ').splitlines()


def _shape(shape: Sequence[int]) -> str:
  return ' x '.join(map(str, shape))
