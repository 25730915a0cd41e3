"""Two processes infer together, over gloo on CPU, go on together, and write what one process writes."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

from tests.core import toy_infer

_ROOT = pathlib.Path(__file__).parents[2]

_PROGRAM = '''
    import sys
    import jax
    process, port, source, checkpoint, out = int(sys.argv[1]), *sys.argv[2:]
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'localhost:{port}', num_processes=2, process_id=process)
    from t5x_lite import errors
    from tests.core import toy_infer

    cfg = toy_infer.text_cfg(source)
    try:  # both must refuse what only the lead process sees
      toy_infer.infer(cfg, checkpoint, out, output_file='taken')
      raise AssertionError('a file was taken')
    except errors.ConfigError as error:
      assert ('exists' in str(error)) == (process == 0), error
    paths = toy_infer.infer(cfg, checkpoint, out)
    assert bool(paths) == (process == 0)
    assert toy_infer.infer(cfg, checkpoint, out) == paths
    print('process', process, 'is done')
'''


def test_two_processes_equal_one(tmp_path):
  source, out = tmp_path / 'in.txt', tmp_path / 'out'
  source.write_text('\n'.join(toy_infer.texts(21)))
  checkpoint = toy_infer.save_checkpoint(tmp_path / 'run')
  (one,) = toy_infer.infer(toy_infer.text_cfg(source), checkpoint, tmp_path / 'one')
  out.mkdir()
  (out / 'taken').write_text('mine')
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT),
                 'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}
  processes = [subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(_PROGRAM), str(i), str(port), str(source), checkpoint, str(out)],
      cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(2)]
  try:
    outputs = [process.communicate(timeout=240)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  for i, (process, output) in enumerate(zip(processes, outputs)):
    assert process.returncode == 0 and f'process {i} is done' in output, output
  assert 'Results are in' in outputs[0] and 'Results are in' not in outputs[1]
  assert (out / pathlib.Path(one).name).read_bytes() == pathlib.Path(one).read_bytes()
  assert (out / 'taken').read_text() == 'mine'
