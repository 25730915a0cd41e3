"""Mutants of the configuration by gin."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'objects_made_of_each_other_pass',
        't5x_lite/configuration/checks.py',
        'for reference in references\n                   if reference.evaluate}',
        'for reference in references\n'
        '                   if reference.evaluate and reference.configurable.selector == node[0]}',
        'tests/apps/test_bad_input.py::test_rejected'),
    Mutant(
        'macros_made_of_each_other_pass',
        't5x_lite/configuration/syntax.py',
        'set(macros_in(binding.value)) for name',
        'set(macros_in(binding.value)) & {name} for name',
        'tests/apps/test_bad_input.py::test_bad_files'),
    Mutant(
        'no_remedy_for_a_schedule_without_the_number_of_steps',
        't5x_lite/configuration/checks.py',
        'if value is None and name in _NEEDS:',
        'if False:',
        'tests/apps/test_bad_input.py::test_rejected'),
    Mutant(
        'true_is_an_integer',
        't5x_lite/configuration/checks.py',
        ' and (plain is bool or not isinstance(value, bool))',
        '',
        'tests/configuration/test_syntax.py::test_rejected_flags'),
    Mutant(
        'outer_scopes_win',
        't5x_lite/configuration/checks.py',
        'in range(len(scope) + 1):  # Inner',
        'in reversed(range(len(scope) + 1)):  # Inner',
        'tests/configuration/test_syntax.py::test_rejected_flags'),
    Mutant(
        'commands_read_t5x_itself',
        't5x_lite/cli.py',
        'compat.set_up_process(folder)',
        'compat.set_up_process(folder, installs=False)',
        'tests/compat/test_programs.py::test_modules_in_the_current_folder_may_import_t5x'),
    Mutant(
        'the_current_folder_hides_packages_of_other_finders',
        't5x_lite/compat/__init__.py',
        'sys.meta_path.append(_LastFolder(folder))',
        'sys.meta_path.insert(3, _LastFolder(folder))',
        'tests/compat/test_programs.py::test_the_current_folder_hides_no_package_that_another_finder_has'),
    Mutant(
        'a_safe_path_has_the_current_folder',
        't5x_lite/cli.py',
        "'' if sys.flags.safe_path else os.getcwd()",
        'os.getcwd()',
        'tests/compat/test_programs.py::test_modules_in_the_current_folder_may_import_t5x'),
    Mutant(
        'python_m_looks_in_the_current_folder_first',
        't5x_lite/cli.py',
        '    sys.path.append(sys.path.pop(0))',
        '    pass',
        'tests/compat/test_programs.py::test_modules_in_the_current_folder_may_import_t5x'),
    Mutant(
        'functions_that_user_code_calls_are_called_unused',
        't5x_lite/gin_utils.py',
        ' and registry[key[1]].import_source is not None',
        '',
        'tests/compat/test_gin_files.py::test_settings_without_effect_are_logged'),
    Mutant(
        'one_of_several_bindings_is_named',
        't5x_lite/configuration/checks.py',
        'return None if others else location',
        'return location',
        'tests/configuration/test_binding.py::test_a_line_is_only_named_if_one_binding_can_be_meant'),
    Mutant(
        'worker_processes_find_modules_after_the_objects_of_users',
        't5x_lite/data/grain_source.py',
        '    self._set_up = compat.SetUp()  # Before the pieces, whose modules a worker must find.\n',
        '',
        'tests/compat/test_programs.py::test_worker_processes_of_data_find_the_same_modules'),
    Mutant(
        'files_of_an_installed_t5x_are_hidden_by_views',
        't5x_lite/configuration/syntax.py',
        'for finder in sys.meta_path if rest',
        'for finder in sys.meta_path if rest and first not in sys.modules',
        'tests/configuration/test_syntax.py::test_files_of_python_packages_are_found_last'),
    Mutant(
        'methods_are_registered_by_the_imports_of_their_file',
        't5x_lite/configuration/binding.py',
        'if known is None or known.import_source is None:',
        'if True:',
        'tests/compat/test_gin_files.py::test_sparse_models_with_t5x_macros_in_either_order'),
    Mutant(
        'methods_of_earlier_configurations_stay_registered',
        't5x_lite/configuration/binding.py',
        '    _forget_methods()\n',
        '',
        'tests/compat/test_gin_files.py::test_resolves_and_repeats_itself'),
    Mutant(
        'evaluation_with_the_macros_of_t5x_has_a_scope',
        'gin/t5x/configs/runs/eval.gin',
        '@data.DatasetConfig()',
        '@eval/data.DatasetConfig()',
        'tests/compat/test_gin_files.py::test_evaluation_and_inference_have_no_scopes'),
    Mutant(
        'mesh_rules_match_a_part_of_the_selector',
        't5x_lite/configuration/mesh_rules.py',
        'if re.fullmatch(rule.pattern, selector)',
        'if re.search(rule.pattern, selector)',
        'tests/configuration/test_mesh_rules.py::test_the_first_match_of_the_entire_selector_decides'),
    Mutant(
        'a_run_records_the_changes_of_its_mesh_rule',
        't5x_lite/configuration/mesh_rules.py',
        'former = {key: values.get(key, gin_apply.UNBOUND) for key in effective}',
        'former = {key: gin_check.value_of(key) for key in effective}',
        'tests/configuration/test_mesh_rules.py::test_a_recorded_configuration_applies_its_rules_on_other_hardware'),
    Mutant(
        'recorded_mesh_rules_override_flags_of_the_run',
        't5x_lite/configuration/mesh_rules.py',
        'for binding in targets if binding.target in flags}',
        'for binding in targets[:0]}',
        'tests/configuration/test_mesh_rules.py::test_flags_of_a_run_stay_above_its_rules_on_other_hardware'),
    Mutant(
        'an_automatic_mesh_keeps_the_size_of_the_expert_axis',
        'moe/partitioner.py',
        '({\'num_expert_partitions\': AUTO} if has_expert_axis else {})',
        '({} if has_expert_axis else {})',
        'tests/apps/test_mesh_rules.py::test_meshes_of_both_partitioners'),
    Mutant(
        'the_first_of_two_boolean_flags_counts',
        't5x_lite/cli_flags.py',
        'result = [each for each in result if each != name]',
        'result = [each for each in result]',
        'tests/test_cli_flags.py::test_flags_have_the_meaning_of_absl'),
    Mutant(
        'a_process_without_multiprocess_gpu_waits_for_others',
        't5x_lite/apps/common/flags.py',
        "    vars(arguments).update(dict.fromkeys(place), distributed='off')\n",
        '',
        'tests/test_cli_flags.py::test_multiprocess_gpu_decides_whether_a_process_is_alone'),
    Mutant(
        'gin_bindings_apply_before_all_gin_flags',
        't5x_lite/cli.py',
        'arguments.gin_flags, arguments.jax_flags = gin_flags, jax_flags',
        'arguments.gin_flags, arguments.jax_flags = sorted(gin_flags, reverse=True), jax_flags',
        'tests/test_cli_flags.py::test_flags_have_the_meaning_of_absl'),
    Mutant(
        'folders_of_seqio_have_no_effect_on_other_data_silently',
        't5x_lite/apps/common/flags.py',
        "if not any(dataset.get('source', 'seqio') == 'seqio' for dataset in datasets)",
        'if not datasets',
        'tests/test_cli_flags.py::test_other_flags_are_errors_with_the_alternative'),
    Mutant(
        'unknown_names_of_a_list_are_skipped_as_all_others',
        't5x_lite/configuration/binding.py',
        'elif self._skip_unknown is True or statement.selector in self._skip_unknown:',
        'elif self._skip_unknown:',
        'tests/test_gin_utils.py::test_unknown_names_are_skipped_on_request'),
    Mutant(
        'files_of_t5x_lite_come_before_those_of_the_user',
        't5x_lite/configuration/syntax.py',
        "[*ours, *theirs] if is_ours else [*theirs, *ours]",
        "[*ours, *theirs]",
        'tests/configuration/test_t5x_names.py::test_a_file_of_t5x_that_is_found_has_priority'),
    Mutant(
        'defaults_that_the_user_set_are_called_ours',
        't5x_lite/gin_utils.py',
        'last[name][1].is_packaged()\n                and last',
        'last',
        'tests/configuration/test_t5x_names.py::test_log_says_once_which_files_and_defaults_are_ours'),
    Mutant(
        'a_folder_of_t5x_starts_anew',
        't5x_lite/apps/common/start.py',
        '    _check_has_none_of_t5x(model_dir)\n',
        '',
        'tests/apps/common/test_start.py::test_a_directory_of_t5x_is_not_taken_for_a_new_run[t5x]'),
)
