"""The loss in chunks of tokens equals the loss of all logits, on one device and on meshes, in less memory."""

import functools
import re

from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from moe import models as moe_models
from moe import networks as moe_networks
from moe import routing
from t5x_lite import errors
from t5x_lite import layers
from t5x_lite import metrics as metrics_lib
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.data import vocabularies
from t5x_lite.models import token_losses
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.trainer import train_step
from tests.networks import network_cases

_VOCABULARY = vocabularies.PassThroughVocabulary(40)


def _arrays(tied, batch=4, length=13, embed=16, vocab=37, dtype='float32'):
  """Return (hidden, kernel, weights, targets)."""
  rng = np.random.default_rng(0)
  return (
    jnp.asarray(rng.normal(size=(batch, length, embed)), dtype),
    jnp.asarray(
      rng.normal(size=(vocab, embed) if tied else (embed, vocab)) * embed**-0.5, jnp.float32
    ),
    jnp.asarray(rng.random((batch, length)) * (rng.random((batch, length)) > 0.2), jnp.float32),
    jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32),
  )


def _loss(
  hidden, kernel, weights, targets, chunk_size, tied=False, smoothing=0.0, z_loss=0.0, factor=None
):
  """Return 1.7 times the loss, (z-loss, correct positions): its later gradient is not 1."""
  outputs = layers.OutputProjection(
    hidden, kernel, vocab_dim=0 if tied else 1, divisor=4.0 if tied else 1.0, chunk_size=chunk_size
  )
  loss, *others = token_losses.weighted_loss(outputs, targets, weights, smoothing, z_loss, factor)
  return 1.7 * loss.value, others


def _close(actual, expected, rtol=1e-6):
  """Assert that arrays differ by at most `rtol` times the largest number of each."""
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-30))


@pytest.mark.parametrize('chunk_size', [5, 13, 51])
@pytest.mark.parametrize(
  'tied, smoothing, z_loss, weighted, factor',
  [
    (False, 0.0, 0.0, False, None),
    (True, 0.1, 1e-2, True, 7.0),
    (False, 0.1, 1e-2, True, None),
    (True, 0.0, 1e-2, False, 7.0),
  ],
)
def test_chunks_equal_all_logits(chunk_size, tied, smoothing, z_loss, weighted, factor):
  hidden, kernel, weights, targets = _arrays(tied)
  arrays = (hidden, kernel, weights if weighted else None, targets)
  options = dict(tied=tied, smoothing=smoothing, z_loss=z_loss, factor=factor)

  def run(size):
    return jax.jit(
      jax.value_and_grad(
        lambda *arrays: _loss(*arrays, size, **options),
        (0, 1, 2) if weighted else (0, 1),
        has_aux=True,
      )
    )(*arrays)

  _close(run(chunk_size), run(0))
  _close(jax.jit(lambda: _loss(*arrays, chunk_size, **options))(), run(0)[0])


def test_chunks_work_under_vmap_and_in_rematerialized_functions():
  hidden, *rest = _arrays(False)

  def gradients(size):
    return jax.jit(
      jax.vmap(jax.grad(jax.checkpoint(lambda hidden: _loss(hidden, *rest, size)[0])))
    )(jnp.stack([hidden, 2 * hidden]))

  _close(gradients(5), gradients(0))


@pytest.mark.parametrize('tied', [False, True])
def test_bfloat16_chunks_equal_all_logits_and_have_no_float32_operand(tied):
  arrays = _arrays(tied, dtype='bfloat16')

  def gradients(size):
    return jax.value_and_grad(lambda *x: _loss(*x, size, tied=tied, z_loss=1e-2)[0], (0, 1))

  (loss, bars), (expected, expected_bars) = (jax.jit(gradients(size))(*arrays) for size in (5, 0))
  _close(loss, expected)
  _close(bars, expected_bars, rtol=1e-2)
  assert [bar.dtype for bar in bars] == [jnp.bfloat16, jnp.float32]
  for size in (0, 5):
    products = re.findall(
      r'dot_general\[.*?\] (\w+) (\w+)', str(jax.make_jaxpr(gradients(size))(*arrays)), re.DOTALL
    )
    text = str(jax.make_jaxpr(gradients(size))(*arrays))
    types = dict(re.findall(r'(\w+):(\w+)\[', text))
    assert len(products) == 3 and {types[name] for pair in products for name in pair} == {'bf16'}


