"""Saving: when (`policies`), what each process writes, what is deleted, and what a full or lost directory leaves."""
