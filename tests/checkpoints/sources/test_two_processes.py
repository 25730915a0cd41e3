"""Two processes start together from what T5X and transformers wrote, and each keeps its part."""

import os
import shutil

import pytest

from t5x_lite import tree_utils
from t5x_lite.checkpoints import hugging_face
from tests import processes
from tests.checkpoints.sources import t5x_samples as samples
from tests.networks import network_cases

PROGRAM = """
    import pathlib, sys
    import jax
    from t5x_lite import runtime
    process, directory = runtime.join(runtime.ClusterConfig()).process, pathlib.Path(sys.argv[1])

    import numpy as np
    from t5x_lite import checkpoints, errors, optimizers, partitioning, tree_utils
    from t5x_lite.apps.common import starting_point
    from tests.networks import network_cases
    from tests.checkpoints.sources import t5x_samples as samples

    expected = tree_utils.flatten_dict(network_cases.golden_params(samples.NAME))
    partitioner = partitioning.PjitPartitioner(
        num_partitions=2, logical_axis_rules=partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2))
    model = samples.model(optimizers.schedule_free_adamw(learning_rate=0.1))
    initializer = samples.initializer(model, partitioner)
    for path, rules in (('t5x', [('state/param_states/.*', None)]), ('t5x_orbax', [('state/param_states/.*', None)]),
                        ('hugging_face', None)):
      start = starting_point.choose_start(str(directory / 'run'), checkpoints.CheckpointConfig(
          restore=checkpoints.RestoreCheckpointConfig(str(directory / path), assignment_map=rules)))
      starting_point.check_start(start, initializer.global_train_state_shape, model)
      state, restored = starting_point.make_state(start, initializer, partitioner, model, jax.random.key(0))
      assert restored.step == (0 if path == 'hugging_face' else 7), restored.step
      flat, num_divided = tree_utils.flatten_dict(state.state_dict()), 0
      for name, leaf in flat.items():
        param = name.removeprefix('target/') if name.startswith('target/') else name.split('/z/')[-1]
        num_divided += not leaf.is_fully_replicated
        if param in expected:
          for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[param][shard.index], err_msg=name)
      assert num_divided > 40, num_divided
    try:
      checkpoints.load(directory / 'damaged')
      raise AssertionError('no error')
    except errors.CheckpointDamagedError as e:
      assert 'is missing' in str(e), e
"""


@pytest.mark.full
def test_two_processes(tmp_path):
  found = samples.unpack(tmp_path)
  shutil.copytree(found['t5x'] / 'checkpoint_7', tmp_path / 'damaged')
  os.remove(tmp_path / 'damaged/target.token_embedder.embedding/0.0')
  params = tree_utils.flatten_dict(network_cases.golden_params(samples.NAME))
  hugging_face.write_folder(
    tmp_path / 'hugging_face',
    hugging_face.Architecture.from_shapes(params),
    hugging_face.FAMILIES['t5_1_1'],
    params.__getitem__,
  )
  processes.run(PROGRAM, tmp_path, num_devices=2)
