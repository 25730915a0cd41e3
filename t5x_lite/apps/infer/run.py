"""Batch inference with a trained model: every example of a source, in order, to a JSONL file.

    python -m t5x_lite infer --gin_file=recipes/keyword_cloze.gin --gin.CHECKPOINT_PATH=runs/cloze/checkpoint_500 \\
      --input=questions.txt --output=answers.jsonl

The same command resumes a run that was stopped or killed; the results are those of an uninterrupted run.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import time
from typing import Any

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import evaluation
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite.apps.common import report
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.options import takes_options
from t5x_lite.apps.infer import report as infer_report
from t5x_lite.apps.infer.config import InferConfig
from t5x_lite.apps.infer.jsonl import Examples
from t5x_lite.apps.infer.jsonl import write_inferences_to_file
from t5x_lite.apps.infer.loop import ChunkWriter
from t5x_lite.apps.infer.loop import infer_source
from t5x_lite.apps.infer.merge import merge_chunks_to_file
from t5x_lite.apps.infer.merge import merge_chunks_to_table
from t5x_lite.apps.infer.merge import merge_shards
from t5x_lite.apps.infer.merge import merged_totals
from t5x_lite.apps.infer.report import Outcome
from t5x_lite.apps.infer.store import ShardStore
from t5x_lite.apps.infer.store import num_shard_examples
from t5x_lite.command_line import standard_streams
from t5x_lite.errors import ConfigError, StoppedOnSignalError, of_other_process
from t5x_lite.formatting import show

# T5X's names.
__all__ = [
  'AUTOTUNE',
  'create_task_from_tfexample_file',
  'infer',
  'merge_chunks_to_file',
  'merge_chunks_to_table',
  'update_measurement_series',
  'write_inferences_to_file',
]
AUTOTUNE = -1  # of tf.data


@takes_options(InferConfig)
def infer(cfg: InferConfig) -> list[str]:
  """Predict or score every example of a source once, and write the results in the source's order.

  The result of a task is `<output_dir>/<task>-<mode>.jsonl-<shard>-of-<num_shards>`; with several shards,
  `<output_dir>/<task>-<mode>.jsonl` is added when all of them are complete. `<task>-<mode>.jsonl.run` has the state for
  resuming. Each batch is computed by one shard, with random numbers that depend only on the batch's number, so that
  neither interruptions nor the number of shards change a result.

  Returns:
    Paths of the results on the lead process; [] on other processes.

  Raises:
    ConfigError: options are out of range or contradict each other, or there are results of another run; raised before
      any computation.
    DataError: the data is unknown, unreadable or empty.
    CheckpointError: the checkpoint is missing, damaged or of another model.
    DirectoryInUseError: another process computes the same shard.
    StoppedOnSignalError: stopped by SIGINT, SIGTERM or SIGHUP; the results so far are saved, and the message has the
      command to resume.
  """
  recorded = restore_lib.with_recorded_ids(cfg.dataset_cfg, cfg.restore_checkpoint_cfg)
  model = cfg.model
  if cfg.decode_fn is not None:
    model = model.with_decode_fn(cfg.decode_fn)
  cfg = dataclasses.replace(
    cfg, model=model, dataset_cfg=recorded, output_dir=checkpoints.without_links(cfg.output_dir)
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
    is_lead = multihost.is_lead()
    progress = runtime.Progress(enabled=is_lead, unit='example')
    stack.callback(progress.clear)

    # ------------------------------------------------------------------------------------------------------------------
    # Data: a source for each task, and the paths of its results
    # ------------------------------------------------------------------------------------------------------------------
    _check_workers(cfg)
    progress.note('opening the input')
    sources = _open_sources(cfg)
    for source in sources:
      stack.callback(source.close)
    # After opening: standard input must be interruptible while it is read.
    signals = stack.enter_context(
      runtime.StopSignals('finishing the batch and keeping the results')
    )
    if cfg.output_file is not None and len(sources) > 1:
      raise ConfigError(
        f'`infer.output_file` requires a single task, got {len(sources)}: '
        f'{", ".join(source.name for source in sources)}. Remove it, or choose one task.'
      )
    outcomes = [
      Outcome(paths=cfg.result_paths(source.name), num_skipped=source.num_skipped)
      for source in sources
    ]
    for outcome in outcomes:
      _on_lead(
        lambda p=outcome.paths: stack.enter_context(
          checkpoints.lock_model_dir(
            p.shard_folder,
            what='folder of the run',
            elsewhere='another folder (INFER_OUTPUT_DIR or --output)',
          )
        )
      )

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoint and former results of this run, both checked before the checkpoint is restored
    # ------------------------------------------------------------------------------------------------------------------
    stores: list[Any] = []  # a `ShardStore` per source; None except on the lead process

    def open_stores(path: str | None, step: int) -> bool:
      """Open the stores; return whether all results are on disk."""
      stores.clear()
      for outcome, source in zip(outcomes, sources, strict=True):
        open_fn = functools.partial(_open_store, outcome, source, cfg, path, step)
        stores.append(_on_lead(open_fn))
      return _agreed(all(map(_has_all_chunks, stores)))

    progress.note('looking for the checkpoint')
    spec = sources[0].element_spec(cfg.layout.batch_size)
    restored_models = restore_lib.restore_for_inference(
      cfg.model,
      cfg.restore_checkpoint_cfg,
      cfg.partitioner,
      {name: leaf.shape for name, leaf in spec.items()},
      {name: leaf.dtype for name, leaf in spec.items()},
      cfg.fallback_init_rng,
      train_state_initializer_cls=cfg.train_state_initializer_cls,
      is_done=open_stores,
    )

    # ------------------------------------------------------------------------------------------------------------------
    # Infer, batch by batch; no checkpoint is restored if all results are on disk
    # ------------------------------------------------------------------------------------------------------------------
    runner = evaluation.PredictRunner(cfg.model, cfg.partitioner)
    stack.enter_context(runtime.reporting_errors('inference'))
    for train_state, train_state_axes, path, step, origin in restored_models:
      if not stores:
        open_stores(path, step)
      for source, store, outcome in zip(sources, stores, outcomes, strict=True):
        begin = functools.partial(_begin, store, cfg, step)
        next_batch, num_done = _position(store)
        first_batch = int(multihost.broadcast_from_lead(np.int32(next_batch)))
        if _agreed(_has_all_chunks(store)):
          _on_lead(begin)
          continue
        progress.note('compiling')
        started = time.perf_counter()
        runner.compile(
          cfg.mode, source.element_spec(cfg.layout.batch_size), train_state, train_state_axes
        )
        progress.log(
          f'Compiled in {time.perf_counter() - started:.1f} s: {cfg.mode} {source.name} with '
          f'{origin or "random parameters"}, {report.run_header(train_state, cfg.partitioner)}.'
        )
        # Recorded after compiling, which raises for invalid decoding options.
        _on_lead(begin)
        counter = _Counter(progress, source, cfg, num_done)
        started = time.perf_counter()
        num_source_examples = infer_source(
          source,
          cfg,
          runner,
          train_state,
          train_state_axes,
          first_batch=first_batch,
          write_fn=_chunk_writer(store, cfg),
          waits=waiting.DataWaits(signals),
          should_stop=lambda: signals.is_due(may_wait=True),
          on_batch=counter.add,
        )
        counter.end()
        outcome.num_new = counter.num_new
        outcome.seconds = time.perf_counter() - started
        if num_source_examples is None:
          signal = signals.name or 'a signal to another process'
          hint = ' (with the same input)' if cfg.is_stream else ''
          raise StoppedOnSignalError(
            f'Stopped after {counter.done:,} examples of {source.name!r} by {signal}; the results '
            f'so far are saved. To resume{hint}:\n  {runtime.command_line()}'
          )
        _on_lead(lambda s=store, n=num_source_examples: s.end_chunks(n))
      del train_state

    # ------------------------------------------------------------------------------------------------------------------
    # Write: merge the chunks, and the shards if this was the last one; print the report
    # ------------------------------------------------------------------------------------------------------------------
    for store, outcome in zip(stores, outcomes, strict=True):
      _on_lead(functools.partial(_finish, store, outcome, cfg))
    progress.clear()
    if not is_lead:
      return []
    show(infer_report.final_report(outcomes), flush=True)
    return [str(outcome.file or outcome.paths.shard_folder) for outcome in outcomes]


def create_task_from_tfexample_file(
  paths: Sequence[str],
  file_type: str,
  inputs_key: str,
  targets_key: str | None,
  features: Mapping[str, Any],
  task_id: str | None = None,
) -> str:
  """Register a seqio Task for files of TFExamples, with the split 'infer', and return its name.

  Args:
    paths: paths or patterns of the files; a string is one path.
    file_type: 'tfrecord'.
    inputs_key: key of the inputs' text in a TFExample.
    targets_key: key of the targets' text, or None without targets.
    features: 'inputs' and 'targets' with their `seqio.Feature`; vocabularies of t5x_lite are supported.
    task_id: suffix of the task name `infer_<task_id>`; default: a hash of paths and keys.

  Raises:
    ConfigError: the file type is unsupported, a feature is missing, or seqio is not installed.
    DataError: a file does not exist.
  """
  from t5x_lite.data.seqio import tfexample as seqio_tfexample

  return seqio_tfexample.create_task_from_tfexample_file(
    paths, file_type, inputs_key, targets_key, features, task_id
  )


def update_measurement_series(series_name: str, step: int, value: float) -> None:
  """Report a measurement to the listeners of `jax.monitoring`.

  Args:
    series_name: name of the series.
    step: step or chunk of the measurement.
    value: the measurement.
  """
  jax.monitoring.record_scalar(series_name, value, step=step)


def _check_workers(cfg: InferConfig) -> None:
  """Raise if the processes of a cluster have different shards, which are separate runs."""
  if cfg.num_shards > 1 and multihost.any_process(
    bool(multihost.broadcast_from_lead(np.int32(cfg.shard)) != cfg.shard)
  ):
    raise ConfigError(
      f'The {jax.process_count()} processes of a cluster must have the same shard_id, got '
      f'{cfg.shard_id} here and another one elsewhere. Workers with different shards are separate '
      'runs: pass --distributed=off to each.'
    )


def _open_sources(cfg: InferConfig) -> list[data.ExampleSource]:
  """Open a source for each task, after checking that the configuration supports it."""
  if cfg.is_stream and jax.process_count() > 1:
    raise ConfigError(
      f'Standard input requires a single process, got {jax.process_count()}. Pass a file that all '
      'processes can read.'
    )
  dataset_cfg = cfg.dataset_cfg
  if isinstance(dataset_cfg, data.DatasetConfig):
    if cfg.verify_matching_vocabs_fn is not None:
      cfg.verify_matching_vocabs_fn(dataset_cfg, cfg.model)
    dataset_cfg = data.with_feature_lengths(
      dataset_cfg, feature_converter=cfg.model.FEATURE_CONVERTER, folder=cfg.output_dir
    )
  return data.open_example_sources(dataset_cfg, cfg.model, needs_targets=cfg.mode == 'score')


def _on_lead(fn: Callable[[], Any]) -> Any:
  """Return the result of `fn` on the lead process, and None elsewhere; an error there raises on all processes."""
  result = None
  error = None
  if multihost.is_lead():
    try:
      result = fn()
    except Exception as caught:  # Raised below, after the other processes are notified.
      error = caught
  if multihost.any_process(error is not None):
    raise error or of_other_process(ConfigError('The lead process has failed; see its message.'))
  return result


def _agreed(flag: bool) -> bool:
  """Return the lead process's `flag`."""
  return bool(multihost.broadcast_from_lead(np.bool_(flag)))


