"""A run of the recipe `keyword_cloze` with a tiny network on one device, as if trained."""

import gin
import jax

from t5x_lite import checkpoints
from t5x_lite import gin_utils
from t5x_lite.apps.common import runs
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.interactive import texts as text_inference
from t5x_lite.trainer import state_init

_TINY = [
  'network.T5Config.emb_dim=8',
  'network.T5Config.num_heads=2',
  'network.T5Config.head_dim=4',
  'network.T5Config.mlp_dim=8',
  'network.T5Config.num_encoder_layers=1',
  'network.T5Config.num_decoder_layers=1',
  'DATA_SOURCE=builtin',
]
# Lengths of the run of the fixture `command_line`.
DECODED_LENGTHS = {'inputs': 16, 'targets': 5}
ONE_DEVICE = """
from __gin__ import dynamic_registration
from t5x_lite import partitioning
from tests.partitioning import one_device
partitioning.PjitPartitioner.num_partitions = None
partitioning.PjitPartitioner.mesh = @one_device.mesh()
"""


def bindings(lengths):
  """Return bindings of the network and of the feature `lengths`, as `--gin.` flags take them."""
  return [*_TINY, f'TASK_FEATURE_LENGTHS={lengths}']


def load(model_dir, lengths, more=ONE_DEVICE):
  """Return the loaded configuration with the further gin text `more`; clear gin's configuration after use."""
  flags = [
    gin_syntax.read_flag(*flag.split('=', 1), flag)
    for flag in [*bindings(lengths), f'MODEL_DIR={model_dir}']
  ]
  texts = gin_utils.read(['recipes/keyword_cloze.gin'], flags)
  return gin_utils.load(runs.ENTRY, [*texts, gin_syntax.read_text(more, 'more', is_flag=False)])


def write_config(model_dir, flags):
  """Write the config.gin of a run with further `--gin.` flags; return the loaded configuration."""
  bindings_of_flags = [
    gin_syntax.read_flag(*flag.removeprefix('--gin.').split('=', 1), flag)
    for flag in [*flags, '--gin.MODEL_DIR=x']
  ]
  configuration = gin_utils.load(
    runs.ENTRY, gin_utils.read(['recipes/keyword_cloze.gin'], bindings_of_flags)
  )
  gin_utils.write_config(model_dir, configuration.text, 0)
  return configuration


def save(model_dir, lengths, more=ONE_DEVICE, **metadata):
  """Save the configuration, and random parameters as checkpoints of the steps 3 and 5 with `metadata`."""
  configuration = load(model_dir, lengths, more)
  gin_utils.write_config(model_dir, configuration.text, 0)
  model, partitioner = configuration.argument('model'), configuration.argument('partitioner')
  spec = text_inference.element_spec(model, lengths, 1)
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: leaf.shape for name, leaf in spec.items()},
    partitioner,
  )
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (3, 5):
      state = initializer.from_scratch(jax.random.key(step)).replace_step(step)
      manager.save(step, state.state_dict(), metadata={'param_layout': 't5', **metadata})
  gin.clear_config()
