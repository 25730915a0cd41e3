"""Mesh rules in real commands: a run on one kind of hardware that is resumed, evaluated and exported on others."""

import json

import gin
import pytest

from t5x_lite.command_line import cli

_FEW = '--gin.evaluation.InferenceEvalConfig.num_examples=8'
_TINY = [
  '--gin_file=recipes/keyword_cloze.gin',
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
  '--gin.network.T5Config.emb_dim=8',
  '--gin.network.T5Config.num_heads=4',
  '--gin.network.T5Config.mlp_dim=8',
  '--gin.network.T5Config.head_dim=2',
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 4}",
  '--gin.DATA_SOURCE=builtin',
  '--gin.EVAL_STEPS=1',
  '--gin.train_script.train.infer_eval_dataset_cfg=None',
]
_RULES = """\
BATCH_SIZE = 16
partitioning.PjitPartitioner.num_partitions = 4
MESH_RULES = [
    ('gpu-.*', ['partitioning/fsdp.gin', 'EVAL_PERIOD = 100']),
    ('cpu-8', '''
        partitioning.PjitPartitioner.num_partitions = 2
        trainer.Trainer.num_microbatches = 2
    '''),
    ('tpu-.*', None),
]
"""


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _main(capsys, *argv):
  status = cli.main([*map(str, argv)])
  captured = capsys.readouterr()
  gin.clear_config()
  assert status == 0, captured.err
  return captured.out, captured.err


def _losses(model_dir):
  lines = map(json.loads, (model_dir / 'train/metrics.jsonl').read_text().splitlines())
  return {line['step']: line['loss'] for line in lines if 'loss' in line}


def test_a_run_moves_to_other_hardware(tmp_path, capsys):
  rules, run = tmp_path / 'rules.gin', tmp_path / 'run'
  rules.write_text(
    _RULES.replace(
      'BATCH',
      'from __gin__ import dynamic_registration\n'
      'from t5x_lite import partitioning\nfrom t5x_lite import trainer\nBATCH',
      1,
    )
  )
  flags = [
    *_TINY,
    f'--gin_file={rules}',
    f'--gin.MODEL_DIR={run}',
    '--gin.SAVING_PERIOD=2',
    '--gin.schedules.create_learning_rate_scheduler.steps_per_cycle=100',
  ]
  out, _ = _main(capsys, 'train', *flags, '--gin.TRAIN_STEPS=2', '--dry_run')
  assert (
    '#   trainer.Trainer.num_microbatches = 2\n' in out and 'data=4' in out and not run.exists()
  )
  _, err = _main(capsys, 'train', *flags, '--gin.TRAIN_STEPS=2')
  assert (
    "Mesh selector 'cpu-8' (detected): rule 'cpu-8' sets partitioning.PjitPartitioner.num_partitions = 2, "
    'trainer.Trainer.num_microbatches = 2. Mesh: data=4, model=2.\n'
  ) in err
  assert '8 cpu devices (data=4 x model=2)' in err
  # Resumed where another rule applies: the same parameters on another mesh.
  _, err = _main(capsys, 'train', *flags, '--gin.TRAIN_STEPS=4', '--mesh_selector=gpu-h100-8')
  assert (
    "rule 'gpu-.*' sets" in err and 'EVAL_PERIOD = 100' in err and 'Mesh: data=8, model=1.' in err
  )
  assert 'checkpoint_2' in err and (run / 'config-until-2.gin').is_file()
  losses = _losses(run)
  _main(
    capsys,
    'train',
    *flags,
    '--gin.TRAIN_STEPS=4',
    '--gin.MESH_RULES=None',
    f'--gin.MODEL_DIR={tmp_path / "one"}',
    '--gin.partitioning.PjitPartitioner.num_partitions=1',
  )
  assert losses == pytest.approx(_losses(tmp_path / 'one'), rel=1e-4) and set(losses) == {2, 4}
  config = (run / 'config.gin').read_text()
  assert 'PjitPartitioner.num_partitions = 4\n' in config and 'BATCH_SIZE = 16\n' in config
  rules.unlink()
  # Without the file of the rules, from config.gin alone.
  for selector, words in (
    ([], 'Mesh: data=4, model=2.'),
    (['--mesh_selector=tpu-v4-8'], 'Mesh: data=8, model=1.'),
    (['--mesh_selector=mine'], 'no rule of MESH_RULES matches. Mesh: data=2, model=4.'),
  ):
    _, err = _main(capsys, 'eval', run, *selector, '--dry_run')
    assert words in err
  questions = tmp_path / 'questions.txt'
  questions.write_text('<extra_id_0> x in y:\n')
  _, err = _main(
    capsys,
    'infer',
    run,
    f'--input={questions}',
    f'--output={tmp_path / "answers.jsonl"}',
    '--mesh_selector=gpu-h100-8',
  )
  assert (
    'Mesh: data=8, model=1.' in err and (tmp_path / 'answers.jsonl').read_text().count('\n') == 1
  )
  _, err = _main(capsys, 'eval', run, '--mesh_selector=gpu-h100-8', _FEW)
  assert 'Mesh: data=8, model=1.' in err and 'exact_match' in err


