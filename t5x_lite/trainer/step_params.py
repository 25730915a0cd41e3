"""Parameters and inputs that the loss of a training step gets: in another dtype, with noise, or without gradients.

The trained parameters, the master copy, keep their dtype. The loss gets a copy, and the gradients, in the dtype of the
master copy, are those of the master copy.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any, Protocol
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.types import Array, Batch, Params, PyTree

# Name of the inputs among the paths that patterns of dtypes are searched in: 'batch/<feature>'.
_BATCH = 'batch'
# Keys of steps are folded with numbers below 2**31, so these are never among them.
_NOISE_FOLD = 2**31 + 1
# JAX computes float64 as float32 by default, and 8 bits need scales.
_TRAIN_DTYPES = tuple(map(jnp.dtype, ('float32', 'bfloat16', 'float16')))


class ParamNoise(Protocol):
  """Noise that is added to the parameters in each training step."""

  def __call__(self, key: Array, params: Params) -> Params:
    """Return the parameters with noise, a tree like `params` with the same shapes and dtypes.

    Args:
      key: PRNG key of the step, the same in all its micro-batches and on all processes.
      params: nested dict with a subtree per layer, in the dtype of the computation.
    """
    ...


def are_rules(rules: Any, is_value: Callable[[Any], bool]) -> bool:
  """Return whether an option has pairs of a regular expression and a value for which `is_value` is true."""
  try:
    return all(re.compile(pattern) and is_value(value) for pattern, value in rules)
  except (TypeError, ValueError, re.error):
    return False


def first_match(rules: Sequence[tuple[str, Any]], path: str, default: Any = None) -> Any:
  """Return the value of the first pair whose regular expression is found in `path`, or `default`.

  >>> first_match([('norm', 'float32'), ('.*', 'bfloat16')], 'encoder/norm/scale')
  'float32'
  """
  for pattern, value in rules:
    if re.search(pattern, path):
      return value
  return default


@dataclasses.dataclass(frozen=True)
class GaussianParamNoise:
  """Normally distributed noise with a standard deviation by parameter; see `ParamNoise`.

  The noise of a parameter depends on the key and its path, not on the other parameters or on the mesh.

  Attributes:
    stddevs: pairs (regular expression, standard deviation). The first expression that is found in the '/'-joined path
      of a parameter applies; a parameter without one gets no noise.

  Raises:
    ConfigError: not such pairs.
  """

  stddevs: Sequence[tuple[str, float]]

  def __post_init__(self):
    checks.check(
      'GaussianParamNoise',
      vars(self),
      stddevs=checks.Expectation(
        'pairs of a regular expression and a standard deviation >= 0',
        lambda rules: len(rules) > 0 and are_rules(rules, checks.number(at_least=0).holds),
        "For noise on all parameters: [('.*', 0.01)].",
      ),
    )

  def __call__(self, key: Array, params: Params) -> Params:
    """See `ParamNoise`."""

    def add(path, param):
      stddev = first_match(self.stddevs, path)
      if not stddev or not jnp.issubdtype(param.dtype, jnp.inexact):
        return param
      param_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
      noise = jax.random.normal(param_key, param.shape, param.dtype)
      return param + jnp.asarray(stddev, param.dtype) * noise

    return tree_utils.map_with_names(add, params)


def check_matches(owner: str, option: str, rules: Any, paths: Sequence[str]) -> None:
  """Raise ConfigError if a rule of an option matches none of `paths`; a value that is not a list of rules passes."""
  if not isinstance(rules, (list, tuple)):
    return
  numbered = [(pattern, index) for index, (pattern, _) in enumerate(rules)]
  used = {first_match(numbered, path) for path in paths}
  for index, (pattern, _) in enumerate(rules):
    if index not in used:
      raise checks.invalid(
        owner,
        option,
        'rules that each are the first match of a name',
        pattern,
        (f'Names are {paths[0]!r} and others: correct the expression, move it up, or remove it.'),
      )


def check_train_dtype(train_dtype: Any) -> None:
  """Raise ConfigError unless `Trainer.train_dtype` is None, a dtype, or pairs of expression and dtype or None."""

  def is_dtype(dtype):
    try:
      return jnp.dtype(dtype) in _TRAIN_DTYPES
    except TypeError:
      return False

  def is_dtype_or_none(dtype):
    return dtype is None or is_dtype(dtype)

  def is_option(given):
    if isinstance(given, (list, tuple)) and given and are_rules(given, is_dtype_or_none):
      return True
    return is_dtype_or_none(given)

  expected = checks.Expectation(
    "None, 'float32', 'bfloat16' or 'float16', or pairs of a regular expression and one of these",
    is_option,
    "For example 'bfloat16'.",
  )
  checks.check('Trainer', {'train_dtype': train_dtype}, train_dtype=expected)
  is_whole = train_dtype is not None and not isinstance(train_dtype, (list, tuple))
  if is_whole and jnp.dtype(train_dtype) == jnp.float16:
    checks.warn_of_float16('Trainer.train_dtype')


def _shape_and_dtype(x: Any) -> tuple[Any, Any]:
  return getattr(x, 'shape', None), getattr(x, 'dtype', None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParams:
  """Options that change the parameters and the batch that the loss of a step gets. The default changes nothing.

  Attributes:
    train_dtype: see `Trainer`.
    noise: see `Trainer.param_noise`.
    frozen: '/'-joined paths of parameters that get no gradients.
    stacks: layers that the step takes stacked.
    key: PRNG key of the noise in this step.
  """

  train_dtype: Any = None
  noise: ParamNoise | None = None
  frozen: frozenset[str] = frozenset()
  stacks: layer_stacks.LayerStacks = layer_stacks.LayerStacks()
  key: Array | None = None

  def __post_init__(self):
    check_train_dtype(self.train_dtype)
    checks.check(
      'Trainer',
      {'param_noise': self.noise},
      param_noise=checks.Expectation(
        'a function of (key, params)',
        lambda noise: callable(noise) and not isinstance(noise, type),
        'In gin, write @step_params.GaussianParamNoise() with parentheses.',
      ).or_none(),
    )

  def check(self, params: Params, batch: Batch) -> None:
    """Raise ConfigError if a rule of an option applies to nothing; the leaves may be shapes."""
    paths = [path for path, _ in tree_utils.named_leaves(params)]
    if isinstance(self.noise, GaussianParamNoise):
      check_matches('GaussianParamNoise', 'stddevs', self.noise.stddevs, paths)
    check_matches(
      'Trainer', 'train_dtype', self.train_dtype, [*paths, *(f'{_BATCH}/{name}' for name in batch)]
    )

  def at_step(self, run_key: Array, step: Array) -> 'StepParams':
    """Return the value with the key of a step.

    Args:
      run_key: base key of the run.
      step: int32 scalar, number of updates made.
    """
    if self.noise is None:
      return self
    return dataclasses.replace(
      self, key=jax.random.fold_in(jax.random.fold_in(run_key, _NOISE_FOLD), step)
    )

  def dtype_of(self, path: str) -> np.dtype | None:
    """Return the dtype for a float array at a path, which may be that of stacked layers; None for its own dtype."""
    rules = self.train_dtype or ()
    if isinstance(rules, (str, np.dtype, type)):
      rules = [('', rules)]
    dtype = first_match(rules, layer_stacks.paths_of(path)[0])
    if dtype is None:
      return None
    return jnp.dtype(dtype)

  def cast(self, tree: PyTree, prefix: str = '') -> PyTree:
    """Return the tree with its float arrays in the dtypes of their paths, which begin with `prefix`."""
    if self.train_dtype is None:
      return tree

    def convert(path, x):
      if jnp.issubdtype(x.dtype, jnp.floating):
        dtype = self.dtype_of(prefix + path)
      else:
        dtype = None
      if dtype is None:
        return x
      return x.astype(dtype)

    return tree_utils.map_with_names(convert, tree)

  def cast_batch(self, batch: Batch) -> Batch:
    """Return the batch with its float arrays in the dtypes of their names, 'batch/<feature>'."""
    if self.train_dtype is not None:
      return self.cast(dict(batch), f'{_BATCH}/')
    return batch

  def for_loss(self, params: Params) -> Params:
    """Return the parameters that the loss gets for the trained `params`."""
    params = self.cast(params)
    if self.noise is None:
      return params
    params = self.stacks.unstack(params)
    noisy = checks.call_custom(
      'Trainer', 'param_noise', 'key, params', self.noise, self.key, params
    )
    if jax.tree.map(_shape_and_dtype, noisy) != jax.tree.map(_shape_and_dtype, params):
      raise checks.invalid(
        'Trainer',
        'param_noise',
        'a function that keeps names, shapes and dtypes of the parameters',
        self.noise,
        'Return a tree like its argument `params`.',
      )
    return self.stacks.stack(noisy)

  def split(
    self, params: Params
  ) -> tuple[PyTree, Callable[[PyTree, Callable[[Array], Array]], Params]]:
    """Divide the parameters into those with gradients and the others.

    Returns:
      (the parameters with gradients; a function from these, or a tree like them, and a function for each other
      parameter to a tree like `params`).
    """
    if not self.frozen:
      return params, lambda trained, fill: trained
    leaves = dict(tree_utils.named_leaves(params))
    trained = {path: leaf for path, leaf in leaves.items() if path not in self.frozen}

    def merge(trained: Mapping[str, Any], fill: Callable[[Array], Array]) -> Params:
      return tree_utils.map_with_names(
        lambda path, leaf: trained[path] if path in trained else fill(leaf), params
      )

    return trained, merge
