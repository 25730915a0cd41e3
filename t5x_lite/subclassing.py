"""T5X's names of the methods of models and trainers, in subclasses that define or call them.

Some methods of T5X have another name and another form here, such as `_compute_logits`, which is `compute_logits`. Each
class has both names, and a class that defines one of them gets the other from it, so that a call of either reaches the
definition of the nearest class, and `super()` of either the one before it.
"""

from collections.abc import Callable, Mapping
import functools
import inspect
import logging
from typing import Any, NamedTuple

from t5x_lite import checks

# Methods of T5X that its classes call and that subclasses may override.
_HOOKS = (
  '_compute_logits',
  '_compute_logits_from_slice',
  '_compute_kv_cache',
  '_compute_metrics',
  '_partitioned_train_step',
  '_partitioned_eval_step',
  '_get_step_rng',
)
_SLICE = '_compute_logits_from_slice'
_IS_OF_T5X = '_is_of_t5x'
# Arguments of `train` of our trainers that T5X's do not have.
_CALLBACKS = ('on_step', 'should_stop')


class _IdsAndCache(NamedTuple):
  """The part of a decoding state that a step of the network reads; see `decoding.DecodingState`."""

  cur_token: Any
  cache: Any


def _compute_logits_of(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
  """Return `_compute_logits` of T5X that calls `compute_logits`."""

  def _compute_logits(
    self, params, batch, dropout_rng=None, mutable=False, other_variables=None
  ) -> Any:
    """Return logits or, if `mutable` is not False, (logits, these collections of variables)."""
    names = mutable
    if isinstance(mutable, str):
      names = (mutable,)
    logits, collections = compute_logits(
      self, params, batch, dropout_rng, flax_mutables=other_variables, mutable=names or ()
    )
    if mutable is False:
      return logits
    return logits, collections

  return _compute_logits


def _logits_and_collections_of(hook: Callable[..., Any]) -> Callable[..., Any]:
  """Return `compute_logits` that calls `_compute_logits` of T5X, with the arguments that have a value."""

  def compute_logits(
    self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=()
  ) -> tuple[Any, Mapping[str, Any]]:
    """See `models.BaseTransformerModel.compute_logits`."""
    options = {}
    if mutable:
      options['mutable'] = mutable
    if flax_mutables:
      options['other_variables'] = flax_mutables
    result = checks.call_custom(
      type(self).__name__,
      '_compute_logits',
      ', '.join(('params', 'batch', 'dropout_rng', *options)),
      functools.partial(hook, self),
      params,
      batch,
      dropout_rng,
      **options,
    )
    if mutable:
      return result
    return result, {}

  return compute_logits


def _method_of(step: Any) -> Callable[..., Any]:
  """Return the method that returns the value of a property, a compiled step."""

  def make_step(self) -> Any:
    """Return the step of a class that is written for T5X."""
    return step.__get__(self, type(self))

  setattr(make_step, _IS_OF_T5X, True)
  return make_step


# Name of a method, name of the method that it is made from if a nearer class defines that one, function that makes it.
_FORMS = (
  ('compute_logits', '_compute_logits', _logits_and_collections_of),
  ('_compute_logits', 'compute_logits', _compute_logits_of),
  ('partitioned_train_step', '_partitioned_train_step', _method_of),
  ('_partitioned_train_step', 'partitioned_train_step', functools.cached_property),
  ('partitioned_eval_step', '_partitioned_eval_step', _method_of),
  ('_partitioned_eval_step', 'partitioned_eval_step', functools.cached_property),
)


def takes_ids_and_cache(hook: Callable[..., Any]) -> Callable[..., Any]:
  """Return `_compute_logits_from_slice` that also takes token ids and a cache instead of a decoding state.

  They are the arguments of earlier versions of T5X, which subclasses for these versions pass to `super()`.
  """

  @functools.wraps(hook)
  def _compute_logits_from_slice(self, decoding_state, *args, **kwargs):
    if not hasattr(decoding_state, 'cur_token'):
      flat_cache, *args = args
      decoding_state = _IdsAndCache(decoding_state, flat_cache)
    return hook(self, decoding_state, *args, **kwargs)

  return _compute_logits_from_slice


def _takes_state(hook: Callable[..., Any]) -> Callable[..., Any]:
  """Return `_compute_logits_from_slice` for a decoding state that calls one for token ids and a cache."""

  def _compute_logits_from_slice(self, decoding_state, *args, **kwargs):
    if hasattr(decoding_state, 'cur_token'):
      args = (decoding_state.cache, *args)
      decoding_state = decoding_state.cur_token
    return hook(self, decoding_state, *args, **kwargs)

  return _compute_logits_from_slice


def _takes_callbacks(train: Callable[..., Any]) -> bool:
  """Return whether `train` of a trainer has the arguments of ours."""
  parameters = inspect.signature(train).parameters
  has_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
  return has_any or all(name in parameters for name in _CALLBACKS)


def _with_callbacks(train: Callable[..., Any]) -> Callable[..., Any]:
  """Return `train` of a trainer that calls one with the arguments of T5X; `super().train` gets the others."""

  def with_callbacks(
    self, batch_iter, num_steps, start_step=None, *, on_step=None, should_stop=None
  ) -> Any:
    """See `trainer.BaseTrainer.train`."""
    before = self.train_callbacks
    if on_step is not None or should_stop is not None:
      self.train_callbacks = on_step, should_stop
    try:
      return train(self, batch_iter, num_steps, start_step=start_step)
    finally:
      self.train_callbacks = before

  return with_callbacks


class WithMethodsOfT5x:
  """Base class whose subclasses may define and call methods under T5X's names; see the docstring of the module."""

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    overridden = [name for name in _HOOKS if _overrides(cls, name)]
    for name, source, form in _FORMS:
      if _nearness(cls, source) < _nearness(cls, name):
        made = form(inspect.getattr_static(cls, source))
        if isinstance(made, functools.cached_property):
          made.__set_name__(cls, name)
        setattr(cls, name, made)
    hook = inspect.getattr_static(cls, _SLICE, None)
    if hook is not None and 'flat_cache' in inspect.signature(hook).parameters:
      setattr(cls, _SLICE, _takes_state(hook))
    train = inspect.getattr_static(cls, 'train', None)
    if hasattr(cls, 'train_callbacks') and not _takes_callbacks(train):
      cls.train = _with_callbacks(train)
    if overridden:
      logging.getLogger(__name__).info(
        '%s overrides methods of T5X, which take effect: %s.', cls.__name__, ', '.join(overridden)
      )


def _nearness(cls: type, name: str) -> int:
  """Return the number of classes before the one that defines a name, in the order of inheritance."""
  classes = cls.__mro__
  for index, each in enumerate(classes):
    if name in vars(each):
      return index
  return len(classes)


def _overrides(cls: type, name: str) -> bool:
  """Return whether a class, or a mixin among its bases, overrides a method of T5X."""
  mixins = [base for base in cls.__bases__ if not issubclass(base, WithMethodsOfT5x)]
  if not any(name in vars(each) for each in (cls, *mixins)):
    return False
  ours = [base for base in cls.__mro__[1:] if issubclass(base, WithMethodsOfT5x)]
  return any(name in vars(base) for base in ours)


def overrides(instance: Any, method: Callable[..., Any]) -> bool:
  """Return whether the class of an object overrides a method of a base class."""
  return getattr(type(instance), method.__name__) is not method


def has_train_step_of_t5x(cls: type) -> bool:
  """Return whether a class of trainers, or one of its bases, defines `_partitioned_train_step` of T5X."""
  methods = [vars(each).get('partitioned_train_step') for each in cls.__mro__]
  return any(getattr(method, _IS_OF_T5X, False) for method in methods)


class WithFeatureConverter(WithMethodsOfT5x):
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
