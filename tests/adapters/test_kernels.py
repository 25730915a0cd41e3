"""The roles of a kernel's dims, by its logical axes."""

import pytest

from t5x_lite.adapters.kernels import Kernel
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize(
  'axes, dims, size_in, size_out',
  [
    (('embed', 'mlp'), 'io', 2, 3),
    ((None, None), 'io', 2, 3),
    (('expert', 'embed', 'mlp'), 'sio', 3, 5),
    (('expert', 'embed', 'layers', 'mlp'), 'siso', 3, 7),
    (('embed', 'layers', 'heads', 'kv'), 'isoo', 2, 35),
    (('heads', 'layers', 'kv', 'embed'), 'isio', 10, 7),
    (('embed', 'joined_kv', 'kv'), 'ioo', 2, 15),
  ],
)
def test_roles(axes, dims, size_in, size_out):
  kernel = Kernel.of('encoder/x/kernel', (2, 3, 5, 7)[: len(axes)], axes)
  assert (kernel.dims, kernel.size('i'), kernel.size('o')) == (dims, size_in, size_out)
  assert kernel.size('s') * size_in * size_out == (2 * 3, 2 * 3 * 5, 2 * 3 * 5 * 7)[len(axes) - 2]


@pytest.mark.parametrize('axes', [('mlp',), ('heads', 'kv', 'mlp'), ('a', 'b', 'c', 'embed')])
def test_unknown_roles(axes):
  with pytest.raises(
    ConfigError, match=r'selects x/y/kernel, of which the dims .* not known.*Narrow the targets\.'
  ):
    Kernel.of('x/y/kernel', (2,) * len(axes), axes)
