"""Regression of one 2-D Gaussian on another that lies almost on a line: what it does to the inverse, and what a penalty does to that.

Inputs x are standard normal; the targets are y1 with variance 1e-24 and y2 = x2. A network that fits them contracts the plane to a
line, and nothing in the loss objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilip import Bijection, Chain
from bilip.blocks import ActNorm, AffineCoupling, Permutation, Split
from bilip.blocks.scale import SIGMOID
from bilip.data import seed_of
from bilip.nets import MLP
from bilip.objectives import Regression
from bilip.recipes import figures
from bilip.recipes.plane import condition
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require, sized, sizes_of
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty
from bilip.training import Task

__all__ = ["RECIPE", "Config"]


@dataclass(frozen=True)
class Config:
    """Sizes and schedules: the values of the size `paper`, and in `sized` those of other sizes where they differ."""

    # Of both hidden layers of every net: 128 says the paper, 10 its code. One model for each.
    widths: tuple[int, ...] = sized((128, 10), quick=(10,))
    blocks: int = 24  # affine blocks, each after an ActNorm and a reversal
    points: int = 10_000  # of the data
    batch: int = sized(10_000, quick=1000)  # points in each step; all of them is the full batch
    lr: float = sized(1e-4, quick=4e-3)  # learning rate of Adam
    steps: int = sized(40_000, gpu=10_000, quick=3000)  # training steps
    nf: tuple[float, ...] = (1e-8, 1e-6)  # weights of the flow-likelihood penalty; one model for each
    fd: float = 1e-8  # weight of the finite-difference penalty
    fd_eps: float = 0.1  # its step
    fd_every: int = 10  # training steps from one such penalty to the next
    evaluate_every: int = sized(200, quick=300)  # steps from one point of the curves to the next

    def __post_init__(self) -> None:
        require(self, filled=("widths", "nf") if self.nf else ("widths",), free=("nf",))


class Regression2D(Recipe):
    """Reconstruction error and condition number, with and without a penalty."""

    name = "regression_2d"
    where = "figures of the 2D regression task"
    claim = "Regression onto a line makes a Glow model non-invertible; the flow likelihood with a tiny weight keeps it stable."
    sizes: Mapping[str, Config] = sizes_of(Config)
    cost: Mapping[str, str] = {
        "quick": "under 3 minutes a seed on two cores",
        "gpu": "3 minutes a seed on one H200, with --jobs 8 under CUDA's MPS",
        "paper": "11 minutes a seed on one H200, with --jobs 8 under CUDA's MPS",
    }
    matched = (
        "ActNorm begins as the identity; scale sigmoid(s + 2) + 1e-6; last layers are not started at zero.",
        "The flow likelihood is in nats per point, the squared error is the mean over points and coordinates.",
    )
    corrected = (
        "Hidden width 128 as in the paper and 10 as in the code, both (quick: 10). Couplings scale, then shift, as the paper's "
        "formula says; the code shifts first.",
        "The log-determinants of ActNorm (counted twice in the original) and of the scale (1e-6 left out) are exact.",
        "Both weights of the flow likelihood: 1e-8 as in the paper, 1e-6 as in the command of the original code's README.",
    )

    def kinds(self, config: Config) -> list[str]:
        """Without a penalty, and with each of them."""
        return ["plain", *(f"nf{weight!r}" for weight in config.nf), "fd"]

    def parts(self, config: Config) -> Sequence[str]:
        return [f"{kind}-{width}" for width in config.widths for kind in self.kinds(config)]

    def run(self, part: str, config: Config, work: Work) -> Measured:
        kind, _, width = part.rpartition("-")
        torch.manual_seed(seed_of(work.seed, 0, "weights"))
        model = make_model(config, int(width))
        x, y = make_data(config.points, seed_of(work.seed, 0, "points"))
        penalties = make_penalties(kind, config)

        def batch(draw: Callable[[str], int]) -> tuple[Tensor, Tensor]:
            if config.batch >= config.points:
                return x, y
            rows = torch.randperm(config.points, generator=torch.Generator().manual_seed(draw("data")))[: config.batch]
            return x[rows], y[rows]

        at = x.to(work.device), y.to(work.device)
        work.train(
            Task(model, batch, Regression(penalties), lambda m, done: evaluate(m, *at), penalties),
            until=0.95,
            steps=config.steps,
            lr=config.lr,
            evaluate_every=config.evaluate_every,
        )
        if not work.main:
            return Measured({})
        numbers = evaluate(model.eval(), *at)
        z, back = round_trip(model, at[0])
        arrays = {"x": at[0], "y": at[1], "z": z, "back": back}
        found = {name: value[:2000].cpu().numpy() for name, value in arrays.items()}
        skipped = {type(p).__name__: p.skipped for p in penalties}
        return Measured({**numbers, "skipped": skipped}, found | work.evaluations())

    def lines(self, config: Config, found: Found) -> list[Line]:
        said, orders = self.paper()["in_short"], self.paper()["orders_of_magnitude"]
        lines = []
        for width in config.widths:
            parts = {kind: [found[seed][f"{kind}-{width}"].numbers for seed in found] for kind in self.kinds(config)}
            plain = parts["plain"]
            for kind, numbers in parts.items():
                title = f"{_title(kind)}, width {width}"
                papers = kind == PAPERS_KIND
                lines.append(Line(f"{title}: squared error", said["mse"] if papers else "", _each(numbers, "mse")))
                lines.append(Line(f"{title}: reconstruction error", said.get(kind, ""), _each(numbers, "error_mean")))
                lost = ", ".join(f"{100 * n['share_above_1']:.2g} %" for n in numbers)
                lines.append(Line(f"{title}: points lost, error above 1", "", lost))
                lines.append(Line(f"{title}: condition number", "", _each(numbers, "condition")))
                if kind == "plain":
                    continue
                gains = {q: [_orders(a, b, _FIELDS[q]) for a, b in zip(plain, numbers, strict=True)] for q in orders}
                shown = {q: [f"{round(gain, 1) + 0.0:.1f}" for gain in each] for q, each in gains.items()}  # no -0.0
                below = "orders of magnitude below no penalty"
                if papers:
                    lines += [
                        Line(
                            f"{title}: {q.replace('_', ' ')}, {below}",
                            said[q],
                            ", ".join(shown[q]),
                            all(gain >= least for gain in gains[q]),
                        )
                        for q, least in orders.items()
                    ]
                else:
                    both = "; ".join(map(" and ".join, zip(*shown.values(), strict=True)))
                    lines.append(Line(f"{title}: error and condition number, {below}", "", both, key=True))
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        drawn: dict[str, Any] = {}
        for width in config.widths:
            kinds, first = self.kinds(config), found[min(found)]
            arrays = {kind: first[f"{kind}-{width}"].arrays for kind in kinds}
            plain = arrays["plain"]
            panels: dict[str, list[Any]] = {"data": [("inputs x", plain["x"]), ("targets y", plain["y"])]}
            panels |= {_title(kind): [("reconstructions", a["back"])] for kind, a in arrays.items()}
            drawn[f"scatter-{width}"] = figures.scatters(panels, limit=(-6, 6))
            drawn[f"curves-{width}"] = figures.curves(
                {
                    label: {
                        _title(kind): [found[seed][f"{kind}-{width}"].curve(name) for seed in found] for kind in kinds
                    }
                    for name, label in _NAMES.items()
                }
            )
        return drawn


PAPERS_KIND = "nf1e-08"
_FIELDS = {"reconstruction_error": "error_mean", "condition_number": "condition"}
_NAMES = {"mse": "mean squared error", "error_mean": "mean reconstr. error", "condition": "condition, worst point"}


def make_data(points: int, seed: int, epsilon: float = 1e-24) -> tuple[Tensor, Tensor]:
    """Inputs, and targets almost on a line."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(points, 2, generator=generator)
    flat = math.sqrt(epsilon) * torch.randn(points, generator=generator)
    return x, torch.stack((flat, x[:, 1]), 1)


