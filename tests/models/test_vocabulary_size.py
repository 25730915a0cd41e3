"""Check of a vocabulary's size; tests of the models have the other cases."""

import pytest

from t5x_lite import errors
from t5x_lite.models import vocabulary_size


def test_a_vocabulary_that_cannot_be_loaded_is_named_with_the_remedy():
  class Missing:
    @property
    def vocab_size(self):
      raise RuntimeError('no file gs://a/b.model.\nmore')

  message = r'input_vocabulary cannot be loaded: no file gs://a/b.model\. If .*VOCABULARY'
  with pytest.raises(errors.ConfigError, match=message):
    vocabulary_size.check_vocabulary_fits('input_vocabulary', Missing(), 32)
