"""Configuration of batch inference: the validated arguments of `infer`."""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import os
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import files
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import state_init
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.common import start
from t5x_lite.apps.infer.paths import ResultPaths
from t5x_lite.checkpoints import builders

_BOOL = checks.instance(bool, 'True or False')
MODES = ('predict', 'predict_with_aux', 'score')
_FILE_NAME = checks.Expectation(
  f'a file name without {os.sep!r}',
  lambda value: isinstance(value, str) and bool(value.strip()) and os.sep not in value,
)
_ONE_CHECKPOINT = checks.Expectation(
  'the configuration of one checkpoint',
  lambda cfg: cfg.mode == 'latest' or (cfg.mode == 'specific' and len(cfg.paths) <= 1),
  "Set RestoreCheckpointConfig.mode='specific' with one path, or mode='latest'.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """Worker `shard_id` of `num_shards`: it processes each batch b of a source with b % num_shards = shard_id."""

  shard_id: int = 0
  num_shards: int = 1

  def __post_init__(self) -> None:
    checks.check(
      'infer',
      vars(self),
      num_shards=checks.number(at_least=1, integer=True),
      shard_id=checks.number(
        at_least=0,
        below=self.num_shards,
        integer=True,
        remedy='Start one worker per shard, each with --shard_id.',
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferConfig:
  """Arguments of `infer`, with the same names.

  Attributes:
    shard: `shard_id` and `num_shards`.
    layout: assignment of the rows of a batch to processes.

  Raises:
    ConfigError: options are out of range or contradict each other.
  """

  mode: str
  model: models.BaseTransformerModel
  dataset_cfg: data.DatasetConfig | data.TextFileConfig
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig
  partitioner: partitioning.BasePartitioner
  output_dir: str
  checkpoint_period: int
  shard_id: int | None
  num_shards: int
  merge_chunked_results: bool
  write_fn: Callable[..., None]
  checkpoint_ds_iter: bool
  train_state_initializer_cls: type[state_init.TrainStateInitializer]
  fallback_init_rng: int | None
  merge_fn: Callable[[str, str, str, int | None], None]
  summarize_config_fn: Callable[[str, Any, int], None] | None
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None
  output_vocab_feature_name: str
  file_extension: str
  keep_aux_as_numpy: bool
  use_orbax: bool
  output_file: str | None
  random_seed: int
  settings: Mapping[str, str] | None
  shard: Shard = dataclasses.field(init=False)
  layout: partitioning.DataLayout = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    checks.check(
      'infer',
      vars(self),
      mode=checks.one_of(MODES),
      checkpoint_period=checks.number(at_least=1, integer=True),
      random_seed=checks.number(at_least=0, below=2**32, integer=True),
      fallback_init_rng=start.SEED,
      output_dir=output_folder.directory('Set INFER_OUTPUT_DIR, or --output.'),
      output_file=_FILE_NAME.or_none(),
      file_extension=_FILE_NAME,
      restore_checkpoint_cfg=_ONE_CHECKPOINT,
      checkpoint_ds_iter=_BOOL,
      keep_aux_as_numpy=_BOOL,
      use_orbax=_BOOL,
      output_vocab_feature_name=checks.one_of(
        ('targets', 'inputs'), 'For another vocabulary, set a write_fn that knows it.'
      ),
    )
    options: dict[str, Any] = {'shard_id': self.shard_id, 'num_shards': self.num_shards}
    if options == {'shard_id': None, 'num_shards': 1}:
      options['shard_id'] = 0
    object.__setattr__(self, 'shard', Shard(**options))
    object.__setattr__(
      self, 'layout', self.partitioner.get_data_layout(self.dataset_cfg.batch_size)
    )

  @property
  def is_stream(self) -> bool:
    """True if the examples come from standard input."""
    return isinstance(self.dataset_cfg, data.TextFileConfig) and self.dataset_cfg.path == '-'

  def result_paths(self, task: str) -> ResultPaths:
    """Return the paths of the results of a task."""
    name = self.output_file or f'{task.replace(os.sep, "_")}-{self.mode}.{self.file_extension}'
    return ResultPaths(
      folder=files.path(self.output_dir),
      name=name,
      shard_id=self.shard.shard_id,
      num_shards=self.shard.num_shards,
      has_plain_name=self.output_file is not None,
    )

  def identity(self, source: data.ExampleSource, path: str | None, step: int) -> dict[str, Any]:
    """Return everything that the results depend on, as JSON values.

    Args:
      source: the examples.
      path: the checkpoint; None for random parameters.
      step: its step.
    """
    identity = {
      **(self.settings or {}),
      'checkpoint': _checkpoint_identity(path, step),
      'mode': self.mode,
      'dtype': self.restore_checkpoint_cfg.dtype,
      'random_seed': self.random_seed,
      'fallback_init_rng': self.fallback_init_rng,
      'source': source.identity,
    }
    if self.output_vocab_feature_name != 'targets':
      identity['output_vocab_feature_name'] = self.output_vocab_feature_name
    return identity | builders.identity(self.restore_checkpoint_cfg)


def _checkpoint_identity(path: str | None, step: int) -> dict[str, Any]:
  """Return path, step and, with a manifest, a hash of the content of a checkpoint."""
  if path is None:
    return {'path': None, 'step': step}
  found = checkpoints.read_manifest(path)
  # Without the position in the training data, which a running training may delete.
  hashes = []
  if found is not None:
    for name, entry in sorted(found.files.items()):
      if name.startswith('state/'):
        hashes.append((name, entry['sha256']))
  content = None
  if hashes:
    content = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]
  return {'path': files.real_path(path), 'step': int(step), 'content': content}