def make_model(config: Config, width: int) -> Chain:
    """ActNorm, reversal, affine coupling, so many times."""
    blocks: list[Bijection] = []
    for _ in range(config.blocks):
        net = MLP(1, 2, hidden=(width, width), activation="relu")
        coupling = AffineCoupling(net, scale=SIGMOID.floored(1e-6), partition=Split())
        blocks += [ActNorm(2, start="identity"), Permutation.reverse(2), coupling]
    return Chain(*blocks, shape=(2,))


def make_penalties(kind: str, config: Config) -> tuple[Penalty, ...]:
    """None, the flow likelihood, or finite differences."""
    if kind.startswith("nf"):
        return (FlowLikelihood(float(kind[2:])),)
    return (FiniteDifference(config.fd, config.fd_every, eps=config.fd_eps),) if kind == "fd" else ()


@torch.no_grad()
def round_trip(model: Bijection, x: Tensor) -> tuple[Tensor, Tensor]:
    """F(x) and F^-1(F(x))."""
    z = model(x)
    return z, model.inverse(z)


@torch.no_grad()
def evaluate(model: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Squared error, reconstruction errors, and the condition number at the point that is reconstructed worst, and in the median."""
    z, back = round_trip(model, x)
    error = (back.double() - x.double()).norm(dim=1)
    broken = ~torch.isfinite(error)
    worst = int(torch.where(broken, torch.inf, error).argmax())
    conditions = condition(model, torch.cat((x[worst : worst + 1], x[:200])))
    return {
        "mse": float((z - y).double().square().mean()),
        "error_mean": float(error.mean()),
        "error_median": float(torch.where(broken, torch.inf, error).median()),
        "error_worst": float(error[worst]),
        "share_above_1": float((~(error <= 1)).double().mean()),
        "share_non_finite": float(broken.double().mean()),
        "condition": float(conditions[0]),
        "condition_median": float(conditions[1:].median()),
    }


def _title(kind: str) -> str:
    return {"plain": "no penalty", "fd": "FD"}.get(kind, f"NF {kind[2:]}".replace("e-0", "e-"))


def _each(numbers: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{n[name]:.2g}" for n in numbers)


def _orders(plain: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float:
    """Orders of magnitude by which one is below the other; infinitely many below what is not finite."""
    a, b = (value if math.isfinite(value) else math.inf for value in (plain[name], other[name]))
    if a == b:
        return 0.0
    if a in (0.0, math.inf) or b in (0.0, math.inf):
        return math.inf if a > b else -math.inf
    return math.log10(a) - math.log10(b)


RECIPE = Regression2D()
