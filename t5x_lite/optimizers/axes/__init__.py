"""Logical axes of optimizer states, derived from those of the parameters."""
