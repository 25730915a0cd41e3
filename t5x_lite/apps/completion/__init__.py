"""Tab completion: scripts of shells."""
