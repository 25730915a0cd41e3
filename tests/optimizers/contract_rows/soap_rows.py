"""SOAP in every mode that has its own code path."""

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row

# Of a gradient [16, 32], for instance, along the second dim. Blocks of square shapes have none: see `soap_blocks`.
_NULL_SPACE = {
  'sharded': 'The first basis of a null space of the statistics is arbitrary, and rounding differs by mesh.'
}
_NARROW = {'bfloat16': 'Its options ask for states in bfloat16 instead of float32.'}


def _row(exceptions=_NULL_SPACE, learning_rate=0.02, **options) -> Row:
  # A large eps: rounding would change elements whose second moments are nearly zero.
  defaults = {'eps': 1e-3, 'precondition_frequency': 3}
  return Row(lambda: optimizers.soap(**defaults | options), learning_rate, exceptions)


ROWS = {
  'soap': Row(optimizers.soap, 0.02, _NULL_SPACE),
  'soap_own_rate': Row(lambda: optimizers.soap(0.02), None, _NULL_SPACE),
  'soap_blocks': _row({}, block_size=8, spread_refreshes=True),
  'soap_sums': _row(learning_rate=0.3, b2=1.0, b1=0.0, precondition_1d=True, skip_first_step=False),
  'soap_symmetric': _row(symmetric_storage=True, merge_dims=True, max_precond_dim=32),
  'soap_integers': _row(momentum_dtype='int8', matrix_dtype='int16'),
  'soap_bfloat16': _row(
    _NULL_SPACE | _NARROW, momentum_dtype='bfloat16', second_moment_dtype='bfloat16'
  ),
  'soap_all_skipped': _row({}, max_precond_dim=1),
}
