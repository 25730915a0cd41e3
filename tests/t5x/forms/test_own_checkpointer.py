"""A project with a checkpointer of its own in `train`, which filters parameters."""

import re

import numpy as np
import pytest

from t5x_lite import checkpoints


def _run(run_form, folder, name='NumpyCheckpointer', *flags, **macros):
  more = {
    'MODEL_DIR': folder,
    'utils.SaveCheckpointConfig.checkpointer_cls': f'@prompt_checkpoints.{name}',
    **macros,
  }
  return run_form('own_checkpointer', 'train', 'run.gin', *flags, **more)


def test_save_is_called_and_reaches_the_save_of_the_run(run_form, tmp_path, capfd):
  assert _run(run_form, tmp_path) == 0, capfd.readouterr().err
  written = {path.name for path in (tmp_path / 'numpy/checkpoint_2').iterdir()}
  assert 'token_embedder.embedding.npy' in written and len(written) == 3
  arrays = checkpoints.load(tmp_path / 'checkpoint_2')
  stored = arrays['target']['token_embedder']['embedding']
  np.testing.assert_array_equal(
    stored, np.load(tmp_path / 'numpy/checkpoint_2/token_embedder.embedding.npy')
  )
  assert arrays['state']['step'] == 2
  # The constructor keeps one checkpoint, not two.
  assert (tmp_path / 'numpy/checkpoint_1').exists() and not (tmp_path / 'checkpoint_1').exists()
  # The checkpoint is one of the run, with its metadata and the position in the data.
  metadata = checkpoints.read_metadata(tmp_path / 'checkpoint_2')
  assert metadata['run']['start_step'] == 0
  assert checkpoints.read_manifest(tmp_path / 'checkpoint_2').num_data_processes == 1


def test_filtered_checkpoints_are_completed_by_restore(run_form, tmp_path, capfd):
  name = 'TrainedOnlyCheckpointer'
  assert _run(run_form, tmp_path, name) == 0, capfd.readouterr().err
  arrays = checkpoints.load(tmp_path / 'checkpoint_2')
  assert 'encoder' not in arrays['target'] and 'decoder' in arrays['target']
  capfd.readouterr()
  more = {'TRAIN_STEPS': 4, 'utils.create_learning_rate_scheduler.base_learning_rate': 0.0}
  assert _run(run_form, tmp_path, name, **more) == 0, capfd.readouterr().err
  assert 'step 2' in capfd.readouterr().err
  later = checkpoints.load(tmp_path / 'checkpoint_4')
  norm = ('decoder', 'decoder_norm', 'scale')
  before, after = arrays['target'], later['target']
  for part in norm:
    before, after = before[part], after[part]
  np.testing.assert_array_equal(before, after)


def test_a_save_that_writes_nothing_is_told(run_form, tmp_path, capfd):
  assert _run(run_form, tmp_path, 'SavesNothing') == 0, capfd.readouterr().err
  assert 'SavesNothing.save has not called Checkpointer.save' in capfd.readouterr().err
  assert not list(tmp_path.glob('checkpoint_*'))


@pytest.mark.parametrize('option', ['Save', 'Restore'])
def test_other_overridden_methods_are_errors_before_the_first_step(
  run_form, tmp_path, capfd, option
):
  more = {
    'utils.CheckpointConfig.restore': '@utils.RestoreCheckpointConfig()',
    'utils.RestoreCheckpointConfig.path': tmp_path,
    f'utils.{option}CheckpointConfig.checkpointer_cls': '@prompt_checkpoints.KeepsAll',
  }
  assert _run(run_form, tmp_path / 'run', 'SavesNothing', '--dry_run', **more) == 2
  message = (
    f'`{option}CheckpointConfig.checkpointer_cls` must be a class that overrides none of the '
    'methods _remove_old_checkpoints, which no command calls'
  )
  err = capfd.readouterr().err
  assert re.search(re.escape(message), err), err
