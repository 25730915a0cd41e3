"""The sharding report of a run in its log and its file."""

from t5x_lite import partitioning
from tests.partitioning import explain_cases as cases


def make_partitioner(num_partitions, dims):
  return partitioning.PjitPartitioner(
    num_partitions=num_partitions,
    logical_axis_rules=partitioning.standard_logical_axis_rules(*dims),
  )


def test_write_and_log_model_info(tmp_path):
  partitioner, state = make_partitioner(2, (1, 1)), cases.make_state()
  path = tmp_path / 'run' / 'model-info.txt'
  partitioning.write_model_info(path, state, partitioner, header={'model': 'tiny'})
  text = path.read_text()
  assert text.startswith('model: tiny\n\nMesh ') and 'layers_1/norm ' in text
  partitioning.log_model_info(str(path), state, partitioner)
  assert path.read_text() == partitioner.explain(state).to_text(fold=False)
