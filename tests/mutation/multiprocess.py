"""Mutants that the tests of `tests/multiprocess`, or the like, kill."""

from tests.mutation.mutant import Mutant

_MONITOR, _MONITOR_TEST = 't5x_lite/runtime/monitor.py', 'tests/runtime/test_monitor.py::'


_FAULTS_TEST = 'tests/multiprocess/test_faults.py::'
_AGREEMENT_TEST = 'tests/multiprocess/test_agreement.py::'
_CLUSTER, _CLUSTER_TEST = 't5x_lite/runtime/cluster.py', 'tests/runtime/test_cluster.py::'

MUTANTS = (
  Mutant(
    'the_exception_of_a_program_is_not_reported',
    _CLUSTER,
    '  sys.excepthook = report\n',
    '',
    _CLUSTER_TEST + 'test_programs_of_users_end_together[raise]',
  ),
  Mutant(
    'a_program_does_not_end_its_monitor',
    _CLUSTER,
    '  atexit.register(end)\n',
    '',
    _CLUSTER_TEST + 'test_programs_of_users_end_together[end]',
  ),
  Mutant(
    'another_number_of_processes_is_not_reported',
    't5x_lite/apps/common/starting_point.py',
    'if num_saved == now or batches.handles_process_count or not',
    'if num_saved == now or not batches.handles_process_count or not',
    'tests/apps/common/test_starting_point.py::'
    'test_another_number_of_processes_is_reported_unless_the_source_handles_it[2-False-True]',
  ),
  Mutant(
    'sources_that_handle_the_number_of_processes_are_not_asked',
    't5x_lite/data/batches/global_batches.py',
    'is_ours and host_iterator.handles_process_count',
    'not is_ours',
    'tests/data/batches/test_global_batches.py::test_builtin_source_behind_it',
  ),
  Mutant(
    'processes_that_wait_at_a_step_are_the_laggards',
    _MONITOR,
    "group[1] == 'step', len(groups[group])",
    "group[1] != 'step', len(groups[group])",
    _MONITOR_TEST + 'test_the_process_that_is_behind_comes_first[42-0, 3-0]',
  ),
  Mutant(
    'jax_aborts_when_the_lead_is_killed',
    _CLUSTER,
    '  connections.hold_aborts()\n',
    '',
    _FAULTS_TEST + 'test_others_survive_a_killed_process_for_seconds[0-batch-2]',
  ),
  Mutant(
    'a_signal_before_the_run_ends_one_process_silently',
    _CLUSTER,
    '  _interrupt_on_signals()\n  # JAX',
    '  # JAX',
    _FAULTS_TEST + 'test_a_signal_during_the_start_stops_all[import-1]',
  ),
  Mutant(
    'the_watchdog_ends_one_process',
    't5x_lite/apps/train/open_run.py',
    "      'on_timeout': lambda message: monitor.end_all(message, ExitCode.WATCHDOG),\n",
    '',
    _FAULTS_TEST + 'test_a_stalled_source_ends_all_and_sigterm_a_survivor_of_a_stopped_process',
  ),
  Mutant(
    'processes_choose_among_their_own_checkpoints',
    't5x_lite/checkpoints/restoring/choice.py',
    'step = int(multihost.broadcast_from_lead(np.int32(max(steps, default=-1))))\n    if step',
    'step = max(steps, default=-1)\n    if step',
    _AGREEMENT_TEST + 'test_all_resume_from_a_checkpoint_that_is_sound_for_all[2]',
  ),
  Mutant(
    'damage_is_that_of_one_process',
    't5x_lite/checkpoints/manifest.py',
    'if multihost.any_process(problem is not None):',
    'if problem is not None:',
    _AGREEMENT_TEST + 'test_all_resume_from_a_checkpoint_that_is_sound_for_all[2]',
  ),
  Mutant(
    'actions_stop_the_lead_only',
    't5x_lite/trainer/actions.py',
    'Stop(int(multihost.broadcast_from_lead(np.int32(request))))',
    'request',
    _AGREEMENT_TEST + 'test_all_commands_do_the_same_in_several_processes[2]',
  ),
  Mutant(
    'a_process_does_not_notice_a_failed_part_of_another_one',
    't5x_lite/checkpoints/folders/disk.py',
    'return not pending.temporary.exists() and pending.final.is_dir()',
    'return True',
    'tests/multiprocess/test_faults.py::test_a_part_that_cannot_be_written_is_a_failed_save_of_all[0-finish]',
  ),
)
