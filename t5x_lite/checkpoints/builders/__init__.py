"""Builders of the first state of a run, chained by `RestoreCheckpointConfig.builders`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.checkpoints.builders.adapters': ('Adapter', 'NewAdapter', 'initial_adapter'),
    't5x_lite.checkpoints.builders.base': (
      'ARRAYS',
      'BuiltState',
      'SHAPES',
      'StateBuilder',
      'TargetState',
    ),
    't5x_lite.checkpoints.builders.chain': (
      'Chain',
      'chain_of',
      'describe',
      'first_step',
      'identity',
    ),
    't5x_lite.checkpoints.builders.changing': (
      'ConvertLayout',
      'NewVocabulary',
      'OnArrays',
      'ParamAverage',
      'Reinitialize',
      'StartAtStep',
      'Transform',
    ),
    't5x_lite.checkpoints.builders.reading': ('Average', 'Restore', 'Subtree'),
  },
)
