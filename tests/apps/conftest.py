"""Command lines of a tiny run, for tests of flags and bindings of decoding in all commands."""

import io

import gin
import pytest

from tests.apps.common import cloze_run


@pytest.fixture(scope='session')
def decoded_run(tmp_path_factory):
  """Path of a run directory; `cloze_run.DECODED_LENGTHS` are its lengths."""
  folder = tmp_path_factory.mktemp('run') / 'cloze'
  cloze_run.save(folder, cloze_run.DECODED_LENGTHS)
  return str(folder)


@pytest.fixture
def command_line(decoded_run, tmp_path, monkeypatch):
  """Function from a command to its arguments, which decode few examples; `infer` writes `tmp_path/out.jsonl`."""
  few = '--gin.evaluation.InferenceEvalConfig.num_examples=8'
  (tmp_path / 'in.txt').write_text('x\ny\n')
  arguments = {
    'train': [
      '--gin_file=recipes/keyword_cloze.gin',
      *(f'--gin.{each}' for each in cloze_run.bindings(cloze_run.DECODED_LENGTHS)),
      '--gin.BATCH_SIZE=8',
      f'--gin.MODEL_DIR={tmp_path}/run',
      '--gin.TRAIN_STEPS=1',
      '--gin.EVAL_STEPS=1',
      few,
    ],
    'eval': [decoded_run, few, f'--gin.EVAL_OUTPUT_DIR={tmp_path}/eval'],
    'infer': [decoded_run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl'],
    'chat': [decoded_run],
    'export': [decoded_run, f'--gin.MODEL_OUTPUT_DIR={tmp_path}/exported'],
  }

  def make(command):
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'x\ny\n'), encoding='utf-8'))
    return [command, *arguments[command]]

  yield make
  gin.clear_config()
