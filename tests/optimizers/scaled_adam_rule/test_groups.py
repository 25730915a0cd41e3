"""Groups of parameters in ScaledAdam: options, learning rates, clipping, labels and dims."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from tests.optimizers.scaled_adam_rule import scaled_adam_cases as cases
from tests.optimizers.scaled_adam_rule import scaled_adam_reference


def test_groups_have_their_own_options_clipping_and_rates():
  params, grads, _ = cases.random_case(1)
  labels = {'bias': 'small', 's': 'small', 'zero_dim': 'small', 'one': 'small', 'w2': 'frozen_size'}
  group_options = {
    'small': dict(
      clipping_scale=0.8, clipping_update_period=5, size_update_period=2, betas=(0.8, 0.95)
    ),
    'frozen_size': dict(
      scalar_lr_scale=0.0, learning_rate=lambda count: 0.01 * (1 + count), clipping_scale=None
    ),
  }
  pairs = (('^(bias|s|zero_dim|one)$', 'small'), ('w2', 'frozen_size'))
  tree = {name: labels.get(name, 'default') for name in params}
  optimizer, *others = [
    optimizers.scaled_adam(
      0.03, 1.5, clipping_update_period=7, param_labels=form, group_options=group_options
    )
    for form in (pairs, tree, lambda params: {name: tree[name] for name in params})
  ]
  got, states = cases.run(optimizer, params, grads)
  groups = {
    'default': scaled_adam_reference.Group(clipping_scale=1.5, clipping_update_period=7),
    'small': scaled_adam_reference.Group(
      clipping_scale=0.8, clipping_update_period=5, size_update_period=2, betas=(0.8, 0.95)
    ),
    'frozen_size': scaled_adam_reference.Group(
      scalar_lr_scale=0.0, lr=lambda t: 0.01 * (1 + t), clipping_update_period=7
    ),
  }
  reference = scaled_adam_reference.Reference(params, groups, tree)
  for t in range(64):
    reference.step({name: grad[t] for name, grad in grads.items()})
  for name, want in reference.params.items():
    np.testing.assert_allclose(got[name][-1], want, rtol=2e-5, atol=5e-6, err_msg=name)
  # The other forms of labels make the same program.
  jaxprs = [
    str(jax.make_jaxpr(lambda p, tx=form.optax_optimizer: tx.update(p, tx.init(p), p))(params))
    for form in (optimizer, *others)
  ]
  assert jaxprs[1:] == jaxprs[:1] * 2
  last = jax.tree.map(lambda x: x[-1], states.groups)
  assert last['frozen_size'].clipping is None
  assert last['small'].clipping.num_clipped != last['default'].clipping.num_clipped


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(clip_scale=2.0), "Did you mean 'clipping_scale'"),
    (dict(clipping_scale=0.0), 'clipping_scale` must be a number > 0 or None, got 0.0'),
    (dict(clipping_scale='2'), "got '2'"),
    (dict(betas=(0.98, 0.9)), 'betas'),
    (dict(betas=0.9), 'two numbers'),
    (dict(betas=(0.0, 0.9)), 'betas'),
    (dict(learning_rate=-1.0), 'learning_rate'),
    (dict(scalar_lr_scale=-0.1), 'scalar_lr_scale'),
    (dict(eps=0.0), 'eps'),
    (dict(param_min_rms=5.0), 'at most param_max_rms, 3.0, got 5.0'),
    (dict(scalar_max=0), 'scalar_max'),
    (dict(size_update_period=0), 'size_update_period'),
    (dict(clipping_update_period=2.5), 'must be an integer'),
    (dict(show_dominant_parameters=1), 'True or False'),
    (dict(clip_scale_gradient_only='no'), 'True or False'),
    (dict(group_options={'a': {}}), 'no effect without param_labels'),
    (dict(param_labels=(('bias', 'biases'),), group_options={'bias': {}}), "Did you mean 'bias'"),
    (
      dict(param_labels=(('bias', 'biases'),), group_options={'biases': {'beta': 1}}),
      "Did you mean 'betas'",
    ),
    (dict(param_labels=(('bias', 'biases'),), group_options={'biases': {'eps': -1}}), 'eps'),
    (
      dict(param_labels=(('bias', 'a'),), group_options={'a': {}, 'b': {}}),
      "label 'b', which param_labels",
    ),
    (dict(param_labels=(('(', 'a'),), group_options={'a': {}}), 'regular expressions ('),
    (dict(param_labels='bias', group_options={'bias': {}}), 'pairs'),
    (dict(param_labels=(('bias', 'a/b'),), group_options={'a/b': {}}), 'without "/"'),
    (dict(param_labels=(), group_options=['a']), 'group_options'),
    (dict(param_labels=(('bias', 'a'),), group_options={'a': 2.0}), 'dicts of options'),
    (dict(batch_axes='layers'), 'tuple of names'),
    (dict(batch_dims=1), 'tuple of (regular expression, dim) pairs'),
    (dict(batch_dims=(('(', 1),)), 'regular expressions ('),
  ],
)
def test_options_are_rejected_when_the_optimizer_is_made(options, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    optimizers.scaled_adam(**options)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(param_labels=(('biass', 'a'),), group_options={'a': {}}), 'no parameter has'),
    (dict(param_labels={'bias': 'a'}, group_options={'a': {}}), "no label for the parameter 'w'"),
    (
      dict(param_labels={'bias': 'a', 'w': 'a', 'kernel': 'a'}, group_options={'a': {}}),
      "without parameter at 'kernel'",
    ),
    (
      dict(param_labels=lambda params: {'bias': 'a', 'w': 'aa'}, group_options={'a': {}}),
      "Did you mean 'a'",
    ),
    (dict(batch_dims=(('w', 2),)), "a dim out of the 2 dims of 'w', got 2"),
  ],
)
def test_labels_and_dims_are_rejected_when_the_state_is_made(options, message):
  with pytest.raises(ConfigError, match=message):
    optimizers.scaled_adam(0.1, **options).create({'bias': jnp.ones([2]), 'w': jnp.ones([2, 2])})
