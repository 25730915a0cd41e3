"""The pages agree with the code: tables with docstrings and files, links with pages, commands with gin.

A table that a comment marks, e.g. `<!-- exit statuses -->`, is compared with the code that it describes. Gin files and
modules that a page shows under their names (a line that ends with "`name.gin`:" before the block) are written to a
folder, in which the page's commands must find them. `test_docs_reference.py` tests the generated pages.
"""

import ast
import dataclasses
import datetime
import importlib
import importlib.util
import inspect
import itertools
import os
import pathlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from benchmarks import optimizer_records
from moe import __main__ as moe_program
from moe import metrics as moe_metrics
from t5x_lite import data
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite import losses
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import runtime
from t5x_lite import tree_utils
from t5x_lite.apps import commands
from t5x_lite.apps.chat import command as chat
from t5x_lite.apps.common import runs
from t5x_lite.apps.convert import run as convert
from t5x_lite.apps.explain_sharding import command as explain_sharding
from t5x_lite.apps.precompile import command as precompile
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources as checkpoint_sources
from t5x_lite.checkpoints.hugging_face import gin_files as hugging_face_gin
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.optimizers.base import layouts
from tests.data import registries
from tests.repository import docs_commands
from tests.repository import notebooks

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = {
  path.relative_to(_ROOT).as_posix(): path.read_text(encoding='utf-8')
  for path in (
    _ROOT / 'README.md',
    *sorted((_ROOT / 'docs').glob('*.md')),
  )
} | {
  path.relative_to(_ROOT).as_posix(): notebooks.markdown(path)
  for path in sorted(notebooks.FOLDER.glob('*.ipynb'))
}

_REFERENCE = _PAGES['docs/configuration.md'] + _PAGES['docs/moe.md']
_TABLE = re.compile(r'<!-- (?P<kind>[\w ]+?)(?:: (?P<what>[^>]*?))? -->\n\n(?P<rows>(?:\|.*\n)+)')
# In place of a sentencepiece model, which does not come with t5x_lite.
_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @vocabularies.PassThroughVocabulary()
vocabularies.PassThroughVocabulary.size = 1
"""


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _tables(kind):
  """Return (described object, rows of cells) of the reference's tables of that kind."""
  found = []
  for match in _TABLE.finditer(_REFERENCE):
    if match['kind'] == kind:
      rows = [
        [cell.strip() for cell in line.strip().strip('|').split('|')]
        for line in match['rows'].splitlines()[2:]
      ]
      found.append((match['what'], rows))
  assert found, kind
  return found


def _names(cell):
  """Return the texts between backquotes."""
  return re.findall(r'`([^`]+)`', cell)


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def test_loss_factors():
  listed = [
    ast.literal_eval(_names(row[0])[0]) for _, rows in _tables('loss factors') for row in rows
  ]
  assert listed == [factor.name for factor in losses.SpecialLossNormalizingFactor]


def test_metric_names():
  listed = {name for _, rows in _tables('metrics') for row in rows for name in _names(row[0])}
  ones = jnp.ones((2, 3), jnp.int32)
  metrics = models.compute_base_metrics(
    jnp.zeros((2, 3, 5)),
    ones,
    ones,
    jnp.float32(1),
    jnp.float32(1),
    {'encoder_input_tokens': ones, 'decoder_target_tokens': ones},
  )
  features = re.compile('/(encoder_input_tokens|decoder_target_tokens)$')
  assert listed == {features.sub('/<feature>', name) for name in metrics}


def test_exit_statuses():
  listed = {int(row[0]) for _, rows in _tables('exit statuses') for row in rows}
  assert listed == {int(code) for code in errors.ExitCode} | {1, 130}


# ----------------------------------------------------------------------------------------------------------------------
# Links


