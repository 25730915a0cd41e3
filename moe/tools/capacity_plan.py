"""The plan of `python -m moe plan`: buffers of layers for a recorded or an artificial load, as text and as data."""

from collections.abc import Mapping, Sequence
import dataclasses
import textwrap
from typing import Any

import numpy as np

from moe.tools import planner
from t5x_lite import checks
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import format_bytes
from t5x_lite.formatting import format_percent
from t5x_lite.formatting import format_table

# Maximum of rows per choice for which buffers of equal size are suggested; dropless dispatch has to sort tokens.
_WORTH_BUFFERS = 1.25
_TEXT_WIDTH = 118
_RECEIVE_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
  """The buffers of one layer.

  Attributes:
    name: e.g. encoder/layers_1.
    num_experts: number of experts.
    largest_load: load of the expert with the largest load, divided by an even share.
    sizes: sizes of the layer.
    options: drop rates and costs of the capacity factors.
    suggestion: option of the smallest capacity factor whose drop rate is low enough.
    dropless_bytes: bytes of the activations of a group without buffers of equal size.
    receive_options: drop rates and costs of the receive factors, the worst case last; empty without shards.
    receive_suggestion: option of the smallest receive factor whose drop rate is low enough; None without shards.
  """

  name: str
  num_experts: int
  largest_load: float
  sizes: planner.Sizes
  options: Sequence[planner.Option]
  suggestion: planner.Option
  dropless_bytes: int
  receive_options: Sequence[planner.Option]
  receive_suggestion: planner.Option | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Buffers of all chosen layers.

  Attributes:
    source: origin of the load, in words.
    layers: plans of the layers.
    max_drop_rate: maximum share of the choices that may be dropped.
    num_shards: number of expert shards.
    tokens_per_device: number of tokens that a shard sends.
  """

  source: str
  layers: Sequence[LayerPlan]
  max_drop_rate: float
  num_shards: int
  tokens_per_device: int

  @property
  def widest(self) -> LayerPlan:
    """The layer that needs the largest capacity factor, which the other layers have to use too."""
    return max(self.layers, key=lambda layer: layer.suggestion.factor)

  @property
  def capacity_factor(self) -> float:
    """The smallest capacity factor that is large enough for all layers."""
    return self.widest.suggestion.factor

  @property
  def receive_factor(self) -> float | None:
    """The smallest factor large enough for all layers; None (worst case) without shards or if no drops are allowed."""
    if self.num_shards == 1 or not self.max_drop_rate:
      return None
    return max(map(_receive_factor, self.layers))

  @property
  def rows_per_choice(self) -> float:
    """Slots of all buffers of equal size divided by the choices, in the layer with the most."""
    return max(_at(layer, self.capacity_factor).rows_per_choice for layer in self.layers)

  @property
  def prefers_buffers(self) -> bool:
    """True if buffers of equal size have few rows per choice in every layer."""
    return self.rows_per_choice <= _WORTH_BUFFERS

  def gin_lines(self, buffers: bool) -> list[str]:
    """Return the settings in gin, with capacity buffers or dropless."""
    lines = ['moe.SparseBlock:']
    if buffers:
      lines += [
        f'  train_capacity_factor = {self.capacity_factor:g}',
        f'  eval_capacity_factor = {self.capacity_factor:g}',
      ]
      minimum = self.layers[0].sizes.min_capacity
      if minimum != planner.DEFAULT_MIN_CAPACITY:
        lines.append(f'  min_expert_capacity = {minimum}')
      return lines
    lines += ['  train_capacity_factor = None', '  eval_capacity_factor = None']
    if self.num_shards > 1:
      lines.append(f'  receive_factor = {self.receive_factor}')
    return lines


def make(
  source: str,
  loads: Mapping[str, np.ndarray],
  sizes: Mapping[str, planner.Sizes],
  *,
  factors: Sequence[float] | None = None,
  max_drop_rate: float = 0.01,
  num_shards: int = 1,
  tokens_per_device: int | None = None,
) -> Plan:
  """Plan the buffers of layers.

  Args:
    source: origin of the loads, in words.
    loads: float64 [E] by layer, share of the choices that each expert gets.
    sizes: sizes by layer.
    factors: capacity factors of the table; None: `planner.DEFAULT_FACTORS` times the choices of a token.
    max_drop_rate: maximum share of the choices that may be dropped.
    num_shards: number of expert shards.
    tokens_per_device: number of tokens that a shard sends; None: one group.

  Raises:
    ConfigError: invalid loads, sizes or factors.
  """
  for factor in factors or ():
    checks.check('', {'factors': factor}, factors=checks.number(above=0))
  layers = [
    _plan_layer(name, load, sizes[name], factors, max_drop_rate, num_shards, tokens_per_device)
    for name, load in loads.items()
  ]
  first = next(iter(sizes.values()))
  return Plan(
    source=source,
    layers=layers,
    max_drop_rate=max_drop_rate,
    num_shards=num_shards,
    tokens_per_device=tokens_per_device or first.tokens_per_group,
  )


def _plan_layer(
  name, load, sizes, factors, max_drop_rate, num_shards, tokens_per_device
) -> LayerPlan:
  load = np.asarray(load, np.float64)
  if not np.isfinite(load).all() or not load.sum() > 0:
    raise ConfigError(
      f'{name} has no finite load above 0: no tokens were routed, or the recorded numbers are not '
      'finite. Choose another period (--step) or other layers (--layer).'
    )
  factors = factors or [factor * sizes.num_selected for factor in planner.DEFAULT_FACTORS]
  suggested = planner.suggest_factor(load, sizes, max_drop_rate)
  received = ()
  receive_suggestion = None
  if num_shards > 1:
    device = dataclasses.replace(
      sizes, tokens_per_group=tokens_per_device or sizes.tokens_per_group
    )
    received = planner.receive_options(load, device, num_shards, _RECEIVE_FACTORS)
    smallest = planner.suggest_receive_factor(load, device, num_shards, max_drop_rate)
    (receive_suggestion,) = planner.receive_options(load, device, num_shards, (smallest,))
  return LayerPlan(
    name=name,
    num_experts=load.size,
    largest_load=float(load.max() / load.mean()),
    sizes=sizes,
    options=planner.capacity_options(load, sizes, factors),
    suggestion=planner.capacity_options(load, sizes, (suggested,))[0],
    dropless_bytes=sizes.num_choices * sizes.bytes_per_row,
    receive_options=received,
    receive_suggestion=receive_suggestion,
  )


def _receive_factor(layer: LayerPlan) -> float:
  """Return the suggested receive factor of a layer, whose plan is for several shards."""
  assert layer.receive_suggestion is not None, layer.name
  return layer.receive_suggestion.factor


def _at(layer: LayerPlan, factor: float) -> planner.Option:
  """Return the option of a factor for a balanced load, whose costs are those of any load."""
  even = np.full(layer.num_experts, 1 / layer.num_experts)
  return planner.capacity_options(even, layer.sizes, (factor,))[0]


def as_data(plan: Plan) -> dict[str, Any]:
  """Return the plan as dicts, lists, numbers and texts, for JSON."""
  return {
    'source': plan.source,
    'max_drop_rate': plan.max_drop_rate,
    'num_shards': plan.num_shards,
    'tokens_per_device': plan.tokens_per_device,
    'suggestion': {
      'buffers': plan.prefers_buffers,
      'capacity_factor': plan.capacity_factor,
      'receive_factor': plan.receive_factor,
      'gin': plan.gin_lines(plan.prefers_buffers),
    },
    'layers': [dataclasses.asdict(layer) for layer in plan.layers],
  }


# ---------------------------------------------------------------------------------------------------------------------
# Text


def as_text(plan: Plan) -> str:
  """Return the plan as text for users."""
  sizes = plan.layers[0].sizes
  parts = [f'Load: {plan.source}.\n{_sizes_in_words(sizes)}']
  if len(plan.layers) > 1:
    parts.append(_layers_table(plan))
  shown = plan.widest
  if len(plan.layers) > 1:
    of = f'{shown.name}, which needs the largest'
  else:
    of = shown.name
  parts.append(
    f'Capacity factors ({of}; *: the least for at most {format_percent(plan.max_drop_rate)} dropped)\n'
    f'{_options_table(shown)}'
  )
  if plan.num_shards > 1:
    fullest = max(plan.layers, key=_receive_factor)
    parts.append(
      f'Receive factors of dropless dispatch over {plan.num_shards} expert shards, experts in their order,\n'
      f'{plan.tokens_per_device:,} tokens a device ({fullest.name}; None: the worst case)\n'
      f'{_receive_table(fullest)}'
    )
  parts += [_suggestion(plan), _ASSUMPTIONS]
  return '\n\n'.join(parts)


_ASSUMPTIONS = """\
Assumed: tokens choose experts independently, with the probabilities of the load; tokens of one text are more similar
than that, and batches differ, so runs drop somewhat more (fraction_tokens_left_behind and drops_by_position record
it). Memory: input, hidden units and output of every row for the backward pass without remat; weights, the router and
buffers of the exchange of tokens are not included."""


def _sizes_in_words(sizes: planner.Sizes) -> str:
  kernels = ''
  if sizes.num_inputs > 1:
    kernels = 'gated, '
  experts = 'expert'
  if sizes.num_selected > 1:
    experts = 'experts'
  text = (
    f'Groups of {sizes.tokens_per_group:,} tokens, each of which chooses {sizes.num_selected} '
    f'{experts}; experts {sizes.width} wide with {sizes.hidden} hidden units '
    f'({kernels}{sizes.bytes_per_number} bytes a number), with at least {sizes.min_capacity} slots.'
  )
  return textwrap.fill(text, _TEXT_WIDTH)


def _layers_table(plan: Plan) -> str:
  rows = [
    (
      'layer',
      'experts',
      'largest/mean',
      'tokens routed',
      'factor needed',
      'its drops',
      'rows/choice',
      'memory',
    )
  ]
  for layer in plan.layers:
    option = layer.suggestion
    rows.append(
      (
        layer.name,
        str(layer.num_experts),
        f'{layer.largest_load:.2f}',
        format_percent(layer.sizes.routed_share),
        f'{option.factor:g}',
        format_percent(option.drop_rate),
        f'{option.rows_per_choice:.2f}',
        format_bytes(option.bytes),
      )
    )
  return f'For at most {format_percent(plan.max_drop_rate)} of the choices dropped\n{table(rows)}'


def _options_table(layer: LayerPlan) -> str:
  rows = [('factor', 'slots', 'dropped', 'rows/choice', 'memory')]
  rows += _option_rows(layer.options, layer.suggestion)
  rows.append(('dropless', '-', '0%', '1.00', format_bytes(layer.dropless_bytes)))
  return table(rows)


def _receive_table(layer: LayerPlan) -> str:
  rows = [('factor', 'rows', 'dropped', 'rows/choice', 'memory')]
  *some, worst = layer.receive_options
  rows += _option_rows(some, layer.receive_suggestion)
  (worst_row,) = _option_rows([worst], None)
  return table([*rows, ('None', *worst_row[1:])])


def _option_rows(
  options: Sequence[planner.Option], least: planner.Option | None
) -> list[tuple[str, ...]]:
  """Return rows by factor, among them the one of the smallest factor that is large enough."""
  by_factor = {option.factor: option for option in options}
  if least is not None:
    by_factor[least.factor] = least
  rows = []
  for factor, option in sorted(by_factor.items()):
    label = f'{factor:g}'
    if option is least:
      label += ' *'
    rows.append(
      (
        label,
        f'{option.num_slots:,}',
        format_percent(option.drop_rate),
        f'{option.rows_per_choice:.2f}',
        format_bytes(option.bytes),
      )
    )
  return rows


def _suggestion(plan: Plan) -> str:
  reason = (
    f'A capacity factor of {plan.capacity_factor:g} drops at most {format_percent(plan.max_drop_rate)}, and '
    f'computes {plan.rows_per_choice:.2f} rows per choice; dropless dispatch computes 1. Buffers are suggested for '
    f'at most {_WORTH_BUFFERS:g} rows per choice.'
  )
  if plan.num_shards > 1:
    reason += (
      ' Dropless dispatch over shards needs receive buffers; None makes them large enough for the worst '
      'case.'
    )
  lines = [textwrap.fill(reason, _TEXT_WIDTH)]
  for lead, buffers in (
    ('Suggested', plan.prefers_buffers),
    ('Or', not plan.prefers_buffers),
  ):
    form = 'dropless'
    if buffers:
      form = 'buffers of equal size'
    lines.append(f'{lead}: {form}')
    lines += [f'  {line}' for line in plan.gin_lines(buffers)]
  return '\n'.join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
  """Return rows as aligned columns, the first to the left, with a line under the heading.

  >>> print(table([('a', 'b'), ('long', '1')]))
    a     b
    ----  -
    long  1
  """
  return textwrap.indent(format_table(rows, right_aligned=rows[0][1:]), '  ')
