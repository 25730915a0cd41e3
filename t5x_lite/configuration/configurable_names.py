"""Functions and classes that a configuration may name with `--allowed_modules`: what recipes need, and nothing else.

A name is found in its module, and must be the same object as the one that the configuration names. So the way on which
a configuration reaches an object does not matter, and an object cannot pretend to be another one. The objects neither
call a function by its name in a text, nor import a module that is not checked, nor write or delete a file that is named
in their arguments; those of which this is true only for the callers in t5x_lite are in `PASSED`.

The packages `t5x_lite.optimizers` and `moe.routing` export the names of their modules in `CALLED`: a new optimizer or
router is named here only.
"""

import operator
import sys
from typing import Any

# Module to names. Modules of t5x_lite and moe are those that define the names.
CALLED: dict[str, str] = {
  'moe.experts': 'ExpertMlp',
  'moe.layers': 'MoeLayer',
  'moe.mesh': 'compute_num_model_partitions default_moe_mesh',
  'moe.models': 'MoeDecoderOnlyModel MoeEncoderDecoderModel',
  'moe.networks': (
    'sparse_decoder_only sparse_layers sparse_transformer SparseBlock SparseFeedForward'
  ),
  'moe.partitioner': 'MoePjitPartitioner',
  'moe.routing.base': 'RouterWeights',
  'moe.routing.expert_choice': 'ExpertsChooseRouter',
  'moe.routing.hashing': 'HashRouter',
  'moe.routing.sinkhorn': 'SinkhornRouter',
  'moe.routing.token_routers': 'TokensChooseRouter',
  'moe.rules': 'head_logical_axis_rules logical_factor_rules standard_logical_axis_rules',
  'moe.state_axes': 'match_fn',
  'moe.training': 'scale_expert_gradients scale_sharded_grads',
  'moe.upcycling': 'upcycle',
  'optax': (
    'adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan adaptive_grad_clip '
    'add_decayed_weights add_noise amsgrad centralize chain clip clip_by_block_rms '
    'clip_by_global_norm constant_schedule cosine_decay_schedule cosine_onecycle_schedule ema '
    'exponential_decay fromage identity join_schedules lamb lars lbfgs linear_onecycle_schedule '
    'linear_schedule lion nadam nadamw noisy_sgd novograd piecewise_constant_schedule '
    'piecewise_interpolate_schedule polyak_sgd polynomial_schedule radam rmsprop rprop scale '
    'scale_by_adam scale_by_factored_rms scale_by_lion scale_by_rms scale_by_schedule '
    'scale_by_trust_ratio set_to_zero sgd sgdr_schedule sign_sgd signum sm3 trace '
    'warmup_cosine_decay_schedule warmup_exponential_decay_schedule yogi zero_nans'
  ),
  'optax.contrib': 'normalize',
  'seqio': 'ByteVocabulary ContinuousFeature Feature PassThroughVocabulary SentencePieceVocabulary',
  't5x_lite.adapters.lora': 'Lora',
  't5x_lite.trainer.actions': 'EarlyStoppingAction TerminateOnNanAction',
  't5x_lite.apps.infer.run': 'create_task_from_tfexample_file',
  't5x_lite.apps.train.step_log': 'LogConfig',
  't5x_lite.trainer.averaging': 'ParamEma Warmup',
  't5x_lite.checkpoints.builders.adapters': 'Adapter NewAdapter initial_adapter',
  't5x_lite.checkpoints.builders.changing': (
    'ConvertLayout NewVocabulary OnArrays ParamAverage Reinitialize StartAtStep Transform'
  ),
  't5x_lite.checkpoints.builders.reading': 'Average Restore Subtree',
  't5x_lite.checkpoints.config': 'CheckpointConfig RestoreCheckpointConfig SaveCheckpointConfig',
  't5x_lite.checkpoints.hugging_face.network': 'decoder_start_id network_config stop_token_ids',
  't5x_lite.checkpoints.saving.policies': (
    'AnySavePolicy AtSteps EveryNMinutes EveryNSteps KeepAll KeepBest KeepEvery KeepLast '
    'OnRequest WhenBest'
  ),
  't5x_lite.checkpoints.restoring.transforms': 'AssignmentMap',
  't5x_lite.decoding.constraints': 'Constraints',
  't5x_lite.data.builtin_tasks': 'docs_span_corruption_task keyword_cloze_task text_task',
  't5x_lite.data.config': 'DatasetConfig',
  't5x_lite.data.file_tasks': 'file_task SpanCorruption',
  't5x_lite.data.own_files': 'FileTask',
  't5x_lite.data.sources.synthetic': 'SyntheticFeature SyntheticSource',
  't5x_lite.data.text.sources': 'TextFileConfig',
  't5x_lite.data.text_metrics': 'metrics',
  't5x_lite.data.tokenizer_folders': 'hugging_face_vocabulary',
  't5x_lite.data.batches.truncation': 'Truncation',
  't5x_lite.data.vocabularies': (
    'ByteVocabulary PassThroughVocabulary round_vocab_size_to_multiple SentencePieceVocabulary'
  ),
  't5x_lite.decoding.label_scores': 'LabelScores',
  't5x_lite.decoding.minimum_bayes_risk': 'MinimumBayesRisk',
  't5x_lite.decoding.state': 'DecodeContract',
  't5x_lite.evaluation.config': 'Evaluation InferenceEvalConfig Threshold When',
  't5x_lite.layers.attention': 'MultiHeadDotProductAttention',
  't5x_lite.layers.attention_kernels': 'dot_product_attention',
  't5x_lite.layers.blockwise': 'blockwise_attention',
  't5x_lite.layers.dense': 'DenseGeneral',
  't5x_lite.layers.embedding': 'Embed',
  't5x_lite.layers.logits': 'LogitsDense OutputProjection',
  't5x_lite.layers.masks': (
    'AttentionBias causal_bias combine_biases combine_masks DistanceBias make_attention_bias '
    'make_attention_mask make_causal_mask make_decoder_mask mask_to_bias'
  ),
  't5x_lite.layers.mlp': 'activation_fn MlpBlock',
  't5x_lite.layers.nd': 'DenseGeneral MultiHeadDotProductAttention nd_dense_init',
  't5x_lite.layers.norm': 'LayerNorm',
  't5x_lite.layers.relative_position': (
    'CachedRelativePositionBiases relative_position_bucket RelativePositionBiases'
  ),
  't5x_lite.losses': (
    'compute_weighted_cross_entropy convert_special_loss_normalizing_factor_to_enum '
    'cross_entropy_with_logits get_loss_normalizing_factor_and_weights real_rows '
    'token_cross_entropy'
  ),
  't5x_lite.metrics': (
    'ArrayAverage AveragePerBatch AveragePerStep OfLastStep Step StepsPerTime Sum Time TimeRate '
    'WeightedAverage'
  ),
  't5x_lite.models.base': 'get_input_vocabulary get_output_vocabulary',
  't5x_lite.models.decoder_only': 'DecoderOnlyModel',
  't5x_lite.models.encoder_decoder': 'DecoderParams EncoderDecoderModel',
  't5x_lite.models.generation': 'remove_prefix',
  't5x_lite.networks.decoder_only': 'Decoder DecoderWrapper',
  't5x_lite.networks.masked': 'Decoder DecoderLayer EncoderLayer',
  't5x_lite.networks.scalable_t5': 'T5Config',
  't5x_lite.networks.stacks': 'Encoder layer_tree',
  't5x_lite.networks.t5': 'Transformer',
  't5x_lite.networks.t5_blocks': (
    'dense_everywhere dense_feed_forward t5_attention t5_attention_everywhere'
  ),
  't5x_lite.networks.t5_config': 'T5Config TransformerConfig',
  't5x_lite.trainer.non_finite': 'NonFinitePolicy',
  't5x_lite.optimizers.adafactor_rule.factor_rules': (
    'factor_name_to_factordim FactorDim HeuristicRule HParamMap standard_logical_factor_rules'
  ),
  't5x_lite.optimizers.adafactor_rule.optimizer': 'Adafactor',
  't5x_lite.optimizers.adafactor_rule.update': 'relative_step',
  't5x_lite.optimizers.axes.rules': 'OptaxStatePartitionRules',
  't5x_lite.optimizers.base.update_options': 'with_update_options',
  't5x_lite.optimizers.multi.labels': 'partition',
  't5x_lite.optimizers.multi.optimizer': 'MultiOptimizer',
  't5x_lite.optimizers.multi.traversals': 'ModelParamTraversal PathTraversal Traversal',
  't5x_lite.optimizers.muon_rule.optimizer': 'muon',
  't5x_lite.optimizers.optax_adapter.factories': (
    'acprop adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan ademamix adopt '
    'amsgrad chain cocob dadapt_adamw dog dowg dpsgd fromage galore lamb '
    'lars lbfgs lion madgrad mechanize momo momo_adam nadam nadamw noisy_sgd novograd '
    'optimistic_adam optimistic_adam_v2 optimistic_gradient_descent polyak_sgd prodigy radam '
    'reduce_on_plateau rmsprop rprop sam schedule_free schedule_free_adamw schedule_free_sgd '
    'sgd sign_sgd signum simplified_ademamix sm3 sophia split_real_and_imaginary '
    'wrap_optax_optimizer yogi'
  ),
  't5x_lite.optimizers.optax_adapter.wrapper': 'OptaxWrapper',
  't5x_lite.optimizers.scaled_adam_rule.transformation': 'scaled_adam',
  't5x_lite.optimizers.shampoo': 'distributed_shampoo',
  't5x_lite.optimizers.shampoo.config': 'GraftingType',
  't5x_lite.optimizers.soap_rule': 'soap',
  't5x_lite.partitioning.layout': 'DataLayout',
  't5x_lite.partitioning.mesh': 'default_mesh get_cpu_mesh get_gpu_mesh',
  't5x_lite.partitioning.partitioner': 'PjitPartitioner',
  't5x_lite.partitioning.rules': 'standard_logical_axis_rules',
  't5x_lite.runtime.profiling': 'ProfileConfig',
  't5x_lite.schedules': 'create_learning_rate_scheduler linear_warmup_and_decay',
  't5x_lite.trackers.mlflow_tracker': 'Mlflow',
  't5x_lite.trackers.weights_and_biases': 'Wandb',
  't5x_lite.trainer.step_params': 'GaussianParamNoise',
  't5x_lite.trainer.weight_metrics': 'WeightMetricsComputer',
}

