"""A LoRA adapter of PEFT as the arrays of an adapter in a train state, without its base."""

from __future__ import annotations

from collections.abc import Mapping
import os
from typing import Any

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import adapter_config
from t5x_lite.checkpoints.hugging_face import names
from t5x_lite.checkpoints.hugging_face import tensor_files
from t5x_lite.checkpoints.sources import base
from t5x_lite.formatting import printable
from t5x_lite.storage import files

_PREFIX = 'target/'
_TABLES = ('shared', 'embed_tokens', 'lm_head', 'relative_attention_bias')


class PeftSource(base.StateSource):
  """The arrays of a folder with adapter_config.json, float32, under our names in the layout 't5'."""

  format = 'peft'
  title = 'PEFT adapter'
  description = 'an adapter of PEFT (adapter_config.json and adapter_model.safetensors)'
  has_steps = False

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """See `StateSource.is_stored_in`."""
    # The folder of an adapter may have the config.json of its base, and that of a model an adapter_config.json.
    models = (tensor_files.SINGLE_FILE, tensor_files.INDEX_FILE)
    has_config = (root / adapter_config.CONFIG_FILE).is_file()
    return has_config and not any((root / name).exists() for name in models)

  def __init__(self, path: str | os.PathLike[str], model: Mapping[str, Any], model_path: str):
    """Open the folder.

    Args:
      path: path of the folder.
      model: name -> shape of the parameters of the base, in either layout.
      model_path: path of the base, for messages.

    Raises:
      CheckpointError: a file is missing or damaged, the adapter is not a LoRA that is only added to the base, or it is
        one of another base.
    """
    super().__init__(path)
    self._model_path = model_path
    root = files.path(path)
    self._config = adapter_config.read(root)
    if not (root / adapter_config.WEIGHTS_FILE).is_file():
      raise errors.CheckpointError(
        f'{self.path!r} must contain {adapter_config.WEIGHTS_FILE}, got only {adapter_config.CONFIG_FILE}. Load the '
        'adapter with PEFT and save it again: model.save_pretrained(folder), which writes safetensors.'
      )
    self._tensors = tensor_files.SafetensorsFolder(root, file=adapter_config.WEIGHTS_FILE)
    self._rules: dict[str, names.TensorRule] = {}
    self._kernels: dict[str, dict[str, Any]] = {}
    unknown = set(self._tensors.entries)
    if not unknown:
      raise errors.CheckpointError(
        f'{self.path!r} must have the tensors of an adapter in {adapter_config.WEIGHTS_FILE}, got none. Copy it again.'
      )
    for kernel in names.tensor_table(Architecture.from_shapes(model)):
      if kernel.ours.endswith('/kernel') and kernel.ours != names.LOGITS_KERNEL:
        unknown -= self._add(kernel)
    if unknown:
      raise self._unsupported(min(unknown))

  def _add(self, kernel: names.TensorRule) -> set[str]:
    """Add the adapter of a kernel if it has one, and return the names of its tensors."""
    options = {adapter_config.rank_and_alpha(self._config, each) for each in kernel.modules}
    rank, alpha = min(options)
    rules = names.adapter_rules(kernel, rank)
    shapes = {tensor: rule.their_shape for rule in rules for tensor in rule.theirs}
    entries = self._tensors.entries
    is_target = adapter_config.is_target(self._config, kernel.modules[0])
    if not is_target or shapes.keys().isdisjoint(entries):
      return set()
    for tensor, shape in shapes.items():
      entry = entries.get(tensor)
      if entry is None or entry.shape != shape or entry.dtype.kind not in 'fV':
        found = 'none' if entry is None else f'{entry.dtype.name} {entry.shape}'
        raise errors.CheckpointError(
          f'{self.path!r} must be an adapter of {self._model_path!r}: next to {names.describe(kernel)} it must have '
          f'floats {tensor} {shape}, got {found}. Name the model with which the adapter was trained.'
        )
    if len(options) > 1:
      raise errors.CheckpointError(
        f'{self.path!r} must have one rank and alpha for all experts of {kernel.ours}, got (rank, alpha) '
        f'{sorted(options)}. Train an adapter without `rank_pattern` and `alpha_pattern`.'
      )
    dims = 'sio' if kernel.transform == names.STACK else 'io'
    self._kernels[kernel.ours] = {'rank': rank, 'alpha': alpha, 'dims': dims}
    self._rules |= {f'{_PREFIX}{rule.ours}': rule for rule in rules}
    return set(shapes)

  def _unsupported(self, tensor: str) -> errors.CheckpointError:
    reason = 'which is not next to a kernel of the model in `target_modules`'
    if any(part in _TABLES for part in tensor.split('.')):
      reason = 'an adapter of a table: tied tables of both stacks and of the logits cannot have adapters of their own'
    return errors.CheckpointError(
      f'{self.path!r} must only have adapters of kernels in the layers of {self._model_path!r}, got '
      f'{printable(tensor)}, {reason}. Name the model with which the adapter was trained, or train one without it.'
    )

  def shapes(self) -> base.Shapes:
    """See `StateSource.shapes`."""
    dtype = np.dtype(np.float32)
    return {name: jax.ShapeDtypeStruct(rule.shape, dtype) for name, rule in self._rules.items()}

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource.read_array`."""
    return self._rules[name].to_ours(self._tensors.read).astype(np.float32)

  def verify(self) -> bool:
    """See `StateSource.verify`; without a warning, since no folder of this format has hashes."""
    return False

  @property
  def metadata(self) -> Mapping[str, Any]:
    """The layout, and the adapter in `adapter`."""
    adapter = {
      'rank_stabilized': self._config['use_rslora'],
      'dropout_rate': self._config['lora_dropout'],
      'base_dtype': None,
      'also_train': [],
      'kernels': self._kernels,
    }
    return {'param_layout': 't5', 'adapter': adapter}
