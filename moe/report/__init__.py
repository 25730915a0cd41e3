"""A report about the routing of a run: `data` reads it, `findings` judges, `figures` draws, `page` writes."""

from moe.report.data import History, Layer, read
from moe.report.page import write

__all__ = ['History', 'Layer', 'read', 'write']
