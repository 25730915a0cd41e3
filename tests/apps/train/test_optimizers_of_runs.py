"""Options of an optimizer that change when a run is resumed."""

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


def test_a_state_of_stacked_layers_of_an_earlier_version_names_what_to_do(tmp_path):
  """Earlier versions gave optax the arrays of all layers, so that Novograd had one number for them."""

  def train(model_dir, num_steps, optimizer_def, restore=None):
    model = adapter_run.model(param_layout='scalable_t5', optimizer_def=optimizer_def)
    options = {**adapter_run.OPTIONS, 'restore': restore}
    return toy_run.train(
      model_dir,
      num_steps,
      model=model,
      train_eval_dataset_cfg=None,
      infer_eval_dataset_cfg=None,
      **options,
    )

  earlier = optimizers.OptaxWrapper(
    learning_rate_factory=lambda rate: optax.novograd(rate), name='novograd'
  )
  train(tmp_path / 'run', 3, earlier)
  with pytest.raises(CheckpointError, match='RestoreCheckpointConfig.path = ') as error:
    train(tmp_path / 'run', 6, optimizers.novograd())
  path = re.search("RestoreCheckpointConfig.path = '(.*?)'", str(error.value)).group(1)
  assert (
    "mode = 'specific', assignment_map = [('state/param_states.*', None)] and fallback_to_scratch = True"
    in str(error.value)
  )
  restore = checkpoints.RestoreCheckpointConfig(
    path, 'specific', assignment_map=[('state/param_states.*', None)], fallback_to_scratch=True
  )
  step, _ = train(tmp_path / 'other', 6, optimizers.novograd(), restore)
  assert step == 6
  # The new run resumes from its own state.
  assert train(tmp_path / 'other', 9, optimizers.novograd())[0] == 9
