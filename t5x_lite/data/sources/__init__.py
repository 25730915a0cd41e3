"""Data sources: the interface and the registry (`base`), and the sources of t5x_lite."""
