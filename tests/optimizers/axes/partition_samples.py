"""Transformations whose states, together, are of all the classes that optax has; for the tests of partition rules.

The functions that list the package are here too, so that the tests cover new classes and optimizers of a later optax.
"""

import ast
from collections.abc import Callable, Iterator
import dataclasses
import importlib
import inspect
import pathlib
import sys
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
from optax import contrib
from optax.experimental import aggregating

AXES = {
  'encoder': {
    'mlp': {'kernel': P('embed', 'mlp')},
    'attention': {'kernel': P('embed', 'heads', 'kv')},
    'stack': {'kernel': P('embed', 'layers', 'mlp'), 'scale': P('embed', 'layers')},
    'norm': {'scale': P('embed')},
    'temperature': P(),
    'void': P('length', 'embed'),
  },
  'experts': {'wi': P('expert', 'embed', 'expert_mlp')},
  'token_embedder': {'embedding': P('vocab', 'embed')},
}
SIZES = {
  'embed': 16,
  'mlp': 24,
  'heads': 8,
  'kv': 4,
  'layers': 3,
  'vocab': 32,
  'expert': 4,
  'expert_mlp': 24,
  'length': 0,
}
SHAPES = jax.tree.map(
  lambda axes: jax.ShapeDtypeStruct([SIZES[name] for name in axes], jnp.float32),
  AXES,
  is_leaf=lambda node: isinstance(node, P),
)

_MASK = {'encoder': True, 'experts': False, 'token_embedder': True}
_LABELS = {'encoder': 'a', 'experts': 'b', 'token_embedder': 'a'}
_DECAY = optax.linear_schedule(0.1, 0.0, 10)


def _is_late(step):
  return step > 1


def measure_tree(updates):
  return jax.tree.map(jnp.abs, updates)


# Alias of optax to its arguments. A learning rate is all that most of them need.
_ALIAS_OPTIONS: dict[str, dict[str, Any]] = {
  'adafactor': {'learning_rate': 0.1, 'min_dim_size_to_factor': 4, 'momentum': 0.9},
  'fromage': {'learning_rate': 0.1, 'min_norm': 1e-3},
  'lars': {'learning_rate': 0.1, 'weight_decay': 0.1},
  'lbfgs': {'memory_size': 3},
  'noisy_sgd': {'learning_rate': 0.1, 'key': 0},
  'optimistic_gradient_descent': {'learning_rate': 0.1},
  'optimistic_adam': {'learning_rate': 0.1, 'optimism': 0.1},
  'polyak_sgd': {},
  'sgd': {'learning_rate': 0.1, 'momentum': 0.9},
}
_CONTRIB_OPTIONS: dict[str, dict[str, Any]] = {
  'adopt': {'learning_rate': 0.1},
  'differentially_private_aggregate': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'key': 0},
  'dpsgd': {'learning_rate': 0.1, 'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'seed': 0},
  'galore': {'learning_rate': 0.1, 'rank': 2},
  'mechanize': {'base_optimizer': optax.adam(0.1)},
  'sam': {
    'optimizer': optax.sgd(0.1, momentum=0.9),
    'adv_optimizer': optax.chain(contrib.normalize(), optax.adam(0.1)),
  },
  'scale_by_galore': {'rank': 2},
  'schedule_free': {'base_optimizer': optax.adam(0.1), 'learning_rate': 0.1},
  'split_real_and_imaginary': {'inner': optax.adam(0.1)},
}


def _takes_rate(factory: Callable[..., Any]) -> bool:
  return 'learning_rate' in inspect.signature(factory).parameters


def _build(
  factory: Callable[..., Any], options: dict[str, dict[str, Any]]
) -> optax.GradientTransformation:
  with warnings.catch_warnings():
    # Deprecated aliases have states too.
    warnings.simplefilter('ignore', DeprecationWarning)
    return factory(
      **options.get(factory.__name__, {'learning_rate': 0.1} if _takes_rate(factory) else {})
    )


def _factories(module: Any, home: str) -> Iterator[Callable[..., Any]]:
  """Yield the public functions of `module` that are written in `home`: all but a few make transformations."""
  for name, value in vars(module).items():
    if (
      inspect.isfunction(value)
      and value.__module__.startswith(home)
      and name not in _NO_TRANSFORMATIONS
    ) and not name.startswith('_'):
      yield value


_NO_TRANSFORMATIONS = ('schedule_free_eval_params',)
ALIASES = {
  factory.__name__: _build(factory, _ALIAS_OPTIONS)
  for factory in _factories(optax, 'optax._src.alias')
}
CONTRIB = {
  f'contrib.{factory.__name__}': _build(factory, _CONTRIB_OPTIONS)
  for factory in _factories(contrib, 'optax.contrib')
}

