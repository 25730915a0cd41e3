"""Storage of runs: the folders that this process has open."""
