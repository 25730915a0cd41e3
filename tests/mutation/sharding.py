"""Mutants of partitioning."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'misaligned_blocks_are_taken',
        't5x_lite/partitioning/chunks.py',
        ' or (start % extent).any()',
        '',
        'tests/partitioning/test_layout.py::test_process_without_a_block'),
    Mutant(
        'the_first_axis_varies_fastest',
        't5x_lite/partitioning/chunks.py',
        'for axis in self._ordered(sharded_mesh_axes):\n      shard_id',
        'for axis in reversed(self._ordered(sharded_mesh_axes)):\n      shard_id',
        'tests/partitioning/test_chunks.py::test_chunks_of_tuple_axes'),
    Mutant(
        'axes_of_a_tuple_stay_free',
        't5x_lite/partitioning/rules.py',
        'taken.update(axes_of(mesh_axis))',
        'taken.add(mesh_axis)',
        'tests/partitioning/test_rules.py::test_resolution_equals_flax'),
    Mutant(
        'embed_prefers_data',
        't5x_lite/partitioning/rules.py',
        "(2, 2): [('embed', 'model'), ('embed', 'data')]",
        "(2, 2): [('embed', 'data'), ('embed', 'model')]",
        'tests/partitioning/test_golden.py::test_rules'),
    Mutant(
        'every_process_is_the_first_of_its_replicas',
        't5x_lite/partitioning/layout.py',
        'bool(owner[own[0], 0] == process_index)',
        'True',
        'tests/partitioning/test_golden.py::test_processes_cover_the_batch'),
)
