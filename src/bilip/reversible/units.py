"""From the blocks of a bijection to the units of a walk."""

from __future__ import annotations

from collections.abc import Sequence

from bilip.blocks import ActNorm, AdditiveCoupling, AffineCoupling, Bijection, InvertibleConv1x1
from bilip.blocks.on_kept import OnKept
from bilip.nets.readable import is_itself, tampered
from bilip.reversible.coupling import Coupling
from bilip.reversible.mixing import Mixing
from bilip.reversible.unit import Generic, Kept, Rearranging, Unit

__all__ = ["make_units"]


def make_units(parts: Sequence[tuple[str, Bijection]], *, inverse: bool) -> list[Unit]:
    """The units of a map in the order in which they run."""
    units: list[Unit] = []
    k = 0
    while k < len(parts):
        name, part = parts[k]
        after = parts[k + 1][1] if k + 1 < len(parts) else None
        if type(part) is ActNorm and part._ready and part.dim == 1 and _plain(part) and _is_free(after, part.features):
            units.append(Mixing(parts[k + 1][0], part, after, inverse=inverse))  # type: ignore[arg-type]
            k += 1
        else:
            units.append(_unit(name, part, inverse=inverse))
        k += 1
    return units[::-1] if inverse else units


def _unit(name: str, part: Bijection, *, inverse: bool) -> Unit:
    if isinstance(part, OnKept):
        return Kept(_unit(name, part.block, inverse=inverse), part.kept_shape, part.kept_latent)
    if type(part) in (AdditiveCoupling, AffineCoupling) and _plain(part):
        return Coupling(name, part, inverse=inverse)
    if _is_free(part):
        return Mixing(name, None, part, inverse=inverse)  # type: ignore[arg-type]
    if part.rearranges and _plain(part):
        return Rearranging(name, part, inverse=inverse)
    return Generic(name, part, inverse=inverse)


def _is_free(part: Bijection | None, features: int | None = None) -> bool:
    if (
        type(part) is not InvertibleConv1x1
        or part.kind != "full"
        or not _plain(part)
        or "weight" not in part._parameters
    ):
        return False
    return features is None or part.channels == features


def _plain(part: Bijection) -> bool:
    """Whether a block, with its partition and scale, does what its class says, so that it may be evaluated in another way."""
    parts = (getattr(part, name, None) for name in ("partition", "scale"))
    return is_itself(part) and all(inner is None or tampered(inner) is None for inner in parts)
