"""Muon and AdamW in NumPy, matrix by matrix in float64, as the papers state them."""

import numpy as np

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrix, num_steps=5, eps=1e-8):
  """Return a matrix [m, n] after steps of Newton-Schulz (Jordan et al. 2024)."""
  a, b, c = _COEFFICIENTS
  x = matrix / (np.linalg.norm(matrix) + eps)
  for _ in range(num_steps):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x


class Muon:
  """One matrix [m, n] with Muon."""

  def __init__(self, *, beta=0.95, nesterov=True, adaptive=False, consistent_rms=None, decay=0.0):
    self.options = (beta, nesterov, adaptive, consistent_rms, decay)
    self.mu = 0.0
    self.count = 0

  def update(self, param, grad, rate):
    beta, nesterov, adaptive, consistent_rms, decay = self.options
    self.count += 1
    self.mu = beta * self.mu + (1 - beta) * grad
    if nesterov:
      average = beta * self.mu / (1 - beta ** (self.count + 1))
      average = average + (1 - beta) * grad / (1 - beta**self.count)
    else:
      average = self.mu / (1 - beta**self.count)
    direction = orthogonalized(average)
    if adaptive:
      direction = np.sum(average * direction) * direction
    m, n = param.shape
    if consistent_rms is None:
      direction = direction * max(1, n / m) ** 0.5
    else:
      direction = direction * consistent_rms * max(m, n) ** 0.5
    return param - rate * (direction + decay * param)


class AdamW:
  """One array with AdamW with Nesterov's momentum."""

  def __init__(self, *, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    self.options = (b1, b2, eps, decay)
    self.mu = 0.0
    self.nu = 0.0
    self.count = 0

  def update(self, param, grad, rate):
    b1, b2, eps, decay = self.options
    self.count += 1
    self.mu = b1 * self.mu + (1 - b1) * grad
    self.nu = b2 * self.nu + (1 - b2) * grad**2
    average = b1 * self.mu / (1 - b1 ** (self.count + 1)) + (1 - b1) * grad / (1 - b1**self.count)
    direction = average / (np.sqrt(self.nu / (1 - b2**self.count)) + eps)
    return param - rate * (direction + decay * param)
