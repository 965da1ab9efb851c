"""Runs of the Flow-GAN: the names of their parts, and tables and figures of whichever there are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bilip.errors import InputError
from bilip.recipes import figures, flow_runs
from bilip.recipes.flow_runs import shares
from bilip.recipes.recipe import Figures, Found, Line, Measured, Topic, percent, short

USUAL = ("additive", "affine")  # couplings
KINDS = (*USUAL, "modified")
OBJECTIVES = {"mle": "MLE", "gan": "GAN", "flowgan": "Flow-GAN"}
PART = re.compile(
    r"(additive|affine|modified)-(mle|gan|flowgan)(-plain)?(-small)?(?:-eps([0-9.]+(?:e-?[0-9]+)?))?(?:-steps([0-9]+))?"
)
HUGE = 16.0  # bits per dimension: twice what a code needs that knows nothing of images
STEEP = 1 / torch.finfo(torch.float32).eps  # a condition number at which float32 has no digit left


@dataclass(frozen=True)
class Run:
    """One run, as its part is named.

    Example:
        >>> Run.of("additive-gan-plain").title
        'additive, GAN, no ActNorm'
        >>> Run.of("affine-flowgan-eps0.01").title
        'affine, Flow-GAN, scale + 0.01'
    """

    kind: str
    objective: str
    actnorm: bool = True
    small: bool = False
    eps: float = 0.0  # added to the scale
    steps: int | None = None

    @classmethod
    def of(cls, part: str) -> Run:
        """The run that a part names."""
        match = PART.fullmatch(part)
        if match is None or (match[1] == "additive" and match[5]):
            raise InputError(
                f"{part!r} names no run: expected, for example, additive-mle, affine-flowgan, additive-gan-plain or affine-gan-eps0.01."
            )
        kind, objective, plain, small, eps, steps = match.groups()
        return cls(kind, objective, plain is None, small is not None, float(eps or 0), int(steps) if steps else None)

    @property
    def couplings(self) -> flow_runs.Run:
        """What its couplings are, as of an image flow."""
        return flow_runs.Run(self.kind, self.eps)

    @property
    def title(self) -> str:
        """The run in words."""
        more = (", no ActNorm" if not self.actnorm else "") + (", small" if self.small else "")
        more += f", scale + {self.eps:g}" if self.eps else ""
        more += f", {self.steps:,} steps" if self.steps else ""
        return f"{flow_runs.TITLES[self.kind]}, {OBJECTIVES[self.objective]}{more}"


# ---- tables


def exploded(numbers: Mapping[str, Any], log: Mapping[str, np.ndarray]) -> bool:
    """Whether the likelihood of data, their reconstruction or the condition number there was lost, in the end or at some look, or training
    ended in numbers that are not finite.
    """
    bits = [*log["log_test_bits"][1:], numbers["test_bits"]]
    conditions = [*log["log_condition"][1:], numbers["condition"]]
    lost = [*log["log_non_finite"][1:], numbers["data"]["share_non_finite"]]
    return (
        bool(numbers["diverged"])
        or not all(b < HUGE for b in bits)
        or not all(c < STEEP for c in conditions)
        or bool(max(lost) > 0)
    )


def gan_lines(found: Found, paper: Mapping[str, Any]) -> list[Line]:
    """The paper's table beside ours, and its statements."""
    lines: list[Line] = []
    runs = _runs(found)
    every = [m for seeds in runs.values() for m in seeds.values()]
    for run, seeds in runs.items():
        several = list(seeds.values())
        usual = run.kind != "modified" and run.actnorm and not run.small
        said = paper["table"].get(run.objective, {}) if usual else {}
        add, samples = Topic(run.title, lines).add, [m.numbers["samples"] for m in several]
        add("test bits per dimension", said.get("bits", ""), map(_bits, several), key=True)
        add("condition number at data, largest on the way", "", map(_steepest, several))
        add("reconstruction of test images", "", [_lost(m.numbers["data"]) for m in several])
        add("FID of 128 features", said.get("fid", ""), [_fid(s) for s in samples], key=True)
        add("KID of 128 features", "", map(_kid, samples))
        sliced = [f"{s['sliced']:.2f}" if math.isfinite(s["sliced"]) else "Inf" for s in samples]
        add("sliced Wasserstein, grey levels", "", sliced)
        for m in several:
            if m.numbers["diverged"]:
                add("training", "", [m.numbers["diverged"]])
        add("steps skipped, passes the guard repaired", "", map(_guard, several))
    lines += [line for kind in USUAL for line in _statements(kind, runs)] + _side_findings(runs)
    nets = {_net(m.numbers["features"]): None for m in every}
    nets |= {_net(m.numbers): None for parts in found.values() for part, m in parts.items() if part == "features"}
    lines += [Line("feature network", "", text) for text in nets]
    floors = [m.numbers["floor"] for m in every][:1]
    lines += [Line("training images in place of samples", "", f"FID {f['fid']:.2g}, KID {_kid(f)}") for f in floors]
    return lines


