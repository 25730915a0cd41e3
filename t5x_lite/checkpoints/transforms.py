"""Fitting a stored state to the one that is wanted: renaming, dropping, filling in, converting.

States are nested dicts, or flat ones with '/'-joined names where it says so; leaves may be arrays or anything with
`shape` and `dtype`, since renaming does not look at values. A transform for restore has T5X's form,
`fn(state_dict, target_state_dict, *, is_resuming) -> state_dict`.
"""

from __future__ import annotations

import abc
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, tree_utils

_logger = logging.getLogger(__name__)

StateDict = Mapping[str, Any]
RestoreStateTransformationFn = Callable[..., StateDict]
SaveStateTransformationFn = Callable[[StateDict, Any], tuple[StateDict, Any]]

_NUM_NAMES_SHOWN = 3
# The parts of a state that stand or fall together: a wanted state without any array of a part does not want that part.
_SECTIONS = ('state/param_states', 'state', 'flax_mutables', 'param_average')


class AcceptsShapes(abc.ABC):
  """A restore transform that also takes `jax.ShapeDtypeStruct`s for arrays, and then returns such.

  A transform that works with NumPy declares it by deriving from this class, so that `--dry_run` can check its result.
  Transforms of `jax.numpy` functions need not.
  """

  @abc.abstractmethod
  def __call__(self, state_dict: StateDict, target_state_dict: StateDict, *, is_resuming: bool = False) -> StateDict:
    """Returns the state dict for restoring into the form of `target_state_dict`."""


class ValuesNeededError(Exception):
  """A restore transform cannot be applied to shapes alone."""


def transform_shapes(fn: RestoreStateTransformationFn, state_dict: StateDict, target_state_dict: StateDict, *,
                     is_resuming: bool = False) -> StateDict:
  """Returns what a restore transform makes of a state, as shapes, from shapes.

  Args:
    fn: the transform.
    state_dict: nested dict of `jax.ShapeDtypeStruct`s.
    target_state_dict: see `restore.restore_checkpoint`.
    is_resuming: whether the checkpoint is the run's own.

  Returns:
    Nested dict of `jax.ShapeDtypeStruct`s.

  Raises:
    ValuesNeededError: the transform looks at values; the message names it and says at what it failed.
    T5xLiteError: whatever of this kind the transform raises.
  """
  if isinstance(fn, AcceptsShapes):
    return fn(state_dict, target_state_dict, is_resuming=is_resuming)
  try:
    return jax.eval_shape(lambda state: fn(state, target_state_dict, is_resuming=is_resuming), state_dict)
  except errors.T5xLiteError:
    raise
  except Exception as error:  # Tracing a function of the user's may fail in any way.
    name = f'{getattr(fn, "__module__", "")}.{getattr(fn, "__qualname__", repr(fn))}'.lstrip('.')
    reason = next(iter(str(error).splitlines()), '')
    raise ValuesNeededError(f'{name} ({type(error).__name__}: {reason})') from error


