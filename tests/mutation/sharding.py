"""Mutants of partitioning."""

from tests.mutation.mutant import Mutant

MUTANTS = (
  Mutant(
    'a_number_of_partitions_may_contradict_a_submesh',
    't5x_lite/partitioning/partitioner.py',
    'checks.one_of(\n          (1, math.prod(',
    'checks.one_of((num_partitions, math.prod(',
    'tests/partitioning/test_partitioner.py::test_contradictory_arguments',
  ),
  Mutant(
    'arrays_of_any_size_are_replicated',
    't5x_lite/partitioning/explain.py',
    'if math.prod(shape) <= max_replicated_size:',
    'if max_replicated_size:',
    'tests/partitioning/test_partitioner.py::test_the_largest_size_that_is_replicated',
  ),
  Mutant(
    'the_largest_replicated_size_is_excluded',
    't5x_lite/partitioning/explain.py',
    'if math.prod(shape) <= max_replicated_size:',
    'if math.prod(shape) < max_replicated_size:',
    'tests/partitioning/test_partitioner.py::test_the_largest_size_that_is_replicated',
  ),
  Mutant(
    'optimizer_state_does_not_follow_its_parameter',
    't5x_lite/partitioning/explain.py',
    'shape = parameters[parameter].shape',
    'pass',
    'tests/partitioning/test_explain.py::test_what_belongs_to_a_parameter_follows_it',
  ),
  Mutant(
    'rules_need_not_divide',
    't5x_lite/partitioning/rules.py',
    'is_divisible = shape[dim] % num_shards(mesh_axis, mesh_shape) == 0',
    'is_divisible = True',
    'tests/partitioning/test_rules.py::test_a_rule_that_does_not_divide_its_dim_is_skipped',
  ),
  Mutant(
    'the_warning_about_replicas_is_repeated',
    't5x_lite/partitioning/partitioner.py',
    'if text and text not in self._shown_warnings and multihost.is_lead():',
    'if text and multihost.is_lead():',
    'tests/partitioning/test_partitioner.py::test_small_parameters_are_replicated_with_one_warning',
  ),
  Mutant(
    'every_process_warns_about_replicas',
    't5x_lite/partitioning/partitioner.py',
    'text not in self._shown_warnings and multihost.is_lead():',
    'text not in self._shown_warnings:',
    'tests/partitioning/test_partitioner.py::test_other_processes_do_not_warn',
  ),
  Mutant(
    'misaligned_blocks_are_taken',
    't5x_lite/partitioning/layout.py',
    'not (start % extent).any() and ',
    '',
    'tests/partitioning/test_layout.py::test_process_without_a_block',
  ),
  Mutant(
    'the_first_axis_varies_fastest',
    't5x_lite/partitioning/layout.py',
    'for axis in self._ordered(sharded_mesh_axes):\n      shard_id',
    'for axis in reversed(self._ordered(sharded_mesh_axes)):\n      shard_id',
    'tests/partitioning/test_layout.py::test_chunks_of_tuple_axes',
  ),
  Mutant(
    'axes_of_a_tuple_stay_free',
    't5x_lite/partitioning/rules.py',
    'taken.update(axes_of(mesh_axis))',
    'taken.add(mesh_axis)',
    'tests/partitioning/test_rules.py::test_resolution_equals_flax',
  ),
  Mutant(
    'embed_prefers_data',
    't5x_lite/partitioning/rules.py',
    "(2, 2): [('embed', 'model'), ('embed', 'data')]",
    "(2, 2): [('embed', 'data'), ('embed', 'model')]",
    'tests/partitioning/test_golden.py::test_rules',
  ),
  Mutant(
    'every_process_is_the_first_of_its_replicas',
    't5x_lite/partitioning/layout.py',
    'bool(owner[own[0], 0] == process_index)',
    'True',
    'tests/partitioning/test_golden.py::test_processes_cover_the_batch',
  ),
  Mutant(
    'axes_names_apply_to_a_part_of_a_name',
    't5x_lite/partitioning/param_axes.py',
    're.fullmatch(pair[0], name)',
    're.match(pair[0], name)',
    'tests/partitioning/test_param_axes.py::test_the_first_matching_name_decides',
  ),
)
