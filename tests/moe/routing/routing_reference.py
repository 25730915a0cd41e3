"""Reference routers in float64 NumPy loops, from the papers and checked against recorded results of T5X."""

import numpy as np


def softmax(logits):
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def scores_of(logits, score):
  logits = np.asarray(logits, np.float64)
  return softmax(logits) if score == 'softmax' else 1 / (1 + np.exp(-logits))


def top_k(row, k):
  """Indices of the k largest; among equals the lowest index first."""
  return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def fill_buffers(index, num_experts, capacity, order_of):
  """Hands out places: all first choices, then all second ones; returns (position, kept)."""
  groups, _, choices = index.shape
  position, kept = np.full(index.shape, capacity), np.zeros(index.shape, bool)
  for g in range(groups):
    taken = [0] * num_experts
    for k in range(choices):
      for t in order_of(g):
        e = index[g, t, k]
        if e < num_experts:
          position[g, t, k], kept[g, t, k] = taken[e], taken[e] < capacity
          taken[e] += 1
  return position, kept


def tokens_choose(
  logits,
  k,
  *,
  capacity=None,
  score='softmax',
  normalize=False,
  prioritized=False,
  shared=False,
  mask=None,
  padding_uses_capacity=False,
  padding_in_losses=True,
  bias=None,
  rounded=None,
):
  """Return dict(index, gates, position, kept, auxiliary_loss, router_z_loss).

  `rounded` [groups, tokens, experts] are the scores in the float32 of the code under test: rounding decides ties.
  """
  groups, tokens, num_experts = logits.shape
  probs = scores_of(logits, score)
  rounded = np.asarray(probs, np.float32) if rounded is None else np.array(rounded)
  logits = np.array(logits, np.float64)
  real = np.ones((groups, tokens), bool) if mask is None else np.asarray(mask)
  probs[~real], rounded[~real], logits[~real] = 0, 0, 0
  index = np.zeros((groups, tokens, k), int)
  for g in range(groups):
    for t in range(tokens):
      index[g, t] = top_k(rounded[g, t] + (np.float32(0) if bias is None else bias), k)
  index[~real] = np.arange(k) if padding_uses_capacity else num_experts

  counted = np.ones_like(real) if padding_in_losses else real
  auxiliary, total = 0.0, max(counted.sum(), 1)
  for g in range(groups):
    n = max(counted[g].sum(), 1)
    distribution = probs[g] / np.maximum(probs[g].sum(-1, keepdims=True), 1e-300)
    for e in range(num_experts):
      share = np.sum([e in index[g, t] for t in range(tokens)]) / n
      auxiliary += share * distribution[:, e].sum() / n * num_experts * counted[g].sum() / total
  log_z = np.log(np.exp(logits).sum(-1))
  z = (log_z**2 * counted).sum() / total

  if shared and capacity is not None:
    index, capacity = index.reshape(1, -1, k), capacity * groups
    probs, rounded = probs.reshape(1, -1, num_experts), rounded.reshape(1, -1, num_experts)
  raw = np.zeros(index.shape)
  for g, t, j in np.ndindex(*index.shape):
    if index[g, t, j] < num_experts:
      raw[g, t, j] = probs[g, t, index[g, t, j]]
  gates = raw / np.maximum(raw.sum(-1, keepdims=True), 1e-300) if normalize else raw
  position, kept = None, index < num_experts
  if capacity is not None:
    first = np.where(
      index[..., 0] < num_experts,
      np.take_along_axis(rounded, np.minimum(index[..., :1], num_experts - 1), -1)[..., 0],
      0,
    )

    def order_of(g):
      places = range(index.shape[1])
      return sorted(places, key=lambda t: (-first[g, t], t)) if prioritized else places

    position, kept = fill_buffers(index, num_experts, capacity, order_of)
  return dict(
    index=index,
    gates=np.where(kept, gates, 0),
    position=position,
    kept=kept,
    auxiliary_loss=auxiliary,
    router_z_loss=z,
  )


def experts_choose(
  logits, capacity, *, mask=None, padding_uses_capacity=False, padding_in_losses=True, rounded=None
):
  """Return dict(index [G, E, C'], gates, router_z_loss) with C' = min(C, T); `rounded` as above."""
  groups, tokens, num_experts = logits.shape
  probs, logits = softmax(np.asarray(logits, np.float64)), np.array(logits, np.float64)
  real = np.ones((groups, tokens), bool) if mask is None else np.asarray(mask)
  rounded = np.asarray(probs, np.float32) if rounded is None else np.array(rounded)
  probs[~real], rounded[~real], logits[~real] = 0, 0, 0
  places = min(capacity, tokens)
  index, gates = (
    np.full((groups, num_experts, places), tokens),
    np.zeros((groups, num_experts, places)),
  )
  for g in range(groups):
    for e in range(num_experts):
      candidates = [t for t in range(tokens) if real[g, t] or padding_uses_capacity]
      candidates.sort(key=lambda t: (-rounded[g, t, e], t))
      for c, t in enumerate(candidates[:places]):
        index[g, e, c], gates[g, e, c] = t, probs[g, t, e]
  counted = np.ones_like(real) if padding_in_losses else real
  z = (np.log(np.exp(logits).sum(-1)) ** 2 * counted).sum() / max(counted.sum(), 1)
  return dict(index=index, gates=gates, router_z_loss=z)
