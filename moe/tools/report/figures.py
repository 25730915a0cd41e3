"""The figures of a routing report: which there are, what they are called and how to read them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from moe.tools.report import curves, maps, style
from moe.tools.report.data import History

# What is drawn only if there was any, and what the page calls it.
ONLY_IF_ANY = {'dead_experts': 'dead experts', 'drops': 'drops', 'receive_drops': 'receive drops'}
# All files' names.
NAMES = frozenset({'load_at_end', 'load_over_time', 'load_by_rank', 'largest_load', 'entropy', 'losses',
                   'drops_by_position', *ONLY_IF_ANY})

def draw(history: History) -> list[style.Figure]:
  """Draws all that the history has numbers for.

  Raises:
    ConfigError: matplotlib is missing.
  """
  with style.paper():
    return [style.finish(drawing, **words) for drawing, words in _drawings(history)]


def _drawings(history: History) -> Iterator[tuple[Any, dict[str, str]]]:
  """Yields (matplotlib figure, its name and words)."""
  at_the_end = history.end
  yield maps.load_at_end(history), dict(
      name='load_at_end', title=f'Load of every expert, {at_the_end}',
      caption='Each row is a layer, each cell an expert: its share of the choices over an even share, before drops. 1 '
              'is balanced, 2 is twice as much. Black: no token at all.')
  if len(history.steps) > 1:
    yield maps.load_over_time(history), dict(
        name='load_over_time', title='Load of every expert over time',
        caption='A panel for each layer: steps to the right, experts upwards, colours as above. A stripe that keeps '
                'its colour is an expert that stays busy or idle; noise is an undecided router.')
  yield curves.load_by_rank(history), dict(
      name='load_by_rank', title=f'Load curves, {at_the_end}',
      caption='The experts of a layer from the busiest to the least busy. A flat line at 1 is perfect balance; an end '
              'that falls off the scale is starved experts.')
  rows_of = (
      ('largest_load', 'Load of the busiest expert over the mean', [('max_over_mean_load', 'largest / mean', 'ratio')],
       'In single steps, averaged over a period; so noise of small batches counts here, not in the maps above.'),
      ('entropy', 'Entropy of the routers', [('router_entropy', 'entropy (nats)', 'nats')],
       'How undecided a router is about a token, in nats; the dashed line is the most there can be, log(experts).'),
      ('dead_experts', 'Dead experts', [('num_dead', 'experts without tokens', 'count')],
       'Experts that got no token in a whole period, from one line of metrics to the next.'),
      ('drops', 'Drops over time', [('choices_dropped', 'choices dropped', 'share'),
                                    ('fraction_tokens_left_behind', 'tokens left behind', 'share')],
       'Choices that found no place in the buffer of their expert, and tokens that no expert computed at all.'),
      ('receive_drops', 'Receive drops over time', [('receive_drops', 'choices dropped', 'share')],
       'Choices that found no place in the receive buffers between expert shards (receive_factor).'),
      ('losses', 'Losses of the routers', [('auxiliary_loss', 'load-balancing loss', 'plain'),
                                           ('router_z_loss', 'router z-loss', 'plain')],
       "Without the model's factors. In perfect balance the load-balancing loss is 1 if a token chooses one expert, k "
       'if it chooses k; padding may lower it.'))
  for name, title, rows, caption in rows_of:
    if name == 'receive_drops':
      # By position comes after the drops over time that it explains.
      yield from _positions(history, at_the_end)
    shown = [row for row in rows if _is_worth_drawing(history, *row)]
    if shown:
      yield curves.over_steps(history, shown), dict(name=name, title=title, caption=caption)


def _positions(history: History, at_the_end: str) -> Iterator[tuple[Any, dict[str, str]]]:
  if any(np.nansum(layer.drops_by_position) > 0 for layer in history.layers if layer.drops_by_position is not None):
    yield maps.drops_by_position(history), dict(
        name='drops_by_position', title=f'Drops by position in the sequence, {at_the_end}',
        caption='Each row is a layer; the sequence, padding included, is cut into equal parts from its start (left) to '
                'its end. Without priorities, the last tokens of a group find the buffers full.')


def _is_worth_drawing(history: History, name: str, label: str, kind: str) -> bool:
  """Whether anything is known, and for drops and dead experts whether there are any."""
  del label
  known = [values for layer in history.layers if (values := layer.over_time(name)) is not None]
  if kind in ('share', 'count'):
    return any(np.nansum(values) > 0 for values in known)
  return any(np.isfinite(values).any() for values in known)
