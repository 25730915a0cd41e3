"""Our arrays and those of Hugging Face folders: one to one, exact, and the architecture that names and shapes tell."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.checkpoints.hugging_face import check_ours
from t5x_lite.checkpoints.hugging_face import tensor_table
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases as cases
from tests.checkpoints.hugging_face import names_cases as networks

_SEEDS = range(40)


@pytest.mark.parametrize('seed', _SEEDS)
def test_each_array_of_either_side_has_one_rule_and_comes_back_bitwise(seed):
  arch = cases.random_architecture(seed)
  rules = tensor_table(arch)
  ours, theirs = [rule.ours for rule in rules], [name for rule in rules for name in rule.theirs]
  assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
  values = cases.values(arch, ('float32', 'bfloat16', 'float16')[seed % 3], seed)
  tensors = cases.tensors(arch, values)
  assert set(tensors) == set(theirs)
  for rule in rules:
    assert all(
      tensors[name].shape == rule.their_shape and tensors[name].flags.c_contiguous
      for name in rule.theirs
    )
    back = rule.to_ours(tensors.__getitem__)
    assert back.dtype == values[rule.ours].dtype and back.flags.c_contiguous
    np.testing.assert_array_equal(back.view(np.uint8), values[rule.ours].view(np.uint8))


@pytest.mark.parametrize(
  'arch',
  [
    cases.SMALL,
    cases.TIED,
    cases.UMT5,
    cases.SWITCH,
    dataclasses.replace(cases.SWITCH, router_bias=True),
  ],
)
def test_our_names_and_shapes_are_those_of_the_network(arch):
  shapes = networks.shapes(networks.network(arch))
  assert {rule.ours: rule.shape for rule in tensor_table(arch)} == {
    name: leaf.shape for name, leaf in shapes.items()
  }
  check_ours(tensor_table(arch), shapes, 'it')


def test_their_names_are_those_of_the_first_layers_as_transformers_has_them():
  names = {rule.ours: rule.theirs for rule in tensor_table(cases.SWITCH)}
  block = 'decoder.block.1.layer'
  assert names['decoder/layers_1/pre_cross_attention_layer_norm/scale'] == (
    f'{block}.1.layer_norm.weight',
  )
  assert names['decoder/layers_1/encoder_decoder_attention/out/kernel'] == (
    f'{block}.1.EncDecAttention.o.weight',
  )
  assert names['decoder/layers_1/mlp/router/router_weights/w/kernel'] == (
    f'{block}.2.mlp.router.classifier.weight',
  )
  assert names['decoder/layers_1/mlp/expert/wo/kernel'] == tuple(
    f'{block}.2.mlp.experts.expert_{e}.wo.weight' for e in range(3)
  )
  assert names['encoder/layers_0/mlp/wi/kernel'] == ('encoder.block.0.layer.1.mlp.wi.weight',)
  assert names['encoder/relpos_bias/rel_embedding'] == (
    'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
  )
  dense = {rule.ours: rule.theirs for rule in tensor_table(cases.UMT5)}
  assert dense['decoder/layers_1/mlp/wi_1/kernel'] == (
    'decoder.block.1.layer.2.DenseReluDense.wi_1.weight',
  )
  assert dense['encoder/layers_2/relpos_bias/rel_embedding'] == (
    'encoder.block.2.layer.0.SelfAttention.relative_attention_bias.weight',
  )
  assert dense['decoder/logits_dense/kernel'] == ('lm_head.weight',)


def test_an_untied_switch_transformer_has_its_embedding_under_three_names():
  # transformers would make new tables for its stacks otherwise.
  arch = dataclasses.replace(cases.SWITCH, logits_via_embedding=False)
  assert tensor_table(arch)[0].theirs == (
    'shared.weight',
    'encoder.embed_tokens.weight',
    'decoder.embed_tokens.weight',
  )
  values = cases.values(arch)
  tensors = cases.tensors(arch, values)
  for name in tensor_table(arch)[0].theirs:
    np.testing.assert_array_equal(tensors[name], values['token_embedder/embedding'])
  assert tensor_table(cases.SWITCH)[0].theirs == ('shared.weight',)


def test_kernels_and_tables_are_transposed_and_experts_are_stacked():
  arch, values = cases.SWITCH, cases.values(cases.SWITCH)
  tensors = cases.tensors(arch, values)
  wi = values['encoder/layers_3/mlp/expert/wi/kernel']
  np.testing.assert_array_equal(
    tensors['encoder.block.3.layer.1.mlp.experts.expert_2.wi.weight'], wi[2].T
  )
  np.testing.assert_array_equal(
    tensors['decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight'],
    values['decoder/relpos_bias/rel_embedding'].T,
  )
  np.testing.assert_array_equal(tensors['shared.weight'], values['token_embedder/embedding'])


def test_problems_name_both_sides():
  rules = tensor_table(cases.SMALL)
  shapes = {rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in rules}
  shapes['encoder/layers_0/mlp/wo/kernel'] = jax.ShapeDtypeStruct((10, 7), jnp.float32)
  shapes['extra'] = jax.ShapeDtypeStruct((2,), jnp.float32)
  del shapes['decoder/logits_dense/kernel']
  with pytest.raises(CheckpointError) as error:
    check_ours(rules, shapes, 'checkpoint_7')
  text = str(error.value)
  assert (
    'checkpoint_7' in text
    and 'missing decoder/logits_dense/kernel (6, 13) <-> lm_head.weight (13, 6)' in text
  )
  assert 'surplus extra (2,)' in text
  assert (
    'encoder/layers_0/mlp/wo/kernel (10, 6) <-> '
    'encoder.block.0.layer.1.DenseReluDense.wo.weight (6, 10) must have this shape, got (10, 7)'
  ) in text
