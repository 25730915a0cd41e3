"""T5X's native form: the sample that T5X wrote, other forms of zarr and index, writing, damage."""

import json
import os
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.sources import t5x_index
from t5x_lite.storage import files as stores_files
from tests import golden_data
from tests import stores
from tests.checkpoints.sources import t5x_samples as samples

NORM = 'target/encoder/encoder_norm/scale'
TABLE = 'target/token_embedder/embedding'


def read_all(source):
  return source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})


def files(root):
  return {
    str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()
  }


def save_ours(flat, directory, step=7, metadata=None):
  with checkpoints.CheckpointManager(
    directory, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(step, tree_utils.unflatten_dict(flat), metadata=metadata)
  return directory / f'checkpoint_{step}'


def test_both_samples_are_the_recorded_state(unpacked):
  native, orbax = (
    checkpoints.open_source(unpacked[name] / 'checkpoint_7') for name in ('t5x', 't5x_orbax')
  )
  assert (native.format, orbax.format) == ('t5x', 't5x_orbax')
  assert native.shapes() == orbax.shapes() and len(native.shapes()) == 261
  for source in (native, orbax):
    assert (
      source.step == 7 and source.has_optimizer_state and source.metadata == {'param_layout': 't5'}
    )
    assert source.manifest is None
  values, others = read_all(native), read_all(orbax)
  chunks = samples.read_chunks(unpacked['t5x'] / 'checkpoint_7')
  for name, value in values.items():
    assert value.dtype == native.shapes()[name].dtype and value.shape == native.shapes()[name].shape
    np.testing.assert_array_equal(value, others[name], err_msg=name)
    if name in chunks:
      np.testing.assert_array_equal(value, chunks[name], err_msg=name)
  assert len(chunks) == 104
  for name, value in golden_data.load(f't5x/{samples.NAME}')[1].items():
    if name.startswith('params/'):
      np.testing.assert_array_equal(values[name.replace('params/', 'target/')], value)


def test_only_the_wanted_arrays_are_read(copy):
  shutil.rmtree(copy / 'target.token_embedder.embedding')
  source = checkpoints.open_source(copy)
  assert list(source.read({NORM: (np.float32, None)})) == [NORM]
  with pytest.raises(
    errors.CheckpointDamagedError, match='token_embedder.embedding/.zarray is missing'
  ):
    source.read_array(TABLE)


@stores.mostly('gcs')
def test_a_checkpoint_in_a_store_is_read_and_damage_is_found(unpacked, store):
  sample, root = unpacked['t5x'] / 'checkpoint_7', f'{store.root}/checkpoint_7'
  for name, content in files(sample).items():
    stores_files.write(f'{root}/{name}', content)
  source, local = checkpoints.open_source(root), checkpoints.open_source(sample)
  source.verify()
  assert source.format == 't5x' and source.step == 7 and source.shapes() == local.shapes()
  values = read_all(local)
  for name, value in read_all(source).items():
    np.testing.assert_array_equal(value, values[name], err_msg=name)
  # A listing for each .zarray and one for all chunks (a listing for each chunk too would be two for each array), and
  # those that threads and retries on a busy machine add.
  assert store.proxy.count(operation='list') < 1.5 * len(samples.read_chunks(sample))
  chunk = stores_files.path(root) / 'target.token_embedder.embedding/0.0'
  content = chunk.read_bytes()
  chunk.unlink()
  # The listing is that of `verify`, and zarr would read a missing chunk as zeros.
  with pytest.raises(
    errors.CheckpointDamagedError, match='token_embedder.embedding cannot be read'
  ):
    source.read_array(TABLE)
  with pytest.raises(
    errors.CheckpointDamagedError, match='chunk target.token_embedder.embedding/0.0 is missing'
  ):
    checkpoints.open_source(root).verify()
  stores_files.write(chunk, content)
  with store.proxy.fault(status=503, times=1):
    np.testing.assert_array_equal(checkpoints.open_source(root).read_array(TABLE), values[TABLE])


def test_a_checkpoint_of_orbax_in_a_store_is_read(unpacked, store):
  sample, root = unpacked['t5x_orbax'] / 'checkpoint_7', f'{store.root}/checkpoint_7'
  for name, content in files(sample).items():
    stores_files.write(f'{root}/{name}', content)
  source, values = checkpoints.open_source(root), read_all(checkpoints.open_source(sample))
  assert source.format == 't5x_orbax' and source.step == 7
  found = read_all(source)
  assert found.keys() == values.keys()
  for name, value in found.items():
    np.testing.assert_array_equal(value, values[name], err_msg=name)


def test_a_round_trip_gives_the_bytes_of_t5x(unpacked, tmp_path):
  sample = unpacked['t5x'] / 'checkpoint_7'
  ours = checkpoints.open_source(
    save_ours(read_all(checkpoints.open_source(sample)), tmp_path / 'ours')
  )
  values = read_all(ours)
  with checkpoints.T5xNativeWriter(tmp_path / 'native/checkpoint_7') as writer:
    for name in reversed(values):  # In any order.
      writer.write(name, values[name])
  written, expected = files(tmp_path / 'native/checkpoint_7'), files(sample)
  assert set(written) == set(expected) and os.listdir(tmp_path / 'native') == ['checkpoint_7']
  assert written['checkpoint'] == expected['checkpoint']
  assert {name: data for name, data in written.items() if name.endswith('.zarray')} == {
    name: data for name, data in expected.items() if name.endswith('.zarray')
  }
  values, originals = (
    samples.read_chunks(tmp_path / 'native/checkpoint_7'),
    samples.read_chunks(sample),
  )
  for name, value in originals.items():
    assert values[name].tobytes() == value.tobytes(), name


def restore_state(path, optimizer_def, **cfg):
  model = samples.model(optimizer_def)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  initializer = samples.initializer(model, partitioner)
  restore_cfg = checkpoints.RestoreCheckpointConfig(str(path), **cfg)
  start = starting_point.choose_start('/nowhere', checkpoints.CheckpointConfig(restore=restore_cfg))
  starting_point.check_start(start, initializer.global_train_state_shape, model)
  state, restored = starting_point.make_state(
    start, initializer, partitioner, model, jax.random.key(3)
  )
  return state, restored, partitioner.get_shardings(initializer.train_state_axes)


def one_step(arrays, grads, learning_rate):
  """Adafactor's step after step 7 with unfactored statistics, in float64 (Shazeer and Stern 2018, section 8)."""
  decay = 1 - 8.0**-0.8
  params, statistics = {}, {}
  for name, grad in grads.items():
    grad = grad.astype(np.float64)
    param, v = (
      arrays[f'{prefix}/{name}{suffix}'].astype(np.float64)
      for prefix, suffix in (('target', ''), ('state/param_states', '/v'))
    )
    v = decay * v + (1 - decay) * (grad**2 + 1e-30)
    update = grad / np.sqrt(v)
    update /= max(1.0, np.sqrt(np.mean(update**2)))
    scale = max(1e-3, np.sqrt(np.mean(param**2)))
    params[name], statistics[name] = param - learning_rate * scale * update, v
  return params, statistics


def _multi():
  return optimizers.MultiOptimizer(
    [('kernel$|embedding$', adafactor.Adafactor()), ('scale$', adafactor.Adafactor())]
  )


@pytest.mark.parametrize(
  'stored_as, make_optimizer, cfg',
  [
    ('t5x', adafactor.Adafactor, {}),
    pytest.param('t5x_orbax', adafactor.Adafactor, dict(mode='specific'), marks=pytest.mark.full),
    pytest.param('t5x', _multi, {}, marks=pytest.mark.full),
  ],
)
def test_training_resumes_from_t5x_statistics(unpacked, stored_as, make_optimizer, cfg):
  path = unpacked[stored_as] / ('checkpoint_7' if cfg else '')
  state, restored, shardings = restore_state(path, make_optimizer(), **cfg)
  assert (restored.step, int(state.step), restored.format, restored.is_verified) == (
    7,
    7,
    stored_as,
    False,
  )
  stored = read_all(checkpoints.open_source(unpacked[stored_as] / 'checkpoint_7'))
  flat, flat_shardings = (tree_utils.flatten_dict(tree.state_dict()) for tree in (state, shardings))
  assert set(flat) == set(stored)
  for name, value in flat.items():
    assert np.asarray(value).tobytes() == stored[name].tobytes(), name
    assert value.sharding.is_equivalent_to(flat_shardings[name], value.ndim), name
  grads = {
    name.removeprefix('grad/'): value
    for name, value in golden_data.load(f't5x/{samples.NAME}')[1].items()
    if name.startswith('grad/')
  }
  after = jax.jit(lambda state, grads: state.apply_gradient(grads, learning_rate=0.03))(
    state, tree_utils.unflatten_dict(grads)
  )
  params, statistics = one_step(stored, grads, 0.03)
  flat = tree_utils.flatten_dict(after.state_dict())
  assert int(after.step) == 8 and len(params) == 52
  for name in params:
    np.testing.assert_allclose(
      flat[f'target/{name}'], params[name], rtol=1e-5, atol=1e-7, err_msg=name
    )
    np.testing.assert_allclose(
      flat[f'state/param_states/{name}/v'], statistics[name], rtol=1e-5, err_msg=name
    )


def write_zarr(root, name, array, spec=None, **metadata):
  """Write an array like TensorStore and return its spec in an index."""
  folder = name.replace('/', '.')
  metadata = {
    'shape': array.shape,
    'chunks': array.shape,
    'compressor': {'id': 'gzip', 'level': 1},
  } | metadata
  written = tensorstore.open(
    {
      'driver': 'zarr',
      'dtype': array.dtype.name,
      'metadata': metadata,
      'kvstore': {'driver': 'file', 'path': f'{root / folder}/'},
    },
    create=True,
  ).result()
  written.write(array).result()
  return {
    'driver': 'zarr',
    'dtype': array.dtype.name,
    'kvstore': {'driver': 'file', 'path': f'{folder}/'},
    'metadata': {key: list(metadata[key]) for key in ('shape', 'chunks')},
  } | (spec or {})


def write_index(root, tree, version=3):
  (root / 'checkpoint').write_bytes(
    flax.serialization.msgpack_serialize({'version': version, 'optimizer': tree})
  )


def _random(*shape, dtype=np.float32):
  return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
  'metadata',
  [
    dict(chunks=[3, 5]),
    dict(chunks=[4, 4]),
    dict(compressor=None),
    dict(compressor={'id': 'zlib', 'level': 5}),
    dict(compressor={'id': 'blosc', 'cname': 'lz4', 'clevel': 5, 'shuffle': 1}),
    dict(order='F', chunks=[2, 10]),
    dict(dimension_separator='/', chunks=[3, 5]),
    dict(dtype='>f4'),
  ],
  ids=str,
)
def test_any_zarr_is_read(tmp_path, metadata):
  array = _random(7, 10)
  write_index(
    tmp_path,
    {'target': {'w': write_zarr(tmp_path, 'target/w', array, **metadata)}, 'state': {'step': 9}},
  )
  source = checkpoints.open_source(tmp_path)
  assert (
    source.step == 9 and source.shapes()['state/step'].dtype == np.int32 and not source.verify()
  )
  np.testing.assert_array_equal(source.read_array('target/w'), array)


