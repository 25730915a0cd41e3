"""Muon: momentum whose matrices are orthogonalized; AdamW for all arrays that are no kernels.

The state is that of `optax.contrib.muon`, an `optax.partition` with the labels 'muon' and 'adam', so that runs which
began with optax's continue.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.muon_rule import choice as choice_lib
from t5x_lite.optimizers.muon_rule.choice import MatrixChoice
from t5x_lite.optimizers.muon_rule.orthogonalize import Iteration
from t5x_lite.optimizers.muon_rule.orthogonalize import orthogonalize
from t5x_lite.optimizers.optax_adapter import option_checks
from t5x_lite.optimizers.optax_adapter import param_scales
from t5x_lite.optimizers.optax_adapter.wrapper import OptaxWrapper
from t5x_lite.types import Array, LogicalAxes, PyTree

# Function from (learning rate, choice of arrays, scales by parameter) to the transformation.
_BuildFn = Callable[[Any, MatrixChoice, ParamScales], optax.GradientTransformation]


@checks.checks_arguments(choice_lib.OWNER)
def muon(
  learning_rate: Any = None,
  ns_coeffs: Any = 'standard',
  ns_steps: int = 5,
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
    ns_steps: number of iterations; with rows of `ns_coeffs` it is the number of rows.
    beta: decay of the momentum.
    eps: added to the norm that divides a matrix, and to the root of AdamW's second moment.
    weight_decay: decoupled decay of the matrices, a number or a schedule (Liu et al. 2025, section 2.2,
      https://arxiv.org/abs/2502.16982, for long runs).
    weight_decay_mask: tree of bools like the parameters, or a function that returns one, True where matrices decay.
      With a mask layers are not stacked.
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
    ConfigError: a value out of range; when the state is made, an expression without effect or an array that is no
      matrix.
  """
  options = dict(locals())
  scalars.check_learning_rate(learning_rate, choice_lib.OWNER)
  option_checks.check_options(choice_lib.OWNER, options)
  iteration = Iteration(
    ns_coeffs=ns_coeffs, ns_steps=ns_steps, preconditioning=preconditioning, eps=eps
  )

  def build(rate: Any, choice: MatrixChoice, scales: ParamScales) -> optax.GradientTransformation:
    adam_rate = adam_learning_rate
    if adam_rate is None:
      adam_rate = rate
    direction = _orthogonalized_momentum(
      choice, iteration, beta, mu_dtype, nesterov=nesterov, adaptive=adaptive
    )
    adam = optax.scale_by_adam(
      adam_b1, adam_b2, eps, adam_eps_root, mu_dtype=mu_dtype, nesterov=nesterov
    )
    transformation = optax.partition(
      {
        choice_lib.MUON: optax.chain(
          direction,
          _scale_by_shape(choice, consistent_rms),
          param_scales.add_decayed_weights(weight_decay, weight_decay_mask, scales),
          param_scales.scale_by_learning_rate(rate, scales),
        ),
        choice_lib.ADAM: optax.chain(
          adam,
          param_scales.add_decayed_weights(adam_weight_decay, None, scales),
          param_scales.scale_by_learning_rate(adam_rate, scales),
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
    build: _BuildFn,
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

    common = dict(
      rebuild=lambda axes, _: _MuonWrapper(build, options, axes, scales, logged),
      name=choice_lib.OWNER,
      stacking_key_fn=stacking_key,
      scale_support=param_scales.ScaleSupport(
        lambda scales: _MuonWrapper(build, options, param_logical_axes, scales, logged),
        param_scales.has_weight_decay(options),
      ),
    )
    rate = options['learning_rate']
    if rate is None:
      super().__init__(learning_rate_factory=lambda rate: build(rate, choice, scales), **common)
    else:
      super().__init__(
        build(rate, choice, scales), owns_learning_rate=True, own_learning_rate=rate, **common
      )

  def restore_remedy(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """See base class."""
    return choice_lib.restore_remedy(stored, wanted)


def _orthogonalized_momentum(
  choice: MatrixChoice,
  iteration: Iteration,
  beta: Any,
  mu_dtype: Any,
  *,
  nesterov: bool,
  adaptive: bool,
) -> optax.GradientTransformation:
  """Return the transformation of gradients of matrices to orthogonalized momenta, with optax's state."""
  coefficients = iteration.coefficients.astype('float32')

  def init(params: PyTree) -> optax.contrib.MuonState:
    return optax.contrib.MuonState(
      count=jnp.zeros([], jnp.int32),
      mu=optax.tree.zeros_like(params, dtype=mu_dtype),
      ns_coeffs=jnp.asarray(coefficients),
    )

  def update(
    updates: PyTree, state: optax.contrib.MuonState, params: PyTree = None
  ) -> tuple[PyTree, optax.contrib.MuonState]:
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, updates)

    def averaged(path: str, m: Array, g: Array) -> Array:
      """Return the units [..., m, n] of the average that is orthogonalized."""
      if nesterov:
        average = beta * m / (1 - beta ** (count + 1)) + (1 - beta) * g / (1 - beta**count)
      else:
        average = m / (1 - beta**count)
      return choice.units.of(path, g).split(average.astype(g.dtype))

    averages, treedef = jax.tree.flatten(tree_utils.map_with_names(averaged, mu, updates))
    batch_axes = [
      choice.units.of(path, grad).batch_axes for path, grad in tree_utils.named_leaves(updates)
    ]
    directions = orthogonalize(averages, batch_axes, iteration)
    if adaptive:
      directions = [
        jnp.sum(x.conj() * y, axis=(-2, -1), keepdims=True) * y
        for x, y in zip(averages, directions, strict=True)
      ]
    new_updates = tree_utils.map_with_names(
      lambda path, g, y: choice.units.of(path, g).join(y), updates, treedef.unflatten(directions)
    )
    mu = optax.tree.cast(mu, mu_dtype)
    # The coefficients are those of the options, also if the state was restored.
    new_state = optax.contrib.MuonState(count=count, mu=mu, ns_coeffs=jnp.asarray(coefficients))
    return new_updates, new_state

  return optax.GradientTransformation(init, update)


def _scale_by_shape(choice: MatrixChoice, consistent_rms: Any) -> optax.GradientTransformation:
  """Return the transformation that multiplies the updates of matrices by a factor of their shape."""

  def scaled(path: str, update: Array) -> Array:
    num_inputs, num_outputs = choice.units.of(path, update).unit_shape
    if consistent_rms is None:
      return math.sqrt(max(1.0, num_outputs / num_inputs)) * update
    return consistent_rms * math.sqrt(max(num_inputs, num_outputs)) * update

  return optax.stateless(lambda updates, params: tree_utils.map_with_names(scaled, updates))
