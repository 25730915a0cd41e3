"""`moe.tools.report` under its earlier name: importing either gives the same module."""

import sys

from moe.tools import report

sys.modules[__name__] = report
