"""Small folders of published forms, with their own tokenizers, for the tests that compare whole folders."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np

from t5x_lite.checkpoints.hugging_face import families
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.data import corpora
from t5x_lite.data import tokenizer_folders
from tests.interop import hf_models
from tests.interop import reference

TEXTS = [
  'The statement is a name',
  '<extra_id_0> x in numbers:',
  'if x <extra_id_1> None: <extra_id_2>',
  'a  b\n\tc',
  '',
  ' leading and trailing ',
  'é ü ﬁ ½ 中文 \U0001f600',
  "it's `code` (with, brackets) [1] 100%",
  'x <extra_id_7>',
]
# The end token of CodeT5, MADLAD-400 and others that are not T5's.
_END = ('eos_token_id', 2)


def _form(
  name: str, vocab_size: int, end_amount: float, *options: tuple[str, Any], **fields: Any
) -> reference.Family:
  """Return a family with the rows of a vocabulary, for whose batch of texts some decodings end and some do not."""
  size = ('vocab_size', vocab_size)
  return reference.Family(
    name=name,
    options=(size, *options),
    our_options=(size,),
    end_amounts=(end_amount, end_amount),
    **fields,
  )


# Each name is also that of the fixture that gives the folder of its tokenizer.
FORMS = {
  family.name: family
  for family in (
    _form('pieces', 512, 2.5, gated=False, tied=True),
    # A T5 1.1 that transformers 5 saved: its tokenizer is only a tokenizer.json.
    _form('saved_pieces', 512, 2.0),
    _form('byte_pieces', 768, 3.8, kind='MT5'),
    _form('madlad_pieces', 756, 3.0, _END, ('pad_token_id', 1)),
    _form('byte_level_bpe', 608, 3.8, _END, gated=False, tied=True),
    *(
      _form(name, 384, 4.2, num_encoder_layers=3, num_decoder_layers=1)
      for name in ('utf8_bytes', 'published_bytes')
    ),
  )
}


def model_and_batch(name: str, folder: pathlib.Path) -> tuple[hf_models.HFModel, hf_models.Batch]:
  """Return a model of a form that gives the end token often, and a batch of texts in the vocabulary of a folder."""
  family, batch = FORMS[name], text_batch(folder)
  return reference.hf_model(family).that_ends(batch, family.end_amounts[0]), batch


def two_hundred_texts(accept: Any = lambda text: True) -> list[str]:
  """Return texts and lines of documents, without underlined titles: a row of signs has several divisions."""
  lines = [line for text in corpora.python_docs('validation') for line in text.splitlines()]
  lines = [line for line in lines if line and '***' not in line and '===' not in line]
  texts = [text for text in (*TEXTS, *lines[:400]) if accept(text)][:200]
  assert len(texts) == 200
  return texts


def write_tokenizer(
  path: pathlib.Path, family: str, tokenizer: Any, vocab_size: int
) -> tuple[str, ...]:
  """Write a folder of the family without weights; return the names of its tokenizer's files."""
  path.mkdir()
  write_json(
    path / 'config.json',
    {'model_type': families.get_family(family).model_type, 'vocab_size': vocab_size, 'd_model': 8},
  )
  return tokenizer_files.write(path, families.get_family(family), tokenizer, vocab_size=vocab_size)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Write a JSON file."""
  path.write_text(json.dumps(value), encoding='utf-8')


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copy the files of a folder except its config.json, which the model writes."""
  target.mkdir(exist_ok=True)
  for path in source.iterdir():
    if path.name != 'config.json':
      shutil.copy(path, target)


def text_batch(folder: pathlib.Path) -> hf_models.Batch:
  """Return short texts in the vocabulary of a folder, padded, with its end token."""
  vocabulary = tokenizer_folders.hugging_face_vocabulary(str(folder))

  def rows(texts):
    ids = [[*vocabulary.encode(text), vocabulary.eos_id] for text in texts]
    length = max(map(len, ids))
    return np.array([row + [0] * (length - len(row)) for row in ids], np.int32)

  inputs, targets = rows(['The statement is a name', '<extra_id_0> x', 'a']), rows(['if', 'is', ''])
  return hf_models.Batch(
    'texts',
    {
      'encoder_input_tokens': inputs,
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_target_tokens': targets,
    },
  )
