"""Locks of a model directory: of one process (`lock`), and in a store, where a lock is a lease."""
