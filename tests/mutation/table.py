"""All mutants."""

from tests.mutation import (
  checkpoints,
  configuration,
  data,
  decoding,
  moe,
  multiprocess,
  networks,
  optimizers,
  processes,
  sharding,
  stores,
  training,
)

MUTANTS = (
  *training.MUTANTS,
  *optimizers.MUTANTS,
  *sharding.MUTANTS,
  *checkpoints.MUTANTS,
  *configuration.MUTANTS,
  *networks.MUTANTS,
  *decoding.MUTANTS,
  *data.MUTANTS,
  *moe.MUTANTS,
  *processes.MUTANTS,
  *stores.MUTANTS,
  *multiprocess.MUTANTS,
)
