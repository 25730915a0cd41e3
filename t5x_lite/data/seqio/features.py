"""Lookup of the names of a `DatasetConfig` in seqio: Task or Mixture, split, lengths, rates, and feature converter."""

from collections.abc import Sequence
import functools
import importlib.util
from typing import Any

from t5x_lite import checks
from t5x_lite.data import builtin_tasks
from t5x_lite.data.batches import features as features_lib
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.seqio import tasks as tasks  # registers the embedded tasks
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.errors import DataError, did_you_mean

# Names that models give, and seqio's classes for them.
_CONVERTERS = {
  'encoder_decoder': seqio.EncDecFeatureConverter,
  'decoder_only': seqio.DecoderFeatureConverter,
  'prefix_lm': seqio.PrefixLMFeatureConverter,
  'prefix_lm_with_loss_on_inputs': functools.partial(
    seqio.PrefixLMFeatureConverter, loss_on_targets_only=False
  ),
}
# Features that seqio's DecoderFeatureConverter reads if they have a length.
_OPTIONAL_OF_DECODER = ('inputs', 'suffixes')


def get_provider(cfg: DatasetConfig) -> Any:
  """Return the seqio Task or Mixture of `cfg`, after importing `cfg.module`.

  Raises:
    ConfigError: the module cannot be imported.
    DataError: the name is not registered.
  """
  with quiet():
    cfg.import_module()
  name = cfg.mixture_or_task_name
  if isinstance(name, seqio.Task | seqio.Mixture):
    return name
  if cfg.module is not None:
    remedy = f'The module {cfg.module!r} does not register it.'
  else:
    remedy = 'A custom task needs the module that registers it (DatasetConfig.module).'
  return find(name, remedy)


def find(name: Any, remedy: str) -> Any:
  """Return the registered Task or Mixture of a name.

  Args:
    name: the name.
    remedy: sentence for the error message.

  Raises:
    DataError: the name is not registered.
  """
  tasks = set(seqio.TaskRegistry.names())
  mixtures = set(seqio.MixtureRegistry.names())
  if not isinstance(name, str) or name not in tasks | mixtures:
    raise DataError(
      f'seqio has no task or mixture {name!r}.{did_you_mean(str(name), tasks | mixtures)} {remedy}'
    )
  if name in mixtures:
    return seqio.MixtureRegistry.get(name)
  return seqio.TaskRegistry.get(name)


def get_vocabulary(cfg: DatasetConfig) -> tuple[Any, Any]:
  """Return the (input, output) vocabularies; without `inputs` or `targets`, the vocabulary of all features twice.

  Features of ids (PassThroughVocabulary) are ignored if others have a vocabulary.

  Raises:
    ConfigError: there are several vocabularies.
  """
  provider = get_provider(cfg)
  features = provider.output_features
  if 'inputs' in features and 'targets' in features:
    return features['inputs'].vocabulary, features['targets'].vocabulary
  found = [feature.vocabulary for feature in features.values()]
  found = [each for each in found if not isinstance(each, seqio.PassThroughVocabulary)] or found
  if not found or any(each != found[0] for each in found):
    raise checks.invalid(
      '',
      f'output_features of {provider.name!r}',
      'one vocabulary, or inputs and targets',
      {name: str(feature.vocabulary) for name, feature in features.items()},
    )
  return found[0], found[0]


def subtasks_with_split(provider: Any, split: str) -> list[Any]:
  """Return the Tasks of a Mixture, or the Task itself, that have `split`."""
  with quiet():
    return [task for task in seqio.get_subtasks(provider) if split.partition('[')[0] in task.splits]


def get_converter_cls(feature_converter: Any) -> Any:
  """Return the converter class with the name that a model gives; a class itself is returned unchanged.

  Raises:
    ConfigError: the name is unknown.
  """
  if not isinstance(feature_converter, str):
    return feature_converter
  checks.check(
    '', {'FEATURE_CONVERTER': feature_converter}, FEATURE_CONVERTER=checks.one_of(_CONVERTERS)
  )
  return _CONVERTERS[feature_converter]


def get_converter(cfg: DatasetConfig, feature_converter: Any, provider: Any) -> Any:
  """Return the seqio feature converter with the options of `cfg`.

  Args:
    cfg: options of the dataset.
    feature_converter: name of a converter, or a converter class of seqio.
    provider: Task or Mixture.

  Raises:
    ConfigError: the name is unknown, a feature length is missing or unknown, or the task lacks a feature.
  """
  feature_converter = get_converter_cls(feature_converter)
  uses_tensor2tensor = cfg.use_custom_packing_ops and cfg.pack
  if uses_tensor2tensor and importlib.util.find_spec('tensor2tensor') is None:
    raise checks.invalid(
      'DatasetConfig',
      'use_custom_packing_ops',
      'False without the package tensor2tensor',
      True,
      'Remove it, or install tensor2tensor.',
    )
  converter = checks.call_custom(
    '',
    'feature_converter_cls',
    'pack=, use_custom_packing_ops=',
    feature_converter,
    pack=cfg.pack,
    use_custom_packing_ops=cfg.use_custom_packing_ops,
  )
  lengths = cfg.task_feature_lengths
  if lengths is None:  # They will be those of the split.
    lengths = dict.fromkeys(features_of(converter, provider), features_lib.UNKNOWN_LENGTH)
  features_lib.check_lengths(
    lengths,
    list(provider.output_features),
    provider.name,
    list(converter.TASK_FEATURES),
    _optional_features(converter),
  )
  return converter


def features_of(converter: Any, provider: Any) -> list[str]:
  """Return the features of a Task or Mixture that a converter uses."""
  return [
    name
    for name in (*converter.TASK_FEATURES, *_optional_features(converter))
    if name in provider.output_features
  ]


def _optional_features(converter: Any) -> tuple[str, ...]:
  if isinstance(converter, seqio.DecoderFeatureConverter):
    return _OPTIONAL_OF_DECODER
  return ()


def check_split(provider: Any, split: str) -> None:
  """Raise if no task of `provider` has the split; slices of TensorFlow Datasets ('train[:10%]') are accepted.

  Raises:
    DataError: the message has the existing splits.
  """
  with quiet():
    splits: Sequence[str] = list(provider.splits)
  builtin_tasks.check_split(provider.name, split.partition('[')[0], splits)


def rates(provider: Any) -> dict[str, float]:
  """Return task name to rate of a Mixture; for a Task, {name: 1.0}.

  Raises:
    ConfigError: a rate is missing or negative, or all are 0.
  """
  if isinstance(provider, seqio.Task):
    return {provider.name: 1.0}
  try:
    with quiet():
      values = {task.name: float(provider.get_rate(task)) for task in provider.tasks}
    # A rate of 0 disables a task.
    if min(values.values()) >= 0 and sum(values.values()) > 0:
      return values
    got: object = values
  except (TypeError, ValueError) as error:
    got = error
  raise checks.invalid(
    f'Mixture {provider.name}',
    'rates',
    'numbers >= 0, one of them > 0',
    got,
    'Give each task a rate, or set default_rate.',
  )
