"""bilip's own models."""

from __future__ import annotations

from collections.abc import Sequence

from bilip.adapters._inspect import require_own_map
from bilip.adapters.base import Base, FlowBase
from bilip.blocks import Bijection, Chain, Flow

__all__ = ["recognise"]


def recognise(model: object, shape: Sequence[int] | None) -> tuple[Bijection, Base | None, str] | None:
    """A bijection as it is, the map and base of a flow, the trunk of a classifier."""
    base = None
    if isinstance(model, Flow):
        require_own_map(model, ("log_prob", "sample"), "bilip")
        model, base = model.bijection, getattr(model, "adapted_base", None) or FlowBase(model)
    elif not isinstance(model, Bijection):
        model = getattr(model, "trunk", None)
    if not isinstance(model, Bijection):
        return None
    if shape is not None and model.shape is None:  # told apart, so that the model itself is not changed
        model = Chain(*model if isinstance(model, Chain) else (model,), shape=shape)
    return model, base, "bilip"