@pytest.mark.parametrize('bits', [False, True])
def test_bfloat16_is_bfloat16_whichever_way_it_was_written(tmp_path, bits):
  array = _random(4, 6, dtype=ml_dtypes.bfloat16)
  spec = write_zarr(tmp_path, 'target/w', array.view(np.uint16) if bits else array)
  write_index(tmp_path, {'target': {'w': spec}}, version=2 if bits else 3)
  source = checkpoints.open_source(tmp_path)
  assert source.shapes()['target/w'] == jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
  np.testing.assert_array_equal(source.read_array('target/w'), array)
  read = source.read({'target/w': (np.float32, None)})['target/w']
  assert read.dtype == np.float32 and (read == array.astype(np.float32)).all()


@pytest.mark.parametrize(
  'spec',
  [
    {
      'kvstore': {
        'driver': 'gcs',
        'bucket': 't5-data',
        'path': 'models/base/checkpoint_1/target.w/',
      }
    },
    {'kvstore': {'driver': 'file', 'path': '/cns/somewhere/checkpoint_1/target.w'}},
    {'kvstore': {'driver': 'file', 'path': ''}, 'path': 'target.w'},
  ],
)
def test_arrays_are_looked_for_in_the_checkpoint_only(tmp_path, spec):
  array = _random(3, 2)
  write_index(tmp_path, {'target': {'w': write_zarr(tmp_path, 'target/w', array, spec)}})
  np.testing.assert_array_equal(checkpoints.open_source(tmp_path).read_array('target/w'), array)


