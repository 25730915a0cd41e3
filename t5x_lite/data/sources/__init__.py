"""Data sources: the contract and the registry (`base`), and the sources of this package."""
