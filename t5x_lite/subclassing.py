"""Check of the names that subclasses of models and trainers define."""

from t5x_lite.errors import ConfigError

# Names that T5X's base classes call and ours do not, with what to define instead.
_OURS = {
    'FEATURE_CONVERTER_CLS': 'FEATURE_CONVERTER, which also accepts a class of seqio,',
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
        raise ConfigError(f'{cls.__name__}.{name} of T5X has no effect in t5x_lite. Define {_OURS[name]} instead.')
