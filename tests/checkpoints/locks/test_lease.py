"""A lease in an object store has one owner, whatever dies, stalls or is cut off."""

import json
import os
import subprocess
import sys
import threading
import time
import zlib

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints.locks import lease
from t5x_lite.storage import files

_IN_USE = 'The directory is in use by {holder}.'
_HOLD = """
import sys, time
from t5x_lite.storage import files
from t5x_lite.checkpoints.locks import lease
held = lease.Lease(files.path(sys.argv[1]), '.lock', in_use='The directory is in use by {holder}.')
print('held', flush=True)
time.sleep(100)
"""


def _take(store):
  return lease.Lease(files.path(store.root), '.lock', in_use=_IN_USE)


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
  monkeypatch.setattr(lease, 'LEASE_SECONDS', 2.0)
  monkeypatch.setattr(lease, '_RENEWAL_SECONDS', 0.3)
  monkeypatch.setattr(lease, '_POLL_SECONDS', 0.1)


def test_a_second_owner_is_rejected_until_the_release(store):
  with checkpoints.lock_model_dir(store.root) as held:
    held.check()
    with pytest.raises(
      errors.DirectoryInUseError, match=r'in use by process \d+ on host .*, since 20'
    ):
      _take(store)
    with checkpoints.lock_model_dir(store.root) as again:  # the same run
      assert again is held
    checksum = zlib.crc32(held.holder.encode())  # what the other processes of a run compare
    assert held.is_seen(checksum) and not held.is_seen(checksum + 1)
  assert store.names() == []
  _take(store).release()


def test_one_of_many_wins(store):
  held, rejected = [], []

  def take():
    try:
      held.append(_take(store))
    except errors.DirectoryInUseError as e:
      rejected.append(e)

  threads = [threading.Thread(target=take) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (len(held), len(rejected)) == (1, 5)
  held[0].release()


def test_the_lease_of_a_killed_process(store, monkeypatch):
  # Far above what a store and a busy machine need, so that only waiting for the lease's end reaches it.
  monkeypatch.setattr(lease, 'LEASE_SECONDS', 60.0)
  with subprocess.Popen(
    [sys.executable, '-c', _HOLD, store.root],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, **store.env},
  ) as owner:
    assert owner.stdout.readline() == 'held\n'
    owner.kill()
  start = time.monotonic()
  _take(store).release()  # this machine knows that the process has ended
  assert time.monotonic() - start < 50
  monkeypatch.setattr(lease, 'LEASE_SECONDS', 2.0)
  # Of another machine nothing is known, so the lease must expire.
  elsewhere = {
    'pid': 1,
    'host': 'other',
    'machine': 'other',
    'since': '2026-01-01 00:00:00',
    'renewed': 3,
  }
  (files.path(store.root) / '.lock').write_text(json.dumps(elsewhere))
  start = time.monotonic()
  _take(store).release()
  assert time.monotonic() - start > 2


def test_an_unreachable_store(s3_store):
  held = _take(s3_store)
  with s3_store.proxy.fault(name='lock', unreachable=True):
    held.check()  # its time has not passed
    time.sleep(2.5)
    with pytest.raises(OSError, match='lease cannot be written'):
      held.check()
  held.check()  # nobody has taken it
  held.release()


def test_an_owner_that_was_cut_off_for_too_long(s3_store):
  cut_off = _take(s3_store)
  cut_off._stopped.set()  # e.g. a stopped machine
  cut_off._thread.join()
  cut_off._stopped.clear()
  other = _take(s3_store)
  with pytest.raises(
    errors.DirectoryInUseError, match='took the lease .* could not renew it for 2 seconds'
  ):
    cut_off.check()
  cut_off.release()
  other.check()
  other.release()
  assert s3_store.names() == []


def test_another_owner_that_has_ended_meanwhile(s3_store):
  cut_off = _take(s3_store)
  cut_off._stopped.set()
  cut_off._thread.join()
  cut_off._stopped.clear()
  _take(s3_store).release()
  with pytest.raises(errors.DirectoryInUseError):
    cut_off.check()
  assert s3_store.names() == []


def test_a_lost_answer_and_a_deleted_object(s3_store):
  with s3_store.proxy.fault(name='lock', method='PUT', lose_answer=True, times=1):
    held = _take(s3_store)
  with s3_store.proxy.fault(name='lock', method='PUT', lose_answer=True, times=1):
    held._renew()
  (files.path(s3_store.root) / '.lock').unlink()
  held._renew()
  held.check()
  with pytest.raises(errors.DirectoryInUseError):
    _take(s3_store)
  held.release()


def test_a_store_that_does_not_answer(s3_store, monkeypatch):
  monkeypatch.setattr(lease, '_REQUEST_SECONDS', 0.5)
  held = _take(s3_store)
  with s3_store.proxy.fault(name='lock', delay=3.0):
    time.sleep(2.2)
    with pytest.raises(OSError, match='lease cannot be written .no answer'):
      held.check()
    start = time.monotonic()
    held.release()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize('kind', ['gcs_store', 's3_store'])
def test_a_missing_bucket_is_reported_at_once(kind, request):
  request.getfixturevalue(kind)
  scheme = {'gcs_store': 'gs', 's3_store': 's3'}[kind]
  start = time.monotonic()
  with pytest.raises(errors.CheckpointError, match="there is no bucket 'no-such-bucket'"):
    checkpoints.lock_model_dir(f'{scheme}://no-such-bucket/run')
  assert time.monotonic() - start < 10
