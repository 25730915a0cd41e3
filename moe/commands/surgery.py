"""`python -m moe surgery`: changes the experts of a checkpoint."""

import argparse
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import printable
from t5x_lite.formatting import show

_DESCRIPTION = """\
Reads a checkpoint, changes its experts, and writes the result as a checkpoint of the same step in a new model
directory. Nothing is overwritten, and an interrupted command leaves no checkpoint. The command prints the options that
the network needs afterwards (num_experts, num_selected, expert_dim). Operations:

  show       list the sparse layers and their experts; no OUTPUT
  permute    put experts in another order: the same function
  prune      remove experts by number, or those with the least load
  replicate  copy each expert several times: the same function if tokens choose the same multiple of experts
  split      cut each expert into smaller ones along its hidden units: the same condition as for replicate
  merge      replace groups of experts by their means
"""
_EXAMPLES = """\
examples:
  python -m moe surgery show runs/a
  python -m moe surgery prune runs/a/checkpoint_1000 runs/pruned --least_loaded=2 --load=runs/a
  python -m moe surgery split runs/a runs/fine --slices=2
  python -m moe surgery merge runs/a runs/merged --groups 0,1 2,3 --layers encoder/layers_1
"""
# Required flags of each operation: exactly one of a tuple.
_NEEDED = {
  'show': (),
  'permute': ('permutation',),
  'prune': ('experts', 'least_loaded'),
  'replicate': ('times',),
  'split': ('slices',),
  'merge': ('groups', 'to'),
}
_FURTHER = {'prune': ('load',), 'replicate': ('noise_stddev', 'seed'), 'merge': ('load',)}
_OWN_FLAGS = (
  'permutation',
  'experts',
  'least_loaded',
  'times',
  'slices',
  'groups',
  'to',
  'load',
  'noise_stddev',
  'seed',
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.description = _DESCRIPTION
  parser.epilog = _EXAMPLES
  parser.add_argument(
    'operation', choices=tuple(_NEEDED), metavar='OPERATION', help='one of the operations above'
  )
  parser.add_argument(
    'checkpoint',
    metavar='CHECKPOINT',
    help='a folder checkpoint_<step>, or a model directory, whose newest checkpoint is used',
  )
  parser.add_argument('output', nargs='?', metavar='OUTPUT', help='the new model directory')
  parser.add_argument(
    '--layers',
    nargs='+',
    metavar='LAYER',
    help='layers to change, e.g. encoder/layers_1; default: all sparse layers',
  )
  parser.add_argument(
    '--optimizer_state',
    choices=('follow', 'drop'),
    default='follow',
    help="follow (default): change the optimizer's state like the experts, or fail; drop: omit the "
    "optimizer's state; a run then needs fallback_to_scratch=True",
  )
  own = parser.add_argument_group('flags of one operation')
  own.add_argument(
    '--permutation',
    type=integers,
    metavar='I,J,...',
    help='permute: the old expert at each new position',
  )
  own.add_argument(
    '--experts', type=integers, metavar='I,J,...', help='prune: the experts to remove'
  )
  own.add_argument(
    '--least_loaded',
    type=int,
    metavar='N',
    help='prune: remove the N experts of each layer with the least --load',
  )
  own.add_argument(
    '--times', type=int, metavar='N', help='replicate: number of replicas of each expert'
  )
  own.add_argument(
    '--noise_stddev',
    type=float,
    metavar='SHARE',
    help='replicate: noise on all replicas except the first, relative to the standard deviation of each '
    'kernel; default: 0, with which replicas stay equal',
  )
  own.add_argument('--seed', type=int, metavar='N', help='replicate: seed of the noise; default: 0')
  own.add_argument('--slices', type=int, metavar='N', help='split: number of parts of each expert')
  own.add_argument(
    '--groups', type=integers, nargs='+', metavar='I,J', help='merge: experts of each group'
  )
  own.add_argument(
    '--to',
    type=int,
    metavar='N',
    help='merge: number of resulting experts, each the mean of the same number of consecutive ones',
  )
  own.add_argument(
    '--load',
    metavar='RUN',
    help='prune, merge: a model directory whose last training metrics have the load of each expert; '
    'merge takes it as weights',
  )


def integers(text: str) -> list[int]:
  """Return the numbers of a list such as 0,3,1; argparse reports a ValueError with the name of this function."""
  return [int(part) for part in text.split(',')]


def _check(arguments: Any) -> None:
  """Raise ConfigError for missing flags, flags of other operations, and invalid values."""
  operation = arguments.operation
  problem = _problem(arguments, operation)
  if problem is not None:
    raise ConfigError(f'surgery {operation}: {problem}. See python -m moe surgery --help.')
  expectations = {
    '--least_loaded': checks.number(at_least=1, integer=True).or_none(),
    '--seed': checks.number(at_least=0, integer=True).or_none(),
  }
  values = {f'--{name}': value for name, value in arguments._asdict().items()}
  checks.check('', values, **expectations)


def _problem(arguments: Any, operation: str) -> str | None:
  """Return the first problem of the flags; None if they fit the operation."""
  given = {name for name, value in arguments._asdict().items() if value is not None}
  needed = _NEEDED[operation]
  if len(given & set(needed)) != bool(needed):
    flags = ', '.join(f'--{name}' for name in needed)
    return f'exactly one of {flags} must be set'
  other = sorted(given & set(_OWN_FLAGS) - {*needed, *_FURTHER.get(operation, ())})
  if other:
    return f'--{other[0]} belongs to another operation'
  if operation == 'show' and 'output' in given:
    return 'it writes nothing; remove OUTPUT'
  if operation != 'show' and 'output' not in given:
    return 'OUTPUT is missing: the path of the new model directory'
  if operation == 'prune' and len(given & {'least_loaded', 'load'}) == 1:
    return '--least_loaded and --load need each other'
  if 'seed' in given and not arguments.noise_stddev:
    return '--seed has no effect without --noise_stddev'
  return None


def _run(invocation: Invocation) -> int:
  arguments = invocation.flags
  _check(arguments)
  from moe.tools import surgery
  from moe.tools import surgery_files
  from t5x_lite import checkpoints

  if arguments.output is not None:
    surgery_files.check_output(arguments.output)
  source = surgery_files.find_checkpoint(arguments.checkpoint)
  shapes = checkpoints.read_shapes(source)
  if arguments.operation == 'show':
    show(f'{source}:\n{surgery_files.describe(shapes)}')
    return ExitCode.OK
  num_experts = surgery.expert_layers(shapes)
  chosen = surgery.chosen_layers(shapes, arguments.layers)
  layers = {layer: number for layer, number in num_experts.items() if layer in chosen}
  if arguments.load is None:
    load = None
  else:
    load = surgery_files.recorded_load(arguments.load, layers)
  operate = _operation(arguments, load)
  after = {}

  def change(state):
    result = operate(state, layers=arguments.layers, optimizer_state=arguments.optimizer_state)
    after.update(surgery.expert_layers(result))
    return result

  words = [arguments.operation]
  for name in (*_OWN_FLAGS, 'layers'):
    value = getattr(arguments, name)
    if value is not None:
      words.append(f'--{name}={value}')
  assert arguments.output is not None  # Required by `_check`.
  written = surgery_files.rewrite(source, arguments.output, change, ' '.join(words))
  show(f'Wrote {written}:')
  for layer, number in layers.items():
    show(f'  {printable(layer)}: {number} -> {after[layer]} experts')
  show(_advice(arguments, len(set(after.values())) > 1))
  return ExitCode.OK


def _operation(arguments, load):
  """Return a function of a state, `layers` and `optimizer_state`."""
  import functools

  from moe.tools import surgery

  if arguments.operation == 'permute':
    return functools.partial(surgery.permute, permutation=arguments.permutation)
  if arguments.operation == 'prune':
    if load is None:
      experts = arguments.experts
    else:
      experts = surgery.least_loaded(load, arguments.least_loaded)
    return functools.partial(surgery.prune, experts=experts)
  if arguments.operation == 'replicate':
    return functools.partial(
      surgery.replicate,
      times=arguments.times,
      noise_stddev=arguments.noise_stddev or 0.0,
      seed=arguments.seed or 0,
    )
  if arguments.operation == 'split':
    return functools.partial(surgery.split, slices=arguments.slices)
  groups = arguments.groups
  if groups is None:
    groups = arguments.to
  return functools.partial(surgery.merge, groups=groups, load=load)


def _advice(arguments, uneven: bool) -> str:
  texts = {
    'permute': 'The function is the same.',
    'prune': 'Set num_experts, and num_selected to at most num_experts.',
    'replicate': f'Set num_experts. To keep the function, multiply num_selected by {arguments.times}.',
    'split': f'Set num_experts, and divide expert_dim by {arguments.slices}. To keep the function, multiply '
    f'num_selected by {arguments.slices}.',
    'merge': 'Set num_experts, and num_selected to at most num_experts.',
  }
  text = texts[arguments.operation]
  if uneven:
    text += ' The layers now have different numbers of experts: give each its own block.'
  if arguments.optimizer_state == 'drop':
    text += " The optimizer's state is omitted: restore with fallback_to_scratch=True."
  return text


COMMAND = Command(
  'change the experts of a checkpoint: split, merge, permute, prune, replicate',
  _add_arguments,
  _run,
)
