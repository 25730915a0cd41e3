"""A small project that was written for T5X loads, dry-runs, trains, evaluates and predicts unmodified."""

import json
import pathlib
import re

import gin
import pytest

from t5x_lite.command_line import cli

_SAMPLES = pathlib.Path(__file__).parent / 'samples'


@pytest.fixture(autouse=True)
def project(monkeypatch):
  """Run in the project's folder."""
  monkeypatch.chdir(_SAMPLES)
  yield
  gin.clear_config()


def _run(command, file, **macros):
  return cli.main(
    [command, f'--gin_file={file}', *(f'--gin.{name}={value}' for name, value in macros.items())]
  )


@pytest.mark.parametrize('file', ['adamw.gin', 'decoder_only.gin', 'moe.gin', 'scalable.gin'])
def test_pretraining_files_dry_run(file, tmp_path, capfd):
  argv = ['train', f'--gin_file={file}', f'--gin.MODEL_DIR={tmp_path}', '--dry_run']
  assert cli.main(argv) == 0, capfd.readouterr().err
  out, err = capfd.readouterr()
  assert (
    f'{file} mean those of t5x_lite' in err and "Of T5X's files, those of t5x_lite are used:" in err
  )
  assert 't5x.' not in out.partition('# Parameters')[0]


def test_a_checkpoint_is_pretrained_finetuned_evaluated_and_used(tmp_path, capfd):
  first, second = tmp_path / 'first', tmp_path / 'second'
  assert _run('train', 'pretrain.gin', MODEL_DIR=first) == 0, capfd.readouterr().err
  checkpoint = first / 'checkpoint_4'
  assert (
    _run(
      'train', 'finetune.gin', MODEL_DIR=second, INITIAL_CHECKPOINT_PATH=checkpoint, TRAIN_STEPS=8
    )
    == 0
  ), capfd.readouterr().err
  err = capfd.readouterr().err
  # Six letters and the end.
  assert re.search(r"task_feature_lengths of 'reverse_words', split 'validation'.*\b7\b", err)
  written = (
    (second / 'inference_eval/reverse_words-000008.jsonl').read_text().splitlines()
  )  # of seqio's JSONLogger
  assert len(written) == 5 and 'prediction' in json.loads(written[0])  # JSON_WRITE_N_RESULTS
  assert not (second / 'checkpoint_4').exists() and (second / 'checkpoint_8').exists()  # keep = 2
  # The recorded configuration repeats the run without T5X's names.
  text = (second / 'config.gin').read_text()
  assert 't5x.' not in text and '__main__' not in text and 'num_decodes = 2' in text
  evaluated = tmp_path / 'evaluated'
  assert (
    _run('eval', 'eval.gin', CHECKPOINT_PATH=second / 'checkpoint_8', EVAL_OUTPUT_DIR=evaluated)
    == 0
  ), capfd.readouterr().err
  predicted = tmp_path / 'predicted'
  assert (
    _run('infer', 'infer.gin', CHECKPOINT_PATH=second / 'checkpoint_8', INFER_OUTPUT_DIR=predicted)
    == 0
  ), capfd.readouterr().err
  lines = [
    json.loads(line)
    for path in predicted.glob('*.jsonl*')
    if path.suffix.startswith('.jsonl')
    for line in path.read_text().splitlines()
  ]
  assert len(lines) == 24 and {'inputs', 'prediction'} <= {*lines[0]}
