"""The configuration of our network that has the dims of a Hugging Face folder, so that a gin file need not say them."""

import os
import pathlib

from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import family_of
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE, HuggingFaceFolder, is_hugging_face_folder
from t5x_lite.checkpoints.hugging_face.gin_files import suggest_gin
from t5x_lite.errors import ConfigError
from t5x_lite.networks.t5_config import T5Config


def network_config(
    folder: str | os.PathLike[str], *, dtype: str = 'bfloat16', dropout_rate: float = 0.1,
    float32_attention_logits: bool = False, remat_policy: str = 'none', scan_layers: bool = False,
    param_layout: str = 't5', attention_kernel: str = 'auto') -> T5Config:
  """Returns the configuration of the network in a Hugging Face folder: sizes, activations and tables from its files.

  Bind it where a model file has `T5Config`: `network.Transformer.config = @hugging_face.network_config()`. The folder
  is read whenever the model is made; of a folder whose weights are gone, `config.json` is enough, except for a T5 with
  tied logits that are not scaled.

  Args:
    folder: the Hugging Face folder. `config.json` is enough when a run resumes, unless the network has tied logits that
      are not scaled.
    dtype: compute dtype; see `T5Config`, also for the other arguments.
    dropout_rate: T5 was pretrained without and is fine-tuned with 0.1.
    float32_attention_logits: keep attention scores in float32.
    remat_policy: intermediate results that the backward pass keeps: 'none', 'minimal' or 'full'.
    scan_layers: compile each stack as one loop, for deep models.
    param_layout: form of the parameter tree of the run, 't5' or 'scalable_t5'; restoring converts.
    attention_kernel: 'auto', 'dot' or 'cudnn'.

  Raises:
    ConfigError: no such folder, or a sparse model.
    CheckpointError: another type of model, or damaged weights.
  """
  discovery.check_local_path(folder, 'folder')
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise ConfigError(f'There is no folder {str(path)!r}; expected a Hugging Face folder, whose sizes the network is '
                      'to have. A run reads them again whenever it goes on: of a folder that is gone put config.json '
                      f'and the tokenizer back.{discovery.hint(path)}')
  if not (path / CONFIG_FILE).is_file():
    raise ConfigError(f'{str(path)!r} has no {CONFIG_FILE}; expected a Hugging Face folder, whose sizes the network is '
                      'to have. For a checkpoint of another form add a model file to runs/finetune.gin instead.'
                      + discovery.hint(path))
  if is_hugging_face_folder(path):
    read = HuggingFaceFolder(path)
    architecture, family = read.architecture, read.family
  else:
    config = config_json.read(path, CONFIG_FILE)
    architecture, family = Architecture.from_config_json(config), family_of(config)
  if architecture.num_experts:
    suggested = suggest_gin(architecture, family)
    raise ConfigError(f'{str(path)!r} has a network with {architecture.num_experts} experts; expected a dense one. '
                      f'Sparse networks are made by the package moe: add {" ".join(suggested.flags)} to '
                      f'runs/finetune.gin instead, and {" ".join(suggested.flags_after_run)} after it.')
  return T5Config(
      **architecture.network_config_kwargs(), dtype=dtype, dropout_rate=dropout_rate,
      float32_attention_logits=float32_attention_logits, remat_policy=remat_policy, scan_layers=scan_layers,
      param_layout=param_layout, attention_kernel=attention_kernel)
