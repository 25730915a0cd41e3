"""`t5x_lite completion`: print the script by which a shell completes command lines of t5x_lite.

The scripts pass the command line up to the cursor to `t5x_lite completion --line`, which prints what may stand there.
"""

import argparse
import sys

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show

# Bash replaces only $2, what follows the last sign of COMP_WORDBREAKS in a word, such as `=`, and adds a space unless
# `nospace` is set.
_BASH = r"""_t5x_lite() {
  local IFS=$'\n'
  local line=${COMP_LINE:0:COMP_POINT}
  local word=${line##*[[:space:]]} replaced=${2//[\"\'\\]}
  word=${word//[\"\'\\]}
  COMPREPLY=($(printf %s "$line" | t5x_lite completion --line 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"${word%"$replaced"}"}")
  [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == *[=/._] ]] && compopt -o nospace
  return 0
}
complete -F _t5x_lite t5x_lite
"""
_ZSH = r"""_t5x_lite() {
  local -a found=(${(f)"$(print -rn -- ${words[1,CURRENT-1]} "$PREFIX" | t5x_lite completion --line 2>/dev/null)"})
  compadd -S '' -- ${(M)found:#*[=/._]}
  compadd -- ${found:#*[=/._]}
  (( $#found ))
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _t5x_lite t5x_lite
"""
_FISH = r"""complete -c t5x_lite -f -a '(commandline -cp | t5x_lite completion --line 2>/dev/null)'
"""
SCRIPTS = {'bash': _BASH, 'zsh': _ZSH, 'fish': _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'shell',
    nargs='?',
    choices=tuple(SCRIPTS),
    help='print its script. bash: add `source <(t5x_lite completion bash)` to ~/.bashrc; zsh: the same with zsh '
    'in ~/.zshrc; fish: t5x_lite completion fish > ~/.config/fish/completions/t5x_lite.fish',
  )
  parser.add_argument(
    '--line',
    action='store_true',
    help='instead read a command line up to the cursor from standard input, and print what may stand at the '
    'cursor, one a line; the scripts call this',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status.

  Raises:
    ConfigError: no shell is named.
  """
  flags = invocation.flags
  if flags.line == (flags.shell is not None):
    raise ConfigError(
      'completion must have a shell or --line. Write `t5x_lite completion bash`, zsh or fish.'
    )
  if flags.line:
    from t5x_lite.apps.completion import candidates

    for word in candidates.candidates(sys.stdin.read().removesuffix('\n')):
      print(word)
  else:
    show(SCRIPTS[flags.shell].rstrip('\n'))
  return ExitCode.OK
