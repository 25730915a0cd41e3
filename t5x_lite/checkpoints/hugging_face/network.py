"""Configuration of our network with the sizes of a Hugging Face folder, for gin files."""

from collections.abc import Sequence
import os

from t5x_lite import checks
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import family_of
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.folder import HuggingFaceFolder
from t5x_lite.checkpoints.hugging_face.folder import is_hugging_face_folder
from t5x_lite.checkpoints.hugging_face.gin_files import suggest_gin
from t5x_lite.data import tokenizer_folders
from t5x_lite.errors import ConfigError
from t5x_lite.networks.t5_config import T5Config
from t5x_lite.storage import files


def stop_token_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
  """Return the ids that end a decoded text in a Hugging Face folder, for `EncoderDecoderModel.stop_token_ids`.

  They are those of `generation_config.json`, or else of `config.json`.

  Args:
    folder: the Hugging Face folder, on a disk or in an object store, or the name of a model, hf://OWNER/NAME.
  """
  return tokenizer_folders.end_token_ids(files.path(folder))


def decoder_start_id(folder: str | os.PathLike[str]) -> int:
  """Return the first input of the decoder of a Hugging Face folder, for `EncoderDecoderModel.decoder_start_id`.

  Args:
    folder: see `stop_token_ids`.

  Raises:
    ConfigError: the folder or its config.json is missing.
    CheckpointError: config.json is damaged.
  """
  path = files.path(folder)
  _check_has_config('decoder_start_id', path)
  config = config_json.read_config(path)
  return config_json.special_ids(config)['decoder_start_token_id']


def network_config(
  folder: str | os.PathLike[str],
  *,
  dtype: str = 'bfloat16',
  dropout_rate: float = 0.1,
  float32_attention_logits: bool = False,
  remat_policy: str = 'none',
  remat_offload: Sequence[str] = (),
  scan_layers: bool | None = None,
  param_layout: str = 't5',
  attention_kernel: str = 'auto',
  loss_chunk_size: int | None = None,
  qk_clip_threshold: float | None = None,
) -> T5Config:
  """Return the configuration of the network in a Hugging Face folder.

  Bind it instead of `T5Config`: `network.Transformer.config = @hugging_face.network_config()`. The folder is read
  whenever the model is built. `config.json` is enough, except for a T5 with tied logits that are not scaled, which
  needs the weights too.

  Args:
    folder: the Hugging Face folder, on a disk or in an object store, or the name of a model, hf://OWNER/NAME.
      `config.json` is enough when a run resumes, unless the network has tied logits that are not scaled.
    dtype: compute dtype; see `T5Config`, also for the other arguments.
    dropout_rate: dropout rate; T5 was pretrained with 0 and is fine-tuned with 0.1.
    float32_attention_logits: whether attention scores are float32.
    remat_policy: name of the results of layers that are stored for the backward pass.
    remat_offload: names of results that remat_policy='offload' stores in the host's memory.
    scan_layers: whether each stack is compiled as one loop; None where its parameters are stacked.
    param_layout: layout of the parameter tree of the run, 't5' or 'scalable_t5'; restoring converts.
    attention_kernel: form of attention, one of `layers.ATTENTION_KERNELS`.
    loss_chunk_size: number of target tokens of a device whose logits the loss computes at once; None by their size.
    qk_clip_threshold: largest attention score of a head that updates do not limit; None for no limit.

  Raises:
    ConfigError: the folder or its config.json is missing, or the model is sparse.
    CheckpointError: the type of model is not supported, or the weights are damaged.
  """
  discovery.check_path(folder, 'folder', may_be_model=True)
  path = files.path(folder)
  _check_has_config('network_config', path)
  if is_hugging_face_folder(path):
    read = HuggingFaceFolder(path)
    architecture = read.architecture
    family = read.family
  else:
    config = config_json.read_config(path)
    config_json.log_open_fields(config, path)
    architecture = Architecture.from_config_json(config)
    family = family_of(config)
  if architecture.num_experts:
    suggested = suggest_gin(architecture, family)
    raise ConfigError(
      f'{str(path)!r} must have a dense network, got one with {architecture.num_experts} experts. '
      f'For a sparse network, give {" ".join(suggested.flags)} instead of the folder, and '
      f'{" ".join(suggested.flags_after_run)} after runs/finetune.gin.'
    )
  return T5Config(
    **architecture.network_config_kwargs(),
    dtype=dtype,
    dropout_rate=dropout_rate,
    float32_attention_logits=float32_attention_logits,
    remat_policy=remat_policy,
    remat_offload=remat_offload,
    scan_layers=scan_layers,
    param_layout=param_layout,
    attention_kernel=attention_kernel,
    loss_chunk_size=loss_chunk_size,
    qk_clip_threshold=qk_clip_threshold,
  )


def _check_has_config(owner: str, path: files.Path) -> None:
  """Raise if a folder or its config.json is missing.

  Args:
    owner: name of the function whose argument `folder` is the path.
    path: path of the folder.

  Raises:
    ConfigError: see above.
  """
  if (path / CONFIG_FILE).is_file():
    return
  if path.is_dir():
    remedy = 'For a checkpoint of another format, add a model file to runs/finetune.gin instead.'
  else:
    remedy = (
      'Restore config.json and the tokenizer files of the missing folder, run the command where the training ran, or '
      'set --gin.INITIAL_CHECKPOINT_PATH to the absolute path.'
    )
  raise checks.invalid(
    owner,
    'folder',
    f'a Hugging Face folder with {CONFIG_FILE}',
    str(path),
    remedy + discovery.hint(path),
  )
