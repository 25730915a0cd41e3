"""Sources of tasks whose examples have numbers (`ExampleTable`)."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches.features import UNKNOWN_LENGTH
from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.batches.features import Row
from t5x_lite.data.batches.features import check_lengths
from t5x_lite.data.batches.features import get_converter
from t5x_lite.data.batches.positions import shard_rows
from t5x_lite.data.batches.streams import DirectReader
from t5x_lite.data.batches.streams import PieceReader
from t5x_lite.data.batches.streams import Pieces
from t5x_lite.data.batches.streams import TaskStream
from t5x_lite.data.batches.table_iterator import TableIterator
from t5x_lite.data.batches.table_iterator import log_earlier_sentinels
from t5x_lite.data.batches.trimming import TrimmedExamples
from t5x_lite.data.builtin_tasks import BuiltinMixture
from t5x_lite.data.builtin_tasks import BuiltinTask
from t5x_lite.data.builtin_tasks import check_split
from t5x_lite.data.builtin_tasks import get_builtin
from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.interfaces import IndexedBatches
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.data.interfaces import batches_of_rows
from t5x_lite.data.interfaces import warn_of_omitted_tasks
from t5x_lite.data.sources import base
from t5x_lite.data.sources import synthetic
from t5x_lite.data.sources.example_sources import TableExamples

# Examples that are made together to find their lengths.
_NUM_MEASURED = 256


class TableSource(base.DataSource):
  """Base of sources of tasks whose examples have numbers (`ExampleTable`)."""

  @abc.abstractmethod
  def tasks(self) -> Sequence[BuiltinTask]:
    """Return the task of `cfg`, or the tasks of its mixture."""

  def rates(self) -> Sequence[float]:
    """Return the positive rate of each of `tasks`; equal rates by default."""
    return [1.0] * len(self.tasks())

  def get_converter(self, feature_converter: Any) -> FeatureConverter:
    """Return the feature converter with the given name."""
    return get_converter(feature_converter)

  def open_reader(self, pieces: Pieces) -> PieceReader:
    """Return the reader of the pieces of training batches; by default it makes them on demand."""
    return DirectReader(pieces)

  def get_vocabulary(self) -> tuple[Any, Any]:
    """See base class."""
    vocabularies = self.tasks()[0].vocabularies
    return vocabularies.get('inputs', vocabularies['targets']), vocabularies['targets']

  def _tasks_with_split(self) -> list[BuiltinTask]:
    """Return those of `tasks` that have the split, for uses that read a mixture task by task.

    Raises:
      MissingSplitError: no task has it.
    """
    tasks = self.tasks()
    splits = dict.fromkeys(split for task in tasks for split in task.splits)
    check_split(self.cfg.name, self.cfg.split, list(splits))
    return [task for task in tasks if self.cfg.split in task.splits]

  def _open(
    self, feature_converter: Any, tasks: Sequence[BuiltinTask]
  ) -> tuple[FeatureConverter, list[tuple[BuiltinTask, TrimmedExamples]]]:
    """Return the converter, and each of `tasks` with its examples."""
    lengths = self.cfg.known_lengths
    converter = self.get_converter(feature_converter)
    for task in tasks:
      converter.check(lengths, list(task.vocabularies), task.name)
    opened = []
    for task in tasks:
      table = task.table(self.cfg.split, lengths)
      if self.cfg.earlier_sentinels and table.earlier is not None:
        log_earlier_sentinels(task.name)
        table = table.earlier
      opened.append((task, TrimmedExamples(table, lengths, self.cfg.trim_output_features)))
    return converter, opened

  def open_train_iterator(self, layout: Any, feature_converter: Any) -> HostIterator:
    """See base class."""
    converter, opened = self._open(feature_converter, self.tasks())
    tables = {task.name: table for task, table in opened}
    return TableIterator(
      self.cfg, layout, tables, self.rates(), converter, feature_converter, self.open_reader
    )

  def open_eval_iterators(
    self, layout: Any, eval_steps: int | None, feature_converter: Any
  ) -> dict[str, EvalBatches]:
    """See base class."""
    cfg = self.cfg
    own = shard_rows(layout)
    converter, opened = self._open(feature_converter, self._tasks_with_split())
    spec = converter.element_spec(cfg.known_lengths, layout.batch_size, cfg.pack)
    # Packed rows hold at least one example, so this number of examples is sufficient.
    if eval_steps is None or cfg.pack:
      limit = None
    else:
      limit = eval_steps * layout.batch_size

    def make(name: str, table: TrimmedExamples) -> EvalBatches:
      def prepare() -> list[Row]:
        _, examples = self._epoch(name, table, limit)
        rows = self._rows(examples, converter)
        if eval_steps is None:
          return rows
        return rows[: eval_steps * layout.batch_size]

      rows = prepare()
      kept = None
      if cfg.use_memory_cache:
        kept = rows
      num_batches = -(-len(rows) // layout.batch_size)

      def batches() -> Iterator[HostBatch]:
        current = kept
        if current is None:
          current = prepare()
        for _, batch in self._batches(current, layout.batch_size, own, converter):
          yield batch

      return EvalBatches(batches, spec, num_batches, len(rows))

    return {task.name: make(task.name, table) for task, table in opened}

  def open_eval_tasks(
    self, layout: Any, feature_converter: Any, num_examples: int | None
  ) -> list[EvalTask]:
    """See base class."""
    cfg = self.cfg
    own = shard_rows(layout)
    converter, opened = self._open(feature_converter, self._tasks_with_split())
    spec = converter.element_spec(cfg.task_feature_lengths, layout.batch_size, False)
    tasks = []
    omitted = []
    for task, table in opened:
      if not task.has_metrics:
        omitted.append(task.name)
        continue
      numbers, examples = self._epoch(task.name, table, num_examples)
      examples = [
        {**example, **table.texts(int(number), cfg.effective_seed)}
        for number, example in zip(numbers, examples, strict=True)
      ]
      rows = None
      batches = self._indexed_batches(examples, layout.batch_size, own, converter)
      if cfg.use_memory_cache:
        rows = converter.convert(
          [(example,) for example in examples], cfg.task_feature_lengths, False
        )
        batches = batches_of_rows(rows, layout.batch_size, own)
      tasks.append(
        EvalTask(
          name=task.name,
          batches=batches,
          examples=examples,
          metric_fns=task.metric_fns,
          postprocess=task.postprocess_fn,
          output_vocabulary=task.vocabularies['targets'],
          element_spec=spec,
          rows=rows,
          own=own,
          score_metric_fns=task.score_metric_fns,
          predict_with_aux_metric_fns=task.predict_with_aux_metric_fns,
        )
      )
    warn_of_omitted_tasks(tasks, omitted)
    return tasks

  def open_example_sources(self, feature_converter: Any) -> list[ExampleSource]:
    """See base class."""
    converter, opened = self._open(feature_converter, self._tasks_with_split())
    return [TableExamples(self.cfg, task.name, table, converter) for task, table in opened]

  def measure(
    self, feature_converter: Any, num_examples: int | None, decodes: bool
  ) -> SplitLengths:
    """See base class."""
    cfg = self.cfg
    tasks = self._tasks_with_split()
    converter = self.get_converter(feature_converter)
    tables = {}
    for task in [task for task in tasks if task.has_metrics or not decodes] or tasks:
      lengths = dict.fromkeys(converter.features_of(list(task.vocabularies)), UNKNOWN_LENGTH)
      converter.check(lengths, list(task.vocabularies), task.name)
      tables[task.name] = task.table(cfg.split, lengths)

    def measured() -> Iterator[dict[str, int]]:
      for name, table in tables.items():
        if num_examples is None:
          count = len(table)
        else:
          count = min(num_examples, len(table))
        stream = TaskStream(name, table, cfg.effective_seed, cfg.shuffle)
        for first in range(0, count, _NUM_MEASURED):
          for example in stream.examples(np.arange(first, min(first + _NUM_MEASURED, count))):
            yield {feature: len(ids) for feature, ids in example.items()}

    return SplitLengths(
      examples=measured(),
      identity={
        'content': {name: [len(table), table.fingerprint] for name, table in tables.items()}
      },
    )

  def read_task_texts(self, max_examples: int | None) -> dict[str, list[str]]:
    """See base class; if a task does not keep texts, its vocabulary decodes the ids."""
    cfg = self.cfg
    texts: dict[str, list[str]] = {}
    for task in self._tasks_with_split():
      check_lengths(cfg.known_lengths, list(task.vocabularies), task.name)
      table = task.table(cfg.split, cfg.known_lengths)
      count = len(table)
      if max_examples is not None:
        count = min(max_examples, count)
      numbers = np.arange(count)
      examples = None
      for feature in cfg.known_lengths:
        kept: list[Any] = [
          table.texts(int(number)).get(f'{feature}_pretokenized') for number in numbers
        ]
        if None in kept:
          if examples is None:
            examples = table.examples(cfg.effective_seed, numbers)
          kept = [task.vocabularies[feature].decode(example[feature]) for example in examples]
        texts.setdefault(feature, []).extend(kept)
    return texts

  def _epoch(
    self, name: str, table: TrimmedExamples, limit: int | None
  ) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Return (numbers, examples) of one epoch of `table`, at most `limit`, in the order of `cfg`."""
    count = len(table)
    if limit is not None:
      count = min(limit, count)
    seed = self.cfg.effective_seed
    numbers = TaskStream(name, table, seed, self.cfg.shuffle).numbers(np.arange(count))
    return numbers, table.examples(seed, numbers)

  def _rows(
    self, examples: Sequence[Mapping[str, np.ndarray]], converter: FeatureConverter
  ) -> list[Row]:
    """Return the rows of an evaluation: packed by groups if `cfg.pack`, otherwise one example each."""
    if not self.cfg.pack:
      return [(example,) for example in examples]
    lengths = self.cfg.known_lengths
    size = converter.pack_group_size(lengths)
    rows: list[Row] = []
    for start in range(0, len(examples), size):
      rows += converter.pack(examples[start : start + size], lengths)
    return rows

  def _batches(
    self, rows: Sequence[Row], batch_size: int, own: slice, converter: FeatureConverter
  ) -> Iterator[tuple[np.ndarray, HostBatch]]:
    """Yield (indices int32[rows], this process's rows) of each batch, padded with rows of index -1."""
    for start in range(0, len(rows), batch_size):
      batch_rows = list(rows[start : start + batch_size])
      indices = np.arange(start, start + batch_size, dtype=np.int32)
      indices[len(batch_rows) :] = -1
      batch_rows += [()] * (batch_size - len(batch_rows))
      yield (
        indices[own],
        converter.convert(batch_rows[own], self.cfg.task_feature_lengths, self.cfg.pack),
      )

  def _indexed_batches(
    self, examples: Sequence[Any], batch_size: int, own: slice, converter: FeatureConverter
  ) -> IndexedBatches:
    return IndexedBatches(
      lambda: self._batches([(example,) for example in examples], batch_size, own, converter),
      -(-len(examples) // batch_size),
    )


class BuiltinSource(TableSource):
  """Embedded and registered tasks without TensorFlow."""

  options: ClassVar[tuple[str, ...]] = ('num_epochs', 'earlier_sentinels')

  def tasks(self) -> Sequence[BuiltinTask]:
    """See base class."""
    found = self._task_or_mixture()
    if isinstance(found, BuiltinMixture):
      return found.tasks
    return [found]

  def rates(self) -> Sequence[float]:
    """See base class."""
    found = self._task_or_mixture()
    if isinstance(found, BuiltinMixture):
      return list(found.rates.values())
    return [1.0]

  def _task_or_mixture(self) -> BuiltinTask | BuiltinMixture:
    self.cfg.import_module()
    return get_builtin(self.cfg.mixture_or_task_name)


class GrainSource(BuiltinSource):
  """The batches of the builtin source, prefetched by grain."""

  options = ('num_prefetch_threads', 'num_workers', 'num_epochs', 'earlier_sentinels')

  def open_reader(self, pieces: Pieces) -> PieceReader:
    """See base class."""
    from t5x_lite.data.sources import grain_source

    return grain_source.GrainReader(
      pieces, self.cfg.num_workers or 0, self.cfg.num_prefetch_threads or 0
    )


class RandomTableSource(TableSource):
  """Random ids, or random features of any shape, as described by a `SyntheticSource`."""

  options = ('num_epochs',)

  @classmethod
  def check(cls, cfg: Any) -> None:
    """See base class; a `SyntheticSource` with features needs no lengths: {}."""
    cfg.check_lengths_are_given('random data')

  def tasks(self) -> Sequence[BuiltinTask]:
    """See base class."""
    self.cfg.import_module()
    source = synthetic.get_synthetic(self.cfg.mixture_or_task_name)
    return [
      BuiltinTask(
        name=source.name,
        splits=(self.cfg.split,),
        vocabularies=dict.fromkeys(('inputs', 'targets'), source.vocabulary),
        table_fn=lambda split, lengths: synthetic.SyntheticExamples(source, split, lengths),
      )
    ]

  def get_converter(self, feature_converter: Any) -> FeatureConverter:
    """See base class."""
    cfg, features = self.cfg, synthetic.get_synthetic(self.cfg.mixture_or_task_name).features
    if not features:
      return get_converter(feature_converter)
    checks.check(
      'DatasetConfig',
      {'task_feature_lengths': cfg.task_feature_lengths, 'pack': cfg.pack},
      task_feature_lengths=checks.Expectation(
        '{} with SyntheticSource.features', lambda lengths: not lengths
      ),
      pack=checks.Expectation('False with SyntheticSource.features', lambda pack: not pack),
    )
    return synthetic.StackConverter(features)

  def open_eval_tasks(
    self, layout: Any, feature_converter: Any, num_examples: int | None
  ) -> list[EvalTask]:
    """See base class."""
    return base.DataSource.open_eval_tasks(self, layout, feature_converter, num_examples)

  def read_task_texts(self, max_examples: int | None) -> dict[str, list[str]]:
    """See base class."""
    return base.DataSource.read_task_texts(self, max_examples)
