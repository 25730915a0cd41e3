"""`python -m moe plan`: drop rates and costs of capacities, and a suggestion."""

import argparse
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show

_BYTES = {'bfloat16': 2, 'float16': 2, 'float32': 4}
# Feature whose padding the layers of a stack receive.
_FEATURES = {'encoder': 'encoder_input_tokens', 'decoder': 'decoder_target_tokens'}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  load = parser.add_argument_group('load of the experts: recorded or artificial')
  load.add_argument(
    '--run', metavar='RUN', help='model directory of a sparse model with recorded loads'
  )
  load.add_argument(
    '--writer', metavar='NAME', help='records to read: train (the default), or training_eval/TASK'
  )
  load.add_argument('--layer', metavar='NAME', help='only this layer, e.g. encoder/layers_1')
  load.add_argument(
    '--step',
    type=int,
    metavar='N',
    help='the recorded period that ends with this step; default: the last tenth of the run',
  )
  load.add_argument(
    '--zipf',
    type=float,
    metavar='S',
    help="popularity falls as rank ** -S; 0 is balanced, 1 is Zipf's law",
  )
  load.add_argument('--num_experts', type=int, metavar='E', help='number of experts, with --zipf')
  layer = parser.add_argument_group('layer')
  layer.add_argument(
    '--tokens_per_group',
    type=int,
    required=True,
    metavar='T',
    help='number of tokens that are routed together',
  )
  layer.add_argument(
    '--num_selected',
    type=int,
    metavar='K',
    help="number of experts of a token; default: the value in the run's config.gin, else 1",
  )
  layer.add_argument(
    '--routed_share',
    type=float,
    metavar='SHARE',
    help='share of the tokens that are routed, without ignored padding; default: the recorded share, '
    'or 1',
  )
  layer.add_argument('--width', type=int, default=512, metavar='D', help='size of a token (512)')
  layer.add_argument(
    '--hidden', type=int, default=2048, metavar='F', help='hidden units of an expert (2048)'
  )
  layer.add_argument('--gated', action='store_true', help='experts have two input kernels')
  layer.add_argument(
    '--dtype', default='bfloat16', metavar='NAME', help=f'dtype of activations: {", ".join(_BYTES)}'
  )
  layer.add_argument(
    '--min_capacity',
    type=int,
    default=4,
    metavar='N',
    help='minimum number of slots of an expert (4)',
  )
  plan = parser.add_argument_group('plan')
  plan.add_argument(
    '--max_drop',
    type=float,
    default=0.01,
    metavar='SHARE',
    help='maximum share of the choices that may be dropped (0.01)',
  )
  plan.add_argument(
    '--factors', type=numbers, metavar='LIST', help='capacity factors of the table, e.g. 1,1.25,2'
  )
  plan.add_argument(
    '--expert_partitions',
    type=int,
    default=1,
    metavar='P',
    help='number of devices that share the experts (1)',
  )
  plan.add_argument(
    '--tokens_per_device',
    type=int,
    metavar='N',
    help='number of tokens that each of them sends; default: one group',
  )
  plan.add_argument('--json', metavar='FILE', help='also write the plan to this file')


def numbers(text: str) -> list[float]:
  """Return the numbers of a list such as 1,1.25,2; argparse reports a ValueError with the name of this function."""
  return [float(part) for part in text.split(',')]


def _run(invocation: Invocation) -> int:
  arguments = invocation.flags
  _check(arguments)
  from moe.tools import capacity_plan

  if arguments.run is None:
    source, loads, num_selected, shares = _of_zipf(arguments)
  else:
    source, loads, num_selected, shares = _of_run(arguments)
  plan = capacity_plan.make(
    source,
    loads,
    {name: _sizes(arguments, num_selected, shares[name]) for name in loads},
    factors=arguments.factors,
    max_drop_rate=arguments.max_drop,
    num_shards=arguments.expert_partitions,
    tokens_per_device=arguments.tokens_per_device,
  )
  if arguments.json is not None:
    import json

    from t5x_lite.storage import files

    text = json.dumps(capacity_plan.as_data(plan), indent=2)
    files.write(arguments.json, f'{text}\n', durable=False)
  show(capacity_plan.as_text(plan))
  return ExitCode.OK


def _check(arguments: Any) -> None:
  """Raise ConfigError for flags that contradict each other, have no effect, or have invalid values."""
  positive = checks.number(at_least=1, integer=True)
  given = {name: value is not None for name, value in arguments._asdict().items()}
  if given['run'] == given['zipf']:
    raise ConfigError('Pass either --run=RUN or --zipf=S --num_experts=E.')
  if given['zipf'] and not given['num_experts']:
    raise ConfigError('--zipf needs --num_experts=E.')
  if given['run'] and given['num_experts']:
    raise ConfigError('--num_experts has no effect with --run; remove it.')
  if given['tokens_per_device'] and arguments.expert_partitions == 1:
    raise ConfigError(
      '--tokens_per_device has no effect with one expert partition; pass --expert_partitions=P or remove it.'
    )
  for name in ('writer', 'layer', 'step'):
    if given['zipf'] and given[name]:
      raise ConfigError(f'--{name} has no effect with --zipf; remove it.')
  values = {f'--{name}': value for name, value in arguments._asdict().items()}
  expectations = {
    '--dtype': checks.one_of(_BYTES),
    '--expert_partitions': positive,
    '--tokens_per_device': positive.or_none(),
  }
  checks.check('', values, **expectations)


