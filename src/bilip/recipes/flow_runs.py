"""Runs of the image flows: the names of their parts, and tables and figures of whichever there are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.blocks.scale import HALF_SIGMOID, SIGMOID, Scale
from bilip.errors import InputError
from bilip.recipes import figures
from bilip.recipes.recipe import Figures, Found, Line, Measured, Topic, largest, percent, short, sound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
ALL = 0.999  # of the samples: as many as "reliable" and "no visible error" ask for, at every look but the first
LOG_DET = 1e-6  # nats per dimension between the log-determinant in float64 and that of the Jacobian
SERIES = 1e-3  # the same of an estimate: what the terms that are left out may amount to
Numbers = Mapping[str, Any]


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


# ---- tables


def runs_of(found: Found, kinds: Sequence[str] = KINDS) -> dict[tuple[Run, int], list[Measured]]:
    """The runs there are, by what they are and their number of steps, the longest first, then by kind; one entry for each seed."""
    several: dict[tuple[Run, int], list[Measured]] = {}
    for parts in found.values():
        for part, measured in parts.items():
            run = Run.of(part)
            key = (Run(run.kind, run.eps, run.mixing), int(measured.numbers["steps"]))
            several.setdefault(key, []).append(measured)
    return dict(sorted(several.items(), key=lambda item: (-item[0][1], kinds.index(item[0][0].kind), item[0][0].title)))


def flow_lines(found: Found, paper: Mapping[str, Any]) -> list[Line]:
    """The paper's table beside ours, what happens along training, and whether the log-determinant is right."""
    lines: list[Line] = []
    for (run, steps), several in runs_of(found).items():
        said, name = paper["table"].get(run.kind), f"{run.title}, {steps:,} steps"
        good, lost_runs = sound(name, several)
        lines.extend(lost_runs)
        if not good:
            continue
        add = Topic(name, lines).add
        train = [f"{m.numbers['train_bits']:.2f}" for m in good]
        add("bits per dimension, train", f"{said['train_bits']:.2f}" if said else "", train, key=True)
        add("bits per dimension, test", f"{said['test_bits']:.2f}" if said else "", map(_falling, good), key=True)
        marks = {"reliable": "reliable sample bits per dimension", "invisible": "no visible error of samples"}
        for what, mark in marks.items() if said else ():
            ticks = [worst_sample(m, what) for m in good]
            add(
                f"{mark}, at every look",
                "yes" if said[what] else "no",
                [f"{'yes' if share >= ALL else 'no'} ({percent(share)})" for share in ticks],
                [(share >= ALL) == said[what] for share in ticks],
            )
        add("bits per dimension of samples, as drawn and encoded again", "", map(_sample_bits, good))
        # Of a residual flow NaN stands for a sample that some block did not invert to its tolerance.
        lost = "not inverted to the tolerance" if run.kind == "residual" else "not finite"
        add(f"{lost} at some look", "", map(_worst_sources, good), key=True)
        add("gradients that were not finite, steps skipped", "", [str(m.numbers["skipped"]) for m in good])
        if run.kind == "residual":
            pairs = list(map(_estimated, good))
            add(
                "mean of estimated log-determinants against the Jacobian, and its standard error, nats per dimension",
                "",
                [f"{short(apart)}, {short(error)}" for apart, error in pairs],
                [apart <= SERIES + 4 * error for apart, error in pairs],
            )
            continue
        errors = [largest(m.numbers["log_det"]["float64"]) for m in good]
        right = [error < LOG_DET for error in errors]
        add("log-determinant against the Jacobian, nats per dimension", "", map(short, errors), right)
    missing = sorted({name for seeds in found.values() for m in seeds.values() for name in m.numbers["missing"]})
    if missing:
        lines.append(Line("image sets that were not there", "", ", ".join(SETS[name] for name in missing)))
    return lines


def _estimated(measured: Measured) -> tuple[float, float]:
    """The point at which the mean of the estimates is farthest from the log-determinant: by how much, and the standard error there."""
    found = measured.numbers["log_det_spread"]
    pairs = zip(map(abs, found["apart"]), found["standard_error"], strict=True)
    return max(pairs, key=lambda pair: (any(map(math.isnan, pair)), pair))


def worst_sample(measured: Measured, what: str) -> float:
    """The smallest share of samples that are reliable, or come back without a visible error, at any look but the first, and in the end."""
    log, end = measured.arrays, measured.numbers["samples"]
    if what == "reliable":
        return float(min([*log["log_samples_reliable"][1:], end["reliable"]]))
    seen = 1 - log["log_samples_non_finite"][1:] - log["log_samples_wrong"][1:]
    return float(min([*seen, 1 - end["visible"]]))


