"""Families of published models, their classes in transformers and their properties."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Protocol

from t5x_lite import checks
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.errors import CheckpointError


class ArchitectureLike(Protocol):
  """Properties of an `architecture.Architecture` by which families differ; see there."""

  @property
  def vocab_size(self) -> int:
    """See `architecture.Architecture`."""
    ...

  @property
  def logits_via_embedding(self) -> bool:
    """See `architecture.Architecture`."""
    ...

  @property
  def scale_tied_logits(self) -> bool:
    """See `architecture.Architecture`."""
    ...

  @property
  def relpos_per_layer(self) -> bool:
    """See `architecture.Architecture`."""
    ...

  @property
  def num_experts(self) -> int:
    """See `architecture.Architecture`."""
    ...

  def num_layers_of(self, stack: str) -> int:
    """Return the number of layers of `stack`."""
    ...

  def sparse_layers_of(self, stack: str) -> tuple[int, ...]:
    """Return the indices of the sparse layers of `stack`."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family of published models.

  Attributes:
    name: name of the family in t5x_lite.
    title: name of the family in texts.
    model_type: `model_type` in `config.json`.
    architecture: class of transformers.
    tokenizer_class: class of transformers.
    extra_ids: number of sentinels that transformers' tokenizer adds after the pieces of the vocabulary file.
    relpos_per_layer: True if every layer has a table of relative position biases.
    can_tie: True if the class in transformers scales tied logits.
    paper: URL of the paper.
  """

  name: str
  title: str
  model_type: str
  architecture: str
  tokenizer_class: str
  extra_ids: int
  paper: str
  relpos_per_layer: bool = False
  can_tie: bool = True

  @property
  def is_sparse(self) -> bool:
    """True if its models have experts."""
    return self.model_type == 'switch_transformers'

  def needs_untied_flag(self, architecture: ArchitectureLike) -> bool:
    """Return True if logits are correct only with `model.config.tie_word_embeddings = False` after loading.

    UMT5Config ignores `tie_word_embeddings` of `config.json`. umT5 and Switch scale their logits if they are tied.
    """
    if self.model_type == 'umt5':
      return not (architecture.logits_via_embedding and architecture.scale_tied_logits)
    return self.is_sparse and not architecture.scale_tied_logits

  def check(self, architecture: ArchitectureLike) -> None:
    """Raise if this family's class in transformers cannot express the architecture.

    Raises:
      CheckpointError: the message names the families that can express it.
    """
    problem = self._problem(architecture)
    if problem is None:
      return
    others = [family.name for family in FAMILIES.values() if family._problem(architecture) is None]
    if others:
      remedy = f'Choose family={" or ".join(map(repr, others))}.'
    else:
      remedy = 'No family supports this network.'
    raise CheckpointError(
      f'A network of family {self.name!r} ({self.architecture} of transformers) {problem}. {remedy}'
    )

  def _problem(self, architecture: ArchitectureLike) -> str | None:
    if bool(architecture.num_experts) != self.is_sparse:
      return (
        f'must have {"some" if self.is_sparse else "no"} experts, got {architecture.num_experts}'
      )
    if architecture.relpos_per_layer != self.relpos_per_layer:
      have, want = ('layer', 'stack') if architecture.relpos_per_layer else ('stack', 'layer')
      return f'must have relative position biases per {want}, got them per {have}'
    if architecture.logits_via_embedding and architecture.scale_tied_logits and not self.can_tie:
      return (
        'must have a logits_dense kernel, or scale_tied_logits=False, got logits_via_embedding=True, whose '
        'logits transformers would not scale'
      )
    for stack in ('encoder', 'decoder'):
      layers = architecture.sparse_layers_of(stack)
      if (
        self.is_sparse
        and config_json.sparse_step(architecture.num_layers_of(stack), layers) is None
      ):
        return (
          f'must have none or all sparse {stack} layers, or 1, 1 + n, 1 + 2 n and so on, got layers {layers} of '
          f'{architecture.num_layers_of(stack)}'
        )
    return None


_T5: dict[str, Any] = dict(
  model_type='t5',
  architecture='T5ForConditionalGeneration',
  tokenizer_class='T5Tokenizer',
  extra_ids=100,
)

FAMILIES: Mapping[str, Family] = {
  family.name: family
  for family in (
    Family(name='t5_1_0', title='T5', paper='https://arxiv.org/abs/1910.10683', **_T5),
    Family(name='t5_1_1', title='T5 1.1', paper='https://arxiv.org/abs/1910.10683', **_T5),
    Family(
      name='mt5',
      title='mT5',
      model_type='mt5',
      architecture='MT5ForConditionalGeneration',
      can_tie=False,
      # The vocabulary file includes the sentinels.
      tokenizer_class='T5Tokenizer',
      extra_ids=0,
      paper='https://arxiv.org/abs/2010.11934',
    ),
    Family(
      name='umt5',
      title='umT5',
      model_type='umt5',
      architecture='UMT5ForConditionalGeneration',
      tokenizer_class='T5Tokenizer',
      extra_ids=300,
      relpos_per_layer=True,
      paper='https://arxiv.org/abs/2304.09151',
    ),
    Family(
      name='byt5',
      title='ByT5',
      model_type='t5',
      architecture='T5ForConditionalGeneration',
      tokenizer_class='ByT5Tokenizer',
      extra_ids=125,
      paper='https://arxiv.org/abs/2105.13626',
    ),
    Family(
      name='switch',
      title='Switch Transformer',
      model_type='switch_transformers',
      architecture='SwitchTransformersForConditionalGeneration',
      tokenizer_class='T5Tokenizer',
      extra_ids=100,
      paper='https://arxiv.org/abs/2101.03961',
    ),
  )
}
# Three special ids, 256 bytes, 125 sentinels.
BYT5_VOCAB_SIZE = 384


def get_family(name: str) -> Family:
  """Return the family with the given name.

  Raises:
    CheckpointError: the name is unknown.
  """
  checks.check('', {'family': name}, CheckpointError, family=checks.one_of(FAMILIES))
  return FAMILIES[name]


def family_of(config: Mapping[str, Any]) -> Family:
  """Return the family of a `config.json`. LM-adapted models and Flan-T5 belong to T5 1.1.

  Raises:
    CheckpointError: the type of model is not supported.
  """
  kind = config_json.model_type(config)
  if kind != 't5':
    return FAMILIES[{'switch_transformers': 'switch'}.get(kind, kind)]
  if (
    str(config.get('tokenizer_class', '')).startswith('ByT5')
    or config.get('vocab_size') == BYT5_VOCAB_SIZE
  ):
    return FAMILIES['byt5']
  return FAMILIES['t5_1_0' if config_json.output_head(config) == 'embedding' else 't5_1_1']


def guess_family(architecture: ArchitectureLike) -> Family:
  """Return the most likely family of `architecture`, by its layers and the size of its vocabulary.

  T5 1.1 and mT5 differ only in the vocabulary: a size above 200,000 gives mT5. Choose the family explicitly for a
  custom tokenizer.
  """
  if architecture.num_experts:
    return FAMILIES['switch']
  if architecture.relpos_per_layer:
    return FAMILIES['umt5']
  if architecture.vocab_size == BYT5_VOCAB_SIZE:
    return FAMILIES['byt5']
  if architecture.logits_via_embedding and architecture.scale_tied_logits:
    return FAMILIES['t5_1_0']
  return FAMILIES['mt5' if architecture.vocab_size > 200_000 else 't5_1_1']
