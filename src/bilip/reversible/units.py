"""From the blocks of a bijection to the units of a walk."""

from __future__ import annotations

from collections.abc import Sequence

from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, InvertibleConv1x1
from bilip.blocks.factor_out import OnKept
from bilip.nets.readable import is_itself, is_untouched
from bilip.reversible.coupling import Coupling
from bilip.reversible.mixing import Mixing
from bilip.reversible.unit import Generic, Kept, Rearranging, Unit

__all__ = ["make_units"]


def make_units(parts: Sequence[tuple[str, Bijection]], *, inverse: bool) -> list[Unit]:
    """The units of a map in the order in which they run."""
    units: list[Unit] = []
    plain = _Plain()
    k = 0
    while k < len(parts):
        name, part = parts[k]
        after = parts[k + 1][1] if k + 1 < len(parts) else None
        if (
            type(part) is ActNorm
            and part._ready
            and part.dim == 1
            and plain(part)
            and _is_free(after, plain, part.features)
        ):
            units.append(Mixing(parts[k + 1][0], part, after, inverse=inverse))  # type: ignore[arg-type]
            k += 1
        else:
            units.append(_unit(name, part, plain, inverse=inverse))
        k += 1
    return units[::-1] if inverse else units


class _Plain:
    """Whether a block, with its partition and scale, does what its class says, so that it may be evaluated in another way; of each class
    it is found out once.
    """

    def __init__(self) -> None:
        self.blocks: dict[type, bool] = {}
        self.parts: dict[type, bool] = {}

    def __call__(self, part: Bijection) -> bool:
        inner = (part._modules.get("partition"), vars(part).get("scale"))
        return is_itself(part, self.blocks) and all(is_untouched(thing, self.parts) for thing in inner)


def _unit(name: str, part: Bijection, plain: _Plain, *, inverse: bool) -> Unit:
    if isinstance(part, OnKept):
        return Kept(_unit(name, part.block, plain, inverse=inverse), part.kept_shape, part.kept_latent)
    if type(part) in (AdditiveCoupling, AffineCoupling) and plain(part):
        return Coupling(name, part, inverse=inverse)
    if _is_free(part, plain):
        return Mixing(name, None, part, inverse=inverse)  # type: ignore[arg-type]
    if part.rearranges and plain(part):
        return Rearranging(name, part, inverse=inverse)
    return Generic(name, part, inverse=inverse)


def _is_free(part: Bijection | None, plain: _Plain, features: int | None = None) -> bool:
    if (
        type(part) is not InvertibleConv1x1
        or part.kind != "full"
        or not plain(part)
        or "weight" not in part._parameters
    ):
        return False
    return features is None or part.channels == features
