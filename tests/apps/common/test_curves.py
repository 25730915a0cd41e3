"""Panels of plots: titles, axes, legends, and lines with missing values."""

import itertools
import math

import numpy as np
import pytest

from t5x_lite.apps.common import curves
from t5x_lite.apps.common import figures


def _draw(runs, metrics):
  """Returns title to axes of the drawn panels, and the figure."""
  with figures.figure_style():
    figure = curves.draw(runs, metrics, step_label='training step', loss_unit='nats per token')
    figure.draw_without_rendering()
  return {axes.get_title(loc='left'): axes for axes in figure.axes if axes.axison}, figure


def _points(values):
  return [(10 * (k + 1), value) for k, value in enumerate(values)]


def _notes(axes):
  return ' '.join(text.get_text() for text in axes.texts).replace('\n', ' ').strip()


def _texts(figure):
  return {text.get_text() for part in figure.subfigs for text in part.texts}


def _legends(figure):
  """Returns the labels of each legend."""
  parts = [figure, *figure.subfigs, *(inner for part in figure.subfigs for inner in part.subfigs)]
  return [
    [text.get_text() for text in legend.get_texts()] for part in parts for legend in part.legends
  ]


def _overflow(figure):
  """Returns by how many pixels texts reach beyond the figure, at most."""
  width, height = figure.canvas.get_width_height()
  texts = [
    text
    for part in figure.subfigs
    for text in part.findobj(lambda artist: hasattr(artist, 'get_text'))
  ]
  # Tick labels outside of the limits of an axis have a position, but are not drawn.
  ticks = {
    label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
  }
  boxes = [text.get_window_extent() for text in texts if text not in ticks and text.get_text()]
  return max(max(-box.x0, -box.y0, box.x1 - width, box.y1 - height) for box in boxes)


def test_training_and_evaluation_have_separate_panels():
  run = {
    'train': {
      'loss': _points([4.0, 0.5]),
      'accuracy': _points([0.1, 0.5]),
      'learning_rate': _points([0.1, 0.2]),
    },
    'training_eval/task': {'loss': _points([3.0, 2.0]), 'accuracy': _points([0.2, 0.4])},
    'inference_eval/task': {'exact_match': _points([0.1, 0.4])},
  }
  panels, figure = _draw({'my_run': run}, ['loss', 'accuracy', 'learning_rate', 'exact_match'])
  assert list(panels) == [
    'Training loss',
    'Training accuracy',
    'Learning rate',
    'Evaluation loss',
    'Evaluation accuracy',
    'Exact match (inference)',
  ]
  assert [axes.get_ylabel() for axes in panels.values()] == [
    'loss (nats per token)',
    'share of target tokens',
    '',
    'loss (nats per token)',
    'share of target tokens',
    '',
  ]
  assert all(len(axes.get_lines()) == 1 for axes in panels.values())
  assert 'task' in _notes(panels['Evaluation loss']) and 'task' not in _notes(
    panels['Training loss']
  )
  low, high = panels['Evaluation loss'].get_xlim()
  assert low <= 0 and high >= 20 and {axes.get_xlim() for axes in panels.values()} == {(low, high)}
  assert 'my_run' in _texts(figure) and not _legends(figure)


@pytest.mark.parametrize(
  'values, limits, note',
  [
    ([0.97, 0.91], (0.9, 0.98), 'axis from 0.9 to 0.98'),
    ([0.5, 0.91], (0.5, 1.0), 'axis from 0.5 to 1'),
    ([0.4, 0.91], (0.0, 1.0), ''),
    ([0.7], (0.0, 0.8), ''),
    ([-30.0, -29.0], (-30.0, -29.0), 'axis from -30 to -29'),
    ([-30.0, -2.0], (-30.0, 0.0), ''),
    ([0.0, 0.0], (0.0, 1.0), ''),
  ],
)
def test_axes_contain_zero_or_state_their_range(values, limits, note):
  panels, _ = _draw({'a': {'train': {'accuracy': _points(values)}}}, ['accuracy'])
  (axes,) = panels.values()
  assert axes.get_ylim() == pytest.approx(limits) and _notes(axes) == note


@pytest.mark.parametrize(
  'values, scale',
  [
    ([10.0, 2.0], 'log'),
    ([10.0, 2.1], 'linear'),
    ([10.0, -1.0], 'linear'),
    ([10.0, math.nan, 1.0], 'log'),
  ],
)
def test_losses_that_fall_far_have_a_logarithmic_axis(values, scale):
  panels, _ = _draw(
    {'a': {'train': {'loss': _points(values), 'accuracy': _points(values)}}}, ['loss', 'accuracy']
  )
  assert (
    panels['Training loss'].get_yscale() == scale
    and panels['Training accuracy'].get_yscale() == 'linear'
  )
  assert ('logarithmic axis' in _notes(panels['Training loss'])) == (scale == 'log')


@pytest.mark.parametrize(
  'num_runs, labels',
  [
    (1, []),
    (2, [['run_0', 'run_1']]),
    (6, [[f'run_{k}' for k in range(6)]]),
    (7, [[*(f'run_{k}' for k in range(5)), 'and 2 more']]),
    (10, [[*(f'run_{k}' for k in range(5)), 'and 5 more']]),
  ],
)
def test_one_legend_of_at_most_six_entries(num_runs, labels):
  runs = {
    f'run_{k}': {
      'train': {'loss': _points([2.0, 1.0])},
      'training_eval/t': {'loss': _points([2.0, 1.0])},
    }
    for k in range(num_runs)
  }
  panels, figure = _draw(runs, ['loss'])
  assert _legends(figure) == labels
  for axes in panels.values():
    colors = [line.get_color() for line in axes.get_lines()]
    named = min(num_runs, 6) if num_runs <= 6 else 5
    # Those that the legend names are drawn last, so they are in front.
    assert colors[-named:] == list(figures.COLORS[:named]) and len(set(colors[:-named])) <= 1


