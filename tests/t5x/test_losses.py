"""The comparison of trainings with T5X: its arithmetic, its form without T5X, and the gin files that it writes."""

import math
import pathlib

import gin
import pytest

from t5x_lite import gin_utils
from tests.compat import t5x_gin
from tests.t5x import losses


@pytest.mark.parametrize(
  'ours, theirs, expected',
  [
    ({1: 2.0, 2: -4.0}, {1: 2.0, 2: -4.0}, 0.0),
    ({2: 5.0, 1: 2.0}, {1: 2.0, 2: 4.0}, 0.25),  # by step, not by position
    ({1: 2.0, 2: -5.0}, {1: 2.0, 2: -4.0}, 0.25),
    ({1: 2.0, 2: 4.0}, {1: 1.0, 2: 4.0}, 1.0),  # of T5X's value
    ({1: math.nan, 2: 4.0}, {1: 1.0, 2: 4.0}, math.nan),
    ({1: math.inf}, {1: 1.0}, math.inf),
  ],
)
def test_largest_difference(ours, theirs, expected):
  assert losses.largest_difference(ours, theirs) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize('ours, theirs', [({}, {}), ({1: 1.0}, {1: 1.0, 2: 2.0}), ({1: 1.0}, {})])
def test_records_of_different_steps_are_not_compared(ours, theirs):
  with pytest.raises(ValueError, match='Expected values for'):
    losses.largest_difference(ours, theirs)


def test_the_table_marks_and_counts_what_is_above_its_limit(capsys):
  made_up = {
    'same': losses.Differences(0.0, 3.4e-8),
    'loss': losses.Differences(2e-3, 1e-7),
    'norm': losses.Differences(1e-7, 1.6e-4),
    'nan': losses.Differences(math.nan),
  }
  comparisons = {
    name: losses.Comparison(lambda values=values: values, 1e-5) for name, values in made_up.items()
  }
  assert losses.print_table(comparisons) == 3
  assert capsys.readouterr().out.splitlines() == [
    '| case | losses | gradient norms |',
    '|---|---|---|',
    '| same | 0e+0 | 3e-8 |',
    '| loss (above the limit 1e-5) | 2e-3 | 1e-7 |',
    '| norm (above the limit 1e-5) | 1e-7 | 2e-4 |',
    '| nan (above the limit 1e-5) | nan |  |',
  ]


def test_without_t5x_its_recordings_are_compared(capsys):
  names = ['net_decoder_only_causal', 'train_multi']
  assert losses.main([f'--case={name}' for name in names]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('No checkout of T5X: recordings of T5X in tests/golden/t5x')
  assert [line.split(' ')[1] for line in lines[4:]] == names


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--t5x=.'], '--t5x and --python belong together'),
    (['--t5x=tests', '--python=python'], 'is not a checkout of T5X: it has no t5x/train.py'),
    (['--case=T5 1.1'], "--case must be one of ['net_t5_1_0_tiny'"),
  ],
)
def test_errors_of_the_command(arguments, expected, capsys):
  with pytest.raises(SystemExit):
    losses.main(arguments)
  assert expected in capsys.readouterr().err


@pytest.mark.parametrize('name', losses.CASES)
def test_gin_files_configure_a_training_of_t5x_lite(name, tmp_path):
  pytest.importorskip('seqio')
  path = tmp_path / 'case.gin'
  path.write_text(losses.gin_text(losses.CASES[name]))
  values = {'MODEL_DIR': "'runs/x'"}
  try:
    configuration = gin_utils.load(
      t5x_gin.ENTRIES['train'], gin_utils.read([str(path)], placeholders=values)
    )
    dataset_cfg = configuration.argument('train_dataset_cfg')
  finally:
    gin.clear_config()
  assert dataset_cfg.pack == ('packed' in name)
  assert dataset_cfg.batch_size == 8


def test_the_page_has_the_differences_of_all_cases():
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'from_t5x.md'
  text = page.read_text(encoding='utf-8')
  section = text.partition('\n## Losses of both programs\n')[2].partition('\n## ')[0]
  rows = [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in section.splitlines()
    if line.startswith('|')
  ]
  assert rows[0] == ['case', 'losses', 'gradient norms']
  differences = {name: (float(loss), float(norm)) for name, loss, norm in rows[2:]}
  assert list(differences) == list(losses.CASES)
  for name, values in differences.items():
    assert max(values) <= losses.CASES[name].limit, name
