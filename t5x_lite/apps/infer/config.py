"""The configuration of an inference: the arguments of `infer`, validated."""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.apps.infer.place import Place
from t5x_lite.errors import ConfigError, did_you_mean

MODES = ('predict', 'predict_with_aux', 'score')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """Which batches of a source a worker takes: each `num_shards`-th, from `shard_id` on."""

  shard_id: int = 0
  num_shards: int = 1

  def __post_init__(self) -> None:
    for name in ('num_shards', 'shard_id'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'{name} is {value!r}; expected a whole number.')
    if self.num_shards < 1:
      raise ConfigError(f'num_shards is {self.num_shards}; expected at least 1.')
    if not 0 <= self.shard_id < self.num_shards:
      raise ConfigError(f'shard_id is {self.shard_id}; with num_shards = {self.num_shards}, expected 0 to '
                        f'{self.num_shards - 1}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferConfig:
  """Arguments of `infer`, under its names.

  Attributes:
    shard: `shard_id` and `num_shards`.
    layout: how the rows of a batch are divided over the processes.

  Raises:
    ConfigError: options that are out of range or contradict each other.
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
  fallback_init_rng: int | None
  summarize_config_fn: Callable[[str, Any, int], None] | None
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None
  file_extension: str
  output_file: str | None
  random_seed: int
  settings: Mapping[str, str] | None
  shard: Shard = dataclasses.field(init=False)
  layout: partitioning.DataLayout = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    if self.mode not in MODES:
      raise ConfigError(f'mode is {self.mode!r}; expected one of {", ".join(map(repr, MODES))}.'
                        f'{did_you_mean(str(self.mode), MODES)}')
    object.__setattr__(self, 'shard', Shard(
        shard_id=0 if self.shard_id is None else self.shard_id, num_shards=self.num_shards))
    if self.shard_id is None and self.num_shards > 1:  # all would do the same part
      raise ConfigError(f'num_shards is {self.num_shards}, but nothing says which of the workers this one is: expected '
                        f'its number, 0 to {self.num_shards - 1}. Start a worker for each, with --shard_id.')
    self._check_files()
    if isinstance(self.checkpoint_period, bool) or not isinstance(self.checkpoint_period, int) or (
        self.checkpoint_period < 1):
      raise ConfigError(f'checkpoint_period is {self.checkpoint_period!r}; expected a whole number of batches, at '
                        'least 1.')
    if isinstance(self.random_seed, bool) or not isinstance(self.random_seed, int) or not 0 <= self.random_seed < 2**32:
      raise ConfigError(f'random_seed is {self.random_seed!r}; expected a whole number from 0 to 2**32 - 1.')
    restore_cfg = self.restore_checkpoint_cfg
    if restore_cfg.mode == 'all' or (restore_cfg.mode == 'specific' and len(restore_cfg.paths) > 1):
      raise ConfigError(
          f'RestoreCheckpointConfig names several checkpoints (mode={restore_cfg.mode!r}, path={restore_cfg.path!r}); '
          "expected one to infer with. Set mode='specific' with one path, or mode='latest'.")
    object.__setattr__(self, 'layout', self.partitioner.get_data_layout(self.dataset_cfg.batch_size))

  def _check_files(self) -> None:
    if not isinstance(self.output_dir, str) or not self.output_dir.strip():
      raise ConfigError(f'output_dir is {self.output_dir!r}; expected the path of a directory for results. Set '
                        'INFER_OUTPUT_DIR, or --output.')
    if '://' in self.output_dir:
      raise ConfigError(f'output_dir is the remote path {self.output_dir!r}; expected a local or mounted directory. '
                        'Copy the results when they are complete.')
    for name, value in (('output_file', self.output_file), ('file_extension', self.file_extension)):
      if value is not None and (not isinstance(value, str) or not value.strip() or os.sep in value):
        raise ConfigError(f'{name} is {value!r}; expected a name without {os.sep!r}.')

  @property
  def is_stream(self) -> bool:
    """Whether the examples come from standard input."""
    return isinstance(self.dataset_cfg, data.TextFileConfig) and self.dataset_cfg.path == '-'

  def place(self, task: str) -> Place:
    """Returns where the results of a task go."""
    name = self.output_file or f'{task.replace(os.sep, "_")}-{self.mode}.{self.file_extension}'
    return Place(folder=pathlib.Path(self.output_dir), name=name, shard_id=self.shard.shard_id,
                 num_shards=self.shard.num_shards, is_whole=self.output_file is not None)

  def identity(self, source: data.ExampleSource, path: str | None, step: int) -> dict[str, Any]:
    """Returns what the results depend on, as JSON values.

    Args:
      source: the examples.
      path: the checkpoint; None for random parameters.
      step: its step.
    """
    return {**(self.settings or {}), 'checkpoint': _checkpoint_identity(path, step), 'mode': self.mode,
            'dtype': self.restore_checkpoint_cfg.dtype, 'random_seed': self.random_seed,
            'fallback_init_rng': self.fallback_init_rng, 'source': source.identity}


def _checkpoint_identity(path: str | None, step: int) -> dict[str, Any]:
  """Returns what tells one checkpoint from another, its content included where a manifest knows that."""
  if path is None:
    return {'path': None, 'step': step}
  found = checkpoints.read_manifest(path)
  # Not the position in the training data, which a running training may drop.
  hashes = [] if found is None else sorted(
      (name, entry['sha256']) for name, entry in found.files.items() if name.startswith('state/'))
  content = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16] if hashes else None
  return {'path': os.path.realpath(path), 'step': int(step), 'content': content}