# Functions and classes that a configuration may pass to others and bind, but not call in a value. Several of them read
# and write folders that are arguments, and methods need an object.
PASSED: dict[str, str] = {
  'moe.checkpoints': 'UpcycleCheckpointer',
  'moe.models': '_SparseModel.eval_fn',
  'moe.routing.base': 'Router',
  'moe.training': 'MoeTrainer',
  'seqio': (
    'Evaluator JSONLogger PyLoggingLogger TensorBoardLogger EncDecFeatureConverter '
    'LMFeatureConverter PrefixLMFeatureConverter'
  ),
  't5x_lite.trainer.actions': 'run_actions',
  't5x_lite.apps.evaluate.run': 'evaluate',
  't5x_lite.apps.export.run': 'save',
  't5x_lite.apps.infer.jsonl': 'write_inferences_to_file',
  't5x_lite.apps.infer.merge': 'merge_chunks_to_file merge_chunks_to_table',
  't5x_lite.apps.infer.run': 'infer update_measurement_series',
  't5x_lite.apps.precompile.run': 'precompile',
  't5x_lite.apps.track.run': 'track',
  't5x_lite.apps.train.run': 'train',
  't5x_lite.checkpoints.t5x.checkpointer': (
    'Checkpointer OrbaxCheckpointManagerInterface SaveBestCheckpointer'
  ),
  't5x_lite.checkpoints.t5x.legacy': 'LegacyCheckpointer LegacyCheckpointManager',
  't5x_lite.checkpoints.saving.manager': 'CheckpointManager',
  't5x_lite.checkpoints.restoring.transforms': 'apply_assignment_map',
  't5x_lite.data.datasets': (
    'get_dataset get_dataset_inner get_training_eval_datasets open_eval_data open_train_data'
  ),
  't5x_lite.data.iterators': (
    'get_vocabulary open_eval_iterators open_example_sources open_train_iterator '
    'verify_matching_vocabs'
  ),
  't5x_lite.data.sources.seqio': 'SeqioSource',
  't5x_lite.data.sources.table': 'BuiltinSource GrainSource RandomTableSource TableSource',
  't5x_lite.data.text_metrics': 'edit_similarity exact_match',
  't5x_lite.decoding.beam': 'beam_search',
  't5x_lite.decoding.greedy': 'greedy_search',
  't5x_lite.decoding.sampling': 'temperature_sample',
  't5x_lite.evaluation.evaluator': 'InferenceEvaluator',
  't5x_lite.evaluation.infer_fn': 'get_infer_fn',
  't5x_lite.evaluation.outputs': 'OutputRunner',
  't5x_lite.evaluation.runner': 'PredictRunner',
  't5x_lite.gin_utils': 'summarize_gin_config',
  't5x_lite.models.base': (
    'BaseModel.predict_batch BaseTransformerModel BaseTransformerModel.eval_fn '
    'BaseTransformerModel.loss_fn BaseTransformerModel.score_batch'
  ),
  't5x_lite.models.decoder_only': 'DecoderOnlyModel.predict_batch_with_aux',
  't5x_lite.models.encoder_decoder': 'EncoderDecoderModel.predict_batch_with_aux',
  't5x_lite.trainer.state_init': 'TrainStateInitializer',
  't5x_lite.trainer.trainer': 'BaseTrainer Trainer',
}


def called_in(package: str) -> dict[str, list[str]]:
  """Return the rows of `CALLED` of the modules of a package, whose `__init__` exports these names.

  Args:
    package: full name of the package.
  """
  return {
    module: names.split() for module, names in CALLED.items() if module.startswith(f'{package}.')
  }


def is_listed(found: Any, *, is_called: bool) -> bool:
  """Return whether a configuration may name an object with any `--allowed_modules`.

  Args:
    found: function, class, or other callable object.
    is_called: whether the configuration calls it, as in `@data.DatasetConfig()`.
  """
  tables = [CALLED]
  if not is_called:
    tables.append(PASSED)
  return any(
    _object(module, name) is found
    for table in tables
    for module, names in table.items()
    for name in names.split()
  )


def _object(module: str, name: str) -> Any:
  """Return the object of a name of an imported module, or None."""
  try:
    return operator.attrgetter(name)(sys.modules[module])
  except (AttributeError, KeyError):
    return None
