"""T5X's classes and functions of checkpoints. Only lazy exports and the options `checkpointer_cls` lead here."""
