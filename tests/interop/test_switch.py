"""Switch Transformers where experts drop tokens: capacities are per sequence there, per group of tokens here.

With a group for each sequence and the same number of places, both drop the same tokens. By default our networks drop
nothing, and with capacity factors T5X's groups cross sequences: then they differ from `transformers`, whose
`expert_capacity` is one number for inputs of any length.
"""

import dataclasses

import pytest

from t5x_lite.apps.convert import run as convert
from tests.interop import reference

_FAMILY = reference.FAMILIES['switch']


@pytest.mark.parametrize('capacity', [2, pytest.param(3, marks=pytest.mark.full)])
def test_with_a_group_for_each_sequence_the_same_tokens_are_dropped(capacity):
  batch = reference.random_batch()
  model = reference.hf_model(_FAMILY, expert_capacity=capacity)
  params = reference.our_tree(model.tensors, _FAMILY)
  length = batch['encoder_input_tokens'].shape[1]
  # The decoder's rows are shorter: the largest groups that divide its tokens are its rows.
  assert batch['decoder_input_tokens'].shape == (3, 11) and length == 19
  module = reference.our_module(
    _FAMILY,
    group_size=length,
    train_capacity_factor=0.01,
    eval_capacity_factor=0.01,
    min_expert_capacity=capacity,
  )
  want, without_capacity = model.logits(batch), reference.hf_model(_FAMILY).logits(batch)
  logits = reference.jit(
    lambda params, batch: module.apply({'params': params}, **batch, enable_dropout=False)
  )(params, batch)
  assert reference.max_error(logits, want, batch) < 1e-5
  # And it matters.
  assert reference.max_error(without_capacity, want, batch) > 0.01


@pytest.mark.full
def test_logits_that_are_not_tied(tmp_path):
  """`transformers` then ties none of its three embeddings; all are in the folder."""
  family, batch = dataclasses.replace(_FAMILY, name='untied', tied=False), reference.random_batch()
  module, params = reference.our_module(family), reference.random_params(family)
  folder = convert.convert(
    reference.save_ours(params, tmp_path / 'run', module),
    str(tmp_path / 'theirs'),
    to='hugging_face',
  ).path
  model = reference.load_theirs('switch_untied/ours', folder, family)
  reference.assert_same_bits(reference.restore(folder, family), params)
  want = model.logits(batch)
  logits = reference.logits_fn(family)(params, batch)
  assert reference.max_error(want, logits, batch) < 1e-5
