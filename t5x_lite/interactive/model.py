"""Model in a notebook: train some steps, predict, score, evaluate and save, from lists of texts.

    from t5x_lite import notebook

    model = notebook.open_run('runs/keyword_cloze')
    model.train_step([{'input': '<extra_id_0> x in numbers:', 'target': 'for'}])
    predictions, aux = model.predict_with_aux(['<extra_id_0> x > 0:'])

`InteractiveModel` can also be constructed from its parts. Names, arguments and results are T5X's; TensorFlow is needed
only for preprocessors of tf.data and for the functions of seqio's Tasks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import enum
import functools
import itertools
import os
from typing import Any

import clu.values
import jax

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite.apps.common import adapter_base
from t5x_lite.apps.common import starting_point
from t5x_lite.checkpoints import builders
from t5x_lite.data.text import examples as text_examples
from t5x_lite.data.text.examples import TextExample
from t5x_lite.data.text.examples import map_over_examples
from t5x_lite.data.text.examples import over_examples
from t5x_lite.errors import CheckpointError, ConfigError, DataError
from t5x_lite.interactive import texts as text_inference
from t5x_lite.interactive.tasks import T5XScriptType
from t5x_lite.interactive.tasks import get_batches_from_seqio
from t5x_lite.interactive.tasks import get_dataset_from_natural_text_examples
from t5x_lite.interactive.tasks import get_gin_config_from_interactive_model
from t5x_lite.interactive.tasks import get_seqio_task_from_examples
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from t5x_lite.trainer import trainer as trainer_lib
from t5x_lite.types import Batch, PyTree

__all__ = [
  'InferenceType',
  'InteractiveModel',
  'T5XScriptType',
  'get_batches_from_seqio',
  'get_dataset_from_natural_text_examples',
  'get_gin_config_from_interactive_model',
  'get_seqio_task_from_examples',
  'map_over_examples',
  'over_examples',
]

# A list of examples, or a list of such lists.
Batches = Sequence[TextExample] | Sequence[Sequence[TextExample]]

# Number of checkpoints to keep, as in T5X.
_KEEP = 5
# Folder of the metrics of `train_loop`.
_EVALUATION = 'inference_eval/interactive'
_COUNT = checks.number(at_least=1, integer=True)


class InferenceType(enum.Enum):
  """Kind of output of `InteractiveModel.infer_with_preprocessors`."""

  PREDICT_WITH_AUX = 1
  SCORE = 2


class InteractiveModel:
  """Model with its state, for training, prediction, scoring and evaluation in a notebook."""

  def __init__(
    self,
    batch_size: int,
    task_feature_lengths: Mapping[str, int],
    output_dir: str,
    partitioner: partitioning.PjitPartitioner,
    model: models.BaseTransformerModel,
    dtype: str | None,
    restore_mode: str,
    checkpoint_path: str,
    input_shapes: Mapping[str, Any] | None = None,
    input_types: Mapping[str, Any] | None = None,
    init_random_seed: int = 42,
    add_eos: bool = True,
    eval_names: Sequence[str] | None = None,
    *,
    trainer_cls: trainer_lib.BaseTrainerConstructor | None = None,
    save_period: int | None = 1,
    literal_sentinels: bool = False,
    base_path: str | None = None,
  ):
    """Restore or initialize the state; compile nothing.

    Args:
      batch_size: number of rows per batch; smaller batches are padded.
      task_feature_lengths: lengths in ids by task feature; longer texts are truncated.
      output_dir: folder of checkpoints and metrics.
      partitioner: partitioner of the state.
      model: the model with its optimizer.
      dtype: dtype of restored and saved parameters, e.g. 'float32'; None restores them with the model's dtype.
      restore_mode: 'specific' for a checkpoint, 'latest' for the newest sound checkpoint of a run directory.
      checkpoint_path: path of the checkpoint or run directory; empty for new parameters. If the model has an adapter
        and the checkpoint has none, the adapter is new.
      input_shapes: shape of a global batch (tuple or array of its sizes) by model feature, for the initialization; None
        derives the shapes from lengths and batch size.
      input_types: dtype by model feature; int32 for missing ones.
      init_random_seed: seed of new parameters and of dropout.
      add_eos: whether texts end with the end-of-sequence id.
      eval_names: names of the teacher-forced evaluations for `trainer.eval`.
      trainer_cls: constructor of the trainer, e.g. `trainer.Trainer` with its learning-rate schedule bound. None uses
        T5X's schedule, with 1000 steps of warmup, unless the optimizer has a learning rate.
      save_period: number of steps between checkpoints of `train_step`; None leaves saving to `save_checkpoint`.
      literal_sentinels: encode `<extra_id_0>` like any other text, as a task with this option.
      base_path: see `RestoreCheckpointConfig.base_path`.

    Raises:
      ConfigError: options are out of range or contradict each other.
      CheckpointError: the checkpoint is missing, damaged or does not match the model.
    """
    checks.check(
      'InteractiveModel',
      locals(),
      save_period=_COUNT.or_none(),
      init_random_seed=starting_point.SEED,
      restore_mode=checks.one_of(('specific', 'latest')),
    )
    starting_point.check_model_dir('InteractiveModel', 'output_dir', output_dir)
    starting_point.check_optimizer(model)
    self._model = model
    self._partitioner = partitioner
    self._output_dir = str(files.path(output_dir).absolute())
    self._batch_size = batch_size
    self._task_feature_lengths = dict(task_feature_lengths)
    self._save_checkpoint_cfg = checkpoints.SaveCheckpointConfig(
      dtype=dtype or 'float32', save_dataset=False
    ).validated()
    self._save_period = save_period
    self._saved_steps: list[int] = []
    self._restore_checkpoint_cfg = None
    if checkpoint_path:
      added = []
      if state_init.adapter_of(model) is not None:
        # A stored adapter is kept.
        added = [builders.NewAdapter()]
      self._restore_checkpoint_cfg = checkpoints.RestoreCheckpointConfig(
        path=checkpoint_path,
        mode=restore_mode,
        dtype=dtype,
        restore_dataset=False,
        builders=added,
        base_path=base_path,
      ).validated()
    init_rng, trainer_rng = jax.random.split(
      jax.random.key(starting_point.choose_seed(init_random_seed))
    )

    spec = text_inference.element_spec(model, self._task_feature_lengths, batch_size)
    if input_shapes is None:
      shapes = {name: s.shape for name, s in spec.items()}
    else:
      shapes = {name: tuple(int(n) for n in shape) for name, shape in input_shapes.items()}
    initializer = state_init.TrainStateInitializer(
      model.optimizer_def, model.get_initial_variables, shapes, partitioner, input_types
    )
    self._train_state_axes = initializer.train_state_axes
    self._inference = text_inference.TextInference(
      model,
      partitioner,
      self._train_state_axes,
      self._task_feature_lengths,
      batch_size,
      add_eos,
      literal_sentinels=literal_sentinels,
    )
    self._trainer = (trainer_cls or _default_trainer_cls(model))(
      model=model,
      train_state=initializer.global_train_state_shape,
      partitioner=partitioner,
      eval_names=list(eval_names or ()),
      summary_dir=self._output_dir,
      train_state_axes=self._train_state_axes,
      rng=trainer_rng,
    )
    self._trainer.check_batch(spec)
    start = _starting_point(self._restore_checkpoint_cfg)
    starting_point.check_start(start, initializer.global_train_state_shape, model)
    self._trainer.train_state, _ = starting_point.make_state(
      start, initializer, partitioner, model, init_rng
    )
    self._train_summary: Any = None
    if multihost.is_lead():
      files.path(self._output_dir).mkdir(parents=True, exist_ok=True)
      partitioning.write_model_info(
        os.path.join(self._output_dir, 'model-info.txt'),
        initializer.global_train_state_shape,
        partitioner,
      )

  # ---- parts ---------------------------------------------------------------------------------------------------------

  @property
  def trainer(self) -> trainer_lib.BaseTrainer:
    """The trainer."""
    return self._trainer

  @property
  def partitioner(self) -> partitioning.PjitPartitioner:
    """The partitioner."""
    return self._partitioner

  @property
  def model(self) -> models.BaseTransformerModel:
    """The model."""
    return self._model

  @property
  def train_state(self) -> TrainState:
    """State after the last step. The next step consumes its arrays."""
    return self._trainer.train_state

  @property
  def train_state_axes(self) -> PyTree:
    """Mesh PartitionSpecs of the state."""
    return self._train_state_axes

  @property
  def train_summary(self) -> Mapping[str, clu.values.Value]:
    """Metrics of the last training step.

    Raises:
      ConfigError: no step has been trained.
    """
    if self._train_summary is None:
      raise ConfigError('The model has no training summary yet. Call train_step first.')
    return self._train_summary.result()

  @property
  def batch_size(self) -> int:
    """Number of rows per batch."""
    return self._batch_size

  @property
  def task_feature_lengths(self) -> Mapping[str, int]:
    """Lengths in ids by task feature."""
    return self._task_feature_lengths

  @property
  def output_dir(self) -> str:
    """Folder of checkpoints and metrics."""
    return self._output_dir

  @property
  def checkpoint(self) -> tuple[str, str] | None:
    """(path, mode) of the newest checkpoint saved here, else of the restored checkpoint, else None."""
    if self._saved_steps:
      return checkpoints.get_checkpoint_dir(self._output_dir, self._saved_steps[-1]), 'specific'
    if self._restore_checkpoint_cfg is None:
      return None
    return (self._restore_checkpoint_cfg.path, self._restore_checkpoint_cfg.mode)

  @property
  def features(self) -> Mapping[str, text_examples.TextFeature]:
    """Vocabulary and use of the end-of-sequence id, by task feature."""
    return self._inference.reader.features

  @property
  def step(self) -> int:
    """Number of completed training steps."""
    return self._trainer.step

  def close(self) -> None:
    """Finish pending summaries and end their threads; optional at the end of a program."""
    self._trainer.close()

  # ---- training ----------------------------------------------------------------------------------------------------

  def train_step(self, examples: Sequence[TextExample]) -> None:
    """Train one step on one batch.

    Args:
      examples: at most `batch_size` mappings with the texts `input` and `target`; smaller batches are padded with rows
        of weight 0. A string is an input with an empty target.

    Raises:
      DataError: there are no examples, or more than a batch.
    """
    self.train_step_with_preprocessors(examples, ())

  def train_step_with_preprocessors(
    self, examples: Sequence[TextExample], preprocessors: Sequence[Any]
  ) -> None:
    """Train one step on one batch, and save the state if `save_period` is due.

    Args:
      examples: see `train_step`.
      preprocessors: functions that are applied to the examples in order: plain functions wrapped by `map_over_examples`
        or `over_examples`, after which texts are tokenized; or functions of a tf.data.Dataset, such as seqio's, which
        tokenize themselves.

    Raises:
      DataError: there are no examples, or more than a batch.
    """
    features = self._inference.reader.read(examples, preprocessors)
    if len(features) > self._batch_size:
      raise DataError(
        f'`examples` must be at most {self._batch_size} examples, one batch, got {len(features)}. Pass '
        'fewer, or call train_loop with several batches.'
      )
    try:
      self.train_step_from_batch_iterator(batch for _, batch in self._inference.batches(features))
    except trainer_lib.PreemptionError:
      self.save_checkpoint()
      raise
    if (
      self._save_period is not None
      and self.step % self._save_period == 0
      and not self._trainer.stop_training
    ):
      self.save_checkpoint()

  def train_step_from_batch_iterator(self, iterator: Iterator[Batch]) -> None:
    """Train one step on the next batch of model features, global arrays or this process's rows, without saving."""
    self._train_summary = self._trainer.train(map(self._as_global, iterator), 1)
    self._trainer.finish_steps()

  def _as_global(self, batch: Batch) -> dict[str, jax.Array]:
    if all(isinstance(array, jax.Array) for array in batch.values()):
      return dict(batch)
    spec = {
      name: jax.ShapeDtypeStruct((self._batch_size, *array.shape[1:]), array.dtype)
      for name, array in batch.items()
    }
    return data.to_global_arrays(batch, self._partitioner, spec)

  def save_checkpoint(self) -> None:
    """Save the state in `output_dir`, and delete the oldest checkpoints that this object has saved.

    Raises:
      CheckpointError: the checkpoint cannot be written.
      DirectoryInUseError: a run uses the folder.
    """
    # Opened only while saving, so that a cell that constructs this object again finds the folder unlocked.
    with checkpoints.CheckpointManager(
      self._output_dir, save_cfg=self._save_checkpoint_cfg
    ) as manager:
      manager.save(
        self.step,
        self.train_state.state_dict(),
        metadata={
          **starting_point.layout_metadata(self._model),
          **adapter_base.metadata_of(self._model, self.train_state),
        },
      )
    self._saved_steps = [*(step for step in self._saved_steps if step != self.step), self.step]
    # The manager's retention would count checkpoints of other programs.
    for step in self._saved_steps[:-_KEEP]:
      if multihost.is_lead():
        with contextlib.suppress(FileNotFoundError):
          checkpoints.remove_checkpoint_dir(checkpoints.get_checkpoint_dir(self._output_dir, step))
    self._saved_steps = self._saved_steps[-_KEEP:]

  # ---- inference ---------------------------------------------------------------------------------------------------

  def infer_with_preprocessors(
    self,
    mode: InferenceType,
    examples: Sequence[TextExample],
    preprocessors: Sequence[Any],
    **inference_kwargs: Any,
  ) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Predict or score any number of examples.

    Args:
      mode: kind of output.
      examples: texts, or mappings with the texts `input` and `target`; scores need the target.
      preprocessors: see `train_step_with_preprocessors`.
      **inference_kwargs: further arguments of the model's `predict_batch_with_aux` or `score_batch`, as plain values;
        each combination is compiled once.

    Returns:
      (pairs of example and prediction or score, auxiliary outputs). An example has its features as ids and the texts
      `inputs_pretokenized` and `targets_pretokenized`; a prediction is a text, or a list of texts with
      `return_all_decodes`. Auxiliary outputs are lists with one value per example, e.g. 'scores'.

    Raises:
      ValueError: `mode` is not an `InferenceType`.
    """
    features = self._inference.reader.read(examples, preprocessors)
    if InferenceType(mode) is InferenceType.SCORE:
      outputs, aux = self._inference.score(self.train_state, features, **inference_kwargs)
    else:
      ids, aux = self._inference.predict(self.train_state, features, **inference_kwargs)
      outputs = [self._inference.text(each) for each in ids]
    return list(zip(features, outputs, strict=True)), aux

  def predict_with_aux(
    self, examples: Sequence[TextExample]
  ) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return (pairs of example and predicted text, auxiliary outputs); see `infer_with_preprocessors`."""
    return self.infer_with_preprocessors(InferenceType.PREDICT_WITH_AUX, examples, ())

  def score(self, examples: Sequence[TextExample]) -> Sequence[Any]:
    """Return pairs of example and log-likelihood of its target; see `infer_with_preprocessors`."""
    return self.infer_with_preprocessors(InferenceType.SCORE, examples, ())[0]

  # ---- evaluation --------------------------------------------------------------------------------------------------

  def evaluate(
    self, examples: Sequence[TextExample], metric_fns: Sequence[Callable[..., Mapping[str, Any]]]
  ) -> Mapping[Any, Any]:
    """Return metrics of examples; see `evaluate_with_preprocessors`."""
    return self.evaluate_with_preprocessors(examples, (), metric_fns)

  def evaluate_with_preprocessors(
    self,
    examples: Sequence[TextExample],
    preprocessors: Sequence[Any],
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
    postprocessor: Callable[..., Any] | None = None,
  ) -> Mapping[Any, Any]:
    """Predict or score examples and compute metrics.

    Args:
      examples: mappings with the texts `input` and `target`.
      preprocessors: see `train_step_with_preprocessors`.
      metric_fns: functions with the parameters (targets, predictions), (targets, predictions, aux_values) or (targets,
        scores), which return a mapping of metric name to value; see `TextInference.evaluate`.
      postprocessor: `fn(text, example=..., is_target=...)`, applied to targets and predictions before they are compared
        (in T5X only to targets).

    Returns:
      Metrics by name.
    """
    features = self._inference.reader.read(examples, preprocessors)
    return self._inference.evaluate(self.train_state, features, metric_fns, postprocessor)

  # ---- training loop -------------------------------------------------------------------------------------------------

  def train_loop(
    self,
    num_steps: int,
    eval_period: int | None = 1,
    train_batches: Batches | None = None,
    predict_batches: Batches | None = None,
    score_batches: Batches | None = None,
    eval_batches: Batches | None = None,
    metrics_fns: Sequence[Callable[..., Mapping[str, Any]]] | None = None,
  ) -> tuple[Any, Any, Any]:
    """Train several steps, with evaluations.

    Args:
      num_steps: number of steps.
      eval_period: number of steps between evaluations, starting after the first step; None evaluates only after the
        last step, which is always evaluated. Metrics are written to `output_dir` each time.
      train_batches: one batch of examples, or several that are used in turn; None trains nothing.
      predict_batches: examples, or batches of examples, to predict after the last step.
      score_batches: examples, or batches of examples, to score after the last step.
      eval_batches: examples, or batches of examples, to evaluate by `metrics_fns`, all together.
      metrics_fns: see `evaluate_with_preprocessors`.

    Returns:
      (predictions, scores, metrics) after the last step, as returned by `predict_with_aux` (first element), `score` and
      `evaluate`; None for each that was not requested.

    Raises:
      ConfigError: a number is out of range, or only one of `eval_batches` and `metrics_fns` is given.
    """
    pair = checks.Expectation(
      'given if and only if metrics_fns is', lambda batches: bool(batches) == bool(metrics_fns)
    )
    checks.check(
      'train_loop', locals(), num_steps=_COUNT, eval_period=_COUNT.or_none(), eval_batches=pair
    )
    if train_batches:
      batches = itertools.cycle(_as_batches(train_batches))
    else:
      batches = None
    to_evaluate = _flat(eval_batches)
    metrics = None
    with contextlib.closing(summaries.MetricsManager(_EVALUATION, self._output_dir)) as writer:
      for number in range(num_steps):
        if batches is not None:
          self.train_step(next(batches))
        is_last = number + 1 == num_steps or self._trainer.stop_training
        if to_evaluate and (is_last or (eval_period is not None and number % eval_period == 0)):
          metrics = self.evaluate(to_evaluate, metrics_fns or ())
          writer.write_scalars(
            self.step, {name: evaluation.as_number(name, value) for name, value in metrics.items()}
          )
        if is_last:
          break
    if predict_batches:
      predictions = self.predict_with_aux(_flat(predict_batches))[0]
    else:
      predictions = None
    if score_batches:
      scores = self.score(_flat(score_batches))
    else:
      scores = None
    return predictions, scores, metrics


