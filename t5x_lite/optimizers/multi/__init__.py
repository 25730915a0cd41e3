"""Several optimizers at once, and how their parameters are selected."""