@pytest.mark.parametrize(
  'spec, message',
  [
    (
      {'kvstore': {'driver': 'file', 'path': '../target.w'}},
      "the folder 'target.w' of this checkpoint, got",
    ),
    (
      {'kvstore': {'driver': 'file', 'path': '../other'}},
      "the folder 'target.w' of this checkpoint, got",
    ),
    (
      {'kvstore': {'driver': 'file', 'path': '/etc'}},
      "the folder 'target.w' of this checkpoint, got .*'/etc'",
    ),
    ({'kvstore': {'driver': 'file', 'path': ''}}, "the folder 'target.w' of this checkpoint, got"),
    ({'kvstore': {'driver': 'http', 'path': 'target.w'}}, "got 'zarr', 'http'"),
    ({'driver': 'n5'}, "got 'n5', 'file'"),
    ({'kvstore': {}}, 'in the spec of target/w, KeyError'),
    ({'kvstore': 'target.w'}, 'in the spec of target/w, TypeError'),
    ({'dtype': 'float33'}, "in the spec of target/w, dtype must be .*got 'float33'"),
    ({'metadata': {'shape': [-1, 2]}}, 'in the spec of target/w, shape must be'),
    ({'metadata': 3}, 'in the spec of target/w, TypeError'),
  ],
)
def test_specs_that_are_rejected(tmp_path, spec, message):
  (tmp_path / 'a').mkdir()
  write_index(
    tmp_path / 'a', {'target': {'w': write_zarr(tmp_path / 'a', 'target/w', _random(3, 2), spec)}}
  )
  with pytest.raises(errors.CheckpointError, match=message):
    checkpoints.open_source(tmp_path / 'a')


