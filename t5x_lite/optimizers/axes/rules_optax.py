"""Table of the state classes of optax, `optax.contrib` and `optax.experimental`, which it does not import.

A row names a class, of any module of optax, and gives the kind of each field, see `OptaxStatePartitionRules`. Rows for
classes or fields that the installed optax does not have are ignored.
"""

from collections.abc import Mapping

from t5x_lite.optimizers.axes import reduced
from t5x_lite.optimizers.axes.kinds import StateRule

# Class name to the kinds of its fields, or to a rule if fields depend on each other.
StateTable = Mapping[str, Mapping[str, str] | StateRule]

_COPY = 'params'
_INNER = 'nested'
_COUNT = 'scalar'
_SMALL = 'replicated'

OPTAX_STATES: StateTable = {
  # Transformations without state; several names of optax are aliases of this class.
  'EmptyState': {},
  # Statistics of gradients, one array per parameter.
  'ApplyEvery': {'count': _COUNT, 'grad_acc': _COPY},
  'EmaState': {'count': _COUNT, 'ema': _COPY},
  'ScaleByAdaDeltaState': {'e_g': _COPY, 'e_x': _COPY},
  'ScaleByAdamState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY},
  'ScaleByAdanState': {'m': _COPY, 'v': _COPY, 'n': _COPY, 'g': _COPY, 't': _COUNT},
  'ScaleByAmsgradState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY, 'nu_max': _COPY},
  'ScaleByBeliefState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY},
  'ScaleByLionState': {'count': _COUNT, 'mu': _COPY},
  'ScaleByRmsState': {'nu': _COPY},
  'ScaleByRpropState': {'step_sizes': _COPY, 'prev_updates': _COPY},
  'ScaleByRssState': {'sum_of_squares': _COPY},
  'ScaleByRStdDevState': {'mu': _COPY, 'nu': _COPY},
  'TraceState': {'trace': _COPY},
  # Statistics with fewer or more elements than the parameters.
  'FactoredState': reduced.derive_factored,
  'ScaleByLBFGSState': {
    'count': _COUNT,
    'params': _COPY,
    'updates': _COPY,
    'diff_params_memory': 'leading_dims',
    'diff_updates_memory': 'leading_dims',
    'weights_memory': _SMALL,
  },
  'ScaleByNovogradState': {'count': _COUNT, 'mu': _COPY, 'nu': 'per_parameter_scalar'},
  'ScaleBySM3State': {'mu': 'per_dim', 'nu': _COPY},
  'ZeroNansState': {'found_nan': 'per_parameter_scalar'},
  # Line searches.
  'ScaleByBacktrackingLinesearchState': {
    'learning_rate': _COUNT,
    'value': _COUNT,
    'grad': _COPY,
    'info': _INNER,
  },
  'ScaleByZoomLinesearchState': {
    'learning_rate': _COUNT,
    'value': _COUNT,
    'grad': _COPY,
    'info': _INNER,
  },
  'ZoomLinesearchInfo': {
    'num_linesearch_steps': _COUNT,
    'decrease_error': _COUNT,
    'curvature_error': _COUNT,
  },
  # Counters and random keys.
  'AddNoiseState': {'count': _COUNT, 'rng_key': _SMALL},
  'ScaleByScheduleState': {'count': _COUNT},
  # Wrappers.
  'ApplyIfFiniteState': {
    'notfinite_count': _COUNT,
    'last_finite': _COUNT,
    'total_notfinite': _COUNT,
    'inner_state': _INNER,
  },
  'ConditionallyMaskState': {'step': _COUNT, 'inner_state': _INNER},
  'ConditionallyTransformState': {'inner_state': _INNER, 'step': _COUNT},
  'LookaheadParams': reduced.derive_lookahead_params,
  'LookaheadState': reduced.derive_lookahead,
  'MaskedState': {'inner_state': _INNER},
  # `skip_state` depends on the function that decides whether to skip.
  'MultiStepsState': {
    'mini_step': _COUNT,
    'gradient_step': _COUNT,
    'inner_opt_state': _INNER,
    'acc_grads': _COPY,
    'skip_state': 'matched',
  },
  'PartitionState': {'inner_states': _INNER},
  # Hyper-parameters may be arrays; schedules may have states of any kind. The first class is of older releases.
  'InjectHyperparamsState': {'count': _COUNT, 'hyperparams': 'matched', 'inner_state': _INNER},
  'InjectStatefulHyperparamsState': {
    'count': _COUNT,
    'hyperparams': 'matched',
    'hyperparams_states': 'matched',
    'inner_state': _INNER,
  },
  # Measurements are results of users' functions: a norm, or a copy of the updates.
  'MonitorState': {'measurements': 'matched', 'measure_states': 'matched'},
  'SnapshotState': {'measurement': 'matched'},
  # Private classes of optax.
  'BacktrackingLinesearchInfo': {'num_linesearch_steps': _COUNT, 'decrease_error': _COUNT},
  # States of line searches within one update.
  'BacktrackingLineSearchState': {
    'learning_rate': _COUNT,
    'new_value': _COUNT,
    'new_grad': _COPY,
    'decrease_error': _COUNT,
    'iter_num': _COUNT,
  },
  'ZoomLinesearchState': {
    'params': _COPY,
    'updates': _COPY,
    'grad': _COPY,
    'safe_grad': _COPY,
    **dict.fromkeys(
      (
        'count',
        'stepsize_guess',
        'stepsize',
        'value',
        'slope',
        'value_init',
        'slope_init',
        'decrease_error',
        'curvature_error',
        'error',
        'interval_found',
        'done',
        'failed',
        'low',
        'value_low',
        'slope_low',
        'high',
        'value_high',
        'slope_high',
        'cubic_ref',
        'value_cubic_ref',
        'safe_stepsize',
        'safe_value',
      ),
      _COUNT,
    ),
  },
  'ScaleByDistanceOverGradientsState': {
    'max_dist': 'per_parameter_scalar',
    'grad_sum_of_squares': 'per_parameter_scalar',
    'init_params': _COPY,
  },
  'ScaleByOptimisticGradientState': {'is_initial_step': _COUNT, 'previous_gradient': _COPY},
  'ScaleByRmsWithCountState': {'count': _COUNT, 'nu': _COPY},
  'ScaleByRStdDevWithCountState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY},
  'WrappedScheduleState': {'count': _COUNT},
  'WeightDecaySchedule': {'count': _COUNT},
  'COCOBState': {
    'init_particles': _COPY,
    'cumulative_gradients': _COPY,
    'scale': _COPY,
    'subgradients': _COPY,
    'reward': _COPY,
  },
  'DAdaptAdamWState': {
    'exp_avg': _COPY,
    'exp_avg_sq': _COPY,
    'grad_sum': _COPY,
    'estim_lr': _COUNT,
    'numerator_weighted': _COUNT,
    'count': _COUNT,
  },
  'DifferentiallyPrivateAggregateState': {'rng_key': _SMALL},
  'DoGState': {
    'is_init_step': _COUNT,
    'init_params': _COPY,
    'max_dist': _COUNT,
    'sum_sq_norm_grads': _COUNT,
  },
  'DoWGState': {'init_params': _COPY, 'weighted_sq_norm_grads': _COUNT, 'estim_sq_dist': _COUNT},
  'GaLoreState': reduced.derive_galore,
  'HutchinsonState': {'key': _SMALL},
  'MadgradState': {'count': _COUNT, 'grad_sum_sq': _COPY, 's': _COPY, 'x0': _COPY},
  # One number for each of the tuner's betas.
  'MechanicState': {
    'base_optimizer_state': _INNER,
    'count': _COUNT,
    'r': _SMALL,
    'm': _SMALL,
    'v': _SMALL,
    's': _SMALL,
    'x0': _COPY,
  },
  'MomoAdamState': {
    'exp_avg': _COPY,
    'exp_avg_sq': _COPY,
    'barf': _COUNT,
    'gamma': _COUNT,
    'lb': _COUNT,
    'count': _COUNT,
  },
  'MomoState': {'exp_avg': _COPY, 'barf': _COUNT, 'gamma': _COUNT, 'lb': _COUNT, 'count': _COUNT},
  # Three coefficients, or three for each iteration.
  'MuonState': {'count': _COUNT, 'mu': _COPY, 'ns_coeffs': _SMALL},
  'ProdigyState': {
    'exp_avg': _COPY,
    'exp_avg_sq': _COPY,
    'grad_sum': _COPY,
    'params0': _COPY,
    'estim_lr': _COUNT,
    'numerator_weighted': _COUNT,
    'count': _COUNT,
  },
  'ReduceLROnPlateauState': dict.fromkeys(
    ('scale', 'best_value', 'plateau_count', 'cooldown_count', 'count', 'avg_value'), _COUNT
  ),
  'SAMState': {
    'steps_since_sync': _COUNT,
    'opt_state': _INNER,
    'adv_state': _INNER,
    'cache': _COPY,
  },
  'ScaleByAdemamixState': {
    'count': _COUNT,
    'count_m2': _COUNT,
    'm1': _COPY,
    'm2': _COPY,
    'nu': _COPY,
  },
  'ScaleBySimplifiedAdEMAMixState': {'t': _COUNT, 'm': _COPY, 'n': _COPY},
  'ScheduleFreeState': {
    'b1': _COUNT,
    'weight_sum': _COUNT,
    'step_count': _COUNT,
    'max_lr': _COUNT,
    'base_optimizer_state': _INNER,
    'z': _COPY,
  },
  'SophiaState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY, 'hessian_fn_state': _INNER},
  'SplitRealAndImaginaryState': reduced.derive_split_complex,
  'AccumulateAvgUpdatesState': {'micro_step': _COUNT, 'ready': _COUNT, 'avg_grad': _COPY},
  'PerElementMeanAndSumSqDiffGradsState': {
    'micro_step': _COUNT,
    'ready': _COUNT,
    'mean_grads': _COPY,
    'sum_sq_diff_grads': _COPY,
  },
  'PerElementMeanAndVarianceEMAState': {
    'count': _COUNT,
    'ema_decay': _COUNT,
    'mean_grads_ema': _COPY,
    'variance_grads_ema': _COPY,
  },
}
