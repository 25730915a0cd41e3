"""The process of `t5x_process.T5x`: runs T5X and answers each line of standard input with one measurement.

It imports T5X and what T5X needs, but nothing of this package.
"""

import importlib
import json
import os
import pathlib
import shutil
import sys
import time
import traceback

import common

_EMB_DIM, _NUM_HEADS, _HEAD_DIM, _MLP_DIM = 512, 6, 64, 1024


def _model(options, decode_fn=None):
  """Return T5X's model of T5 1.1 small; see `common.t5_small`."""
  import jax.numpy as jnp
  import seqio
  from t5x import adafactor
  from t5x import models
  from t5x import optimizers

  # T5X has two example networks; only the one with stacked layers can scan or rematerialize.
  remat, scan = options.get('remat', 'none'), options['scan']
  stacked = scan or remat != 'none'
  network = importlib.import_module(
    't5x.examples.scalable_t5.network' if stacked else 't5x.examples.t5.network'
  )
  config = network.T5Config(
    vocab_size=options['vocab'],
    dtype=jnp.dtype(options['dtype']),
    emb_dim=_EMB_DIM,
    num_heads=_NUM_HEADS,
    num_encoder_layers=options['layers'],
    num_decoder_layers=options['layers'],
    head_dim=_HEAD_DIM,
    mlp_dim=_MLP_DIM,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    logits_via_embedding=False,
    **({'scan_layers': scan, 'remat_policy': remat} if stacked else {}),
  )
  if options.get('optimizer') == 'adamw':
    optimizer_def = optimizers.adamw(1e-3)
  else:
    optimizer_def = adafactor.Adafactor(
      1e-3, logical_factor_rules=adafactor.standard_logical_factor_rules()
    )
  vocabulary = seqio.PassThroughVocabulary(options['vocab'])
  decoder = {} if decode_fn is None else {'decode_fn': decode_fn}
  return models.EncoderDecoderModel(
    network.Transformer(config), vocabulary, vocabulary, optimizer_def, z_loss=1e-4, **decoder
  )


def _partitioner():
  """Return a partitioner whose data axis has all devices, as `num_partitions=1` has on accelerators.

  On CPU T5X ignores `num_partitions`: the model axis has all devices of a process.
  """
  import jax
  import numpy as np
  from t5x import partitioning

  class DataParallelPartitioner(partitioning.PjitPartitioner):
    @property
    def mesh(self):
      return jax.sharding.Mesh(np.asarray(jax.devices()).reshape(-1, 1), ('data', 'model'))

  return DataParallelPartitioner(
    num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
  )


def _load(path):
  """Return the arrays of a file as {first part of the name: {rest of the name: array}}."""
  import numpy as np

  groups = {}
  with np.load(path) as arrays:
    for name, array in arrays.items():
      group, name = name.split('/', 1)
      groups.setdefault(group, {})[name] = array
  return groups


def _with_values(params, values):
  """Return (`params` with the arrays `values`, True), or (`params`, False) if the trees differ."""
  import flax
  import jax

  names = flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep='/')
  if {name: x.shape for name, x in names.items()} != {name: x.shape for name, x in values.items()}:
    return params, False
  placed = {name: jax.device_put(values[name], x.sharding) for name, x in names.items()}
  tree = flax.traverse_util.unflatten_dict(placed, sep='/')
  return (flax.core.freeze(tree) if isinstance(params, flax.core.FrozenDict) else tree), True


class Step:
  """Training step; see `bench_train_step.py`."""

  def __init__(self, options):
    import jax
    import jax.numpy as jnp
    from t5x import trainer
    from t5x import utils

    self._jax = jax
    groups = _load(options['arrays'])
    batch = groups['batch']
    self._model, self._partitioner = _model(options), _partitioner()
    initializer = utils.TrainStateInitializer(
      self._model.optimizer_def,
      self._model.get_initial_variables,
      {name: x.shape for name, x in batch.items()},
      self._partitioner,
      {name: x.dtype for name, x in batch.items()},
    )
    axes, data_spec = initializer.train_state_axes, self._partitioner.data_partition_spec

    def step(state, batch):
      return trainer.train_with_lr(
        state,
        batch,
        learning_rate=jnp.float32(1e-3),
        dropout_rng=jax.random.PRNGKey(0),
        model=self._model,
        num_microbatches=None,
        data_partition_spec=data_spec,
      )

    partitioned = self._partitioner.partition(
      step,
      in_axis_resources=(axes, data_spec),
      out_axis_resources=(axes, None),
      donate_argnums=(0,),
    )
    specs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    with self._partitioner.mesh:
      trace, lowered = common.timed(
        lambda: partitioned.lower(initializer.global_train_state_shape, specs)
      )
      compiling, self._step = common.timed(lowered.compile)
    self.facts = {'trace': trace, 'compile': compiling, **common.program_facts(self._step)}
    if options['compile_only']:
      return
    self.facts['init'], self._state = common.timed(
      lambda: jax.block_until_ready(initializer.from_scratch(jax.random.PRNGKey(0)))
    )
    params, self.facts['same_params'] = _with_values(self._state.params, groups['params'])
    self._state = self._state.replace_params(params)
    self._batch = jax.device_put(
      batch, jax.sharding.NamedSharding(self._partitioner.mesh, data_spec)
    )

  def step(self):
    """Return (seconds, loss) of a step."""
    spent, (self._state, metrics) = common.timed(
      lambda: self._jax.block_until_ready(self._step(self._state, self._batch))
    )
    return spent, float(metrics['loss'].compute())

  def compile_gradients(self):
    """Compile the forward and backward pass; return its temporaries in MB."""
    loss = self._jax.value_and_grad(
      lambda params, batch: self._model.loss_fn(params, batch, None)[0]
    )
    params = self._state.params
    with self._partitioner.mesh:
      program = self._jax.jit(loss).lower(params, self._batch).compile()
    self._gradients = lambda: self._jax.block_until_ready(program(params, self._batch))
    self._gradients()  # touches fresh memory
    return common.program_facts(program)['temporaries']

  def gradients(self):
    """Return the seconds of a forward and backward pass."""
    return common.timed(self._gradients)[0]


