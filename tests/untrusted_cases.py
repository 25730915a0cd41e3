"""Checkpoints that were tampered with, and a program that opens each in a process of little memory.

    python -m tests.untrusted_cases FOLDER

prints JSON: the name of each case -> [class of the error, its message], and 'opened': paths opened outside.
"""

import ctypes
import hashlib
import json
import os
import pathlib
import resource
import shutil
import struct
import sys

import flax.serialization
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases

_HUGE = 2**42
_IN_OPEN = 0x20


def _state():
  return {
    'target/w': np.ones((8, 4), np.float32),
    'target/b': np.ones((4,), np.float32),
    'state/step': np.asarray(7, np.int32),
  }


def make_forms(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Writes one sound checkpoint of each form; returns them by name."""
  flat = _state()
  with checkpoints.CheckpointManager(
    root / 'own', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(
      7,
      tree_utils.unflatten_dict(flat),
      data_state={'position': b'7'},
      metadata={'param_layout': 't5'},
    )
  shutil.copytree(root / 'own/checkpoint_7', root / 'orbax')
  (root / 'orbax/manifest.json').unlink()
  with sources.T5xNativeWriter(root / 't5x') as writer:
    for name, array in flat.items():
      writer.write(name, array)
  arch = hugging_face_cases.BY_FAMILY['t5_1_1']
  hugging_face_cases.make_folder(
    root / 'hugging_face',
    hugging_face_cases.tensors(arch, hugging_face_cases.values(arch)),
    hugging_face_cases.config_of(arch, 't5_1_1'),
  )
  return {
    'own': root / 'own/checkpoint_7',
    'orbax': root / 'orbax',
    't5x': root / 't5x',
    'hugging_face': root / 'hugging_face',
  }


# ---- Ways to tamper: each returns a function of the folder of a checkpoint and of one outside it ---------------------


def _sealed(change):
  """Changes the fields of the manifest, and its hash with them."""

  def tamper(folder, outside):
    del outside
    path = folder / 'manifest.json'
    document = json.loads(path.read_text())
    change(document['2_contents'])
    _seal(path, document)

  return tamper


def _seal(path, document):
  text = json.dumps(document['2_contents'], indent=1, sort_keys=True)
  document['1_sha256'] = hashlib.sha256(text.encode()).hexdigest()
  path.write_text(json.dumps(document, indent=1, sort_keys=True) + '\n')


def _field(name, value):
  return _sealed(lambda body: body.update({name: value}))


def _without(name):
  return _sealed(lambda body: body.pop(name))


def _array(**fields):
  return _sealed(lambda body: body['arrays']['target/w'].update(fields))


def _file(name, **fields):
  return _sealed(
    lambda body: body['files'].update({name: {'sha256': '0' * 64, 'bytes': 1} | fields})
  )


def _extra_in_envelope(folder, outside):
  del outside
  path = folder / 'manifest.json'
  _seal(path, json.loads(path.read_text()) | {'3_more': 1})


def _body_is_a_list(folder, outside):
  del outside
  _seal(folder / 'manifest.json', {'2_contents': [1]})


def _link(name, is_folder=False):
  """Replace a file or folder by a link to a copy with the same content."""

  def tamper(folder, outside):
    path = folder / name.replace(
      'CHUNKS', max((folder / 'state/d').iterdir()).name if 'CHUNKS' in name else ''
    )
    target = outside / path.name
    (shutil.copytree if is_folder else shutil.copy)(path, target)
    shutil.rmtree(path) if is_folder else path.unlink()
    path.symlink_to(target)

  return tamper


def _pipe(name):

  def tamper(folder, outside):
    del outside
    (folder / name).unlink()
    os.mkfifo(folder / name)

  return tamper


def _large(name):

  def tamper(folder, outside):
    del outside
    with open(folder / name, 'ab') as file:
      file.truncate(2**31)  # a sparse file

  return tamper


def _metadata_name(folder, outside):
  path = folder / 'state/_METADATA'
  path.write_text(path.read_text().replace('"key":"b"', f'"key":{json.dumps(f"/../{outside}")}'))


def _index(change):
  """Changes T5X's index."""

  def tamper(folder, outside):
    path = folder / 'checkpoint'
    document = flax.serialization.msgpack_restore(path.read_bytes())
    change(document['optimizer'], outside)
    path.write_bytes(flax.serialization.msgpack_serialize(document))

  return tamper


def _spec(**fields):
  return _index(
    lambda tree, outside: tree['target']['w'].update(
      {key: value(outside) if callable(value) else value for key, value in fields.items()}
    )
  )


def _claims(shape, chunks, dtype='<f4', **more):
  """Has index and .zarray agree on a claim."""

  def tamper(folder, outside):
    path = folder / 'target.w/.zarray'
    path.write_text(
      json.dumps(
        json.loads(path.read_text()) | {'shape': shape, 'chunks': chunks, 'dtype': dtype} | more
      )
    )
    _spec(metadata={'shape': shape, 'chunks': chunks, 'compressor': None})(folder, outside)

  return tamper


def _deep(tree, outside):
  del outside
  for _ in range(990):
    tree['a'] = {}
    tree = tree['a']


def _safetensors(header, values=b'', length=None):

  def tamper(folder, outside):
    del outside
    raw = json.dumps(header).encode()
    (folder / 'model.safetensors').write_bytes(struct.pack('<Q', length or len(raw)) + raw + values)

  return tamper


def _many_names(folder, outside):
  header = {'x' * 84 + str(10**6 + i): _TENSOR for i in range(120_000)}
  _safetensors(header)(folder, outside)


def _shards(name):

  def tamper(folder, outside):
    (folder / 'model.safetensors').rename(outside / 'model.safetensors')
    (folder / 'model.safetensors.index.json').write_text(
      json.dumps({'weight_map': {'shared.weight': name.format(outside=outside)}})
    )

  return tamper


_TENSOR = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
# Form -> name -> (change to it, pattern of the message: file and field).
CASES = {
  'own': {
    'unknown_field': (_field('sound', True), r'manifest.json, `sound` is unknown'),
    'unknown_outside_the_hash': (_extra_in_envelope, r'manifest.json, `3_more` is unknown'),
    'no_object': (_body_is_a_list, r'manifest.json, `2_contents` must be an object, got \[1\]'),
    'no_step': (_without('step'), r'manifest.json, `step` is missing'),
    'no_files': (_without('files'), r'manifest.json, `files` is missing'),
    'no_version': (_without('format_version'), r'manifest.json, `format_version` is missing'),
    'odd_version': (
      _field('format_version', [1]),
      r'manifest.json, `format_version` must be an integer',
    ),
    'bool_step': (_field('step', True), r'manifest.json, `step` must be an integer .*, got True'),
    'float_step': (_field('step', 7.0), r'manifest.json, `step` must be .*, got 7.0'),
    'huge_step': (
      _field('step', 2**40),
      r'manifest.json, `step` must be .* to 2147483647, got 1099511627776',
    ),
    'negative_processes': (
      _field('num_data_processes', -1),
      r'manifest.json, `num_data_processes` must be',
    ),
    'many_processes': (
      _field('num_data_processes', 10**30),
      r'manifest.json, `num_data_processes` must be',
    ),
    'other_processes': (
      _field('num_data_processes', 9),
      r"manifest.json, `files\['dataset/.*9 processes",
    ),
    'files_in_a_list': (_field('files', []), r'manifest.json, `files` must be an object, got \[\]'),
    'arrays_in_a_text': (
      _field('arrays', 'w'),
      r"manifest.json, `arrays` must be an object, got 'w'",
    ),
    'metadata_in_a_list': (_field('metadata', [1]), r'manifest.json, `metadata` must be an object'),
    'odd_run': (
      _field('metadata', {'run': 'a'}),
      r"manifest.json, `metadata.run` must be of type dict, got 'a'",
    ),
    'odd_layout': (
      _field('metadata', {'param_layout': {}}),
      r'manifest.json, `metadata.param_layout` must be of type str',
    ),
    'odd_field_of_run': (
      _field('metadata', {'run': {'start_step': 'a'}}),
      r"manifest.json, `metadata.run.start_step` must be of type integer >= 0, got 'a'",
    ),
    'odd_batches': (
      _field('metadata', {'run': {'left_out_batches': [-1]}}),
      r'`metadata.run.left_out_batches` must',
    ),
    'odd_actions': (
      _field('metadata', {'run': {'actions': {'TRAIN': 1}}}),
      r'`metadata.run.actions` must hold lists',
    ),
    'odd_optimizer': (
      _field('metadata', {'optimizer': {'name': 1}}),
      r'`metadata.optimizer.name` must be of type str, got 1',
    ),
    'odd_metric': (
      _field('metrics', {'loss': 'low'}),
      r"manifest.json, `metrics\['loss'\]` must be a number",
    ),
    'odd_library': (
      _field('versions', {'jax': 1}),
      r"manifest.json, `versions\['jax'\]` must be a string",
    ),
    'negative_dim': (
      _array(shape=[-8, 4]),
      r"manifest.json, `arrays\['target/w'\]`.shape must be .*got \[-8, 4\]",
    ),
    'float_dim': (_array(shape=[8.0, 4]), r"`arrays\['target/w'\]`.shape must be"),
    'bool_dim': (_array(shape=[True]), r"`arrays\['target/w'\]`.shape must be"),
    'many_dims': (
      _array(shape=[1] * 1000),
      r"`arrays\['target/w'\]`.shape must have at most 32 dims, got 1000",
    ),
    'absurd_shape': (
      _array(shape=[_HUGE, 4]),
      r'manifest.json, `arrays` must fit into .*target/w.*4398046511104',
    ),
    'empty_and_absurd': (
      _array(shape=[0, 2**63]),
      r"`arrays\['target/w'\]`.shape must be .* 2\*\*63",
    ),
    'other_shape': (
      _array(shape=[4, 8]),
      r"manifest.json, `arrays\['target/w'\]` must be .*\(8, 4\), got .*\(4, 8\)",
    ),
    'dtype_of_objects': (
      _array(dtype='object'),
      r"`arrays\['target/w'\]`.dtype must be .*, got 'object'",
    ),
    'dtype_of_fields': (_array(dtype='f4,f4'), r"`arrays\['target/w'\]`.dtype must be"),
    'no_dtype': (_array(dtype=None), r"`arrays\['target/w'\]`.dtype must be .*, got None"),
    'unstored_array': (
      _sealed(lambda body: body['arrays'].update({'target/c': {'shape': [], 'dtype': 'int8'}})),
      r"`arrays\['target/c'\]` must be .*nothing, got int8",
    ),
    'array_below_an_array': (
      _sealed(lambda body: body['arrays'].update({'target/w/x': {'shape': [], 'dtype': 'int8'}})),
      r"`arrays\['target/w/x'\]` must not be .* below",
    ),
    'parent_folder': (
      _file('../../outside/secret'),
      r"manifest.json, the name in `files\['../../outside/secret'\]`",
    ),
    'inner_parent': (
      _file('state/../../secret'),
      r"the name in `files\['state/../../secret'\]` must be",
    ),
    'absolute_name': (
      _file('/etc/passwd'),
      r"the name in `files\['/etc/passwd'\]` must be a relative path",
    ),
    'backslash': (_file('state\\secret'), r'the name in `files.* must be a relative path'),
    'nul': (_file('state/\0'), r'the name in `files.* must be a relative path'),
    'no_hash': (
      _file('state/x', sha256=None),
      r"`files\['state/x'\]`.sha256 must be 64 hexadecimal digits, got None",
    ),
    'negative_size': (_file('state/x', bytes=-1), r"`files\['state/x'\]`.bytes must be .*, got -1"),
    'entry_without_hash': (
      _sealed(lambda body: body['files'].update({'a': {'bytes': 1}})),
      r"`files\['a'\]` must have",
    ),
    'linked_chunks': (
      _link('state/d/CHUNKS'),
      r'state/d/\w+ is a link to a file outside of the folder, .*outside',
    ),
    'linked_folder': (_link('state/d', True), r'state/d is a link to a file outside'),
    'linked_state': (_link('state', True), r'state is a link to a file outside'),
    'linked_data': (
      _link('dataset', True),
      r'dataset/process_0-of-1/position.bin is a link to a file outside',
    ),
    'linked_manifest': (_link('manifest.json'), r'manifest.json is a link to a file outside'),
    'pipe': (_pipe('state/_METADATA'), r'state/_METADATA is neither a file nor a folder'),
    'large_manifest': (
      _large('manifest.json'),
      r'manifest.json. must have at most 67,108,864 bytes, got 2,147,483,648',
    ),
  },
  'orbax': {
    'parent_folder': (
      _metadata_name,
      r'in _METADATA, the name of an array must be a relative path',
    ),
    'linked_index': (_link('state/_METADATA'), r'state/_METADATA is a link to a file outside'),
    'linked_folder': (_link('state/d', True), r'state/d is a link to a file outside'),
  },
  't5x': {
    'absurd_shape': (_claims([2**20, 2**20], [1, 1]), r'the chunk target.w/0.1 is missing'),
    'absurd_chunks': (
      _claims([8, 4], [2**20, 2**20]),
      r'target.w cannot be read \(chunks in .zarray must fit',
    ),
    'chunk_of_zero': (
      _claims([8, 4], [0, 4]),
      r'in target.w/.zarray, chunks must be a size above 0',
    ),
    'chunk_that_is_negative': (
      _claims([8, 4], [-8, 4]),
      r'in target.w/.zarray, chunks must be a list of integers',
    ),
    'many_dims': (_claims([1] * 200, [1] * 200), r'in the spec of target/w, shape must have'),
    'negative_dim': (_claims([-8, 4], [8, 4]), r'in the spec of target/w, shape must be'),
    'dtype_of_objects': (_spec(dtype='object'), r'in the spec of target/w, dtype must be'),
    'other_dtype': (_claims([8, 4], [8, 4], dtype='|O'), r'target.w holds |O of shape'),
    'unknown_codec': (
      _claims([8, 4], [8, 4], compressor={'id': 'own'}),
      r'target.w/.zarray cannot be read \(KeyError',
    ),
    'other_driver': (_spec(driver='json'), r"in the spec of target/w, .*got 'json', 'file'"),
    'other_kvstore': (
      _spec(kvstore={'driver': 'http', 'path': 'http://x/target.w'}),
      r"got 'zarr', 'http'",
    ),
    'outside': (
      _spec(kvstore=lambda outside: {'driver': 'file', 'path': f'{outside}/'}),
      r"the folder 'target.w' of this",
    ),
    'parent_folder': (
      _spec(kvstore={'driver': 'file', 'path': '../target.w'}),
      r"got .*'../target.w'",
    ),
    'name_of_a_parent': (
      _index(lambda tree, outside: tree.update({'..': tree['target']['w']})),
      r"checkpoint' cannot be read: the name '..' must be a relative path",
    ),
    'name_with_a_slash': (
      _index(lambda tree, outside: tree.update({'a/b': 1})),
      r"the name 'a/b' must not contain",
    ),
    'deep': (_index(_deep), r'cannot be decoded'),
    'ragged': (
      _index(lambda tree, outside: tree.update(a=[[1], [1, 2]])),
      r'the entry a must be an array',
    ),
    'large_number': (
      _index(lambda tree, outside: tree.update(a=2**40)),
      r'the entry a must be .*got 1099511627776',
    ),
    'linked_array': (_link('target.w', True), r'target.w is a link to a file outside'),
    'linked_chunk': (_link('target.w/0.0'), r'target.w/0.0 is a link to a file outside'),
    'linked_index': (_link('checkpoint'), r'checkpoint is a link to a file outside'),
    'large_index': (_large('checkpoint'), r'checkpoint. must have at most 1,073,741,824 bytes'),
    'large_description': (
      _large('target.w/.zarray'),
      r'target.w/.zarray. ?must have at most|cannot be read',
    ),
  },
  'hugging_face': {
    'header_of_2_60': (
      _safetensors({}, length=2**60),
      r'model.safetensors .*1152921504606846976 bytes of header',
    ),
    'offsets_outside': (
      _safetensors({'a': _TENSOR}),
      r'model.safetensors cannot be read: .*8 bytes, got 0',
    ),
    'overlap': (
      _safetensors({'a': _TENSOR, 'b': _TENSOR}, bytes(8)),
      r"model.safetensors cannot be read: 'b' must begin at byte 8",
    ),
    'shape_against_offsets': (
      _safetensors({'a': _TENSOR | {'shape': [_HUGE]}}, bytes(8)),
      r"model.safetensors .*'a': data_offsets must be 17592186044416 bytes apart",
    ),
    'empty_and_absurd': (
      _safetensors({'a': _TENSOR | {'shape': [0, 2**70], 'data_offsets': [0, 0]}}),
      r"model.safetensors cannot be read: in the header, 'a': shape must be",
    ),
    'dtype_in_a_list': (
      _safetensors({'a': _TENSOR | {'dtype': []}}, bytes(8)),
      r"model.safetensors cannot be read: in the header, 'a': dtype must be",
    ),
    'shard_outside': (
      _shards('{outside}/model.safetensors'),
      r'index.json is invalid: the file .* must be in',
    ),
    'shard_above': (
      _shards('../outside/model.safetensors'),
      r'index.json is invalid: the file .* must be in',
    ),
    'linked_weights': (
      _link('model.safetensors'),
      r'model.safetensors is a link to a file outside',
    ),
    'linked_config': (_link('config.json'), r'config.json is a link to a file outside'),
    'header_of_many_names': (
      _many_names,
      r'its header must have at most 16,777,216 bytes, got 18,120,000',
    ),
    'large_config': (_large('config.json'), r'config.json. must have at most'),
  },
}


def _read(folder: pathlib.Path) -> None:
  source = checkpoints.open_source(folder)
  source.verify()
  source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})


