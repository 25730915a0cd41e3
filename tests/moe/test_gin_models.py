"""The gin files of sparse models: their sizes, and the models that they build."""

import math

import gin
import jax
import jax.numpy as jnp
import pytest

from moe import models
from moe import routing
from t5x_lite import train_state
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from tests.repository.gin_model_files import load_model

# Size, layers of a stack, sparse ones, experts, input kernels of a block, hidden units; the dense model's parameters.
_T5 = {
  'tiny': (8, 2, 1, 4, 2, 16, 518_240),
  'small': (512, 8, 4, 16, 2, 1024, 76_961_152),
  'base': (768, 12, 6, 32, 2, 2048, 247_577_856),
  'large': (1024, 24, 12, 32, 2, 2816, 783_150_080),
  'xl': (2048, 24, 12, 32, 2, 5120, 2_849_757_184),
}
_SIZES = {
  f'{kind}_choose_{size}': sizes for kind in ('tokens', 'experts') for size, sizes in _T5.items()
}
_SIZES['switch_base'] = (768, 12, 6, 128, 1, 3072, 222_903_552)
_SIZES['switch_large'] = (1024, 24, 12, 128, 1, 4096, 737_668_096)
_SIZES['st_moe_base'] = (768, 12, 3, 32, 2, 2048, 247_577_856)


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def test_every_file_is_here():
  dense = ('t5_', 'byt5_', 'mt5_', 'umt5_', 'codet5', 'madlad400_', 'flan_', 'decoder_only')
  dense += ('encoder_decoder', 'sparse_')
  found = {
    name.removeprefix('models/').removesuffix('.gin')
    for name in gin_syntax.packaged_files('models')
  }
  assert {name for name in found if not name.startswith(dense)} == set(_SIZES)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.full)
    if name.endswith(('choose_base', '_large', '_xl'))
    else name
    for name in sorted(_SIZES)
  ],
)
def test_dimensions(name):
  model = load_model(name)
  assert isinstance(model, models.MoeEncoderDecoderModel)
  width, depth, num_sparse, num_experts, num_inputs, hidden, dense = _SIZES[name]
  config = model.module.config
  assert (config.emb_dim, config.num_encoder_layers, config.num_decoder_layers) == (
    width,
    depth,
    depth,
  )
  tokens = [jnp.ones((1, 8), jnp.int32)] * 3
  network = t5.Transformer(config, model.module.feed_forward_fn)
  shapes = jax.eval_shape(
    lambda key: network.init(key, *tokens, enable_dropout=False), jax.random.key(0)
  )['params']
  kernel = (num_inputs + 1) * width * hidden
  expected = dense + 2 * num_sparse * ((num_experts - 1) * kernel + width * num_experts)
  if name.startswith(
    'switch'
  ):  # The dense model of this name has the same width and another hidden size: T5 1.0's.
    assert hidden == {'switch_base': 3072, 'switch_large': 4096}[name]
  if name == 'st_moe_base':
    sparse_norms = width
    expected += 2 * num_sparse * (kernel + sparse_norms)
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == expected


def test_experts_choose_in_the_encoder_alone():
  feed_forward_fn = load_model('experts_choose_tiny').module.feed_forward_fn
  assert isinstance(feed_forward_fn.block.router, routing.ExpertsChooseRouter)
  assert isinstance(feed_forward_fn.decoder_block.router, routing.TokensChooseRouter)
  assert feed_forward_fn.decoder_block.train_capacity_factor is None


def test_switch_routes_as_published():
  module = load_model('switch_base').module
  assert module.custom_blocks == ()
  block = module.feed_forward_fn.block
  assert (
    block.router.num_selected == 1
    and not block.router.normalize_gates
    and block.router.jitter_noise == 0.01
  )
  assert (block.train_capacity_factor, block.eval_capacity_factor) == (1.25, 2.0)


def test_decoder_only():
  model = load_model(
    'decoder_only_tiny',
    'sparse_decoder_only',
    NUM_DECODER_LAYERS='4',
    NUM_DECODER_SPARSE_LAYERS='2',
    NUM_EXPERTS='4',
    ROUTER='@moe.TokensChooseRouter()',
    INPUTS_BIDIRECTIONAL_ATTENTION='True',
  )
  assert isinstance(model, models.MoeDecoderOnlyModel) and isinstance(
    model.module, decoder_only.DecoderWrapper
  )
  shapes = jax.eval_shape(
    lambda key: model.get_initial_variables(
      key, {'decoder_input_tokens': (1, 8), 'decoder_causal_attention': (1, 8)}
    ),
    jax.random.key(0),
  )
  layers = shapes['params']['decoder']
  assert [name for name in layers if 'expert' in layers[name].get('mlp', {})] == [
    'layers_1',
    'layers_3',
  ]
  assert layers['layers_1']['mlp']['expert']['wo']['kernel'].shape == (4, 16, 8)


@pytest.mark.parametrize('router', ['SinkhornRouter', 'HashRouter', 'ExpertsChooseRouter'])
def test_other_routers_know_the_number_of_experts(router):
  model = load_model(
    'tokens_choose_tiny',
    ROUTER=f'@moe.{router}()',
    NUM_DECODER_SPARSE_LAYERS='0',
    TRAIN_EXPERT_CAPACITY_FACTOR='2.0',
    EVAL_EXPERT_CAPACITY_FACTOR='2.0',
  )
  block = model.module.feed_forward_fn.block
  assert (
    type(block.router) is getattr(routing, router)
    and block.router.num_experts == block.num_experts == 4
  )


@pytest.mark.parametrize('optimizer', ['adafactor', 'multi_optimizer', 'multi_optimizer_by_label'])
def test_an_optimizer_file_may_follow_a_sparse_model(optimizer):
  """They replace the bindings of the factor rules, which must know the dims of experts."""
  model = load_model('tokens_choose_tiny', optimizer=optimizer)
  shapes = {'encoder_input_tokens': (1, 8), 'decoder_input_tokens': (1, 4)}

  def make(key):
    return train_state.FlaxOptimTrainState.create(
      model.optimizer_def, model.get_initial_variables(key, shapes)
    )

  state = jax.eval_shape(make, jax.random.key(0))
  assert any(
    'expert' in jax.tree_util.keystr(path)
    for path, _ in jax.tree.leaves_with_path(state.param_states)
  )


def test_a_dry_run_traces_the_steps(tmp_path, capsys):
  """A capacity of training that drops everything: making the parameters does not show it."""
  flags = (
    '--gin_file=recipes/keyword_cloze_moe.gin',
    "--gin.DATA_SOURCE='builtin'",
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.EVAL_EXPERT_CAPACITY_FACTOR=2.0',
    '--gin.moe.SparseBlock.min_expert_capacity=0',
    '--dry_run',
  )
  assert cli.main(['train', *flags, '--gin.TRAIN_EXPERT_CAPACITY_FACTOR=1e-4']) == 2
  assert 'gives each expert at least one slot' in capsys.readouterr().err
