"""Runs of the classifiers' recipe, and the names of their parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bilip.errors import InputError

__all__ = ["GRID", "TABLE", "Run"]

PART = re.compile(
    r"(additive|affine)-(conv1x1|shuffle)-(none|guarded|nf|fd)([0-9.]+(?:e-?[0-9]+)?)?(-inverse)?(?:-every([0-9]+))?(?:-e([0-9]+))?"
)
TABLE = ("affine-conv1x1", "additive-conv1x1", "affine-shuffle", "additive-shuffle")
GRID = ("none", "fd1e-3", "fd1e-4", "fd5e-5", "nf1e-3", "nf1e-4", "nf1e-5")


@dataclass(frozen=True)
class Run:
    """One run, as its part is named.

    Example:
        >>> Run.of("affine-conv1x1-fd5e-5-e10")
        Run(coupling='affine', mixing='conv1x1', kind='fd', weight=5e-05, mode='both', every=None, epochs=10)
    """

    coupling: str
    mixing: str
    kind: str
    weight: float | None = None
    mode: str = "both"
    every: int | None = None
    epochs: int | None = None

    @classmethod
    def of(cls, part: str) -> Run:
        """The run that a part names."""
        match = PART.fullmatch(part)
        if match is None:
            raise InputError(
                f"{part!r} names no run: expected, for example, {TABLE[0]}-none, -fd, -nf1e-4 or -fd-every5."
            )
        coupling, mixing, kind, weight, inverse, every, epochs = match.groups()
        if (kind in ("none", "guarded") and (weight or inverse or every)) or (kind == "nf" and inverse):
            raise InputError(f"{part!r} names no run: {kind!r} has nothing to be changed.")
        usual = {"fd": 1e-4 if coupling == "affine" else 5e-5, "nf": 1e-5}.get(kind)
        return cls(
            coupling,
            mixing,
            kind,
            float(weight) if weight else usual,
            "inverse" if inverse else "both",
            int(every) if every else None,
            int(epochs) if epochs else None,
        )

    @property
    def model(self) -> str:
        """The network, as the names of parts begin."""
        return f"{self.coupling}-{self.mixing}"

    @property
    def plain(self) -> Run:
        """The same, without its number of epochs."""
        return replace(self, epochs=None)

    def weighing(self, weight: float) -> Run:
        """The same with another coefficient."""
        return replace(self, weight=weight)

    @property
    def reversible(self) -> bool:
        """Whether gradients are memory-saving: with FD, as in the paper, and where the guard is tried."""
        return self.kind in ("fd", "guarded")
