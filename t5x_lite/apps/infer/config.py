"""Options of batch inference: their only definition, validated, from which the arguments of `infer` are made."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.common import starting_point as start
from t5x_lite.apps.infer.jsonl import Inferences
from t5x_lite.apps.infer.jsonl import write_inferences_to_file
from t5x_lite.apps.infer.merge import merge_chunks_to_file
from t5x_lite.apps.infer.paths import ResultPaths
from t5x_lite.checkpoints import builders
from t5x_lite.storage import files
from t5x_lite.trainer import state_init

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
class InferConfig:
  """Options of `infer`.

  Attributes:
    mode: 'predict', 'predict_with_aux' (predictions with their scores) or 'score' (log-likelihoods of the targets).
    model: the model; no optimizer is needed.
    dataset_cfg: examples: a task, each task of a mixture, or a file of texts.
    restore_checkpoint_cfg: the checkpoint.
    partitioner: the mesh and the sharding rules.
    output_dir: folder of results.
    checkpoint_period: number of batches per chunk; complete chunks survive an interruption.
    shard_id: index of this worker, from 0. Workers are independent and need not run at the same time. None, as in
      runs/infer.gin, is 0 and an error with several workers.
    num_shards: number of workers that share the source.
    merge_chunked_results: merge chunks into one file; otherwise the results stay in chunks.
    write_fn: writes results, called as `write_fn(path, (predictions, aux), examples, mode, vocabulary)`; `examples` is
      an `Examples`.
    checkpoint_ds_iter: True or False. Both resume after the last complete chunk without a saved iterator: the source is
      opened at that batch.
    train_state_initializer_cls: class of the state initializer.
    fallback_init_rng: seed of random parameters, for those that the checkpoint lacks.
    merge_fn: merges the chunks of a shard, called as `merge_fn(output_dir, output_fname, tmp_dir, step)` with the
      chunks `<tmp_dir>/<output_fname>-chunk00000` and so on. It must write `<output_dir>/<output_fname>`; all
      files that it writes in `output_dir`, a temporary folder, become results when it returns. Results of another
      function than `merge_chunks_to_file` are not merged over shards.
    summarize_config_fn: called with (folder of the run, None, step) to record the configuration.
    verify_matching_vocabs_fn: raises if the vocabularies of task and model differ; None skips the check.
    output_vocab_feature_name: 'targets' or 'inputs': the vocabulary of the model that `write_fn` is given.
    file_extension: extension of result files.
    keep_aux_as_numpy: give `write_fn` auxiliary outputs as arrays [num_examples, ...] instead of lists, which takes
      less memory.
    use_orbax: True or False. The format of a checkpoint, Orbax's or T5X's former one, is detected.
    output_file: file name within `output_dir` that replaces `<task>-<mode>.jsonl`; with one shard, without a shard
      suffix. For a single task.
    random_seed: seed of sampling.
    decode_fn: decoding algorithm of predictions, e.g. `decoding.MinimumBayesRisk`; or `decoding.LabelScores`, whose
      scores are written in mode 'predict_with_aux' as a mapping by label; None for that of the model.
    settings: further settings that the results depend on, by name, such as decoding options. A run resumes only if they
      are unchanged; the command passes all gin bindings.

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
  shard_id: int | None = 0
  num_shards: int = 1
  merge_chunked_results: bool = True
  write_fn: Callable[[str, Inferences, Any, str, Any], None] = write_inferences_to_file
  checkpoint_ds_iter: bool = True
  train_state_initializer_cls: type[state_init.TrainStateInitializer] = (
    state_init.TrainStateInitializer
  )
  fallback_init_rng: int | None = None
  merge_fn: Callable[[str, str, str, int | None], None] = merge_chunks_to_file
  summarize_config_fn: gin_utils.SummarizeConfigFn | None = gin_utils.summarize_gin_config
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None = (
    data.verify_matching_vocabs
  )
  output_vocab_feature_name: str = 'targets'
  file_extension: str = 'jsonl'
  keep_aux_as_numpy: bool = False
  use_orbax: bool = True
  output_file: str | None = None
  random_seed: int = 0
  decode_fn: decoding.DecodeFnCallable | decoding.LabelScores | None = None
  settings: Mapping[str, str] | None = None

  def __post_init__(self) -> None:
    self.restore_checkpoint_cfg.validated('restore_checkpoint_cfg')
    if isinstance(self.dataset_cfg, data.DatasetConfig):
      self.dataset_cfg.validated('dataset_cfg')
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
    shard_id = self.shard_id
    if shard_id is None and self.num_shards == 1:
      shard_id = 0
    checks.check(
      'infer',
      {'num_shards': self.num_shards, 'shard_id': shard_id},
      num_shards=checks.number(at_least=1, integer=True),
      shard_id=checks.number(
        at_least=0,
        below=self.num_shards,
        integer=True,
        remedy='Start one worker per shard, each with --shard_id.',
      ),
    )
    self.partitioner.get_data_layout(self.dataset_cfg.batch_size)  # raises for an invalid size

  @property
  def shard(self) -> int:
    """`shard_id`, where None is the only worker. It processes each batch b of a source with b % num_shards = shard."""
    return self.shard_id or 0

  @functools.cached_property
  def layout(self) -> partitioning.DataLayout:
    """Assignment of the rows of a batch to processes."""
    return self.partitioner.get_data_layout(self.dataset_cfg.batch_size)

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
      shard_id=self.shard,
      num_shards=self.num_shards,
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
    if self.model.constraints is not None:
      identity['constraints'] = self.model.constraints.identity
    decode_fn = self.decode_fn or decoding.labels_of(self.model.decode_fn)
    if decode_fn is not None:
      identity['decode_fn'] = decoding.identity_of(decode_fn)
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
