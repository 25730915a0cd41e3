"""Balanced routing by Sinkhorn's algorithm."""

import jax
from jax import lax
import jax.numpy as jnp

from moe.routing import token_choice as functions
from moe.routing.base import Router
from moe.routing.types import TokenChoice
from t5x_lite import checks


def sinkhorn_scores(
  logits: jax.Array,
  num_iterations: int,
  temperature: float = 1.0,
  token_mask: jax.Array | None = None,
) -> jax.Array:
  """Return the log of a transport plan with equal loads of experts, up to a constant per token.

  The plan P = exp(logits / temperature + u_token + v_expert) is the entropic optimal transport whose rows sum to 1 and
  whose columns sum to tokens / E; u and v are found by scaling rows and columns in turn, in logs.
  https://arxiv.org/abs/2202.01169 (S-BASE); https://arxiv.org/abs/1306.0895, algorithm 1.

  Args:
    logits: float32 [G, T, E].
    num_iterations: number of scalings of rows and columns, fixed so that results do not depend on rounding.
    temperature: weight of the entropy; a smaller one follows the logits more closely and needs more iterations.
    token_mask: bool [G, T], True for assigned tokens; None for all tokens.

  Returns:
    float32 [G, T, E], `logits / temperature + v`: the largest of a row is the largest of the plan. Without gradient.
  """
  scaled = lax.stop_gradient(logits) / temperature
  if token_mask is None:
    weight = jnp.ones(logits.shape[:2], jnp.float32)
  else:
    weight = token_mask.astype(jnp.float32)
  num_groups, _, num_experts = logits.shape
  # [groups, 1]: log of a column's sum, up to a constant; groups without tokens need no balance.
  num_tokens = jnp.maximum(jnp.sum(weight, axis=1), 1.0)
  column = jnp.log(num_tokens / num_experts)[:, None]

  def scale(_, v):
    # [groups, tokens]: every token is assigned once.
    u = -jax.nn.logsumexp(scaled + v[:, None], axis=-1)
    # [groups, tokens, experts]: masked tokens have weight 0.
    rows = jnp.where(weight[..., None] > 0, scaled + u[..., None], -jnp.inf)
    # [groups, experts]: sums over tokens in logs, relative to the largest term. The minimum keeps the log finite if all
    # tokens are masked.
    top = jnp.maximum(jnp.max(rows, axis=1), jnp.finfo(jnp.float32).min)
    total = jnp.sum(jnp.exp(rows - top[:, None]), axis=1)
    log_total = top + jnp.log(jnp.where(total > 0, total, 1.0))
    return jnp.where(total > 0, column - log_total, 0.0)

  initial = jnp.zeros((num_groups, num_experts), jnp.float32)
  v = lax.fori_loop(0, num_iterations, scale, initial)
  return scaled + v[:, None]


class SinkhornRouter(Router):
  """Token choice by a balanced plan in training (S-BASE), and by the logits otherwise.

  In training a token chooses the K largest experts of its row of the plan, which depends on all tokens of the group,
  including later ones. Gates are computed from the logits, so the router learns as in plain token choice. Without
  training (`deterministic`) a token chooses the experts with the largest logits. https://arxiv.org/abs/2202.01169.

  Attributes:
    num_selected: number of choices of a token, K.
    normalize_gates: True if the gates of a token sum to 1 over its choices.
    score: function from logits to gates, 'softmax' over experts or 'sigmoid'.
    num_iterations: number of scalings of rows and columns.
    temperature: temperature of the plan; a smaller one follows the scores more closely and needs more iterations.
  """

  num_selected: int = 1
  normalize_gates: bool = False
  score: str = 'softmax'
  num_iterations: int = 20
  temperature: float = 1.0

  def _expectations(self) -> dict[str, checks.Expectation]:
    return super()._expectations() | {
      'num_selected': functions.num_selected_expectation(self.num_experts),
      'score': checks.one_of(functions.SCORE_FNS),
      'num_iterations': checks.number(at_least=1, integer=True),
      'temperature': checks.number(above=0),
    }

  @property
  def uses_later_tokens(self) -> str:
    """'training': the plan depends on all tokens of a group."""
    return 'training'

  def _options(self, capacity: int | None) -> functions.ChoiceOptions:
    return functions.ChoiceOptions(
      capacity=capacity,
      score=self.score,
      normalize_gates=self.normalize_gates,
      padding_in_losses=self.padding_in_losses,
    )

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> TokenChoice:
    del token_ids
    logits = self.logits(x, deterministic)
    plan = None
    if not deterministic and recorded is None:
      plan = sinkhorn_scores(logits, self.num_iterations, self.temperature, token_mask)
    return functions.tokens_choose(
      logits,
      self.num_selected,
      self._options(capacity),
      token_mask=token_mask,
      selection_scores=plan,
      recorded=recorded,
    )
