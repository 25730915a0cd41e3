"""The commands of the program, in the order in which `t5x_lite --help` lists them."""

from t5x_lite.commands import chat, convert, explain_sharding, export, infer, jsonl_to_array_record
from t5x_lite.commands import plot, precompile, train, vocab
from t5x_lite.commands import eval as eval_command
from t5x_lite.commands.common import Command

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
