"""Options of an optimizer that change when a run is resumed."""

import ast
import re

import jax
import numpy as np
import optax
import pytest

from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite.errors import CheckpointError
from tests.apps.train import adapter_run
from tests.apps.train import toy_run


def _train(model_dir, num_steps, clipping_scale):
  return toy_run.train(
    model_dir,
    num_steps,
    model=toy_run.model(optimizers.scaled_adam(clipping_scale=clipping_scale)),
    train_eval_dataset_cfg=None,
    infer_eval_dataset_cfg=None,
    save={'period': 3},
  )


def test_clipping_of_scaled_adam_may_be_added_changed_and_removed(tmp_path, caplog):
  caplog.set_level('INFO', 't5x_lite')
  for num_steps, clipping_scale in ((3, None), (6, 2.0), (9, 4.0), (12, None)):
    assert _train(tmp_path, num_steps, clipping_scale)[0] == num_steps
    log = caplog.text
    caplog.clear()
    assert ('New in this run, without values' in log) == (num_steps == 6)
    assert ('In the checkpoint only, left out' in log) == (num_steps == 12)
    shapes = checkpoints.open_source(tmp_path / f'checkpoint_{num_steps}').shapes()
    assert any('/clipping/' in name for name in shapes) == (clipping_scale is not None)
  # Clipping begins after a period of 100 steps, so that all runs have the same parameters.
  _train(tmp_path / 'other', 12, None)
  names = ('target', 'state')
  found, want = (
    checkpoints.load(path / 'checkpoint_12') for path in (tmp_path, tmp_path / 'other')
  )
  for name in names:
    jax.tree.map(np.testing.assert_array_equal, found[name], want[name])


def _earlier(optimizer, name):
  """Return the optimizer of earlier versions, which gave optax the arrays of all layers."""
  return optimizers.OptaxWrapper(learning_rate_factory=optimizer, name=name)


def _options_of(message, model_dir):
  """Return the options of `RestoreCheckpointConfig` that a message names."""
  words = message.replace('the MODEL_DIR of this run', repr(str(model_dir))).replace('\n', ' ')
  text = re.search(r'RestoreCheckpointConfig\.(path = .*?)\.$', words).group(1)
  named = re.split(r', (?=\w+ = )| and (?=\w+ = )', text)
  return {name: ast.literal_eval(value) for name, value in (each.split(' = ') for each in named)}


@pytest.mark.parametrize(
  'make, earlier, before',
  [
    pytest.param(
      optimizers.novograd,
      _earlier(optax.novograd, 'novograd'),
      'scalable_t5',
      id='earlier novograd',
    ),
    pytest.param(
      optimizers.sm3,
      _earlier(optax.sm3, 'sm3'),
      'scalable_t5',
      marks=pytest.mark.full,
      id='earlier sm3',
    ),
    pytest.param(
      optimizers.novograd, optimizers.novograd(), 't5', marks=pytest.mark.full, id='novograd, t5'
    ),
    pytest.param(optimizers.sm3, optimizers.sm3(), 't5', id='sm3, t5'),
  ],
)
def test_options_of_an_error_start_another_run(tmp_path, make, earlier, before):
  """Earlier versions had one number of Novograd, and sums over all dims of SM3, for all layers in an array."""

  def train(model_dir, num_steps, optimizer_def, layout='scalable_t5', restore=None):
    options = {**adapter_run.OPTIONS, 'restore': restore}
    return toy_run.train(
      model_dir,
      num_steps,
      model=adapter_run.model(param_layout=layout, optimizer_def=optimizer_def),
      train_eval_dataset_cfg=None,
      infer_eval_dataset_cfg=None,
      **options,
    )

  train(tmp_path / 'run', 3, earlier, before)
  with pytest.raises(CheckpointError, match='RestoreCheckpointConfig.path = ') as error:
    train(tmp_path / 'run', 6, make())
  named = _options_of(str(error.value), tmp_path / 'run')
  assert named['assignment_map'] == [('state/param_states.*', None)]
  assert named['fallback_to_scratch'] is True
  restore = checkpoints.RestoreCheckpointConfig(**named)
  assert train(tmp_path / 'other', 6, make(), restore=restore)[0] == 6
  # The new run resumes from its own state.
  assert train(tmp_path / 'other', 9, make())[0] == 9
