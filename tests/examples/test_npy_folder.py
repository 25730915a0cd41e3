"""A custom format of weights: the example of docs/extending.md, in `convert` and in a restore that gin configures."""

import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import cli
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite import lazy_names
from t5x_lite.apps import convert
from t5x_lite.apps.convert import formats
from t5x_lite.checkpoints.sources import detect
from tests.apps.convert import convert_cases as given

_GIN = """
from __gin__ import dynamic_registration
import npy_folder
from t5x_lite import checkpoints
checkpoints.RestoreCheckpointConfig.path = {path!r}
"""


@pytest.fixture(autouse=True)
def module(monkeypatch):
  """Lets commands and gin import `npy_folder` from the folder of the examples."""
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
  monkeypatch.delitem(sys.modules, 'npy_folder', raising=False)
  # Formats are registered for the life of a process; the package has no public function that removes them.
  monkeypatch.setattr(detect, '_SOURCES', lazy_names.LazyClasses(detect.BUILT_IN))
  monkeypatch.setattr(formats, '_TARGETS', lazy_names.LazyClasses(formats.BUILT_IN))


def test_convert_writes_and_reads_the_format(tmp_path, capsys):
  state = given.make_state()
  state['target/encoder/encoder_norm/scale'] = np.ones(
    state['target/encoder/encoder_norm/scale'].shape, ml_dtypes.bfloat16
  )
  run = given.save(tmp_path / 'run', state)
  there, back = str(tmp_path / 'there'), str(tmp_path / 'back')
  assert cli.main(['convert', run, there, '--to=npy', '--module=npy_folder', '--step=5']) == 0
  assert f'Wrote {there} (NumPy folder) from' in capsys.readouterr().out
  assert checkpoints.detect_format(there) == 'npy'
  assert cli.main(['convert', there, back, '--to=t5x_lite', '--module=npy_folder']) == 0
  expected = given.bits(run) | {'state/step': given.bits(there)['state/step']}
  assert given.bits(f'{back}/checkpoint_5') == given.bits(there) == expected
  with pytest.raises(errors.ConfigError, match='--family` must be absent with --to=npy, got'):
    convert.convert(run, str(tmp_path / 'no'), to='npy', family='mt5')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(errors.CheckpointError, match='or a folder of NumPy files .npy_index.json'):
    checkpoints.open_source(tmp_path / 'empty')


def test_a_configuration_restores_the_format(tmp_path):
  run = given.save(tmp_path / 'run', given.make_state())
  (tmp_path / 'npy.gin').write_text(_GIN.format(path=str(tmp_path / 'weights')))
  read = gin_utils.read([str(tmp_path / 'npy.gin')])
  cfg = gin_utils.load('t5x_lite.checkpoints.RestoreCheckpointConfig', read).call()
  convert.convert(run, str(tmp_path / 'weights'), to='npy')
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  assert paths == [str(tmp_path / 'weights')]
  name = 'target/encoder/encoder_norm/scale'
  restored = checkpoints.load(paths[0])['target']['encoder']['encoder_norm']['scale']
  np.testing.assert_array_equal(restored, given.make_state()[name])


def test_what_is_not_a_format_cannot_be_registered():
  with pytest.raises(errors.ConfigError, match='cls` must be a subclass of StateSource'):
    checkpoints.register_state_source(type('NoSource', (), {'format': 'x'}))
  with pytest.raises(errors.ConfigError, match='name` must be a text, got None'):

    @convert.register_target
    class Nameless(convert.StateTarget):
      def write(self, folder, job, make): ...

  with pytest.raises(errors.ConfigError, match="name` must be a new name, got 't5x'. t5x_lite"):

    @checkpoints.register_state_source
    class Other(checkpoints.StateSource):
      format = 't5x'