class _Watch:
  """Sees every file below a folder that this process opens, in whatever language."""

  def __init__(self):
    self._libc = ctypes.CDLL(None, use_errno=True)
    self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
    assert self._fd >= 0

  def add(self, root: pathlib.Path) -> None:
    for folder in (root, *(path for path in root.rglob('*') if path.is_dir())):
      assert self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _IN_OPEN) >= 0

  def opened(self) -> str:
    try:
      return repr(os.read(self._fd, 2**16))
    except BlockingIOError:
      return ''


def main(root: pathlib.Path) -> None:
  forms = make_forms(root)
  for folder in forms.values():
    _read(folder)  # imports all modules, and is sound
  pages = int(pathlib.Path('/proc/self/statm').read_text(encoding='utf-8').split()[0])
  resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
  outcomes, watch = {}, _Watch()
  for form, cases in CASES.items():
    for name, (tamper, _) in cases.items():
      folder, outside = root / f'{form}-{name}/checkpoint_7', root / f'{form}-{name}/outside'
      shutil.copytree(forms[form], folder)
      outside.mkdir()
      (outside / 'secret').write_text('secret')
      tamper(folder, outside)
      watch.add(outside)
      try:
        _read(folder)
        outcomes[f'{form}-{name}'] = ['', 'nothing was raised']
      except CheckpointError as error:
        outcomes[f'{form}-{name}'] = ['CheckpointError', str(error)]
      except Exception as error:
        outcomes[f'{form}-{name}'] = [type(error).__name__, str(error)]
      if opened := watch.opened():
        outcomes[f'{form}-{name}'] = ['opened outside', opened]
  print(json.dumps(outcomes))


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
