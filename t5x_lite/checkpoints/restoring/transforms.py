"""Transforms of a stored state into a target state: renaming, dropping, initialising, converting.

States are nested dicts, or flat dicts with '/'-joined names if documented. Leaves are arrays or objects with `shape`
and `dtype`, since renaming does not need values. A restore transform has T5X's signature,
`fn(state_dict, target_state_dict, *, is_resuming) -> state_dict`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import logging
import re
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.formatting import first_names
from t5x_lite.networks import layout_plan

_logger = logging.getLogger(__name__)

StateDict = Mapping[str, Any]

_NUM_NAMES_SHOWN = 3
# Parts of a state: a target state without any array of a part ignores that part of a stored state.
_SECTIONS = ('state/param_states', 'state', 'flax_mutables', 'param_average')
# Options of `RestoreCheckpointConfig` for a new state of the optimizer, as in docs/optimizers.md.
_WITHOUT_OPTIMIZER = f"assignment_map = [('{_SECTIONS[0]}.*', None)]"


class RestoreStateTransformationFn(Protocol):
  """Function that changes a stored state before it is compared with the target state."""

  def __call__(
    self, state_dict: StateDict, target_state_dict: StateDict, *, is_resuming: bool = False
  ) -> StateDict:
    """Return the state dict with the structure of `target_state_dict`."""
    ...


class SaveStateTransformationFn(Protocol):
  """Function that changes a state before it is saved."""

  def __call__(self, state_dict: StateDict, parameter_infos: Any) -> tuple[StateDict, Any]:
    """Return the state dict to save and a `ParameterInfo` for each of its arrays."""
    ...


class AcceptsShapes(abc.ABC):
  """A restore transform that also maps `jax.ShapeDtypeStruct`s instead of arrays.

  A transform that uses NumPy derives from this class so that its result is checked before the first step. A transform
  that uses only `jax.numpy` need not derive from it for `--dry_run`.
  """

  @abc.abstractmethod
  def __call__(
    self, state_dict: StateDict, target_state_dict: StateDict, *, is_resuming: bool = False
  ) -> StateDict:
    """Return the state dict with the structure of `target_state_dict`."""


class ValuesNeededError(Exception):
  """A restore transform cannot be applied to shapes alone."""


def transform_shapes(
  fn: RestoreStateTransformationFn,
  state_dict: StateDict,
  target_state_dict: StateDict,
  *,
  is_resuming: bool = False,
) -> StateDict:
  """Return the result of a restore transform as shapes.

  Args:
    fn: the transform.
    state_dict: nested dict of `jax.ShapeDtypeStruct`s.
    target_state_dict: see `restore.restore_checkpoint`.
    is_resuming: whether the checkpoint is the run's own.

  Returns:
    Nested dict of `jax.ShapeDtypeStruct`s.

  Raises:
    ValuesNeededError: the transform needs values; the message has its name and error.
    T5xLiteError: raised by the transform.
  """
  if isinstance(fn, AcceptsShapes):
    return fn(state_dict, target_state_dict, is_resuming=is_resuming)
  try:
    return jax.eval_shape(
      lambda state: fn(state, target_state_dict, is_resuming=is_resuming), state_dict
    )
  except errors.T5xLiteError:
    raise
  except Exception as error:  # tracing a custom function may raise any exception
    reason = next(iter(str(error).splitlines()), '')
    raise ValuesNeededError(f'{name_of(fn)} ({type(error).__name__}: {reason})') from error


def name_of(fn: Callable[..., Any]) -> str:
  """Return the full name of a function, for messages."""
  return f'{getattr(fn, "__module__", "")}.{getattr(fn, "__qualname__", repr(fn))}'.lstrip('.')


def tensorstore_leaf(_: Any, value: Mapping[str, Any]) -> bool:
  """Return True if a mapping is the description of a TensorStore array, which is a leaf of T5X's state dicts."""
  return {'driver', 'kvstore', 'metadata'} <= set(value)


