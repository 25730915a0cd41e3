"""Exported programs as a TensorFlow SavedModel. Besides `data.seqio_*`, only this module imports TensorFlow.

The StableHLO of each program becomes one TensorFlow operation (XlaCallModule), so that results equal JAX's up to
rounding. TensorFlow often includes an older StableHLO than JAX, and cannot infer shapes within composite operations if
the number of rows is symbolic. Composites are therefore inlined, and programs are written in the oldest StableHLO
version that supports them.
"""

from collections.abc import Mapping, Sequence
import contextlib
import os
from typing import Any
import warnings

import jax
import numpy as np

from t5x_lite.configuration import module_imports
from t5x_lite.errors import ConfigError, needs_packages

_DEFAULT_SIGNATURE = 'serving_default'
# First version with batch dims in gathers, which decoding uses.
_STABLEHLO_VERSION = '1.1.0'

# TensorFlow reads these when it is imported, as in `data.seqio.packages`: fewer log lines.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


def check_tensorflow() -> None:
  """Raise if TensorFlow is missing or cannot call programs of the installed JAX.

  Raises:
    ConfigError: with the versions.
  """
  _, xla = _import()
  ours = jax.config.values['jax_export_calling_convention_version']
  theirs = xla.call_module_maximum_supported_version()
  if ours > theirs:
    raise ConfigError(
      f'`save.saved_model` requires a TensorFlow that supports calling convention {ours} of the '
      f'installed JAX, got one that supports versions up to {theirs}. Update TensorFlow.'
    )


def _import() -> tuple[Any, Any]:
  with (
    warnings.catch_warnings(),
    needs_packages(
      '`save.saved_model`',
      'TensorFlow',
      command='pip install tensorflow',
      otherwise='export without SavedModel',
    ),
  ):
    warnings.simplefilter('ignore')
    module_imports.import_triton_first()
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla
  with contextlib.suppress(RuntimeError):  # TensorFlow was initialized before.
    tf.config.set_visible_devices([], 'GPU')  # JAX uses the memory of accelerators.
  return tf, xla


def write_saved_model(
  folder: str,
  programs: Mapping[str, jax.export.Exported],
  argument_names: Mapping[str, Sequence[str]],
  variables: Mapping[str, np.ndarray],
) -> None:
  """Write a SavedModel with a signature for each program; the first is also `serving_default`.

  Args:
    folder: path of the SavedModel.
    programs: programs by name, functions of a dict of variables and of arrays that return a dict of arrays.
    argument_names: names of the arrays, by program.
    variables: variables by name, which are stored once, as TensorFlow variables.
  """
  tf, xla = _import()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TensorFlow uses its deprecated functions.
    module = tf.Module()
    # TensorFlow saves the variables that it finds in attributes.
    module.parameters = {
      str(i): tf.Variable(variables[name], trainable=False, name=name.replace('/', '.'))
      for i, name in enumerate(sorted(variables))
    }
    parameters = [module.parameters[str(i)] for i in range(len(variables))]
    functions = {
      name: _signature(tf, xla, parameters, exported, argument_names[name])
      for name, exported in programs.items()
    }
    tf.saved_model.save(
      module, folder, signatures={_DEFAULT_SIGNATURE: next(iter(functions.values())), **functions}
    )


def _signature(
  tf: Any,
  xla: Any,
  parameters: Sequence[Any],
  exported: jax.export.Exported,
  argument_names: Sequence[str],
) -> Any:
  """Return a TensorFlow function of the program's arrays, by name.

  Args:
    tf: the module tensorflow.
    xla: TensorFlow's module of XLA operations.
    parameters: variables in the order of their names, as JAX flattens a dict.
    exported: the program.
    argument_names: names of its arrays.
  """
  content = _for_tensorflow(exported)
  out_avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)

  def shape(aval):
    return [dim if isinstance(dim, int) else None for dim in aval.shape]

  def call(*arrays):
    flat = [*parameters, *arrays]
    results = xla.call_module(
      [flat[i] for i in exported.module_kept_var_idx],
      version=exported.calling_convention_version,
      module=content,
      Tout=[tf.dtypes.as_dtype(aval.dtype) for aval in exported.out_avals],
      Sout=list(map(shape, exported.out_avals)),
      platforms=[platform.upper() for platform in exported.platforms],
      disabled_checks=[str(check) for check in exported.disabled_safety_checks],
      use_shardy_partitioner=bool(jax.config.values['jax_use_shardy_partitioner']),
    )
    return dict(zip(sorted(out_avals), results, strict=True))

  specs = [
    tf.TensorSpec(shape(aval), tf.dtypes.as_dtype(aval.dtype), name=name)
    for name, aval in zip(argument_names, exported.in_avals[len(parameters) :], strict=True)
  ]
  return tf.function(call, input_signature=specs, autograph=False)


def _for_tensorflow(exported: jax.export.Exported) -> bytes:
  """Return the program's StableHLO without composites, in an old version."""
  from jax.extend.mlir import ir
  from jax.extend.mlir import passmanager
  from jax.extend.mlir.dialects import chlo
  from jax.extend.mlir.dialects import stablehlo

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
      raise ConfigError(
        f'`save.saved_model`: TensorFlow reads programs only up to StableHLO {_STABLEHLO_VERSION}, '
        'and this program needs a later version. Use another decoding algorithm, or export without '
        'SavedModel.'
      ) from error
