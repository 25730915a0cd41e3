"""Options of a dataset: T5X's `DatasetConfig`."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from t5x_lite import checks
from t5x_lite.compat import names as t5x_names
from t5x_lite.configuration import module_imports
from t5x_lite.data.sources import base

_LENGTHS = checks.Expectation(
  "a mapping such as {'inputs': 512, 'targets': 114} to integers >= 1",
  lambda lengths: (
    isinstance(lengths, Mapping)
    and all(map(checks.number(at_least=1, integer=True).holds, lengths.values()))
  ),
)
_LENGTHS_OR_NONE = checks.Expectation(
  f'None or {_LENGTHS.text}', lambda lengths: lengths is None or _LENGTHS.holds(lengths)
)
_TASK = checks.Expectation(
  'the name of a registered task or mixture',
  lambda task: bool(task) and not isinstance(task, (bool, int, float, list, tuple, dict)),
)
_MODULE = checks.Expectation(
  "the dotted name of a Python module, such as 'my_package.my_tasks', or None",
  lambda module: (
    module is None or (isinstance(module, str) and all(map(str.isidentifier, module.split('.'))))
  ),
)
_SPLIT = checks.Expectation(
  "a name such as 'train'", lambda split: isinstance(split, str) and bool(split)
)
_BOOL = checks.instance(bool, 'True or False')
_UNUSED_PACKING = '`DatasetConfig.use_custom_packing_ops` has no effect with pack=False.'
_COUNT_OR_NONE = checks.number(at_least=0, integer=True).or_none()
_NO_PREPROCESSORS = checks.Expectation(
  'None or empty',
  lambda preprocessors: preprocessors is None or not len(preprocessors),
  t5x_names.remedy('t5x.utils', 'DatasetConfig.runtime_preprocessors=[...]'),
)


@dataclasses.dataclass
class DatasetConfig(checks.MutableConfig):
  """Options of a dataset, its feature lengths and its batches.

  Attributes:
    mixture_or_task_name: a registered name; or a seqio Task or Mixture, a `BuiltinTask` or `BuiltinMixture`, or a
      `SyntheticSource` itself; a custom source may accept other values.
    task_feature_lengths: task feature name ('inputs', 'targets') to length in ids, with the end-of-sequence id. None,
      for evaluation and inference: the lengths of the longest examples of the split, see `data.with_feature_lengths`.
    split: name of the split, e.g. 'train'.
    batch_size: rows of the *global* batch.
    shuffle: whether examples are read in random order, a new order each epoch.
    seed: seed of the order, the preprocessors and the draws of a mixture. None means 0, so that a run can be repeated
      (T5X uses the time).
    use_cached: whether to read the output of seqio's cache job (seqio only).
    pack: whether several examples share a row.
    use_custom_packing_ops: whether to pack with Tensor2Tensor's operations, which must be installed (seqio only).
    module: a module that registers the task or the source. It is imported when the data is opened; if it must register
      `source`, already when the configuration is checked.
    use_memory_cache: whether rows of an evaluation are kept in memory; otherwise each pass prepares them again.
    trim_output_features: whether longer features are trimmed; otherwise a longer feature is an error.
    runtime_preprocessors: None. T5X passes them to AirIO; here the model's converter converts and packs the examples.
    num_prefetch_threads: number of threads that prepare batches; None or 0 for 4 (grain only).
    num_workers: number of processes that prepare batches; 0 or None for threads of this process (grain only).
    source: 'seqio', 'builtin' (without TensorFlow), 'grain' (the same batches, prefetched in threads or processes;
      also reads array records), 'synthetic' (random ids for benchmarks), or the name of a custom source
      (`data.register_source`).
    num_epochs: number of times that training reads each example; the data then ends, and with it the run. Rows that do
      not fill a batch at the end are left out, and a mixture ends with its first task. None repeats the data forever.
      For training data only.
    earlier_sentinels: whether texts of `text_task` with sentinels such as `<extra_id_0>` have the ids of earlier
      versions: bytes for a byte vocabulary. A run that an earlier version recorded keeps them when it resumes, and
      `eval` and `infer` set this for its checkpoints (builtin and grain only).
  """

  mixture_or_task_name: Any
  task_feature_lengths: Mapping[str, int] | None
  split: str
  batch_size: int
  shuffle: bool
  seed: int | None
  use_cached: bool = False
  pack: bool = False
  use_custom_packing_ops: bool = False
  module: str | None = None
  use_memory_cache: bool = True
  trim_output_features: bool = True
  runtime_preprocessors: Sequence[Any] | None = None
  num_prefetch_threads: int | None = None
  num_workers: int | None = 0
  _: dataclasses.KW_ONLY
  source: str = 'seqio'
  num_epochs: int | None = None
  earlier_sentinels: bool = False

  def check(self) -> None:
    """See `MutableConfig`; imports `module` if it must register `source`."""
    checks.check(
      'DatasetConfig',
      self._values(),
      mixture_or_task_name=_TASK,
      module=_MODULE,
      split=_SPLIT,
      task_feature_lengths=_LENGTHS_OR_NONE,
      batch_size=checks.number(at_least=1, integer=True),
      seed=checks.number(at_least=0, below=2**62, integer=True).or_none(),
      num_workers=_COUNT_OR_NONE,
      num_prefetch_threads=_COUNT_OR_NONE,
      runtime_preprocessors=_NO_PREPROCESSORS,
      num_epochs=checks.number(at_least=1, integer=True).or_none(),
      shuffle=_BOOL,
      use_cached=_BOOL,
      pack=_BOOL,
      use_custom_packing_ops=_BOOL,
      use_memory_cache=_BOOL,
      trim_output_features=_BOOL,
      earlier_sentinels=_BOOL,
    )
    longest = max((self.task_feature_lengths or {}).values(), default=1)
    checks.check(
      'DatasetConfig',
      self._values(),
      batch_size=checks.Expectation(
        f'below {-(-(2**31) // longest)} for features of {longest} ids',
        lambda rows: rows * longest < 2**31,
        'An array has at most 2**31 - 1 positions.',
      ),
      use_custom_packing_ops=checks.Expectation(
        'False with pack = False',
        lambda use: self.pack or not use or checks.log_for_t5x(_UNUSED_PACKING),
      ),
    )
    if self.source not in base.source_names():
      self.import_module()
    base.check_source(self)

  @property
  def name(self) -> str:
    """Name of the task or mixture."""
    task = self.mixture_or_task_name
    if isinstance(task, str):
      return task
    return task.name

  @property
  def effective_seed(self) -> int:
    """`seed`, or 0 for None."""
    if self.seed is None:
      return 0
    return self.seed

  @property
  def known_lengths(self) -> Mapping[str, int]:
    """`task_feature_lengths` of a dataset that is being opened: they are given, or were computed before."""
    assert self.task_feature_lengths is not None  # See `check_lengths_are_given`.
    return self.task_feature_lengths

  def check_lengths_are_given(self, use: str, argument: str = '') -> None:
    """Raise ConfigError if `task_feature_lengths` is None.

    Args:
      use: the use that needs lengths, e.g. 'training'.
      argument: argument of the command's function whose value this is.
    """
    if self.task_feature_lengths is None:
      error = checks.invalid(
        'DatasetConfig',
        'task_feature_lengths',
        f'{_LENGTHS.text} for {use}',
        None,
        'Set TASK_FEATURE_LENGTHS. None '
        'is for evaluation and inference with tasks that do not need lengths.',
      )
      assert error.options is not None  # `checks.invalid` sets them.
      error.options.argument = argument
      raise error

  def import_module(self) -> None:
    """Import `module`, if it is set, so that it registers its tasks or its source.

    Raises:
      ConfigError: it cannot be imported, or `--allowed_modules` does not contain it.
    """
    if self.module is not None:
      module_imports.import_module(self.module, what='DatasetConfig.module')
