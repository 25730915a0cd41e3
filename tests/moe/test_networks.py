"""Sparse networks: layouts, loops and rematerialization with all that is sown, decoding, padding, meshes."""

import functools

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import gin
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import networks
from moe import routing
from moe.layers import MoeLayer
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.networks import decoder_only
from t5x_lite.networks import remat
from t5x_lite.networks import t5
from tests.networks import network_cases as cases
from tests.networks.test_remat import count_flops

_CAPACITIES = dict(train_capacity_factor=1.5, eval_capacity_factor=2.0)


def _block(**fields):
  router = routing.TokensChooseRouter(
    4, **{'num_selected': 2, 'normalize_gates': True} | fields.pop('router', {})
  )
  return networks.SparseBlock(**dict(num_experts=4, router=router, expert_dim=12) | fields)


def _transformer(block, config=None, encoder=1, decoder=1, **layout):
  return networks.sparse_transformer(
    config or cases.tiny_config(num_decoder_layers=2),
    block,
    num_encoder_sparse_layers=encoder,
    num_decoder_sparse_layers=decoder,
    **layout,
  )


def _decoder_only(block, num_sparse_layers=1, layout='mixed', **fields):
  config = decoder_only.TransformerConfig(
    **dict(
      vocab_size=40, emb_dim=16, num_heads=2, num_layers=2, head_dim=8, mlp_dim=24, dropout_rate=0.0
    )
    | fields
  )
  return networks.sparse_decoder_only(
    config, block, num_decoder_sparse_layers=num_sparse_layers, decoder_layout=layout
  )


def _batch_of(module, **sizes):
  batch = cases.tiny_batch(**sizes)
  if isinstance(module, decoder_only.DecoderWrapper):
    del batch['encoder_input_tokens']
  return batch


_BOTH_NETWORKS = pytest.mark.parametrize(
  'network', ['decoder_only', pytest.param('encoder_decoder', marks=pytest.mark.full)]
)


def _init(module, batch):
  """Return random parameters, without compiling an initialisation."""
  shapes = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes['params']
  )


# ---- Layouts --------------------------------------------------------------------------------------------------------


