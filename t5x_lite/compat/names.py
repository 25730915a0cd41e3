"""T5X's modules and the places of their names in t5x_lite: the one table that gin files, Python and the pages read.

Only names; nothing is imported for them here. A name that is not listed in a row has its own name in the row's module
`here`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from t5x_lite.errors import did_you_mean


class Module(NamedTuple):
  """Row of the table: one module of T5X.

  Attributes:
    here: our module with all names that are not listed in `names`; '' without such a module.
    names: T5X's names that are elsewhere or have another name here, as 'our.module:Name'.
    left_out: T5X's names without an equivalent, parameters as 'function.parameter', and values that a parameter here
      rejects as 'function.parameter=value', with one sentence each that names the alternative.
  """

  here: str = ''
  names: Mapping[str, str] = {}
  left_out: Mapping[str, str] = {}


class Place(NamedTuple):
  """Place of an object here: a module and the attributes to follow in it, e.g. ('t5x_lite.data', 'DatasetConfig')."""

  module: str
  name: str


# Types and functions that several of T5X's modules have under these names, for annotations in users' code.
ALIASES: dict[str, str] = {
  'ActionMapType': 'typing:Mapping',
  'Activation': 'typing:Callable',
  'Array': 'jax:Array',
  'BatchSpec': 'typing:Mapping',
  'BatchType': 'typing:Mapping',
  'CompiledPartitionedCallable': 'typing:Callable',
  'DType': 'typing:Any',
  'Dtype': 'typing:Any',
  'FlaxMutables': 'typing:Mapping',
  'FrozenDict': 'flax.core:FrozenDict',
  'FrozenVariableDict': 'flax.typing:FrozenVariableDict',
  'InferStepCallable': 'typing:Callable',
  'Inferences': 'typing:Any',
  'Initializer': 'typing:Callable',
  'JaxDevice': 'jax:Device',
  'LearningRateCallable': 't5x_lite.schedules:LearningRateCallable',
  'MergeFn': 'typing:Callable',
  'Mesh': 'jax.sharding:Mesh',
  'MetricMapSpec': 'typing:Mapping',
  'MetricMapType': 'typing:Mapping',
  'MetricValueMapType': 'typing:Mapping',
  'MetricsMap': 'typing:MutableMapping',
  'ModelWeights': 'typing:Any',
  'MutableMetricMapType': 'typing:MutableMapping',
  'MutableVariableDict': 'flax.typing:MutableVariableDict',
  'OptimizerStateType': 't5x_lite.optimizers:OptimizerStateType',
  'PRNGKey': 'jax:Array',
  'PartitionSpec': 'jax.sharding:PartitionSpec',
  'PartitionedCallable': 'typing:Callable',
  'PartitionedTrainCallable': 't5x_lite.trainer:PartitionedTrainCallable',
  'PyTree': 'typing:Any',
  'PyTreeDef': 'jax.tree_util:PyTreeDef',
  'Pytree': 'typing:Any',
  'Rng': 'jax:Array',
  'Scalar': 'typing:Any',
  'Shape': 'typing:Sequence',
  'TrainState': 't5x_lite.train_state:TrainState',
  'VariableDict': 'flax.typing:VariableDict',
  'WriteFn': 'typing:Callable',
  'cached_property': 'functools:cached_property',
  'param_with_axes': 'flax.linen.partitioning:param_with_axes',
  'scan_with_axes': 'flax.linen.partitioning:scan_with_axes',
  'with_sharding_constraint': 'flax.linen.partitioning:with_sharding_constraint',
}
_LAYERS = 't5x_lite.layers'
# Names that T5X has in several of its modules `layers`.
_OF_LAYERS = {
  '_canonicalize_tuple': 't5x_lite.compat.functions:as_tuple',
  '_convert_to_activation_function': 't5x_lite.layers:activation_fn',
  '_normalize_axes': 't5x_lite.compat.functions:normalize_axes',
  'default_embed_init': 't5x_lite.layers.embedding:default_embedding_init',
  'dynamic_vector_slice_in_dim': 't5x_lite.compat.functions:slice_vectors',
}
_ARRAYS = 'Remove it: arrays are always jax.Array.'
_NOT_LAZY = 'To read arrays one at a time, use checkpoints.open_source(path).read_array(name).'
_ONE_ORDER = 'It belongs to deterministic=True.'
_SAVE_MEMORY = 'The memory of a save is not limited; omit the option.'
_TENSORFLOW = (
  'Checkpoints of Mesh TensorFlow are not read. Use the same model in the format of T5X or of Hugging Face, in which '
  'all T5 models are published, or convert it with T5X.'
)
_EXPORTS = 'Include gin/t5x/configs/runs/export.gin, the file of t5x_lite: exported programs take and return ids.'

MODULES: dict[str, Module] = {
  't5x.adafactor': Module(
    here='t5x_lite.adafactor',
    names={
      'FactorRule': 'typing:Any',
      '_AdafactorHyperParams': 't5x_lite.optimizers.adafactor_rule.update:AdafactorHyperParams',
      '_AdafactorParamState': 't5x_lite.optimizers.adafactor_rule.update:AdafactorParamState',
    },
  ),
  't5x.binary_search': Module(here='t5x_lite.decoding'),
  't5x.checkpoint_utils': Module(here='t5x_lite.checkpoints'),
  't5x.checkpoints': Module(
    here='t5x_lite.checkpoints',
    names={
      'Dataset': 'typing:Any',
      'LazyArray': 't5x_lite.compat.functions:LazyArray',
      'VERSION': 't5x_lite.checkpoints.sources.t5x_index:VERSION',
      'all_steps': 't5x_lite.checkpoints:all_steps_of_any_program',
      'latest_step': 't5x_lite.checkpoints:latest_step_of_any_program',
    },
    left_out={
      'Checkpointer.convert_from_tf_checkpoint': _TENSORFLOW,
      'Checkpointer.restore.lazy_parameters=True': _NOT_LAZY,
      'Checkpointer.restore_from_tf_checkpoint': _TENSORFLOW,
      'Checkpointer.save.concurrent_gb=64': _SAVE_MEMORY,
      'DatasetArgs': 'CheckpointManager.save has data_state, the position in the data.',
      'DatasetCheckpointHandler': 'CheckpointManager.save has data_state, the position in the data.',
      'LazyAwaitableArray': _NOT_LAZY,
      'LazyThreadPoolArray': _NOT_LAZY,
      'OrbaxCheckpointManagerInterface.restore.lazy_parameters=True': _NOT_LAZY,
      'OrbaxCheckpointManagerInterface.restore_from_tf_checkpoint': _TENSORFLOW,
      'fake_param_info': 'checkpoints.open_source(path).shapes() has the shape and dtype of each array.',
      'load_t5x_checkpoint.lazy_parameters=True': _NOT_LAZY,
    },
  ),
  't5x.checkpoints_utils': Module(
    here='t5x_lite.checkpoints',
    names={
      'all_steps': 't5x_lite.checkpoints:all_steps_of_any_program',
      'latest_step': 't5x_lite.checkpoints:latest_step_of_any_program',
    },
  ),
  't5x.contrib.moe.adafactor_utils': Module(
    here='moe', names={'FactorDim': 't5x_lite.adafactor:FactorDim'}
  ),
  't5x.contrib.moe.checkpoints': Module(here='moe', left_out={'LazyAwaitableArray': _NOT_LAZY}),
  't5x.contrib.moe.models': Module(
    here='moe.models',
    names={
      'AveragePerStep': 't5x_lite.metrics:AveragePerStep',
      'DecodeFnCallable': 't5x_lite.decoding:DecodeFnCallable',
      'Sum': 't5x_lite.metrics:Sum',
      'MOE_METRICS': 'moe.metrics:MOE_METRICS',
    },
  ),
  't5x.contrib.moe.partitioning': Module(
    here='moe',
    names={
      'FlaxOptimTrainState': 't5x_lite.train_state:FlaxOptimTrainState',
      'InferenceState': 't5x_lite.train_state:InferenceState',
      'DataLayout': 't5x_lite.partitioning:DataLayout',
      'HardwareMesh': 't5x_lite.partitioning:HardwareMesh',
      'LogicalAxisRules': 't5x_lite.partitioning:LogicalAxisRules',
      'PartitionSpec': 't5x_lite.partitioning:PartitionSpec',
      'get_cpu_mesh': 'moe.mesh:get_cpu_mesh',
      'get_gpu_mesh': 'moe.mesh:get_gpu_mesh',
      'standard_logical_axis_rules': 'moe.rules:head_logical_axis_rules',
    },
  ),
  't5x.contrib.moe.trainer': Module(here='moe'),
  't5x.contrib.moe.training_utils': Module(
    here='moe', names={'Gradients': 'typing:Any', 'ParamTree': 'typing:Any'}
  ),
  't5x.decoding': Module(
    here='t5x_lite.decoding',
    names={
      '_dynamic_update_vector_slice_in_dim': 't5x_lite.compat.functions:update_vector_slices',
      '_is_tracer': 't5x_lite.compat.functions:is_traced',
    },
  ),
  't5x.eval': Module(here='t5x_lite.apps.evaluate'),
  't5x.export_lib': Module(
    here='t5x_lite.apps.export',
    left_out=dict.fromkeys(
      (
        'ConfigDict',
        'CreateDecodingStateCallbackFn',
        'CreatePostprocessorFn',
        'CreatePreprocessorFn',
        'CreatePreprocessorFnNew',
        'CreatePreprocessorFnOld',
        'CustomInferenceMode',
        'DecoderParamsSpec',
        'ExportableModule',
        'InferenceFn',
        'PostprocessorFn',
        'PreprocessorFn',
        'PreprocessorFnFromTask',
        'WarmupExample',
        'WarmupExamples',
        'bucketize_tokenized_input',
        'create_batch_polymorphic_shapes',
        'create_decoder_preprocessor',
        'create_dual_encoder_preprocessor',
        'create_fake_input',
        'create_inference_function',
        'create_postprocessor',
        'create_preprocessor',
        'create_preprocessor_from_task',
        'create_preprocessor_with_decoder_params',
        'create_single_tensor_input_signature',
        'flatten',
        'generate_examples_with_sequence_lengths',
        'get_train_state_initializer',
        'load_params_from_checkpoint',
        'truncate_and_pad_tokenized_input',
        'write_warmup_examples',
        'save.create_decoding_state_callback_fn',
        'save.create_inference_function_fn',
        'save.create_polymorphic_shapes_fn',
        'save.create_postprocessor_fn',
        'save.create_preprocessor_fn',
        'save.decode_outputs',
        'save.enable_xla',
        'save.exportable_module_cls',
        'save.mixture_or_task_name',
        'save.native_lowering',
        'save.output_features',
        'save.output_vocab_feature_name',
        'save.signature_name',
        'save.tokenized_inputs',
        'save.trailing_shapes',
        'save.validation_examples',
        'save.warmup_examples',
        'save.write_warmup_example_fn',
      ),
      _EXPORTS,
    ),
  ),
  't5x.examples.decoder_only.layers': Module(
    here=_LAYERS,
    names={
      **_OF_LAYERS,
      'RelativePositionBiases': 't5x_lite.layers:CachedRelativePositionBiases',
    },
    left_out={
      'MultiHeadDotProductAttention.update_cache_decode': 'Override project_key_value to change cached arrays.',
      'MultiHeadDotProductAttention.update_cache_prefill': 'Override project_key_value to change cached arrays.',
    },
  ),
  't5x.examples.decoder_only.network': Module(here='t5x_lite.networks.decoder_only'),
  't5x.examples.scalable_t5.layers': Module(
    here=_LAYERS,
    names={
      **_OF_LAYERS,
      'InitializerAxis': 'typing:Any',
      'NdInitializer': 'typing:Callable',
      'variance_scaling': 'flax.linen.initializers:variance_scaling',
      'DenseGeneral': 't5x_lite.layers.nd:DenseGeneral',
      'MultiHeadDotProductAttention': 't5x_lite.layers.nd:MultiHeadDotProductAttention',
    },
  ),
  't5x.examples.scalable_t5.network': Module(
    here='t5x_lite.networks.scalable_t5',
    names={
      'ScanIn': 'flax.linen.partitioning:ScanIn',
      'remat': 'flax.linen.partitioning:remat',
    },
    left_out={
      'T5Config.scan_layers=False': "Without loops, use t5.T5Config with relpos_bias_tables='per_layer'.",
    },
  ),
  't5x.examples.t5.layers': Module(here=_LAYERS, names=_OF_LAYERS),
  't5x.examples.t5.network': Module(here='t5x_lite.networks.t5'),
  't5x.gin_utils': Module(
    here='t5x_lite.gin_utils',
    left_out={
      'get_gin_config_str.show_provenance=True': 'The text does not show the file of each setting; '
      'search the gin files for its name.',
    },
  ),
  't5x.infer': Module(here='t5x_lite.apps.infer', names={'_Inferences': 'typing:Any'}),
  't5x.interactive_model': Module(
    here='t5x_lite.interactive_model', names={'BatchesType': 'typing:Sequence'}
  ),
  't5x.losses': Module(here='t5x_lite.losses'),
  't5x.metrics': Module(here='t5x_lite.metrics'),
  't5x.models': Module(here='t5x_lite.models'),
  't5x.optimizers': Module(
    here='t5x_lite.optimizers',
    names={'freeze': 'flax.core:freeze', 'unfreeze': 'flax.core:unfreeze'},
    left_out={
      'amos': "Amos is not part of optax; wrap jestimator's function with optimizers.wrap_optax_optimizer.",
    },
  ),
  't5x.partitioning': Module(
    here='t5x_lite.partitioning',
    names={
      'ModelBasedPjitPartitioner': 't5x_lite.partitioning:PjitPartitioner',
      'OtherMesh': 't5x_lite.partitioning:HardwareMesh',
      'TpuMesh': 't5x_lite.partitioning:HardwareMesh',
    },
  ),
  't5x.precompile': Module(here='t5x_lite.apps.precompile'),
  't5x.state_utils': Module(here='t5x_lite.checkpoints'),
  't5x.train': Module(
    here='t5x_lite.apps.train',
    names={'P': 'jax.sharding:PartitionSpec'},
    left_out={
      'train.use_gda': _ARRAYS,
      'train.use_jax_array': _ARRAYS,
      'train.use_orbax=False': 'Remove it: checkpoints of both formats are read, and `t5x_lite '
      'convert --to=t5x` writes the former one.',
    },
  ),
  't5x.train_state': Module(here='t5x_lite.train_state'),
  't5x.trainer': Module(here='t5x_lite.trainer'),
  't5x.utils': Module(
    names={
      'CheckpointConfig': 't5x_lite.checkpoints:CheckpointConfig',
      'DatasetConfig': 't5x_lite.data:DatasetConfig',
      'EvaluatorConstructor': 't5x_lite.evaluation:EvaluatorConstructor',
      'GetDatasetCallable': 't5x_lite.data:GetDatasetCallable',
      'GetEvalDatasetCallable': 't5x_lite.data:GetEvalDatasetCallable',
      'InferFnCallable': 't5x_lite.evaluation:InferFnCallable',
      'InferStepWithRngCallable': 't5x_lite.evaluation:InferStepWithRngCallable',
      'InferStepWithoutRngCallable': 't5x_lite.evaluation:InferStepWithoutRngCallable',
      'InitFnCallable': 't5x_lite.trainer.state_init:InitFnCallable',
      'LearningRateCallable': 't5x_lite.schedules:LearningRateCallable',
      'LegacyCheckpointManager': 't5x_lite.checkpoints:LegacyCheckpointManager',
      'LegacyCheckpointer': 't5x_lite.checkpoints:LegacyCheckpointer',
      'RestoreCheckpointConfig': 't5x_lite.checkpoints:RestoreCheckpointConfig',
      'SaveCheckpointConfig': 't5x_lite.checkpoints:SaveCheckpointConfig',
      'ShardedDatasetIterator': 't5x_lite.data:ShardedDatasetIterator',
      'TrainStateInitializer': 't5x_lite.trainer.state_init:TrainStateInitializer',
      'create_checkpoint_manager_and_restore': 't5x_lite.checkpoints:create_checkpoint_manager_and_restore',
      'create_learning_rate_scheduler': 't5x_lite.schedules:create_learning_rate_scheduler',
      'create_orbax_checkpoint_manager': 't5x_lite.checkpoints:create_orbax_checkpoint_manager',
      'find_first_checkpoint_step': 't5x_lite.checkpoints:find_first_checkpoint_step',
      'find_next_checkpoint_step': 't5x_lite.checkpoints:find_next_checkpoint_step',
      'flatten_dict_string_keys': 't5x_lite.tree_utils:flatten_dict_string_keys',
      'get_dataset': 't5x_lite.data:get_dataset',
      'get_dataset_inner': 't5x_lite.data:get_dataset_inner',
      'get_fallback_state': 't5x_lite.checkpoints:get_fallback_state',
      'get_first_valid_restore_config_and_paths': 't5x_lite.checkpoints:get_first_valid_restore_config_and_paths',
      'get_infer_fn': 't5x_lite.evaluation:get_infer_fn',
      'get_local_data': 't5x_lite.checkpoints:get_local_data',
      'get_training_eval_datasets': 't5x_lite.data:get_training_eval_datasets',
      'get_vocabulary': 't5x_lite.data:get_vocabulary',
      'get_zeros_batch_like_dataset': 't5x_lite.data:get_zeros_batch_like_dataset',
      'get_zeros_batch_like_spec': 't5x_lite.data:get_zeros_batch_like_spec',
      'import_module': 't5x_lite.configuration.module_imports:import_module',
      'log_model_info': 't5x_lite.partitioning:log_model_info',
      'multihost_assert_equal': 't5x_lite.multihost:assert_equal',
      'override_params_axes_names': 't5x_lite.partitioning:override_params_axes_names',
      'prepare_train_iter': 't5x_lite.data:prepare_train_iter',
      'restore': 't5x_lite.checkpoints.t5x.legacy:restore',
      'round_vocab_size_to_multiple': 't5x_lite.data:round_vocab_size_to_multiple',
      'run_main': 't5x_lite.gin_utils:run_main',
      'set_hardware_rng_ops': 't5x_lite.random_numbers:set_hardware_rng_ops',
      'sync_global_devices': 't5x_lite.multihost:sync',
      'verify_matching_vocabs': 't5x_lite.data:verify_matching_vocabs',
    },
    left_out={
      'FLAGS': "The commands of t5x_lite parse T5X's flags; use absl.flags for flags of your own.",
      'DatasetConfig.runtime_preprocessors=[...]': 'They belong to AirIO, which is not '
      "supported: the model's converter converts and packs the examples. Add others to the task.",
      'LegacyCheckpointer.restore.lazy_parameters=True': _NOT_LAZY,
      'LegacyCheckpointer.save.concurrent_gb=64': _SAVE_MEMORY,
      'LegacyCheckpointer.save.custom_metadata={...}': 'CheckpointManager.save has metadata.',
      'LegacyCheckpointer.save.force=True': 'Delete the existing checkpoint to replace it.',
      'RestoreCheckpointConfig.use_gda': _ARRAYS,
      'SaveCheckpointConfig.use_gda': _ARRAYS,
      'TensorBoardLogger': 'Use seqio.TensorBoardLogger, the same class.',
      'get_training_eval_datasets.deterministic=True': 'The order of the data is '
      'always determined by DatasetConfig.seed.',
      'get_training_eval_datasets.model_dir=...': _ONE_ORDER,
      'get_training_eval_datasets.start_step=1': _ONE_ORDER,
    },
  ),
}

# Modules that T5X's package imports under other names: `from t5x import checkpointing`.
MODULE_ALIASES: dict[str, str] = {'t5x.checkpointing': 't5x.checkpoints'}

# Modules of T5X, with their submodules, that have no row, and the alternative.
LEFT_OUT_MODULES: dict[str, str] = {
  't5x.checkpoint_importer': 'Convert Mesh TensorFlow checkpoints with T5X, and read the result here.',
  't5x.config_utils': 'Configure runs with gin files; fiddle is not supported.',
  't5x.contrib.calm': 'CALM is not part of t5x_lite; decoding.temperature_sample decodes with all layers.',
  't5x.contrib.gpu': 'Use t5x.examples.t5 or t5x.examples.scalable_t5, which run on GPUs too.',
  't5x.export': 'Run t5x_lite export, or import t5x.export_lib.',
  't5x.assert_gc_disabled_during_import_test_util': "It belongs to T5X's own tests.",
  't5x.disable_gc_during_import': 'Remove it: importing t5x_lite imports neither seqio nor TensorFlow.',
  't5x.fiddle_configs': 'Configure runs with gin files; fiddle is not supported.',
  't5x.main': 'There is one command for each run mode: t5x_lite train, eval, infer, precompile, export.',
  't5x.scripts': 'Use xm or SLURM scripts of your own; `t5x_lite launch` starts several processes.',
  't5x.tasks': 'Register the tasks that you use in a module of your own.',
  't5x.test_utils': "Its functions belong to T5X's own tests.",
  't5x.version': 't5x_lite.__version__ is the version of t5x_lite.',
}

# Macros of T5X's run files whose default here is another one, with T5X's.
DEFAULTS: dict[str, str] = {
  'RANDOM_SEED': 'the clock',
  'USE_CACHED_TASKS': 'True',
}

# Names in gin files of earlier versions of T5X: of classes, and of methods with parameters that their classes have now.
FORMER_CLASSES = frozenset({'ModelBasedPjitPartitioner'})
FORMER_PARAMETERS: dict[str, tuple[str, ...]] = {
  'loss_fn': ('z_loss', 'label_smoothing', 'loss_normalizing_factor'),
}

# Programs of T5X, whose names gin files import as those of `__main__`.
_PROGRAMS = ('t5x.train', 't5x.eval', 't5x.infer', 't5x.precompile')


def is_t5x(module: str) -> bool:
  """Return whether a module is T5X's, or the program that reads a gin file."""
  return module.partition('.')[0] in ('t5x', '__main__')


