"""Families of published models: their own files, and those that are unknown."""

import dataclasses

import pytest

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import family_of
from t5x_lite.checkpoints.hugging_face import get_family
from t5x_lite.checkpoints.hugging_face import guess_family
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases as cases


@pytest.mark.parametrize('name', FAMILIES)
def test_families_know_their_own_files(name):
  arch = cases.BY_FAMILY[name]
  config = arch.to_config_json(FAMILIES[name])
  assert family_of(config) == FAMILIES[name] == get_family(name)
  if name != 'mt5':  # which small vocabularies do not tell
    assert guess_family(arch) == FAMILIES[name]
  assert guess_family(dataclasses.replace(cases.SMALL, vocab_size=250112)).name == 'mt5'


@pytest.mark.parametrize(
  'name, arch, match',
  [
    ('mt5', cases.TIED, "scale_tied_logits=False.*logits_via_embedding=True.*'t5_1_0'"),
    ('t5_1_1', cases.UMT5, "must have .* per stack, got them per layer.*'umt5'"),
    ('umt5', cases.SMALL, 'must have .* per layer, got them per stack'),
    ('t5_1_0', cases.SWITCH, "must have no experts, got 3. Choose family='switch'"),
    ('switch', cases.TIED, 'must have some experts, got 0'),
    (
      'switch',
      dataclasses.replace(cases.SWITCH, sparse_encoder_layers=(0, 2)),
      r'layers \(0, 2\).*No family supports',
    ),
  ],
)
def test_networks_that_transformers_does_not_support_are_rejected(name, arch, match):
  with pytest.raises(CheckpointError, match=match):
    arch.to_config_json(FAMILIES[name])


def test_unknown_families_are_rejected():
  with pytest.raises(CheckpointError, match="Did you mean 't5_1_1'"):
    get_family('t5_11')
