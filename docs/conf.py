"""Sphinx configuration: the pages are Markdown and read as well on their own."""

project = 't5x_lite'
extensions = ['myst_parser']
exclude_patterns = ['_build']
myst_heading_anchors = 3
