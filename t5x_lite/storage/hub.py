"""Models of the Hugging Face hub by name, `hf://OWNER/NAME` or `hf://OWNER/NAME@REVISION`, as local folders; uploads.

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
import shlex
from typing import Any

from t5x_lite import errors

_logger = logging.getLogger(__name__)

_SCHEME = 'hf://'
# The owner is missing in a few old names. A revision is a branch, a tag or a commit.
_NAME_RE = re.compile(rf'{_SCHEME}((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:@([\w-][\w./-]*?))?/?')
_REPOSITORY_RE = re.compile(r'(?!hf_)[\w-][\w.-]*/[\w-][\w.-]*')
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


def shown_name(folder: str) -> str:
  """Return the name of a folder for people: OWNER/NAME for a model in the cache of the hub, else its last part."""
  path = pathlib.PurePath(os.path.abspath(folder))
  if path.parent.name == 'snapshots':
    return path.parent.parent.name.removeprefix('models--').replace('--', '/')
  return path.name


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

  reason = _reason(error, None)
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


# ---- Uploads ---------------------------------------------------------------------------------------------------------


def check_push(repository: str) -> None:
  """Raise if `push` cannot upload to a repository; asks the hub, and changes nothing there.

  Args:
    repository: OWNER/NAME.

  Raises:
    ConfigError: the name is invalid, huggingface_hub or the token is missing, the hub rejects the token or cannot be
      reached, or the repository has files.
  """
  if _REPOSITORY_RE.fullmatch(repository) is None:
    # The value may be a token, so that it is not shown.
    raise errors.ConfigError(
      '`--push` must be OWNER/NAME, got another text. Write it like --push=me/my-t5; the token is read from '
      '`hf auth login` or HF_TOKEN.'
    )
  with errors.needs_packages('--push', 'huggingface_hub', extra='hub'):
    import huggingface_hub
    import huggingface_hub.errors
  token = huggingface_hub.get_token()
  if token is None:
    raise errors.ConfigError(
      '`--push` needs a token of the Hugging Face hub, got none. Log in with `hf auth login`, or set HF_TOKEN.'
    )
  api = huggingface_hub.HfApi(token=token)
  present: list[str] = []
  try:
    api.whoami()
    with contextlib.suppress(huggingface_hub.errors.RepositoryNotFoundError):  # `push` makes it
      present = [name for name in api.list_repo_files(repository) if name != '.gitattributes']
  except _push_failures() as error:
    raise errors.ConfigError(
      f'The Hugging Face hub does not accept --push={repository}: {_reason(error, token)}. Check the network and the '
      'token (`hf auth whoami`), which must have the permission to write.'
    ) from None
  if present:
    raise errors.ConfigError(
      f'`--push` must name a new or empty repository, got {repository} with {len(present)} files such as '
      f'{present[0]}. Choose another name.'
    )


def push(folder: str | os.PathLike[str], repository: str) -> str:
  """Upload a folder to a repository in one commit, and return the URL of the commit.

  A new repository is private. Before the commit, no file of the folder is visible in the repository.

  Args:
    folder: path on a disk.
    repository: OWNER/NAME, see `check_push`.

  Raises:
    CheckpointError: there is no commit.
  """
  import huggingface_hub

  token = huggingface_hub.get_token()
  api = huggingface_hub.HfApi(token=token)
  try:
    api.create_repo(repository, private=True, exist_ok=True)
    commit = api.upload_folder(
      folder_path=os.fspath(folder), repo_id=repository, commit_message='Upload of t5x_lite'
    )
  except _push_failures() as error:
    # Not `from error`: its requests have the token.
    raise errors.CheckpointError(
      f'{os.fspath(folder)!r} is complete, but it was not pushed to {repository}: {_reason(error, token)}. '
      f'Push it with `hf upload --private {repository} {shlex.quote(os.fspath(folder))}`.'
    ) from None
  return str(commit.commit_url)


def _push_failures() -> tuple[type[Exception], ...]:
  import huggingface_hub.errors

  http_error = huggingface_hub.errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
  return (OSError, ValueError, RuntimeError, http_error)


def _reason(error: Exception, token: str | None) -> str:
  """Return the first sentence of an error, without the token."""
  first_sentence = ' '.join(str(error).split()).partition('. ')[0]
  if token:
    first_sentence = first_sentence.replace(token, '(token)')
  return first_sentence[:200].rstrip('.') or type(error).__name__
