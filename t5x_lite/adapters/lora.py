"""Configuration of low-rank adapters, and the parameters of a model with them."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import Any
import zlib

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.adapters import kernels as kernels_lib
from t5x_lite.adapters import merging
from t5x_lite.adapters.kernels import Kernel
from t5x_lite.layers import low_rank
from t5x_lite.layers.low_rank import LORA_A
from t5x_lite.layers.low_rank import LORA_B
from t5x_lite.trainer.step_params import are_rules
from t5x_lite.trainer.step_params import check_matches
from t5x_lite.trainer.step_params import first_match
from t5x_lite.types import Array, Params

# Expression that finds the paths of adapters' parameters.
ADAPTER_PATHS = rf'(^|/)({LORA_A}|{LORA_B})$'
_AXES = '_axes'


def _are_patterns(values: Any) -> bool:
  if not isinstance(values, (list, tuple)):
    return False
  return are_rules([(pattern, None) for pattern in values], lambda value: value is None)


def _pairs(number: checks.Expectation) -> checks.Expectation:
  return checks.Expectation(
    f'pairs of a regular expression and {number.text}',
    lambda pairs: are_rules(pairs, number.holds),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank adapters: y = x W + s · dropout(x) A B for chosen kernels W, of which only A and B are trained.

  Hu et al. 2021, https://arxiv.org/abs/2106.09685. The factor s is alpha / rank. A model with an adapter trains the
  adapter alone, with any optimizer. Experts have an A and a B each.

  Attributes:
    rank: size of the inner dim, at most the smaller side of each kernel.
    alpha: numerator of the factor s.
    targets: the kernels: names of sets ('query_value', 'attention', or 'all' for the kernels of attention, feed-forward
      blocks and experts), or regular expressions of paths such as 'decoder/layers_0/mlp/wi_0/kernel'.
    dropout_rate: dropout of the adapter's inputs in training; not supported for experts.
    rank_stabilized: True for s = alpha / sqrt(rank), https://arxiv.org/abs/2312.03732.
    init: distribution of a new A, 'default' (uniform, within 1 / sqrt(input size)) or 'gaussian' (standard deviation
      1 / rank). A new B is zero, so a new adapter does not change the model.
    rank_pattern: pairs (regular expression, rank); the first expression that is found in the path of a kernel applies.
    alpha_pattern: pairs (regular expression, alpha), in the same way.
    also_train: regular expressions of paths of other parameters that are trained too.
    base_dtype: 'bfloat16' to keep the parameters that are not trained in bfloat16; None keeps their dtype.

  Raises:
    ConfigError: an option is invalid.
  """

  rank: int = 8
  alpha: float = 16.0
  targets: str | Sequence[str] = 'query_value'
  dropout_rate: float = 0.0
  rank_stabilized: bool = False
  init: str = 'default'
  rank_pattern: Sequence[tuple[str, int]] = ()
  alpha_pattern: Sequence[tuple[str, float]] = ()
  also_train: Sequence[str] = ()
  base_dtype: str | None = None

  def __post_init__(self):
    if isinstance(self.targets, str):
      object.__setattr__(self, 'targets', (self.targets,))
    rank = checks.number(at_least=1, integer=True)
    alpha = checks.number(above=0)
    checks.check(
      'Lora',
      vars(self),
      rank=rank,
      alpha=alpha,
      targets=checks.Expectation(
        f'names of sets ({", ".join(kernels_lib.TARGET_SETS)}) or regular expressions',
        lambda targets: len(targets) > 0 and _are_patterns(targets),
      ),
      dropout_rate=checks.number(at_least=0, below=1),
      rank_stabilized=checks.instance(bool, 'True or False'),
      init=checks.one_of(('default', 'gaussian')),
      rank_pattern=_pairs(rank),
      alpha_pattern=_pairs(alpha),
      also_train=checks.Expectation(
        'regular expressions', _are_patterns, "For example ('norm/scale$',)."
      ),
      base_dtype=checks.one_of(('bfloat16', 'float32')).or_none(),
    )
    # Values of gin are lists; tuples make equal configurations equal and hashable.
    for name in ('targets', 'also_train'):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for name in ('rank_pattern', 'alpha_pattern'):
      object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))

  @property
  def trained_patterns(self) -> tuple[str, ...]:
    """Regular expressions of the paths of all trained parameters."""
    return (ADAPTER_PATHS, *self.also_train)

  def is_trained(self, path: str) -> bool:
    """Return whether the parameter at a '/'-joined path is trained."""
    return any(re.search(pattern, path) for pattern in self.trained_patterns)

  def rank_of(self, path: str) -> int:
    """Return the rank of the adapter of the kernel at a '/'-joined path."""
    return first_match(self.rank_pattern, path, self.rank)

  def alpha_of(self, path: str) -> float:
    """Return the numerator of the factor s for the kernel at a '/'-joined path."""
    return first_match(self.alpha_pattern, path, self.alpha)

  def scale_of(self, path: str) -> float:
    """Return the factor s of the adapter of the kernel at a '/'-joined path."""
    return merging.scale_of(self.rank_of(path), self.alpha_of(path), self.rank_stabilized)

  def metadata(self, params: Params, params_axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of the adapter of a model for checkpoints, JSON-serializable.

    It has what merging and other formats need without the configuration: 'kernels' has rank, alpha and dims (see
    `merging`) by the path of each kernel, 'also_train' the paths of the other trained parameters.

    Args:
      params: nested dicts of arrays or shapes, without stacked layers.
      params_axes: axes metadata of the parameters.
    """
    kernels = {}
    for kernel in kernels_lib.with_adapter(params, params_axes):
      rank = self.rank_of(kernel.path)
      alpha = self.alpha_of(kernel.path)
      kernels[kernel.path] = {'rank': rank, 'alpha': alpha, 'dims': kernel.dims}
    others = [path for path, _ in tree_utils.named_leaves(params) if not merging.is_leaf(path)]
    return {
      'rank_stabilized': self.rank_stabilized,
      'dropout_rate': self.dropout_rate,
      'base_dtype': self.base_dtype,
      'also_train': [path for path in others if self.is_trained(path)],
      'kernels': kernels,
    }

  # ---- Parameters ----------------------------------------------------------------------------------------------------

  def add_to(
    self, variables: Mapping[str, Any], rng: Array, sites: frozenset[str]
  ) -> dict[str, Any]:
    """Return the variables of a model with new adapters, and the other parameters in `base_dtype`.

    Args:
      variables: result of `module.init`, nested dicts, with 'params' and 'params_axes'.
      rng: key of the parameters.
      sites: paths of the kernels that support an adapter, see `kernels.sites_of`.

    Raises:
      ConfigError: a pattern matches nothing, a target cannot have an adapter, or a rank is larger than a kernel.
    """
    params = tree_utils.flatten_dict(variables['params'])
    metadata = tree_utils.flatten_dict(variables.get('params_axes', {}))
    kernels = self._select(params, metadata, sites)
    base_dtype = self.base_dtype
    if base_dtype is not None:
      for path, leaf in params.items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not self.is_trained(path):
          params[path] = leaf.astype(base_dtype)
    for kernel in kernels:
      rank = self.rank_of(kernel.path)
      key = jax.random.fold_in(rng, zlib.crc32(kernel.path.encode()))
      path_a, path_b = merging.leaves_of(kernel.path)
      params[path_a] = self._new_a(key, kernel, rank)
      params[path_b] = jnp.zeros(merging.of_b(kernel.dims, kernel.shape, rank), jnp.float32)
      for path, dims_fn in ((path_a, merging.of_a), (path_b, merging.of_b)):
        axes = dims_fn(kernel.dims, kernel.axes, kernels_lib.RANK_AXIS)
        metadata[path + _AXES] = nn_partitioning.AxisMetadata(names=axes)
    return {
      **variables,
      'params': tree_utils.unflatten_dict(params),
      'params_axes': tree_utils.unflatten_dict(metadata),
    }

  def _select(
    self, params: Mapping[str, Any], metadata: Mapping[str, Any], sites: frozenset[str]
  ) -> list[Kernel]:
    """Return the kernels with an adapter after all checks, given parameters and their axes metadata by path."""
    shapes = {path: leaf.shape for path, leaf in params.items()}
    axes = {}
    for path in sites:
      axes[path] = (None,) * len(shapes[path])
      if path + _AXES in metadata:
        axes[path] = tuple(metadata[path + _AXES].names)
    kernels = kernels_lib.select(self.targets, shapes, axes, sites)
    paths = [kernel.path for kernel in kernels]
    check_matches('Lora', 'rank_pattern', self.rank_pattern, paths)
    check_matches('Lora', 'alpha_pattern', self.alpha_pattern, paths)
    also_trained = [(pattern, True) for pattern in self.also_train]
    check_matches('Lora', 'also_train', also_trained, list(params))
    for kernel in kernels:
      sides = (kernel.size('i'), kernel.size('o'))
      rank = self.rank_of(kernel.path)
      if rank > min(sides):
        raise checks.invalid(
          'Lora',
          'rank',
          f'at most {min(sides)} for {kernel.path}, a kernel from {sides[0]} to {sides[1]} units',
          rank,
          'Reduce it, or give this kernel another rank by `Lora.rank_pattern`.',
        )
    return kernels

  def _new_a(self, key: Array, kernel: Kernel, rank: int) -> Array:
    shape = merging.of_a(kernel.dims, kernel.shape, rank)
    if self.init == 'gaussian':
      return jax.random.normal(key, shape, jnp.float32) / rank
    bound = 1 / math.sqrt(kernel.size('i'))
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

  def prepare(self, params: Params, *, has_dropout: bool) -> Params:
    """Return the parameters for a pass of the network, with the scales of the adapters and their dropout.

    Args:
      params: nested dicts of parameters; equal layers may be stacked, see `layer_stacks`.
      has_dropout: True in training.
    """
    flat = tree_utils.flatten_dict(tree_utils.to_dict(params))
    for path, leaf in list(flat.items()):
      parent, _, name = path.rpartition('/')
      if name != LORA_A:
        continue
      shape = (*leaf.shape[:-1], 1)
      scales = [
        self.scale_of(single) for single in layer_stacks.paths_of(f'{parent}/{kernels_lib.KERNEL}')
      ]
      # [layers or 1, 1, ...]
      scale = jnp.asarray(scales, jnp.float32).reshape(-1, *(1 for _ in shape[1:]))
      flat[f'{parent}/{low_rank.LORA_SCALE}'] = jnp.broadcast_to(scale, shape)
      if has_dropout and self.dropout_rate > 0:
        flat[f'{parent}/{low_rank.LORA_DROPOUT}'] = jnp.full(shape, self.dropout_rate, jnp.float32)
    return tree_utils.unflatten_dict(flat)
