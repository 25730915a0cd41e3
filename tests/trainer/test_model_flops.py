"""Model FLOPs: against XLA's count of the training step, the products of its program, and a formula."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from t5x_lite import adapters
from t5x_lite import layers
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite.networks import decoder_only
from t5x_lite.trainer import model_flops
from tests.trainer import flops_cases as cases


def _decoder():
  return decoder_only.DecoderWrapper(
    decoder_only.TransformerConfig(
      **cases.WIDE, num_layers=2, mlp_activations=('gelu', 'linear'), dropout_rate=0.0
    )
  )


def _trains(pattern):
  return optimizers.MultiOptimizer([(pattern, optimizers.sgd(0.1))])


_T5_1_0 = dict(mlp_activations=('relu',), logits_via_embedding=True)
_STEPS = {
  't5_1_0': functools.partial(cases.make_trainer, cases.t5_network(**_T5_1_0)),
  't5_1_1': functools.partial(cases.make_trainer, cases.t5_network()),
  'decoder_only': functools.partial(cases.make_trainer, _decoder()),
  'lora': functools.partial(
    cases.make_trainer,
    cases.t5_network(),
    model_options={'adapter': adapters.Lora(rank=8, targets='all')},
  ),
  'last layers': functools.partial(
    cases.make_trainer, cases.t5_network(), _trains('decoder/(layers_1|logits)')
  ),
  'embeddings': functools.partial(
    cases.make_trainer, cases.t5_network(), _trains('token_embedder')
  ),
}


@pytest.mark.parametrize('name', _STEPS)
def test_xla_counts_the_same_in_the_step(name):
  trainer, batch = _STEPS[name]()
  counted = trainer.count_flops(batch).total
  traced = cases.trace(trainer, batch)
  assert counted == cases.products(traced)
  assert counted == cases.flops_by_xla(traced)


def test_layers_in_loops_count_as_often_as_they_run():
  trainer, batch = cases.make_trainer(cases.t5_network(scan_layers=True))
  counted = trainer.count_flops(batch).total
  assert counted == cases.products(cases.trace(trainer, batch))
  assert counted == cases.count(cases.t5_network())


def test_t5_1_1_by_hand():
  emb, joined, mlp, vocab = 128, 2 * 64, 256, 256
  inputs, targets = cases.ROWS * cases.INPUTS, cases.ROWS * cases.TARGETS
  attention = 4 * emb * joined
  encoder = inputs * (attention + 3 * emb * mlp) + 2 * cases.ROWS * cases.INPUTS**2 * joined
  decoder = targets * (attention + 2 * emb * joined + 3 * emb * mlp)
  decoder += inputs * 2 * emb * joined
  # The square of causal attention, not its half.
  decoder += 2 * cases.ROWS * (cases.TARGETS**2 + cases.TARGETS * cases.INPUTS) * joined
  assert cases.count(cases.t5_network()) == 6 * (2 * encoder + 2 * decoder + targets * emb * vocab)


@pytest.mark.parametrize(
  'fields',
  [
    {'remat_policy': 'full'},
    {'attention_kernel': 'blockwise'},
    {'loss_chunk_size': 100},
    {'qk_clip_threshold': 100.0},
    {'dropout_rate': 0.1},
    {'param_layout': 'scalable_t5'},
  ],
  ids=str,
)
def test_how_a_step_is_computed_does_not_count(fields):
  assert cases.count(cases.t5_network(**fields)) == cases.count(cases.t5_network())


def test_scores_of_long_rows_are_a_full_square():
  # Longer than a block, and not a multiple of it.
  length, heads, head_dim = 2500, 2, 16
  x = jnp.ones((1, length, heads, head_dim))
  bias = layers.causal_bias(length, length)

  def loss_fn(kernel, query, key, value):
    return jnp.sum(layers.dot_product_attention(query, key, value, bias, kernel=kernel))

  for kernel in ('dot', 'blockwise'):
    flops = model_flops.count_step(lambda args, kernel=kernel: loss_fn(kernel, *args), (x, x, x))
    assert flops.total == 3 * 2 * 2 * length**2 * heads * head_dim


def test_options_of_the_trainer_do_not_count():
  plain = cases.count(cases.t5_network())
  assert cases.count(cases.t5_network(), optimizers.muon(0.1)) == plain
  assert cases.count(cases.t5_network(), num_microbatches=4) == plain
  sharded = partitioning.PjitPartitioner(mesh=cases.mesh_of(4, 2))
  assert cases.count(cases.t5_network(), partitioner=sharded) == plain


def test_dtypes_are_those_of_the_operands():
  trainer, batch = cases.make_trainer(cases.t5_network(dtype='bfloat16'), train_dtype='bfloat16')
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


def test_loops_carry_what_they_train():
  def fn(w, v, x):
    def body(carry, _):
      h, added = carry
      return (h @ v + added, h @ w), None

    return jnp.sum(jax.lax.scan(body, (x, x), length=3)[0][0])

  # The first `h` depends on no parameter, the later ones do: each product has gradients of `h`, one also of `w`.
  flops = model_flops.count_step(fn, _W, _W, jnp.ones((8, 16)))
  assert flops.total == 3 * (2 + 3) * _ONCE


def test_loops_of_unknown_length_are_errors():
  def fn(w, x):
    return jnp.sum(jax.lax.fori_loop(0, x.astype(int)[0, 0], lambda i, x: x @ w, x))

  with pytest.raises(model_flops.UncountableError, match="'while' has products"):
    model_flops.count_step(fn, _W, jnp.ones((8, 16)))
  with pytest.raises(model_flops.UncountableError, match="'ragged_dot_general' has products"):
    model_flops.count_step(
      _loss(lambda w, x: jax.lax.ragged_dot(x, w[None], jnp.full(1, 8))), _W, jnp.ones((8, 16))
    )
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