def _open_store(
  outcome: Outcome, source: data.ExampleSource, cfg: InferConfig, path: str | None, step: int
) -> ShardStore:
  return ShardStore(outcome.paths, cfg.identity(source, path, step), cfg.layout.batch_size)


def _has_all_chunks(store: ShardStore | None) -> bool:
  return store is None or store.has_all_chunks


def _position(store: ShardStore | None) -> tuple[int, int]:
  """Return the next batch and the number of examples that are done; (0, 0) without the store."""
  if store is None:
    return 0, 0
  return store.next_batch, store.totals['num_examples']


def _begin(store: ShardStore, cfg: InferConfig, step: int) -> None:
  store.begin()
  if cfg.summarize_config_fn is not None:
    cfg.summarize_config_fn(str(store.paths.shard_folder), None, step)


def _finish(store: ShardStore, outcome: Outcome, cfg: InferConfig) -> None:
  """Merge chunks and shards, and update `outcome`."""
  totals = store.totals
  outcome.num_examples = totals['num_examples']
  outcome.num_cut = totals['num_cut']
  outcome.num_unended = totals['num_unended']
  outcome.first_file = next(iter(store.chunk_paths), None)
  if not cfg.merge_chunked_results and not store.is_complete:
    return
  merges_lines = inspect.unwrap(cfg.merge_fn) is merge_chunks_to_file
  if not store.is_complete:
    store.finish(None if merges_lines else cfg.merge_fn)
  store.begin()
  outcome.file = outcome.first_file = store.paths.result
  if store.paths.num_shards > 1 and merges_lines:
    outcome.missing_shards = merge_shards(store.paths)
    if not outcome.missing_shards:
      outcome.file = outcome.first_file = store.paths.merged
      merged = merged_totals(store.paths)
      outcome.num_merged = merged['num_examples']
      outcome.num_cut = merged['num_cut']
      outcome.num_unended = merged['num_unended']


