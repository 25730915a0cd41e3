"""Caches of the Hugging Face hub as huggingface_hub makes them."""

import os
import pathlib
import shutil

import pytest

from t5x_lite.storage import hub

COMMIT = '0123456789abcdef0123456789abcdef01234567'


def use(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """Lets this process use the cache `folder`, without a network. Skips where huggingface_hub is not installed."""
  pytest.importorskip('huggingface_hub')
  hub.local_folder.cache_clear()
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(folder))
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS', True)
  return folder


def add(cache: pathlib.Path, name: str, contents: dict[str, bytes] | pathlib.Path) -> pathlib.Path:
  """Adds a model to a cache, with its links, and returns the model's folder.

  Args:
    cache: the cache.
    name: OWNER/NAME.
    contents: the bytes of the model's files, or a folder with the files.
  """
  root = cache / f'models--{name.replace("/", "--")}'
  folder = root / 'snapshots' / COMMIT
  for directory in (folder, root / 'blobs', root / 'refs'):
    directory.mkdir(parents=True, exist_ok=True)
  (root / 'refs/main').write_text(COMMIT)
  names = list(contents) if isinstance(contents, dict) else os.listdir(contents)
  for number, file in enumerate(names):
    if isinstance(contents, dict):
      (root / 'blobs' / str(number)).write_bytes(contents[file])
    else:
      shutil.copyfile(contents / file, root / 'blobs' / str(number))
    (folder / file).symlink_to(f'../../blobs/{number}')
  return folder
