"""Mixture of Experts on top of t5x_lite: partitioning, routing, dispatch, layers and models arrive with their issue."""
