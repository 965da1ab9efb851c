"""How a flow trained on CIFAR-10 reconstructs images of other kinds, and which of their likelihoods may be trusted.

The runs are those of `cifar10_flow`, which measures all of this while it has the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bilip.recipes import cifar10_flow
from bilip.recipes.cifar10_flow import Config
from bilip.recipes.flow_runs import KINDS, SETS, Run, lost, reconstruction_figure, runs_of
from bilip.recipes.parts import Borrowed
from bilip.recipes.recipe import Figures, Found, Line, Topic, largest, percent, short

__all__ = ["RECIPE"]

BROKEN = ("uniform", "gaussian", "rademacher", "textures", "places", "tiny_imagenet")
COLUMNS = ("affine", "modified", "additive", "residual")
CONVERGED = 1e-3  # the largest L2 error of an image that comes back from a residual flow


class Ood(Borrowed):
    """Shares of images that do not come back, set by set, and detection with and without likelihoods that cannot be trusted."""

    name = "ood"
    where = "figure and table of OOD reconstructions"
    claim = "A Glow trained on CIFAR-10 is not invertible on images of other kinds, except SVHN; a residual flow is."
    sizes: Mapping[str, Config] = cifar10_flow.RECIPE.sizes
    cost: Mapping[str, str] = {
        "quick": "seconds beside cifar10_flow, else what that costs; the residual flow eight minutes of one core",
        "gpu": "seconds beside cifar10_flow, else what that costs; the residual flow about eight minutes of one H200, an estimate",
        "paper": "seconds beside cifar10_flow, else what that costs; the residual flow days; not timed yet",
    }
    matched = (
        "Noise is uniform, standard normal or two-valued, clipped to ±0.49; an error is the L2 norm of an image's difference in "
        "[-1/2, 1/2]; test images, up to 10,000 of each set.",
    )
    corrected = (
        "NaN is counted beside Inf, which alone the original counts, and so are reconstructions that are finite and visibly wrong: some "
        "pixel is off by more than 4 of 256 grey levels. Images are dequantized, as the likelihood asks for.",
        "The flows are those of cifar10_flow, not the published weights. The residual flow is inverted to the tolerance of float32, "
        "each block with a proven error; the original's stop, which compares the square of a step with the tolerance for the step, is "
        "measured beside it. Its inverse ends in a sigmoid, which cannot be Inf: the error before the sigmoid is measured too.",
        "Beyond the paper: a likelihood is trusted where the image comes back and a float64 copy agrees, within 1e-3 of d + |log p|.",
    )
    lender = cifar10_flow.RECIPE
    numbers = ("steps", "mixing", "images", "sets", "counts", "of", "missing", "diverged", "test_bits", "model")
    arrays = tuple(f"{what}_{name}" for what in ("images", "broken") for name in SETS)

    def parts(self, config: Config) -> Sequence[str]:
        return COLUMNS

    def lines(self, config: Config, found: Found) -> list[Line]:
        said, lines = self.paper()["table"], []
        for (run, steps), several in runs_of(found, COLUMNS).items():
            good = [m.numbers for m in several if not m.numbers["diverged"]]
            topic = Topic(f"{run.title}, {steps:,} steps", lines)
            if len(good) < len(several):
                lines.append(Line(topic.name, "", "training diverged: see cifar10_flow", key=True))
            for which, title in SETS.items():
                there = [numbers["sets"][which] for numbers in good if which in numbers["sets"]]
                if there:
                    what = f"{title}{_part_of(good[0], which)}"
                    topic.add(what, _said(said, run, which), map(lost, there), _agrees(run, which, there))
                elif good:
                    topic.add(title, _said(said, run, which), ["not there"])
            if run.kind not in ("affine", "residual") and good:
                topic.add("every set", "", map(_worst, good), key=True)
            if run.kind == "residual" and good:
                _add_residual(topic, good, said["residual"])
        for (run, steps), several in runs_of(found, COLUMNS).items():
            topic = Topic(f"{run.title}, {steps:,} steps", lines)
            for which, title in list(SETS.items())[1:]:
                there = [m.numbers["sets"][which] for m in several if which in m.numbers.get("sets", {})]
                if there:
                    what = f"{title}: likelihoods trusted; AUROC of all, of trusted"
                    topic.add(what, "", map(_trust, there), key=run.kind == "affine")
        if not any(run.kind == "residual" for run, _ in runs_of(found, COLUMNS)):
            worst = max(row["error"] for row in said["residual"].values())
            lines.append(Line("residual flow", f"0 % Inf on every set, error up to {short(worst)}", "not run"))
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        first = next(iter(found.values()), {})
        return {
            f"panels-{part}": reconstruction_figure(first[part], SETS)
            for part in sorted(first, key=lambda part: (KINDS.index(Run.of(part).kind), part))
            if not first[part].numbers["diverged"]
        }


def _said(paper: Mapping[str, Any], run: Run, which: str) -> str:
    """The paper's cell: of the affine flow, the only Glow in its table, and of the residual flow."""
    if run.kind not in paper:
        return ""
    row = paper[run.kind][which]
    return f"{row['inf']:g} % Inf" + (f", error {short(row['error'])}" if row["error"] is not None else "")


