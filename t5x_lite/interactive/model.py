"""A model in a notebook: train a few steps, predict, score, evaluate and save, from lists of texts.

    from t5x_lite import notebook

    model = notebook.open_run('runs/keyword_cloze')
    model.train_step([{'input': '<extra_id_0> x in numbers:', 'target': 'for'}])
    predictions, aux = model.predict_with_aux(['<extra_id_0> x > 0:'])

`InteractiveModel` can also be made of its parts. The names, arguments and results are T5X's; TensorFlow is needed only
for preprocessors of tf.data and for the functions about seqio's Tasks.
"""

import contextlib
import enum
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import clu.values
import jax

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import start as start_lib
from t5x_lite.data import text_examples
from t5x_lite.data.text_examples import TextExample, map_over_examples, over_examples
from t5x_lite.errors import CheckpointError, ConfigError, DataError
from t5x_lite.interactive import texts as text_inference
from t5x_lite.interactive.tasks import (
    T5XScriptType,
    get_batches_from_seqio,
    get_dataset_from_natural_text_examples,
    get_gin_config_from_interactive_model,
    get_seqio_task_from_examples,
)
from t5x_lite.train_state import TrainState
from t5x_lite.types import Batch, PyTree

__all__ = [
    'InferenceType', 'InteractiveModel', 'T5XScriptType', 'get_batches_from_seqio',
    'get_dataset_from_natural_text_examples', 'get_gin_config_from_interactive_model', 'get_seqio_task_from_examples',
    'map_over_examples', 'over_examples',
]

# A list of examples, or a list of such lists.
Batches = Sequence[TextExample] | Sequence[Sequence[TextExample]]

# T5X's number of checkpoints that a notebook's directory keeps.
_KEEP = 5
# Where the metrics of `train_loop` are written.
_EVALUATION = 'inference_eval/interactive'


class InferenceType(enum.Enum):
  """What `InteractiveModel.infer_with_preprocessors` computes."""

  PREDICT_WITH_AUX = 1
  SCORE = 2


