"""Networks with custom attention and positions: the examples of docs/extending.md."""

import functools
import pathlib
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import gin_utils
from t5x_lite import tree_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.networks import decoder_only
from t5x_lite.networks import layout_plan
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.examples import query_key_norm
from tests.examples import rotary
from tests.networks import network_cases as cases

_FIELDS = {
  'rotary': dict(position_encoding=rotary.rotary_positions()),
  'query_key_norm': dict(attention_fn=query_key_norm.query_key_norm),
}


def _shapes(module, *args, **kwargs):
  init = functools.partial(module.init, *args, **kwargs, enable_dropout=False)
  return jax.eval_shape(init, jax.random.key(0))['params']


def _names(module, *args, **kwargs):
  return {name for name, _ in tree_utils.named_leaves(_shapes(module, *args, **kwargs))}


def _random(module, *args, **kwargs):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3,
    _shapes(module, *args, **kwargs),
  )


def _decoder_only(**fields):
  return decoder_only.DecoderWrapper(
    decoder_only.TransformerConfig(
      vocab_size=40, emb_dim=16, num_heads=2, num_layers=2, head_dim=8, mlp_dim=24, dropout_rate=0.0
    ),
    **fields,
  )


@pytest.mark.parametrize(
  'layout',
  [
    {},
    pytest.param(dict(param_layout='scalable_t5', scan_layers=True), marks=pytest.mark.full),
  ],
)
@pytest.mark.parametrize(
  'example', ['rotary', pytest.param('query_key_norm', marks=pytest.mark.full)]
)
def test_cached_logits_equal_uncached_ones(example, layout):
  """Token by token, behind prompts of uneven length that are read in one pass, and for beams."""
  config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=2, **layout)
  module = t5.Transformer(config, **_FIELDS[example])
  batch = cases.tiny_batch()
  inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
  rows, length = tokens.shape
  params = _random(module, **batch)

  @cases.jit
  def whole(params):
    encoded = module.apply({'params': params}, inputs, enable_dropout=False, method='encode')
    logits = module.apply(
      {'params': params}, encoded, **batch, enable_dropout=False, method='decode'
    )
    _, cache = module.apply(
      {'params': params},
      encoded,
      inputs,
      length,
      method='init_cache',
      mutable=['cache', 'cross_cache'],
    )
    return encoded, logits, cache

  def call(params, cache, encoded, tokens, lengths=None, prefill=False):
    logits, new = module.apply(
      {'params': params, **cache},
      encoded,
      inputs,
      tokens,
      tokens,
      enable_dropout=False,
      decode=not prefill,
      prefill=prefill,
      prefill_lengths=lengths,
      max_decode_length=length,
      mutable=['cache'],
      method='decode',
    )
    return logits, {**cache, **new}

  encoded, expected, empty = whole(params)
  real = np.asarray(batch['decoder_target_tokens']) > 0
  assert expected.shape == (rows, length, 40) and expected.dtype == jnp.float32
  step = cases.jit(call)
  logits, cache = [], empty
  for i in range(length):
    out, cache = step(params, cache, encoded, tokens[:, i : i + 1])
    logits.append(out)
  np.testing.assert_allclose(np.concatenate(logits, 1)[real], expected[real], rtol=1e-5, atol=1e-5)

  lengths = np.array([2, 0, 4, 1])
  _, cache = cases.jit(functools.partial(call, prefill=True))(
    params, empty, encoded, tokens, lengths
  )
  at = np.arange(rows), lengths
  out, _ = step(params, cache, encoded, tokens[at][:, None])
  np.testing.assert_allclose(
    np.asarray(out)[real[at], 0], np.asarray(expected)[at][real[at]], rtol=1e-5, atol=1e-5
  )

  # Two beams of each example, in slots that are not moved.
  shared = {**cache, 'cache': t5.Transformer.share_beams(cache['cache'], 2)}
  shared['cache'] = tree_utils.map_with_names(
    lambda name, leaf: (
      jnp.repeat(leaf, 2, 0) if name.endswith(('cache_index', 'slot_table')) else leaf
    ),
    shared['cache'],
  )
  beams, _ = step(params, shared, encoded, jnp.repeat(tokens[at][:, None], 2, 0))
  np.testing.assert_allclose(np.asarray(beams)[::2], out, rtol=1e-5, atol=1e-5)


def test_rotary_scores_depend_on_distances_alone():
  query, key = np.random.default_rng(0).standard_normal((2, 1, 5, 2, 8)).astype(np.float32)

  def scores(first):
    positions = jnp.arange(first, first + 5)[None]
    return jnp.einsum(
      'bqhd,bkhd->bhqk', rotary.rotate(query, positions), rotary.rotate(key, positions)
    )

  np.testing.assert_allclose(scores(0), scores(37), rtol=1e-4, atol=1e-4)
  # Lengths are kept, and position 0 is not turned.
  np.testing.assert_allclose(rotary.rotate(query, jnp.zeros((1, 5), jnp.int32)), query)
  np.testing.assert_allclose(
    np.linalg.norm(rotary.rotate(query, jnp.arange(5)[None]), axis=-1),
    np.linalg.norm(query, axis=-1),
    rtol=1e-5,
  )