Runs = dict[Run, dict[int, Measured]]  # by what they are, then by seed


def _runs(found: Found) -> Runs:
    several: Runs = {}
    for seed, parts in found.items():
        for part, measured in parts.items():
            if part != "features":
                several.setdefault(Run.of(part), {})[seed] = measured
    order = list(OBJECTIVES)
    return dict(
        sorted(several.items(), key=lambda i: (KINDS.index(i[0].kind), order.index(i[0].objective), i[0].title))
    )


def _together(*several: Mapping[int, Measured]) -> list[tuple[Measured, ...]]:
    """Runs side by side, of the seeds that all of them have."""
    shared = [seed for seed in several[0] if all(seed in seeds for seeds in several)]
    return [tuple(seeds[seed] for seeds in several) for seed in shared]


def _statements(kind: str, runs: Runs) -> list[Line]:
    """What the appendix says, for one kind of coupling, of the runs that there are."""
    mle, gan, both = (runs.get(Run(kind, objective), {}) for objective in OBJECTIVES)
    lines: list[Line] = []
    add = Topic(kind, lines).add
    if gan:
        holds = [exploded(m.numbers, m.arrays) for m in gan.values()]
        add("GAN alone explodes", "yes, often within a few hundred steps", map(_way, gan.values()), holds)
    if both:
        holds = [not exploded(m.numbers, m.arrays) for m in both.values()]
        add("likelihood beside the GAN keeps it finite", "yes", map(_way, both.values()), holds)
    if pairs := [(b.numbers, m.numbers) for b, m in _together(both, mle)]:
        better = [b["samples"]["kid"] < m["samples"]["kid"] for b, m in pairs]
        ours = [f"KID {_kid(b['samples'])} against {_kid(m['samples'])}" for b, m in pairs]
        add("better samples than MLE alone", "yes (FID 420 against 790)", ours, better)
        cost = [not b["diverged"] and b["test_bits"] - m["test_bits"] < 1 for b, m in pairs]
        ours = [f"{b['test_bits']:.2f} against {m['test_bits']:.2f}" for b, m in pairs]
        add("the likelihood stays competitive", "4 against 3.77 bits", ours, cost)
    if trios := [[m.numbers["samples"]["fid"] for m in trio] for trio in _together(mle, gan, both)]:
        ordered = [b < m < g for m, g, b in trios]
        named = [sorted(zip(trio, OBJECTIVES.values(), strict=True)) for trio in trios]
        ours = [" < ".join(f"{name} {value:.3g}" for value, name in trio) for trio in named]
        add("order of FID", "Flow-GAN 420 < MLE 790 < GAN 850", ours, ordered)
    return lines


def _side_findings(runs: Runs) -> list[Line]:
    lines = []
    if small := list(runs.get(Run("additive", "gan", small=True), {}).values()):
        stable = all(
            m.numbers["data"]["share_non_finite"] == m.numbers["data"]["share_wrong"] == 0
            and m.numbers["condition"] < STEEP
            for m in small
        )
        huge = all(m.numbers["test_bits"] > HUGE for m in small)
        ours = "; ".join(f"{_bits(m)}, condition number {short(m.numbers['condition'])}" for m in small)
        lines.append(Line("a smaller GAN is stable, its bits are huge all the same", "yes", ours, stable and huge))
    plain, usual = (runs.get(Run("additive", "gan", actnorm=actnorm), {}) for actnorm in (False, True))
    if pairs := _together(usual, plain):
        holds = all(_worst(u) > 10 * _worst(p) for u, p in pairs)
        ours = "; ".join(f"condition number up to {_steepest(u)} with it, {_steepest(p)} without" for u, p in pairs)
        lines.append(Line("ActNorm adds instability to the GAN", "a suspicion", ours, holds))
    return lines


