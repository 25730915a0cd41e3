"""Interface of optimizers, their state dicts, and hooks of states."""
