"""Check of the names that subclasses of models and trainers define."""

from typing import Any

from t5x_lite.errors import ConfigError

# Names that T5X's base classes call and ours do not, with what to define instead.
_OURS = {
  '_compute_logits': 'compute_logits',
  '_compute_metrics': 'loss_fn, or set metric_fns,',
  '_compute_logits_from_slice': 'predict_batch_with_aux',
  '_compute_kv_cache': 'predict_batch_with_aux',
  '_partitioned_train_step': 'partitioned_train_step',
  '_partitioned_eval_step': 'partitioned_eval_step',
  '_get_step_rng': 'partitioned_train_step',
}


class WithoutNamesOfT5x:
  """Base class whose subclasses raise ConfigError if they define a name that only T5X would call."""

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    for name in _OURS:
      if name in vars(cls):
        raise ConfigError(
          f'{cls.__name__}.{name} of T5X has no effect in t5x_lite. Define {_OURS[name]} instead.'
        )

  def __getattr__(self, name: str) -> Any:
    if name in _OURS:
      raise AttributeError(
        f'{type(self).__name__} has no {name} of T5X. Use {_OURS[name].partition(",")[0]} of '
        't5x_lite: docs/from_t5x.md has their arguments and results.'
      )
    return self.__getattribute__(name)  # raises Python's own error, also that of a property


class WithFeatureConverter(WithoutNamesOfT5x):
  """Base class of models: T5X's `FEATURE_CONVERTER_CLS`, in a subclass or of an instance, is `FEATURE_CONVERTER`."""

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    if 'FEATURE_CONVERTER_CLS' in vars(cls):
      cls.FEATURE_CONVERTER = cls.FEATURE_CONVERTER_CLS
      delattr(cls, 'FEATURE_CONVERTER_CLS')

  @property
  def FEATURE_CONVERTER_CLS(self) -> str | type:  # pylint: disable=invalid-name
    """Name of the feature converter, or a class of seqio."""
    return self.FEATURE_CONVERTER

  @FEATURE_CONVERTER_CLS.setter
  def FEATURE_CONVERTER_CLS(self, converter: str | type) -> None:  # pylint: disable=invalid-name
    self.FEATURE_CONVERTER = converter  # pylint: disable=invalid-name