def _is_sparse(layer, num_layers, number, layout):
  """T5X's rule for one layer."""
  if layout == 'bottom':
    return layer < number
  if layout == 'top':
    return layer >= num_layers - number
  if layout == 'middle':
    return num_layers - number <= 2 * layer < num_layers + number
  return number > 0 and layer % (num_layers // number) == num_layers // number - 1


def test_layouts_are_those_of_t5x():
  for layout in networks.LAYOUTS:
    for num_layers in range(1, 14):
      for number in range(num_layers + 1):
        if layout == 'mixed' and number and num_layers % number:
          with pytest.raises(ConfigError, match="must be 0 or a divisor of the .*'every_<n>'"):
            networks.sparse_layers(layout, num_layers, number)
          continue
        found = networks.sparse_layers(layout, num_layers, number)
        assert found == tuple(
          i for i in range(num_layers) if _is_sparse(i, num_layers, number, layout)
        )
        assert len(found) == number
  assert networks.sparse_layers('every_3', 7, None) == (2, 5)


@pytest.mark.parametrize(
  'layout, number, message',
  [
    ('botom', 1, "Did you mean 'bottom'"),
    ('every_0', None, "layout` must be one of .*got 'every_0'"),
    ('every_2', 3, "must be None with 'every_2', got 3"),
    ('top', 5, r'num_sparse_layers` must be an integer in \[0, 4\], got 5'),
    ('top', None, 'num_sparse_layers` .* got None'),
  ],
)
def test_layouts_that_do_not_fit_raise(layout, number, message):
  with pytest.raises(ConfigError, match=message):
    networks.sparse_layers(layout, 4, number)


def test_layers_are_sparse_where_the_layout_says():
  config = cases.tiny_config(num_encoder_layers=4, num_decoder_layers=3)
  module = _transformer(
    _block(), config, encoder=2, decoder=None, encoder_layout='middle', decoder_layout='every_3'
  )
  params = _init(module, cases.tiny_batch())

  def is_sparse(stack, i):
    return 'router' in params[stack][f'layers_{i}']['mlp']

  assert [is_sparse('encoder', i) for i in range(4)] == [False, True, True, False]
  assert [is_sparse('decoder', i) for i in range(3)] == [False, False, True]
  assert params['encoder']['layers_1']['mlp']['expert']['wi_1']['kernel'].shape == (4, 16, 12)


def test_without_sparse_layers_the_network_is_the_dense_one():
  batch, config = cases.tiny_batch(), cases.tiny_config()
  params = cases.random_params(config)
  programs = []
  for module in (t5.Transformer(config), _transformer(_block(), config, encoder=0, decoder=0)):

    def apply(params, module=module):
      return module.apply({'params': params}, **batch, enable_dropout=False)

    programs.append(str(jax.make_jaxpr(apply)(params)))
  assert programs[0] == programs[1]


def test_norms_next_to_experts_add_the_epsilon_of_the_network():
  config = cases.tiny_config(num_decoder_layers=2, layer_norm_epsilon=1e-3)
  for module in (_transformer(_block(), config), _decoder_only(_block(), layer_norm_epsilon=1e-3)):
    found = cases.norm_epsilons(module, _batch_of(module))
    assert len(found) > 4 and set(found) == {1e-3}


def test_blocks_are_equal_if_their_options_are():
  layout = dict(num_encoder_layers=2, num_encoder_sparse_layers=1)
  first, second = (
    networks.SparseFeedForward(block=_block(**_CAPACITIES), **layout) for _ in range(2)
  )
  assert first == second and hash(first) == hash(second)
  assert first != networks.SparseFeedForward(block=_block(), **layout)
  assert first('encoder', 1) == second('encoder', 1) and hash(first('encoder', 1)) == hash(
    second('encoder', 1)
  )
  assert (
    first('encoder', 0) == second('encoder', 0) and first('decoder', 0) is t5.dense_feed_forward
  )
  lists = networks.SparseBlock(num_experts=2, expert_activations=['gelu', 'linear'])
  assert lists == networks.SparseBlock(
    num_experts=2, expert_activations=('gelu', 'linear')
  ) and hash(lists)


@pytest.mark.parametrize(
  'options, option',
  [
    ({}, None),
    ({'router': routing.TokensChooseRouter(2, use_bias=True, jitter_noise=0.1)}, None),
    ({'router': routing.TokensChooseRouter(2, num_selected=2)}, 'router'),
    ({'router': routing.TokensChooseRouter(2, normalize_gates=True)}, 'router'),
    ({'router': routing.TokensChooseRouter(2, score='sigmoid')}, 'router'),
    ({'router': routing.HashRouter(2)}, 'router'),
    ({'expert_activations': ('relu',)}, 'expert_activations'),
    ({'expert': t5.dense_feed_forward, **_CAPACITIES}, 'expert'),
  ],
)
def test_blocks_are_custom_by_the_options_that_switch_transformers_lack(options, option):
  config = cases.tiny_config()
  block = networks.SparseBlock(num_experts=2, **options)
  custom = () if option is None else (f'moe.SparseBlock.{option}',)
  layout = dict(num_encoder_sparse_layers=1, extra_mlp=True)
  assert networks.sparse_transformer(config, block, **layout).custom_blocks == custom
  assert t5.Transformer(config, lambda stack, layer: block).custom_blocks == custom


def test_options_are_the_networks_unless_said():
  config = cases.tiny_config(dropout_rate=0.25, dtype='bfloat16')
  layer = networks.SparseBlock(num_experts=4)(config, 'mlp')
  assert (layer.expert.dim, layer.expert.activations, layer.expert.dropout_rate) == (
    24,
    ('gelu', 'linear'),
    0.25,
  )
  assert layer.dtype == 'bfloat16' and layer.router.num_experts == 4
  layer = _block(expert_activations=('relu',), expert_dropout_rate=0.0, expert_bias=True)(
    config, 'mlp'
  )
  assert (
    layer.expert.activations == ('relu',)
    and layer.expert.dropout_rate == 0
    and layer.expert.use_bias
  )


class _Block(nn.Module):
  """An expert of a test's own."""

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    return x * self.param('scale', nn.initializers.ones, (x.shape[-1],))


def test_experts_of_another_kind_are_built_by_a_factory():
  options = dict(num_experts=4, expert=lambda config, name: _Block(name=name), **_CAPACITIES)
  module = _transformer(networks.SparseBlock(**options))
  params = _init(module, cases.tiny_batch())
  assert params['encoder']['layers_1']['mlp']['expert']['scale'].shape == (4, 16)
  with pytest.raises(ConfigError, match='`SparseBlock.expert` must be None with expert_dim'):
    networks.SparseBlock(expert_dim=3, **options)


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: _block(dispatch='groupd'), "Did you mean 'grouped'"),
    (
      lambda: networks.SparseBlock(num_experts=3, router=routing.TokensChooseRouter(4)),
      'must be num_experts=3, got 4',
    ),
    (
      lambda: networks.SparseFeedForward(block=_block, num_encoder_layers=2),
      r'block` must be a SparseBlock, .*@moe.SparseBlock\(',
    ),
    (
      lambda: networks.SparseFeedForward(
        block=_block(), num_encoder_layers=2, num_encoder_sparse_layers=3
      ),
      'got 3',
    ),
    (
      lambda: networks.SparseFeedForward(
        block=_block(), num_encoder_layers=2, encoder_layout='mixd'
      ),
      "mean 'mixed'",
    ),
  ],
)
def test_options_are_checked_before_a_network_is_built(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


@pytest.mark.parametrize(
  'num_sparse_layers', [3, 1]
)  # With one, the network's four layers are all dense.
def test_a_layout_for_another_depth_raises(num_sparse_layers):
  fn = networks.SparseFeedForward(
    block=_block(),
    num_encoder_layers=6,
    num_decoder_layers=3,
    num_encoder_sparse_layers=num_sparse_layers,
  )
  module = t5.Transformer(cases.tiny_config(num_encoder_layers=4), fn)
  with pytest.raises(
    ConfigError, match='num_encoder_layers` must be 4, the num_encoder_layers of the network, got 6'
  ):
    jax.eval_shape(lambda key: module.init(key, **cases.tiny_batch()), jax.random.key(0))


def test_experts_that_choose_in_a_decoder_are_warned_of(caplog):
  choosing = networks.SparseBlock(
    num_experts=4, router=routing.ExpertsChooseRouter(4, parent=None), **_CAPACITIES
  )
  depths = dict(num_encoder_layers=2, num_decoder_layers=2, num_encoder_sparse_layers=1)
  networks.SparseFeedForward(block=choosing, **depths)
  networks.SparseFeedForward(
    block=choosing, decoder_block=_block(), num_decoder_sparse_layers=1, **depths
  )
  assert not caplog.messages
  networks.SparseFeedForward(block=choosing, num_decoder_sparse_layers=1, **depths)
  assert 'depends on later tokens' in caplog.text and 'decoder_block' in caplog.text


def test_a_router_declares_whether_decoders_are_warned_of_it(caplog):

  class Custom(routing.TokensChooseRouter):
    uses_later_tokens = 'never'

  layers = dict(num_decoder_layers=2, num_decoder_sparse_layers=1)
  for uses, text in (
    ('never', ''),
    ('training', 'but not in evaluation and decoding'),
    ('always', 'depends on later tokens'),
  ):
    Custom.uses_later_tokens = uses
    caplog.clear()
    networks.SparseFeedForward(
      block=networks.SparseBlock(num_experts=4, router=Custom(4, parent=None)), **layers
    )
    assert text in caplog.text and bool(caplog.messages) == bool(text) == ('Custom' in caplog.text)
  assert routing.SinkhornRouter(4, parent=None).uses_later_tokens == 'training'


def test_gin_builds_a_sparse_network():
  """Two networks of one configuration have equal layers, so that they run in loops."""
  gin.parse_config("""
from __gin__ import dynamic_registration
import moe
from t5x_lite.networks import t5 as network

NUM_EXPERTS = 8
NUM_ENCODER_LAYERS = 4
NUM_DECODER_LAYERS = 2
NETWORK = @network.Transformer()
network.Transformer:
  config = @network.T5Config()
  feed_forward_fn = @moe.SparseFeedForward()
network.T5Config:
  vocab_size = 40
  num_encoder_layers = %NUM_ENCODER_LAYERS
  num_decoder_layers = %NUM_DECODER_LAYERS
moe.SparseFeedForward:
  block = @moe.SparseBlock()
  num_encoder_layers = %NUM_ENCODER_LAYERS
  num_decoder_layers = %NUM_DECODER_LAYERS
  num_encoder_sparse_layers = 2
  decoder_layout = 'every_2'
moe.SparseBlock:
  num_experts = %NUM_EXPERTS
  router = @moe.TokensChooseRouter()
  expert_activations = ['gelu', 'linear']
moe.TokensChooseRouter:
  num_experts = %NUM_EXPERTS
  num_selected = 2
""")
  try:
    first, second = (
      gin.query_parameter('NETWORK/macro.value').scoped_configurable_fn() for _ in range(2)
    )
  finally:
    gin.clear_config()
  assert first.feed_forward_fn == second.feed_forward_fn
  blocks = [first.feed_forward_fn('encoder', i)(first.config, 'mlp') for i in range(4)]
  assert [isinstance(block, MoeLayer) for block in blocks] == [False, True] * 2
  layer = first.feed_forward_fn('decoder', 1)(first.config, 'mlp')
  assert isinstance(layer, MoeLayer) and layer.router.num_selected == 2 and layer.num_experts == 8


# ---- Loops ----------------------------------------------------------------------------------------------------------


def _step(module, batch, mutable):
  """Return a function of (params, router state, key): ((loss, collections), gradients)."""

  def loss_fn(params, state, key):
    streams = dict(zip(('dropout', 'jitter'), jax.random.split(key), strict=True))
    logits, collections = module.apply(
      {'params': params, **state}, **batch, rngs=streams, mutable=mutable
    )
    weights = (batch['decoder_target_tokens'] > 0)[..., None]
    sown = tree_utils.flatten_dict(tree_utils.to_dict(collections['intermediates']))
    losses = [
      value[0] for name, value in sown.items() if name.endswith(('auxiliary_loss', 'router_z_loss'))
    ]
    return jnp.mean(jnp.square(logits) * weights) + 0.1 * sum(losses), collections

  return lambda params, state, key: jax.value_and_grad(loss_fn, has_aux=True)(params, state, key)


@_BOTH_NETWORKS
def test_loops_and_remat_keep_all_losses_metrics_and_states(network):
  block = _block(router=dict(jitter_noise=0.1, bias_update_rate=0.01))
  mutable = ['intermediates', 'router_state', 'routing']

  def run(is_stacked=False, **fields):
    if network == 'decoder_only':
      module = _decoder_only(block, 2, num_layers=4, dropout_rate=0.1, **fields)
    else:
      config = cases.tiny_config(
        num_encoder_layers=4, num_decoder_layers=2, dropout_rate=0.1, **fields
      )
      module = _transformer(block, config, encoder=2, decoder=1, decoder_layout='top')
    batch = _batch_of(module)
    variables = jax.eval_shape(
      lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
    )
    assert set(variables) == {'params', 'params_axes', 'router_state'}
    params = _init(module, batch)
    state = {
      'router_state': jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables['router_state']
      )
    }
    groups = module.scanned_layers if is_stacked else {}
    stacks = LayerStacks(tuple((stack, group) for stack in groups for group in groups[stack]))
    result, grads = cases.jit(_step(module, batch, mutable))(
      stacks.stack(params), state, jax.random.key(1)
    )
    assert is_stacked == (jax.tree.structure(grads) != jax.tree.structure(params))
    return result, stacks.unstack(grads)

  (loss, collections), grads = run()
  sown = collections['intermediates']
  expected = (
    {'decoder/layers_1', 'decoder/layers_3'}
    if network == 'decoder_only'
    else {'encoder/layers_1', 'encoder/layers_3', 'decoder/layers_1'}
  )
  assert {f'{stack}/{layer}' for stack, layers in sown.items() for layer in layers} == expected
  assert all(len(layer['mlp']) == 11 for layers in sown.values() for layer in layers.values())
  moved = collections['router_state']['decoder']['layers_1']['mlp']['router']['bias']
  np.testing.assert_allclose(np.abs(moved).max(), 0.01, rtol=1e-5)
  policies = ('full',) if network == 'decoder_only' else remat.REMAT_POLICIES
  for fields in (
    dict(
      scan_layers=True,
      remat_policy=policy,
      remat_offload=remat.RESULT_NAMES if policy == 'offload' else (),
    )
    for policy in policies
  ):
    # Stacked or single layers, one of both with each policy.
    (got_loss, got), got_grads = run(is_stacked=fields['remat_policy'] == 'full', **fields)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    cases.assert_trees_close(got['intermediates'], sown, 1e-5)
    cases.assert_trees_close(got['router_state'], collections['router_state'], 1e-6)
    cases.assert_trees_close(got['routing'], collections['routing'], 1e-5)
    cases.assert_trees_close(got_grads, grads, 1e-4)


