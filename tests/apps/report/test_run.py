"""Pages about runs: what they say, and that they are safe and need nothing else."""

import html.parser
import json
import re
import time

import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite.apps.report import run as report
from t5x_lite.apps.report import run_record
from t5x_lite.command_line import cli
from t5x_lite.storage import files

_EVIL = '<script>alert("x")</script><img src=http://a.b/c>&amp;\u202e'
_CONFIG = """
TRAIN_STEPS = 60
LEARNING_RATE = {rate}
TASK_FEATURE_LENGTHS = {{'inputs': 16, 'targets': 8}}
MODEL_DIR = '/home/me/runs/{name}'
API_KEY = 'k-123456'
train_script.train.total_steps = %TRAIN_STEPS
data.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS
mine.load.folder = '/home/me/private/books'
"""


def _event(kind, step=None, seconds=None, wall_time=1000.0, **details):
  return {
    'event': kind,
    'wall_time': wall_time,
    'step': step,
    'process': 0,
    'seconds': seconds or {},
    **details,
  }


_START = [
  _event('start', version='0.1.0', hardware='cpu-1'),
  _event('restored', 0, source='/a/base'),
]
_EVENTS = [
  *_START,
  _event('first_step', 1, {'compiling': 60.0}),
  _event('warning', 20, level='warning', message='disk is slow'),
  _event('warning', 40, level='warning', message='disk is slow'),
  _event('save_committed', 60, {'step': 30.0, 'saving': 10.0}, checkpoint=60),
]
_DONE = [*_EVENTS, _event('stop', 60, cause='completed')]


def _write_lines(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(row if isinstance(row, str) else json.dumps(row) + '\n' for row in rows))


def _run(
  folder, *, rate=0.1, events=_DONE, task='task', losses=(4.0, 1.0, 0.5, 2.0), prediction='no'
):
  """Writes the files of a run whose metrics were written at the steps 15, 30, 45, 60."""
  steps = range(15, 61, 15)
  train = [
    {'step': s, 'wall_time': 1000.0 + s, 'loss': loss, 'learning_rate': rate, 'timing/seconds': 1.0}
    for s, loss in zip(steps, losses, strict=True)
  ]
  _write_lines(folder / 'train/metrics.jsonl', train)
  losses = [{'step': s, 'loss': 60 / s} for s in steps]
  _write_lines(folder / f'training_eval/{task}/metrics.jsonl', losses)
  scores = [{'step': s, 'exact_match': s / 60} for s in steps]
  _write_lines(folder / f'inference_eval/{task}/metrics.jsonl', scores)
  predictions = [
    {'index': 0, 'inputs': 'first', 'targets': 'green', 'prediction': 'green'},
    {'index': 1, 'inputs': 'second', 'targets': 'black', 'prediction': prediction},
    {'index': 2, 'inputs': 'third', 'targets': 'red', 'prediction': 'rod'},
  ]
  _write_lines(folder / f'inference_eval/{task}/predictions-60.jsonl', predictions)
  _write_lines(folder / 'events.jsonl', events)
  (folder / 'config.gin').write_text(_CONFIG.format(rate=rate, name=folder.name))
  return folder


class _Reader(html.parser.HTMLParser):
  """Texts of a page by kind of element, its tables, and its attributes."""

  def __init__(self, text):
    super().__init__()
    self.tags = []
    self.attributes = []
    self.rows = []
    self.text = ''
    self._open = []
    self.feed(text)
    self.text = ' '.join(self.text.split())

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    self._open.append(tag)
    if tag == 'tr':
      self.rows.append([])
    elif tag in ('td', 'th'):
      self.rows[-1].append('')

  def handle_endtag(self, tag):
    while self._open and self._open.pop() != tag:
      pass

  def handle_data(self, data):
    if 'style' in self._open:
      return
    self.text += data + ' '
    if {'td', 'th'} & set(self._open):
      self.rows[-1][-1] += data


def _page(*runs, out):
  return _Reader(report.report(list(runs), out).read_text())


@pytest.fixture(name='out')
def _out(tmp_path):
  return tmp_path / 'page.html'


