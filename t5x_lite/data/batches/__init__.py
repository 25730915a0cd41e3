"""From examples to batches: order, truncation, packing, features of the model, shards, global arrays, positions."""