@pytest.mark.parametrize(
  'dispatch',
  [
    'grouped',
    pytest.param('capacity', marks=pytest.mark.full),
    pytest.param('einsum', marks=pytest.mark.full),
  ],
)
def test_policies_of_remat_store_results_of_experts(dispatch):
  num_layers = 4
  block = _block(
    dispatch=dispatch, expert_dim=128, **({} if dispatch == 'grouped' else _CAPACITIES)
  )
  batch = {
    name: jax.ShapeDtypeStruct((4, 32), jnp.int32)
    for name in ('decoder_input_tokens', 'decoder_target_tokens')
  }

  def trace(policy, in_loop):
    module = _decoder_only(
      block,
      num_layers,
      num_layers=num_layers,
      remat_policy=policy,
      scan_layers=in_loop,
      param_layout='scalable_t5' if in_loop else 't5',
    )
    variables = jax.eval_shape(
      lambda key, batch: module.init(key, **batch, enable_dropout=False), jax.random.key(0), batch
    )

    def loss(params, batch):
      return jnp.sum(module.apply({'params': params}, **batch, enable_dropout=False))

    return jax.jit(jax.grad(loss)).trace(variables['params'], batch)

  def temporaries(traced):
    return traced.lower().compile().memory_analysis().temp_size_in_bytes

  policies = ('none', 'minimal', 'save_attention', 'save_dots_except_mlp', 'full')
  programs = {policy: trace(policy, True) for policy in policies}
  flops = {policy: count_flops(program.jaxpr.jaxpr) for policy, program in programs.items()}
  assert sorted(policies, key=flops.get) == list(policies), flops
  # 'none' computes nothing again, and 'minimal' no experts.
  assert flops['none'] == count_flops(trace('none', False).jaxpr.jaxpr)
  projections = 2 * num_layers * 4 * 32 * 2 * 16 * 128
  assert flops['full'] - flops['minimal'] >= projections, flops
  assert dispatch == 'einsum' or flops['minimal'] - flops['none'] < 0.5 * projections, flops
  sizes = [temporaries(programs[policy]) for policy in ('none', 'minimal', 'full')]
  assert sizes[0] > sizes[1] > 1.2 * sizes[2], sizes
  # Buffers of rows of all layers are not made at the same time.
  assert temporaries(trace('full', False)) < 0.5 * temporaries(trace('none', False))