def _of_zipf(arguments):
  """Return (source in words, loads by layer, number of experts of a token, routed shares by layer)."""
  from moe.tools import planner

  name = f'Zipf {arguments.zipf:g}'
  source = (
    f'artificial, {arguments.num_experts} experts with popularity rank ** -{arguments.zipf:g}'
  )
  if arguments.num_selected is None:
    num_selected = 1
  else:
    num_selected = arguments.num_selected
  if arguments.routed_share is None:
    share = 1.0
  else:
    share = arguments.routed_share
  load = planner.zipf_load(arguments.num_experts, arguments.zipf)
  return source, {name: load}, num_selected, {name: share}


def _of_run(arguments):
  """Return the same as `_of_zipf`, for a run."""
  from moe.tools import report
  from moe.tools.report import html_page as page

  history = report.read(arguments.run, arguments.writer or 'train')
  steps = history.steps.tolist()

  def closest(step):
    found = min(steps, key=lambda recorded: abs(recorded - step))
    return f'The closest is {found}.'

  expectations = {
    '--layer': checks.one_of(
      [layer.name for layer in history.layers],
      f'They are the sparse layers of {arguments.run!r}.',
    ).or_none(),
    '--step': checks.Expectation(
      f'the last step of one of the {len(steps)} periods of {history.writer}, {steps[0]} to {steps[-1]}',
      steps.__contains__,
      closest,
    ).or_none(),
  }
  checks.check('', {'--layer': arguments.layer, '--step': arguments.step}, **expectations)
  layers = [layer for layer in history.layers if arguments.layer in (None, layer.name)]
  if arguments.step is None:
    when = history.end
    take = history.at_end
  else:
    index = steps.index(arguments.step)
    when = f'the period that ends with step {arguments.step}'

    def take(values):
      return values[index]

  settings = dict(page.gin_settings(history.run))
  num_selected = arguments.num_selected
  said_by = '--num_selected'
  if num_selected is None:
    num_selected, said_by = _num_selected(history.run)
  loads = {}
  shares = {}
  for layer in layers:
    loads[layer.name] = take(layer.load)
    routed = history.totals.get(f'non_padding_fraction/{_FEATURES.get(layer.stack)}')
    ignores_padding = settings.get('ignore_padding_tokens', 'True') == 'True'
    share = arguments.routed_share
    if share is None and ignores_padding and routed is not None:
      share = float(take(routed))
    elif share is None:
      share = 1.0
    shares[layer.name] = share
  source = f'{history.writer} of {history.run}, {when}; num_selected={num_selected} ({said_by})'
  return source, loads, num_selected, shares


def _num_selected(run) -> tuple[int, str]:
  """Return (number of experts of a token in a run, source of this number in words)."""
  path = run / 'config.gin'
  if path.is_file():
    lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  else:
    lines = ()
  values = {}
  for line in lines:
    # Indented lines are not bindings of the run, e.g. those of mesh rules.
    if not line.startswith(' '):
      name, _, value = line.partition('=')
      values[name.strip()] = value.strip()
  bound = set()
  for name, value in values.items():
    if name.rpartition('.')[2] != 'num_selected':
      continue
    if value.startswith('%'):
      value = values.get(value[1:], value)
    bound.add(value)
  found = sorted(bound)
  if not found:
    return 1, 'the default, as config.gin says nothing'
  if len(found) > 1 or not found[0].isdecimal():
    raise ConfigError(
      f'{str(path)!r} has num_selected={" and ".join(found)}; a plan needs one number. Pass '
      '--num_selected=K, and --layer if layers differ.'
    )
  return int(found[0]), 'config.gin'


def _sizes(arguments, num_selected: int, routed_share: float):
  from moe.tools import planner

  num_inputs = 1
  if arguments.gated:
    num_inputs = 2
  return planner.Sizes(
    tokens_per_group=arguments.tokens_per_group,
    routed_share=routed_share,
    num_selected=num_selected,
    width=arguments.width,
    hidden=arguments.hidden,
    num_inputs=num_inputs,
    bytes_per_number=_BYTES[arguments.dtype],
    min_capacity=arguments.min_capacity,
  )


COMMAND = Command(
  'print drop rates and costs of capacity factors, and suggest one', _add_arguments, _run
)
