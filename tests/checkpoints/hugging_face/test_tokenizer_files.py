"""Tokenizers of written folders."""

import pytest

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from t5x_lite.checkpoints.hugging_face import write_folder
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases as cases


def test_a_byt5_of_other_ids_gets_no_tokenizer(tmp_path):
  write_folder(
    tmp_path / 'out', cases.SMALL, FAMILIES['byt5'], cases.values(cases.SMALL).__getitem__
  )
  assert not (tmp_path / 'out' / 'tokenizer_config.json').exists()
  assert HuggingFaceFolder(tmp_path / 'out').family.name == 'byt5'


def test_a_tokenizer_that_is_rejected_leaves_nothing(tmp_path):
  with pytest.raises(CheckpointError, match='The tokenizer must be '):
    write_folder(
      tmp_path / 'out',
      cases.SMALL,
      FAMILIES['t5_1_1'],
      cases.values(cases.SMALL).__getitem__,
      tokenizer=str(tmp_path / 'none'),
    )
  assert not list(tmp_path.iterdir())