def _anchors(text):
  """Returns the anchors of a page's headings, as GitHub makes them."""
  headings = re.findall(r'^#+ (.*)$', re.sub(r'```.*?```', '', text, flags=re.DOTALL), re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', _PAGES)
def test_links_resolve(page):
  text = re.sub(r'```.*?```', '', _PAGES[page], flags=re.DOTALL)
  for target in re.findall(r'\]\(([^)\s]+)\)', text):
    if '://' in target:
      continue
    file, _, anchor = target.partition('#')
    path = (_ROOT / page).parent / file if file else _ROOT / page
    assert path.exists(), target
    if anchor:
      assert anchor in _anchors(path.read_text(encoding='utf-8')), target


def test_index_lists_every_page():
  listed = ' '.join(
    re.findall(r'```\{toctree\}.*?\n\n(.*?)```', _PAGES['docs/index.md'], re.DOTALL)
  ).split()
  pages = {
    os.path.splitext(page.removeprefix('docs/'))[0] for page in _PAGES if page.startswith('docs/')
  }
  assert sorted(listed) == sorted(pages - {'index'} | {'reference/index'})


# ----------------------------------------------------------------------------------------------------------------------
# Commands and files


def _shell_blocks(text):
  """Returns the page's blocks of shell commands, without those that show an error."""
  fences = docs_commands.read_fences('page', text)
  return [fence.text for fence in fences if fence.language == 'sh' and not fence.status]


def _commands(text):
  """Returns the arguments of each `t5x_lite` command in the page's shell blocks."""
  commands = []
  for block in _shell_blocks(text):
    # A loop stands for its first round.
    for name, value in re.findall(r'for (\w+) in ([\w.]+)', block):
      block = re.sub(rf'\${name}\b|\${{{name}}}', value, block)
    for line in re.sub(r'\\\n', ' ', block).splitlines():
      words = shlex.split(line, comments=True)
      words = list(
        itertools.takewhile(lambda word: word != '|' and not word.startswith('2>'), words)
      )
      while words and re.fullmatch(r'[A-Z_]+=.*', words[0]):
        words = words[1:]
      if words[:1] == ['t5x_lite']:
        commands.append(words[1:])
        if words[1] == 'launch':
          commands.append(words[words.index('--') + 1 :])
  return commands


def _linked_examples(page):
  """Returns the texts of the modules in tests/examples to which the page links, by name."""
  found = re.findall(r'\]\(\.\./(tests/examples/\w+\.py)\)', _PAGES[page])
  return {pathlib.Path(name).name: (_ROOT / name).read_text(encoding='utf-8') for name in found}


@pytest.fixture
def shown_files(tmp_path, monkeypatch):
  """Return a function that writes a page's files to a folder, changes to it, and adds it to the import path."""
  before = set(sys.modules)

  def enter(page):
    docs_commands.write_files(docs_commands.read_fences(page, _PAGES[page]), tmp_path)
    for name, text in _linked_examples(page).items():
      (tmp_path / name).write_text(text, encoding='utf-8')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registries.isolate(monkeypatch)
    return tmp_path

  yield enter
  for name in set(sys.modules) - before:
    if str(getattr(sys.modules[name], '__file__', '')).startswith(str(tmp_path)):
      del sys.modules[name]


class _Accepted(BaseException):
  """Ends a command when its configuration has been accepted."""


@pytest.fixture
def accept(monkeypatch):
  """Makes a function that runs a command up to the point where gin has accepted its configuration."""

  def load(entry, texts, mesh_selector=None):
    texts = [*texts, gin_syntax.read_text(_NO_VOCABULARY, 'vocabulary', is_flag=False)]
    loaded = original(entry, texts, mesh_selector)
    assert loaded.uses
    raise _Accepted

  original = gin_utils.load
  monkeypatch.setattr(gin_utils, 'load', load)
  monkeypatch.setattr(runtime, 'use_compilation_cache', lambda folder: None)
  monkeypatch.setattr(runtime, 'join', lambda cfg: None)
  for module in (explain_sharding, precompile):
    monkeypatch.setattr(module, 'simulate_devices', lambda num_devices: None)
  for module in (runs, chat):
    monkeypatch.setattr(module, 'find_run', lambda path: runs.FoundRun(path, path, 'latest'))

  def accept(argv):
    arguments = cli.parse(argv)
    with pytest.raises(_Accepted):
      commands.COMMANDS[arguments.command].run(arguments)
    gin.clear_config()

  options = {name: jax.config.values[name] for name in ('jax_debug_nans', 'jax_debug_infs')}
  yield accept
  for name, value in options.items():
    jax.config.update(name, value)


def _has_seqio():
  return importlib.util.find_spec('seqio') is not None


def _write_run(folder):
  """Writes the configuration that the run of that name would have left."""
  kinds = {'decoder_only': 'keyword_cloze_decoder_only', 'lora': 'keyword_cloze_finetune'}
  recipe = next((kinds[kind] for kind in kinds if kind in folder.name), 'keyword_cloze')
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.gin').write_text(
    f"include 'recipes/{recipe}.gin'\nMODEL_DIR = 'runs/{folder.name}'\n"
  )


