"""Accumulated gradients of sparse models: loss, gradients, metrics and drops are those of the large batch."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import grouping
from moe import models
from moe import networks
from moe import routing
from moe.partitioner import MoePjitPartitioner
from t5x_lite import layers
from t5x_lite import metrics as metrics_lib
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.command_line import cli
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.trainer import train_step
from tests.networks import network_cases as cases

_FULL = pytest.mark.full
_EXPERTS = 4
_ROWS, _ENCODER_LENGTH, _LENGTH = 48, 16, 8
_TOKENS = functools.partial(routing.TokensChooseRouter, _EXPERTS, num_selected=2)
# Fewer places than choices, so that choices are dropped.
_CAPACITY = dict(
  train_capacity_factor=1.0, eval_capacity_factor=1.0, min_expert_capacity=1, dispatch='einsum'
)
_BLOCKS = {
  'tokens': dict(router=_TOKENS(normalize_gates=True)),
  'capacity': dict(router=_TOKENS(batch_prioritized_routing=True), **_CAPACITY),
  'padding uses capacity': dict(
    router=_TOKENS(padding_uses_capacity=True, ignore_padding_tokens=True), **_CAPACITY
  ),
  'bias': dict(router=_TOKENS(bias_update_rate=0.01, score='sigmoid'), **_CAPACITY),
  'experts': dict(router=routing.ExpertsChooseRouter(_EXPERTS), **_CAPACITY),
  'sinkhorn': dict(router=routing.SinkhornRouter(_EXPERTS), **_CAPACITY),
  'hash': dict(router=routing.HashRouter(_EXPERTS), **_CAPACITY),
}
# The means of these losses are over the tokens that are not padding.
_UNPADDED = {
  'unpadded': dict(router=_TOKENS(padding_in_losses=False)),
  'unpadded experts': dict(
    router=routing.ExpertsChooseRouter(_EXPERTS, padding_in_losses=False), **_CAPACITY
  ),
}


def _block(kind, **options):
  return networks.SparseBlock(
    **{
      'num_experts': _EXPERTS,
      'expert_dim': 12,
      'group_size': 16,
      **(_BLOCKS | _UNPADDED)[kind],
      **options,
    }
  )


class _Layers(nn.Module):
  """A layer for each kind of block, side by side: no choice depends on the rounding of another layer.

  `moe.models` does not know this network.
  """

  blocks: tuple

  @nn.compact
  def __call__(self, tokens, mask):
    config = cases.tiny_config(vocab_size=_ROWS * _LENGTH)
    x = layers.Embed(num_embeddings=config.vocab_size, features=config.emb_dim, name='embed')(
      tokens
    )
    x += sum(
      _Layer(block, name=f'layers_{i}')(x, mask, tokens) for i, block in enumerate(self.blocks)
    )
    return layers.DenseGeneral(config.vocab_size, kernel_axes=('embed', 'vocab'), name='logits')(x)


class _Layer(nn.Module):
  block: networks.SparseBlock

  @nn.compact
  def __call__(self, x, mask, tokens):
    return self.block(cases.tiny_config(), 'mlp')(x, mask, tokens)


class _Network(nn.Module):
  blocks: tuple

  def setup(self):
    self.decoder = _Layers(self.blocks)

  def __call__(self, decoder_input_tokens, decoder_target_tokens, **_):
    return self.decoder(decoder_input_tokens, decoder_target_tokens > 0)


_OPTIONS = dict(
  aux_loss_factor=0.5,
  router_z_loss_factor=0.1,
  loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  auxiliary_losses_per_target=True,
)


def _batch():
  """Return rows of very different lengths, so that micro-batches have unlike numbers of tokens."""
  # Seeded, and so are parameters: of choices that differ by rounding only, another one may win in a micro-batch.
  batch = jax.device_get(cases.tiny_batch(_ROWS, _ENCODER_LENGTH, _LENGTH))
  lengths = np.random.default_rng(3).integers(1, _LENGTH + 1, _ROWS)
  lengths[:6] = 1
  for name, values in batch.items():
    batch[name] = np.where(
      np.arange(values.shape[1]) < lengths[:, None] * values.shape[1] // _LENGTH, values, 0
    )
  batch['decoder_input_tokens'][:, 1:] = batch['decoder_target_tokens'][:, :-1]
  batch['decoder_loss_weights'] = (batch['decoder_target_tokens'] > 0).astype(np.float32)
  return batch


def _case(architecture, *kinds, **options):
  """Return (model, state, batch); `kinds` are those of layers, or of the stacks of an architecture."""
  vocabulary, batch = vocabularies.PassThroughVocabulary(40), _batch()
  blocks = tuple(_block(kind, **options) for kind in kinds)
  if architecture == 'encoder-decoder':
    # 8 heads, so that meshes may divide them.
    config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1, num_heads=8, head_dim=2)
    module = t5.Transformer(
      config,
      networks.SparseFeedForward(
        num_encoder_layers=1,
        num_decoder_layers=1,
        encoder_layout='every_1',
        decoder_layout='every_1',
        block=blocks[0],
        decoder_block=blocks[-1],
      ),
    )
    model = models.MoeEncoderDecoderModel(module, vocabulary, vocabulary, None, **_OPTIONS)
  else:
    del batch['encoder_input_tokens']
    module = _Network(blocks)
    # Without attention, equal tokens would be equal choices.
    batch['decoder_input_tokens'] = np.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH)
    vocabulary = vocabularies.PassThroughVocabulary(_ROWS * _LENGTH)
    if architecture == 'decoder-only':
      config = decoder_only.TransformerConfig(
        vocab_size=_ROWS * _LENGTH,
        emb_dim=16,
        num_heads=2,
        num_layers=2,
        head_dim=8,
        mlp_dim=24,
        dropout_rate=0.0,
      )
      module = networks.sparse_decoder_only(config, blocks[0], decoder_layout='every_2')
    model = models.MoeDecoderOnlyModel(module, vocabulary, None, **_OPTIONS)
  variables = jax.eval_shape(
    lambda key: model.get_initial_variables(key, {name: x.shape for name, x in batch.items()}),
    jax.random.key(0),
  )
  rng = np.random.default_rng(0)
  arrays = {
    name: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(tree))
    for name, tree in variables.items()
    if name == 'router_state'
  }
  arrays['params'] = jax.tree.map(
    lambda leaf: (0.4 * rng.standard_normal(leaf.shape)).astype(np.float32), variables['params']
  )
  return model, train_state.InferenceState.create(variables | arrays), batch


def _step(case, num_microbatches, spec=PartitionSpec('data')):
  """Return the function from parameters to (loss, gradients, metrics, mutable collections)."""
  model, state, batch = case

  def step(params):
    # With a key, so that routers are in training mode, although nothing is random.
    return train_step.accumulate_gradients(
      model, state.replace_params(params), batch, jax.random.key(0), num_microbatches, spec
    )

  return step


_WHOLE = {}


def _whole(*arguments, **options):
  """Return a case and the result of a step with its entire batch."""
  key = (arguments, tuple(options.items()))
  if key not in _WHOLE:
    case = _case(*arguments, **options)
    _WHOLE[key] = case, jax.device_get(cases.jit(_step(case, None))(case[1].params))
  return _WHOLE[key]


def _assert_equal(got, expected, bar=1e-6):
  (loss, grads, metrics, mutables), (whole_loss, whole_grads, whole_metrics, whole_mutables) = (
    got,
    expected,
  )
  np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
  errors, norms = [], []
  for (name, leaf), other in zip(
    tree_utils.named_leaves(grads), jax.tree.leaves(whole_grads), strict=True
  ):
    errors.append(np.linalg.norm(np.asarray(leaf) - other))
    norms.append(np.linalg.norm(other))
    assert errors[-1] <= 3 * bar * norms[-1], f'{name}: {errors[-1] / norms[-1]:.2g} of its norm'
  assert np.linalg.norm(errors) <= bar * np.linalg.norm(norms)
  jax.tree.map(np.testing.assert_array_equal, mutables, whole_mutables)
  assert metrics.keys() == whole_metrics.keys()
  for name, metric in metrics.items():
    if not metrics_lib.is_time_metric(metric):
      # Means over hundreds of tokens are rounded.
      rtol = 1e-6 if name.endswith('loss') else 3e-6
      np.testing.assert_allclose(
        metric.compute(), whole_metrics[name].compute(), rtol=rtol, atol=1e-9, err_msg=name
      )


def _check(num_microbatches, *arguments, **options):
  case, expected = _whole(*arguments, **options)
  _assert_equal(jax.device_get(cases.jit(_step(case, num_microbatches))(case[1].params)), expected)
  return expected[2]


@pytest.mark.full  # by default, test_every_model has a network and test_every_mesh the bias
@pytest.mark.parametrize(
  'kinds, num_microbatches',
  [(('bias',), 4), *(pytest.param(tuple(_BLOCKS), n, marks=_FULL) for n in (1, 2, 3, 4, 8))],
)
def test_every_router(kinds, num_microbatches):
  metrics = _check(num_microbatches, 'layers', *kinds)
  for i, kind in enumerate(kinds):
    dropped = float(metrics[f'experts/decoder/layers_{i}/choices_dropped'].compute())
    assert dropped == 0 if kind == 'tokens' else dropped > 0.01, kind


@_FULL
def test_the_test_above_would_see_groups_of_micro_batches(monkeypatch):
  """Rows apart from each other, as they were cut before: the balancing loss is another one, and so are drops."""
  case, expected = _whole('layers', 'bias')
  monkeypatch.setattr(
    type(case[0]), 'for_microbatches', models.models.BaseTransformerModel.for_microbatches
  )
  loss, _, metrics, _ = jax.device_get(cases.jit(_step(case, 4))(case[1].params))
  assert abs(loss - expected[0]) > 1e-3 * abs(loss)
  name = 'experts/decoder/layers_0/auxiliary_loss'
  assert abs(metrics[name].compute() - expected[2][name].compute()) > 1e-2


_MODELS = [
  *(('decoder-only', (kind,)) for kind in (*_BLOCKS, *_UNPADDED) if 'experts' not in kind),
  *(
    ('encoder-decoder', kinds)
    for kinds in (
      ('tokens', 'capacity'),
      ('experts', 'bias'),
      ('sinkhorn', 'hash'),
      ('unpadded experts', 'unpadded'),
      ('padding uses capacity', 'tokens'),
    )
  ),
]


@pytest.mark.parametrize(
  'architecture, kinds, num_microbatches',
  [
    pytest.param(
      *model, n, marks=() if (model, n) == (('decoder-only', ('unpadded',)), 3) else _FULL
    )
    for model in _MODELS
    for n in (2, 3, 4, 8)
  ],
)
def test_every_model(architecture, kinds, num_microbatches):
  _check(num_microbatches, architecture, *kinds)


_OF_STACKS = ('encoder-decoder', 'unpadded experts', 'unpadded')


@pytest.mark.parametrize(
  'arguments, num_microbatches, num_partitions',
  [
    (('layers', 'bias'), 4, 2),
    *(
      pytest.param(_OF_STACKS, *numbers, marks=_FULL)
      for numbers in ((3, 2), (2, 1), (3, 4), (4, 2), (8, 8))
    ),
  ],
)
def test_every_mesh(arguments, num_microbatches, num_partitions):
  """Micro-batches on a mesh of 8 devices against the entire batch on one; groups span the devices of some meshes."""
  case, expected = _whole(*arguments)
  partitioner = MoePjitPartitioner(num_expert_partitions=2, num_partitions=num_partitions)
  axes = partitioner.get_mesh_axes(case[1]).params
  step = partitioner.partition(
    _step(case, num_microbatches, partitioner.data_partition_spec),
    (axes,),
    (None, axes, None, None),
  )
  _assert_equal(jax.device_get(step(case[1].params)), expected, bar=1e-5)


@_FULL
def test_a_micro_batch_is_routed_as_the_large_batch_is():
  model, state, batch = _case('encoder-decoder', 'experts', 'capacity', group_size=48)
  with pytest.raises(
    ConfigError, match=r'got group_size=48 \(16 groups of 48 tokens\) for a batch of 48 rows of 16'
  ):
    model.for_microbatches(batch, 3)
  part_model, parts, _ = model.for_microbatches(batch, 4)
  # 48 tokens are 3 rows of the encoder and 6 of the decoder.
  assert part_model.rows_together == 6
  parts = train_step.split_microbatches(parts, 4, rows_together=6)
  whole = cases.jit(functools.partial(model.record_routing, state.params))(batch)
  got = cases.jit(functools.partial(part_model.record_routing, state.params))(
    jax.tree.map(lambda x: x[1], parts)
  )
  # Micro-batch 1 of 4 holds the blocks 1 and 5 of 8.
  for (name, leaf), expected in zip(
    tree_utils.named_leaves(got), jax.tree.leaves(whole), strict=True
  ):
    expected = np.asarray(expected).reshape(8, -1, *leaf.shape[1:])[1::4].reshape(leaf.shape)
    if np.issubdtype(leaf.dtype, np.integer):
      np.testing.assert_array_equal(leaf, expected, err_msg=name)
    else:
      np.testing.assert_array_equal(np.asarray(leaf) == 0, expected == 0, err_msg=name)  # Drops.
      np.testing.assert_allclose(leaf, expected, rtol=1e-5, err_msg=name)


# ---- What cannot be equal is rejected -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'rows, length, num, group_size, multiple, message',
  [
    (
      64,
      64,
      8,
      4096,
      1,
      r'\(1 group of 4096 tokens\).*Set group_size=512 .*num_microbatches to None',
    ),
    (24, 8, 3, 48, 1, r'\(4 groups of 48 tokens\).*Set group_size=32 .*to a divisor of 4'),
    (6, 8, 3, 12, 4, r'\(4 groups of 12 tokens\).*Set group_size=4 .*to a divisor of 2'),
    (3, 8, 3, 8, 16, r'num_groups_multiple.*got 16, which makes 4 rows of 3.*multiple of 16'),
  ],
)
def test_groups_of_several_micro_batches(rows, length, num, group_size, multiple, message):
  with pytest.raises(ConfigError, match=message) as error:
    grouping.divide_microbatch(rows, length, num, group_size, multiple)
  for size in re.findall(r'Set group_size=(\d+)', str(error.value)):
    part = grouping.divide_microbatch(rows, length, num, int(size), multiple)
    assert part.num_groups * part.group_size * num == part.batch * part.length * num
    assert part.num_groups * num == grouping.divide(rows, length, int(size), multiple).num_groups


def test_micro_batches_consist_of_groups():
  """By brute force: wherever it does not raise, each group's tokens are those of one micro-batch, in their order."""
  rows, held = 24, 0
  for length in (3, 8):
    for size in (2, 6, 12, 16, 24, 48):
      for num in (2, 3):
        try:
          part = grouping.divide_microbatch(rows, length, num, size)
        except ConfigError:
          continue
        groups = grouping.divide(rows, length, size)
        tokens = np.arange(rows * length).reshape(rows, length)
        together = groups.rows_together
        cut = train_step.split_microbatches(
          {'x': jnp.asarray(tokens)}, num, rows_together=together
        )['x']
        found = np.concatenate([part.split(x) for x in cut])
        expected = np.asarray(groups.split(tokens))
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
        held += 1
  assert held > 10


