"""Mutants of data and evaluation."""

from tests.mutation.mutant import Mutant

MUTANTS = (
    Mutant(
        'computed_lengths_count_one_example',
        't5x_lite/data/feature_lengths.py',
        'longest[feature] = max(longest.get(feature, 1), length)',
        'longest[feature] = max(1, length)',
        'tests/data/test_feature_lengths.py::test_lengths_are_those_of_the_longest_examples_with_their_end'),
    Mutant(
        'kept_lengths_ignore_the_examples',
        't5x_lite/data/feature_lengths.py',
        ', **(split.identity or {})}))',
        '}))',
        'tests/data/test_feature_lengths.py::test_kept_lengths_are_used_until_the_data_changes'),
    Mutant(
        'lengths_of_unknown_data_are_kept',
        't5x_lite/data/seqio_lengths.py',
        "identity={'content': content} if is_known else None)",
        "identity={'content': content})",
        'tests/data/test_seqio_lengths.py::test_kept_lengths_depend_on_the_examples_and_the_files'),
    Mutant(
        'each_process_computes_its_lengths',
        't5x_lite/data/feature_lengths.py',
        'lengths = multihost.broadcast_json(_longest(cfg, split))',
        'lengths = _longest(cfg, split)',
        'tests/data/test_feature_lengths.py::test_all_processes_have_the_lengths_of_the_lead_process'),
    Mutant(
        'tasks_without_metrics_lengthen_predictions',
        't5x_lite/data/seqio_lengths.py',
        'if task.metric_objs or not decodes] or tasks',
        'if task.metric_objs or decodes] or tasks',
        'tests/data/test_seqio_lengths.py::test_lengths_are_those_of_seqios_evaluator'),
    Mutant(
        'a_changed_file_keeps_its_lengths',
        't5x_lite/data/seqio_lengths.py',
        'found.append([path, stat.length, stat.mtime_nsec])',
        'found.append([path])',
        'tests/data/test_seqio_lengths.py::test_kept_lengths_depend_on_the_examples_and_the_files'),
    Mutant(
        'batches_that_wait_are_lost_from_a_users_iterator',
        't5x_lite/data/sharded_iterator.py',
        '[*undelivered, *self._waiting])',
        '[*self._waiting])',
        'tests/data/test_datasets.py::test_a_users_function_with_t5xs_signature_opens_the_data'),
    Mutant(
        'span_corruption_rounds_in_float64',
        't5x_lite/data/span_corruption.py',
        'np.round(np.float32(padded_length) * np.float32(noise_density))',
        'np.round(padded_length * noise_density)',
        'tests/data/test_span_corruption.py::test_noise_masks'),
    Mutant(
        'segments_begin_with_noise',
        't5x_lite/data/span_corruption.py',
        'spans_before % 2 == 1',
        'spans_before % 2 == 0',
        'tests/data/test_span_corruption.py::test_noise_masks'),
    Mutant(
        'sentinels_count_up',
        't5x_lite/data/span_corruption.py',
        'first_sentinel + 1 - np.cumsum(first)',
        'first_sentinel - 1 + np.cumsum(first)',
        'tests/data/test_span_corruption.py::test_inputs_and_targets_restore_the_text'),
    Mutant(
        'rows_are_closed_before_they_are_full',
        't5x_lite/data/features.py',
        'used[name] + sizes[name] > length',
        'used[name] + sizes[name] >= length',
        'tests/data/sources/test_table.py::test_rows_close_only_when_full'),
    Mutant(
        'packed_examples_see_the_one_before',
        't5x_lite/data/features.py',
        '    shifted[:, 1:] *= segments[:, 1:] == segments[:, :-1]\n',
        '    pass\n',
        'tests/data/sources/test_table.py::test_packed_rows_hold_all_examples_in_order'),
    Mutant(
        'cut_features_lose_their_end',
        't5x_lite/data/features.py',
        '[trimmed[feature][:-1], [end_id]]',
        '[trimmed[feature]]',
        'tests/data/test_builtin_tasks.py::test_long_features_are_trimmed_and_keep_their_end'),
    Mutant(
        'source_around_a_function_begins_within_a_line',
        't5x_lite/data/corpora/__init__.py',
        "first = text.index('\\n', first - 1) + 1",
        'pass',
        'tests/data/corpora/test_corpora.py::test_context_has_whole_lines_around_the_body'),
    Mutant(
        'replaced_characters_cost_two',
        't5x_lite/data/text_metrics.py',
        'replaced = distances[:-1] + (characters != ord(character))',
        'replaced = distances[:-1] + 2 * (characters != ord(character))',
        'tests/data/test_builtin_tasks.py::test_edit_similarity'),
    Mutant(
        'inputs_are_not_read_to_their_end',
        't5x_lite/data/features.py',
        'reads_inputs[r, start:end + 1] = 1',
        'reads_inputs[r, start:end] = 1',
        'tests/data/test_features.py::test_packed_prefix_language_model'),
    Mutant(
        'prepared_batches_count_as_handed_out',
        't5x_lite/data/table_iterator.py',
        'cursor = self._past_cursors[-num] if num else self._cursor',
        'cursor = self._cursor',
        'tests/data/test_streams.py::test_resumes_exactly'),
    Mutant(
        'every_process_reads_the_first_rows',
        't5x_lite/data/positions.py',
        'slice(layout.shard_id * per_shard, (layout.shard_id + 1) * per_shard)',
        'slice(0, per_shard)',
        'tests/data/sources/test_table.py::test_batches_do_not_depend_on_the_number_of_processes'),
    Mutant(
        'epochs_have_one_order',
        't5x_lite/data/streams.py',
        "philox.fold(self._seed, self._name, 'order', epoch)",
        "philox.fold(self._seed, self._name, 'order', 0)",
        'tests/data/sources/test_table.py::test_shuffled_epochs_hold_each_example_once_in_new_orders'),
    Mutant(
        'blocks_of_a_mixture_repeat',
        't5x_lite/data/streams.py',
        'inner = block * self._quotas[s] + ranks[offsets[rows]]',
        'inner = ranks[offsets[rows]]',
        'tests/data/test_streams.py::test_blocks_of_a_mixture_continue_each_stream'),
    Mutant(
        'filling_rows_have_the_numbers_of_examples',
        't5x_lite/data/sources/table.py',
        'indices[len(batch_rows):] = -1',
        'pass',
        'tests/data/test_builtin_tasks.py::test_eval_tasks'),
    Mutant(
        'the_last_token_is_cut_off',
        't5x_lite/evaluation/batching.py',
        'np.argmax(filled[:, ::-1], axis=1)',
        'np.argmax(filled[:, ::-1], axis=1) - 1',
        'tests/evaluation/test_batching.py::test_every_example_is_in_one_batch_and_nothing_of_it_is_cut_off'),
    Mutant(
        'outputs_are_those_of_the_trained_parameters',
        't5x_lite/evaluation/runner.py',
        'params = train_state.eval_params',
        'params = train_state.params',
        'tests/evaluation/test_outputs.py::test_outputs_are_those_of_the_parameters_to_evaluate'),
    Mutant(
        'equal_values_are_improvements',
        't5x_lite/actions.py',
        'value > previous + margin',
        'value >= previous + margin',
        'tests/test_actions.py::test_early_stopping'),
    Mutant(
        'a_mixture_ends_with_its_last_task',
        't5x_lite/data/streams.py',
        'return min(ends)',
        'return max(ends)',
        'tests/data/test_streams.py::'
        'test_a_mixture_ends_before_the_first_example_beyond_the_epochs_of_its_task[1-sizes0]'),
)
