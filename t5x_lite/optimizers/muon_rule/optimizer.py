"""Muon: momentum whose matrices are orthogonalized; AdamW for all arrays that are not kernels.

The state is that of `optax.contrib.muon`, an `optax.partition` with the labels 'muon' and 'adam', so that runs which
began with optax's continue.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.muon_rule import choice as choice_lib
from t5x_lite.optimizers.muon_rule import orthogonalize as orthogonalize_lib
from t5x_lite.optimizers.muon_rule.choice import MatrixChoice
from t5x_lite.optimizers.optax_adapter import option_checks
from t5x_lite.optimizers.optax_adapter import param_scales
from t5x_lite.optimizers.optax_adapter.wrapper import OptaxWrapper
from t5x_lite.types import Array, LogicalAxes, PyTree

# Default number of iterations.
_STEPS = 5


@checks.checks_arguments(choice_lib.OWNER)
def muon(
  learning_rate: Any = None,
  ns_coeffs: Any = 'standard',
  ns_steps: int = _STEPS,
  beta: Any = 0.95,
  eps: Any = 1e-8,
  weight_decay: Any = 0.0,
  weight_decay_mask: Any = None,
  mu_dtype: Any = None,
  *,
  nesterov: bool = True,
  adaptive: bool = False,
  preconditioning: str = 'frobenius',
  adam_b1: Any = 0.9,
  adam_b2: Any = 0.999,
  adam_eps_root: Any = 0.0,
  adam_weight_decay: Any = 0.0,
  adam_learning_rate: Any = None,
  muon_weight_dimension_numbers: None = None,
  consistent_rms: Any = None,
  matrices: Any = (),
) -> OptaxWrapper:
  """Return Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) with AdamW for other arrays.

  With g the gradient of a matrix [m, n], mapping m inputs to n outputs, t the number of updates from 1, and N five
  iterations of Newton-Schulz, which bring all singular values near 1, an update is

    mu = beta mu + (1 - beta) g
    h = beta mu / (1 - beta ** (t + 1)) + (1 - beta) g / (1 - beta ** t)
    p = p - learning_rate * (scale N(h) + weight_decay p)

  The matrices are the kernels of attention, MLP blocks and experts, and of adapters, one for each layer and expert in
  every parameter layout and in steps over stacked layers: an attention kernel is the matrix [embed, heads * head_dim],
  one each for query, key, value and output. Embeddings, logits, position tables, routers, scales and biases have AdamW
  with `eps` and `nesterov`. The trainer passes the logical axes that tell (`with_param_axes`); without them each array
  of two dims is a matrix, and all others have AdamW. The arguments are those of `optax.contrib.muon`, and `matrices`.

  Args:
    learning_rate: number or schedule; None means the trainer's.
    ns_coeffs: coefficients a, b, c of an iteration, a X + b (X X^T) X + c (X X^T)^2 X: three numbers, or three for each
      iteration; 'standard', Jordan's; or 'dion', five rows (Ahn et al. 2025, https://arxiv.org/abs/2504.05295).
    ns_steps: number of iterations; leave it out with rows of `ns_coeffs`, whose number it is then.
    beta: decay of the momentum.
    eps: added to the norm that divides a matrix, and to the root of AdamW's second moment.
    weight_decay: decoupled decay of the matrices, a number or a schedule (Liu et al. 2025, section 2.2,
      https://arxiv.org/abs/2502.16982, for long runs).
    weight_decay_mask: tree of bools like the parameters, or a function that returns one, True where matrices decay;
      requires `weight_decay`. With a mask layers are not stacked.
    mu_dtype: dtype of the momenta; None means float32.
    nesterov: h as above (Dozat 2016); False means mu / (1 - beta ** t).
    adaptive: multiply the update of a matrix by sum(h N(h)), the dual norm of h (Bernstein and Newhouse 2024,
      https://arxiv.org/abs/2409.20325).
    preconditioning: scaling before the first iteration: 'frobenius', by the norm; 'spectral', by the largest singular
      value, which costs more than the iterations; 'aol', by rows (https://arxiv.org/abs/2512.04632); 'schatten', by
      the Schatten-4 norm (https://arxiv.org/abs/2506.10935). The last two may save an iteration.
    adam_b1: decay of AdamW's first moment.
    adam_b2: decay of its second moment.
    adam_eps_root: added to the second moment under the root.
    adam_weight_decay: decay of the arrays with AdamW.
    adam_learning_rate: number or schedule for them; None means `learning_rate`.
    muon_weight_dimension_numbers: optax's option; must be None, since the logical axes tell the dims of matrices.
    consistent_rms: root mean square of updates: the scale is consistent_rms * sqrt(max(m, n)). With 0.2 it is about
      AdamW's (Liu et al. 2025, section 2.2), so that one learning rate suits all parameters. None means
      sqrt(max(1, n / m)), as Jordan's, with learning rates near 0.02.
    matrices: pairs (regular expression, bool) that change the choice of arrays: True for Muon, False for AdamW. The
      first expression that is found in an array's '/'-joined path decides. 'two_dims' chooses all arrays of two dims,
      embeddings included, and takes arrays as they are, as `optax.contrib.muon` does and earlier runs did.

  Raises:
    ConfigError: a value out of range, or a mask without `weight_decay`; when the state is made, an expression without
      effect or an array that is not a matrix.
  """
  options = dict(locals())
  scalars.check_learning_rate(learning_rate, choice_lib.OWNER)
  option_checks.check_options(choice_lib.OWNER, options)
  has_decay = param_scales.has_weight_decay({'weight_decay': weight_decay})
  if weight_decay_mask is not None and not has_decay:
    raise checks.invalid(
      choice_lib.OWNER,
      'weight_decay_mask',
      f'None with `{choice_lib.OWNER}.weight_decay` = {weight_decay}, with which it has no effect',
      weight_decay_mask,
      f'Set `{choice_lib.OWNER}.weight_decay`, or leave the mask out.',
    )
  iteration = orthogonalize_lib.Iteration(
    ns_coeffs=ns_coeffs, ns_steps=ns_steps, preconditioning=preconditioning, eps=eps
  )
  if ns_steps != _STEPS and iteration.coefficients.ndim == 2:
    raise checks.invalid(
      choice_lib.OWNER,
      'ns_steps',
      'the default with coefficients for each iteration, whose number is that of the iterations',
      ns_steps,
      'Leave it out, or give three coefficients.',
    )

  def scale_of(shape: tuple[int, ...]) -> Any:
    num_inputs, num_outputs = shape
    if consistent_rms is None:
      return math.sqrt(max(1.0, num_outputs / num_inputs))
    return consistent_rms * math.sqrt(max(num_inputs, num_outputs))

  def average_of(mu: Array, grad: Array, count: Array) -> Array:
    if not nesterov:
      return mu / (1 - beta**count)
    return beta * mu / (1 - beta ** (count + 1)) + (1 - beta) * grad / (1 - beta**count)

  def build(rate: Any, choice: MatrixChoice, scales: ParamScales) -> optax.GradientTransformation:
    adam_rate = rate if adam_learning_rate is None else adam_learning_rate
    adam = optax.scale_by_adam(
      adam_b1, adam_b2, eps, adam_eps_root, mu_dtype=mu_dtype, nesterov=nesterov
    )
    transformation = optax.partition(
      {
        choice_lib.MUON: optax.chain(
          _orthogonalized(choice, iteration, beta, average_of, scale_of, mu_dtype, adaptive),
          optax.identity(),  # optax's scale by shape, so that the states that follow keep their names
          param_scales.decay_weights(weight_decay, weight_decay_mask, scales),
          param_scales.scale_by_rate(rate, scales),
        ),
        choice_lib.ADAM: optax.chain(
          adam,
          param_scales.decay_weights(adam_weight_decay, None, scales),
          param_scales.scale_by_rate(adam_rate, scales),
        ),
      },
      choice.labels,
    )

    def init(params: PyTree) -> PyTree:
      choice.check(params)
      return transformation.init(params)

    return optax.GradientTransformationExtraArgs(init, transformation.update)

  return _MuonWrapper(build, options)


class _MuonWrapper(OptaxWrapper):
  """Muon's transformation for parameters with given axes."""

  ACCEPTS_STACKED_LAYERS = True

  def __init__(
    self,
    build: Callable[..., optax.GradientTransformation],
    options: Mapping[str, Any],
    param_logical_axes: LogicalAxes | None = None,
    scales: ParamScales = ParamScales(),
    logged: set[str] | None = None,
  ):
    if logged is None:
      logged = set()
    choice = MatrixChoice.of(options['matrices'], param_logical_axes, logged)

    def stacking_key(path: str, param: Array, state: Any) -> str | None:
      del state
      if options['weight_decay_mask'] is not None:  # may depend on single layers
        return None
      return choice.label_of(path, param)

    remade = functools.partial(_MuonWrapper, build, options, logged=logged)
    rate = options['learning_rate']
    if rate is None:
      rates = dict(learning_rate_factory=lambda rate: build(rate, choice, scales))
    else:
      optimizer = build(rate, choice, scales)
      rates = dict(optax_optimizer=optimizer, owns_learning_rate=True, own_learning_rate=rate)
    super().__init__(
      rebuild=lambda axes, _: remade(axes, scales),
      name=choice_lib.OWNER,
      stacking_key_fn=stacking_key,
      scale_support=param_scales.ScaleSupport(
        lambda scales: remade(param_logical_axes, scales), param_scales.has_weight_decay(options)
      ),
      **rates,
    )

  def restore_remedy(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """See base class."""
    return choice_lib.restore_remedy(stored, wanted)


def _orthogonalized(
  choice: MatrixChoice,
  iteration: orthogonalize_lib.Iteration,
  beta: Any,
  average_of: Callable[..., Array],
  scale_of: Callable[[tuple[int, ...]], Any],
  mu_dtype: Any,
  adaptive: bool,
) -> optax.GradientTransformation:
  """Return the transformation of gradients of matrices to orthogonalized averages, with optax's state.

  Args:
    choice: units of the parameters.
    iteration: options of the orthogonalization.
    beta: decay of the momentum.
    average_of: function from (momentum, gradient, number of the update from 1) to the average.
    scale_of: function from the shape of a matrix to the factor of its update.
    mu_dtype: see `muon`.
    adaptive: see `muon`.
  """

  def coefficients() -> Array:
    return jnp.asarray(iteration.coefficients, jnp.float32)

  def init(params: PyTree) -> optax.contrib.MuonState:
    mu = optax.tree.zeros_like(params, dtype=mu_dtype)
    return optax.contrib.MuonState(jnp.zeros([], jnp.int32), mu, coefficients())

  def update(
    updates: PyTree, state: optax.contrib.MuonState, params: PyTree = None
  ) -> tuple[PyTree, optax.contrib.MuonState]:
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, updates)
    units = [choice.units.of(path, grad) for path, grad in tree_utils.named_leaves(updates)]
    # <float>[*batch, m, n] each: the matrices of an array.
    averages = []
    for each, m, g in zip(units, jax.tree.leaves(mu), jax.tree.leaves(updates), strict=True):
      averages.append(each.split(average_of(m, g, count).astype(g.dtype)))
    directions = orthogonalize_lib.orthogonalize(
      averages, [each.batch_axes for each in units], iteration
    )
    results = []
    for each, average, direction in zip(units, averages, directions, strict=True):
      if adaptive:
        dual_norm = jnp.sum(average.conj() * direction, axis=(-2, -1), keepdims=True)
        direction = dual_norm * direction
      results.append(each.join(scale_of(each.unit_shape) * direction))
    # The coefficients are those of the options, also if the state was restored.
    new_state = optax.contrib.MuonState(count, optax.tree.cast(mu, mu_dtype), coefficients())
    return jax.tree.structure(updates).unflatten(results), new_state

  # Gradients are `updates` in optax's protocol.
  return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))
