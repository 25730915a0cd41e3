"""The compilation cache that commands use by default."""

import logging
import os
import threading
import time
import zlib

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from t5x_lite import runtime
from t5x_lite.apps.precompile import command as precompile_command
from t5x_lite.apps.precompile import run as precompile_lib
from t5x_lite.command_line import cli
from t5x_lite.runtime import compilation_cache as cache_lib
from tests.apps.precompile.toy_precompile import GIN
from tests.apps.precompile.toy_precompile import kept_settings


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
  with kept_settings():
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    yield


def _programs():
  return sorted(runtime.default_folder().glob('*-cache'))


def test_commands_use_the_default_folder(capsys, tmp_path, monkeypatch):
  (tmp_path / 'toy.gin').write_text(GIN)
  monkeypatch.setattr(
    precompile_command, 'simulate_devices', lambda num_devices: None
  )  # JAX has begun
  monkeypatch.setattr(precompile_lib, 'precompile', lambda **arguments: [])
  command = ['precompile', f'--gin_file={tmp_path}/toy.gin']
  for flag in ('--num_devices=8', '--compilation_cache_dir=off'):
    assert cli.main([*command, flag]) == 0
  assert (
    capsys.readouterr().out.count('No compilation cache') == 2 and not (tmp_path / 'home').exists()
  )
  # Neither is a folder of JAX's variable used, of which a command without a flag would say that it is used.
  for flag in ('--num_devices=8', '--compilation_cache_dir=off'):
    jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'of_jax'))
    assert cli.main([*command, flag]) == 0
    assert 'No compilation cache' in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir is None
  assert cli.main(command) == 0
  assert f'is {runtime.default_folder()}, the default' in capsys.readouterr().out
  assert runtime.default_folder().stat().st_mode & 0o777 == 0o700


def test_programs_are_kept_and_incomplete_ones_deleted():
  runtime.use_default_compilation_cache()

  def compile_two():
    with runtime.count_cache_use() as counts:
      for i in range(2):
        jax.jit(lambda x, i=i: x * 3 + i).lower(1.0).compile()
    return counts.hits, counts.misses

  assert compile_two() == (0, 2)
  # A process that was killed while it wrote leaves a part of a program.
  complete, broken = _programs()
  broken.write_bytes(broken.read_bytes()[:-9])
  jax.config.update('jax_compilation_cache_dir', None)  # as in a new process
  runtime.use_default_compilation_cache()
  assert _programs() == [complete]
  assert compile_two() == (1, 1)
  zlib.decompress(broken.read_bytes())


def test_compilations_are_counted_and_named(caplog):
  caplog.set_level(logging.DEBUG, 't5x_lite')
  runtime.use_default_compilation_cache()

  def triple(x):
    return x * 3 + 0.25

  def compile_in_a_thread():
    thread = threading.Thread(target=lambda: jax.jit(triple).lower(1.0).compile())
    thread.start()
    thread.join()

  with runtime.log_compilations(), runtime.count_cache_use(all_threads=True) as counts:
    with runtime.count_cache_use() as counts_here:
      compile_in_a_thread()
      jax.clear_caches()
      compile_in_a_thread()
  assert (counts.programs, counts.hits, counts.misses) == (2, 1, 1) and counts.seconds > 0
  assert str(counts).startswith('2 programs in 0.') and str(counts).endswith(
    ' s, 1 from the compilation cache'
  )
  assert counts_here == runtime.CacheCounts()
  compile_in_a_thread()  # outside of the context
  first, second = (
    record.getMessage() for record in caplog.records if 'triple' in record.getMessage()
  )
  assert first.startswith('Compiled ') and second.startswith('Loaded ')


def test_old_programs_are_deleted(tmp_path):
  folder = runtime.default_folder()
  folder.mkdir(mode=0o700, parents=True)
  now = time.time()
  for name, age in (('new', 0), ('oldest', 300), ('old', 200), ('read', 400)):
    path = folder / f'{name}-cache'
    path.write_bytes(zlib.compress(os.urandom(1000)))
    os.utime(path, (now - (50 if name == 'read' else age), now - age))
  runtime.use_default_compilation_cache(max_bytes=2500)
  assert [path.name for path in _programs()] == ['new-cache', 'read-cache']
  assert jax.config.jax_compilation_cache_dir == str(folder)


def test_no_default_folder_where_programs_are_not_safe(monkeypatch, tmp_path):
  folder = runtime.default_folder()
  monkeypatch.setattr(cache_lib, '_cpu_features', lambda: 'flags: none')
  assert runtime.default_folder().parent == folder.parent and runtime.default_folder() != folder
  monkeypatch.setenv('XDG_CACHE_HOME', 'relative')
  assert runtime.default_folder() is None
  monkeypatch.setenv('XDG_CACHE_HOME', '/proc/self')
  assert runtime.default_folder() is not None
  runtime.use_default_compilation_cache()  # nothing can be written there
  monkeypatch.setattr(cache_lib, '_REMOTE', ('proc',))
  assert runtime.default_folder() is None
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(os, 'getuid', lambda: -1)  # a folder of another user
  runtime.use_default_compilation_cache()
  monkeypatch.undo()
  monkeypatch.setattr(cache_lib.sys, 'platform', 'darwin')
  assert runtime.default_folder() is None
  runtime.use_default_compilation_cache()
  assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(
  'mounts, is_local',
  [
    ('', True),
    ('none /proc proc rw 0 0', True),  # a chroot
    ('disk / ext4 rw 0 0', True),
    ('disk / ext4 rw 0 0\nserver:/ /Gäste\\040a nfs4 rw 0 0', False),
    ('server:/ / nfs rw 0 0\ndisk /Gäste\\040a ext4 rw 0 0', True),
    ('server:/ / fuse.sshfs rw 0 0', False),
  ],
)
def test_network_file_systems(monkeypatch, mounts, is_local):
  monkeypatch.setenv('XDG_CACHE_HOME', '/Gäste a/.cache')
  monkeypatch.setattr(cache_lib.pathlib.Path, 'read_bytes', lambda path: mounts.encode())
  assert (runtime.default_folder() is not None) == is_local


def test_settings_of_jax_come_first(tmp_path):
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'mine'))
  runtime.use_default_compilation_cache()
  assert (
    jax.config.jax_compilation_cache_dir == str(tmp_path / 'mine')
    and not runtime.default_folder().exists()
  )
  jax.config.update('jax_compilation_cache_dir', None)
  jax.config.update('jax_enable_compilation_cache', False)
  runtime.use_default_compilation_cache()
  assert jax.config.jax_compilation_cache_dir is None
