"""Small models for decoding: tables of logits, with a cache that detects mixed or reordered rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

EOS = 1
# Number of states that a sequence's history is folded into.
_STATES = 97


def jit(fn, **options):
  """Jit with the compiler's optimizations off: most of these tests' time is compilation."""
  return jax.jit(fn, compiler_options={'xla_backend_optimization_level': 0}, **options)


def _fold(history, token):
  return (history * 31 + token * 7 + 3) % _STATES


class HistoryModel:
  """Model whose logits depend on all previous tokens, through one number per row in the cache.

  The cache is `{'layer': {'history': <int32>[rows], 'cache_index'}}`; with `offset` 1 leaves have a layer dim in front.
  `cache_index` counts steps; it is a scalar, or one number a row in a prefilled cache.
  """

  def __init__(self, vocab_size, seed=0, scale=2.0, offset=0, bias=None):
    table = np.random.default_rng(seed).normal(size=(_STATES, vocab_size)) * scale
    self.table = (table + (0.0 if bias is None else bias)).astype(np.float32)
    self.offset = offset
    self.calls = []

  def log_probs(self):
    return np.asarray(jax.nn.log_softmax(self.table), np.float64)

  def cache(self, contexts, prompts=None):
    """Return the cache of rows that start from `contexts` (one number per row), after `prompts` if given."""
    history = np.asarray(contexts, np.int32)
    if prompts is None:
      index = np.zeros((), np.int32)
    else:
      index = np.asarray([len(prompt) for prompt in prompts], np.int32)
      # The last token of a prompt is fed by the first step; the start token, 0, was fed before all of them.
      history = np.asarray(
        [
          self.history(c, prompt[:-1], empty=not prompt)
          for c, prompt in zip(history, prompts, strict=True)
        ]
      )
    leaves = {'history': jnp.asarray(history, jnp.int32), 'cache_index': jnp.asarray(index)}
    return {'layer': {name: x[None] if self.offset else x for name, x in leaves.items()}}

  @staticmethod
  def history(context, tokens, empty=False):
    """Return the cache of a row after the start token and `tokens`; the initial cache if `empty`."""
    for token in () if empty else (0, *tokens):
      context = int(_fold(context, token))
    return context

  def step(self, state):
    layer = state.cache['layer']
    history = _fold(layer['history'], state.cur_token[:, 0])
    logits = jnp.asarray(self.table)[history.reshape(-1)]
    return logits, {'layer': {'history': history, 'cache_index': layer['cache_index'] + 1}}

  def counting_step(self, state):
    jax.debug.callback(lambda _: self.calls.append(1), state.cache['layer']['cache_index'])
    return self.step(state)


def prompts_to_inputs(prompts, length):
  """Return <int32>[batch, length]: the start token 0, each row's prompt, zeros."""
  inputs = np.zeros((len(prompts), length), np.int32)
  for row, prompt in enumerate(prompts):
    inputs[row, 1 : 1 + len(prompt)] = prompt
  return jnp.asarray(inputs)


def lengths(prompts):
  return jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)


def all_finished(model, context, length, ends=(EOS,), prompt=()):
  """Return [(tokens, log-probability)] of every sequence of at most `length` tokens, prompt included, that ends."""
  log_probs, found = model.log_probs(), []
  vocab_size = log_probs.shape[1]
  others = [token for token in range(vocab_size) if token not in ends]
  for n in range(length - len(prompt)):
    for middle in itertools.product(others, repeat=n):
      for end in ends:
        history, total, tokens = context, 0.0, (*prompt, *middle, end)
        for i, (fed, chosen) in enumerate(zip((0, *tokens), tokens, strict=False)):
          history = int(_fold(history, fed))
          if i >= len(prompt):
            total += log_probs[history, chosen]
        found.append((tokens, total))
  return found
