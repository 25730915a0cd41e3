"""A model's predictions and scores as functions of ids alone, fit to be exported: the batch is made inside of them.

What `data.features` does to examples on the host is done here to arrays of ids, in the program itself, so that who
calls it needs to know nothing of the model's features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite import models
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array, Batch

MODES = ('predict', 'score')
# What is in front of a parameter's name, as in the collections of a Linen module.
PARAMS = 'params'
_FEATURES = ('inputs', 'targets')


def encoder_decoder_batch(inputs: Array, targets: Array) -> dict[str, Array]:
  """Returns the features of an encoder-decoder.

  Args:
    inputs: <int32>[batch, inputs_length] ids, filled up with 0.
    targets: <int32>[batch, targets_length] ids, filled up with 0.
  """
  return {'encoder_input_tokens': inputs, 'decoder_input_tokens': _shift_right(targets),
          'decoder_target_tokens': targets, 'decoder_loss_weights': (targets > 0).astype(jnp.int32)}


def prefix_lm_batch(inputs: Array, targets: Array, *, loss_on_targets_only: bool = True) -> dict[str, Array]:
  """Returns the features of a decoder that reads inputs and targets in one sequence.

  Args:
    inputs: <int32>[batch, inputs_length] ids, filled up with 0.
    targets: <int32>[batch, targets_length] ids, filled up with 0.
    loss_on_targets_only: no loss where inputs are to be predicted.

  Returns:
    Features <int32>[batch, inputs_length + targets_length].
  """
  position = jnp.arange(inputs.shape[1] + targets.shape[1])
  num_inputs = jnp.sum(inputs > 0, axis=1, dtype=jnp.int32)[:, None]
  # Padding would have gaps between inputs and targets: both are read by place instead.
  place = position - num_inputs
  of_inputs = jnp.pad(inputs, ((0, 0), (0, targets.shape[1])))
  of_targets = jnp.where(
      place < targets.shape[1],
      jnp.take_along_axis(targets, jnp.clip(place, 0, targets.shape[1] - 1), axis=1), 0)
  joined = jnp.where(place < 0, of_inputs, of_targets)
  weights = (joined > 0) & ((place >= 0) | (not loss_on_targets_only))
  # The first position reads the start, so inputs of n ids are read at n + 1 positions.
  return {'decoder_input_tokens': _shift_right(joined), 'decoder_target_tokens': joined,
          'decoder_loss_weights': weights.astype(jnp.int32),
          'decoder_causal_attention': (place <= 0).astype(jnp.int32)}


def _shift_right(ids: Array) -> Array:
  return jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]


# By the name of the feature converter that a model gives.
_BATCH_FNS: dict[str, Callable[[Array, Array], Batch]] = {
    'encoder_decoder': encoder_decoder_batch,
    'decoder_only': prefix_lm_batch,
    'prefix_lm': prefix_lm_batch,
    'prefix_lm_with_loss_on_inputs': lambda inputs, targets: prefix_lm_batch(
        inputs, targets, loss_on_targets_only=False),
}


def batch_fn(model: models.BaseModel) -> Callable[[Array, Array], Batch]:
  """Returns the function of (inputs, targets) that makes a batch of `model`.

  Raises:
    ConfigError: the model has a feature converter that is not known here.
  """
  name = model.FEATURE_CONVERTER
  if not isinstance(name, str) or name not in _BATCH_FNS:
    raise ConfigError(f'The feature converter of the model is {name!r}; export knows {", ".join(_BATCH_FNS)}, whose '
                      'features it makes from ids. Give the model one of them (feature_converter_cls).')
  return _BATCH_FNS[name]


def check_lengths(lengths: Mapping[str, int]) -> None:
  """Refuses feature lengths other than those of inputs and targets.

  Raises:
    ConfigError: see above.
  """
  if not isinstance(lengths, Mapping) or sorted(lengths) != sorted(_FEATURES):
    raise ConfigError(f"task_feature_lengths is {lengths!r}; expected a mapping such as {{'inputs': 512, 'targets': "
                      '114}, with both features: a model is exported as a function of its inputs.')
  for feature, length in lengths.items():
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
      raise ConfigError(f'task_feature_lengths[{feature!r}] is {length!r}; expected a whole number of at least 1.')


def predict_fn(model: models.BaseModel, lengths: Mapping[str, int], *, seed_input: bool) -> Callable[..., Any]:
  """Returns `fn(variables, inputs[, seed])` that decodes.

  Its arguments: variables by name, collections and modules joined by '/'; `inputs` <int32>[batch, inputs_length],
  filled up with 0; with `seed_input` an <int32>[] seed of the drawing. Its result: `tokens` <int32>[batch, length] and
  what else the model says of them, `scores` <float32>[batch] among it.
  """
  make_batch = batch_fn(model)

  def predict(variables: Mapping[str, Array], inputs: Array, seed: Array | int = 0) -> dict[str, Array]:
    params, mutables = _collections(variables)
    # Of the targets, only their number of positions counts.
    batch = make_batch(inputs, jnp.zeros((inputs.shape[0], lengths['targets']), jnp.int32))
    tokens, aux = model.predict_batch_with_aux(params, batch, rng=jax.random.key(seed), **mutables)
    return {'tokens': tokens, **aux}

  if not seed_input:
    return lambda variables, inputs: predict(variables, inputs)
  return predict


def score_fn(model: models.BaseModel) -> Callable[..., Any]:
  """Returns `fn(variables, inputs, targets)` that scores.

  Its arguments are those of `predict_fn` and `targets` <int32>[batch, targets_length], filled up with 0; its result is
  `scores` <float32>[batch], the log-likelihood of the targets.
  """
  make_batch = batch_fn(model)

  def score(variables: Mapping[str, Array], inputs: Array, targets: Array) -> dict[str, Array]:
    params, mutables = _collections(variables)
    return {'scores': model.score_batch(params, make_batch(inputs, targets), **mutables)}

  return score


def flat_variables(params: Any, mutables: Any) -> dict[str, Array]:
  """Returns variables by name, as the functions take them: a nested dict of parameters and one of other collections."""
  return tree_utils.flatten_dict({PARAMS: tree_utils.to_dict(params), **tree_utils.to_dict(mutables)})


def _collections(variables: Mapping[str, Array]) -> tuple[Any, dict[str, Any]]:
  tree = dict(tree_utils.unflatten_dict(variables))
  params = tree.pop(PARAMS)
  return params, {'flax_mutables': tree} if tree else {}
