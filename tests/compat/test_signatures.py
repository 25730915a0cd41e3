"""T5X's public names accept the same arguments here, by recorded signatures of T5X.

`golden/t5x_signatures.json` has each public name of T5X's modules with its kind and signature, recorded with inspect
from T5X (commit cc342d41) without annotations. Defaults are Python expressions: literals, names of functions and
classes, or `...` for values without a name. `self` and Flax's `parent` and `name` are omitted.
"""

import ast
import enum
import functools
import importlib
import inspect
import json
import pathlib

import flax.core
import gin
import jax
import numpy as np
import pytest

from t5x_lite.compat import names
from t5x_lite.compat import views

_RECORDED = json.loads(
  (pathlib.Path(__file__).parents[1] / 'golden' / 't5x_signatures.json').read_text()
)
_FLAX_FIELDS = ('parent', 'name')
_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY

_CACHE = 'takes variables in T5X; subclasses override project_key_value'
_DECODER_PARAMS = (
  'the default is that of default_decoder_params, which is that of T5X if it is not set'
)
_EVALUATOR = {
  'inference_evaluator_cls=None instead of seqio.evaluation.Evaluator': 'the same metrics without seqio'
}
_MUTABLES = {
  '.apply_gradient: flax_mutables=None instead of {}': 'keeps the mutable collections, which T5X drops'
}
_POSITION = 'a run continues at its position in the data'

# All differences of names whose signature differs on purpose, with the reason of each; docs/from_t5x.md has the
# consequence for users.
DIFFERENT = {
  't5x.examples.decoder_only.layers.MultiHeadDotProductAttention': {
    'no .update_cache_prefill': _CACHE,
    'no .update_cache_decode': _CACHE,
  },
  't5x.contrib.moe.models.MoeEncoderDecoderModel': {
    '.predict_batch_with_aux: return_all_decodes=None instead of False': _DECODER_PARAMS,
    '.predict_batch_with_aux: num_decodes=None instead of 1': _DECODER_PARAMS,
  },
  't5x.contrib.moe.partitioning.MoePjitPartitioner': {
    'num_expert_partitions is not at position 0': 'num_experts of earlier versions of T5X is first'
  },
  't5x.train_state.FlaxOptimTrainState': _MUTABLES,
  't5x.train_state.TrainState': _MUTABLES,
  't5x.eval.evaluate': _EVALUATOR,
  't5x.infer.write_inferences_to_file': {
    "json_encoder_cls=<class 't5x_lite.storage.json_lines.JsonEncoder'> instead of "
    'seqio.loggers.TensorAndNumpyEncoder': 'it writes what that of seqio writes'
  },
  't5x.train.train': _EVALUATOR,
  't5x.utils.RestoreCheckpointConfig': {'restore_dataset=True instead of False': _POSITION},
  't5x.utils.SaveCheckpointConfig': {'save_dataset=True instead of False': _POSITION},
}


def _resolve(module: str, name: str):
  """Return our object for a name of T5X; see `compat.names`."""
  place = views.find(module, name)
  if place is None:
    raise AttributeError(views.why_no_name(module, name))
  return functools.reduce(getattr, place.name.split('.'), importlib.import_module(place.module))


def _parameters(signature: str) -> list[tuple[str, str, ast.expr | None]]:
  """Return (kind, name, default) of each parameter of a recorded signature; '*' and '**' are kinds too."""
  arguments = ast.parse(f'def f{signature}: pass').body[0].args
  defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
  found = [
    ('positional', arg.arg, default) for arg, default in zip(arguments.args, defaults, strict=True)
  ]
  if arguments.vararg:
    found.append(('*', arguments.vararg.arg, None))
  found += [
    ('keyword', arg.arg, default)
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
  ]
  if arguments.kwarg:
    found.append(('**', arguments.kwarg.arg, None))
  return found


def _is_default(value, recorded: ast.expr) -> bool:
  """Return whether our default is the recorded one."""
  if isinstance(recorded, ast.Constant) and recorded.value is ...:
    return value is not inspect.Parameter.empty
  if isinstance(recorded, ast.Call):
    return value == jax.sharding.PartitionSpec(*(argument.value for argument in recorded.args))
  if isinstance(recorded, ast.Name | ast.Attribute):
    name = recorded.id if isinstance(recorded, ast.Name) else recorded.attr
    if name == 'REQUIRED':
      return value is gin.REQUIRED
    return name in (getattr(value, '__name__', None), str(value).rpartition('.')[2])
  literal = ast.literal_eval(recorded)
  if literal == {} and (isinstance(value, flax.core.FrozenDict) or str(value) == '<factory>'):
    value = {}
  return type(value) is type(literal) and value == literal


