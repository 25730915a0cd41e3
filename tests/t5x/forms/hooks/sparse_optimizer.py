"""An optimizer whose state has masks of the parameters, with rules for the axes of this state and of one of optax.

T5X calls an entry of `OptaxStatePartitionRules._RULES` with (state, axes of the parameters). It returns the state with
axes, and None for what is replicated. T5X's `derive_optax_logical_axes` gives None for arrays outside of states.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from t5x import optimizers

Rules = optimizers.OptaxStatePartitionRules


class SparseState(NamedTuple):
  masks: Any
  sparsities: Any
  count: Any
  inner_state: Any


def sparse(inner):
  def init(params):
    masks = jax.tree.map(lambda param: jnp.ones_like(param, jnp.uint8), params)
    sparsities = jax.tree.map(lambda param: jnp.full((2,), 0.5), params)
    return SparseState(masks, sparsities, jnp.zeros([], jnp.int32), inner.init(params))

  def update(updates, state, params=None):
    updates, inner_state = inner.update(updates, state.inner_state, params)
    updates = jax.tree.map(lambda update, mask: update * mask, updates, state.masks)
    return updates, state._replace(inner_state=inner_state, count=state.count + 1)

  return optax.GradientTransformation(init, update)


def sparse_axes(state, params_axes):
  return SparseState(
    masks=params_axes,
    sparsities=jax.tree.map(lambda x: None, state.sparsities),
    count=None,
    inner_state=Rules.derive_optax_logical_axes(state.inner_state, params_axes),
  )


def factored_axes(state, params_axes):
  derive = Rules.derive_optax_logical_axes
  fields = {name: derive(getattr(state, name), params_axes) for name in ('v_row', 'v_col', 'v')}
  return optax.FactoredState(count=None, **fields)


Rules._RULES[SparseState] = sparse_axes
Rules._RULES[optax.FactoredState] = factored_axes
optimizer = optimizers.OptaxWrapper(sparse(optax.scale_by_factored_rms(min_dim_size_to_factor=2)))
