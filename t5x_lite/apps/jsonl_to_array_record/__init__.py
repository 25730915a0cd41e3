"""Conversion of JSON lines to array records: the flags of `t5x_lite jsonl_to_array_record`."""
