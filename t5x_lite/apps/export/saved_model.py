"""The exported programs as a TensorFlow SavedModel: the one room besides `data.seqio_*` that imports TensorFlow.

The StableHLO of the programs becomes one operation of TensorFlow each (XlaCallModule), so that a model gives what it
gives in JAX up to rounding. TensorFlow is built with an older StableHLO than JAX as a rule, and cannot tell the shapes
within composite operations when the number of rows is open; so composites are replaced by what they stand for, and the
programs are written in the oldest version of StableHLO that has all that is needed.
"""

from collections.abc import Mapping, Sequence
import os
import warnings
from typing import Any

import jax
import numpy as np

from t5x_lite.errors import ConfigError

_DEFAULT_SIGNATURE = 'serving_default'
# The first version with batch dims in gathers, which decoding needs.
_STABLEHLO_VERSION = '1.1.0'

# Read by TensorFlow when it is loaded, as in `data.seqio_import`: no chatter.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


def check_tensorflow() -> None:
  """Refuses an environment without TensorFlow, or with one that cannot call programs of this JAX.

  Raises:
    ConfigError: see above.
  """
  _, xla = _import()
  ours, theirs = jax.config.jax_export_calling_convention_version, xla.call_module_maximum_supported_version()
  if ours > theirs:
    raise ConfigError(f'saved_model is True, but the installed TensorFlow calls programs up to version {theirs} of the '
                      f'calling convention, and this JAX writes version {ours}. Update TensorFlow, or leave the option '
                      'out.')


def _import() -> tuple[Any, Any]:
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    try:
      import tensorflow as tf
      from tensorflow.compiler.tf2xla.python import xla
    except ImportError as error:
      raise ConfigError(f'saved_model is True, but TensorFlow cannot be imported ({error}). Install it with '
                        "`pip install tensorflow`, or leave the option out: the StableHLO files need JAX alone."
                        ) from error
  try:
    tf.config.set_visible_devices([], 'GPU')  # the accelerators' memory is JAX's
  except RuntimeError:
    pass  # TensorFlow is in use already, with devices of somebody's choice.
  return tf, xla


def write_saved_model(folder: str, programs: Mapping[str, jax.export.Exported],
                      argument_names: Mapping[str, Sequence[str]], variables: Mapping[str, np.ndarray]) -> None:
  """Writes a SavedModel with a signature for each program; the first is also `serving_default`.

  Args:
    folder: where to.
    programs: name to program, a function of a dict of variables and of arrays that returns a dict of arrays.
    argument_names: name of a program to the names of its arrays.
    variables: name to value; they are stored once, as variables of TensorFlow.
  """
  tf, xla = _import()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of TensorFlow, about itself
    module = tf.Module()
    # An attribute: TensorFlow finds what it has to save by them.
    module.parameters = {str(i): tf.Variable(variables[name], trainable=False, name=name.replace('/', '.'))
                         for i, name in enumerate(sorted(variables))}
    parameters = [module.parameters[str(i)] for i in range(len(variables))]
    functions = {name: _signature(tf, xla, parameters, exported, argument_names[name])
                 for name, exported in programs.items()}
    tf.saved_model.save(
        module, folder, signatures={_DEFAULT_SIGNATURE: next(iter(functions.values())), **functions})


def _signature(tf: Any, xla: Any, parameters: Sequence[Any], exported: jax.export.Exported,
               argument_names: Sequence[str]) -> Any:
  """Returns a function of TensorFlow of the program's arrays, by name.

  Args:
    tf: TensorFlow.
    xla: its module of XLA's operations.
    parameters: the variables, in the order of their names, as JAX flattens a dict.
    exported: the program.
    argument_names: of its arrays.
  """
  content = _for_tensorflow(exported)
  out_avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)

  def shape(aval):
    return [dim if isinstance(dim, int) else None for dim in aval.shape]

  def call(*arrays):
    flat = [*parameters, *arrays]
    results = xla.call_module(
        [flat[i] for i in exported.module_kept_var_idx], version=exported.calling_convention_version, module=content,
        Tout=[tf.dtypes.as_dtype(aval.dtype) for aval in exported.out_avals], Sout=list(map(shape, exported.out_avals)),
        platforms=[platform.upper() for platform in exported.platforms],
        disabled_checks=[str(check) for check in exported.disabled_safety_checks],
        use_shardy_partitioner=bool(jax.config.jax_use_shardy_partitioner))
    return dict(zip(sorted(out_avals), results, strict=True))

  specs = [tf.TensorSpec(shape(aval), tf.dtypes.as_dtype(aval.dtype), name=name)
           for name, aval in zip(argument_names, exported.in_avals[len(parameters):], strict=True)]
  return tf.function(call, input_signature=specs, autograph=False)


def _for_tensorflow(exported: jax.export.Exported) -> bytes:
  """Returns the program's StableHLO without composites, in an old version."""
  from jax.extend.mlir import ir, passmanager
  from jax.extend.mlir.dialects import chlo, stablehlo
  stablehlo.register_stablehlo_passes()
  with ir.Context() as context:
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
    passes = 'builtin.module(func.func(stablehlo-legalize-composite-to-call), inline)'
    passmanager.PassManager.parse(passes).run(module.operation)
    try:
      return stablehlo.serialize_portable_artifact(module, _STABLEHLO_VERSION)
    except ValueError as error:
      raise ConfigError(f'saved_model is True, but the program needs more than StableHLO {_STABLEHLO_VERSION}, which '
                        'TensorFlow is sure to read. Leave the option out, or use another decoding algorithm; the '
                        'StableHLO files need JAX alone.') from error
