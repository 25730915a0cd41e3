"""Model card (README.md) of an exported folder."""

from collections.abc import Mapping
import dataclasses

from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import Family

README_FILE = 'README.md'
_TOKENIZER_LINES = """\
tokenizer = AutoTokenizer.from_pretrained(folder)


def answer(text):
  ids = model.generate(**tokenizer(text, return_tensors='pt'), max_new_tokens=128)
  return tokenizer.decode(ids[0], skip_special_tokens=True)
"""
# The class of `Auto` classes that loads all families.
_AUTO_CLASS = 'AutoModelForSeq2SeqLM'
_UNSCALED = """
The logits of this model are computed with its token embedding and are not scaled (`"scale_decoder_outputs": false`).
transformers before version 5 scales them by d_model^-0.5. With such a version, undo this after loading:

```python
model.config.tie_word_embeddings = False
```
"""
_UNSCALED_BY_FLAG = """
The logits of this model are computed with its token embedding and are not scaled. {architecture} of transformers always
scales them by d_model^-0.5. Undo this after loading; otherwise losses, samples and beams are wrong (greedy texts are
correct):

```python
model.config.tie_word_embeddings = False
```
"""
_UNTIED_UMT5 = """
The logits of this model have separate weights (`lm_head`) and are not scaled. transformers' `UMT5Config` ignores
`"tie_word_embeddings": false` and scales them by d_model^-0.5. Undo this after loading; otherwise losses, samples and
beams are wrong (greedy texts are correct):

```python
model.config.tie_word_embeddings = False
```
"""
_SPARSE = """
A token goes to the expert with the highest router probability. In transformers an expert accepts at most
`expert_capacity` = {capacity} tokens of each sequence; in the original network the limit is per group of sequences, or
absent. If no token is dropped, both models are equal: set `expert_capacity` to the length of the longest sequence. If
the network was trained with several experts per token, or with another router, the results differ.
"""
_UNTIED = """
The logits have separate weights and are not scaled (`"tie_word_embeddings": false`).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """Facts about the origin of weights; what is unknown is not in the card.

  Attributes:
    base_model: model of the hub that the weights were trained from, OWNER/NAME.
    license: identifier of the license in the card of that model.
    data: name of the task or mixture of the run.
    metrics: results of evaluations of these weights, by name.
  """

  base_model: str | None = None
  license: str | None = None
  data: str | None = None
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def front_matter(self, model_type: str) -> str:
    """Return the head of the card. It has no pipeline tag: transformers 5 has no pipeline for these models."""
    lines = ['---', 'library_name: transformers']
    for key, value in (('base_model', self.base_model), ('license', self.license)):
      if value is not None:
        lines.append(f'{key}: {value}')
    return '\n'.join([*lines, 'tags:', f'- {model_type}', '- t5x_lite', '---', ''])

  def sections(self) -> str:
    """Return the sections about training and evaluation, or an empty text."""
    text = ''
    if self.data is not None:
      text += f'\nTrained on the task `{self.data}`.\n'
    if self.metrics:
      text += '\n| metric | value |\n|---|---|\n'
      for name, value in sorted(self.metrics.items()):
        text += f'| {name} | {value:.4g} |\n'
    return text


def text_of(
  architecture: Architecture,
  family: Family,
  dtype: str,
  source_note: str = '',
  has_tokenizer: bool = False,
  origin: Origin = Origin(),
) -> str:
  """Return the text of README.md: sizes, code to load the folder, and differences from the original network.

  Args:
    architecture: architecture of the model.
    family: family of the model.
    dtype: dtype of the weights.
    source_note: origin of the weights, as a sentence.
    has_tokenizer: whether the folder holds a tokenizer.
    origin: facts about the origin of the weights.
  """
  arch = architecture
  rows = {
    'vocabulary': arch.vocab_size,
    'width (d_model)': arch.emb_dim,
    'heads': f'{arch.num_heads} of width {arch.head_dim}',
    'hidden width (d_ff)': arch.mlp_dim,
    'layers': f'{arch.num_encoder_layers} + {arch.num_decoder_layers}',
    'activations': ', '.join(arch.mlp_activations),
    'dtype of the weights': dtype,
  }
  if arch.num_experts:
    rows['experts'] = (
      f'{arch.num_experts}, in layers {list(arch.sparse_encoder_layers)} of the encoder and '
      f'{list(arch.sparse_decoder_layers)} of the decoder'
    )
  parts = [
    origin.front_matter(family.model_type),
    f'\n# {family.title}, converted by t5x_lite\n\n',
  ]
  if source_note:
    parts.append(f'{source_note}\n\n')
  parts.append(
    f'A model with the architecture of {family.title} ({family.paper}).\n\n| | |\n|---|---|\n'
  )
  parts += [f'| {name} | {value} |\n' for name, value in rows.items()]
  parts.append(origin.sections())
  imported = f'{_AUTO_CLASS}, AutoTokenizer' if has_tokenizer else _AUTO_CLASS
  parts.append(
    f'\n```python\nfrom transformers import {imported}\n\n'
    "folder = '.'  # this folder, or its name on the hub\n"
    f'model = {_AUTO_CLASS}.from_pretrained(folder)\n'
    f'{_TOKENIZER_LINES if has_tokenizer else ""}```\n'
  )
  if not arch.logits_via_embedding:
    parts.append(_UNTIED_UMT5 if family.model_type == 'umt5' else _UNTIED)
  elif not arch.scale_tied_logits:
    if family.needs_untied_flag(arch):
      template = _UNSCALED_BY_FLAG
    else:
      template = _UNSCALED
    parts.append(template.format(architecture=family.architecture))
  if arch.num_experts:
    parts.append(_SPARSE.format(capacity=arch.expert_capacity))
  return ''.join(parts)
