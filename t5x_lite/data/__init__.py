"""Data: what to read (`DatasetConfig`), sources, batches, and the position that a checkpoint carries.

Sources are classes in a registry (`sources`): seqio's Tasks and Mixtures; tasks of ours that need no TensorFlow, read
as they come or, by grain, ahead; random data; and those of users. Importing this package imports neither TensorFlow
nor seqio nor grain.
"""

from t5x_lite.data.builtin_tasks import (
    BuiltinMixture,
    BuiltinTask,
    ExampleTable,
    StaticExamples,
    builtin_names,
    get_builtin,
    register_builtin_mixture,
    register_builtin_task,
    text_task,
)
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.features import FeatureConverter, get_converter
from t5x_lite.data.file_tasks import RecordContext, SpanCorruption, file_task
from t5x_lite.data.global_batches import GlobalBatches, to_global_arrays
from t5x_lite.data.interfaces import (
    EvalBatches,
    EvalTask,
    Example,
    ExampleSource,
    HostIterator,
    IndexedBatches,
    OutputMetric,
    take_rows,
)
from t5x_lite.data.iterators import (
    get_vocabulary,
    open_eval_iterators,
    open_eval_tasks,
    open_example_sources,
    open_train_iterator,
    read_task_texts,
    verify_matching_vocabs,
)
from t5x_lite.data.positions import shard_rows
from t5x_lite.data.records import read_tsv
from t5x_lite.data.sources.base import DataSource, get_source, register_source
from t5x_lite.data.sources.seqio import SeqioSource
from t5x_lite.data.sources.table import BuiltinSource, GrainSource, RandomTableSource, TableSource
from t5x_lite.data.synthetic import SyntheticFeature, SyntheticSource
from t5x_lite.data.text_metrics import exact_match
from t5x_lite.data.text_sources import TextFileConfig
from t5x_lite.data.truncation import Truncation
from t5x_lite.data.vocabularies import (
    ByteVocabulary,
    PassThroughVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    same_vocabulary,
)

__all__ = [
    'BuiltinMixture',
    'BuiltinSource',
    'BuiltinTask',
    'ByteVocabulary',
    'DataSource',
    'DatasetConfig',
    'EvalBatches',
    'EvalTask',
    'Example',
    'ExampleSource',
    'ExampleTable',
    'FeatureConverter',
    'GlobalBatches',
    'GrainSource',
    'HostIterator',
    'IndexedBatches',
    'OutputMetric',
    'PassThroughVocabulary',
    'RandomTableSource',
    'RecordContext',
    'SentencePieceVocabulary',
    'SeqioSource',
    'SpanCorruption',
    'StaticExamples',
    'SyntheticFeature',
    'SyntheticSource',
    'TableSource',
    'TextFileConfig',
    'Truncation',
    'Vocabulary',
    'builtin_names',
    'exact_match',
    'file_task',
    'get_builtin',
    'get_converter',
    'get_source',
    'get_vocabulary',
    'open_eval_iterators',
    'open_eval_tasks',
    'open_example_sources',
    'open_train_iterator',
    'read_task_texts',
    'read_tsv',
    'register_builtin_mixture',
    'register_builtin_task',
    'register_source',
    'same_vocabulary',
    'shard_rows',
    'take_rows',
    'text_task',
    'to_global_arrays',
    'verify_matching_vocabs',
]
