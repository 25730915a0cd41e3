"""Routing reports: reading of records, findings, and the page."""

import builtins
import collections
import html.parser
import pathlib
import re

import numpy as np
import pytest

from moe import __main__ as program
from moe.tools import report
from moe.tools.report import curves
from moe.tools.report import data
from moe.tools.report import figures
from moe.tools.report import findings
from moe.tools.report import html_page as page
from moe.tools.report import maps
from moe.tools.report import style
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.storage import files
from tests.moe.tools import recorded_runs

_NAN = {
  'experts/encoder/layers_1/load': ['NaN'] * 4,
  'experts/encoder/layers_1/router_entropy': 'NaN',
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Returns (run, page of its report) of a run with drops, a dead expert and a period that is not finite."""
  run = tmp_path_factory.mktemp('report') / 'a<b>&"c" $x$'
  recorded_runs.write(run, extra={30: _NAN})
  (run / 'config.gin').write_text(
    "GROUP_SIZE = 64\nmoe.TokensChooseRouter.num_selected = 2\nBATCH_SIZE = '<i>'\n"
    'LEARNING_RATE = 1\nmoe.SparseBlock.group_size = %GROUP_SIZE\n'
  )
  status = cli.main(['report', str(run)], program.PROGRAM)
  assert status == 0
  return run, run / 'routing_report/train/index.html'


# ---- Data -----------------------------------------------------------------------------------------------------------


def test_the_history_has_the_written_rows(tmp_path):
  loads = recorded_runs.write(tmp_path, extra={30: _NAN})
  history = data.read(tmp_path)
  assert history.steps.tolist() == [10, 20, 30, 40, 50, 60]
  assert [layer.name for layer in history.layers] == [
    'encoder/layers_1',
    'encoder/layers_3',
    'decoder/layers_0',
  ]
  first, _, last = history.layers
  assert np.isnan(first.load[2]).all() and np.isnan(first.series['router_entropy'][2])
  np.testing.assert_allclose(last.load, loads['decoder/layers_0'])
  np.testing.assert_allclose(last.relative_load.mean(axis=1), 1.0)
  assert (
    last.num_dead.tolist() == [1] * 6 and np.isnan(first.num_dead[2]) and first.num_dead[3] == 0
  )
  np.testing.assert_allclose(last.over_time('choices_dropped'), 0.06)
  np.testing.assert_allclose(history.totals['loss'], 2.0 - 0.1 * np.arange(6))
  assert history.end == 'steps 51 to 60'


def test_the_end_is_the_last_tenth(tmp_path):
  loads = recorded_runs.write(tmp_path, num_steps=30, period=1)
  history = data.read(tmp_path)
  assert history.num_end == 3 and history.end == 'steps 28 to 30'
  np.testing.assert_allclose(
    history.at_end(history.layers[1].load), loads['encoder/layers_3'][-3:].mean(axis=0)
  )
  np.testing.assert_array_equal(history.at_end(np.r_[np.ones(27), np.nan, 2.0, 4.0]), 3.0)
  assert np.isnan(history.at_end(np.r_[np.ones(27), [np.nan] * 3]))


def test_layers_are_in_numeric_order_and_lines_without_experts_are_left_out(tmp_path):
  recorded_runs.write(
    tmp_path, layers=('decoder/layers_10', 'decoder/layers_9', 'encoder/layers_0')
  )
  path = tmp_path / 'train/metrics.jsonl'
  path.write_text('{"step": 1, "wall_time": 0.0, "loss": 9.0}\n' + path.read_text())
  history = data.read(tmp_path)
  assert [layer.name for layer in history.layers] == [
    'encoder/layers_0',
    'decoder/layers_9',
    'decoder/layers_10',
  ]
  assert history.steps[0] == 10


@pytest.mark.parametrize(
  'layout, fragments',
  [
    ('nothing', ['got no directory']),
    ('empty', ['got a directory without metrics', 'metrics.jsonl']),
    ('dense', ['must be the run of a sparse model', 'without metrics of experts', 't5x_lite plot']),
    ('elsewhere', ['Pass --writer training_eval/task']),
    ('writer', ["got 'trian'. Did you mean 'train'?"]),
  ],
)
def test_runs_without_metrics_of_experts_are_rejected(tmp_path, capsys, layout, fragments):
  run = tmp_path / 'run'
  if layout != 'nothing':
    run.mkdir()
  if layout in ('dense', 'elsewhere'):
    (run / 'train').mkdir()
    (run / 'train/metrics.jsonl').write_text('{"step": 1, "wall_time": 0.0, "loss": 9.0}\n')
  if layout in ('elsewhere', 'writer'):
    recorded_runs.write(run, writer='train' if layout == 'writer' else 'training_eval/task')
  writer = 'trian' if layout == 'writer' else 'train'
  with pytest.raises(DataError, match=re.escape(fragments[0])):
    data.read(run, writer)
  assert cli.main(['report', str(run), f'--writer={writer}'], program.PROGRAM) == 2
  error = capsys.readouterr().err
  assert error.startswith('moe: error: ') and all(fragment in error for fragment in fragments)


# ---- Findings -------------------------------------------------------------------------------------------------------


def test_findings_name_the_problem(tmp_path):
  recorded_runs.write(tmp_path)
  history = data.read(tmp_path)
  states = findings.layer_states(history)
  balance, dead, drops, entropy = findings.findings(history, states)
  assert not balance.is_good and balance.text.startswith(
    '1 of 3 layers is unbalanced: decoder/layers_0 ('
  )
  assert f'expert 0 of decoder/layers_0, with {states[2].largest:.2f} times' in balance.text
  assert not dead.is_good and dead.value == '1'
  assert '1 of 12 experts got no token: decoder/layers_0 (1 of 4)' in dead.text and states[
    2
  ].dead == (3,)
  assert (
    drops.value == '6%'
    and '4% of the choices' in drops.text
    and 'decoder/layers_0 (6%)' in drops.text
  )
  assert entropy.is_good is None and f'{100 / np.log(4):.0f}%' in entropy.value


def test_findings_of_a_good_run_and_of_one_that_recorded_little(tmp_path):
  recorded_runs.write(tmp_path / 'good', drops=False)
  # Without its last layer, which is the bad one.
  history = data.read(tmp_path / 'good')
  history = data.dataclasses.replace(history, layers=history.layers[:2])
  found = findings.findings(history, findings.layer_states(history))
  assert [finding.is_good for finding in found] == [True, True, True, None]
  assert 'No choice was dropped' in found[2].text
  recorded_runs.write(
    tmp_path / 'little',
    extra={60: _NAN},
    num_steps=6,
    without=(
      'choices_dropped',
      'drops_by_position',
      'fraction_tokens_left_behind',
      'router_entropy',
    ),
  )
  history = data.read(tmp_path / 'little')
  *_, drops, entropy, unknown = findings.findings(history, findings.layer_states(history))
  assert drops.value == entropy.value == 'unknown'
  assert unknown.text.startswith('encoder/layers_1 recorded no finite load in the last period')


# ---- Page -----------------------------------------------------------------------------------------------------------


class _Reader(html.parser.HTMLParser):
  """Checks that elements are closed in order; collects attributes and texts."""

  _VOID = {'meta', 'br', 'link', 'img'}

  def __init__(self, text):
    super().__init__()
    self.open, self.ids, self.references, self.texts, self.tags = (
      [],
      [],
      [],
      [],
      collections.Counter(),
    )
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags[tag] += 1
    self._read(attrs)
    if tag not in self._VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags[tag] += 1
    self._read(attrs)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)

  def _read(self, attrs):
    for name, value in attrs:
      if name == 'id':
        self.ids.append(value)
      elif name in ('href', 'src', 'xlink:href'):
        self.references.append(value)
      self.references += [f'#{found}' for found in re.findall(r'url\(#([^)]*)\)', value or '')]


def test_page_is_complete_and_needs_no_network(written, capsys):
  run, path = written
  text = path.read_text()
  reader = _Reader(text)
  assert len(set(reader.ids)) == len(reader.ids)
  assert reader.references
  for reference in reader.references:
    assert (
      reference.startswith('data:image/png;base64,') or reference.removeprefix('#') in reader.ids
    )
  assert '@import' not in text and not re.search(r'url\((?!#)', text)
  assert not {'script', 'link', 'i', 'b'} & set(reader.tags)
  names = {png.stem for png in path.parent.glob('*.png')}
  assert names == figures.NAMES - {'receive_drops'} and reader.tags['svg'] == 2 * len(names)
  assert all(png.read_bytes().startswith(b'\x89PNG\r\n') for png in path.parent.glob('*.png'))
  assert not list(path.parent.glob('.*'))
  shown = ''.join(reader.texts)
  assert 'Routing report: a<b>&"c" $x$' in shown
  for layer in ('encoder/layers_1', 'encoder/layers_3', 'decoder/layers_0'):
    assert layer in shown and layer.replace('/layers_', ' layer ') in shown
  assert text.count('<dl class="settings">') == 1 and 'LEARNING' not in shown
  for name, value in (
    ('GROUP_SIZE', '64'),
    ('BATCH_SIZE', '&#x27;&lt;i&gt;&#x27;'),
    ('num_selected', '2'),
  ):
    assert f'<dt><code>{name}</code></dt><dd><code>{value}</code></dd>' in text
  assert 'at least 2 times an even share' in shown.replace('\n', ' ')
  assert 'Never above 0, so without a figure: receive drops.' in shown


def test_settings_are_those_of_routing(tmp_path):
  (tmp_path / 'config.gin').write_text(
    'LEARNING_RATE = 1\nROUTER = @moe.TokensChooseRouter()\nNUM_EXPERTS = 8\n'
    "moe.TokensChooseRouter.num_experts = %NUM_EXPERTS\nmoe.TokensChooseRouter.score = 'sigmoid'\n"
    'decoder/moe.SparseBlock.train_capacity_factor = 2.0\nmoe.SparseBlock.router = %ROUTER\n'
    'moe.SparseBlock.expert = \\\n    @far.away()\nmoe_models.MoeEncoderDecoderModel.z_loss = 0.1\n'
    'partitioner.MoePjitPartitioner.num_experts = 4\n'
    "MESH_RULES = \\\n    [\n      ('gpu-.*', [\n        '''\n"
    "        NUM_EXPERTS = 2\n        ''',\n      ]),\n    ]\n"
  )
  assert page.gin_settings(tmp_path) == [
    ('NUM_EXPERTS', '8'),
    ('ROUTER', '@moe.TokensChooseRouter()'),
    ('score', "'sigmoid'"),
    ('decoder/train_capacity_factor', '2.0'),
  ]
  assert page.gin_settings(tmp_path / 'none') == []


# By default, few figures: the time goes to drawing.
@pytest.mark.parametrize(
  'options',
  [
    dict(num_steps=1, drops=False, layers=('decoder/layers_0',)),
    pytest.param({}, marks=pytest.mark.full),
  ],
)
def test_the_same_numbers_give_the_same_report(tmp_path, options):
  recorded_runs.write(tmp_path, **options)
  path, again = (
    report.write(report.read(tmp_path), tmp_path / name) for name in ('one', 'deep/er')
  )
  assert again == tmp_path / 'deep/er/index.html'
  assert {p.name: p.read_bytes() for p in again.parent.iterdir()} == {
    p.name: p.read_bytes() for p in path.parent.iterdir()
  }


def test_a_report_of_a_run_in_a_store(tmp_path, s3_store, capsys):
  store = s3_store
  # Few figures: the time goes to drawing.
  recorded_runs.write(tmp_path, num_steps=1, drops=False, layers=('decoder/layers_0',))
  metrics = tmp_path / 'train/metrics.jsonl'
  files.write(f'{store.root}/train/metrics.jsonl', metrics.read_bytes())
  assert cli.main(['report', store.root], program.PROGRAM) == 0
  path = f'{store.root}/routing_report/train/index.html'
  assert capsys.readouterr().out.endswith(f'{path}\n')
  local = report.write(report.read(tmp_path), tmp_path / 'one')
  for figure in local.parent.glob('*.png'):
    assert files.path(path).with_name(figure.name).read_bytes() == figure.read_bytes()


def test_one_period_of_a_dropless_run(tmp_path, capsys):
  recorded_runs.write(
    tmp_path,
    num_steps=1,
    drops=False,
    layers=('decoder/layers_0',),
    without=('receive_drops',),
    writer='training_eval/task',
  )
  out = tmp_path / 'out'
  out.mkdir()
  for name in ('drops.png', 'mine.png'):
    (out / name).write_bytes(b'old')
  argv = ['report', str(tmp_path), f'--out={out}', '--writer=training_eval/task']
  assert cli.main(argv, program.PROGRAM) == 0
  assert str(out / 'index.html') in capsys.readouterr().out
  text = ''.join(_Reader((out / 'index.html').read_text()).texts)
  assert 'No choice was dropped' in text and 'Only one period' in text
  assert 'Not recorded by this run: receive drops' in text
  assert {p.stem for p in out.glob('*.png')} == {
    'mine',
    'load_at_end',
    'load_by_rank',
    'largest_load',
    'entropy',
    'losses',
    'dead_experts',
  }


def test_layers_with_unlike_experts_and_without_any_number(tmp_path):
  recorded_runs.write(tmp_path / 'a', num_steps=2, layers=('decoder/layers_0', 'decoder/layers_1'))
  recorded_runs.write(tmp_path / 'b', num_steps=2, layers=('decoder/layers_2',), num_experts=3)
  merged = [data.read(tmp_path / name) for name in 'ab']
  nothing = data.dataclasses.replace(
    merged[0].layers[0], index=3, load=np.full([2, 4], np.nan), series={}, drops_by_position=None
  )
  history = data.dataclasses.replace(
    merged[0], layers=(*merged[0].layers, *merged[1].layers, nothing)
  )
  with style.report_style():
    drawn = [
      style.finish(
        draw(history, False), draw(history, True), name=draw.__name__, title='a <title>', caption=''
      )
      for draw in (maps.load_at_end, maps.drops_by_position, curves.load_by_rank)
    ]
  text = page.page(history, drawn)
  shown = ''.join(_Reader(text).texts)
  assert (
    '4 sparse layers of 3 or 4 experts' in shown
    and 'decoder/layers_3 recorded no finite load' in shown
  )


def test_failures_keep_existing_files(written, tmp_path, monkeypatch):
  history = report.read(written[0])
  monkeypatch.setattr(figures, 'draw', lambda _: [])
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(ConfigError, match='Cannot write the report.*--out'):
    report.write(history, tmp_path / 'file')
  assert (tmp_path / 'file').read_text() == 'mine'
  (tmp_path / 'index.html').write_text('old')

  def fail(self, target):
    raise OSError(28, 'No space left on device', str(target))

  monkeypatch.setattr(pathlib.Path, 'replace', fail)
  with pytest.raises(ConfigError, match='No space left'):
    report.write(history, tmp_path)
  assert (tmp_path / 'index.html').read_text() == 'old' and not list(tmp_path.glob('*.tmp-*'))


def test_plots_need_matplotlib(written, tmp_path, monkeypatch, capsys):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.partition('.')[0] == 'matplotlib':
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', without)
  assert cli.main(['report', str(written[0]), f'--out={tmp_path / "out"}'], program.PROGRAM) == 2
  assert "pip install 'matplotlib>=" in capsys.readouterr().err and not (tmp_path / 'out').exists()


# ---- Curves -------------------------------------------------------------------------------------------------------


def _drawn(history, rows, is_narrow):
  with style.report_style():
    figure = curves.over_steps(history, rows, is_narrow)
    figure.draw_without_rendering()
  return figure


@pytest.mark.parametrize('is_narrow', [False, True])
def test_entropy_has_an_axis_from_0_to_100_percent(tmp_path, is_narrow):
  recorded_runs.write(tmp_path, layers=('encoder/layers_1', 'decoder/layers_0'))
  encoder, decoder = _drawn(
    data.read(tmp_path), [('router_entropy', 'entropy', 'entropy')], is_narrow
  ).axes
  assert (
    encoder.get_ylim() == decoder.get_ylim() == (0, 100)
    and encoder.get_ylabel() == 'entropy (% of maximum)'
  )
  (line,) = decoder.get_lines()
  np.testing.assert_allclose(line.get_ydata(), 100 / np.log(4))
  assert (
    encoder.get_legend() is None
    and encoder.get_title(loc='left') == 'encoder layer 1: 72% at the end'
  )
  assert (decoder.get_position().x0 > encoder.get_position().x1) == (not is_narrow)


def test_axes_of_losses_start_at_0_and_those_of_ratios_contain_1(tmp_path):
  recorded_runs.write(tmp_path)
  encoder, decoder = _drawn(
    data.read(tmp_path), [('router_z_loss', 'router z-loss', 'plain')], False
  ).axes
  assert encoder.get_ylim() == decoder.get_ylim() == pytest.approx((0, 1.05 * 3.0))
  ratio, _ = _drawn(
    data.read(tmp_path), [('max_over_mean_load', 'largest / mean', 'ratio')], False
  ).axes
  low, high = ratio.get_ylim()
  assert low < 1 < 2 < high and ratio.get_ylabel() == 'largest / mean (log scale)'


@pytest.mark.parametrize('num_layers, entries', [(1, 0), (2, 2), (6, 6), (7, 6), (12, 6)])
def test_legends_have_at_most_six_layers(tmp_path, num_layers, entries):
  recorded_runs.write(tmp_path, layers=[f'encoder/layers_{k}' for k in range(num_layers)])
  (axes,) = _drawn(
    data.read(tmp_path), [('max_over_mean_load', 'largest / mean', 'ratio')], True
  ).axes
  legend = axes.get_legend()
  assert (
    len(legend.get_texts() if legend else []) == entries and len(axes.get_lines()) == num_layers
  )
  assert legend is None or legend.get_texts()[0].get_text().startswith(f'layer {num_layers - 1}  ')
  assert legend is None or ('of 12' in legend.get_title().get_text()) == (num_layers == 12)


def test_page_has_each_figure_for_wide_screens_and_for_phones(written):
  text = written[1].read_text()
  boxes = {
    kind: re.findall(rf'<div class="{kind}"><svg viewBox="0 0 ([\d.]+) ', text)
    for kind in ('wide', 'narrow')
  }
  assert len(boxes['wide']) == len(boxes['narrow']) == text.count('<figure>')
  assert {float(width) for width in boxes['wide']} == {720.0}
  assert {float(width) for width in boxes['narrow']} == {280.8}
  assert (
    '.narrow { display: none; }' in text
    and '.wide { display: none; } .narrow { display: block; }' in text
  )


# ---- Maps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('seed', range(3))
def test_columns_of_maps_are_means_over_steps(seed, monkeypatch):
  rng = np.random.default_rng(seed)
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(maps, '_MAP_COLUMNS', 12)
  steps = np.cumsum(rng.integers(1, 5, 30))
  values = np.where(rng.random([30, 3]) < 0.2, np.nan, rng.random([30, 3]))
  values[10:20, 1] = 0.0
  edges = maps.bin_edges(steps)
  found = maps.resampled(edges, values)
  # Brute force: many points of every column.
  points = edges[0] + (np.arange(12 * 5000) + 0.5) / (12 * 5000) * (edges[-1] - edges[0])
  at_points = values[np.searchsorted(steps, points)].reshape(12, 5000, 3)
  expected = np.array(
    [[np.nanmean(c) if np.isfinite(c).any() else np.nan for c in row.T] for row in at_points]
  )
  np.testing.assert_allclose(found, expected, atol=2e-3)
  assert (found[:, 1] == 0).any()  # dead stays exactly 0


def test_equal_periods_are_their_own_columns():
  values = np.random.default_rng(0).random([7, 2])
  np.testing.assert_allclose(maps.resampled(maps.bin_edges(np.arange(5, 40, 5)), values), values)
  assert maps.bin_edges(np.array([5])).tolist() == [4, 5] and maps.bin_edges(
    np.array([0])
  ).tolist() == [-1, 0]
