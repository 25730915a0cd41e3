"""Sphinx configuration: Markdown pages and notebooks, and an API reference made of docstrings.

A build executes the notebooks, each in an empty folder, and fails where a cell fails.
"""

import functools
import importlib
import inspect
import os
import pathlib
import re
import shutil
import sys
import textwrap
import types

import nbclient
from pygments.lexers.python import PythonLexer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # `tables` imports `benchmarks`
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tables  # pylint: disable=wrong-import-position

project = 't5x_lite'
project_copyright = 'the t5x_lite authors'
html_title = 't5x_lite'
html_show_sphinx = False
html_static_path = ['_static']
html_css_files = ['tables.css']
smartquotes_action = 'D'  # quotes stay as they are typed
html_theme = 'furo'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
exclude_patterns = ['_build', 'jupyter_execute']  # the second has executed notebooks
myst_heading_anchors = 3

# The cells call `t5x_lite`, `python` and `bash`: those of the environment that builds.
os.environ['PATH'] = os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
nb_execution_mode = 'force'
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
suppress_warnings = ['myst-nb.lexer']  # cells that are not executed have no colours
# IPython writes the output of `%%bash` in pieces of 100 bytes: join them. The kernel runs on the machine that
# builds, so its warning about TCP without encryption does not apply.
nbclient.NotebookClient.__init__ = functools.partialmethod(
  nbclient.NotebookClient.__init__,
  coalesce_streams=True,
  extra_arguments=['--IPKernelApp.log_level=ERROR'],
)

