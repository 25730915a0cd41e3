"""`python -m moe surgery`: changes the experts of a checkpoint."""

import argparse

from t5x_lite.apps.common.flags import Command
from t5x_lite.errors import ConfigError, ExitCode

_DESCRIPTION = """\
Reads a checkpoint, changes its experts, and writes the result as a checkpoint of the same step in a new model
directory. Nothing is overwritten, and an interrupted command leaves no checkpoint. What is then wanted of the network
(num_experts, num_selected, expert_dim) is printed. Operations:

  show       list the sparse layers and their experts; no OUTPUT
  permute    put experts in another order: the same function
  prune      remove experts by number, or the least loaded ones
  replicate  take each expert several times: the same function if tokens choose so many times more
  split      cut each expert into finer ones along its hidden units: likewise
  merge      put the mean of some experts in their place
"""
_EXAMPLES = """\
examples:
  python -m moe surgery show runs/a
  python -m moe surgery prune runs/a/checkpoint_1000 runs/pruned --least_loaded=2 --load=runs/a
  python -m moe surgery split runs/a runs/fine --slices=2
  python -m moe surgery merge runs/a runs/merged --groups 0,1 2,3 --layers encoder/layers_1
"""
# Flags of each operation: of those in a tuple exactly one is needed.
_NEEDED = {
    'show': (), 'permute': ('permutation',), 'prune': ('experts', 'least_loaded'), 'replicate': ('times',),
    'split': ('slices',), 'merge': ('groups', 'to')}
_FURTHER = {'prune': ('load',), 'replicate': ('noise_stddev', 'seed'), 'merge': ('load',)}
_OWN_FLAGS = ('permutation', 'experts', 'least_loaded', 'times', 'slices', 'groups', 'to', 'load', 'noise_stddev',
              'seed')


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
  parser.add_argument('operation', choices=tuple(_NEEDED), metavar='OPERATION', help='one of those above')
  parser.add_argument('checkpoint', metavar='CHECKPOINT',
                      help='a folder checkpoint_<step>, or a model directory, whose newest one is taken')
  parser.add_argument('output', nargs='?', metavar='OUTPUT', help='the model directory to make')
  parser.add_argument('--layers', nargs='+', metavar='LAYER',
                      help='e.g. encoder/layers_1; by default all sparse layers')
  parser.add_argument('--optimizer_state', choices=('follow', 'drop'), default='follow',
                      help="follow (default): refuse an optimizer whose state cannot follow the experts; drop: leave "
                      "the optimizer's state out, to be restored with fallback_to_scratch=True")
  own = parser.add_argument_group('of one operation')
  own.add_argument('--permutation', type=_numbers, metavar='I,J,...', help='permute: of each new expert, the old one')
  own.add_argument('--experts', type=_numbers, metavar='I,J,...', help='prune: the experts to remove')
  own.add_argument('--least_loaded', type=int, metavar='N',
                   help='prune: remove the N experts of each layer with the least --load')
  own.add_argument('--times', type=int, metavar='N', help='replicate: replicas of each expert')
  own.add_argument('--noise_stddev', type=float, metavar='SHARE',
                   help="replicate: noise on all replicas but the first, as a share of a kernel's standard deviation; "
                   '0 by default, with which replicas stay equal')
  own.add_argument('--seed', type=int, metavar='N', help='replicate: of the noise; 0 by default')
  own.add_argument('--slices', type=int, metavar='N', help='split: parts of each expert')
  own.add_argument('--groups', type=_numbers, nargs='+', metavar='I,J', help='merge: experts that become one')
  own.add_argument('--to', type=int, metavar='N', help='merge: experts to be left, each of as many consecutive ones')
  own.add_argument('--load', metavar='RUN',
                   help='prune, merge: a model directory whose last training metrics say the load of each expert; '
                   'merged experts are weighted by it')


def _numbers(text: str) -> list[int]:
  try:
    return [int(part) for part in text.split(',')]
  except ValueError:
    raise argparse.ArgumentTypeError(f'{text!r} is no list of numbers such as 0,3,1') from None


