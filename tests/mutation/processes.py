"""Mutants of clusters: how processes find each other, end together and stop together."""

from tests.mutation.mutant import Mutant

_MONITOR, _MONITOR_TEST = 't5x_lite/runtime/monitor.py', 'tests/runtime/test_monitor.py::'
_CLUSTER, _CLUSTER_TEST = 't5x_lite/runtime/cluster.py', 'tests/runtime/test_cluster.py::'
_LAUNCH, _LAUNCH_TEST = 't5x_lite/apps/launch/run.py', 'tests/apps/launch/test_run.py::'

MUTANTS = (
  Mutant(
    'a_failure_does_not_end_the_others',
    _MONITOR,
    "    threading.Thread(target=self._end_after_grace, name='t5x_lite-monitor-end', daemon=True).start()\n",
    '',
    _MONITOR_TEST + 'test_an_error_ends_all_processes_with_its_status_and_name',
  ),
  Mutant(
    'the_own_failure_waits_for_the_main_thread',
    _MONITOR,
    '    threading.Thread(target=self._end_after_grace',
    '    if failure.process != self.process or not failure.error: threading.Thread(target=self._end_after_grace',
    _MONITOR_TEST + 'test_the_own_failure_ends_a_process_that_hangs_while_it_closes_files',
  ),
  Mutant(
    'only_exceptions_are_reported',
    _MONITOR,
    '    except BaseException as error:\n      if not',
    '    except Exception as error:\n      if not',
    _MONITOR_TEST + 'test_the_own_failure_ends_a_process_that_hangs_while_it_closes_files',
  ),
  Mutant(
    'an_error_about_another_process_is_the_cause',
    _MONITOR,
    'if is_lost or is_of_other_process(error):',
    'if is_lost:',
    _MONITOR_TEST + 'test_an_error_about_another_process_gives_way_to_the_cause',
  ),
  Mutant(
    'the_chain_of_an_error_is_not_looked_at',
    't5x_lite/errors.py',
    'error.__cause__ is not None and is_of_other_process(error.__cause__)\n  )',
    'False)',
    _MONITOR_TEST + 'test_an_error_about_another_process_gives_way_to_the_cause',
  ),
  Mutant(
    'a_save_after_a_stop_must_be_quick',
    _MONITOR,
    '      self._is_suspicious = False  # All',
    '      pass  # All',
    _MONITOR_TEST + 'test_after_an_agreed_stop_a_save_may_take_its_time',
  ),
  Mutant(
    'a_run_that_was_stopped_is_lost',
    _MONITOR,
    'awake = awake_seconds(\n      self._judged_at - before, 2 * _BEAT_SECONDS\n    )',
    'awake = self._judged_at - before',
    _MONITOR_TEST + 'test_time_in_which_all_processes_were_stopped_is_no_silence',
  ),
  Mutant(
    'signals_to_children_count',
    _MONITOR,
    '    if current_monitor() is not None:\n      signal.set_wakeup_fd(-1)',
    '    pass',
    _MONITOR_TEST + 'test_a_signal_to_a_child_is_not_for_the_run',
  ),
  Mutant(
    'a_second_signal_waits_for_the_main_thread',
    _MONITOR,
    'if num_signals > 1:',
    'if num_signals > 9:',
    _MONITOR_TEST + 'test_a_second_signal_ends_a_process_whose_main_thread_hangs',
  ),
  Mutant(
    'processes_save_what_each_decides',
    't5x_lite/apps/train/saves.py',
    'decided = multihost.broadcast_from_lead(mine)',
    'decided = mine',
    'tests/apps/train/test_saves.py::test_several_processes_save_what_the_lead_decides_and_what_any_requests',
  ),
  Mutant(
    'a_request_to_one_process_is_lost',
    't5x_lite/apps/train/saves.py',
    '    if any(requested):\n',
    '    if False:\n',
    'tests/apps/train/test_saves.py::test_several_processes_save_what_the_lead_decides_and_what_any_requests',
  ),
  Mutant(
    'a_task_takes_the_gpu_of_its_number_among_its_own',
    _CLUSTER,
    'if _has_own_gpus():\n'
    '      local = None\n'
    '    else:\n'
    '      local = detector.get_local_process_id()',
    'local = detector.get_local_process_id()',
    _CLUSTER_TEST + 'test_places',
  ),
  Mutant(
    'children_of_a_script_outlive_launch',
    _LAUNCH,
    'if status:  # The children of a script that failed may still run.',
    'if False:  # The children of a script that failed may still run.',
    _LAUNCH_TEST + 'test_what_a_script_has_started_ends_too',
  ),
  Mutant(
    'the_last_failure_counts',
    _MONITOR,
    '      if self._failure is not None:\n        return\n',
    '',
    _MONITOR_TEST + 'test_the_first_of_several_errors_counts',
  ),
  Mutant(
    'the_lead_does_not_wait_for_the_others',
    _MONITOR,
    'while self._clock() < end and not self._others_have_left():',
    'while False:',
    _MONITOR_TEST + 'test_an_error_ends_all_processes_with_its_status_and_name',
  ),
  Mutant(
    'silence_is_tolerated',
    _MONITOR,
    'if (\n'
    '        self._failure is None\n'
    "        and beat['stage'] == 'running'\n"
    '        and self._silences[process] > self._limit\n'
    '      ):',
    "if self._failure is None and beat['stage'] == 'running' and self._silences[process] > 1e9:",
    _MONITOR_TEST + 'test_a_silent_process_ends_the_others_with_a_status_to_restart_on',
  ),
  Mutant(
    'a_process_without_a_beat_is_not_missed',
    _MONITOR,
    "or (\n        {'stage': 'running', 'step': None",
    "or ({'stage': 'done', 'step': None",
    _MONITOR_TEST + 'test_a_process_that_never_begins_is_missed',
  ),
  Mutant(
    'a_broken_connection_is_an_own_failure',
    _MONITOR,
    'is_lost = is_connection_error(error)',
    'is_lost = False',
    _MONITOR_TEST + 'test_the_error_of_a_connection_is_that_of_the_process_that_is_gone',
  ),
  Mutant(
    'a_broken_connection_does_not_hurry',
    _MONITOR,
    "self._post('lost_connection')",
    'pass',
    _MONITOR_TEST + 'test_the_error_of_a_connection_is_that_of_the_process_that_is_gone',
  ),
  Mutant(
    'a_store_that_is_gone_is_waited_for',
    _MONITOR,
    ' or (seconds > 2 * _BEAT_SECONDS and self._is_gone_fn()):',
    ':',
    _MONITOR_TEST + 'test_a_store_that_does_not_answer_is_the_end[True]',
  ),
  Mutant(
    'a_store_that_is_silent_is_waited_for',
    _MONITOR,
    'if seconds > self._limit or (',
    'if (',
    _MONITOR_TEST + 'test_a_store_that_does_not_answer_is_the_end[False]',
  ),
  Mutant(
    'an_agreed_stop_is_reported',
    _MONITOR,
    'and self.stops.has_agreed):\n        self.report',
    'and False):\n        self.report',
    _MONITOR_TEST + 'test_an_agreed_stop_is_no_failure',
  ),
  Mutant(
    'the_first_process_that_is_done_ends',
    _MONITOR,
    "if 'running' not in stages and not",
    "if 'done' in stages and not",
    _MONITOR_TEST + 'test_processes_wait_for_each_other_at_the_end',
  ),
  Mutant(
    'a_process_that_has_left_is_waited_for',
    _MONITOR,
    "all_are_there='ending' not in stages",
    'all_are_there=True',
    _MONITOR_TEST + 'test_a_process_that_leaves_at_the_end_is_not_waited_for',
  ),
  Mutant(
    'the_smallest_limit_is_agreed',
    _MONITOR,
    'point=max(limits)',
    'point=min(limits)',
    _MONITOR_TEST + 'test_all_stop_at_the_same_point_wherever_the_signal_comes',
  ),
  Mutant(
    'a_hook_that_hangs_keeps_the_process',
    _MONITOR,
    'returns_within(_FLUSH_SECONDS, lambda fn=fn: fn(failure))',
    'fn(failure)',
    _MONITOR_TEST + 'test_what_is_called_at_the_end_may_hang',
  ),
  Mutant(
    'a_process_passes_its_limit',
    't5x_lite/runtime/stop_agreement.py',
    'self._point < self.limit:',
    'self._point <= self.limit:',
    'tests/runtime/test_stop_agreement.py::test_all_stop_at_the_largest_limit',
  ),
  Mutant(
    'a_later_request_moves_the_limit',
    't5x_lite/runtime/stop_agreement.py',
    '      if not self.request:\n        self.request',
    '      if True:\n        self.request',
    'tests/runtime/test_stop_agreement.py::test_the_first_request_counts',
  ),
  Mutant(
    'aborts_are_not_held',
    't5x_lite/runtime/connections.py',
    'int(signal.SIGABRT), ctypes',
    'int(signal.SIGUSR1), ctypes',
    'tests/runtime/test_connections.py::test_a_thread_that_aborts_leaves_time_to_end',
  ),
  Mutant(
    'the_scheduler_wins_over_the_launcher',
    _CLUSTER,
    'if None in (spec.address, spec.count, spec.index) and spec.count != 1:',
    'if not cfg.is_explicit:',
    _CLUSTER_TEST + 'test_places',
  ),
  Mutant(
    'one_task_is_a_cluster',
    _CLUSTER,
    '    if count == 1 and spec.address is None:\n',
    '    if False:\n',
    _CLUSTER_TEST + 'test_without_anything_a_process_is_alone',
  ),
  Mutant(
    'a_broken_detector_ends_the_run',
    _CLUSTER,
    "if problem and (cfg.mode == 'on' or cfg.is_explicit):",
    'if problem:',
    _CLUSTER_TEST + 'test_a_detector_that_fails_means_one_process_and_a_warning',
  ),
  Mutant(
    'tasks_of_a_node_are_those_of_all',
    _CLUSTER,
    'counts += [int(count)] * int(times or 1)',
    'counts += [int(count)]',
    _CLUSTER_TEST + 'test_a_task_that_sees_less_than_its_share_is_reported',
  ),
  Mutant(
    'a_port_in_use_is_not_seen',
    _CLUSTER,
    'if error.errno == errno.EADDRINUSE:',
    'if error.errno == errno.EACCES:',
    _CLUSTER_TEST + 'test_the_port_of_process_0_must_be_free',
  ),
  Mutant(
    'launch_reports_the_last_failure',
    _LAUNCH,
    '    if first is None:\n'
    '      first = next((index for index, process in enumerate(processes) if process.poll())',
    '    if first is None or True:\n      first = next((index for index, process in '
    'reversed(list(enumerate(processes))) if process.poll())',
    _LAUNCH_TEST + 'test_all_end_with_the_status_of_the_first_that_fails',
  ),
  Mutant(
    'launch_keeps_signals',
    _LAUNCH,
    '    del frame\n    _send(processes, number)',
    '    del frame',
    _LAUNCH_TEST + 'test_signals_are_passed_on',
  ),
  Mutant(
    'processes_outlive_launch',
    _MONITOR,
    'if not is_abandoned and self._is_abandoned_fn():',
    'if False:',
    _MONITOR_TEST + 'test_a_process_whose_launcher_was_killed_stops_once',
  ),
  Mutant(
    'each_process_has_its_own_configuration',
    _MONITOR,
    '    self._num_values += 1\n',
    '    return value\n',
    _MONITOR_TEST + 'test_all_get_the_value_of_the_lead',
  ),
)
