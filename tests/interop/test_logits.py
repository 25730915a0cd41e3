"""The same weights give the same logits in `transformers` and here, whichever side they come from, for every family.

The bar is 1e-5 of the largest logit, at positions that are not padding; rounding alone makes up to 5e-6.
"""

import dataclasses

import numpy as np
import pytest

from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints.hugging_face import network
from t5x_lite.layers import relative_position
from t5x_lite.networks import param_layouts
from tests.interop import hf_models
from tests.interop import reference

_TOLERANCE = 1e-5
# Where a family cannot be told by its network at this size of a vocabulary.
_FAMILY_FLAGS = {'mt5': 'mt5'}
# Each option of the architecture once; T5 1.1 and mT5 differ from the others in no code.
_CASES = reference.cases(
  *((name, 't5') for name in ('t5_1_0', 'tied_gated', 'tied_unscaled', 'switch')),
  ('umt5', 'scalable_t5'),
)


@pytest.mark.parametrize('name, layout', _CASES)
def test_their_weights_here(name, layout, tmp_path):
  family, batch = reference.FAMILIES[name], reference.random_batch()
  model = reference.hf_model(family)
  want = model.logits(batch)
  folder = model.save(tmp_path / 'theirs')
  params = reference.restore(folder, family, layout)
  reference.assert_same_bits(params, reference.our_tree(model.tensors, family, layout))
  logits = reference.logits_fn(family, layout)(params, batch)
  assert reference.max_error(logits, want, batch) < _TOLERANCE
  # And by way of a converted checkpoint.
  made = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite', param_layout=layout)
  assert (made.source_format, made.param_layout) == ('hugging_face', layout)
  reference.assert_same_bits(reference.restore(made.path, family, layout), params)


@pytest.mark.parametrize('name, layout', _CASES)
def test_our_weights_there(name, layout, tmp_path):
  family, batch = reference.FAMILIES[name], reference.random_batch(1)
  module, params = reference.our_module(family, layout), reference.random_params(family)
  if layout != 't5':
    params = param_layouts.convert(params, 't5', layout, module.config)
  run = reference.save_ours(params, tmp_path / 'run', module)
  made = convert.convert(
    run, str(tmp_path / 'theirs'), to='hugging_face', family=_FAMILY_FLAGS.get(name)
  )
  model = reference.load_theirs(f'{name}.1/ours', made.path, family)
  reference.assert_same_bits(reference.our_tree(model.tensors, family, layout), params)
  want = model.logits(batch)
  logits = reference.logits_fn(family, layout)(params, batch)
  assert reference.max_error(logits, want, batch) < _TOLERANCE


def test_umt5_without_tied_embeddings_needs_the_flag_that_its_configuration_does_not_read(tmp_path):
  family, batch = reference.FAMILIES['umt5'], reference.random_batch()
  model = reference.hf_model(family)
  right = model.logits(batch)
  model = model.with_tied_flag(True)
  np.testing.assert_allclose(model.logits(batch), right * 32**-0.5, rtol=1e-4, atol=1e-5)
  # As `transformers` saves a model that it has loaded. That the tables differ says that they are not tied.
  folder = model.save(tmp_path / 'theirs')
  reference.assert_same_bits(
    reference.restore(folder, family), reference.our_tree(model.tensors, family)
  )
  np.testing.assert_array_equal(
    reference.load_theirs(f'{model.name}/saved', folder, family).logits(batch), right
  )


@pytest.mark.full
@pytest.mark.parametrize('name, needs_flag', [('mt5', False), ('umt5', True), ('switch', True)])
def test_tied_models_whose_logits_are_not_scaled_stay_one_table(name, needs_flag, tmp_path):
  """An mT5 as `transformers` 5 makes it, and the other types as written here; T5 is among the families."""
  family, batch = (
    dataclasses.replace(
      reference.FAMILIES[name],
      name=f'{name}_tied_unscaled',
      tied=True,
      our_options=(('logits_via_embedding', True), ('scale_tied_logits', False)),
    ),
    reference.random_batch(),
  )
  module, params = reference.our_module(family), reference.random_params(family)
  run = reference.save_ours(params, tmp_path / 'run', module)
  made = convert.convert(run, str(tmp_path / 'folder'), to='hugging_face', family=name)
  model = reference.load_theirs(f'{family.name}/ours', made.path, family)
  assert model.notes['is_tied']
  text = convert_report.describe(made)
  assert ('model.config.tie_word_embeddings = False' in text) == needs_flag
  if needs_flag:
    model = model.with_tied_flag(False)
  want = model.logits(batch)
  # Saved by `transformers`, it is still the same network.
  again = model.save(tmp_path / 'again')
  reference.assert_same_bits(reference.restore(again, family), params)
  if name != 'switch':
    config = network.network_config(again)
    assert config.logits_via_embedding and not config.scale_tied_logits
  logits = reference.logits_fn(family)(params, batch)
  assert reference.max_error(logits, want, batch) < _TOLERANCE


@pytest.mark.full
def test_umt5_with_tied_logits(tmp_path):
  """No such model was published, and `transformers` makes nothing else of its default configuration."""
  family, batch = (
    dataclasses.replace(reference.FAMILIES['umt5'], name='umt5_tied', tied=True),
    reference.random_batch(),
  )
  model = reference.hf_model(family)
  params = reference.restore(model.save(tmp_path / 'theirs'), family)
  want = model.logits(batch)
  logits = reference.logits_fn(family)(params, batch)
  assert reference.max_error(logits, want, batch) < _TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
  'theirs, ours',
  [
    ('gelu', ('gelu_exact',)),
    ('silu', ('silu',)),
    ('gated-relu', ('relu', 'linear')),
    ('gated-silu', ('silu', 'linear')),
    ('gated-gelu_new', ('gelu', 'linear')),
    ('gated-tanh', ('tanh', 'linear')),
  ],
)
def test_other_activations(theirs, ours, tmp_path):
  family = reference.Family(
    name=f'activation_{theirs}',
    gated=len(ours) > 1,
    options=(('feed_forward_proj', theirs),),
    our_options=(('mlp_activations', ours),),
  )
  batch = reference.random_batch()
  model = reference.hf_model(family)
  folder = model.save(tmp_path / 'theirs')
  assert network.network_config(folder, dtype='float32', dropout_rate=0.0).mlp_activations == ours
  params = reference.restore(folder, family)
  # And back, by a run of a network with these activations.
  run = reference.save_ours(params, tmp_path / 'run', reference.our_module(family))
  path = convert.convert(run, str(tmp_path / 'back'), to='hugging_face').path
  back = reference.load_theirs(f'{family.name}/back', path, family)
  there_and_back = [model.logits(batch), back.logits(batch)]
  logits = reference.logits_fn(family)(params, batch)
  for want in there_and_back:
    assert reference.max_error(logits, want, batch) < _TOLERANCE


@pytest.mark.parametrize(
  'num_buckets, max_distance', [(32, 128), (8, 14), pytest.param(32, 1000, marks=pytest.mark.full)]
)
@pytest.mark.parametrize('bidirectional', [True, False])
def test_buckets_of_relative_positions_are_theirs_at_every_distance(
  num_buckets, max_distance, bidirectional
):
  distances = np.arange(-3 * max_distance, 3 * max_distance + 1)
  np.testing.assert_array_equal(
    relative_position.relative_position_bucket(distances, bidirectional, num_buckets, max_distance),
    hf_models.relative_position_buckets(distances, bidirectional, num_buckets, max_distance),
  )
