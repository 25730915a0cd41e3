"""The update of a layer or an expert is the same in each layout of the parameters, for all of `gin/optimizers`."""

import jax
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.optimizers.base import layouts
from tests.optimizers import layout_cases as cases
from tests.optimizers import optimizer_files

# Largest difference, relative to the largest change in training; 1e-6 for files that are not listed. Sums over all
# parameters and roots of matrices are rounded otherwise, or amplify rounding.
_TOLERANCES = dict.fromkeys(
  ('distributed_shampoo', 'dowg', 'momo', 'momo_adam', 'polyak_sgd'), 1e-5
)
# By default those whose update of an element depends on others.
_BY_DEFAULT = (
  'adafactor_optax',
  'adamw',
  'distributed_shampoo',
  'fromage',
  'galore',
  'lamb',
  'lars',
  'muon',
  'novograd',
  'scaled_adam',
  'sm3',
)


def _rows():
  rows = []
  for stem in optimizer_files.FILES:
    marks = [] if stem in _BY_DEFAULT else [pytest.mark.full]
    if stem in cases.DEPENDENT:
      marks.append(
        pytest.mark.xfail(reason=layouts.LAYOUT_DEPENDENT[cases.DEPENDENT[stem]], strict=True)
      )
    for form in ('experts', 'scalable'):
      rows.append(pytest.param(stem, form, marks=marks, id=f'{stem}-{form}'))
  return rows


@pytest.mark.parametrize('stem, form', _rows())
def test_updates_are_equal_in_each_layout(stem, form):
  difference = cases.difference(
    cases.train(cases.definition(stem), form), cases.expected_params(stem)
  )
  assert difference < _TOLERANCES.get(stem, 1e-6)


def test_exceptions_are_few_and_named():
  # The files of these two are in the table above without their reasons, `spread_roots` and `spread_refreshes`.
  named = {*cases.DEPENDENT.values(), 'distributed_shampoo', 'soap'}
  assert named == set(layouts.LAYOUT_DEPENDENT)
  assert len(layouts.LAYOUT_DEPENDENT) <= 6


_SHAMPOO = {
  'sharded': {'shard_optimizer_states': True},
  'quantized': {'best_effort_memory_usage_reduction': True, 'quantize_statistics': True},
  'normalized': {'root_method': 'eigh', 'graft_type': 'RMSPROP_NORMALIZED'},
}


@pytest.mark.parametrize(
  'mode, form',
  [
    ('sharded', 'scalable'),
    ('quantized', 'scalable'),
    ('sharded', 'stacked'),
    pytest.param('sharded', 'experts', marks=pytest.mark.full),
    pytest.param('quantized', 'stacked', marks=pytest.mark.full),
    pytest.param('normalized', 'scalable', marks=pytest.mark.full),
    pytest.param('normalized', 'stacked', marks=pytest.mark.full),
  ],
)
def test_shampoo_in_each_mode(mode, form):
  optimizer_def = optimizers.distributed_shampoo(
    block_size=8,
    start_preconditioning_step=1,
    preconditioning_compute_steps=2,
    matrix_epsilon=1e-2,
    weight_decay=0.1,
    **_SHAMPOO[mode],
  )
  optimizer_def = optimizers.with_update_options(
    optimizer_def, weight_decay_scales=[('kernel$', 0.5)]
  )
  expected = cases.train(optimizer_def, 'single')
  assert cases.difference(cases.train(optimizer_def, form), expected) < 1e-5


@pytest.mark.parametrize('stem', ['adamw', 'distributed_shampoo'])
def test_stacked_layers_with_experts(stem):
  difference = cases.difference(
    cases.train(cases.definition(stem), 'stacked'), cases.expected_params(stem)
  )
  assert difference < _TOLERANCES.get(stem, 1e-6)


def test_factors_by_parameter_apply_to_units():
  def scaled(optimizer_def):
    return optimizers.with_update_options(
      optimizer_def,
      learning_rate_scales=[('attention/', 0.5)],
      weight_decay_scales=[('expert', 0.0)],
    )

  optimizer_def = scaled(optimizers.lamb(weight_decay=0.3))
  expected = cases.train(optimizer_def, 'single')
  assert cases.difference(cases.train(optimizer_def, 'scalable'), expected) < 1e-6
  assert (
    cases.difference(cases.train(optimizers.lamb(weight_decay=0.3), 'scalable'), expected) > 1e-2
  )


@pytest.mark.parametrize('form', ['experts', 'scalable'])
def test_a_chain_and_parts_pass_the_axes_on(form):
  inner = optimizers.chain([optax.clip(1.0), optimizers.novograd()])
  optimizer_def = optimizers.MultiOptimizer([('kernel$', inner), ('scale$', optimizers.sm3())])
  expected = cases.train(optimizer_def, 'single')
  assert cases.difference(cases.train(optimizer_def, form), expected) < 1e-6


def test_numbers_of_dims_are_those_of_the_arrays():
  """GaLore's option describes arrays, so that they are not divided."""
  optimizer_def = optimizers.galore(
    0.1, weight_dimension_numbers=lambda params: jax.tree.map(lambda _: None, params)
  )
  assert not optimizer_def.depends_on_axes
