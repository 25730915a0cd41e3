"""Names of batch inference as earlier versions had them; see `t5x_lite.apps.infer`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.infer.config': ('MODES', 'Shard'),
    't5x_lite.apps.infer.jsonl': ('Inferences', 'JsonEncoder', 'write_inferences_to_file'),
    't5x_lite.apps.infer.loop': ('ChunkWriter',),
    't5x_lite.apps.infer.merge': ('merge_shards', 'merged_totals'),
    't5x_lite.apps.infer.paths': ('Place', 'ResultPaths'),
    't5x_lite.apps.infer.store': ('Chunk', 'ShardStore', 'num_shard_examples'),
  },
)