def test_a_page_of_one_run(tmp_path, out):
  page = _page(_run(tmp_path / 'a'), out=out)
  for text in (
    '✓ good Status Finished Step 60 of 60, without a checkpoint.',
    'Result exact_match 1 exact_match of inference_eval/task at step 60.',
    'Goodput 30%',
    '▲ look here Warnings 2 The newest: disk is slow',
    'Training curves',
    'Evaluation curves',
  ):
    assert text in page.text
  assert ['loss', '2 at 60', '0.5 at 45'] in page.rows  # of training
  assert ['loss', '1 at 60', '1 at 60'] in page.rows and [
    'learning_rate',
    '0.1 at 60',
    '–',
  ] in page.rows
  assert ['disk is slow', '2', '40'] in page.rows
  assert ['compiling', '60.0% (1:00)'] in page.rows
  # The worst example comes first: nothing of 'no' is in 'black'.
  examples = [row[0] for row in page.rows if row[0] in ('first', 'second', 'third')]
  assert examples == ['second', 'third', 'first']
  assert '1 predictions are equal to a target' in page.text
  assert 'k-123456' not in page.text and '/home/me' not in page.text and 'books' in page.text


def test_a_page_of_several_runs_has_what_differs(tmp_path, out):
  runs = [_run(tmp_path / 'a'), _run(tmp_path / 'b', rate=0.5, task='other', events=[])]
  page = _page(*runs, out=out)
  assert ['LEARNING_RATE', '0.1', '0.5'] in page.rows
  names = [row[0] for row in page.rows]
  assert not {'TRAIN_STEPS', 'MODEL_DIR', 'mine.load.folder'} & set(names)
  assert ['loss', 'a', '2 at 60', '0.5 at 45'] in page.rows
  for row in (
    ['', 'a', 'b'],
    ['Status', 'Finished', 'Unknown'],
    ['Result', 'exact_match 1', 'exact_match 1'],
    ['Goodput', '30%', '–'],
    ['Time', '1:40', '–'],
    ['Starts', '1', '–'],
    ['Warnings', '2', '–'],
    ['Step', '60 of 60', '60 of 60'],
  ):
    assert row in page.rows
  assert 'Parameters' not in names  # no run has them
  assert 'task other' in page.text and 'The run has no events.jsonl' in page.text


@pytest.mark.parametrize(
  'text, note',
  [
    ('TRAIN_STEPS = 5\n', '200 parameters that differ, or values that a run lacks'),
    ('', 'b has no config.gin with values.'),
    (None, 'b has no config.gin with values.'),
  ],
)
def test_runs_of_which_one_has_nearly_no_configuration(tmp_path, out, text, note):
  runs = [_run(tmp_path / name) for name in 'ab']
  long = 'x' * 10_000
  lines = ''.join(f"mine.load.parameter_{k} = '{long}'\n" for k in range(194))
  (runs[0] / 'config.gin').write_text(_CONFIG.format(rate=0.1, name='a') + lines)
  if text is None:
    (runs[1] / 'config.gin').unlink()
  else:
    (runs[1] / 'config.gin').write_text(text)
  page = _page(*runs, out=out)
  assert note in page.text
  assert (['TRAIN_STEPS', '60', '5'] in page.rows) == bool(text)
  parameters = [row for row in page.rows if row[0].startswith('mine.load.')]
  assert len(parameters) < 100 and out.stat().st_size < 500_000
  assert ('100 more values are only in the config.gin of the runs.' in page.text) == bool(text)


@pytest.mark.parametrize(
  'events, state, is_good',
  [
    (_DONE, 'finished', True),
    ([*_EVENTS, _event('stop', 60, cause='error', message='no')], 'failed', False),
    ([*_EVENTS, _event('stop', 60, cause='non_finite', message='no')], 'failed: not finite', False),
    ([*_EVENTS, _event('stop', 60, cause='signal')], 'stopped by a signal', False),
    ([*_EVENTS, _event('stop', 60, cause='data_ended')], 'ended with its data', None),
    (_EVENTS, 'no end recorded', False),
    ([*_DONE, *_START], 'no end recorded', False),
    ([*_EVENTS, _event('progress', 60, wall_time=time.time() + 1e5)], 'running', None),
    ([], 'unknown', None),
    (
      [_event('rollback', 3), {'event': 3}, '{"event', _event('start', seconds={'step': 'x'})],
      'unknown',
      None,
    ),
  ],
)
def test_status(tmp_path, out, events, state, is_good):
  run = run_record.read('a', _run(tmp_path / 'a', events=events))
  assert (run.state, run.is_good) == (state, is_good)
  verdict = {True: '✓ good', False: '▲ look here', None: ''}[is_good]
  assert f'{verdict} Status {state.capitalize()}' in _page(run.path, out=out).text


