"""Warnings about optimizers whose updates depend on the layout."""

import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.optimizers.base import layouts
from tests.optimizers import layout_cases as cases
from tests.optimizers import optimizer_files


def _warnings(optimizer_def, form, caplog):
  caplog.clear()
  layouts._warn_once.cache_clear()
  cases.created(optimizer_def, form)
  return [record.message for record in caplog.records if record.levelname == 'WARNING']


@pytest.mark.parametrize('stem', sorted(cases.DEPENDENT))
def test_a_warning_names_optimizers_of_the_list(stem, caplog):
  name = cases.DEPENDENT[stem]
  optimizer_def = cases.definition(stem)
  assert not _warnings(optimizer_def, 'single', caplog)
  (warning,) = _warnings(optimizer_def, 'scalable', caplog)
  assert warning.startswith(f'{name} updates ')
  assert layouts.LAYOUT_DEPENDENT[name] in warning


def test_shampoo_warns_of_spread_roots(caplog):
  spread = optimizers.distributed_shampoo(spread_roots=True, preconditioning_compute_steps=2)
  (warning,) = _warnings(spread, 'scalable', caplog)
  assert warning.startswith('distributed_shampoo updates ')
  assert not _warnings(optimizers.distributed_shampoo(), 'scalable', caplog)


def test_a_warning_of_a_part(caplog):
  chain = optimizers.chain([optax.clip(1.0), optimizers.noisy_sgd()])
  (warning,) = _warnings(chain, 'experts', caplog)
  assert warning.startswith('noisy_sgd updates 2 parameter(s)')
  assert not _warnings(optimizers.lamb(), 'scalable', caplog)


def test_adafactor_is_the_same_if_its_sizes_do_not_decide(caplog):
  options = {'adafactor__Adafactor__min_dim_size_to_factor': 5}
  optimizer_def = optimizer_files.definition('adafactor', **options)
  assert not _warnings(optimizer_def, 'scalable', caplog)
  expected = cases.train(optimizer_def, 'single')
  for form in ('experts', 'scalable'):
    assert cases.difference(cases.train(optimizer_def, form), expected) < 1e-6
