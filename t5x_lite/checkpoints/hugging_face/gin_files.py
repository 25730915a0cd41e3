"""Model files and gin bindings for the network of an architecture."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import Family

# Sizes of the released models, as in gin/models: emb_dim, num_heads, head_dim, mlp_dim, layers of encoder and decoder.
_T5_1_1 = {
  'small': (512, 6, 64, 1024, 8, 8),
  'base': (768, 12, 64, 2048, 12, 12),
  'large': (1024, 16, 64, 2816, 24, 24),
  'xl': (2048, 32, 64, 5120, 24, 24),
  'xxl': (4096, 64, 64, 10240, 24, 24),
}
SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
  't5_1_0': {
    'small': (512, 8, 64, 2048, 6, 6),
    'base': (768, 12, 64, 3072, 12, 12),
    'large': (1024, 16, 64, 4096, 24, 24),
    'xl': (1024, 32, 128, 16384, 24, 24),
    'xxl': (1024, 128, 128, 65536, 24, 24),
  },
  't5_1_1': _T5_1_1,
  'mt5': _T5_1_1,
  'umt5': {size: _T5_1_1[size] for size in ('small', 'base', 'xl', 'xxl')},
  'byt5': {
    'small': (1472, 6, 64, 3584, 12, 4),
    'base': (1536, 12, 64, 3968, 18, 6),
    'large': (1536, 16, 64, 3840, 36, 12),
    'xl': (2560, 32, 64, 6720, 36, 12),
    'xxl': (4672, 64, 64, 12352, 36, 12),
  },
  'switch': {'base': (768, 12, 64, 3072, 12, 12), 'large': (1024, 16, 64, 4096, 24, 24)},
}
VOCAB_SIZES: Mapping[str, int] = {
  't5_1_0': 32128,
  't5_1_1': 32128,
  'mt5': 250112,
  'umt5': 256384,
  'byt5': 384,
  'switch': 32128,
}
_CODET5 = {'vocab_size': 32100, 'eos_token_id': 2, 'vocabulary_macro': 'VOCABULARY_FOLDER'}
_MADLAD = {'vocab_size': 256000, 'eos_token_id': 2, 'vocabulary_macro': 'VOCABULARY_FOLDER'}
# Published models that have the form of a family and sizes or options of their own, by the name of their file.
# The networks of CodeT5 are T5's, so that its vocabulary, whose texts end with another id, tells them apart.
FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
  't5_1_0': {
    'codet5_small': {**_CODET5, 'sizes': (512, 8, 64, 2048, 6, 6)},
    'codet5_base': {**_CODET5, 'sizes': (768, 12, 64, 3072, 12, 12)},
    'codet5_large': {**_CODET5, 'sizes': (1024, 16, 64, 4096, 24, 24)},
    'flan_ul2': {
      'sizes': (4096, 16, 256, 16384, 32, 32),
      'mlp_activations': ('silu', 'linear'),
    },
  },
  't5_1_1': {
    'madlad400_3b': {**_MADLAD, 'sizes': (1024, 16, 128, 8192, 32, 32)},
    'madlad400_7b': {**_MADLAD, 'sizes': (2048, 16, 128, 8192, 48, 48)},
    'madlad400_10b': {**_MADLAD, 'sizes': (2048, 32, 128, 16384, 32, 32)},
  },
}
_SIZE_FIELDS = (
  'emb_dim',
  'num_heads',
  'head_dim',
  'mlp_dim',
  'num_encoder_layers',
  'num_decoder_layers',
)
_SWITCH_EXPERTS = 128
# Experts need a partitioner with an axis for them, also on a single device.
_EXPERTS_FILE = 'partitioning/moe_expert_partitions.gin'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GinSuggestion:
  """Gin files and bindings for the network of an architecture.

  Attributes:
    file: a model file.
    bindings: differences from the file, as `name=value`.
    problem: property that no binding can express, as a sentence; None if bindings express all of them.
    files_after_run: gin files that the network needs after the file of the run.
    vocabulary_macro: macro of the file for the path of the vocabulary, a sentencepiece model or a Hugging Face folder.
  """

  file: str
  bindings: tuple[str, ...] = ()
  problem: str | None = None
  files_after_run: tuple[str, ...] = ()
  vocabulary_macro: str = 'VOCABULARY_FILE'

  @property
  def flags(self) -> tuple[str, ...]:
    """File and bindings as flags of a command."""
    return (f'--gin_file={self.file}', *(f'--gin.{binding}' for binding in self.bindings))

  @property
  def flags_after_run(self) -> tuple[str, ...]:
    """`files_after_run` as flags of a command."""
    return tuple(f'--gin_file={file}' for file in self.files_after_run)


def suggest_gin(architecture: Architecture, family: Family) -> GinSuggestion:
  """Return the file of the released model with the nearest sizes, and the bindings for the differences.

  Args:
    architecture: architecture of the network.
    family: family of the files and of the vocabulary.
  """
  files = _released(family, architecture.eos_token_ids)
  differing = {
    name: {
      field: value
      for field, value in architecture.network_config_kwargs().items()
      if field in released and value != released[field]
    }
    for name, released in files.items()
  }
  # The file with the fewest differences; the first of several.
  file = min(differing, key=lambda name: len(differing[name]))
  bindings = []
  for name, value in differing[file].items():
    of_layers = family.is_sparse and name in ('num_encoder_layers', 'num_decoder_layers')
    bindings.append(
      f'{name.upper()}={value}' if of_layers else f'network.T5Config.{name}={value!r}'
    )
  # An end token alone is that of the vocabulary.
  if len(architecture.eos_token_ids) > 1:
    bindings.append(f'models.EncoderDecoderModel.stop_token_ids={architecture.eos_token_ids}')
  if architecture.decoder_start_token_id != 0:
    start = architecture.decoder_start_token_id
    bindings.append(f'models.EncoderDecoderModel.decoder_start_id={start}')
  problem = None
  if family.is_sparse:
    more, problem = _sparse(architecture, SIZES[family.name][file.removeprefix('switch_')])
    bindings += more
  return GinSuggestion(
    file=f'models/{file}.gin',
    bindings=tuple(bindings),
    problem=problem,
    files_after_run=(_EXPERTS_FILE,) if architecture.num_experts else (),
    vocabulary_macro=files[file].get('vocabulary_macro', 'VOCABULARY_FILE'),
  )


def _released(family: Family, eos_token_ids: tuple[int, ...]) -> dict[str, dict[str, Any]]:
  """Return the arguments of `T5Config` in a family's model files, by file: those with one of the end tokens, if any."""
  tied = family.name in ('t5_1_0', 'switch')
  common = {
    'vocab_size': VOCAB_SIZES[family.name],
    'logits_via_embedding': tied,
    'scale_tied_logits': True,
    'layer_norm_epsilon': 1e-6,
    'mlp_activations': ('relu',) if tied else ('gelu', 'linear'),
    'num_relpos_buckets': 32,
    'max_relpos_distance': 128,
  }
  sizes: dict[str, Mapping[str, Any]] = {
    f'{family.name}_{size}': {'sizes': sizes} for size, sizes in SIZES[family.name].items()
  }
  files = {**sizes, **FORMS.get(family.name, {})}
  files = {name: own for name, own in files.items() if own.get('eos_token_id', 1) in eos_token_ids}
  return {
    name: {**common, **own, **dict(zip(_SIZE_FIELDS, own['sizes'], strict=True))}
    for name, own in (files or sizes).items()
  }


