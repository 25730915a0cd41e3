"""Sphinx configuration: the pages are Markdown and read as well on their own."""

from pygments.lexers.python import PythonLexer

project = 't5x_lite'
extensions = ['myst_parser']
exclude_patterns = ['_build']
myst_heading_anchors = 3


def setup(app):
  """Has gin files coloured as Python, which they resemble."""
  app.add_lexer('gin', PythonLexer)
