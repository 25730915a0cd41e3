"""A custom data source in every command: the example of docs/extending.md, with the gin file of the page."""

import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.command_line import cli
from t5x_lite.trainer import summaries
from tests.data import registries

_FOLDER = pathlib.Path(__file__).parent
# One layer of each stack, and few steps.
_SMALL = [
  f'--gin.network.T5Config.{name}={value}'
  for name, value in dict(
    num_encoder_layers=1, num_decoder_layers=1, emb_dim=16, mlp_dim=16, num_heads=2, head_dim=8
  ).items()
]
_OPTIONS = [
  '--gin.BATCH_SIZE=16',
  '--gin.EVAL_PERIOD=4',
  '--gin.SAVING_PERIOD=2',
  '--gin.WARMUP_STEPS=2',
  *_SMALL,
]


@pytest.fixture
def page(tmp_path, monkeypatch):
  """Makes a folder with the page's files the current one."""
  text = (_FOLDER.parents[1] / 'docs' / 'extending.md').read_text(encoding='utf-8')
  (tmp_path / 'sums.gin').write_text(
    re.findall(r'`sums.gin`:\n\n```gin\n(.*?)```', text, re.DOTALL)[0]
  )
  (tmp_path / 'own_sums_source.py').write_text(
    (_FOLDER / 'sums_source.py').read_text(encoding='utf-8')
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  registries.isolate(monkeypatch)
  monkeypatch.delitem(sys.modules, 'own_sums_source', raising=False)
  return tmp_path


def _train(model_dir, steps, *flags):
  # A module of another name: that of the page may be imported already.
  assert (
    cli.main(
      [
        'train',
        '--gin_file=sums.gin',
        "--gin.MIXTURE_OR_TASK_MODULE='own_sums_source'",
        *_OPTIONS,
        f'--gin.MODEL_DIR={model_dir}',
        f'--gin.TRAIN_STEPS={steps}',
        '--gin.schedules.create_learning_rate_scheduler.steps_per_cycle=8',
        *flags,
      ]
    )
    == 0
  )


@pytest.mark.full  # by default, tests/data/sources/test_base.py sets the position of this source
def test_a_run_resumes(page):
  without_evaluation = [
    f'--gin.train_script.train.{name}_eval_dataset_cfg=None' for name in ('train', 'infer')
  ]
  for model_dir, steps in (('whole', 4), ('parts', 2), ('parts', 4)):
    _train(model_dir, steps, *without_evaluation)
  states = [
    jax.tree.leaves(checkpoints.load(pathlib.Path(run) / 'checkpoint_4'))
    for run in ('whole', 'parts')
  ]
  for first, second in zip(*states, strict=True):
    np.testing.assert_array_equal(first, second)


@pytest.mark.full  # by default, tests/data/sources/test_base.py has the source in every use
def test_trains_evaluates_decodes_and_infers(page):
  _train('whole', 4)
  files = {
    name: summaries.read_metrics(path)[-1]
    for name, path in summaries.metrics_files('whole').items()
  }
  assert files['training_eval/sums_to_198']['loss'] > 0 and files['train']['step'] == 4
  assert 'exact_match' in files['inference_eval/sums_to_198']
  assert (
    cli.main(['infer', 'whole', '--gin.MIXTURE_OR_TASK_SPLIT=test', '--output=sums.jsonl']) == 0
  )
  results = [json.loads(line) for line in (page / 'sums.jsonl').read_text().splitlines()]
  assert len(results) == 64
  for result in results:
    numbers = result['inputs']['inputs_pretokenized'].split('+')
    assert result['inputs']['targets_pretokenized'] == str(sum(map(int, numbers)))
