"""Forms of published models that differ from the families in options: `transformers` gives the same results.

Each is compared as `docs/weights.md` says: logits, greedy tokens, and the bits after a conversion and back.
"""

import numpy as np
import pytest

from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from tests.interop import reference

_LENGTH = 16
_EPSILON = (('layer_norm_epsilon', 1e-5),)
_SILU = ((('feed_forward_proj', 'gated-silu'),), (('mlp_activations', ('silu', 'linear')),))
_FORMS = {
  family.name: family
  for family in (
    # UL2 and Flan-UL2: gated silu, and logits by the embedding table.
    reference.Family(name='ul2', tied=True, options=_SILU[0], our_options=_SILU[1]),
    # ProtT5 and Chronos are T5 1.0 with other vocabularies; the latter adds a key to config.json.
    reference.Family(
      name='prott5',
      gated=False,
      tied=True,
      options=(('vocab_size', 128),),
      our_options=(('vocab_size', 128),),
    ),
    reference.Family(
      name='chronos',
      gated=False,
      tied=True,
      options=(('chronos_config', ('n_tokens', 96)),),
    ),
    # Ankh: 64 buckets, and an encoder that is twice as deep as the decoder; Ankh 2 and 3 have gated silu.
    reference.Family(
      name='ankh',
      num_encoder_layers=4,
      options=(('relative_attention_num_buckets', 64), ('vocab_size', 144)),
      our_options=(('num_relpos_buckets', 64), ('vocab_size', 144)),
    ),
    reference.Family(
      name='ankh2',
      num_encoder_layers=4,
      options=(('relative_attention_num_buckets', 64), *_SILU[0]),
      our_options=(('num_relpos_buckets', 64), *_SILU[1]),
    ),
    # CodeT5 is T5 1.0 with another end token, MADLAD-400 T5 1.1 with another padding and end token.
    reference.Family(name='codet5', gated=False, tied=True, options=(('eos_token_id', 2),)),
    reference.Family(name='madlad400', options=(('eos_token_id', 2), ('pad_token_id', 1))),
    # T5Gemma's decoder starts with another id.
    reference.Family(name='start', options=(('decoder_start_token_id', 3),)),
    reference.Family(name='epsilon', options=_EPSILON, our_options=_EPSILON),
    # So large that no norm may miss it.
    reference.Family(
      name='large_epsilon',
      options=(('layer_norm_epsilon', 0.1),),
      our_options=(('layer_norm_epsilon', 0.1),),
    ),
    reference.Family(
      name='switch_epsilon',
      kind='SwitchTransformers',
      gated=False,
      tied=True,
      sparse=True,
      options=(('layer_norm_epsilon', 0.1),),
      our_options=(('layer_norm_epsilon', 0.1),),
    ),
  )
}
_CASES = [
  pytest.param(
    name,
    layout,
    id=f'{name}-{layout}',
    marks=[]
    if (name, layout)
    in (('ul2', 't5'), ('madlad400', 't5'), ('start', 't5'), ('large_epsilon', 'scalable_t5'))
    else [pytest.mark.full],
  )
  for name, family in _FORMS.items()
  for layout in ('t5', *([] if family.sparse else ['scalable_t5']))
]


@pytest.mark.parametrize('name, layout', _CASES)
def test_logits_and_greedy_tokens(name, layout, tmp_path):
  family, batch = _FORMS[name], reference.random_batch()
  model = reference.hf_model(family)
  ends = model.that_ends(batch, 3.0)
  want, want_tokens = model.logits(batch), ends.generate(batch, _LENGTH)['tokens']
  params = reference.restore(model.save(tmp_path / 'theirs'), family, layout)
  reference.assert_same_bits(params, reference.our_tree(model.tensors, family, layout))
  logits = reference.logits_fn(family, layout)(params, batch)
  assert reference.max_error(logits, want, batch) < 1e-5
  architecture = HuggingFaceFolder(str(tmp_path / 'theirs')).architecture
  (end,) = architecture.eos_token_ids
  tokens = reference.greedy_tokens(
    reference.our_module(family, layout),
    reference.our_tree(ends.tensors, family, layout),
    batch['encoder_input_tokens'],
    _LENGTH,
    end=end,
    start=architecture.decoder_start_token_id,
  )
  np.testing.assert_array_equal(tokens, want_tokens[:, 0])


@pytest.mark.parametrize('name', _FORMS)
def test_there_and_back(name, tmp_path):
  model = reference.hf_model(_FORMS[name])
  theirs = model.save(tmp_path / 'theirs')
  ours = convert.convert(theirs, str(tmp_path / 'ours'), to='t5x_lite')
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='hugging_face')
  assert HuggingFaceFolder(back.path).architecture == HuggingFaceFolder(theirs).architecture
  assert reference.tensor_bits(back.path) == reference.tensor_bits(theirs)
  want = reference.config_of(model.name, theirs)
  want.pop(
    'chronos_config', None
  )  # says how series become ids, of which a checkpoint knows nothing
  assert reference.config_of(f'{model.name}/back', back.path) == want
