"""T5X's functions between notebooks and commands: seqio Tasks from examples, examples from Tasks, and gin files."""

from collections.abc import Callable, Mapping, Sequence
import enum
from typing import Any

from t5x_lite.data.text import examples as text_examples
from t5x_lite.data.text.examples import TextExample
from t5x_lite.errors import ConfigError


class T5XScriptType(enum.Enum):
  """Command for which `get_gin_config_from_interactive_model` writes a configuration."""

  FINETUNING = 1
  INFERENCE = 2
  EVALUATION = 3
  PRETRAINING = 4


def get_dataset_from_natural_text_examples(
  examples: Sequence[TextExample],
  preprocessors: Sequence[Callable[..., Any]],
  task_feature_lengths: Mapping[str, int] | None,
  features: Mapping[str, Any],
) -> Any:
  """Return a tf.data.Dataset of the examples after preprocessors of tf.data; requires TensorFlow and seqio.

  Args:
    examples: texts, or mappings with the texts `input` and `target`.
    preprocessors: functions of a dataset; seqio's may have the parameters `output_features` and `sequence_length`.
    task_feature_lengths: lengths in ids by task feature; None truncates nothing.
    features: `seqio.Feature` by task feature; every preprocessed example must have them.

  Raises:
    DataError: there are no examples, or the preprocessors fail or do not return the features.
  """
  from t5x_lite.data.seqio import examples as seqio_examples

  return seqio_examples.dataset_from_examples(
    _as_pairs(examples), preprocessors, task_feature_lengths, features
  )


def _as_pairs(examples: Sequence[TextExample]) -> list[dict[str, Any]]:
  """Return the examples with both features; a missing one is empty."""
  return [{'inputs': '', 'targets': '', **example} for example in text_examples.as_dicts(examples)]


def get_batches_from_seqio(
  task_or_mixture_name: str,
  split: str,
  batch_size: int,
  num_batches: int,
  get_pretokenized_examples: bool = True,
  sequence_length: Mapping[str, int] | None = None,
  **get_dataset_kwargs: Any,
) -> Sequence[Sequence[Mapping[str, Any]]]:
  """Return batches of examples of a seqio Task or Mixture for `InteractiveModel`; requires TensorFlow and seqio.

  Args:
    task_or_mixture_name: a registered name.
    split: e.g. 'train'.
    batch_size: number of examples per batch.
    num_batches: number of batches.
    get_pretokenized_examples: return the texts that the Task keeps, or else the ids.
    sequence_length: length by task feature, if the Task's preprocessors require it.
    **get_dataset_kwargs: further arguments of seqio's `get_dataset`, e.g. `shuffle=False` or `seed=42`.

  Returns:
    Lists of {'input': ..., 'target': ...}.

  Raises:
    DataError: the task or split is unknown, there are too few examples, or the Task keeps no texts.
  """
  from t5x_lite.data.seqio import examples as seqio_examples

  return seqio_examples.batches_from_task(
    task_or_mixture_name,
    split,
    batch_size,
    num_batches,
    get_pretokenized_examples,
    sequence_length,
    **get_dataset_kwargs,
  )


def get_seqio_task_from_examples(
  task_name: str,
  interactive_model: Any,
  examples: Sequence[TextExample],
  preprocessors: Sequence[Callable[..., Any]],
  metric_fns: Sequence[Callable[..., Any]] | None = None,
  add_to_registry: bool = True,
) -> Any:
  """Return a seqio Task of the examples, for training or evaluation by commands; requires TensorFlow and seqio.

  Args:
    task_name: name of the Task.
    interactive_model: an `InteractiveModel`, which defines features and vocabularies.
    examples: texts, or mappings with the texts `input` and `target`; used for both splits, `train` and `validation`.
    preprocessors: functions of a tf.data.Dataset.
    metric_fns: seqio's metric functions.
    add_to_registry: whether to register the Task under its name.

  Raises:
    ConfigError: the name is registered already, or seqio has no vocabulary equal to the model's.
  """
  from t5x_lite.data.seqio import examples as seqio_examples

  return seqio_examples.task_from_examples(
    task_name,
    _as_pairs(examples),
    preprocessors,
    interactive_model.features,
    metric_fns or (),
    add_to_registry,
  )


