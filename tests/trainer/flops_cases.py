"""Trainers of small networks whose steps are mostly matrix products, and the products of their programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer as trainer_lib
from t5x_lite.data import vocabularies
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from tests.networks import network_cases
from tests.networks.test_remat import count_flops

ROWS = 8
INPUTS = 64
TARGETS = 32
WIDE = dict(vocab_size=256, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=256)


def t5_network(**fields: Any) -> t5.Transformer:
  """Return a T5 1.1 of two and two layers."""
  sizes = dict(num_encoder_layers=2, num_decoder_layers=2)
  return t5.Transformer(network_cases.tiny_config(**{**WIDE, **sizes, **fields}))


def mesh_of(*sizes: int, axes: tuple[str, ...] = ('data', 'model')) -> jax.sharding.Mesh:
  """Return a mesh of the first devices."""
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  return jax.sharding.Mesh(devices, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def make_trainer(
  network: Any,
  optimizer_def: Any = None,
  model_cls: Any = models.EncoderDecoderModel,
  model_options: Any = None,
  partitioner: Any = None,
  **options: Any,
) -> tuple[trainer_lib.Trainer, dict[str, jax.ShapeDtypeStruct]]:
  """Return (trainer with shapes, shapes of a batch) of a network, by default on one device."""
  lengths = {
    'decoder_input_tokens': TARGETS,
    'decoder_target_tokens': TARGETS,
    'decoder_loss_weights': TARGETS,
  }
  vocabulary = vocabularies.PassThroughVocabulary(network.config.vocab_size, eos_id=1)
  if isinstance(network, decoder_only.DecoderWrapper):
    model_cls = models.DecoderOnlyModel
    arguments = (network, vocabulary)
    lengths['decoder_causal_attention'] = TARGETS
  else:
    arguments = (network, vocabulary, vocabulary)
    lengths['encoder_input_tokens'] = INPUTS
  model = model_cls(*arguments, optimizer_def or optimizers.sgd(0.1), **(model_options or {}))
  partitioner = partitioner or partitioning.PjitPartitioner(mesh=mesh_of(1, 1))
  shapes = {name: (ROWS, length) for name, length in lengths.items()}
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, shapes, partitioner
  )
  trainer = trainer_lib.Trainer(
    model,
    initializer.global_train_state_shape,
    partitioner,
    (),
    None,
    initializer.train_state_axes,
    jax.random.key(0),
    **options,
  )
  return trainer, {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


def count(*args: Any, **kwargs: Any) -> int:
  """Return the model FLOPs of a step of `make_trainer`."""
  trainer, batch = make_trainer(*args, **kwargs)
  return trainer.count_flops(batch).total


def trace(trainer: trainer_lib.Trainer, batch: Any) -> Any:
  """Return the traced training step."""
  return trainer.partitioned_train_step().trace(
    trainer.step_state, batch, *trainer.step_arguments(is_last=False)
  )


def products(traced: Any) -> Any:
  """Return the FLOPs of a step's products; one is the sum over rows that is the gradient of the position biases."""
  return pytest.approx(count_flops(traced.jaxpr.jaxpr), rel=0.001)


def flops_by_xla(traced: Any) -> Any:
  """Return the FLOPs that XLA counts in a step, with elementwise operations and the update, within 5 %."""
  compiled = traced.lower().compile(compiler_options={'xla_backend_optimization_level': 0})
  return pytest.approx(compiled.cost_analysis()['flops'], rel=0.05)
