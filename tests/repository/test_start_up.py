"""A start imports only the modules of the command; imports are a third of the time of a dry run."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_OPTIONAL = {
  'tensorflow',
  'seqio',
  't5',
  'grain',
  'matplotlib',
  'sentencepiece',
  'orbax',
  'tensorstore',
  'tensorboardX',
  'transformers',
  'torch',
}
# Modules that only some runs use, or only errors.
_PARTS = {
  't5x_lite.optimizers.shampoo',
  't5x_lite.optimizers.scaled_adam_rule',
  't5x_lite.optimizers.soap_rule',
  't5x_lite.optimizers.multi',
  't5x_lite.checkpoints.hugging_face',
  't5x_lite.data.text.sources',
  't5x_lite.data.file_tasks',
  't5x_lite.command_line.errors',
  't5x_lite.interactive',
  't5x_lite.apps.vocab.command',
}
_RECIPE = [
  'train',
  '--gin_file=recipes/keyword_cloze.gin',
  '--dry_run',
  '--gin.BATCH_SIZE=8',
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
]


def _imported(code: str, tmp_path: pathlib.Path) -> set[str]:
  """Returns the modules that a new process has imported after `code`, without those of an empty one."""
  names = tmp_path / 'names'
  code = (
    f'import sys\nbefore = set(sys.modules)\n{code}\n'
    f'with open({str(names)!r}, "w") as file: file.write("\\n".join(set(sys.modules) - before))'
  )
  environment = {
    **os.environ,
    'PYTHONPATH': str(_ROOT),
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return set(names.read_text().split())


@pytest.mark.parametrize(
  ('code', 'unneeded'),
  [
    (
      'from t5x_lite import cli; cli.main(["--version"])',
      {
        'jax',
        'numpy',
        'flax',
        'gin',
        'dataclasses',  # importlib.metadata of Python 3.12 imports inspect, but not dataclasses
        'subprocess',
        'difflib',
        't5x_lite.apps.train.command',
      },
    ),
    (
      'from t5x_lite import cli; cli.main(["train", "--help"])',
      {'jax', 'numpy', 'gin', 'dataclasses', 'subprocess'},
    ),
    (
      'from t5x_lite import adafactor; from t5x_lite.apps import train; adafactor.Adafactor(); train.train',
      {'optax'},
    ),
    (
      f'from t5x_lite import cli; assert cli.main([*{_RECIPE!r}, "--gin.MODEL_DIR=run"]) == 0',
      set(),
    ),
  ],
  ids=['version', 'train --help', 'train with Adafactor', 'dry run'],
)
def test_a_start_imports_only_the_modules_that_it_uses(tmp_path, code, unneeded):
  imported = _imported(code, tmp_path)
  assert 't5x_lite' in imported
  assert not imported & (_OPTIONAL | _PARTS | unneeded)


def test_errors_of_gin_files_do_not_wait_for_jax(tmp_path):
  code = f'from t5x_lite import cli; assert cli.main([*{_RECIPE}, "--gin.TRAIN_STEP=1"]) == 2'
  imported = _imported(code, tmp_path)
  assert 't5x_lite.configuration.syntax' in imported and not imported & {'jax', 'numpy'}
