"""Part 'experts': forms of an expert layer and grouped kernels by name, and sparse models over their dense twin.

A layer routes tokens to one expert each, forward and backward, in bfloat16. Its peer is an MLP with the hidden units of
one expert, which has the same number of operations.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

from benchmarks.gpu import items
from benchmarks.gpu import training

_ACTIVATIONS = ('gelu', 'linear')
# Part of the dense twin's speed that a sparse model should reach.
_GOAL = 0.85


@dataclasses.dataclass(frozen=True)
class Shape:
  """Tokens, width and hidden units of an expert."""

  num_tokens: int
  width: int
  hidden: int


_SHAPES = {'real': Shape(16384, 768, 2048), 'tiny': Shape(256, 64, 128)}
_NUM_EXPERTS = {'real': (8, 64), 'tiny': (4,)}
_BATCHES = {'real': 64, 'tiny': 2}
_MODELS = {'real': training.BASE, 'tiny': training.TINY}
_NUM_STEPS = {'real': 8, 'tiny': 2}


def _forms() -> list[str]:
  """Return the names of the forms: the dense MLP, the form with a capacity, and each grouped kernel of a GPU."""
  from moe.dispatch import grouped

  names = [*grouped.KERNELS_OF_BACKEND['gpu']]
  return ['dense', 'capacity', *names]


def _loss(params, x, weights, *, form: str, num_experts: int):
  """Return a weighted sum of the outputs for tokens x <bfloat16>[tokens, width]."""
  import jax.numpy as jnp

  from moe import dispatch
  from moe import routing
  from moe.dispatch import grouped
  from moe.routing import plan as plans

  spec = dispatch.MlpSpec(_ACTIVATIONS, dtype=jnp.bfloat16)
  if form == 'dense':
    y = dispatch.batched_mlp(params['dense'], x[None], spec)[0]
    return jnp.sum(y.astype(jnp.float32) * weights)
  num_tokens, width = x.shape
  capacity = None
  if form == 'capacity':
    capacity = routing.expert_capacity(num_tokens, num_experts, 1.25, 4)
  logits = x.astype(jnp.float32) @ params['router']
  choice = routing.tokens_choose(logits[None], 1, routing.ChoiceOptions(capacity=capacity))
  if form == 'capacity':
    y, _ = dispatch.apply_experts(x[None], choice, params['experts'], spec, method='capacity')
    y = y[0]
  else:
    plan, group_sizes = plans.sort_by_expert(choice.expert_index.reshape(-1), num_experts)
    gates = choice.gates.reshape(num_tokens, 1)
    y = grouped.grouped_tokens(params['experts'], x, gates, plan, group_sizes, spec, method=form)
  return jnp.sum(y.astype(jnp.float32) * weights)


def _shapes(shape: Shape, form: str, num_experts: int) -> tuple[Any, Any, Any]:
  import jax
  import jax.numpy as jnp

  from moe import dispatch

  def array(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)

  def mlp(count):
    return dispatch.MlpParams(
      wi=tuple(array(count, shape.width, shape.hidden) for _ in _ACTIVATIONS),
      wo=array(count, shape.hidden, shape.width),
    )

  params = {'dense': mlp(1)}
  if form != 'dense':
    params = {'experts': mlp(num_experts), 'router': array(shape.width, num_experts)}
  tokens = (shape.num_tokens, shape.width)
  return params, array(*tokens, dtype=jnp.bfloat16), array(*tokens)


def _trace(shape: Shape, form: str, num_experts: int):
  import jax

  loss = functools.partial(_loss, form=form, num_experts=num_experts)
  return jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*_shapes(shape, form, num_experts))


def _measure_layer(shape: Shape, num_experts: int) -> Iterator[items.Row]:
  import jax

  dense_seconds = None
  programs = items.compile_together(
    {form: functools.partial(_trace, shape, form, num_experts) for form in _forms()}
  )
  for form in _forms():
    row = {'form': form, 'experts': num_experts}
    try:
      program = programs[form].result()
      arguments = items.random_like(_shapes(shape, form, num_experts))
      jax.block_until_ready(program(*arguments))
      call = functools.partial(program, *arguments)
      seconds = items.seconds_per_call(call)
      if form == 'dense':
        dense_seconds = seconds
      row['ms'] = 1e3 * seconds
      if dense_seconds is not None:
        row['time / dense'] = seconds / dense_seconds
      row['temporaries, MB'] = program.memory_analysis().temp_size_in_bytes / 1e6
    except Exception as error:  # A kernel that this device does not have must not end the others.
      row['note'] = items.note_of(error)
    yield row


def _layer_programs(shape: Shape, num_experts: int):
  # The kernel of another generation of GPUs cannot be traced for this one.
  return {
    form: functools.partial(_trace, shape, form, num_experts)
    for form in _forms()
    if form != 'blackwell'
  }


def _measure_models(sizes: str) -> Iterator[items.Row]:
  """Yield the dense model, then each sparse one with its speed relative to it, at the same batch."""
  model = dataclasses.replace(_MODELS[sizes], goal=None)
  dense_rate = None
  for num_experts in (0, *_NUM_EXPERTS[sizes]):
    case = dataclasses.replace(model, num_experts=num_experts)
    row = {'model': f'{num_experts} experts' if num_experts else 'dense twin'}
    try:
      row.update(training.measure_batch(case, _BATCHES[sizes], _NUM_STEPS[sizes]))
    except Exception as error:  # A model that fails must not end the others.
      row['note'] = items.note_of(error)
      row['passes'] = False
    rate = row.get('sequences/s')
    if not num_experts:
      dense_rate = rate
    elif rate and dense_rate:
      row['speed / dense twin'] = rate / dense_rate
      row['goal'] = _GOAL
    yield row


def _model_programs(sizes: str):
  found = {}
  for num_experts in _NUM_EXPERTS[sizes]:
    case = dataclasses.replace(_MODELS[sizes], num_experts=num_experts)
    found[f'{num_experts} experts'] = training.program_of(case, _BATCHES[sizes])
  return found


def make_items(sizes: str) -> list[items.Item]:
  """Return the items of this part."""
  layers = [
    items.Item(
      name=f'layer with {num_experts} experts',
      measure=functools.partial(_measure_layer, _SHAPES[sizes], num_experts),
      programs=functools.partial(_layer_programs, _SHAPES[sizes], num_experts),
      limit=60.0,
    )
    for num_experts in _NUM_EXPERTS[sizes]
  ]
  models = items.Item(
    name='models over their dense twin',
    measure=functools.partial(_measure_models, sizes),
    programs=functools.partial(_model_programs, sizes),
    limit=120.0,
  )
  return [models, *layers]
