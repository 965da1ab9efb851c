"""Models of other libraries as bijections from data to latents, block by block where the blocks are visible."""

from bilip.adapters.adapted import Adapted, adapt, as_bijection
from bilip.adapters.foreign import Base, Foreign, has_log_det
from bilip.adapters.generic import from_callables, from_vector_field

__all__ = ["Adapted", "Base", "Foreign", "adapt", "as_bijection", "from_callables", "from_vector_field", "has_log_det"]
