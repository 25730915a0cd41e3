"""Benchmarks: one script and one table each; see docs/benchmarks.md."""
