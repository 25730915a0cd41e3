"""The checkpoint of an adapter and its base as one state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import logging
from typing import Any

import jax
import numpy as np

from t5x_lite.checkpoints.sources import base
from t5x_lite.checkpoints.sources import base_identity
from t5x_lite.networks import layout_plan

_logger = logging.getLogger(__name__)

_PARAMS = 'target/'


class AdapterSource(base.WrappedSource):
  """State of a checkpoint without the base: its own arrays, and the parameters of the base that it lacks.

  The parameters of the base are in the layout of the checkpoint.
  """

  LEFT_OUT = (base_identity.ENTRY,)  # the state is complete

  def __init__(self, own: base.StateSource, open_base: Callable[[], base.StateSource]):
    """Store the arguments.

    Args:
      own: the adapter, with further arrays of its run.
      open_base: opens the base, when its shapes or values are asked for.
    """
    super().__init__(own)
    self._open_base = open_base

  @property
  def own(self) -> base.StateSource:
    """See `StateSource`."""
    return self.source

  @functools.cached_property
  def base(self) -> base.StateSource:
    """The base."""
    return self._open_base()

  @functools.cached_property
  def _stored(self) -> dict[str, Any]:
    """Shape of each parameter of the base by its path."""
    return {
      name.removeprefix(_PARAMS): leaf
      for name, leaf in self.base.shapes().items()
      if name.startswith(_PARAMS)
    }

  @functools.cached_property
  def _has_tables_per_layer(self) -> bool:
    """True if each layer has a table of relative position biases in the layout 't5'."""
    tables = (self.own.metadata.get('network') or {}).get('relpos_bias_tables')
    if tables is not None:
      return tables == 'per_layer'
    # An adapter of another program, which does not record it.
    return layout_plan.tables_differ(
      self._stored, lambda path: self.base.read_array(f'{_PARAMS}{path}')
    )

  @functools.cached_property
  def _of_base(self) -> dict[str, layout_plan.PlannedArray]:
    """Name -> plan of each parameter of the base in the layout of the checkpoint; inputs are paths in the base."""
    stored = self._stored
    if self._has_layout_of_base:
      planned = {name: layout_plan.unchanged(name, leaf) for name, leaf in stored.items()}
    else:
      network = self.own.metadata.get('network') or {}
      planned = layout_plan.plan(
        stored,
        self.own.metadata['param_layout'],
        relpos_per_layer=self._has_tables_per_layer,
        heads=network.get('num_heads'),
      )
    return {_PARAMS + name: plan for name, plan in planned.items()}

  @functools.cached_property
  def _has_layout_of_base(self) -> bool:
    own = self.own.metadata.get('param_layout')
    return own is None or base.layout_of(self.base.shapes()) in (None, own)

  def shapes(self) -> base.Shapes:
    """See `StateSource`."""
    return self._shapes

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    of_base = {
      name: jax.ShapeDtypeStruct(plan.shape, plan.dtype) for name, plan in self._of_base.items()
    }
    return of_base | self.own.shapes()

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource`."""
    if name in self.own.shapes():
      return self.own.read_array(name)
    return self._of_base[name].make(lambda each: self.base.read_array(_PARAMS + each))

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `StateSource`."""
    own = {name: how for name, how in wanted.items() if name in self.own.shapes()}
    others = {name: how for name, how in wanted.items() if name not in own}
    result = {}
    if own:
      result |= self.own.read(own)
    if others and self._has_layout_of_base:
      result |= self.base.read(others)
    elif others:
      result |= super().read(others)
    return {name: result[name] for name in wanted}

  def verify(self) -> bool:
    """Compare the hash of every file of the checkpoint; of the base, sizes, index and some blocks."""
    is_verified = super().verify()
    _logger.info('The base of the adapter %s is %s.', self.path, self.base.path)
    return is_verified

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """See `WrappedSource`; an adapter of another program has the network of the base."""
    own = super().metadata
    if self.own.manifest is not None:
      return own
    of_base = dict(self.base.metadata)
    layout = own.get('param_layout')
    if of_base.get('param_layout') != layout and 'network' in of_base:
      tables = 'per_layer' if self._has_tables_per_layer else 'per_stack'
      changed = {'param_layout': layout, 'relpos_bias_tables': tables}
      of_base['network'] = {**of_base['network'], **changed}
    kept = {name: of_base[name] for name in ('network', 'converted') if name in of_base}
    return {**kept, **own}