def test_stacked_parameters_need_layers_that_are_all_sparse():
  batch, config = (
    cases.tiny_batch(),
    cases.tiny_config(param_layout='scalable_t5', scan_layers=True),
  )
  with pytest.raises(ConfigError, match="Set param_layout='t5'"):
    _init(_transformer(_block(), config, encoder=1, decoder=3), batch)
  module = _transformer(_block(), config, encoder=2, decoder=3)
  variables = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  axes = nn_partitioning.get_axis_names(variables['params_axes'])['encoder']['encoder']['mlp']
  assert tuple(axes['expert']['wo']['kernel']) == ('expert', 'layers', 'expert_mlp', 'embed')
  assert variables['params']['encoder']['encoder']['mlp']['expert']['wo']['kernel'].shape == (
    4,
    2,
    12,
    16,
  )
  _, sown = cases.jit(
    lambda params: module.apply(
      {'params': params}, **batch, enable_dropout=False, mutable=['intermediates']
    )
  )(_init(module, batch))
  assert sown['intermediates']['decoder']['decoder']['mlp']['expert_load'][0].shape == (3, 4)


# ---- Decoding and padding -------------------------------------------------------------------------------------------


def test_cached_decoding_of_the_encoder_decoder_equals_one_pass():
  module = _transformer(_block(shared_expert_dim=5))
  batch = cases.tiny_batch(decoder_length=3)
  inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
  params = _init(module, batch)
  batch['decoder_target_tokens'] = jnp.ones_like(tokens)

  @cases.jit
  def begin(params):
    whole = module.apply({'params': params}, **batch, enable_dropout=False)
    encoded = module.apply({'params': params}, inputs, enable_dropout=False, method='encode')
    _, variables = module.apply(
      {'params': params}, encoded, inputs, 3, method='init_cache', mutable=['cache', 'cross_cache']
    )
    return whole, encoded, variables

  @cases.jit
  def step(params, variables, encoded, token):
    return module.apply(
      {'params': params, **variables},
      encoded,
      inputs,
      token,
      token,
      decode=True,
      enable_dropout=False,
      method='decode',
      mutable=['cache'],
    )

  whole, encoded, variables = begin(params)
  steps = []
  for i in range(3):
    logits, updated = step(params, variables, encoded, tokens[:, i : i + 1])
    variables = {**variables, **updated}
    steps.append(logits)
  steps = np.concatenate(steps, axis=1)
  np.testing.assert_allclose(steps, whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())


