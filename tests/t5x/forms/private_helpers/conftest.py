"""The module of the project is imported by its test, where `t5x` means t5x_lite."""

collect_ignore_glob = ['*.py']
