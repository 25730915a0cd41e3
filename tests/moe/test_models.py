"""The losses and metrics of models with sparse layers, from sown values; the golden losses of T5X."""

import functools

import clu.values
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import metrics as moe_metrics
from moe import models
from moe import networks
from moe import recording
from moe import routing
from t5x_lite import metrics as metrics_lib
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.trainer import train_step
from tests import golden_data
from tests.networks import network_cases as cases

_VOCABULARY = vocabularies.PassThroughVocabulary(11)


def _sown(num_layers, num_experts=4, seed=0):
  """Return random sown values of each layer."""
  rng = np.random.default_rng(seed)
  layers = []
  for _ in range(num_layers):
    load = rng.random(num_experts)
    load[0] = 0
    layers.append(
      {
        name: (load / load.sum() if name == 'expert_load' else rng.random([16] * ndim)).astype(
          np.float32
        )
        for name, ndim in moe_metrics.SOWN.items()
      }
    )
  return layers


def _tree(layers, stack='encoder', first=1):
  return {
    stack: {
      f'layers_{first + i}': {
        'mlp': {name: (jnp.asarray(value),) for name, value in values.items()}
      }
      for i, values in enumerate(layers)
    }
  }


class _Network(nn.Module):
  """Return the logits in its parameters, and sow given values."""

  logits: tuple
  sown: tuple

  @nn.compact
  def __call__(self, *args, **kwargs):
    for layer, values in enumerate(self.sown):
      _Layer(values, name=f'layers_{layer}')()
    logits = jnp.asarray(np.reshape(np.asarray(self.logits[0], np.float32), self.logits[1]))
    return logits + self.param('bias', nn.initializers.zeros, [])


class _Layer(nn.Module):
  values: tuple

  @nn.compact
  def __call__(self):
    for name, value in self.values:
      self.sow('intermediates', name, jnp.asarray(value, jnp.float32))


class _Stack(nn.Module):
  logits: tuple
  sown: tuple

  def setup(self):
    self.decoder = _Network(self.logits, self.sown)

  def __call__(self, *args, **kwargs):
    return self.decoder()


def _model(logits, sown, cls=models.MoeDecoderOnlyModel, **options):
  frozen = tuple(
    tuple(
      (name, tuple(np.asarray(v).tolist()) if np.ndim(v) else float(v))
      for name, v in values.items()
    )
    for values in sown
  )
  network = _Stack((tuple(np.asarray(logits).ravel().tolist()), np.shape(logits)), frozen)
  return cls(network, _VOCABULARY, None, **options)


@pytest.mark.parametrize('case', range(3))
def test_golden_losses(case):
  description, arrays = golden_data.load('t5x/moe_loss_fn')
  case = description['cases'][case]
  others = _sown(2)
  sown = [
    {**others[i], **{name: arrays[f'sown/{name}'][i] for name in moe_metrics.MOE_METRICS}}
    for i in range(2)
  ]
  model = _model(
    arrays['logits'],
    sown,
    label_smoothing=case['label_smoothing'],
    z_loss=case['z_loss'],
    loss_normalizing_factor=case['lnf'],
    aux_loss_factor=case['aux'],
    router_z_loss_factor=case['rz'],
  )
  targets = jnp.asarray(arrays['targets'])
  batch = {
    'decoder_input_tokens': targets,
    'decoder_target_tokens': targets,
    'decoder_loss_weights': (targets > 0).astype(jnp.float32),
  }
  loss, metrics = model.loss_fn({'decoder': {'bias': jnp.zeros([])}}, batch, None)
  np.testing.assert_allclose(loss, case['loss'], rtol=1e-5)
  values = {
    name: metric.compute_value().value
    for name, metric in metrics.items()
    if not metrics_lib.is_time_metric(metric)
  }
  np.testing.assert_allclose(values['cross_ent_loss'], case['cross_ent_loss'], rtol=1e-5)
  np.testing.assert_allclose(values['loss'], case['loss'], rtol=1e-5)
  for name, value in case['experts'].items():
    np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)


