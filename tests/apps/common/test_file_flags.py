"""Own files by flags: a model is trained, evaluated, and predicts, with the templates of the run."""

import argparse
import csv
import gzip
import io
import json
import re
import sys
import types

import gin
import pytest

from t5x_lite.apps.common import file_flags
from t5x_lite.command_line import cli

_MODEL = [
  '--gin_file=recipes/keyword_cloze.gin',
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
  '--gin.network.T5Config.emb_dim=8',
  '--gin.network.T5Config.mlp_dim=8',
  '--gin.network.T5Config.head_dim=4',
  '--gin.BATCH_SIZE=8',
]


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _flags(*argv):
  parser = argparse.ArgumentParser()
  file_flags.add_file_arguments(parser)
  return parser.parse_args(argv)


def test_flags_become_bindings():
  assert file_flags.file_bindings(_flags()) == ''
  found = file_flags.file_bindings(_flags('--train_file=a.csv', '--targets=b', '--columns=a, b'))
  assert found.splitlines()[3:] == [
    '',
    'MIXTURE_OR_TASK_NAME = @data.FileTask()',
    "DATA_SOURCE = 'builtin'",
    'data.FileTask.vocabulary = %VOCABULARY',
    "data.FileTask.train_file = 'a.csv'",
    "data.FileTask.targets = 'b'",
    "data.FileTask.columns = ['a', 'b']",
  ]


