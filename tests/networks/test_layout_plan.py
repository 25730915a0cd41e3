"""The plan of a conversion gives the result of `param_layouts.convert`, one array at a time."""

import dataclasses

import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from t5x_lite.networks import layout_plan
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5

_TABLE = 'relpos_bias/rel_embedding'


def _random_params(rng, config):
  """Return flat parameters in the layout 't5' for `config`, without code of the package."""
  width, joined = config.emb_dim, config.num_heads * config.head_dim
  flat = {'token_embedder/embedding': (config.vocab_size, width)}
  for stack, num_layers in (
    ('encoder', config.num_encoder_layers),
    ('decoder', config.num_decoder_layers),
  ):
    flat[f'{stack}/{stack}_norm/scale'] = (width,)
    if not config.relpos_per_layer:
      flat[f'{stack}/{_TABLE}'] = (config.num_heads, config.num_relpos_buckets)
    for i in range(num_layers):
      layer = f'{stack}/layers_{i}'
      for attention in (
        ('attention',) if stack == 'encoder' else ('self_attention', 'encoder_decoder_attention')
      ):
        flat |= {
          f'{layer}/{attention}/{name}/kernel': (width, joined)
          for name in ('query', 'key', 'value')
        }
        flat |= {
          f'{layer}/{attention}/out/kernel': (joined, width),
          f'{layer}/pre_{attention}_norm/scale': (width,),
        }
      flat |= {
        f'{layer}/mlp/wi/kernel': (width, config.mlp_dim),
        f'{layer}/mlp/wo/kernel': (config.mlp_dim, width),
      }
      if config.relpos_per_layer:
        flat[f'{layer}/{_TABLE}'] = (config.num_heads, config.num_relpos_buckets)
  return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in flat.items()}


def _random_config(rng, **kwargs):
  def number(low, high):
    return int(rng.integers(low, high))

  return t5.T5Config(
    vocab_size=number(5, 9),
    emb_dim=number(2, 7),
    num_heads=number(1, 5),
    num_encoder_layers=number(1, 5),
    num_decoder_layers=number(1, 4),
    head_dim=number(1, 4),
    mlp_dim=number(2, 6),
    num_relpos_buckets=8,
    max_relpos_distance=16,
    **kwargs,
  )


def _carry_out(plan, flat):
  reads = []

  def read(name):
    reads.append(name)
    return flat[name]

  result = {}
  for name, planned in plan.items():
    reads.clear()
    result[name] = planned.make(read)
    assert tuple(reads) == planned.inputs
    assert result[name].shape == planned.shape and result[name].dtype == planned.dtype
  return result


def _assert_equal(found, expected):
  assert set(found) == set(expected)
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize('seed', range(8))
def test_agrees_with_the_conversion_of_trees_both_ways(seed):
  rng = np.random.default_rng(seed)
  tables = ('per_stack', 'per_layer')[seed % 2]
  config = _random_config(rng, relpos_bias_tables=tables)
  flat = _random_params(rng, config)
  stacked_config = dataclasses.replace(config, param_layout='scalable_t5', relpos_bias_tables=None)
  expected = tree_utils.flatten_dict(
    param_layouts.convert(tree_utils.unflatten_dict(flat), 't5', 'scalable_t5', stacked_config)
  )
  stacked = _carry_out(layout_plan.plan(flat, 'scalable_t5', relpos_per_layer=True), flat)
  _assert_equal(stacked, expected)
  back = _carry_out(
    layout_plan.plan(stacked, 't5', relpos_per_layer=config.relpos_per_layer), stacked
  )
  _assert_equal(
    back,
    tree_utils.flatten_dict(
      param_layouts.convert(tree_utils.unflatten_dict(stacked), 'scalable_t5', 't5', config)
    ),
  )
  _assert_equal(back, flat)


def test_decoder_only():
  rng = np.random.default_rng(5)
  config = decoder_only.TransformerConfig(
    vocab_size=7,
    emb_dim=6,
    num_heads=3,
    num_layers=4,
    head_dim=2,
    mlp_dim=5,
    num_relpos_buckets=8,
    max_relpos_distance=16,
  )
  like = t5.T5Config(
    vocab_size=7,
    emb_dim=6,
    num_heads=3,
    num_encoder_layers=1,
    num_decoder_layers=4,
    head_dim=2,
    mlp_dim=5,
    num_relpos_buckets=8,
    max_relpos_distance=16,
  )
  flat = {
    name: leaf
    for name, leaf in _random_params(rng, like).items()
    if not name.startswith('encoder/') and 'encoder_decoder' not in name
  }
  stacked_config = dataclasses.replace(config, param_layout='scalable_t5')
  stacked = _carry_out(layout_plan.plan(flat, 'scalable_t5', relpos_per_layer=True), flat)
  _assert_equal(
    stacked,
    tree_utils.flatten_dict(
      param_layouts.convert(tree_utils.unflatten_dict(flat), 't5', 'scalable_t5', stacked_config)
    ),
  )
  _assert_equal(_carry_out(layout_plan.plan(stacked, 't5', relpos_per_layer=False), stacked), flat)


def test_the_same_layout_passes_everything_on():
  flat = _random_params(np.random.default_rng(0), _random_config(np.random.default_rng(0)))
  for name, array in _carry_out(layout_plan.plan(flat, 't5', relpos_per_layer=False), flat).items():
    assert array is flat[name]


