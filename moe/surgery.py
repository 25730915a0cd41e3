"""`moe.tools.surgery` under its earlier name: importing either gives the same module."""

import sys

from moe.tools import surgery

sys.modules[__name__] = surgery