def test_a_frozen_kernel_has_no_gradient_in_the_program():
  shapes = jax.eval_shape(lambda: _arrays(False, vocab=50_000, embed=64, batch=2, length=64))

  def flops(argnums):
    return (
      jax.jit(jax.grad(lambda *x: _loss(*x, 16)[0], argnums))
      .lower(*shapes)
      .compile()
      .cost_analysis()['flops']
    )

  # A loop counts once, here one chunk of 16 tokens and one of 4 parts of the gradient.
  assert flops((0, 1)) - flops((0,)) > 2 * 16 * 16 * 50_000


def test_temporaries_of_a_large_vocabulary_are_eight_times_smaller():
  shapes = jax.eval_shape(lambda: _arrays(False, 16, 512, 512, 250_112))
  temporaries = [
    jax.jit(jax.value_and_grad(lambda *x: _loss(*x, size, z_loss=1e-4)[0], (0, 1)))
    .lower(*shapes)
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
    for size in (0, None)
  ]
  assert temporaries[0] > 8 * temporaries[1], temporaries
  # Logits of a chunk and their gradients; a part of the kernel's gradient takes the memory of the former.
  assert temporaries[1] < 2.5 * 4 * token_losses.MIN_CHUNK_SIZE * 250_112


@pytest.mark.parametrize(
  'chunk_size, limit, num_chunks',
  [
    (None, 4 * 37 * 52, 1),
    (None, 4 * 37 * 51, 2),
    (None, 1, 13),
    (0, 1, 1),
    (52, 1, 1),
    (10, 2**30, 6),
  ],
)
def test_chunks_are_chosen_by_the_size_of_the_logits(monkeypatch, chunk_size, limit, num_chunks):
  monkeypatch.setattr(token_losses, 'MAX_LOGITS_BYTES', limit)
  monkeypatch.setattr(token_losses, 'MIN_CHUNK_SIZE', 4)
  hidden, kernel, *_ = _arrays(False)
  chunks = token_losses.find_chunks(
    layers.OutputProjection(hidden, kernel, chunk_size=chunk_size), 0.0, 0.0
  )
  assert (1 if chunks is None else chunks.num_chunks) == num_chunks


def _collectives(program):
  """Return (names of the collectives, sizes of their results within loops) of a compiled program."""
  names, sizes, in_loop = [], [], False
  for line in program.as_text().splitlines():
    if line and not line.startswith((' ', '}')):
      in_loop = not line.startswith('ENTRY')
    found = re.search(
      r'= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(',
      line,
    )
    if found:
      names.append(found[2])
      if in_loop:
        sizes += [
          np.prod([int(size) for size in dims.split(',') if size], dtype=int)
          for dims in re.findall(r'\[([\d,]*)\]', found[1])
        ]
  return names, sizes


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize(
  'num_partitions, param_dims, activation_dims', [(1, 2, 1), (2, 1, 1), (2, 2, 2), (8, 1, 1)]
)
def test_chunks_on_a_mesh_equal_one_device_and_move_no_kernel_in_the_loop(
  tied, num_partitions, param_dims, activation_dims
):
  arrays = _arrays(tied, batch=16, length=24, embed=32, vocab=512)
  options = dict(tied=tied, smoothing=0.1, z_loss=1e-2)
  rules = partitioning.standard_logical_axis_rules(activation_dims, param_dims)
  mesh = partitioning.PjitPartitioner(num_partitions=num_partitions).mesh
  kernel_spec = partitioning.logical_to_mesh_axes(
    ('vocab', 'embed') if tied else ('embed', 'vocab'), rules
  )
  shardings = [NamedSharding(mesh, spec) for spec in (P('data'), kernel_spec, P('data'), P('data'))]
  arguments = jax.device_put(arrays, tuple(shardings))

  def compiled(size):
    def loss_fn(hidden, *rest):
      hidden = flax_partitioning.with_sharding_constraint(hidden, ('batch', 'length', 'embed'))
      return _loss(hidden, *rest, size, **options)

    with jax.set_mesh(mesh), flax_partitioning.axis_rules(rules):
      return (
        jax.jit(
          jax.value_and_grad(loss_fn, (0, 1), has_aux=True),
          out_shardings=(None, (shardings[0], shardings[1])),
        )
        .lower(*arguments)
        .compile()
      )

  whole, chunked = compiled(0), compiled(11)
  expected = jax.jit(jax.value_and_grad(lambda *x: _loss(*x, 0, **options), (0, 1), has_aux=True))(
    *arrays
  )
  _close(chunked(*arguments), expected, rtol=3e-6)  # sums over the vocabulary in another order
  names, sizes_in_loop = _collectives(chunked)
  # Per chunk only numbers of its tokens and their gradients [11, 32]; the kernel and its gradient once.
  assert max(sizes_in_loop, default=0) <= 11 * 32
  assert names.count('all-gather') <= _collectives(whole)[0].count('all-gather')


