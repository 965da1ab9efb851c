"""Runs of the classifiers: the names of their parts, and tables and figures of whichever there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bilip.errors import InputError
from bilip.recipes import figures
from bilip.recipes.recipe import Figures, Found, Line, Measured, Topic, short

__all__ = ["GRID", "TABLE", "Run", "classifier_figures", "classifier_lines", "curve", "shown"]

PART = re.compile(
    r"(additive|affine)-(conv1x1|shuffle)-(none|guarded|nf|fd)([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)?(-inverse)?"
    r"(?:-every([1-9][0-9]*))?(?:-e([1-9][0-9]*))?"
)
TABLE = ("affine-conv1x1", "additive-conv1x1", "affine-shuffle", "additive-shuffle")
GRID = ("none", "fd1e-3", "fd1e-4", "fd5e-5", "nf1e-3", "nf1e-4", "nf1e-5")
POINTS = 1.5  # of accuracy: as much as a regularizer may cost
NAMES = {"affine-conv1x1": "affine conv", "additive-conv1x1": "additive conv", "affine-shuffle": "affine shuffle"}
NAMES["additive-shuffle"] = "additive shuffle"
Numbers = Mapping[str, Any]


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
                f"{part!r} names no run: expected, for example, {TABLE[0]}-none, -fd, -nf1e-4, -fd-every5 or -none-e10, "
                "with 1 or more behind -every and -e."
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


# ---- tables


class Runs:
    """The runs there are, by what they are and how long they were trained, seed by seed."""

    def __init__(self, found: Found) -> None:
        self.all: dict[tuple[Run, int], dict[int, Measured]] = {}
        for seed, parts in found.items():
            for part, measured in parts.items():
                run, epochs = Run.of(part), int(measured.numbers["epochs"])
                self.all.setdefault((run.plain, epochs), {})[seed] = measured

    def of(self, model: str, kind: str, *, weight: float | None = None, epochs: int) -> dict[int, Numbers]:
        """Numbers by seed of a run at the end of so many epochs; empty if there is none."""
        run = Run.of(f"{model}-{kind}").plain
        run = run if weight is None else run.weighing(weight)
        several = self.all.get((run, epochs), {})
        return {seed: {**m.numbers, **_turned(m)} for seed, m in several.items() if not m.numbers["diverged"]}

    def lengths(self, model: str) -> list[int]:
        """Numbers of epochs for which there are runs of a model, the longest first."""
        return sorted({epochs for run, epochs in self.all if run.model == model}, reverse=True)


def _turned(measured: Measured) -> dict[str, float]:
    """The largest angles that were seen between guarded and stored gradients, on the fixed batches and by the guard's own checks: as they
    are, and what remains with every ReLU on the side of the forward pass.
    """
    guard, found = measured.numbers.get("guard", {}), {}
    for name, curve, own in (
        ("turned", "log_angle_guarded", "worst_angle"),
        ("remaining", "log_angle_remaining", "worst_remaining"),
    ):
        values = [*measured.arrays.get(curve, []), guard.get(own, math.nan)]
        found[name] = max((float(value) for value in values if not math.isnan(value)), default=math.nan)
    return found


def classifier_lines(found: Found, paper: Mapping[str, Any]) -> list[Line]:
    """Every run beside the paper's row, then what the paper says of them, for the runs there are."""
    runs, lines = Runs(found), []
    models: list[str] = list(TABLE)
    kinds = ["none", "guarded", "fd", "nf"]

    def order(item: tuple[tuple[Run, int], Any]) -> tuple:
        (run, epochs), _ = item
        return -epochs, models.index(run.model), kinds.index(run.kind), -(run.weight or 0), run.mode, run.every or 0

    for (run, epochs), seeds in sorted(runs.all.items(), key=order):
        row = _row_of(run, paper)
        several = [m.numbers for m in seeds.values()]
        agree = [n["invertible"] == row["invertible"] for n in several if not n["diverged"]] if row else []
        times = several[0].get("strength", 1.0)
        factor = f" (here times {times:g})" if run.weight and times != 1 else ""
        lines.append(
            Line(
                f"{shown(run)}{factor}, {epochs} epochs",
                _text(row) if row else "",
                "; ".join(_text(_ours(n)) if not n["diverged"] else n["diverged"].partition(";")[0] for n in several),
                all(agree) if agree else None,
            )
        )
    for model in TABLE:
        for epochs in runs.lengths(model):
            lines += _regularized(runs, model, epochs, paper["table"])
    for epochs in runs.lengths(TABLE[0]):
        lines += _claims(runs, TABLE[0], epochs)
    return lines


