"""Restoring: which checkpoint (`choice`), names and shapes that change, and placing arrays one by one."""
