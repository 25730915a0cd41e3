"""Check of a vocabulary's size against that of a network."""

from typing import Any

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.formatting import gin_flag


def check_vocabulary_fits(name: str, vocabulary: Any, network_vocab_size: int) -> None:
  """Raise ConfigError if a vocabulary has ids without an embedding or logit in the network.

  Args:
    name: name of the option.
    vocabulary: object with `vocab_size`.
    network_vocab_size: number of ids of the network.
  """
  try:
    size = getattr(vocabulary, 'vocab_size', vocabulary)
  except Exception as error:  # seqio reads the file here, with TensorFlow's errors.
    reason = (str(error).strip() or type(error).__name__).partition('\n')[0].removesuffix('.')
    raise errors.ConfigError(
      f'The {name} cannot be loaded: {reason}. If its file is missing or cannot be reached, '
      'copy it to this machine and bind sentencepiece_model_file of its class, or the macro '
      'VOCABULARY_FILE if a file reads it, to its path.'
    ) from error
  if size is vocabulary:
    remedy = f'Set VOCABULARY, e.g. {gin_flag("VOCABULARY", "@vocabularies.ByteVocabulary()")}.'
  elif size > network_vocab_size:
    remedy = "Increase vocab_size in the network's config, or use a smaller vocabulary."
  else:
    return
  raise checks.invalid(
    '',
    name,
    f'a vocabulary with vocab_size <= {network_vocab_size}, that of the network',
    size,
    remedy,
  )
