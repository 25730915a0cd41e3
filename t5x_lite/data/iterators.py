"""The doors of this package: open what a `DatasetConfig` describes, whatever its source.

TensorFlow and seqio are imported here only when the configuration says `source = 'seqio'`, grain only when it says
'grain'.
"""

from collections.abc import Iterator, Sequence
import logging
from typing import Any

import numpy as np

from t5x_lite.data import builtin_source
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.features import FeatureConverter, Row
from t5x_lite.data.interfaces import (
    EvalBatches, EvalTask, HostBatch, HostIterator, IndexedBatches, batches_of_rows, note_left_out)
from t5x_lite.data.synthetic import get_synthetic
from t5x_lite.data.vocabularies import same_vocabulary
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import DataLayout


def open_train_iterator(cfg: DatasetConfig, layout: DataLayout, *,
                        feature_converter: Any = 'encoder_decoder') -> HostIterator:
  """Returns an endless iterator of this process's rows of each global batch.

  Args:
    cfg: what to read.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: the name that the model gives (`FEATURE_CONVERTER`), or, for seqio, a converter class of seqio.

  Raises:
    ConfigError: the configuration contradicts itself, the layout or the model's features.
    DataError: unknown task, mixture or split, or a split without examples.
  """
  _check_layout(cfg, layout)
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_source
    return seqio_source.open_train_iterator(cfg, layout, feature_converter)
  if cfg.source == 'grain':
    from t5x_lite.data import grain_source
    return grain_source.open_train_iterator(cfg, layout, feature_converter)
  return builtin_source.BuiltinIterator(cfg, layout, feature_converter)


