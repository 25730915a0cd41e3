"""Report about the routing of a run: `data` reads, `findings` summarizes, `figures` draws, `page` writes."""

from moe.tools.report.data import History
from moe.tools.report.data import Layer
from moe.tools.report.data import read
from moe.tools.report.html_page import write

__all__ = ['History', 'Layer', 'read', 'write']
