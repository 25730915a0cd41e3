"""Mutants of layers and networks."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'bfloat16_weights_are_converted_for_each_product',
        't5x_lite/layers/dense.py',
        'jnp.dtype(jnp.bfloat16 if is_mixed else dtype)',
        'jnp.dtype(dtype)',
        'tests/networks/test_t5.py::test_bfloat16_weights_are_multiplied_as_they_are_stored'),
    Mutant(
        'products_of_bfloat16_weights_are_rounded',
        't5x_lite/layers/dense.py',
        'kernel.reshape(matrix_shape), preferred_element_type=self.dtype)',
        'kernel.reshape(matrix_shape)).astype(self.dtype)',
        'tests/layers/test_dense.py'
        '::test_dense_multiplies_bfloat16_weights_with_bfloat16_inputs_and_sums_in_float32'),
    Mutant(
        'cached_steps_see_the_next_position',
        't5x_lite/layers/attention.py',
        'visible = causal_bias(num_new, cached_key.shape[2], query_offset=index)',
        'visible = causal_bias(num_new, cached_key.shape[2], query_offset=index + 1)',
        'tests/layers/test_attention.py::test_cached_steps_equal_causal_attention'),
    Mutant(
        'full_rows_of_a_cache_are_overwritten',
        't5x_lite/layers/attention.py',
        "mode='drop'",
        "mode='clip'",
        'tests/layers/test_attention.py::test_a_full_row_of_a_cache_drops_new_tokens'),
    Mutant(
        'distance_0_is_after_the_query',
        't5x_lite/layers/relative_position.py',
        'jnp.where(relative_position > 0, bucket + num_buckets // 2, bucket)',
        'jnp.where(relative_position >= 0, bucket + num_buckets // 2, bucket)',
        'tests/layers/test_relative_position.py::test_buckets_are_those_of_t5x'),
    Mutant(
        'buckets_are_spaced_by_the_largest_distance',
        't5x_lite/layers/relative_position.py',
        'math.log(max_distance / num_exact)',
        'math.log(max_distance)',
        'tests/layers/test_relative_position.py::test_buckets_are_those_of_t5x'),
    Mutant(
        'attention_dropout_differs_between_queries',
        't5x_lite/layers/attention_kernels.py',
        '(batch, heads, 1, k_len)',
        '(batch, heads, scores.shape[2], k_len)',
        'tests/layers/test_attention.py::test_dropout_drops_keys_for_all_queries_alike'),
    Mutant(
        'softmax_in_half_precision',
        't5x_lite/layers/attention_kernels.py',
        'jax.nn.softmax(scores, axis=-1).astype(dtype)',
        'jax.nn.softmax(scores.astype(dtype), axis=-1)',
        'tests/layers/test_attention.py::test_softmax_is_float32_and_the_option_keeps_scores_so'),
    Mutant(
        'norm_without_epsilon',
        't5x_lite/layers/norm.py',
        ' + self.epsilon)',
        ')',
        'tests/layers/test_norm.py::test_layer_norm_divides_by_the_root_mean_square'),
    Mutant(
        'norm_in_half_precision',
        't5x_lite/layers/norm.py',
        'x = x.astype(jnp.float32)',
        'x = x.astype(self.dtype)',
        'tests/layers/test_norm.py::test_layer_norm_statistics_are_float32'),
    Mutant(
        'a_position_does_not_see_itself',
        't5x_lite/layers/masks.py',
        'mask_to_bias(queries >= jnp.arange(',
        'mask_to_bias(queries > jnp.arange(',
        'tests/layers/test_masks.py::test_attention_bias_equals_the_masks'),
    Mutant(
        'hidden_units_drop_out_per_position',
        't5x_lite/layers/mlp.py',
        'nn.Dropout(rate=self.intermediate_dropout_rate, broadcast_dims=(-2,))',
        'nn.Dropout(rate=self.intermediate_dropout_rate)',
        'tests/layers/test_mlp.py::test_mlp_drops_hidden_units_of_a_sequence_at_all_positions'),
    Mutant(
        'residual_dropout_differs_between_positions',
        't5x_lite/networks/t5_blocks.py',
        'nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))',
        'nn.Dropout(rate=self.config.dropout_rate)',
        'tests/networks/test_t5.py::test_dropout_is_shared_over_positions'),
    Mutant(
        'layers_share_dropout_masks',
        't5x_lite/networks/scan.py',
        '{stream: jax.random.fold_in(key, index) for',
        '{stream: key for',
        'tests/networks/test_t5.py::test_layers_drop_out_differently'),
    Mutant(
        'loops_store_simple_results',
        't5x_lite/networks/remat.py',
        'primitive.name not in _CHEAP_PRIMITIVES',
        'True',
        'tests/networks/test_scan.py::test_a_loop_stores_no_weights_and_no_results_that_are_simple_to_repeat'),
    Mutant(
        'loops_store_constrained_weights',
        't5x_lite/networks/remat.py',
        "'sharding_constraint', ",
        '',
        'tests/networks/test_scan.py::test_a_loop_stores_no_weights_and_no_results_that_are_simple_to_repeat'),
    Mutant(
        'policies_do_not_find_attention_weights',
        't5x_lite/layers/attention_kernels.py',
        "y = checkpoint_name(jnp.exp(*primals), 'attention_weights')",
        'y = jnp.exp(*primals)',
        'tests/networks/test_remat.py::test_each_policy_stores_its_results_and_computes_the_others_again'),
    Mutant(
        'unrolled_layers_are_computed_again_at_once',
        't5x_lite/networks/remat.py',
        'return _after_cotangents(rematerialized) if unrolled_on_cpu and not several_devices else rematerialized',
        'return rematerialized',
        'tests/networks/test_remat.py::test_policies_save_memory_outside_of_loops_on_a_cpu'),
    Mutant(
        'offloaded_results_stay_on_the_device',
        't5x_lite/networks/remat.py',
        'return ad_checkpoint.Saveable if on_cpu else _ON_HOST',
        'return ad_checkpoint.Saveable',
        'tests/networks/test_remat.py::test_tpus_offload_the_chosen_results_to_the_host'),
    Mutant(
        'a_policy_without_effect_is_silent',
        't5x_lite/networks/remat.py',
        'elif unrolled_on_cpu and several_devices:',
        'elif False:',
        'tests/networks/test_remat.py::test_several_cpu_devices_without_loops_warn_once'),
    Mutant(
        'layers_are_stacked_in_front',
        't5x_lite/networks/scan.py',
        'return min(self.param_axis, ndim) if',
        'return 0 if',
        'tests/networks/test_t5.py::test_parameter_tree_and_logical_axes_are_t5xs'),
    Mutant(
        'tied_logits_are_not_scaled',
        't5x_lite/networks/stacks.py',
        'if cfg.scale_tied_logits:',
        'if False:',
        'tests/networks/test_t5.py::test_tied_logits_are_scaled_and_untied_have_a_kernel'),
)
