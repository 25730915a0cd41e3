"""Runs of a small T5 with an adapter on the examples of `toy_run`, in this process or in one that tests may kill.

python -m tests.apps.train.adapter_run MODEL_DIR NAME=VALUE...
"""

import ast
import functools
import os
import sys

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite.checkpoints import builders
from t5x_lite.networks import t5
from tests.apps.train import toy_run
from tests.models import toy_model

OPTIONS = {'save': {'period': 3}, 'stats_period': 2, 'eval_period': None, 'restore': None}
_EVALUATIONS = {'train_eval_dataset_cfg': None, 'infer_eval_dataset_cfg': None}


@functools.cache
def model(adapter=None, param_layout='t5', scan_layers=False, optimizer_def=None):
  """Return a model of two layers; the dropout makes a resumed run depend on its random numbers."""
  config = t5.T5Config(
    vocab_size=toy_model.VOCAB_SIZE,
    emb_dim=8,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=4,
    mlp_dim=16,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.1,
    param_layout=param_layout,
    scan_layers=scan_layers,
  )
  vocabulary = toy_run.model().input_vocabulary
  return models.EncoderDecoderModel(
    t5.Transformer(config),
    vocabulary,
    vocabulary,
    optimizer_def or optimizers.adamw(),
    adapter=adapter,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )


def train_base(model_dir, num_steps=2):
  """Train all parameters, and return the path of the checkpoint."""
  options = {**OPTIONS, 'save': {'period': num_steps}}
  toy_run.train(model_dir, num_steps, model=model(), **_EVALUATIONS, **options)
  return os.path.join(model_dir, f'checkpoint_{num_steps}')


def restore_cfg(base, *, adapter_path=None, **kwargs):
  """Return how the first state is built from a base."""
  return checkpoints.RestoreCheckpointConfig(
    str(base),
    **{'mode': 'specific', 'builders': [builders.initial_adapter(adapter_path)], **kwargs},
  )


def train(model_dir, num_steps=8, *, base=None, rank=2, lora=None, layout=None, **kwargs):
  """Train an adapter of the checkpoint `base`, None to give no path."""
  adapter = adapters.Lora(rank=rank, **(lora or {}))
  options = {**OPTIONS, **({} if base is None else {'restore': restore_cfg(base)}), **kwargs}
  return toy_run.train(
    model_dir, num_steps, model=model(adapter, **(layout or {})), **{**_EVALUATIONS, **options}
  )


def main():
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  train(sys.argv[1], **{k: ast.literal_eval(v) for k, v in (a.split('=', 1) for a in sys.argv[2:])})


if __name__ == '__main__':
  main()
