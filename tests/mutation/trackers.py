"""Mutants of the followers of runs, and of what the files of a run tell."""

from tests.mutation.mutant import Mutant

_FOLLOWER = 't5x_lite/trackers/follower.py'
_THREADS = 't5x_lite/trackers/threads.py'
_RUN_FILES = 't5x_lite/apps/common/run_files.py'
_TESTS = 'tests/trackers/test_follower.py'

MUTANTS = (
  Mutant(
    'lines_are_sent_before_a_checkpoint_has_them',
    _FOLLOWER,
    "if self._tracker.can_overwrite or status.status == 'failed':",
    'if True:',
    f'{_TESTS}::test_a_killed_run_that_resumes_with_other_values_sends_no_line_that_it_discarded',
  ),
  Mutant(
    'a_failed_run_keeps_its_last_lines_back',
    _FOLLOWER,
    "if self._tracker.can_overwrite or status.status == 'failed':",
    'if self._tracker.can_overwrite:',
    f'{_TESTS}::test_a_run_that_ends_sends_all_unless_it_was_interrupted[error-expected3]',
  ),
  Mutant(
    'the_position_is_written_before_the_tracker_has_the_batch',
    _FOLLOWER,
    '    self._tracker.flush()\n    step: float = last\n',
    '    self._position.step = last\n    self._write_position()\n    self._tracker.flush()\n    step: float = last\n',
    f'{_TESTS}::test_the_position_follows_each_batch',
  ),
  Mutant(
    'steps_that_were_sent_are_sent_again',
    _FOLLOWER,
    '      if step <= self.step:\n        continue\n',
    '',
    f'{_TESTS}::test_a_follower_continues_behind_the_newest_step_that_the_tracker_has',
  ),
  Mutant(
    'the_last_step_of_the_tracker_is_not_asked_for',
    _FOLLOWER,
    'if last_step is not None:',
    'if False:',
    f'{_TESTS}::test_a_follower_continues_behind_the_newest_step_that_the_tracker_has',
  ),
  Mutant(
    'repeated_steps_are_not_discarded',
    _FOLLOWER,
    '      self._rewind()\n      self._tracker.discard_after(self.step)\n',
    '      pass\n',
    f'{_TESTS}::test_a_tracker_that_can_overwrite_has_lines_at_once_and_the_new_values_of_repeated_steps',
  ),
  Mutant(
    'a_run_that_was_deleted_or_replaced_is_followed',
    _FOLLOWER,
    'if self._is_other(status):',
    'if False:',
    f'{_TESTS}::test_a_run_that_is_deleted_or_replaced_ends_the_follower_and_changes_nothing_of_the_tracker',
  ),
  Mutant(
    'two_followers_send_a_run_to_a_tracker_at_once',
    _FOLLOWER,
    '      files.flock(descriptor)\n',
    '      pass\n',
    f'{_TESTS}::test_one_follower_at_a_time_sends_a_run_to_a_tracker',
  ),
  Mutant(
    'the_position_of_the_last_follower_is_not_read',
    _FOLLOWER,
    '      self._position = self._read_position()\n      yield\n',
    '      yield\n',
    f'{_TESTS}::test_one_follower_at_a_time_sends_a_run_to_a_tracker',
  ),
  Mutant(
    'lines_with_times_that_no_clock_has_are_valid',
    't5x_lite/trainer/summaries.py',
    'isinstance(value, (int, float)) and 0 <= value < 2**37',
    'isinstance(value, (int, float))',
    'tests/apps/report/test_run.py::test_times_that_no_clock_has_are_those_of_damaged_lines',
  ),
  Mutant(
    'tables_have_columns_of_several_types',
    _FOLLOWER,
    'values = list(map(_text, values))',
    'pass',
    f'{_TESTS}::test_columns_of_tables_have_numbers_or_texts',
  ),
  Mutant(
    'a_run_that_starts_again_is_not_noticed',
    _FOLLOWER,
    'return now.num_starts == status.num_starts and',
    'return True or',
    f'{_TESTS}::test_a_run_that_starts_again_while_it_is_sent_is_looked_at_again',
  ),
  Mutant(
    'an_error_of_a_tracker_loses_the_lines_that_were_read',
    _FOLLOWER,
    '      self._run_info = None  # starts the tracker and reads the files again\n',
    '',
    f'{_TESTS}::test_an_error_of_the_tracker_loses_and_repeats_nothing',
  ),
  Mutant(
    'the_position_of_another_run_is_taken',
    _FOLLOWER,
    'if identity is not None and position.run != identity:',
    'if False:',
    f'{_TESTS}::test_positions_of_other_runs_and_invalid_ones_are_errors_with_a_remedy',
  ),
  Mutant(
    'a_step_is_final_without_a_finite_one_after_it',
    _RUN_FILES,
    'is_confirmed = step < last.step or has_ended',
    'is_confirmed = True',
    f'{_TESTS}::test_lines_wait_for_a_checkpoint_and_a_finite_step_after_it',
  ),
  Mutant(
    'a_loss_that_is_not_finite_confirms_a_checkpoint',
    _RUN_FILES,
    "if last is None or not math.isfinite(last.numbers.get('loss', 0.0)):",
    'if last is None:',
    f'{_TESTS}::test_a_line_that_is_not_finite_confirms_no_checkpoint',
  ),
  Mutant(
    'evaluations_that_are_due_are_final',
    _RUN_FILES,
    "if manifest is None or manifest.metadata.get('run', {}).get('evaluation_due'):",
    'if manifest is None:',
    f'{_TESTS}::test_evaluations_that_are_due_after_a_restart_hold_their_step_back',
  ),
  Mutant(
    'a_truncated_file_is_read_on',
    _RUN_FILES,
    'if file.read(len(self._tail)) == self._tail:',
    'if True:',
    'tests/apps/common/test_run_files.py::test_a_file_that_a_resumed_run_has_truncated_is_read_again',
  ),
  Mutant(
    'a_line_without_an_end_is_read',
    _RUN_FILES,
    "if not line.endswith(b'\\n') and not is_final and len(line) < _MAX_LINE:",
    'if False:',
    'tests/apps/common/test_run_files.py::test_a_reader_continues_where_it_ended_and_waits_for_the_end_of_a_line',
  ),
  Mutant(
    'paths_of_the_machine_are_sent',
    _RUN_FILES,
    "return text.rstrip('/').rpartition('/')[2]",
    'return text',
    'tests/apps/common/test_run_files.py::test_the_configuration_has_no_paths_and_secrets',
  ),
  Mutant(
    'secrets_of_the_configuration_are_sent',
    _RUN_FILES,
    'found[binding.key] = masked(binding.key, value)',
    'found[binding.key] = value',
    'tests/apps/common/test_run_files.py::test_options_with_names_of_paths_and_secrets',
  ),
  Mutant(
    'a_tracker_that_blocks_is_waited_for',
    _THREADS,
    'ended.wait(max(0.0, deadline - time.monotonic()))',
    'ended.wait(20.0)',
    'tests/trackers/test_threads.py::test_a_tracker_that_blocks_has_a_limited_time_and_one_warning',
  ),
  Mutant(
    'only_exceptions_of_a_tracker_are_caught',
    _THREADS,
    'except BaseException as error:  # of a tracker',
    'except Exception as error:  # of a tracker',
    'tests/trackers/test_threads.py::test_a_tracker_that_fails_is_tried_again_with_one_warning',
  ),
  Mutant(
    'each_error_of_a_tracker_is_a_warning',
    _THREADS,
    'if is_first and not self._run_has_ended.is_set():',
    'if True:',
    'tests/trackers/test_threads.py::test_a_tracker_that_fails_is_tried_again_with_one_warning',
  ),
  Mutant(
    'the_command_of_an_own_tracker_is_not_quoted',
    _THREADS,
    '{gin_flag("TRACKER", f"@{selector}()")}',
    '--gin.TRACKER=@{selector}()',
    'tests/trackers/test_threads.py::test_a_shell_reads_the_command_of_an_own_tracker_with_all_its_options',
  ),
  Mutant(
    'trackers_begin_before_old_results_are_discarded',
    't5x_lite/apps/train/open_run.py',
    'self.trackers = stack.enter_context(trackers.FollowerThreads(cfg.model_dir, given))',
    'self.trackers = stack.enter_context(trackers.FollowerThreads(cfg.model_dir, given))\n'
    '    self.trackers.start()',
    'tests/apps/train/test_trackers.py::test_a_dry_run_starts_no_tracker',
  ),
)
