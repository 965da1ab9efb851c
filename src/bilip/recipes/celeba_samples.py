"""Samples of flows that were trained on faces, with the pixels that are not finite.

The flows are those of `dequantization_attack`, which draws the samples while it has the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bilip.recipes import dequantization_attack, figures
from bilip.recipes.face_flows import TITLES, Config, runs_of
from bilip.recipes.parts import Borrowed
from bilip.recipes.recipe import Figures, Found, Line, Topic, percent, runs_of_part

__all__ = ["RECIPE"]

ROWS = {"data": "data", "samples": "samples, the first", "lost": "samples, broken first"}


class CelebaSamples(Borrowed):
    """How many samples hold numbers that are not finite, along training and in the end."""

    name = "celeba_samples"
    where = "figure on instability in the model distribution"
    claim = "Samples of an affine flow that was trained on CelebA64 hold NaN."
    sizes: Mapping[str, Config] = dequantization_attack.RECIPE.sizes
    cost: Mapping[str, str] = dict.fromkeys(
        sizes, "seconds beside dequantization_attack, else what two parts of it cost"
    )
    matched = (
        "Standard normal latents, the same ones at every look; the samples of the worst look are shown, as in the paper.",
    )
    corrected = (
        "A share of many samples, not a picture of 32. A pixel counts as broken where the inverse is not finite before its last sigmoid, "
        "which turns Inf into 0 or 1; the paper shows what is NaN after it.",
    )
    lender = dequantization_attack.RECIPE
    pictures_apart = True
    numbers = ("steps", "bits", "side", "images", "model", "diverged", "samples", "test_bits")
    arrays = (*ROWS, *(f"{name}_broken" for name in ROWS))
    arrays += ("log_step", "log_samples_lost", "log_pixels_lost", "log_test_bits")

    def parts(self, config: Config) -> Sequence[str]:
        return ("affine", "modified")

    def lines(self, config: Config, found: Found) -> list[Line]:
        said, lines = self.paper(), []
        for part, name, good in runs_of(found, lines):
            samples, topic = [m.numbers["samples"] for m in good], Topic(name, lines)
            what = f"samples that are not finite, of {samples[0]['count']}"
            broken = [s["worst_share"] > 0 for s in samples] if part in said else ()
            topic.add(what, said.get(part, ""), map(_lost, samples), broken, key=True)
            bits = [f"{m.numbers['test_bits']:.2f} ({m.numbers['model']})" for m in good]
            topic.add("test bits per dimension", "", bits)
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        drawn: dict[str, Any] = {}
        panels: dict[str, dict[str, Any]] = {}
        for what, panel in {"test_bits": "test bits/dimension", "samples_lost": "share of samples not finite"}.items():
            curves = {
                title: [m.curve(what) for m in runs]
                for part, title in TITLES.items()
                if (runs := runs_of_part(found, part))
            }
            if what == "test_bits" or any(max(y) > 0 for seeds in curves.values() for _, y in seeds):
                panels[panel] = curves
        drawn["along"] = figures.curves(panels, xlabel="step", linear=list(panels))
        for part, m in next(iter(found.values()), {}).items():
            if not m.numbers["diverged"] and "data" in m.arrays:
                rows = {title: (m.arrays[name], m.arrays[f"{name}_broken"]) for name, title in ROWS.items()}
                if not rows[ROWS["lost"]][1].any():
                    del rows[ROWS["lost"]]
                drawn[f"samples-{part}"] = figures.image_rows(rows)
        return drawn


def _lost(samples: Mapping[str, Any]) -> str:
    """How many samples were lost, in the end and at the worst look."""
    if not samples["worst_share"]:
        return "none, at no look"
    end = f"{percent(samples['share_pixels'])} of the pixels; NaN after the sigmoid in {percent(samples['share_nan'])}"
    worst = f"{percent(samples['worst_share'])} at worst, after {samples['worst_step']:,} steps"
    return f"{percent(samples['share_lost'])} in the end ({end}), {worst}"


RECIPE = CelebaSamples()
