"""Family and architecture of the network whose weights are converted."""

from t5x_lite.apps.convert.state_plan import StatePlan
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError


def folder_of(source: sources.StateSource) -> hugging_face.HuggingFaceFolder | None:
  """Return the Hugging Face folder of a source, also of one to which an adapter of PEFT is added; None without one."""
  if source.format == 'peft':
    source = base_of(source) or source
  if isinstance(source, sources.HuggingFaceSource):
    return source.folder
  return None


def base_of(source: sources.StateSource) -> sources.StateSource | None:
  """Return the base of a source with an adapter, also of one that is merged; None without one."""
  if isinstance(source, sources.MergedSource):
    source = source.source
  if isinstance(source, sources.AdapterSource):
    return source.base
  return None


def known_family(source: sources.StateSource) -> hugging_face.Family | None:
  """Return the family of a Hugging Face folder, or of the folder that a checkpoint was converted from."""
  folder = folder_of(source)
  if folder is not None:
    return folder.family
  name = (source.metadata.get('converted') or {}).get('family')
  if name is None:
    return None
  return hugging_face.get_family(name)


def architecture_of(source: sources.StateSource, plan: StatePlan) -> hugging_face.Architecture:
  """Return the architecture of a planned network.

  Args:
    source: the weights to convert.
    plan: plan of the conversion.

  Raises:
    CheckpointError: transformers does not support the network.
  """
  folder = folder_of(source)
  if folder is not None:
    return folder.architecture
  return hugging_face.Architecture.from_shapes(plan.params(), plan.network)


def known_architecture(
  source: sources.StateSource, plan: StatePlan
) -> hugging_face.Architecture | None:
  """Return the architecture of a planned network; None if transformers does not support the network."""
  try:
    return architecture_of(source, plan)
  except CheckpointError:
    return None  # t5x_lite may support it.
