"""Trainers of the toy model with a given optimizer, on a mesh of 2 x 2 devices."""

import functools

import jax
import numpy as np

from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import trainer
from tests.models import toy_model

RATE = schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.1)


@functools.cache
def partitioner():
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:4]).reshape(2, 2),
    ('data', 'model'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  return partitioning.PjitPartitioner(mesh=mesh)


def make(optimizer_def, learning_rate_fn=RATE, summary_dir=None, **kwargs):
  """Return a trainer with initialized parameters; its loss is the mean over real target tokens."""
  model = toy_model.make_model(optimizer_def, loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  state = toy_model.make_state(model)
  return trainer.Trainer(
    model,
    state,
    partitioner(),
    ['held_out'],
    summary_dir,
    partitioner().get_mesh_axes(state),
    jax.random.key(0),
    learning_rate_fn,
    **kwargs,
  )


def make_with_shapes(optimizer_def, learning_rate_fn=RATE):
  """Return a trainer with shapes for its state, as `train` makes it before it computes."""
  model = toy_model.make_model(optimizer_def)
  state = jax.eval_shape(lambda: toy_model.make_state(model))
  return trainer.Trainer(
    model,
    state,
    partitioner(),
    [],
    None,
    partitioner().get_mesh_axes(state),
    jax.random.key(0),
    learning_rate_fn,
  )
