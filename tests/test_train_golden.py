"""Thirty training steps of a T5 reproduce the losses and parameters that T5X recorded, for each optimizer."""

import numpy as np
import pytest

from t5x_lite import tree_utils
from tests import golden_data
from tests import golden_models


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.full) if name != 'train_multi' else name
    for name in golden_models.TRAININGS
  ],
)
def test_training_follows_the_recorded_losses(name):
  golden, arrays = golden_data.load(f't5x/{name}')
  state, (losses, z_losses, accuracies) = golden_models.train(name)
  assert state.step == golden['steps']
  np.testing.assert_allclose(losses[:10], arrays['loss'][:10], rtol=1e-5)
  np.testing.assert_allclose(losses, arrays['loss'], rtol=1e-4)
  np.testing.assert_allclose(z_losses, arrays['z_loss'], rtol=1e-4)
  np.testing.assert_allclose(accuracies, arrays['accuracy'], rtol=1e-6)
  final = tree_utils.flatten_dict(golden_data.subtree(arrays, 'params_final'))
  trained = tree_utils.flatten_dict(state.params)
  assert trained.keys() == final.keys()
  for path, want in final.items():
    error = np.linalg.norm(trained[path] - want) / np.linalg.norm(want)
    assert error < 1e-3, f'{path}: {error}'
  if name == 'train_multi':
    first = tree_utils.flatten_dict(golden_data.subtree(arrays, 'params0'))
    frozen = [path for path in trained if 'decoder' not in path and 'scale' not in path]
    assert all(np.array_equal(trained[path], first[path]) for path in frozen) and len(frozen) == 16