def _check(arguments: argparse.Namespace) -> None:
  """Refuses flags that are missing or of other operations; raises ConfigError."""
  operation, needed = arguments.operation, _NEEDED[arguments.operation]
  given = [name for name in needed if getattr(arguments, name) is not None]
  if needed and len(given) != 1:
    raise ConfigError(f'surgery {operation}: got {len(given)} of {", ".join(f"--{name}" for name in needed)}; expected '
                      'exactly one.' if len(needed) > 1 else f'surgery {operation}: --{needed[0]} is missing.')
  others = [name for name in _OWN_FLAGS if name not in (*needed, *_FURTHER.get(operation, ()))
            and getattr(arguments, name) is not None]
  if others:
    raise ConfigError(f'surgery {operation}: --{others[0]} is not for this operation. See '
                      'python -m moe surgery --help.')
  if (operation == 'show') != (arguments.output is None):
    raise ConfigError(f'surgery {operation}: ' + (
        'got OUTPUT; expected CHECKPOINT alone, as it writes nothing.' if operation == 'show' else
        'OUTPUT is missing: the path of the model directory to make.'))
  if operation == 'prune' and (arguments.least_loaded is None) != (arguments.load is None):
    raise ConfigError('surgery prune: --least_loaded and --load go together; expected both or neither.')
  if arguments.least_loaded is not None and arguments.least_loaded < 1:
    raise ConfigError(f'--least_loaded={arguments.least_loaded}: expected 1 or more.')
  if arguments.seed is not None and (arguments.seed < 0 or not arguments.noise_stddev):
    raise ConfigError(f'--seed={arguments.seed}: expected 0 or more, together with --noise_stddev.')


def _run(arguments: argparse.Namespace) -> int:
  _check(arguments)
  from moe.tools import surgery, surgery_files
  from t5x_lite import checkpoints
  if arguments.output is not None:
    surgery_files.check_output(arguments.output)
  source = surgery_files.find_checkpoint(arguments.checkpoint)
  shapes = checkpoints.read_shapes(source)
  if arguments.operation == 'show':
    print(f'{source}:\n{surgery_files.describe(shapes)}')
    return ExitCode.OK
  chosen = surgery.chosen_layers(shapes, arguments.layers)
  layers = {layer: number for layer, number in surgery.expert_layers(shapes).items() if layer in chosen}
  load = None if arguments.load is None else surgery_files.recorded_load(arguments.load, layers)
  operate = _operation(arguments, load)
  after = {}

  def change(state):
    result = operate(state, layers=arguments.layers, optimizer_state=arguments.optimizer_state)
    after.update(surgery.expert_layers(result))
    return result

  flags = {name: getattr(arguments, name) for name in (*_OWN_FLAGS, 'layers') if getattr(arguments, name) is not None}
  what = ' '.join([arguments.operation, *(f'--{name}={value}' for name, value in flags.items())])
  written = surgery_files.rewrite(source, arguments.output, change, what)
  print(f'Wrote {written}:')
  for layer, number in layers.items():
    print(f'  {layer}: {number} -> {after[layer]} experts')
  print(_advice(arguments, len(set(after.values())) > 1))
  return ExitCode.OK


def _operation(arguments, load):
  """Return a function of a state, `layers` and `optimizer_state`."""
  import functools

  from moe.tools import surgery
  if arguments.operation == 'permute':
    return functools.partial(surgery.permute, permutation=arguments.permutation)
  if arguments.operation == 'prune':
    experts = arguments.experts if load is None else surgery.least_loaded(load, arguments.least_loaded)
    return functools.partial(surgery.prune, experts=experts)
  if arguments.operation == 'replicate':
    return functools.partial(surgery.replicate, times=arguments.times, noise_stddev=arguments.noise_stddev or 0.0,
                             seed=arguments.seed or 0)
  if arguments.operation == 'split':
    return functools.partial(surgery.split, slices=arguments.slices)
  return functools.partial(
      surgery.merge, groups=arguments.to if arguments.groups is None else arguments.groups, load=load)


def _advice(arguments, uneven: bool) -> str:
  texts = {
      'permute': 'The function is that of the old checkpoint.',
      'prune': 'Set num_experts; num_selected must not be above it.',
      'replicate': f'Set num_experts, and num_selected to {arguments.times} times the old one for the same function.',
      'split': f'Set num_experts, num_selected to {arguments.slices} times the old one for the same function, and '
               f'expert_dim to the old one divided by {arguments.slices}.',
      'merge': 'Set num_experts; num_selected must not be above it.'}
  uneven_text = ' Layers now differ in their numbers of experts: give them blocks of their own.' if uneven else ''
  drop_text = ('' if arguments.optimizer_state == 'follow' else
               " The optimizer's state is left out: restore with fallback_to_scratch=True.")
  return texts[arguments.operation] + uneven_text + drop_text


COMMAND = Command('change the experts of a checkpoint: split, merge, permute, prune, replicate', _add_arguments, _run)
