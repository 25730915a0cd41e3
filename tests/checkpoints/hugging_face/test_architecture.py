"""Architectures that cannot be."""

import dataclasses

import pytest

from tests.checkpoints.hugging_face import hugging_face_cases as cases


@pytest.mark.parametrize(
  'changes, match',
  [
    (dict(mlp_activations=('relu', 'gelu')), 'mlp_activations'),
    (dict(mlp_activations=('softplus',)), 'softplus'),
    (dict(sparse_encoder_layers=(1,)), 'num_experts=0'),
    (dict(num_experts=2), 'not gated'),
    (dict(num_experts=2, mlp_activations=('relu',), relpos_per_layer=True), 'per layer'),
    (dict(num_heads=0), 'num_heads'),
    (dict(relpos_num_buckets=6), 'num_relpos_buckets'),
    (dict(scale_tied_logits=False), 'scale_tied_logits'),
  ],
)
def test_architectures_that_cannot_be_are_rejected(changes, match):
  with pytest.raises(ValueError, match=match):
    dataclasses.replace(cases.SMALL, **changes)
