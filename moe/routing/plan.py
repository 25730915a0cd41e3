"""Map between rows of the experts' buffers and choices of tokens, and moves of rows by gathers.

The derivative of a gather is a scatter-add, which is slow if serial and not reproducible otherwise. A plan has both
directions of the map, so that the derivatives here are gathers too.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class RowPlan:
  """One-to-one map between R rows and N choices (token * K + k); rows and choices may be unmatched.

  Attributes:
    row_choice: int32 [R], choice of a row; N if unmatched.
    choice_row: int32 [N], row of a choice; R if unmatched.
    is_full: True if all rows and choices are matched, so that no mask is needed.
  """

  row_choice: jax.Array
  choice_row: jax.Array
  is_full: bool = flax.struct.field(pytree_node=False, default=False)


def sort_by_expert(expert_index: jax.Array, num_experts: int) -> tuple[RowPlan, jax.Array]:
  """Return the plan of a stable sort of all choices by expert, and the number of choices of each expert.

  Args:
    expert_index: int32 [N]; `num_experts` for ignored choices, which come last.
    num_experts: number of experts, E.

  Returns:
    Full plan of N rows, and int32 [E].
  """
  num_choices = expert_index.shape[0]
  choices = jnp.arange(num_choices, dtype=jnp.int32)
  if (num_experts + 1) * num_choices < 2**31:
    # [choices]: a combined key, since sorting one array is cheaper than sorting one array by another.
    keys = jax.lax.sort(expert_index * num_choices + choices)
    row_choice = keys % max(num_choices, 1)
    # [experts]: the end of an expert's rows is where the keys of the next expert start.
    first_keys = num_choices * jnp.arange(1, num_experts + 1, dtype=jnp.int32)
    ends = jnp.searchsorted(keys, first_keys, side='left')
  else:
    keys, row_choice = jax.lax.sort((expert_index, choices), num_keys=1, is_stable=True)
    ends = jnp.searchsorted(keys, jnp.arange(num_experts, dtype=jnp.int32), side='right')
  group_sizes = jnp.diff(ends.astype(jnp.int32), prepend=0)
  # [choices]: the inverse permutation, so that outputs and gradients return by a gather.
  rows = choices
  choice_row = jnp.zeros_like(choices)
  choice_row = choice_row.at[row_choice].set(rows, unique_indices=True, mode='promise_in_bounds')
  return RowPlan(row_choice, choice_row, is_full=True), group_sizes


def _take(x, index):
  return jnp.take(x, index, axis=0, mode='clip')


def _masked(values, is_valid):
  missing_dims = (1,) * (values.ndim - is_valid.ndim)
  return jnp.where(is_valid.reshape(is_valid.shape + missing_dims), values, 0)


def _gather_rows(x, plan, num_choices_per_token):
  # An empty row gets an arbitrary token; its output is not used and its gradient is 0.
  return _take(x, plan.row_choice // num_choices_per_token)


@jax.custom_vjp
def dispatch(x: jax.Array, plan: RowPlan) -> jax.Array:
  """Return the token of each row.

  Args:
    x: <float>[tokens, D].
    plan: plan of tokens * K choices.

  Returns:
    <float>[R, D]; rows without a choice have an arbitrary token.
  """
  num_choices_per_token = plan.choice_row.shape[0] // x.shape[0]
  return _gather_rows(x, plan, num_choices_per_token)


def _dispatch_fwd(x, plan):
  return dispatch(x, plan), (plan, x.shape[0])


def _dispatch_bwd(residuals, grad):
  plan, num_tokens = residuals
  return sum_of_choices(grad, plan, num_tokens), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def sum_of_choices(
  rows: jax.Array, plan: RowPlan, num_tokens: int, gates: jax.Array | None = None
) -> jax.Array:
  """Return for each token the sum of the rows of its choices, weighted by their gates.

  Args:
    rows: <float>[R, D].
    plan: plan of num_tokens * K choices.
    num_tokens: number of tokens.
    gates: <float>[num_tokens, K], or None for ones.

  Returns:
    <float>[num_tokens, D] in the dtype of `rows`; sums are float32.
  """
  choice_row = plan.choice_row.reshape(num_tokens, -1)
  # [tokens, width]: float32, since a token sums outputs of several experts; choice by choice, without an array of all.
  total: jax.Array | None = None
  for k in range(choice_row.shape[1]):
    term = _take(rows, choice_row[:, k]).astype(jnp.float32)
    if gates is not None:
      term = term * gates[:, k, None]
    if not plan.is_full:
      term = _masked(term, choice_row[:, k] < plan.row_choice.shape[0])
    if total is None:
      total = term
    else:
      total = total + term
  assert total is not None  # A token has at least one choice.
  return total.astype(rows.dtype)


@jax.custom_vjp
def combine(rows: jax.Array, gates: jax.Array, plan: RowPlan) -> jax.Array:
  """Return for each token the sum of the rows of its choices, weighted by their gates.

  Args:
    rows: <float>[R, D].
    gates: float32 [tokens, K].
    plan: plan of tokens * K choices.

  Returns:
    <float>[tokens, D] in the dtype of `rows`.
  """
  return sum_of_choices(rows, plan, gates.shape[0], gates)


def _combine_fwd(rows, gates, plan):
  return combine(rows, gates, plan), (rows, gates, plan)


def _combine_bwd(residuals, grad):
  rows, gates, plan = residuals
  num_tokens, num_selected = gates.shape
  # [rows, width] and [rows]: gradient of the output of each row's token, and the gate of each row's choice.
  row_grad = _gather_rows(grad, plan, num_selected).astype(jnp.float32)
  row_gate = _take(gates.reshape(-1), plan.row_choice)
  if not plan.is_full:
    row_gate = _masked(row_gate, plan.row_choice < plan.choice_row.shape[0])
  # Products per row, then a gather of numbers instead of rows.
  row_gate_grad = jnp.sum(row_grad * rows.astype(jnp.float32), axis=-1)
  gate_grad = _take(row_gate_grad, plan.choice_row)
  if not plan.is_full:
    gate_grad = _masked(gate_grad, plan.choice_row < plan.row_choice.shape[0])
  rows_grad = (row_grad * row_gate[:, None]).astype(rows.dtype)
  gates_grad = gate_grad.reshape(num_tokens, num_selected).astype(gates.dtype)
  return rows_grad, gates_grad, None


combine.defvjp(_combine_fwd, _combine_bwd)


def plan_buffers(
  expert_index: jax.Array, position: jax.Array, num_experts: int, capacity: int
) -> RowPlan:
  """Return the plan of buffers [E, G, C] for choices with assigned slots.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for ignored choices.
    position: int32 [G, T, K], slot in the buffer of the expert for the group; dropped if `capacity` or more.
    num_experts: number of experts, E.
    capacity: number of slots, C.

  Returns:
    Plan of E * G * C rows and G * T * K choices.
  """
  num_groups = expert_index.shape[0]
  num_choices = expert_index.size
  num_rows = num_experts * num_groups * capacity
  group = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
  is_kept = (expert_index < num_experts) & (position >= 0) & (position < capacity)
  # [groups, tokens, choices]: row of the slot in the buffers [experts, groups, slots]; one past the end if dropped.
  buffer = expert_index * num_groups + group
  row = jnp.where(is_kept, buffer * capacity + position, num_rows)
  choice_row = row.reshape(-1).astype(jnp.int32)
  # [rows]: a scatter of integers, so that tokens themselves need only gathers.
  choices = jnp.arange(num_choices, dtype=jnp.int32)
  row_choice = jnp.full((num_rows,), num_choices, jnp.int32)
  row_choice = row_choice.at[choice_row].set(choices, mode='drop')
  return RowPlan(row_choice, choice_row)
