"""Findings about the routing of a run in words, by thresholds that the report states."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from moe.tools.report.data import History
from moe.tools.report.data import Layer
from t5x_lite.apps.common.html_page import Card
from t5x_lite.formatting import format_percent

# A layer is unbalanced if its busiest expert has at least this multiple of an even share.
UNBALANCED = 2.0
# An expert is starved if it has less than this part of an even share, and dead if it has no token.
STARVED = 0.1
# Drops are high above this share.
HIGH_DROPS = 0.01
_MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
  """State of a layer at the end of the run (see `History.at_end`); unknown numbers are NaN.

  Attributes:
    layer: history of the layer.
    largest: load of the busiest expert divided by an even share.
    busiest: index of that expert; None if no token was routed.
    smallest: load of the least busy expert divided by an even share.
    dead: indices of the experts without a token.
    num_starved: number of experts below `STARVED` of an even share, including dead experts.
    entropy: entropy of the router as a share of its maximum.
    choices_dropped: share of the choices dropped by full buffers of experts.
    tokens_left_behind: share of the tokens that no expert computed.
    receive_drops: share of the choices dropped by full receive buffers.
  """

  layer: Layer
  largest: float
  busiest: int | None
  smallest: float
  dead: tuple[int, ...]
  num_starved: int
  entropy: float
  choices_dropped: float
  tokens_left_behind: float
  receive_drops: float


def layer_states(history: History) -> list[LayerState]:
  """Return the state of each layer at the end."""
  return [_state(history, layer) for layer in history.layers]


def findings(history: History, states: Sequence[LayerState]) -> list[Card]:
  """Return the findings of the summary: balance, dead experts, drops, entropy."""
  found = [_balance(states), _dead(states), _drops(states), _entropy(states)]
  if any(state.receive_drops > 0 for state in states):
    found.append(_receive_drops(states))
  unknown = [s for s in states if math.isnan(s.largest)]
  if unknown:
    found.append(
      Card(
        title='Unknown',
        value=str(len(unknown)),
        is_good=False,
        text=f'{_names(unknown)} recorded no finite load in the last {_periods(history.num_end)}: '
        'no token was routed, or the numbers are not finite.',
      )
    )
  return found


def _state(history: History, layer: Layer) -> LayerState:
  relative = history.at_end(layer.relative_load)
  largest = math.nan
  smallest = math.nan
  busiest = None
  if np.isfinite(relative).all():
    largest = float(relative.max())
    smallest = float(relative.min())
    busiest = int(relative.argmax())
  entropy = math.nan
  if layer.num_experts > 1:  # The maximum is 0 for a single expert.
    entropy = _at_end(history, layer, 'router_entropy') / math.log(layer.num_experts)
  return LayerState(
    layer=layer,
    largest=largest,
    busiest=busiest,
    smallest=smallest,
    dead=tuple(np.flatnonzero(relative == 0).tolist()),
    num_starved=int((relative < STARVED).sum()),
    entropy=entropy,
    choices_dropped=_at_end(history, layer, 'choices_dropped'),
    tokens_left_behind=_at_end(history, layer, 'fraction_tokens_left_behind'),
    receive_drops=_at_end(history, layer, 'receive_drops'),
  )


def _at_end(history: History, layer: Layer, name: str) -> float:
  values = layer.over_time(name)
  if values is None:
    return math.nan
  return float(history.at_end(values))


def _balance(states: Sequence[LayerState]) -> Card:
  worst = _by(states, lambda s: s.largest)
  if not worst:
    return Card(
      title='Balance, worst layer', value='unknown', is_good=None, text='No layer recorded a load.'
    )
  first = worst[0]
  unbalanced = [s for s in worst if s.largest >= UNBALANCED]
  value = f'{first.largest:.2f}×'
  top = (
    f'The busiest expert anywhere is expert {first.busiest} of {first.layer.name}, with '
    f'{first.largest:.2f} times an even share.'
  )
  if not unbalanced:
    return Card(
      title='Balance, worst layer',
      value=value,
      is_good=True,
      text=f'All {len(worst)} layers are balanced. {top}',
    )
  verb = 'are'
  if len(unbalanced) == 1:
    verb = 'is'
  names = _names(unbalanced, lambda s: f'{s.largest:.2f}×')
  return Card(
    title='Balance, worst layer',
    value=value,
    is_good=False,
    text=f'{len(unbalanced)} of {len(worst)} layers {verb} unbalanced: {names}. {top}',
  )


def _dead(states: Sequence[LayerState]) -> Card:
  num_experts = sum(s.layer.num_experts for s in states)
  num_dead = sum(len(s.dead) for s in states)
  num_starved = sum(s.num_starved for s in states) - num_dead
  starved = 'No expert is starved.'
  value = '0'
  if num_starved:
    others = 'others' if num_dead else 'experts'
    starved = f'Of the {others}, {num_starved} got less than {STARVED:g} of an even share.'
    value = f'0, {num_starved} starved'
  if not num_dead:
    return Card(
      title='Dead experts',
      value=value,
      is_good=not num_starved,
      text=f'Each of the {num_experts} experts got tokens. {starved}',
    )
  with_dead = _by([s for s in states if s.dead], lambda s: len(s.dead))
  names = _names(with_dead, lambda s: f'{len(s.dead)} of {s.layer.num_experts}')
  return Card(
    title='Dead experts',
    value=str(num_dead),
    is_good=False,
    text=f'{num_dead} of {num_experts} experts got no token: {names}. {starved}',
  )


def _drops(states: Sequence[LayerState]) -> Card:
  worst = _by(states, lambda s: s.choices_dropped)
  if not worst:
    worst = _by(states, lambda s: s.tokens_left_behind)
    if not worst:
      return Card(
        title='Drops, worst layer', value='unknown', is_good=None, text='The run recorded no drops.'
      )
    dropped = [s.tokens_left_behind for s in worst]
    what = 'tokens were computed by no expert'
  else:
    dropped = [s.choices_dropped for s in worst]
    what = 'choices were dropped because a buffer was full'
  if dropped[0] == 0:
    return Card(
      title='Drops, worst layer',
      value='0%',
      is_good=True,
      text='No choice was dropped: the layers are dropless, or their buffers were large enough.',
    )
  shares = {s.layer.name: share for s, share in zip(worst, dropped, strict=True)}
  high = [s for s in worst if shares[s.layer.name] > HIGH_DROPS]
  mean = format_percent(float(np.mean(dropped)))
  text = f'On average over the layers, {mean} of the {what}.'
  if high:
    names = _names(high, lambda s: format_percent(shares[s.layer.name]))
    text += f' More than {format_percent(HIGH_DROPS)}: {names}.'
  behind = [s.tokens_left_behind for s in states if not math.isnan(s.tokens_left_behind)]
  if behind and what.startswith('choices'):
    mean_behind = format_percent(float(np.mean(behind)))
    text += f' {mean_behind} of the tokens were computed by no expert.'
  return Card(
    title='Drops, worst layer', value=format_percent(dropped[0]), is_good=not high, text=text
  )


def _entropy(states: Sequence[LayerState]) -> Card:
  known = _by(states, lambda s: s.entropy)
  if not known:
    return Card(
      title='Router entropy',
      value='unknown',
      is_good=None,
      text='The run recorded no entropy of its routers.',
    )
  most = known[0]
  least = known[-1]
  high = f'{100 * most.entropy:.0f}%'
  low = f'{100 * least.entropy:.0f}'
  return Card(
    title='Router entropy',
    value=f'{low}–{high}',
    is_good=None,
    text='Mean entropy of the distribution of a token over the experts, as a share of its maximum: from '
    f'{low}% ({least.layer.name}) to {high} ({most.layer.name}). Near '
    '100% a router does not prefer any expert; near 0% it is certain.',
  )


def _receive_drops(states: Sequence[LayerState]) -> Card:
  worst = _by([s for s in states if s.receive_drops > 0], lambda s: s.receive_drops)
  most = worst[0].receive_drops
  names = _names(worst, lambda s: format_percent(s.receive_drops))
  return Card(
    title='Receive drops',
    value=format_percent(most),
    is_good=most <= HIGH_DROPS,
    text='Share of the choices dropped because a receive buffer of an expert shard was full (receive_factor): '
    f'{names}.',
  )


def _by(states, key) -> list[LayerState]:
  """Return the states with a known key, the largest first."""
  known = [s for s in states if not math.isnan(key(s))]
  return sorted(known, key=lambda s: (-key(s), s.layer.name))


def _names(states, say=None) -> str:
  """Return the names of the first few layers, each with its value."""
  shown = []
  for state in states[:_MOST_NAMED]:
    name = state.layer.name
    if say is not None:
      name += f' ({say(state)})'
    shown.append(name)
  text = ', '.join(shown)
  rest = len(states) - len(shown)
  if rest:
    text += f' and {rest} more'
  return text


def _periods(count: int) -> str:
  if count == 1:
    return 'period'
  return f'{count} periods'