@pytest.mark.parametrize('page', [page for page, text in _PAGES.items() if _commands(text)])
def test_commands_resolve(page, shown_files, accept):
  folder = shown_files(page)
  for argv in _commands(_PAGES[page]):
    if '--help' in argv or (any('tfexample' in word for word in argv) and not _has_seqio()):
      continue
    for run in re.findall(r'\bruns/\w+', ' '.join(argv)):
      _write_run(folder / run)
    if commands.COMMANDS[argv[0]].entry is None:
      assert cli.parse(argv).command == argv[0]
    else:
      accept(argv)


def test_own_task(shown_files, capsys, monkeypatch):
  """A run accepts everything that `docs/own_task.md` shows, for both sources."""
  folder = shown_files('docs/own_task.md')
  subprocess.run([sys.executable, 'make_data.py'], cwd=folder, check=True)
  assert (
    cli.main(['train', '--gin_file=number_words.gin', '--gin.MODEL_DIR=runs/numbers', '--dry_run'])
    == 0
  )
  assert re.search(r'^inference_eval/number_words ', capsys.readouterr().out, re.MULTILINE)
  shown = runpy.run_path('look.py')
  np.testing.assert_array_equal(
    shown['batch']['decoder_segment_ids'][0] > 0, shown['batch']['decoder_loss_weights'][0] > 0
  )


def test_own_task_from_files(shown_files, capsys):
  folder = shown_files('docs/own_task.md')
  subprocess.run([sys.executable, 'make_data.py'], cwd=folder, check=True)
  files = ['--gin_file=number_words_grain.gin', '--gin_file=data/grain.gin']
  assert (
    cli.main(
      ['train', *files, '--gin.MODEL_DIR=runs/numbers', '--gin.GRAIN_NUM_WORKERS=4', '--dry_run']
    )
    == 0
  )
  assert re.search(r'^inference_eval/number_words ', capsys.readouterr().out, re.MULTILINE)


@pytest.mark.full  # by default, test_own_task runs the page, and test_seqio_source.py a user's module
def test_own_seqio_task(shown_files, capsys):
  seqio = pytest.importorskip('seqio')
  folder = shown_files('docs/own_task.md')
  subprocess.run([sys.executable, 'make_data.py'], cwd=folder, check=True)
  try:
    argv = [
      'train',
      '--gin_file=number_words_seqio.gin',
      '--gin.MODEL_DIR=runs/numbers',
      '--dry_run',
    ]
    assert cli.main(argv) == 0
    assert re.search(r'^inference_eval/number_words ', capsys.readouterr().out, re.MULTILINE)
  finally:
    seqio.TaskRegistry.remove('number_words')


def _seams():
  """Returns (cell of the example, cell of the files inside) of each row in the table of seams."""
  (rows,) = [
    match['rows'] for match in _TABLE.finditer(_PAGES['docs/design.md']) if match['kind'] == 'seams'
  ]
  return [
    [cell.strip() for cell in line.strip('|').split('|')][1:] for line in rows.splitlines()[2:]
  ]


@pytest.mark.parametrize('example, inside', _seams())
def test_seams_have_the_lines_and_files_that_are_said(example, inside):
  if link := re.fullmatch(r'\[(.*)\]\((.*)#.*\): (\d+)', example):
    page = f'docs/{link[2]}'
    shown = {fence.name: fence.text for fence in docs_commands.read_fences(page, _PAGES[page])}
    shown |= _linked_examples(page)
    assert int(link[3]) == sum(shown[name].count('\n') for name in _names(link[1]))
  else:
    assert example.startswith('none: ')
  number, _, files = inside.partition(': ')
  assert int(number) == len(files.split(';'))
  for name in _names(files):
    if '/' in name:
      assert any((folder / name).exists() for folder in (_ROOT, _ROOT / 't5x_lite')), name


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers

_OPTIMIZERS = _PAGES['docs/optimizers.md']
_RECORDS = optimizer_records.read()


