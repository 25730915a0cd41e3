"""All mutants."""

from tests.mutation import checkpoints
from tests.mutation import configuration
from tests.mutation import data
from tests.mutation import decoding
from tests.mutation import moe
from tests.mutation import multiprocess
from tests.mutation import networks
from tests.mutation import optimizers
from tests.mutation import processes
from tests.mutation import sharding
from tests.mutation import stores
from tests.mutation import subclassing
from tests.mutation import trackers
from tests.mutation import training

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
  *subclassing.MUTANTS,
  *trackers.MUTANTS,
  *multiprocess.MUTANTS,
)
