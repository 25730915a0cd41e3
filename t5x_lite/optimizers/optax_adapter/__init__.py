"""Transformations of optax as optimizers."""
