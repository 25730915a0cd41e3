"""Names of checkpoints on the disk, and leftovers of dead runs."""

import os
import shutil

from t5x_lite import checkpoints
from tests.checkpoints import checkpoint_states as states

Cfg = checkpoints.SaveCheckpointConfig


def save(directory, steps, cfg=None, seed=0, **kwargs):
  with checkpoints.CheckpointManager(directory, save_cfg=cfg or Cfg()) as manager:
    for step in steps:
      manager.save(step, states.state(step, seed), **kwargs)


def test_names_on_disk(tmp_path):
  save(tmp_path, [3], data_state={'position': b'7'})
  root = tmp_path / 'checkpoint_3'
  found = checkpoints.read_manifest(root)
  assert found.step == 3 and set(found.arrays) == set(states.flat_numpy(3))
  assert found.arrays['target/token_embedder/embedding'] == {'shape': [16, 8], 'dtype': 'float32'}
  assert set(found.versions) >= {'jax', 'orbax-checkpoint', 't5x_lite'}
  on_disk = {str(path.relative_to(root)) for path in root.rglob('*') if path.is_file()}
  assert on_disk == set(found.files) | {'manifest.json'}
  assert 'dataset/process_0-of-1/position.bin' in on_disk and 'state/_METADATA' in on_disk
  # Orbax keeps names in its index; readable by whoever opens it.
  assert 'token_embedder' in (root / 'state/_METADATA').read_text()
  assert sorted(os.listdir(tmp_path)) == ['.lock', 'checkpoint_3']


def test_leftovers_of_dead_runs(tmp_path):
  save(tmp_path, [1, 2, 3])
  for old, new in (
    ('checkpoint_2', 'checkpoint_2.deleted-1'),
    ('checkpoint_3', 'checkpoint_3.replaced-checkpoint_3'),
    ('checkpoint_1', 'checkpoint_1'),
  ):
    (tmp_path / old).rename(tmp_path / new)
  (tmp_path / 'checkpoint_4.tmp-00ab-1/state').mkdir(parents=True)
  shutil.copytree(tmp_path / 'checkpoint_1', tmp_path / 'checkpoint_1.replaced-x')
  (tmp_path / 'checkpoint_metrics.json.tmp-17').write_text('{')
  (tmp_path / 'checkpoint_backup').mkdir()
  checkpoints.CheckpointManager(tmp_path)  # One that only reads leaves everything as it is.
  assert len(os.listdir(tmp_path)) == 8
  checkpoints.lock_model_dir(tmp_path).release()
  # The one that was set aside, and whose successor never came, has its name back.
  assert sorted(os.listdir(tmp_path)) == [
    '.lock',
    'checkpoint_1',
    'checkpoint_3',
    'checkpoint_backup',
  ]
  assert checkpoints.newest_sound_step(tmp_path) == 3