@pytest.mark.full  # by default, test_decoding.py has prompts and steps
def test_prompts_and_steps_of_the_decoder_only_network_equal_one_pass():
  module = _decoder_only(_block())
  tokens = jnp.asarray(np.random.default_rng(0).integers(1, 40, (3, 6)), jnp.int32)
  params = _init(module, dict(decoder_input_tokens=tokens, decoder_target_tokens=tokens))
  lengths = jnp.array([4, 2, 3])

  @cases.jit
  def run(params):
    apply = functools.partial(module.apply, enable_dropout=False)
    whole = apply({'params': params}, tokens, tokens)
    prompt, updated = apply(
      {'params': params},
      tokens[:, :4],
      tokens[:, :4],
      prefill=True,
      prefill_lengths=lengths,
      max_decode_length=6,
      mutable=['cache'],
    )
    following = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
    step, _ = apply(
      {'params': params, **updated}, following, following, decode=True, mutable=['cache']
    )
    return whole, prompt, step

  whole, prompt, step = (np.asarray(x) for x in run(params))
  for row, length in enumerate(np.asarray(lengths)):
    np.testing.assert_allclose(
      prompt[row, :length], whole[row, :length], rtol=1e-5, atol=1e-5 * np.abs(whole).max()
    )
    np.testing.assert_allclose(
      step[row, 0], whole[row, length], rtol=1e-5, atol=1e-5 * np.abs(whole).max()
    )


