"""Random tensors of several dtypes, written as safetensors and compared bitwise."""

import ml_dtypes
import numpy as np

from t5x_lite.checkpoints.hugging_face.tensor_files import SafetensorsWriter

DTYPES = ('float32', 'float16', 'float64', ml_dtypes.bfloat16)


def tensors(seed=0, dtypes=DTYPES, number=9):
  """Return name -> array of 1 to 3 dimensions of 1 to 5 elements; the dtypes alternate."""
  rng = np.random.default_rng(seed)
  return {
    f'layer.{i}.weight': rng.standard_normal(rng.integers(1, 6, rng.integers(1, 4))).astype(
      dtypes[i % len(dtypes)]
    )
    for i in range(number)
  }


def assert_same(one, other):
  assert one.dtype == other.dtype and one.shape == other.shape
  np.testing.assert_array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def write(folder, tensors, max_shard_bytes=10**9):
  with SafetensorsWriter(folder, list(tensors), max_shard_bytes) as writer:
    for name, tensor in tensors.items():
      writer.write(name, tensor)
