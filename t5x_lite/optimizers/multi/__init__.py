"""`MultiOptimizer` and the selection of its parameters."""