@pytest.mark.full  # by default, test_layers.py has padding in a layer
def test_padding_changes_nothing_in_a_sparse_network():
  module = _transformer(
    _block(),
    cases.tiny_config(num_decoder_layers=1, num_encoder_layers=1, relpos_bias_tables='per_layer'),
  )
  short = cases.tiny_batch()
  params = _init(module, short)
  apply = cases.jit(
    lambda params, batch: module.apply(
      {'params': params}, **batch, enable_dropout=False, mutable=['intermediates']
    )
  )
  logits, sown = apply(params, short)
  longer = {key: jnp.pad(value, ((0, 0), (0, 3))) for key, value in short.items()}
  padded, padded_sown = apply(params, longer)
  real = np.asarray(short['decoder_target_tokens']) > 0
  np.testing.assert_allclose(padded[:, :-3][real], logits[real], rtol=1e-4, atol=1e-5)
  for stack in ('encoder', 'decoder'):
    load, padded_load = (
      tree['intermediates'][stack]['layers_0']['mlp']['expert_load'][0]
      for tree in (sown, padded_sown)
    )
    np.testing.assert_allclose(padded_load, load, rtol=1e-6)


def test_a_second_dense_sub_layer_as_st_moe_has():
  params = _init(_transformer(_block(), extra_mlp=True), cases.tiny_batch())
  assert set(params['encoder']['layers_1']['extra_mlp']) == {'wi_0', 'wi_1', 'wo'}
  assert 'extra_mlp' not in params['encoder']['layers_0']