def test_msgpack_of_others_is_rejected(tmp_path):
  (tmp_path / 'checkpoint').write_bytes(
    flax.serialization.msgpack_serialize({'params': {'w': np.ones(2)}})
  )
  with pytest.raises(errors.CheckpointError, match=r"must be an index of T5X.*got \['params'\]"):
    checkpoints.open_source(tmp_path)


def _remove_folder(root):
  shutil.rmtree(root / 'target.encoder.encoder_norm.scale')


def _remove_chunk(root):
  os.remove(root / 'target.encoder.encoder_norm.scale/0')


def _change_shape(root):
  path = root / 'target.encoder.encoder_norm.scale/.zarray'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'shape': [15]}))


def _change_dtype(root):
  path = root / 'target.encoder.encoder_norm.scale/.zarray'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'dtype': '<f8'}))


def _truncate_metadata(root):
  path = root / 'target.encoder.encoder_norm.scale/.zarray'
  path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
  'spoil, message',
  [
    (_remove_folder, r'scale/\.zarray is missing'),
    (_remove_chunk, r'the chunk target\.encoder.*/0 is missing'),
    (_change_shape, r'holds <f4 of shape \(15,\), but the index has float32 of shape \(16,\)'),
    (_change_dtype, 'holds <f8 of shape'),
    (_truncate_metadata, r'\.zarray cannot be read'),
  ],
)
def test_damage_is_seen_before_anything_is_read(copy, spoil, message):
  spoil(copy)
  source = checkpoints.open_source(copy)
  with pytest.raises(errors.CheckpointDamagedError, match=f'{message}.*Copy it again'):
    source.verify()
  with pytest.raises(errors.CheckpointDamagedError, match=message):
    source.read_array(NORM)
  with pytest.raises(errors.CheckpointDamagedError, match=message):
    checkpoints.load(copy)


