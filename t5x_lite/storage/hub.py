"""Models of the Hugging Face hub by name, `hf://OWNER/NAME` or `hf://OWNER/NAME@REVISION`, as local folders.

`files.path` gives the folder of a name, so that a name can stand wherever a Hugging Face folder is read. The folder is
in the cache of the package huggingface_hub (HF_HUB_CACHE); a model that is complete there is used without a request.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import re
from typing import Any

from t5x_lite import errors

_logger = logging.getLogger(__name__)

_SCHEME = 'hf://'
# The owner is missing in a few old names. A revision is a branch, a tag or a commit.
_NAME_RE = re.compile(rf'{_SCHEME}((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w-][\w./-]*?))?/?')
_CONFIG = 'config.json'
_WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_TOKENIZER = ('spiece.model', 'tokenizer_config.json')
# Everything but the weights. It is downloaded first, so that a folder with weights has it.
_SMALL_FILES = (
  _CONFIG,
  'generation_config.json',
  _INDEX,
  *_TOKENIZER,
  'tokenizer.json',
  'special_tokens_map.json',
  'added_tokens.json',
  '*.model',
)


def is_name(path: str | os.PathLike[str]) -> bool:
  """Return True if a path is the name of a model of the hub: it begins with hf://."""
  return os.fspath(path).startswith(_SCHEME)


@functools.cache
def local_folder(name: str) -> pathlib.Path:
  """Return the folder of a model of the hub, with its config.json, safetensors and tokenizer.

  Args:
    name: `hf://OWNER/NAME`, or `hf://OWNER/NAME@REVISION`. The default of REVISION is `main`: its newest commit when
      the model was downloaded.

  Raises:
    ConfigError: the name is invalid, or huggingface_hub is not installed.
    CheckpointError: the model is not in the cache and cannot be downloaded, or it has no safetensors.
  """
  match = _NAME_RE.fullmatch(name)
  if match is None:
    raise errors.ConfigError(
      f'The name of a model of the Hugging Face hub must be hf://OWNER/NAME or '
      f'hf://OWNER/NAME@REVISION, got {name!r}. Write it like hf://google/flan-t5-small.'
    )
  with errors.needs_packages(f'The path {name!r}', 'huggingface_hub', extra='hub'):
    import huggingface_hub
    import huggingface_hub.errors
  model = match[1]
  revision = match[2] or 'main'
  download = functools.partial(huggingface_hub.snapshot_download, model, revision=revision)
  # The error of the HTTP client is of another package in each version, so that only this name is in all of them.
  http_error = huggingface_hub.errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
  failures = (OSError, ValueError, http_error)
  cached = None
  with contextlib.suppress(*failures):  # it is not in the cache
    cached = pathlib.Path(download(local_files_only=True, allow_patterns=[_CONFIG]))
  if cached is not None and _has_weights(cached) and _has_tokenizer(cached):
    return cached
  _logger.info('Downloading %s from the Hugging Face hub.', name)
  try:
    folder = pathlib.Path(download(allow_patterns=list(_SMALL_FILES)))
    download(allow_patterns=sorted(_shards(folder) or {_WEIGHTS}))
  except failures as error:
    if cached is not None and _has_weights(cached):
      return cached
    raise errors.CheckpointError(_explain(name, model, revision, error)) from error
  if not _has_weights(folder):
    raise errors.CheckpointError(
      f'{name!r} must have {_CONFIG} and {_WEIGHTS} (or shards with {_INDEX}), got a model without them. Give a '
      f'revision that has them, or load the model with transformers and save it: model.save_pretrained(folder).'
    )
  return folder


def _has_weights(folder: pathlib.Path) -> bool:
  """Return True if config.json and all safetensors are there."""
  if not (folder / _CONFIG).is_file():
    return False
  if (folder / _WEIGHTS).is_file():
    return True
  shards = _shards(folder)
  return bool(shards) and all((folder / shard).is_file() for shard in shards)


def _has_tokenizer(folder: pathlib.Path) -> bool:
  return any((folder / file).is_file() for file in _TOKENIZER)


def _shards(folder: pathlib.Path) -> set[str]:
  """Return the files with weights by the index; empty if it is missing or invalid, which reading the folder reports."""
  try:
    weight_map: Any = json.loads((folder / _INDEX).read_bytes())['weight_map']
    return set(map(str, weight_map.values()))
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return set()


def _explain(name: str, model: str, revision: str, error: Exception) -> str:
  import huggingface_hub.errors

  first_sentence = ' '.join(str(error).split()).partition('. ')[0]
  reason = first_sentence[:200].rstrip('.') or type(error).__name__
  folder = model.rpartition('/')[2]
  at = '' if revision == 'main' else f' --revision {revision}'
  if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):
    remedy = 'Correct the name; for a private or gated model, log in with `hf auth login`.'
  elif isinstance(error, huggingface_hub.errors.RevisionNotFoundError):
    remedy = 'Correct the revision, or omit it.'
  else:
    remedy = (
      f'Connect to the network, or download the model on another machine (`hf download {model}{at} --local-dir '
      f'{folder}`), copy the folder and give its path.'
    )
  return f'{name!r} is not in the cache of the Hugging Face hub and cannot be downloaded: {reason}. {remedy}'