_OPTIMIZER_FILES = [pathlib.PurePath(file).stem for file in gin_syntax.packaged_files('optimizers')]
# Their parameters are chosen by path, and those of the records have no such paths.
_BY_PATH = ('multi_optimizer', 'multi_optimizer_by_label')


def _optimizer_of(stem):
  """Returns the optimizer of the keyword-cloze recipe with that file after it."""
  texts = gin_utils.read(
    ['recipes/keyword_cloze.gin', f'optimizers/{stem}.gin'],
    [gin_syntax.read_flag('MODEL_DIR', 'runs/x', '--gin.MODEL_DIR=runs/x')],
  )
  return gin_utils.load('t5x_lite.apps.train.train', texts).argument('model').optimizer_def


def test_every_optimizer_has_a_file():
  makers = {
    name
    for name in optimizers.__all__
    if inspect.isfunction(getattr(optimizers, name))
    and getattr(optimizers, name).__annotations__.get('return')
    in (optimizers.OptaxWrapper, optimizers.MultiOptimizer)
  }
  assert len(makers) > 50 and {'adamw', 'partition', 'distributed_shampoo'} <= makers
  bound = set()
  for stem in _OPTIMIZER_FILES:
    text = (gin_syntax.packaged_folder() / f'optimizers/{stem}.gin').read_text()
    bound.update(re.findall(r'@optimizers\.(\w+)\(\)', text))
  assert makers | {'MultiOptimizer'} <= bound


@pytest.mark.parametrize('stem', [stem for stem in _OPTIMIZER_FILES if stem not in _BY_PATH])
def test_optimizers_have_the_state_that_is_recorded(stem):
  shapes = {f'm{i}': jax.ShapeDtypeStruct((512, 512 * (1 + i % 2)), jnp.float32) for i in range(16)}
  state = jax.eval_shape(_optimizer_of(stem).init_state, shapes)
  per_param = tree_utils.num_bytes(state) / tree_utils.num_elements(shapes)
  record = _RECORDS[stem, 'set']
  assert optimizer_records.state_text(per_param) == optimizer_records.state_text(
    record.bytes_per_param
  )


def test_every_optimizer_is_measured():
  assert optimizer_records.faults(_OPTIMIZER_FILES, _RECORDS) == []


def test_records_of_optimizers_are_measurements():
  num_params = {'set': 6_291_456, 't5_small': 76_961_152}
  for (name, params), record in _RECORDS.items():
    assert record.num_params == num_params[params], name
    datetime.date.fromisoformat(record.date)
    assert record.machine and record.step_ms > 0 and record.slowest_ms >= record.step_ms, name
    words = shlex.split(record.command)
    assert words[:2] == ['python', 'benchmarks/optimizers.py'] and '--record' in words, name
    assert '--only' not in words or name in words, name
    assert record.num_steps > 0 and min(record.matmul_gflops) > 0, name
    # A clock gives more digits than a person types.
    for milliseconds in (record.step_ms, record.adam_ms):
      assert milliseconds != float(f'{milliseconds:.3g}'), name


def test_optimizers_without_a_record_are_noticed():
  (fault,) = optimizer_records.faults([*_OPTIMIZER_FILES, 'my_adamw'], _RECORDS)
  assert fault.startswith('`my_adamw` has no record for set and t5_small')
  assert 'python benchmarks/optimizers.py --only my_adamw --record' in fault
  (fault,) = optimizer_records.faults(
    [stem for stem in _OPTIMIZER_FILES if stem != 'adamw'], _RECORDS
  )
  assert 'has a record of `adamw`' in fault


def test_optimizers_that_depend_on_the_layout_are_listed():
  (listed,) = re.findall(r'<!-- layout dependent -->\n\n(.*?)\n\n', _OPTIMIZERS, re.DOTALL)
  options = {'min_dim_size_to_factor', 'spread_roots', 'spread_refreshes'}
  assert set(_names(listed)) - options == set(layouts.LAYOUT_DEPENDENT)


