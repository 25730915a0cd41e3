"""The commands of `python -m moe`, in the order of its `--help`."""

from moe.commands import plan
from moe.commands import report
from moe.commands import surgery
from t5x_lite.apps.common.flags import Command

COMMANDS: dict[str, Command] = {
  'report': report.COMMAND,
  'plan': plan.COMMAND,
  'surgery': surgery.COMMAND,
}
