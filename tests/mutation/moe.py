"""Mutants of the Mixture of Experts."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'experts_span_slices',
        'moe/mesh.py',
        'num_within_slice = ici_mesh_shape[1]',
        "num_within_slice = base.shape['data']",
        'tests/moe/test_mesh.py::test_experts_are_within_a_slice'),
    Mutant(
        'copies_of_experts_are_gathered_over_slices',
        'moe/rules.py',
        "if name in ('batch', 'expert_replicas') and",
        "if name in ('batch',) and",
        'tests/moe/test_mesh.py::test_rules_shard_batches_and_copies_of_experts_over_replicas'),
    Mutant(
        'the_model_axis_of_a_given_mesh_is_a_data_axis',
        'moe/partitioner.py',
        'self._num_experts is None or self._has_given_extents',
        'self._num_experts is None or self._ici_mesh_shape is not None',
        'tests/moe/test_mesh.py::test_given_meshes'),
    Mutant(
        'sparse_models_ignore_the_replicated_size',
        'moe/partitioner.py',
        ', max_replicated_size=max_replicated_size)',
        ')',
        'tests/moe/test_mesh.py::test_the_size_up_to_which_parameters_are_replicated'),
    Mutant(
        'devices_of_the_default_platform_count',
        'moe/rules.py',
        'len(mesh_lib.devices_of(backend))',
        'len(mesh_lib.devices_of(None))',
        'tests/moe/test_mesh.py::test_the_devices_of_the_platform_count'),
    Mutant(
        'equal_scores_choose_the_last_expert',
        'moe/routing/token_choice.py',
        'jnp.min(jnp.where(scores == largest, experts, num_experts - 1), axis=-1)',
        'jnp.max(jnp.where(scores == largest, experts, 0), axis=-1)',
        'tests/moe/routing/test_token_choice.py::test_token_choice_is_the_loops'),
    Mutant(
        'experts_have_a_place_more',
        'moe/routing/token_choice.py',
        'kept = position < capacity',
        'kept = position <= capacity',
        'tests/moe/routing/test_token_choice.py::test_token_choice_is_the_loops'),
    Mutant(
        'the_bias_changes_gates',
        'moe/routing/token_choice.py',
        'gates = _normalized(raw_gates) if options.normalize_gates else raw_gates',
        'gates = _normalized(raw_gates)',
        'tests/moe/routing/test_token_choice.py::test_token_choice_is_the_loops'),
    Mutant(
        'least_probable_tokens_come_first',
        'moe/routing/positions.py',
        'jnp.argsort(-priority',
        'jnp.argsort(priority',
        'tests/moe/routing/test_token_choice.py::test_token_choice_is_the_loops'),
    Mutant(
        'the_auxiliary_loss_shrinks_with_experts',
        'moe/routing/losses.py',
        '* num_experts**2',
        '* num_experts',
        'tests/moe/routing/test_golden.py::test_losses_and_their_gradients'),
    Mutant(
        'capacity_is_rounded_down',
        'moe/routing/capacity.py',
        'int(round(factor * tokens_per_group / num_experts))',
        'int(factor * tokens_per_group / num_experts)',
        'tests/moe/routing/test_token_choice.py::test_capacity_rounds_halves_to_even'),
    Mutant(
        'experts_take_padding_before_improbable_tokens',
        'moe/routing/expert_choice.py',
        'jnp.where(token_mask[:, None], by_expert, -1.0)',
        'jnp.where(token_mask[:, None], by_expert, 1e-6)',
        'tests/moe/routing/test_token_choice.py::test_expert_choice_is_the_loops'),
    Mutant(
        'rows_ignore_columns',
        'moe/routing/sinkhorn.py',
        'u = -jax.nn.logsumexp(scaled + v[:, None], axis=-1)',
        'u = -jax.nn.logsumexp(scaled, axis=-1)',
        'tests/moe/routing/test_token_routers.py::test_sinkhorn_scales_rows_and_columns'),
    Mutant(
        'evaluation_is_balanced_too',
        'moe/routing/sinkhorn.py',
        'if not deterministic and recorded is None:',
        'if recorded is None:',
        'tests/moe/routing/test_token_routers.py::test_sinkhorn_spreads_tokens_in_training_only'),
    Mutant(
        'the_bias_follows_the_load',
        'moe/routing/token_routers.py',
        'jnp.sign(jnp.mean(counts) - counts)',
        'jnp.sign(counts - jnp.mean(counts))',
        'tests/moe/routing/test_token_routers.py::test_loss_free_bias_moves_against_the_load_and_balances_it'),
    Mutant(
        'the_bias_moves_with_every_microbatch',
        'moe/routing/token_routers.py',
        'complete = num_passes >= passes_of_step',
        'complete = num_passes >= 1',
        'tests/moe/routing/test_token_routers.py::test_micro_batches_change_the_bias_like_the_full_batch'),
    Mutant(
        'gates_do_not_weigh_what_experts_make',
        'moe/routing/plan.py',
        '      term = term * gates[:, k, None]\n',
        '      pass\n',
        'tests/moe/dispatch/test_apply.py::test_capacity_forms_are_exact'),
    Mutant(
        'dropped_choices_have_gradients',
        'moe/routing/plan.py',
        'term = _masked(term, choice_row[:, k] < plan.row_choice.shape[0])',
        'pass',
        'tests/moe/dispatch/test_apply.py::test_capacity_forms_are_exact'),
    Mutant(
        'gradients_go_back_the_way_they_came',
        'moe/dispatch/exchange.py',
        'exchange(grad, sizes.T, num_rows',
        'exchange(grad, sizes, num_rows',
        'tests/moe/dispatch/test_expert_parallel.py::test_exchange_by_blocks'),
    Mutant(
        'shards_send_what_they_receive',
        'moe/dispatch/exchange.py',
        'source = _starts(sizes[shard])[:, None]',
        'source = _starts(sizes[:, shard])[:, None]',
        'tests/moe/dispatch/test_expert_parallel.py::test_exchange_by_blocks'),
    Mutant(
        'empty_slots_are_of_experts',
        'moe/state_axes.py',
        'if len(names) >= len(shape) or shape[0] not in expert_counts:',
        'if len(names) >= len(shape):',
        'tests/moe/test_partitioner_state.py::test_a_filter_of_one_s_own_selects'),
    Mutant(
        'experts_lie_along_the_last_dim',
        'moe/state_axes.py',
        'PartitionSpec(EXPERT_AXIS, *names, *(None,) * (len(shape) - len(names) - 1))',
        'PartitionSpec(*names, *(None,) * (len(shape) - len(names) - 1), EXPERT_AXIS)',
        'tests/moe/test_partitioner_state.py::test_state_without_logical_axes_gets_those_of_experts'),
    Mutant(
        'batches_vary_fastest_over_experts',
        'moe/rules.py',
        "HEAD_DATA_AXES = ('expert', 'data')",
        "HEAD_DATA_AXES = ('data', 'expert')",
        'tests/moe/test_partitioner.py::test_raw_specs_are_replaced_at_the_top_alone'),
    Mutant(
        'losses_of_microbatches_count_less',
        'moe/metrics.py',
        'totals[layer][name] * num_microbatches / ',
        'totals[layer][name] / ',
        'tests/moe/test_microbatches.py::test_every_model'),
    Mutant(
        'slices_of_experts_keep_their_moments',
        'moe/expert_state.py',
        'float(change.slices)**-name.power',
        '1.0',
        'tests/moe/tools/test_surgery.py::test_upcycling_in_slices_is_upcycling_and_splitting'),
    Mutant(
        'loops_compute_experts_twice',
        't5x_lite/networks/remat.py',
        "'none': ('expert_hidden', 'expert_output'),",
        "'none': (),",
        'tests/moe/test_networks.py::test_policies_of_remat_store_results_of_experts'),
    Mutant(
        'buffers_of_all_layers_are_made_at_once',
        'moe/dispatch/tiles.py',
        'jnp.where(self.ends[-1] < 0, 1, 0)',
        '0',
        'tests/moe/test_networks.py::test_policies_of_remat_store_results_of_experts'))
