"""Style of figures: it does not depend on the user's settings, and leaves them unchanged."""

import matplotlib.figure
import pytest

from t5x_lite.apps.common import figures


def test_style_is_that_of_the_context_only():
  with matplotlib.rc_context({'font.size': 31.0, 'lines.linestyle': '--'}):
    with figures.figure_style({'axes.labelsize': 5.0}):
      assert (
        matplotlib.rcParams['font.size'],
        matplotlib.rcParams['lines.linestyle'],
        matplotlib.rcParams['axes.labelsize'],
      ) == (9.0, '-', 5.0)
    assert (matplotlib.rcParams['font.size'], matplotlib.rcParams['lines.linestyle']) == (
      31.0,
      '--',
    )


@pytest.mark.parametrize(
  'num_steps, labels',
  [
    (10, ['0', '2', '4', '6', '8', '10']),
    (2, ['0', '1', '2']),
    (2_000_000, ['0', '500k', '1M', '1.5M', '2M']),
  ],
)
def test_ticks_of_steps_are_few_integers(num_steps, labels):
  figure = matplotlib.figure.Figure()
  axes = figure.add_subplot()
  axes.set_xlim(0, num_steps)
  figures.set_step_ticks(axes)
  figure.draw_without_rendering()
  assert [label.get_text() for label in axes.get_xticklabels()] == labels