def test_metrics_of_each_layer():
  layers = _sown(3)
  tree = _tree(layers[:2]) | _tree(layers[2:], 'decoder', first=0)
  loss, metrics = moe_metrics.expert_losses_and_metrics(tree, 0.5, 0.25)
  mean = {name: np.mean([values[name] for values in layers]) for name in moe_metrics.MOE_METRICS}
  np.testing.assert_allclose(
    loss, 0.5 * mean['auxiliary_loss'] + 0.25 * mean['router_z_loss'], rtol=1e-6
  )
  np.testing.assert_allclose(
    metrics['experts/expert_usage'].compute(), mean['expert_usage'], rtol=1e-6
  )
  for layer, values in zip(
    ('encoder/layers_1', 'encoder/layers_2', 'decoder/layers_0'), layers, strict=True
  ):
    load = metrics[f'experts/{layer}/load'].compute_value()
    assert isinstance(load, clu.values.Summary)
    np.testing.assert_allclose(load.value, values['expert_load'], rtol=1e-6)
    np.testing.assert_allclose(
      metrics[f'experts/{layer}/max_over_mean_load'].compute(),
      values['expert_load'].max() / values['expert_load'].mean(),
      rtol=1e-5,
    )
    assert metrics[f'experts/{layer}/dead_experts'].compute() == 1
    assert metrics[f'experts/{layer}/drops_by_position'].compute_value().value.shape == (16,)
  assert len(metrics) == 5 + 3 * 12


def test_stacked_layers_are_those_of_separate_subtrees():
  layers = _sown(3)
  stacked = {
    'decoder': {
      'decoder': {
        'mlp': {
          name: (jnp.stack([values[name] for values in layers]),) for name in moe_metrics.SOWN
        }
      }
    }
  }
  expected = moe_metrics.expert_losses_and_metrics(_tree(layers, 'decoder', first=0), 1.0, 1.0)
  jax.tree.map(
    np.testing.assert_array_equal,
    moe_metrics.expert_losses_and_metrics(stacked, 1.0, 1.0),
    expected,
  )


@pytest.mark.parametrize('stacked', [False, True])
def test_a_layer_with_two_sparse_blocks_loses_neither(stacked):
  first, second = _sown(1, num_experts=4)[0], _sown(1, num_experts=6, seed=1)[0]
  blocks = {'extra_mlp': {'moe': second}, 'mlp': first}
  tree = jax.tree.map(
    lambda value: (jnp.asarray(value)[None] if stacked else jnp.asarray(value),), blocks
  )
  loss, metrics = moe_metrics.expert_losses_and_metrics(
    {'decoder': {'decoder' if stacked else 'layers_0': tree}}, 1, 0
  )
  np.testing.assert_allclose(
    loss, (first['auxiliary_loss'] + second['auxiliary_loss']) / 2, rtol=1e-6
  )
  for name, values in (('layers_0', first), ('layers_0/extra_mlp/moe', second)):
    np.testing.assert_allclose(
      metrics[f'experts/decoder/{name}/load'].compute_value().value,
      values['expert_load'],
      rtol=1e-6,
    )


def test_metrics_average_over_steps_and_microbatches():
  first, second = (
    moe_metrics.expert_losses_and_metrics(_tree(_sown(1, seed=i)), 0.1, 0.0)[1] for i in range(2)
  )
  name = 'experts/encoder/layers_1/load'
  stacked = jax.tree.map(lambda *x: jnp.stack(x), first[name], second[name])
  merged = train_step.merge_stacked(stacked, 2)
  mean = (first[name].compute() + second[name].compute()) / 2
  np.testing.assert_allclose(merged.compute(), mean, rtol=1e-6)
  np.testing.assert_allclose(first[name].merge(second[name]).compute(), mean, rtol=1e-6)
  name = 'experts/auxiliary_loss'
  np.testing.assert_allclose(
    first[name].merge(second[name]).compute(),
    (first[name].compute() + second[name].compute()) / 2,
    rtol=1e-6,
  )


_EVALUATED = (
  'loss',
  *(f'experts/{name}' for name in ('auxiliary_loss', 'router_z_loss', 'router_confidence')),
  *(
    f'experts/{stack}/layers_0/{name}'
    for stack in ('encoder', 'decoder')
    for name in ('auxiliary_loss', 'router_z_loss', 'router_entropy', 'load', 'choices_dropped')
  ),
)


