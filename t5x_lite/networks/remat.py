"""Rematerialization of a layer: the policies by name, and their effect on a CPU.

A policy says which results of a layer are stored for its backward pass, which computes the others again. Chen et al.
2016, https://arxiv.org/abs/1604.06174, section 3. Layers name their results with `jax.ad_checkpoint.checkpoint_name`.
"""

from collections.abc import Callable, Sequence
import functools
import logging
from typing import Any

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layers

PyTree = Any

# Names of results. 'layer_input' is the residual stream, 'attention_weights' are the exponentials of the softmax, and
# 'mlp_hidden' and 'expert_hidden' are hidden units before their activation. 'attention_context', the sum of values by
# attention, includes the log-sum-exp of fused kernels, which compute no weights.
RESULT_NAMES = (
  'layer_input',
  'query',
  'key',
  'value',
  'attention_weights',
  'attention_context',
  'attention_output',
  'mlp_hidden',
  'mlp_output',
  'expert_hidden',
  'expert_output',
)
# Names that each policy stores, in addition to `_stores_primitive`. Products of experts are not known by their
# primitives: they have batch dims, or are within kernels with custom derivatives. 'adapted' is the sum of the products
# with a kernel and with its adapter, of which both would be stored otherwise.
_STORED_NAMES = {
  'none': ('blockwise_context', 'expert_hidden', 'expert_output', 'adapted'),
  'minimal': ('expert_hidden', 'expert_output', 'adapted'),
  'save_attention': ('attention_weights', 'attention_context'),
  'save_dots_except_mlp': ('query', 'key', 'value', 'attention_output'),
  'full': (),
  'offload': (),
}
REMAT_POLICIES = tuple(_STORED_NAMES)
# Operations on elements that cost less to repeat, as a part of the operation that needs their result, than a loop needs
# to write and read it. Comparisons are not among them: their results, such as dropout's masks, are small.
_CHEAP_PRIMITIVES = frozenset(
  (
    'abs',
    'add',
    'broadcast_in_dim',
    'convert_element_type',
    'div',
    'integer_pow',
    'max',
    'min',
    'mul',
    'name',
    'neg',
    'one_minus_square',  # of the derivative of tanh, from JAX 0.11 on
    'reshape',
    'rsqrt',
    'select_n',
    'sharding_constraint',
    'sign',
    'slice',
    'sqrt',
    'square',
    'squeeze',
    'sub',
    'transpose',
  )
)
# Forward pass of cuDNN's fused attention in JAX: context and log-sum-exp, without a name.
_CUDNN_FORWARD = 'dot_product_attention_fwd_wrapper'
_ON_HOST = ad_checkpoint.Offloadable(src='device', dst='pinned_host')

_logger = logging.getLogger(__name__)


def remat(
  fn: Callable[..., Any], policy: str, offload: Sequence[str] = (), *, in_loop: bool
) -> Callable[..., Any]:
  """Return `fn` with rematerialization in the backward pass.

  Outside of loops on one CPU device, the result has no forward-mode derivatives.

  Args:
    fn: pure function of arrays.
    policy: one of `REMAT_POLICIES`.
    offload: names, out of `RESULT_NAMES`, of the results that 'offload' stores in the host's memory.
    in_loop: True if `fn` is the body of a loop, where the compiler cannot merge the second computation with the first.

  Raises:
    ConfigError: unknown policy.
  """
  checks.check('', {'remat_policy': policy}, remat_policy=checks.one_of(REMAT_POLICIES))
  if policy == 'none' and not in_loop:
    return fn
  on_cpu = layers.traced_platform() == 'cpu'
  reason = None
  unrolled_on_cpu, several_devices = (
    on_cpu and not in_loop,
    jax.sharding.get_abstract_mesh().size > 1,
  )
  if on_cpu and policy == 'offload':
    reason = (
      'a CPU has no other memory, so results to offload stay where they are. Use it on TPUs or GPUs'
    )
  elif unrolled_on_cpu and several_devices:
    reason = (
      'on several CPU devices, XLA would compute layers outside of loops again before their results are '
      'needed. Set scan_layers=True'
    )

  def decide(primitive, *avals, **params) -> Any:
    # JAX asks only if there is a backward pass.
    if reason is not None:
      _warn(policy, reason)
    if unrolled_on_cpu and several_devices:
      return ad_checkpoint.Saveable
    name = params['name'] if primitive.name == 'name' else None
    if primitive.name == _CUDNN_FORWARD:
      name = 'attention_context'
    if name in offload:
      if on_cpu:
        return ad_checkpoint.Saveable
      return _ON_HOST
    is_stored = name in _STORED_NAMES[policy] or _stores_primitive(
      policy, primitive, *avals, **params
    )
    if is_stored:
      return ad_checkpoint.Saveable
    return ad_checkpoint.Recompute

  rematerialized = jax.checkpoint(fn, policy=decide, prevent_cse=not in_loop)
  if unrolled_on_cpu and not several_devices:
    return _after_cotangents(rematerialized)
  return rematerialized


def _stores_primitive(policy: str, primitive: Any, *avals: Any, **params: Any) -> bool:
  """Return whether `policy` stores the results of an operation, whatever their name."""
  if policy == 'minimal':
    return jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims(primitive, *avals, **params)
  return policy == 'none' and primitive.name not in _CHEAP_PRIMITIVES


@functools.cache
def _warn(policy: str, reason: str) -> None:
  """Log, once in a process, that a policy has no effect."""
  _logger.warning('remat_policy=%r has no effect: %s.', policy, reason)


def _after_cotangents(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Return `fn` whose backward pass, on one CPU device, starts only when the cotangents of its results are computed.

  The compiler of the CPU removes JAX's optimization barriers before it orders the operations, and then computes all
  layers again at the beginning of the backward pass. It cannot know that cotangents are numbers, so values selected by
  this condition, which is fused into the next operation on an array, depend on them. With cotangents that are not
  numbers, the gradients are not numbers either.
  """

  @jax.custom_vjp
  def run(*args):
    return fn(*args)

  def forward(*args):
    return jax.vjp(fn, *args)

  def backward(pullback, cotangents):
    floats = [leaf for leaf in jax.tree.leaves(cotangents) if _is_float(leaf) and leaf.size]
    is_invalid = functools.reduce(
      jnp.logical_or, [jnp.isnan(leaf[(0,) * leaf.ndim]) for leaf in floats], jnp.array(False)
    )
    pullback = jax.tree.map(
      lambda leaf: (
        jnp.where(is_invalid, jnp.asarray(jnp.nan, leaf.dtype), leaf) if _is_float(leaf) else leaf
      ),
      pullback,
    )
    return pullback(cotangents)

  run.defvjp(forward, backward)
  return run


def _is_float(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jnp.floating)
