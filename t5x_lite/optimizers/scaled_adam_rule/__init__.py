"""ScaledAdam."""
