"""`--labels_file` and its gin bindings score labels in the commands that predict."""

import csv
import json

import pytest

from t5x_lite import decoding
from t5x_lite import notebook
from t5x_lite.command_line import cli

_LABELS = ['no', 'yes', 'a,b', 'm']
_IN_GIN = """
from __gin__ import dynamic_registration
from t5x_lite import decoding
from t5x_lite import models
models.EncoderDecoderModel.decode_fn = @decoding.LabelScores()
decoding.LabelScores.labels = {labels!r}
"""


@pytest.fixture
def labels_file(tmp_path):
  path = tmp_path / 'labels.txt'
  path.write_text('\n'.join(_LABELS))
  return path


def _rows(tmp_path, name='out.jsonl'):
  return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def _best(scores):
  return max(scores, key=scores.get)


def test_infer_writes_the_best_label_and_the_scores_of_all(
  command_line, labels_file, tmp_path, capsys
):
  arguments = command_line('infer')
  assert cli.main([*arguments, f'--labels_file={labels_file}']) == 0
  rows = _rows(tmp_path)
  assert len(rows) == 2
  for row in rows:
    assert list(row['aux']['scores']) == _LABELS
    assert row['prediction'] == _best(row['aux']['scores'])
  # The report has the score of the best label.
  report = capsys.readouterr().out
  best = max(rows[0]['aux']['scores'].values())
  assert f'{best:.4g}' in report
  # Equal to the scores of pairs of input and target.
  pairs = tmp_path / 'pairs.jsonl'
  lines = [{'inputs': text, 'targets': label} for text in ('x', 'y') for label in _LABELS]
  pairs.write_text('\n'.join(map(json.dumps, lines)))
  outputs = [f'--input={pairs}', f'--output={tmp_path}/scores.jsonl']
  assert cli.main([*arguments[:2], *outputs, '--gin.infer_script.infer.mode=score']) == 0
  want = [row['score'] for row in _rows(tmp_path, 'scores.jsonl')]
  found = [score for row in rows for score in row['aux']['scores'].values()]
  assert found == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_a_table_has_a_column_for_each_label(command_line, labels_file, tmp_path):
  arguments = command_line('infer')
  flag = f'--labels_file={labels_file}'
  assert cli.main([*arguments, flag]) == 0
  assert cli.main([*arguments[:-1], f'--output={tmp_path}/out.csv', flag]) == 0
  with open(tmp_path / 'out.csv', encoding='utf-8', newline='') as file:
    table = list(csv.DictReader(file))
  assert list(table[0]) == ['prediction', *(f'scores.{label}' for label in _LABELS), 'inputs']
  for row, want in zip(table, _rows(tmp_path), strict=True):
    assert row['prediction'] == want['prediction']
    for label, score in want['aux']['scores'].items():
      assert float(row[f'scores.{label}']) == pytest.approx(score)


def test_a_run_resumes_only_with_the_same_labels(command_line, labels_file, capsys):
  arguments = [*command_line('infer'), f'--labels_file={labels_file}']
  assert cli.main(arguments) == 0
  assert cli.main(arguments) == 0
  assert 'computed before' in capsys.readouterr().out
  labels_file.write_text('yes\nno\n')
  for changed in (arguments, arguments[:-1]):
    assert cli.main(changed) == 2
    assert 'has other settings' in capsys.readouterr().err


def test_eval_computes_metrics_of_the_best_label(command_line, labels_file, tmp_path):
  arguments = [*command_line('eval'), '--gin.DATA_SOURCE=builtin']
  # Keywords of the task: with all of them as labels, predictions are keywords.
  labels_file.write_text('for\nif\nnot\n')
  assert cli.main([*arguments, f'--labels_file={labels_file}']) == 0
  folder = tmp_path / 'eval/inference_eval/python_keyword_cloze'
  rows = _rows(folder, 'predictions-5.jsonl')
  assert len(rows) == 8 and {row['prediction'] for row in rows} <= {'for', 'if', 'not'}
  accuracy = sum(row['prediction'] == row['targets'] for row in rows) / 8
  assert _rows(folder, 'metrics.jsonl')[-1]['exact_match'] == accuracy
  labels_file.write_text('for\nif\n')
  assert cli.main([*arguments, f'--labels_file={labels_file}']) == 2


