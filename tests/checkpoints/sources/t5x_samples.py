"""The two checkpoints that T5X wrote, unpacked, and models to restore them into."""

import gzip
import json
import pathlib
import tarfile
import types

import numpy as np

from t5x_lite import adafactor
from t5x_lite import models
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from tests.networks import network_cases

NAME = 'net_t5_1_1_tiny'
STEP = 7
_FOLDER = pathlib.Path(__file__).parents[2] / 'golden' / 't5x_checkpoints'
INPUT_SHAPES = {
  'encoder_input_tokens': (8, 6),
  'decoder_input_tokens': (8, 5),
  'decoder_target_tokens': (8, 5),
}


def unpack(folder):
  """Unpacks both below `folder`; returns the directories, each with a checkpoint_7, by the name of their form."""
  made = {}
  for stored_as, name in (('t5x', 'legacy'), ('t5x_orbax', 'orbax')):
    made[stored_as] = folder / stored_as
    with tarfile.open(_FOLDER / f'{NAME}_{name}.tar.gz') as archive:
      archive.extractall(made[stored_as], filter='data')
  return made


def read_chunks(checkpoint):
  """Read the arrays stored next to the index, of one chunk each, without TensorStore."""
  arrays = {}
  for folder in checkpoint.iterdir():
    if folder.is_dir():
      described = json.loads((folder / '.zarray').read_text())
      chunk = folder / '.'.join('0' for _ in described['shape'])
      arrays[folder.name.replace('.', '/')] = np.frombuffer(
        gzip.decompress(chunk.read_bytes()), described['dtype']
      ).reshape(described['shape'])
  return arrays


def vocabulary(size=64):
  return types.SimpleNamespace(vocab_size=size, eos_id=1, pad_id=0)


def model(optimizer_def=None, **overrides):
  """A model of the sample's network."""
  network = t5.Transformer(network_cases.golden_config(NAME, **overrides))
  words = vocabulary(network.config.vocab_size)
  return models.EncoderDecoderModel(network, words, words, optimizer_def or adafactor.Adafactor())


def initializer(its_model, partitioner, shapes=None):
  return state_init.TrainStateInitializer(
    its_model.optimizer_def, its_model.get_initial_variables, shapes or INPUT_SHAPES, partitioner
  )
