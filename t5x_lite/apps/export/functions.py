"""Predictions and scores of a model as functions of token ids, ready for `jax.export`.

The functions convert ids to model features themselves, as `data.batches.features` does on the host, so that callers
need not know the features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import models
from t5x_lite import tree_utils
from t5x_lite.types import Array, Batch

MODES = ('predict', 'score')
# Prefix of parameter names; other collections use their names.
PARAMS = 'params'
_FEATURES = ('inputs', 'targets')
LENGTHS = checks.Expectation(
  "a mapping of 'inputs' and 'targets' to integers >= 1",
  lambda value: (
    isinstance(value, Mapping)
    and sorted(value) == sorted(_FEATURES)
    and all(type(length) is int and length >= 1 for length in value.values())
  ),
)


def encoder_decoder_batch(inputs: Array, targets: Array) -> dict[str, Array]:
  """Return the features of an encoder-decoder model.

  Args:
    inputs: <int32>[batch, inputs_length] ids, padded with 0.
    targets: <int32>[batch, targets_length] ids, padded with 0.
  """
  return {
    'encoder_input_tokens': inputs,
    'decoder_input_tokens': _shift_right(targets),
    'decoder_target_tokens': targets,
    'decoder_loss_weights': (targets > 0).astype(jnp.int32),
  }


def prefix_lm_batch(
  inputs: Array, targets: Array, *, loss_on_targets_only: bool = True
) -> dict[str, Array]:
  """Return the features of a decoder-only model, with inputs and targets in one sequence.

  Args:
    inputs: <int32>[batch, inputs_length] ids, padded with 0.
    targets: <int32>[batch, targets_length] ids, padded with 0.
    loss_on_targets_only: whether loss weights are 0 at input positions.

  Returns:
    Features <int32>[batch, inputs_length + targets_length].
  """
  position = jnp.arange(inputs.shape[1] + targets.shape[1])
  num_inputs = jnp.sum(inputs > 0, axis=1, dtype=jnp.int32)[:, None]
  # Targets must follow inputs without padding in between, so that both are gathered by index.
  target_index = position - num_inputs
  of_inputs = jnp.pad(inputs, ((0, 0), (0, targets.shape[1])))
  of_targets = jnp.where(
    target_index < targets.shape[1],
    jnp.take_along_axis(targets, jnp.clip(target_index, 0, targets.shape[1] - 1), axis=1),
    0,
  )
  joined = jnp.where(target_index < 0, of_inputs, of_targets)
  weights = (joined > 0) & ((target_index >= 0) | (not loss_on_targets_only))
  # The first position reads the start token, so that n input ids are read at n + 1 positions.
  return {
    'decoder_input_tokens': _shift_right(joined),
    'decoder_target_tokens': joined,
    'decoder_loss_weights': weights.astype(jnp.int32),
    'decoder_causal_attention': (target_index <= 0).astype(jnp.int32),
  }


def _shift_right(ids: Array) -> Array:
  return jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]


# By name of the model's feature converter.
_BATCH_FNS: dict[str, Callable[[Array, Array], Batch]] = {
  'encoder_decoder': encoder_decoder_batch,
  'decoder_only': prefix_lm_batch,
  'prefix_lm': prefix_lm_batch,
  'prefix_lm_with_loss_on_inputs': lambda inputs, targets: prefix_lm_batch(
    inputs, targets, loss_on_targets_only=False
  ),
}


def batch_fn(model: models.BaseModel) -> Callable[[Array, Array], Batch]:
  """Return the function of (inputs, targets), int32[batch, length] each, that returns a batch for `model`.

  Raises:
    ConfigError: the model's feature converter is not supported.
  """
  name = model.FEATURE_CONVERTER
  if not isinstance(name, str) or name not in _BATCH_FNS:
    raise checks.invalid(
      type(model).__name__,
      'feature_converter_cls',
      f'one of {", ".join(_BATCH_FNS)} for export',
      name,
    )
  return _BATCH_FNS[name]


def predict_fn(
  model: models.BaseModel, lengths: Mapping[str, int], *, seed_input: bool
) -> Callable[..., Any]:
  """Return the prediction function `fn(variables, inputs[, seed])` of a model.

  Its arguments are the variables by name (collection and module names joined by '/'), `inputs` <int32>[batch,
  inputs_length] padded with 0 and, with `seed_input`, the sampling seed <int32>[]. It returns `tokens`
  <int32>[batch, length] and the model's auxiliary outputs, e.g. `scores` <float32>[batch].

  Args:
    model: the model.
    lengths: number of tokens of 'inputs' and 'targets'.
    seed_input: whether the function has the argument `seed`.
  """
  make_batch = batch_fn(model)

  def predict(
    variables: Mapping[str, Array], inputs: Array, seed: Array | int = 0
  ) -> dict[str, Array]:
    params, mutables = _collections(variables)
    # Decoding reads only the length of the targets.
    batch = make_batch(inputs, jnp.zeros((inputs.shape[0], lengths['targets']), jnp.int32))
    tokens, aux = model.predict_batch_with_aux(params, batch, rng=jax.random.key(seed), **mutables)
    return {'tokens': tokens, **aux}

  if not seed_input:
    return lambda variables, inputs: predict(variables, inputs)
  return predict


def score_fn(model: models.BaseModel) -> Callable[..., Any]:
  """Return the scoring function `fn(variables, inputs, targets)` of a model.

  Its arguments are those of `predict_fn` and `targets` <int32>[batch, targets_length] padded with 0. It returns
  `scores` <float32>[batch], the log-likelihoods of the targets.
  """
  make_batch = batch_fn(model)

  def score(variables: Mapping[str, Array], inputs: Array, targets: Array) -> dict[str, Array]:
    params, mutables = _collections(variables)
    return {'scores': model.score_batch(params, make_batch(inputs, targets), **mutables)}

  return score


def flat_variables(params: Any, mutables: Any) -> dict[str, Array]:
  """Return variables by name, arrays of any shape, from a nested dict of parameters and one of other collections."""
  return tree_utils.flatten_dict(
    {PARAMS: tree_utils.to_dict(params), **tree_utils.to_dict(mutables)}
  )


def _collections(variables: Mapping[str, Array]) -> tuple[Any, dict[str, Any]]:
  tree = dict(tree_utils.unflatten_dict(variables))
  params = tree.pop(PARAMS)
  return params, {'flax_mutables': tree} if tree else {}