# Wrappers, options that change the state, and transformations without an alias.
OTHERS: dict[str, optax.GradientTransformation] = {
  'identity': optax.identity(),
  'ema': optax.ema(0.9),
  'zero_nans': optax.zero_nans(),
  'apply_every': optax.apply_every(3),
  'scale_by_rms_without_bias_correction': optax.scale_by_rms(),
  'scale_by_rms_with_bias_correction': optax.scale_by_rms(bias_correction=True),
  'scale_by_stddev': optax.scale_by_stddev(),
  'scale_by_stddev_with_bias_correction': optax.scale_by_stddev(bias_correction=True),
  'scale_by_schedule': optax.scale_by_schedule(_DECAY),
  'scale_by_distance_over_gradients': optax.scale_by_distance_over_gradients(),
  'weight_decay_schedule': optax.add_decayed_weights(_DECAY),
  'adafactor_unfactored': optax.adafactor(0.1, factored=False),
  'adafactor_large_minimum': optax.adafactor(0.1, min_dim_size_to_factor=20),
  'backtracking': optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)),
  'backtracking_stored': optax.chain(
    optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3, store_grad=True)
  ),
  'lookahead': optax.lookahead(optax.adam(0.1), 3, 0.5),
  'masked': optax.masked(optax.adam(0.1), _MASK),
  'masked_adafactor': optax.masked(optax.adafactor(0.1, min_dim_size_to_factor=4), _MASK),
  'masked_sm3': optax.masked(optax.sm3(0.1), _MASK),
  'masked_galore': optax.masked(contrib.galore(0.1, rank=2), _MASK),
  'masked_lbfgs': optax.masked(optax.scale_by_lbfgs(2), _MASK),
  'partition': optax.partition(
    {'a': optax.adafactor(0.1, min_dim_size_to_factor=4), 'b': optax.novograd(0.1)}, _LABELS
  ),
  'named_chain': optax.named_chain(('clip', optax.clip(1.0)), ('adam', optax.adam(0.1))),
  'inject_hyperparams': optax.inject_hyperparams(optax.adam)(_DECAY, b1=0.5),
  'inject_array': optax.inject_hyperparams(optax.sgd, static_args='momentum')(
    jnp.asarray([0.1, 0.2]), momentum=0.9
  ),
  'multi_steps': optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
  'multi_steps_that_skip': optax.MultiSteps(
    optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation(),
  'apply_if_finite': optax.apply_if_finite(optax.adam(0.1), 2),
  'conditionally_transform': optax.conditionally_transform(optax.adam(0.1), _is_late),
  'conditionally_mask': optax.conditionally_mask(optax.adam(0.1), _is_late),
  'freeze': optax.chain(optax.adam(0.1), optax.freeze(_MASK)),
  'selective_transform': optax.selective_transform(optax.adam(0.1), freeze_mask=_MASK),
  'snapshot': optax.snapshot('updates', measure_tree),
  'snapshot_of_norm': optax.snapshot('norm', optax.tree.norm),
  'monitor': optax.chain(
    optax.adam(0.1),
    optax.monitor(
      {
        'norm': optax.measure_with_ema(optax.tree.norm, 0.9),
        'mean': optax.measure_with_ema(measure_tree, 0.9),
      }
    ),
  ),
  'sam_opaque': contrib.sam(optax.adam(0.1), optax.sgd(0.1), opaque_mode=True),
  'muon_per_step': contrib.scale_by_muon(ns_coeffs=((3.0, -4.0, 2.0),) * 2, ns_steps=2),
  'galore_of_attention': contrib.galore(
    0.1,
    rank=2,
    weight_dimension_numbers=lambda params: jax.tree.map(
      lambda p: (
        contrib.GaLoreDimensionNumbers((0,), tuple(range(1, p.ndim))) if p.ndim > 1 else None
      ),
      params,
    ),
  ),
  'galore_momentum': contrib.scale_by_galore(rank=2, base_optimizer=optax.sgd(1.0, momentum=0.9)),
  'mechanize_muon': contrib.mechanize(contrib.muon(0.1)),
  'schedule_free_multi_steps': contrib.schedule_free(
    optax.MultiSteps(optax.sm3(0.1), 2).gradient_transformation(), 0.1
  ),
  'accumulate_avg_updates': aggregating.accumulate_avg_updates(2),
  'process': aggregating.process(
    optax.clip(1.0), aggregating.average_incrementally_updates(0, 2), optax.adam(0.1)
  ),
  'per_element_sums': aggregating.get_per_element_mean_and_sum_sq_diff_grads(0, 2),
  'per_element_ema': aggregating.track_per_element_mean_and_variance_with_ema(0.9),
}

SAMPLES = {**ALIASES, **CONTRIB, **OTHERS}


def optax_classes() -> dict[str, type]:
  """Return the classes of optax that could be states, by qualified name: named tuples, dataclasses and other nodes."""
  root = pathlib.Path(optax.__file__).parent
  with warnings.catch_warnings():
    # Some modules exist to say that they have moved.
    warnings.simplefilter('ignore')
    for path in sorted(root.rglob('*.py')):
      parts = path.relative_to(root).with_suffix('').parts
      if not path.stem.endswith(('_test', 'test_utils')):
        importlib.import_module('.'.join(('optax', *parts)).removesuffix('.__init__'))
  return {
    f'{value.__module__}.{value.__qualname__}': value
    for name, module in list(sys.modules.items())
    if name.partition('.')[0] == 'optax'
    for value in vars(module).values()
    if is_state_like(value) and value.__module__.startswith('optax')
  }


def is_state_like(value: Any) -> bool:
  """Return True if `value` is a class of pytree nodes, as far as a class shows it."""
  return inspect.isclass(value) and (
    (issubclass(value, tuple) and hasattr(value, '_fields'))
    or dataclasses.is_dataclass(value)
    or hasattr(value, 'tree_flatten')
  )


def local_classes() -> list[str]:
  """Return the named tuples and dataclasses that optax defines within functions, where no walk over modules is."""
  root = pathlib.Path(optax.__file__).parent
  found = []
  for path in sorted(root.rglob('*.py')):
    if path.stem.endswith(('_test', 'test_utils')):
      continue
    for function in ast.walk(ast.parse(path.read_text())):
      if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for node in ast.walk(function):
          if isinstance(node, ast.ClassDef) and (node.bases or node.decorator_list):
            found.append(f'{path.relative_to(root)}: {node.name}')
  return found


def classes_in(state: Any) -> set[type]:
  """Return the classes of all nodes of a state."""
  children = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
  if state is None or children == [state]:
    return set()
  return {type(state)}.union(*(classes_in(child) for child in children))
