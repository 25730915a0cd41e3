"""Tokenizers of written folders."""

import json

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


@pytest.mark.parametrize(
  'tokenizer_config, config, expected',
  [
    ('RobertaTokenizer', 'OtherTokenizer', 'RobertaTokenizer'),
    (None, 'RobertaTokenizer', 'RobertaTokenizer'),
    (None, None, 'T5Tokenizer'),
  ],
)
def test_config_json_names_the_class_of_a_copied_tokenizer(
  tmp_path, tokenizer_config, config, expected
):
  """AutoTokenizer takes the class of tokenizer_config.json, or else that of config.json."""
  source = tmp_path / 'source'
  source.mkdir()
  (source / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': tokenizer_config}))
  (source / 'config.json').write_text(json.dumps({'tokenizer_class': config}))
  (source / 'tokenizer.json').write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
  write_folder(
    tmp_path / 'out',
    cases.SMALL,
    FAMILIES['t5_1_1'],
    cases.values(cases.SMALL).__getitem__,
    tokenizer=str(source),
  )
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['tokenizer_class'] == expected


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
