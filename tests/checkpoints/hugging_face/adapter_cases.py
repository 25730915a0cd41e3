"""Adapters of PEFT, made with NumPy alone."""

import json

import numpy as np

from t5x_lite.checkpoints.hugging_face import tensor_table
from tests.checkpoints.hugging_face import hugging_face_cases as cases

CONFIG = {
  'peft_type': 'LORA',
  'task_type': 'SEQ_2_SEQ_LM',
  'base_model_name_or_path': 'base',
  'r': 2,
  'lora_alpha': 6,
  'lora_dropout': 0.1,
  'target_modules': ['q', 'v'],
  'bias': 'none',
  'fan_in_fan_out': False,
  'inference_mode': True,
  'modules_to_save': None,
}
QUERY_VALUE = ('query', 'value')
ALL = (*QUERY_VALUE, 'key', 'out', 'wi', 'wi_0', 'wi_1', 'wo')


def modules(arch, projections=QUERY_VALUE):
  """Returns module -> (our kernel, number of the expert or None, inputs, outputs), of kernels with these names."""
  found = {}
  for rule in tensor_table(arch):
    parts = rule.ours.split('/')
    if parts[-1] == 'kernel' and parts[-2] in projections:
      for i, name in enumerate(rule.theirs):
        expert = i if len(rule.shape) == 3 else None
        found[name.removesuffix('.weight')] = (rule.ours, expert, *rule.shape[-2:])
  return found


def tensors(arch, projections=QUERY_VALUE, rank=2, dtype=np.float32, seed=0):
  """Returns the tensors of an adapter; `rank` may be a function of the module."""
  rng = np.random.default_rng(seed)
  found = {}
  for module, (_, _, size_in, size_out) in modules(arch, projections).items():
    own = rank(module) if callable(rank) else rank
    for letter, shape in (('A', (own, size_in)), ('B', (size_out, own))):
      name = f'base_model.model.{module}.lora_{letter}.weight'
      found[name] = rng.standard_normal(shape).astype(dtype)
  return found


def make(folder, named, **changes):
  """Makes a folder of an adapter and returns it; `changes` are those of `CONFIG`."""
  folder.mkdir()
  cases.write_safetensors(folder / 'adapter_model.safetensors', named, format='pt')
  (folder / 'adapter_config.json').write_text(json.dumps(CONFIG | changes))
  return folder


def merged(arch, base, named, scale, projections=QUERY_VALUE):
  """Returns the base's arrays with an adapter, in float64; `scale` is a function of the module."""
  result = {name: value.astype(np.float64) for name, value in base.items()}
  for module, (kernel, expert, _, _) in modules(arch, projections).items():
    a, b = (
      named[f'base_model.model.{module}.lora_{letter}.weight'].astype(np.float64) for letter in 'AB'
    )
    where = result[kernel] if expert is None else result[kernel][expert]
    where += scale(module) * (b @ a).T
  return result
