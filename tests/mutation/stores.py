"""Mutants of runs in object stores."""

from tests.mutation.mutant import Mutant

MUTANTS = (
  Mutant(
    'tensorstore_gets_a_path_that_it_misreads',
    't5x_lite/checkpoints/store_io.py',
    'resolved = plain_paths.plain_path(os.path.realpath(directory))',
    'resolved = os.path.realpath(directory)',
    'tests/test_plain_paths.py::test_other_writers_and_formats',
  ),
  Mutant(
    'orbax_gets_a_path_that_it_misreads',
    't5x_lite/checkpoints/state_io.py',
    '    self._checkpointer.save(\n      plain_paths.plain_path(directory),',
    '    self._checkpointer.save(\n      directory,',
    'tests/test_plain_paths.py::test_a_checkpoint_is_restored_from_a_folder_of_any_name',
  ),
  Mutant(
    'a_deletion_in_a_store_is_not_marked',
    't5x_lite/checkpoints/discovery.py',
    '    mark_incomplete(path)\n    files.remove(path / MANIFEST_FILENAME)\n',
    '    files.remove(path / MANIFEST_FILENAME)\n',
    'tests/checkpoints/test_store_save.py::test_kill',
  ),
  Mutant(
    'remains_of_a_save_in_a_store_are_kept',
    't5x_lite/checkpoints/discovery.py',
    '        delete(entry, entry.name)\n        done.append(entry.name)\n        continue\n',
    '        continue\n',
    'tests/checkpoints/test_store_save.py::test_kill',
  ),
  Mutant(
    'a_replaced_checkpoint_in_a_store_is_overwritten',
    't5x_lite/checkpoints/commit.py',
    '    discovery.move(pending.final, _replaced(pending))\n',
    '    pass\n',
    'tests/checkpoints/test_store_save.py::test_kill',
  ),
  Mutant(
    'a_lease_is_written_without_its_condition',
    't5x_lite/checkpoints/lease.py',
    'self._store.write(self._name, content, if_equal=generation)',
    'self._store.write(self._name, content)',
    'tests/checkpoints/test_lease.py::test_one_of_many_wins',
  ),
  Mutant(
    'an_expired_lease_is_trusted',
    't5x_lite/checkpoints/lease.py',
    'if self._lost is None and _now() > self._valid_until - LEASE_SECONDS / 2:',
    'if False:',
    'tests/checkpoints/test_lease.py::test_an_owner_that_was_cut_off_for_too_long',
  ),
  Mutant(
    'a_listing_that_is_behind_makes_the_manifest',
    't5x_lite/checkpoints/store_io.py',
    'missing = sorted(needed - found.keys())',
    'missing = sorted(set() - found.keys())',
    'tests/checkpoints/test_store_io.py::test_a_listing_that_is_behind',
  ),
  Mutant(
    'a_manifest_overtakes_metrics',
    't5x_lite/checkpoints/manifest.py',
    '    files.flush(root)\n',
    '',
    'tests/checkpoints/test_store_save.py::test_a_manifest_comes_after_all_that_was_written_before',
  ),
  Mutant(
    'an_unavailable_store_is_a_permanent_error',
    't5x_lite/object_store.py',
    '_TEMPORARY = {408, 429, *range(500, 600)}',
    '_TEMPORARY = {408, 429}',
    'tests/test_object_store.py::test_requests_are_repeated_for_a_limited_time',
  ),
  Mutant(
    'an_old_checkpoint_of_the_spool_folder_is_copied',
    't5x_lite/checkpoints/spool.py',
    '    if there >= step:\n',
    '    if False:\n',
    'tests/checkpoints/test_spool.py::test_an_old_or_a_damaged_one_is_not_copied',
  ),
  Mutant(
    'a_save_that_the_store_does_not_take_is_not_kept',
    't5x_lite/checkpoints/store_save.py',
    '    if worst == spool.FAILED:',
    '    if worst == spool.LOST_LEASE:',
    'tests/checkpoints/test_spool.py::test_the_newest_is_kept_and_copied',
  ),
  Mutant(
    'a_run_that_lost_its_lease_appends',
    't5x_lite/files.py',
    'self._part.write_bytes(content, fence_of(self._part))',
    'self._part.write_bytes(content)',
    'tests/test_files.py::test_a_run_without_its_lease_appends_nothing',
  ),
  Mutant(
    'attempts_of_a_save_share_a_folder',
    't5x_lite/checkpoints/commit.py',
    "return f'{discovery.ATTEMPT_PREFIX}{self.attempt}'",
    "return f'{discovery.ATTEMPT_PREFIX}1'",
    'tests/checkpoints/test_store_io.py::test_each_attempt_has_separate_folders',
  ),
)
