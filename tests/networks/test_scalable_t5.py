"""The configuration of T5X's scalable_t5 gives its parameter tree and numbers."""

import functools

import jax
import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import scalable_t5
from tests.networks import network_cases as cases

_NAME = 'net_scalable_t5_1_1_tiny'


def test_the_recorded_configuration_as_it_is():
  description, arrays = cases.golden(_NAME)
  fields = dict(description['config'])
  assert {'remat_policy', 'scan_layers', 'param_scan_axis'} <= fields.keys()
  network = scalable_t5.Transformer(scalable_t5.T5Config(**fields))
  batch, _ = cases.golden_batch(_NAME)
  shapes = jax.eval_shape(
    functools.partial(network.init, **batch, enable_dropout=False), jax.random.key(0)
  )['params']
  assert {path: leaf.shape for path, leaf in tree_utils.named_leaves(shapes)} == {
    path: leaf.shape for path, leaf in tree_utils.named_leaves(cases.golden_params(_NAME))
  }
  logits = cases.jit(functools.partial(network.apply, **batch, enable_dropout=False))(
    {'params': cases.golden_params(_NAME)}
  )
  real = np.asarray(batch['decoder_target_tokens']) > 0
  np.testing.assert_allclose(
    np.asarray(logits)[real], arrays['out/logits'][real], **description['tol']
  )


@pytest.mark.parametrize(
  'option, value, remedy',
  [
    ('scan_layers', False, 't5.T5Config with relpos_bias_tables'),
    ('param_scan_axis', 0, 'default'),
    ('param_layout', 't5', 'Use t5.T5Config'),
  ],
)
def test_other_forms_of_the_tree_are_rejected(option, value, remedy):
  with pytest.raises(ConfigError, match=f'{option}. must be.*{remedy}'):
    scalable_t5.T5Config(40, **{option: value})
