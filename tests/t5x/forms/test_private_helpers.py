"""A project whose modules read private helpers of T5X when they are imported."""

import pathlib
import subprocess
import sys
import textwrap

_FOLDER = pathlib.Path(__file__).parent / 'private_helpers'


def test_the_helpers_do_what_those_of_t5x_do():
  code = f"""
      import sys
      sys.path.append({str(_FOLDER)!r})
      from t5x_lite import compat
      compat.install()
      import jax, jax.numpy as jnp, numpy as np
      import project_layers

      inputs = jnp.asarray(np.random.RandomState(0).randn(2, 3, 4), jnp.float32)
      layer = project_layers.Projection(5, axis=(-2, -1))
      variables = layer.init(jax.random.PRNGKey(0), inputs)
      kernel = variables['params']['kernel']
      assert kernel.shape == (3, 4, 5)
      expected = jax.nn.gelu(jnp.einsum('abc,bcd->ad', inputs, kernel))
      np.testing.assert_allclose(layer.apply(variables, inputs), expected, rtol=1e-5)

      bias = jnp.arange(32.0).reshape(1, 2, 4, 4)
      rows = project_layers.rows_of_bias(bias, jnp.asarray([3, 1, 0]))
      np.testing.assert_array_equal(rows, jnp.stack([bias[0, :, i : i + 1] for i in (3, 1, 0)]))
      assert project_layers.number_of_beams(4) == 4
      assert project_layers.momentum_of(dict(kernel=2)) == dict(kernel=2)
      """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