def test_arrays_of_some_parameters_are_converted_alike():
  config = _random_config(np.random.default_rng(0), param_layout='scalable_t5')
  params = _random_params(np.random.default_rng(0), dataclasses.replace(config, param_layout='t5'))

  def plan_fn(shapes):
    return layout_plan.plan(shapes, 'scalable_t5', relpos_per_layer=True)

  scales = {name: array for name, array in params.items() if name.endswith('scale')}
  planned = layout_plan.plan_part(scales, params, plan_fn)
  entire = plan_fn(params)
  assert planned.keys() == {name for name in entire if name.endswith('scale')}
  _assert_equal(
    _carry_out(planned, scales),
    {name: entire[name].make(params.__getitem__) for name in planned},
  )
  del scales['encoder/layers_0/pre_attention_norm/scale']
  with pytest.raises(ConfigError, match='layers_1/pre_attention_norm/scale and of arrays of other'):
    layout_plan.plan_part(scales, params, plan_fn)


def test_tables_that_differ_do_not_become_one():
  rng = np.random.default_rng(1)
  config = dataclasses.replace(
    _random_config(rng, relpos_bias_tables='per_layer'), num_encoder_layers=2
  )
  flat = _random_params(rng, config)
  stacked = _carry_out(layout_plan.plan(flat, 'scalable_t5', relpos_per_layer=True), flat)
  assert layout_plan.layer_tables(stacked) == tuple(
    f'{s}/{s}/{_TABLE}' for s in ('encoder', 'decoder')
  )
  assert not layout_plan.tables_are_equal(stacked[f'encoder/encoder/{_TABLE}'])
  plan = layout_plan.plan(stacked, 't5', relpos_per_layer=False)
  with pytest.raises(ConfigError, match='must have equal tables of relative position biases'):
    plan[f'encoder/{_TABLE}'].make(stacked.__getitem__)


def test_layers_that_cannot_be_stacked_raise():
  rng = np.random.default_rng(2)
  config = dataclasses.replace(_random_config(rng), num_encoder_layers=3)
  flat = _random_params(rng, config)
  without = {
    name: leaf for name, leaf in flat.items() if not name.startswith('encoder/layers_1/mlp')
  }
  with pytest.raises(
    ConfigError, match=r"'encoder' must be equal .*got mlp/wi/kernel .* and None in layer 1"
  ):
    layout_plan.plan(without, 'scalable_t5', relpos_per_layer=True)
  without = {name: leaf for name, leaf in flat.items() if not name.startswith('encoder/layers_1/')}
  with pytest.raises(
    ConfigError, match=r"layers of 'encoder' must be equal .* and None in layer 1"
  ):
    layout_plan.plan(without, 'scalable_t5', relpos_per_layer=True)
  without = {name: leaf for name, leaf in flat.items() if not name.endswith(_TABLE)}
  with pytest.raises(ConfigError, match='The number of heads is not known'):
    layout_plan.plan(without, 'scalable_t5', relpos_per_layer=True)
  with pytest.raises(
    ConfigError, match="`to_layout` must be one of 't5', 'scalable_t5', got 'scalable'"
  ):
    layout_plan.plan(flat, 'scalable', relpos_per_layer=True)


def test_attention_with_other_projections_raises():
  """Keys and values of fewer heads, whose sizes divide by all heads."""
  config = t5.T5Config(
    vocab_size=8,
    emb_dim=4,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=4,
    mlp_dim=6,
  )
  stacked_config = dataclasses.replace(config, param_layout='scalable_t5')
  flat = _random_params(np.random.default_rng(0), config)
  name = 'encoder/layers_0/attention/value/kernel'
  fewer = flat | {name: flat[name][:, :4]}
  with pytest.raises(
    ConfigError, match=r"of 'encoder' must be matrices with the same .*value/kernel': \(4, 4\)"
  ):
    layout_plan.plan(fewer, 'scalable_t5', relpos_per_layer=True)
  with pytest.raises(
    ConfigError, match=r"kernel 'value' must have two dims, .* = 8, got shape \(4, 4\)"
  ):
    param_layouts.convert(tree_utils.unflatten_dict(fewer), 't5', 'scalable_t5', stacked_config)
  stacked = param_layouts.convert(
    tree_utils.unflatten_dict(flat), 't5', 'scalable_t5', stacked_config
  )
  kernel = stacked['encoder']['encoder']['attention']['value']
  kernel['kernel'] = kernel['kernel'].reshape(4, 1, 8)
  with pytest.raises(
    ConfigError, match=r"kernel 'value' must have three dims, .*got shape \(4, 8\)"
  ):
    param_layouts.convert(stacked, 'scalable_t5', 't5', config)


def test_dtypes_of_the_plan_are_those_of_the_result():
  rng = np.random.default_rng(3)
  flat = _random_params(rng, _random_config(rng))
  cast = {name: leaf.astype(np.float16) for name, leaf in flat.items()}
  plan = layout_plan.plan(cast, 'scalable_t5', relpos_per_layer=True)
  for planned in plan.values():
    assert (
      planned.make(lambda name: flat[name].astype(np.float16)).dtype == np.float16 == planned.dtype
    )
