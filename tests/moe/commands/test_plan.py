"""`python -m moe`: help, the capacity plan and its numbers, errors."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from moe import __main__ as program
from moe import networks
from moe.commands import COMMANDS
from moe.dispatch import expert_parallel
from moe.tools import capacity_plan
from moe.tools import planner
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError
from tests.moe.tools import recorded_runs

_ROOT = pathlib.Path(__file__).parents[3]
_ZIPF = ('plan', '--zipf=1', '--num_experts=8', '--tokens_per_group=256')


def _main(capsys, *argv):
  """Return (exit status, standard output, standard error)."""
  status = cli.main(argv, program.PROGRAM)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _json(capsys, tmp_path, *argv):
  path = tmp_path / 'plan.json'
  status, out, err = _main(capsys, *argv, f'--json={path}')
  assert status == 0 and not err and not list(tmp_path.glob('*.tmp'))
  return json.loads(path.read_text()), out


# ---- The program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arguments', [('--help',), ('plan', '--help'), ('report', '--help')])
def test_help_imports_nothing_heavy(arguments):
  code = (
    'import runpy, sys\n'
    f'sys.argv = {["moe", *arguments]!r}\n'
    'try:\n  runpy.run_module("moe", run_name="__main__", alter_sys=False)\n'
    'except SystemExit as stop:\n  assert not stop.code\n'
    "heavy = set(sys.modules) & {'jax', 'numpy', 'flax', 'gin', 'matplotlib'}\n"
    'assert not heavy, heavy\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=_ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert done.stdout.startswith('usage: python -m moe')


def test_help_lists_the_commands(capsys):
  status, out, _ = _main(capsys, '--help')
  assert status == 0 and all(f'\n  {name} ' in out for name in COMMANDS)
  assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_every_command_has_help(capsys, command):
  status, out, _ = _main(capsys, command, '--help')
  assert status == 0 and out.startswith(f'usage: python -m moe {command}')


@pytest.mark.parametrize(
  'argv, fragments',
  [
    (['repotr'], ["'repotr' is not a command", "'report'"]),
    (['report'], ['required: RUN', 'python -m moe report --help']),
    (['report', 'x', '--gin.A=1'], ['report has no gin configuration']),
    (['plan', '--zipf=1', '--num_experts=8'], ['required: --tokens_per_group']),
    (['plan', '--tokens_per_group=8'], ['either --run=RUN or --zipf=S']),
    ([*_ZIPF, '--run=x'], ['either --run=RUN or --zipf=S']),
    (['plan', '--zipf=1', '--tokens_per_group=8'], ['--zipf needs --num_experts=E']),
    ([*_ZIPF, '--step=3'], ['--step has no effect with --zipf']),
    (
      ['plan', '--run=x', '--num_experts=3', '--tokens_per_group=8'],
      ['--num_experts has no effect with --run'],
    ),
    ([*_ZIPF, '--dtype=bfloat61'], ["Did you mean 'bfloat16'?"]),
    ([*_ZIPF, '--factors=1,b'], ["Argument --factors: invalid numbers value: '1,b'"]),
    ([*_ZIPF, '--factors=-1'], ['`factors` must be a number > 0, got -1']),
    ([*_ZIPF, '--max_drop=1'], ['`max_drop` must be a number in [0, 1), got 1']),
    ([*_ZIPF, '--num_selected=9'], ['`num_selected` must be a number <= 8, got 9']),
    ([*_ZIPF, '--num_selected=0'], ['`num_selected` must be an integer >= 1, got 0']),
    ([*_ZIPF, '--routed_share=0'], ['`routed_share` must be a number in (0, 1], got 0']),
    (
      [*_ZIPF, '--expert_partitions=3'],
      ['`num_shards` must be a divisor of the number of experts 8, got 3'],
    ),
    ([*_ZIPF, '--expert_partitions=0'], ['`--expert_partitions` must be an integer >= 1, got 0']),
    ([*_ZIPF, '--tokens_per_device=8'], ['--tokens_per_device has no effect']),
    (
      ['plan', '--zipf=-1', '--num_experts=8', '--tokens_per_group=8'],
      ['`zipf` must be a number >= 0, got -1'],
    ),
    (
      [*_ZIPF, '--json=no/such/folder/x.json'],
      ["'no/such/folder/x.json': No such file or directory"],
    ),
  ],
)
def test_invalid_command_lines(capsys, argv, fragments):
  status, out, err = _main(capsys, *argv)
  assert status == 2 and not out
  assert err.startswith('moe: error: ') and len(err.splitlines()) == 1
  for fragment in fragments:
    assert fragment in err


# ---- The plan -------------------------------------------------------------------------------------------------------


def test_plan_of_a_zipf_load(capsys, tmp_path):
  plan, out = _json(
    capsys,
    tmp_path,
    *_ZIPF,
    '--num_selected=2',
    '--factors=2,3',
    '--width=16',
    '--hidden=32',
    '--gated',
    '--dtype=float32',
    '--max_drop=0.05',
  )
  (layer,) = plan['layers']
  sizes = planner.Sizes(
    tokens_per_group=256, num_selected=2, width=16, hidden=32, num_inputs=2, bytes_per_number=4
  )
  load = planner.zipf_load(8, 1.0)
  assert [(o['factor'], o['num_slots']) for o in layer['options']] == [(2.0, 64), (3.0, 96)]
  for option in layer['options']:
    np.testing.assert_allclose(
      option['drop_rate'], planner.drop_rate(load, sizes, option['num_slots'])
    )
    assert option['bytes'] == 8 * option['num_slots'] * (2 * 16 + 3 * 32) * 4
  assert layer['dropless_bytes'] == 512 * (2 * 16 + 3 * 32) * 4
  assert layer['largest_load'] == pytest.approx(8 * load[0])
  suggestion = layer['suggestion']
  assert (
    suggestion['drop_rate'] <= 0.05
    and plan['suggestion']['capacity_factor'] == suggestion['factor']
  )
  less = planner.capacity_options(load, sizes, (round(suggestion['factor'] - 0.05, 2),))[0]
  assert less.drop_rate > 0.05
  assert f'{suggestion["factor"]:g} *' in out and 'dropless      -       0%         1.00' in out
  assert not plan['suggestion']['buffers'] and 'Suggested: dropless' in out


def test_balanced_loads_get_buffers(capsys, tmp_path):
  plan, out = _json(
    capsys, tmp_path, 'plan', '--zipf=0', '--num_experts=4', '--tokens_per_group=4096'
  )
  factor = plan['suggestion']['capacity_factor']
  assert plan['suggestion']['buffers'] and 1.0 <= factor <= 1.1
  assert plan['suggestion']['gin'][1:] == [
    f'  train_capacity_factor = {factor:g}',
    f'  eval_capacity_factor = {factor:g}',
  ]
  assert 'Suggested: buffers' in out


def test_plan_over_shards(capsys, tmp_path):
  plan, out = _json(
    capsys, tmp_path, *_ZIPF, '--num_selected=2', '--expert_partitions=8', '--tokens_per_device=512'
  )
  (layer,) = plan['layers']
  *some, worst = layer['receive_options']
  assert (
    worst['num_slots'] == expert_parallel.num_receive_rows(512, 2, 1, 8, None)[0]
    and worst['drop_rate'] == 0
  )
  assert [o['factor'] for o in some] == [1.0, 1.1, 1.25, 1.5, 2.0]
  assert some[0]['drop_rate'] > some[-1]['drop_rate']
  assert layer['receive_suggestion']['drop_rate'] <= 0.01
  assert plan['suggestion']['receive_factor'] == layer['receive_suggestion']['factor']
  assert f'receive_factor = {plan["suggestion"]["receive_factor"]}' in out
  exact, _ = _json(capsys, tmp_path, *_ZIPF, '--expert_partitions=8', '--max_drop=0')
  assert exact['suggestion']['receive_factor'] is None


def test_plan_of_a_run(capsys, tmp_path):
  run = tmp_path / 'run'
  loads = recorded_runs.write(run, num_steps=20)
  (run / 'config.gin').write_text(
    "MESH_RULES = \\\n    [\n      ('gpu-.*', [\n        '''\n"
    "        moe.TokensChooseRouter.num_selected = 1\n        ''',\n      ]),\n    ]\n"
    'moe.TokensChooseRouter.num_selected = 2\n'
  )
  argv = ('plan', f'--run={run}', '--tokens_per_group=256')
  plan, out = _json(capsys, tmp_path, *argv)
  assert [layer['name'] for layer in plan['layers']] == list(loads)
  assert 'steps 181 to 200' in plan['source'] and 'each of which chooses 2 experts' in out
  # Half of the encoder's tokens are padding; nothing is known of the decoder's.
  assert [layer['sizes']['routed_share'] for layer in plan['layers']] == [0.5, 0.5, 1.0]
  assert plan['suggestion']['capacity_factor'] == max(
    layer['suggestion']['factor'] for layer in plan['layers']
  )
  for layer in plan['layers']:
    load = loads[layer['name']][-2:].mean(axis=0)
    assert (
      layer['largest_load'] == pytest.approx(4 * load.max()) and layer['sizes']['num_selected'] == 2
    )
    assert layer['name'] in out

  one, _ = _json(
    capsys,
    tmp_path,
    *argv,
    '--layer=encoder/layers_3',
    '--step=30',
    '--num_selected=1',
    '--routed_share=0.25',
  )
  (layer,) = one['layers']
  assert layer['largest_load'] == pytest.approx(4 * loads['encoder/layers_3'][2].max())
  assert (layer['sizes']['num_selected'], layer['sizes']['routed_share']) == (1, 0.25)

  (run / 'config.gin').write_text('moe.TokensChooseRouter.ignore_padding_tokens = False\n')
  routed, out = _json(capsys, tmp_path, *argv)
  assert routed['layers'][0]['sizes']['routed_share'] == 1.0
  assert 'num_selected=1 (the default, as config.gin says nothing)' in out.replace('\n', ' ')
  (run / 'config.gin').write_text('K = 3\nencoder/moe.SinkhornRouter.num_selected = %K\n')
  by_macro, _ = _json(capsys, tmp_path, *argv)
  assert by_macro['layers'][0]['sizes']['num_selected'] == 3 and by_macro['source'].endswith(
    '(config.gin)'
  )
  (run / 'config.gin').write_text(
    'moe.TokensChooseRouter.num_selected = 2\ndecoder/moe.HashRouter.num_selected = 1\n'
  )
  status, _, err = _main(capsys, *argv)
  assert status == 2 and 'num_selected=1 and 2' in err and '--num_selected=K' in err
  for flags, fragments in (
    (
      ['--layer=encoder/layer_1'],
      ['`--layer` must be one of', "mean 'encoder/layers_1'?", 'sparse layers of'],
    ),
    (['--step=34'], ['`--step` must be', 'got 34', '20 periods', '10 to 200', 'closest is 30']),
    (['--writer=nobody'], ['`report.writer` must be a writer of', "got 'nobody'"]),
  ):
    status, _, err = _main(capsys, *argv, *flags)
    assert status == 2 and all(fragment in err for fragment in fragments)


def test_padding_is_not_routed_but_counts_in_capacities():
  load = planner.zipf_load(4, 0.5)
  whole = planner.Sizes(tokens_per_group=128)
  half = planner.Sizes(tokens_per_group=256, routed_share=0.5)
  (a,) = planner.capacity_options(load, whole, (2.0,))
  (b,) = planner.capacity_options(load, half, (1.0,))
  assert a == planner.dataclasses.replace(b, factor=2.0)


@pytest.mark.parametrize('buffers', [False, True])
@pytest.mark.parametrize('num_shards', [1, 4])
def test_suggested_settings_are_options_of_a_block(buffers, num_shards):
  plan = capacity_plan.make(
    'test',
    {'a': planner.zipf_load(8, 1.0)},
    {'a': planner.Sizes(tokens_per_group=64, min_capacity=2)},
    num_shards=num_shards,
  )
  head, *lines = plan.gin_lines(buffers)
  settings = {
    name.strip(): json.loads(value.replace('None', 'null'))
    for name, value in (line.split('=') for line in lines)
  }
  block = networks.SparseBlock(num_experts=8, **settings)
  assert head == 'moe.SparseBlock:' and block.train_capacity_factor == (
    plan.capacity_factor if buffers else None
  )
  assert ('receive_factor' in settings) == (num_shards > 1 and not buffers)


def test_layers_share_the_largest_factor():
  loads = {'even': planner.zipf_load(8, 0.0), 'skewed': planner.zipf_load(8, 1.5)}
  sizes = {name: planner.Sizes(tokens_per_group=1024) for name in loads}
  plan = capacity_plan.make('test', loads, sizes)
  assert plan.widest.name == 'skewed' and plan.capacity_factor == plan.layers[1].suggestion.factor
  assert not plan.prefers_buffers
  with pytest.raises(ConfigError, match='even has no finite load.*--step'):
    capacity_plan.make('test', {'even': np.full(8, np.nan)}, sizes)