@pytest.mark.parametrize(
  'padding_in_losses, per_target',
  [(True, False), pytest.param(False, True, marks=pytest.mark.full)],
)
def test_an_evaluation_does_not_depend_on_its_batch_size(padding_in_losses, per_target):
  """Groups are single rows, so that only the means over batches could differ."""
  router = routing.TokensChooseRouter(4, num_selected=2, padding_in_losses=padding_in_losses)
  block = networks.SparseBlock(router=router, num_experts=4, expert_dim=12, group_size=8)
  network = networks.sparse_transformer(
    cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1),
    block,
    num_encoder_sparse_layers=1,
    num_decoder_sparse_layers=1,
  )
  vocabulary = vocabularies.PassThroughVocabulary(40)
  model = models.MoeEncoderDecoderModel(
    network,
    vocabulary,
    vocabulary,
    None,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
    aux_loss_factor=0.5,
    router_z_loss_factor=0.25,
    auxiliary_losses_per_target=per_target,
  )
  rng = np.random.default_rng(0)
  is_token = np.arange(8) < rng.integers(1, 9, 5)[:, None]
  inputs = rng.integers(2, 40, (5, 8)) * is_token
  targets = rng.integers(2, 40, (5, 8)) * is_token[::-1]
  rows = {
    'encoder_input_tokens': inputs,
    'decoder_input_tokens': np.pad(targets, [(0, 0), (1, 0)])[:, :-1],
    'decoder_target_tokens': targets,
    'decoder_loss_weights': targets > 0,
  }
  params = model.get_initial_variables(
    jax.random.key(0), {name: x.shape for name, x in rows.items()}
  )['params']
  # Large weights, so that the losses of routers differ between rows.
  params = jax.tree.map(lambda x: 3 * x, params)
  evaluate = cases.jit(lambda batch: model.eval_fn(params, batch)[:2])
  found = {}
  for size in (5, 2, 1):
    merged = None
    # The last batch has only padding.
    for first in range(0, 5 + size, size):
      batch = {name: x[first : first + size] for name, x in rows.items()}
      batch = {name: np.pad(x, [(0, size - len(x)), (0, 0)]) for name, x in batch.items()}
      metrics = evaluate(batch)[1]
      merged = metrics if merged is None else metrics_lib.merge_metrics(merged, metrics)
    found[size] = {
      name: np.asarray(merged[name].compute()) for name in (*_EVALUATED, 'cross_ent_loss')
    }
  for size in (2, 1):
    for name, value in found[5].items():
      np.testing.assert_allclose(found[size][name], value, rtol=2e-5, err_msg=f'{size} {name}')
  values = found[5]
  parts = (
    values['cross_ent_loss'] + values['experts/auxiliary_loss'] + values['experts/router_z_loss']
  )
  np.testing.assert_allclose(values['loss'], parts, rtol=1e-6)
  np.testing.assert_allclose(float(evaluate(rows)[0]), parts, rtol=1e-5)


def test_a_subclass_with_other_auxiliary_losses_has_them_in_its_loss():
  class Model(models.MoeDecoderOnlyModel):
    def auxiliary_losses(self, intermediates, batch):
      loss, metrics = super().auxiliary_losses(intermediates, batch)
      return loss + 10.0, metrics

  targets = jnp.ones([2, 3], jnp.int32)
  batch = {'decoder_input_tokens': targets, 'decoder_target_tokens': targets}
  model = _model(np.zeros([2, 3, 11]), _sown(2), aux_loss_factor=0.5, cls=Model)
  loss, metrics = model.loss_fn({'decoder': {'bias': jnp.zeros([])}}, batch, None)
  assert float(loss) == float(metrics['loss'].compute()) > 10


def test_batches_of_padding_have_no_load():
  """Not even as dead experts."""
  layer = {**_sown(1)[0]}
  empty = {**layer, 'expert_load': np.zeros_like(layer['expert_load'])}
  first, second = (
    moe_metrics.expert_losses_and_metrics(_tree([values]), 0.0, 0.0)[1] for values in (layer, empty)
  )
  merged = metrics_lib.merge_metrics(first, second)
  for name in ('load', 'dead_experts', 'max_over_mean_load'):
    name = f'experts/encoder/layers_1/{name}'
    np.testing.assert_allclose(merged[name].compute(), first[name].compute(), rtol=1e-6)


@pytest.mark.parametrize('factor', [None, 7.0, 'NUM_REAL_TARGET_TOKENS'])
@pytest.mark.parametrize('per_target', [False, True])
def test_weight_of_the_auxiliary_losses(factor, per_target):
  rng = np.random.default_rng(0)
  logits, targets = rng.normal(size=(4, 6, 11)), rng.integers(0, 11, (4, 6))
  batch = {
    'decoder_input_tokens': jnp.asarray(targets),
    'decoder_target_tokens': jnp.asarray(targets),
    'decoder_loss_weights': jnp.asarray(targets > 0, jnp.float32),
  }
  options = dict(loss_normalizing_factor=factor, auxiliary_losses_per_target=per_target)
  sown = _sown(2)
  params = {'decoder': {'bias': jnp.zeros([])}}
  extra = (
    _model(logits, sown, aux_loss_factor=0.5, **options).loss_fn(params, batch, None)[0]
    - _model(logits, sown, **options).loss_fn(params, batch, None)[0]
  )
  num_targets = np.sum(targets > 0)
  divisor = {None: 1.0, 7.0: 7.0, 'NUM_REAL_TARGET_TOKENS': num_targets}[factor]
  weight = num_targets / divisor if per_target else 1.0
  np.testing.assert_allclose(
    extra, 0.5 * weight * np.mean([v['auxiliary_loss'] for v in sown]), rtol=1e-4
  )

  # The slices of a batch have this weight together.
  model = _model(logits[:2], sown, aux_loss_factor=0.5, **options)
  part_model, parts, fixed = model.for_microbatches(batch, 2)
  plain_model, *_ = _model(logits[:2], sown, **options).for_microbatches(batch, 2)
  total = 0.0
  for k in range(2):
    part = {name: x[k::2] for name, x in parts.items()} | fixed
    total += part_model.loss_fn(params, part, None)[0] - plain_model.loss_fn(params, part, None)[0]
  np.testing.assert_allclose(total, extra, rtol=1e-4)


