"""Resolves what a `DatasetConfig` names in seqio: Task or Mixture, split, lengths, rates, and feature converter."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

from t5x_lite.data import builtin_tasks
from t5x_lite.data import seqio_tasks as seqio_tasks  # registers the embedded tasks
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.seqio_import import quiet, seqio
from t5x_lite.errors import ConfigError, DataError, did_you_mean

# The names that models give, and seqio's classes for them.
_CONVERTERS = {
    'encoder_decoder': seqio.EncDecFeatureConverter,
    'decoder_only': seqio.DecoderFeatureConverter,
    'prefix_lm': seqio.PrefixLMFeatureConverter,
    'prefix_lm_with_loss_on_inputs': functools.partial(seqio.PrefixLMFeatureConverter, loss_on_targets_only=False),
}
# What seqio's DecoderFeatureConverter also reads where there is a length for it.
_OPTIONAL_OF_DECODER = ('inputs', 'suffixes')


def get_provider(cfg: DatasetConfig) -> Any:
  """Returns the seqio Task or Mixture that `cfg` names, after importing `cfg.module`.

  Raises:
    ConfigError: `mixture_or_task_name` is of another kind, or a mixture has no rates.
    DataError: the name is not registered.
  """
  with quiet():
    cfg.import_module()
  name = cfg.mixture_or_task_name
  if isinstance(name, seqio.Task | seqio.Mixture):
    return name
  if not isinstance(name, str):
    raise ConfigError(f"With DatasetConfig.source 'seqio', mixture_or_task_name is a {type(name).__name__}, expected a "
                      'name, a seqio.Task or a seqio.Mixture.')
  tasks, mixtures = set(seqio.TaskRegistry.names()), set(seqio.MixtureRegistry.names())
  if name not in tasks | mixtures:
    hint = ('A task of your own needs the module that registers it (DatasetConfig.module).' if cfg.module is None else
            f'The module {cfg.module!r} does not register it.')
    raise DataError(f'seqio knows no task or mixture {name!r}.{did_you_mean(name, tasks | mixtures)} {hint}')
  return (seqio.MixtureRegistry if name in mixtures else seqio.TaskRegistry).get(name)


def get_vocabulary(cfg: DatasetConfig) -> tuple[Any, Any]:
  """Returns the (input, output) vocabularies; one for both where the task has only one feature."""
  features = get_provider(cfg).output_features
  if 'inputs' in features and 'targets' in features:
    return features['inputs'].vocabulary, features['targets'].vocabulary
  if not features:
    raise ConfigError(f'{cfg.name!r} has no output features, expected at least one with a vocabulary.')
  vocabulary = next(iter(features.values())).vocabulary
  return vocabulary, vocabulary


def subtasks_with_split(provider: Any, split: str) -> list[Any]:
  """Returns the Tasks of a Mixture, or the Task itself, that have `split`."""
  with quiet():
    return [task for task in seqio.get_subtasks(provider) if split.partition('[')[0] in task.splits]


def get_converter(cfg: DatasetConfig, feature_converter: Any, provider: Any) -> Any:
  """Returns the seqio feature converter of the name, or class, `feature_converter`, set up as `cfg` says.

  Raises:
    ConfigError: unknown name; missing or unknown feature lengths; features that the task does not have.
  """
  if isinstance(feature_converter, str):
    if feature_converter not in _CONVERTERS:
      raise ConfigError(f'Unknown feature converter {feature_converter!r}.'
                        f'{did_you_mean(feature_converter, _CONVERTERS)}')
    feature_converter = _CONVERTERS[feature_converter]
  if cfg.use_custom_packing_ops and importlib.util.find_spec('tensor2tensor') is None:
    raise ConfigError('DatasetConfig.use_custom_packing_ops is True, but tensor2tensor, which has these operations, is '
                      'not installed: set it to False.')
  converter = feature_converter(pack=cfg.pack, use_custom_packing_ops=cfg.use_custom_packing_ops)
  optional = _OPTIONAL_OF_DECODER if isinstance(converter, seqio.DecoderFeatureConverter) else ()
  expected = [*converter.TASK_FEATURES, *(feature for feature in optional if feature in cfg.task_feature_lengths)]
  for feature in expected:
    if feature not in provider.output_features:
      raise ConfigError(f'{type(converter).__name__} reads the feature {feature!r}, but {provider.name!r} has only: '
                        f'{", ".join(sorted(provider.output_features))}.')
    if feature not in cfg.task_feature_lengths:
      raise ConfigError(f'task_feature_lengths has no length for {feature!r}, got lengths for: '
                        f"{', '.join(sorted(cfg.task_feature_lengths))}. Add '{feature}': <number of ids>.")
  for feature in cfg.task_feature_lengths:
    if feature not in expected:
      raise ConfigError(f'task_feature_lengths names the unknown feature {feature!r}.'
                        f'{did_you_mean(feature, (*expected, *optional))}')
  return converter


def check_split(provider: Any, split: str) -> None:
  """Refuses a split that no task of `provider` has; slices of TensorFlow Datasets ('train[:10%]') pass.

  Raises:
    DataError: naming the splits there are.
  """
  name = split.partition('[')[0]
  with quiet():
    splits: Sequence[str] = list(provider.splits)
  if name not in splits:
    raise DataError(f'{provider.name!r} has no split {split!r}.{did_you_mean(name, splits)}'
                    f'{builtin_tasks.split_remedy(splits)}')


def rates(provider: Any) -> dict[str, float]:
  """Returns task name to rate of a Mixture; of a Task, {name: 1.0}.

  Raises:
    ConfigError: a rate is missing or negative, or all are 0.
  """
  if isinstance(provider, seqio.Task):
    return {provider.name: 1.0}
  try:
    with quiet():
      values = {task.name: float(provider.get_rate(task)) for task in provider.tasks}
  except (TypeError, ValueError) as error:
    raise ConfigError(f'The mixture {provider.name!r} has a task without a usable rate ({error}): give each a number, '
                      'or a default_rate.') from error
  # A rate of 0 switches a task off.
  if min(values.values()) < 0 or not sum(values.values()) > 0:
    raise ConfigError(f'The mixture {provider.name!r} has the rates {values}: expected none below 0, and one above it.')
  return values