def open_eval_iterators(cfg: DatasetConfig, layout: DataLayout, eval_steps: int | None = None, *,
                        feature_converter: Any = 'encoder_decoder') -> dict[str, EvalBatches]:
  """Returns, per task, the batches for teacher-forced evaluation.

  A mixture is judged task by task. One pass over the split's examples, each once, at most `eval_steps` batches; the
  last batch is filled up with rows of zeros. Every process reads the whole split and takes its rows, so the result
  does not depend on their number.

  Args:
    cfg: what to read.
    layout: the partitioner's layout for `cfg.batch_size`.
    eval_steps: the most batches per task; None is the whole split.
    feature_converter: see `open_train_iterator`.

  Returns:
    Task name to re-iterable batches.

  Raises:
    ConfigError, DataError: as `open_train_iterator`.
  """
  _check_layout(cfg, layout)
  if eval_steps is not None and eval_steps < 1:
    raise ConfigError(f'eval_steps is {eval_steps}, expected 1 or more, or None for the whole split.')
  own = builtin_source.shard_rows(layout)
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_evaluation
    return seqio_evaluation.open_eval_iterators(cfg, layout, own, eval_steps, feature_converter)
  converter, tables, _ = builtin_source.resolve(cfg, feature_converter)
  spec = converter.element_spec(cfg.task_feature_lengths, layout.batch_size, cfg.pack)
  # Packed rows hold one example or more, so this many examples are always enough.
  limit = None if eval_steps is None or cfg.pack else eval_steps * layout.batch_size

  def make(name: str) -> EvalBatches:
    def prepare() -> list[Row]:
      _, examples = builtin_source.eval_examples(cfg, name, tables[name], limit)
      rows = builtin_source.eval_rows(cfg, examples, converter)
      return rows if eval_steps is None else rows[:eval_steps * layout.batch_size]

    rows = prepare()
    keep = rows if cfg.use_memory_cache else None
    num_batches = -(-len(rows) // layout.batch_size)

    def batches() -> Iterator[HostBatch]:
      for _, batch in _batches(prepare() if keep is None else keep, layout.batch_size, own, converter, cfg):
        yield batch

    return EvalBatches(batches, spec, num_batches, len(rows))

  return {name: make(name) for name in tables}


def open_eval_tasks(cfg: DatasetConfig, layout: DataLayout, *, feature_converter: Any = 'encoder_decoder',
                    num_examples: int | None = None) -> list[EvalTask]:
  """Returns the tasks that have metric functions, to be judged by decoding every example of the split once.

  Args:
    cfg: what to read; `pack` must be False.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: see `open_train_iterator`.
    num_examples: the most examples of each task, the first ones; None is the whole split.

  Raises:
    ConfigError, DataError: as `open_train_iterator`; `pack` is True.
  """
  _check_layout(cfg, layout)
  if cfg.pack:
    raise ConfigError('Evaluation by decoding takes one example per row, but its DatasetConfig has pack = True: set it '
                      'to False.')
  own = builtin_source.shard_rows(layout)
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_evaluation
    return seqio_evaluation.open_eval_tasks(cfg, layout, own, feature_converter, num_examples)
  if cfg.source == 'synthetic':
    raise ConfigError("A dataset with source = 'synthetic' has no texts to compare with: evaluation by decoding needs "
                      "source = 'seqio', 'builtin' or 'grain'.")
  converter, tables, _ = builtin_source.resolve(cfg, feature_converter)
  spec = converter.element_spec(cfg.task_feature_lengths, layout.batch_size, False)
  tasks, left_out = [], []
  for task in builtin_source.tasks_of(cfg):
    if not (task.metric_fns or task.score_metric_fns or task.predict_with_aux_metric_fns):
      left_out.append(task.name)
      continue
    table = tables[task.name]
    numbers, examples = builtin_source.eval_examples(cfg, task.name, table, num_examples)
    examples = [{**example, **table.texts(int(number), cfg.effective_seed)}
                for number, example in zip(numbers, examples, strict=True)]
    rows, batches = None, _indexed_batches(examples, layout.batch_size, own, converter, cfg)
    if cfg.use_memory_cache:
      rows = converter.convert([(example,) for example in examples], cfg.task_feature_lengths, False)
      batches = batches_of_rows(rows, layout.batch_size, own)
    tasks.append(EvalTask(
        name=task.name, batches=batches, examples=examples, metric_fns=task.metric_fns, postprocess=task.postprocess_fn,
        output_vocabulary=task.vocabularies['targets'], element_spec=spec, rows=rows, own=own,
        score_metric_fns=task.score_metric_fns, predict_with_aux_metric_fns=task.predict_with_aux_metric_fns))
  note_left_out(tasks, left_out)
  return tasks


def get_vocabulary(cfg: DatasetConfig) -> tuple[Any, Any]:
  """Returns the (input, output) vocabularies of the task or mixture; they are one where the task has only targets.

  Raises:
    ConfigError, DataError: unknown task or mixture.
  """
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_source
    return seqio_source.get_vocabulary(cfg)
  if cfg.source == 'synthetic':
    vocabulary = get_synthetic(cfg.mixture_or_task_name).vocabulary
    return vocabulary, vocabulary
  vocabularies = builtin_source.tasks_of(cfg)[0].vocabularies
  return vocabularies.get('inputs', vocabularies['targets']), vocabularies['targets']


def verify_matching_vocabs(cfg: DatasetConfig, model: Any) -> None:
  """Refuses a model whose vocabularies are not those of its data.

  Args:
    cfg: the data.
    model: has `input_vocabulary` and `output_vocabulary`.

  Raises:
    ConfigError: naming both.
  """
  for side, of_data, of_model in zip(('input', 'output'), get_vocabulary(cfg),
                                     (model.input_vocabulary, model.output_vocabulary), strict=True):
    if not same_vocabulary(of_data, of_model):
      raise ConfigError(f'The {side} vocabulary of the data {cfg.name!r} is {of_data}, the model has {of_model}: bind '
                        "the model's vocabulary (VOCABULARY) to that of the data, or choose other data.")


def _check_layout(cfg: DatasetConfig, layout: DataLayout) -> None:
  if layout.batch_size != cfg.batch_size:
    raise ConfigError(f'DatasetConfig.batch_size is {cfg.batch_size}, but the layout is for batches of '
                      f'{layout.batch_size}: make it with partitioner.get_data_layout(cfg.batch_size).')


def _batches(rows: Sequence[Row], batch_size: int, own: slice, converter: FeatureConverter,
             cfg: DatasetConfig) -> Iterator[tuple[np.ndarray, HostBatch]]:
  """Yields (indices int32, this process's rows) of each batch, filled up with empty rows of index -1."""
  for start in range(0, len(rows), batch_size):
    batch_rows = list(rows[start:start + batch_size])
    indices = np.arange(start, start + batch_size, dtype=np.int32)
    indices[len(batch_rows):] = -1
    batch_rows += [()] * (batch_size - len(batch_rows))
    yield indices[own], converter.convert(batch_rows[own], cfg.task_feature_lengths, cfg.pack)


def _indexed_batches(examples: Sequence[Any], batch_size: int, own: slice, converter: FeatureConverter,
                     cfg: DatasetConfig) -> IndexedBatches:
  return IndexedBatches(lambda: _batches([(example,) for example in examples], batch_size, own, converter, cfg),
                        -(-len(examples) // batch_size))
