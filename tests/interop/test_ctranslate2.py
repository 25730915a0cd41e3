"""CTranslate2 gives our greedy tokens and log-probabilities from folders that `convert` writes."""

import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.apps.convert import run as convert
from t5x_lite.data import tokenizer_folders
from tests.interop import folder_cases
from tests.interop import hf_models
from tests.interop import reference

_LENGTH = 16


def _without_unused_rows(params, num_ids):
  """Return parameters whose logits of rows behind the vocabulary are 0: no tokenizer has names for them."""

  def cleared(name, value):
    if name == 'token_embedder/embedding':
      return np.concatenate([value[:num_ids], np.zeros_like(value[num_ids:])])
    if name == 'decoder/logits_dense/kernel':
      return np.concatenate([value[:, :num_ids], np.zeros_like(value[:, num_ids:])], axis=1)
    return value

  return tree_utils.map_with_names(cleared, params)


def _log_probs(logits, targets):
  """Return the log-probabilities of the targets that are not padding, by rows."""
  logits = np.asarray(logits, np.float64)
  log_sums = np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
  found = np.take_along_axis(logits - log_sums, targets[..., None], axis=-1)[..., 0]
  return found[targets > 0]


@pytest.mark.parametrize(
  'name',
  [
    'pieces',
    'saved_pieces',
    'byte_pieces',
    'utf8_bytes',
    'byte_level_bpe',
    pytest.param('madlad_pieces', marks=pytest.mark.full),
  ],
)
def test_greedy_tokens_and_log_probabilities(name, request, tmp_path):
  tokenizer, family = request.getfixturevalue(name), folder_cases.FORMS[name]
  vocabulary = tokenizer_folders.hugging_face_vocabulary(str(tokenizer))
  model, batch = folder_cases.model_and_batch(name, tokenizer)
  params = _without_unused_rows(reference.our_tree(model.tensors, family), vocabulary.vocab_size)
  module = reference.our_module(family)
  run = reference.save_ours(params, tmp_path / 'run', module, end=vocabulary.eos_id)
  folder = convert.convert(
    run,
    str(tmp_path / 'folder'),
    to='hugging_face',
    family='mt5' if family.kind == 'MT5' else None,
    tokenizer=str(tokenizer),
  ).path
  found = hf_models.ctranslate2_results(name, folder, batch, _LENGTH, has_own_head=False)
  right = found
  if not family.tied:
    right = hf_models.ctranslate2_results(name, folder, batch, _LENGTH, has_own_head=True)
  logits = np.asarray(reference.logits_fn(family)(params, batch))
  inputs, targets = batch['encoder_input_tokens'], batch['decoder_target_tokens']
  tokens = reference.greedy_tokens(module, params, inputs, _LENGTH, end=vocabulary.eos_id)
  assert 0 < np.any(tokens == vocabulary.eos_id, axis=1).sum() < len(tokens)
  np.testing.assert_array_equal(found['tokens'], tokens)
  np.testing.assert_array_equal(right['tokens'], tokens)
  np.testing.assert_allclose(right['log_probs'], _log_probs(logits, targets), atol=5e-5)
  if not family.tied:
    # As `docs/weights.md` says: by default logits are scaled as if they were tied.
    scaled = logits * module.config.emb_dim**-0.5
    np.testing.assert_allclose(found['log_probs'], _log_probs(scaled, targets), atol=5e-5)
