"""Mutants of the optimizers."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'adafactor_decays_by_the_step_before',
        't5x_lite/optimizers/adafactor_rule/update.py',
        '(step - hp.step_offset).astype(jnp.float32) + 1.0, 1.0)',
        '(step - hp.step_offset).astype(jnp.float32), 1.0)',
        'tests/optimizers/adafactor_rule/test_update.py::test_decay_of_the_second_moment'),
    Mutant(
        'adafactor_clips_over_stacked_parameters',
        't5x_lite/optimizers/adafactor_rule/update.py',
        '_rms(same_update, plan.averaging_dims) / hp.clipping_threshold',
        '_rms(same_update, None) / hp.clipping_threshold',
        'tests/optimizers/adafactor_rule/test_update.py::test_stacked_parameters_train_as_if_they_were_separate'),
    Mutant(
        'adafactor_stores_squares_and_updates',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'same_grad = jax.lax.optimization_barrier(grad)',
        'same_grad = grad',
        'tests/optimizers/adafactor_rule/test_update.py::test_an_update_stores_no_array_of_the_size_of_the_parameter'),
    Mutant(
        'adafactor_scales_by_stacked_parameters',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'jnp.maximum(_rms(old_param, plan.averaging_dims), hp.epsilon2)',
        'jnp.maximum(_rms(old_param, None), hp.epsilon2)',
        'tests/optimizers/adafactor_rule/test_update.py::test_stacked_parameters_train_as_if_they_were_separate'),
    Mutant(
        'adafactor_has_no_least_parameter_scale',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'jnp.maximum(_rms(old_param, plan.averaging_dims), hp.epsilon2)',
        '_rms(old_param, plan.averaging_dims)',
        'tests/optimizers/adafactor_rule/test_update.py::test_each_option_has_its_documented_effect'),
    Mutant(
        'adafactor_momentum_forgets_1_minus_beta1',
        't5x_lite/optimizers/adafactor_rule/update.py',
        '(1.0 - hp.beta1) * update',
        'update',
        'tests/optimizers/adafactor_rule/test_optimizer.py::test_golden_trajectory'),
    Mutant(
        'adafactor_normalises_rows_over_stacked_parameters',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'jnp.mean(v_row, axis=plan.row_dims, keepdims=True)',
        'jnp.mean(v_row, axis=None, keepdims=True)',
        'tests/optimizers/adafactor_rule/test_update.py::test_equals_the_algorithm_matrix_by_matrix'),
    Mutant(
        'adafactor_weight_decay_ignores_its_exponent',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'learning_rate ** hp.weight_decay_rate_lr_exponent',
        'learning_rate',
        'tests/optimizers/adafactor_rule/test_update.py::test_each_option_has_its_documented_effect'),
    Mutant(
        'global_norm_clipping_raises_small_gradients',
        't5x_lite/optimizers/adafactor_rule/update.py',
        'jnp.minimum(1.0, threshold / norm)',
        'threshold / norm',
        'tests/optimizers/adafactor_rule/test_update.py::test_each_option_has_its_documented_effect'),
    Mutant(
        'the_larger_dim_is_the_row',
        't5x_lite/optimizers/adafactor_rule/factor_rules.py',
        '(0, 1) if shape[0] <= shape[1] else (1, 0)',
        '(0, 1) if shape[0] >= shape[1] else (1, 0)',
        'tests/optimizers/adafactor_rule/test_factor_rules.py'
        '::test_matrices_are_factored_by_size_whatever_their_rule'),
    Mutant(
        'stochastic_rounding_is_biased',
        't5x_lite/optimizers/base/rounding.py',
        '(_hashes(seed, values.shape) >> 16)) >> 16',
        '(_hashes(seed, values.shape) >> 17)) >> 16',
        'tests/optimizers/base/test_rounding.py::test_the_mean_of_rounded_numbers_is_the_number[-3.1416]'),
    Mutant(
        'stochastic_rounding_loses_nan',
        't5x_lite/optimizers/base/rounding.py',
        'jnp.where(jnp.isfinite(values), rounded',
        'jnp.where(jnp.isfinite(values) | True, rounded',
        'tests/optimizers/base/test_rounding.py::test_numbers_of_bfloat16_infinities_and_nan_are_kept'),
    Mutant(
        'stochastic_rounding_is_that_of_dropout',
        't5x_lite/optimizers/base/rounding.py',
        'else jax.random.fold_in(step_key, _STREAM)',
        'else step_key',
        'tests/test_train_step.py::test_stochastic_rounding_depends_on_the_key_of_the_step_but_not_on_dropout'),
    Mutant(
        'all_parameters_are_rounded_alike',
        't5x_lite/optimizers/base/rounding.py',
        'zlib.crc32(path.encode())',
        'zlib.crc32(b"")',
        'tests/optimizers/base/test_rounding.py'
        '::test_random_numbers_depend_on_the_path_alone_not_on_other_parameters_stacks_or_meshes'),
    Mutant(
        'the_last_match_scales_a_parameter',
        't5x_lite/optimizers/base/param_scales.py',
        'next((rule for rule in rules if',
        'next((rule for rule in reversed(rules) if',
        'tests/optimizers/base/test_param_scales.py'
        '::test_the_first_match_applies_and_stacked_layers_have_the_factors_of_their_first'),
    Mutant(
        'states_are_those_without_scales',
        't5x_lite/optimizers/optax_adapter/param_scales.py',
        'columns[index][i] for i, index',
        'columns[0][i] for i, index',
        'tests/optimizers/optax_adapter/test_param_scales.py'
        '::test_each_parameter_has_the_values_and_the_state_of_its_factors[False]'),
    Mutant(
        'a_lower_rate_averages_less',
        't5x_lite/optimizers/optax_adapter/factories.py',
        "rate_scale ** arguments['weight_lr_power'] * state.weight_sum",
        'state.weight_sum',
        'tests/optimizers/base/test_update_options.py'
        '::test_every_file_honours_scales_by_parameter[schedule_free_adamw]'),
    Mutant(
        'layers_with_other_scales_are_stacked',
        't5x_lite/optimizers/optax_adapter/wrapper.py',
        'if key is not None and self.param_scales else key',
        'if key is None else key',
        'tests/test_layer_stacks.py::test_layers_that_differ_are_stacked_apart[options 1]'),
    Mutant(
        'optax_takes_the_rate_of_the_next_step',
        't5x_lite/optimizers/optax_adapter/wrapper.py',
        'rate(state.step) if callable(rate)',
        'rate(state.step + 1) if callable(rate)',
        'tests/optimizers/optax_adapter/test_wrapper.py::test_the_rate_of_an_update_may_be_a_schedule'),
    Mutant(
        'optax_sees_half_precision',
        't5x_lite/optimizers/optax_adapter/wrapper.py',
        'array.dtype.itemsize < 4',
        'array.dtype.itemsize < 2',
        'tests/optimizers/optax_adapter/test_wrapper.py'
        '::test_narrow_parameters_accumulate_small_updates_in_float32_statistics'),
    Mutant(
        'states_share_arrays_with_parameters',
        't5x_lite/optimizers/optax_adapter/wrapper.py',
        'jax.tree.map(jnp.copy, param_states)',
        'param_states',
        'tests/optimizers/optax_adapter/test_wrapper.py::test_no_array_is_in_a_new_optimizer_twice'),
    Mutant(
        'schedule_free_evaluates_no_average',
        't5x_lite/optimizers/base/state_hooks.py',
        '(y.astype(z.dtype) - (1 - state.b1) * z) / state.b1',
        'y.astype(z.dtype)',
        'tests/optimizers/base/test_state_hooks.py::test_schedule_free_evaluates_the_average'),
    Mutant(
        'sam_evaluates_what_it_perturbs',
        't5x_lite/optimizers/base/state_hooks.py',
        'jnp.where(state.steps_since_sync == 0, param, cached)',
        'jnp.where(state.steps_since_sync > 0, param, cached)',
        'tests/optimizers/base/test_state_hooks.py::test_sam_evaluates_unperturbed_parameters'),
    Mutant(
        'excluded_paths_are_selected',
        't5x_lite/optimizers/multi/traversals.py',
        ' and not _matches_any(self.exclude, path)',
        '',
        'tests/optimizers/multi/test_traversals.py::test_selections'),
    Mutant(
        'parts_with_their_own_rate_take_the_trainers',
        't5x_lite/optimizers/multi/optimizer.py',
        'part.needs_learning_rate if self.needs_learning_rate else part.uses_learning_rate',
        'part.uses_learning_rate',
        'tests/optimizers/multi/test_parts.py::test_every_learning_rate_has_one_owner'),
    Mutant(
        'parts_evaluate_what_they_train',
        't5x_lite/optimizers/multi/optimizer.py',
        'return _paths.like(params, new_leaves)\n\n  def frozen_paths',
        'return params\n\n  def frozen_paths',
        'tests/optimizers/base/test_state_hooks.py::test_schedule_free_evaluates_the_average'),
    Mutant(
        'large_parameters_shrink_too_slowly',
        't5x_lite/optimizers/scaled_adam_rule/sizes.py',
        '-size_rate * period, step_U)',
        '-size_rate, step_U)',
        'tests/optimizers/scaled_adam_rule/test_transformation.py::test_random_options_against_the_reference'),
    Mutant(
        'bias_correction_never_ends',
        't5x_lite/optimizers/scaled_adam_rule/sizes.py',
        'jnp.where(count < _num_corrected_steps(beta2), correction, 1.0)',
        'correction',
        'tests/optimizers/scaled_adam_rule/test_transformation.py::test_random_options_against_the_reference'),
    Mutant(
        'scalars_are_clamped_after_the_update',
        't5x_lite/optimizers/scaled_adam_rule/transformation.py',
        'jnp.clip(param, -options.scalar_max, options.scalar_max) - param + delta',
        'jnp.clip(param + delta, -options.scalar_max, options.scalar_max) - param',
        'tests/optimizers/scaled_adam_rule/test_transformation.py::test_random_options_against_the_reference'),
    Mutant(
        'stacked_layers_are_one_unit',
        't5x_lite/optimizers/scaled_adam_rule/groups.py',
        'dims = (0, *(dim + 1 for dim in dims)) if is_stacked else dims',
        'dims = tuple(dim + is_stacked for dim in dims)',
        'tests/optimizers/scaled_adam_rule/test_transformation.py'
        '::test_layers_in_stacked_arrays_train_as_single_layers'),
    Mutant(
        'numbers_of_units_have_the_order_of_the_arrays',
        't5x_lite/optimizers/scaled_adam_rule/groups.py',
        'return joined if self._is_in_order else joined[self._order]',
        'return joined',
        'tests/optimizers/scaled_adam_rule/test_transformation.py'
        '::test_layers_in_stacked_arrays_train_as_single_layers'),
    Mutant(
        'groups_of_scaled_adam_are_stacked_together',
        't5x_lite/optimizers/scaled_adam_rule/transformation.py',
        'return groups.label_of(state.param_states.delta, path), batched.of(path, param.ndim)',
        'return batched.of(path, param.ndim)',
        'tests/test_layer_stacks.py::test_layers_that_differ_are_stacked_apart[label]'),
    Mutant(
        'roots_are_of_half_the_order',
        't5x_lite/optimizers/shampoo/blocks.py',
        'return 2 * len(self.merged_shape)',
        'return len(self.merged_shape)',
        'tests/optimizers/shampoo/test_update.py::test_equals_the_recorded_run'),
    Mutant(
        'the_ridge_ignores_the_padding',
        't5x_lite/optimizers/shampoo/roots.py',
        'max(pad_value, _MIN_LARGEST_EIGENVALUE)',
        '_MIN_LARGEST_EIGENVALUE',
        'tests/optimizers/shampoo/test_roots.py::test_eigh_takes_the_ridge_of_the_padded_matrix'),
    Mutant(
        'roots_with_nan_errors_are_used',
        't5x_lite/optimizers/shampoo/root_plan.py',
        'is_good = new_errors < failure_threshold',
        'is_good = ~(new_errors >= failure_threshold)',
        'tests/optimizers/shampoo/test_root_plan.py::test_a_failed_root_keeps_the_old_one'),
    Mutant(
        'preconditioning_starts_a_step_late',
        't5x_lite/optimizers/shampoo/update.py',
        'is_shampoo = count >= cfg.start_preconditioning_step',
        'is_shampoo = count > cfg.start_preconditioning_step',
        'tests/optimizers/shampoo/test_update.py::test_equals_the_recorded_run'),
    Mutant(
        'stacked_layers_change_the_order_of_spread_roots',
        't5x_lite/optimizers/shampoo/update.py',
        'ranks=ranks if cfg.spread_roots else None,',
        'ranks=None,',
        'tests/optimizers/shampoo/test_update.py::test_layers_in_stacked_arrays_train_as_single_layers'),
    Mutant(
        'matrices_of_stacked_layers_follow_the_arrays',
        't5x_lite/optimizers/shampoo/update.py',
        'counts = dict(sorted((number, layout.num_statistics)',
        'counts = dict(list((number, layout.num_statistics)',
        'tests/optimizers/shampoo/test_update.py::test_layers_in_stacked_arrays_train_as_single_layers'),
    Mutant(
        'sizes_of_matrices_have_the_order_of_the_arrays',
        't5x_lite/optimizers/shampoo/update.py',
        'return [layout for _, layout in sorted(found, key=lambda entry: entry[0])]',
        'return [layout for _, layout in found]',
        'tests/optimizers/shampoo/test_update.py::test_layers_in_stacked_arrays_train_as_single_layers'),
    Mutant(
        'gradients_of_sharded_shampoo_are_gathered_at_once',
        't5x_lite/optimizers/shampoo/placement.py',
        '    grad = update_lib.after(never, grad)\n    if',
        '    if',
        'tests/optimizers/shampoo/test_sharded.py::test_64_devices_need_the_memory_of_the_state_and_one_parameter'),
    Mutant(
        'parameters_of_sharded_shampoo_are_spread_at_once',
        't5x_lite/optimizers/shampoo/placement.py',
        'never.astype(jnp.float32))',
        '0.0)',
        'tests/optimizers/shampoo/test_sharded.py::test_64_devices_need_the_memory_of_the_state_and_one_parameter'),
    Mutant(
        'each_device_computes_all_rows',
        't5x_lite/optimizers/shampoo/placement.py',
        'return cls(mesh.axis_names, mesh.size) if mesh else cls()',
        'return cls()',
        'tests/optimizers/shampoo/test_sharded.py::test_devices_share_the_matrices'),
    Mutant(
        'blocks_on_two_devices_are_added_twice',
        't5x_lite/optimizers/shampoo/placement.py',
        'first_own if is_first else first',
        'first',
        'tests/optimizers/shampoo/test_placement.py::test_spreading_collected_blocks_gives_the_parameters'),
    Mutant(
        'devices_have_no_halo',
        't5x_lite/optimizers/shampoo/placement.py',
        'parts, missing, distance = [matrices], self.halo, 1',
        'parts, missing, distance = [matrices], 0, 1',
        'tests/optimizers/shampoo/test_sharded.py::test_devices_change_no_matrix'),
    Mutant(
        'rounds_of_spread_roots_exceed_the_slot',
        't5x_lite/optimizers/shampoo/root_plan.py',
        ' & (positions < end)',
        '',
        'tests/optimizers/shampoo/test_sharded.py::test_devices_change_no_matrix'),
)
