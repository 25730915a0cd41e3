"""Mutants that the tests of `tests/multiprocess`, or the like, kill."""

from tests.mutation.mutant import Mutant

_MONITOR, _MONITOR_TEST = 't5x_lite/runtime/monitor.py', 'tests/runtime/test_monitor.py::'

MUTANTS = (
    Mutant(
        'processes_that_wait_at_a_step_are_the_laggards', _MONITOR,
        "item[0][1] == 'step', len(item[1])",
        "item[0][1] != 'step', len(item[1])",
        _MONITOR_TEST + 'test_the_process_that_is_behind_comes_first[42-0, 3-0]'),
)