def _falling(measured: Measured) -> str:
    """The test bits per dimension in the end, and on the way there."""
    steps, bits = measured.arrays["log_step"], measured.arrays["log_test_bits"]
    some = sorted({1, len(steps) // 2} - {len(steps) - 1})
    way = ", ".join(f"{bits[k]:.2f} after {steps[k]:,.0f}" for k in some if k < len(steps))
    return f"{measured.numbers['test_bits']:.2f} ({way})"


def _sample_bits(measured: Measured) -> str:
    end = measured.numbers["samples"]
    return f"{end['bits_drawn']:.2f} and {end['bits_again']:.2f} in the median, {percent(end['reliable'])} reliable"


def _worst_sources(measured: Measured) -> str:
    """The sources of which something was not finite, with the largest share."""
    found = []
    for name, title in SOURCES.items():
        shares = measured.arrays[f"log_{name}_non_finite"][1:]
        if not np.isnan(shares).all() and float(np.nanmax(shares)) > 0:
            found.append(f"{title} {percent(float(np.nanmax(shares)))}")
    return ", ".join(found) or "none"


def lost(numbers: Numbers) -> str:
    """How a set comes back, in words: the share that is not finite, the share that is wrong, and the mean error of the rest."""
    shares = [f"{percent(numbers['share_inf'])} Inf, {percent(numbers['share_nan'])} NaN"]
    if not numbers["share_non_finite"]:
        shares = ["0 % Inf/NaN"]
    wrong = f"{percent(numbers['share_wrong'])} wrong" if numbers["share_wrong"] else "none wrong"
    error = numbers["error"]
    return ", ".join([*shares, wrong, f"error {short(error)}" if not math.isnan(error) else "no other"])


def shares(numbers: Numbers) -> str:
    """The shares of images that do not come back finite, and that come back wrong."""
    return f"{percent(numbers['share_non_finite'])} Inf/NaN, {percent(numbers['share_wrong'])} wrong"


# ---- figures


PANELS = {
    "non_finite": "share not finite",
    "square": "squared pixel error",
    "condition": "condition number",
}


def flow_figures(found: Found) -> Figures:
    """Bits per dimension along training; for each kind of coupling the stability statistics and, of the first seed, reconstructions."""
    drawn: dict[str, Figure] = {}
    every = runs_of(found)
    longest = {kind: max((steps for run, steps in every if run.kind == kind), default=0) for kind in KINDS}
    chosen = {run: several for (run, steps), several in every.items() if steps == longest[run.kind]}
    if not chosen:
        return drawn
    likelihood = {
        "test bits/dimension": {run.title: [_pair(m, "test_bits") for m in ms] for run, ms in chosen.items()},
        "training bits/dimension, augmented": {run.title: [_train(m) for m in ms] for run, ms in chosen.items()},
    }
    drawn["likelihood"] = figures.curves(likelihood, xlabel="step", linear=list(likelihood))
    for run, several in chosen.items():
        name = run.title.replace(TITLES[run.kind], run.kind).replace(" + ", "-eps").replace(", ", "-")
        # What a residual flow does not invert to its tolerance stands as NaN in its logs.
        lost = "share not inverted to tolerance" if run.kind == "residual" else PANELS["non_finite"]
        panels = {
            title: {
                SOURCES[source]: [_pair(m, f"{source}_{what}") for m in several]
                for source in SOURCES
                if not np.isnan(several[0].arrays[f"log_{source}_non_finite"]).all()
            }
            for what, title in {**PANELS, "non_finite": lost}.items()
            if what != "non_finite" or any(_lost_some(m) for m in several)
        }
        drawn[f"stability-{name}"] = figures.curves(panels, xlabel="step", linear=[lost] if lost in panels else [])
        if not several[0].numbers["diverged"]:
            drawn[f"reconstructions-{name}"] = reconstruction_figure(several[0], SOURCES)
    return drawn


def _lost_some(measured: Measured) -> bool:
    return any(np.nanmax(measured.arrays[f"log_{name}_non_finite"], initial=0) > 0 for name in SOURCES)


def reconstruction_figure(measured: Measured, names: Mapping[str, str]) -> Figure:
    """Inputs and reconstructions; the first of each is the worst of up to 500."""
    there = {name: title for name, title in names.items() if f"images_{name}" in measured.arrays}
    groups = {t: (measured.arrays[f"images_{n}"], measured.arrays[f"broken_{n}"]) for n, t in there.items()}
    facts = {**measured.numbers["sets"], "samples": measured.numbers.get("samples")}
    notes = {title: shares(facts[name]) for name, title in there.items()}
    return figures.reconstructions(groups, notes=notes)


def _pair(measured: Measured, what: str) -> tuple[list[float], list[float]]:
    """Steps and values; of condition numbers those that were measured."""
    steps, values = measured.arrays["log_step"], measured.arrays[f"log_{what}"]
    known = ~np.isnan(values) if what.endswith("condition") else np.full(len(steps), True)
    # An error of zero has no place on a logarithmic axis; a pixel that is off by less than float32 can tell is not off.
    floor = 1e-16 if what.endswith("square") else -math.inf
    return steps[known].tolist(), np.maximum(values[known], floor).tolist()


def _train(measured: Measured) -> tuple[list[float], list[float]]:
    bits, size = measured.numbers["bits"], measured.numbers["dimensions"]
    values = bits + measured.arrays["train_nll"] / (size * math.log(2))
    return measured.arrays["train_step"].tolist(), values.tolist()