def has_module(module: str) -> bool:
  """Return whether T5X has a module or package, with or without an equivalent."""
  left_out = any(f'{module}.'.startswith(f'{name}.') for name in LEFT_OUT_MODULES)
  return module in MODULES or bool(submodules(module)) or left_out


def rows(module: str) -> list[Module]:
  """Return the rows of a module; several for `__main__`, none for a package."""
  names = _PROGRAMS if module == '__main__' else (module,)
  return [MODULES[name] for name in names if name in MODULES]


def lists(module: str, name: str) -> bool:
  """Return whether the table has the name of one of T5X's modules, also as one that is left out."""
  return any(name in row.names or name in row.left_out for row in rows(module))


def places(module: str, name: str) -> Iterator[Place]:
  """Yield the places where the name of one of T5X's modules may be here."""
  for row in rows(module):
    if name in row.names:
      yield Place(*row.names[name].split(':'))
    elif row.here and name not in row.left_out:
      yield Place(row.here, name)
  if name in ALIASES and rows(module):
    yield Place(*ALIASES[name].split(':'))


def submodules(package: str) -> list[str]:
  """Return the last parts of the names of the modules and packages of T5X in `package`."""
  inside = [
    name.removeprefix(f'{package}.')
    for name in (*MODULES, *MODULE_ALIASES)
    if name.startswith(f'{package}.')
  ]
  return sorted({name.partition('.')[0] for name in inside})


