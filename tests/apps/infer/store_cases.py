"""Workers of an inference on a disk that fails."""

import contextlib
import os

import pytest

from t5x_lite.apps.infer.merge import merge_shards
from t5x_lite.apps.infer.paths import ResultPaths
from t5x_lite.apps.infer.store import ShardStore
from t5x_lite.storage import files

IDENTITY = {'mode': 'predict', 'checkpoint': {'step': 5}}
BATCH_SIZE = 3


class Killed(BaseException):
  """Error that simulates the end of the process."""


class DyingDisk:
  """Ends the process at the n-th step of `files`; a file that is being written then has half of its content."""

  def __init__(self, num_steps=10**9):
    self._left = num_steps

  @contextlib.contextmanager
  def in_use(self):
    write, rename, remove = files.write, files.rename, files.remove

    def dying_write(path, content, **options):
      def half_way(temporary):
        self.step()
        content(temporary) if callable(content) else temporary.write_text(content)
        try:
          self.step()
        except Killed:
          with open(temporary, 'rb+') as file:
            file.truncate(os.path.getsize(temporary) // 2)
          raise

      write(path, half_way, **options)

    def dying_rename(source, target, **options):
      self.step()
      rename(source, target, **options)

    def dying_remove(path):  # that of the temporary file of a dead process too
      self.step()
      remove(path)

    def dying_fsync(path):
      self.step()
      assert (
        path.exists()
      )  # waiting for the disk itself is slow, and changes nothing that a process can see

    with pytest.MonkeyPatch.context() as patch:
      for name, function in (
        ('write', dying_write),
        ('rename', dying_rename),
        ('remove', dying_remove),
        ('fsync', dying_fsync),
      ):
        patch.setattr(files, name, function)
      yield

  def step(self):
    if self._left <= 0:
      raise Killed
    self._left -= 1


def make_lines(num_examples):
  return [f'{{"number": {i}}}\n' for i in range(num_examples)]


def batches_of(num_examples, shard_id, num_shards):
  lines = make_lines(num_examples)
  batches = [lines[start : start + BATCH_SIZE] for start in range(0, num_examples, BATCH_SIZE)]
  return batches[shard_id::num_shards]


def work(
  folder,
  num_examples,
  *,
  shard_id=0,
  num_shards=1,
  period=2,
  disk=None,
  has_plain_name=True,
  identity=None,
  stop_after=None,
):
  """Write results with a store like the app; the results are the numbers of the examples."""
  with (disk or DyingDisk()).in_use():
    paths = ResultPaths(
      folder=folder,
      name='r.jsonl',
      shard_id=shard_id,
      num_shards=num_shards,
      has_plain_name=has_plain_name,
    )
    paths.shard_folder.mkdir(parents=True, exist_ok=True)
    store = ShardStore(paths, identity or IDENTITY, BATCH_SIZE)
    if not store.has_all_chunks:
      store.begin()
      batches = batches_of(num_examples, shard_id, num_shards)[:stop_after]
      for first in range(store.next_batch, len(batches), period):
        chunk = [line for batch in batches[first : first + period] for line in batch]
        store.write_chunk(
          first,
          len(batches[first : first + period]),
          len(chunk),
          0,
          1,
          lambda path, text=''.join(chunk): path.write_text(text),
        )
      if stop_after is not None:
        return store
      store.end_chunks(num_examples)
    if not store.is_complete:
      store.finish()
    store.begin()
    if num_shards > 1:
      merge_shards(paths)
    return store
