"""Bases of runs with an adapter: a moved one is given by one flag, and saving copies no array of it."""

import io
import math
import shutil
import sys

import gin
import jax
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import notebook
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.apps.common import adapter_base
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.command_line import cli
from t5x_lite.trainer import state_init
from tests.adapters import adapter_cases as cases


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run with an adapter of a Hugging Face folder, which has moved to the folder 'moved'."""
  root = tmp_path_factory.mktemp('adapter')
  architecture = hugging_face.Architecture(
    vocab_size=384,
    emb_dim=64,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
    num_encoder_layers=2,
    num_decoder_layers=2,
    mlp_activations=('gelu', 'linear'),
    logits_via_embedding=False,
  )
  rng = np.random.default_rng(0)
  arrays = {
    rule.ours: rng.normal(size=rule.shape).astype(np.float32) / 8
    for rule in hugging_face.tensor_table(architecture)
  }
  family = hugging_face.guess_family(architecture)
  hugging_face.write_folder(root / 'base', architecture, family, arrays.__getitem__)
  assert cli.main(_train(root, root / 'base', 1)) == 0
  shutil.move(root / 'base', root / 'moved')
  yield root
  gin.clear_config()


def _train(root, base, num_steps):
  return [
    'train',
    '--gin_file=recipes/finetune_from_hf.gin',
    '--gin_file=adapters/lora.gin',
    '--gin_file=optimizers/adamw.gin',
    f'--gin.MODEL_DIR={root}/run',
    f'--gin.INITIAL_CHECKPOINT_PATH={base}',
    f'--gin.TRAIN_STEPS={num_steps}',
    '--gin.BATCH_SIZE=8',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 4}",
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    '--gin.train_script.train.train_eval_dataset_cfg=None',
  ]


_FLAG = '--gin.INITIAL_CHECKPOINT_PATH={base}'


@pytest.mark.parametrize(
  'words',
  [
    f'eval {{run}} --dry_run {_FLAG}',
    'convert {run} {out} --to=hugging_face --base={base}',
    'convert {run} {out} --to=peft --base={base}',
    f'eval {{run}} --gin.evaluation.InferenceEvalConfig.num_examples=8 {_FLAG}',
    f'infer {{run}} --input={{texts}} --output={{out}}.jsonl {_FLAG}',
    f'chat {{run}} {_FLAG}',
    pytest.param(
      f"export {{run}} --gin.export_lib.save.inference_mode='score' --gin.MODEL_OUTPUT_DIR={{out}} {_FLAG}",
      marks=pytest.mark.full,
    ),
    f'infer --gin_file=recipes/finetune_from_hf.gin --gin_file=adapters/lora.gin {_FLAG} '
    '--gin.CHECKPOINT_PATH={run}/checkpoint_1 --input={texts} --output={out}.jsonl',
  ],
)
def test_one_flag_for_a_moved_base(run, tmp_path, capsys, monkeypatch, words):
  text = '<extra_id_0> x\n'
  (tmp_path / 'texts').write_text(text)
  given = io.TextIOWrapper(io.BytesIO(text.encode()), encoding='utf-8')
  monkeypatch.setattr(sys, 'stdin', given)

  def call(base):
    names = {'run': run / 'run', 'out': tmp_path / 'out', 'texts': tmp_path / 'texts', 'base': base}
    return cli.main(words.format(**names).split())

  assert call(run / 'base') == 2
  assert f'{run}/base' in capsys.readouterr().err
  assert call(run / 'moved') == 0, capsys.readouterr().err


def test_a_moved_base_in_a_notebook(run):
  given = f"INITIAL_CHECKPOINT_PATH = '{run}/moved'"
  assert notebook.open_run(f'{run}/run', gin_bindings=[given]).step == 1


def test_a_run_that_resumes_records_a_moved_base(run, tmp_path):
  shutil.copytree(run / 'run', tmp_path / 'run')
  assert cli.main(_train(tmp_path, run / 'moved', 2)) == 0
  assert sources.recorded_base(tmp_path / 'run' / 'checkpoint_2')['path'] == f'{run}/moved'


def _trainer(model, batch):
  # Collectives of virtual devices wait for each other if there are fewer cores than devices.
  one_device = np.array(jax.devices()[:1]).reshape(1, 1)
  partitioner = partitioning.PjitPartitioner(mesh=jax.sharding.Mesh(one_device, ('data', 'model')))
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: x.shape for name, x in batch.items()},
    partitioner,
  )
  return trainer_lib.Trainer(
    model,
    initializer.from_scratch(jax.random.key(0)),
    partitioner,
    (),
    None,
    initializer.train_state_axes,
    jax.random.key(1),
    schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.01),
  )


def test_saving_copies_no_stacked_layers():
  """The saved arrays have a subtree per layer, as those of the entire state have."""
  adapter = adapters.Lora(rank=2, also_train=('norm/scale$',))
  model = cases.make_model(adapter, scan_layers=True, num_encoder_layers=4)
  batch = {**cases.BATCH, 'decoder_loss_weights': np.ones((8, 5), np.float32)}
  with _trainer(model, batch) as trainer:
    trainer.train(iter([batch] * 2), 2).result()
    assert trainer.stacked_layers
    part = adapter_base.trained_part(trainer.step_state, adapter)
    found = tree_utils.flatten_dict(adapter_base.arrays_to_save(part, trainer.stacked_layers))
    assert all(isinstance(value, np.ndarray) for value in found.values())
    expected = tree_utils.flatten_dict(trainer.train_state.state_dict())
  frozen = {name for name in expected if name.startswith('target/')} - set(found)
  assert frozen and set(found) | frozen == set(expected)
  assert not any(name.endswith(('lora_a', 'lora_b', 'norm/scale')) for name in frozen)
  for name, value in found.items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_the_size_of_a_checkpoint(run):
  """At most 1.3 times the adapter with its optimizer state, and 64 KiB; names take most of the rest."""
  path = run / 'run' / 'checkpoint_1'
  arrays = sources.open_source(path).own.shapes().values()
  num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
  found = sum(file.stat().st_size for file in path.rglob('*') if file.is_file())
  assert found <= 1.3 * num_bytes + 2**16