def differences(recorded: str, ours: inspect.Signature) -> list[str]:
  """Return why a call that T5X's signature accepts may fail, or mean something else, with ours."""
  found: list[str] = []
  positional = [p for p in ours.parameters.values() if p.kind in _ANY]
  kinds, position = {parameter.kind for parameter in ours.parameters.values()}, 0
  for kind, name, default in _parameters(recorded):
    if kind in ('*', '**'):
      if (
        getattr(inspect.Parameter, 'VAR_POSITIONAL' if kind == '*' else 'VAR_KEYWORD') not in kinds
      ):
        found.append(f'no {kind}{name}')
      continue
    parameter = ours.parameters.get(name)
    if kind == 'positional':
      at_position = positional[position] if position < len(positional) else None
      position += 1
      if parameter is None or parameter is not at_position:
        found.append(f'{name} is not at position {position - 1}')
        continue
    if parameter is None:
      found.append(f'no {name}')
      continue
    if default is not None and not _is_default(parameter.default, default):
      found.append(f'{name}={parameter.default!r} instead of {ast.unparse(default)}')
  # A recorded '*' passes on arguments whose names are not recorded.
  forwards = any(kind == '*' for kind, _, _ in _parameters(recorded))
  required = (
    []
    if forwards
    else [
      p.name
      for p in ours.parameters.values()
      if p.default is p.empty
      and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
      and p.name not in {n for _, n, _ in _parameters(recorded)}
    ]
  )
  return found + [f'{name} is required' for name in required if name not in _FLAX_FIELDS]


def _method_signature(cls: type, name: str) -> inspect.Signature:
  static = inspect.getattr_static(cls, name)
  signature = inspect.signature(getattr(cls, name))
  if isinstance(static, classmethod | staticmethod):
    return signature
  return signature.replace(parameters=list(signature.parameters.values())[1:])


def _differences_of_methods(cls: type, recorded: dict[str, str]) -> list[str]:
  found = []
  for name, signature in recorded.items():
    fields = getattr(cls, '__dataclass_fields__', {})
    if not hasattr(cls, name) and name not in fields:
      found.append(f'no .{name}')
    elif signature != 'property':
      found += [f'.{name}: {text}' for text in differences(signature, _method_signature(cls, name))]
  return found


def differences_of_name(module: str, name: str) -> list[str]:
  """Return the differences of one public name of T5X; empty if every use of it is accepted here."""
  recorded = _RECORDED[module][name]
  try:
    value = _resolve(module, name)
  except (AttributeError, ImportError, KeyError) as error:
    return [f'{type(error).__name__}: {error}']
  kind = recorded['kind']
  if kind == 'constant':
    expression = ast.parse(recorded['value'], mode='eval').body
    same = (
      isinstance(expression, ast.Constant)
      and expression.value is ...
      or np.all(
        np.isclose(value, ast.literal_eval(expression), rtol=1e-6)
        if isinstance(value, float | jax.Array | np.ndarray)
        else value == ast.literal_eval(expression)
      )
    )
    return [] if same else [f'{value!r} instead of {recorded["value"]}']
  base = {'enum': enum.Enum, 'exception': Exception, 'class': object, 'protocol': object}.get(kind)
  if base is not None and not (isinstance(value, type) and issubclass(value, base)):
    return [f'{value!r} is not a class of {base.__name__}']
  found = (
    differences(recorded['signature'], inspect.signature(value)) if 'signature' in recorded else []
  )
  return found + _differences_of_methods(value, recorded.get('methods', {}))


_ALL = [(module, name) for module, recorded in _RECORDED.items() for name in recorded]


@pytest.mark.parametrize('module', _RECORDED)
def test_names_accept_the_arguments_of_t5x(module):
  found = {
    f'{module}.{name}': differences_of_name(module, name)
    for name in _RECORDED[module]
    if name not in names.MODULES[module].left_out
  }
  expected = {
    name: [*texts] for name, texts in DIFFERENT.items() if name.rpartition('.')[0] == module
  }
  assert {name: texts for name, texts in found.items() if texts} == expected


def test_at_least_95_percent_of_the_names_are_here():
  missing = [
    f'{module}.{name}'
    for module, name in _ALL
    if name in names.MODULES[module].left_out or f'{module}.{name}' in DIFFERENT
  ]
  assert len(_ALL) == 308
  assert len(missing) <= 0.05 * len(_ALL), missing


def test_differences_are_found():
  def ours(a, b=1, *, c=None, d=2):
    del a, b, c, d

  signature = inspect.signature(ours)
  assert not differences('(a, b=1, *, c=None)', signature)
  assert differences('(a, b=2)', signature) and differences('(a, b=1.0)', signature)
  assert differences('(b=1, a=2)', signature) and differences('(a, b=1, c=None)', signature)
  assert differences('(b=1)', signature) and differences('(a, **kwargs)', signature)
