"""Mapping between our arrays and the tensors of a Hugging Face folder.

Kernels and tables of relative position biases are transposed; norms and embeddings are not. The experts of a layer are
separate tensors in the folder and one array here. The conversion is exact in both directions, for any dtype.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from t5x_lite.adapters import merging
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.errors import CheckpointError
from t5x_lite.formatting import printable

COPY = 'copy'
TRANSPOSE = 'transpose'
STACK = 'stack'
TOKEN_EMBEDDING = 'token_embedder/embedding'
LOGITS_KERNEL = 'decoder/logits_dense/kernel'
SHARED = 'shared.weight'
LM_HEAD = 'lm_head.weight'
# Further names of the token embedding in folders.
EMBEDDING_DUPLICATES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# Old versions of transformers write it and never read it: attention to the encoder has no position biases.
IGNORED = ('decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',)


@dataclasses.dataclass(frozen=True)
class TensorRule:
  """One of our arrays and the tensors that hold it.

  Attributes:
    ours: name of our array in the layout 't5', without `target/`.
    theirs: names of the tensors: one per expert for `STACK`; for `COPY`, all names of the same tensor.
    shape: shape of our array.
    transform: `COPY`, `TRANSPOSE`, or `STACK` of transposed tensors.
  """

  ours: str
  theirs: tuple[str, ...]
  shape: tuple[int, ...]
  transform: str

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of each of their tensors."""
    one = self.shape[1:] if self.transform == STACK else self.shape
    if self.transform == COPY:
      return one
    return one[::-1]

  @property
  def modules(self) -> tuple[str, ...]:
    """Modules of transformers whose weights the tensors are."""
    return tuple(name.removesuffix('.weight') for name in self.theirs)

  def to_ours(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return our array.

    Args:
      read: function from the name of a tensor to the tensor, of shape `their_shape`; called once per tensor.

    Returns:
      Contiguous array of shape `shape`, in the dtype of the first tensor.
    """
    first = read(self.theirs[0])
    if self.transform == COPY:
      return first
    if self.transform == TRANSPOSE:
      return np.ascontiguousarray(first.T)
    result = np.empty(self.shape, first.dtype)
    result[0] = first.T
    for i, name in enumerate(self.theirs[1:], start=1):
      result[i] = read(name).T
    return result

  def to_theirs(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, contiguous tensor of shape `their_shape`) for our `array` of shape `shape`."""
    if self.transform == STACK:
      for name, one in zip(self.theirs, array, strict=True):
        yield name, np.ascontiguousarray(one.T)
    else:
      tensor = np.ascontiguousarray(array.T if self.transform == TRANSPOSE else array)
      for name in self.theirs:
        yield name, tensor


def tensor_table(architecture: Architecture) -> list[TensorRule]:
  """Return the rules for all arrays of `architecture`; each array and each tensor occurs exactly once."""
  arch = architecture
  # In transformers an untied Switch Transformer has a table per stack: write equal ones.
  if arch.num_experts and not arch.logits_via_embedding:
    copies = EMBEDDING_DUPLICATES
  else:
    copies = ()
  rules = [TensorRule(TOKEN_EMBEDDING, (SHARED, *copies), (arch.vocab_size, arch.emb_dim), COPY)]
  for stack in ('encoder', 'decoder'):
    rules += _stack_rules(arch, stack)
  if not arch.logits_via_embedding:
    rules.append(TensorRule(LOGITS_KERNEL, (LM_HEAD,), (arch.emb_dim, arch.vocab_size), TRANSPOSE))
  return rules


def _stack_rules(arch: Architecture, stack: str) -> Iterator[TensorRule]:
  relpos = (arch.num_heads, arch.relpos_num_buckets)
  for i in range(arch.num_layers_of(stack)):
    theirs = f'{stack}.block.{i}.layer'
    if arch.relpos_per_layer or i == 0:
      if arch.relpos_per_layer:
        ours = f'{stack}/layers_{i}'
      else:
        ours = stack
      yield TensorRule(
        f'{ours}/relpos_bias/rel_embedding',
        (f'{theirs}.0.SelfAttention.relative_attention_bias.weight',),
        relpos,
        TRANSPOSE,
      )
    yield from _layer_rules(arch, stack, i, theirs)
  yield _norm(arch, f'{stack}/{stack}_norm', f'{stack}.final_layer_norm')


def _layer_rules(arch: Architecture, stack: str, layer: int, theirs: str) -> Iterator[TensorRule]:
  ours = f'{stack}/layers_{layer}'
  if stack == 'encoder':
    attentions = (('attention', 'attention', 'SelfAttention'),)
  else:
    attentions = (
      ('self_attention', 'self_attention', 'SelfAttention'),
      ('encoder_decoder_attention', 'cross_attention', 'EncDecAttention'),
    )
  joined = arch.num_heads * arch.head_dim
  for k, (block, norm, their_block) in enumerate(attentions):
    yield _norm(arch, f'{ours}/pre_{norm}_layer_norm', f'{theirs}.{k}.layer_norm')
    for name, letter in (('query', 'q'), ('key', 'k'), ('value', 'v'), ('out', 'o')):
      if name == 'out':
        shape = (joined, arch.emb_dim)
      else:
        shape = (arch.emb_dim, joined)
      yield TensorRule(
        f'{ours}/{block}/{name}/kernel',
        (f'{theirs}.{k}.{their_block}.{letter}.weight',),
        shape,
        TRANSPOSE,
      )
  k = len(attentions)
  yield _norm(arch, f'{ours}/pre_mlp_layer_norm', f'{theirs}.{k}.layer_norm')
  if layer in arch.sparse_layers_of(stack):
    yield from _sparse_rules(arch, f'{ours}/mlp', f'{theirs}.{k}.mlp')
  else:
    yield from _mlp_rules(
      arch, f'{ours}/mlp', f'{theirs}.{k}.{"mlp" if arch.num_experts else "DenseReluDense"}'
    )


def _norm(arch: Architecture, ours: str, theirs: str) -> TensorRule:
  return TensorRule(f'{ours}/scale', (f'{theirs}.weight',), (arch.emb_dim,), COPY)


def _projections(arch: Architecture) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yield (name, shape of our kernel) of the projections of a feed-forward block."""
  gated = len(arch.mlp_activations) > 1
  for name in ('wi_0', 'wi_1') if gated else ('wi',):
    yield name, (arch.emb_dim, arch.mlp_dim)
  yield 'wo', (arch.mlp_dim, arch.emb_dim)


def _mlp_rules(arch: Architecture, ours: str, theirs: str) -> Iterator[TensorRule]:
  for name, shape in _projections(arch):
    yield TensorRule(f'{ours}/{name}/kernel', (f'{theirs}.{name}.weight',), shape, TRANSPOSE)


def _sparse_rules(arch: Architecture, ours: str, theirs: str) -> Iterator[TensorRule]:
  router = f'{ours}/router/router_weights/w'
  yield TensorRule(
    f'{router}/kernel',
    (f'{theirs}.router.classifier.weight',),
    (arch.emb_dim, arch.num_experts),
    TRANSPOSE,
  )
  if arch.router_bias:
    yield TensorRule(
      f'{router}/bias', (f'{theirs}.router.classifier.bias',), (arch.num_experts,), COPY
    )
  for name, shape in _projections(arch):
    each = tuple(f'{theirs}.experts.expert_{e}.{name}.weight' for e in range(arch.num_experts))
    yield TensorRule(f'{ours}/expert/{name}/kernel', each, (arch.num_experts, *shape), STACK)


def adapter_rules(kernel: TensorRule, rank: int) -> list[TensorRule]:
  """Return the rules of A and B of a kernel's adapter: PEFT has A [rank, input] and B [output, rank] for a module.

  Args:
    kernel: rule of the kernel.
    rank: rank of the adapter.
  """
  *experts, size_in, size_out = kernel.shape
  shapes = {'A': (*experts, size_in, rank), 'B': (*experts, rank, size_out)}
  rules = []
  for ours, (letter, shape) in zip(merging.leaves_of(kernel.ours), shapes.items(), strict=True):
    theirs = tuple(f'base_model.model.{module}.lora_{letter}.weight' for module in kernel.modules)
    rules.append(TensorRule(ours, theirs, shape, kernel.transform))
  return rules


def check_ours(rules: Sequence[TensorRule], shapes: Mapping[str, Any], what: str) -> None:
  """Raise if the arrays of a t5x_lite checkpoint differ from those of `rules`.

  Args:
    rules: rules of an architecture.
    shapes: name in the layout 't5', without `target/`, to an object with a `shape`.
    what: the checkpoint, for the error message.

  Raises:
    CheckpointError: arrays are missing, surplus or of a wrong shape; the message has the names and shapes of both
      sides.
  """
  known = {rule.ours: rule for rule in rules}
  problems = [f'missing {describe(rule)}' for name, rule in known.items() if name not in shapes]
  problems += [
    f'surplus {name} {tuple(value.shape)}: transformers has no such tensor'
    for name, value in shapes.items()
    if name not in known
  ]
  problems += [
    f'{describe(rule)} must have this shape, got {tuple(shapes[name].shape)}'
    for name, rule in known.items()
    if name in shapes and tuple(shapes[name].shape) != rule.shape
  ]
  raise_problems(problems, what)


def describe(rule: TensorRule) -> str:
  """Return the names and shapes of both sides of `rule`, for error messages."""
  first, *others = rule.theirs
  more = ''
  if others:
    more = f' and {len(others)} more'
  return f'{rule.ours} {rule.shape} <-> {first} {rule.their_shape}{more}'


def raise_problems(problems: Sequence[str], what: str) -> None:
  """Raise CheckpointError with the first ten of `problems`, if there are any."""
  if problems:
    shown = '\n  '.join(map(printable, problems[:10]))
    if len(problems) > 10:
      more = f'\n  and {len(problems) - 10} more'
    else:
      more = ''
    raise CheckpointError(
      f'{what} does not have the arrays that its network requires (t5x_lite <-> transformers):\n  '
      f'{shown}{more}\nCheck that all files are present and that config.json or the manifest is of '
      'this model.'
    )
