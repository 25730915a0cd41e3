"""Two processes that infer together, over gloo on CPU, resume and write the results of one process."""

import pathlib

from tests import processes
from tests.apps.infer import toy_infer

_PROGRAM = """
    import sys
    from t5x_lite import runtime
    process, source, checkpoint, out = runtime.join(runtime.ClusterConfig()).process, *sys.argv[1:]
    from t5x_lite import errors
    from tests.apps.infer import toy_infer

    cfg = toy_infer.text_cfg(source)
    try:  # Both must raise for errors that only the lead process sees.
      toy_infer.infer(cfg, checkpoint, out, output_file='taken')
      raise AssertionError('a file was taken')
    except errors.ConfigError as error:
      assert ('exists' in str(error)) == (process == 0), error
    try:  # Workers with shards of their own are no cluster.
      toy_infer.infer(cfg, checkpoint, out, num_shards=2, shard_id=process)
      raise AssertionError('a cluster has two shards')
    except errors.ConfigError as error:
      assert 'must have the same shard_id' in str(error), error
    paths = toy_infer.infer(cfg, checkpoint, out)
    assert bool(paths) == (process == 0)
    assert toy_infer.infer(cfg, checkpoint, out) == paths
"""


def test_two_processes_equal_one(tmp_path):
  source, out = tmp_path / 'in.txt', tmp_path / 'out'
  source.write_text('\n'.join(toy_infer.texts(21)))
  checkpoint = toy_infer.save_checkpoint(tmp_path / 'run')
  (one,) = toy_infer.infer(toy_infer.text_cfg(source), checkpoint, tmp_path / 'one')
  out.mkdir()
  (out / 'taken').write_text('mine')
  outputs = processes.run(_PROGRAM, source, checkpoint, out, num_devices=1)
  assert 'Results are in' in outputs[0] and 'Results are in' not in outputs[1]
  assert (out / pathlib.Path(one).name).read_bytes() == pathlib.Path(one).read_bytes()
  assert (out / 'taken').read_text() == 'mine'
