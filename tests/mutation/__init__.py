"""Mutants of the central modules, each with a test that must fail for it; `python -m tests.mutation` runs them."""
