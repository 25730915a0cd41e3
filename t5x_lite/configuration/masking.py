"""Masks of secrets in command lines, for records and log lines.

A secret is the value of a flag, a macro or an environment variable whose name ends with a word such as *key* or
*token*, and the password of a URL.
"""

from collections.abc import Iterator, Sequence
import functools
import re
import shlex

MASK = '***'
# Ends of words of names, also in the plural and without a separator (APIKEY).
_SECRET = re.compile(
  '[a-z]*?(key|token|secret|password|passwd|passphrase|pwd|credential|authorization)s?'
)
# Last words of names whose values say where something is or how much of it there is.
_HARMLESS_ENDS = ('file', 'path', 'dir', 'folder', 'ids', 'axes', 'fn', 'length', 'lengths')
# Names of numbers too, such as num_tokens.
_MAY_BE_PLAIN = re.compile('[a-z]*?(key|token)s?')
# Options of this package: names of features and of fields of JSON lines.
_OWN_OPTIONS = ('inputs_key', 'targets_key', 'task_keys')
_OWN_OPTIONS_OF = ('SpanCorruption.key', 'file_task.keys')
# Words next to `key` and `token` in names of fields and of tokens in texts, such as text_key and EOS_TOKEN.
_HARMLESS_WORDS = re.compile(
  'bos|cls|column|end|eos|features?|fields?|inputs?|json|labels?|mask|metric|outputs?|pad|padding|predictions?|sep|'
  'separator|special|start|stop|targets?|text|type|unk'
)
_OWN_FLAGS = ('--key',)
# Flags whose value is text of gin.
_TEXT_FLAGS = ('--gin_bindings', '-gin_bindings')
_WORDS = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+')
# Numbers, truth values, references and macros of gin, and lists of numbers.
_PLAIN_VALUE = re.compile(r'[\d.,eE+\s()\[\]-]*|None|True|False|true|false|[@%].*')
_PASSWORD_OF_URL = re.compile(r'(?<=://)([^\s/:@\'"]*):([^\s/\'"]+)(?=@)')
_ITEM = re.compile(r'([\w./-]+)(["\']?\s*[:=]\s*)(["\'])(.*?)\3')
_QUERY = re.compile(r'(?<=[?&;])([\w.-]+)(=)([^&;\s\'"]+)')
# Shorter values may be a part of any text.
_MIN_VALUE = 6


def is_secret_name(name: str) -> bool:
  """Return whether the value of a flag, macro, parameter or environment variable is a secret, by its name.

  >>> [is_secret_name(name) for name in ('--gin.mine.load.api_key', 'HF_TOKEN', 'DB_PASSWORD', 'sshKey')]
  [True, True, True, True]
  >>> [is_secret_name(name) for name in ('--gin.TRAIN_STEPS', 'recipes/keyword_cloze', '--cluster_secret_file')]
  [False, False, False]
  >>> [is_secret_name(name) for name in ('--gin.mine.task.text_key', 'EOS_TOKEN', 'data.SpanCorruption.key')]
  [False, False, False]
  """
  parts = re.split('[./]', name.strip())
  last = parts[-1]
  if name in _OWN_FLAGS or last in _OWN_OPTIONS or '.'.join(parts[-2:]) in _OWN_OPTIONS_OF:
    return False
  words = _words(last)
  if not words or words[-1] in _HARMLESS_ENDS:
    return False
  if any(map(_HARMLESS_WORDS.fullmatch, words)) and _may_be_plain(words):
    return False
  return any(map(_SECRET.fullmatch, words))


def _words(name: str) -> list[str]:
  return [word.lower() for word in _WORDS.findall(name)]


def masked_value(name: str, value: str) -> str:
  """Return the text of a value, or a mask if the name of its option is that of a secret."""
  if is_secret_name(name) and not _is_plain(name, value):
    return MASK
  return value


def masked_words(words: Sequence[str]) -> list[str]:
  """Return the words of a command line with a mask instead of each secret."""
  result = []
  is_value = False
  for word in words:
    if is_value and not word.startswith('-'):
      masked = MASK
    else:
      masked = _masked_word(word)
    result.append(masked)
    is_value = word.startswith('-') and '=' not in word and is_secret_name(word)
  return result


def masked_command(words: Sequence[str]) -> str:
  """Return a command line for a shell, with a mask instead of each secret."""
  return shlex.join(masked_words(words)).replace(f"'{MASK}'", MASK)


def masked_text(text: str, words: Sequence[str]) -> str:
  """Return a message with a mask instead of passwords of URLs, and of the secrets of a command line.

  Args:
    text: the message.
    words: the command line, whose values the message may repeat.
  """
  if '://' in text:
    text = _PASSWORD_OF_URL.sub(rf'\1:{MASK}', text)
    text = _QUERY.sub(_masked_item, text)
  for value in _values(tuple(words)):
    text = text.replace(value, MASK)
  return text


def _masked_word(word: str) -> str:
  if '\n' in word:  # text of gin
    return '\n'.join(map(_masked_word, word.split('\n')))
  head, equals, value = word.partition('=')
  if equals and head in _TEXT_FLAGS:
    return f'{head}={_masked_word(value)}'
  if equals and masked_value(head, value) != value:
    return f'{head}={MASK}'
  word = _ITEM.sub(_masked_item, word)
  word = _QUERY.sub(_masked_item, word)
  return _PASSWORD_OF_URL.sub(rf'\1:{MASK}', word)


def _masked_item(match: re.Match[str]) -> str:
  name, separator, *quotes, value = match.groups()
  quote = ''.join(quotes)
  return f'{name}{separator}{quote}{masked_value(name, value)}{quote}'


def _is_plain(name: str, value: str) -> bool:
  """Return whether a value is a number, a truth value or a name of gin, and `name` may be that of one."""
  if _PLAIN_VALUE.fullmatch(value.strip()) is None:
    return False
  return _may_be_plain(_words(name))


def _may_be_plain(words: Sequence[str]) -> bool:
  """Return whether the secret ones among the words of a name are only keys and tokens."""
  return all(map(_MAY_BE_PLAIN.fullmatch, filter(_SECRET.fullmatch, words)))


@functools.lru_cache(maxsize=8)
def _values(words: tuple[str, ...]) -> tuple[str, ...]:
  """Return the secrets of a command line that are long enough to be found in a text, without quotes.

  Longer ones come first. The result is kept, since each log line needs it.
  """
  found = set()
  for word, masked in zip(words, masked_words(words), strict=True):
    if word != masked:
      found.update(_values_of(word, masked))
  return tuple(sorted(found, key=len, reverse=True))


def _values_of(word: str, masked: str) -> Iterator[str]:
  pattern = '(.*?)'.join(map(re.escape, masked.split(MASK)))
  match = re.fullmatch(pattern, word, re.DOTALL)
  assert match is not None  # each mask replaces a part of the word
  for value in match.groups():
    value = value.strip().strip('\'"')
    if len(value) >= _MIN_VALUE:
      yield value
