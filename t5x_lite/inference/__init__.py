"""Inference over a source: every example once, in order, in pieces that survive whatever ends the process."""

from t5x_lite.apps.infer.disk import Disk
from t5x_lite.apps.infer.jsonl import Inferences, JsonEncoder, write_inferences_to_file
from t5x_lite.apps.infer.loop import MODES, BatchInference, ChunkWriter, Shard, check_mode, infer_source
from t5x_lite.apps.infer.merge import merge_shards, merged_totals
from t5x_lite.apps.infer.place import Place
from t5x_lite.apps.infer.store import Chunk, ShardStore, num_shard_examples

__all__ = [
    'MODES', 'BatchInference', 'Chunk', 'ChunkWriter', 'Disk', 'Inferences', 'JsonEncoder', 'Place', 'Shard',
    'ShardStore', 'check_mode', 'infer_source', 'merge_shards', 'merged_totals', 'num_shard_examples',
    'write_inferences_to_file',
]