def _chunk_writer(store: ShardStore | None, cfg: InferConfig) -> ChunkWriter:
  """Return the writer of chunks; it writes only on the lead process."""
  if cfg.output_vocab_feature_name == 'inputs':
    vocabulary = cfg.model.input_vocabulary
  else:
    vocabulary = cfg.model.output_vocabulary
  labels = decoding.labels_of(cfg.model.decode_fn)
  ends = (vocabulary.pad_id, vocabulary.eos_id, *getattr(cfg.model, 'stop_token_ids', ()))

  def write(first, num_batches, examples, inferences):
    if store is None:
      return
    outputs, aux = inferences
    num_unended = 0
    if cfg.mode != 'score' and labels is None:
      num_unended = _count_unended(np.asarray(outputs), ends)
    if not cfg.keep_aux_as_numpy:
      aux = jax.tree.map(lambda values: values.tolist(), aux)
      if labels is not None and 'scores' in aux:
        aux['scores'] = labels.by_label(aux['scores'])
    store.write_chunk(
      first,
      num_batches,
      len(examples),
      sum(example.is_cut for example in examples),
      num_unended,
      lambda path: cfg.write_fn(
        str(path),
        (outputs, aux),
        Examples(example.fields for example in examples),
        cfg.mode,
        vocabulary,
      ),
    )

  return write


