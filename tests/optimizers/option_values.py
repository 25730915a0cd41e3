"""Further values of every option of every optimizer factory, for the contract test."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import optax.contrib

from t5x_lite import optimizers

_DTYPES = ('bfloat16', 'float16', jnp.float32)
_SCHEDULE = optax.linear_schedule(0.5, 0.1, 10)
# Arguments of each call, where the defaults are missing or do not fit tiny parameters.
BASE: dict[str, dict[str, Any]] = {
  'Adafactor': {
    'learning_rate': 0.1,
    'logical_factor_rules': optimizers.standard_logical_factor_rules(),
  },
  'adafactor': {'min_dim_size_to_factor': 2},
  'distributed_shampoo': {'block_size': 4, 'preconditioning_compute_steps': 2},
  'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1},
  'galore': {'rank': 2},
  'mechanize': {'base_optimizer': optax.adam(0.1)},
  'rprop': {'learning_rate': 0.1},
  'sam': {'optimizer': optax.sgd(0.1), 'adv_optimizer': optax.sgd(0.1)},
  'schedule_free': {'base_optimizer': optax.sgd(0.1)},
  'soap': {'precondition_frequency': 2},
  'sophia': {'update_interval': 2},
  'split_real_and_imaginary': {'inner': optax.sgd(0.1)},
}
# Options with which another one has an effect.
_TOGETHER = {
  ('Adafactor', 'dtype_momentum'): {'beta1': 0.9},
  ('Adafactor', 'weight_decay_rate_lr_exponent'): {'weight_decay_rate': 0.1},
  ('adafactor', 'dtype_momentum'): {'momentum': 0.9},
  ('distributed_shampoo', 'clip_by_scaled_gradient_norm'): {'graft_type': 'RMSPROP'},
  ('muon', 'weight_decay_mask'): {'weight_decay': 0.1},
  ('sgd', 'accumulator_dtype'): {'momentum': 0.9},
  ('sgd', 'nesterov'): {'momentum': 0.9},
  ('rmsprop', 'nesterov'): {'momentum': 0.9},
  ('sophia', 'print_win_rate_every_n_steps'): {'verbose': True},
}
# Values of an option of one factory, or of all: of others they are derived from the default.
_VALUES: dict[str, tuple[Any, ...]] = {
  'Adafactor.beta1': (0.9,),
  'Adafactor.weight_decay_rate': (0.1,),
  'Adafactor.weight_decay_rate_lr_exponent': (1.0,),
  'Adafactor.global_norm_clip_threshold': (1.0,),
  'Adafactor.max_parameter_scale': (1.0,),
  'Adafactor.factor_map': ({'.*': optimizers.HEURISTIC_RULE},),
  'Adafactor.logical_factor_rules': (optimizers.standard_logical_factor_rules(),),
  'distributed_shampoo.clip_by_scaled_gradient_norm': (1.0,),
  'distributed_shampoo.graft_type': ('SGD', 'RMSPROP_NORMALIZED'),
  'distributed_shampoo.num_devices_for_pjit': (1,),
  'distributed_shampoo.precision': (jax.lax.Precision.DEFAULT,),
  'distributed_shampoo.preconditioner_partition_spec': (P('data'),),
  'distributed_shampoo.quantize_statistics': (True, False),
  'distributed_shampoo.root_method': ('eigh',),
  'distributed_shampoo.statistics_partition_spec': (P('data'),),
  'dog.init_step': (('distance', 1e-3), ('learning_rate', 1e-3)),
  'lars.weight_decay_mask': (False,),
  'lars.trust_ratio_mask': (False,),
  'muon.matrices': ((('kernel', False),), 'two_dims'),
  'muon.ns_coeffs': (((3.0, -4.0, 2.0), (2.0, -1.5, 0.5)),),
  'noisy_sgd.key': (3, jax.random.key(3)),
  'scaled_adam.betas': ((0.8, 0.9),),
  'scaled_adam.batch_axes': (('layers',), ()),
  'scaled_adam.clipping_scale': (2.0,),
  'soap.block_size': (2,),
  'soap.matrix_dtype': ('int16',),
  'soap.momentum_dtype': ('bfloat16', 'int8'),
  'soap.second_moment_dtype': ('bfloat16',),
  'soap.shampoo_beta': (0.9, 1.0),
  'accumulator_dtype': _DTYPES,
  'adam_learning_rate': (0.1, _SCHEDULE),
  'base_optimizer': (optax.adam(0.1), optax.sgd(0.1, momentum=0.9)),
  'beta3': (0.9,),
  'betas': ((0.8, 0.9),),
  'clip_threshold': (None, 0.5),
  'clip_value_fn': (lambda step: 1.0,),
  'consistent_rms': (0.2,),
  'dtype_momentum': _DTYPES,
  'hessian_diagonal_fn': (optax.contrib.hutchinson_estimator_diag_hessian(),),
  'init_estim_sq_dist': (1e-3,),
  'learning_rate': (0.1, _SCHEDULE),
  'linesearch': (optax.scale_by_backtracking_linesearch(5), None),
  'mask': (lambda params: jax.tree.map(lambda p: p.ndim > 1, params),),
  'momentum': (0.5,),
  'mu_dtype': _DTYPES,
  'optimism': (0.1,),
  'preconditioning': ('spectral', 'aol', 'schatten'),
  'seed': (1,),
  'state_dtype': _DTYPES,
  'variant': ('sps+',),
  'warmup_steps': (2,),
  'weight_decay_mask': (lambda params: jax.tree.map(lambda p: p.ndim > 1, params),),
  'weight_decay_rate': (0.1,),
}
# Options whose values other tests cover: trees like the parameters, and axes of a loop that the user writes.
_ELSEWHERE = (
  'adv_optimizer',
  'batch_axis_name',
  'batch_dims',
  'group_options',
  'inner',
  'muon_weight_dimension_numbers',
  'optimizer',
  'param_labels',
  'weight_dimension_numbers',
)
_DECAY_OR_NONE = ('dog.weight_decay', 'dowg.weight_decay', 'schedule_free_sgd.weight_decay')


def factories() -> dict[str, Callable[..., optimizers.OptimizerDef]]:
  """Return the factories of one optimizer, by name."""
  found = {}
  for name in optimizers.__all__:
    factory = getattr(optimizers, name)
    returned = getattr(factory, '__annotations__', {}).get('return')
    if returned is optimizers.OptaxWrapper and name not in ('chain', 'wrap_optax_optimizer'):
      found[name] = factory
  return {**found, 'Adafactor': optimizers.Adafactor, 'scaled_adam': optimizers.scaled_adam}


def calls(name: str) -> list[tuple[str, Mapping[str, Any]]]:
  """Return the option and the arguments of each call of a factory, one for each further value of an option.

  Raises:
    KeyError: an option has no values here.
  """
  base = BASE.get(name, {})
  result = []
  for option, parameter in inspect.signature(factories()[name]).parameters.items():
    together = {**base, **_TOGETHER.get((name, option), {})}
    result += [(option, {**together, option: value}) for value in _values(name, option, parameter)]
  return result


def _values(name: str, option: str, parameter: inspect.Parameter) -> tuple[Any, ...]:
  default = parameter.default
  for key in (f'{name}.{option}', option):
    if key in _VALUES:
      values = _VALUES[key]
      if name == 'rprop' and option == 'learning_rate':
        values = values[:1]
      return values
  if option in _ELSEWHERE:
    return ()
  if f'{name}.{option}' in _DECAY_OR_NONE:
    return (0.1,)
  if isinstance(default, bool):
    return (not default,)
  if isinstance(default, int):
    return (default + 1,)
  if isinstance(default, float):
    return (default * 0.9 or 0.1,)
  if option in BASE.get(name, {}):
    return (BASE[name][option],)
  raise KeyError(f'{name}.{option}')


AXES = {
  'kernel': P('embed', 'mlp'),
  'layers': P('embed', 'layers', 'mlp'),
  'bias': P('mlp'),
  'scale': P(),
}
SHAPES = {'kernel': (4, 6), 'layers': (4, 3, 6), 'bias': (6,), 'scale': ()}