def _write(path, rows):
  with path.open('w', newline='', encoding='utf-8') as stream:
    writer = csv.DictWriter(stream, rows[0])
    writer.writeheader()
    writer.writerows(rows)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run that was trained on a table, its lengths chosen from it."""
  folder = tmp_path_factory.mktemp('own')
  rows = [{'id': i, 'question': f'q{i}', 'answer': f'a{i}' * 3} for i in range(20)]
  _write(folder / 'train.csv', rows)
  _write(folder / 'test.csv', rows[:5])
  status = cli.main(
    [
      'train',
      *_MODEL,
      f'--gin.MODEL_DIR={folder}/run',
      '--gin.TRAIN_STEPS=2',
      '--gin.TASK_FEATURE_LENGTHS=None',
      f'--train_file={folder}/train.csv',
      f'--validation_file={folder}/test.csv',
      '--inputs=what is {question}?',
      '--targets=answer',
      '--metrics=exact_match,cer',
    ]
  )
  gin.clear_config()
  assert status == 0
  return folder


def _main(*argv):
  status = cli.main([str(word) for word in argv])
  assert status == 0


def _read(path):
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def test_the_run_has_files_templates_and_lengths(run):
  config = (run / 'run' / 'config.gin').read_text()
  assert "TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 16}" in config
  assert "data.FileTask.inputs = 'what is {question}?'" in config
  metrics = (run / 'run' / 'inference_eval' / 'train' / 'metrics.jsonl').read_text()
  assert {'exact_match', 'cer'} <= set(json.loads(metrics.splitlines()[-1]))


def test_predictions_of_a_table_keep_fields(run, tmp_path):
  (run / 'new.csv').write_text('id,question\n7,"x, y"\n8,z\n9\n')
  _main(
    'infer',
    run / 'run',
    f'--input={run}/new.csv',
    f'--output={tmp_path}/a.jsonl',
    '--keep_fields=id',
  )
  found = _read(tmp_path / 'a.jsonl')
  assert [row['id'] for row in found] == ['7', '8']  # the third row is bad
  assert [row['inputs'] for row in found] == [
    {'inputs_pretokenized': 'what is x, y?'},
    {'inputs_pretokenized': 'what is z?'},
  ]
  gin.clear_config()
  (run / 'new.csv.gz').write_bytes(gzip.compress((run / 'new.csv').read_bytes()))
  _main(
    'infer',
    run / 'run',
    f'--input={run}/new.csv.gz',
    f'--output={tmp_path}/b.csv',
    '--keep_fields=all',
  )
  rows = list(csv.DictReader((tmp_path / 'b.csv').read_text(encoding='utf-8').splitlines()))
  assert [row['inputs'] for row in rows] == ['what is x, y?', 'what is z?']
  assert [row['prediction'] for row in rows] == [row['prediction'] for row in found]
  assert list(rows[0]) == ['id', 'question', 'prediction', 'inputs']


def test_fields_that_results_cannot_keep(run, tmp_path, capsys):
  lines = ['{"question": "z", "id": 1}', '{"question": "z", "id": 2, "prediction": "old"}']
  (tmp_path / 'new.jsonl').write_text('\n'.join(lines))
  words = [str(run / 'run'), f'--input={tmp_path}/new.jsonl', f'--output={tmp_path}/a.jsonl']
  assert cli.main(['infer', *words, '--keep_fields=all']) == 2
  error = capsys.readouterr().err
  assert "new.jsonl, line 2: the field 'prediction' cannot be kept" in error
  assert 'or keep other fields: --keep_fields=question,id.' in error
  assert not (tmp_path / 'a.jsonl').exists()
  gin.clear_config()
  _main('infer', *words, '--keep_fields=question,id')
  assert [row['id'] for row in _read(tmp_path / 'a.jsonl')] == [1, 2]


def test_templates_of_gin_files(run, tmp_path):
  lines = ["data.FileTask.inputs = 'who is {question}?'", "data.FileTask.targets = 'answer'"]
  header = 'from __gin__ import dynamic_registration\nfrom t5x_lite import data\n'
  (tmp_path / 'mine.gin').write_text(header + '\n'.join(lines) + '\n')
  _main(
    'train',
    *_MODEL,
    f'--gin_file={tmp_path}/mine.gin',
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.TRAIN_STEPS=1',
    f'--train_file={run}/train.csv',
  )
  config = (tmp_path / 'run' / 'config.gin').read_text().replace('\\\n    ', '')  # of long lines
  assert "data.FileTask.inputs = 'who is {question}?'" in config
  assert f"data.FileTask.train_file = '{run}/train.csv'" in config


def test_a_field_that_the_records_lack(run, tmp_path, capsys):
  words = ['infer', str(run / 'run'), f'--input={run}/test.csv', f'--output={tmp_path}/a.csv']
  assert cli.main([*words, '--keep_fields=idd']) == 2
  assert "no 'idd'. Did you mean 'id'?" in capsys.readouterr().err
  # Nothing is written for which the corrected command would be one with other settings.
  assert not list(tmp_path.iterdir())
  gin.clear_config()
  assert cli.main([*words, '--keep_fields=id']) == 0


def test_formats_of_inputs_and_texts_that_utf_8_lacks(run, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(b'id,question\n7,z\n')))
  _main('infer', run / 'run', '--input=-', '--input_format=csv', f'--output={tmp_path}/a.jsonl')
  assert [row['inputs'] for row in _read(tmp_path / 'a.jsonl')] == [
    {'inputs_pretokenized': 'what is z?'}
  ]
  gin.clear_config()
  (tmp_path / 'new.jsonl').write_text('{"question": "z", "half": "\\ud800", "more": [1]}\n')
  words = [f'--input={tmp_path}/new.jsonl', f'--output={tmp_path}/b.csv', '--keep_fields=all']
  _main('infer', run / 'run', *words)
  (row,) = csv.DictReader((tmp_path / 'b.csv').read_text(encoding='utf-8').splitlines())
  assert (row['half'], row['more']) == ('\\ud800', '[1]')


def test_lines_and_standard_input_fill_the_template(run, tmp_path, monkeypatch, capsys):
  (tmp_path / 'new.txt').write_text('x, y\nz\n')
  _main('infer', run / 'run', f'--input={tmp_path}/new.txt', f'--output={tmp_path}/a.jsonl')
  assert [row['inputs']['inputs_pretokenized'] for row in _read(tmp_path / 'a.jsonl')] == [
    'what is x, y?',
    'what is z?',
  ]
  gin.clear_config()
  monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(b'z\n')))
  capsys.readouterr()
  _main('infer', run / 'run', '--input=-', '--output=-', '--input_template=who is {name}?')
  assert json.loads(capsys.readouterr().out)['inputs'] == {'inputs_pretokenized': 'who is z?'}


def test_a_separator_of_the_run_is_for_tables_only(run, tmp_path):
  config = (run / 'run' / 'config.gin').read_text()
  try:
    (run / 'run' / 'config.gin').write_text(config + "\ndata.FileTask.separator = ';'\n")
    (tmp_path / 'new.csv').write_text('id;question\n7;x, y\n')
    (tmp_path / 'new.jsonl').write_text('{"question": "x, y"}\n')
    for name in ('new.csv', 'new.jsonl'):
      out = tmp_path / f'{name}.out'
      _main('infer', run / 'run', f'--input={tmp_path}/{name}', f'--output={out}')
      gin.clear_config()
      (row,) = _read(out)
      assert row['inputs'] == {'inputs_pretokenized': 'what is x, y?'}
  finally:
    (run / 'run' / 'config.gin').write_text(config)


def test_scores_need_targets(run, tmp_path):
  scores = '--gin.infer_script.infer.mode=score'
  out = f'--output={tmp_path}/a.jsonl'
  _main('infer', run / 'run', f'--input={run}/test.csv', out, scores)
  assert len(_read(tmp_path / 'a.jsonl')) == 5
  gin.clear_config()
  (tmp_path / 'no.csv').write_text('question\nx\n')
  status = cli.main(['infer', str(run / 'run'), f'--input={tmp_path}/no.csv', out + 'x', scores])
  assert status == 2


def test_another_file_is_evaluated(run, capsys):
  (run / 'other.csv').write_text('question,answer\nx,a\ny,b\nz,c\n')
  _main('eval', run / 'run', f'--validation_file={run}/other.csv', f'--gin.EVAL_OUTPUT_DIR={run}/e')
  assert 'other.csv: 3 records' in capsys.readouterr().err + str(list(run.glob('e/*')))


@pytest.mark.parametrize(
  'argv, message',
  [
    (
      ['infer', 'RUN', '--input=RUN/../test.csv', '--output=x.jsonl', '--keep_fields=score'],
      'is the name of a part',
    ),
    (
      ['infer', 'RUN', '--input=RUN/../test.csv', '--output=x.jsonl', '--input_template={nothing}'],
      'no column .nothing',
    ),
    (
      ['infer', 'RUN', '--input=RUN/../two.txt', '--output=x.jsonl', '--input_template={a}{b}'],
      'has 2 columns',
    ),
    (
      ['infer', 'RUN', '--input=RUN/../test.csv', '--output=x.jsonl', '--keep_fields=anwser'],
      "no 'anwser'. Did you mean 'answer'.*or --keep_fields",
    ),
    (
      ['infer', 'RUN', '--input=RUN/../test.csv', '--output=x.parquet'],
      'a table if the name ends in .csv',
    ),
    (
      ['infer', 'RUN', '--input=RUN/../test.csv', '--output=x.csv', '--num_shards=2'],
      'results of several workers are merged as lines. Choose a name that ends in .jsonl',
    ),
    (
      ['train', *_MODEL, '--gin.MODEL_DIR=x', '--train_file=RUN/../test.csv'],
      r'FileTask\.targets. must be the name of a column.*got None. Set it with --targets=answer',
    ),
    (
      [
        *('train', '--gin_file=recipes/finetune_files.gin', '--gin.MODEL_DIR=x'),
        '--gin.INITIAL_CHECKPOINT_PATH=y',
      ],
      'own files with --train_file, --inputs and --targets',
    ),
    (
      ['train', *_MODEL, '--gin.MODEL_DIR=x', '--gin.TRAIN_STEPS=1', '--inputs=question'],
      'need a run whose task is data.FileTask.*for training also --train_file',
    ),
  ],
)
def test_bad_input(run, tmp_path, monkeypatch, capsys, argv, message):
  monkeypatch.chdir(tmp_path)
  (run / 'two.txt').write_text('x\n')
  assert cli.main([word.replace('RUN', str(run / 'run')) for word in argv]) == 2
  captured = capsys.readouterr()
  assert re.search(message, captured.err)
  assert not (tmp_path / 'x').exists()


def test_a_run_with_another_task_needs_templates(tmp_path, capsys):
  argv = [
    'eval',
    *_MODEL,
    '--validation_file=x.csv',
    '--gin.CHECKPOINT_PATH=x',
    '--gin.EVAL_OUTPUT_DIR=y',
  ]
  assert cli.main(argv) == 2
  assert 'need a run whose task is data.FileTask' in capsys.readouterr().err
