"""How far memory-saving gradients are from stored ones while a classifier trains.

The runs are those of `cifar10_classifier`, trained with stored gradients (with FD: memory-saving and guarded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bilip.recipes import cifar10_classifier, figures
from bilip.recipes.cifar10_classifier import Config
from bilip.recipes.parts import Borrowed
from bilip.recipes.recipe import Figures, Found, Line, Measured, Topic, Work, runs_of_part, sound

__all__ = ["RECIPE"]

TITLES = {
    "additive-conv1x1-none": "additive",
    "affine-conv1x1-none": "affine",
    "affine-conv1x1-fd": "affine, FD",
    "affine-conv1x1-nf": "affine, NF",
}
LIMIT = 1e-2


class GradientAngles(Borrowed):
    """The angle between two gradients of the same loss, along training."""

    name = "gradient_angles"
    where = "figures on the angle between memory-saving and true gradients, introduction and appendix"
    claim = "Memory-saving gradients of the affine classifier turn away and become NaN; additive, FD and NF keep the angle small."
    sizes: Mapping[str, Config] = cifar10_classifier.RECIPE.sizes
    cost: Mapping[str, str] = {
        "quick": "a minute on two cores; seconds beside cifar10_classifier",
        "gpu": "four runs of cifar10_classifier; seconds beside it",
        "paper": "four runs of cifar10_classifier; seconds beside it",
    }
    matched = (
        "40 fixed batches of training images, evaluation mode, the classification loss alone, the parameters of the trunk.",
    )
    corrected = (
        "No augmentation, so that the batches are the same each time; the angle is 2 atan2(|u - v|, |u + v|) in float64, of gradients in "
        "float32 without TF32. The original's arccosine in float32 cannot see below 3e-4 rad.",
    )
    lender = cifar10_classifier.RECIPE
    numbers = ("epochs", "steps", "images", "weight", "gradients", "test_accuracy", "invertible", "diverged")
    arrays = ("log_step", "log_angle", "log_angle_finite", "log_angle_worst", "log_angle_lost", "log_error_mean")

    def parts(self, config: Config) -> Sequence[str]:
        return tuple(TITLES)

    def has(self, part: str, config: Config) -> bool:
        return part in TITLES

    def run(self, part: str, config: Config, work: Work) -> Measured:
        m = super().run(part, config, work)
        return (
            replace(m, numbers={**dict.fromkeys(self.numbers), **m.numbers}) if m.numbers else m
        )  # null where it diverged

    def lines(self, config: Config, found: Found) -> list[Line]:
        said, lines = self.paper()["in_short"], []
        for part, title in TITLES.items():
            good, lost_runs = sound(title, runs_of_part(found, part))
            lines += lost_runs
            several = [curve(m) for m in good]
            if not several:
                continue
            broken = part == "affine-conv1x1-none"
            lost = [_first_lost(*each) for each in several]
            rule = [when is not None for when in lost] if broken else [_small(values) for _, values in several]
            ours = [
                f"up to {_largest(values):.1e}"
                + (f", first NaN at epoch {when:.2g}" if when is not None else ", never NaN")
                for (_, values), when in zip(several, lost, strict=True)
            ]
            what = "mean angle (rad), judged by NaN alone" if broken else "mean angle (rad)"
            Topic(title, lines).add(what, said[part], ours, rule)
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        drawn: dict[str, Any] = {}
        for name, parts in {"introduction": list(TITLES)[:2], "regularized": list(TITLES)[1:]}.items():
            there = {TITLES[part]: runs_of_part(found, part) for part in parts}
            curves = {title: [curve(m) for m in several] for title, several in there.items() if several}
            if curves:
                panel = "mean angle to the stored gradient (rad)"
                drawn[name] = figures.curves({panel: curves}, xlabel="epoch")
        return drawn


def curve(measured: Measured) -> tuple[list[float], list[float]]:
    """Epochs and mean angles, NaN where one batch has a gradient that is not finite."""
    arrays, numbers = measured.arrays, measured.numbers
    known = ~np.isnan(arrays["log_angle_lost"])
    epochs = arrays["log_step"][known] * numbers["epochs"] / numbers["steps"]
    return epochs.tolist(), arrays["log_angle"][known].tolist()


def _first_lost(epochs: Sequence[float], values: Sequence[float]) -> float | None:
    """The epoch of the first angle that is NaN."""
    return next((epoch for epoch, value in zip(epochs, values, strict=True) if math.isnan(value)), None)


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def _small(values: Sequence[float]) -> bool:
    return bool(values) and all(math.isfinite(value) and value < LIMIT for value in values)


RECIPE = GradientAngles()
