"""What to read: T5X's `DatasetConfig`, and the checks that need nothing but the configuration."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from t5x_lite import module_imports
from t5x_lite.data.sources import base
from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """A dataset, the lengths to cut it to, and the way to batch it.

  Attributes:
    mixture_or_task_name: a registered name, or a seqio Task or Mixture, a `BuiltinTask` or `BuiltinMixture`, or a
      `SyntheticSource` itself; for a custom source what that reads.
    task_feature_lengths: task feature name ('inputs', 'targets') to length in ids, end-of-sequence id included.
    split: e.g. 'train'.
    batch_size: rows of the *global* batch.
    shuffle: read in random order, a new one each epoch.
    seed: of the order, of the preprocessors' randomness, and of the mixture's draws. None means 0: a run repeats
      unless told otherwise (T5X takes the clock).
    use_cached: read what seqio's cache job has prepared (seqio only).
    pack: put several examples into one row.
    use_custom_packing_ops: pack with Tensor2Tensor's operations, where these are installed (seqio only).
    module: a module that registers the task or the source. It is imported when the data is opened, and already when the
      configuration is made if `source` is not registered then.
    use_memory_cache: keep the rows of an evaluation in memory; otherwise they are prepared again at each pass.
    trim_output_features: cut longer features; otherwise a longer one is an error.
    source: 'seqio', 'builtin' (ours, no TensorFlow), 'grain' (the same batches, prepared ahead in threads or processes;
      reads array records, too), 'synthetic' (random ids for benchmarks), or the name of a custom source
      (`data.register_source`).
    num_workers: processes that prepare batches; 0 prepares them in threads of this one (grain only).
  """

  mixture_or_task_name: Any
  task_feature_lengths: Mapping[str, int]
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
  _: dataclasses.KW_ONLY
  source: str = 'seqio'
  num_workers: int = 0

  def __post_init__(self) -> None:
    self._check_task()
    self._check_sizes()
    self._check_options()
    if self.source not in base.source_names():
      self.import_module()
    base.check_source(self)

  def _check_task(self) -> None:
    task = self.mixture_or_task_name
    if not task or isinstance(task, (bool, int, float, list, tuple, dict)):
      raise ConfigError(f'DatasetConfig.mixture_or_task_name is {task!r}, expected the name of a registered task or '
                        'mixture.')
    if self.module is not None and not (isinstance(self.module, str)
                                        and all(part.isidentifier() for part in self.module.split('.'))):
      raise ConfigError(f'DatasetConfig.module is {self.module!r}, expected the dotted name of a Python module, such '
                        "as 'my_package.my_tasks', or None.")
    if not isinstance(self.split, str) or not self.split:
      raise ConfigError(f"DatasetConfig.split is {self.split!r}, expected a name such as 'train'.")

  def _check_sizes(self) -> None:
    if not isinstance(self.task_feature_lengths, Mapping):
      raise ConfigError(f'DatasetConfig.task_feature_lengths is {self.task_feature_lengths!r}, expected a mapping such '
                        "as {'inputs': 512, 'targets': 114}.")
    for feature, length in self.task_feature_lengths.items():
      if not _is_integer(length) or length < 1:
        raise ConfigError(f'DatasetConfig.task_feature_lengths[{feature!r}] is {length!r}, expected an integer of 1 or '
                          'more.')
    if not _is_integer(self.batch_size) or self.batch_size < 1:
      raise ConfigError(f'DatasetConfig.batch_size is {self.batch_size!r}, expected an integer of 1 or more.')
    longest = max(self.task_feature_lengths.values(), default=1)
    if self.batch_size * longest >= 2**31:
      raise ConfigError(f'DatasetConfig.batch_size is {self.batch_size} and the longest feature has {longest} ids: '
                        f'{self.batch_size * longest} positions are more than fit into one array (2**31 - 1). Lower '
                        'one of the two.')

  def _check_options(self) -> None:
    if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed < 2**62):
      raise ConfigError(f'DatasetConfig.seed is {self.seed!r}, expected None (which means 0) or an integer from 0 to '
                        '2**62.')
    for option in ('shuffle', 'use_cached', 'pack', 'use_custom_packing_ops', 'use_memory_cache',
                   'trim_output_features'):
      if not isinstance(getattr(self, option), bool):
        raise ConfigError(f'DatasetConfig.{option} is {getattr(self, option)!r}, expected True or False.')
    if self.use_custom_packing_ops and not self.pack:
      raise ConfigError('DatasetConfig.use_custom_packing_ops is True but pack is False: set pack = True, or leave it '
                        'out.')
    if not _is_integer(self.num_workers) or self.num_workers < 0:
      raise ConfigError(f'DatasetConfig.num_workers is {self.num_workers!r}, expected an integer of 0 or more.')

  @property
  def name(self) -> str:
    """The task's or mixture's name."""
    task = self.mixture_or_task_name
    return task if isinstance(task, str) else task.name

  @property
  def effective_seed(self) -> int:
    """`seed`, with None resolved."""
    return 0 if self.seed is None else self.seed

  def import_module(self) -> None:
    """Imports `module`, if there is one, so that it registers its tasks or its source.

    Raises:
      ConfigError: it cannot be found, or `--allowed_modules` does not contain it.
    """
    if self.module is None:
      return
    module_imports.check_import(self.module, 'DatasetConfig.module')
    try:
      importlib.import_module(self.module)
    except ModuleNotFoundError as error:
      if not f'{self.module}.'.startswith(f'{error.name}.'):
        raise ConfigError(f'DatasetConfig.module {self.module!r} cannot be imported: it needs {error.name!r}, which is '
                          'not installed. Install it, or correct the import.') from error
      raise ConfigError(f'DatasetConfig.module is {self.module!r}, but no module named {error.name!r} can be imported: '
                        'install it, or put its folder on PYTHONPATH.'
                        + (' Leave the ending .py out.' if self.module.endswith('.py') else '')) from error


def _is_integer(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