# Names in backquotes link to their documentation.
default_role = 'py:obj'
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autodoc_default_options = {'members': True, 'show-inheritance': True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # signatures have them
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# Public modules by subject, in the order of the reference.
_MODULES = {
  'Commands as functions': [
    't5x_lite.apps.train',
    't5x_lite.apps.evaluate',
    't5x_lite.apps.infer',
    't5x_lite.apps.convert',
    't5x_lite.apps.export',
    't5x_lite.apps.precompile',
    't5x_lite.apps.vocab',
    't5x_lite.apps.plot',
    't5x_lite.apps.report',
    't5x_lite.apps.explain_sharding',
    't5x_lite.apps.chat',
    't5x_lite.notebook',
    't5x_lite.interactive',
    't5x_lite.interactive_model',
    't5x_lite.gin_utils',
  ],
  'Training': [
    't5x_lite.trainer',
    't5x_lite.trainer.train_step',
    't5x_lite.train_state',
    't5x_lite.trainer.state_init',
    't5x_lite.trainer.actions',
    't5x_lite.trainer.non_finite',
    't5x_lite.losses',
    't5x_lite.metrics',
    't5x_lite.schedules',
    't5x_lite.trainer.summaries',
    't5x_lite.runtime',
  ],
  'Models': [
    't5x_lite.models',
    't5x_lite.networks',
    't5x_lite.networks.t5',
    't5x_lite.networks.decoder_only',
    't5x_lite.layers',
    't5x_lite.decoding',
  ],
  'Optimizers': ['t5x_lite.optimizers', 't5x_lite.adafactor'],
  'Data and evaluation': [
    't5x_lite.data',
    't5x_lite.data.batches.positions',
    't5x_lite.data.vocabularies',
    't5x_lite.data.tokenizer_folders',
    't5x_lite.data.files.grain_records',
    't5x_lite.evaluation',
  ],
  'Devices and checkpoints': [
    't5x_lite.partitioning',
    't5x_lite.checkpoints',
    't5x_lite.checkpoints.sources',
    't5x_lite.checkpoints.hugging_face',
    't5x_lite.checkpoints.hugging_face.network',
    't5x_lite.errors',
  ],
  'Mixture of Experts': [
    'moe',
    'moe.routing',
    'moe.dispatch',
    'moe.metrics',
    'moe.models',
    'moe.networks',
    'moe.partitioner',
    'moe.recording',
    'moe.tools.planner',
    'moe.tools.surgery',
    'moe.tools.report',
  ],
}


def _public_objects(module: types.ModuleType) -> dict[str, object]:
  """Returns the public objects of a module by name: those in `__all__`, or the classes and functions defined in it."""
  if hasattr(module, '__all__'):
    return {name: getattr(module, name) for name in module.__all__}
  return {
    name: value
    for name, value in vars(module).items()
    if not name.startswith('_') and getattr(value, '__module__', None) == module.__name__
  }


def _write_reference(folder: pathlib.Path) -> None:
  """Writes a page for each public module, and the index of them.

  A class or function that several modules offer is described in the one that is closest to its definition.
  """
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  names = [name for modules in _MODULES.values() for name in modules]
  public = {name: _public_objects(importlib.import_module(name)) for name in names}
  homes = {}
  for name in names:
    for value in public[name].values():
      if callable(value):
        homes.setdefault(id(value), []).append(name)

  def home(value):
    # The longest prefix that the path of the definition shares with an offering module, then the first in the list.
    return max(
      homes[id(value)],
      key=lambda name: len(os.path.commonprefix([name, getattr(value, '__module__', '')])),
    )

  index = ['# API reference', '']
  for subject, modules in _MODULES.items():
    index += [f'## {subject}', '', '```{toctree}', ':maxdepth: 1', '', *modules, '```', '']
    for module in modules:
      elsewhere = {
        name: home(value)
        for name, value in public[module].items()
        if callable(value) and home(value) != module
      }
      lines = [module, '=' * len(module), '', f'.. automodule:: {module}']
      if hasattr(importlib.import_module(module), '__all__'):
        lines.append('   :imported-members:')
      if elsewhere:
        links = ', '.join(
          f':py:obj:`{name} <{owner}.{name}>`' for name, owner in sorted(elsewhere.items())
        )
        lines += [
          f'   :exclude-members: {", ".join(sorted(elsewhere))}',
          '',
          f'Described elsewhere: {links}.',
        ]
      for name, value in sorted(public[module].items()):
        if (
          not inspect.isclass(value)
          and not inspect.isroutine(value)
          and not inspect.ismodule(value)
        ):
          # What autodoc leaves out: functions with custom derivatives, type aliases and constants.
          lines += [
            '',
            f'.. autofunction:: {name}'
            if hasattr(value, '__wrapped__')
            else f'.. py:data:: {name}\n   :value: {textwrap.shorten(str(value), 200)}',
          ]
      (folder / f'{module}.rst').write_text('\n'.join(lines) + '\n')
  (folder / 'index.md').write_text('\n'.join(index))


def _list_table(table: re.Match) -> str:
  """Returns a Markdown table as a directive."""
  rows = [[cell.strip() for cell in line.strip('| ').split('|')] for line in table[0].splitlines()]
  rows = [
    [''] * (len(rows[1]) - len(row)) + row for row in rows
  ]  # `strip` has taken an empty first cell
  lines = ['.. list-table::', '   :header-rows: 1', '']
  for row in rows[:1] + rows[2:]:
    lines += [f'   {"*" if k == 0 else " "} - {cell}' for k, cell in enumerate(row)]
  return '\n'.join(lines) + '\n'


def _to_restructured_text(app, what, name, obj, options, lines):
  """Converts a Markdown docstring to reStructuredText in place."""
  text = re.sub(r':doc:`[^`]*`', "in optax's documentation", '\n'.join(lines))
  text = re.sub(r'(?m)^(?:\|.*\n?)+', _list_table, text)
  text = re.sub(r':\n\n(?= {4}\S)', '::\n\n', text)  # four spaces mark code
  text = re.sub(
    r'(?m)^( *)([^-\s].*)\n(?=\1- )', r'\1\2\n\n', text
  )  # a list begins after an empty line
  parts = re.split(r'(:\w+:`[^`]*`|``.*?``|`[^`]*`_{0,2})', text, flags=re.DOTALL)
  parts[::2] = [re.sub(r'(?<=[\[( ])(\*+)(?=\w)', r'\\\1', part) for part in parts[::2]]
  for k in range(1, len(parts), 2):
    if re.match(r'\w', parts[k + 1]):
      parts[k] += '\\ '
  lines[:] = ''.join(parts).split('\n')


def _make_tables(app, docname, source):
  """Replaces the blocks of a page that `tables` knows, and links the API reference, which only a build has."""
  expanded = tables.expand(source[0]).replace(
    'API reference (built by `make docs`)', '[API reference](api/index.md)'
  )
  if expanded != source[0]:
    source[0] = expanded
    app.env.note_reread()


def setup(app):
  """Colours gin files as Python, which they resemble, makes the tables of parameters, and writes the reference."""
  app.add_lexer('gin', PythonLexer)
  app.connect('source-read', _make_tables)
  app.connect('autodoc-process-docstring', _to_restructured_text, priority=900)
  _write_reference(pathlib.Path(app.srcdir) / 'api')
