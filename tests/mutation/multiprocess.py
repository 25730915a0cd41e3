"""Mutants that the tests of `tests/multiprocess`, or the like, kill."""

from tests.mutation.mutant import Mutant

_MONITOR, _MONITOR_TEST = 't5x_lite/runtime/monitor.py', 'tests/runtime/test_monitor.py::'


_CLUSTER, _CLUSTER_TEST = 't5x_lite/runtime/cluster.py', 'tests/runtime/test_cluster.py::'

MUTANTS = (
    Mutant(
        'the_exception_of_a_program_is_not_reported', _CLUSTER,
        '  sys.excepthook = report\n',
        '',
        _CLUSTER_TEST + 'test_programs_of_users_end_together[raise]'),
    Mutant(
        'a_program_does_not_end_its_monitor', _CLUSTER,
        '  atexit.register(end)\n',
        '',
        _CLUSTER_TEST + 'test_programs_of_users_end_together[end]'),
    Mutant(
        'another_number_of_processes_is_not_reported',
        't5x_lite/apps/common/start.py',
        'if num_saved == now or batches.handles_process_count or not',
        'if num_saved == now or not batches.handles_process_count or not',
        'tests/apps/common/test_start.py::'
        'test_another_number_of_processes_is_reported_unless_the_source_handles_it[2-False-True]'),
    Mutant(
        'sources_that_handle_the_number_of_processes_are_not_asked',
        't5x_lite/data/global_batches.py',
        'isinstance(host_iterator, HostIterator) and host_iterator.handles_process_count',
        'not isinstance(host_iterator, HostIterator)',
        'tests/data/test_global_batches.py::test_builtin_source_behind_it'),
    Mutant(
        'processes_that_wait_at_a_step_are_the_laggards', _MONITOR,
        "item[0][1] == 'step', len(item[1])",
        "item[0][1] != 'step', len(item[1])",
        _MONITOR_TEST + 'test_the_process_that_is_behind_comes_first[42-0, 3-0]'),
)
