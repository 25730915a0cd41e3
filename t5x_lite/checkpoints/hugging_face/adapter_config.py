"""`adapter_config.json` of a LoRA adapter of PEFT, as a dict with PEFT's keys. https://huggingface.co/docs/peft

Modules are those of transformers, such as 'encoder.block.0.layer.0.SelfAttention.q'.
"""

import collections
from collections.abc import Iterable, Mapping
import re
from typing import Any

from t5x_lite import checks
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.errors import CheckpointError
from t5x_lite.formatting import printable
from t5x_lite.storage import files

CONFIG_FILE = 'adapter_config.json'
WEIGHTS_FILE = 'adapter_model.safetensors'
# PEFT's word for all linear modules but that of the logits.
_ALL_LINEAR = 'all-linear'
# Regular expression for names that a pattern matches, or of which it matches the end after a period.
_END = r'(?:.*\.)?(?:{})'
_MERGE = 'Merge it with PEFT and use the model: model.merge_and_unload().save_pretrained(folder).'
_CONVERT = (
  'It changes the weights of the base: save the adapter with PEFT again, with '
  'path_initial_model_for_weight_conversion.'
)


# Parts of a regular expression: escapes, classes and plain groups, which search does not try in several ways; repeated
# groups and what may hide one; other repetitions; alternatives.
_PARTS = re.compile(
  r'\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\(\?[:=!]|(?P<group>\)[*+?{]|\(\?)|(?P<repeat>[*+?{][?+]?)|(?P<choice>\|)',
  re.DOTALL,
)
# Names have about 2^5 places where a repetition may end. 2^20 ways take at most 0.05 s for a name.
_LOG_WAYS = {'group': 99, 'repeat': 5, 'choice': 1}
_MAX_WAYS = 2**20


def _is_pattern(value: Any) -> bool:
  try:
    return isinstance(value, str) and bool(re.compile(_END.format(value)))
  except re.error:
    return False


def _num_ways(pattern: str) -> int:
  """Return the order of the number of ways in which a search tries to match a name."""
  log_ways = sum(_LOG_WAYS.get(part.lastgroup or '', 0) for part in _PARTS.finditer(pattern))
  return 2 ** min(log_ways, 99)


_POSITIVE = checks.number(above=0)
_PATTERNS = checks.Expectation(
  'an object of regular expressions and numbers > 0',
  lambda value: all(_is_pattern(key) and _POSITIVE.holds(value[key]) for key in _items(value)),
)
# Keys that decide what the adapter computes.
_KNOWN = {
  'peft_type': checks.one_of(('LORA',), _MERGE),
  'r': checks.number(at_least=1, integer=True),
  'lora_alpha': _POSITIVE,
  'lora_dropout': checks.number(at_least=0, below=1),
  'target_modules': checks.Expectation(
    'a list of names of modules or a regular expression',
    lambda value: bool(value) and all(map(_is_pattern, _items(value))),
  ),
  'use_rslora': checks.one_of((True, False)),
  'rank_pattern': _PATTERNS,
  'alpha_pattern': _PATTERNS,
  'init_lora_weights': checks.one_of((True, False, 'gaussian', 'eva', 'orthogonal'), _CONVERT),
  'bias': checks.one_of(('none',), _MERGE),
}
# PEFT's values of keys that are null or missing.
_DEFAULTS = {
  'lora_dropout': 0.0,
  'use_rslora': False,
  'rank_pattern': {},
  'alpha_pattern': {},
  'init_lora_weights': True,
  'bias': 'none',
}
# Keys that do not change the result: the names of the tensors say which modules have an adapter.
_WITHOUT_EFFECT = {
  'auto_mapping',
  'base_model_name_or_path',
  'eva_config',
  'exclude_modules',
  'inference_mode',
  'layers_pattern',
  'layers_to_transform',
  'peft_version',
  'revision',
  'task_type',
}
# PEFT's values, other than null, false and empty ones, of keys that we do not support.
_UNUSED = {'megatron_core': 'megatron.core', 'qalora_group_size': 16}


def _items(value: Any) -> list[Any]:
  """Return the keys of an object or the elements of a list; another value is its only element."""
  return list(value) if isinstance(value, list | dict) else [value]


def read(folder: files.Path) -> dict[str, Any]:
  """Return the keys of the file that decide what the adapter computes, with PEFT's defaults.

  Raises:
    CheckpointError: the file is damaged, or the adapter is not a LoRA that is only added to the base.
  """
  found = config_json.read(folder, CONFIG_FILE)
  owner = str(folder / CONFIG_FILE)
  config: dict[str, Any] = {
    key: _DEFAULTS.get(key) if found.get(key) is None else found[key] for key in _KNOWN
  }
  checks.check(owner, config, CheckpointError, **_KNOWN)
  for key in found.keys() - _KNOWN - _WITHOUT_EFFECT:
    value = found[key]
    is_unset = value is None or value is False or value in ('', [], {})
    if not is_unset and _UNUSED.get(key) != value:
      raise checks.invalid(owner, key, 'null, false or empty', value, _MERGE, CheckpointError)
  expressions = [*config['rank_pattern'], *config['alpha_pattern']]
  if isinstance(config['target_modules'], str):
    expressions.append(config['target_modules'])
  if sum(map(_num_ways, expressions)) > _MAX_WAYS:
    slow = max(expressions, key=_num_ways)
    raise CheckpointError(
      f'{owner} must have regular expressions with at most four repetitions, none of a group, and few alternatives, '
      f'got {printable(slow)[:200]}. Others may take years: list the modules instead.'
    )
  return config


def make(
  adapters: Mapping[str, tuple[int, float]], linear_modules: Iterable[str], **options: Any
) -> dict[str, Any]:
  """Return the contents of the file, with keys that PEFT has had for years: old versions reject keys of newer ones.

  Args:
    adapters: (rank, alpha) by module, for each module with an adapter.
    linear_modules: all linear modules of the model.
    **options: further keys.
  """
  rank, alpha = collections.Counter(adapters.values()).most_common(1)[0][0]
  config = {
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'lora_alpha': alpha,
    'modules_to_save': None,
    'peft_type': 'LORA',
    'r': rank,
    'target_modules': sorted({module.rpartition('.')[2] for module in adapters}),
    'task_type': 'SEQ_2_SEQ_LM',
    **options,
  }
  if {module for module in linear_modules if is_target(config, module)} != set(adapters):
    config['target_modules'] = sorted(adapters)
  ranks = {module: own for module, (own, _) in adapters.items() if own != rank}
  alphas = {module: own for module, (_, own) in adapters.items() if own != alpha}
  if ranks:
    config['rank_pattern'] = ranks
  if alphas:
    config['alpha_pattern'] = alphas
  return dict(sorted(config.items()))


def is_target(config: Mapping[str, Any], module: str) -> bool:
  """Return True if PEFT gives the module an adapter."""
  targets = config['target_modules']
  if isinstance(targets, str):
    return targets == _ALL_LINEAR or re.fullmatch(targets, module) is not None
  return any(f'.{module}'.endswith(f'.{each}') for each in targets)


def rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
  """Return the rank and the alpha of a module's adapter."""

  def value_of(patterns: str, default: str) -> Any:
    for pattern, value in config[patterns].items():
      if re.fullmatch(_END.format(pattern), module):
        return value
    return config[default]

  return value_of('rank_pattern', 'r'), value_of('alpha_pattern', 'lora_alpha')
