"""The figures of a routing report, with their titles and captions."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moe.tools.report import curves
from moe.tools.report import maps
from moe.tools.report import style
from moe.tools.report.data import History

# Figures that are drawn only if a value is above 0, and their names on the page.
ONLY_IF_ANY = {'dead_experts': 'dead experts', 'drops': 'drops', 'receive_drops': 'receive drops'}
# Names of all figures.
NAMES = frozenset(
  {
    'load_at_end',
    'load_over_time',
    'load_by_rank',
    'largest_load',
    'entropy',
    'losses',
    'drops_by_position',
    *ONLY_IF_ANY,
  }
)
# A function that draws, its arguments, and the name and texts of the figure.
_Drawing = tuple[Callable[..., Any], tuple[Any, ...], dict[str, str]]


def draw(history: History) -> list[style.Figure]:
  """Draw all figures that the history has numbers for.

  Raises:
    ConfigError: matplotlib is missing.
  """
  drawn = []
  with style.report_style():
    for draw_fn, arguments, words in _drawings(history):
      wide = draw_fn(*arguments, is_narrow=False)
      narrow = draw_fn(*arguments, is_narrow=True)
      drawn.append(style.finish(wide, narrow, **words))
  return drawn


def _drawings(history: History) -> Iterator[_Drawing]:
  """Yield the figures of a history."""
  at_the_end = history.end
  yield (
    maps.load_at_end,
    (history,),
    dict(
      name='load_at_end',
      title=f'Load of every expert, {at_the_end}',
      caption='Each row is a layer and each cell an expert: its share of the choices divided by an even share, before '
      'drops. 1 is balanced, 2 is twice as much. Black: no token.',
    ),
  )
  if len(history.steps) > 1:
    yield (
      maps.load_over_time,
      (history,),
      dict(
        name='load_over_time',
        title='Load of every expert over time',
        caption='Each panel is a layer and each row an expert, with the colours of the figure above. A row that keeps '
        'its colour is an expert that stays busy or idle; noise means an undecided router.',
      ),
    )
  yield (
    curves.load_by_rank,
    (history,),
    dict(
      name='load_by_rank',
      title=f'Load curves, {at_the_end}',
      caption='The experts of a layer from the busiest to the least busy. A flat line at 1 is perfect balance; '
      'experts below 1/10 are starved.',
    ),
  )
  rows_of = (
    (
      'largest_load',
      'Load of the busiest expert over the mean',
      [('max_over_mean_load', 'largest / mean', 'ratio')],
      'Computed for each step and averaged over a period, so it includes the noise of small batches, unlike the '
      'maps above.',
    ),
    (
      'entropy',
      'Entropy of the routers',
      [('router_entropy', 'entropy', 'entropy')],
      'Uncertainty of a router about a token: at 100% it does not prefer any expert, at 0% it is certain. The '
      'maximum is log(experts).',
    ),
    (
      'dead_experts',
      'Dead experts',
      [('num_dead', 'experts without tokens', 'count')],
      'Experts without a token in an entire period, from one line of metrics to the next.',
    ),
    (
      'drops',
      'Drops over time',
      [
        ('choices_dropped', 'choices dropped', 'share'),
        ('fraction_tokens_left_behind', 'tokens left behind', 'share'),
      ],
      'Choices dropped because the buffer of their expert was full, and tokens that no expert computed.',
    ),
    (
      'receive_drops',
      'Receive drops over time',
      [('receive_drops', 'choices dropped', 'share')],
      'Choices dropped because a receive buffer between expert shards was full (receive_factor).',
    ),
    (
      'losses',
      'Losses of the routers',
      [
        ('auxiliary_loss', 'load-balancing loss', 'plain'),
        ('router_z_loss', 'router z-loss', 'plain'),
      ],
      "Without the model's factors. With perfect balance and k choices per token the load-balancing loss is k; "
      'padding may reduce it.',
    ),
  )
  for name, title, rows, caption in rows_of:
    if name == 'receive_drops':
      # Drops by position come after the drops over time that they explain.
      yield from _positions(history, at_the_end)
    shown = [row for row in rows if _is_worth_drawing(history, *row)]
    if shown:
      yield curves.over_steps, (history, shown), dict(name=name, title=title, caption=caption)


def _positions(history: History, at_the_end: str) -> Iterator[_Drawing]:
  recorded = [layer.drops_by_position for layer in history.layers]
  known = [drops for drops in recorded if drops is not None]
  if any(np.nansum(drops) > 0 for drops in known):
    yield (
      maps.drops_by_position,
      (history,),
      dict(
        name='drops_by_position',
        title=f'Drops by position in the sequence, {at_the_end}',
        caption='Each row is a layer; the sequence, including padding, is divided into equal parts from its start '
        '(left) to its end. Without priorities, the last tokens of a group are dropped.',
      ),
    )


def _is_worth_drawing(history: History, name: str, label: str, kind: str) -> bool:
  """Return True if a number is known; for drops and dead experts, if one is above 0."""
  del label
  recorded = [layer.over_time(name) for layer in history.layers]
  known = [values for values in recorded if values is not None]
  if kind in ('share', 'count'):
    return any(np.nansum(values) > 0 for values in known)
  return any(np.isfinite(values).any() for values in known)
