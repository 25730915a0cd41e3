"""Optax's transformations as optimizers."""
