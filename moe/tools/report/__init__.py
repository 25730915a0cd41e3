"""A report about the routing of a run: `data` reads it, `findings` judges, `figures` draws, `page` writes."""

from moe.tools.report.data import History, Layer, read
from moe.tools.report.page import write

__all__ = ['History', 'Layer', 'read', 'write']