def _sparse(config):
  return moe_networks.sparse_transformer(
    config,
    moe_networks.SparseBlock(num_experts=4, router=routing.TokensChooseRouter(4), group_size=10),
    num_encoder_sparse_layers=1,
    num_decoder_sparse_layers=1,
  )


def _models(size, **options):
  """Return models by name whose losses have chunks of `size` tokens."""
  common = dict(
    num_heads=2,
    head_dim=8,
    emb_dim=16,
    mlp_dim=24,
    vocab_size=40,
    dropout_rate=0.0,
    loss_chunk_size=size,
  )

  def config(**fields):
    return t5.T5Config(num_encoder_layers=1, num_decoder_layers=1, **common, **fields)

  def of_t5(network):
    return models.EncoderDecoderModel(network, _VOCABULARY, _VOCABULARY, None, **options)

  return {
    'untied': lambda: of_t5(t5.Transformer(config())),
    'tied': lambda: of_t5(t5.Transformer(config(logits_via_embedding=True))),
    'bfloat16': lambda: of_t5(t5.Transformer(config(dtype='bfloat16', logits_via_embedding=True))),
    'decoder_only': lambda: models.DecoderOnlyModel(
      decoder_only.DecoderWrapper(decoder_only.TransformerConfig(num_layers=1, **common)),
      _VOCABULARY,
      None,
      **options,
    ),
    'sparse': lambda: moe_models.MoeEncoderDecoderModel(
      _sparse(config()),
      _VOCABULARY,
      _VOCABULARY,
      None,
      aux_loss_factor=0.1,
      auxiliary_losses_per_target=True,
      **options,
    ),
  }


def _random_params(name, batch):
  """Return NumPy parameters of a model of `_models`, without compiling an initialization."""
  shapes = {feature: x.shape for feature, x in batch.items()}
  init = functools.partial(_models(0)[name]().get_initial_variables, input_shapes=shapes)
  params = jax.eval_shape(init, jax.random.key(0))['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, params)


def _batch():
  batch = network_cases.tiny_batch()
  return {**batch, 'decoder_loss_weights': (batch['decoder_target_tokens'] > 0) * jnp.float32(0.5)}


@pytest.mark.parametrize('name', ['untied', 'tied', 'bfloat16', 'decoder_only', 'sparse'])
def test_losses_gradients_metrics_and_scores_of_models_are_equal(name):
  options = dict(label_smoothing=0.1, z_loss=1e-2, loss_normalizing_factor='AVERAGE_PER_SEQUENCE')
  batch = _batch()
  params = _random_params(name, batch)

  def run(size):
    model = _models(size, **options)[name]()

    def compute(params):
      (loss, metrics), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, None)

      def score(params):
        return jnp.sum(model.score_batch(params, batch) * jnp.arange(4.0))

      return loss, metrics, grads, model.eval_fn(params, batch), jax.value_and_grad(score)(params)

    result = network_cases.jit(compute)(params)
    values = {
      key: metric for key, metric in result[1].items() if not isinstance(metric, metrics_lib.Time)
    }
    return (result[0], *result[2:3], result[3][0], *result[4:]), values

  (chunked, metrics), (whole, expected) = run(7), run(0)
  # Sums through a network of several layers in another order.
  _close(chunked, whole, rtol=2e-2 if name == 'bfloat16' else 2e-6)
  assert metrics.keys() == expected.keys()
  _close(metrics, expected, rtol=2e-6)


