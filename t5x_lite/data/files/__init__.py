"""Files of records: JSON lines and TSV (`records`), array records (`grain_records`), copies of remote files."""