def test_metrics_of_own_files_are_those_of_the_best_label(command_line, labels_file, tmp_path):
  table = tmp_path / 'reviews.csv'
  table.write_text('text,label\nx,yes\ny,no\nz,yes\n')
  own = [f'--validation_file={table}', '--inputs=text', '--targets=label']
  flags = ['--metrics=accuracy,macro_f1', f'--labels_file={labels_file}']
  assert cli.main([*command_line('eval'), *own, *flags]) == 0
  (folder,) = (tmp_path / 'eval/inference_eval').iterdir()
  rows = _rows(folder, 'predictions-5.jsonl')
  assert {row['prediction'] for row in rows} <= set(_LABELS)
  found = _rows(folder, 'metrics.jsonl')[-1]
  num_right = sum(row['prediction'] == row['targets'] for row in rows)
  assert found['accuracy'] == pytest.approx(100 * num_right / 3) and 'macro_f1' in found


def test_a_configuration_scores_labels(command_line, labels_file, tmp_path):
  arguments = command_line('infer')
  assert cli.main([*arguments, f'--labels_file={labels_file}']) == 0
  want = _rows(tmp_path)
  config = tmp_path / 'labels.gin'
  config.write_text(_IN_GIN.format(labels=_LABELS))
  more = [f'--gin_file={config}', '--gin.infer_script.infer.mode=predict_with_aux']
  assert cli.main([*arguments[:-1], f'--output={tmp_path}/gin.jsonl', *more]) == 0
  assert _rows(tmp_path, 'gin.jsonl') == want
  # The results of a model's labels are not those of others.
  config.write_text(_IN_GIN.format(labels=str(labels_file)))
  again = [*arguments[:-1], f'--output={tmp_path}/file.jsonl', *more]
  assert cli.main(again) == 0
  labels_file.write_text('yes\nno\n')
  assert cli.main(again) == 2


def test_training_evaluates_by_labels(command_line, tmp_path):
  flags = [
    '--gin.EVAL_DECODE_FN=@decoding.LabelScores()',
    "--gin.decoding.LabelScores.labels=('for', 'if')",
  ]
  assert cli.main([*command_line('train'), *flags]) == 0
  rows = _rows(tmp_path / 'run/inference_eval/python_keyword_cloze', 'predictions-1.jsonl')
  assert rows and {row['prediction'] for row in rows} <= {'for', 'if'}


def test_an_interactive_model_scores_labels(command_line, decoded_run, tmp_path):
  config = tmp_path / 'labels.gin'
  config.write_text(_IN_GIN.format(labels=_LABELS))
  flags = [f'--gin_file={config}', '--gin.infer_script.infer.mode=predict_with_aux']
  assert cli.main([*command_line('infer'), *flags]) == 0
  model = notebook.open_run(decoded_run, gin_files=[str(config)], output_dir=str(tmp_path / 'open'))
  pairs, aux = model.predict_with_aux(['x', 'y'])
  assert isinstance(model.model.decode_fn, decoding.EncodedLabels)
  for (_, prediction), scores, want in zip(pairs, aux['scores'], _rows(tmp_path), strict=True):
    assert prediction == want['prediction']
    assert list(scores) == pytest.approx(list(want['aux']['scores'].values()), rel=1e-5)
  model.close()


@pytest.mark.parametrize('command', ['eval', 'infer'])
@pytest.mark.parametrize(
  'flags, message',
  [
    (['--decode=mbr'], '--labels_file and --decode cannot be combined'),
    (['--allowed_outputs=a.txt'], '--labels_file and --allowed_outputs cannot be combined'),
    (['--min_decode_len=2'], '--labels_file and --min_decode_len cannot be combined'),
    (
      ['--gin.models.EncoderDecoderModel.predict_batch_with_aux.num_decodes=3'],
      '`num_decodes` must be',
    ),
    (
      [
        '--gin.models.EncoderDecoderModel.constraints=@decoding.Constraints()',
        '--gin.decoding.Constraints.repetition_penalty=2',
      ],
      'remove the constraints',
    ),
    (['--gin.TASK_FEATURE_LENGTHS={"inputs": 16, "targets": 3}'], 'at most 3 tokens'),
  ],
)
def test_contradictions_are_rejected(command, flags, message, command_line, labels_file, capsys):
  assert cli.main([*command_line(command), f'--labels_file={labels_file}', *flags]) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize(
  'content, message',
  [(None, "got 'missing.txt'"), ('a\n\n', 'line 2 of'), ('a\na\n', 'repeats line 1')],
)
def test_bad_files_are_rejected(content, message, command_line, labels_file, capsys):
  path = 'missing.txt'
  if content is not None:
    labels_file.write_text(content)
    path = labels_file
  assert cli.main([*command_line('infer'), f'--labels_file={path}']) == 2
  assert message in capsys.readouterr().err


def test_scores_of_targets_have_no_labels(command_line, labels_file, capsys):
  flags = [f'--labels_file={labels_file}', '--gin.infer_script.infer.mode=score']
  assert cli.main([*command_line('infer'), *flags]) == 2
  assert "--labels_file must be used with predictions, got mode='score'" in capsys.readouterr().err