@pytest.mark.parametrize('keep', [0.0, 0.4, 0.95, None])
def test_damaged_chunks(copy, keep):
  path = copy / 'target.token_embedder.embedding/0.0'
  data = bytearray(path.read_bytes())
  if keep is None:
    data[len(data) // 2] ^= 8  # gzip has a checksum.
  path.write_bytes(data if keep is None else data[: int(len(data) * keep)])
  with pytest.raises(
    errors.CheckpointDamagedError, match='token_embedder.embedding cannot be read'
  ):
    checkpoints.open_source(copy).read_array(TABLE)


@pytest.mark.parametrize(
  'shape, dtype',
  [
    ((1024, 96), np.float32),
    ((1024, 96), ml_dtypes.bfloat16),
    ((7,), np.int32),
    ((1,), np.float32),
    ((), np.float32),
    ((3, 0), np.float32),
    ((64, 2, 48), np.float16),
  ],
)
def test_round_trip_in_chunks(tmp_path, monkeypatch, shape, dtype):
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(sources.t5x_native, '_MAX_CHUNK_BYTES', 4096)
  array = _random(*shape, dtype=dtype)
  zeros = np.zeros_like(array)
  with checkpoints.T5xNativeWriter(tmp_path / 'checkpoint_1') as writer:
    writer.write('target/w', array)
    writer.write(
      'target/zeros', zeros
    )  # TensorStore would leave out chunks of zeros of some arrays.
    writer.write('state/step', np.int32(1))
  source = checkpoints.open_source(tmp_path / 'checkpoint_1')
  source.verify()
  for name, value in (('target/w', array), ('target/zeros', zeros)):
    read = source.read_array(name)
    assert (
      read.dtype == value.dtype and read.shape == value.shape and read.tobytes() == value.tobytes()
    )


@pytest.mark.parametrize('seed', range(5))
def test_chunks_divide_arrays_evenly(seed):
  rng = np.random.default_rng(seed)
  shape = tuple(int(size) for size in rng.integers(1, 300, rng.integers(1, 4)))
  chunks = t5x_index.chunk_shape(shape, 4, 1000)
  assert (
    all(size % chunk == 0 for size, chunk in zip(shape, chunks, strict=True))
    and 4 * np.prod(chunks) <= 1000
  )


def test_an_interrupted_write_leaves_nothing(tmp_path):
  with (
    pytest.raises(KeyboardInterrupt),
    checkpoints.T5xNativeWriter(tmp_path / 'checkpoint_1') as writer,
  ):
    writer.write('target/w', np.ones(3, np.float32))
    # One that was killed here would leave a name that is not a checkpoint's.
    assert (
      checkpoints.all_steps(tmp_path, require_manifest=False) == []
      and len(os.listdir(tmp_path)) == 1
    )
    raise KeyboardInterrupt
  assert os.listdir(tmp_path) == []


def test_writer_rejects(tmp_path):
  with checkpoints.T5xNativeWriter(tmp_path / 'checkpoint_1') as writer:
    writer.write('target/w', np.ones(3, np.float32))
    for name in ('target/w', '../w', 'target/../w', '', '/w', '.zarray'):
      with pytest.raises(errors.CheckpointError, match='must be unique and have parts joined'):
        writer.write(name, np.ones(3, np.float32))
    for array in (np.array(['a']), np.ones(2, bool), np.ones(2, np.complex64)):
      with pytest.raises(
        errors.CheckpointError, match=f'must have a float or integer dtype .*, got {array.dtype}'
      ):
        writer.write('target/x', array)
    # It would come back as other numbers.
    with pytest.raises(errors.CheckpointError, match='uint16, which T5X reads as bfloat16'):
      writer.write('target/x', np.ones(2, np.uint16))
  before = files(tmp_path)
  with pytest.raises(errors.CheckpointError, match='must be a new folder'):
    checkpoints.T5xNativeWriter(tmp_path / 'checkpoint_1')
  assert files(tmp_path) == before
  with pytest.raises(errors.ConfigError, match='must be a path on a disk'):
    checkpoints.T5xNativeWriter('ftp://bucket/checkpoint_1')