@pytest.mark.parametrize(
  'files, rules, selector, words',
  [
    # The layers of the model have 8 experts, which the rules below divide among 2 and, automatically, 8 devices.
    (
      ['recipes/keyword_cloze_moe.gin'],
      "[('cpu-.*', 'NUM_EXPERT_PARTITIONS = 2'), ('.*', None)]",
      'cpu-8',
      'data=4 x expert=2 x model=1',
    ),
    (
      ['recipes/keyword_cloze_moe.gin'],
      "[('cpu-.*', None), ('.*', ['NUM_EXPERT_PARTITIONS = 2', None])]",
      'tpu-v4-8',
      'data=1 x expert=8 x model=1',
    ),
    (
      ['recipes/keyword_cloze_moe.gin', 'partitioning/moe.gin'],
      "[('.*', None)]",
      'any',
      'data=8 x model=1',
    ),
    (
      ['recipes/keyword_cloze.gin', 'partitioning/tensor_parallel.gin'],
      "[('tpu', None)]",
      'tpu',
      'data=8 x model=1',
    ),
    (
      ['recipes/keyword_cloze.gin', 'partitioning/tensor_parallel.gin'],
      "[('tpu', None)]",
      'gpu',
      'data=4 x model=2',
    ),
  ],
)
def test_meshes_of_both_partitioners(capsys, files, rules, selector, words):
  out, err = _main(
    capsys,
    'explain_sharding',
    *(f'--gin_file={file}' for file in files),
    f'--gin.MESH_RULES={rules}',
    f'--mesh_selector={selector}',
  )
  assert out.startswith(f'Mesh   {words}: 8 cpu device(s)')
  assert f'Mesh: {words.replace(" x ", ", ")}.' in err


@pytest.mark.parametrize(
  'flags, fragments',
  [
    (
      ["--gin.MESH_RULES=[('cpu-.*', 'partitioning.PjitPartitioner.num_partitions = 3')]"],
      ['got 3', "rule 'cpu-.*' sets partitioning.PjitPartitioner.num_partitions = 3"],
    ),
    (
      ["--gin.MESH_RULES=[('cpu-.*', 'partitioning.PjitPartitioner.num_partition = 3')]"],
      [
        "--gin.MESH_RULES (mesh rule 'cpu-.*'):1: ",
        "no parameter 'num_partition'",
        "Did you mean 'num_partitions'?",
      ],
    ),
    (['--mesh_selector=cpu-8'], ['--mesh_selector=cpu-8 has no effect', 'no MESH_RULES']),
  ],
)
def test_rejected(capsys, flags, fragments):
  assert cli.main(['explain_sharding', '--gin_file=recipes/keyword_cloze.gin', *flags]) == 2
  err = capsys.readouterr().err
  for fragment in fragments:
    assert fragment in err