def _regularized(runs: Runs, model: str, epochs: int, table: Mapping[str, Numbers]) -> list[Line]:
    """What the usual regularizers cost and gain."""
    lines, none = [], runs.of(model, "none", epochs=epochs)
    for kind in ("fd", "nf"):
        pairs = [(none[seed], n) for seed, n in runs.of(model, kind, epochs=epochs).items() if seed in none]
        if not pairs:
            continue
        before, after = table[f"{model}-none"], table[f"{model}-{kind}"]
        add, when = Topic(f"{NAMES[model]}, {kind.upper()} against none", lines).add, f"{epochs} epochs"
        gains = [100 * (b["test_accuracy"] - a["test_accuracy"]) for a, b in pairs]
        points = f"{after['accuracy'] - before['accuracy']:+.2f} points"
        add(f"accuracy, {when}", points, [f"{gain:+.2f}" for gain in gains], [gain >= -POINTS for gain in gains])
        said, what = _orders(before["condition"], after["condition"]), "condition number, orders of magnitude below"
        orders = [_orders(a["condition"], b["condition"]) for a, b in pairs]
        add(f"{what}, {when}", f"{said:.1f}", [f"{n:.1f}" for n in orders], [n >= said - 1 for n in orders])
    return lines


def _claims(runs: Runs, model: str, epochs: int) -> list[Line]:
    """What the paper says in prose, of affine conv."""
    lines: list[Line] = []
    none, when = runs.of(model, "none", epochs=epochs), f"{epochs} epochs"

    def add(what: str, said: str, several: Mapping[int, Numbers], text: Callable, rule: Callable | None) -> None:
        if several:
            holds = None if rule is None else all(rule(n) for n in several.values())
            lines.append(Line(f"{what}, {when}", said, "; ".join(map(text, several.values())), holds, key=rule is None))

    weak = runs.of(model, "fd", weight=5e-5, epochs=epochs)
    add("FD at 5e-5: invertible", "no, too small", weak, lambda n: _text(_ours(n)), lambda n: not n["invertible"])
    strong = {s: n for s, n in runs.of(model, "nf", weight=1e-3, epochs=epochs).items() if s in none}
    lost = {s: {"points": 100 * (none[s]["test_accuracy"] - n["test_accuracy"])} for s, n in strong.items()}
    add("NF at 1e-3 costs accuracy", "5.79 points", lost, lambda n: f"{n['points']:.2f}", lambda n: n["points"] >= 2)
    for kind, what in (
        ("fd-every1", "FD every step: invertible"),
        ("fd-every5", "FD every 5 steps: invertible"),
        ("fd-inverse", "FD of the inverse alone: invertible"),
    ):
        several = runs.of(model, kind, epochs=epochs)
        add(what, "yes", several, lambda n: _text(_ours(n)), lambda n: n["invertible"])
    trained = {
        kind: {s: n["train"]["cross_entropy"] for s, n in runs.of(model, kind, epochs=epochs).items()}
        for kind in ("none", "fd", "nf")
    }
    shared = set.intersection(*(set(values) for values in trained.values()))
    losses = {s: {kind: values[s] for kind, values in trained.items()} for s in sorted(shared)}
    add(
        "training loss (cross-entropy) without, with FD, with NF",
        "the failure does not show",
        losses,
        lambda n: ", ".join(f"{value:.3f}" for value in n.values()),
        lambda n: n["none"] <= 1.1 * min(n["fd"], n["nf"]),
    )
    guarded = {s: n for s, n in runs.of(model, "guarded", epochs=epochs).items() if s in none}
    add(
        "none, trained with guarded memory-saving gradients: accuracy against stored (points); angle at most (rad), and "
        "what no kink explains; steps repaired",
        "",
        {s: {**n, "gain": 100 * (n["test_accuracy"] - none[s]["test_accuracy"])} for s, n in guarded.items()},
        lambda n: (
            f"{n['gain']:+.2f}; {n['turned']:.1e}, {'not measured' if math.isnan(n['remaining']) else format(n['remaining'], '.1e')}; "
            f"{n['guard']['repaired']} of {n['guard']['steps']}"
        ),
        None,
    )
    return lines


