"""SOAP for one array in NumPy, float64, written from the paper with loops over blocks and dims.

The basis of a matrix is determined up to signs if its statistics have full rank and separate eigenvalues; updates do
not depend on signs. `gap` has the smallest relative difference of the numbers by which columns were ordered.
"""

import itertools
import math

import numpy as np


class Reference:
  """SOAP of one array of any rank, without layers or experts.

  Attributes:
    gap: smallest difference of two adjacent Rayleigh quotients so far, relative to the largest.
  """

  def __init__(
    self,
    shape,
    *,
    b1=0.95,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    shampoo_beta=None,
    max_precond_dim=10000,
    block_size=None,
    merge_dims=False,
    precondition_1d=False,
    exponent=0.5,
    correct_bias=True,
    skip_first_step=False,
  ):
    self.b1, self.b2, self.eps, self.decay = b1, b2, eps, weight_decay
    self.frequency, self.exponent = precondition_frequency, exponent
    self.beta = b2 if shampoo_beta is None else shampoo_beta
    self.correct_bias, self.skip = correct_bias, skip_first_step
    self.shape = shape
    limit = block_size or max_precond_dim
    self.merged = _merged(shape, limit) if merge_dims and len(shape) else shape
    self.rotated = [1 < size <= max_precond_dim for size in self.merged]
    if len(shape) < 2 and not precondition_1d:
      self.rotated = [False] * len(self.merged)
    self.blocks = _blocks(self.merged, self.rotated, block_size)
    self.count = 0
    self.gap = math.inf
    self.m = np.zeros(self.merged)
    self.v = [np.zeros(self.m[block].shape) for block in self.blocks]
    sizes = [
      [n if yes else 1 for n, yes in zip(v.shape, self.rotated, strict=True)] for v in self.v
    ]
    self.statistics = [[np.zeros([n, n]) for n in of_block] for of_block in sizes]
    self.bases = [[np.eye(n) for n in of_block] for of_block in sizes]

  def update(self, grad, param):
    """Return the update at the learning rate 1, given float64 arrays."""
    grad = grad.reshape(self.merged)
    self.count += 1
    is_refresh = (self.count - 1) % self.frequency == 0
    for b, block in enumerate(self.blocks):
      for dim, rotated in enumerate(self.rotated):
        if not rotated:
          continue
        rows = np.moveaxis(grad[block], dim, 0).reshape(self.v[b].shape[dim], -1)
        self.statistics[b][dim] = _mean(self.statistics[b][dim], rows @ rows.T, self.beta)
        if is_refresh:
          self._refresh(b, dim)
    if self.skip and self.count == 1:
      return np.zeros(self.shape)
    self.m = _mean(self.m, grad, self.b1)
    step = self.count - self.skip
    direction = np.zeros(self.merged)
    for b, block in enumerate(self.blocks):
      g = _rotate(grad[block], self.bases[b], self.rotated)
      m = _rotate(self.m[block], self.bases[b], self.rotated)
      self.v[b] = _mean(self.v[b], g**2, self.b2)
      v = self.v[b]
      if self.correct_bias:
        m = m / (1 - self.b1**step)
        if self.b2 < 1:
          v = v / (1 - self.b2**step)
      quotient = m / (v**self.exponent + self.eps)
      direction[block] = _rotate(quotient, [basis.T for basis in self.bases[b]], self.rotated)
    return -direction.reshape(self.shape) - self.decay * param

  def _refresh(self, b, dim):
    matrix = self.statistics[b][dim]
    if self.count == 1:
      values, vectors = np.linalg.eigh(matrix)
      self.bases[b][dim] = vectors[:, ::-1]
    else:
      old = self.bases[b][dim]
      values = np.einsum('ij,ik,kj->j', old, matrix, old)
      order = np.argsort(-values)
      self.v[b] = np.take(self.v[b], order, axis=dim)
      self.bases[b][dim] = np.linalg.qr(matrix @ old[:, order])[0]
    values = np.sort(values)
    self.gap = min(self.gap, np.diff(values).min() / values.max())


def _mean(old, new, decay):
  return old + new if decay == 1 else decay * old + (1 - decay) * new


def _rotate(array, bases, rotated):
  for dim, (basis, yes) in enumerate(zip(bases, rotated, strict=True)):
    if yes:
      array = np.moveaxis(np.tensordot(basis, array, (0, dim)), 0, dim)
  return array


def _merged(shape, limit):
  """Adjacent dims whose product is at most `limit` are one."""
  merged = [1]
  for size in shape:
    if merged[-1] * size <= limit:
      merged[-1] *= size
    else:
      merged.append(size)
  return tuple(size for size in merged if size > 1) or (1,)


def _blocks(shape, rotated, block_size):
  """Return the index of each block: rotated dims are cut every `block_size` elements."""
  cuts = []
  for size, yes in zip(shape, rotated, strict=True):
    width = block_size if yes and block_size else max(size, 1)
    cuts.append([slice(start, min(start + width, size)) for start in range(0, size, width)])
  return list(itertools.product(*cuts))
