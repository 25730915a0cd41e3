"""Commands of the program, in the order of `t5x_lite --help`."""

from t5x_lite.apps.chat import command as chat
from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.convert import command as convert
from t5x_lite.apps.evaluate import command as eval_command
from t5x_lite.apps.explain_sharding import command as explain_sharding
from t5x_lite.apps.export import command as export
from t5x_lite.apps.infer import command as infer
from t5x_lite.apps.jsonl_to_array_record import command as jsonl_to_array_record
from t5x_lite.apps.plot import command as plot
from t5x_lite.apps.precompile import command as precompile
from t5x_lite.apps.train import command as train
from t5x_lite.apps.vocab import command as vocab

COMMANDS: dict[str, Command] = {
    'train': train.COMMAND,
    'eval': eval_command.COMMAND,
    'infer': infer.COMMAND,
    'chat': chat.COMMAND,
    'export': export.COMMAND,
    'convert': convert.COMMAND,
    'vocab': vocab.COMMAND,
    'jsonl_to_array_record': jsonl_to_array_record.COMMAND,
    'precompile': precompile.COMMAND,
    'plot': plot.COMMAND,
    'explain_sharding': explain_sharding.COMMAND,
}