@pytest.mark.parametrize('kind', [pytest.param('t5', marks=pytest.mark.full), 'decoder_only'])
def test_rotary_logits_do_not_depend_on_where_a_text_begins(kind):
  """A text has the same logits alone and as the second of a packed row; and they tell the order of its tokens."""
  fields = _FIELDS['rotary']
  module = (
    t5.Transformer(cases.tiny_config(), **fields) if kind == 't5' else _decoder_only(**fields)
  )
  batch = {
    name: ids[2:3]
    for name, ids in cases.tiny_batch().items()
    if kind == 't5' or name.startswith('decoder')
  }
  packed = {
    name: jnp.concatenate([jnp.full((1, 3), 7, jnp.int32), ids], axis=1)
    for name, ids in batch.items()
  }
  for side in {name.partition('_')[0] for name in batch}:
    length = batch[f'{side}_input_tokens'].shape[1]
    packed[f'{side}_segment_ids'] = jnp.array([[1] * 3 + [2] * length], jnp.int32)
  params = _random(module, **batch)
  # Nothing is learnt about positions.
  assert not any('relpos_bias' in name for name in _names(module, **batch))
  logits = cases.jit(
    lambda **batch: module.apply({'params': params}, **batch, enable_dropout=False)
  )
  alone = logits(**batch)
  np.testing.assert_allclose(logits(**packed)[:, 3:], alone, rtol=1e-4, atol=1e-4)
  swapped = {
    **batch,
    'decoder_input_tokens': batch['decoder_input_tokens']
    .at[:, 1:3]
    .set(batch['decoder_input_tokens'][:, 2:0:-1]),
  }
  assert np.abs(logits(**swapped)[:, -1] - alone[:, -1]).max() > 1e-3


def test_layers_may_differ_in_attention():
  """Positions for every other layer alone, as one loop with a period of two."""

  def attention_fn(stack, layer):
    del stack
    return (
      t5.t5_attention
      if layer % 2
      else lambda config, name, encode_positions_fn: t5.t5_attention(config, name, None)
    )

  attention_fn = functools.cache(attention_fn)
  looped, plain = (
    t5.Transformer(
      cases.tiny_config(num_encoder_layers=4, num_decoder_layers=4, scan_layers=scan),
      **_FIELDS['rotary'],
      attention_fn=attention_fn,
    )
    for scan in (True, False)
  )
  batch = cases.tiny_batch()
  params = _random(plain, **batch)
  logits, expected = (
    cases.jit(functools.partial(module.apply, enable_dropout=False))({'params': params}, **batch)
    for module in (looped, plain)
  )
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_parameters_of_examples():
  own, rotary_names, norm_names = (
    _names(t5.Transformer(cases.tiny_config(), **fields), **cases.tiny_batch())
    for fields in ({}, *_FIELDS.values())
  )
  assert own - rotary_names == {
    'encoder/relpos_bias/rel_embedding',
    'decoder/relpos_bias/rel_embedding',
  }
  assert not rotary_names - own
  assert norm_names - own == {
    f'{layer}/{block}_norm/scale'
    for block in ('query', 'key')
    for layer in [f'encoder/layers_{i}/attention' for i in range(2)]
    + [
      f'decoder/layers_{i}/{kind}_attention'
      for i in range(3)
      for kind in ('self', 'encoder_decoder')
    ]
  }


@pytest.mark.parametrize('example', _FIELDS)
def test_layouts_convert(example):
  batch = cases.tiny_batch()
  configs = {layout: cases.tiny_config(param_layout=layout) for layout in ('t5', 'scalable_t5')}
  trees = {
    layout: _random(t5.Transformer(config, **_FIELDS[example]), **batch)
    for layout, config in configs.items()
  }
  if example == 'query_key_norm':  # which keeps T5's tables
    trees = {layout: _without_tables(tree) for layout, tree in trees.items()}
  for layout, other in (('t5', 'scalable_t5'), ('scalable_t5', 't5')):
    converted = param_layouts.convert(trees[layout], layout, other, configs[other])
    shapes = {name: leaf.shape for name, leaf in tree_utils.named_leaves(converted)}
    assert shapes == {name: leaf.shape for name, leaf in tree_utils.named_leaves(trees[other])}
    planned = layout_plan.plan(
      dict(tree_utils.named_leaves(trees[layout])), other, relpos_per_layer=False, heads=2
    )
    assert {name: array.shape for name, array in planned.items()} == shapes
    restored = param_layouts.convert(converted, other, layout, configs[layout])
    jax.tree.map(np.testing.assert_array_equal, restored, trees[layout])


def _without_tables(tree):
  """Returns parameters without T5's tables, whose form depends on the layout."""
  return tree_utils.unflatten_dict(
    {name: leaf for name, leaf in tree_utils.named_leaves(tree) if 'relpos_bias' not in name}
  )


@pytest.mark.parametrize('example', _FIELDS)
def test_one_gin_binding_is_enough(example, monkeypatch):
  """With the files that the page shows."""
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'extending.md'
  (shown,) = re.findall(
    rf'`{example}.gin`:\n\n```gin\n(.*?)```', page.read_text(encoding='utf-8'), re.DOTALL
  )
  shown = gin_syntax.read_text(shown + "MODEL_DIR = 'runs/x'\n", 'own.gin', is_flag=False)
  configuration = gin_utils.load('t5x_lite.apps.train.train', [shown])
  module = configuration.argument('model').module
  own = _names(t5.Transformer(module.config), **cases.tiny_batch())
  assert _names(module, **cases.tiny_batch()) != own
  gin.clear_config()
