"""Folders of seqio's data."""

import pytest

from t5x_lite.apps.common import flags
from t5x_lite.command_line import cli

seqio = pytest.importorskip('seqio')
_ARGV = [
  'train',
  '--gin_file=recipes/keyword_cloze.gin',
  '--gin.DATA_SOURCE=seqio',
  '--compilation_cache_dir=off',
  '--distributed=off',
  '--gin.MODEL_DIR=x',
]


@pytest.fixture
def state(monkeypatch):
  monkeypatch.setattr(seqio.utils, '_TFDS_DATA_DIR_OVERRIDE', None)
  monkeypatch.setattr(seqio.utils, '_GLOBAL_CACHE_DIRECTORIES', ['/first'])
  return seqio.utils


def test_flags_set_the_folders_of_all_tasks(state, caplog):
  argv = [
    *_ARGV,
    '--tfds_data_dir="gs://bucket/tfds"',
    '--seqio_additional_cache_dirs="gs://bucket/a",/b',
    '--seqio_additional_cache_dirs',
    '/first',
    '--gin.USE_CACHED_TASKS=True',
  ]
  flags.load_configuration(cli.parse(argv))
  assert (
    seqio.TfdsDataSource(tfds_name='x:1.0.0', tfds_data_dir='/own').tfds_dataset.data_dir
    == 'gs://bucket/tfds'
  )
  assert state._GLOBAL_CACHE_DIRECTORIES == ['/first', 'gs://bucket/a', '/b']
  assert 'no effect' not in caplog.text
  assert "--seqio_additional_cache_dirs: the folder '/b' does not exist." in caplog.text
  assert "folder, got 'gs://" not in caplog.text


def test_cache_folders_without_cached_tasks_are_a_warning(state, caplog):
  flags.load_configuration(
    cli.parse([*_ARGV, '--seqio_additional_cache_dirs=/a', '--tfds_data_dir='])
  )
  assert state._TFDS_DATA_DIR_OVERRIDE is None
  assert (
    'has no effect: no dataset reads cached tasks. Set --gin.USE_CACHED_TASKS=True.' in caplog.text
  )


def test_a_cache_folder_may_have_the_characters_of_patterns(state, tmp_path, monkeypatch):
  (tmp_path / 'c[1]/task').mkdir(parents=True)
  flags.load_configuration(
    cli.parse([*_ARGV, f'--seqio_additional_cache_dirs={tmp_path / "c[1]"}'])
  )
  found = state._GLOBAL_CACHE_DIRECTORIES[-1]
  assert seqio.utils.tf.io.gfile.glob(f'{found}/task*') == [f'{found}/task']