def _sparse(architecture: Architecture, size: tuple[int, ...]) -> tuple[list[str], str | None]:
  """Return (bindings, problem) of the sparse layers."""
  if architecture.num_experts != _SWITCH_EXPERTS:
    bindings = [f'NUM_EXPERTS={architecture.num_experts}']
  else:
    bindings = []
  if architecture.router_bias:
    bindings.append('moe.TokensChooseRouter.use_bias=True')
  if architecture.router_jitter_noise != 0.01:
    bindings.append(f'JITTER_NOISE={architecture.router_jitter_noise!r}')
  for stack, released in (('encoder', size[4]), ('decoder', size[5])):
    layers = architecture.sparse_layers_of(stack)
    depth = architecture.num_layers_of(stack)
    if layers != _mixed(depth, len(layers)):
      return bindings, (
        f'layers {list(layers)} of {depth} in the {stack} are sparse, for which moe.SparseFeedForward '
        'has no layout: write a custom feed_forward_fn for the network'
      )
    if len(layers) != released // 2:
      bindings.append(f'NUM_{stack.upper()}_SPARSE_LAYERS={len(layers)}')
  return bindings, None


def _mixed(depth: int, number: int) -> tuple[int, ...] | None:
  """Return the sparse layers of the layout 'mixed', the last of each block of equal size; None if impossible."""
  if number == 0 or depth % number:
    if number:
      return None
    return ()
  return tuple(range(depth // number - 1, depth, depth // number))
