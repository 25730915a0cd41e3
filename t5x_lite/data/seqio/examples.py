"""Interactive examples with seqio: preprocessors of tf.data, Tasks of given examples, and examples of Tasks."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data import vocabularies
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio import tasks as tasks  # registers the embedded tasks
from t5x_lite.data.seqio.packages import as_text
from t5x_lite.data.seqio.packages import dataset_of
from t5x_lite.data.seqio.packages import explained
from t5x_lite.data.seqio.packages import numpy_elements
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.data.seqio.packages import tf
from t5x_lite.errors import ConfigError, DataError

_SPLITS = ('train', 'validation')


def preprocess(
  examples: Sequence[Mapping[str, Any]],
  preprocessors: Sequence[Callable[..., tf.data.Dataset]],
  features: Mapping[str, Any],
  lengths: Mapping[str, int],
) -> list[dict[str, Any]]:
  """Return examples after preprocessors of tf.data, as NumPy arrays and texts, trimmed to their lengths.

  Args:
    examples: feature name to text or ids.
    preprocessors: functions of a dataset, which seqio calls with `output_features` and `sequence_length` if they have
      arguments of these names.
    features: task feature name to `TextFeature`.
    lengths: task feature name to length.

  Raises:
    DataError: a preprocessor fails, or its features are not those of the model.
    ConfigError: seqio has no vocabulary equal to the model's.
  """
  task = _task(
    'interactive_examples',
    lambda: _source_dataset(examples),
    len(examples),
    preprocessors,
    features,
    (),
  )
  with _preparing(preprocessors):
    dataset = _task_dataset(task, lengths)
    return [
      {name: as_text(value) for name, value in example.items()}
      for example in numpy_elements(dataset)
    ]


def dataset_from_examples(
  examples: Sequence[Mapping[str, Any]],
  preprocessors: Sequence[Callable[..., tf.data.Dataset]],
  lengths: Mapping[str, int] | None,
  features: Mapping[str, Any],
) -> tf.data.Dataset:
  """Return a dataset of examples after preprocessors; see `interactive_model.get_dataset_from_natural_text_examples`.

  Args:
    examples: feature name to text or ids.
    preprocessors: see `preprocess`.
    lengths: task feature name to length; None for no trimming.
    features: task feature name to `TextFeature` or `seqio.Feature`; if empty, features are not checked or trimmed.
  """
  if not features:
    dataset = _source_dataset(examples)
    for preprocessor in preprocessors:
      dataset = preprocessor(dataset)
    return dataset
  task = _task(
    'interactive_examples',
    lambda: _source_dataset(examples),
    len(examples),
    preprocessors,
    features,
    (),
  )
  with _preparing(preprocessors):
    return _task_dataset(task, lengths)


def task_from_examples(
  name: str,
  examples: Sequence[Mapping[str, Any]],
  preprocessors: Sequence[Callable[..., tf.data.Dataset]],
  features: Mapping[str, Any],
  metric_fns: Sequence[Callable[..., Any]],
  add_to_registry: bool,
) -> seqio.Task:
  """Return a Task with the examples as its splits `train` and `validation`.

  Raises:
    ConfigError: the name is taken.
  """
  if not add_to_registry:
    return _task(
      name, lambda: _source_dataset(examples), len(examples), preprocessors, features, metric_fns
    )
  if name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}:
    raise ConfigError(f'seqio has a task or mixture {name!r} already: choose another task_name.')
  task = _task(
    name, lambda: _source_dataset(examples), len(examples), preprocessors, features, metric_fns
  )
  seqio.TaskRegistry.add_provider(name, task)
  return task


def batches_from_task(
  name: str,
  split: str,
  batch_size: int,
  num_batches: int,
  pretokenized: bool,
  sequence_length: Mapping[str, int] | None,
  **options: Any,
) -> list[list[dict[str, Any]]]:
  """Return batches of examples; see `interactive_model.get_batches_from_seqio`.

  Raises:
    DataError: the task or split is unknown, there are too few examples, or the task does not keep texts.
  """
  task = seqio_features.find(name, 'Import the module that registers it.')
  seqio_features.check_split(task, split)
  suffix = ''
  if pretokenized:
    suffix = '_pretokenized'
  wanted = batch_size * num_batches
  examples = []
  with _preparing(()):
    dataset = task.get_dataset(sequence_length=sequence_length, split=split, **options).take(wanted)
    for element in numpy_elements(dataset):
      found = {}
      for ours, feature in (('input', f'inputs{suffix}'), ('target', f'targets{suffix}')):
        if feature not in element:
          continue
        value = element[feature]
        if pretokenized:
          found[ours] = as_text(value)
        else:
          found[ours] = value.tolist()
      if not found:
        expected = 'ids'
        if pretokenized:
          expected = 'texts (inputs_pretokenized)'
        raise DataError(
          f'The examples of {name!r} have no {expected}: '
          f'set get_pretokenized_examples={not pretokenized}.'
        )
      examples.append(found)
  if len(examples) < wanted:
    raise DataError(
      f'The split {split!r} of {name!r} must have at least {wanted} examples, {num_batches} batches of '
      f'{batch_size}, got {len(examples)}. Ask for fewer.'
    )
  return [examples[start : start + batch_size] for start in range(0, wanted, batch_size)]


def as_seqio_vocabulary(vocabulary: Any) -> seqio.Vocabulary:
  """Return seqio's vocabulary with the same ids.

  Raises:
    ConfigError: seqio has no such vocabulary.
  """
  match vocabulary:
    case seqio.Vocabulary():
      return vocabulary
    case vocabularies.ByteVocabulary():
      return seqio.ByteVocabulary(vocabulary.extra_ids)
    case vocabularies.PassThroughVocabulary():
      return seqio.PassThroughVocabulary(vocabulary.vocab_size, vocabulary.eos_id)
    case vocabularies.SentencePieceVocabulary():
      _, path, extra_ids, reverse_extra_ids = vocabulary.identity
      if path.startswith('s3://'):
        raise checks.invalid(
          'SentencePieceVocabulary',
          'sentencepiece_model_file',
          'a local file or in gs:// for seqio, whose TensorFlow has no s3://',
          path,
          'Copy it to a disk.',
        )
      if path.endswith('.json'):
        raise checks.invalid(
          'hugging_face_vocabulary',
          'library',
          f"'t5x_lite' for {path}, which seqio cannot read",
          'seqio',
          'Set library to it, or write spiece.model with tokenizer_folders.write_sentencepiece_model.',
        )
      return seqio.SentencePieceVocabulary(path, extra_ids, reverse_extra_ids=reverse_extra_ids)
  raise ConfigError(
    'Preprocessors of tf.data need a seqio vocabulary, and seqio has no vocabulary equal to '
    f'{vocabulary!r}. Use a vocabulary of seqio, or write the preprocessors in plain Python '
    '(map_over_examples).'
  )


def _task(name, dataset_fn, num_examples, preprocessors, features, metric_fns) -> seqio.Task:
  def read(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
    del split, shuffle_files, seed
    return dataset_fn()

  output_features = {}
  for key, feature in features.items():
    if not isinstance(feature, seqio.Feature):
      vocabulary = as_seqio_vocabulary(feature.vocabulary)
      feature = seqio.Feature(vocabulary=vocabulary, add_eos=feature.add_eos)
    output_features[key] = feature
  source = seqio.FunctionDataSource(
    read, splits=_SPLITS, num_input_examples=dict.fromkeys(_SPLITS, num_examples)
  )
  with quiet():
    return seqio.Task(
      name, source, output_features, list(preprocessors), metric_fns=list(metric_fns)
    )


def _task_dataset(task: seqio.Task, lengths: Mapping[str, int] | None) -> tf.data.Dataset:
  if lengths is not None:
    lengths = dict(lengths)
  return task.get_dataset(
    sequence_length=lengths,
    split='train',
    shuffle=False,
    try_in_mem_cache=False,
  )


def _source_dataset(examples: Sequence[Mapping[str, Any]]) -> tf.data.Dataset:
  """Return the examples as a dataset; ids may have different lengths."""
  columns = {}
  for name in dict.fromkeys(name for example in examples for name in example):
    values = [example[name] for example in examples if name in example]
    texts = [isinstance(value, (str, bytes)) for value in values]
    if len(values) < len(examples) or any(texts) != all(texts):
      raise DataError(
        f'{name!r} must be text, or ids, in all examples, got different types or examples without it.'
      )
    if all(texts):
      columns[name] = tf.constant(values)
    else:  # ids, or several texts, e.g. all correct answers
      lists = [np.asarray(value).tolist() for value in values]
      dtype = tf.int32
      if any(isinstance(item, (str, bytes)) for items in lists for item in items):
        dtype = tf.string
      columns[name] = tf.ragged.constant(lists, dtype=dtype)
  return dataset_of(columns)


def _preparing(preprocessors: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
  """Raise DataError instead of exceptions of seqio and TensorFlow, with the names of the preprocessors."""
  names = ', '.join(
    getattr(preprocessor, '__name__', repr(preprocessor)) for preprocessor in preprocessors
  )
  if preprocessors:
    remedy = (
      f'. The preprocessors {names} were called with a tf.data.Dataset each; wrap a function of plain Python in '
      'map_over_examples or over_examples.'
    )
  else:
    remedy = ''
  return explained(
    'The examples cannot be prepared',
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    AssertionError,
    remedy=remedy,
  )