@pytest.mark.parametrize(
  'name, graft', [('distributed_shampoo', 'RMSPROP_NORMALIZED'), ('soap', None)]
)
def test_the_states_that_the_page_compares_have_their_sizes(name, graft):
  (rows,) = [
    match['rows']
    for match in _TABLE.finditer(_OPTIMIZERS)
    if (match['kind'], match['what']) == ('state bytes', name)
  ]
  shapes = {
    'a': jax.ShapeDtypeStruct((512, 512), jnp.float32),
    'b': jax.ShapeDtypeStruct((512, 1024), jnp.float32),
  }
  defaults = {'graft_type': graft} if graft else {}
  for row in rows.splitlines()[2:]:
    said, number = [cell.strip() for cell in row.strip().strip('|').split('|')]
    options = {
      option: ast.literal_eval(value)
      for option, value in (text.split('=') for text in _names(said))
    }
    state = jax.eval_shape(getattr(optimizers, name)(**{**defaults, **options}).init_state, shapes)
    per_param = tree_utils.num_bytes(state) / tree_utils.num_elements(shapes)
    assert f'{per_param:.2g}' == number, said


def test_own_optimizers(shown_files):
  shown_files('docs/optimizers.md')
  params = {'a': jnp.ones([4, 3]), 'b': jnp.ones([3], jnp.bfloat16)}
  optimizer = importlib.import_module('my_optimizers').bounded_momentum(bound=0.5).create(params)
  new = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, params), learning_rate=0.1)
  np.testing.assert_allclose(new.target['a'], 1 - 0.1 * 0.1, rtol=1e-6)
  assert new.target['b'].dtype == jnp.bfloat16 and new.state.step == 1
  axes = {'a': PartitionSpec('embed', 'mlp'), 'b': PartitionSpec('mlp')}
  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  assert jax.tree.structure(derived) == jax.tree.structure(new)
  metrics = new.optimizer_def.metrics(new.state)
  lines = new.optimizer_def.report({name: float(value) for name, value in metrics.items()})
  assert set(lines) == {'largest momentum 0.1'}


# Commands of the page load the other one, which would register its module a second time.
_SHOWN_GIN_FILES = [
  ('docs/optimizers.md', 'recipes/keyword_cloze.gin', fence.name)
  for fence in docs_commands.read_fences('docs/optimizers.md', _OPTIMIZERS)
  if fence.name.endswith('.gin') and 'my_optimizers' not in fence.text
] + [('docs/moe.md', 'recipes/keyword_cloze_moe.gin', 'balanced.gin')]


@pytest.mark.parametrize('page, recipe, name', _SHOWN_GIN_FILES)
def test_shown_gin_files_load(page, recipe, name, shown_files):
  shown_files(page)
  texts = gin_utils.read(
    [recipe, name], [gin_syntax.read_flag('MODEL_DIR', 'runs/x', '--gin.MODEL_DIR=runs/x')]
  )
  model = gin_utils.load('t5x_lite.apps.train.train', texts).argument('model')
  assert isinstance(model.optimizer_def, optimizers.OptimizerDef)


# ----------------------------------------------------------------------------------------------------------------------
# Mixture of Experts

_MOE = _PAGES['docs/moe.md']


def _moe_metrics(kind):
  (rows,) = [
    match['rows']
    for match in _TABLE.finditer(_MOE)
    if (match['kind'], match['what']) == ('moe metrics', kind)
  ]
  return {name for row in rows.splitlines()[2:] for name in _names(row.split('|')[1])}


def test_moe_metric_names():
  layer = {name: (jnp.ones([4] * num_dims),) for name, num_dims in moe_metrics.SOWN.items()}
  _, metrics = moe_metrics.expert_losses_and_metrics(
    {'encoder': {'layers_1': {'mlp': layer}}}, 0.0, 0.0
  )
  prefix = 'experts/encoder/layers_1/'
  assert _moe_metrics('layer') == {
    name.removeprefix(prefix) for name in metrics if name.startswith(prefix)
  }
  assert _moe_metrics('model') == {name for name in metrics if not name.startswith(prefix)}


def test_moe_page_names_existing_objects():
  """Dotted names between backquotes that begin with `moe` or a module of it."""
  text = re.sub(r'```.*?```', '', _MOE, flags=re.DOTALL)
  dotted = re.compile(r'(?<![\w./@])(?:moe|planner|recording|upcycling|surgery)(?:\.[A-Za-z_]\w*)+')
  found = {name for code in _names(text) for name in dotted.findall(code)}
  assert len(found) > 6
  for name in found:
    assert pkgutil.resolve_name(name if name.startswith('moe.') else f'moe.{name}'), name