def _trace(model, state, batch, num=2):
  jax.eval_shape(_step((model, state, batch), num), state.params)


def test_buffers_of_all_groups_and_unknown_numbers_of_tokens():
  shared = _block('capacity', router=_TOKENS(capacity_scope='global'))
  model, state, batch = _case('layers', 'capacity')
  model.module = _Network((shared,))
  with pytest.raises(ConfigError, match="capacity_scope` must be 'group'.*num_microbatches=2"):
    _trace(model, state, batch)
  with pytest.raises(
    ConfigError, match='`padding_in_losses` of the router of decoder/layers_0 must be True'
  ):
    _trace(*_case('layers', 'unpadded'))


def test_a_replay_is_of_an_entire_batch():
  model, _, batch = _case('layers', 'tokens')
  record = {'layer': {'expert_index': np.zeros([1, 1, 1], np.int32)}}
  with pytest.raises(ConfigError, match='must get the entire batch.*num_microbatches=2'):
    model.with_replayed_routing(record).for_microbatches(batch, 2)


def test_a_dry_run_rejects_groups_of_several_micro_batches(tmp_path, capsys):
  """The recipe's batch is one group of 64 x 64 tokens."""
  argv = [
    'train',
    '--gin_file=recipes/keyword_cloze_moe.gin',
    '--gin.DATA_SOURCE=builtin',
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.trainer.Trainer.num_microbatches=2',
    '--dry_run',
  ]
  assert cli.main(argv) == 2
  err = capsys.readouterr().err
  assert (
    'got group_size=4096 (1 group of 4096 tokens)' in err
    and 'Set group_size=2048 (GROUP_SIZE in gin)' in err
  )
  assert 'Traceback' not in err
