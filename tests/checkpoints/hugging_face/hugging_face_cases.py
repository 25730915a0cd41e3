"""Architectures and Hugging Face folders for the tests, made with NumPy alone."""

import dataclasses
import json
import random

import ml_dtypes
import numpy as np

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import tensor_table

SMALL = Architecture(
  vocab_size=13,
  emb_dim=6,
  num_heads=3,
  head_dim=2,
  mlp_dim=10,
  num_encoder_layers=3,
  num_decoder_layers=2,
  mlp_activations=('gelu', 'linear'),
  logits_via_embedding=False,
)
TIED = dataclasses.replace(SMALL, mlp_activations=('relu',), logits_via_embedding=True)
UNSCALED = dataclasses.replace(SMALL, logits_via_embedding=True, scale_tied_logits=False)
UMT5 = dataclasses.replace(SMALL, relpos_per_layer=True)
SWITCH = dataclasses.replace(
  TIED,
  num_encoder_layers=4,
  num_decoder_layers=3,
  num_experts=3,
  sparse_encoder_layers=(1, 3),
  sparse_decoder_layers=(1,),
)
BYT5 = dataclasses.replace(SMALL, vocab_size=384)
BY_FAMILY = {
  't5_1_0': TIED,
  't5_1_1': SMALL,
  'mt5': SMALL,
  'umt5': UMT5,
  'byt5': BYT5,
  'switch': SWITCH,
}
_CODES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'float64': 'F64', 'int8': 'I8'}


def random_architecture(seed: int) -> Architecture:
  """Returns an architecture of any family, with odd sizes."""
  rng = random.Random(seed)
  kind = rng.choice(['dense', 'dense', 'per_layer', 'sparse'])
  depths = {'encoder': rng.randint(1, 6), 'decoder': rng.randint(1, 6)}
  fields = {}
  if kind == 'sparse':
    fields = dict(num_experts=rng.randint(1, 5), router_bias=rng.random() < 0.5)
    for stack, depth in depths.items():
      step = rng.randint(0, depth)
      fields[f'sparse_{stack}_layers'] = tuple(
        i for i in range(depth) if step and (i % step == 1 or step == 1)
      )
  gated = kind != 'sparse' and rng.random() < 0.6
  first = rng.choice(['relu', 'gelu', 'gelu_exact', 'silu'])
  architecture = Architecture(
    vocab_size=rng.randint(2, 40),
    emb_dim=rng.randint(1, 9),
    num_heads=rng.randint(1, 4),
    head_dim=rng.randint(1, 4),
    mlp_dim=rng.randint(1, 12),
    num_encoder_layers=depths['encoder'],
    num_decoder_layers=depths['decoder'],
    mlp_activations=(first, 'linear') if gated else (first,),
    logits_via_embedding=rng.random() < 0.5,
    relpos_per_layer=kind == 'per_layer',
    relpos_num_buckets=rng.choice([4, 8, 32]),
    relpos_max_distance=rng.choice([64, 128]),
    layer_norm_epsilon=rng.choice([1e-6, 1e-5]),
    **fields,
  )
  unscaled = architecture.logits_via_embedding and rng.random() < 0.3
  return dataclasses.replace(architecture, scale_tied_logits=not unscaled)


def values(architecture: Architecture, dtype='float32', seed=0) -> dict[str, np.ndarray]:
  """Returns our arrays of `architecture` with random numbers."""
  rng = np.random.default_rng(seed)
  dtype = ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype
  return {
    rule.ours: rng.standard_normal(rule.shape).astype(dtype) for rule in tensor_table(architecture)
  }


def tensors(architecture: Architecture, ours: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns their tensors of our arrays."""
  return {
    name: tensor
    for rule in tensor_table(architecture)
    for name, tensor in rule.to_theirs(ours[rule.ours])
  }


def write_safetensors(path, named: dict[str, np.ndarray], **metadata: str) -> None:
  """Writes a safetensors file: an independent reading of the format."""
  header, position, parts = {}, 0, []
  if metadata:
    header['__metadata__'] = metadata
  for name, tensor in named.items():
    raw = tensor.tobytes()
    header[name] = {
      'dtype': _CODES[tensor.dtype.name],
      'shape': list(tensor.shape),
      'data_offsets': [position, position + len(raw)],
    }
    position += len(raw)
    parts.append(raw)
  encoded = json.dumps(header).encode()
  path.write_bytes(len(encoded).to_bytes(8, 'little') + encoded + b''.join(parts))


def make_folder(folder, named: dict[str, np.ndarray], config: dict) -> None:
  """Makes a folder of tensors and a config.json."""
  folder.mkdir()
  write_safetensors(folder / 'model.safetensors', named, format='pt')
  (folder / 'config.json').write_text(json.dumps(config))


def config_of(architecture: Architecture, family: str, **changes) -> dict:
  """Returns a config.json; a change to None takes the key away."""
  config = architecture.to_config_json(FAMILIES[family]) | changes
  return {key: value for key, value in config.items() if value is not None}
