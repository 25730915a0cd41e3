"""Mutants of checkpoints and of the results of inference."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'a_checkpoint_without_its_manifest_is_read',
        't5x_lite/checkpoints/sources/orbax.py',
        'if manifest is None:',
        'if not self.path:',
        'tests/checkpoints/test_shared_directory.py::test_a_checkpoint_that_is_deleted_while_it_is_opened'),
    Mutant(
        'a_lost_lock_is_not_noticed_before_a_save',
        't5x_lite/checkpoints/manager.py',
        '        self._lock.check()\n        self._remove_partial_files()\n',
        '        self._remove_partial_files()\n',
        'tests/checkpoints/test_shared_directory.py::test_a_run_that_lost_its_lock_ends_at_its_next_save'),
    Mutant(
        'a_lost_lock_is_not_noticed_before_a_commit',
        't5x_lite/checkpoints/manager.py',
        '          self._lock.check()\n          commit_lib.commit(pending)\n',
        '          commit_lib.commit(pending)\n',
        'tests/checkpoints/test_shared_directory.py::test_a_lock_that_is_lost_while_a_save_is_written'),
    Mutant(
        'a_lost_lock_counts_as_a_failed_save',
        't5x_lite/checkpoints/manager.py',
        'if isinstance(error, errors.DirectoryInUseError):',
        'if isinstance(error, errors.ConfigError):',
        'tests/checkpoints/test_shared_directory.py::test_a_run_that_lost_its_lock_ends_at_its_next_save'),
    Mutant(
        'a_deleted_lock_file_is_a_second_run',
        't5x_lite/checkpoints/lock.py',
        '    except FileNotFoundError:  # deleted by hand, which is not yet a second run\n      return\n',
        "    except FileNotFoundError:\n      found = ''\n",
        'tests/checkpoints/test_shared_directory.py::test_a_deleted_lock_file_is_not_a_second_run'),
    Mutant(
        'missing_locks_are_missing_permissions',
        't5x_lite/checkpoints/lock.py',
        'if e.errno not in _NO_LOCKS:',
        'if e.errno:',
        'tests/checkpoints/test_shared_directory.py::test_a_file_system_without_locks'),
    Mutant(
        'snapshots_share_memory_with_the_state',
        't5x_lite/checkpoints/state_io.py',
        'jax.device_put(leaf, leaf.sharding, may_alias=False)',
        'leaf',
        'tests/checkpoints/test_state_io.py::test_a_snapshot_shares_no_memory_and_copies_replicas_once'),
    Mutant(
        'verification_compares_sizes_only',
        't5x_lite/checkpoints/manifest.py',
        'if found != manifest.files[name]:',
        "if found['bytes'] != manifest.files[name]['bytes']:",
        'tests/checkpoints/test_manifest.py::test_one_flipped_bit_in_any_file'),
    Mutant(
        'verified_once_verified_for_ever',
        't5x_lite/checkpoints/manifest.py',
        'if _verified.get(str(root)) == before:',
        'if str(root) in _verified:',
        'tests/checkpoints/test_manifest.py::test_damage_after_a_first_check_is_found_too'),
    Mutant(
        'surplus_files_of_the_state_pass',
        't5x_lite/checkpoints/manifest.py',
        'sorted(present - set(manifest.files))',
        '()',
        'tests/checkpoints/test_manifest.py::test_missing_truncated_and_surplus_files'),
    Mutant(
        'the_newest_checkpoint_may_go',
        't5x_lite/checkpoints/policies.py',
        'kept = set(pinned) | set(steps[-1:])',
        'kept = set(pinned)',
        'tests/checkpoints/test_policies.py::test_retention_against_brute_force'),
    Mutant(
        'pins_do_not_hold',
        't5x_lite/checkpoints/policies.py',
        'kept = set(pinned) | set(steps[-1:])',
        'kept = set(steps[-1:])',
        'tests/checkpoints/test_policies.py::test_retention_against_brute_force'),
    Mutant(
        'the_best_is_the_largest_in_any_mode',
        't5x_lite/checkpoints/policies.py',
        "sign = 1 if self.mode == 'max' else -1",
        'sign = 1',
        'tests/checkpoints/test_policies.py::test_retention_against_brute_force'),
    Mutant(
        'later_steps_count_for_retention',
        't5x_lite/checkpoints/retention.py',
        ' if step <= newest_step and\n',
        ' if\n',
        'tests/checkpoints/test_retention.py::test_the_new_checkpoint_is_kept_with_damaged_newer_ones'),
    Mutant(
        'a_commit_copies_in_place_of_renaming',
        't5x_lite/checkpoints/commit.py',
        '    root.rename(pending.final)\n',
        '    shutil.copytree(root, pending.final)\n',
        'tests/checkpoints/test_commit.py::test_at_every_time_of_a_commit_the_old_or_the_new_checkpoint_is_complete'),
    Mutant(
        'the_old_checkpoint_goes_before_the_new_one_is_there',
        't5x_lite/checkpoints/commit.py',
        'pending.final.rename(replaced)',
        'shutil.rmtree(pending.final)',
        'tests/checkpoints/test_commit.py::test_at_every_time_of_a_commit_the_old_or_the_new_checkpoint_is_complete'),
    Mutant(
        'a_failed_commit_leaves_nothing',
        't5x_lite/checkpoints/commit.py',
        '    if replaced is not None:\n      replaced.rename(pending.final)\n    raise',
        '    raise',
        'tests/checkpoints/test_manager.py::test_a_commit_that_fails_at_its_last_step_keeps_the_old_checkpoint'),
    Mutant(
        'the_last_rule_of_an_assignment_map_decides',
        't5x_lite/checkpoints/transforms.py',
        'in enumerate(assignment_map):',
        'in reversed(list(enumerate(assignment_map))):',
        'tests/checkpoints/test_transforms.py::test_assignment_map_on_trees'),
    Mutant(
        'rules_match_beginnings_of_names',
        't5x_lite/checkpoints/transforms.py',
        're.fullmatch(pattern, name)',
        're.match(pattern, name)',
        'tests/checkpoints/test_transforms.py::test_assignment_map_rejects'),
    Mutant(
        'transforms_run_in_reverse',
        't5x_lite/checkpoints/builders/chain.py',
        'for fn in (*transformation_fns, *cfg.state_transformation_fns)',
        'for fn in (*cfg.state_transformation_fns, *transformation_fns)',
        'tests/checkpoints/test_transforms.py::test_transformation_fns_run_in_order'),
    Mutant(
        'a_resumed_run_is_renamed',
        't5x_lite/checkpoints/builders/chain.py',
        'rules = () if is_resuming else tuple(cfg.assignment_map or ())',
        'rules = tuple(cfg.assignment_map or ())',
        'tests/checkpoints/test_transforms.py::test_assignment_map_drops_with_none'),
    Mutant(
        'merge_shards_compares_sizes_only',
        't5x_lite/apps/infer/merge.py',
        "paths_lib.describe(shard.result) != {name: result[name] for name in ('size', 'sha256', 'lines')}",
        "paths_lib.describe(shard.result)['size'] != result['size']",
        'tests/apps/infer/test_merge.py::test_a_shard_changed_to_other_results_of_the_same_size_is_not_merged'),
    Mutant(
        'builders_run_again_when_a_run_resumes',
        't5x_lite/checkpoints/builders/chain.py',
        '*(() if is_resuming else cfg.builders)',
        '*cfg.builders',
        'tests/checkpoints/builders/test_chain.py::test_a_configuration_is_the_short_form_of_a_chain'),
    Mutant(
        'parameters_that_a_checkpoint_lacks_are_made_up',
        't5x_lite/checkpoints/restore.py',
        'is_partial = path is None and initializes',
        'is_partial = initializes',
        'tests/checkpoints/builders/test_chain.py::test_parameters_are_never_made_up'),
    Mutant(
        'an_average_has_the_step_of_the_oldest',
        't5x_lite/checkpoints/builders/reading.py',
        'newest = max(opened',
        'newest = min(opened',
        'tests/checkpoints/builders/test_reading.py::test_an_average_is_the_mean_of_the_parameters_alone'),
    Mutant(
        'a_new_vocabulary_keeps_the_statistics_of_the_optimizer',
        't5x_lite/checkpoints/builders/changing.py',
        'kept = state.without(*base.FROM_PARAMS)\n    return kept.replace(arrays={**kept.arrays, **resized})',
        'kept = state\n    return kept.replace(arrays={**kept.arrays, **resized})',
        'tests/checkpoints/builders/test_changing.py::test_a_smaller_vocabulary_drops_rows_and_the_same_changes_nothing'),
    Mutant(
        'all_computed_arrays_are_in_memory_at_once',
        't5x_lite/checkpoints/lazy_arrays.py',
        'if group and size + num_bytes > _BATCH_BYTES:',
        'if group and size < 0:',
        'tests/checkpoints/test_lazy_arrays.py::test_computed_arrays_are_in_memory_a_group_at_a_time'),
    Mutant(
        'an_array_of_a_wrong_shape_from_a_builder_on_arrays',
        't5x_lite/checkpoints/builders/chain.py',
        'if before.get(name) != after.get(name)]',
        'if name not in after]',
        'tests/checkpoints/builders/test_changing.py::test_a_function_of_the_complete_state_on_its_devices'),
)
