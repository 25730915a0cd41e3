"""Options of an optimizer that change when a run is resumed."""

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import optimizers
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
