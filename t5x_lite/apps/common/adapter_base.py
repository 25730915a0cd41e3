"""The base of a run with an adapter: the checkpoint with the parameters that the run does not train.

Checkpoints of the run have what it trains. They are read together with the base, see `checkpoints.open_source`.
"""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import Any

import jax

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import tree_utils
from t5x_lite.apps.common.starting_point import StartingPoint
from t5x_lite.apps.common.trainer_setup import RunConfig
from t5x_lite.checkpoints import builders
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import first_names
from t5x_lite.storage import files
from t5x_lite.trainer import state_init

_PARAMS = 'target/'


def metadata_of(model: models.BaseModel, shape: Any) -> dict[str, Any]:
  """Return the checkpoint metadata `adapter`, see `Lora.metadata`; {} for models without an adapter.

  Args:
    model: the model.
    shape: train state of arrays or shapes, without stacked layers.
  """
  adapter = state_init.adapter_of(model)
  if adapter is None:
    return {}
  return {'adapter': adapter.metadata(shape.params, shape.params_axes)}


def is_saved_apart(
  cfg: RunConfig,
  save_cfg: checkpoints.SaveCheckpointConfig | None,
  start: StartingPoint,
  fit: checkpoints.Fit | None,
  shape: Any,
) -> bool:
  """Return whether checkpoints of a run have only what is trained.

  Args:
    cfg: the run.
    save_cfg: when to save checkpoints.
    start: the starting point.
    fit: result of `starting_point.check_start`.
    shape: shapes of the state.

  Raises:
    ConfigError: the base does not have the other parameters; with the option, and the remedy.
  """
  adapter = state_init.adapter_of(cfg.model)
  if save_cfg is None:
    return False
  if adapter is None and save_cfg.save_base:
    raise checks.invalid(
      'SaveCheckpointConfig', 'save_base', 'False without an adapter', True, 'Omit it.'
    )
  if adapter is None or save_cfg.save_base:
    return False
  if cfg.param_ema is not None:
    problem = '`train.param_ema` averages all of them'
  elif not start.resumes:
    problem = _problem(start, fit, adapter, shape, cfg.model_dir)
  elif start.base is None:
    problem = f'{start.path!r}, from which the run resumes, was saved with its base'
  else:
    problem = _problem_of_others(str(start.path), start.metadata, adapter)
  if problem is not None:
    raise ConfigError(
      'A run with an adapter must begin with the unchanged parameters of a checkpoint, from which the parameters that '
      f'are not trained are read again; but {problem}. Correct this, or save all parameters: '
      '--gin.checkpoints.SaveCheckpointConfig.save_base=True.'
    )
  return True


def _problem(
  start: StartingPoint,
  fit: checkpoints.Fit | None,
  adapter: adapters.Lora,
  shape: Any,
  model_dir: str,
) -> str | None:
  """Return why the checkpoint of a first start cannot be the base of a run in `model_dir`, or None."""
  if start.path is None:
    return 'no RestoreCheckpointConfig.path (INITIAL_CHECKPOINT_PATH) is set'
  if files.real_path(files.path(start.path).parent) == files.real_path(model_dir):
    return f'{start.path!r} is in MODEL_DIR, where the run replaces and deletes checkpoints'

  def untrained(names):
    paths = [name.removeprefix(_PARAMS) for name in names if name.startswith(_PARAMS)]
    return [path for path in paths if not adapter.is_trained(path)]

  restore: Any = start.chain[0]
  wanted = tree_utils.flatten_dict(shape.state_dict())
  for pattern, _ in restore.assignment_map:
    if any(re.fullmatch(pattern, _PARAMS + path) for path in untrained(wanted)):
      return f'`RestoreCheckpointConfig.assignment_map` has a rule for them, {pattern!r}'
  for builder in start.chain[1:]:
    if not builder.KEEPS_BASE:
      return f'{builder.description} ({type(builder).__name__}) may change them'
    if isinstance(builder, builders.Adapter):
      problem = _problem_of_others(builder.description, builder.open(wanted).metadata, adapter)
      if problem is not None:
        return problem
  assert fit is not None  # only other builders need values
  lacking = untrained(fit.new)
  if lacking:
    return (
      f'{start.path!r} lacks {first_names(lacking)}, which `fallback_to_scratch` would initialise'
    )
  surplus = untrained(fit.ignored)
  if surplus:
    return f'{start.path!r} also has {first_names(surplus)}, which the model lacks'
  return None


def _problem_of_others(
  owner: str, metadata: Mapping[str, Any], adapter: adapters.Lora
) -> str | None:
  """Return which parameters of a stored adapter are not trained any more, and would not be saved again; or None."""
  also_trained = metadata['adapter']['also_train']
  lost = [path for path in also_trained if not adapter.is_trained(path)]
  if lost:
    return f'{owner} has also trained {first_names(lost)}, which `Lora.also_train` lacks'
  return None


def identify(start: StartingPoint) -> Mapping[str, str]:
  """Return the identity of the base of a run that is saved apart; only in the lead process with its hashes.

  A new run reads all bytes of a base that another program wrote.
  """
  if start.base is not None:
    return start.base
  assert start.path is not None  # see `is_saved_apart`
  if not multihost.is_lead():
    return {'path': start.path}
  return checkpoints.identify_base(checkpoints.open_source(start.path), start.path)


def trained_part(state: Any, adapter: adapters.Lora) -> Any:
  """Return a train state, of which layers may be stacked, with the trained parameters alone."""
  trained = {}
  for path, leaf in tree_utils.named_leaves(state.params):
    if adapter.is_trained(layer_stacks.paths_of(path)[0]):
      trained[path] = leaf
  return state.replace_params(tree_utils.unflatten_dict(trained))


def arrays_to_save(part: Any, stacks: layer_stacks.LayerStacks) -> dict[str, Any]:
  """Return the state dict of a result of `trained_part`, with a subtree per layer.

  With one process, its arrays are in host memory, where those of stacked layers need no copies.
  """
  if jax.process_count() == 1:
    part = jax.device_get(part)
  if stacks:
    part = part.unstack_layers(stacks)
  return part.state_dict()
