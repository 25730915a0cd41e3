"""The examples of recording and replaying in docs/moe.md."""

import pathlib
import re

import numpy as np
import pytest

from moe import recording
from t5x_lite.command_line import cli

_PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'moe.md'
_RUN = (
  '--gin_file=recipes/keyword_cloze_moe.gin',
  "--gin.DATA_SOURCE='builtin'",
  "--gin.MODEL_DIR='runs/moe'",
  '--gin.TRAIN_STEPS=1',
  '--gin.BATCH_SIZE=8',
  '--gin.EVAL_STEPS=1',
  '--gin.train_script.train.infer_eval_dataset_cfg=None',
)


@pytest.mark.full
def test_the_page_records_a_run_and_replays_it(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert cli.main(['train', *_RUN]) == 0, capsys.readouterr().err
  capsys.readouterr()
  (shown,) = re.findall(
    r'```python\n((?:[^`]|`[^`])*?record_routing(?:[^`]|`[^`])*?)```', _PAGE.read_text()
  )
  exec(shown, {})  # pylint: disable=exec-used
  *layers, losses = capsys.readouterr().out.splitlines()
  assert [line.split(' [[')[0] for line in layers] == [
    'decoder/layers_1/mlp (1, 12, 2)',
    'encoder/layers_1/mlp (1, 64, 2)',
  ]
  loss, replayed = map(float, losses.split())
  assert loss == replayed and np.isfinite(loss)
  (step,) = recording.RoutingFiles('routing').steps()
  for values in recording.layers_of(recording.RoutingFiles('routing').read(step)).values():
    assert values['gates'].shape == values['expert_index'].shape and step == 1