def test_factors_without_effect_or_out_of_range_raise():
  for options in (
    {'aux_loss_factor': -1.0},
    {'router_z_loss_factor': float('nan')},
    {'aux_loss_factor': '0.1'},
  ):
    with pytest.raises(ConfigError, match=next(iter(options))):
      _model(np.zeros([1, 1, 11]), [], **options)
  for name in ('aux_loss_factor', 'router_z_loss_factor'):
    model = _model(np.zeros([1, 1, 11]), [], **{name: 0.1})
    tokens = jnp.ones([1, 1], jnp.int32)
    with pytest.raises(
      ConfigError, match=f'`{name}` must be 0 for a network without sparse layers, got 0.1'
    ):
      model.loss_fn(
        {'decoder': {'bias': jnp.zeros([])}},
        {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens},
        None,
      )


@pytest.mark.parametrize(
  'router, decoder_router, warned',
  [
    (routing.HashRouter(4), None, ['aux_loss_factor=0.01', 'router_z_loss_factor=0.001']),
    (routing.ExpertsChooseRouter(4), routing.HashRouter(4), ['aux_loss_factor=0.01']),
    (routing.HashRouter(4), routing.TokensChooseRouter(4), []),
    (routing.SinkhornRouter(4), None, []),
  ],
)
def test_factors_of_losses_that_no_router_has_are_warned_of(router, decoder_router, warned, caplog):
  block = functools.partial(
    networks.SparseBlock, num_experts=4, train_capacity_factor=1.0, eval_capacity_factor=1.0
  )
  network = networks.sparse_transformer(
    cases.tiny_config(),
    block(router=router),
    num_encoder_sparse_layers=1,
    num_decoder_sparse_layers=1,
    decoder_block=block(router=decoder_router) if decoder_router else None,
  )
  make = functools.partial(models.MoeEncoderDecoderModel, network, _VOCABULARY, _VOCABULARY, None)
  caplog.clear()
  make()
  assert 'has no effect' not in caplog.text
  make(aux_loss_factor=0.01, router_z_loss_factor=0.001)
  got = [record.getMessage() for record in caplog.records if 'has no effect' in record.getMessage()]
  assert [message.split()[0] for message in got] == warned
  assert all('HashRouter' in message and 'Set the factor to 0' in message for message in got)


# ---- recording ------------------------------------------------------------------------------------------------------


def _record(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'encoder': {
      'layers_1': {
        'mlp': {
          'expert_index': rng.integers(0, 4, (2, 8, 2), np.int32),
          'gates': rng.random((2, 8, 2), np.float32),
        }
      }
    }
  }


def test_files_hold_records(tmp_path):
  files = recording.RoutingFiles(tmp_path / 'routing')
  assert files.steps() == []
  for step in (7, 123456789, 3):
    files.write(step, jax.tree.map(jnp.asarray, _record(step)))
  assert files.steps() == [3, 7, 123456789]
  jax.tree.map(np.testing.assert_array_equal, files.read(7), _record(7))
  assert sorted(recording.layers_of(files.read(7))) == ['encoder/layers_1/mlp']
  with pytest.raises(DataError, match='Step 8 has no record.*3 steps, 3 to 123456789'):
    files.read(8)
  (tmp_path / 'routing' / 'routing_00000007.npz').write_bytes(b'PK half')
  with pytest.raises(DataError, match='Record the step again'):
    files.read(7)
  assert not [path for path in (tmp_path / 'routing').iterdir() if path.name.startswith('.')]


def test_invalid_records_raise():
  model = _model(np.zeros([1, 1, 11]), [])
  for record in (
    {},
    {'layer': {'expert': np.zeros([1, 1, 1], np.int32)}},
    {'layer': {'expert_index': np.zeros([1, 1, 1], np.float32)}},
    {'layer': {'expert_index': np.zeros([1], np.int32)}},
  ):
    with pytest.raises(ConfigError, match='record'):
      model.with_replayed_routing(record)
  tokens = jnp.ones([1, 1], jnp.int32)
  with pytest.raises(ConfigError, match='SparseFeedForward'):
    model.record_routing(
      {'decoder': {'bias': jnp.zeros([])}},
      {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens},
    )
