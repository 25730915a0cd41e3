"""What the numbers of a run say about its routing, in plain words, by thresholds that the report states."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from moe.tools.report.data import History, Layer
from t5x_lite.formatting import format_percent

# The busiest expert has at least this many times an even share: the layer is called unbalanced.
UNBALANCED = 2.0
# An expert with less than this share of an even share is called starved (without any token: dead).
STARVED = 0.1
# Drops above this share are called high.
HIGH_DROPS = 0.01
_MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
  """A layer at the end of the run (see `History.at_end`); NaN is unknown.

  Attributes:
    layer: its history.
    largest: load of the busiest expert over an even share.
    busiest: number of that expert; None where nothing was routed.
    smallest: load of the least busy expert over an even share.
    dead: numbers of the experts that got nothing.
    num_starved: experts that got less than `STARVED` of an even share, the dead ones included.
    entropy: of the router, as a share of the most there can be.
    choices_dropped: share of the choices that found no place.
    tokens_left_behind: share of the tokens that no expert computed.
    receive_drops: share of the choices that found no place in a buffer of exchanged tokens.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One statement.

  Attributes:
    title: what it is about, two or three words.
    value: the figure that matters most.
    is_good: True, False, or None for what is no matter of good and bad.
    text: the statement, sentences.
  """

  title: str
  value: str
  is_good: bool | None
  text: str


def layer_states(history: History) -> list[LayerState]:
  """Returns the state of each layer at the end."""
  return [_state(history, layer) for layer in history.layers]


def findings(history: History, states: Sequence[LayerState]) -> list[Finding]:
  """Returns what the report says on top: balance, dead experts, drops, confidence."""
  found = [_balance(states), _dead(states), _drops(states), _entropy(states)]
  if any(state.receive_drops > 0 for state in states):
    found.append(_receive_drops(states))
  unknown = [s for s in states if math.isnan(s.largest)]
  if unknown:
    found.append(Finding(
        title='Unknown', value=str(len(unknown)), is_good=False,
        text=f'{_names(unknown)} recorded no finite load in the last {_periods(history.num_end)}: nothing was routed, '
             'or the numbers are not finite.'))
  return found


def _state(history: History, layer: Layer) -> LayerState:
  relative = history.at_end(layer.relative_load)
  known = bool(np.isfinite(relative).all())
  entropy = _at_end(history, layer, 'router_entropy')
  return LayerState(
      layer=layer, largest=float(relative.max()) if known else math.nan,
      busiest=int(relative.argmax()) if known else None, smallest=float(relative.min()) if known else math.nan,
      dead=tuple(np.flatnonzero(relative == 0).tolist()), num_starved=int((relative < STARVED).sum()),
      # The router of a single expert has nothing to decide.
      entropy=entropy / math.log(layer.num_experts) if layer.num_experts > 1 else math.nan,
      choices_dropped=_at_end(history, layer, 'choices_dropped'),
      tokens_left_behind=_at_end(history, layer, 'fraction_tokens_left_behind'),
      receive_drops=_at_end(history, layer, 'receive_drops'))


def _at_end(history: History, layer: Layer, name: str) -> float:
  values = layer.over_time(name)
  return math.nan if values is None else float(history.at_end(values))


def _balance(states: Sequence[LayerState]) -> Finding:
  worst = _by(states, lambda s: s.largest)
  if not worst:
    return Finding(title='Balance, worst layer', value='unknown', is_good=None, text='No layer recorded a load.')
  unbalanced = [s for s in worst if s.largest >= UNBALANCED]
  value = f'{worst[0].largest:.2f}×'
  top = (f'The busiest expert anywhere is expert {worst[0].busiest} of {worst[0].layer.name}, with '
         f'{worst[0].largest:.2f} times an even share.')
  if not unbalanced:
    return Finding(title='Balance, worst layer', value=value, is_good=True,
                   text=f'All {len(worst)} layers are balanced. {top}')
  return Finding(
      title='Balance, worst layer', value=value, is_good=False,
      text=f'{len(unbalanced)} of {len(worst)} layers {"is" if len(unbalanced) == 1 else "are"} unbalanced: '
           f'{_names(unbalanced, lambda s: f"{s.largest:.2f}×")}. {top}')


def _dead(states: Sequence[LayerState]) -> Finding:
  num_experts = sum(s.layer.num_experts for s in states)
  num_dead = sum(len(s.dead) for s in states)
  num_starved = sum(s.num_starved for s in states) - num_dead
  starved = (f'Of the {"others" if num_dead else "experts"}, {num_starved} got less than {STARVED:g} of an even share.'
             if num_starved else 'None is starved.')
  if not num_dead:
    return Finding(title='Dead experts', value=f'0, {num_starved} starved' if num_starved else '0',
                   is_good=not num_starved, text=f'Each of the {num_experts} experts got tokens. {starved}')
  with_dead = _by([s for s in states if s.dead], lambda s: len(s.dead))
  return Finding(
      title='Dead experts', value=str(num_dead), is_good=False,
      text=f'{num_dead} of {num_experts} experts got no token: '
           f'{_names(with_dead, lambda s: f"{len(s.dead)} of {s.layer.num_experts}")}. {starved}')


def _drops(states: Sequence[LayerState]) -> Finding:
  worst = _by(states, lambda s: s.choices_dropped)
  if not worst:
    worst = _by(states, lambda s: s.tokens_left_behind)
    if not worst:
      return Finding(title='Drops, worst layer', value='unknown', is_good=None, text='The run recorded no drops.')
    dropped, what = [s.tokens_left_behind for s in worst], 'tokens were computed by no expert'
  else:
    dropped, what = [s.choices_dropped for s in worst], "choices found no place in their expert's buffer"
  if dropped[0] == 0:
    return Finding(title='Drops, worst layer', value='0%', is_good=True,
                   text='No choice was dropped: the layers are dropless, or their buffers were large enough.')
  high = [s for s, share in zip(worst, dropped, strict=True) if share > HIGH_DROPS]
  text = f'On the average of the layers, {format_percent(float(np.mean(dropped)))} of the {what}.'
  if high:
    shares = {s.layer.name: share for s, share in zip(worst, dropped, strict=True)}
    text += f' More than {format_percent(HIGH_DROPS)}: {_names(high, lambda s: format_percent(shares[s.layer.name]))}.'
  behind = [s.tokens_left_behind for s in states if not math.isnan(s.tokens_left_behind)]
  if behind and what.startswith('choices'):
    text += f' {format_percent(float(np.mean(behind)))} of the tokens were computed by no expert at all.'
  return Finding(title='Drops, worst layer', value=format_percent(dropped[0]), is_good=not high, text=text)


def _entropy(states: Sequence[LayerState]) -> Finding:
  known = _by(states, lambda s: s.entropy)
  if not known:
    return Finding(title='Router entropy', value='unknown', is_good=None,
                   text='The run recorded no entropy of its routers.')
  most, least = known[0], known[-1]
  value = f'{100 * least.entropy:.0f}–{100 * most.entropy:.0f}%'
  return Finding(
      title='Router entropy', value=value, is_good=None,
      text='Entropy of a token’s distribution over the experts, as a share of the most there can be: from '
           f'{100 * least.entropy:.0f}% ({least.layer.name}) to {100 * most.entropy:.0f}% ({most.layer.name}). Near '
           '100% a router does not prefer any expert; near 0% it is certain.')


def _receive_drops(states: Sequence[LayerState]) -> Finding:
  worst = _by([s for s in states if s.receive_drops > 0], lambda s: s.receive_drops)
  return Finding(
      title='Receive drops', value=format_percent(worst[0].receive_drops), is_good=worst[0].receive_drops <= HIGH_DROPS,
      text='Choices that found no place where expert shards receive tokens (receive_factor): '
           f'{_names(worst, lambda s: format_percent(s.receive_drops))}.')


def _by(states, key) -> list[LayerState]:
  """Returns the states with a known key, the largest first."""
  return sorted((s for s in states if not math.isnan(key(s))), key=lambda s: (-key(s), s.layer.name))


def _names(states, say=None) -> str:
  """Returns the first few layers with what there is to say of each."""
  shown = [s.layer.name + (f' ({say(s)})' if say else '') for s in states[:_MOST_NAMED]]
  rest = len(states) - len(shown)
  return ', '.join(shown) + (f' and {rest} more' if rest else '')


def _periods(count: int) -> str:
  return 'period' if count == 1 else f'{count} periods'