def _count_unended(tokens: np.ndarray, ends: Sequence[int | None]) -> int:
  """Return how many predictions fill all positions, so that their texts may be cut.

  Args:
    tokens: int32 [examples, length], or [examples, decodes, length] with the best decode last. Other arrays, of models
      of users, are no ids: they count as ended.
    ends: ids, one of which is at the last position of a prediction with an end.
  """
  if tokens.ndim not in (2, 3) or tokens.dtype.kind != 'i':
    return 0
  if tokens.ndim == 3:
    tokens = tokens[:, -1]
  known = [token for token in ends if token is not None]
  return int(np.sum(~np.isin(tokens[:, -1], known)))


class _Counter:
  """Counts examples and updates the progress line."""

  def __init__(
    self, progress: runtime.Progress, source: data.ExampleSource, cfg: InferConfig, done: int
  ):
    self._progress = progress
    if source.num_examples is None:
      self._total = 0
    else:
      self._total = num_shard_examples(
        source.num_examples, cfg.layout.batch_size, cfg.shard, cfg.num_shards
      )
    self.done = done
    self._first = done
    progress.begin(self._total, done)

  @property
  def num_new(self) -> int:
    """Number of examples that this process has computed."""
    return self.done - self._first

  def add(self, num_examples: int) -> None:
    """Add computed examples to the count."""
    self.done += num_examples
    if self._total and self.done > self._total:  # The total was an estimate.
      self._total = 0
      self._progress.begin(0, self.done)
    if self._progress.due:
      self._progress.update(self.done, {})

  def end(self) -> None:
    """Show the final count."""
    self._progress.update(self.done, {}, last=True)
