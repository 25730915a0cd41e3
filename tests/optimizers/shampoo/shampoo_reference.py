"""Distributed Shampoo as the original does it, read once more in NumPy: float64, one matrix at a time, really padded.

Slow and plain on purpose: it shares no line and no idea with the package (no groups, no stacks, no scalar for padding).
"""

import itertools
from typing import Any

import numpy as np

DEFAULTS = {
  'learning_rate': 0.1,
  'block_size': 4,
  'beta1': 0.9,
  'beta2': 0.999,
  'diagonal_epsilon': 1e-10,
  'matrix_epsilon': 1e-6,
  'weight_decay': 0.0,
  'start_preconditioning_step': 5,
  'preconditioning_compute_steps': 1,
  'statistics_compute_steps': 1,
  'best_effort_shape_interpretation': True,
  'graft_type': 'SGD',
  'nesterov': True,
  'exponent_override': 0,
  'shard_optimizer_states': False,
  'best_effort_memory_usage_reduction': False,
  'batch_axis_name': None,
  'quantize_statistics': None,
  'inverse_failure_threshold': 0.1,
  'moving_average_for_momentum': False,
  'skip_preconditioning_dim_size_gt': 4096,
  'clip_by_scaled_gradient_norm': None,
}


def inverse_root(matrix: np.ndarray, p: int, epsilon: float) -> tuple[np.ndarray, float]:
  """Coupled Newton iteration with the original's ways to stop; returns (root, error)."""
  n = len(matrix)
  vector = np.random.RandomState(1729).uniform(-1.0, 1.0, n)
  largest = 0.0
  for _ in range(100):
    vector = vector / np.linalg.norm(vector)
    image = matrix @ vector
    last, largest = largest, vector @ image
    vector = image
    if not abs(largest - last) > 1e-6:
      break
  ridge = epsilon * max(largest, 1e-6)
  if n == 1:
    return (matrix + ridge) ** (-1.0 / p), 0.0
  damped = matrix + ridge * np.eye(n)
  z = (1 + p) / (2 * np.linalg.norm(damped))
  m, h = damped * z, np.eye(n) * z ** (1.0 / p)
  old_h, error, continues = h, np.max(np.abs(m - np.eye(n))), True
  for _ in range(100):
    if not (error > 1e-6 and continues):
      break
    factor = (1 + 1.0 / p) * np.eye(n) - m / p
    m, old_h, h = np.linalg.matrix_power(factor, p) @ m, h, h @ factor
    last, error = error, np.max(np.abs(m - np.eye(n)))
    continues = error < last * 1.2
  return (h if continues else old_h), error


def quantize(value: np.ndarray, bits: int, apart: bool = False) -> np.ndarray:
  """Return `value` after a round trip through integers; `apart` keeps the diagonal out of it."""
  diagonal = np.diag(np.diag(value)) if apart else 0.0
  value = value - diagonal
  bucket = (np.max(np.abs(value), axis=0) if value.ndim else np.abs(value)) / (2 ** (bits - 1) - 1)
  return np.round(value / np.where(bucket > 0, bucket, 1.0)) * bucket + diagonal


def merged(shape: tuple[int, ...], largest: int) -> list[int]:
  """Products of neighbouring dims."""
  dims, product = [], 1
  for dim in shape:
    if product * dim <= largest:
      product *= dim
    else:
      dims += [product] if product > 1 else []
      product = dim
  return dims + ([product] if product > 1 or not dims else [])