def flatten_state_dict(state_dict: StateDict, keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Return `state_dict` as a flat dict with '/'-joined names; descriptions of TensorStore arrays are leaves."""
  return tree_utils.flatten_dict(state_dict, keep_empty=keep_empty_nodes, is_leaf=tensorstore_leaf)


def get_name_tree(state_dict: StateDict, keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Return a tree with the structure of `state_dict` whose leaves are their '/'-joined names.

  >>> get_name_tree({'a': {'b': 1}})
  {'a': {'b': 'a/b'}}
  """
  flat = flatten_state_dict(state_dict, keep_empty_nodes)
  return tree_utils.unflatten_dict(
    {
      name: leaf if leaf == {} and isinstance(leaf, Mapping) else name
      for name, leaf in flat.items()
    }
  )


def intersect_state(state_dict: StateDict, intersect_state_dict: StateDict) -> dict[str, Any]:
  """Return `state_dict` without the names that are not in `intersect_state_dict`; logs the omitted names."""
  flat = flatten_state_dict(state_dict)
  other = flatten_state_dict(intersect_state_dict)
  _log_names(
    'Not restored, since the target state does not have', [n for n in flat if n not in other]
  )
  return tree_utils.unflatten_dict({name: leaf for name, leaf in flat.items() if name in other})


def merge_state(
  state_dict: StateDict, from_scratch_state: StateDict, overwrite: bool = False
) -> dict[str, Any]:
  """Return `state_dict` with the missing leaves of `from_scratch_state`; logs their names.

  Args:
    state_dict: the restored state.
    from_scratch_state: an initialised state.
    overwrite: whether leaves of `from_scratch_state` replace those of `state_dict`.

  Returns:
    The merged state.
  """
  flat = flatten_state_dict(state_dict)
  scratch = flatten_state_dict(from_scratch_state)
  added = {name: leaf for name, leaf in scratch.items() if overwrite or name not in flat}
  _log_names('Initialised from scratch', list(added))
  return tree_utils.unflatten_dict(flat | added)


def assignment(
  stored_names: Sequence[str],
  wanted_names: Sequence[str],
  assignment_map: Sequence[tuple[str, str | None]],
  require_all_rules_match: bool = True,
) -> dict[str, str]:
  """Return the stored name from which each name is restored.

  The first rule whose expression matches a wanted name in full applies: with None the name is not restored, otherwise
  it is read from the stored name that the replacement expands to. A wanted name without a matching rule is read from
  the same stored name, if it exists. Stored names that are neither wanted nor the source of a rule are kept, so that
  the later comparison reports them, unless the first matching rule has None.

  Args:
    stored_names: names in the checkpoint.
    wanted_names: names of the target state.
    assignment_map: pairs (regular expression on wanted names, replacement or None).
    require_all_rules_match: whether a rule that matches no name is an error.

  Returns:
    name in the result -> stored name.

  Raises:
    CheckpointError: a rule matches no name, or a source is not stored.

  >>> assignment(['old/w', 'b'], ['new/w', 'b', 'c'], [(r'new/(.*)', r'old/\\1')])
  {'new/w': 'old/w', 'b': 'b'}
  """
  stored = set(stored_names)
  wanted = set(wanted_names)
  result = {}
  used_rules = set()
  renamed_sources = set()

  def first_match(name: str) -> tuple[int, re.Match[str], str | None] | None:
    for number, (pattern, replacement) in enumerate(assignment_map):
      match = re.fullmatch(pattern, name)
      if match is not None:
        return number, match, replacement
    return None

  for name in wanted_names:
    found = first_match(name)
    if found is None:
      if name in stored:
        result[name] = name
      continue
    number, match, replacement = found
    used_rules.add(number)
    if replacement is None:
      continue
    try:
      source = match.expand(replacement)
      if source in stored:
        problem = None
      else:
        problem = f'the checkpoint does not hold {source!r}.{errors.did_you_mean(source, stored)}'
    except (re.error, IndexError) as e:
      problem = f'the replacement does not suit the expression: {e}.'
    if problem is not None:
      raise errors.CheckpointError(
        f'assignment_map: the rule {tuple(assignment_map[number])} cannot restore {name!r}: {problem}'
      )
    result[name] = source
    renamed_sources.add(source)
  for name in stored_names:
    if name not in wanted and name not in renamed_sources:
      found = first_match(name)
      if found is not None and found[2] is None:  # not to be restored
        used_rules.add(found[0])
      else:
        result[name] = name
  unused = [assignment_map[n] for n in range(len(assignment_map)) if n not in used_rules]
  if unused and require_all_rules_match:
    raise errors.CheckpointError(
      f'assignment_map: the rule(s) {unused} match no name of the target state in full. Expected regular expressions '
      f'of names such as {", ".join(map(repr, list(wanted_names)[:3]))}; correct or remove the rules.'
    )
  return result


def apply_assignment_map(
  ckpt_optimizer_state: StateDict,
  optimizer_state: StateDict,
  assignment_map: Sequence[tuple[str, str | None]],
  require_all_rules_match: bool = True,
  *,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Apply `assignment` to states; returns the stored state unchanged when resuming.

  Args:
    ckpt_optimizer_state: the stored state.
    optimizer_state: the target state, of which only the names are used.
    assignment_map: see `assignment`.
    require_all_rules_match: see `assignment`.
    is_resuming: whether the checkpoint is the run's own.

  Returns:
    The stored leaves under their new names.
  """
  if is_resuming:
    return dict(ckpt_optimizer_state)
  flat = flatten_state_dict(ckpt_optimizer_state)
  names = assignment(
    list(flat), list(flatten_state_dict(optimizer_state)), assignment_map, require_all_rules_match
  )
  return tree_utils.unflatten_dict({name: flat[source] for name, source in names.items()})


@dataclasses.dataclass(frozen=True)
class AssignmentMap(AcceptsShapes):
  """Restore transform of an assignment map.

  `RestoreCheckpointConfig.state_transformation_fns` begins with it, as in T5X.

  Attributes:
    rules: see `assignment`.
  """

  rules: tuple[tuple[str, str | None], ...]

  def __call__(
    self, state_dict: StateDict, target_state_dict: StateDict, *, is_resuming: bool = False
  ) -> StateDict:
    """See `apply_assignment_map`."""
    return apply_assignment_map(state_dict, target_state_dict, self.rules, is_resuming=is_resuming)


def convert_param_trees(
  convert_fn: Callable[[StateDict], StateDict],
) -> RestoreStateTransformationFn:
  """Return a restore transform that applies `convert_fn` to the parameters and to all trees with their shapes.

  Such trees are per-parameter moments in the optimizer state, of all parameters or of some of them, and
  `param_average`. Optimizer state of other shapes, such as Adafactor's factored moments, cannot be converted.

  Args:
    convert_fn: function from a nested dict of parameters to another one, such as a change of parameter layout. It also
      gets trees of only some parameters, and raises ConfigError for one that it cannot convert.

  Returns:
    The transform. It raises CheckpointError if the target state needs optimizer state that cannot be converted.
  """

  def convert(state_dict, target_state_dict, *, is_resuming=False):
    params_shapes = {
      name: tuple(leaf.shape) for name, leaf in flatten_state_dict(state_dict['target']).items()
    }
    wanted = flatten_state_dict(target_state_dict)
    left = []

    def visit(node, prefix):
      if not isinstance(node, Mapping):
        left.append((prefix, node))
        return node
      shapes = {name: tuple(leaf.shape) for name, leaf in flatten_state_dict(node).items()}
      if shapes and shapes.items() <= params_shapes.items():
        try:
          return convert_fn(node)
        except errors.ConfigError:
          if shapes == params_shapes:
            raise
      return {key: visit(value, f'{prefix}/{key}') for key, value in node.items()}

    def fits(name, shape):
      if layout_plan.is_at_one(name, params_shapes):
        return name in wanted
      # Any other array may be a list of parameters, which has another order in each layout.
      return layout_plan.is_independent(name, shape, params_shapes)

    result = dict(state_dict)
    for section in ('target', 'param_average'):
      if section in result:
        result[section] = convert_fn(result[section])
    if 'param_states' in result.get('state', {}):
      converted = visit(result['state']['param_states'], 'state/param_states')
      result['state'] = dict(result['state']) | {'param_states': converted}
      stuck = [name for name, leaf in left if np.ndim(leaf) and not fits(name, leaf.shape)]
      if stuck and any(name.startswith('state/param_states/') for name in wanted):
        # A run that resumes ignores assignment_map.
        if is_resuming:
          remedy = (
            'Keep the param_layout of this run, or start another run in another MODEL_DIR with its parameters: '
            f'{_without_optimizer("the MODEL_DIR of this run", "latest")}.'
          )
        else:
          remedy = f'To begin with a new state, set RestoreCheckpointConfig.{_WITHOUT_OPTIMIZER}.'
        raise errors.CheckpointError(
          f'Optimizer state whose shapes differ from those of the parameters cannot be converted to another '
          f'param_layout: {first_names(stuck)}. {remedy}'
        )
    return result

  return convert


def check_fit(
  stored: Mapping[str, Any],
  wanted: Mapping[str, Any],
  *,
  allow_surplus: bool,
  allow_missing: bool,
  where: str,
  what: str = 'checkpoint',
) -> None:
  """Raise if a stored state does not fit the target state in names, shapes or kinds of numbers.

  Dtypes of the same kind may differ in width: they are cast at restore.

  Args:
    stored: name -> object with `shape` and `dtype`, after all renaming.
    wanted: name -> object with `shape` and `dtype`.
    allow_surplus: whether stored names that are not wanted are accepted.
    allow_missing: whether wanted names that are not stored are accepted.
    where: path of the checkpoint, for the message.
    what: what `where` describes.

  Raises:
    CheckpointError: the message has the first few names of each kind.
  """
  missing = [name for name in wanted if name not in stored]
  surplus = surplus_names(stored, wanted)
  both = [name for name in wanted if name in stored]
  misshapen = [name for name in both if tuple(stored[name].shape) != tuple(wanted[name].shape)]
  mistyped = [name for name in both if _kind(stored[name].dtype) != _kind(wanted[name].dtype)]
  lines = []
  if missing and not allow_missing:
    lines += [f'  {len(missing)} missing from the checkpoint:']
    lines += [
      f'    {name} {tuple(wanted[name].shape)}{errors.did_you_mean(name, surplus, lists_all=False)}'
      for name in missing[:_NUM_NAMES_SHOWN]
    ]
  if surplus and not allow_surplus:
    lines += [f'  {len(surplus)} in the checkpoint only:']
    lines += [f'    {name} {tuple(stored[name].shape)}' for name in surplus[:_NUM_NAMES_SHOWN]]
  if misshapen:
    lines += [f'  {len(misshapen)} of another shape:']
    lines += [
      f'    {name}: stored {tuple(stored[name].shape)}, wanted {tuple(wanted[name].shape)}'
      for name in misshapen[:_NUM_NAMES_SHOWN]
    ]
  if mistyped:
    lines += [f'  {len(mistyped)} of another kind of number:']
    lines += [
      f'    {name}: stored {jnp.dtype(stored[name].dtype).name}, wanted {jnp.dtype(wanted[name].dtype).name}'
      for name in mistyped[:_NUM_NAMES_SHOWN]
    ]
  if not lines:
    return
  lines.insert(0, f'The {what} {where!r} does not fit the state of the model:')
  if allow_missing:
    missing = []
  if allow_surplus:
    surplus = []
  params = [
    name for name in (*missing, *surplus, *misshapen, *mistyped) if name.startswith('target/')
  ]
  averages = [
    lacks
    for lacks, names in ((True, missing), (False, surplus))
    if names and all(name.startswith('param_average/') for name in names)
  ]
  if params and all(map(is_of_adapter, params)):
    lines.append(_adapter_remedy(stored, wanted, misshapen))
  elif averages and not misshapen and not mistyped and not (missing and surplus):
    lines.append(_average_remedy(lacks=averages[0]))
  elif all(
    name.startswith(f'{_SECTIONS[0]}/') for name in (*missing, *surplus, *misshapen, *mistyped)
  ):
    lines.append(
      'Only the state of the optimizer differs. It was saved with other options, or, of layers and experts in one '
      'array, before each of them was updated as an array of its own. Start another run in another MODEL_DIR with its '
      f'parameters: {_without_optimizer(repr(str(where)), "specific")}.'
    )
  else:
    lines += _expert_hints(stored, wanted, misshapen)
    # An inference state has no optimizer, and no run that could resume.
    is_training = any(name.startswith(f'{_SECTIONS[0]}/') for name in wanted)
    lines.append(
      f'Use the model {"and optimizer " if is_training else ""}that wrote it, or set options of '
      'RestoreCheckpointConfig: assignment_map renames or drops names, strict=False ignores arrays that are only in '
      'the checkpoint, fallback_to_scratch=True initialises missing arrays.'
    )
    if is_training:
      lines[-1] += (
        ' A training run that resumes ignores these options: start another run in another MODEL_DIR.'
      )
  raise errors.CheckpointError('\n'.join(lines))


def _without_optimizer(path: str, mode: str) -> str:
  """Return the options that restore the parameters at a path, in words or quoted, and a new state of the optimizer."""
  options = f"path = {path}, mode = '{mode}', {_WITHOUT_OPTIMIZER} and fallback_to_scratch = True"
  return f'RestoreCheckpointConfig.{options}'


def is_of_adapter(name: str) -> bool:
  """Return True if an array belongs to an adapter, by its '/'-joined name."""
  return not {'lora_a', 'lora_b'}.isdisjoint(name.split('/'))


def _adapter_remedy(
  stored: Mapping[str, Any], wanted: Mapping[str, Any], misshapen: Iterable[str]
) -> str:
  """Return the remedy if the parameters of two states differ only in an adapter."""
  has, wants = (any(map(is_of_adapter, names)) for names in (stored, wanted))
  if not has:
    return (
      'It has no adapter. Start a run with a new adapter from it in another MODEL_DIR: set INITIAL_CHECKPOINT_PATH to '
      'this checkpoint and RestoreCheckpointConfig.builders = [@builders.NewAdapter()].'
    )
  if not wants:
    return 'It has an adapter, and the model has none. Add --gin_file=adapters/lora.gin with its settings.'
  ranks = {
    int(stored[name].shape[-1])
    for name in misshapen
    if name.endswith('lora_a') and stored[name].shape[:-1] == wanted[name].shape[:-1]
  }
  if len(ranks) == 1:
    (rank,) = ranks
    return (
      f'The adapter has rank {rank}. Set --gin.adapters.Lora.rank={rank}, or start another run in '
      'another MODEL_DIR.'
    )
  return (
    'The adapter belongs to another base, or has other targets or ranks. Use the base and the settings of '
    'adapters.Lora that it was trained with.'
  )


def _average_remedy(*, lacks: bool) -> str:
  """Return the remedy if the states differ only in the running average of the parameters."""
  if lacks:
    return (
      'A run cannot add an average when it resumes. Set `train.param_ema` to None, or start another run from '
      'this checkpoint in another MODEL_DIR, which begins an average with its parameters.'
    )
  return (
    'The checkpoint has a running average of the parameters. A run that resumes must keep it: set '
    '`train.param_ema` as before. Another run can continue it with `train.param_ema`, begin with it as '
    "parameters by RestoreCheckpointConfig.use_param_average=True, or drop it by assignment_map=[('param_average"
    "/.*', None)]."
  )


def _expert_hints(
  stored: Iterable[str], wanted: Iterable[str], misshapen: Iterable[str]
) -> list[str]:
  """Return hints, as lines, if only one of the states has experts, or both have different ones."""
  has, wants = (any('/expert/' in name for name in names) for names in (stored, wanted))
  if wants and not has:
    return [
      'The checkpoint is of a dense model. To start a sparse model from it: --gin_file=runs/sparse_upcycle.gin, '
      'or RestoreCheckpointConfig.builders = [@moe.upcycle()].'
    ]
  if has and not wants:
    return ['The checkpoint is of a sparse model, which cannot be converted to a dense one.']
  if any('/expert/' in name for name in misshapen):
    return [
      'The number or size of the experts differs: `python -m moe surgery` converts the checkpoint, into a new '
      'model directory.'
    ]
  return []


def surplus_names(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  """Return the stored names that are not wanted although the target state has their part.

  Optimizer state of a training checkpoint is not surplus for an inference state, which has no optimizer state. A
  training state, one with optimizer state, must have all stored names.
  """
  training = any(name.startswith(f'{_SECTIONS[0]}/') for name in wanted)

  def expected(name):
    section = next((s for s in _SECTIONS if name.startswith(f'{s}/')), None)
    return training or section is None or any(w.startswith(f'{section}/') for w in wanted)

  return [name for name in stored if name not in wanted and expected(name)]


def _kind(dtype: Any) -> str:
  kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
  return next(
    (kind.__name__ for kind in kinds if jnp.issubdtype(dtype, kind)), jnp.dtype(dtype).name
  )


def _log_names(what: str, names: Sequence[str]) -> None:
  if names:
    _logger.info('%s: %s.', what, first_names(names))


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
  """Description of an array for a save transform.

  Attributes:
    name: '/'-joined name.
    shape: global shape.
    dtype: dtype before the cast to `SaveCheckpointConfig.dtype`.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any


def transform_saved(state: StateDict, fns: Sequence[SaveStateTransformationFn]) -> dict[str, Any]:
  """Return the arrays to save by name, after the functions of `SaveCheckpointConfig.state_transformation_fns`."""
  # Numbers become arrays; None and empty nodes are not stored, since the target state has them at restore.
  flat = {
    name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    for name, leaf in tree_utils.flatten_dict(state).items()
    if leaf is not None
  }
  if not fns:
    return flat
  tree = tree_utils.unflatten_dict(flat)
  infos = tree_utils.unflatten_dict(
    {
      name: ParameterInfo(name, tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in flat.items()
    }
  )
  for fn in fns:
    tree, infos = fn(tree, infos)
  return tree_utils.flatten_dict(tree)