def _default_trainer_cls(model: models.BaseTransformerModel) -> trainer_lib.BaseTrainerConstructor:
  """Return the trainer with T5X's default schedule, or without a schedule if the optimizer has a learning rate."""
  if model.optimizer_def.needs_learning_rate:
    schedule = schedules.create_learning_rate_scheduler()
  else:
    schedule = None
  return functools.partial(trainer_lib.Trainer, learning_rate_fn=schedule)


def _starting_point(
  cfg: checkpoints.RestoreCheckpointConfig | None,
) -> starting_point.StartingPoint:
  """Return the starting point of the state; new parameters if `cfg` is None."""
  if cfg is None:
    return starting_point.StartingPoint()
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if not paths:
    raise CheckpointError(
      f'{cfg.path!r} must be a run directory with checkpoint_<step>, got one without checkpoints. '
      "Correct checkpoint_path, or set it to '' for new parameters."
    )
  return starting_point.StartingPoint(path=paths[0], restore_cfg=cfg)


def _as_batches(batches: Any) -> list[Sequence[TextExample]]:
  """Return a list of batches, also for a single batch; see `Batches`."""
  if isinstance(batches[0], (str, bytes, Mapping)):
    return [batches]
  return list(batches)


def _flat(batches: Batches | None) -> list[TextExample]:
  """Return all examples of all batches."""
  if batches:
    return [example for batch in _as_batches(batches) for example in batch]
  return []