class Reference:
  """One run over a dict of arrays by name."""

  def __init__(self, params: dict[str, np.ndarray], **options: Any):
    assert not set(options) - set(DEFAULTS), options
    self.o = {**DEFAULTS, **options}
    self.params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    self.count = 0
    o = self.o
    self.int16 = o['best_effort_memory_usage_reduction'] and o['batch_axis_name'] is not None
    if o['quantize_statistics'] is not None:
      self.int16 = o['quantize_statistics']
    self.slices, self.dims, self.statistics, self.roots, self.errors = {}, {}, {}, {}, {}
    for name, param in self.params.items():
      skipped = (
        not param.ndim or max(param.shape) > o['skip_preconditioning_dim_size_gt'] or not param.size
      )
      dims = (
        merged(param.shape, o['block_size'])
        if o['best_effort_shape_interpretation']
        else list(param.shape)
      )
      self.dims[name] = [] if skipped else dims
      cuts = [
        [
          slice(start, min(start + o['block_size'], dim))
          for start in range(0, dim, o['block_size'])
        ]
        for dim in self.dims[name]
      ]
      self.slices[name] = [] if skipped else list(itertools.product(*cuts))
      sizes = [part.stop - part.start for block in self.slices[name] for part in block]
      self.statistics[name] = [o['matrix_epsilon'] * np.eye(size) for size in sizes]
      self.roots[name] = [np.eye(size) for size in sizes]
      self.errors[name] = np.zeros(max(len(sizes), 1))
    self.size = max([len(root) for roots in self.roots.values() for root in roots], default=0)
    self.second, self.m_graft, self.m = (
      {n: np.zeros(p.shape) for n, p in self.params.items()} for _ in range(3)
    )

  def step(self, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make one update; return the change of the parameters."""
    grads = {name: np.asarray(grad, np.float64) for name, grad in grads.items()}
    old_roots = {name: list(roots) for name, roots in self.roots.items()}
    if self.count % self.o['statistics_compute_steps'] == 0:
      for name in grads:
        self._add_statistics(name, grads[name])
    if self.count % self.o['preconditioning_compute_steps'] == 0:
      for name in grads:
        self._take_roots(name)
    roots = old_roots if self.o['shard_optimizer_states'] else self.roots
    updates = {name: self._update(name, grads[name], roots[name]) for name in grads}
    for name, update in updates.items():
      self.params[name] = self.params[name] + update
    self.count += 1
    return updates

  def _second_moment(self, old, new):
    return self.o['beta2'] * old + (1.0 if self.o['beta2'] == 1.0 else 1.0 - self.o['beta2']) * new

  def _add_statistics(self, name, grad):
    new = []
    for block in self.slices[name]:
      part = grad.reshape(self.dims[name])[block]
      for dim in range(part.ndim):
        unfolded = np.moveaxis(part, dim, 0).reshape(part.shape[dim], -1)
        new.append(unfolded @ unfolded.T)
    for i, matrix in enumerate(new):
      total = self._second_moment(self.statistics[name][i], matrix)
      self.statistics[name][i] = quantize(total, 16, True) if self.int16 else total

  def _take_roots(self, name):
    p = self.o['exponent_override'] or 2 * len(self.dims[name])
    for i, matrix in enumerate(self.statistics[name]):
      n = len(matrix)
      # Integers are padded by an identity, but the scales of their columns by zeros.
      padded = np.zeros([self.size] * 2) if self.int16 else np.eye(self.size)
      padded[:n, :n] = matrix
      root, error = inverse_root(padded, p, self.o['matrix_epsilon'])
      if error < self.o['inverse_failure_threshold']:
        self.roots[name][i] = quantize(root[:n, :n], 16, True) if self.int16 else root[:n, :n]
      if error > 0:
        self.errors[name][i] = error

  def _graft(self, name, grad):
    kind = self.o['graft_type']
    if kind == 'SGD':
      return grad
    if kind == 'SQRT_N':
      return np.sign(grad)
    if kind.endswith('_NORMALIZED'):
      grad = grad / (np.linalg.norm(grad) + 1e-16)
    if kind.startswith('ADAGRAD'):
      self.second[name] = self.second[name] + grad**2
    else:
      self.second[name] = self._second_moment(self.second[name], grad**2)
    update = grad / (np.sqrt(self.second[name]) + self.o['diagonal_epsilon'])
    if self.o['clip_by_scaled_gradient_norm']:
      rms = np.linalg.norm(update) / np.sqrt(max(update.size, 1))
      update = update / max(1.0, rms / self.o['clip_by_scaled_gradient_norm'])
    return update

  def _update(self, name, grad, roots):
    o = self.o
    graft = self._graft(name, grad)
    direction = graft
    if self.dims[name]:
      direction = np.zeros(self.dims[name])
      matrices = iter(roots)
      for block in self.slices[name]:
        part = grad.reshape(self.dims[name])[block]
        for dim in range(part.ndim):
          part = np.moveaxis(np.tensordot(part, next(matrices), axes=[[dim], [0]]), -1, dim)
        direction[block] = part
      direction = direction.reshape(grad.shape)
    direction = direction * np.linalg.norm(graft) / (np.linalg.norm(direction) + 1e-16)
    decay = o['weight_decay'] * self.params[name]
    direction, graft = direction + decay, graft + decay
    w = 1 - o['beta1'] if o['moving_average_for_momentum'] else 1.0
    shared = o['graft_type'] == 'SQRT_N'
    m = o['beta1'] * self.m[name] + w * direction
    m_graft = o['beta1'] * (self.m if shared else self.m_graft)[name] + w * graft
    chosen, m_chosen = (
      (direction, m) if self.count >= o['start_preconditioning_step'] else (graft, m_graft)
    )
    keep = (lambda x: quantize(x, 8)) if o['best_effort_memory_usage_reduction'] else (lambda x: x)
    self.m[name], self.m_graft[name] = keep(m_chosen if shared else m), keep(m_graft)
    step = w * chosen + o['beta1'] * m_chosen if o['nesterov'] else m_chosen
    rate = o['learning_rate'](self.count) if callable(o['learning_rate']) else o['learning_rate']
    return -rate * step
