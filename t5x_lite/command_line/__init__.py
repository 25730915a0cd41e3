"""The command line: its program (`cli`), flags, streams, and the messages of errors that end a command."""
