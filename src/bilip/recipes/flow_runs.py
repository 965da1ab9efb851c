"""Runs of the image flows, and the names of their parts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bilip.blocks.scale import HALF_SIGMOID, SIGMOID, Scale
from bilip.errors import InputError

__all__ = ["GLOWS", "KINDS", "SETS", "SOURCES", "TITLES", "Run"]

GLOWS = ("additive", "affine", "modified")
KINDS = (*GLOWS, "residual")
TITLES = {"additive": "additive", "affine": "affine", "modified": "modified affine", "residual": "residual flow"}
SETS = {
    "cifar10": "CIFAR-10 test",
    "uniform": "uniform",
    "gaussian": "gaussian",
    "rademacher": "rademacher",
    "svhn": "SVHN",
    "textures": "textures",
    "places": "Places",
    "tiny_imagenet": "tinyImageNet",
}
SOURCES = {"cifar10": "data", "samples": "samples"} | {
    name: SETS[name] for name in ("uniform", "gaussian", "rademacher", "svhn", "textures")
}
PART = re.compile(
    r"(additive|affine|modified|residual)(?:-eps([0-9.]+(?:e-?[0-9]+)?))?(?:-(conv1x1|reverse|shuffle))?(?:-steps([0-9]+))?"
)


@dataclass(frozen=True)
class Run:
    """One run, as its part is named: the kind of its couplings, then what is not as in the configuration.

    Example:
        >>> Run.of("affine-eps0.01-reverse-steps1000")
        Run(kind='affine', eps=0.01, mixing='reverse', steps=1000)
    """

    kind: str
    eps: float = 0.0
    mixing: str | None = None
    steps: int | None = None

    @classmethod
    def of(cls, part: str) -> Run:
        """The run that a part names."""
        match = PART.fullmatch(part)
        if (
            match is None
            or (match[1] not in ("affine", "modified") and match[2])
            or (match[1] == "residual" and match[3])
        ):
            raise InputError(
                f"{part!r} names no run: expected, for example, affine, modified-reverse, affine-eps0.01, additive-steps1000 or "
                "residual."
            )
        kind, eps, mixing, steps = match.groups()
        return cls(kind, float(eps or 0), mixing, int(steps) if steps else None)

    @property
    def coupling(self) -> str:
        return "additive" if self.kind == "additive" else "affine"

    @property
    def scale(self) -> Scale:
        """Onto (0, 1), or (0.5, 1) where it is modified; both plus eps."""
        scale = HALF_SIGMOID if self.kind == "modified" else SIGMOID
        return scale.floored(self.eps) if self.eps else scale

    @property
    def title(self) -> str:
        """In words, without the number of steps."""
        more = f" + {self.eps:g}" if self.eps else ""
        return f"{TITLES[self.kind]}{more}" + (f", {self.mixing}" if self.mixing else "")