def test_micro_batches_in_chunks_sum_to_the_batch():
  batch = _batch()
  params = _random_params('tied', batch)

  def run(size, num_microbatches):
    model = _models(size, loss_normalizing_factor='NUM_REAL_TARGET_TOKENS', z_loss=1e-2)['tied']()
    state = type('State', (), {'params': params, 'flax_mutables': {}})()
    grads, metrics, _ = train_step.accumulate_grads_microbatched(
      model, state, batch, None, num_microbatches
    )
    return grads, metrics['loss']

  _close(jax.jit(lambda: run(3, 2))(), jax.jit(lambda: run(0, None))(), rtol=2e-6)


class _Capped(models.EncoderDecoderModel):
  """Model with other logits than its network's."""

  def compute_logits(self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=()):
    logits, collections = super().compute_logits(
      params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=mutable
    )
    return jnp.tanh(logits), collections


class _Subnetwork(t5.Transformer):
  """Network that may change the logits."""


def test_a_subclass_gets_all_logits_and_an_explicit_size_is_an_error():
  def make(size, model_cls=models.EncoderDecoderModel, network_cls=t5.Transformer, **options):
    return model_cls(
      network_cls(network_cases.tiny_config(loss_chunk_size=size)),
      _VOCABULARY,
      _VOCABULARY,
      None,
      **options,
    )

  for classes in ({'model_cls': _Capped}, {'network_cls': _Subnetwork}):
    assert (
      token_losses.logits_arguments(make(None, **classes), make(None, **classes).module, ()) == {}
    )
    with pytest.raises(
      errors.ConfigError,
      match=(
        '`.*loss_chunk_size` must be None with the class (_Capped|_Subnetwork), which does not declare'
      ),
    ):
      make(7, **classes)
    make(0, **classes)
  with pytest.raises(
    errors.ConfigError, match=r'None with EncoderDecoderModel.metric_fns, which need all logits'
  ):
    make(7, metric_fns=[lambda logits, batch: {}])
  with pytest.raises(errors.ConfigError, match='None with Evaluation.metric_fns'):
    make(7).with_metric_fns([lambda logits, batch: {}], 'Evaluation')
  seen = []
  model = make(None, metric_fns=[lambda logits, batch: seen.append(logits.shape) or {}])
  batch = _batch()
  params = jax.eval_shape(
    lambda: model.get_initial_variables(
      jax.random.key(0), {feature: x.shape for feature, x in batch.items()}
    )['params']
  )
  jax.eval_shape(model.eval_fn, params, batch)
  assert seen == [(4, 5, 40)]


@pytest.mark.parametrize(
  'targets, weights', [((4, 12), None), ((13, 4), None), ((4, 13), (4, 1)), ((4, 13), (1, 13))]
)
def test_arrays_of_other_positions_raise_in_chunks_too(targets, weights):
  """Chunks flatten the positions, so targets of another length would belong to other tokens."""
  hidden, kernel, *_ = _arrays(False)
  outputs = layers.OutputProjection(hidden, kernel, chunk_size=5)
  ids, weights = jnp.ones(targets, jnp.int32), None if weights is None else jnp.ones(weights)
  with pytest.raises(errors.ConfigError, match='must match, got the shapes'):
    token_losses.weighted_loss(outputs, ids, weights, 0.0, 0.0, None)
  if weights is None:
    with pytest.raises(errors.ConfigError, match='must match, got the shapes'):
      token_losses.token_losses(outputs, ids)
  with pytest.raises(errors.ConfigError, match='must be integers'):
    token_losses.weighted_loss(outputs, jnp.ones((4, 13)), None, 0.0, 0.0, None)


def test_gradients_of_scores_do_not_keep_the_kernel_for_each_chunk():
  """64 chunks of a kernel of 1 MB."""
  hidden, kernel = (
    jax.ShapeDtypeStruct((8, 64, 64), jnp.float32),
    jax.ShapeDtypeStruct((64, 4096), jnp.float32),
  )

  def loss(hidden, kernel):
    outputs = layers.OutputProjection(hidden, kernel, chunk_size=8)
    return jnp.sum(token_losses.token_losses(outputs, jnp.ones((8, 64), jnp.int32)))

  program = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, kernel).compile()
  assert program.memory_analysis().temp_size_in_bytes < 4e6
