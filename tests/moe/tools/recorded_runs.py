"""Runs that were never trained: folders with metrics as a sparse model writes them."""

import json

import numpy as np


def write(
  folder,
  *,
  layers=('encoder/layers_1', 'encoder/layers_3', 'decoder/layers_0'),
  num_experts=4,
  num_steps=6,
  period=10,
  writer='train',
  drops=True,
  seed=0,
  without=(),
  extra=None,
):
  """Write a run whose last layer has a dead expert (the last) and a busy one (the first); returns the loads.

  Args:
    folder: the model directory.
    layers: names of the sparse layers.
    num_experts: of each.
    num_steps: periods.
    period: steps of each.
    writer: whose metrics these are.
    drops: whether choices were dropped.
    seed: of the loads.
    without: names of metrics of layers to leave out.
    extra: step to further values of its line.

  Returns:
    Layer to load, [periods, experts].
  """
  rng = np.random.default_rng(seed)
  loads = {layer: rng.dirichlet(np.full(num_experts, 50.0), num_steps) for layer in layers}
  last = loads[layers[-1]]
  last[:, 0] += 2 * last[:, -1] + 1.0
  last[:, -1] = 0.0
  last /= last.sum(axis=1, keepdims=True)
  (folder / writer).mkdir(parents=True)
  with (folder / writer / 'metrics.jsonl').open('w') as file:
    for k in range(num_steps):
      row = {
        'step': (k + 1) * period,
        'wall_time': 1.7e9 + 60 * k,
        'loss': 2.0 - 0.1 * k,
        'experts/auxiliary_loss': 0.01,
        'non_padding_fraction/encoder_input_tokens': 0.5,
      }
      for index, (layer, load) in enumerate(loads.items()):
        dropped = 0.02 * (index + 1) if drops else 0.0
        values = {
          'load': load[k].tolist(),
          'drops_by_position': np.linspace(0, 2 * dropped, 16).tolist(),
          'max_over_mean_load': float(load[k].max() * num_experts),
          'router_entropy': 1.0,
          'router_confidence': 0.6,
          'fraction_tokens_left_behind': dropped / 2,
          'expert_usage': 0.5,
          'dead_experts': 0.0,
          'choices_dropped': dropped,
          'receive_drops': 0.0,
          'auxiliary_loss': 1.1,
          'router_z_loss': 3.0,
        }
        row |= {
          f'experts/{layer}/{name}': value for name, value in values.items() if name not in without
        }
      file.write(json.dumps(row | (extra or {}).get((k + 1) * period, {})) + '\n')
    file.write('{"step": 999, "experts/enc')  # as a kill leaves it
  return loads
