"""ScaledAdam implemented again in NumPy and float64, one parameter at a time, from the statement of its method."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Group:
  """A group of parameters: its options and what its clipping remembers."""

  lr: object = 0.03
  clipping_scale: float | None = None
  betas: tuple[float, float] = (0.9, 0.98)
  scalar_lr_scale: float = 0.1
  eps: float = 1e-8
  param_min_rms: float = 1e-5
  param_max_rms: float = 3.0
  scalar_max: float = 10.0
  size_update_period: int = 4
  clipping_update_period: int = 100
  clip_scale_gradient_only: bool = False

  def __post_init__(self):
    self.norms = [0.0] * self.clipping_update_period
    self.threshold = None
    self.num_clipped = 0
    self.quartiles = None
    self.percent_clipped = 0.0


class Reference:
  """Parameters by name, each in a group, trained step by step."""

  def __init__(self, params, groups, group_of):
    """Takes float arrays by name, `Group`s by label, and the label of each name."""
    self.params = {name: np.asarray(value, np.float64).copy() for name, value in params.items()}
    self.groups, self.group_of = groups, group_of
    self.t = 0
    self.memory = {}
    for name, p in self.params.items():
      group = groups[group_of[name]]
      self.memory[name] = {
        'delta': np.zeros_like(p),
        'v': np.zeros_like(p),
        'rms': np.sqrt(np.mean(p**2)) if p.size else 0.0,
        'w': 0.0,
        'h': np.zeros(group.size_update_period),
      }
    self.clip_scale = dict.fromkeys(groups, 1.0)
    self.dominant = dict.fromkeys(groups)

  def step(self, grads):
    """Make one step; a gradient that is None is zero."""
    grads = {
      name: np.zeros_like(p) if grads[name] is None else np.asarray(grads[name], np.float64)
      for name, p in self.params.items()
    }
    for label, group in self.groups.items():
      members = [name for name in self.params if self.group_of[name] == label]
      self.clip_scale[label] = self._clip(label, group, members, grads)
      for name in members:
        self._step_param(group, name, grads[name], self.clip_scale[label])
    self.t += 1

  def _clip(self, label, group, members, grads):
    if group.clipping_scale is None or self.t == 0:
      return 1.0
    sumsq = {
      name: np.sum(grads[name] ** 2)
      * (1.0 if self.params[name].size == 1 else self.memory[name]['rms'] ** 2)
      for name in members
    }
    norm = np.sqrt(sum(sumsq.values()))
    if members:
      largest = max(members, key=sumsq.get)
      self.dominant[label] = (
        largest,
        sumsq[largest] / max(norm**2, 1e-38),
        np.sum(grads[largest] ** 2),
      )
    period = group.clipping_update_period
    group.norms[self.t % period] = norm
    if self.t % period == 0:
      ordered = sorted(group.norms)
      group.quartiles = [ordered[min(period - 1, (period // 4) * n)] for n in range(5)]
      group.threshold = group.clipping_scale * group.quartiles[2]
      group.percent_clipped = 100.0 * group.num_clipped / period
      group.num_clipped = 0
    if self.t < period:
      return 1.0
    scale = min(1.0, group.threshold / (norm + 1e-20))
    group.num_clipped += scale < 1.0
    return scale

  def _step_param(self, group, name, grad, clip_scale):
    p, memory = self.params[name], self.memory[name]
    beta1, beta2 = group.betas
    lr = group.lr(self.t) if callable(group.lr) else group.lr
    clipped = grad * clip_scale
    grad = grad if group.clip_scale_gradient_only else clipped
    memory['delta'] = beta1 * memory['delta']
    memory['v'] = beta2 * memory['v'] + (1 - beta2) * grad**2
    correction = 1 - beta2 ** (self.t + 1)
    if p.size == 1:
      root = np.sqrt(memory['v'] / correction) + group.eps
      memory['delta'] -= lr * group.scalar_lr_scale * (1 - beta1) * grad / root
      self.params[name] = np.clip(p, -group.scalar_max, group.scalar_max) + memory['delta']
      return
    period = group.size_update_period
    memory['h'][self.t % period] = np.sum(p * clipped)
    if self.t % period == period - 1:
      memory['rms'] = np.sqrt(np.mean(p**2)) if p.size else 0.0
      if self.t > 0:
        memory['delta'] += (1 - beta1) * p * self._size_step(group, memory, lr)
    if correction >= 0.99:
      correction = 1.0
    root = np.sqrt(memory['v'] / correction) + group.eps
    memory['delta'] -= lr * (1 - beta1) * max(memory['rms'], group.param_min_rms) * grad / root
    self.params[name] = p + memory['delta']

  def _size_step(self, group, memory, lr):
    period, rate = group.size_update_period, lr * group.scalar_lr_scale
    decay = group.betas[1] ** period
    memory['w'] = decay * memory['w'] + (1 - decay) * np.mean(memory['h'] ** 2)
    if memory['rms'] > group.param_max_rms:
      return -rate * period
    if memory['rms'] < group.param_min_rms:
      return 0.0
    correction = 1 - decay ** ((self.t + 1) // period)
    return -rate * np.sqrt(correction) * np.sum(memory['h']) / (np.sqrt(memory['w']) + group.eps)
