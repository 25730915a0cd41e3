"""Recorded cases of Adafactor, with their rules of logical axes."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_lite import adafactor
from t5x_lite import tree_utils
from t5x_lite.adafactor import HParamMap
from tests import golden_data

STANDARD = adafactor.standard_logical_factor_rules()
RULES = {
  'standard': STANDARD,
  'moe': {
    **STANDARD,
    'expert': 'batch',
    'expert_mlp': 'column',
    'mlp_embed': 'row',
    'unmodeled': 'none',
  },
  None: None,
}


def golden(case):
  description, arrays = golden_data.load(f't5x/adafactor_{case}')
  options = dict(description['hyperparams'])
  options.pop('lr', None)
  options['logical_factor_rules'] = RULES[options.get('logical_factor_rules', 'standard')]
  if isinstance(options.get('multiply_by_parameter_scale'), str):
    assert options['multiply_by_parameter_scale'] == "HParamMap([('scale$', False), ('.*', True)])"
    options['multiply_by_parameter_scale'] = HParamMap([('scale$', False), ('.*', True)])
  optimizer_def = adafactor.Adafactor(**options)
  axes = tree_utils.unflatten_dict(
    {path: P(*names) for path, names in description['param_axes'].items()}
  )
  params = jax.tree.map(jnp.asarray, golden_data.subtree(arrays, 'params0'))
  optimizer = optimizer_def.with_param_axes(axes).create(params)
  return description, arrays, optimizer, axes
