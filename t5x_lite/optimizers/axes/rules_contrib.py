"""The table of the state classes of `optax.contrib` and `optax.experimental`; see `rules_optax`.

Rows name classes, so this module imports neither package.
"""

from t5x_lite.optimizers.axes import reduced
from t5x_lite.optimizers.axes.rules_optax import StateTable

_COPY, _INNER, _COUNT, _SMALL = 'params', 'nested', 'scalar', 'replicated'

CONTRIB_STATES: StateTable = {
    'optax.contrib': {
        'COCOBState': {
            'init_particles': _COPY, 'cumulative_gradients': _COPY, 'scale': _COPY, 'subgradients': _COPY,
            'reward': _COPY},
        'DAdaptAdamWState': {
            'exp_avg': _COPY, 'exp_avg_sq': _COPY, 'grad_sum': _COPY, 'estim_lr': _COUNT,
            'numerator_weighted': _COUNT, 'count': _COUNT},
        'DifferentiallyPrivateAggregateState': {'rng_key': _SMALL},
        'DoGState': {
            'is_init_step': _COUNT, 'init_params': _COPY, 'max_dist': _COUNT, 'sum_sq_norm_grads': _COUNT},
        'DoWGState': {'init_params': _COPY, 'weighted_sq_norm_grads': _COUNT, 'estim_sq_dist': _COUNT},
        'GaLoreState': reduced.derive_galore,
        'HutchinsonState': {'key': _SMALL},
        'MadgradState': {'count': _COUNT, 'grad_sum_sq': _COPY, 's': _COPY, 'x0': _COPY},
        # One number for each of the tuner's betas.
        'MechanicState': {
            'base_optimizer_state': _INNER, 'count': _COUNT, 'r': _SMALL, 'm': _SMALL, 'v': _SMALL, 's': _SMALL,
            'x0': _COPY},
        'MomoAdamState': {
            'exp_avg': _COPY, 'exp_avg_sq': _COPY, 'barf': _COUNT, 'gamma': _COUNT, 'lb': _COUNT, 'count': _COUNT},
        'MomoState': {'exp_avg': _COPY, 'barf': _COUNT, 'gamma': _COUNT, 'lb': _COUNT, 'count': _COUNT},
        # Three coefficients, or three for each iteration.
        'MuonState': {'count': _COUNT, 'mu': _COPY, 'ns_coeffs': _SMALL},
        'ProdigyState': {
            'exp_avg': _COPY, 'exp_avg_sq': _COPY, 'grad_sum': _COPY, 'params0': _COPY, 'estim_lr': _COUNT,
            'numerator_weighted': _COUNT, 'count': _COUNT},
        'ReduceLROnPlateauState': dict.fromkeys(
            ('scale', 'best_value', 'plateau_count', 'cooldown_count', 'count', 'avg_value'), _COUNT),
        'SAMState': {'steps_since_sync': _COUNT, 'opt_state': _INNER, 'adv_state': _INNER, 'cache': _COPY},
        'ScaleByAdemamixState': {'count': _COUNT, 'count_m2': _COUNT, 'm1': _COPY, 'm2': _COPY, 'nu': _COPY},
        'ScaleBySimplifiedAdEMAMixState': {'t': _COUNT, 'm': _COPY, 'n': _COPY},
        'ScheduleFreeState': {
            'b1': _COUNT, 'weight_sum': _COUNT, 'step_count': _COUNT, 'max_lr': _COUNT,
            'base_optimizer_state': _INNER, 'z': _COPY},
        'SophiaState': {'count': _COUNT, 'mu': _COPY, 'nu': _COPY, 'hessian_fn_state': _INNER},
        'SplitRealAndImaginaryState': reduced.derive_split_complex,
    },
    'optax.experimental._aggregating': {
        'AccumulateAvgUpdatesState': {'micro_step': _COUNT, 'ready': _COUNT, 'avg_grad': _COPY},
        'PerElementMeanAndSumSqDiffGradsState': {
            'micro_step': _COUNT, 'ready': _COUNT, 'mean_grads': _COPY, 'sum_sq_diff_grads': _COPY},
        'PerElementMeanAndVarianceEMAState': {
            'count': _COUNT, 'ema_decay': _COUNT, 'mean_grads_ema': _COPY, 'variance_grads_ema': _COPY},
    },
}
