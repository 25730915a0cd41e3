"""All mutants."""

from tests.mutation import (
    checkpoints, configuration, data, decoding, moe, networks, optimizers, processes, sharding, training)

MUTANTS = (
    *training.MUTANTS, *optimizers.MUTANTS, *sharding.MUTANTS, *checkpoints.MUTANTS, *configuration.MUTANTS,
    *networks.MUTANTS, *decoding.MUTANTS, *data.MUTANTS, *moe.MUTANTS,
    *processes.MUTANTS)
