"""Runs whose config.gin was written by an earlier version open, evaluate and resume.

The files were recorded at commit cfdc05c, before the packages were rearranged, from the recipes of their names.
"""

import pathlib
import tarfile

import pytest

from t5x_lite import checkpoints
from t5x_lite import gin_utils
from t5x_lite.command_line import cli

_FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'recorded_configurations'
_FILES = sorted(path.stem for path in _FOLDER.glob('*.gin'))
# Small and without TensorFlow. The test is not about the overridden values.
_SMALL = [
  "--gin.DATA_SOURCE='builtin'",
  '--gin.BATCH_SIZE=8',
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 8}",
]
# Half of the time to compile, in the one case that `make test` runs.
_ONE_LAYER = [
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
]


def test_there_are_enough():
  assert len(_FILES) >= 6


@pytest.mark.parametrize('name', _FILES)
def test_opens(name):
  configuration = gin_utils.load(
    't5x_lite.apps.train.train', gin_utils.read([str(_FOLDER / f'{name}.gin')])
  )
  made = {parameter: configuration.argument(parameter) for parameter in configuration.uses[0].bound}
  assert {'model', 'partitioner', 'train_dataset_cfg', 'trainer_cls', 'checkpoint_cfg'} <= set(made)


@pytest.mark.parametrize(
  'name',
  [
    'keyword_cloze',
    *(
      pytest.param(name, marks=pytest.mark.full)
      for name in (
        'keyword_cloze_decoder_only',
        'keyword_cloze_finetune',
        'keyword_cloze_moe',
        'keyword_cloze_optimizers',
        'cloze_and_docs_mixture',
      )
    ),
  ],
)
def test_evaluates_and_resumes(name, tmp_path, capsys):
  first_step = 0
  if name == 'keyword_cloze_finetune':
    _train('docs_span_corruption', tmp_path / 'pretrained', 1)
    first_step = 1  # Fine-tuning counts on from the checkpoint that it starts from.
  run = tmp_path / 'run'
  no_evaluation = [
    f'--gin.train_script.train.{part}_eval_dataset_cfg=None' for part in ('train', 'infer')
  ]
  _train(name, run, first_step + 1, *no_evaluation)
  assert cli.main(['eval', str(run), *_small(name)]) == 0, capsys.readouterr().err
  assert (run / 'eval').is_dir()
  _train(name, run, first_step + 2, *no_evaluation)
  assert (
    f'{run}/checkpoint_{first_step + 1} (this run) at step {first_step + 1}'
    in capsys.readouterr().err
  )


def test_a_stored_checkpoint_resumes(tmp_path, capsys):
  """Of commit 0d32c1cf, whose manifests lack the epsilon of norms."""
  run = tmp_path / 'run'
  with tarfile.open(_FOLDER.parents[1] / 'data' / 'run_before_special_ids.tar.gz') as archive:
    archive.extractall(run, filter='data')
  before = checkpoints.read_metadata(run / 'checkpoint_2')['network']
  assert 'layer_norm_epsilon' not in before
  flags = [f'--gin.train_script.train.{part}_eval_dataset_cfg=None' for part in ('train', 'infer')]
  flags += [f"--gin.MODEL_DIR='{run}'", '--gin.TRAIN_STEPS=3']
  assert cli.main(['train', f'--gin_file={run}/config.gin', *flags]) == 0, capsys.readouterr().err
  assert f'{run}/checkpoint_2 (this run) at step 2' in capsys.readouterr().err
  after = checkpoints.read_metadata(run / 'checkpoint_3')['network']
  assert after.items() >= before.items() and after['layer_norm_epsilon'] == 1e-6


def _small(name):
  return [*_SMALL, *(_ONE_LAYER if name == 'keyword_cloze' else [])]


def _train(name, run, num_steps, *flags):
  """Trains a run whose directory has the recorded file, as that of the earlier version has."""
  text = (_FOLDER / f'{name}.gin').read_text().replace(f"'runs/{name}'", repr(str(run)))
  text = text.replace(
    "'runs/docs_span_corruption/checkpoint_1000'", repr(str(run.parent / 'pretrained/checkpoint_1'))
  )
  run.mkdir(exist_ok=True)
  (run / 'config.gin').write_text(text)
  assert (
    cli.main(
      [
        'train',
        f'--gin_file={run}/config.gin',
        *_small(name),
        '--gin.EVAL_STEPS=1',
        f'--gin.TRAIN_STEPS={num_steps}',
        *flags,
      ]
    )
    == 0
  )
  (run / 'config.gin').write_text(text)
