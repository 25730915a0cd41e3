"""Entire read-only folders of published forms: ids, logits, greedy tokens, and the folder that comes back."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from t5x_lite.data import tokenizer_folders
from tests.interop import folder_cases
from tests.interop import hf_models
from tests.interop import reference

_LENGTH = 16
_FORMS = ('saved_pieces', 'madlad_pieces', 'byte_level_bpe')


@dataclasses.dataclass(frozen=True)
class _Folder:
  """A folder with the weights of `model`, and a batch of texts in its vocabulary."""

  path: pathlib.Path
  model: hf_models.HFModel
  batch: hf_models.Batch
  family: reference.Family


def _state(folder: pathlib.Path) -> dict[str, Any]:
  """Return the contents and times of a folder."""
  found = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
  return {**found, '.': folder.stat().st_mtime_ns}


@pytest.fixture(params=_FORMS)
def folder(request, tmp_path):
  """A read-only folder; tests may not write into it, which for root only the times show."""
  tokenizer, family = request.getfixturevalue(request.param), folder_cases.FORMS[request.param]
  model, batch = folder_cases.model_and_batch(request.param, tokenizer)
  path = tmp_path / 'theirs'
  model.save(path)
  folder_cases.copy_tokenizer(tokenizer, path)
  for file in path.iterdir():
    file.chmod(0o444)
  path.chmod(0o555)
  before = _state(path)
  yield _Folder(path, model, batch, family)
  assert _state(path) == before
  path.chmod(0o755)


def test_ids(folder):
  ours = tokenizer_folders.hugging_face_vocabulary(str(folder.path))
  architecture = HuggingFaceFolder(str(folder.path)).architecture
  assert architecture.eos_token_ids == (ours.eos_id,)
  theirs = hf_models.HFTokenizer(f'{folder.family.name}/folder', 'AutoTokenizer', folder.path)
  texts = folder_cases.two_hundred_texts(lambda text: '<0x' not in _pieces(ours, text))
  assert theirs.encode(texts) == [[*ours.encode(text), ours.eos_id] for text in texts]


def _pieces(vocabulary, text):
  """Return the pieces of a text if the vocabulary is one of sentencepiece, whose bytes T5Tokenizer does not have."""
  processor = getattr(vocabulary, 'processor', None)
  if processor is None:
    return ''
  return ' '.join(processor.EncodeAsPieces(text))


def test_logits_and_greedy_tokens(folder):
  batch, family = folder.batch, folder.family
  want = folder.model.logits(batch)
  want_tokens = folder.model.generate(batch, _LENGTH)['tokens'][:, 0]
  params = reference.restore(str(folder.path), family)
  reference.assert_same_bits(params, reference.our_tree(folder.model.tensors, family))
  logits = reference.logits_fn(family)(params, batch)
  assert reference.max_error(logits, want, batch) < 1e-5
  architecture = HuggingFaceFolder(str(folder.path)).architecture
  (end,) = architecture.eos_token_ids
  tokens = reference.greedy_tokens(
    reference.our_module(family),
    params,
    batch['encoder_input_tokens'],
    _LENGTH,
    end=end,
    start=architecture.decoder_start_token_id,
  )
  np.testing.assert_array_equal(tokens, want_tokens)
  assert 0 < np.any(want_tokens == end, axis=1).sum() < len(want_tokens)


def test_there_and_back(folder, tmp_path):
  ours = convert.convert(str(folder.path), str(tmp_path / 'ours'), to='t5x_lite')
  back = convert.convert(
    ours.path, str(tmp_path / 'back'), to='hugging_face', tokenizer=str(folder.path)
  )
  assert reference.tensor_bits(back.path) == reference.tensor_bits(folder.path)
  written = {path.name for path in pathlib.Path(back.path).iterdir()}
  kept = {path.name for path in folder.path.iterdir()}
  assert kept <= written
  for name in kept & set(hf_models.TOKENIZER_FILES):
    assert (pathlib.Path(back.path) / name).read_bytes() == (folder.path / name).read_bytes()
  name = f'{folder.family.name}/back'
  theirs = reference.load_theirs(name, back.path, folder.family)
  np.testing.assert_array_equal(
    theirs.generate(folder.batch, _LENGTH)['tokens'],
    folder.model.generate(folder.batch, _LENGTH)['tokens'],
  )
  vocabulary = tokenizer_folders.hugging_face_vocabulary(str(folder.path))
  text = 'The statement is a name'
  tokenizer = hf_models.HFTokenizer(name, 'AutoTokenizer', back.path)
  assert tokenizer.encode([text]) == [[*vocabulary.encode(text), vocabulary.eos_id]]


def test_known_difference_of_madlads_form(madlad_pieces):
  """As `docs/weights.md` says: in transformers 5 an unknown character is the end token, here it is its bytes."""
  text = 'caf\u00e9'
  ours = tokenizer_folders.hugging_face_vocabulary(str(madlad_pieces))
  theirs = hf_models.HFTokenizer('madlad_pieces/tokenizer', 'AutoTokenizer', madlad_pieces)
  found = theirs.encode([text])[0]
  assert found[-2:] == [2, 2] and found[:-2] == ours.encode(text)[:-2]
  assert ours.decode(ours.encode(text)) == text