def flatten_state_dict(state_dict: StateDict, keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Returns `state_dict` as one dict with '/'-joined names."""
  return tree_utils.flatten_dict(state_dict, keep_empty=keep_empty_nodes)


def get_name_tree(state_dict: StateDict, keep_empty_nodes: bool = False) -> dict[str, Any]:
  """Returns a tree like `state_dict` whose leaves are their own names.

  >>> get_name_tree({'a': {'b': 1}})
  {'a': {'b': 'a/b'}}
  """
  flat = flatten_state_dict(state_dict, keep_empty_nodes)
  return tree_utils.unflatten_dict({name: leaf if leaf == {} and isinstance(leaf, Mapping) else name
                                    for name, leaf in flat.items()})


def intersect_state(state_dict: StateDict, intersect_state_dict: StateDict) -> dict[str, Any]:
  """Returns `state_dict` without the names that `intersect_state_dict` does not have; logs what was left out."""
  flat, other = flatten_state_dict(state_dict), flatten_state_dict(intersect_state_dict)
  _log_names('Not restored, since the wanted state has no place for', [n for n in flat if n not in other])
  return tree_utils.unflatten_dict({name: leaf for name, leaf in flat.items() if name in other})


def merge_state(state_dict: StateDict, from_scratch_state: StateDict, overwrite: bool = False) -> dict[str, Any]:
  """Returns `state_dict` with the names that only `from_scratch_state` has added; logs them.

  Args:
    state_dict: what was restored.
    from_scratch_state: a fresh state.
    overwrite: take every value of `from_scratch_state`, also those that `state_dict` has.

  Returns:
    The merged state.
  """
  flat, scratch = flatten_state_dict(state_dict), flatten_state_dict(from_scratch_state)
  added = {name: leaf for name, leaf in scratch.items() if overwrite or name not in flat}
  _log_names('Initialised from scratch', list(added))
  return tree_utils.unflatten_dict(flat | added)


def assignment(stored_names: Sequence[str], wanted_names: Sequence[str],
               assignment_map: Sequence[tuple[str, str | None]], require_all_rules_match: bool = True,
               ) -> dict[str, str]:
  """Decides which stored name each name is restored from.

  For each wanted name the first rule whose expression matches it in full decides: None leaves it out, otherwise its
  source is the stored name that the replacement expands to. A wanted name that no rule matches keeps its own name, if
  that is stored. A stored name that is neither wanted nor any rule's source is kept, so that leftovers show, unless the
  first rule that matches it says None.

  Args:
    stored_names: names in the checkpoint.
    wanted_names: names of the wanted state.
    assignment_map: (regular expression on wanted names, replacement or None).
    require_all_rules_match: refuse rules that match no name.

  Returns:
    name in the result -> stored name.

  Raises:
    CheckpointError: a rule matches nothing, or a source is not stored.

  >>> assignment(['old/w', 'b'], ['new/w', 'b', 'c'], [(r'new/(.*)', r'old/\\1')])
  {'new/w': 'old/w', 'b': 'b'}
  """
  stored, wanted = set(stored_names), set(wanted_names)
  result, used_rules, renamed_sources = {}, set(), set()

  def first_match(name):
    for number, (pattern, replacement) in enumerate(assignment_map):
      match = re.fullmatch(pattern, name)
      if match is not None:
        return number, match, replacement
    return None, None, None

  for name in wanted_names:
    number, match, replacement = first_match(name)
    if match is None:
      if name in stored:
        result[name] = name
      continue
    used_rules.add(number)
    if replacement is None:
      continue
    source = _expand(match, replacement)
    if source not in stored:
      raise errors.CheckpointError(
          f'assignment_map: the rule {tuple(assignment_map[number])} restores {name!r} from {source!r}, which the '
          f'checkpoint does not hold.{errors.did_you_mean(source, stored)}')
    result[name] = source
    renamed_sources.add(source)
  for name in stored_names:
    if name not in wanted and name not in renamed_sources:
      number, match, replacement = first_match(name)
      if match is not None and replacement is None:
        used_rules.add(number)
      else:
        result[name] = name
  unused = [assignment_map[n] for n in range(len(assignment_map)) if n not in used_rules]
  if unused and require_all_rules_match:
    raise errors.CheckpointError(
        f'assignment_map: no name of the wanted state is matched in full by the rule(s) {unused}. Expected regular '
        f"expressions of names such as {', '.join(map(repr, list(wanted_names)[:3]))}; correct or remove them.")
  return result


def apply_assignment_map(ckpt_optimizer_state: StateDict, optimizer_state: StateDict,
                         assignment_map: Sequence[tuple[str, str | None]], require_all_rules_match: bool = True, *,
                         is_resuming: bool = False) -> dict[str, Any]:
  """Applies `assignment` to states; when resuming a run the stored state is returned as it is.

  Args:
    ckpt_optimizer_state: the stored state.
    optimizer_state: the wanted state; only its names matter.
    assignment_map: see `assignment`.
    require_all_rules_match: see `assignment`.
    is_resuming: whether the checkpoint is the run's own.

  Returns:
    The stored leaves under their new names.
  """
  if is_resuming:
    return dict(ckpt_optimizer_state)
  flat = flatten_state_dict(ckpt_optimizer_state)
  names = assignment(list(flat), list(flatten_state_dict(optimizer_state)), assignment_map, require_all_rules_match)
  return tree_utils.unflatten_dict({name: flat[source] for name, source in names.items()})


def convert_param_trees(convert_fn: Callable[[StateDict], StateDict]) -> RestoreStateTransformationFn:
  """Returns a restore transform that applies `convert_fn` to the parameters and to every tree that is shaped like them.

  Such trees are found in the optimizer state (moments that optax keeps per parameter) and in `param_average`. Optimizer
  state of another form, such as Adafactor's factored moments, cannot follow a change of layout.

  Args:
    convert_fn: function from a nested dict of parameters to another, such as a change of parameter layout.

  Returns:
    The transform. It raises CheckpointError when the wanted state needs optimizer state that cannot be converted.
  """

  def convert(state_dict, target_state_dict, *, is_resuming=False):
    params_shapes = {name: tuple(leaf.shape) for name, leaf in flatten_state_dict(state_dict['target']).items()}
    left = []

    def visit(node, prefix):
      if not isinstance(node, Mapping):
        left.append((prefix, node))
        return node
      shapes = {name: tuple(leaf.shape) for name, leaf in flatten_state_dict(node).items()}
      if shapes == params_shapes:
        return convert_fn(node)
      return {key: visit(value, f'{prefix}/{key}') for key, value in node.items()}

    result = dict(state_dict)
    for section in ('target', 'param_average'):
      if section in result:
        result[section] = convert_fn(result[section])
    if 'param_states' in result.get('state', {}):
      converted = visit(result['state']['param_states'], 'state/param_states')
      result['state'] = dict(result['state']) | {'param_states': converted}
      wanted = flatten_state_dict(target_state_dict)
      stuck = [name for name, leaf in left if np.ndim(leaf) and name not in wanted]
      if stuck and any(name.startswith('state/param_states/') for name in wanted):
        # A run that goes on takes no assignment_map.
        where = 'Keep the param_layout that this run began with; or, in another MODEL_DIR, r' if is_resuming else 'R'
        raise errors.CheckpointError(
            f'Optimizer state that is not shaped like the parameters cannot follow a change of parameter layout: '
            f"{_shorten(stuck)}. {where}estore with assignment_map=[('state/param_states.*', None)], with which the "
            'optimizer starts afresh.')
    return result

  return convert


def check_fit(stored: Mapping[str, Any], wanted: Mapping[str, Any], *, allow_surplus: bool, allow_missing: bool,
              where: str) -> None:
  """Compares a stored state with the wanted one by name, shape and kind of number; widths are cast at restore.

  Args:
    stored: name -> anything with `shape` and `dtype`, after all renaming.
    wanted: name -> anything with `shape` and `dtype`.
    allow_surplus: accept stored names that are not wanted.
    allow_missing: accept wanted names that are not stored.
    where: what was read, for the message.

  Raises:
    CheckpointError: the two do not fit; the message names the first few arrays on each side.
  """
  missing = [name for name in wanted if name not in stored]
  surplus = surplus_names(stored, wanted)
  both = [name for name in wanted if name in stored]
  misshapen = [name for name in both if tuple(stored[name].shape) != tuple(wanted[name].shape)]
  mistyped = [name for name in both if _kind(stored[name].dtype) != _kind(wanted[name].dtype)]
  lines = []
  if missing and not allow_missing:
    lines += [f'  {len(missing)} missing from the checkpoint:']
    lines += [f'    {name} {tuple(wanted[name].shape)}{_close_name(name, surplus)}'
              for name in missing[:_NUM_NAMES_SHOWN]]
  if surplus and not allow_surplus:
    lines += [f'  {len(surplus)} in the checkpoint only:']
    lines += [f'    {name} {tuple(stored[name].shape)}' for name in surplus[:_NUM_NAMES_SHOWN]]
  if misshapen:
    lines += [f'  {len(misshapen)} of another shape:']
    lines += [f'    {name}: stored {tuple(stored[name].shape)}, wanted {tuple(wanted[name].shape)}'
              for name in misshapen[:_NUM_NAMES_SHOWN]]
  if mistyped:
    lines += [f'  {len(mistyped)} of another kind of number:']
    lines += [f'    {name}: stored {jnp.dtype(stored[name].dtype).name}, wanted {jnp.dtype(wanted[name].dtype).name}'
              for name in mistyped[:_NUM_NAMES_SHOWN]]
  if lines:
    lines += _words_on_experts(stored, wanted, misshapen)
    # Of an inference state: there is no optimizer that could be another one, and no run to resume.
    is_training = any(name.startswith(f'{_SECTIONS[0]}/') for name in wanted)
    remedy = (
        f'Use the model {"and optimizer " if is_training else ""}that wrote it, or fit it with '
        'RestoreCheckpointConfig: its assignment_map renames or drops names, strict=False ignores what is in the '
        'checkpoint only, fallback_to_scratch=True initialises what is missing.')
    if is_training:
      remedy += ' A training run that goes on takes none of these: start another in another MODEL_DIR.'
    raise errors.CheckpointError('\n'.join([
        f'The checkpoint {where!r} does not fit the state that is to be restored:', *lines, remedy]))


def _words_on_experts(stored: Iterable[str], wanted: Iterable[str], misshapen: Iterable[str]) -> list[str]:
  """Returns what is to be said where one of two states has experts, or both have others, as lines."""
  has, wants = (any('/expert/' in name for name in names) for names in (stored, wanted))
  if wants and not has:
    return ['The checkpoint is of a dense model. To begin a sparse one with it: --gin_file=runs/sparse_upcycle.gin, or '
            'RestoreCheckpointConfig.state_transformation_fns = [@moe.upcycle()].']
  if has and not wants:
    return ['The checkpoint is of a sparse model; nothing makes a dense one of it.']
  if any('/expert/' in name for name in misshapen):
    return ['Experts of another number or size: `python -m moe surgery` makes them of a checkpoint, in a new model '
            'directory.']
  return []


def surplus_names(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  """Returns the stored names that are not wanted although the wanted state has their part.

  An inference state has no optimizer state, so a training checkpoint's is not surplus to it. A training state, one
  with optimizer state, must have a place for everything.
  """
  training = any(name.startswith(f'{_SECTIONS[0]}/') for name in wanted)

  def expected(name):
    section = next((s for s in _SECTIONS if name.startswith(f'{s}/')), None)
    return training or section is None or any(w.startswith(f'{section}/') for w in wanted)

  return [name for name in stored if name not in wanted and expected(name)]


def _expand(match: re.Match, replacement: str) -> str:
  try:
    return match.expand(replacement)
  except (re.error, IndexError) as e:
    raise errors.CheckpointError(
        f'assignment_map: the replacement {replacement!r} does not suit the expression {match.re.pattern!r}: '
        f'{e}.') from e


def _kind(dtype: Any) -> str:
  kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
  return next((kind.__name__ for kind in kinds if jnp.issubdtype(dtype, kind)), jnp.dtype(dtype).name)


def _close_name(name: str, candidates: Sequence[str]) -> str:
  clause = errors.did_you_mean(name, candidates)
  return clause if clause.startswith(' Did you mean') else ''  # The names are listed further down anyway.


def _shorten(names: Sequence[str]) -> str:
  return ', '.join(names[:_NUM_NAMES_SHOWN]) + (f' and {len(names) - _NUM_NAMES_SHOWN} more'
                                                if len(names) > _NUM_NAMES_SHOWN else '')


def _log_names(what: str, names: Sequence[str]) -> None:
  if names:
    _logger.info('%s: %s.', what, _shorten(names))
