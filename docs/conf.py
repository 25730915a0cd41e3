"""Sphinx configuration: Markdown pages and notebooks. `make reference` has written the pages of the reference.

A build executes the notebooks, each in an empty folder, and fails where a cell fails.
"""

import functools
import os
import sys

import nbclient
from pygments.lexers.python import PythonLexer

project = 't5x_lite'
project_copyright = 'the t5x_lite authors'
html_title = 't5x_lite'
html_show_sphinx = False
html_static_path = ['_static']
html_extra_path = ['../llms.txt']
html_css_files = ['tables.css']
smartquotes_action = 'D'  # quotes stay as they are typed
html_theme = 'furo'
extensions = ['myst_nb']
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

# The menu has the pages of the reference below its first one. GitHub would show this block as text.
_REFERENCE_MENU = """
```{toctree}
:hidden:
:glob:

flags
macros
gin_files
parameters
t5x_names
optimizer_measurements
api/*
```
"""


def _add_menu(app, docname, source):
  """Adds the menu of the reference to its first page."""
  if docname == 'reference/index':
    source[0] += _REFERENCE_MENU


def setup(app):
  """Colours gin files as Python, which they resemble, and adds the menu of the reference."""
  app.add_lexer('gin', PythonLexer)
  app.connect('source-read', _add_menu)
