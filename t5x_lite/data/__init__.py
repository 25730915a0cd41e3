"""Data sources, their options (`DatasetConfig`), batches, and the position in the data that a checkpoint stores.

Sources are classes in a registry (`sources`): seqio's Tasks and Mixtures; built-in tasks without TensorFlow, read
directly or prefetched by grain; random data; and custom sources. Importing this package imports neither TensorFlow nor
seqio nor grain.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.data.builtin_tasks': (
      'BuiltinMixture',
      'BuiltinTask',
      'ExampleTable',
      'StaticExamples',
      'builtin_names',
      'get_builtin',
      'record_keys',
      'register_builtin_mixture',
      'register_builtin_task',
      'text_task',
    ),
    't5x_lite.data.config': ('DatasetConfig',),
    't5x_lite.data.datasets': (
      'GetDatasetCallable',
      'GetEvalDatasetCallable',
      'get_dataset',
      'get_dataset_inner',
      'get_training_eval_datasets',
      'open_eval_data',
      'open_train_data',
    ),
    't5x_lite.data.batches.feature_lengths': ('lengths_for_training', 'with_feature_lengths'),
    't5x_lite.data.batches.features': ('FeatureConverter', 'get_converter'),
    't5x_lite.data.files': ('grain_records',),
    't5x_lite.data.own_files': ('FileTask',),
    't5x_lite.data.file_tasks': ('RecordContext', 'SpanCorruption', 'file_task'),
    't5x_lite.data.batches': ('positions',),
    't5x_lite.data.batches.global_batches': ('GlobalBatches', 'to_global_arrays'),
    't5x_lite.data.interfaces': (
      'EvalBatches',
      'EvalTask',
      'Example',
      'ExampleSource',
      'HostIterator',
      'IndexedBatches',
      'OutputMetric',
      'ScoreWithSignature',
      'SplitLengths',
      'take_rows',
    ),
    't5x_lite.data.iterators': (
      'get_vocabulary',
      'open_eval_iterators',
      'open_eval_tasks',
      'open_example_sources',
      'open_train_iterator',
      'read_task_texts',
      'verify_matching_vocabs',
      'with_earlier_sentinels',
    ),
    't5x_lite.data.batches.positions': ('shard_rows',),
    't5x_lite.data.files.records': ('read_tsv',),
    't5x_lite.data.batches.sharded_iterator': (
      'ShardedDatasetIterator',
      'get_zeros_batch_like_dataset',
      'get_zeros_batch_like_spec',
      'prepare_train_iter',
    ),
    't5x_lite.data.sources.base': ('DataSource', 'get_source', 'register_source'),
    't5x_lite.data.sources.seqio': ('SeqioSource',),
    't5x_lite.data.sources.table': (
      'BuiltinSource',
      'GrainSource',
      'RandomTableSource',
      'TableSource',
    ),
    't5x_lite.data.sources.synthetic': ('SyntheticFeature', 'SyntheticSource'),
    't5x_lite.data.text.sources': ('TextFileConfig',),
    't5x_lite.data.text_metrics': ('edit_similarity', 'exact_match', 'metric_names', 'metrics'),
    't5x_lite.data.batches.truncation': ('Truncation',),
    't5x_lite.data.vocabularies': (
      'ByteVocabulary',
      'PassThroughVocabulary',
      'SentencePieceVocabulary',
      'Vocabulary',
      'round_vocab_size_to_multiple',
      'same_vocabulary',
    ),
  },
)