def why_no_module(module: str) -> str:
  """Return why a module of T5X cannot be imported, as a sentence; '' if it can."""
  if module in (*MODULES, *MODULE_ALIASES, '__main__') or submodules(module):
    return ''
  for name, sentence in LEFT_OUT_MODULES.items():
    if module == name or module.startswith(f'{name}.'):
      return f'{name} has no equivalent in t5x_lite. {sentence}'
  if module.startswith('__main__.'):
    return (
      'Names of __main__ cannot be imported. Write `import __main__ as NAME`, and NAME.'
      f'{module.partition(".")[2]} for this one.'
    )
  parent, _, name = module.rpartition('.')
  if parent in MODULES:
    return f'T5X has no module {module!r}. Import {parent}, and write {parent.rpartition(".")[2]}.{name}.'
  # The common beginning would make all names similar.
  near = did_you_mean(
    module.removeprefix('t5x.'), [name.removeprefix('t5x.') for name in MODULES], lists_all=False
  )
  return f'T5X has no module {module!r}.{near} A module of your own is found in the folder t5x of the current folder.'


def sentence(module: str, name: str) -> str:
  """Return the sentence of a name, or of a parameter as 'function.parameter', that is left out; otherwise ''."""
  return next((row.left_out[name] for row in rows(module) if name in row.left_out), '')


def remedy(module: str, name: str) -> str:
  """Return the sentence of a row of `left_out`, for the function here that rejects the value."""
  return MODULES[module].left_out[name]


def parameter_sentence(place: Place, parameter: str) -> str:
  """Return the sentence of a parameter of T5X that the function or class at `place` does not have; '' if none."""
  for module, row in MODULES.items():
    for key, text in row.left_out.items():
      name, dot, left_out = key.rpartition('.')
      if dot and left_out == parameter and place in places(module, name):
        return text
  return ''


def modules_ending_with(path: str) -> list[str]:
  """Return the modules of T5X whose name is or ends with a dotted path, e.g. 't5x.utils' for 'utils'."""
  return [module for module in MODULES if module == path or module.endswith(f'.{path}')]