@pytest.mark.full  # by default, the layers and the balance are tested in tests/moe
def test_moe_page_shows_the_outputs_of_python(monkeypatch, capsys):
  """The page's network has the layers that it says, and balances as it says."""
  (shown, said) = re.search(
    r'```python\n(import jax\n.*?moe\.sparse_transformer.*?)```\n\n```text\n(.*?)```',
    _MOE,
    re.DOTALL,
  ).groups()
  exec(shown, {})  # pylint: disable=exec-used
  assert capsys.readouterr().out == said


def _moe_commands():
  return [
    shlex.split(line)[3:]
    for text in _PAGES.values()
    for block in _shell_blocks(text)
    for line in re.sub(r'\\\n', ' ', block).splitlines()
    if line.startswith('python -m moe ')
  ]


@pytest.mark.parametrize('argv', _moe_commands(), ids=' '.join)
def test_moe_commands_parse(argv):
  assert cli.parse(argv, moe_program.PROGRAM).command == argv[0]


# ----------------------------------------------------------------------------------------------------------------------
# Weights

_WEIGHTS = _PAGES['docs/weights.md']


def _weights_table(kind):
  (rows,) = [match['rows'] for match in _TABLE.finditer(_WEIGHTS) if match['kind'] == kind]
  return [
    [cell.strip() for cell in row.strip().strip('|').split('|')] for row in rows.splitlines()[2:]
  ]


def test_weights_families():
  listed = {}
  for family, _, architecture, files, logits, sentinels in _weights_table('weights families'):
    stem, sizes = re.fullmatch(r'models/(.*)_\{(.*)\}\.gin', _names(files)[0]).groups()
    listed[_names(family)[0]] = (
      stem,
      _names(architecture)[0],
      tuple(sizes.split(',')),
      logits,
      int(sentinels),
    )
  assert listed == {
    name: (
      name,
      family.architecture,
      tuple(hugging_face_gin.SIZES[name]),
      'by the embedding' if name in ('t5_1_0', 'switch') else 'own weights',
      family.extra_ids,
    )
    for name, family in hugging_face.FAMILIES.items()
  }


def test_weights_models():
  families, files = set(), set()
  for _, family, _, gin_files, compared in _weights_table('weights models'):
    families |= set(_names(family))
    assert compared
    for name in _names(gin_files):
      stem, _, sizes = name.removesuffix('.gin').partition('{')
      files |= {f'{stem}{size}.gin' for size in sizes.rstrip('}').split(',')}
  assert families <= set(hugging_face.FAMILIES)
  assert files <= set(gin_syntax.packaged_files())
  forms = {file for names in hugging_face_gin.FORMS.values() for file in names}
  assert {f'models/{name}.gin' for name in forms} <= files


def test_weights_forms():
  rows = _weights_table('weights forms')
  assert {_names(row[0])[0] for row in rows} == {*checkpoint_sources.FORMATS, 'peft'}
  assert [_names(row[0])[0] for row in rows if row[-1] == 'yes'] == list(convert.FORMATS)


def test_weights_page_shows_the_bindings_of_the_recipe(shown_files):
  """The page's gin block gives the network and vocabulary of the recipe."""
  shown = re.search(r'```gin\n((?:[^`]|`[^`])*?network_config\(\)[^`]*)```', _WEIGHTS)[1]
  folder = shown_files('docs/weights.md')
  (folder / 'shown.gin').write_text(shown)
  source = _ROOT / 'tests/golden/hugging_face/byt5_tiny'
  placeholders = {
    'MODEL_DIR': "'x'",
    'MIXTURE_OR_TASK_NAME': "'x'",
    'TRAIN_STEPS': '3',
    'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
    'INITIAL_CHECKPOINT_PATH': repr(str(source)),
  }
  made = [
    gin_utils.load(
      't5x_lite.apps.train.train', gin_utils.read([file], placeholders=placeholders)
    ).argument('model')
    for file in ('shown.gin', 'recipes/finetune_from_hf.gin')
  ]
  assert made[0].input_vocabulary == made[1].input_vocabulary == data.ByteVocabulary(125)
  assert made[0].module.config == dataclasses.replace(made[1].module.config, dtype='bfloat16')
