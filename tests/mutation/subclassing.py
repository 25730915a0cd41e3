"""Mutants of what subclasses and bindings that are written for T5X get."""

from tests.mutation.mutant import Mutant

_SUBCLASSING = 'tests/test_subclassing.py'
_FORMS = 'tests/t5x/forms/test_hooks.py'

MUTANTS = (
  Mutant(
    'only_the_class_that_defines_logits_of_t5x_calls_them',
    't5x_lite/subclassing.py',
    'if _nearness(cls, source) < _nearness(cls, name):',
    'if source in vars(cls) and name not in vars(cls):',
    f'{_SUBCLASSING}::test_either_name_calls_the_nearest_definition_and_super_the_one_before',
  ),
  Mutant(
    'logits_of_our_name_are_not_those_of_t5x',
    't5x_lite/subclassing.py',
    "  ('_compute_logits', 'compute_logits', _compute_logits_of),\n",
    '',
    f'{_SUBCLASSING}::test_either_name_calls_the_nearest_definition_and_super_the_one_before',
  ),
  Mutant(
    'logits_always_get_mutable_collections',
    't5x_lite/subclassing.py',
    '    if mutable:\n      options',
    '    if True:\n      options',
    f'{_SUBCLASSING}::test_arguments_reach_logits_of_t5x_only_if_they_have_a_value',
  ),
  Mutant(
    'losses_always_ask_for_intermediates',
    't5x_lite/models/base.py',
    'if subclassing.overrides(self, BaseTransformerModel.auxiliary_losses):',
    'if True:',
    f'{_SUBCLASSING}::test_arguments_reach_logits_of_t5x_only_if_they_have_a_value',
  ),
  Mutant(
    'a_name_of_a_collection_is_its_letters',
    't5x_lite/subclassing.py',
    '      names = (mutable,)\n',
    '      names = tuple(mutable)\n',
    f'{_SUBCLASSING}::test_logits_of_t5x_come_with_the_collections_that_may_change',
  ),
  Mutant(
    'evaluations_ignore_the_loss_of_the_model',
    't5x_lite/models/base.py',
    'if subclassing.overrides(self, BaseTransformerModel.loss_fn):',
    'if False:',
    f'{_FORMS}::test_a_dual_encoder_trains_and_is_evaluated_by_its_loss',
  ),
  Mutant(
    'metrics_of_t5x_are_not_called',
    't5x_lite/models/base.py',
    'if subclassing.overrides(self, BaseTransformerModel._compute_metrics):',
    'if False:',
    f'{_FORMS}::test_an_ensemble_trains_its_members_and_reports_their_mean[None]',
  ),
  Mutant(
    'steps_of_decoding_of_t5x_are_not_called',
    't5x_lite/models/decoder_only.py',
    'has_own_step = subclassing.overrides(self, DecoderOnlyModel._compute_logits_from_slice)',
    'has_own_step = False',
    f'{_FORMS}::test_a_step_of_decoding_changes_logits_as_a_callback_does',
  ),
  Mutant(
    'caches_of_t5x_are_not_made',
    't5x_lite/models/encoder_decoder.py',
    'if subclassing.overrides(self, EncoderDecoderModel._compute_kv_cache):',
    'if False:',
    f'{_SUBCLASSING}::test_a_step_and_a_cache_of_t5x_reach_ours_for_prompts_and_statistics',
  ),
  Mutant(
    'encoded_inputs_of_t5x_are_not_repeated',
    't5x_lite/models/generation.py',
    'has_cross_cache=not is_of_t5x,',
    'has_cross_cache=True,',
    f'{_SUBCLASSING}::test_a_step_of_t5x_gets_what_t5x_passes_to_it',
  ),
  Mutant(
    'steps_with_ids_and_cache_get_a_state',
    't5x_lite/subclassing.py',
    "if hook is not None and 'flat_cache' in inspect.signature(hook).parameters:",
    'if False:',
    f'{_FORMS}::test_an_ensemble_of_former_versions_decodes_with_ids_and_cache',
  ),
  Mutant(
    'ids_and_cache_do_not_reach_our_step',
    't5x_lite/subclassing.py',
    "    if not hasattr(decoding_state, 'cur_token'):\n",
    '    if False:\n',
    f'{_FORMS}::test_an_ensemble_of_former_versions_decodes_with_ids_and_cache',
  ),
  Mutant(
    'steps_of_t5x_get_our_argument',
    't5x_lite/trainer/trainer.py',
    'if self._weight_metrics_computer is None or is_of_t5x:',
    'if self._weight_metrics_computer is None:',
    f'{_FORMS}::test_a_trainer_that_prunes_equals_masked_parameters_and_gradients[False]',
  ),
  Mutant(
    'steps_of_t5x_have_no_schedule_that_the_optimizer_ignores',
    't5x_lite/trainer/trainer.py',
    '    self._learning_rate_fn = learning_rate_fn\n    if self._learning_rate_is_ignored:\n',
    '    self._learning_rate_fn = learning_rate_fn\n    if self._learning_rate_is_ignored:\n'
    '      self._learning_rate_fn = None\n',
    f'{_FORMS}::test_a_trainer_that_prunes_equals_masked_parameters_and_gradients[True]',
  ),
  Mutant(
    'steps_are_made_again_by_each_reader',
    't5x_lite/subclassing.py',
    "('_partitioned_train_step', 'partitioned_train_step', functools.cached_property),",
    "('_partitioned_train_step', 'partitioned_train_step', property),",
    f'{_SUBCLASSING}::test_steps_of_trainers_have_both_names_and_are_made_once',
  ),
  Mutant(
    'the_log_names_methods_again_for_each_subclass',
    't5x_lite/subclassing.py',
    '  if not any(name in vars(each) for each in (cls, *mixins)):\n    return False\n',
    '',
    f'{_SUBCLASSING}::test_one_line_of_the_log_names_the_methods_of_a_class',
  ),
  Mutant(
    'none_of_a_rule_of_t5x_is_no_axes',
    't5x_lite/optimizers/axes/kinds.py',
    '  if axes is None:\n    return jax.tree.map(names.unnamed_axes, arrays)\n',
    '',
    f'{_FORMS}::test_rules_of_t5x_give_the_axes_of_states',
  ),
  Mutant(
    'rules_of_t5x_do_not_know_the_parameters',
    't5x_lite/optimizers/axes/rules.py',
    '      layout = known\n',
    '      pass\n',
    f'{_FORMS}::test_rules_of_t5x_give_the_axes_of_states',
  ),
  Mutant(
    'annotations_of_users_are_compared',
    't5x_lite/configuration/validation.py',
    'if not _is_checked(use.configurable.wrapped):',
    'if False:',
    'tests/configuration/test_validation.py::test_annotations_of_users_are_not_compared',
  ),
  Mutant(
    'constructors_of_subclasses_are_of_users',
    't5x_lite/configuration/validation.py',
    '    fn_or_cls = fn_or_cls.__init__\n  module',
    '    pass\n  module',
    'tests/configuration/test_validation.py::test_annotations_of_users_are_not_compared',
  ),
)
