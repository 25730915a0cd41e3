"""Logical axes of parameters are overridden by name."""

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import pytest

from t5x_lite import partitioning
from t5x_lite.errors import ConfigError


class _Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    kernel = nn_partitioning.param_with_axes(
      'kernel', nn.initializers.ones, (2, 3), jnp.float32, axes=('embed', 'mlp')
    )
    return x @ kernel + self.param('bias', nn.initializers.zeros, (3,))


def test_the_first_matching_name_decides(caplog):
  variables = _Network().init(jax.random.key(0), jnp.ones((1, 2)))
  with caplog.at_level('WARNING'):
    changed = partitioning.override_params_axes_names(
      variables,
      [('ker', ('wrong',)), ('ker.*', ('vocab', 'embed')), ('.*', ('mlp',)), ('b.*', ('no',))],
    )
  assert tuple(changed['params_axes']['kernel_axes'].names) == ('vocab', 'embed')
  assert tuple(changed['params_axes']['bias_axes'].names) == ('mlp',)
  assert tuple(variables['params_axes']['kernel_axes'].names) == ('embed', 'mlp')
  assert "'ker', 'b.*'" in caplog.text
  with pytest.raises(ConfigError, match="kernel.*2 names.*got .'mlp',."):
    partitioning.override_params_axes_names(variables, [('kernel', ('mlp',))])
  with pytest.raises(ConfigError, match='params_axes'):
    partitioning.override_params_axes_names({'params': {}}, [])
