"""The contract of optimizers, checks of their options, and their state dicts."""