def _agrees(run: Run, which: str, there: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Of the affine flow: some images do not come back where the paper lost some, and all are finite where it lost none. Of the residual
    flow: all come back, within `CONVERGED`. Of the others nothing.
    """
    if run.kind == "residual":
        return [n["share_non_finite"] == 0 and n["error_worst"] < CONVERGED for n in there]
    if run.kind != "affine" or run.eps:
        return []
    if which in BROKEN:
        return [n["share_non_finite"] > 0 or n["share_wrong"] > 0 for n in there]
    return [n["share_non_finite"] == 0 for n in there]


def _worst(numbers: Mapping[str, Any]) -> str:
    """The worst of the sets, each number by itself."""
    sets = numbers["sets"].values()
    non_finite, wrong = (max(found[what] for found in sets) for what in ("share_non_finite", "share_wrong"))
    errors = [found["error"] for found in sets if not math.isnan(found["error"])]
    return f"at most {percent(non_finite)} Inf/NaN, {percent(wrong)} wrong, error of the rest {short(max(errors, default=math.nan))}"


def _add_residual(topic: Topic, good: Sequence[Mapping[str, Any]], paper: Mapping[str, Any]) -> None:
    """Where the paper's errors come from: the stop of its inverse."""

    def worst(numbers: Mapping[str, Any], what: str) -> float:
        return largest(found[what] for found in numbers["sets"].values())

    tight = [worst(numbers, "error_worst") for numbers in good]
    loose = [worst(numbers, "loose_worst") for numbers in good]
    means = [[found["loose_error"] for found in numbers["sets"].values()] for numbers in good]
    said = [row["error"] for row in paper.values()]
    topic.add("worst error of an image, every set, to tolerance", "", map(short, tight), key=True)
    topic.add(
        "mean errors, from set to set, with the original's loose stop",
        f"{short(min(said))} to {short(max(said))}",
        [f"{short(min(m))} to {short(max(m))}, worst {short(w)}" for m, w in zip(means, loose, strict=True)],
        [w > 10 * t for w, t in zip(loose, tight, strict=True)],
    )
    before = [
        f"{short(worst(n, 'unsquashed'))}, {sum(found['unconverged'] for found in n['sets'].values())}" for n in good
    ]
    topic.add("worst error before the last sigmoid, samples not converged", "", before)
    topic.add("model and test bits per dimension", "", [f"{n['model']}: {n['test_bits']:.2f}" for n in good])


def _part_of(numbers: Mapping[str, Any], which: str) -> str:
    """How many images there were, where they are not 10,000 or more."""
    count = int(numbers["sets"][which]["count"])
    whole = numbers.get("of", {}).get(which)
    return f" ({count:,} images{f' of {whole:,}' if whole and whole > count else ''})"


def _trust(numbers: Mapping[str, Any]) -> str:
    of_trusted = numbers["auroc_trusted"]
    rest = f"{of_trusted:.3f}" if not math.isnan(of_trusted) else "none left"
    wrong = f" (log p wrong for {percent(numbers['share_log_prob_wrong'])})" if numbers["share_log_prob_wrong"] else ""
    return f"{percent(numbers['share_trusted'])}{wrong}; {numbers['auroc']:.3f}, {rest}"


RECIPE = Ood()