class Decode:
  """Decoding; see `decode.py`."""

  def __init__(self, options):
    import jax
    import jax.numpy as jnp

    self._jax, self._options, self.facts = jax, options, {}
    groups = _load(options['arrays'])
    rows, length = min(x.shape for x in groups['inputs'].values())
    variables = _model(options).get_initial_variables(
      jax.random.PRNGKey(0),
      {'encoder_input_tokens': (rows, length), 'decoder_input_tokens': (rows, 1)},
    )
    self._params, same = _with_values(variables['params'], groups['params'])
    if not same:
      raise ValueError("the parameters of T5X's example network differ from those of this package")
    self._batches = {
      int(rows): {
        'encoder_input_tokens': jnp.asarray(tokens),
        'decoder_input_tokens': jnp.zeros((tokens.shape[0], options['tokens']), jnp.int32),
      }
      for rows, tokens in groups['inputs'].items()
    }

  def compile(self, rows, search):
    """Compile a search, (name, num_decodes, options), for one of the batches; return its compile seconds and tokens."""
    import numpy as np
    from t5x import decoding

    jax, batch, rng = self._jax, self._batches[rows], self._jax.random.PRNGKey(2)
    name, num_decodes, search_options = search
    model = _model(self._options, getattr(decoding, name))
    parameters = {'eos_id': self._options['vocab'], **search_options}
    predict = jax.jit(
      lambda params, batch, rng: model.predict_batch_with_aux(
        params, batch, rng, decoder_params=parameters, num_decodes=num_decodes
      )[0]
    )
    spent, program = common.timed(lambda: predict.lower(self._params, batch, rng).compile())
    self._run = lambda: jax.block_until_ready(program(self._params, batch, rng))
    return spent, np.asarray(self._run()).tolist()

  def run(self):
    """Return the seconds of the search that was compiled last."""
    return common.timed(self._run)[0]


class Checkpoint:
  """Save and restore with T5X's Orbax interface and its former Checkpointer; see `bench_checkpoint.py`."""

  def __init__(self, options):
    import jax
    from t5x import train_state

    self._folder, self.facts = pathlib.Path(options['folder']), {}
    params = common.checkpoint_arrays(options['megabytes'])
    # The axes of every array, so that the partitioner can replicate them.
    import flax
    from flax.linen import partitioning

    axes = {
      f'{name}_axes': partitioning.AxisMetadata((None,) * x.ndim) for name, x in params.items()
    }
    self._state = train_state.InferenceState(
      step=jax.numpy.int32(1), params=flax.core.freeze(params), params_axes=flax.core.freeze(axes)
    )
    self._partitioner = _partitioner()

  def run(self):
    """Return the seconds of each part of a save and a restore."""
    import jax
    from t5x import checkpoints

    seconds = {}
    folder = self._folder / 'orbax'
    folder.mkdir()
    manager = checkpoints.OrbaxCheckpointManagerInterface(
      str(folder), self._state, self._partitioner
    )
    seconds['Orbax interface, save: training waits'], _ = common.timed(
      lambda: manager.save(self._state)
    )
    rest, _ = common.timed(manager.wait_until_finished)
    seconds['Orbax interface, save: until committed'] = (
      seconds['Orbax interface, save: training waits'] + rest
    )
    seconds['Orbax interface, restore'], restored = common.timed(
      lambda: jax.block_until_ready(manager.restore(step=1))
    )
    manager.close()
    shutil.rmtree(folder)
    folder = self._folder / 'checkpointer'
    folder.mkdir()
    manager = checkpoints.Checkpointer(self._state, self._partitioner, str(folder))
    seconds['Checkpointer, save: until committed'], _ = common.timed(
      lambda: manager.save(self._state)
    )
    seconds['Checkpointer, restore'], restored = common.timed(
      lambda: jax.block_until_ready(manager.restore(step=1))
    )
    del restored
    shutil.rmtree(folder)
    return seconds


def _start(checkout, phase, options):
  """Import T5X; return the phase that is measured, and facts about it."""
  if options.get('num_devices'):
    os.environ['XLA_FLAGS'] = (
      f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={options["num_devices"]}'
    )
    os.environ['JAX_PLATFORMS'] = 'cpu'
  start = time.perf_counter()
  import jax
  from t5x import trainer  # noqa: F401  What the command `train` imports first.

  jax.devices()
  seconds = time.perf_counter() - start
  import t5x

  found = pathlib.Path(t5x.__file__).parent.parent
  if found != pathlib.Path(checkout).resolve():
    raise ImportError(f'{found} was imported instead')
  running = {'Step': Step, 'Decode': Decode, 'Checkpoint': Checkpoint}[phase](options)
  return running, {'import': seconds, 'jax': jax.__version__, **running.facts}


def main() -> None:
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # what libraries print is no answer
  running = None
  for line in sys.stdin:
    method, arguments = json.loads(line)
    try:
      if method == 'start':
        running, result = _start(**arguments)
      else:
        result = getattr(running, method)(**arguments)
      answer = {'result': result}
    except Exception as e:  # the other process reports it
      traceback.print_exc()
      answer = {'error': f'{type(e).__name__}: {e}'}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == '__main__':
  main()
