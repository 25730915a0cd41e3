"""The gin files of expert parallelism, with commands of a dense model on 8 virtual devices."""

import re

import pytest

from t5x_lite.command_line import cli

_FIRST = ('--gin_file=partitioning/moe.gin', '--gin.NUM_EXPERTS=8')
_SECOND = ('--gin_file=partitioning/moe_expert_partitions.gin',)
_RECIPE = '--gin_file=recipes/keyword_cloze.gin'


@pytest.mark.parametrize(
  'flags,fragments',
  [
    (_FIRST, ['Mesh   data=8 x model=1', 'Batch  data\n']),
    (
      (*_FIRST, '--gin.NUM_EXPERTS=4'),
      ['Mesh   data=4 x model=2', 'Batch  data*model\n', 'data: expert\n'],
    ),
    (
      (*_SECOND, '--gin.NUM_EXPERT_PARTITIONS=6', '--gin.NUM_PARTITIONS=2'),
      ['Mesh   data=1 x expert=4 x model=2', 'Batch  expert*data\n', 'expert: expert\n'],
    ),
    (
      (
        *_SECOND,
        '--gin.NUM_PARTITIONS=2',
        '--gin.partitioner.MoePjitPartitioner.ici_mesh_shape=(1, 2, 2)',
        '--gin.partitioner.MoePjitPartitioner.dcn_mesh_shape=(2, 1, 1)',
      ),
      [
        'Mesh   replica=2 x data=1 x expert=2 x model=2',
        'Batch  replica*expert*data\n',
        'replica*data: expert_replicas\n',
      ],
    ),
  ],
)
def test_explain_sharding(capsys, flags, fragments):
  status = cli.main(['explain_sharding', _RECIPE, *flags])
  captured = capsys.readouterr()
  # The file of the other partitioner takes these bindings of the recipe away.
  unused = r'Not used for training: partitioning\.PjitPartitioner\.num_partitions [^\n]*\n'
  assert status == 0 and re.fullmatch(unused, captured.err)
  for fragment in fragments:
    assert fragment in captured.out


@pytest.mark.parametrize(
  'flags,message',
  [
    ((*_FIRST, '--gin.NUM_EXPERTS=6'), 'num_expert_partitions=2'),
    ((*_FIRST, '--gin.NUM_EXPERTS=4', '--gin.BATCH_SIZE=12'), 'must be divisible by 8'),
    (
      (*_SECOND, '--gin.NUM_EXPERT_PARTITIONS=0'),
      'must be None with num_experts, and otherwise an integer >= 1',
    ),
  ],
)
def test_errors(capsys, flags, message):
  assert cli.main(['explain_sharding', _RECIPE, *flags]) == 2
  captured = capsys.readouterr()
  assert not captured.out and message in captured.err


@pytest.mark.parametrize(
  'flags',
  [
    pytest.param((*_FIRST, '--gin.NUM_EXPERTS=4'), id='first'),
    pytest.param(_SECOND, id='second', marks=pytest.mark.full),
  ],
)
def test_dry_run_of_training(capsys, tmp_path, flags):
  status = cli.main(
    [
      'train',
      _RECIPE,
      *flags,
      '--dry_run',
      f'--gin.MODEL_DIR={tmp_path}/run',
      "--gin.DATA_SOURCE='builtin'",
    ]
  )
  captured = capsys.readouterr()
  assert status == 0, captured.err
  assert (
    'data=4 x model=2' if flags[0] == _FIRST[0] else 'data=1 x expert=8 x model=1'
  ) in captured.out


def test_an_expert_axis_fits_the_experts_of_the_model(capsys):
  flags = ('--gin_file=recipes/keyword_cloze_moe.gin', '--gin.NUM_EXPERTS=6')
  assert cli.main(['explain_sharding', *flags]) == 0
  assert 'Mesh   data=4 x expert=2 x model=1' in capsys.readouterr().out
  assert cli.main(['explain_sharding', *flags, '--gin.NUM_EXPERT_PARTITIONS=8']) == 2
  assert 'Use num_expert_partitions=2' in capsys.readouterr().err


def test_the_forms_replace_each_other_and_keep_the_number_of_experts(capsys):
  status = cli.main(
    [
      'explain_sharding',
      '--gin_file=recipes/keyword_cloze_moe.gin',
      '--gin.NUM_EXPERTS=16',
      _FIRST[0],
    ]
  )
  out = capsys.readouterr().out
  assert status == 0 and 'Mesh   data=8 x model=1' in out and '16 x 64 x 64' in out
