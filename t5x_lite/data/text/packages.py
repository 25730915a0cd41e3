"""Packages of tokenizers, imported when they are needed."""

from typing import Any

from t5x_lite.errors import needs_packages


def sentencepiece_modules() -> tuple[Any, Any, type[Exception]]:
  """Return (sentencepiece, sentencepiece_model_pb2, protobuf's DecodeError).

  Raises:
    ConfigError: sentencepiece or protobuf is not installed.
  """
  with needs_packages(
    'A vocabulary of sentencepiece',
    'the packages sentencepiece and protobuf',
    command='pip install sentencepiece protobuf',
    otherwise='use ByteVocabulary',
  ):
    from google.protobuf.message import DecodeError
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
  return sentencepiece, sentencepiece_model_pb2, DecodeError


def tokenizers_module(path: str) -> Any:
  """Return the package tokenizers.

  Args:
    path: the file that it reads, for the message.

  Raises:
    ConfigError: it is not installed.
  """
  with needs_packages(
    f'The tokenizer {path}',
    'the package tokenizers',
    extra='tokenizers',
    otherwise='copy spiece.model of the original model into the folder if it has one',
  ):
    import tokenizers
  return tokenizers
