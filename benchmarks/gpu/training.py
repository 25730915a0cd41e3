"""Part 'training': T5 1.1 in bfloat16 with float32 parameters and Adafactor, unpacked rows, at the largest batch.

The batch is searched by powers of two: a program whose memory exceeds the device's is not run, and one that runs out of
memory halves the batch. The step is that of `Trainer`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import time
from typing import Any

from benchmarks import common
from benchmarks.gpu import items


@dataclasses.dataclass(frozen=True)
class Case:
  """A model and its training.

  Attributes:
    emb_dim: width.
    num_heads: heads of 64 each.
    num_layers: layers of the encoder, and of the decoder.
    mlp_dim: hidden units.
    batch: first batch that is tried on a device of 80 GB.
    goal: sequences per second that one H100 should reach; None for none.
    num_experts: experts of every second layer, with one choice per token; 0 for a dense model.
    lengths: tokens of inputs and targets.
    vocab_size: rows of the embedding.
    options: further fields of `T5Config`.
  """

  emb_dim: int
  num_heads: int
  num_layers: int
  mlp_dim: int
  batch: int
  goal: float | None = None
  num_experts: int = 0
  lengths: tuple[int, int] = (512, 128)
  vocab_size: int = 32128
  options: tuple[tuple[str, Any], ...] = ()


_SMALL = Case(512, 6, 8, 1024, 512)
BASE = Case(768, 12, 12, 2048, 256, goal=900)
_LARGE = Case(1024, 16, 24, 2816, 64, goal=260)
_XL = Case(2048, 32, 24, 5120, 32, goal=80)
TINY = Case(64, 2, 2, 128, 2, lengths=(16, 8), vocab_size=256)
# A search ends at this batch, so that the rehearsal on a CPU does.
_LARGEST_BATCH = {'real': 4096, 'tiny': 4}
# Steps of a measurement, after two that do not count.
_NUM_STEPS = {'real': 8, 'tiny': 2}
# Seconds of a case.
_LIMIT = 100.0
# Share of the device's memory that programs may need: the rest is fragments and the programs themselves.
_MEMORY_SHARE = 0.97
# Bytes from which a device takes twice the first batch.
_LARGE_DEVICE = 110e9


def _with(case: Case, batch: int | None = None, **options) -> Case:
  return dataclasses.replace(
    case, batch=batch or case.batch, goal=None, options=tuple(options.items())
  )


# Models with goals first: what follows may be cut off by the limit of the part.
_CASES: Mapping[str, Mapping[str, Case]] = {
  'real': {
    'base': BASE,
    'large': _LARGE,
    'xl': _XL,
    'small': _SMALL,
    # If a fused kernel of the GPU fails, there are still figures.
    'base, blockwise attention': _with(BASE, attention_kernel='blockwise'),
    'base, all logits at once': _with(BASE, loss_chunk_size=0),
    'large, remat minimal': _with(_LARGE, 128, remat_policy='minimal'),
    'large, remat full': _with(_LARGE, 512, remat_policy='full'),
    'xl, remat full': _with(_XL, 256, remat_policy='full'),
    'base, remat minimal': _with(BASE, 512, remat_policy='minimal'),
    'base, remat save_attention': _with(BASE, 1024, remat_policy='save_attention'),
  },
  'tiny': {
    'dense': TINY,
    'all logits at once': _with(TINY, 4, loss_chunk_size=0),
    'remat full': _with(TINY, 4, remat_policy='full'),
  },
}


def model_of(case: Case, decode_fn: Any = None) -> Any:
  """Return the model of a case."""
  from t5x_lite import adafactor
  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  config = t5.T5Config(
    vocab_size=case.vocab_size,
    dtype='bfloat16',
    emb_dim=case.emb_dim,
    num_heads=case.num_heads,
    num_encoder_layers=case.num_layers,
    num_decoder_layers=case.num_layers,
    head_dim=64,
    mlp_dim=case.mlp_dim,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    logits_via_embedding=False,
    **dict(case.options),
  )
  vocabulary = vocabularies.PassThroughVocabulary(case.vocab_size)
  rules = adafactor.standard_logical_factor_rules()
  model_cls = models.EncoderDecoderModel
  network = {}
  losses = {}
  if case.num_experts:
    import moe
    from moe import models as moe_models

    rules = moe.logical_factor_rules()
    model_cls = moe_models.MoeEncoderDecoderModel
    network['feed_forward_fn'] = moe.SparseFeedForward(
      block=moe.SparseBlock(
        num_experts=case.num_experts, router=moe.TokensChooseRouter(case.num_experts)
      ),
      num_encoder_layers=case.num_layers,
      num_decoder_layers=case.num_layers,
      num_encoder_sparse_layers=case.num_layers // 2,
      num_decoder_sparse_layers=case.num_layers // 2,
    )
    losses['aux_loss_factor'] = 0.01
  if decode_fn is not None:
    losses['decode_fn'] = decode_fn
  return model_cls(
    t5.Transformer(config, **network),
    vocabulary,
    vocabulary,
    adafactor.Adafactor(1e-3, logical_factor_rules=rules),
    z_loss=1e-4,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
    **losses,
  )


def shapes_of(case: Case, batch: int) -> dict[str, tuple[int, int]]:
  """Return the shapes of a batch by feature."""
  inputs, targets = case.lengths
  return {
    'encoder_input_tokens': (batch, inputs),
    'decoder_input_tokens': (batch, targets),
    'decoder_target_tokens': (batch, targets),
    'decoder_loss_weights': (batch, targets),
  }


class Step:
  """Training step of a case at a batch size.

  Attributes:
    batch: a batch of random tokens, on the device.
    trainer: the `Trainer`, with the shapes of a state.
  """

  def __init__(self, case: Case, batch_size: int):
    """Trace the state; compute only a batch."""
    from t5x_lite import partitioning

    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    if case.num_experts:
      import moe

      partitioner = moe.MoePjitPartitioner(
        num_expert_partitions=1,
        num_partitions=1,
        logical_axis_rules=moe.head_logical_axis_rules(1, 1),
      )
    setup = common.training(
      model_of(case), partitioner, shapes_of(case, batch_size), case.vocab_size
    )
    self.batch = setup.batch
    self.trainer = common.trainer(setup)
    self._jitted = self.trainer.partitioned_train_step()

  def trace(self) -> Any:
    """Return the traced step, from shapes."""
    return self._jitted.trace(self.trainer.step_state, self.batch)

  def rates(self, seconds: float) -> items.Row:
    """Return the rate of model FLOPs, and its share of the device's peak rate if that is known.

    Args:
      seconds: duration of a step.
    """
    import jax

    from t5x_lite import runtime

    flops = self.trainer.count_flops(self.batch)
    rate = flops.total / seconds
    found: items.Row = {'model TFLOP/s': rate / 1e12}
    peak = runtime.peak_flops(jax.local_devices()[0].device_kind, flops.dtype)
    if peak is not None:
      found['MFU'] = rate / peak
    return found

  def state(self) -> Any:
    """Return random parameters, and a state of the optimizer of zeros, on the device."""
    import jax
    import jax.numpy as jnp

    def zeros_of_shapes(leaf):
      if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
      return leaf

    shapes = self.trainer.step_state
    return jax.tree.map(zeros_of_shapes, shapes.replace_params(items.random_like(shapes.params)))


def measure_batch(case: Case, batch_size: int, num_steps: int) -> items.Row:
  """Return the figures of a case at a batch size, with 'fits' True or False."""
  import jax

  start = time.perf_counter()
  row: items.Row = {'batch': batch_size}
  step = Step(case, batch_size)
  try:
    program = step.trace().lower().compile()
    row['compile, s'] = time.perf_counter() - start
    needed = items.program_bytes(program)
    row['memory, GB'] = needed / 1e9
    limit = items.device_bytes()
    if limit is not None and needed > _MEMORY_SHARE * limit:
      row['fits'] = False
      return row
    state = step.state()
    for _ in range(2):
      state, metrics = program(state, step.batch)
      jax.block_until_ready(metrics)
    begin = time.perf_counter()
    for _ in range(num_steps):
      state, metrics = program(state, step.batch)
    jax.block_until_ready(metrics)
    seconds = (time.perf_counter() - begin) / num_steps
    # Compiles programs of its own.
    loss = float(metrics['loss'].compute())
  except Exception as error:
    if not items.is_out_of_memory(error):
      raise
    row['fits'] = False
    return row
  row['fits'] = True
  row['step, ms'] = 1e3 * seconds
  row['sequences/s'] = batch_size / seconds
  try:
    row.update(step.rates(seconds))
  except Exception as error:  # The time is known without them.
    row['note'] = items.note_of(error)
  if case.goal is not None:
    row['goal on one H100'] = case.goal
  row['loss'] = loss
  return row


def next_batch(row: items.Row, limit: float | None) -> int | None:
  """Return the batch size to try after a row, in powers of two; None if the row has the largest one that fits.

  Args:
    row: figures of a batch size, see `measure_batch`.
    limit: bytes that programs may use; None if unknown.
  """
  batch = row['batch']
  ratio = None
  if limit is not None and 'memory, GB' in row:
    ratio = _MEMORY_SHARE * limit / (1e9 * row['memory, GB'])
  if not row['fits']:
    factor = 0.5
    if ratio is not None and ratio < 1:
      # As if all of the memory grew with the batch, which leaves room.
      factor = 2.0 ** math.floor(math.log2(ratio))
    return int(batch * factor)
  if ratio is None:
    return 2 * batch
  if ratio >= 2:
    return batch * 2 ** math.floor(math.log2(ratio))
  # Parameters and their gradients do not grow.
  if ratio >= 1.6:
    return 2 * batch
  return None


def _measure(case: Case, num_steps: int, largest: int) -> Iterator[items.Row]:
  """Yield a row for each batch size that is tried until the largest one that fits is known.

  The search ends before the limit of the item, after which the process would be killed and another one started.
  """
  begin = time.monotonic()
  limit = items.device_bytes()
  batch: int | None = case.batch
  if limit is not None and limit > _LARGE_DEVICE:
    batch = 2 * case.batch
  tried = set()
  while batch is not None:
    tried.add(batch)
    start = time.monotonic()
    row = measure_batch(case, batch, num_steps)
    now = time.monotonic()
    batch = next_batch(row, limit)
    if batch is None or batch in tried or not 1 <= batch <= largest:
      batch = None
    elif (now - begin) + (now - start) > _LIMIT:
      # It would take at least as long as the one before.
      row['note'] = f'no time was left for a batch of {batch}'
      batch = None
    yield row


def program_of(case: Case, batch_size: int):
  """Return a function that traces the step, whose state is traced now."""
  return Step(case, batch_size).trace


def _programs(case: Case):
  return {f'step, batch {case.batch}': program_of(case, case.batch)}


def make_items(sizes: str) -> list[items.Item]:
  """Return the items of this part."""
  return [
    items.Item(
      name=name,
      measure=functools.partial(_measure, case, _NUM_STEPS[sizes], _LARGEST_BATCH[sizes]),
      programs=functools.partial(_programs, case),
      limit=_LIMIT,
    )
    for name, case in _CASES[sizes].items()
  ]