def test_texts_are_never_elements(tmp_path, out):
  task = _EVIL.replace('/', '')
  events = [
    *_EVENTS,
    _event('warning', message=_EVIL, level=_EVIL),
    _event('stop', cause='error', message=_EVIL),
  ]
  run = _run(tmp_path / task, task=task, prediction=_EVIL, events=events)
  path = run / 'config.gin'
  path.write_text(path.read_text() + f'NOTE = {_EVIL!r}\n')
  lines = run / 'train/metrics.jsonl'
  lines.write_text(json.dumps({'step': 1, _EVIL: 1.0, 'loss': 1.0}) + '\n' + lines.read_text())
  for runs in ([run], [run, _run(tmp_path / 'b')]):
    page = _page(*runs, out=out)
    assert '<script>alert("x")</script>' in page.text
    assert not {'script', 'img', 'link', 'iframe', 'object'} & set(page.tags)
    assert '\u202e' not in out.read_text()
    # Nothing is loaded: references are to elements of the page.
    loading = [value for name, value in page.attributes if name in ('src', 'href', 'xlink:href')]
    assert all(value.startswith('#') for value in loading) and '@import' not in out.read_text()


@pytest.mark.parametrize('wall_time', [-1.0, 1e300, np.nan, np.inf])
def test_times_that_no_clock_has_are_those_of_damaged_lines(tmp_path, out, wall_time):
  run = _run(tmp_path / 'a', events=[_event('start', wall_time=wall_time), *_DONE])
  path = run / 'train/metrics.jsonl'
  path.write_text(path.read_text() + json.dumps({'step': 75, 'loss': 1, 'wall_time': wall_time}))
  path.write_text(path.read_text() + '\n')
  page = _page(run, out=out)
  assert 'a/train/metrics.jsonl:5 is damaged and was skipped' in page.text
  assert 'Started 1970-01-01 00:16 UTC' in page.text


@pytest.mark.parametrize('size', [{}, {'num_examples': 'many'}])
def test_a_sample_without_its_size_is_unknown(tmp_path, out, size):
  numbers = {name: {'inputs': 1} for name in ('lengths', 'num_cut', 'num_tokens', 'num_lost')}
  run = _run(tmp_path / 'a', events=[*_START, _event('data_sampled', 0, **numbers, **size)])
  assert 'has not recorded how many examples are cut' in _page(run, out=out).text


def test_damaged_and_missing_lines_are_named(tmp_path, out, caplog):
  run = _run(tmp_path / 'a')
  path = run / 'train/metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  missing = {'missing': {'after_step': 15, 'to_step': 30, 'cause': 'was deleted'}}
  _write_lines(path, [lines[0], '{"step": 20, "lo\n', missing, *lines[1:], '{"step": 75, "loss'])
  page = _page(run, out=out)
  assert 'a/train/metrics.jsonl:2 is damaged and was skipped' in page.text
  # The last line may be one that the run is writing.
  assert 'metrics.jsonl:7' not in page.text and 'metrics.jsonl:7' not in caplog.text
  assert 'lacks the lines after step 15 up to step 30: the file was deleted' in page.text
  assert ['loss', '2 at 60', '0.5 at 45'] in page.rows


def test_only_the_first_damaged_lines_are_named(tmp_path, out):
  run = _run(tmp_path / 'a')
  path = run / 'train/metrics.jsonl'
  path.write_text(path.read_text() + 'damaged\n' * 25)
  page = _page(run, out=out)
  assert page.text.count('is damaged and was skipped') == 20
  assert 'a/train has 5 more damaged lines.' in page.text


def test_values_that_are_not_finite(tmp_path, out):
  page = _page(_run(tmp_path / 'a', losses=(3.0, 1.0, 'NaN', 'NaN')), out=out)
  assert ['loss', 'NaN at 60', '1 at 30'] in page.rows
  assert '2 of 4 values are NaN or infinite' in page.text


def test_numbers_of_long_runs_are_exact_and_the_page_is_small(tmp_path, out):
  run = _run(tmp_path / 'a')
  steps = np.arange(1, 20_001)
  values = 1.0 + np.random.default_rng(0).random(len(steps))
  values[7_777] = 0.25
  rows = [{'step': int(s), 'loss': v} for s, v in zip(steps, values.tolist(), strict=True)]
  _write_lines(run / 'train/metrics.jsonl', rows)
  page = _page(run, out=out)
  assert ['loss', f'{values[-1]:.6g} at 20,000', '0.25 at 7,778'] in page.rows
  assert out.stat().st_size < 300_000


_SAMPLED = _event(
  'data_sampled',
  num_examples=200,
  lengths={'inputs': 16, 'targets': 8},
  num_cut={'inputs': 50, 'targets': 0},
  num_tokens={'inputs': 1000, 'targets': 100},
  num_lost={'inputs': 100, 'targets': 0},
)