def get_gin_config_from_interactive_model(
  interactive_model: Any,
  script_type: T5XScriptType,
  task_name: str,
  partitioner_config_str: str,
  model_config_str: str,
  train_steps: int = 1,
  imports_str: str = '',
) -> str:
  """Return a gin file with which a command continues the work of a notebook.

  Model and partitioner are given as gin text, since they cannot be derived from the objects. Write the text to a file
  for `t5x_lite train --gin_file=FILE`, or `eval` or `infer`.

  Args:
    interactive_model: an `InteractiveModel`.
    script_type: FINETUNING or PRETRAINING for `train`, EVALUATION for `eval`, INFERENCE for `infer`.
    task_name: name of a seqio Task or Mixture.
    partitioner_config_str: bindings of the partitioner, e.g. 'partitioning.PjitPartitioner.num_partitions = 2'.
    model_config_str: bindings of the model.
    train_steps: number of training steps after those of the checkpoint.
    imports_str: imports and includes for these bindings, e.g. "include 'models/t5_1_1_small.gin'".

  Returns:
    Gin text.

  Raises:
    ValueError: `script_type` is not a `T5XScriptType`.
    ConfigError: the type requires a checkpoint, and the model has neither been restored nor saved.
  """
  script_type = T5XScriptType(script_type)
  checkpoint = interactive_model.checkpoint
  if checkpoint is None and script_type is not T5XScriptType.PRETRAINING:
    raise ConfigError(
      f'T5XScriptType.{script_type.name} requires a checkpoint, and this model was neither restored '
      'nor saved. Call save_checkpoint first.'
    )
  run, names, checkpoint_lines = _RUNS[script_type]
  values = {
    'MIXTURE_OR_TASK_NAME': task_name,
    'TASK_FEATURE_LENGTHS': dict(interactive_model.task_feature_lengths),
    'BATCH_SIZE': interactive_model.batch_size,
    'USE_CACHED_TASKS': False,
    'DROPOUT_RATE': 0.0,
    'TRAIN_STEPS': train_steps + (0 if checkpoint is None else interactive_model.step),
    'SHUFFLE_TRAIN_EXAMPLES': False,
    'PACK': False,
    'MODEL_DIR': interactive_model.output_dir,
    'EVAL_OUTPUT_DIR': f'{interactive_model.output_dir}/eval',
    'INFER_OUTPUT_DIR': f'{interactive_model.output_dir}/infer',
  }
  lines = [
    'from __gin__ import dynamic_registration',
    '',
    'from t5x_lite import checkpoints',
    '',
    f"include '{run}'",
    '',
    imports_str,
    '',
  ]
  lines += [f'{name} = {values[name]!r}' for name in (*_DATA_MACROS, *names)]
  if checkpoint is not None:
    path, mode = checkpoint
    lines += [line.format(path=repr(path), mode=repr(mode)) for line in checkpoint_lines]
  return '\n'.join([*lines, '', model_config_str, partitioner_config_str, ''])


_DATA_MACROS = (
  'MIXTURE_OR_TASK_NAME',
  'TASK_FEATURE_LENGTHS',
  'BATCH_SIZE',
  'USE_CACHED_TASKS',
  'DROPOUT_RATE',
)
_TRAIN_MACROS = ('MODEL_DIR', 'TRAIN_STEPS', 'SHUFFLE_TRAIN_EXAMPLES', 'PACK')
_RESTORE = (
  'checkpoints.CheckpointConfig.restore = @checkpoints.RestoreCheckpointConfig()',
  'checkpoints.RestoreCheckpointConfig:',
  '  path = {path}',
  '  mode = {mode}',
  '  restore_dataset = False',
)
_CHECKPOINT = ('CHECKPOINT_PATH = {path}', 'CHECKPOINT_MODE = {mode}')
# For each type the run file, the macros that it reads in addition to those of the data, and the checkpoint's bindings.
_RUNS = {
  T5XScriptType.PRETRAINING: ('runs/pretrain.gin', _TRAIN_MACROS, _RESTORE),
  T5XScriptType.FINETUNING: (
    'runs/finetune.gin',
    _TRAIN_MACROS,
    ('INITIAL_CHECKPOINT_PATH = {path}', 'checkpoints.RestoreCheckpointConfig.mode = {mode}'),
  ),
  T5XScriptType.INFERENCE: ('runs/infer.gin', ('INFER_OUTPUT_DIR',), _CHECKPOINT),
  T5XScriptType.EVALUATION: ('runs/eval.gin', ('EVAL_OUTPUT_DIR',), _CHECKPOINT),
}
