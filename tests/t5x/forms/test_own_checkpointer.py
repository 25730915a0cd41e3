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


_RESTORE = {
  'utils.CheckpointConfig.restore': '@utils.RestoreCheckpointConfig()',
  'utils.RestoreCheckpointConfig.mode': '"specific"',
}


def test_names_and_shapes_are_compared_next_to_a_restore_of_the_project(run_form, tmp_path, capfd):
  """T5X fails for arrays that the checkpoint lacks, and ignores those that the model lacks."""
  layers = {'network.T5Config.num_encoder_layers': 2}
  assert _run(run_form, tmp_path / 'a', 'RestoresAll', **layers) == 0, capfd.readouterr().err
  restore = {**_RESTORE, 'utils.RestoreCheckpointConfig.path': tmp_path / 'a/checkpoint_2'}
  own = 'utils.RestoreCheckpointConfig.checkpointer_cls'
  for name, more, message in (
    ('RestoresAll', {'network.T5Config.num_encoder_layers': 3}, 'target/encoder/layers_2/'),
    ('RestoresAll', {}, '45 in the checkpoint only:.*encoder/layers_1/'),
    ('RestoresLess', layers, 'RestoresLess.restore must return .* others of target/encoder/'),
  ):
    bound = {**restore, own: f'@prompt_checkpoints.{name}', **more}
    assert _run(run_form, tmp_path / 'b', 'RestoresAll', **bound) == 2
    err = capfd.readouterr().err
    assert re.search(message, err, re.DOTALL), err
  bound = {
    **restore,
    own: '@prompt_checkpoints.RestoresAll',
    'utils.RestoreCheckpointConfig.strict': False,
    'TRAIN_STEPS': 3,
  }
  assert _run(run_form, tmp_path / 'b', 'RestoresAll', **bound) == 0, capfd.readouterr().err


def test_checkpoints_without_the_base_are_not_those_of_a_project(run_form, tmp_path, capfd):
  assert _run(run_form, tmp_path / 'a') == 0, capfd.readouterr().err
  more = {'INITIAL_CHECKPOINT_PATH': tmp_path / 'a/checkpoint_2', 'TRAIN_STEPS': 3}
  flags = ['--gin_file=adapters/lora.gin', '--gin.LORA_RANK=2']
  for name in ('NumpyCheckpointer', 'SavesNothing'):
    assert _run(run_form, tmp_path / 'b', name, *flags, **more) == 2
    err = capfd.readouterr().err
    assert 'SaveCheckpointConfig.save_base` must be True with this checkpointer_cls, got F' in err
  more['utils.SaveCheckpointConfig.save_base'] = True
  assert _run(run_form, tmp_path / 'b', 'SavesNothing', *flags, **more) == 0


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