# ---- Meshes ---------------------------------------------------------------------------------------------------------

_EXPERT_RULES = (('expert', 'data'), ('expert_mlp', 'model'), ('unmodeled', None))


@pytest.mark.full  # The short run has whole models on meshes in test_mesh_invariance.
@pytest.mark.parametrize(
  'network, fields',
  [
    ('decoder_only', {}),
    ('encoder_decoder', {}),
    ('decoder_only', dict(remat_policy='minimal')),
    ('decoder_only', dict(remat_policy='full', scan_layers=True)),
    ('decoder_only', dict(remat_policy='minimal', scan_layers=True)),
  ],
)
def test_sharded_networks_compute_the_same_as_one_device(network, fields, shape=(4, 2)):
  block = _block(router=dict(jitter_noise=0.1))
  if network == 'decoder_only':
    module = _decoder_only(block, 2, num_layers=4, dropout_rate=0.1, **fields)
  else:
    module = _transformer(block, cases.tiny_config(dropout_rate=0.1, num_decoder_layers=2))
  batch = _batch_of(module, batch=8)
  variables = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  params = _init(module, batch)
  step = _step(module, batch, ['intermediates'])
  (loss, collections), grads = cases.jit(step)(params, {}, jax.random.key(1))
  mesh = jax.make_mesh(shape, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  rules = (*partitioning.standard_logical_axis_rules(), *_EXPERT_RULES)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(rules):
    specs = nn_partitioning.logical_to_mesh(
      nn_partitioning.get_axis_names(variables['params_axes'])
    )

    def place(leaf, spec):
      return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    flat_specs = tree_utils.flatten_dict(tree_utils.to_dict(specs))
    sharded = tree_utils.map_with_names(lambda name, leaf: place(leaf, flat_specs[name]), params)
    wo = sharded['decoder']['layers_1']['mlp']['expert']['wo']['kernel']
    assert wo.sharding.shard_shape(wo.shape) == (4 // shape[0], 12 // shape[1], 16)
    (got_loss, got), got_grads = cases.jit(step)(sharded, {}, jax.random.key(1))
  np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
  cases.assert_trees_close(got['intermediates'], collections['intermediates'], 1e-5)
  cases.assert_trees_close(got_grads, grads, 1e-5)