def _bits(m: Measured) -> str:
    n = m.numbers
    worst = float(np.nan_to_num(np.append(m.arrays["log_test_bits"][1:], n["test_bits"]), nan=math.inf).max())
    value = f"{n['test_bits']:.2f}" if n["test_bits"] < 100 else short(n["test_bits"])
    lost = f", {percent(n['share_bits_non_finite'])} not finite" if n["share_bits_non_finite"] else ""
    peak = f" (up to {short(worst)} on the way)" if worst > 1.1 * n["test_bits"] and worst > 8 else ""
    at = f" at step {n['measured_at']:,}" if n["diverged"] else ""
    return f"{value} bits{lost}{peak}{at}"


def _way(m: Measured) -> str:
    """Likelihood and condition number along training, and how that ended where it diverged."""
    way = f"{_bits(m)}, condition number up to {_steepest(m)}"
    if not m.numbers["diverged"]:
        return way
    lost = percent(m.numbers["samples"]["share_non_finite"])
    return f"{way}; diverged in step {m.numbers['measured_at'] + 1:,}, {lost} of the samples not finite"


def _worst(m: Measured) -> float:
    return float(np.append(m.arrays["log_condition"][1:], m.numbers["condition"]).max())


def _steepest(m: Measured) -> str:
    return short(_worst(m)) if math.isfinite(_worst(m)) else "Inf"


def _lost(data: Mapping[str, float]) -> str:
    return shares(data) + (f", error {short(data['error'])}" if not math.isnan(data["error"]) else "")


def _fid(samples: Mapping[str, float]) -> str:
    return f"{samples['fid']:.3g}" if math.isfinite(samples["fid"]) else "Inf"


def _kid(samples: Mapping[str, float]) -> str:
    return f"{samples['kid']:.3g} ± {samples['kid_error']:.1g}" if math.isfinite(samples["kid"]) else "Inf"


def _guard(m: Measured) -> str:
    guard = m.numbers["guard"]
    return f"{m.numbers['skipped']}, {guard['repaired']:,} of {guard['passes']:,}"


def _net(about: Mapping[str, Any]) -> str:
    return f"CNN with 128 features, {percent(about['accuracy'])} of {about['test_images']:,} test images right"


# ---- figures


def gan_figures(found: Found) -> Figures:
    """Curves at data, for each kind; samples, and reconstructions of test images, of the first seed."""
    drawn: dict[str, Any] = {}
    runs = _runs(found)
    for kind in KINDS:
        prefix = f"{flow_runs.TITLES[kind]}, "
        own = {run.title.removeprefix(prefix): seeds.values() for run, seeds in runs.items() if run.kind == kind}
        if not own:
            continue
        panels = {
            title: {name: [m.curve(what) for m in ms] for name, ms in own.items()}
            for what, title in {
                "test_bits": "test bits per dimension",
                "error": "median error of an image",
                "condition": "condition number at data",
            }.items()
        }
        drawn[f"training-{kind}"] = figures.curves(panels, xlabel="step")
    first = {run.title: next(iter(seeds.values())) for run, seeds in runs.items()}
    for what, rows in {"samples": "", "data": "input\nreconstr."}.items():
        groups = {t: (m.arrays[f"images_{what}"], m.arrays[f"broken_{what}"]) for t, m in first.items()}
        if groups:
            notes = {t: _note(m, what) for t, m in first.items()}
            drawn["samples" if what == "samples" else "reconstructions"] = figures.reconstructions(
                groups, notes=notes, rows=rows
            )
    return drawn


def _note(m: Measured, what: str) -> str:
    return shares(m.numbers["data"]) if what == "data" else f"FID {_fid(m.numbers['samples'])}"
