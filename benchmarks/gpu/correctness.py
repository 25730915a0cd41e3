"""Part 'correctness': results of the device against those of the CPU of the same machine, which compute in float32.

A case is a function of random arrays. Its reference is computed by another process on the CPU with the same arrays,
while the device compiles. Variants are 'float32' (products with full precision), 'default' (products as JAX computes
them by default, TF32 on NVIDIA GPUs) and 'bfloat16'. An error is the largest norm of the difference of an array,
relative to that of the reference; for tokens it is the share of different ones.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu import items

# Largest relative error by variant: float32 sums in another order, 10 bits of TF32, 7 bits of bfloat16.
_TOLERANCES = {'float32': 1e-4, 'default': 2e-2, 'bfloat16': 4e-2}
# Seconds after which the reference of a case is not waited for.
_PATIENCE = 300.0


@dataclasses.dataclass(frozen=True)
class Case:
  """A computation that is compared.

  Attributes:
    name: name in the results.
    shapes: function that returns a tree of the shapes of random arrays.
    compute: function of (arrays, variant) that returns a tree of arrays, traced.
    tolerances: largest error by variant.
    scale: standard deviation of the arrays.
  """

  name: str
  shapes: Callable[[], Any]
  compute: Callable[[Any, str], Any]
  tolerances: Mapping[str, float]
  scale: float = 1.0


def _dtype(variant: str) -> str:
  return 'bfloat16' if variant == 'bfloat16' else 'float32'


def _model(variant: str, sizes: str, decode_fn: Any = None, **fields):
  """Return a model without an optimizer."""
  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  width, num_layers = {'real': (256, 2), 'tiny': (32, 1)}[sizes]
  config = t5.T5Config(
    vocab_size=256,
    dtype=_dtype(variant),
    emb_dim=width,
    num_heads=width // 16,
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
    head_dim=16,
    mlp_dim=2 * width,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    **fields,
  )
  vocabulary = vocabularies.PassThroughVocabulary(256)
  options = {}
  if decode_fn is not None:
    options['decode_fn'] = decode_fn
  return models.EncoderDecoderModel(
    t5.Transformer(config), vocabulary, vocabulary, None, z_loss=1e-4, **options
  )


def _batch(sizes: str, is_packed: bool) -> dict[str, Any]:
  """Return a batch of random tokens with padding, as NumPy arrays."""
  import numpy as np

  rows, length = {'real': (8, 128), 'tiny': (2, 16)}[sizes]
  random = np.random.default_rng(0)
  batch = {
    name: random.integers(2, 250, (rows, length)).astype(np.int32)
    for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
  }
  batch['decoder_loss_weights'] = np.ones((rows, length), np.int32)
  for value in batch.values():
    value[1, length // 2 :] = 0
  if is_packed:
    segments = np.tile(np.arange(length, dtype=np.int32) // (length // 2) + 1, (rows, 1))
    segments[1, length // 2 :] = 0
    positions = np.tile(np.arange(length, dtype=np.int32) % (length // 2), (rows, 1))
    for side in ('encoder', 'decoder'):
      batch[f'{side}_segment_ids'] = segments
      batch[f'{side}_positions'] = positions
  return batch


def _params(sizes: str) -> Any:
  """Return the shapes of the parameters of `_model`."""
  import jax

  model = _model('float32', sizes)
  shapes = {name: value.shape for name, value in _batch(sizes, False).items()}
  return jax.eval_shape(
    lambda key: model.get_initial_variables(key, shapes)['params'], jax.random.key(0)
  )


def _normal(*shapes: tuple[int, ...]) -> Any:
  import jax
  import jax.numpy as jnp

  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _network(params, variant: str, *, sizes: str, is_packed: bool):
  """Return the loss of a network and its gradients."""
  import jax

  model = _model(variant, sizes)
  batch = _batch(sizes, is_packed)
  return jax.value_and_grad(lambda params: model.loss_fn(params, batch, None)[0])(params)


def _loss(params, variant: str, *, sizes: str):
  """Return the loss of all logits at once and in chunks, with label smoothing, and the gradients of both."""
  import jax

  del variant
  found = []
  batch = _batch(sizes, False)
  for chunk in (0, 8):
    model = _model('float32', sizes, loss_chunk_size=chunk)
    found.append(
      jax.value_and_grad(lambda params, model=model: model.loss_fn(params, batch, None)[0])(params)
    )
  return found


def _decoding(params, variant: str, *, sizes: str, search: str):
  """Return the tokens of a search, none of which ends early."""
  import jax

  from t5x_lite import decoding

  model = _model(variant, sizes, getattr(decoding, search))
  batch = _batch(sizes, False)
  num_decodes = 4 if search == 'beam_search' else 1
  return model.predict_batch_with_aux(
    params,
    batch,
    rng=jax.random.key(1),
    decoder_params={'eos_id': 256},
    num_decodes=num_decodes,
    return_all_decodes=True,
  )[0]


# Tokens, width and experts of an expert layer.
_EXPERTS = {'real': (2048, 256, 8), 'tiny': (64, 64, 4)}


def _expert_shapes(sizes: str) -> Any:
  num_tokens, width, num_experts = _EXPERTS[sizes]
  kernels = [(num_experts, width, 2 * width)] * 2
  tokens = [(1, num_tokens, width)] * 2
  return _normal(*kernels, (num_experts, 2 * width, width), *tokens, (1, num_tokens, num_experts))


def _experts(arrays, variant: str, *, sizes: str, form: str):
  """Return the outputs of an expert layer with uneven loads and its gradients."""
  import jax
  import jax.numpy as jnp

  from moe import dispatch
  from moe import routing

  num_tokens, _, num_experts = _EXPERTS[sizes]
  *kernels, x, weights, logits = arrays
  gate, linear, out = (kernel * kernel.shape[1] ** -0.5 for kernel in kernels)
  params = dispatch.MlpParams(wi=(gate, linear), wo=out)
  logits = logits + jnp.linspace(0.0, 2.0, num_experts)
  capacity = None
  if form != 'grouped':
    capacity = routing.expert_capacity(num_tokens, num_experts, 2.0, 4)
  spec = dispatch.MlpSpec(('gelu', 'linear'), dtype=_dtype(variant))

  def loss(params, x):
    choice = routing.tokens_choose(logits, 2, routing.ChoiceOptions(capacity=capacity))
    y, _ = dispatch.apply_experts(x, choice, params, spec, method=form)
    return jnp.sum(y.astype(jnp.float32) * weights), y

  return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)


def _roots(arrays, variant: str):
  """Return inverse roots of a matrix with a condition of 10^4, by both methods of Shampoo."""
  import jax.numpy as jnp

  from t5x_lite.optimizers.shampoo import roots

  del variant
  basis, _ = jnp.linalg.qr(arrays[0])
  matrix = (basis * jnp.logspace(0, -4, basis.shape[0])) @ basis.T
  matrix = (matrix + matrix.T) / 2
  return [
    roots.inverse_pth_root(matrix, 4, roots.RootOptions(method=method))[0]
    for method in ('eigh', 'coupled_newton')
  ]


def _optimizer_shapes(params: Mapping[str, tuple[int, ...]]) -> Any:
  """Return the shapes of parameters and of the gradients of two steps."""
  return [dict(zip(params, _normal(*params.values()), strict=True)) for _ in range(3)]


def _optimizer(arrays, variant: str, *, name: str):
  """Return parameters after two steps of an optimizer with random gradients."""
  from t5x_lite import adafactor
  from t5x_lite import optimizers

  del variant
  definition = {
    'adafactor': lambda: adafactor.Adafactor(1e-2),
    'adamw': lambda: optimizers.adamw(1e-2),
    'muon': lambda: optimizers.muon(1e-2),
  }[name]()
  params, *all_grads = arrays
  optimizer = definition.create(params)
  for grads in all_grads:
    optimizer = optimizer.apply_gradient(grads, learning_rate=1e-2)
  return optimizer.target


def cases(sizes: str) -> list[Case]:
  """Return all cases."""
  every = _TOLERANCES
  exact = {'float32': _TOLERANCES['float32']}
  two = {**exact, 'bfloat16': _TOLERANCES['bfloat16']}
  size = {'real': 512, 'tiny': 32}[sizes]
  # Arrays of about the size that the initializers of a network give them.
  network = functools.partial(
    Case, shapes=functools.partial(_params, sizes), scale={'real': 0.03, 'tiny': 0.08}[sizes]
  )
  found = [
    network(
      name=name,
      compute=functools.partial(_network, sizes=sizes, is_packed=is_packed),
      tolerances=tolerances,
    )
    for name, is_packed, tolerances in (
      ('network', False, every),
      ('network, packed rows', True, two),
    )
  ]
  compute = functools.partial(_loss, sizes=sizes)
  found.append(network(name='loss at once and in chunks', compute=compute, tolerances=exact))
  # Tokens: rounding may choose another one where two are nearly equal.
  for search in ('greedy_search', 'beam_search', 'temperature_sample'):
    compute = functools.partial(_decoding, sizes=sizes, search=search)
    found.append(network(name=search, compute=compute, tolerances={'float32': 0.02}))
  for form in ('einsum', 'capacity', 'grouped'):
    compute = functools.partial(_experts, sizes=sizes, form=form)
    shapes = functools.partial(_expert_shapes, sizes)
    found.append(Case(f'experts, {form}', shapes, compute, two))
  # The condition of the matrix multiplies the error of float32.
  shapes = functools.partial(_normal, (size, size))
  found.append(Case('roots of Shampoo', shapes, _roots, {'float32': 5e-3}))
  params = {'kernel': (size, 2 * size), 'bias': (size,)}
  for name in ('adafactor', 'adamw', 'muon'):
    shapes = functools.partial(_optimizer_shapes, params)
    compute = functools.partial(_optimizer, name=name)
    found.append(Case(f'two steps of {name}', shapes, compute, {'float32': 1e-3}))
  return found


def trace(case: Case, variant: str) -> Any:
  """Return the traced case."""
  import jax

  precision = 'highest' if variant == 'float32' else None
  with jax.default_matmul_precision(precision):
    return jax.jit(functools.partial(case.compute, variant=variant)).trace(case.shapes())


def compute(case: Case, program: Any) -> list[Any]:
  """Return the leaves of the results of a case, as NumPy arrays; bfloat16 as float32.

  Args:
    case: the case.
    program: the compiled program of a variant.
  """
  import jax
  import numpy as np

  results = program(items.random_like(case.shapes(), case.scale))
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(results)]
  return [leaf.astype(np.float32) if leaf.dtype.name == 'bfloat16' else leaf for leaf in leaves]


def error_of(got: list[Any], expected: list[Any]) -> float:
  """Return the error of results: the share of different tokens, or the relative norm of the difference."""
  import numpy as np

  if all(np.issubdtype(leaf.dtype, np.integer) for leaf in expected):
    return float(
      np.mean(np.concatenate([(x != y).ravel() for x, y in zip(got, expected, strict=True)]))
    )
  norms = [float(np.linalg.norm(leaf.astype(np.float64))) for leaf in expected]
  differences = [
    float(np.linalg.norm(x.astype(np.float64) - y)) for x, y in zip(got, expected, strict=True)
  ]
  # Each array counts by itself, since large ones would hide the others; small ones are compared with a tenth of the
  # largest.
  least = max(norms) / 10
  errors = [
    difference / max(norm, least) for difference, norm in zip(differences, norms, strict=True)
  ]
  return float(np.max(errors))  # NaN if any is


def write_reference(folder: pathlib.Path, sizes: str) -> None:
  """Write the results of all cases on the CPU, one file for each case, in their order."""
  import numpy as np

  for index, case in enumerate(cases(sizes)):
    temporary = folder / f'{index}.tmp.npz'
    np.savez(temporary, *compute(case, trace(case, 'float32').lower().compile()))
    temporary.rename(folder / f'{index}.npz')


class Reference:
  """The process that computes the results on the CPU, started by the first question."""

  def __init__(self, sizes: str):
    self._sizes = sizes
    self._folder: pathlib.Path | None = None
    self._process: subprocess.Popen | None = None

  def _start(self) -> None:
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix='gpu_reference_'))
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.gpu', '--reference', self._folder, '--sizes', self._sizes],
      # The processor of the machine is the slow part.
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
    )

  def leaves(self, index: int) -> list[Any]:
    """Return the results of the case of this index; wait for them.

    Raises:
      RuntimeError: the process ended without them, or does not have them in time.
    """
    import numpy as np

    if self._process is None:
      self._start()
    path = self._folder / f'{index}.npz'
    end = time.monotonic() + _PATIENCE
    while not path.exists():
      if self._process.poll() is not None and not path.exists():
        raise RuntimeError(f'the reference on the CPU ended with status {self._process.returncode}')
      if time.monotonic() > end:
        raise RuntimeError(f'no reference of the CPU after {_PATIENCE:.0f} s')
      time.sleep(0.05)
    with np.load(path) as stored:
      return list(stored.values())


def _measure(case: Case, index: int, reference: Reference) -> Iterator[items.Row]:
  programs = items.compile_together(_programs(case))
  for variant, tolerance in case.tolerances.items():
    row: items.Row = {'case': case.name, 'variant': variant}
    try:
      row['error'] = error_of(compute(case, programs[variant].result()), reference.leaves(index))
      row['tolerance'] = tolerance
      row['passes'] = bool(row['error'] <= tolerance)
    except Exception as error:  # A variant that fails must not end the others.
      row['passes'] = False
      row['note'] = items.note_of(error)
    yield row


def _programs(case: Case):
  return {variant: functools.partial(trace, case, variant) for variant in case.tolerances}


def make_items(sizes: str) -> list[items.Item]:
  """Return the items of this part."""
  reference = Reference(sizes)
  return [
    items.Item(
      name=case.name,
      measure=functools.partial(_measure, case, index, reference),
      programs=functools.partial(_programs, case),
      limit=45.0,
    )
    for index, case in enumerate(cases(sizes))
  ]
