"""Model FLOPs: against XLA's count of the training step, the products of its program, and a formula."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import layers
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer as trainer_lib
from t5x_lite.data import vocabularies
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.trainer import model_flops
from t5x_lite.trainer import state_init
from tests.networks import network_cases
from tests.networks.test_remat import count_flops

_ROWS = 8
_INPUTS = 64
_TARGETS = 32
_WIDE = dict(vocab_size=256, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=256)
_T5_1_0 = dict(mlp_activations=('relu',), logits_via_embedding=True)


def _t5(**fields):
  sizes = dict(num_encoder_layers=2, num_decoder_layers=2)
  return t5.Transformer(network_cases.tiny_config(**{**_WIDE, **sizes, **fields}))


def _decoder(**fields):
  config = decoder_only.TransformerConfig(
    **_WIDE, num_layers=2, mlp_activations=('gelu', 'linear'), dropout_rate=0.0, **fields
  )
  return decoder_only.DecoderWrapper(config)


def make_trainer(
  network, optimizer_def=None, model_cls=None, model_options=None, num_devices=1, **options
):
  """Return (trainer with shapes, shapes of a batch) of a network."""
  lengths = {
    'decoder_input_tokens': _TARGETS,
    'decoder_target_tokens': _TARGETS,
    'decoder_loss_weights': _TARGETS,
  }
  vocabulary = vocabularies.PassThroughVocabulary(network.config.vocab_size, eos_id=1)
  if isinstance(network, decoder_only.DecoderWrapper):
    model_cls = model_cls or models.DecoderOnlyModel
    arguments = (network, vocabulary)
    lengths['decoder_causal_attention'] = _TARGETS
  else:
    model_cls = model_cls or models.EncoderDecoderModel
    arguments = (network, vocabulary, vocabulary)
    lengths['encoder_input_tokens'] = _INPUTS
  model = model_cls(*arguments, optimizer_def or optimizers.sgd(0.1), **(model_options or {}))
  devices = np.array(jax.devices()[:num_devices]).reshape(num_devices, 1)
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  partitioner = partitioning.PjitPartitioner(mesh=mesh)
  shapes = {name: (_ROWS, length) for name, length in lengths.items()}
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, shapes, partitioner
  )
  trainer = trainer_lib.Trainer(
    model,
    initializer.global_train_state_shape,
    partitioner,
    (),
    None,
    initializer.train_state_axes,
    jax.random.key(0),
    **options,
  )
  return trainer, {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


def trace(trainer, batch):
  """Return the traced training step."""
  return trainer.partitioned_train_step().trace(
    trainer.step_state, batch, *trainer.step_arguments(is_last=False)
  )


def _products(traced):
  """Return the FLOPs of a step's products; one is the sum over rows that is the gradient of the position biases."""
  return pytest.approx(count_flops(traced.jaxpr.jaxpr), rel=0.001)


def _count(*args, **kwargs):
  trainer, batch = make_trainer(*args, **kwargs)
  return trainer.count_flops(batch).total


def _trains(pattern):
  return optimizers.MultiOptimizer([(pattern, optimizers.sgd(0.1))])


_STEPS = {
  't5_1_0': functools.partial(make_trainer, _t5(**_T5_1_0)),
  't5_1_1': functools.partial(make_trainer, _t5()),
  'decoder_only': functools.partial(make_trainer, _decoder()),
  'lora': functools.partial(
    make_trainer, _t5(), model_options={'adapter': adapters.Lora(rank=8, targets='all')}
  ),
  'last layers': functools.partial(make_trainer, _t5(), _trains('decoder/(layers_1|logits)')),
  'embeddings': functools.partial(make_trainer, _t5(), _trains('token_embedder')),
}


@pytest.mark.parametrize('name', _STEPS)
def test_xla_counts_the_same_in_the_step(name):
  trainer, batch = _STEPS[name]()
  counted = trainer.count_flops(batch).total
  traced = trace(trainer, batch)
  assert counted == _products(traced)
  xla = traced.lower().compile().cost_analysis()['flops']
  assert counted == pytest.approx(xla, rel=0.05)


def test_layers_in_loops_count_as_often_as_they_run():
  trainer, batch = make_trainer(_t5(scan_layers=True))
  counted = trainer.count_flops(batch).total
  assert counted == _products(trace(trainer, batch))
  assert counted == _count(_t5())