def test_legends_of_tasks():
  both = {
    'train': {'loss': _points([2.0, 1.0])},
    'training_eval/s': {'loss': _points([2.0, 1.0])},
    'training_eval/t': {'loss': _points([2.0, 1.0])},
  }
  panels, figure = _draw({'a': both}, ['loss'])
  assert _legends(figure) == [['s', 't']]
  (training,) = panels['Training loss'].get_lines()
  assert training.get_color() not in {
    line.get_color() for line in panels['Evaluation loss'].get_lines()
  }
  panels, figure = _draw({'a': both, 'b': both}, ['loss'])
  assert _legends(figure) == [['a', 'b'], ['a: s', 'a: t', 'b: s', 'b: t']]
  looks = [(line.get_color(), line.get_marker()) for line in panels['Evaluation loss'].get_lines()]
  assert len(set(looks)) == 4 and len({color for color, _ in looks}) == 2
  # A run without evaluations does not need another legend.
  assert _legends(_draw({'a': both, 'b': {'train': both['train']}}, ['loss'])[1])[0] == ['a', 'b']
  one = {writer: both[writer] for writer in ('train', 'training_eval/s')}
  assert _legends(_draw({'a': one, 'b': {'train': both['train']}}, ['loss'])[1]) == [['a', 'b']]


def test_missing_values_are_gaps_that_the_notes_count():
  values = [6.0, math.nan, 5.0, math.inf, *[4.0] * 20]
  panels, _ = _draw({'a': {'train': {'learning_rate': _points(values)}}}, ['learning_rate'])
  (axes,) = panels.values()
  (line,) = axes.get_lines()
  assert '2 of 24 values are NaN or infinite' in _notes(axes)
  assert [math.isnan(value) for value in line.get_ydata()[:4]] == [False, True, False, True]
  assert line.get_markevery() == [0, 2]  # points without a neighbour would be invisible


def test_a_long_line_keeps_the_extremes_of_each_column_of_pixels():
  num_points = 50_000
  random = np.random.default_rng(0)
  steps = np.cumsum(random.integers(1, 4, num_points))
  values = random.normal(size=num_points)
  values[1000:3000] = math.nan
  values[[20_000, 20_001, 20_003]] = 9.0, -9.0, math.inf
  panels, _ = _draw({'a': {'train': {'accuracy': np.stack([steps, values], axis=1)}}}, ['accuracy'])
  (axes,) = panels.values()
  (line,) = axes.get_lines()
  x, y = line.get_xdata(), line.get_ydata()
  assert len(x) <= 1204 and (np.diff(x) > 0).all()
  assert '2,001 of 50,000 values are NaN or infinite' in _notes(axes)
  edges = np.linspace(steps[0], steps[-1], 301)
  for low, high in itertools.pairwise(edges):
    exact = values[(steps >= low) & (steps < high)]
    finite = exact[np.isfinite(exact)]
    drawn = y[(x >= low) & (x < high)]
    if finite.size:
      assert (np.nanmin(drawn), np.nanmax(drawn)) == (finite.min(), finite.max())
    else:  # a gap
      assert drawn.size and np.isnan(drawn).all()
  assert (x[0], x[-1]) == (steps[0], steps[-1])


def test_nothing_but_nan_and_a_single_point():
  panels, _ = _draw({'a': {'train': {'loss': _points([math.nan, math.nan])}}}, ['loss'])
  assert _notes(panels['Training loss']) == 'all values are NaN or infinite'
  assert not len(panels['Training loss'].get_yticks())
  panels, _ = _draw({'a': {'train': {'loss': [(0, 1.0)]}}}, ['loss'])
  (axes,) = panels.values()
  (line,) = axes.get_lines()
  assert line.get_markevery() == [0] and axes.get_xlim()[0] < 0 < axes.get_xlim()[1]


@pytest.mark.parametrize('num_runs', [1, pytest.param(3, marks=pytest.mark.full), 10])
@pytest.mark.parametrize(
  'metrics',
  [pytest.param(['loss'], marks=pytest.mark.full), ['loss', 'accuracy', 'a_very_long_name/' * 8]],
)
def test_long_names_stay_within_the_figure(num_runs, metrics):
  points = {name: _points([2.0, 1.0]) for name in metrics}
  runs = {
    f'{"very_long_name_" * 16}{k}$x^$': {'train': points, f'training_eval/{"task_" * 40}': points}
    for k in range(num_runs)
  }
  _, figure = _draw(runs, metrics)
  assert _overflow(figure) <= 1
  labels = [label for legend in _legends(figure) for label in legend]
  assert len(set(labels)) == len(labels) == (0 if num_runs == 1 else min(num_runs, 6))


def test_titles_of_other_metrics():
  names = [
    'timing/steps_per_second',
    'cross_ent_loss',
    'non_padding_fraction/overall',
    'timing/seconds',
  ]
  panels, _ = _draw({'a': {'train': {name: _points([1.0]) for name in names}}}, names)
  assert {title: axes.get_ylabel() for title, axes in panels.items()} == {
    'Steps per second': 'per second',
    'Training cross-entropy': 'cross-entropy (nats per token)',
    'Non padding fraction, overall': '',
    'Seconds': 'seconds',
  }
