"""Muon with units of parameters as matrices; `optimizers.muon`, which cannot be the name of this package too."""