def test_t5_1_1_by_hand():
  emb, joined, mlp, vocab = 128, 2 * 64, 256, 256
  inputs, targets = _ROWS * _INPUTS, _ROWS * _TARGETS
  attention = 4 * emb * joined
  encoder = inputs * (attention + 3 * emb * mlp) + 2 * _ROWS * _INPUTS**2 * joined
  decoder = targets * (attention + 2 * emb * joined + 3 * emb * mlp)
  decoder += inputs * 2 * emb * joined
  # The square of causal attention, not its half.
  decoder += 2 * _ROWS * (_TARGETS**2 + _TARGETS * _INPUTS) * joined
  assert _count(_t5()) == 6 * (2 * encoder + 2 * decoder + targets * emb * vocab)


@pytest.mark.parametrize(
  'fields',
  [
    {'remat_policy': 'full'},
    {'attention_kernel': 'blockwise'},
    {'loss_chunk_size': 100},
    {'dropout_rate': 0.1},
    {'param_layout': 'scalable_t5'},
  ],
  ids=str,
)
def test_how_a_step_is_computed_does_not_count(fields):
  assert _count(_t5(**fields)) == _count(_t5())


def test_options_of_the_trainer_do_not_count():
  plain = _count(_t5())
  assert _count(_t5(), optimizers.muon(0.1)) == plain
  assert _count(_t5(), num_microbatches=4) == plain


def test_dtypes_are_those_of_the_operands():
  trainer, batch = make_trainer(_t5(dtype='bfloat16'), train_dtype='bfloat16')
  flops = trainer.count_flops(batch)
  assert flops.dtype == 'bfloat16' and flops.by_dtype['bfloat16'] > 0.9 * flops.total

  def highest(params, x):
    return jnp.sum(jnp.dot(x, params, precision='highest'))

  array = jnp.ones((4, 4))
  assert model_flops.count_step(highest, array, array).by_dtype == {'float32_highest': 2 * 128}


# ---- Programs of users -----------------------------------------------------------------------------------------------

_W = jnp.ones((16, 16))
_ONCE = 2 * 8 * 16 * 16


def _loss(product):
  return lambda w, x: jnp.sum(product(w, x))


@pytest.mark.parametrize(
  ('fn', 'num_products'),
  [
    (_loss(lambda w, x: x @ w), 2),
    (_loss(lambda w, x: x @ w @ w), 5),
    (_loss(lambda w, x: x @ jax.lax.stop_gradient(w)), 1),
    (_loss(lambda w, x: jax.lax.stop_gradient(x @ w)), 1),
    (_loss(lambda w, x: (x @ w, x)[1]), 0),
    (_loss(lambda w, x: jax.nn.one_hot(jnp.argmax(x, 1), 16) @ w), 0),
    (_loss(jax.checkpoint(lambda w, x: x @ w)), 2),
    (_loss(lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: x @ w, x)), 9),
    (_loss(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)), 5),
    (_loss(lambda w, x: jax.lax.ragged_dot(x, w[None], jnp.full(1, 8))), 2),
    (
      _loss(
        lambda w, x: nn.Conv(16, (1,), use_bias=False).apply({'params': {'kernel': w[None]}}, x)
      ),
      2,
    ),
  ],
)
def test_products_of_each_operation(fn, num_products):
  flops = model_flops.count_step(fn, _W, jnp.ones((8, 16)))
  assert flops.total == num_products * _ONCE


def test_loops_of_unknown_length_are_errors():
  def fn(w, x):
    return jnp.sum(jax.lax.fori_loop(0, x.astype(int)[0, 0], lambda i, x: x @ w, x))

  with pytest.raises(model_flops.UncountableError, match="'while' has products"):
    model_flops.count_step(fn, _W, jnp.ones((8, 16)))
  # Without products they are not.
  assert not model_flops.count_step(
    lambda w, x: jnp.sum(jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x)),
    _W,
    jnp.ones((8, 16)),
  ).total


def test_forms_are_chosen_for_counting_only():
  assert not layers.counts_products()
  with layers.counted_products():
    assert layers.counts_products()
  assert not layers.counts_products()
