"""`moe.tools.planner` under its earlier name: importing either gives the same module."""

import sys

from moe.tools import planner

sys.modules[__name__] = planner
