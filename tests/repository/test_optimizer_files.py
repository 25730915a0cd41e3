"""Every file of gin/optimizers/: a run that stops and restarts is bitwise equal to an uninterrupted run."""

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import pytest

from tests.apps.train import toy_run
from tests.models import toy_model
from tests.optimizers import optimizer_files

# Work that files have done now and then comes before and after the stop, but not in the step after it.
_SOONER = {
  'distributed_shampoo': {
    'start_preconditioning_step': 2,
    'preconditioning_compute_steps': 4,
    'block_size': 8,
  },
  'galore': {'update_proj_gap': 4, 'rank': 4},
  'scaled_adam': {'clipping_update_period': 2},
  'soap': {'precondition_frequency': 4, 'block_size': 8},
  'sophia': {'update_interval': 4},
}
_STOP, _END = 6, 10
# The trainer rejects it (tests/optimizers/base/test_state_hooks.py).
_FILES = [stem for stem in optimizer_files.FILES if stem != 'dpsgd']


class _Parameter(nn.Module):
  """One parameter, under a name that files choose by."""

  name_: str
  shape: tuple[int, ...]
  axes: tuple[str, ...]

  @nn.compact
  def __call__(self):
    return nn_partitioning.param_with_axes(
      self.name_, nn.initializers.normal(0.5), self.shape, jnp.float32, axes=self.axes
    )


class _Network(nn.Module):
  """The toy network with the names of a T5 model's parameters."""

  sows: bool = False

  @nn.compact
  def __call__(self, inputs, enable_dropout=True):
    x = _Parameter(
      'embedding', (toy_model.VOCAB_SIZE, 8), ('vocab', 'embed'), name='token_embedder'
    )()[inputs]
    x = x * _Parameter('scale', (8,), ('embed',), name='decoder_norm')()
    x = jnp.tanh(x @ _Parameter('kernel', (8, 16), ('embed', 'mlp'), name='decoder_hidden')())
    x = nn.Dropout(0.1, deterministic=not enable_dropout)(x)
    return (
      x
      @ _Parameter('kernel', (16, toy_model.VOCAB_SIZE), ('mlp', 'vocab'), name='decoder_logits')()
    )


def _optimizer_def(stem):
  """Return a new optimizer as the file configures it."""
  return optimizer_files.definition(
    stem, **{f'optimizers__{stem}__{key}': value for key, value in _SOONER.get(stem, {}).items()}
  )


def _train(stem, model_dir, total_steps):
  """Train with new objects; resume from the checkpoints in the folder."""
  optimizer_def = _optimizer_def(stem)
  vocabulary = toy_run.TASK.vocabularies['inputs']
  model = toy_model.ToyModel(_Network(), vocabulary, vocabulary, optimizer_def)
  rate = toy_run.RATE if optimizer_def.uses_learning_rate else None
  toy_run.train(
    model_dir,
    total_steps,
    model=model,
    trainer_kwargs={'learning_rate_fn': rate, 'num_microbatches': None},
    train_eval_dataset_cfg=None,
    infer_eval_dataset_cfg=None,
    save={'period': _STOP},
    stats_period=2,
  )


@pytest.mark.full  # by default, tests/optimizers/optax_adapter/test_state_structure.py resumes
@pytest.mark.parametrize(
  'stem',
  [stem if stem == 'noisy_sgd' else pytest.param(stem, marks=pytest.mark.full) for stem in _FILES],
)
def test_a_run_resumes_bitwise(stem, tmp_path):
  _train(stem, tmp_path / 'whole', _END)
  _train(stem, tmp_path / 'stopped', _STOP)
  _train(stem, tmp_path / 'stopped', _END)
  toy_run.assert_same_run(tmp_path / 'stopped', tmp_path / 'whole', _END)
  # The run did resume, and every trained array changed.
  before, after = (toy_run.saved(tmp_path / 'stopped', step)[0]['target'] for step in (_STOP, _END))
  moved = [
    bool((a != b).any())
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  ]
  assert sum(moved) >= (2 if stem == 'multi_optimizer_by_label' else len(moved)), moved
