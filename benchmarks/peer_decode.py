"""A peer for decoding: T5 1.1 step by step in the formulation that T5X's example network and search use.

On this package's parameters. A step embeds its tokens by a one-hot product, computes the decoder's position biases for
all pairs of positions and slices its row out, writes keys and values by adding a one-hot product to a cache
[rows, heads, head_dim, length], and projects the encoder's output, a copy for every beam, to keys and values. Beams are
ranked by a plain top-k and reordered, with their caches, by one-hot products. Sampling from the top k finds the k-th
largest logit by bisection. It decodes the same tokens as this package (`tests/repository/test_benchmarks.py`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import peer_t5

_MINUS_INFINITY = -1e7


def keep_top(x: jax.Array, k: int) -> jax.Array:
  """Replace all but the `k` largest of each row of float32 [rows, n] by -1e7; entries equal to the k-th largest stay.

  The k-th largest is found bit by bit, by 32 counts of a whole row. T5X has this cost, which on CPU is far below that
  of `jax.lax.top_k`.
  """
  columns = x.T  # counts along the first dim are vectorized
  top_bit = jnp.uint32(1 << 31)

  def as_float(bits):
    """Return the float with rank `bits` among all floats: uint32 in ascending order to float32 in ascending order."""
    bits = jnp.where(bits >= top_bit, bits ^ top_bit, ~bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

  def try_bit(i, bits):
    higher = bits | (top_bit >> i)
    is_low_enough = jnp.sum(columns >= as_float(higher), axis=0) >= k
    return jnp.where(is_low_enough, higher, bits)

  threshold = as_float(
    jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), try_bit, jnp.zeros(x.shape[:1], jnp.uint32))
  )
  return jnp.where(x >= threshold[:, None], x, _MINUS_INFINITY)


def _heads(x: jax.Array, kernel: jax.Array, num_heads: int) -> jax.Array:
  return (x @ kernel).reshape(*x.shape[:-1], num_heads, -1)


def _mix(query, key, value, bias, out):
  weights = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', query, key) + bias)
  mixed = jnp.einsum('bhqk,bkhd->bqhd', weights, value)
  return mixed.reshape(*mixed.shape[:2], -1) @ out


def _step(params, config, encoded, is_input, cache, tokens, index, length):
  """Return (logits [rows, vocab], cache) for tokens [rows, 1] at position `index`."""
  decoder, num_heads = params['decoder'], config.num_heads
  at_index = jax.nn.one_hot(index, length, dtype=jnp.float32)
  visible = jnp.where(jnp.arange(length) <= index, 0.0, -1e10)
  biases = peer_t5._position_biases(decoder['relpos_bias']['rel_embedding'], length, False)
  bias = jax.lax.dynamic_slice_in_dim(biases, index, 1, axis=2) + visible
  cross_bias = jnp.where(is_input, 0.0, -1e10)[:, None, None, :]
  x = peer_t5._embed(params['token_embedder']['embedding'], tokens)
  new_cache = {}
  for i in range(config.num_decoder_layers):
    layer, name = decoder[f'layers_{i}'], f'layers_{i}'
    attention = layer['self_attention']
    y = peer_t5._norm(x, layer['pre_self_attention_layer_norm']['scale'])
    new_cache[name] = {
      kind: cache[name][kind]
      + jnp.moveaxis(_heads(y, attention[kind]['kernel'], num_heads), 1, 3) * at_index
      for kind in ('key', 'value')
    }
    key, value = (jnp.moveaxis(new_cache[name][kind], 3, 1) for kind in ('key', 'value'))
    x += _mix(
      _heads(y, attention['query']['kernel'], num_heads),
      key,
      value,
      bias,
      attention['out']['kernel'],
    )

    attention = layer['encoder_decoder_attention']
    y = peer_t5._norm(x, layer['pre_cross_attention_layer_norm']['scale'])
    key, value = (
      _heads(encoded, attention[kind]['kernel'], num_heads) for kind in ('key', 'value')
    )
    x += _mix(
      _heads(y, attention['query']['kernel'], num_heads),
      key,
      value,
      cross_bias,
      attention['out']['kernel'],
    )
    x += peer_t5._feed_forward(layer['mlp'], peer_t5._norm(x, layer['pre_mlp_layer_norm']['scale']))
  logits = peer_t5._norm(x, decoder['decoder_norm']['scale']) @ decoder['logits_dense']['kernel']
  return logits[:, 0], new_cache


def _empty_cache(config, rows, length):
  shape = (rows, config.num_heads, config.head_dim, length)
  return {
    f'layers_{i}': {'key': jnp.zeros(shape), 'value': jnp.zeros(shape)}
    for i in range(config.num_decoder_layers)
  }


def sample(
  params: Mapping[str, Any],
  inputs: jax.Array,
  rng: jax.Array,
  config: Any,
  *,
  length: int,
  temperature: float,
  topk: int,
) -> jax.Array:
  """Decode `length` tokens for each row; nothing ends a sequence.

  Args:
    params: parameters of `networks.t5.Transformer` in the `t5` layout, 1.1 form.
    inputs: int32 [batch, input length].
    rng: key of the draws.
    config: a `T5Config`.
    length: number of tokens.
    temperature: 0 takes the most probable token.
    topk: draw from this many tokens; 0 from all.

  Returns:
    int32 [batch, length].
  """
  encoded, is_input, rows = peer_t5.encode(params, inputs, config), inputs > 0, inputs.shape[0]

  def draw(args):
    rng, logits = args
    scaled = logits / jnp.maximum(temperature, 1e-4)
    if topk:
      scaled = keep_top(scaled, topk)
    token = jax.random.categorical(rng, scaled).astype(jnp.int32)
    return token, jnp.take_along_axis(jax.nn.log_softmax(scaled), token[:, None], axis=1)[:, 0]

  def best(args):
    _, logits = args
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(logits.shape[:1])

  def body(state):
    index, tokens, sequences, cache, rng, log_prob = state
    now, rng = jax.random.split(rng)
    logits, cache = _step(params, config, encoded, is_input, cache, tokens, index, length)
    token, token_log_prob = jax.lax.cond(temperature > 1e-4, draw, best, (now, logits))
    sequences = sequences + token[:, None] * jax.nn.one_hot(index, length, dtype=jnp.int32)
    return index + 1, token[:, None], sequences, cache, rng, log_prob + token_log_prob

  def zeros(*shape):
    return jnp.zeros(shape, jnp.int32)

  state = (
    zeros(),
    zeros(rows, 1),
    zeros(rows, length),
    _empty_cache(config, rows, length),
    rng,
    jnp.zeros(rows),
  )
  final = jax.lax.while_loop(lambda state: state[0] < length, body, state)
  return final[2]


def beam_search(
  params: Mapping[str, Any], inputs: jax.Array, config: Any, *, length: int, num_beams: int
) -> jax.Array:
  """Follow the `num_beams` most probable sequences of `length` tokens of each row; nothing ends a sequence.

  Args:
    params: parameters of `networks.t5.Transformer` in the `t5` layout, 1.1 form.
    inputs: int32 [batch, input length].
    config: a `T5Config`.
    length: number of tokens.
    num_beams: number of beams.

  Returns:
    int32 [batch, num_beams, length], the best last.
  """
  batch, vocab_size = inputs.shape[0], config.vocab_size
  encoded = jnp.repeat(peer_t5.encode(params, inputs, config), num_beams, axis=0)
  is_input = jnp.repeat(inputs > 0, num_beams, axis=0)

  def reorder(x, beams, old):
    """Take `beams` [batch, new] of x [batch * old, ...]."""
    chosen = jax.nn.one_hot(beams, old, dtype=x.dtype)
    x = jnp.einsum('bno,bo...->bn...', chosen, x.reshape(batch, old, *x.shape[1:]))
    return x.reshape(-1, *x.shape[2:])

  def body(state):
    index, log_probs, sequences, cache = state
    tokens = jax.lax.dynamic_slice_in_dim(sequences, index, 1, axis=1)
    logits, cache = _step(params, config, encoded, is_input, cache, tokens, index, length)
    scores = jax.nn.log_softmax(logits).reshape(batch, num_beams, -1) + log_probs[:, :, None]
    # As many again as there are beams: any of them might end.
    scores, flat = jax.lax.top_k(scores.reshape(batch, -1), 2 * num_beams)
    candidates = reorder(sequences, flat // vocab_size, num_beams).reshape(batch, 2 * num_beams, -1)
    tokens = (flat % vocab_size)[:, :, None]
    candidates = jax.lax.dynamic_update_slice_in_dim(candidates, tokens, index + 1, axis=2)
    log_probs, kept = jax.lax.top_k(scores, num_beams)
    log_probs, kept = log_probs[:, ::-1], kept[:, ::-1]
    sequences = reorder(candidates.reshape(batch * 2 * num_beams, -1), kept, 2 * num_beams)
    beams = jnp.take_along_axis(flat // vocab_size, kept, axis=1)
    cache = jax.tree.map(lambda x: reorder(x, beams, num_beams), cache)
    return index + 1, log_probs, sequences, cache

  state = (
    jnp.zeros((), jnp.int32),
    jnp.full((batch, num_beams), _MINUS_INFINITY).at[:, 0].set(0.0),
    jnp.zeros((batch * num_beams, length + 1), jnp.int32),
    _empty_cache(config, batch * num_beams, length),
  )
  final = jax.lax.while_loop(lambda state: state[0] < length, body, state)
  return final[2].reshape(batch, num_beams, -1)[:, :, 1:]
