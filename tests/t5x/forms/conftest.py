"""Files of the small projects are imported by the tests, where `t5x` means t5x_lite."""

collect_ignore_glob = ['*/*']
