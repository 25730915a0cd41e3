"""Folders of seqio's data for the entire process, which T5X sets by flags."""

from collections.abc import Sequence

from t5x_lite import files
from t5x_lite import plain_paths
from t5x_lite.data.seqio_import import seqio


def use_folders(tfds_data_dir: str, cache_dirs: Sequence[str]) -> None:
  """Set the folder of TensorFlow Datasets for all tasks, and add folders in which cached tasks are searched.

  Args:
    tfds_data_dir: replaces `tfds_data_dir` of every `seqio.TfdsDataSource`; empty for no change.
    cache_dirs: folders with results of seqio's cache job, searched after those that seqio has already.
  """
  if tfds_data_dir:
    seqio.set_tfds_data_dir_override(tfds_data_dir)
  # seqio makes patterns of these paths.
  seqio.add_global_cache_dirs([_plain(folder) for folder in cache_dirs])


def _plain(folder: str) -> str:
  if files.is_remote(folder):
    return folder
  return str(plain_paths.plain_path(folder))