@pytest.mark.parametrize(
  'events, rows, text',
  [
    (
      [*_DONE, _SAMPLED],
      [['inputs', '16', '25%', '10%'], ['targets', '8', '0%', '0%']],
      'in the first 200 examples',
    ),
    (
      [*_DONE, {**_SAMPLED, 'num_cut': 'x'}],
      [['inputs', '16', '–', '–'], ['targets', '8', '–', '–']],
      'has not recorded how many examples are cut',
    ),
  ],
)
def test_lengths_and_truncation(tmp_path, out, events, rows, text):
  run = _run(tmp_path / 'a', events=events)
  path = run / 'train/metrics.jsonl'
  padding = {'step': 0, 'non_padding_fraction/decoder_target_tokens': 0.75}
  path.write_text(json.dumps(padding) + '\n' + path.read_text())
  page = _page(run, out=out)
  assert [row for row in page.rows if row[0] in ('inputs', 'targets')] == rows
  assert text in page.text and 'not padding: decoder_target_tokens 75%' in page.text
  assert ('Cut examples' in page.text.split('Final metrics')[0]) == (rows[0][2] != '–')


def test_each_start_of_a_run_that_was_killed(tmp_path, out):
  killed = _EVENTS[:-1]
  events = [*killed, _event('start'), _event('restored', 30), *_DONE[2:]]
  page = _page(_run(tmp_path / 'a', events=events), out=out)
  ends = [row[1:] for row in page.rows if row[0] == '1970-01-01 00:16 UTC']
  assert ends == [['0', '40', 'no end recorded'], ['30', '60', 'completed']]


def test_the_load_of_experts_is_that_of_the_last_line(tmp_path, out):
  run = _run(tmp_path / 'a')
  path = run / 'train/metrics.jsonl'
  name = 'experts/encoder/layers_3'
  line = {'step': 75, f'{name}/load': [0.5, 0.25, 0.25, 0.0], f'{name}/choices_dropped': 0.125}
  path.write_text(path.read_text() + json.dumps(line) + '\n')
  page = _page(run, out=out)
  assert ['encoder layer 3', '', '4', '2.00×', '0.00×', '1', '12.5%'] in page.rows
  assert 'up to step 75' in page.text
  damaged = {'step': 90, f'{name}/load': [[1.0], [1.0, 2.0]]}
  path.write_text(path.read_text() + json.dumps(damaged) + '\n')
  assert 'encoder layer 3' not in _page(run, out=out).text


@pytest.mark.parametrize(
  'make, out, fragments',
  [
    (
      lambda path: path.mkdir(),
      'x.html',
      ['got a directory without metrics', 'train/metrics.jsonl'],
    ),
    (lambda path: None, 'x.html', ['got no directory']),
    (_run, 'x.pdf', ["`report.out` must be a file name that ends with .html, got 'x.pdf'"]),
    (
      _run,
      'no/such/folder/x.html',
      ["Cannot write the report to 'no/such/folder/x.html'", '--out'],
    ),
  ],
)
def test_errors(tmp_path, make, out, fragments):
  make(tmp_path / 'a')
  with pytest.raises(errors.T5xLiteError) as caught:
    report.report([tmp_path / 'a'], out)
  for fragment in fragments:
    assert fragment in str(caught.value)


def test_a_page_replaces_a_file_but_not_the_target_of_a_link(tmp_path):
  run = _run(tmp_path / 'a')
  (tmp_path / 'letter.html').write_text('of the user')
  (run / 'report.html').symlink_to('../letter.html')
  with pytest.raises(errors.LinkedFileError, match=r"report.html' must be .*letter.html"):
    report.report([run])
  assert (tmp_path / 'letter.html').read_text() == 'of the user'
  (run / 'report.html').unlink()
  (run / 'report.html').write_text('an earlier page')
  assert report.report([run]) == run / 'report.html'
  assert 'Final metrics' in (run / 'report.html').read_text()


def test_command(tmp_path, capsys):
  runs = [str(_run(tmp_path / name)) for name in 'ab']
  assert cli.main(['report', *runs, f'--out={tmp_path / "x.html"}']) == 0
  assert capsys.readouterr().out.strip() == str(tmp_path / 'x.html')
  assert 'Comparison of 2 runs' in (tmp_path / 'x.html').read_text()


def test_a_page_of_a_run_in_a_store(store, tmp_path):
  local = _run(tmp_path / 'a')
  for path in filter(lambda found: found.is_file(), local.rglob('*')):
    files.write(
      files.path(store.root) / 'a' / path.relative_to(local).as_posix(), path.read_bytes()
    )
  path = report.report([f'{store.root}/a'])
  assert str(path) == f'{store.root}/a/report.html'
  texts = [found.read_text() for found in (path, report.report([local]))]
  plain = [re.sub(r'\d{4}-\d\d-\d\d \d\d:\d\d UTC', '', text) for text in texts]
  assert plain[0] == plain[1].replace(f'{local}/', '')