def _row_of(run: Run, paper: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The paper's row for a run, in either of its tables."""
    for part, row in {**paper["table"], **paper["grid"]}.items():
        if Run.of(part).plain == run:
            return row
    return None


def _ours(numbers: Numbers) -> dict[str, Any]:
    error = numbers["error_mean"]
    return {
        "invertible": numbers["invertible"],
        "accuracy": 100 * numbers["test_accuracy"],
        "error": error,
        "lost": numbers["share_non_finite"],
        "condition": numbers["condition"],
        "sigma_min": numbers["sigma_min"],
        "sigma_max": numbers["sigma_max"],
    }


def _text(row: Mapping[str, Any]) -> str:
    lost = f" ({100 * row['lost']:.2g} % not finite)" if row.get("lost") else ""
    ends = f"SV {short(row['sigma_min'])} to {short(row['sigma_max'])}"
    inverted = "invertible" if row["invertible"] else "not invertible"
    return f"{inverted}, {row['accuracy']:.2f} %, error {short(row['error'])}{lost}, cond {short(row['condition'])}, {ends}"


def _orders(before: float, after: float) -> float:
    if not (math.isfinite(before) and math.isfinite(after)):
        return math.inf if math.isfinite(after) else -math.inf
    return math.log10(before) - math.log10(after)


def shown(run: Run) -> str:
    """A run in words."""
    kind = {"none": "none", "guarded": "none, guarded"}.get(run.kind)
    kind = kind or f"{run.kind.upper()} {run.weight:.0e}".replace("e-0", "e-")
    kind += " inverse" if run.mode == "inverse" else ""
    kind += f" every {run.every}" if run.every else ""
    return f"{NAMES[run.model]}, {kind}"


# ---- figures


PANELS = {
    "condition": "condition number",
    "sigma_min": "smallest singular value",
    "sigma_max": "largest singular value",
    "test_accuracy": "test accuracy",
    "error_mean": "mean reconstr. error",
    "share_non_finite": "share not finite",
}


def classifier_figures(found: Found) -> Figures:
    """The paper's four, each where there are runs for it: coefficients of NF and of FD for affine conv, and what regularizers do to affine
    and to additive conv.
    """
    runs, drawn = Runs(found), {}
    wanted: dict[str, tuple[str, Callable[[Run], bool], Sequence[str]]] = {
        "nf": (TABLE[0], lambda run: run.kind in ("none", "nf"), list(PANELS)[:4]),
        "fd": (TABLE[0], lambda run: run.kind in ("none", "fd"), list(PANELS)[:4]),
        "affine": (TABLE[0], _usual, list(PANELS)),
        "additive": (TABLE[1], _usual, list(PANELS)),
        "affine-shuffle": (TABLE[2], _usual, list(PANELS)),
        "additive-shuffle": (TABLE[3], _usual, list(PANELS)),
    }
    for name, (model, wants, panels) in wanted.items():
        chosen = _together(runs, model, wants)
        lost = [m.arrays["log_share_non_finite"].max() for seeds in chosen.values() for m in seeds.values()]
        panels = [panel for panel in panels if panel != "share_non_finite" or max(lost, default=0) > 0]
        if len(chosen) > 1 or (chosen and name == "affine"):
            drawn[name] = figures.curves(
                {
                    PANELS[panel]: {
                        _legend(run, seeds): [curve(m, panel) for m in seeds.values()] for run, seeds in chosen.items()
                    }
                    for panel in panels
                },
                xlabel="epoch",
                linear=[PANELS[panel] for panel in panels if panel in ("test_accuracy", "share_non_finite")],
            )
    return drawn


def _legend(run: Run, seeds: Mapping[int, Measured]) -> str:
    """The regularizer with the coefficient that was used."""
    times = next(iter(seeds.values())).numbers.get("strength", 1.0)
    return shown(run.weighing(run.weight * times) if run.weight else run).partition(", ")[2]


def _usual(run: Run) -> bool:
    usual = Run.of(f"{run.model}-{run.kind}")
    return run.kind == "guarded" or (run.weight == usual.weight and run.mode == "both" and not run.every)


def _together(runs: Runs, model: str, wants: Callable[[Run], bool]) -> dict[Run, dict[int, Measured]]:
    """The runs that belong in one figure: of one length, that for which there are most of them."""
    best: dict[Run, dict[int, Measured]] = {}
    for epochs in runs.lengths(model):
        some = {run: seeds for (run, length), seeds in runs.all.items() if length == epochs and run.model == model}
        some = {run: seeds for run, seeds in some.items() if wants(run)}
        best = some if len(some) > len(best) else best
    return dict(sorted(best.items(), key=lambda item: (item[0].kind != "none", item[0].kind, -(item[0].weight or 0))))


def curve(measured: Measured, name: str) -> tuple[list[float], list[float]]:
    """Epochs and values of what was measured along the way; where it was measured of fewer samples in the end, those too."""
    arrays, numbers = measured.arrays, measured.numbers
    epochs = [step * numbers["epochs"] / numbers["steps"] for step in arrays["log_step"].tolist()]
    values = arrays[f"log_{name}"].tolist()
    known = arrays["log_condition"].tolist() if name in ("condition", "sigma_min", "sigma_max") else []
    pairs = [
        (e, v) for k, (e, v) in enumerate(zip(epochs, values, strict=True)) if not known or not math.isnan(known[k])
    ]
    if known and "spectra" in numbers:
        same = [value for value in numbers["spectra"][name][:2] if not math.isnan(value)]
        pairs += [(numbers["epochs"], (min if name == "sigma_min" else max)(same))] if same else []
    return [e for e, _ in pairs], [v for _, v in pairs]
