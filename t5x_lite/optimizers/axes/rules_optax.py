"""Rules for those states of optax, `optax.contrib` and `optax.experimental` whose axes their shapes do not tell.

A row names a class, of any module of optax, and gives the kinds of fields, see `OptaxStatePartitionRules`. Rows for
classes or fields that the installed optax does not have are ignored.
"""

from collections.abc import Mapping

from t5x_lite.optimizers.axes import reduced
from t5x_lite.optimizers.axes.kinds import StateRule

# Class name to the kinds of its fields, or to a rule if fields depend on each other.
StateTable = Mapping[str, Mapping[str, str] | StateRule]

OPTAX_STATES: StateTable = {
  # Random keys.
  'AddNoiseState': {'rng_key': 'replicated'},
  'DifferentiallyPrivateAggregateState': {'rng_key': 'replicated'},
  'HutchinsonState': {'key': 'replicated'},
  # Short tables: one number for each of the tuner's betas; the coefficients, or those of each iteration.
  'MechanicState': dict.fromkeys(('r', 'm', 'v', 's'), 'replicated'),
  'MuonState': {'ns_coeffs': 'replicated'},
  # Results of users' functions: a number, a table, a copy of the updates. The first class is of older releases.
  'InjectHyperparamsState': {'hyperparams': 'matched'},
  'InjectStatefulHyperparamsState': {'hyperparams': 'matched', 'hyperparams_states': 'matched'},
  'MonitorState': {'measurements': 'matched', 'measure_states': 'matched'},
  'MultiStepsState': {'skip_state': 'matched'},
  'SnapshotState': {'measurement': 'matched'},
  # Copies of the parameters, and one number for each: [m, *shape], where m may be the size of a dim.
  'ScaleByLBFGSState': {
    'diff_params_memory': 'leading_dims',
    'diff_updates_memory': 'leading_dims',
    'weights_memory': 'replicated',
  },
  # States of other trees of parameters than the trained ones, and statistics that the sizes do not tell apart.
  'FactoredState': reduced.derive_factored,
  'GaLoreState': reduced.derive_galore,
  'LookaheadParams': reduced.derive_lookahead_params,
  'LookaheadState': reduced.derive_lookahead,
  'SplitRealAndImaginaryState': reduced.derive_split_complex,
}