class InteractiveModel:
  """A model with its state, on which one line of a notebook trains, predicts, scores or evaluates."""

  def __init__(self, batch_size: int, task_feature_lengths: Mapping[str, int], output_dir: str,
               partitioner: partitioning.PjitPartitioner, model: models.BaseTransformerModel, dtype: str | None,
               restore_mode: str, checkpoint_path: str, input_shapes: Mapping[str, Any] | None = None,
               input_types: Mapping[str, Any] | None = None, init_random_seed: int = 42, add_eos: bool = True,
               eval_names: Sequence[str] | None = None, *,
               trainer_cls: trainer_lib.BaseTrainerConstructor | None = None, save_period: int | None = 1):
    """Restores or initialises the state; compiles nothing yet.

    Args:
      batch_size: rows of a batch of training, prediction and scoring; fewer examples are filled up.
      task_feature_lengths: task feature name to length in ids; what is longer is cut.
      output_dir: where checkpoints and metrics are written.
      partitioner: lays the state out over the mesh.
      model: the model, with its optimizer.
      dtype: in which parameters are restored and saved, e.g. 'float32'; None restores them as the model has them.
      restore_mode: 'specific' for a checkpoint, 'latest' for the newest sound one in a directory of them.
      checkpoint_path: path of the checkpoint, or of the directory of checkpoints; empty for new parameters.
      input_shapes: model feature name to the shape of a global batch (a tuple, or an array of its numbers), from which
        the state is initialised; None takes the shapes that the lengths and the batch size make.
      input_types: model feature name to dtype; int32 where none is given.
      init_random_seed: of new parameters and of dropout.
      add_eos: whether texts end with the end-of-sequence id.
      eval_names: names of the teacher-forced evaluations that `trainer.eval` will be asked for.
      trainer_cls: makes the trainer, e.g. `trainer.Trainer` with its learning-rate schedule bound. None takes T5X's
        schedule, whose rate rises over 1000 steps from 0, unless the optimizer has one of its own.
      save_period: `train_step` saves the state after every so many steps; None leaves it to `save_checkpoint`.

    Raises:
      ConfigError: options out of range, or that do not fit each other.
      CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the model.
    """
    start_lib.check_model_dir(output_dir)
    start_lib.check_optimizer(model)
    _check_positive('save_period', save_period, or_none=True)
    self._model = model
    self._partitioner = partitioner
    self._output_dir = os.path.abspath(output_dir)
    self._batch_size = batch_size
    self._task_feature_lengths = dict(task_feature_lengths)
    self._save_checkpoint_cfg = checkpoints.SaveCheckpointConfig(dtype=dtype or 'float32', save_dataset=False)
    self._save_period = save_period
    self._saved_steps: list[int] = []
    self._restore_checkpoint_cfg = None
    if checkpoint_path:
      self._restore_checkpoint_cfg = checkpoints.RestoreCheckpointConfig(
          path=checkpoint_path, mode=restore_mode, dtype=dtype, restore_dataset=False)
    init_rng, trainer_rng = jax.random.split(jax.random.key(start_lib.choose_seed(init_random_seed)))

    spec = text_inference.element_spec(model, self._task_feature_lengths, batch_size)
    shapes = {name: s.shape for name, s in spec.items()} if input_shapes is None else {
        name: tuple(int(n) for n in shape) for name, shape in input_shapes.items()}
    initializer = state_init.TrainStateInitializer(
        model.optimizer_def, model.get_initial_variables, shapes, partitioner, input_types)
    self._train_state_axes = initializer.train_state_axes
    self._inference = text_inference.TextInference(
        model, partitioner, self._train_state_axes, self._task_feature_lengths, batch_size, add_eos)
    self._trainer = (trainer_cls or _default_trainer_cls(model))(
        model=model, train_state=initializer.global_train_state_shape, partitioner=partitioner,
        eval_names=list(eval_names or ()), summary_dir=self._output_dir, train_state_axes=self._train_state_axes,
        rng=trainer_rng)
    self._trainer.check_batch(spec)
    start = _starting_point(self._restore_checkpoint_cfg)
    start_lib.check_start(start, initializer.global_train_state_shape, model)
    self._trainer.train_state, _ = start_lib.make_state(start, initializer, partitioner, model, init_rng)
    self._train_summary: Any = None
    if multihost.is_lead():
      os.makedirs(self._output_dir, exist_ok=True)
      partitioning.write_model_info(os.path.join(self._output_dir, 'model-info.txt'),
                                    initializer.global_train_state_shape, partitioner)

  # ---- what it is made of ------------------------------------------------------------------------------------------

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
    """The state after the last step. The next step consumes its arrays."""
    return self._trainer.train_state

  @property
  def train_state_axes(self) -> PyTree:
    """The mesh PartitionSpecs of the state."""
    return self._train_state_axes

  @property
  def train_summary(self) -> Mapping[str, clu.values.Value]:
    """The metrics of the last training step.

    Raises:
      ConfigError: no step has been taken.
    """
    if self._train_summary is None:
      raise ConfigError('There is no training summary yet: call train_step first.')
    return self._train_summary.result()

  @property
  def batch_size(self) -> int:
    """Rows of a batch."""
    return self._batch_size

  @property
  def task_feature_lengths(self) -> Mapping[str, int]:
    """Task feature name to length in ids."""
    return self._task_feature_lengths

  @property
  def output_dir(self) -> str:
    """Where checkpoints and metrics are written."""
    return self._output_dir

  @property
  def checkpoint(self) -> tuple[str, str] | None:
    """(path, mode) of the newest checkpoint that was saved here, else of what was restored; None if there is none."""
    if self._saved_steps:
      return checkpoints.get_checkpoint_dir(self._output_dir, self._saved_steps[-1]), 'specific'
    return None if self._restore_checkpoint_cfg is None else (
        self._restore_checkpoint_cfg.path, self._restore_checkpoint_cfg.mode)

  @property
  def features(self) -> Mapping[str, text_examples.TextFeature]:
    """Task feature name to its vocabulary, and whether it ends with an end-of-sequence id."""
    return self._inference.reader.features

  @property
  def step(self) -> int:
    """Number of training steps behind the state."""
    return self._trainer.step

  def close(self) -> None:
    """Finishes pending summaries and ends their threads; not needed before the end of a program."""
    self._trainer.close()

  # ---- training ----------------------------------------------------------------------------------------------------

  def train_step(self, examples: Sequence[TextExample]) -> None:
    """Trains one step on one batch.

    Args:
      examples: at most `batch_size` mappings of `input` and `target` to texts. Of fewer, the rest of the batch is
        padding without weight. A plain text is an input with an empty target.

    Raises:
      DataError: no examples, or more than fit into one batch.
    """
    self.train_step_with_preprocessors(examples, ())

  def train_step_with_preprocessors(self, examples: Sequence[TextExample], preprocessors: Sequence[Any]) -> None:
    """Trains one step on one batch, and saves the state where `save_period` says so.

    Args:
      examples: see `train_step`.
      preprocessors: applied to the examples in order: plain functions wrapped by `map_over_examples` or
        `over_examples`, after which texts become ids; or functions of a tf.data.Dataset, such as seqio's, which make
        the ids themselves.

    Raises:
      DataError: no examples, or more than fit into one batch.
    """
    features = self._inference.reader.read(examples, preprocessors)
    if len(features) > self._batch_size:
      raise DataError(f'Got {len(features)} examples for one step of a batch of {self._batch_size}: give fewer, or '
                      'call train_loop with several batches.')
    try:
      self.train_step_from_batch_iterator(batch for _, batch in self._inference.batches(features))
    except trainer_lib.PreemptionError:
      self.save_checkpoint()
      raise
    if self._save_period is not None and self.step % self._save_period == 0 and not self._trainer.stop_training:
      self.save_checkpoint()

  def train_step_from_batch_iterator(self, iterator: Iterator[Batch]) -> None:
    """Trains one step on the next batch of model features, global arrays or this process's rows; saves nothing."""
    self._train_summary = self._trainer.train(map(self._as_global, iterator), 1)
    self._trainer.finish_steps()

  def _as_global(self, batch: Batch) -> dict[str, jax.Array]:
    if all(isinstance(array, jax.Array) for array in batch.values()):
      return dict(batch)
    spec = {name: jax.ShapeDtypeStruct((self._batch_size, *array.shape[1:]), array.dtype)
            for name, array in batch.items()}
    return data.to_global_arrays(batch, self._partitioner, spec)

  def save_checkpoint(self) -> None:
    """Saves the state in `output_dir`, and deletes what this object has saved before but for the newest checkpoints.

    Raises:
      CheckpointError: it cannot be written.
      DirectoryInUseError: a run is writing there.
    """
    # Opened for the moment of saving only: a cell that makes this object anew must not find the directory locked.
    with checkpoints.CheckpointManager(self._output_dir, save_cfg=self._save_checkpoint_cfg) as manager:
      manager.save(self.step, self.train_state.state_dict(), metadata=start_lib.layout_metadata(self._model))
    self._saved_steps = [*(step for step in self._saved_steps if step != self.step), self.step]
    # Not the manager's retention, which would count checkpoints of others.
    for step in self._saved_steps[:-_KEEP]:
      if multihost.is_lead():
        with contextlib.suppress(FileNotFoundError):
          checkpoints.remove_checkpoint_dir(checkpoints.get_checkpoint_dir(self._output_dir, step))
    self._saved_steps = self._saved_steps[-_KEEP:]

  # ---- inference ---------------------------------------------------------------------------------------------------

  def infer_with_preprocessors(self, mode: InferenceType, examples: Sequence[TextExample],
                               preprocessors: Sequence[Any],
                               **inference_kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Predicts or scores any number of examples.

    Args:
      mode: what to compute.
      examples: texts, or mappings of `input` and `target` to texts; scores need the target.
      preprocessors: see `train_step_with_preprocessors`.
      **inference_kwargs: further arguments of the model's `predict_batch_with_aux` or `score_batch`, plain values; each
        set of them is compiled once.

    Returns:
      (pairs of example and prediction or score, auxiliary values). An example has its features as ids and, under
      `inputs_pretokenized` and `targets_pretokenized`, their texts; a prediction is a text, or a list of texts where
      all decodes were asked for. Auxiliary values are lists with one value for each example, e.g. under 'scores'.
    """
    if not isinstance(mode, InferenceType):
      raise ConfigError(f'mode is {mode!r}; expected InferenceType.PREDICT_WITH_AUX or InferenceType.SCORE.')
    features = self._inference.reader.read(examples, preprocessors)
    if mode is InferenceType.SCORE:
      outputs, aux = self._inference.score(self.train_state, features, **inference_kwargs)
    else:
      ids, aux = self._inference.predict(self.train_state, features, **inference_kwargs)
      outputs = [self._inference.text(each) for each in ids]
    return list(zip(features, outputs, strict=True)), aux

  def predict_with_aux(self, examples: Sequence[TextExample]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns (pairs of example and predicted text, auxiliary values); see `infer_with_preprocessors`."""
    return self.infer_with_preprocessors(InferenceType.PREDICT_WITH_AUX, examples, ())

  def score(self, examples: Sequence[TextExample]) -> Sequence[Any]:
    """Returns pairs of example and log-likelihood of its target; see `infer_with_preprocessors`."""
    return self.infer_with_preprocessors(InferenceType.SCORE, examples, ())[0]

  # ---- evaluation --------------------------------------------------------------------------------------------------

  def evaluate(self, examples: Sequence[TextExample],
               metric_fns: Sequence[Callable[..., Mapping[str, Any]]]) -> Mapping[Any, Any]:
    """Returns metrics of examples; see `evaluate_with_preprocessors`."""
    return self.evaluate_with_preprocessors(examples, (), metric_fns)

  def evaluate_with_preprocessors(
      self, examples: Sequence[TextExample], preprocessors: Sequence[Any],
      metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
      postprocessor: Callable[..., Any] | None = None) -> Mapping[Any, Any]:
    """Predicts or scores examples and judges the results.

    Args:
      examples: mappings of `input` and `target` to texts.
      preprocessors: see `train_step_with_preprocessors`.
      metric_fns: see `TextInference.evaluate`: (targets, predictions), (targets, predictions, aux_values) or (targets,
        scores), by these names, to a mapping of metric name to value.
      postprocessor: `fn(text, example=..., is_target=...)`, applied to targets and predictions before they are compared
        (in T5X to targets only).

    Returns:
      Metric name to value.
    """
    features = self._inference.reader.read(examples, preprocessors)
    return self._inference.evaluate(self.train_state, features, metric_fns, postprocessor)

  # ---- all of it ---------------------------------------------------------------------------------------------------

  def train_loop(self, num_steps: int, eval_period: int | None = 1, train_batches: Batches | None = None,
                 predict_batches: Batches | None = None, score_batches: Batches | None = None,
                 eval_batches: Batches | None = None,
                 metrics_fns: Sequence[Callable[..., Mapping[str, Any]]] | None = None) -> tuple[Any, Any, Any]:
    """Trains for some steps and evaluates on the way.

    Args:
      num_steps: how many steps to take.
      eval_period: evaluate after every so many steps, beginning with the first, and after the last; None only after the
        last. Metrics are written to `output_dir` each time.
      train_batches: one batch of examples or several, taken in turn; None trains nothing.
      predict_batches: examples, or batches of them, to predict after the last step.
      score_batches: examples, or batches of them, to score after the last step.
      eval_batches: examples, or batches of them, to evaluate by `metrics_fns`, all together.
      metrics_fns: see `evaluate_with_preprocessors`.

    Returns:
      (predictions, scores, metrics) after the last step, as `predict_with_aux` (its first part), `score` and `evaluate`
      return them; None in the place of what was not asked for.

    Raises:
      ConfigError: numbers out of range, or `eval_batches` without `metrics_fns`, or the other way round.
    """
    _check_positive('num_steps', num_steps)
    _check_positive('eval_period', eval_period, or_none=True)
    if bool(eval_batches) != bool(metrics_fns):
      raise ConfigError('train_loop got one of eval_batches and metrics_fns without the other; expected both, or none.')
    batches = itertools.cycle(_as_batches(train_batches)) if train_batches else None
    to_evaluate = _flat(eval_batches)
    metrics = None
    with contextlib.closing(summaries.MetricsManager(_EVALUATION, self._output_dir)) as writer:
      for number in range(num_steps):
        if batches is not None:
          self.train_step(next(batches))
        is_last = number + 1 == num_steps or self._trainer.stop_training
        if to_evaluate and (is_last or (eval_period is not None and number % eval_period == 0)):
          metrics = self.evaluate(to_evaluate, metrics_fns)
          writer.write_scalars(
              self.step, {name: evaluation.as_number(name, value) for name, value in metrics.items()})
        if is_last:
          break
    predictions = self.predict_with_aux(_flat(predict_batches))[0] if predict_batches else None
    scores = self.score(_flat(score_batches)) if score_batches else None
    return predictions, scores, metrics


def _check_positive(name: str, value: Any, or_none: bool = False) -> None:
  """Raises ConfigError unless the value is an integer above 0, or None where that is allowed."""
  if not (or_none and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
    raise ConfigError(f'{name} is {value!r}; expected a whole number above 0{", or None" if or_none else ""}.')


def _default_trainer_cls(model: models.BaseTransformerModel) -> trainer_lib.BaseTrainerConstructor:
  """Returns the trainer with T5X's default schedule, where the optimizer has none of its own."""
  schedule = schedules.create_learning_rate_scheduler() if model.optimizer_def.needs_learning_rate else None
  return functools.partial(trainer_lib.Trainer, learning_rate_fn=schedule)


def _starting_point(cfg: checkpoints.RestoreCheckpointConfig | None) -> start_lib.StartingPoint:
  """Returns what the state is made from; None means new parameters."""
  if cfg is None:
    return start_lib.StartingPoint()
  if cfg.mode == 'all':
    raise ConfigError("restore_mode is 'all'; expected 'specific' for a checkpoint or 'latest' for the newest one in a "
                      'directory.')
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if not paths:
    raise CheckpointError(f'There is no checkpoint below {cfg.path!r}; expected a directory with checkpoint_<step> in '
                          "it. Correct checkpoint_path, or set it to '' for new parameters.")
  return start_lib.StartingPoint(path=paths[0], restore_cfg=cfg)


def _as_batches(batches: Batches) -> list[Sequence[TextExample]]:
  """Returns a list of batches, one if examples were given."""
  return [batches] if isinstance(batches[0], (str, bytes, Mapping)) else list(batches)


def _flat(batches: Batches | None) -> list[TextExample]:
  """Returns all examples of all batches."""
  return [example for batch in _as_batches(batches) for example in batch] if batches else []
