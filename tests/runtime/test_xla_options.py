"""XLA's flags get options for faster compilation, unless the user has given such options."""

import os

import pytest

from t5x_lite import runtime
from t5x_lite.command_line import platform as cli_platform
from t5x_lite.errors import ConfigError

_FLAG = runtime.FAST_COMPILATION_FLAG
_DEVICES = '--xla_force_host_platform_device_count=8'


@pytest.mark.parametrize(
  'before, after',
  [
    (None, _FLAG),
    ('', _FLAG),
    (_DEVICES, f'{_DEVICES} {_FLAG}'),
    (_FLAG, _FLAG),
    ('--xla_backend_extra_options=a=b', '--xla_backend_extra_options=a=b'),
    ('/path/of/a/file', '/path/of/a/file'),
  ],
)
def test_the_flag_is_added_to_flags_without_such_options(monkeypatch, before, after):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  if before is not None:
    monkeypatch.setenv('XLA_FLAGS', before)
  runtime.compile_faster()
  assert os.environ['XLA_FLAGS'] == after


def test_the_added_flag_is_not_checked(monkeypatch):
  checked = []
  monkeypatch.setattr(
    cli_platform, '_complaint', lambda flags: checked.append(flags) or 'Unknown flag'
  )
  monkeypatch.setenv('XLA_FLAGS', f'{_DEVICES} {_FLAG}')
  cli_platform.check_xla_flags()
  assert not checked
  monkeypatch.setenv('XLA_FLAGS', f'--xla_foo=1 {_FLAG}')
  with pytest.raises(ConfigError, match="got '--xla_foo=1': Unknown flag"):
    cli_platform.check_xla_flags()


def test_xla_accepts_the_flag():
  assert cli_platform._complaint(_FLAG) == ''
